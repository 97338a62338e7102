"""Intervals and paired tests over queries or folds, vectorised and seeded.

Queries that belong together (a topic, a user, a component of linked documents) are not independent:
`groups` names the group of every query, and then groups are resampled, flipped or summed as one.
A NaN value does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError
from isthmus.randomness import Streams

_BLOCK = 1 << 22
Groups = Sequence[Any] | NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the interval around it, from n units."""

    value: float
    low: float
    high: float
    n: int
    how: str


@dataclass(frozen=True, slots=True)
class Paired:
    """A paired comparison: the mean difference and how surprising it would be if there were none."""

    difference: float
    p: float
    n: int
    how: str


def bootstrap(
    values: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    groups: Groups = None,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The percentile interval of the (weighted) mean over resampled queries, or groups of queries."""
    parts, wholes = _sums(values, weights, groups)
    random = Streams(seed)("bootstrap")
    alike = bool((wholes == wholes[0]).all())
    step = max(1, _BLOCK // len(parts))
    means = np.full(samples, np.nan)
    for first in range(0, samples, step):
        rows = min(step, samples - first)
        drawn = random.integers(len(parts), size=(rows, len(parts)))
        whole = np.full(rows, wholes.sum()) if alike else wholes[drawn].sum(axis=1)
        part = parts[drawn].sum(axis=1)
        np.divide(part, whole, out=means[first : first + rows], where=whole > 0)
    low, high = np.nanquantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(parts.sum() / wholes.sum()), float(low), float(high), len(parts), "bootstrap")


def paired_t(first: ArrayLike, second: ArrayLike, *, groups: Groups = None) -> Paired:
    """Student's paired t test, two-sided; with groups, the cluster-robust one with G − 1 degrees of freedom.

    t = d̄ / √(G/(G − 1) · Σ_g (Σ_{i∈g} (d_i − d̄))² / n²), which without groups (G = n) is the usual test.
    """
    from scipy.special import stdtr

    difference, mask = _differences(first, second)
    mean, count = float(difference.mean()), len(difference)
    residuals, _ = _sums(difference - mean, None, _masked(groups, mask))
    clusters = len(residuals)
    if clusters < 2:
        raise DataError("a paired test needs at least two queries or groups", cure="compare on more of them")
    spread = (clusters / (clusters - 1) * float((residuals**2).sum())) ** 0.5 / count
    if spread <= 1e-15 * abs(mean):
        return Paired(mean, 1.0 if mean == 0 else 0.0, clusters, "t")
    return Paired(mean, float(2 * stdtr(clusters - 1, -abs(mean) / spread)), clusters, "t")


def randomisation(
    first: ArrayLike, second: ArrayLike, *, groups: Groups = None, samples: int = 10_000, seed: int = 0
) -> Paired:
    """Fisher's paired randomisation test, two-sided: how often swapping the two runs at random, query by
    query, gives at least the observed difference. Exact when all swaps are no more than `samples`, else
    p = (1 + those at least as large) / (1 + samples).
    """
    difference, mask = _differences(first, second)
    sums, _ = _sums(difference, None, _masked(groups, mask))
    observed = abs(float(sums.sum()))
    limit = observed - 1e-12 * max(1.0, float(np.abs(sums).sum()))
    mean, count = float(difference.mean()), len(sums)
    if count < 63 and 2**count <= samples:
        swaps = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
        swapped = np.abs(sums.sum() - 2 * (swaps @ sums))
        return Paired(mean, float((swapped >= limit).mean()), count, "randomisation, exact")
    random = Streams(seed)("randomisation")
    width = -(-count // 8)
    step = max(1, _BLOCK // count)
    larger = 0
    for done in range(0, samples, step):
        rows = min(step, samples - done)
        bits = np.frombuffer(random.bytes(rows * width), dtype=np.uint8).reshape(rows, width)
        swaps = np.unpackbits(bits, axis=1)[:, :count].astype(np.float64)
        larger += int((np.abs(sums.sum() - 2 * (swaps @ sums)) >= limit).sum())
    return Paired(mean, (1 + larger) / (1 + samples), count, "randomisation")


def holm(p_values: ArrayLike) -> FloatArray:
    """Holm's step-down adjusted p-values: the i-th smallest of m times (m − i + 1), never falling."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    scaled = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def _differences(first: ArrayLike, second: ArrayLike) -> tuple[FloatArray, NDArray[np.bool_]]:
    """first − second where both count, and where that is."""
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != other.shape:
        raise DataError(
            f"{len(one)} values beside {len(other)}", cure="evaluate both runs on the same queries"
        )
    mask = np.isfinite(one) & np.isfinite(other)
    if not mask.any():
        raise DataError("the two runs have no query in common that counts")
    return one[mask] - other[mask], mask


def _masked(groups: Groups, mask: NDArray[np.bool_]) -> Groups:
    return None if groups is None else np.asarray(groups)[mask]


def _sums(values: ArrayLike, weights: ArrayLike | None, groups: Groups) -> tuple[FloatArray, FloatArray]:
    """Per unit (query or group) the weighted sum of values and the sum of weights."""
    numbers = np.asarray(values, dtype=np.float64).reshape(-1)
    weight = np.ones(len(numbers)) if weights is None else np.asarray(weights, dtype=np.float64)
    mask = np.isfinite(numbers)
    if not mask.any():
        raise DataError("no value to make an interval of")
    parts, wholes = (numbers * weight)[mask], weight[mask]
    if groups is None:
        return parts, wholes
    number: IntArray = np.unique(np.asarray(groups)[mask], return_inverse=True)[1]
    sums = np.zeros((int(number.max()) + 1, 2))
    np.add.at(sums, number, np.stack((parts, wholes), axis=1))
    return sums[:, 0], sums[:, 1]
