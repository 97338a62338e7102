"""Thousands of labels and more: quality beside two peers on real labels, costs on synthetic long tails.

    python -m benchmarks xmtc                        a linear classifier per label beside liblinear and PECOS
    python -m benchmarks.xmtc quality [SET …]        folds of Reuters and of the built-in label sets, as JSON
    python -m benchmarks.xmtc cost LABELS [peer]     fit and predict 10⁵ texts under so many labels, as JSON
    python -m benchmarks.xmtc summary FILE           what `quality` printed, as tables
    python -m benchmarks.xmtc growth                 the plot of docs/xmtc.md from the costs in docs/xmtc.json

The peers are Isthmus's linear classifier per label (DiSMEC) and PECOS's XR-Linear with its defaults, in an
interpreter of its own that ISTHMUS_PECOS_PYTHON names. Propensities, bands and all models come from a fold's
training texts. Where labels are pages, a text's own page is removed from every system's answers. ECE is that
of the first five labels; PECOS's scores are between 0 and 1, and those of the linear classifier are mapped by
1/(1 + e^−s).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._long_tail import write_long_tail
from benchmarks._rows import row
from isthmus.classification import (
    Bands,
    CandidateTable,
    LabelledTexts,
    MultiLabelClassifier,
    SparseLinear,
    TextRows,
    TextSpace,
    from_lists,
    label_counts,
    preset_rankers,
    same_text,
    weighed,
    without_own,
)
from isthmus.classification.label_report import label_report
from isthmus.corpora import load, read_xmc, stream_xmc
from isthmus.partition import folds
from isthmus.randomness import Streams

SETS = ("reuters", "pydocs-modules", "pydocs-see-also")
FOLDS, DEPTH = 5, 64
DOCS = Path(__file__).parent.parent / "docs"
PEER = Path(__file__).with_name("_pecos.py")
MEASURES = ("P@1", "P@5", "psP@5", "psnDCG@5", "tail recall@5", "ECE")
LINEAR, PECOS, FUSED = "DiSMEC (ours)", "PECOS XR-Linear", "calibrated fusion"
T_95 = {3: 4.30, 4: 3.18, 5: 2.78}
"""Student's t quantiles of 95 % intervals, by number of folds."""

Scores = dict[str, Any]
"""Candidates (texts × labels, SciPy CSR) by system."""


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    data = read_set("pydocs-modules")
    source = TextSpace.fit(data.texts, dimensions=0)
    texts = source.rows(data.texts)
    ours = _processor(lambda: SparseLinear().fit(texts, data.labels))
    answer = pecos(texts, source.rarity, data.labels, texts.take(slice(100)))
    if answer is None:
        return []
    told = "497 linear classifiers, 6,044 texts (s of a core)"
    return [row(told, ours, answer[1]["fit"], "PECOS XR-Linear", goal=0.1)]


def _processor(work: Any) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def read_set(name: str) -> LabelledTexts:
    """Load a label set by name; a label's own text is the body of its document, or empty."""
    corpus = load(name)
    at = {label: number for number, label in enumerate(corpus.documents.ids)}
    right = corpus.qrels.to_dict()
    labels = from_lists([[at[label] for label in right[text]] for text in corpus.queries.ids], len(at))
    names = corpus.documents.ids
    return LabelledTexts(corpus.queries.ids, corpus.queries.texts, labels, names, corpus.documents.bodies)


def quality(names: Iterable[str], count: int = FOLDS) -> list[dict[str, Any]]:
    """Measure quality: a record per set, fold and system."""
    records = []
    for name in names:
        data = read_set(name)
        parts = folds(len(data), FOLDS, Streams(0)("xmtc", name), groups=same_text(data.texts))
        for fold in range(count):
            train, test = data.take(parts != fold), data.take(parts == fold)
            records += judged(name, fold, train, test)
            print(f"· {name}, fold {fold}", file=sys.stderr, flush=True)
    return records


