"""People sign in at a certified provider, in a real browser, to search a silo that learns who they are."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager

import pytest

from browsing import opened
from isthmus.cli import main
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.limits import Protect
from isthmus.service.node import Node
from isthmus.service.node_api import NodeApi, node_app
from isthmus.service.security import ApiKeys
from isthmus.service.settings import EncoderSettings, NodeSettings, Policy, Source, read_broker
from loopback_ports import free_base
from oidc_provider import running
from silo_stand_in import Loop

PATIENCE = 60.0
expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=1000 * PATIENCE)
SECRET = "hush, it is a secret"
PEOPLE = {
    "ada": {"name": "Ada Lovelace", "groups": ["doctors", "ward-3"]},
    "eve": {"name": "Eve", "groups": ["canteen"]},
}
BROKER = """
port = {port}
folder = "broker"
keys = "api-keys.json"
node_key = "{key}"
share_statistics = false
deadline_ms = 10000

[silos.north]
url = "{silo}"
people = true
identities = true

[oidc]
issuer = "{issuer}"
client_id = "isthmus"
client_secret_file = "oidc.secret"
address = "http://127.0.0.1:{port}"
silo_groups = ["ward-3"]

[oidc.groups]
doctors = ["search", "feedback"]
"""


CORPUS = """id,title,text,allow
d1,Tidal power,a turbine in the tide,
d2,Ward notes,the tide of patients in ward three,group:ward-3
d3,Board minutes,the tide turns,group:board
"""


class Hospital:
    """A silo, the broker whose settings name the provider, and what the silo heard of who asks."""

    def __init__(self, folder, port, issuer):
        self.folder, self.url, self.issuer, self.loop = folder, f"http://127.0.0.1:{port}", issuer, Loop()
        (folder / "corpus.csv").write_text(CORPUS)
        keys = ApiKeys(folder / "north-keys.json")
        policy = Policy(search=True, snippets=True, feedback=True, people=True)
        silo = NodeSettings(
            silo="north",
            folder=folder / "north",
            keys=keys.path,
            sources=(Source("table", folder / "corpus.csv"),),
            peers={"broker": policy},
            encoder=EncoderSettings("none"),
        )
        self.stack = ExitStack()
        node = self.stack.enter_context(Node(silo).offline())
        node.read_sources()
        node.index.catch_up()
        node._read.set()
        address = f"http://127.0.0.1:{self.loop.serve(node_app(node)).port}"
        (folder / "oidc.secret").write_text(SECRET)
        (folder / "oidc.secret").chmod(0o600)
        file = folder / "broker.toml"
        key = keys.add("broker", scopes=["search"])
        file.write_text(BROKER.format(port=port, key=key, silo=address, issuer=issuer))
        self.admin = ApiKeys(folder / "api-keys.json").add("root", scopes=["admin"])
        self.settings = read_broker(file)
        self.app = self.loop.run(self._made())
        assert isinstance(self.app, Protect)
        self.loop.serve(self.app, port=port, lifespan="on")

    async def _made(self):
        return broker_app(Broker(self.settings))

    def pass_time(self, minutes):
        """For sessions, and for the client of the provider."""
        sessions = self.app.gate.sessions
        sessions._clock = sessions.provider._clock = lambda: time.time() + 60 * minutes

    def change(self, name, **facts):
        people = {**PEOPLE, name: {**PEOPLE[name], **facts}} if facts else {**PEOPLE}
        if not facts:
            del people[name]
        (self.folder / "people.json").write_text(json.dumps(people))

    def close(self):
        self.loop.close()
        self.stack.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("hospital"), free_base(1)
    callback = f"http://127.0.0.1:{port}/v1/signin/callback"
    with running(folder, PEOPLE, redirect=callback, secret=SECRET) as issuer:
        made = Hospital(folder, port, issuer)
        yield made
        made.close()


@pytest.fixture
def hospital(shared, monkeypatch):
    """It, with the people it began with; and what its silo hears."""
    shared.people = []
    inner = NodeApi._person

    def noting(api, request):
        shared.people.append(inner(api, request))
        return shared.people[-1]

    monkeypatch.setattr(NodeApi, "_person", noting)
    (shared.folder / "people.json").write_text(json.dumps(PEOPLE))
    shared.pass_time(0)
    return shared


@contextmanager
def page_of(browser, hospital, place=""):
    others = (hospital.issuer, "https://fonts.googleapis.com/")  # the provider's page asks for letters there
    with opened(browser, f"{hospital.url}/{place}", patience=PATIENCE, others=others) as page:
        page.route("https://**/*", lambda route: route.abort())
        yield page


def at_the_provider(page, name):
    """From the broker's page to the provider's, through its two questions."""
    page.get_by_role("link", name="Sign in at localhost").click()
    page.locator("input[name=login]").fill(name)
    page.locator("input[name=password]").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()


def test_from_the_page_to_the_silo_and_out_again(browser, hospital):
    """They come back to where they were, by name; the silo shows them what they may see; out is out."""
    with page_of(browser, hospital, "#/search?q=tide") as page:
        at_the_provider(page, "ada")
        expect(page.get_by_text("Tidal power")).to_be_visible()
        expect(page.get_by_text("Ward notes")).to_be_visible()
        assert page.get_by_text("Board minutes").count() == 0
        expect(page.locator("#who")).to_have_text("Ada Lovelace")
        assert page.url == f"{hospital.url}/#/search?q=tide"
        assert {(each.id, each.groups) for each in hospital.people} == {
            ("ada", frozenset({"doctors", "ward-3"}))
        }
        (cookie,) = [each for each in page.context.cookies() if each["name"] == "isthmus_session"]
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("link", name="Sign in at localhost")).to_be_visible()
        expect(page.locator("#who")).to_be_hidden()
        page.get_by_role("link", name="Sign out at localhost too").click()
        page.get_by_role("button", name="Yes, sign me out").click()
        page.goto(hospital.url)
        page.get_by_role("link", name="Sign in at localhost").click()
        expect(page.locator("input[name=login]")).to_be_visible()


def test_the_wrong_group_is_told_so(browser, hospital):
    with page_of(browser, hospital) as page:
        at_the_provider(page, "eve")
        expect(page.get_by_role("alert")).to_contain_text("none of your groups may search here")
        expect(page.locator("#who")).to_be_hidden()
        page.get_by_text("With an API key").click()
        page.get_by_label("API key").fill(hospital.admin)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator("#who")).to_have_text("root")
        assert "signin=" not in page.url


def test_who_says_no_at_the_provider_is_not_in(browser, hospital):
    with page_of(browser, hospital) as page:
        page.get_by_role("link", name="Sign in at localhost").click()
        page.get_by_text("[ Cancel ]").click()
        expect(page.get_by_role("alert")).to_contain_text("did not sign you in")


def search(page, words):
    page.locator("#query").fill(words)
    page.keyboard.press("Enter")


def test_a_session_is_renewed_and_ends_with_the_group(browser, hospital):
    with page_of(browser, hospital) as page:
        at_the_provider(page, "ada")
        hospital.pass_time(16)
        search(page, "tide")
        expect(page.get_by_text("Tidal power")).to_be_visible()
        hospital.change("ada", groups=["canteen"])
        hospital.pass_time(32)
        search(page, "turbine")
        expect(page.get_by_text("Your session has ended. Please sign in again.")).to_be_visible()


def test_a_session_ends_unused(browser, hospital):
    with page_of(browser, hospital) as page:
        at_the_provider(page, "ada")
        expect(page.locator("#who")).to_have_text("Ada Lovelace")
        hospital.pass_time(13 * 60)
        search(page, "tide")
        expect(page.get_by_text("Your session has ended. Please sign in again.")).to_be_visible()


def test_a_person_who_is_revoked_is_out_and_stays_out(browser, hospital, capsys, monkeypatch):
    monkeypatch.setenv("ISTHMUS_API_KEY", hospital.admin)
    with page_of(browser, hospital) as page:
        at_the_provider(page, "ada")
        expect(page.locator("#who")).to_have_text("Ada Lovelace")
        hospital.change("ada")
        assert main(["keys", "sessions", "list", "--broker", hospital.url]) == 0
        assert "Ada Lovelace" in capsys.readouterr().out
        assert main(["keys", "sessions", "end", "ada", "--broker", hospital.url]) == 0
        search(page, "tide")
        expect(page.get_by_text("Your session has ended. Please sign in again.")).to_be_visible()
        with page.expect_response(lambda reply: reply.url.startswith(hospital.issuer)):
            page.get_by_role("link", name="Sign in at localhost").click()
        page.goto(hospital.url)
        expect(page.get_by_role("link", name="Sign in at localhost")).to_be_visible()
