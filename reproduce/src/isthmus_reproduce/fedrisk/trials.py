"""Sections of the FedRisk report: effects of growing parameters and of bad silos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from isthmus.evaluation import paired_t
from isthmus.report import Cell as Shown
from isthmus.report import Estimate, Plot, Table
from isthmus_reproduce.fedrisk.cells import (
    BASELINE,
    CENTRAL,
    HONEST,
    MAIN,
    RANDOM,
    SINGLE,
    Floats,
    Outcome,
    Overrun,
    Row,
    bad_weight,
    growths,
    overruns,
)
from isthmus_reproduce.fedrisk.plans import DEPTHS, GEORISK, RunName
from isthmus_reproduce.fedrisk.plots import Curve, curves_plot
from isthmus_reproduce.prose import Prose

Part = str | Table | Plot
PROSE = Prose("fedrisk.j2")
COLLAPSED = 0.5
"""A run that reaches less than this share of the gap has collapsed."""


class Writer:
    """Shared by all sections; each names the data in its titles."""

    def __init__(self, outcome: Outcome, data: str) -> None:
        self.outcome, self.data = outcome, data
        self.where = f"{data}; {outcome.protocol.description}"

    def estimate(self, row: Row, measure: str) -> Estimate:
        """Return the mean of a row with its interval."""
        cell = row.cell(measure, self.data)
        return Estimate(cell.value, cell.low, cell.high)

    def gap(self, row: Row, measure: str) -> float | None:
        """Return (x − random)/(centralised − random) of a row."""
        return self.outcome.gap(row.mean(measure), measure)

    def levels(self) -> dict[str, float]:
        """Return the levels with which curves of the main measure are compared."""
        levels = {"centralised (sound)": CENTRAL, "best single feature": SINGLE, "random ranker": RANDOM}
        rows = {label: self.outcome.row("1", "sound", name) for label, name in levels.items()}
        return {label: row.mean(MAIN) for label, row in rows.items() if row is not None}

    def georisk(self, table: str, when: str) -> Iterator[str]:
        """Compare GeoRisk with the plain mean of the same probe errors."""
        full = self.outcome.row(table, "sound", GEORISK)
        plain = self.outcome.row(table, "sound", "mean probe error")
        if full is None or plain is None:
            return
        test = paired_t(full.by_query(MAIN), plain.by_query(MAIN))
        means = {"full": full.mean(MAIN), "plain": plain.mean(MAIN)}
        yield PROSE("georisk", when=when, difference=100 * test.difference, p=test.p, **means)


class Trials(Writer):
    """The sections on growth and on bad silos."""

    def growth(self) -> Iterator[Part]:
        all_growths = list(growths(self.outcome))
        if not all_growths:
            return
        rounds = self.outcome.protocol.growth
        yield PROSE("doubling")
        yield from self._growth_plots()
        header = ("row", "model", "rounds", MAIN, "round sd", "log10 ‖θ‖", "log10 (1 − cos)")
        lines = [
            (one.row, one.depth, one.rounds, one.ndcg, one.restless, one.norm, one.turn)
            for one in all_growths
        ]
        title = f"Ablations, paper mode, at most {rounds} rounds, {all_growths[0].folds} folds ({self.data})"
        yield Table(header, tuple(lines), title, (PROSE("note_ablations"),), 2)
        yield from self._explained()

    def _growth_plots(self) -> Iterator[Plot]:
        kinds: dict[str, tuple[str, Callable[[Floats], Floats]]] = {
            "curve": (f"{MAIN} (×100)", lambda curve: 100 * curve),
            "norm": ("log10 ‖θ‖", lambda curve: np.log10(np.maximum(curve, 1e-30))),
            "turn": ("log10 (1 − cos(θ_t, θ_t−1))", lambda curve: np.log10(np.maximum(curve, 1e-17))),
        }
        for key, (label, scale) in kinds.items():
            curves = {}
            for colour, depth in enumerate(DEPTHS):
                for row, dashed in (("(1, 1)", False), (BASELINE, True)):
                    folds = self.outcome.curves(RunName("A3", "paper", row, depth), key)
                    if folds.size:
                        named = f"{row}, {depth}"
                        curves[named] = Curve(scale(folds), colour, dashed=dashed, band=False)
            caption = f"alpha_mix = beta_mix = 1 beside FedAvg, paper mode: {label} ({self.data})"
            yield curves_plot(curves, y=label, caption=caption)

    def _explained(self) -> Iterator[str]:
        by_depth = {one.depth: one for one in growths(self.outcome) if one.row == "(1, 1)"}
        without = {one.depth: one for one in growths(self.outcome) if one.row == "(1, 1) without risk"}
        linear, one, two = (by_depth.get(depth) for depth in DEPTHS)
        if linear is not None:
            still = without["linear"].restless
            yield PROSE("one_layer", turn=linear.turn, restless=linear.restless, without=still)
        if one is not None:
            yield PROSE("two_layers", growth=one)
        if two is not None:
            yield PROSE("three_layers", growth=two, measure=MAIN)

    def attack(self) -> Iterator[Part]:
        rows = self.outcome.rows("attack")
        if not rows:
            return
        honest = self.outcome.row("attack", "sound", HONEST)
        lines = []
        for row in rows:
            runs = [value for fold in row.by_run(MAIN) for value in fold]
            gaps = [self.outcome.gap(value, MAIN) for value in runs]
            lost = sum(gap is not None and gap < COLLAPSED for gap in gaps)
            share = None if honest is None else row.mean(MAIN) / honest.mean(MAIN)
            clean = self.outcome.row("1", "sound", row.row)
            lines.append(
                (
                    row.row,
                    self.estimate(row, MAIN),
                    self.gap(row, MAIN),
                    share,
                    row.worst(MAIN),
                    lost,
                    bad_weight(self.outcome, row),
                    None if clean is None else clean.mean(MAIN),
                )
            )
        header = (
            "row",
            MAIN,
            "gap",
            "of honest-only FedAvg",
            "worst run",
            "collapsed",
            "weight of bad silos",
            "clean",
        )
        title = f"30 % of silos with inverted grades, sound mode ({self.where})"
        note = PROSE("note_collapsed", share=COLLAPSED, runs=rows[0].n)
        yield Table(header, tuple(lines), title, (note, PROSE("note_probe")), 3)
        yield from self.georisk("attack", "With three silos in ten inverted")
        yield from self._honest_share()

    def _honest_share(self) -> Iterator[str]:
        """Compare nDCG of the default under attack with that of honest silos alone."""
        names = ("default", HONEST, "default, honest silos only")
        default, honest, twin = (self.outcome.row("attack", "sound", name) for name in names)
        if default is None or honest is None or twin is None:
            return
        means = {"default": default.mean(MAIN), "honest": honest.mean(MAIN), "twin": twin.mean(MAIN)}
        yield PROSE("honest_share", runs=default.n, worst=default.worst(MAIN), **means)

    def overrun(self) -> Iterator[Part]:
        by_row = overruns(self.outcome)
        if not by_row:
            return
        some = next(iter(by_row.values()))
        curves = {row: Curve(100 * one.curves, at) for at, (row, one) in enumerate(by_row.items())}
        caption = (
            f"From round {some.good + 1} on all silos are bad: {MAIN} of the global model ({self.where})"
        )
        yield curves_plot(curves, y=f"{MAIN} (×100)", caption=caption, levels=self.levels())
        header = (
            "row",
            "before",
            "after one bad round",
            f"after {some.bad}",
            f"released after {some.bad}",
            "weight of the memory",
        )
        table: list[tuple[Shown, ...]] = [
            (
                row,
                *(float(one.at(place).mean()) for place in (0, 1, one.bad)),
                float(one.at(one.bad, released=True).mean()),
                one.memory or None,
            )
            for row, one in by_row.items()
        ]
        title = f"{MAIN} through rounds in which every silo has inverted grades ({self.data})"
        yield Table(header, tuple(table), title, (PROSE("note_overrun"),), 2)
        yield self._survived(by_row)

    @staticmethod
    def _survived(by_row: Mapping[str, Overrun]) -> str:
        """Describe the loss after one bad round, and after all of them."""
        rows = {"default": "default", "plain": "FedRisk", "bare": "default without memory"}

        def lost(one: Overrun, place: int) -> float:
            return float((one.at(0) - one.at(place)).mean())

        costs = {
            name: {"one": lost(by_row[row], 1), "all": lost(by_row[row], by_row[row].bad)}
            for name, row in rows.items()
        }
        return PROSE("survived", rounds=by_row["default"].bad, **costs)
