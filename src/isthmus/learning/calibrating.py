"""Probabilities of hits from the lists of judged queries, cross-fitted, and how honest they are.

A list without its relevant hits is what a query finds whose answer is nowhere. u, the log-odds that a list is
whole, are fitted to lists as they are and to the same lists without their relevant hits, then logit p =
slope·margin + start + share·u to the hits shown. Of shares the smallest is taken with which the first hit of
lists without relevant hits is on average less probable than any hit shown, while the calibration error stays
within what a perfectly calibrated model has; else the largest that keeps the error there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.evaluation import sampling_floor
from isthmus.learning.columns import HITS, PROFILE, shapes
from isthmus.learning.model import HitCalibration, standardised
from isthmus.learning.record import Honesty
from isthmus.logistic import likelihood_sums, newton

SHARES = tuple(round(0.1 * step, 1) for step in range(9))
PENALTY = 1.0
"""½·penalty·θ² holds back the weights of the profile."""
FAR = 2.0
"""Deviations below the mean of judged queries' u where unlike queries begin."""
BINS = 10


@dataclass(frozen=True, eq=False)
class JudgedLists:
    """The merged lists of judged queries: margins and relevance of shape (queries, LIST), the columns of each
    query and its fold."""

    margins: FloatArray
    relevant: FloatArray
    of_query: FloatArray
    fold: IntArray

    @property
    def profiles(self) -> FloatArray:
        """Of every query."""
        return np.column_stack((shapes(self.margins), self.of_query))

    def without_relevant(self) -> JudgedLists:
        """The lists of queries with a relevant hit, without those; nothing in them is relevant."""
        rows = np.flatnonzero((self.relevant >= 0.5).any(axis=1))
        rest = -np.sort(-np.where(self.relevant[rows] >= 0.5, -np.inf, self.margins[rows]), axis=1)
        some = np.isfinite(rest[:, 0])
        rows, rest = rows[some], rest[some]
        return JudgedLists(rest, np.zeros_like(rest), self.of_query[rows], self.fold[rows])

    def take(self, rows: IntArray) -> JudgedLists:
        """Some of the queries."""
        return JudgedLists(self.margins[rows], self.relevant[rows], self.of_query[rows], self.fold[rows])

    def hits(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(margin, relevance, profile) of every hit shown."""
        places = np.isfinite(self.margins[:, :HITS])
        margins, right = (each[:, :HITS][places] for each in (self.margins, self.relevant))
        return margins, np.minimum(right, 1.0), self.profiles[np.nonzero(places)[0]]


def fit_calibration(lists: JudgedLists) -> tuple[HitCalibration, dict[str, Honesty]]:
    """The calibration of all lists, and its honesty on folds that were left out: by margins alone (before),
    and with the profile (after)."""
    lists = lists.take(np.flatnonzero(np.isfinite(lists.margins[:, 0])))
    tried: dict[float, Honesty] = {}
    chosen = 0.0
    for share in SHARES:
        honesty, first_missing = _cross_fitted(lists, share)
        tried[share] = honesty
        if honesty.ece > honesty.floor_high and share:
            break
        chosen = share
        if first_missing < honesty.base_rate:
            break
    return _fitted(lists, chosen), {"before": tried[0.0], "after": tried[chosen]}


def _cross_fitted(lists: JudgedLists, share: float) -> tuple[Honesty, float]:
    """Honesty of hits by calibrations that have not seen their fold, and the mean probability of the first
    hit of lists without relevant ones."""
    missing = lists.without_relevant()
    probabilities, outcomes, first = [], [], []
    for fold in np.unique(lists.fold).tolist():
        line = _fitted(lists.take(np.flatnonzero(lists.fold != fold)), share)
        margins, right, profiles = lists.take(np.flatnonzero(lists.fold == fold)).hits()
        probabilities.append(line(margins, profiles))
        outcomes.append(right)
        left_out = missing.take(np.flatnonzero(missing.fold == fold))
        first.append(line(left_out.margins[:, 0], left_out.profiles))
    return honesty_of(np.concatenate(probabilities), np.concatenate(outcomes)), _mean(np.concatenate(first))


def honesty_of(probabilities: FloatArray, outcomes: FloatArray) -> Honesty:
    """The calibration error of hits beside that of a perfectly calibrated model with the same hits."""
    if not len(outcomes):
        return Honesty(0.0, 0.0, 0.0, 0, 0.0)
    floor = sampling_floor(probabilities, bins=BINS)
    place = np.minimum((probabilities * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(place, probabilities - outcomes)  # equal margins share what is relevant among them
    error = float(np.abs(gaps).sum() / len(outcomes))
    return Honesty(error, floor.mean, floor.high, len(outcomes), float(outcomes.mean()))


def _fitted(lists: JudgedLists, share: float) -> HitCalibration:
    """The calibration of some lists with this share of u."""
    profiles, missing = lists.profiles, lists.without_relevant().profiles
    centre, scale = profiles.mean(axis=0), profiles.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    rows = standardised(np.concatenate((profiles, missing)), centre, scale)
    features = np.vstack((rows.T, np.ones(len(rows))))
    whole = np.concatenate((np.ones(len(profiles)), np.zeros(len(missing))))
    penalty = np.concatenate((np.full(len(PROFILE), PENALTY), [1e-3]))
    theta = newton(lambda at: likelihood_sums(features, whole, at), np.zeros(len(penalty)), penalty)
    u = theta @ features[:, : len(profiles)]
    margins, right, of_hit = lists.hits()
    offset = share * (standardised(of_hit, centre, scale) @ theta[:-1] + theta[-1])
    slope, start = _line(margins, right, offset)
    return HitCalibration(
        *(slope, start, share, _mean(right), float(theta[-1])),
        *(float(u.mean() - FAR * u.std()), max(float(u.std()), 1e-6)),
        *(centre, scale, theta[:-1]),
    )


def _line(margins: FloatArray, right: FloatArray, offset: FloatArray) -> tuple[float, float]:
    """(slope, start) of logit p = slope·margin + start + offset; a slope below 0 is 0."""
    features = np.stack((margins, np.ones(len(margins)), offset))

    def sums(theta: FloatArray) -> FloatArray:
        totals = likelihood_sums(features, right, np.append(theta, 1.0))
        return np.concatenate((totals[:3], totals[4:].reshape(3, 3)[:2, :2].reshape(-1)))

    slope, start = newton(sums, np.array([1.0, 0.0]), np.full(2, 1e-3)).tolist()
    if slope >= 0:
        return slope, start
    flat = newton(lambda at: sums(np.array([0.0, at[0]]))[[0, 2, 6]], np.zeros(1), np.full(1, 1e-3))
    return 0.0, float(flat[0])


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else 0.0
