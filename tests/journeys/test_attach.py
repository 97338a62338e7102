"""Three silos on three engines that run already, from an empty folder to one list by probability."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from core_walk import free_base
from engine_servers import running
from isthmus.service import run_federation

FIRST = ("harbour", "glacier", "orchard", "railway", "lantern", "granite", "monsoon", "cathedral")
SECOND = ("keepers", "surveys", "repairs", "festivals", "drawings", "founders", "permits")
TOPICS = [f"{first} {second}" for first in FIRST for second in SECOND]
SILOS = {"papers": "postgresql", "notes": "qdrant", "tickets": "typesense"}
MINUTES = 5
JUDGED = 50
"""A keyed hash deals queries into halves: of thirty, one federation in twenty has too few in a half."""


def documents(silo):
    """Two of every topic, of which one is right."""
    for at, topic in enumerate(TOPICS):
        first, second = topic.split()
        yield {
            "id": f"d{2 * at + 1}",
            "title": f"{topic.title()} in the {silo}",
            "body": f"What the {silo} have on {topic}: {first} here, {second} there, and {topic} again.",
            "kind": "open",
        }
        yield {
            "id": f"d{2 * at + 2}",
            "title": f"On another {first}",
            "body": f"A {first} that is mentioned once in the {silo}, with a few words besides.",
            "kind": "open",
        }


def isthmus(*arguments):
    """What a command prints as JSON; it must end well."""
    command = [sys.executable, "-m", "isthmus", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def servers(tmp_path_factory, request):
    """The three servers, each with its documents."""
    import psycopg

    socket = request.getfixturevalue("_postgres_server")
    with psycopg.connect(f"host={socket} user=postgres dbname=postgres", autocommit=True) as db:
        db.execute("CREATE DATABASE journey")
    started = {}
    with ExitStack() as stack:
        for silo, engine in SILOS.items():
            url = f"host={socket} user=postgres dbname=journey"
            server = stack.enter_context(running(engine, tmp_path_factory.mktemp(engine), url))
            server.fill(silo, list(documents(silo)))
            started[silo] = server
        yield started


def test_three_engines_from_an_empty_folder_to_one_list_by_probability(servers, tmp_path, monkeypatch):
    began, world = time.monotonic(), tmp_path / "world"
    monkeypatch.setenv("NOTES_KEY", servers["notes"].key)
    port = free_base(len(SILOS) + 1)
    for silo, server in servers.items():
        key = ("--key", "env:NOTES_KEY") if server.key else ()
        done = isthmus("attach", server.url, "--out", world, "--silo", silo, "--port", port, *key)
        assert (done["documents"], done["level"]) == (2 * len(TOPICS), server.level)
        assert done["hits"]
    with run_federation(world) as federation, federation.client() as broker:
        answer = broker.search(TOPICS[0], k=20, deadline_ms=10_000)
        assert {hit.silo for hit in answer.hits} == set(SILOS)
        assert {status.status for status in answer.silos} == {"answered"}
        assert all(hit.title and hit.snippet for hit in answer.hits)
        first_search = time.monotonic() - began
        assert first_search < 60 * MINUTES
        states = {state.silo: state.ready for state in broker.silos().silos}
        assert {silo: (state.engine, state.level) for silo, state in states.items()} == {
            silo: (server.noun, server.level) for silo, server in servers.items()
        }
        for topic in TOPICS[:JUDGED]:
            for hit in broker.search(topic, k=12, deadline_ms=10_000).hits:
                broker.judge(topic, hit, relevant=topic in hit.title.lower())
        isthmus("learn", "--broker", federation.url, "--key", federation.key)
        answer = broker.search(TOPICS[JUDGED], k=20, deadline_ms=10_000)
        probabilities = [hit.probability for hit in answer.hits]
        assert None not in probabilities
        assert probabilities == sorted(probabilities, reverse=True)
        assert {hit.silo for hit in answer.hits[:3]} == set(SILOS)
        assert all(TOPICS[JUDGED] in hit.title.lower() for hit in answer.hits[:3])
        left = next(state.release for state in broker.silos().silos if state.silo == "notes")
        assert {row.kind for row in left.departures} >= {"scores", "snippets"}
