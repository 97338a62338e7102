"""Reverse top-K: the documents that have a word most often, without scanning all of them.

Every cell stores the αK documents with its largest values (the RTK sketch of CS-F-LTR's ICDE'21 version). It
is built from cells that are noisy already, so it adds no privacy cost. A document is a result for a word if
more than a share β of the word's z cells list it; its count is the median of those.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import ConfigError
from isthmus.private import Counts, HashFamily, Sketch
from isthmus.tables import offsets_of, rows_of

FACTOR, SHARE, DEPTH = 5, 0.1, 150
"""α, β and K of the paper."""


@dataclass(frozen=True, eq=False, repr=False)
class ReverseTopK:
    """A reverse top-K sketch: cell i lists documents `offsets[i]:offsets[i + 1]`, largest value first."""

    family: HashFamily
    offsets: IntArray
    documents: IntArray
    values: Counts

    @classmethod
    def of(cls, noisy: Sketch, *, k: int = DEPTH, factor: int = FACTOR) -> ReverseTopK:
        """Store the α·K largest positive values of every cell; of equal ones the earlier documents."""
        if k < 1 or factor < 1:
            raise ConfigError(f"α = {factor} and K = {k}", key="k", expected="whole numbers from 1")
        positive = np.flatnonzero(noisy.values > 0)
        document = np.repeat(np.arange(len(noisy)), np.diff(noisy.offsets))[positive]
        cells, values = noisy.cells[positive].astype(np.int64), noisy.values[positive]
        order = np.lexsort((document, -values, cells))
        offsets = offsets_of(cells, noisy.family.size)
        rank = np.arange(len(order)) - offsets[cells[order]]
        best = order[rank < k * factor]
        documents, chosen = frozen(document[best]), frozen(values[best])
        return cls(noisy.family, offsets_of(cells[best], noisy.family.size), documents, chosen)

    def having(self, word: int, cells: IntArray, *, share: float = SHARE) -> tuple[IntArray, FloatArray]:
        """Return the documents that a word's cells list often enough, and their counts."""
        rows = rows_of(self.offsets, cells[:, word])
        order = np.lexsort((self.values[rows], self.documents[rows]))
        distinct, starts, times = np.unique(
            self.documents[rows][order], return_index=True, return_counts=True
        )
        values = self.values[rows][order].astype(np.float64)
        middles = (values[starts + (times - 1) // 2] + values[starts + times // 2]) / 2
        enough = times > share * self.family.rows
        return distinct[enough], middles[enough]

    def search(self, words: Ids, weights: FloatArray, *, k: int = DEPTH, share: float = SHARE) -> IntArray:
        """Return the K documents with the largest weighted sum of counts over a query's words, best first.

        `weights` has a value for every word of the vocabulary; only words in the column count.
        """
        cells = self.family.of_vocabulary(words).cells
        parts = [(word, *self.having(word, cells, share=share)) for word in np.unique(words.codes).tolist()]
        documents = np.concatenate([np.empty(0, np.int64), *(distinct for _, distinct, _ in parts)])
        scores = np.concatenate([np.empty(0), *(weights[word] * counts for word, _, counts in parts)])
        distinct, back = np.unique(documents, return_inverse=True)
        totals = np.bincount(back, scores, len(distinct))
        best: IntArray = distinct[np.argsort(-totals, kind="stable")[:k]]
        return best

    def __repr__(self) -> str:
        return f"ReverseTopK: {self.family.size:,} cells, {len(self.documents):,} entries"
