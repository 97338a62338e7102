"""The ledger's file and, beside it, a tally of how far it has come, by which a lost or older ledger is
noticed.

    silo.ledger         what was charged
    silo.ledger.tally   which ledger that is, and how many versions and departures it has

The tally is written after every change of the ledger and before anything leaves, so the ledger may be ahead
of it, by what a process that died has charged in vain, and never behind. Releases and sketches carry the
number too, for the case that both files are lost or restored together.

This module has the ledger's tables, the migrations of older files, and transactions. SQLite runs in WAL mode
with synchronous=FULL: a commit returns when the disk has it, so charges survive kill -9 and power cuts.
Writers take turns with BEGIN IMMEDIATE, so two processes never read the same remainder and both spend it. The
file belongs on a local disk: WAL needs shared memory.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from os import PathLike
from pathlib import Path

from isthmus.errors import DataError, PrivacyError
from isthmus.files import lock, write_private

_LINE = re.compile(rb"isthmus ledger ([0-9a-f]{32}) ([0-9]{20})\n")
CURE = "put its newest copy back, or tell what may have been spent since: isthmus ledger lost"


@dataclass(frozen=True, slots=True)
class Tally:
    """A ledger's random name, and how far it has come."""

    ledger: str
    number: int

    def __bytes__(self) -> bytes:
        return f"isthmus ledger {self.ledger} {self.number:020}\n".encode()


class TallyFile:
    """The tally of one ledger in its file; every process may raise it and none lowers it."""

    def __init__(self, ledger: str | os.PathLike[str]) -> None:
        self.path = Path(f"{os.fspath(ledger)}.tally")
        self._reached = -1

    def read(self) -> Tally | None:
        """The tally in the file; None if there is no file."""
        try:
            line = _LINE.fullmatch(self.path.read_bytes())
        except FileNotFoundError:
            return None
        if line is None:
            raise DataError("is no tally of a ledger", file=self.path, cure=CURE)
        return Tally(line[1].decode(), int(line[2]))

    def write(self, tally: Tally) -> None:
        """Create the file, or replace its content on purpose."""
        write_private(self.path, bytes(tally))
        self._reached = tally.number

    def advance(self, tally: Tally) -> None:
        """Make sure that the file has this number, or a higher one that another process has written."""
        if tally.number <= self._reached:
            return
        with open(self.path, "r+b", buffering=0) as stream:
            lock(stream.fileno())
            line = _LINE.fullmatch(stream.read())
            if line is None or line[1].decode() != tally.ledger:
                raise DataError("is no tally of this ledger", file=self.path, cure=CURE)
            if int(line[2]) < tally.number:
                stream.seek(0)
                stream.write(bytes(tally))  # the same length, within one disk block
                _synced(stream.fileno())
        self._reached = tally.number


_synced = getattr(os, "fdatasync", os.fsync)  # data only: the file keeps its length


def check(reached: int, file: str | os.PathLike[str], *, expected: int, by: str | os.PathLike[str]) -> None:
    """Raise DataError if a ledger has not reached the number of a file that was written after it."""
    if reached < expected:
        problem = (
            f"is an older ledger: it has come to {reached}, and {os.fspath(by)} was written at {expected}"
        )
        raise DataError(f"{problem}, so what was charged since is not in it", file=file, cure=CURE)


def lost(file: str | os.PathLike[str], by: str | os.PathLike[str]) -> DataError:
    """The error for a ledger that is missing, while a file exists that was written after it."""
    return DataError(f"the ledger is lost: {os.fspath(by)} is there, and it is not", file=file, cure=CURE)


APPLICATION = 0x49535448  # "ISTH", in the file's header

KINDS = (
    "catalogue",
    "counts",
    "sketch",
    "sums",
    "model update",
    "probe report",
    "scores",
    "snippets",
    "documents",
    "feedback",
    "query text",
    "incident",
)
"""The kinds of things that leave a silo, and incidents: releases that were refused or broken off."""

INCIDENT = "incident"

NO_GUARANTEE = "no DP guarantee"

EVERYBODY = 0
"""The peer number under which `spent` has the sums of a document over all peers together."""

_FOLDER = resources.files("isthmus.private.ledger")

MIGRATIONS: tuple[tuple[str, ...], ...] = tuple(
    tuple(statement for statement in step.partition("\n")[2].split(";\n") if statement.strip())
    for step in _FOLDER.joinpath("schema.sql").read_text("utf-8").split("-- step ")[1:]
)
"""The statements that lead from one version of the schema to the next; the file stores how many have run."""

SQL: dict[str, str] = {
    name: statement
    for name, _, statement in (
        part.partition("\n")
        for part in _FOLDER.joinpath("statements.sql").read_text("utf-8").split("-- name: ")[1:]
    )
}
"""The longer SQL statements by name."""


