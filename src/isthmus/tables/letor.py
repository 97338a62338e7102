"""`Letor`: feature rows with grades, grouped by query."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.tables.grouped import ByQuery
from isthmus.tables.ids import Ids, frozen
from isthmus.tables.rankings import Qrels, Run


@dataclass(frozen=True, eq=False, repr=False)
class Letor(ByQuery):
    """One row per (query, document): features, a grade, and the document's id.

    Rows keep the order of the file within their query. `documents` is None when the file names none;
    `ids` then calls them `qid-row`. `torn` says that rows of some query here lie in another silo, so
    that whatever compares the documents of a query can refuse the table.
    """

    features: NDArray[np.float32]
    grades: NDArray[np.int32]
    documents: Ids | None = None
    name: str = ""
    torn: bool = False

    @property
    def width(self) -> int:
        """The number of features."""
        return int(self.features.shape[1])

    @cached_property
    def ids(self) -> Ids:
        """The document id of every row."""
        if self.documents is not None:
            return self.documents
        rows = np.arange(self.rows) - self.offsets[self.query_of_row]
        pairs = zip(self.query_of_row.tolist(), rows.tolist(), strict=True)
        return Ids.of([f"{self.queries[query]}-{row}" for query, row in pairs])

    def qrels(self) -> Qrels:
        """The grades as judgements."""
        return Qrels._ordered(self.queries, self.query_of_row, self.ids, self.grades)

    def run(self, scores: ArrayLike, *, name: str = "") -> Run:
        """The rows ranked by these scores."""
        values = np.asarray(scores, dtype=np.float64).reshape(-1)
        return Run._ordered(self.queries, self.query_of_row, self.ids, values, None, name)

    def __eq__(self, other: object) -> bool:
        """The same rows in the same order; names aside."""
        if not isinstance(other, Letor):
            return NotImplemented
        return (
            self.queries == other.queries
            and np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.features, other.features, equal_nan=True)
            and np.array_equal(self.grades, other.grades)
            and self.ids.tolist() == other.ids.tolist()
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        title = f"Letor {self.name!r}: " if self.name else "Letor: "
        span = f", grades {self.grades.min()}..{self.grades.max()}" if self.rows else ""
        torn = ", torn queries" if self.torn else ""
        return f"{title}{len(self):,} queries, {self.rows:,} rows, {self.width} features{span}{torn}"

    def _take(self, rows: NDArray[Any]) -> Letor:
        return replace(
            self,
            features=frozen(self.features[rows]),
            grades=frozen(self.grades[rows]),
            documents=self.ids[rows],
        )
