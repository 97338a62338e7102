"""Figures of calibration: scores by relevance, and what a threshold keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from isthmus.calibration.decisions import ThresholdCurve
from isthmus.report import Plot


def score_histogram(scores: ArrayLike, relevant: ArrayLike, *, x: str = "score", caption: str = "") -> Plot:
    """How the scores of relevant and of other documents are spread, each as a share of its kind."""
    values, hits = np.asarray(scores, dtype=np.float64), np.asarray(relevant, dtype=bool)

    def draw(axes: Any) -> None:
        edges = np.histogram_bin_edges(values, bins=40)
        for kind, mask in (("not relevant", ~hits), ("relevant", hits)):
            count = int(mask.sum())
            weights = np.full(count, 1.0 / max(count, 1))
            axes.hist(values[mask], bins=edges, weights=weights, alpha=0.6, label=f"{kind} ({count:,})")
        axes.set_xlabel(x)
        axes.set_ylabel("share")
        axes.legend()

    return Plot(draw, caption)


def threshold_plot(curve: ThresholdCurve, *, caption: str = "") -> Plot:
    """Precision, recall and how much is kept, by the probability that is asked for."""

    def draw(axes: Any) -> None:
        axes.plot(curve.thresholds, curve.precision, label="precision")
        axes.plot(curve.thresholds, curve.recall, label="recall")
        axes.plot(curve.thresholds, curve.kept / curve.kept.max(), label="share kept", ls=":")
        axes.set_xlabel("probability asked for")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.legend()

    return Plot(draw, caption)
