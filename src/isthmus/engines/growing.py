"""Append-only files of records of one type, mapped into memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError


class GrowingFile:
    """An append-only file; `state` is the number of valid records and their CRC-32. Bytes beyond them were
    never acknowledged and are cut off; a shorter file, or one with another checksum, is a DataError."""

    def __init__(self, path: Path, dtype: Any, state: Sequence[int] = (0, 0)) -> None:
        self.path, self.dtype, (self.count, self._checksum) = path, np.dtype(dtype), state
        mode = "r+b" if path.exists() else "w+b"
        self._stream = open(path, mode, buffering=0)  # noqa: SIM115  (until `close`)
        size = self.count * self.dtype.itemsize
        if os.fstat(self._stream.fileno()).st_size < size:
            self._stream.close()
            raise DataError("is shorter than it was", file=path)
        self._stream.truncate(size)
        self.records = self._mapped()
        if zlib.crc32(self.records.view(np.uint8).data) != self._checksum:
            self._stream.close()
            raise DataError("does not have its checksum", file=path)

    @property
    def state(self) -> tuple[int, int]:
        """The number of records and their checksum."""
        return self.count, self._checksum

    def append(self, records: NDArray[Any]) -> None:
        """Append records; they are on disk and mapped after `sync`."""
        content = np.ascontiguousarray(records, dtype=self.dtype).view(np.uint8).data
        checksum = zlib.crc32(content, self._checksum)
        place = self.count * self.dtype.itemsize  # overwrites the remains of a failed write
        while content:
            written = os.pwrite(self._stream.fileno(), content, place)
            content, place = content[written:], place + written
        self.count, self._checksum = self.count + len(records), checksum

    def sync(self) -> None:
        """Force everything to disk and map it again."""
        if self.count > len(self.records):
            os.fsync(self._stream.fileno())
            self.records = self._mapped()

    def _mapped(self) -> NDArray[Any]:
        if not self.count:
            return np.empty(0, dtype=self.dtype)
        mapped = np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,))
        return mapped.view(np.ndarray)

    def close(self) -> None:
        """Close the file; mapped records stay readable."""
        self._stream.close()
