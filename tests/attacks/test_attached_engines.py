"""Engines elsewhere that answer without end, and people who make a silo leave its engine alone."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from isthmus.engines import remote
from isthmus.engines.attached import AttachedEngine, Remote
from isthmus.engines.meilisearch import MeilisearchEngine
from isthmus.engines.opensearch import OpenSearchEngine
from isthmus.engines.postgres import PostgresEngine
from isthmus.engines.qdrant import QdrantEngine
from isthmus.engines.remote import Location, RemoteDocument, RemoteProblem, base_url, well_formed
from isthmus.engines.typesense import TypesenseEngine
from isthmus.errors import ConfigError, IsthmusError, ServiceError
from isthmus.service.attached import remote_of
from isthmus.service.settings import EngineSettings


@contextmanager
def server(answer):
    """A server that answers everything by `answer(handler)`; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer(self)

        do_GET = do_POST

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


def sends(status, body, encoding=""):
    def answer(handler):
        handler.send_response(status)
        if encoding:
            handler.send_header("content-encoding", encoding)
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


@pytest.mark.parametrize("encoding", ["gzip, gzip", "deflate", "br", "zstd"])
def test_an_answer_that_unpacks_to_a_thousand_times_its_length_twice_is_not_unpacked(encoding):
    """A piece of it may have gigabytes, before its length is looked at."""
    body = gzip.compress(gzip.compress(b'{"count": 5}'))
    with server(sends(200, body, encoding)) as port, pytest.raises(ServiceError, match="encoding"):
        opensearch(port).documents()
    with server(sends(200, gzip.compress(b'{"count": 5}'), "gzip")) as port:
        assert opensearch(port).documents() == 5


def test_a_refusal_without_end_is_not_waited_for():
    """Of an export, whose answer is read line by line."""

    def refuse(handler):
        handler.send_response(400)
        handler.end_headers()
        until = time.monotonic() + 20
        with suppress(OSError):
            while time.monotonic() < until:
                handler.wfile.write(b"no such field " * 1000)
                time.sleep(0.02)

    began = time.monotonic()
    with server(refuse) as port, pytest.raises(RemoteProblem, match="400, no such field"):
        list(TypesenseEngine(Location(f"typesense://127.0.0.1:{port}", "papers")).scan())
    assert time.monotonic() - began < 15


class Prolific:
    """An engine that gives more than it is asked for, and documents by other spellings of their ids."""

    noun = "Prolific"
    location = Location("prolific://127.0.0.1", "papers")

    def search(self, text, vector, depth, only):
        return [("7", 0.9), ("8", float("nan")), *((str(at), 0.5) for at in range(100, 400_000))]

    def matching(self, weights, depth, only):
        return [str(at) for at in range(100, 400_000)]

    def get(self, ids):
        return {str(int(id)): RemoteDocument(str(int(id)), "", "sea") for id in ids}


def test_more_hits_than_were_asked_for_are_left_away(tmp_path):
    reader = AttachedEngine(tmp_path, Prolific(), counted=False).reader
    handles, scores = reader.search("sea", np.zeros(0), 3)
    assert (reader.ids(handles), scores.tolist()) == (["7", "100"], [0.9, 0.5])
    assert len(reader.matching({"sea": 1.0}, 3)) == 6


def test_an_erased_document_has_no_other_name(tmp_path):
    engine = AttachedEngine(tmp_path, Prolific(), counted=False)
    engine.remote.is_hidden = lambda id: id == "7"
    assert engine.remote.texts(["7", "007", "8"]).keys() == {"8"}


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


def test_no_message_has_a_word_of_a_query(tmp_path):
    """A server's refusal may quote it, and a node's log has the message."""
    with server(sends(400, b'{"error": "cannot parse [zanzibar]"}')) as port:
        location = Location(f"http://127.0.0.1:{port}", "papers")
        reader = AttachedEngine(tmp_path, OpenSearchEngine(location), counted=True).reader
        for work in (
            lambda: reader.search("zanzibar", np.zeros(0), 3),
            lambda: reader.matching({"zanzibar": 1.0}, 3),
            lambda: reader.matches(["zanzibar"]),
            lambda: reader.remote.texts(["zanzibar"]),
        ):
            with pytest.raises(ServiceError, match="refuses a query, 400") as problem:
                work()
            assert "zanzibar" not in str(problem.value)
        assert not reader.remote.problem


@pytest.mark.parametrize("state", ["54000", "53200", "22023"])
def test_an_error_of_one_statement_is_nobody_else_s(state):
    """Neither its text, which quotes words, nor a rest of the engine for everybody."""
    psycopg = pytest.importorskip("psycopg")
    engine = PostgresEngine(Location("postgresql://127.0.0.1/x", "papers"))
    guarded = Remote(engine)

    class Refused(psycopg.OperationalError):
        sqlstate = state

    def fail():
        with engine._connection():
            raise Refused('word is too long: "zanzibar"')

    engine._idle.append(Closing())
    with pytest.raises(ServiceError, match=f"refuses a query, SQLSTATE {state}") as problem:
        guarded.find(fail)
    assert "zanzibar" not in str(problem.value)
    assert not guarded.problem


