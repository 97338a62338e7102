"""A node's store in PostgreSQL: full-text search by the server, vectors by pgvector where that is installed.

Several nodes may share a server, each with a database of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from isthmus.encoders import Vectors
from isthmus.errors import ConfigError, MissingExtra, ServiceError
from isthmus.service.settings import is_loopback
from isthmus.service.stores import Store, _check_level

SCHEMA_LOCK = 0x49534E44
CLEAR = ("disable", "allow", "prefer")
"""Values of sslmode with which whoever is on the way may read, or have it in the clear."""


def secured(url: str, key: str) -> str:
    """The address with TLS and a verified name, unless it is on this machine or says how it wants TLS.

    As libpq does, what the address leaves open is looked up in the environment.
    """
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        parts = conninfo_to_dict(url)
    except ProgrammingError:  # whose message may have the password in it
        raise ConfigError(f"{key} is not an address of PostgreSQL", key=key) from None
    mode = parts.get("sslmode") or os.environ.get("PGSSLMODE")
    if all(map(_is_here, _hosts(parts))):
        return url
    if mode in CLEAR:
        raise ConfigError(
            f"{key} with sslmode={mode} would send documents and the password in the clear",
            key=key,
            expected="sslmode=verify-full, with sslrootcert=FILE or sslrootcert=system",
        )
    return url if mode else make_conninfo(url, sslmode="verify-full")


def _hosts(parts: Mapping[str, Any]) -> list[str]:
    """Where libpq would connect to; an entry of a service file is unknown, and so elsewhere."""
    for name, variable in (("hostaddr", "PGHOSTADDR"), ("host", "PGHOST")):
        text = parts.get(name) or ("" if parts.get("service") else os.environ.get(variable))
        if text:
            return str(text).split(",")
    return ["service"] if parts.get("service") or os.environ.get("PGSERVICE") else [""]


def _is_here(host: str) -> bool:
    return not host or host.startswith(("/", "@")) or is_loopback(host)  # the former are sockets


class PostgresStore(Store):
    """Every thread has a connection of its own; a connection that the server closed is made again."""

    migrations = (
        (
            "CREATE TABLE counter (value BIGINT NOT NULL)",
            "INSERT INTO counter VALUES (0)",
            """CREATE TABLE document (
                id TEXT COLLATE "C" PRIMARY KEY, source TEXT NOT NULL, title TEXT NOT NULL,
                body TEXT NOT NULL, digest BYTEA NOT NULL, change BIGINT NOT NULL UNIQUE,
                removed INTEGER NOT NULL
            )""",
            """CREATE TABLE judgement (
                query TEXT COLLATE "C" NOT NULL, document TEXT COLLATE "C" NOT NULL,
                peer TEXT COLLATE "C" NOT NULL, relevant INTEGER NOT NULL, at DOUBLE PRECISION NOT NULL,
                probability DOUBLE PRECISION, evidence TEXT NOT NULL, PRIMARY KEY (query, document, peer)
            )""",
            """CREATE TABLE vector (
                document TEXT COLLATE "C" NOT NULL, encoder TEXT NOT NULL, value REAL[] NOT NULL,
                PRIMARY KEY (document, encoder)
            )""",
        ),
        (
            # cut where PostgreSQL's own limit of a megabyte of positions would refuse a document
            """ALTER TABLE document ADD COLUMN words TSVECTOR GENERATED ALWAYS AS (
                setweight(to_tsvector('english', left(title, 10000)), 'A')
                || to_tsvector('english', left(body, 200000))
            ) STORED""",
            "CREATE INDEX document_words ON document USING gin (words)",
        ),
        ("ALTER TABLE vector RENAME TO embedding",),  # pgvector's type has the other name
        (
            # one word a person; what was kept before is the peer's own
            """ALTER TABLE judgement ADD COLUMN person TEXT COLLATE "C" NOT NULL DEFAULT '',
                DROP CONSTRAINT judgement_pkey, ADD PRIMARY KEY (query, document, peer, person)""",
        ),
    )

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtra("postgres", "the PostgreSQL store") from error
        self._psycopg, self._url = psycopg, secured(url, "store.url")
        self._own = threading.local()
        self._lock, self._all = threading.Lock(), list[Any]()
        with self._transaction() as db:
            self.has_pgvector = bool(self._rows(db, "SELECT 1 FROM pg_extension WHERE extname = 'vector'"))

    def _db(self) -> Any:
        found = getattr(self._own, "db", None)
        if found is None or found.closed:
            found = self._own.db = self._connected()
        return found

    def _connected(self) -> Any:
        try:
            db = self._psycopg.connect(self._url, autocommit=True, connect_timeout=10)
        except self._psycopg.OperationalError as error:
            told = str(error).strip().split("\n")[0]
            raise ServiceError(f"PostgreSQL cannot be reached: {told} (check store.url)") from error
        self._migrate(db)
        with self._lock:
            self._all = [*(each for each in self._all if not each.closed), db]
        return db

    def _migrate(self, db: Any) -> None:
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
            db.execute("CREATE TABLE IF NOT EXISTS isthmus_format (level INTEGER NOT NULL)")
            found = db.execute("SELECT level FROM isthmus_format").fetchone()
            level = 0 if found is None else int(found[0])
            _check_level(level, self)
            for step in self.migrations[level:]:
                for statement in step:
                    db.execute(statement)
            if level < len(self.migrations):
                self._try_pgvector(db)
            if level == 0:
                db.execute("INSERT INTO isthmus_format VALUES (%s)", (len(self.migrations),))
            elif level < len(self.migrations):
                db.execute("UPDATE isthmus_format SET level = %s", (len(self.migrations),))

    def _try_pgvector(self, db: Any) -> None:
        """Have the extension if the server offers it and we may."""
        with suppress(self._psycopg.Error), db.transaction():
            db.execute("CREATE EXTENSION IF NOT EXISTS vector")

    def _rows(self, db: Any, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        done = db.execute(sql.replace("?", "%s"), tuple(values))
        rows: list[tuple[Any, ...]] = done.fetchall() if done.description else []
        return rows

    def _many(self, db: Any, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        with db.cursor() as cursor:
            cursor.executemany(sql.replace("?", "%s"), rows)

    @contextmanager
    def _transaction(self, *, writing: bool = False) -> Iterator[Any]:
        db = self._alive()
        try:
            with db.transaction():
                yield db
        except self._psycopg.OperationalError as error:
            raise ServiceError("PostgreSQL went away in the middle of something") from error

    def _alive(self) -> Any:
        """This thread's connection, made again if the server has gone away meanwhile."""
        db = self._db()
        try:
            db.execute("SELECT 1")
        except self._psycopg.OperationalError:
            db.close()
            db = self._db()
        return db

    def find(self, words: Sequence[str], k: int) -> list[str]:
        sql = """SELECT id FROM document, CAST(? AS tsquery) asked
            WHERE words @@ asked AND removed = 0 ORDER BY ts_rank_cd(words, asked) DESC, id LIMIT ?"""
        with self._transaction() as db:
            parts = [self._rows(db, "SELECT plainto_tsquery('english', ?)::text", (word,)) for word in words]
            asked = " | ".join(f"({text})" for ((text,),) in parts if text)
            return [id for (id,) in self._rows(db, sql, (asked, k))] if asked else []

    def nearest(self, encoder: str, vector: Vectors, k: int) -> list[tuple[str, float]]:
        if not self.has_pgvector:
            return self._scan(encoder, vector, k)
        sql = """SELECT document, 1 - (value::vector <=> ?::real[]::vector) AS cosine FROM embedding
            WHERE encoder = ? ORDER BY cosine DESC, document LIMIT ?"""
        with self._transaction() as db:
            rows = self._rows(db, sql, (vector.tolist(), encoder, k))
            return [(id, float(cosine)) for id, cosine in rows]

    def _vector(self, row: Vectors) -> Any:
        return row.tolist()

    def _array(self, value: Any) -> Vectors:
        return np.array(value, dtype=np.float32)

    def close(self) -> None:
        with self._lock:
            for db in self._all:
                db.close()
            self._all.clear()
