"""Feedback misused: to learn which documents there are, and to undo what others said."""

from __future__ import annotations

import pytest

from isthmus.service.security import LIFETIME, HitTokens
from isthmus.service.stores import majority
from one_silo import QUERY, a_peer, federation

SCOPES = dict.fromkeys(("ada", "mallory"), ("search", "feedback"))


def said_of(hit, **more):
    return {"query": QUERY, "silo": "north", "token": hit["token"], "relevant": True, **more}


def test_feedback_does_not_say_which_documents_there_are(tmp_path):
    with a_peer(tmp_path, feedback=True) as peer:
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
    with a_peer(tmp_path, feedback=True) as peer:
        hits = peer.post("/search", json={"query": QUERY}).json()["hits"]
        tokens, first = peer.node.tokens, hits[0]
        other = "B" if first["token"][5] == "A" else "A"
        forged = [
            said_of(first, token=""),
            said_of(first, token="A" * 64),
            said_of(first, token="A"),
            said_of(first, token=first["token"][:5] + other + first["token"][6:]),
            said_of(first, token=HitTokens("north", bytes(64)).seal("d 1/x", query=QUERY, peer="anonymous")),
            said_of(first, token=tokens.seal("secret-merger", query="merger", peer="anonymous")),
            said_of(first, token=tokens.seal("d 1/x", query=QUERY, peer="another")),
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
    with a_peer(tmp_path, feedback=True) as peer:
        tokens = peer.node.tokens
        short, long = (tokens.seal(name, query=QUERY, peer="a") for name in ("x", "merger-with-acme.pdf"))
        assert len(short) == len(long)
        assert tokens.seal("x", query=QUERY, peer="b") != short


def test_a_person_cannot_name_themselves(tmp_path):
    """Who judged is the broker's to say: a request with a name of its own is refused."""
    with federation(tmp_path, SCOPES, feedback=True) as (node, people):
        hit = people["mallory"].search(QUERY).hits[0]
        said = {"query": QUERY, "silo": "north", "token": hit.token, "relevant": False, "person": "ada"}
        assert people["mallory"]._calls._transport.http.post("/v1/feedback", json=said).status_code == 422
        people["mallory"].judge(QUERY, hit, relevant=False)
        (judgement,) = node.store.judgements()
        assert judgement.person
        assert "mallory" not in judgement.person


def test_nobody_overwrites_what_another_said(tmp_path):
    with federation(tmp_path, SCOPES, feedback=True) as (node, people):
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
