"""Tables and plots of cross-silo results: Table 4 by kind of counts, curves, points and the map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from isthmus.federation.semisupervised import ANCHORED
from isthmus.report import Estimate, Plot, Series, Table, line_plot
from isthmus_reproduce.intervals import LEAST_FOLDS, fold_interval
from isthmus_reproduce.notebook import Cell
from isthmus_reproduce.prose import Prose

PROSE = Prose("csfltr.j2")
SHOWN = {"exact": "exact counts", "private": "private counts", "clipped": "private counts, clipped"}
BY_INTEREST = ("nDCG@10", "ERR", "nDCG", "MAP")
CONTROLS = ("BM25", "averaged labeller", "all-zero", "noise-aware Global", ANCHORED, "oracle", "default")
"""Control rows, which are needed to interpret the paper's."""
WAYS = ("Local", "Local+", "Global", "CS-F-LTR")
POINTS = ("BM25", "Local", "Global", ANCHORED, "noise-aware Global", "CS-F-LTR", "all-zero")
"""Rows in figures and on the map."""


Records = Sequence[Mapping[str, Any]]
"""Records of every ranker, as `measured` returns them."""


class Place(NamedTuple):
    """A setting on the map: how silos are dealt, and ε."""

    deal: str
    epsilon: float


@dataclass(frozen=True)
class Results:
    """Results of one collection's units: seeds of the table, of the paper's protocol, of curves and of the
    rough setting; points by ε, by the number of silos, and by their setting on the map."""

    table: Sequence[Any]
    printed: Sequence[Any] = ()
    curve: Sequence[Any] = ()
    rough: Sequence[Any] = ()
    budget: Mapping[float, Sequence[Any]] = field(default_factory=dict)
    silos: Mapping[int, Sequence[Any]] = field(default_factory=dict)
    places: Mapping[Place, Sequence[Any]] = field(default_factory=dict)


def at_labels(units: Sequence[Any], labels: int | None = None) -> list[Records]:
    """Return every seed's records of a point with this number of labelled queries a silo, or with all."""
    return [point["rows"] for unit in units for point in unit["points"] if point["labels"] == labels]


def rows_named(records: Records, row: str) -> list[Mapping[str, Any]]:
    """Return the records of a row: one, or one per silo if every silo has a model."""
    return [record for record in records if record["row"] == row]


def mean_of(records: Records, row: str, measure: str = "nDCG@10") -> float:
    """Return a row's test value; the mean over silos if the row has one model per silo."""
    return float(np.mean([record["test"][measure] for record in rows_named(records, row)]))


def side_by_side(cells: Sequence[Cell], measure: str, name: str) -> Table:
    """Build a table of one measure of Table 4: printed values, and a column per kind of counts."""
    here = [cell for cell in cells if cell.table == "4" and cell.measure == measure]
    by_place = {(cell.row, cell.part, cell.variant): cell for cell in here}
    lines = sorted(
        {(cell.row, cell.part) for cell in here if cell.row in (*WAYS, *CONTROLS)},
        key=lambda line: ((*WAYS, *CONTROLS).index(line[0]), line[1] == "all", line[1]),
    )
    rows = []
    for row, part in lines:
        mine = [by_place.get((row, part, variant)) for variant in SHOWN.values()]
        printed = next((cell.paper for cell in mine if cell is not None and cell.paper is not None), None)
        label = "mean of silos" if part == "all" and row in ("Local", "Local+") else part
        rows.append((row, label, printed, *(_estimate(cell) for cell in mine)))
    return Table(("row", "part", "printed", *SHOWN), tuple(rows), f"{measure}, {name}", (), 3)


def _estimate(cell: Cell | None) -> Estimate | None:
    return None if cell is None else Estimate(cell.value, cell.low, cell.high)


def options(cells: Sequence[Cell], name: str) -> Table:
    """Tabulate every row of private counts, on validation (by which a default is chosen) and on test."""
    chosen = {cell.row: cell for cell in cells if cell.table == "validation"}
    tested = {
        cell.row: cell
        for cell in cells
        if cell.table == "4"
        and (cell.part, cell.variant, cell.measure) == ("all", SHOWN["private"], "nDCG@10")
    }
    rows = [(row, tested[row].n, _estimate(chosen[row]), _estimate(tested[row])) for row in chosen]
    notes = (PROSE("note_unequal"),) if len({row[1] for row in rows}) > 1 else ()
    return Table(("row", "seeds", "validation", "test"), tuple(rows), f"nDCG@10, {name}", notes, 3)


def curves(units: Sequence[Any], name: str) -> Iterator[Plot]:
    """Yield a plot for every silo, with a band over seeds."""
    for at in range(min(len(unit["silos"]) for unit in units)):
        lines = {}
        for way in WAYS:
            values = np.array([unit[way][at] for unit in units], dtype=np.float64)
            mean, spread = np.nanmean(values, axis=0), np.nanstd(values, axis=0) / max(1, len(units)) ** 0.5
            band = (mean - 2 * spread, mean + 2 * spread) if len(units) >= LEAST_FOLDS else ()
            lines[way] = Series(units[0]["epochs"], mean, *band)
        bands = len(units) >= LEAST_FOLDS
        caption = PROSE("curve_caption", name=name, silo=at + 1, seeds=len(units), bands=bands)
        yield line_plot(lines, x="epochs", y="nDCG@10", caption=caption)


BANDS = (ANCHORED, "CS-F-LTR", "Local")
"""Rows whose intervals are drawn; all are in the table below."""


