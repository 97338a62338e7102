"""Assistants over both transports, with the official client, against a federation."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from assistants import NORTH, Assistants, over_http
from isthmus.cli import main
from isthmus.service import assistants, wire
from isthmus.service.audit_log import audit_lines

LOGGED = ("action", "peer", "actor", "documents", "query", "what")
EVERY = ["search", "fetch", "search_silos", "list_silos", "give_feedback"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    running = Assistants(tmp_path_factory.mktemp("assistants"))
    yield running
    running.close()


def over_stdio(federation, person, work, **options):
    from mcp import Client, StdioServerParameters

    program = StdioServerParameters(
        command=sys.executable,
        args=["-m", "isthmus", "mcp", "--broker", federation.url],
        env={**os.environ, "ISTHMUS_API_KEY": federation.key[person]},
    )

    async def run():
        async with Client(program, **options) as client:
            return await work(client)

    return asyncio.run(run())


async def everything(client):
    """One call of every tool, as an assistant makes them."""
    tools = (await client.list_tools()).tools
    found = await client.call_tool("search", {"query": "tidal power"})
    results = found.structured_content["results"]
    first = next(each for each in results if each["silo"] == "north")
    opened = await client.call_tool("fetch", {"id": first["id"]})
    narrowed = await client.call_tool(
        "search_silos",
        {
            "query": "tidal",
            "k": 5,
            "silos": ["north"],
            "filters": {"types": ["md"], "phrases": ["of the sea"]},
        },
    )
    silos = await client.call_tool("list_silos", {})
    verdict = {"query": "tidal power", "silo": "north", "token": first["token"], "relevant": True}
    judged = await client.call_tool("give_feedback", verdict)
    return tools, found, opened, narrowed, silos, judged


@pytest.mark.parametrize(
    ("carried", "options"),
    [(over_http, {"mode": "auto"}), (over_http, {"mode": "legacy"}), (over_stdio, {})],
    ids=["http", "http with a handshake", "stdio"],
)
def test_every_tool(federation, carried, options):
    before = federation.departures()
    tools, found, opened, narrowed, silos, judged = carried(federation, "ada", everything, **options)
    assert [tool.name for tool in tools] == EVERY
    assert all("instructions" in tool.description for tool in tools[:3])
    for result in (found, opened, narrowed, silos, judged):
        assert not result.is_error, result.content[0].text
        assert json.loads(result.content[0].text) == result.structured_content
    answer = found.structured_content
    assert "No hit has a probability" in answer["summary"]
    assert "2 of 2 silos answered" in answer["summary"]
    assert set(answer["results"][0]) >= {"id", "title", "url"}
    moon = next(each for each in answer["results"] if each["silo"] == "south")
    assert [reason.partition(":")[0] for reason in moon["withheld"]] == ["snippet", "text"]
    document = opened.structured_content
    assert set(document) == {"id", "title", "text", "url", "metadata"}
    assert (document["text"], document["title"]) == (NORTH[0].body, "Tidal power")
    assert document["metadata"]["complete"]
    assert [each["title"] for each in narrowed.structured_content["results"]] == ["Tidal power"]
    listed = {each["silo"]: each["about"] for each in silos.structured_content["silos"]}
    assert listed == {"north": "Papers of north.", "south": "Papers of south."}
    assert judged.structured_content == {"recorded": True, "silo": "north"}
    after = federation.departures()
    left = {kind: after[kind] - before.get(kind, 0) for kind in after}
    hits = sum(each["silo"] == "north" for each in answer["results"]) + 1
    assert left["north", "scores"] == left["north", "snippets"] == hits
    assert left["north", "documents"] == 1
    assert left["south", "scores"] == 1


def test_what_leaves_is_what_leaves_by_the_api(federation):
    """The ledger and the audit log of a silo have an assistant's search and opening as those of the page."""
    key, node = {"authorization": f"Bearer {federation.key['ada']}"}, federation.nodes["north"]

    def by_api():
        answer = federation.http.post("/v1/search", json={"query": "tidal power"}, headers=key).json()
        hit = next(each for each in answer["hits"] if each["silo"] == "north")
        path = f"/v1/documents/north/{hit['document']}"
        federation.http.get(path, params={"ticket": hit["ticket"]}, headers=key).raise_for_status()

    def by_assistant():
        results = federation.call("ada", "search", query="tidal power")["structuredContent"]["results"]
        federation.call("ada", "fetch", id=next(each["id"] for each in results if each["silo"] == "north"))

    def entries():
        return [json.loads(line.whole) for line in audit_lines(node.settings.folder)]

    traces = []
    for work in (by_api, by_assistant):
        before, number = federation.departures(), len(entries())
        work()
        after = federation.departures()
        facts = [{name: each.get(name) for name in LOGGED} for each in entries()[number:]]
        traces.append(({kind: after[kind] - before.get(kind, 0) for kind in after}, facts))
    assert [each["action"] for each in traces[0][1]] == ["shown", "opened"]
    assert traces[0] == traces[1]
    assert traces[0][0]["north", "documents"] == 1


