"""Linear and MLP rankers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal, Self

import numpy as np

from isthmus.errors import ConfigError, DataError
from isthmus.randomness import Streams
from isthmus.rankers.ranker import Ranker, Saved, Scores, validation_ndcg
from isthmus.rankers.scaling import Scaling
from isthmus.rankers.training import (
    Array,
    Descent,
    LocalTraining,
    Parameters,
    initial_parameters,
    network_scores,
)
from isthmus.tables import Letor

Scoring = Literal["expected", "argmax"]
CENTRAL = LocalTraining(epochs=100, weight_decay=1.0)
"""Default training of a central fit; chosen on validation queries."""


class MLP(Ranker):
    """A multi-layer perceptron with ReLU.

    >>> ranker = MLP((32,)).fit(train, validation=validation)   # doctest: +SKIP
    >>> ranker.rank(test)                                          # doctest: +SKIP

    `training.epochs` is the maximum number of epochs; with validation data, training stops `patience` epochs
    after the best nDCG@10 and keeps that model. With a graded loss the score is the expected grade;
    `scoring="argmax"` is the rule of the paper mode: the most probable grade, ties by its probability, then
    in row order.
    """

    kind: ClassVar[str] = "network"
    parameters_: Parameters
    scaling_: Scaling
    history_: list[tuple[float, float]]
    """Training loss and validation nDCG@10 (0 without validation) of every epoch."""

    def __init__(
        self,
        hidden: Sequence[int] = (32,),
        *,
        training: LocalTraining = CENTRAL,
        scaling: str = "log-zscore",
        scoring: Scoring = "expected",
        patience: int = 15,
        seed: int = 0,
    ) -> None:
        self.hidden = tuple(hidden)
        self.training = training
        self.scaling = scaling
        self.scoring: Scoring = scoring
        self.patience = patience
        self.seed = seed

    @classmethod
    def of(
        cls,
        parameters: Mapping[str, Array],
        scaling: Scaling,
        *,
        training: LocalTraining = CENTRAL,
        scoring: Scoring = "expected",
    ) -> MLP:
        """Build a ranker from parameters that were trained elsewhere, for instance by a federation."""
        weights = [value for name, value in parameters.items() if name.startswith("weight")]
        hidden = [weight.shape[1] for weight in weights[:-1]]
        ranker = MLP(hidden, training=training, scaling=scaling.kind, scoring=scoring)
        ranker.parameters_ = dict(parameters)
        ranker.scaling_ = scaling
        return ranker

    def fit(self, letor: Letor, *, validation: Letor | None = None, grades: int | None = None) -> Self:
        """Train on judged lists; with `validation`, keep the epoch with the best nDCG@10.

        `grades` is the number of grades of a graded loss; by default one more than the highest grade in the
        data.
        """
        streams = Streams(self.seed)
        self.scaling_ = Scaling.of(self.scaling, letor)
        scaled = self.scaling_(letor)
        watched = None if validation is None else self.scaling_(validation)
        outputs = self.training.resolved_loss().outputs(grades or int(letor.grades.max(initial=0)) + 1)
        start = initial_parameters(letor.width, self.hidden, outputs, streams("init"))
        descent = Descent(start, self.training)
        self.history_ = []
        best, best_epoch = -1.0, 0
        for epoch in range(self.training.epochs):
            loss = descent.epoch(scaled, streams("epoch", epoch))
            _check_finite(loss, epoch, self.training)
            value = (
                0.0
                if watched is None
                else validation_ndcg(watched, scores_of(descent.parameters(), watched, self.scoring))
            )
            self.history_.append((loss, value))
            if watched is None or value > best:
                best, best_epoch, self.parameters_ = value, epoch, descent.parameters()
            elif epoch - best_epoch >= self.patience:
                break
        return self

    def score(self, letor: Letor) -> Scores:
        """Return one score per row; larger is better."""
        if not hasattr(self, "parameters_"):
            raise DataError("this ranker has not been trained", cure="call fit, or load a saved one")
        return scores_of(self.parameters_, self.scaling_(letor), self.scoring)

    def saved(self) -> Saved:
        """Return everything that a file must contain."""
        header = {
            "kind": self.kind,
            "hidden": list(self.hidden),
            "scoring": self.scoring,
            "scaling": {"kind": self.scaling_.kind, "width": self.scaling_.width},
            "training": asdict(self.training),
            "parameters": list(self.parameters_),
        }
        scaling = {f"scaling-{name}": array for name, array in self.scaling_.arrays().items()}
        return Saved(header, {**self.parameters_, **scaling})

    @classmethod
    def from_saved(cls, saved: Saved) -> MLP:
        """Restore the ranker from `saved`."""
        header = saved.header
        parts = {name.removeprefix("scaling-"): array for name, array in saved.arrays.items()}
        scaling = Scaling.from_arrays(header["scaling"]["kind"], header["scaling"]["width"], parts)
        parameters = {name: saved.arrays[name] for name in header["parameters"]}
        training = LocalTraining(**header["training"])
        return cls.of(parameters, scaling, training=training, scoring=header["scoring"])


class Linear(MLP):
    """A linear ranker: an MLP without hidden layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__((), **options)


def scores_of(parameters: Mapping[str, Array], scaled: Letor, scoring: Scoring = "expected") -> Scores:
    """Return one score per (already scaled) row: the only output, or the expected or most probable grade."""
    outputs = network_scores(parameters, scaled.features).astype(np.float64)
    if outputs.shape[1] == 1:
        return outputs[:, 0]
    outputs -= outputs.max(axis=1, keepdims=True)
    probabilities = np.exp(outputs)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    if scoring == "argmax":
        return _most_probable(probabilities, scaled)
    expected: Scores = probabilities @ np.arange(probabilities.shape[1])
    return expected


def _most_probable(probabilities: Scores, letor: Letor) -> Scores:
    """Return the most probable grade plus a fraction below 1 that breaks ties by probability, then by row."""
    grade = probabilities.argmax(axis=1)
    order = np.lexsort((np.arange(letor.rows), -probabilities.max(axis=1), -grade, letor.query_of_row))
    place = np.empty(letor.rows)
    place[order] = np.arange(letor.rows) - letor.offsets[letor.query_of_row[order]] + 1
    lengths = np.diff(letor.offsets)[letor.query_of_row]
    scores: Scores = grade + 1 - place / (lengths + 1)
    return scores


def _check_finite(loss: float, epoch: int, training: LocalTraining) -> None:
    if not np.isfinite(loss):
        raise ConfigError(
            f"training diverged in epoch {epoch + 1}: the loss is {loss} at a learning rate of"
            f" {training.learning_rate:g}",
            key="learning_rate",
            value=training.learning_rate,
            expected="a smaller learning rate, or scaled features",
        )
