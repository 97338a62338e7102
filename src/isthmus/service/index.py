"""A node's index: segments on disk, kept up with the store while searches go on.

    manifest         which segments, what is gone from each, and the store's last change that is in them
    encoder          the dense retriever's encoder, where it was fitted here
    space            directions that silos share, where they have learned together
    segment-000007   one segment

The manifest is replaced whole after the segments it names are on disk, so a process killed at any point finds
the index as it was after some batch, and asks the store for what came later. Readers take `snapshot`, which
is swapped in one assignment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from isthmus.encoders import Vectors
from isthmus.errors import DataError, ProtocolError
from isthmus.private import HashFamily
from isthmus.retrieval import Statistics
from isthmus.service import settings
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
from isthmus.service.segments import Segment, build, merge
from isthmus.service.snapshot import Part, Snapshot
from isthmus.service.space import Space, SpaceQueries
from isthmus.service.stores import Change, DocumentStore
from isthmus.tables import Bundle

BATCH = 4_000
"""Changes that become one segment at once."""
MOST_SEGMENTS = 6
GROWN = 2.0
"""A fitted encoder is fitted again when there are so many times the documents it was fitted on."""


@dataclass(frozen=True)
class Manifest(Bundle):
    """What the index consists of."""

    noun = "index"


class Index:
    """One writer, many readers. `update` does one batch; `catch_up` all there is to do."""

    def __init__(
        self,
        folder: Path,
        store: DocumentStore,
        *,
        encoder: settings.EncoderSettings | None = None,
        family: HashFamily | None = None,
    ) -> None:
        self.folder, self.store = folder, store
        self.settings = encoder or settings.EncoderSettings()
        self._writing = threading.Lock()
        self._fitted_on = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._number = 0
        self._family = family
        self.snapshot = replace(self._opened(), family=family)

    def _opened(self) -> Snapshot:
        """The index as it is on disk; nothing, to be built from the store, where it is not whole."""
        named = ready_encoder(self.settings)
        snapshot = self._read(named)
        self._forget_others(() if snapshot is None else snapshot.parts)
        return Snapshot((), named or NoQueries()) if snapshot is None else snapshot

    def _read(self, named: QueryEncoder | None) -> Snapshot | None:
        try:
            manifest = Manifest.read(self.folder / "manifest")
            encoder = named or self._fitted(manifest.header["encoder"])
        except (DataError, ProtocolError):  # absent or damaged: all that is in it the store has too
            return None
        parts = self._parts(manifest)
        if parts is None or manifest.header["encoder"] != encoder.fingerprint:
            return None
        self._fitted_on, self._number = manifest.header["fitted_on"], manifest.header["number"]
        return Snapshot(tuple(parts), encoder, manifest.header["change"])

    def _fitted(self, fingerprint: str) -> QueryEncoder:
        """The encoder that was fitted here, or by all silos."""
        if self._family is not None and fingerprint.startswith("space-"):
            return SpaceQueries(Space.load(self.folder / "space"), self._family)
        return LsaQueries(load_lsa(self.folder / "encoder"))

    def _parts(self, manifest: Manifest) -> list[Part] | None:
        parts = []
        for name in manifest.header["segments"]:
            segment = Segment.open(self.folder, name)
            if segment is None:
                return None
            gone = manifest.arrays.get(f"gone/{name}")
            alive = None
            if gone is not None:
                alive = np.ones(len(segment), dtype=bool)
                alive[gone] = False
            parts.append(Part(segment, alive))
        return parts

    def _forget_others(self, parts: Sequence[Part]) -> None:
        """Remove segments of a process that was killed before it named them."""
        named = {part.segment.name for part in parts}
        for path in self.folder.glob("segment-*"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    @property
    def behind(self) -> int:
        """How many changes of the store are not in the index, at most."""
        return max(0, self.store.latest() - self.snapshot.change)

    def share(self, figures: Statistics | None) -> None:
        """Score with these figures from the next search on."""
        with self._writing:
            self.snapshot = replace(self.snapshot, shared=figures)

    def adopt(self, space: Space) -> None:
        """Take directions that silos share, and give every document its vector in them."""
        if self.snapshot.family is None:
            raise ProtocolError("shared directions need the federation's hash key")
        encoder = SpaceQueries(space, self.snapshot.family)
        with self._writing:
            self._recode(encoder, lambda: space.save(self.folder / "space"))

    def catch_up(self, tell: Callable[[int], None] = lambda done: None) -> int:
        """Bring in everything the store has; `tell` hears the number of changes after every batch."""
        total = 0
        while done := self.update():
            total += done
            tell(done)
        return total

    def update(self) -> int:
        """Bring in the next batch of changes, fit the encoder if it is time; how many changes there were."""
        with self._writing:
            if self._outgrown():
                self._refit()
            changes = self.store.changes(self.snapshot.change, BATCH)
            if changes:
                self._swap(self._with(changes))
                self._merge_some()
            return len(changes)

    def _outgrown(self) -> bool:
        """Whether the encoder is to be fitted on the silo's own texts, for the first time or again."""
        if self.settings.kind != "lsa" or self.settings.path is not None:
            return False
        if isinstance(self.snapshot.encoder, SpaceQueries):  # the silos': learned together, or not at all
            return False
        documents = self.store.count()
        return documents > 0 and documents > GROWN * self._fitted_on

    def _refit(self) -> None:
        """Fit the encoder anew and give every document its new vector; searches go on with the old ones."""
        texts = [_whole(change) for change in self.store.living()]
        fitted = fit_lsa(texts, dimensions=self.settings.dimensions)
        self._fitted_on = max(1, len(texts))
        self._recode(LsaQueries(fitted), lambda: save_lsa(fitted, self.folder / "encoder"))

    def _recode(self, encoder: QueryEncoder, save: Callable[[], None]) -> None:
        """Give every document its vector of another encoder, which is saved before anything needs it."""
        parts = tuple(self._recoded(part, encoder) for part in self.snapshot.parts)
        save()
        self._swap(replace(self.snapshot, parts=parts, encoder=encoder))

    def _recoded(self, part: Part, encoder: QueryEncoder) -> Part:
        segment = part.segment
        vectors = np.zeros((len(segment), encoder.width), dtype=np.float32)
        living = np.flatnonzero(part.kept)
        for rows in np.array_split(living, max(1, len(living) // BATCH)):
            drafts = self.store.get([segment.ids[row] for row in rows.tolist()])
            texts = [drafts.get(segment.ids[row]) for row in rows.tolist()]
            vectors[rows] = encoder.documents(
                ["" if text is None else _joined(text.title, text.body) for text in texts]
            )
        return replace(part, segment=self._saved(replace(segment, name=self._next(), vectors=vectors)))

    def _with(self, changes: Sequence[Change]) -> Snapshot:
        """The snapshot after some changes: older versions are gone, a new segment has the new ones."""
        old = self.snapshot
        touched = {change.id for change in changes}
        parts = [_without(part, touched) for part in old.parts]
        added = [change for change in changes if not change.removed]
        if added:
            vectors = self._vectors(old.encoder, added)
            parts.append(Part(self._saved(build(self._next(), added, vectors))))
        remaining = tuple(part for part in parts if part.documents)
        return replace(old, parts=remaining, change=changes[-1].change)

    def _vectors(self, encoder: QueryEncoder, added: Sequence[Change]) -> Vectors:
        """What the encoder makes of documents; what a costly one made before is kept in the store."""
        texts = [_whole(change) for change in added]
        if not isinstance(encoder, AnyQueries):
            return encoder.documents(texts)
        ids = [change.id for change in added]
        known = self.store.vectors(encoder.fingerprint, ids)
        missing = [at for at, id in enumerate(ids) if id not in known]
        if missing:
            encoded = encoder.documents([texts[at] for at in missing])
            self.store.keep_vectors(encoder.fingerprint, [ids[at] for at in missing], encoded)
            known |= {ids[at]: row for at, row in zip(missing, encoded, strict=True)}
        return np.stack([known[id] for id in ids]).astype(np.float32)

    def _merge_some(self) -> None:
        """Where there are many segments, or one with many dead, join the smaller ones, so that few remain."""
        parts = sorted(self.snapshot.parts, key=lambda part: part.documents)
        wasted = [part for part in parts if part.documents < 0.5 * len(part.segment)]
        if len(parts) > MOST_SEGMENTS:
            # whatever is smaller than all before it together joins them: sizes then grow geometrically
            chosen, total = parts[:2], parts[0].documents + parts[1].documents
            for part in parts[2:]:
                if part.documents > 2 * total and len(parts) - len(chosen) < MOST_SEGMENTS:
                    break
                chosen.append(part)
                total += part.documents
        elif wasted:
            chosen = wasted
        else:
            return
        self._join(chosen)

    def compact(self) -> None:
        """One segment without anything of documents that are gone."""
        with self._writing:
            parts = self.snapshot.parts
            if len(parts) > 1 or any(part.alive is not None for part in parts):
                self._join(parts)

    def _join(self, chosen: Sequence[Part]) -> None:
        joined = Part(self._saved(merge(self._next(), [(part.segment, part.kept) for part in chosen])))
        others = tuple(part for part in self.snapshot.parts if part not in chosen)
        self._swap(replace(self.snapshot, parts=(*others, joined)))

    def _next(self) -> str:
        self._number += 1
        return f"segment-{self._number:06d}"

    def _saved(self, segment: Segment) -> Segment:
        """On disk, and mapped from there, so that its pages can be given back."""
        segment.save(self.folder)
        return Segment.open(self.folder, segment.name) or segment

    def _swap(self, snapshot: Snapshot) -> None:
        """Name the new parts on disk, then show them to readers, then let go of the old ones."""
        gone = {
            f"gone/{part.segment.name}": np.flatnonzero(~part.alive)
            for part in snapshot.parts
            if part.alive is not None
        }
        header = {
            "encoder": snapshot.encoder.fingerprint,
            "segments": [part.segment.name for part in snapshot.parts],
            "change": snapshot.change,
            "fitted_on": self._fitted_on,
            "number": self._number,
        }
        Manifest(header, gone).write(self.folder / "manifest")
        self.snapshot = snapshot
        self._forget_others(snapshot.parts)


def _without(part: Part, touched: set[str]) -> Part:
    """The part without documents that were changed or removed."""
    rows = [row for row in map(part.segment.documents.find_descending, sorted(touched)) if row >= 0]
    if not rows:
        return part
    alive = part.kept.copy()
    alive[rows] = False
    return Part(part.segment, alive)


def _whole(change: Change) -> str:
    return _joined(change.title, change.body)


def _joined(title: str, body: str) -> str:
    return f"{title}\n{body}" if title else body
