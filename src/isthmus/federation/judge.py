"""Errors of networks on judged queries, by nDCG@10(empty=skip) or by pairs: for the probe and validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError
from isthmus.rankers import Scoring, scores_of
from isthmus.tables import Letor


class Judge:
    """Evaluates many models on the same queries; all that does not depend on the model is computed once.

    Gain is 2^grade − 1. Queries without a relevant document say nothing about a model and are left out. Equal
    scores are ranked in trec_eval's order, later document ids first.
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
        """Return the queries as named arrays with rows in tie order, for silos that score themselves."""
        table = self.table
        return {
            "features": np.asarray(table.features)[self._tied],
            "grades": np.asarray(table.grades)[self._tied],
            "offsets": np.asarray(table.offsets),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], *, scoring: Scoring = "expected") -> Judge:
        """Rebuild a judge from `arrays`; it computes the same errors."""
        names = tuple(str(at) for at in range(len(arrays["offsets"]) - 1))
        table = Letor(names, arrays["offsets"], features=arrays["features"], grades=arrays["grades"])
        return cls(table, scoring=scoring, order=np.arange(table.rows))

    def __len__(self) -> int:
        """The number of queries that count."""
        return len(self.table)

    def errors(self, parameters: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Return 1 − nDCG@10 of every query; 1 for all of them if a score is not finite."""
        scores = self._scores(parameters)
        return (
            np.ones(len(self)) if scores is None else 1.0 - self._sums(scores, self._discounts) / self._ideal
        )

    def counted(self, parameters: Mapping[str, NDArray[Any]], errors: str) -> NDArray[np.float64]:
        """Return the error of every query: its share of `pairs` in the wrong order, or 1 − `ndcg`@10."""
        return self.disorder(parameters) if errors == "pairs" else self.errors(parameters)

    def disorder(self, parameters: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """Return every query's share of pairs in the wrong order, each weighted by the difference of its
        gains.

        Moving a document up by one place corrects one pair, so the share follows from a sum over documents of
        their gain times the number of documents below them.
        """
        scores = self._scores(parameters)
        if scores is None:
            return np.ones(len(self))
        wrong = self._ordered - self._sums(scores, self._below)
        return np.divide(wrong, self._pairs, out=np.zeros(len(self)), where=self._pairs > 0)

    def measure(self, parameters: Mapping[str, NDArray[Any]]) -> float:
        """Return the mean nDCG@10(empty=skip)."""
        return float(1.0 - self.errors(parameters).mean())

    def best_feature(self) -> tuple[int, float]:
        """Return the feature that alone ranks the queries best, and its sign (−1: small values first)."""
        columns = np.asarray(self.table.features, dtype=np.float64)[self._tied]
        values = {
            (at, sign): float((self._sums(sign * columns[:, at], self._discounts) / self._ideal).mean())
            for at in range(columns.shape[1])
            for sign in (1.0, -1.0)
        }
        return max(values, key=values.__getitem__)

    def _scores(self, parameters: Mapping[str, NDArray[Any]]) -> NDArray[np.float64] | None:
        """Return every document's score in tie order; None if a score is not finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            scores = scores_of(parameters, self.table, self.scoring)[self._tied]
        return scores if np.isfinite(scores).all() else None

    def _sums(self, scores: NDArray[Any], by_rank: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return Σ gain · weight of the rank for every query, ranked by these scores."""
        order = np.lexsort((-scores, self._group))
        return np.add.reduceat(self._gains[order] * by_rank, self.table.offsets[:-1])
