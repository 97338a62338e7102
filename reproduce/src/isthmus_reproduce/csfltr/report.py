"""Report of cross-silo results: cells, tests over seeds and over queries, figures, and conclusions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.evaluation import paired_t, randomisation
from isthmus.federation.semisupervised import DEFAULT as DEFAULT_ROW
from isthmus.federation.semisupervised import FAULTS
from isthmus.report import Page, Plot, Section, Table
from isthmus_reproduce.csfltr.plots import (
    BY_INTEREST,
    POINTS,
    SHOWN,
    WAYS,
    Results,
    at_labels,
    costs,
    curves,
    gain_map,
    labels_of,
    mean_of,
    options,
    points,
    rows_named,
    said_labels,
    side_by_side,
)
from isthmus_reproduce.csfltr.world import MEASURES
from isthmus_reproduce.intervals import LEAST_FOLDS
from isthmus_reproduce.notebook import Cell, cells_table
from isthmus_reproduce.prose import Prose

PROSE = Prose("csfltr.j2")
PARTIES = ("A", "B", "C", "D")

PRINTED: Mapping[tuple[str, str], tuple[float, float, float, float]] = MappingProxyType(
    {
        ("Local", "A"): (0.5672, 0.7274, 0.8049, 0.4809),
        ("Local", "B"): (0.5357, 0.6676, 0.7779, 0.4573),
        ("Local", "C"): (0.5637, 0.7094, 0.7952, 0.4788),
        ("Local", "D"): (0.5887, 0.7466, 0.8173, 0.5055),
        ("Local+", "A"): (0.5628, 0.7257, 0.8026, 0.4776),
        ("Local+", "B"): (0.5448, 0.7064, 0.7932, 0.4779),
        ("Local+", "C"): (0.5766, 0.7314, 0.8091, 0.4936),
        ("Local+", "D"): (0.5988, 0.7475, 0.8247, 0.5039),
        ("Global", "all"): (0.5877, 0.7577, 0.8247, 0.5040),
        ("CS-F-LTR", "all"): (0.6679, 0.8358, 0.8760, 0.5525),
    }
)
"""Table 4 as printed: ERR, nDCG@10, nDCG, MAP, on data that are not public."""

Key = tuple[str, str]
"""(variant of the counts, row)."""


@dataclass(frozen=True)
class Contrast:
    """Comparison of two rows: the mean difference in nDCG@10, and p over seeds and over queries."""

    first: Key
    second: Key
    difference: float
    over_seeds: float
    over_queries: float

    @property
    def clear(self) -> bool:
        """Whether both tests are significant at 5 %."""
        return max(self.over_seeds, self.over_queries) < 0.05

    def __str__(self) -> str:
        tests = f"p = {self.over_seeds:.2g} over seeds, {self.over_queries:.2g} over queries"
        return f"{self.difference:+.3f} ({tests})"


def seed_means(units: Sequence[Any], key: Key, measure: str = "nDCG@10") -> FloatArray:
    """Return a row's test value for every seed that has the row."""
    have = [unit[key[0]] for unit in units if rows_named(unit[key[0]], key[1])]
    return np.array([mean_of(rows, key[1], measure) for rows in have])


def query_means(units: Sequence[Any], key: Key) -> dict[str, float]:
    """Return a row's nDCG@10 of every query, averaged over the seeds that test on it."""
    seen: dict[str, list[float]] = {}
    for unit in units:
        for record in rows_named(unit[key[0]], key[1]):
            for query, value in record["queries"].items():
                seen.setdefault(query, []).append(value)
    return {query: float(np.mean(values)) for query, values in seen.items()}


def contrast(units: Sequence[Any], first: Key, second: Key) -> Contrast:
    """Compare two rows by paired tests, on the seeds that have both."""
    units = [unit for unit in units if all(rows_named(unit[at], row) for at, row in (first, second))]
    one, other = seed_means(units, first), seed_means(units, second)
    mine, theirs = query_means(units, first), query_means(units, second)
    shared = sorted(mine.keys() & theirs.keys())
    seeds = paired_t(one, other).p if len(units) > 1 else float("nan")
    queries = randomisation([mine[q] for q in shared], [theirs[q] for q in shared]).p
    return Contrast(first, second, float((one - other).mean()), seeds, queries)


