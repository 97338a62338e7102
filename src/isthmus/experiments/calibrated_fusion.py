"""Calibrated rank fusion, Tables II-VIII and Figure 1: what is printed, our paper mode, our sound mode.

Paper mode keeps what the paper does, and says so: a text is ranked only against the labels of the partition
that its true label is in (an oracle), configurations are chosen on test, texts of several labels are copied.
Sound mode ranks all labels, chooses on validation and keeps texts apart. The row "default" is the product's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isthmus.corpora import available
from isthmus.errors import DataError
from isthmus.evaluation import Reliability, paired_t, reliability_diagram
from isthmus.experiments import printed_fusion as printed
from isthmus.experiments.label_folds import FOLDS, label_fold
from isthmus.experiments.label_panels import DENSE, LINEAR, SPARSE, encoder
from isthmus.experiments.label_runs import BINS, MEASURES, PAPER_BINS, default_stack, two_retrievers
from isthmus.experiments.notebook import Cell, Notebook, Unit, cells_table
from isthmus.report import Page, Plot, Section, Table

DATA = ("twitter", "trec", "reuters")
CALIBRATIONS = printed.CALIBRATIONS
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """What to reproduce: `data` is a name, a path, or "all" of those that are found."""

    data: str = "all"
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0

    @property
    def folds(self) -> int:
        """Ten folds, or two for a look."""
        return FOLDS if self.scale == "full" else 2


@dataclass(frozen=True)
class Reproduction:
    """Everything that came out."""

    cells: tuple[Cell, ...]
    page: Page
    wrote: tuple[Path, ...]


def reproduce(config: Config, out: str | PathLike[str], *, workers: int | None = None) -> Reproduction:
    """Compute what is missing in the folder, and write the report."""
    notebook = Notebook(out, config)
    names = _names(config.data)
    for name in names:
        encoder(label_fold(name, 0, seed=config.seed).texts, label=f"encoding the texts of {_short(name)}")
    found: dict[str, Any] = {}
    for label, work, units in _work(config, names):
        found |= notebook.compute(work, units, label=label, workers=workers)
    cells = tuple(_all_cells(names, found, config))
    page = _page(names, found, cells, config)
    return Reproduction(cells, page, tuple(notebook.publish(cells, page)))


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


def _short(name: str) -> str:
    return Path(name).name


def _work(config: Config, names: Sequence[str]) -> Iterator[tuple[str, Any, list[Unit]]]:
    folds, seed = range(config.folds), config.seed
    pairs = [(name, fold) for name in names for fold in folds]
    yield (
        "the paper's two retrievers",
        two_retrievers,
        [
            (f"{_short(name)}-{fold}-{mode}", {"data": name, "fold": fold, "mode": mode, "seed": seed})
            for name, fold in pairs
            for mode in ("paper", "sound")
            if name != "trec" or mode == "sound"  # TREC is not among the paper's sets
        ],
    )
    yield (
        "the default",
        default_stack,
        [
            (f"{_short(name)}-{fold}-default", {"data": name, "fold": fold, "seed": seed})
            for name, fold in pairs
        ],
    )


def _of(found: Results, name: str, kind: str, config: Config) -> list[Any]:
    """The results of one kind, fold by fold."""
    keys = [f"{_short(name)}-{fold}-{kind}" for fold in range(config.folds)]
    return [found[key] for key in keys if key in found]


def _all_cells(names: Sequence[str], found: Results, config: Config) -> Iterator[Cell]:
    for name in names:
        short = _short(name)
        for mode in ("paper", "sound"):
            folds = _of(found, name, mode, config)
            if folds:
                yield from _calibration_cells(short, mode, folds)
                yield from _fusion_cells(short, mode, folds)
        yield from _default_cells(short, _of(found, name, "default", config))


def _calibration_cells(data: str, mode: Literal["paper", "sound"], folds: Sequence[Any]) -> Iterator[Cell]:
    """Tables II and III (and VI, which repeats them): errors on head lists, over all rows of all folds."""
    part = "head" if mode == "paper" else "all"
    for table, retriever in (("II", SPARSE), ("III", DENSE)):
        for calibration in CALIBRATIONS:
            sums = [fold["calibration"].get(f"{retriever}|{calibration}|{part}") for fold in folds]
            for measure, value in _honest([one for one in sums if one], PAPER_BINS).items():
                said = printed.CALIBRATION_ERROR.get((retriever, calibration, measure))
                yield Cell(
                    table,
                    calibration,
                    measure,
                    value,
                    mode,
                    data,
                    part=part,
                    n=len(folds),
                    paper=said if data == "reuters" else None,
                )


def _honest(sums: Sequence[Any], bins: int) -> dict[str, float]:
    """ECE, MCE, Brier, log-loss and base rate of folds pooled."""
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


def _fusion_cells(data: str, mode: Literal["paper", "sound"], folds: Sequence[Any]) -> Iterator[Cell]:
    """Tables IV (CombMNZ by part), V (the best configuration), VII (all configurations), VIII (which one)."""
    for calibration in CALIBRATIONS:
        for part in ("head", "tail"):
            key = f"{calibration}|CombMNZ|none|test|{part}"
            for measure in MEASURES[:6]:
                alike = "P@1" if measure == "nDCG@1" else measure  # one label: they are equal
                said = printed.HEAD_TAIL.get((data, part, calibration, alike))
                yield _cell(folds, key, measure, "IV", calibration, mode, data, part=part, paper=said)
        for fusion, norm in _ways(folds, calibration):
            for measure in ("P@1", "psP@10", "nDCG@1", "nDCG@10", "psnDCG@10"):
                key = f"{calibration}|{fusion}|{norm}|test|all"
                said = (
                    printed.FUSIONS.get((calibration, fusion, norm, measure)) if data == "reuters" else None
                )
                variant = f"{fusion}/{norm}"
                yield _cell(folds, key, measure, "VII", calibration, mode, data, variant=variant, paper=said)
        best = chosen(folds, calibration, mode, "psnDCG@1")
        for measure in MEASURES:
            said = printed.OVERALL.get((data, calibration, measure))
            key = f"{calibration}|{best[0]}|{best[1]}|test|all"
            variant = "/".join(best)
            yield _cell(folds, key, measure, "V", calibration, mode, data, variant=variant, paper=said)
        best = chosen(folds, calibration, mode, "nDCG@10")
        told = {"best": "/".join(best), "printed as best": printed.CHOSEN.get((data, calibration))}
        for which, way in told.items():
            if way is not None:
                key, variant = f"{calibration}|{way.replace('/', '|')}|test|all", f"{which}: {way}"
                yield _cell(folds, key, "nDCG@10", "VIII", calibration, mode, data, variant=variant)


def _cell(
    folds: Sequence[Any], key: str, measure: str, table: str, row: str, mode: str, data: str, **facts: Any
) -> Cell:
    values = [100 * fold["metrics"][key][measure] for fold in folds if key in fold["metrics"]]
    return Cell.over_folds(values, table=table, row=row, measure=measure, mode=mode, data=data, **facts)


def _ways(folds: Sequence[Any], calibration: str) -> list[tuple[str, str]]:
    keys = (key.split("|") for key in folds[0]["metrics"])
    return list(dict.fromkeys((key[1], key[2]) for key in keys if key[0] == calibration))


def chosen(folds: Sequence[Any], calibration: str, mode: str, measure: str) -> tuple[str, str]:
    """The fusion and normalisation with the best mean: on test as the paper does, or on validation."""
    split = "test" if mode == "paper" else "validation"

    def value(way: tuple[str, str]) -> float:
        key = f"{calibration}|{way[0]}|{way[1]}|{split}|all"
        return float(np.mean([fold["metrics"][key][measure] for fold in folds]))

    return max(_ways(folds, calibration), key=value)


def _default_cells(data: str, folds: Sequence[Any]) -> Iterator[Cell]:
    """The product's default, the plain linear model, and how honest the probabilities are."""
    for run, row in (("default", "default"), (LINEAR, "linear")):
        for part in ("all", "head", "tail"):
            for measure in MEASURES:
                yield _cell(folds, f"{run}|{part}", measure, "V", row, "sound", data, part=part)
    for name in folds[0]["honesty"] if folds else ():
        for scope, shown in (("all", "all pairs"), ("top1", "top 1")):
            sums = [fold["honesty"][name][scope] for fold in folds]
            for measure, value in _honest(sums, BINS).items():
                yield Cell("calibration", name, measure, value, "sound", data, variant=shown, n=len(folds))


