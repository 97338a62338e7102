"""Intervals and paired tests over queries or folds, vectorised and seeded.

Queries that belong together (a topic, a user, a component of linked documents) are not independent: `groups`
names the group of every query, and then groups are resampled, flipped or summed as one. A NaN value does not
count.

Risk measures compare a run with baselines by its losses on single queries, which a gain in the mean can
hide.

`values` and `baseline` are one measure on the same queries; `table[run, query]` has that measure for several
runs. A loss counts 1 + α times as much as a gain, α ≥ 0; at α = 0, URisk is the difference of means.

    δ_q = M_q(run) − M_q(baseline)      u_q = δ_q where δ_q ≥ 0, else (1 + α) δ_q
    URisk = mean_q u_q                                                (Wang, Bennett & Collins-Thompson 2012)
    TRisk = URisk / (s/√n), s² = Σ_q (u_q − URisk)²/(n − 1)             (Dinçer, Macdonald & Ounis 2014)

    e_kq = S_k T_q / N      z_kq = (x_kq − e_kq)/√e_kq, S, T and N the sums of a row, a column and the table
    ZRisk(k) = Σ_q a_kq z_kq, a_kq = 1 + α where z_kq is bad, else 1      (Dinçer, Macdonald & Ounis 2016)
    GeoRisk(k) = √( S_k/n · Φ(ZRisk(k)/n) )

URisk and TRisk are larger for a safer run: URisk below 0 means that the losses outweigh the gains, TRisk
below −2 that they do so significantly. ZRisk and GeoRisk need no single baseline: the expectation of a cell
comes from all runs of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError, DataError
from isthmus.randomness import Streams

_BLOCK = 1 << 22
Groups = Sequence[Any] | NDArray[Any] | None


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the bounds of its interval; `n` counts queries or groups, `how` names the method."""

    value: float
    low: float
    high: float
    n: int
    how: str


@dataclass(frozen=True, slots=True)
class Paired:
    """A paired comparison: the mean difference, and the p-value under the hypothesis that there is none."""

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
    """Return the percentile interval of the (weighted) mean over resampled queries, or groups of queries."""
    parts, wholes = _sums(values, weights, groups)
    means = _resampled(parts, wholes, samples, seed)
    return _interval(float(parts.sum() / wholes.sum()), means, level, len(parts))


