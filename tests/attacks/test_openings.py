"""Openings misused: to learn which documents there are, to have more than was allowed, to drown an owner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.errors import Refused, ServiceError
from isthmus.service import client
from isthmus.service.security import LIFETIME
from isthmus.service.settings import (
    Source,
)
from isthmus.service.silo_documents import ALLOWED_DAYS, ASKED_A_DAY, DAY
from one_silo import QUERY, a_peer, federation
from searching_silos import OPEN, searching

SCOPES = {"ada": ["search", "documents"], "ben": ["search"], "root": ["admin"]}


def first_hit(peer):
    return peer.post("/search", json={"query": QUERY}).json()["hits"][0]


def departures(node):
    node._ahead.settle()
    return {row["kind"]: row["items"] for row in node.ledger.summary()["departures"]}


def test_a_hit_is_opened_by_its_ticket_and_the_ledger_has_it(tmp_path):
    with a_peer(tmp_path, open=True) as peer:
        hit = first_hit(peer)
        assert hit["access"] == ["open"]
        assert not hit["token"], "feedback is another right"
        reply = peer.get(f"/documents/{hit['document']}", params={"ticket": hit["ticket"]})
        assert reply.status_code == 200
        assert reply.json()["body"].startswith("turbine number")
        assert reply.json()["link"] == hit["link"]
        assert departures(peer.node)["documents"] == 1


def test_a_limit_of_a_day_is_not_tried_again_for_a_minute(tmp_path, monkeypatch):
    """Every try is a refusal in the owner's audit log."""
    monkeypatch.setattr(
        client._Blocking, "sleep", lambda transport, seconds: pytest.fail("it was sent again")
    )
    policy = replace(OPEN, open=True, most_opened_a_day=1)
    with (
        searching(tmp_path, {"north": policy}) as silos,
        client.Client(str(silos.http.base_url)) as broker,
    ):
        first, second, *_ = broker.search("tidal power").hits
        assert broker.open(first).body
        with pytest.raises(
            Refused, match=r"as much of this silo as its policy allows; its owner may allow more$"
        ):
            broker.open(second)


def test_nothing_leaves_that_cannot_be_written_down(tmp_path, monkeypatch):
    with a_peer(tmp_path, open=True) as peer:
        hit = first_hit(peer)

        def full(*arguments, **named):
            raise ServiceError("nothing may leave: the disk is full")

        monkeypatch.setattr(peer.node.documents, "_note", full)
        assert peer.get(f"/documents/{hit['document']}", params={"ticket": hit["ticket"]}).status_code == 503


def test_only_what_was_shown_can_be_opened_or_asked_for(tmp_path):
    """Tickets that are made up, changed, of another hit, another peer or too old, a token of feedback, and
    a document that is not there: one and the same answer, and nothing in the ledger or the store."""
    with a_peer(tmp_path, open=True, ask="pseudonym", feedback=True) as peer:
        hits = peer.post("/search", json={"query": QUERY}).json()["hits"]
        first, second, tokens = hits[0], hits[1], peer.node.tokens
        other = "B" if first["ticket"][5] == "A" else "A"
        clock, tokens._clock = tokens._clock, lambda: clock() - LIFETIME - 120
        late = tokens.ticket(first["document"], peer="anonymous")
        tokens._clock = clock
        forged = [
            (first["document"], ""),
            (first["document"], "A" * 64),
            (first["document"], first["ticket"][:5] + other + first["ticket"][6:]),
            (first["document"], second["ticket"]),
            (first["document"], first["token"]),
            (first["document"], tokens.ticket(first["document"], peer="another")),
            (first["document"], late),
            ("secret-merger", first["ticket"]),
            ("no-such-thing", first["ticket"]),
            ("no-such-thing", tokens.ticket("no-such-thing", peer="anonymous")),
        ]
        answers = set()
        for document, ticket in forged:
            reply = peer.get(f"/documents/{document}", params={"ticket": ticket})
            answers.add((reply.status_code, reply.text))
        assert {status for status, _ in answers} == {404}
        assert len(answers) == 1
        for ticket in ("", "A" * 64, first["token"], late, tokens.ticket("no-such-thing", peer="anonymous")):
            reply = peer.post("/requests", json={"ticket": ticket, "query": QUERY})
            assert (reply.status_code, reply.text) in answers
        assert "documents" not in departures(peer.node)
        assert not peer.node.store.requests()


