"""Intervals over folds and seeds."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import Interval

LEAST_FOLDS = 3
"""Least number of folds or seeds for which an interval is computed."""


def fold_interval(values: ArrayLike, *, level: float = 0.95, ci: str = "t") -> Interval:
    """Return mean ± q · s/√F over F folds or seeds, with F − 1 in the denominator of s.

    ci="t": q from Student's t with F − 1 degrees of freedom (2.776 for five folds); ci="normal": 1.96.
    """
    from scipy.special import ndtri, stdtrit

    finite = np.asarray(values, dtype=np.float64).reshape(-1)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        raise DataError("no value to make an interval of")
    if ci not in ("t", "normal"):
        raise ConfigError(f"unknown interval {ci!r}", key=ci, known=("t", "normal"))
    mean, folds = float(finite.mean()), len(finite)
    if folds < 2:
        return Interval(mean, float("nan"), float("nan"), folds, ci)
    tail = (1 + level) / 2
    quantile = float(stdtrit(folds - 1, tail) if ci == "t" else ndtri(tail))
    reach = quantile * float(finite.std(ddof=1)) / folds**0.5
    return Interval(mean, mean - reach, mean + reach, folds, ci)
