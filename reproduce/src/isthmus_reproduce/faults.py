"""Simulated faults of silos, to measure what training survives.

config = FaultyConfig(faults=(Fault("invert", 0.3),))
trained = train(config, fold)          # as `isthmus.federation.apps.train`, with these silos struck
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import frozen
from isthmus.errors import FederationError
from isthmus.federation import (
    ARRAYS,
    ATTEMPT,
    CONFIG,
    EXAMPLES,
    METRICS,
    REPORT,
    Arrays,
    ClientAppCallable,
    Config,
    Context,
    Message,
    Mod,
    Training,
    keep_model,
    kept_model,
    pack,
    round_of,
    session_of,
    unpack,
)
from isthmus.federation import train as train_silos
from isthmus.randomness import Streams
from isthmus.tables import Fold, Letor


@dataclass(frozen=True)
class Fault:
    """A fault that strikes a share of the silos: the same ones `always`, or drawn anew each `round`.

    `drop` fails, `late` sleeps `size` seconds, `nan`, `shape` and `norm` (times `size`) spoil the model,
    `count` multiplies the example count by `size`; `invert` and `shuffle` spoil the grades; `lie` inverts
    them and reports that its model makes no errors.
    """

    kind: Literal["drop", "late", "nan", "shape", "norm", "count", "lie", "invert", "shuffle"]
    share: float = 0.3
    when: Literal["round", "always"] = "always"
    size: float = 1e6

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share = {self.share} (from 0 to 1)")
        if self.when == "round" and self.kind in ("invert", "shuffle", "lie"):
            raise ValueError(f"{self.kind} spoils a silo's data: when = 'always'")


@dataclass(frozen=True)
class FaultyConfig(Config):
    """A training run in which some silos misbehave."""

    faults: tuple[Fault, ...] = ()


def train(config: Config, data: Fold | None = None, **more: Any) -> Training:
    """Train across silos, some of which misbehave as configured."""
    faults = config.faults if isinstance(config, FaultyConfig) else ()
    return train_silos(
        config,
        data,
        spoil=partial(spoil_grades, faults=faults, seed=config.seed),
        mods=[fault_mod(fault, at, config.seed) for at, fault in enumerate(faults)],
        **more,
    )


def afflicted(
    fault: Fault, at: int, seed: int, partitions: int, *, round: int = 0, attempt: int = 1
) -> NDArray[np.bool_]:
    """Return a mask of the silos, `partitions` in number, that a fault strikes in an attempt at a round."""
    kind = "invert" if fault.kind == "lie" else fault.kind  # both kinds strike the same silos, for comparison
    streams = Streams(seed).under("fault", at, kind)
    if fault.when == "round":
        struck: NDArray[np.bool_] = streams("round", round, attempt).random(partitions) < fault.share
        return struck
    struck = np.zeros(partitions, np.bool_)
    struck[streams("silos").permutation(partitions)[: int(fault.share * partitions + 0.5)]] = True
    return struck


def spoil_grades(tables: Sequence[Letor], faults: Sequence[Fault], seed: int) -> list[Letor]:
    """Return the tables, with the grades of struck silos inverted or shuffled."""
    spoiled = list(tables)
    highest = max((int(table.grades.max(initial=0)) for table in tables), default=0)
    for at, fault in enumerate(faults):
        if fault.kind not in ("invert", "shuffle", "lie"):
            continue
        for silo in np.flatnonzero(afflicted(fault, at, seed, len(tables))).tolist():
            grades = spoiled[silo].grades
            if fault.kind != "shuffle":
                changed = highest - grades
            else:
                changed = Streams(seed)("fault", at, "silo", silo).permutation(grades)
            spoiled[silo] = replace(spoiled[silo], grades=frozen(changed.astype(np.int32)))
    return spoiled


def fault_mod(fault: Fault, at: int, seed: int) -> Mod:
    """Return a Flower mod that makes struck silos misbehave on train messages."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        place, places = (int(context.node_config[key]) for key in ("partition-id", "num-partitions"))
        if not message.metadata.message_type.startswith("train"):
            return call_next(message, context)
        attempt = int(message.content.config_records[CONFIG][ATTEMPT])  # type: ignore[arg-type]
        if not afflicted(fault, at, seed, places, round=round_of(message), attempt=attempt)[place]:
            return call_next(message, context)
        if fault.kind == "drop":
            raise FederationError("the silo dropped out")
        if fault.kind == "late":
            time.sleep(fault.size)
        reply = call_next(message, context)
        if ARRAYS in reply.content:
            arrays = unpack(reply.content.array_records[ARRAYS])
            reply.content[ARRAYS] = pack(_spoiled(arrays, fault))
        else:
            session = session_of(message)
            keep_model(context, session, _spoiled(kept_model(context, session), fault))
        return _told_wrong(reply, fault)

    return mod


def _spoiled(arrays: Arrays, fault: Fault) -> Arrays:
    """Return the model that a struck silo sends or masks."""
    first = next(iter(arrays))
    if fault.kind == "nan":
        arrays[first] = np.full_like(arrays[first], np.nan)
    elif fault.kind == "shape":
        arrays[first] = arrays[first][:-1]
    elif fault.kind == "norm":
        arrays = {key: array * np.float32(fault.size) for key, array in arrays.items()}
    return arrays


def _told_wrong(reply: Message, fault: Fault) -> Message:
    """Return the reply with a struck silo's false example count or false report of errors."""
    if fault.kind == "count":
        metrics = reply.content.metric_records[METRICS]
        metrics[EXAMPLES] = int(float(metrics[EXAMPLES]) * fault.size)  # type: ignore[arg-type]
    if fault.kind == "lie" and REPORT in reply.content:
        errors = unpack(reply.content.array_records[REPORT])["errors"]
        reply.content[REPORT] = pack({"errors": np.zeros_like(errors)})
    return reply
