"""The silos' releases that let each search the others' documents, their privacy cost, and their quality.

This is a chapter of the demonstration. Every silo publishes its documents' word counts as cells with noise
drawn once, and all silos add up how common words are without revealing their own parts; ledgers record both
beforehand. Some queries of every silo are then ranked by BM25 from the releases, and from exact counts for
comparison.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.errors import several
from isthmus.evaluation import Comparison, compare
from isthmus.private import LEAST_WIDTH, PublishedCounts, ReleasingSilos, explain
from isthmus.private.ledger import Budget, Ledger
from isthmus.randomness import Streams
from isthmus.report import Plot, Table
from isthmus.retrieval import best_rows
from isthmus.tables import Corpus

EPSILON = 8.0
QUERIES = 30
"""Number of queries of every silo that are ranked."""
EXACT, PRIVATE, HOME = "exact counts of all silos", "private counts of other silos", "own documents alone"
_SHOWN = 20  # best documents of a query in the plot


@dataclass(frozen=True, eq=False)
class ReleasesStory:
    """The silos' releases, their privacy cost, and the rankings that they allow."""

    released: Table
    meaning: str
    comparison: Comparison
    plot: Plot


def tell(world: Corpus, *, seed: int = 0) -> ReleasesStory:
    """Release, charge, rank and compare."""
    streams = Streams(seed).under("private story")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        entropy = streams("versions").bytes
        ledgers = [
            stack.enter_context(Ledger(folder / f"{silo}.ledger", Budget(), entropy=entropy))
            for silo in world.silos
        ]
        silos = ReleasingSilos(_sampled(world, streams), streams, ledgers, LEAST_WIDTH)
        seen = PublishedCounts(silos, EPSILON)
        scores = silos.at_home(seen.at_home, silos.scored(partial(seen.counts, "publish")))
        released = Table.of(
            [row for each in zip(world.silos, ledgers, strict=True) for row in _booked(*each)], digits=0
        )
        spent = max(ledger.summary()["most_spent"] for ledger in ledgers)
    runs = {HOME: _at_home(silos), PRIVATE: scores, EXACT: silos.exact}
    comparison = compare(
        silos.corpus.qrels,
        {name: silos.run(table, name) for name, table in runs.items()},
        ("nDCG@10", "MRR@10"),
    )
    return ReleasesStory(released, f"{explain(spent)}.", comparison, _plot(silos, scores))


def _sampled(world: Corpus, streams: Streams) -> Corpus:
    """Return the collection with some queries of every silo."""
    rng = streams("queries")
    by_silo = [
        rng.permutation(np.flatnonzero(world.queries.silos == silo)) for silo in range(len(world.silos))
    ]
    queries = world.queries.take(np.sort(np.concatenate([rows[:QUERIES] for rows in by_silo])))
    judged = np.isin(np.array(world.qrels.queries), np.array(queries.ids))
    documents = replace(world.documents, bodies=world.documents.texts)  # title and body as one text
    return replace(world, documents=documents, queries=queries, qrels=world.qrels[judged])


def _booked(silo: str, ledger: Ledger) -> list[dict[str, Any]]:
    """Summarise one ledger: a row for every kind of release, over all recipients."""
    rows: dict[tuple[str, float], dict[str, Any]] = {}
    for row in ledger.summary()["departures"]:
        named = {"one_shot": "word counts", "totals": "its part of the totals"}[row["mechanism"]]
        at = rows.setdefault((named, row["epsilon"]), {"silo": silo, "released": named, "to": []})
        at["to"].append(row["peer"])
        at |= {"documents": row["items"] // row["times"], "ε a document": row["epsilon"] * row["times"]}
    ordered = sorted(rows.values(), key=lambda row: -row["ε a document"])
    return [row | {"to": several(len(set(row["to"])), "other")} for row in ordered]


def _at_home(silos: ReleasingSilos) -> FloatArray:
    """Return exact scores of documents in a query's own silo, and −1 for all others."""
    same = silos.corpus.queries.silos[:, None] == silos.corpus.documents.silos
    return np.where(same, silos.exact, -1.0)


def _plot(silos: ReleasingSilos, scores: FloatArray) -> Plot:
    """Plot private against exact scores of other silos' documents."""
    exact, private = [], []
    for query, home in enumerate(silos.corpus.queries.silos.tolist()):
        away = np.flatnonzero(silos.corpus.documents.silos != home)
        best = away[best_rows(silos.exact[query, away], _SHOWN)]
        exact += silos.exact[query, best].tolist()
        private += scores[query, best].tolist()

    def draw(axes: Any) -> None:
        most = max(*exact, *private, 1.0)
        axes.plot([0, most], [0, most], color="0.5", lw=1, zorder=0)
        axes.scatter(exact, private, s=6, alpha=0.35, lw=0)
        axes.set_xlabel("BM25 from exact counts")
        axes.set_ylabel("BM25 from private counts")

    caption = (
        f"The {_SHOWN} best documents of other silos for each of {len(silos.corpus.queries)} queries: what"
        f" they score by exact counts and by what was released at ε = {EPSILON:g}"
    )
    return Plot(draw, caption, (5.6, 4.2))
