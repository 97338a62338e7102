"""Sparse rows for millions of labels: texts, right labels and ranked labels, a batch at a time.

    texts        `TextRows`: rows of term weights, and vectors where there are any, made of texts or of
                 given feature weights (the XMC repository's format)
    right        `csr_array` of bool, texts × labels
    candidates   `csr_array` of float32, texts × labels: stored entries are the labels that a ranker lists,
                 with its score (which may be 0); an entry not stored is not listed

No dense array of texts × labels is ever made: a ranker works on `BATCH` texts, and lists at most `k` labels.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, vstack

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError
from isthmus.files import replacing
from isthmus.tables import PLAIN, Unpacker

BATCH = 1_024
"""The number of texts that are ranked at once."""
Sparse: TypeAlias = Any
"""A `csr_array`; SciPy's stubs disagree on what its operations return."""


Sides: TypeAlias = list[tuple[Any, str]]
"""Arrays with a letter for each axis: axes of the same letter have the same length."""


@dataclass(frozen=True, eq=False)
class TextRows:
    """Texts in the form that rankers use."""

    terms: Sparse
    """Texts × terms, float32: the count of each term in a text, or given feature weights."""
    vectors: NDArray[np.float32] | None = None
    """Unit rows of an encoder, or of latent semantics."""
    counted: bool = True
    """Whether terms are counts; given feature weights are compared as they are."""

    def __len__(self) -> int:
        return int(self.terms.shape[0])

    def take(self, rows: Any) -> TextRows:
        """Return the texts at these positions (integers, a mask or a slice)."""
        vectors = None if self.vectors is None else self.vectors[rows]
        return TextRows(self.terms[rows], vectors, self.counted)

    def batches(self, size: int = BATCH) -> Iterator[TextRows]:
        """Yield all texts in order, `size` at a time."""
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))


class FittedLabelRanker(Protocol):
    """A label ranker after fitting."""

    def candidates(self, texts: TextRows, k: int) -> Sparse:
        """Return at most k labels of every text with their scores, in the form of candidates."""

    def save(self, folder: Path) -> None:
        """Write all of it to an existing folder; its last file is written last."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote."""

    def sides(self) -> Sides:
        """Return every array with the letters of its axes."""


class SparseLabelRanker(Protocol):
    """Ranks labels for texts; the constructor stores its arguments, `fit` returns a fitted ranker."""

    def fit(self, texts: TextRows, labels: Sparse, documents: TextRows) -> FittedLabelRanker:
        """Learn from texts and their labels.

        `documents` are the labels' own names and descriptions, in the terms of the texts (rows without terms
        if there are none).
        """


def ranked_in_batches(
    texts: TextRows, width: int, rank: Callable[[TextRows], Sparse], *, size: int = BATCH
) -> Sparse:
    """Apply `rank` to one batch of texts at a time; `width` is the number of labels."""
    parts = [rank(batch) for batch in texts.batches(size)]
    if not parts:
        return csr_array((0, width), dtype=np.float32)
    return vstack(parts, format="csr") if len(parts) > 1 else parts[0]


def best_per_row(scores: Sparse, k: int) -> Sparse:
    """Return the k largest stored entries of every row, as float32; of equal ones those of the lower
    column."""
    data, columns, ends = scores.data, scores.indices, scores.indptr
    counts = np.diff(ends)
    keep = np.ones(len(data), dtype=bool)
    for row in np.flatnonzero(counts > k).tolist():
        part = slice(ends[row], ends[row + 1])
        values = data[part]
        least = np.partition(values, len(values) - k)[len(values) - k]
        mask = values > least
        ties = np.flatnonzero(values == least)
        mask[ties[np.argsort(columns[part][ties], kind="stable")[: k - int(mask.sum())]]] = True
        keep[part] = mask
    ends = np.concatenate(([0], np.cumsum(np.minimum(counts, k))))
    return csr_array((data[keep].astype(np.float32), columns[keep], ends), shape=scores.shape)


def without_own(candidates: Sparse, own: IntArray) -> Sparse:
    """Remove the label that stands for a text itself: `own[row]` is its number, or −1."""
    row = np.repeat(np.arange(candidates.shape[0]), np.diff(candidates.indptr))
    others = candidates.indices != own[row]
    ends = np.concatenate(([0], np.cumsum(others)))[candidates.indptr]
    return csr_array((candidates.data[others], candidates.indices[others], ends), shape=candidates.shape)


