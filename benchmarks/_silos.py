"""Four nodes and a broker as processes of their own on loopback, over mutual TLS."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.node import zipf_texts
from isthmus.service.certificates import Authority

NAMES = ("east", "north", "south", "west")
DEADLINE_MS, PATIENCE = 2000, 900.0


@dataclass(frozen=True)
class Silos:
    """The running processes, by name; `broker` is one of them."""

    root: Path
    port: int
    processes: dict[str, subprocess.Popen[bytes]]

    def start(self, name: str) -> None:
        """Start a party, or start it again."""
        verb = "broker" if name == "broker" else "node"
        command = [sys.executable, "-m", "isthmus", verb, "--config", str(self.root / f"{name}.toml")]
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with open(self.root / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | single)

    def client(self, key: str = "") -> httpx.AsyncClient:
        """A caller of the broker."""
        headers = {"x-api-key": key} if key else {}
        url = f"http://127.0.0.1:{self.port}/v1"
        return httpx.AsyncClient(base_url=url, timeout=30, headers=headers, verify=False)  # no TLS: no roots

    async def up(self, client: httpx.AsyncClient) -> None:
        """Wait until all silos have indexed everything and score with the sum of their statistics."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended:
                raise RuntimeError(f"{', '.join(ended)} ended")
            try:
                told = (await client.get("/silos")).json()
            except httpx.TransportError:
                told = {"silos": [], "statistics": ""}
            ready = [silo["ready"] for silo in told["silos"] if silo["ready"]]
            same = [each["statistics"] for each in ready if each["ready"] and not each["detail"]]
            if told["statistics"] and same == [told["statistics"]] * len(NAMES):
                return
            await asyncio.sleep(0.2)
        raise RuntimeError("the silos were not up in time")

    def memory(self) -> float:
        """Resident megabytes of all processes."""
        total = 0
        for process in self.processes.values():
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += int(status.partition("VmRSS:")[2].split()[0])
        return total / 1024

    def processor(self) -> dict[str, float]:
        """Processor seconds that each process has used."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = {
            name: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            for name, process in self.processes.items()
        }
        return {name: (int(each[11]) + int(each[12])) / tick for name, each in fields.items()}


@contextmanager
def running(
    root: Path, documents: int, *, gates: Mapping[str, int] | None = None, keys: Path | None = None
) -> Iterator[Silos]:
    """All parties, started. The broker asks a silo at its port in `gates`, if it has one; with `keys`, it
    answers those who have one."""
    port = _written(root, documents, gates or {}, keys)
    silos = Silos(root, port, {})
    try:
        for name in (*NAMES, "broker"):
            silos.start(name)
        yield silos
    finally:
        for process in silos.processes.values():
            _ended(process)


def node_port(root: Path, name: str) -> int:
    """Where a node listens."""
    return int((root / f"{name}.port").read_text())


def free_ports(wanted: int) -> list[int]:
    """Ports that nobody uses now."""
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(wanted)]
        return [each.getsockname()[1] for each in found]


def _written(root: Path, documents: int, gates: Mapping[str, int], keys: Path | None) -> int:
    """Documents, certificates and configuration of all parties; the broker's port."""
    authority, ports = Authority.at(root / "keys"), free_ports(len(NAMES) + 1)
    broker = f'folder = "broker"\nport = {ports[-1]}\ndeadline_ms = {DEADLINE_MS}\n'
    broker += f"keys = {json.dumps(str(keys))}\n" if keys is not None else ""
    broker += "[limits]\nper_second = 1000.0\nburst = 2000\n" + _tls(authority, "broker", clients=True)
    for seed, (name, port) in enumerate(zip(NAMES, ports, strict=False)):
        with open(root / f"{name}.jsonl", "w", encoding="utf-8") as out:
            for at, text in enumerate(zipf_texts(documents, 65, seed)):
                out.write(json.dumps({"_id": f"{name}{at}", "title": text[:20], "text": text}) + "\n")
        (root / f"{name}.toml").write_text(
            f'silo = "{name}"\nfolder = "{name}"\nport = {port}\n'
            f'sources = [{{kind = "beir", path = "{name}.jsonl"}}]\n'
            "[peers.broker]\nsearch = true\nsnippets = true\ncounts = true\n"
            + _tls(authority, name, clients=False)
        )
        (root / f"{name}.port").write_text(str(port))
        broker += f'[silos.{name}]\nurl = "https://127.0.0.1:{gates.get(name, port)}"\n'
    (root / "broker.toml").write_text(broker)
    return ports[-1]


def _tls(authority: Authority, name: str, *, clients: bool) -> str:
    files = authority.issue(name, clients=clients)
    paths = {"certificate": files.certificate, "key": files.key, "authority": files.authority}
    return "[tls]\n" + "".join(f"{part} = {json.dumps(str(path))}\n" for part, path in paths.items())


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
