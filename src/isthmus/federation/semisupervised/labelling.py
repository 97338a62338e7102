"""Grades for pairs that nobody judged: a labeller's guesses, and the controls that need no labeller.

    soft        the labeller's probability of every grade (the paper's code)
    hard        the most probable grade (the paper)
    negatives   only pairs for which grade 0 is probable enough, as grade 0; other pairs are left out
    confident   only pairs for which some grade is probable enough, under that grade
    zero        every pair is irrelevant: the control without a labeller
    oracle      the true grades: the value of a perfect labeller

A labeller trained on pairs inside a silo expects as many relevant ones across silos, where there are fewer.
`calibrated` first fits its guesses to the judged pairs (Platt's curve on the log-odds of being relevant),
then shifts them to the rate of relevance that the unjudged pairs themselves suggest, by the
expectation-maximisation of Saerens et al. (2002) for shifted priors.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray
from isthmus.calibration import Platt
from isthmus.errors import ConfigError
from isthmus.rankers import Parameters, TrainingRows, network_scores
from isthmus.tables import Letor

LABELS = ("soft", "hard", "negatives", "confident", "zero", "oracle")
Kind = Literal["soft", "hard", "negatives", "confident", "zero", "oracle"]
_EDGE = 1e-6

_log = logging.getLogger("isthmus.federation")


@dataclass(frozen=True)
class Labelling:
    """Options for training on unjudged pairs.

    - `beta`: the weight of the mean loss over them, beside that over judged pairs (eq. 9);
    - `confidence`: the least probability of a guess that `negatives` and `confident` accept;
    - `rounds`: the number of times that pairs are labelled, each time by the model trained so far;
    - `refresh`: r of y ← (1 − r)·y + r·(the model's guess), from the second labelling on;
    - `ramp`: the shares of rounds before which β is 0, and after which it is whole; it rises in between;
    - `by_noise`: weigh a pair by 1/(1 + e²), e the error bar of its counts.
    """

    kind: Kind = "soft"
    beta: float = 0.3
    calibrated: bool = False
    confidence: float = 0.9
    rounds: int = 1
    refresh: float = 0.0
    ramp: tuple[float, float] | None = None
    by_noise: bool = False

    def __post_init__(self) -> None:
        if self.kind not in LABELS:
            raise ConfigError(f"no labels {self.kind!r}", key=self.kind, known=LABELS)
        if not (self.beta >= 0 and 0 < self.confidence <= 1 and 0 <= self.refresh <= 1 and self.rounds >= 1):
            raise ConfigError("beta ≥ 0, 0 < confidence ≤ 1, 0 ≤ refresh ≤ 1, rounds ≥ 1", key="labelling")
        if self.ramp is not None and not 0 <= self.ramp[0] <= self.ramp[1] <= 1:
            raise ConfigError("a ramp rises between two shares of the rounds", key="ramp", value=self.ramp)

    @property
    def asks(self) -> bool:
        """Whether a labeller is used at all."""
        return self.kind not in ("zero", "oracle")

    def strength(self, done: float) -> float:
        """Return β after a share of the rounds."""
        if self.ramp is None:
            return self.beta
        first, last = self.ramp
        risen = (done - first) / (last - first) if last > first else float(done >= last)
        return self.beta * min(max(risen, 0.0), 1.0)


@dataclass(frozen=True, eq=False)
class Guesses:
    """A probability for every grade of every pair, and each pair's weight; a weight of 0 leaves it out."""

    probabilities: NDArray[np.float32]
    weights: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class SiloRows:
    """Training data of one silo: its judged pairs, and pairs across silos without known grades.

    `cross.grades` are 0 unless the rows are those of the oracle. `errors` are the cross pairs' error bars,
    NaN if unknown.
    """

    labelled: Letor
    cross: Letor
    errors: FloatArray

    def without_cross(self) -> SiloRows:
        """Return the judged pairs alone."""
        none = np.zeros(self.cross.rows, np.bool_)
        return SiloRows(self.labelled, self.cross.keep(none), self.errors[none])


def grade_probabilities(parameters: Parameters, features: NDArray[np.float32], grades: int) -> FloatArray:
    """Return a network's probability of every grade for (already scaled) rows; one output is the grade."""
    outputs = network_scores(parameters, features).astype(np.float64)
    if outputs.shape[1] == 1:
        return _around(np.clip(outputs[:, 0], 0, grades - 1), grades)
    outputs -= outputs.max(axis=1, keepdims=True)
    probabilities = np.exp(outputs)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return probabilities


def _around(values: FloatArray, grades: int) -> FloatArray:
    """Distribute each value over the two grades beside it, so that their mean is the value."""
    below = np.minimum(values.astype(np.int64), max(grades - 2, 0))
    probabilities = np.zeros((len(values), grades))
    rows = np.arange(len(values))
    if grades == 1:
        probabilities[:, 0] = 1
        return probabilities
    probabilities[rows, below] = 1 - (values - below)
    probabilities[rows, below + 1] = values - below
    return probabilities


def guess(labeller: Parameters, silo: SiloRows, labelling: Labelling, grades: int) -> Guesses:
    """Label a silo's cross pairs; features must be scaled already."""
    if not labelling.asks:
        known = silo.cross.grades if labelling.kind == "oracle" else np.zeros_like(silo.cross.grades)
        truth = np.eye(grades)[known]
        return Guesses(truth.astype(np.float32), _noise_weights(silo, labelling))
    probabilities = grade_probabilities(labeller, silo.cross.features, grades)
    judged = silo.labelled.grades > 0
    if labelling.calibrated and silo.cross.rows and judged.any() and not judged.all():
        probabilities = _calibrated(labeller, silo, grades)
    weights = _noise_weights(silo, labelling)
    likeliest = probabilities.argmax(axis=1)
    if labelling.kind == "negatives":
        weights = weights * (probabilities[:, 0] >= labelling.confidence)
        likeliest = np.zeros_like(likeliest)
    if labelling.kind == "confident":
        weights = weights * (probabilities.max(axis=1) >= labelling.confidence)
    if labelling.kind != "soft":
        probabilities = np.eye(grades)[likeliest]
    return Guesses(probabilities.astype(np.float32), weights.astype(np.float32))


def _noise_weights(silo: SiloRows, labelling: Labelling) -> NDArray[np.float32]:
    spread = silo.errors if labelling.by_noise else np.zeros(silo.cross.rows)
    unknown = np.isnan(spread)
    if unknown.any():
        _log.warning("%d cross pairs have no error bars and are left out: exchange again", unknown.sum())
    return np.where(unknown, 0, 1 / (1 + spread**2)).astype(np.float32)


def _calibrated(labeller: Parameters, silo: SiloRows, grades: int) -> FloatArray:
    """Return probabilities calibrated on the silo's judged pairs, shifted to the rate of the cross pairs.

    A graded labeller also gives the probability of each grade above 0. From a single score only relevance is
    learned, and the grades above 0 keep their shares among the judged pairs.
    """
    relevant = silo.labelled.grades > 0
    own, foreign = (_evidence(labeller, part.features) for part in (silo.labelled, silo.cross))
    curve = Platt().fit(own, relevant)
    moved = shifted(curve.predict_proba(foreign)[:, 1], float(relevant.mean()))
    outputs = network_scores(labeller, silo.cross.features).shape[1]
    if outputs == 1:
        usual = np.bincount(silo.labelled.grades[relevant], minlength=grades)[1:grades]
        above = np.broadcast_to(usual / usual.sum(), (len(moved), grades - 1))
    else:
        probabilities = grade_probabilities(labeller, silo.cross.features, grades)
        above = probabilities[:, 1:] / np.maximum(1 - probabilities[:, :1], _EDGE)
    return np.column_stack((1 - moved, above * moved[:, None]))


def _evidence(labeller: Parameters, features: NDArray[np.float32]) -> FloatArray:
    """Return a value that grows with relevance: a single score, or the log-odds of a grade above 0."""
    outputs = network_scores(labeller, features).astype(np.float64)
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    return _log_odds(1 - grade_probabilities(labeller, features, outputs.shape[1])[:, 0])


def _log_odds(probabilities: FloatArray) -> FloatArray:
    inside = np.clip(probabilities, _EDGE, 1 - _EDGE)
    odds: FloatArray = np.log(inside / (1 - inside))
    return odds


def shifted(probabilities: FloatArray, prior: float, *, least: float = 0.05, steps: int = 200) -> FloatArray:
    """Shift probabilities learned at one rate of relevance to the rate that they themselves suggest.

    Expectation-maximisation (Saerens, Latinne & Decaestecker 2002): π ← mean p', with p' the probabilities
    after their odds are multiplied by π(1 − prior)/((1 − π) prior). It starts at the old rate and does not
    fall below a share `least` of it: if guesses are vague, the likeliest rate is 0, without any evidence for
    that.
    """
    odds = np.clip(probabilities, _EDGE, 1 - _EDGE)
    odds = odds / (1 - odds) * (1 - prior) / prior
    rate = prior
    for _ in range(steps):
        moved = odds * rate / (1 - rate)
        estimate = float(np.clip(np.mean(moved / (1 + moved)), least * prior, 1 - _EDGE))
        if abs(estimate - rate) < 1e-9:
            break
        rate = estimate
    moved = odds * rate / (1 - rate)
    chance: FloatArray = moved / (1 + moved)
    return chance


def mixed(old: Guesses | None, new: Guesses, refresh: float) -> Guesses:
    """Mix old and new guesses, y ← (1 − r)·y + r·(new guess); r = 0 replaces the old ones."""
    if old is None or not refresh:
        return new
    probabilities = (1 - refresh) * old.probabilities + refresh * new.probabilities
    return Guesses(probabilities.astype(np.float32), new.weights)


def joint_rows(silo: SiloRows, guesses: Guesses, beta: float) -> TrainingRows:
    """Join judged and guessed rows in one table whose mean loss is L_labelled + β·L_cross (eq. 9)."""
    labelled, cross = silo.labelled, silo.cross
    grades = guesses.probabilities.shape[1]
    truth = np.eye(grades, dtype=np.float32)[labelled.grades]
    mask = guesses.weights > 0
    if beta == 0 or not mask.any():
        return TrainingRows.of_letor(labelled, weights=np.ones(labelled.rows), targets=truth)
    rows = labelled.rows + int(mask.sum())
    probabilities, weights = guesses.probabilities[mask], guesses.weights[mask]
    across = TrainingRows.of_letor(
        replace(cross.keep(mask), grades=probabilities.argmax(axis=1).astype(np.int32)),
        weights=beta * rows * weights / weights.sum(),
        targets=probabilities,
    )
    weight = rows / labelled.rows
    inside = TrainingRows.of_letor(labelled, weights=np.full(labelled.rows, weight), targets=truth)
    return TrainingRows.joined([inside, across])
