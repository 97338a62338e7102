"""What every ranker does: score rows, rank lists, save itself."""

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
"""What early stopping looks at."""


class Saved(Bundle):
    """What a ranker's file holds, a JSON header with arrays or a tree library's own text; the header says its
    kind."""

    noun = "ranker"


class Ranker(ABC):
    """A fitted ranker takes raw features: whatever scaling it was trained with is part of it."""

    kind: ClassVar[str]
    """What its file calls it."""

    @abstractmethod
    def fit(self, letor: Letor, *, validation: Letor | None = None) -> Self:
        """Learn from judged lists; with `validation`, stop where its nDCG@10 is best."""

    @abstractmethod
    def score(self, letor: Letor) -> Scores:
        """One score per row, larger is better."""

    @abstractmethod
    def saved(self) -> Saved:
        """Everything a file must hold."""

    @classmethod
    @abstractmethod
    def from_saved(cls, saved: Saved) -> Self:
        """The ranker that `saved` came from."""

    def rank(self, letor: Letor, *, name: str = "") -> Run:
        """The lists in the order of their scores."""
        return letor.run(self.score(letor), name=name)

    def __repr__(self) -> str:
        return settings_repr(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the ranker to one file, atomically; `load_ranker` reads it back."""
        self.saved().write(path)


def check_width(letor: Letor, width: int) -> None:
    """Data with another number of features than the ranker was trained on are a DataError."""
    if letor.width != width:
        raise DataError(
            f"the data have {letor.width} features where the ranker takes {width}",
            cure="use the features it was trained on, in the same order",
        )


def validation_ndcg(letor: Letor, scores: Scores) -> float:
    """Mean nDCG@10 over the lists with a relevant document, 0 without one: what a central fit watches."""
    value = evaluate_rows(letor.grades, scores, letor.offsets, [WATCHED])[WATCHED]
    return value if np.isfinite(value) else 0.0
