"""From probabilities to decisions: thresholds, abstaining from an answer, and plots of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray
from isthmus.errors import DataError
from isthmus.evaluation import outcomes_of
from isthmus.report import Plot
from isthmus.tables import Qrels, Run

POINTS = 1_000


@dataclass(frozen=True, eq=False)
class ThresholdCurve:
    """For every threshold on validation data, the number of rows at or above it and of relevant ones among
    them.

    The probabilities come from models that were not fitted on the rows on which they are measured.
    """

    thresholds: FloatArray
    kept: FloatArray
    relevant: FloatArray
    total: float
    """The number of all relevant rows."""
    queries: FloatArray | None = None
    """The number of queries with a row at or above each threshold; None in files of older releases."""
    spread: FloatArray | None = None
    """Σ over queries of (relevant rows − precision · rows)², by threshold: how much queries differ."""

    @classmethod
    def of(
        cls, probabilities: ArrayLike, relevant: ArrayLike, queries: ArrayLike | None = None
    ) -> ThresholdCurve:
        """Build from the probability, the relevance and the query of every row.

        Without queries every row counts as a query of its own.
        """
        values = np.asarray(probabilities, dtype=np.float64)
        hits = np.asarray(relevant, dtype=np.float64)
        order = np.argsort(-values, kind="stable")
        ends = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))
        if len(ends) > POINTS:
            ends = ends[np.unique(np.geomspace(1, len(ends), POINTS).astype(np.int64) - 1)]
        hits = hits[order]
        homes = np.arange(len(hits)) if queries is None else np.asarray(queries)[order]
        rows, above = np.asarray(ends + 1, np.float64), np.cumsum(hits)[ends]
        before, right = _so_far(homes, np.ones(len(hits))), _so_far(homes, hits)
        # Σ n², Σ r² and Σ n·r over queries, summed row by row; n: a query's rows so far, r: its relevant rows
        squares = np.cumsum(2 * before + 1)[ends]
        right_squares = np.cumsum(hits * (2 * right + 1))[ends]
        products = np.cumsum(right + hits * (before + 1))[ends]
        precision = above / rows
        spread = right_squares - 2 * precision * products + precision**2 * squares
        begun = np.cumsum(before == 0)[ends].astype(np.float64)
        return cls(values[order][ends], rows, above, float(hits.sum()), begun, np.maximum(spread, 0.0))

    @property
    def precision(self) -> FloatArray:
        """The share of relevant rows among those at or above each threshold."""
        return self.relevant / self.kept

    @property
    def recall(self) -> FloatArray:
        """The share of all relevant rows that are at or above each threshold."""
        return self.relevant / max(self.total, 1.0)

    def threshold_for(self, precision: float, *, least: int = 10) -> float:
        """Return the lowest threshold whose rows (at or above it) have at least this precision.

        Only thresholds with at least `least` validation rows count, because fewer are no evidence. Raises
        DataError if no threshold reaches the precision.
        """
        if not 0 < precision <= 1:
            raise DataError(f"a precision of {precision} is not in (0, 1]")
        good = (self.precision >= precision) & (self.kept >= least)
        if not good.any():
            best = self.precision[self.kept >= least].max(initial=0.0)
            raise DataError(
                f"no threshold reaches a precision of {precision:g}: the best on judged rows is {best:.3f}",
                cure="ask for less, or judge more queries",
            )
        return float(self.thresholds[np.flatnonzero(good)[-1]])

    def support(self, threshold: float, *, level: float = 0.95, times: float = 1.0) -> Support:
        """Return the rows, queries and precision at a threshold, with the interval for `times` as many such
        rows.

        The interval is Clopper and Pearson's for the number of independent rows that would vary as much as
        the queries do; if queries do not differ, for one row per query. Raises DataError for a threshold that
        no row reaches.
        """
        from scipy.special import betaincinv

        reached = np.flatnonzero(self.thresholds >= threshold)
        if not len(reached):
            highest = self.thresholds.max(initial=0.0)
            raise DataError(
                f"no judged row reaches a probability of {threshold:g}: the highest is {highest:.3f}",
                cure="take a lower threshold",
            )
        at = int(reached[-1])
        rows, precision = float(self.kept[at]), float(self.precision[at])
        queries = rows if self.queries is None else float(self.queries[at])
        spread = rows * precision * (1 - precision) if self.spread is None else float(self.spread[at])
        correction = queries / max(queries - 1, 1.0)
        alike = spread <= 1e-9 * rows
        size = queries if alike else min(rows, rows**2 * precision * (1 - precision) / (spread * correction))
        size *= times
        right, tail = size * precision, (1 - level) / 2
        low = 0.0 if right <= 0 else float(betaincinv(right, size - right + 1, tail))
        high = 1.0 if right >= size else float(betaincinv(right + 1, size - right, 1 - tail))
        return Support(int(rows), int(queries), precision, low, high)

    def times_for(self, threshold: float, width: float, *, most: float = 1e4) -> float | None:
        """Return how many times as many rows would narrow the interval of a threshold's precision to at most
        `width`; None if `most` times would not."""
        low, high = 1.0, most

        def fits(times: float) -> bool:
            support = self.support(threshold, times=times)
            return support.high - support.low <= width

        if not fits(high):
            return None
        while high - low > 1e-3 * low and not fits(low):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if fits(middle) else (middle, high)
        return low if fits(low) else high


@dataclass(frozen=True)
class Support:
    """Number of validation rows and queries at or above a threshold, their precision and its interval."""

    rows: int
    queries: int
    precision: float
    low: float
    high: float


def _so_far(homes: NDArray[Any], values: FloatArray) -> FloatArray:
    """For every row, the sum of the values of the earlier rows of its query."""
    order = np.argsort(homes, kind="stable")
    ordered = values[order]
    sums = np.cumsum(ordered) - ordered
    first = np.flatnonzero(np.append(True, np.diff(homes[order]) != 0))
    sums -= np.repeat(sums[first], np.diff(np.append(first, len(homes))))
    before = np.empty(len(homes))
    before[order] = sums
    return before


def threshold_for(run: Run, qrels: Qrels, *, precision: float = 0.9, relevant: int = 1) -> float:
    """Return the lowest probability at which a run's rows have this precision according to the judgements.

    The run's probabilities must not come from these judgements directly; `calibrate` and `fuse` cross-fit.
    """
    return ThresholdCurve.of(*outcomes_of(qrels, run, rel=relevant)).threshold_for(precision)


def abstain(run: Run, threshold: float) -> Run:
    """Keep only hits with at least this probability; a query without any keeps an empty list."""
    return run.keep(run.required_probabilities >= threshold)


def score_histogram(scores: ArrayLike, relevant: ArrayLike, *, x: str = "score", caption: str = "") -> Plot:
    """Plot the distributions of the scores of relevant and of other documents, each as a share of
    its class."""
    values, hits = np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=bool)

    def draw(axes: Any) -> None:
        edges = np.histogram_bin_edges(values, bins=40)
        for kind, mask in (("not relevant", ~hits), ("relevant", hits)):
            count = int(mask.sum())
            weights = np.full(count, 1.0 / max(count, 1))
            axes.hist(values[mask], bins=edges, weights=weights, alpha=0.6, label=f"{kind} ({count:,})")
        axes.set_xlabel(x)
        axes.set_ylabel("share")
        axes.legend()

    return Plot(draw, caption)


def threshold_plot(curve: ThresholdCurve, *, caption: str = "") -> Plot:
    """Plot precision, recall and the share of rows kept against the threshold."""

    def draw(axes: Any) -> None:
        axes.plot(curve.thresholds, curve.precision, label="precision")
        axes.plot(curve.thresholds, curve.recall, label="recall")
        axes.plot(curve.thresholds, curve.kept / curve.kept.max(), label="share kept", ls=":")
        axes.set_xlabel("probability asked for")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.legend()

    return Plot(draw, caption)
