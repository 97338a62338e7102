"""A linear classifier per label with sparse weights (DiSMEC, Babbar and Schölkopf 2017), up to 10⁴ labels.

Label by label, over TF-IDF rows x of unit length with a constant 1 beside them and y = ±1,

    min_w  ½‖w‖² + C Σ_i max(0, 1 − y_i w·x_i)²

and then weights below Δ = 0.01 are dropped, which leaves a small part of them and changes few rankings.

Few texts are learned by liblinear, many by the modified finite Newton method of Keerthi and DeCoste (2005).
Where A are the rows with y w·x < 1, the Newton point is ridge regression on them alone, w = X_Aᵀα with
(X_A X_Aᵀ + I/2C) α = y_A; a line search over the piecewise quadratic objective leads there. A rare label's A
is small, and so is its cost.
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.classification.sparse import (
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
"""Labels that are learned, and saved, together."""
MOST_LABELS = 20_000
FEW_TEXTS = 20_000
"""Texts up to which liblinear learns a label: 10 ms to our 36 at 6,000 texts, 300 to 55 at 100,000."""
_LIBLINEAR = threading.Lock()  # all its threads draw from one stream, and none twice the same
SMALL = 300
"""Rows up to which a Newton point is solved directly."""
STEPS = 50
LONGEST = 8.0
"""Times the way to a Newton point that a step goes at most; more is asked for where there is no way to go."""
BEYOND = -1.1
"""The intercept that a rare label starts from."""


@dataclass(frozen=True)
class SparseLinear:
    """`fit` learns a linear classifier per label that has a training text; the others are never listed.

    With `checkpoint`, a folder, every block of labels is saved as it is done, and a fit of the same data and
    settings goes on where another ended.
    """

    cost: float = 1.0
    prune: float = 0.01
    workers: int = 2
    tolerance: float = 1e-3
    """The part of the objective that a step must save, or it is the last."""
    checkpoint: Path | None = None

    def fit(self, texts: TextRows, labels: Sparse, documents: TextRows | None = None) -> FittedLinear:
        """Learn; `documents` are not looked at."""
        if self.cost <= 0 or self.prune < 0:
            raise ConfigError("cost must be above 0 and prune not below", key="cost", value=self.cost)
        if labels.shape[1] > MOST_LABELS:
            problem = f"{labels.shape[1]:,} labels; one linear classifier each is for {MOST_LABELS:,} at most"
            raise DataError(problem, cure="leave this ranker out, or learn the most frequent labels with it")
        weights = rarity(texts)
        rows = _narrow(weighed(texts, weights))
        right = labels.tocsc()
        starts = range(0, labels.shape[1], BLOCK)
        key = self._key(rows, right)
        with ThreadPoolExecutor(self.workers) as pool:
            parts = pool.map(lambda start: self._block(rows, right, start, key), starts)
            blocks = list(progress(parts, total=len(starts), label="linear classifiers"))
        return _joined(blocks, weights, label_counts(labels) > 0)

    def _block(self, rows: Sparse, right: Sparse, start: int, key: str) -> dict[str, Any]:
        """The weights of some labels, from the checkpoint where it has them."""
        file = None if self.checkpoint is None else self.checkpoint / f"labels-{start}-{key}.npz"
        if file is not None and file.is_file():
            return read_arrays(file)
        end = min(start + BLOCK, right.shape[1])
        learned = [
            self._label(rows, right.indices[right.indptr[at] : right.indptr[at + 1]])
            for at in range(start, end)
        ]
        columns = [np.flatnonzero(np.abs(weights) >= max(self.prune, 1e-12)) for weights, _ in learned]
        block = {
            "data": np.concatenate([one[0][at] for one, at in zip(learned, columns, strict=True)]),
            "indices": np.concatenate(columns),
            "counts": np.array([len(each) for each in columns]),
            "intercepts": np.array([intercept for _, intercept in learned]),
        }
        block["data"] = block["data"].astype(np.float32)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_arrays(file, **block)
        return block

    def _label(self, rows: Sparse, right: Any) -> tuple[FloatArray, float]:
        """The weights and the intercept of a label whose right rows these are."""
        if not len(right):
            return np.zeros(rows.shape[1]), 0.0
        signs = np.full(rows.shape[0], -1.0)
        signs[right] = 1.0
        if rows.shape[0] <= FEW_TEXTS:
            return _liblinear(rows, signs, self.cost)
        return squared_hinge(rows, signs, self.cost, tolerance=self.tolerance)

    def _key(self, rows: Sparse, right: Sparse) -> str:
        """Names the data and the settings, so that no block of others is taken for theirs."""
        digest = hashlib.blake2b(repr((self.cost, self.prune, self.tolerance, BLOCK)).encode(), digest_size=8)
        for array in (rows.data, rows.indices, rows.indptr, right.indices, right.indptr):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def _liblinear(rows: Sparse, signs: FloatArray, cost: float) -> tuple[FloatArray, float]:
    """The same minimum by coordinate descent, which is quicker where a pass over all texts is."""
    from sklearn.svm import LinearSVC

    if (signs > 0).all():
        return np.zeros(rows.shape[1]), 1.0
    with _LIBLINEAR:
        model = LinearSVC(C=cost, dual=True, random_state=0).fit(rows, signs)
    return model.coef_[0], float(model.intercept_[0])


def _narrow(rows: Sparse) -> Sparse:
    """In double precision with indices of 32 bits, which products are quicker with."""
    from scipy.sparse import csr_array

    if rows.nnz >= 2**31:
        raise DataError(f"{rows.nnz:,} weights in the texts; 2³¹ are too many", cure="learn fewer texts")
    indices, ends = (array.astype(np.int32) for array in (rows.indices, rows.indptr))
    return csr_array((rows.data.astype(np.float64), indices, ends), shape=rows.shape)


def squared_hinge(
    rows: Sparse, signs: FloatArray, cost: float, *, tolerance: float = 1e-4
) -> tuple[FloatArray, float]:
    """min ½(‖w‖² + b²) + C Σ max(0, 1 − y (w·x + b))²: w and b; `signs` are +1 and −1."""
    weights, intercept, dual = _start(rows, signs, cost)
    scores = rows @ weights + intercept
    value = _value(weights, intercept, signs, scores, cost)
    saved = 1.0
    for _ in range(STEPS):
        active = np.flatnonzero(signs * scores < 1)
        own = rows[active]
        alpha = _ridge(own, signs[active], 0.5 / cost, dual[active], precision=0.1 * min(saved, 0.1))
        target, target_intercept = own.T @ alpha, float(alpha.sum())
        towards = rows @ target + (target_intercept - scores)
        direction, turn = target - weights, target_intercept - intercept
        length = _line_search(signs, scores, towards, cost, _quadratic(weights, intercept, direction, turn))
        if not 0 < length < LONGEST:
            break  # no way down but by rounding
        weights += length * direction
        intercept += length * turn
        scores += length * towards
        dual *= 1 - length
        dual[active] += length * alpha
        before, value = value, _value(weights, intercept, signs, scores, cost)
        saved = (before - value) / before
        if saved <= tolerance:
            break
    return weights, intercept


def _start(rows: Sparse, signs: FloatArray, cost: float) -> tuple[FloatArray, float, FloatArray]:
    """Where to begin: for a rare label just beyond the margin of all that are wrong, and ridge regression of
    what is right to its own margin from there, so that few rows are active from the first step on."""
    right = np.flatnonzero(signs > 0)
    dual = np.zeros(len(signs))
    if len(right) > min(SMALL, len(signs) // 20):
        return np.zeros(rows.shape[1]), 0.0, dual
    own = rows[right]
    products = (own @ own.T).toarray()
    products.flat[:: len(right) + 1] += 0.5 / cost
    dual[right] = np.linalg.solve(products, np.full(len(right), 1 - BEYOND))
    return own.T @ dual[right], BEYOND, dual


def _value(
    weights: FloatArray, intercept: float, signs: FloatArray, scores: FloatArray, cost: float
) -> float:
    short = np.maximum(0.0, 1 - signs * scores)
    return float(0.5 * (weights @ weights + intercept**2) + cost * (short @ short))


def _quadratic(
    weights: FloatArray, intercept: float, direction: FloatArray, turn: float
) -> tuple[float, float]:
    """½‖w + t·d‖² by t: its slope at 0 and its curvature."""
    return float(weights @ direction + intercept * turn), float(direction @ direction + turn**2)


def _line_search(
    signs: FloatArray, scores: FloatArray, towards: FloatArray, cost: float, quadratic: tuple[float, float]
) -> float:
    """The t that minimises the objective at `scores + t·towards`, by Newton steps on its pieces."""
    length = 1.0
    slope_at_0, curvature = quadratic
    margins, steps = signs * scores, signs * towards
    for _ in range(12):
        at = margins + length * steps
        below = at < 1
        moved = steps[below]
        slope = slope_at_0 + length * curvature - 2 * cost * float((1 - at[below]) @ moved)
        bend = curvature + 2 * cost * float(moved @ moved)
        change = slope / bend if bend > 0 else 0.0
        length -= change
        if abs(change) <= 1e-3 * abs(length):
            break
    return length


def _ridge(
    rows: Sparse, signs: FloatArray, ridge: float, start: FloatArray, *, precision: float
) -> FloatArray:
    """α with (K + ridge·I) α = y, K the products of rows with a constant 1 beside them."""
    if len(signs) <= SMALL:
        products = (rows @ rows.T).toarray() + 1.0
        products.flat[:: len(signs) + 1] += ridge
        solved: FloatArray = np.linalg.solve(products, signs)
        return solved
    turned = rows.T.tocsr() if len(signs) < rows.shape[0] // 2 else rows.T

    def product(alpha: FloatArray) -> FloatArray:
        return np.asarray(rows @ (turned @ alpha) + (alpha.sum() + ridge * alpha))

    alpha = start.copy()
    rest = signs - product(alpha)
    way, size = rest.copy(), float(rest @ rest)
    least = max(precision, 1e-5) ** 2 * float(signs @ signs)
    for _ in range(100):
        if size <= least:
            break
        moved = product(way)
        share = size / float(way @ moved)
        alpha += share * way
        rest -= share * moved
        before, size = size, float(rest @ rest)
        way = rest + (size / before) * way
    return alpha


def _joined(blocks: list[dict[str, Any]], weights: FloatArray, listed: Any) -> FittedLinear:
    from scipy.sparse import csr_array

    data, indices, counts, intercepts = (
        np.concatenate([block[name] for block in blocks])
        for name in ("data", "indices", "counts", "intercepts")
    )
    ends = np.concatenate(([0], np.cumsum(counts)))
    shape = (len(counts), len(weights))
    matrix = csr_array((data, indices.astype(np.int32), ends), shape=shape)
    return FittedLinear(matrix, intercepts, np.asarray(listed, dtype=bool), weights)


@dataclass(frozen=True, eq=False)
class FittedLinear:
    """Weights, labels × terms, mostly zeros; intercepts; which labels had a training text."""

    weights: Sparse
    intercepts: FloatArray
    listed: Any
    rarity: FloatArray

    def candidates(self, texts: TextRows, k: int) -> Sparse:
        """The k labels of every text with the largest w·x + b, and these."""
        turned = self.weights.T.tocsr()
        return ranked_in_batches(
            texts, self.weights.shape[0], lambda batch: best_per_row(self._scores(batch, turned), k)
        )

    def _scores(self, texts: TextRows, turned: Sparse) -> Sparse:
        """Every listed label's score, for one batch."""
        from scipy.sparse import csr_array

        scores = (weighed(texts, self.rarity) @ turned).toarray() + self.intercepts.astype(np.float32)
        columns = np.flatnonzero(self.listed).astype(np.int32)
        values = scores[:, columns]
        ends = np.arange(len(texts) + 1) * len(columns)
        shape = (len(texts), len(self.listed))
        return csr_array((values.ravel(), np.tile(columns, len(texts)), ends), shape=shape)

    def save(self, folder: Path) -> None:
        """Write `linear.npz`."""
        own = {"intercepts": self.intercepts, "listed": self.listed, "rarity": self.rarity}
        write_arrays(folder / "linear.npz", **own, **sparse_arrays("weights", self.weights))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote."""
        stored = read_arrays(folder / "linear.npz")
        return cls(sparse_of("weights", stored), stored["intercepts"], stored["listed"], stored["rarity"])