def test_tools_of_others_are_not_listed(federation):
    async def names(client):
        return [tool.name for tool in (await client.list_tools()).tools]

    assert over_http(federation, "ben", names) == ["search", "search_silos", "list_silos"]
    assert over_http(federation, "root", names) == EVERY
    assert over_stdio(federation, "ben", names) == ["search", "search_silos", "list_silos"]


def test_a_least_probability_leaves_out_what_has_none(federation):
    answer = federation.call("ada", "search_silos", query="tidal", least_probability=0.7)["structuredContent"]
    assert answer["results"] == []
    assert answer["summary"].startswith("Nothing at or above 0.7. ")
    assert "without a probability left out" in answer["summary"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"query": "tidal silo:east"}, "no silo is called east; there are north, south."),
        ({"query": "tidal", "filters": {"after": "2024-13"}}, "after: wants a date"),
    ],
)
def test_what_a_query_is_not_understood_as_is_said(federation, arguments, hint):
    """An assistant that reads `Nothing found` alone would say that there is nothing."""
    answer = federation.call("ada", "search_silos", **arguments)["structuredContent"]
    assert answer["summary"].startswith(hint)


def an_answer(*probabilities, silos=(("north", "answered", ""),), **more):
    hits = [
        wire.Hit(document=f"d{at}", silo="north", probability=each, score=1.0, title="t", snippet="s")
        for at, each in enumerate(probabilities)
    ]
    statuses = [wire.SiloStatus(silo=name, status=status, detail=detail) for name, status, detail in silos]
    return wire.Answer(**{"hits": hits, "silos": statuses, "threshold": 0.0, "took_ms": 1.0, **more})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (an_answer(0.9, 0.7, 0.2), "2 of 3 hits at or above 0.7, the best at 0.90. About 1.8 of these"),
        (an_answer(0.6999, 0.2), "Nothing above 0.7: the best hit is relevant with a probability of 0.69."),
        (an_answer(0.6, threshold=0.5, below=3), "1 of 1 hit at or above 0.5, the best at 0.60."),
        (an_answer(0.6, threshold=0.5, below=3), "3 hits below 0.5 left out."),
        (an_answer(threshold=0.7, below=2, without_probability=2), "Nothing at or above 0.7. 2 hits without"),
        (an_answer(None, None), "No hit has a probability"),
        (an_answer(0.8, unlike=True), "probabilities are rough, and high ones lowered"),
        (an_answer(silos=[("south", "down", "refused")]), "Nothing found. 0 of 1 silo answered, not south"),
        (an_answer(silos=[("south", "late", "no answer")]), "what these hold is unknown."),
    ],
)
def test_the_summary_is_computed(answer, words):
    assert words in assistants.summary_of(answer)


def test_a_configuration_for_assistants(federation, tmp_path, capsys, monkeypatch):
    (tmp_path / "me.key").write_text(federation.key["ben"])
    (tmp_path / "me.key").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    assert main(["mcp", "--broker", federation.url, "--key", "me.key", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)["mcpServers"]["isthmus"]
    assert entry["args"][-4:] == ["--broker", federation.url, "--key", str(tmp_path / "me.key")]
    assert federation.key["ben"] not in json.dumps(entry)


def test_without_the_extra_one_line_says_how_to_have_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["mcp"]) == 1
    assert "pip install 'isthmus[mcp]'" in capsys.readouterr().err


def test_who_may_nothing_is_told_so_at_once(federation, monkeypatch, capsys):
    monkeypatch.setenv("ISTHMUS_API_KEY", federation.key["carl"])
    assert main(["mcp", "--broker", federation.url]) == 1
    assert "none of the scopes search, documents and feedback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"query": "tidal", "filters": {"type": "pdf"}},
            "filters: a key that is not known; there are types, ",
        ),
        ({"query": "tidal", "limit": 3}, "arguments: a key that is not known; there are query, k, "),
        ({"query": "tidal", "filters": {"after": "Easter"}}, "filters.after: "),
        ({"query": "tidal", "filters": {"types": [7]}}, "filters.types: "),
        ({"query": "tidal", "k": 0}, "k: "),
        ({}, "query: Field required"),
    ],
)
def test_wrong_arguments_are_named_with_those_there_are(arguments, problem):
    result, told = asyncio.run(assistants.call(None, "search_silos", arguments))
    assert result is None
    assert told.startswith(problem)
    assert not any(word in told for word in ("pdf", "limit", "Easter"))
