"""`isthmus train` from the outside: what it prints and writes, and that killing it costs nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from command_line import isthmus
from isthmus.rankers import load_ranker
from isthmus.tables import Letor, write_letor

ROUNDS = 12
TRAIN = (sys.executable, "-m", "isthmus", "train")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(3)
    features = rng.normal(size=(150 * 12, 20)).astype(np.float32)
    grades = np.digitize(features[:, :4].sum(axis=1) + rng.normal(size=len(features)), [1, 3])
    path = tmp_path_factory.mktemp("data") / "rows.txt"
    write_letor(Letor.of([f"q{row // 12}" for row in range(len(features))], features, grades), path)
    return path


@pytest.fixture(scope="module")
def options(data):
    words = (data, "--silos", 8, "--per-round", 4, "--rounds", ROUNDS, "--server", "momentum", "--seed", 5)
    return [str(word) for word in words]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    began = time.perf_counter()
    done = subprocess.run([*TRAIN, *options, "--out", out, "--json"], capture_output=True, check=True)
    return out, json.loads(done.stdout), time.perf_counter() - began


def test_what_it_prints_and_writes(whole, data):
    out, told, _ = whole
    assert set(told) == {"out", "rounds", "final", "model_sha256"}
    assert told["rounds"] == ROUNDS
    assert 0 < told["final"]["nDCG@10"] <= 1
    assert {"config.toml", "environment.json", "rounds.json", "metrics.json"} <= {
        path.name for path in out.iterdir()
    }
    assert load_ranker(out / "model").parameters_


def test_the_result_is_the_same_on_one_worker(options, whole, tmp_path):
    done = isthmus("train", *options, "--out", tmp_path / "run", "--workers", 1, "--json")
    assert json.loads(done.stdout)["model_sha256"] == whole[1]["model_sha256"]


@pytest.mark.soak
def test_kill_at_any_moment_and_resume(options, whole, tmp_path, soak_count):
    reference, told, seconds = whole
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    for trial in range(soak_count(1, 20)):
        out = tmp_path / f"run{trial}"
        moment = float(rng.uniform(0.3, seconds))
        running = subprocess.Popen(
            [*TRAIN, *options, "--out", str(out)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moment)
        running.send_signal(signal.SIGKILL)
        running.wait()
        if not (out / "config.toml").exists():  # killed before it had read its arguments
            isthmus("train", *options, "--out", out)
            continue
        resumed = json.loads(isthmus("train", "--resume", out, "--json").stdout)
        assert resumed["model_sha256"] == told["model_sha256"], f"killed after {moment:.3f} s"
        assert resumed["final"] == told["final"]
        assert (out / "model").read_bytes() == (reference / "model").read_bytes()
        assert not list(out.glob(".*.part")), "what the killed run left behind is cleared away"


def test_a_secure_run_says_what_holds_and_its_silos_write_down_what_leaves(data, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    told = [data, "--silos", 4, "--rounds", 2, "--secure", "--ledgers", tmp_path / "ledgers"]
    done = isthmus("train", *told, "--out", tmp_path / "run")
    assert "secure sum" in done.stderr
    assert "secure sum" in (tmp_path / "run" / "report.html").read_text()
    shown = isthmus("ledger", "show", tmp_path / "ledgers" / "silo-0.ledger").stdout
    assert "probe report" in shown
    assert shown.count("no DP guarantee") == 3
    refused = isthmus("train", *told, "--set", "judge=server", "--out", tmp_path / "both", check=False)
    assert refused.returncode == 1
    assert "one of these protections" in " ".join(refused.stderr.split())


def test_resuming_before_the_first_checkpoint_starts_over(whole, tmp_path):
    out = Path(shutil.copytree(whole[0], tmp_path / "run"))
    for name in ("checkpoint", "model", "metrics.json", "rounds.json", "environment.json"):
        (out / name).unlink()
    resumed = json.loads(isthmus("train", "--resume", out, "--json").stdout)
    assert resumed["model_sha256"] == whole[1]["model_sha256"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.txt"], "nowhere.txt"),
        (["--resume", "no-run-here"], "no run to resume"),
        (["--resume", "no-run-here", "--rounds", "8"], "settings it was begun with, not with --rounds"),
        ([], "nothing to train on"),
    ],
)
def test_a_foreseen_failure_is_one_line(arguments, said, tmp_path):
    done = isthmus("train", *arguments, check=False, folder=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_folder_with_a_checkpoint_is_said_to_be_one(whole, tmp_path):
    out = Path(shutil.copytree(whole[0], tmp_path / "run"))
    done = isthmus("train", "mq2008", "--rounds", "1", "--out", out, check=False)
    assert done.returncode == 1
    assert f"isthmus train --resume {out} goes on with it" in done.stderr
    assert "holds a run with another configuration" in done.stderr


def test_a_failing_round_is_told_and_can_be_resumed(options, tmp_path):
    broken = ["--set", "rounds.norm_limit=0"]  # every update is too long
    done = isthmus("train", *options, "--out", tmp_path / "run", *broken, check=False)
    assert done.returncode == 1
    assert "round 1 needs 1 usable answers" in done.stderr