def judged(name: str, fold: int, train: LabelledTexts, test: LabelledTexts) -> list[dict[str, Any]]:
    """Return every system's measures on a fold, and on how many texts fusion is worse and better."""
    counts, (scores, singles) = label_counts(train.labels), systems(train, test)
    tail = Bands.head_and_tail(counts).of(counts) == 0
    bands = Bands()
    records: list[dict[str, Any]] = []
    gains = {system: _gains(matrix, test.labels) for system, matrix in scores.items()}
    for system, matrix in scores.items():
        likely = matrix.copy()
        if system == LINEAR:
            likely.data = 1 / (1 + np.exp(-likely.data))
        likely.data = np.clip(likely.data, 0, 1)
        report = label_report(
            likely,
            test.labels,
            counts=counts,
            instances=len(train),
            bands=bands.of(counts)[likely.indices],
            names=bands.names,
        )
        table = CandidateTable.rows_of(matrix)
        hits = table.hits(test.labels) & (table.ranks(matrix.data.astype(np.float64)) <= 5)
        wanted = tail[test.labels.indices].sum()
        measures = dict(report.measures)
        measures["tail recall@5"] = float((hits & tail[table.label]).sum() / max(wanted, 1))
        records.append(
            {
                "set": name,
                "fold": fold,
                "system": system,
                "single": system in singles,
                "measures": measures,
                "bands": list(report.by_band),
                "fusion worse": int((gains[FUSED] < gains[system] - 1e-9).sum()),
                "fusion better": int((gains[FUSED] > gains[system] + 1e-9).sum()),
            }
        )
    return records


def systems(train: LabelledTexts, test: LabelledTexts) -> tuple[Scores, set[str]]:
    """Return candidates of single rankers, peers and the calibrated fusion; and the single rankers' names."""
    space = TextSpace.fit(train.texts, train.documents.texts)
    known, queries, documents = map(space.rows, (train.texts, test.texts, train.documents.texts))
    rankers = preset_rankers("default", documents)
    rankers = {name: ranker for name, ranker in rankers.items() if not isinstance(ranker, SparseLinear)}
    scores: Scores = {
        name: ranker.fit(known, train.labels, documents).candidates(queries, DEPTH)
        for name, ranker in rankers.items()
    }
    scores[LINEAR] = SparseLinear().fit(known, train.labels, documents).candidates(queries, DEPTH)
    singles = set(scores)
    answer = pecos(known, space.rarity, train.labels, queries)
    if answer is not None:
        scores[PECOS] = answer[0]
    number = {name: at for at, name in enumerate(train.names)}
    own = np.array([number.get(name, -1) for name in test.ids], dtype=np.int64)
    links = bool((own >= 0).any())
    scores[FUSED] = MultiLabelClassifier(links=links).fit(train).predict(test.texts, test.ids)
    return {name: without_own(matrix, own) for name, matrix in scores.items()}, singles


def _gains(matrix: Any, labels: Any) -> Any:
    """Return nDCG@5 of every text."""
    return CandidateTable.rows_of(matrix).gains(matrix.data.astype(np.float64), labels)


