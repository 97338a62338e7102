"""The report of the FedRisk reproduction: tables, figures and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from isthmus.evaluation import paired_t
from isthmus.experiments import printed_fedrisk as printed
from isthmus.experiments.fedrisk_cells import (
    BASELINE,
    CENTRAL,
    HONEST,
    LAST,
    MAIN,
    RANDOM,
    SINGLE,
    Floats,
    Outcome,
    Row,
    bad_weight,
    figure_2,
    figure_4,
    figure_5,
    growths,
    holdings,
    last,
    overruns,
    restlessness,
)
from isthmus.experiments.fedrisk_pictures import Curve, curves_plot
from isthmus.experiments.fedrisk_plans import DEPTHS, MEASURES, MODES, RATES
from isthmus.federation.pictures import who_holds_what
from isthmus.partition import Holdings
from isthmus.report import Estimate, Page, Plot, Section, Table
from isthmus.report.tables import Cell as Shown

Part = str | Table | Plot
COLLAPSED = 0.5
"""A run that keeps less than this share of the gap has collapsed."""


def report(outcome: Outcome, data: str) -> Page:
    """The whole page."""
    writer = _Writer(outcome, data)
    sections = [
        Section(heading, tuple(parts))
        for heading, written in (
            ("Table 1", writer.table_1()),
            ("What it says", writer.verdicts()),
            ("Figure 2: silos alike and not", writer.silos_alike()),
            ("Figure 3: who holds what", writer.who_holds_what()),
            ("Figure 4: FedProx and FedRisk", writer.two_curves()),
            ("Figure 5: mixing with the previous model", writer.mixes()),
            ("Why the printed curves are flat", writer.growth()),
            ("Three silos in ten with inverted grades", writer.attack()),
            ("Rounds in which every silo is bad", writer.overrun()),
            ("Table 1, measure by measure", writer.measures()),
            ("Time", writer.time()),
        )
        if (parts := list(written))
    ]
    return Page(f"FedRisk on {data}: printed, paper mode, sound mode", tuple(sections), writer.lead())


class _Writer:
    """Writes the sections; each names the data in its titles."""

    def __init__(self, outcome: Outcome, data: str) -> None:
        self.outcome, self.data = outcome, data
        self.where = f"{data}; {outcome.protocol.told}"

    def lead(self) -> str:
        made = "The data are synthetic. " if self.data.startswith("synthetic") else ""
        return (
            f"{self.where}. {made}The paper's own figures are of MSLR-WEB10K, so levels are not comparable"
            " with"
            " what is printed. Measures are ×100, with exponential gain and full lists; queries without"
            " relevant documents do not count. Intervals are 95 % t intervals over folds (seeds averaged); p"
            " is"
            " of a paired t test over test queries against FedAvg in the same mode, after Holm; gap is"
            " (x − random)/(centralised − random) with the sound centralised twin. Paper mode deals single"
            " rows by"
            f" grade (Dirichlet {self.outcome.protocol.concentration:g}, at least"
            f" {self.outcome.protocol.least} a silo), trains a linear model by cross-entropy for five epochs"
            " a"
            " round and ranks by the most probable grade. Sound mode deals whole queries by their highest"
            " grade"
            " (Dirichlet 0.3) and trains 32 hidden units by LambdaRank for one epoch a round."
        )

    # Table 1

    def table_1(self) -> Iterator[Part]:
        for mode, named in (("sound", "sound mode"), ("paper", "paper mode")):
            rows = self._ordered(mode)
            if not rows:
                continue
            header = ("row", "variant", *MEASURES, f"{MAIN} gap")
            lines = [
                (row.row, row.variant, *(row.mean(measure) for measure in MEASURES), self._gap(row, MAIN))
                for row in rows
            ]
            yield Table(header, tuple(lines), f"Table 1, {named} ({self.where})", _NOTES[mode], 2)
        scored = self._scoring()
        if scored is not None:
            yield scored
            yield from self._surest_zeros()

    def _surest_zeros(self) -> Iterator[str]:
        """What ranking by the most probable grade does."""
        random = self.outcome.row("1", "sound", RANDOM)
        if random is None:
            return
        below = {
            table: sum(row.mean(MAIN) < random.mean(MAIN) for row in self.outcome.rows(table, "paper"))
            for table in ("1", "scoring")
        }
        yield (
            "Where most documents' most probable grade is 0, the paper's rule, equal grades by how probable"
            f" the grade is, puts the surest zeros first: {below['1']} of"
            f" {len(self.outcome.rows('1', 'paper'))}"
            f" rows lie below the random ranker ({random.mean(MAIN):.2f}). Scored by their expected grade,"
            f" {below['scoring']} of the same models do."
        )

    def _scoring(self) -> Table | None:
        lines = []
        for row in self.outcome.rows("scoring"):
            argmax = self.outcome.row("1", "paper", row.row, row.variant)
            if argmax is not None:
                lines.append((row.row, row.variant, argmax.mean(MAIN), row.mean(MAIN)))
        header = ("row", "variant", "most probable grade", "expected grade")
        title = f"Paper mode, {MAIN} by how a document is scored ({self.where})"
        return Table(header, tuple(lines), title, (), 2) if lines else None

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
            said = None if variant else printed.TABLE_1.get((name, measure))
            line: list[Shown] = [name, variant, None if said is None else f"{said[0]} ± {said[1]}"]
            for mode in MODES:
                row = self.outcome.row("1", mode, name, variant)
                line.append(None if row is None else _estimate(row, measure, self.data))
                line.append(None if row is None else self._gap(row, measure))
                line.append(_p(tests[mode].get((name, variant))))
            lines.append(tuple(line))
        columns = (f"{mode}{kind}" for mode in MODES for kind in ("", " gap", " p"))
        return Table(
            ("row", "variant", "printed", *columns), tuple(lines), f"{measure} ({self.where})", (), 2
        )

    def _ordered(self, mode: str) -> list[Row]:
        """The paper's rows in its order, then ours."""
        order = {name: at for at, name in enumerate(printed.ROWS)}
        return sorted(self.outcome.rows("1", mode), key=lambda row: order.get(row.row, len(order)))

    def _gap(self, row: Row, measure: str) -> float | None:
        return self.outcome.gap(row.mean(measure), measure)

    def verdicts(self) -> Iterator[str]:
        found = self.outcome
        default, central = (found.row("1", "sound", name) for name in ("default", CENTRAL))
        if default is not None and central is not None:
            gap = self._gap(default, MAIN)
            yield (
                f"The default has {MAIN} {default.mean(MAIN):.2f}, its centralised twin"
                f" {central.mean(MAIN):.2f}:"
                f" {default.mean(MAIN) / central.mean(MAIN):.3f} of it"
                + ("" if gap is None else f", and {gap:.3f} of the way from the random ranker to it")
                + ". The centralised twin keeps the epoch that is best on validation; the federated rows"
                " train"
                " for all their rounds."
            )
        trees, pooled = (
            found.row("1", "sound", name) for name in ("federated LambdaMART", "LambdaMART, centralised")
        )
        if trees is not None and pooled is not None:
            yield (
                f"LambdaMART across four silos sorted by grade {trees.mean(MAIN):.2f}, on all rows in one"
                " place"
                f" {pooled.mean(MAIN):.2f}: {trees.mean(MAIN) / pooled.mean(MAIN):.3f} of it."
            )
        yield from self._georisk("1", "With honest silos")
        same = [found.row("1", mode, name) for mode in MODES for name in (BASELINE, "FedOpt", "FedAvgM")]
        if all(row is not None for row in same):
            told = len({round(row.mean(MAIN), 6) for row in same[:3] if row is not None})
            yield (
                "FedAvg, FedOpt and FedAvgM with Flower's defaults are one algorithm"
                + (", and give one figure here" if told == 1 else "")
                + "; the paper prints 31.6, 32.7 and 34.2 for them, which is its run-to-run noise."
            )
        features = [unit["feature"] for name, unit in found.found.items() if name.startswith("references")]
        if features:
            said = ", ".join(str(feature) for feature in features)
            yield f"The best single feature was chosen on training queries; fold by fold it is number {said}."
        if not any(found.rows("1", "sound")) or found.row("1", "sound", "LightGBM") is None:
            yield "Without the extra `trees`, or where only some rows are asked for, there are no tree rows."

    def _georisk(self, table: str, when: str) -> Iterator[str]:
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

    # Figures

    def silos_alike(self) -> Iterator[Part]:
        for mode in MODES:
            curves: dict[str, Curve] = {}
            for colour, measure in enumerate(("nDCG@1", "nDCG@5", MAIN)):
                for variant, plan in figure_2(mode).items():
                    key = "curve" if measure == MAIN else measure
                    dashed = variant != "IID"
                    self._add(curves, f"{measure}, {variant}", plan, key=key, colour=colour, dashed=dashed)
            yield from self._plotted(curves, f"Figure 2, {mode} mode: FedAvg", "nDCG")

    def two_curves(self) -> Iterator[Part]:
        for mode in MODES:
            curves: dict[str, Curve] = {}
            for row, plan in figure_4(mode).items():
                self._add(curves, row, plan)
            yield from self._plotted(curves, f"Figure 4, {mode} mode", MAIN)
            for row, plan in figure_4(mode).items():
                found = self.outcome.curves(plan)
                if found.size:
                    yield (
                        f"{row}, {mode} mode: {100 * last(found).mean():.2f} in the last round; over the last"
                        f" {LAST} rounds it moves by {restlessness(found):.3f} from round to round (standard"
                        " deviation)."
                    )

    def mixes(self) -> Iterator[Part]:
        for mode in MODES:
            curves: dict[str, Curve] = {}
            for plan in figure_5(self.outcome.protocol, mode):
                _, _, row, variant = plan.split("|")
                self._add(curves, f"{row} {variant}".strip(), plan, band=False)
            fewer = (self.outcome.protocol.per_round + 1) // 2
            yield from self._plotted(curves, f"Figure 5, {mode} mode, {fewer} silos a round", MAIN)
        if self.outcome.rows("fig5"):
            yield (
                "In sound mode the pairs (α, β) that sum to 1 are convex mixes of the aggregate and the"
                " previous model; in the place of (1, 1), which has no sound meaning, stands the default's"
                " server momentum."
            )

    def who_holds_what(self) -> Iterator[Part]:
        for mode in MODES:
            for variant, plan in figure_2(mode).items():
                counts = holdings(self.outcome, plan)
                if counts is not None:
                    plot = who_holds_what(Holdings(np.arange(counts.shape[1]), counts))
                    caption = f"Figure 3, {mode} mode, {variant}: rows by grade, first fold ({self.where})"
                    yield replace(plot, caption=caption)

    def _add(
        self, curves: dict[str, Curve], name: str, plan: str, *, key: str = "curve", **style: Any
    ) -> None:
        found = self.outcome.curves(plan, key)
        if found.size:
            curves[name] = Curve(100 * found, **{"colour": len(curves), **style})

    def _levels(self) -> dict[str, float]:
        """What curves of the main measure are compared with."""
        levels = {"centralised (sound)": CENTRAL, "best single feature": SINGLE, "random ranker": RANDOM}
        found = {shown: self.outcome.row("1", "sound", name) for shown, name in levels.items()}
        return {shown: row.mean(MAIN) for shown, row in found.items() if row is not None}

    def _plotted(self, curves: Mapping[str, Curve], title: str, y: str) -> Iterator[Plot]:
        if curves:
            levels = self._levels() if y == MAIN else {}
            caption = f"{title}: {y} of test queries ({self.where})"
            yield curves_plot(curves, y=f"{y} (×100)", caption=caption, levels=levels)

    # Why the curves are flat

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
                    found = self.outcome.curves(f"A3|paper|{row}|{depth}", key)
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

    # Bad silos

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
                    _estimate(row, MAIN, self.data),
                    self._gap(row, MAIN),
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
        yield from self._georisk("attack", "With three silos in ten inverted")
        default = self.outcome.row("attack", "sound", "default")
        if default is not None and honest is not None:
            yield (
                f"The default keeps {default.mean(MAIN) / honest.mean(MAIN):.3f} of FedAvg over the honest"
                " silos only;"
                f" its worst of {default.n} runs has {default.worst(MAIN):.2f}."
            )

    def overrun(self) -> Iterator[Part]:
        found = overruns(self.outcome)
        if not found:
            return
        good = next(iter(found.values()))[0]
        lines = {row: Curve(100 * curves, at) for at, (row, (_, curves)) in enumerate(found.items())}
        caption = f"From round {good + 1} on all silos are bad: {MAIN} of the global model ({self.where})"
        yield curves_plot(lines, y=f"{MAIN} (×100)", caption=caption, levels=self._levels())
        header = ("row", "before", "after one bad round", "at the end")
        table: list[tuple[Shown, ...]] = [
            (row, *(100 * float(np.nanmean(curves[:, at])) for at in (good - 1, good, -1)))
            for row, (_, curves) in found.items()
        ]
        yield Table(header, tuple(table), f"{MAIN} through rounds of bad silos only ({self.data})", (), 2)
        yield (
            "Relative weights cannot refuse a whole round. The previous global model stands among the"
            " default's"
            " candidates with its own probe risk, and takes nearly all the weight when everyone else is"
            " worse."
        )

    def time(self) -> Iterator[Part]:
        found: dict[tuple[str, str], list[float]] = {}
        for name, unit in self.outcome.found.items():
            kind, _, rest = name.partition("|")
            mode, _, row = rest.partition("|")
            shown = row.partition(" fold ")[0].strip("|") if kind == "1" else ""
            key = (_KINDS.get(kind, name.partition(" fold ")[0]), f"{shown}, {mode} mode" if shown else "")
            found.setdefault(key, []).append(unit["seconds"])
        lines = [
            (kind, row, len(seconds), sum(seconds), max(seconds)) for (kind, row), seconds in found.items()
        ]
        clock = sum(unit["seconds"] for unit in self.outcome.found.values())
        processor = sum(unit["processor"] for unit in self.outcome.found.values())
        yield (
            f"All {len(self.outcome.found)} units took {clock:,.0f} s by the clock, one after another, and"
            f" {processor:,.0f} s of processor time; with two workers about half of that, {clock / 120:.1f}"
            " minutes."
        )
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
_NOTES: Mapping[str, tuple[str, ...]] = {
    "sound": (
        "FedProx: μ = 0.9. FedAvgM: Flower's default, momentum 0. Server rates chosen on validation:"
        f" {', '.join(f'{name} {rate:g}' for name, rate in RATES.items())}. SCAFFOLD and FedNova train by"
        " plain SGD.",
        "default: FedRisk with the probe, the memory and server momentum; FedRisk: with the plain aggregate.",
    ),
    "paper": (
        "Flower's defaults throughout; FedProx: μ = 0.9; FedRisk: alpha_mix = beta_mix = 1, alpha_risk = 2.",
    ),
}


def _estimate(row: Row, measure: str, data: str) -> Estimate:
    cell = row.cell(measure, data)
    return Estimate(cell.value, cell.low, cell.high)


def _p(value: float | None) -> str | None:
    if value is None:
        return None
    return "<.001" if value < 0.001 else f"{value:.3f}".lstrip("0") if value < 1 else "1"
