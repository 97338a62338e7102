"""Softmax across a list: for tasks where one answer per query is right.

Every candidate of a list competes with the others and with "none of these":

    P(i | list) = exp(zᵢ) / (1 + Σⱼ exp(zⱼ)),   zᵢ = Σₖ wₖ·xₖᵢ + intercept + bias(itemᵢ)

so probabilities of a list sum to at most one, and a list of one candidate is plain logistic regression.

`NoisySoftmax` adds label noise: in a share ε of the lists, any of the n candidates is equally likely to be
right,

    P(i | list) = (1 − ε)·exp(zᵢ) / (1 + Σⱼ exp(zⱼ)) + ε/n

Without it, the few texts whose label contradicts all evidence flatten the curve of all others: the clearest
answers get too high a probability, the rest too low a one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration.estimator import Calibrator, numbered_lists

BIAS_PENALTY = 1.0
"""Penalty on an item's bias, which shrinks it as a standard normal prior would."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A fitted softmax: a weight per feature, an intercept, and a bias per item."""

    weights: FloatArray
    intercept: float
    biases: FloatArray

    def margins(self, features: FloatArray, items: IntArray | None) -> FloatArray:
        """Return z of every candidate; `features` has one row per weight, and an item of −1 has no bias."""
        margins = self.weights @ features + self.intercept
        if items is None:
            return np.asarray(margins)
        return np.asarray(margins + np.where(items >= 0, np.append(self.biases, 0.0)[items], 0.0))


def choice_probabilities(margins: FloatArray, groups: IntArray) -> FloatArray:
    """P(i | list) for every candidate; groups are numbered from 0."""
    top = np.zeros(groups.max(initial=-1) + 1)
    np.maximum.at(top, groups, margins)
    odds = np.exp(margins - top[groups])
    total = np.exp(-top) + np.bincount(groups, weights=odds, minlength=len(top))
    return np.asarray(odds / total[groups])


def fit_choice(
    features: FloatArray,
    relevant: FloatArray,
    groups: IntArray,
    *,
    items: IntArray | None = None,
    nonnegative: bool = False,
) -> Choice:
    """Fit by maximum likelihood with lightly shrunk weights; several right answers of a list share its one
    vote."""
    from scipy.optimize import Bounds, minimize

    size, labels = len(features), 0 if items is None else int(items.max(initial=-1)) + 1
    scale = np.where((spread := features.std(axis=1)) > 0, spread, 1.0)
    scaled = features / scale[:, None]
    votes = np.bincount(groups, weights=relevant)
    targets = relevant / np.maximum(votes, 1.0)[groups]
    penalty = np.concatenate((np.full(size, 1e-6), [1e-4], np.full(labels, BIAS_PENALTY)))

    def loss(theta: FloatArray) -> tuple[float, FloatArray]:
        model = Choice(theta[:size], float(theta[size]), theta[size + 1 :])
        margins = model.margins(scaled, items)
        probabilities = choice_probabilities(margins, groups)
        none = 1.0 - np.bincount(groups, weights=probabilities)
        right = np.log(np.maximum(probabilities, 1e-300)) @ targets
        right += np.log(np.maximum(none, 1e-300)) @ (votes == 0)
        slope = probabilities - targets
        biases = np.empty(0) if items is None else np.bincount(items, weights=slope, minlength=labels)
        gradient = np.concatenate((scaled @ slope, [slope.sum()], biases)) + penalty * theta
        return float(-right + 0.5 * penalty @ theta**2), gradient

    lowest = np.concatenate((np.full(size, 0.0 if nonnegative else -np.inf), np.full(1 + labels, -np.inf)))
    optimum = minimize(
        loss,
        np.zeros(len(lowest)),
        jac=True,
        method="L-BFGS-B",
        bounds=Bounds(lowest, np.full(len(lowest), np.inf)),
        options={"maxiter": 1000, "ftol": 1e-13, "gtol": 1e-9},
    ).x
    return Choice(optimum[:size] / scale, float(optimum[size]), optimum[size + 1 :])


