"""Collection statistics that a silo releases: exact, or private with noise that is drawn once and stored.

A private release is charged to every document that it covers, then stored, and only then returned. It is
drawn anew when enough documents have changed and the budget allows it; otherwise the stored release is
returned again, which costs nothing. Every draw has a random name of its own, in the ledger and in the file.
If the file is lost, the statistics are charged a second time, because the same noise cannot be drawn again.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from isthmus.arrays import IntArray
from isthmus.errors import BudgetExhausted, ProtocolError, Refused
from isthmus.private import Covered, HashFamily, release_costs, released
from isthmus.private.ledger import Ledger, fingerprint
from isthmus.retrieval import FIELD_TABLES, TEXT, Statistics
from isthmus.service.candidates import Snapshot
from isthmus.service.index import Index
from isthmus.service.settings import NodeSettings
from isthmus.service.statistics import etag
from isthmus.tables import OWN, replacing

_log = logging.getLogger("isthmus.service")


class Releases:
    """Releases the statistics of one silo, the same for every peer and every request."""

    def __init__(self, settings: NodeSettings, ledger: Ledger, index: Index, family: HashFamily) -> None:
        self.silo, self.settings = settings.silo, settings.statistics
        self._by_subject, self._per_subject = settings.unit == "subject", settings.per_subject
        self.ledger, self.index, self.family = ledger, index, family
        self._file = released_file(settings)
        self._lock = threading.Lock()
        self._recorded: set[tuple[str, str]] = set()
        self._charged: set[tuple[str, str]] = set()
        self._refused: set[str] = set()
        self._cached: Statistics | None = None
        self._packed: tuple[object, bytes] | None = None
        last = self._last()
        if last is not None:
            ledger.expect(int(last.about.get("ledger", 0)), self._file)

    def to(self, peer: str) -> bytes:
        """Return the packed statistics, as the silo allows them; raises Refused or BudgetExhausted."""
        with self._lock:
            if self.settings.form == "none":
                raise Refused("this silo does not share statistics")
            return self._exact(peer) if self.settings.form == "exact" else self._private(peer)

    def forget(self, documents: Collection[str]) -> bool:
        """Remove documents from those listed in the last release. Returns whether any was listed."""
        with self._lock:
            release = self._last()
            if release is None:
                return False
            about = release.about
            pairs = list(zip(about["documents"], about["versions"], strict=True))
            rest = [pair for pair in pairs if pair[0] not in documents]
            if len(rest) == len(pairs):
                return False
            names, versions = ([pair[at] for pair in rest] for at in (0, 1))
            release = replace(release, about={**about, "documents": names, "versions": versions})
            with replacing(self._file) as stream:
                stream.write(release.to_bytes())
            self._cached = release
            return True

    @property
    def _tables(self) -> tuple[str, ...]:
        return (TEXT, *FIELD_TABLES) if self.settings.fields else (TEXT,)

    def _packed_as(self, source: object, statistics: Callable[[], Statistics]) -> bytes:
        """Pack statistics, once for each `source`: a broker asks often, and they seldom change."""
        if self._packed is None or self._packed[0] is not source:
            self._packed = (source, statistics().to_bytes())
        return self._packed[1]

    def _exact(self, peer: str) -> bytes:
        snapshot = self.index.snapshot
        packed = self._packed_as(snapshot.reader, lambda: snapshot.exact_statistics(self.silo, self._tables))
        if (peer, etag(packed)) not in self._recorded:
            self.ledger.record("sums", peer, note="exact term statistics")
            self._recorded.add((peer, etag(packed)))
        return packed

    def _private(self, peer: str) -> bytes:
        release = self._last()
        if release is None or self._is_stale(release):
            try:
                release = self._drawn(peer)
            except BudgetExhausted as error:
                if release is None:
                    if peer not in self._refused:
                        self._refused.add(peer)
                        _log.warning("no statistics leave for %s: %s", peer, error)
                    raise
        self._charge(release, peer)
        public = replace(release, about={})
        return self._packed_as(release, lambda: public)

    def _last(self) -> Statistics | None:
        """The release on disk; None if there is none or it cannot be read."""
        if self._cached is None and self._file.exists():
            try:
                self._cached = Statistics.from_bytes(self._file.read_bytes(), most=OWN)
            except ProtocolError as error:
                _log.warning("%s cannot be read and is drawn and charged anew: %s", self._file, error)
        return self._cached

    def _is_stale(self, release: Statistics) -> bool:
        """Whether settings differ from the release's, or more than the share `renew` of documents has
        changed.

        Changed documents count, not changes: one that is edited every day does not spend the budget of
        others.
        """
        if set(release.tables) != set(self._tables) or release.epsilon != self.settings.epsilon:
            return True
        if release.hashing != self.family.public_name:
            return True
        since, documents = int(release.about["change"]), release.about.get("collection", release.documents)
        return outdated(self.index.snapshot, since, int(documents), self.settings.renew)

    def _drawn(self, peer: str) -> Statistics:
        """Draw noise, charge the ledger and store the release, whose list of documents never leaves."""
        snapshot = self.index.snapshot
        every = counted_documents(snapshot, self.index, self.ledger, by_subject=self._by_subject)
        covered, handles, _ = every.bounded(self.ledger, self._per_subject)
        about = {
            "draw": secrets.token_hex(16),
            "change": snapshot.change,
            "collection": len(snapshot),
            "documents": list(covered.documents),
            "versions": list(covered.versions),
        }
        # the number and lengths of all documents are public; words count only in documents that are charged
        exact = snapshot.exact_statistics(self.silo, self._tables, handles)
        beyond = len(every.handles) - len(handles)
        if beyond:  # leave out documents beyond subjects' limits, each with the average length
            share = 1 - beyond / exact.documents
            lengths = {name: round(share * length) for name, length in exact.lengths.items()}
            exact = replace(exact, documents=exact.documents - beyond, lengths=lengths)
        drawn = replace(released(exact, self.family, self.settings.epsilon), about=about)
        self._charge(drawn, peer)
        drawn = replace(drawn, about={**about, "ledger": self.ledger.number})
        with replacing(self._file) as stream:
            stream.write(drawn.to_bytes())
        self._cached = drawn
        return drawn

    def _charge(self, statistics: Statistics, peer: str) -> None:
        """Charge a release to a peer; a second charge of the same release costs nothing."""
        draw = _draw_of(statistics)
        if (peer, draw) not in self._charged:
            covered = Covered(tuple(statistics.about["documents"]), tuple(statistics.about["versions"]))
            charges = release_costs(statistics.tables, statistics.epsilon or 0.0, draw)
            self.ledger.charge_all([(cost, covered, peer) for cost in charges], kind="sums")
            self._charged.add((peer, draw))


class CountedDocuments(NamedTuple):
    """Documents that a release counts, their handles, and the subject of each ("" for none)."""

    covered: Covered
    handles: IntArray
    subjects: list[str]

    def bounded(self, ledger: Ledger, per_subject: int) -> CountedDocuments:
        """Return at most `per_subject` documents of each subject, chosen regardless of their text."""
        if not any(self.subjects):
            return self
        rows = np.flatnonzero(~ledger.copies(self.covered, per_subject=per_subject))
        some = rows.tolist()
        return CountedDocuments(
            self.covered.take(some), self.handles[rows], [self.subjects[at] for at in some]
        )


def counted_documents(
    snapshot: Snapshot, index: Index, ledger: Ledger, *, by_subject: bool
) -> CountedDocuments:
    """Return the documents that a release may count, one of each group with the same text. Their subjects are
    stored in the ledger before any of their data leave."""
    handles = snapshot.reader.handles()
    names = snapshot.reader.ids(handles)
    texts = index.store.get(names)
    there = [at for at, name in enumerate(names) if name in texts]
    names = [names[at] for at in there]
    digests = [fingerprint(texts[name].title, texts[name].body) for name in names]
    covered = ledger.versions(names, digests)
    subjects = [texts[name].subject if by_subject else "" for name in names]
    ledger.assign(dict(zip(names, subjects, strict=True)))
    counted = np.flatnonzero(~ledger.copies(covered))
    rows = counted.tolist()
    return CountedDocuments(covered.take(rows), handles[there][counted], [subjects[at] for at in rows])


def outdated(snapshot: Snapshot, since: int, documents: int, renew: float) -> bool:
    """Whether more than the share `renew` of documents is new, changed or gone since the change number
    `since`, when there were `documents` of them."""
    same = len(snapshot) - snapshot.reader.changed_after(since)
    return max(len(snapshot), documents) - same > max(1.0, renew * documents)


def released_file(settings: NodeSettings) -> Path:
    """The path of the last release."""
    return settings.folder / "released.statistics"


def _draw_of(statistics: Statistics) -> str:
    """Name of a release's draw of noise; in older files, the number of a refresh."""
    about = statistics.about
    return f"draw {about['draw']}" if "draw" in about else f"refresh {int(about['refresh'])}"
