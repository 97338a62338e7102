"""Certificates, API keys and replays: what opens the door, and what does not."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
import stat
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from isthmus.errors import ConfigError, DataError, Refused
from isthmus.files import private_file
from isthmus.service import certificates, connections, security
from isthmus.service.certificates import Authority
from isthmus.service.security import ApiKeys, Caller, Gate, Once
from isthmus.service.settings import SCOPES, RequestLimits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("keys")
    authority = Authority.at(root)
    authority.issue("north", clients=False)
    authority.issue("south", clients=False)
    authority.issue("broker", clients=True)
    authority.issue("stranger", clients=True)
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=30)
    authority.issue("expired", clients=True, start=past, days=7)
    Authority.at(root / "elsewhere").issue("broker", clients=True)
    return root


async def who(scope, receive, send):
    """An app that tells who called."""
    if scope["type"] != "http":
        return
    try:
        told, status = GATE.caller(scope).name, 200
    except Refused as error:
        told, status = str(error), 403
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": told.encode()})


GATE = Gate(peers={"broker": "policy"})


@contextmanager
def running(app, **options):
    """The app on a loopback port of its own."""
    server = connections.server(app, port=0, **options)
    server.config.lifespan = "off"
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until = time.monotonic() + 60
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)


def ask(port, context, party="north"):
    with httpx.Client(verify=context) as client:
        names = {"sni_hostname": certificates.server_name(party)}
        return client.get(f"https://127.0.0.1:{port}/", extensions=names)


def context_of(folder, party):
    return certificates.client_context(certificates.files(folder / party))


@pytest.fixture(scope="module")
def node(folder):
    with running(who, tls=certificates.files(folder / "north"), mutual=True) as port:
        yield port


def test_the_certificate_reaches_the_app(folder, node):
    for _ in range(2):
        answer = ask(node, context_of(folder, "broker"))
        assert (answer.status_code, answer.text) == (200, "broker")


def test_a_broker_that_the_node_does_not_know_is_refused(folder, node):
    answer = ask(node, context_of(folder, "stranger"))
    assert answer.status_code == 403


@pytest.mark.parametrize("party", ["expired", "elsewhere/broker", "south", None])
def test_tls_refuses_what_is_not_a_brokers_certificate(folder, node, party):
    """Expired, of another authority, a silo's own, or none at all."""
    if party is None:
        context = ssl.create_default_context(cafile=folder / "north" / "ca.crt")
    else:
        context = context_of(folder, party)
        context.load_verify_locations(folder / "north" / "ca.crt")
    with pytest.raises(httpx.TransportError):
        ask(node, context)


def test_a_silo_that_poses_as_another_is_noticed(folder, node):
    with pytest.raises(httpx.ConnectError, match=r"(?i)hostname|certificate"):
        ask(node, context_of(folder, "broker"), party="south")


def test_an_expired_server_is_refused(folder):
    tls = certificates.files(folder / "expired")
    with running(who, tls=tls) as port, pytest.raises(httpx.ConnectError, match="expired"):
        ask(port, context_of(folder, "broker"), party="expired")


def test_a_certificate_that_ends_while_connected_is_refused():
    peer = security.Peer("broker", expires=100.0)
    scope = {"type": "http", "headers": [], "extensions": {security.PEER: peer}}
    assert Gate(peers={"broker": 1}, clock=lambda: 99.0).caller(scope).policy == 1
    with pytest.raises(Refused, match="expired"):
        Gate(peers={"broker": 1}, clock=lambda: 100.0).caller(scope)


class Watched(connections.Visitor):
    """A connection that counts how often a server looks at any of them."""

    looks = 0

    def __getattribute__(self, name):
        Watched.looks += 1
        return super().__getattribute__(name)


