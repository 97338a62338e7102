"""Any small LETOR folder trains, or one line says why not."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import command_line

SOAKING = os.environ.get("ISTHMUS_SOAK") == "1"
LAYOUTS = ("file", "train.txt", "train and test", "fold", "NAME.train")


def rows(queries: int, rng: np.random.Generator, *, relevant: float, ungraded: bool) -> str:
    """LETOR lines: lists of one to five documents, some without a relevant one; one line may lack a grade."""
    lines = []
    for query in range(queries):
        grades = rng.integers(0, 3, rng.integers(1, 6)) * (rng.random() < relevant)
        for grade in grades:
            values = " ".join(f"{at}:{value:.3f}" for at, value in enumerate(rng.random(3), 1))
            lines.append(f"{grade} qid:{query} {values}")
    if ungraded:
        at = int(rng.integers(len(lines)))
        lines[at] = lines[at].partition(" ")[2]
    return "\n".join(lines) + "\n"


def write(folder: Path, layout: str, queries: int, write_part: Callable[[int], str]) -> Path:
    """A data set of that layout; returns what a user would name."""
    names = {
        "file": ["rows.txt"],
        "train.txt": ["train.txt"],
        "train and test": ["train.txt", "test.txt"],
        "fold": ["Fold1/train.txt", "Fold1/vali.txt", "Fold1/test.txt"],
        "NAME.train": ["small.train", "small.test"],
    }[layout]
    for at, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(write_part(queries if at == 0 else max(1, queries // 4)))
    return folder / "rows.txt" if layout == "file" else folder


@settings(max_examples=25 if SOAKING else 12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    queries=st.integers(1, 60),
    layout=st.sampled_from(LAYOUTS),
    relevant=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    ungraded=st.sampled_from([False, False, False, True]),
    options=st.sampled_from(
        [(), (), ("--dealing", "dirichlet-query"), ("--secure",), ("--strategy", "fedavg"), ("--probe", "3")]
    ),
    seed=st.integers(0, 99),
)
def test_any_small_folder_trains_or_says_why_not(queries, layout, relevant, ungraded, options, seed):
    rng = np.random.default_rng(seed)

    def part(count: int) -> str:
        return rows(count, rng, relevant=relevant, ungraded=ungraded)

    with tempfile.TemporaryDirectory() as folder:
        data = write(Path(folder), layout, queries, part)
        words = (
            "train",
            data,
            "--rounds",
            "2",
            "--workers",
            "1",
            "--out",
            f"{folder}/run",
            "--json",
            *options,
        )
        done = command_line.isthmus(*words, check=False)
        talk = [line for line in done.stderr.splitlines() if line.startswith("isthmus: ")]
        if done.returncode:
            assert done.returncode == 1, done.stderr
            assert len(talk) == 1, done.stderr
            assert "parts" not in talk[0]
            reasons = ("relevant document", "folds", "grade", "secure", "silos", "held back", "qid")
            assert any(reason in talk[0] for reason in reasons), talk[0]
        else:
            result = json.loads(done.stdout)
            assert result["rounds"] == 2
        enough = queries >= 25 and relevant >= 0.5 and not ungraded
        assert not (enough and done.returncode and options != ("--probe", "3")), done.stderr
