"""Probabilities of hits from totals over groups of hits, cross-fitted, and how honest they are.

Whoever calibrates has the merged lists of judged queries, as any search gives them, and asks silos how many
of some hits together are relevant: never of one hit, nor of the hits of fewer queries than `least`.

    1. logit p = slope·margin + start       fitted to cells, in which hits of a fold have about equal margins
    2. u     the log-odds that a list is whole rather than one whose relevant hits are missing. Lists with
             missing hits are made: from every list hits are left out, each with the probability of step 1
    3. logit p = slope·margin + start + share·u         fitted to cells of about equal margins and u

Of shares the smallest is taken with which the first hit of lists with missing hits is on average less
probable than any hit shown, while the calibration error stays within what a perfectly calibrated model has;
else the largest that keeps the error there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.learning.columns import HITS, PROFILE, shapes
from isthmus.learning.model import HitCalibration, standardised
from isthmus.learning.record import Honesty
from isthmus.logistic import likelihood_sums, newton
from isthmus.randomness import Streams

SHARES = tuple(round(0.1 * step, 1) for step in range(9))
PENALTY = 1.0
"""½·penalty·θ² holds back the weights of the profile."""
FAR = 2.0
"""Deviations below the mean of judged queries' u where unlike queries begin."""
BINS = 10
CLEARLY = 0.95
"""Of the base rate: what first hits of lists with missing hits stay below."""
NO_CELL = -1
LEAST_HITS = 25
"""Of a cell, so that its share of relevant hits says something."""
LAYERS = 3
"""Into which queries are put by their u."""
DRAWS = 5
"""Lists with missing hits that are made of every list."""

TYPICAL, STEADY, ENOUGH = 0.5, 800.0, 50
"""Log-odds by which a hit one deviation above another is likelier (.23 to .75 on the collections of `isthmus
reproduce search`, with and without an encoder); how firmly that holds for few queries, and how many speak for
themselves: ½·steady·(1/queries − 1/enough)·(more than that)²."""

Totals = Callable[[IntArray], FloatArray]
"""(hits, relevant hits) of every cell, from the cell of every hit shown: (queries, `HITS`) → (cells, 2)."""


@dataclass(frozen=True, eq=False)
class RankedLists:
    """The merged lists of judged queries: margins of shape (queries, LIST), the columns of each query and its
    fold."""

    margins: FloatArray
    of_query: FloatArray
    fold: IntArray

    @property
    def profiles(self) -> FloatArray:
        """Of every query."""
        return np.column_stack((shapes(self.margins), self.of_query))

    @property
    def visible(self) -> NDArray[np.bool_]:
        """Which of the first `HITS` places have a hit."""
        return np.asarray(np.isfinite(self.margins[:, :HITS]))

    def take(self, rows: IntArray | NDArray[np.bool_]) -> RankedLists:
        """Some of the queries."""
        return RankedLists(self.margins[rows], self.of_query[rows], self.fold[rows])

    def with_missing(self, probabilities: FloatArray) -> RankedLists:
        """`DRAWS` times the lists of which a hit is left out, as often as hits are relevant."""
        lists = []
        for draw in range(DRAWS):
            left_out = Streams(0)("missing", draw).random(self.margins.shape) < probabilities
            left_out &= np.isfinite(self.margins)
            rest = -np.sort(-np.where(left_out, -np.inf, self.margins), axis=1)
            rows = left_out.any(axis=1) & np.isfinite(rest[:, 0])
            lists.append(RankedLists(rest[rows], self.of_query[rows], self.fold[rows]))
        parts = zip(*((each.margins, each.of_query, each.fold) for each in lists), strict=True)
        return RankedLists(*map(np.concatenate, parts))


@dataclass(frozen=True, eq=False)
class HitGroups:
    """Groups of hits: their fold, how many hits and relevant ones each has, and the cell of every hit."""

    of_hit: IntArray
    fold: IntArray
    hits: FloatArray
    relevant: FloatArray

    @classmethod
    def of(cls, lists: RankedLists, layer: IntArray, totals: Totals, *, least: int) -> HitGroups:
        """HitGroups of about equal margins among the hits of every fold's queries of a layer."""
        of_hit = np.full(lists.visible.shape, NO_CELL)
        folds: list[int] = []
        for fold in np.unique(lists.fold).tolist():
            chosen = layer if _whole(layer[lists.fold == fold], least) else np.zeros_like(layer)
            for each in np.unique(chosen).tolist():
                among = lists.visible & ((lists.fold == fold) & (chosen == each))[:, None]
                for places in _groups(lists.margins[:, :HITS], among, least):
                    of_hit[places] = len(folds)
                    folds.append(fold)
        return cls(of_hit, np.array(folds, dtype=np.int64), *totals(of_hit).T)

    @property
    def base_rate(self) -> float:
        """The share of hits that are relevant."""
        return float(self.relevant.sum() / max(self.hits.sum(), 1e-9))


