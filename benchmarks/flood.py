"""A flood beside ordinary users: bad keys, slow bodies, endless headers, garbage, and a hostile silo.

The broker and the nodes are those of `search_load`, with an API key for each of twenty users, who pause a
second between searches. For a third of the time they search undisturbed; then unauthorised clients at eight
other addresses attack the broker's port and the nodes', and one of the four silos turns hostile, all in a
process of their own. No search may fail or miss one of the three honest silos, the slowest hundredth may take
at most twice as long as before, the first second of the flood included, and memory must stay level.

`python -m benchmarks.flood 5000 300` prints the table and ends with status 1 if a goal is
missed; `python -m benchmarks.flood 150 20` is a rehearsal with fewer documents and seconds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from benchmarks._rows import limited
from benchmarks._silos import DEADLINE_MS, NAMES, Silos, free_ports, running
from benchmarks._strangers import Targets, enemies
from benchmarks.node import zipf_texts
from benchmarks.search_load import PAUSE, USERS
from isthmus.service.security import ApiKeys

HOSTILE = "west"
LIMIT_RATIO, LIMIT_GROWTH = 2.0, 1.1


@dataclass(frozen=True)
class Part:
    """Measurements of the quiet or the flooded part: search times in ms, memory in MB, processor seconds."""

    seconds: float
    times: list[float]
    memory: list[float]
    processor: dict[str, float]

    def percentile(self, number: int) -> float:
        """Return this percentile of the search times in milliseconds."""
        return statistics.quantiles(self.times, n=100)[number - 1]

    def busy(self, *names: str) -> float:
        """Return the share of one processor that these processes used, in percent."""
        return 100 * sum(self.processor[name] for name in names) / self.seconds


@dataclass(frozen=True)
class Trial:
    """Measurements of both parts, failed searches, and the strangers' attempts by kind."""

    quiet: Part
    flooded: Part
    failures: list[str]
    attempts: Counter[str]

    def rows(self) -> list[dict[str, Any]]:
        """Return the benchmark's rows, with their goals."""
        slowest = self.flooded.percentile(99) / self.quiet.percentile(99)
        during = self.flooded.memory
        growth = during[-1] / statistics.median(during[: max(1, len(during) // 5)])
        return [
            limited(f"flood: p99 of {USERS} users (ms), to the quiet one", slowest, LIMIT_RATIO),
            limited("flood: memory at the end, to that at its beginning", growth, LIMIT_GROWTH),
        ]

    def table(self) -> str:
        """Format all measurements as a text table."""
        parts = (self.quiet, self.flooded)
        lines = [
            ("", "quiet", "flooded"),
            ("seconds", *(f"{part.seconds:.0f}" for part in parts)),
            ("searches", *(str(len(part.times)) for part in parts)),
            *(
                (f"p{mark} (ms)", *(f"{part.percentile(mark):.0f}" for part in parts))
                for mark in (50, 95, 99)
            ),
            ("slowest (ms)", *(f"{max(part.times):.0f}" for part in parts)),
            ("memory at the end (MB)", *(f"{part.memory[-1]:.0f}" for part in parts)),
            ("processor, broker (%)", *(f"{part.busy('broker'):.0f}" for part in parts)),
            ("processor, nodes (%)", *(f"{part.busy(*NAMES):.0f}" for part in parts)),
        ]
        lines += [
            (f"connections a second, {name}", "0", f"{number / self.flooded.seconds:.1f}")
            for name, number in sorted(self.attempts.items())
        ]
        text = [f"{name:42}{quiet:>10}{flooded:>10}" for name, quiet, flooded in lines]
        text += [
            f"{row['name']}: {row['ours']:.2f} (at most {row['ours'] * row['ratio']:g})"
            for row in self.rows()
        ]
        first = f", the first: {self.failures[0]}" if self.failures else ""
        return "\n".join([*text, f"flood: searches that failed: {len(self.failures)} (at most 0){first}"])


@dataclass
class Seen:
    """Measurements of the current part while users search."""

    began: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    processor: dict[str, float] = field(default_factory=dict)

    def part(self, processor: dict[str, float]) -> Part:
        """Return the finished part; `processor` has the processor seconds of the processes until now."""
        used = {name: seconds - self.processor[name] for name, seconds in processor.items()}
        return Part(time.monotonic() - self.began, self.times, self.memory, used)


def main(
    documents: int = 5_000, seconds: float = 60.0, deadline_ms: int = DEADLINE_MS
) -> list[dict[str, Any]]:
    """Run this benchmark and return its rows; smaller numbers, and a longer deadline, make a rehearsal."""
    done = trial(documents, seconds, deadline_ms)
    print(done.table(), file=sys.stderr)
    if done.failures:
        raise RuntimeError(f"{len(done.failures)} searches failed, the first: {done.failures[0]}")
    return done.rows()


def trial(documents: int = 5_000, seconds: float = 300.0, deadline_ms: int = DEADLINE_MS) -> Trial:
    """Let users search undisturbed for a third of the time, and beside the flood for the rest."""
    gate = free_ports(1)[0]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        keys = ApiKeys(root / "api-keys.json")
        tokens = [keys.add(f"user {number}", scopes=["search"]) for number in range(USERS)]
        with (
            running(root, documents, gates={HOSTILE: gate}, keys=keys.path) as silos,
            enemies(Targets(root, silos.port, HOSTILE, gate)) as orders,
        ):
            return asyncio.run(_trial(silos, orders, tokens, (seconds, deadline_ms)))


async def _trial(silos: Silos, orders: Connection, tokens: list[str], times: tuple[float, int]) -> Trial:
    async with silos.client(tokens[0]) as client:
        await silos.up(client)
    seconds, deadline = times
    questions = [{"query": text, "deadline_ms": deadline} for text in zipf_texts(2_000, 4, 99)]
    failures: list[str] = []
    parts, finished = [Seen()], []
    work = [
        asyncio.create_task(_user(silos, token, questions[number::USERS], parts, failures))
        for number, token in enumerate(tokens)
    ]
    work.append(asyncio.create_task(_weigh(silos, parts, seconds / 30)))
    try:
        for share, then in ((1 / 3, "flood"), (2 / 3, "end")):
            parts[-1].processor = silos.processor()
            await asyncio.sleep(seconds * share)
            finished.append(parts[-1].part(silos.processor()))
            orders.send(then)
            parts.append(Seen())
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    attempts: Counter[str] = await asyncio.to_thread(orders.recv)
    return Trial(*finished, failures, attempts)


async def _user(
    silos: Silos, token: str, questions: list[dict[str, Any]], parts: list[Seen], failures: list[str]
) -> None:
    """Search repeatedly as one user, with a pause after each answer; record times and failures."""
    honest = set(NAMES) - {HOSTILE}
    await asyncio.sleep(PAUSE * random.random())
    async with silos.client(token) as client:
        for question in cycle(questions):
            start, seen = time.monotonic(), parts[-1]
            try:
                answer = await client.post("/search", json=question)
                states = {each["silo"]: each["status"] for each in answer.json().get("silos", [])}
                wrong = {name: states.get(name) for name in honest if states.get(name) != "answered"}
                if answer.status_code != 200 or wrong:
                    failures.append(f"status {answer.status_code}, {wrong}")
            except httpx.HTTPError as error:
                failures.append(repr(error))
            seen.times.append(1000 * (time.monotonic() - start))
            await asyncio.sleep(PAUSE)


async def _weigh(silos: Silos, parts: list[Seen], every: float) -> None:
    while True:
        parts[-1].memory.append(silos.memory())
        await asyncio.sleep(every)


if __name__ == "__main__":
    result = trial(*(int(word) for word in sys.argv[1:]))
    print(result.table())
    sys.exit(bool(result.failures) or any(row["ratio"] < row["goal"] for row in result.rows()))
