"""Save and load fitted fusers: names, weights, calibrators and the threshold curve, without pickle."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.calibration import Calibrator, Judging, ThresholdCurve, pack, record_arrays, record_of, unpack
from isthmus.errors import DataError
from isthmus.fusion.auto import Auto
from isthmus.fusion.estimator import Fuser
from isthmus.fusion.joint import Joint
from isthmus.fusion.learned import Formula, LogOdds, Stacked, Weighted
from isthmus.tables import Bundle

KINDS: dict[str, type[Fuser]] = {kind.method: kind for kind in (Stacked, LogOdds, Weighted, Formula, Joint)}


class SavedFuser(Bundle):
    """The file format of a fuser."""

    noun = "fuser"


def save_fuser(fuser: Fuser, path: str | PathLike[str]) -> None:
    """Write a fuser that was fitted or prepared without judgements, for `Auto` the method that it chose.

    RL-Sim's `similar` runs cannot be saved.
    """
    if not hasattr(fuser, "retrievers_"):
        raise DataError(f"the fuser {fuser.label!r} is not fitted", cure="fit it before saving")
    trials = []
    if isinstance(fuser, Auto):
        trials = [trial.record() for trial in fuser.trials_]
        fuser = fuser.chosen_
    arrays: dict[str, NDArray[Any]] = {}
    header: dict[str, Any] = {
        "method": fuser.method,
        "parameters": fuser.parameters(),
        "retrievers": list(fuser.retrievers_),
        "calibrators": {},
        "trials": trials,
    }
    inside: dict[str, Calibrator] = {}
    for name, value in vars(fuser).items():
        if isinstance(value, Calibrator) and name.endswith("_"):
            inside[name] = value
        elif name == "calibrators_":
            inside.update({f"{name}{at}": each for at, each in enumerate(value)})
        elif isinstance(value, ThresholdCurve):
            arrays.update({f"curve/{part}": array for part, array in record_arrays(value).items()})
        elif name.endswith("_") and name != "retrievers_":
            arrays[f"learned/{name}"] = np.asarray(value)
    for name, calibrator in inside.items():
        header["calibrators"][name], parts = pack(calibrator)
        arrays.update({f"{name}/{part}": array for part, array in parts.items()})
    SavedFuser(header, arrays).write(path)


def load_fuser(path: str | PathLike[str]) -> Fuser:
    """Read a fuser; it fuses like the one that was saved."""
    return SavedFuser.restore(path, _restored)


def _restored(saved: SavedFuser) -> Fuser:
    parameters = dict(saved.header["parameters"])
    parameters["judging"] = Judging(**parameters["judging"])
    fuser = KINDS[saved.header["method"]](**parameters)
    fuser.retrievers_ = tuple(saved.header["retrievers"])
    groups: dict[str, dict[str, NDArray[Any]]] = {}
    for name, array in saved.arrays.items():
        first, _, rest = name.partition("/")
        groups.setdefault(first, {})[rest] = array
    for name, array in groups.pop("learned", {}).items():
        setattr(fuser, name, array if array.ndim else array.item())
    if "curve" in groups:  # one that was fitted on judgements
        fuser.curve_ = record_of(ThresholdCurve, groups.pop("curve"))
    if isinstance(fuser, LogOdds):
        fuser.calibrators_ = []
    for name, header in saved.header["calibrators"].items():
        calibrator = unpack(header, groups.get(name, {}))
        if name.startswith("calibrators_") and isinstance(fuser, LogOdds):
            fuser.calibrators_.append(calibrator)
        else:
            setattr(fuser, name, calibrator)
    return fuser
