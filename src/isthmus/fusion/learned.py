"""Fusers that learn from judgements: a formula with a calibrated score, log-odds, stacked, tuned weights.

Log-odds are added rather than probabilities: independent evidence adds in log-odds, and where retrievers are
correlated, stacking learns how much of each one's evidence is new.

Fitting is cross-fitted over queries throughout. A judged query's evidence comes from calibrators fitted
without it, and weights are applied to queries on which they were not fitted. So the run that `fit_fuse`
returns can be evaluated on the same judgements, and its probabilities and thresholds are not optimistic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration import (
    Calibrator,
    Choice,
    choice_probabilities,
    cross_fit,
    fit_choice,
    probabilities_of,
)
from isthmus.errors import ConfigError, DataError
from isthmus.fusion.estimator import Fuser, ScoreBreakdown, TrainingUnion, names_of
from isthmus.fusion.fusers import FUSERS, Candidates, choose, default_norm
from isthmus.fusion.rl_sim import GRID
from isthmus.fusion.union import Union
from isthmus.logistic import likelihood_sums, newton
from isthmus.report import progress
from isthmus.tables import Run

Mask = NDArray[np.bool_]

SURE = 1e-6
"""Probabilities are clipped to this distance from 0 and 1, so that no retriever alone is certain."""

PENALTY = 1.0

TUNING = ("measure", "likelihood", "best")
DEEPEST = 20
"""Weights are fitted on documents with at most this rank in some run; the many below would dominate
the fit."""


@dataclass(eq=False, repr=False, kw_only=True)
class Formula(Fuser):
    """Any fuser of `FUSERS` with its score calibrated on judgements.

    A retriever's contribution is the amount by which the score would fall without it. For RL-Sim, judgements
    also choose K, the number of rounds and the runs' weights, unless the options name one of these or
    `edges`.
    """

    method = "formula"
    formula: str = field(default="rrf", kw_only=False)
    norm: str | None = None
    missing: float | str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.formula = choose((), self.formula, None)

    @property
    def label(self) -> str:
        """The formula's name."""
        return self.formula

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """Prepare without judgements, which a formula does not need; it gives no probabilities then."""
        self.retrievers_, self.weights_ = names_of(runs), np.empty(0)
        return self

    def _gather(self, training: TrainingUnion) -> FloatArray:
        if self.formula != "rl-sim" or {"topk", "rounds", "weights", "edges"} & set(self.options):
            return self._evidence(training.union)
        self._settings = _rl_sim_settings(training.union)
        settings = progress(self._settings, label="choosing") if training.folds > 1 else self._settings[:1]
        return np.array([self._fused(training.union, setting) for setting in settings])

    def _evidence(self, union: Union) -> FloatArray:
        return self._fused(union, self.weights_ if hasattr(self, "weights_") else np.empty(0))[None]

    def _fused(self, union: Union, setting: FloatArray) -> FloatArray:
        """Return the formula's scores; a setting is RL-Sim's K, number of rounds and one weight per run."""
        norm = self.norm or default_norm(self.formula)
        candidates = Candidates.of(union, norm, missing=self.missing)
        options = dict(self.options)
        if len(setting):
            chosen = {"topk": int(setting[0]), "rounds": int(setting[1]), "weights": setting[2:].tolist()}
            options |= {name: value for name, value in chosen.items() if value}
        return FUSERS[self.formula](candidates, **options)

    def _weigh(self, evidence: FloatArray, training: TrainingUnion, queries: Mask) -> FloatArray:
        if len(evidence) == 1:
            return np.empty(0)
        means = [np.nanmean(training.measured(scores, "nDCG@10")[queries]) for scores in evidence]
        return self._settings[int(np.argmax(means))]

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        if len(evidence) == 1:
            return np.asarray(evidence[0])
        at = [np.array_equal(weights, setting) for setting in self._settings].index(True)
        return np.asarray(evidence[at])

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        contributions = np.tile(evidence[0], (len(union.runs), 1))
        for at in range(len(union.runs)):
            others = [run for other, run in enumerate(union.runs) if other != at]
            if others:
                fewer = Union.of(others)
                place = union.rows_of(fewer)
                setting = np.delete(self.weights_, 2 + at) if len(self.weights_) > 2 else self.weights_
                contributions[at, place] -= self._fused(fewer, setting)
        return ScoreBreakdown(contributions, evidence[0] - contributions.sum(axis=0))


