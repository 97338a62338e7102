"""Save and load calibrators: constructor parameters as JSON, learned values as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.calibration.estimator import Calibrator
from isthmus.calibration.query_feature import Forest
from isthmus.calibration.runs import CALIBRATORS, PerPart
from isthmus.calibration.softmax import Choice
from isthmus.errors import DataError
from isthmus.tables import Bundle

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]

_KNOWN: list[type[Calibrator]] = [PerPart, *(type(make()) for make in CALIBRATORS.values())]
KINDS = {kind.__name__: kind for kind in _KNOWN}
_RECORDS: dict[str, type[Forest | Choice]] = {"Forest": Forest, "Choice": Choice}


class SavedCalibrator(Bundle):
    """The file format of a calibrator."""

    noun = "calibrator"


def save_calibrator(calibrator: Calibrator, path: str | PathLike[str]) -> None:
    """Write a fitted calibrator to a file."""
    header, arrays = pack(calibrator)
    SavedCalibrator({"calibrator": header}, arrays).write(path)


def load_calibrator(path: str | PathLike[str]) -> Calibrator:
    """Read a calibrator; it gives the same probabilities as the one that was saved."""
    return SavedCalibrator.restore(path, lambda saved: unpack(saved.header["calibrator"], saved.arrays))


def pack(calibrator: Calibrator) -> tuple[dict[str, Any], Arrays]:
    """Split a calibrator, nested ones included, into a JSON-compatible description and its arrays."""
    header: dict[str, Any] = {"kind": type(calibrator).__name__, "parameters": {}, "learned": {}}
    arrays: Arrays = {}
    for name, value in calibrator.get_params(deep=False).items():
        header["parameters"][name] = pack(value)[0] if isinstance(value, Calibrator) else value
    for name, value in vars(calibrator).items():
        if name.endswith("_"):
            header["learned"][name] = _pack_value(value, name, arrays)
    return header, arrays


def unpack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Calibrator:
    """Rebuild the calibrator from the result of `pack`. Raises DataError for a kind unknown to this
    release."""
    if header["kind"] not in KINDS:
        raise DataError(f"unknown calibrator {header['kind']!r}", cure="use the Isthmus that wrote it")
    parameters = {  # a calibrator among them is cloned before it learns, and needs no learned values
        name: unpack({**value, "learned": {}}, {}) if isinstance(value, dict) else value
        for name, value in header["parameters"].items()
    }
    calibrator = KINDS[header["kind"]](**parameters)
    for name, form in header["learned"].items():
        setattr(calibrator, name, _unpack_value(form, name, arrays))
    return calibrator


def _pack_value(value: Any, name: str, arrays: Arrays) -> Any:
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return "array"
    if isinstance(value, (Forest, Choice)):
        arrays.update({f"{name}/{part}": array for part, array in record_arrays(value).items()})
        return {"record": type(value).__name__}
    if isinstance(value, Calibrator):
        header, inner = pack(value)
        arrays.update({f"{name}/{part}": array for part, array in inner.items()})
        return {"calibrator": header}
    if isinstance(value, dict):
        inside = enumerate(value.items())
        return {"entries": [[key, _pack_value(entry, f"{name}/{at}", arrays)] for at, (key, entry) in inside]}
    return {"value": value.item() if isinstance(value, np.generic) else value}


def _unpack_value(form: Any, name: str, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if form == "array":
        return arrays[name]
    if "value" in form:
        return form["value"]
    if "entries" in form:
        inside = enumerate(form["entries"])
        return {key: _unpack_value(entry, f"{name}/{at}", arrays) for at, (key, entry) in inside}
    start = f"{name}/"
    below = {key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)}
    if "calibrator" in form:
        return unpack(form["calibrator"], below)
    return record_of(_RECORDS[form["record"]], below)


def record_arrays(record: Any) -> Arrays:
    """Return the fields of a dataclass of arrays and numbers as arrays, without those that are None."""
    values = {part.name: getattr(record, part.name) for part in fields(record)}
    return {name: np.asarray(value) for name, value in values.items() if value is not None}


def record_of(kind: Callable[..., T], arrays: Mapping[str, NDArray[Any]]) -> T:
    """The inverse of `record_arrays`."""
    return kind(**{name: value if value.ndim else value.item() for name, value in arrays.items()})
