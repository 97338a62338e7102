"""A federation as `isthmus new` writes it, in processes of their own: searched, hurt, and whole again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from browsing import look_over
from command_line import isthmus
from isthmus.cli import main
from isthmus.service import certificates
from isthmus.service.broker import Broker
from isthmus.service.security import ApiKeys
from isthmus.service.settings import read_broker
from isthmus.service.wire import Search
from running_federation import PATIENCE, RunningFederation, page_of, searched, until

SILOS = ("north", "south", "west")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = RunningFederation(tmp_path_factory.mktemp("journey") / "my-federation", SILOS)
    for name in SILOS:
        page = f"# Tides\n\nTidal power as {name} has it.\n"
        (made.folder / name / "documents" / "tides.md").write_text(page)
    try:
        for name in (*SILOS, "broker"):
            made.start(name)
        until(lambda: made.found() == set(SILOS), "all silos find something")
        yield made
    finally:
        made.close()


def test_it_starts_as_it_is(federation, capsys):
    told = ["--broker", f"http://127.0.0.1:{federation.port}", "--key"]
    assert main(["search", "tidal power", *told, str(federation.folder / "broker" / "admin.key")]) == 0
    shown = capsys.readouterr().out
    for name in SILOS:
        assert re.search(rf"{name}\s+Tides", shown)
    assert "3 of 3 silos answered" in shown


SNAPSHOTS = Path(__file__).with_name("terminal.txt")
"""Commands of the docs, each with what a terminal of 80 columns shows: stdout, stderr, and a status but 0;
`…` where that depends on the machine or the moment.

