"""Calibrated rank fusion, Tables I-VIII and Figure 1: printed values, paper mode, sound mode.

Paper mode keeps the paper's procedure, and reports so: a text is ranked only against the labels of the
partition that its true label is in (an oracle), configurations are chosen on test, texts of several labels
are copied. Sound mode ranks all labels, chooses on validation and keeps texts apart. The row "default" is the
product's.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isthmus.corpora import available
from isthmus.errors import DataError
from isthmus.evaluation import Reliability, paired_t, reliability_diagram
from isthmus.report import Page, Plot, Progress, Section, Table
from isthmus_reproduce.fusion import printed
from isthmus_reproduce.fusion.folds import FOLDS, label_fold
from isthmus_reproduce.fusion.hypotheses import SHARES
from isthmus_reproduce.fusion.panels import DENSE, LINEAR, SPARSE, encoder
from isthmus_reproduce.fusion.runs import BINS, MEASURES, PAPER_BINS, Way, default_stack, two_retrievers
from isthmus_reproduce.fusion.tuned import TUNED, WITH_TUNED, WITHOUT_TUNED, tune_folds
from isthmus_reproduce.intervals import LEAST_FOLDS
from isthmus_reproduce.notebook import Cell, Notebook, Reproduction, Unit, cells_table
from isthmus_reproduce.prose import Prose

Mode = Literal["paper", "sound"]
Kind = Literal["paper", "sound", "default", "tuned"]
MODES: tuple[Mode, Mode] = ("paper", "sound")
PROSE = Prose("fusion.j2")
DATA = ("twitter", "trec", "reuters")
CALIBRATIONS = printed.CALIBRATIONS
TOLD_TWICE = ("base", "QueryFeature")
"""The rows that Table VI and Figure 1 repeat."""
ABSENT = "acm"
SIZES = ("texts", "labels", "labels a text")
SOME_TEXTS = 2_000


@dataclass(frozen=True)
class Config:
    """What to reproduce: `data` is a name, a path, or "all" for the available sets."""

    data: str = "all"
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0

    @property
    def folds(self) -> int:
        """Number of folds: ten, or two at smoke scale."""
        return FOLDS if self.scale == "full" else 2

    @property
    def most(self) -> int | None:
        """Most texts of a set at smoke scale; None for all."""
        return None if self.scale == "full" else SOME_TEXTS


@dataclass(frozen=True)
class Piece:
    """A unit of work: a fold of a data set in one mode, or under the product's default."""

    data: str
    fold: int
    kind: Kind


Results = Mapping[Piece, Any]


