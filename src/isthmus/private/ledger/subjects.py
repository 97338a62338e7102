"""Whom documents are about: the documents of one subject (a patient, a customer) share one budget.

    ε(S) = Σ over documents d of S, with all their versions, of max over fields f of Σ ε of d's releases in f

A change of one subject may change a word in each of its documents, in whichever field: a release that counts
m of them is m changes for it and costs m·ε (group privacy), and two documents may lose most in two fields.
So this is the largest sum over all choices of a field for every document, and no less than what is true of
any of them. It is the plain sum of ε whatever the budget's rule: m changes in one sum have m² times the
square of one. What a document spent before it was known whose it is counts, and who gets a document that was
another's gets what all of that one's documents have spent.

Subjects are digests under the ledger's key, as documents that were erased are.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from isthmus.private.ledger import chain, erasing
from isthmus.private.ledger.store import EVERYBODY, SQL


class SubjectSum(NamedTuple):
    """What the documents of a subject have spent together."""

    subject: int
    documents: int
    """With names of their own; renamed ones are one."""
    epsilon: float

    def spent(self, forgotten: float) -> float:
        """With what every document counts as having spent besides."""
        return self.epsilon + self.documents * forgotten


def assign(db: sqlite3.Connection, pairs: Iterable[tuple[str, str]], key: bytes) -> None:
    """State (document, subject), for documents that the ledger knows; `key` is used if it has none yet."""
    key = erasing.settled_key(db, key)
    named = [(document, _sealed(key, subject)) for document, subject in pairs]
    db.executemany("INSERT OR IGNORE INTO subject (name) VALUES (?)", {(name,) for _, name in named})
    db.execute("DELETE FROM stated")
    db.executemany(SQL["stated subjects"], named)
    db.execute(SQL["inherited"])
    db.execute("INSERT OR IGNORE INTO belongs SELECT document, subject FROM stated")
    chain.link_subjects(db)


def number_of(db: sqlite3.Connection, subject: str) -> int | None:
    """The number of a subject; None of one that the ledger has not met."""
    key = erasing.key_of(db)
    if key is None:
        return None
    row = db.execute("SELECT id FROM subject WHERE name = ?", (_sealed(key, subject),)).fetchone()
    return None if row is None else int(row[0])


def missing(db: sqlite3.Connection, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those pairs (document, subject) that nobody has stated."""
    key = erasing.key_of(db)
    if key is None:
        return list(pairs)
    known = """SELECT 1 FROM belongs b JOIN document d ON d.id = b.document JOIN subject s ON s.id = b.subject
        WHERE d.name = ? AND s.name = ?"""
    return [pair for pair in pairs if not db.execute(known, (pair[0], _sealed(key, pair[1]))).fetchone()]


def sums(
    db: sqlite3.Connection, only: str, about: tuple[object, ...] = (), *, peer: int = EVERYBODY
) -> Iterator[SubjectSum]:
    """What subjects have spent on all peers or on one, dearest first; `only` is a condition on `b`."""
    each = SQL["of a subject"].format(peer=peer, only=only)
    rows = db.execute(
        f"SELECT subject, count(*), sum(most) FROM ({each}) GROUP BY 1 ORDER BY 3 DESC, 1", about
    )
    return (SubjectSum(*row) for row in rows)


def overspent(
    db: sqlite3.Connection, peer: int, *, most: float, forgotten: float, least: int
) -> tuple[int, float] | None:
    """Of the subjects of those who have paid, the first above its limit: how many documents it was charged
    for, and by how much it is above; None where there is none."""
    if db.execute("SELECT 1 FROM belongs LIMIT 1").fetchone() is None:
        return None
    for each in sums(db, SQL["touched"], peer=peer):
        if each.spent(forgotten) > most:
            charged = """SELECT count(DISTINCT f.version) FROM fresh f
                JOIN document d ON f.owner = coalesce(d.lineage, d.id) JOIN belongs b ON b.document = d.id
                WHERE b.subject = ? AND f.counted >= ?"""
            (times,) = db.execute(charged, (each.subject, least)).fetchone()
            return int(times), each.spent(forgotten) - most
    return None


def beyond(db: sqlite3.Connection, most: int, left_out: list[bool]) -> list[bool]:
    """The documents on the workbench that a release leaves out so that it has `most` of every subject: those
    that the ledger met last. `left_out` are out already."""
    rows = """SELECT b.row, o.subject FROM batch b JOIN document d ON d.name = b.document
        JOIN belongs o ON o.document = d.id ORDER BY d.id, b.row"""
    subjects: dict[int, set[int]] = {}
    for row, subject in db.execute(rows):
        subjects.setdefault(row, set()).add(subject)
    places = {row: at for at, (row,) in enumerate(db.execute("SELECT row FROM batch ORDER BY row"))}
    counts: dict[int, int] = {}
    out = list(left_out)
    for row, whose in subjects.items():
        at = places[row]
        if not out[at]:
            out[at] = any(counts.get(each, 0) >= most for each in whose)
        if not out[at]:
            counts |= {each: counts.get(each, 0) + 1 for each in whose}
    return out


def _sealed(key: bytes, subject: str) -> str:
    spelled = subject.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(spelled, key=key, digest_size=16, person=b"isthmus subject").hexdigest()
