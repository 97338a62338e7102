"""A query's candidates: documents that an engine proposes, scored exactly with the statistics of all silos.

    score(q, d) = Σ_{t ∈ q} ln(1 + (N − df_t + ½)/(df_t + ½)) · tf / (tf + k1·(1 − b + b·|d|/avg|d|))

The sum is taken in the order of the query's terms, as in a central index, so that with exact statistics of
all silos the scores of all silos are those of one index, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Span, Vectors
from isthmus.engines import FIELDS, STOP, Constraints, EngineReader, Matches, WordCounts
from isthmus.features import Pairs, compute
from isthmus.languages import query, tokeniser_of
from isthmus.private import HashFamily
from isthmus.retrieval import BM25, TEXT, Statistics, idf
from isthmus.service.encoding import QueryEncoder
from isthmus.text import ENGLISH, Tokens

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class QueryCandidates:
    """The best documents of all retrievers together, each with the score of every retriever.

    `listed` says by retriever which candidates are in its list. `words` are the query's words in the
    engine's form, `terms` the distinct ones in alphabetical order; `counts` has a column for each.
    """

    words: tuple[str, ...]
    tokens: Tokens
    terms: tuple[str, ...]
    reader: EngineReader
    handles: IntArray
    scores: Mapping[str, FloatArray]
    listed: Mapping[str, Mask]
    counts: WordCounts
    most: float
    """The largest possible BM25 score: Σ idf of the query's words."""
    vector: Vectors

    @cached_property
    def totals(self) -> Mapping[str, FloatArray]:
        """The silo's own statistics of the terms, by table."""
        return self.reader.tables(self.terms)

    def __len__(self) -> int:
        return len(self.handles)

    @cached_property
    def documents(self) -> tuple[str, ...]:
        """The ids of all candidates. For some of them, `names` is cheaper."""
        return tuple(self.reader.ids(self.handles))

    def names(self, rows: IntArray) -> list[str]:
        """Return the ids of the candidates at some positions."""
        return self.reader.ids(self.handles[rows])

    def take(self, rows: IntArray, retrievers: Iterable[str]) -> QueryCandidates:
        """Return the candidates at some positions, with the scores of some retrievers."""
        return replace(
            self,
            handles=self.handles[rows],
            scores={name: self.scores[name][rows] for name in retrievers},
            listed={name: self.listed[name][rows] for name in retrievers},
            counts=self.counts.take(rows),
        )

    def without(self, retriever: str) -> QueryCandidates:
        """Return the candidates as they would be without this retriever."""
        others = [name for name in self.scores if name != retriever]
        rows = np.flatnonzero(np.any([self.listed[name] for name in others], axis=0))
        return self.take(rows, others)


