"""Cache of parsed tables: columns in a file that is opened by mapping it into memory, without pickle.

    magic | column | column | … | JSON | length of the JSON | magic

Every column starts at a multiple of 64 bytes; the JSON has the start, shape, type and checksum of each, and
a description from the writer. Writing is atomic (`files.replacing`): two writers at once leave one complete
file, and a killed writer leaves a `.part` file, which a later one removes. A file that is cut, garbled or of
another version does not open (None), and the caller builds it again. Columns above 8 MB are not checked for
flipped bits, because that would mean reading them.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError
from isthmus.files import replacing, write_whole

_MAGIC = b"ISTHMUS1"
_ALIGNMENT = 64
_CHECKED_UP_TO = 1 << 23
_STRAY_AFTER = 3600.0
_SETTLED_AFTER = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column to write: its shape and type, and its rows in pieces, so that it need not fit in memory."""

    shape: tuple[int, ...]
    dtype: Any
    pieces: Iterable[NDArray[Any]]

    @classmethod
    def of(cls, array: NDArray[Any]) -> Column:
        """Build from an array in memory."""
        return cls(array.shape, array.dtype, (array,))


def write_columns(path: Path, columns: Mapping[str, Column], about: Mapping[str, Any]) -> None:
    """Write columns and a JSON-compatible description, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_strays(path.parent)
    with replacing(path, private=True) as stream:
        stream.write(_MAGIC)
        placed = {name: _write_column(stream, column) for name, column in columns.items()}
        footer = json.dumps({"columns": placed, "about": about}).encode()
        stream.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)


def _write_column(stream: IO[bytes], column: Column) -> dict[str, Any]:
    stream.write(b"\0" * (-stream.tell() % _ALIGNMENT))
    start, check = stream.tell(), 0
    dtype = np.dtype(column.dtype)
    for piece in column.pieces:
        content = np.ascontiguousarray(piece, dtype=dtype).reshape(-1).view(np.uint8).data
        check = zlib.crc32(content, check)
        stream.write(content)
    return {"start": start, "shape": column.shape, "dtype": dtype.str, "crc32": check}


def _clear_strays(folder: Path) -> None:
    """Remove files of killed writers; a running writer has changed its file within the hour."""
    for stray in folder.glob("*.part"):
        with suppress(OSError):
            if time.time() - stray.stat().st_mtime > _STRAY_AFTER:
                stray.unlink()


def open_columns(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return the description and the columns, read-only and mapped; None if the file is missing or
    damaged."""
    try:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        tail = bytes(content[-16:])
        if bytes(content[: len(_MAGIC)]) != _MAGIC or tail[8:] != _MAGIC:
            return None
        size = int.from_bytes(tail[:8], "little")
        footer = json.loads(bytes(content[len(content) - 16 - size : -16]))
        columns = {name: _open_column(content, place) for name, place in footer["columns"].items()}
        return footer["about"], columns
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _open_column(content: NDArray[np.uint8], place: dict[str, Any]) -> NDArray[Any]:
    dtype, shape = np.dtype(place["dtype"]), tuple(place["shape"])
    if dtype.kind not in "iuf":
        raise ValueError("a column does not hold numbers")
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    part = content[place["start"] : place["start"] + size]
    if size <= _CHECKED_UP_TO and zlib.crc32(part.data) != place["crc32"]:
        raise ValueError("a column does not have its checksum")
    column: NDArray[Any] = np.asarray(part).view(dtype).reshape(shape)
    return column


def remembered_checksum(files: Sequence[Path], memory: Path) -> str:
    """Return a checksum of the files' content, computed again only if a size or a time has changed.

    `memory` is a small JSON file. A modification time is not trusted while it is so recent that a change
    soon after might not alter it.
    """
    try:
        stats = [file.stat() for file in files]
        facts = [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, stats, strict=True)]
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(memory.read_bytes())
            if known["settled"] and known["files"] == facts:
                return str(known["checksum"])
        started = time.time_ns()
        checksum = _checksum(files)
    except OSError as error:
        raise DataError.unreadable(error.filename, error) from error
    settled = all(stat.st_mtime_ns < started - _SETTLED_AFTER for stat in stats)
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        known = {"files": facts, "checksum": checksum, "settled": settled}
        write_whole(memory, json.dumps(known).encode())
    return checksum


def _checksum(files: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    return whole.hexdigest()
