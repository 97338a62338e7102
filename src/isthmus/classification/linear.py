"""A linear classifier per label with sparse weights (DiSMEC, Babbar and Schölkopf 2017), up to 10⁴ labels.

For every label, over TF-IDF rows x of unit length with a constant 1 appended and y = ±1, it solves

    min_w  ½‖w‖² + C Σ_i max(0, 1 − y_i w·x_i)²

and then drops weights below Δ = 0.01, which leaves a small part of them and changes few rankings.

If labels × weights are too many for that, a label is learned from its own texts and from those to which a
matcher, the cosine to the mean of its texts, assigns it. All other texts are represented by one text without
words, weighted by their number, which keeps the intercept where they would. Then only labels that the
matcher lists are scored, so that no label is scored where it was not learned; frequent labels are learned
from all texts and always scored.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from isthmus.arrays import FloatArray, IntArray
from isthmus.classification.sparse import (
    BATCH,
    Sides,
    Sparse,
    TextRows,
    best_per_row,
    label_counts,
    ranked_in_batches,
    rarity,
    read_arrays,
    sparse_arrays,
    sparse_of,
    weighed,
    write_arrays,
)
from isthmus.errors import ConfigError, DataError
from isthmus.report import progress

BLOCK = 256
"""The number of labels that are learned, and saved, together."""
MOST_LABELS = 20_000
MOST_WORK = 10**9
"""The largest product of labels and stored weights of texts for which every label is learned from
all texts."""
TELLING = 256
"""The number of terms of a label's texts that the matcher compares."""
HEAD = 100
"""A label of more than one in this many texts is always learned from all texts."""
TOLERANCE = 1e-2
"""Tolerance of liblinear: 46 passes over the texts where 1e-4 takes 131; one validation text worse, one
better."""
Learned: TypeAlias = tuple[NDArray[np.int32], FloatArray, float]
"""Terms, their weights, and the intercept."""
_LIBLINEAR = threading.Lock()  # liblinear has one random stream for all threads: run one fit at a time