def _whole(layer: IntArray, least: int) -> bool:
    """Whether every layer has enough queries for cells of its own."""
    return bool(np.bincount(layer, minlength=LAYERS).min() >= 2 * least)


def _groups(
    values: FloatArray,
    among: NDArray[np.bool_],
    least: int,
    is_full: Callable[[float, float, int], bool] = lambda first, value, size: size >= LEAST_HITS,
) -> Iterator[tuple[IntArray, IntArray]]:
    """Hits from the highest value down in groups, as (queries, places): a group ends before a value where
    `is_full(its first value, that value, its size)`, if it has hits of `least` queries; so does the last."""
    query, place = np.nonzero(among)
    order = np.argsort(-values[query, place], kind="stable")
    query, place = query[order], place[order]
    ends, begun = [], 0
    for at in range(1, len(query)):
        first, value = values[query[begun], place[begun]], values[query[at], place[at]]
        if is_full(first, value, at - begun) and len(set(query[begun:at].tolist())) >= least:
            ends.append(at)
            begun = at
    if ends and len(set(query[begun:].tolist())) < least:
        ends.pop()
    for start, end in zip([0, *ends], [*ends, len(query)], strict=True):
        if end > start:
            yield query[start:end], place[start:end]


def fit_calibration(
    lists: RankedLists, totals: Totals, *, least: int
) -> tuple[HitCalibration, dict[str, Honesty]]:
    """The calibration of all lists, and its honesty on folds that were left out: by margins alone (before),
    and with the profile (after)."""
    first = HitGroups.of(lists, np.zeros(len(lists.fold), dtype=np.int64), totals, least=least)
    u = _answerable(lists, _line(first, lists.margins, np.zeros(first.of_hit.shape))).answerable(
        lists.profiles
    )
    layer = np.searchsorted(np.quantile(u, np.arange(1, LAYERS) / LAYERS), u)
    cells = HitGroups.of(lists, layer, totals, least=least)
    tried: dict[float, Honesty] = {}
    chosen = 0.0
    for share in SHARES:
        honesty, first_missing = _cross_fitted(lists, first, cells, share, totals, least)
        tried[share] = honesty
        if honesty.ece > honesty.floor_high and share:
            break
        chosen = share
        if first_missing < CLEARLY * honesty.base_rate:
            break
    return _fitted(lists, first, cells, chosen), {"before": tried[0.0], "after": tried[chosen]}


def _cross_fitted(
    lists: RankedLists, first: HitGroups, cells: HitGroups, share: float, totals: Totals, least: int
) -> tuple[Honesty, float]:
    """Honesty of hits by calibrations that have not seen their fold, and the mean probability of the first
    hit of lists with missing hits."""
    probabilities, of_missing = np.zeros(lists.visible.shape), []
    for fold in np.unique(lists.fold).tolist():
        line = _fitted(lists, first, cells, share, without=fold)
        mine = lists.take(lists.fold == fold)
        probabilities[lists.fold == fold] = line(mine.margins[:, :HITS], mine.profiles[:, None])
        missing = mine.with_missing(line(mine.margins, mine.profiles[:, None]))
        of_missing.append(line(missing.margins[:, 0], missing.profiles))
    every = np.concatenate(of_missing)
    return _honesty(lists, probabilities, totals, least), float(every.mean()) if len(every) else 0.0


def _honesty(lists: RankedLists, probabilities: FloatArray, totals: Totals, least: int) -> Honesty:
    """The calibration error over tenths of the probability, joined where they have hits of few queries,
    beside that of a perfectly calibrated model."""

    def is_full(first: float, value: float, size: int) -> bool:
        return int(first * BINS) > int(value * BINS)

    of_hit = np.full(lists.visible.shape, NO_CELL)
    promised, spread, reach = [], [], []
    for number, places in enumerate(_groups(probabilities, lists.visible, least, is_full)):
        of_hit[places] = number
        promised.append(probabilities[places].mean())
        reach.append((probabilities[places].min(), probabilities[places].max()))
        spread.append((probabilities[places] * (1 - probabilities[places])).mean())
    hits, relevant = totals(of_hit).T
    total = max(float(hits.sum()), 1e-9)
    draws = np.abs(Streams(0)("floor").standard_normal((2_000, len(hits))) * np.sqrt(hits * spread))
    floor = draws.sum(axis=1) / total
    return Honesty(
        ece=float(np.abs(hits * promised - relevant).sum() / total),
        floor=float(floor.mean()),
        floor_high=float(np.quantile(floor, 0.95)),
        hits=int(lists.visible.sum()),
        base_rate=float(relevant.sum() / total),
        groups=tuple(
            (float(low), float(high), float(mean), float(right / max(size, 1e-9)), float(size))
            for (low, high), mean, right, size in zip(reach, promised, relevant, hits, strict=True)
        ),
    )


