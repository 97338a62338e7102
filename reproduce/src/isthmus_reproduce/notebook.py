"""Shared by all reproductions: cells with the paper's value beside ours, and work that resumes.

A reproduction is a set of independent units (a fold of a data set, a seed of a strategy). A unit's key is a
record with named fields. Its result is JSON, saved in the run's folder as soon as it is computed, so a run
that was killed repeats at most the units in progress. The folder's configuration records what the results
belong to.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, astuple, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.config import to_toml
from isthmus.errors import ConfigError, MissingExtra
from isthmus.evaluation import bootstrap, write_per_query
from isthmus.report import Estimate, Page, Plot, Progress, Table
from isthmus.tables import cache_folder, replacing
from isthmus.workers import hired
from isthmus_reproduce.intervals import LEAST_FOLDS, fold_interval

_KINDS = {"printed": "printed", "paper": "paper mode", "sound": "sound"}
_WIDE = 9

ORDER = ["table", "row", "part", "variant", "mode", "data", "measure", "value", "low", "high", "n", "paper"]
"""Order of a cell's fields in JSON."""
PACKAGES = ("isthmus", "numpy", "scipy", "scikit-learn", "flwr")

Key = Any
"""The key that identifies a unit: a frozen dataclass of an experiment."""


class Unit(NamedTuple):
    """A unit's key, whose fields name its file, and the arguments of the function that computes it."""

    key: Key
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one table: `paper` is the printed value, `n` the seeds × folds behind the computed one.

    `row` is a method's name or "default", `part` all, head, tail or a silo, `variant` whatever else
    distinguishes the cell.
    """

    table: str
    row: str
    measure: str
    value: float
    mode: Literal["paper", "sound"]
    data: str
    part: str = "all"
    variant: str = ""
    low: float | None = None
    high: float | None = None
    n: int = 1
    paper: float | None = None

    @classmethod
    def over_folds(cls, values: Sequence[float], **facts: Any) -> Cell:
        """Build a cell of the mean over folds or seeds, with its 95 % t interval if there are enough."""
        known = np.asarray([value for value in values if value is not None and np.isfinite(value)])
        if len(known) < LEAST_FOLDS:
            return cls(value=float(known.mean()) if len(known) else float("nan"), n=len(known), **facts)
        interval = fold_interval(known)
        return cls(value=interval.value, low=interval.low, high=interval.high, n=len(known), **facts)

    @classmethod
    def over_queries(cls, values: FloatArray, **facts: Any) -> Cell:
        """Build a cell of the mean over queries, with its bootstrap interval."""
        interval = bootstrap(values)
        return cls(value=interval.value, low=interval.low, high=interval.high, n=interval.n, **facts)

    def record(self) -> dict[str, Any]:
        """Return the cell's fields for JSON; a missing figure is null."""
        fields_of_cell = asdict(self)
        plain = {name: fields_of_cell[name] for name in ORDER}
        return {name: None if _is_nan(value) else value for name, value in plain.items()}


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and not np.isfinite(value)


@dataclass(frozen=True)
class Reproduction:
    """All results of a run, and the files that were written."""

    cells: tuple[Cell, ...]
    page: Page
    wrote: tuple[Path, ...]


