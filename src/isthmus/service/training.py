"""A training run's folder for the broker's Training view, while the run goes on and after it."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.errors import DataError
from isthmus.service import wire
from isthmus.tables import Bundle

NAMES = "silos.json"
"""File in a run's folder with the names of a simulated run's silos, by their names in its records."""
_BY_SILO = ("weights", "risks", "rejected", "capped")


class _Checkpoint(Bundle):
    """The file that a run replaces after every round; only its header is read here."""

    noun = "checkpoint"


def training_of(folder: Path) -> wire.TrainingView:
    """Read the run in a folder; if it cannot be read, or has not begun, it has no rounds."""
    run = wire.TrainingView(run=folder.name)
    try:
        history, config = _history(folder)
        strategy = str(tomllib.loads(config).get("strategy", {}).get("name", ""))
        names = _names(folder / NAMES)
        rounds = [_round(_renamed(record, names)) for record in history]
        final = _final(folder / "metrics.json")
    except (DataError, OSError, ValueError, ValidationError, AttributeError, TypeError, KeyError):
        return run  # being written, or no run of Isthmus
    finished = final is not None
    return wire.TrainingView(
        run=folder.name, strategy=strategy, finished=finished, final=final or {}, rounds=rounds
    )


def _history(folder: Path) -> tuple[list[dict[str, Any]], str]:
    if (folder / "checkpoint").exists():
        header = _Checkpoint.read(folder / "checkpoint").header
        return header["history"], header["config"]
    rounds = json.loads((folder / "rounds.json").read_text(encoding="utf-8"))
    return rounds, (folder / "config.toml").read_text(encoding="utf-8")


def _names(path: Path) -> dict[str, str]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _renamed(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    renamed = dict(record)
    renamed["asked"] = [names.get(silo, silo) for silo in record.get("asked", ())]
    for table in _BY_SILO:
        renamed[table] = {names.get(silo, silo): value for silo, value in (record.get(table) or {}).items()}
    return renamed


def _round(record: Mapping[str, Any]) -> wire.Round:
    known = {name: record[name] for name in wire.Round.model_fields if record.get(name) is not None}
    for table in ("weights", "risks"):
        values = known.get(table, {})
        known[table] = {name: value for name, value in values.items() if _finite(value)}
    for number in ("measure", "loss"):
        if not _finite(known.get(number, 0.0)):
            del known[number]
    return wire.Round(**known)


def _final(path: Path) -> dict[str, float | None] | None:
    if not path.exists():
        return None
    results = json.loads(path.read_text(encoding="utf-8"))
    numbers = results.get("final", results)
    return {str(name): float(value) for name, value in numbers.items() if _finite(value)}


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
