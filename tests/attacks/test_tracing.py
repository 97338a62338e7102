"""Traces tell nobody what was searched, and a stranger cannot write into them."""

from __future__ import annotations

import asyncio
import atexit
import socket
import time

import pytest

from assistants import Assistants
from isthmus.service import tracing
from isthmus.service.settings import TracingSettings
from isthmus.service.tracing import PARENT, trace_headers, traced
from one_silo import QUERY, a_peer

VALID = f"00-{'a' * 32}-{'b' * 16}-01"
HOSTILE = [
    "x",
    VALID.replace("a", "A"),
    f"00-{'0' * 32}-{'b' * 16}-01",
    f"ff-{'a' * 32}-{'b' * 16}-01",
    VALID + "\r\nx-admin: true",
    VALID + "-" + "c" * 100_000,
    "00-" + "é" * 32 + "-01",
    "",
]


@pytest.fixture
def spans(monkeypatch):
    """What is exported while traces are on."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter, provider = memory.InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    return exporter


async def _answer() -> dict[str, str]:
    return trace_headers()


@pytest.mark.parametrize("header", HOSTILE, ids=range(len(HOSTILE)))
def test_a_number_of_a_trace_that_is_none_begins_another(spans, header):
    span = traced("node", dict, lambda result: {}, lambda: header)
    passed_on = asyncio.run(span(_answer)())
    (done,) = spans.get_finished_spans()
    assert done.parent is None
    assert passed_on[PARENT].startswith(f"00-{done.context.trace_id:032x}-{done.context.span_id:016x}-0")


def test_a_peers_trace_is_gone_on_with_and_a_strangers_is_not(spans, tmp_path):
    child = traced("node", dict, lambda result: {}, lambda: VALID)
    asyncio.run(child(_answer)())
    (done,) = spans.get_finished_spans()
    assert (done.context.trace_id, done.parent.span_id) == (int("a" * 32, 16), int("b" * 16, 16))
    spans.clear()
    with a_peer(tmp_path) as peer:
        headers = {PARENT: VALID, "tracestate": "a=b", "baggage": "person=ada"}
        reply = peer.post("/search", json={"query": QUERY}, headers=headers)
        assert reply.status_code == 200
        assert reply.json()["hits"]
    (done,) = spans.get_finished_spans()
    assert done.parent is None
    assert dict(done.attributes) == {"isthmus.silo": "north", "isthmus.state": "answered", "isthmus.hits": 5}
    assert not done.events


@pytest.mark.parametrize("flags", ["00", "01"])
def test_an_assistant_names_no_trace(spans, tmp_path, flags):
    """The library of the protocol goes on with the trace that a message names, or leaves it out."""
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    federation = Assistants(tmp_path)
    try:
        spans.clear()
        known = {PARENT: f"{VALID[:-2]}{flags}", "baggage": "person=ada"}
        parameters = {"name": "search", "arguments": {"query": "tidal"}, "_meta": known}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": parameters}
        assert federation.post("ada", message).json()["result"]["isError"] is False
        names = {span.name: span.context.trace_id for span in spans.get_finished_spans()}
    finally:
        federation.close()
    assert {"search", "silo"} <= set(names)
    assert int("a" * 32, 16) not in names.values()
    assert "tools/call search" not in names


def test_a_failure_leaves_its_kind_in_a_trace_and_none_of_its_words(spans):
    async def fail():
        raise ValueError("tumour of patient 4711")

    with pytest.raises(ValueError):
        asyncio.run(traced("silo", dict, lambda result: {})(fail)())
    (done,) = spans.get_finished_spans()
    assert done.attributes["isthmus.state"] == "ValueError"
    assert "4711" not in done.to_json()


@pytest.mark.parametrize("secret", ["ada:hush@collector/v1/traces", "collector/v1/traces?key=hush"])
def test_a_collectors_secret_stands_in_no_address(secret):
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        TracingSettings(endpoint=f"https://{secret}")
    assert "hush" not in str(refused.value)


def test_a_collector_that_never_answers_holds_up_no_restart(monkeypatch):
    """What runs containers kills what has not ended in ten seconds: as long as a collector may take."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    ends, silent = [], socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(tracing, "_tracer", None)
    monkeypatch.setattr(atexit, "register", lambda end, *rest: ends.append(end) or end)
    address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
    tracing.start_tracing(TracingSettings(endpoint=address), "node", "north")
    asyncio.run(traced("node", dict, dict)(_answer)())
    began = time.monotonic()
    for end in reversed(ends):
        end()
    assert time.monotonic() - began < 3 * tracing.END_SECONDS
    silent.close()


def test_nothing_is_sent_unless_it_is_asked_for(monkeypatch):
    for name in tracing.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    tracing.start_tracing(TracingSettings(), "node", "north")
    assert tracing._tracer is None
    assert asyncio.run(traced("node", dict, dict)(_answer)()) == {}
    with pytest.raises(ValueError, match="whole address"):
        TracingSettings(endpoint="collector:4318")
