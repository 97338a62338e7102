"""The ledger: charge first, then answer.

    with Ledger("silo.ledger", Budget(epsilon=9)) as ledger:
        covered = ledger.versions(names, [fingerprint(text) for text in texts])
        ledger.charge(cost, covered, "north")          # durable when it returns, or BudgetExhausted
        send(answer)

A budget belongs to the lineage of a document: a changed document is a new version with a new nonce, charged
in addition, and so is one that comes back under another name. Charges of noise that every peer sees alike
count once for all peers; all others add up over peers. Words of different fields are different words, so a
document has spent as much as its most expensive field. A process that dies between charge and answer has
charged too much, never too little.

Frequent releases that are charged to no document are also in the ledger before they leave, a block at a time
(`Ahead`). A search cannot wait for a disk. So a block of departures is written ahead, durably, and searches
use it up in memory; the next block is twice as large. `settle` lowers the last block to what was used. A
process that dies without settling leaves more in its ledger than left the silo, never less.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from isthmus.errors import ConfigError, DataError, PrivacyError
from isthmus.private.cost import Cost, Covered
from isthmus.private.ledger import accounts, chain, erasing, subjects
from isthmus.private.ledger.accounts import Budget, LedgerAccount
from isthmus.private.ledger.store import KINDS, SQL, LedgerStore, TallyFile, check, lost

if TYPE_CHECKING:
    import sqlite3

    import numpy as np
    from numpy.typing import NDArray

Charge: TypeAlias = tuple[Cost, Covered, str]
"""A release, the documents it is about, and the peer it goes to."""

NONCE = 16
"""Random bytes in the name of a version."""

DIGEST = 16
"""Bytes of each digest of a text."""

ENOUGH = 16
"""Number of words by which a text is recognised without its title; fewer may stand in many documents."""

REMEMBERED = 64
"""Number of fully paid releases that are cached in memory."""


_WORD = re.compile(r"\w+")


class Ledger:
    """One silo's record of everything that left it, shared by all its threads and processes.

    A new file needs a budget. An existing one keeps its budget: naming another one is an error, so that no
    process widens it by accident; `set_budget` changes it on purpose.

    A ledger that is lost, or older than its tally says, is a DataError (see `store`). `checked=False` opens
    any copy all the same, for inspection.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        budget: Budget | None = None,
        *,
        checked: bool = True,
        patience: float = 60.0,
        clock: Callable[[], float] = time.time,
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if checked and not os.path.exists(path) and TallyFile(path).path.exists():
            raise lost(path, TallyFile(path).path)
        self._store = LedgerStore(path, create=budget is not None, patience=patience)
        self._clock, self._entropy = clock, entropy
        self._parsed: tuple[tuple[str, float], Budget] | None = None
        self._paid: dict[tuple[Cost, str], Covered] = {}
        try:
            if checked:
                self._store.recognise(entropy(NONCE).hex())
            self._begin(budget)
        except BaseException:
            self.close()
            raise

    def _begin(self, budget: Budget | None) -> None:
        """Store the budget of a new file, or compare it with the stored one. A file without one was left by a
        process that was killed at once."""
        with self._store.reading() if budget is None else self._store.writing() as db:
            row = db.execute("SELECT value FROM setting WHERE name = 'budget'").fetchone()
            stored = None if row is None else Budget.from_json(row[0])
            if budget is None and stored is None:
                raise DataError("a ledger without a budget", file=self._store.path, cure="state one")
            if budget is not None and stored is None:
                db.execute("INSERT INTO setting VALUES ('budget', ?)", (budget.to_json(),))
            elif budget not in (None, stored):
                raise ConfigError(
                    f"{self._store.path} has a budget of {stored}, not {budget}",
                    key="budget",
                    expected="the same, or a change on purpose with set_budget",
                )

    @property
    def budget(self) -> Budget:
        """The budget of each document; read anew, because another process may have changed it."""
        with self._store.reading() as db:
            return self._budget(db)

    def _budget(self, db: sqlite3.Connection) -> Budget:
        settings = dict(db.execute("SELECT name, value FROM setting WHERE name IN ('budget', 'forgotten')"))
        stored = settings["budget"], float(settings.get("forgotten", 0.0))
        if self._parsed is None or self._parsed[0] != stored:
            self._parsed = stored, replace(Budget.from_json(stored[0]), forgotten=stored[1])
        return self._parsed[1]

    def set_budget(self, budget: Budget) -> None:
        """Change the budget of every document, from now on and for all processes."""
        with self._store.writing() as db:
            db.execute("UPDATE setting SET value = ? WHERE name = 'budget'", (budget.to_json(),))
            chain.link(db, {"budget": budget.to_json()})

    @property
    def number(self) -> int:
        """How far the ledger has come. A file with this number was written when the ledger had all charges up
        to it."""
        with self._store.reading() as db:
            return self._store.number(db)

    def expect(self, number: int, by: str | PathLike[str]) -> None:
        """Raise DataError if the ledger has not reached the number in a file that was written after it."""
        check(self.number, self._store.path, expected=number, by=by)

    @classmethod
    def after_loss(cls, path: str | PathLike[str], *, spent: float | None, budget: Budget) -> Ledger:
        """Continue after a loss: with an older copy, or with a new file where there is none.

        Every document, known or new, counts as having spent that much more, or all of its budget if `spent`
        is None. The numbers continue above every number that was ever reached.
        """
        recorded = None
        with suppress(DataError):
            recorded = TallyFile(path).read()
        with cls(path, None if os.path.exists(path) else budget, checked=False) as ledger:
            ledger._forget(spent, max(int(1000 * ledger._clock()), recorded.number if recorded else 0))
        return cls(path)

    def _forget(self, spent: float | None, above: int) -> None:
        """Record a loss, and continue the numbers from `above`. Milliseconds since 1970 lie above every
        number that was reached by counting."""
        with self._store.writing() as db:
            budget = self._budget(db)
            more = budget.epsilon if spent is None else spent
            if not 0 <= more < math.inf:
                raise ConfigError(
                    f"ε = {more} cannot have been spent", key="spent", expected="a number from 0"
                )
            rows = {
                "forgotten": budget.forgotten + more,
                "beginning": above,
                "ledger": self._entropy(NONCE).hex(),
            }
            db.executemany("INSERT OR REPLACE INTO setting VALUES (?, ?)", rows.items())
            note = f"a ledger was lost: every document counts as having spent ε = {more:g} more"
            self._record(db, "incident", "this silo", note=note)
            reached = self._store.tally(db)
            if reached is not None:
                self._store.tally_file.write(reached)

    def versions(self, documents: Sequence[str], contents: Sequence[bytes]) -> Covered:
        """The documents with the current version of each; a new fingerprint makes a new version.

        A version's name is its noise nonce in hexadecimal, from the operating system's entropy: never derived
        from the content, or equal texts would show equal noise.
        """
        if len(documents) != len(contents) or len(set(documents)) != len(documents):
            raise PrivacyError("versions need distinct documents and one digest for each")
        texts = [accounts.Content(content[:DIGEST], content[DIGEST:]) for content in contents]
        with self._store.reading() as db:
            known = accounts.current(db, documents, texts)
        if None in known:
            with self._store.writing() as db:
                known = accounts.current(db, documents, texts)
                new = [row for row, name in enumerate(known) if name is None]
                nonces = self._entropy(NONCE * len(new))
                for at, row in enumerate(new):
                    nonce = nonces[NONCE * at : NONCE * (at + 1)].hex()
                    known[row] = accounts.enter(db, documents[row], texts[row], nonce)
        return Covered(tuple(documents), tuple(name or "" for name in known))

    def erase(self, documents: Iterable[str], *, why: str = "") -> int:
        """Delete documents' names and digests. Returns how many of them the ledger had; `why` is stored in
        the chain.

        Keyed digests take their place, so that a document that comes back has its old budget and no new one.
        Records of what left stay in the ledger. The file is rewritten, and none of the deleted data are left
        in it.
        """
        with self._store.writing() as db:
            known = erasing.erase(db, documents, self._entropy(erasing.KEY_BYTES))
            chain.link(db, {"erased": known, "why": why, "at": self._clock()})
        self._paid.clear()
        self._store.rewrite()
        return known

    def assign(self, subject_of: Mapping[str, str]) -> None:
        """State the subjects of documents; documents of one subject share a budget from now on (see
        `subjects`)."""
        pairs = [(document, subject) for document, subject in subject_of.items() if subject]
        with self._store.reading() as db:
            new = subjects.missing(db, pairs)
        if new:
            with self._store.writing() as db:
                subjects.assign(db, new, self._entropy(erasing.KEY_BYTES))
            self._paid.clear()

    def subject(self, subject: str) -> LedgerAccount | None:
        """The account of all documents of a subject; None for a subject that the ledger does not have."""
        with self._store.reading() as db:
            number = subjects.number_of(db, subject)
            sums = () if number is None else subjects.sums(db, "WHERE b.subject = ?", (number,))
            budget = self._budget(db)
            return next((accounts.subject_account(db, each, budget) for each in sums), None)

    def copies(self, covered: Covered, *, per_subject: int | None = None) -> NDArray[np.bool_]:
        """Whether each document shares a payer with an earlier one: copies, under names of their own.

        A release without them costs every lineage once; with `per_subject` it costs every subject at most
        that many times its ε.
        """
        import numpy as np

        with self._store.reading() as db:
            accounts.load(db, covered)
            return np.array(accounts.copies(db, per_subject), dtype=bool)

    def charge(self, cost: Cost, covered: Covered, peer: str, *, kind: str = "counts") -> None:
        """Book a release of all these documents to a peer; the charge is durable when this returns.

        Raises BudgetExhausted, with nothing written, if one of them would overspend.
        """
        self.charge_all([(cost, covered, peer)], kind=kind)

    def charge_all(
        self, releases: Iterable[Charge], *, kind: str = "counts", reserve: Iterable[Charge] = ()
    ) -> None:
        """Book several releases in one transaction: all of them, or none.

        `reserve` are releases for which there must be room afterwards; they are not booked. They keep one
        purpose from using up the budget that another needs. Without `releases`, only the room is checked.
        """
        _check_kind(kind)
        unpaid, spared = (
            [charge for charge in part if not self._is_paid(*charge)] for part in (releases, reserve)
        )
        if not unpaid and not spared:
            return
        with self._store.writing() as db:
            self._charge(db, unpaid, kind)
            if spared:
                db.execute("SAVEPOINT spared")
                self._charge(db, spared, kind)
                db.execute("ROLLBACK TO spared")
        for cost, covered, peer in unpaid:
            self._remember(cost, covered, peer)

    def _charge(self, db: sqlite3.Connection, releases: Sequence[Charge], kind: str) -> None:
        budget, at, loaded = self._budget(db), self._clock(), None
        for cost, covered, peer in releases:
            if covered is not loaded:
                accounts.load(db, covered)
                accounts.admit(db)
                loaded = covered
            accounts.charge(db, cost, peer, budget=budget, kind=kind, at=at)

    def _is_paid(self, cost: Cost, covered: Covered, peer: str) -> bool:
        """Whether exactly these versions are known to be paid; charges are never undone."""
        return not len(covered) or self._paid.get((cost, peer)) == covered.frozen()

    def _remember(self, cost: Cost, covered: Covered, peer: str) -> None:
        others = [item for item in self._paid.items() if item[0] != (cost, peer)]
        # replaced as a whole, so that other threads never see a partial dict
        self._paid = dict([*others[1 - REMEMBERED :], ((cost, peer), covered.frozen())])

    def record(
        self,
        kind: str,
        peer: str,
        *,
        epsilon: float | None = None,
        unit: str = "",
        items: int = 1,
        note: str = "",
    ) -> int:
        """Record that something left that is charged to no document. Without an ε there is no DP guarantee.

        `unit` says what an ε is stated for, `items` how many things left. Returns the number of the entry.
        """
        _check_kind(kind)
        if epsilon is not None and not (epsilon > 0 and unit):
            raise PrivacyError("an ε above 0 is stated for something: name the unit")
        with self._store.writing() as db:
            return self._record(db, kind, peer, epsilon=epsilon, unit=unit, items=items, note=note)

    def _record(self, db: sqlite3.Connection, kind: str, peer: str, **more: Any) -> int:
        values = {"epsilon": None, "unit": "", "items": 1, "note": "", **more}
        values |= {"at": self._clock(), "kind": kind, "peer": accounts.peer_of(db, peer)}
        number = int(db.execute(SQL["departure"], values).lastrowid or 0)
        chain.link_departure(db, number)
        return number

    def lower(self, items: Mapping[int, int]) -> None:
        """Lower the number of items of entries that were written ahead, by number of the entry; it is never
        raised."""
        if items:
            statement = "UPDATE departure SET items = ? WHERE id = ? AND items > ?"
            with self._store.writing() as db:
                for number, count in items.items():
                    if db.execute(statement, (count, number, count)).rowcount:
                        chain.link(db, {"lowered": number, "items": count})

    def spent(self, document: str, *, peer: str | None = None, field: str | None = None) -> float:
        """The ε that a document has spent over all its versions, on all peers or on one."""
        with self._store.reading() as db:
            losses = accounts.losses(db, document, peer=peer, field=field)
            return accounts.spent(losses, self._budget(db))

    def left(self, document: str, *, peer: str | None = None, field: str | None = None) -> float:
        """The largest ε that one more release of a document may have, to anybody or to one peer."""
        with self._store.reading() as db:
            budget = self._budget(db)
            whole = accounts.left(accounts.losses(db, document, field=field), budget.ceiling)
            whole = min(whole, accounts.left_of_subjects(db, document, budget))
            if peer is None:
                return whole
            own = accounts.losses(db, document, peer=peer, field=field)
            whole = min(whole, accounts.left_of_subjects(db, document, budget, peer))
            return min(whole, accounts.left(own, budget.limit(peer)))

    def accounts(self, most: int | None = None) -> Iterator[LedgerAccount]:
        """The accounts that have spent most, in descending order, or all of them."""
        with self._store.snapshot() as db:
            yield from accounts.accounts(db, self._budget(db), most)

    def departures(self) -> Iterator[dict[str, Any]]:
        """Everything that left, in order."""
        with self._store.snapshot() as db:
            yield from accounts.rows(db, "departures")

    def charges(self, document: str | None = None) -> Iterator[dict[str, Any]]:
        """Every charge of every document, or of one."""
        with self._store.snapshot() as db:
            statement = "charges" if document is None else "charges of a document"
            yield from accounts.rows(db, statement, {"document": document})

    def summary(self) -> dict[str, Any]:
        """The whole ledger in a few numbers, ready for JSON."""
        with self._store.snapshot() as db:
            return accounts.summary(db, self._budget(db))

    def audit(self, heads: Mapping[int, str] | None = None) -> int:
        """Check the chain of all entries, against `heads` of it that are stored elsewhere, and recompute all
        sums from the charges. Returns the number of entries. Raises DataError for the first entry that
        differs."""
        with self._store.snapshot() as db:
            accounts.check_readable(db, self._store.path)
            entries = chain.check(db, self._store.path, heads or {})
            accounts.audit(db, self._store.path)
        return entries

    def anchor(self, log: str, number: int, hash: str) -> tuple[str, int, str]:
        """Record how far another log has come. Returns this ledger's name, and number and hash of the new
        entry."""
        with self._store.writing() as db:
            event = {"log": log, "number": number, "hash": hash, "at": self._clock()}
            return self._name(db), *chain.link(db, event)

    def last_anchor(self, log: str) -> tuple[int, str]:
        """Number and hash of the entry of another log that was recorded last; number 0 if there is none."""
        with self._store.reading() as db:
            row = db.execute(SQL["last anchor"], (log,)).fetchone()
        return (0, chain.BEGINNING) if row is None else (int(row[0]), str(row[1]))

    @property
    def name(self) -> str:
        """The ledger's random name, which changes after a loss."""
        with self._store.reading() as db:
            return self._name(db)

    def _name(self, db: sqlite3.Connection) -> str:
        row = db.execute("SELECT value FROM setting WHERE name = 'ledger'").fetchone()
        return "" if row is None else str(row[0])

    def anchors(self, log: str) -> dict[int, str]:
        """Hashes of another log's entries, by number, as they were when they were recorded here."""
        with self._store.snapshot() as db:
            rows = (event for *_, event in chain.events(db, self._store.path))
            return {row["number"]: row["hash"] for row in rows if row.get("log") == log}

    def close(self) -> None:
        """Close the database and release its lock."""
        self._store.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fingerprint(*fields: str) -> bytes:
    """Digests of a document's fields, which stay in the ledger: one of all fields, and one of the words
    alone.

    The first shows whether the document changed. The second recognises it under another name: if the last
    field has enough words it covers that field only, so that a title made from the name makes no difference.
    """
    digest = hashlib.blake2b(digest_size=DIGEST)
    for text in fields:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    words = [_WORD.findall(text.lower()) for text in fields]
    wanted = words[-1:] if words and len(words[-1]) >= ENOUGH else words
    if not any(wanted):
        return digest.digest()
    spelled = "\n".join(" ".join(part) for part in wanted).encode()
    return digest.digest() + hashlib.blake2b(spelled, digest_size=DIGEST).digest()


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"nothing of the kind {kind!r} leaves a silo", key=kind, known=KINDS)


