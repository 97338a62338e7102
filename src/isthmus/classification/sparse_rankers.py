"""Rankers of labels whose cost does not grow with texts × labels.

    LabelBm25         BM25 over the labels' own names and descriptions: also finds labels without a text
    SparseNeighbours  labels of the nearest training texts, by BM25 or by vectors
    LabelVectors      cosine to the mean of a label's texts and its own description

Scores are comparable from text to text, as a calibrator needs them: shares of a possible score, of the
neighbours' weight, or cosines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from isthmus.arrays import FloatArray
from isthmus.classification.sparse import (
    Sides,
    Sparse,
    TextRows,
    best_per_row,
    ranked_in_batches,
    read_arrays,
    sparse_arrays,
    sparse_of,
    weighed,
    write_arrays,
)
from isthmus.encoders import Vectors, unit
from isthmus.errors import DataError
from isthmus.retrieval import BM25, idf

THREADS = 2
LONGEST = 4_096
"""The most documents listed for a term; for more frequent terms, those in which it weighs most."""
MOST_ENTRIES = 4_000_000
"""The number of scores in memory at once, in each thread."""
EXACT = 20_000
"""The largest number of labels that are all compared; if there are more, only labels of the nearest texts
are."""


@dataclass(frozen=True, eq=False)
class Postings:
    """Documents by term: the amount that a term adds to a document's score, terms × documents."""

    weights: Sparse
    rarity: FloatArray
    """The most that a term adds."""

    @classmethod
    def of(cls, documents: TextRows, *, bm25: BM25, longest: int = LONGEST) -> Postings:
        """Build from BM25 for counted terms, from the cosine for given feature weights."""
        terms = documents.terms
        if not documents.counted:
            most = np.ones(terms.shape[1])
            return cls(best_per_row(csr_array(weighed(documents, most).T), longest), most)
        lengths = np.asarray(terms.sum(axis=1), dtype=np.float64).ravel()
        having = np.bincount(terms.indices, minlength=terms.shape[1])
        most = idf(having, len(documents))
        average = lengths.sum() / max(len(lengths), 1) or 1.0
        spread = bm25.spread(np.repeat(lengths / average, np.diff(terms.indptr)))
        values = (most[terms.indices] * bm25.saturation(terms.data, spread)).astype(np.float32)
        scores = csr_array((values, terms.indices, terms.indptr), shape=terms.shape)
        return cls(best_per_row(csr_array(scores.T), longest), most)

    def best(self, texts: TextRows, k: int) -> Sparse:
        """Return the k documents with the highest scores for every text, as shares of the highest possible
        score."""
        queries = self._queries(texts)
        longest = np.diff(self.weights.indptr)
        bound = np.minimum(csr_array(queries > 0) @ longest, self.weights.shape[1])
        starts = _starts(bound, MOST_ENTRIES)
        with ThreadPoolExecutor(THREADS) as pool:
            parts = list(pool.map(lambda part: best_per_row(queries[slice(*part)] @ self.weights, k), starts))
        if not parts:
            return csr_array((0, self.weights.shape[1]), dtype=np.float32)
        return vstack(parts, format="csr")

    def _queries(self, texts: TextRows) -> Sparse:
        if not texts.counted:
            return weighed(texts, self.rarity)
        terms = texts.terms
        row = np.repeat(np.arange(len(texts)), np.diff(terms.indptr))
        possible = np.bincount(row, terms.data * self.rarity[terms.indices], len(texts))
        values = (terms.data / np.maximum(possible, 1e-12)[row]).astype(np.float32)
        return csr_array((values, terms.indices, terms.indptr), shape=terms.shape)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays to save, by name."""
        return sparse_arrays("postings", self.weights) | {"rarity": self.rarity}

    @classmethod
    def restored(cls, arrays: dict[str, NDArray[Any]]) -> Postings:
        """Rebuild the postings from `arrays`."""
        return cls(sparse_of("postings", arrays), arrays["rarity"])


def _starts(sizes: NDArray[Any], most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows whose sizes add up to `most` or little more, 1,024 rows at most."""
    start = total = 0
    for row, size in enumerate(np.asarray(sizes).tolist()):
        total += size
        if total >= most or row - start >= 1_023:
            yield start, row + 1
            start, total = row + 1, 0
    if start < len(sizes):
        yield start, len(sizes)