def _rl_sim_settings(union: Union) -> list[FloatArray]:
    """Return the settings of RL-Sim among which judgements choose: K and rounds, then equal weights, then
    each run alone.

    The single runs keep the choice from being far below its best input.
    """
    runs = len(union.runs)
    objects = len(np.unique(union.documents.codes)) + len(union.queries)
    grid = [each for each in GRID if sum(each) - 1 <= objects]
    settings = [np.array(each, dtype=np.float64) for each in grid or [(1, 1)]]
    if runs == 1:
        return settings
    first = settings[0]
    return [*settings, *(np.concatenate((first, each)) for each in (np.ones(runs), *np.eye(runs)))]


@dataclass(eq=False, repr=False, kw_only=True)
class LogOdds(Fuser):
    """logit p = Σᵢ logit cᵢ − (m − 1)·logit π: Bayes' rule for independent retrievers.

    cᵢ is retriever i's calibrated probability or, for a document that it did not return, given by `missing`:
    "learned" is P(relevant | a candidate, absent from list i) on validation, "lowest" the lowest probability
    of the list, and a number is that probability. π is the share of candidates that are relevant.
    `calibrator` is fitted per retriever; "given" uses the runs' own probabilities. `silos` names each run's
    silo where silos hold different documents; absence from another silo's list is then no evidence.
    """

    method = "log-odds"

    calibrator: str | Calibrator = "auto"
    missing: float | str = "learned"
    silos: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.missing, str) and self.missing not in ("learned", "lowest"):
            problem = f"missing = {self.missing!r}: say 'learned', 'lowest' or a probability"
            raise ConfigError(problem, key="missing")

    def _gather(self, training: TrainingUnion) -> FloatArray:
        union, known = training.union, training.known
        self.prior_ = float(training.relevant[known].mean())
        absent = self._absent(union)
        hits = ((absent & known) * training.relevant).sum(axis=1)
        self.absent_ = (hits + self.prior_) / ((absent & known).sum(axis=1) + 1.0)
        self.calibrators_: list[Calibrator] = []
        if self.calibrator == "given":
            return self._evidence(union)
        columns = []
        for at, run in enumerate(progress(union.runs, label="calibrating")):
            key = (at, repr(self.calibrator))
            if key not in training.calibrated:
                folds = min(self.folds, sum(query in training.qrels for query in run.queries))
                training.calibrated[key] = cross_fit(
                    run, training.qrels, self.calibrator, judging=self.judging, folds=folds
                )
            fitted, probabilities = training.calibrated[key]
            self.calibrators_.append(fitted)
            columns.append(probabilities)
        return self._logits(union, columns)

    def _evidence(self, union: Union) -> FloatArray:
        if self.calibrator != "given":
            pairs = zip(union.runs, self.calibrators_, strict=True)
            return self._logits(union, [probabilities_of(run, fitted) for run, fitted in pairs])
        return self._logits(union, [run.required_probabilities for run in union.runs])

    def _logits(self, union: Union, probabilities: Sequence[FloatArray]) -> FloatArray:
        """Return runs × rows of calibrated log-odds, with absent documents filled in."""
        matrix = union.spread(probabilities)
        absent = self._absent(union)
        floor = (
            Candidates(union, tuple(probabilities), "lowest").matrix() if self.missing == "lowest" else matrix
        )
        for at, row in enumerate(matrix):
            row[np.isnan(row) & ~absent[at]] = self.prior_  # no list for the query: no evidence
            if self.missing == "lowest":
                row[absent[at]] = floor[at, absent[at]]
            else:
                row[absent[at]] = self.absent_[at] if self.missing == "learned" else self.missing
        return np.asarray(logit(np.clip(matrix, SURE, 1 - SURE)))

    def _absent(self, union: Union) -> Mask:
        """Runs × rows: whether the run could have returned the document and did not.

        A run without any list for the query gives no evidence about it.
        """
        searched = np.zeros((len(union.runs), len(union.queries)), dtype=bool)
        for row, run, home in zip(searched, union.runs, union.homes, strict=True):
            row[home] = np.diff(run.offsets) > 0
        missing: Mask = ~union.present & searched[:, union.query_of_row]
        if self.silos is None:
            return missing
        if len(self.silos) != len(union.runs):
            raise DataError(f"{len(self.silos)} silos named for {len(union.runs)} runs")
        for silo in set(self.silos):
            mine = np.array([name == silo for name in self.silos])
            missing[mine] &= ~missing[mine].all(axis=0)
        return missing

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """Prepare for runs that carry probabilities: π is their mean, and absence counts as the lowest
        probability of the list unless `missing` is a number."""
        if self.method != LogOdds.method:
            return super().unjudged(runs)
        self.calibrator, self.calibrators_ = "given", []
        self.missing = "lowest" if self.missing == "learned" else self.missing
        self.retrievers_, self.weights_, self.absent_ = names_of(runs), np.empty(0), np.empty(0)
        candidates = Candidates.of(runs, "none", probabilities=True, missing="lowest")
        self.prior_ = float(np.clip(candidates.matrix().mean(), SURE, 0.5))
        return self

    def _probabilities(self, scores: FloatArray, union: Union) -> FloatArray | None:
        learned = super()._probabilities(scores, union)
        return np.asarray(expit(scores)) if learned is None else learned

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        prior = float(logit(self.prior_))
        return np.asarray(np.sort(evidence, axis=0).sum(axis=0) - (len(evidence) - 1) * prior)

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        prior = float(logit(self.prior_))
        ones, start = np.ones(len(evidence)), np.full(union.rows, prior)
        return ScoreBreakdown(evidence - prior, start, ones, expit(evidence))

    def parameters(self) -> dict[str, Any]:
        """Return the constructor's arguments; a calibrator passed as an object is replaced by its
        class name."""
        named = self.calibrator if isinstance(self.calibrator, str) else type(self.calibrator).__name__
        return {**super().parameters(), "calibrator": named}