Written by this test with ISTHMUS_SNAPSHOTS=1. `{ada}` is the number of a key that an earlier line has made.
"""
ANYTHING = "…"
DATA = ("ledger export", "mcp --json")
"""Whose output is for programs, however wide."""
VARYING = re.compile(r"isk_[\w-]+|\b(?=\w*\d)[0-9a-f]{4,}\b|[-+]?\d[\d.,:TZ-]*(?!\w)|/\S+")
"""Keys, numbers of things, figures, moments, paths."""


def alike(shown):
    """What must be the same in two runs: the words; rows of a table may stand by the moment."""
    return sorted(re.sub(r"[\s─]+", " ", VARYING.sub("#", shown)).split())


def typed(line, folder):
    """What a terminal shows of a command."""
    keys = {key.name: key.id for key in ApiKeys(folder / "broker" / "api-keys.json").all()}
    done = isthmus(*shlex.split(line.format(**keys)), folder=folder, check=False)
    status = f"(status {done.returncode})\n" if done.returncode else ""
    shown = (done.stdout + done.stderr + status).replace(str(folder), "FOLDER")
    return "\n".join(row.rstrip() for row in shown.strip("\n").splitlines())


def test_the_commands_of_the_docs_show_what_they_did_within_80_columns(federation, monkeypatch):
    """Those that need a federation; the others run in tests/test_docs.py and in the recipes."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("ISTHMUS_BROKER", f"http://127.0.0.1:{federation.port}")
    monkeypatch.setenv("ISTHMUS_API_KEY", (federation.folder / "broker" / "admin.key").read_text().strip())
    shutil.rmtree(federation.folder / "other", ignore_errors=True)  # of a run before
    screens = []
    for step in re.split(r"^\$ isthmus ", SNAPSHOTS.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        line, _, before = step.partition("\n")
        end = time.monotonic() + 60  # a silo of a busy machine may be late
        while alike(screen := typed(line, federation.folder)) != alike(before):
            if "ISTHMUS_SNAPSHOTS" in os.environ or before.strip() == ANYTHING:
                break
            assert time.monotonic() < end, f"$ isthmus {line}\n{screen}\nnot\n{before}"
            time.sleep(0.5)
        wide = [row for row in screen.splitlines() if len(row) > 80]
        assert not wide or line.startswith(DATA), f"$ isthmus {line}\n{screen}"
        screens.append(f"$ isthmus {line}\n{ANYTHING if before.strip() == ANYTHING else screen}\n\n")
    if "ISTHMUS_SNAPSHOTS" in os.environ:
        SNAPSHOTS.write_text("".join(screens).rstrip() + "\n", encoding="utf-8")


def test_silos_come_to_share_their_statistics(federation):
    def shared():
        with federation.client() as broker:
            told = broker.silos()
        given = [{left.kind for left in each.release.departures} for each in told.silos]
        alike = {each.ready.statistics for each in told.silos} == {told.statistics}
        return told.statistics and alike and all("sums" in kinds for kinds in given)

    until(shared, "every silo scores with the sum")
    with federation.client() as broker:
        # a silo that a busy machine made late is on trial for some answers
        until(
            lambda: not any(each.detail for each in broker.search("tidal power").silos),
            "a search without a remark on any silo",
        )
        release = broker.silos().silos[0].release
    assert {each.kind for each in release.departures} >= {"sums", "scores", "snippets"}
    assert {each.guarantee for each in release.departures if each.kind == "scores"} == {"no DP guarantee"}


def test_feedback_reaches_its_silo(federation):
    with federation.client() as broker:
        hit = broker.search("tidal power").hits[0]
        broker.judge("tidal power", hit, relevant=True)
        told = {each.silo: each.release.departures for each in broker.silos().silos}
    assert hit.silo in told


def test_a_killed_and_a_stopped_silo_are_named_and_come_back(federation):
    north, south = federation.running["north"], federation.running["south"]
    north.kill()
    north.wait()
    south.send_signal(signal.SIGSTOP)
    try:
        hurt = [federation.statuses() for _ in range(4)]
        assert all(told["west"] == "answered" for told in hurt)
        assert all(told["north"] == "down" for told in hurt)
        assert all(told["south"] == "late" for told in hurt)
    finally:
        south.send_signal(signal.SIGCONT)
    federation.start("north")
    until(lambda: federation.answered() == set(SILOS), "both are used again")


def test_logs_have_no_query(federation):
    with federation.client() as broker:
        broker.search("zanzibarian")
    for name in (*SILOS, "broker"):
        assert '"path": "/v1/search"' in federation.log(name)
        assert "zanzibarian" not in federation.log(name)
        assert "tidal" not in federation.log(name)


@contextmanager
def calling(federation, party, authority):
    """A client with somebody's certificate, straight to a node."""
    context = certificates.client_context(certificates.files(authority / party))
    context.load_verify_locations(federation.folder / "north" / "ca.crt")
    with httpx.Client(verify=context, base_url=f"https://127.0.0.1:{federation.port + 1}") as client:
        yield client


def test_a_node_refuses_a_broker_it_does_not_know(federation, tmp_path):
    folder = federation.folder
    if not (folder / "stranger").exists():
        assert main(["keys", "make", str(folder), "--broker", "stranger"]) == 0
    assert main(["keys", "make", str(tmp_path), "--broker", "broker"]) == 0
    with calling(federation, "stranger", folder) as stranger:
        assert stranger.post("/v1/search", json={"query": "tides"}).status_code == 403
        assert stranger.get("/v1/statistics").status_code == 403
    with calling(federation, "broker", tmp_path) as forged, pytest.raises(httpx.TransportError):
        forged.post("/v1/search", json={"query": "tides"})


def test_a_node_refuses_replays_and_path_tricks(federation):
    from isthmus.service.limits import message_header

    header = message_header()
    with calling(federation, "broker", federation.folder) as broker:
        body = {"query": "tides"}
        assert broker.post("/v1/search", json=body, headers=header).status_code == 200
        assert broker.post("/v1/search", json=body, headers=header).status_code == 409
        assert broker.post("/v1/search", json=body).status_code == 400
        fresh = message_header()
        reply = broker.request("DELETE", "/v1/documents/..%2f..%2fsilo.toml", headers=fresh)
        assert reply.status_code == 403
    assert (federation.folder / "north" / "silo.toml").exists()


def test_an_unknown_broker_is_told_so(federation):
    import asyncio
    from dataclasses import replace

    folder = federation.folder
    if not (folder / "stranger").exists():
        assert main(["keys", "make", str(folder), "--broker", "stranger"]) == 0
    settings = replace(
        read_broker(folder / "broker.toml"),
        tls=certificates.files(folder / "stranger"),
        share_statistics=False,
    )

    async def search():
        broker = Broker(settings)
        try:
            return await broker.search(Search(query="tides"))
        finally:
            await broker.stop()

    assert {each.status for each in asyncio.run(search()).silos} == {"refused"}


def test_a_person_searches_in_a_browser(federation, browser):
    with page_of(browser, federation) as page:
        hits = searched(page, "tidal power")
        silos = {hits.nth(at).locator(".chip").inner_text() for at in range(hits.count())}
        assert silos == set(SILOS)
        assert "3 of 3 silos answered" in page.locator(".status").inner_text()
        page.locator("main").click(position={"x": 2, "y": 2})  # out of the box
        page.keyboard.press("j")
        page.keyboard.press("w")
        assert page.locator(".hit").first.locator("details").get_attribute("open") is not None
        assert "bm25" in page.locator(".hit").first.locator("table").inner_text()
        hits.last.get_by_role("button", name="wrong").click()
        hits.last.get_by_text("kept by").wait_for()
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "query"


def test_the_page_keeps_what_was_asked_in_its_address(federation, browser):
    with page_of(browser, federation) as page:
        searched(page, "tidal power")
        page.locator("label.pick", has_text="west").click()
        page.locator(".status", has_text="2 of 2 silos").wait_for()
        assert "without=west" in page.url
        page.reload()
        page.locator(".hit").first.wait_for()
        assert not page.locator("label.pick", has_text="west").locator("input").is_checked()


def test_before_anything_is_learned_there_is_no_probability_and_no_threshold(federation, browser):
    with page_of(browser, federation) as page:
        page.get_by_text("No probabilities yet").wait_for()
        assert page.get_by_label("Only hits at least this likely").is_disabled()
        page.goto(f"http://127.0.0.1:{federation.port}/#/search?q=tidal+power&above=0.95")
        page.locator(".hit").first.wait_for()
        assert page.get_by_label("Only hits at least this likely").is_disabled()
        assert "isthmus judgements import" in page.locator("#no-probabilities").inner_text()
        assert "above" not in page.url, "what nobody can change back is not asked for"
        assert page.locator(".chance").count() == 0
        page.get_by_role("link", name="let the silos learn").click()
        page.get_by_role("button", name="Learn now").wait_for()


def test_a_judgement_is_remembered_changed_and_taken_back(federation, browser):
    def pressed(hit):
        return [
            hit.get_by_role("button", name=word).get_attribute("aria-pressed") for word in ("right", "wrong")
        ]

    with page_of(browser, federation) as page:
        hit = searched(page, "power of tides").first
        hit.get_by_role("button", name="right").click()
        hit.get_by_text("kept by").wait_for()
        page.reload()
        hit.get_by_text("kept by").wait_for()
        assert pressed(hit) == ["true", "false"]
        hit.get_by_role("button", name="wrong").focus()
        page.keyboard.press("Enter")
        hit.locator('[data-relevant="false"][aria-pressed="true"]').wait_for()
        page.goto(f"http://127.0.0.1:{federation.port}/#/silos")
        page.locator(".card").first.wait_for()
        page.goto(f"http://127.0.0.1:{federation.port}/#/search?q=power+of+tides")
        hit.get_by_text("kept by").wait_for()
        assert pressed(hit) == ["false", "true"]
        hit.get_by_role("button", name="wrong").click()
        hit.get_by_text("taken back").wait_for()
        page.reload()
        page.locator(".hit").first.wait_for()
        with page.expect_response("**/v1/judged"):
            page.reload()
        assert pressed(hit) == ["false", "false"]


def test_another_person_sees_their_own_judgements(federation, browser):
    keys = str(federation.folder / "broker" / "api-keys.json")
    with page_of(browser, federation) as page:
        hit = searched(page, "power as a tide").first
        hit.get_by_role("button", name="right").click()
        hit.get_by_text("kept by").wait_for()
    token = ApiKeys(keys).add("ada", scopes=["search", "feedback"])
    with page_of(browser, federation, key=token) as page:
        with page.expect_response("**/v1/judged"):
            hit = searched(page, "power as a tide").first
        assert hit.locator('[aria-pressed="true"]').count() == 0
        page.goto(f"http://127.0.0.1:{federation.port}/#/training")
        page.get_by_role("heading", name="Learning").wait_for()
        assert page.get_by_role("button", name="Learn now").count() == 0, "that is for administrators"
    token = ApiKeys(keys).add("reader", scopes=["search"])
    with page_of(browser, federation, key=token) as page:
        searched(page, "power as a tide")
        assert page.get_by_role("button", name="right").count() == 0, "this key may not judge"


def test_documents_cannot_become_markup(federation, browser):
    attack = "<img src=x onerror=alert(1)><script>alert(1)</script>"
    (federation.folder / "north" / "documents" / "attack.md").write_text(f"# {attack}\n\nquokka {attack}\n")
    federation.restart("north")
    until(lambda: federation.holds("quokka"), "the new document is found")
    with page_of(browser, federation) as page:
        hit = searched(page, "quokka").first
        assert "<script>" in hit.inner_text()
        assert page.locator(".hit img, .hit script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_at_every_size(federation, browser, tmp_path, scheme, width):
    shape = {"viewport": {"width": width, "height": 850}, "color_scheme": scheme}
    with page_of(browser, federation, **shape) as page:
        searched(page, "tidal power")
        for view, sign in (
            ("Search", ".hit"),
            ("Silos", ".card"),
            ("Training", ".card"),
            ("Calibration", "h1"),
        ):
            if view != "Search":
                page.get_by_role("link", name=view, exact=True).click()
            page.locator(sign).first.wait_for()
            look_over(page, f"{view.lower()}, nothing judged", (width,))
            unnamed = page.locator("button, input, a, select").evaluate_all(
                "all => all.filter(e => !(e.innerText || e.ariaLabel || e.labels?.length)).length"
            )
            assert unnamed == 0
            folder = Path(os.environ.get("ISTHMUS_SCREENSHOTS", tmp_path))
            page.screenshot(path=folder / f"{view.lower()}-{scheme}-{width}.png")


def test_an_interrupt_ends_everything(federation):
    """Last: it stops the west and the broker."""
    for name in ("west", "broker"):
        process = federation.running.pop(name)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert "Traceback" not in federation.log(name)
