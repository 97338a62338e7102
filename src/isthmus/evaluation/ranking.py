"""Rankings joined with judgements: the arrays from which every measure is computed.

A `Ranking` holds the join; a `RankingView` is its order under one tie rule; `Hits` are the judged or the
relevant rows of a view, sorted by query and rank. All measures of one evaluation share them, and no measure
loops over queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError, DataError
from isthmus.randomness import Streams
from isthmus.tables import UNJUDGED, Qrels, Run, falling

_BLOCK = 1 << 22


@dataclass(frozen=True, eq=False)
class Hits:
    """Some rows of ranked lists, sorted by query and then rank."""

    size: int
    """The number of queries, including those without rows."""
    query: IntArray
    rank: IntArray
    grade: NDArray[np.int32]
    row: IntArray
    """The index of each row in the run, or in the judgements for an ideal list."""

    @cached_property
    def count(self) -> IntArray:
        """The number of rows of every query."""
        return np.bincount(self.query, minlength=self.size)

    @cached_property
    def start(self) -> IntArray:
        """The first row of every query."""
        return np.cumsum(self.count) - self.count

    @cached_property
    def nth(self) -> IntArray:
        """The place of every row among its query's rows, from 0."""
        return np.arange(len(self.query)) - self.start[self.query]

    def keep(self, mask: NDArray[np.bool_]) -> Hits:
        """The rows inside the mask."""
        at = np.flatnonzero(mask)
        if len(at) == len(mask):
            return self
        return Hits(self.size, self.query[at], self.rank[at], self.grade[at], self.row[at])

    def to(self, cutoff: int | float | None) -> Hits:
        """Return the rows down to a rank; None for all."""
        return self if cutoff is None else self.keep(self.rank <= cutoff)

    def total(self, values: NDArray[Any]) -> FloatArray:
        """Return the sum of a value over every query's rows, added in order of rank."""
        return np.bincount(self.query, weights=values, minlength=self.size).astype(np.float64)

    def before(self, mask: NDArray[np.bool_]) -> IntArray:
        """For every row, how many rows inside the mask stand above it in its list."""
        above: IntArray = np.cumsum(mask) - mask
        return above - above[self.start[self.query]]

    def running(self, operation: np.ufunc, values: FloatArray) -> FloatArray:
        """Accumulate values within every query; each row gets the result over all rows down to its rank.

        Rows are laid out as (query, place) in blocks, so that sums of one query do not lose digits to the
        sums of another.
        """
        accumulated = np.empty(len(values))
        width = int(self.count.max(initial=0))
        step = max(1, _BLOCK // max(1, width))
        for first in range(0, self.size, step):
            rows = slice(*np.searchsorted(self.query, (first, first + step)))
            block = np.full((min(step, self.size - first), width), float(operation.identity or 0))
            place = self.query[rows] - first, self.nth[rows]
            block[place] = values[rows]
            accumulated[rows] = operation.accumulate(block, axis=1)[place]
        return accumulated

    def last_to(self, query: IntArray, rank: IntArray) -> IntArray:
        """For (query, rank) pairs, the index of the query's last row down to that rank; -1 if none."""
        width = int(max(self.rank.max(initial=0), rank.max(initial=0))) + 1
        keys = self.query * width + self.rank
        position: IntArray = np.searchsorted(keys, query * width + rank, side="right") - 1
        return np.where((position >= 0) & (position >= self.start[query]), position, -1)


@dataclass(frozen=True, eq=False)
class Ranking:
    """Ranked lists with the grade of every row, and all judgements."""

    queries: tuple[str, ...]
    """The judged queries; every result has one value for each of them."""
    lists: tuple[str, ...]
    query_of_list: IntArray
    """The index of the judged query for each ranked list; -1 if its query is not judged."""
    list_of_row: IntArray
    scores: FloatArray
    grades: NDArray[np.int32]
    ranks: IntArray
    judgements: Hits
    """All judged rows; their rank has no meaning."""
    run: Run | None = None
    qrels: Qrels | None = None
    _views: dict[tuple[str, int, str], RankingView] = field(default_factory=dict, repr=False)
    _relevant: dict[int, IntArray] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, qrels: Qrels, run: Run) -> Ranking:
        """Join a run with judgements. Raises DataError if they have no query in common."""
        query_of_list = np.array([qrels.position.get(query, -1) for query in run.queries], dtype=np.int64)
        if len(qrels) and not (query_of_list >= 0).any():
            raise DataError(
                f"the run {run.name!r} and the judgements have no query in common",
                cure="check that both use the same query ids",
            )
        rows = np.arange(qrels.rows)
        judgements = Hits(len(qrels), qrels.query_of_row, rows, qrels.grades, rows)
        return cls(
            qrels.queries,
            run.queries,
            query_of_list,
            run.query_of_row,
            run.scores,
            run.grades(qrels),
            run.ranks,
            judgements,
            run,
            qrels,
        )

    @classmethod
    def of_rows(cls, grades: NDArray[np.int32], scores: FloatArray, offsets: IntArray) -> Ranking:
        """Rank feature rows grouped by query; every row is judged, and ties keep the order of the rows."""
        size = len(offsets) - 1
        group = np.repeat(np.arange(size), np.diff(offsets))
        order = falling(scores, offsets, stable=True)
        names = tuple(map(str, range(size)))
        ranks = np.arange(len(group)) - offsets[group] + 1
        graded = grades[order]
        judgements = Hits(size, group, ranks, graded, order)
        return cls(names, names, np.arange(size), group, scores[order], graded, ranks, judgements)

    @property
    def size(self) -> int:
        """The number of judged queries."""
        return len(self.queries)

    @cached_property
    def gmax(self) -> int:
        """The largest grade in the judgements."""
        return int(self.judgements.grade.max(initial=0))

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        """Whether the run has each judged query."""
        present = np.zeros(self.size, dtype=bool)
        present[self.query_of_list[self.query_of_list >= 0]] = True
        return present

    @cached_property
    def _positive(self) -> IntArray:
        return np.flatnonzero(self.judgements.grade > 0)

    @cached_property
    def grade_counts(self) -> tuple[NDArray[np.int32], IntArray]:
        """The positive grades that occur, largest first, and the number of documents of each grade
        by query."""
        query, grade = self.judgements.query[self._positive], self.judgements.grade[self._positive]
        rising = np.unique(grade)
        level = len(rising) - 1 - np.searchsorted(rising, grade)
        counts = np.bincount(query * len(rising) + level, minlength=self.size * len(rising))
        return rising[::-1], counts.reshape(self.size, len(rising))

    @cached_property
    def ideal(self) -> Hits:
        """The judged documents of positive grade, best first."""
        query, grade = self.judgements.query[self._positive], self.judgements.grade[self._positive]
        order = np.argsort(query * (self.gmax + 1) + (self.gmax - grade), kind="stable")
        hits = Hits(self.size, query[order], order, grade[order], self._positive[order])
        return Hits(hits.size, hits.query, hits.nth + 1, hits.grade, hits.row)

    def relevant(self, threshold: int) -> IntArray:
        """Return the number of documents of every query with at least this grade."""
        if threshold not in self._relevant:
            rows = self._positive if threshold == 1 else self.judgements.grade >= threshold
            query = self.judgements.query[rows]
            self._relevant[threshold] = np.bincount(query, minlength=self.size)
        return self._relevant[threshold]

    @cached_property
    def tied(self) -> NDArray[np.bool_]:
        """Whether a row has the score of the row above it in the same list."""
        tied = np.zeros(len(self.scores), dtype=bool)
        alike = np.flatnonzero(self.scores[1:] == self.scores[:-1])
        tied[alike + 1] = self.list_of_row[alike + 1] == self.list_of_row[alike]
        return tied

    @property
    def tie_rate(self) -> float:
        """The share of rows whose score another row of the same list has too."""
        below = np.flatnonzero(self.tied)
        return len(np.union1d(below, below - 1)) / max(1, len(self.scores))

    def view(self, ties: str, seed: int, unjudged: str) -> RankingView:
        """Return the lists in the order of a tie rule, built once; `unjudged="drop"` drops rows without a
        grade of 0 or more."""
        key = ties, seed if ties == "random" else 0, unjudged
        if key not in self._views:
            self._views[key] = self._build(*key)
        return self._views[key]

    def _build(self, ties: str, seed: int, unjudged: str) -> RankingView:
        order = self._order(ties, seed)
        ranks = self.ranks
        mask = None
        if order is not None:
            ranks = np.empty_like(self.ranks)
            ranks[order] = self.ranks
        if unjudged == "drop":
            mask = self.grades >= 0
            ranks = _ranks_among(mask, self.list_of_row, order)
        if ties in ("average", "last"):
            first, last = self._tie_groups(ranks, mask)
            return RankingView(self, None, last if ties == "last" else ranks, mask, first, last)
        return RankingView(self, order, ranks, mask)

    def _order(self, ties: str, seed: int) -> IntArray | None:
        """Return the rows in the order of the tie rule; None if they already have that order."""
        if ties in ("trec", "trec32") and self.run is None:
            raise ConfigError(f"rows without document ids cannot have ties={ties}", key="ties", value=ties)
        if ties == "trec32" and self.run is not None:
            return self._single_precision(self.run.documents.codes)
        if ties == "input" and self.run is not None and self.run.arrival is not None and self.tied.any():
            return np.lexsort((self.run.arrival, -self.scores, self.list_of_row))
        if ties == "random" and self.tied.any():
            return np.lexsort((self._dice(seed), -self.scores, self.list_of_row))
        return None

    def _single_precision(self, codes: IntArray) -> IntArray | None:
        with np.errstate(over="ignore"):
            scores = self.scores.astype(np.float32)
        merged = (scores[1:] == scores[:-1]) & (self.scores[1:] != self.scores[:-1])
        if not (merged & (self.list_of_row[1:] == self.list_of_row[:-1])).any():
            return None
        return np.lexsort((-codes, -scores, self.list_of_row))

    def _dice(self, seed: int) -> FloatArray:
        """Random keys from each list's own stream, so that no list depends on another."""
        dice = np.zeros(len(self.scores))
        streams = Streams(seed)
        for at in np.unique(self.list_of_row[self.tied]).tolist():
            rows = slice(*np.searchsorted(self.list_of_row, (at, at + 1)))
            dice[rows] = streams("ties", self.lists[at]).random(rows.stop - rows.start)
        return dice

    def _tie_groups(self, ranks: IntArray, mask: NDArray[np.bool_] | None) -> tuple[IntArray, IntArray]:
        """For every row, the first and the last rank of the rows inside the mask that share its score."""
        heads = np.flatnonzero(~self.tied)
        group = np.cumsum(~self.tied) - 1
        if mask is None:
            first, members = ranks[heads], group
        else:
            # A row outside the mask gets the rank of the last masked row above it.
            first, members = ranks[heads] + ~mask[heads], group[mask]
        last = first + np.bincount(members, minlength=len(heads)) - 1
        return first[group], last[group]


