"""Silos that release without charges, to measure every mechanism and reader at every ε."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.evaluation import evaluate
from isthmus.private import (
    DEPTH,
    EPSILON_TOTALS,
    WIDTH,
    ChargeAll,
    Covered,
    HashFamily,
    ReleasingSilos,
    fresh_versions,
    hashed,
    no_charge,
    noised,
)
from isthmus.randomness import Streams
from isthmus.retrieval import TEXT, TIMES, Statistics, best_rows, summed
from isthmus.tables import Corpus

READERS = ("publish", "ask", "threshold", "plain")


class UnchargedSilos(ReleasingSilos):
    """A collection in silos that release to one peer without ledgers; one party noises their totals."""

    def __init__(self, corpus: Corpus, streams: Streams, width: int | None = None) -> None:
        super().__init__(corpus, streams, (), width)

    def judged(self, scores: FloatArray) -> dict[str, float]:
        """Return nDCG@10, and Kendall's τ with the exact order of each query's matches, a hundred at most."""
        taus = [self._agreement(query, scores[query]) for query in range(len(scores))]
        value = evaluate(self.corpus.qrels, self.run(scores), ["nDCG@10"])["nDCG@10"]
        return {"nDCG@10": float(value), "Kendall tau": float(np.nanmean(taus))}

    def _agreement(self, query: int, scores: FloatArray) -> float:
        from scipy.stats import kendalltau

        matches = best_rows(self.exact[query], DEPTH)
        if len(matches) < 2:
            return float("nan")
        return float(kendalltau(self.exact[query, matches], scores[matches]).statistic)

    def peers(self, holder: int) -> Sequence[str]:
        """Return one peer, which stands for all."""
        return ("peer",)

    def covered(self, holder: int, rng: np.random.Generator) -> tuple[Covered, ChargeAll]:
        """Return a silo's documents in fresh versions that are not charged."""
        names = tuple(self.corpus.documents.ids[row] for row in self.rows[holder])
        return fresh_versions(names, rng.bytes), no_charge

    @cached_property
    def totals(self) -> Statistics:
        """Noisy frequencies and counts over all silos."""
        rng = self.streams("totals")
        family = HashFamily(rng.bytes(32), 1, WIDTH)
        sums = hashed(summed(Statistics.of(tokens) for tokens in self.bodies), family)
        return noised(sums, dict.fromkeys((TEXT, TIMES), EPSILON_TOTALS), rng.bytes)