class Softmax(Calibrator):
    """P(relevant) by a softmax across each list, for single-label tasks.

    `fit(…, items=names)` learns a bias per item as well (a label's prior). Without groups every score
    competes with "none of these" alone, which is Platt's curve.
    """

    needs_lists = True

    def fit(
        self,
        scores: ArrayLike,
        y: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        judged: ArrayLike | None = None,
        items: ArrayLike | None = None,
    ) -> Self:
        """Learn a weight, an intercept and, with `items`, a bias per item. A list is to be judged as a whole
        or not at all."""
        values, relevant, known = self._checked(scores, y, judged)
        lists = numbered_lists(groups, len(values))
        codes = None
        self.items_ = np.empty(0, dtype="U1")
        if items is not None:
            named = np.asarray(items, dtype=np.str_)[known]
            self.items_, codes = np.unique(named, return_inverse=True)
        self.choice_ = fit_choice(
            values[known][None, :],
            relevant[known],
            np.unique(lists[known], return_inverse=True)[1],
            items=codes,
            nonnegative=True,
        )
        self.with_lists_ = groups is not None
        return self

    def probabilities(
        self, scores: ArrayLike, *, groups: ArrayLike | None = None, items: ArrayLike | None = None
    ) -> FloatArray:
        """P(relevant) of every score; an item that did not occur in fitting has no bias."""
        values = self._values(scores)
        self._check_lists(groups is not None)
        lists = numbered_lists(groups, len(values))
        codes = None if items is None else self._codes(np.asarray(items, dtype=np.str_))
        return choice_probabilities(self.choice_.margins(values[None, :], codes), lists)

    def _codes(self, items: NDArray[Any]) -> IntArray:
        if not len(self.items_):
            return np.full(len(items), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.items_, items), len(self.items_) - 1)
        return np.where(self.items_[at] == items, at, -1)


LARGEST_NOISE = 0.5


class NoisySoftmax(Softmax):
    """A softmax across each list in which a share of the labels is noise; items have no biases."""

    def fit(
        self,
        scores: ArrayLike,
        y: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        judged: ArrayLike | None = None,
        items: ArrayLike | None = None,
    ) -> Self:
        """Learn a weight and an intercept, then the share of noise and the factor by which it scales them."""
        from scipy.optimize import minimize

        super().fit(scores, y, groups=groups, judged=judged)
        values, relevant, known = self._checked(scores, y, judged)
        lists = np.unique(numbered_lists(groups, len(values))[known], return_inverse=True)[1]
        plain, right = self.choice_, relevant[known] > 0
        margins, sizes = plain.margins(values[known][None, :], None), np.bincount(lists)[lists]
        unanswered = np.bincount(lists, weights=right) == 0

        def loss(theta: FloatArray) -> float:
            clean = choice_probabilities(np.exp(theta[0]) * margins, lists)
            noisy = (1 - theta[1]) * clean + theta[1] / sizes
            none = (1 - theta[1]) * (1 - np.bincount(lists, weights=clean))[unanswered]
            return -float(np.log(np.maximum(np.concatenate((noisy[right], none)), 1e-300)).sum())

        bounds = [(-1.0, 2.0), (0.0, LARGEST_NOISE)]
        steeper, self.noise_ = minimize(loss, np.array([0.0, 0.01]), method="L-BFGS-B", bounds=bounds).x
        factor = float(np.exp(steeper))
        self.choice_ = Choice(factor * plain.weights, factor * plain.intercept, plain.biases)
        return self

    def probabilities(
        self, scores: ArrayLike, *, groups: ArrayLike | None = None, items: ArrayLike | None = None
    ) -> FloatArray:
        """P(relevant) of every score."""
        clean = super().probabilities(scores, groups=groups)
        lists = numbered_lists(groups, len(clean))
        return np.asarray((1 - self.noise_) * clean + self.noise_ / np.bincount(lists)[lists])
