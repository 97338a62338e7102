"""Streamed searches as a way around what ordinary ones are bound by: limits, the audit log, secrets."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from isthmus.errors import ServiceError, SiloUnavailable
from isthmus.service import client, wire
from isthmus.service.audit_log import audit_lines
from isthmus.service.broker import Broker
from isthmus.service.client import AsyncClient
from isthmus.service.streaming import search_events
from searching_silos import NORTH, OPEN, searching

LIMIT = 0.5


@pytest.fixture(scope="module")
def silos(tmp_path_factory):
    policies = {"north": replace(OPEN, most_seen=LIMIT), "south": OPEN}
    folder = tmp_path_factory.mktemp("streaming")
    (folder / "north").mkdir(mode=0o700)
    key = folder / "north" / "audit.key"  # what was seen is estimated under it
    key.write_text("17" * 64 + "\n")
    key.chmod(0o600)
    with searching(folder, policies) as made:
        yield made


def streamed(federation, **body):
    """The names and data of all events."""
    reply = federation.post("/v1/search/stream", **body)
    assert reply.status_code == 200, reply.text
    blocks = [block.split("\n") for block in reply.text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def entries(silos, name):
    lines = audit_lines(silos.nodes[name].settings.folder)
    return [line for line in lines if line.content["action"] == "shown"]


def test_every_streamed_search_is_in_the_audit_log_once(silos):
    before = len(entries(silos, "south"))
    events = streamed(silos, query="moon phase", silos=["south"])
    assert events[-1][1]["hits"]
    after_stream = len(entries(silos, "south"))
    silos.search("moon phase", silos=["south"])
    assert len(entries(silos, "south")) - after_stream == after_stream - before == 1


def test_digests_by_which_copies_are_folded_are_in_no_event(silos):
    events = streamed(silos, query="spring tide report", k=2)
    hits = [hit for _, data in events for hit in data.get("hits") or ()]
    assert hits
    assert not any(hit["digest"] for hit in hits)


def test_whoever_streams_sees_no_more_of_a_silo_than_its_policy_shows(silos):
    shown, states = set(), []
    for offset in range(0, 40, 5):
        events = streamed(silos, query="tidal power", silos=["north"], k=5, offset=offset)
        shown |= {hit["document"] for _, data in events for hit in data.get("hits") or ()}
        states += [data["status"] for name, data in events if name == "silo"]
    assert states[0] == "answered"
    assert states[-1] == "refused"
    assert len(shown) <= LIMIT * len(NORTH)
    plain = silos.search("tidal power", silos=["north"], k=40)
    assert plain["silos"][0]["status"] == "refused"


def test_a_link_that_somebody_follows_does_not_search_in_their_name(silos):
    before = len(entries(silos, "south"))
    asked = {"query": "moon phase", "silos": ["south"]}
    followed = {"sec-fetch-mode": "navigate", "sec-fetch-site": "none", "sec-fetch-dest": "document"}
    assert silos.http.get("/v1/search/stream", params=asked, headers=followed).status_code == 403
    assert len(entries(silos, "south")) == before
    source = {"sec-fetch-mode": "cors", "sec-fetch-site": "same-origin", "accept": "text/event-stream"}
    assert silos.http.get("/v1/search/stream", params=asked, headers=source).status_code == 200
    assert len(entries(silos, "south")) == before + 1


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", "http://127.0.0.1:1"])
def test_a_page_elsewhere_in_a_browser_that_says_no_more_than_its_origin(silos, origin):
    """Browsers before 2023 send no `Sec-Fetch-Site`, but `Origin` with every EventSource of another site."""
    before = len(entries(silos, "south"))
    asked = {"query": "moon phase", "silos": ["south"]}
    reply = silos.http.get("/v1/search/stream", params=asked, headers={"origin": origin})
    assert reply.status_code == 403
    assert len(entries(silos, "south")) == before
    own = {"origin": str(silos.http.base_url).rstrip("/")}
    assert silos.http.get("/v1/search/stream", params=asked, headers=own).status_code == 200


def test_a_search_that_fails_after_its_caller_has_gone_says_nothing_of_the_query(caplog):
    class Failing:
        async def search(self, request, person, *, progress):
            progress(wire.SiloProgress(silo="north", status="answered"))
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ValueError(f"hush: {request.query}") from None

    async def gone():
        events = search_events(Failing(), wire.Search(query="tumour"), None, lambda answer: None)
        assert (await anext(events)).startswith(b"event: silo\n")
        await events.aclose()
        del events
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(gone())
    assert not caplog.records, caplog.text


def test_a_stream_of_many_silos_costs_a_few_searches():
    merges, events = [], []
    merging = SimpleNamespace(hits=[])
    counting = SimpleNamespace(
        _merged=lambda question, statuses, answers: (merges.append(len(answers)) or merging, 0)
    )

    async def answer(name, turn):
        await turn.wait()
        status = wire.SiloStatus(silo=name, status="answered")
        return status, wire.NodeAnswer(silo=name, hits=[], documents=1, statistics="", took_ms=1)

    async def stream(silos):
        turns = [asyncio.Event() for _ in range(silos)]
        tasks = {str(at): asyncio.create_task(answer(str(at), turn)) for at, turn in enumerate(turns)}
        Broker._report(counting, events.append, [], tasks, None)
        for turn, task in zip(turns, tasks.values(), strict=True):
            turn.set()
            await task
        await asyncio.sleep(0)

    asyncio.run(stream(5))
    assert merges == [1, 2, 3, 4], "of a few silos everyone's hits are told at once"
    merges.clear()
    asyncio.run(stream(400))
    assert len(events) == 405
    assert sum(merges) < 6 * 400
    assert len(merges) < 30


def test_a_stream_without_end_is_left(monkeypatch):
    """A broker that sends a little for ever holds nobody: what counts is the time waited in all."""
    clock = itertools.count(step=5.0)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    async def parts():
        while True:
            yield b": \n\n"

    @asynccontextmanager
    async def endless(method, path, payload, seconds):
        yield client._Parts(200, httpx.Headers(), parts(), seconds)

    async def listen():
        async with AsyncClient("http://broker") as broker:
            monkeypatch.setattr(broker._transport, "stream", endless)
            async for _ in broker.search_stream("tides"):
                pass

    with pytest.raises(SiloUnavailable, match="does not answer in time"):
        asyncio.run(listen())


def test_events_that_come_letter_by_letter_cost_no_more_than_their_length():
    """The processor's time grows as the length does, not as its square."""
    event = b'event: silo\ndata: "%s"\n\n'

    async def seconds(length):
        async def letters():
            for at in range(len(text)):
                yield text[at : at + 1]

        text, began = event % (b"x" * length), time.process_time()
        ((name, data),) = [each async for each in client._events(letters())]
        assert (name, len(data)) == (b"silo", length + 2)
        return time.process_time() - began

    asyncio.run(seconds(1_000))
    assert asyncio.run(seconds(200_000)) < 40 * max(0.02, asyncio.run(seconds(20_000)))


@pytest.mark.parametrize("data", [b"x", b"{}", b'{"silo": "a\x00b"', b"[" * 5_000, b'"\xff"', b""])
def test_events_that_are_none_are_an_error_of_ours(data):
    async def one():
        yield b"event: silo\ndata: " + data + b"\n\n"

    async def listen():
        async with AsyncClient("http://broker") as broker:
            async for _, text in client._events(one()):
                broker._read(client.HttpReply(200, "", text), wire.SiloProgress)

    with pytest.raises(ServiceError, match="in a form that"):
        asyncio.run(listen())
