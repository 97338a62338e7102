"""The report of the FedRisk reproduction: tables, figures and conclusions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from isthmus.federation import FedRisk, who_holds_what
from isthmus.partition import LabelCounts
from isthmus.report import Cell as Shown
from isthmus.report import Page, Plot, Section, Table
from isthmus_reproduce.fedrisk import printed
from isthmus_reproduce.fedrisk.cells import (
    BASELINE,
    CENTRAL,
    LAST,
    MAIN,
    RANDOM,
    REFERENCED,
    Outcome,
    Row,
    figure_2,
    figure_4,
    figure_5,
    holdings,
    last,
    restlessness,
)
from isthmus_reproduce.fedrisk.claims import claims
from isthmus_reproduce.fedrisk.plans import ARGMAX, MEASURES, MODES, RATES, RunName
from isthmus_reproduce.fedrisk.plots import Curve, curves_plot
from isthmus_reproduce.fedrisk.trials import PROSE, Part, Trials, Writer
from isthmus_reproduce.intervals import LEAST_FOLDS


def report(outcome: Outcome, data: str) -> Page:
    """Build the report's page."""
    writer, trials = _Tables(outcome, data), Trials(outcome, data)
    sections = [
        Section(heading, tuple(parts))
        for heading, written in (
            ("What it says", writer.verdicts()),
            ("Table 1", writer.table_1()),
            ("The printed claims", writer.claims()),
            ("Figure 2: silos alike and not", writer.silos_alike()),
            ("Figure 3: who holds what", writer.who_holds_what()),
            ("Figure 4: FedProx and FedRisk", writer.two_curves()),
            ("Figure 5: mixing with the previous model", writer.mixes()),
            ("Figures 2, 4 and 5 by the most probable grade", writer.by_argmax()),
            ("Why the printed curves are flat", trials.growth()),
            ("Three silos in ten with inverted grades", trials.attack()),
            ("Rounds in which every silo is bad", trials.overrun()),
            ("Table 1, measure by measure", writer.measures()),
            ("Time", writer.time()),
        )
        if (parts := list(written))
    ]
    return Page(f"FedRisk on {data}: printed, paper mode, sound mode", tuple(sections), writer.lead())


