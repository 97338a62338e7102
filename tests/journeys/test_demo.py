"""The search of `isthmus demo`, from outside: learned, ended in every way, started again and browsed."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from browsing import look_over, opened
from demonstration import demonstrated
from isthmus.cli import main
from isthmus.demo.federation import ABOUT, OUTCOME, QUERIES
from isthmus.service.local import Federation
from isthmus.service.settings import read_broker

pytestmark = pytest.mark.timeout(900)

PATIENCE = 240.0
SILOS = {"arrays", "functions", "statistics", "signal"}
QUESTION = QUERIES[0]


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory):
    """What was measured, the talk and the folder; a first start was killed as soon as all processes ran, and
    all of them ended."""
    folder = tmp_path_factory.mktemp("demo")
    if HAS_PROC:
        ended_while_it_starts(folder, 5, signal.SIGKILL, -9)
    return demonstrated(folder, "search")


def test_the_silos_learn_and_are_measured(tried) -> None:
    seen, talk, folder = tried
    search = seen["search"]
    assert search["adopted"] == (search["model"] != "baseline")
    difference = search["difference"]
    assert difference["queries"] == 235
    assert search["after"] - search["before"] == pytest.approx(difference["mean"])
    assert difference["low"] <= difference["mean"] <= difference["high"]
    assert search["after"] > search["before"] - 0.003  # what is adopted was cross-validated on other queries
    assert search["hits"] == 2350
    assert search["ece"] < 0.1
    assert search["nobodys"]["unlike"]
    assert search["nobodys"]["probability"] < 0.3
    assert {row["silo"] for row in search["departures"]} == SILOS
    assert {row["guarantee"] for row in search["departures"]} >= {"ε = 1", "no DP guarantee"}
    for heading in ("What learning gained", "How honest 0.8 is", "What left each silo"):
        assert talk.count(heading) == 1
    assert max(map(len, talk.replace(str(folder), "").splitlines())) <= 80
    assert not alive(folder)


def test_the_report_is_one_page_that_begins_with_the_result(tried, browser) -> None:
    page = browser.new_page()
    page.goto((tried[2] / "out" / "report.html").as_uri())
    text = page.inner_text("body")
    assert "got worse" in text.partition("What was searched")[0]
    assert all(f"{silo} (" in text for silo in SILOS)
    printed = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 1
    page.close()


def alive(folder) -> list[int]:
    """Processes of the federation in this folder."""
    mark = str(folder / "out" / "federation").encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"isthmus" in words and any(word.startswith(mark) for word in words):
            found.append(int(process.name))
    return found


@contextmanager
def started(folder):
    """The demonstration's search, started and in the end killed; and the file of its talk."""
    command = [sys.executable, "-m", "isthmus", "demo", "--only", "search", "--serve", "--out"]
    talk = folder / "talk"
    with open(talk, "wb") as stream:
        process = subprocess.Popen(
            [*command, str(folder / "out")], cwd=folder, stdin=subprocess.DEVNULL, stderr=stream
        )
    try:
        yield process, talk
    finally:
        process.kill()
        process.wait()
        until(lambda: not alive(folder))
        talk.unlink()


def until(what) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def ends_with_all(folder, process, number, status) -> None:
    process.send_signal(number)
    assert process.wait(PATIENCE) == status
    until(lambda: not alive(folder))


HAS_PROC = Path("/proc/self/cmdline").exists()
NEEDS_PROC = pytest.mark.skipif(not HAS_PROC, reason="needs /proc")


def ended_while_it_starts(folder, count, number, status) -> None:
    """As soon as so many of the five processes have begun; all of them end."""
    with started(folder) as (process, talk):
        until(lambda: len(alive(folder)) >= count or process.poll() is not None)
        assert process.poll() is None, talk.read_text()
        ends_with_all(folder, process, number, status)


@NEEDS_PROC
def test_ended_while_it_starts_all_end(tried) -> None:
    """By a signal that can be handled; the first start was ended by one that cannot."""
    ended_while_it_starts(tried[2], 1, signal.SIGTERM, 143)
    for log in logs_of(tried):
        log.unlink()  # an import that a signal interrupts may complain


def logs_of(tried) -> list[Path]:
    return list((tried[2] / "out" / "federation").glob("*.log"))


@pytest.fixture(scope="module")
def served(tried):
    """The process that serves what the demonstration made, and its federation."""
    made = (tried[2] / "out" / "federation" / OUTCOME).stat().st_mtime_ns
    with started(tried[2]) as (process, talk):
        until(lambda: "Ctrl-C" in talk.read_text() or process.poll() is not None)
        assert process.poll() is None, talk.read_text()
        assert (tried[2] / "out" / "federation" / OUTCOME).stat().st_mtime_ns == made  # not learned again
        folder = tried[2] / "out" / "federation"
        yield process, Federation(folder, read_broker(folder / "broker.toml"), {})


@pytest.fixture(scope="module")
def federation(served):
    """What the demonstration made, running."""
    return served[1]