@dataclass(eq=False, repr=False, kw_only=True)
class Stacked(LogOdds):
    """Logistic regression on the calibrated log-odds and one absence indicator per retriever, cross-fitted.

    With `single_label`, a softmax across each query's candidates replaces the sigmoid (one weight per
    retriever, a bias per label), for tasks where one answer is right.
    """

    method = "stacked"

    single_label: bool = False
    final: str = "own"
    """`own`: the margins are log-odds already and need no calibrator."""

    def _gather(self, training: TrainingUnion) -> FloatArray:
        used = np.unique(training.union.documents.codes[training.known])
        words = training.union.documents.words
        self.labels_ = np.array([words[code] for code in used] if self.single_label else [], dtype=np.str_)
        return super()._gather(training)

    def _logits(self, union: Union, probabilities: Sequence[FloatArray]) -> FloatArray:
        return np.vstack((super()._logits(union, probabilities), self._absent(union).astype(np.float64)))

    def _weigh(self, evidence: FloatArray, training: TrainingUnion, queries: Mask) -> FloatArray:
        rows = queries[training.union.query_of_row] & training.known
        relevant = training.relevant[rows].astype(np.float64)
        if self.single_label:
            lists = np.unique(training.union.query_of_row[rows], return_inverse=True)[1]
            items = self._items(training.union)[rows]
            choice = fit_choice(evidence[:, rows], relevant, lists, items=items)
            biases = np.zeros(len(self.labels_))
            biases[: len(choice.biases)] = choice.biases
            return np.concatenate((choice.weights, [choice.intercept], biases))
        design = np.vstack((evidence[:, rows], np.ones(int(rows.sum()))))
        penalty = np.append(np.full(len(evidence), PENALTY), 0.0)
        start = np.append(np.zeros(len(evidence)), logit(np.clip(relevant.mean(), SURE, 1 - SURE)))
        return newton(lambda theta: likelihood_sums(design, relevant, theta), start, penalty)

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        size = len(evidence)
        choice = Choice(weights[:size], float(weights[size]), weights[size + 1 :])
        return choice.margins(evidence, self._items(union) if self.single_label else None)

    def _items(self, union: Union) -> IntArray:
        """The number of every row's label among the fitted labels; −1 for a label that did not occur in
        fitting."""
        place = {word: at for at, word in enumerate(self.labels_.tolist())}
        codes = np.array([place.get(word, -1) for word in union.documents.words], dtype=np.int64)
        return codes[union.documents.codes]

    def _learn_probabilities(self, scores: FloatArray, training: TrainingUnion) -> FloatArray:
        if self.final != "own":
            return super()._learn_probabilities(scores, training)
        return self._probabilities(scores, training.union)

    def _probabilities(self, scores: FloatArray, union: Union) -> FloatArray:
        if self.final != "own":
            return np.asarray(super()._probabilities(scores, union))
        if self.single_label:
            return choice_probabilities(scores, union.query_of_row)
        return np.asarray(expit(scores))

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        count = len(self.retrievers_)
        weights = self.weights_[:count]
        contributions = (self.weights_[: 2 * count, None] * evidence).reshape(2, count, -1).sum(axis=0)
        start = self._scores(evidence, self.weights_, union) - contributions.sum(axis=0)
        return ScoreBreakdown(contributions, start, weights, expit(evidence[:count]))


