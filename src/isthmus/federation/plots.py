"""Plots of a training run: the learning curve, the weights of silos, and refused answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.federation.rounds import RoundRecord
from isthmus.partition import LabelCounts
from isthmus.report import Page, Plot, Section, Series, Table, line_plot

History = Sequence[RoundRecord]
_SHADES = ("#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#fde725")
"""Grades from low to high."""


def curve(history: History) -> Plot:
    """Validation nDCG@10 after every round."""
    points = [(record.round, record.measure) for record in history if record.measure is not None]
    return _line(points, "validation", "nDCG@10", "After every round")


def lengths(history: History) -> Plot:
    """‖θ‖ over the rounds, as a power of ten: growth shows as a slope, freezing as none."""
    points = [(record.round, float(np.log10(record.norm))) for record in history if record.norm]
    return _line(points, "‖θ‖", "log10 ‖θ‖", "Length of the global model")


def _line(points: Sequence[tuple[int, float]], name: str, y: str, caption: str) -> Plot:
    line = Series([x for x, _ in points], [value for _, value in points])
    return line_plot({name: line}, x="round", y=y, caption=caption)


def weights(history: History) -> Plot:
    """Every candidate's weight in every round; crosses are answers that were refused."""
    rows = [record.weights for record in history]
    return _mosaic(history, rows, "weight", "Weights; a cross is an answer that was not used")


def risks(history: History) -> Plot:
    """Every candidate's risk in every round."""
    return _mosaic(history, [record.risks for record in history], "risk", "Risks; a cross as before")


def _mosaic(history: History, rows: Sequence[Mapping[str, float]], quantity: str, caption: str) -> Plot:
    names = sorted({name for row in rows for name in row} | {name for r in history for name in r.rejected})
    cells: NDArray[np.float64] = np.full((len(names), len(history)), np.nan)
    place = {name: at for at, name in enumerate(names)}
    for column, row in enumerate(rows):
        for name, value in row.items():
            cells[place[name], column] = value
    crosses = [(column, place[name]) for column, r in enumerate(history) for name in r.rejected]

    def draw(axes: Any) -> None:
        image = axes.imshow(cells, aspect="auto", cmap="viridis", interpolation="none")
        if crosses:
            columns, places = zip(*crosses, strict=True)
            axes.scatter(columns, places, marker="x", s=12, color="crimson")
        if len(names) <= 40:
            axes.set_yticks(range(len(names)), names, fontsize=7)
        else:
            axes.set_ylabel("silo")
        axes.set_xlabel("round")
        axes.grid(visible=False)
        axes.figure.colorbar(image, ax=axes, label=quantity)

    return Plot(draw, caption, size=(7.5, min(9.0, 2.0 + 0.14 * len(names))))


def who_holds_what(table: LabelCounts, *, label: str = "grade", unit: str = "rows") -> Plot:
    """How many rows (or queries) of every grade each silo holds, as `Deal.label_counts` counts them."""
    silos = np.arange(len(table.counts))

    def draw(axes: Any) -> None:
        base = np.zeros(len(silos))
        for at, (name, counts) in enumerate(zip(table.labels.tolist(), table.counts.T, strict=True)):
            shade = _SHADES[at % len(_SHADES)]
            axes.bar(silos, counts, 0.9, bottom=base, label=f"{label} {name}", color=shade)
            base += counts
        axes.set_xlabel("silo")
        axes.set_ylabel(unit)
        axes.set_xlim(-0.6, len(silos) - 0.4)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False, axis="x")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)

    return Plot(draw, f"Who holds what: {unit} by {label}, silo by silo", size=(7.5, 3.2))


def refusals(history: History) -> Table:
    """Who was refused how often, and why the last time."""
    refused: dict[str, tuple[int, str]] = {}
    for record in history:
        for name, why in record.rejected.items():
            refused[name] = refused.get(name, (0, ""))[0] + 1, why
    rows = tuple((name, times, why) for name, (times, why) in sorted(refused.items()))
    return Table(("silo", "rounds", "last reason"), rows, title="Answers that were not used")


def run_page(history: History, title: str, *, label_counts: LabelCounts | None = None) -> Page:
    """One page for a run; with `label_counts` it shows how many rows of every grade each silo has."""
    parts: list[Section] = []
    if label_counts is not None:
        parts.append(Section("The silos", (who_holds_what(label_counts),)))
    if any(record.measure is not None for record in history):
        parts.append(Section("Learning", (curve(history),)))
    if any(record.weights for record in history):
        parts.append(Section("Weights", (weights(history),)))
    if any(record.risks for record in history):
        parts.append(Section("Risks", (risks(history),)))
    parts.append(Section("The global model", (lengths(history),)))
    if any(record.rejected for record in history):
        parts.append(Section("Refusals", (refusals(history),)))
    last = history[-1] if history else RoundRecord(0)
    protected = f" Protection: {last.protection}." if last.protection else ""
    lead = f"{len(history)} rounds. Privacy of the updates: {last.privacy}.{protected}"
    return Page(title, tuple(parts), lead=lead)
