"""Encoders behind an HTTP interface: a real server that behaves, is busy, and lies."""

from __future__ import annotations

import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from isthmus.encoders import add_encoder, endpoint, load_encoder, split_passages
from isthmus.encoders.endpoint import BATCH_TEXTS, Endpoint, read_key
from isthmus.errors import ConfigError, DataError, ServiceError
from isthmus.service import index as indexing
from isthmus.service.index import Index
from isthmus.service.node import Node
from isthmus.service.settings import EncoderSettings, NodeSettings, Policy
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Search

KEY = "sk-very-secret"


def vector(text, seed=0):
    """A direction of its own for every text."""
    return np.random.default_rng([seed, *text.encode()]).normal(size=8).tolist()


class Interface:
    """OpenAI's /v1/embeddings; `replies` are statuses to give first, `change` what to do to an answer."""

    def __init__(self):
        self.replies, self.change, self.requests, self.key, self.seed = [], None, [], "", 0
        self.longest = 1 << 30
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append((self.path, dict(self.headers), body))
                status = outer.replies.pop(0) if outer.replies else 200
                if outer.key and self.headers.get("authorization") != f"Bearer {outer.key}":
                    status = 401
                if any(len(text) > outer.longest for text in body["input"]):
                    status = 400
                data = [
                    {"object": "embedding", "index": at, "embedding": vector(text, outer.seed)}
                    for at, text in enumerate(body["input"])
                ]
                answer = {"object": "list", "data": data[::-1], "model": body["model"]}
                content = json.dumps(answer) if outer.change is None else outer.change(answer)
                self.send_response(status)
                self.send_header("retry-after", "0")
                self.send_header("content-length", str(len(content.encode())))
                self.end_headers()
                self.wfile.write(content.encode())

            def log_message(self, *words):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1#text-model"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def interface(tmp_path, monkeypatch):
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    monkeypatch.delenv("ISTHMUS_ENCODER_KEY", raising=False)
    interface = Interface()
    yield interface
    interface.server.shutdown()
    interface.server.server_close()


def test_texts_become_unit_vectors_in_their_order(interface):
    encoder = Endpoint(interface.url)
    texts = [f"text {at}" for at in range(BATCH_TEXTS + 3)] + [""]
    vectors = encoder.encode(texts)
    expected = np.array([vector(text) for text in texts[:-1]])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors[:-1], expected, atol=1e-6)
    assert not vectors[-1].any()
    assert encoder.width == 8
    path, _, body = interface.requests[-1]
    assert (path, body["model"], len(body["input"])) == ("/v1/embeddings", "text-model", 3)
    assert encoder.encode([]).shape == (0, 8)
    np.testing.assert_array_equal(encoder.encode_queries(texts[:1]), vectors[:1])


def test_an_added_endpoint_is_known_by_what_it_encodes(interface, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    interface.key = KEY
    description, _ = add_encoder(interface.url, key="env:MY_KEY")
    assert (description.name, description.kind, description.width) == ("text-model", "endpoint", 8)
    asked = len(interface.requests)
    encoder = load_encoder("text-model")
    fingerprint = encoder.fingerprint
    assert len(interface.requests) == asked  # a node starts while the endpoint is away
    assert load_encoder("text-model").encode(["a"]).shape == (1, 8)
    other = Endpoint(interface.url.replace("text-model", "other"), "env:MY_KEY")
    assert other.fingerprint != fingerprint == Endpoint(interface.url, "env:MY_KEY").fingerprint
    interface.seed = 1
    with pytest.raises(DataError, match="otherwise than when it was added"):
        load_encoder("text-model").encode(["a"])


def test_what_fails_for_a_moment_is_sent_again(interface):
    encoder = Endpoint(interface.url, pauses=0.01)
    interface.replies = [429, 503, 500]
    assert encoder.encode(["a"]).any()
    assert len(interface.requests) == 5  # four for the probe, one for the text
    interface.replies = [500] * 4
    with pytest.raises(ServiceError, match="encodes nothing: status 500"):
        encoder.encode(["a"])
    interface.replies = [404]
    sent = len(interface.requests)
    with pytest.raises(ServiceError, match="status 404"):
        encoder.encode(["a"])
    assert len(interface.requests) == sent + 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda answer: "no JSON", "no embeddings"),
        (lambda answer: json.dumps({"data": answer["data"][1:]}), "vectors for"),
        (
            lambda answer: json.dumps({"data": [{**item, "index": 0} for item in answer["data"]]}),
            "vectors for",
        ),
        (
            lambda answer: json.dumps({"data": [{**i, "embedding": [1e999]} for i in answer["data"]]}),
            "finite",
        ),
        (
            lambda answer: json.dumps({"data": [{**i, "embedding": "x"} for i in answer["data"]]}),
            "no embeddings",
        ),
        (
            lambda answer: json.dumps({"data": [{**i, "embedding": [1.0]} for i in answer["data"]]}),
            "1 numbers, not 8",
        ),
        (lambda answer: "[" * 100_000, "no embeddings"),
    ],
)
def test_answers_of_another_form_are_refused(interface, change, problem):
    encoder = Endpoint(interface.url)
    encoder.encode(["a"])
    interface.change = change
    with pytest.raises(ServiceError, match=problem):
        encoder.encode(["a", "b"])


