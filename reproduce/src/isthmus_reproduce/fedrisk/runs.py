"""The units of the FedRisk reproduction: one fold and seed of one run each, as JSON.

A unit's `queries` has every measure of every test query, so that tables can average in any way and tests can
pair. Curves are on test queries, and nothing is stopped or chosen by them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.corpora import SYNTHETIC, load_folds, load_synthetic
from isthmus.errors import MissingExtra
from isthmus.evaluation import evaluate, evaluate_rows
from isthmus.federation import MEMORY, Judge, RoundRecord, State, Training, held_back
from isthmus.partition import Dealing, deal, highest_grades
from isthmus.randomness import Streams
from isthmus.rankers import MLP, LambdaMART, Scaling
from isthmus.tables import Fold, Letor
from isthmus_reproduce.faults import Fault, FaultyConfig, afflicted, train
from isthmus_reproduce.fedrisk.plans import (
    ARGMAX,
    ATTACK,
    MEASURES,
    Mode,
    Plan,
    Protocol,
    RunName,
    all_bad,
    paper_training,
    plans,
)

FOLDS = 5
WATCHED = "nDCG@10(empty=skip)"
LOOKED_AT = 100
"""Number of validation and of test queries at smoke scale."""
BAD_ROUNDS = 5
Result = dict[str, Any]


def count_folds(data: str) -> int:
    """Return the number of folds of the data; synthetic data can have any number."""
    return FOLDS if data in SYNTHETIC else len(load_folds(data))


@lru_cache(maxsize=1)
def _folds(data: str) -> tuple[Fold, ...]:
    return load_folds(data)


@lru_cache(maxsize=2)
def fold_of(data: str, at: int, queries: int | None = None) -> Fold:
    """Return a fold, or the first queries of its parts."""
    if data in SYNTHETIC:
        parts = (load_synthetic(data, split, fold=at) for split in ("train", "validation", "test"))
        fold = Fold(data, *parts)
    else:
        fold = _folds(data)[at]
    if not len(fold.validation):
        fifth = len(fold.train) // 5
        fold = replace(fold, train=fold.train[fifth:], validation=fold.train[:fifth])
    if queries is None:
        return fold
    looked = {part: getattr(fold, part)[:LOOKED_AT] for part in ("validation", "test")}
    return replace(fold, train=fold.train[:queries], **looked)


@lru_cache(maxsize=2)
def _stretched(data: str, at: int, queries: int | None) -> Fold:
    """Return a fold with features scaled per query, before a deal splits queries."""
    fold = fold_of(data, at, queries)
    stretch = Scaling("minmax", fold.train.width)
    return replace(
        fold, train=stretch(fold.train), validation=stretch(fold.validation), test=stretch(fold.test)
    )


def _tables(data: str, at: int, protocol: Protocol, mode: Mode) -> Fold:
    return (fold_of if mode == "sound" else _stretched)(data, at, protocol.queries)


def timed(work: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a unit to add the wall-clock and processor seconds that it took."""

    @wraps(work)
    def measured(**arguments: Any) -> Result:
        clock, processor = time.perf_counter(), time.process_time()
        with _once_is_enough():
            result = work(**arguments)
        result["seconds"] = round(time.perf_counter() - clock, 3)
        result["processor"] = round(time.process_time() - processor, 3)
        return result

    return measured


@contextmanager
def _once_is_enough() -> Iterator[None]:
    """Silence log messages below errors: hundreds of runs have the same faults, listed in the report."""
    logger = logging.getLogger("isthmus.federation")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@timed
def federated(*, data: str, protocol: Protocol, run: RunName, fold: int, seed: int) -> Result:
    """Compute one training run of a plan."""
    chosen = plans(protocol)[run]
    tables = _tables(data, fold, protocol, chosen.mode)
    config = replace(chosen.config, seed=seed)
    if chosen.honest:
        tables, config = honest_only(tables, config)
    cuts = _Cuts(tables.test, config, chosen) if chosen.curve else None
    watched = tables.test if chosen.curve else _few(tables.validation)
    tables, probe = held_back(tables, config)  # before `watched` replaces the validation part
    trained = train(config, replace(tables, validation=watched), probe=probe, watch=cuts)
    result = _result(trained, tables.test, chosen.mode)
    if not chosen.curve:
        del result["curve"]
    if cuts is not None and cuts.curves:
        result["cuts"] = cuts.curves
    if chosen.config.faults and any(record.weights for record in trained.history):
        result["bad weight"] = _weight_of_bad(trained.history, config, protocol.silos)
    if fold == 0 and trained.label_counts is not None:
        result["holdings"] = trained.label_counts.counts.tolist()
    return result


