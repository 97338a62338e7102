"""Who is asking, as a broker signs it for a silo: forged, taken elsewhere, sent again, or left out."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import httpx
import pytest

from isthmus.errors import ConfigError, Refused
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.certificates import Authority, client_context, server_name
from isthmus.service.client import Client
from isthmus.service.limits import MESSAGE, message_header
from isthmus.service.node import Node
from isthmus.service.node_api import NodeApi, node_app
from isthmus.service.people import HEADER, Person, Statement, digest_of, signer, token_signer
from isthmus.service.security import ApiKeys, pseudonym
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    NodeSettings,
    Policy,
    SiloAddress,
    Source,
)
from silo_stand_in import Loop

ADA = Person("ada", frozenset({"ward 3", "doctors"}))
SPEAKER = Policy(search=True, snippets=True, feedback=True, open=True, people=True)
BODY = json.dumps({"query": "tide", "k": 3}).encode()


class Silo:
    """A node over TLS whose peers are `broker`, which speaks for people, and `mute`, which may not."""

    def __init__(self, folder, monkeypatch):
        authority = Authority.at(folder / "keys")
        self.tls = authority.issue("north", clients=False)
        self.peers = {name: authority.issue(name, clients=True) for name in ("broker", "mute")}
        rows = folder / "corpus.csv"
        rows.write_text("id,title,text\nd1,tide,turbine\nd2,tide,mill\n")
        keys = ApiKeys(folder / "north-keys.json")
        self.token = keys.add("local", scopes=["search"])
        settings = NodeSettings(
            silo="north",
            folder=folder / "north",
            tls=self.tls,
            keys=keys.path,
            sources=(Source("table", rows),),
            peers={"broker": SPEAKER, "mute": Policy(search=True), "local": SPEAKER},
            encoder=EncoderSettings("none"),
        )
        self.people = []
        inner = NodeApi._person

        def noting(api, request):
            self.people.append(inner(api, request))
            return self.people[-1]

        monkeypatch.setattr(NodeApi, "_person", noting)
        self.loop, self._opened = Loop(), Node(settings).offline()
        self.node = self._opened.__enter__()
        self.node.read_sources()
        self.node.index.catch_up()
        self.node._read.set()
        self.url = self.served(mutual=True)
        self.local = self.served(mutual=False)

    def served(self, *, mutual):
        options = {"tls": self.tls, "mutual": True} if mutual else {}
        port = self.loop.serve(node_app(self.node), **options).port
        return f"{'https' if mutual else 'http'}://127.0.0.1:{port}"

    def statement(self, person=ADA, *, key="broker", **changes):
        """A request's headers, with the statement that belongs to it but for these changes."""
        message = message_header()[MESSAGE]
        fields = {
            "silo": "north",
            "request": "POST /v1/search",
            "message": message,
            "body": digest_of(BODY),
        }
        sign = signer(self.peers[key].key.read_bytes()) if key in self.peers else token_signer(key)
        return {MESSAGE: message, HEADER: Statement(person, **(fields | changes)).signed(sign)}

    def search(self, headers, *, peer="broker", body=BODY):
        if peer in self.peers:
            verify = client_context(self.peers[peer])
            extensions = {"sni_hostname": server_name("north")}
            with httpx.Client(base_url=self.url, verify=verify, timeout=15) as client:
                request = client.build_request("POST", "/v1/search", content=body, extensions=extensions)
                request.headers.update({"content-type": "application/json", **headers})
                return client.send(request)
        headers = {"authorization": f"Bearer {peer}", "content-type": "application/json", **headers}
        return httpx.post(f"{self.local}/v1/search", content=body, headers=headers, timeout=15)

    def close(self):
        self.loop.close()
        self._opened.__exit__(None, None, None)


