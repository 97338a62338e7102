"""Nodes and a broker as processes of their own on loopback, over mutual TLS.

They rank by BM25 with shared statistics. With an encoder (a random BERT of one layer, the same in all silos)
they rank by the hybrid, as with a real encoder, once every document has its vector; with many documents this
takes minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.node import WORDS, zipf_texts
from isthmus.service.certificates import Authority

NAMES = ("east", "north", "south", "west")
DEADLINE_MS, PATIENCE = 2000, 900.0
EMBEDDINGS = {"word": WORDS + 1, "position": 128, "token_type": 2}


@dataclass(frozen=True)
class Silos:
    """The running processes of a federation, by name; `broker` is one of them."""

    root: Path
    port: int
    processes: dict[str, subprocess.Popen[bytes]]
    names: Sequence[str] = NAMES
    scorer: str = "bm25"
    """Name of the scorer that all silos use once statistics are shared."""

    def start(self, name: str) -> None:
        """Start or restart a node or the broker."""
        verb = "broker" if name == "broker" else "node"
        command = [sys.executable, "-m", "isthmus", verb, "--config", str(self.root / f"{name}.toml")]
        with open(self.root / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=_environment(self.root)
            )

    def client(self, key: str = "") -> httpx.AsyncClient:
        """Return an HTTP client of the broker, with an API key if one is given."""
        headers = {"x-api-key": key} if key else {}
        url = f"http://127.0.0.1:{self.port}/v1"
        return httpx.AsyncClient(base_url=url, timeout=30, headers=headers, verify=False)  # plain HTTP

    async def up(self, client: httpx.AsyncClient) -> None:
        """Wait until all silos have indexed everything and rank with the shared statistics and scale.

        Raises RuntimeError if a process ends, or after `PATIENCE` seconds.
        """
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
            if told["statistics"] and same == [told["statistics"]] * len(self.names):
                outcomes = (await client.post("/search", json={"query": "00001x"})).json().get("silos", [])
                if [(each["scorer"], each["detail"]) for each in outcomes] == [(self.scorer, "")] * len(same):
                    return
            await asyncio.sleep(0.2)
        raise RuntimeError("the silos were not up in time")

    def memory(self) -> float:
        """Return the resident memory of all processes in MB."""
        total = 0
        for process in self.processes.values():
            status = Path(f"/proc/{process.pid}/status").read_text()
            total += int(status.partition("VmRSS:")[2].split()[0])
        return total / 1024

    def processor(self) -> dict[str, float]:
        """Return the processor seconds that each process has used."""
        tick = os.sysconf("SC_CLK_TCK")
        fields = {
            name: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            for name, process in self.processes.items()
        }
        return {name: (int(each[11]) + int(each[12])) / tick for name, each in fields.items()}


@contextmanager
def running(
    root: Path,
    documents: int,
    *,
    names: Sequence[str] = NAMES,
    gates: Mapping[str, int] | None = None,
    keys: Path | None = None,
    dense: bool = False,
) -> Iterator[Silos]:
    """Start all parties; they end with the context. The broker reaches a silo at its port in `gates`, if it
    is listed there; with `keys`, a file of API keys, the broker requires a key; `dense` gives all silos an
    encoder."""
    encoder = _encoder(root) if dense else '[encoder]\nkind = "none"\n'
    port = _written(root, documents, names, encoder, gates or {}, keys)
    silos = Silos(root, port, {}, names, "hybrid" if dense else "bm25")
    try:
        for name in (*names, "broker"):
            silos.start(name)
        yield silos
    finally:
        for process in silos.processes.values():
            _ended(process)


def node_port(root: Path, name: str) -> int:
    """Return the port of a node."""
    return int((root / f"{name}.port").read_text())


def free_ports(wanted: int) -> list[int]:
    """Return ports that are unused now."""
    with ExitStack() as held:
        found = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(wanted)]
        return [each.getsockname()[1] for each in found]


def _environment(root: Path) -> dict[str, str]:
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return os.environ | one_thread | {"ISTHMUS_ENCODERS": str(root / "encoders")}


def _encoder(root: Path) -> str:
    """Add a random encoder, which needs the extra `dense`. Returns its section of a node's settings."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder, width, rng = root / "random-bert", 32, np.random.default_rng(0)
    folder.mkdir()
    square, wide, narrow = (width, width), (2 * width, width), (width, 2 * width)
    attention = {f"attention.self.{part}": square for part in ("query", "key", "value")}
    dense = {
        **attention,
        "attention.output.dense": square,
        "intermediate.dense": wide,
        "output.dense": narrow,
    }
    shapes = {f"embeddings.{name}_embeddings.weight": (size, width) for name, size in EMBEDDINGS.items()}
    for name, shape in dense.items():
        shapes |= {f"encoder.layer.0.{name}.weight": shape, f"encoder.layer.0.{name}.bias": shape[:1]}
    for name in ("embeddings", "encoder.layer.0.attention.output", "encoder.layer.0.output"):
        shapes |= {f"{name}.LayerNorm.weight": (width,), f"{name}.LayerNorm.bias": (width,)}
    weights = {name: rng.normal(scale=0.5, size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "bert", "hidden_act": "gelu", "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {
        "hidden_size": width,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": EMBEDDINGS["position"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {"[UNK]": 0} | {f"{at:05x}x": at + 1 for at in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    add = [sys.executable, "-m", "isthmus", "encoder", "add", str(folder), "--name", "random"]
    subprocess.run(add, check=True, env=_environment(root), stdout=sys.stderr)
    return '[encoder]\nkind = "encoder"\nname = "random"\n'


def _written(
    root: Path,
    documents: int,
    names: Sequence[str],
    encoder: str,
    gates: Mapping[str, int],
    keys: Path | None,
) -> int:
    """Write documents, certificates and configuration of all parties. Returns the broker's port."""
    authority, ports = Authority.at(root / "keys"), free_ports(len(names) + 1)
    broker = f'folder = "broker"\nport = {ports[-1]}\ndeadline_ms = {DEADLINE_MS}\n'
    broker += f"keys = {json.dumps(str(keys))}\n" if keys is not None else ""
    broker += "[limits]\nper_second = 1000.0\nburst = 2000\n" + _tls(authority, "broker", clients=True)
    for seed, (name, port) in enumerate(zip(names, ports, strict=False)):
        with open(root / f"{name}.jsonl", "w", encoding="utf-8") as out:
            for at, text in enumerate(zipf_texts(documents, 65, seed)):
                out.write(json.dumps({"_id": f"{name}{at}", "title": text[:20], "text": text}) + "\n")
        (root / f"{name}.toml").write_text(
            f'silo = "{name}"\nfolder = "{name}"\nport = {port}\n'
            f'sources = [{{kind = "beir", path = "{name}.jsonl"}}]\n'
            f"{encoder}[peers.broker]\nsearch = true\nsnippets = true\ncounts = true\n"
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
