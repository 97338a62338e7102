"""The interface of every calibrator: a scikit-learn classifier from one score to P(relevant).

`fit(scores, y, *, groups=None)` learns from scores and binary relevance; `groups` names the list of each
score, for the calibrators that use whole lists. The constructor only stores its arguments; learned
attributes end in an underscore. Scores are a vector, or the first column of a matrix, so that a calibrator
can stand at the end of a scikit-learn pipeline.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError


def own_weight(positives: float, pairs: float, *, shrinkage: float, least: int = 2) -> float:
    """λ = n₊/(n₊ + shrinkage) in logit p = λ·logit p_own + (1 − λ)·logit p_pooled, for one silo or part.

    `shrinkage` is the number of relevant pairs at which both count the same. λ is 0 if there are fewer than
    `least` pairs or if all are of one class; such a silo or part has no calibrator of its own.
    """
    if pairs < least or not 0 < positives < pairs:
        return 0.0
    return positives / (positives + shrinkage)


class Calibrator(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Turns a retriever's scores into probabilities of relevance."""

    needs_lists = False
    """Whether the fitted model depends on `groups`."""

    def fit(
        self,
        scores: ArrayLike,
        y: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        judged: ArrayLike | None = None,
    ) -> Self:
        """Learn from scores and two-valued relevance (the larger value is "relevant").

        Rows outside the mask `judged` only complete their lists; their y is ignored.
        """
        values, relevant, known = self._checked(scores, y, judged)
        self._learn_lists(values, relevant, numbered(groups, len(values)), known)
        return self

    def predict_proba(self, scores: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """Two columns: P(not relevant), P(relevant)."""
        positive = self.probabilities(scores, groups=groups)
        return np.column_stack((1.0 - positive, positive))

    def probabilities(self, scores: ArrayLike, *, groups: ArrayLike | None = None) -> FloatArray:
        """P(relevant) of every score."""
        values = self._values(scores)
        return self._probabilities_lists(values, numbered(groups, len(values)))

    def predict(self, scores: ArrayLike, *, groups: ArrayLike | None = None) -> NDArray[Any]:
        """The more probable of the two values of `y`."""
        positive = self.probabilities(scores, groups=groups)
        labels: NDArray[Any] = self.classes_[(positive > 0.5).astype(np.intp)]
        return labels

    def _checked(
        self, scores: ArrayLike, y: ArrayLike, judged: ArrayLike | None
    ) -> tuple[FloatArray, FloatArray, NDArray[np.bool_]]:
        """Scores, relevance as 0.0 and 1.0, and the mask of judged rows."""
        matrix, labels = validate_data(self, _column(scores), y, dtype=np.float64)
        known = np.ones(len(labels), dtype=bool) if judged is None else np.asarray(judged, dtype=bool)
        relevant = np.zeros(len(labels))
        relevant[known] = self._binary(labels[known])
        return np.ascontiguousarray(matrix[:, 0]), relevant, known

    def _binary(self, labels: NDArray[Any]) -> IntArray:
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) > 2:
            kind = type_of_target(labels, input_name="y")
            raise DataError(f"Only binary classification is supported. The type of the target is {kind}.")
        if len(self.classes_) < 2:
            raise DataError(
                f"one class only: all {len(labels)} rows are {self.classes_[0]!r}",
                cure="a calibrator needs relevant and irrelevant examples",
            )
        return np.asarray(codes, dtype=np.int64)

    def _values(self, scores: ArrayLike) -> FloatArray:
        """Return checked scores; a vector is taken as one column if the calibrator was fitted on one
        column."""
        check_is_fitted(self)
        column = _column(scores) if self.n_features_in_ == 1 else scores
        matrix = validate_data(self, column, reset=False, dtype=np.float64)
        return np.ascontiguousarray(matrix[:, 0])

    def _learn_lists(
        self, scores: FloatArray, relevant: FloatArray, groups: IntArray | None, judged: NDArray[np.bool_]
    ) -> None:
        self._learn(scores[judged], relevant[judged])

    def _probabilities_lists(self, scores: FloatArray, groups: IntArray | None) -> FloatArray:
        return self._probabilities(scores)

    def _learn(self, scores: FloatArray, relevant: FloatArray) -> None:
        """Learn from checked arrays; `relevant` holds 0.0 and 1.0."""
        raise NotImplementedError

    def _probabilities(self, scores: FloatArray) -> FloatArray:
        """P(relevant) of checked scores."""
        raise NotImplementedError

    def _check_lists(self, with_groups: bool) -> None:
        """Raise DataError unless `groups` are passed to predict exactly when they were passed to fit."""
        if self.with_lists_ != with_groups:
            fitted, called = ("without", "with") if with_groups else ("with", "without")
            raise DataError(
                f"fitted {fitted} groups, called {called} them",
                cure="pass groups, the list of every score, to both or to neither",
            )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        # as in scikit-learn's isotonic regression: the natural input is a vector
        tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = False
        tags.classifier_tags.multi_class = False
        tags.classifier_tags.poor_score = True  # one score alone seldom tells the classes apart
        return tags


def _column(scores: ArrayLike) -> Any:
    array = scores if hasattr(scores, "ndim") else np.asarray(scores)
    return np.asarray(array).reshape(-1, 1) if array.ndim == 1 else array


def numbered(groups: ArrayLike | None, rows: int) -> IntArray | None:
    """Return groups as numbers from 0, None without groups. Raises DataError if their number is not
    `rows`."""
    if groups is None:
        return None
    names = np.asarray(groups).reshape(-1)
    if len(names) != rows:
        raise DataError(f"{len(names)} groups for {rows} scores", cure="name the list of every score")
    return np.unique(names, return_inverse=True)[1].astype(np.int64)


def numbered_lists(groups: ArrayLike | None, rows: int) -> IntArray:
    """As `numbered`; without groups every score is a list of its own."""
    numbers = numbered(groups, rows)
    return np.arange(rows) if numbers is None else numbers