class _Tables(Writer):
    """Sections on Table 1 and the figures, with conclusions."""

    def lead(self) -> str:
        protocol = self.outcome.protocol
        return PROSE(
            "lead",
            where=self.where,
            intervals=protocol.folds >= LEAST_FOLDS,
            synthetic=self.data.startswith("synthetic"),
            concentration=protocol.concentration,
            least=protocol.least,
        )

    # Table 1

    def table_1(self) -> Iterator[Part]:
        for mode, named in (("sound", "sound mode"), ("paper", "paper mode")):
            rows = self._ordered(mode)
            if not rows:
                continue
            header = ("row", "variant", *MEASURES, f"{MAIN} gap")
            lines = [
                (row.row, row.variant, *(row.mean(measure) for measure in MEASURES), self.gap(row, MAIN))
                for row in rows
            ]
            yield Table(header, tuple(lines), f"Table 1, {named} ({self.where})", _notes(mode), 2)
        if self.outcome.rows("1", "paper"):
            yield PROSE("faults", faults=FedRisk.paper().faults())
        if self.outcome.rows("1", "paper"):
            yield from self._surest_zeros()

    def _surest_zeros(self) -> Iterator[str]:
        """Describe the effect of ranking by the most probable grade."""
        random = self.outcome.row("1", "sound", RANDOM)
        if random is None:
            return
        rows = self.outcome.rows("1", "paper")
        below = [row for row in rows if row.mean(MAIN) < random.mean(MAIN)]
        argmax = [row for row in below if ARGMAX in row.variant]
        yield PROSE(
            "surest_zeros",
            below=len(argmax),
            rows=sum(ARGMAX in row.variant for row in rows),
            random=random.mean(MAIN),
            below_expected=len(below) - len(argmax),
        )

    def claims(self) -> Iterator[Part]:
        """Yield a verdict for every printed claim, from the results of this run."""
        lines = [(one.text, one.scoring, one.value, one.verdict) for one in claims(self.outcome)]
        if lines:
            header = ("printed claim", "documents scored by", "here", "verdict")
            yield Table(header, tuple(lines), f"The paper's claims, in paper mode ({self.where})")
            yield PROSE("claims")

    def measures(self) -> Iterator[Part]:
        for measure in MEASURES:
            table = self._measure_table(measure)
            if table.rows:
                yield table

    def _measure_table(self, measure: str) -> Table:
        tests = {mode: self.outcome.p_values(mode, measure) for mode in MODES}
        names = dict.fromkeys((row.row, row.variant) for mode in MODES for row in self._ordered(mode))
        lines = []
        for name, variant in names:
            published = None if variant else printed.TABLE_1.get((name, measure))
            line: list[Shown] = [
                name,
                variant,
                None if published is None else f"{published[0]} ± {published[1]}",
            ]
            for mode in MODES:
                row = self.outcome.row("1", mode, name, variant)
                line.append(None if row is None else self.estimate(row, measure))
                line.append(None if row is None else self.gap(row, measure))
                line.append(_p(tests[mode].get((name, variant))))
            lines.append(tuple(line))
        columns = (f"{mode}{kind}" for mode in MODES for kind in ("", " gap", " p"))
        return Table(
            ("row", "variant", "printed", *columns), tuple(lines), f"{measure} ({self.where})", (), 2
        )

    def _ordered(self, mode: str) -> list[Row]:
        """Return the paper's rows in its order, then ours."""
        order = {name: at for at, name in enumerate(printed.ROWS)}
        return sorted(self.outcome.rows("1", mode), key=lambda row: order.get(row.row, len(order)))

    def verdicts(self) -> Iterator[str]:
        outcome = self.outcome
        default, central = (outcome.row("1", "sound", name) for name in ("default", CENTRAL))
        if default is not None and central is not None:
            means = {"default": default.mean(MAIN), "central": central.mean(MAIN)}
            yield PROSE("default_row", measure=MAIN, gap=self.gap(default, MAIN), **means)
        trees, pooled = (
            outcome.row("1", "sound", name) for name in ("federated LambdaMART", "LambdaMART, centralised")
        )
        if trees is not None and pooled is not None:
            yield PROSE("trees", federated=trees.mean(MAIN), pooled=pooled.mean(MAIN))
        yield from self.georisk("1", "With honest silos")
        same = (BASELINE, "FedOpt", "FedAvgM")
        rows = [outcome.row("1", mode, name) for mode in MODES for name in same]
        if all(row is not None for row in rows):
            figures = {round(row.mean(MAIN), 6) for row in rows[:3] if row is not None}
            published = [printed.TABLE_1[name, MAIN][0] for name in same]
            yield PROSE("one_algorithm", one_figure=len(figures) == 1, printed=published)
        features = [result["feature"] for unit, result in outcome.results.items() if unit.run == REFERENCED]
        if features:
            yield PROSE("best_feature", features=features)
        if not any(outcome.rows("1", "sound")) or outcome.row("1", "sound", "LightGBM") is None:
            yield PROSE("no_trees")

    # Figures

    def silos_alike(self) -> Iterator[Part]:
        for mode in MODES:
            curves: dict[str, Curve] = {}
            for colour, measure in enumerate(("nDCG@1", "nDCG@5", MAIN)):
                for variant, run in figure_2(mode).items():
                    key = "curve" if measure == MAIN else measure
                    dashed = variant != "IID"
                    self._add(curves, f"{measure}, {variant}", run, key=key, colour=colour, dashed=dashed)
            yield from self._plotted(curves, f"Figure 2, {mode} mode: FedAvg", "nDCG")

    def two_curves(self) -> Iterator[Part]:
        for mode in MODES:
            for row, run in figure_4(mode).items():
                curves: dict[str, Curve] = {}
                for measure in ("nDCG@1", "nDCG@5", MAIN):
                    self._add(curves, measure, run, key="curve" if measure == MAIN else measure)
                yield from self._plotted(curves, f"Figure 4, {mode} mode: {row}", "nDCG")
            for row, run in figure_4(mode).items():
                folds = self.outcome.curves(run)
                if folds.size:
                    yield PROSE(
                        "curve_end",
                        row=row,
                        mode=mode,
                        last=100 * last(folds).mean(),
                        rounds=LAST,
                        restless=restlessness(folds),
                    )

    def mixes(self) -> Iterator[Part]:
        for mode in MODES:
            curves: dict[str, Curve] = {}
            for run in figure_5(self.outcome.protocol, mode):
                self._add(curves, f"{run.row} {run.variant}".strip(), run, band=False)
            fewer = (self.outcome.protocol.per_round + 1) // 2
            yield from self._plotted(curves, f"Figure 5, {mode} mode, {fewer} silos a round", MAIN)
        if self.outcome.rows("fig5"):
            yield PROSE("mixes")

    def by_argmax(self) -> Iterator[Part]:
        """Yield the curves of Figures 2, 4 and 5 again, for the same models with the other scoring."""
        runs = (*figure_4("paper").values(), *figure_2("paper").values())
        shown = dict.fromkeys((*runs, *figure_5(self.outcome.protocol, "paper")))
        curves: dict[str, Curve] = {}
        for run in shown:
            fewer = f", {(self.outcome.protocol.per_round + 1) // 2} silos" if run.table == "fig5" else ""
            name = f"{run.row} {run.variant}".strip() + fewer
            self._add(curves, name, run, key=ARGMAX, band=False)
        yield from self._plotted(curves, "Paper mode by the most probable grade", MAIN)

    def who_holds_what(self) -> Iterator[Part]:
        for mode in MODES:
            for variant, run in figure_2(mode).items():
                counts = holdings(self.outcome, run)
                if counts is not None:
                    plot = who_holds_what(LabelCounts(np.arange(counts.shape[1]), counts))
                    caption = f"Figure 3, {mode} mode, {variant}: rows by grade, first fold ({self.where})"
                    yield replace(plot, caption=caption)

    def _add(
        self, curves: dict[str, Curve], name: str, run: RunName, *, key: str = "curve", **style: Any
    ) -> None:
        folds = self.outcome.curves(run, key)
        if folds.size:
            curves[name] = Curve(100 * folds, **{"colour": len(curves), **style})

    def _plotted(self, curves: Mapping[str, Curve], title: str, y: str) -> Iterator[Plot]:
        if curves:
            levels = self.levels() if y == MAIN else {}
            caption = f"{title}: {y} of test queries ({self.where})"
            yield curves_plot(curves, y=f"{y} (×100)", caption=caption, levels=levels)

    def time(self) -> Iterator[Part]:
        by_row: dict[tuple[str, str], list[float]] = {}
        for unit, result in self.outcome.results.items():
            run = unit.run
            row = f"{run.row} {run.variant}".strip() + f", {run.mode} mode" if run.table == "1" else ""
            kind = f"{CENTRAL} {run.mode}" if run.table == "central" else _KINDS.get(run.table, run.table)
            by_row.setdefault((kind, row), []).append(result["seconds"])
        lines = [
            (kind, row, len(seconds), sum(seconds), max(seconds)) for (kind, row), seconds in by_row.items()
        ]
        clock = sum(unit["seconds"] for unit in self.outcome.results.values())
        processor = sum(unit["processor"] for unit in self.outcome.results.values())
        yield PROSE("time", units=len(self.outcome.results), clock=clock, processor=processor)
        header = ("what", "row", "units", "seconds together", "the longest")
        yield Table(header, tuple(lines), f"Time by the clock ({self.where})", (), 1)


_KINDS = {
    "1": "Table 1",
    "fig2": "Figure 2",
    "fig5": "Figure 5",
    "A3": "ablations",
    "attack": "inverted grades",
    "overrun": "rounds of bad silos",
}


def _notes(mode: str) -> tuple[str, ...]:
    if mode == "paper":
        return (PROSE("note_paper"),)
    return (PROSE("note_sound_rates", rates=RATES), PROSE("note_sound_rows"))


def _p(value: float | None) -> str | None:
    if value is None:
        return None
    return "<.001" if value < 0.001 else f"{value:.3f}".lstrip("0") if value < 1 else "1"