class Fold:
    """Results of the paper's two retrievers on one fold, by configuration."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.means = {
            (Way(record["calibration"], record["fusion"], record["norm"]), record["split"], record["part"]): (
                record["means"]
            )
            for record in result["metrics"]
        }
        self.sums = {
            (record["retriever"], record["calibration"], record["part"]): record["sums"]
            for record in result["calibration"]
        }

    def ways(self, calibration: str) -> list[Way]:
        """Return all configurations under a calibration, in the order of measurement."""
        return list(dict.fromkeys(way for way, _, _ in self.means if way.calibration == calibration))

    def value(self, way: Way, measure: str, *, split: str = "test", part: str = "all") -> float | None:
        """Return a measure ×100, or None if the fold does not have it."""
        means = self.means.get((way, split, part))
        return None if means is None else 100 * means[measure]


def reproduce(
    config: Config,
    out: str | PathLike[str],
    *,
    workers: int | None = None,
    values: str | PathLike[str] | None = None,
    tuned: str | PathLike[str] | None = None,
) -> Reproduction:
    """Compute what is missing in the folder, and write the report.

    The values of every text under the default and the linear model are written to `values`. `tuned` is a
    folder with an encoder tuned for every fold; missing ones are tuned. With None, no tuned encoder is used.
    """
    notebook = Notebook(out, config)
    names = _names(config.data)
    results: dict[Piece, Any] = {}
    work_by_kind = list(_work(config, names, tuned))
    notebook.announce(work_by_kind, workers)
    with Progress("encoding texts", len(names), lines=True) as bar:
        for name in names:
            encoder(label_fold(name, 0, seed=config.seed, most=config.most).texts, label=_short(name))
            bar.advance()
    if tuned is not None:
        pairs = [(name, fold) for name in names for fold in range(config.folds)]
        tune_folds(Path(tuned), pairs, seed=config.seed, most=config.most, say=_say)
    for label, work, units in work_by_kind:
        results |= notebook.compute(work, units, label=label, workers=workers)
    cells = tuple(_all_cells(names, results, config))
    page = _page(names, results, cells, config)
    return notebook.publish(cells, page, rows=_per_query(results, config.seed), values=values)


def _per_query(results: Results, seed: int) -> Iterator[dict[str, Any]]:
    for piece, result in results.items():
        about = {
            "experiment": "calibrated-fusion",
            "data": _short(piece.data),
            "fold": piece.fold,
            "seed": seed,
        }
        yield from ({**about, **row} for row in result.get("per query", ()))


def _names(data: str) -> tuple[str, ...]:
    if data != "all":
        return (data,)
    there = available()
    names = tuple(name for name in DATA if there.get(name))
    if not names:
        raise DataError(
            f"none of {', '.join(DATA)} is here", cure="set ISTHMUS_DATA, or name a folder with --data"
        )
    return names


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _short(name: str) -> str:
    return Path(name).name


def _work(
    config: Config, names: Sequence[str], tuned: str | PathLike[str] | None
) -> Iterator[tuple[str, Any, list[Unit]]]:
    folds, settings = range(config.folds), {"seed": config.seed, "most": config.most}
    pairs = [(name, fold) for name in names for fold in folds]
    yield (
        "the paper's two retrievers",
        two_retrievers,
        [
            Unit(Piece(_short(name), fold, mode), {"data": name, "fold": fold, "mode": mode, **settings})
            for name, fold in pairs
            for mode in MODES
            if name != "trec" or mode == "sound"  # TREC is not among the paper's sets
        ],
    )
    kind: Kind = "default" if tuned is None else "tuned"
    more = {} if tuned is None else {"tuned": str(tuned)}
    yield (
        "the default",
        default_stack,
        [
            Unit(Piece(_short(name), fold, kind), {"data": name, "fold": fold, **settings, **more})
            for name, fold in pairs
        ],
    )


def _of(results: Results, name: str, kind: Kind, config: Config) -> list[Any]:
    """Return the results of one kind, fold by fold."""
    pieces = (Piece(_short(name), fold, kind) for fold in range(config.folds))
    return [results[piece] for piece in pieces if piece in results]


def _defaults(results: Results, name: str, config: Config) -> list[Any]:
    """Return the default's results, fold by fold, with tuned encoders if there are any."""
    return _of(results, name, "tuned", config) or _of(results, name, "default", config)


def _folds(results: Results, name: str, mode: Mode, config: Config) -> list[Fold]:
    """Return the results of the paper's two retrievers, fold by fold."""
    return [Fold(result) for result in _of(results, name, mode, config)]


def _all_cells(names: Sequence[str], results: Results, config: Config) -> Iterator[Cell]:
    for name in names:
        short = _short(name)
        for mode in MODES:
            folds = _folds(results, name, mode, config)
            if folds:
                yield from _set_cells(short, mode, _of(results, name, mode, config))
                yield from _calibration_cells(short, mode, folds)
                yield from _figure_cells(short, mode, folds)
                yield from _fusion_cells(short, mode, folds)
        if sound := _of(results, name, "sound", config):
            yield from _hypothesis_cells(short, sound)
        yield from _default_cells(short, _defaults(results, name, config))
    if config.data == "all":
        yield from _absent_cells()


def _set_cells(data: str, mode: Mode, folds: Sequence[Any]) -> Iterator[Cell]:
    """Yield the cells of Table I, and of the retrievers as printed and as in the authors' code."""
    published = printed.SIZES.get(data, (None,) * len(SIZES))
    for measure, value, of_paper in zip(SIZES, folds[0]["sizes"], published, strict=True):
        yield Cell("I", data, measure, float(value), mode, data, paper=of_paper)
    for name, measure in product(folds[0]["readings"], ("P@1", "nDCG@10")):
        values = [100 * fold["readings"][name][measure] for fold in folds]
        about = {"row": name, "measure": measure, "mode": mode, "data": data}
        yield Cell.over_folds(values, table="readings", **about)


