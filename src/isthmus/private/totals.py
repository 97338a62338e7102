"""What everybody may know of a field of all silos together: noisy document frequencies and collection counts.

The cells are sums over silos with two-sided geometric noise of rate ε/2 in total (one replaced word moves a
document from one cell to another: sensitivity 2). A reader who has documents of its own knows their share of
every sum exactly and shrinks the rest towards what that share foretells.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import PrivacyError
from isthmus.features import Collection
from isthmus.private.cost import Cost
from isthmus.private.noise import Entropy, Geometric
from isthmus.private.sketch import HashFamily, collection_counts, document_frequencies
from isthmus.tables.ids import FloatArray, Ids, IntArray
from isthmus.text import Tokens

WIDTH = 1 << 18
"""Cells of a sketch of totals: there is one a field, so it can be wide enough to have few collisions."""

_GRID = 512  # sums up to here are shrunk; above, the noise is small beside them
_FEW = 0.1  # documents that a word nobody has seen is worth
_TRUST = 0.5  # how much of its own documents' evidence a silo believes about the others


@dataclass(frozen=True, eq=False)
class Sums:
    """The cells one silo adds to the totals of a field, or all silos together; they add."""

    family: HashFamily
    documents: int
    length: int
    having: IntArray
    standing: IntArray

    @classmethod
    def of(cls, tokens: Tokens, family: HashFamily) -> Sums:
        """Counted from the documents themselves; not to be shown to anybody."""
        having = document_frequencies(tokens, family).dense()[0]
        standing = collection_counts(tokens, family).dense()[0]
        return cls(family, len(tokens), len(tokens.terms), having, standing)

    def __add__(self, other: Sums) -> Sums:
        if self.family != other.family:
            raise PrivacyError("totals of different hash families do not add up")
        return Sums(
            self.family,
            self.documents + other.documents,
            self.length + other.length,
            self.having + other.having,
            self.standing + other.standing,
        )

    def noised(self, *, epsilon_df: float, epsilon_cf: float, entropy: Entropy = os.urandom) -> Totals:
        """The sums with all the noise they need from one hand, as where somebody trusted adds them up."""
        laws = Geometric(epsilon_df / 2), Geometric(epsilon_cf / 2)
        having, standing = (
            cells + law.draw(len(cells), entropy)
            for cells, law in zip((self.having, self.standing), laws, strict=True)
        )
        return Totals(self.family, self.documents, self.length, having, standing, *laws)


@dataclass(frozen=True, eq=False)
class Foreign:
    """What is seen of another silo's documents: their lengths; and for every word of some vocabulary, in how
    many documents its noisy value is positive, and the sum of its values."""

    lengths: IntArray
    words: Ids
    positive: IntArray
    summed: IntArray


@dataclass(frozen=True, eq=False)
class Totals:
    """Noisy sums over all silos, and the laws of their noise; an infinite rate is no noise."""

    family: HashFamily
    documents: int
    length: int
    having: IntArray
    standing: IntArray
    having_law: Geometric
    standing_law: Geometric

    @classmethod
    def worked_out(cls, own: Sums, foreign: Foreign, law: Geometric) -> Totals:
        """From another silo's noisy values themselves, where no totals were released; free, but with noise
        that grows with the root of its documents. Words not looked at are taken to be as in own documents.

        A cell that is empty shows 1 or more with chance q = a/(1 + a), any other with 1/(1 + a) or more.
        """
        ratio, count = law.ratio, len(foreign.lengths)
        false = ratio / (1 + ratio)
        more = 1 + count / max(own.documents, 1)
        having, standing = (np.rint(part * more).astype(np.int64) for part in (own.having, own.standing))
        scale = (1 + ratio) / (1 - ratio)
        found = np.rint((foreign.positive - count * false) * scale).astype(np.int64)
        cells = own.family.of_vocabulary(foreign.words).cells[0]
        for part, mine, more_of_it in ((having, own.having, found), (standing, own.standing, foreign.summed)):
            part[cells] = mine[cells]
            np.add.at(part, cells, more_of_it)  # words may share a cell
        noises = scale * (count * false * (1 - false)) ** 0.5, (count * law.variance) ** 0.5
        laws = (Geometric(max(2**0.5 / noise, 1e-4) if noise else np.inf) for noise in noises)
        documents, length = own.documents + count, own.length + int(foreign.lengths.sum())
        return cls(own.family, documents, length, having, standing, *laws)

    @staticmethod
    def costs(field: str, *, epsilon_df: float, epsilon_cf: float, draw: str) -> list[Cost]:
        """What a release of the totals costs every document it covers; every draw of noise costs again."""
        parts = (("document frequencies", epsilon_df), ("collection counts", epsilon_cf))
        return [
            Cost("totals", (field,), epsilon, 2.0, 2 / epsilon, f"{field} {what}, {draw}")
            for what, epsilon in parts
        ]

    def read(self, words: Ids, own: Collection) -> TotalsRead:
        """Frequencies and occurrences of the words of a vocabulary, by somebody with documents of its own."""
        cells = self.family.of_vocabulary(words).cells[0]
        mine, mine_all = (
            part.frequencies_of(words).astype(np.float64) for part in (own.having, own.standing)
        )
        ours = own.having.documents
        others = max(self.documents - ours, 0)
        prior = (mine + _FEW) * others / (ours + 1)
        rest = _shrunk(self.having[cells] - mine, prior, _FEW + _TRUST * mine, self.having_law)
        having = mine + np.minimum(rest, others)
        repeats = (mine_all + 2 * _mean_repeat(own)) / (mine + 2)
        return TotalsRead(having, self._occurrences(cells, having, mine_all, repeats), repeats)

    def _occurrences(
        self, cells: IntArray, having: FloatArray, mine: FloatArray, repeats: FloatArray
    ) -> FloatArray:
        """What frequency and repetition foretell and what was released, each by its precision."""
        foretold = having * np.maximum(repeats, 1.0)
        doubt, noise = (0.25 * foretold) ** 2 + 1.0, self.standing_law.variance
        blended = (foretold * noise + self.standing[cells] * doubt) / (doubt + noise)
        return np.maximum(blended, np.maximum(having, mine))


@dataclass(frozen=True, eq=False)
class TotalsRead:
    """For every word of a vocabulary: documents that have it, times it stands there, times per document."""

    frequencies: FloatArray
    occurrences: FloatArray
    repeats: FloatArray


def _mean_repeat(own: Collection) -> float:
    having = float(own.having.frequencies.sum())
    return own.standing.frequencies.sum() / having if having else 1.0


def _shrunk(noisy: NDArray[Any], mean: FloatArray, shape: FloatArray, law: Geometric) -> FloatArray:
    """E[x | x + noise], word by word, for x as own documents foretell or, now and then, of any frequency.

    The prior is a negative binomial of this mean and shape and, one time in ten, 1/(x + 1)^1.5: silos on
    other topics have other words. Sums are over a grid; large ones, whose noise is small, are left alone.
    """
    found = np.maximum(noisy.astype(np.float64), 0.0)
    if np.isinf(law.rate):
        return found
    small = np.flatnonzero(noisy < _GRID - 20 / law.rate)
    for rows in np.array_split(small, max(1, len(small) * _GRID // (1 << 22))):
        found[rows] = _posterior_means(noisy[rows], mean[rows], shape[rows], law)
    return found


def _posterior_means(noisy: NDArray[Any], mean: FloatArray, shape: FloatArray, law: Geometric) -> FloatArray:
    from scipy.special import gammaln

    x = np.arange(_GRID)
    size, odds = shape[:, None], (mean / (shape + mean))[:, None]
    foretold = gammaln(x + size) - gammaln(x + 1) - gammaln(size) + size * np.log1p(-odds)
    foretold = foretold + x * np.log(np.maximum(odds, 1e-12))
    anything = (x + 1) ** -1.5
    prior = 0.9 * np.exp(foretold) + 0.1 * anything / anything.sum()
    weight = np.log(prior) - law.rate * np.abs(noisy[:, None] - x)
    weight = np.exp(weight - weight.max(axis=1, keepdims=True))
    means: FloatArray = (weight @ x) / weight.sum(axis=1)
    return means
