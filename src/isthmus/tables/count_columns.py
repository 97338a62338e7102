"""A sparse table of counts by column, for looking up many places of few columns at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import IntArray

_FILLED = 256  # places of whole columns that may be filled for one that is wanted


@dataclass(frozen=True, eq=False)
class CountColumns:
    """Counts by column; `table` is a SciPy CSC array of integers, places without an entry are 0."""

    table: Any

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = self.table.indptr.tolist()
        return starts

    def columns(self, wanted: IntArray) -> NDArray[np.int32]:
        """Whole columns, of shape (columns, rows)."""
        counts = np.zeros((len(wanted), self.table.shape[0]), dtype=np.int32)
        rows, values, starts = self.table.indices, self.table.data, self._starts
        for at, column in enumerate(wanted.tolist()):
            some = slice(starts[column], starts[column + 1])
            counts[at, rows[some]] = values[some]
        return counts

    def at(self, rows: IntArray, columns: IntArray) -> NDArray[np.int32]:
        """The value in row `rows[i]` and column `columns[i]`, for every i."""
        height, width = self.table.shape
        is_used = np.zeros(width, dtype=bool)
        is_used[columns] = True
        used = np.flatnonzero(is_used)
        if len(used) * height <= _FILLED * len(columns):  # as a rule: few words in very many documents
            place = np.zeros(width, dtype=np.int32)
            place[used] = np.arange(len(used))
            counts: NDArray[np.int32] = self.columns(used)[place[columns], rows]
            return counts
        return self._searched(rows, columns)

    def _searched(self, rows: IntArray, columns: IntArray) -> NDArray[np.int32]:
        wanted = columns * self.table.shape[0] + rows
        at = np.searchsorted(self._keys, wanted)
        there = np.flatnonzero(np.append(self._keys, -1)[at] == wanted)
        counts = np.zeros(len(wanted), dtype=np.int32)
        counts[there] = self.table.data[at[there]]
        return counts

    @cached_property
    def _keys(self) -> IntArray:
        columns = np.repeat(np.arange(self.table.shape[1]), np.diff(self.table.indptr))
        keys: IntArray = columns * self.table.shape[0] + self.table.indices
        return keys
