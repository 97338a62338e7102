"""Calibrators that are one curve of the score: logistic curves on a few basis functions, and isotonic steps.

The bases of the logistic curves are chosen such that a curve never decreases if no coefficient is negative.
All but plain isotonic and the paper's Beta CDF are fitted from sums alone (`fit_sums`), on one silo or on
many.
"""

from __future__ import annotations

from itertools import combinations
from typing import ClassVar, Self

import numpy as np
from scipy.special import betainc, expit, logit

from isthmus.arrays import FloatArray
from isthmus.calibration.estimator import Calibrator
from isthmus.calibration.sums import (
    CLIP,
    Ask,
    Bins,
    LabelledScores,
    Likelihood,
    Totals,
    design,
    extremes,
    order_statistics,
)
from isthmus.errors import ConfigError, DataError
from isthmus.logistic import newton

RIDGE = 1e-6


class SumCalibrator(Calibrator):
    """A calibrator that learns from sums over (score, relevance) pairs and never needs the pairs
    themselves."""

    def fit_sums(self, ask: Ask) -> Self:
        """Learn from `ask(question) -> summed answers`: see `isthmus.calibration.sums`. Raises DataError if
        all pairs are of one class."""
        pairs, relevant = ask(Totals())
        if not 0 < relevant < pairs:
            raise DataError(
                f"one class only: {relevant:.0f} of {pairs:.0f} pairs are relevant",
                cure="a calibrator needs relevant and irrelevant examples",
            )
        self.classes_ = np.array([0, 1])
        self.n_features_in_ = 1
        self._learn_sums(ask, float(pairs), float(relevant))
        return self

    def _learn(self, scores: FloatArray, relevant: FloatArray) -> None:
        self._learn_sums(LabelledScores(scores, relevant).answer, float(len(scores)), float(relevant.sum()))

    def _learn_sums(self, ask: Ask, pairs: float, relevant: float) -> None:
        raise NotImplementedError


class _Logistic(SumCalibrator):
    """σ(Σ coefᵢ·basisᵢ(s) + intercept) by maximum likelihood, without negative coefficients if `monotone`.

    `target_smoothing` replaces the targets 0 and 1 by Platt's 1/(n₋+2) and (n₊+1)/(n₊+2), which keeps
    probabilities away from 0 and 1 if examples are few.
    """

    basis: ClassVar[str]
    intercept: ClassVar[bool] = True

    def __init__(self, *, monotone: bool = True, target_smoothing: bool = False) -> None:
        self.monotone = monotone
        self.target_smoothing = target_smoothing

    def _learn_sums(self, ask: Ask, pairs: float, relevant: float) -> None:
        targets = (0.0, 1.0)
        if self.target_smoothing:
            targets = (1 / (pairs - relevant + 2), (relevant + 1) / (relevant + 2))
        self.bounds_ = np.array(extremes(ask))
        bounds = (float(self.bounds_[0]), float(self.bounds_[1]))
        size = len(design(self.basis, np.zeros(1), bounds))
        slopes = range(size - 1 if self.intercept else size)

        def fitted(free: tuple[int, ...]) -> tuple[float, FloatArray]:
            """Return loss and parameters of the best model in which only these slopes (and the intercept) may
            differ from 0."""
            chosen = np.array([*free, *range(len(slopes), size)], dtype=np.intp)

            def sums(part: FloatArray) -> FloatArray:
                theta = np.zeros(size)
                theta[chosen] = part
                totals = ask(Likelihood(self.basis, bounds, theta, targets))
                hessian = totals[1 + size :].reshape(size, size)[np.ix_(chosen, chosen)]
                return np.concatenate((totals[:1], totals[1 : 1 + size][chosen], hessian.reshape(-1)))

            start = np.zeros(len(chosen))
            if self.intercept:
                start[-1] = logit(relevant / pairs)
            theta = np.zeros(size)
            if len(chosen):
                theta[chosen] = newton(sums, start, np.where(chosen < len(slopes), RIDGE, 0.0))
            return float(ask(Likelihood(self.basis, bounds, theta, targets))[0]), theta

        _, self.coef_ = fitted(tuple(slopes))
        if self.monotone and (self.coef_[: len(slopes)] < 0).any():
            fewer = [fitted(free) for count in range(len(slopes)) for free in combinations(slopes, count)]
            allowed = [(loss, theta) for loss, theta in fewer if (theta[: len(slopes)] >= 0).all()]
            _, self.coef_ = min(allowed, key=lambda fit: fit[0])

    def _probabilities(self, scores: FloatArray) -> FloatArray:
        features = design(self.basis, scores, (float(self.bounds_[0]), float(self.bounds_[1])))
        return np.asarray(expit(self.coef_ @ features))


