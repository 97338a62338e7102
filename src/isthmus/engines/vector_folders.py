"""The vectors of a node's encoder and, while another encoder takes its place, of both.

    encoder.json     the encoder whose vectors are searched, and the one whose vectors are coming
    vectors-…        a `VectorIndex` for each

Vectors that are coming are searched once every document has one. Both folders outlive the process, so that
encoding goes on where it ended, and damage elsewhere costs no vector.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.arrays import IntArray
from isthmus.encoders import Span, Vectors
from isthmus.engines.engine import Encoded
from isthmus.engines.vectors import VectorIndex, VectorReader
from isthmus.errors import DataError
from isthmus.files import replacing

MOST_UNFINISHED = 64
_STATE = "encoder.json"


class VectorFolders:
    """One writer; `reader` is for all threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        self._served, self._coming = (self._opened(state.get(key)) for key in ("served", "coming"))
        self._pruned = False

    def _opened(self, named: Sequence[Any] | None) -> VectorIndex | None:
        """Vectors of an encoder, by name and width; damaged ones are made again."""
        if not named:
            return None
        name, width = str(named[0]), int(named[1])
        folder = self._folder(name)
        try:
            return VectorIndex.open(folder, width, name)
        except DataError:
            shutil.rmtree(folder, ignore_errors=True)
            return VectorIndex.open(folder, width, name)

    def _folder(self, name: str) -> Path:
        return self.folder / f"vectors-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"

    @property
    def encoder(self) -> str:
        """The encoder whose vectors are searched; "" without."""
        return "" if self._served is None else self._served.fingerprint

    @property
    def reader(self) -> VectorReader | None:
        """The vectors that are searched, as they are now."""
        return None if self._served is None else self._served.reader

    @property
    def _filled(self) -> VectorIndex | None:
        """Where vectors are added."""
        return self._coming or self._served

    @property
    def encoded(self) -> int:
        """How many documents have a vector of the encoder that is filled in."""
        return 0 if self._filled is None else len(self._filled.reader)

    def unencoded(self, handles: IntArray) -> IntArray:
        """Those of some documents that have no vector of the encoder that is filled in."""
        return handles[:0] if self._filled is None else handles[~self._filled.reader.known(handles)]

    def unfinished(self) -> dict[int, set[Span]]:
        """Some documents with vectors of some passages and not of others, and the spans that have one."""
        if self._filled is None:
            return {}
        reader = self._filled.reader
        return {change: set(reader.spans(change)) for change in reader.unfinished[:MOST_UNFINISHED].tolist()}

    def add(
        self,
        handles: IntArray,
        vectors: Vectors,
        spans: Sequence[Span],
        passages: Sequence[int] | None = None,
    ) -> None:
        """Add passages, on disk when this returns; see `VectorIndex.add`."""
        if self._filled is not None:
            self._filled.add(handles, vectors, spans, passages=passages)
            self._filled.commit()

    def remove(self, handles: IntArray) -> None:
        """Remove documents, from disk too."""
        for index in (self._served, self._coming):
            if index is not None:
                index.remove(handles)
                index.commit()

    def recode(
        self, name: str, width: int, batches: Iterable[Encoded] | None = None, *, keep: bool = True
    ) -> None:
        """Take vectors of another encoder, none of width 0.

        With `batches` they all come now; without, as `add` brings them, in this process or a later one, until
        `swap`. What had come of a third encoder is removed; so are the vectors that are searched, unless they
        are to be kept until then.
        """
        if self._coming is not None and self._coming.fingerprint != name:
            self._coming.close()
            self._coming = None
        if self._served is not None and self._served.fingerprint == name and batches is None:
            self._save()
            return
        if batches is not None and self._coming is None:
            shutil.rmtree(self._folder(name), ignore_errors=True)
        if self._coming is None and width:
            self._coming = self._opened([name, width])
        if self._coming is not None:
            for handles, vectors, spans in batches or ():
                self._coming.add(handles, vectors, spans)
            self._coming.commit()
        if not width or batches is not None or self._served is None or not keep:
            self.swap()
        else:
            self._save()

    @property
    def is_coming(self) -> bool:
        """Whether vectors of another encoder are coming."""
        return self._coming is not None

    def swap(self) -> None:
        """Search the vectors that have come, in place of the old ones."""
        old, self._served, self._coming = self._served, self._coming, None
        self._save()
        if old is not None:
            old.close()

    def _save(self) -> None:
        named = {"served": self._served, "coming": self._coming}
        state = {key: [index.fingerprint, index.width] for key, index in named.items() if index is not None}
        with replacing(self.folder / _STATE) as stream:
            stream.write(json.dumps(state).encode())
        folders = {index.folder for index in named.values() if index is not None}
        for path in self.folder.glob("vectors-*"):
            if path not in folders:
                shutil.rmtree(path, ignore_errors=True)

    def maintain(
        self, gone: Callable[[IntArray], IntArray], stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Do a piece of slow work, if there is any: whether there was. Another thread may write meanwhile.

        `gone` says which of some documents are not there any more: they may have gone while another process
        rebuilt everything else.
        """
        served = self._served
        if served is None:
            return False
        if not self._pruned:
            self._pruned = True
            served.remove(gone(served.reader.documents.astype(np.int64)))
            served.commit()
        return served.maintain(stopped)

    def compact(self) -> None:
        """Let nothing remain of vectors of documents that are gone."""
        for index in (self._served, self._coming):
            if index is not None:
                index.compact()

    def close(self) -> None:
        """Close the files; readers stay usable."""
        for index in (self._served, self._coming):
            if index is not None:
                index.close()