def _hypothesis_cells(data: str, folds: Sequence[Any]) -> Iterator[Cell]:
    """Yield cells for the paper's untested hypotheses, by calibration, in sound mode."""
    told = [fold.get("hypotheses", {}) for fold in folds]
    for calibration, measures in told[0].items():
        for measure in measures:
            scale = 100 if measure in SHARES else 1
            values = [scale * fold[calibration][measure] for fold in told if calibration in fold]
            about = {"row": calibration, "measure": measure, "mode": "sound", "data": data}
            yield Cell.over_folds(values, table="hypotheses", **about)


def _absent_cells() -> Iterator[Cell]:
    """Yield the printed cells for ACM, whose data are not available, without computed values."""
    for measure, size in zip(SIZES, printed.SIZES[ABSENT], strict=True):
        yield Cell("I", ABSENT, measure, float("nan"), "paper", ABSENT, n=0, paper=size)
    for (data, part, row, measure), published in printed.HEAD_TAIL.items():
        if data == ABSENT:
            yield Cell("IV", row, measure, float("nan"), "paper", data, part=part, n=0, paper=published)
    for (data, row, measure), published in printed.OVERALL.items():
        if data == ABSENT:
            yield Cell("V", row, measure, float("nan"), "paper", data, n=0, paper=published)


def _calibration_cells(data: str, mode: Mode, folds: Sequence[Fold]) -> Iterator[Cell]:
    """Yield Tables II, III and VI: errors on head lists (in sound mode on all), pooled over all folds.

    Table VI repeats two rows of each and says by how much QueryFeature reduces the error.
    """
    part = _part(mode)
    for table, retriever in (("II", SPARSE), ("III", DENSE)):
        errors: dict[str, float] = {}
        for calibration in CALIBRATIONS:
            for measure, value in _honest(_sums(folds, retriever, calibration, part), PAPER_BINS).items():
                published = printed.CALIBRATION_ERROR.get((retriever, calibration, measure))
                facts: dict[str, Any] = {"part": part, "n": len(folds)}
                facts["paper"] = published if data == "reuters" else None
                cell = Cell(table, calibration, measure, value, mode, data, **facts)
                yield cell
                if calibration in TOLD_TWICE and published is not None:
                    yield replace(cell, table="VI", variant=retriever)
                    errors[f"{calibration} {measure}"] = value
        if f"{TOLD_TWICE[1]} ECE" in errors:
            before, after = (errors[f"{row} ECE"] for row in TOLD_TWICE)
            published = printed.ECE_REDUCTION[retriever] if data == "reuters" else None
            reduced = 100 * (1 - after / before) if before > 0 else float("nan")
            facts = {"part": part, "variant": retriever, "n": len(folds), "paper": published}
            yield Cell("VI", TOLD_TWICE[1], "ECE reduction", reduced, mode, data, **facts)


def _figure_cells(data: str, mode: Mode, folds: Sequence[Fold]) -> Iterator[Cell]:
    """Yield Figure 1: per retriever, before and after QueryFeature, every bin of the reliability diagram."""
    part = _part(mode)
    for retriever in (SPARSE, DENSE):
        for calibration in TOLD_TWICE:
            sums = _sums(folds, retriever, calibration, part)
            if not sums:
                continue
            pooled = _pooled(sums, PAPER_BINS)
            columns = {"count": pooled.count, "promised": pooled.promised, "came true": pooled.came_true}
            for measure, column in columns.items():
                share = column if measure == "count" else column / np.maximum(pooled.count, 1)
                for low, high, value in zip(pooled.edges[:-1], pooled.edges[1:], share, strict=True):
                    which, n = f"{retriever}, {low:.1f}-{high:.1f}", len(folds)
                    number = float(value)
                    yield Cell("fig1", calibration, measure, number, mode, data, part, which, n=n)


