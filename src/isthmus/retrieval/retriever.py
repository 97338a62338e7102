"""The retriever interface, what all retrievers share, and BM25 with statistics that silos can add up.

>>> from isthmus.tables import Documents, Queries
>>> import numpy as np
>>> documents = Documents(("d1", "d2"), ("", ""), ("a red apple", "a green pear"), np.zeros(2, int))
>>> queries = Queries(("q1",), ("green pears",), np.zeros(1, int), ("test",))
>>> BM25().index(documents).search(queries, k=10)
Run 'bm25': 1 query, 1 row
  q1  d2 0.554518
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import ConfigError, DataError
from isthmus.retrieval.statistics import Statistics, idf
from isthmus.tables import Documents, Queries, Run
from isthmus.text import ENGLISH, Tokeniser, Tokens


class Retriever(Protocol):
    """Ranks its documents for every query."""

    def search(self, queries: Queries, k: int) -> Run:
        """The best k documents of every query; a query that matches nothing keeps an empty list."""


def best_rows(scores: NDArray[np.floating[Any]], k: int, *, above: float = 0.0) -> IntArray:
    """The rows of the k largest scores beyond `above`, best first; of equal scores the earlier rows."""
    rows = np.flatnonzero(scores > above)
    if len(rows) > k:
        least = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
        rows = rows[scores[rows] >= least]
    return rows[np.argsort(-scores[rows], kind="stable")][:k]


def rows_of(documents: Ids, wanted: Sequence[str | None]) -> IntArray:
    """The positions of the wanted documents; -1 for None and for documents that are not there."""
    row_of = {document: row for row, document in enumerate(documents.tolist())}
    return np.array([-1 if name is None else row_of.get(name, -1) for name in wanted], dtype=np.int64)


def collect(
    queries: tuple[str, ...], documents: Ids, lists: Sequence[tuple[IntArray, FloatArray]], name: str
) -> Run:
    """Build a run from one list per query, each (rows of `documents`, their scores) already in trec_eval's
    order."""
    offsets = np.cumsum([0, *(len(rows) for rows, _ in lists)])
    rows = np.concatenate([np.empty(0, dtype=np.int64), *(rows for rows, _ in lists)])
    scores = np.concatenate([np.empty(0), *(scores for _, scores in lists)])
    return Run(queries, frozen(offsets), documents[rows], frozen(scores), None, name)


def check_depth(k: int) -> None:
    """Raise a ConfigError unless at least one document is requested."""
    if k < 1:
        raise ConfigError(f"k = {k}: ask for at least one document", key="k", value=k)


def check_unique(ids: Sequence[str], kind: str) -> None:
    """Raise a DataError if an id occurs twice."""
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise DataError(f"{kind} id {name!r} appears twice", cure=f"give every {kind} an id of its own")
        seen.add(name)


@dataclass(frozen=True)
class BM25:
    """Okapi BM25 in Lucene's exact form.

    score(q, d) = Σ_{t ∈ q} ln(1 + (N − df_t + ½)/(df_t + ½)) · tf / (tf + k1·(1 − b + b·|d|/avg|d|))

    A term that occurs several times in a query counts as often.
    """

    k1: float = 1.5
    b: float = 0.75
    tokeniser: Tokeniser = ENGLISH
    name: str = "bm25"

    def __post_init__(self) -> None:
        if not (self.k1 >= 0 and np.isfinite(self.k1)):
            raise ConfigError(f"k1 = {self.k1} must be a finite number from 0 on", key="k1", value=self.k1)
        if not 0 <= self.b <= 1:
            raise ConfigError(f"b = {self.b} must lie in 0..1", key="b", value=self.b)

    def index(self, documents: Documents, *, statistics: Statistics | None = None) -> BM25Index:
        """Build an index of these documents.

        `statistics` are those of a larger collection that includes the documents; with the sum of all silos'
        statistics, every silo computes exactly the scores of one central index.
        """
        check_unique(documents.ids, "document")
        names = Ids.of(documents.ids)
        order = np.argsort(-names.codes)
        tokens = self.tokeniser([documents.texts[row] for row in order.tolist()])
        known = Statistics.of(tokens) if statistics is None else statistics
        return BM25Index(self, names[order], tokens.terms, self._weights(tokens, known))

    def spread(self, lengths: FloatArray) -> FloatArray:
        """k1·(1 − b + b·|d|/avg|d|) for documents, given their lengths divided by the average."""
        return self.k1 * (1 - self.b + self.b * lengths)

    @staticmethod
    def saturation(counts: NDArray[Any], spread: FloatArray) -> FloatArray:
        """tf / (tf + spread)."""
        return np.asarray(counts / (counts + spread))

    def _weights(self, tokens: Tokens, known: Statistics) -> Any:
        """The contribution of every term to the score of every document that has it: SciPy CSC, documents ×
        terms."""
        counts = tokens.counts()
        weights = idf(known.counts_of(tokens.terms), known.documents)
        lengths = np.repeat(tokens.lengths, np.diff(counts.indptr)) / known.average_length
        counts.data = weights[counts.indices] * self.saturation(counts.data, self.spread(lengths))
        return counts.tocsc()


@dataclass(frozen=True, eq=False, repr=False)
class BM25Index:
    """An index of documents; rows are in descending order of id, which breaks ties."""

    settings: BM25
    documents: Ids
    terms: Ids
    weights: Any

    def __len__(self) -> int:
        return len(self.documents)

    def search(self, queries: Queries, k: int) -> Run:
        """The best k documents of every query, except the document that the query was made from.

        A document that shares no term with the query is not listed.
        """
        check_depth(k)
        check_unique(queries.ids, "query")
        tokens = self.settings.tokeniser(queries.texts)
        codes = tokens.terms.codes_in(self.terms)
        hidden = rows_of(self.documents, queries.own) if queries.own else np.full(len(queries), -1)
        lists: list[tuple[IntArray, FloatArray]] = []
        for query in range(len(queries)):
            known = codes[tokens.offsets[query] : tokens.offsets[query + 1]]
            scores = self._score(known[known >= 0])
            if hidden[query] >= 0:
                scores[hidden[query]] = 0
            rows = best_rows(scores, k)
            lists.append((rows, scores[rows]))
        return collect(queries.ids, self.documents, lists, self.settings.name)

    def _score(self, terms: IntArray) -> FloatArray:
        """The sum of the columns of a query's terms, added in the query's order."""
        scores, bounds = np.zeros(len(self)), self.weights.indptr
        for term in terms.tolist():
            column = slice(bounds[term], bounds[term + 1])
            scores[self.weights.indices[column]] += self.weights.data[column]
        return scores

    def __repr__(self) -> str:
        return f"BM25Index: {len(self):,} documents, {len(self.terms.vocabulary):,} terms"