class Closing:
    def close(self):
        """Nothing."""


SHAPES = [
    b"[]",
    b"{}",
    b"null",
    b"7",
    b'{"hits": {"hits": [{"_id": 5}]}}',
    b'{"count": "many"}',
    b'{"hits": 1}',
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "kind", [OpenSearchEngine, QdrantEngine, TypesenseEngine, MeilisearchEngine], ids=lambda kind: kind.noun
)
def test_an_answer_of_another_form_is_one_error(kind, shape, tmp_path):
    """And no traceback of ours: KeyError and TypeError are nothing that a node answers with."""
    with server(sends(200, shape)) as port:
        scheme = "http" if kind is OpenSearchEngine else kind.noun.lower()
        engine = AttachedEngine(
            tmp_path, kind(Location(f"{scheme}://127.0.0.1:{port}", "papers")), counted=False
        )
        tasks = (
            engine.remote.engine.documents,
            lambda: engine.remote.engine.matches("tides"),
            lambda: engine.remote.engine.get(["5"]),
            lambda: list(engine.remote.scan()),
        )
        for task in tasks:
            engine.remote._rests_until = 0.0
            with suppress(ServiceError):
                engine.remote.ask(task)
        assert engine.remote.problem.startswith(kind.noun), "at least one of them is of no known form"
        with suppress(IsthmusError), well_formed(kind.noun):
            engine.remote.engine.sources()


def test_a_line_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(remote, "LONGEST_LINE", 1 << 20)
    with (
        server(sends(200, b'{"id": "' + b"x" * (3 << 20))) as port,
        pytest.raises(ServiceError, match="without end"),
    ):
        list(TypesenseEngine(Location(f"typesense://127.0.0.1:{port}", "papers")).scan())
    with server(sends(200, b'{"id": "1"}\n\n{"id": "2"}')) as port:
        engine = TypesenseEngine(Location(f"typesense://127.0.0.1:{port}", "papers"))
        assert [each.id for batch in engine.scan() for each in batch] == ["1", "2"]


@pytest.mark.parametrize("id", ["--5", "5-", "-", "\u00b2", "9" * 19, "5\n", "1; DROP TABLE papers"])
def test_ids_that_are_no_numbers_never_reach_a_key_of_numbers(id):
    """An error of the server would be one for everybody."""
    pytest.importorskip("psycopg")
    engine = PostgresEngine(Location("postgresql://127.0.0.1/x", "papers"))
    engine._key_type = "bigint"
    assert engine._keyed([id, "-5", "17"])[1] == ["-5", "17"]


@contextmanager
def signed_in(answer):
    """A PostgreSQL server that lets everybody in, and sends `answer()` to each statement; its port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        with suppress(OSError):
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I")
                while connection.recv(1 << 16):
                    answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.close()
        thread.join()


def trickles(connection):
    """A notice now and then, as servers may send at any time."""
    while True:
        connection.sendall(b"N\0\0\0\x0dSLOG\0Mx\0\0")
        time.sleep(0.05)


@pytest.mark.parametrize("answer", [lambda connection: None, trickles], ids=["silent", "without end"])
def test_a_database_that_stops_in_the_middle_is_given_up(answer):
    """The server's own timeout ends no statement of a server that hangs, and a thread here would for ever."""
    pytest.importorskip("psycopg")
    with signed_in(answer) as port:
        url = f"postgresql://reader@127.0.0.1:{port}/x?sslmode=disable&gssencmode=disable"
        engine = PostgresEngine(Location(url, "papers", seconds=0.2))
        began = time.monotonic()
        with pytest.raises(ServiceError, match="cannot be reached: no answer within"):
            engine.documents()
        assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    "url", ["qdrant://127.0.0.1:abc", "qdrant://[::1", "qdrant://127.0.0.1:1/\0", "https://h:0"]
)
def test_what_is_no_address_is_one_line(url):
    with pytest.raises(ConfigError, match=r"engine\.url is no address"):
        base_url(url)


@pytest.mark.parametrize("kind", [QdrantEngine, TypesenseEngine, MeilisearchEngine])
@pytest.mark.parametrize("key", ["zanzi\nbar", "zanzib\u00e4r"])
def test_a_key_that_cannot_be_sent_stands_in_no_message(kind, key):
    with pytest.raises(ConfigError, match=r"engine\.key") as problem:
        kind(Location(f"{kind.noun.lower()}://127.0.0.1:1", "papers", key=key)).documents()
    assert "zanzi" not in str(problem.value)


def test_half_of_a_password_is_no_host():
    """libpq reads the address up to the first @, and names the rest as a host that it cannot find."""
    pytest.importorskip("psycopg")
    with pytest.raises(ConfigError, match="%40") as problem:
        remote_of(EngineSettings(url="postgresql://reader:zan@zibar@127.0.0.1/x", source="papers"))
    assert "zibar" not in str(problem.value)