def _part(mode: str) -> str:
    return "head" if mode == "paper" else "all"


def _sums(folds: Sequence[Any], retriever: str, calibration: str, part: str) -> list[Any]:
    """Return the calibration sums of the folds that have lists of this part."""
    sums = (fold.sums.get((retriever, calibration, part)) for fold in folds)
    return [one for one in sums if one]


def _honest(sums: Sequence[Any], bins: int) -> dict[str, float]:
    """Return ECE, MCE, Brier score, log-loss and base rate over the pooled folds."""
    if not sums:
        return {}
    pooled = _pooled(sums, bins)
    n = sum(one["n"] for one in sums)
    return {
        "ECE": pooled.ece,
        "MCE": pooled.mce,
        "Brier": sum(one["squares"] for one in sums) / n,
        "log-loss": sum(one["losses"] for one in sums) / n,
        "base rate": sum(one["right"] for one in sums) / n,
    }


def _pooled(sums: Sequence[Any], bins: int) -> Reliability:
    count, promised, came_true = (np.sum([one[f"bins{bins}"][at] for one in sums], axis=0) for at in range(3))
    return Reliability(np.linspace(0, 1, bins + 1), count, promised, came_true)


def _fusion_cells(data: str, mode: Mode, folds: Sequence[Fold]) -> Iterator[Cell]:
    """Yield Tables IV (CombMNZ by part), V (best configuration), VII (all of them), VIII (which is best)."""
    for calibration in CALIBRATIONS:
        for part in ("head", "tail"):
            way = Way(calibration, "CombMNZ", "none")
            for measure in MEASURES[:6]:
                alike = "P@1" if measure == "nDCG@1" else measure  # equal for texts with one label
                published = printed.HEAD_TAIL.get((data, part, calibration, alike))
                values = _values(folds, way, measure, part=part)
                about = {"row": calibration, "measure": measure, "mode": mode, "data": data}
                yield Cell.over_folds(values, table="IV", part=part, paper=published, **about)
        for way in folds[0].ways(calibration):
            for measure in ("P@1", "psP@10", "nDCG@1", "nDCG@10", "psnDCG@10"):
                published = printed.FUSIONS.get((*way, measure)) if data == "reuters" else None
                about = {"row": calibration, "measure": measure, "mode": mode, "data": data}
                values = _values(folds, way, measure)
                yield Cell.over_folds(values, table="VII", variant=_named(way), paper=published, **about)
        yield from _chosen_cells(data, mode, folds, calibration)


def _values(folds: Sequence[Fold], way: Way, measure: str, *, part: str = "all") -> list[float]:
    """Return a measure ×100 of every fold that has it."""
    values = (fold.value(way, measure, part=part) for fold in folds)
    return [value for value in values if value is not None]


def _named(way: Way) -> str:
    return f"{way.fusion}/{way.norm}"


def _chosen_cells(data: str, mode: Mode, folds: Sequence[Fold], calibration: str) -> Iterator[Cell]:
    """Yield Tables V and VIII: results of the chosen configuration, beside the one printed as best."""
    ways = chosen(folds, calibration, mode, "psnDCG@1")
    for measure in MEASURES:
        published = printed.OVERALL.get((data, calibration, measure))
        values = _reached(folds, ways, measure)
        facts: dict[str, Any] = {"measure": measure, "mode": mode, "data": data, "paper": published}
        yield Cell.over_folds(values, table="V", row=calibration, variant=_told_ways(ways), **facts)
    ways = chosen(folds, calibration, mode, "nDCG@10")
    facts = {"table": "VIII", "row": calibration, "measure": "nDCG@10", "mode": mode, "data": data}
    values = _reached(folds, ways, "nDCG@10")
    yield Cell.over_folds(values, variant=f"best: {_told_ways(ways)}", **facts)
    if (best := printed.CHOSEN.get((data, calibration))) is not None:
        way = Way(calibration, best[0], best[1])
        values = _reached(folds, [way] * len(folds), "nDCG@10")
        yield Cell.over_folds(values, variant=f"printed as best: {_named(way)}", **facts)


