"""Simulated worlds of retrievers: lists whose truth is known, to compare fusers on fresh queries.

A world has two to six runs over the same documents, 30 to 200 judged queries and any number of fresh ones.
Its kind says how the runs relate: `equal` and `unequal` in quality, `correlated` in their errors, or
`redundant`, nearly copies of one another. Scores have the scales and the shapes of real retrievers and differ
from query to query; lists are cut at different depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from isthmus.arrays import FloatArray, IntArray
from isthmus.randomness import Streams
from isthmus.tables import Qrels, Run

KINDS = ("equal", "unequal", "correlated", "redundant")
DOCUMENTS = 60
"""Documents that a query is ranked over; runs return some of them."""


@dataclass(frozen=True, eq=False)
class FusionWorld:
    """A simulated world; `scores` is runs × queries × documents, NaN below the cut of a list."""

    kind: str
    seed: int
    grades: IntArray
    scores: FloatArray
    judged: int
    """Number of judged queries, which come first; the others are fresh."""

    @classmethod
    def draw(cls, seed: int, *, fresh: int = 300) -> FusionWorld:
        """Draw the world of a seed: the kind follows from the seed, all else is random."""
        rng = Streams(seed)("fusion world")
        kind = KINDS[seed % len(KINDS)]
        runs, judged = int(rng.integers(2, 7)), int(rng.integers(30, 201))
        queries = judged + fresh
        truth = rng.normal(size=(queries, DOCUMENTS))
        latent = truth + 0.5 * rng.normal(size=truth.shape) + rng.normal(-1.6, 0.5, size=(queries, 1))
        steps = (0.0, 0.5, 1.0) if rng.random() < 0.5 else (0.0,)
        grades = np.sum([latent > step for step in steps], axis=0)
        seen = _seen(kind, truth, runs, rng)
        scores = np.stack([_shaped(each, rng) for each in seen])
        return cls(kind, seed, grades, scores, judged)

    @property
    def queries(self) -> tuple[str, ...]:
        """Ids of all queries, the judged ones first."""
        return self.names(len(self.grades))

    @staticmethod
    def names(count: int) -> tuple[str, ...]:
        """Return ids for `count` queries."""
        return tuple(f"q{at:04}" for at in range(count))

    @property
    def qrels(self) -> Qrels:
        """Judgements of every document of every query, the fresh ones included."""
        queries, documents = self._names()
        return Qrels.of(queries, documents, self.grades.reshape(-1))

    @property
    def runs(self) -> list[Run]:
        """One run per retriever."""
        queries, documents = map(np.array, self._names())
        runs = []
        for at, scores in enumerate(self.scores):
            there = np.isfinite(scores.reshape(-1))
            columns = queries[there].tolist(), documents[there].tolist(), scores.reshape(-1)[there]
            runs.append(Run.of(*columns, name=f"run {at}"))
        return runs

    def _names(self) -> tuple[list[str], list[str]]:
        documents = [f"d{at:02}" for at in range(DOCUMENTS)]
        return np.repeat(self.queries, DOCUMENTS).tolist(), documents * len(self.grades)


def _seen(kind: str, truth: FloatArray, runs: int, rng: Generator) -> FloatArray:
    """Return runs × queries × documents: the true relevance with the noise of every run."""
    level = rng.uniform(0.6, 1.6)
    spread = {"equal": 0.0, "unequal": rng.uniform(0.3, 0.9)}.get(kind, rng.uniform(0.0, 0.4))
    noise = level * np.exp(spread * rng.normal(size=runs))
    shared = {"correlated": rng.uniform(0.4, 0.9)}.get(kind, rng.uniform(0.0, 0.3))
    common = rng.normal(size=truth.shape)
    own = rng.normal(size=(runs, *truth.shape))
    moods = np.exp(0.3 * rng.normal(size=(runs, len(truth), 1)))  # a retriever suits some queries better
    errors = np.sqrt(shared) * common + np.sqrt(1 - shared) * own
    seen = truth + noise[:, None, None] * moods * errors
    if kind == "redundant":  # all but one or two runs are copies of the first
        for at in range(1, max(2, runs - int(rng.integers(1, 3)))):
            seen[at] = seen[0] + rng.uniform(0.05, 0.4) * own[at]
    return np.asarray(seen)


def _shaped(seen: FloatArray, rng: Generator) -> FloatArray:
    """Return the scores that a retriever prints: on a scale and of a shape of its own, cut at some depth."""
    queries = (len(seen), 1)
    shape = rng.integers(3)
    if shape == 0:  # as cosines: a narrow range, another level for every query
        scores = 0.5 + 0.1 * seen + 0.05 * rng.normal(size=queries)
    elif shape == 1:  # as BM25: long tails upwards, larger for long queries
        scores = 6 * np.logaddexp(0.0, 1.5 * seen) * np.exp(0.4 * rng.normal(size=queries))
    else:  # as a cross-encoder: sigmoid scores, mostly near 0 and 1
        scores = 1 / (1 + np.exp(-(2 * seen - 2 + 0.5 * rng.normal(size=queries))))
    depth = int(rng.choice((15, 25, 40, DOCUMENTS)))
    lowest = -np.sort(-scores, axis=1)[:, depth - 1 : depth]
    return np.where(scores >= lowest, scores, np.nan)
