"""Logistic regression from sums alone: the sums over each party's rows, and the steps of the party that asks.

The rows stay where they are; loss, gradient and Hessian are sums over them, in the clear or under a secure
sum. Nodes need this to learn together, so it depends neither on the calibrators nor on scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]


def likelihood_sums(
    features: FloatArray, targets: FloatArray, theta: FloatArray, *, weights: FloatArray | None = None
) -> FloatArray:
    """(loss, gradient, Hessian row by row) of a logistic model; `features` has one row per parameter."""
    from scipy.special import expit

    margin = theta @ features
    weight = np.ones(len(targets)) if weights is None else weights
    residual = weight * (expit(margin) - targets)
    loss = weight @ (np.logaddexp(0.0, margin) - targets * margin)
    curvature = features * (weight * expit(margin) * expit(-margin))
    return np.concatenate(([loss], features @ residual, (curvature @ features.T).reshape(-1)))


def newton(
    sums: Callable[[FloatArray], FloatArray],
    start: FloatArray,
    penalty: FloatArray,
    *,
    tolerance: float = 1e-15,
) -> FloatArray:
    """Minimise Σ log-loss + ½ Σ penalty·θ² by damped Newton steps, from sums alone.

    It stops when the predicted decrease of the next step is at most `tolerance` times the loss.
    """
    return newton_together(
        lambda places, thetas: [sums(theta) for theta in thetas],
        [newton_steps(start, penalty, tolerance=tolerance)],
    )[0]


Steps: TypeAlias = Generator[FloatArray, FloatArray, FloatArray]
"""Yields every θ for which it is to be sent the sums, and returns the last."""


def newton_together(
    sums: Callable[[Sequence[int], Sequence[FloatArray]], Sequence[FloatArray]], fits: Sequence[Steps]
) -> list[FloatArray]:
    """Run several fits at once: `sums(places, thetas)` answers for all unfinished fits in one question."""
    at = {place: next(fit) for place, fit in enumerate(fits)}
    fitted: dict[int, FloatArray] = {}
    while at:
        places = list(at)
        for place, totals in zip(places, sums(places, [at[place] for place in places]), strict=True):
            try:
                at[place] = fits[place].send(totals)
            except StopIteration as end:
                fitted[place] = end.value
                del at[place]
    return [fitted[place] for place in range(len(fits))]


def newton_steps(
    start: FloatArray,
    penalty: FloatArray,
    *,
    least: FloatArray | None = None,
    tolerance: float = 1e-15,
) -> Steps:
    """The steps of `newton`; no θ falls below `least`, if that is given.

    A parameter at its bound that would move below it stays there for a step (Bertsekas 1982).
    """
    size = len(start)
    bound = np.full(size, -np.inf) if least is None else least

    def at(theta: FloatArray, totals: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        loss = float(totals[0] + 0.5 * (penalty * theta**2).sum())
        hessian = totals[1 + size :].reshape(size, size) + np.diag(penalty)
        return loss, totals[1 : 1 + size] + penalty * theta, hessian

    theta = np.maximum(start.astype(np.float64), bound)
    loss, gradient, hessian = at(theta, (yield theta))
    for _ in range(200):
        free = (theta > bound) | (gradient < 0)
        part = hessian[np.ix_(free, free)]
        jitter = 1e-12 * max(np.trace(part), 1e-300) * np.eye(len(part))
        step = np.zeros(size)
        step[free] = np.linalg.solve(part + jitter, gradient[free])
        decrement = float(gradient @ step)
        if decrement <= tolerance * max(1.0, abs(loss)):
            break
        for _ in range(40):
            moved = np.maximum(theta - step, bound)
            tried = at(moved, (yield moved))
            if tried[0] <= loss - 1e-4 * float(gradient @ (theta - moved)) + 1e-12 * abs(loss):
                break
            step = step / 2
        theta = moved
        loss, gradient, hessian = tried
    return theta