def _few(letor: Letor) -> Letor:
    """Return a few queries for a measure that is not reported, since it is computed in every round."""
    return letor[np.flatnonzero(highest_grades(letor) > 0)[:10]]


def _result(trained: Training, test: Letor, mode: Mode) -> Result:
    history = trained.history
    return _both_scorings(trained.ranker, test, mode) | {
        "curve": [_rounded(record.measure) for record in history],
        "norm": [_rounded(record.norm) for record in history],
        "turn": [_turn(record) for record in history],
        "stopped": trained.stopped,
    }


def _both_scorings(ranker: MLP, test: Letor, mode: Mode) -> Result:
    """Return the measures of every query; in paper mode also with scoring by the most probable grade."""
    result: Result = {"queries": by_query(test, _scores(ranker, test))}
    if mode == "paper":
        likeliest = MLP.of(ranker.parameters_, ranker.scaling_, scoring=ARGMAX)
        result[ARGMAX] = by_query(test, _scores(likeliest, test))
    return result


def _turn(record: RoundRecord) -> float | None:
    """Return 1 − cos(θ_t, θ_{t−1})."""
    return None if record.cosine is None else max(0.0, 1 - record.cosine)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _scores(ranker: MLP, test: Letor) -> NDArray[np.float64]:
    with np.errstate(over="ignore", invalid="ignore"):  # divergence is reported elsewhere
        return np.nan_to_num(ranker.score(test))


def by_query(test: Letor, scores: NDArray[np.float64]) -> dict[str, list[float | None]]:
    """Return every measure of every query; None for queries that do not count."""
    evaluation = evaluate(test.qrels(), test.run(scores), list(MEASURES.values()))
    values = {name: evaluation.values[evaluation.resolve(measure)] for name, measure in MEASURES.items()}
    return {
        name: [None if np.isnan(value) else round(float(value), 6) for value in array]
        for name, array in values.items()
    }


class _Cuts:
    """Records nDCG@1 and nDCG@5 on test queries after every round; in paper mode also nDCG@10 by argmax."""

    def __init__(self, test: Letor, config: FaultyConfig, plan: Plan) -> None:
        names = ("nDCG@1", "nDCG@5") if plan.cuts else ()
        self.curves: dict[str, list[float]] = {name: [] for name in names}
        if plan.mode == "paper":
            self.curves[ARGMAX] = []
        self._test, self._config = test, config
        self._judges: dict[str, Judge] = {}

    def __call__(self, state: State) -> None:
        if not self._judges:
            scaled = state.scaling(self._test)
            depths = {name: 10 if name == ARGMAX else int(name[5:]) for name in self.curves}
            self._judges = {
                name: Judge(scaled, scoring=ARGMAX if name == ARGMAX else "expected", depth=depth)
                for name, depth in depths.items()
            }
        parameters = state.average if self._config.rounds.release == "polyak" else state.parameters
        for name, judge in self._judges.items():
            self.curves[name].append(round(judge.measure(parameters), 6))


def honest_only(tables: Fold, config: FaultyConfig) -> tuple[Fold, FaultyConfig]:
    """Return the data of silos that the attack would not strike, and a deal that gives each its own again."""
    honest_tables = replace(tables, train=honest_queries(tables.train, config))
    rest, _ = held_back(honest_tables, config)  # a small silo may lose all its queries to the probe
    left = len({query.partition("/")[0] for query in rest.train.queries})
    rounds = replace(config.rounds, silos=min(config.rounds.silos or left, left))
    return honest_tables, replace(config, dealing=Dealing("site", silos=left), rounds=rounds)


def honest_queries(letor: Letor, config: FaultyConfig) -> Letor:
    """Return the rows of silos that the attack would not strike, with the silo before query names."""
    dealt = deal(letor, config.dealing, Streams(config.seed))
    honest = np.flatnonzero(~afflicted(ATTACK, 0, config.seed, dealt.silos))
    parts = ((silo, dealt.part(letor, silo)) for silo in honest.tolist())
    return Letor.concat(
        [replace(part, queries=tuple(f"{silo}/{query}" for query in part.queries)) for silo, part in parts]
    )


def _weight_of_bad(history: Sequence[RoundRecord], config: FaultyConfig, silos: int) -> float:
    """Return the share of all weight that silos with spoiled grades had."""
    struck = np.flatnonzero(afflicted(config.faults[0], 0, config.seed, silos)).tolist()
    bad = {f"silo-{silo:0{len(str(silos - 1))}}" for silo in struck}
    weights = [(name, weight) for record in history for name, weight in record.weights.items()]
    total = sum(weight for _, weight in weights)
    return round(sum(weight for name, weight in weights if name in bad) / total, 6)


