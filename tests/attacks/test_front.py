"""Strangers at the door of a broker and of a node: what they send must not cost those who have a key."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest
import uvloop

from isthmus.service import certificates
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.certificates import Authority
from isthmus.service.limits import Protect, Surface
from isthmus.service.security import ApiKeys, Gate
from isthmus.service.settings import BrokerSettings, RequestLimits, SiloAddress
from silo_stand_in import Loop, StandIn

ELSEWHERE = "127.0.0.2"
"""Where the attacker connects from; the loopback network has room for both."""
QUICK = {"header_seconds": 0.6, "idle_seconds": 0.6}


class Front:
    """A broker on a real socket in front of one silo that answers, and one person who is signed in."""

    def __init__(self, folder, **limits):
        self.loop, self.silo = Loop(), StandIn("north")
        self.keys = ApiKeys(folder / "api-keys.json")
        self.token = self.keys.add("ada", scopes=["search"])
        behind = self.loop.serve(self.silo)
        self.limits = RequestLimits(per_second=1000, burst=1000, **limits)
        self.settings = BrokerSettings(
            folder=folder,
            keys=folder / "api-keys.json",
            silos={"north": SiloAddress(f"http://127.0.0.1:{behind.port}")},
            deadline_ms=10_000,
            share_statistics=False,
            limits=self.limits,
        )
        self.broker = self.loop.run(self._made())
        self.app = broker_app(self.broker)
        self.server = self.loop.serve(self.app, lifespan="on", limits=self.limits)
        self.port = self.server.port
        self.url = f"http://127.0.0.1:{self.port}"

    async def _made(self):
        return Broker(self.settings)

    def connect(self, address=ELSEWHERE):
        return socket.create_connection(("127.0.0.1", self.port), timeout=15, source_address=(address, 0))

    def search(self, address="127.0.0.1", **options):
        """A search over a connection of its own."""
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(base_url=self.url, transport=transport, timeout=15) as client:
            headers = {"x-api-key": self.token}
            return client.post("/v1/search", json={"query": "tides"}, headers=headers, **options)


@contextmanager
def front(folder, **limits):
    made = Front(folder, **limits)
    try:
        yield made
    finally:
        made.loop.close()


def closed(connection, seconds=10.0):
    """What came back until the other side closed; fails if it did not within these seconds."""
    connection.settimeout(seconds)
    read = b""
    try:
        while part := connection.recv(65536):
            read += part
    except ConnectionError:
        pass
    except TimeoutError:
        pytest.fail(f"still open after {seconds} s")
    return read


def still_open(connections):
    """Those that the other side has not closed."""
    alive = 0
    for each in connections:
        each.setblocking(False)
        try:
            alive += each.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            alive += 1
        except ConnectionError:
            pass
    return alive


def few_open(connections, most, seconds=10.0):
    """Whether at most so many are open, soon."""
    until = time.monotonic() + seconds
    while still_open(connections) > most and time.monotonic() < until:
        time.sleep(0.02)
    return still_open(connections) <= most


def answered(connections, least, seconds=5.0):
    """Whether at least so many have an answer or their end, well before a body is given up by itself."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ready, _, _ = select.select(connections, [], [], 0)
        if len(ready) >= least:
            return True
        time.sleep(0.02)
    return False


