"""Three silos on three engines that run already, from an empty folder to one list by probability."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from engine_servers import running
from isthmus.errors import ServiceError
from isthmus.service import run_federation
from loopback_ports import free_base

FIRST = ("harbour", "glacier", "orchard", "railway", "lantern", "granite", "monsoon", "cathedral")
SECOND = ("keepers", "surveys", "repairs", "festivals", "drawings", "founders", "permits")
TOPICS = [f"{first} {second}" for first in FIRST for second in SECOND]
SILOS = {"papers": "postgresql", "notes": "qdrant", "tickets": "typesense"}
FIELDS = ("--type", "kind", "--date", "at", "--link", "https://wiki.example.org/{id}")
RIGHTS = 'open = true\nask = "pseudonym"\nmanage = true\n'
DAY = 1_584_230_400
"""15 March 2020; the other documents are of the year after."""
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
            "kind": "report",
            "at": DAY,
        }
        yield {
            "id": f"d{2 * at + 2}",
            "title": f"On another {first}",
            "body": f"A {first} that is mentioned once in the {silo}, with a few words besides.",
            "kind": "note",
            "at": DAY + 366 * 86_400,
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
        where = ("--out", world, "--silo", silo, "--port", port)
        done = isthmus("attach", server.url, *where, *FIELDS, *key)
        assert (done["documents"], done["level"]) == (2 * len(TOPICS), server.level)
        assert done["hits"]
        file = world / silo / "silo.toml"
        file.write_text(file.read_text().replace("[peers.broker]\n", f"[peers.broker]\n{RIGHTS}", 1))
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
        narrow(broker)
        for topic in TOPICS[:JUDGED]:
            for hit in broker.search(topic, k=6, deadline_ms=10_000).hits:
                broker.judge(topic, hit, relevant=topic in hit.title.lower())
        isthmus("learn", "--broker", federation.url, "--key", federation.key)
        answer = broker.search(TOPICS[JUDGED], k=20, deadline_ms=10_000)
        probabilities = [hit.probability for hit in answer.hits]
        assert None not in probabilities
        assert probabilities == sorted(probabilities, reverse=True)
        assert {hit.silo for hit in answer.hits[:3]} == set(SILOS)
        assert all(TOPICS[JUDGED] in hit.title.lower() for hit in answer.hits[:3])
        documents_are_opened_and_asked_for(broker, answer.hits[:3])
        one_is_erased_in_every_silo(broker, world, TOPICS[JUDGED], answer.hits[:3])
        left = next(state.release for state in broker.silos().silos if state.silo == "notes")
        assert {row.kind for row in left.departures} >= {"scores", "snippets", "documents"}


def narrow(broker):
    """Facets with counts of all three engines, filters that each applies itself, and pages."""
    first = TOPICS[0].split()[0]
    answer = broker.search(first, k=50, facets=True, deadline_ms=10_000)
    matching = 2 * len(SECOND)
    assert answer.facets.silos == dict.fromkeys(SILOS, matching)
    assert answer.facets.types == {"report": 3 * len(SECOND), "note": 3 * len(SECOND)}
    assert answer.facets.years == {"2021": len(SECOND), "2020": len(SECOND)}, (
        "by the engine that counts years"
    )
    every = [(hit.silo, hit.document) for hit in answer.hits]
    assert len(set(every)) == len(every) == 3 * matching
    paged = []
    for offset in range(0, len(every), 10):
        page = broker.search(first, k=10, offset=offset, deadline_ms=10_000)
        paged += [(hit.silo, hit.document) for hit in page.hits]
    assert paged == every, "pages are the whole list, in its order"
    for words, kind, day in (("type:note", "note", "2021-03-16"), ("before:2021", "report", "2020-03-15")):
        narrowed = broker.search(f"{first} {words}", k=50, facets=True, deadline_ms=10_000)
        assert {(hit.silo, hit.type, hit.date) for hit in narrowed.hits} == {
            (silo, kind, day) for silo in SILOS
        }
        assert len(narrowed.hits) == narrowed.facets.matches == 3 * len(SECOND)


def documents_are_opened_and_asked_for(broker, hits):
    """Whole documents of all three engines, by ticket and by an owner's leave."""
    for hit in hits:
        assert hit.link == f"https://wiki.example.org/{hit.document}"
        opened = broker.open(hit)
        assert opened.title == hit.title
        assert opened.body.startswith(f"What the {hit.silo} have on ")
    (hit, *_) = hits
    request = broker.ask("what was searched for", hit, reason="our audit")
    assert broker.answer(request, allow=True).state == "allowed"
    assert broker.open_allowed(request).body == broker.open(hit).body


def one_is_erased_in_every_silo(broker, world, topic, hits):
    """Shown no more, though the engine has it; the receipt says whose it is."""
    for hit in hits:
        config = world / hit.silo / "silo.toml"
        receipt = isthmus("documents", "remove", hit.document, "--config", config)
        assert [each["hidden"] for each in receipt["documents"]] == [True]
        assert "whoever runs that engine" in receipt["remains"][0]
        with pytest.raises(ServiceError):
            broker.open(hit)
    gone = {(hit.silo, hit.document) for hit in hits}
    left = {(hit.silo, hit.document) for hit in broker.search(topic, k=50, deadline_ms=10_000).hits}
    assert {silo for silo, _ in left} == set(SILOS)
    assert not left & gone
