"""Arithmetic of grouped rows that every table shares.

A table grouped by query is CSR: the rows of query i are `offsets[i]:offsets[i + 1]`.

`CountColumns` is a sparse table of counts by column, for looking up many places of few columns at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.report import ROWS, Tabular, preview


@dataclass(frozen=True, eq=False, repr=False)
class ByQuery(Tabular):
    """Rows grouped by query in CSR form; subclasses add further columns."""

    queries: tuple[str, ...]
    offsets: IntArray

    def __len__(self) -> int:
        """The number of queries."""
        return len(self.queries)

    @property
    def rows(self) -> int:
        """The number of (query, document) pairs."""
        return int(self.offsets[-1])

    @cached_property
    def query_of_row(self) -> IntArray:
        """The position in `queries` of every row's query."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def position(self) -> Mapping[str, int]:
        """The position of each query in `queries`."""
        return {query: at for at, query in enumerate(self.queries)}

    @property
    def _query_column(self) -> Ids:
        """The query of every row, as a column."""
        return Ids.of(self.queries)[self.query_of_row]

    def __contains__(self, query: object) -> bool:
        return query in self.position

    def __getitem__(self, which: str | slice | Sequence[str] | NDArray[Any]) -> Self:
        """Return the rows of some queries: `run["q7"]`, `run[:10]`, `run[["q7", "q9"]]`.

        A boolean or integer array selects by position. Raises KeyError for a query that the table does not
        have.
        """
        chosen = self._positions(which)
        lengths = np.diff(self.offsets)[chosen]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        table = self._take(rows_of(self.offsets, chosen))
        return replace(table, queries=tuple(self.queries[at] for at in chosen), offsets=frozen(offsets))

    def _positions(self, which: str | slice | Sequence[str] | NDArray[Any]) -> IntArray:
        if isinstance(which, str):
            return np.array([self.position[which]])
        if isinstance(which, slice) or (isinstance(which, np.ndarray) and which.dtype.kind in "bi"):
            chosen: IntArray = np.arange(len(self))[which]
            return chosen
        return np.array([self.position[query] for query in which], dtype=np.int64)

    def _take(self, rows: NDArray[Any]) -> Self:
        """The same columns at these rows; the caller sets matching queries and offsets."""
        raise NotImplementedError

    def keep(self, mask: NDArray[np.bool_]) -> Self:
        """Return the rows inside the mask; every query stays, possibly with an empty list."""
        offsets = offsets_of(self.query_of_row[mask], len(self))
        return replace(self._take(np.flatnonzero(mask)), offsets=offsets)

    def _with_empty(self, parts: Iterable[ByQuery]) -> Self:
        """Return the table with the missing queries of the parts, which have no rows, at the end with empty
        lists."""
        empty = {query: None for part in parts for query in part.queries if query not in self}
        offsets = np.concatenate((self.offsets, np.full(len(empty), self.offsets[-1])))
        return replace(self, queries=(*self.queries, *empty), offsets=frozen(offsets))

    def _repr_html_(self) -> str:
        first = self[: int(np.searchsorted(self.offsets, ROWS)) or 1]  # only queries that are shown
        return preview(first.to_arrow(), title=repr(self).partition("\n")[0], rows=self.rows)

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """Return for every query its id, its first row and the row after its last."""
        bounds = self.offsets.tolist()
        return zip(self.queries, bounds[:-1], bounds[1:], strict=True)


def group(names: Ids) -> tuple[tuple[str, ...], IntArray, IntArray]:
    """Number the groups of equally named rows in order of first appearance.

    Returns (name of every group, group of every row, first row of every group). Rows need not arrive
    grouped.
    """
    first = np.full(len(names.vocabulary), len(names), dtype=np.int64)
    np.minimum.at(first, names.codes, np.arange(len(names)))
    present = np.flatnonzero(first < len(names))
    present = present[np.argsort(first[present], kind="stable")]
    position = np.full(len(names.vocabulary), -1, dtype=np.int64)
    position[present] = np.arange(len(present))
    words = names.words
    return tuple(words[code] for code in present), position[names.codes], first[present]


def offsets_of(groups: IntArray, count: int) -> IntArray:
    """CSR offsets once rows are sorted by group: rows of group g are offsets[g]:offsets[g + 1]."""
    offsets = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(np.bincount(groups, minlength=count), out=offsets[1:])
    return frozen(offsets)


def rows_of(offsets: IntArray, groups: IntArray) -> IntArray:
    """Return the row numbers of these groups, one group after the other."""
    lengths = np.diff(offsets)[groups]
    ends = np.cumsum(lengths)
    shift: IntArray = np.repeat(offsets[groups] - (ends - lengths), lengths)
    rows: IntArray = np.arange(len(shift)) + shift
    return rows


def falling(scores: FloatArray, offsets: IntArray, *, stable: bool = False) -> IntArray:
    """Return the rows by group and falling score; equal scores in their order if `stable`, else in any.

    Lists of similar length are sorted as the rows of a matrix, several times faster than by two keys.
    """
    lengths = np.diff(offsets)
    width = int(lengths.max(initial=0))
    if width * len(lengths) > 4 * len(scores) + 4096:
        return np.lexsort((-scores, np.repeat(np.arange(len(lengths)), lengths)))
    inside = np.arange(width) < lengths[:, None]
    padded = np.full(inside.shape, np.inf)
    padded[inside] = -scores
    within = np.argsort(padded, axis=1, kind="stable" if stable else None)
    within += offsets[:-1, None]
    return np.asarray(within[inside])


_FILLED = 256  # most cells of whole columns to fill per requested cell


@dataclass(frozen=True, eq=False)
class CountColumns:
    """Counts by column; `table` is a SciPy CSC array of integers, places without an entry are 0."""

    table: Any

    @cached_property
    def _starts(self) -> list[int]:
        starts: list[int] = self.table.indptr.tolist()
        return starts

    def columns(self, wanted: IntArray) -> NDArray[np.int32]:
        """Return whole columns, of shape (columns, rows)."""
        counts = np.zeros((len(wanted), self.table.shape[0]), dtype=np.int32)
        rows, values, starts = self.table.indices, self.table.data, self._starts
        for at, column in enumerate(wanted.tolist()):
            some = slice(starts[column], starts[column + 1])
            counts[at, rows[some]] = values[some]
        return counts

    def at(self, rows: IntArray, columns: IntArray) -> NDArray[np.int32]:
        """Return the value in row `rows[i]` and column `columns[i]`, for every i."""
        height, width = self.table.shape
        is_used = np.zeros(width, dtype=bool)
        is_used[columns] = True
        used = np.flatnonzero(is_used)
        if len(used) * height <= _FILLED * len(columns):  # usually: few words, very many documents
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
