"""Learning of one search model from sums over silos: fit, cross-validate, choose, calibrate.

    baseline    the search without learning: BM25's share, or equal shares of it and the encoder
    weight      one share between BM25 and the encoder, from a grid
    stack       a logistic model of the retrievers' scores
    linear      a logistic model of all columns, drawn towards the baseline's order

Every model is fitted without each fold of the queries and once with all, in questions that these fits share.
Hits of a fold are ranked over all silos by the model that has not seen it. `guard.choose` decides by nDCG@10
of the judged queries, with documents either right or not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.asking import Answers, Silos, TooFew
from isthmus.errors import ConfigError, DataError, ProtocolError
from isthmus.federation import Weighed
from isthmus.learning.calibrating import NO_CELL, Calibrate, RankedLists, fit_calibration
from isthmus.learning.columns import COLUMNS, DISCOUNTS, HITS, LIST, OF_QUERY, RETRIEVERS, merged
from isthmus.learning.guard import BASELINE, ModelChoice, choose
from isthmus.learning.model import HitCalibration, SearchModel, Weights
from isthmus.learning.questions import (
    EVERY,
    MOST_FITS,
    BestMargins,
    ColumnMoments,
    FoldsOf,
    GainsOf,
    HitsByCell,
    LearningQuestion,
    LossSums,
    OwnHitsByCell,
    OwnModel,
    QueryColumns,
    RelevantOf,
    Start,
    bounded_steps,
    collected,
    whole_weights,
)
from isthmus.learning.record import Honesty, Record
from isthmus.learning.weighing import cross_examined
from isthmus.logistic import newton_together

PENALTY = 100.0
"""Penalty ½·penalty·θ² on the columns' additions to the baseline's order."""
GRID = tuple(round(0.1 * step, 1) for step in range(1, 10))
"""Shares of BM25 to try."""
LEAST_QUERIES, LEAST_RELEVANT = 10, 20
"""Least numbers of judged queries, and of relevant documents among the candidates, for learning."""
SHORTEST = 0.05
"""Share of judged queries that may have fewer words than `least_words`: too few to rank such queries by."""
ROUNDING = 1e-3
"""Largest rounding error of totals under masks."""
ONE_SILO = "one silo"
"""Name, in a record, of the calibration error when one silo is searched."""
MODES = (SUMS, FEDRISK) = "sums", "fedrisk"
_COUNTED = (LossSums, GainsOf, HitsByCell, OwnHitsByCell, RelevantOf)
_BM25, _DENSE = (COLUMNS.index(name) for name in RETRIEVERS)
_SHOWS_HITS = "its best hits' margins, as any search does"


@dataclass(frozen=True)
class BaselineScale:
    """Mean and deviation of the retrievers' scores, as in hybrid search; no cosines without an encoder."""

    bm25: tuple[float, float] | None = None
    dense: tuple[float, float] | None = None
    encoder: str = ""

    @property
    def weights(self) -> FloatArray:
        """The weights of the standardised columns."""
        weights = np.zeros(len(COLUMNS))
        weights[_BM25] = 0.5 if self.dense else 1.0
        weights[_DENSE] = 0.5 if self.dense else 0.0
        return weights


@dataclass(frozen=True)
class LearningOptions:
    """Options of a learning run.

    `models` are tried in this order, the smallest first. In the mode "sums" the asker sees totals of all
    silos. In "fedrisk" silos are weighed first by the value of their models to each other, for which each
    reveals its own model's weights and mean errors (`weighing`).
    """

    models: tuple[str, ...] = ("weight", "stack", "linear")
    penalty: float = PENALTY
    least_queries: int = LEAST_QUERIES
    """Least number of queries with hits in a group of hits."""
    mode: str = SUMS
    calibrate: Calibrate = fit_calibration

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"no mode {self.mode!r}", key="mode", value=self.mode, known=MODES)


BY_WORDS, DEFAULTS = BaselineScale(), LearningOptions()


@dataclass(frozen=True, eq=False)
class _Session:
    """Data about the judged queries of all silos during a learning run."""

    silos: Silos
    baseline: BaselineScale
    options: LearningOptions
    centre: FloatArray
    scale: FloatArray
    fold: IntArray
    outcome_fold: IntArray
    """The folds in the order of outcomes, which is also that of `relevant` and of all gains."""
    of_query: FloatArray
    relevant: FloatArray
    report: Callable[[str], None]
    weighed: Weighed

    @property
    def folds(self) -> int:
        return 1 + int(self.fold.max(initial=0))

    @property
    def by_query(self) -> FloatArray:
        """Weight of a row, with which queries with many relevant documents count as much as others."""
        return 1 / np.maximum(self.relevant, 1.0)

    def sum(self, question: LearningQuestion) -> FloatArray:
        """Return the sum of the answers over silos, with silos' weights if they are weighed."""
        weights = self.weighed.weights
        if not weights or not isinstance(question, _COUNTED):
            return self.silos.sum(question)
        by_name = np.array([weights[name] for name in sorted(self.silos.names)])
        return self.silos.sum(replace(question, silo_weights=by_name))


