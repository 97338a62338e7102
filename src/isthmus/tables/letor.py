"""`Letor`: feature rows with grades, grouped by query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import Ids, IntArray, frozen
from isthmus.errors import DataError, several
from isthmus.tables.grouped import ByQuery, group, offsets_of
from isthmus.tables.rankings import Names, Qrels, Run, as_grades


@dataclass(frozen=True, eq=False, repr=False)
class Letor(ByQuery):
    """One row per (query, document): features, a grade, and the document's id.

    >>> letor = Letor.of(["q1", "q1", "q2"], [[0.5, 1], [0, 2], [1, 1]], [2, 0, 1], name="tiny")
    >>> letor
    Letor 'tiny': 2 queries, 3 rows, 2 features, grades 0..2

    Rows keep the order of the file within their query. `documents` is None if the file names none; `ids` are
    then `qid-row`. `torn` marks a table in which some queries have further rows in another silo, so that
    code that compares the documents of a query can refuse it.
    """

    features: NDArray[np.float32]
    grades: NDArray[np.int32]
    documents: Ids | None = None
    name: str = ""
    torn: bool = False

    @classmethod
    def of(
        cls,
        queries: Names,
        features: ArrayLike,
        grades: ArrayLike,
        *,
        documents: Names | None = None,
        name: str = "",
    ) -> Letor:
        """Build from parallel columns; rows of one query are brought together in their order.

        Raises DataError for a fractional or negative grade, and for columns of different length.
        """
        matrix = np.array(features, dtype=np.float32, ndmin=2)
        judged = as_grades(grades)
        if (judged < 0).any():
            raise DataError(f"grade {judged.min()} is negative", cure="grades are 0, 1, 2, …")
        names = queries if isinstance(queries, Ids) else Ids.of(queries)
        ids = documents if documents is None or isinstance(documents, Ids) else Ids.of(documents)
        if not len(names) == len(matrix) == len(judged) == (len(names) if ids is None else len(ids)):
            lengths = f"{len(names)} queries, {len(matrix)} rows of features, {len(judged)} grades"
            raise DataError(
                f"columns differ in length: {lengths}{'' if ids is None else f', {len(ids)} documents'}"
            )
        distinct, groups, _ = group(names)
        table = cls(distinct, offsets_of(groups, len(distinct)), frozen(matrix), frozen(judged), ids, name)
        return table if in_order(groups) else table._take(np.argsort(groups, kind="stable"))

    @property
    def width(self) -> int:
        """The number of features."""
        return int(self.features.shape[1])

    @cached_property
    def ids(self) -> Ids:
        """The document id of every row."""
        return self.documents if self.documents is not None else Ids.of(row_names(self.queries, self.offsets))

    def qrels(self) -> Qrels:
        """The grades as judgements."""
        return Qrels._ordered(self.queries, self.query_of_row, self.ids, self.grades)

    def run(self, scores: ArrayLike, *, name: str = "") -> Run:
        """Return the rows as a run, ranked by these scores."""
        values = np.array(scores, dtype=np.float64).reshape(-1)
        if len(values) != self.rows:
            raise DataError(f"{len(values)} scores for {self.rows} rows")
        return Run._ordered(self.queries, self.query_of_row, self.ids, values, None, name)

    def to_arrow(self) -> pa.Table:
        """Columns query, document and grade, then the features, numbered from 1 as in LETOR files."""
        keys = {"query": self._query_column.to_arrow(), "document": self.ids.to_arrow(), "grade": self.grades}
        return pa.table(keys | {f"feature {at}": column for at, column in enumerate(self.features.T, 1)})

    def keep(self, mask: NDArray[np.bool_]) -> Letor:
        """Return the rows inside the mask under their former ids; every query stays, possibly
        without rows."""
        named = self if self.documents is not None else replace(self, documents=self.ids)
        return super(Letor, named).keep(mask)

    def widened(self, width: int, *, missing: float = 0.0) -> Letor:
        """Return the same rows with features up to `width`, the new ones `missing`. Raises DataError if wider
        already."""
        if width < self.width:
            raise DataError(f"{self.name or 'the table'} has {self.width} features, more than {width}")
        if width == self.width:
            return self
        features = np.full((self.rows, width), missing, dtype=np.float32)
        features[:, : self.width] = self.features
        return replace(self, features=frozen(features))

    @staticmethod
    def concat(parts: Sequence[Letor], *, name: str = "") -> Letor:
        """Concatenate tables; the rows of a query in several parts are in the order of the parts.

        Queries without rows come last. Raises DataError for parts of different width; widen them first.
        """
        if not parts:
            raise DataError("no parts to put together")
        widths = sorted({part.width for part in parts})
        if len(widths) > 1:
            raise DataError(f"parts have {widths[0]} and {widths[-1]} features", cure="widen them first")
        named = any(part.documents is not None for part in parts)
        whole = Letor.of(
            Ids.concat([part._query_column for part in parts]),
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.grades for part in parts]),
            documents=Ids.concat([part.ids for part in parts]) if named else None,
            name=name,
        )
        return replace(whole._with_empty(parts), torn=any(part.torn for part in parts))

    def __eq__(self, other: object) -> bool:
        """Whether both have the same rows in the same order; names do not matter."""
        if not isinstance(other, Letor):
            return NotImplemented
        return (
            self.queries == other.queries
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.features, other.features, equal_nan=True)
            and np.array_equal(self.grades, other.grades)
            and np.array_equal(self.ids.codes_in(other.ids), other.ids.codes)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        title = f"Letor {self.name!r}: " if self.name else "Letor: "
        counts = f"{several(len(self), 'query', 'queries')}, {several(self.rows, 'row')}"
        span = f", grades {self.grades.min()}..{self.grades.max()}" if self.rows else ""
        torn = ", torn queries" if self.torn else ""
        return f"{title}{counts}, {several(self.width, 'feature')}{span}{torn}"

    def _take(self, rows: NDArray[Any]) -> Letor:
        return replace(
            self,
            features=frozen(self.features[rows]),
            grades=frozen(self.grades[rows]),
            documents=None if self.documents is None else self.documents[rows],
        )


def row_names(queries: Sequence[str], offsets: IntArray) -> pa.LargeStringArray:
    """`qid-row` for every row, rows counted from 0 within their query."""
    lengths = np.diff(offsets)
    query = pa.array(np.repeat(np.arange(len(lengths)), lengths))
    row = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], lengths)
    text = pa.large_string()
    names = pa.array(queries, text).take(query)
    return pc.binary_join_element_wise(names, pa.array(row).cast(text), pa.scalar("-", text))


def in_order(groups: IntArray) -> bool:
    """Whether the rows are grouped already."""
    return bool((groups[1:] >= groups[:-1]).all())