FIRST, MOST = 64, 1 << 14
"""Items of the first block of a kind, and of the largest."""


@dataclass(slots=True)
class _Block:
    """A departure of `size` items in the ledger, how many of them are used, and when it was written."""

    number: int
    size: int
    begun: float
    used: int = 0


class Ahead:
    """Departures of one process, by kind, peer and note, which are written ahead; for all its threads.

    The next block is written while half of the present one is left, so that only the first caller waits for
    the disk.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._turn = threading.Lock()
        self._blocks: dict[tuple[str, str, str], _Block] = {}
        self._next: dict[tuple[str, str, str], Future[_Block]] = {}
        self._writer = ThreadPoolExecutor(1, "departures")

    def note(self, kind: str, peer: str, items: int, note: str) -> None:
        """Announce that things are about to leave: they are in the ledger when this returns. Raises
        PrivacyError if not."""
        key = (kind, peer, note)
        with self._turn:
            block = self._blocks.get(key)
            while items > 0:
                if block is None or block.used == block.size:
                    written = self._next.pop(key, None) or self._begun(key, block, items)
                    block = self._blocks[key] = written.result()
                some = min(items, block.size - block.used)
                block.used += some
                items -= some
            if block is not None and 2 * block.used >= block.size and key not in self._next:
                self._next[key] = self._begun(key, block, 0)

    def _begun(self, key: tuple[str, str, str], before: _Block | None, items: int) -> Future[_Block]:
        size = FIRST if before is None else min(MOST, 2 * before.size)
        return self._writer.submit(self._written, key, max(items, size))

    def _written(self, key: tuple[str, str, str], size: int) -> _Block:
        kind, peer, note = key
        number = self._ledger.record(kind, peer, items=size, note=note)
        return _Block(number, size, time.monotonic())

    def settle(self, *, older: float = 0.0) -> None:
        """Lower the ledger's entries to what has left, for all blocks or those that are `older`
        seconds old."""
        until = time.monotonic() - older
        with self._turn:
            ready = {key: block for key, block in self._blocks.items() if block.begun <= until}
            unused = [written for key in ready if (written := self._next.pop(key, None))]
            self._blocks = {key: block for key, block in self._blocks.items() if key not in ready}
        blocks = [*ready.values(), *(each.result() for each in unused if each.exception() is None)]
        self._ledger.lower({block.number: block.used for block in blocks})