def test_the_key_stays_where_it_is(interface, tmp_path, monkeypatch, caplog, capsys):
    caplog.set_level(logging.DEBUG)
    interface.key = KEY
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o644)
    with pytest.raises(DataError, match="chmod 600"):
        read_key(f"file:{file}")
    file.chmod(0o600)
    add_encoder(interface.url, key=f"file:{file}", name="mine")
    monkeypatch.setenv("WRONG", "wrong-" + KEY)
    with pytest.raises(ServiceError, match="status 401, key from env:WRONG") as wrong:
        Endpoint(interface.url, "env:WRONG").encode(["a"])
    with pytest.raises(ConfigError, match="ABSENT is not set"):
        Endpoint(interface.url, "env:ABSENT").encode(["a"])
    with pytest.raises(ConfigError, match="env:NAME or file:PATH") as literal:
        add_encoder(interface.url, key=KEY)
    monkeypatch.setenv("BROKEN", "a\nb")
    with pytest.raises(ConfigError, match="more than one line"):
        read_key("env:BROKEN")
    monkeypatch.setenv("ISTHMUS_ENCODER_KEY", KEY)
    assert load_encoder(interface.url).encode(["a"]).any()
    manifest = (tmp_path / "encoders" / "mine" / "encoder.json").read_text()
    streams = capsys.readouterr()
    for text in (manifest, caplog.text, streams.out, streams.err, str(wrong.value), str(literal.value)):
        assert KEY not in text


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://host/v1#m", "is no address"),
        ("https://user:pass@host/v1#m", "password"),
        ("https://host/v1?key=x#m", "password or a query"),
        ("http://elsewhere.example/v1#m", "unencrypted"),
    ],
)
def test_addresses_that_would_leak_are_refused(url, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        load_encoder(url)
    assert "pass@" not in str(error.value)


def test_an_added_endpoint_that_is_away_has_its_width_and_one_short_try_a_query(interface):
    add_encoder(interface.url, name="mine")
    encoder = load_encoder("mine")
    interface.replies = [503] * 9
    assert encoder.width == 8
    with pytest.raises(ServiceError, match="status 503"):
        encoder.encode_queries(["a"])
    assert len(interface.replies) == 8


def test_a_text_that_the_endpoint_refuses_costs_no_other_its_vector(interface, caplog):
    encoder = Endpoint(interface.url)
    encoder.encode(["a"])
    interface.longest = 30
    texts = [f"text {at}" for at in range(9)]
    texts[5] = "long " * 20
    vectors = encoder.encode(texts)
    assert np.flatnonzero(~vectors.any(axis=1)).tolist() == [5]
    np.testing.assert_array_equal(vectors[6], Endpoint(interface.url).encode(texts[6:7])[0])
    assert "a passage of 100 characters gets no vector" in caplog.text
    assert "long" not in caplog.text
    interface.longest = 0  # every text is refused: it is the endpoint
    with pytest.raises(ServiceError, match="status 400"):
        encoder.encode(texts)


def test_texts_without_blanks_are_split_for_an_endpoint_too(interface):
    encoder = Endpoint(interface.url, limit=16)
    assert split_passages(encoder, "", "one two three") == [(0, 13)]
    for body in ("word " * 100, "x" * 2000, "検索" * 100):
        spans = split_passages(encoder, "", body)
        assert len(spans) > 4
        assert (spans[0][0], spans[-1][1]) == (0, len(body))


def silo(tmp_path, interface):
    add_encoder(interface.url, name="mine")
    return NodeSettings(
        "north",
        folder=tmp_path / "node",
        encoder=EncoderSettings("encoder", "mine"),
        peers={"local": Policy(search=True, snippets=True)},
    )


def wait_for(happened):
    until = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_node_whose_endpoint_is_away_starts_and_answers_by_words(tmp_path, interface, monkeypatch, caplog):
    monkeypatch.setattr("isthmus.service.node.TICK", 0.05)
    monkeypatch.setattr("isthmus.service.encoding.REST", 0.5)
    monkeypatch.setattr(endpoint, "DOCUMENTS", endpoint.Patience(1, 5.0))
    settings = silo(tmp_path, interface)
    interface.replies = [500] * 100_000
    with Node(settings) as node:
        node.put([Draft(f"d{at}", "", f"tidal power {at}") for at in range(30)])
        wait_for(lambda: node.index.behind == 0)
        first = node.searcher.search(Search(query="tidal"), snippets=False)
        assert len(first.hits) == 10
        assert first.detail == "its encoder does not answer: searched by words alone"
        assert node.searcher.search(Search(query="tidal"), snippets=False).hits
        assert node.ready().ready
        node.put([Draft("last", "", "turbines")])
        wait_for(lambda: node.index.behind == 0)
        assert node.searcher.search(Search(query="turbines"), snippets=False).hits
        sums = node.score_sums("broker")
        assert sums is None or not sums.bm25.count  # those of words alone would stay
        interface.replies = []
        wait_for(lambda: node.index.unencoded == 0)
        wait_for(lambda: not node.searcher.search(Search(query="tidal"), snippets=False).detail)
        wait_for(lambda: (sums := node.score_sums("broker")) is not None and sums.dense.count)
    warnings = caplog.text.count("searched by words alone until the encoder answers again")
    assert warnings in (1, 2), "a query that was under way may fail after another was answered"


def test_what_was_encoded_before_a_failure_stays(tmp_path, interface, monkeypatch):
    monkeypatch.setattr(indexing, "AT_ONCE", 4)
    monkeypatch.setattr(endpoint, "DOCUMENTS", endpoint.Patience(1, 5.0))
    store = SqliteStore(tmp_path / "documents.db")
    store.put([Draft(f"d{at}", "", f"tidal power {at}") for at in range(10, 22)])
    index = Index(tmp_path / "index", store, encoder=silo(tmp_path, interface).encoder)
    index.catch_up()
    interface.replies = [200, 200, 500]  # the probe, four texts, no more
    with pytest.raises(ServiceError):
        index.encode()
    assert index.unencoded == 8
    monkeypatch.setattr(index, "_texts", None)  # the rest waits, and is not read and split again
    assert index.encode() == 8
    assert index.unencoded == 0
    index.close()
    store.close()
