"""A node's store in PostgreSQL.

Several nodes may share a server, each with a database of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from isthmus.errors import ConfigError, MissingExtra, ServiceError
from isthmus.service.settings import is_loopback
from isthmus.service.stores import DocumentStore, migrations_of

SCHEMA_LOCK = 0x49534E44
CLEAR = ("disable", "allow", "prefer")
"""Values of sslmode under which a third party can read the traffic, or force it into clear text."""


def secured(url: str, key: str) -> str:
    """Return the address with TLS and a verified name, unless it is on this machine or has an sslmode of its
    own.

    As in libpq, values that the address lacks come from the environment. Raises ConfigError for an sslmode of
    `CLEAR`.
    """
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        parts = conninfo_to_dict(url)
    except ProgrammingError:  # its message may contain the password
        raise ConfigError(f"{key} is not an address of PostgreSQL", key=key) from None
    if any("@" in host[1:] for host in _hosts(parts)):  # messages would name it as the host
        raise ConfigError(f"{key} has a password with @ in it", key=key, expected="%40 in its place")
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
    """Hosts to which libpq would connect; that of a service file's entry is unknown and counts as remote."""
    for name, variable in (("hostaddr", "PGHOSTADDR"), ("host", "PGHOST")):
        text = parts.get(name) or ("" if parts.get("service") else os.environ.get(variable))
        if text:
            return str(text).split(",")
    return ["service"] if parts.get("service") or os.environ.get("PGSERVICE") else [""]


def _is_here(host: str) -> bool:
    return not host or host.startswith(("/", "@")) or is_loopback(host)  # / and @: Unix sockets


class PostgresStore(DocumentStore):
    """Store in PostgreSQL, with one connection per thread; one that the server has closed is opened again."""

    migrations = migrations_of("postgres")

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtra("postgres", "the PostgreSQL store") from error
        self._psycopg, self._url = psycopg, secured(url, "store.url")
        super().__init__()
        self._db()

    def _is_closed(self, db: Any) -> bool:
        return bool(db.closed)

    def _connected(self) -> Any:
        try:
            db = self._psycopg.connect(self._url, autocommit=True, connect_timeout=10)
        except self._psycopg.OperationalError as error:
            message = str(error).strip().split("\n")[0]
            raise ServiceError(f"PostgreSQL cannot be reached: {message} (check store.url)") from error
        self._migrate(db)
        return db

    def _migrate(self, db: Any) -> None:
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (SCHEMA_LOCK,))
            db.execute("CREATE TABLE IF NOT EXISTS isthmus_format (level INTEGER NOT NULL)")
            row = db.execute("SELECT level FROM isthmus_format").fetchone()
            level = 0 if row is None else int(row[0])
            self._check_level(level)
            for step in self.migrations[level:]:
                for statement in step:
                    db.execute(statement)
            if level == 0:
                db.execute("INSERT INTO isthmus_format VALUES (%s)", (len(self.migrations),))
            elif level < len(self.migrations):
                db.execute("UPDATE isthmus_format SET level = %s", (len(self.migrations),))

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
            raise ServiceError(
                "the connection to PostgreSQL was lost during a transaction (try again; check the server)"
            ) from error

    def _alive(self) -> Any:
        """This thread's connection, opened again if the server has closed it."""
        db = self._db()
        try:
            db.execute("SELECT 1")
        except self._psycopg.OperationalError:
            db.close()
            db = self._db()
        return db
