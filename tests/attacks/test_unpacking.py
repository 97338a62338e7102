"""Small messages that declare, or unpack to, or go on for, more than anybody has: refused at once."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import Message as MessageBytes

from isthmus.errors import DataError, IsthmusError, ProtocolError, ServiceError
from isthmus.federation import messages as flower
from isthmus.federation import runtimes
from isthmus.learning import SearchModel, answer_of, question_of
from isthmus.private import messages as private
from isthmus.rankers import Saved
from isthmus.retrieval import TEXT, Statistics
from isthmus.retrieval.statistics import MOST_TERMS
from isthmus.service import wire
from isthmus.service.broker import understood
from isthmus.service.client import Client
from isthmus.service.http_client import BrokenReply, HttpClient, HttpReply

MEGABYTE = 1 << 20
LITTLE = 48 * MEGABYTE
"""What refusing a message may take; each of these took between 0.2 and 6.2 GB."""


@contextmanager
def memory(most=LITTLE):
    """What is allocated inside stays below so many bytes."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most, f"{peak:,} bytes were allocated"


def npy(dtype, shape, size=None):
    """An array of zeros that declares this type and shape and has `size` bytes, in pieces."""
    header = io.BytesIO()
    told = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, told)
    yield header.getvalue()
    left = int(np.prod(shape, dtype=object) * np.dtype(dtype).itemsize) if size is None else size
    while left > 0:
        yield bytes(min(left, MEGABYTE))
        left -= MEGABYTE


