"""`isthmus reproduce`: found by its entry point, parsed, refused in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli import commands, main
from isthmus.errors import ConfigError
from isthmus_reproduce.command import COMMANDS, EXPERIMENTS


def test_isthmus_finds_the_command() -> None:
    assert "reproduce" in {point.name for point in entry_points(group="isthmus.commands")}
    (found,) = (command for command in commands() if command.name == "reproduce")
    assert found is COMMANDS[0]


def test_every_experiment_has_a_configuration_and_a_way_to_run() -> None:
    script = "import importlib, sys; [importlib.import_module(name).reproduce for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", script, *EXPERIMENTS.values()], check=True, timeout=120)


def test_only_is_for_fedrisk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "csfltr", "--only", "BM25"]) == 1
    assert "--only" in capsys.readouterr().err


def test_a_look_is_at_small_data_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, taken = import_module(EXPERIMENTS["fedrisk"]), []

    def reproduced(config: Any, out: Path, workers: int | None = None) -> None:
        taken.append(config.data)
        raise ConfigError("enough")

    monkeypatch.setattr(experiment, "reproduce", reproduced)
    monkeypatch.setattr("isthmus.corpora.available", lambda: dict.fromkeys(experiment.DATA, "here"))
    monkeypatch.setattr(experiment, "SMOKE", ("mq2008",))
    for more in (("--scale", "smoke"), (), ("--scale", "smoke", "--data", "mslr-sample")):
        assert main(["reproduce", "fedrisk", *more]) == 1
    assert taken == ["mq2008", experiment.DATA[0], "mslr-sample"]
    csfltr = import_module(EXPERIMENTS["csfltr"])
    assert set(csfltr._names(csfltr.Config(scale="smoke"))) < set(csfltr._names(csfltr.Config()))


def test_an_encoder_is_for_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "csfltr", "--encoder", "lsa"]) == 1
    assert "--encoder" in capsys.readouterr().err


def test_cells_are_printed_with_named_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isthmus.report import Page
    from isthmus_reproduce.notebook import Cell, Reproduction
    from isthmus_reproduce.search import experiment

    cell = Cell("search", "default", "nDCG@10", float("nan"), "sound", "pydocs")
    result = Reproduction((cell,), Page("Search", ()), (tmp_path / "report.html",))
    monkeypatch.setattr(experiment, "reproduce", lambda config, out, workers: result)
    assert main(["reproduce", "search", "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    fields = "table row part variant mode data measure value low high n paper"
    assert list(record) == fields.split()
    assert record["value"] is None
