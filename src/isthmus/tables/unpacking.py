"""Reading what somebody else packed: every byte is counted before it is allocated.

    unpacker = Unpacker(1 << 20)            what one message or file may come to, all its parts together
    unpacker.json(data)                     counted by what its values take in memory
    unpacker.array(stream, size)            an npy file: its declared shape and type must be its size exactly

A small message can declare anything. What it declares is compared with its own size and with the budget
first; beyond either it is a DataError, and nothing was allocated.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError

PLAIN = "biuf"
"""Kinds of number an array may have; with "U", also text of a fixed width."""
A_VALUE = 100
"""Bytes that a list, a mapping or a text of JSON takes at most beside its characters."""
_CHUNK = 1 << 20
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_END = struct.Struct("<4s4H2LH")
_LOCATOR, _LONGEST_DIRECTORY = 20, 1 << 20


@dataclass(frozen=True)
class Declared:
    """What the header of an npy file says."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    size: int
    """Bytes of the values."""


class Unpacker:
    """The bytes that one message or file may still unpack to."""

    def __init__(self, most: int) -> None:
        self.most, self._left = most, most

    def spend(self, size: int) -> None:
        """Count bytes that are about to be allocated; a DataError where the budget has fewer."""
        if size > self._left:
            raise DataError(f"unpacks to more than {self.most:,} bytes")
        self._left -= size

    def whole(self, stream: IO[bytes], size: int) -> bytes:
        """The whole stream, which is to have this size."""
        self.spend(size)
        content = stream.read(size)
        if len(content) != size:
            raise DataError("is cut")
        return content

    def weigh_json(self, data: bytes) -> None:
        """Count a JSON text that another parser reads.

        An empty list is two characters and sixty bytes: values count, not characters.
        """
        values = sum(data.count(mark) for mark in (b",", b":", b"[", b"{"))
        self.spend(2 * len(data) + A_VALUE * values)

    def json(self, data: bytes) -> Any:
        """What a JSON text says."""
        self.weigh_json(data)
        try:
            return json.loads(data)
        except RecursionError:
            raise DataError("is nested too deeply") from None

    def array(self, stream: IO[bytes], size: int, *, kinds: str = PLAIN) -> NDArray[Any]:
        """The array in an npy file of this size."""
        known = read_declared(stream, size, kinds=kinds)
        self.spend(known.size)
        array = np.empty(math.prod(known.shape), known.dtype)
        octets = array.view(np.uint8)
        for start in range(0, known.size, _CHUNK):
            part = stream.read(min(_CHUNK, known.size - start))
            if len(part) != min(_CHUNK, known.size - start):
                raise DataError("is cut")
            octets[start : start + len(part)] = np.frombuffer(part, np.uint8)
        return array.reshape(known.shape, order="F" if known.is_fortran else "C")


def read_declared(stream: IO[bytes], size: int, *, kinds: str = PLAIN) -> Declared:
    """The header of an npy file of this size, read up to where the values begin."""
    start = stream.tell()
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise DataError(f"has an array of version {version}")
    shape, is_fortran, dtype = _HEADERS[version](stream)
    if dtype.kind not in kinds or not dtype.itemsize or any(side < 0 for side in shape):
        raise DataError(f"has an array of {dtype}")
    values = math.prod(shape) * dtype.itemsize
    if values != size - (stream.tell() - start):
        raise DataError("has an array of another size than it declares")
    return Declared(shape, dtype, is_fortran, values)


def check_directory(stream: IO[bytes]) -> None:
    """Refuse a zip whose list of entries is long: `zipfile` would read all of it before anybody can look.

    What is written here has neither a comment nor more entries than 16 bits can count, so its end record
    is its last 22 bytes.
    """
    size = stream.seek(0, 2)
    stream.seek(max(0, size - _END.size - _LOCATOR))
    tail = stream.read()
    stream.seek(0)
    if len(tail) < _END.size:
        raise DataError("is no zip")
    mark, *_, length, _, comment = _END.unpack(tail[-_END.size :])
    if mark != b"PK\x05\x06" or comment or tail[:4] == b"PK\x06\x07" or length > _LONGEST_DIRECTORY:
        raise DataError("is no zip, or one with too many parts")
