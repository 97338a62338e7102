"""A logistic model from sums alone: what each holder of rows adds up, and the steps of whoever asks.

The rows stay where they are; loss, gradient and Hessian are sums over them, in the clear or under a secure
sum. A node needs this to learn with others, so it stands apart from the calibrators and scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]


def likelihood_sums(
    features: FloatArray, targets: FloatArray, theta: FloatArray, *, weights: FloatArray | None = None
) -> FloatArray:
    """(loss, gradient, Hessian row by row) of a logistic model, `features` holding one row per parameter."""
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

    It ends where the next step promises less than this share of the loss.
    """
    size = len(start)

    def at(theta: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        totals = sums(theta)
        loss = float(totals[0] + 0.5 * (penalty * theta**2).sum())
        hessian = totals[1 + size :].reshape(size, size) + np.diag(penalty)
        return loss, totals[1 : 1 + size] + penalty * theta, hessian

    theta = start.astype(np.float64)
    loss, gradient, hessian = at(theta)
    for _ in range(200):
        jitter = 1e-12 * max(np.trace(hessian), 1e-300) * np.eye(size)
        step = np.linalg.solve(hessian + jitter, gradient)
        decrement = float(gradient @ step)
        if decrement <= tolerance * max(1.0, abs(loss)):
            break
        for _ in range(40):
            tried = at(theta - step)
            if tried[0] <= loss - 1e-4 * float(gradient @ step) + 1e-12 * abs(loss):
                break
            step = step / 2
        theta = theta - step
        loss, gradient, hessian = tried
    return theta
