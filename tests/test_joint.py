"""Calibration and fusion learned together, for a ranking measure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import ConfigError
from isthmus.evaluation import evaluate
from isthmus.fusion import Joint, fuse, fuser, load_fuser, save_fuser
from isthmus.fusion.joint import surrogate
from isthmus.tables import Qrels, Run


def world(queries: int = 60, documents: int = 15, seed: int = 0) -> tuple[list[Run], Qrels]:
    """Two runs, one twice as noisy on an exponential scale, and grades from 0 to 2."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(queries, documents))
    names = np.repeat([f"q{at:03}" for at in range(queries)], documents).tolist()
    items = [f"d{at:02}" for at in range(documents)] * queries
    grades = (truth > 0.8).astype(int) + (truth > 1.6)
    runs = []
    for at, noise in enumerate((0.7, 1.4)):
        scores = truth + noise * rng.normal(size=truth.shape)
        runs.append(Run.of(names, items, (np.exp(2 * scores) if at else scores).ravel(), name=f"run {at}"))
    return runs, Qrels.of(names, items, grades.ravel())


@pytest.mark.parametrize("first", [False, True])
def test_the_gradient_is_that_of_the_surrogate(first: bool) -> None:
    rng = np.random.default_rng(1)
    scores, gains = rng.normal(size=9), np.array([3.0, 0, 1, 0, 0, 1, 0, 0, 0])
    gains = (gains > 0).astype(float) if first else gains
    lists = np.repeat([0, 1, 2], 3)  # the last has nothing relevant
    value, gradient = surrogate(scores, gains, lists, first=first)
    softmax = np.exp(scores) / np.repeat(np.exp(scores).reshape(3, 3).sum(axis=1), 3)
    if first:
        expected = -np.log(softmax[0] + softmax[2]) - np.log(softmax[5])
    else:
        expected = -(0.75 * np.log(softmax[0]) + 0.25 * np.log(softmax[2])) - np.log(softmax[5])
    assert value == pytest.approx(expected)
    for at in range(9):
        moved = scores + 1e-6 * (np.arange(9) == at)
        slope = (surrogate(moved, gains, lists, first=first)[0] - value) / 1e-6
        assert gradient[at] == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("target", ["nDCG", "P@1"])
def test_it_beats_each_run_keeps_each_list_and_comes_back_from_a_file(target: str, tmp_path: Path) -> None:
    runs, qrels = world()
    model = Joint(target=target)
    fused = model.fit_fuse(runs, qrels)
    single = [evaluate(qrels, run, ["nDCG@10"])["nDCG@10"] for run in runs]
    assert evaluate(qrels, fused, ["nDCG@10"])["nDCG@10"] > max(single)
    assert (model.weights_[:4] >= 0).all(), "no run's own list is reordered"
    again = Joint(target=target).fit(runs[:1], qrels).fuse(runs[:1])
    assert again["q000"].documents.tolist() == runs[0]["q000"].documents.tolist()
    save_fuser(model, tmp_path / "fuser")
    assert load_fuser(tmp_path / "fuser").fuse(runs) == model.fuse(runs)
    explained = model.explain(runs, "q003", depth=2)
    assert sum(part.contribution for part in explained[0].parts) == pytest.approx(explained[0].score)


def test_by_name_with_its_options() -> None:
    runs, qrels = world(20)
    assert fuse(runs, "joint", qrels=qrels, target="P@1").name == "joint"
    with pytest.raises(ConfigError, match="surrogate"):
        fuser("joint", target="MAP")
    with pytest.raises(ConfigError, match="no norm"):
        fuser("joint", norm="z-score")