DEFAULT: Key = ("private", DEFAULT_ROW)
NAIVE: Key = ("clipped", "Global")
OURS = ("calibrated soft", "noise-aware, calibrated soft", "anchored labeller")
"""Labellers that are not the paper's."""
CONTROLLED = {
    "exact": ("Global", "all-zero"),
    "private": ("Global", "all-zero", "noise-aware Global"),
    "clipped": ("Global", "all-zero", "noise-aware Global"),
}
"""Controls that a labeller must beat to be worth something, by the counts it is used on."""
CONTRASTS: tuple[tuple[Key, Key], ...] = (
    (("exact", "Global"), ("exact", "Local")),
    (("exact", "CS-F-LTR"), ("exact", "Local")),
    (NAIVE, ("exact", "Global")),
    (DEFAULT, NAIVE),
    (DEFAULT, ("private", "Global")),
    (DEFAULT, ("private", "BM25")),
    (("private", "Global"), NAIVE),
    (("private", "noise-aware Global"), ("private", "Global")),
    (DEFAULT, ("private", "noise-aware Global")),
    (DEFAULT, ("private", "anchored noise-aware Global")),
    (("clipped", "noise-aware Global"), NAIVE),
    (("clipped", "all-zero"), NAIVE),
    *(((at, "CS-F-LTR"), (at, row)) for at, rows in CONTROLLED.items() for row in rows),
    *((("private", row), ("private", other)) for row in OURS for other in ("all-zero", "noise-aware Global")),
    (("exact", "oracle"), ("exact", "Global")),
    (("private", "oracle"), ("private", "noise-aware Global")),
    (("private", "oracle"), DEFAULT),
)
"""Pairs of rows that are compared."""


def contrasts(units: Sequence[Any]) -> dict[tuple[Key, Key], Contrast]:
    """Return all comparisons of a collection."""
    return {pair: contrast(units, *pair) for pair in CONTRASTS}


def cells_of(name: str, results: Results) -> Iterator[Cell]:
    """Yield every result of one collection."""
    units = results.table
    for variant, display in SHOWN.items():
        for record in units[0][variant]:
            row, part = record["row"], record["part"]
            yield from _table_cells(name, units, (variant, row), part, display)
        for row in ("Local", "Local+") if variant != "clipped" else ():
            yield from _table_cells(name, units, (variant, row), "all", display)
    for variant, row in (("private", DEFAULT_ROW), ("exact", DEFAULT_ROW)):
        for measure in MEASURES:
            values = seed_means(units, (variant, row), measure)
            about = {"table": "4", "row": "default", "variant": SHOWN[variant], "mode": "sound", "data": name}
            yield Cell.over_folds(values.tolist(), measure=measure, **about)
    for row in dict.fromkeys(record["row"] for record in units[0]["private"]):
        validated = [record["validation"] for unit in units for record in rows_named(unit["private"], row)]
        about = {
            "table": "validation",
            "row": row,
            "variant": SHOWN["private"],
            "mode": "sound",
            "data": name,
        }
        yield Cell.over_folds(validated, measure="nDCG@10", **about)
    yield from printed_cells(name, results.printed)
    yield from _figure_cells(name, results)


def _table_cells(name: str, units: Sequence[Any], key: Key, part: str, display: str) -> Iterator[Cell]:
    variant, row = key
    for at, measure in enumerate(MEASURES):
        if part == "all":
            values = seed_means(units, key, measure).tolist()
        else:
            records = (record for unit in units for record in rows_named(unit[variant], row))
            values = [record["test"][measure] for record in records if record["part"] == part]
        about = {"row": row, "part": part, "variant": display, "mode": "sound", "measure": measure}
        yield Cell.over_folds(values, table="4", data=name, paper=_published(row, part, at), **about)