class Platt(_Logistic):
    """σ(A·s + B) (Platt 1999), by default with A ≥ 0 and smoothed targets."""

    basis = "line"

    def __init__(self, *, monotone: bool = True, target_smoothing: bool = True) -> None:
        super().__init__(monotone=monotone, target_smoothing=target_smoothing)


class Temperature(_Logistic):
    """σ(logit(s′)/T), T > 0, with s′ the score scaled to (0, 1) by the extremes of the training scores."""

    basis = "logit"
    intercept = False

    @property
    def temperature(self) -> float:
        """T; infinite if the slope is not positive, so that the score has no effect."""
        return float(1 / self.coef_[0]) if self.coef_[0] > 0 else float("inf")


class Gaussian(_Logistic):
    """σ(a·s² + b·s + c) (Kweon et al. 2022), non-decreasing between the training extremes and flat beyond."""

    basis = "quadratic"


class Gamma(_Logistic):
    """σ(a·ln x + b·x + c) with x = s − min + δ (Kweon et al. 2022), non-decreasing like `Gaussian`."""

    basis = "gamma"


class Beta(_Logistic):
    """σ(a·ln s′ − b·ln(1 − s′) + c), a, b ≥ 0 (Kull et al. 2017, beta calibration)."""

    basis = "beta"


class BetaCDF(Calibrator):
    """I_{s′}(a, b), the distribution function of a Beta law, which the paper prints as beta calibration.

    Kept for comparison; it has no prior term, so it cannot express how rare relevance is.
    """

    def _learn(self, scores: FloatArray, relevant: FloatArray) -> None:
        from scipy.optimize import minimize

        self.bounds_ = np.array([scores.min(), scores.max()])
        unit = self._unit(scores)

        def loss(logs: FloatArray) -> float:
            probabilities = np.clip(betainc(np.exp(logs[0]), np.exp(logs[1]), unit), 1e-12, 1 - 1e-12)
            return -float(np.mean(np.where(relevant > 0, np.log(probabilities), np.log1p(-probabilities))))

        optimum = minimize(loss, np.zeros(2), method="L-BFGS-B", bounds=[(-7.0, 7.0)] * 2)
        self.shape_ = np.exp(optimum.x)

    def _probabilities(self, scores: FloatArray) -> FloatArray:
        return np.asarray(betainc(self.shape_[0], self.shape_[1], self._unit(scores)))

    def _unit(self, scores: FloatArray) -> FloatArray:
        low, high = self.bounds_
        unit = (scores - low) / (high - low) if high > low else np.full_like(scores, 0.5)
        return np.clip(unit, CLIP, 1 - CLIP)


class Isotonic(Calibrator):
    """Isotonic regression: the non-decreasing function with the least squared error, linear between training
    scores and flat outside their range."""

    def _learn(self, scores: FloatArray, relevant: FloatArray) -> None:
        values, at = np.unique(scores, return_inverse=True)
        counts = np.bincount(at).astype(np.float64)
        self._keep(values, np.bincount(at, weights=relevant) / counts, counts)

    def _keep(self, scores: FloatArray, rates: FloatArray, weights: FloatArray) -> None:
        """Pool adjacent violators, and keep the knots at the ends of every level stretch."""
        from scipy.optimize import isotonic_regression

        level = np.clip(isotonic_regression(rates, weights=weights).x, 0.0, 1.0)
        inner = (level[1:-1] == level[:-2]) & (level[1:-1] == level[2:])
        corners = np.concatenate(([True], ~inner, [True]))[: len(level)]
        self.knots_ = scores[corners]
        self.levels_ = level[corners]

    def _probabilities(self, scores: FloatArray) -> FloatArray:
        return np.interp(scores, self.knots_, self.levels_)


class BinnedIsotonic(SumCalibrator, Isotonic):
    """Isotonic regression on equal-mass bins with rate (n₊ + ε)/(n + 2ε) each, linear between bin means.

    `bins=None` takes one bin per fifty pairs, between 5 and 50 of them.
    """

    def __init__(self, *, bins: int | None = None, smoothing: float = 1.0) -> None:
        self.bins = bins
        self.smoothing = smoothing

    def _learn_sums(self, ask: Ask, pairs: float, relevant: float) -> None:
        if self.bins is not None and self.bins < 1:
            raise ConfigError(f"bins = {self.bins}: at least one bin is needed", key="bins", value=self.bins)
        count = self.bins or int(np.clip(pairs // 50, 5, 50))
        ranks = np.unique(np.ceil(pairs * np.arange(1, count) / count))
        edges = np.unique(order_statistics(ask, ranks[ranks >= 1])) if count > 1 else np.empty(0)
        counts, hits, total = ask(Bins(edges)).reshape(3, -1)
        some = counts > 0
        counts, hits, total = counts[some], hits[some], total[some]
        self._keep(total / counts, (hits + self.smoothing) / (counts + 2 * self.smoothing), counts)
