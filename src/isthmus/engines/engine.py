"""The interface between a node and the engine that holds its documents.

A node writes changes to an `Engine` and searches its `EngineReader`: candidates of a query, exact term counts
of some documents, the vocabulary with its counts. BM25 with shared statistics, features, rankers and releases
are computed outside the engine, in the same way for all engines.

Texts stay in the node's store, which has every document by its id: hits are fetched and highlighted from
there, so an engine stores what it counts and nothing to display. An engine with texts of its own is a store
as well (`service.stores.DocumentStore`), and returns them by `get`. Queries are words; `Constraints` say
which documents are searched.

A document's handle is an integer chosen by the engine; it identifies one version of the document and is never
used for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Span, Vectors
from isthmus.errors import IsthmusError

FIELDS = ("title", "body")
BY_FIELD = ("text.having", "title.having", "title.standing", "body.having", "body.standing")
"""The tables of a vocabulary: documents that have a word (`having`), and its occurrences in them
(`standing`)."""
MOST_FACETS = 50
"""Maximum number of types, and of years, by which matches are counted."""

Encoded = tuple[IntArray, Vectors, Sequence[Span]]
"""Documents, their vectors, and the span of the text that each vector encodes."""


class Change(NamedTuple):
    """The state of a document in the store since the change with this number."""

    id: str
    change: int
    removed: bool
    title: str
    body: str
    language: str = ""
    """Code of the language in which it is analysed; "" for English."""
    type: str = ""
    """Its type in lower case, such as pdf or html; "" if unknown."""
    date: int | None = None
    """Its date as Unix time; None if unknown."""
    allow: tuple[str, ...] = ()
    """The principals who may see it; empty for everybody."""


@dataclass(frozen=True, eq=False)
class WordCounts:
    """How often document i has word j in its title, its body, and its lead (the beginning of the body).

    `lengths` and `distinct`, of shape (documents, 2), are a document's numbers of terms and of distinct terms
    in title and body, without stop words.
    """

    title: NDArray[np.int32]
    body: NDArray[np.int32]
    lead: NDArray[np.int32]
    lengths: NDArray[np.int32]
    distinct: NDArray[np.int32]

    def totals(self) -> dict[str, FloatArray]:
        """Sums over the documents, by the names of `BY_FIELD`."""
        having = [(table > 0).sum(axis=0) for table in (self.title + self.body, self.title, self.body)]
        title, body = (table.sum(axis=0, dtype=np.int64) for table in (self.title, self.body))
        tables = (having[0], having[1], title, having[2], body)
        return {name: table.astype(np.float64) for name, table in zip(BY_FIELD, tables, strict=True)}

    def take(self, rows: IntArray) -> WordCounts:
        """The counts of some of the documents."""
        return WordCounts(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Counted:
    """The terms of some documents as parallel arrays: for every entry the document's position, the word's
    code, and counts.

    `times` counts title and body together; `lead` says whether the beginning of the body has the word.
    """

    documents: int
    document: IntArray
    word: IntArray
    times: FloatArray
    lead: NDArray[np.bool_]


@dataclass(frozen=True)
class Constraints:
    """What documents must match, all of it, and what they must not match, in terms as the engine has them.

    A phrase matches consecutive terms of a title or of a body; stop words between them are skipped, except in
    a phrase of stop words only. A single term is a phrase, too. A prefix matches the beginning of a term that
    is not a stop word.
    """

    phrases: tuple[tuple[str, ...], ...] = ()
    prefixes: tuple[str, ...] = ()
    without: tuple[tuple[str, ...], ...] = ()
    """Phrases that no document may have."""
    types: tuple[str, ...] = ()
    """Accepted types; empty for any."""
    other_types: tuple[str, ...] = ()
    """Excluded types."""
    since: int | None = None
    """Unix time; documents with an earlier date do not match. With either bound, documents without a date do
    not."""
    until: int | None = None
    """Unix time; documents with this date or a later one do not match."""
    readers: frozenset[str] | None = None
    """The searcher's principals, for an external engine: documents that admit none of them do not match."""


ANY = Constraints()
"""Constraints that every document meets."""


def year_of(date: int) -> int:
    """The year of a Unix time, in UTC."""
    return int(np.datetime64(date, "s").astype("datetime64[Y]").astype(np.int64)) + 1970


@dataclass(frozen=True)
class Matches:
    """Numbers of matching documents: in all, by type and by year (UTC), most frequent first. Documents
    without a type or date, and those of types and years beyond the first `MOST_FACETS`, are in `count`
    only."""

    count: int
    types: Mapping[str, int]
    years: Mapping[int, int]


class CannotNarrow(IsthmusError):
    """The engine cannot search under these constraints; raised instead of ignoring them."""