def _published(row: str, part: str, at: int) -> float | None:
    """Return a printed value of Table 4, by its column; our first four silos are its parties."""
    silo = int(part[4:]) if part.startswith("silo") else 0
    published = PRINTED.get((row, PARTIES[silo - 1] if 0 < silo <= len(PARTIES) else part))
    return None if published is None else published[at]


AS_PRINTED = {"ERR": "err_printed", "nDCG@10": "ndcg_printed@10", "nDCG": "nDCG", "MAP": "map_printed"}
AS_THEY_ARE = {measure: measure for measure in MEASURES}
PROTOCOL = {"measures as printed": AS_PRINTED, "the usual measures": AS_THEY_ARE}
"""Columns of the paper's protocol, by variant."""


def printed_cells(name: str, units: Sequence[Any]) -> Iterator[Cell]:
    """Yield Table 4 by the paper's own protocol: a row per silo if every silo has a model, and their mean."""
    every = [(record["row"], record["part"]) for record in units[0]] if units else []
    for row, part in dict.fromkeys((*every, *((row, "all") for row, _ in every))):
        for variant, measures in PROTOCOL.items():
            for at, (measure, measured) in enumerate(measures.items()):
                by_seed = [_printed_values(unit, row, part, measured) for unit in units]
                published = _published(row, part, at) if variant == "measures as printed" else None
                values = [float(np.mean(one)) for one in by_seed]
                about = {"row": row, "part": part, "variant": variant, "mode": "paper", "measure": measure}
                yield Cell.over_folds(values, table="4", data=name, paper=published, **about)


def _printed_values(records: Sequence[Any], row: str, part: str, measure: str) -> list[float]:
    """Return a row's values on one seed: of one silo, or of all that have one."""
    return [one["test"][measure] for one in rows_named(records, row) if part in ("all", one["part"])]


def _figure_cells(name: str, results: Results) -> Iterator[Cell]:
    points = [("fig8a", f"ε = {epsilon:g}", units) for epsilon, units in results.budget.items()]
    points += [("fig8b", f"{count} silos", units) for count, units in results.silos.items()]
    for table, variant, units in points:
        for row in POINTS:
            for measure in MEASURES:
                values = [mean_of(records, row, measure) for records in at_labels(units)]
                about = {"table": table, "row": row, "variant": variant, "mode": "sound"}
                yield Cell.over_folds(values, measure=measure, data=name, **about)
    yield from _curve_cells(name, results.curve)
    for row in POINTS if results.rough else ():
        values = [mean_of(records, row) for records in at_labels(results.rough)]
        about = {"table": "rough", "row": row, "variant": "dealt at random, ε = 2", "mode": "sound"}
        yield Cell.over_folds(values, measure="nDCG@10", data=name, **about)
    for count, units in results.silos.items():
        about = {"table": "fig8b", "row": "cost", "variant": f"{count} silos", "mode": "sound", "data": name}
        yield Cell.over_folds([unit["seconds"] for unit in units], measure="processor seconds", **about)
    for place, units in results.places.items():
        for labels in labels_of(units):
            for row in POINTS:
                values = [mean_of(records, row) for records in at_labels(units, labels)]
                about = {"table": "map", "row": row, "mode": "sound", "data": name}
                variant = f"{place.deal} {place.epsilon:g}, {said_labels(labels)} labelled queries a silo"
                yield Cell.over_folds(values, measure="nDCG@10", variant=variant, **about)


def _curve_cells(name: str, units: Sequence[Any]) -> Iterator[Cell]:
    """Yield Figure 6: every way, silo and epoch. Seeds deal differently, so silos are matched by position."""
    for way in ("Local", "Local+", "Global", "CS-F-LTR") if units else ():
        for silo in range(min(len(unit["silos"]) for unit in units)):
            for at, epochs in enumerate(units[0]["epochs"]):
                values = [unit[way][silo][at] for unit in units]
                about = {
                    "table": "fig6",
                    "row": way,
                    "part": f"silo{silo + 1}",
                    "mode": "sound",
                    "data": name,
                }
                yield Cell.over_folds(values, measure="nDCG@10", variant=f"{epochs} epochs", **about)


