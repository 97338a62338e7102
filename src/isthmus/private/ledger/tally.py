"""How far a ledger has come, written down beside it: a ledger that is lost or older than that is noticed.

    silo.ledger         what was charged
    silo.ledger.tally   which ledger that is, and how many versions and departures it has

The tally is written after every change of the ledger and before anything leaves, so the ledger may be ahead
of it, by what a process that died has charged in vain, and never behind. Releases and sketches carry the
number too, for the case that both files are lost or restored together.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import DataError
from isthmus.files import lock, write_private

_LINE = re.compile(rb"isthmus ledger ([0-9a-f]{32}) ([0-9]{20})\n")
CURE = "put its newest copy back, or tell what may have been spent since: isthmus ledger lost"


@dataclass(frozen=True, slots=True)
class Tally:
    """Which ledger, by a random name, and how far it has come."""

    ledger: str
    number: int

    def __bytes__(self) -> bytes:
        return f"isthmus ledger {self.ledger} {self.number:020}\n".encode()


class TallyFile:
    """The file of one ledger, which all its processes raise and none lowers."""

    def __init__(self, ledger: str | os.PathLike[str]) -> None:
        self.path = Path(f"{os.fspath(ledger)}.tally")
        self._reached = -1

    def read(self) -> Tally | None:
        """What stands there; nothing if there is no file."""
        try:
            line = _LINE.fullmatch(self.path.read_bytes())
        except FileNotFoundError:
            return None
        if line is None:
            raise DataError("is no tally of a ledger", file=self.path, cure=CURE)
        return Tally(line[1].decode(), int(line[2]))

    def write(self, tally: Tally) -> None:
        """Begin the file, or replace it on purpose."""
        write_private(self.path, bytes(tally))
        self._reached = tally.number

    def advance(self, tally: Tally) -> None:
        """Have this number on disk, or a higher one that another process has reached."""
        if tally.number <= self._reached:
            return
        with open(self.path, "r+b", buffering=0) as stream:
            lock(stream.fileno())
            line = _LINE.fullmatch(stream.read())
            if line is None or line[1].decode() != tally.ledger:
                raise DataError("is no tally of this ledger", file=self.path, cure=CURE)
            if int(line[2]) < tally.number:
                stream.seek(0)
                stream.write(bytes(tally))  # as long as before, within one block of the disk
                _synced(stream.fileno())
        self._reached = tally.number


_synced = getattr(os, "fdatasync", os.fsync)  # the length stays, so nothing else needs to be on disk


def check(reached: int, file: str | os.PathLike[str], *, expected: int, by: str | os.PathLike[str]) -> None:
    """A DataError where a ledger has not come as far as something that was written after it says."""
    if reached < expected:
        problem = (
            f"is an older ledger: it has come to {reached}, and {os.fspath(by)} was written at {expected}"
        )
        raise DataError(f"{problem}, so what was charged since is not in it", file=file, cure=CURE)


def lost(file: str | os.PathLike[str], by: str | os.PathLike[str]) -> DataError:
    """For a ledger that is not there, while something is that was written after it."""
    return DataError(f"the ledger is lost: {os.fspath(by)} is there, and it is not", file=file, cure=CURE)