def points(cells: Sequence[Cell], x: str) -> Plot:
    """Plot nDCG@10 over the varied parameter; ε on a logarithmic scale, ∞ one step beyond the largest."""
    lines: dict[str, list[tuple[float, Cell]]] = {}
    for cell in cells:
        if cell.measure == "nDCG@10":
            lines.setdefault(cell.row, []).append((_place(cell.variant), cell))
    drawn = {}
    for row, known in lines.items():
        ordered = sorted(known, key=lambda point: point[0])
        at, values = [place for place, _ in ordered], [cell.value for _, cell in ordered]
        low = [cell.value if cell.low is None else cell.low for _, cell in ordered]
        high = [cell.value if cell.high is None else cell.high for _, cell in ordered]
        drawn[row] = Series(at, values, low, high) if row in BANDS else Series(at, values)
    banded = any(cell.low is not None for cell in cells)
    caption = f"95 % intervals over seeds for {', '.join(BANDS)}" if banded else "means over seeds"
    caption += "; log₂ ε, the last point is without noise" if x == "ε" else ""
    return line_plot(drawn, x="log₂ ε" if x == "ε" else x, y="nDCG@10", caption=caption)


def _place(variant: str) -> float:
    if variant.startswith("ε = "):
        epsilon = variant.removeprefix("ε = ")
        return 5.0 if epsilon == "inf" else float(np.log2(float(epsilon)))
    return float(variant.removesuffix(" silos"))


def costs(by_silos: Mapping[int, Sequence[Any]]) -> Iterator[str]:
    """Report whether the cost of more silos grows faster than the number of their pairs."""
    spent = {count: float(np.mean([unit["seconds"] for unit in units])) for count, units in by_silos.items()}
    several = sorted(count for count in spent if count > 1)
    if len(several) < 2:
        return
    few, many = several[0], several[-1]
    pairs = many * (many - 1) / (few * (few - 1))
    times = spent[many] / spent[few]
    yield PROSE("costs", few=few, many=many, pairs=pairs, times=times, before=spent[few], after=spent[many])


def gain_map(places: Mapping[Place, Sequence[Any]], name: str) -> Iterator[str | Table]:
    """Yield a table of every setting with its rows and the best one; then the worth of each step."""
    rows: list[tuple[str | float, ...]] = []
    for place, units in places.items():
        for labels in labels_of(units):
            seeds = at_labels(units, labels)
            means = {row: float(np.mean([mean_of(records, row) for records in seeds])) for row in POINTS}
            best = max(POINTS, key=means.__getitem__)
            place_names = (place.deal, f"{place.epsilon:g}", said_labels(labels))
            rows.append((*place_names, *(means[row] for row in POINTS), best))
    header = ("deal", "ε", "labelled queries a silo", *POINTS, "best")
    yield Table(header, tuple(rows), f"nDCG@10 across the map, {name}", (), 3)
    leads = [row[-1] for row in rows]
    counted = {row: leads.count(row) for row in POINTS if row in leads}
    yield PROSE("leaders", places=len(rows), leads=counted)
    yield _steps(places, name)


def labels_of(units: Sequence[Any]) -> list[int | None]:
    """Return the numbers of labelled queries per silo with which a setting was measured."""
    return [point["labels"] for point in units[0]["points"]]


def said_labels(labels: int | None) -> str:
    """Return the number for a table, "all" for None."""
    return "all" if labels is None else str(labels)


STEPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "pooling labels (Global − Local)": ("Global", ("Local",)),
    "noise-aware − Global": ("noise-aware Global", ("Global",)),
    "pseudo-labels (CS-F-LTR − best control)": ("CS-F-LTR", ("Global", "all-zero", "noise-aware Global")),
    "anchored − Global": (ANCHORED, ("Global",)),
    "training (anchored − BM25)": (ANCHORED, ("BM25",)),
}
"""Steps whose worth is measured: a row, and the rows of which the better one is subtracted."""


def _steps(places: Mapping[Place, Sequence[Any]], name: str) -> Table:
    """Build a table of the worth of every step along every side of the map, averaged over all else."""
    spots = [
        (place.deal, f"{place.epsilon:g}", said_labels(labels), at_labels(units, labels))
        for place, units in places.items()
        for labels in labels_of(units)
    ]
    rows: list[tuple[str | Estimate, ...]] = []
    for at, side in enumerate(("deal", "ε", "labelled queries a silo")):
        for level in dict.fromkeys(spot[at] for spot in spots):
            some = [spot[3] for spot in spots if spot[at] == level]
            worth = [_worth(some, *step) for step in STEPS.values()]
            rows.append((side, str(level), *worth))
    title = f"What pays where, nDCG@10, {name}; intervals over places and seeds"
    return Table(("side", "level", *STEPS), tuple(rows), title, (), 3)


def _worth(spots: Sequence[Sequence[Records]], row: str, others: tuple[str, ...]) -> Estimate:
    """Return the mean lead of a row over the best of the others, with an interval over settings and seeds."""
    leads: list[float] = []
    for seeds in spots:
        mine, *rivals = ([mean_of(records, name) for records in seeds] for name in (row, *others))
        best = max(rivals, key=lambda values: float(np.mean(values)))
        leads += [one - other for one, other in zip(mine, best, strict=True)]
    if len(leads) < 2:
        return Estimate(leads[0], None, None)
    interval = fold_interval(leads)
    return Estimate(interval.value, interval.low, interval.high)