def learn(
    silos: Silos,
    queries: Sequence[str],
    *,
    folds: int,
    baseline: BaselineScale = BY_WORDS,
    options: LearningOptions = DEFAULTS,
    groups: IntArray | None = None,
    report: Callable[[str], None] = lambda stage: None,
) -> tuple[SearchModel, Record]:
    """Learn from all silos. Returns the model to use, calibrated, and the record of the run.

    `groups` of linked queries count once. `report` is called at every stage. Raises DataError if there is too
    little to learn from.
    """
    began = time.monotonic()
    counting = _Counting(silos.carrier)
    silos = replace(silos, carrier=counting)
    rows, relevant, _ = silos.sum(Start(tuple(queries), folds))
    if len(queries) < LEAST_QUERIES or relevant < LEAST_RELEVANT:
        raise DataError(
            f"{len(queries)} judged queries with {relevant:.0f} relevant documents are too few",
            cure=f"judge hits until there are {LEAST_QUERIES} and {LEAST_RELEVANT}",
        )
    session = _session(silos, len(queries), baseline, options, report)
    models = {BASELINE: _Fitted(baseline.weights[None], baseline.weights, {"parameters": 0})}
    for name in options.models:
        if (fitted := _FITS[name](session)) is not None:
            models[name] = fitted
    counted = session.relevant > 0
    rankings = {name: _ranked(session, each.by_fold) for name, each in models.items()}
    values = {name: each.values for name, each in rankings.items()}
    judged = {name: each[counted] for name, each in values.items()}
    choice = choose(judged, None if groups is None else groups[counted])
    report(f"chose {choice.kind}: {choice.why}")
    nearest = choice.differences.get(choice.best)
    calibrated, honesty = _calibrated(session, models[choice.kind].by_fold, rankings[choice.kind])
    score = Weights(session.centre, session.scale, models[choice.kind].whole)
    record = Record(
        adopted=choice.adopted,
        kind=choice.kind,
        best=choice.best,
        why=choice.why,
        models=_models(models, values, counted, choice),
        calibration=honesty,
        silos=tuple(map(str, silos.names)),
        queries=len(queries),
        relevant=int(relevant),
        rows=int(rows),
        folds=session.folds,
        mode=options.mode,
        encoder=baseline.encoder,
        queries_needed=None if choice.adopted or nearest is None else nearest.needed,
        weights=session.weighed.weights,
        risks=session.weighed.risks,
        seconds=round(time.monotonic() - began, 3),
        questions=counting.questions,
    )
    about = {"queries": len(queries), "rows": int(rows), "relevant": int(relevant), "mode": options.mode}
    model = SearchModel(choice.kind, score, encoder=baseline.encoder, about=about, **calibrated)
    replaced = _replaced(session, model, rankings[BASELINE])
    return replace(model, baseline=replaced, least_words=_least_words(session)), record


def _least_words(session: _Session) -> float:
    """Return the number of words that all but a share `SHORTEST` of the judged queries have."""
    words = session.of_query[np.isfinite(session.of_query[:, 0]), 0]
    return float(np.exp(np.quantile(words, SHORTEST, method="lower"))) if len(words) else 0.0


def _replaced(session: _Session, model: SearchModel, ranking: _Ranking) -> SearchModel:
    """Return the baseline, calibrated on its own lists, for hits of silos without the model."""
    if model.kind == BASELINE:
        return model
    weights = session.baseline.weights
    calibrated, _ = _calibrated(session, weights[None], ranking)
    return SearchModel(BASELINE, replace(model.score, weights=weights), encoder=model.encoder, **calibrated)


class _Counting:
    """A carrier that counts questions."""

    def __init__(self, carrier: Any) -> None:
        self.carrier, self.questions = carrier, 0

    def __call__(self, questions: Mapping[Any, Any], **needs: Any) -> Any:
        self.questions += 1
        return self.carrier(questions, **needs)


