"""nDCG@10(empty=skip) of a network on queries the coordinator holds: the probe of FedRisk, and validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError
from isthmus.rankers import Scoring, scores_of
from isthmus.tables import Letor


class Judge:
    """Everything about the queries that does not change from model to model, worked out once.

    Gain is 2^grade − 1. Queries without a relevant document say nothing about a model and are left out. Equal
    scores stand in trec_eval's order, later document ids first.
    """

    def __init__(
        self,
        scaled: Letor,
        *,
        scoring: Scoring = "expected",
        depth: int = 10,
        order: NDArray[np.int64] | None = None,
    ) -> None:
        gains = np.exp2(np.maximum(scaled.grades, 0).astype(np.float64)) - 1
        useful = np.bincount(scaled.query_of_row, weights=gains, minlength=len(scaled)) > 0
        if not useful.any():
            raise DataError(f"none of {len(scaled)} queries has a relevant document to judge a model by")
        self.table, self.scoring = scaled[useful], scoring
        self._group = self.table.query_of_row
        self._tied = np.lexsort((-self.table.ids.codes, self._group)) if order is None else order
        self._gains = np.exp2(np.maximum(self.table.grades, 0).astype(np.float64))[self._tied] - 1
        ranks = np.arange(len(self._group)) - self.table.offsets[self._group]
        self._discounts = np.where(ranks < depth, 1 / np.log2(ranks + 2), 0.0)
        self._below = np.diff(self.table.offsets)[self._group] - 1.0 - ranks
        self._ideal = self._sums(self._gains, self._discounts)
        self._ordered = self._sums(self._gains, self._below)
        self._pairs = self._ordered - self._sums(-self._gains, self._below)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The queries as named arrays, for silos that score themselves: rows in the order of ties."""
        table = self.table
        return {
            "features": np.asarray(table.features)[self._tied],
            "grades": np.asarray(table.grades)[self._tied],
            "offsets": np.asarray(table.offsets),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, scoring: Scoring = "expected") -> Judge:
        """The judge that `arrays` tells of; it gives the same verdicts."""
        names = tuple(str(at) for at in range(len(arrays["offsets"]) - 1))
        table = Letor(names, arrays["offsets"], features=arrays["features"], grades=arrays["grades"])
        return cls(table, scoring=scoring, order=np.arange(table.rows))

    def __len__(self) -> int:
        """The number of queries that count."""
        return len(self.table)

    def errors(self, parameters: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """1 − nDCG@10 of every query; all wrong where a score is not a number."""
        scores = self._scores(parameters)
        return (
            np.ones(len(self)) if scores is None else 1.0 - self._sums(scores, self._discounts) / self._ideal
        )

    def counted(self, parameters: Mapping[str, NDArray[Any]], errors: str) -> NDArray[np.float64]:
        """The error of every query: its `pairs` in the wrong order, or 1 − `ndcg`@10."""
        return self.disorder(parameters) if errors == "pairs" else self.errors(parameters)

    def disorder(self, parameters: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """The share of every query's pairs in the wrong order, each counted by the difference of its gains.

        Moving a document up by one place undoes one pair, so a sum over documents of their gain times the
        number of documents below them tells it.
        """
        scores = self._scores(parameters)
        if scores is None:
            return np.ones(len(self))
        wrong = self._ordered - self._sums(scores, self._below)
        return np.divide(wrong, self._pairs, out=np.zeros(len(self)), where=self._pairs > 0)

    def measure(self, parameters: Mapping[str, NDArray[Any]]) -> float:
        """nDCG@10(empty=skip)."""
        return float(1.0 - self.errors(parameters).mean())

    def best_feature(self) -> tuple[int, float]:
        """The feature that by itself ranks the queries best, its sign −1 where small values come first."""
        columns = np.asarray(self.table.features, dtype=np.float64)[self._tied]
        values = {
            (at, sign): float((self._sums(sign * columns[:, at], self._discounts) / self._ideal).mean())
            for at in range(columns.shape[1])
            for sign in (1.0, -1.0)
        }
        return max(values, key=values.__getitem__)

    def _scores(self, parameters: Mapping[str, NDArray[Any]]) -> NDArray[np.float64] | None:
        """Every document's score in the order of ties; None where one is not a number."""
        with np.errstate(over="ignore", invalid="ignore"):
            scores = scores_of(parameters, self.table, self.scoring)[self._tied]
        return scores if np.isfinite(scores).all() else None

    def _sums(self, scores: NDArray[Any], by_rank: NDArray[np.float64]) -> NDArray[np.float64]:
        """Σ gain · weight of the rank, query by query, in the order of these scores."""
        order = np.lexsort((-scores, self._group))
        return np.add.reduceat(self._gains[order] * by_rank, self.table.offsets[:-1])
