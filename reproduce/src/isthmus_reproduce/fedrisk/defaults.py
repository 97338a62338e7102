"""The defaults of `train`, measured on data sets of several sizes; each choice leaves one family out.

Every row trains on the same deal of whole queries, skewed by their grades, and is measured by nDCG@10 of the
test queries that have a relevant document. A choice is made by the mean over the families of data that are
not reported on; sub-samples of a set belong to its family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import PathLike
from typing import Any, Literal

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.corpora import SYNTHETIC, load_folds, load_synthetic
from isthmus.errors import ConfigError, DataError
from isthmus.federation import FedRisk, Judge, Rounds, State, StrategyOptions, held_back
from isthmus.partition import Dealing, folds, silos_for
from isthmus.randomness import Streams
from isthmus.rankers import MLP
from isthmus.report import Page, Section, Table
from isthmus.tables import Fold, Letor
from isthmus_reproduce.faults import FaultyConfig, train
from isthmus_reproduce.fedrisk.plans import ATTACK
from isthmus_reproduce.fedrisk.runs import Result, honest_queries, timed
from isthmus_reproduce.notebook import Cell, Notebook, Reproduction, Unit, listed
from isthmus_reproduce.prose import Prose

PROSE = Prose("training_defaults.j2")
MEASURE = "nDCG@10"
ROUNDS = 100
LAST, STOPPED = "last", "stopped by validation"
RELEASES = (LAST, STOPPED)
"""The average over rounds after the last one, and after the round in which it was best on validation."""


@dataclass(frozen=True)
class DataSet:
    """Folds of a data set, with all its queries or with random samples of them."""

    family: str
    folds: int = 5
    seeds: int = 1
    queries: int | None = None
    samples: int = 1


SETS: Mapping[str, DataSet] = {
    "mq2008": DataSet("mq2008"),
    "mq2008, 60 queries": DataSet("mq2008", queries=60, samples=5),
    "synthetic": DataSet("synthetic", folds=2),
    "synthetic, 160 queries": DataSet("synthetic", folds=3, queries=160),
    "mslr-sample": DataSet("mslr-sample"),
    "lightgbm-example": DataSet("lightgbm-example", folds=1, seeds=3),
    "lightgbm-example, five folds": DataSet("lightgbm-example", queries=251),
}
SMOKE = {"synthetic, 160 queries": DataSet("synthetic", folds=1), "mslr-sample": DataSet("mslr-sample", 1)}


@dataclass(frozen=True)
class Row:
    """A training run: its strategy, the silos that take part, and whether it uses secure sums."""

    strategy: StrategyOptions = field(default_factory=StrategyOptions)
    silos: Literal["all", "inverted", "honest"] = "all"
    secure: bool = False
    probe: int | None = None
    """Most queries of the probe, if not the default's number."""


TWIN = "centralised"
ROWS: Mapping[str, Row] = {
    "default": Row(),
    "default, three in ten inverted": Row(silos="inverted"),
    "default, honest silos only": Row(silos="honest"),
    "FedAvg": Row(StrategyOptions("fedavg")),
    "FedAvg, momentum 0.9": Row(StrategyOptions("fedavgm")),
    "secure": Row(secure=True),
    "secure, three in ten inverted": Row(silos="inverted", secure=True),
    "secure, honest silos only": Row(silos="honest", secure=True),
    **{f"momentum {share:g}": Row(StrategyOptions(momentum=share)) for share in (0.0, 0.5, 0.9)},
    "probe of 10": Row(probe=10),
    "probe of 10, three in ten inverted": Row(silos="inverted", probe=10),
    "no memory": Row(StrategyOptions(risk=FedRisk(memory=False))),
    "no memory, three in ten inverted": Row(StrategyOptions(risk=FedRisk(memory=False)), silos="inverted"),
}
DIFFERENCES = (
    *(("default", rival) for rival in (TWIN, "FedAvg", "FedAvg, momentum 0.9")),
    ("default, three in ten inverted", "default, honest silos only"),
    *(("secure", rival) for rival in ("default", TWIN, "FedAvg, momentum 0.9")),
    ("secure, three in ten inverted", "secure, honest silos only"),
)
"""Pairs of rows that are compared."""
_BAD = "default, three in ten inverted"
CHOICES: Mapping[str, Mapping[str, tuple[Sequence[str], str]]] = {
    "momentum": {
        "by the queries": (("default",), LAST),
        **{f"{share:g}": ((f"momentum {share:g}",), LAST) for share in (0.0, 0.5, 0.9)},
    },
    "release": {release: (("default",), release) for release in RELEASES},
    "probe": {
        "at most 40": (("default", _BAD), LAST),
        "at most 10": (("probe of 10", "probe of 10, three in ten inverted"), LAST),
    },
    "memory": {
        "on": (("default", _BAD), LAST),
        "off": (("no memory", "no memory, three in ten inverted"), LAST),
    },
}
"""Options of every question, the default first: the rows whose mean decides, and the release."""


