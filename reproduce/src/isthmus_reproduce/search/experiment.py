"""Search across silos, measured: merged lists beside one index, the gain by learning, and calibration.

Silos are dealt by topic, the built-in world has its own; queries are tested five-fold by models that have not
seen them, nor any query whose judgements are linked with theirs. All results come from the service's own code
(`world`, `hybrid`, `learned`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any, Literal

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError
from isthmus.evaluation import bootstrap, reliability, sampling_floor
from isthmus.report import Estimate, Page, Section, Table
from isthmus.service import BINS
from isthmus_reproduce.notebook import Cell, Notebook, Reproduction, Unit
from isthmus_reproduce.prose import Prose
from isthmus_reproduce.search.hybrid import BM25 as CENTRAL
from isthmus_reproduce.search.hybrid import values_of
from isthmus_reproduce.search.learned import INVERTED, MANY, inverted, learned
from isthmus_reproduce.search.world import BUILT_IN, MEASURE, World, references

PROSE = Prose("search.j2")
DATA = ("cran", "cisi", "med", "npl", BUILT_IN)
ALL = "all"
DRAWS = 3
"""Number of private releases of the statistics to average over."""
LEARNED, BEFORE = "learned", "before learning"
MUCH = 0.2
"""Drop in a query's measure that a user would notice."""


@dataclass(frozen=True)
class Config:
    """What to measure: one collection, or `all` that are available."""

    data: str = ALL
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0
    encoder: str = ""
    """The encoder that all silos have agreed on; empty for search by words."""


@dataclass(frozen=True)
class Part:
    """A unit of work: one kind of measurement on one collection."""

    kind: str
    data: str


def reproduce(config: Config, out: str | PathLike[str], *, workers: int | None = None) -> Reproduction:
    """Compute what is missing in the folder, and write the report."""
    notebook = Notebook(out, config)
    names = tuple(present()) if config.data == ALL else (config.data,)
    about = {"seed": config.seed, "scale": config.scale, "encoder": config.encoder}
    kinds = ("merged", "learned") if config.encoder else ("merged", "learned", "inverted")
    units = [
        Unit(Part(kind, name), {"kind": kind, "data": name, **about}) for name in names for kind in kinds
    ]
    results = notebook.compute(work, units, label="searching", workers=workers)
    kept = {name: {kind: results[Part(kind, name)] for kind in kinds} for name in names}
    outcomes = [Outcome(name, seed=config.seed, **each) for name, each in kept.items()]
    cells = [cell for outcome in outcomes for cell in outcome.cells()]
    return notebook.publish([*cells, *_pooled_cells(outcomes)], _page(outcomes))


def present() -> Iterator[str]:
    from isthmus.corpora import load

    for name in DATA:
        try:
            load(name)
        except DataError:
            continue
        yield name


def work(kind: str, data: str, seed: int, scale: str, encoder: str = "") -> dict[str, Any]:
    """Measure one part of one collection."""
    smoke = scale == "smoke"
    world = World.of(data, seed=seed, smoke=smoke, **({"silos": MANY} if kind == "inverted" else {}))
    about: dict[str, Any] = {"groups": world.groups.tolist(), "documents": len(world.corpus.documents)}
    if kind == "inverted":
        return {**about, "values": inverted(world)}
    if kind == "learned":
        return {**about, **learned(world, data, encoder)}
    draws = 1 if smoke else DRAWS
    return {**about, "values": values_of(world, encoder, draws) if encoder else references(world, draws)}