def page_of(results: Mapping[str, Results], cells: Sequence[Cell], *, seeds: int) -> Page:
    """Build the report's page from the results of every collection and their cells."""
    sections = [section for name in results for section in _sections(name, results[name], cells)]
    return Page(
        "Cross-silo federated ranking (CS-F-LTR)",
        tuple(sections),
        PROSE("lead", seeds=seeds, intervals=seeds >= LEAST_FOLDS),
    )


FIGURES = (("fig8a", "Figure 8a: privacy budget", "ε"), ("fig8b", "Figure 8b: silos", "silos"))


def _sections(name: str, results: Results, cells: Sequence[Cell]) -> Iterator[Section]:
    mine = [cell for cell in cells if cell.data == name]
    parts: list[str | Table | Plot]
    circular = name == "synthetic"
    note = " — circular: labels are ranks of a BM25 run" if circular else ""
    by_pair = contrasts(results.table)
    yield Section(f"What it says ({name})", tuple(verdicts(results.table, by_pair, circular=circular)))
    tables = tuple(side_by_side(mine, measure, name) for measure in BY_INTEREST)
    yield Section(f"Table 4 ({name}{note})", tables)
    if results.printed:
        printed = [cell for cell in mine if cell.mode == "paper"]
        words = _protocol(printed, len(results.printed))
        parts = [words, cells_table(printed, f"Table 4 by the paper's protocol, {name}")]
        yield Section(f"Table 4, paper mode ({name})", tuple(parts))
    yield Section(f"Tests ({name})", (_tests_table(by_pair, name),))
    yield Section(f"Every option, private counts ({name})", (options(mine, name),))
    if results.curve:
        yield Section(f"Figure 6 ({name})", tuple(curves(results.curve, name)))
    for table, title, x in FIGURES:
        some = [cell for cell in mine if cell.table == table]
        if some:
            parts = [points(some, x)]
            parts += costs(results.silos) if table == "fig8b" else ()
            yield Section(f"{title} ({name})", (*parts, cells_table(some, f"{title}, {name}")))
    if results.rough:
        some = [cell for cell in mine if cell.table == "rough"]
        words, tests = _rough(results.rough, name)
        dealt = cells_table(some, f"Dealt at random, ε = 2, {name}")
        yield Section(
            f"Most relevant pairs across silos, little seen of them ({name})", (words, dealt, tests)
        )
    if results.places:
        yield Section(f"A map of the gain ({name})", tuple(gain_map(results.places, name)))


def _rough(results: Sequence[Any], name: str) -> tuple[str, Table]:
    """Assess the paper's labeller with silos dealt at random and a small ε."""
    units = [{"private": records} for records in at_labels(results)]
    rows = (*CONTROLLED["private"], DEFAULT_ROW, "BM25")
    against = {row: contrast(units, ("private", "CS-F-LTR"), ("private", row)) for row in rows}
    worth = _worth([against[row] for row in CONTROLLED["private"]])
    tests = {(one.first, one.second): one for one in against.values()}
    table = _tests_table(tests, f"{name}, dealt at random, ε = 2")
    return PROSE("rough", worth=worth, tests=against), table


def _tests_table(tests: Mapping[tuple[Key, Key], Contrast], name: str) -> Table:
    rows = [
        (
            f"{one.first[1]} ({SHOWN[one.first[0]]})",
            f"{one.second[1]} ({SHOWN[one.second[0]]})",
            one.difference,
            one.over_seeds,
            one.over_queries,
        )
        for one in tests.values()
    ]
    header = ("row", "against", "nDCG@10", "p over seeds", "p over queries")
    return Table(header, tuple(rows), f"Paired tests, {name}", (), 4)


