"""From units to results: rows with their intervals, gaps and tests, and the cells of every table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.evaluation import holm, paired_t
from isthmus_reproduce.fedrisk import printed
from isthmus_reproduce.fedrisk.plans import (
    ARGMAX,
    DEPTHS,
    MEASURES,
    MODES,
    Mode,
    Protocol,
    RunName,
    all_bad,
    plans,
)
from isthmus_reproduce.notebook import Cell

Results = Mapping["RunUnit", Any]
Floats = NDArray[np.float64]
Runs = tuple[tuple[Mapping[str, Floats], ...], ...]
"""Measures of every query, by fold, then by seed."""
MAIN = "nDCG@10"
CENTRAL, BASELINE, RANDOM = "Centralised", "FedAvg", "random"
TREE_ROWS = ("federated LambdaMART", "LambdaMART, centralised", "LightGBM")
SINGLE = "best single feature"
REFERENCES = (SINGLE, RANDOM)
HONEST = "FedAvg, honest silos only"
LAST = 20
"""Number of last rounds over which restlessness is measured."""


@dataclass(frozen=True)
class RunUnit:
    """A unit of work: a run on one fold with one seed."""

    run: RunName
    fold: int
    seed: int = 0


def likeliest(run: RunName) -> RunName:
    """Return the row of the same model with documents scored by their most probable grade."""
    return replace(run, variant=f"{run.variant}, {ARGMAX}" if run.variant else ARGMAX)


def central_name(mode: Mode) -> RunName:
    """Return the name of a mode's centralised twin."""
    return RunName("central", mode, CENTRAL)


def overrun_name(row: str) -> RunName:
    """Return the name of a row that goes through rounds in which all silos are bad."""
    return RunName("overrun", "sound", row)


TREES, REFERENCED = RunName("trees", "sound", "trees"), RunName("references", "sound", "references")
"""Runs with several rows each: `TREE_ROWS` and `REFERENCES`."""


@dataclass(frozen=True)
class Row:
    """One row of a table in one mode: the measures of every query, run by run."""

    table: str
    row: str
    variant: str
    mode: Mode
    runs: Runs
    """By fold, then by seed."""

    @property
    def n(self) -> int:
        """Number of seeds × folds."""
        return sum(len(fold) for fold in self.runs)

    def by_run(self, measure: str) -> list[list[float]]:
        """Return the mean over queries, ×100, of every run, by fold."""
        return [[100 * float(np.nanmean(run[measure])) for run in fold] for fold in self.runs]

    def by_fold(self, measure: str) -> Floats:
        """Return the mean over seeds of every fold, ×100, from which intervals are computed."""
        return np.array([np.mean(fold) for fold in self.by_run(measure)])

    def by_query(self, measure: str) -> Floats:
        """Return the value of every test query of every fold, the mean over its seeds, for paired tests."""
        means = [np.mean([run[measure] for run in fold], axis=0) for fold in self.runs]
        return np.concatenate(means)

    def mean(self, measure: str) -> float:
        """Return the mean over folds and seeds, ×100."""
        return float(self.by_fold(measure).mean())

    def worst(self, measure: str) -> float:
        """Return the mean over queries of the worst run, ×100."""
        return min(value for fold in self.by_run(measure) for value in fold)

    def cell(self, measure: str, data: str, paper: float | None = None) -> Cell:
        """Build a cell of the mean with its 95 % t interval over folds."""
        facts: dict[str, Any] = {"table": self.table, "row": self.row, "variant": self.variant}
        facts |= {"measure": measure, "mode": self.mode, "data": data, "paper": paper}
        folds = self.by_fold(measure)
        return replace(Cell.over_folds(folds.tolist(), **facts), value=float(folds.mean()), n=self.n)


