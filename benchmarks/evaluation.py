"""Evaluation beside pytrec_eval in memory, and beside ranx as whole processes.

In memory each side starts from the structures that it keeps between evaluations: `Qrels` and `Run` in
Isthmus, a `RelevanceEvaluator` and a dict of dicts in pytrec_eval; building them is timed separately. ranx
runs under the interpreter that ISTHMUS_RANX_PYTHON names, or under this one if it is installed here.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytrec_eval

from benchmarks._rows import row
from isthmus.evaluation import evaluate
from isthmus.tables import Qrels, Run

QUERIES, DEPTH, POOL = 10_000, 100, 200_000
MEASURES = ["nDCG@10(gain=linear)", "MAP", "MRR", "P@10", "R@100"]
THEIRS = {"ndcg_cut.10", "map", "recip_rank", "P.10", "recall.100"}

RANX = """
import sys
from ranx import Qrels, Run, evaluate
qrels = Qrels.from_file(sys.argv[1], kind="trec")
for path in sys.argv[2:]:
    print(path, evaluate(qrels, Run.from_file(path, kind="trec"), "ndcg@10", make_comparable=True))
"""


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    return [*in_memory(), whole_process()]


def in_memory() -> list[dict[str, Any]]:
    """Evaluate 10,000 queries × 100 documents with five measures."""
    judgements, lists = world()
    ours = Qrels.from_dict(judgements), Run.from_dict(lists)
    theirs = pytrec_eval.RelevanceEvaluator(judgements, THEIRS)
    found, peer = evaluate(*ours, MEASURES), theirs.evaluate(lists)
    expected = np.mean([row["ndcg_cut_10"] for row in peer.values()])
    if abs(found[MEASURES[0]] - expected) > 1e-9:
        raise RuntimeError(f"the two disagree: {found[MEASURES[0]]} and {expected}")
    fast, slow = alternating(lambda: evaluate(*ours, MEASURES), lambda: theirs.evaluate(lists))
    build, their_build = alternating(
        lambda: (Qrels.from_dict(judgements), Run.from_dict(lists)),
        lambda: pytrec_eval.RelevanceEvaluator(judgements, THEIRS),
    )
    return [
        row("evaluate 10k×100, 5 measures (s)", fast, slow, "pytrec_eval", goal=3),
        row("… built from dicts first (s)", build, their_build, "pytrec_eval, judgements only", goal=0),
    ]


def ranx_python() -> str | None:
    """Return the interpreter that has ranx: the one that ISTHMUS_RANX_PYTHON names, or this one, or None."""
    named = os.environ.get("ISTHMUS_RANX_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("ranx") else None)


def whole_process() -> dict[str, Any]:
    """Time `isthmus evaluate` on two runs in a fresh process, beside the same with ranx."""
    python = ranx_python()
    with tempfile.TemporaryDirectory() as folder:
        files = dl19() or written(Path(folder))
        command = [sys.executable, "-m", "isthmus", "evaluate", *files, "-m", MEASURES[0], "--json"]
        title = "isthmus evaluate, two runs, whole process (s)"
        if python is None:
            return row(title, best(lambda: run(command)), None, "ranx is not installed here", goal=5)
        script = Path(folder) / "with_ranx.py"
        script.write_text(RANX)
        ours, theirs = alternating(
            lambda: run(command), lambda: run([python, str(script), *files]), repeats=3
        )
        return row(title, ours, theirs, "ranx", goal=5)


def world() -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Return random judgements (80 a query, four in ten with a positive grade) and a random run over them."""
    random = np.random.default_rng(0)
    names = np.array([f"doc{number:07d}" for number in range(POOL)], dtype=object)
    judgements: dict[str, dict[str, int]] = {}
    lists: dict[str, dict[str, float]] = {}
    for query in range(QUERIES):
        documents = names[random.choice(POOL, DEPTH + 20, replace=False)].tolist()
        grades = random.choice(5, 80, p=[0.6, 0.2, 0.1, 0.06, 0.04]).tolist()
        lists[f"q{query}"] = dict(zip(documents[:DEPTH], random.normal(size=DEPTH).tolist(), strict=True))
        judgements[f"q{query}"] = dict(zip(documents[40:], grades, strict=True))
    return judgements, lists


def dl19() -> list[str] | None:
    """Return the paths of the TREC DL-19 judgements and of two runs; None unless ISTHMUS_DATA has them."""
    folder = Path(os.environ.get("ISTHMUS_DATA", "")) / "runs" / "trec-dl"
    names = ("qrels.dl19-passage.txt", "bm25.dl19.run", "colbert.dl19.run")
    return [str(folder / name) for name in names] if (folder / names[0]).is_file() else None


def written(folder: Path) -> list[str]:
    """Write random judgements and runs of DL-19's size: 43 queries, 1,000 and 500 documents each."""
    random = np.random.default_rng(1)
    files = [folder / "qrels.txt", folder / "first.run", folder / "second.run"]
    with open(files[0], "w") as stream:
        for query in range(43):
            chosen = random.choice(2000, 200, replace=False)
            stream.writelines(f"{query} 0 d{document} {random.integers(4)}\n" for document in chosen)
    for path, depth in zip(files[1:], (1000, 500), strict=True):
        with open(path, "w") as stream:
            for query in range(43):
                chosen = random.choice(2000, depth, replace=False)
                scores = -np.sort(-random.random(depth))
                rows = enumerate(zip(chosen, scores, strict=True), 1)
                stream.writelines(f"{query} Q0 d{d} {rank} {score:.6f} x\n" for rank, (d, score) in rows)
    return [str(path) for path in files]


def run(command: list[str]) -> None:
    """Run a process without showing its output; CalledProcessError if it fails."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def best(work: Callable[[], object], repeats: int = 5) -> float:
    """Return the shortest of several times, in seconds."""
    return min(seconds(work) for _ in range(repeats))


def alternating(
    ours: Callable[[], object], theirs: Callable[[], object], repeats: int = 5
) -> tuple[float, float]:
    """Return the shortest times of both, measured in turn so that other load affects both alike."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def seconds(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
