"""The layer before every app: who, how much, how deep, how often; and how a failure is told."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import httpx
import pytest

from isthmus.service import limits as layer
from isthmus.service.apps import new_app
from isthmus.service.limits import Buckets, Protect, Surface, message_header, too_deep
from isthmus.service.security import PEER, ApiKeys, Gate, Once, Peer
from isthmus.service.settings import Policy, RequestLimits
from isthmus.service.wire import Search


def app():
    made = new_app("limits", ())

    @made.post("/v1/search")
    async def search(asked: Search):
        return {"k": asked.k}

    @made.get("/v1/health")
    async def health():
        return {"status": "ok"}

    @made.get("/v1/broken")
    async def broken():
        raise RuntimeError("a secret in a message")

    return made


@pytest.fixture
def keys(tmp_path):
    return ApiKeys(tmp_path / "keys.json")


def call(protected, method, path, **options):
    async def work():
        transport = httpx.ASGITransport(protected, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return asyncio.run(work())


def protected(gate=None, limits=None, *, once=None, **reached):
    gate = gate or Gate(strangers=["search"])
    surface = Surface(open=("/v1/health",), **reached)
    return Protect(app(), gate=gate, limits=limits or RequestLimits(), surface=surface, once=once)


def is_problem(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == status
    assert told["title"]
    return told


def test_what_is_allowed_passes_with_the_security_headers():
    answer = call(protected(), "POST", "/v1/search", json={"query": "tides", "k": 3})
    assert answer.json() == {"k": 3}
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/../../etc/passwd", 404),
        ("GET", "/v1/%2e%2e/%2e%2e/etc/passwd", 404),
        ("DELETE", "/v1/search", 405),
        ("GET", "/v1/broken", 500),
    ],
)
def test_every_failure_is_problem_details(method, path, status):
    answer = call(protected(), method, path)
    told = is_problem(answer, status)
    assert "secret" not in json.dumps(told)
    assert "content-security-policy" in answer.headers


@pytest.mark.parametrize(
    "body",
    [
        {"query": ""},
        {"query": "   "},
        {"query": "x" * 2001},
        {"query": "<script>alert(1)</script>", "k": 0},
        {"query": "tides", "<script>alert(1)</script>": 1},
        {"query": "tides", "k": "<img src=x onerror=alert(1)>"},
        {"query": "tides", "silos": [{"<script>": 1}]},
        [],
        "x",
    ],
)
def test_a_wrong_body_is_not_echoed(body):
    answer = call(protected(), "POST", "/v1/search", json=body)
    is_problem(answer, 422)
    assert "script" not in answer.text
    assert "onerror" not in answer.text


def test_not_json_and_not_unicode():
    for content in (b"{", b"\xff\xfe", b'{"query": "\xff"}', b"NaN"):
        kind = {"content-type": "application/json"}
        answer = call(protected(), "POST", "/v1/search", content=content, headers=kind)
        assert answer.status_code in (400, 422)
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
def test_a_form_from_another_page_is_refused(kind):
    """Whatever of the types that a form, or a request without a preflight, can have."""
    headers = {"content-type": kind}
    is_problem(call(protected(), "POST", "/v1/search", content='{"query": "x"}', headers=headers), 415)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_another_page_asks_is_refused(site):
    """Without a body and a type, too; a link to an open page is all that another page may have."""
    headers = {"sec-fetch-site": site}
    for method, path in (("POST", "/v1/search"), ("GET", "/v1/broken"), ("POST", "/v1/health")):
        is_problem(call(protected(), method, path, headers=headers), 403)
    assert call(protected(), "GET", "/v1/health", headers=headers).is_success
    for own in ("same-origin", "none"):
        body = {"query": "tides", "k": 3}
        assert call(protected(), "POST", "/v1/search", json=body, headers={"sec-fetch-site": own}).is_success


def test_a_name_rebound_by_a_stranger_is_refused():
    guarded = protected(hosts={"localhost", "127.0.0.1", "[::1]"})
    for host, status in (("evil.example", 421), ("localhost:8100", 200), ("[::1]:8100", 200), ("", 421)):
        assert call(guarded, "GET", "/v1/health", headers={"host": host}).status_code == status


class TestBodies:
    def test_an_oversized_body_is_refused_before_it_is_read(self):
        small = protected(limits=RequestLimits(body_bytes=100))
        is_problem(call(small, "POST", "/v1/search", json={"query": "x" * 200}), 413)

    def test_an_oversized_body_without_a_length_too(self):
        async def drops():
            for _ in range(100):
                yield b" " * 50

        kind = {"content-type": "application/json"}
        small = protected(limits=RequestLimits(body_bytes=100))
        is_problem(call(small, "POST", "/v1/search", content=drops(), headers=kind), 413)

    def test_a_body_that_never_ends_is_given_up(self, monkeypatch):
        monkeypatch.setattr(layer, "BODY_SECONDS", 0.05)

        async def drips():
            yield b"{"
            await asyncio.sleep(0.2)
            yield b"}"

        kind = {"content-type": "application/json"}
        is_problem(call(protected(), "POST", "/v1/search", content=drips(), headers=kind), 408)

    @pytest.mark.parametrize("opening", ["[", '{"a":'])
    def test_depth(self, opening):
        kind = {"content-type": "application/json"}
        bomb = (opening * 100_000).encode()
        is_problem(call(protected(), "POST", "/v1/search", content=bomb, headers=kind), 400)

    def test_brackets_in_strings_are_not_depth(self):
        assert not too_deep(json.dumps({"a": '[[[["[[[[\\'}).encode(), 1)
        assert too_deep(b"[[1]]", 1)
        assert not too_deep(b"[1][2][3]", 1)

    def test_a_bomb_is_judged_quickly(self):
        began = time.perf_counter()
        too_deep(b'"\\' * 500_000, 16)
        too_deep(b'"' * 1_000_001, 16)
        assert time.perf_counter() - began < 10


class TestCallers:
    def test_keys_and_scopes(self, keys):
        token = keys.add("ada", scopes=["search"])
        guarded = protected(Gate(keys=keys))
        body = {"query": "tides"}
        answer = call(guarded, "POST", "/v1/search", json=body)
        is_problem(answer, 401)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        is_problem(call(guarded, "POST", "/v1/search", json=body, headers={"x-api-key": "isk_1_2"}), 401)
        assert call(guarded, "POST", "/v1/search", json=body, headers={"x-api-key": token}).is_success
        assert call(guarded, "GET", "/v1/health").is_success

    def test_a_path_that_only_looks_open_is_not(self, keys):
        guarded = protected(Gate(keys=keys))
        for path in ("/v1/health/../search", "/v1/healthy", "/v1/health/", "//v1/health"):
            is_problem(call(guarded, "GET", path), 401)

    def test_guessing_keys_is_slowed_down(self, keys):
        guarded = protected(Gate(keys=keys))
        answers = [
            call(guarded, "GET", "/v1/x", headers={"x-api-key": f"isk_{n}_0"}).status_code for n in range(30)
        ]
        assert answers[0] == 401
        assert answers[-1] == 429

    def test_rates_are_per_caller(self, keys):
        guarded = protected(Gate(keys=keys), RequestLimits(per_second=0.1, burst=3))
        ada, bob = (keys.add(name, scopes=["search"]) for name in ("ada", "bob"))
        body = {"query": "tides"}
        for _ in range(3):
            assert call(guarded, "POST", "/v1/search", json=body, headers={"x-api-key": ada}).is_success
        answer = call(guarded, "POST", "/v1/search", json=body, headers={"x-api-key": ada})
        is_problem(answer, 429)
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        assert call(guarded, "POST", "/v1/search", json=body, headers={"x-api-key": bob}).is_success

    def test_too_many_at_once(self):
        async def waiting(scope, receive, send):
            await asyncio.sleep(0.2)

        guarded = Protect(waiting, gate=Gate(strangers=["search"]), limits=RequestLimits(concurrent=1))

        async def work():
            transport = httpx.ASGITransport(guarded, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                first = asyncio.create_task(client.get("/"))
                await asyncio.sleep(0.05)
                second = await client.get("/")
                first.cancel()
                return second

        answer = asyncio.run(work())
        is_problem(answer, 503)
        assert answer.headers["retry-after"] == "1"


def with_peer(inner, name="broker"):
    """As if TLS had verified a peer's certificate."""

    async def outer(scope, receive, send):
        scope["extensions"] = {PEER: Peer(name, time.time() + 60)}
        await inner(scope, receive, send)

    return outer