class Outcome:
    """All units of a reproduction, read as rows and curves."""

    def __init__(self, results: Results, protocol: Protocol, seed: int) -> None:
        self.results, self.protocol, self.seed = results, protocol, seed
        self._rows: dict[tuple[str, str, str, str], Row] = {}
        for run, plan in plans(protocol).items():
            self._add(run, run.table, self._read(run, plan.seeds, "queries"))
            if run.mode == "paper" and run.table == "1":
                self._add(likeliest(run), "1", self._read(run, plan.seeds, ARGMAX))
        for mode in MODES:
            run = central_name(mode)
            self._add(run, "1", self._read(run, protocol.seeds, "queries"))
            if mode == "paper":
                self._add(likeliest(run), "1", self._read(run, protocol.seeds, ARGMAX))
        for run, names in ((TREES, TREE_ROWS), (REFERENCED, REFERENCES)):
            for name in names:
                self._add(RunName("1", "sound", name), "1", self._read(run, 1, name))

    def _add(self, run: RunName, table: str, runs: Runs) -> None:
        if runs:
            self._rows[table, run.mode, run.row, run.variant] = Row(
                table, run.row, run.variant, run.mode, runs
            )

    def units(self, run: RunName, seeds: int) -> list[list[Any]]:
        """Return the available results of a run, by fold."""
        units = [
            [RunUnit(run, fold, self.seed + seed) for seed in range(seeds)]
            for fold in range(self.protocol.folds)
        ]
        there = [[self.results[unit] for unit in fold if unit in self.results] for fold in units]
        return [fold for fold in there if fold]

    def _read(self, run: RunName, seeds: int, key: str) -> Runs:
        def arrays(unit: Any) -> Mapping[str, Floats]:
            return {name: np.array(values, np.float64) for name, values in unit[key].items()}

        folds = [[arrays(unit) for unit in fold if unit.get(key)] for fold in self.units(run, seeds)]
        return tuple(tuple(fold) for fold in folds if fold)

    def row(self, table: str, mode: str, row: str, variant: str = "") -> Row | None:
        """Return a row, or None if it was not computed."""
        return self._rows.get((table, mode, row, variant))

    def rows(self, table: str, mode: str | None = None) -> list[Row]:
        """Return the rows of a table, in one mode or in all."""
        return [row for row in self._rows.values() if row.table == table and mode in (None, row.mode)]

    def gap(self, value: float, measure: str) -> float | None:
        """Return (x − random)/(central − random), where central is the sound twin."""
        random, central = self.row("1", "sound", RANDOM), self.row("1", "sound", CENTRAL)
        if random is None or central is None:
            return None
        low, high = random.mean(measure), central.mean(measure)
        return (value - low) / (high - low)

    def curves(self, run: RunName, key: str = "curve") -> Floats:
        """Return a curve per fold, the mean over its seeds; NaN after a run stopped."""
        seeds = plans(self.protocol)[run].seeds
        return stacked([[_curve(unit, key) for unit in fold] for fold in self.units(run, seeds)])

    def p_values(self, mode: str, measure: str) -> dict[tuple[str, str], float]:
        """Return p (Holm) of Table 1's rows against FedAvg in the same mode, by (row, variant)."""
        base = self.row("1", mode, BASELINE)
        others = [row for row in self.rows("1", mode) if row is not base and ARGMAX not in row.variant]
        if base is None or not others:
            return {}
        p_values = [paired_t(row.by_query(measure), base.by_query(measure)).p for row in others]
        return {(row.row, row.variant): float(p) for row, p in zip(others, holm(p_values), strict=True)}


def per_query(
    outcome: Outcome, data: str, queries: Callable[[int], Sequence[str]]
) -> Iterator[dict[str, Any]]:
    """Yield every value behind the tables: a row for each measure of each query of a fold, `queries(fold)`.

    The experiment is `fedrisk/TABLE/MODE`, the method the table's row and variant: `FedAvgM/momentum 0.9`.
    """
    for unit, result in outcome.results.items():
        run = unit.run
        several = {TREES: TREE_ROWS, REFERENCED: REFERENCES}.get(run)
        table = "1" if several or run.table == "central" else run.table
        keys = {name: ("1", name) for name in several or ()} or {
            "queries": (table, _method(run.row, run.variant)),
            ARGMAX: (table, _method(run.row, likeliest(run).variant)),
        }
        for key, (named, method) in keys.items():
            if key == ARGMAX and table != "1":
                continue
            about = {"experiment": f"fedrisk/{named}/{run.mode}", "data": data, "method": method}
            for measure, values in (result.get(key) or {}).items():
                for query, value in zip(queries(unit.fold), values, strict=True):
                    place = {"fold": unit.fold, "seed": unit.seed, "query": query}
                    yield {**about, **place, "measure": measure, "value": value}


