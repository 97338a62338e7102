"""The set of judgements about which a silo answers when it learns with others.

A peer that may ask twice sees a difference, so the set is fixed and kept in a file: a silo answers about
the whole of it, and another set replaces it only if at least `least_queries` queries differ, in every fold
in which any do. Judgements that a peer brought itself, or that a person made, hide nothing from that peer
or person and do not count, unless there are no others: queries that too few others judged wait until there
are more. Nothing is hidden from the operator, who has the store. Queries are dealt into folds by a hash
under the federation's key, so that every silo deals alike and no peer can choose the folds. Four folds
halve each of two, and eight each of four, so that asking for both tells no more.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from isthmus.errors import DataError, Refused
from isthmus.service.reliability import curves_of, save_curves
from isthmus.service.settings import OPERATOR, Learning, NodeSettings
from isthmus.service.stores import DocumentStore, Judgement, majority, naming
from isthmus.tables import replacing

FOLDS = (8, 4, 2)
"""Numbers of folds into which queries may be dealt, the largest first."""
DAY = 86_400.0
MOST_SESSIONS = 32
"""Most sessions about one set of judgements: comparing two sessions shows the part of a few queries."""
FORMATS = (1, 2)
"""Formats of the file that can be read; the last one is written."""

Voter = tuple[str, str]
"""The peer that brought a judgement, and the person who made it."""
Grades = Mapping[str, Mapping[str, bool]]
"""Whether a document was right, by query and document."""


def fold_of(query: str, folds: int, key: bytes) -> int:
    """Return the fold of a query, the same in every silo."""
    digest = hashlib.blake2b(
        query.encode("utf-8", "replace"), key=key, digest_size=8, person=b"isthmus folds"
    ).digest()
    return int.from_bytes(digest, "little") % folds


@dataclass
class JudgedSet:
    """The contents of the file of judgements: grades, voters, folds and sessions."""

    grades: dict[str, dict[str, bool]] = field(default_factory=dict)
    voters: dict[str, list[Voter]] = field(default_factory=dict)
    """The voters on hits of a query, by query."""
    folds: int = 0
    """Largest number of folds such that each differs from the set before in enough queries, or in none."""
    begun: int = 0
    """Number of sessions about this set so far."""
    sessions: list[tuple[str, float]] = field(default_factory=list)
    """Peer and time of the sessions of the last day."""

    @classmethod
    def of(cls, judgements: Iterable[Judgement]) -> JudgedSet:
        """Return the set of all judged queries, with the majority's grades."""
        every = list(judgements)
        new = cls()
        for (query, document), right in majority(every).items():
            new.grades.setdefault(query, {})[document] = right
        voters: dict[str, set[Voter]] = {}
        for each in every:
            voters.setdefault(each.query, set()).add((each.peer, each.person))
        new.voters = {query: sorted(who) for query, who in voters.items()}
        return new

    def leave(self, queries: Iterable[str], old: JudgedSet) -> None:
        """Keep these queries as they are in another set."""
        for query in queries:
            self.grades.pop(query, None)
            self.voters.pop(query, None)
            if query in old.grades:
                self.grades[query], self.voters[query] = old.grades[query], old.voters[query]

    def crowd(self, peer: str) -> frozenset[str]:
        """Return the queries with a judgement that came through another peer than this one; all if there are
        none."""
        others = {query for query in self.grades if any(name != peer for name, _ in self.voters[query])}
        return frozenset(others or self.grades)


