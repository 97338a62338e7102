"""A flood beside ordinary users: bad keys, slow bodies, endless headers, garbage, and a hostile silo.

The broker and the nodes are those of `search_load`, with an API key for each of twenty users. First they
search alone; then strangers at eight other addresses do their worst, at the broker's port and at the nodes',
and one of the four silos turns hostile. No search may fail or miss one of the three honest silos, the slowest
hundredth may take at most twice as long as before, and memory must stay where it is.
`python -m benchmarks.flood 150 20` is a rehearsal with fewer documents and seconds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from benchmarks._rows import limited
from benchmarks._silos import DEADLINE_MS, NAMES, Silos, free_ports, node_port, running
from benchmarks.node import zipf_texts
from benchmarks.search_faults import Gate
from benchmarks.search_load import PAUSE, USERS
from isthmus.service import certificates
from isthmus.service.security import ApiKeys

HOSTILE = "west"
LIMIT_RATIO, LIMIT_GROWTH = 2.0, 1.1
SETTLE = 4.0
"""Seconds of the flood in which the broker learns to leave the hostile silo alone; they are not timed."""
ADDRESSES = [f"127.0.0.{number}" for number in range(2, 10)]
POST = (
    "POST /v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
)


@dataclass
class Seen:
    """What the users saw: when each search was answered, in how many milliseconds; and what failed."""

    began: float = field(default_factory=time.monotonic)
    times: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)

    def percentiles(self, since: float, until: float) -> tuple[float, float]:
        """The 50th and 99th between two moments."""
        marks = statistics.quantiles([ms for at, ms in self.times if since <= at < until], n=100)
        return marks[49], marks[98]


def main(
    documents: int = 5_000, seconds: float = 60.0, deadline_ms: int = DEADLINE_MS
) -> list[dict[str, Any]]:
    """Every row of this benchmark; smaller numbers, and a longer deadline, make a rehearsal."""
    ports = free_ports(2)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        keys = ApiKeys(root / "api-keys.json")
        tokens = [keys.add(f"user {number}", scopes=["search"]) for number in range(USERS)]
        with running(root, documents, gates={HOSTILE: ports[0]}, keys=keys.path) as silos:
            seen, flood = asyncio.run(_trial(silos, ports, tokens, (seconds, deadline_ms)))
    quiet, flooded = seen.percentiles(0.0, flood), seen.percentiles(flood + SETTLE, float("inf"))
    _tell(seen, quiet, flooded)
    if seen.failures:
        raise RuntimeError(f"{len(seen.failures)} searches failed, the first: {seen.failures[0]}")
    during = [megabytes for at, megabytes in seen.memory if at >= flood]
    early = statistics.median(during[: max(1, len(during) // 5)])
    return [
        limited(f"flood: p99 of {USERS} users (ms), to the quiet one", flooded[1] / quiet[1], LIMIT_RATIO),
        limited("flood: memory at the end, to that at its beginning", during[-1] / early, LIMIT_GROWTH),
    ]


def _tell(seen: Seen, quiet: tuple[float, float], flooded: tuple[float, float]) -> None:
    told = f"{len(seen.times)} searches, {len(seen.failures)} failures"
    for name, (half, most) in (("quiet", quiet), ("flooded", flooded)):
        told += f"; {name} p50 {half:.0f} ms, p99 {most:.0f} ms"
    print(told, file=sys.stderr)
    curve = ", ".join(f"{at:.0f} s {megabytes:.0f}" for at, megabytes in seen.memory)
    print(f"resident megabytes of all processes: {curve}", file=sys.stderr)


async def _trial(
    silos: Silos, ports: list[int], tokens: list[str], times: tuple[float, int]
) -> tuple[Seen, float]:
    """Search for a third of the time alone, and for the rest beside the flood; and when that began."""
    gate = Gate(ports[0], node_port(silos.root, HOSTILE), ports[1])
    servers = [await gate.serve(), await _hostile(silos.root, ports[1])]
    async with silos.client(tokens[0]) as client:
        await silos.up(client)
    targets = [silos.port, *(node_port(silos.root, name) for name in NAMES)]
    strangers = multiprocessing.get_context("spawn").Process(target=attack, args=(targets,), daemon=True)
    seconds, deadline = times
    questions = [{"query": text, "deadline_ms": deadline} for text in zipf_texts(2_000, 4, 99)]
    seen, flood = Seen(), seconds / 3
    users = [
        asyncio.create_task(_user(silos, token, questions[number::USERS], seen))
        for number, token in enumerate(tokens)
    ]
    memory = asyncio.create_task(_weigh(silos, seen, seconds / 20))
    try:
        await asyncio.sleep(flood)
        gate.turn("garbage")
        await asyncio.to_thread(strangers.start)
        await asyncio.sleep(seconds - flood)
    finally:
        if strangers.pid is not None:
            strangers.terminate()
            strangers.join(10)
        for task in (*users, memory):
            task.cancel()
        await asyncio.gather(*users, memory, return_exceptions=True)
        gate.turn("open")
        await asyncio.sleep(0.5)  # for the cut lines to end
        for server in servers:
            server.close()
    return seen, flood


async def _user(silos: Silos, token: str, questions: list[dict[str, Any]], seen: Seen) -> None:
    """Somebody who searches, reads, and searches again."""
    honest = set(NAMES) - {HOSTILE}
    async with silos.client(token) as client:
        for question in cycle(questions):
            start = time.monotonic()
            try:
                answer = await client.post("/search", json=question)
                states = {each["silo"]: each["status"] for each in answer.json().get("silos", [])}
                wrong = {name: states.get(name) for name in honest if states.get(name) != "answered"}
                if answer.status_code != 200 or wrong:
                    seen.failures.append(f"status {answer.status_code}, {wrong}")
            except httpx.HTTPError as error:
                seen.failures.append(repr(error))
            now = time.monotonic()
            seen.times.append((now - seen.began, 1000 * (now - start)))
            await asyncio.sleep(PAUSE)


async def _weigh(silos: Silos, seen: Seen, every: float) -> None:
    while True:
        seen.memory.append((time.monotonic() - seen.began, silos.memory()))
        await asyncio.sleep(every)


async def _hostile(root: Path, port: int) -> asyncio.Server:
    """A silo with a certificate, and bad manners: another at every request."""
    begin = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    manners = cycle(
        (
            (begin + b"x-endless: ", b"y" * 4096),
            (begin + b"content-length: 99999999999\r\n\r\n", b" " * 65536),
            (begin + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n[\r\n"),
            (begin + b"content-length: 4\r\n\r\n[[[[", b""),
            (b"\x00\xff garbage", os.urandom(512)),
        )
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ssl.SSLError, TimeoutError):
            await reader.read(1 << 16)
            first, more = next(manners)
            writer.write(first)
            async with asyncio.timeout(10):
                while more and not writer.is_closing():
                    writer.write(more)
                    await writer.drain()
                    await asyncio.sleep(0.002)
        writer.close()

    context = certificates.server_context(certificates.files(root / "keys" / HOSTILE), mutual=True)
    return await asyncio.start_server(answer, "127.0.0.1", port, ssl=context)


def attack(ports: list[int]) -> None:
    """Strangers, until this process is ended: many at the broker, some at every node."""
    asyncio.run(_attack(ports))


async def _attack(ports: list[int]) -> None:
    broker, *nodes = ports
    work: list[Awaitable[None]] = []
    for number, address in enumerate(ADDRESSES):
        many: list[tuple[Callable[..., Awaitable[None]], int, int]] = [
            (_bad_keys, broker, 1),
            (_slow_body, broker, 12),
            (_endless_headers, broker, 2),
            (_partial_headers, broker, 12),
            (_garbage, broker, 1),
            (_garbage, nodes[number % len(nodes)], 1),
            (_silent, nodes[number % len(nodes)], 12),
        ]
        work += [_again(what, port, address) for what, port, times in many for _ in range(times)]
    await asyncio.gather(*work)


async def _again(what: Callable[..., Awaitable[None]], port: int, address: str) -> None:
    """One stranger, who comes back however often it is sent away."""
    while True:
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            try:
                async with asyncio.timeout(60):
                    await what(reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.1)


async def _bad_keys(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for _ in range(20):
        head = f"GET /v1/me HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: isk_{os.urandom(6).hex()}_x\r\n\r\n"
        writer.write(head.encode())
        await reader.readuntil(b"}")
        await asyncio.sleep(0.05)


async def _drip(writer: asyncio.StreamWriter, part: bytes, pause: float) -> None:
    while not writer.is_closing():
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(pause)


async def _slow_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(POST.format(path="session").encode() + b"\r\n{")
    await _drip(writer, b" ", 1.0)


async def _endless_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(POST.format(path="session").encode())
    await _drip(writer, b"x: " + b"y" * 1000 + b"\r\n", 0.01)


async def _partial_headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(POST.format(path="search").encode() + b"x: ")
    await _drip(writer, b"y", 1.0)


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(os.urandom(2048))
    await reader.read()


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


if __name__ == "__main__":
    for row in main(*(int(word) for word in sys.argv[1:])):
        print(row)
