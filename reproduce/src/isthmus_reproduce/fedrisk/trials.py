"""The FedRisk report's trials: what doubling parameters does, and what bad silos do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from isthmus.evaluation import paired_t
from isthmus.report import Estimate, Plot, Table
from isthmus.report.tables import Cell as Shown
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
from isthmus_reproduce.fedrisk.plans import DEPTHS, RunName
from isthmus_reproduce.fedrisk.plots import Curve, curves_plot

Part = str | Table | Plot
COLLAPSED = 0.5
"""A run that keeps less than this share of the gap has collapsed."""


class Writer:
    """What all sections say alike; each names the data in its titles."""

    def __init__(self, outcome: Outcome, data: str) -> None:
        self.outcome, self.data = outcome, data
        self.where = f"{data}; {outcome.protocol.told}"

    def estimate(self, row: Row, measure: str) -> Estimate:
        """The mean of a row with its interval."""
        cell = row.cell(measure, self.data)
        return Estimate(cell.value, cell.low, cell.high)

    def gap(self, row: Row, measure: str) -> float | None:
        """(x − random)/(centralised − random) of a row."""
        return self.outcome.gap(row.mean(measure), measure)

    def levels(self) -> dict[str, float]:
        """What curves of the main measure are compared with."""
        levels = {"centralised (sound)": CENTRAL, "best single feature": SINGLE, "random ranker": RANDOM}
        found = {shown: self.outcome.row("1", "sound", name) for shown, name in levels.items()}
        return {shown: row.mean(MAIN) for shown, row in found.items() if row is not None}

    def georisk(self, table: str, when: str) -> Iterator[str]:
        """What the formula is worth beside the plain mean of the same probe errors."""
        full = self.outcome.row(table, "sound", "default")
        plain = self.outcome.row(table, "sound", "mean probe error")
        if full is None or plain is None:
            return
        test = paired_t(full.by_query(MAIN), plain.by_query(MAIN))
        worth = "nothing measurable" if test.p >= 0.05 else f"{100 * test.difference:+.2f} points"
        yield (
            f"{when} the GeoRisk formula itself is worth {worth}: {full.mean(MAIN):.2f} with it and"
            f" {plain.mean(MAIN):.2f} with the plain mean probe error in its place"
            f" ({100 * test.difference:+.2f}"
            f" a query, p = {test.p:.2g})."
        )


class Trials(Writer):
    """The sections on growth and on bad silos."""

    def growth(self) -> Iterator[Part]:
        found = list(growths(self.outcome))
        if not found:
            return
        rounds = self.outcome.protocol.growth
        yield (
            "With alpha_mix = beta_mix = 1 every round adds the previous model to the aggregate, which"
            " itself started"
            " from it: parameters double. What follows depends on the number of weight layers."
        )
        yield from self._growth_plots()
        header = ("row", "model", "rounds", MAIN, "round sd", "log10 ‖θ‖", "log10 (1 − cos)")
        lines = [
            (one.row, one.depth, one.rounds, one.ndcg, one.restless, one.norm, one.turn) for one in found
        ]
        title = f"Ablations, paper mode, at most {rounds} rounds, {found[0].folds} folds ({self.data})"
        yield Table(header, tuple(lines), title, (_ABLATION_NOTE,), 2)
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
                    found = self.outcome.curves(RunName("A3", "paper", row, depth), key)
                    if found.size:
                        named = f"{row}, {depth}"
                        curves[named] = Curve(scale(found), colour, dashed=dashed, band=False)
            caption = f"alpha_mix = beta_mix = 1 beside FedAvg, paper mode: {label} ({self.data})"
            yield curves_plot(curves, y=label, caption=caption)

    def _explained(self) -> Iterator[str]:
        by_depth = {one.depth: one for one in growths(self.outcome) if one.row == "(1, 1)"}
        without = {one.depth: one for one in growths(self.outcome) if one.row == "(1, 1) without risk"}
        linear, one, two = (by_depth.get(depth) for depth in DEPTHS)
        if linear is not None:
            yield (
                "One weight layer freezes. Steps keep their length while parameters double, so the model"
                " turns"
                f" by ever less (log10 (1 − cos) is {linear.turn:.1f} at the end), rankings do not depend on"
                " its"
                f" length, and the curve is flat: {linear.restless:.4f} from round to round with the risk"
                " term"
                f" and {without['linear'].restless:.4f} without any. A flat curve is no evidence for the risk"
                " term, and growth hides the freezing until float32 ends, near round 128."
            )
        if one is not None:
            yield (
                "Two weight layers (one hidden) overflow. A layer's gradient grows with the other layer, so"
                " the"
                f" model goes on turning (log10 (1 − cos) up to {one.peak[0]:.1f} after the first rounds)"
                " and the"
                f" curve does not settle ({one.restless:.2f} from round to round); outputs grow with the"
                " square"
                f" of the length, and after {one.rounds:.0f} rounds float32 cannot hold them."
                + self._quoted(one.stopped)
            )
        if two is not None:
            yield (
                "Three weight layers (two hidden) diverge. Gradients grow with the product of two layers,"
                " faster"
                f" than the parameters: by round {two.peak[1]:.0f} a single round turns the model by log10"
                " (1 −"
                f" cos) = {two.peak[0]:.1f}. After that the rectified units are dead or the numbers not"
                " finite"
                f" (here {two.rounds:.0f} rounds were); {MAIN} ends at {two.ndcg:.2f}."
                + self._quoted(two.stopped)
            )

    @staticmethod
    def _quoted(stopped: str) -> str:
        return f" The guard says: “{stopped}”." if stopped else " The guard did not have to stop it here."

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
        note = (
            f"Collapsed: runs with a gap below {COLLAPSED:g}, of {rows[0].n}. Clean: the same row without bad"
            " silos."
        )
        yield Table(header, tuple(lines), title, (note, _PROBE_NOTE), 3)
        yield from self.georisk("attack", "With three silos in ten inverted")
        yield from self._kept()

    def _kept(self) -> Iterator[str]:
        """What the default keeps of the honest silos' models."""
        names = ("default", HONEST, "default, honest silos only")
        default, honest, twin = (self.outcome.row("attack", "sound", name) for name in names)
        if default is None or honest is None or twin is None:
            return
        yield (
            f"The default keeps {default.mean(MAIN) / honest.mean(MAIN):.3f} of FedAvg over the honest silos"
            f" only, and {default.mean(MAIN) / twin.mean(MAIN):.3f} of itself over them (FedAvg has no server"
            f" momentum); its worst of {default.n} runs has"
            f" {default.worst(MAIN):.2f}."
        )

    def overrun(self) -> Iterator[Part]:
        found = overruns(self.outcome)
        if not found:
            return
        some = next(iter(found.values()))
        curves = {row: Curve(100 * one.curves, at) for at, (row, one) in enumerate(found.items())}
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
            for row, one in found.items()
        ]
        title = f"{MAIN} through rounds in which every silo has inverted grades ({self.data})"
        yield Table(header, tuple(table), title, (_OVERRUN_NOTE,), 2)
        yield self._survived(found)

    @staticmethod
    def _survived(found: Mapping[str, Overrun]) -> str:
        """What a bad round costs, and what five do."""
        default, plain = found["default"], found["FedRisk"]

        def lost(one: Overrun, place: int) -> str:
            return f"{float((one.at(0) - one.at(place)).mean()):.2f}"

        bare = found["default without memory"]
        return (
            "Relative weights cannot refuse a whole round. So the previous global model stands among the"
            " candidates with its own probe risk, and where the probe finds clearly more pairs in the wrong"
            " order than at best, the round is refused. One round of bad silos only costs the default"
            f" {lost(default, 1)} points and FedRisk with the plain aggregate {lost(plain, 1)};"
            f" {default.bad} in a row cost {lost(default, default.bad)} and {lost(plain, plain.bad)}."
            f" Without all that {bare.bad} cost {lost(bare, bare.bad)}: a silo is one epoch away from the"
            " previous model and hardly worse on the probe, and momentum adds up what its weight lets"
            " through."
        )


_OVERRUN_NOTE = (
    "Released: the average over rounds that is saved. FedRisk: the plain aggregate; default: with server"
    " momentum."
)
_ABLATION_NOTE = (
    "Rounds: before the guard stopped it. Round sd: of the differences between rounds, over the last twenty."
    " (1, 1)"
    " without risk: all risks 0. Renormalised: ‖θ‖ brought back to its first length every round. Server step"
    " 2^-t:"
    " θ + 2^-t (θ~ − θ), which freezes without any growth."
)
_PROBE_NOTE = (
    "default: FedRisk with the probe, the memory and server momentum; FedRisk: the same with the plain"
    " aggregate."
    " Rows with a probe train on 40 queries fewer. Honest silos only: the bad silos are left out."
)