def _method(row: str, variant: str) -> str:
    return f"{row}/{variant}" if variant else row


def _curve(unit: Any, key: str) -> Sequence[float | None]:
    curve: Sequence[float | None] = unit["cuts"][key] if key in unit.get("cuts", {}) else unit[key]
    return curve


def stacked(folds: Sequence[Sequence[Sequence[float | None]]]) -> Floats:
    """Return curves of unequal length as a table of folds × rounds, the mean over seeds."""
    length = max((len(run) for fold in folds for run in fold), default=0)
    table = np.full((len(folds), length), np.nan)
    for at, fold in enumerate(folds):
        runs = np.array([[*run, *[None] * (length - len(run))] for run in fold], np.float64)
        table[at] = runs.mean(axis=0)
    return table


def restlessness(curves: Floats) -> float:
    """Return the standard deviation of changes between the last rounds, ×100, mean over folds."""
    ends = [curve[np.isfinite(curve)][-LAST:] for curve in curves]
    known = [float(np.std(np.diff(end))) for end in ends if len(end) > 2]
    return 100 * float(np.mean(known)) if known else float("nan")


def all_cells(outcome: Outcome, data: str) -> Iterator[Cell]:
    """Yield the cells of every table and figure, in their order."""
    yield from _table_1_cells(outcome, data)
    yield from _figure_cells(outcome, data)
    yield from _growth_cells(outcome, data)
    yield from _attack_cells(outcome, data)
    yield from _overrun_cells(outcome, data)


def _table_1_cells(outcome: Outcome, data: str) -> Iterator[Cell]:
    tests = {(mode, measure): outcome.p_values(mode, measure) for mode in MODES for measure in MEASURES}
    for row in outcome.rows("1"):
        for measure in MEASURES:
            published = printed.TABLE_1.get((row.row, measure), (None, None))[0] if not row.variant else None
            cell = row.cell(measure, data, published)
            yield cell
            facts: dict[str, Any] = {"mode": row.mode, "data": data, "variant": row.variant, "n": row.n}
            gap = outcome.gap(cell.value, measure)
            if gap is not None:
                yield Cell("1", row.row, f"{measure} gap", gap, **facts)
            p = tests[row.mode, measure].get((row.row, row.variant))
            if p is not None:
                yield Cell("1", row.row, f"{measure} p against FedAvg", p, **facts)


def _figure_cells(outcome: Outcome, data: str) -> Iterator[Cell]:
    """Yield the final values of the figures' curves; the curves themselves are in the units."""
    for mode in MODES:
        for variant, run in figure_2(mode).items():
            for measure in ("nDCG@1", "nDCG@5", MAIN):
                key = "curve" if measure == MAIN else measure
                yield from _ends(outcome, run, key, ("fig2", BASELINE, measure, mode, data, variant))
        for row, run in figure_4(mode).items():
            for measure in ("nDCG@1", "nDCG@5", MAIN):
                key = "curve" if measure == MAIN else measure
                yield from _ends(outcome, run, key, ("fig4", row, measure, mode, data, ""))
        for run in figure_5(outcome.protocol, mode):
            yield from _ends(outcome, run, "curve", ("fig5", run.row, MAIN, mode, data, run.variant))
        if mode == "paper":
            for figure, runs in (
                ("fig4", figure_4(mode).values()),
                ("fig5", figure_5(outcome.protocol, mode)),
            ):
                for run in runs:
                    about = (figure, run.row, MAIN, mode, data, likeliest(run).variant)
                    yield from _ends(outcome, run, ARGMAX, about)
        for variant, run in figure_2(mode).items():
            counts = holdings(outcome, run)
            if counts is not None:
                share = float((counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)).mean())
                largest = float(counts.sum(axis=1).max() / counts.sum())
                facts: dict[str, Any] = {"mode": mode, "data": data, "variant": variant}
                yield Cell("fig3", "holdings", "share of a silo's most frequent grade", share, **facts)
                yield Cell("fig3", "holdings", "share of rows in the largest silo", largest, **facts)


