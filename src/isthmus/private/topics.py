"""What a document is about, read from its published noisy sketch, foretells which words it has.

A word that the reader's own documents have in company of certain others is likelier in a foreign document
that seems to have those. The reader learns directions of meaning from its own documents (latent semantic
analysis), places every noisy sketch among them, and learns on its own documents, noised in the same way, how
much that says. A cell's own value never foretells itself: its part is taken out before its words are looked
at. All of this is post-processing of what was released: it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.private.noise import Geometric
from isthmus.private.reading import Cells, Lexicon, WordPriors
from isthmus.private.sketch import CountMin, Sketch
from isthmus.retrieval import TEXT, idf

DIMENSIONS = 40
_STEPS = (1, 2, 3)  # values of a cell that are told apart; the last stands for all above
_DOCUMENTS, _WORDS = 1500, 400  # that the reader learns on
_BLOCK = 1 << 16

_BASE_RATE = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])  # weights that say what frequency and length say

Single = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Topics:
    """Directions of meaning learned from the reader's own documents, and how much they foretell."""

    lexicon: Lexicon
    law: Geometric
    words: Single
    """The direction of every word of the reader's vocabulary, of length 1 (0 where it has none)."""
    cells: Single
    """What a cell of each value adds to a document's place: (steps, cells, dimensions)."""
    weights: FloatArray

    @classmethod
    def learned(cls, lexicon: Lexicon, law: Geometric, rng: np.random.Generator) -> Topics | None:
        """From the reader's own documents; None where they are too few to have topics."""
        counts = lexicon.own.counts()
        if lexicon.family.rows > 1 or min(counts.shape) <= DIMENSIONS or counts.nnz < 10 * DIMENSIONS:
            return None
        directions = _directions(counts, lexicon, rng)
        parts = _cell_parts(directions, lexicon, law)
        return cls(lexicon, law, _unit(directions), parts, _BASE_RATE)._fitted(rng)

    def placed(self, sketch: Sketch, lengths: IntArray) -> Placed:
        """The documents of a noisy sketch among the topics."""
        from scipy.sparse import csr_array

        place = np.zeros((len(sketch), self.words.shape[1]), dtype=np.float32)
        shape = len(sketch), sketch.family.size
        for at, step in enumerate(_STEPS):
            last = step == _STEPS[-1]
            hits = np.flatnonzero((sketch.values >= step) if last else (sketch.values == step))
            ones = np.ones(len(hits), dtype=np.float32)
            place += (
                csr_array((ones, sketch.cells[hits], np.searchsorted(hits, sketch.offsets)), shape)
                @ self.cells[at]
            )
        return Placed(self, place, lengths)

    def _fitted(self, rng: np.random.Generator) -> Topics:
        """Noise own documents as others' are and learn how their place foretells their words."""
        from sklearn.linear_model import LogisticRegression

        own, family = self.lexicon.own, self.lexicon.family
        chosen = np.sort(rng.permutation(len(own))[:_DOCUMENTS])
        exact = CountMin.of(own, family).take(chosen)
        noisy = noised(exact, self.law, rng)
        having = self.lexicon.collection.tables[TEXT].astype(np.float64)
        size = min(_WORDS, int((having > 1).sum()))
        if not size:
            return self
        heavy = np.where(having > 1, having, 0.0)
        sample = rng.choice(len(having), size=size, replace=False, p=heavy / heavy.sum())
        documents = np.tile(np.arange(len(chosen)), size)
        words = Ids(frozen(np.repeat(np.sort(sample), len(chosen))), own.terms.vocabulary)
        at = family.of_vocabulary(self.lexicon.words).cells[0][words.codes]
        cells = Cells(noisy.lookup(documents, at), documents, words)
        placed = self.placed(noisy, own.lengths[chosen])
        signs = placed.signs(cells, self.lexicon.priors(words))
        there = np.asarray(own.counts()[chosen[documents], words.codes]) > 0
        if there.all() or not there.any():
            return self
        spread = signs.std(axis=0) + 1e-9
        model = LogisticRegression(C=10.0, max_iter=300).fit(signs / spread, there)
        weights = np.append(model.coef_[0] / spread, model.intercept_)
        return Topics(self.lexicon, self.law, self.words, self.cells, weights)