class LedgerStore:
    """A connection to the ledger's file, for all threads of one process."""

    def __init__(self, path: str | PathLike[str], *, create: bool, patience: float = 60.0) -> None:
        self.path = os.fspath(path)
        self.tally_file = TallyFile(path)
        self._patience = patience
        self._turn = threading.RLock()
        self._process = os.getpid()
        if not os.path.exists(self.path):
            if not create:
                cure = "check the path; isthmus sketch build and a node's first start create one"
                raise DataError("there is no ledger", file=self.path, cure=cure)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # private: it names documents
        try:
            self._db = self._connected()
        except sqlite3.DatabaseError as error:
            raise self._translated(error) from error

    def _connected(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=self._patience, isolation_level=None, check_same_thread=False)
        try:
            self._patiently(db, "PRAGMA journal_mode=WAL")  # this pragma does not wait by itself
            for setting in ("synchronous=FULL", "fullfsync=1", "temp_store=MEMORY", "cache_size=-65536"):
                db.execute(f"PRAGMA {setting}")
            self._migrate(db)
            db.executescript(SQL["workbench"])
        except BaseException:
            db.close()
            raise
        return db

    def _patiently(self, db: sqlite3.Connection, statement: str) -> None:
        """Retry every millisecond: SQLite's own waiting sleeps ever longer, and starves under steady
        demand."""
        until = time.monotonic() + self._patience
        db.execute("PRAGMA busy_timeout=0")
        while True:
            try:
                db.execute(statement)
                break
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > until:
                    raise
                time.sleep(0.001)
        db.execute(f"PRAGMA busy_timeout={int(1000 * self._patience)}")

    def _migrate(self, db: sqlite3.Connection) -> None:
        if self._level(db) == len(MIGRATIONS):
            return
        db.execute("BEGIN EXCLUSIVE")  # a second process then finds the migrations done
        try:
            for step in MIGRATIONS[self._level(db) :]:
                for statement in step:
                    db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION}")
            db.execute(f"PRAGMA user_version={len(MIGRATIONS)}")
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise

    def _level(self, db: sqlite3.Connection) -> int:
        """The number of migrations that the file has had."""
        # tables first: another process may create tables, id and version between these statements
        (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (level,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION and tables:
            raise DataError("a database, but no ledger", file=self.path)
        if level > len(MIGRATIONS):
            raise DataError(
                f"the ledger has format {level}, this Isthmus knows {len(MIGRATIONS)}",
                file=self.path,
                cure="a newer Isthmus wrote it: update this one",
            )
        return int(level)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A read transaction: one consistent view, whatever others write meanwhile."""
        with self._transaction("BEGIN", "ROLLBACK") as db:
            yield db

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A read transaction on a connection of its own, for iterations so long that others should not wait
        for them."""
        db = sqlite3.connect(self.path, timeout=self._patience, isolation_level=None, check_same_thread=False)
        try:
            db.execute("BEGIN")
            yield db
        except sqlite3.Error as error:
            raise self._translated(error) from error
        finally:
            db.close()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction: exclusive, all or nothing, and on disk with its tally when the block ends
        without an error."""
        with self._turn:
            with self._transaction("BEGIN IMMEDIATE", "COMMIT") as db:
                yield db
                reached = self.tally(db)
            if reached is not None:
                try:
                    self.tally_file.advance(reached)
                except OSError as error:
                    # peers may see this message, so it names no file
                    raise PrivacyError(
                        f"the tally beside the ledger cannot be written ({error.strerror}); nothing may leave"
                    ) from error

    def rewrite(self) -> None:
        """Rewrite the file, so that it contains its entries and no deleted data, and empty its log."""
        with self._turn:
            try:
                self._patiently(self._db, "VACUUM")
                self._patiently(self._db, "PRAGMA wal_checkpoint(TRUNCATE)")
            except sqlite3.Error as error:
                raise self._translated(error) from error

    def tally(self, db: sqlite3.Connection) -> Tally | None:
        """How far the ledger has come; None if it has no name yet. Entries are never removed."""
        row = db.execute("SELECT value FROM setting WHERE name = 'ledger'").fetchone()
        return None if row is None else Tally(row[0], self.number(db))

    def number(self, db: sqlite3.Connection) -> int:
        """The number of versions and departures, added to the number at which the ledger began after a
        loss."""
        return int(db.execute(SQL["number"]).fetchone()[0])

    def recognise(self, name: str) -> None:
        """Check that this is the ledger of the tally beside it and not an older one. Raises DataError
        otherwise.

        A ledger without a name, because it is new or from an older Isthmus, gets `name`.
        """
        recorded = self.tally_file.read()  # first: a ledger that grows meanwhile is never behind it
        with self.reading() as db:
            reached = self.tally(db)
        if reached is None:
            reached = recorded = self._named(name)
        if recorded is None:
            raise DataError(f"has no tally: {self.tally_file.path} is not there", file=self.path, cure=CURE)
        if recorded.ledger != reached.ledger:
            raise DataError(
                f"is another ledger than that of {self.tally_file.path}", file=self.path, cure=CURE
            )
        check(reached.number, self.path, expected=recorded.number, by=self.tally_file.path)
        self.tally_file.advance(reached)

    def _named(self, name: str) -> Tally:
        with self._transaction("BEGIN IMMEDIATE", "COMMIT") as db:
            reached = self.tally(db)
            if reached is not None:
                return reached
            recorded = self.tally_file.read()
            reached = Tally(name if recorded is None else recorded.ledger, self.number(db))
            if recorded is None:
                self.tally_file.write(reached)  # first: a named ledger without a tally counts as damaged
            else:
                check(reached.number, self.path, expected=recorded.number, by=self.tally_file.path)
            db.execute("INSERT INTO setting VALUES ('ledger', ?)", (reached.ledger,))
            return reached

    @contextmanager
    def _transaction(self, begin: str, end: str) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._process:
            raise PrivacyError("a ledger does not survive a fork: open it again in the new process")
        with self._turn:
            try:
                self._patiently(self._db, begin)
                try:
                    yield self._db
                    self._db.execute(end)
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._translated(error) from error

    def _translated(self, error: sqlite3.Error) -> DataError | PrivacyError:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            return PrivacyError(
                f"another process held the ledger for {self._patience:g} s; nothing may leave"
            )
        if isinstance(error, sqlite3.OperationalError):
            return PrivacyError(f"the ledger cannot be used ({error}); nothing may leave")
        return DataError(f"no readable ledger: {error}", file=self.path)

    def close(self) -> None:
        """Close the database and release its lock."""
        with self._turn:
            if os.getpid() == self._process:
                self._db.close()
