"""Experiment trackers for the measures of rounds: TensorBoard's event files, and MLflow if installed.

    with tracking([TensorBoard("tb")], "first", {"seed": 0}) as tracked:
        tracked.record(1, {"validation/nDCG@10": 0.41, "weight/north": 0.6})

A step is a whole round. A run that is begun again under its name replaces the one before.
"""

from __future__ import annotations

import math
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from io import BufferedWriter
from pathlib import Path
from typing import Any, Protocol

from isthmus.errors import ConfigError

_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow does not allow in the names of measures."""
MLFLOW_LONGEST = 500
"""Largest number of characters of a parameter's value in MLflow."""


class Tracker(Protocol):
    """Receiver of the measures of a run."""

    def begin(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Begin a run."""

    def record(self, step: int, measures: Mapping[str, float]) -> None:
        """Record the measures of one step."""

    def end(self, files: Iterable[Path], *, failed: bool) -> None:
        """End the run; `files` are its results."""


@dataclass
class Tracked:
    """A run that trackers record: each step once, and the files of the run."""

    trackers: Sequence[Tracker]
    last: int = 0
    """The latest step that was recorded."""
    files: list[Path] = field(default_factory=list)

    def record(self, step: int, measures: Mapping[str, float | None]) -> None:
        """Record those of a step's measures that are finite numbers."""
        finite = {
            name: float(value)
            for name, value in measures.items()
            if value is not None and math.isfinite(value)
        }
        for tracker in self.trackers:
            tracker.record(step, finite)
        self.last = max(self.last, step)


@contextmanager
def tracking(trackers: Sequence[Tracker], name: str, parameters: Mapping[str, Any]) -> Iterator[Tracked]:
    """Yield a run under a name that trackers record; a run that raises has failed."""
    tracked = Tracked(trackers)
    for tracker in trackers:
        tracker.begin(name, parameters)
    failed = True
    try:
        yield tracked
        failed = False
    finally:
        for tracker in trackers:
            tracker.end(tracked.files, failed=failed)


class TensorBoard:
    """Event files for `tensorboard --logdir`, one folder per run.

    A file is records in TensorFlow's frames (length, masked CRC-32C of it, data, masked CRC-32C of that),
    each an `Event` in protobuf's encoding. The first record names the format; the second makes readers forget
    steps of an earlier run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._file: BufferedWriter | None = None

    def begin(self, name: str, parameters: Mapping[str, Any]) -> None:
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        moment = f"{time.time():017.6f}.{time.monotonic_ns()}"
        self._file = open(folder / f"events.out.tfevents.{moment}.{socket.gethostname()}", "xb")  # noqa: SIM115
        self._write(0, _bytes(3, b"brain.Event:2"))
        self._write(1, _bytes(7, b"\x08\x01"))  # session_log { status: START }

    def record(self, step: int, measures: Mapping[str, float]) -> None:
        values = (_bytes(1, name.encode()) + b"\x15" + _float32(value) for name, value in measures.items())
        self._write(step, _bytes(5, b"".join(_bytes(1, value) for value in values)))

    def end(self, files: Iterable[Path], *, failed: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, step: int, what: bytes) -> None:
        assert self._file is not None
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _float32(value: float) -> bytes:
    """Encode a number in four bytes; one beyond their range as infinite, as a diverged run has them."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _bytes(field_number: int, content: bytes) -> bytes:
    """Encode a field of protobuf's wire type 2."""
    return bytes([field_number << 3 | 2]) + _varint(len(content)) + content


def _table() -> Iterator[int]:
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        yield value


_CRC = tuple(_table())


def _checksum(content: bytes) -> bytes:
    """Return the CRC-32C, rotated and shifted as in TensorFlow."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class MLflow:
    """A run of MLflow, at the place that MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME name."""

    def __init__(self) -> None:
        try:
            self._mlflow: Any = import_module("mlflow")
        except ImportError as error:
            raise ConfigError("MLflow is not installed here: pip install mlflow", key="--mlflow") from error

    def begin(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._mlflow.start_run(run_name=name)
        flat = {key: str(value)[:MLFLOW_LONGEST] for key, value in _flat(parameters)}
        self._mlflow.log_params(flat)

    def record(self, step: int, measures: Mapping[str, float]) -> None:
        named = {_NOT_IN_NAMES.sub("_", name): value for name, value in measures.items()}
        self._mlflow.log_metrics(named, step=step)

    def end(self, files: Iterable[Path], *, failed: bool) -> None:
        for file in files:
            self._mlflow.log_artifact(str(file))
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables, under dotted names."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield f"{before}{name}", value
