"""Records of one type in a file that only grows, mapped into memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError


class GrowingFile:
    """What lies beyond `count` was never acknowledged and is cut off; a shorter file is a DataError."""

    def __init__(self, path: Path, dtype: Any, count: int) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype), count
        mode = "r+b" if path.exists() else "w+b"
        self._stream = open(path, mode, buffering=0)  # noqa: SIM115  (until `close`)
        size = count * self.dtype.itemsize
        if os.fstat(self._stream.fileno()).st_size < size:
            self._stream.close()
            raise DataError("is shorter than it was", file=path)
        self._stream.truncate(size)
        self.records = self._mapped()

    def append(self, records: NDArray[Any]) -> None:
        """Write records behind the others; they are on disk after `sync`, and mapped."""
        content = np.ascontiguousarray(records, dtype=self.dtype).view(np.uint8).data
        place = self.count * self.dtype.itemsize  # whatever a write that failed has left
        while content:
            written = os.pwrite(self._stream.fileno(), content, place)
            content, place = content[written:], place + written
        self.count += len(records)

    def sync(self) -> None:
        """Force everything to disk and map it."""
        if self.count > len(self.records):
            os.fsync(self._stream.fileno())
            self.records = self._mapped()

    def _mapped(self) -> NDArray[Any]:
        if not self.count:
            return np.empty(0, dtype=self.dtype)
        mapped = np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,))
        return mapped.view(np.ndarray)

    def close(self) -> None:
        """Close the file; what is mapped stays readable."""
        self._stream.close()
