"""The report of cross-silo training: its rows, its tests and what it says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.federation.semisupervised import silos
from isthmus.federation.semisupervised.ways import DEFAULT as DEFAULT_ROW
from isthmus_reproduce.csfltr import experiment as csfltr
from isthmus_reproduce.csfltr.experiment import Config, _sorted, _table_units, _work
from isthmus_reproduce.csfltr.plots import POINTS, Results
from isthmus_reproduce.csfltr.report import (
    AS_PRINTED,
    CONTRASTS,
    PRINTED,
    Contrast,
    _worth,
    cells_of,
    contrast,
    page_of,
    printed_cells,
    verdicts,
)
from isthmus_reproduce.csfltr.rows import (
    FULL,
    LABELLINGS,
    Bench,
    curve_unit,
    point_unit,
    printed_unit,
    table_unit,
)
from isthmus_reproduce.csfltr.selection import PICKS
from isthmus_reproduce.csfltr.world import Case, DealtSilos

CASE = {"data": "synthetic", "seed": 0, "small": True, "circular": True}


@pytest.fixture(scope="module")
def world() -> DealtSilos:
    return DealtSilos(Case("synthetic", small=True, reader="shrink"))


@pytest.fixture(scope="module")
def units() -> list[Any]:
    """One seed, and what another might have given."""
    first = json.loads(json.dumps(table_unit(case=CASE, more=False)))
    second = copy.deepcopy(first)
    rng = np.random.default_rng(0)
    for variant in ("exact", "private", "clipped"):
        for row in second[variant]:
            row["test"] = {measure: value + rng.normal(0, 0.01) for measure, value in row["test"].items()}
    return [first, second]


def test_no_query_is_in_two_parts_and_all_silos_are_ranked(world: DealtSilos) -> None:
    tables = world.tables["exact"]
    asked = {part: set(tables.ranked[part].queries) for part in (1, 2)}
    learned = {query for silo in tables.silos(tables.inside) for query in silo.labelled.queries}
    assert not asked[1] & asked[2]
    assert not learned & (asked[1] | asked[2])
    tested = tables.ranked[2]
    holders = {world.corpus.address(name).split("/")[0] for name in tested.ids.tolist()}
    assert holders == set(world.names)


def test_grades_are_the_judged_ones(world: DealtSilos) -> None:
    table = world.tables["exact"].ranked[2]
    judged = world.corpus.qrels.to_dict()
    told = zip(table._query_column.tolist(), table.ids.tolist(), table.grades.tolist(), strict=True)
    assert all(judged[query].get(document, 0) == grade for query, document, grade in told)


def test_labelled_pairs_are_the_silos_own(world: DealtSilos) -> None:
    for name, silo in zip(
        world.names, world.tables["exact"].silos(world.tables["exact"].inside), strict=True
    ):
        own = set(world.documents[name])
        assert set(silo.labelled.ids.tolist()) <= own
        assert not set(silo.cross.ids.tolist()) & own
        assert len(silo.errors) == silo.cross.rows


def test_few_labels_are_few(world: DealtSilos) -> None:
    tables = world.tables["exact"]
    assert all(len(silo.labelled) <= 2 for silo in tables.silos(tables.inside, 2))


@pytest.mark.parametrize("kind", ["rtk", "random", "mixed"])
def test_cross_pairs_may_be_chosen_otherwise(world: DealtSilos, kind: Any) -> None:
    tables = world.tables["private"]
    usual, other = tables.across, tables.across_by(PICKS[kind])
    assert usual.keys() == other.keys()
    for name, (letor, errors) in other.items():
        assert len(errors) == letor.rows
        assert letor.rows <= tables.depth * 3 * len(world.query_rows[name])


def test_every_row_without_which_it_cannot_be_read_is_there(units: list[Any]) -> None:
    rows = {variant: {record["row"] for record in units[0][variant]} for variant in ("exact", "private")}
    common = {"BM25", "Local", "Local+", "averaged labeller", "Global", "CS-F-LTR", "all-zero", "oracle"}
    assert common <= rows["exact"]
    assert common | {"noise-aware Global", DEFAULT_ROW} <= rows["private"]
    assert {"Global", "noise-aware Global", "BM25"} <= {record["row"] for record in units[0]["clipped"]}


def test_every_option_has_a_row_that_scores(world: DealtSilos) -> None:
    tables = world.tables["private"]
    found = {row: scorer(tables.ranked[2]) for row, _, scorer in Bench(tables).rows(FULL, more=True)}
    assert set(LABELLINGS) <= found.keys()
    for named in ("LambdaRank", "LambdaMART", "other sampling", "pairs by rtk", "half noise-aware"):
        assert any(named in row for row in found), named
    assert all(np.isfinite(scores).all() and np.ptp(scores) > 0 for scores in found.values())


def test_cells_hold_what_is_printed_beside_ours(units: list[Any]) -> None:
    results = Results(units)
    cells = list(cells_of("synthetic", results))
    printed = {(cell.row, cell.part) for cell in cells if cell.paper is not None}
    assert len(printed) == len(PRINTED)
    assert {cell.row for cell in cells} >= {"default", "Global", "CS-F-LTR"}
    assert all(cell.n == 2 for cell in cells if cell.table == "4" and cell.part == "all")
    page = page_of({"synthetic": results}, cells, seeds=2)
    assert "circular" in page.markdown()
    assert "paper's labeller" in page.markdown()


def test_a_gain_is_claimed_only_where_the_controls_allow_it(units: list[Any]) -> None:
    """The same labeller, once far ahead of everything and once not ahead of the all-zero control."""

    def told(zero: float) -> str:
        made = copy.deepcopy(units)
        for unit in made:
            for variant in ("exact", "private"):
                for row in unit[variant]:
                    level = {"CS-F-LTR": 0.9, "all-zero": zero}.get(row["row"], 0.5)
                    row["queries"] = dict.fromkeys(row["queries"], level)
                    row["test"]["nDCG@10"] = level
        found = {pair: contrast(made, *pair) for pair in CONTRASTS}
        return " ".join(verdicts(made, found))

    assert "labeller is worth something" in told(zero=0.5)
    assert "labeller is worth something" not in told(zero=0.9)


@pytest.mark.parametrize(
    ("row", "said"), [("Global", "does harm"), ("all-zero", "is worth less than a control that asks nobody")]
)
def test_less_than_a_control_is_not_harm(row: str, said: str) -> None:
    worse = Contrast(("private", "calibrated soft"), ("private", row), -0.01, 0.01, 0.01)
    assert _worth([worse]) == said


def test_a_reproduction_writes_every_table_and_figure(
    units: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way from units to report, with units that cost nothing."""
    epochs = [3, 6]
    path = {way: [[0.3, 0.4]] * 4 for way in ("Local", "Local+", "Global", "CS-F-LTR")}
    fakes = {
        "table_unit": lambda *, case, more: units[case["seed"] % 2],
        "printed_unit": lambda *, case: PROTOCOL_ROWS,
        "curve_unit": lambda *, case: {"epochs": epochs, "silos": list("abcd"), **path},
        "point_unit": lambda *, case, labels: {
            "seconds": 1.0 + case["seed"],
            "points": [{"labels": most, "rows": units[case["seed"] % 2]["private"]} for most in labels],
        },
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(csfltr, name, fake)
    done = csfltr.reproduce(Config(data="synthetic", scale="smoke"), tmp_path, workers=1)
    told = {cell.table for cell in done.cells}
    assert told == {"4", "validation", "fig6", "fig8a", "fig8b", "rough", "map"}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for heading in ("Figure 6", "Figure 8a", "Figure 8b", "A map of the gain", "Tests", "What it says"):
        assert heading in page
    assert page.count("<svg") == 4 + 2
    assert "Table 4, paper mode" in page
    again = csfltr.reproduce(Config(data="synthetic", scale="smoke"), tmp_path, workers=1)
    assert [cell.record() for cell in again.cells] == [cell.record() for cell in done.cells]


PROTOCOL_ROWS = [
    {"row": row, "part": part, "test": dict.fromkeys((*AS_PRINTED.values(), "ERR", "nDCG@10", "MAP"), level)}
    for row, part, level in (
        ("Local", "silo1", 0.2),
        ("Local", "silo2", 0.4),
        ("Local+", "silo1", 0.5),
        ("Global", "all", 0.6),
        ("CS-F-LTR", "all", 0.7),
    )
]


def test_the_papers_protocol_has_rows_of_its_own_beside_what_is_printed() -> None:
    cells = list(printed_cells("cran", [PROTOCOL_ROWS, PROTOCOL_ROWS]))
    values = {(cell.row, cell.part, cell.variant, cell.measure): cell for cell in cells}
    assert len(values) == len(cells)
    assert {cell.mode for cell in cells} == {"paper"}
    mean = values["Local", "all", "measures as printed", "ERR"]
    assert (mean.value, mean.n, mean.low, mean.paper) == (pytest.approx(0.3), 2, None, None)
    assert values["Local", "silo2", "measures as printed", "nDCG@10"].paper == PRINTED["Local", "B"][1]
    assert values["CS-F-LTR", "all", "the usual measures", "MAP"].paper is None


def test_the_papers_protocol_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where queries share documents, too, which grades from ranks make of all of them: it splits pairs."""
    monkeypatch.setattr(silos, "linked_queries", lambda corpus: np.zeros(len(corpus.queries), dtype=np.int64))
    records = printed_unit(case=CASE)
    assert {record["row"] for record in records} == {"Local", "Local+", "Global", "CS-F-LTR"}
    figures = np.array([list(record["test"].values()) for record in records])
    assert np.isfinite(figures).all()
    assert np.ptp(figures[:, 1]) > 0


def test_points_and_curves_have_what_figures_show() -> None:
    case = {**CASE, "reader": "shrink", "silos": 2}
    point = point_unit(case=case, labels=[2, None])
    two, every = ([record["row"] for record in one["rows"]] for one in point["points"])
    assert set(every) >= set(POINTS)
    assert two == every
    curve = curve_unit(case=case)
    for way in ("Local", "Local+", "Global", "CS-F-LTR"):
        assert np.shape(curve[way]) == (2, len(curve["epochs"]))


def test_work_is_cut_into_units_that_name_themselves() -> None:
    config = Config(data="synthetic", scale="smoke")
    pieces = [piece for _, _, units in _work(("synthetic",), config) for piece, _ in units]
    assert len(pieces) == len(set(pieces))
    assert len(list(_table_units("cran", Config()))) == 20
    results = _sorted("synthetic", {piece: {} for piece in pieces})
    assert len(results.table) == 2
    assert set(results.budget) == {0.5, 8.0, float("inf")}
    assert list(results.silos) == [1, 2, 4]
    assert len(results.places) == 4
