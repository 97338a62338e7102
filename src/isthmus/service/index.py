"""A node's index: an engine that is kept up with the store while searches go on, and the encoder of its
vectors.

    manifest.json, generation-…, vectors-…    the engine's
    encoder          the dense retriever's encoder, if it was fitted here
    fitted           which encoder's vectors are searched, and the settings to load it again

Readers take `snapshot`, which is replaced in one assignment. If the index is lost or damaged, all of it is
built again from the store.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from isthmus.arrays import IntArray
from isthmus.encoders import Span, Vectors
from isthmus.engines import Change, EmbeddedEngine, Encoded, Engine
from isthmus.errors import ConfigError, DataError, IsthmusError, MissingExtra, ProtocolError, ServiceError
from isthmus.files import replacing
from isthmus.languages import DEFAULT, beyond_english
from isthmus.private import HashFamily
from isthmus.retrieval import Statistics
from isthmus.service import settings
from isthmus.service.candidates import Snapshot
from isthmus.service.encoding import (
    AnyQueries,
    LsaQueries,
    NoQueries,
    QueryEncoder,
    fit_lsa,
    load_lsa,
    ready_encoder,
    save_lsa,
)
from isthmus.service.stores import READ, DocumentStore
from isthmus.tables import Bundle

_log = logging.getLogger("isthmus.service")

BATCH, BATCH_CHARACTERS = 20_000, 1 << 25
"""Most changes that are indexed at once, and most characters of their texts."""
ENCODED = 4_000
"""Number of documents that are encoded at once."""
DOCUMENTS, AT_ONCE, SECONDS = 128, 16, 3.0
"""For a costly encoder: documents that are read at once, passages that are encoded at once, and seconds
between two commits."""
GROWN = 2.0
"""Factor by which documents must outnumber those that an encoder was fitted on before it is fitted again."""
FEW = 1_000
"""Number of dead versions of documents above which, if they also outnumber the live documents, the index is
rewritten."""
REMAINS = 24 * 3600.0
"""Seconds after which any dead version causes a rewrite, so that its words leave the disk."""


class SegmentManifest(Bundle):
    """The manifest of the previous release: its segments are built again, its encoder stays."""

    noun = "index"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A passage that is to be encoded: its document, its text with the title, its span of the body, and how
    many passages the document has."""

    handle: int
    text: str
    span: Span
    passages: int
    first: bool
    """Whether its document has no vector at all."""