@dataclass(frozen=True, eq=False)
class Outcome:
    """All measurements on one collection, as the units saved them."""

    data: str
    merged: Mapping[str, Any]
    learned: Mapping[str, Any]
    inverted: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @cached_property
    def groups(self) -> IntArray:
        """The group of every query."""
        return np.array(self.learned["groups"])

    @cached_property
    def values(self) -> dict[str, FloatArray]:
        """The measure of every query by row, the mean over draws and rounds."""
        rows = {row: np.mean(lists, axis=0) for row, lists in self.merged["values"].items()}
        after = np.mean(self.learned["after"], axis=0)
        return {**rows, BEFORE: np.array(self.learned["before"]), LEARNED: after}

    @property
    def gain(self) -> FloatArray:
        """The gain of every query by learning."""
        return self.values[LEARNED] - self.values[BEFORE]

    def over(self, row: str, other: str) -> Estimate:
        """Return the mean difference with its interval; a group counts once."""
        return _estimate(self.values[row] - self.values[other], self.groups, self.seed)

    def worse(self, row: str, other: str) -> tuple[int, int]:
        """Return how many queries are worse than by another row, and how many lose more than `MUCH`."""
        difference = self.values[row] - self.values[other]
        return int((difference < -1e-9).sum()), int((difference < -MUCH).sum())

    @property
    def adopted(self) -> tuple[int, int]:
        """How often a learned model replaced the baseline, and in how many trainings."""
        kinds = self.learned["kinds"]
        return sum(kind != "baseline" for kind in kinds), len(kinds)

    @cached_property
    def hits(self) -> FloatArray:
        """(probability, whether it is right, round) of every hit shown."""
        return np.array([row[1:] for row in self.learned["hits"]], dtype=np.float64)

    @cached_property
    def honesty(self) -> tuple[float, float]:
        """The calibration error of shown hits, and the 95 % quantile of that of a perfectly calibrated model
        with the same hits; both are means over rounds."""
        pairs = []
        for number in np.unique(self.hits[:, 2]).tolist():
            probability, right, _ = self.hits[self.hits[:, 2] == number].T
            error = reliability(probability, right, bins=BINS).ece
            pairs.append((error, sampling_floor(probability, bins=BINS, draws=200).high))
        error, high = np.mean(pairs, axis=0).tolist()
        return error, high

    @property
    def probabilities(self) -> dict[str, float]:
        """The base rate of shown hits, and the mean probability of the first hit where nothing is right."""
        return {
            "base rate": float(self.hits[:, 1].mean()),
            "first hit, relevant documents removed": float(np.mean(self.learned["missing"])),
            "first hit, another collection's queries": float(np.mean(self.learned["foreign"])),
        }

    @property
    def known(self) -> dict[str, float]:
        """The share of known items ranked first: of all, and of those that two words identify."""
        names = (
            ("known items first, before", "known items first"),
            ("named items first, before", "named items first"),
        )
        counts = zip(names, self.learned["known"], strict=True)
        return {
            name: first / max(size, 1)
            for both, (size, *firsts) in counts
            for name, first in zip(both, firsts, strict=True)
        }

    def cells(self) -> Iterator[Cell]:
        """Yield every figure of the tables as a cell."""
        about: dict[str, Any] = {"table": "search", "mode": "sound", "data": self.data, "n": len(self.groups)}

        def cell(row: str, measure: str, value: float | Estimate) -> Cell:
            if isinstance(value, Estimate):
                return Cell(
                    row=row, measure=measure, value=value.value, low=value.low, high=value.high, **about
                )
            return Cell(row=row, measure=measure, value=value, **about)

        for row, values in self.values.items():
            yield cell(row, MEASURE, _estimate(values, self.groups, self.seed))
            for other in {CENTRAL, BEFORE} - {row}:
                yield cell(row, f"{MEASURE} over {other}", self.over(row, other))
                yield cell(row, f"queries that lost more than {MUCH} to {other}", self.worse(row, other)[1])
        adopted, times = self.adopted
        figures = {
            "share of folds adopted": adopted / times,
            "ECE": self.honesty[0],
            "ECE, 95 % quantile": self.honesty[1],
            **self.probabilities,
            **self.known,
        }
        for measure, value in figures.items():
            yield cell(LEARNED, measure, value)
        for row, lists in self.inverted.get("values", {}).items():
            yield cell(f"{INVERTED} of {MANY} silos inverted: {row}", MEASURE, float(np.mean(lists)))


def _estimate(values: FloatArray, groups: IntArray, seed: int) -> Estimate:
    interval = bootstrap(values, groups=groups, seed=seed)
    return Estimate(interval.value, interval.low, interval.high)