@dataclass(frozen=True)
class SparseLinear:
    """Learns a linear classifier per label that has a training text; other labels are never listed.

    With `checkpoint`, a folder, every block of labels is saved when it is done, and an interrupted fit of
    the same data and settings continues from there.
    """

    cost: float = 1.0
    prune: float = 0.01
    match: int | None = 128
    """The number of labels of a text that the matcher lists, if there is too much to learn; None: always
    learn from all texts."""
    workers: int = 2
    checkpoint: Path | None = None

    def fit(self, texts: TextRows, labels: Sparse, documents: TextRows | None = None) -> FittedLinear:
        """Learn from texts and labels; `documents` are not used. Raises DataError for more than `MOST_LABELS`
        labels."""
        if self.cost <= 0 or self.prune < 0:
            raise ConfigError("cost must be above 0 and prune not below", key="cost", value=self.cost)
        if labels.shape[1] > MOST_LABELS:
            problem = f"{labels.shape[1]:,} labels; one linear classifier each is for {MOST_LABELS:,} at most"
            raise DataError(problem, cure="leave this ranker out, or learn the most frequent labels with it")
        weights = rarity(texts)
        rows = _narrow(weighed(texts, weights))
        right = csr_array(labels.T)
        counts = label_counts(labels)
        frequent, matcher, lists = counts > 0, csr_array((rows.shape[1], len(counts)), dtype=np.float32), None
        if self.match is not None and len(counts) * rows.nnz > MOST_WORK:
            frequent = counts > len(texts) // HEAD
            matcher = _matcher(rows, right, ~frequent)
            lists = csr_array(_matched(rows, matcher, self.match).T)
        known = _Known(rows, right, lists, frequent)
        starts = range(0, len(counts), BLOCK)
        key = self._key(known)
        with ThreadPoolExecutor(self.workers) as pool:
            parts = pool.map(lambda start: self._block(known, start, key), starts)
            blocks = list(progress(parts, total=len(starts), label="linear classifiers"))
        return _joined(blocks, frequent, weights, matcher, self.match or 0)

    def _block(self, known: _Known, start: int, key: str) -> dict[str, Any]:
        """Return the weights of a block of labels, from the checkpoint if it has them."""
        file = None if self.checkpoint is None else self.checkpoint / f"labels-{start}-{key}.npz"
        if file is not None and file.is_file():
            return read_arrays(file)
        end = min(start + BLOCK, known.right.shape[0])
        learned = [self._label(known, label) for label in range(start, end)]
        strong = [np.abs(values) >= max(self.prune, 1e-12) for _, values, _ in learned]
        block = {
            "data": np.concatenate([one[1][at] for one, at in zip(learned, strong, strict=True)]),
            "indices": np.concatenate([one[0][at] for one, at in zip(learned, strong, strict=True)]),
            "counts": np.array([int(each.sum()) for each in strong]),
            "intercepts": np.array([intercept for _, _, intercept in learned]),
        }
        block["data"] = block["data"].astype(np.float32)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(file, **block)
        return block

    def _label(self, known: _Known, label: int) -> Learned:
        """Learn one label from its own rows and from others."""
        own, count = known.own(label), known.rows.shape[0]
        if len(own) in (0, count):
            return np.empty(0, np.int32), np.empty(0), float(len(own) > 0)
        if known.lists is None or known.frequent[label]:
            signs = np.full(count, -1.0)
            signs[own] = 1.0
            return _liblinear(known.rows, signs, self.cost, 0)
        start, end = known.lists.indptr[label : label + 2]
        chosen = np.union1d(own, known.lists.indices[start:end])
        signs = np.where(np.isin(chosen, own), 1.0, -1.0)
        return _liblinear(known.rows[chosen], signs, self.cost, count - len(chosen))

    def _key(self, known: _Known) -> str:
        """Return a digest of the data and the settings, so that no block of other data is reused."""
        matched = None if known.lists is None else self.match
        settings = (self.cost, self.prune, matched, TELLING, HEAD, TOLERANCE, BLOCK)
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=8)
        rows, right = known.rows, known.right
        for array in (rows.data, rows.indices, rows.indptr, right.indices, right.indptr):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class _Known:
    """Training texts: their rows; labels × texts for the right ones and for those that the matcher lists; and
    the labels that are learned from all texts."""

    rows: Sparse
    right: Sparse
    lists: Sparse | None
    frequent: NDArray[np.bool_]

    def own(self, label: int) -> IntArray:
        """The rows of a label's texts."""
        return np.asarray(self.right.indices[self.right.indptr[label] : self.right.indptr[label + 1]])


def _matcher(rows: Sparse, right: Sparse, wanted: NDArray[np.bool_]) -> Sparse:
    """Return terms × labels: how much more a label's texts have a term than all texts, in unit columns; only
    the largest values, and of wanted labels only."""
    mean, parts = np.asarray(rows.mean(axis=0)).ravel(), []
    for start in range(0, right.shape[0], BLOCK):
        block = slice(start, start + BLOCK)
        centres = csr_array(right[block], dtype=np.float64) @ rows
        label = np.repeat(np.arange(centres.shape[0]), np.diff(centres.indptr))
        more = centres.data / np.diff(right[block].indptr)[label] - mean[centres.indices]
        centres.data = np.where(wanted[block][label], np.maximum(more, 0), 0)
        centres.eliminate_zeros()
        parts.append(best_per_row(centres, TELLING))
    telling: Sparse = vstack(parts, format="csr")
    label = np.repeat(np.arange(telling.shape[0]), np.diff(telling.indptr))
    telling.data /= np.sqrt(np.bincount(label, telling.data**2, telling.shape[0]))[label]
    return csr_array(telling.T, dtype=np.float32)


def _matched(rows: Sparse, matcher: Sparse, k: int) -> Sparse:
    """Return the k labels that the matcher lists for every row."""
    starts = range(0, rows.shape[0], BATCH)
    return vstack([best_per_row(rows[at : at + BATCH] @ matcher, k) for at in starts], format="csr")