def _session(
    silos: Silos,
    queries: int,
    baseline: BaselineScale,
    options: LearningOptions,
    report: Callable[[str], None],
) -> _Session:
    report("statistics of columns")
    fold = _agreed_folds(silos, queries)
    shows = "the words of each query and their mean idf"
    columns = collected(silos, QueryColumns(), queries * len(OF_QUERY), shows=shows)
    of_query = np.max([each.reshape(queries, len(OF_QUERY)) for each in columns.values()], axis=0)
    count, total, squares = silos.sum(ColumnMoments()).reshape(3, len(COLUMNS))
    _check_totals(np.stack((count, squares)))
    centre = total / np.maximum(count, 1)
    scale = np.sqrt(np.maximum(squares / np.maximum(count, 1) - centre**2, 0.0))
    for at, standard in ((_BM25, baseline.bm25), (_DENSE, baseline.dense)):
        if standard is not None:
            centre[at], scale[at] = standard
    scale = np.where(scale > 1e-9, scale, 1.0)
    by_query, by_outcome = fold.astype(np.int64).reshape(2, -1)
    session = _Session(
        *(silos, baseline, options, centre, scale, by_query, by_outcome, of_query),
        *(np.empty(0), report, Weighed()),
    )
    if options.mode == FEDRISK:
        report("silos examine each other's models")
        used = _all_columns(baseline)
        scales = (centre, scale, baseline.weights, used.astype(np.float64))
        own = OwnModel(*scales, _penalties(options.penalty, used))
        session = replace(session, weighed=cross_examined(silos, own, session.folds))
    return replace(session, relevant=_check_totals(session.sum(RelevantOf())))


def _agreed_folds(silos: Silos, queries: int) -> FloatArray:
    """Return the folds of queries, in both orders. Raises TooFew with the silos that differ from most."""
    folds = collected(silos, FoldsOf(), 2 * queries, shows="the fold of each query, the same in every silo")
    (usual, _), *_ = Counter(each.tobytes() for each in folds.values()).most_common()
    reason = "silos deal queries into folds in different ways: their hash keys differ"
    others = {name: ProtocolError(reason) for name, each in folds.items() if each.tobytes() != usual}
    if others:
        raise TooFew(reason, Answers({}, others))
    fold = np.frombuffer(usual)
    if not np.isin(fold, np.arange(MOST_FITS)).all():
        raise ProtocolError("silos deal queries into folds that are none")
    return fold


def _check_totals(totals: FloatArray) -> FloatArray:
    """Return totals of rows, or raise ProtocolError for impossible ones: one of the silos adds something
    else, and under masks it cannot be identified."""
    if (totals < -ROUNDING).any():
        raise ProtocolError("totals that no rows have: a silo does not add what it was asked for")
    return totals


@dataclass(frozen=True, eq=False)
class _Ranking:
    """The lists of all queries under a model, of every silo in the order of names and merged, and nDCG@10 in
    the order of outcomes."""

    values: FloatArray
    by_silo: tuple[FloatArray, ...]
    margins: FloatArray


def _ranked(session: _Session, weights: FloatArray) -> _Ranking:
    """Rank every query over all silos; `weights` has one row, or one for the queries of each fold."""
    scale = (session.centre, session.scale)
    size = len(session.fold) * LIST
    margins = collected(session.silos, BestMargins(*scale, weights), size, shows=_SHOWS_HITS)
    by_silo = tuple(margins[name].reshape(-1, LIST) for name in sorted(margins))
    best = merged(by_silo)
    gains = _check_totals(session.sum(GainsOf(*scale, weights, best)))
    places = np.clip(np.round(session.relevant), 0, HITS).astype(np.int64)
    ideal = np.concatenate(([0.0], np.cumsum(DISCOUNTS)))[places]
    return _Ranking(np.divide(gains, ideal, out=np.zeros(len(gains)), where=ideal > 0), by_silo, best)


def _calibrated(
    session: _Session, weights: FloatArray, ranking: _Ranking
) -> tuple[dict[str, Any], dict[str, Honesty]]:
    """Calibrate the hits of merged lists, and of every silo's own. Returns the calibrations as fields of a
    model, and their calibration errors."""
    ranked, silos = (session.centre, session.scale, weights), len(ranking.by_silo)
    session.report("calibration of hits shown")
    whole, honesty = _fitted(
        session, (ranking.margins,), lambda cells: HitsByCell(*ranked, ranking.margins, cells)
    )
    if silos == 1:
        return {"calibration": whole}, honesty
    session.report("calibration of hits shown where one silo is searched")
    single, of_single = _fitted(session, ranking.by_silo, lambda cells: OwnHitsByCell(*ranked, cells))
    honesty |= {ONE_SILO: of_single["after"]} if of_single else {}
    return {"calibration": whole, "single": single, "silos": silos}, honesty


