"""The union of several runs: one row per (query, document) that occurs in any of them.

All of fusion is arithmetic on this table. Columns belong to retrievers; a document that a retriever did not
return is absent from its column, and the caller always defines what absence means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import DataError
from isthmus.tables import Run, falling, offsets_of


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of one run as arrays: rows best first, grouped by query."""

    scores: FloatArray
    offsets: IntArray
    candidates: IntArray
    """The number of documents in the union for each of these queries."""

    @cached_property
    def lengths(self) -> IntArray:
        return np.diff(self.offsets)

    @cached_property
    def list_of_row(self) -> IntArray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def ranks(self) -> IntArray:
        """The place of every row in its list, from 0."""
        return np.arange(len(self.scores)) - self.offsets[self.list_of_row]

    @cached_property
    def low(self) -> FloatArray:
        """The lowest score of every list, for every row."""
        return self.per_row(np.minimum)

    @cached_property
    def high(self) -> FloatArray:
        """The highest score of every list, for every row."""
        return self.per_row(np.maximum)

    def per_list(self, reduce: np.ufunc, values: FloatArray | None = None) -> FloatArray:
        """Return the sum, minimum or maximum of every list; 0 for an empty one."""
        filled = np.flatnonzero(self.lengths)
        reduced = np.zeros(len(self.lengths))
        if len(filled):
            reduced[filled] = reduce.reduceat(self.scores if values is None else values, self.offsets[filled])
        return reduced

    def per_row(self, reduce: np.ufunc, values: FloatArray | None = None) -> FloatArray:
        """Return `per_list`, repeated for the rows of each list."""
        return self.per_list(reduce, values)[self.list_of_row]


def with_confidences(run: Run, confidences: Run) -> Run:
    """Return a run whose probabilities are the scores of another run with the same rows, as `calibrate`
    writes them.

    Raises DataError for a row that only one of the two has, and for a score outside 0..1.
    """
    union = Union.of([run, confidences])
    if not union.present.all():
        row = int(np.flatnonzero(~union.present.all(axis=0))[0])
        query, document = union.queries[union.query_of_row[row]], union.documents.word(row)
        lacking = "probabilities lack" if union.present[0, row] else "run lacks"
        raise DataError(
            f"the {lacking} document {document!r} of query {query!r}", cure="calibrate that run, all of it"
        )
    values = union.spread([run.scores, confidences.scores])[1][union.places[0]]
    strange = values[(values < 0) | (values > 1)]
    if len(strange):
        raise DataError(
            f"a score of {strange[0]:g} is no probability", cure="write it with isthmus calibrate"
        )
    return run.with_probabilities(values)


