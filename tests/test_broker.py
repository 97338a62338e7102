"""The broker on real sockets over mutual TLS: fusing, deadlines, faults that are named, silos that return."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from isthmus.errors import ConfigError
from isthmus.service import certificates, wire
from isthmus.service.api import broker_app
from isthmus.service.breaker import Breaker
from isthmus.service.broker import Broker
from isthmus.service.certificates import Authority
from isthmus.service.results import in_order
from isthmus.service.security import PEER, ApiKeys
from isthmus.service.settings import BreakerSettings, BrokerSettings, PageText, RequestLimits, SiloAddress
from silo_stand_in import Loop, StandIn, answer, hit

NAMES = ("east", "north", "west")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    root = tmp_path_factory.mktemp("keys")
    authority = Authority.at(root)
    for name in NAMES:
        authority.issue(name, clients=False)
    authority.issue("broker", clients=True)
    return root


class Site:
    """Three silos and a broker, in this process, on ports of their own."""

    def __init__(self, keys, folder):
        self.keys, self.loop = keys, Loop()
        self.silos = {name: StandIn(name) for name in NAMES}
        self.silos["north"].hits = [hit("north", n, p) for n, p in enumerate((0.95, 0.5, 0.05))]
        self.servers = {name: self.start(name) for name in NAMES}
        self.api_keys = ApiKeys(folder / "api-keys.json")
        self.token = self.api_keys.add("ada", scopes=["search", "feedback", "metrics"])
        ports = {name: server.port for name, server in self.servers.items()}
        self.settings = BrokerSettings(
            page=PageText("Right is what floats.", ("tidal power",)),
            folder=folder,
            tls=certificates.files(keys / "broker"),
            keys=folder / "api-keys.json",
            silos={name: SiloAddress(f"https://127.0.0.1:{port}") for name, port in ports.items()},
            deadline_ms=400,
            share_statistics=False,
            breaker=BreakerSettings(failures=2, pause=0.2, longest=0.8),
            limits=RequestLimits(per_second=1000, burst=1000, body_bytes=10_000),
        )
        self.broker = self.loop.run(self._made())
        server = self.loop.serve(broker_app(self.broker), lifespan="on")
        self.url = f"http://127.0.0.1:{server.port}"
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {self.token}"})

    async def _made(self):
        return Broker(self.settings)

    def start(self, name, port=0):
        tls = certificates.files(self.keys / name)
        return self.loop.serve(self.silos[name], port=port, tls=tls, mutual=True)

    def search(self, query="tides", **more):
        reply = self.http.post("/v1/search", json={"query": query, **more})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def statuses(self, **more):
        return {each["silo"]: each["status"] for each in self.search(**more)["silos"]}

    def close(self):
        self.http.close()
        self.loop.close()


@pytest.fixture(scope="module")
def whole(keys, tmp_path_factory):
    made = Site(keys, tmp_path_factory.mktemp("broker"))
    yield made
    made.close()


@pytest.fixture
def site(whole):
    """Everything well again."""
    for name, silo in whole.silos.items():
        silo.behave, silo.delay, silo.asked = "well", 0.0, []
        whole.broker.silos[name].breaker.succeeded()
    return whole


class TestSearch:
    def test_hits_of_all_silos_by_probability(self, site):
        told = site.search(k=5)
        shown = [(each["silo"], each["probability"]) for each in told["hits"]]
        assert shown == [("north", 0.95), ("east", 0.9), ("west", 0.9), ("east", 0.5), ("north", 0.5)]
        assert {each["status"] for each in told["silos"]} == {"answered"}
        assert all(each["documents"] == 100 and each["took_ms"] > 0 for each in told["silos"])

    @pytest.mark.parametrize("scorer", ["engine", "date"])
    def test_scores_of_an_engine_s_own_need_no_statistics(self, site, monkeypatch, scorer):
        """Else each of its answers would have the sum sent to all silos again."""
        exchange = site.broker.exchange
        monkeypatch.setattr(exchange, "version", "v1")
        monkeypatch.setattr(exchange, "_holders", {"west"})
        content = json.dumps(answer("west", [], scorer=scorer)).encode()
        site.silos["west"].behave = (200, b"application/json", content)
        assert site.search(silos=["west"])["silos"][0]["detail"] == ""
        assert exchange._holders == {"west"}

    @pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8"])
    def test_a_body_is_read_alike_whatever_is_said_of_its_type(self, site, kind):
        def status(body):
            return site.http.post("/v1/search", content=body, headers={"content-type": kind}).status_code

        bodies = (
            '{"query": "tides"}',
            '\ufeff{"query": "tides"}',
            "",
            "{",
            '{"query": "tides", "more": 1}',
            "[]",
        )
        assert [status(body.encode()) for body in bodies] == [200, 200, 422, 422, 422, 422]
        refused = site.http.post("/v1/search", json={"query": "tides", "more": 1})
        assert refused.json()["detail"] == "a field that is not known"
        assert 'path="/v1/search",status="200"' in site.http.get("/metrics").text

    def test_a_threshold_and_an_honest_empty_answer(self, site):
        told = site.search(threshold=0.9)
        assert [each["probability"] for each in told["hits"]] == [0.95, 0.9, 0.9]
        assert told["below"] == 6
        told = site.search(threshold=0.99)
        assert told["hits"] == []
        assert told["below"] == 9
        assert {each["status"] for each in told["silos"]} == {"answered"}

    def test_hits_without_a_probability_come_last_and_pass_no_threshold(self, site):
        site.silos["east"].hits = [hit("east", n, None, score=99.0) for n in range(3)]
        answer = site.search()
        assert [each["silo"] for each in answer["hits"][-3:]] == ["east"] * 3
        answer = site.search(threshold=0.05)
        assert {each["silo"] for each in answer["hits"]} == {"north", "west"}
        assert (answer["below"], answer["without_probability"]) == (3, 3)

    def test_only_the_silos_named(self, site):
        assert site.statuses(silos=["east", "east"]) == {"east": "answered"}
        assert not site.silos["north"].asked
        reply = site.http.post("/v1/search", json={"query": "x", "silos": ["<script>"]})
        assert reply.status_code == 404
        assert "script" not in reply.text

    def test_what_a_node_is_sent(self, site):
        site.search("tides & moons", k=7, explain=True, threshold=0.5)
        _, _, headers, body, extensions = site.silos["east"].asked[0]
        assert json.loads(body) == {"query": "tides & moons", "k": 7, "deadline_ms": 400, "explain": True}
        assert extensions[PEER].name == "broker"
        assert b"isthmus-message" in headers
        assert b"authorization" not in headers  # a person's key stays at the broker

    def test_a_silo_with_another_encoder_is_named_and_all_hear_which_one_they_share(self, site):
        for name, silo in site.silos.items():
            encoder = "onnx-west" if name == "west" else "onnx-most"
            content = json.dumps(answer(name, silo.hits, encoder=encoder)).encode()
            silo.behave = (200, b"application/json", content)
        try:
            site.search()
            for silo in site.silos.values():
                silo.asked = []
            details = {each["silo"]: each["detail"] for each in site.search()["silos"]}
            headers = [silo.asked[0][2].get(b"isthmus-encoder") for silo in site.silos.values()]
            assert headers == [b"onnx-most"] * 3
            assert "without its dense score" in details.pop("west")
            assert not any("encoder" in each for each in details.values())
            site.silos["west"].behave = (
                200,
                b"application/json",
                content.replace(b"onnx-west", b"a\\r\\nb: c"),
            )
            assert site.statuses()["west"] == "broken"  # what it says of itself goes into a header
        finally:
            for silo in site.broker.silos.values():
                silo.encoder = ""

    def test_explanations_pass_through(self, site):
        why = [{"retriever": "bm25", "raw": 7.1, "probability": 0.8, "weight": 0.5, "contribution": 0.7}]
        site.silos["east"].hits = [hit("east", 0, 0.97, explanation=why)]
        try:
            assert site.search(explain=True)["hits"][0]["explanation"] == why
        finally:
            site.silos["east"].hits = StandIn("east").hits

    def test_text_is_passed_as_it_is(self, site):
        """Escaping is for who shows it; JSON with nosniff cannot run."""
        site.silos["east"].hits = [hit("east", 0, 0.99, title="<script>alert(1)</script>")]
        try:
            reply = site.http.post("/v1/search", json={"query": "<script>alert(1)</script>"})
            assert reply.headers["content-type"] == "application/json"
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.json()["hits"][0]["title"] == "<script>alert(1)</script>"
        finally:
            site.silos["east"].hits = StandIn("east").hits

    def test_connections_are_kept(self, site):
        for _ in range(5):
            site.search()
        assert len(site.broker.silos["east"].http._idle) == 1


GARBAGE = {
    "not JSON": (200, b"application/json", b"<html>"),
    "another type": (200, b"text/html", b"<html>"),
    "another shape": (200, b"application/json", b'{"hits": 3}'),
    "a probability above 1": (
        200,
        b"application/json",
        json.dumps(answer("east", [hit("east", 0, 1.5)])).encode(),
    ),
    "not a number": (
        200,
        b"application/json",
        json.dumps(answer("east", [hit("east", 0, 0.5, score=float("nan"))])).encode(),
    ),
    "another silo's hits": (
        200,
        b"application/json",
        json.dumps(answer("east", [hit("west", 0, 0.5)])).encode(),
    ),
    "another silo's name": (200, b"application/json", json.dumps(answer("west", [])).encode()),
    "half a letter": (200, b"application/json", json.dumps(answer("east", [])).encode()[:-5] + b"\xff"),
    "a failure": (500, b"application/problem+json", b"{}"),
    "a redirect": (302, b"text/html", b""),
    "too much": (200, b"application/json", b" " * (9 << 20)),
}


class TestFaults:
    @pytest.mark.parametrize("kind", GARBAGE)
    def test_garbage_is_named_and_the_others_answer(self, site, kind):
        site.silos["east"].behave = GARBAGE[kind]
        told = site.search()
        found = {each["silo"]: each for each in told["silos"]}
        assert found["east"]["status"] == "broken"
        assert found["east"]["detail"]
        assert found["north"]["status"] == found["west"]["status"] == "answered"
        assert {each["silo"] for each in told["hits"]} == {"north", "west"}

    @pytest.mark.parametrize(
        ("status", "named"), [(401, "refused"), (403, "refused"), (429, "refused"), (503, "down")]
    )
    def test_refusals(self, site, status, named):
        site.silos["west"].behave = (status, b"application/problem+json", b'{"detail": "<b>secret</b>"}')
        told = site.search()
        west = told["silos"][2]
        assert (west["silo"], west["status"]) == ("west", named)
        assert "secret" not in west["detail"]

    def test_a_late_silo_costs_no_more_than_the_deadline(self, site):
        site.silos["east"].delay = 5.0
        began = time.monotonic()
        told = site.search()
        assert 0.39 < time.monotonic() - began < 4.0, "it would have answered after 5 s"
        assert told["silos"][0]["status"] == "late"
        assert {each["silo"] for each in told["hits"]} == {"north", "west"}

    def test_a_caller_in_a_hurry_closes_no_silo(self, site):
        site.silos["east"].delay = 0.1
        for _ in range(5):
            assert site.statuses(deadline_ms=20)["east"] == "late"
        site.silos["east"].delay = 0.0
        assert site.statuses()["east"] == "answered"

    def test_a_dead_silo_is_left_alone_and_used_again(self, site, monkeypatch):
        port, now = site.servers["west"].port, time.monotonic()
        monkeypatch.setattr(site.broker.silos["west"].breaker, "_clock", lambda: now)
        site.loop.stop(site.servers["west"])
        try:
            assert [site.statuses()["west"] for _ in range(2)] == ["down", "down"]
            told = site.search()["silos"][2]
            assert told["status"] == "down"
            assert "next try in" in told["detail"]
            assert site.broker.silos["west"].breaker.state == "open"
            assert 'isthmus_silo_open{silo="west"} 1' in site.http.get("/metrics").text
        finally:
            site.servers["west"] = site.start("west", port)
            monkeypatch.undo()
        until = time.monotonic() + 30
        while site.statuses()["west"] != "answered" and time.monotonic() < until:
            time.sleep(0.05)
        assert site.statuses()["west"] == "answered"

    def test_a_late_silo_is_not_asked_into_the_ground(self, site):
        site.silos["east"].delay = 1.0
        began = time.monotonic()
        searches = 0
        while time.monotonic() - began < 1.9:
            site.search()
            searches += 1
        assert len(site.silos["east"].asked) <= 5 < searches

    def test_a_silo_with_another_ones_certificate_is_broken(self, site, keys):
        """An address that was taken over, with a certificate of the same authority, gets no query."""
        port = site.servers["west"].port
        site.loop.stop(site.servers["west"])
        site.broker.silos["west"].http.close()
        poser = StandIn("west")
        server = site.loop.serve(poser, port=port, tls=certificates.files(keys / "east"), mutual=True)
        try:
            told = site.search()["silos"][2]
            assert told["status"] == "broken"
            assert "certificate" in told["detail"]
            assert not poser.asked
        finally:
            site.loop.stop(server)
            site.servers["west"] = site.start("west", port)

    def test_all_silos_down_is_an_answer(self, site):
        for silo in site.silos.values():
            silo.behave = (503, b"application/problem+json", b"{}")
        told = site.search()
        assert told["hits"] == []
        assert {each["status"] for each in told["silos"]} == {"down"}
        site.search()
        reply = site.http.get("/v1/ready")
        assert (reply.status_code, reply.json()["ready"]) == (503, False)


class TestViews:
    def test_feedback_goes_to_its_owner_only(self, site):
        said = {"query": "tides", "token": "t1", "silo": "east", "relevant": True}
        assert site.http.post("/v1/feedback", json=said).status_code == 204
        ((method, path, _, body, _),) = site.silos["east"].asked
        assert (method, path) == ("POST", "/v1/feedback")
        passed = json.loads(body)
        person = passed.pop("person")
        assert passed == said
        assert site.http.post("/v1/feedback", json={**said, "silo": "north"}).status_code == 204
        other = json.loads(site.silos["north"].asked.pop()[3])["person"]
        assert "ada" not in (person, other)
        assert len(person) == len(other) >= 16, "a pseudonym, not the name"
        assert person != other, "two silos cannot tell that it was the same person"
        assert not site.silos["north"].asked
        assert site.http.post("/v1/feedback", json={**said, "silo": "nobody"}).status_code == 404
        site.silos["east"].behave = (403, b"application/problem+json", b"{}")
        assert site.http.post("/v1/feedback", json=said).status_code == 403
        site.silos["east"].behave = (500, b"application/problem+json", b"{}")
        assert site.http.post("/v1/feedback", json=said).status_code == 502

    def test_silos(self, site):
        site.silos["north"].behave = (403, b"application/problem+json", b"{}")
        site.broker._views.clear()
        view = site.http.get("/v1/silos").json()
        assert (view["about"], view["queries"]) == ("Right is what floats.", ["tidal power"])
        told = {each["silo"]: each for each in view["silos"]}
        assert told["east"]["ready"]["documents"] == 100
        assert told["east"]["release"]["silo"] == "east"
        assert told["north"]["status"] == "refused"
        count = len(site.silos["east"].asked)
        site.http.get("/v1/silos")
        assert len(site.silos["east"].asked) == count  # shown again for a moment

    def test_calibration_and_training_of_nothing(self, site):
        assert site.http.get("/v1/calibration").json() == {"curves": []}
        assert site.http.get("/v1/training").json()["rounds"] == []

    def test_health_metrics_and_reference(self, site):
        site.search()
        assert site.http.get("/v1/health").json()["role"] == "broker"
        assert site.http.get("/v1/ready").json()["ready"] is True
        counted = site.http.get("/metrics").text
        assert 'isthmus_silo_answers_total{silo="east",status="answered"}' in counted
        assert 'isthmus_request_seconds_count{path="/v1/search"}' in counted
        page = site.http.get("/v1/docs")
        assert "POST /v1/search" in page.text
        assert "//" not in page.text.replace("<!doctype", "")  # nothing from elsewhere
        assert site.http.get("/v1/docs.css").headers["content-type"].startswith("text/css")
        described = site.http.get("/v1/openapi.json").json()
        assert described["paths"]["/v1/search"]["post"]["responses"]["429"]
        assert "HTTPValidationError" not in json.dumps(described)


class TestDoor:
    def test_a_key_and_its_scopes(self, site):
        reader = site.api_keys.add("reader", scopes=["metrics"])
        plain = httpx.Client(base_url=site.url)
        body = {"query": "tides"}
        assert plain.post("/v1/search", json=body).status_code == 401
        with_key = {"x-api-key": reader}
        assert plain.post("/v1/search", json=body, headers=with_key).status_code == 403
        assert plain.get("/metrics", headers=with_key).status_code == 200
        assert plain.get("/v1/silos", headers=with_key).status_code == 403
        who = plain.get("/v1/me", headers=with_key).json()
        assert (who["name"], who["scopes"]) == ("reader", ["metrics"])

    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [
            ("POST", "/v1/learning", {}),
            ("POST", "/v1/learning/rollback", {"version": "none"}),
            ("POST", "/v1/judgements", {"judgements": [{"query": "q", "document": "d", "relevant": True}]}),
            ("GET", "/v1/judgements?silo=north", None),
            ("POST", "/v1/noised-counts", {"query": "tides"}),
        ],
    )
    def test_learning_files_of_judgements_and_budgets_need_more_than_search(self, site, method, path, body):
        person = site.api_keys.add(f"person {path} {method}", scopes=["search", "feedback", "metrics"])
        plain = httpx.Client(base_url=site.url)
        assert plain.request(method, path, json=body).status_code == 401
        before = {name: list(silo.asked) for name, silo in site.silos.items()}
        reply = plain.request(method, path, json=body, headers={"x-api-key": person})
        assert reply.status_code == 403
        assert {name: list(silo.asked) for name, silo in site.silos.items()} == before

    def test_the_pages_cookie(self, site):
        page = httpx.Client(base_url=site.url)
        assert page.post("/v1/session", json={"key": "isk_1_2"}).status_code == 401
        opened = page.post("/v1/session", json={"key": site.token})
        assert opened.status_code == 204
        cookie = opened.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert page.post("/v1/search", json={"query": "tides"}).status_code == 200
        page.delete("/v1/session")
        assert page.post("/v1/search", json={"query": "tides"}).status_code == 401

    def test_oversized_and_deep_bodies(self, site):
        kind = {"content-type": "application/json"}
        assert site.http.post("/v1/search", content=b" " * 20_000, headers=kind).status_code == 413
        assert site.http.post("/v1/search", content=b"[" * 9_000, headers=kind).status_code == 400

    @pytest.mark.parametrize(
        "path", ["/../../etc/passwd", "/v1/%2e%2e/%2e%2e/etc/passwd", "/static/..%2f..%2fx"]
    )
    def test_path_traversal(self, site, path):
        reply = site.http.get(path)
        assert reply.status_code in (401, 404)
        assert "root:" not in reply.text

    def test_another_host_name_is_refused(self, site):
        assert site.http.get("/v1/health", headers={"host": "evil.example"}).status_code == 421


def hit_of(silo, number, probability, score=1.0):
    return wire.Hit(document=f"{silo}/{number}", silo=silo, probability=probability, score=score)


def test_ties_by_score_then_as_their_silos_have_them():
    lists = [
        [hit_of("b", 1, 0.5)],
        [hit_of("a", 2, 0.5), hit_of("a", 1, 0.5)],
        [hit_of("c", 1, 0.5, 2.0)],
    ]
    assert [each.document for each in in_order(lists)] == ["c/1", "a/2", "b/1", "a/1"]


class TestBreaker:
    def test_a_life(self):
        now = [0.0]
        breaker = Breaker(BreakerSettings(failures=2, pause=1.0, longest=3.0), clock=lambda: now[0])
        assert breaker.admits()
        breaker.failed("down", "x")
        assert breaker.admits()
        breaker.failed("late", "y")
        assert breaker.state == "open"
        assert (breaker.last, breaker.reason, breaker.wait) == ("late", "y", 1.0)
        assert not breaker.admits()
        for pause in (2.0, 3.0, 3.0):  # doubled, up to the longest
            now[0] += breaker.wait
            assert breaker.state == "half open"
            assert breaker.admits()
            assert not breaker.admits()  # one probe at a time
            breaker.failed("down", "z")
            assert breaker.wait == pause
        now[0] += 3.0
        assert breaker.admits()
        breaker.succeeded()
        assert breaker.state == "closed"
        breaker.failed("down", "x")
        assert breaker.admits()

    def test_failures_that_come_in_late_do_not_lengthen_the_pause(self):
        now = [0.0]
        breaker = Breaker(BreakerSettings(failures=2, pause=1.0), clock=lambda: now[0])
        for _ in range(20):  # asked together, failed together
            breaker.failed("late", "x")
            now[0] += 0.01
        assert breaker.wait < 1.0
        assert breaker.state == "open"

    def test_a_probe_that_nobody_waited_for_is_made_again(self):
        now = [0.0]
        breaker = Breaker(BreakerSettings(failures=1, pause=1.0), clock=lambda: now[0])
        breaker.failed("late", "x")
        now[0] = 1.0
        assert breaker.admits()
        breaker.dropped()
        assert breaker.admits()


def test_https_needs_a_certificate():
    with pytest.raises(ConfigError, match=r"\[tls\]"):
        Broker(BrokerSettings(silos={"north": SiloAddress("https://127.0.0.1:1")}))


def test_a_broker_without_silos_is_refused():
    with pytest.raises(ConfigError, match="silo"):
        Broker(BrokerSettings())


def test_hits_with_an_engine_s_own_scores_take_turns_until_they_have_probabilities():
    def hit(silo, score, probability=None):
        return wire.Hit(document=f"{silo}{score}", silo=silo, probability=probability, score=score)

    lists = [[hit("a", 9.0), hit("a", 8.0)], [hit("b", 7.0)], [hit("x", 0.9), hit("x", 0.8)], [hit("y", 0.5)]]
    merged = in_order(lists, apart={"x", "y"})
    assert [each.document for each in merged] == ["a9.0", "x0.9", "y0.5", "a8.0", "x0.8", "b7.0"]
    merged = in_order([*lists, [hit("x", 0.1, 0.7)]], apart={"x", "y"})
    assert [each.document for each in merged[:2]] == ["x0.1", "a9.0"]
