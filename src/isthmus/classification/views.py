"""Views of texts: matrices with a row per text, the input of label rankers.

Words        TF-IDF of word n-grams
Characters   TF-IDF of character n-grams
CountedGrams      either of them over texts known beforehand, whose n-grams are counted once
Encoded      an encoder's vectors
Beside       several views side by side
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray
from isthmus.encoders import Encoder, encode_cached
from isthmus.errors import DataError


class View(Protocol):
    """A representation of texts: fitted on training texts, it turns any texts into rows."""

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], Any]:
        """Return the function from texts to a matrix (SciPy sparse or NumPy) with rows of unit length."""


class Grams(Protocol):
    """N-grams to count; those in fewer than `least` training texts are ignored."""

    @property
    def least(self) -> int:
        """The least number of training texts that must have an n-gram."""

    def options(self) -> dict[str, Any]:
        """The arguments of scikit-learn's vectoriser."""


@dataclass(frozen=True)
class Words:
    """TF-IDF of word n-grams (1 + ln tf); `marks` counts punctuation as words, `stop` drops stop words."""

    longest: int = 1
    least: int = 1
    stop: bool = False
    marks: bool = False

    def options(self) -> dict[str, Any]:
        """The arguments of scikit-learn's vectoriser."""
        return {
            "ngram_range": (1, self.longest),
            "stop_words": "english" if self.stop else None,
            "token_pattern": r"(?u)\b\w+\b|[^\w\s]" if self.marks else r"(?u)\b\w\w+\b",
        }

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], Any]:
        return CountedGrams.of(self, texts).fit(texts)


@dataclass(frozen=True)
class Characters:
    """TF-IDF of character n-grams inside words (1 + ln tf)."""

    shortest: int = 2
    longest: int = 5
    least: int = 2

    def options(self) -> dict[str, Any]:
        """The arguments of scikit-learn's vectoriser."""
        return {"analyzer": "char_wb", "ngram_range": (self.shortest, self.longest)}

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], Any]:
        return CountedGrams.of(self, texts).fit(texts)


@dataclass(frozen=True, eq=False)
class CountedGrams:
    """N-grams of known texts, counted once; vocabulary and weights come from the training texts alone.

    A row is (1 + ln tf)·(1 + ln((1 + n)/(1 + df))), scaled to unit length, with n and df counted in the
    training texts and without n-grams that these lack. It is the same as from a vectoriser fitted on them,
    for any choice of training texts.
    """

    grams: Grams
    rows: Mapping[str, int]
    counts: Any
    vectoriser: Any

    @classmethod
    def of(cls, grams: Grams, texts: Iterable[str]) -> CountedGrams:
        """Count the n-grams of these texts."""
        from scipy.sparse import csr_array
        from sklearn.feature_extraction.text import CountVectorizer

        known = list(dict.fromkeys(texts))
        vectoriser = CountVectorizer(**grams.options(), dtype=np.float64)
        try:
            counts = csr_array(vectoriser.fit_transform(known))
        except ValueError as error:
            raise DataError(f"no word to learn from in {len(known)} texts: {error}") from None
        np.log(counts.data, out=counts.data)
        counts.data += 1
        return cls(grams, {text: row for row, text in enumerate(known)}, counts, vectoriser)

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], Any]:
        frequencies = np.bincount(self._chosen(texts).indices, minlength=self.counts.shape[1])
        mask = frequencies >= max(1, self.grams.least)
        if not mask.any():
            raise DataError(
                f"no word to learn from in {len(texts)} texts: none is in {self.grams.least} of them"
            )
        place = np.where(mask, np.cumsum(mask) - 1, -1).astype(np.int32)  # liblinear reads 32-bit indices
        rarity = 1 + np.log((1 + len(texts)) / (1 + frequencies[mask]))
        return lambda queries: _weighed(self._chosen(queries), place, rarity)

    def _chosen(self, texts: Sequence[str]) -> Any:
        """Return the counts of these texts; a new text is counted now, with only n-grams that known texts
        have."""
        from scipy.sparse import csr_array, vstack

        strange = [text for text in dict.fromkeys(texts) if text not in self.rows]
        if not strange:
            return self.counts[[self.rows[text] for text in texts]]
        counted = csr_array(self.vectoriser.transform(strange))
        counted.data = 1 + np.log(counted.data)
        first = self.counts.shape[0]
        new = {text: first + row for row, text in enumerate(strange)}
        rows = [self.rows[text] if text in self.rows else new[text] for text in texts]
        return vstack((self.counts, counted), format="csr")[rows]


def _weighed(counts: Any, place: NDArray[np.int32], rarity: FloatArray) -> Any:
    """Rows of TF-IDF over the columns that have a place."""
    from scipy.sparse import csr_array

    columns = place[counts.indices]
    known = columns >= 0
    ends = np.concatenate(([0], np.cumsum(known)))[counts.indptr].astype(np.int32)
    columns = columns[known]
    values = counts.data[known] * rarity[columns]
    row = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    lengths = np.sqrt(np.bincount(row, values**2, minlength=len(ends) - 1))
    values /= lengths[row]
    return csr_array((values, columns, ends), shape=(len(ends) - 1, len(rarity)))


@dataclass(frozen=True)
class Encoded:
    """An encoder's vectors; nothing is fitted."""

    encoder: Encoder

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], Any]:
        return lambda queries: encode_cached(self.encoder, queries)


@dataclass(frozen=True)
class Beside:
    """Several views side by side, each multiplied by its weight."""

    views: tuple[View, ...]
    weights: tuple[float, ...]

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], Any]:
        from scipy.sparse import csr_array, hstack

        parts = [view.fit(texts) for view in self.views]

        def transform(queries: Sequence[str]) -> Any:
            pairs = zip(parts, self.weights, strict=True)
            return hstack([csr_array(part(queries)) * weight for part, weight in pairs], format="csr")

        return transform


@dataclass(frozen=True, eq=False)
class Sight:
    """Texts with the views of a panel; each view is computed when it is first used."""

    texts: Sequence[str]
    fitted: dict[View, Callable[[Sequence[str]], Any]]
    _seen: dict[View, Any] = field(default_factory=dict)

    def __getitem__(self, view: View) -> Any:
        if view not in self._seen:
            self._seen[view] = self.fitted[view](self.texts)
        return self._seen[view]
