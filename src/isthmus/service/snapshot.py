"""What a node searches: some segments as they are at one moment, and the figures to score with.

A snapshot never changes; a search that began with one ends with it, whatever is indexed meanwhile.

    score(q, d) = Σ_{t ∈ q} ln(1 + (N − df_t + ½)/(df_t + ½)) · tf / (tf + k1·(1 − b + b·|d|/avg|d|))

is added up in the order of the query's terms, as a central index does it, so that with exact figures of all
silos the scores of all silos are those of one index, to the last bit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Vectors
from isthmus.features import Pairs, compute
from isthmus.private import HashFamily
from isthmus.retrieval import BM25, TEXT, Statistics, best_rows, idf
from isthmus.service.encoding import QueryEncoder
from isthmus.service.segments import Counted, Postings, Segment
from isthmus.text import ENGLISH, Tokens

Mask = NDArray[np.bool_]
FIELDS = ("title", "body")


@dataclass(frozen=True, eq=False)
class Part:
    """A segment, and which of its documents are still as they were; None means all."""

    segment: Segment
    alive: Mask | None = None

    @cached_property
    def kept(self) -> Mask:
        """Which documents are alive."""
        return np.ones(len(self.segment), dtype=bool) if self.alive is None else self.alive

    @cached_property
    def documents(self) -> int:
        """How many are."""
        return int(self.kept.sum())

    @cached_property
    def lengths(self) -> IntArray:
        """Terms of the documents that are alive, by field."""
        total: IntArray = self.segment.lengths[self.kept].sum(axis=0, dtype=np.int64)
        return total

    def having(self, postings: Postings | None) -> int:
        """How many living documents have a term."""
        if postings is None:
            return 0
        return len(postings.rows) if self.alive is None else int(self.alive[postings.rows].sum())


@dataclass(frozen=True, eq=False)
class Found:
    """The candidates of a query: the best of each retriever together, with every retriever's score for each.

    `listed` says by name of a retriever whose list a candidate is in.
    """

    words: tuple[str, ...]
    tokens: Tokens
    rows: IntArray
    documents: tuple[str, ...]
    scores: Mapping[str, FloatArray]
    listed: Mapping[str, Mask]

    def __len__(self) -> int:
        return len(self.rows)

    def without(self, retriever: str) -> Found:
        """The candidates as if there were no such retriever."""
        others = [name for name in self.scores if name != retriever]
        rows = np.flatnonzero(np.any([self.listed[name] for name in others], axis=0))
        return Found(
            self.words,
            self.tokens,
            self.rows[rows],
            tuple(self.documents[row] for row in rows.tolist()),
            {name: self.scores[name][rows] for name in others},
            {name: self.listed[name][rows] for name in others},
        )


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Documents by number: those of the first part, then those of the second, and so on.

    `change` is the store's number of the last change in it; `shared` are the figures of all silos.
    """

    parts: tuple[Part, ...]
    encoder: QueryEncoder
    change: int = 0
    shared: Statistics | None = None
    family: HashFamily | None = None
    settings: BM25 = field(default_factory=BM25)

    def __len__(self) -> int:
        return sum(part.documents for part in self.parts)

    @cached_property
    def _bases(self) -> list[int]:
        return [0, *accumulate(len(part.segment) for part in self.parts)]

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Terms of all documents, by field."""
        totals = sum((part.lengths for part in self.parts), np.zeros(2, dtype=np.int64))
        return dict(zip(FIELDS, totals.tolist(), strict=True))

    @cached_property
    def _norms(self) -> list[FloatArray]:
        """k1·(1 − b + b·|d|/avg|d|) of every document, part by part."""
        total = sum(self.lengths.values())
        own = total / len(self) if total else 1.0
        average = own if self.shared is None else self.shared.average_length
        return [self.settings.spread(part.segment.total_lengths / average) for part in self.parts]

    def find(self, text: str, depth: int) -> Found:
        """The best `depth` documents of each retriever."""
        tokens = ENGLISH([text])
        words = tuple(tokens.words(0))
        postings = {
            word: [part.segment.postings(word) for part in self.parts] for word in dict.fromkeys(words)
        }
        scored: dict[str, Sequence[NDArray[Any]]] = {"bm25": self._bm25(words, postings)}
        vector = self.encoder.query(text, words)
        if vector.any():
            scored["dense"] = self._cosines(vector)
        lists = {name: self._best(scores, depth, name) for name, scores in scored.items()}
        rows = np.unique(np.concatenate(list(lists.values())))
        listed = {name: np.isin(rows, selected, assume_unique=True) for name, selected in lists.items()}
        scores = {name: self._taken(each, rows) for name, each in scored.items()}
        documents = tuple(self._documents(rows))
        return Found(words, tokens, rows, documents, scores, listed)

    def _bm25(self, words: Sequence[str], postings: Mapping[str, list[Postings | None]]) -> list[FloatArray]:
        """The score of every document, part by part; 0 for one without any of the words."""
        rarity = self._rarity(postings)
        scores = [np.zeros(len(part.segment)) for part in self.parts]
        for word in words:
            for totals, norms, entries in zip(scores, self._norms, postings[word], strict=True):
                if entries is not None:
                    totals[entries.rows] += rarity[word] * self.settings.saturation(
                        entries.both, norms[entries.rows]
                    )
        for part, totals in zip(self.parts, scores, strict=True):
            if part.alive is not None:
                totals[~part.alive] = 0
        return scores

    def _rarity(self, postings: Mapping[str, list[Postings | None]]) -> dict[str, float]:
        words = list(postings)
        if self.shared is None:
            total = len(self)
            having = np.array([self._having(postings[word]) for word in words], dtype=np.float64)
        else:
            total = self.shared.documents
            having = self.shared.counts(TEXT, words, self.family)
        return dict(zip(words, idf(having, total).tolist(), strict=True))

    def _having(self, postings: Sequence[Postings | None]) -> int:
        return sum(part.having(each) for part, each in zip(self.parts, postings, strict=True))

    def _cosines(self, vector: Vectors) -> list[Vectors]:
        """The cosine of every document, part by part; −inf for one without direction or that is gone."""
        scores = []
        for part in self.parts:
            cosines = part.segment.vectors @ vector
            if len(part.segment.silent):
                cosines[part.segment.silent] = -np.inf
            if part.alive is not None:
                cosines[~part.alive] = -np.inf
            scores.append(cosines)
        return scores

    def _best(self, scores: Sequence[NDArray[Any]], depth: int, retriever: str) -> IntArray:
        """The numbers of the best documents; of equal scores those with the larger ids."""
        above = 0.0 if retriever == "bm25" else -np.inf
        best = [best_rows(each, depth, above=above) for each in scores]
        rows = np.concatenate(
            [np.empty(0, np.int64), *(b + at for b, at in zip(self._bases, best, strict=False))]
        )
        if len(scores) == 1 or len(rows) <= depth:
            return rows[:depth]
        values = np.concatenate([each[at] for each, at in zip(scores, best, strict=True)])
        names = Ids.of(self._documents(rows))
        return rows[np.lexsort((-names.codes, -values))[:depth]]

    def _taken(self, scores: Sequence[NDArray[Any]], rows: IntArray) -> FloatArray:
        """The scores of documents by number."""
        values = np.empty(len(rows))
        for base, each in zip(self._bases, scores, strict=False):
            here = (rows >= base) & (rows < base + len(each))
            values[here] = each[rows[here] - base]
        return values

    def _documents(self, rows: IntArray) -> list[str]:
        """The ids of documents by number."""
        places = np.searchsorted(self._bases, rows, side="right") - 1
        pairs = zip(places.tolist(), rows.tolist(), strict=True)
        return [self.parts[at].segment.ids[row - self._bases[at]] for at, row in pairs]

    def by_part(self, rows: IntArray) -> Iterator[tuple[Part, IntArray, IntArray]]:
        """For every part that has some of these documents: which of them, and their rows there."""
        for base, part in zip(self._bases, self.parts, strict=False):
            here = np.flatnonzero((rows >= base) & (rows < base + len(part.segment)))
            if len(here):
                yield part, here, rows[here] - base

    def vectors(self, rows: IntArray) -> Vectors:
        """The directions of documents by number."""
        vectors = np.zeros((len(rows), self.encoder.width), dtype=np.float32)
        for part, here, local in self.by_part(rows):
            vectors[here] = part.segment.vectors[local]
        return vectors

    def rarity(self, words: Sequence[str]) -> FloatArray:
        """The idf of words as BM25 has it here."""
        postings = {word: [part.segment.postings(word) for part in self.parts] for word in words}
        known = self._rarity(postings)
        return np.array([known[word] for word in words])

    def counted(self) -> Counted:
        """All counts of all living documents, title and body together."""
        documents, words, times = [], [], []
        spelled: list[str] = []
        first = 0
        for part in self.parts:
            segment = part.segment
            number = np.cumsum(part.kept) - 1 + first
            alive = part.kept[segment.rows]
            term = np.repeat(np.arange(len(segment.terms)), np.diff(segment.starts)) + len(spelled)
            documents.append(number[segment.rows[alive]])
            words.append(term[alive])
            times.append((segment.title_counts + segment.body_counts)[alive].astype(np.float64))
            spelled += segment.terms.tolist()
            first += part.documents
        if not spelled:
            return Counted(0, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), ())
        names = Ids.of(spelled)
        word = names.codes[np.concatenate(words)]
        return Counted(first, np.concatenate(documents), word, np.concatenate(times), tuple(names.words))

    def features(self, candidates: Found) -> FloatArray:
        """What a ranker reads: the sixteen features of title and body, then every retriever's score."""
        pairs = Pairs(np.zeros(len(candidates), dtype=np.int64), np.arange(len(candidates)))
        title, body = (_FieldCounts.of(self, candidates, field) for field in FIELDS)
        table = compute(candidates.tokens, pairs, title=title, body=body)
        lacking = np.zeros(len(candidates))
        extra = [
            np.nan_to_num(candidates.scores.get(name, lacking), neginf=0.0) for name in ("bm25", "dense")
        ]
        return np.column_stack((table, *extra))

    def only(self, documents: Container[str]) -> Snapshot:
        """The same without all other documents."""
        parts = []
        for part in self.parts:
            wanted = np.fromiter((id in documents for id in part.segment.ids), bool, len(part.segment))
            parts.append(replace(part, alive=part.kept & wanted))
        return replace(self, parts=tuple(parts))

    def exact_statistics(self, silo: str, tables: Sequence[str]) -> Statistics:
        """The silo's own figures, counted; not to be shown to anybody without leave."""
        counted = [_counted(part, tables) for part in self.parts]
        words = Ids.of([word for names, _ in counted for word in names])
        size = len(words.vocabulary)
        summed = {
            name: np.bincount(
                words.codes, np.concatenate([np.empty(0), *(counts[name] for _, counts in counted)]), size
            ).astype(np.int64)
            for name in tables
        }
        some = np.flatnonzero(np.any([table > 0 for table in summed.values()], axis=0))
        return Statistics(
            silos=(silo,),
            documents=len(self),
            lengths=self.lengths,
            tables={name: table[some] for name, table in summed.items()},
            terms=Ids.of(words.vocabulary.take(pa.array(some))),
        )


