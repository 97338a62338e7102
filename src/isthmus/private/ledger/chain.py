"""A chain of hashes over every change of a ledger, so that an entry that was changed later can be named.

    link 7 = the change (JSON), and sha256(hash of link 6 + the change)

Changes are: something leaves (its whole departure, and a digest of the versions that were charged), fewer
items left than were written ahead, subjects of documents are stated (a digest of all of them), the budget
changes, documents are erased, a loss is declared, the audit log is anchored. The chain has no key: anyone who
can write the file can build it anew. So the audit log, which has a key, stores heads of the chain, and
`check` compares them.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from isthmus.errors import DataError
from isthmus.private.ledger.store import SQL

BEGINNING = "0" * 64
"""The hash before the first link."""
CURE = "it was written to by other means; go back to a copy"


def head(db: sqlite3.Connection) -> tuple[int, str]:
    """Number and hash of the last link; number 0 if there is none."""
    row = db.execute("SELECT number, hash FROM link ORDER BY number DESC LIMIT 1").fetchone()
    return (0, BEGINNING) if row is None else (int(row[0]), str(row[1]))


def link(db: sqlite3.Connection, event: Mapping[str, Any]) -> tuple[int, str]:
    """Append a change to the chain, inside the transaction that makes it. Returns the new head.

    The chain of a ledger from an older Isthmus begins with the number of departures that are not in it.
    """
    number, before = head(db)
    if number == 0:
        (last,) = db.execute(SQL["last unlinked"], {"departure": event.get("departure", 0)}).fetchone()
        number, before = _add(db, 0, BEGINNING, {"unlinked": last})
    return _add(db, number, before, event)


def _add(db: sqlite3.Connection, number: int, before: str, event: Mapping[str, Any]) -> tuple[int, str]:
    text = json.dumps(event, sort_keys=True)
    hash = _hash(before, text)
    db.execute("INSERT INTO link VALUES (?, ?, ?)", (number + 1, text, hash))
    return number + 1, hash


def _hash(before: str, text: str) -> str:
    return hashlib.sha256(f"{before}{text}".encode()).hexdigest()


def link_departure(db: sqlite3.Connection, number: int, versions: Iterable[tuple[str]] = ()) -> None:
    """Append a departure as it was written, and a digest of the versions that it charged, in order of their
    numbers."""
    row = next(_departures(db, "WHERE d.id = ?", (number,)))
    link(db, {**row, "versions": _digest(versions)})


def _departures(
    db: sqlite3.Connection, where: str = "", values: tuple[int, ...] = ()
) -> Iterator[dict[str, Any]]:
    rows = db.execute(f"{SQL['linked departures']} {where} ORDER BY d.id", values)
    names = [column[0] for column in rows.description]
    return (dict(zip(names, row, strict=True)) for row in rows)


def link_subjects(db: sqlite3.Connection) -> None:
    """Append a digest of the subjects of all documents, after they have changed."""
    link(db, {"belongs": _digest(db.execute(SQL["linked subjects"]))})


def _digest(versions: Iterable[tuple[str]]) -> str:
    digest, empty = hashlib.sha256(), True
    for (name,) in versions:
        digest.update(f"{name}\n".encode())
        empty = False
    return "" if empty else digest.hexdigest()


def events(db: sqlite3.Connection, path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Number, hash and content of every link. Raises DataError at the first that does not follow the one
    before."""
    before = BEGINNING
    for expected, (number, text, hash) in enumerate(
        db.execute("SELECT number, event, hash FROM link ORDER BY number"), 1
    ):
        if number != expected:
            raise DataError(f"entry {expected} of the ledger is missing", file=path, cure=CURE)
        if _hash(before, text) != hash:
            problem = f"entry {number} of the ledger was changed: its hash is not that of its content"
            raise DataError(problem, file=path, cure=CURE)
        yield number, hash, json.loads(text)
        before = hash


def check(db: sqlite3.Connection, path: str, heads: Mapping[int, str]) -> int:
    """Compare the chain with heads that are stored elsewhere, and with the tables. Returns the number of
    links.

    Raises DataError for the first entry that differs.
    """
    waiting, unlinked, number, belongs = dict(heads), 0, 0, ""
    expected: dict[int, tuple[int, dict[str, Any]]] = {}
    for number, hash, event in events(db, path):
        if waiting.pop(number, hash) != hash:
            problem = f"entry {number} of the ledger is another than the one that the audit log has"
            raise DataError(problem, file=path, cure=CURE)
        unlinked, belongs = event.get("unlinked", unlinked), event.get("belongs", belongs)
        if "kind" in event:
            expected[event["departure"]] = number, event
        elif "lowered" in event:
            at, departure = expected.get(event["lowered"], (number, {}))
            expected[event["lowered"]] = at, {**departure, "items": event["items"]}
    if waiting:
        problem = f"the ledger ends with entry {number}, and the audit log has entry {max(waiting)} of it"
        raise DataError(problem, file=path, cure="an older copy was put back; go back to the newest")
    if _digest(db.execute(SQL["linked subjects"])) != belongs:
        raise DataError("whose documents are is not what the ledger's entries say", file=path, cure=CURE)
    if number:  # 0: written by an older Isthmus, and not changed since
        _compare(db, path, expected, unlinked)
    return number


def _compare(
    db: sqlite3.Connection, path: str, expected: dict[int, tuple[int, dict[str, Any]]], unlinked: int
) -> None:
    """Raise DataError unless the departures and charges are those of the chain."""
    charged = {
        departure: _digest((name,) for _, name in rows)
        for departure, rows in groupby(db.execute(SQL["linked versions"]), lambda row: row[0])
    }
    for row in _departures(db, "WHERE d.id > ?", (unlinked,)):
        departure = row["departure"]
        number, event = expected.pop(departure, (0, None))
        if event != {**row, "versions": charged.get(departure, "")}:
            what = "its charges" if event and event.items() >= row.items() else "it"
            where = f"entry {number} of the ledger has {what} otherwise" if event else "no entry has it"
            raise DataError(f"departure {departure} is not as it was written: {where}", file=path, cure=CURE)
    gone = {departure: number for departure, (number, _) in expected.items() if departure > unlinked}
    if gone:
        first = min(gone)
        problem = f"departure {first}, entry {gone[first]} of the ledger, was taken out"
        raise DataError(problem, file=path, cure=CURE)
