"""The worlds of `fusion-defaults`, and what the report makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.cli import main
from isthmus.evaluation import evaluate, means_of, read_per_query
from isthmus.tables import write_qrels, write_run
from isthmus_reproduce.fusion import defaults
from isthmus_reproduce.fusion.worlds import DOCUMENTS, KINDS, FusionWorld


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    both = np.isfinite(one) & np.isfinite(other)
    return float(np.corrcoef(np.argsort(np.argsort(one[both])), np.argsort(np.argsort(other[both])))[0, 1])


def test_worlds_are_what_their_kind_says() -> None:
    worlds = [FusionWorld.draw(seed, fresh=100) for seed in range(24)]
    assert {world.kind for world in worlds} == set(KINDS)
    assert {len(world.scores) for world in worlds} <= set(range(2, 7))
    assert all(30 <= world.judged <= 200 for world in worlds)
    assert {int(world.grades.max()) for world in worlds} == {1, 3}
    spread: dict[str, list[float]] = {kind: [] for kind in KINDS}
    alike: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for world in worlds:
        means = [evaluate(world.qrels, run, ["nDCG@10"])["nDCG@10"] for run in world.runs]
        spread[world.kind].append(float(np.ptp(means)))
        alike[world.kind].append(correlation(world.scores[0].ravel(), world.scores[1].ravel()))
    assert np.mean(spread["equal"]) < np.mean(spread["unequal"])
    assert np.mean(alike["equal"]) < np.mean(alike["redundant"])


def test_a_world_is_the_same_for_the_same_seed_and_its_judged_queries_come_first() -> None:
    one, again = FusionWorld.draw(7, fresh=20), FusionWorld.draw(7, fresh=20)
    assert np.array_equal(one.scores, again.scores, equal_nan=True)
    assert len(one.queries) == one.judged + 20
    assert one.qrels.rows == len(one.queries) * DOCUMENTS
    assert FusionWorld.draw(11, fresh=20).grades.sum() != one.grades.sum()


def test_margins_are_against_the_best_rival_of_each_world() -> None:
    worlds = [
        {"values": {"auto": [0.5, 0.7], "comb-sum": [0.5, 0.5], "convex": [0.4, 0.4], "rrf": [0.1, 0.3],
                    "stacked": [0.9, 0.9], "run 0": [0.6, 0.5], "run 1": [0.2, 0.2]}},
    ]  # fmt: skip
    assert defaults.margins(worlds) == pytest.approx([0.05])
    assert defaults.margins(worlds, "best run") == pytest.approx([0.0])
    assert defaults.margins(worlds, "rrf") == pytest.approx([-0.35])


def test_worlds_and_runs_are_reported_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "FRESH", 40)
    monkeypatch.setattr(defaults.Config, "worlds", property(lambda self: range(3, 5)))
    command = ["reproduce", "fusion-defaults", "--data", "worlds", "--scale", "smoke", "--workers", "1"]
    command += ["--json", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    cells = json.loads(capsys.readouterr().out)
    rows = {(cell["row"], cell["part"], cell["measure"]): cell for cell in cells}
    mean, lowest = rows["auto", "all", "nDCG@10 over the best"], rows["auto", "all", "lowest"]
    assert mean["n"] == lowest["n"] == 2
    assert lowest["value"] <= mean["value"]
    assert 0 <= rows["one run", "all", "share within the floor"]["value"] <= 1
    monkeypatch.setattr(defaults, "world", None)  # everything is there
    file = tmp_path / "values.parquet"
    assert main([*command, "--per-query", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == cells
    means = {
        (one["seed"], one["method"]): one for one in means_of(read_per_query(file), by=("seed", "method"))
    }
    assert {seed for seed, _ in means} == {3, 4}
    assert means[3, "auto"]["n"] == 40
    rivals = [
        max(
            one["value"]
            for (at, name), one in means.items()
            if at == seed and name not in ("auto", "stacked")
        )
        for seed in (3, 4)
    ]
    over = np.mean([means[seed, "auto"]["value"] for seed in (3, 4)]) - np.mean(rivals)
    assert over == pytest.approx(mean["value"], abs=1e-5)


def test_a_folder_of_runs_is_held_out(tmp_path: Path) -> None:
    world = FusionWorld.draw(6, fresh=0)
    queries = world.queries[:30]
    for run in world.runs[:2]:
        write_run(run[queries], tmp_path / f"{run.name.replace(' ', '-')}.run")
    write_qrels(world.qrels[queries], tmp_path / "qrels.txt")
    result = defaults.reproduce(defaults.Config(data=str(tmp_path)), tmp_path / "out", workers=1)
    rows = {(cell.row, cell.variant, cell.measure): cell for cell in result.cells}
    over = rows["auto over best run", "relevant from 1", "nDCG@10"]
    worse = rows["auto over best run", "relevant from 1", "nDCG@10, queries worse"]
    assert over.low <= over.value <= over.high
    assert 0 <= worse.value <= worse.n == 30
    assert rows["auto", "relevant from 1", "ECE@10"].n == 300