def _counted(part: Part, tables: Sequence[str]) -> tuple[list[str], dict[str, FloatArray]]:
    """The terms of a part with their counts over the documents that are alive."""
    segment = part.segment
    term = np.repeat(np.arange(len(segment.terms)), np.diff(segment.starts))
    alive = part.kept[segment.rows]
    columns = {"title": segment.title_counts, "body": segment.body_counts}
    totals = {}
    for name in tables:
        where, _, kind = name.partition(".")
        counts = columns[where] if where in columns else segment.title_counts + segment.body_counts
        weights = alive * (counts > 0 if kind == "having" else counts)
        totals[name] = np.bincount(term, weights, len(segment.terms)).astype(np.float64)
    return segment.terms.tolist(), totals


@dataclass(frozen=True, eq=False)
class _FieldCounts:
    """The counts of one field of a query's candidates, as features read them.

    Figures of the field are those of all silos where these are shared, else the silo's own.
    """

    snapshot: Snapshot
    field: str
    words: tuple[str, ...]
    lengths: NDArray[np.int32]
    distinct: NDArray[np.int32]
    table: NDArray[np.int32]
    own: tuple[FloatArray, FloatArray]

    @classmethod
    def of(cls, snapshot: Snapshot, candidates: Found, field: str) -> _FieldCounts:
        column = FIELDS.index(field)
        words = tuple(candidates.tokens.terms.words)
        table = np.zeros((len(candidates), len(words)), dtype=np.int32)
        lengths, distinct = np.zeros((2, len(candidates)), dtype=np.int32)
        own = np.zeros((2, len(words)))
        for base, part in zip(snapshot._bases, snapshot.parts, strict=False):
            segment = part.segment
            here = np.flatnonzero((candidates.rows >= base) & (candidates.rows < base + len(segment)))
            local = candidates.rows[here] - base
            lengths[here], distinct[here] = segment.lengths[local, column], segment.distinct[local, column]
            for at, word in enumerate(words):
                if (postings := segment.postings(word)) is not None:
                    counts = (postings.title, postings.body)[column]
                    table[here, at] = postings.at(counts, local)
                    own[:, at] += _own(part, postings, counts)
        return cls(snapshot, field, words, lengths, distinct, table, (own[0], own[1]))

    @property
    def _shared(self) -> Statistics | None:
        shared = self.snapshot.shared
        return shared if shared is not None and f"{self.field}.having" in shared.tables else None

    @property
    def documents(self) -> float:
        return len(self.snapshot) if self._shared is None else self._shared.documents

    @property
    def length(self) -> float:
        source = self.snapshot if self._shared is None else self._shared
        return source.lengths[self.field]

    def counts(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """How often candidate `documents[i]` has word `words[i]`; the words are those of the query."""
        return self.table[documents, words.codes]

    def frequencies(self, words: Ids) -> FloatArray:
        """The number of documents that have each word of the query."""
        return self._figure("having", 0)

    def occurrences(self, words: Ids) -> FloatArray:
        """How often each word of the query stands in them."""
        return self._figure("standing", 1)

    def _figure(self, kind: str, own: int) -> FloatArray:
        if self._shared is None:
            return self.own[own]
        return self._shared.counts(f"{self.field}.{kind}", self.words, self.snapshot.family)


def _own(part: Part, postings: Postings, counts: NDArray[np.int32]) -> tuple[int, int]:
    living = counts if part.alive is None else counts[part.alive[postings.rows]]
    return int((living > 0).sum()), int(living.sum())
