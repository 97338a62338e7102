"""One person's hurry: many searches at once, most of them abandoned, must not count against the silos."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from isthmus.service.api import broker_app
from isthmus.service.breaker import Breaker
from isthmus.service.broker import Broker
from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.settings import (
    BreakerSettings,
    BrokerSettings,
    NodeSettings,
    Policy,
    RequestLimits,
    SiloAddress,
    Source,
)
from silo_stand_in import Loop, StandIn

NAMES = ("east", "north", "west")


class Queueing(StandIn):
    """A silo with one processor: searches wait for each other, `seconds` each, unless abandoned."""

    def __init__(self, name, seconds):
        super().__init__(name)
        self.seconds, self.line, self.done, self.given_up = seconds, asyncio.Lock(), 0, 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = (await receive()).get("body", b"")
        gone = asyncio.create_task(receive())
        async with self.line:
            if gone.done():
                self.given_up += 1
                return
            await asyncio.sleep(self.seconds)
            self.done += 1
        gone.cancel()
        status, kind, content = self.reply(scope["path"], body)
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


@contextmanager
def federation(folder, seconds):
    """A broker that anybody may ask, and three silos with one processor each."""
    loop = Loop()
    silos = {name: Queueing(name, seconds) for name in NAMES}
    try:
        ports = {name: loop.serve(silo).port for name, silo in silos.items()}
        settings = BrokerSettings(
            folder=folder,
            silos={name: SiloAddress(f"http://127.0.0.1:{port}") for name, port in ports.items()},
            deadline_ms=700,
            share_statistics=False,
            breaker=BreakerSettings(failures=3, pause=30.0, longest=30.0),
            limits=RequestLimits(per_second=1000, burst=1000),
        )

        async def made():
            return Broker(settings)

        broker = loop.run(made())
        server = loop.serve(broker_app(broker), lifespan="on")
        yield broker, f"http://127.0.0.1:{server.port}", silos
    finally:
        loop.close()


def ask_and_go(port, body):
    """A search whose asker does not wait."""
    head = f"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        time.sleep(0.01)


def test_sixty_quick_enters_open_no_breaker(tmp_path, soak_count):
    with federation(tmp_path, seconds=0.05) as (broker, url, silos):
        body = json.dumps({"query": "tides"}).encode()
        for _ in range(soak_count(60, 300)):
            ask_and_go(int(url.rpartition(":")[2]), body)
        reply = httpx.post(f"{url}/v1/search", json={"query": "tides", "deadline_ms": 10_000}, timeout=60)
        assert [each["status"] for each in reply.json()["silos"]] == ["answered"] * 3
        assert [silo.breaker.state for silo in broker.silos.values()] == ["closed"] * 3
        assert not any(silo.breaker.on_trial for silo in broker.silos.values())
        # what nobody waits for is not done; how much of it had ended by then is the machine's affair
        assert sum(silo.given_up for silo in silos.values()) >= 10


def test_a_queue_of_our_own_opens_no_breaker(tmp_path):
    """Forty people at once, who all wait: most get late answers, and the silos are not to blame."""
    with federation(tmp_path, seconds=0.06) as (broker, url, _), ThreadPoolExecutor(40) as people:
        replies = list(
            people.map(
                lambda n: httpx.post(f"{url}/v1/search", json={"query": f"tides {n}"}, timeout=20), range(40)
            )
        )
        statuses = [each["status"] for reply in replies for each in reply.json()["silos"]]
        assert set(statuses) == {"answered", "late"}
        assert [silo.breaker.state for silo in broker.silos.values()] == ["closed"] * 3
        assert not any(silo.breaker.on_trial for silo in broker.silos.values())


@pytest.mark.parametrize(("status", "named"), [(429, "refused"), (504, "late")])
def test_a_silo_that_says_it_is_busy_is_not_left_alone(tmp_path, status, named):
    """As a node with too many requests at once, or with no time before the deadline, does."""
    with federation(tmp_path, seconds=0.0) as (_, url, silos):
        silos["east"].behave = (status, b"application/problem+json", b"{}")
        for _ in range(5):
            east = httpx.post(f"{url}/v1/search", json={"query": "tides"}).json()["silos"][0]
            assert east["status"] == named
        silos["east"].behave = "well"
        east = httpx.post(f"{url}/v1/search", json={"query": "tides"}).json()["silos"][0]
        assert east["status"] == "answered"


def test_a_silo_that_answers_nobody_is_still_left_alone():
    now = [0.0]
    breaker = Breaker(BreakerSettings(failures=2), clock=lambda: now[0])
    breaker.responded()
    now[0] = 1.0
    for _ in range(2):
        assert breaker.admits()
        breaker.late(since=0.5)
    assert breaker.state == "open"


@pytest.fixture
def node(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "tide.txt").write_text("tide and wave")
    settings = NodeSettings(
        silo="north",
        folder=tmp_path / "north",
        peers={"anonymous": Policy(search=True)},
        sources=(Source("folder", tmp_path / "texts"),),
    )
    with Node(settings) as made:
        until = time.monotonic() + 120
        while not (made.ready().ready and len(made.index.snapshot)) and time.monotonic() < until:
            time.sleep(0.02)
        yield made


class Slow:
    """A searcher whose stages wait for a signal."""

    def __init__(self, searcher):
        self.searcher, self.go, self.begun, self.finished = searcher, threading.Event(), 0, 0

    def search(self, asked, *, check, **options):
        self.begun += 1
        self.go.wait(120)
        check()
        self.finished += 1
        return self.searcher.search(asked, check=check, **options)


def test_a_node_drops_searches_that_nobody_waits_for(node):
    """Those that wait for a processor are never begun, and those that have begun end at their next stage."""
    loop = Loop()
    node.searcher = slow = Slow(node.searcher)
    try:
        port = loop.serve(node_app(node)).port
        body = json.dumps({"query": "tide"}).encode()
        for _ in range(30):
            ask_and_go(port, body)
        with ThreadPoolExecutor(1) as person:
            url = f"http://127.0.0.1:{port}/v1/search"
            patient = person.submit(
                httpx.post, url, json={"query": "tide"}, headers=message_header(), timeout=30
            )
            time.sleep(0.5)
            slow.go.set()
            assert patient.result().json()["hits"]
        assert slow.begun <= max(2, os.cpu_count() or 1) + 1
        assert slow.finished == 1
    finally:
        slow.go.set()
        loop.close()
