"""Probabilities of hits from totals over groups of hits, cross-fitted, and their calibration errors.

The asker has the merged lists of judged queries, as any search returns them, and asks silos how many of some
hits together are relevant: never of one hit, nor of the hits of fewer queries than `least`.

    1. logit p = slope·bent(margin − mean) + between·mean + start, as in `model`. Fitted to cells, in which
       hits of a fold have about equal deviations from about equal means of their lists
    2. u     the log-odds that a list is whole rather than one whose relevant hits are missing. Lists with
             missing hits are simulated: hits are left out of every list with the probability of step 1
    3. z     the weighted sum of the hit's deviation, the mean and u; and p from z alone, by a curve. Hits of
             a list differ to the extent that its u is above a gate, see `model`

The gate is the lowest of `GATES` with which the first hit of lists with missing hits is on average less
probable than hits shown are relevant. If probabilities hardly differ with it, as for lists that are all
alike, or are clearly miscalibrated, the next lower gate with well calibrated, differing probabilities is
taken. If there is none, the gate is not the cause of the miscalibration and stays, or all lists are open if
probabilities hardly differ with it. The curve is fitted for each gate: a gate moves the hits of a list
together, which is more than a rescaling of z.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.learning.columns import HITS, MEAN, PROFILE, shapes
from isthmus.learning.model import HitCalibration, bent, pieces, standardised
from isthmus.learning.record import Honesty
from isthmus.logistic import likelihood_sums, newton, newton_steps, newton_together
from isthmus.private import LEAST_MEMBERS
from isthmus.randomness import Streams

GATES = (-9.0, -1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 9.0)
"""Gates to try, in deviations of judged queries' u: all lists are open with the first, none with the last."""
SLOPE = 0.25
"""Deviations of u over which a gate opens by 1 in log-odds."""
SHAPES = ((1e3, 0.4), (4.0, 1.0), (2.0, 1.0), (1.0, 1.0), (0.5, 1.0))
"""Shapes (reach in deviations of the hits', above), see `model.bent`. The first is used if queries are too
few to decide: a straight line mostly overrates hits that stand out."""
CLEAR = 4.0
"""Least gain in log-likelihood for which another shape replaces the first."""
PENALTY, PENALTY_BETWEEN = 1.0, 30.0
"""Penalties ½·penalty·θ² on the profile's weights, and on the terms that tell lists apart; in deviations."""
BENDS = 10.0
"""Factor by which the bends of the curve are penalised more than its overall slope."""
FAR = 2.0
"""Deviations below the mean of judged queries' u at which unlike queries begin."""
BINS = 10
LEAST_SPREAD = 0.1
"""Least variance of probabilities, as a share of that with every list open."""
NO_CELL = -1
LEAST_HITS = 25
"""Least number of hits in a cell, so that its share of relevant hits is informative."""
LAYERS = 3
"""Number of layers into which queries are divided by the mean of their hits, and by u."""
DRAWS = 5
"""Number of lists with missing hits that are made from every list."""

TYPICAL, STEADY, ENOUGH = 0.5, 800.0, 50
"""Typical log-odds by which a hit one deviation above another is more probable (.23 to .75 on the collections
of `isthmus reproduce search`, with and without an encoder); strength of this prior for few queries; number
of queries that need no prior: ½·steady·(1/queries − 1/enough)·(difference to typical)²."""

USUAL_BETWEEN, USUAL_SHARE = 0.1, 0.7
"""Prior weights of the terms that distinguish lists, for few queries: log-odds for a mean one deviation
higher, and for u (−.25 to .24, and .16 to 1.26, the medians .1 and .8, on those collections)."""


@dataclass(frozen=True)
class CalibrationRules:
    """Rules chosen by their results on collections, see `isthmus reproduce search`."""

    caution: float = 0.95
    """Limit for first hits of lists with missing hits, as a share of the base rate; inf closes no list."""
    dishonest: float = 1.5
    """Calibration error that ends caution, as a multiple of the 95 % quantile of a perfect model."""
    knots: tuple[float, ...] = (0.15, 0.4, 0.65, 0.85, 0.95)
    """Quantiles of z at which the curve may bend."""
    steep: float = 0.25
    """Prior slope of the curve for few queries, whose probabilities are mostly too high."""
    firm: float = 1e5
    """Strength of that prior, ½·firm/queries²·θ², in deviations of z."""
    bounded: bool = False
    """Whether falling pieces are prevented in the fit; otherwise they are made level after it."""