def pecos(
    texts: TextRows, rarity: Any, labels: Any, queries: TextRows, *, k: int = DEPTH
) -> tuple[Any, dict[str, float]] | None:
    """Run PECOS. Returns its candidates and costs, or None without an interpreter that has it."""
    from scipy.sparse import csr_array, csr_matrix, load_npz, save_npz

    python = os.environ.get("ISTHMUS_PECOS_PYTHON")
    if not python:
        return None
    with tempfile.TemporaryDirectory() as folder:
        parts = {"train": weighed(texts, rarity), "labels": labels, "test": weighed(queries, rarity)}
        for name, matrix in parts.items():
            save_npz(Path(folder) / f"{name}.npz", csr_matrix(matrix).astype(np.float32), compressed=False)
        command = [python, str(PEER), folder, str(k), "2"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        scores = csr_array(load_npz(Path(folder) / "scores.npz"))
    scores.sort_indices()
    return scores, json.loads(done.stdout.splitlines()[-1])


def cost(labels: int, *, peer: bool) -> dict[str, Any]:
    """Measure one size in this process: processor and wall-clock seconds, and gigabytes."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        write_long_tail(folder, labels)
        costs: dict[str, Any] = {"labels": labels}
        began = time.process_time(), time.perf_counter()
        data = read_xmc(folder / "train.txt")
        costs |= {"texts": len(data), "read": time.process_time() - began[0]}
        names = tuple(map(str, range(labels)))
        ids = tuple(map(str, range(len(data))))
        train = LabelledTexts(ids, (), data.labels, names, ("",) * labels, features=data.features)
        if peer:
            test = TextRows(read_xmc(folder / "test.txt").features, counted=False)
            answer = pecos(
                TextRows(data.features, counted=False), np.ones(data.features.shape[1]), data.labels, test
            )
            return costs | {"peer": answer and answer[1]}
        del data
        began = time.process_time(), time.perf_counter()
        classifier = MultiLabelClassifier().fit(train)
        costs |= {"fit": time.process_time() - began[0], "fit clock": time.perf_counter() - began[1]}
        spent, tests, right = np.zeros(2), 0, 0.0
        for batch in stream_xmc(folder / "test.txt", batch=1_000):
            began = time.process_time(), time.perf_counter()
            predicted = classifier.predict(batch.features)
            spent += time.process_time() - began[0], time.perf_counter() - began[1]
            right += classifier.report(predicted, batch.labels).measures["P@1"] * len(batch)
            tests += len(batch)
    costs |= {"predict ms": 1000 * spent[0] / tests, "predict clock ms": 1000 * spent[1] / tests}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return costs | {"memory": peak, "P@1": right / tests}


def summary(records: list[dict[str, Any]]) -> str:
    """Format quality as tables: a line per set and system, the mean over folds and half a 95 % interval."""
    lines = []
    for name in dict.fromkeys(each["set"] for each in records):
        own = [each for each in records if each["set"] == name]
        bands = list(dict.fromkeys(band["band"] for each in own for band in each["bands"]))
        heads = [*MEASURES, *(f"ECE, {band}" for band in sorted(bands, key=_first_number))]
        lines += ["", f"**{name}**", "", "| | " + " | ".join(heads) + " | fusion worse, better on |"]
        lines.append("|---" * (len(heads) + 2) + "|")
        for system in dict.fromkeys(each["system"] for each in own):
            runs = [each for each in own if each["system"] == system]
            cells = [_interval([run["measures"][measure] for run in runs]) for measure in MEASURES]
            for head in heads[len(MEASURES) :]:
                cells.append(_pooled(runs, head.removeprefix("ECE, ")))
            worse, better = (sum(run[f"fusion {way}"] for run in runs) for way in ("worse", "better"))
            cells.append("" if system == FUSED else f"{worse:,}, {better:,}")
            lines.append(f"| {system} | " + " | ".join(cells) + " |")
    return "\n".join(lines[1:])


def growth() -> None:
    """Draw how costs grow with the number of labels."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "isthmus"
    from matplotlib import pyplot

    measured = json.loads((DOCS / "xmtc.json").read_text("utf-8"))
    names = {"fit": "fit, s of processor", "predict ms": "a text, ms of processor", "memory": "memory, GB"}
    figure, axes = pyplot.subplots(1, len(names), figsize=(3.4 * len(names), 3), layout="constrained")
    for axis, (name, label) in zip(axes, names.items(), strict=True):
        for who, style in (("isthmus", "o-"), ("PECOS", "s--")):
            known = [each for each in measured.get(who, ()) if name in each]
            axis.loglog([each["labels"] for each in known], [each[name] for each in known], style, label=who)
        axis.set(title=label, xlabel="labels")
    axes[0].legend()
    figure.savefig(DOCS / "images" / "xmtc-growth.svg", metadata={"Date": None})


def _first_number(band: str) -> int:
    return int(band.partition("–")[0].rstrip("+"))


def _interval(values: list[float]) -> str:
    """Format the mean over folds, and half a 95 % interval if there are three folds or more."""
    if len(values) < 3:
        return f"{np.mean(values):.3f}".replace("0.", ".")
    half = T_95[len(values)] * np.std(values, ddof=1) / np.sqrt(len(values))
    return f"{np.mean(values):.3f} ± {half:.3f}".replace("0.", ".")


def _pooled(runs: list[dict[str, Any]], band: str) -> str:
    """Format the mean ECE of a band over folds, and the mean floor."""
    rows = [each for run in runs for each in run["bands"] if each["band"] == band]
    if not rows:
        return "–"
    error, floor = (np.mean([each[name] for each in rows]) for name in ("ECE", "ECE floor 95%"))
    return f"{error:.3f} ({floor:.3f})".replace("0.", ".")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    what, *rest = sys.argv[1:]
    if what == "quality":
        print(json.dumps(quality(rest or SETS)))
    elif what == "cost":
        print(json.dumps(cost(int(rest[0]), peer=rest[1:] == ["peer"])))
    elif what == "summary":
        print(summary(json.loads(Path(rest[0]).read_text("utf-8"))))
    elif what == "growth":
        growth()