def geometric_difference(
    logarithms: ArrayLike,
    baseline: ArrayLike,
    *,
    groups: Groups = None,
    level: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the difference of two geometric means with its percentile interval over resampled queries, or
    groups of queries.

    `logarithms` and `baseline` are the natural logarithms of both runs' values, on the same queries, all of
    which count.
    """
    units = [_sums(each, None, groups) for each in (logarithms, baseline)]
    first, second = (np.exp(parts.sum() / wholes.sum()) for parts, wholes in units)
    ours, theirs = (np.exp(_resampled(*each, samples, seed)) for each in units)  # of the same draws
    return _interval(float(first - second), ours - theirs, level, len(units[0][0]))


def _resampled(parts: FloatArray, wholes: FloatArray, samples: int, seed: int) -> FloatArray:
    """Return the means of units drawn with replacement, which depend only on the seed and the number of
    units."""
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
    return means


def _interval(value: float, means: FloatArray, level: float, count: int) -> Interval:
    low, high = np.nanquantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), count, "bootstrap")


def paired_t(first: ArrayLike, second: ArrayLike, *, groups: Groups = None) -> Paired:
    """Student's paired t test, two-sided; with groups, the cluster-robust one with G − 1 degrees of freedom.

    t = d̄ / √(G/(G − 1) · Σ_g (Σ_{i∈g} (d_i − d̄))² / n²), which without groups (G = n) is the usual test.
    """
    from scipy.special import stdtr

    difference, mask = _differences(first, second)
    mean, count = float(difference.mean()), len(difference)
    residuals, _ = _sums(difference - mean, None, masked(groups, mask))
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
    """Fisher's paired randomisation test, two-sided.

    p is the share of swaps of the two runs, query by query, that give at least the observed difference. It
    is exact if there are at most `samples` swaps; otherwise `samples` swaps are drawn and p = (1 + those
    that give at least the observed difference) / (1 + samples).
    """
    difference, mask = _differences(first, second)
    sums, _ = _sums(difference, None, masked(groups, mask))
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
    """Holm's step-down adjusted p-values: the i-th smallest of m times (m − i + 1), never decreasing, at most
    1."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    scaled = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return adjusted


def _differences(first: ArrayLike, second: ArrayLike) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Return first − second where both are finite, and the mask of those places."""
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.shape != other.shape:
        raise DataError(
            f"{len(one)} values beside {len(other)}", cure="evaluate both runs on the same queries"
        )
    mask = np.isfinite(one) & np.isfinite(other)
    if not mask.any():
        raise DataError("the two runs have no query in common that counts")
    return one[mask] - other[mask], mask


def masked(groups: Groups, mask: NDArray[np.bool_]) -> Groups:
    """Return the groups of the queries inside the mask; None without groups."""
    return None if groups is None else np.asarray(groups)[mask]


def _sums(values: ArrayLike, weights: ArrayLike | None, groups: Groups) -> tuple[FloatArray, FloatArray]:
    """Return the weighted sum of values and the sum of weights for each unit (query or group)."""
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


def risk_rewards(values: ArrayLike, baseline: ArrayLike, *, alpha: float = 1.0) -> FloatArray:
    """u_q of every query: its gain over the baseline, or (1 + α) times its loss; NaN where either value is
    NaN.

    Raises ConfigError for α below 0 and DataError if the two differ in length.
    """
    if not alpha >= 0:
        raise ConfigError(f"alpha = {alpha:g}", key="alpha", value=alpha, expected="0 or more")
    first, second = (np.asarray(one, dtype=np.float64) for one in (values, baseline))
    if first.shape != second.shape:
        raise DataError(f"{first.size} values beside {second.size}", cure="evaluate both on the same queries")
    gains = first - second
    return np.where(gains < 0, (1 + alpha) * gains, gains)


def urisk(values: ArrayLike, baseline: ArrayLike, *, alpha: float = 1.0) -> float:
    """Mean gain over the baseline in which losses count 1 + α times.

    >>> round(urisk([0.5, 0.1, 0.4], [0.2, 0.3, 0.4], alpha=1), 4)  # (0.3 − 2 · 0.2 + 0) / 3
    -0.0333
    """
    return float(np.nanmean(risk_rewards(values, baseline, alpha=alpha)))


def trisk(values: ArrayLike, baseline: ArrayLike, *, alpha: float = 1.0) -> float:
    """URisk divided by its standard error: Student's t of the u_q; 0 if no query differs."""
    rewards = risk_rewards(values, baseline, alpha=alpha)
    rewards = rewards[np.isfinite(rewards)]
    if len(rewards) < 2:
        raise DataError("TRisk needs at least two queries", cure="compare on more of them")
    mean, spread = float(rewards.mean()), float(rewards.std(ddof=1) / np.sqrt(len(rewards)))
    if spread == 0:
        return 0.0 if mean == 0 else float(np.copysign(np.inf, mean))
    return mean / spread


def zrisk(table: ArrayLike, *, alpha: float = 1.0) -> FloatArray:
    """ZRisk of every row (run) of a table of effectiveness; cells below their expectation are bad."""
    return contingency_risks(np.asarray(table, dtype=np.float64), alpha)[0]


def georisk(table: ArrayLike, *, alpha: float = 1.0) -> FloatArray:
    """GeoRisk of every row (run) of a table of effectiveness, 0 or more; larger is better and safer."""
    return contingency_risks(np.asarray(table, dtype=np.float64), alpha)[1]


def contingency_risks(
    values: FloatArray, alpha: float, *, errors: bool = False, eps: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """ZRisk and GeoRisk of every row of `values[..., row, column]`; leading axes are separate tables.

    Cells below their expectation are bad; if the values are errors, cells at or above it. `eps` is added to
    e under the root.
    """
    from scipy.special import ndtr

    total = values.sum(axis=(-2, -1), keepdims=True)
    product = values.sum(axis=-1, keepdims=True) * values.sum(axis=-2, keepdims=True)
    expected = np.divide(product, total, out=np.zeros_like(values), where=total > 0)
    # A cell whose row or column is all zero has nothing to deviate from: 0/0 is 0 here.
    some = expected > 0
    z = np.where(some, (values - expected) / np.sqrt(np.where(some, expected + eps, 1.0)), 0.0)
    bad = z >= 0 if errors else z < 0
    deviations = np.where(bad, (1 + alpha) * z, z).sum(axis=-1)
    mean = np.maximum(values.mean(axis=-1), 0.0)
    return deviations, np.sqrt(mean * ndtr(deviations / values.shape[-1]))