def drip(connection, part, seconds=10.0):
    """Send a part again and again, until the other side closes: whether it did within these seconds."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            connection.sendall(part)
            time.sleep(0.05)
    except ConnectionError:
        return True
    return False


def stalled_body(path="/v1/session"):
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return (head + "content-length: 100\r\n\r\n{").encode()


@pytest.mark.parametrize("address", [ELSEWHERE, "127.0.0.1"])
def test_stalled_bodies_do_not_shut_out_the_signed_in(tmp_path, address, soak_count):
    """Not even from the same address, as behind a proxy; and others can still sign in."""
    with front(tmp_path) as site, ExitStack() as stack:
        for _ in range(soak_count(100, 1000)):
            stack.enter_context(site.connect(address)).sendall(stalled_body())
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert site.search().status_code == 200
            signed_in = httpx.post(f"{site.url}/v1/session", json={"key": site.token})
            assert signed_in.status_code == 204


def test_a_slow_body_of_somebody_with_a_key_is_not_given_up_for_strangers(tmp_path):
    """However many of them send nothing, from however many addresses."""
    body = json.dumps({"query": "tides"}).encode()
    head = b"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    head += b"connection: close\r\nx-api-key: %s\r\ncontent-length: %d\r\n\r\n"
    with front(tmp_path, concurrent=8) as site, ExitStack() as stack:
        ada = stack.enter_context(site.connect("127.0.0.1"))
        ada.sendall(head % (site.token.encode(), len(body)) + body[:5])
        for address in (ELSEWHERE, "127.0.0.3", "127.0.0.4"):
            stalled = [stack.enter_context(site.connect(address)) for _ in range(20)]
            for each in stalled:
                each.sendall(stalled_body())
            assert answered(stalled, 16)  # all but a quarter of the strangers' slots have made room
        ada.sendall(body[5:])
        assert closed(ada).startswith(b"HTTP/1.1 200 ")


def test_endless_headers_are_refused(tmp_path):
    with front(tmp_path) as site, site.connect() as line, site.connect() as lines:
        for connection, part in ((line, b"x" * 4096), (lines, b"x-filler: " + b"y" * 4000 + b"\r\n")):
            connection.sendall(b"GET /v1/health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-endless: ")
            sent = 0
            try:
                while sent < 4 << 20:
                    connection.sendall(part)
                    sent += len(part)
                    time.sleep(0.001)
            except ConnectionError:
                pass
            assert sent < 1 << 20
        assert site.search().status_code == 200


def test_a_head_too_large_in_one_piece_is_refused(tmp_path):
    with front(tmp_path) as site:
        for head in (b"x: " + b"y" * 20_000 + b"\r\n", b"a: b\r\n" * 150):
            with site.connect() as connection:
                connection.sendall(b"GET /v1/health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + head + b"\r\n")
                assert closed(connection).startswith(b"HTTP/1.1 431 ")


def test_partial_headers_are_given_up(tmp_path):
    """However often another byte comes."""
    with front(tmp_path, **QUICK) as site, site.connect() as silent, site.connect() as slow:
        slow.sendall(b"GET /v1/health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
        assert drip(slow, b"y")
        assert closed(silent) == b""


def test_a_connection_that_waits_is_closed(tmp_path):
    """Between requests, with blank lines between them, and with a body that never ends after its answer."""
    request = b"GET /v1/health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with front(tmp_path, **QUICK) as site:
        with site.connect() as idle:
            idle.sendall(request)
            assert closed(idle).startswith(b"HTTP/1.1 200")
        unread = stalled_body("/v1/search").replace(b"100", b"10000000")  # refused at once: no key
        for first, more in ((request, b"\r\n"), (unread, b"x")):
            with site.connect() as blank:
                blank.sendall(first)
                assert drip(blank, more)


def test_connections_of_one_address_are_bounded_and_shut_nobody_out(tmp_path, soak_count):
    with front(tmp_path, connections_per_address=20, connections=60) as site, ExitStack() as stack:
        count = soak_count(40, 400)
        for address in (ELSEWHERE, "127.0.0.1", "127.0.0.3", "127.0.0.4"):
            silent = [stack.enter_context(site.connect(address)) for _ in range(count)]
            assert site.search(address).status_code == 200
            assert few_open(silent, 20)
        assert len(site.server.server_state.connections) <= 60


def test_who_is_signed_in_is_not_sent_away_for_strangers(tmp_path):
    with front(tmp_path, connections_per_address=4, connections=8) as site, ExitStack() as stack:
        headers = {"x-api-key": site.token}
        with httpx.Client(base_url=site.url, headers=headers, timeout=15) as ada:
            assert ada.get("/v1/me").is_success
            own = next(iter(site.server.server_state.connections))
            for address in ("127.0.0.1", ELSEWHERE):
                silent = [stack.enter_context(site.connect(address)) for _ in range(20)]
                assert few_open(silent, 4)  # the door has seen them all, and sent somebody away for each
            assert own in site.server.server_state.connections
            assert ada.get("/v1/me").is_success


def test_pipelined_requests_are_bounded(tmp_path):
    with front(tmp_path) as site, site.connect() as connection:
        site.silo.delay = 0.5
        body = json.dumps({"query": "tides"}).encode()
        head = b"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        asked = (
            head + b"x-api-key: %s\r\ncontent-length: %d\r\n\r\n" % (site.token.encode(), len(body)) + body
        )
        connection.sendall(asked + b"GET / HTTP/1.1\r\n\r\n" * 2000)
        closed(connection)
        assert site.search().status_code == 200


def test_garbage_is_refused_at_once(tmp_path):
    with front(tmp_path) as site:
        for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 100, b"SSH-2.0-x\r\n", b"GET\r\n\r\n"):
            with site.connect() as connection:
                connection.sendall(garbage)
                assert closed(connection).startswith(b"HTTP/1.1 400 ")


PAGE = 16 << 20
"""Bytes of an answer that no buffer on the way can take."""


class LargePage:
    """An app with a large open page and a small one, and how many requests it had at once."""

    def __init__(self):
        self.running = self.most = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            part = b"x" * (PAGE if scope["path"] == "/large" else 1)
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": part})  # waits until the first is taken
        finally:
            self.running -= 1


@contextmanager
def page(folder, **limits):
    """An app whose pages strangers may read, and one key; yields the server, the app and the key."""
    keys = ApiKeys(folder / "api-keys.json")
    token = keys.add("ada", scopes=["search"])
    rules = RequestLimits(per_second=1000, burst=1000, **limits)
    inner = LargePage()
    app = Protect(inner, gate=Gate(keys=keys), limits=rules, surface=Surface(open=("/large", "/small")))
    loop = Loop()
    try:
        yield loop.serve(app, limits=rules), inner, token
    finally:
        loop.close()


def ask_and_never_read(port, path="/large", header=""):
    """A request whose answer nobody takes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{header}\r\n".encode())
    assert connection.recv(1)  # the answer is on its way
    return connection