def from_lists(rows: Sequence[Any], width: int) -> Sparse:
    """Build a bool matrix, texts × labels, from the numbers of every text's labels."""
    counts = [len(row) for row in rows]
    columns = np.concatenate([np.empty(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])
    ends = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    matrix = csr_array((np.ones(len(columns), dtype=bool), columns, ends), shape=(len(rows), width))
    matrix.sum_duplicates()
    return matrix


def rarity(texts: TextRows) -> FloatArray:
    """Return ln((1 + N)/(1 + df)) + 1 of every term; ones for given feature weights."""
    if not texts.counted:
        return np.ones(texts.terms.shape[1])
    having = np.bincount(texts.terms.indices, minlength=texts.terms.shape[1])
    return np.asarray(np.log((1 + len(texts)) / (1 + having)) + 1)


def weighed(texts: TextRows, rarity_of_terms: FloatArray) -> Sparse:
    """Return rows of (1 + ln tf)·rarity, or of given feature weights, scaled to unit length."""
    terms = texts.terms
    values = 1 + np.log(terms.data) if texts.counted else terms.data
    values = values * rarity_of_terms[terms.indices]
    row = np.repeat(np.arange(len(texts)), np.diff(terms.indptr))
    lengths = np.sqrt(np.bincount(row, values**2, len(texts)))
    values = (values / np.maximum(lengths, 1e-12)[row]).astype(np.float32)
    return csr_array((values, terms.indices, terms.indptr), shape=terms.shape)


def label_counts(labels: Sparse) -> IntArray:
    """Return the number of texts of every label."""
    return np.bincount(labels.indices, minlength=labels.shape[1]).astype(np.int64)


@dataclass(frozen=True)
class Bands:
    """Labels grouped by their number of training texts: band b from `edges[b − 1]` on and below
    `edges[b]`."""

    edges: tuple[int, ...] = (1, 4, 16, 64)

    def __len__(self) -> int:
        return len(self.edges) + 1

    def of(self, counts: ArrayLike) -> NDArray[np.int8]:
        """The band of labels with these counts, 0 the rarest."""
        return np.searchsorted(np.array(self.edges), np.asarray(counts), side="right").astype(np.int8)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the bands, such as 0, 1–3, 4–15, 64+."""
        starts, ends = (0, *self.edges[:-1]), self.edges
        spans = zip(starts, ends, strict=True)
        named = [str(start) if start == end - 1 else f"{start}–{end - 1}" for start, end in spans]
        return (*named, f"{ends[-1]}+")

    @classmethod
    def head_and_tail(cls, counts: IntArray, share: float = 0.2) -> Bands:
        """Return the rank-fusion paper's split: of L labels, the ⌊share·L⌋ + 1 most frequent are head, and
        all that are as frequent as the last of these."""
        if not len(counts):
            raise DataError("no labels to split into head and tail")
        least = np.sort(counts)[::-1][min(int(share * len(counts)), len(counts) - 1)]
        return cls((max(int(least), 1),))


def write_arrays(file: Path, **arrays: NDArray[Any]) -> None:
    """Write arrays to one file (.npz, not compressed), whole or not at all."""
    with replacing(file) as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def read_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """Read arrays of `write_arrays`: numbers and words that take no more memory than the file has bytes.
    Raises DataError."""
    try:
        unpacker = Unpacker(file.stat().st_size)
        with zipfile.ZipFile(file) as stored:
            arrays = {
                part.filename.removesuffix(".npy"): unpacker.array(
                    stored.open(part), part.file_size, kinds=PLAIN + "U"
                )
                for part in stored.infolist()
            }
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ValueError(f"{name} is not finite")
        return arrays
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"no arrays: {error}", file=file, cure="fit again") from None


def check_sides(sides: Sides, known: dict[str, int]) -> None:
    """Check that the axes of arrays agree with each other and with known lengths. Raises DataError if not."""
    lengths = dict(known)
    for array, letters in sides:
        if len(array.shape) != len(letters) or any(
            lengths.setdefault(letter, int(side)) != side
            for letter, side in zip(letters, array.shape, strict=True)
        ):
            problem = f"an array of {array.shape} where {letters} are {lengths}"
            raise DataError(f"parts of different classifiers: {problem}", cure="fit again")


def sparse_arrays(name: str, matrix: Sparse) -> dict[str, NDArray[Any]]:
    """Return a sparse matrix as arrays for `write_arrays`."""
    parts = {"data": matrix.data, "indices": matrix.indices, "indptr": matrix.indptr}
    return {f"{name}.{part}": array for part, array in parts.items()} | {
        f"{name}.shape": np.array(matrix.shape, dtype=np.int64)
    }


def sparse_of(name: str, arrays: dict[str, NDArray[Any]]) -> Sparse:
    """Rebuild the matrix from `sparse_arrays`. Raises DataError if the arrays are not a valid one."""
    data, indices, indptr, shape = (
        arrays[f"{name}.{part}"] for part in ("data", "indices", "indptr", "shape")
    )
    try:
        if data.dtype.kind not in "biuf":
            raise TypeError(f"of {data.dtype}")
        matrix = csr_array((data, indices, indptr), shape=(int(shape[0]), int(shape[1])))
        matrix.check_format(full_check=True)  # otherwise products may read beyond their arrays
    except (ValueError, IndexError, TypeError) as error:
        raise DataError(f"no sparse matrix {name}: {error}", cure="fit again") from None
    return matrix