@pytest.mark.parametrize("rights", [{}, {"feedback": True}, {"ask": "pseudonym"}])
def test_without_the_right_a_true_ticket_opens_nothing(tmp_path, rights):
    with a_peer(tmp_path, **rights) as peer:
        hit = first_hit(peer)
        ticket = peer.node.tokens.ticket(hit["document"], peer="anonymous")
        answers = {
            peer.get(f"/documents/{document}", params={"ticket": ticket}).status_code
            for document in (hit["document"], "secret-merger", "no-such-thing")
        }
        assert answers == {403}


def test_a_document_is_opened_by_a_pseudonym_where_ids_are_hidden(tmp_path):
    with a_peer(tmp_path, open=True, snippets=False) as peer:
        hit = first_hit(peer)
        assert not hit["link"], "a link has the id"
        reply = peer.get(f"/documents/{hit['document']}", params={"ticket": hit["ticket"]})
        assert reply.json()["document"] == hit["document"]
        real = peer.node.tokens.ticketed(hit["ticket"], peer="anonymous")
        assert real.startswith("d ")
        assert peer.get(f"/documents/{real}", params={"ticket": hit["ticket"]}).status_code == 404


def test_opening_is_slowed_down(tmp_path):
    with a_peer(tmp_path, open=True) as peer:
        hit = first_hit(peer)
        statuses = [
            peer.get(f"/documents/{hit['document']}", params={"ticket": hit["ticket"]}).status_code
            for _ in range(40)
        ]
        assert statuses[:20] == [200] * 20
        assert statuses[-1] == 429


def test_one_person_asks_so_often_a_day_and_twice_is_once(tmp_path):
    with a_peer(tmp_path, ask="pseudonym") as peer:
        tickets = [peer.node.tokens.ticket(f"d {at}/x", peer="anonymous") for at in range(5)]

        def ask(ticket, person):
            return peer.post("/requests", json={"ticket": ticket, "query": QUERY, "person": person})

        assert ask(tickets[0], "p").json()["number"] == ask(tickets[0], "p").json()["number"]
        for _ in range(ASKED_A_DAY - 1):
            waiting = ask(tickets[1], "p").json()["number"]
            assert peer.node.store.settle_request(waiting, "waiting", "denied", at=0.0)
        assert ask(tickets[2], "p").status_code == 429
        assert ask(tickets[2], "another").status_code == 200


def test_what_is_written_to_an_owner_is_bounded(tmp_path):
    with a_peer(tmp_path, ask="pseudonym") as peer:
        hit = first_hit(peer)
        long = {"ticket": hit["ticket"], "query": QUERY, "reason": "x" * 1_001}
        assert peer.post("/requests", json=long).status_code == 422
        assert peer.post("/requests", json={**long, "reason": "", "query": "x" * 2_001}).status_code == 422
        assert not peer.node.store.requests()


def test_people_open_ask_and_are_answered(tmp_path):
    """Ada's key opens; Ben asks, and what the owner allows him he opens once; nobody else does."""
    with federation(tmp_path, SCOPES, open=True, ask="pseudonym", manage=True) as (node, people):
        ada, ben, root = people["ada"], people["ben"], people["root"]
        hit = ben.search(QUERY).hits[0]
        assert hit.access == ["open", "ask"]
        assert hit.link == "https://wiki.example.org/" + hit.document.replace(" ", "%20")
        assert ada.open(hit).body.startswith("turbine")
        with pytest.raises(Refused, match="scope documents"):
            ben.open(hit)
        request = ben.ask(QUERY, hit, reason="I build one")
        assert [(each.state, each.document) for each in ben.requests().requests] == [
            ("waiting", hit.document)
        ]
        assert not ada.requests().requests
        with pytest.raises(Refused):
            ben.requests(every=True)
        with pytest.raises(ServiceError):
            ben.open_allowed(request)
        (waiting,) = root.requests(every=True).requests
        assert (waiting.reason, waiting.query) == ("I build one", QUERY)
        assert "ben" not in waiting.person
        assert root.answer(waiting, allow=True, word="go ahead").state == "allowed"
        with pytest.raises(ServiceError):
            root.answer(waiting, allow=False)
        (answered,) = ben.requests().requests
        assert (answered.state, answered.word) == ("allowed", "go ahead")
        with pytest.raises(ServiceError):
            ada.open_allowed(answered)
        assert ben.open_allowed(answered).body.startswith("turbine")
        with pytest.raises(ServiceError, match="allowed"):
            ben.open_allowed(answered)
        assert ben.requests().requests[0].state == "opened"
        assert departures(node)["documents"] == 2


