"""Keys and sessions: what a stolen cookie, a forgotten key, a guess or a careless setting opens."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from isthmus.cli import main
from isthmus.service import sessions as rooms
from isthmus.service.audit_log import AuditKey, audit_lines
from isthmus.service.limits import Protect, message_header
from isthmus.service.node_api import hosts_of
from isthmus.service.security import ApiKeys, Gate
from isthmus.service.sessions import COOKIE, FORMER_COOKIE, SECURE_COOKIE, Sessions
from isthmus.service.settings import NodeSettings, RequestLimits, SiloAddress, Tls, read_broker

from .test_front import front

BODY = {"query": "tides"}


@pytest.fixture
def site(tmp_path):
    with front(tmp_path) as made:
        yield made


def signed_in(site, **headers):
    page = httpx.Client(base_url=site.url, timeout=15)
    opened = page.post("/v1/session", json={"key": site.token}, headers=headers)
    assert opened.status_code == 204
    return page, opened.headers["set-cookie"]


class TestKeysOfOthers:
    def test_administrators_see_no_secret_make_no_key_and_revoke_no_auditors(self, site):
        keys = ApiKeys(site.settings.keys)
        number = {}
        for name, scope in (("root", "admin"), ("eve", "audit"), ("ben", "search")):
            token = keys.add(name, scopes=[scope], groups=["ward"])
            number[name] = token.split("_")[1]
            site.headers = {"x-api-key": token} if name == "root" else site.headers
        reader = {"x-api-key": site.token}
        url = f"{site.url}/v1/keys"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers=reader).status_code == 403
        assert httpx.delete(f"{url}/{number['ben']}", headers=reader).status_code == 403
        listed = httpx.get(url, headers=site.headers)
        assert {each["name"] for each in listed.json()["keys"]} >= {"root", "eve", "ben"}
        assert not any(part in listed.text for key in keys.all() for part in (key.digest, key.salt))
        assert httpx.post(url, headers=site.headers, json={"name": "ben"}).status_code == 405
        revoked = {
            name: httpx.delete(f"{url}/{each}", headers=site.headers).status_code
            for name, each in number.items()
        }
        assert revoked == {"root": 403, "eve": 403, "ben": 204}
        assert httpx.delete(f"{url}/{number['ben']}", headers=site.headers).status_code == 404
        assert {key.name for key in keys.all()} >= {"root", "eve"}
        assert "ben" not in {key.name for key in keys.all()}

    def test_the_audit_log_says_whose_key_and_whose_sessions_an_administrator_ended(self, site):
        keys = ApiKeys(site.settings.keys)
        root = {"x-api-key": keys.add("ruth", scopes=["admin"])}
        numbers = [keys.add(name, scopes=["search"]).split("_")[1] for name in ("cleo", "dan")]
        for number in numbers:
            assert httpx.delete(f"{site.url}/v1/keys/{number}", headers=root).status_code == 204
        ended = httpx.delete(f"{site.url}/v1/sessions", params={"person": "cleo"}, headers=root)
        assert ended.status_code == 200
        lines = [line.content for line in audit_lines(site.settings.folder)]
        acts = [line["what"] for line in lines if line["action"] == "administration"]
        owner = AuditKey(site.settings.folder, site.settings.audit).pseudonym("", "cleo")
        wanted = [f"DELETE /v1/keys/{{id}} {number}" for number in numbers]
        assert acts[-3:] == [*wanted, f"DELETE /v1/sessions {owner}"]
        assert "cleo" not in json.dumps(acts)

    def test_two_administrators_who_revoke_one_key_at_once(self, site, monkeypatch):
        keys, revoke = ApiKeys(site.settings.keys), ApiKeys.revoke
        root = {"x-api-key": keys.add("rita", scopes=["admin"])}
        number = keys.add("eli", scopes=["search"]).split("_")[1]
        monkeypatch.setattr(ApiKeys, "revoke", lambda self, id: (revoke(self, id), revoke(self, id)))
        assert httpx.delete(f"{site.url}/v1/keys/{number}", headers=root).status_code == 204


class TestCookie:
    def test_the_cookie_is_not_the_key(self, site):
        page, cookie = signed_in(site)
        secret = site.token.split("_", 2)[2]
        assert secret not in cookie
        assert secret not in repr(dict(page.cookies))
        assert page.post("/v1/search", json=BODY).status_code == 200
        stolen = page.cookies[COOKIE]
        for header in ({"authorization": f"Bearer {stolen}"}, {"x-api-key": stolen}):
            assert httpx.post(f"{site.url}/v1/search", json=BODY, headers=header).status_code == 401

    def test_over_tls_no_other_host_can_set_it(self, site):
        """Also where a proxy speaks TLS: the browser says so itself."""
        _, cookie = signed_in(site, origin="https://search.example")
        parts = {part.strip().lower() for part in cookie.split(";")}
        assert cookie.startswith(f"{SECURE_COOKIE}=")
        assert {"secure", "httponly", "samesite=strict", "path=/"} <= parts
        assert not any(part.startswith("domain") for part in parts)
        headers = [(b"cookie", f"{COOKIE}=set-by-a-neighbour".encode())]
        assert rooms.session_in({"scheme": "https", "headers": headers}) is None
        assert rooms.session_in({"scheme": "http", "headers": headers}) == "set-by-a-neighbour"
        behind = [*headers, (b"origin", b"https://search.example")]
        assert rooms.session_in({"scheme": "http", "headers": behind}) is None

    def test_signing_out_ends_the_session_itself(self, site):
        page, _ = signed_in(site)
        stolen = {"cookie": f"{COOKIE}={page.cookies[COOKIE]}"}
        assert httpx.get(f"{site.url}/v1/me", headers=stolen).status_code == 200
        assert page.delete("/v1/session").status_code == 204
        assert httpx.get(f"{site.url}/v1/me", headers=stolen).status_code == 401

    def test_a_revoked_key_ends_its_sessions(self, site):
        page, _ = signed_in(site)
        ApiKeys(site.settings.keys).revoke(site.token.split("_")[1])
        reply = page.post("/v1/search", json=BODY)
        assert reply.status_code == 401
        assert "sign in again" in reply.json()["detail"]

    def test_a_cookie_of_before_signs_nobody_in_and_is_removed(self, site):
        page = httpx.Client(base_url=site.url, cookies={FORMER_COOKIE: site.token})
        assert page.get("/v1/me").status_code == 401
        cookies = page.post("/v1/session", json={"key": site.token}).headers.get_list("set-cookie")
        assert any(each.startswith(f'{FORMER_COOKIE}=""') and "Max-Age=0" in each for each in cookies)

    def test_many_stale_cookies_of_an_office_are_no_guesses(self, site):
        for number in range(40):
            cookies = {COOKIE: f"ended-{number}"}
            assert httpx.get(f"{site.url}/v1/me", cookies=cookies).status_code == 401


class TestSessions:
    @pytest.fixture
    def opened(self, tmp_path):
        now = [1_000_000.0]
        keys = ApiKeys(tmp_path / "keys.json", clock=lambda: now[0])
        token = keys.add("ada", scopes=["search"], days=3)
        return now, keys, token, Sessions(keys, clock=lambda: now[0])

    def test_a_session_ends_unused_and_at_last(self, opened):
        now, keys, _, sessions = opened
        lasting = keys.add("ada", scopes=["search"], days=30)
        idle, used = sessions.open(lasting), sessions.open(lasting)
        for _ in range(15):
            now[0] += rooms.IDLE - 1
            if now[0] <= 1_000_000 + rooms.LONGEST:
                assert sessions.caller(used).name == "ada"
        assert sessions.caller(used) is None
        assert sessions.caller(idle) is None
        assert len(sessions) == 0

    def test_a_session_ends_with_its_key(self, opened):
        now, _, token, sessions = opened
        number = sessions.open(token)
        for _ in range(7):
            now[0] += rooms.IDLE - 1
        assert sessions.caller(number) is None

    def test_ids_are_stored_hashed_and_their_number_is_bounded(self, opened, monkeypatch):
        _, keys, token, sessions = opened
        numbers = [sessions.open(token) for _ in range(rooms.EACH + 5)]
        assert len(set(numbers)) == len(numbers)
        assert len(sessions) == rooms.EACH
        assert sessions.caller(numbers[0]) is None
        assert sessions.caller(numbers[-1]).name == "ada"
        assert numbers[-1] not in repr(sessions.__dict__)
        monkeypatch.setattr(rooms, "MOST", 30)
        for number in range(50):
            sessions.open(keys.add(f"person {number}", scopes=["search"]))
        assert len(sessions) <= 30

    def test_nobody_without_a_key_opens_one(self, opened):
        _, _, token, sessions = opened
        assert sessions.open(token[:-1] + ("A" if token[-1] != "A" else "B")) is None


def test_guessing_keys_at_the_sign_in_is_slowed_down(site):
    statuses = [
        httpx.post(f"{site.url}/v1/session", json={"key": f"isk_{number}_x"}).status_code
        for number in range(30)
    ]
    assert statuses[0] == 401
    assert statuses[-1] == 429
    assert httpx.post(f"{site.url}/v1/session", json={"key": site.token}).status_code == 204


@pytest.mark.parametrize("kind", ["application/problem+json", "application/x+JSON", "application/json"])
def test_every_kind_of_json_is_too_deep(site, kind):
    headers = {"content-type": kind, "x-api-key": site.token}
    reply = httpx.post(f"{site.url}/v1/search", content=b"[" * 5_000 + b"]" * 5_000, headers=headers)
    assert reply.status_code == 400
    assert "nests deeper" in reply.json()["detail"]


def test_strangers_learn_neither_silos_nor_their_addresses(site):
    known = httpx.get(f"{site.url}/v1/ready", headers={"x-api-key": site.token}).json()
    assert "documents" in known
    httpx.post(f"{site.url}/v1/search", json=BODY, headers={"x-api-key": site.token})
    stranger = httpx.get(f"{site.url}/v1/ready")
    assert stranger.status_code == 200
    names = ("detail", "statistics", "encoder", "encoder_name", "model", "engine", "level")
    counts = ("documents", "indexed", "search_level", "unread")
    nothing = {**dict.fromkeys(counts, 0), **dict.fromkeys(names, ""), "machine": None}
    assert stranger.json() == {"ready": True, **nothing}
    admin = site.keys.add("root", scopes=["admin"])
    views = [
        httpx.get(f"{site.url}/v1/silos", headers={"x-api-key": key}).json() for key in (site.token, admin)
    ]
    assert [view["machine"] is None for view in views] == [True, False]  # the broker's version, disk, clock
    assert views[0]["silos"][0]["skew"] is None
    urls = {
        name: httpx.get(f"{site.url}/v1/silos", headers={"x-api-key": key}).json()["silos"][0]["url"]
        for name, key in (("ada", site.token), ("root", admin))
    }
    assert urls["ada"] == ""
    assert urls["root"].startswith("http://127.0.0.1:")


class TestKeysEnd:
    def test_unless_somebody_says_otherwise(self, tmp_path, capsys):
        file = str(tmp_path / "keys.json")
        assert main(["keys", "api", "add", file, "ada"]) == 0
        assert "90 days" in capsys.readouterr().err
        assert main(["keys", "api", "add", file, "cron", "--forever"]) == 0
        assert main(["keys", "api", "add", file, "eve", "--days", "0"]) == 1
        assert "--forever" in capsys.readouterr().err
        ends = {key.name: key.expires for key in ApiKeys(file).all()}
        assert ends.keys() == {"ada", "cron"}
        assert ends["cron"] is None
        assert ends["ada"] == pytest.approx(time.time() + 90 * 86400, abs=60)

    def test_people_are_warned_before(self, site, capsys):
        brief = site.keys.add("bob", scopes=["search"], days=5)
        replies = {
            key: httpx.post(f"{site.url}/v1/search", json=BODY, headers={"x-api-key": key})
            for key in (brief, site.token)
        }
        assert replies[brief].headers["isthmus-key-expires"].endswith("Z")
        assert "isthmus-key-expires" not in replies[site.token].headers
        assert httpx.get(f"{site.url}/v1/me", headers={"x-api-key": brief}).json()["expires"]
        file = site.settings.folder / "bob.key"
        file.write_text(brief)
        file.chmod(0o600)
        assert main(["search", "tides", "--broker", site.url, "--key", str(file)]) == 0
        assert "ends on" in capsys.readouterr().err
        assert main(["keys", "api", "list", str(site.settings.keys)]) == 0
        assert "of bob ends soon" in capsys.readouterr().err

    def test_the_administrators_key_too(self, tmp_path):
        assert main(["keys", "make", str(tmp_path), "--broker", "--days", "30"]) == 0
        (admin,) = ApiKeys(tmp_path / "broker" / "api-keys.json").all()
        assert admin.expires == pytest.approx(time.time() + 30 * 86400, abs=60)


def test_keys_added_at_once_are_all_there(tmp_path, soak_count):
    """By threads of one process and by processes."""
    file, count = tmp_path / "new" / "keys.json", soak_count(40, 400)
    with ThreadPoolExecutor(8) as people:
        tokens = list(people.map(lambda n: ApiKeys(file).add(f"ada {n}", scopes=["search"]), range(count)))
    assert all(ApiKeys(file).find(token) for token in tokens)
    script = (
        "import sys; from isthmus.service.security import ApiKeys;"
        " [ApiKeys(sys.argv[1]).add(sys.argv[2], scopes=['search']) for _ in range(10)]"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(file), f"p{n}"]) for n in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert len(ApiKeys(file).all()) == count + 40


def test_secrets_are_written_for_their_owner_alone(tmp_path):
    before = os.umask(0o000)
    try:
        assert main(["new", str(tmp_path / "fed"), "--silos", "north"]) == 0
        ApiKeys(tmp_path / "elsewhere" / "keys.json").add("ada", scopes=["search"])
    finally:
        os.umask(before)
    private = [tmp_path / "elsewhere" / "keys.json", tmp_path / "elsewhere"]
    fed = tmp_path / "fed"
    private += [
        fed / "broker.toml",
        fed / "broker",
        fed / "authority",
        fed / "north",
        fed / "north" / "silo.toml",
    ]
    private += [*fed.rglob("*.key"), *fed.rglob("*api-keys.json*")]
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


class TestNodes:
    def test_a_node_on_loopback_goes_by_its_own_names_only(self, tmp_path):
        settings = NodeSettings("north", tmp_path, hosts=("north.example",))
        assert {"localhost", "127.0.0.1", "north.example"} <= hosts_of(settings)
        assert "evil.example" not in hosts_of(settings)
        assert hosts_of(NodeSettings("north", tmp_path)) is not None
        assert hosts_of(NodeSettings("north", tmp_path, tls=Tls(tmp_path, tmp_path, tmp_path))) is None

    def test_a_page_that_rebinds_its_name_reaches_no_node(self, tmp_path):
        from isthmus.service.node import Node
        from isthmus.service.node_api import node_app
        from isthmus.service.settings import Policy
        from silo_stand_in import Loop

        settings = NodeSettings("north", tmp_path / "north", peers={"anonymous": Policy(search=True)})
        loop = Loop()
        try:
            with Node(settings) as node:
                url = f"http://127.0.0.1:{loop.serve(node_app(node)).port}/v1/search"
                for host, status in (("evil.example", 421), ("127.0.0.1", 200)):
                    headers = {"host": host, **message_header()}
                    assert httpx.post(url, json=BODY, headers=headers, timeout=15).status_code == status
        finally:
            loop.close()

    @pytest.mark.parametrize("url", ["http://10.0.0.5:8101", "http://north.example", "http://[fe80::1]:8101"])
    def test_a_silo_elsewhere_is_not_asked_in_the_clear(self, tmp_path, url):
        with pytest.raises(ValueError, match="unencrypted = true"):
            SiloAddress(url)
        assert SiloAddress(url, unencrypted=True).url == url
        file = tmp_path / "broker.toml"
        file.write_text(f'[silos.north]\nurl = "{url}"\n')
        with pytest.raises(Exception, match="in the clear"):
            read_broker(file)

    @pytest.mark.parametrize(
        "url", ["http://127.0.0.9:1", "http://localhost:1", "http://[::1]:1", "https://x"]
    )
    def test_one_on_this_machine_may_be(self, url):
        assert SiloAddress(url).url == url


def test_no_credentials_are_no_wrong_key(tmp_path):
    """People of an office who have yet to sign in do not use up its wrong keys."""
    import asyncio

    async def app(scope, receive, send):
        raise AssertionError

    guarded = Protect(app, gate=Gate(keys=ApiKeys(tmp_path / "keys.json")), limits=RequestLimits(burst=100))

    async def statuses():
        transport = httpx.ASGITransport(guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return {(await client.get("/v1/me")).status_code for _ in range(40)}

    assert asyncio.run(statuses()) == {401}
