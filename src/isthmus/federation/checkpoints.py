"""A run's folder: its configuration, its environment, and after every round everything needed to resume.

    config.toml       the resolved configuration, written before any data are loaded
    environment.json  versions, and checksums of the data
    checkpoint        round, parameters, strategy state and history, replaced whole after every round
    rounds.json       the history, for people and plots
    metrics.json      the results
    model             the ranker, for `isthmus rank`

Random streams are derived from names instead of advanced, so the seed and the round are their whole state.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from isthmus.config import load, to_toml
from isthmus.errors import ConfigError, DataError
from isthmus.federation.aggregation import below
from isthmus.federation.rounds import RoundRecord, State
from isthmus.federation.settings import Config
from isthmus.rankers import Scaling
from isthmus.tables import Bundle, Letor, write_whole

GROUPS = ("parameters", "strategy", "average", "best", "scaling")
PACKAGES = ("isthmus", "numpy", "scipy", "flwr")


class Checkpoint(Bundle):
    """The state of a training run in a folder."""

    noun: ClassVar[str] = "checkpoint"
    version: ClassVar[int] = 1

    @classmethod
    def of(cls, state: State, config: Config) -> Checkpoint:
        """Build the checkpoint of a state."""
        groups = {group: getattr(state, group) for group in GROUPS} | {"scaling": state.scaling.arrays()}
        header = {
            "round": state.round,
            "stopped": state.stopped,
            "scaling": {"kind": state.scaling.kind, "width": state.scaling.width},
            "config": to_toml(config),
            "history": [record.to_mapping() for record in state.history],
        }
        arrays = {f"{group}/{name}": array for group, part in groups.items() for name, array in part.items()}
        return cls(header, arrays)

    def state(self) -> State:
        """Restore the state from the checkpoint."""
        groups = {group: below(self.arrays, group) for group in GROUPS}
        kind, width = self.header["scaling"]["kind"], self.header["scaling"]["width"]
        scaling = Scaling.from_arrays(kind, width, groups.pop("scaling"))
        history = tuple(_record(fields) for fields in self.header["history"])
        return State(
            round=self.header["round"],
            scaling=scaling,
            history=history,
            stopped=self.header["stopped"],
            **groups,
        )


class RunFolder:
    """The folder of a run: configuration, checkpoint and results."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def begin(self, config: Config) -> None:
        """Write the configuration; ConfigError if the folder has a checkpoint of another configuration."""
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(".*.part"):  # left by a run that was killed while writing
            left.unlink(missing_ok=True)
        if (self.path / "checkpoint").exists() and _differ(self.config(type(config)), config):
            raise ConfigError(
                f"{self.path} holds a run with another configuration", expected="another --out, or --resume"
            )
        self._write("config.toml", to_toml(config))

    def config(self, kind: type[Config] = Config) -> Config:
        """Read the configuration of the run in this folder."""
        if not (self.path / "config.toml").exists():
            raise DataError("no run to resume", file=self.path, cure="name the folder that --out named")
        return load(kind, self.path / "config.toml")

    def environment(self, tables: Mapping[str, Letor], config: Config) -> None:
        """Record versions and checksums of the data, with the numbers that follow from the data."""
        record = {
            "python": platform.python_version(),
            "packages": {package: version(package) for package in PACKAGES},
            "data": {name: checksum(table) for name, table in tables.items()},
            "queries": {name: len(table) for name, table in tables.items()},
            "silos": config.dealing.silos,
            "silos a round": config.rounds.silos,
            "server momentum": config.strategy.momentum,
        }
        self._write("environment.json", json.dumps(record, indent=1))

    def save(self, state: State, config: Config) -> None:
        """Replace the checkpoint."""
        Checkpoint.of(state, config).write(self.path / "checkpoint")

    def state(self, config: Config) -> State | None:
        """Return the state in the checkpoint, None if there is none yet; ConfigError if another run's."""
        path = self.path / "checkpoint"
        if not path.exists():
            return None
        checkpoint = Checkpoint.read(path)
        if _differ(load(type(config), tomllib.loads(checkpoint.header["config"])), config):
            raise ConfigError(f"{path} belongs to another configuration", expected="another --out")
        return checkpoint.state()

    def finish(self, state: State, metrics: Mapping[str, Any]) -> None:
        """Write the history and the results."""
        self._write("rounds.json", json.dumps([record.to_mapping() for record in state.history], indent=1))
        self._write("metrics.json", json.dumps(metrics, indent=1))

    def _write(self, name: str, text: str) -> None:
        write_whole(self.path / name, text.encode())


def _differ(first: Config, second: Config) -> bool:
    return to_toml(first) != to_toml(second)


def checksum(table: Letor) -> str:
    """SHA-256 of a table's queries, features and grades."""
    digest = hashlib.sha256("\n".join(table.queries).encode())
    for array in (table.offsets, table.features, table.grades):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _record(stored: Mapping[str, Any]) -> RoundRecord:
    known = {field.name for field in fields(RoundRecord)}
    record = RoundRecord(**{key: value for key, value in stored.items() if key in known})
    return replace(record, asked=tuple(record.asked))
