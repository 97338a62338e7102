"""Whether a learned model replaces the baseline: only one that clearly gains and rarely harms.

A model is adopted if the 95 % interval of its mean difference to the baseline over cross-validated queries
lies above 0, if at most `MOST_LOSERS` of queries lose more than `MUCH` (the upper 95 % bound of that share,
Clopper & Pearson 1934), and if its GeoRisk is not below the baseline's. Of several such models the smallest
is chosen, or a larger one if it is clearly better than the smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.evaluation import georisk

BASELINE = "baseline"
MUCH = 0.2
"""Loss of nDCG@10 that a user would notice."""
MOST_LOSERS = 0.10
MOST_NEEDED = 100_000
"""Number of judged queries from which on no advice to judge more is given."""


@dataclass(frozen=True)
class Difference:
    """Comparison of a model with another, query by query: the mean difference of nDCG@10, its 95 % interval,
    the numbers of queries that gained and lost, the number that lost more than `MUCH` with the upper bound
    of its share, and GeoRisk."""

    mean: float
    low: float
    high: float
    queries: int
    helped: int
    hurt: int
    lost_much: int
    lost_much_high: float
    georisk: float
    georisk_before: float
    deviation: float

    @classmethod
    def of(cls, values: FloatArray, before: FloatArray, groups: IntArray | None = None) -> Difference:
        """Compare two models by their nDCG@10 of the same queries; `groups` of linked queries count once."""
        from scipy.special import betaincinv

        difference = values - before
        count, much = len(difference), int((difference < -MUCH).sum())
        mean, low, high, deviation = _interval(difference, groups)
        risks = georisk(np.stack((before, values)))
        bound = 1.0 if much >= count else float(betaincinv(much + 1, count - much, 0.95))
        return cls(
            *(mean, low, high, count),
            *(int((difference > 1e-9).sum()), int((difference < -1e-9).sum()), much, bound),
            *(float(risks[1]), float(risks[0]), deviation),
        )

    @property
    def better(self) -> bool:
        """Whether the model is clearly better."""
        return self.low > 0

    @property
    def refusal(self) -> str:
        """Reason why a model with this difference to the baseline is not adopted; empty if it is."""
        if not self.better:
            return (
                f"learning gained nothing yet: {self.mean:+.4f} nDCG@10 ({self.low:+.4f} to {self.high:+.4f})"
            )
        if self.lost_much_high > MOST_LOSERS:
            return (
                f"{self.lost_much} of {self.queries} queries lost more than {MUCH:g}: up to "
                f"{self.lost_much_high:.1%} may, {MOST_LOSERS:.0%} is the most"
            )
        if self.georisk < self.georisk_before:
            return f"its GeoRisk {self.georisk:.4f} is below the baseline's {self.georisk_before:.4f}"
        return ""

    @property
    def needed(self) -> int | None:
        """Number of judged queries at which this mean and deviation would be clear; None if there is none."""
        clear = int(np.ceil((2.0 * self.deviation / self.mean) ** 2)) if self.mean > 0 else MOST_NEEDED
        losers = self.lost_much / self.queries
        few = int(np.ceil(3.0 / MOST_LOSERS)) if losers == 0 else self.queries
        return None if clear >= MOST_NEEDED or losers >= MOST_LOSERS else max(clear, few, self.queries + 1)

    def to_json(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return {**vars(self), "needed": self.needed}


def _interval(difference: FloatArray, groups: IntArray | None) -> tuple[float, float, float, float]:
    """Return (mean, low, high, deviation per query) by Student's interval, robust to linked queries."""
    from scipy.special import stdtrit

    count, mean = len(difference), float(difference.mean())
    labels = np.arange(count) if groups is None else np.unique(groups, return_inverse=True)[1]
    sums = np.bincount(labels, difference - mean)
    clusters = len(sums)
    if clusters < 2:
        return mean, -np.inf, np.inf, np.inf
    error = float(np.sqrt(clusters / (clusters - 1) * (sums**2).sum()) / count)
    reach = error * float(stdtrit(clusters - 1, 0.975))
    return mean, mean - reach, mean + reach, error * float(np.sqrt(count))


@dataclass(frozen=True)
class ModelChoice:
    """The model to use, the best of those learned, and the reason for the choice."""

    kind: str
    best: str
    why: str
    differences: Mapping[str, Difference]
    """Difference of every model to the baseline."""

    @property
    def adopted(self) -> bool:
        """Whether a learned model takes the baseline's place."""
        return self.kind != BASELINE


def choose(values: Mapping[str, FloatArray], groups: IntArray | None = None) -> ModelChoice:
    """Choose among models by their cross-validated nDCG@10 per query, ordered from the smallest model.

    `values` has the baseline under its name.
    """
    before = values[BASELINE]
    differences = {
        name: Difference.of(each, before, groups) for name, each in values.items() if name != BASELINE
    }
    if not differences:
        return ModelChoice(BASELINE, BASELINE, "no model was tried", {})
    best = BASELINE
    for name, difference in differences.items():
        if difference.refusal:
            continue
        if best == BASELINE or Difference.of(values[name], values[best], groups).better:
            best = name
    if best != BASELINE:
        gain = differences[best]
        why = f"{gain.mean:+.4f} nDCG@10 ({gain.low:+.4f} to {gain.high:+.4f}) over the baseline"
        return ModelChoice(best, best, why, differences)
    nearest = max(differences, key=lambda name: differences[name].low)
    return ModelChoice(BASELINE, nearest, differences[nearest].refusal, differences)
