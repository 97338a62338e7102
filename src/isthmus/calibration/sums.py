"""Fitting calibrators from sums alone.

A calibrator never needs the (score, relevance) pairs themselves, only sums over them: how many scores lie
below a threshold, how many relevant ones fall into a bin, a log-likelihood with its derivatives. So the same
code fits on one silo or on many: each silo answers every question with a vector, and the vectors are added
(`isthmus.asking`), in the clear or under a secure sum.

>>> extremes(LabelledScores(np.array([0.1, 0.9]), np.array([0.0, 1.0])).answer)
(0.1, 0.9)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray
from isthmus.logistic import likelihood_sums

CLIP = 1e-6
GAMMA_SHIFT = 0.01


@dataclass(frozen=True)
class Totals:
    """Asks for (pairs, relevant pairs)."""


@dataclass(frozen=True)
class Below:
    """Asks how many scores are at most each threshold."""

    thresholds: FloatArray


@dataclass(frozen=True)
class Bins:
    """Asks for (pairs, relevant pairs, sum of scores) in every bin `edges[i-1] < s <= edges[i]`."""

    edges: FloatArray


@dataclass(frozen=True)
class Likelihood:
    """Asks for the negative log-likelihood of σ(coef · basis(s) + intercept), its gradient and Hessian.

    `targets` are the target probabilities of irrelevant and relevant pairs: (0, 1), or Platt's smoothed
    values.
    """

    basis: str
    bounds: tuple[float, float]
    theta: FloatArray
    targets: tuple[float, float] = (0.0, 1.0)


Question: TypeAlias = Totals | Below | Bins | Likelihood
Ask: TypeAlias = Callable[[Question], FloatArray]
"""Function that answers a question for all silos together: the sum of their vectors."""


@dataclass(frozen=True, eq=False)
class LabelledScores:
    """A silo's scores and their relevance (0 or 1), which never leave it."""

    scores: FloatArray
    relevant: FloatArray
    _features: dict[tuple[str, tuple[float, float]], FloatArray] = field(default_factory=dict, repr=False)

    def answer(self, question: Question) -> FloatArray:
        """Answer with one vector; vectors of several silos can be added."""
        match question:
            case Totals():
                return np.array([len(self.scores), self.relevant.sum()], dtype=np.float64)
            case Below(thresholds):
                return np.searchsorted(self._sorted, thresholds, side="right").astype(np.float64)
            case Bins(edges):
                return self._bins(edges)
            case Likelihood():
                return self._likelihood(question)

    @cached_property
    def _sorted(self) -> FloatArray:
        return np.sort(self.scores)

    def _bins(self, edges: FloatArray) -> FloatArray:
        at = np.searchsorted(edges, self.scores, side="left")
        count = len(edges) + 1
        columns = (None, self.relevant, self.scores)
        return np.concatenate([np.bincount(at, weights=values, minlength=count) for values in columns])

    def _likelihood(self, query: Likelihood) -> FloatArray:
        key = (query.basis, query.bounds)
        if key not in self._features:
            self._features[key] = design(query.basis, self.scores, query.bounds)
        low, high = query.targets
        targets = low + (high - low) * self.relevant
        return likelihood_sums(self._features[key], targets, query.theta)


def extremes(ask: Ask) -> tuple[float, float]:
    """Return the smallest and the largest score, found from counts alone."""
    total = ask(Totals())[0]
    low, high = order_statistics(ask, np.array([1.0, total]))
    return float(low), float(high)


def order_statistics(ask: Ask, ranks: FloatArray) -> FloatArray:
    """Return the scores of these ranks (1 is the smallest), exactly, in eight rounds of counts.

    Doubles can be ordered by their bits like integers, so each round splits every rank's bracket of bit
    patterns into 256 parts and keeps the part that holds the rank.
    """
    low = np.zeros(len(ranks), dtype=np.uint64)
    for shift in range(56, -1, -8):
        width = np.uint64(1 << shift)
        ends = low[:, None] + width * np.arange(1, 257, dtype=np.uint64) - np.uint64(1)
        counts = ask(Below(_from_ordered(ends.reshape(-1)))).reshape(ends.shape)
        part = np.argmax(counts >= ranks[:, None], axis=1).astype(np.uint64)
        low = low + width * part
    return _from_ordered(low)


def _from_ordered(codes: NDArray[np.uint64]) -> FloatArray:
    """Return the doubles that are ordered like the codes; NaN patterns become the infinity beside them."""
    sign = np.uint64(1 << 63)
    bits = np.where(codes & sign, codes ^ sign, ~codes)
    values = bits.view(np.float64)
    return np.where(np.isnan(values), np.where(codes & sign, np.inf, -np.inf), values)


def design(basis: str, scores: FloatArray, bounds: tuple[float, float]) -> FloatArray:
    """Return the basis functions of scores, one row each; the last row is ones if there is an intercept."""
    low, high = bounds
    unit = (scores - low) / (high - low) if high > low else np.zeros_like(scores)
    return BASES[basis](unit)


def _line(x: FloatArray) -> FloatArray:
    return np.stack((x, np.ones_like(x)))


def _logit(x: FloatArray) -> FloatArray:
    inside = np.clip(x, CLIP, 1 - CLIP)
    return (np.log(inside) - np.log1p(-inside))[None, :]


def _quadratic(x: FloatArray) -> FloatArray:
    """a·x² + b·x written in its slopes at both ends, d₀ = b and d₁ = 2a + b: monotone if both are ≥ 0."""
    x = np.clip(x, 0.0, 1.0)
    return np.stack((x - x**2 / 2, x**2 / 2, np.ones_like(x)))


def _gamma(x: FloatArray) -> FloatArray:
    """a·ln t + b·t written in its slopes a/t + b at both ends, with t = x + δ."""
    t = np.clip(x, 0.0, 1.0) + GAMMA_SHIFT
    first, last = 1 / GAMMA_SHIFT, 1 / (1 + GAMMA_SHIFT)
    return np.stack(
        ((np.log(t) - t * last) / (first - last), (t * first - np.log(t)) / (first - last), np.ones_like(x))
    )


def _beta(x: FloatArray) -> FloatArray:
    inside = np.clip(x, CLIP, 1 - CLIP)
    return np.stack((np.log(inside), -np.log1p(-inside), np.ones_like(x)))


BASES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "line": _line,
    "logit": _logit,
    "quadratic": _quadratic,
    "gamma": _gamma,
    "beta": _beta,
}
