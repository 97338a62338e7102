"""Synthetic text with Zipfian words and topics.

A document has a topic, and within it one main and perhaps one minor aspect; a query asks for an aspect.
Documents about the aspect are relevant whatever their words are (grade 2 as the main, 1 as the minor one),
and documents differ in their words: none uses more than a part of an aspect's vocabulary. So judgements do
not depend on any retrieval formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.errors import DataError
from isthmus.partition import divide, move_share
from isthmus.randomness import Streams
from isthmus.report import progress
from isthmus.tables import (
    SPLITS,
    Corpus,
    Documents,
    Ids,
    IntArray,
    Qrels,
    Queries,
    frozen,
    offsets_of,
    rows_of,
)

Rng = np.random.Generator

VOCABULARY = 50_000
ASPECTS = 8
"""Number of aspects of a topic."""
ABOUT = 20
"""Approximate number of documents per main aspect."""
TOPIC_WORDS, ASPECT_WORDS = 307, 41
"""Number of words of a topic and of an aspect; prime, so that every stride visits all of them."""
DIALECT = (60, 8)
"""Number of these words that one document uses."""
CHIEF = 4
"""One in so many of these words is a chief one, which documents use most and queries name first."""
BODY, TITLE = (0.62, 0.24, 0.1, 0.04), (0.3, 0.4, 0.2, 0.1)
"""Shares of everyday words, and of words of the topic, the main and the minor aspect."""


def text(
    documents: int, queries: int, silos: int = 4, *, seed: int = 0, words: int = 1000, moved: float = 0.5
) -> Corpus:
    """Build a collection of about `words` words per document, dealt into silos.

    Whole topics have a home silo; then the share `moved` of all documents and queries moves by a hash of its
    name, from topical silos (0) to random ones (1). Queries on one aspect share a split.
    """
    if min(documents, queries, silos, words) < 1 or documents < silos:
        raise DataError(
            f"{documents} documents, {queries} queries and {silos} silos of {words} words",
            cure="at least one of each, and a document for every silo",
        )
    streams = Streams(seed).under("synthetic text", documents)
    language = _Language(max(silos, documents // (ASPECTS * ABOUT)), streams("language"))
    about = _Subjects.drawn(documents, language.topics, streams("subjects"))
    titles, bodies = _written(language, about, words, streams)
    aspects = _aspects_of_queries(about, queries, streams("queries"))
    ids = tuple(f"d{number}" for number in range(1, documents + 1))
    names = tuple(f"q{number}" for number in range(1, queries + 1))
    return Corpus(
        "synthetic text",
        Documents(ids, titles, bodies, frozen(move_share(ids, about.main // ASPECTS % silos, moved, silos))),
        Queries(
            names,
            language.questions(aspects, streams("questions")),
            frozen(move_share(names, aspects // ASPECTS % silos, moved, silos)),
            _splits(aspects, streams("splits")),
        ),
        about.judgements(aspects, names, ids),
        tuple(f"silo{number + 1}" for number in range(silos)),
    )


@dataclass(frozen=True)
class _Subjects:
    """Main and minor aspect of every document, the minor -1 for none; aspect a is of topic a // ASPECTS."""

    main: IntArray
    minor: IntArray

    @classmethod
    def drawn(cls, documents: int, topics: int, rng: Rng) -> _Subjects:
        """Draw aspects at random. About half of all documents have a minor one, mostly of their own topic."""
        main = rng.integers(topics * ASPECTS, size=documents)
        sibling = main - main % ASPECTS + (main + rng.integers(1, ASPECTS, size=documents)) % ASPECTS
        foreign = rng.integers(topics * ASPECTS, size=documents)
        minor = np.where(rng.random(documents) < 0.8, sibling, foreign)
        return cls(main, np.where((rng.random(documents) < 0.5) & (minor != main), minor, -1))

    def judgements(self, wanted: IntArray, names: tuple[str, ...], ids: tuple[str, ...]) -> Qrels:
        """Judge documents: 2 with a query's aspect as the main one, 1 as the minor one."""
        queries, documents, grades = [], [], []
        for aspects, grade in ((self.main, 2), (self.minor, 1)):
            offsets = offsets_of(aspects + 1, int(max(aspects.max(), wanted.max())) + 2)  # -1 is a group too
            matching = np.argsort(aspects, kind="stable")[rows_of(offsets, wanted + 1)]
            queries.append(np.repeat(np.arange(len(wanted)), np.diff(offsets)[wanted + 1]))
            documents.append(matching)
            grades.append(np.full(len(matching), grade))
        rows = Ids.of(names)[np.concatenate(queries)], Ids.of(ids)[np.concatenate(documents)]
        return Qrels.of(*rows, np.concatenate(grades))


def _aspects_of_queries(about: _Subjects, queries: int, rng: Rng) -> IntArray:
    """Return the aspect of every query: all that have documents, in random order, then the same again."""
    return np.resize(rng.permutation(np.unique(about.main)), queries)


def _splits(aspects: IntArray, rng: Rng) -> tuple[str, ...]:
    if len(np.unique(aspects)) < len(SPLITS):
        return (SPLITS[-1],) * len(aspects)
    return tuple(SPLITS[part] for part in divide(len(aspects), (0.6, 0.2, 0.2), rng, groups=aspects).tolist())


