"""`isthmus rank`: from a saved ranker and rows to lists that `evaluate` measures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.cli import main
from isthmus.evaluation import evaluate
from isthmus.rankers import MLP, Linear, LocalTraining, load_ranker
from isthmus.tables import Letor, read_qrels, read_run, write_letor


def rows(queries: int = 30, seed: int = 0) -> Letor:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(queries * 8, 5)).astype(np.float32)
    grades = np.digitize(features[:, 0] + rng.normal(0, 0.2, len(features)), [0, 1]).astype(np.int32)
    return Letor.of([str(1 + row // 8) for row in range(len(features))], features, grades)


def test_a_saved_ranker_ranks_a_file_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows()
    write_letor(data, tmp_path / "rows.txt")
    ranker = Linear(training=LocalTraining(learning_rate=0.03, epochs=30)).fit(data)
    ranker.save(tmp_path / "linear.ranker")
    out, qrels = str(tmp_path / "linear.run"), str(tmp_path / "rows.qrels")
    arguments = [str(tmp_path / "linear.ranker"), str(tmp_path / "rows.txt"), "-o", out, "--qrels", qrels]
    assert main(["rank", *arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("seconds") >= 0
    assert told == {"run": out, "model": "network", "queries": 30, "rows": 240}
    run = read_run(out)
    found = evaluate(read_qrels(qrels), run, ["nDCG@10"])["nDCG@10"]
    assert found == pytest.approx(evaluate(data.qrels(), ranker.rank(data), ["nDCG@10"])["nDCG@10"], abs=1e-6)
    assert found > 0.8


def test_a_run_folder_stands_for_its_model_and_a_split_for_the_data(tmp_path: Path) -> None:
    from isthmus.corpora import load_letor

    folder = tmp_path / "runs"
    folder.mkdir()
    test = load_letor("synthetic", split="test")
    MLP((4,), training=LocalTraining(batch=100)).fit(test).save(folder / "model")
    out = tmp_path / "test.run"
    assert main(["rank", str(folder), "synthetic", "--split", "test", "-o", str(out)]) == 0
    assert read_run(out).rows == test.rows
    assert load_ranker(folder / "model").rank(test).top(1).rows == len(read_run(out))


@pytest.mark.parametrize(
    ("model", "told"),
    [("absent", "No such file"), ("rows.txt", "is not a saved ranker"), ("folder", "No such file")],
)
def test_a_model_that_is_none_is_one_line_and_status_1(
    model: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_letor(rows(3), tmp_path / "rows.txt")
    (tmp_path / "folder").mkdir()
    arguments = [str(tmp_path / model), str(tmp_path / "rows.txt"), "-o", str(tmp_path / "out.run")]
    assert main(["rank", *arguments]) == 1
    complaint = capsys.readouterr().err
    assert told in complaint
    assert complaint.count("\n") == 1
    assert not (tmp_path / "out.run").exists()


def test_rows_of_another_width_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rows()
    Linear(training=LocalTraining()).fit(data).save(tmp_path / "ranker")
    write_letor(data.widened(7, missing=1.0), tmp_path / "wide.txt")
    arguments = [str(tmp_path / "ranker"), str(tmp_path / "wide.txt"), "-o", str(tmp_path / "out.run")]
    assert main(["rank", *arguments]) == 1
    assert "7 features where the ranker takes 5" in capsys.readouterr().err
