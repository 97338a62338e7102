"""Feature scaling, fitted from sums so that silos can fit it together, and saved with the model.

    minmax    per query, to 0..1: needs no fitting and survives silos with different units
    zscore    (x − mean) / standard deviation over all training rows
    log       sign(x) · log(1 + |x|)
    log-zscore  log, then zscore
    none

>>> north, south = ScalingStats.of(a, "zscore"), ScalingStats.of(b, "zscore")   # doctest: +SKIP
>>> scaling = Scaling.fit("zscore", north + south)                             # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import frozen
from isthmus.errors import ConfigError, DataError
from isthmus.rankers.ranker import check_width
from isthmus.tables import Letor

Floats = NDArray[np.float64]

SCALINGS = ("none", "minmax", "zscore", "log", "log-zscore")
_ROWS = 1 << 14  # rows handled together: the working copy stays in cache


@dataclass(frozen=True, eq=False)
class ScalingStats:
    """Feature statistics of one silo: a count, sums, sums of squares and ranges; statistics of silos add up.

    If a protocol can only add, the ranges may stay unknown (−∞, ∞).
    """

    count: int
    total: Floats
    squares: Floats
    low: Floats
    high: Floats

    @classmethod
    def of(cls, letor: Letor, kind: str) -> ScalingStats:
        """Return the statistics of a table's features, after the logarithm if `kind` takes one."""
        _check_kind(kind)
        total, squares = np.zeros(letor.width), np.zeros(letor.width)
        low, high = np.full(letor.width, np.inf), np.full(letor.width, -np.inf)
        for start in range(0, letor.rows, _ROWS):
            part = _finite(letor, start).astype(np.float64)
            if kind.startswith("log"):
                part = _signed_log(part)
            total += part.sum(axis=0)
            squares += np.einsum("ij,ij->j", part, part)
            np.minimum(low, part.min(axis=0), out=low)
            np.maximum(high, part.max(axis=0), out=high)
        return cls(letor.rows, total, squares, low, high)

    def __add__(self, other: ScalingStats) -> ScalingStats:
        if len(self.total) != len(other.total):
            raise DataError(
                f"statistics of {len(self.total)} features cannot be added to those of {len(other.total)}",
                cure="all silos must have the same features",
            )
        return ScalingStats(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )


@dataclass(frozen=True, eq=False)
class Scaling:
    """A fitted scaling: `scaling(letor)` returns the same table with scaled features."""

    kind: str
    width: int
    mean: NDArray[np.float32] | None = None
    factor: NDArray[np.float32] | None = None

    @classmethod
    def fit(cls, kind: str, stats: ScalingStats) -> Self:
        """Fit a scaling of a kind to rows with these statistics; a constant feature becomes 0."""
        _check_kind(kind)
        width = len(stats.total)
        if not kind.endswith("zscore"):
            return cls(kind, width)
        if not stats.count:
            raise DataError("no rows to fit a scaling on")
        mean = stats.total / stats.count
        mean_square = stats.squares / stats.count
        variance = mean_square - mean**2
        # A variance within the rounding error of the mean square counts as zero.
        varies = (stats.low < stats.high) & (variance > 1e-12 * mean_square)
        factor = np.where(varies, 1 / np.sqrt(np.where(varies, variance, 1)), 0)
        return cls(kind, width, mean.astype(np.float32), factor.astype(np.float32))

    @classmethod
    def of(cls, kind: str, letor: Letor) -> Self:
        """Fit a scaling of a kind to one table."""
        return cls.fit(kind, ScalingStats.of(letor, kind))

    def __call__(self, letor: Letor) -> Letor:
        """Return the table with scaled features; DataError if it has another number of features."""
        check_width(letor, self.width)
        scaled = np.empty(letor.features.shape, np.float32)
        for start in range(0, letor.rows, _ROWS):
            part = _finite(letor, start)
            if self.kind.startswith("log"):
                part = _signed_log(part)
            if self.mean is not None and self.factor is not None:
                part = (part - self.mean) * self.factor
            scaled[start : start + _ROWS] = part
        if self.kind == "minmax":
            _stretch_lists(scaled, letor.offsets)
        return replace(letor, features=frozen(scaled))

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return the arrays that a saved model needs besides `kind` and `width`."""
        if self.mean is None or self.factor is None:
            return {}
        return {"mean": self.mean, "factor": self.factor}

    @classmethod
    def from_arrays(cls, kind: str, width: int, arrays: Mapping[str, NDArray[np.float32]]) -> Self:
        """Restore a scaling from its `arrays`."""
        return cls(kind, width, arrays.get("mean"), arrays.get("factor"))


def _check_kind(kind: str) -> None:
    if kind not in SCALINGS:
        raise ConfigError(f"no feature scaling {kind!r}", key=kind, value=kind, known=SCALINGS)


def _finite(letor: Letor, start: int) -> NDArray[np.float32]:
    part: NDArray[np.float32] = letor.features[start : start + _ROWS]
    if not np.isfinite(part).all():
        row, column = (int(at) for at in np.argwhere(~np.isfinite(part))[0])
        query = letor.queries[letor.query_of_row[start + row]]
        raise DataError(
            f"feature {column + 1} of query {query!r} is {part[row, column]}",
            cure="features must be finite numbers",
        )
    return part


def _signed_log(values: NDArray[Any]) -> NDArray[Any]:
    logs: NDArray[Any] = np.copysign(np.log1p(np.abs(values)), values)
    return logs


def _stretch_lists(features: NDArray[np.float32], offsets: NDArray[np.int64]) -> None:
    """Scale every list's features to 0..1, in place; a feature constant in a list becomes 0."""
    bounds = offsets[np.concatenate(([True], np.diff(offsets) > 0))]  # without empty lists
    first = 0
    while first < len(bounds) - 1:
        last = max(int(np.searchsorted(bounds, bounds[first] + _ROWS, side="right")) - 1, first + 1)
        part, starts = features[bounds[first] : bounds[last]], bounds[first:last] - bounds[first]
        lengths = np.diff(bounds[first : last + 1])
        low = np.minimum.reduceat(part, starts, axis=0)
        span = np.maximum.reduceat(part, starts, axis=0) - low
        part -= np.repeat(low, lengths, axis=0)
        part *= np.repeat(np.where(span > 0, 1 / np.where(span > 0, span, 1), 0), lengths, axis=0)
        first = last
