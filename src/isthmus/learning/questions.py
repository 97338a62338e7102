"""Questions to silos during learning, and the rows of one silo that answer them.

A silo has rows: the candidates of all judged queries, their columns, and whether each is relevant. It answers
every question with one vector. The asker uses the sum over silos (`Silos.sum`), except for values that any
search reveals anyway and that are collected: a query's best margins and its words' rarity. A fit from such
sums equals one on all rows in one place, to the last digits.

Results that reveal judgements of single queries come in the order of outcomes, which silos may keep to
themselves: the asker learns how good lists are, but not of which query. Results about judged hits come by
groups of hits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.asking import Silos
from isthmus.errors import DataError, ProtocolError
from isthmus.learning.columns import COLUMNS, DISCOUNTS, HITS, LIST, OF_QUERY, RISING
from isthmus.learning.model import LARGEST, standardised
from isthmus.logistic import Steps, likelihood_sums, newton_steps, newton_together
from isthmus.tables import Bundle, Declared

EVERY = -1
"""Number of the fold that contains no query."""
TOLERANCE = 1e-9
MOST_BYTES, MOST_FITS, MOST_CELLS, MOST_SILOS = 64 << 20, 64, 4096, 1000


def _unweighed() -> FloatArray:
    """Return no weights: all silos count alike. Otherwise there is one per silo, in the order of names."""
    return np.empty(0)


class LearningMessage(Bundle):
    """A question or an answer on the wire."""

    noun = "learning message"
    most = MOST_BYTES

    @classmethod
    def check(cls, header: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        """Raise DataError unless all arrays are vectors or tables of reals."""
        if any(len(each.shape) > 2 or each.dtype != np.float64 for each in declared.values()):
            raise DataError("has arrays that are no vectors or tables of reals")


@dataclass(frozen=True, eq=False)
class LearningQuestion:
    """A question to a silo; the docstring of every kind describes the answer."""

    def to_bytes(self) -> bytes:
        """Serialise the question."""
        header: dict[str, Any] = {"kind": type(self).__name__}
        arrays = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                arrays[each.name] = value.astype(np.float64)
            else:
                header[each.name] = value
        return LearningMessage(header, arrays).to_bytes()


@dataclass(frozen=True, eq=False)
class Start(LearningQuestion):
    """Prepare the rows of these queries, the same for all silos: (rows, relevant rows, judged queries)."""

    queries: tuple[str, ...]
    folds: int


@dataclass(frozen=True, eq=False)
class FoldsOf(LearningQuestion):
    """The fold of every query, in query order and in that of outcomes; the same in all silos; collected."""


@dataclass(frozen=True, eq=False)
class QueryColumns(LearningQuestion):
    """The columns `OF_QUERY` of every query, −inf without a candidate; collected, the same in all silos."""


@dataclass(frozen=True, eq=False)
class RelevantOf(LearningQuestion):
    """The weighted number of documents judged relevant, candidates or not, in the order of outcomes."""

    silo_weights: FloatArray = field(default_factory=_unweighed)


@dataclass(frozen=True, eq=False)
class ColumnMoments(LearningQuestion):
    """(n, Σx, Σx²) of every column over the rows that have it."""


@dataclass(frozen=True, eq=False)
class Standardised(LearningQuestion):
    """A question about columns minus `centre`, divided by `scale`, one value per column."""

    centre: FloatArray
    scale: FloatArray


@dataclass(frozen=True, eq=False)
class LossSums(Standardised):
    """Loss, gradient and Hessian of a logistic model of relevance, for several fits one after the other.

    Features are the score `lead` of the standardised columns, the columns where `used` is 1, and 1; row k of
    `thetas` has their weights in fit k, which leaves out the queries of `folds[k]`. A row is weighted by its
    query's value in `by_query`, in the order of outcomes, and by its silo's value in `silo_weights`.
    """

    lead: FloatArray
    used: FloatArray
    thetas: FloatArray
    folds: FloatArray
    by_query: FloatArray
    silo_weights: FloatArray = field(default_factory=_unweighed)


@dataclass(frozen=True, eq=False)
class BestMargins(Standardised):
    """The highest margins of every query, `LIST` each, −inf where there are fewer; collected.

    `weights` are those of the standardised columns: one row for all queries, or one for those of each fold.
    """

    weights: FloatArray


@dataclass(frozen=True, eq=False)
class Ranked(Standardised):
    """A question about the merged lists of all queries, with their highest margins in `best` as `BestMargins`
    returned them. Equal margins share their places."""

    weights: FloatArray
    best: FloatArray


@dataclass(frozen=True, eq=False)
class GainsOf(Ranked):
    """The weighted DCG@10 that this silo's hits add to every query, in the order of outcomes."""

    silo_weights: FloatArray = field(default_factory=_unweighed)


