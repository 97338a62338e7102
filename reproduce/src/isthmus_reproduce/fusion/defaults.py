"""The defaults of `calibrate` and `fuse`, measured on simulated worlds and on judged runs.

In a world, whose truth is known, the fusers learn from its judged queries and are compared on fresh ones,
each with the best of CombSUM, convex, RRF and the single runs there; which one is best is known only
afterwards. Calibration is evaluated as the command does it, on held-out lists. For a folder of runs
everything is held out, fold by fold.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.calibration import Judging, calibrate
from isthmus.errors import DataError
from isthmus.evaluation import calibration_of, evaluate
from isthmus.fusion import Auto, fuser
from isthmus.report import Page, Section, Table
from isthmus.tables import Qrels, Run, read_qrels, read_run
from isthmus_reproduce.fusion.worlds import KINDS, FusionWorld
from isthmus_reproduce.intervals import fold_interval
from isthmus_reproduce.notebook import Cell, Notebook, Reproduction, Unit, listed
from isthmus_reproduce.prose import Prose

PROSE = Prose("defaults.j2")
MEASURES = ("nDCG@10", "nDCG@10(gain=linear)")
RIVALS = ("comb-sum", "convex", "rrf", "best run")
AUTO, STACKED = "auto", "stacked"
RUNS = Path("runs") / "trec-dl"
"""Folder of runs with judgements, below ISTHMUS_DATA."""
FRESH = 200


@dataclass(frozen=True)
class Config:
    """`data` is "worlds", a folder of TREC runs and judgements, or "all": worlds and the available runs."""

    data: str = "all"
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0

    @property
    def worlds(self) -> range:
        """Seeds of the worlds; another `seed` gives other worlds."""
        return range(1000 * self.seed, 1000 * self.seed + (200 if self.scale == "full" else 8))


@dataclass(frozen=True)
class Part:
    """A unit of work: the world of a seed, or a folder at a grade of relevance."""

    data: str
    number: int


def reproduce(
    config: Config,
    out: str | PathLike[str],
    *,
    workers: int | None = None,
    values: str | PathLike[str] | None = None,
) -> Reproduction:
    """Compute what is missing in the folder, write the report, and to `values` the values of every query."""
    notebook = Notebook(out, config)
    worlds: dict[Any, Any] = {}
    if config.data in ("all", "worlds"):
        units = [Unit(Part("world", seed), {"seed": seed}) for seed in config.worlds]
        worlds = notebook.compute(world, units, label="worlds", workers=workers)
    units = [
        Unit(Part(folder.name, grade), {"folder": str(folder), "relevant": grade})
        for folder in _folders(config.data)
        for grade in range(1, min(2, int(_read(folder)[1].grades.max())) + 1)
    ]
    judged = notebook.compute(held_out, units, label="runs", workers=workers)
    cells = [*_world_cells(list(worlds.values())), *_run_cells(judged)]
    page = _page(list(worlds.values()), judged, cells)
    return notebook.publish(cells, page, rows=_per_query(worlds, judged), values=values)


def _per_query(worlds: Mapping[Any, Any], judged: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield every method's value of every query: fresh queries of worlds, with the seed, and judged ones."""
    for part, one in worlds.items():
        about: dict[str, Any] = {"experiment": "fusion-defaults", "data": "worlds", "measure": MEASURES[0]}
        about["seed"] = part.number
        for method, mine in one["values"].items():
            names = FusionWorld.names(one["judged"] + len(mine))[one["judged"] :]
            for query, value in zip(names, mine, strict=True):
                yield {**about, "method": method, "query": query, "value": value}
    for part, one in judged.items():
        about = {"experiment": f"fusion-defaults, {_variant(part)}", "data": part.data, "seed": 0}
        for measure, methods in one["values"].items():
            for method, mine in methods.items():
                for query, value in zip(one["queries"], mine, strict=True):
                    yield {**about, "method": method, "query": query, "measure": measure, "value": value}


def _folders(data: str) -> list[Path]:
    if data not in ("all", "worlds"):
        return [Path(data)]
    here = Path(os.environ.get("ISTHMUS_DATA", "")) / RUNS
    return [here] if data == "all" and here.is_dir() else []


