"""What lies between a node and whatever holds its documents.

A node writes changes to an `Engine` and searches an `EngineReader` of it: candidates of a query, exact term
counts of some documents, the vocabulary with its counts. BM25 with shared statistics, features, rankers and
releases are worked out above, the same for all engines.

Texts stay in the node's store, which has every document by its id: hits are fetched and highlighted from
there, so an engine stores what it counts and nothing to show. One that keeps texts of its own is a store as
well (`service.stores.DocumentStore`), and gives them by `get`. Queries are words; `Constraints` say which
documents they are searched in.

A document's handle is an integer that the engine chose; it names one version of the document and is never
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
"""The tables of a vocabulary: documents that have a word, and times it stands in them."""
MOST_FACETS = 50
"""Types, and years, that matches are counted by."""

Encoded = tuple[IntArray, Vectors, Sequence[Span]]
"""Documents, their vectors, and the span of the text that each is of."""


class Change(NamedTuple):
    """What a store has of a document since the change with this number."""

    id: str
    change: int
    removed: bool
    title: str
    body: str
    language: str = ""
    """What it is analysed in, by its code; "" for English."""
    type: str = ""
    """Its kind in lower case: pdf, html; "" for one that is not known."""
    date: int | None = None
    """Its Unix time; None for one that is not known."""
    allow: tuple[str, ...] = ()
    """The principals who may see it; everybody where there are none."""


@dataclass(frozen=True, eq=False)
class WordCounts:
    """How often document i has word j in its title, its body, and the beginning of its body.

    `lengths` and `distinct`, of shape (documents, 2), are a document's terms and different terms in title and
    body; stop words are not among them.
    """

    title: NDArray[np.int32]
    body: NDArray[np.int32]
    lead: NDArray[np.int32]
    lengths: NDArray[np.int32]
    distinct: NDArray[np.int32]

    def totals(self) -> dict[str, FloatArray]:
        """Over the documents, by the names of `BY_FIELD`."""
        having = [(table > 0).sum(axis=0) for table in (self.title + self.body, self.title, self.body)]
        title, body = (table.sum(axis=0, dtype=np.int64) for table in (self.title, self.body))
        tables = (having[0], having[1], title, having[2], body)
        return {name: table.astype(np.float64) for name, table in zip(BY_FIELD, tables, strict=True)}

    def take(self, rows: IntArray) -> WordCounts:
        """Of some of the documents."""
        return WordCounts(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Counted:
    """The terms of some documents: entry by entry the document's position, the word's code, and the counts.

    `times` is of title and body together; `lead` says whether the document begins with the word.
    """

    documents: int
    document: IntArray
    word: IntArray
    times: FloatArray
    lead: NDArray[np.bool_]


@dataclass(frozen=True)
class Constraints:
    """What documents must have, all of it, and what they must not have, in terms as the engine knows them.

    A phrase stands in a title or in a body, its terms one after the other; stop words between them are passed
    over, but in a phrase of nothing else. A term is a phrase of one. A prefix begins a term that is no stop
    word.
    """

    phrases: tuple[tuple[str, ...], ...] = ()
    prefixes: tuple[str, ...] = ()
    without: tuple[tuple[str, ...], ...] = ()
    """Phrases that no document may have."""
    types: tuple[str, ...] = ()
    """Of which a document has one; any type will do where there are none."""
    other_types: tuple[str, ...] = ()
    """Of which a document has none."""
    since: int | None = None
    """The Unix time from which on a document's date lies. One without a date has none within bounds."""
    until: int | None = None
    """The Unix time before which it lies."""
    readers: frozenset[str] | None = None
    """The principals of whoever asks, for an engine elsewhere: documents that name none of them are none."""


ANY = Constraints()
"""What every document meets."""


def year_of(date: int) -> int:
    """The year of a Unix time, in UTC."""
    return int(np.datetime64(date, "s").astype("datetime64[Y]").astype(np.int64)) + 1970


@dataclass(frozen=True)
class Matches:
    """How many documents match, in all, by type and by year (UTC), the most frequent first; those without a
    type or a date are in `count` alone, and so are types and years beyond the first `MOST_FACETS`."""

    count: int
    types: Mapping[str, int]
    years: Mapping[int, int]


class CannotNarrow(IsthmusError):
    """The engine cannot search under these constraints: it says so, where it would else ignore them."""


