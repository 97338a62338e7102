"""The sixteen features of a (query, document) pair, from counts that may be exact or private.

For title and body each: TF, IDF, TF·IDF, BM25 and three language models; and the two lengths. The formulae
read counts through the protocol `TermCounts`, which is the same for both kinds of counts.

>>> from isthmus.text import tokenise
>>> body = ExactCounts.of(tokenise(["a red apple", "a green pear"]))
>>> title = ExactCounts.of(tokenise(["apples", "pears"]))
>>> table = compute(tokenise(["pears"]), Pairs.all(1, 2), title=title, body=body)
>>> [f"{name} {value:.3f}" for name, value in zip(NAMES, table[1], strict=True) if "BM25" in name]
['title.BM25 0.693', 'body.BM25 0.693']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import ConfigError, DataError
from isthmus.retrieval import TIMES, Statistics, idf
from isthmus.tables import Corpus, CountColumns, Letor, Queries, Run, rows_of
from isthmus.text import ENGLISH, Tokeniser, Tokens

FIELDS = ("title", "body")
_KINDS = ("TF", "IDF", "TF·IDF", "BM25", "LMIR.ABS", "LMIR.DIR", "LMIR.JM")
NAMES = (*(f"{name}.{kind}" for name in FIELDS for kind in _KINDS), *(f"{name}.length" for name in FIELDS))
"""The names of the features, in the order of the columns."""

_BLOCK = 1 << 18  # (pair, term) rows worked on at once


class TermCounts(Protocol):
    """The counts of one field that the formulae need, for some documents of a larger collection.

    `documents` and `length` are totals of the whole collection (all silos); `lengths` and `distinct` have one
    value for each of the documents.
    """

    @property
    def documents(self) -> float: ...

    @property
    def length(self) -> float: ...

    @property
    def lengths(self) -> NDArray[Any]: ...

    @property
    def distinct(self) -> NDArray[Any]: ...

    def counts(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """How often document `documents[i]` has word `words[i]`, for every i."""

    def frequencies(self, words: Ids) -> NDArray[Any]:
        """The number of documents in the whole collection that have each word of the vocabulary."""

    def occurrences(self, words: Ids) -> NDArray[Any]:
        """How often the whole collection has each word of the vocabulary."""


@dataclass(frozen=True)
class Settings:
    """The variants of the formulae and their constants.

    - `idf`: "log" is ln(1 + (N − df + ½)/(df + ½)) of every term; "ratio" is N/df of every term, over the
      documents of all silos, as eq. (1) of the CS-F-LTR paper prints it; "code" is log2((N − m + ½)/(m + ½))
      of the query's mean df m, at least 0, as its authors' code has it;
    - `relative`: BM25 reads tc/L instead of tc, as that paper does, which normalises by length twice;
    - `jelinek`, `dirichlet` and `discount` are λ, μ and δ of the language models.
    """

    k1: float = 1.2
    b: float = 0.75
    jelinek: float = 0.1
    dirichlet: float = 1000.0
    discount: float = 0.7
    idf: Literal["log", "ratio", "code"] = "log"
    relative: bool = False

    def __post_init__(self) -> None:
        if self.idf not in ("log", "ratio", "code"):
            raise ConfigError(f"no idf {self.idf!r}", key=self.idf, known=("log", "ratio", "code"))
        sound = self.k1 >= 0 and 0 <= self.b <= 1 and 0 < self.jelinek < 1
        if not (sound and self.dirichlet > 0 and 0 < self.discount < 1):
            raise ConfigError("a constant is out of range", key="features", expected="k1 ≥ 0, 0 ≤ b ≤ 1, …")


PROFILES = {
    "default": Settings(),
    "letor": Settings(dirichlet=2000.0),
    "paper": Settings(idf="ratio", relative=True),
    "code": Settings(idf="code", relative=True),
}
"""Named settings: the defaults, those of LETOR's features, and those of CS-F-LTR as printed and as coded."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Pairs of a query and a document, by their positions; pairs of one query are adjacent, in order of the
    queries."""

    queries: IntArray
    documents: IntArray

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.documents):
            raise DataError(f"{len(self.queries)} queries beside {len(self.documents)} documents")
        if (np.diff(self.queries) < 0).any():
            raise DataError("pairs are not in the order of their queries", cure="sort them by query")

    def __len__(self) -> int:
        return len(self.queries)

    @classmethod
    def all(cls, queries: int, documents: int) -> Pairs:
        """Every query with every document."""
        return cls(np.repeat(np.arange(queries), documents), np.tile(np.arange(documents), queries))

    @classmethod
    def of_run(cls, run: Run, queries: Queries, documents: Ids) -> Pairs:
        """The pairs of a run. Raises DataError for a query or a document that is not among those given."""
        place = {query: at for at, query in enumerate(queries.ids)}
        missing = next((query for query in run.queries if query not in place), None)
        if missing is not None:
            raise DataError(f"query {missing!r} of the run is not among the queries")
        query_rows = np.array([place[query] for query in run.queries], dtype=np.int64)[run.query_of_row]
        row_of = np.empty(len(documents.vocabulary), dtype=np.int64)
        row_of[documents.codes] = np.arange(len(documents))
        codes = run.documents.codes_in(documents)
        if (codes < 0).any():
            raise DataError(f"document {run.documents.word(int(codes.argmin()))!r} of the run is not at hand")
        order = np.argsort(query_rows, kind="stable")
        return cls(query_rows[order], row_of[codes][order])


@dataclass(frozen=True, eq=False)
class ExactCounts:
    """Exact counts of readable documents. `collection` has the statistics of all documents, by default of
    these."""

    tokens: Tokens
    collection: Statistics

    @classmethod
    def of(cls, tokens: Tokens, collection: Statistics | None = None) -> ExactCounts:
        """The counts of one field of documents."""
        return cls(tokens, Statistics.of(tokens) if collection is None else collection)

    @property
    def documents(self) -> float:
        return self.collection.documents

    @property
    def length(self) -> float:
        return self.collection.length

    @property
    def lengths(self) -> IntArray:
        return self.tokens.lengths

    @cached_property
    def distinct(self) -> NDArray[Any]:
        return np.diff(self._table.indptr)

    def counts(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """How often document `documents[i]` has word `words[i]`, for every i."""
        terms = words.translation(self.tokens.terms)[words.codes]
        known = np.flatnonzero(terms >= 0)
        values = np.zeros(len(documents), dtype=np.int64)
        if len(known):
            values[known] = self._by_term.at(documents[known], terms[known])
        return values

    def frequencies(self, words: Ids) -> NDArray[Any]:
        """The number of documents that have each word of the vocabulary."""
        return self.collection.counts_of(words)

    def occurrences(self, words: Ids) -> NDArray[Any]:
        """How often the collection has each word of the vocabulary."""
        return self.collection.counts_of(words, TIMES)

    @cached_property
    def _table(self) -> Any:
        return self.tokens.counts()

    @cached_property
    def _by_term(self) -> CountColumns:
        return CountColumns(self._table.tocsc())


def compute(
    queries: Tokens,
    pairs: Pairs,
    *,
    title: TermCounts,
    body: TermCounts,
    settings: Settings = PROFILES["default"],
) -> FloatArray:
    """The features of every pair, of shape (pairs, 16); a word counts as often as the query repeats it."""
    terms = _QueryTerms.of(queries)
    fields = [_Formulae(settings, field, terms) for field in (title, body)]
    table = np.empty((len(pairs), len(NAMES)))
    if len(queries) == 1:
        _of_one_query(fields, pairs.documents, table)
        return table
    for at, formulae in enumerate(fields):
        kinds = slice(at * len(_KINDS), (at + 1) * len(_KINDS))
        for rows in _blocks(terms, pairs):
            table[rows, kinds] = formulae.of(pairs.queries[rows], pairs.documents[rows])
        table[:, len(NAMES) - 2 + at] = formulae.field.lengths[pairs.documents]
    return table


def bm25(
    queries: Tokens, pairs: Pairs, counts: TermCounts, *, settings: Settings = PROFILES["default"]
) -> FloatArray:
    """The BM25 of every pair over one field, without the other features."""
    terms = _QueryTerms.of(queries)
    formulae = _Formulae(settings, counts, terms)
    scores = np.zeros(len(pairs))
    for rows in _blocks(terms, pairs):
        scores[rows] = formulae.bm25(pairs.queries[rows], pairs.documents[rows])
    return scores


def letor(
    corpus: Corpus,
    candidates: Run,
    *,
    settings: Settings = PROFILES["default"],
    tokeniser: Tokeniser = ENGLISH,
) -> Letor:
    """Feature rows for the candidates of a run over a readable collection, graded by its judgements."""
    documents = Ids.of(corpus.documents.ids)
    fields = (corpus.documents.titles, corpus.documents.bodies)
    title, body = (ExactCounts.of(tokeniser(texts)) for texts in fields)
    pairs = Pairs.of_run(candidates, corpus.queries, documents)
    table = compute(tokeniser(corpus.queries.texts), pairs, title=title, body=body, settings=settings)
    return as_letor(corpus, pairs, documents, table)


def as_letor(corpus: Corpus, pairs: Pairs, documents: Ids, table: ArrayLike) -> Letor:
    """Feature rows with their names and judged grades; unjudged and negative grades become 0."""
    names = Ids.of(corpus.queries.ids)[pairs.queries]
    ids = documents[pairs.documents]
    placed = Run.of(names, ids, -np.arange(len(pairs)))  # falling scores keep the order of pairs
    judged = np.maximum(placed.grades(corpus.qrels), 0)
    return Letor.of(names, table, judged, documents=ids, name=corpus.name)


@dataclass(frozen=True, eq=False)
class _QueryTerms:
    """The distinct words of every query and how often it has each, in CSR form."""

    words: Ids
    offsets: IntArray
    times: FloatArray

    @classmethod
    def of(cls, queries: Tokens) -> _QueryTerms:
        if len(queries) == 1:
            counts = np.bincount(queries.terms.codes, minlength=len(queries.terms.vocabulary))
            codes = np.flatnonzero(counts)
            words = Ids(frozen(codes), queries.terms.vocabulary)
            return cls(words, np.array([0, len(codes)]), counts[codes].astype(np.float64))
        table = queries.counts()
        words = Ids(frozen(table.indices.astype(np.int64)), queries.terms.vocabulary)
        return cls(words, table.indptr.astype(np.int64), table.data.astype(np.float64))

    @cached_property
    def sizes(self) -> IntArray:
        """The number of distinct words of every query."""
        return np.diff(self.offsets)

    def sums(self, values: FloatArray) -> FloatArray:
        """The sum over every query of a value for each vocabulary word, counting repeated words as often."""
        query = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.bincount(query, values[self.words.codes] * self.times, len(self.sizes)).astype(np.float64)


class _Formulae:
    """The seven features of one field."""

    def __init__(self, settings: Settings, field: TermCounts, terms: _QueryTerms) -> None:
        self.settings, self.field, self.terms = settings, field, terms
        occurrences = np.asarray(field.occurrences(terms.words), dtype=np.float64)
        self.share = occurrences[terms.words.codes] / max(field.length, 1)
        self.mean_length = (field.length / field.documents if field.documents else 0) or 1.0
        self.weight, self.idf = self._idf()

    def _idf(self) -> tuple[FloatArray, FloatArray]:
        """The idf of every (query, word) entry, and of every query."""
        total = float(self.field.documents)
        frequencies = np.asarray(self.field.frequencies(self.terms.words), dtype=np.float64)
        having = np.minimum(np.maximum(frequencies, 0), total)
        if self.settings.idf != "code":
            rarity = idf(having, total) if self.settings.idf == "log" else total / np.maximum(having, 1.0)
            return rarity[self.terms.words.codes], self.terms.sums(rarity)
        words = self.terms.sums(np.ones(len(having)))
        summed = self.terms.sums(having)
        mean = summed / np.maximum(words, 1.0)
        weights = np.maximum(np.log2((total - mean + 0.5) / (mean + 0.5)), 0.0)
        weights = np.where(words > 0, weights, 0.0)
        return np.repeat(weights, self.terms.sizes), weights

    def of(self, queries: IntArray, documents: IntArray) -> FloatArray:
        """The features of some pairs, of shape (pairs, 7)."""
        entries, rows, counted = self._counted(queries, documents)
        values = _values(
            self.settings,
            counted,
            _Words(self.terms.times[entries], self.weight[entries], self.share[entries]),
            _Documents(self.field.lengths[documents], self.field.distinct[documents], self.mean_length),
            lambda of_pairs: of_pairs[rows],
        )
        tf, *others = _segment_sums(values, np.cumsum(self.terms.sizes[queries]))
        return np.stack((tf, self.idf[queries], *others), axis=1)

    def bm25(self, queries: IntArray, documents: IntArray) -> FloatArray:
        """The BM25 of some pairs."""
        entries, rows, counted = self._counted(queries, documents)
        lengths = self.field.lengths[documents].astype(np.float64)
        weight = self.terms.times[entries] * self.weight[entries]
        ends = np.cumsum(self.terms.sizes[queries])
        spread = _spread(self.settings, lengths, self.mean_length)[rows]
        relative = counted / np.maximum(lengths, 1.0)[rows] if self.settings.relative else counted
        return _segment_sums(weight * _saturated(self.settings, relative, spread), ends)

    def _counted(self, queries: IntArray, documents: IntArray) -> tuple[IntArray, IntArray, FloatArray]:
        """For every word of every pair: its entry among the query terms, its pair, and its count."""
        entries = rows_of(self.terms.offsets, queries)
        rows = np.repeat(np.arange(len(queries)), self.terms.sizes[queries])
        counts = self.field.counts(documents[rows], self.terms.words[entries])
        return entries, rows, np.asarray(counts, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Words:
    """Words of a query: their counts in it, their idf, and their shares of the collection."""

    times: FloatArray
    weight: FloatArray
    share: FloatArray


@dataclass(frozen=True, eq=False)
class _Documents:
    """Documents: their numbers of terms and of distinct terms, and the mean number of terms in the
    collection."""

    lengths: NDArray[Any]
    distinct: NDArray[Any]
    mean_length: float | FloatArray


def _of_one_query(fields: Sequence[_Formulae], documents: IntArray, table: FloatArray) -> None:
    """Fill in the features of one query's pairs: arrays are fields × words × documents."""
    terms = fields[0].terms
    shape = (len(fields), len(terms.words), len(documents))
    rows, words = np.tile(documents, shape[1]), terms.words[np.repeat(np.arange(shape[1]), shape[2])]
    counted = np.array([each.field.counts(rows, words) for each in fields], dtype=np.float64).reshape(shape)
    weight, share = (
        np.array([getattr(each, name) for each in fields])[..., None] for name in ("weight", "share")
    )
    lengths = np.array([each.field.lengths[documents] for each in fields])
    distinct = np.array([each.field.distinct[documents] for each in fields])
    mean_length = np.array([[each.mean_length] for each in fields])
    sums = _values(
        fields[0].settings,
        counted,
        _Words(terms.times[:, None], weight, share),
        _Documents(lengths, distinct, mean_length),
        lambda of_documents: of_documents[:, None],
    ).sum(axis=-2)
    for at, each in enumerate(fields):
        first = at * len(_KINDS)
        table[:, first], table[:, first + 1] = sums[0, at], each.idf[0]
        table[:, first + 2 : first + len(_KINDS)] = sums[1:, at].T
    table[:, -len(fields) :] = lengths.T


