"""Judged answers of a search interface: its mapping, a calibrator, a threshold, and an endpoint with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from isthmus.calibration import ThresholdCurve
from isthmus.cli import main
from isthmus.errors import ConfigError, DataError, ServiceError, SiloUnavailable
from isthmus.service.endpoint_calibration import JudgedAnswers, calibrated, judging_app, proxy_app
from isthmus.service.search_endpoint import RawReply, ResultMapping, SearchEndpoint, detect
from search_server import QUERIES, is_right, searching

BODIES = {"/collections/p/points/query": '{"query": "{query}"}', "/distances": '{"q": "{query}"}'}


def judged(folder, endpoint, queries=QUERIES, each=10):
    """All answers judged by who knows what is right."""
    answers = JudgedAnswers(folder, endpoint)
    for query in queries:
        for hit in answers.ask(query)[:each]:
            answers.judge(query, hit.id, is_right(query, {"title": hit.title}))
    return answers


@pytest.fixture(scope="module")
def server():
    with searching() as served:
        yield served


@pytest.mark.parametrize(
    "path",
    [
        "/search?q={query}",
        "/papers/_search",
        "/collections/p/documents/search?q={query}",
        "/indexes/p/search",
        "/collections/p/points/query",
    ],
)
def test_answers_of_the_usual_engines_are_read_as_they_are(server, path):
    url, search = server
    endpoint = SearchEndpoint.of(url + path, body=BODIES.get(path, ""))
    answer = endpoint.search("tide power")
    wanted = search.find("tide power")
    assert [hit.id.removeprefix("d") for hit in answer.hits] == [row["id"][1:] for _, row in wanted]
    scale = 100 if "indexes" in path else 1
    assert [hit.score * scale for hit in answer.hits] == pytest.approx([score for score, _ in wanted])
    assert answer.hits[0].title == wanted[0][1]["title"]
    assert answer.hits[0].snippet == wanted[0][1]["body"]


def test_a_query_stays_a_text_whatever_is_in_it(server):
    url, search = server
    SearchEndpoint.of(url + "/indexes/p/search").search('tide", "limit": 9 {query}')
    assert json.loads(search.requests[-1][2]) == {
        "q": 'tide", "limit": 9 {query}',
        "limit": 10,
        "showRankingScore": True,
    }
    SearchEndpoint.of(url + "/search?q={query}").search("tide&k=1 #?")
    assert search.requests[-1][1] == "/search?q=tide%26k%3D1%20%23%3F"


def test_paths_are_found_by_themselves_and_can_be_named():
    content = {
        "meta": [{"n": 1}],
        "data": {"items": [{"uid": 7, "relevance": 2.5, "name": "a", "text": "b"}]},
    }
    assert detect(content, ResultMapping()) == ResultMapping("data.items", "uid", "relevance", "name", "text")
    reply = RawReply(200, "application/json", json.dumps({"a": [{"x": {"n": 3}, "k": "u"}]}).encode())
    endpoint = SearchEndpoint.of("http://h/?q={query}", mapping="hits=a,id=k,score=x.n")
    assert (endpoint.read(reply).hits[0].id, endpoint.read(reply).hits[0].score) == ("u", 3.0)
    with pytest.raises(ConfigError, match="scores"):
        SearchEndpoint.of("http://h/?q={query}", mapping="scores=a")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/{query}", "no address"),
        ("https://me:secret@host/?q={query}", "password"),
        ("https://host/search", "where the query goes"),
    ],
)
def test_addresses_that_cannot_be_right_are_refused_before_anything_is_sent(url, words):
    with pytest.raises(ConfigError, match=words):
        SearchEndpoint.of(url)


def test_an_answer_without_scores_says_what_there_is(server):
    with pytest.raises(ServiceError, match=r"without scores.*results \(id, title, body\).*--mapping"):
        SearchEndpoint.of(server[0] + "/unscored?q={query}").search("tide")


def test_judgements_become_probabilities_that_hold_on_other_queries(server, tmp_path):
    url, _ = server
    endpoint = SearchEndpoint.of(url + "/search?q={query}")
    with judged(tmp_path / "c", endpoint, QUERIES[::2]) as answers:
        report = calibrated(answers, precision=0.8, width=0.05)
    assert not report.problem
    assert (report.judged, report.queries) == (120, 12)
    assert report.curve.count == 120
    assert report.curve.ece < report.curve.floor + 0.12
    point = report.threshold
    assert point.low <= point.precision <= point.high
    assert point.precision >= 0.8
    assert report.judgements_needed > report.judged
    proxy = proxy_app(tmp_path / "c", endpoint)
    predicted, right = [], []
    for query in QUERIES[1::2]:
        for hit in ask(proxy, "/search", q=query)["results"]:
            predicted.append(hit["probability"])
            right.append(is_right(query, hit))
    assert abs(np.mean(predicted) - np.mean(right)) < 0.12
    assert np.mean(predicted) == pytest.approx(np.mean(right), abs=0.12)
    order = np.argsort(predicted)
    assert np.mean(np.array(right)[order[-40:]]) > np.mean(np.array(right)[order[:40]])


def ask(app, path, *, method="GET", body=None, status=200, headers=None, **parameters):
    async def once():
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, params=parameters, json=body, headers=headers)

    import asyncio

    reply = asyncio.run(once())
    assert reply.status_code == status, reply.text
    return reply.json()


def test_the_calibrated_endpoint_answers_as_the_endpoint_does(server, tmp_path):
    url, _ = server
    endpoint = SearchEndpoint.of(url + "/search?q={query}&k=5")
    judged(tmp_path / "c", endpoint, QUERIES).close()
    with pytest.raises(DataError, match=r"no calibration yet.*judge at least 20 hits"):
        proxy_app(tmp_path / "c", endpoint)
    with JudgedAnswers(tmp_path / "c", endpoint) as answers:
        calibrated(answers)
    app = proxy_app(tmp_path / "c", endpoint)
    plain = httpx.get(f"{url}/search", params={"q": "tide works", "k": 5}).json()
    shown = ask(app, "/search", q="tide works")
    probabilities = [hit.pop("probability") for hit in shown["results"]]
    assert shown == plain, "nothing else changes, and the endpoint's own parameters hold"
    assert len(probabilities) == 5
    assert all(0 <= each <= 1 for each in probabilities)
    assert len(ask(app, "/search", q="tide works", k="2")["results"]) == 2
    cut = proxy_app(tmp_path / "c", endpoint, least=sorted(probabilities)[2])
    assert len(ask(cut, "/search", q="tide works")["results"]) == 3
    ask(app, "/other", q="tide", status=404)
    ask(app, "/search", q="tide", method="DELETE", status=405)


def test_distances_are_turned_round(server, tmp_path):
    endpoint = SearchEndpoint.of(server[0] + "/distances", body=BODIES["/distances"])
    with judged(tmp_path / "c", endpoint) as answers:
        report = calibrated(answers)
    assert report.sign == -1.0
    shown = ask(proxy_app(tmp_path / "c", endpoint), "/distances", method="POST", body={"q": "tide works"})
    probabilities = [hit["probability"] for hit in shown]
    assert probabilities[0] == max(probabilities)


def test_nothing_is_claimed_of_few_judgements(server, tmp_path):
    endpoint = SearchEndpoint.of(server[0] + "/search?q={query}")
    with judged(tmp_path / "c", endpoint, QUERIES[:3], each=4) as answers:
        report = calibrated(answers)
        assert report.problem.startswith("too few to claim anything: 8 judgements, 2 judged queries")
        assert report.curve is report.threshold is report.judgements_needed is None
        assert not (tmp_path / "c" / "calibrator").exists()
        for query in QUERIES[3:8]:
            for hit in answers.ask(query):
                answers.judge(query, hit.id, True)
        assert "wrong hit" in calibrated(answers).problem or not calibrated(answers).problem


def test_judgements_needed_are_those_that_narrow_the_interval():
    rng = np.random.default_rng(1)
    queries = np.repeat(np.arange(40), 10)
    relevant = rng.random(400) < np.repeat(rng.beta(4, 1, 40), 10)
    curve = ThresholdCurve.of(np.full(400, 0.8), relevant, queries)
    now = curve.support(0.8)
    times = curve.times_for(0.8, 0.05)
    then = curve.support(0.8, times=times)
    assert now.high - now.low > 0.05 >= then.high - then.low
    assert curve.support(0.8, times=times * 0.98).high - curve.support(0.8, times=times * 0.98).low > 0.0499
    assert curve.times_for(0.8, 0.5) == 1.0
    assert curve.times_for(0.8, 1e-9) is None
    more = np.tile(relevant, 9)
    larger = ThresholdCurve.of(np.full(3600, 0.8), more, np.repeat(np.arange(360), 10)).support(0.8)
    predicted = curve.support(0.8, times=9.0)
    assert larger.high - larger.low == pytest.approx(predicted.high - predicted.low, rel=0.05)


def test_hits_come_in_an_order_that_tells_no_score_and_not_twice(server, tmp_path):
    with JudgedAnswers(tmp_path / "c", SearchEndpoint.of(server[0] + "/search?q={query}")) as answers:
        hits = answers.ask("tide works")
        order = []
        while (waiting := answers.next()) is not None:
            order.append(waiting[1].id)
            answers.judge(waiting[0], waiting[1].id, None if len(order) == 2 else True)
        assert sorted(order) == sorted(hit.id for hit in hits)
        assert order != [hit.id for hit in hits]
        answers.undo()
        assert answers.next()[1].id == order[-1]
        with pytest.raises(DataError, match="no such hit"):
            answers.judge("tide works", "elsewhere", True)


def test_a_folder_is_of_one_endpoint(server, tmp_path):
    url = server[0] + "/search?q={query}"
    with JudgedAnswers(tmp_path / "c", SearchEndpoint.of(url)) as answers:
        answers.ask("tide works")
    with JudgedAnswers(tmp_path / "c", SearchEndpoint.of(url)) as answers:
        assert list(answers.lists) == ["tide works"]
        assert answers.endpoint.mapping.score == "score", "what was detected is kept"
    with pytest.raises(ConfigError, match="has judgements of"):
        JudgedAnswers(tmp_path / "c", SearchEndpoint.of(server[0] + "/distances?q={query}"))
    with pytest.raises(ConfigError, match="read otherwise"):
        JudgedAnswers(tmp_path / "c", SearchEndpoint.of(url, mapping="score=other"))


def test_judgements_are_there_after_a_kill(server, tmp_path):
    program = """
