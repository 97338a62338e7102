"""Lists with coarse features for trees, and silos that share them."""

from __future__ import annotations

import numpy as np

from isthmus.evaluation import evaluate_rows
from isthmus.rankers import Ranker
from isthmus.tables import Letor


def table(queries: int = 80, *, seed: int = 0, levels: int = 8) -> Letor:
    """Lists with coarse features: whole numbers below `levels`, so that quantile cuts are exact anywhere."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 20, queries)
    lengths[3] = 0
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    features = rng.integers(0, levels, (offsets[-1], 6)).astype(np.float32)
    hidden = features[:, 0] + features[:, 1] * features[:, 2] * 2 / levels
    hidden += rng.normal(0, levels / 4, len(features))
    grades = np.clip(hidden * 2 / levels, 0, 4).astype(np.int32)
    return Letor(tuple(f"q{query}" for query in range(queries)), offsets, features, grades)


def dealt(letor: Letor, silos: int) -> dict[str, Letor]:
    return {f"silo {rank}": letor[np.arange(rank, len(letor), silos)] for rank in range(silos)}


def ndcg(ranker: Ranker, letor: Letor) -> float:
    measure = "nDCG@10(empty=skip, ties=random)"
    return evaluate_rows(letor.grades, ranker.score(letor), letor.offsets, [measure])[measure]
