"""The ways to train on pairs across silos, side by side on the built-in collection.

This is a chapter of the demonstration. Documents of other silos are seen through their releases; judged pairs
lie inside silos alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray
from isthmus.corpora import load
from isthmus.evaluation import Interval, bootstrap
from isthmus.federation.semisupervised import ANCHORED, DEFAULT, CrossSilos, CrossTables, Releasing, Ways
from isthmus.randomness import Streams
from isthmus.report import Estimate, Table
from isthmus.tables import Corpus

Values = Mapping[str, FloatArray]
"""nDCG@10 of every test query, by way; the mean over silos if each has its own model."""

QUERIES = 160
SHOWN = {
    "BM25": "nobody trains",
    "Local": "every silo alone (mean)",
    "Local+": "and cross pairs it labels",
    "averaged labeller": "the four models averaged",
    "Global": "all silos' judged pairs",
    "CS-F-LTR": "and pairs the average labels",
    "all-zero": "and cross pairs labelled 0",
    "noise-aware Global": "judged pairs made noisy too",
    ANCHORED: "Global, drawn to BM25",
}


@dataclass(frozen=True)
class CotrainingStory:
    """A table of the ways to train, the share of pairs across silos, and a sentence on the result."""

    share: float
    table: Table
    sentence: str


def tell(*, seed: int = 0) -> CotrainingStory:
    """Release counts, train in every way, and compare on test queries."""
    streams = Streams(seed).under("cross-silo", "pydocs")
    releasing = Releasing(reader="shrink", width=8192)
    silos = CrossSilos(_sampled(load("pydocs"), streams), streams, releasing)
    values = _values(silos, seed)
    rows = tuple((row, what, float(values[row].mean()), _against(values, row)) for row, what in SHOWN.items())
    table = Table(("way", "what it learns from", "nDCG@10", "default better by"), rows, digits=3)
    return CotrainingStory(silos.cross_share, table, _sentence(values))


def _sampled(corpus: Corpus, streams: Streams) -> Corpus:
    """Return the collection with a sample of its judged queries."""
    judged = np.array([query in corpus.qrels for query in corpus.queries.ids], dtype=bool)
    queries = corpus.queries.take(judged)
    chosen = np.sort(streams("queries").permutation(len(queries))[:QUERIES])
    return replace(corpus, queries=queries.take(chosen))


def _values(silos: CrossSilos, seed: int) -> Values:
    tables = CrossTables(silos)
    candidates = tables.ranked[2]

    def measured(scores: NDArray[Any]) -> list[float]:
        return list(silos.evaluated(candidates, scores, 2).per_query("nDCG@10").values())

    models: dict[str, list[list[float]]] = {"BM25": [measured(tables.bm25(2))]}
    for way in Ways(tables, seed=seed).rankers():
        models.setdefault(way.row, []).append(measured(way.score(candidates)))
    return {row: np.mean(lists, axis=0) for row, lists in models.items()}


def _estimate(values: FloatArray) -> Estimate:
    interval: Interval = bootstrap(values)
    return Estimate(interval.value, interval.low, interval.high)


def _against(values: Values, row: str) -> Estimate | None:
    return None if row == DEFAULT else _estimate(values[DEFAULT] - values[row])


def _sentence(values: Values) -> str:
    default, printed, bm25 = (float(values[row].mean()) for row in (DEFAULT, "CS-F-LTR", "BM25"))
    gain = bootstrap(values[DEFAULT] - values["CS-F-LTR"])
    apart = f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"
    return (
        f"Isthmus uses {DEFAULT} training on counts read by shrinking: judged pairs of all silos, the"
        " model the closer to BM25 the fewer there are, and nobody has to guess grades that nobody gave; here"
        f" it comes to {default:.3f}, {apart} beside the {printed:.3f} of CS-F-LTR as printed, and BM25 alone"
        f" to {bm25:.3f}."
    )