def world(seed: int) -> dict[str, Any]:
    """Measure one world: every method on its fresh queries, and calibration on its judged ones, held out."""
    drawn = FusionWorld.draw(seed, fresh=FRESH)
    judged, fresh = drawn.queries[: drawn.judged], drawn.queries[drawn.judged :]
    runs, qrels = drawn.runs, drawn.qrels
    old, new = [run[judged] for run in runs], [run[fresh] for run in runs]
    values: dict[str, list[float]] = {}
    auto = Auto()
    fused = auto.fit_fuse(old, qrels[judged])
    values[AUTO] = _values(qrels[fresh], auto.fuse(new), MEASURES[0])
    for method in ("comb-sum", "rrf", "convex", STACKED):
        options = {"calibrator": "platt"} if method == STACKED else {}
        fitted = fuser(method, **options).fit(old, qrels[judged])
        values[method] = _values(qrels[fresh], fitted.fuse(new), MEASURES[0])
    for run in new:
        values[run.name] = _values(qrels[fresh], run, MEASURES[0])
    single = calibrate(old[0], qrels=qrels[judged])
    return {
        "kind": drawn.kind,
        "runs": len(runs),
        "judged": drawn.judged,
        "chosen": auto.label,
        "held out": float(np.mean(_values(qrels[judged], fused, MEASURES[0]))),
        "values": values,
        "calibration": {
            "one run": calibration_of(qrels[judged], single),
            "fused": calibration_of(qrels[judged], fused),
            "fused, fresh queries": calibration_of(qrels[fresh], auto.fuse(new)),
        },
    }


def held_out(folder: str, relevant: int) -> dict[str, Any]:
    """Measure all methods and calibrations on a folder of runs with judgements, five-fold held out."""
    runs, qrels = _read(Path(folder))
    judging = Judging(relevant)
    values: dict[str, dict[str, list[float]]] = {measure: {} for measure in MEASURES}
    auto = Auto(judging=judging)
    lists = {AUTO: auto.fit_fuse(runs, qrels)}
    for method in ("comb-sum", "rrf", "convex", STACKED):
        lists[method] = fuser(method, judging=judging).fit_fuse(runs, qrels)
    lists |= {run.name: run for run in runs}
    for measure in MEASURES:
        values[measure] = {name: _values(qrels, run, measure) for name, run in lists.items()}
    calibrated = {run.name: calibrate(run, qrels=qrels, judging=judging) for run in runs}
    return {
        "queries": list(qrels.queries),
        "chosen": auto.label,
        "trials": [trial.record() for trial in auto.trials_],
        "values": values,
        "calibration": {
            name: calibration_of(qrels, run, rel=relevant)
            for name, run in {AUTO: lists[AUTO], **calibrated}.items()
        },
    }


def _read(folder: Path) -> tuple[list[Run], Qrels]:
    """Read the runs and the judgements of a folder."""
    files, judgements = sorted(folder.glob("*.run")), sorted(folder.glob("*qrels*"))
    if len(files) < 2 or not judgements:
        raise DataError(
            "no runs with judgements", file=folder, cure="put two .run files and a qrels file there"
        )
    qrels = read_qrels(judgements[0])
    return [read_run(file, name=file.name.split(".")[0])[qrels.queries] for file in files], qrels


def _values(qrels: Qrels, run: Run, measure: str) -> list[float]:
    """Return a measure of every judged query, in the order of the judgements."""
    evaluation = evaluate(qrels, run, [measure])
    return [round(value, 6) for value in evaluation.values[evaluation.resolve(measure)].tolist()]


def _rivals(values: Mapping[str, Sequence[float]]) -> dict[str, FloatArray]:
    """Return the values of every rival; "best run" is the run with the best mean."""
    plain = {name: np.array(values[name]) for name in RIVALS[:-1]}
    others = [np.array(each) for name, each in values.items() if name not in (AUTO, STACKED, *plain)]
    return {**plain, RIVALS[-1]: max(others, key=np.mean)}


def margins(worlds: Sequence[Mapping[str, Any]], row: str = AUTO) -> FloatArray:
    """Return, for every world, a method's mean nDCG@10 less that of the best rival there."""
    rivals = [max(each.mean() for each in _rivals(one["values"]).values()) for one in worlds]
    mine = [
        _rivals(one["values"])[row].mean() if row in RIVALS else np.mean(one["values"][row]) for one in worlds
    ]
    return np.asarray(np.array(mine) - np.array(rivals))


