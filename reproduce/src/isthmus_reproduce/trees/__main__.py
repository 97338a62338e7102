"""One silo's process: train with the others, leave the model in the folder named on the command line."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.rankers import tree_library, xgboost_matrix
from isthmus.tables import Letor, replacing
from isthmus_reproduce.trees.certificates import Seat


def main(folder: Path) -> None:
    """Do the job that the folder holds."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # XGBoost would load it, which takes seconds
    job = json.loads((folder / "job.json").read_text())
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("features", "grades", "offsets")}
    queries = tuple(map(str, range(len(arrays["offsets"]) - 1)))
    letor, seat = Letor(queries, **arrays), Seat(**job["seat"])
    try:
        model = _grow(letor, job["parameters"], job["trees"], seat)
    except ValueError as error:  # XGBoost's own error is one
        sys.exit(_in_short(error))
    with replacing(folder / "model.json") as stream:
        stream.write(bytes(model.save_raw(raw_format="json")))


def _grow(letor: Letor, parameters: dict[str, Any], trees: int, seat: Seat) -> Any:
    xgboost = tree_library("xgboost")
    seated = {
        "dmlc_communicator": "federated",
        "federated_server_address": seat.address,
        "federated_world_size": seat.silos,
        "federated_rank": seat.rank,
        "federated_server_cert_path": seat.authority,
        "federated_client_cert_path": seat.certificate,
        "federated_client_key_path": seat.key,
    }
    # Everything in this context may be a message to all others: what not every silo does in the same
    # order would leave them waiting for each other.
    with xgboost.config_context(verbosity=0), xgboost.collective.CommunicatorContext(**seated):
        return xgboost.train(parameters, xgboost_matrix(letor), num_boost_round=trees)


def _in_short(error: ValueError) -> str:
    """What XGBoost says, without its stack trace and where in its sources it says so."""
    lines = str(error).partition("Stack trace:")[0].split("\n")
    last = next((line for line in reversed(lines) if line.strip()), type(error).__name__)
    return re.sub(r"^[- ]*\[[^]]*\][: ]*", "", last)


def _end_with_parent() -> None:
    """The parent holds the other end of stdin; when it is gone nobody waits for this process."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
