"""Synthetic texts under labels with a long tail, generated in batches; for measuring costs, not quality.

Every text has ten labels assigned in turn, so that all labels have equally many texts, and two more drawn by
Zipf's law, most of which go to a few hundred labels. A label has four words, hashed from its number into a
vocabulary that labels share; a text has three of them for every label, and fifteen common words.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from isthmus.corpora import SparseRows, write_xmc
from isthmus.randomness import Streams

WORDS, COMMON = 300_000, 5_000
ROUND, ZIPF = 10, 2
OF_LABEL, SHOWN, FILLING = 4, 3, 15
BATCH = 5_000


def write_long_tail(folder: Path, labels: int, *, texts: int = 100_000, tests: int = 2_000) -> None:
    """Write `train.txt` and `test.txt` in the sparse format of the extreme classification repository."""
    for name, count in (("train", texts), ("test", tests)):
        write_xmc(folder / f"{name}.txt", long_tail(labels, count, name), rows=count)


def long_tail(labels: int, texts: int, name: str) -> Iterator[SparseRows]:
    """Yield batches of texts with their labels; another `name` gives other texts."""
    rng = Streams(0)("long tail", name, str(labels))
    order = rng.permutation(labels)
    share = 1 / np.arange(1, labels + 1)
    heights = np.cumsum(share / share.sum())
    for start in range(0, texts, BATCH):
        count = min(BATCH, texts - start)
        turn = (start * ROUND + np.arange(count * ROUND)) % labels
        zipf = np.searchsorted(heights, rng.random((count, ZIPF)))
        own = np.concatenate([order[turn].reshape(count, ROUND), np.minimum(zipf, labels - 1)], axis=1)
        which = np.argsort(rng.random((*own.shape, OF_LABEL)), axis=2)[:, :, :SHOWN]
        words = COMMON + (own[:, :, None] * 2_654_435_761 + which * 40_503_001) % (WORDS - COMMON)
        filling = (COMMON * rng.random((count, FILLING)) ** 3).astype(np.int64)
        columns = np.concatenate([words.reshape(count, -1), filling], axis=1)
        weights = np.where(columns < COMMON, 0.3, 1.0).astype(np.float32)
        yield SparseRows(_matrix(columns, weights, WORDS), _matrix(own, np.ones(own.shape, bool), labels))


def _matrix(columns: np.ndarray, values: np.ndarray, width: int) -> csr_array:
    ends = np.arange(len(columns) + 1) * columns.shape[1]
    matrix = csr_array((values.ravel(), columns.ravel(), ends), shape=(len(columns), width))
    matrix.sum_duplicates()
    return matrix
