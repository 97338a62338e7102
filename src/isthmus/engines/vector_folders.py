"""The vectors of a node's encoder and, while they are being replaced, those of the next encoder.

    encoder.json     the encoder whose vectors are searched, the one whose vectors are being added, those kept
    vectors-…        a `VectorIndex` for each

New vectors are searched once every document has one. All folders outlive the process, so that encoding
continues where it stopped, and damage to other files costs no vector. Vectors that took long to compute are
kept, though not searched, until every document has one of another slow encoder: a setting may be a mistake.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
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
_QUICK = ("lsa-",)
"""Prefixes of encoders whose vectors can be computed again in no time."""

_log = logging.getLogger("isthmus.service")


class VectorFolders:
    """The vectors of all encoders of a node. One thread writes; `reader` can be used from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        state = self._state()
        self._served, self._coming = (self._opened(state.get(key)) for key in ("served", "coming"))
        kept = (self._opened(named) for named in state.get("kept", ()))
        self._kept = [index for index in kept if index is not None]
        self._pruned: set[str] = set()

    def _state(self) -> dict[str, Any]:
        """The saved state. If its file is damaged, all vectors that exist are listed as kept, until one is
        wanted."""
        try:
            state: dict[str, Any] = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
            if not isinstance(state, dict):
                raise ValueError("it is no object")
            return state
        except FileNotFoundError:
            return {}
        except ValueError as error:
            _log.warning("%s is damaged and written again: %s", self.folder / _STATE, error)
        named = []
        for file in sorted(self.folder.glob("vectors-*/state")):
            try:
                stated = json.loads(file.read_text(encoding="utf-8"))
                named.append([stated["encoder"], stated["width"]])
            except (ValueError, KeyError, TypeError):
                continue
        return {"kept": named}

    def _opened(self, named: Sequence[Any] | None) -> VectorIndex | None:
        """The vectors of an encoder, by name and width. Damaged ones are replaced by an empty index; an
        OSError is not damage and is passed on."""
        if not named:
            return None
        name, width = str(named[0]), int(named[1])
        folder = self._folder(name)
        try:
            return VectorIndex.open(folder, width, name)
        except DataError as error:
            _log.warning("vectors of %s are damaged and made again: %s", name, error)
            shutil.rmtree(folder, ignore_errors=True)
            return VectorIndex.open(folder, width, name)

    def _folder(self, name: str) -> Path:
        return self.folder / f"vectors-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"

    @property
    def encoder(self) -> str:
        """The encoder whose vectors are searched; "" for none."""
        return "" if self._served is None else self._served.fingerprint

    @property
    def reader(self) -> VectorReader | None:
        """The vectors that are searched, as they are now."""
        return None if self._served is None else self._served.reader

    @property
    def _filled(self) -> VectorIndex | None:
        """The index to which vectors are added: that of the next encoder, if there is one."""
        return self._coming or self._served

    @property
    def encoded(self) -> int:
        """Number of documents that have a vector in the index that vectors are added to."""
        filled = self._filled
        return 0 if filled is None else len(filled.reader)

    def unencoded(self, handles: IntArray) -> IntArray:
        """The given documents that have no vector in the index that vectors are added to."""
        filled = self._filled
        return handles[:0] if filled is None else handles[~filled.reader.known(handles)]

    def unfinished(self) -> dict[int, set[Span]]:
        """Some documents of which only part of the passages have vectors, with the spans that do."""
        filled = self._filled
        if filled is None:
            return {}
        reader = filled.reader
        return {change: set(reader.spans(change)) for change in reader.unfinished[:MOST_UNFINISHED].tolist()}

    def add(
        self,
        handles: IntArray,
        vectors: Vectors,
        spans: Sequence[Span],
        passages: Sequence[int] | None = None,
    ) -> None:
        """Add passages, on disk when this returns; see `VectorIndex.add`."""
        filled = self._filled
        if filled is not None:
            filled.add(handles, vectors, spans, passages=passages)
            filled.commit()

    def remove(self, handles: IntArray) -> None:
        """Remove documents from all indexes, on disk too."""
        for index in self._all:
            index.remove(handles)
            index.commit()

    @property
    def _all(self) -> list[VectorIndex]:
        return [index for index in (self._coming, self._served, *self._kept) if index is not None]

    def recode(
        self, name: str, width: int, batches: Iterable[Encoded] | None = None, *, keep: bool = True
    ) -> None:
        """Change to the vectors of another encoder; width 0 removes vectors.

        With `batches` all are added now; otherwise `add` adds them, in this process or a later one, until
        `swap`. The old vectors are searched until then, unless `keep` is False.
        """
        if self._coming is not None and self._coming.fingerprint != name:
            self._set_aside(self._coming)
            self._coming = None
        if self._served is not None and self._served.fingerprint == name and batches is None:
            self._save()
            return
        if batches is not None and self._coming is None:
            shutil.rmtree(self._folder(name), ignore_errors=True)
        if self._coming is None and width:
            self._coming = self._taken_back(name) or self._opened([name, width])
        if self._coming is not None:
            for handles, vectors, spans in batches or ():
                self._coming.add(handles, vectors, spans)
            self._coming.commit()
        if not width or batches is not None or self._served is None or not keep:
            self._serve_coming()
        self._save()

    def _set_aside(self, index: VectorIndex) -> None:
        """Keep vectors that took long to compute, in case they are wanted again; close others."""
        if index.fingerprint.startswith(_QUICK) or not len(index.reader):
            index.close()
            return
        _log.info("vectors of %s are kept, not searched, in %s", index.fingerprint, index.folder)
        self._kept.append(index)

    def _taken_back(self, name: str) -> VectorIndex | None:
        index = next((index for index in self._kept if index.fingerprint == name), None)
        self._kept = [other for other in self._kept if other is not index]
        return index

    @property
    def is_changing(self) -> bool:
        """Whether there are vectors of another encoder besides those that are searched."""
        served = self._served
        is_slow = served is not None and not served.fingerprint.startswith(_QUICK)
        return self._coming is not None or (bool(self._kept) and is_slow)

    @property
    def is_grown(self) -> bool:
        """Whether the graph of the index that vectors are added to is up to date, so searches are fast."""
        filled = self._filled
        return filled is None or not filled.lags

    def swap(self) -> None:
        """Search the new vectors in place of the old ones; called once every document has one."""
        if self._coming is not None:
            self._serve_coming()
        if self._served is not None and not self._served.fingerprint.startswith(_QUICK):
            for index in self._kept:
                index.close()
            self._kept = []
        self._save()

    def _serve_coming(self) -> None:
        old, self._served, self._coming = self._served, self._coming, None
        if old is not None:
            self._set_aside(old)

    def _save(self) -> None:
        named = {"served": self._served, "coming": self._coming}
        state: dict[str, Any] = {
            key: [index.fingerprint, index.width] for key, index in named.items() if index is not None
        }
        state["kept"] = [[index.fingerprint, index.width] for index in self._kept]
        with replacing(self.folder / _STATE) as stream:
            stream.write(json.dumps(state).encode())
        folders = {index.folder for index in self._all}
        for path in self.folder.glob("vectors-*"):
            if path not in folders:
                shutil.rmtree(path, ignore_errors=True)

    def maintain(
        self, gone: Callable[[IntArray], IntArray], stopped: Callable[[], bool] = lambda: False
    ) -> bool:
        """Do one piece of slow work. Returns whether there was any. Another thread may write meanwhile.

        `gone` selects those of the given documents that no longer exist: they may have been removed while
        another process rebuilt everything else.
        """
        for index in self._all:
            if index.fingerprint not in self._pruned:
                self._pruned.add(index.fingerprint)
                index.remove(gone(index.reader.documents.astype(np.int64)))
                index.commit()
        return any(index.maintain(stopped) for index in (self._coming, self._served) if index is not None)

    def compact(self) -> None:
        """Remove from the files whatever remains of vectors of documents that are gone."""
        for index in self._all:
            index.compact()

    def close(self) -> None:
        """Close the files; readers stay usable."""
        for index in self._all:
            index.close()
