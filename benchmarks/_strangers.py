"""Unauthorised clients ("strangers") and a hostile silo, in a process of their own, for `flood`.

Together they do what one hostile client could do: some hundred attempts a second from eight addresses. A
connection with bad API keys sends twenty of them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._silos import NAMES, free_ports, node_port
from benchmarks.search_faults import Gate
from isthmus.service import certificates

ADDRESSES = [f"127.0.0.{number}" for number in range(2, 10)]
POST = (
    "POST /v1/{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
)
AGAIN = 0.1
"""Seconds after which a rejected stranger comes back."""


@dataclass(frozen=True)
class Targets:
    """The broker's port, and the silo that turns hostile, which the broker reaches through the gate."""

    root: Path
    broker: int
    hostile: str
    gate: int


@contextmanager
def enemies(targets: Targets) -> Iterator[Connection]:
    """Start the process. Yields a connection for orders: `flood`, and `end`, which returns the attempts."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(theirs, targets), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.terminate()
        process.join(10)


def _run(orders: Connection, targets: Targets) -> None:
    asyncio.run(_obey(orders, targets))


async def _obey(orders: Connection, targets: Targets) -> None:
    nonsense = free_ports(1)[0]
    gate = Gate(targets.gate, node_port(targets.root, targets.hostile), nonsense)
    attempts: Counter[str] = Counter()
    async with await gate.serve(), await _hostile(targets, nonsense, attempts):
        assert await asyncio.to_thread(orders.recv) == "flood"
        gate.turn("garbage")
        work = [asyncio.create_task(each) for each in _strangers(targets, attempts)]
        await asyncio.to_thread(orders.recv)
        orders.send(attempts.copy())
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await asyncio.sleep(60)  # until the parent ends this process


async def _hostile(targets: Targets, port: int, attempts: Counter[str]) -> asyncio.Server:
    """Start a silo with a valid certificate that sends another kind of invalid response every time."""
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
            attempts["hostile answers"] += 1
            writer.write(first)
            async with asyncio.timeout(10):
                while more and not writer.is_closing():
                    writer.write(more)
                    await writer.drain()
                    await asyncio.sleep(0.01)
        writer.close()

    context = certificates.server_context(
        certificates.files(targets.root / "keys" / targets.hostile), mutual=True
    )
    return await asyncio.start_server(answer, "127.0.0.1", port, ssl=context)


def _strangers(targets: Targets, attempts: Counter[str]) -> Iterator[Awaitable[None]]:
    """Yield the strangers: many at the broker, some at every node."""
    for number, address in enumerate(ADDRESSES):
        node = node_port(targets.root, NAMES[number % len(NAMES)])
        many: list[tuple[Callable[..., Awaitable[None]], int, int]] = [
            (_bad_keys, targets.broker, 1),
            (_slow_body, targets.broker, 12),
            (_endless_headers, targets.broker, 2),
            (_partial_headers, targets.broker, 12),
            (_garbage, targets.broker, 1),
            (_garbage, node, 1),
            (_silent, node, 12),
        ]
        for what, port, times in many:
            for _ in range(times):
                yield _again(what, (address, port), attempts)


async def _again(what: Callable[..., Awaitable[None]], way: tuple[str, int], attempts: Counter[str]) -> None:
    """Repeat one attack from an address to a port for ever, reconnecting whenever it is cut off."""
    address, port = way
    while True:
        attempts[what.__name__.strip("_").replace("_", " ")] += 1
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            try:
                async with asyncio.timeout(60):
                    await what(reader, writer)
            finally:
                writer.transport.abort()
        await asyncio.sleep(AGAIN)


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