class JudgedQueries:
    """A silo's set of judgements for learning, in a file."""

    def __init__(
        self,
        settings: NodeSettings,
        store: DocumentStore,
        *,
        key: bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.rules: Learning = settings.learning
        self.curves_file = settings.folder / "feedback.curves"
        self._silo, self._store, self._key, self._clock = settings.silo, store, key, clock
        self._path = settings.folder / "judged.json"
        self.current = _read(self._path)

    def refresh(self) -> JudgedSet:
        """Return the set, after replacing it by a new one if enough queries differ."""
        judgements = self._store.judgements()
        new, old = JudgedSet.of(judgements), self.current
        differing = everything = _differing(new, old)
        while exposed := self._exposed(differing):
            new.leave(exposed, old)
            differing = _differing(new, old)
        new.folds = self._hiding(differing)
        if not new.folds:
            return old
        new.sessions = old.sessions
        if differing == everything:  # otherwise curves would reveal queries that are held back
            save_curves(curves_of(self._silo, judgements), self.curves_file)
        self._keep(new)
        return new

    def forget(self, documents: Iterable[str], subject: str) -> bool:
        """Remove documents, and queries that name a subject, from the set. Returns whether any was in it."""
        gone, names = set(documents), naming(subject) if subject else None
        grades: dict[str, dict[str, bool]] = {}
        for query, graded in self.current.grades.items():
            rest = {document: right for document, right in graded.items() if document not in gone}
            if rest and not (names and names.search(query)):
                grades[query] = rest
        if grades == self.current.grades:
            return False
        voters = {query: self.current.voters[query] for query in grades}
        self._keep(replace(self.current, grades=grades, voters=voters))
        return True

    def _exposed(self, differing: Mapping[str, set[Voter]]) -> list[str]:
        """Return queries that must wait: they differ by too few judgements of others to hide these from a
        person or a peer."""
        for voter in {voter for who in differing.values() for voter in who if voter[0] != OPERATOR}:
            others = [query for query, who in differing.items() if who != {voter}]
            if 0 < len(others) < self.rules.least_queries:
                return others
        return next((others for others in _of_others(differing) if not self._full(others)), [])

    def _hiding(self, differing: Mapping[str, set[Voter]]) -> int:
        """Return the largest number of folds with which every fold's difference hides the judgements of
        others; 0 for none."""
        if len(differing) < self.rules.least_queries:
            return 0
        return min(map(self._full, (list(differing), *_of_others(differing))))

    def _full(self, queries: Iterable[str]) -> int:
        """Return the largest number of folds such that each has enough of these queries, or none of them; 0
        if even two folds are too many."""
        for folds in FOLDS:
            sizes = Counter(fold_of(query, folds, self._key) for query in queries)
            if min(sizes.values()) >= self.rules.least_queries:
                return folds
        return 0

    def folds(self, peer: str) -> int:
        """Return the largest number of folds that this peer may ask for. It is 0 if the silo takes no part:
        with few judged queries, or after `MOST_SESSIONS` sessions about this set."""
        crowd = self.current.crowd(peer)
        if self.current.begun >= MOST_SESSIONS:
            return 0
        return min(self.current.folds, self._full(crowd)) if crowd else 0

    def deal(self, queries: Iterable[str], folds: int) -> tuple[int, ...]:
        """Return the fold of every query."""
        return tuple(fold_of(query, folds, self._key) for query in queries)

    def begin(self, peer: str) -> None:
        """Record that a peer begins a session; raises Refused if it has begun too many within a day."""
        now = self._clock()
        recent = [(name, at) for name, at in self.current.sessions if now - at < DAY]
        if sum(name == peer for name, _ in recent) >= self.rules.sessions:
            raise Refused("no more sessions today (learning.sessions in its silo.toml is how many there are)")
        self.current.sessions = [*recent, (peer, now)]
        self.current.begun += 1
        self._keep(self.current)

    def _keep(self, new: JudgedSet) -> None:
        self.current = new
        with replacing(self._path) as stream:
            stream.write(json.dumps({"format": FORMATS[-1], **vars(new)}, ensure_ascii=False).encode())


def _differing(new: JudgedSet, old: JudgedSet) -> dict[str, set[Voter]]:
    """Return the queries whose grades differ between two sets, with everyone who judged them in either."""
    return {
        query: {*new.voters.get(query, ()), *old.voters.get(query, ())}
        for query in new.grades.keys() | old.grades.keys()
        if new.grades.get(query) != old.grades.get(query)
    }


def _of_others(differing: Mapping[str, set[Voter]]) -> list[list[str]]:
    """Return for every peer the queries that somebody judged through another one; peers without any are left
    out."""
    peers = {name for who in differing.values() for name, _ in who} - {OPERATOR}
    brought = (
        [query for query, who in differing.items() if any(n != peer for n, _ in who)] for peer in peers
    )
    return [queries for queries in brought if queries]


def _read(path: Path) -> JudgedSet:
    if not path.exists():
        return JudgedSet()
    try:
        saved: dict[str, Any] = json.loads(path.read_bytes())
        if saved.pop("format") not in FORMATS:
            raise DataError("was written by a newer Isthmus", file=path, cure="update this one")
        for gone in ("hits", "measured"):  # fields of format 1 only
            saved.pop(gone, None)
        return TypeAdapter(JudgedSet).validate_python(saved)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        cure = "go back to a copy: without it a peer could compare answers about two sets"
        raise DataError("is not a set of judgements", file=path, cure=cure) from error
