"""`Run` and `Qrels`: ranked lists and relevance judgements.

Both are frozen, columnar and grouped by query (CSR: the rows of query i are `offsets[i]:offsets[i + 1]`).
Queries keep the order in which they first appeared; a run's rows are in trec_eval's order, score descending
and then document id descending as strings; judgements are in order of document id. Everything else in
Isthmus is array arithmetic over these columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import DataError, several
from isthmus.tables.grouped import ByQuery, group, offsets_of

UNJUDGED = np.iinfo(np.int32).min
"""The grade in `Run.grades` of a document without a judgement."""

_CHUNK = 1 << 15
"""Rows joined at a time: few enough that the arrays stay in the processor's cache."""

_LARGEST_KEY = 2**63

Names: TypeAlias = "Iterable[str] | pa.Array | pa.ChunkedArray | Ids"


@dataclass(frozen=True, eq=False, repr=False)
class _Rankings(ByQuery):
    """The part that `Run` and `Qrels` share: a document in every row."""

    documents: Ids

    def _aligned(self, other: Self) -> Self | None:
        """Return the other table with its queries in this one's order; None unless both have the same
        documents."""
        if self.rows != other.rows or set(self.queries) != set(other.queries):
            return None
        other = other[self.queries]
        same = np.array_equal(self.offsets, other.offsets) and np.array_equal(
            self.documents.codes_in(other.documents), other.documents.codes
        )
        return other if same else None

    def _keys_to_arrow(self) -> dict[str, Any]:
        """The columns query and document."""
        return {"query": self._query_column.to_arrow(), "document": self.documents.to_arrow()}

    def _nested(self, values: NDArray[Any]) -> dict[str, dict[str, Any]]:
        """`{query: {document: value}}`."""
        rows = list(zip(self.documents.tolist(), values.tolist(), strict=True))
        return {query: dict(rows[start:end]) for query, start, end in self.spans()}

    def _show(self, title: str, extra: str, values: NDArray[Any]) -> str:
        counts = f"{several(len(self), 'query', 'queries')}, {several(self.rows, 'row')}"
        lines = [f"{title}{counts}{extra}"]
        for query, start, end in list(self.spans())[:3]:
            visible = range(start, min(end, start + 3))
            pairs = [f"{self.documents.word(row)} {values[row]:g}" for row in visible]
            lines.append(f"  {query}  " + ", ".join(pairs) + (", …" if end - start > 3 else ""))
        return "\n".join([*lines, "  …"] if len(self) > 3 else lines)


