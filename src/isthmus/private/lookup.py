"""Looking for documents in another silo by their private counts, and computing their features.

A `Seeker` has keys and documents of its own, which say what to make of a noisy value. What it finds is a
`Lookup`: every field's counts with their error bars. How common words are it knows from the totals of all
silos or, where there are none, works out from the values themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError, ProtocolError
from isthmus.features import FIELDS, Pairs, bm25, compute
from isthmus.private.counts import (
    AskedCells,
    Asker,
    Carrier,
    PrivateCounts,
    PublishedCells,
    fetch_catalogue,
    fetch_published,
)
from isthmus.private.decoys import Decoys
from isthmus.private.keys import GroupKey
from isthmus.private.mechanisms import OneShot
from isthmus.private.messages import Catalogue
from isthmus.private.noise import Geometric
from isthmus.private.reading import Lexicon, Shrink
from isthmus.private.sketch import CountMin, HashFamily
from isthmus.private.topics import Topics
from isthmus.private.totals import WIDTH, Foreign, Sums, Totals
from isthmus.randomness import Streams
from isthmus.retrieval.retriever import best_rows
from isthmus.tables import Letor, Queries
from isthmus.tables.ids import FloatArray, Ids, IntArray
from isthmus.text import Tokens


@dataclass(frozen=True)
class Hit:
    """A document of another silo: its score, and for every word of the query a count and its error bar."""

    document: str
    score: float
    words: dict[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class Lookup:
    """Another silo's documents under their private counts, field by field."""

    documents: tuple[str, ...]
    counts: Mapping[str, PrivateCounts]

    @property
    def main(self) -> PrivateCounts:
        """The counts that documents are found by: the body's, if there are any."""
        return self.counts.get("body") or next(iter(self.counts.values()))

    def scores(self, queries: Tokens) -> FloatArray:
        """The BM25 of all queries and documents."""
        pairs = Pairs.all(len(queries), len(self.documents))
        return bm25(queries, pairs, self.main).reshape(len(queries), len(self.documents))

    def search(self, query: Tokens, k: int) -> Iterator[Hit]:
        """The best k documents of one query, with what is known of each of its words."""
        scores = self.scores(query)[0]
        words = Ids.of(query.terms.words)
        for row in best_rows(scores, k).tolist():
            found = self.main.reading(np.full(len(words), row), words)
            known = zip(words.tolist(), found.mean.tolist(), found.error.tolist(), strict=True)
            told = {word: (mean, error) for word, mean, error in known}
            yield Hit(self.documents[row], float(scores[row]), told)

    def candidates(self, queries: Tokens, k: int) -> Pairs:
        """The best k documents of every query."""
        best = [best_rows(scores, k) for scores in self.scores(queries)]
        asked = np.repeat(np.arange(len(best)), [len(rows) for rows in best])
        return Pairs(asked, np.concatenate([np.empty(0, np.int64), *best]).astype(np.int64))

    def features(self, queries: Tokens, pairs: Pairs) -> FloatArray:
        """The sixteen features of every pair."""
        missing = next((name for name in FIELDS if name not in self.counts), None)
        if missing is not None:
            told = f"features need the counts of title and body, and {missing} is not released"
            raise DataError(told, cure="ask that silo to release both: they cost no more than one")
        return compute(queries, pairs, title=self.counts["title"], body=self.counts["body"])

    def letor(self, queries: Queries, tokens: Tokens, k: int, *, name: str) -> Letor:
        """Feature rows of every query's best k documents; nobody knows their grades, so these are 0."""
        pairs = self.candidates(tokens, k)
        asked = Ids.of(queries.ids)[pairs.queries]
        documents = Ids.of(self.documents)[pairs.documents]
        grades = np.zeros(len(pairs), dtype=np.int64)
        return Letor.of(asked, self.features(tokens, pairs), grades, documents=documents, name=name)


