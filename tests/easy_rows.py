"""Feature rows that a ranker can learn from in a moment."""

from __future__ import annotations

import numpy as np

from isthmus.tables import Letor


def easy(split: str, queries: int) -> Letor:
    """Lists of ten documents whose grades a linear score explains but for some noise."""
    rng = np.random.default_rng([queries, len(split)])
    features = rng.normal(size=(queries * 10, 8)).astype(np.float32)
    merit = features @ np.array([2, -1, 1, 0.5, 0, 0, 0, 0]) + rng.normal(0, 1, queries * 10)
    names = [f"{split}{query}" for query in range(queries) for _ in range(10)]
    return Letor.of(names, features, np.digitize(merit, [0.5, 2.5, 4.0]), name=split)
