"""The record of a learning run, in plain JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from isthmus.errors import DataError


@dataclass(frozen=True)
class Honesty:
    """Calibration error of hits' probabilities, beside that of a perfect model with the same number of hits:
    its mean, and the value below which it is in 95 of 100 cases."""

    ece: float
    floor: float
    floor_high: float
    hits: int
    base_rate: float
    groups: tuple[tuple[float, float, float, float, float], ...] = ()
    """Groups, most probable hits first: (lowest, highest and mean probability, share relevant, hits)."""


@dataclass(frozen=True)
class Record:
    """The record of a learning run.

    `models` has, by name, the parameters of every model tried, its mean cross-validated nDCG@10 and its
    difference to the baseline (`guard.Difference`). `calibration` is before (margins alone) and after.
    `weights` and `risks` are those of silos, if the mode weighs them.
    """

    adopted: bool
    kind: str
    best: str
    why: str
    models: Mapping[str, Mapping[str, Any]]
    calibration: Mapping[str, Honesty]
    silos: tuple[str, ...]
    queries: int
    relevant: int
    rows: int
    folds: int
    mode: str
    encoder: str = ""
    queries_needed: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    risks: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    questions: int = 0
    """Number of questions put to every silo."""

    def to_json(self) -> str:
        """Serialise the record; numbers that are not finite become null."""
        return json.dumps(_plain(asdict(self)), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Parse a record; DataError if the text is none."""
        try:
            saved = json.loads(text)
            saved["calibration"] = {
                name: Honesty(**{**each, "groups": tuple(map(tuple, each.get("groups", ())))})
                for name, each in saved["calibration"].items()
            }
            return cls(**{**saved, "silos": tuple(saved["silos"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError("is not the record of a learning run", text=str(error)) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
