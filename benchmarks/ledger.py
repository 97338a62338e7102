"""The ledger after a million charges: one document, a whole collection, and an answer that is paid already.

A charge is on disk when it returns, so the first row includes the disk's own time to sync; the row below is
the processor's part of it. The shortest of several runs counts: a busy neighbour delays every sync.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isthmus.private.cost import Cost, Covered
from isthmus.private.ledger import Budget, Ledger, fingerprint

DOCUMENTS, CHARGES = 40_000, 1_000_000
RUNS, CHARGES_A_RUN = 20, 25


def main() -> list[dict[str, Any]]:
    """Every row of this benchmark."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Ledger(Path(folder) / "bench.ledger", Budget(1e6)) as ledger,
    ):
        names = [f"silo/document-{number}" for number in range(DOCUMENTS)]
        covered = ledger.versions(names, [fingerprint(name) for name in names])
        batches = [seconds(lambda at=at: ledger.charge(cost(at), covered, "north")) for at in range(25)]
        if ledger.summary()["charges"] != CHARGES:
            raise RuntimeError("not a million charges")
        work, whole = one_by_one(ledger, covered)
        again = Covered(list(covered.documents), list(covered.versions))
        paid = min(seconds(lambda: ledger.charge(cost(24), again, "north")) for _ in range(20))
    return [
        limited("charge one document after 1,000,000 charges, on disk (ms)", 1000 * whole, limit=1),
        limited("… of which processor time (ms)", 1000 * work, limit=1),
        limited("charge 40,000 documents at once (s)", min(batches), limit=1),
        limited("40,000 documents that are paid already (ms)", 1000 * paid, limit=5),
    ]


def one_by_one(ledger: Ledger, covered: Covered) -> tuple[float, float]:
    """Median processor time and median duration of a single charge, in the best of several runs."""
    spent: list[tuple[float, float]] = []
    for run in range(RUNS):
        times = []
        for number in range(CHARGES_A_RUN):
            row = (7919 * (run * CHARGES_A_RUN + number)) % DOCUMENTS  # a prime step visits pages at random
            one = Covered(covered.documents[row : row + 1], covered.versions[row : row + 1])
            asked = cost(100 + run * CHARGES_A_RUN + number, shared=False)
            began = time.thread_time(), time.perf_counter()
            ledger.charge(asked, one, "south")
            times.append((time.thread_time() - began[0], time.perf_counter() - began[1]))
        work, whole = (statistics.median(column) for column in zip(*times, strict=True))
        spent.append((work, whole))
    return min(work for work, _ in spent), min(whole for _, whole in spent)


def cost(number: int, *, shared: bool = True) -> Cost:
    """A release of its own name."""
    return Cost(
        "one_shot" if shared else "scalar", ("body",), 0.5, 2.0, 4.0, f"noise {number}", shared=shared
    )


def seconds(work: Callable[[], object]) -> float:
    """How long it takes once."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def limited(name: str, ours: float, *, limit: float) -> dict[str, Any]:
    """A row whose goal is a limit."""
    return {"name": name, "ours": ours, "peer": None, "peer_name": None, "ratio": limit / ours, "goal": 1}
