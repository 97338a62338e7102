"""Fuses labels ranked by several rankers into one probability, calibrated for rare and for common labels.

Every ranker's scores become probabilities by a curve per band of label frequency, shrunk towards the pooled
one. A logistic model stacks their log-odds with features of each ranker (whether it lists the label, at
which rank, whether first, which may count against a label: the page nearest to a page is itself) and with
the label's frequency; a last curve per band turns its margin into a probability. All of it is fitted on
candidates of texts from which the rankers did not learn, and results on those texts come from curves and
weights fitted without them. If a ranker's own order has a higher nDCG@5 there than the stack's, that order
is kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import expit, logit

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration import Beta, PerPart, Platt, load_calibrator, save_calibrator
from isthmus.classification.sparse import Sparse
from isthmus.errors import DataError
from isthmus.files import write_whole
from isthmus.logistic import likelihood_sums, newton_steps, newton_together

FIRST = 5
"""The number of first labels of a text on which rankings and calibration are evaluated."""
FEATURES = 4
"""The number of features of a label from each ranker."""
RIDGE = 1.0
SURE = 1e-6
LEAST_HITS = 20
"""The least number of right labels among candidates to learn a fusion from."""


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """A row for every text and label that any ranker lists."""

    shape: tuple[int, int]
    text: IntArray
    label: IntArray
    scores: FloatArray
    """Rankers × rows; NaN where a ranker does not list the label."""

    @classmethod
    def of(cls, candidates: Sequence[Sparse]) -> CandidateTable:
        """Build the union of all rankers' candidates, by text and label."""
        texts, labels = candidates[0].shape
        keys = [
            np.repeat(np.arange(texts, dtype=np.int64), np.diff(each.indptr)) * labels + each.indices
            for each in candidates
        ]
        rows = np.unique(np.concatenate(keys))
        scores = np.full((len(candidates), len(rows)), np.nan)
        for ranker, (key, each) in enumerate(zip(keys, candidates, strict=True)):
            scores[ranker, np.searchsorted(rows, key)] = each.data
        return cls((texts, labels), rows // labels, rows % labels, scores)

    @classmethod
    def rows_of(cls, matrix: Sparse) -> CandidateTable:
        """Build from the stored entries of a matrix in their order, without scores."""
        text = np.repeat(np.arange(matrix.shape[0], dtype=np.int64), np.diff(matrix.indptr))
        return cls(matrix.shape, text, matrix.indices.astype(np.int64), np.zeros((0, len(text))))

    def __len__(self) -> int:
        return len(self.text)

    def take(self, rows: NDArray[np.bool_]) -> CandidateTable:
        """Return the rows inside the mask; texts and labels keep their numbers."""
        return CandidateTable(self.shape, self.text[rows], self.label[rows], self.scores[:, rows])

    def hits(self, labels: Sparse) -> NDArray[np.bool_]:
        """Whether each row's label is right for its text; `labels` is texts × labels."""
        keys = np.repeat(np.arange(labels.shape[0], dtype=np.int64), np.diff(labels.indptr)) * labels.shape[1]
        return np.isin(self.text * self.shape[1] + self.label, keys + labels.indices)

    def filled(self, values: FloatArray) -> Sparse:
        """Return a sparse matrix, texts × labels, with a value for every row."""
        ends = np.searchsorted(self.text, np.arange(self.shape[0] + 1))
        return csr_array((values.astype(np.float32), self.label.astype(np.int32), ends), shape=self.shape)

    def ranks(self, values: FloatArray) -> IntArray:
        """Return the rank of every row among those of its text, from 1; of equal values the lower label
        first."""
        order = np.lexsort((self.label, -values, self.text))
        starts = np.searchsorted(self.text, np.arange(self.shape[0]))
        ranks = np.empty(len(values), dtype=np.int64)
        ranks[order] = np.arange(1, len(values) + 1) - starts[self.text[order]]
        return ranks

    def gains(self, values: FloatArray, labels: Sparse) -> FloatArray:
        """nDCG@5 of every text."""
        ranks = self.ranks(values)
        first = self.hits(labels) & (ranks <= FIRST)
        gains = np.bincount(self.text[first], 1 / np.log2(ranks[first] + 1), self.shape[0])
        ideal = np.cumsum(1 / np.log2(np.arange(2, FIRST + 2)))
        return np.asarray(gains / ideal[np.clip(np.diff(labels.indptr), 1, FIRST) - 1])

    def depths(self, values: FloatArray) -> FloatArray:
        """Return ln(rank) of every row among the rows of its text with a value; 0 for a row without one."""
        rows = np.flatnonzero(~np.isnan(values))
        text = self.text[rows]
        order = np.lexsort((-values[rows], text))
        starts = np.searchsorted(text, np.arange(self.shape[0]))
        depths = np.zeros(len(values))
        depths[rows[order]] = np.log1p(np.arange(len(rows)) - starts[text[order]])
        return depths


@dataclass(frozen=True, eq=False)
class LabelFusion:
    """A fitted fusion: a curve per ranker, the weights of the stack, and the last curve."""

    bands: int
    curves: tuple[PerPart, ...]
    weights: FloatArray
    last: PerPart | None = None

    @classmethod
    def fit(cls, table: CandidateTable, hits: NDArray[np.bool_], bands: IntArray, count: int) -> LabelFusion:
        """Learn curves and weights; `bands` has the band of every row, one of `count`. Raises DataError for
        too few hits."""
        if hits.sum() < LEAST_HITS:
            raise DataError(
                f"rankers list {int(hits.sum())} right labels of texts held out, {LEAST_HITS} are needed",
                cure="label more texts",
            )
        curves = []
        for scores in table.scores:
            listed = ~np.isnan(scores)
            right = hits[listed]
            if 0 < right.sum() < len(right):
                curve = PerPart(Beta()).fit(scores[listed], right, parts=bands[listed])
            else:  # all or none of the listed labels are right: scores carry no evidence
                curve = PerPart(Platt()).fit(np.zeros(len(hits)), hits)
            curves.append(curve)
        fusion = cls(count, tuple(curves), np.zeros(0))
        design = fusion._design(table, bands)
        size = len(design)
        start = np.zeros(size)
        start[-1] = logit(np.clip(hits.mean(), SURE, 1 - SURE))
        penalty = np.where(np.arange(size) < size - 1, RIDGE, 0.0)
        least = np.where(np.arange(size) < len(curves), 0.0, -np.inf)  # weights of probabilities are ≥ 0
        right = hits.astype(np.float64)
        steps = newton_steps(start, penalty, least=least, tolerance=1e-9)
        weights = newton_together(
            lambda places, thetas: [likelihood_sums(design, right, theta) for theta in thetas], [steps]
        )[0]
        return cls(count, tuple(curves), weights)

    @classmethod
    def alone(cls, table: CandidateTable, hits: NDArray[np.bool_], bands: int, ranker: int) -> LabelFusion:
        """Build a fusion that keeps one ranker's order in all bands; labels listed by other rankers only get
        the share of right ones among them."""
        scores = table.scores[ranker]
        listed = ~np.isnan(scores)
        silent = PerPart(Platt()).fit(np.zeros(len(hits)), hits)
        curves = [silent] * len(table.scores)
        curves[ranker] = PerPart(Beta()).fit(scores[listed], hits[listed])
        weights = np.zeros(FEATURES * len(curves) + bands)
        weights[ranker] = 1.0
        rest = hits[~listed].sum() / max((~listed).sum(), 1)
        weights[len(curves) + ranker] = logit(np.clip(rest, SURE, 0.5))
        return cls(bands, tuple(curves), weights)

    def _design(self, table: CandidateTable, bands: IntArray) -> FloatArray:
        """Return one row per feature: of each ranker log-odds, not listed, ln rank, first; then bands and
        ones."""
        odds, absent, depth, first = [], [], [], []
        for curve, scores in zip(self.curves, table.scores, strict=True):
            listed = ~np.isnan(scores)
            values = np.zeros(len(table))
            if listed.any():
                stated = curve.probabilities(scores[listed], parts=bands[listed])
                values[listed] = logit(np.clip(stated, SURE, 1 - SURE))
            odds.append(values)
            absent.append((~listed).astype(np.float64))
            depth.append(table.depths(scores))
            first.append((listed & (depth[-1] == 0)).astype(np.float64))
        frequency = [(bands == band).astype(np.float64) for band in range(1, self.bands)]
        return np.stack([*odds, *absent, *depth, *first, *frequency, np.ones(len(table))])

    def margins(self, table: CandidateTable, bands: IntArray) -> FloatArray:
        """Return the fused log-odds of every row, before the last curve."""
        return np.asarray(self.weights @ self._design(table, bands))

    def probabilities(self, table: CandidateTable, bands: IntArray) -> FloatArray:
        """The probability of every row."""
        margins = self.margins(table, bands)
        if self.last is None or not len(margins):
            return np.asarray(expit(margins))
        return self.last.probabilities(expit(margins), parts=bands)

    def with_last(self, margins: FloatArray, hits: NDArray[np.bool_], bands: IntArray) -> LabelFusion:
        """Return the same fusion with a last curve, learned from margins of texts outside the fit of weights
        and curves."""
        return LabelFusion(self.bands, self.curves, self.weights, last_curve(margins, hits, bands))

    def save(self, folder: Path) -> None:
        """Write a file for every curve, and one for the weights."""
        for at, curve in enumerate(self.curves):
            save_calibrator(curve, folder / f"ranker-{at}.calibrator")
        if self.last is not None:
            save_calibrator(self.last, folder / "last.calibrator")
        about = {"bands": self.bands, "curves": len(self.curves), "weights": self.weights.tolist()}
        write_whole(folder / "fusion.json", json.dumps(about).encode())

    @classmethod
    def load(cls, folder: Path) -> LabelFusion:
        """Read what `save` wrote."""
        about = json.loads((folder / "fusion.json").read_bytes())
        files = [*(f"ranker-{at}.calibrator" for at in range(about["curves"])), "last.calibrator"]
        loaded = [curve for file in files if isinstance(curve := load_calibrator(folder / file), PerPart)]
        if len(loaded) < len(files):
            raise DataError("a calibrator without bands", file=folder, cure="fit again")
        weights = np.array(about["weights"], dtype=np.float64)
        return cls(int(about["bands"]), tuple(loaded[:-1]), weights, loaded[-1])


def last_curve(margins: FloatArray, hits: NDArray[np.bool_], bands: IntArray | None) -> PerPart:
    """Fit, per band, a curve from fused log-odds (as probabilities) to calibrated probabilities.

    Beta has a line in the log-odds (Platt) as a special case, and bends where the stack is overconfident.
    """
    return PerPart(Beta()).fit(expit(margins), hits, parts=bands)


def cross_fitted(
    table: CandidateTable, labels: Sparse, bands: IntArray, count: int, parts: IntArray
) -> tuple[LabelFusion, FloatArray]:
    """Return the fusion learned from all rows, and every row's probability by one fitted without its text.

    `parts` has the part of every row. If a ranker's own order has a higher nDCG@5, that order is kept.
    """
    hits = table.hits(labels)

    def stack(rows: NDArray[np.bool_]) -> LabelFusion:
        return LabelFusion.fit(table.take(rows), hits[rows], bands[rows], count)

    fusion, probabilities = _held_out(stack, table, hits, bands, parts)
    scores = np.where(np.isnan(table.scores), -np.inf, table.scores)
    gains = [table.gains(each, labels).mean() for each in scores]
    best = int(np.argmax(gains))
    if gains[best] <= table.gains(probabilities, labels).mean():
        return fusion, probabilities

    def alone(rows: NDArray[np.bool_]) -> LabelFusion:
        return LabelFusion.alone(table.take(rows), hits[rows], count, best)

    return _held_out(alone, table, hits, np.zeros_like(bands), parts)


def _held_out(
    fit: Callable[[NDArray[np.bool_]], LabelFusion],
    table: CandidateTable,
    hits: NDArray[np.bool_],
    bands: IntArray,
    parts: IntArray,
) -> tuple[LabelFusion, FloatArray]:
    """Return the result of `fit` on all rows, with its last curve, and every row's probability by the other
    parts."""
    margins, probabilities = np.zeros(len(table)), np.zeros(len(table))
    for part in np.unique(parts).tolist():
        inside = parts == part
        margins[inside] = fit(~inside).margins(table.take(inside), bands[inside])
    for part in np.unique(parts).tolist():
        inside = parts == part
        curve = last_curve(margins[~inside], hits[~inside], bands[~inside])
        probabilities[inside] = curve.probabilities(expit(margins[inside]), parts=bands[inside])
    return fit(np.ones(len(table), dtype=bool)).with_last(margins, hits, bands), probabilities
