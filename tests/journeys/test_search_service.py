"""A federation as `isthmus new` writes it, in processes of their own: searched, hurt, and whole again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from isthmus.cli import main
from isthmus.errors import ServiceError
from isthmus.service import certificates
from isthmus.service.broker import Broker
from isthmus.service.client import Client
from isthmus.service.settings import read_broker
from isthmus.service.wire import Search

SILOS = ("north", "south", "west")
PATIENCE = 240.0
DEADLINE = 2.0

pytestmark = pytest.mark.timeout(600)


def free_base(count: int) -> int:
    """A port that is free together with those after it."""
    for base in range(20_000 + os.getpid() % 20_000, 60_000, count):
        try:
            held = [socket.create_server(("127.0.0.1", base + number)) for number in range(count)]
        except OSError:
            continue
        for each in held:
            each.close()
        return base
    raise RuntimeError("no free ports")


def until(what, told):
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        if time.monotonic() > end:
            pytest.fail(f"not within {PATIENCE:.0f} s: {told}")
        time.sleep(0.2)
    return found


class Federation:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_base(len(SILOS) + 1)
        assert main(["new", str(folder), "--silos", ",".join(SILOS), "--port", str(self.port)]) == 0
        for name in SILOS:
            (folder / name / "documents" / "tides.md").write_text(
                f"# Tides\n\nTidal power as {name} has it.\n"
            )
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        verb, config = ("broker", "broker.toml") if name == "broker" else ("node", f"{name}/silo.toml")
        more = ["--set", f"deadline_ms={DEADLINE * 1000:.0f}"] if name == "broker" else []
        command = [sys.executable, "-m", "isthmus", verb, "--config", config, *more]
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}", key=self.folder / "broker" / "admin.key")

    def statuses(self) -> dict[str, str]:
        began = time.monotonic()
        with self.client() as broker:
            told = {each.silo: each.status for each in broker.search("tidal power").silos}
        assert time.monotonic() - began < DEADLINE + 3  # the machine may be busy
        return told

    def answered(self) -> set[str]:
        return {silo for silo, status in self.statuses().items() if status == "answered"}

    def found(self) -> set[str]:
        try:
            with self.client() as broker:
                return {each.silo for each in broker.search("tidal power").hits}
        except ServiceError:
            return set()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def close(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("journey") / "my-federation")
    try:
        for name in (*SILOS, "broker"):
            made.start(name)
        until(lambda: made.found() == set(SILOS), "all silos find something")
        yield made
    finally:
        made.close()


def test_it_starts_as_it_is(federation, capsys):
    told = ["--broker", f"http://127.0.0.1:{federation.port}", "--key"]
    assert main(["search", "tidal power", *told, str(federation.folder / "broker" / "admin.key")]) == 0
    shown = capsys.readouterr().out
    for name in SILOS:
        assert re.search(rf"{name}\s+Tides", shown)
    assert "3 of 3 silos answered" in shown


def test_silos_come_to_share_their_statistics(federation):
    def shared():
        with federation.client() as broker:
            told = broker.silos()
        return told.statistics and {each.ready.statistics for each in told.silos} == {told.statistics}

    until(shared, "every silo scores with the sum")
    with federation.client() as broker:
        assert not any(each.detail for each in broker.search("tidal power").silos)
        release = broker.silos().silos[0].release
    assert {each.kind for each in release.departures} >= {"sums", "scores", "snippets"}
    assert {each.guarantee for each in release.departures if each.kind == "scores"} == {"no DP guarantee"}


def test_feedback_reaches_its_silo(federation):
    with federation.client() as broker:
        hit = broker.search("tidal power").hits[0]
        broker.feedback("tidal power", hit, relevant=True)
        told = {each.silo: each.release.departures for each in broker.silos().silos}
    assert hit.silo in told


def test_a_killed_and_a_stopped_silo_are_named_and_come_back(federation):
    north, south = federation.running["north"], federation.running["south"]
    north.kill()
    north.wait()
    south.send_signal(signal.SIGSTOP)
    try:
        hurt = [federation.statuses() for _ in range(4)]
        assert all(told["west"] == "answered" for told in hurt)
        assert all(told["north"] == "down" for told in hurt)
        assert all(told["south"] == "late" for told in hurt)
    finally:
        south.send_signal(signal.SIGCONT)
    federation.start("north")
    until(lambda: federation.answered() == set(SILOS), "both are used again")


def test_logs_have_no_query(federation):
    with federation.client() as broker:
        broker.search("zanzibarian")
    for name in (*SILOS, "broker"):
        assert '"path": "/v1/search"' in federation.log(name)
        assert "zanzibarian" not in federation.log(name)
        assert "tidal" not in federation.log(name)


@contextmanager
def calling(federation, party, authority):
    """A client with somebody's certificate, straight to a node."""
    context = certificates.client_context(certificates.files(authority / party))
    context.load_verify_locations(federation.folder / "north" / "ca.crt")
    with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{federation.port + 1}") as client:
        yield client


def test_a_node_refuses_a_broker_it_does_not_know(federation, tmp_path):
    folder = federation.folder
    if not (folder / "other").exists():
        assert main(["keys", "make", str(folder), "--broker", "other"]) == 0
    assert main(["keys", "make", str(tmp_path), "--broker", "broker"]) == 0
    with calling(federation, "other", folder) as other:
        assert other.post("/v1/search", json={"query": "tides"}).status_code == 403
        assert other.get("/v1/statistics").status_code == 403
    with calling(federation, "broker", tmp_path) as forged, pytest.raises(httpx.TransportError):
        forged.post("/v1/search", json={"query": "tides"})


def test_a_node_refuses_replays_and_path_tricks(federation):
    from isthmus.service.limits import message_header

    header = message_header()
    with calling(federation, "broker", federation.folder) as broker:
        body = {"query": "tides"}
        assert broker.post("/v1/search", json=body, headers=header).status_code == 200
        assert broker.post("/v1/search", json=body, headers=header).status_code == 409
        assert broker.post("/v1/search", json=body).status_code == 400
        fresh = message_header()
        reply = broker.request("DELETE", "/v1/documents/..%2f..%2fsilo.toml", headers=fresh)
        assert reply.status_code == 403
    assert (federation.folder / "north" / "silo.toml").exists()


def test_an_unknown_broker_is_told_so(federation):
    import asyncio
    from dataclasses import replace

    folder = federation.folder
    if not (folder / "other").exists():
        assert main(["keys", "make", str(folder), "--broker", "other"]) == 0
    settings = replace(
        read_broker(folder / "broker.toml"), tls=certificates.files(folder / "other"), share_statistics=False
    )

    async def search():
        broker = Broker(settings)
        try:
            return await broker.search(Search(query="tides"))
        finally:
            await broker.stop()

    assert {each.status for each in asyncio.run(search()).silos} == {"refused"}


def test_an_interrupt_ends_everything(federation):
    """Last: it stops the west and the broker."""
    for name in ("west", "broker"):
        process = federation.running.pop(name)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert "Traceback" not in federation.log(name)
