"""Co-training over real silos: judged rows from a silo's own file, cross rows from its private exchange.

After an exchange (see `federation.carriers`) every silo has the features of its queries over the others'
documents in its own folder. The coordinator's run is a TOML file on its machine, `Cooperation`, whose path
is the run configuration's entry `cotraining`. An interrupted run is submitted again as it is and goes on from
its last checkpoint; the model of then labels again what silos have lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.config import load, to_toml
from isthmus.errors import ConfigError
from isthmus.federation.apps import Training, train_in_folder
from isthmus.federation.checkpoints import RunFolder
from isthmus.federation.flower import Context, Grid
from isthmus.federation.rounds import HeldOut, State
from isthmus.federation.semisupervised.labelling import SiloRows
from isthmus.federation.semisupervised.training import Conductor, CoTraining, Remember
from isthmus.private import read_cross_rows
from isthmus.tables import Letor, replacing

FEATURES = "features"
"""Where in a silo's folder an exchange puts features, a file for every other silo."""
TRAINING = "cotraining.toml"
"""How a run's folder was trained, beside the configuration of its rounds."""


class Own(Protocol):
    """A silo's name and its judged rows."""

    def name(self, context: Context) -> str: ...

    def table(self, context: Context) -> Letor: ...


class ExchangedRows:
    """Judged rows as the silo has them, and cross rows where its exchanges have put them.

    A silo that left has a file no more, one that joined has a new one: others' pairs stay as they are.
    """

    def __init__(self, own: Own) -> None:
        self._own = own

    def name(self, context: Context) -> str:
        """What the silo calls itself."""
        return self._own.name(context)

    def labelled(self, context: Context) -> Letor:
        """Its judged rows."""
        return self._own.table(context)

    def rows(self, context: Context) -> SiloRows:
        """Its judged rows, and the cross rows of the queries among them."""
        labelled = self.labelled(context)
        return SiloRows(labelled, *cross_rows(labelled, str(context.node_config.get("folder", ""))))


def cross_rows(labelled: Letor, folder: str) -> tuple[Letor, FloatArray]:
    """The exchanged rows of queries that have judged rows too, and their error bars; none where there was no
    exchange."""
    files = sorted((Path(folder) / FEATURES).glob("*.txt")) if folder else []
    judged = set(labelled.queries)
    parts, errors = [], [np.zeros(0)]
    for rows, bars in map(read_cross_rows, files):
        known = np.array([query in judged for query in rows.queries], dtype=bool)
        parts.append(rows[known].widened(labelled.width))
        errors.append(bars[known[rows.query_of_row]])
    filled = [part for part in parts if part.rows]
    cross = Letor.concat(filled) if filled else labelled.keep(np.zeros(labelled.rows, np.bool_))
    return cross, np.concatenate(errors)


@dataclass(frozen=True)
class Cooperation:
    """A co-training run over real silos: where it is kept, how many silos, and how many grades there are."""

    out: Path
    silos: int = 4
    grades: int = 3
    validation: Path | None = None
    test: Path | None = None
    training: CoTraining = field(default_factory=CoTraining)


def _check_same(training: CoTraining, folder: Path) -> None:
    """Refuse to go on with a run that labels, or is anchored, otherwise: its rounds say nothing of that."""
    file = folder / TRAINING
    if (folder / "checkpoint").exists() and file.exists() and load(CoTraining, file) != training:
        raise ConfigError(f"{folder} holds a run with another configuration", expected="another out")


def cooperate(run: Cooperation, grid: Grid) -> Training:
    """Train over the grid's silos, from the folder's last checkpoint if it has one."""
    config, folder = run.training.rounds_of(run.silos, run.training.rounds), RunFolder(run.out)
    _check_same(run.training, folder.path)

    def rounds(tables: Mapping[str, Letor], start: State | None, remember: Remember) -> State:
        with replacing(folder.path / TRAINING) as stream:
            stream.write(to_toml(run.training).encode())
        held_out = HeldOut(tables.get("validation"))
        return Conductor(run.training, run.grades, held_out, run.silos).run(grid, start, remember)

    files = {"validation": run.validation, "test": run.test}
    return train_in_folder(folder, config, files, rounds)