def test_a_newcomer_costs_as_much_however_many_are_connected():
    limits = RequestLimits(connections=4_000, connections_per_address=4)
    door, costs = connections.Door(limits), []
    for number in range(4_004):
        before = Watched.looks
        assert door.enter(Watched(f"10.0.{number // 2}", float(number), lambda: None))
        costs.append(Watched.looks - before)
    for number in range(20):
        before = Watched.looks
        assert door.enter(Watched("one", float(number), lambda: None))
        costs.append(Watched.looks - before)
    assert max(costs) < 30


def test_a_full_address_and_a_full_door_close_who_waited_longest():
    door, closed = connections.Door(RequestLimits(connections=4, connections_per_address=2)), []

    def visitor(name, address, **state):
        return connections.Visitor(address, 0.0, lambda: closed.append(name), **state)

    first, second = visitor("first", "a"), visitor("second", "a")
    assert all(door.enter(each) for each in (first, second, visitor("third", "b")))
    door.answered(first)
    assert door.enter(visitor("fourth", "a"))
    assert closed == ["second"], "of the same address, the one that was not answered last"
    assert door.enter(visitor("fifth", "c", known=True, busy=True))
    assert door.enter(visitor("sixth", "d"))
    assert closed == ["second", "third"]
    for _ in range(2):
        door.left(first)
    assert door.enter(visitor("seventh", "e", known=True, busy=True))
    assert closed == ["second", "third"], "there was room"
    busy = connections.Door(RequestLimits(connections=4, connections_per_address=1))
    assert busy.enter(visitor("own", "a", known=True, busy=True))
    assert not busy.enter(visitor("other", "a"))
    assert busy.enter(visitor("elsewhere", "b"))


def test_keys_are_for_their_owner_only(folder, tmp_path):
    key = folder / "north" / "tls.key"
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder / "authority" / "ca.key").st_mode) == 0o600
    copied = tmp_path / "tls.key"
    copied.write_bytes(key.read_bytes())
    copied.chmod(0o644)
    with pytest.raises(DataError, match="chmod 600"):
        private_file(copied)


@pytest.mark.parametrize("name", ["", "../north", "a/b", "-a", "a b", "ä", "a" * 41, "a\n"])
def test_a_party_has_a_plain_name(tmp_path, name):
    with pytest.raises(ConfigError, match="name"):
        Authority.at(tmp_path).issue(name, clients=False)
    assert not (tmp_path.parent / "north").exists()


def test_the_authority_is_made_once(tmp_path):
    first = Authority.at(tmp_path).certificate
    assert Authority.at(tmp_path).certificate == first


def scope_with(*headers):
    return {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers]}


class TestApiKeys:
    def test_only_a_hash_is_stored(self, tmp_path):
        keys = ApiKeys(tmp_path / "keys.json")
        token = keys.add("ada", scopes=["search"])
        stored = (tmp_path / "keys.json").read_text()
        assert token.split("_", 2)[2] not in stored
        assert stat.S_IMODE(os.stat(tmp_path / "keys.json").st_mode) == 0o600
        assert keys.find(token) == Caller("ada", frozenset({"search"}))

    @pytest.mark.parametrize("change", ["last", "number", "prefix", "empty", "cut", "letters"])
    def test_a_wrong_key_opens_nothing(self, tmp_path, change):
        keys = ApiKeys(tmp_path / "keys.json")
        token = keys.add("ada", scopes=["search"])
        other = keys.add("bob", scopes=["admin"])
        prefix, number, secret = token.split("_", 2)
        wrong = {
            "last": token[:-1] + ("A" if token[-1] != "A" else "B"),
            "number": f"{prefix}_{other.split('_')[1]}_{secret}",
            "prefix": f"x_{number}_{secret}",
            "empty": "",
            "cut": f"{prefix}_{number}_",
            "letters": f"{prefix}_{number}_ä",
        }[change]
        assert keys.find(wrong) is None

    def test_expiry_and_revocation_hold_at_once(self, tmp_path):
        now = [1000.0]
        keys = ApiKeys(tmp_path / "keys.json", clock=lambda: now[0])
        brief, lasting = (keys.add("ada", scopes=["search"], days=days) for days in (1, None))
        now[0] += 86_399
        assert keys.find(brief)
        now[0] += 1
        assert keys.find(brief) is None
        assert keys.find(lasting)
        ApiKeys(tmp_path / "keys.json").revoke(lasting.split("_")[1])  # in another process
        assert keys.find(lasting) is None

    def test_what_cannot_be_a_key_is_told(self, tmp_path):
        keys = ApiKeys(tmp_path / "keys.json")
        with pytest.raises(ConfigError, match="search"):
            keys.add("ada", scopes=["serach"])
        with pytest.raises(ConfigError, match="scope"):
            keys.add("ada", scopes=[])
        with pytest.raises(ConfigError, match="no API key"):
            keys.revoke("00")
        (tmp_path / "keys.json").write_text("{}")
        (tmp_path / "keys.json").chmod(0o600)
        with pytest.raises(DataError, match="not a file of API keys"):
            keys.all()

    def test_a_file_that_others_can_read_is_refused(self, tmp_path):
        keys = ApiKeys(tmp_path / "keys.json")
        token = keys.add("ada", scopes=["search"])
        (tmp_path / "keys.json").chmod(0o640)
        with pytest.raises(DataError, match="chmod 600"):
            ApiKeys(tmp_path / "keys.json").find(token)


