"""Figures of calibration: reliability with its counts, scores by relevance, what a threshold keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from isthmus.calibration.decisions import ThresholdCurve
from isthmus.evaluation import Reliability
from isthmus.report import Plot


def reliability_diagram(named: Mapping[str, Reliability], *, caption: str = "") -> Plot:
    """What was promised against what came true, with the number of predictions in every bin below.

    Several (before and after, one per retriever) are drawn together; the diagonal is honest.
    """

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color="grey", lw=1, ls="--")
        counts = axes.inset_axes((0.0, -0.42, 1.0, 0.24), sharex=axes)
        for at, (name, found) in enumerate(named.items()):
            full = found.count > 0
            mean = found.promised[full] / found.count[full]
            (line,) = axes.plot(mean, found.came_true[full] / found.count[full], marker="o", ms=4)
            line.set_label(f"{name}, ECE {found.ece:.3f}")
            width = np.diff(found.edges) / (len(named) + 0.5)
            left = found.edges[:-1] + at * width
            counts.bar(left, found.count, width, align="edge", color=line.get_color())
            for place, count in zip(left + width / 2, found.count.tolist(), strict=True):
                if count:
                    counts.text(place, count, f"{count:,}", ha="center", va="bottom", fontsize=5, rotation=90)
        counts.set_yscale("symlog")
        counts.set_ylim(0, 30 * max(int(found.count.max()) for found in named.values()))
        counts.set_ylabel("count")
        axes.set_xlabel("probability")
        axes.set_ylabel("share that was relevant")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.legend(loc="upper left")

    return Plot(draw, caption, (5.2, 6.0))


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