class _Language:
    """The words of everyday language, of every topic and of every aspect."""

    def __init__(self, topics: int, rng: Rng) -> None:
        self.topics = topics
        self.words = pa.array(_spelled(VOCABULARY))
        self._everyday = _zipf(VOCABULARY, 1 << 20)
        self._ranks = [_zipf(size, 1 << 12) for size in DIALECT]
        rare = VOCABULARY // 500  # the commonest words belong to no topic
        self._topic_words = rng.integers(rare, VOCABULARY, size=(topics, TOPIC_WORDS), dtype=np.int32)
        self._aspect_words = rng.integers(
            rare, VOCABULARY, size=(topics * ASPECTS, ASPECT_WORDS), dtype=np.int32
        )

    def written(self, about: _Subjects, lengths: IntArray, shares: tuple[float, ...], rng: Rng) -> list[str]:
        """Generate a text of the given length for every document."""
        document = np.repeat(np.arange(len(lengths)), lengths)
        minor = about.minor[document]
        source = np.searchsorted(
            np.cumsum(shares)[:-1], rng.random(len(document), dtype=np.float32), side="right"
        )
        source[(source == 3) & (minor < 0)] = 1
        tokens = self._everyday[rng.integers(len(self._everyday), size=len(document))]
        for kind, subjects in ((1, about.main // ASPECTS), (2, about.main), (3, about.minor)):
            at = np.flatnonzero(source == kind)
            tokens[at] = self._in_dialect(kind == 1, subjects, document[at], rng)
        return self._joined(tokens, lengths)

    def _in_dialect(
        self, of_topic: bool, subjects: IntArray, document: IntArray, rng: Rng
    ) -> NDArray[np.int32]:
        """Draw words on a subject; every document strides through them from one of the chief ones."""
        listed, ranks = (
            (self._topic_words, self._ranks[0]) if of_topic else (self._aspect_words, self._ranks[1])
        )
        width = listed.shape[1]
        start = rng.integers(width // CHIEF, size=len(subjects))
        stride = rng.integers(1, width, size=len(subjects))
        rank = ranks[rng.integers(len(ranks), size=len(document))]
        words: NDArray[np.int32] = listed[
            subjects[document], (start[document] + stride[document] * rank) % width
        ]
        return words

    def questions(self, aspects: IntArray, rng: Rng) -> tuple[str, ...]:
        """Generate queries of two or three words of the aspect and one or two of its topic."""
        lengths = rng.integers(3, 6, size=len(aspects))
        words = [
            listed[subjects, rng.integers(listed.shape[1] // share, size=len(aspects))]
            for listed, subjects, share in (
                (self._aspect_words, aspects, CHIEF),
                (self._topic_words, aspects // ASPECTS, CHIEF),
                (self._aspect_words, aspects, 1),
                (self._aspect_words, aspects, 1),
                (self._topic_words, aspects // ASPECTS, 1),
            )
        ]
        mask = np.arange(len(words)) < lengths[:, None]
        return tuple(self._joined(np.stack(words, axis=1)[mask], lengths))

    def _joined(self, tokens: NDArray[np.int32], lengths: IntArray) -> list[str]:
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), self.words.take(pa.array(tokens)))
        joined: list[str] = pc.binary_join(lists, " ").to_pylist()
        return joined


def _written(
    language: _Language, about: _Subjects, words: int, streams: Streams
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    titles: list[str] = []
    bodies: list[str] = []
    size = max(1, 1_000_000 // words)
    for first in progress(range(0, len(about.main), size), label="writing documents"):
        some = _Subjects(about.main[first : first + size], about.minor[first : first + size])
        rng, count = streams("documents", first), len(some.main)
        lengths = np.maximum(1, np.rint(words * np.exp(rng.normal(-0.045, 0.3, size=count)))).astype(np.int64)
        titles += language.written(some, rng.integers(4, 9, size=count), TITLE, rng)
        bodies += language.written(some, lengths, BODY, rng)
    return tuple(titles), tuple(bodies)


def _zipf(ranks: int, size: int) -> NDArray[np.int32]:
    """Return a look-up table for drawing ranks r ≥ 1, each stored in proportion to 1/r."""
    shares = np.cumsum(1 / np.arange(1, ranks + 1))
    drawn = np.searchsorted(shares / shares[-1], (np.arange(size) + 0.5) / size)
    return drawn.astype(np.int32)


def _spelled(count: int) -> list[str]:
    """Return pronounceable words that no stemmer changes: two or three open syllables."""
    heads = [consonant + vowel for consonant in "bdfgjklmnprstvwz" for vowel in "aeiou"]
    tails = [head for head in heads if head[1] in "aou"]
    words = [head + tail for head in heads for tail in tails]
    longer = [head + word for head in heads for word in words]
    chosen = np.arange(count) * 104_729 % len(longer)  # a prime: neighbours in rank do not look alike
    return [longer[at][2:] if rank < 500 else longer[at] for rank, at in enumerate(chosen.tolist())]