@dataclass(frozen=True, eq=False)
class HitsByCell(Ranked):
    """The weighted numbers of this silo's hits, and of its relevant ones, in every group of hits; `cells` has
    the group of every place shown, −1 for none."""

    cells: FloatArray
    silo_weights: FloatArray = field(default_factory=_unweighed)


@dataclass(frozen=True, eq=False)
class OwnHitsByCell(Standardised):
    """As `HitsByCell`, for every silo's own lists, in which other silos have no place; `cells` has the rows
    of all queries in the first silo, in the order of names, then of those in the next."""

    weights: FloatArray
    cells: FloatArray
    silo_weights: FloatArray = field(default_factory=_unweighed)


@dataclass(frozen=True, eq=False)
class OwnModel(Standardised):
    """The column weights of a model of this silo's judgements alone, fitted with these penalties to the
    features of `LossSums`; collected, in the mode that weighs silos. The model is for examination, not for
    use: its weights are not bounded, so that it shows where judgements go against words."""

    lead: FloatArray
    used: FloatArray
    penalty: FloatArray


@dataclass(frozen=True, eq=False)
class CrossExamination(Standardised):
    """Errors 1 − nDCG@10 of every silo's model on the queries judged in this silo, over its candidates: sums
    of every model by fold, and last the number of queries by fold; collected."""

    weights: FloatArray


_HEADER = {"format", "version", "kind"}
_KINDS: Mapping[str, type[LearningQuestion]] = {
    kind.__name__: kind
    for kind in (
        *(Start, FoldsOf, QueryColumns, RelevantOf, ColumnMoments, LossSums),
        *(BestMargins, GainsOf, HitsByCell, OwnHitsByCell, OwnModel, CrossExamination),
    )
}


def question_of(data: bytes) -> LearningQuestion:
    """Parse a question from the network; ProtocolError if it is invalid."""
    return LearningMessage.receive(data, _question)


def _question(saved: LearningMessage) -> LearningQuestion:
    kind = _KINDS[saved.header["kind"]]
    if unknown := saved.header.keys() - _HEADER - {each.name for each in fields(kind)}:
        raise KeyError(*unknown)
    return kind(**{each.name: _field(saved, each.name, str(each.type)) for each in fields(kind)})


def _field(saved: LearningMessage, name: str, kind: str) -> Any:
    if kind == "FloatArray":
        return saved.arrays[name].astype(np.float64)
    value = saved.header[name]
    if kind.startswith("tuple"):
        return tuple(str(each) for each in value)
    number = {"int": int, "float": float, "str": str}[kind](value)
    if kind == "float" and not abs(number) <= LARGEST:
        raise ValueError("a number that is none")
    return number


def answer_bytes(answer: FloatArray) -> bytes:
    """Serialise an answer."""
    return LearningMessage({"kind": "answer"}, {"sums": answer}).to_bytes()


def answer_of(data: bytes) -> FloatArray:
    """Parse an answer from the network; ProtocolError if it is no vector of numbers."""
    answer = LearningMessage.receive(data, lambda saved: saved.arrays["sums"].astype(np.float64, copy=False))
    if answer.ndim != 1 or np.isnan(answer).any():
        raise ProtocolError("an answer that is no vector of numbers")
    return answer


def collected(silos: Silos, question: LearningQuestion, size: int, *, shows: str) -> Mapping[str, FloatArray]:
    """Collect every silo's vector of `size` numbers. A silo that sent another size, or numbers out of bounds,
    counts as not answering (TooFew). Missing columns and margins are −inf."""
    least = -np.inf if isinstance(question, (QueryColumns, BestMargins)) else -LARGEST

    def checked(silo: str, answer: FloatArray) -> FloatArray:
        bounded = (answer >= -LARGEST) | (answer == least)
        if answer.shape != (size,) or not (bounded & (answer <= LARGEST)).all():
            raise ProtocolError(f"{type(question).__name__}: its answer is not {size} numbers within bounds")
        return answer

    return silos.collect(question, checked, shows=shows).by_silo


