"""What leaves a silo in training, written into its own ledger before it leaves.

Sizes and feature sums, reports about its model, and model updates, seen or masked: each with its ε, or as
what it is, something that leaves without a DP guarantee. A mask is no such guarantee either: the sum that it
opens to is exact.
"""

from __future__ import annotations

import threading
from os import PathLike
from pathlib import Path

from isthmus.federation.flower import Context
from isthmus.federation.holdings import silo_name
from isthmus.federation.noise import spent
from isthmus.federation.settings import PrivateUpdates
from isthmus.private.ledger import Budget, Ledger

PEER = "coordinator"
"""The name of the coordinator in a silo's ledger."""

_first = threading.Lock()  # one thread makes the file, the others find it


def own_book(context: Context, kind: str, privacy: PrivateUpdates | None, note: str) -> None:
    """Write into the ledger that the silo's own node configuration names, if it names one."""
    if "ledger" in context.node_config:
        with Ledger(str(context.node_config["ledger"])) as ledger:
            _enter(ledger, kind, privacy, note)


def simulated_book(
    context: Context, kind: str, privacy: PrivateUpdates | None, note: str, *, folder: str | PathLike[str]
) -> None:
    """Write into the ledger of a simulated silo, in a folder with one for each."""
    path = Path(folder) / f"{silo_name(context)}.ledger"
    with _first:
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(path, None if path.exists() else Budget())
    with ledger:
        _enter(ledger, kind, privacy, note)


def _enter(ledger: Ledger, kind: str, privacy: PrivateUpdates | None, note: str) -> None:
    if privacy is None:
        ledger.record(kind, PEER, note=note)
        return
    once = spent([("silo",)], privacy)
    unit = f"all data of the silo replaced, δ = {privacy.delta:g}"
    ledger.record(kind, PEER, epsilon=once, unit=unit, note=note)
