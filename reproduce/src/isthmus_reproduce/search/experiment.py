"""Search across silos, measured: quality beside one central index, and whether 0.8 means eighty percent.

Silos are dealt by topic, the built-in world has its own; queries are tested five-fold by models that have not
seen them, nor any query whose judgements hang together with theirs. Everything is found by the service's own
code (`search_world`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError
from isthmus.evaluation import bootstrap, paired_t, reliability, reliability_diagram, sampling_floor
from isthmus.report import Estimate, Page, Section, Table
from isthmus.service import BINS
from isthmus_reproduce.notebook import Cell, Notebook, Reproduction, Unit
from isthmus_reproduce.prose import Prose
from isthmus_reproduce.search import world as search_world
from isthmus_reproduce.search.hybrid import HybridOutcome, page_of, values_of
from isthmus_reproduce.search.world import BUILT_IN, MEASURE, World

PROSE = Prose("search.j2")
DATA = ("cran", "cisi", "med", "npl", BUILT_IN)
ALL = "all"
DRAWS = 3
"""Private releases of the statistics that are averaged."""
BASELINES = ("raw, local statistics", "RRF", "z-score")
CENTRAL, DEFAULT = "central BM25", "default"
SURE = 0.7
FEW = 20
"""Hits below which nothing is said of those that are sure."""


@dataclass(frozen=True)
class Config:
    """What to measure: one collection, or `all` that are here."""

    data: str = ALL
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0
    encoder: str = ""
    """Measures the hybrid without learning, with this encoder; empty for what is learned."""


@dataclass(frozen=True)
class Part:
    """A unit of work: one kind of measuring on one collection."""

    kind: str
    data: str


def reproduce(config: Config, out: str | PathLike[str], *, workers: int | None = None) -> Reproduction:
    """Compute what is missing in the folder, and write the report."""
    notebook = Notebook(out, config)
    names = tuple(_present()) if config.data == ALL else (config.data,)
    about = {"seed": config.seed, "scale": config.scale, "encoder": config.encoder}
    if config.encoder:
        hybrids = [Unit(Part("hybrid", name), {"kind": "hybrid", "data": name, **about}) for name in names]
        kept = notebook.compute(work, hybrids, label="searching", workers=workers)
        measured = [HybridOutcome.of(unit.key.data, kept[unit.key], config.seed) for unit in hybrids]
        page = page_of(measured, config.encoder)
        return notebook.publish([cell for outcome in measured for cell in outcome.cells()], page)
    units = [
        Unit(Part(kind, name), {"kind": kind, "data": name, **about})
        for name in names
        for kind in search_world.WORK
    ]
    results = notebook.compute(work, units, label="searching", workers=workers)
    outcomes = [
        Outcome.of(name, results[Part("references", name)], results[Part("learned", name)], config.seed)
        for name in names
    ]
    cells = [cell for outcome in outcomes for cell in outcome.cells()]
    return notebook.publish(cells, _page(outcomes))


def _present() -> Iterator[str]:
    from isthmus.corpora import load

    for name in DATA:
        try:
            load(name)
        except DataError:
            continue
        yield name


def work(kind: str, data: str, seed: int, scale: str, encoder: str = "") -> dict[str, Any]:
    """One part of one collection."""
    world = World.of(data, seed=seed, smoke=scale == "smoke")
    about: dict[str, Any] = {"groups": world.groups.tolist(), "documents": len(world.corpus.documents)}
    draws = 1 if scale == "smoke" else DRAWS
    if kind == "hybrid":
        return {**about, "values": values_of(world, encoder, draws)}
    if kind == "references":
        return {**about, "values": search_world.references(world, draws)}
    return {**about, **search_world.learned(world)}


@dataclass(frozen=True, eq=False)
class Shown:
    """The hits shown, of all queries together."""

    query: IntArray
    probability: FloatArray
    relevant: FloatArray
    round: IntArray


@dataclass(frozen=True, eq=False)
class Outcome:
    """Everything that was measured on one collection."""

    data: str
    values: Mapping[str, FloatArray]
    hits: Mapping[str, Shown]
    groups: IntArray
    seed: int

    @classmethod
    def of(cls, data: str, plain: Mapping[str, Any], learned: Mapping[str, Any], seed: int) -> Outcome:
        """From what the units kept."""
        values = {name: np.array(lists) for name, lists in plain["values"].items()}
        values |= {name: np.mean(lists, axis=0) for name, lists in learned["values"].items()}
        draws = [name for name in values if name.startswith("raw, shared privately")]
        values["raw, shared privately"] = np.mean([values.pop(name) for name in draws], axis=0)
        hits = {}
        for way in learned["values"]:
            rows = [row for row in learned["shown"] if row[0] == way]
            query, chance, right, number = (np.array([row[at] for row in rows]) for at in (1, 3, 4, 5))
            hits[way] = Shown(query, chance.astype(float), right.astype(float), number)
        return cls(data, values, hits, np.array(plain["groups"]), seed)

    def against(self, row: str, other: str) -> tuple[Estimate, float]:
        """The mean difference with its interval, and the p of a paired test; groups count once."""
        difference = self.values[row] - self.values[other]
        interval = bootstrap(difference, groups=self.groups, seed=self.seed)
        p = paired_t(self.values[row], self.values[other], groups=self.groups).p
        return Estimate(interval.value, interval.low, interval.high), p

    def sure(self, way: str) -> tuple[int, float, Estimate | None]:
        """Of the hits at 0.7 and above: how many, their mean probability, and the share that was right."""
        hits = self.hits[way]
        chosen = hits.probability >= SURE
        count = int(chosen.sum())
        if count < FEW:
            return count, float("nan"), None
        groups = self.groups[hits.query[chosen]]
        interval = bootstrap(hits.relevant[chosen], groups=groups, seed=self.seed)
        return (
            count,
            float(hits.probability[chosen].mean()),
            Estimate(interval.value, interval.low, interval.high),
        )

    def cells(self) -> Iterator[Cell]:
        """Every figure."""
        n = len(self.groups)
        about: dict[str, Any] = {"table": "search", "mode": "sound", "data": self.data, "n": n}
        for row, values in self.values.items():
            interval = bootstrap(values, groups=self.groups, seed=self.seed)
            yield Cell(
                row=row, measure=MEASURE, value=interval.value, low=interval.low, high=interval.high, **about
            )
            for other in (CENTRAL, *(BASELINES if row == DEFAULT else ())):
                if row != other:
                    by, p = self.against(row, other)
                    measure = f"{MEASURE} over {other}"
                    yield Cell(row=row, measure=measure, value=by.value, low=by.low, high=by.high, **about)
                    yield Cell(row=row, measure=f"p over {other}", value=p, **about)
        for way, hits in self.hits.items():
            error, floor = ece_and_floor(hits)
            count, chance, right = self.sure(way)
            yield Cell(row=way, measure="ECE", value=error, **about)
            yield Cell(row=way, measure="ECE floor", value=floor, **about)
            yield Cell(row=way, measure="ECE of one round", value=round_by_round(hits), **about)
            yield Cell(row=way, measure=f"hits at p ≥ {SURE}", value=count, **about)
            if right is not None:
                measure = f"precision at p ≥ {SURE}"
                yield Cell(row=way, measure=f"mean p at p ≥ {SURE}", value=chance, **about)
                yield Cell(
                    row=way, measure=measure, value=right.value, low=right.low, high=right.high, **about
                )


def ece_and_floor(hits: Shown) -> tuple[float, float]:
    """The calibration error over ten bins, and what a perfect model would show with the hits of one round."""
    error = reliability(hits.probability, hits.relevant, bins=BINS).ece
    rounds = np.unique(hits.round).tolist()
    floors = [
        sampling_floor(hits.probability[hits.round == number], bins=BINS, draws=100).mean for number in rounds
    ]
    return error, float(np.mean(floors))


def round_by_round(hits: Shown) -> float:
    """The mean calibration error of single rounds."""
    rounds = [hits.round == number for number in np.unique(hits.round).tolist()]
    errors = [reliability(hits.probability[each], hits.relevant[each], bins=BINS).ece for each in rounds]
    return float(np.mean(errors))


def _page(outcomes: Sequence[Outcome]) -> Page:
    sections = [
        Section("Quality", (_quality(outcomes), PROSE("quality"))),
        Section("Identity", (_identity(outcomes), PROSE("identity"))),
        Section("Honesty of the ten hits shown", (*_honesty(outcomes), PROSE("honesty", sure=SURE, few=FEW))),
    ]
    return Page("Search across silos", tuple(sections), PROSE("lead"))


def _quality(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        for row in outcome.values:
            if row.startswith("raw, shared"):
                continue
            over, p = outcome.against(row, CENTRAL) if row != CENTRAL else (None, None)
            beaten, by = outcome.against(DEFAULT, row) if row != DEFAULT else (None, None)
            rows.append((outcome.data, row, float(outcome.values[row].mean()), over, p, beaten, by))
    header = ("data", "row", MEASURE, "over central BM25", "p", "default over it", "p ")
    return Table(header, tuple(rows), "Silos by topic; five-fold over queries", (), 4)


def _identity(outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        values = outcome.values
        exact, private = values["raw, shared exactly"], values["raw, shared privately"]
        largest = float(np.abs(exact - values[CENTRAL]).max())
        lost = outcome.against("raw, shared privately", CENTRAL)[0]
        rows.append((outcome.data, float(values[CENTRAL].mean()), largest, float(private.mean()), lost))
    header = ("data", CENTRAL, "largest difference, exact", "private", "private over central")
    return Table(header, tuple(rows), "Lists merged by BM25 score with shared statistics", (), 4)


def _honesty(outcomes: Sequence[Outcome]) -> Iterator[Any]:
    rows = []
    for outcome in outcomes:
        for way, hits in outcome.hits.items():
            count, chance, right = outcome.sure(way)
            verdict = "too few" if right is None else _inside(chance, right)
            mean = None if right is None else chance
            errors = (*ece_and_floor(hits), round_by_round(hits))
            rows.append((outcome.data, way, len(hits.query), *errors, count, mean, right, verdict))
    header = (
        *("data", "calibrators", "hits", "ECE", "floor", "ECE of one round"),
        *("p ≥ 0.7", "mean p", "precision", "inside"),
    )
    yield Table(header, tuple(rows), "Pooled over all test folds", (), 3)
    named = {
        outcome.data: reliability(hits.probability, hits.relevant, bins=BINS)
        for outcome in outcomes
        for hits in (outcome.hits[DEFAULT],)
    }
    yield reliability_diagram(named, caption="The product's probabilities of the ten hits shown.")


def _inside(chance: float, right: Estimate) -> str:
    if right.low is None or right.high is None:
        return "no interval"
    return "yes" if right.low <= chance <= right.high else "no"