@timed
def overrun(*, data: str, protocol: Protocol, row: str, fold: int, seed: int) -> Result:
    """Run the good rounds, half of all, and then some in which every silo has inverted grades.

    `curve` is the global model's, `released` that of the average over rounds.
    """
    whole = fold_of(data, fold, protocol.queries)
    config = replace(all_bad(protocol)[row], seed=seed)
    rest, probe = held_back(whole, config)
    tables = replace(rest, validation=_few(whole.validation))
    states: list[State] = []
    train(config, tables, probe=probe, watch=states.append)
    good = len(states)
    longer = replace(config.rounds, count=good + BAD_ROUNDS)
    bad = replace(config, rounds=longer, faults=(Fault("invert", 1.0),))
    trained = train(bad, tables, probe=probe, start=states[-1], watch=states.append)
    judge = Judge(states[0].scaling(whole.test), scoring=config.model.scoring)
    memory = [record.weights.get(MEMORY, 0.0) for record in trained.history[good:]]
    return {
        "good rounds": good,
        "curve": [round(judge.measure(state.parameters), 6) for state in states],
        "released": [round(judge.measure(state.average), 6) for state in states],
        "memory weight": round(float(np.mean(memory)), 6),
    }


@timed
def central(*, data: str, protocol: Protocol, mode: Mode, fold: int, seed: int) -> Result:
    """Train the centralised twin: the same model on all rows in one place.

    In paper mode it makes as many passes over the rows as the federation does.
    """
    tables = _tables(data, fold, protocol, mode)
    if mode == "sound":
        ranker = MLP(seed=seed).fit(tables.train, validation=tables.validation)
        return {"queries": by_query(tables.test, ranker.score(tables.test))}
    passes = round(protocol.rounds * 5 * protocol.per_round / protocol.silos)
    recipe = paper_training(max(1, passes))
    ranker = MLP((), training=recipe, scaling="none", seed=seed).fit(tables.train)
    return _both_scorings(ranker, tables.test, mode)


@timed
def references(*, data: str, protocol: Protocol, fold: int) -> Result:
    """Measure a random ranker (the mean of many) and the single feature that ranks training queries best."""
    tables = fold_of(data, fold, protocol.queries)
    test = tables.test
    rng = Streams(0)("random ranker", fold)
    draws = max(5, min(50, 1_000_000 // max(1, test.rows)))
    drawn = [by_query(test, rng.random(test.rows)) for _ in range(draws)]
    mean = {name: _mean_by_query([one[name] for one in drawn]) for name in MEASURES}
    feature, sign = best_feature(tables.train[:1000])
    alone = by_query(test, sign * test.features[:, feature].astype(np.float64))
    return {"random": mean, "best single feature": alone, "feature": int(sign) * (feature + 1)}


def _mean_by_query(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    table = np.array(lists, dtype=np.float64)
    return [None if np.isnan(value) else round(float(value), 6) for value in table.mean(axis=0)]


def best_feature(letor: Letor) -> tuple[int, float]:
    """Return the column, and its sign 1 or −1, with the best nDCG@10 on these lists."""
    ways = [(column, sign) for column in range(letor.width) for sign in (1.0, -1.0)]

    def value(way: tuple[int, float]) -> float:
        scores = way[1] * letor.features[:, way[0]].astype(np.float64)
        return evaluate_rows(letor.grades, scores, letor.offsets, [WATCHED])[WATCHED]

    return max(ways, key=value)


TREES = LambdaMART(library="xgboost", trees=100, learning_rate=0.1, depth=5)
TREE_SILOS = 4


@timed
def trees(*, data: str, protocol: Protocol, fold: int) -> Result:
    """Train LightGBM on all rows, and XGBoost on all rows and across silos; empty without the extra."""
    from isthmus_reproduce.trees import train_silos

    tables = fold_of(data, fold, protocol.queries)
    try:
        rankers: Mapping[str, LambdaMART] = {
            "LightGBM": LambdaMART().fit(tables.train, validation=tables.validation),
            "LambdaMART, centralised": copy(TREES).fit(tables.train),
            "federated LambdaMART": train_silos(sorted_silos(tables.train), TREES),
        }
    except MissingExtra:
        return {}
    return {row: by_query(tables.test, ranker.score(tables.test)) for row, ranker in rankers.items()}


def sorted_silos(letor: Letor) -> dict[str, Letor]:
    """Return four silos of queries sorted by their mean grade: the strongest possible skew."""
    totals = np.bincount(letor.query_of_row, letor.grades, minlength=len(letor))
    worth = totals / np.maximum(np.diff(letor.offsets), 1)
    parts = np.array_split(np.argsort(worth, kind="stable"), TREE_SILOS)
    return {f"silo {at}": letor[np.sort(part)] for at, part in enumerate(parts)}
