"""`isthmus reproduce search` on the built-in world, small: every row and figure, and a run that resumes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from isthmus.learning import COLUMNS
from isthmus.report import Page, Section
from isthmus_reproduce.search import experiment as search
from isthmus_reproduce.search import hybrid
from isthmus_reproduce.search.experiment import BEFORE, CENTRAL, LEARNED, Config, Outcome, pooled, reproduce
from isthmus_reproduce.search.learned import Ranking, Study
from isthmus_reproduce.search.learned import _fallen as fallen
from isthmus_reproduce.search.world import World, federation


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    return reproduce(Config(data="pydocs", scale="smoke"), folder, workers=1), folder


def test_every_row_and_every_figure(result):
    cells = {(cell.row, cell.measure): cell for cell in result[0].cells if cell.data == "pydocs"}
    rows = {row for row, _ in cells}
    assert {CENTRAL, BEFORE, LEARNED, "RRF", "z-score"} <= rows
    assert cells["raw, shared exactly", "nDCG@10"].value == cells[CENTRAL, "nDCG@10"].value
    error, quantile = (cells[LEARNED, name].value for name in ("ECE", "ECE, 95 % quantile"))
    assert 0 <= error <= 1
    assert 0 < quantile < 0.3
    assert 0 < cells[LEARNED, "known items first"].value <= 1
    assert 0 <= cells[LEARNED, "share of folds adopted"].value <= 1
    assert cells["2 of 8 silos inverted: baseline", "nDCG@10"].value > 0
    assert "all eight, weighed by FedRisk" in result[0].page.markdown()


def test_a_finished_run_computes_nothing(result, monkeypatch):
    def never(**arguments):
        raise AssertionError(arguments)

    monkeypatch.setattr(search, "work", never)
    again = reproduce(Config(data="pydocs", scale="smoke"), result[1], workers=1)
    assert [cell.record() for cell in again.cells] == [cell.record() for cell in result[0].cells]


def test_the_hybrid_over_silos_is_that_of_one_index(tmp_path):
    result = reproduce(Config(data="pydocs", scale="smoke", encoder="lsa"), tmp_path, workers=1)
    cells = {(cell.row, cell.measure): cell for cell in result.cells}
    assert {row for row, _ in cells} >= {hybrid.CENTRAL, CENTRAL, "encoder alone, one index", BEFORE, LEARNED}
    exact = cells["BM25, silos, exact statistics", f"nDCG@10 over {CENTRAL}"]
    assert (exact.value, exact.low, exact.high) == (0, 0, 0)
    silos, one = (cells[row, "nDCG@10"].value for row in ("hybrid, silos, exact statistics", hybrid.CENTRAL))
    assert abs(silos - one) < 0.01, "only the scale differs"
    private = cells["hybrid, silos, private statistics", "nDCG@10"].value
    assert abs(cells[BEFORE, "nDCG@10"].value - private) < 0.02, "another draw of the noise"


def test_queries_that_lose_are_counted_and_pooled():
    def outcome(name, before, after):
        about = {"groups": list(range(len(before))), "before": before, "after": [after], "kinds": ["linear"]}
        return Outcome(name, {"values": {CENTRAL: [before]}}, about)

    one = outcome("one", [0.5, 0.5, 0.5, 0.5], [0.2, 0.4, 0.5, 0.9])
    assert one.worse(LEARNED, BEFORE) == (2, 1)
    assert one.over(LEARNED, BEFORE).value == pytest.approx(0.0)
    other = outcome("other", [0.1, 0.1], [0.4, 0.4])
    gain, mean = pooled([one, other])
    assert gain.value == pytest.approx(0.1)
    assert mean == pytest.approx(0.15)


def test_a_query_that_fell_is_listed_with_its_cause():
    table = np.zeros((12, len(COLUMNS)))
    table[1:, COLUMNS.index("lead")] = 5.0
    names = [f"d{at}" for at in range(12)]
    profile = np.zeros(6)
    before = Ranking(names, -np.arange(12.0), table, profile)
    after = Ranking([*names[1:], "d0"], -np.arange(12.0), np.roll(table, -1, axis=0), profile)
    queries = SimpleNamespace(texts=["tidal power"])
    study = SimpleNamespace(right=[{"d0"}], world=SimpleNamespace(corpus=SimpleNamespace(queries=queries)))
    (row,) = fallen(study, {0: before}, {0: after}, np.array([1.0]), np.array([0.0]))
    assert row[:3] == ["tidal power", 1.0, 0.0]
    assert "its relevant document is at 12; the first differs most in lead" in row[3]
    (listed,) = search._fallen([Outcome("one", {}, {"fallen": [row]})])
    assert "tidal power" in Page("", (Section("", (listed,)),)).markdown()


def test_a_group_is_tested_together():
    world = World.of("pydocs", seed=1, smoke=True)
    (turn,) = world.turns
    assert all(len(set(turn[world.groups == group])) == 1 for group in np.unique(world.groups))


def test_the_baseline_of_the_study_is_what_nodes_merge():
    world = World.of("pydocs", seed=1, smoke=True)
    with federation(world) as silos:
        silos.share("exact")
        study = Study(world, silos, "")
        rankings = {at: study.ranking(at, study.baseline) for at in range(len(world.groups))}
        values = study.values(rankings)
    central = search.references(world, 1)[CENTRAL][0]
    assert np.abs(values - central).max() < 1e-9
