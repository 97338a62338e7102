"""The FedRisk paper's claims about Table 1 and Figure 4, checked against this run.

A claim holds, does not hold, or cannot be decided from this run. Each is checked under both scorings of
documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isthmus.evaluation import paired_t
from isthmus_reproduce.fedrisk.cells import CENTRAL, MAIN, Floats, Outcome, Row, figure_4
from isthmus_reproduce.fedrisk.plans import ARGMAX
from isthmus_reproduce.intervals import LEAST_FOLDS, fold_interval

Verdict = Literal["holds", "does not hold", "cannot be told"]
SURE = 0.05
CONVERGED, FLAT = 20, 1.0
"""A curve has converged by this round if it then stays within so many points (×100) of its end."""
GAINS = (
    ("FedProx", "nDCG@5", 15.6),
    ("FedAvg", MAIN, 18.0),
    ("FedAdagrad", MAIN, 39.7),
    ("FedAdagrad", "nDCG@5", 52.1),
)
"""Baseline, measure, and by how many per cent FedRisk is better as printed."""


@dataclass(frozen=True)
class Claim:
    """A printed claim, the corresponding value of this run, and the verdict."""

    text: str
    scoring: str
    value: str
    verdict: Verdict


def claims(outcome: Outcome) -> Iterator[Claim]:
    """Yield every claim under both scorings, from the rows of paper mode."""
    for scoring in ("expected grade", ARGMAX):
        rows = {
            name: _row(outcome, name, scoring)
            for name in ("FedRisk", "FedProx", "FedAvg", "FedAdagrad", CENTRAL)
        }
        risk = rows["FedRisk"]
        if risk is None:
            continue
        for name, measure, per_cent in GAINS:
            if (other := rows[name]) is not None:
                text = f"+{per_cent} % over {name} in {measure}"
                gain, verdict = _gain(risk, other, measure)
                yield Claim(text, scoring, f"{gain:+.1f} %", verdict)
        if (central := rows[CENTRAL]) is not None:
            yield _equal(risk, central, scoring)
        if (prox := rows["FedProx"]) is not None:
            yield _narrower(risk, prox, scoring)
        yield _converged(outcome, scoring)


def _row(outcome: Outcome, name: str, scoring: str) -> Row | None:
    return outcome.row("1", "paper", name, ARGMAX if scoring == ARGMAX else "")


def _gain(risk: Row, other: Row, measure: str) -> tuple[float, Verdict]:
    test = paired_t(risk.by_query(measure), other.by_query(measure))
    gain = 100 * (risk.mean(measure) / other.mean(measure) - 1)
    if test.p >= SURE:
        return gain, "cannot be told"
    return gain, "holds" if test.difference > 0 else "does not hold"


def _equal(risk: Row, central: Row, scoring: str) -> Claim:
    gain, verdict = _gain(risk, central, MAIN)
    if verdict == "cannot be told":  # the claim is equality: an undecided test with a small gain supports it
        verdict = "holds" if abs(gain) < 5 else "cannot be told"
    return Claim(f"equal to centralised in {MAIN}", scoring, f"{gain:+.1f} %", verdict)


def _narrower(risk: Row, prox: Row, scoring: str) -> Claim:
    text = f"a narrower interval than FedProx in {MAIN}"
    if len(risk.runs) < LEAST_FOLDS:
        return Claim(text, scoring, f"{len(risk.runs)} folds", "cannot be told")
    widths = [
        interval.high - interval.low
        for row in (risk, prox)
        for interval in [fold_interval(row.by_fold(MAIN))]
    ]
    value = f"± {widths[0] / 2:.2f} against ± {widths[1] / 2:.2f}"
    return Claim(text, scoring, value, "holds" if widths[0] < widths[1] else "does not hold")


def _converged(outcome: Outcome, scoring: str) -> Claim:
    text = f"converged before round {CONVERGED}"
    run = figure_4("paper")["FedRisk"]
    curves: Floats = 100 * outcome.curves(run, ARGMAX if scoring == ARGMAX else "curve")
    rounds = int(np.isfinite(curves).all(axis=0).sum()) if curves.size else 0
    if rounds <= CONVERGED:
        return Claim(text, scoring, f"{rounds} rounds", "cannot be told")
    mean = curves[:, :rounds].mean(axis=0)
    off = float(np.abs(mean[CONVERGED - 1 :] - mean[-1]).max())
    return Claim(text, scoring, f"within {off:.2f} points", "holds" if off < FLAT else "does not hold")
