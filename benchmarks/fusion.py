"""Fusion beside ranx, warm and as whole processes; calibration beside exact gradient boosting.

Two runs of 1,000 queries × 1,000 documents that share half their documents. ranx runs under the interpreter
that ISTHMUS_RANX_PYTHON names, or under this one if it is installed here; it is compiled and warm before it
is timed, in turn with Isthmus. QueryFeature's peer is scikit-learn's GradientBoosting with the paper's
parameters on the same features. It takes many minutes on a million pairs, so only a tenth of its trees is
grown and the time is multiplied by ten (it is proportional to the number of trees); with ISTHMUS_BENCH_FULL=1
all are grown. Ranking the labels of every tweet has no peer: in each of ten folds rankers by BM25 neighbours,
words and latent semantics are fitted on the training part, stacked on the validation part and applied to the
test part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

from benchmarks._rows import limited, row
from benchmarks.evaluation import alternating, ranx_python, run, seconds
from isthmus.calibration import QueryFeature, list_features
from isthmus.fusion import fuse
from isthmus.tables import Run, write_run

QUERIES, DEPTH, POOL = 1_000, 1_000, 100_000
PAIRS, LIST = 1_000_000, 100

RANX_WARM = """
import sys, time
from ranx import Run, fuse
runs = [Run.from_file(path, kind="trec") for path in sys.argv[1:]]
ways = {"comb-mnz": ("mnz", "min-max"), "rrf": ("rrf", None)}
for method, norm in ways.values():
    fuse(runs=runs, method=method, norm=norm)
print("ready", flush=True)
for line in sys.stdin:
    method, norm = ways[line.strip()]
    began = time.perf_counter()
    fuse(runs=runs, method=method, norm=norm)
    print(time.perf_counter() - began, flush=True)
