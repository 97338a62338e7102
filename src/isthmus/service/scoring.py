"""Candidates in an order, and why: what every scorer of a node gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from isthmus.service.snapshot import Found, Snapshot
from isthmus.service.wire import Evidence
from isthmus.tables.ids import FloatArray, Ids, IntArray


@dataclass(frozen=True, eq=False)
class Scored:
    """Candidates in order, best first: their places among those found, scores and probabilities."""

    order: IntArray
    scores: FloatArray
    probabilities: FloatArray | None


class Scorer(Protocol):
    """Puts candidates in order and says why."""

    def score(self, snapshot: Snapshot, found: Found) -> Scored: ...

    def explain(
        self, snapshot: Snapshot, found: Found, scored: Scored, depth: int
    ) -> list[list[Evidence]]: ...


class Raw:
    """BM25 as it is."""

    def score(self, snapshot: Snapshot, found: Found) -> Scored:
        """Only what BM25 listed, by its score."""
        scores = found.scores["bm25"]
        order = best_first(found, scores)
        return Scored(order[found.listed["bm25"][order]], scores, None)

    def explain(self, snapshot: Snapshot, found: Found, scored: Scored, depth: int) -> list[list[Evidence]]:
        """The score is the whole explanation."""
        return [
            [Evidence(retriever="bm25", raw=value, probability=None, weight=1.0, contribution=value)]
            for value in scored.scores[scored.order[:depth]].tolist()
        ]


def best_first(found: Found, scores: FloatArray) -> IntArray:
    """By score, ties by id, both descending."""
    return np.lexsort((-Ids.of(found.documents).codes, -scores))
