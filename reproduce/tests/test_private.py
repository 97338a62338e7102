"""BM25 from private counts: the world it is measured in, attacks, the report."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from isthmus.private.views import PublishedCounts
from isthmus.randomness import Streams
from isthmus.tables import Corpus
from isthmus_reproduce import synthetic_text
from isthmus_reproduce.notebook import Notebook
from isthmus_reproduce.private import attacks
from isthmus_reproduce.private import experiment as private_features
from isthmus_reproduce.private.attacks import Audit, Differencing
from isthmus_reproduce.private.experiment import EPSILONS, Config, reproduce
from isthmus_reproduce.private.plots import PANELS
from isthmus_reproduce.private.world import READERS, UnchargedSilos

MECHANISMS = ("insecure_shared_noise", "scalar", "per_cell")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return synthetic_text.text(80, 16, 4, seed=0, words=120)


def kept(corpus: Corpus, epsilon: float, reader: str) -> float:
    """Kendall's τ between exact scores and those of a reader."""
    world = UnchargedSilos(corpus, Streams(0))
    return world.judged(world.scored(partial(PublishedCounts(world, epsilon).counts, reader)))["Kendall tau"]


def test_figure_7_has_the_panels_in_print() -> None:
    kinds = list(PANELS.values())
    assert kinds[0][0] == "exact"
    assert kinds[1:5] == [("signed", 120, 10), ("signed", 60, 10), ("signed", 10, 10), ("plain", 120, 10)]
    assert kinds[5:] == [("signed", 120, rows) for rows in (5, 3, 1)]


def test_counts_without_noise_rank_as_exact_ones(corpus: Corpus) -> None:
    assert kept(corpus, np.inf, "plain") > 0.8


def test_a_smaller_epsilon_ranks_worse(corpus: Corpus) -> None:
    assert kept(corpus, 1.0, "ask") < kept(corpus, 8.0, "ask") - 0.1


def test_own_documents_need_no_release(corpus: Corpus) -> None:
    world = UnchargedSilos(corpus, Streams(0))
    seen = PublishedCounts(world, 1.0)
    scores = world.at_home(seen.at_home, world.scored(partial(seen.counts, "ask")))
    home = corpus.queries.silos[:, None] == corpus.documents.silos
    agreed = np.corrcoef(scores[home], world.exact[home])[0, 1]
    assert agreed > 0.98 > np.corrcoef(scores[~home], world.exact[~home])[0, 1]


def test_differencing_is_told_for_both(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path, Config(data="synthetic", scale="smoke"))
    found = attacks.compute(notebook, seed=0, trials=1000, workers=1)
    assert found[Differencing("insecure_shared_noise", 1000)]["not empty"][0] >= 0.9
    assert found[Differencing("per_cell", 1000)]["not empty"][0] < 0.1
    for name, epsilon, rows in attacks.AUDITED:
        one = found[Audit(name, epsilon, rows)]
        assert (one["audited ε at least"] <= one["claimed ε"]) == (name != attacks.SHARED)
        assert (one["charged ε"] is None) == (name == attacks.SHARED)
    for value, low, high in (one["not empty"] for at, one in found.items() if isinstance(at, Differencing)):
        assert 0 <= low <= value <= high <= 1
    assert all(
        one["attacker right"][1] < one["attacker right"][0] <= one["attacker right"][2]
        for at, one in found.items()
        if isinstance(at, Audit)
    )
    assert [section.heading for section in attacks.sections(found)] == ["Attacks"]


def test_a_report_from_units_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mechanism and reader at every ε has a row; nothing that was computed is computed again."""
    readers = [("one_shot", reader) for reader in (*READERS, "publish, own exact")]
    names = (("exact", ""), *readers, *((mechanism, "ask") for mechanism in MECHANISMS))

    def measured(**about: object) -> list[dict[str, object]]:
        values = {"nDCG@10": 0.3, "Kendall tau": 0.5}
        return [{"mechanism": mechanism, "reader": reader, **values} for mechanism, reader in names]

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
