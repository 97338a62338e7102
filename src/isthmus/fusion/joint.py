"""Calibration and fusion learned together: each run's curve and its weight by one ranking objective.

`Stacked` calibrates every run by likelihood first and then weighs the log-odds. Here the curve of run i,
f_i(d) = a_i·z_i(d) − b_i·ln rank_i(d) − c_i·absent_i(d) with a, b ≥ 0, so that it never reorders a list, and
the sum over runs are fitted at once, for a smooth surrogate of the target measure:

    nDCG   −Σ_d p(d) ln softmax(s)(d), p ∝ 2^grade − 1: a bound of 1 − nDCG (Bruch et al. 2019)
    P@1    −ln Σ_{d relevant} softmax(s)(d): −ln P(a first document drawn by softmax is relevant)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError
from isthmus.fusion.estimator import Fuser, ScoreBreakdown, TrainingUnion
from isthmus.fusion.fusers import Candidates
from isthmus.fusion.union import Union

TARGETS = ("nDCG", "P@1")
KINDS = 3
"""Kinds of evidence per run: z-score, logarithm of the rank, absence."""


@dataclass(eq=False, repr=False, kw_only=True)
class Joint(Fuser):
    """Σᵢ fᵢ, all curves learned together for `target`; `penalty` shrinks every coefficient to 0."""

    method = "joint"

    target: str = "nDCG"
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(f"no surrogate of {self.target!r}", key=self.target, known=TARGETS)

    def _evidence(self, union: Union) -> FloatArray:
        z = Candidates.of(union, "z-score", missing="lowest").matrix()
        lengths = [float(run.ranks.max(initial=1)) for run in union.runs]
        ranks = union.spread([np.asarray(run.ranks, dtype=np.float64) for run in union.runs])
        below = np.where(np.isnan(ranks), np.array(lengths)[:, None] + 1.0, ranks)
        return np.vstack((z, -np.log(below), -(~union.present).astype(np.float64)))

    def _weigh(self, evidence: FloatArray, training: TrainingUnion, queries: NDArray[np.bool_]) -> FloatArray:
        from scipy.optimize import minimize

        union = training.union
        rows = queries[union.query_of_row] & training.known
        lists = np.unique(union.query_of_row[rows], return_inverse=True)[1]
        relevant = training.relevant[rows]
        gains = relevant.astype(np.float64)
        if self.target == "nDCG":
            grades = np.maximum(union.table().grades(training.qrels)[rows], 0)
            gains = np.where(relevant, np.exp2(grades.astype(np.float64)) - 1.0, 0.0)
        runs, free = len(union.runs), (KINDS - 1) * len(union.runs)
        by_name = np.argsort(np.array(self.retrievers_, dtype=np.str_))  # independent of the runs' order
        order = np.concatenate([by_name + kind * runs for kind in range(KINDS)])
        design, start = evidence[order][:, rows], np.full(len(evidence), 0.1)

        def loss(theta: FloatArray) -> tuple[float, FloatArray]:
            value, gradient = surrogate(theta @ design, gains, lists, first=self.target == "P@1")
            return value + self.penalty * float(theta @ theta) / 2, design @ gradient + self.penalty * theta

        bounds = [(0.0, None)] * free + [(None, None)] * (len(evidence) - free)
        exact: Any = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 1000}
        theta = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=exact).x
        return np.asarray(theta[np.argsort(order)])

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        return np.asarray(np.sort(weights[:, None] * evidence, axis=0).sum(axis=0))

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        parts = (self.weights_[:, None] * evidence).reshape(KINDS, -1, union.rows).sum(axis=0)
        return ScoreBreakdown(parts, np.zeros(union.rows))


def surrogate(
    scores: FloatArray, gains: FloatArray, lists: IntArray, *, first: bool
) -> tuple[float, FloatArray]:
    """Return the loss summed over lists (numbered from 0 without gaps) and its gradient by the scores.

    A list without any gain contributes nothing.
    """
    count = int(lists.max(initial=-1)) + 1
    highest = np.full(count, -np.inf)
    np.maximum.at(highest, lists, scores)
    powers = np.exp(scores - highest[lists])
    shares = powers / np.bincount(lists, powers, count)[lists]
    weights = gains * shares if first else gains
    whole = np.bincount(lists, weights, count)
    some = whole > 0
    targets = np.where(some[lists], weights / np.where(some, whole, 1.0)[lists], 0.0)
    gradient = np.where(some[lists], shares, 0.0) - targets
    if first:
        return float(-np.log(whole[some]).sum()), gradient
    return float(-(targets * np.log(np.maximum(shares, 1e-300))).sum()), gradient