def _world_cells(worlds: Sequence[Mapping[str, Any]]) -> Iterator[Cell]:
    if not worlds:
        return
    about: dict[str, Any] = {"table": "worlds", "mode": "sound", "data": "worlds"}
    for row in (AUTO, *RIVALS, STACKED):
        difference = margins(worlds, row)
        for part in ("all", *KINDS):
            mine = difference[[part in ("all", one["kind"]) for one in worlds]]
            if len(mine):
                yield Cell.over_folds(
                    mine.tolist(), row=row, part=part, measure="nDCG@10 over the best", **about
                )
        shares = {"lowest": difference.min(), "share above all": (difference > 0).mean()}
        shares["share below by .03"] = (difference < -0.03).mean()
        for measure, value in shares.items():
            yield Cell(row=row, measure=measure, value=float(value), n=len(worlds), **about)
    for row in worlds[0]["calibration"]:
        records = [one["calibration"][row] for one in worlds]
        for measure in ("ECE@10", "ECE@10 floor", "ECE@10 floor 95%", "ECE", "log-loss@10"):
            yield Cell.over_folds([one[measure] for one in records], row=row, measure=measure, **about)
        inside = np.mean([one["ECE@10"] <= one["ECE@10 floor 95%"] for one in records])
        yield Cell(row=row, measure="share within the floor", value=float(inside), n=len(worlds), **about)


def _run_cells(judged: Mapping[Any, Mapping[str, Any]]) -> Iterator[Cell]:
    for part, one in judged.items():
        about: dict[str, Any] = {"mode": "sound", "data": part.data, "variant": _variant(part)}
        for measure, values in one["values"].items():
            for row, mine in values.items():
                yield Cell.over_queries(np.array(mine), table="runs", row=row, measure=measure, **about)
            for row, rival in _rivals(values).items():
                difference, name = np.array(values[AUTO]) - rival, f"auto over {row}"
                yield Cell.over_queries(difference, table="runs", row=name, measure=measure, **about)
                worse: dict[str, Any] = {"measure": f"{measure}, queries worse"}
                worse["value"] = float((difference < 0).sum())
                yield Cell(table="runs", row=name, n=len(difference), **worse, **about)
        for row, record in one["calibration"].items():
            for measure in ("ECE@10", "ECE@10 floor", "ECE@10 floor 95%", "ECE"):
                facts: dict[str, Any] = {"value": record[measure], "n": int(record["n@10"]), **about}
                yield Cell(table="calibration", row=row, measure=measure, **facts)


def _variant(part: Part) -> str:
    return f"relevant from {part.number}"


def _page(
    worlds: Sequence[Mapping[str, Any]], judged: Mapping[Any, Mapping[str, Any]], cells: Sequence[Cell]
) -> Page:
    sections = []
    if worlds:
        difference, chosen = margins(worlds), Counter(one["chosen"] for one in worlds)
        facts = {"worlds": len(worlds), "mean": difference.mean(), "least": difference.min(), "fresh": FRESH}
        optimism = fold_interval([one["held out"] - np.mean(one["values"][AUTO]) for one in worlds])
        above = (difference > 0).mean()
        text = PROSE("worlds", **facts, above=above, chosen=dict(chosen.most_common()), optimism=optimism)
        sections.append(Section("Simulated worlds", (text, _table(cells, "worlds"))))
    for part, one in judged.items():
        text = PROSE("runs", queries=len(one["queries"]), relevant=part.number, chosen=one["chosen"])
        tables = [_table(cells, table, part.data, _variant(part)) for table in ("runs", "calibration")]
        sections.append(Section(f"{part.data}, {_variant(part)}", (text, *tables)))
    return Page("The defaults of calibration and fusion", tuple(sections), PROSE("lead"))


def _table(cells: Sequence[Cell], table: str, data: str = "worlds", variant: str = "") -> Table:
    mine = [cell for cell in cells if (cell.table, cell.data, cell.variant) == (table, data, variant)]
    return listed(mine, f"{table}: {data} {variant}".strip(), "row", "part")