@dataclass(frozen=True, eq=False)
class Seeker:
    """Who has queries: the group's key, words of documents of its own, and the secret behind its decoys.

    `totals` are the released sums over all silos, field by field, where there are any.
    """

    key: GroupKey
    own: Mapping[str, Tokens]
    secret: bytes = field(repr=False)
    totals: Mapping[str, Totals] = field(default_factory=dict)
    seed: int = 0

    def read(self, released: Mapping[str, tuple[Catalogue, CountMin]], words: Ids) -> Lookup:
        """Published sketches: whoever made them learns nothing, and topics help to read."""
        counts: dict[str, PrivateCounts] = {}
        for name, (catalogue, sketch) in released.items():
            law = _law(catalogue)
            values = sketch.columns(sketch.family.of_vocabulary(words).cells[0])
            lexicon = self._lexicon(catalogue, sketch.family, words, values)
            topics = Topics.learned(lexicon, law, Streams(self.seed)("topics", name))
            context = None if topics is None else topics.placed(sketch, catalogue.lengths)
            reader = Shrink(law, lexicon, catalogue.lengths, context)
            counts[name] = PrivateCounts(PublishedCells(sketch), reader, lexicon, catalogue.lengths)
        return Lookup(_documents([catalogue for catalogue, _ in released.values()]), counts)

    def fetch(self, carrier: Carrier, fields: Sequence[str]) -> dict[str, tuple[Catalogue, CountMin]]:
        """What a silo publishes of some fields, brought by a carrier."""
        released = {}
        for name in fields:
            catalogue = fetch_catalogue(carrier, name)
            released[name] = catalogue, fetch_published(carrier, catalogue, self._family(catalogue))
        return released

    def ask(
        self,
        carrier: Carrier,
        fields: Sequence[str],
        words: Ids,
        *,
        decoys: int = 2,
        clock: Callable[[], int] = time.time_ns,
    ) -> dict[str, tuple[Catalogue, AskedCells]]:
        """What a silo answers about words, each among decoys from the asker's own vocabulary."""
        answered = {}
        hiding = self._decoys(decoys)
        for name in fields:
            catalogue = fetch_catalogue(carrier, name)
            kind = OneShot(catalogue.terms.epsilon, catalogue.terms.rows)
            asker = Asker(catalogue.terms, self._family(catalogue), kind, hiding, clock=clock)
            answered[name] = (
                catalogue,
                AskedCells.through(carrier, asker, words, len(catalogue.documents)),
            )
        return answered

    def read_answers(self, answered: Mapping[str, tuple[Catalogue, AskedCells]], words: Ids) -> Lookup:
        """The answers to questions about words."""
        counts: dict[str, PrivateCounts] = {}
        for name, (catalogue, cells) in answered.items():
            lexicon = self._lexicon(catalogue, self._family(catalogue), words, cells.table.toarray().T)
            reader = Shrink(_law(catalogue), lexicon, catalogue.lengths)
            counts[name] = PrivateCounts(cells, reader, lexicon, catalogue.lengths)
        return Lookup(_documents([catalogue for catalogue, _ in answered.values()]), counts)

    def _decoys(self, count: int) -> Decoys:
        """From one field's words, whatever field is asked about: with other decoys in the title than in the
        body, the word would be the one that is in both questions."""
        words = self.own["body" if "body" in self.own else min(self.own)].terms
        return Decoys(words, np.bincount(words.codes, minlength=len(words.vocabulary)), self.secret, count)

    def _family(self, catalogue: Catalogue) -> HashFamily:
        terms = catalogue.terms
        return self.key.family(terms.field, rows=terms.rows, width=terms.width)

    def _lexicon(self, catalogue: Catalogue, family: HashFamily, words: Ids, values: NDArray[Any]) -> Lexicon:
        """What is known of words beforehand, from totals or from their noisy values (words, documents)."""
        name = catalogue.terms.field
        if name in self.totals:
            return Lexicon(family, self.totals[name], self.own[name])
        positive: IntArray = (values > 0).sum(axis=1)
        seen = Foreign(catalogue.lengths, words, positive, values.sum(axis=1))
        return Lexicon(family, Totals.worked_out(self._sums[name], seen, _law(catalogue)), self.own[name])

    @cached_property
    def _sums(self) -> Mapping[str, Sums]:
        family = HashFamily(b"totals that stay here", 1, WIDTH)
        return {name: Sums.of(tokens, family) for name, tokens in self.own.items()}


def _law(catalogue: Catalogue) -> Geometric:
    if catalogue.terms.mechanism != OneShot.name:
        raise ProtocolError("counts released in another way than one_shot")
    return OneShot(catalogue.terms.epsilon, catalogue.terms.rows).law


def _documents(catalogues: Sequence[Catalogue]) -> tuple[str, ...]:
    if any(catalogue.documents != catalogues[0].documents for catalogue in catalogues):
        raise ProtocolError("catalogues of different documents for the fields of one silo")
    return catalogues[0].documents
