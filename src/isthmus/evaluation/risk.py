"""Risk of a run against baselines: what it loses on single queries where the mean says that it gains.

`values` and `baseline` have the same measure of the same queries; `table[run, query]` has it of several runs.
α ≥ 0 is how much more than a gain a loss counts: at 0 all of this is about means.

    δ_q = M_q(run) − M_q(baseline)      u_q = δ_q where δ_q ≥ 0, else (1 + α) δ_q
    URisk = mean_q u_q                                                (Wang, Bennett & Collins-Thompson 2012)
    TRisk = URisk / (s/√n), s² = Σ_q (u_q − URisk)²/(n − 1)             (Dinçer, Macdonald & Ounis 2014)

    e_kq = S_k T_q / N      z_kq = (x_kq − e_kq)/√e_kq, S, T and N the sums of a row, a column and the table
    ZRisk(k) = Σ_q a_kq z_kq, a_kq = 1 + α where z_kq is bad, else 1      (Dinçer, Macdonald & Ounis 2016)
    GeoRisk(k) = √( S_k/n · Φ(ZRisk(k)/n) )

URisk and TRisk are larger for a safer run: URisk below 0 says that the losses outweigh the gains, TRisk below
−2 that they do so significantly. ZRisk and GeoRisk need no single baseline: the expectation of a cell
comes from all runs of the table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from isthmus.arrays import FloatArray
from isthmus.errors import ConfigError, DataError


def risk_rewards(values: ArrayLike, baseline: ArrayLike, *, alpha: float = 1.0) -> FloatArray:
    """u_q of every query: its gain over the baseline, or (1 + α) times its loss; NaN where one is NaN.

    ConfigError for α below 0, DataError where the two differ in length.
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
    """URisk over its standard error: Student's t of the rewards; 0 where no query differs."""
    rewards = risk_rewards(values, baseline, alpha=alpha)
    rewards = rewards[np.isfinite(rewards)]
    if len(rewards) < 2:
        raise DataError("TRisk needs at least two queries", cure="compare on more of them")
    mean, spread = float(rewards.mean()), float(rewards.std(ddof=1) / np.sqrt(len(rewards)))
    if spread == 0:
        return 0.0 if mean == 0 else float(np.copysign(np.inf, mean))
    return mean / spread


def zrisk(table: ArrayLike, *, alpha: float = 1.0) -> FloatArray:
    """ZRisk of every row (run) of a table of effectiveness; cells below expectation are bad."""
    return contingency_risks(np.asarray(table, dtype=np.float64), alpha)[0]


def georisk(table: ArrayLike, *, alpha: float = 1.0) -> FloatArray:
    """GeoRisk of every row (run) of a table of effectiveness, from 0; larger is better and safer."""
    return contingency_risks(np.asarray(table, dtype=np.float64), alpha)[1]


def contingency_risks(
    values: FloatArray, alpha: float, *, errors: bool = False, eps: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """ZRisk and GeoRisk of every row of `values[..., row, column]`; leading axes are separate tables.

    Bad are cells below expectation, or where the values are errors those from expectation on; `eps` is added
    to e under the root.
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
