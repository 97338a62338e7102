"""A search as server-sent events: in order, equal to the ordinary one, with its rights, and ended early."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time

import httpx
import pytest

from isthmus.errors import Refused, ServiceError, SiloUnavailable
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.client import AsyncClient, Client
from isthmus.service.security import ApiKeys
from isthmus.service.settings import BreakerSettings, BrokerSettings, RequestLimits, SiloAddress
from silo_stand_in import Loop, StandIn

STREAM = "/v1/search/stream"
PATIENCE = 30.0


class Held(StandIn):
    """A silo whose searches wait until the test lets them go on, or are given up."""

    def __init__(self, name, probabilities):
        super().__init__(name, probabilities)
        self.go, self.waiting, self.given_up = threading.Event(), threading.Event(), threading.Event()
        self.go.set()

    async def __call__(self, scope, receive, send):
        if scope.get("path") != "/v1/search" or self.go.is_set():
            return await super().__call__(scope, receive, send)
        message = await receive()
        self.waiting.set()
        gone = asyncio.ensure_future(receive())
        while not self.go.is_set() and not gone.done():
            await asyncio.sleep(0.005)
        if gone.done():
            self.given_up.set()
            return None
        gone.cancel()

        async def again():
            return message

        return await super().__call__(scope, again, send)


class Site:
    """A quick silo, one that is held, one that is down, and a broker with two keys."""

    def __init__(self, folder):
        self.loop = Loop()
        self.quick, self.held = StandIn("quick", (0.7, 0.2)), Held("held", (0.9, 0.6))
        ports = {silo.name: self.loop.serve(silo).port for silo in (self.quick, self.held)}
        gone = self.loop.serve(StandIn("down"))
        ports["down"] = gone.port
        self.loop.stop(gone)
        keys = ApiKeys(folder / "api-keys.json")
        self.token = keys.add("ada", scopes=["search"])
        self.other = keys.add("bob", scopes=["feedback"])
        self.settings = BrokerSettings(
            folder=folder,
            keys=keys.path,
            silos={name: SiloAddress(f"http://127.0.0.1:{port}") for name, port in ports.items()},
            deadline_ms=20_000,
            share_statistics=False,
            breaker=BreakerSettings(failures=1000),
            limits=RequestLimits(per_second=1000, burst=1000),
        )
        self.broker = self.loop.run(self._made())
        self.app = broker_app(self.broker)
        self.url = f"http://127.0.0.1:{self.loop.serve(self.app, lifespan='on').port}"
        bearer = {"authorization": f"Bearer {self.token}"}
        self.http = httpx.Client(base_url=self.url, headers=bearer, timeout=60)

    async def _made(self):
        return Broker(self.settings)

    def events(self, **body):
        with self.http.stream("POST", STREAM, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            return list(events_of(reply))


def events_of(reply):
    """Names and data of events as they come."""
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def until(what):
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = Site(tmp_path_factory.mktemp("streaming"))
    yield made
    made.http.close()
    made.loop.close()


@pytest.fixture
def holding(site):
    site.held.go.clear()
    for event in (site.held.waiting, site.held.given_up):
        event.clear()
    yield site.held
    site.held.go.set()


def test_a_silo_is_told_of_as_it_answers_with_the_best_hits_so_far(site, holding):
    body = {"query": "tides", "silos": ["quick", "held"], "threshold": 0.5}
    with site.http.stream("POST", STREAM, json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-store"
        events = events_of(reply)
        name, first = next(events)
        assert (name, first["silo"], first["status"], first["count"]) == ("silo", "quick", "answered", 2)
        assert [hit["document"] for hit in first["hits"]] == ["quick/0"]  # the other is below the threshold
        assert first["took_ms"] >= 0
        holding.go.set()
        (name, second), (last, answer) = list(events)
    assert (name, second["silo"], second["hits"]) == ("silo", "held", None)  # the answer follows
    assert last == "answer"
    assert [hit["document"] for hit in answer["hits"]] == ["held/0", "quick/0", "held/1"]


@pytest.mark.parametrize(
    "body",
    [
        {"query": "tides"},
        {"query": "tides silo:quick", "k": 1, "explain": True},
        {"query": "tides", "threshold": 0.95},
        {"query": "tides", "offset": 2, "facets": True, "suggest": True},
    ],
)
def test_the_last_event_is_the_ordinary_answer(site, body):
    *silos, (name, streamed) = site.events(**body)
    with site.http.stream("GET", STREAM, params=body) as reply:
        *_, (_, by_address) = events_of(reply)
    plain = site.http.post("/v1/search", json=body).json()
    assert name == "answer"
    assert sorted(each["silo"] for _, each in silos) == sorted(each["silo"] for each in plain["silos"])
    for answer in (streamed, by_address, plain):
        del answer["took_ms"]
        for each in answer["silos"]:
            each["took_ms"] = None
    assert streamed == by_address == plain


def test_a_silo_that_is_down_is_an_event(site):
    events = site.events(query="tides", silos=["quick", "down"])
    states = {each["silo"]: each["status"] for name, each in events if name == "silo"}
    assert states == {"quick": "answered", "down": "down"}
    assert events[-1][0] == "answer"


def test_a_silo_that_is_late_is_an_event_before_the_answer(site, holding):
    *silos, (last, answer) = site.events(query="tides", silos=["held"], deadline_ms=200)
    assert [(name, each["silo"], each["status"]) for name, each in silos] == [("silo", "held", "late")]
    assert (last, answer["hits"]) == ("answer", [])


def test_a_silo_that_is_left_alone_is_told_of_first(site, monkeypatch):
    monkeypatch.setattr(site.broker.silos["down"].breaker, "admits", lambda: False)
    (name, first), *_ = site.events(query="tides")
    assert (name, first["silo"]) == ("silo", "down")
    assert "not asked" in first["detail"]


def test_what_is_refused_is_refused_as_in_the_ordinary_search(site):
    post = site.http.post
    for headers in ({"authorization": ""}, {"authorization": f"Bearer {site.other}"}):
        streamed = post(STREAM, json={"query": "tides"}, headers=headers)
        plain = post("/v1/search", json={"query": "tides"}, headers=headers)
        assert streamed.status_code == plain.status_code in (401, 403)
        assert streamed.json() == plain.json()
    for wrong in ({}, {"query": ""}, {"query": "tides", "k": 1000}, {"query": "tides", "person": "eve"}):
        assert post(STREAM, json=wrong).status_code == 422
        assert site.http.get(STREAM, params=wrong).status_code == 422
    elsewhere = {"sec-fetch-site": "cross-site"}
    assert site.http.get(STREAM, params={"query": "tides"}, headers=elsewhere).status_code == 403
    ((name, problem),) = site.events(query="tides", silos=["nowhere"])
    assert name == "error"
    assert problem == post("/v1/search", json={"query": "tides", "silos": ["nowhere"]}).json()
    assert problem["status"] == 404


def test_a_failure_within_is_an_event_and_says_nothing_of_the_query(site, monkeypatch, caplog):
    def broken(*arguments):
        raise ValueError("hush: tides")

    monkeypatch.setattr(site.broker, "_outcomes", broken)
    *_, (name, problem) = site.events(query="tides")
    assert (name, problem["status"]) == ("error", 500)
    assert "hush" not in str(problem) + caplog.text
    assert "ValueError at" in caplog.text


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_whoever_goes_away_ends_the_search(site, holding, method):
    sent = {"params": {"query": "tides"}} if method == "GET" else {"json": {"query": "tides"}}
    with (
        httpx.Client(base_url=site.url, headers=site.http.headers, timeout=60) as http,
        http.stream(method, STREAM, **sent) as reply,
    ):
        assert next(events_of(reply))[0] == "silo"
        assert holding.waiting.wait(PATIENCE)
    assert holding.given_up.wait(PATIENCE)  # the silo is no longer asked
    until(lambda: not site.app._running)  # and the caller has room for the next request


def test_the_access_log_has_it_without_the_query(site, caplog):
    with caplog.at_level("INFO", logger="isthmus.access"):
        with site.http.stream("GET", STREAM, params={"query": "hush", "silos": ["quick"]}) as reply:
            list(events_of(reply))
        until(lambda: any('"hits"' in line for line in caplog.messages))
    (record,) = (json.loads(line) for line in caplog.messages if '"hits"' in line)
    assert (record["path"], record["status"], record["hits"]) == (STREAM, 200, 2)
    assert record["silos"] == {"quick": "answered"}
    assert "hush" not in caplog.text


class TestClients:
    async def streamed(self, site, **options):
        async with AsyncClient(site.url, key=site.token) as broker:
            return [event async for event in broker.search_stream("tides", **options)]

    def test_both_clients_iterate_over_silos_and_end_with_the_answer(self, site):
        options = {"silos": ["quick", "held"], "threshold": 0.5}
        with Client(site.url, key=site.token) as broker:
            *blocking, answer = broker.search_stream("tides", **options)
            assert "-> 'Iterator[" in str(inspect.signature(broker.search_stream))
            assert answer.hits == broker.search("tides", **options).hits
        *events, last = asyncio.run(self.streamed(site, **options))
        assert {each.silo for each in events} == {each.silo for each in blocking} == {"quick", "held"}
        assert last.hits == answer.hits

    def test_what_is_refused_is_an_error(self, site):
        with Client(site.url, key=site.other) as broker, pytest.raises(Refused, match="scope search"):
            list(broker.search_stream("tides"))
        with pytest.raises(ServiceError, match="only names that there are"):
            asyncio.run(self.streamed(site, silos=["nowhere"]))

    def test_who_stops_listening_ends_the_search(self, site, holding):
        with Client(site.url, key=site.token) as broker:
            events = broker.search_stream("tides")
            next(events)
            assert holding.waiting.wait(PATIENCE)
            events.close()
            assert holding.given_up.wait(PATIENCE)

    def test_a_cancelled_search_is_ended_in_the_silos(self, site, holding):
        async def cancelled():
            async with AsyncClient(site.url, key=site.token) as broker:
                search = asyncio.create_task(broker.search("tides"))
                await asyncio.to_thread(holding.waiting.wait, PATIENCE)
                search.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await search

        asyncio.run(cancelled())
        assert holding.given_up.wait(PATIENCE)

    def test_a_stream_that_breaks_off_is_an_error(self, site):
        async def broken_off(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            event = b'event: silo\ndata: {"silo": "quick", "status": "answered"}\n\nevent: ans'
            await send({"type": "http.response.body", "body": event})

        server = site.loop.serve(broken_off)
        with Client(f"http://127.0.0.1:{server.port}") as broker:
            events = broker.search_stream("tides")
            assert next(events).silo == "quick"
            with pytest.raises(SiloUnavailable, match="ended the stream before the answer"):
                next(events)
        site.loop.stop(server)
