"""Propensities: how likely a true label is to have been recorded at all (Jain et al. 2016).

    1/p_l = 1 + C (n_l + B)^(−A),   C = (ln N − 1)(B + 1)^A

with n_l the training positives of label l among N training instances. Rare labels weigh more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from isthmus.arrays import FloatArray, Ids, frozen
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation.measures import Measure
from isthmus.evaluation.ranking import Hits, RankingView
from isthmus.tables import Qrels


@dataclass(frozen=True, eq=False)
class Propensity:
    """Inverse propensities of labels, learned from training labels only.

    A label without training positives has n_l = 0. `a` and `b` are 0.55 and 1.5 by default; the literature
    uses 0.5, 0.4 for Wikipedia and 0.6, 2.6 for Amazon.
    """

    labels: Ids
    counts: FloatArray
    instances: int
    a: float = 0.55
    b: float = 1.5

    def __post_init__(self) -> None:
        if self.instances < 3:
            raise DataError(
                f"{self.instances} training instances give no propensities", cure="at least 3 are needed"
            )

    @classmethod
    def of_counts(
        cls, counts: Mapping[str, int], instances: int, *, a: float = 0.55, b: float = 1.5
    ) -> Propensity:
        """Build from the training positives of every label and the number of training instances."""
        values = np.array(list(counts.values()), dtype=np.float64)
        return cls(Ids.of(list(counts)), frozen(values), instances, a, b)

    @classmethod
    def of_qrels(cls, train: Qrels, *, rel: int = 1, a: float = 0.55, b: float = 1.5) -> Propensity:
        """Build from training judgements: a query is an instance, its relevant documents are its labels."""
        codes = train.documents.codes[train.grades >= rel]
        words = train.documents.vocabulary
        counts = np.bincount(codes, minlength=len(words)).astype(np.float64)
        return cls(Ids(np.arange(len(words)), words), frozen(counts), len(train), a, b)

    @property
    def c(self) -> float:
        """C = (ln N − 1)(B + 1)^A."""
        return float((np.log(self.instances) - 1) * (self.b + 1) ** self.a)

    def inverse(self, labels: Ids) -> FloatArray:
        """Return 1/p for the label of every row."""
        row_of_code = np.full(len(self.labels.vocabulary), -1, dtype=np.int64)
        row_of_code[self.labels.codes] = np.arange(len(self.labels))
        code = labels.translation(self.labels)
        row = np.where(code >= 0, row_of_code[code], -1) if len(row_of_code) else code
        counts = np.append(self.counts, 0.0)[row]
        values: FloatArray = (1.0 + self.c * (counts + self.b) ** -self.a)[labels.codes]
        return values


def propensity_scored(
    view: RankingView, measure: Measure, propensity: Propensity | None
) -> tuple[FloatArray, FloatArray]:
    """psP@k or psnDCG@k of every query, and the weight with which it enters the mean.

    The measure is a ratio of means, [mean_q actual_q] / [mean_q ideal_q]: the mean of actual_q / ideal_q
    weighted by ideal_q. The ideal list sorts the true labels by inverse propensity.
    """
    ranking = view.ranking
    if propensity is None or ranking.run is None or ranking.qrels is None:
        raise ConfigError(
            f"{measure} needs propensities: pass propensity=Propensity.of_qrels(training judgements), or "
            "--propensity TRAIN_QRELS on the command line",
            key="propensity",
        )
    threshold = int(measure["rel"])
    depth = int(measure.cutoff or 1)
    true = ranking.judgements.keep(ranking.judgements.grade >= threshold)
    worth = propensity.inverse(ranking.qrels.documents[true.row])
    order = np.lexsort((-worth, true.query))
    best = Hits(true.size, true.query, true.nth + 1, true.grade[order], true.row[order])
    hits = view.relevant(threshold).to(depth)
    gains = propensity.inverse(ranking.run.documents[hits.row])
    discounted = measure.name == "psnDCG"
    actual = hits.total(gains * _weight(hits, discounted))
    ideal = best.total(np.where(best.rank <= depth, worth[order] * _weight(best, discounted), 0.0))
    share = np.divide(actual, ideal, out=np.zeros(true.size), where=ideal > 0)
    return share, ideal / _most(true, depth) if discounted else ideal / depth


def _weight(hits: Hits, discounted: bool) -> FloatArray:
    return 1.0 / np.log2(hits.rank + 1) if discounted else np.ones(len(hits.rank))


def _most(true: Hits, depth: int) -> FloatArray:
    """min(Σ_{r ≤ |Y|} 1/log2(r+1), Σ_{r ≤ k} 1/log2(r+1)) of every query."""
    sums = np.cumsum(1.0 / np.log2(np.arange(2, depth + 2)))
    most: FloatArray = sums[np.clip(true.count, 1, depth) - 1]
    return most