@dataclass(frozen=True)
class LabelBm25:
    """BM25 between a text and every label's name and description."""

    bm25: BM25 = field(default_factory=BM25)

    def fit(self, texts: TextRows, labels: Sparse, documents: TextRows) -> FittedLabelBm25:
        """Index the labels; texts and right labels are not used."""
        return FittedLabelBm25(Postings.of(documents, bm25=self.bm25))


@dataclass(frozen=True, eq=False)
class FittedLabelBm25:
    """A searchable BM25 index over the labels' names and descriptions."""

    postings: Postings

    def candidates(self, texts: TextRows, k: int) -> Sparse:
        """The k labels with the highest scores."""
        return self.postings.best(texts, k)

    def save(self, folder: Path) -> None:
        """Write `labels.npz`."""
        write_arrays(folder / "labels.npz", **self.postings.arrays())

    @classmethod
    def load(cls, folder: Path) -> FittedLabelBm25:
        """Read what `save` wrote."""
        return cls(Postings.restored(read_arrays(folder / "labels.npz")))

    def sides(self) -> Sides:
        """Return the arrays and their axes (T terms, L labels), which must fit together."""
        return [(self.postings.weights, "TL"), (self.postings.rarity, "T")]


@dataclass(frozen=True)
class SparseNeighbours:
    """Labels of the k most similar training texts: a label's share of their weight, or its best similarity.

    `by` is "terms" (BM25; the cosine for given feature weights) or "vectors". With `pool` "share", a
    neighbour has the weight (similarity / the nearest's)^`power`; "max", as in the rank-fusion paper, takes
    the highest similarity.
    """

    by: Literal["terms", "vectors"] = "terms"
    k: int = 64
    pool: Literal["share", "max"] = "share"
    power: float = 4.0
    bm25: BM25 = field(default_factory=BM25)

    def fit(self, texts: TextRows, labels: Sparse, documents: TextRows) -> FittedNeighbours:
        """Index the texts."""
        about = {"k": min(self.k, max(len(texts), 1)), "pool": self.pool, "power": self.power}
        carried = csr_array(labels, dtype=np.float32)
        if self.by == "vectors":
            return FittedNeighbours(about, carried, None, texts.vectors)
        return FittedNeighbours(about, carried, Postings.of(texts, bm25=self.bm25), None)


