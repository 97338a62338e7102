"""Feedback misused: to learn which documents there are, and to undo what others said."""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.client import Client
from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.security import LIFETIME, ApiKeys, HitTokens
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    NodeSettings,
    Policy,
    SiloAddress,
    Source,
)
from isthmus.service.stores import majority
from silo_stand_in import Loop

QUERY = "tide turbine"


@contextmanager
def a_node(folder):
    """A node on a port of its own, in the loop that comes with it."""
    rows = [{"_id": f"d{at}", "title": "tide", "text": f"turbine number{at}"} for at in range(5)]
    rows.append({"_id": "secret-merger", "title": "merger", "text": "nobody may know"})
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = NodeSettings(
        silo="north",
        folder=folder / "north",
        sources=(Source("beir", path),),
        peers={"anonymous": Policy(search=True, snippets=True, feedback=True)},
        encoder=EncoderSettings("none"),
    )
    loop = Loop()
    with Node(settings).offline() as node:
        node.read_sources()
        node.index.catch_up()
        node._read.set()
        try:
            yield node, loop, f"http://127.0.0.1:{loop.serve(node_app(node)).port}"
        finally:
            loop.close()


@contextmanager
def federation(folder):
    """A node behind its broker, and two people with keys of their own."""
    with a_node(folder) as (node, loop, address):
        keys = ApiKeys(folder / "api-keys.json")
        told = BrokerSettings(
            folder=folder / "broker",
            keys=keys.path,
            silos={"north": SiloAddress(address)},
            share_statistics=False,
            deadline_ms=10_000,
        )

        async def made():
            return Broker(told)

        url = f"http://127.0.0.1:{loop.serve(broker_app(loop.run(made())), lifespan='on').port}"
        with ExitStack() as held:
            yield (
                node,
                {
                    name: held.enter_context(Client(url, key=keys.add(name, scopes=["search", "feedback"])))
                    for name in ("ada", "mallory")
                },
            )


@contextmanager
def a_peer(folder):
    """A node, and a peer that writes to it what it likes."""
    with a_node(folder) as (node, _, address), httpx.Client(base_url=f"{address}/v1", timeout=30) as client:
        client.event_hooks = {"request": [lambda request: request.headers.update(message_header())]}
        client.node = node
        yield client


def said_of(hit, **more):
    return {"query": QUERY, "silo": "north", "token": hit["token"], "relevant": True, **more}


def test_feedback_does_not_say_which_documents_there_are(tmp_path):
    with a_peer(tmp_path) as peer:
        answers = set()
        for document in ("secret-merger", "no-such-thing"):
            said = {"query": QUERY, "document": document, "silo": "north", "relevant": True}
            reply = peer.post("/feedback", json=said)
            answers.add((reply.status_code, reply.text))
        assert len(answers) == 1
        assert not peer.node.store.judgements()


def test_only_what_was_shown_can_be_judged(tmp_path):
    """A token that is made up, changed, for another query, of another peer or too old, and one of a document
    that is not there: one and the same answer."""
    with a_peer(tmp_path) as peer:
        hits = peer.post("/search", json={"query": QUERY}).json()["hits"]
        tokens, first = peer.node.tokens, hits[0]
        other = "B" if first["token"][5] == "A" else "A"
        forged = [
            said_of(first, token=""),
            said_of(first, token="A" * 64),
            said_of(first, token="A"),
            said_of(first, token=first["token"][:5] + other + first["token"][6:]),
            said_of(first, token=HitTokens("north", bytes(64)).seal("d1", query=QUERY, peer="anonymous")),
            said_of(first, token=tokens.seal("secret-merger", query="merger", peer="anonymous")),
            said_of(first, token=tokens.seal("d1", query=QUERY, peer="another")),
            said_of(first, token=tokens.seal("no-such-thing", query=QUERY, peer="anonymous")),
            said_of(first, query="tide"),
            said_of(first, silo="south"),
        ]
        answers = {
            (reply.status_code, reply.text)
            for reply in (peer.post("/feedback", json=each) for each in forged)
        }
        with pytest.MonkeyPatch.context() as later:
            now = tokens._clock()
            later.setattr(tokens, "_clock", lambda: now + LIFETIME + 61)
            old = peer.post("/feedback", json=said_of(first))
            answers.add((old.status_code, old.text))
        assert len(answers) == 1
        assert answers.pop()[0] == 404
        assert not peer.node.store.judgements()
        assert peer.post("/feedback", json=said_of(first)).status_code == 204
        assert [each.document for each in peer.node.store.judgements()] == [first["document"]]


def test_a_token_says_nothing_of_its_document(tmp_path):
    with a_peer(tmp_path) as peer:
        tokens = peer.node.tokens
        short, long = (tokens.seal(name, query=QUERY, peer="a") for name in ("x", "merger-with-acme.pdf"))
        assert len(short) == len(long)
        assert tokens.seal("x", query=QUERY, peer="b") != short


def test_a_person_cannot_name_themselves(tmp_path):
    """Who judged is the broker's to say: a request with a name of its own is refused."""
    with federation(tmp_path) as (node, people):
        hit = people["mallory"].search(QUERY).hits[0]
        said = {"query": QUERY, "silo": "north", "token": hit.token, "relevant": False, "person": "ada"}
        assert people["mallory"]._http.post("/v1/feedback", json=said).status_code == 422
        people["mallory"].judge(QUERY, hit, relevant=False)
        (judgement,) = node.store.judgements()
        assert judgement.person
        assert "mallory" not in judgement.person


def test_nobody_overwrites_what_another_said(tmp_path):
    with federation(tmp_path) as (node, people):
        hit = people["ada"].search(QUERY).hits[0]
        people["ada"].judge(QUERY, hit, relevant=True)
        people["mallory"].judge(QUERY, people["mallory"].search(QUERY).hits[0], relevant=False)
        people["mallory"].judge(QUERY, hit, relevant=False)
        words = sorted(each.relevant for each in node.store.judgements())
        assert words == [False, True], "each person has one word, and mallory's is not ada's"
        assert majority(node.store.judgements()) == {(QUERY, hit.document): True}
        people["ada"].judge(QUERY, hit, relevant=False)
        assert majority(node.store.judgements()) == {(QUERY, hit.document): False}, (
            "one's own word can change"
        )
