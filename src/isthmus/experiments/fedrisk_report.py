"""The report of the FedRisk reproduction: tables, figures and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from isthmus.evaluation import fold_interval, paired_t
from isthmus.experiments import printed_fedrisk as printed
from isthmus.experiments.fedrisk_cells import (
    BASELINE,
    CENTRAL,
    HONEST,
    MAIN,
    RANDOM,
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
from isthmus.experiments.fedrisk_plans import DEPTHS, MEASURES, MODES, RATES
from isthmus.federation.pictures import who_holds_what
from isthmus.partition import Holdings
from isthmus.report import Estimate, Line, Page, Plot, Section, Table, line_plot
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
        if scored:
            yield scored
            yield (
                "Most documents' most probable grade is 0, and the paper's rule as we had to complete it"
                " orders"
                " equal grades by how probable the grade is: the surest zeros come first. That alone puts"
                " paper"
                " mode near or below the random ranker; the same models scored by their expected grade rank"
                " well."
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
            lines: dict[str, Line] = {}
            for variant, plan in figure_2(mode).items():
                for measure in ("nDCG@1", "nDCG@5", MAIN):
                    key = "curve" if measure == MAIN else measure
                    self._add(lines, f"{measure}, {variant}", plan, key)
            yield from self._plotted(lines, f"Figure 2, {mode} mode: FedAvg", "nDCG")

    def two_curves(self) -> Iterator[Part]:
        for mode in MODES:
            lines: dict[str, Line] = {}
            for row, plan in figure_4(mode).items():
                self._add(lines, row, plan)
            yield from self._plotted(self._beside(lines), f"Figure 4, {mode} mode: {MAIN}", MAIN)
            for row, plan in figure_4(mode).items():
                curves = self.outcome.curves(plan)
                if curves.size:
                    yield (
                        f"{row}, {mode} mode: {100 * last(curves).mean():.2f} in the last round; from round"
                        " to"
                        f" round the last ones move by {restlessness(curves):.3f} (standard deviation)."
                    )

    def mixes(self) -> Iterator[Part]:
        for mode in MODES:
            lines: dict[str, Line] = {}
            for plan in figure_5(self.outcome.protocol, mode):
                _, _, row, variant = plan.split("|")
                self._add(lines, f"{row} {variant}".strip(), plan, band=False)
            fewer = (self.outcome.protocol.per_round + 1) // 2
            title = f"Figure 5, {mode} mode, {fewer} silos a round: {MAIN}"
            yield from self._plotted(self._beside(lines), title, MAIN)
        if any(self.outcome.rows("fig5")):
            yield (
                "In sound mode the pairs (α, β) that sum to 1 are convex mixes of the aggregate and the"
                " previous"
                " model; in the place of (1, 1), which has no sound meaning, stands the default's server"
                " momentum."
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
        self, lines: dict[str, Line], name: str, plan: str, key: str = "curve", *, band: bool = True
    ) -> None:
        curves = self.outcome.curves(plan, key)
        if curves.size:
            lines[name] = curve_line(100 * curves, band=band)

    def _beside(self, lines: dict[str, Line]) -> dict[str, Line]:
        """The curves with the levels of the centralised twin and of the random ranker."""
        length = max((len(line.x) for line in lines.values()), default=0)
        levels = {"centralised (sound)": CENTRAL, "random ranker": RANDOM}
        found = {shown: self.outcome.row("1", "sound", name) for shown, name in levels.items()}
        flat = {
            shown: Line([1, length], [row.mean(MAIN)] * 2) for shown, row in found.items() if row is not None
        }
        return {**lines, **flat} if lines else {}

    def _plotted(self, lines: Mapping[str, Line], title: str, y: str) -> Iterator[Part]:
        if lines:
            plot = line_plot(
                lines, x="round", y=f"{y} (×100)", caption=f"{title}, test queries ({self.where})"
            )
            yield replace(plot, size=(7.5, 4.4))

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
            lines = {}
            for depth in DEPTHS:
                curves = self.outcome.curves(f"A3|paper|(1, 1)|{depth}", key)
                if curves.size:
                    lines[f"{depth}, (1, 1)"] = curve_line(scale(curves), band=False)
            plain = self.outcome.curves("A3|paper|FedAvg|linear", key)
            if plain.size:
                lines["linear, FedAvg"] = curve_line(scale(plain), band=False)
            caption = f"alpha_mix = beta_mix = 1, mean over folds: {label} ({self.data})"
            yield line_plot(lines, x="round", y=label, caption=caption)

    def _explained(self) -> Iterator[str]:
        by_depth = {one.depth: one for one in growths(self.outcome) if one.row == "(1, 1)"}
        without = {one.depth: one for one in growths(self.outcome) if one.row == "(1, 1) without risk"}
        linear, one, two = (by_depth.get(depth) for depth in DEPTHS)
        if linear is not None:
            yield (
                "One weight layer freezes: a step of fixed length against parameters that double turns the"
                " model by"
                f" ever less (log10 (1 − cos) {linear.turn:.1f} at the end), rankings do not depend on the"
                " length,"
                f" and the curve is flat: {linear.restless:.4f} from round to round with the risk term and"
                f" {without['linear'].restless:.4f} without any. A flat curve is therefore no evidence for"
                " the"
                " risk term."
            )
        if one is not None:
            yield (
                f"Two weight layers (one hidden) go on {one.rounds:.0f} rounds: outputs grow with the square"
                " of the"
                " length, so softmax saturates, gradients come in all-or-nothing and float32 overflows."
                + self._quoted(one.stopped)
            )
        if two is not None:
            yield (
                f"Three weight layers (two hidden) diverge after {two.rounds:.0f} rounds: gradients of one"
                " layer grow"
                " with the product of the others, faster than the parameters themselves."
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
        lines = {row: curve_line(100 * curves, band=True) for row, (_, curves) in found.items()}
        caption = f"From round {good + 1} on all silos are bad: {MAIN} of the global model ({self.where})"
        yield replace(line_plot(lines, x="round", y=f"{MAIN} (×100)", caption=caption), size=(7.5, 4.0))
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


def curve_line(curves: Floats, *, band: bool) -> Line:
    """The mean over folds of the rounds that all folds reached, with a 95 % t band."""
    known = curves[:, np.isfinite(curves).all(axis=0)]
    rounds = np.flatnonzero(np.isfinite(curves).all(axis=0)) + 1
    if not band or len(known) < 2:
        return Line(rounds.tolist(), known.mean(axis=0).tolist())
    found = [fold_interval(column) for column in known.T]
    return Line(
        rounds.tolist(),
        [one.value for one in found],
        [one.low for one in found],
        [one.high for one in found],
    )


def _estimate(row: Row, measure: str, data: str) -> Estimate:
    cell = row.cell(measure, data)
    return Estimate(cell.value, cell.low, cell.high)


def _p(value: float | None) -> str | None:
    if value is None:
        return None
    return "<.001" if value < 0.001 else f"{value:.3f}".lstrip("0") if value < 1 else "1"