class Index:
    """One writer, many readers. `update` indexes one batch of changes, `catch_up` all there are."""

    def __init__(
        self,
        folder: Path,
        store: DocumentStore,
        *,
        encoder: settings.EncoderSettings | None = None,
        family: HashFamily | None = None,
        engine: Engine | None = None,
        kind: type[Snapshot] = Snapshot,
    ) -> None:
        """`engine` is the embedded one by default. `kind` is the class of snapshots, which scores
        candidates."""
        self.folder, self.store = folder, store
        self.settings = encoder or settings.EncoderSettings()
        self._writing = threading.Lock()
        self._family = family
        folder.mkdir(parents=True, exist_ok=True)
        self.engine: Engine = engine or EmbeddedEngine(folder)
        self._fitted_on = 0
        self._encoder = self._opened_encoder()
        former = self._former_encoder()
        self.engine.recode(self._encoder.fingerprint, self._encoder.width, keep=former is not None)
        served = self._encoder if former is None or self._is_served() else former
        is_noted = (self.folder / "fitted").exists() and self._fitted()[0] == served.fingerprint
        if served is self._encoder and not is_noted:
            self._remember(served)
        self._complete = False
        self._queue: list[_Waiting] = []
        self._languages = set(store.languages())
        self.snapshot = kind(
            self.engine.reader, served, family=family, languages=beyond_english(self._languages)
        )

    def _opened_encoder(self) -> QueryEncoder:
        """Return the encoder that the settings name, or that was fitted here; `NoQueries` if there is none
        yet."""
        try:
            named = ready_encoder(self.settings)
        except (ConfigError, MissingExtra, ServiceError) as error:
            if self.settings.kind != "transformer" and not isinstance(error, ServiceError):
                raise
            _log.warning("searched by words alone until the node starts with its encoder: %s", error)
            return NoQueries()
        if named is not None:
            return named
        fingerprint, self._fitted_on = self._fitted()
        try:
            fitted = LsaQueries(load_lsa(self.folder / "encoder"))
        except (DataError, ProtocolError):  # absent or damaged: another is fitted
            fitted = None
        if fitted is None or fitted.fingerprint != fingerprint:
            self._fitted_on = 0
            return NoQueries()
        return fitted

    def _former_encoder(self) -> QueryEncoder | None:
        """Return the encoder of the existing vectors, if it is another than the wanted one and can still be
        loaded."""
        if self._is_served():
            return None
        with suppress(OSError, ValueError, KeyError, TypeError, IsthmusError):
            stated = json.loads((self.folder / "fitted").read_text(encoding="utf-8"))["settings"]
            path = Path(stated["path"]) if "path" in stated else None
            former = ready_encoder(settings.EncoderSettings(stated["kind"], stated["name"], path))
            encoder = former or LsaQueries(load_lsa(self.folder / "encoder"))
            return encoder if encoder.fingerprint == self.engine.encoder else None
        return None

    def _is_served(self) -> bool:
        """Whether the vectors that are searched were made by the wanted encoder."""
        return self.engine.encoder == (self._encoder.fingerprint if self._encoder.width else "")

    def _fitted(self) -> tuple[str, int]:
        """Return the fingerprint of the encoder in use, and how many documents it was fitted on."""
        try:
            fitted = json.loads((self.folder / "fitted").read_text(encoding="utf-8"))
            return str(fitted["encoder"]), int(fitted["documents"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        try:
            before = SegmentManifest.read(self.folder / "manifest").header
            return str(before["encoder"]), int(before["fitted_on"])
        except (DataError, ValueError, KeyError, TypeError):
            return "", 0

    def close(self) -> None:
        """Close the engine; searches that have begun can finish."""
        with self._writing:
            self.engine.close()

    def languages(self, principals: frozenset[str]) -> frozenset[str]:
        """Return the languages of the documents that these principals may see."""
        if not self.snapshot.languages:
            return self.snapshot.languages
        return beyond_english(self.store.languages(principals))

    @property
    def behind(self) -> int:
        """At most how many changes of the store are not in the index."""
        return max(0, self.store.latest() - self.snapshot.change)

    def share(self, statistics: Statistics | None) -> None:
        """Score with these statistics from the next search on."""
        with self._writing:
            self.snapshot = replace(self.snapshot, shared=statistics)

    def catch_up(self, tell: Callable[[int], None] = lambda done: None) -> int:
        """Index all changes of the store. `tell` is called with the number of changes after every batch.
        Returns their total."""
        total = 0
        while done := self.update():
            total += done
            tell(done)
        return total

    def update(self) -> int:
        """Index the next batch of changes, and fit the encoder if that is due. Returns the number
        of changes."""
        with self._writing:
            if self._outgrown():
                self._refit()
            if not self._complete and not self.is_costly:
                self._encode_missing()
            changes = self._next()
            if changes:
                self.engine.apply(changes)
                living = [each for each in changes if not each.removed]
                self._languages |= {each.language or DEFAULT for each in living}
                if self._encoder.width and not self.is_costly:
                    handles = np.array([each.change for each in living], dtype=np.int64)
                    self.engine.encode(*self._encoded(self._encoder, handles, living))
                self._show()
            else:
                self._forget_segments()
            if self.engine.wasted > max(FEW, len(self.snapshot)):
                self._rebuild("most of it is of documents that are gone")
            return len(changes)

    def _next(self) -> list[Change]:
        """Return the next changes, as many as are indexed at once."""
        changes: list[Change] = []
        after, characters = self.snapshot.change, 0
        while len(changes) < BATCH and characters < BATCH_CHARACTERS:
            more = self.store.changes(after, min(READ, BATCH - len(changes)))
            changes += more
            if len(more) < READ:
                break
            after = more[-1].change
            characters += sum(len(each.title) + len(each.body) for each in more)
        return changes

    def renew(self) -> None:
        """Make the engine's present documents visible to new searches."""
        with self._writing:
            self._show()

    def _show(self) -> None:
        encoder = self.snapshot.encoder
        if encoder is not self._encoder and self._is_served():
            encoder = self._encoder
            self._remember(encoder)
        languages = beyond_english(self._languages)
        self.snapshot = replace(
            self.snapshot, reader=self.engine.reader, encoder=encoder, languages=languages
        )

    # vectors

    def _outgrown(self) -> bool:
        """Whether the encoder is to be fitted on the silo's own texts, for the first time or again."""
        if self.settings.kind != "lsa" or self.settings.path is not None:
            return False
        documents = self.store.count()
        return documents > 0 and documents > GROWN * self._fitted_on

    def _refit(self) -> None:
        """Fit the encoder anew and give every document its new vector; searches go on with the old ones."""
        texts = [_joined(each.title, each.body) for each in self.store.living()]
        fitted = fit_lsa(texts, dimensions=self.settings.dimensions)
        self._fitted_on = max(1, len(texts))
        self._recode(LsaQueries(fitted), lambda: save_lsa(fitted, self.folder / "encoder"))

    def _recode(self, encoder: QueryEncoder, save: Callable[[], None]) -> None:
        """Give every document its vector of another encoder, which is saved first."""
        save()
        self.engine.recode(encoder.fingerprint, encoder.width, self._all_encoded(encoder))
        self._remember(encoder)
        self._encoder, self._complete = encoder, True
        self._show()

    def _remember(self, encoder: QueryEncoder) -> None:
        """Record the encoder whose vectors are searched, and the settings to load it again after a change of
        encoder."""
        wanted = {"kind": self.settings.kind, "name": self.settings.name}
        if self.settings.path is not None:
            wanted["path"] = str(self.settings.path)
        with replacing(self.folder / "fitted") as stream:
            fitted = {"encoder": encoder.fingerprint, "documents": self._fitted_on, "settings": wanted}
            stream.write(json.dumps(fitted).encode())

    def _all_encoded(self, encoder: QueryEncoder) -> Iterator[Encoded]:
        handles = self.engine.reader.handles()
        for some in np.array_split(handles, len(handles) // ENCODED + 1):
            yield self._encoded(encoder, some, self._texts(some))

    def _texts(self, handles: IntArray) -> list[Change]:
        """Return documents as the store has them now, without text if they are gone."""
        ids = self.engine.reader.ids(handles)
        drafts = self.store.get(ids)
        return [
            Change(id, at, False, *((drafts[id].title, drafts[id].body) if id in drafts else ("", "")))
            for id, at in zip(ids, handles.tolist(), strict=True)
        ]

    def _encode_missing(self) -> None:
        """Encode documents without a vector of this encoder: a process was killed, or the encoder is another
        one."""
        while len(handles := self.engine.unencoded(ENCODED)):
            self.engine.encode(*self._encoded(self._encoder, handles, self._texts(handles)))
            self._show()
        self._complete = True

    def _encoded(self, encoder: QueryEncoder, handles: IntArray, documents: Sequence[Change]) -> Encoded:
        """Encode whole documents at once, with an encoder that is not costly."""
        vectors = encoder.documents([_joined(each.title, each.body) for each in documents])
        return handles, vectors, [(0, len(each.body)) for each in documents]

    @property
    def encoder_name(self) -> str:
        """Display name of the encoder whose vectors are searched; of an endpoint, the model alone."""
        encoder, wanted = self.snapshot.encoder, self.settings
        if not isinstance(encoder, AnyQueries):
            return "lsa" if isinstance(encoder, LsaQueries) else encoder.fingerprint.partition("-")[0]
        if encoder is not self._encoder:
            return ""
        return wanted.path.name if wanted.path is not None else wanted.name.rpartition("#")[2]

    @property
    def is_costly(self) -> bool:
        """Whether documents are encoded in the background, by `encode`, and not while they are indexed."""
        return isinstance(self._encoder, AnyQueries)

    def encode(self, stopped: Callable[[], bool] = lambda: False) -> int:
        """Encode passages for a few seconds and commit. Returns how many got their vector, 0 when none was
        left.

        The first passages of all documents are encoded before the others. Indexing and searches go on
        meanwhile.
        """
        encoder = self._encoder
        if not isinstance(encoder, AnyQueries):
            return 0
        if not self._queue or (not self._queue[0].first and len(self.engine.unencoded(1))):
            self._queue = self._waiting(encoder)
        until = time.monotonic() + SECONDS
        parts: list[Vectors] = []
        try:
            for start in range(0, len(self._queue), AT_ONCE):
                parts.append(encoder.documents([each.text for each in self._queue[start : start + AT_ONCE]]))
                if stopped() or time.monotonic() > until:
                    break
        finally:  # keep what was encoded before a failure
            done = self._keep_encoded(encoder, parts) if parts else 0
        return done

    def _keep_encoded(self, encoder: AnyQueries, parts: Sequence[Vectors]) -> int:
        """Commit the vectors of the first waiting passages. Returns how many there were."""
        vectors = np.concatenate(parts)
        encoded = self._queue[: len(vectors)]
        with self._writing:
            if self._encoder is not encoder:
                self._queue = []
                return 0
            handles = np.array([each.handle for each in encoded], dtype=np.int64)
            spans, counts = [each.span for each in encoded], [each.passages for each in encoded]
            self.engine.encode(handles, vectors, spans, counts)
            self._queue = self._queue[len(vectors) :]
            self._show()
        return len(encoded)

    def _waiting(self, encoder: AnyQueries) -> list[_Waiting]:
        """Return passages of a few documents that have no vector, short ones first: the first passages of
        documents without any vector, or if there are none, all remaining passages of unfinished documents."""
        with self._writing:  # so that no document is removed before its lookup
            first = self.engine.unencoded(DOCUMENTS)
            known = {handle: set[Span]() for handle in first.tolist()} or self.engine.unfinished()
            texts_of = self._texts(np.array(list(known), dtype=np.int64))
        waiting = []
        for each in texts_of:
            spans = encoder.split(each.title, each.body)
            chosen = spans[:1] if len(first) else [span for span in spans if span not in known[each.change]]
            texts = encoder.passages(each.title, each.body, chosen)
            waiting += [
                _Waiting(each.change, text, span, len(spans), first=len(first) > 0)
                for text, span in zip(texts, chosen, strict=True)
            ]
        return sorted(waiting, key=lambda each: len(each.text))

    @property
    def unencoded(self) -> int:
        """How many documents are still to be encoded."""
        return max(0, len(self.snapshot) - self.engine.encoded) if self._encoder.width else 0

    def encode_all(self, tell: Callable[[int], None] = lambda done: None) -> None:
        """Encode all documents and do the engine's maintenance. `tell` is called with the number of documents
        that got a vector."""
        before = self.engine.encoded
        while self.encode() or self.maintain():
            tell(self.engine.encoded - before)
            before = self.engine.encoded

    def maintain(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Do a part of the engine's maintenance, if there is any. Returns whether there was."""
        if self.engine.wasted and time.time() - self.engine.wasted_since > REMAINS:
            self.compact()
            return True
        if not self.engine.maintain(stopped):
            return False
        with self._writing:
            self.engine.refresh()
            self._show()
        return True

    # maintenance

    def compact(self) -> None:
        """Rewrite the index, and an encoder that was fitted here, so that nothing of removed documents
        remains."""
        with self._writing:
            if self.engine.wasted:
                self._rebuild("nothing is to remain of documents that are gone")
                if isinstance(self._encoder, LsaQueries) and self.settings.path is None:
                    self._refit()  # fitted here, so it has words of removed documents

    def _rebuild(self, reason: str) -> None:
        _log.info("index %s is written anew: %s", self.folder, reason)
        self.engine.rebuild(self._all_changes())
        self._show()

    def _all_changes(self) -> Iterator[list[Change]]:
        """Yield all documents of the store in batches, up to the last change that is in the index."""
        batch: list[Change] = []
        for each in self.store.living():
            if each.change > self.snapshot.change:
                break
            batch.append(each)
            if len(batch) == BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    def _forget_segments(self) -> None:
        """Remove the index of the previous release: all its documents can be searched in this one."""
        for path in (self.folder / "manifest", *self.folder.glob("segment-*")):
            path.unlink(missing_ok=True)


def _joined(title: str, body: str) -> str:
    return f"{title}\n{body}" if title else body