def _fitted(
    lists: RankedLists, first: HitGroups, cells: HitGroups, share: float, *, without: int | None = None
) -> HitCalibration:
    """The calibration with this share of u, of all lists or without those of a fold."""
    some = lists if without is None else lists.take(lists.fold != without)
    line = _answerable(some, _line(first, lists.margins, np.zeros(first.of_hit.shape), without=without))
    u = np.broadcast_to(line.answerable(lists.profiles)[:, None], lists.visible.shape)
    slope, start = _line(cells, lists.margins, share * u, without=without)
    return HitCalibration(
        *(slope, start, share, cells.base_rate, line.bias, line.low, line.spread),
        *(line.centre, line.scale, line.weights),
    )


def _answerable(lists: RankedLists, line: tuple[float, float]) -> HitCalibration:
    """u from these lists and those with missing hits; a calibration with its line yet to be fitted."""
    from scipy.special import expit

    slope, start = line
    finite = np.where(np.isfinite(lists.margins), lists.margins, 0.0)
    profiles, missing = lists.profiles, lists.with_missing(expit(slope * finite + start)).profiles
    centre, scale = profiles.mean(axis=0), profiles.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    rows = standardised(np.concatenate((profiles, missing)), centre, scale)
    features = np.vstack((rows.T, np.ones(len(rows))))
    whole = np.concatenate((np.ones(len(profiles)), np.zeros(len(missing))))
    weights = np.concatenate((np.ones(len(profiles)), np.full(len(missing), 1 / DRAWS)))
    penalty = np.concatenate((np.full(len(PROFILE), PENALTY), [1e-3]))
    theta = newton(
        lambda at: likelihood_sums(features, whole, at, weights=weights), np.zeros(len(penalty)), penalty
    )
    u = theta @ features[:, : len(profiles)]
    spread = max(float(u.std()), 1e-6)
    return HitCalibration(
        *(slope, start, 0.0, 0.0, float(theta[-1]), float(u.mean()) - FAR * spread, spread),
        *(centre, scale, theta[:-1]),
    )


def _line(
    cells: HitGroups, margins: FloatArray, offset: FloatArray, *, without: int | None = None
) -> tuple[float, float]:
    """(slope, start) of logit p = slope·margin + start + offset, by the likelihood of how many hits of every
    cell are relevant, were they as many as p says on average; a slope below 0 is 0. Few cells say little of
    the slope, which is drawn to `TYPICAL` for a margin in deviations of the hits'."""
    used = (cells.of_hit >= 0) & (cells.fold[cells.of_hit] != without) & (cells.hits[cells.of_hit] > 0)
    cell = np.unique(cells.of_hit[used], return_inverse=True)
    hits, size = cells.hits[cell[0]], np.bincount(cell[1])
    relevant = np.clip(cells.relevant[cell[0]], 0, hits)
    spread = max(float(margins[:, :HITS][used].std()), 1e-9) if used.any() else 1.0
    features = np.stack((margins[:, :HITS][used] / spread, np.ones(int(used.sum()))))
    typical = offset[used] + TYPICAL * features[0]

    def sums(theta: FloatArray) -> FloatArray:
        from scipy.special import expit

        each = expit(theta @ features + typical)
        p = np.clip(np.bincount(cell[1], each) / size, 1e-12, 1 - 1e-12)
        slopes = np.stack([np.bincount(cell[1], each * (1 - each) * row) / size for row in features])
        loss = -(relevant @ np.log(p) + (hits - relevant) @ np.log1p(-p))
        gradient = slopes @ ((hits * p - relevant) / (p * (1 - p)))
        return np.concatenate(([loss], gradient, ((slopes * hits / (p * (1 - p))) @ slopes.T).reshape(-1)))

    queries = min(max(int(used.any(axis=1).sum()), 1), ENOUGH)
    firm = STEADY * (1 / queries - 1 / ENOUGH) + 1e-3
    more, start = newton(sums, np.zeros(2), np.array([firm, 1e-3]), tolerance=1e-9).tolist()
    if TYPICAL + more >= 0:
        return (TYPICAL + more) / spread, start
    flat = newton(lambda at: sums(np.array([-TYPICAL, at[0]]))[[0, 2, 6]], np.zeros(1), np.full(1, 1e-3))
    return 0.0, float(flat[0])
