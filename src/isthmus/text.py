"""Text as integers: one tokeniser for retrieval, features and sketches.

>>> tokens = tokenise(["Fast Fourier transforms", "the transform of a wave"])
>>> tokens.words(1)
['transform', 'wave']
>>> tokens.counts().toarray()
array([[1, 1, 1, 0],
       [0, 0, 1, 1]])

A token is a run of letters and digits of any script (marks belong to their letter; everything else,
underscores and apostrophes included, separates), after Unicode compatibility normalisation (NFKC) and
lower-casing. Stop words are removed, or left unchanged in their places (`in_place`); other words are stemmed.
Texts are cut as bytes and every distinct word is processed once, so the cost is that of reading the text, not
of making Python strings.

Chinese, Japanese and Korean are cut into overlapping pairs of characters, in whatever text they stand; a
single character is a stop word.

>>> tokenise(["北京大学 library"]).words(0)
['北京', '京大', '大学', 'librari']
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.arrays import Ids, IntArray, frozen
from isthmus.errors import ConfigError

STOP_WORDS_FOLDER = Path(__file__).with_name("stop_words")
STOP_WORDS = frozenset((STOP_WORDS_FOLDER / "en.txt").read_text(encoding="utf-8").split())
"""English words that carry no topic, and the remains of words with an apostrophe (don't, it's, we'll)."""

_SEPARATORS = r"[^\pL\pN\pM]+"
_MARK = r"[\pM\x{FF9E}\x{FF9F}]"  # the two half-width signs are marks once normalised
_MANY_MARKS = rf"({_MARK}{{30}}){_MARK}+"
_MANY_BYTES = 62  # bytes of 31 marks, at least
_CUTTING = "pairs of Chinese, Japanese and Korean characters"  # change it if tokens change
CJK = "[々-〇ぁ-ヿㄅ-ㄯㆠ-ㆿㇰ-ㇿ㐀-䶿一-鿿가-힣豈-龎𠀀-\U0003fffd]"
_VARIANTS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")  # variation selectors
_RUNS = re.compile(f"{CJK}+|[^{CJK[1:]}+")
_IS_CJK, _HAS_CJK = re.compile(CJK).match, re.compile(CJK).search
_FIRST_CJK = 0xE3  # lowest first byte of a CJK character in UTF-8
# bytes from 128 on are parts of longer characters; separators beyond ASCII are blanked beforehand
_IS_WORD = bytes(sign in b"abcdefghijklmnopqrstuvwxyz0123456789" or sign >= 128 for sign in range(256))

BLOCK = 3_000
"""Number of texts that are cut at once: their data fit the processor's caches."""
_NOTHING, _ZERO = np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
_ASCII_WORDS = re.compile("[a-z0-9]+")


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """The terms of many texts in their order: those of text i are `terms[offsets[i]:offsets[i + 1]]`.

    `stopped` marks the stop words if they were left in their places; None if they were removed.
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
        """A digest of the rules for cutting texts, the stemmer with its version, and the stop words: equal
        for tokenisers that yield the same terms."""
        from Stemmer import version

        parts = [_CUTTING, self.stemmer or "", version() if self.stemmer else "", *sorted(self.stop_words)]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()

    def __call__(self, texts: Iterable[str]) -> Tokens:
        """The terms of texts: cut into words, with stop words removed and the rest stemmed."""
        return self._tokens(texts, stop=True)

    def in_place(self, texts: Iterable[str]) -> Tokens:
        """Cut and stem; stop words are left unchanged in their places and marked in `stopped`.

        The other terms are, in their order, exactly those of a call.
        """
        return self._tokens(texts, stop=False)

    def query(self, text: str) -> Tokens:
        """The terms of one query: its content words or, if all are stop words, all its words, marked in
        `stopped`.

        >>> ENGLISH.query("to be or not to be").words(0)
        ['to', 'be', 'or', 'not', 'to', 'be']
        """
        if not text.isascii():
            content = self([text])
            return content if len(content.terms) else self.in_place([text])
        words = _ASCII_WORDS.findall(text.lower())
        chosen = [word for word in words if word not in self.stop_words] or words
        stems = self.stems(chosen)
        vocabulary = sorted(set(stems))
        place = {stem: at for at, stem in enumerate(vocabulary)}
        codes = frozen(np.array([place[stem] for stem in stems], dtype=np.int64))
        stopped = None if chosen and chosen[0] not in self.stop_words else np.ones(len(words), dtype=bool)
        terms = Ids(codes, pa.array(vocabulary, type=pa.large_string()))
        vars(terms)["words"] = vocabulary  # sets the cached property, which would read the array back
        return Tokens(terms, np.array([0, len(stems)]), stopped)

    def _tokens(self, texts: Iterable[str], *, stop: bool) -> Tokens:
        cut = Cut.of(texts)
        is_stop = np.fromiter(map(self.is_stop, cut.words), dtype=bool, count=len(cut.words))
        if not stop:
            terms = Ids.of(self.stems(cut.words))
            return Tokens(terms[cut.places], cut.offsets, frozen(is_stop[cut.places]))
        terms = Ids.of(self.stems(list(compress(cut.words, (~is_stop).tolist()))))
        codes = np.full(len(cut.words), -1, dtype=np.int64)
        codes[~is_stop] = terms.codes
        every = codes[cut.places]
        content = every >= 0
        offsets = np.concatenate(([0], np.cumsum(content)))[cut.offsets]
        return Tokens(Ids(frozen(every[content]), terms.vocabulary), offsets)

    def is_stop(self, word: str) -> bool:
        """Whether a word carries no topic; a single Chinese, Japanese or Korean character carries none
        either."""
        return word in self.stop_words or (len(word) == 1 and _IS_CJK(word) is not None)

    def stems(self, words: list[str]) -> list[str]:
        """The stem of every content word; a stop word is left as it is."""
        from Stemmer import Stemmer

        if self.stemmer is None:
            return words
        stems = Stemmer(self.stemmer, 0).stemWords(words)
        return [word if word in self.stop_words else stem for word, stem in zip(words, stems, strict=True)]


ENGLISH = Tokeniser()
"""The default tokeniser."""


def tokenise(texts: Iterable[str]) -> Tokens:
    """The terms of English texts."""
    return ENGLISH(texts)


@dataclass(frozen=True, eq=False)
class Cut:
    """Texts as words: the distinct words, the position of every word among them, and the offsets of the
    texts."""

    words: list[str]
    places: NDArray[np.int32]
    offsets: IntArray

    @classmethod
    def of(cls, texts: Iterable[str]) -> Cut:
        """Cut texts into words, normalised and in lower case."""
        rest, runs, offsets = iter(texts), [_strings(_NOTHING, _ZERO)], [_ZERO]
        while some := list(islice(rest, BLOCK)):
            strings, ends = _runs(some)
            runs.append(strings)
            offsets.append(ends + offsets[-1][-1])
        # distinct words with their trailing separators, then distinct words without separators
        encoded = pa.chunked_array(runs).dictionary_encode().chunks or [runs[0].dictionary_encode()]
        bounds, data = buffers(encoded[0].dictionary)
        in_word = _in_word(data)
        ends = np.concatenate(([0], np.cumsum(in_word)))[bounds]
        words = _strings(data[in_word], ends).dictionary_encode()
        place = words.indices.to_numpy()
        places = np.concatenate([place[chunk.indices.to_numpy()] for chunk in encoded])
        whole = cls(words.dictionary.to_pylist(), places, np.concatenate(offsets))
        return whole._segmented() if data.max(initial=0) >= _FIRST_CJK else whole

    def _segmented(self) -> Cut:
        """The same texts with Chinese, Japanese and Korean words cut into pairs of characters."""
        parts = [_segments(word) if _HAS_CJK(word) else [word] for word in self.words]
        place: dict[str, int] = {}
        flat = np.array([place.setdefault(part, len(place)) for part in chain.from_iterable(parts)], np.int32)
        sizes = np.array([len(part) for part in parts])
        first, repeated = (np.cumsum(sizes) - sizes)[self.places], sizes[self.places]
        # replace every word by its parts, which are consecutive in `flat` from `first` on
        ends = np.cumsum(repeated)
        within = np.arange(repeated.sum()) - np.repeat(ends - repeated, repeated)
        places = flat[np.repeat(first, repeated) + within]
        return Cut(list(place), places, np.concatenate(([0], ends))[self.offsets])


def _runs(texts: list[str]) -> tuple[pa.LargeStringArray, IntArray]:
    """Every word of texts in lower case, with the separators after it; and the number of words before each
    text's end."""
    bounds, data = buffers(_lower(_column(texts)))
    in_word = _in_word(data)
    begins = np.append(in_word, True)
    np.greater(in_word[1:], in_word[:-1], out=begins[1:-1])
    inner = bounds[:-1][bounds[:-1] < bounds[1:]]
    begins[inner] = in_word[inner]  # a text's first word does not continue the text before
    starts = np.flatnonzero(begins)  # the last one is the end of the data
    return _strings(data, starts), np.searchsorted(starts[:-1], bounds[1:])


def _in_word(octets: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return np.frombuffer(octets.tobytes().translate(_IS_WORD), dtype=bool)


def _segments(word: str) -> list[str]:
    """The characters of Chinese, Japanese and Korean text, each followed by its pair with the next; other
    text stays as it is."""
    segments: list[str] = []
    for run in _RUNS.findall(_VARIANTS.sub("", word)):
        if not _IS_CJK(run):
            segments.append(run)
            continue
        pairs = [run[at : at + 2] for at in range(len(run))]
        segments += [part for pair in pairs for part in (pair[0], pair)][:-1]
    return segments


def _column(texts: list[str]) -> pa.LargeStringArray:
    try:
        return pa.array(texts, type=pa.large_string())
    except UnicodeEncodeError:  # a lone surrogate, which JSON can spell, separates words
        whole = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        return pa.array(whole, type=pa.large_string())


def _lower(column: pa.LargeStringArray) -> pa.LargeStringArray:
    """Texts in lower case. Those beyond ASCII are also normalised, with blanks for separators; ASCII texts
    need neither."""
    beyond = pc.invert(pc.string_is_ascii(column))
    if not pc.any(beyond, min_count=0).as_py():
        return pc.ascii_lower(column)
    # Normalisation takes time quadratic in the marks on a letter. No language has more than 30 (Unicode's
    # Stream-Safe Text Format, UAX #15), so further marks are cut.
    rare = column.filter(beyond)
    if pc.max(pc.binary_length(rare)).as_py() >= _MANY_BYTES:  # compiling the pattern takes milliseconds
        rare = pc.replace_substring_regex(rare, _MANY_MARKS, r"\1")
    rare = pc.utf8_normalize(rare, form="NFKC")
    plain = pc.replace_with_mask(column, beyond, pc.replace_substring_regex(rare, _SEPARATORS, " "))
    return pc.utf8_lower(plain)


def buffers(column: pa.LargeStringArray) -> tuple[IntArray, NDArray[np.uint8]]:
    """The offsets of the strings and their bytes, without a copy."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64, count=len(column) + column.offset + 1)[column.offset :]
    octets = np.frombuffer(data, dtype=np.uint8) if data is not None else _NOTHING
    return bounds - bounds[0], octets[bounds[0] : bounds[-1]]


def _strings(octets: NDArray[np.uint8], bounds: IntArray) -> pa.LargeStringArray:
    """The bytes as strings; `bounds` has the beginning of each, and the end of the last."""
    return pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(octets))
