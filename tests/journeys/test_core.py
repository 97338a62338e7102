"""The core where Flower and matplotlib are not installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from core_walk import Core
from isthmus.errors import MissingExtra, check_extra

HIDE = "import sys; sys.modules.update(dict.fromkeys(('flwr', 'grpc', 'matplotlib'))); "
COMMAND = HIDE + "from isthmus.cli import main; sys.exit(main())"
PROGRAM = HIDE + "exec(sys.argv[2])"  # after -c, as an interpreter has it
TRAINING = """
[training]
coordinator = "127.0.0.1:1"
data = "rows.txt"

[training.tls]
certificate = "tls.crt"
key = "tls.key"
authority = "ca.crt"
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def core(tmp_path: Path) -> Core:
    python = [sys.executable, "-c"]
    return Core([*python, COMMAND], [*python, PROGRAM], tmp_path, os.environ)


def test_files_and_masked_sums(core: Core) -> None:
    core.works_on_files()
    core.adds_under_masks()


def test_what_needs_an_extra_says_so_before_it_begins(core: Core) -> None:
    core.run("new", "federation", "--silos", "north,south")
    with open(core.folder / "federation/north/silo.toml", "a") as settings:
        settings.write(TRAINING)
    config = ["--config", "federation/north/silo.toml"]
    (core.folder / "run.toml").write_text('data = "synthetic"\n')
    for needs, extra in (
        (["node", *config], "train"),
        (["node", *config, "--training-only"], "train"),
        (["train", "synthetic"], "train"),
        (["coordinate", "--config", "coordinator.toml", "--train", "run.toml"], "train"),
        (["demo"], "train,plots"),
    ):
        told = core.run(*needs, status=1).stderr.splitlines()
        assert len(told) == 1, told
        assert told[0].rstrip('"}').endswith(f"pip install 'isthmus[{extra}]'")  # a server's log is JSON
        assert "listens at" not in told[0]


def test_figures_are_refused_before_the_work(core: Core) -> None:
    core.write_runs()
    command = ["fuse", "one.run", "two.run", "--qrels", "q.rels", "-o", "late.run", "--figures", "plots"]
    assert core.run(*command, status=1).stderr.endswith("pip install 'isthmus[plots]'\n")
    assert not (core.folder / "late.run").exists()


def test_a_report_is_read_without_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.report import Page, Plot, Section

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra):
        check_extra("plots", "a figure", "matplotlib")
    page = Page("Results", (Section("Gain", (Plot(lambda axes: None, "By round"),)),)).html()
    assert "By round (drawing a figure needs an optional package" in page
