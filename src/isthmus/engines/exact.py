"""The simplest possible reader: documents in memory, every one of them a candidate.

It tests statistics on a document before a node relies on them, and other engines are compared with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Span, Vectors
from isthmus.engines.engine import (
    ANY,
    BY_FIELD,
    FIELDS,
    MOST_FACETS,
    Change,
    Constraints,
    Counted,
    Matches,
    WordCounts,
    year_of,
)
from isthmus.engines.terms import STOP, TermBatch


class ExactReader:
    """See `EngineReader`. If a document occurs several times, its last change counts."""

    def __init__(self, changes: Sequence[Change], vectors: Mapping[int, Vectors] | None = None) -> None:
        last = {each.id: each for each in changes}
        living = [each for each in last.values() if not each.removed]
        self.documents = sorted(living, key=lambda each: each.change)
        self._change = max((each.change for each in changes), default=0)
        batch = TermBatch.of(self.documents)
        self._words, place = batch.words()
        document, code, counts = batch.entries(place)
        shape = (len(BY_FIELD[:3]), len(self.documents), len(self._words))
        self._counts = np.zeros(shape, dtype=np.int32)
        for table, name in zip(self._counts, (*FIELDS, "lead"), strict=True):
            table[document, code] = counts[name]
        self._lengths = batch.lengths().astype(np.int32)
        self._texts = batch.texts()
        self._vectors = dict(vectors or {})
        self.vocabulary = object()

    @property
    def has_rules(self) -> bool:
        """Whether any document says who may see it."""
        return any(each.allow for each in self.documents)

    def seen_by(self, principals: frozenset[str]) -> ExactReader:
        """A reader of only the documents that these principals may see."""
        seen = [each for each in self.documents if not each.allow or principals.intersection(each.allow)]
        return ExactReader(seen, self._vectors)

    is_own = True

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def change(self) -> int:
        """The number of the last change."""
        return self._change

    @property
    def lengths(self) -> dict[str, int]:
        """Content terms of all documents, by field."""
        return dict(zip(FIELDS, self._lengths.sum(axis=0, dtype=np.int64).tolist(), strict=True))

    @property
    def _content(self) -> IntArray:
        return np.array([at for at, word in enumerate(self._words) if not word.startswith(STOP)], np.int64)

    def _rows(self, handles: IntArray) -> IntArray:
        return np.searchsorted(self.handles(), handles)

    def _codes(self, words: Sequence[str]) -> IntArray:
        place = {word: at for at, word in enumerate(self._words)}
        return np.array([place.get(word, -1) for word in words], dtype=np.int64)

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints | None = None) -> IntArray:
        """All documents that have any of the words and meet the constraints."""
        counts = self.counts(self.handles(), list(weights))
        handles = self.handles()[(counts.title + counts.body).any(axis=1)]
        return handles if only is None else self.meeting(handles, only)

    def meeting(self, handles: IntArray, only: Constraints) -> IntArray:
        """The documents whose texts meet the constraints, checked one by one."""
        return np.array([at for at in handles.tolist() if self._meets(at, only)], dtype=np.int64)

    def _meets(self, handle: int, only: Constraints) -> bool:
        (row,) = self._rows(np.array([handle]))
        title, body, *stops = (f" {column[row]} " for column in self._texts)

        def has(phrase: tuple[str, ...]) -> bool:
            content = [term for term in phrase if not term.startswith(STOP)]
            texts = (title, body) if content else stops
            words = content or [term.removeprefix(STOP) for term in phrase]
            return any(f" {' '.join(words)} " in text for text in texts)

        prefixed = (f" {prefix}" in title + body for prefix in only.prefixes)
        return (
            self._is_among(self.documents[row], only)
            and all(map(has, only.phrases))
            and all(prefixed)
            and not any(map(has, only.without))
        )

    def _is_among(self, each: Change, only: Constraints) -> bool:
        """Whether its type and date meet the constraints."""
        if (only.types and each.type not in only.types) or each.type in only.other_types:
            return False
        if only.since is None and only.until is None:
            return True
        since, until = (only.since, -np.inf), (only.until, np.inf)
        low, high = (bound if bound is not None else none for bound, none in (since, until))
        return each.date is not None and low <= each.date < high

    def nearest(self, vector: Vectors, depth: int, only: Constraints | None = None) -> IntArray:
        """The nearest documents; of equal cosines the later ones."""
        handles = self.handles() if only is None else self.meeting(self.handles(), only)
        cosines = self.cosines(handles, vector)
        order = np.lexsort((handles, cosines))[::-1]
        return handles[order[np.isfinite(cosines[order])][:depth]]

    def newest(self, depth: int, only: Constraints) -> IntArray:
        """The latest documents that meet constraints; of equal dates the later changes first."""
        rows = self._rows(self.meeting(self.handles(), only)).tolist()
        dates = [-np.inf if each.date is None else each.date for each in self.documents]
        rows.sort(key=lambda row: (dates[row], self.documents[row].change), reverse=True)
        chosen: IntArray = self.handles()[rows[:depth]]
        return chosen

    def matches(self, words: Iterable[str], only: Constraints | None = None) -> Matches:
        """Count matching documents one by one."""
        weights = dict.fromkeys(words, 1.0)
        handles = self.matching(weights, len(self), only) if weights else self.newest(len(self), only or ANY)
        rows = [self.documents[row] for row in self._rows(handles).tolist()]
        types = Counter(each.type for each in rows if each.type)
        years = Counter(year_of(each.date) for each in rows if each.date is not None)
        return Matches(len(rows), dict(types.most_common(MOST_FACETS)), dict(years.most_common(MOST_FACETS)))

    def beginning(self, prefix: str, limit: int | None = None) -> list[tuple[str, int]]:
        """Terms with this prefix and the number of documents that have each, most frequent first."""
        words = [self._words[at] for at in self._content.tolist() if self._words[at].startswith(prefix)]
        counts = self.tables(words)["text.having"].astype(int).tolist()
        terms = sorted(zip(words, counts, strict=True), key=lambda each: (-each[1], each[0]))
        return [each for each in terms if each[1]][:limit]

    def cosines(self, handles: IntArray, vector: Vectors) -> FloatArray:
        """The cosine of each document with a vector; −inf for a document without direction."""
        vectors = self.vectors(handles)
        norms = np.linalg.norm(vectors, axis=1)
        none = np.full(len(handles), -np.inf)
        products = (vectors @ vector).astype(np.float64)
        return np.asarray(np.divide(products, norms * np.linalg.norm(vector), out=none, where=norms > 0))

    def vectors(self, handles: IntArray) -> Vectors:
        """The vectors of documents; zeros for one that has none."""
        width = max((len(vector) for vector in self._vectors.values()), default=0)
        none = np.zeros(width, dtype=np.float32)
        rows = [self._vectors.get(handle, none) for handle in handles.tolist()]
        return np.array(rows, dtype=np.float32).reshape(len(handles), width)

    def best_span(self, handle: int, vector: Vectors) -> Span | None:
        """None: documents are not split into passages."""
        return None

    def counts(self, handles: IntArray, words: Sequence[str]) -> WordCounts:
        """Count how often each document has each word."""
        rows, codes = self._rows(handles), self._codes(words)
        tables = np.zeros((3, len(rows), len(codes)), dtype=np.int32)
        tables[:, :, codes >= 0] = self._counts[:, rows][:, :, codes[codes >= 0]]
        distinct = (self._counts[:2, rows][:, :, self._content] > 0).sum(axis=2).T
        title, body, lead = tables
        return WordCounts(title, body, lead, self._lengths[rows], distinct.astype(np.int32))

    def tables(self, words: Sequence[str]) -> dict[str, FloatArray]:
        """The counts of words over all documents."""
        known = np.append(self._totals(np.arange(len(self))), np.zeros((len(BY_FIELD), 1)), axis=1)
        return dict(zip(BY_FIELD, known[:, self._codes(words)], strict=True))

    def _totals(self, rows: IntArray) -> IntArray:
        title, body, _ = self._counts[:, rows]
        having = [(table > 0).sum(axis=0) for table in (title + body, title, body)]
        return np.array([having[0], having[1], title.sum(axis=0), having[2], body.sum(axis=0)], np.int64)

    def ids(self, handles: IntArray) -> list[str]:
        """The ids of documents."""
        return [self.documents[row].id for row in self._rows(handles).tolist()]

    def handles(self) -> IntArray:
        """All documents, in the order of their changes."""
        return np.array([each.change for each in self.documents], dtype=np.int64)

    def changed_after(self, change: int) -> int:
        """How many documents were written after a change."""
        return int((self.handles() > change).sum())

    def terms(self, handles: IntArray) -> Counted:
        """All terms of documents but stop words."""
        rows = self._rows(handles)
        title, body, lead = self._counts[:, rows]
        both = title + body
        document, at = np.nonzero(both[:, self._content])
        word = self._content[at]
        times = both[document, word].astype(np.float64)
        return Counted(len(rows), document, word, times, lead[document, word] > 0)

    def words(self, first: int = 0) -> list[str]:
        """The words with codes from `first` on."""
        return self._words[first:]

    def statistics(
        self, names: Sequence[str], handles: IntArray | None = None
    ) -> tuple[Ids, Mapping[str, IntArray]]:
        """The sorted vocabulary, without stop words, and the named tables."""
        totals = self._totals(np.arange(len(self)) if handles is None else self._rows(handles))
        tables = {name: totals[BY_FIELD.index(name)] for name in names}
        some = [at for at in self._content.tolist() if any(table[at] for table in tables.values())]
        order = sorted(some, key=self._words.__getitem__)
        terms = Ids.of([self._words[at] for at in order])
        return terms, {name: table[order] for name, table in tables.items()}
