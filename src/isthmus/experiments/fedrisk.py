"""FedRisk (Rabbi et al.), Table 1 and Figures 2-5: what is printed, our paper mode, our sound mode.

Beside them stand the ablations that explain the printed curves, and what the method is worth when silos are
bad: the attack with inverted grades, with its controls. The row "default" is the product's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from isthmus.errors import ConfigError
from isthmus.experiments import fedrisk_runs as runs
from isthmus.experiments.fedrisk_cells import (
    CENTRAL,
    REFERENCES,
    TREE_ROWS,
    Outcome,
    all_cells,
    unit_name,
)
from isthmus.experiments.fedrisk_plans import MODES, Protocol, all_bad, plans, protocol_for
from isthmus.experiments.fedrisk_report import report
from isthmus.experiments.notebook import Notebook, Reproduction, Unit
from isthmus.federation.settings import RiskOptions

logger = logging.getLogger(__name__)

Work = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Config:
    """What to reproduce: `data` is a name or a path; `only` keeps these rows of Table 1 and nothing else."""

    data: str = "synthetic"
    scale: Literal["smoke", "full"] = "full"
    seed: int = 0
    only: tuple[str, ...] = ()


def reproduce(config: Config, out: str | PathLike[str], *, workers: int | None = None) -> Reproduction:
    """Compute what is missing in the folder, and write the report.

    Units of some rows are kept for a run of all rows in the same folder, and the other way round.
    """
    notebook = Notebook(out, replace(config, only=()))
    protocol = protocol_for(runs.fold_of(config.data, 0), config.scale, folds=runs.count_folds(config.data))
    for number, fault in RiskOptions.paper().faults().items():
        logger.warning("paper mode, known fault %s: %s", number, fault)
    found: dict[str, Any] = {}
    for label, work, units in _work(config, protocol):
        found |= notebook.compute(work, units, label=label, workers=workers)
    outcome = Outcome(found, protocol, config.seed)
    data = Path(config.data).name
    cells = tuple(all_cells(outcome, data))
    page = report(outcome, data)
    return notebook.publish(cells, page)


def table_rows(protocol: Protocol) -> tuple[str, ...]:
    """The rows of Table 1, ours included."""
    trained = (plan.split("|")[2] for plan in plans(protocol) if plan.startswith("1|"))
    return tuple(dict.fromkeys((*trained, CENTRAL, *TREE_ROWS, *REFERENCES)))


def _work(config: Config, protocol: Protocol) -> Iterator[tuple[str, Work, list[Unit]]]:
    known, asked = table_rows(protocol), config.only
    for name in asked:
        if name not in known:
            raise ConfigError(f"Table 1 has no row {name!r}", key=name, value=name, known=known)
    about: dict[str, Any] = {"data": config.data, "protocol": protocol}
    folds = range(protocol.folds)

    def wanted(*rows: str) -> bool:
        return not asked or any(row in asked for row in rows)

    yield "training", runs.federated, list(_training(config, protocol))
    central: list[Unit] = [
        (unit_name(f"{CENTRAL} {mode}", fold, seed), {**about, "mode": mode, "fold": fold, "seed": seed})
        for mode in MODES
        for fold in folds
        for seed in range(config.seed, config.seed + protocol.seeds)
        if wanted(CENTRAL)
    ]
    yield "centralised twins", runs.central, central
    for label, work, rows in (("references", runs.references, REFERENCES), ("trees", runs.trees, TREE_ROWS)):
        units: list[Unit] = [
            (unit_name(label, fold, config.seed), {**about, "fold": fold}) for fold in folds if wanted(*rows)
        ]
        yield label, work, units
    overrun: list[Unit] = [
        (
            unit_name(f"overrun|{row}", fold, config.seed),
            {**about, "row": row, "fold": fold, "seed": config.seed},
        )
        for row in all_bad(protocol)
        for fold in folds
        if not asked
    ]
    yield "rounds of bad silos only", runs.overrun, overrun


def _training(config: Config, protocol: Protocol) -> Iterator[Unit]:
    """The runs fold by fold, so that a worker reads a fold once."""
    for fold in range(protocol.folds):
        for plan, chosen in plans(protocol).items():
            kind, _, row, _ = plan.split("|")
            if config.only and not (kind == "1" and row in config.only):
                continue
            for seed in range(config.seed, config.seed + chosen.seeds):
                about = {"data": config.data, "protocol": protocol, "plan": plan}
                yield unit_name(plan, fold, seed), {**about, "fold": fold, "seed": seed}