class EngineReader(Protocol):
    """An engine's documents at one moment. Searches that began with it end with it."""

    @property
    def change(self) -> int:
        """The store's number of the last change that is in it."""

    @property
    def lengths(self) -> Mapping[str, int]:
        """Terms of all documents, by field."""

    @property
    def vocabulary(self) -> object:
        """The same for readers whose codes mean the same words."""

    def __len__(self) -> int:
        """The number of documents."""

    @property
    def has_rules(self) -> bool:
        """Whether any document says who may see it."""

    def seen_by(self, principals: frozenset[str]) -> EngineReader:
        """The documents that these principals may see, as if there were no others: nothing that the reader
        says depends on what it leaves out, but for what `is_own` says."""

    @property
    def is_own(self) -> bool:
        """Whether counts of terms are of these documents alone, though others are hidden."""

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints | None = None) -> IntArray:
        """Documents with any of the words, among them the best `depth` by BM25 with these weights, nearly
        always: more than `depth`, so that exact scores decide; of those that meet the constraints."""

    def meeting(self, handles: IntArray, only: Constraints) -> IntArray:
        """Those of some documents that meet constraints."""

    def nearest(self, vector: Vectors, depth: int, only: Constraints | None = None) -> IntArray:
        """The `depth` documents with the largest cosines to a vector; of those that meet the constraints."""

    def newest(self, depth: int, only: Constraints) -> IntArray:
        """The `depth` documents with the latest dates that meet constraints, the latest first, then those
        without a date."""

    def matches(self, words: Iterable[str], only: Constraints | None = None) -> Matches:
        """Of the documents that have any of the words, or of all where none is named, those that meet the
        constraints."""

    def beginning(self, prefix: str, limit: int | None = None) -> list[tuple[str, int]]:
        """Terms but stop words that begin so, with about how many documents have each, most frequent
        first."""

    def cosines(self, handles: IntArray, vector: Vectors) -> FloatArray:
        """Of documents; −inf for one that has no direction, or none yet."""

    def vectors(self, handles: IntArray) -> Vectors:
        """The vectors of documents; zeros for one that has none."""

    def best_span(self, handle: int, vector: Vectors) -> Span | None:
        """Where in a document's body the passage nearest to a vector stands; None without vectors."""

    def counts(self, handles: IntArray, words: Sequence[str]) -> WordCounts:
        """How often documents have words."""

    def tables(self, words: Sequence[str]) -> dict[str, FloatArray]:
        """The counts of some words over all documents, by the names of `BY_FIELD`."""

    def ids(self, handles: IntArray) -> list[str]:
        """The ids of documents."""

    def handles(self) -> IntArray:
        """All documents, in the order of their changes."""

    def changed_after(self, change: int) -> int:
        """How many documents were written after a change."""

    def terms(self, handles: IntArray) -> Counted:
        """All terms of documents, in codes that `words` spells."""

    def words(self, first: int = 0) -> list[str]:
        """The words of codes from `first` on; a code means the same word as long as the engine lives."""

    def statistics(
        self, names: Sequence[str], handles: IntArray | None = None
    ) -> tuple[Ids, Mapping[str, IntArray]]:
        """The vocabulary in order with the tables named, of all documents or of some."""


class Engine(Protocol):
    """One writer, many readers."""

    @property
    def reader(self) -> EngineReader:
        """The documents as they are now; replaced in one assignment."""

    def apply(self, changes: Sequence[Change]) -> None:
        """Bring in changes in ascending order: on disk and found when this returns. Those that it has
        already do no harm."""

    @property
    def encoder(self) -> str:
        """The encoder that the vectors are of; "" without vectors."""

    @property
    def wasted(self) -> int:
        """How many versions of documents it stores that are gone or have changed."""

    @property
    def wasted_since(self) -> float:
        """The Unix time of the first change that left one of those."""

    @property
    def encoded(self) -> int:
        """How many documents have a vector of the encoder that is filled in."""

    def unencoded(self, limit: int) -> IntArray:
        """Documents without a vector of the encoder that is filled in, the first `limit` of them."""

    def unfinished(self) -> dict[int, set[Span]]:
        """Some documents with vectors of some passages and not of others, and the spans that have one."""

    def encode(
        self,
        handles: IntArray,
        vectors: Vectors,
        spans: Sequence[Span],
        passages: Sequence[int] | None = None,
    ) -> None:
        """Give documents vectors, one for every span of the body; `passages` is how many each has in all."""

    def recode(
        self, name: str, width: int, batches: Iterable[Encoded] | None = None, *, keep: bool = True
    ) -> None:
        """Take vectors of another encoder, none of width 0; with `batches` all now, else as `encode` brings
        them. Readers see the old ones until every document has a new one, unless those are not to be kept."""

    def maintain(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Do a piece of slow work, if there is any: whether there was. Seen after `refresh`. The one method
        that may run while another thread writes."""

    def refresh(self) -> None:
        """Show what `maintain` has done to readers that begin."""

    def rebuild(self, batches: Iterable[Sequence[Change]]) -> None:
        """Write all documents anew, so that nothing remains of those that are gone."""

    def close(self) -> None:
        """End what runs; readers stay usable."""
