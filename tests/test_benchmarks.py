"""The benchmark runner: one table, one file, no benchmark lost because another failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

GOOD = """
def main():
    return [
        {"name": "fast", "ours": 1.0, "peer": 4.0, "peer_name": "turtle", "ratio": 4.0, "goal": 3},
        {"name": "limit", "ours": 0.5, "peer": None, "peer_name": None, "ratio": 0.6, "goal": 1, "x": 0},
    ]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of benchmarks: one that works and one that does not."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__main__.py").write_text((ROOT / "benchmarks" / "__main__.py").read_text(encoding="utf-8"))
    (package / "good.py").write_text(GOOD)
    (package / "broken.py").write_text("def main():\n    raise RuntimeError('no peer here')\n")
    return tmp_path


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def test_prints_a_table_and_writes_the_rows(folder: Path) -> None:
    done = bench(folder, "good")
    assert done.returncode == 0, done.stderr
    fast, limit = done.stdout.splitlines()[1:]
    assert fast.split() == ["fast", "1", "4", "turtle", "4.00×", "3×"]
    assert limit.endswith("below goal")
    rows = json.loads((folder / "bench.json").read_text())
    assert [set(row) for row in rows] == [{"name", "ours", "peer", "peer_name", "ratio", "goal"}] * 2


def test_a_failed_benchmark_is_told_and_costs_no_other(folder: Path) -> None:
    done = bench(folder)
    assert done.returncode == 1
    assert "RuntimeError: no peer here" in done.stderr
    assert "broken failed" in done.stderr
    assert len(json.loads((folder / "bench.json").read_text())) == 2


def test_an_unknown_name_is_wrong_usage(folder: Path) -> None:
    done = bench(folder, "goof")
    assert done.returncode == 2
    assert "there are: broken, good" in done.stderr
