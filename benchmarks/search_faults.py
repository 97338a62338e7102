"""Faults under load: a node is killed, one stopped, one answers garbage, one is slow; then all come back.

The federation and the users are those of `search_load`. The broker reaches every node through a gate, which
can delay traffic or lead it to a server that holds the node's own certificate and answers nonsense. The
faults begin one after the other, until every silo is faulty; then all are repaired. Every search must be
answered within the deadline, every answer must name the faulty silos, and in the end all silos must be used
again.

`python -m benchmarks.search_faults 150 200` is a rehearsal with fewer documents and searches.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from benchmarks._rows import limited
from benchmarks._silos import DEADLINE_MS, NAMES, Silos, free_ports, node_port, running
from benchmarks.node import zipf_texts
from benchmarks.search_load import PAUSE, USERS
from isthmus.service import certificates

SLACK_MS, LIMIT_BACK = 500.0, 60.0
SLOW_SECONDS = 5.0
NONSENSE = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"hits": 3}'

FAULTS = {"east": "killed", "north": "stopped", "south": "garbage", "west": "slow"}


@dataclass(eq=False)
class Gate:
    """A TCP proxy before one node that can delay its traffic, or send it to the server of nonsense."""

    port: int
    node: int
    nonsense: int
    mode: Literal["open", "slow", "garbage"] = "open"
    lines: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self) -> asyncio.Server:
        """Start listening."""
        return await asyncio.start_server(self._pass, "127.0.0.1", self.port)

    def turn(self, mode: Literal["open", "slow", "garbage"]) -> None:
        """Switch to this mode and close the open connections."""
        self.mode = mode
        for line in list(self.lines):
            line.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = self.nonsense if self.mode == "garbage" else self.node
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        ours = {writer, outer}
        self.lines |= ours
        await asyncio.gather(self._copy(reader, outer), self._copy(inner, writer))
        self.lines -= ours

    async def _copy(self, source: asyncio.StreamReader, into: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(1 << 16):
                if self.mode == "slow":
                    await asyncio.sleep(SLOW_SECONDS)
                into.write(chunk)
                await into.drain()
        into.close()


@dataclass
class Watch:
    """What users saw: times in ms, errors, and the reported statuses of faulty silos."""

    ill: dict[str, float] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: Counter[tuple[str, str]] = field(default_factory=Counter)

    def saw(self, began: float, status: int, silos: list[dict[str, Any]]) -> None:
        """Record an answer to a search that was sent at the time `began`."""
        self.times.append(1000 * (time.perf_counter() - began))
        if status != 200 or {each["silo"] for each in silos} != set(NAMES):
            self.errors.append(f"status {status}")
        for each in silos:
            if each["silo"] in self.ill and began > self.ill[each["silo"]]:
                self.said[FAULTS[each["silo"]], each["status"]] += 1
                if each["status"] == "answered" or not each["detail"]:
                    self.errors.append(
                        f"{each['silo']} is {FAULTS[each['silo']]}, and called {each['status']}"
                    )


def main(documents: int = 40_000, searches: int = 2_000) -> list[dict[str, Any]]:
    """Run this benchmark and return its rows; smaller numbers make a rehearsal."""
    ports = free_ports(2 * len(NAMES))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with running(root, documents, gates=dict(zip(NAMES, ports, strict=False))) as silos:
            watch, back = asyncio.run(_hurt(silos, ports, searches))
    for (fault, status), times in sorted(watch.said.items()):
        print(f"{fault}: called {status} {times} times", file=sys.stderr)
    print(
        f"{len(watch.times)} searches, {len(watch.errors)} errors, all back {back:.1f} s after",
        file=sys.stderr,
    )
    if watch.errors:
        raise RuntimeError(f"{len(watch.errors)} searches went wrong, the first: {watch.errors[0]}")
    told = f"search under faults: the slowest of {len(watch.times):,} answers (ms), deadline {DEADLINE_MS}"
    return [
        limited(told, max(watch.times), DEADLINE_MS + SLACK_MS),
        limited("search under faults: until every silo is used again (s)", back, LIMIT_BACK),
    ]


async def _hurt(silos: Silos, ports: list[int], searches: int) -> tuple[Watch, float]:
    """Let users search while faults begin, each after a sixth of the searches; then repair all.

    Returns what users saw, and the seconds from the repair until every silo answered.
    """
    gates = {
        name: Gate(port, node_port(silos.root, name), nonsense)
        for name, port, nonsense in zip(NAMES, ports[:4], ports[4:], strict=True)
    }
    servers = [await gate.serve() for gate in gates.values()]
    servers += [await _nonsense(silos.root, name, gate.nonsense) for name, gate in gates.items()]
    watch, numbers = Watch(), count()
    questions = list(zipf_texts(2_000, 4, 99))
    async with silos.client() as client:
        await silos.up(client)

        async def search(query: str) -> list[dict[str, Any]]:
            began = time.perf_counter()
            answer = await client.post("/search", json={"query": query, "explain": True})
            told: list[dict[str, Any]] = answer.json().get("silos", [])
            watch.saw(began, answer.status_code, told)
            return told

        async def user(number: int) -> None:
            await asyncio.sleep(number * PAUSE / USERS)
            while (at := next(numbers)) < searches:
                for fault in list(FAULTS)[: 6 * at // searches]:
                    if fault not in watch.ill:
                        _begin(silos, gates, fault)
                        watch.ill[fault] = time.perf_counter()
                await search(questions[at % len(questions)])
                await asyncio.sleep(PAUSE)

        await asyncio.gather(*(user(number) for number in range(USERS)))
        watch.ill.clear()
        mended = time.perf_counter()
        _mend(silos, gates)
        while not all(each["status"] == "answered" for each in await search(questions[0])):
            if time.perf_counter() - mended > 10 * LIMIT_BACK:
                raise RuntimeError("not every silo came back")
            await asyncio.sleep(0.2)
        back = time.perf_counter() - mended
    for gate in gates.values():
        gate.turn("open")
    for server in servers:
        server.close()
    await asyncio.sleep(0.1)  # let the cut connections end
    return watch, back


def _begin(silos: Silos, gates: dict[str, Gate], name: str) -> None:
    process = silos.processes[name]
    match FAULTS[name]:
        case "killed":
            process.kill()
            process.wait()
        case "stopped":
            process.send_signal(signal.SIGSTOP)
        case "garbage":
            gates[name].turn("garbage")
        case "slow":
            gates[name].turn("slow")


def _mend(silos: Silos, gates: dict[str, Gate]) -> None:
    for name, fault in FAULTS.items():
        gates[name].turn("open")
        if fault == "killed":
            silos.start(name)
        elif fault == "stopped":
            silos.processes[name].send_signal(signal.SIGCONT)


async def _nonsense(root: Path, name: str, port: int) -> asyncio.Server:
    """Start a server with the node's own certificate that answers every request with nonsense."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError):
            await reader.read(1 << 16)
            writer.write(NONSENSE)
            await writer.drain()
        writer.close()

    context = certificates.server_context(certificates.files(root / "keys" / name), mutual=False)
    return await asyncio.start_server(answer, "127.0.0.1", port, ssl=context)


if __name__ == "__main__":
    for row in main(*(int(word) for word in sys.argv[1:])):
        print(row)