@dataclass(frozen=True, eq=False)
class Union:
    """The union table, in order of (query, document id).

    `places[i]` are the positions of run i's rows in it, `homes[i]` those of its queries in `queries`.
    """

    runs: tuple[Run, ...]
    queries: tuple[str, ...]
    offsets: IntArray
    documents: Ids
    places: tuple[IntArray, ...]
    homes: tuple[IntArray, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Union:
        """Align runs; a query that a run lacks has an empty list there. Raises DataError without runs."""
        if not runs:
            raise DataError("no runs to fuse", cure="give at least one run")
        queries = tuple(dict.fromkeys(query for run in runs for query in run.queries))
        position = {query: at for at, query in enumerate(queries)}
        ids = Ids.concat([run.documents for run in runs])
        size = max(1, len(ids.vocabulary))
        homes = tuple(np.array([position[query] for query in run.queries], np.int64) for run in runs)
        keys = np.concatenate([home[run.query_of_row] for home, run in zip(homes, runs, strict=True)])
        keys = keys * size + ids.codes
        order = np.argsort(keys)
        ordered = keys[order]
        first = np.ones(len(ordered), dtype=bool)
        np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
        place = np.empty(len(keys), dtype=np.int64)
        place[order] = np.cumsum(first) - 1
        pairs = ordered[first]
        query_of_row = pairs // size
        codes = pairs - query_of_row * size
        bounds = np.cumsum([run.rows for run in runs])[:-1]
        offsets = offsets_of(query_of_row, len(queries))
        documents = Ids(frozen(codes), ids.vocabulary)
        return cls(tuple(runs), queries, offsets, documents, tuple(np.split(place, bounds)), homes)

    @property
    def rows(self) -> int:
        """The number of (query, document) pairs."""
        return int(self.offsets[-1])

    @cached_property
    def query_of_row(self) -> IntArray:
        """The position in `queries` of every row."""
        return np.repeat(np.arange(len(self.queries)), np.diff(self.offsets))

    @cached_property
    def counts(self) -> FloatArray:
        """N(d): the number of runs that have the row."""
        return self.total([np.ones(run.rows) for run in self.runs])

    @cached_property
    def best_ranks(self) -> FloatArray:
        """The best rank, from 1, of the row in any run."""
        ranks = self.spread([np.asarray(run.ranks, dtype=np.float64) for run in self.runs], absent=np.inf)
        return np.asarray(ranks.min(axis=0))

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """Runs × rows: whether the run has the row."""
        return ~np.isnan(self.spread([run.scores for run in self.runs]))

    def total(self, values: Sequence[FloatArray]) -> FloatArray:
        """Return Σ, over the runs that have the row, of values given per run row; the order of runs does not
        matter."""
        if len(values) > 2:  # only a sum of two floats is independent of their order
            return np.asarray(np.sort(self.spread(values, absent=0.0), axis=0).sum(axis=0))
        total = np.zeros(self.rows)
        for place, column in zip(self.places, values, strict=True):
            total[place] += column
        return total

    def spread(self, values: Sequence[FloatArray], *, absent: float = np.nan) -> FloatArray:
        """Return runs × rows, from values per run row."""
        matrix = np.full((len(self.runs), self.rows), absent)
        for row, place, column in zip(matrix, self.places, values, strict=True):
            row[place] = column
        return matrix

    def lists(self, run: int, scores: FloatArray | None = None) -> Lists:
        """Return one run's lists, with its own scores or others."""
        table = self.runs[run]
        sizes = np.diff(self.offsets)[self.homes[run]]
        return Lists(table.scores if scores is None else scores, table.offsets, sizes)

    def ranked(self, scores: FloatArray, *, name: str = "", probabilities: FloatArray | None = None) -> Run:
        """Return the run of these fused scores, best first. Raises DataError if a score is not finite."""
        if not np.isfinite(scores).all():
            raise DataError("a fused score is not finite", cure="normalise the runs' scores first")
        order = self.best_first(scores)
        ordered = None if probabilities is None else frozen(probabilities[order])
        return Run(self.queries, self.offsets, self.documents[order], frozen(scores[order]), ordered, name)

    def best_first(self, scores: FloatArray) -> IntArray:
        """Return the rows by (query, score descending, document id descending).

        Rows of equal score leave the sort in arbitrary order and are then ordered by id, which is the order
        of row numbers; that is several times faster than sorting by two keys.
        """
        order = falling(scores, self.offsets)
        ranked = scores[order]
        tied = ranked[1:] == ranked[:-1]
        bounds = self.offsets[(self.offsets > 0) & (self.offsets < self.rows)]
        tied[bounds - 1] = False
        if tied.any():
            block = np.cumsum(np.concatenate(([True], ~tied)))
            among = np.flatnonzero(np.concatenate(([False], tied)) | np.concatenate((tied, [False])))
            order[among] = order[among][np.argsort(block[among] * self.rows - order[among])]
        return order

    def rows_of(self, other: Union) -> IntArray:
        """Return the positions in this union of the rows of a union of some of the same runs."""
        size = max(1, len(self.documents.vocabulary))
        position = {query: at for at, query in enumerate(self.queries)}
        homes = np.array([position[query] for query in other.queries], dtype=np.int64)
        wanted = homes[other.query_of_row] * size + other.documents.codes_in(self.documents)
        return np.searchsorted(self.query_of_row * size + self.documents.codes, wanted)

    def table(self, scores: FloatArray | None = None) -> Run:
        """Return the rows in their present order as a run for looking up judgements; it is not a ranking."""
        values = np.zeros(self.rows) if scores is None else scores
        return Run(self.queries, self.offsets, self.documents, frozen(values))
