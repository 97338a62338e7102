"""`auto`: compares the ways of fusing in one cross-validation over queries and chooses one.

Judged queries are fused by a method that was chosen and fitted without them: for each fold the whole choice
is repeated on the other folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.calibration import Calibrator
from isthmus.fusion.estimator import Explanation, Fuser, TrainingUnion
from isthmus.fusion.learned import Formula, LogOdds, Stacked, Weighted
from isthmus.report import progress
from isthmus.tables import Qrels, Run

CLEARLY = 1.5
"""Standard errors of the mean difference over queries by which another method must be better to be chosen."""


@dataclass(frozen=True)
class Trial:
    """Result of a method in the cross-validation: its mean over `queries` queries, and its difference to the
    first method."""

    method: str
    mean: float
    difference: float
    error: float
    """The standard error of the difference."""
    worse: int
    """Number of queries on which it is worse than the first method."""
    queries: int
    values: FloatArray = field(default_factory=lambda: np.empty(0), repr=False, compare=False)
    """The measure of every query, NaN where it does not count; not saved."""

    def record(self) -> dict[str, Any]:
        """Return all fields except the values, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "values"}

    @property
    def is_clear(self) -> bool:
        """Whether it is better than the first method by more than `CLEARLY` standard errors."""
        return self.difference > CLEARLY * self.error


@dataclass(eq=False, repr=False, kw_only=True)
class Auto(Fuser):
    """Fuses by the method that does best on held-out queries, a convex sum unless another is clearly better.

    The convex sum's weights are shrunk to equal ones, so it is a plain sum if judgements are few. It is
    compared with CombSUM, RRF, log-odds, stacked and the best single run. `trials_` has the result of each
    method; `chosen_` is the fitted winner, whose scores are calibrated for the top of lists.
    """

    method = "auto"

    measure: str = "nDCG@10"
    calibrator: str | Calibrator = "platt"
    missing: float | str = "learned"
    final: str = "small"

    @property
    def label(self) -> str:
        """The chosen method's name; `auto` before fitting."""
        return self.chosen_.label if hasattr(self, "chosen_") else self.method

    def candidates(self) -> list[Fuser]:
        """Return the methods to compare; the first is taken unless another is clearly better."""
        shared: dict[str, Any] = {"judging": self.judging, "folds": self.folds, "final": self.final}
        evidence: dict[str, Any] = {**shared, "calibrator": self.calibrator, "missing": self.missing}
        weighted: dict[str, Any] = {**shared, "measure": self.measure}
        return [
            Weighted(tune="likelihood", name="convex", **weighted),
            Formula("comb-sum", **shared),
            Formula("rrf", **shared),
            LogOdds(**evidence),
            Stacked(**evidence),
            Weighted(norm="min-max", tune="best", name="best-run", **weighted),
        ]

    def fit_fuse(self, runs: Sequence[Run], qrels: Qrels, *, name: str = "") -> Run:
        """Choose a method, learn, and fuse the same runs; the winner gets the threshold curve too."""
        fused = super().fit_fuse(runs, qrels, name=name)
        self.chosen_.curve_ = self.curve_
        return fused

    def fit_union(self, training: TrainingUnion) -> tuple[FloatArray, FloatArray]:
        """Choose a method and learn; return scores and probabilities of every row, for judged queries by a
        method that was chosen and fitted without them."""
        self.chosen_, self.trials_, scores, probabilities = self._choose(training)
        self.queries_ = training.union.queries
        self.retrievers_, self.weights_ = self.chosen_.retrievers_, self.chosen_.weights_
        for fold in progress(range(training.folds), label="choosing") if training.folds > 2 else ():
            mine = (training.fold_of_query == fold)[training.union.query_of_row]
            *_, inner_scores, inner_probabilities = self._choose(training.without(fold))
            scores[mine], probabilities[mine] = inner_scores[mine], inner_probabilities[mine]
        return scores, probabilities

    def _choose(self, training: TrainingUnion) -> tuple[Fuser, list[Trial], FloatArray, FloatArray]:
        fusers = self.candidates() if training.folds > 1 else self.candidates()[:1]
        scores = [fuser.fit_scores(training) for fuser in fusers]
        values = [training.measured(each, self.measure) for each in scores]
        trials = [_trial(fuser.label, each, values[0]) for fuser, each in zip(fusers, values, strict=True)]
        clear = [at for at, trial in enumerate(trials) if trial.is_clear]
        best = max(clear, key=lambda at: trials[at].mean, default=0)
        probabilities = fusers[best]._learn_probabilities(scores[best], training)
        return fusers[best], trials, scores[best], probabilities

    def fuse(self, runs: Sequence[Run], *, name: str = "") -> Run:
        """Fuse several runs into one by the chosen method."""
        self._matched(runs)
        return self.chosen_.fuse(runs, name=name)

    def explain(
        self, runs: Sequence[Run], query: str, document: str | None = None, *, depth: int = 10
    ) -> list[Explanation]:
        """Explain each document's score by the chosen method."""
        self._matched(runs)
        return self.chosen_.explain(runs, query, document, depth=depth)


def _trial(method: str, values: FloatArray, first: FloatArray) -> Trial:
    counted = np.isfinite(values) & np.isfinite(first)
    mine, differences = values[counted], (values - first)[counted]
    count = len(mine)
    error = float(differences.std(ddof=1) / count**0.5) if count > 1 else float("inf")
    mean, difference = (float(each.mean()) if count else 0.0 for each in (mine, differences))
    return Trial(method, mean, difference, error, int((differences < 0).sum()), count, values)