class TestGate:
    def test_every_way_to_carry_a_key(self, tmp_path):
        keys = ApiKeys(tmp_path / "keys.json")
        token = keys.add("ada", scopes=["search"])
        gate = Gate(keys=keys)
        for header in (
            ("authorization", f"Bearer {token}"),
            ("x-api-key", token),
        ):
            caller = gate.caller(scope_with(header))
            assert caller.name == "ada"
            assert caller.may("search")
            assert not caller.may("feedback")

    @pytest.mark.parametrize("header", [("authorization", "Basic YTpi"), ("x-api-key", "isk_0_0"), None])
    def test_a_wrong_key_is_not_a_stranger(self, tmp_path, header):
        gate = Gate(keys=ApiKeys(tmp_path / "keys.json"), strangers=["search"])
        if header is None:
            assert gate.caller(scope_with()).name == "anonymous"
        else:
            with pytest.raises(Refused, match="unknown, revoked or expired"):
                gate.caller(scope_with(header))

    def test_without_strangers_a_key_is_needed(self):
        with pytest.raises(Refused, match="API key"):
            Gate().caller(scope_with())

    def test_an_administrator_may_do_all(self):
        administrator = Caller("ada", frozenset({"admin"}))
        assert [scope for scope in SCOPES if not administrator.may(scope)] == ["audit"]


class TestOnce:
    def test_a_replay_is_refused(self):
        once = Once()
        once.admit("broker", "a", time.time())
        once.admit("other", "a", time.time())
        with pytest.raises(Refused, match="before"):
            once.admit("broker", "a", time.time())

    @pytest.mark.parametrize("sent", [-61.0, 61.0, float("nan"), float("inf")])
    def test_too_old_or_too_new(self, sent):
        with pytest.raises(Refused, match="clocks"):
            Once(clock=lambda: 0.0).admit("broker", "a", sent)

    def test_a_restart_forgets_no_message(self):
        """What the process before this one may have seen is not accepted, however fresh it is."""
        now = [100.0]
        Once(clock=lambda: now[0]).admit("broker", "a", 100.0)
        now[0] = 105.0
        again = Once(clock=lambda: now[0])
        with pytest.raises(Refused, match="started"):
            again.admit("broker", "a", 100.0)
        again.admit("broker", "b", 104.9)

    def test_memory_is_bounded_and_forgets_nothing_too_early(self):
        now = [0.0]
        once = Once(window=10, clock=lambda: now[0])
        for second in range(200):
            now[0] = float(second)
            once.admit("broker", str(second), now[0])
            if second > 8:
                with pytest.raises(Refused):
                    once.admit("broker", str(second - 8), now[0] - 8)
        assert len(once._new) + len(once._old) <= 50