RULES = CalibrationRules()

Totals = Callable[[IntArray], FloatArray]
"""Returns (hits, relevant hits) by cell, from the cell of every hit shown: (queries, `HITS`) → (cells, 2)."""


@dataclass(frozen=True, eq=False)
class RankedLists:
    """The merged lists of judged queries: margins of shape (queries, LIST), queries' columns and folds; or
    every silo's own lists, one table after the other, with the position of the `silo` of each."""

    margins: FloatArray
    of_query: FloatArray
    fold: IntArray
    silo: IntArray

    @property
    def profiles(self) -> FloatArray:
        """The profile of every query: the shape of its list, and its own columns."""
        return np.column_stack((shapes(self.margins), self.of_query))

    @property
    def deviations(self) -> FloatArray:
        """Deviations of the first `HITS` margins from the mean of their list."""
        return np.asarray(self.margins[:, :HITS] - shapes(self.margins)[:, MEAN, None])

    @property
    def visible(self) -> NDArray[np.bool_]:
        """Mask of the first `HITS` places that have a hit."""
        return np.asarray(np.isfinite(self.margins[:, :HITS]))

    def take(self, rows: IntArray | NDArray[np.bool_]) -> RankedLists:
        """Return some of the queries."""
        return RankedLists(self.margins[rows], self.of_query[rows], self.fold[rows], self.silo[rows])

    @cached_property
    def least_silos(self) -> int:
        """The number of silos whose lists a group of hits must come from, so that no total is one silo's."""
        return min(LEAST_MEMBERS, len(np.unique(self.silo)))

    def from_enough(self, rows: Iterable[int], least: int) -> bool:
        """Whether these are at least so many lists, of enough silos."""
        lists = set(rows)
        return len(lists) >= least and len({int(self.silo[each]) for each in lists}) >= self.least_silos

    def with_missing(self, probabilities: FloatArray) -> RankedLists:
        """Return `DRAWS` copies of the lists with hits left out at random, each with its probability;
        unchanged and empty lists are omitted."""
        lists = []
        for draw in range(DRAWS):
            left_out = Streams(0)("missing", draw).random(self.margins.shape) < probabilities
            left_out &= np.isfinite(self.margins)
            rest = -np.sort(-np.where(left_out, -np.inf, self.margins), axis=1)
            rows = left_out.any(axis=1) & np.isfinite(rest[:, 0])
            lists.append(RankedLists(rest[rows], self.of_query[rows], self.fold[rows], self.silo[rows]))
        parts = zip(*((each.margins, each.of_query, each.fold, each.silo) for each in lists), strict=True)
        return RankedLists(*map(np.concatenate, parts))


@dataclass(frozen=True, eq=False)
class HitGroups:
    """Groups of hits: their fold, their numbers of hits and relevant hits, and the group of every hit."""

    of_hit: IntArray
    fold: IntArray
    hits: FloatArray
    relevant: FloatArray

    @classmethod
    def of(
        cls, lists: RankedLists, values: FloatArray, layer: IntArray, totals: Totals, *, least: int
    ) -> HitGroups:
        """Group the hits of every fold's queries of a layer by about equal values, and get the totals."""
        of_hit = np.full(lists.visible.shape, NO_CELL)
        folds: list[int] = []
        for fold in np.unique(lists.fold).tolist():
            mine = lists.fold == fold
            layers = [np.flatnonzero(mine & (layer == each)).tolist() for each in range(LAYERS)]
            whole = all(lists.from_enough(rows, least) for rows in layers)
            chosen = layer if whole else np.zeros_like(layer)
            for each in np.unique(chosen).tolist():
                among = lists.visible & (mine & (chosen == each))[:, None]
                for places in _groups(lists, values, among, least):
                    of_hit[places] = len(folds)
                    folds.append(fold)
        return cls(of_hit, np.array(folds, dtype=np.int64), *totals(of_hit).T)

    @property
    def base_rate(self) -> float:
        """The share of hits that are relevant."""
        return float(self.relevant.sum() / max(self.hits.sum(), 1e-9))