"""

RANX_WHOLE = """
import sys
from ranx import Run, fuse
runs = [Run.from_file(path, kind="trec") for path in sys.argv[1:3]]
fuse(runs=runs, method="mnz", norm="min-max").save(sys.argv[3], kind="trec")
"""


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [made(seed, QUERIES, DEPTH) for seed in (1, 2)]
        files = [str(folder / f"{run.name}.run") for run in runs]
        for each, path in zip(runs, files, strict=True):
            write_run(each, path)
        python = ranx_python()
        return [
            *warm(runs, files, python),
            whole(files, folder, python),
            *ten_million(),
            query_feature(),
            *tweets(folder),
        ]


def made(seed: int, queries: int, depth: int) -> Run:
    """Return a random run; two with different seeds share about half of every list."""
    shared, own = np.random.default_rng(0), np.random.default_rng(seed)
    lists = np.stack([shared.choice(POOL, 2 * depth, replace=False) for _ in range(queries)])
    chosen = np.argsort(own.random(lists.shape), axis=1)[:, :depth]
    documents = np.take_along_axis(lists, chosen, axis=1).reshape(-1)
    names = pa.array([f"doc{number:07d}" for number in range(POOL)])
    asked = pa.array([f"q{number}" for number in range(queries)])
    scores = own.normal(size=queries * depth)
    return Run.of(
        asked.take(pa.array(np.repeat(np.arange(queries), depth))),
        names.take(pa.array(documents)),
        scores,
        name=f"run{seed}",
    )


def warm(runs: list[Run], files: list[str], python: str | None) -> list[dict[str, Any]]:
    """Time both libraries in memory, warmed up."""
    ways = {"comb-mnz": "fuse 2 × 1k×1k, CombMNZ + min-max, warm (s)", "rrf": "fuse 2 × 1k×1k, RRF, warm (s)"}
    if python is None:
        times = {way: min(seconds(lambda way=way: fuse(runs, way)) for _ in range(5)) for way in ways}
        return [
            row(title, times[way], None, "ranx is not installed here", goal=3) for way, title in ways.items()
        ]
    command = [python, "-c", RANX_WARM, *files]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            stderr=subprocess.DEVNULL)  # fmt: skip
    with peer:
        told, asked = _pipes(peer)
        if told.readline().strip() != "ready":
            raise RuntimeError("ranx did not start")
        rows = []
        for way, title in ways.items():
            pairs = [(seconds(lambda way=way: fuse(runs, way)), _ask(asked, told, way)) for _ in range(7)]
            best = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
            rows.append(row(title, *best, "ranx, warm", goal=3))
        asked.close()
    return rows


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdout is None or process.stdin is None:
        raise RuntimeError("the process has no pipes")
    return process.stdout, process.stdin


def _ask(asked: IO[str], told: IO[str], way: str) -> float:
    asked.write(f"{way}\n")
    asked.flush()
    return float(told.readline())


def whole(files: list[str], folder: Path, python: str | None) -> dict[str, Any]:
    """Time fusing two TREC files into a TREC file, each side in a fresh process."""
    out = str(folder / "fused.run")
    ours = [sys.executable, "-m", "isthmus", "fuse", *files, "--method", "comb-mnz", "-o", out]
    title = "two TREC files to a fused one, whole process (s)"
    if python is None:
        return row(
            title,
            min(seconds(lambda: run(ours)) for _ in range(3)),
            None,
            "ranx is not installed here",
            goal=10,
        )
    theirs = [python, "-c", RANX_WHOLE, *files, str(folder / "theirs.run")]
    fast, slow = alternating(lambda: run(ours), lambda: run(theirs), repeats=2)
    return row(title, fast, slow, "ranx", goal=10)


def ten_million() -> list[dict[str, Any]]:
    """Time fusing ten million rows in two runs; the limit is half a minute."""
    runs = [made(seed, 5_000, DEPTH) for seed in (1, 2)]
    limit = 30.0
    rows = []
    for way in ("rrf", "comb-mnz"):
        took = seconds(lambda way=way: fuse(runs, way))
        rows.append(limited(f"fuse ten million rows, {way} (s)", took, limit))
    return rows


def query_feature() -> dict[str, Any]:
    """Time fitting and predicting a million pairs in lists of a hundred."""
    from sklearn.ensemble import GradientBoostingClassifier

    random = np.random.default_rng(0)
    groups = np.arange(PAIRS) // LIST
    truth = random.normal(size=PAIRS)
    scores = random.normal(5, 3, PAIRS // LIST)[groups] + 2 * truth
    y = random.random(PAIRS) < 1 / (1 + np.exp(3 - 2 * truth))

    def ours() -> None:
        QueryFeature().fit(scores, y, groups=groups).probabilities(scores, groups=groups)

    trees = 100 if os.environ.get("ISTHMUS_BENCH_FULL") == "1" else 10
    rows = list_features(scores, groups)
    peer = GradientBoostingClassifier(n_estimators=trees, max_depth=5, learning_rate=0.1, subsample=0.8)
    took = seconds(ours)
    theirs = seconds(lambda: peer.fit(rows, y).predict_proba(rows)) * 100 / trees
    name = "scikit-learn GradientBoosting" + ("" if trees == 100 else ", 10 trees × 10")
    return row("QueryFeature, fit and predict 1M pairs (s)", took, theirs, name, goal=10)


def tweets(folder: Path) -> list[dict[str, Any]]:
    """Time ranking labels for all 6,997 tweets, each by models fitted without it; limit: two minutes."""
    from isthmus.corpora import available

    if not available().get("twitter"):
        print("· the tweets are not here (set ISTHMUS_DATA): their labels are not ranked", file=sys.stderr)
        return []
    with patch.dict(os.environ, ISTHMUS_CACHE=str(folder)):  # an empty cache
        ranked: list[int] = []
        took = seconds(lambda: ranked.extend(_ranked_tweets(fold) for fold in range(10)))
    return [limited(f"label ranking of all {sum(ranked):,} tweets end to end (s)", took, 120.0)]


def _ranked_tweets(fold: int) -> int:
    """Rank the labels of one fold's test tweets, from texts to fused lists. Returns the number of tweets."""
    from isthmus.classification import Bm25Neighbours, Encoded, OneVsRest, Panel, Words, as_run
    from isthmus.encoders import Lsa
    from isthmus.fusion import Stacked
    from isthmus_reproduce.fusion.folds import label_fold

    data = label_fold("twitter", fold)
    latent = Encoded(Lsa.fit(data.train.texts, dimensions=128))
    rankers = {"BM25": Bm25Neighbours(), "words": OneVsRest(Words()), "latent": OneVsRest(latent, loss="log")}
    fitted = Panel(rankers).fit(data.train.texts, data.train.labels, data.documents)
    labels = data.documents.ids
    held, asked = (
        [as_run(part.ids, labels, scores, len(labels), name) for name, scores in found.items()]
        for part, found in ((part, fitted.scores(part.texts)) for part in (data.validation, data.test))
    )
    stacked = Stacked(calibrator="softmax", single_label=True)
    return len(stacked.fit(held, data.validation.qrels(data.documents)).fuse(asked))