def _liblinear(rows: Sparse, signs: FloatArray, cost: float, others: int) -> Learned:
    """Minimise the loss over these rows and over `others` further negative rows without any term."""
    from sklearn import config_context
    from sklearn.svm import LinearSVC

    place = np.zeros(rows.shape[1], dtype=np.int32)
    place[rows.indices] = 1
    terms = np.flatnonzero(place).astype(np.int32)
    place[terms] = np.arange(len(terms))
    ends, weights = rows.indptr, None
    if others:
        ends, signs = np.append(ends, ends[-1]), np.append(signs, -1.0)
        weights = np.append(np.ones(len(signs) - 1), float(others))
    narrow = csr_array((rows.data, place[rows.indices], ends), shape=(len(signs), len(terms)))
    with _LIBLINEAR, config_context(assume_finite=True, skip_parameter_validation=True):
        model = LinearSVC(C=cost, dual=True, tol=TOLERANCE, random_state=0).fit(narrow, signs, weights)
    return terms, model.coef_[0], float(model.intercept_[0])


def _narrow(rows: Sparse) -> Sparse:
    """Convert to double precision with 32-bit indices, as liblinear reads them."""
    if rows.nnz >= 2**31:
        raise DataError(f"{rows.nnz:,} weights in the texts; 2³¹ are too many", cure="learn fewer texts")
    indices, ends = (array.astype(np.int32) for array in (rows.indices, rows.indptr))
    return csr_array((rows.data.astype(np.float64), indices, ends), shape=rows.shape)


def _joined(
    blocks: list[dict[str, Any]], always: Any, weights: FloatArray, matcher: Sparse, match: int
) -> FittedLinear:
    data, indices, counts, intercepts = (
        np.concatenate([block[name] for block in blocks])
        for name in ("data", "indices", "counts", "intercepts")
    )
    ends = np.concatenate(([0], np.cumsum(counts)))
    shape = (len(counts), len(weights))
    matrix = csr_array((data, indices.astype(np.int32), ends), shape=shape)
    return FittedLinear(matrix, intercepts, np.asarray(always, dtype=bool), weights, matcher, max(match, 1))


@dataclass(frozen=True, eq=False)
class FittedLinear:
    """Fitted classifiers: weights (labels × terms, mostly zeros), intercepts, the labels that are scored for
    every text, and the matcher (terms × labels) that lists the others."""

    weights: Sparse
    intercepts: FloatArray
    always: NDArray[np.bool_]
    rarity: FloatArray
    matcher: Sparse
    match: int

    def candidates(self, texts: TextRows, k: int) -> Sparse:
        """Return the k labels of every text with the largest w·x + b, with these values."""
        return ranked_in_batches(
            texts, self.weights.shape[0], lambda batch: best_per_row(self._scores(batch), k)
        )

    @cached_property
    def _by_term(self) -> Sparse:
        return csr_array(self.weights.T)

    def _scores(self, texts: TextRows) -> Sparse:
        """Return the scores of labels that are always scored and of those that the matcher lists, for one
        batch."""
        rows = weighed(texts, self.rarity)
        scores = (rows @ self._by_term).toarray() + self.intercepts.astype(np.float32)
        near = _matched(rows, self.matcher, self.match)
        columns = np.flatnonzero(self.always).astype(np.int32)
        text = np.repeat(np.arange(len(texts)), np.diff(near.indptr) + len(columns))
        label = np.empty(len(text), dtype=np.int32)
        ends = near.indptr + np.arange(len(texts) + 1) * len(columns)
        first = np.arange(len(text)) - ends[text] < len(columns)
        label[first], label[~first] = np.tile(columns, len(texts)), near.indices
        return csr_array((scores[text, label], label, ends), shape=scores.shape)

    def save(self, folder: Path) -> None:
        """Write `linear.npz`."""
        own = {"intercepts": self.intercepts, "always": self.always, "rarity": self.rarity}
        matrices = sparse_arrays("weights", self.weights) | sparse_arrays("matcher", self.matcher)
        write_arrays(folder / "linear.npz", **own, match=np.array(self.match), **matrices)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote."""
        stored = read_arrays(folder / "linear.npz")
        weights, matcher = (sparse_of(name, stored) for name in ("weights", "matcher"))
        always, match = stored["always"].astype(bool), max(int(stored["match"]), 1)
        return cls(weights, stored["intercepts"], always, stored["rarity"], matcher, match)

    def sides(self) -> Sides:
        """Return the arrays and their axes (L labels, T terms), which must fit together."""
        own: Sides = [(self.weights, "LT"), (self.matcher, "TL"), (self.rarity, "T")]
        return [*own, (self.intercepts, "L"), (self.always, "L")]