def _groups(
    lists: RankedLists,
    values: FloatArray,
    among: NDArray[np.bool_],
    least: int,
    is_full: Callable[[float, float, int], bool] = lambda first, value, size: size >= LEAST_HITS,
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield groups of hits from the highest value down, as (queries, places). A group ends before a value if
    `is_full(its first value, that value, its size)` and it has hits of `least` queries and of enough silos; a
    last group with fewer joins the one before."""
    query, place = np.nonzero(among)
    order = np.argsort(-values[query, place], kind="stable")
    query, place = query[order], place[order]
    ends, begun = [], 0
    for at in range(1, len(query)):
        first, value = values[query[begun], place[begun]], values[query[at], place[at]]
        if is_full(first, value, at - begun) and lists.from_enough(query[begun:at].tolist(), least):
            ends.append(at)
            begun = at
    if ends and not lists.from_enough(query[begun:].tolist(), least):
        ends.pop()
    for start, end in zip([0, *ends], [*ends, len(query)], strict=True):
        if end > start:
            yield query[start:end], place[start:end]


def fit_calibration(
    lists: RankedLists, totals: Totals, least: int, rules: CalibrationRules = RULES
) -> tuple[HitCalibration, dict[str, Honesty]]:
    """Fit the calibration of all lists. Returns it, and its errors on folds that were left out: with every
    list open (before), and with the gate (after). Groups of hits have at least `least` queries."""
    most = len(lists.fold) // (2 * LAYERS * least)
    lists = replace(lists, fold=lists.fold % max(2, min(most, 1 + int(lists.fold.max()))))
    cells = HitGroups.of(lists, lists.deviations, _layers(lists.profiles[:, MEAN]), totals, least=least)
    folds = (None, *np.unique(lists.fold).tolist())
    lines = {fold: _line(lists, cells, without=fold) for fold in folds}
    layer = _layers(lines[None].answerable(lists.profiles))
    cells = HitGroups.of(lists, lists.deviations, layer, totals, least=least)
    weighed = {fold: _weighed(lists, cells, lines[fold], fold) for fold in folds}

    @cache
    def gated(gate: float) -> Calibrations:
        so_far = {fold: _with_gate(each, gate) for fold, each in weighed.items()}
        z = so_far[None].evidence(lists.margins[:, :HITS], lists.profiles[:, None])
        groups = HitGroups.of(lists, z, np.zeros_like(layer), totals, least=least)
        return {fold: _curved(lists, groups, each, fold, rules) for fold, each in so_far.items()}

    def is_enough(gate: float) -> bool:
        return _first_missing(lists, lines, gated(gate)) < rules.caution * cells.base_rate

    @cache
    def probabilities(gate: float) -> FloatArray:
        return _cross_fitted(lists, gated(gate))

    @cache
    def honesty(gate: float) -> Honesty:
        return _honesty(lists, probabilities(gate), totals, least)

    def excess(at: int) -> float:
        """Return the error as a multiple of the 95 % quantile of a perfect model."""
        return honesty(GATES[at]).ece / max(honesty(GATES[at]).floor_high, 1e-9)

    def differs(at: int) -> bool:
        spread = [probabilities(GATES[each])[lists.visible].var() for each in (at, 0)]
        return bool(spread[0] >= LEAST_SPREAD * spread[1])

    at = bisect_left(GATES[:-1], True, key=is_enough)
    if not differs(at) or excess(at) > rules.dishonest:
        honest = (lower for lower in reversed(range(at)) if differs(lower) and excess(lower) <= 1)
        at = next(honest, at if differs(at) else 0)
    return gated(GATES[at])[None], {"before": honesty(GATES[0]), "after": honesty(GATES[at])}


Calibrate = Callable[[RankedLists, Totals, int], tuple[HitCalibration, dict[str, Honesty]]]
"""`fit_calibration`, or a replacement."""


def _layers(values: FloatArray) -> IntArray:
    """Divide queries by a value into layers of about equal size."""
    return np.searchsorted(np.quantile(values, np.arange(1, LAYERS) / LAYERS), values)


Calibrations = Mapping[int | None, HitCalibration]
"""Calibrations by the fold whose lists they have not seen; under None that of all lists."""


def _cross_fitted(lists: RankedLists, calibrations: Calibrations) -> FloatArray:
    """Return probabilities of hits by calibrations that have not seen their fold."""
    probabilities = np.zeros(lists.visible.shape)
    for fold in np.unique(lists.fold).tolist():
        mine = lists.take(lists.fold == fold)
        probabilities[lists.fold == fold] = calibrations[fold](mine.margins[:, :HITS], mine.profiles[:, None])
    return probabilities


def _first_missing(lists: RankedLists, lines: Calibrations, calibrations: Calibrations) -> float:
    """Return the mean probability of the first hit of lists with missing hits."""
    of_missing = []
    for fold in np.unique(lists.fold).tolist():
        mine = lists.take(lists.fold == fold)
        missing = mine.with_missing(lines[fold](mine.margins, mine.profiles[:, None]))
        of_missing.append(calibrations[fold](missing.margins[:, 0], missing.profiles))
    every = np.concatenate(of_missing)
    return float(every.mean()) if len(every) else 0.0


def _honesty(lists: RankedLists, probabilities: FloatArray, totals: Totals, least: int) -> Honesty:
    """Return the calibration error over tenths of the probability, joined if they have hits of too few
    queries, beside that of a perfectly calibrated model."""

    def is_full(first: float, value: float, size: int) -> bool:
        return int(first * BINS) > int(value * BINS)

    of_hit = np.full(lists.visible.shape, NO_CELL)
    promised, spread, reach = [], [], []
    for number, places in enumerate(_groups(lists, probabilities, lists.visible, least, is_full)):
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


def _weighed(lists: RankedLists, cells: HitGroups, line: HitCalibration, fold: int | None) -> HitCalibration:
    """Return the calibration with weights of the mean and of u, fitted beside the hit's deviation."""
    used = _used(cells, fold)
    own = replace(line, between=0.0, share=0.0).evidence(lists.margins[:, :HITS], lists.profiles[:, None])[
        used
    ]
    u = np.broadcast_to(line.answerable(lists.profiles)[:, None], cells.of_hit.shape)[used]
    means = np.broadcast_to(lists.profiles[:, MEAN, None], cells.of_hit.shape)[used]
    parts = np.stack((means, u))
    scales = parts.std(axis=1)
    scales[scales < 1e-6] = 1.0  # a feature that is equal in all lists would get an unbounded weight
    usual = np.array([USUAL_BETWEEN / scales[0], USUAL_SHARE])
    features = np.vstack((parts / scales[:, None], np.ones(len(u))))
    penalty = np.array([PENALTY_BETWEEN, PENALTY_BETWEEN, 1e-3])
    least = np.append(-usual * scales, -np.inf)
    _, theta = _fit(cells, used, features, own + usual @ parts, penalty, least)
    between, share = (usual + theta[:-1] / scales).tolist()
    return replace(line, between=between, share=share, start=0.0)


def _with_gate(line: HitCalibration, gate: float) -> HitCalibration:
    """Return the calibration with a gate, given in deviations of u."""
    return replace(line, gate=line.low + (FAR + gate) * line.spread, width=SLOPE * line.spread)


def _curved(
    lists: RankedLists, cells: HitGroups, line: HitCalibration, fold: int | None, rules: CalibrationRules
) -> HitCalibration:
    """Return the calibration with the fitted curve from z to log-odds."""
    used = _used(cells, fold)
    z = line.evidence(lists.margins[:, :HITS], lists.profiles[:, None])[used]
    knots = np.quantile(z, rules.knots)
    own = pieces(z, knots)
    scales = np.maximum(np.array([z.std(), *own.std(axis=1)]), 1e-9)
    features = np.vstack((np.vstack((z, own)) / scales[:, None], np.ones(len(z))))
    firm = rules.firm / max(int(used.any(axis=1).sum()), 1) ** 2
    penalty = np.array([firm, *[BENDS * firm] * len(own), 1e-3])
    least = np.array([-rules.steep * scales[0], *[-np.inf] * (len(own) + 1)])
    if rules.bounded:  # fit the overall slope first, then that of every piece
        ends = [0, -1]
        _, (more, _) = _fit(cells, used, features[ends], rules.steep * z, penalty[ends], least[ends])
        steep = rules.steep + more / scales[0]
        least = np.append(-steep * scales[1:], -np.inf)
        _, theta = _fit(cells, used, features[1:], steep * z, penalty[1:], least)
        slopes = np.maximum(steep + theta[:-1] / scales[1:], 0.0)
        return replace(line, knots=knots, slopes=slopes, start=float(theta[-1]))
    _, theta = _fit(cells, used, features, rules.steep * z, penalty, least)
    slopes = np.maximum(rules.steep + theta[0] / scales[0] + theta[1:-1] / scales[1:], 0.0)
    _, (start,) = _fit(cells, used, features[-1:], slopes @ own, penalty[-1:], least[-1:])
    return replace(line, knots=knots, slopes=slopes, start=float(start))


def _line(lists: RankedLists, cells: HitGroups, *, without: int | None = None) -> HitCalibration:
    """Fit step 1 to all lists or without those of a fold, and u from it. With few queries the slope, which is
    0 or more, is drawn to `TYPICAL` for a margin in deviations of the hits'."""
    used, some = _used(cells, without), lists if without is None else lists.take(lists.fold != without)
    deviations = lists.deviations[used]
    means = np.broadcast_to(lists.profiles[:, MEAN, None], cells.of_hit.shape)[used]
    spread, wide = (max(float(each.std()), 1e-9) for each in (deviations, means))
    centre = float(means.mean())
    queries = min(max(int(used.any(axis=1).sum()), 1), ENOUGH)
    firm = STEADY * (1 / queries - 1 / ENOUGH) + 1e-3
    penalty, bounds = np.array([firm, PENALTY_BETWEEN, 1e-3]), np.array([-TYPICAL, -np.inf, -np.inf])

    def fit(reach: float, above: float) -> tuple[float, tuple[float, float, float, float]]:
        """Return (loss, (slope, reach, between, start)) of a shape."""
        own = bent(deviations, reach * spread, above)
        width = max(float(own.std()), 1e-9)
        features = np.stack((own / width, (means - centre) / wide, np.ones(len(own))))
        loss, theta = _fit(cells, used, features, TYPICAL * features[0], penalty, bounds)
        more, between, start = theta.tolist()
        start -= between * centre / wide
        return loss, ((TYPICAL + more) / width, reach * spread, between / wide, start)

    fits = [fit(*shape) for shape in SHAPES]
    best = min(range(len(fits)), key=fits.__getitem__)
    if fits[best][0] > fits[0][0] - CLEAR:  # the slope fitted to a straight line, which is lower
        best, fits[0] = 0, fit(SHAPES[0][0], 1.0)
    size = len(PROFILE)
    line = HitCalibration(
        *(*fits[best][1], SHAPES[best][1], 0.0, cells.base_rate, 0.0, 0.0, 1.0),
        *(np.zeros(size), np.ones(size), np.zeros(size)),
    )
    return _answerable(some, line)


def _answerable(lists: RankedLists, line: HitCalibration) -> HitCalibration:
    """Return the calibration with u, fitted to these lists and to those with missing hits."""
    profiles = lists.profiles
    missing = lists.with_missing(line(lists.margins, profiles[:, None])).profiles
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
    low = float(u.mean()) - FAR * spread
    of_profile = {"centre": centre, "scale": scale, "weights": theta[:-1]}
    return replace(line, bias=float(theta[-1]), low=low, spread=spread, **of_profile)


def _used(cells: HitGroups, without: int | None) -> NDArray[np.bool_]:
    """Mask of the hits in cells of other folds."""
    some = (cells.of_hit >= 0) & (cells.fold[cells.of_hit] != without)
    return np.asarray(some & (cells.hits[cells.of_hit] > 0))


def _fit(
    cells: HitGroups,
    used: NDArray[np.bool_],
    features: FloatArray,
    offset: FloatArray,
    penalty: FloatArray,
    least: FloatArray,
) -> tuple[float, FloatArray]:
    """Fit logit p = θ·features + offset with no θ below `least`, and return (loss, θ). The likelihood is that
    of the number of relevant hits in every cell, with the mean p of its hits."""
    cell = np.unique(cells.of_hit[used], return_inverse=True)
    hits, size = cells.hits[cell[0]], np.bincount(cell[1])
    relevant = np.clip(cells.relevant[cell[0]], 0, hits)

    def sums(theta: FloatArray) -> FloatArray:
        from scipy.special import expit

        each = expit(theta @ features + offset)
        p = np.clip(np.bincount(cell[1], each) / size, 1e-12, 1 - 1e-12)
        slopes = np.stack([np.bincount(cell[1], each * (1 - each) * row) / size for row in features])
        loss = -(relevant @ np.log(p) + (hits - relevant) @ np.log1p(-p))
        gradient = slopes @ ((hits * p - relevant) / (p * (1 - p)))
        return np.concatenate(([loss], gradient, ((slopes * hits / (p * (1 - p))) @ slopes.T).reshape(-1)))

    steps = newton_steps(np.zeros(len(penalty)), penalty, least=least, tolerance=1e-9)
    (theta,) = newton_together(lambda places, thetas: [sums(each) for each in thetas], [steps])
    return float(sums(theta)[0] + 0.5 * penalty @ theta**2), theta
