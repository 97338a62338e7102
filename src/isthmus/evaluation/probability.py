"""Calibration measures over (probability, outcome) pairs.

The ECE over all candidates is dominated by the many that are certainly not relevant. `calibration_of`
therefore lists the ECE of the top k first, beside its floor: the ECE of a perfectly calibrated model on as
many hits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, IntArray, frozen
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation.ranking import Ranking
from isthmus.randomness import Streams
from isthmus.report import Plot
from isthmus.tables import UNJUDGED, Qrels, Run

BINS = 15
DRAWS = 1_000
"""Number of simulated sets of outcomes behind a floor."""


@dataclass(frozen=True, eq=False)
class Reliability:
    """Predictions in bins, with the sum of probabilities and the sum of outcomes in each bin.

    Two objects with the same edges can be added, so that silos can pool theirs.
    """

    edges: FloatArray
    count: IntArray
    promised: FloatArray
    """The sum of probabilities in each bin."""
    came_true: FloatArray
    """The sum of outcomes in each bin."""

    @property
    def gaps(self) -> FloatArray:
        """|mean outcome − mean probability| of every bin; NaN where it is empty."""
        full = self.count > 0
        gap = np.full(len(self.count), np.nan)
        gap[full] = np.abs(self.came_true[full] - self.promised[full]) / self.count[full]
        return gap

    @property
    def ece(self) -> float:
        """Expected calibration error: Σ_b |b|/n · gap_b."""
        return float(np.abs(self.came_true - self.promised).sum() / self.count.sum())

    @property
    def mce(self) -> float:
        """Maximum calibration error: the largest gap of a bin that is not empty."""
        return float(np.nanmax(self.gaps))

    def __add__(self, other: Reliability) -> Reliability:
        if not np.array_equal(self.edges, other.edges):
            raise ConfigError("bins with different edges do not add; use how='width' and equal counts")
        return Reliability(
            self.edges,
            self.count + other.count,
            self.promised + other.promised,
            self.came_true + other.came_true,
        )

    def rows(self) -> list[dict[str, float]]:
        """Return one row per bin: its edges, count, mean probability and mean outcome."""
        size = np.maximum(self.count, 1)
        columns = self.edges[:-1], self.edges[1:], self.count, self.promised / size, self.came_true / size
        names = ("from", "to", "count", "probability", "frequency")
        return [dict(zip(names, map(float, row), strict=True)) for row in zip(*columns, strict=True)]


def reliability_diagram(named: Mapping[str, Reliability], *, caption: str = "") -> Plot:
    """Draw predicted probability against the observed share of relevant hits, with the number of predictions
    per bin below.

    Several (before and after, one per retriever) are drawn together; the diagonal is perfect calibration.
    """

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color="grey", lw=1, ls="--")
        counts = axes.inset_axes((0.0, -0.36, 1.0, 0.2), sharex=axes)
        for at, (name, bins) in enumerate(named.items()):
            full = bins.count > 0
            mean = bins.promised[full] / bins.count[full]
            (line,) = axes.plot(mean, bins.came_true[full] / bins.count[full], marker="o", ms=4)
            line.set_label(f"{name}, ECE {bins.ece:.3f}")
            width = np.diff(bins.edges) / (len(named) + 0.5)
            left = bins.edges[:-1] + at * width
            counts.bar(left, bins.count, width, align="edge", color=line.get_color())
            for place, count in zip(left + width / 2, bins.count.tolist(), strict=True):
                if count:
                    counts.text(place, count, f"{count:,}", ha="center", va="bottom", fontsize=5, rotation=90)
        counts.tick_params(labelbottom=False)
        counts.set_yscale("log")
        counts.set_ylim(0.8, 30 * max(int(bins.count.max()) for bins in named.values()))
        counts.set_ylabel("count")
        axes.set_xlabel("probability")
        axes.set_ylabel("share that was relevant")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.legend(loc="upper left")

    return Plot(draw, caption, (5.2, 6.0))


def reliability(
    probabilities: ArrayLike, outcomes: ArrayLike, *, bins: int = BINS, how: str = "width"
) -> Reliability:
    """Put predictions in bins.

    how="width": equal widths, [i/B, (i+1)/B), the last with its upper edge. how="mass": bins of about equal
    count over the sorted probabilities; equal probabilities always share a bin, so the order of the rows
    does not matter.
    """
    chance, truth = _pairs(probabilities, outcomes)
    if bins < 1:
        raise ConfigError(f"{bins} bins; at least one is needed", key="bins", value=bins)
    if how == "width":
        place = np.minimum((chance * bins).astype(np.int64), bins - 1)
        edges = np.linspace(0.0, 1.0, bins + 1)
    elif how == "mass":
        ordered = np.sort(chance)
        place = np.searchsorted(ordered, chance) * bins // len(chance)
        cuts = ordered[np.arange(1, bins) * len(ordered) // bins]
        edges = np.concatenate(([0.0], cuts, [1.0]))
    else:
        raise ConfigError(f"unknown bins {how!r}", key=how, known=("width", "mass"))
    count = np.bincount(place, minlength=bins)
    promised = np.bincount(place, weights=chance, minlength=bins)
    came_true = np.bincount(place, weights=truth, minlength=bins)
    return Reliability(frozen(edges), frozen(count), frozen(promised), frozen(came_true))


def ece(probabilities: ArrayLike, outcomes: ArrayLike, *, bins: int = BINS, how: str = "width") -> float:
    """Expected calibration error: Σ_b |b|/n · |mean outcome − mean probability|."""
    return reliability(probabilities, outcomes, bins=bins, how=how).ece


def mce(probabilities: ArrayLike, outcomes: ArrayLike, *, bins: int = BINS, how: str = "width") -> float:
    """Maximum calibration error over bins that are not empty."""
    return reliability(probabilities, outcomes, bins=bins, how=how).mce


def brier(probabilities: ArrayLike, outcomes: ArrayLike) -> float:
    """Brier score: mean (p − y)²."""
    chance, truth = _pairs(probabilities, outcomes)
    return float(np.mean((chance - truth) ** 2))


def brier_skill(probabilities: ArrayLike, outcomes: ArrayLike) -> float:
    """1 − Brier / π(1 − π), π the base rate; 0 if π is always predicted, NaN if all outcomes are equal."""
    base = base_rate(outcomes)
    constant = base * (1 - base)
    return 1 - brier(probabilities, outcomes) / constant if constant > 0 else float("nan")


def log_loss(probabilities: ArrayLike, outcomes: ArrayLike) -> float:
    """−mean(y ln p + (1 − y) ln(1 − p)), with p clipped to a machine epsilon from 0 and 1."""
    chance, truth = _pairs(probabilities, outcomes)
    least = np.finfo(np.float64).eps
    safe = np.clip(chance, least, 1 - least)
    return float(-np.mean(np.where(truth > 0, np.log(safe), np.log1p(-safe))))


def base_rate(outcomes: ArrayLike) -> float:
    """π: the share of outcomes that are 1."""
    return float(np.mean(np.asarray(outcomes, dtype=np.float64)))


def calibration(probabilities: ArrayLike, outcomes: ArrayLike, *, bins: int = BINS) -> dict[str, float]:
    """Return every calibration measure by name, with the number of pairs."""
    width = reliability(probabilities, outcomes, bins=bins)
    return {
        "ECE": width.ece,
        "ECE(mass)": ece(probabilities, outcomes, bins=bins, how="mass"),
        "MCE": width.mce,
        "Brier": brier(probabilities, outcomes),
        "Brier skill": brier_skill(probabilities, outcomes),
        "log-loss": log_loss(probabilities, outcomes),
        "base rate": base_rate(outcomes),
        "n": float(width.count.sum()),
    }


def outcomes_of(
    qrels: Qrels, run: Run, *, top: int | None = None, rel: int = 1, unjudged: str = "zero"
) -> tuple[FloatArray, FloatArray]:
    """Return a run's probabilities and their outcomes (1 relevant, 0 not), for all rows or the top k of
    judged queries.

    An unjudged document counts as not relevant (`unjudged="zero"`) or is left out (`"drop"`).
    """
    probabilities = run.required_probabilities
    if unjudged not in ("zero", "drop"):
        raise ConfigError(f"unknown unjudged={unjudged!r}", key=unjudged, known=("zero", "drop"))
    ranking = Ranking.of(qrels, run)
    mask: NDArray[np.bool_] = ranking.query_of_list[ranking.list_of_row] >= 0
    if top is not None:
        mask &= ranking.ranks <= top
    if unjudged == "drop":
        mask &= ranking.grades != UNJUDGED
    return probabilities[mask], (ranking.grades[mask] >= rel).astype(np.float64)


@dataclass(frozen=True)
class Floor:
    """The ECE of a perfectly calibrated model on the same hits: its mean and its 95 % quantile."""

    mean: float
    high: float


def sampling_floor(probabilities: ArrayLike, *, bins: int = BINS, draws: int = DRAWS, seed: int = 0) -> Floor:
    """Simulate the ECE of a perfectly calibrated model, with outcomes drawn from the probabilities
    themselves. Bins of few hits keep it above 0."""
    chance = np.asarray(probabilities, dtype=np.float64).reshape(-1)
    place = np.minimum((chance * bins).astype(np.int64), bins - 1)
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.diff(place[order], prepend=-1))
    chance = chance[order]
    rng = Streams(seed)("floor")
    errors = np.empty(draws)
    for at in range(draws):
        excess = (rng.random(len(chance)) < chance) - chance
        errors[at] = np.abs(np.add.reduceat(excess, starts)).sum() / len(chance)
    return Floor(float(errors.mean()), float(np.quantile(errors, 0.95)))


def calibration_of(
    qrels: Qrels, run: Run, *, top: int = 10, rel: int = 1, unjudged: str = "zero"
) -> dict[str, float]:
    """Return the ECE of a run's top k, its floor and the floor's 95 % quantile, then `calibration` over all
    rows."""
    hits = outcomes_of(qrels, run, top=top, rel=rel, unjudged=unjudged)
    every = calibration(*outcomes_of(qrels, run, rel=rel, unjudged=unjudged))
    if not len(hits[0]):
        return every
    floor = sampling_floor(hits[0])
    lead = {f"ECE@{top}": ece(*hits), f"ECE@{top} floor": floor.mean, f"ECE@{top} floor 95%": floor.high}
    return {**lead, f"log-loss@{top}": log_loss(*hits), f"n@{top}": float(len(hits[0])), **every}


def calibration_by_query(
    qrels: Qrels, run: Run, *, top: int = 10, rel: int = 1, unjudged: str = "zero"
) -> dict[str, dict[str, float]]:
    """Return values by measure and query over the top k of each list: log-loss, Brier, mean probability,
    precision."""
    first = run.keep(run.ranks <= top)
    values: dict[str, dict[str, float]] = {}
    for query in first.queries:
        own = first[[query]]
        if query not in qrels or not own.rows:
            continue
        chance, truth = outcomes_of(qrels, own, rel=rel, unjudged=unjudged)
        if len(chance):
            measured = {"log-loss": log_loss(chance, truth), "Brier": brier(chance, truth)}
            measured |= {"probability": float(chance.mean()), "precision": float(truth.mean())}
            for measure, value in measured.items():
                values.setdefault(f"{measure}@{top}", {})[query] = value
    return values


def _pairs(probabilities: ArrayLike, outcomes: ArrayLike) -> tuple[FloatArray, FloatArray]:
    chance = np.asarray(probabilities, dtype=np.float64).reshape(-1)
    truth = np.asarray(outcomes, dtype=np.float64).reshape(-1)
    if len(chance) != len(truth) or not len(chance):
        raise DataError(f"{len(chance)} probabilities and {len(truth)} outcomes")
    if not ((chance >= 0) & (chance <= 1)).all():
        raise DataError("a probability lies outside 0..1 or is NaN")
    if not ((truth == 0) | (truth == 1)).all():
        raise DataError("an outcome is neither 0 nor 1", cure="compare grades with a threshold first")
    return chance, truth