def test_what_was_allowed_ends_and_a_denial_says_why(tmp_path):
    with federation(tmp_path, SCOPES, ask="pseudonym", manage=True) as (node, people):
        ben, root = people["ben"], people["root"]
        first, second = ben.search(QUERY).hits[:2]
        for hit, allow in ((first, True), (second, False)):
            ben.ask(QUERY, hit)
            root.answer(root.requests(every=True).requests[0], allow=allow, word="" if allow else "not yours")
        states = {each.document: each for each in ben.requests().requests}
        assert (states[second.document].state, states[second.document].word) == ("denied", "not yours")
        clock = node.documents._clock
        node.documents._clock = lambda: clock() + (ALLOWED_DAYS + 1) * DAY
        late = {each.document: each for each in ben.requests().requests}[first.document]
        assert late.state == "expired"
        with pytest.raises(ServiceError):
            ben.open_allowed(late)


def test_an_owner_may_want_a_name_and_gets_it_only_from_who_gives_it(tmp_path):
    with federation(tmp_path, SCOPES, ask="name") as (node, people):
        ben, root = people["ben"], people["root"]
        hit = ben.search(QUERY).hits[0]
        assert hit.access == ["ask", "name"]
        with pytest.raises(Refused, match="by name"):
            ben.ask(QUERY, hit)
        ben.ask(QUERY, hit, named=True)
        assert [each.name for each in node.store.requests()] == ["ben"]
        assert "north" in root.requests(every=True).unanswered, "this silo lets nobody manage"


def test_a_silo_cannot_send_a_script_as_a_link(tmp_path):
    from pydantic import ValidationError

    from isthmus.service.wire import Hit

    plain = {"document": "d", "silo": "north", "probability": None, "score": 1.0}
    for link in ("javascript:alert(1)", "https://x/ y", "data:text/html,x", "//x", 'https://x/"\n'):
        with pytest.raises(ValidationError):
            Hit(**plain, link=link)


@pytest.mark.parametrize(
    "link",
    [
        "javascript:{id}",
        "https://{id}/x",
        "https://a@b/{id}",
        "ftp://x/{id}",
        "https://x/",
        "/x/{id}",
        "https://x/{id} y",
    ],
)
def test_a_link_goes_to_one_server_of_the_web(link):
    with pytest.raises(ValueError, match="link"):
        Source("folder", "x", link=link)


@pytest.mark.parametrize(
    ("id", "address"),
    [
        ("a b/c?d#e&f.md", "https://x/?q=a%20b/c%3Fd%23e%26f.md"),
        ("../admin", ""),
        ("a/./b", ""),
        ("papers:a.md", "https://x/?q=a.md"),
    ],
)
def test_an_id_cannot_lead_elsewhere(id, address, tmp_path):
    assert Source("folder", tmp_path, name="papers", link="https://x/?q={id}").link_to(id) == address


def test_the_log_has_no_id_of_a_document(tmp_path, caplog):
    with a_peer(tmp_path, open=True) as peer, caplog.at_level("INFO", logger="isthmus.access"):
        hit = first_hit(peer)
        peer.get(f"/documents/{hit['document']}", params={"ticket": hit["ticket"]})
        peer.delete(f"/documents/{hit['document']}")
    lines = [record.getMessage() for record in caplog.records if record.name == "isthmus.access"]
    assert any("/v1/documents/{id:path}" in line for line in lines)
    assert not any("d 0" in line or "d%20" in line for line in lines)