@pytest.fixture(scope="module")
def silo(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Silo(tmp_path_factory.mktemp("people"), monkeypatch)
        yield made
        made.close()


def test_a_silo_knows_who_asks(silo):
    assert silo.search(silo.statement()).status_code == 200
    assert silo.people[-1] == ADA
    assert silo.people[-1].principals == {"user:ada", "group:ward 3", "group:doctors", "everyone"}


@pytest.mark.parametrize(
    "changes",
    [
        {"silo": "south"},
        {"request": "POST /v1/feedback"},
        {"request": "GET /v1/search"},
        {"body": digest_of(b'{"query": "another"}')},
        {"message": f"{time.time():.3f} 0123456789ab"},
        {"key": "mute"},
        {"key": "isk_0_guessed"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_statement_for_anything_else_is_refused(silo, changes):
    count = len(silo.people)
    assert silo.search(silo.statement(**changes)).status_code == 401
    assert len(silo.people) == count


def test_a_statement_is_good_once_and_for_a_minute(silo):
    headers = silo.statement()
    assert silo.search(headers).status_code == 200
    assert silo.search(headers).status_code == 409
    assert silo.search({**headers, **message_header()}).status_code == 401, "with a nonce of its own"
    old = f"{time.time() - 120:.3f} 0123456789ab"
    assert silo.search({**silo.statement(message=old), MESSAGE: old}).status_code == 409
    without = silo.statement()
    del without[MESSAGE]
    assert silo.search(without).status_code == 400


def test_an_opening_is_good_once_too(silo):
    """A GET, whose message is noted where it says who asks."""
    target, message = "/v1/documents/d1?ticket=x&person=y", message_header()[MESSAGE]
    statement = Statement(ADA, "north", f"GET {target}", message, digest_of(b""))
    headers = {
        MESSAGE: message,
        HEADER: statement.signed(token_signer(silo.token)),
        "authorization": f"Bearer {silo.token}",
    }
    statuses = [httpx.get(silo.local + target, headers=headers).status_code for _ in range(2)]
    assert statuses == [404, 409]
    assert silo.people[-1] == ADA


def test_whoever_speaks_for_people_cannot_leave_them_out(silo):
    reply = silo.search(message_header())
    assert reply.status_code == 428
    assert "who asks" in reply.json()["detail"]


def test_what_another_peer_says_of_people_is_not_believed(silo):
    for headers in (silo.statement(key="mute"), message_header()):
        assert silo.search(headers, peer="mute").status_code == 200
        assert silo.people[-1] is None


def test_an_api_key_signs_where_there_is_no_certificate(silo):
    assert silo.search(silo.statement(key=silo.token), peer=silo.token).status_code == 200
    assert silo.people[-1] == ADA
    assert silo.search(silo.statement(key="broker"), peer=silo.token).status_code == 401


@pytest.mark.parametrize("text", ["x", "e30.e30", "..", "ä.ö", "e30.", f"{'W1tb' * 2000}.e30"])
def test_what_is_no_statement_is_refused(text, silo):
    with pytest.raises(Refused):
        Statement.read(text, token="key")
    with pytest.raises(Refused):
        Statement.read(text, certificate=b"no certificate")


def test_a_signed_text_that_is_no_statement_is_refused():
    import base64
    import hashlib
    import hmac

    for payload in (b"[]", b"{}", b'{"person": "a", "groups": [], "silo": 1}', b"[" * 9000, b"\xff"):
        signature = hmac.new(b"key", b"isthmus person 1\0" + payload, hashlib.sha256).digest()
        text = ".".join(base64.urlsafe_b64encode(part).decode() for part in (payload, signature))
        with pytest.raises(Refused, match="cannot be read"):
            Statement.read(text, token="key")


def test_more_groups_than_fit_a_request_are_told():
    with pytest.raises(ConfigError, match="more than fit"):
        Person("ada", frozenset(f"group {at}" for at in range(1000))).check()
    for person in (Person(""), Person("a\nb"), Person("ada", frozenset({"x" * 201}))):
        with pytest.raises(ConfigError, match="needs a name"):
            person.check()


def test_nobody_can_be_named_without_something_to_sign_with(tmp_path):
    with pytest.raises(ValueError, match="anonymous can sign nothing"):
        NodeSettings("north", tmp_path, peers={"anonymous": SPEAKER})
    with pytest.raises(ValueError, match="people = true"):
        SiloAddress("http://127.0.0.1:1", identities=True)
    with pytest.raises(ConfigError, match="node_key"):
        Broker(BrokerSettings(silos={"north": SiloAddress("http://127.0.0.1:1", people=True)}))


class TestThroughABroker:
    @contextmanager
    def broker(self, silo, folder, **address):
        keys = ApiKeys(folder / "api-keys.json")
        scopes = ["search", "feedback", "documents"]
        token = keys.add("ada", scopes=scopes, groups=["doctors", "ward 3"])
        settings = BrokerSettings(
            folder=folder / "broker",
            keys=keys.path,
            tls=silo.peers["broker"],
            silos={"north": SiloAddress(silo.url, **address)},
            share_statistics=False,
            deadline_ms=10_000,
        )

        async def made():
            return Broker(settings)

        server = silo.loop.serve(broker_app(silo.loop.run(made())), lifespan="on")
        with Client(f"http://127.0.0.1:{server.port}", key=token, patience=0) as client:
            yield client, settings
        silo.loop.stop(server)

    def test_a_pseudonym_comes_with_every_search_opening_and_judgement(self, silo, tmp_path):
        with self.broker(silo, tmp_path, people=True) as (client, settings):
            hit = client.search("tide").hits[0]
            client.judge("tide", hit, relevant=True)
            assert client.open(hit).title == "tide"
            key = bytes.fromhex((settings.folder / "persons.key").read_text())
            assert silo.people[-3:] == [Person(pseudonym(key, "north", "ada"), ADA.groups)] * 3

    def test_their_own_id_where_the_broker_says_so(self, silo, tmp_path):
        with self.broker(silo, tmp_path, people=True, identities=True) as (client, _):
            assert client.search("tide").hits
            assert silo.people[-1] == ADA

    def test_nobody_is_named_to_a_silo_that_is_not_to_know(self, silo, tmp_path):
        with self.broker(silo, tmp_path) as (client, _):
            (status,) = client.search("tide").silos
            assert status.status == "refused"
            assert "people = true" in status.detail