@dataclass(frozen=True, eq=False)
class RankingView:
    """The lists of a ranking under one tie rule."""

    ranking: Ranking
    order: IntArray | None
    ranks: IntArray
    mask: NDArray[np.bool_] | None
    first: IntArray | None = None
    last: IntArray | None = None
    _relevant: dict[int, Hits] = field(default_factory=dict, repr=False)

    @cached_property
    def length(self) -> IntArray:
        """The number of documents in every query's list."""
        lists = self.ranking.list_of_row if self.mask is None else self.ranking.list_of_row[self.mask]
        counts = np.bincount(lists, minlength=len(self.ranking.lists))
        answered = self.ranking.query_of_list >= 0
        lengths = np.zeros(self.ranking.size, dtype=np.int64)
        lengths[self.ranking.query_of_list[answered]] = counts[answered]
        return lengths

    @cached_property
    def judged(self) -> Hits:
        """The judged rows, negative grades included."""
        return self._select(self.ranking.grades != UNJUDGED)

    @cached_property
    def everything(self) -> Hits:
        """All rows; an unjudged or negative grade is 0."""
        hits = self._select(np.ones(len(self.ranking.grades), dtype=bool))
        return Hits(hits.size, hits.query, hits.rank, np.maximum(hits.grade, 0), hits.row)

    def relevant(self, threshold: int = 1) -> Hits:
        """The rows of at least this grade."""
        if threshold not in self._relevant:
            self._relevant[threshold] = self._select(self.ranking.grades >= threshold)
        return self._relevant[threshold]

    def _select(self, mask: NDArray[np.bool_]) -> Hits:
        if self.mask is not None:
            mask = mask & self.mask
        rows = np.flatnonzero(mask) if self.order is None else self.order[mask[self.order]]
        query = self.ranking.query_of_list[self.ranking.list_of_row[rows]]
        if (query < 0).any():
            rows, query = rows[query >= 0], query[query >= 0]
        if (query[1:] < query[:-1]).any():
            order = np.argsort(query, kind="stable")
            rows, query = rows[order], query[order]
        return Hits(self.ranking.size, query, self.ranks[rows], self.ranking.grades[rows], rows)


def _ranks_among(mask: NDArray[np.bool_], list_of_row: IntArray, order: IntArray | None) -> IntArray:
    """Ranks that count only the rows inside the mask."""
    order = np.arange(len(mask)) if order is None else order
    counted = np.cumsum(mask[order])
    lists = list_of_row[order]
    before_list = np.searchsorted(lists, lists)
    above = np.where(before_list > 0, counted[before_list - 1], 0)
    ranks = np.empty(len(mask), dtype=np.int64)
    ranks[order] = counted - above
    return ranks
