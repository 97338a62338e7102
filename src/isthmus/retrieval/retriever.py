"""What a retriever is, and what all of them do alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from isthmus.errors import DataError
from isthmus.tables import Queries, Run
from isthmus.tables.ids import FloatArray, IntArray


class Retriever(Protocol):
    """Ranks its documents for every query."""

    def search(self, queries: Queries, k: int) -> Run:
        """The best k documents of every query; a query that matches nothing keeps an empty list."""


def best_rows(scores: FloatArray, k: int) -> IntArray:
    """The rows of the k largest positive scores, best first; of equal scores the earlier rows."""
    rows = np.flatnonzero(scores > 0)
    if len(rows) > k:
        least = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
        rows = rows[scores[rows] >= least]
    return rows[np.argsort(-scores[rows], kind="stable")][:k]


def check_unique(ids: Sequence[str], kind: str) -> None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise DataError(f"{kind} id {name!r} appears twice", cure=f"give every {kind} an id of its own")
        seen.add(name)