@dataclass(eq=False, repr=False, kw_only=True)
class Weighted(Fuser):
    """Σᵢ wᵢ·sᵢ over normalised scores, with weights given or learned on validation.

    `tune` selects how: "measure" takes the weights with the best `measure`, "likelihood" those that separate
    relevant documents best, shrunk to equal ones (`drawn`), "best" the best run alone. `convex` weights are
    non-negative and add up to one. Absent documents get the lowest score of the list, or the number
    `missing`. `name` is the name by which the method was requested.
    """

    method = "weighted"

    norm: str = "z-score"
    weights: Sequence[float] | None = None
    measure: str = "nDCG@10"
    missing: float | str = "lowest"
    tune: str = "measure"
    name: str = "weighted"

    def __post_init__(self) -> None:
        self.weights = None if self.weights is None else tuple(map(float, self.weights))
        self.missing = "lowest" if self.missing == "learned" else self.missing
        if self.tune not in TUNING:
            raise ConfigError(f"no way of tuning {self.tune!r}", key=self.tune, known=TUNING)

    @property
    def label(self) -> str:
        """The name by which the method was requested."""
        return self.name

    def _evidence(self, union: Union) -> FloatArray:
        return Candidates.of(union, self.norm, missing=self.missing).matrix()

    def _weigh_folds(self, evidence: FloatArray, training: TrainingUnion) -> list[FloatArray]:
        if self.weights is not None:
            self._check_weights(len(evidence))
            return [np.array(self.weights)] * (training.folds + 1)
        if self.tune == "likelihood":
            return super()._weigh_folds(evidence, training)
        judge = self._judge(evidence, training)
        order = np.argsort(np.array(self.retrievers_, dtype=np.str_))  # independent of their order
        place = np.argsort(order)

        def best(inside: Mask) -> FloatArray:
            def value(weights: tuple[float, ...]) -> float:
                return float(np.nanmean(judge(tuple(weights[at] for at in place.tolist()))[inside]))

            if self.tune == "best":
                return np.array(max(map(tuple, np.eye(len(evidence)).tolist()), key=value))[place]
            return tuned(len(evidence), value)[place]

        return [best(training.outside(fold)) for fold in range(-1, training.folds)]

    def _weigh(self, evidence: FloatArray, training: TrainingUnion, queries: Mask) -> FloatArray:
        rows = queries[training.union.query_of_row] & training.known
        rows &= training.union.best_ranks <= DEEPEST
        return drawn(evidence[:, rows], training.relevant[rows].astype(np.float64))

    def _judge(
        self, evidence: FloatArray, training: TrainingUnion
    ) -> Callable[[tuple[float, ...]], FloatArray]:
        """Return a cached function from weights to the measure of every query."""
        return cache(lambda weights: training.measured(np.array(weights) @ evidence, self.measure))

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """Prepare with the given weights and so without probabilities. Raises ConfigError if there are no
        weights."""
        if self.weights is None:
            return super().unjudged(runs)
        self._check_weights(len(runs))
        self.retrievers_, self.weights_ = names_of(runs), np.array(self.weights)
        return self

    def _check_weights(self, count: int) -> None:
        if self.weights is not None and len(self.weights) != count:
            raise DataError(f"{len(self.weights)} weights for {count} runs", cure="give one weight per run")

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        return np.asarray(np.sort(weights[:, None] * evidence, axis=0).sum(axis=0))

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        return ScoreBreakdown(self.weights_[:, None] * evidence, np.zeros(union.rows), self.weights_)


