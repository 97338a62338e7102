"""A node over HTTP on loopback: policy, documents, statistics, feedback, models, certificates."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.calibration import Platt, save_calibrator
from isthmus.encoders import Description, add_encoder
from isthmus.errors import ConfigError, DataError
from isthmus.fusion import fuser, save_fuser
from isthmus.private.counts import fetch_catalogue, in_memory
from isthmus.private.messages import Enquiry
from isthmus.private.store import SiloFolder
from isthmus.rankers import Linear
from isthmus.retrieval import Statistics, summed
from isthmus.service.certificates import Authority, client_context, files, server_name
from isthmus.service.connections import server
from isthmus.service.display import QueryWords, snippet
from isthmus.service.export import export_rows
from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.parsing import ParsingLimits
from isthmus.service.releases import released_file
from isthmus.service.reliability import reliability_curve, save_curves
from isthmus.service.running import training
from isthmus.service.searching import FEATURES
from isthmus.service.security import ApiKeys
from isthmus.service.settings import (
    EncoderSettings,
    Learning,
    Models,
    NodeSettings,
    Policy,
    RequestLimits,
    SharedStatistics,
    SiloTraining,
    Source,
    read_node,
)
from isthmus.service.silo_training import TrainingRole
from isthmus.tables import Letor, Qrels, Run, read_letor, read_qrels, read_run
from tiny_encoders import lookup_encoder

ALL = Policy(search=True, snippets=True, counts=True, feedback=True, operate=True)
WORDS = ["tide", "wave", "turbine", "harbour", "lamp", "bridge", "river", "iron", "apple", "pear"]


def corpus(count=60):
    rng = np.random.default_rng(0)
    return [
        {"_id": f"d{at}", "title": WORDS[at % 10], "text": " ".join(rng.choice(WORDS, 8)) + f" number{at}"}
        for at in range(count)
    ]


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in corpus()))
    return NodeSettings(
        silo="north",
        folder=tmp_path / "north",
        sources=(Source("beir", path),),
        peers={"anonymous": ALL},
        encoder=EncoderSettings("lsa", dimensions=6),
        statistics=SharedStatistics(width=1024),
    )


@contextmanager
def serving(settings, **options):
    """A node on a port of its own, and a client for it."""
    with Node(settings) as node:
        running = server(node_app(node), port=0, tls=settings.tls, mutual=settings.tls is not None)
        thread = threading.Thread(target=running.run)
        thread.start()
        try:
            wait_for(lambda: running.started)
            port = running.servers[0].sockets[0].getsockname()[1]
            scheme = "http" if settings.tls is None else "https"
            wait_for(lambda: node.ready().indexed >= node.store.count() > 0)
            with httpx.Client(base_url=f"{scheme}://127.0.0.1:{port}/v1", timeout=30, **options) as client:
                client.event_hooks = {"request": [lambda request: request.headers.update(message_header())]}
                client.node = node
                yield client
        finally:
            running.should_exit = True
            thread.join()


def wait_for(happened, seconds=30):
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.01)


def hits(client, query, **more):
    found = client.post("/search", json={"query": query, **more})
    assert found.status_code == 200, found.text
    return found.json()["hits"]


def test_a_search_finds_explains_and_tells_no_more_than_allowed(settings):
    with serving(settings) as client:
        answer = client.post("/search", json={"query": "number7 tide", "k": 3, "explain": True}).json()
        assert (answer["silo"], answer["documents"], answer["statistics"]) == ("north", 60, "")
        first = answer["hits"][0]
        assert first["document"] == "d7"
        assert first["title"] == WORDS[7]
        assert "number7" in first["snippet"]
        assert first["probability"] is None
        assert sum(part["contribution"] for part in first["explanation"]) == pytest.approx(first["score"])
        assert hits(client, "zzz") == []
        assert hits(client, "the of") == []
        assert hits(client, "tide", threshold=0.5) == [], "no probability passes no threshold"
    shy = replace(settings, peers={"anonymous": Policy(search=True)})
    with serving(shy) as client:
        first = hits(client, "number7")[0]
        assert (first["title"], first["snippet"]) == ("", None)
        assert "d7" not in first["document"].split("/"), "an id may be a file's name"
        for path in ("/statistics", "/documents?find=tide"):
            assert client.get(path).status_code == 403
        assert first["token"] == "", "who may not judge gets no token"
        said = {"query": "tide", "token": "", "silo": "north", "relevant": True}
        assert client.post("/feedback", json=said).status_code == 403
        assert client.delete("/documents/d7").status_code == 403


def test_strangers_and_wrong_requests_are_refused_with_problem_details(settings, tmp_path):
    keys = ApiKeys(tmp_path / "keys.json")
    ada, eve = keys.add("ada", scopes=["search"]), keys.add("eve", scopes=["search"])
    closed = replace(
        settings,
        keys=tmp_path / "keys.json",
        peers={"ada": ALL},
        limits=RequestLimits(hits=5, body_bytes=2000),
    )
    with serving(closed) as client:
        assert client.get("/health").json()["role"] == "node"
        assert client.post("/search", json={"query": "tide"}).status_code == 401
        as_eve = client.post("/search", json={"query": "tide"}, headers={"x-api-key": eve})
        assert as_eve.status_code == 403
        client.headers["x-api-key"] = ada
        assert hits(client, "tide", k=5)
        for wrong, status in (
            ({"query": ""}, 422),
            ({"query": "   "}, 422),
            ({"query": "tide", "k": 6}, 422),
            ({"query": "tide", "kk": 6}, 422),
            ({"query": "t" * 1999}, 413),
        ):
            answer = client.post("/search", json=wrong)
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["status"] == status
        assert client.get("/nowhere").json()["title"] == "Not Found"


def test_documents_come_change_and_go_at_once(settings):
    with serving(settings) as client:
        put = client.put("/documents", json={"documents": [{"id": "a/new one", "body": "zanzibar"}]})
        assert put.json() == {"added": 1, "changed": 0, "removed": 0}
        assert [hit["document"] for hit in hits(client, "zanzibar")] == ["a/new one"]
        put = client.put("/documents", json={"documents": [{"id": "a/new one", "body": "timbuktu"}]})
        assert put.json()["changed"] == 1
        assert hits(client, "zanzibar") == []
        assert hits(client, "timbuktu")[0]["snippet"] == "timbuktu"
        found = client.get("/documents", params={"find": "timbuktu", "k": 5}).json()
        assert [each["id"] for each in found["documents"]] == ["a/new one"]
        assert client.delete("/documents/a/new one").json()["removed"] == 1
        assert client.delete("/documents/a/new one").status_code == 404
        assert hits(client, "timbuktu") == []
        settings.sources[0].path.write_text(json.dumps(corpus(2)[1]) + "\n")
        assert client.post("/sources").json()["errors"] == []
        wait_for(lambda: client.node.store.count() == 1 == len(client.node.index.snapshot))
        settings.sources[0].path.write_text("nonsense\n")
        (error,) = client.post("/sources").json()["errors"]
        assert "corpus.jsonl:1" in error
        assert client.node.store.count() == 1


def test_private_statistics_are_drawn_and_charged_once(settings):
    with serving(settings) as client:
        first = client.get("/statistics")
        assert first.headers["content-type"] == "application/vnd.isthmus.statistics"
        figures = Statistics.from_bytes(first.content)
        assert (figures.form, figures.silos, figures.documents, figures.epsilon) == (
            "private",
            ("north",),
            60,
            1.0,
        )
        assert not figures.about
        assert client.get("/statistics").content == first.content
        told = client.get("/release").json()
        assert told["most_spent"] == 1.0
        assert [(row["kind"], row["guarantee"], row["times"]) for row in told["departures"]] == [
            ("sums", "ε = 1", 1)
        ]
    with serving(settings) as client:
        assert client.get("/statistics").content == first.content, "the noise outlives the process"
        client.put("/documents", json={"documents": [{"id": f"x{at}", "body": "more"} for at in range(30)]})
        second = Statistics.from_bytes(client.get("/statistics").content)
        assert second.documents == 90
        assert client.get("/release").json()["most_spent"] == 2.0
        client.node.ledger.audit()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            ["statistics.epsilon=20.0"],
            "statistics.epsilon = 20 costs a document ε = 20 a release and budget = 9.0",
        ),
        (
            ["statistics.epsilon=5.0", "statistics.fields=true"],
            "with fields = true costs a document ε = 10 a",
        ),
        (["peers.anonymous.budget=0.5"], "raise peers.anonymous.budget, or set statistics.form"),
    ],
)
def test_statistics_that_cost_more_than_a_budget_are_refused_with_the_settings(tmp_path, changes, problem):
    path = tmp_path / "silo.toml"
    path.write_text('silo = "north"\nfolder = "x"\n[peers.anonymous]\nsearch = true\ncounts = true\n')
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_node(path, changes)
    for allowed in ('statistics.form="exact"', "peers.anonymous.counts=false"):
        assert read_node(path, [*changes, allowed])


def test_a_spent_budget_shows_nothing_new(settings, caplog):
    tight = replace(settings, folder=settings.folder / "tight", budget=1.0)
    with serving(tight) as client:
        assert client.get("/statistics").status_code == 200
    released_file(tight).unlink()  # so that noise has to be drawn, and charged, again
    with serving(tight) as client, caplog.at_level("WARNING", "isthmus.service"):
        for _ in range(2):
            refused = client.get("/statistics")
            assert refused.status_code == 403
            assert "budget" in refused.json()["detail"]
        assert client.get("/release").json()["most_spent"] == 1.0
    (line,) = (each for each in caplog.messages if "no statistics leave" in each)
    assert line.startswith("no statistics leave for anonymous: the release asks for ε = 1 but only 0 is left")
    enough = replace(settings, peers={"anonymous": replace(ALL, budget=1.5)})
    with serving(enough) as client:
        first = client.get("/statistics").content
        client.put("/documents", json={"documents": [{"id": f"x{at}", "body": "more"} for at in range(30)]})
        assert client.get("/statistics").content == first, "what was released stays what is shown"
        (peer,) = client.get("/release").json()["peers"]
        assert (peer["budget"], peer["left"]) == (1.5, 0.5)


def test_exact_and_no_statistics(settings):
    with serving(replace(settings, statistics=SharedStatistics("exact", fields=True))) as client:
        figures = Statistics.from_bytes(client.get("/statistics").content)
        client.get("/statistics")
        assert figures.counts("text.having", ["number7", "nothing"]).tolist() == [1, 0]
        assert figures.counts("title.having", ["tide"]).tolist() == [6]
        (row,) = client.get("/release").json()["departures"]
        assert (row["guarantee"], row["times"]) == ("no DP guarantee", 1)
    with serving(replace(settings, statistics=SharedStatistics("none"))) as client:
        assert client.get("/statistics").status_code == 403


def test_the_sum_of_all_silos_is_scored_with_and_survives_a_restart(settings):
    exact = replace(settings, statistics=SharedStatistics("exact"))
    with serving(exact) as client:
        own = Statistics.from_bytes(client.get("/statistics").content)
        before = hits(client, "tide")[0]["score"]
        total = summed([own, replace(own, silos=("south",), documents=600)])
        kind = {"content-type": "application/vnd.isthmus.statistics"}
        assert client.put("/statistics", content=total.to_bytes(), headers=kind).status_code == 204
        answer = client.post("/search", json={"query": "tide"}).json()
        assert answer["statistics"] == total.version == client.get("/ready").json()["statistics"]
        assert answer["hits"][0]["score"] > before
        for bad in (b"", b"nonsense", total.to_bytes()[:-30], replace(own, documents=0).to_bytes()):
            assert client.put("/statistics", content=bad, headers=kind).status_code in (400, 422)
    with serving(exact) as client:
        assert client.post("/search", json={"query": "tide"}).json()["statistics"] == total.version


def judged_runs(node):
    """Runs of both retrievers over many queries, and judgements that both have something to do with."""
    snapshot = node.index.snapshot
    lists, qrels = {"bm25": {}, "dense": {}}, {}
    for at, word in enumerate(WORDS * 2):
        query = f"{word} {WORDS[(at * 3 + 1) % 10]}"
        found = snapshot.find(query, 20)
        for name in lists:
            lists[name][f"q{at}"] = {
                document: score
                for document, score, inside in zip(
                    found.documents, found.scores[name].tolist(), found.listed[name].tolist(), strict=True
                )
                if inside
            }
        scores = lists["bm25"][f"q{at}"]
        top = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
        qrels[f"q{at}"] = {document: int(rank < 5 or rank == 9) for rank, document in enumerate(top)}
    return [Run.from_dict(held, name=name) for name, held in lists.items()], Qrels.from_dict(qrels)


def adds_up(hit):
    """Whether the parts of a hit's explanation are its log-odds."""
    odds = np.log(hit["probability"]) - np.log1p(-hit["probability"])
    return sum(part["contribution"] for part in hit["explanation"]) == pytest.approx(odds, abs=1e-4)