@dataclass(frozen=True)
class Config:
    """What to measure: `data` is a set's name, or "all" for the available ones; `only` selects rows."""

    data: str = "all"
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A unit of work: one fold and seed of one row."""

    data: str
    row: str
    fold: int
    seed: int


Values = Mapping[Part, Mapping[str, Any]]


def reproduce(
    config: Config,
    out: str | PathLike[str],
    *,
    workers: int | None = None,
    values: str | PathLike[str] | None = None,
) -> Reproduction:
    """Compute what is missing in the folder, write the report, and to `values` the values of every query.

    The report covers all results in the folder, so that sets and rows can be added one by one.
    """
    notebook = Notebook(out, Config(scale=config.scale, seed=config.seed))
    notebook.compute(trained, _units(config), label="training", workers=workers)
    results = notebook.saved(_units(Config(scale=config.scale, seed=config.seed)))
    cells = [*_set_cells(results), *_choice_cells(results)]
    return notebook.publish(cells, _page(cells), rows=_per_query(results), values=values)


def _units(config: Config) -> list[Unit]:
    """Return the units fold by fold, so that an interrupted run has whole folds."""
    return [
        Unit(part, {"data": part.data, "row": part.row, "fold": part.fold, "seed": part.seed})
        for part in _parts(config)
    ]


def _parts(config: Config) -> Iterator[Part]:
    sets = SMOKE if config.scale == "smoke" else SETS
    known = (TWIN, *ROWS)
    for name, among in ((config.data, ("all", *sets)), *((row, known) for row in config.only)):
        if name not in among:
            raise ConfigError(f"no data or row {name!r}", key=name, value=name, known=among)
    for name, one in sets.items():
        if config.data not in ("all", name) or not _is_here(one.family):
            continue
        for fold in range(one.folds * one.samples):
            for seed in range(config.seed, config.seed + one.seeds):
                yield from (Part(name, row, fold, seed) for row in config.only or known)


def _is_here(family: str) -> bool:
    try:
        return family in SYNTHETIC or bool(load_folds(family))
    except DataError:
        return False


@lru_cache(maxsize=2)
def fold_of(data: str, at: int) -> Fold:
    """Return a fold of a set: its own, or one of five of a random sample of its queries."""
    one = SETS[data]
    if one.family in SYNTHETIC:
        parts = (load_synthetic(one.family, split, fold=at) for split in ("train", "validation", "test"))
        fold = Fold(data, *parts)
        few = None if one.queries is None else one.queries // 3
        return replace(fold, train=fold.train[: one.queries], validation=fold.validation[:few])
    if one.queries is None:
        return load_folds(one.family)[at]
    first, sample = load_folds(one.family)[0], at // one.folds
    tables = {"train": first.train, "validation": first.validation, "test": first.test}
    whole = Letor.concat(
        [
            replace(table, queries=tuple(f"{name} {query}" for query in table.queries))
            for name, table in tables.items()
            if len(table)
        ]
    )
    rng = Streams(sample)("sample of queries", one.queries)
    drawn = whole[np.sort(rng.choice(len(whole), min(one.queries, len(whole)), replace=False))]
    place = (folds(len(drawn), 5, rng) - at) % 5
    return Fold(data, drawn[place > 1], drawn[place == 1], drawn[place == 0])


@timed
def trained(*, data: str, row: str, fold: int, seed: int) -> Result:
    """Train one row and return nDCG@10 of every test query with a relevant document, for each release."""
    run = ROWS.get(row, Row(StrategyOptions("fedavg")))  # FedAvg for the twin: needs no probe
    config = FaultyConfig(seed=seed, strategy=run.strategy, measures=(), workers=1)
    tables, probe = held_back(fold_of(data, fold), config)
    if row == TWIN:
        ranker = MLP(seed=seed).fit(tables.train, validation=tables.validation)
        judge = Judge(ranker.scaling_(tables.test))
        return _values(judge, dict.fromkeys(RELEASES, ranker.parameters_))
    if probe is not None and run.probe is not None:
        probe = probe[: run.probe]
    config = replace(
        config,
        dealing=Dealing("dirichlet-query", silos=silos_for(len(tables.train)), concentration=0.3),
        rounds=Rounds(ROUNDS),
        strategy=run.strategy.for_queries(len(tables.train)),
        secure=run.secure,
        faults=(ATTACK,) if run.silos == "inverted" else (),
    )
    if run.silos == "honest":
        honest = honest_queries(tables.train, config)
        sites = len({query.partition("/")[0] for query in honest.queries})
        tables = replace(tables, train=honest)
        config = replace(config, dealing=Dealing("site", silos=sites))
    states: dict[str, State] = {}

    def watch(state: State) -> None:
        states[LAST] = state
        if state.history[-1].measure == state.best_measure:
            states[STOPPED] = state

    train(config, tables, probe=probe, watch=watch)
    judge = Judge(states[LAST].scaling(tables.test), scoring=config.model.scoring)
    return _values(judge, {name: state.average for name, state in states.items()})


def _values(judge: Judge, models: Mapping[str, Any]) -> Result:
    by_release = {
        name: [round(1 - error, 6) for error in judge.errors(model)] for name, model in models.items()
    }
    return {"queries": list(judge.table.queries), **by_release}


def by_query(results: Values, data: str, runs: Sequence[tuple[str, str]]) -> list[FloatArray]:
    """Return nDCG@10 of a set's test queries under each row and release, on folds and seeds common to all.

    Folds follow one another, and a query's value is the mean over seeds. The list is empty if a row has no
    results.
    """
    of_run = [
        {
            (part.fold, part.seed): one[release]
            for part, one in results.items()
            if (part.data, part.row) == (data, row)
        }
        for row, release in runs
    ]
    common = set.intersection(*map(set, of_run))
    folds_in_order = sorted({fold for fold, _ in common})
    if not common:
        return []
    return [
        np.concatenate(
            [
                np.mean([values[key] for key in sorted(common) if key[0] == fold], axis=0)
                for fold in folds_in_order
            ]
        )
        for values in of_run
    ]


def _set_cells(results: Values) -> Iterator[Cell]:
    for data in dict.fromkeys(part.data for part in results):
        about: dict[str, Any] = {"table": "sets", "mode": "sound", "data": data}
        for row in (TWIN, *ROWS):
            for mine in by_query(results, data, [(row, LAST)]):
                yield Cell.over_queries(mine, row=row, measure=MEASURE, **about)
        for row, rival in DIFFERENCES:
            pair = by_query(results, data, [(row, LAST), (rival, LAST)])
            if not pair:
                continue
            mine, other = pair
            facts: dict[str, Any] = {"row": f"{row}, less {rival}", **about}
            yield Cell.over_queries(mine - other, measure=MEASURE, **facts)
            counts = {"ratio": mine.mean() / other.mean(), "queries worse": (mine < other).sum()}
            for measure, value in counts.items():
                yield Cell(measure=measure, value=float(value), n=len(mine), **facts)


def choice(results: Values, question: str, family: str) -> tuple[str, FloatArray] | None:
    """Return the option that is best on the mean over the other families, and its gain over the default here.

    Only sets that have all runs count; a family's value is the mean over its sets. None without another
    family, or without this one.
    """
    options = CHOICES[question]
    runs = [(row, release) for rows, release in options.values() for row in rows]
    values: dict[str, dict[str, FloatArray]] = {}
    for data in dict.fromkeys(part.data for part in results):
        if every := by_query(results, data, runs):
            parts = np.array(every).reshape(len(options), -1, len(every[0]))
            values[data] = dict(zip(options, parts.mean(axis=1), strict=True))
    families = {data: SETS[data].family for data in values}
    others = [other for other in dict.fromkeys(families.values()) if other != family]
    if not others or family not in families.values():
        return None

    def mean(option: str, of: str) -> float:
        return float(np.mean([one[option].mean() for data, one in values.items() if families[data] == of]))

    best = max(options, key=lambda option: np.mean([mean(option, of) for of in others]))
    first = next(iter(options))
    here = [one[best] - one[first] for data, one in values.items() if families[data] == family]
    return best, np.concatenate(here)


def _choice_cells(results: Values) -> Iterator[Cell]:
    for question in CHOICES:
        for family in dict.fromkeys(SETS[part.data].family for part in results):
            chosen = choice(results, question, family)
            if chosen is not None:
                about: dict[str, Any] = {"table": "choice", "mode": "sound", "data": family}
                yield Cell.over_queries(chosen[1], row=question, variant=chosen[0], measure=MEASURE, **about)


def _per_query(results: Values) -> Iterator[dict[str, Any]]:
    for part, one in results.items():
        about = {"experiment": "training-defaults", "data": part.data, "fold": part.fold, "seed": part.seed}
        for release in RELEASES:
            name = part.row if release == LAST else f"{part.row}, {release}"
            for query, value in zip(one["queries"], one[release], strict=True):
                yield {**about, "method": name, "query": query, "measure": MEASURE, "value": value}


def _page(cells: Sequence[Cell]) -> Page:
    def table(name: str) -> Table:
        return listed((cell for cell in cells if cell.table == name), name, "row", "variant", "data")

    sections = (
        Section("What the defaults come to", (PROSE("sets"), table("sets"))),
        Section("The choices, each family left out", (PROSE("choice"), table("choice"))),
    )
    return Page("The defaults of training", sections, PROSE("lead"))
