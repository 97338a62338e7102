"""Plots of a training run: the learning curve, the weights of silos, and refused answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import several
from isthmus.evaluation import LARGE_LOSS, Evaluation, Interval, bootstrap
from isthmus.federation.rounds import RoundRecord
from isthmus.federation.settings import WATCHED
from isthmus.partition import LabelCounts
from isthmus.report import Page, Plot, Section, Series, Table, line_plot

History = Sequence[RoundRecord]
_SHADES = ("#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#fde725")
"""Colours of grades, from low to high."""
CELLS = "an empty cell: not asked in that round; a cross: an answer that was not used"


def curve(history: History) -> Plot:
    """Plot `WATCHED` on validation queries after every round."""
    points = [(record.round, record.measure) for record in history if record.measure is not None]
    caption = "Validation queries that have a relevant document, after every round"
    return _line(points, "validation", WATCHED, caption)


def lengths(history: History) -> Plot:
    """Plot log₁₀ ‖θ‖ over the rounds: growth shows as a slope, and a frozen model as a flat line."""
    points = [(record.round, float(np.log10(record.norm))) for record in history if record.norm]
    return _line(points, "‖θ‖", "length ‖θ‖, log₁₀", "Length of the global model after every round")


def _line(points: Sequence[tuple[int, float]], name: str, y: str, caption: str) -> Plot:
    line = Series([x for x, _ in points], [value for _, value in points])
    return line_plot({name: line}, x="round", y=y, caption=caption)


def weights(history: History) -> Plot:
    """Plot every candidate's weight in every round; crosses mark answers that were not used."""
    rows = [record.weights for record in history]
    return _mosaic(history, rows, "weight", f"Weights; {CELLS}")


def risks(history: History) -> Plot:
    """Plot every candidate's risk in every round; crosses mark answers that were not used."""
    return _mosaic(history, [record.risks for record in history], "risk", f"Risks; {CELLS}")


def _mosaic(history: History, rows: Sequence[Mapping[str, float]], quantity: str, caption: str) -> Plot:
    names = sorted({name for row in rows for name in row} | {name for r in history for name in r.rejected})
    cells: NDArray[np.float64] = np.full((len(names), len(history)), np.nan)
    place = {name: at for at, name in enumerate(names)}
    for column, row in enumerate(rows):
        for name, value in row.items():
            cells[place[name], column] = value
    crosses = [(record.round, place[name]) for record in history for name in record.rejected]

    first, last = (history[0].round, history[-1].round) if history else (1, 1)

    def draw(axes: Any) -> None:
        place = (first - 0.5, last + 0.5, len(names) - 0.5, -0.5)
        image = axes.imshow(cells, aspect="auto", cmap="viridis", interpolation="none", extent=place)
        if crosses:
            columns, places = zip(*crosses, strict=True)
            axes.scatter(columns, places, marker="x", s=12, color="crimson")
        if len(names) <= 40:
            axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_ylabel("silo")
        axes.set_xlabel("round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False)
        axes.figure.colorbar(image, ax=axes, label=quantity)

    return Plot(draw, caption, size=(7.5, min(9.0, 2.0 + 0.14 * len(names))))


def who_holds_what(table: LabelCounts, *, label: str = "grade", unit: str = "rows") -> Plot:
    """Plot how many rows (or queries) of every grade each silo holds, as counted by `Deal.label_counts`."""
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
        if len(silos) <= 20:
            digits = len(str(len(silos) - 1))
            axes.set_xticks(silos, [f"silo-{at:0{digits}}" for at in silos], rotation=60, fontsize=7)
        else:
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(visible=False, axis="x")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), reverse=True)

    return Plot(draw, f"Who holds what: {unit} by {label}, silo by silo", size=(7.5, 3.2))


def refusals(history: History) -> Table:
    """List how often each silo's answers were refused, and the last reason."""
    refused: dict[str, tuple[int, str]] = {}
    for record in history:
        for name, why in record.rejected.items():
            refused[name] = refused.get(name, (0, ""))[0] + 1, why
    rows = tuple((name, times, why) for name, (times, why) in sorted(refused.items()))
    return Table(("silo", "rounds", "last reason"), rows, title="Answers that were not used")


def result_of(evaluation: Evaluation | None, single: Evaluation | None = None) -> str:
    """Summarise the test result of a run in a sentence or two: its first measure, compared with that of a
    single feature if given."""
    if evaluation is None or not evaluation.measures:
        return "No test queries: nothing was measured."
    measure = evaluation.measures[0]
    values = evaluation.values[measure]
    mean = bootstrap(values)
    result = f"{measure} {_with_interval(mean, '')} on {several(mean.n, 'test query', 'test queries')}."
    if single is None:
        return result
    gains = values - single.values[measure]
    gain, lost = bootstrap(gains), int((gains < 0).sum())
    verdict = "better" if gain.low > 0 else "worse" if gain.high < 0 else "not clearly better or worse"
    return (
        f"{result} That is {verdict} than {single.run} alone, which ranks validation queries best"
        f" ({single[measure]:.3f}): {_with_interval(gain, '+')}. {int((gains > 0).sum()):,} queries gained,"
        f" {lost:,} got worse, {int((gains < -LARGE_LOSS).sum()):,} of them by more than {LARGE_LOSS:g}."
    )


def _with_interval(interval: Interval, sign: str) -> str:
    value, low, high = (f"{bound:{sign}.3f}" for bound in (interval.value, interval.low, interval.high))
    return f"{value} (95 % interval {low} to {high})"


def run_page(
    history: History, title: str, *, result: str = "", label_counts: LabelCounts | None = None
) -> Page:
    """Build the report page of a run, result first; `label_counts` adds the rows of every grade by silo."""
    last = history[-1] if history else RoundRecord(0)
    protected = f" Protection: {last.protection}." if last.protection else ""
    rounds = f"{several(len(history), 'round')}. Privacy of the updates: {last.privacy}.{protected}"
    parts: list[Section] = []
    if any(record.measure is not None for record in history):
        parts.append(Section("Learning", (curve(history),)))
    if label_counts is not None:
        parts.append(Section("The silos", (who_holds_what(label_counts),)))
    if any(record.weights for record in history):
        parts.append(Section("Weights", (weights(history),)))
    if any(record.risks for record in history):
        parts.append(Section("Risks", (risks(history),)))
    if any(record.rejected for record in history):
        parts.append(Section("Refusals", (refusals(history),)))
    parts.append(Section("The global model", (lengths(history),)))
    return Page(title, tuple(parts), lead=" ".join(filter(None, (result, rounds))))
