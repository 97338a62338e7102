"""Reading noisy counts: what a cell's value says about a word, given what the reader knew before.

    plain       the value, negative ones as 0
    threshold   the value where it is large enough to believe, else 0
    shrink      the posterior mean of the count

The prior of `shrink` comes from the reader's own documents and the released totals: how common the word is,
how often it repeats, how long the document is, how likely other words share the cell, and, where whole
sketches were published, what the document is about. Every reading has an error bar: the posterior's standard
deviation, or that of the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.private.noise import Geometric
from isthmus.private.sketch import HashFamily
from isthmus.private.totals import TotalsRead, read_totals
from isthmus.retrieval import Statistics
from isthmus.text import Tokens

_LEVELS = np.concatenate(([0.02], np.linspace(0.05, 0.95, 19)))  # chances that a word that is there repeats
_MOST = 255  # counts above are taken as they are


@dataclass(frozen=True, eq=False)
class CountEstimate:
    """Counts with an error bar each."""

    mean: FloatArray
    error: FloatArray


@dataclass(frozen=True, eq=False)
class Cells:
    """What is to be read: the noisy values of words in documents, pair by pair."""

    values: NDArray[Any]
    documents: IntArray
    words: Ids


class Reader(Protocol):
    """Turns noisy values into counts."""

    def read(self, cells: Cells) -> CountEstimate: ...


@dataclass(frozen=True, eq=False)
class ThresholdReader:
    """Values from a level on; what lies below is taken for noise, and so are all negative ones at level 0."""

    level: float
    variance: float

    def read(self, cells: Cells) -> CountEstimate:
        """y if y ≥ level else 0, ± the noise."""
        mean = np.where(cells.values >= self.level, cells.values, 0).astype(np.float64)
        return CountEstimate(mean, np.full(len(mean), self.variance**0.5))


@dataclass(frozen=True, eq=False)
class WordPriors:
    """For every word of a vocabulary, in a document of average length: the chance that it is there, how it
    repeats (a position in the levels), and the chance that another word is in its cell."""

    presence: FloatArray
    level: IntArray
    crowding: FloatArray


@dataclass(frozen=True, eq=False)
class Lexicon:
    """What a reader knows of words before it looks at anybody's document."""

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
        """The totals of the reader's own vocabulary."""
        return self.read(self.words)

    @cached_property
    def loads(self) -> FloatArray:
        """How many words other than unknown ones every cell expects in a document of average length."""
        cells = self.family.of_vocabulary(self.words).cells[0]
        loads = np.bincount(cells, -np.log1p(-self._presence(self.known)), self.family.width)
        counts = self.own.counts()
        distinct = np.diff(counts.indptr).mean() if len(self.own) else 0.0
        return np.add(loads, max(0.0, float(distinct - loads.sum())) / self.family.width, dtype=np.float64)

    def distinct(self, lengths: IntArray) -> FloatArray:
        """How many distinct words documents of these lengths have, as the reader's own do: u = a·L^b."""
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
        """The released totals of any vocabulary, shrunk towards what own documents foretell."""
        return read_totals(self.totals, words, self.collection)

    def _presence(self, read: TotalsRead) -> FloatArray:
        documents = max(self.totals.documents, 1)  # a word that is asked for is somewhere, or may be
        return np.clip(read.frequencies / documents, min(0.5 / documents, 0.5), 1 - 1e-7)

    def priors(self, words: Ids) -> WordPriors:
        """The priors of any vocabulary; those of the last one are kept."""
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
"""The chance that the word is in the document, pair by pair, from all that is known but its own cell."""


@dataclass(frozen=True, eq=False)
class Shrink:
    """Posterior means under the law of the noise.

    A word is in a document of length L with chance 1 − (1 − p)^{L/avg}, or with what `context` says, and if
    so c ≥ 1 times with chance (1 − r)·r^{c−1}; another one is in its cell with chance 1 − (1 − ρ)^{L/avg}.
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
        large = (values > _MOST // 2) & (self.law.rate > 0.2)  # so far above the noise that it is the count
        mean = np.where(large, values, mean)
        spread = np.where(large, self.law.variance, np.maximum(square - mean**2, 0.0))
        return CountEstimate(mean, np.sqrt(spread))

    @cached_property
    def _likelihoods(self) -> tuple[list[FloatArray], list[FloatArray]]:
        """Per level and value: the chance of the value if the word is absent; and, over the counts it has if
        present, the sums of the chance times 1, c and c². For a cell of its own, then for a shared one."""
        values = np.arange(-_MOST, _MOST + 1)
        counts = np.arange(1, _MOST + 1)
        probabilities = self.law.probabilities(values[:, None] - counts)
        tail = (1 - _LEVELS[:, None]) * _LEVELS[:, None] ** (counts - 1)
        absent = np.broadcast_to(self.law.probabilities(values), (len(_LEVELS), len(values)))
        alone = [absent, *((tail * counts**power) @ probabilities.T for power in (0, 1, 2))]
        return alone, [_convolved(table, _typical_tail()) for table in alone]


def _typical_tail() -> FloatArray:
    """How often a word that shares the cell stands there: as a word that repeats now and then."""
    repeat = _LEVELS[6]
    falling = np.power(repeat, np.arange(12))
    tail: FloatArray = falling / falling.sum()
    return tail


def _convolved(table: FloatArray, tail: FloatArray) -> FloatArray:
    """The chances of values to which a draw from 1, 2, … with these chances was added."""
    shifted = np.zeros_like(table)
    for more, chance in enumerate(tail, start=1):
        shifted[:, more:] += chance * table[:, :-more]
    return shifted