def _page(names: Sequence[str], found: Results, cells: Sequence[Cell], config: Config) -> Page:
    sections = [section for name in names for section in _sections(name, found, cells, config)]
    if config.data == "all":
        absent = "The ACM set is not public in the form the paper used: its rows have no figure of ours."
        sections.append(Section("ACM", (absent,)))
    encoders = Counter(one["encoder"] for one in found.values())
    lead = (
        f"{config.folds} folds; dense retriever: {', '.join(encoders)} under a head fitted on training texts,"
        " where the paper fine-tunes an encoder of its own. Figures are ×100 except calibration errors;"
        " intervals are 95 % t intervals over folds. Paper mode ranks a text only among the partition of its"
        " true label and chooses configurations on test: its level is not comparable with sound mode."
    )
    return Page("Calibrated rank fusion: printed, paper mode, sound mode", tuple(sections), lead)


def _sections(name: str, found: Results, cells: Sequence[Cell], config: Config) -> Iterator[Section]:
    short = _short(name)
    mine = [cell for cell in cells if cell.data == short]
    titles = {
        "II": "Table II: calibration of BM25",
        "III": "Table III: calibration of the dense retriever",
        "IV": "Table IV: CombMNZ by partition",
        "V": "Table V: the best configuration per calibration, and the default",
        "VII": "Table VII: fusions and normalisations",
        "VIII": "Table VIII: which configuration is best by nDCG@10",
    }
    for table, title in titles.items():
        shown = [cell for cell in mine if cell.table == table]
        yield Section(f"{title} ({short})", (cells_table(shown, f"{title}, {short}"),))
    yield Section(f"Honesty of probabilities ({short})", tuple(_honesty_parts(short, mine)))
    yield Section(f"Figure 1: reliability ({short})", tuple(_diagrams(name, found, config)))
    yield Section(f"What it says ({short})", tuple(_verdicts(name, found, mine, config)))


