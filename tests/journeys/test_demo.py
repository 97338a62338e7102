"""`isthmus demo`, from outside: the story, and the federation that it leaves to be searched."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from browsing import opened
from isthmus.service.local import running

pytestmark = pytest.mark.timeout(900)

PATIENCE = 240.0
SILOS = {"arrays", "functions", "statistics", "signal"}
QUESTION = "invert a matrix"


def demonstrated(folder: Path, part: str) -> tuple[Any, str, Path]:
    """What one part of the demonstration prints and says, and its folder; it ends by itself."""
    command = [sys.executable, "-m", "isthmus", "demo", "--headless", "--json", "--only", part]
    command += ["--out", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=850)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, folder


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory):
    """The rows, the talk and the folder of the story."""
    return demonstrated(tmp_path_factory.mktemp("story"), "story")


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory):
    """What was seen of the search, the talk and the folder."""
    return demonstrated(tmp_path_factory.mktemp("demo"), "search")


def test_the_systems_come_in_the_order_the_story_says(told) -> None:
    rows, _, _ = told
    ndcg = {row["run"]: row["value"] for row in rows if row["measure"] == "nDCG@10"}
    assert list(ndcg) == [
        "home silo alone",
        "merged by raw score",
        "merged by RRF",
        "one central index",
        "fused by probability",
    ]
    home, raw, rrf, central, fused = ndcg.values()
    assert home < rrf < raw < central < fused
    assert all(row["low"] < row["value"] < row["high"] for row in rows)
    assert {row["measure"] for row in rows} == {"nDCG@10", "MRR@10"}


def test_it_owns_up_to_the_deal_and_names_the_report(told) -> None:
    _, talk, folder = told
    assert "The deal into silos is ours" in talk
    assert str(folder / "out" / "report.html") in talk


def test_the_silos_train_together_and_the_gain_is_measured(told) -> None:
    _, talk, folder = told
    said = " ".join(talk.split())
    assert "Four silos train a ranker none of them could train alone: nDCG@10 0.4" in said
    assert "Validation nDCG@10 over 20 rounds: ▁" in said
    assert "only the weighted sum of the models" in said
    assert "no DP guarantee" in said
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert "After every round" in page


def test_the_ways_to_train_stand_side_by_side_and_one_is_the_products(told) -> None:
    _, talk, _ = told
    said = " ".join(talk.split())
    assert "Isthmus uses anchored Global training" in said
    for way in ("Local+", "CS-F-LTR", "all-zero", "averaged labeller"):
        assert way in said


def test_the_report_needs_nothing_else(told) -> None:
    _, _, folder = told
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert "one central index" in page
    assert "The deal into silos is ours" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_nothing_is_written_elsewhere(told) -> None:
    _, _, folder = told
    assert [path.name for path in folder.iterdir()] == ["out"]


def test_the_search_is_tried_and_ended(tried) -> None:
    seen, talk, _ = tried
    checks = seen["checks"]
    assert re.match(r"hits of [34] silos in one list, each with a probability", checks["search"])
    assert re.fullmatch(r"4 ready, [\d,]+ documents", checks["silos"])
    assert re.search(r"20 rounds, nDCG@10 0\.\d+ on queries kept from it", checks["training"])
    assert re.match(r"off by 0\.\d+ on average over [\d,]+ hits", checks["calibration"])
    assert "start it again, and its page: isthmus demo --only search --serve --out" in " ".join(talk.split())
    assert not alive(tried)


def alive(tried) -> list[int]:
    """Processes of the federation in this folder."""
    mark = str(tried[2] / "out" / "federation").encode()
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
def serving(tried):
    """The demonstration's search, started again, which takes no training; and the page's address."""
    command = [sys.executable, "-m", "isthmus", "demo", "--only", "search", "--serve", "--out"]
    talk = tried[2] / "talk"
    with open(talk, "wb") as stream:
        process = subprocess.Popen(
            [*command, str(tried[2] / "out")], cwd=tried[2], stdin=subprocess.DEVNULL, stderr=stream
        )
    try:
        until(lambda: "Ctrl-C" in talk.read_text() or process.poll() is not None)
        assert process.poll() is None, talk.read_text()
        assert "is still good" in " ".join(talk.read_text().split())
        yield process
    finally:
        process.kill()
        process.wait()
        talk.unlink()
        until(lambda: not alive(tried))


def until(what) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_however_it_ends_all_end(tried, number, status) -> None:
    with serving(tried) as process:
        assert len(alive(tried)) == 5
        process.send_signal(number)
        assert process.wait(PATIENCE) == status
        until(lambda: not alive(tried))
    for log in (tried[2] / "out" / "federation").glob("*.log"):
        assert "Traceback" not in log.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def federation(tried):
    """What the demonstration made, running."""
    with running(tried[2] / "out" / "federation", patience=PATIENCE) as found:
        yield found


def test_a_hit_says_why(federation) -> None:
    with federation.client() as broker:
        answer = broker.search(QUESTION, explain=True)
    assert len({hit.silo for hit in answer.hits}) >= 3
    assert all(0 < hit.probability < 1 for hit in answer.hits)
    assert all({part.retriever for part in hit.explanation} >= {"bm25", "dense"} for hit in answer.hits)
    starts: dict[str, list[float]] = {}
    for hit in answer.hits:
        told = math.log(hit.probability / (1 - hit.probability)) - sum(
            p.contribution for p in hit.explanation
        )
        starts.setdefault(hit.silo, []).append(told)
    assert max(max(each) - min(each) for each in starts.values()) < 1e-3  # the same for all hits of a silo


@contextmanager
def page_of(browser, federation, **context):
    """The page, opened by the address that the demonstration prints."""
    with opened(browser, federation.link, patience=PATIENCE, **context) as page:
        page.get_by_label("Search all silos").wait_for()
        assert "key=" not in page.url
        yield page


def test_a_stranger_searches_in_a_browser(federation, browser) -> None:
    with page_of(browser, federation) as page:
        page.get_by_label("Search all silos").fill(QUESTION)
        page.keyboard.press("Enter")
        hits = page.locator(".hit")
        hits.first.wait_for()
        shown = [hits.nth(at) for at in range(hits.count())]
        assert len({hit.locator(".chip").inner_text() for hit in shown}) >= 3
        chances = [hit.locator(".chance .number").inner_text() for hit in shown]
        assert all(re.fullmatch(r"<?\d+ %", chance) for chance in chances)
        hits.first.get_by_text("Why this result?").click()
        reasons = hits.first.locator("table").inner_text()
        assert "bm25" in reasons
        assert "dense" in reasons
        assert chances[0] in hits.first.locator(".why .hint").inner_text()
        page.goto(f"{federation.url}/#/silos?key=isk_0_of_somebody_else")  # who is signed in stays so
        page.locator(".card").first.wait_for()
        assert "key=" not in page.url


VIEWS = {
    "search": (f"search?q={QUESTION.replace(' ', '+')}", ".hit"),
    "silos": ("silos", ".card"),
    "training": ("training", ".card svg path.line"),
    "calibration": ("calibration", ".cards svg circle"),
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
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            seen = page.locator("main").inner_text()
            assert view in ("search", "training") or all(silo in seen for silo in SILOS)
            page.screenshot(path=folder / f"{view}-{scheme}-{width}.png")