import sys, os, signal
from pathlib import Path
from isthmus.service.endpoint_calibration import JudgedAnswers
from isthmus.service.search_endpoint import SearchEndpoint
answers = JudgedAnswers(Path(sys.argv[1]), SearchEndpoint.of(sys.argv[2]))
for at, hit in enumerate(answers.ask("tide works")):
    answers.judge("tide works", hit.id, at % 2 == 0)
    print(at, flush=True)
    if at == 6:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    url = server[0] + "/search?q={query}"
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "c"), url], capture_output=True)
    assert ended.returncode == -signal.SIGKILL
    with JudgedAnswers(tmp_path / "c", SearchEndpoint.of(url)) as answers:
        assert len(answers.judgements) == 7
        assert os.stat(tmp_path / "c").st_mode & 0o077 == 0


def test_the_pages_paths_need_the_token(server, tmp_path):
    with JudgedAnswers(tmp_path / "c", SearchEndpoint.of(server[0] + "/search?q={query}")) as answers:
        app = judging_app(answers, "right-token")
        key = {"authorization": "Bearer right-token"}
        ask(app, "/v1/state", status=401)
        ask(app, "/v1/state", headers={"authorization": "Bearer wrong"}, status=401)
        ask(app, "/v1/state", headers={**key, "host": "evil.example"}, status=421)
        ask(app, "/v1/judgements", method="POST", body={}, status=401)
        state = ask(app, "/v1/queries", method="POST", body={"query": "tide works"}, headers=key)
        shown = state["next"]
        assert set(shown) == {"query", "id", "title", "snippet"}, "no score, which would sway who judges"
        body = {"query": shown["query"], "document": shown["id"], "relevant": True}
        assert ask(app, "/v1/judgements", method="POST", body=body, headers=key)["judged"] == 1
        body["document"] = "elsewhere"
        ask(app, "/v1/judgements", method="POST", body=body, headers=key, status=404)
        assert "too few" in ask(app, "/v1/report", headers=key)["problem"]
        assert ask(app, "/v1/judgements", method="DELETE", headers=key)["judged"] == 0


def test_from_the_command_line(server, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    url = server[0] + "/search?q={query}"
    assert main(["calibrate-endpoint", url, "--report"]) == 1
    assert "no judgements yet" in capsys.readouterr().err
    folder = Path("calibrated-" + server[0].partition("//")[2].replace(":", "-"))
    judged(folder, SearchEndpoint.of(url)).close()
    assert main(["calibrate-endpoint", url, "--report", "--precision", "0.8"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert "240 judgements of 24 queries" in told
    assert "precision 0.8" in told
    assert "judgements in all would narrow that" in told
    assert main(["calibrate-endpoint", url, "--report", "--precision", "0.8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["judged"] == 240
    assert main(["calibrate-endpoint", url, "--serve", "--folder", "nowhere"]) == 1
    queries = tmp_path / "queries.txt"
    queries.write_text("tide\nlamp\niron\n")
    gone = "http://127.0.0.1:9/search?q={query}"
    assert main(["calibrate-endpoint", gone, "--queries", str(queries)]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_an_endpoint_that_is_down_is_told_so():
    with pytest.raises(SiloUnavailable, match="cannot be reached"):
        SearchEndpoint.of("http://127.0.0.1:9/?q={query}").search("tide")