@dataclass(frozen=True, eq=False, repr=False)
class Run(_Rankings):
    """Ranked lists: every query's documents with their scores, best first.

    >>> run = Run.from_dict({"q1": {"d1": 0.4, "d2": 0.9}}, name="bm25")
    >>> run
    Run 'bm25': 1 query, 2 rows
      q1  d2 0.9, d1 0.4

    `probabilities`, where a calibrator has added them, never change the order: order is by score.
    """

    scores: FloatArray
    probabilities: FloatArray | None = None
    name: str = ""
    arrival: IntArray | None = None
    """Position of every row in the input, for measures that break ties by it; None if in this order."""

    @classmethod
    def of(
        cls,
        queries: Names,
        documents: Names,
        scores: ArrayLike,
        *,
        probabilities: ArrayLike | None = None,
        name: str = "",
    ) -> Run:
        """Build from parallel columns in any order.

        Raises DataError for NaN and infinite scores, and for a document twice in one query.
        """
        query_ids, document_ids = _ids(queries), _ids(documents)
        values = _column(scores)
        _check_lengths(queries=query_ids, documents=document_ids, scores=values)
        distinct, groups, _ = group(query_ids)
        return cls._ordered(distinct, groups, document_ids, values, probabilities, name)

    @classmethod
    def from_dict(cls, lists: Mapping[str, Mapping[str, float]], *, name: str = "") -> Run:
        """Build from `{query: {document: score}}`; a query with an empty list is kept."""
        queries, groups, documents, values = _flatten(lists)
        return cls._ordered(queries, groups, documents, _column(values), None, name)

    @classmethod
    def _ordered(
        cls,
        queries: tuple[str, ...],
        groups: IntArray,
        documents: Ids,
        scores: FloatArray,
        probabilities: ArrayLike | None,
        name: str,
    ) -> Run:
        finite = np.isfinite(scores)
        if not finite.all():
            row = int(np.argmin(finite))
            raise DataError(
                f"score {scores[row]} of document {documents.word(row)!r} for query {queries[groups[row]]!r}",
                cure="scores must be finite numbers",
            )
        _check_no_duplicates(queries, groups, documents)
        checked = None if probabilities is None else _as_probabilities(probabilities, len(scores))
        offsets = offsets_of(groups, len(queries))
        if _is_best_first(groups, scores, documents.codes):
            return cls(queries, offsets, documents, frozen(scores), checked, name)
        order = _best_first(groups, scores, documents)
        checked = None if checked is None else frozen(checked[order])
        return cls(queries, offsets, documents[order], frozen(scores[order]), checked, name, frozen(order))

    def to_dict(self) -> dict[str, dict[str, float]]:
        """`{query: {document: score}}`, best first."""
        return self._nested(self.scores)

    def to_arrow(self) -> pa.Table:
        """Columns query, document, rank and score, and probability where there is one; best first."""
        columns = self._keys_to_arrow() | {"rank": self.ranks, "score": self.scores}
        if self.probabilities is not None:
            columns["probability"] = self.probabilities
        return pa.table(columns)

    def lists(self) -> Iterator[tuple[str, list[str], FloatArray]]:
        """Yield for every query its id, its documents best first, and their scores."""
        documents = self.documents.tolist()
        for query, start, end in self.spans():
            yield query, documents[start:end], self.scores[start:end]

    @cached_property
    def ranks(self) -> IntArray:
        """The rank of every row in its list, from 1."""
        return np.arange(self.rows) - self.offsets[self.query_of_row] + 1

    def top(self, k: int) -> Run:
        """Return the best k documents of every query."""
        return self.keep(self.ranks <= k)

    def with_scores(self, scores: ArrayLike, *, name: str | None = None) -> Run:
        """Return the same documents with new scores, sorted again; probabilities are dropped."""
        values = _column(scores)
        _check_lengths(rows=self.documents, scores=values)
        named = self.name if name is None else name
        groups = self.query_of_row
        ranked = Run._ordered(self.queries, groups, self.documents, values, None, named)
        if self.arrival is None:
            return ranked
        arrival = self.arrival if ranked.arrival is None else frozen(self.arrival[ranked.arrival])
        return replace(ranked, arrival=arrival)

    def with_probabilities(self, probabilities: ArrayLike | None) -> Run:
        """Return the same run with a probability of relevance for every row; the order does not change."""
        if probabilities is None:
            return replace(self, probabilities=None)
        return replace(self, probabilities=_as_probabilities(probabilities, self.rows))

    @property
    def required_probabilities(self) -> FloatArray:
        """The probabilities. Raises DataError if the run has none."""
        if self.probabilities is None:
            raise DataError(
                f"the run {self.name!r} has no probabilities", cure="calibrate it, or fuse with judgements"
            )
        return self.probabilities

    def named(self, name: str) -> Run:
        """The same run under another name."""
        return replace(self, name=name)

    def grades(self, qrels: Qrels) -> NDArray[np.int32]:
        """Return the grade of every row; `UNJUDGED` for a row without a judgement."""
        if not qrels.rows:
            return np.full(self.rows, UNJUDGED, dtype=np.int32)
        judged = np.append(qrels.grades, np.int32(UNJUDGED))
        return judged[qrels.rows_for(self)]

    @staticmethod
    def concat(runs: Sequence[Run], *, name: str = "") -> Run:
        """Concatenate runs; a query in several runs gets one list of all its documents.

        Queries with empty lists come last.
        """
        scores = np.concatenate([run.scores for run in runs]) if runs else np.empty(0)
        queries, groups, _ = group(Ids.concat([run._query_column for run in runs]))
        documents = Ids.concat([run.documents for run in runs])
        joined = Run._ordered(queries, groups, documents, scores, _all_probabilities(runs), name)
        return joined._with_empty(runs)

    def __eq__(self, other: object) -> bool:
        """Whether lists, scores and probabilities are the same; names and query order do not matter."""
        if not isinstance(other, Run):
            return NotImplemented
        aligned = self._aligned(other)
        if aligned is None or not np.array_equal(self.scores, aligned.scores):
            return False
        if self.probabilities is None or aligned.probabilities is None:
            return self.probabilities is aligned.probabilities
        return np.array_equal(self.probabilities, aligned.probabilities)

    __hash__ = None  # type: ignore[assignment]  # equality is by content

    def __repr__(self) -> str:
        title = f"Run {self.name!r}" if self.name else "Run"
        extra = "" if self.probabilities is None else ", with probabilities"
        values = self.scores if self.probabilities is None else self.probabilities
        return self._show(title + ": ", extra, values)

    def _take(self, rows: NDArray[Any]) -> Run:
        probabilities = None if self.probabilities is None else frozen(self.probabilities[rows])
        return replace(
            self,
            documents=self.documents[rows],
            scores=frozen(self.scores[rows]),
            probabilities=probabilities,
            arrival=None if self.arrival is None else frozen(self.arrival[rows]),
        )


