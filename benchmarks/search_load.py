"""The whole service under load: nodes, a broker, and users who pause between searches.

Four silos of 40,000 documents with twenty users, then fifty of 2,000 with four: each search asks every silo.
Pauses are exponential with a mean of one second; with constant pauses, a single slow search would make all
users search at the same time from then on. Every node and the broker is a process of its own; broker and
nodes communicate over mutual TLS on loopback. Memory at the end is compared with that after a tenth of the
searches.

    python -m benchmarks.search_load                    both
    python -m benchmarks.search_load 2000 1000 50 4     one: documents a silo, searches, silos, users
    python -m benchmarks.search_load 150 60             a rehearsal of the first
    python -m benchmarks.search_load --encoder 150 60   by the hybrid of BM25 and a random encoder
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from benchmarks._rows import limited
from benchmarks._silos import NAMES, Silos, running
from benchmarks.node import zipf_texts

USERS, PAUSE, ENCODER = 20, 1.0, "--encoder"
LIMIT_MS, MANY_LIMIT_MS, LIMIT_GROWTH = 100.0, 250.0, 1.1
MANY, MANY_USERS = 50, 4
"""Silos and users of the second trial; each search sends fifty requests."""


def main(
    documents: int = 0, searches: int = 5_000, silos: int = len(NAMES), users: int = USERS
) -> list[dict[str, Any]]:
    """Run this benchmark and return its rows; with `documents`, a single trial of that size."""
    if not documents:
        return [*trial(40_000, searches, NAMES, USERS), *trial(2_000, 1_000, _names(MANY), MANY_USERS)]
    return trial(documents, searches, NAMES if silos == len(NAMES) else _names(silos), users)


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"silo{at:02d}" for at in range(count))


def trial(documents: int, searches: int, names: Sequence[str], users: int) -> list[dict[str, Any]]:
    """Load one federation and return its rows; RuntimeError if a search lacks the answer of a silo."""
    dense = ENCODER in sys.argv
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), documents, names=names, dense=dense) as silos,
    ):
        times, failures, memory = asyncio.run(_load(silos, searches, users))
    marks = statistics.quantiles(times, n=100)
    what = f"{users} users over {len(names)} silos × {documents:,} documents"
    print(
        f"{what}, {searches:,} searches: {failures} failures, p50 {marks[49]:.0f} ms, p99 {marks[98]:.0f} ms",
        file=sys.stderr,
    )
    if failures:
        raise RuntimeError(f"{failures} searches did not hear from every silo")
    limit = LIMIT_MS if len(names) == len(NAMES) else MANY_LIMIT_MS
    return [
        limited(f"search: p99 of {what} (ms)", marks[98], limit),
        limited(
            f"search: memory of {len(names)} silos at the end, to that after a tenth", memory, LIMIT_GROWTH
        ),
    ]


async def _load(silos: Silos, searches: int, users: int) -> tuple[list[float], int, float]:
    """Return the milliseconds of every search, the number that lack a silo's answer, and memory growth."""
    questions = list(zipf_texts(2_000, 4, 99))
    times: list[float] = []
    failures, early, numbers, pauses = 0, 0.0, count(), random.Random(7)
    async with silos.client() as client:
        began = time.perf_counter()
        await silos.up(client)
        before = silos.processor()
        print(f"· up after {time.perf_counter() - began:.0f} s", file=sys.stderr)

        async def user(number: int) -> None:
            nonlocal failures, early
            await asyncio.sleep(number * PAUSE / users)
            while (at := next(numbers)) < searches:
                began = time.perf_counter()
                failures += not await _heard(client, questions[at % len(questions)])
                times.append(1000 * (time.perf_counter() - began))
                if at == searches // 10:
                    early = silos.memory()
                await asyncio.sleep(pauses.expovariate(1 / PAUSE))

        await asyncio.gather(*(user(number) for number in range(users)))
        spent = {name: 1000 * (after - before[name]) / searches for name, after in silos.processor().items()}
        each = statistics.mean(spent[name] for name in silos.names)
        what = f"broker {spent['broker']:.1f}, each node {each:.1f}"
        print(f"· ms of processor time a search: {what}", file=sys.stderr)
        return times, failures, silos.memory() / early


async def _heard(client: httpx.AsyncClient, query: str) -> bool:
    answer = await client.post("/search", json={"query": query, "explain": True})
    return answer.status_code == 200 and all(silo["status"] == "answered" for silo in answer.json()["silos"])


if __name__ == "__main__":
    for row in main(*(int(word) for word in sys.argv[1:] if word != ENCODER)):
        print(row)
