"""The hybrid without learning, measured: silos by topic beside one index of everything, one encoder.

The scale of the hybrid comes from the silos' score sums, as the broker adds them. Nothing is fitted to
judgements, so that all queries are test queries.
"""

from __future__ import annotations

import numpy as np

from isthmus.learning import COLUMNS, Weights
from isthmus_reproduce.search.learned import Study
from isthmus_reproduce.search.world import CENTRAL_BM25, World, encoder_of, federation

BM25, CENTRAL = CENTRAL_BM25, "hybrid, one index"


def values_of(world: World, encoder: str, draws: int) -> dict[str, list[list[float]]]:
    """Return, by row, the measure of every query; one list for each draw of the statistics."""
    used = encoder_of(world, encoder)
    values: dict[str, list[list[float]]] = {}
    size = len(COLUMNS)
    bm25, dense = (Weights(np.zeros(size), np.ones(size), row) for row in np.eye(size)[:2])
    with federation(world, encoder=used, whole=True) as central:
        study = Study(world, central, used.fingerprint)
        scores = {BM25: bm25, "encoder alone, one index": dense, CENTRAL: study.baseline}
        values |= {row: [study.values(study.rankings(score)).tolist()] for row, score in scores.items()}
    with federation(world, encoder=used) as silos:
        for form in ("exact", *["private"] * draws):
            silos.share(form)
            study = Study(world, silos, used.fingerprint)
            for row, score in {"BM25": bm25, "hybrid": study.baseline}.items():
                measured = study.values(study.rankings(score)).tolist()
                values.setdefault(f"{row}, silos, {form} statistics", []).append(measured)
    return values
