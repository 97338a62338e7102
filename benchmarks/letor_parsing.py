"""Reading a LETOR file of 200 MB, and opening it from the cache, beside scikit-learn's reader.

The rows are the MSLR sample's if ISTHMUS_DATA has it, else random rows of the same shape; they are repeated
under new query ids until the file is large enough. All times are of the same file in the same process, the
best of alternating rounds.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._rows import row
from isthmus.randomness import Streams
from isthmus.tables import read_letor

PEER = "sklearn load_svmlight_file"
SIZE = 200_000_000
ROUNDS = 2
FEATURES = 136


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its two rows."""
    from sklearn.datasets import load_svmlight_file

    with tempfile.TemporaryDirectory() as folder:
        os.environ["ISTHMUS_CACHE"] = str(Path(folder) / "cache")
        path = Path(folder) / "train.txt"
        kind = write_rows(path)
        parsing, peer = [], []
        for _ in range(ROUNDS):
            parsing.append(seconds(lambda: read_letor(path, cache=False)))
            peer.append(seconds(lambda: load_svmlight_file(str(path), query_id=True)))
        read_letor(path)
        opening = [seconds(lambda: read_letor(path)) for _ in range(5)]
        told = f"{path.stat().st_size / 1e6:.0f} MB of {kind} rows"
    return [
        row(f"LETOR parsing, {told} (s)", min(parsing), min(peer), PEER, goal=4),
        row(f"LETOR from the cache, {told} (s)", min(opening), min(peer), PEER, goal=100),
    ]


def seconds(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write_rows(path: Path) -> str:
    """Write the file and return a description of its rows."""
    sample = Path(os.environ.get("ISTHMUS_DATA", "")) / "letor" / "mslr-fold1-sample" / "train.txt"
    real = sample.is_file()
    rows = sample.read_bytes() if real else made_up()
    with open(path, "wb") as stream:
        for copy in range(SIZE // len(rows) + 1):
            stream.write(re.sub(rb"qid:", b"qid:%d" % (copy + 1), rows))
    return "MSLR" if real else "made-up MSLR-like"


def made_up(rows: int = 5000) -> bytes:
    """Return random rows of MSLR's shape: 136 features, half of them counts, half six-digit decimals."""
    rng = Streams(0)("made-up rows")
    counts = rng.geometric(0.05, (rows, FEATURES // 2)) - 1
    weights = rng.normal(0, 10, (rows, FEATURES // 2))
    grades = rng.choice(5, rows, p=[0.52, 0.32, 0.13, 0.02, 0.01])
    lines = []
    for at in range(rows):
        values = np.where(rng.random(FEATURES // 2) < 0.2, "0", [f"{value:.6f}" for value in weights[at]])
        both = [str(value) for pair in zip(counts[at], values, strict=True) for value in pair]
        features = " ".join(f"{index}:{value}" for index, value in enumerate(both, 1))
        lines.append(f"{grades[at]} qid:{at // 120 + 1} {features} \r\n")
    return "".join(lines).encode()
