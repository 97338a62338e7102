"""The process of one silo: trains with the others and writes the model to the folder named in the command."""

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
    """Run the job in the folder."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # XGBoost would load it, which takes seconds
    job = json.loads((folder / "job.json").read_text())
    arrays = {name: np.load(folder / f"{name}.npy") for name in ("features", "grades", "offsets")}
    queries = tuple(map(str, range(len(arrays["offsets"]) - 1)))
    letor, seat = Letor(queries, **arrays), Seat(**job["seat"])
    try:
        model = _grow(letor, job["parameters"], job["trees"], seat)
    except ValueError as error:  # XGBoostError is a ValueError
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
    # Any call in this context may send a message to all silos; a call that not every silo makes in the
    # same order would leave them waiting for each other.
    with xgboost.config_context(verbosity=0), xgboost.collective.CommunicatorContext(**seated):
        return xgboost.train(parameters, xgboost_matrix(letor), num_boost_round=trees)


def _in_short(error: ValueError) -> str:
    """Return XGBoost's message without its stack trace and its place in XGBoost's sources."""
    lines = str(error).partition("Stack trace:")[0].split("\n")
    last = next((line for line in reversed(lines) if line.strip()), type(error).__name__)
    return re.sub(r"^[- ]*\[[^]]*\][: ]*", "", last)


def _end_with_parent() -> None:
    """End this process when the parent, which holds the other end of stdin, is gone."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
