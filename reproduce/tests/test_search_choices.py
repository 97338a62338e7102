"""Choices for search with a collection left out: by what the others say alone, by the rule that is stated."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import ConfigError
from isthmus.learning import COLUMNS, FEATURES
from isthmus_reproduce.search import choices
from isthmus_reproduce.search.choices import best_learner, best_rules, calibrations, others
from isthmus_reproduce.search.learned import Study
from isthmus_reproduce.search.world import World, federation


def row(error=0.5, removed=0.5, foreign=0.5, saved=0.1):
    """Figures whose ratios to their limits are these."""
    limits = {"95 %": 0.02, "base rate": 0.4}
    return {"ECE": 0.02 * error, "removed": 0.4 * removed, "foreign": 0.4 * foreign, "saved": saved, **limits}


def test_a_collection_has_no_say_in_what_it_is_reported_with():
    results = {
        (name, encoder): {"a": {"difference": at}, "b": {"difference": -at}}
        for at, name in enumerate(("one", "two"))
        for encoder in ("", "bge")
    }
    assert others(results, "two") == {"a": [{"difference": 0}] * 2, "b": [{"difference": 0}] * 2}
    assert others(results, "one")["a"] == [{"difference": 1}] * 2


def test_rules_miss_little_then_stay_away_from_limits_then_say_much():
    missed = {"one": [row(), row(1.1, saved=0.9)], "none": [row(0.9, 0.99), row()]}
    assert best_rules(missed) == "none"
    near = {"near": [row(removed=0.99, saved=0.9)], "far": [row(removed=0.8)]}
    assert best_rules(near) == "far"
    alike = {"little": [row(0.81)], "much": [row(0.84, saved=0.2)], "as much": [row(0.84, saved=0.2)]}
    assert best_rules(alike) == "much"


def test_of_learners_that_gain_alike_the_simpler_one_is_chosen():
    gains = {"simple": [0.0101], "more": [0.0104], "worse": [0.002]}
    figures = {name: [{"difference": each} for each in values] for name, values in gains.items()}
    assert best_learner(figures) == "simple"
    assert best_learner({**figures, "better": [{"difference": 0.012}]}) == "better"


def test_one_collection_leaves_nothing_to_choose_by(tmp_path):
    with pytest.raises(ConfigError, match="no other collection"):
        choices.reproduce(choices.Config(data="pydocs"), tmp_path)


def fake(kind, data, encoder, seed, scale):
    """`one` gains with the first alternative, `two` with the second; rules differ alike."""
    first = data == "one"
    if kind == "learners":
        gains = {"a": 0.01 * first, "b": 0.01 * (not first)}
        return {name: {"difference": gain} for name, gain in gains.items()}
    return {"a": row(removed=0.5 if first else 1.5), "b": row(removed=1.5 if first else 0.5)}


def test_the_report_has_every_collection_with_the_choice_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "work", fake)
    result = choices.reproduce(choices.Config(data="one,two", encoder="lsa"), tmp_path, workers=1)
    chosen = {(cell.table, cell.data, cell.row) for cell in result.cells if "chosen" in cell.variant}
    assert chosen == {
        (f"search: {kind}", data, alternative)
        for kind in ("learners", "rules", "curves")
        for data, alternative in (("one", "b"), ("two", "a"))
    }
    assert {cell.variant.split(",")[0] for cell in result.cells} == {"words", "lsa"}
    assert "chosen by the others" in result.page.markdown()


def test_every_alternative_is_measured_on_lists_of_the_product(monkeypatch):
    world = World.of("pydocs", seed=1, smoke=True)
    name = "all columns, penalty 100"
    monkeypatch.setattr(choices, "LEARNERS", {name: choices.LEARNERS[name]})
    with federation(world) as silos:
        silos.share("private")
        study = Study(world, silos, "")
        ((_, learner),) = choices.learners(study, "pydocs")
        rules = dict(
            calibrations({each: choices.RULES[each] for each in list(choices.RULES)[::10]}, study, "pydocs")
        )
    assert 0 <= learner["adopted"] <= 1
    assert len(rules) == 3
    assert len({each["base rate"] for each in rules.values()}) == 1, "order does not depend on probabilities"
    assert all(0 < each["removed"] < 1 and each["95 %"] > 0 for each in rules.values())
    hidden = study.hiding(FEATURES)
    silent = np.isin(COLUMNS, FEATURES)
    assert all(np.isnan(part.table[:, silent]).all() for part in hidden.parts)
    np.testing.assert_array_equal(hidden.parts[0].table[:, ~silent], study.parts[0].table[:, ~silent])
