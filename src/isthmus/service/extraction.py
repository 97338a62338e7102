"""How much of a silo callers have seen, and limits on that: against copying a collection by searching it.

    audit = NodeAudit(folder, settings, ledger, documents=lambda: 40_000)
    audit.record_shown(person, "broker", policy, ids, query)      # in the log when it returns, or SeenEnough

For every caller (a person, or a peer that names none) and for every peer as a whole, the number of
different documents that were shown or opened is estimated by HyperLogLog sketches (Flajolet et al. 2007;
small numbers by linear counting) of 4,096 registers: one a month, kept for a year, and one for today. They
count the audit log's keyed digests, so that a document that is removed and comes back counts once, and
what was not saved when a process died is read from the log again.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.errors import DataError
from isthmus.private.ledger import Ledger
from isthmus.service.audit_log import FOLDER, AuditHead, AuditLog, Digests, apart, audit_lines
from isthmus.service.limits import SeenEnough
from isthmus.service.logs import iso_time
from isthmus.service.people import Person
from isthmus.service.settings import AuditSettings, Policy

REGISTERS = 1 << 12
MONTHS = 12
"""Number of months that count."""
SPARSE, STEP = 64, 8
"""A sketch with at most one register in `SPARSE` in use tells known documents from new ones, except for one
in a hundred. A new document that changes a register adds to the estimate at most about the share of `STEP`
registers."""
CALLERS = 500
"""Callers kept in memory; others are read from the file when they come."""
SAVED_SECONDS = 30.0
"""Seconds between two times that sketches are saved; what came since is in the log."""
FILE = "seen.db"
_ALPHA = 0.7213 / (1 + 1.079 / REGISTERS)
_TABLES = """
CREATE TABLE IF NOT EXISTS seen (
    caller TEXT, period TEXT, sketch BLOB NOT NULL, opened INTEGER NOT NULL, PRIMARY KEY (caller, period)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reached (entry INTEGER NOT NULL);
"""

_log = logging.getLogger("isthmus.service")


class DistinctCount:
    """An estimate of how many different digests were added, in 4 kB: within some 1.6 %, and closer below a
    thousand."""

    def __init__(self, registers: bytes | bytearray = bytes(REGISTERS)) -> None:
        self.registers = bytearray(registers)

    def add(self, digests: Iterable[str]) -> bool:
        """Add digests of at least 16 hexadecimal digits. Returns whether one of them was new to
        the sketch."""
        registers, is_new = self.registers, False
        for digest in digests:
            bits = int(digest[:16], 16)
            at, rank = bits >> 52, 53 - (bits & ((1 << 52) - 1)).bit_length()
            if rank > registers[at]:
                registers[at], is_new = rank, True
        return is_new

    @classmethod
    def union(cls, sketches: Iterable[DistinctCount]) -> DistinctCount:
        """Return the sketch of what was added to any of these."""
        rows = [np.frombuffer(bytes(each.registers), np.uint8) for each in sketches]
        return cls(np.maximum.reduce(rows).tobytes()) if rows else cls()

    def would_pass(self, most: float, digests: Iterable[str]) -> bool:
        """Whether adding these would raise the estimate above `most`. Known documents may come again as long
        as the sketch is sparse enough to recognise them; a dense one takes most new documents for known
        ones, so that close to the limit it lets nothing pass."""
        before, is_sparse = self.estimate, self.registers.count(0) > REGISTERS - REGISTERS // SPARSE
        is_new = (after := DistinctCount(self.registers)).add(digests)
        if is_sparse:
            return is_new and after.estimate > most
        return max(after.estimate, before * (1 + STEP / REGISTERS)) > most

    @property
    def estimate(self) -> float:
        """The estimated number of different digests."""
        total = sum(self.registers.count(rank) / (1 << rank) for rank in range(54))
        estimate, empty = _ALPHA * REGISTERS**2 / total, self.registers.count(0)
        if estimate <= 2.5 * REGISTERS and empty:
            estimate = REGISTERS * math.log(REGISTERS / empty)
        return estimate


@dataclass
class _Period:
    """The sketch of what a caller saw in a month or on a day, and how many documents it opened then."""

    sketch: DistinctCount = field(default_factory=DistinctCount)
    opened: int = 0


@dataclass(frozen=True)
class Seen:
    """Numbers of different documents that a caller has seen in a year and today, and has opened today."""

    peer: str
    actor: str
    documents: int
    today: int
    opened_today: int


class SeenDocuments:
    """Sketches of what callers have seen, by caller and period, in a file. Not thread-safe."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._callers: OrderedDict[str, dict[str, _Period]] = OrderedDict()
        self._unsaved: set[str] = set()
        try:
            self._db = self._opened()
        except sqlite3.DatabaseError:
            _log.error("%s cannot be read and is made anew from the audit log", file)
            file.unlink()
            self._db = self._opened()
        row = self._db.execute("SELECT max(entry) FROM reached").fetchone()
        self.reached: int = row[0] or 0
        """Number of the last entry of the audit log that is in the file."""

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, timeout=30, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA synchronous=NORMAL")
        db.executescript(_TABLES)
        return db

    def periods(self, caller: str) -> dict[str, _Period]:
        """Return a caller's sketches, by month and day."""
        known = self._callers.get(caller)
        if known is None:
            rows = self._db.execute("SELECT period, sketch, opened FROM seen WHERE caller = ?", (caller,))
            known = {
                period: _Period(DistinctCount(zlib.decompress(packed)), opened)
                for period, packed, opened in rows
            }
            self._callers[caller] = known
            idle = [name for name in self._callers if name not in self._unsaved]
            for name in idle[: max(0, len(self._callers) - CALLERS)]:
                del self._callers[name]
        self._callers.move_to_end(caller)
        return known

    def in_year(self, caller: str, at: str) -> DistinctCount:
        """Return the sketch of what a caller saw in the year up to a time."""
        return DistinctCount.union(
            period.sketch
            for name, period in self.periods(caller).items()
            if len(name) == len("2026-11") and name > _year_before(at)
        )

    def total(self, caller: str, at: str) -> float:
        """Return how many different documents a caller saw in the year up to a time."""
        return self.in_year(caller, at).estimate

    def on_day(self, caller: str, at: str) -> tuple[DistinctCount, int]:
        """Return the sketch of what a caller saw on a day, and how many documents it opened."""
        period = self.periods(caller).get(at[:10], _Period())
        return DistinctCount(period.sketch.registers), period.opened

    def add(self, caller: str, digests: Sequence[str], at: str, *, opened: int = 0) -> None:
        """Add documents that a caller saw at a time, `opened` of which it opened."""
        periods, today = self.periods(caller), at[:10]
        if today not in periods:
            for name in [name for name in periods if len(name) == len(today)]:
                del periods[name]
        for name in (at[:7], today):
            period = periods.get(name)
            if period is None:
                period = periods[name] = _Period()
            period.sketch.add(digests)
            period.opened += opened
        self._unsaved.add(caller)

    def save(self, entry: int, at: str) -> None:
        """Save what was seen up to an entry of the log, and delete periods that no longer count."""
        rows = [
            (caller, name, zlib.compress(bytes(period.sketch.registers), 1), period.opened)
            for caller in self._unsaved
            for name, period in self._callers[caller].items()
            if len(name) < len(at[:10]) or name == at[:10]
        ]
        with self._db as db:
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT OR REPLACE INTO seen VALUES (?, ?, ?, ?)", rows)
            db.execute(
                "DELETE FROM seen WHERE length(period) = 10 AND period < ? OR period <= ?",
                (at[:10], _year_before(at)),
            )
            db.execute("DELETE FROM reached")
            db.execute("INSERT INTO reached VALUES (?)", (entry,))
        self._unsaved.clear()
        self.reached = entry

    def rows(self, at: str) -> Iterator[Seen]:
        """Yield the numbers of every caller in the file, those that saw most first."""
        names = [name for (name,) in self._db.execute("SELECT DISTINCT caller FROM seen ORDER BY caller")]
        rows = []
        for name in names:
            peer, _, actor = name.partition("/")
            today, opened = self.on_day(name, at)
            rows.append(Seen(peer, actor, round(self.total(name, at)), round(today.estimate), opened))
        yield from sorted(rows, key=lambda row: (-row.documents, row.peer, row.actor))

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _year_before(at: str) -> str:
    """Return the last month that no longer counts at a time: "2025-11" in November 2026."""
    months = 12 * int(at[:4]) + int(at[5:7]) - 1 - MONTHS
    return f"{months // 12:04d}-{months % 12 + 1:02d}"


class NodeAudit(AuditLog):
    """A silo's audit log, anchored in its ledger. It also counts what callers have seen, and enforces their
    limits."""

    def __init__(
        self,
        folder: Path,
        settings: AuditSettings,
        ledger: Ledger,
        *,
        documents: Callable[[], int],
        watched: Mapping[str, Callable[[], Mapping[str, str]]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        def anchor(number: int, hash: str) -> Mapping[str, Any]:
            return dict(
                zip(
                    ("ledger", "ledger_entry", "ledger_hash"),
                    ledger.anchor(FOLDER, number, hash),
                    strict=True,
                )
            )

        super().__init__(
            folder,
            settings,
            anchor=anchor,
            beyond=lambda: AuditHead(*ledger.last_anchor(FOLDER)),
            watched=watched,
            clock=clock,
        )
        self._documents = documents
        self.seen = SeenDocuments(folder / FILE)
        self._saved = time.monotonic() - apart(SAVED_SECONDS)
        self.on_outcome: Callable[[str, str], None] = lambda peer, outcome: None
        """Called with a peer and `alarm` or `refused`."""
        self._catch_up(folder)

    def _catch_up(self, folder: Path) -> None:
        """Add what was in the log and not yet in the file of sketches when the last process ended."""
        number = self.seen.reached
        try:
            for line in audit_lines(folder, after=number):
                number = line.number
                if b'"action":"shown"' in line.text or b'"action":"opened"' in line.text:
                    entry = line.content
                    for caller in _callers(entry.get("peer", ""), entry.get("actor", "")):
                        is_opened = entry["action"] == "opened"
                        self.seen.add(caller, entry.get("documents", ()), entry["at"], opened=is_opened)
        except DataError as error:
            _log.error("what callers have seen is known up to entry %d of the audit log: %s", number, error)
        if number != self.seen.reached:
            self.seen.save(number, iso_time(self._clock()))

    def record_shown(
        self, person: Person | None, peer: str, policy: Policy, ids: Sequence[str], query: str
    ) -> None:
        """Record hits before they leave; raises SeenEnough if the policy's limits forbid it."""
        self._admit("shown", person, peer, policy, ids, query)

    def record_opened(
        self, person: Person | None, peer: str, policy: Policy, id: str, request: str = ""
    ) -> None:
        """Record a whole document before it leaves: that of a hit, within the policy's limits, or one by a
        `request` that its owner allowed, regardless of them. Raises SeenEnough."""
        self._admit("opened", person, peer, Policy() if request else policy, [id], "", request=request)

    def _admit(
        self,
        action: str,
        person: Person | None,
        peer: str,
        policy: Policy,
        ids: Sequence[str],
        query: str,
        **more: str,
    ) -> None:
        actor = "" if person is None else self.pseudonym(peer, person.id)
        named = {"person": person.id} if person is not None and self.settings.names else {}
        digests, at = Digests(map(self.document, ids)), iso_time(self._clock())
        about: dict[str, Any] = {"peer": peer, "actor": actor, **named}
        with self._turn:
            limit = self._limit(policy, _callers(peer, actor), digests, at, is_opened=action == "opened")
            if not limit:
                alarm = self._alarm(policy, _callers(peer, actor)[0], digests, at)
                self.record(action, documents=digests, query=query, **about, **more)
                for caller in _callers(peer, actor):
                    self.seen.add(caller, digests, at, opened=action == "opened")
        if limit:
            self.record("refused", what=limit, **about)
            self.on_outcome(peer, "refused")
            raise _refusal(limit, self._clock())
        if alarm:
            self.record("alarm", what=alarm, **about)
            self.on_outcome(peer, "alarm")
            _log.warning("%s, %s: %s", peer, actor or "all its callers", alarm)

    def _limit(
        self, policy: Policy, callers: Sequence[str], digests: Sequence[str], at: str, *, is_opened: bool
    ) -> str:
        """Return the name of the limit that these documents would exceed if they left; empty for none."""
        caller, whole = callers[0], max(1, self._documents())
        if policy.most_seen_a_day is not None or policy.most_opened_a_day is not None:
            today, opened = self.seen.on_day(caller, at)
            if is_opened and policy.most_opened_a_day is not None and opened >= policy.most_opened_a_day:
                return "most_opened_a_day"
            a_day = policy.most_seen_a_day
            if a_day is not None and today.would_pass(a_day * whole, digests):
                return "most_seen_a_day"
        for name, who in (("most_seen", caller), ("most_seen_by_peer", callers[-1])):
            share = getattr(policy, name)
            if share is not None and self.seen.in_year(who, at).would_pass(share * whole, digests):
                return name
        return ""

    def _alarm(self, policy: Policy, caller: str, digests: Sequence[str], at: str) -> str:
        """Return the text of the alarm if these documents make the caller pass the share for one; else ""."""
        share = policy.alarm_seen if policy.alarm_seen is not None else (policy.most_seen or 0.0) / 2
        if not share:
            return ""
        level = share * max(1, self._documents())
        before, _, after = (seen := self.seen.in_year(caller, at)).estimate, seen.add(digests), seen.estimate
        return f"has seen {share:.1%} of the silo's documents" if before < level <= after else ""

    def share_of(self, peer: str) -> float:
        """Return the estimated share of the silo's documents that a peer has seen in a year."""
        with self._turn:
            total = self.seen.total(_callers(peer, "")[0], iso_time(self._clock()))
        return min(1.0, total / max(1, self._documents()))

    def sync(self, *, closing: bool = False) -> None:
        """Flush what was written to disk, and from time to time save the sketches."""
        super().sync(closing=closing)
        if closing or time.monotonic() > self._saved + SAVED_SECONDS:
            with self._turn:
                self._saved = time.monotonic()
                self.seen.save(self._end.head.number, iso_time(self._clock()))

    def close(self) -> None:
        """Flush all entries to disk, anchor the last one, and close the sketches."""
        super().close()
        self.seen.close()


def _callers(peer: str, actor: str) -> tuple[str, ...]:
    """Return the names under which documents are counted: a person's, if there is one, and the peer's."""
    return (f"{peer}/{actor}", f"{peer}/") if actor else (f"{peer}/",)


def _refusal(limit: str, now: float) -> SeenEnough:
    cure = f"its operator may raise {limit} in the silo's policy"
    if limit.endswith("_a_day"):
        wait, when = str(math.ceil(86_400 - now % 86_400)), "in a day; tomorrow again"
        return SeenEnough(
            429, f"you have seen as much of this silo as it shows {when}, or {cure}", Retry_After=wait
        )
    return SeenEnough(429, f"you have seen as much of this silo as its policy allows; {cure}")


def seen_by_caller(folder: Path, now: float | None = None) -> list[Seen]:
    """Return the numbers of every caller of the silo in a node's folder, those that saw most first."""
    if not (folder / FILE).exists():
        return []
    with closing(SeenDocuments(folder / FILE)) as seen:
        return list(seen.rows(iso_time(time.time() if now is None else now)))
