"""Text as integers: one tokeniser for retrieval, features and sketches.

>>> tokens = tokenise(["Fast Fourier transforms", "the transform of a wave"])
>>> tokens.words(1)
['transform', 'wave']
>>> tokens.counts().toarray()
array([[1, 1, 1, 0],
       [0, 0, 1, 1]])

A token is a run of letters and digits of any script (marks belong to their letter; everything else,
underscores and apostrophes included, separates), after Unicode compatibility normalisation (NFKC) and
lower-casing. Stop words go, or stay where and as they are (`in_place`); the rest is stemmed. Texts are cut at
the level of bytes and every distinct word is looked at once, so the cost is that of reading the text, not of
making Python strings. Scripts written without spaces are not segmented.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.arrays import Ids, IntArray, frozen
from isthmus.errors import ConfigError
from isthmus.tables import offsets_of

STOP_WORDS = frozenset(Path(__file__).with_name("stop_words.txt").read_text(encoding="ascii").split())
"""English words that carry no topic, with what an apostrophe leaves behind (don't, it's, we'll)."""

_SEPARATORS = r"[^\pL\pN\pM]+"
_MARK = r"[\pM\x{FF9E}\x{FF9F}]"  # the two half-width signs are marks once normalised
_MANY_MARKS = rf"({_MARK}{{30}}){_MARK}+"
_IS_WORD = np.zeros(256, dtype=bool)
_IS_WORD[[*b"abcdefghijklmnopqrstuvwxyz0123456789"]] = True
_IS_WORD[128:] = True  # part of a longer character; separators beyond ASCII are blanked beforehand


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """The terms of many texts in their order: those of text i are `terms[offsets[i]:offsets[i + 1]]`.

    `stopped` says which of them are stop words, where these were left in their places; None where they went.
    """

    terms: Ids
    offsets: IntArray
    stopped: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        """The number of texts."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """The number of terms of every text."""
        return np.diff(self.offsets)

    def words(self, text: int) -> list[str]:
        """The terms of one text as strings."""
        return self.terms[self.offsets[text] : self.offsets[text + 1]].tolist()

    def counts(self) -> Any:
        """How often every text has every term: a SciPy CSR array, texts × vocabulary, columns sorted."""
        from scipy.sparse import csr_array

        ones = np.ones(len(self.terms), dtype=np.int64)
        shape = (len(self), len(self.terms.vocabulary))
        table = csr_array((ones, self.terms.codes.copy(), self.offsets.copy()), shape=shape)
        table.sum_duplicates()
        return table

    def __repr__(self) -> str:
        size = len(self.terms.vocabulary)
        return f"Tokens: {len(self):,} texts, {len(self.terms):,} tokens, {size:,} terms"


@dataclass(frozen=True)
class Tokeniser:
    """How texts become terms; `stemmer` is a Snowball language, or None to leave words as they are."""

    stemmer: str | None = "english"
    stop_words: frozenset[str] = field(default=STOP_WORDS, repr=False)

    def __post_init__(self) -> None:
        from Stemmer import algorithms

        if self.stemmer is not None and self.stemmer not in algorithms():
            raise ConfigError(
                f"no stemmer for {self.stemmer!r}", key=self.stemmer, value=self.stemmer, known=algorithms()
            )

    @property
    def name(self) -> str:
        """A digest of stemmer, its version and stop words: equal for tokenisers that yield the same terms."""
        from Stemmer import version

        parts = [self.stemmer or "", version() if self.stemmer else "", *sorted(self.stop_words)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()

    def __call__(self, texts: Iterable[str]) -> Tokens:
        """Cut, stop and stem."""
        return self._tokens(texts, stop=True)

    def in_place(self, texts: Iterable[str]) -> Tokens:
        """Cut and stem; stop words stay where they are and as they are, and `stopped` says which.

        The others are, in their order, exactly those of a call.
        """
        return self._tokens(texts, stop=False)

    def query(self, text: str) -> Tokens:
        """The terms of one query: its content words; all its words, `stopped`, where it has only stop words.

        >>> ENGLISH.query("to be or not to be").words(0)
        ['to', 'be', 'or', 'not', 'to', 'be']
        """
        content = self([text])
        return content if len(content.terms) else self.in_place([text])

    def _tokens(self, texts: Iterable[str], *, stop: bool) -> Tokens:
        words, texts_of_words, count = _cut(texts)
        encoded = words.dictionary_encode()
        spelled = encoded.dictionary.to_pylist()
        is_stop = np.fromiter((word in self.stop_words for word in spelled), dtype=bool, count=len(spelled))
        chosen = ~is_stop if stop else np.ones(len(spelled), dtype=bool)
        terms = Ids.of(self._stems(list(compress(spelled, chosen.tolist()))))
        codes = np.full(len(spelled), -1, dtype=np.int64)
        codes[chosen] = terms.codes
        places = encoded.indices.to_numpy()
        mask = chosen[places]
        return Tokens(
            Ids(frozen(codes[places][mask]), terms.vocabulary),
            offsets_of(texts_of_words[mask], count),
            None if stop else frozen(is_stop[places]),
        )

    def _stems(self, words: list[str]) -> list[str]:
        """The stem of every content word; a stop word is left as it is."""
        from Stemmer import Stemmer

        if self.stemmer is None:
            return words
        stems = Stemmer(self.stemmer).stemWords(words)
        return [word if word in self.stop_words else stem for word, stem in zip(words, stems, strict=True)]


ENGLISH = Tokeniser()
"""The default tokeniser of all of Isthmus."""


def tokenise(texts: Iterable[str]) -> Tokens:
    """The terms of English texts."""
    return ENGLISH(texts)


def _cut(texts: Iterable[str]) -> tuple[pa.LargeStringArray, IntArray, int]:
    """All words one after the other, the text of every word, and the number of texts."""
    column = pc.utf8_lower(_plain(_column(list(texts))))
    bounds, data = _buffers(column)
    in_word = _IS_WORD[data]
    begins = in_word.copy()
    begins[1:] &= ~in_word[:-1]
    inner = bounds[:-1][np.diff(bounds) > 0]
    begins[inner] = in_word[inner]  # a text's first word does not continue the text before
    starts = np.flatnonzero(begins)
    words = _strings(data[in_word], np.flatnonzero(begins[in_word]))
    return words, np.searchsorted(bounds, starts, side="right") - 1, len(column)


def _column(texts: list[str]) -> pa.LargeStringArray:
    try:
        return pa.array(texts, type=pa.large_string())
    except UnicodeEncodeError:  # half a surrogate pair, as JSON can spell it, separates words
        whole = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        return pa.array(whole, type=pa.large_string())


def _plain(column: pa.LargeStringArray) -> pa.LargeStringArray:
    """Normalised, with blanks for separators, where a text goes beyond ASCII; the others need neither."""
    beyond = pc.invert(pc.string_is_ascii(column))
    if not pc.any(beyond, min_count=0).as_py():
        return column
    # Normalising sorts the marks upon a letter in the square of their number: no language has more than 30
    # (Unicode's Stream-Safe Text Format, UAX #15).
    bounded = pc.replace_substring_regex(column.filter(beyond), _MANY_MARKS, r"\1")
    rare = pc.utf8_normalize(bounded, form="NFKC")
    return pc.replace_with_mask(column, beyond, pc.replace_substring_regex(rare, _SEPARATORS, " "))


def _buffers(column: pa.LargeStringArray) -> tuple[IntArray, NDArray[np.uint8]]:
    """The offsets of the strings and their bytes, without a copy."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64, count=len(column) + column.offset + 1)[column.offset :]
    octets = np.frombuffer(data, dtype=np.uint8) if data is not None else np.empty(0, dtype=np.uint8)
    return bounds - bounds[0], octets[bounds[0] : bounds[-1]]


def _strings(octets: NDArray[np.uint8], starts: IntArray) -> pa.LargeStringArray:
    """The bytes as strings that begin at these positions and end where the next one begins."""
    offsets = np.append(starts, len(octets)).astype(np.int64)
    return pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(offsets), pa.py_buffer(octets))