def _reached(folds: Sequence[Fold], ways: Sequence[Way], measure: str, split: str = "test") -> list[float]:
    """Return a measure ×100 of every fold, each under its own configuration."""
    values = (fold.value(way, measure, split=split) for fold, way in zip(folds, ways, strict=True))
    return [value for value in values if value is not None]


def _told_ways(ways: Sequence[Way]) -> str:
    """Name the commonest configuration, with the number of folds that chose it unless all did."""
    (way, folds), *others = Counter(map(_named, ways)).most_common()
    return f"{way} ×{folds}, {len(others)} more" if others else way


def chosen(folds: Sequence[Fold], calibration: str, mode: Mode, measure: str) -> list[Way]:
    """Return the configuration chosen for every fold.

    Paper mode takes the one with the best mean on test. Sound mode takes the best on the fold's own
    validation part, since the validation texts of other folds are test texts of this one.
    """
    ways = folds[0].ways(calibration)

    def best(among: Sequence[Fold], split: str) -> Way:
        return max(ways, key=lambda way: np.mean(_reached(among, [way] * len(among), measure, split)))

    if mode == "paper":
        return [best(folds, "test")] * len(folds)
    return [best([fold], "validation") for fold in folds]


def _default_cells(data: str, folds: Sequence[Any]) -> Iterator[Cell]:
    """Yield cells of the product's default, the plain linear model, and the calibration of probabilities."""
    rows = [("default", "default"), (LINEAR, "linear")]
    if folds and "tuned" in folds[0]:
        rows += [(name, name) for name in (TUNED, WITHOUT_TUNED, WITH_TUNED)]
    for run, row in rows:
        for part in ("all", "head", "tail"):
            for measure in MEASURES:
                values = [100 * means[measure] for fold in folds for means in _means(fold, run, part)]
                about = {"row": row, "measure": measure, "mode": "sound", "data": data}
                yield Cell.over_folds(values, table="V", part=part, **about)
    for name in folds[0]["honesty"] if folds else ():
        for scope, label in (("all", "all pairs"), ("top1", "top 1")):
            sums = [fold["honesty"][name][scope] for fold in folds]
            for measure, value in _honest(sums, BINS).items():
                yield Cell("calibration", name, measure, value, "sound", data, variant=label, n=len(folds))


def _means(fold: Mapping[str, Any], run: str, part: str) -> list[Mapping[str, float]]:
    """Return the measures of a run of the default on one fold, in a list that is empty without that part."""
    records = (record for record in fold["metrics"] if (record["run"], record["part"]) == (run, part))
    return [record["means"] for record in records]


def _page(names: Sequence[str], results: Results, cells: Sequence[Cell], config: Config) -> Page:
    sections = [section for name in names for section in _sections(name, results, cells, config)]
    if config.data == "all":
        mine = [cell for cell in cells if cell.data == ABSENT]
        sections.append(Section("ACM", (PROSE("absent"), cells_table(mine, "Tables I, IV and V, ACM"))))
    lead = _lead(names, results, config)
    return Page("Calibrated rank fusion: printed, paper mode, sound mode", tuple(sections), lead)


def _lead(names: Sequence[str], results: Results, config: Config) -> str:
    """Return the introduction of the report."""
    return PROSE(
        "lead",
        folds=config.folds,
        intervals=config.folds >= LEAST_FOLDS,
        most=config.most,
        encoders=", ".join(Counter(one["encoder"] for one in results.values())),
        trec="trec" in names,
    )