def _ends(
    outcome: Outcome, run: RunName, key: str, facts: tuple[str, str, str, Mode, str, str]
) -> Iterator[Cell]:
    table, row, measure, mode, data, variant = facts
    curves = outcome.curves(run, key)
    if not curves.size:
        return
    about: dict[str, Any] = {"table": table, "row": row, "mode": mode, "data": data, "variant": variant}
    yield Cell.over_folds((100 * last(curves)).tolist(), measure=measure, **about)
    if key == "curve":
        yield Cell(measure=f"{measure} round sd", value=restlessness(curves), n=len(curves), **about)


def last(curves: Floats) -> Floats:
    """Return the last finite value of every curve."""
    return np.array(
        [curve[np.isfinite(curve)][-1] if np.isfinite(curve).any() else np.nan for curve in curves]
    )


def figure_2(mode: Mode) -> dict[str, RunName]:
    """Return FedAvg's runs with IID and non-IID silos, by variant."""
    return {"IID": RunName("fig2", mode, BASELINE, "IID"), "non-IID": RunName("1", mode, BASELINE)}


def figure_4(mode: Mode) -> dict[str, RunName]:
    """Return the runs of Figure 4, by row."""
    return {row: RunName("1", mode, row) for row in ("FedProx", "FedRisk")}


def figure_5(protocol: Protocol, mode: Mode) -> list[RunName]:
    """Return the runs of Figure 5."""
    return [run for run in plans(protocol) if (run.table, run.mode) == ("fig5", mode)]


def holdings(outcome: Outcome, run: RunName) -> NDArray[np.int64] | None:
    """Return the number of rows by silo and grade in the first fold."""
    unit = outcome.results.get(RunUnit(run, 0, outcome.seed))
    return None if unit is None else np.array(unit["holdings"], np.int64)


@dataclass(frozen=True)
class Growth:
    """The end of an ablation of alpha_mix = beta_mix = 1, the mean over folds."""

    row: str
    depth: str
    rounds: float
    """Number of rounds until the guard stopped it."""
    ndcg: float
    restless: float
    norm: float
    """log10 ‖θ‖ at the end."""
    turn: float
    """log10 (1 − cos) at the end."""
    peak: tuple[float, float]
    """Largest log10 (1 − cos) after the first three rounds, and its round."""
    stopped: str
    folds: int


def growths(outcome: Outcome) -> Iterator[Growth]:
    """Yield every ablation, by row and depth."""
    for row in outcome.rows("A3"):
        if row.variant not in DEPTHS:
            continue
        run = RunName("A3", "paper", row.row, row.variant)
        units = [unit for fold in outcome.units(run, 1) for unit in fold]
        norms = [[value for value in unit["norm"] if value is not None] for unit in units]
        turns = [[value for value in unit["turn"] if value is not None] for unit in units]
        yield Growth(
            row.row,
            row.variant,
            rounds=float(np.mean([len(norm) for norm in norms])),
            ndcg=row.mean(MAIN),
            restless=restlessness(outcome.curves(run)),
            norm=float(np.mean([_log(norm[-1]) for norm in norms])),
            turn=float(np.mean([_log(turn[-1]) for turn in turns])),
            peak=_peak(turns),
            stopped=next((unit["stopped"] for unit in units if unit["stopped"]), ""),
            folds=len(units),
        )


def _log(value: float) -> float:
    return float(np.log10(max(value, 1e-17)))