def _honesty_parts(short: str, cells: Sequence[Cell]) -> Iterator[str | Table]:
    shown = [cell for cell in cells if cell.table == "calibration"]
    yield "Sound mode, all labels ranked, pooled over the test parts of all folds; 15 bins of equal width."
    yield cells_table(shown, f"Calibration on test, {short}", digits=4)


def _diagrams(name: str, found: Results, config: Config) -> Iterator[Plot]:
    for mode, part in (("paper", "head"), ("sound", "all")):
        folds = _of(found, name, mode, config)
        for retriever in (SPARSE, DENSE):
            named = {}
            for calibration, shown in (("base", "min-max scores"), ("QueryFeature", "QueryFeature")):
                sums = [fold["calibration"].get(f"{retriever}|{calibration}|{part}") for fold in folds]
                if any(sums):
                    named[shown] = _pooled([one for one in sums if one], PAPER_BINS)
            if named:
                caption = f"{_short(name)}, {mode} mode, {part} labels: {retriever}"
                yield reliability_diagram(named, caption=caption)
    folds = _of(found, name, "default", config)
    fused = _pooled([fold["honesty"]["default"]["all"] for fold in folds], BINS)
    caption = f"{_short(name)}, sound mode, all labels: the default's fused probabilities"
    yield reliability_diagram({"default": fused}, caption=caption)


def _verdicts(name: str, found: Results, cells: Sequence[Cell], config: Config) -> Iterator[str]:
    folds = _of(found, name, "default", config)
    default, linear = (
        [fold["metrics"][f"{row}|all"]["P@1"] for fold in folds] for row in ("default", LINEAR)
    )
    if len(folds) > 1:
        test = paired_t(np.array(default), np.array(linear))
        yield (
            f"P@1 of the default {100 * np.mean(default):.1f}, of a plain linear model on words and dense"
            f" vectors {100 * np.mean(linear):.1f}: a difference of {100 * test.difference:+.2f} points"
            f" (paired t over {test.n} folds, p = {test.p:.2g})."
        )
    values = {(cell.table, cell.row, cell.mode, cell.part, cell.measure): cell for cell in cells}
    oracle, honest = (values.get(("V", "base", mode, "all", "P@1")) for mode in ("paper", "sound"))
    if oracle is not None and honest is not None:
        leak = oracle.value - honest.value
        yield (
            f"Ranking a text only against its true label's partition is worth {leak:+.1f} points of P@1"
            f" ({oracle.value:.1f} against {honest.value:.1f}): that part of the level is the leak."
        )
    gains = [values.get(("IV", row, "paper", "head", "P@1")) for row in ("base", *CALIBRATIONS[1:])]
    if all(gain is not None for gain in gains):
        told = ", ".join(f"{gain.row} {gain.value:.1f}" for gain in gains if gain is not None)
        yield f"Head P@1 of CombMNZ in paper mode: {told}."