@dataclass(frozen=True, eq=False)
class Placed:
    """Foreign documents among the reader's topics: a `Context` for shrinking."""

    topics: Topics
    place: Single
    lengths: IntArray

    def __call__(self, cells: Cells, priors: WordPriors) -> FloatArray:
        """The chance that each word is in each document, by all cells but its own."""
        signs = self.signs(cells, priors)
        logit = signs @ self.topics.weights[:-1] + self.topics.weights[-1]
        chance: FloatArray = 1 / (1 + np.exp(-np.clip(logit, -30, 30)))
        return np.clip(chance, 1e-9, 1 - 1e-9)

    def signs(self, cells: Cells, priors: WordPriors) -> FloatArray:
        """What foretells a word: likeness, base rate, both, likeness squared, and the document's length."""
        rate = np.log(priors.presence / (1 - priors.presence))[cells.words.codes]
        alike = self._likeness(cells)
        relative = self.lengths[cells.documents] / self.topics.lexicon.average
        return np.stack((alike, rate, alike * rate, alike**2, np.log(relative + 1e-3)), axis=1)

    def _likeness(self, cells: Cells) -> FloatArray:
        """The cosine between a document without the word's cell and the word; 0 for words never seen."""
        topics = self.topics
        known = cells.words.translation(topics.lexicon.words)
        own_cells = topics.lexicon.family.of_vocabulary(cells.words).cells[0]
        alike = np.zeros(len(cells.documents))
        step = np.clip(np.rint(cells.values), 0, _STEPS[-1]).astype(np.int64)
        for first in range(0, len(alike), _BLOCK):
            rows = slice(first, first + _BLOCK)
            word = cells.words.codes[rows]
            place = self.place[cells.documents[rows]]
            part = topics.cells[np.maximum(step[rows], 1) - 1, own_cells[word]]
            rest = place - part * (step[rows] > 0)[:, None]
            direction = topics.words[known[word]] * (known[word] >= 0)[:, None]
            size = np.sqrt(np.einsum("ij,ij->i", rest, rest)) + 1e-9
            alike[rows] = np.einsum("ij,ij->i", rest, direction) / size
        return alike


def noised(exact: CountMin, law: Geometric, rng: np.random.Generator) -> CountMin:
    """Own sketches noised as others' are, to learn from; never released, so any generator will do."""
    table = exact.dense().astype(np.int32)
    flat = table.reshape(-1)
    for first in range(0, flat.size, _BLOCK):
        some = flat[first : first + _BLOCK]
        some += law.of(rng.integers(0, 1 << 64, size=some.size, dtype=np.uint64))
    return CountMin.of_dense(table, exact.family)


def _directions(counts: Any, lexicon: Lexicon, rng: np.random.Generator) -> Single:
    """Word vectors: the right singular vectors of unit rows of idf, each word's row times its idf."""
    from scipy.sparse.linalg import svds

    weights = idf(lexicon.known.frequencies, lexicon.totals.documents)
    table = counts.astype(np.float64)
    table.data = weights[table.indices]
    rows = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
    norms = np.sqrt(np.bincount(rows, table.data**2, table.shape[0]))
    table.data /= np.maximum(norms, 1e-9)[rows]
    start = rng.standard_normal(min(table.shape))
    _, _, axes = svds(table, k=DIMENSIONS, v0=start)
    directions: Single = axes.T.astype(np.float32)
    return directions


def _cell_parts(directions: Single, lexicon: Lexicon, law: Geometric) -> Single:
    """Σ over a cell's words of P(the word is why | value)·idf·direction, for every value told apart.

    P(word is why | y) = p_w·l₁(y)/(l₀(y) + Σ_v p_v·l₁(y)), l₀ and l₁ the chances of y without and with it.
    """
    priors = lexicon.priors(lexicon.words)
    cells = lexicon.family.of_vocabulary(lexicon.words).cells[0]
    loads = np.bincount(cells, priors.presence, lexicon.family.width)
    counts = np.arange(1, 40)
    tail = 0.75 * 0.25 ** (counts - 1)
    weights = idf(lexicon.known.frequencies, lexicon.totals.documents)
    parts = np.zeros((len(_STEPS), lexicon.family.width, directions.shape[1]), dtype=np.float32)
    for at, step in enumerate(_STEPS):
        value = np.array(step)
        absent, there = float(law.probabilities(value)), float(tail @ law.probabilities(value - counts))
        blame = priors.presence * there / (absent + loads[cells] * there + 1e-300)
        np.add.at(parts[at], cells, (blame * weights)[:, None].astype(np.float32) * directions)
    return parts


def _unit(rows: Single) -> Single:
    sizes = np.linalg.norm(rows, axis=1, keepdims=True)
    units: Single = rows / np.maximum(sizes, 1e-9)
    return units