def _values(
    settings: Settings,
    counted: FloatArray,
    words: _Words,
    documents: _Documents,
    spread: Callable[[FloatArray], FloatArray],
) -> FloatArray:
    """The contribution of every query word to its six sums for a document: TF, TF·IDF, BM25 and ln p(t|d)
    under absolute discounting, Dirichlet and Jelinek-Mercer smoothing, 0 where p is 0.

    `counted` is how often a document has a word; values of words broadcast against it, and those of documents
    do after `spread`. Where a document lacks the word, every p is a product of a factor of the document and
    one of the word, so a logarithm of their combination is only needed where it has the word.
    """
    lam, mu, delta = settings.jelinek, settings.dirichlet, settings.discount
    lengths = documents.lengths.astype(np.float64)
    long = np.maximum(lengths, 1.0)
    each_long, share, has = spread(long), words.share, counted > 0
    backoff = np.where(lengths > 0, delta * documents.distinct / long, 1.0)
    values = np.empty((6, *counted.shape))
    np.divide(counted, each_long, out=values[0])
    weight = words.times * words.weight
    np.multiply(weight, values[0], out=values[1])
    saturated = _saturated(
        settings,
        values[0] if settings.relative else counted,
        spread(_spread(settings, lengths, documents.mean_length)),
    )
    np.multiply(weight, saturated, out=values[2])
    smoothed = values[3:]
    with np.errstate(divide="ignore"):
        of_word = np.log(share)
        np.add(spread(np.log(backoff)), of_word, out=smoothed[0])
        np.add(spread(np.log(mu / (lengths + mu))), of_word, out=smoothed[1])
        np.add(np.log(lam), of_word, out=smoothed[2])
        np.log(
            (
                np.maximum(counted - delta, 0) / each_long + spread(backoff) * share,
                (counted + mu * share) / spread(lengths + mu),
                (1 - lam) * counted / each_long + lam * share,
            ),
            out=smoothed,
            where=has,
        )
    smoothed[~np.isfinite(smoothed)] = 0.0
    values[0] *= words.times
    smoothed *= words.times
    return values


