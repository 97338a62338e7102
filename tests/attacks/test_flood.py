"""A flood of strangers and a hostile silo beside twenty people who search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_search_fails_in_a_flood(soak_count) -> None:
    documents, seconds, deadline = soak_count(60, 5_000), soak_count(4, 300), soak_count(20_000, 2_000)
    script = "import json, sys; from benchmarks.flood import main; "
    script += f"json.dump(main({documents}, {seconds}, {deadline}), sys.stdout)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=1700
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    slowest, memory = json.loads(done.stdout)
    assert memory["ours"] < (1.1 if seconds > 100 else 1.5)
    if os.environ.get("ISTHMUS_SOAK") == "1":  # a short trial among other tests says nothing about times
        assert slowest["ours"] <= 2.0