@dataclass(frozen=True, eq=False)
class FittedNeighbours:
    """A searchable index of training texts, and their labels."""

    about: dict[str, Any]
    labels: Sparse
    postings: Postings | None
    vectors: Vectors | None

    def candidates(self, texts: TextRows, k: int) -> Sparse:
        """The k labels with the largest share, or the highest similarity."""
        return ranked_in_batches(texts, self.labels.shape[1], lambda batch: self._ranked(batch, k))

    def _ranked(self, texts: TextRows, k: int) -> Sparse:
        near = self.nearest(texts, self.about["k"])
        if self.about["pool"] == "max":
            return _by_size(near, self.labels, lambda at: best_per_row(_largest(near[at], self.labels), k))
        row = np.repeat(np.arange(len(texts)), np.diff(near.indptr))
        best = np.zeros(len(texts))
        np.maximum.at(best, row, near.data)
        weights = np.maximum(near.data / np.maximum(best, 1e-12)[row], 0) ** self.about["power"]
        total = np.bincount(row, weights, len(texts))
        near.data = (weights / np.maximum(total, 1e-12)[row]).astype(np.float32)
        return _by_size(near, self.labels, lambda at: best_per_row(near[at] @ self.labels, k))

    def nearest(self, texts: TextRows, k: int) -> Sparse:
        """Return the k nearest training texts of every text with their similarities, texts ×
        training texts."""
        if self.postings is not None:
            return self.postings.best(texts, k)
        return _nearest_vectors(texts.vectors, self.vectors, k)

    def save(self, folder: Path) -> None:
        """Write `labels.npz` and `texts.npz`."""
        arrays = {} if self.postings is None else self.postings.arrays()
        arrays |= {} if self.vectors is None else {"vectors": self.vectors}
        write_arrays(folder / "texts.npz", **arrays)
        about = {"about": np.array(json.dumps(self.about))}
        write_arrays(folder / "labels.npz", **sparse_arrays("labels", self.labels), **about)

    @classmethod
    def load(cls, folder: Path) -> FittedNeighbours:
        """Read what `save` wrote."""
        labels, arrays = read_arrays(folder / "labels.npz"), read_arrays(folder / "texts.npz")
        postings = Postings.restored(arrays) if "rarity" in arrays else None
        about = json.loads(str(labels["about"]))
        if (
            int(about["k"]) < 1
            or about["pool"] not in ("share", "max")
            or not 0 <= float(about["power"]) < 1e3
        ):
            raise DataError(f"no way to rank neighbours: {about}", file=folder, cure="fit again")
        return cls(about, sparse_of("labels", labels), postings, arrays.get("vectors"))

    def sides(self) -> Sides:
        """Return the arrays and their axes: N texts, L labels, T terms, D directions."""
        if self.postings is None:
            return [(self.labels, "NL"), (self.vectors, "ND")]
        return [(self.labels, "NL"), (self.postings.weights, "TN"), (self.postings.rarity, "T")]


def _by_size(near: Sparse, labels: Sparse, rank: Callable[[slice], Sparse]) -> Sparse:
    """Apply `rank` to as many texts at a time as have neighbours' labels that fit in memory."""
    carried = np.concatenate(([0], np.cumsum(np.diff(labels.indptr)[near.indices])))[near.indptr]
    parts = [rank(slice(*part)) for part in _starts(np.diff(carried), MOST_ENTRIES)]
    return vstack(parts, format="csr") if parts else csr_array((0, labels.shape[1]), dtype=np.float32)


def _largest(near: Sparse, labels: Sparse) -> Sparse:
    """Return for every text and label the highest similarity of a neighbour with that label."""
    carried = np.diff(labels.indptr)[near.indices]
    row = np.repeat(np.repeat(np.arange(near.shape[0]), np.diff(near.indptr)), carried)
    first = np.repeat(labels.indptr[near.indices] - np.cumsum(carried) + carried, carried)
    column = labels.indices[first + np.arange(len(row))]
    value = np.repeat(near.data, carried)
    order = np.lexsort((-value, column, row))
    row, column, value = row[order], column[order], value[order]
    new = np.append(True, (np.diff(row) != 0) | (np.diff(column) != 0))[: len(row)]
    shape = (near.shape[0], labels.shape[1])
    return csr_array((value[new], (row[new], column[new])), shape=shape)