def _peak(turns: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return log10 of the largest turn after three rounds, and its round: the mean over runs."""
    later = [np.array(turn[3:] or turn) for turn in turns]
    first = [min(3, len(turn) - len(rest)) + 1 for turn, rest in zip(turns, later, strict=True)]
    places = [float(rest.argmax()) + at for rest, at in zip(later, first, strict=True)]
    return float(np.mean([_log(float(rest.max())) for rest in later])), float(np.mean(places))


def _growth_cells(outcome: Outcome, data: str) -> Iterator[Cell]:
    for row in outcome.rows("A3"):
        yield row.cell(MAIN, data)
    for growth in growths(outcome):
        values = {
            f"{MAIN} round sd": growth.restless,
            "rounds": growth.rounds,
            "log10 norm": growth.norm,
            "log10 (1 - cosine)": growth.turn,
        }
        for measure, value in values.items():
            yield Cell("A3", growth.row, measure, value, "paper", data, variant=growth.depth, n=growth.folds)


def _attack_cells(outcome: Outcome, data: str) -> Iterator[Cell]:
    honest = outcome.row("attack", "sound", HONEST)
    for row in outcome.rows("attack"):
        facts: dict[str, Any] = {"mode": row.mode, "data": data, "n": row.n}
        for measure in MEASURES:
            yield row.cell(measure, data)
        yield Cell("attack", row.row, f"{MAIN} worst run", row.worst(MAIN), **facts)
        gap = outcome.gap(row.mean(MAIN), MAIN)
        if gap is not None:
            yield Cell("attack", row.row, f"{MAIN} gap", gap, **facts)
        if honest is not None:
            share = row.mean(MAIN) / honest.mean(MAIN)
            yield Cell("attack", row.row, f"{MAIN} of honest-only FedAvg", share, **facts)
        weight = bad_weight(outcome, row)
        if weight is not None:
            yield Cell("attack", row.row, "weight of bad silos", weight, **facts)


def bad_weight(outcome: Outcome, row: Row) -> float | None:
    """Return the mean share of weight of silos with inverted grades."""
    units = outcome.units(RunName("attack", "sound", row.row), outcome.protocol.seeds)
    weights = [unit["bad weight"] for fold in units for unit in fold if "bad weight" in unit]
    return float(np.mean(weights)) if weights else None


@dataclass(frozen=True)
class Overrun:
    """Effect of bad rounds on a row: curves of folds × rounds, of which the first `good` were good."""

    good: int
    curves: Floats
    """Curves of the global model."""
    released: Floats
    """Curves of the average over rounds, which is the model that is saved."""
    memory: float
    """Weight of the previous model in the bad rounds."""

    def at(self, place: int, *, released: bool = False) -> Floats:
        """Return every fold's measure, ×100, after `place` bad rounds that follow the good ones."""
        curves = self.released if released else self.curves
        return 100 * curves[:, self.good - 1 + place]

    @property
    def bad(self) -> int:
        """Number of bad rounds."""
        return int(self.curves.shape[1]) - self.good


def overruns(outcome: Outcome) -> dict[str, Overrun]:
    """Return every row that went through bad rounds."""
    by_row = {}
    for row in all_bad(outcome.protocol):
        folds = outcome.units(overrun_name(row), 1)
        units = [unit for fold in folds for unit in fold]
        if units:
            curves, released = (stacked([[unit[key]] for unit in units]) for key in ("curve", "released"))
            memory = float(np.mean([unit["memory weight"] for unit in units]))
            by_row[row] = Overrun(units[0]["good rounds"], curves, released, memory)
    return by_row


def _overrun_cells(outcome: Outcome, data: str) -> Iterator[Cell]:
    for row, overrun in overruns(outcome).items():
        curves = {
            "before": overrun.at(0),
            "after one bad round": overrun.at(1),
            f"after {overrun.bad} bad rounds": overrun.at(overrun.bad),
            f"released after {overrun.bad} bad rounds": overrun.at(overrun.bad, released=True),
        }
        about: dict[str, Any] = {"table": "overrun", "row": row, "mode": "sound", "data": data}
        for measure, values in curves.items():
            yield Cell.over_folds(values.tolist(), measure=f"{MAIN} {measure}", **about)
        yield Cell(measure="weight of the memory", value=overrun.memory, n=len(overrun.curves), **about)
