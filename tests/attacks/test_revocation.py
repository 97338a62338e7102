"""Certificates that are replaced, revoked or half written while silos and broker run."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import threading
import time

import httpx
import pytest
from cryptography import x509

from isthmus.cli import main
from isthmus.errors import DataError, SiloUnavailable
from isthmus.service import certificates
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.certificates import Authority, LiveTls, client_context, server_context, server_name
from isthmus.service.client import Client
from isthmus.service.http_client import HttpClient
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.security import ApiKeys
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    NodeSettings,
    Policy,
    RequestLimits,
    SiloAddress,
    Source,
)
from silo_stand_in import Loop

PATIENCE = 60.0
POLICY = Policy(search=True, snippets=True, feedback=True, people=True)


def until(what, message):
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, message
        time.sleep(0.05)


class Federation:
    """A node and a broker over TLS, in this process; the broker names people to the silo."""

    def __init__(self, folder):
        self.keys = folder / "keys"
        authority = Authority.at(self.keys)
        rows = folder / "corpus.csv"
        rows.write_text("id,title,text\nd1,tide,turbine\nd2,tide,mill\n")
        settings = NodeSettings(
            silo="north",
            folder=folder / "north",
            tls=authority.issue("north", clients=False),
            sources=(Source("table", rows),),
            peers={"broker": POLICY, "other": POLICY},
            encoder=EncoderSettings("none"),
        )
        authority.issue("other", clients=True)
        self.loop, self._opened = Loop(), Node(settings).offline()
        self.node = self._opened.__enter__()
        self.node.read_sources()
        self.node.index.catch_up()
        self.node._read.set()
        self.url = f"https://127.0.0.1:{self._serve(node_app(self.node), tls=settings.tls, mutual=True)}"
        api_keys = ApiKeys(folder / "api-keys.json")
        self.key = api_keys.add("ada", scopes=["search"])
        brokering = BrokerSettings(
            folder=folder / "broker",
            keys=api_keys.path,
            tls=authority.issue("broker", clients=True),
            silos={"north": SiloAddress(self.url, people=True)},
            deadline_ms=20_000,
            share_statistics=False,
            limits=RequestLimits(per_second=10_000, burst=10_000),
        )
        self.broker = self.loop.run(self._made(brokering))
        self.front = f"http://127.0.0.1:{self._serve(broker_app(self.broker), lifespan='on')}"

    async def _made(self, settings):
        return Broker(settings)

    def _serve(self, app, **options):
        return self.loop.serve(app, **options).port

    def search(self):
        with Client(self.front, key=self.key) as client:
            return client.search("tide")

    def client(self, party):
        context = client_context(certificates.files(self.keys / party))
        return httpx.Client(base_url=self.url, verify=context, timeout=20)

    def serial_served(self):
        """Of the certificate that a new connection is shown."""
        host, port = self.url.removeprefix("https://").split(":")
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        plain.check_hostname, plain.verify_mode = False, ssl.CERT_NONE
        files = certificates.files(self.keys / "broker")
        plain.load_cert_chain(files.certificate, files.key)
        with socket.create_connection((host, int(port)), 20) as raw, plain.wrap_socket(raw) as connection:
            return x509.load_der_x509_certificate(connection.getpeercert(True)).serial_number

    def close(self):
        self.loop.close()
        self._opened.__exit__(None, None, None)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(certificates, "LOOK", 0.1)
        running = Federation(tmp_path_factory.mktemp("federation"))
        yield running
        running.close()


def ask(client):
    return client.get("/v1/health", extensions={"sni_hostname": server_name("north")})


def test_certificates_are_renewed_while_searches_go_on(federation, capsys):
    """Of the silo and of the broker, which signs who asks with its key: no search fails, none is missed."""
    before, authority = federation.serial_served(), Authority.at(federation.keys)
    statuses, stopped = [], threading.Event()

    def searching():
        while not stopped.is_set():
            statuses.append([f"{each.status} {each.detail}".strip() for each in federation.search().silos])

    threads = [threading.Thread(target=searching) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for party in ("north", "broker", "north"):
            assert main(["keys", "renew", str(federation.keys), party, "--days", "14"]) == 0
            newest, count = authority.present("north").serial_number, len(statuses)
            until(lambda newest=newest: federation.serial_served() == newest, "the node has taken it up")
            held, key = federation.broker.silos["north"].http._tls, federation.keys / "broker" / "tls.key"
            until(lambda: held.current.key == key.read_bytes(), "so has the broker")  # noqa: B023
            until(lambda count=count: len(statuses) > count + 4, "searches go on")
    finally:
        stopped.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert federation.serial_served() != before
    assert statuses
    assert {status for each in statuses for status in each} == {"answered"}
    ends = authority.present("north").not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert datetime.timedelta(days=13) < ends < datetime.timedelta(days=14)
    assert "servers of these folders use them for new connections" in capsys.readouterr().err


def test_a_revoked_peer_is_refused_and_its_open_connections_are_closed(federation, capsys):
    """The others go on, and a certificate that is issued afterwards holds."""
    with federation.client("other") as open_before:
        assert ask(open_before).status_code == 200
        assert main(["keys", "revoke", str(federation.keys), "other", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert len(record["serials"]) == 1
        pool = open_before._transport._pool
        until(
            lambda: all(each.is_closed() or each.has_expired() for each in pool.connections), "it is closed"
        )
        with pytest.raises(httpx.TransportError):
            ask(open_before)
    with federation.client("other") as again, pytest.raises(httpx.TransportError):
        ask(again)
    assert [each.status for each in federation.search().silos] == ["answered"]
    assert main(["keys", "renew", str(federation.keys), "other"]) == 0
    with federation.client("other") as renewed:
        assert ask(renewed).status_code == 200
    # the newest is left alone, whatever came before it
    assert main(["keys", "revoke", str(federation.keys), "other", "--keep-newest", "--json"]) == 0
    time.sleep(2 * certificates.LOOK)
    with federation.client("other") as renewed:
        assert ask(renewed).status_code == 200


def test_a_broker_leaves_a_revoked_silo(federation):
    """Whoever has stolen a silo's key is not searched, over connections that are open neither."""
    authority = Authority.at(federation.keys)
    stolen = certificates.files(federation.keys / "north")
    copied = {path: path.read_bytes() for path in (stolen.certificate, stolen.key)}
    assert [each.status for each in federation.search().silos] == ["answered"]
    authority.renew("north")
    authority.revoke("north", keep_newest=True)
    for path, content in copied.items():  # the thief serves with what was stolen
        path.write_bytes(content)
    try:
        until(
            lambda: [each.status for each in federation.search().silos] != ["answered"], "it is not searched"
        )
        assert not federation.search().hits
    finally:
        authority.renew("north")
    until(lambda: [each.status for each in federation.search().silos] == ["answered"], "the silo is back")


