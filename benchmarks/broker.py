"""Cost of a search in the broker: four silos behind mutual TLS that answer at once, twenty users.

The silos are stand-ins in one process of their own and return ten explained hits each; the broker runs in
another process, whose processor time is measured. A second measurement compares Isthmus's own HTTP client
with httpx: one message to a node over a connection that stays open.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from benchmarks._rows import limited
from isthmus.service import certificates, connections
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.certificates import Authority, server_name
from isthmus.service.http_client import HttpClient
from isthmus.service.settings import BrokerSettings, RequestLimits, SiloAddress

SILOS = ("east", "north", "south", "west")
USERS, SEARCHES, CALLS = 20, 1000, 1000
LIMIT_MS = 6.0


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder)
        authority = Authority.at(keys)
        for name in SILOS:
            authority.issue(name, clients=False)
        authority.issue("broker", clients=True)
        spawn = mp.get_context("spawn")
        nodes, ports = _child(spawn, _nodes, keys)
        broker, port = _child(spawn, _broker, keys, ports)
        try:
            cost, times = asyncio.run(_load(broker[1], port))
            ours, theirs = asyncio.run(_calls(keys, ports["east"]))
        finally:
            for process, pipe in (broker, nodes):
                pipe.send("end")
                process.join(20)
    p99 = 1000 * statistics.quantiles(times, n=100)[98]
    return [
        limited("broker: processor time of a search over 4 silos (ms)", cost, LIMIT_MS),
        limited(f"broker: p99 of {USERS} users without a pause, silos at once (ms)", p99, 300.0),
        {
            "name": "a message to a node over TLS, kept open (ms of processor time)",
            "ours": ours,
            "peer": theirs,
            "peer_name": "httpx",
            "ratio": theirs / ours,
            "goal": 1,
        },
    ]


def _child(spawn: Any, work: Any, *arguments: Any) -> tuple[tuple[Any, Connection], Any]:
    here, there = spawn.Pipe()
    process = spawn.Process(target=work, args=(there, *arguments), daemon=True)
    process.start()
    return (process, here), here.recv()


def _hit(silo: str, number: int) -> dict[str, Any]:
    why = [
        {"retriever": name, "raw": 7.25, "probability": 0.5, "weight": 0.6, "contribution": 0.123}
        for name in ("bm25", "dense")
    ]
    return {
        "document": f"{silo}/document-{number}",
        "silo": silo,
        "probability": 1 / (number + 2),
        "score": 9.5 - number,
        "title": f"On the matter of number {number}",
        "snippet": "some forty words of text that the silo lets people see " * 4,
        "explanation": why,
    }


def _stand_in(silo: str) -> Any:
    told = {"silo": silo, "documents": 40000, "statistics": "", "took_ms": 1.0}
    body = json.dumps({**told, "hits": [_hit(silo, number) for number in range(10)]}).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

    return app


def _nodes(pipe: Connection, keys: Path) -> None:
    async def serve() -> None:
        servers = [
            connections.server(_stand_in(name), port=0, tls=certificates.files(keys / name), mutual=True)
            for name in SILOS
        ]
        await _until_told(servers, pipe, lambda ports: dict(zip(SILOS, ports, strict=True)))

    asyncio.run(serve())


def _broker(pipe: Connection, keys: Path, ports: dict[str, int]) -> None:
    settings = BrokerSettings(
        tls=certificates.files(keys / "broker"),
        silos={name: SiloAddress(f"https://127.0.0.1:{port}") for name, port in ports.items()},
        deadline_ms=5000,
        share_statistics=False,
        limits=RequestLimits(per_second=1e6, burst=1_000_000),
    )
    server = connections.server(broker_app(Broker(settings)), port=0)
    loop = server.config.get_loop_factory()
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_until_told([server], pipe, lambda ports: ports[0]))


async def _until_told(servers: list[Any], pipe: Connection, shape: Any) -> None:
    running = [asyncio.create_task(server.serve()) for server in servers]
    while not all(server.started for server in servers):
        await asyncio.sleep(0.01)
    pipe.send(shape([server.servers[0].sockets[0].getsockname()[1] for server in servers]))
    while True:
        while not pipe.poll():
            await asyncio.sleep(0.02)
        if pipe.recv() == "end":
            break
        pipe.send(time.process_time())
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*running)


async def _load(pipe: Connection, port: int) -> tuple[float, list[float]]:
    """Return processor milliseconds of the broker per search, and the seconds that each search took."""
    times: list[float] = []
    lines = [HttpClient(f"http://127.0.0.1:{port}") for _ in range(USERS)]
    body = json.dumps({"query": "tidal power in shallow seas", "explain": True}).encode()
    kind = {"content-type": "application/json"}

    async def user(line: HttpClient, count: int) -> None:
        for _ in range(count):
            began = time.perf_counter()
            reply = await line.ask("POST", "/v1/search", headers=kind, body=body)
            times.append(time.perf_counter() - began)
            if reply.status != 200 or reply.body.count(b'"answered"') != len(SILOS):
                raise RuntimeError(f"a search failed: {reply.status}")

    async def spent() -> float:
        pipe.send("spent")
        return float(await asyncio.to_thread(pipe.recv))

    await asyncio.gather(*(user(line, 5) for line in lines))
    times.clear()
    before = await spent()
    await asyncio.gather(*(user(line, SEARCHES // USERS) for line in lines))
    used = await spent() - before
    for line in lines:
        line.close()
    return 1000 * used / SEARCHES, times


async def _calls(keys: Path, port: int) -> tuple[float, float]:
    """Return processor milliseconds per message: with Isthmus's own client, and with httpx."""
    tls = certificates.LiveTls(certificates.files(keys / "broker"), certificates.client_context)
    url, kind = f"https://127.0.0.1:{port}", {"content-type": "application/json"}
    line = HttpClient(url, tls=tls, name=server_name("east"))
    await line.ask("POST", "/v1/search", headers=kind, body=b"{}")
    began = time.process_time()
    for _ in range(CALLS):
        await line.ask("POST", "/v1/search", headers=kind, body=b"{}")
    ours = time.process_time() - began
    line.close()
    named = {"sni_hostname": server_name("east")}
    async with httpx.AsyncClient(verify=tls.current.context) as client:
        await client.post(url, content=b"{}", headers=kind, extensions=named)
        began = time.process_time()
        for _ in range(CALLS):
            await client.post(url, content=b"{}", headers=kind, extensions=named)
        theirs = time.process_time() - began
    return 1000 * ours / CALLS, 1000 * theirs / CALLS


if __name__ == "__main__":
    for row in main():
        print(row)