@dataclass(frozen=True, eq=False, repr=False)
class Qrels(_Rankings):
    """Judgements: every query's judged documents with their integer grades.

    >>> Qrels.from_dict({"q1": {"d1": 2, "d2": 0}})
    Qrels: 1 query, 2 rows, grades 0..2
      q1  d1 2, d2 0

    A negative grade means judged but worthless (TREC marks spam so); it is kept and never relevant.
    """

    grades: NDArray[np.int32]

    @classmethod
    def of(cls, queries: Names, documents: Names, grades: ArrayLike) -> Qrels:
        """Build from parallel columns in any order.

        Raises DataError for a fractional grade, and for a document judged twice for one query.
        """
        query_ids, document_ids = _ids(queries), _ids(documents)
        values = as_grades(grades)
        _check_lengths(queries=query_ids, documents=document_ids, grades=values)
        distinct, groups, _ = group(query_ids)
        return cls._ordered(distinct, groups, document_ids, values)

    @classmethod
    def from_dict(cls, judgements: Mapping[str, Mapping[str, int]]) -> Qrels:
        """Build from `{query: {document: grade}}`."""
        queries, groups, documents, values = _flatten(judgements)
        return cls._ordered(queries, groups, documents, as_grades(values))

    @classmethod
    def _ordered(
        cls, queries: tuple[str, ...], groups: IntArray, documents: Ids, grades: NDArray[np.int32]
    ) -> Qrels:
        _check_no_duplicates(queries, groups, documents)
        order = np.argsort(_keys(groups, documents), kind="stable")
        offsets = offsets_of(groups, len(queries))
        return cls(queries, offsets, documents[order], frozen(grades[order]))

    def to_dict(self) -> dict[str, dict[str, int]]:
        """`{query: {document: grade}}`."""
        return self._nested(self.grades)

    def to_arrow(self) -> pa.Table:
        """Columns query, document and grade."""
        return pa.table(self._keys_to_arrow() | {"grade": self.grades})

    def rows_for(self, table: _Rankings) -> IntArray:
        """Return for every row of another table the row here with the same query and document; -1 if none."""
        if not self.rows:
            return np.full(table.rows, -1, dtype=np.int64)
        query_here = np.array([self.position.get(query, -1) for query in table.queries], np.int64)
        code_here = table.documents.translation(self.documents)
        result = np.empty(table.rows, dtype=np.int64)
        for first in range(0, table.rows, _CHUNK):
            rows = slice(first, first + _CHUNK)
            queries = query_here[table.query_of_row[rows]]
            codes = code_here[table.documents.codes[rows]]
            result[rows] = np.where((queries >= 0) & (codes >= 0), self._find(queries, codes), -1)
        return result

    def _find(self, queries: IntArray, codes: IntArray) -> IntArray:
        """Return the row of every (query, document code); -1 if none.

        A binary search runs among each query's own rows, all searches in step; on chunks that fit the
        processor's cache this is several times faster than `np.searchsorted` over all rows.
        """
        starts = self.offsets[queries]
        wanted = queries * max(1, len(self.documents.vocabulary)) + codes
        longest = int((self.offsets[queries + 1] - starts).max(initial=0))
        at = starts - 1
        for power in reversed(range(longest.bit_length())):
            step = np.int64(1 << power)
            # Rows of later queries have larger keys, so a step never leads out of the query.
            at += step * (self._padded_keys.take(at + step, mode="clip") <= wanted)
        return np.where((at >= starts) & (self._padded_keys.take(at, mode="clip") == wanted), at, -1)

    @cached_property
    def _padded_keys(self) -> IntArray:
        """One integer per row that orders by (query, document), and a larger one at the end."""
        keys = _keys(self.query_of_row, self.documents)
        return np.append(keys, np.iinfo(np.int64).max)

    @staticmethod
    def concat(parts: Sequence[Qrels]) -> Qrels:
        """Concatenate judgements. Raises DataError for a pair that is judged twice.

        Queries without judgements come last.
        """
        grades = np.concatenate([part.grades for part in parts]) if parts else np.empty(0, np.int32)
        queries, groups, _ = group(Ids.concat([part._query_column for part in parts]))
        documents = Ids.concat([part.documents for part in parts])
        return Qrels._ordered(queries, groups, documents, grades)._with_empty(parts)

    def __eq__(self, other: object) -> bool:
        """Whether the judgements are the same; query order does not matter."""
        if not isinstance(other, Qrels):
            return NotImplemented
        aligned = self._aligned(other)
        return aligned is not None and np.array_equal(self.grades, aligned.grades)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        span = f", grades {self.grades.min()}..{self.grades.max()}" if self.rows else ""
        return self._show("Qrels: ", span, self.grades)

    def _take(self, rows: NDArray[Any]) -> Qrels:
        return replace(self, documents=self.documents[rows], grades=frozen(self.grades[rows]))


