"""From probabilities to decisions: where to cut, how much to expect, when to return nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from isthmus.errors import DataError
from isthmus.evaluation import outcomes_of
from isthmus.tables import Qrels, Run
from isthmus.tables.ids import FloatArray

POINTS = 1_000


@dataclass(frozen=True, eq=False)
class ThresholdCurve:
    """What was kept, and how much of it was relevant, at every threshold on validation data.

    Made from probabilities that were not fitted on the rows they are measured on.
    """

    thresholds: FloatArray
    kept: FloatArray
    relevant: FloatArray
    total: float
    """All relevant rows there were."""

    @classmethod
    def of(cls, probabilities: ArrayLike, relevant: ArrayLike) -> ThresholdCurve:
        """From rows with their probability and whether they were relevant."""
        chances = np.asarray(probabilities, dtype=np.float64)
        hits = np.asarray(relevant, dtype=np.float64)
        order = np.argsort(-chances, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(chances[order]) != 0, True))
        if len(ends) > POINTS:
            ends = ends[np.unique(np.geomspace(1, len(ends), POINTS).astype(np.int64) - 1)]
        found = np.cumsum(hits[order])[ends]
        return cls(chances[order][ends], np.asarray(ends + 1, np.float64), found, float(hits.sum()))

    @property
    def precision(self) -> FloatArray:
        """The share of kept rows that is relevant, per threshold."""
        return self.relevant / self.kept

    @property
    def recall(self) -> FloatArray:
        """The share of relevant rows that is kept, per threshold."""
        return self.relevant / max(self.total, 1.0)

    def threshold_for(self, precision: float, *, least: int = 10) -> float:
        """The lowest probability at which the rows kept are relevant with this precision.

        Only thresholds that keep at least `least` validation rows count: fewer prove nothing.
        """
        if not 0 < precision <= 1:
            raise DataError(f"a precision of {precision} is not in (0, 1]")
        good = (self.precision >= precision) & (self.kept >= least)
        if not good.any():
            best = self.precision[self.kept >= least].max(initial=0.0)
            raise DataError(
                f"no threshold reaches a precision of {precision:g}: the best on validation is {best:.3f}",
                cure="ask for less, or judge more queries",
            )
        return float(self.thresholds[np.flatnonzero(good)[-1]])


def threshold_for(run: Run, qrels: Qrels, *, precision: float = 0.9, relevant: int = 1) -> float:
    """The lowest probability at which a run's rows are relevant with this precision, as judged.

    The run's probabilities must not come from these judgements directly; `calibrate` and `fuse` cross-fit.
    """
    return ThresholdCurve.of(*outcomes_of(qrels, run, rel=relevant)).threshold_for(precision)


def expected_relevant(run: Run, k: int = 10) -> FloatArray:
    """How many of the top k are relevant, in expectation: the sum of their probabilities, per query."""
    chances = run.chances * (run.ranks <= k)
    return np.asarray(np.bincount(run.query_of_row, weights=chances, minlength=len(run)), dtype=np.float64)


def abstain(run: Run, threshold: float) -> Run:
    """Only what is at least this probable; a query nothing passes for keeps an empty list."""
    return run.keep(run.chances >= threshold)