def test_answers_that_strangers_never_read_shut_nobody_out(tmp_path):
    """Their slots go to whoever comes next."""
    with page(tmp_path, strangers=4, header_seconds=60) as (server, app, _), ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(ask_and_never_read(server.port))
            assert httpx.get(f"http://127.0.0.1:{server.port}/small").status_code == 200
        assert app.most <= 5  # four, and one that is just leaving


@pytest.mark.parametrize("closing", ["", "connection: close\r\n"])
def test_an_answer_that_nobody_reads_is_given_up(tmp_path, closing):
    """Also one of somebody with a key: nothing of it is kept, not even the connection."""
    with page(tmp_path, header_seconds=0.5) as (server, _, token), ExitStack() as stack:
        for header in (closing, f"{closing}x-api-key: {token}\r\n"):
            stack.enter_context(ask_and_never_read(server.port, header=header))
        until = time.monotonic() + 60
        while server.server_state.connections and time.monotonic() < until:
            time.sleep(0.05)
        assert not server.server_state.connections


def test_one_person_takes_no_more_than_half_the_room(tmp_path):
    """However long a search may take, as while a silo hangs: others with a key come in."""
    with front(tmp_path, concurrent=8) as site, ThreadPoolExecutor(12) as others:
        site.silo.delay = 3.0
        searches = [others.submit(site.search) for _ in range(12)]
        until = time.monotonic() + 60
        while len(site.silo.asked) < 4 and time.monotonic() < until:
            time.sleep(0.01)
        bob = httpx.get(f"{site.url}/v1/me", headers={"x-api-key": site.keys.add("bob", scopes=["search"])})
        statuses = sorted(each.result().status_code for each in searches)
        assert bob.status_code == 200
        assert len(site.silo.searches()) == 4
        assert statuses == [200] * 4 + [429] * 8


def test_a_trailer_is_no_header(tmp_path):
    """What comes after a body was seen by no proxy on the way that looks at headers."""
    body = json.dumps({"query": "tides"}).encode()
    with front(tmp_path) as site, site.connect() as connection:
        connection.sendall(
            b"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            b"%x\r\n%s\r\n0\r\nx-api-key: %s\r\n\r\n" % (len(body), body, site.token.encode())
        )
        assert closed(connection).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "ends",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5\r\ntransfer-encoding : chunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"content-length: +5\r\n",
    ],
)
def test_a_request_with_two_ends_is_refused(tmp_path, ends):
    """A proxy might see another request in what follows."""
    with front(tmp_path) as site, site.connect() as connection:
        connection.sendall(b"POST /v1/session HTTP/1.1\r\nhost: 127.0.0.1\r\n" + ends + b"\r\n0\r\n\r\n")
        answer = closed(connection)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    root = tmp_path_factory.mktemp("papers")
    authority = Authority.at(root)
    authority.issue("north", clients=False)
    authority.issue("broker", clients=True)
    return root


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_handshake_that_never_ends_is_given_up(tmp_path, papers, new_loop):
    """With mutual TLS strangers never come further, and those with a certificate come in beside them."""
    loop, silo = Loop(new_loop), StandIn("north")
    limits = RequestLimits(header_seconds=3.0, connections_per_address=30)
    tls = certificates.files(papers / "north")
    server = loop.serve(silo, tls=tls, mutual=True, limits=limits)
    settings = BrokerSettings(
        folder=tmp_path,
        tls=certificates.files(papers / "broker"),
        silos={"north": SiloAddress(f"https://127.0.0.1:{server.port}")},
        deadline_ms=10_000,
        share_statistics=False,
    )

    async def search():
        from isthmus.service.wire import Search

        broker = Broker(settings)
        try:
            answers = [await broker.search(Search(query="tides")) for _ in range(3)]
        finally:
            await broker.stop()
        return [answer.silos[0].status for answer in answers]

    try:
        with ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=15))
                for _ in range(60)
            ]
            silent[-1].sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a first message
            assert asyncio.run(search()) == ["answered"] * 3
            assert few_open(silent, 30)
            for connection in silent:
                connection.setblocking(True)
                closed(connection, 10.0)
    finally:
        loop.close()


def test_who_waits_for_leave_to_send_a_body_is_given_it(tmp_path):
    body = b'{"query": "tides"}'
    with front(tmp_path) as broker, broker.connect("127.0.0.1") as connection:
        head = f"POST /v1/search HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {broker.token}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        connection.sendall((head + "expect: 100-continue\r\n\r\n").encode())
        first = connection.recv(1000)
        assert first == b"HTTP/1.1 100 Continue\r\n\r\n", first
        connection.sendall(body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
