"""Connections of a server: an answer is one piece, and who hangs up is not worked for any longer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from isthmus.service.connections import server
from isthmus.service.limits import GONE, NOTE, Protect, Surface
from isthmus.service.metrics import Metrics
from isthmus.service.security import Gate
from isthmus.service.settings import RequestLimits

HEAD = b"POST /v1/search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ASK = HEAD + b"content-length: 2\r\n\r\n{}"


class Work:
    """An app that answers at once, or waits for ever; what became of the requests."""

    def __init__(self) -> None:
        self.began, self.ended = asyncio.Event(), asyncio.Event()
        self.patient, self.scope, self.statuses = False, {}, []
        self.bodies = [b"whole"]

    async def __call__(self, scope, receive, send):
        self.scope = scope
        assert scope[NOTE] == {}
        assert (await receive())["body"] == b"{}"
        self.began.set()
        try:
            if self.patient:
                await asyncio.Event().wait()
        finally:
            self.ended.set()
        size = str(sum(map(len, self.bodies))).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", size)]})
        for body in self.bodies:
            await send({"type": "http.response.body", "body": body, "more_body": body is not self.bodies[-1]})

    def observe(self, path, status, seconds):
        self.statuses.append(status)


@asynccontextmanager
async def serving(work):
    app = Protect(
        work,
        gate=Gate(strangers=["search"]),
        limits=RequestLimits(),
        surface=Surface(abandoned=("/v1/search",)),
        observe=work.observe,
    )
    running = server(app, port=0)
    running.config.lifespan = "off"
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    try:
        yield running.servers[0].sockets[0].getsockname()[1]
    finally:
        running.should_exit = True
        await task


class Pieces(asyncio.Protocol):
    """What a client receives, piece by piece."""

    def __init__(self) -> None:
        self.pieces, self.whole = [], asyncio.Event()

    def data_received(self, data):
        self.pieces.append(data)
        if b"".join(self.pieces).endswith(b"whole"):
            self.whole.set()


async def asked(port, client=None):
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(lambda: client or Pieces(), "127.0.0.1", port)
    transport.write(ASK)
    return transport, client


@pytest.mark.parametrize("bodies", [[b"whole"], [b"a", b"b", b"c" * 200_000, b"whole"]])
def test_head_and_body_leave_in_one_write(bodies, monkeypatch):
    writes = []

    async def trial():
        work = Work()
        work.bodies = bodies
        async with serving(work) as port:
            from isthmus.service import connections

            plain = connections._OneWrite.flush

            def flush(self):
                if self._waiting:
                    writes.append(list(self._waiting))
                plain(self)

            monkeypatch.setattr(connections._OneWrite, "flush", flush)
            for _ in range(2):  # the second over a connection of its own
                transport, client = await asked(port)
                async with asyncio.timeout(10):
                    await client.whole.wait()
                transport.close()
                assert b"".join(client.pieces).endswith(b"\r\n\r\n" + b"".join(bodies))
        assert work.statuses == [200, 200]

    asyncio.run(trial())
    if len(bodies) == 1:
        assert [len(each) for each in writes] == [2, 2]
        assert writes[0][0].startswith(b"HTTP/1.1 200")


def test_who_hangs_up_is_not_worked_for():
    async def trial():
        work = Work()
        async with serving(work) as port:
            work.patient = True
            transport, _ = await asked(port)
            async with asyncio.timeout(10):
                await work.began.wait()
                assert not work.ended.is_set()
                assert not work.scope[GONE].is_set
                transport.abort()
                await work.ended.wait()
                while not work.statuses:
                    await asyncio.sleep(0.01)
            assert work.scope[GONE].is_set
            assert work.statuses == [499]
            work.patient = False
            transport, client = await asked(port)  # the server goes on
            async with asyncio.timeout(10):
                await client.whole.wait()
            transport.close()
        assert work.statuses == [499, 200]

    asyncio.run(trial())


def test_a_body_that_comes_in_parts_is_awaited():
    async def trial():
        work = Work()
        async with serving(work) as port:
            loop, client = asyncio.get_running_loop(), Pieces()
            transport, _ = await loop.create_connection(lambda: client, "127.0.0.1", port)
            transport.write(ASK[:-1])
            await asyncio.sleep(0.1)
            assert not work.began.is_set()
            transport.write(ASK[-1:])
            async with asyncio.timeout(10):
                await client.whole.wait()
            transport.close()
        assert work.statuses == [200]

    asyncio.run(trial())


def test_buckets_of_a_histogram_count_all_that_took_no_longer():
    metrics = Metrics()
    times = metrics.histogram("seconds", "Times.")
    for seconds in (0.005, 0.006, 0.03, 20.0):
        times.observe(seconds)
    lines = dict(line.rsplit(" ", 1) for line in metrics.text().splitlines() if not line.startswith("#"))
    buckets = {end: lines[f'seconds_bucket{{le="{end}"}}'] for end in ("0.005", "0.01", "0.05", "10", "+Inf")}
    assert buckets == {"0.005": "1", "0.01": "2", "0.05": "3", "10": "3", "+Inf": "4"}
    assert (lines["seconds_count"], lines["seconds_sum"]) == ("4", "20.041")
