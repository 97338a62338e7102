"""Search interfaces that harm whoever calibrates them: redirects, bombs, web pages; and who is lent a key."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from isthmus.errors import ConfigError, ServiceError, SiloUnavailable
from isthmus.service import search_endpoint
from isthmus.service.endpoint_calibration import JudgedAnswers, calibrated, proxy_app
from isthmus.service.search_endpoint import SearchEndpoint
from search_server import QUERIES, is_right, searching

JSON = {"content-type": "application/json"}


def test_a_key_does_not_follow_a_redirect(monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "secret-key")
    with searching() as (elsewhere, stolen):
        moved = {"location": f"{elsewhere}/search?q=tide"}
        with searching(lambda path: (302, moved, b"")) as (url, asked):
            endpoint = SearchEndpoint.of(url + "/search?q={query}", key="env:SEARCH_KEY")
            with pytest.raises(ServiceError, match=r"redirects to 127\.0\.0\.1") as told:
                endpoint.search("tide")
            assert "secret-key" not in str(told.value)
            assert asked.headers[0]["authorization"] == "Bearer secret-key"
        assert stolen.requests == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, {"content-type": "text/html"}, b"<html>"), "web page"),
        ((200, JSON, b"<!doctype html>"), "web page"),
        ((200, JSON, b"no json"), "no JSON"),
        ((200, JSON, b"[" * 100_000), "no JSON"),
        ((200, JSON, b'{"a": [' + b"[],[]," * 1_000_000 + b"[]]}"), "no JSON, or too much"),
        ((200, JSON, b'{"r": [{"score": NaN, "id": 1}]}'), "without scores"),
        ((200, JSON, b'{"r": [{"score": 1e999, "id": 1}]}'), "without scores"),
        ((200, JSON, b'{"r": [{"score": true, "id": 1}]}'), "without scores"),
        ((200, JSON, b" " * ((8 << 20) + 1)), "more than"),
        ((401, JSON, b"{}"), "status 401, key from nowhere"),
        ((500, JSON, b"{}"), "status 500"),
    ],
)
def test_answers_of_another_form_are_refused_in_one_line(reply, words):
    with searching(lambda path: reply) as (url, _), pytest.raises(ServiceError, match=words):
        SearchEndpoint.of(url + "/search?q={query}").search("tide")


def test_an_endpoint_that_hangs_is_given_up(monkeypatch):
    import time

    monkeypatch.setattr(search_endpoint, "SECONDS", 0.3)
    with searching(lambda path: time.sleep(1)) as (url, _), pytest.raises(SiloUnavailable, match="within"):
        SearchEndpoint.of(url + "/search?q={query}").search("tide")


def test_a_key_is_not_sent_in_the_clear_nor_written_down(monkeypatch, tmp_path):
    monkeypatch.setenv("SEARCH_KEY", "secret-key")
    with pytest.raises(ConfigError, match="in the clear"):
        SearchEndpoint.of("http://search.example.org/?q={query}", key="env:SEARCH_KEY")
    with searching() as (url, asked):
        endpoint = SearchEndpoint.of(url + "/search?q={query}", key="env:SEARCH_KEY", key_header="X-KEY")
        with JudgedAnswers(tmp_path / "c", endpoint) as answers:
            answers.ask("tide works")
        assert asked.headers[0]["X-KEY"] == "secret-key"
    for file in (tmp_path / "c").iterdir():
        assert b"secret-key" not in file.read_bytes()


def served(folder, endpoint, **options):
    """What asks a calibrated endpoint, with headers."""
    with JudgedAnswers(folder, endpoint) as answers:
        for query in QUERIES:
            for hit in answers.ask(query):
                answers.judge(query, hit.id, is_right(query, {"title": hit.title}))
        calibrated(answers)
    app = proxy_app(folder, endpoint, **options)

    async def get(headers):
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/search", params={"q": "tide"}, headers=headers)

    return lambda **headers: asyncio.run(
        get({name.replace("_", "-"): value for name, value in headers.items()})
    )


def test_a_proxy_s_own_credentials_are_not_passed_on(tmp_path):
    """A caller's are, where the endpoint has no key of its own."""
    with searching() as (url, asked):
        get = served(tmp_path / "c", SearchEndpoint.of(url + "/search?q={query}"))
        assert get(authorization="Bearer callers").status_code == 200
        assert asked.headers[-1]["authorization"] == "Bearer callers"
        for header in ("via", "forwarded", "x_forwarded_for", "x_real_ip"):
            assert get(authorization="Basic proxys", **{header: "10.0.0.1"}).status_code == 200
            assert "authorization" not in asked.headers[-1]


def test_the_endpoints_key_is_lent_to_those_with_the_token_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("SEARCH_KEY", "secret-key")
    with searching() as (url, asked):
        endpoint = SearchEndpoint.of(url + "/search?q={query}", key="env:SEARCH_KEY")
        get = served(tmp_path / "c", endpoint, token="the-token")
        before = len(asked.requests)
        assert get().status_code == 401
        assert get(authorization="Bearer secret-key").status_code == 401
        assert len(asked.requests) == before
        assert get(x_api_key="the-token").status_code == 200
        assert asked.headers[-1]["authorization"] == "Bearer secret-key"
        assert "the-token" not in str(asked.headers[-1])
