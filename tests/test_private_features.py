"""BM25 from private counts: the world it is measured in, attacks, the report, the demonstration's chapter."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from isthmus.corpora import synthetic
from isthmus.experiments import private_attacks as attacks
from isthmus.experiments import private_features, private_story
from isthmus.experiments.notebook import Notebook
from isthmus.experiments.private_features import EPSILONS, Config, reproduce
from isthmus.experiments.private_world import READERS, OneShotWorld, World
from isthmus.randomness import Streams
from isthmus.tables import Corpus

MECHANISMS = ("insecure_shared_noise/ask", "scalar/ask", "per_cell/ask")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return synthetic.text(80, 16, 4, seed=0, words=120)


def kept(corpus: Corpus, epsilon: float, reader: str) -> float:
    """Kendall's τ between exact scores and those of a reader."""
    world = World(corpus, Streams(0))
    return world.judged(world.scored(partial(OneShotWorld(world, epsilon).counts, reader)))["Kendall tau"]


def test_counts_without_noise_rank_as_exact_ones(corpus: Corpus) -> None:
    assert kept(corpus, np.inf, "plain") > 0.8


def test_a_smaller_epsilon_ranks_worse(corpus: Corpus) -> None:
    assert kept(corpus, 1.0, "ask") < kept(corpus, 8.0, "ask") - 0.1


def test_own_documents_need_no_release(corpus: Corpus) -> None:
    world = World(corpus, Streams(0))
    seen = OneShotWorld(world, 1.0)
    scores = world.at_home(seen.at_home, world.scored(partial(seen.counts, "ask")))
    home = corpus.queries.silos[:, None] == corpus.documents.silos
    agreed = np.corrcoef(scores[home], world.exact[home])[0, 1]
    assert agreed > 0.98 > np.corrcoef(scores[~home], world.exact[~home])[0, 1]


def test_the_demonstration_books_what_it_releases(corpus: Corpus) -> None:
    story = private_story.tell(corpus)
    rows = [dict(zip(story.released.header, row, strict=True)) for row in story.released.rows]
    assert [row["ε a document"] for row in rows if row["silo"] == corpus.silos[0]] == [8.0, 1.0]
    assert all(set(row["to"].split(", ")) == set(corpus.silos) - {row["silo"]} for row in rows)
    assert "ε = 9" in story.meaning
    assert "98.9 %" in story.meaning
    assert [each.run for each in story.comparison.evaluations] == [
        private_story.HOME,
        private_story.PRIVATE,
        private_story.EXACT,
    ]
    assert story.picture.svg().startswith("<svg")


def test_differencing_is_told_for_both(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path, Config(data="synthetic", scale="smoke"))
    found = attacks.compute(notebook, seed=0, trials=1000, workers=1)
    assert found["differencing insecure_shared_noise 1000"]["not empty"] >= 0.9
    assert found["differencing per_cell 1000"]["not empty"] < 0.1
    for name, epsilon, rows in attacks.AUDITED:
        one = found[f"audit {name} {epsilon:g} {rows}"]
        assert (one["audited ε at least"] <= one["claimed ε"]) == (name != attacks.SHARED)
        assert (one["charged ε"] is None) == (name == attacks.SHARED)
    assert [section.heading for section in attacks.sections(found)] == ["Attacks"]


def test_a_report_from_units_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mechanism and reader at every ε has a row; nothing that was computed is computed again."""
    names = ("exact", *(f"one_shot/{name}" for name in READERS), "one_shot/publish, own exact", *MECHANISMS)

    def measured(**about: object) -> dict[str, dict[str, float]]:
        return {name: {"nDCG@10": 0.3, "Kendall tau": 0.5} for name in names}

    monkeypatch.setattr(private_features, "measure", measured)
    monkeypatch.setattr(private_features.pictures, "compute", lambda *a, **k: {})
    monkeypatch.setattr(private_features.pictures, "sections", lambda found: ())
    monkeypatch.setattr(private_features.attacks, "compute", lambda *a, **k: {})
    monkeypatch.setattr(private_features.attacks, "sections", lambda found: ())
    config = Config(data="synthetic", scale="smoke")
    first = reproduce(config, tmp_path, workers=1)
    assert len(first.cells) == 3 * (1 + (len(names) - 1) * len(EPSILONS))
    told = json.loads((tmp_path / "cells.json").read_text(encoding="utf-8"))
    assert {cell["mode"] for cell in told if cell["row"] == "insecure_shared_noise"} == {"paper"}
    assert "98.2 % certainty" in (tmp_path / "report.md").read_text(encoding="utf-8")
    monkeypatch.setattr(private_features, "measure", None)
    assert reproduce(config, tmp_path, workers=1).cells == first.cells