def spelled_terms(tokens: Tokens) -> Sequence[str]:
    """Return a query's distinct terms in the engine's form. Stop words, which are terms only of a query
    without other words, are marked."""
    spelled = tokens.terms.words
    return spelled if tokens.stopped is None else [STOP + word for word in spelled]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a search uses from beginning to end: an engine's documents at one moment, the encoder of their
    vectors, and `shared`, the statistics of all silos."""

    reader: EngineReader
    encoder: QueryEncoder
    shared: Statistics | None = None
    family: HashFamily | None = None
    languages: frozenset[str] = frozenset()
    """Codes of the languages that documents are in; empty if all are read as English."""
    settings: BM25 = field(default_factory=BM25)

    def __len__(self) -> int:
        return len(self.reader)

    def seen_by(self, principals: frozenset[str], languages: frozenset[str]) -> Snapshot:
        """Return the snapshot of the documents that these principals may see, with the languages of these.
        Other documents have an influence only through statistics of all silos, models and an encoder."""
        return replace(self, reader=self.reader.seen_by(principals), languages=languages)

    @property
    def change(self) -> int:
        """The store's number of the last change that can be searched."""
        return self.reader.change

    @property
    def lengths(self) -> Mapping[str, int]:
        """Number of terms of all documents, by field."""
        return self.reader.lengths

    @cached_property
    def _average_length(self) -> float:
        if self.shared is not None:
            return self.shared.average_length
        total = sum(self.lengths.values())
        return total / len(self) if total else 1.0

    def find(
        self, text: str, depth: int, only: Constraints | None = None, *, instead: Sequence[str] = ()
    ) -> QueryCandidates:
        """Return the best `depth` documents of each retriever, among those that meet the constraints.

        If the text is blank, documents are ranked by the terms of `instead`, without vectors.
        """
        is_blank = not text.strip()
        tokens = (
            Tokens(Ids.of(list(instead)), np.array([0, len(instead)]))
            if is_blank
            else query(text, self.languages)
        )
        terms = spelled_terms(tokens)
        codes = tokens.terms.codes
        words = tuple(terms[code] for code in codes.tolist())
        rarity = self.rarity(terms)
        weights = rarity * np.bincount(codes, minlength=len(terms))
        lists = {"bm25": self.reader.matching(dict(zip(terms, weights.tolist(), strict=True)), depth, only)}
        vector = np.zeros(0, dtype=np.float32) if is_blank else self._vector(text, words)
        if vector.any():
            lists["dense"] = self.reader.nearest(vector, depth, only)
        handles = np.unique(np.concatenate(list(lists.values()))) if len(lists) > 1 else lists["bm25"]
        counts = self.reader.counts(handles, terms)
        scores = {"bm25": self._bm25(counts, codes, rarity)}
        listed = {"bm25": self._best(scores["bm25"], handles, depth)}
        if "dense" in lists:
            scores["dense"] = self.reader.cosines(handles, vector)
            near = np.isin(handles, lists["dense"], assume_unique=True)
            listed["dense"] = near & np.isfinite(scores["dense"])
        chosen = np.flatnonzero(np.logical_or.reduce(list(listed.values())))
        return QueryCandidates(
            words,
            tokens,
            tuple(terms),
            self.reader,
            handles[chosen],
            {name: each[chosen] for name, each in scores.items()},
            {name: each[chosen] for name, each in listed.items()},
            counts.take(chosen),
            self._most(text) if len(self.languages) > 1 and not is_blank else float(rarity[codes].sum()),
            vector,
        )

    def _vector(self, text: str, words: Sequence[str]) -> Vectors:
        """Return a query's vector. Encoders of words are fitted on texts read as English, and so is the query
        read."""
        return self.encoder.query(text, ENGLISH.query(text).words(0) if self.languages else words)

    def every(self, text: str, handles: IntArray, *, dense: bool) -> QueryCandidates:
        """Return these documents as candidates of a query, whether a retriever would propose them or not.

        Every word of the query counts once, in alphabetical order, so that order and repetition do not
        matter. The scores of a document depend only on it, the query, the shared statistics and the
        encoder.
        """
        spoken = query(text, self.languages)
        spelled = sorted(set(spoken.terms.words))
        stopped = None if spoken.stopped is None else np.ones(len(spelled), dtype=bool)
        tokens = Tokens(Ids.of(spelled), np.array([0, len(spelled)]), stopped)
        terms = spelled if stopped is None else [STOP + word for word in spelled]
        codes = tokens.terms.codes
        rarity, counts = self.rarity(terms), self.reader.counts(handles, terms)
        scores = {"bm25": self._bm25(counts, codes, rarity)}
        vector = self.encoder.query(text, tuple(terms)) if dense else np.zeros(0, dtype=np.float32)
        if vector.any():
            scores["dense"] = self.reader.cosines(handles, vector)
        return QueryCandidates(
            tuple(terms),
            tokens,
            tuple(terms),
            self.reader,
            handles,
            scores,
            {name: np.isfinite(each) & (each > 0) for name, each in scores.items()},
            counts,
            float(rarity.sum()),
            vector,
        )

    def _most(self, text: str) -> float:
        """Return Σ idf of a query's words in the language where it is smallest: in the others, stems that no
        document has would have the largest idf."""
        each = [tokeniser_of(code).query(text) for code in self.languages]
        sums = [float(self.rarity(tokens.words(0)).sum()) for tokens in each if tokens.stopped is None]
        return min(sums, default=0.0)

    def matches(self, text: str, terms: Sequence[str], only: Constraints | None = None) -> Matches:
        """Count the documents that have any of a query's terms, among those that meet the constraints."""
        return self.reader.matches(terms, only)

    def all_ids(self) -> list[str]:
        """Return the ids of all documents."""
        return self.reader.ids(self.reader.handles())

    def passage(self, candidates: QueryCandidates, at: int) -> Span | None:
        """Return the span of the best passage of a candidate that only the dense retriever proposed; None for
        others."""
        if "dense" not in candidates.listed or candidates.listed["bm25"][at]:
            return None
        return self.reader.best_span(int(candidates.handles[at]), candidates.vector)

    def _bm25(self, counts: WordCounts, codes: IntArray, rarity: FloatArray) -> FloatArray:
        """Return the score of every document, its terms added up in the order of the query."""
        if not counts.title.size:
            return np.zeros(len(counts.title))
        lengths = counts.lengths.sum(axis=1, dtype=np.int64) / self._average_length
        times = (counts.title + counts.body).T  # one row per word; rows are added up in order
        weights = rarity[:, None] * self.settings.saturation(times, self.settings.spread(lengths))
        scores: FloatArray = weights[codes].sum(axis=0)
        return scores

    def _best(self, scores: FloatArray, handles: IntArray, depth: int) -> Mask:
        """Return a mask of the best `depth` scores above 0; of equal ones, those with the larger ids."""
        best: Mask = scores > 0
        if int(best.sum()) <= depth:
            return best
        least = np.partition(scores, len(scores) - depth)[len(scores) - depth]
        best = scores > least
        tied = np.flatnonzero(scores == least)
        room = depth - int(best.sum())
        if len(tied) > room:
            names = self.reader.ids(handles[tied])
            tied = tied[sorted(range(len(tied)), key=names.__getitem__, reverse=True)[:room]]
        best[tied] = True
        return best

    def rarity(self, terms: Sequence[str]) -> FloatArray:
        """Return the idf of terms for BM25, by the statistics of all silos or else by the silo's own."""
        if self.shared is None:
            return idf(self.reader.tables(terms)[TEXT], len(self))
        return idf(self.shared.counts(TEXT, terms, self.family), self.shared.documents)

    def features(self, candidates: QueryCandidates) -> FloatArray:
        """Return the rows that a ranker reads: the sixteen features of title and body, then every retriever's
        score."""
        pairs = Pairs(np.zeros(len(candidates), dtype=np.int64), np.arange(len(candidates)))
        title, body = (FieldCounts(self, candidates, field) for field in FIELDS)
        table = compute(candidates.tokens, pairs, title=title, body=body)
        lacking = np.zeros(len(candidates))
        extra = [candidates.scores.get(name, lacking) for name in ("bm25", "dense")]
        return np.column_stack((table, *(np.where(np.isfinite(each), each, 0.0) for each in extra)))

    def exact_statistics(
        self, silo: str, tables: Sequence[str], handles: IntArray | None = None
    ) -> Statistics:
        """Count the silo's own statistics, which may not be shown to anybody without permission.

        With `handles`, only the words of these documents are counted.
        """
        terms, counts = self.reader.statistics(tables, handles)
        return Statistics(
            silos=(silo,),
            documents=len(self),
            lengths=self.lengths,
            tables=counts,
            terms=terms,
        )


@dataclass(frozen=True, eq=False)
class FieldCounts:
    """The counts of one field of a query's candidates, in the form that features read.

    Statistics of the field are those of all silos if these are shared, else the silo's own.
    """

    snapshot: Snapshot
    candidates: QueryCandidates
    field: str

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

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.candidates.counts.lengths[:, FIELDS.index(self.field)]

    @property
    def distinct(self) -> NDArray[np.int32]:
        return self.candidates.counts.distinct[:, FIELDS.index(self.field)]

    def counts(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """How often candidate `documents[i]` has word `words[i]`; the words are those of the query."""
        table: NDArray[Any] = getattr(self.candidates.counts, self.field)
        return table[documents, words.codes]

    def frequencies(self, words: Ids) -> FloatArray:
        """Return the number of documents that have each word of the query."""
        return self._statistic("having")

    def occurrences(self, words: Ids) -> FloatArray:
        """Return the number of occurrences of each word of the query in all documents."""
        return self._statistic("standing")

    def _statistic(self, kind: str) -> FloatArray:
        table = f"{self.field}.{kind}"
        if self._shared is None:
            return self.candidates.totals[table]
        return self._shared.counts(table, self.candidates.terms, self.snapshot.family)