class EngineReader(Protocol):
    """An engine's documents at one moment. A search uses the same reader from beginning to end."""

    @property
    def change(self) -> int:
        """The store's number of the last change that the reader includes."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """Terms of all documents, by field."""

    @property
    def vocabulary(self) -> object:
        """An object that is the same for all readers whose codes mean the same words."""

    def __len__(self) -> int:
        """The number of documents."""

    @property
    def has_rules(self) -> bool:
        """Whether any document says who may see it."""

    def seen_by(self, principals: frozenset[str]) -> EngineReader:
        """The documents that these principals may see, as if there were no others. Results do not depend on
        the other documents, except counts of terms if `is_own` is False."""

    @property
    def is_own(self) -> bool:
        """Whether counts of terms cover these documents only, even if others are hidden."""

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints | None = None) -> IntArray:
        """Candidates: documents with any of the words that meet the constraints. Nearly always, the best
        `depth` by BM25 with these weights are among them; there are more than `depth`, so that exact
        scores decide."""

    def meeting(self, handles: IntArray, only: Constraints) -> IntArray:
        """The given documents that meet the constraints."""

    def nearest(self, vector: Vectors, depth: int, only: Constraints | None = None) -> IntArray:
        """Among the documents that meet the constraints, the `depth` with the largest cosines to a vector."""

    def newest(self, depth: int, only: Constraints) -> IntArray:
        """The `depth` latest documents that meet constraints, latest first and those without a date last."""

    def matches(self, words: Iterable[str], only: Constraints | None = None) -> Matches:
        """Count the documents that have any of the words, or all if no word is given, and meet the
        constraints."""

    def beginning(self, prefix: str, limit: int | None = None) -> list[tuple[str, int]]:
        """Terms with this prefix, without stop words, and about how many documents have each, most frequent
        first."""

    def cosines(self, handles: IntArray, vector: Vectors) -> FloatArray:
        """The cosine of each document with a vector; −inf for a document without direction, or without a
        vector yet."""

    def vectors(self, handles: IntArray) -> Vectors:
        """The vectors of documents; zeros for one that has none."""

    def best_span(self, handle: int, vector: Vectors) -> Span | None:
        """The span of the passage nearest to a vector in a document's body; None without vectors."""

    def counts(self, handles: IntArray, words: Sequence[str]) -> WordCounts:
        """Count how often each document has each word."""

    def tables(self, words: Sequence[str]) -> dict[str, FloatArray]:
        """The counts of some words over all documents, by the names of `BY_FIELD`."""

    def ids(self, handles: IntArray) -> list[str]:
        """The ids of documents."""

    def handles(self) -> IntArray:
        """All documents, in the order of their changes."""

    def changed_after(self, change: int) -> int:
        """How many documents were written after a change."""

    def terms(self, handles: IntArray) -> Counted:
        """All terms of documents except stop words, as codes that `words` resolves."""

    def words(self, first: int = 0) -> list[str]:
        """The words with codes from `first` on; a code means the same word as long as the engine exists."""

    def statistics(
        self, names: Sequence[str], handles: IntArray | None = None
    ) -> tuple[Ids, Mapping[str, IntArray]]:
        """The sorted vocabulary and the named tables, over all documents or some."""


class Engine(Protocol):
    """A node's search engine, with one writer and many readers."""

    @property
    def reader(self) -> EngineReader:
        """The documents as they are now; replaced by a single assignment."""

    def apply(self, changes: Sequence[Change]) -> None:
        """Write changes in ascending order; they are on disk and searchable on return. Changes that were
        applied before are harmless."""

    @property
    def encoder(self) -> str:
        """The encoder of the vectors; "" without vectors."""

    @property
    def wasted(self) -> int:
        """Number of stored document versions that were removed or replaced."""

    @property
    def wasted_since(self) -> float:
        """Unix time of the first change that left such a version."""

    @property
    def encoded(self) -> int:
        """Number of documents that have a vector of the encoder whose vectors are being added."""

    def unencoded(self, limit: int) -> IntArray:
        """The first `limit` documents without a vector of the encoder whose vectors are being added."""

    def unfinished(self) -> dict[int, set[Span]]:
        """Some documents of which only part of the passages have vectors, with the spans that do."""

    def encode(
        self,
        handles: IntArray,
        vectors: Vectors,
        spans: Sequence[Span],
        passages: Sequence[int] | None = None,
    ) -> None:
        """Add vectors to documents, one for every span of the body; `passages` is each document's number of
        passages in all."""

    def recode(
        self, name: str, width: int, batches: Iterable[Encoded] | None = None, *, keep: bool = True
    ) -> None:
        """Change to the vectors of another encoder; width 0 removes vectors. With `batches` all are added
        now, otherwise `encode` adds them. Readers see the old vectors until every document has a new one,
        unless `keep` is False."""

    def maintain(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Do one piece of slow work. Returns whether there was any; its result is visible after `refresh`.
        The only method that may run while another thread writes."""

    def refresh(self) -> None:
        """Make the result of `maintain` visible to new readers."""

    def rebuild(self, batches: Iterable[Sequence[Change]]) -> None:
        """Write all documents anew, so that nothing remains of those that are gone."""

    def close(self) -> None:
        """Stop background work; readers stay usable."""