def test_a_hit_says_why(federation) -> None:
    with federation.client() as broker:
        answer = broker.search(QUESTION, explain=True, deadline_ms=20_000)
    assert len({hit.silo for hit in answer.hits}) >= 3
    assert all(0 < hit.probability < 1 for hit in answer.hits)
    assert answer.model
    for hit in answer.hits:
        assert {part.retriever for part in hit.explanation} >= {"bm25", "start", "profile"}
        odds = math.log(hit.probability / (1 - hit.probability))
        assert sum(part.contribution for part in hit.explanation) == pytest.approx(odds, abs=1e-6)


def test_the_terminal_adds_up(federation, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    where = ["--broker", federation.url, "--key", str(federation.key)]
    assert main(["search", QUESTION, "--explain", "-k", "1", *where]) == 0
    shown = capsys.readouterr().out
    parts = [float(each) for each in re.findall(r"^.*\w:.* ([+-]\d+\.\d\d)\s*$", shown, re.MULTILINE)]
    total, probability = map(
        float, re.search(r"log-odds (\S+), which is the probability (\S+)", shown).groups()
    )
    assert len(parts) >= 3
    assert sum(parts) == pytest.approx(total, abs=0.005 * (len(parts) + 1) + 1e-9)
    assert 1 / (1 + math.exp(-total)) == pytest.approx(probability, abs=0.003)


@contextmanager
def page_of(browser, federation, **context):
    """The page, opened by the address that the demonstration prints."""
    with opened(browser, federation.link, patience=PATIENCE, **context) as page:
        page.get_by_label("Search all silos").wait_for()
        assert "key=" not in page.url
        yield page


def test_a_stranger_searches_in_a_browser(federation, browser) -> None:
    with page_of(browser, federation) as page:
        page.get_by_text(ABOUT).wait_for()
        page.get_by_role("link", name=QUESTION).click()
        hits = page.locator(".hit")
        hits.first.wait_for()
        shown = [hits.nth(at) for at in range(hits.count())]
        assert len({hit.locator(".chip").inner_text() for hit in shown}) >= 3
        chances = [hit.locator(".chance .number").inner_text() for hit in shown]
        assert all(re.fullmatch(r"<?\d+ %", chance) for chance in chances)
        assert hits.locator(".where code").count() == 0, "titles are names of documents: nothing stands twice"
        hits.first.get_by_text("Why this result?").click()
        reasons = hits.first.locator("table")
        assert "bm25" in reasons.inner_text()
        number = lambda text: float(text.replace("−", "-"))  # noqa: E731
        parts = [number(each) for each in reasons.locator("tbody .number").all_inner_texts()]
        total = number(reasons.locator("tfoot .number").inner_text())
        assert sum(parts) == pytest.approx(total, abs=0.005 * (len(parts) + 1) + 1e-9)
        assert 100 / (1 + math.exp(-total)) == pytest.approx(float(chances[0].strip("<> %")), abs=1)
        assert chances[0] in hits.first.locator(".why > div > .hint").inner_text()
        page.get_by_text("What the percentages mean").click()
        page.get_by_text(re.compile(r"Percentages rest on [\d,]+ judged queries")).wait_for()
        page.goto(f"{federation.url}/#/search?q=parking+garage+opening+hours")
        best = re.compile(r"No hit here is likely to be right: the best has \d+ %\. No judged")
        page.get_by_text(best).wait_for()
        page.goto(f"{federation.url}/#/silos?key=isk_0_of_somebody_else")  # who is signed in stays so
        page.locator(".card").first.wait_for()
        assert "key=" not in page.url


VIEWS = {
    "start": ("search", "#basis"),
    "search": (f"search?q={QUESTION.replace(' ', '+')}", ".hit"),
    "silos": ("silos", ".card"),
    "training": ("training", ".card svg"),
    "calibration": ("calibration", ".cards.small svg"),  # of what the silos learned together
    "admin": ("admin", "section[aria-label=Members] table"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_shows_what_there_is(federation, browser, tmp_path, scheme, width) -> None:
    """With ISTHMUS_SCREENSHOTS, a folder, the pictures of the documentation are made here."""
    folder = Path(os.environ.get("ISTHMUS_SCREENSHOTS", tmp_path))
    shape = {"viewport": {"width": width, "height": 850}, "color_scheme": scheme}
    with page_of(browser, federation, **shape) as page:
        for view, (place, sign) in VIEWS.items():
            page.goto(f"{federation.url}/#/{place}")
            page.locator(sign).first.wait_for()
            if view == "search":
                page.get_by_text("Why this result?").first.click()
            look_over(page, f"demo {view}", (width,))
            seen = page.locator("main").inner_text()
            assert view != "silos" or all(silo in seen for silo in SILOS)
            assert view != "training" or "Adopted: a linear model" in seen or "Not adopted" in seen
            page.screenshot(path=folder / f"{view}-{scheme}-{width}.png")


@NEEDS_PROC
def test_ctrl_c_ends_all(tried, served) -> None:
    assert len(alive(tried[2])) == 5
    ends_with_all(tried[2], served[0], signal.SIGINT, 0)
    assert len(logs_of(tried)) == 5
    assert not any("Traceback" in log.read_text(encoding="utf-8") for log in logs_of(tried))
