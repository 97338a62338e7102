"""The whole service under load: four nodes, a broker, and twenty users who pause a second between searches.

Every node and the broker is a process of its own; broker and nodes speak over mutual TLS on loopback, the
nodes have the built-in encoder. Memory is compared between a tenth of the searches and the end.
`python -m benchmarks.search_load 150 60` is a rehearsal with fewer documents and searches.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from benchmarks._rows import limited
from benchmarks._silos import NAMES, Silos, running
from benchmarks.node import zipf_texts

USERS, PAUSE = 20, 1.0
LIMIT_MS, LIMIT_GROWTH = 300.0, 1.1


def main(documents: int = 40_000, searches: int = 5_000) -> list[dict[str, Any]]:
    """Every row of this benchmark; smaller numbers make a rehearsal."""
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), documents) as silos:
        times, failures, memory = asyncio.run(_load(silos, searches))
    marks = statistics.quantiles(times, n=100)
    told = f"{len(NAMES)} silos × {documents:,} documents, {USERS} users, {searches:,} searches"
    print(f"{told}: {failures} failures, p50 {marks[49]:.0f} ms, p99 {marks[98]:.0f} ms", file=sys.stderr)
    if failures:
        raise RuntimeError(f"{failures} searches did not hear from every silo")
    return [
        limited(f"search: p99 of {USERS} users over {len(NAMES)} silos (ms)", marks[98], LIMIT_MS),
        limited("search: memory at the end, to that after a tenth of the searches", memory, LIMIT_GROWTH),
    ]


async def _load(silos: Silos, searches: int) -> tuple[list[float], int, float]:
    """Milliseconds of every search, how many did not hear from every silo, and how memory grew."""
    questions = list(zipf_texts(2_000, 4, 99))
    times: list[float] = []
    failures, early, numbers = 0, 0.0, count()
    async with silos.client() as client:
        await silos.up(client)

        async def user(number: int) -> None:
            nonlocal failures, early
            await asyncio.sleep(number * PAUSE / USERS)
            while (at := next(numbers)) < searches:
                began = time.perf_counter()
                failures += not await _heard(client, questions[at % len(questions)])
                times.append(1000 * (time.perf_counter() - began))
                if at == searches // 10:
                    early = silos.memory()
                await asyncio.sleep(PAUSE)

        await asyncio.gather(*(user(number) for number in range(USERS)))
        return times, failures, silos.memory() / early


async def _heard(client: httpx.AsyncClient, query: str) -> bool:
    answer = await client.post("/search", json={"query": query, "explain": True})
    return answer.status_code == 200 and all(silo["status"] == "answered" for silo in answer.json()["silos"])


if __name__ == "__main__":
    for row in main(*(int(word) for word in sys.argv[1:])):
        print(row)
