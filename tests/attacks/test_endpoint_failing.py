"""An encoder's endpoint that hangs, fails or answers nonsense: searches go on without vectors."""

from __future__ import annotations

import gzip
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from isthmus.encoders import add_encoder, load_encoder
from isthmus.encoders.endpoint import HURRIED_SECONDS, Endpoint
from isthmus.errors import ServiceError
from isthmus.service.index import Index
from isthmus.service.settings import EncoderSettings
from isthmus.service.stores import Draft, SqliteStore

NONSENSE = {
    "lists in lists": [[0.5, 0.5]] * 4,
    "a number beyond all": [10**400] * 4,
    "no number": [],
    "words": ["one"] * 4,
}


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    """An endpoint; `behaviour` is what it does now, `asked` how often it was asked."""
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            server = self.server
            server.asked += 1
            texts = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
            usual = [[1.0 + len(text), 1.0, float(at), 2.0] for at, text in enumerate(texts)]
            rows = [NONSENSE.get(server.behaviour, row) for row in usual]
            content = json.dumps({"data": [{"embedding": row} for row in rows]}).encode()
            packed = server.behaviour == "packed twice"
            content = gzip.compress(gzip.compress(content)) if packed else content
            self.send_response(503 if server.behaviour in ("fails", "odd header") else 200)
            if server.behaviour == "odd header":
                self.send_header("retry-after", "\N{SUPERSCRIPT TWO}")
            if packed:
                self.send_header("content-encoding", "gzip, gzip")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            for at in range(len(content)):
                if server.behaviour != "drips":
                    self.wfile.write(content)
                    return
                self.wfile.write(content[at : at + 1])
                if server.ended.wait(0.3):
                    return

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.behaviour, server.asked, server.ended = "", 0, threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/v1#model"
    server.handle_error = lambda *words: None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("behaviour", [*NONSENSE, "odd header"])
def test_nonsense_is_an_error_of_the_endpoint(behaviour, endpoint):
    encoder = Endpoint(endpoint.url, pauses=0.01)
    encoder.encode(["moon"])
    endpoint.behaviour = behaviour
    with pytest.raises(ServiceError):
        encoder.encode(["tide"])


def test_nothing_is_unpacked(endpoint):
    encoder = Endpoint(endpoint.url, pauses=0.01)
    encoder.encode(["moon"])
    endpoint.behaviour = "packed twice"
    with pytest.raises(ServiceError):
        encoder.encode(["tide"])


@pytest.mark.parametrize("behaviour", ["fails", "drips"])
def test_searches_are_answered_by_bm25_while_an_endpoint_fails(behaviour, endpoint, tmp_path):
    add_encoder(endpoint.url, name="own")
    store = SqliteStore(tmp_path / "store.db")
    store.put([Draft(f"d{at}", "", "moon and tide" + " of the sea" * at) for at in range(5)])
    index = Index(tmp_path / "index", store, encoder=EncoderSettings("encoder", "own"))
    index.catch_up()
    index.encode_all()
    assert set(index.snapshot.find("moon", 5).scores) == {"bm25", "dense"}

    endpoint.behaviour = behaviour
    began = time.monotonic()
    found = index.snapshot.find("tide", 5)
    assert time.monotonic() - began < 4 * HURRIED_SECONDS
    assert set(found.scores) == {"bm25"}
    assert len(found) == 5
    asked = endpoint.asked
    assert len(index.snapshot.find("moon", 5)) == 5
    assert endpoint.asked == asked, "it is left alone for a while"

    endpoint.behaviour = ""
    index.snapshot.encoder.rests_until = 0.0
    assert set(index.snapshot.find("moon", 5).scores) == {"bm25", "dense"}
    index.close()
    store.close()


def test_a_node_starts_while_its_endpoint_is_down(endpoint):
    add_encoder(endpoint.url, name="own")
    endpoint.behaviour, before = "fails", endpoint.asked
    encoder = load_encoder("own")
    assert (encoder.width, encoder.fingerprint[:9]) == (4, "endpoint-")
    assert endpoint.asked == before