def verdicts(
    units: Sequence[Any], tests: Mapping[tuple[Key, Key], Contrast], *, circular: bool = False
) -> Iterator[str]:
    """Yield conclusions in words; a gain is claimed only if both tests and both controls support it."""
    if circular:
        yield PROSE("circular")
        yield _direction({row: float(seed_means(units, ("exact", row)).mean()) for row in WAYS})
    yield PROSE("cross_share", share=float(np.mean([unit["cross share"] for unit in units])))
    for row in ("Global", "CS-F-LTR"):
        yield PROSE("against_local", row=row, contrast=tests[("exact", row), ("exact", "Local")])
    yield from _privacy(tests)
    for variant in CONTROLLED:
        yield _labeller(variant, tests)
    yield _ours(units, tests)
    yield PROSE(
        "oracle",
        exact=tests[("exact", "oracle"), ("exact", "Global")],
        private=tests[("private", "oracle"), ("private", "noise-aware Global")],
    )


def _direction(ours: Mapping[str, float]) -> str:
    """Compare the differences of the printed rows in nDCG@10 with those of ours."""
    at, steps = MEASURES.index("nDCG@10"), []
    for row, other in (("Local+", "Local"), ("Global", "Local"), ("CS-F-LTR", "Global")):
        rows = ([values[at] for (name, _), values in PRINTED.items() if name == one] for one in (row, other))
        higher, lower = (float(np.mean(values)) for values in rows)
        steps.append({"row": row, "other": other, "printed": higher - lower, "ours": ours[row] - ours[other]})
    return PROSE("direction", steps=steps)


def _protocol(cells: Sequence[Cell], seeds: int) -> str:
    """Describe paper mode, its faults, and the differences between its rows."""
    ours = {
        cell.row: cell.value
        for cell in cells
        if (cell.part, cell.measure, cell.variant) == ("all", "nDCG@10", "measures as printed")
    }
    return PROSE("protocol", seeds=seeds, faults=FAULTS, direction=_direction(ours))


def _privacy(tests: Mapping[tuple[Key, Key], Contrast]) -> Iterator[str]:
    cost, gain = tests[NAIVE, ("exact", "Global")], tests[DEFAULT, NAIVE]
    yield PROSE("cost_of_noise", cost=cost)
    yield PROSE(
        "default_row",
        row=DEFAULT_ROW,
        gain=gain,
        cost=cost,
        shrunk=tests[("private", "Global"), NAIVE],
        trained=tests[DEFAULT, ("private", "Global")],
        clipped=tests[("clipped", "noise-aware Global"), NAIVE],
    )


def _labeller(variant: str, by_pair: Mapping[tuple[Key, Key], Contrast]) -> str:
    """Assess the paper's labeller against its controls, in words."""
    tests = {row: by_pair[(variant, "CS-F-LTR"), (variant, row)] for row in CONTROLLED[variant]}
    return PROSE("labeller", counts=SHOWN[variant], worth=_worth(list(tests.values())), tests=tests)


def _worth(tests: Sequence[Contrast]) -> str:
    if all(one.clear and one.difference > 0 for one in tests):
        return "is worth something"
    if any(one.clear and one.difference < 0 and one.second[1] == "Global" for one in tests):
        return "does harm"
    if any(one.clear and one.difference < 0 for one in tests):
        return "is worth less than a control that asks nobody"
    return "is worth nothing that these tests can see"


def _ours(units: Sequence[Any], by_pair: Mapping[tuple[Key, Key], Contrast]) -> str:
    """Assess the best of our own labellers by validation, against the controls."""
    private = [unit["private"] for unit in units]
    have = [row for row in OURS if all(rows_named(rows, row) for rows in private)]
    best = max(have, key=lambda row: np.mean([_one(rows, row)["validation"] for rows in private]))
    tests = [by_pair[("private", best), ("private", row)] for row in ("all-zero", "noise-aware Global")]
    return PROSE("ours", best=best, worth=_worth(tests), zero=tests[0], aware=tests[1])


def _one(records: Sequence[Any], row: str) -> Any:
    """Return the record of a row with one model for all silos."""
    (record,) = rows_named(records, row)
    return record