def packed(noun, header, *, arrays=None, texts=None, method=zipfile.ZIP_DEFLATED):
    """A saved model of any content."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as archive:
        told = header if isinstance(header, bytes) else json.dumps(header).encode()
        if not isinstance(header, bytes):
            told = json.dumps({"format": f"isthmus {noun}", "version": 1, **header}).encode()
        archive.writestr("header.json", told)
        for name, pieces in (arrays or {}).items():
            with archive.open(f"{name}.npy", "w") as entry:
                for piece in pieces:
                    entry.write(piece)
        for name, text in (texts or {}).items():
            archive.writestr(name, text)
    return content.getvalue()


STATISTICS = {
    "form": "exact",
    "silos": ["west"],
    "documents": 1,
    "lengths": {"title": 1, "body": 1},
    "hashing": "",
    "epsilon": None,
    "unit": 1,
    "about": {},
}


def statistics(dtype="|i1", rows=(1 << 28) - 4096, words="", **header):
    told = STATISTICS | header
    return packed("collection statistics", told, arrays={TEXT: npy(dtype, (rows,))}, texts={"words": words})


def nested(values):
    """JSON of so many empty lists."""
    return "[" + "[]," * values + "[]]"


def lists():
    return json.loads(nested(3 << 20))


BOMBS = {
    "statistics, a table of bytes": (Statistics.from_bytes, statistics),
    "statistics, too many terms": (Statistics.from_bytes, lambda: statistics("<i8", 1 << 24)),
    "statistics, words for nothing": (
        Statistics.from_bytes,
        lambda: statistics("<i4", 1, words="ab\n" * (5 << 20)),
    ),
    "statistics, lists in the header": (
        Statistics.from_bytes,
        lambda: statistics("<i4", 1, about={"x": lists()}),
    ),
    "an answer of a silo that learns": (
        answer_of,
        lambda: packed("learning message", {"kind": "answer"}, arrays={"sums": npy("|i1", (60 * MEGABYTE,))}),
    ),
    "a question to it": (
        question_of,
        lambda: packed("learning message", {"kind": "Start", "queries": lists(), "folds": []}),
    ),
    "a model": (
        SearchModel.from_bytes,
        lambda: packed("search model", {}, arrays={"score.centre": npy("|i1", (200 * MEGABYTE,))}),
    ),
}
"""What is read, and how a message of at most a megabyte for it is written, which takes a second."""


@pytest.mark.parametrize("what", BOMBS)
def test_a_small_message_takes_little_memory(what):
    read, write = BOMBS[what]
    message = write()
    assert len(message) < MEGABYTE
    with memory(), pytest.raises(IsthmusError):
        read(message)


def test_the_whole_process_stays_small(tmp_path):
    """The headline by the system's own count: 261 KB of zeros took 6.2 GB."""
    file = tmp_path / "message"
    file.write_bytes(statistics())
    assert file.stat().st_size < 300_000
    script = """
import sys
from isthmus.errors import ProtocolError
from isthmus.retrieval import Statistics
content = open(sys.argv[1], "rb").read()
def highest():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = highest()
try:
    Statistics.from_bytes(content)
except ProtocolError:
    pass
print(highest() - before)
"""
    done = subprocess.run([sys.executable, "-c", script, file], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 * 1024  # kilobytes


def test_the_largest_statistics_that_are_read_are_bounded():
    words = "\n".join(f"{number:07d}" for number in range(MOST_TERMS // 4))
    content = statistics("<i8", MOST_TERMS // 4, words)
    with memory(200 * MEGABYTE):
        assert len(Statistics.from_bytes(content).words) == MOST_TERMS // 4


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("<f8", (10**12,), 8), ("<f8", (2**31, 2**31), 8), ("|V0", (10**12,), 0), ("<f8", (4,), 4096)],
    ids=["a terabyte", "beyond 64 bits", "of no size", "more than it says"],
)
def test_a_declared_shape_is_compared_with_the_bytes_there_are(tmp_path, dtype, shape, size):
    content = packed("ranker", {"kind": "linear"}, arrays={"weight": npy(dtype, shape, size)})
    with memory(), pytest.raises(DataError):
        Saved.read(io.BytesIO(content))
    (tmp_path / "model").write_bytes(content)
    with memory(), pytest.raises(DataError):
        Saved.read(tmp_path / "model")


def test_a_model_file_has_a_budget_too(tmp_path):
    with open(tmp_path / "model", "wb") as file:
        file.write(packed("ranker", {"kind": "linear"}, arrays={"w": npy("|i1", (1100 * MEGABYTE,))}))
    with memory(), pytest.raises(DataError, match="unpacks to more"):
        Saved.read(tmp_path / "model")


def test_a_dictionary_for_lzma_is_not_allocated():
    plain = packed("lesson", {"kind": "answer"}, method=zipfile.ZIP_LZMA)
    at = plain.index(b"\x09\x04\x05\x00") + 4  # LZMA's properties: one byte, then the dictionary's size
    hostile = plain[: at + 1] + struct.pack("<I", 1 << 30) + plain[at + 5 :]
    with memory(), pytest.raises(ProtocolError):
        answer_of(hostile)


def test_a_zip_of_very_many_parts_is_not_listed():
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("header.json", "{}")
        for number in range(60_000):
            archive.writestr(str(number), b"")
    with memory(24 * MEGABYTE), pytest.raises(ProtocolError):
        answer_of(content.getvalue())


# what silos and the coordinator send each other in training


def sent(dtype, shape, data):
    return ArrayRecord({"w": Array(dtype, shape, "numpy.ndarray", data)})


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float64", (10**12,)), ("float64", (2**40, 2**40)), ("V0", (10**9,)), ("object", (4,))],
)
def test_an_array_of_flower_is_what_it_declares(dtype, shape):
    for descr in ("<f8", "|V0", "|O"):
        header = next(npy(descr, shape, 0))
        for data in (header, header + bytes(64), bytes(64), b"", b"PK\x03\x04" + bytes(64)):
            with memory(), pytest.raises(IsthmusError):
                flower.unpack(sent(dtype, shape, data))


def test_arrays_of_flower_share_one_budget():
    data = b"".join(npy("<f4", (MEGABYTE,)))
    record = ArrayRecord({str(at): Array("float32", (MEGABYTE,), "numpy.ndarray", data) for at in range(8)})
    with memory(), pytest.raises(IsthmusError, match="unpacks to more"):
        flower.unpack(record, most=16 * MEGABYTE)
    assert len(flower.unpack(record)) == 8


def test_settings_of_an_order_are_bounded():
    content = RecordDict({"config": ConfigRecord({"settings": nested(1 << 20), "server-round": 1})})
    with memory(), pytest.raises(IsthmusError):
        flower.settings_of(SimpleNamespace(content=content))


def hostile_messages():
    """Flower messages of a few megabytes that are very many objects once parsed."""
    runtimes.flower.give_identity()
    words = RecordDict({"config": ConfigRecord({"v": [str(number) for number in range(200_000)]})})
    yield runtimes.encode(Message(words, dst_node_id=1, message_type="query"))
    numbers = MessageBytes()  # Flower itself would look at each of them
    config = numbers.content.items.add(key="config").config_record
    config.items.add(key="v").value.sint_list.vals.extend(bytes(9 * MEGABYTE))
    yield numbers.SerializeToString()
    records = MessageBytes()
    for number in range(200_000):
        records.content.items.add(key=str(number))
    yield records.SerializeToString()


def test_a_training_message_is_weighed_before_it_is_parsed():
    for message in hostile_messages():
        with memory(), pytest.raises(ProtocolError):
            runtimes.decode(message)
    for broken in (b"\x13" * 100, b"\x12\xff\xff\xff\x7f\x0a", b"\x12", b"\xff" * 20):
        with pytest.raises(ProtocolError):
            runtimes.decode(broken)


# counts between silos

TERMS = private._spell("geometric") + private._spell("body") + struct.pack("<dBII", 1.0, 200, 1 << 20, 0)


def framed(kind, body):
    import hashlib

    content = struct.pack("<4sBBI", b"ISTH", private.VERSION, kind.kind, len(body)) + body
    return content + hashlib.blake2b(content, digest_size=8).digest()


def test_packed_counts_are_unpacked_within_a_budget():
    count = 8 * MEGABYTE
    body = TERMS + struct.pack("<II", 0, 1) + struct.pack("<?III", False, count, 0, 0) + bytes(2 * count)
    content = framed(private.Published, body)
    with memory(17 * len(content)):
        private.Published.decode(content)  # a place takes eight bytes and its value four
    dense = struct.pack("<?III", True, 2 * count, 0, 0) + b"\x01" * (2 * count)
    shape = struct.pack("<?HBI", False, 16, 1, MEGABYTE)
    with memory(17 * len(dense)):
        private.CountsAnswer.decode(framed(private.CountsAnswer, bytes(16) + shape + dense))


def test_an_answer_of_impossible_shape_is_refused_when_it_is_read():
    shape = struct.pack("<?HBI", False, 1 << 13, 200, 1 << 23)
    with memory(), pytest.raises(ProtocolError):
        private.CountsAnswer.decode(
            framed(private.CountsAnswer, bytes(16) + shape + struct.pack("<?III", False, 0, 0, 0))
        )


# what comes over HTTP


@contextmanager
def speaking(*pieces, forever=b""):
    """A server that answers whatever it is asked with these bytes, and then with others without end."""
    listener = socket.create_server(("127.0.0.1", 0))
    sent = [0]

    def answer():
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with suppress(OSError), connection:
                    connection.settimeout(20)
                    connection.recv(1 << 16)
                    connection.sendall(b"".join(pieces))
                    while forever and sent[0] < 256 * MEGABYTE:
                        connection.sendall(forever)
                        sent[0] += len(forever)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", sent
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


START = b"HTTP/1.1 200 OK\r\n"
CHUNKED = START + b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "headers": (START, b"x: " + b"y" * 4096 + b"\r\n"),
    "one header": (START + b"x: ", b"y" * 4096),
    "a status": (b"HTTP/1.1 200 ", b"y" * 4096),
    "informational answers": (b"", b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" * 100),
    "chunk extensions": (CHUNKED + b"1;", b"y" * 4096),
    "tiny chunks": (CHUNKED, b"1\r\nx\r\n" * 1000),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"x: " + b"y" * 4096 + b"\r\n"),
    "a body": (START + b"\r\n", b"y" * 65536),
    "a body that says so": (START + b"content-length: 99999999999\r\n\r\n", b"y" * 65536),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_silo_that_answers_without_end_is_given_up(what):
    first, forever = ENDLESS[what]

    async def work(url):
        line = HttpClient(url, most=MEGABYTE)
        try:
            async with asyncio.timeout(15):
                await line.ask("GET", "/v1/statistics")
        finally:
            line.close()

    with speaking(first, forever=forever) as (url, sent), memory(8 * MEGABYTE), pytest.raises(BrokenReply):
        asyncio.run(work(url))
    assert sent[0] < 16 * MEGABYTE  # what the system's own buffers take


@pytest.mark.parametrize("what", [each for each in ENDLESS if each != "informational answers"])
def test_a_broker_that_answers_without_end_is_given_up(what):
    first, forever = ENDLESS[what]
    with (
        speaking(first, forever=forever) as (url, sent),
        memory(),
        Client(url, timeout=5) as broker,
        pytest.raises(ServiceError),
    ):
        broker.health()
    assert sent[0] < 64 * MEGABYTE


def test_a_client_unpacks_no_compressed_answers():
    bomb = gzip.compress(bytes(256 * MEGABYTE), 6)
    head = b"content-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(
        bomb
    )
    with (
        speaking(START, head, bomb) as (url, _),
        memory(),
        Client(url, timeout=5) as broker,
        pytest.raises(ServiceError),
    ):
        broker.health()


def test_a_silo_sends_no_more_hits_than_anybody_can_ask_for():
    hit = {"document": "d", "silo": "s", "probability": 0.5, "score": 1.0}
    told = {"silo": "s", "documents": 1, "statistics": "", "took_ms": 1.0}
    for answer in (
        {**told, "hits": [hit] * 100_000},
        {**told, "hits": [{**hit, "explanation": [{"retriever": "r"}] * 10_000}]},
        {**told, "hits": [{**hit, "title": "t" * 100_000}]},
        {**told, "hits": [{**hit, "snippet": "t" * 100_000}]},
        {**told, "hits": [], "statistics": "s" * 10_000},
        {**told, "hits": [], "documents": 10**400},
        {**told, "hits": [], "more": [[]] * 1_000_000},
    ):
        content = json.dumps(answer).encode()
        with memory(), pytest.raises(BrokenReply):
            understood(HttpReply(200, "application/json", content), wire.NodeAnswer)
