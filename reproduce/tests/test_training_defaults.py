"""`reproduce training-defaults`: its sets, its choices with a family left out, and what a folder keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from isthmus.cli import main
from isthmus.evaluation import means_of, read_per_query
from isthmus.tables import Letor, write_letor
from isthmus_reproduce.fedrisk import defaults
from isthmus_reproduce.fedrisk.defaults import LAST, STOPPED, DataSet, Part, choice, fold_of


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Eighty queries of six documents whose grades follow two of five features; two rounds of training."""
    rng = np.random.default_rng(0)
    features = rng.random((480, 5)).astype(np.float32)
    grades = np.digitize(features[:, 0] + features[:, 1] + rng.normal(0, 0.2, 480), [1.0, 1.4])
    names = [f"q{query:02}" for query in range(80) for _ in range(6)]
    file = tmp_path / "tiny.txt"
    write_letor(Letor.of(names, features, grades.astype(np.int32)), file)
    sets = {"tiny": DataSet(str(file)), "tiny, 50 queries": DataSet(str(file), queries=50, samples=2)}
    monkeypatch.setattr(defaults, "SETS", sets)
    monkeypatch.setattr(defaults, "SMOKE", {"tiny": DataSet(str(file), folds=2, seeds=2)})
    monkeypatch.setattr(defaults, "ROUNDS", 2)
    fold_of.cache_clear()
    yield file
    fold_of.cache_clear()


def test_samples_are_drawn_once_and_dealt_into_folds(tiny: Path) -> None:
    folds = [fold_of("tiny, 50 queries", at) for at in range(10)]
    for fold in folds:
        parts = [set(table.queries) for table in (fold.train, fold.validation, fold.test)]
        assert [len(part) for part in parts] == [30, 10, 10]
        assert len(set.union(*parts)) == 50
    tested = [{query for fold in folds[at : at + 5] for query in fold.test.queries} for at in (0, 5)]
    assert [len(queries) for queries in tested] == [50, 50], "every query of a sample is tested once"
    assert tested[0] != tested[1]


def results(values: dict[str, dict[str, float]]) -> dict[Part, dict[str, object]]:
    """Two queries a set with these means by set and row."""
    return {
        Part(data, row, 0, 0): {
            "queries": ["a", "b"], LAST: [value - 0.1, value + 0.1], STOPPED: [0.0, 0.0],
        }
        for data, rows in values.items()
        for row, value in rows.items()
    }  # fmt: skip


def test_a_choice_is_made_without_the_family_that_it_is_reported_on() -> None:
    rows = ("default", "momentum 0", "momentum 0.5", "momentum 0.9")
    means = {
        "mq2008": (0.5, 0.1, 0.1, 0.9),  # alone it would choose 0.9
        "mq2008, 60 queries": (0.5, 0.1, 0.1, 0.7),
        "synthetic": (0.5, 0.6, 0.3, 0.2),
        "mslr-sample": (0.5, 0.6, 0.3, 0.2),
    }
    table = results({data: dict(zip(rows, each, strict=True)) for data, each in means.items()})
    left_out = choice(table, "momentum", "mq2008")
    assert left_out is not None
    option, differences = left_out
    assert option == "0"
    np.testing.assert_allclose(differences, -0.4)
    assert len(differences) == 4, "both sets of the family, two queries each"
    # a family counts once, however many sets it has: 0.9 has (0.8 + 0.2)/2, the default 0.5, 0 has 0.35
    option, differences = choice(table, "momentum", "synthetic") or ("", differences)
    assert option == "by the queries"
    np.testing.assert_allclose(differences, 0)


def test_sets_without_all_runs_do_not_count() -> None:
    table = results({"mq2008": {"default": 0.5}, "synthetic": {"default": 0.4}})
    assert choice(table, "momentum", "mq2008") is None
    assert choice(table, "release", "mq2008") is not None
    assert choice(table, "release", "lightgbm-example") is None
    half = {**table, Part("mq2008", "FedAvg", 0, 1): table[Part("mq2008", "default", 0, 0)]}
    assert defaults.by_query(half, "mq2008", [("default", LAST), ("FedAvg", LAST)]) == [], "no seed in common"
    alone = {part: one for part, one in table.items() if part.data == "mq2008"}
    assert choice(alone, "release", "mq2008") is None, "nothing is left to choose on"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert (
        main(["reproduce", "training-defaults", "--scale", "smoke", "--workers", "1", *words, "--json"]) == 0
    )
    cells: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return cells


def test_rows_are_added_one_by_one_and_reported_together(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, values = str(tmp_path / "out"), tmp_path / "values.csv"
    run(capsys, "--out", out, "--only", "default", "--only", "default, three in ten inverted")
    cells = run(capsys, "--out", out, "--only", "default, honest silos only", "--only", "centralised")
    kept = {
        str(cell["row"]): cell for cell in cells if cell["measure"] == "nDCG@10" and cell["table"] == "sets"
    }
    assert {"default", "centralised", "default, less centralised"} <= set(kept)
    assert "default, three in ten inverted, less default, honest silos only" in kept
    again = run(capsys, "--out", out, "--only", "default", "--per-query", str(values))
    assert [cell for cell in again if cell["row"] == "default"] == [
        cell for cell in cells if cell["row"] == "default"
    ]
    (mean,) = (one for one in means_of(read_per_query(values)) if one["method"] == "default")
    assert mean["value"] == pytest.approx(kept["default"]["value"], abs=1e-6)
    difference = float(str(kept["default, less centralised"]["value"]))
    assert difference == pytest.approx(
        float(str(kept["default"]["value"])) - float(str(kept["centralised"]["value"]))
    )


def test_a_set_or_a_row_that_is_not_there(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--data", "mq20008"], ["--only", "defualt"]):
        assert main(["reproduce", "training-defaults", "--out", str(tmp_path / "no"), *words]) == 1
        assert words[1] in capsys.readouterr().err
