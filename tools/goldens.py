"""Goldens: the output of every command on tiny inputs, recorded once and compared after a refactoring.

    python tools/goldens.py record  FOLDER [NAME …]    run the commands of the `isthmus` beside this python
    python tools/goldens.py compare FOLDER [NAME …]    run them again and name every difference

A golden is one JSON file per command: exit status, JSON output, and the SHA-256 of the files it wrote.
Messages are not recorded. Values that depend on a clock, a key or live noise are recorded by their type only.
Inputs are written here without the package, so that a refactoring cannot change both sides. The folder lies
outside the repository; commands whose names begin with `reproduce-` take minutes each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOCK = {"seconds", "tokens_per_second", "at", "last", "first", "processor"}
"""Keys whose values differ from run to run."""


@dataclass(frozen=True)
class Golden:
    """One command: `values` false records only the types of its JSON; `files` are hashed.

    Where live noise or a fresh key decides the last digits, numbers above 1 may differ by the share
    `tolerance`, others by `tolerance` itself.
    """

    name: str
    arguments: Sequence[str]
    values: bool = True
    json: bool = True
    files: tuple[str, ...] = ()
    tolerance: float = 0.0


def goldens() -> Iterator[Golden]:
    """Yield every command in the order of running; some need the files of earlier ones."""
    yield from _runs()
    yield from _training()
    yield from _private()
    yield from _service()
    yield from _failures()
    yield from _reproductions()


def _runs() -> Iterator[Golden]:
    measures = ("-m", "nDCG@10", "MAP", "MRR@10", "P@5(rel=2)", "ERR@20(gmax=2)", "R@20", "bpref", "RBP")
    yield Golden("evaluate", ("evaluate", "qrels", "a.run", "b.run", *measures))
    yield Golden("evaluate-by-query", ("evaluate", "qrels", "a.run", "--by-query"))
    for profile in ("trec_eval", "lightgbm", "sklearn"):
        yield Golden(f"evaluate-{profile}", ("evaluate", "qrels", "a.run", "--profile", profile))
    judged = ("a.run", "--qrels", "qrels", "--precision", "0.5")
    for method in ("auto", "platt", "isotonic", "temperature", "gamma", "beta", "softmax", "query-feature"):
        written = (f"{method}.run", f"{method}.calibrator")
        extra = ("-m", method, "-o", written[0], "--save", written[1])
        yield Golden(f"calibrate-{method}", ("calibrate", *judged, *extra), files=written)
    model = ("calibrate", "b.run", "--model", "auto.calibrator", "-o", "applied.run")
    yield Golden("calibrate-model", model, files=("applied.run",))
    for method in ("rrf", "borda", "comb-sum", "comb-mnz", "comb-mult-conf", "rl-sim", "isr", "rbc"):
        out = f"fused-{method}.run"
        yield Golden(f"fuse-{method}", ("fuse", "a.run", "b.run", "-m", method, "-o", out), files=(out,))
    for method in ("auto", "convex", "weighted"):
        out = f"learned-{method}.run"
        learned = ("fuse", "a.run", "b.run", "-m", method, "--qrels", "qrels", "-o", out, "--explain", "q1")
        yield Golden(f"fuse-learned-{method}", learned, json=False, files=(out,))
        saved = ("fuse", "a.run", "b.run", "-m", method, "--qrels", "qrels", "--save", f"{method}.fuser")
        yield Golden(f"fuse-saved-{method}", saved)
    yield Golden("fuse-model", ("fuse", "a.run", "b.run", "--model", "auto.fuser"))
    yield Golden("retrieve", ("retrieve", "corpus", "all", "-o", "bm25.run", "-k", "20"), files=("bm25.run",))
    pydocs = ("retrieve", "pydocs", "test", "-o", "pydocs.run", "--qrels", "pydocs.qrels", "-k", "50")
    yield Golden("retrieve-pydocs", pydocs, files=("pydocs.run", "pydocs.qrels"))


def _training() -> Iterator[Golden]:
    base = ("rows.txt", "--silos", "6", "--per-round", "3", "--rounds", "6", "--seed", "5")
    ways = {
        "default": (),
        "momentum": ("--server", "momentum"),
        "fedavg": ("--strategy", "fedavg", "--probe", "none"),
        "fedprox": ("--strategy", "fedprox"),
        "scaffold": ("--strategy", "scaffold", "--set", "local.optimiser=sgd"),
        "softmax": ("--loss", "softmax", "--epochs", "2"),
        "dirichlet": ("--dealing", "dirichlet-query"),
        "secure": ("--secure",),
    }
    for name, more in ways.items():
        # masks come from live keys, but the model depends only on the sum, in which they cancel
        out = f"run-{name}"
        yield Golden(f"train-{name}", ("train", *base, *more, "--out", out), files=(f"{out}/model",))
    yield Golden("train-one-worker", ("train", *base, "--workers", "1", "--out", "run-one"))
    yield Golden("train-resume", ("train", "--resume", "run-default"))
    ranked = ("rank", "run-default", "rows.txt", "-o", "ranked.run", "--qrels", "rows.qrels")
    yield Golden("rank", ranked, files=("ranked.run", "rows.qrels"))
    yield Golden(
        "train-synthetic", ("train", "synthetic", "--silos", "10", "--rounds", "3", "--out", "run-s")
    )


def _private() -> Iterator[Golden]:
    for silo in ("north", "south"):
        yield Golden(f"keys-new-{silo}", ("keys", "new", silo, silo), values=False)
    yield Golden("keys-trust", ("keys", "trust", "north", "south/south.card"), values=False)
    yield Golden("keys-trust-back", ("keys", "trust", "south", "north/north.card"), values=False)
    yield Golden("keys-wrap", ("keys", "wrap", "north", "-o", "boxes"), values=False)
    yield Golden(
        "keys-unwrap", ("keys", "unwrap", "south", "boxes/south.box", "--from", "north"), values=False
    )
    for silo in ("north", "south"):
        build = ("sketch", "build", "corpus", silo, "--budget", "9")
        yield Golden(f"sketch-build-{silo}", build, tolerance=0.01)  # keys decide which words share a cell
    yield Golden(
        "sketch-publish", ("sketch", "publish", "south", "north", "-o", "south.released"), values=False
    )
    ask = ("sketch", "ask", "north", "south.released", "w1 w2 w3", "-k", "3")
    yield Golden("sketch-ask", ask, values=False)
    many = ("sketch", "ask", "north", "south", "--queries", "queries.tsv", "-o", "cross.txt", "-k", "5")
    yield Golden("sketch-ask-many", many)
    yield Golden("ledger-show", ("ledger", "show", "south"))
    yield Golden("ledger-top", ("ledger", "show", "south", "--top", "3"))
    yield Golden("ledger-document", ("ledger", "show", "south", "--document", "d1"), values=False)
    for part in ("charges", "departures", "documents"):
        values = part == "documents"
        yield Golden(f"ledger-export-{part}", ("ledger", "export", "south", "--part", part), values=values)


def _service() -> Iterator[Golden]:
    made = ("keys", "make", "certificates", "--silos", "north,south", "--broker")
    yield Golden("keys-make", made)
    file = "certificates/broker/api-keys.json"
    yield Golden("keys-api-add", ("keys", "api", "add", file, "ada", "--days", "9"), values=False)
    yield Golden("keys-api-list", ("keys", "api", "list", file), values=False)
    yield Golden("new", ("new", "federation", "--silos", "north,south", "--port", "8460"))
    yield Golden("doctor", ("doctor",), values=False)


def _failures() -> Iterator[Golden]:
    """Yield commands that end early: exit status 1 for expected errors, 2 for usage, 0 for help."""
    for name, arguments in {
        "none": (),
        "help": ("--help",),
        "version": ("--version",),
        "mistyped": ("evaluat",),
        "evaluate-no-file": ("evaluate", "absent", "a.run"),
        "evaluate-usage": ("evaluate",),
        "evaluate-measure": ("evaluate", "qrels", "a.run", "-m", "nDGC@10"),
        "calibrate-method": ("calibrate", "a.run", "--qrels", "qrels", "-m", "plat", "-o", "x.run"),
        "calibrate-nothing": ("calibrate", "a.run"),
        "fuse-method": ("fuse", "a.run", "b.run", "-m", "rff", "-o", "x.run"),
        "retrieve-usage": ("retrieve", "corpus"),
        "retrieve-collection": ("retrieve", "pydcos", "test", "-o", "x.run"),
        "train-nothing": ("train",),
        "train-strategy": ("train", "rows.txt", "--strategy", "fedriks"),
        "train-setting": ("train", "rows.txt", "--set", "local.epoch=3"),
        "train-usage": ("train", "rows.txt", "--rounds", "0"),
        "rank-model": ("rank", "rows.txt", "rows.txt", "-o", "x.run"),
        "sketch-verb": ("sketch",),
        "sketch-budget": ("sketch", "publish", "south", "west", "-o", "x", "--epsilon", "50"),
        "ledger-absent": ("ledger", "show", "absent.ledger"),
        "keys-verb": ("keys", "mak"),
        "node-config": ("node", "--config", "absent.toml"),
        "broker-config": ("broker", "--config", "absent.toml"),
        "search-nobody": ("search", "words", "--broker", "http://127.0.0.1:9"),
        "new-there": ("new", "federation"),
        "reproduce-usage": ("reproduce",),
        "reproduce-paper": ("reproduce", "nothing"),
        "reproduce-only": ("reproduce", "csfltr", "--only", "BM25"),
        "reproduce-row": ("reproduce", "fedrisk", "--data", "letor", "--only", "FedRiks"),
    }.items():
        yield Golden(f"exit-{name}", arguments, json=False)


def _reproductions() -> Iterator[Golden]:
    for paper, data in {
        "calibrated-fusion": "labels",
        "private-features": "synthetic",
        "search": "pydocs",
        "csfltr": "synthetic",
        "fedrisk": "letor",
    }.items():
        arguments = ("reproduce", paper, "--data", data, "--scale", "smoke", "--out", f"reproduced-{paper}")
        tolerance = 0.1 if paper == "search" else 0.0  # nodes draw fresh noise
        yield Golden(f"reproduce-{paper}", arguments, tolerance=tolerance)


# The inputs


def write_inputs(folder: Path) -> None:
    """Write two runs with judgements, feature rows, a collection of two silos, and texts with labels."""
    draw = random.Random(7)
    _write_runs(folder, draw)
    _write_rows(folder / "rows.txt", 200, draw)
    for fold in (1, 2):
        (folder / "letor" / f"Fold{fold}").mkdir(parents=True)
        for part, queries in (("train", 90), ("vali", 15), ("test", 15)):
            _write_rows(folder / "letor" / f"Fold{fold}" / f"{part}.txt", queries, draw)
    _write_corpus(folder / "corpus", draw)
    _write_labels(folder / "labels", draw)
    texts = "".join(f"q{at}\t{' '.join(_words(draw, 5))}\n" for at in range(4))
    (folder / "queries.tsv").write_text(texts)


def _write_runs(folder: Path, draw: random.Random) -> None:
    qrels: list[str] = []
    runs: dict[str, list[str]] = {"a": [], "b": []}
    for query in range(24):
        grades = {f"d{at}": draw.choices((0, 1, 2), (6, 3, 1))[0] for at in range(40)}
        qrels += [f"q{query} 0 {document} {grade}" for document, grade in grades.items()]
        for name, skill in (("a", 1.0), ("b", 0.6)):
            scored = {document: skill * grade + draw.gauss(0, 1) for document, grade in grades.items()}
            best = sorted(scored, key=lambda document: -scored[document])[:25]
            runs[name] += [f"q{query} Q0 {d} {at + 1} {scored[d]:.5f} {name}" for at, d in enumerate(best)]
    (folder / "qrels").write_text("\n".join(qrels) + "\n")
    for name, lines in runs.items():
        (folder / f"{name}.run").write_text("\n".join(lines) + "\n")


def _write_rows(path: Path, queries: int, draw: random.Random) -> None:
    lines = []
    for query in range(queries):
        for _ in range(8):
            features = [draw.gauss(0, 1) for _ in range(6)]
            merit = features[0] + 0.5 * features[1] + draw.gauss(0, 0.5)
            row = " ".join(f"{at + 1}:{value:.5f}" for at, value in enumerate(features))
            lines.append(f"{int(merit > 0.3) + int(merit > 1.5)} qid:{query + 1} {row}")
    path.write_text("\n".join(lines) + "\n")


def _words(draw: random.Random, count: int) -> list[str]:
    return [f"w{min(int(draw.paretovariate(0.7)), 300)}" for _ in range(count)]


def _write_corpus(folder: Path, draw: random.Random) -> None:
    """Write a BEIR collection: 120 documents, 20 queries."""
    (folder / "qrels").mkdir(parents=True)
    documents = [
        {"_id": f"d{at}", "title": " ".join(_words(draw, 4)), "text": " ".join(_words(draw, 50))}
        for at in range(120)
    ]
    queries = [{"_id": f"q{at}", "text": " ".join(_words(draw, 4))} for at in range(20)]
    for name, records in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    judged = [f"q{at}\td{draw.randrange(120)}\t1" for at in range(20)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(("query-id\tcorpus-id\tscore", *judged)) + "\n")


def _write_labels(folder: Path, draw: random.Random) -> None:
    """Write 160 short texts under five labels, in two folds."""
    (folder / "folds").mkdir(parents=True)
    words = {str(label): [f"{name}{at}" for at in range(6)] for label, name in enumerate("vwxyz")}
    labels = [draw.choices(sorted(words), (3, 3, 2, 1, 1))[0] for _ in range(160)]
    texts = [" ".join(draw.choices(words[label], k=3) + _words(draw, 4)) for label in labels]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    (folder / "labels.txt").write_text("\n".join(labels) + "\n")
    for fold in range(2):
        order = [(at + 80 * fold) % 160 for at in range(160)]
        parts: dict[str, Any] = {"test": order[:50], "val": order[50:90], "train": order[90:]}
        parts["label_descriptions"] = {label: " ".join(own) for label, own in words.items()}
        (folder / "folds" / f"{fold}.json").write_text(json.dumps(parts))


# Recording and comparing


def run(golden: Golden, folder: Path) -> dict[str, Any]:
    """Run a command in a folder. Returns its golden, ready to be written."""
    command = [sys.executable, "-m", "isthmus", *golden.arguments, *(["--json"] if golden.json else [])]
    environment = {**os.environ, "ISTHMUS_CACHE": str(folder / ".cache"), "COLUMNS": "80"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    result: dict[str, Any] = {"exit": done.returncode}
    if golden.json and done.returncode == 0:
        result["json"] = steady(json.loads(done.stdout), values=golden.values)
    if done.returncode == 1:
        result["lines of stderr"] = len(done.stderr.strip().splitlines())
    result["files"] = {name: _digest(folder / name) for name in golden.files}
    return result


def steady(value: Any, *, values: bool) -> Any:
    """Return JSON with types in place of clock-dependent values; without `values`, of all values."""
    if isinstance(value, dict):
        return {key: steady(inner, values=values and key not in CLOCK) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [steady(one, values=values) for one in value]
        return inner if values else inner[:1]
    return value if values else type(value).__name__


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def differences(before: Any, after: Any, tolerance: float = 0.0, where: str = "") -> Iterator[str]:
    """Yield every place where two goldens differ; without tolerance, numbers must be bit-identical."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.get("measure") == after.get("measure") == "processor seconds":
            return
        for key in (*before, *(key for key in after if key not in before)):
            yield from differences(before.get(key), after.get(key), tolerance, f"{where}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for at, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, tolerance, f"{where}/{at}")
    elif before != after and not _close(before, after, tolerance):
        yield f"{where}: {_short(before)} → {_short(after)}"


def _close(before: Any, after: Any, tolerance: float) -> bool:
    if not all(isinstance(one, int | float) for one in (before, after)):
        return False
    return abs(before - after) <= tolerance * max(1.0, abs(before)) or (
        math.isnan(before) and math.isnan(after)
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}…"


def main() -> int:
    """Record or compare; the exit status of a comparison is 1 if anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("deed", choices=("record", "compare"))
    parser.add_argument("folder", type=Path, help="where the goldens lie")
    parser.add_argument("names", nargs="*", help="commands whose name begins so; all, unless given")
    parser.add_argument("--cheap", action="store_true", help="no reproductions")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    different = 0
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_inputs(work)
        for golden in goldens():
            slow = golden.name.startswith("reproduce-")
            named = not options.names or golden.name.startswith(tuple(options.names))
            if (options.cheap and slow) or not named:
                continue
            different += _handle(options.deed, options.folder, golden, run(golden, work))
    print(f"{different} goldens differ" if options.deed == "compare" else "recorded")
    return 1 if different else 0


def _handle(deed: str, folder: Path, golden: Golden, result: dict[str, Any]) -> bool:
    file = folder / f"{golden.name}.json"
    if deed == "record":
        file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{file.stem}: exit {result['exit']}", flush=True)
        return False
    if not file.exists():
        print(f"{file.stem}: not recorded", flush=True)
        return True
    before = json.loads(file.read_text(encoding="utf-8"))
    changes = list(differences(before, result, golden.tolerance))
    print(f"{file.stem}: {'equal' if not changes else f'{len(changes)} differences'}", flush=True)
    for line in changes[:20]:
        print(f"  {line}", flush=True)
    return bool(changes)


if __name__ == "__main__":
    sys.exit(main())