class TestPeers:
    def test_a_replayed_message_is_refused(self):
        guarded = with_peer(protected(Gate(peers={"broker": Policy(search=True)}), once=Once()))
        header = message_header()
        body = {"query": "tides"}
        assert call(guarded, "POST", "/v1/search", json=body, headers=header).is_success
        is_problem(call(guarded, "POST", "/v1/search", json=body, headers=header), 409)
        is_problem(call(guarded, "POST", "/v1/search", json=body), 400)
        old = {layer.MESSAGE: f"{time.time() - 3600:.3f} abcdefgh"}
        is_problem(call(guarded, "POST", "/v1/search", json=body, headers=old), 409)
        for wrong in ("nan abcdefgh", "inf abcdefgh", "x", "", f"{time.time()} a"):
            answer = call(guarded, "POST", "/v1/search", json=body, headers={layer.MESSAGE: wrong})
            assert answer.status_code in (400, 409)

    def test_an_unknown_peer_is_refused(self):
        guarded = with_peer(protected(Gate(peers={"broker": Policy(search=True)})), "stranger")
        is_problem(call(guarded, "POST", "/v1/search", json={"query": "tides"}), 403)


class TestBuckets:
    def test_a_bucket_fills_again(self):
        now = [0.0]
        buckets = Buckets(2, 3, clock=lambda: now[0])
        assert [buckets.wait("a") for _ in range(4)] == [0, 0, 0, 0.5]
        now[0] = 0.5
        assert buckets.wait("a") == 0
        now[0] = 100
        assert [buckets.wait("a") for _ in range(4)] == [0, 0, 0, 0.5]

    def test_memory_is_bounded(self):
        buckets = Buckets(1, 1)
        for number in range(layer.ADDRESSES + 500):
            buckets.wait(str(number))
        assert len(buckets._filled) == layer.ADDRESSES


def test_the_log_has_no_query(caplog):
    with caplog.at_level(logging.INFO, "isthmus.access"):
        call(protected(), "POST", "/v1/search?q=private+words", json={"query": "private words"})
    told = json.loads(caplog.records[-1].message)
    assert told["path"] == "/v1/search"
    assert told["status"] == 200
    assert "private" not in caplog.text


def test_an_unforeseen_failure_is_logged_by_place_alone(caplog):
    call(protected(), "GET", "/v1/broken")
    assert "test_limits.py" in caplog.text
    assert "RuntimeError" in caplog.text
    assert "a secret" not in " ".join(record.getMessage() for record in caplog.records)


def test_a_known_peer_may_send_more_where_that_is_meant():
    small = RequestLimits(body_bytes=100, operator_body_bytes=1000)
    guarded = with_peer(protected(Gate(peers={"broker": Policy(search=True)}), small, large=("/v1/search",)))
    assert call(guarded, "POST", "/v1/search", json={"query": "x" * 200}).status_code == 200
    is_problem(call(guarded, "POST", "/v1/search", json={"query": "x" * 1200}), 413)
    is_problem(call(guarded, "POST", "/v1/other", json={"query": "x" * 200}), 413)