def test_a_forged_or_vanished_list_leaves_the_one_before(tmp_path, caplog):
    authority = Authority.at(tmp_path / "keys")
    tls = authority.issue("north", clients=False)
    authority.issue("gone", clients=True)
    (serial,) = authority.revoke("gone")
    live = LiveTls(tls, lambda tls: server_context(tls, mutual=True))
    assert live.current.revoked == {serial}
    for content in (b"", b"-----BEGIN X509 CRL-----\nnonsense\n-----END X509 CRL-----\n", None):
        tls.revoked.unlink() if content is None else tls.revoked.write_bytes(content)
        live._looked = -certificates.LOOK
        assert live.current.revoked == {serial}
    assert "stays in use" in caplog.text
    tls.revoked.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="revoked"):
        LiveTls(tls, client_context)


@pytest.mark.parametrize("step", range(4))
def test_a_renewal_that_is_killed_leaves_a_pair_that_holds(tmp_path, monkeypatch, step):
    """Whatever was written last: what starts then has a certificate with its key, and can be renewed."""
    authority = Authority.at(tmp_path)
    tls = authority.issue("north", clients=False)
    count = 0

    class Killed(BaseException):
        pass

    def dying(write):
        def write_or_die(*arguments, **options):
            nonlocal count
            if arguments[0].parent == tls.key.parent:
                if count == step:
                    raise Killed
                count += 1
            return write(*arguments, **options)

        return write_or_die

    with monkeypatch.context() as patched:
        for name in ("write_private", "write_whole"):
            patched.setattr(certificates, name, dying(getattr(certificates, name)))
        with pytest.raises(Killed):
            authority.renew("north")
    live = LiveTls(tls, client_context)
    certificate = authority.present("north")
    assert certificates._is_of(tls.certificate, certificates.signing_key(tls))
    authority.renew("north")
    assert authority.present("north").serial_number != certificate.serial_number
    live._looked = -certificates.LOOK
    assert live.current.key == tls.key.read_bytes()
    assert not tls.former_key.exists()


def test_a_certificate_that_an_interrupted_renewal_issued_can_be_revoked(tmp_path, monkeypatch):
    authority = Authority.at(tmp_path)
    authority.issue("north", clients=False)
    with monkeypatch.context() as patched:
        patched.setattr(authority, "_written", lambda *parts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            authority.renew("north")
    assert len(authority.revoke("north")) == 2
    assert authority.revoke("north") == []


def test_a_request_goes_over_a_connection_of_the_certificate_it_was_signed_with(federation):
    """Whether that is still the newest: else a silo could not check who asks."""
    tls = certificates.files(federation.keys / "broker")
    http = HttpClient(federation.url, tls=LiveTls(tls, client_context), name=server_name("north"))
    stranger = LiveTls(certificates.files(federation.keys / "north"), client_context).current

    async def both():
        first = await http.ask("GET", "/v1/health")
        idle = http._idle[-1]
        second = await http.ask("GET", "/v1/health", over=http.credentials)
        assert http._idle[-1] is idle
        with pytest.raises(SiloUnavailable):  # a silo's certificate is not for calling
            await http.ask("GET", "/v1/health", over=stranger)
        http.close()
        return first.status, second.status

    assert federation.loop.run(both()) == (200, 200)
