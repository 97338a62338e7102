"""Plots of curves over rounds for the FedRisk report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.report import Plot
from isthmus_reproduce.intervals import LEAST_FOLDS, fold_interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Curves of the folds over rounds; NaN after a run stopped.

    The plot shows the mean over folds for the rounds that all of them reached, with a 95 % t band if
    requested.
    """

    folds: Floats
    colour: int
    dashed: bool = False
    band: bool = True

    @property
    def rounds(self) -> Floats:
        """The plotted rounds, from 1."""
        rounds: Floats = 1.0 + np.flatnonzero(np.isfinite(self.folds).all(axis=0)).astype(np.float64)
        return rounds

    @property
    def known(self) -> Floats:
        """Folds × plotted rounds."""
        return self.folds[:, np.isfinite(self.folds).all(axis=0)]


def curves_plot(
    curves: Mapping[str, Curve], *, y: str, caption: str, levels: Mapping[str, float] | None = None
) -> Plot:
    """Plot curves by name, and levels to compare them with as dotted lines; the legend stands outside."""
    flat = dict(levels or {})

    def draw(axes: Any) -> None:
        for name, curve in curves.items():
            _draw(axes, name, curve)
        for shade, (name, level) in zip(("0.35", "0.6", "0.75"), flat.items(), strict=False):
            axes.axhline(level, color=shade, linestyle=":", linewidth=1.4, label=name)
        axes.set_xlabel("round")
        axes.set_ylabel(y)
        axes.set_ylim(*_limits(curves, flat))
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return Plot(draw, caption, size=(8.4, 4.0))


def _draw(axes: Any, name: str, curve: Curve) -> None:
    style = {"color": f"C{curve.colour}", "linestyle": "--" if curve.dashed else "-"}
    axes.plot(curve.rounds, curve.known.mean(axis=0), label=name, linewidth=1.5, **style)
    if curve.band and len(curve.known) >= LEAST_FOLDS:
        intervals = [fold_interval(column) for column in curve.known.T]
        low, high = [one.low for one in intervals], [one.high for one in intervals]
        axes.fill_between(curve.rounds, low, high, color=f"C{curve.colour}", alpha=0.13, lw=0)


def _limits(curves: Mapping[str, Curve], levels: Mapping[str, float]) -> tuple[float, float]:
    """Return limits with room for every curve and level; bands of a few folds may be cut."""
    values = [*levels.values(), *(float(v) for c in curves.values() for v in c.known.mean(axis=0))]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.07 * (high - low) or 1.0
    return low - room, high + room
