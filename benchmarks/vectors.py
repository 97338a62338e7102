"""Nearest vectors: Isthmus's index beside a graph by faiss, both over int8, at the same recall.

    python -m benchmarks.vectors 1000000      another number of vectors

Vectors encode sentences of the built-in collection, and of others under ISTHMUS_DATA, by bge-small if it is
installed, else by latent semantic analysis. Further vectors up to the requested number are mixtures v +
0.35·(v′ − v″) of these, of unit length. Queries are those of the collections. Times are of one thread.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks._rows import limited, row
from isthmus.corpora import load
from isthmus.encoders import Lsa, encode_cached
from isthmus.engines import VectorIndex

COUNT, QUERIES, DEPTH, BATCH = 100_000, 200, 100, 5_000
SENTENCES = 20_000
LINKS, BUILD = 16, 128
RECALL, SLACK, LIMIT_OPEN = 0.98, 0.003, 0.5

Rows = NDArray[np.float32]


def main(count: int = COUNT) -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    known, queries = _encoded()
    nearest = _nearest(known, queries, count)
    with tempfile.TemporaryDirectory() as folder:
        ours = _ours(Path(folder), known, queries, nearest, count)
    peer = _faiss(known, queries, nearest, count, ours["recall"] - SLACK)
    at = f"vectors: {count:,} of {known.shape[1]}"
    rows = [
        limited(f"{at}, share of the nearest {DEPTH} that is missed", 1 - ours["recall"], 1 - RECALL),
        limited(f"{at}, opening (s)", ours["open"], LIMIT_OPEN),
    ]
    for name, unit, goal in (("search", "ms", 0.5), ("build", "s", 0.5), ("memory", "MB", 0.5)):
        rows.append(row(f"{at}, {name} ({unit})", ours[name], peer[name], "faiss HNSW int8", goal=goal))
    print({"ours": ours, "faiss": peer}, file=sys.stderr)
    return rows


def _encoded() -> tuple[Rows, Rows]:
    """Return vectors of sentences and of queries."""
    names = ["pydocs"] + [name for name in ("npl", "cran", "med", "cisi") if "ISTHMUS_DATA" in os.environ]
    sentences, asked = dict[str, None](), list[str]()
    for name in names:
        corpus = load(name)
        for text in corpus.documents.texts:
            sentences |= dict.fromkeys(
                part for part in re.split(r"(?<=[.!?])\s+|\n\n", text) if len(part) > 30
            )
        asked += corpus.queries.texts[:QUERIES]
    texts, rng = list(sentences), np.random.default_rng(0)
    chosen = [texts[at][:300] for at in rng.permutation(len(texts))[:SENTENCES]]
    asked = [asked[at] for at in rng.permutation(len(asked))[:QUERIES]]
    encoder = _encoder(chosen)
    queries = getattr(encoder, "encode_queries", encoder.encode)(asked)
    return encode_cached(encoder, chosen), queries[queries.any(axis=1)]


def _encoder(texts: list[str]) -> Any:
    try:
        from isthmus.encoders import load_encoder

        return load_encoder("bge-small")
    except Exception as error:
        print(f"latent semantic analysis: {error}", file=sys.stderr)
        return Lsa.fit(texts, dimensions=384)


def _batch(known: Rows, start: int, end: int) -> Rows:
    """Return rows `start` to `end` of the searched collection: the encoded sentences first, then mixtures."""
    rng, own = np.random.default_rng(start), known[np.arange(start, end) % len(known)]
    if start >= len(known):
        one, other = known[rng.integers(0, len(known), (2, end - start))]
        own = own + 0.35 * (one - other)
    norms = np.linalg.norm(own, axis=1, keepdims=True)
    return np.asarray(own / np.maximum(norms, 1e-9), dtype=np.float32)


def _batches(known: Rows, count: int) -> list[tuple[int, int]]:
    return [(start, min(start + BATCH, count)) for start in range(0, count, BATCH)]


def _nearest(known: Rows, queries: Rows, count: int) -> NDArray[np.int64]:
    """Return the nearest rows of every query by exhaustive comparison, batch by batch."""
    best, scores = np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0), np.float32)
    for start, end in _batches(known, count):
        scores = np.hstack((scores, queries @ _batch(known, start, end).T))
        best = np.hstack((best, np.tile(np.arange(start, end), (len(queries), 1))))
        if scores.shape[1] > DEPTH:
            top = np.argpartition(-scores, DEPTH, axis=1)[:, :DEPTH]
            best, scores = np.take_along_axis(best, top, 1), np.take_along_axis(scores, top, 1)
    return best


def _ours(
    folder: Path, known: Rows, queries: Rows, nearest: NDArray[np.int64], count: int
) -> dict[str, float]:
    before, began = _anonymous(), time.process_time()
    with VectorIndex.open(folder, known.shape[1], "benchmark") as index:
        for start, end in _batches(known, count):
            index.add(range(start + 1, end + 1), _batch(known, start, end), [(0, 1)] * (end - start))
            index.commit()
        while index.maintain():
            pass
    built, peak = time.process_time() - began, _status("VmHWM")
    began = time.perf_counter()
    with VectorIndex.open(folder, known.shape[1], "benchmark") as index:
        index.reader.search(queries[0], DEPTH)
        opened = time.perf_counter() - began
        figures = _measure(queries, nearest, lambda vector: index.reader.search(vector, DEPTH)[0] - 1)
        disk = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        memory = {"memory": _anonymous() - before, "peak": peak, "resident": _status("VmRSS"), "disk": disk}
        return {**figures, **memory, "build": built, "open": opened}


def _faiss(
    known: Rows, queries: Rows, nearest: NDArray[np.int64], count: int, recall: float
) -> dict[str, float]:
    """Measure a faiss graph in memory, with the first search breadth that reaches this recall."""
    import faiss

    faiss.omp_set_num_threads(1)
    before, began = _anonymous(), time.process_time()
    width, kind = known.shape[1], faiss.ScalarQuantizer.QT_8bit
    graph = faiss.IndexHNSWSQ(width, kind, LINKS, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efConstruction = BUILD
    graph.train(known)
    for start, end in _batches(known, count):
        graph.add(_batch(known, start, end))
    built, memory = time.process_time() - began, _anonymous() - before
    for breadth in (128, 192, 256, 384, 512, 768, 1024):
        settings = faiss.SearchParametersHNSW(efSearch=breadth)

        def search(vector: Rows, settings: Any = settings) -> NDArray[np.int64]:
            return np.asarray(graph.search(vector[None], DEPTH, params=settings)[1][0])

        figures = _measure(queries, nearest, search)
        if figures["recall"] >= recall:
            break
    return {**figures, "build": built, "memory": memory}


def _measure(
    queries: Rows, nearest: NDArray[np.int64], search: Callable[[Rows], NDArray[np.integer[Any]]]
) -> dict[str, float]:
    """Return the share of the nearest rows that are returned, and processor milliseconds per query."""
    search(queries[0])
    began = time.process_time()
    results = [search(vector) for vector in queries]
    took = (time.process_time() - began) / len(queries) * 1000
    shares = [np.isin(best, hits).mean() for best, hits in zip(nearest, results, strict=True)]
    return {"recall": float(np.mean(shares)), "search": took}


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) / 1000 for line in lines if line.startswith(key))


def _anonymous() -> float:
    """Return the process's own memory in MB, without memory-mapped files, which the system may reclaim."""
    return _status("RssAnon")


if __name__ == "__main__":
    for each in main(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT):
        print(each)