def drawn(evidence: FloatArray, relevant: FloatArray, *, shrinkage: float = 10.0) -> FloatArray:
    """Fit convex weights to k × rows by logistic regression with a penalty of shrinkage/2 · Σ (wᵢ − w)².

    w is the single weight that fits the plain sum best, so few judgements give nearly equal weights; a
    weight that would be negative is 0.
    """
    count = len(evidence)
    ones = np.ones(len(relevant))
    prior = float(logit(np.clip(relevant.mean(), SURE, 1 - SURE))) if len(relevant) else 0.0
    total = np.vstack((evidence.sum(axis=0), ones))
    start = np.array([0.0, prior])
    common, intercept = newton(
        lambda theta: likelihood_sums(total, relevant, theta), start, np.array([1e-6, 0])
    )
    if not common > 0:
        return np.full(count, 1 / count)
    free = np.arange(count)
    while True:
        design = np.vstack((evidence[free], ones))
        centre = np.append(np.full(len(free), common), intercept)
        penalty = np.append(np.full(len(free), shrinkage), 0.0)
        offsets = newton(
            lambda theta: likelihood_sums(design, relevant, theta + centre),  # noqa: B023
            np.zeros(len(centre)),
            penalty,
        )
        weights = (offsets + centre)[:-1]
        if (weights >= 0).all() or len(free) == 1:
            break
        free = free[weights > 0]
    spread = np.zeros(count)
    spread[free] = np.maximum(weights, 0.0)
    return spread / spread.sum() if spread.sum() > 0 else np.full(count, 1 / count)


def tuned(count: int, judge: Callable[[tuple[float, ...]], float]) -> FloatArray:
    """Return the convex weights that `judge` rates best, from a grid for two runs, else varying one weight
    at a time.

    Ties go to the more even weights, so that noise does not exclude a retriever.
    """

    def value(weights: tuple[float, ...]) -> tuple[float, float]:
        return round(judge(weights), 10), -float(np.square(weights).sum())

    if count == 2:
        return np.array(max(((1 - step / 20, step / 20) for step in range(21)), key=value))
    best = tuple([1.0 / count] * count)
    highest = value(best)
    for _ in range(3):
        before = best
        for at in range(count):
            for factor in (0.0, 0.25, 0.5, 2.0, 4.0):
                raised = [*best[:at], best[at] * factor if best[at] else factor / count, *best[at + 1 :]]
                whole = sum(raised)
                tried = tuple(weight / whole for weight in raised) if whole > 0 else best
                if (now := value(tried)) > highest:
                    best, highest = tried, now
        if best == before:
            break
    return np.array(best)