def _flatten(lists: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, ...], IntArray, Ids, list[Any]]:
    queries = tuple(lists)
    lengths = np.array([len(lists[query]) for query in queries], dtype=np.int64)
    groups = np.repeat(np.arange(len(queries)), lengths)
    documents = Ids.of([document for query in queries for document in lists[query]])
    return queries, groups, documents, [v for query in queries for v in lists[query].values()]


def _column(values: ArrayLike) -> FloatArray:
    """Return a copy of the numbers, so that later changes by the caller have no effect."""
    return np.array(values, dtype=np.float64).reshape(-1)


def _ids(values: Names) -> Ids:
    return values if isinstance(values, Ids) else Ids.of(values)


def _keys(groups: IntArray, documents: Ids) -> IntArray:
    """One integer per row that orders by (query, document id)."""
    return groups * max(1, len(documents.vocabulary)) + documents.codes


def _is_best_first(groups: IntArray, scores: FloatArray, codes: IntArray) -> bool:
    """Whether the rows are in order already, as they mostly are in files."""
    falls = (scores[1:] < scores[:-1]) | ((scores[1:] == scores[:-1]) & (codes[1:] < codes[:-1]))
    return bool(((groups[1:] > groups[:-1]) | ((groups[1:] == groups[:-1]) & falls)).all())


def _best_first(groups: IntArray, scores: FloatArray, documents: Ids) -> IntArray:
    """Return the rows by query, score descending and id descending.

    One integer per row that orders like the three keys together sorts several times faster than they do; it
    fits 64 bits unless (queries × distinct scores × distinct ids) passes 9e18.
    """
    distinct, places = np.unique(-scores, return_inverse=True)
    keys = groups * len(distinct) + places
    size = len(documents.vocabulary)
    if (int(groups.max()) + 1) * len(distinct) * size < _LARGEST_KEY:
        return np.argsort(keys * size - documents.codes)
    return np.lexsort((-documents.codes, keys))


def _check_lengths(**columns: Any) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise DataError(f"columns differ in length: {counts}")


def duplicate_rows(groups: IntArray, documents: Ids) -> tuple[int, int] | None:
    """Return the first two rows with the same document for the same query; None if there are none."""
    keys = _keys(groups, documents)
    ordered = np.sort(keys)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return None
    first, second = np.flatnonzero(keys == twice[0])[:2].tolist()
    return first, second


def _check_no_duplicates(queries: tuple[str, ...], groups: IntArray, documents: Ids) -> None:
    twice = duplicate_rows(groups, documents)
    if twice is not None:
        row = twice[1]
        raise DataError(
            f"document {documents.word(row)!r} appears twice for query {queries[groups[row]]!r}",
            cure="keep one row per query and document",
        )


def as_grades(grades: ArrayLike) -> NDArray[np.int32]:
    """Return the grades as 32-bit whole numbers. Raises DataError for any other value."""
    values = np.asarray(grades).reshape(-1)
    with np.errstate(invalid="ignore"):
        whole = values.astype(np.int32)
    wrong = (whole != values) | (whole == UNJUDGED)
    if wrong.any():
        raise DataError(
            f"grade {values[np.argmax(wrong)]} is not a whole number of 32 bits", cure="grades are integers"
        )
    return whole


def _as_probabilities(values: ArrayLike, rows: int) -> FloatArray:
    column = _column(values)
    if len(column) != rows:
        raise DataError(f"{len(column)} probabilities for {rows} rows")
    if not ((column >= 0) & (column <= 1)).all():
        raise DataError("a probability lies outside 0..1 or is NaN")
    return frozen(column)


def _all_probabilities(runs: Sequence[Run]) -> FloatArray | None:
    columns = [run.probabilities for run in runs if run.probabilities is not None]
    return np.concatenate(columns) if runs and len(columns) == len(runs) else None
