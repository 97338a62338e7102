"""Subjects of documents: the documents about one subject (a patient, a customer) share one budget.

    ε(S) = Σ over documents d of S, with all their versions, of max over fields f of Σ ε of d's releases in f

A change of one subject may change a word in each of its documents, in any field: a release that counts m of
them sees m changes and costs the subject m·ε (group privacy), and two documents may lose most in two fields.
So this is the largest sum over all choices of a field for every document, an upper bound for each of these
choices. It is the plain sum of ε whatever the budget's rule: m changes in one sum have m² times the square of
one. What a document spent before its subject was stated counts. A subject that gets a document of another
subject is charged with all that the documents of the other have spent.

Subjects are digests under the ledger's key, like erased documents.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from isthmus.private.ledger import chain, erasing
from isthmus.private.ledger.store import EVERYBODY, SQL


class SubjectSum(NamedTuple):
    """The sum of what the documents of a subject have spent."""

    subject: int
    documents: int
    """Number of lineages: a renamed document counts once."""
    epsilon: float

    def spent(self, forgotten: float) -> float:
        """The sum, with the ε that every document counts as having spent because a ledger was lost."""
        return self.epsilon + self.documents * forgotten


def assign(db: sqlite3.Connection, pairs: Iterable[tuple[str, str]], key: bytes) -> None:
    """State (document, subject) for documents that the ledger has; `key` is used if it has none yet."""
    key = erasing.settled_key(db, key)
    named = [(document, _sealed(key, subject)) for document, subject in pairs]
    db.executemany("INSERT OR IGNORE INTO subject (name) VALUES (?)", {(name,) for _, name in named})
    db.execute("DELETE FROM stated")
    db.executemany(SQL["stated subjects"], named)
    db.execute(SQL["inherited"])
    db.execute("INSERT OR IGNORE INTO belongs SELECT document, subject FROM stated")
    chain.link_subjects(db)


def number_of(db: sqlite3.Connection, subject: str) -> int | None:
    """The number of a subject; None for one that the ledger does not have."""
    key = erasing.key_of(db)
    if key is None:
        return None
    row = db.execute("SELECT id FROM subject WHERE name = ?", (_sealed(key, subject),)).fetchone()
    return None if row is None else int(row[0])


def missing(db: sqlite3.Connection, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs (document, subject) that have not been stated yet."""
    key = erasing.key_of(db)
    if key is None:
        return list(pairs)
    known = """SELECT 1 FROM belongs b JOIN document d ON d.id = b.document JOIN subject s ON s.id = b.subject
        WHERE d.name = ? AND s.name = ?"""
    return [pair for pair in pairs if not db.execute(known, (pair[0], _sealed(key, pair[1]))).fetchone()]


def sums(
    db: sqlite3.Connection, only: str, about: tuple[object, ...] = (), *, peer: int = EVERYBODY
) -> Iterator[SubjectSum]:
    """The sums of subjects over all peers or for one, in descending order; `only` is an SQL condition
    on `b`."""
    each = SQL["of a subject"].format(peer=peer, only=only)
    rows = db.execute(
        f"SELECT subject, count(*), sum(most) FROM ({each}) GROUP BY 1 ORDER BY 3 DESC, 1", about
    )
    return (SubjectSum(*row) for row in rows)


def overspent(
    db: sqlite3.Connection, peer: int, *, most: float, forgotten: float, least: int
) -> tuple[int, float] | None:
    """The first subject of charged documents that is above its limit: the number of its documents that were
    charged, and by how much it is above. None if there is none."""
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
    """Whether a release leaves out each document on the workbench to have at most `most` of every subject:
    those that the ledger met last are left out. `left_out` are out already."""
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