def test_a_fuser_gives_probabilities_with_reasons(settings, tmp_path):
    with serving(settings) as client:
        runs, qrels = judged_runs(client.node)
    save_fuser(fuser("stacked", calibrator="platt").fit(runs, qrels), tmp_path / "fuser")
    trained = replace(settings, models=Models(fuser=tmp_path / "fuser"))
    with serving(trained) as client:
        found = hits(client, "tide wave", k=10, explain=True)
        chances = [hit["probability"] for hit in found]
        assert chances == sorted(chances, reverse=True)
        assert 0.5 < chances[0] <= 1
        for hit in found:
            assert {part["retriever"] for part in hit["explanation"]} == {"bm25", "dense", "start"}
            assert all(part["weight"] is not None for part in hit["explanation"][:2])
            assert adds_up(hit)
        kept = hits(client, "tide wave", k=10, threshold=chances[2])
        assert [hit["probability"] for hit in kept] == [chance for chance in chances if chance >= chances[2]]
        assert hits(client, "zzz", explain=True) == []
        assert client.get("/release").json()["last_training"] is not None
    margins = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0])
    save_calibrator(Platt().fit(margins, np.array([0, 0, 1, 0, 1, 1])), tmp_path / "calibrator")
    judged = replace(trained, models=replace(trained.models, calibrator=tmp_path / "calibrator"))
    with serving(judged) as client:
        for hit in hits(client, "tide wave", k=10, explain=True):
            assert hit["explanation"][-1]["retriever"] == "calibration"
            assert adds_up(hit)


