"""`isthmus reproduce search` on the built-in world, small: every row and figure, and a run that resumes."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus_reproduce.search import experiment as search
from isthmus_reproduce.search import hybrid
from isthmus_reproduce.search.experiment import BASELINES, CENTRAL, DEFAULT, Config, Outcome, Shown, reproduce
from isthmus_reproduce.search.world import World


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    return reproduce(Config(data="pydocs", scale="smoke"), folder, workers=1), folder


def test_every_row_and_every_figure(found):
    cells = {(cell.row, cell.measure): cell for cell in found[0].cells}
    rows = {row for row, _ in cells}
    assert {CENTRAL, DEFAULT, "central BM25+LSA", "one calibrator for all", *BASELINES} <= rows
    assert cells["raw, shared exactly", "nDCG@10"].value == cells[CENTRAL, "nDCG@10"].value
    for other in (CENTRAL, *BASELINES):
        assert 0 <= cells[DEFAULT, f"p over {other}"].value <= 1
    error, floor = (cells[DEFAULT, name].value for name in ("ECE", "ECE floor"))
    assert 0 <= error <= 1
    assert 0 < floor < 0.2
    assert found[0].page.markdown().count("| pydocs |") > 10


def test_a_finished_run_computes_nothing(found, monkeypatch):
    def never(**asked):
        raise AssertionError(asked)

    monkeypatch.setattr(search, "work", never)
    again = reproduce(Config(data="pydocs", scale="smoke"), found[1], workers=1)
    assert [cell.record() for cell in again.cells] == [cell.record() for cell in found[0].cells]


def test_the_hybrid_over_silos_is_that_of_one_index(tmp_path):
    result = reproduce(Config(data="pydocs", scale="smoke", encoder="lsa"), tmp_path, workers=1)
    cells = {(cell.row, cell.measure): cell for cell in result.cells}
    assert {row for row, _ in cells} == set(hybrid.ROWS)
    exact = cells["BM25, silos, exact statistics", "nDCG@10 over BM25, one index"]
    assert (exact.value, exact.low, exact.high) == (0, 0, 0)
    beside = cells["hybrid, silos, exact statistics", "nDCG@10 over hybrid, one index"]
    assert abs(beside.value) < 0.01, "only the scale differs"
    alone, both = (cells[row, "nDCG@10"].value for row in ("encoder alone, one index", hybrid.CENTRAL))
    assert alone != both
    assert "| pydocs | hybrid, silos, private statistics |" in result.page.markdown()


def test_queries_that_lose_are_counted():
    values = {hybrid.BM25: np.array([0.5, 0.5, 0.5, 0.5]), hybrid.CENTRAL: np.array([0.2, 0.4, 0.5, 0.9])}
    outcome = hybrid.HybridOutcome("x", values, np.arange(4), 10, 0)
    assert outcome.worse(hybrid.CENTRAL) == (2, 1)
    assert outcome.over(hybrid.CENTRAL, hybrid.BM25).value == pytest.approx(0.0)


def test_a_group_is_tested_together():
    world = World.of("pydocs", seed=1, smoke=True)
    (turn,) = world.turns
    assert all(len(set(turn[world.groups == group])) == 1 for group in np.unique(world.groups))
    lesson = world.lesson(np.arange(len(world.groups)))
    folds = np.array(lesson.folds)
    assert all(len(set(folds[world.groups == group])) == 1 for group in np.unique(world.groups))


def test_few_sure_hits_are_said_to_be_few():
    once = np.zeros(30, dtype=np.int64)
    shown = Shown(np.arange(30), np.full(30, 0.1), np.zeros(30), once)
    outcome = Outcome("x", {}, {DEFAULT: shown}, np.arange(30), 0)
    assert outcome.sure(DEFAULT)[0] == 0
    assert outcome.sure(DEFAULT)[2] is None
    right = Shown(np.arange(30), np.full(30, 0.8), np.ones(30), once)
    sure = Outcome("x", {}, {DEFAULT: right}, np.arange(30), 0)
    count, mean, right = sure.sure(DEFAULT)
    assert (count, mean, right.value) == (30, pytest.approx(0.8), 1.0)