class Notebook:
    """A reproduction's folder: config.toml, environment.json, results/KEY.json, cells.json, report.html."""

    def __init__(self, folder: str | os.PathLike[str], config: Any) -> None:
        self.folder = Path(folder)
        self._kind = f"{type(config).__module__.split('.')[-2]}-{getattr(config, 'scale', 'full')}"
        (self.folder / "results").mkdir(parents=True, exist_ok=True)
        for left in (*self.folder.glob(".*.part"), *(self.folder / "results").glob(".*.part")):
            left.unlink(missing_ok=True)  # left by a run that was killed while writing
        self._claim(config)
        self._announced: set[str] = set()

    def _claim(self, config: Any) -> None:
        text, file = to_toml(config), self.folder / "config.toml"
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{self.folder} holds a run with another configuration",
                expected="another --out, or an empty one",
            )
        self.write("config.toml", text)
        packages = {package: version(package) for package in PACKAGES}
        self.write(
            "environment.json", json.dumps({"python": platform.python_version(), **packages}, indent=1)
        )

    def write(self, name: str, text: str) -> Path:
        """Write a file of the run atomically."""
        with replacing(self.folder / name) as stream:
            stream.write(text.encode())
        return self.folder / name

    def compute(
        self, work: Callable[..., Any], units: Sequence[Unit], *, label: str, workers: int | None = None
    ) -> dict[Key, Any]:
        """Return every unit's result by key, computing `work(**arguments)` for those that are not saved yet.

        `work` is a module-level function, so that it can run in another process; its result is JSON.
        """
        if label not in self._announced:
            self.announce([(label, work, units)], workers)
        results = self.saved(units)
        missing = [unit for unit in units if unit.key not in results]
        began, processes = time.perf_counter(), min(workers or os.cpu_count() or 1, max(len(missing), 1))
        done = 0
        try:
            with Progress(label, len(units), done=len(results), lines=True) as bar:
                for key, result in _each(work, missing, workers or os.cpu_count() or 1):
                    self.write(_file(key), json.dumps(result))
                    results[key] = result
                    done += 1
                    bar.advance(note=_name(key))
        finally:  # lets the next run estimate the time left
            if done:
                self._remember(label, (time.perf_counter() - began) * processes / done)
        return {unit.key: results[unit.key] for unit in units}

    def saved(self, units: Sequence[Unit]) -> dict[Key, Any]:
        """Return the results that the folder has, by key."""
        return {unit.key: saved for unit in units if (saved := self._saved(unit.key)) is not None}

    def _saved(self, key: Key) -> Any:
        try:
            return json.loads((self.folder / _file(key)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def publish(
        self,
        cells: Iterable[Cell],
        page: Page,
        *,
        rows: Iterable[Mapping[str, Any]] = (),
        values: str | os.PathLike[str] | None = None,
    ) -> Reproduction:
        """Write all cells and the report (HTML and Markdown), and to `values` the rows of every query."""
        every = tuple(cells)
        wrote = (
            page.save(self.folder / "report.html"),
            self.write("report.md", page.markdown(self._picture)),
            self.write("cells.json", json.dumps([cell.record() for cell in every], indent=1)),
            *(() if values is None else (write_per_query(rows, values),)),
        )
        return Reproduction(every, page, wrote)

    def _picture(self, plot: Plot) -> str | None:
        """Write a plot to a file named by its caption. Returns its name, or None if it cannot be drawn."""
        name = "figures/" + re.sub(r"[^a-z0-9]+", "-", plot.caption.lower()).strip("-")[:80] + ".svg"
        (self.folder / "figures").mkdir(exist_ok=True)
        try:
            self.write(name, plot.svg())
        except MissingExtra:
            return None
        return name

    def announce(self, work: Sequence[tuple[str, Any, Sequence[Unit]]], workers: int | None) -> None:
        """Print before the work what the folder has, what is missing, and about how long that takes.

        The estimate uses times of units of the same kind, in this folder or in others on this machine.
        """
        self._announced.update(label for label, _, _ in work)
        times = self._times()
        seconds, unknown = 0.0, 0
        kept, total = 0, 0
        for label, _, units in work:
            missing = len(units) - len(self.saved(units))
            kept, total = kept + len(units) - missing, total + len(units)
            seconds += missing * times.get(label, 0.0)
            unknown += missing if label not in times else 0
        minutes = seconds / 60 / (workers or os.cpu_count() or 1)
        about = f"about {minutes:.0f} minutes for the rest" if minutes >= 1 else "under a minute for the rest"
        if unknown:
            known = total - kept - unknown
            about = f"{about.removesuffix('the rest')}{known} of the others, and " if known else ""
            about += f"this machine has not timed {unknown} yet: progress says how long once a few are done"
        time_left = "nothing left to compute" if kept == total else about
        print(f"{self.folder}: {kept} of {total} units are there; {time_left}", file=sys.stderr, flush=True)

    def _times(self) -> dict[str, float]:
        try:
            times: dict[str, float] = json.loads(self._clock.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return times

    @property
    def _clock(self) -> Path:
        """File of seconds per unit by kind, at this scale, kept from one run to the next."""
        return cache_folder() / f"reproduce-{self._kind}.json"

    def _remember(self, label: str, seconds: float) -> None:
        self._clock.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._clock) as stream:
            stream.write(json.dumps({**self._times(), label: round(seconds, 1)}).encode())


def _name(key: Key) -> str:
    """Join the fields of a key, and of nested keys, that are not empty."""
    return _joined(astuple(key))


def _joined(values: Iterable[Any]) -> str:
    parts = (_joined(value) if isinstance(value, tuple) else value for value in values)
    return " ".join(
        f"{one:g}" if isinstance(one, float) else str(one) for one in parts if one not in ("", None)
    )


def _file(key: Key) -> str:
    return f"results/{re.sub(r'[^A-Za-z0-9.+-]+', '_', _name(key))}.json"


def _each(work: Callable[..., Any], units: Sequence[Unit], workers: int) -> Iterable[tuple[Key, Any]]:
    """Yield results as they are computed; with one worker in this process, which allows a debugger."""
    if workers == 1 or len(units) < 2:
        yield from ((unit.key, work(**unit.arguments)) for unit in units)
        return
    with hired(workers) as pool:
        running: dict[Future[Any], Key] = {}
        waiting = list(reversed(units))
        try:
            while running or waiting:
                while waiting and len(running) < workers:
                    unit = waiting.pop()
                    running[pool.submit(work, **unit.arguments)] = unit.key
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def columns_of(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the measures of the cells in order of first appearance."""
    return tuple(dict.fromkeys(cell.measure for cell in cells))


def cells_table(cells: Sequence[Cell], title: str, *, digits: int = 3) -> Table:
    """Build a table: a line per row, part and variant; per measure printed, paper-mode and sound values.

    Empty columns are left out. With many measures the three values stand below each other instead.
    """
    lines = dict.fromkeys((cell.row, cell.part, cell.variant) for cell in cells)
    by_place = {(cell.row, cell.part, cell.variant, cell.measure, cell.mode): cell for cell in cells}
    published = {
        (cell.row, cell.part, cell.variant, cell.measure): cell.paper
        for cell in cells
        if cell.paper is not None
    }
    measures = columns_of(cells)
    displayed = {
        (line, measure, kind): entry
        for line, measure, kind in product(lines, measures, _KINDS)
        if (entry := _displayed(by_place, published, line, measure, kind)) is not None
    }
    kinds = [
        (measure, kind)
        for measure, kind in product(measures, _KINDS)
        if any((line, measure, kind) in displayed for line in lines)
    ]
    names = [at for at in range(3) if at == 0 or any(line[at] for line in lines)]
    header = tuple(("row", "part", "variant")[at] for at in names)
    if len(kinds) <= _WIDE or len(kinds) == len(measures):
        header += tuple(f"{measure} {_KINDS[kind]}" for measure, kind in kinds)
        rows = [
            (*(line[at] for at in names), *(displayed.get((line, *column)) for column in kinds))
            for line in lines
        ]
    else:
        header += ("figures", *measures)
        rows = [
            (
                *(line[at] for at in names),
                _KINDS[kind],
                *(displayed.get((line, each, kind)) for each in measures),
            )
            for line, kind in product(lines, _KINDS)
            if any((line, each, kind) in displayed for each in measures)
        ]
    return Table(header, tuple(rows), title, (), digits)


def listed(cells: Iterable[Cell], title: str, *names: str) -> Table:
    """Build a table with a line per cell: the named fields, its measure, and the value with its interval."""
    header = (*names, "measure", "value", "low", "high", "n")
    return Table(header, tuple(tuple(getattr(cell, name) for name in header) for cell in cells), title)


def _displayed(
    by_place: Mapping[Any, Cell],
    published: Mapping[Any, float | None],
    line: tuple[str, ...],
    measure: str,
    kind: str,
) -> Estimate | float | None:
    if kind == "printed":
        return published.get((*line, measure))
    cell = by_place.get((*line, measure, kind))
    return None if cell is None or np.isnan(cell.value) else Estimate(cell.value, cell.low, cell.high)
