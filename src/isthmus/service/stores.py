"""Storage of a node's documents and of people's judgements: SQLite in its folder, or PostgreSQL.

Every document that is written or removed gets the next number of a counter, in the same transaction. An index
that has seen changes up to a number asks for `changes` after it and misses nothing, whenever it was killed. A
removed document leaves its id and number and nothing of its text.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from isthmus.engines import Change, may_see
from isthmus.errors import DataError, ServiceError
from isthmus.languages import DEFAULT
from isthmus.service.templates import template

T = TypeVar("T")

_EXTENSION = re.compile(r"[^/.]\.([A-Za-z][A-Za-z0-9]{0,7})$")
_USUAL = re.compile(
    "csv|docx?|eml|html?|json|markdown|md|odt|parquet|pdf|pptx?|rst|rtf|text|tsv|txt|xhtml|xlsx?|xml"
)
"""Usual extensions of files, which count without a folder in the id too."""
APPLICATION = 0x49534E44  # "ISND", in the header of a SQLite file
BATCH = 500
SUBJECT = "\0subject\0"
"""Prefix of a subject in digests: no document's id has such characters."""
LEAST_NAME = 6
"""Fewest letters of a name that is searched for in people's texts: shorter ones may be ordinary words."""
READ = 1_000
"""Documents that are read at once when all are read."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A document as its source provides it."""

    id: str
    title: str
    body: str
    language: str = ""
    """Code of its language; "" for English, as in stores of the previous release."""
    type: str = ""
    """Its type in lower case, if the source states it; else the extension of its id is its type."""
    date: int | None = None
    """Its Unix time, if the source states it."""
    modified: int | None = None
    """When its file was written: its date if the source states none. A new one alone changes nothing."""
    allow: tuple[str, ...] = ()
    """Principals who may see it, in order (`access.principals_of`); if empty, all whom the policy admits."""
    subject: str = ""
    """The person it is about, a patient or a customer, as the source calls them."""
    original: tuple[str, str] | None = None
    """Title and body with parts withheld from most people, if any. Only `originals` returns it."""

    @property
    def digest(self) -> bytes:
        """Digest of title, body, language and all other stated fields, to detect changes."""
        parts: list[bytes] = []
        other: tuple[str, ...] = () if self.language in ("", DEFAULT) else (self.language,)
        if self.type or self.date is not None:
            other += (f"type={self.type}", f"date={self.date}")
        if self.allow or self.subject:
            other += (f"subject={self.subject}", *(f"allow={each}" for each in self.allow))
        if self.original is not None:
            other += ("original", *self.original)
        for text in (self.title, self.body, *other):
            spelled = text.encode("utf-8", "surrogatepass")
            parts += (len(spelled).to_bytes(8, "little"), spelled)
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Counts:
    """How many documents were added, changed and removed."""

    added: int = 0
    changed: int = 0
    removed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.added + other.added, self.changed + other.changed, self.removed + other.removed)


@dataclass(frozen=True, slots=True)
class Judgement:
    """A person's judgement of a document for a query, and the node's probabilities at that time."""

    query: str
    document: str
    relevant: bool
    peer: str
    at: float
    probability: float | None = None
    evidence: Mapping[str, float | None] = field(default_factory=dict)
    """The probability that each retriever gave."""
    person: str = ""
    """The person who judged, by the name that the peer has for them."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A person's request to the owner. `state` is waiting, allowed, denied or opened."""

    number: str
    document: str
    peer: str
    person: str
    name: str
    query: str
    reason: str
    at: float
    state: str = "waiting"
    word: str = ""
    """The owner's comment."""
    answered: float | None = None


@dataclass(frozen=True)
class Erased:
    """Documents and subjects that were erased, by digests of their ids."""

    digests: frozenset[str]
    digest_of: Callable[[str], str]

    def __len__(self) -> int:
        return len(self.digests)

    def __call__(self, id: str) -> bool:
        return bool(self.digests) and self.digest_of(id) in self.digests

    def subject(self, subject: str) -> bool:
        """Whether a subject was erased, with all documents that are or will be about it."""
        return bool(subject) and self(f"{SUBJECT}{subject}")