def test_a_fuser_may_join_a_cross_encoders_list_of_the_first_candidates(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    folder = lookup_encoder(tmp_path / "pairs", np.ones((11, 1)))
    Description("pairs", kind="cross-encoder").write(folder)
    add_encoder(str(folder), name="pairs")
    with serving(settings) as client:
        runs, qrels = judged_runs(client.node)
    runs.append(runs[0].top(20).with_scores(np.ones(runs[0].top(20).rows), name="cross"))
    save_fuser(fuser("stacked", calibrator="platt").fit(runs, qrels), tmp_path / "fuser")
    models = Models(fuser=tmp_path / "fuser", reranker="pairs")
    with serving(replace(settings, models=models)) as client:
        found = hits(client, "tide wave", k=40, explain=True)
        scores = [part["raw"] for hit in found for part in hit["explanation"] if part["retriever"] == "cross"]
        assert scores.count(1.0) == 20  # of the first, by any list; the others it has not read
        assert len(found) > 20
        assert hits(client, "zzz", explain=True) == []
    with (
        pytest.raises(DataError, match=r"joins bm25, dense, cross .*models.reranker"),
        serving(replace(settings, models=Models(fuser=tmp_path / "fuser"))),
    ):
        pass


def test_a_node_with_another_encoder_says_so_once(settings, caplog):
    with serving(settings) as client:
        for agreed in ("onnx-most", "", "onnx-most", "none", client.node.ready().encoder, "onnx-most"):
            client.post("/search", json={"query": "tide"}, headers={"isthmus-encoder": agreed})
    told = [record.getMessage() for record in caplog.records if "agree on the encoder" in record.getMessage()]
    assert len(told) == 1
    assert "onnx-most" in told[0]


def test_a_ranker_and_the_silos_own_calibrator(settings, tmp_path):
    rng = np.random.default_rng(1)
    table = rng.random((400, len(FEATURES)))
    grades = (table[:, 16] > 0.5).astype(int)
    rows = Letor.of([f"q{at // 20}" for at in range(400)], table, grades)
    ranker = Linear().fit(rows)
    ranker.save(tmp_path / "ranker")
    save_calibrator(Platt().fit(ranker.score(rows), grades), tmp_path / "calibrator")
    models = Models(ranker=tmp_path / "ranker", calibrator=tmp_path / "calibrator")
    with serving(replace(settings, models=models)) as client:
        found = hits(client, "number7 tide", explain=True)
        assert all(0 <= hit["probability"] <= 1 for hit in found)
        assert [hit["probability"] for hit in found] == sorted(
            (hit["probability"] for hit in found), reverse=True
        )
        assert {part["retriever"] for part in found[0]["explanation"]} == {"bm25", "dense", "start"}
        assert found[0]["explanation"][0]["contribution"] > 0
        assert all(adds_up(hit) for hit in found if 1e-6 < hit["probability"] < 1 - 1e-6)
        starts = [hit["explanation"][-1]["contribution"] for hit in found]
        assert starts == pytest.approx([starts[0]] * len(starts), abs=1e-4)
        stays = client.node.searcher.scorer
        (tmp_path / "calibrator").write_bytes(b"damaged")
        client.node._load_new_models()
        assert client.node.searcher.scorer is stays
        save_calibrator(Platt().fit(ranker.score(rows), 1 - grades), tmp_path / "calibrator")
        client.node._load_new_models()
        assert client.node.searcher.scorer is not stays
    wide = Letor.of(["q"] * 8, rng.random((8, 5)), [0, 1] * 4)
    Linear().fit(wide).save(tmp_path / "ranker")
    with pytest.raises(DataError, match="features of a node"), Node(replace(settings, models=models)):
        pass


def test_feedback_stays_and_becomes_rows_to_learn_from(settings, tmp_path):
    with serving(settings) as client:
        runs, qrels = judged_runs(client.node)
    save_fuser(fuser("stacked", calibrator="platt").fit(runs, qrels), tmp_path / "fuser")
    told = replace(settings, models=Models(fuser=tmp_path / "fuser"), learning=Learning(least_queries=1))
    with serving(told) as client:
        for hit in hits(client, "tide wave", k=6):
            said = {
                "query": "tide wave",
                "token": hit["token"],
                "silo": "north",
                "relevant": hit["score"] > 0,
            }
            assert client.post("/feedback", json=said).status_code == 204
        assert client.post("/feedback", json=said | {"token": "nobody"}).status_code == 404
        assert client.post("/feedback", json=said | {"silo": "south"}).status_code == 404
        curves = client.get("/calibration").json()["curves"]
        assert {curve["retriever"] for curve in curves} == {"shown", "bm25", "dense"}
        shown = next(curve for curve in curves if curve["retriever"] == "shown")
        assert (shown["count"], shown["source"]) == (6, "feedback")
        assert sum(bin["count"] for bin in shown["bins"]) == 6
        assert export_rows(client.node.searcher, tmp_path / "out")["judgements"] == 6
        rows = read_letor(tmp_path / "out" / "rows.txt")
        assert rows.width == len(FEATURES)
        assert rows.grades.sum() == read_qrels(tmp_path / "out" / "qrels.txt").grades.sum()
        assert read_run(tmp_path / "out" / "bm25.run").queries == ("q1",)


def test_validation_curves_are_shown(settings, tmp_path):
    curve = reliability_curve([0.1, 0.9, 0.8], [0, 1, 1], silo="north")
    assert curve.ece == pytest.approx((0.1 + 0.1 + 0.2) / 3)
    other = reliability_curve([0.5], [1], silo="south")
    save_curves([curve, other], tmp_path / "curves.json")
    with serving(replace(settings, models=Models(reliability=tmp_path / "curves.json"))) as client:
        (told,) = client.get("/calibration").json()["curves"]
        assert told["relevant"] == 2
        assert [each["kept"] for each in told["thresholds"]][-1] == 1


def test_curves_are_in_the_ledger_before_they_leave(settings, tmp_path):
    """They are made of judgements: what they say of single ones has no guarantee."""
    save_curves([reliability_curve([0.1, 0.9], [0, 1], silo="north")], tmp_path / "curves.json")
    with serving(settings) as client:
        client.get("/calibration")
        assert client.get("/release").json()["departures"] == []
    with serving(replace(settings, models=Models(reliability=tmp_path / "curves.json"))) as client:
        assert client.get("/calibration").json()["curves"]
        (row,) = client.get("/release").json()["departures"]
        assert (row["kind"], row["guarantee"], row["peer"]) == ("sums", "no DP guarantee", "anonymous")


def test_a_node_knows_its_broker_by_certificate(settings, tmp_path):
    authority = Authority.at(tmp_path / "keys")
    north = authority.issue("north", clients=False)
    broker, stranger = (authority.issue(name, clients=True) for name in ("broker", "stranger"))
    known = replace(settings, tls=north, peers={"broker": ALL, "anonymous": ALL})
    other = Authority.at(tmp_path / "other").issue("broker", clients=True)
    with serving(known, verify=client_context(broker)) as client:
        named = {"sni_hostname": server_name("north")}
        asked = client.post("/search", json={"query": "tide"}, extensions=named)
        assert asked.status_code == 200
        assert client.get("/release", extensions=named).json()["departures"][0]["peer"] == "broker"
        with httpx.Client(verify=client_context(stranger)) as unknown:
            refused = unknown.post(
                f"{client.base_url}search", json={"query": "tide"}, headers=message_header(), extensions=named
            )
            assert refused.status_code == 403
        impostor = replace(other, authority=broker.authority)
        with httpx.Client(verify=client_context(impostor)) as forged, pytest.raises(httpx.TransportError):
            forged.post(f"{client.base_url}search", json={"query": "tide"}, extensions=named)
    plain = replace(settings, peers={"broker": ALL})
    with serving(plain) as client:
        assert client.post("/search", json={"query": "tide"}).status_code == 401


def test_the_log_has_no_query_unless_asked(settings, caplog, monkeypatch):
    for name in ("isthmus.access", "isthmus.service"):  # wherever else they may have been sent
        monkeypatch.setattr(logging.getLogger(name), "handlers", [caplog.handler])
        caplog.set_level(logging.INFO, name)
    with serving(settings) as client:
        hits(client, "secretword tide")
        client.post("/search", json={"query": "secretword", "x": "secretword"})
    assert caplog.records
    assert "secretword" not in caplog.text
    with serving(replace(settings, log_queries=True)) as client:
        hits(client, "secretword tide")
    assert "secretword" in caplog.text


def test_metrics_and_the_description_of_the_api(settings):
    with serving(settings) as client:
        hits(client, "tide", k=4)
        told = client.get(str(client.base_url).replace("/v1/", "/metrics")).text
        assert 'isthmus_hits_total{peer="anonymous"} 4' in told
        assert "isthmus_documents 60" in told
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/v1/search", "/v1/statistics", "/v1/documents", "/v1/feedback", "/v1/release"} <= set(paths)


def test_many_searches_while_documents_change_lose_none(settings):
    with serving(settings) as client:
        failures, done = [], threading.Event()

        def ask():
            with httpx.Client(base_url=client.base_url, timeout=30) as own:
                while not done.is_set():
                    found = own.post("/search", json={"query": "number7"}, headers=message_header())
                    if found.status_code != 200 or found.json()["hits"][0]["document"] != "d7":
                        failures.append(found.text)

        askers = [threading.Thread(target=ask) for _ in range(3)]
        for asker in askers:
            asker.start()
        for at in range(8):
            client.put("/documents", json={"documents": [{"id": f"x{at}", "body": f"tide {at}"}]})
            client.delete(f"/documents/x{at - 2}")
        done.set()
        for asker in askers:
            asker.join()
        assert not failures


def test_training_knows_the_paths_in_the_settings_and_no_others(settings, tmp_path):
    tls = files(tmp_path / "keys")
    wanted = SiloTraining("127.0.0.1:9092", tmp_path / "rows.txt", tls)
    part = TrainingRole.of(settings, wanted)
    own = {"silo": "north", "data": f"{tmp_path}/rows.txt", "ledger": f"{tmp_path}/north/ledger.db"}
    assert part.node_config == own | {"least-colluding": 1, "most-width": 1 << 18}
    assert TrainingRole.loaded(part.dumped()) == part
    private = replace(wanted, private=tmp_path / "private", queries=tmp_path / "q.tsv", masked_only=True)
    told = TrainingRole.of(replace(settings, training=private), private).node_config
    assert told["ledger"] == f"{tmp_path}/private/silo.ledger"
    assert told["folder"] == f"{tmp_path}/private"
    assert told["masked-only"] is True
    floor = TrainingRole.of(settings, replace(wanted, most_clip=0.5, least_noise=2.0)).node_config
    assert (floor["most-clip"], floor["least-noise"]) == (0.5, 2.0)
    for wrong in ({"coordinator": "there"}, {"queries": tmp_path}, {"user": "nobody"}, {"most_clip": 1.0}):
        with pytest.raises(ValueError, match=r"must be|belong together|needs private"):
            replace(wanted, **wrong)


def test_training_is_started_again_when_it_ends_and_ends_with_the_node(settings, tmp_path):
    wanted = SiloTraining("127.0.0.1:1", tmp_path / "rows.txt", files(tmp_path / "no-keys"))
    settings.folder.mkdir(parents=True)
    with training(settings, wanted) as process:
        first = process.pid
        wait_for(lambda: process.pid != first, seconds=120)
    log = (settings.folder / "training.log").read_text()
    assert "cannot be read" in log
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_training_ends_when_the_node_is_killed(settings, tmp_path):
    Authority.at(tmp_path / "keys").issue("north.training", clients=True)
    program = (
        "import sys, time\nfrom pathlib import Path\n"
        "from isthmus.service.certificates import files\n"
        "from isthmus.service.running import training\n"
        "from isthmus.service.settings import NodeSettings, SiloTraining\n"
        "folder = Path(sys.argv[1])\n"
        "wanted = SiloTraining('127.0.0.1:1', folder / 'rows.txt', files(folder / 'keys/north.training'))\n"
        "with training(NodeSettings('north', folder), wanted) as process:\n"
        "    print(process.pid, flush=True)\n    time.sleep(600)\n"
    )
    node = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        pid = int(node.stdout.readline())
        log = tmp_path / "training.log"
        wait_for(lambda: log.exists() and "no answer from the coordinator" in log.read_text(), seconds=120)
        wait_for(lambda: Path(f"/proc/{pid}").exists())
    finally:
        node.kill()
        node.wait()
        node.stdout.close()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())


