"""ZRisk, GeoRisk and the weights they give to candidates.

A matrix has one row per candidate model and one column per item all of them were scored on. Risk asks how
much worse than expected a candidate is, item by item, where the expectation of a cell is the product of
its row and column sums over the grand total, as in a contingency table:

    e_kj = S_k T_j / N                        z_kj = (M_kj − e_kj) / √e_kj
    ZRisk(k) = Σ_j a_kj z_kj                  a_kj = 1 + α where z_kj is bad, else 1       (2)
    GeoRisk(k) = √( mean_j M_kj · Φ(ZRisk(k) / b) )                                        (3)
    risk(k) = GeoRisk(reference) − GeoRisk(k)                                              (4)

In Rabbi et al.'s equations M holds *errors*, so that eq. (4) gives the worse candidate the lower risk.
Sound use turns errors into effectiveness first, puts an ideal row of ones into the table and calls cells
below expectation bad, as the risk-sensitive loss of Rodrigues et al. does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.evaluation import contingency_risks

FloatArray = NDArray[np.float64]
Orientation = Literal["error", "effectiveness"]
Reference = Literal["mean", "ideal"]


class Risks(NamedTuple):
    """ZRisk, GeoRisk and risk of every row."""

    zrisk: FloatArray
    georisk: FloatArray
    risk: FloatArray


def risk_matrix(
    matrix: ArrayLike,
    *,
    alpha_risk: float = 2.0,
    orientation: Orientation = "effectiveness",
    reference: Reference = "ideal",
    eps: float = 1e-10,
) -> Risks:
    """Risk of every row of `matrix[..., row, column]`; leading axes are separate tables.

    `orientation="error", reference="mean"` is the paper's eqs. (2)-(4): cells above expectation are bad
    and the reference row is the column mean, whose ZRisk is 0 and whose GeoRisk is √(mean(M)/2).
    `reference="ideal"` appends a row of ones to the table, where it takes part in every expectation.
    """
    values = np.asarray(matrix, dtype=np.float64)
    rows = values.shape[-2]
    if reference == "ideal":
        values = np.concatenate((values, np.ones_like(values[..., :1, :])), axis=-2)
    zrisk, georisk = contingency_risks(values, alpha_risk, errors=orientation == "error", eps=eps)
    best = georisk[..., -1] if reference == "ideal" else np.sqrt(values.mean(axis=(-2, -1)) / 2)
    risk = best[..., np.newaxis] - georisk
    return Risks(zrisk[..., :rows], georisk[..., :rows], risk[..., :rows])


def effectiveness(errors: ArrayLike, *, worst: float) -> FloatArray:
    """E = 1 − M / M_max in [0, 1]; `worst` is 1 for 1 − nDCG and (gmax − gmin)² for squared errors."""
    shares = 1.0 - np.asarray(errors, dtype=np.float64) / worst
    return np.clip(shares, 0.0, 1.0)


def probe_risk(errors: ArrayLike, *, worst: float = 1.0, alpha_risk: float = 2.0) -> FloatArray:
    """Return the sound risk of every candidate from its errors on common items."""
    return risk_matrix(effectiveness(errors, worst=worst), alpha_risk=alpha_risk).risk


def mean_error(errors: ArrayLike, *, worst: float = 1.0) -> FloatArray:
    """Return a candidate's mean error on the common items: the control without GeoRisk."""
    means: FloatArray = 1.0 - effectiveness(errors, worst=worst).mean(axis=-1)
    return means


def spread(errors: ArrayLike, *, least: float = 1e-4, single: float = 0.03) -> float:
    """Return two standard errors of a candidate's mean error over the columns, minus what candidates share.

    2 √ mean_k( s_k²/n ) with s_k² the variance over the n columns of M_kj − mean_k M_kj; `single` if there is
    one column, and never less than `least`.
    """
    values = np.asarray(errors, dtype=np.float64)
    columns = values.shape[-1]
    if columns < 2:
        return single
    deviations = values - values.mean(axis=0)
    return max(least, 2 * float(np.sqrt((deviations.var(axis=1, ddof=1) / columns).mean())))


def batch_risks(errors: Sequence[NDArray[np.floating]], *, alpha_risk: float = 2.0) -> FloatArray:
    """Return the paper's round risk of every client: the median of its batch risks (Algorithm 4, line 16).

    `errors[k]` has one row per batch of client k in training order, one column per place in the batch. The
    batches s of all clients that have one form a table; a client without any batch has risk 0.
    """
    counts = np.array([len(batches) for batches in errors])
    by_client: list[list[FloatArray]] = [[] for _ in errors]
    for first, last in zip([0, *np.unique(counts)[:-1]], np.unique(counts), strict=True):
        # Between two lengths the set of clients is the same, so their tables stack.
        present: list[int] = np.flatnonzero(counts >= last).tolist()
        if last == first:
            continue
        tables = np.stack([errors[client][first:last] for client in present], axis=1)
        risks = risk_matrix(tables, alpha_risk=alpha_risk, orientation="error", reference="mean").risk
        for column, client in enumerate(present):
            by_client[client].append(risks[:, column])
    return np.array([np.median(np.concatenate(risks)) if risks else 0.0 for risks in by_client])


def paper_weights(risk: ArrayLike) -> FloatArray:
    """Return (1 − risk_k) / |S_t| of eq. (1); these weights need not sum to 1 and may be negative."""
    values = np.asarray(risk, dtype=np.float64)
    return (1.0 - values) / len(values)


def softmax_weights(
    risk: ArrayLike, *, temperature: float = 0.03, sizes: ArrayLike | None = None
) -> FloatArray:
    """Return softmax(−risk_k / τ) · √n_k, normalised; without sizes all candidates count alike."""
    values = np.asarray(risk, dtype=np.float64)
    shares = np.exp(-(values - values.min()) / temperature)
    if sizes is not None:
        shares = shares * np.sqrt(np.asarray(sizes, dtype=np.float64))
    weights: FloatArray = shares / shares.sum()
    return weights