def pooled(outcomes: Sequence[Outcome]) -> tuple[Estimate, float]:
    """Return the gain by learning over all queries of all collections, and the mean over collections."""
    first = np.cumsum([0, *(int(each.groups.max()) + 1 for each in outcomes)])
    groups = np.concatenate([each.groups + start for each, start in zip(outcomes, first, strict=False)])
    gains = np.concatenate([each.gain for each in outcomes])
    return _estimate(gains, groups, outcomes[0].seed), float(np.mean([each.gain.mean() for each in outcomes]))


def _pooled_cells(outcomes: Sequence[Outcome]) -> Iterator[Cell]:
    gain, mean = pooled(outcomes)
    about: dict[str, Any] = {"table": "search", "mode": "sound", "data": "pooled", "row": LEARNED}
    measure, n = f"{MEASURE} over {BEFORE}", sum(len(each.groups) for each in outcomes)
    yield Cell(measure=measure, value=gain.value, low=gain.low, high=gain.high, n=n, **about)
    yield Cell(measure=f"{measure}, mean of collections", value=mean, n=len(outcomes), **about)


def _page(outcomes: Sequence[Outcome]) -> Page:
    sections = [
        Section("Learning", (_gains(outcomes), *_fallen(outcomes), PROSE("learning", much=MUCH))),
        Section("Lists that are merged", (_quality(outcomes), PROSE("quality"))),
        Section("Honesty of the ten hits shown", (_honesty(outcomes), PROSE("honesty"))),
    ]
    if any(each.inverted for each in outcomes):
        sections.append(
            Section("Silos that judge the wrong way round", (_attacked(outcomes), PROSE("inverted")))
        )
    return Page("Search across silos", tuple(sections), PROSE("lead"))


def _gains(outcomes: Sequence[Outcome]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for outcome in outcomes:
        adopted, times = outcome.adopted
        means = (float(outcome.values[row].mean()) for row in (BEFORE, LEARNED))
        worse, much = outcome.worse(LEARNED, BEFORE)
        gain = outcome.over(LEARNED, BEFORE)
        rows.append((outcome.data, len(outcome.groups), *means, gain, f"{adopted} of {times}", worse, much))
    if len(outcomes) > 1:
        sums = (sum(row[column] for row in rows) for column in (1, 6, 7))
        queries, worse, much = sums
        rows.append(("pooled", queries, None, None, pooled(outcomes)[0], "", worse, much))
    header = ("data", "queries", BEFORE, LEARNED, "difference", "adopted", "worse", f"lost > {MUCH}")
    return Table(header, tuple(rows), f"{MEASURE}; silos by topic; five-fold over queries", (), 4)


def _fallen(outcomes: Sequence[Outcome]) -> Iterator[Table]:
    rows = [(each.data, *row) for each in outcomes for row in each.learned["fallen"]]
    if rows:
        yield Table(("data", "query", "before", "after", "cause"), tuple(rows), "Queries that fell", (), 3)


def _quality(outcomes: Sequence[Outcome]) -> Table:
    rows = [
        (outcome.data, row, float(values.mean()), outcome.over(row, CENTRAL) if row != CENTRAL else None)
        for outcome in outcomes
        for row, values in outcome.values.items()
    ]
    return Table(("data", "row", MEASURE, f"over {CENTRAL}"), tuple(rows), "", (), 4)


def _honesty(outcomes: Sequence[Outcome]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for outcome in outcomes:
        figures = (*outcome.honesty, *outcome.probabilities.values(), *outcome.known.values())
        rows.append((outcome.data, len(outcome.hits), *figures))
    header = (
        *("data", "hits", "ECE", "95 %", "base rate", "removed", "foreign"),
        *("known items", "after", "named items", "after "),
    )
    return Table(header, tuple(rows), "Pooled over all test folds", (), 3)


def _attacked(outcomes: Sequence[Outcome]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for outcome in outcomes:
        lists = {row: np.array(values) for row, values in outcome.inverted["values"].items()}
        groups = np.array(outcome.inverted["groups"])
        honest = lists["the six honest silos"]
        for row, values in lists.items():
            beside = None if values is honest else _estimate(values - honest, groups, outcome.seed)
            rows.append((outcome.data, row, float(values.mean()), beside))
    return Table(("data", "learned from", MEASURE, "over the six"), tuple(rows), "", (), 4)
