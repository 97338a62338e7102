"""Engines elsewhere that answer without end, and people who make a silo leave its engine alone."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from isthmus.engines import remote
from isthmus.engines.attached import Remote
from isthmus.engines.opensearch import OpenSearchEngine
from isthmus.engines.postgres import PostgresEngine
from isthmus.engines.remote import Location
from isthmus.errors import ServiceError


@contextmanager
def server(answer):
    """A server that answers everything by `answer(handler)`; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer(self)

        def log_message(self, *arguments):
            """Nothing."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made.server_address[1]
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def sends(status, body):
    def answer(handler):
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def opensearch(port, seconds=5.0):
    return OpenSearchEngine(Location(f"http://127.0.0.1:{port}", "papers", seconds=seconds))


def test_an_answer_that_is_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(remote, "MOST_BYTES", 1 << 20)
    with server(sends(200, b" " * (3 << 20))) as port, pytest.raises(ServiceError, match="more than 1 MB"):
        opensearch(port).documents()


def test_an_answer_that_never_ends_is_given_up():
    """A byte now and then is within the time of every read."""

    def trickle(handler):
        handler.send_response(200)
        handler.end_headers()
        until = time.monotonic() + 20
        while time.monotonic() < until:
            try:
                handler.wfile.write(b" ")
            except OSError:
                return
            time.sleep(0.05)

    began = time.monotonic()
    with server(trickle) as port, pytest.raises(ServiceError, match="for one answer"):
        opensearch(port, seconds=0.2).documents()
    assert time.monotonic() - began < 15


def test_an_answer_of_nested_lists_is_no_json():
    with server(sends(200, b"[" * 200_000)) as port, pytest.raises(ServiceError, match="no JSON"):
        opensearch(port).documents()


def test_a_question_that_an_engine_refuses_keeps_nobody_else_from_asking():
    """Else whoever finds one such query silences the silo by asking it again and again."""
    with server(sends(400, b"too many clauses")) as port:
        engine = opensearch(port)
        guarded = Remote(engine)
        with pytest.raises(ServiceError, match="400"):
            guarded.ask(engine.documents)
    assert guarded.ask(lambda: "another question") == "another question"


@pytest.mark.parametrize("id", ["--5", "5-", "-", "\u00b2", "9" * 19, "5\n", "1; DROP TABLE papers"])
def test_ids_that_are_no_numbers_never_reach_a_key_of_numbers(id):
    """An error of the server would be one for everybody."""
    pytest.importorskip("psycopg")
    engine = PostgresEngine(Location("postgresql://127.0.0.1/x", "papers"))
    engine._key_type = "bigint"
    assert engine._keyed([id, "-5", "17"])[1] == ["-5", "17"]