_REQUEST = "number, document, peer, person, name, query, reason, at, state, word, answered"


def majority(judgements: Iterable[Judgement]) -> dict[tuple[str, str], bool]:
    """Return the majority's judgement by query and document, one vote per person, in order of time.

    On a tie, the previous result stays: nobody cancels another person's judgement by stating the opposite.
    """
    right: dict[tuple[str, str], bool] = {}
    lead: Counter[tuple[str, str]] = Counter()
    for each in judgements:
        pair = (each.query, each.document)
        lead[pair] += 1 if each.relevant else -1
        if lead[pair]:
            right[pair] = lead[pair] > 0
    return right


def type_of(id: str) -> str:
    """Return the type of a document whose source states none: the extension of an id that is a path, else "".

    A name without a folder has none, unless its only dot is before a usual extension: `report.pdf` has one,
    `scipy.stats.norm.pdf` has not.
    """
    if "." not in id:  # as in most ids that are not paths; a pattern takes ten times as long
        return ""
    extension = _EXTENSION.search(id)
    type = "" if extension is None else extension[1].lower()
    return type if "/" in id or (id.count(".") == 1 and _USUAL.fullmatch(type)) else ""


def naming(name: str) -> re.Pattern[str]:
    """Return a pattern that finds a name by itself, not as a part of another."""
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")


def migrations_of(database: str) -> tuple[tuple[str, ...], ...]:
    """Return the steps from an empty database to the current format; a blank line ends a statement."""
    steps = template(f"{database}.sql").split("-- step ")[1:]
    return tuple(tuple(step.partition("\n")[2].strip().split("\n\n")) for step in steps)