def test_private_counts_are_answered_of_the_nodes_documents_from_its_one_ledger(settings, tmp_path):
    folder = SiloFolder(tmp_path / "private")
    training = SiloTraining(
        "127.0.0.1:1",
        tmp_path,
        files(tmp_path),
        private=folder.path,
        queries=tmp_path / "q.tsv",
    )
    with serving(replace(settings, training=training)) as client:
        wait_for(lambda: (folder.path / "body.words").exists())
        client.get("/statistics")
        with folder.ledger() as ledger:
            carrier = in_memory(folder.desk(2.0, ledger), "south")
            assert len(fetch_catalogue(carrier, "body").documents) == 60
            carrier(Enquiry("body", 0).encode())
            assert ledger.spent("d7") == 3.0
        rows = client.get("/release").json()["departures"]
        assert {(row["kind"], row["guarantee"]) for row in rows} == {
            ("sums", "ε = 1"),
            ("catalogue", "no DP guarantee"),
            ("counts", "ε = 2"),
        }
    (settings.folder / "ledger.db").write_bytes(b"")
    with pytest.raises(ConfigError, match="two ledgers"):
        Node(replace(settings, training=training))


@pytest.mark.parametrize(
    ("body", "query", "shown"),
    [
        ("short text", "short", "short text"),
        ("word " * 100 + "the needle in it " + "word " * 100, "needle", "needle"),
        ("x" * 1000, "y", "x" * 120),
    ],
)
def test_a_snippet_shows_the_words_that_were_asked_for(body, query, shown):
    cut = snippet(body, QueryWords.of(query, ()))
    assert shown in cut
    assert len(cut) <= 242


