"""FedRisk (Rabbi et al.), Table 1 and Figures 2-5: printed values, paper mode, sound mode.

Besides, ablations explain the printed curves, and an attack with inverted grades, with its controls, shows
how the method copes with bad silos. The row "default" is the product's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import ConfigError
from isthmus.federation import FedRisk
from isthmus_reproduce.fedrisk import runs
from isthmus_reproduce.fedrisk.cells import (
    CENTRAL,
    REFERENCED,
    REFERENCES,
    TREE_ROWS,
    TREES,
    Outcome,
    RunUnit,
    all_cells,
    central_name,
    overrun_name,
    per_query,
)
from isthmus_reproduce.fedrisk.plans import MODES, Protocol, all_bad, plans, protocol_for
from isthmus_reproduce.fedrisk.report import report
from isthmus_reproduce.notebook import Notebook, Reproduction, Unit

DATA = ("synthetic", "mq2008", "mslr-sample")
"""Sets that are computed, if available, when none is named."""
SMOKE = DATA[:2]
logger = logging.getLogger(__name__)

Work = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Config:
    """What to reproduce: `data` is a name or a path; `only` restricts it to these rows of Table 1."""

    data: str = "synthetic"
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0
    only: tuple[str, ...] = ()


def reproduce(
    config: Config,
    out: str | PathLike[str],
    *,
    workers: int | None = None,
    values: str | PathLike[str] | None = None,
) -> Reproduction:
    """Compute what is missing in the folder, write the report, and to `values` the values of every query.

    Units of a run with `only` are reused by a run of all rows in the same folder, and the other way round.
    """
    notebook = Notebook(out, replace(config, only=()))
    protocol = protocol_for(runs.fold_of(config.data, 0), config.scale, folds=runs.count_folds(config.data))
    for number, fault in FedRisk.paper().faults().items():
        logger.warning("paper mode, known fault %s: %s", number, fault)
    results: dict[RunUnit, Any] = {}
    work_by_kind = list(_work(config, protocol))
    notebook.announce(work_by_kind, workers)
    for label, work, units in work_by_kind:
        results |= notebook.compute(work, units, label=label, workers=workers)
    outcome = Outcome(results, protocol, config.seed)
    data = Path(config.data).name
    cells = tuple(all_cells(outcome, data))

    def queries(fold: int) -> tuple[str, ...]:
        return runs.fold_of(config.data, fold, protocol.queries).test.queries

    rows = per_query(outcome, data, queries)
    return notebook.publish(cells, report(outcome, data), rows=rows, values=values)


def table_rows(protocol: Protocol) -> tuple[str, ...]:
    """Return the names of Table 1's rows, ours included."""
    trained = (run.row for run in plans(protocol) if run.table == "1")
    return tuple(dict.fromkeys((*trained, CENTRAL, *TREE_ROWS, *REFERENCES)))


def _work(config: Config, protocol: Protocol) -> Iterator[tuple[str, Work, list[Unit]]]:
    known, requested = table_rows(protocol), config.only
    for name in requested:
        if name not in known:
            raise ConfigError(f"Table 1 has no row {name!r}", key=name, value=name, known=known)
    about: dict[str, Any] = {"data": config.data, "protocol": protocol}
    folds = range(protocol.folds)

    def wanted(*rows: str) -> bool:
        return not requested or any(row in requested for row in rows)

    yield "training", runs.federated, list(_training(config, protocol))
    central = [
        Unit(RunUnit(central_name(mode), fold, seed), {**about, "mode": mode, "fold": fold, "seed": seed})
        for mode in MODES
        for fold in folds
        for seed in range(config.seed, config.seed + protocol.seeds)
        if wanted(CENTRAL)
    ]
    yield "centralised twins", runs.central, central
    several = ((REFERENCED, runs.references, REFERENCES), (TREES, runs.trees, TREE_ROWS))
    for run, work, rows in several:
        units = [
            Unit(RunUnit(run, fold, config.seed), {**about, "fold": fold}) for fold in folds if wanted(*rows)
        ]
        yield run.row, work, units
    overrun = [
        Unit(
            RunUnit(overrun_name(row), fold, config.seed),
            {**about, "row": row, "fold": fold, "seed": config.seed},
        )
        for row in all_bad(protocol)
        for fold in folds
        if not requested
    ]
    yield "rounds of bad silos only", runs.overrun, overrun


def _training(config: Config, protocol: Protocol) -> Iterator[Unit]:
    """Yield the runs fold by fold, so that a worker reads a fold once."""
    for fold in range(protocol.folds):
        for run, plan in plans(protocol).items():
            if config.only and not (run.table == "1" and run.row in config.only):
                continue
            for seed in range(config.seed, config.seed + plan.seeds):
                about = {"data": config.data, "protocol": protocol, "run": run}
                yield Unit(RunUnit(run, fold, seed), {**about, "fold": fold, "seed": seed})
