"""The ledger after a million charges, and the audit log: times of charges, entries and verification.

Charged are one document, a whole collection, and an answer that is paid already. In the audit log, an entry
for a search and the verification of ten thousand entries are timed.

A charge is on disk when it returns, and so is the tally that records how far the ledger has come. A charge
therefore waits for two syncs, one after the other, and no durable charge can be faster. So the first row is
compared with two bare syncs of as many bytes in the same runs; the second row is its processor time. The
shortest of several runs counts, since other load on the machine delays every sync.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from benchmarks._rows import limited
from isthmus.private.cost import Cost, Covered
from isthmus.private.ledger import Budget, Ledger, fingerprint
from isthmus.service import AuditLog, AuditSettings, verify_audit

DOCUMENTS, CHARGES = 40_000, 1_000_000
RUNS, CHARGES_A_RUN = 20, 25
SYNCED = 32 * 1024
"""Bytes that a charge of one document writes: about eight pages."""
TALLY = 69
"""Bytes of the tally."""


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Ledger(Path(folder) / "bench.ledger", Budget(1e6)) as ledger,
    ):
        names = [f"silo/document-{number}" for number in range(DOCUMENTS)]
        covered = ledger.versions(names, [fingerprint(name) for name in names])
        batches = [seconds(lambda at=at: ledger.charge(cost(at), covered, "north")) for at in range(25)]
        if ledger.summary()["charges"] != CHARGES:
            raise RuntimeError("not a million charges")
        work, whole, bare = one_by_one(ledger, covered, Path(folder) / "bare")
        again = Covered(list(covered.documents), list(covered.versions))
        paid = min(seconds(lambda: ledger.charge(cost(24), again, "north")) for _ in range(20))
    single = limited("charge one document after 1,000,000 charges, on disk (ms)", 1000 * whole, 1)
    return [
        single | {"peer": 1000 * bare, "peer_name": "bare syncs of 32 KiB and of the tally, beside it"},
        limited("… of which processor time (ms)", 1000 * work, 1),
        limited("charge 40,000 documents at once (s)", min(batches), 1),
        limited("40,000 documents that are paid already (ms)", 1000 * paid, 5),
        *audit_log(),
    ]


def audit_log() -> list[dict[str, Any]]:
    """Time an entry of ten hits, and the verification of all entries, in processor time."""
    with tempfile.TemporaryDirectory() as folder:
        log = AuditLog(Path(folder), AuditSettings())
        hits = [f"document-{number}" for number in range(10)]
        log.record("shown", peer="broker", documents=hits, query="tides")
        began = time.thread_time()
        for _ in range(9_999):
            log.record("shown", peer="broker", documents=hits, query="tides")
        entry = (time.thread_time() - began) / 9_999
        log.close()
        began = time.process_time()
        if verify_audit(Path(folder), log).entries != 10_000:
            raise RuntimeError("not ten thousand entries")
        verified = time.process_time() - began
    return [
        limited("audit log: an entry of ten hits, processor time (ms)", 1000 * entry, 0.5),
        limited("audit log: 10,000 entries verified, processor time (s)", verified, 1),
    ]


def one_by_one(ledger: Ledger, covered: Covered, beside: Path) -> tuple[float, float, float]:
    """Return the median processor time and duration of a charge, and the median duration of a bare sync.

    All in seconds, each from its best run.
    """
    medians: list[tuple[float, ...]] = []
    with open(beside, "wb", buffering=0) as stream:
        for run in range(RUNS):
            times = []
            for number in range(run * CHARGES_A_RUN, (run + 1) * CHARGES_A_RUN):
                row = (7919 * number) % DOCUMENTS  # a prime step: the pages visited are spread
                one = Covered(covered.documents[row : row + 1], covered.versions[row : row + 1])
                asked = cost(100 + number, shared=False)
                began = time.thread_time(), time.perf_counter()
                ledger.charge(asked, one, "south")
                took = time.thread_time() - began[0], time.perf_counter() - began[1]
                times.append((*took, seconds(lambda: synced(stream))))
            medians.append(tuple(statistics.median(column) for column in zip(*times, strict=True)))
    work, whole, bare = (min(column) for column in zip(*medians, strict=True))
    return work, whole, bare


def synced(stream: IO[bytes]) -> None:
    """Write as many bytes as a charge and its tally do, at the same place, and wait until each is on disk."""
    for size in (SYNCED, TALLY):
        os.pwrite(stream.fileno(), os.urandom(size), 0)
        os.fdatasync(stream.fileno())


def cost(number: int, *, shared: bool = True) -> Cost:
    """Return the cost of a release with its own noise, numbered `number`."""
    return Cost(
        "one_shot" if shared else "scalar", ("body",), 0.5, 2.0, 4.0, f"noise {number}", shared=shared
    )


def seconds(work: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
