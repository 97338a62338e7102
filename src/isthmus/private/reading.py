"""Read noisy counts: estimate a word's count from the value of its cell and the reader's prior knowledge.

    plain       the value, negative ones as 0
    threshold   the value where it is large enough to be credible, else 0
    shrink      the posterior mean of the count

The prior of `shrink` comes from the reader's own documents and the released totals: how common the word is,
how often it repeats, how long the document is, how likely other words share the cell, and, where whole
sketches were published, what the document is about. Every estimate has an error bar: the posterior's standard
deviation, or that of the noise.

The topic of a document, inferred from its published noisy sketch, predicts which words it has. A word that
occurs together with certain others in the reader's own documents is likelier in a foreign document that seems
to have those. The reader learns latent directions from its own documents (latent semantic analysis), places
every noisy sketch among them, and learns from its own documents, noised in the same way, how well the place
predicts words. A cell's own value never predicts itself: its part is removed before its words are predicted.
All of this is post-processing of what was released: it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.private.mechanisms import Geometric
from isthmus.private.sketch import CountMin, HashFamily, Sketch
from isthmus.private.totals import TotalsRead, read_totals
from isthmus.retrieval import TEXT, Statistics, idf
from isthmus.text import Tokens

_LEVELS = np.concatenate(([0.02], np.linspace(0.05, 0.95, 19)))  # probabilities that a present word repeats
_MOST = 255  # larger counts are not shrunk


@dataclass(frozen=True, eq=False)
class CountEstimate:
    """Counts with an error bar each."""

    mean: FloatArray
    error: FloatArray


@dataclass(frozen=True, eq=False)
class Cells:
    """Noisy values to be read, one for each pair of a document and a word."""

    values: NDArray[Any]
    documents: IntArray
    words: Ids


class Reader(Protocol):
    """Turns noisy values into counts."""

    def read(self, cells: Cells) -> CountEstimate: ...


@dataclass(frozen=True, eq=False)
class ThresholdReader:
    """Values from `level` on; smaller ones are read as 0, as noise, and at level 0 so are negative ones."""

    level: float
    variance: float

    def read(self, cells: Cells) -> CountEstimate:
        """y if y ≥ level else 0, ± the noise."""
        mean = np.where(cells.values >= self.level, cells.values, 0).astype(np.float64)
        return CountEstimate(mean, np.full(len(mean), self.variance**0.5))


@dataclass(frozen=True, eq=False)
class WordPriors:
    """For every word of a vocabulary, in a document of average length: the probability that it is there, how
    it repeats (an index into the levels), and the probability that another word is in its cell."""

    presence: FloatArray
    level: IntArray
    crowding: FloatArray


@dataclass(frozen=True, eq=False)
class Lexicon:
    """A reader's prior knowledge of words: its own documents and the totals of all silos."""

    family: HashFamily
    totals: Statistics
    own: Tokens
    _cache: dict[int, tuple[Any, WordPriors]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def collection(self) -> Statistics:
        """Frequencies in the reader's own documents."""
        return Statistics.of(self.own)

    @cached_property
    def average(self) -> float:
        """The mean length of all silos' documents."""
        return (self.totals.length / self.totals.documents if self.totals.documents else 0) or 1.0

    @cached_property
    def words(self) -> Ids:
        """The reader's own vocabulary."""
        vocabulary = self.own.terms.vocabulary
        return Ids(frozen(np.arange(len(vocabulary))), vocabulary)

    @cached_property
    def known(self) -> TotalsRead:
        """The released totals, read for the reader's own vocabulary."""
        return self.read(self.words)

    @cached_property
    def loads(self) -> FloatArray:
        """The expected number of words in every cell, in a document of average length; words outside the
        reader's vocabulary are spread evenly over all cells."""
        cells = self.family.of_vocabulary(self.words).cells[0]
        loads = np.bincount(cells, -np.log1p(-self._presence(self.known)), self.family.width)
        counts = self.own.counts()
        distinct = np.diff(counts.indptr).mean() if len(self.own) else 0.0
        return np.add(loads, max(0.0, float(distinct - loads.sum())) / self.family.width, dtype=np.float64)

    def distinct(self, lengths: IntArray) -> FloatArray:
        """The number of distinct words in documents of these lengths, fitted to the reader's own: u =
        a·L^b."""
        own, distinct = self.own.lengths, np.diff(self.own.counts().indptr)
        mask = own > 1
        slope, level = 1.0, np.log(0.8)
        if mask.any():
            level = np.log(distinct[mask].sum() / own[mask].sum())
        if mask.sum() > 2 and np.ptp(own[mask]):
            slope, level = np.polyfit(np.log(own[mask]), np.log(distinct[mask]), 1)
        fitted = np.exp(level) * np.maximum(lengths, 1).astype(np.float64) ** slope
        return np.minimum(np.where(lengths > 0, fitted, 0.0), lengths)

    def read(self, words: Ids) -> TotalsRead:
        """The released totals of any vocabulary, shrunk towards the prediction from the reader's own
        documents."""
        return read_totals(self.totals, words, self.collection)

    def _presence(self, read: TotalsRead) -> FloatArray:
        documents = max(self.totals.documents, 1)  # a requested word never has probability 0
        return np.clip(read.frequencies / documents, min(0.5 / documents, 0.5), 1 - 1e-7)

    def priors(self, words: Ids) -> WordPriors:
        """The priors of any vocabulary; those of the last one are cached."""
        cached = self._cache.get(id(words.vocabulary))
        if cached is None or cached[0] is not words.vocabulary:
            cached = words.vocabulary, self._priors(words)
            self._cache.clear()
            self._cache[id(words.vocabulary)] = cached
        return cached[1]

    def _priors(self, words: Ids) -> WordPriors:
        read = self.read(words)
        presence = self._presence(read)
        repeat = 1 - 1 / np.maximum(read.repeats, 1.0)
        level = np.abs(repeat[:, None] - _LEVELS).argmin(axis=1)
        cells = self.family.of_vocabulary(words).cells[0]
        known = words.translation(self.words) >= 0
        others = self.loads[cells] + np.where(known, np.log1p(-presence), 0.0)
        return WordPriors(presence, level, -np.expm1(-np.maximum(others, 0.0)))


Context = Callable[[Cells, WordPriors], FloatArray]
"""The probability that the word is in the document, pair by pair, from everything known but its own cell."""


@dataclass(frozen=True, eq=False)
class Shrink:
    """Posterior means under the distribution of the noise.

    A word is in a document of length L with probability 1 − (1 − p)^{L/avg}, or with that of `context`; if
    so, it occurs c ≥ 1 times with probability (1 − r)·r^{c−1}. Another word is in its cell with probability 1
    − (1 − ρ)^{L/avg}.
    """

    law: Geometric
    lexicon: Lexicon
    lengths: IntArray
    context: Context | None = None

    def read(self, cells: Cells) -> CountEstimate:
        """E[count | value] ± its standard deviation."""
        priors = self.lexicon.priors(cells.words)
        word = cells.words.codes
        relative = self.lengths[cells.documents] / self.lexicon.average
        crowded = -np.expm1(relative * np.log1p(-np.minimum(priors.crowding, 1 - 1e-9))[word])
        if self.context is None:
            present = -np.expm1(relative * np.log1p(-priors.presence)[word])
        else:
            present = self.context(cells, priors)
        values = np.rint(cells.values).astype(np.int64)
        return self._posterior(values, present, crowded, priors.level[word])

    def _posterior(
        self, values: IntArray, present: FloatArray, crowded: FloatArray, level: IntArray
    ) -> CountEstimate:
        alone, shared = self._likelihoods
        at = np.clip(values, -_MOST, _MOST) + _MOST
        here = [
            (1 - crowded) * one[level, at] + crowded * other[level, at]
            for one, other in zip(alone, shared, strict=True)
        ]
        absent = (1 - present) * here[0]
        total = absent + present * here[1]
        sure = total > 0  # without noise a value may be impossible under every hypothesis
        total = np.where(sure, total, 1.0)
        mean = np.where(sure, present * here[2] / total, np.maximum(values, 0))
        square = np.where(sure, present * here[3] / total, mean**2)
        large = (values > _MOST // 2) & (self.law.rate > 0.2)  # far above the noise: taken as the count
        mean = np.where(large, values, mean)
        spread = np.where(large, self.law.variance, np.maximum(square - mean**2, 0.0))
        return CountEstimate(mean, np.sqrt(spread))

    @cached_property
    def _likelihoods(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """Tables by level and value: the probability of the value if the word is absent and, over its counts
        if present, the sums of the probability times 1, c and c². First for a cell of its own, then for a
        shared one."""
        values = np.arange(-_MOST, _MOST + 1)
        counts = np.arange(1, _MOST + 1)
        probabilities = self.law.probabilities(values[:, None] - counts)
        tail = (1 - _LEVELS[:, None]) * _LEVELS[:, None] ** (counts - 1)
        absent = np.broadcast_to(self.law.probabilities(values), (len(_LEVELS), len(values)))
        alone = [absent, *((tail * counts**power) @ probabilities.T for power in (0, 1, 2))]
        return alone, [_convolved(table, _typical_tail()) for table in alone]


def _typical_tail() -> FloatArray:
    """The distribution of the count of a word that shares the cell: that of a word that repeats now
    and then."""
    repeat = _LEVELS[6]
    falling = np.power(repeat, np.arange(12))
    tail: FloatArray = falling / falling.sum()
    return tail


def _convolved(table: FloatArray, tail: FloatArray) -> FloatArray:
    """The probabilities of values after a draw from 1, 2, … with probabilities `tail` was added."""
    shifted = np.zeros_like(table)
    for more, chance in enumerate(tail, start=1):
        shifted[:, more:] += chance * table[:, :-more]
    return shifted


DIMENSIONS = 40
_STEPS = (1, 2, 3)  # distinguished values of a cell; the last includes all larger ones
_DOCUMENTS, _WORDS = 1500, 400  # on which the reader is fitted
_BLOCK = 1 << 16

_BASE_RATE = np.array([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])  # weights that use frequency and length only

Single = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Topics:
    """Latent topics of the reader's own documents, and the weights with which they predict words."""

    lexicon: Lexicon
    law: Geometric
    words: Single
    """The direction of every word of the reader's vocabulary, of length 1 (0 for a word that has none)."""
    cells: Single
    """The contribution of a cell of each value to a document's place: (steps, cells, dimensions)."""
    weights: FloatArray

    @classmethod
    def learned(cls, lexicon: Lexicon, law: Geometric, rng: np.random.Generator) -> Topics | None:
        """Learn topics from the reader's own documents; None if there are too few, or if sketches have
        several rows."""
        counts = lexicon.own.counts()
        if lexicon.family.rows > 1 or min(counts.shape) <= DIMENSIONS or counts.nnz < 10 * DIMENSIONS:
            return None
        directions = _directions(counts, lexicon, rng)
        parts = _cell_parts(directions, lexicon, law)
        return cls(lexicon, law, _unit(directions), parts, _BASE_RATE)._fitted(rng)

    def placed(self, sketch: Sketch, lengths: IntArray) -> Placed:
        """Place the documents of a noisy sketch among the topics."""
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
        """Add noise to own documents as in releases, and learn how their places predict their words."""
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
        """The probability that each word is in each document, from all cells but its own."""
        signs = self.signs(cells, priors)
        logit = signs @ self.topics.weights[:-1] + self.topics.weights[-1]
        chance: FloatArray = 1 / (1 + np.exp(-np.clip(logit, -30, 30)))
        return np.clip(chance, 1e-9, 1 - 1e-9)

    def signs(self, cells: Cells, priors: WordPriors) -> FloatArray:
        """The predictors of a word: likeness, base rate, their product, likeness squared, and the document's
        length."""
        rate = np.log(priors.presence / (1 - priors.presence))[cells.words.codes]
        alike = self._likeness(cells)
        relative = self.lengths[cells.documents] / self.topics.lexicon.average
        return np.stack((alike, rate, alike * rate, alike**2, np.log(relative + 1e-3)), axis=1)

    def _likeness(self, cells: Cells) -> FloatArray:
        """The cosine between the word and the document without the word's cell; 0 for words outside the
        vocabulary."""
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
    """Own sketches with noise as in releases, to learn from; never released, so any generator will do."""
    table = exact.dense().astype(np.int32)
    flat = table.reshape(-1)
    for first in range(0, flat.size, _BLOCK):
        some = flat[first : first + _BLOCK]
        some += law.of(rng.integers(0, 1 << 64, size=some.size, dtype=np.uint64))
    return CountMin.of_dense(table, exact.family)


def _directions(counts: Any, lexicon: Lexicon, rng: np.random.Generator) -> Single:
    """Word vectors: the right singular vectors of the documents × words table of idf, with rows of unit
    length."""
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
    """Σ over a cell's words of P(word explains the value)·idf·direction, for every value that is told apart.

    P(w explains y) = p_w·l₁(y)/(l₀(y) + Σ_v p_v·l₁(y)); l₀ and l₁ are the probabilities of y without and with
    the word.
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
