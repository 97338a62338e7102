"""What a retriever is, and what all of them do alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import ConfigError, DataError
from isthmus.tables import Queries, Run


class Retriever(Protocol):
    """Ranks its documents for every query."""

    def search(self, queries: Queries, k: int) -> Run:
        """The best k documents of every query; a query that matches nothing keeps an empty list."""


def best_rows(scores: NDArray[np.floating[Any]], k: int, *, above: float = 0.0) -> IntArray:
    """The rows of the k largest scores beyond `above`, best first; of equal scores the earlier rows."""
    rows = np.flatnonzero(scores > above)
    if len(rows) > k:
        least = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
        rows = rows[scores[rows] >= least]
    return rows[np.argsort(-scores[rows], kind="stable")][:k]


def rows_of(documents: Ids, wanted: Sequence[str | None]) -> IntArray:
    """Where these documents stand; -1 for None and for a document that is not there."""
    row_of = {document: row for row, document in enumerate(documents.tolist())}
    return np.array([-1 if name is None else row_of.get(name, -1) for name in wanted], dtype=np.int64)


def collect(
    queries: tuple[str, ...], documents: Ids, lists: Sequence[tuple[IntArray, FloatArray]], name: str
) -> Run:
    """A run of these lists, each (rows of `documents`, their scores) in trec_eval's order already."""
    offsets = np.cumsum([0, *(len(rows) for rows, _ in lists)])
    rows = np.concatenate([np.empty(0, dtype=np.int64), *(rows for rows, _ in lists)])
    scores = np.concatenate([np.empty(0), *(scores for _, scores in lists)])
    return Run(queries, frozen(offsets), documents[rows], frozen(scores), None, name)


def check_depth(k: int) -> None:
    """At least one document must be asked for."""
    if k < 1:
        raise ConfigError(f"k = {k}: ask for at least one document", key="k", value=k)


def check_unique(ids: Sequence[str], kind: str) -> None:
    """No id may stand for two things."""
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise DataError(f"{kind} id {name!r} appears twice", cure=f"give every {kind} an id of its own")
        seen.add(name)