def _fitted(
    session: _Session, lists: Sequence[FloatArray], asks: Callable[[FloatArray], LearningQuestion]
) -> tuple[HitCalibration, dict[str, Honesty]]:
    """Calibrate the hits in tables of lists, each with one list per query, from totals by group."""
    best, times = np.concatenate(lists), len(lists)
    some = np.isfinite(best[:, 0])

    def totals(cells: IntArray) -> FloatArray:
        every = np.full((len(best), HITS), float(NO_CELL))
        every[some] = cells
        return _check_totals(session.sum(asks(every))).reshape(2, -1).T

    of_query, fold = np.tile(session.of_query, (times, 1)), np.tile(session.fold, times)
    silo = np.repeat(np.arange(times), len(lists[0]))
    ranked = RankedLists(best[some], of_query[some], fold[some], silo[some])
    least = times * session.options.least_queries  # counted in lists: a query has one in each table
    return session.options.calibrate(ranked, totals, least)


# models


@dataclass(frozen=True, eq=False)
class _Fitted:
    """Weights of the standardised columns: a row for the queries of each fold, and those of all queries."""

    by_fold: FloatArray
    whole: FloatArray
    about: Mapping[str, Any]


def _weight(session: _Session) -> _Fitted | None:
    """Choose the share of BM25 with the best mean nDCG@10 over the other folds; on ties the nearest to ½."""
    if not session.baseline.dense:
        return None
    session.report("weight: shares of BM25")
    tried = np.zeros((len(GRID), len(COLUMNS)))
    tried[:, _BM25], tried[:, _DENSE] = GRID, 1 - np.array(GRID)
    values = np.stack([_ranked(session, each[None]).values for each in tried])
    order = np.argsort(np.abs(np.array(GRID) - 0.5), kind="stable")
    counted = session.relevant > 0

    def best(rows: Any) -> int:
        means = values[order][:, rows & counted].mean(axis=1)
        return int(order[int(means.argmax())])

    by_fold = np.stack([tried[best(session.outcome_fold != fold)] for fold in range(session.folds)])
    chosen = best(np.ones(len(session.fold), dtype=bool))
    return _Fitted(by_fold, tried[chosen], {"parameters": 1, "share of BM25": GRID[chosen]})


def _stack(session: _Session) -> _Fitted | None:
    """Fit the stack; without an encoder there is one retriever, and nothing to stack."""
    if not session.baseline.dense:
        return None
    return _logistic(session, "stack", np.isin(COLUMNS, RETRIEVERS))


def _linear(session: _Session) -> _Fitted:
    return _logistic(session, "linear", _all_columns(session.baseline))


def _all_columns(baseline: BaselineScale) -> Any:
    return np.isin(COLUMNS, "dense", invert=True) | bool(baseline.dense)


_Fit = Callable[[_Session], _Fitted | None]
_FITS: Mapping[str, _Fit] = {"weight": _weight, "stack": _stack, "linear": _linear}


def _logistic(session: _Session, name: str, used: Any) -> _Fitted:
    """Fit relevance by the baseline's score, almost unpenalised, and by the columns used, penalised; without
    each fold and with all queries. Weights of rising columns are 0 or more."""
    session.report(f"{name}: fits")
    lead, penalty = session.baseline.weights, _penalties(session.options.penalty, used)
    folds = [EVERY, *range(session.folds)]

    def sums(places: Sequence[int], thetas: Sequence[FloatArray]) -> Sequence[FloatArray]:
        question = LossSums(
            *(session.centre, session.scale, lead, used.astype(np.float64), np.stack(thetas)),
            *(np.array([folds[place] for place in places], dtype=np.float64), session.by_query),
        )
        return list(session.sum(question).reshape(len(places), -1))

    fits = newton_together(sums, [bounded_steps(used, penalty) for _ in folds])
    whole, *by_fold = (whole_weights(theta, lead, used) for theta in fits)
    return _Fitted(np.stack(by_fold), whole, {"parameters": int(used.sum())})


def _penalties(penalty: float, used: Any) -> FloatArray:
    """Return the penalties of the features of `LossSums`, low for the baseline's score and query columns."""
    columns = np.where(np.isin(np.array(COLUMNS)[used], OF_QUERY), 1e-2, penalty)
    return np.concatenate(([1e-3], columns, [1e-6]))


# the record


def _models(
    models: Mapping[str, _Fitted], values: Mapping[str, FloatArray], counted: Any, choice: ModelChoice
) -> dict[str, dict[str, Any]]:
    return {
        name: {
            **fitted.about,
            "nDCG@10": float(values[name][counted].mean()),
            "weights": {
                column: round(float(weight), 6)
                for column, weight in zip(COLUMNS, fitted.whole, strict=True)
                if weight
            },
            **({"difference": choice.differences[name].to_json()} if name in choice.differences else {}),
        }
        for name, fitted in models.items()
    }