@given(
    st.lists(st.sampled_from(["a", "ab", "abc", "b", "bab", "cass", "k9", "a_b"]), max_size=5),
    st.text("aAbBcCsSkK9_ .-", max_size=80),
)
def test_a_plain_text_shows_the_words_that_any_text_shows(words, text):
    wanted = QueryWords.of(" ".join(words), words)
    beyond = wanted.places(text + " \u00fc")  # which is read by its pattern
    assert wanted.places(text) == beyond


class TestReload:
    """A running node reads its settings' sources again."""

    @staticmethod
    def at(folder, *names):
        for name in names:
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{name}.md").write_text(f"tide of {name}")
        return NodeSettings(
            silo="north",
            folder=folder / "north",
            sources=tuple(Source("folder", folder / name) for name in names),
            encoder=EncoderSettings("none"),
        )

    def test_sources_come_and_go_with_the_file(self, tmp_path):
        now = [self.at(tmp_path, "a")]
        with Node(now[0], reread=lambda: now[0]).offline() as node:
            node.reload()
            assert set(node.store.by_source().values()) == {1}
            now[0] = self.at(tmp_path, "b", "c")
            report = node.reloaded()
            assert [each.documents for each in report.sources] == [1, 1]
            assert node.store.present(["a.md", "b.md", "c.md"]) == {"b.md", "c.md"}

    def test_files_that_change_are_read_by_themselves(self, tmp_path):
        settings = replace(self.at(tmp_path, "a"), reading=ParsingLimits(watch=0.05))
        with Node(settings) as node:
            wait_for(lambda: node.store.present(["a.md"]), seconds=120)
            (tmp_path / "a" / "new.md").write_text("an ebb of quokkas")
            (tmp_path / "a" / "a.md").unlink()
            wait_for(lambda: node.store.present(["a.md", "new.md"]) == {"new.md"}, seconds=120)

    def test_settings_that_cannot_be_read_leave_all_as_it_was(self, tmp_path):
        def broken():
            raise ConfigError("unknown key")

        with Node(self.at(tmp_path, "a"), reread=broken).offline() as node:
            node.read_sources()
            with pytest.raises(ConfigError):
                node.reload()
            assert node.store.present(["a.md"])

    def test_no_source_at_all_is_refused_as_at_a_start(self, tmp_path):
        now = [self.at(tmp_path, "a")]
        with Node(now[0], reread=lambda: now[0]).offline() as node:
            node.read_sources()
            now[0] = self.at(tmp_path)
            with pytest.raises(ConfigError, match="names no source"):
                node.reload()
            assert node.store.present(["a.md"])

    def test_what_else_changed_waits_for_a_restart(self, tmp_path, caplog):
        now = [self.at(tmp_path, "a")]
        with Node(now[0], reread=lambda: now[0]).offline() as node:
            now[0] = replace(now[0], depth=7)
            node.reload()
            assert node.settings.depth == 100
            assert "restart" in caplog.text