class DocumentStore(ABC):
    """Documents and judgements behind SQL that SQLite and PostgreSQL both understand.

    Safe to use from many threads; several processes may read, and one node writes.
    """

    migrations: ClassVar[tuple[tuple[str, ...], ...]]
    judged_sql: ClassVar[str] = """
        SELECT j.query, j.document, j.relevant, j.peer, j.at, j.probability, j.evidence, j.person
        FROM judgement j JOIN document d ON d.id = j.document AND d.removed = 0
        ORDER BY j.at, j.query, j.document, j.peer, j.person"""
    digest_of: Callable[[str], str] = staticmethod(lambda id: hashlib.sha256(id.encode()).hexdigest())
    """Returns the digest by which an erased id is recognised; a node sets a keyed one."""

    def __init__(self) -> None:
        self._own, self._lock, self._all = threading.local(), threading.Lock(), list[Any]()

    def _db(self) -> Any:
        """This thread's connection."""
        db = getattr(self._own, "db", None)
        if db is None or self._is_closed(db):
            db = self._own.db = self._connected()
            with self._lock:
                self._all = [*(each for each in self._all if not self._is_closed(each)), db]
        return db

    def _is_closed(self, db: Any) -> bool:
        """Whether the other side has closed a connection."""
        return False

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for db in self._all:
                db.close()
            self._all.clear()

    def _check_level(self, level: int) -> None:
        if level > len(self.migrations):
            raise DataError(
                f"the store has format {level} and this Isthmus knows {len(self.migrations)}",
                cure="a newer Isthmus wrote it: update this one",
            )

    @abstractmethod
    def _connected(self) -> Any:
        """A new connection for one thread, migrated."""

    @abstractmethod
    def _rows(self, db: Any, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement with `?` for values. Returns its rows, if it has any."""

    @abstractmethod
    def _many(self, db: Any, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for many rows."""

    @contextmanager
    @abstractmethod
    def _transaction(self, *, writing: bool = False) -> Iterator[Any]:
        """Yield a connection inside a transaction, which is carried out as a whole or not at all."""

    def put(self, documents: Iterable[Draft], *, source: str = "") -> Counts:
        """Add documents and change those that differ, `BATCH` in one transaction."""
        done = Counts()
        for batch in _batches(documents):
            unique = {draft.id: draft for draft in batch}
            with self._transaction(writing=True) as db:
                known = self._known(db, list(unique))
                digests = {id: draft.digest for id, draft in unique.items()}
                new = [draft for id, draft in unique.items() if known.get(id) != digests[id]]
                self._write(db, new, digests, source)
                same = [id for id in unique if known.get(id) == digests[id]]
                self._claim(db, same, source)
                self._date(db, [unique[id] for id in same if unique[id].modified is not None])
            added = sum(draft.id not in known for draft in new)
            done += Counts(added=added, changed=len(new) - added)
        if done.changed:
            self._forget()
        return done

    def _forget(self) -> None:  # noqa: B027  (PostgreSQL sees to it)
        """Leave nothing on disk of texts that were replaced or removed."""

    def rewrite(self) -> None:  # noqa: B027
        """Leave nothing on disk of such texts, even if the whole store must be rewritten."""

    def _among(
        self, db: Any, sql: str, ids: Sequence[str], *values: Any, returning: str = ""
    ) -> list[tuple[Any, ...]]:
        """Run a statement that ends in `id IN` for these ids, few enough for one. Returns its rows."""
        ending = f" RETURNING {returning}" if returning else ""
        return self._rows(db, f"{sql} ({', '.join('?' * len(ids))}){ending}", (*values, *ids))

    def _by_id(self, sql: str, ids: Iterable[str], *values: Any) -> Iterator[tuple[Any, ...]]:
        """Rows by id, for any number of ids."""
        with self._reading() as db:
            for batch in _batches(ids):
                yield from self._among(db, sql, batch, *values)

    def _reading(self) -> AbstractContextManager[Any]:
        """Return a connection for statements that need not see the same state."""
        return self._transaction()

    def _known(self, db: Any, ids: Sequence[str]) -> dict[str, bytes]:
        sql = "SELECT id, digest FROM document WHERE removed = 0 AND id IN"
        return {id: bytes(digest) for id, digest in self._among(db, sql, ids)}

    def _claim(self, db: Any, ids: Sequence[str], source: str) -> None:
        """Assign unchanged documents to the source that gave them last; for an index nothing has changed."""
        if not ids:
            return
        others = self._among(db, "SELECT id FROM document WHERE source <> ? AND id IN", ids, source)
        if others:
            self._many(db, "UPDATE document SET source = ? WHERE id = ?", [(source, id) for (id,) in others])

    def _date(self, db: Any, drafts: Sequence[Draft]) -> None:
        """Set the date of otherwise unchanged documents without one: the previous release stored no dates,
        and its index is rebuilt."""
        if not drafts:
            return
        ids = [each.id for each in drafts]
        undated = {
            id for (id,) in self._among(db, "SELECT id FROM document WHERE date IS NULL AND id IN", ids)
        }
        rows = [(each.modified, each.id) for each in drafts if each.id in undated]
        if rows:
            self._many(db, "UPDATE document SET date = ? WHERE id = ?", rows)

    def _write(self, db: Any, drafts: Sequence[Draft], digests: Mapping[str, bytes], source: str) -> None:
        if not drafts:
            return
        first, now = self._reserve(db, len(drafts)), time.time()
        self._many(
            db,
            """INSERT INTO document
                (id, source, title, body, language, type, date, allow, subject, arrived, original, digest,
                change, removed)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0) ON CONFLICT (id) DO UPDATE SET
                arrived = coalesce(document.arrived, excluded.arrived),
                source = excluded.source, title = excluded.title, body = excluded.body,
                language = excluded.language, type = excluded.type, date = excluded.date,
                allow = excluded.allow, subject = excluded.subject, original = excluded.original,
                digest = excluded.digest, change = excluded.change, removed = 0""",
            [
                (
                    each.id,
                    source,
                    _storable(each.title),
                    _storable(each.body),
                    each.language,
                    _storable(each.type),
                    each.modified if each.date is None else each.date,
                    "\n".join(map(_storable, each.allow)),
                    _storable(each.subject),
                    now,
                    "" if each.original is None else json.dumps(each.original),
                    digests[each.id],
                    change,
                )
                for change, each in enumerate(drafts, first)
            ],
        )

    def _reserve(self, db: Any, count: int) -> int:
        """Reserve `count` change numbers and return the first; other writers wait for this transaction."""
        ((last,),) = self._rows(db, "UPDATE counter SET value = value + ? RETURNING value", (count,))
        return int(last) - count + 1

    def remove(self, ids: Iterable[str]) -> int:
        """Remove documents. Returns how many there were."""
        gone = 0
        for batch in _batches(ids):
            with self._transaction(writing=True) as db:
                known = sorted(self._known(db, list(batch)))
                first = self._reserve(db, len(known))
                self._many(
                    db,
                    """UPDATE document SET title = '', body = '', type = '', date = NULL, arrived = NULL,
                        allow = '', original = '', digest = ?, change = ?, removed = 1
                    WHERE id = ?""",
                    [(b"", first + at, id) for at, id in enumerate(known)],
                )
                gone += len(known)
        if gone:
            self._forget()
        return gone

    def erase(self, ids: Sequence[str], subject: str = "") -> dict[str, int]:
        """Delete all data about removed documents, judgements and requests included. Returns how many were
        deleted.

        Only keyed digests of their ids remain, by which `Erased` recognises them. An index must have
        processed their removal first. If `subject` is given, people's texts that name it are deleted too.
        """
        counts = Counter[str](judgements=0, requests=0)
        for batch in _batches(ids):
            with self._transaction(writing=True) as db:
                stones = [(f"erased-{secrets.token_hex(16)}", id) for id in batch]
                self._many(
                    db,
                    "UPDATE document SET id = ?, source = '', subject = '' WHERE id = ? AND removed = 1",
                    stones,
                )
                for table in ("judgement", "request"):
                    gone = self._among(db, f"SELECT document FROM {table} WHERE document IN", batch)
                    counts[f"{table}s"] += len(gone)
                    self._among(db, f"DELETE FROM {table} WHERE document IN", batch)
        if len(subject) >= LEAST_NAME:
            for table, columns in (("judgement", ("query",)), ("request", ("query", "reason", "word"))):
                counts[f"{table}s"] += self._erase_naming(table, columns, subject)
        self._forget()
        return dict(counts)

    def _erase_naming(self, table: str, columns: Sequence[str], name: str) -> int:
        """Delete rows with a text that names somebody. Returns how many there were."""
        gone, names = 0, naming(name)
        with self._transaction(writing=True) as db:
            for column in columns:
                texts = [text for (text,) in self._rows(db, f"SELECT DISTINCT {column} FROM {table}")]
                for batch in _batches(text for text in texts if names.search(text)):
                    gone += len(self._among(db, f"SELECT 1 FROM {table} WHERE {column} IN", batch))
                    self._among(db, f"DELETE FROM {table} WHERE {column} IN", batch)
        return gone

    def of_subject(self, subject: str) -> list[str]:
        """Return the ids of all documents about a subject, including removed ones."""
        with self._transaction() as db:
            sql = "SELECT id FROM document WHERE subject = ? ORDER BY id"
            rows = self._rows(db, sql, (_storable(subject),))
        return [id for (id,) in rows]

    def mentioning(self, name: str) -> int:
        """Return how many documents have a name in their title or text."""
        pattern = _having(name)
        sql = """SELECT count(*) FROM document
            WHERE removed = 0 AND (title LIKE ? ESCAPE '!' OR body LIKE ? ESCAPE '!')"""
        with self._transaction() as db:
            ((count,),) = self._rows(db, sql, (pattern, pattern))
        return int(count)

    def expired(self, source: str, *, before: float, arrival: bool) -> list[str]:
        """Return the documents of a source that are dated, or with `arrival` arrived, before a time; without
        a date, the arrival counts."""
        moment = "arrived" if arrival else "coalesce(date, arrived)"
        sql = f"SELECT id FROM document WHERE removed = 0 AND source = ? AND {moment} < ? ORDER BY id"
        with self._transaction() as db:
            return [id for (id,) in self._rows(db, sql, (source, before))]

    def settle_arrivals(self, now: float) -> None:
        """Set the arrival of documents that an earlier release has stored to now."""
        with self._transaction(writing=True) as db:
            self._rows(db, "UPDATE document SET arrived = ? WHERE arrived IS NULL AND removed = 0", (now,))

    def expired_judgements(self, source: str, *, before: float, forget: bool = False) -> int:
        """Count the judgements of a source's documents from before a time; with `forget`, delete them."""
        old = "FROM judgement WHERE at < ? AND document IN (SELECT id FROM document WHERE source = ?)"
        with self._transaction(writing=forget) as db:
            ((count,),) = self._rows(db, f"SELECT count(*) {old}", (before, source))
            if forget and count:
                self._rows(db, f"DELETE {old}", (before, source))
        if forget and count:
            self._forget()
        return int(count)

    def count_judgements(self) -> int:
        """How many judgements there are."""
        with self._transaction() as db:
            ((count,),) = self._rows(db, "SELECT count(*) FROM judgement")
        return int(count)

    def block(self, ids: Iterable[str], *, at: float) -> None:
        """Keep sources from bringing these documents back; an id with the prefix `SUBJECT` is a subject."""
        sql = "INSERT INTO erased (digest, at) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING"
        with self._transaction(writing=True) as db:
            self._many(db, sql, [(self.digest_of(id), at) for id in ids])

    def readmit(self, ids: Iterable[str]) -> int:
        """Allow sources to bring erased documents again. Returns how many had been erased."""
        digests = [self.digest_of(id) for id in ids]
        with self._transaction(writing=True) as db:
            return len(self._among(db, "DELETE FROM erased WHERE digest IN", digests, returning="digest"))

    def readmit_subject(self, subject: str) -> int:
        """Allow sources to bring an erased subject's documents again. Returns the number of entries."""
        digest = self.digest_of(f"{SUBJECT}{subject}")
        together = "DELETE FROM erased WHERE at IN (SELECT at FROM erased WHERE digest = ?) RETURNING digest"
        with self._transaction(writing=True) as db:
            return len(self._rows(db, together, (digest,)))

    def blocked(self) -> Erased:
        """Return the documents and subjects that were erased, as a test by id."""
        with self._transaction() as db:
            digests = frozenset(digest for (digest,) in self._rows(db, "SELECT digest FROM erased"))
        return Erased(digests, lambda id: self.digest_of(id))  # looked up late: a node replaces `digest_of`

    def mentioned(self, ids: Sequence[str]) -> set[str]:
        """Return those of the ids about which something is known: a document, also a removed or erased one, a
        judgement, or a request."""
        tables = (
            "SELECT id FROM document WHERE id IN",
            *(f"SELECT document FROM {table} WHERE document IN" for table in ("judgement", "request")),
        )
        rows = (row for sql in tables for row in self._by_id(sql, ids))
        return {id for (id,) in rows} | set(filter(self.blocked(), ids))

    def listed(self, *, source: str = "", words: str = "", most: int = 100) -> list[tuple[str, ...]]:
        """Return (id, title, source, language, allow, subject) of documents in the order of ids: of a source,
        if named, and with all of the words in id or title."""
        conditions, values = ["removed = 0"], list[Any]()
        if source:
            conditions.append("source = ?")
            values.append(source)
        for word in words.lower().split():
            conditions.append("(lower(id) LIKE ? ESCAPE '!' OR lower(title) LIKE ? ESCAPE '!')")
            values += [_having(word)] * 2
        where = " AND ".join(conditions)
        columns = "id, title, source, language, allow, subject"
        sql = f"SELECT {columns} FROM document WHERE {where} ORDER BY id LIMIT ?"
        with self._transaction() as db:
            rows = self._rows(db, sql, (*values, most))
        return [(*row, "; ".join(_lines(allow)), subject) for *row, allow, subject in rows]

    def subjects(self) -> dict[str, str]:
        """Return the subjects of documents, by id, for documents that have one."""
        with self._transaction() as db:
            return dict(
                self._rows(db, "SELECT id, subject FROM document WHERE subject <> '' AND removed = 0")
            )

    def retain(self, source: str, ids: Iterable[str], *, below: tuple[str, ...] = ()) -> int:
        """Remove documents that a source no longer gives, except ids that begin with one of `below`."""
        named = set(ids)
        with self._transaction() as db:
            stored = self._rows(db, "SELECT id FROM document WHERE source = ? AND removed = 0", (source,))
        return self.remove([id for (id,) in stored if id not in named and not id.startswith(below)])

    def owners(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the source of each of these documents, including removed ones."""
        return dict(self._by_id("SELECT id, source FROM document WHERE id IN", ids))

    def by_source(self) -> dict[str, int]:
        """How many documents there are of every source."""
        sql = "SELECT source, count(*) FROM document WHERE removed = 0 GROUP BY source ORDER BY source"
        with self._transaction() as db:
            return {source: int(count) for source, count in self._rows(db, sql)}

    def changes(self, after: int, limit: int) -> list[Change]:
        """Return the documents written or removed since a change, in order, each as it is now."""
        sql = """SELECT id, change, removed, title, body, language, type, date, allow FROM document
            WHERE change > ? ORDER BY change LIMIT ?"""
        with self._transaction() as db:
            rows = self._rows(db, sql, (after, limit))
        return [
            Change(id, change, removed != 0, title, body, language, type or type_of(id), date, _lines(allow))
            for id, change, removed, title, body, language, type, date, allow in rows
        ]

    def living(self) -> Iterator[Change]:
        """Every document there is, in the order of its last change."""
        after = 0
        while changes := self.changes(after, READ):
            yield from (change for change in changes if not change.removed)
            after = changes[-1].change

    def spread(self, count: int) -> Iterator[Change]:
        """Yield at most `count` documents, evenly spaced from the first change to the last."""
        seen = set()
        for after in np.linspace(0, self.latest(), count, endpoint=False).astype(int).tolist():
            for change in self.changes(after, 1):
                if not change.removed and change.id not in seen:
                    seen.add(change.id)
                    yield change

    def get(self, ids: Sequence[str]) -> dict[str, Draft]:
        """The documents with these ids, by id; unknown ids are left out."""
        sql = """SELECT id, title, body, language, type, date, allow, subject FROM document
            WHERE removed = 0 AND id IN"""
        return {
            id: Draft(id, title, body, language, type, date, allow=_lines(allow), subject=subject)
            for id, title, body, language, type, date, allow, subject in self._by_id(sql, ids)
        }

    def originals(self, ids: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Return title and body of documents with withheld parts, including those parts."""
        sql = "SELECT id, original FROM document WHERE original <> '' AND removed = 0 AND id IN"
        return {id: (title, body) for id, text in self._by_id(sql, ids) for title, body in [json.loads(text)]}

    def count(self) -> int:
        """How many documents there are."""
        with self._transaction() as db:
            ((count,),) = self._rows(db, "SELECT count(*) FROM document WHERE removed = 0")
        return int(count)

    def languages(self, principals: frozenset[str] | None = None) -> dict[str, int]:
        """Count the documents in every language, by its code: all, or those that these principals may see."""
        sql = "SELECT allow, language, count(*) FROM document WHERE removed = 0 GROUP BY allow, language"
        counts: Counter[str] = Counter()
        with self._transaction() as db:
            for allow, code, count in self._rows(db, sql):
                if principals is None or may_see(_lines(allow), principals):
                    counts[code or DEFAULT] += int(count)
        return dict(sorted(counts.items()))

    def principals(self) -> frozenset[str]:
        """Return the principals that any document names."""
        with self._transaction() as db:
            rows = self._rows(db, "SELECT DISTINCT allow FROM document WHERE removed = 0")
        return frozenset(name for (allow,) in rows for name in _lines(allow))

    def latest(self) -> int:
        """The number of the last change."""
        with self._transaction() as db:
            ((value,),) = self._rows(db, "SELECT value FROM counter")
        return int(value)

    def judge(self, *judgements: Judgement) -> None:
        """Store judgements; a later one of the same person, query and document replaces the earlier."""
        with self._transaction(writing=True) as db:
            self._many(
                db,
                """INSERT INTO judgement (query, document, peer, person, relevant, at, probability, evidence)
                VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (query, document, peer, person) DO UPDATE SET
                    relevant = excluded.relevant, at = excluded.at,
                    probability = excluded.probability, evidence = excluded.evidence""",
                [
                    (
                        _storable(judgement.query),
                        judgement.document,
                        judgement.peer,
                        judgement.person,
                        int(judgement.relevant),
                        judgement.at,
                        judgement.probability,
                        json.dumps(dict(judgement.evidence)),
                    )
                    for judgement in judgements
                ],
            )

    def merge_judgements(self, judgements: Sequence[Judgement]) -> Counts:
        """Store those of one person's judgements that differ from stored ones. Returns their counts."""
        unique = {(_storable(each.query), each.document): each for each in judgements}
        if not unique:
            return Counts()
        (who,) = {(each.peer, each.person) for each in unique.values()}
        sql = "SELECT query, document, relevant FROM judgement WHERE peer = ? AND person = ? AND query IN"
        rows = self._by_id(sql, dict.fromkeys(query for query, _ in unique), *who)
        stored = {(query, document): bool(relevant) for query, document, relevant in rows}
        new = {pair: each for pair, each in unique.items() if stored.get(pair) is not each.relevant}
        self.judge(*new.values())
        added = len(new.keys() - stored.keys())
        return Counts(added=added, changed=len(new) - added)

    def withdraw(self, query: str, document: str, *, peer: str, person: str) -> None:
        """Delete a person's judgement of a document for a query, if there is one."""
        sql = "DELETE FROM judgement WHERE query = ? AND document = ? AND peer = ? AND person = ?"
        with self._transaction(writing=True) as db:
            self._rows(db, sql, (_storable(query), document, peer, person))

    def verdicts(self, query: str, documents: Sequence[str], *, peer: str) -> list[tuple[str, str, bool]]:
        """Return (document, person, relevant) of people's judgements through a peer, the latest last."""
        sql = """SELECT document, person, relevant, at FROM judgement
            WHERE query = ? AND peer = ? AND document IN"""
        rows = sorted(self._by_id(sql, documents, _storable(query), peer), key=lambda row: row[3])
        return [(document, person, bool(relevant)) for document, person, relevant, _ in rows]

    def ask(self, request: StoredRequest) -> None:
        """Store a request for a document."""
        values = [getattr(request, name) for name in _REQUEST.split(", ")]
        values = [_storable(value) if isinstance(value, str) else value for value in values]
        with self._transaction(writing=True) as db:
            self._rows(
                db, f"INSERT INTO request ({_REQUEST}) VALUES ({', '.join('?' * len(values))})", values
            )

    def requests(self, *, peer: str | None = None, person: str | None = None) -> list[StoredRequest]:
        """Return requests, the latest first: all, those through a peer, or those of one person of a peer."""
        where = {name: value for name, value in (("peer", peer), ("person", person)) if value is not None}
        condition = f" WHERE {' AND '.join(f'{name} = ?' for name in where)}" if where else ""
        sql = f"SELECT {_REQUEST} FROM request{condition} ORDER BY at DESC, number"
        with self._transaction() as db:
            return [StoredRequest(*row) for row in self._rows(db, sql, list(where.values()))]

    def settle_request(self, number: str, was: str, state: str, *, word: str = "", at: float) -> bool:
        """Move a request from state `was` to `state`. Returns whether it was in state `was`."""
        sql = """UPDATE request SET state = ?, word = CASE WHEN ? = '' THEN word ELSE ? END, answered = ?
            WHERE number = ? AND state = ? RETURNING number"""
        with self._transaction(writing=True) as db:
            return bool(self._rows(db, sql, (state, word, _storable(word), at, number, was)))

    def forget_requests(self, *, before: float) -> None:
        """Remove requests from before a time."""
        with self._transaction(writing=True) as db:
            self._rows(db, "DELETE FROM request WHERE at < ?", (before,))

    def present(self, ids: Iterable[str], principals: frozenset[str] | None = None) -> set[str]:
        """Return those of the ids that are stored, and that these principals may see; None may see all."""
        rows = self._by_id("SELECT id, allow FROM document WHERE removed = 0 AND id IN", ids)
        return {id for id, allow in rows if principals is None or may_see(_lines(allow), principals)}

    def judgements(self) -> list[Judgement]:
        """All judgements of documents that are still stored, in order of time."""
        with self._transaction() as db:
            rows = self._rows(db, self.judged_sql)
        return [
            Judgement(query, document, bool(relevant), peer, at, chance, json.loads(evidence), person)
            for query, document, relevant, peer, at, chance, evidence, person in rows
        ]


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        yield batch


def _having(text: str) -> str:
    """Return a pattern of LIKE for texts that contain a text."""
    escaped = re.sub("[!%_]", r"!\g<0>", text)
    return f"%{escaped}%"


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.split("\n")) if text else ()


def _storable(text: str) -> str:
    """Replace characters that no database accepts: halves of surrogate pairs and NUL."""
    whole = text if text.isascii() else text.encode("utf-8", "replace").decode()
    return whole.replace("\0", " ")


class SqliteStore(DocumentStore):
    """Store in one SQLite file, in WAL mode; every thread has a connection of its own."""

    migrations = migrations_of("sqlite")

    def __init__(self, path: str | Path, *, patience: float = 30.0) -> None:
        self.path, self._patience = Path(path), patience
        super().__init__()
        self._db()

    def _connected(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(self.path, timeout=self._patience, isolation_level=None, check_same_thread=False)
        try:
            for setting in ("journal_mode=WAL", "synchronous=FULL", "cache_size=-16384", "secure_delete=ON"):
                db.execute(f"PRAGMA {setting}")
            self._migrate(db)
        except sqlite3.DatabaseError as error:
            db.close()
            raise DataError(f"cannot be opened: {error}", file=self.path, cure="go back to a copy") from error
        return db

    def _migrate(self, db: sqlite3.Connection) -> None:
        with self._lock:
            (level,) = db.execute("PRAGMA user_version").fetchone()
            (application,) = db.execute("PRAGMA application_id").fetchone()
            (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if tables and application != APPLICATION:
                db.close()
                raise DataError("a database, but not a node's", file=self.path)
            self._check_level(level)
            if level == len(self.migrations):
                return
            db.execute("BEGIN EXCLUSIVE")
            (level,) = db.execute("PRAGMA user_version").fetchone()
            for step in self.migrations[level:]:
                for statement in step:
                    db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION}")
            db.execute(f"PRAGMA user_version={len(self.migrations)}")
            db.execute("COMMIT")

    def _forget(self) -> None:
        """Empty the write-ahead log, which keeps old texts; `secure_delete` covers the rest."""
        self._db().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def rewrite(self) -> None:
        """Rewrite the file, so that it contains nothing but what is stored, and empty its log."""
        try:
            self._db().execute("VACUUM")
        except sqlite3.OperationalError as error:
            raise ServiceError(f"the store cannot be written anew now: {error}; try again") from error
        self._forget()

    def _rows(self, db: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return db.execute(sql, values).fetchall()

    def _reading(self) -> AbstractContextManager[sqlite3.Connection]:
        return nullcontext(self._db())

    def _many(self, db: sqlite3.Connection, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        db.executemany(sql, rows)

    @contextmanager
    def _transaction(self, *, writing: bool = False) -> Iterator[sqlite3.Connection]:
        db = self._db()
        db.execute("BEGIN IMMEDIATE" if writing else "BEGIN")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
