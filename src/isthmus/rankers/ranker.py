"""The interface of all rankers: train, score rows, rank lists, save."""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.config import settings_repr
from isthmus.errors import DataError
from isthmus.evaluation import evaluate_rows
from isthmus.tables import Bundle, Letor, Run

Scores = NDArray[np.float64]
WATCHED = "nDCG@10(empty=skip, ties=random)"
"""The measure for early stopping."""


class Saved(Bundle):
    """The content of a ranker's file: a JSON header with its kind, and arrays or a tree library's text."""

    noun = "ranker"


class Ranker(ABC):
    """Base of all rankers. A fitted one takes raw features: the scaling it was trained with is part of it."""

    kind: ClassVar[str]
    """Name of the kind in the ranker's file."""

    @abstractmethod
    def fit(self, letor: Letor, *, validation: Letor | None = None) -> Self:
        """Train on judged lists; with `validation`, stop at its best nDCG@10."""

    @abstractmethod
    def score(self, letor: Letor) -> Scores:
        """Return one score per row; larger is better."""

    @abstractmethod
    def saved(self) -> Saved:
        """Return everything that a file must contain."""

    @classmethod
    @abstractmethod
    def from_saved(cls, saved: Saved) -> Self:
        """Restore the ranker from `saved`."""

    def rank(self, letor: Letor, *, name: str = "") -> Run:
        """Return the lists in the order of their scores."""
        return letor.run(self.score(letor), name=name)

    def __repr__(self) -> str:
        return settings_repr(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the ranker to one file, atomically; `load_ranker` reads it back."""
        self.saved().write(path)


def check_width(letor: Letor, width: int) -> None:
    """Raise DataError if the data have another number of features than the ranker was trained on."""
    if letor.width != width:
        raise DataError(
            f"the data have {letor.width} features where the ranker takes {width}",
            cure="use the features it was trained on, in the same order",
        )


def validation_ndcg(letor: Letor, scores: Scores) -> float:
    """Return the mean nDCG@10 over lists with a relevant document, 0 if there is none; for early stopping."""
    value = evaluate_rows(letor.grades, scores, letor.offsets, [WATCHED])[WATCHED]
    return value if np.isfinite(value) else 0.0
