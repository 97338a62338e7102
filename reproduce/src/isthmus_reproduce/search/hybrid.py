"""The hybrid without learning, measured: four silos by topic beside one index of everything, one encoder.

Documents are found, scored and merged by the service's own code; the scale of the hybrid comes from the
silos' score sums, as the broker adds them. Nothing is fitted to judgements, so that all queries are test
queries.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from isthmus.service import (
    Bm25Scorer,
    HybridScorer,
    Scored,
    Scorer,
    Search,
    Searcher,
    common_scale,
    measure,
    merge_hits,
)
from isthmus.tables import Run
from isthmus_reproduce.search.world import CENTRAL_BM25, SHOWN, Federation, World, encoder_of, federation

BM25, CENTRAL = CENTRAL_BM25, "hybrid, one index"
ROWS = (
    BM25,
    "BM25, silos, exact statistics",
    "BM25, silos, private statistics",
    "encoder alone, one index",
    CENTRAL,
    "hybrid, silos, exact statistics",
    "hybrid, silos, private statistics",
)


class DenseScorer(Bm25Scorer):
    """Orders candidates by the encoder alone."""

    name: ClassVar[str] = "dense"

    def score(self, snapshot: Any, candidates: Any) -> Scored:
        """All candidates that have a vector, by cosine."""
        scores = candidates.scores["dense"]
        order = np.argsort(-scores, kind="stable")
        return Scored(order[np.isfinite(scores[order])], scores, None)


def values_of(world: World, encoder: str, draws: int) -> dict[str, list[list[float]]]:
    """By row, the measure of every query; several lists where statistics were drawn several times."""
    used = encoder_of(world, encoder)
    values: dict[str, list[list[float]]] = {row: [] for row in ROWS}
    with federation(world, encoder=used, whole=True) as central:
        scorers: dict[str, Scorer] = {
            BM25: Bm25Scorer(),
            "encoder alone, one index": DenseScorer(),
            CENTRAL: _hybrid(central),
        }
        for row, scorer in scorers.items():
            values[row].append(_values(central, scorer))
    with federation(world, encoder=used) as silos:
        for form in ("exact", *["private"] * draws):
            silos.share(form)
            values[f"BM25, silos, {form} statistics"].append(_values(silos, Bm25Scorer()))
            values[f"hybrid, silos, {form} statistics"].append(_values(silos, _hybrid(silos)))
    return values


def _hybrid(silos: Federation) -> HybridScorer:
    scale = common_scale([measure(silo.name, silo.index.snapshot, silo.store) for silo in silos.silos])
    if scale is None:
        raise ValueError("the collection has too few documents for a scale")
    return HybridScorer(scale)


def _values(silos: Federation, scorer: Scorer) -> list[float]:
    """The measure of every query, its own document left out where it was made from one."""
    world = silos.world
    searchers = [Searcher(silo.name, silo.index, silo.store, scorer) for silo in silos.silos]
    lists: dict[str, dict[str, float]] = {}
    for id, text, own in zip(world.corpus.queries.ids, world.corpus.queries.texts, world.own, strict=True):
        request = Search.model_construct(query=text, k=SHOWN + 1)  # some are longer than messages may be
        hits = (hit for searcher in searchers for hit in searcher.search(request, snippets=False).hits)
        merged, _ = merge_hits((hit for hit in hits if hit.document != own), k=SHOWN, threshold=0.0)
        lists[id] = {hit.document: float(-place) for place, hit in enumerate(merged)}
    values: list[float] = world.values(Run.from_dict(lists)).tolist()
    return values
