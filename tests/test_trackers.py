"""Trackers of experiments: what they are told, read back by their own libraries."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

import pytest

from easy_rows import easy
from isthmus.cli import main
from isthmus.cli.learn import measures_of, tracked_runs
from isthmus.report import TensorBoard, tracking
from isthmus.service.wire import LearnedVersion
from isthmus.tables import write_letor

MLFLOW = """
import json, sys
from pathlib import Path
from isthmus.report import MLflow, tracking

model = Path("model.json")
model.write_text("{}")
with tracking([MLflow()], "first", {"seed": 3, "rounds": {"count": 2}}) as tracked:
    tracked.record(1, {"validation/nDCG@10": 0.5, "weight/north": 0.25, "train/loss": None})
    tracked.record(2, {"validation/nDCG@10": 0.75})
    tracked.files.append(model)
try:
    with tracking([MLflow()], "second", {}):
        raise RuntimeError
except RuntimeError:
    pass
import mlflow
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("trial").experiment_id
runs = {run.info.run_name: run for run in client.search_runs([experiment])}
first = runs["first"]
history = client.get_metric_history(first.info.run_id, "validation/nDCG_10")
print(json.dumps({
    "status": {name: run.info.status for name, run in runs.items()},
    "params": first.data.params,
    "metrics": first.data.metrics,
    "steps": [[each.step, each.value] for each in history],
    "files": [each.path for each in client.list_artifacts(first.info.run_id)],
}))
"""


def series(folder):
    """Every measure of an event folder as (step, value), as TensorBoard reads it."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulators.EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def test_event_files_are_what_tensorboard_reads(tmp_path):
    measures = {"validation/nDCG@10": 0.5, "weight/Süd": -1e-3, "train/loss": float("nan"), "none": None}
    with tracking([TensorBoard(tmp_path)], "run", {}) as tracked:
        for step in (1, 2, 300):
            tracked.record(step, measures)
    values = series(tmp_path / "run")
    assert values["validation/nDCG@10"] == [(1, 0.5), (2, 0.5), (300, 0.5)]
    assert values["weight/Süd"] == [(step, pytest.approx(-1e-3)) for step in (1, 2, 300)]
    assert set(values) == {"validation/nDCG@10", "weight/Süd"}
    with tracking([TensorBoard(tmp_path)], "run", {}) as tracked:  # in the place of the run before
        tracked.record(1, {"validation/nDCG@10": 0.25})
    assert series(tmp_path / "run")["validation/nDCG@10"] == [(1, 0.25)]


def test_training_is_followed_round_by_round_and_again_when_resumed(tmp_path, capsys):
    pytest.importorskip("flwr")
    data, out, events = tmp_path / "rows.txt", tmp_path / "run", tmp_path / "events"
    write_letor(easy("train", 40), data)
    options = ["--silos", "4", "--rounds", "3", "--out", str(out), "--tensorboard", str(events)]
    assert main(["train", str(data), *options, "--json"]) == 0
    final = json.loads(capsys.readouterr().out)["final"]
    rounds = json.loads((out / "rounds.json").read_text())
    values = series(events / "run")
    assert values["validation/nDCG@10(empty=skip)"] == [
        (each["round"], pytest.approx(each["measure"], abs=1e-6)) for each in rounds
    ]
    for silo, weight in rounds[-1]["weights"].items():
        assert values[f"weight/{silo}"][-1] == (3, pytest.approx(weight, abs=1e-6))
    assert values["test/nDCG@10"] == [(3, pytest.approx(final["nDCG@10"], abs=1e-6))]
    capsys.readouterr()
    assert main(["train", "--resume", str(out), "--tensorboard", str(events)]) == 0
    assert "events/run" in "".join(capsys.readouterr().err.replace("│", "").split())
    assert main(["train", str(data), "--tensorboard", str(data)]) == 1
    assert capsys.readouterr().err == f"isthmus: {data} is a file (expected a folder)\n"
    assert series(events / "run").keys() <= values.keys()


def test_a_learning_run_has_measures_by_model_and_silo(tmp_path):
    record = {
        "kind": "linear",
        "models": {"linear": {"nDCG@10": 0.4, "difference": {"mean": 0.02}}, "baseline": {"nDCG@10": 0.38}},
        "calibration": {"before": {"ece": 0.2}, "after": {"ece": 0.05, "floor": 0.03}},
        "weights": {"north": 0.75},
        "risks": {},
        "queries": 30,
        "relevant": 60,
        "seconds": 1.5,
    }
    version = LearnedVersion(version="v1", learned="", mode="masked", by="ada", record=record)
    measures = measures_of(version)
    assert measures["nDCG@10/baseline"] == 0.38
    assert measures["gain/linear"] == 0.02
    assert measures["calibration error/after"] == 0.05
    assert measures["weight/north"] == 0.75
    nothing = version.model_copy(update={"record": {"left_out": {}}})
    assert measures_of(nothing) == {}
    arguments = Namespace(tensorboard=str(tmp_path), mlflow=False, mode="masked")
    history = [version, nothing, version]  # the latest first, as brokers list them
    with tracked_runs(arguments, lambda: history):
        pass
    assert series(tmp_path / "learn")["weight/north"] == [(1, 0.75), (3, 0.75)]


def test_mlflow_has_parameters_measures_by_round_and_files(tmp_path, integrations_python):
    source = Path(__file__).parents[1] / "src"
    store = {"MLFLOW_TRACKING_URI": (tmp_path / "runs").as_uri(), "MLFLOW_EXPERIMENT_NAME": "trial"}
    store["MLFLOW_ALLOW_FILE_STORE"] = "true"  # the database needs all of MLflow, not its slim form
    store["MLFLOW_DISABLE_TELEMETRY"] = "true"
    done = subprocess.run(
        [integrations_python, "-c", MLFLOW],
        cwd=tmp_path,
        env={**os.environ, **store, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == {"first": "FINISHED", "second": "FAILED"}
    assert told["params"] == {"seed": "3", "rounds.count": "2"}
    assert told["steps"] == [[1, 0.5], [2, 0.75]]
    assert told["metrics"]["weight/north"] == 0.25
    assert told["files"] == ["model.json"]


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="MLflow is installed here")
def test_without_mlflow_it_is_named_before_the_work(tmp_path, capsys):
    assert main(["train", "synthetic", "--mlflow", "--out", str(tmp_path / "run")]) == 1
    assert "pip install mlflow" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_loss_beyond_four_bytes_does_not_end_a_run(tmp_path):
    with tracking([TensorBoard(tmp_path)], "diverged", {}) as tracked:
        tracked.record(1, {"train/loss": 1e39})
        tracked.record(2, {"train/loss": -1e39})
    (file,) = (tmp_path / "diverged").iterdir()
    content = file.read_bytes()
    assert struct.pack("<f", math.inf) in content
    assert struct.pack("<f", -math.inf) in content