def _nearest_vectors(queries: Vectors | None, stored: Vectors | None, k: int) -> Sparse:
    """Return the k nearest stored unit rows of every unit row, with cosines; a zero row has no neighbours."""
    assert queries is not None
    assert stored is not None
    parts, k = [], min(k, len(stored))
    size = max(1, min(256, MOST_ENTRIES * 4 // max(len(stored), 1)))
    for start in range(0, len(queries), size):
        block = queries[start : start + size]
        scores = block @ stored.T
        columns = np.argpartition(-scores, k - 1, axis=1)[:, :k] if k < len(stored) else None
        columns = np.broadcast_to(np.arange(k), scores.shape) if columns is None else columns
        values = np.take_along_axis(scores, columns, axis=1)
        silent = ~block.any(axis=1)
        ends = np.concatenate(([0], np.cumsum(np.where(silent, 0, k))))
        data, indices = values[~silent].reshape(-1), columns[~silent].reshape(-1)
        parts.append(csr_array((data, indices, ends), shape=(len(block), len(stored))))
    return vstack(parts, format="csr") if parts else csr_array((0, len(stored)), dtype=np.float32)


@dataclass(frozen=True)
class LabelVectors:
    """Cosine to a label's vector: the mean of its texts' vectors and, as one text more, its own
    description's."""

    near: int = 256
    """The number of nearest texts whose labels are compared, if there are too many labels to compare all."""

    def fit(self, texts: TextRows, labels: Sparse, documents: TextRows) -> FittedLabelVectors:
        """Add up the vectors of every label's texts."""
        assert texts.vectors is not None
        sums = np.asarray(csr_array(labels.T, dtype=np.float32) @ texts.vectors, dtype=np.float32)
        if documents.vectors is not None:
            sums += documents.vectors
        if labels.shape[1] <= EXACT:
            return FittedLabelVectors(unit(sums), None, None, self.near)
        return FittedLabelVectors(unit(sums), texts.vectors, csr_array(labels, dtype=np.float32), self.near)


@dataclass(frozen=True, eq=False)
class FittedLabelVectors:
    """Unit vectors of labels; zero for a label without texts and description."""

    vectors: Vectors
    texts: Vectors | None
    labels: Sparse | None
    near: int

    def candidates(self, texts: TextRows, k: int) -> Sparse:
        """Return the k nearest labels, of all or of those of the nearest texts."""
        return ranked_in_batches(texts, len(self.vectors), lambda batch: self._ranked(batch, k))

    def _ranked(self, texts: TextRows, k: int) -> Sparse:
        assert texts.vectors is not None
        if self.labels is None:
            known = np.flatnonzero(self.vectors.any(axis=1))
            hits = _nearest_vectors(texts.vectors, self.vectors[known], k)
            shape = (len(texts), len(self.vectors))
            return csr_array((hits.data, known[hits.indices], hits.indptr), shape=shape)
        near = _nearest_vectors(texts.vectors, self.texts, self.near)
        near.data[:] = 1
        vectors = texts.vectors
        return _by_size(near, self.labels, lambda at: best_per_row(self._cosines(vectors[at], near[at]), k))

    def _cosines(self, vectors: Vectors, near: Sparse) -> Sparse:
        """Return the cosines to the labels of these nearest texts."""
        listed = near @ self.labels
        row = np.repeat(np.arange(len(vectors)), np.diff(listed.indptr))
        for start in range(0, len(row), MOST_ENTRIES // 16):  # every entry copies two vectors
            part = slice(start, start + MOST_ENTRIES // 16)
            pairs = vectors[row[part]], self.vectors[listed.indices[part]]
            listed.data[part] = np.einsum("ij,ij->i", *pairs)
        return listed

    def save(self, folder: Path) -> None:
        """Write `labels.npz`."""
        arrays: dict[str, NDArray[Any]] = {"vectors": self.vectors, "near": np.array(self.near)}
        if self.texts is not None:
            arrays |= {"texts": self.texts} | sparse_arrays("labels", self.labels)
        write_arrays(folder / "labels.npz", **arrays)

    @classmethod
    def load(cls, folder: Path) -> FittedLabelVectors:
        """Read what `save` wrote."""
        arrays = read_arrays(folder / "labels.npz")
        texts = arrays.get("texts")
        labels = None if texts is None else sparse_of("labels", arrays)
        return cls(arrays["vectors"], texts, labels, max(int(arrays["near"]), 1))

    def sides(self) -> Sides:
        """Return the arrays and their axes: L labels, D directions, N texts."""
        near = [] if self.texts is None else [(self.texts, "ND"), (self.labels, "NL")]
        return [(self.vectors, "LD"), *near]
