"""The sizing page: its tables are those of what was measured, and its arithmetic is arithmetic."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def sizing():
    known = importlib.util.spec_from_file_location("sizing", DOCS / "sizing.py")
    module = importlib.util.module_from_spec(known)
    known.loader.exec_module(module)
    return module


def test_the_page_has_the_tables_of_what_was_measured(sizing):
    text = (DOCS / "sizing.md").read_text(encoding="utf-8")
    assert sizing.page(text) == text, "python docs/sizing.py"
    assert sorted(sizing.measured()) == [10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6]
    assert sorted(sizing.measured("tantivy")) == sorted(sizing.measured())


def test_measured_sizes_are_met_and_others_lie_on_the_power_between(sizing):
    sizes = {100: {"disk": 2.0}, 10_000: {"disk": 20.0}, 1_000_000: {"disk": 2000.0}}
    for size, costs in sizes.items():
        assert sizing.costs_of(size, sizes)["disk"] == pytest.approx(costs["disk"])
    assert sizing.costs_of(1_000, sizes)["disk"] == pytest.approx(40**0.5), "a hundredfold is tenfold here"
    assert sizing.costs_of(1_990_000, sizes)["disk"] == pytest.approx(2000 + 1980), "beyond, along a line"


def test_shards_share_documents_and_work_at_once(sizing):
    sizes = sizing.measured()
    one, ten = sizing.over_shards(10**7, 1, sizes), sizing.over_shards(10**7, 10, sizes)
    alone = sizing.costs_of(10**6, sizes)
    assert ten["each"] == 10**6
    assert ten["memory"] == pytest.approx(alone["memory"])
    assert ten["memory"] < one["memory"]
    assert ten["search"] == pytest.approx(alone["search"] + 10 * sizing.MERGE_MS)
    assert ten["processor"] == pytest.approx(10 * (alone["search"] + sizing.MERGE_MS))
    assert ten["disk"] == pytest.approx(10 * alone["disk"])
    memory, disk = sizing.vectors_of(10**6)
    assert memory == pytest.approx(0.512)
    assert disk == pytest.approx(1.28)
