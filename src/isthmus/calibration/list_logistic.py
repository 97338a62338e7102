"""ListLogistic: a logistic curve of a score's position in its list, fitted mainly to the top of lists.

It has three or four parameters, so that thirty judged queries are enough where QueryFeature's trees need
hundreds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration.estimator import Calibrator, numbered_lists
from isthmus.calibration.query_feature import FEATURES, list_features
from isthmus.logistic import likelihood_sums, newton

TOP = 10
"""The number of rows of a list that a reader sees."""
RIDGE = 1.0


class ListLogistic(Calibrator):
    """σ(a·z − b·ln(rank) + c), a, b ≥ 0, with z the z-score in the list; `raw` adds a term in the score
    itself.

    The first ten rows of a list count in full, and all rows below together at most as much as `tail` times
    ten: a curve that fitted the many rows below would be wrong where people look. No list is reordered.
    Without groups the score is the only feature.
    """

    needs_lists = True

    def __init__(self, *, raw: bool = False, tail: float = 0.3) -> None:
        self.raw = raw
        self.tail = tail

    def _learn_lists(
        self, scores: FloatArray, relevant: FloatArray, groups: IntArray | None, judged: NDArray[np.bool_]
    ) -> None:
        self.with_lists_ = groups is not None
        rows, better = self._features(scores, groups)
        lists = numbered_lists(groups, len(scores))
        below = np.bincount(lists, weights=better >= TOP)[lists]
        share = np.minimum(1.0, self.tail * TOP / np.maximum(below, 1.0))
        weights = np.where(better < TOP, 1.0, share)[judged]
        rows, relevant = rows[:, judged], relevant[judged]
        self.centre_ = rows @ weights / weights.sum()
        spread = np.sqrt((rows - self.centre_[:, None]) ** 2 @ weights / weights.sum())
        self.scale_ = np.where(spread > 1e-12 * np.abs(self.centre_), spread, np.inf)
        unit = np.vstack(((rows - self.centre_[:, None]) / self.scale_[:, None], np.ones(len(relevant))))
        prior = float(logit(relevant @ weights / weights.sum()))
        free = np.arange(len(unit))
        while True:  # refit without features whose slope is negative
            design = unit[free]
            penalty = np.where(free < len(rows), RIDGE, 0.0)
            start = np.where(free < len(rows), 0.0, prior)
            theta = newton(lambda at: likelihood_sums(design, relevant, at, weights=weights), start, penalty)  # noqa: B023
            if (theta[:-1] >= 0).all():
                break
            free = free[np.append(theta[:-1] >= 0, True)]
        self.coef_ = np.zeros(len(unit))
        self.coef_[free] = theta

    def _probabilities_lists(self, scores: FloatArray, groups: IntArray | None) -> FloatArray:
        self._check_lists(groups is not None)
        rows, _ = self._features(scores, groups)
        unit = (rows - self.centre_[:, None]) / self.scale_[:, None]
        return np.asarray(expit(self.coef_[:-1] @ unit + self.coef_[-1]))

    def _features(self, scores: FloatArray, groups: IntArray | None) -> tuple[FloatArray, FloatArray]:
        """Return one row per feature, larger being better, and for every score the number of better ones in
        its list."""
        if groups is None:
            return scores[None, :], np.zeros(len(scores))
        table = list_features(scores, groups).T
        better = np.rint(table[FEATURES.index("rank")] * np.bincount(groups)[groups])
        rows = [table[FEATURES.index("z")], -np.log1p(better), *([scores] if self.raw else [])]
        return np.stack(rows), better