class JudgedRows:
    """The rows of one silo, query by query in order, and its answers to questions about them.

    `table` has the columns of `COLUMNS`, `relevant` is 1 or 0 and `query` the position of every row's query.
    `fold` and `judged` have one value for every query: its fold, and whether this silo has judged hits of it.
    `targets` counts the documents judged relevant by query, including those that are no candidates. `order`
    lists the queries in the order of outcomes, `least` is the minimum number of queries in a group of hits,
    and `place` is this silo's position in the order of names.
    """

    def __init__(
        self,
        table: FloatArray,
        relevant: FloatArray,
        query: IntArray,
        *,
        fold: IntArray,
        targets: FloatArray,
        judged: IntArray | None = None,
        order: IntArray | None = None,
        least: int = 1,
        place: int = 0,
    ) -> None:
        if table.shape != (len(query), len(COLUMNS)) or len(relevant) != len(query):
            raise DataError(f"{table.shape} columns beside {len(query)} rows and {len(relevant)} judgements")
        if (np.diff(query) < 0).any():
            raise DataError("rows are not in the order of their queries", cure="sort them by query")
        self.table, self.relevant, self.query = table, relevant.astype(np.float64), query
        self.fold, self.targets = fold, targets.astype(np.float64)
        self.judged = int((targets > 0).sum()) if judged is None else int(np.sum(judged))
        self.order, self.least = np.arange(len(fold)) if order is None else order, least
        self.place = place
        self.bounds = np.searchsorted(query, np.arange(len(fold) + 1))
        self._columns: tuple[bytes, FloatArray] = (b"", table)

    @property
    def queries(self) -> int:
        """The number of judged queries."""
        return len(self.fold)

    def answer(self, question: LearningQuestion) -> FloatArray:
        """Return the answer as one vector; those of several silos are added or collected. ProtocolError for a
        question of other sizes, or with numbers that are not finite."""
        self._check(question)
        match question:
            case Start():
                return np.array([len(self.query), self.relevant.sum(), self.judged], dtype=np.float64)
            case FoldsOf():
                return np.concatenate((self.fold, self.fold[self.order])).astype(np.float64)
            case QueryColumns():
                columns = np.full((self.queries, len(OF_QUERY)), -np.inf)
                columns[self.query] = self.table[:, -len(OF_QUERY) :]
                return columns.reshape(-1)
            case RelevantOf():
                return self._weight(question) * self.targets[self.order]
            case ColumnMoments():
                present = np.isfinite(self.table)
                values = np.where(present, self.table, 0.0)
                return np.concatenate((present.sum(axis=0), values.sum(axis=0), (values**2).sum(axis=0)))
            case LossSums():
                return self._loss_sums(question)
            case BestMargins():
                return self._best(self._margins(question))
            case GainsOf():
                return self._gains(question)
            case HitsByCell():
                return self._by_cell(question, 1 + int(question.cells.max()))
            case OwnHitsByCell():
                return self._by_cell(self._own_lists(question), 1 + int(question.cells.max()))
            case OwnModel():
                return self._own_model(question)
            case CrossExamination():
                return self._examine(question)
        raise ProtocolError("a question of an unknown kind")

    def _weight(self, question: RelevantOf | LossSums | GainsOf | HitsByCell) -> float:
        """Return the weight of this silo's rows."""
        weights = question.silo_weights
        return float(weights[self.place]) if len(weights) else 1.0

    # ranking

    def _standardised(self, centre: FloatArray, scale: FloatArray) -> FloatArray:
        """Return the standardised columns; the last ones are cached, because a fit asks many times."""
        key = centre.tobytes() + scale.tobytes()
        if self._columns[0] != key:
            self._columns = key, standardised(self.table, centre, scale)
        return self._columns[1]

    def _margins(self, question: BestMargins | Ranked | OwnHitsByCell) -> FloatArray:
        columns = self._standardised(question.centre, question.scale)
        weights = question.weights
        if len(weights) == 1:
            return np.asarray(columns @ weights[0])
        return np.asarray((columns * weights[self.fold[self.query]]).sum(axis=1))

    def _best(self, margins: FloatArray) -> FloatArray:
        best = np.full((self.queries, LIST), -np.inf)
        for at, (start, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            highest = -np.sort(-margins[start:end])[:LIST]
            best[at, : len(highest)] = highest
        return best.reshape(-1)

    def _placed(self, question: Ranked) -> tuple[IntArray, FloatArray]:
        """Return this silo's rows among the hits shown, and the share that each has of every place."""
        margins, best = self._margins(question), question.best
        rows = np.flatnonzero(margins >= best[self.query, HITS - 1])
        same = best[self.query[rows]] == margins[rows, None]
        return rows, (same / np.maximum(same.sum(axis=1, keepdims=True), 1))[:, :HITS]

    def _gains(self, question: GainsOf) -> FloatArray:
        rows, share = self._placed(question)
        gains = np.bincount(self.query[rows], self.relevant[rows] * (share @ DISCOUNTS), self.queries)
        return np.asarray(self._weight(question) * gains[self.order])

    def _own_lists(self, question: OwnHitsByCell) -> HitsByCell:
        """Return the same question about lists with this silo's hits alone."""
        best = self._best(self._margins(question)).reshape(-1, LIST)
        cells = question.cells.reshape(-1, self.queries, HITS)[self.place]
        if (cells[~np.isfinite(best[:, :HITS])] >= 0).any():  # it would fill up a group of others' hits
            raise ProtocolError("a group with places that have no hit")
        scale = question.centre, question.scale, question.weights
        return HitsByCell(*scale, best, cells, question.silo_weights)

    def _by_cell(self, question: HitsByCell, size: int) -> FloatArray:
        rows, share = self._placed(question)
        cells = question.cells.astype(np.int64)[self.query[rows]]
        used = cells >= 0
        right = share * self.relevant[rows, None]
        sums = [np.bincount(cells[used], each[used], size) for each in (share, right)]
        return np.asarray(self._weight(question) * np.concatenate(sums))

    # fits

    def _loss_sums(self, question: LossSums) -> FloatArray:
        columns = self._standardised(question.centre, question.scale)
        own = columns[:, question.used > 0]
        features = np.vstack(((columns @ question.lead), own.T, np.ones(len(columns))))
        by_query = np.empty(self.queries)
        by_query[self.order] = question.by_query
        weights = self._weight(question) * by_query[self.query]
        folds, sums = self.fold[self.query], []
        for theta, fold in zip(question.thetas, question.folds.astype(int).tolist(), strict=True):
            rows = folds != fold
            sums.append(likelihood_sums(features[:, rows], self.relevant[rows], theta, weights=weights[rows]))
        return np.concatenate(sums)

    def _own_model(self, question: OwnModel) -> FloatArray:
        by_query = 1 / np.maximum(np.bincount(self.query, self.relevant, self.queries), 1.0)
        scale = question.centre, question.scale, question.lead, question.used

        def sums(places: Sequence[int], thetas: Sequence[FloatArray]) -> list[FloatArray]:
            return [
                self._loss_sums(LossSums(*scale, np.stack(thetas), np.full(1, EVERY), by_query[self.order]))
            ]

        start = np.zeros(len(question.penalty))
        (theta,) = newton_together(sums, [newton_steps(start, question.penalty, tolerance=TOLERANCE)])
        return whole_weights(theta, question.lead, question.used > 0)

    def _examine(self, question: CrossExamination) -> FloatArray:
        columns = self._standardised(question.centre, question.scale)
        judged = np.bincount(self.query, self.relevant, self.queries) > 0
        folds = 1 + int(self.fold.max(initial=0))
        report = np.zeros((len(question.weights) + 1, folds))
        report[-1] = np.bincount(self.fold[judged], minlength=folds)
        for at, weights in enumerate(question.weights):
            margins = columns @ weights
            for query in np.flatnonzero(judged).tolist():
                rows = slice(self.bounds[query], self.bounds[query + 1])
                best = self.relevant[rows][np.argsort(-margins[rows], kind="stable")[: len(DISCOUNTS)]]
                ideal = DISCOUNTS[: min(int(self.relevant[rows].sum()), len(DISCOUNTS))].sum()
                report[at, self.fold[query]] += 1 - float(best @ DISCOUNTS[: len(best)]) / ideal
        return report.reshape(-1)

    # checks

    def _check(self, question: LearningQuestion) -> None:
        sizes = self._sizes(question)
        if len(getattr(question, "silo_weights", ())) not in (0, *range(self.place + 1, MOST_SILOS)):
            raise ProtocolError("weights of other silos")
        for name, shape in sizes.items():
            values = getattr(question, name)
            whole = values.ndim == len(shape) and all(
                size in (None, own) for size, own in zip(shape, values.shape, strict=True)
            )
            finite = name == "best" or bool((np.abs(values) <= LARGEST).all())
            if not whole or not finite or np.isnan(values).any():
                raise ProtocolError(f"{type(question).__name__}: {name} is of another session, or no number")
            if name == "scale" and values.min() < 1 / LARGEST:
                raise ProtocolError("a scale that is none")
            if name == "thetas" and not 1 <= len(values) <= MOST_FITS:
                raise ProtocolError("more fits than one question has")
        if isinstance(question, LossSums) and len(question.folds) != len(question.thetas):
            raise ProtocolError("fits and folds of different numbers")
        if isinstance(question, (BestMargins, Ranked, OwnHitsByCell)) and len(question.weights) not in (
            1,
            1 + int(self.fold.max(initial=0)),
        ):
            raise ProtocolError("weights for other folds than there are")
        if isinstance(question, (HitsByCell, OwnHitsByCell)):
            self._check_cells(question.cells)

    def _check_cells(self, cells: FloatArray) -> None:
        if (cells != np.round(cells)).any() or not -1 <= cells.min() <= cells.max() < MOST_CELLS:
            raise ProtocolError("groups of hits that have no number")
        query, place = np.nonzero(cells >= 0)
        group, query = cells[query, place].astype(np.int64), query % self.queries
        pairs = np.unique(np.stack((group, query)), axis=1)
        sizes = np.bincount(pairs[0])
        if len(sizes) and sizes.min() < self.least:
            raise ProtocolError(f"a group of hits of fewer than {self.least} queries")

    def _sizes(self, question: LearningQuestion) -> dict[str, tuple[int | None, ...]]:
        """Return the shape of every array of a question; None allows any size."""
        queries, columns = self.queries, len(COLUMNS)
        match question:
            case LossSums():
                width = 2 + int((question.used > 0).sum())
                sizes = {"lead": (columns,), "used": (columns,), "thetas": (None, width)}
                return {**_scale(columns), **sizes, "folds": (None,), "by_query": (queries,), **_WEIGHTS}
            case BestMargins() | CrossExamination():
                return {**_scale(columns), "weights": (None, columns)}
            case Ranked():
                sizes = {"weights": (None, columns), "best": (queries, LIST)}
                cells = {"cells": (queries, HITS)} if isinstance(question, HitsByCell) else {}
                return {**_scale(columns), **sizes, **cells, **_WEIGHTS}
            case OwnHitsByCell():
                lists = max(len(question.cells) // max(queries, 1), self.place + 1) * queries
                return {**_scale(columns), "weights": (None, columns), "cells": (lists, HITS), **_WEIGHTS}
            case OwnModel():
                width = 2 + int((question.used > 0).sum())
                return {**_scale(columns), "lead": (columns,), "used": (columns,), "penalty": (width,)}
            case RelevantOf():
                return {**_WEIGHTS}
        return {}


_WEIGHTS: Mapping[str, tuple[int | None, ...]] = {"silo_weights": (None,)}


def bounded_steps(used: NDArray[np.bool_], penalty: FloatArray) -> Steps:
    """Return the steps of a fit to the features of `LossSums`; weights of rising columns are 0 or more."""
    least = np.where(np.isin(np.array(COLUMNS)[used], RISING), 0.0, -np.inf)
    start = np.concatenate(([1.0], np.zeros(len(penalty) - 1)))
    bounds = np.concatenate(([0.0], least, [-np.inf]))
    return newton_steps(start, penalty, least=bounds, tolerance=TOLERANCE)


def whole_weights(theta: FloatArray, lead: FloatArray, used: NDArray[np.bool_]) -> FloatArray:
    """Return the weights of all columns that follow from such a fit."""
    whole: FloatArray = theta[0] * lead
    whole[used] += theta[1:-1]
    return whole


def _scale(size: int) -> dict[str, tuple[int | None, ...]]:
    return {"centre": (size,), "scale": (size,)}