def _sections(name: str, results: Results, cells: Sequence[Cell], config: Config) -> Iterator[Section]:
    short = _short(name)
    mine = [cell for cell in cells if cell.data == short]
    titles = {
        "I": "Table I: sizes",
        "readings": "Retrievers as printed and as in the authors' code; pairs by CombMNZ on z-scores",
        "II": "Table II: calibration of BM25",
        "III": "Table III: calibration of the dense retriever",
        "IV": "Table IV: CombMNZ by partition",
        "V": "Table V: the best configuration per calibration, and the default",
        "VI": "Table VI: both retrievers before and after QueryFeature",
        "VII": "Table VII: fusions and normalisations",
        "VIII": "Table VIII: which configuration is best by nDCG@10",
        "hypotheses": "Not tested in the paper: confidence against quality, agreement of the retrievers",
    }
    for table, title in titles.items():
        rows = [cell for cell in mine if cell.table == table]
        yield Section(f"{title} ({short})", (cells_table(rows, f"{title}, {short}"),))
    yield Section(f"Honesty of probabilities ({short})", tuple(_honesty_parts(short, mine)))
    yield Section(f"Figure 1: reliability ({short})", tuple(_diagrams(name, results, config)))
    yield Section(f"What it says ({short})", tuple(_verdicts(name, results, mine, config)))


def _honesty_parts(short: str, cells: Sequence[Cell]) -> Iterator[str | Table]:
    rows = [cell for cell in cells if cell.table == "calibration"]
    yield PROSE("honesty", bins=BINS)
    yield cells_table(rows, f"Calibration on test, {short}", digits=4)


def _diagrams(name: str, results: Results, config: Config) -> Iterator[Plot]:
    for mode in MODES:
        part = _part(mode)
        folds = _folds(results, name, mode, config)
        for retriever in (SPARSE, DENSE):
            named = {}
            for calibration, label in zip(TOLD_TWICE, ("min-max scores", "QueryFeature"), strict=True):
                if sums := _sums(folds, retriever, calibration, part):
                    named[label] = _pooled(sums, PAPER_BINS)
            if named:
                caption = f"{_short(name)}, {mode} mode, {part} labels: {retriever}"
                yield reliability_diagram(named, caption=caption)
    defaults = _defaults(results, name, config)
    fused = _pooled([fold["honesty"]["default"]["all"] for fold in defaults], BINS)
    caption = f"{_short(name)}, sound mode, all labels: the default's fused probabilities"
    yield reliability_diagram({"default": fused}, caption=caption)


def _verdicts(name: str, results: Results, cells: Sequence[Cell], config: Config) -> Iterator[str]:
    folds = _defaults(results, name, config)
    default, linear = (
        [means["P@1"] for fold in folds for means in _means(fold, row, "all")] for row in ("default", LINEAR)
    )
    if weighed := [fold["tuned"] for fold in folds if "tuned" in fold]:
        first = {
            row: 100 * np.mean([means["P@1"] for fold in folds for means in _means(fold, row, "all")])
            for row in (TUNED, WITHOUT_TUNED, WITH_TUNED)
        }
        included = sum(one["included"] for one in weighed)
        yield PROSE("tuned", values=first, included=included, folds=len(weighed))
    if len(folds) > 1:
        test = paired_t(np.array(default), np.array(linear))
        means = {"default": 100 * np.mean(default), "linear": 100 * np.mean(linear)}
        yield PROSE("default_row", test=test, enough=len(folds) >= LEAST_FOLDS, **means)
    oracle, sound = (_first_answers(cells, "V", mode, "all") for mode in ("paper", "sound"))
    leaks = {row: value - sound[row] for row, value in oracle.items() if row in sound}
    levels = {"oracle": oracle, "sound": sound, "rows": list(leaks)}
    if leaks and _several_labels(folds):
        yield PROSE("copies", **levels)
    elif leaks:
        yield PROSE("leak", least=min(leaks.values()), most=max(leaks.values()), **levels)
    if heads := _first_answers(cells, "IV", "paper", "head"):
        yield PROSE("heads", values=heads)


def _several_labels(folds: Sequence[Any]) -> bool:
    """Whether texts have more than one label; with one label, at most one of five answers can be right."""
    return any(means["P@5"] > 0.2 + 1e-9 for fold in folds for means in _means(fold, "default", "all"))


def _first_answers(cells: Sequence[Cell], table: str, mode: str, part: str) -> dict[str, float]:
    """Return P@1 of every calibration in one table."""
    return {
        cell.row: cell.value
        for cell in cells
        if (cell.table, cell.mode, cell.part, cell.measure) == (table, mode, part, "P@1")
        and cell.row in CALIBRATIONS
    }
