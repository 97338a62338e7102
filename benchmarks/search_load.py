"""The whole service under load: four nodes, a broker, and twenty users who pause a second between searches.

Every node and the broker is a process of its own; broker and nodes speak over mutual TLS on loopback, the
nodes have the built-in encoder. Memory is compared between a tenth of the searches and the end.
`python -m benchmarks.search_load 150 60` is a rehearsal with fewer documents and searches.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from benchmarks.node import zipf_texts
from isthmus.service.certificates import Authority

SILOS = ("east", "north", "south", "west")
USERS, PAUSE, PATIENCE = 20, 1.0, 900.0
LIMIT_MS, LIMIT_GROWTH = 300.0, 1.1

Processes = dict[str, "subprocess.Popen[bytes]"]


def main(documents: int = 40_000, searches: int = 5_000) -> list[dict[str, Any]]:
    """Every row of this benchmark; smaller numbers make a rehearsal."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        port = _written(Path(folder), documents)
        processes: Processes = {}
        for name in (*SILOS, "broker"):
            processes[name] = _started(Path(folder), name)
            held.callback(_ended, processes[name])
        times, failures, memory = asyncio.run(_load(port, processes, searches))
    marks = statistics.quantiles(times, n=100)
    told = f"{len(SILOS)} silos × {documents:,} documents, {USERS} users, {searches:,} searches"
    print(f"{told}: {failures} failures, p50 {marks[49]:.0f} ms, p99 {marks[98]:.0f} ms", file=sys.stderr)
    if failures:
        raise RuntimeError(f"{failures} searches did not hear from every silo")
    return [
        _limited(f"search: p99 of {USERS} users over {len(SILOS)} silos (ms)", marks[98], LIMIT_MS),
        _limited("search: memory at the end, to that after a tenth of the searches", memory, LIMIT_GROWTH),
    ]


def _limited(name: str, ours: float, limit: float) -> dict[str, Any]:
    return {"name": name, "ours": ours, "peer": None, "peer_name": None, "ratio": limit / ours, "goal": 1}


def _written(root: Path, documents: int) -> int:
    """Documents, certificates and configuration of all parties; the broker's port."""
    authority, ports = Authority.at(root / "keys"), _free_ports(len(SILOS) + 1)
    broker = f'folder = "broker"\nport = {ports[-1]}\ndeadline_ms = 2000\n'
    broker += "[limits]\nper_second = 1000.0\nburst = 2000\n" + _tls(authority, "broker", clients=True)
    for seed, (name, port) in enumerate(zip(SILOS, ports, strict=False)):
        with open(root / f"{name}.jsonl", "w", encoding="utf-8") as out:
            for at, text in enumerate(zipf_texts(documents, 65, seed)):
                out.write(json.dumps({"_id": f"{name}{at}", "title": text[:20], "text": text}) + "\n")
        (root / f"{name}.toml").write_text(
            f'silo = "{name}"\nfolder = "{name}"\nport = {port}\n'
            f'sources = [{{kind = "beir", path = "{name}.jsonl"}}]\n'
            "[peers.broker]\nsearch = true\nsnippets = true\ncounts = true\n"
            + _tls(authority, name, clients=False)
        )
        broker += f'[silos.{name}]\nurl = "https://127.0.0.1:{port}"\n'
    (root / "broker.toml").write_text(broker)
    return ports[-1]


def _tls(authority: Authority, name: str, *, clients: bool) -> str:
    files = authority.issue(name, clients=clients)
    paths = {"certificate": files.certificate, "key": files.key, "authority": files.authority}
    return "[tls]\n" + "".join(f"{part} = {json.dumps(str(path))}\n" for part, path in paths.items())


def _free_ports(wanted: int) -> list[int]:
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(wanted)]
        return [each.getsockname()[1] for each in found]


def _started(root: Path, name: str) -> subprocess.Popen[bytes]:
    verb = "broker" if name == "broker" else "node"
    command = [sys.executable, "-m", "isthmus", verb, "--config", str(root / f"{name}.toml")]
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with open(root / f"{name}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | single)


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


async def _load(port: int, processes: Processes, searches: int) -> tuple[list[float], int, float]:
    """Milliseconds of every search, how many did not hear from every silo, and how memory grew."""
    questions = list(zipf_texts(2_000, 4, 99))
    times: list[float] = []
    failures, early, numbers = 0, 0.0, count()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=30) as client:
        await _until_up(client, processes)

        async def user(number: int) -> None:
            nonlocal failures, early
            await asyncio.sleep(number * PAUSE / USERS)
            while (at := next(numbers)) < searches:
                began = time.perf_counter()
                failures += not await _heard(client, questions[at % len(questions)])
                times.append(1000 * (time.perf_counter() - began))
                if at == searches // 10:
                    early = _memory(processes)
                await asyncio.sleep(PAUSE)

        await asyncio.gather(*(user(number) for number in range(USERS)))
        return times, failures, _memory(processes) / early


async def _heard(client: httpx.AsyncClient, query: str) -> bool:
    answer = await client.post("/search", json={"query": query, "explain": True})
    return answer.status_code == 200 and all(silo["status"] == "answered" for silo in answer.json()["silos"])


async def _until_up(client: httpx.AsyncClient, processes: Processes) -> None:
    """All silos have indexed everything, and score with the sum of their statistics."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        ended = [name for name, process in processes.items() if process.poll() is not None]
        if ended:
            raise RuntimeError(f"{', '.join(ended)} ended")
        try:
            told = (await client.get("/silos")).json()
        except httpx.TransportError:
            told = {"silos": [], "statistics": ""}
        ready = [silo["ready"] for silo in told["silos"] if silo["ready"]]
        same = [each for each in ready if each["ready"] and not each["detail"]]
        if told["statistics"] and [each["statistics"] for each in same] == [told["statistics"]] * len(SILOS):
            return
        await asyncio.sleep(1)
    raise RuntimeError("the silos were not up in time")


def _memory(processes: Processes) -> float:
    """Resident megabytes of all processes."""
    total = 0
    for process in processes.values():
        status = Path(f"/proc/{process.pid}/status").read_text()
        total += int(status.partition("VmRSS:")[2].split()[0])
    return total / 1024


if __name__ == "__main__":
    for row in main(*(int(word) for word in sys.argv[1:])):
        print(row)
