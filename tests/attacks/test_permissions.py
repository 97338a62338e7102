"""What a person may not see: found by a search, opened or judged by another's ticket, asked for, counted."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from isthmus.engines import ANYBODY, AttachedReader, Constraints
from isthmus.engines.attached import Remote
from isthmus.engines.remote import Location, RemoteDocument
from isthmus.engines.tally import DocumentTally
from isthmus.errors import ConfigError
from isthmus.service.api import broker_app
from isthmus.service.audit_log import audit_lines
from isthmus.service.broker import Broker
from isthmus.service.client import Client
from isthmus.service.limits import MESSAGE, message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.people import HEADER, Person, Statement, digest_of, token_signer
from isthmus.service.redaction import MASK, Redaction
from isthmus.service.security import ApiKeys
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    NodeSettings,
    NoisedCounts,
    PathRule,
    PersonPolicy,
    Policy,
    SiloAddress,
    Source,
    read_node,
)
from isthmus.service.stores import Draft
from isthmus.service.wire import CountQuestion, Narrowing, NodeSearch, Search
from silo_stand_in import Loop

ADA = Person("ada", frozenset({"doctors"}))
BOB = Person("bob", frozenset({"nurses"}))
EVE = Person("eve", frozenset({"guests"}))
RIGHTS = {"search": True, "snippets": True, "matches": True, "suggestions": True, "feedback": True}
SPEAKER = Policy(**RIGHTS, open=True, ask="pseudonym", judgements=True, people=True)
ROWS = """id,title,body,allow
open,Tide,mill at the harbour,
doctors,Tide,turbine of ward seven,doctors
nurses,Tide,turbine of the harbour phone 0123456789,nurses; user:ada
"""


@pytest.fixture(scope="module")
def silo(tmp_path_factory):
    made = Silo(tmp_path_factory.mktemp("permissions"))
    yield made
    made.close()


class Silo:
    """A node on loopback: `local` speaks for people, `mute` for nobody, `owner` is its administrator."""

    def __init__(self, folder):
        (folder / "rows.csv").write_text(ROWS)
        keys = ApiKeys(folder / "keys.json")
        self.keys = {name: keys.add(name, scopes=["search"]) for name in ("local", "mute")}
        self.keys["owner"] = keys.add("owner", scopes=["admin"])
        withheld = (
            Redaction("body", ("doctors",), "[0-9]{10}"),
            Redaction("link", ("doctors", "nurses")),
        )
        self.settings = NodeSettings(
            silo="north",
            folder=folder / "north",
            keys=keys.path,
            sources=(
                Source("table", folder / "rows.csv", redact=withheld, link="https://wiki.example.org/{id}"),
            ),
            peers={"local": SPEAKER, "mute": replace(SPEAKER, people=False)},
            groups={"guests": PersonPolicy(snippets=False, matches=False, open=False)},
            people={"mallory": PersonPolicy(search=False)},
            encoder=EncoderSettings("none"),
            noised_counts=NoisedCounts(epsilon=0.5),
        )
        self.loop, self._opened = Loop(), Node(self.settings).offline()
        self.node = self._opened.__enter__()
        self.node.read_sources()
        self.node._read.set()
        self.node._catch_up()
        self.node._note_rules()
        self.port = self.loop.serve(node_app(self.node)).port

    def ask(self, person, path, body=None, *, peer="local", **query):
        """What a person is answered through a peer."""
        method = "GET" if body is None else "POST"
        content = b"" if body is None else json.dumps(body).encode()
        request = httpx.Request(method, f"http://127.0.0.1:{self.port}/v1{path}", params=query or None)
        message = message_header()[MESSAGE]
        headers = {MESSAGE: message, "authorization": f"Bearer {self.keys[peer]}"}
        if body is not None:
            headers["content-type"] = "application/json"
        if person is not None:
            call = f"{method} {request.url.raw_path.decode()}"
            statement = Statement(person, "north", call, message, digest_of(content))
            headers[HEADER] = statement.signed(token_signer(self.keys[peer]))
        return httpx.request(method, request.url, content=content or None, headers=headers, timeout=15)

    def search(self, person, query="tide", *, peer="local", **wanted):
        reply = self.ask(person, "/search", {"query": query, "k": 9, **wanted}, peer=peer)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def hit(self, person, id):
        return next(hit for hit in self.search(person)["hits"] if hit["document"] == id)

    def close(self):
        self.loop.close()
        self._opened.__exit__(None, None, None)


def found(answer):
    return {hit["document"] for hit in answer["hits"]}


def test_a_person_finds_what_they_may_see(silo):
    assert found(silo.search(ADA)) == {"open", "doctors", "nurses"}
    assert found(silo.search(BOB)) == {"open", "nurses"}
    nobody = Person("user", frozenset({"everyone", "user:ada", "group:doctors"}))
    assert found(silo.search(nobody)) == {"open"}
    assert found(silo.search(Person("group:doctors"))) == {"open"}
    answer = silo.search(BOB, "turbine", matches=True, suggest=True)
    assert (answer["matches"]["count"], answer["documents"]) == (1, 2)


def test_a_peer_that_speaks_for_nobody_sees_what_is_open_and_the_owner_all(silo):
    assert found(silo.search(None, peer="mute")) == {"open"}
    assert found(silo.search(ADA, peer="mute")) == {"open"}
    assert found(silo.search(None, peer="owner")) == {"open", "doctors", "nurses"}


def test_anothers_ticket_opens_nothing_and_says_nothing(silo):
    hit = silo.hit(ADA, "doctors")
    assert silo.ask(ADA, "/documents/doctors", ticket=hit["ticket"]).status_code == 200
    stolen = silo.ask(BOB, "/documents/doctors", ticket=hit["ticket"])
    unknown = silo.ask(BOB, "/documents/absent", ticket=hit["ticket"])
    assert stolen.status_code == unknown.status_code == 404
    assert stolen.json() == unknown.json()
    asked = {"ticket": hit["ticket"], "query": "tide", "person": "b" * 32}
    stolen = silo.ask(BOB, "/requests", asked)
    unknown = silo.ask(BOB, "/requests", {**asked, "ticket": "A" * len(hit["ticket"])})
    assert stolen.status_code == unknown.status_code == 404, stolen.text
    assert stolen.json() == unknown.json()


def test_nobody_judges_what_they_may_not_see(silo):
    verdict = {"query": "tide", "silo": "north", "relevant": True, "person": "b" * 32}
    hit = silo.hit(ADA, "doctors")
    assert silo.ask(BOB, "/feedback", {**verdict, "token": hit["token"]}).status_code == 404
    assert not silo.node.store.judgements()
    assert silo.ask(ADA, "/feedback", {**verdict, "token": hit["token"]}).status_code == 204
    assert [each.document for each in silo.node.store.judgements()] == ["doctors"]


def test_judgements_by_id_tell_nothing_of_what_not_everybody_sees(silo):
    rows = [{"query": "tide", "document": id, "relevant": True} for id in ("open", "doctors", "absent")]
    body = {"judgements": rows, "person": "c" * 32}
    assert silo.ask(None, "/judgements", body, peer="mute").json()["unknown"] == [1, 2]


def test_an_export_of_judgements_names_no_document_that_not_everybody_sees(silo):
    for id in ("open", "doctors"):
        verdict = {"query": "tide", "silo": "north", "relevant": True, "person": "b" * 32}
        reply = silo.ask(ADA, "/feedback", {**verdict, "token": silo.hit(ADA, id)["token"]})
        assert reply.status_code == 204
    rows = silo.ask(None, "/judgements").json()["judgements"]
    assert {row["document"] for row in rows} == {"open"}


def test_a_list_of_requests_has_names_for_those_who_may_have_them(silo):
    (hit,) = silo.search(EVE)["hits"]
    asked = {"ticket": hit["ticket"], "query": "tide", "person": "e" * 32}
    assert silo.ask(EVE, "/requests", asked).json()["document"] == hit["document"] != "open"
    (row,) = silo.ask(EVE, f"/requests?person={asked['person']}").json()["requests"]
    assert row["document"] == hit["document"]
    assert silo.ask(None, f"/requests?person={asked['person']}").status_code == 428


def test_nothing_is_opened_asked_for_or_judged_by_a_rule_that_was(silo, monkeypatch):
    hit = silo.hit(ADA, "open")
    asked = {"ticket": hit["ticket"], "query": "tide", "person": "b" * 32}
    verdict = {"query": "tide", "silo": "north", "relevant": True, "person": "b" * 32}
    monkeypatch.setattr(silo.node, "_rules_read", "those before")
    replies = [
        silo.ask(ADA, "/search", {"query": "tide"}),
        silo.ask(ADA, "/documents/open", ticket=hit["ticket"]),
        silo.ask(ADA, "/requests", asked),
        silo.ask(ADA, "/feedback", {**verdict, "token": hit["token"]}),
        silo.ask(None, "/judgements", peer="mute"),
    ]
    assert [reply.status_code for reply in replies] == [503] * 5


def test_a_new_text_is_not_shown_to_whom_the_old_one_was_while_the_index_is_behind(tmp_path):
    settings = NodeSettings("north", tmp_path / "north", encoder=EncoderSettings("none"))
    with Node(settings).offline() as node:
        node.store.put([Draft("a", "Tide", "mill"), Draft("b", "Tide", "lamp")], source="operator")
        node.index.catch_up()
        node.store.put(
            [Draft("a", "Tide of ward seven", "secret", allow=("group:doctors",))], source="operator"
        )
        for query, principals in (("tide", ANYBODY), ("tide", EVE.principals), ("after:1970", ANYBODY)):
            wanted = Search(query=query) if query == "tide" else NodeSearch(query="", only=Narrowing())
            answer = node.searcher.search(wanted, snippets=True, principals=principals)
            assert {hit.document for hit in answer.hits} == {"b"}
        assert "secret" in node.searcher.search(Search(query="tide"), snippets=True).model_dump_json()


def test_a_server_that_compares_names_without_case_shows_nothing_more():
    documents = {
        "open": RemoteDocument("open", "Tide", "mill", allow=("everyone",)),
        "other": RemoteDocument("other", "Tide", "turbine", allow=("group:Doctors",)),
        "own": RemoteDocument("own", "Tide", "lamp", allow=("group:doctors",)),
    }
    server = SimpleNamespace(
        noun="Server",
        location=Location("http://127.0.0.1:9", "papers", allow="acl"),
        check_rules=lambda: None,
        search=lambda text, vector, depth, only: [(id, 0.5) for id in documents],
        matching=lambda weights, depth, only: list(documents),
        newest=lambda depth, only: list(documents)[::-1],
        get=lambda ids: {id: documents[id] for id in ids},
    )
    reader = AttachedReader(Remote(server), DocumentTally(words=("tide",)), 3, "en").seen_by(ADA.principals)
    assert set(reader.ids(reader.search("tide", np.zeros(0), 9)[0])) == {"open", "own"}
    assert set(reader.ids(reader.matching({"tide": 1.0}, 9))) == {"open", "own"}
    assert reader.ids(reader.newest(9, Constraints())) == ["own", "open"]


def test_tables_of_persons_and_groups_narrow_what_a_peer_may(silo):
    (hit,) = silo.search(EVE, matches=True)["hits"]
    assert (hit["title"], hit["access"]) == ("", ["ask"])
    assert "open" not in hit["document"]
    assert silo.search(EVE, matches=True)["matches"] is None
    ticket = silo.hit(ADA, "open")["ticket"]
    assert silo.ask(EVE, "/documents/open", ticket=ticket).status_code == 403
    mallory = Person("mallory", frozenset({"doctors"}))
    assert silo.ask(mallory, "/search", {"query": "tide"}).status_code == 403
    settings = silo.settings
    assert settings.narrowed(SPEAKER, ADA) is SPEAKER
    both = Person("x", frozenset({"guests", "doctors"}))
    assert not settings.narrowed(SPEAKER, both).open  # no table of doctors gives it back
    wide = replace(settings, groups={**settings.groups, "doctors": PersonPolicy()})
    assert wide.narrowed(SPEAKER, both) == SPEAKER
    assert wide.narrowed(replace(SPEAKER, open=False), both).open is False
    everyone = replace(settings, groups={"everyone": PersonPolicy(search=False)})
    assert not everyone.narrowed(SPEAKER, None).search


def test_rights_of_groups_and_persons_and_rules_of_sources_are_in_the_audit_log(silo):
    silo.node.audit.compare("policy", silo.node._policies())
    entries = [line.content for line in audit_lines(silo.node.settings.folder)]
    rights = {entry["what"]: entry["becomes"] for entry in entries if entry["action"] == "policy"}
    assert "open=True" not in rights["group:guests"]
    assert "search=True" not in rights[f"user:{silo.node.audit.pseudonym('', 'mallory')}"]
    assert len(rights["rules of sources"]) == 64


def test_what_is_withheld_is_searched_by_nobody_and_shown_to_few(silo):
    for person in (ADA, BOB):
        assert not silo.search(person, "0123456789")["hits"]
        assert MASK in silo.hit(person, "nurses")["snippet"]
    assert "0123456789" not in silo.node.index.snapshot.reader.statistics(("text.having",))[0].tolist()
    bodies = [
        silo.ask(person, "/documents/nurses", ticket=silo.hit(person, "nurses")["ticket"]).json()["body"]
        for person in (ADA, BOB)
    ]
    assert [("0123456789" in body, MASK in body) for body in bodies] == [(True, False), (False, True)]
    assert "0123456789" in silo.node.documents.read("nurses").body
    assert silo.hit(ADA, "open")["link"] == "https://wiki.example.org/open"
    other = Person("carl", frozenset({"cleaners"}))
    assert silo.hit(other, "open")["link"] == ""


def test_a_count_with_noise_is_of_what_a_person_may_see(silo, monkeypatch):
    monkeypatch.setattr("isthmus.service.noised_counts.Geometric.draw", lambda self, size: [0] * size)
    question = CountQuestion(query="turbine")
    counts = [silo.node.count(question, "local", each) for each in (ADA.principals, BOB.principals, ANYBODY)]
    assert [each.count for each in counts] == [2, 1, 0]
    again = silo.node.count(question, "local", Person("carl", frozenset({"nurses"})).principals)
    assert (again.count, again.repeated) == (1, True)


def test_a_rule_that_changes_holds_before_anything_is_searched(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.md").write_text("tide words")
    (folder / "b.md").write_text("tide words")
    settings = NodeSettings(
        "north", tmp_path / "north", sources=(Source("folder", folder),), encoder=EncoderSettings("none")
    )

    def opened(node):
        node.read_sources()
        node._read.set()
        node._catch_up()
        node._note_rules()
        search = Search(query="tide")
        answer = node.searcher.search(search, snippets=True, principals=ANYBODY)
        return {hit.document for hit in answer.hits}

    with Node(settings).offline() as node:
        assert node.has_read_rules
        assert opened(node) == {"a.md", "b.md"}
    rules = (PathRule("a*", ("doctors",)),)
    closed = replace(settings, sources=(Source("folder", folder, rules=rules),))
    (folder / "a.md").write_bytes(b"\0")  # it can be read no more, and what it said was for all
    with Node(closed).offline() as node:
        assert not node.has_read_rules
        assert opened(node) == {"b.md"}
        assert node.has_read_rules
        assert not node.store.present(["a.md"])
    with Node(closed).offline() as node:
        assert node.has_read_rules


@pytest.mark.parametrize("line", ['allow = ["role:x"]', 'redact = [{field = "body", pattern = "("}]'])
def test_a_rule_that_is_none_is_a_setting_at_fault(tmp_path, line):
    text = f'silo = "north"\nfolder = "north"\n[[sources]]\nkind = "folder"\npath = "."\n{line}\n'
    (tmp_path / "silo.toml").write_text(text)
    with pytest.raises(ConfigError):
        read_node(tmp_path / "silo.toml")


def test_the_groups_of_an_api_key_are_those_that_a_silo_sees_by(silo, tmp_path):
    keys = ApiKeys(tmp_path / "api-keys.json")
    tokens = [
        keys.add(name, scopes=["search"], groups=[group]) for name, group in (("a", "doctors"), ("b", "x"))
    ]
    settings = BrokerSettings(
        folder=tmp_path / "broker",
        keys=keys.path,
        node_key=silo.keys["local"],
        silos={"north": SiloAddress(f"http://127.0.0.1:{silo.port}", people=True)},
        share_statistics=False,
        deadline_ms=10_000,
    )

    async def made():
        return Broker(settings)

    broker = silo.loop.run(made())
    server = silo.loop.serve(broker_app(broker), lifespan="on")
    answers, sizes = [], []
    for token in tokens:
        with Client(f"http://127.0.0.1:{server.port}", key=token, patience=0) as client:
            answers.append(client.search("tide"))
            sizes.append(broker.silos["north"].status("late").documents)
    silo.loop.stop(server)
    assert [{hit.document for hit in each.hits} for each in answers] == [{"open", "doctors"}, {"open"}]
    assert [each.silos[0].documents for each in answers] == [2, 1]
    assert set(sizes) <= {None, 3}, "how many another may see is told to nobody"