def _spread(settings: Settings, lengths: FloatArray, mean: float | FloatArray) -> FloatArray:
    """k1(1 − b + b·L/avg) of documents."""
    spread: FloatArray = settings.k1 * (1 - settings.b + settings.b * lengths / mean)
    return spread


def _saturated(settings: Settings, counted: FloatArray, spread: FloatArray) -> FloatArray:
    """x(k1 + 1)/(x + spread), 0 at x = 0; x is the count, or the relative one."""
    values = np.zeros_like(counted)
    return np.divide(counted * (settings.k1 + 1), counted + spread, out=values, where=counted > 0)


def _segment_sums(values: FloatArray, ends: IntArray) -> FloatArray:
    """The sum of every segment along the last axis, from the segments' `ends`; segments may be empty."""
    starts = np.concatenate(([0], ends[:-1]))
    if not len(ends):
        return np.zeros((*values.shape[:-1], 0))
    padded = np.concatenate((values, np.zeros((*values.shape[:-1], 1))), axis=-1)
    return np.where(ends > starts, np.add.reduceat(padded, starts, axis=-1), 0.0)


def _blocks(terms: _QueryTerms, pairs: Pairs) -> Iterator[slice]:
    """Ranges of pairs with about `_BLOCK` (pair, term) rows each."""
    ends = np.cumsum(terms.sizes[pairs.queries])
    first = 0
    while first < len(pairs):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + _BLOCK, side="right")))
        yield slice(first, last)
        first = last
