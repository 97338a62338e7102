"""One person with one search interface: judge with the keyboard, be killed, go on, and serve it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import httpx
import pytest

from browsing import opened
from search_server import QUERIES, is_right, searching

PATIENCE = 120.0

pytestmark = pytest.mark.timeout(900)


def started(folder, *words):
    """The command in a process of its own, and the JSON line it says when it serves."""
    command = [sys.executable, "-m", "isthmus", "calibrate-endpoint", *words, "--folder", "judged", "--json"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline()]
    while True:
        try:
            return process, json.loads("".join(lines))
        except ValueError:
            more = process.stdout.readline()
            assert more, "it ended before it served"
            lines.append(more)


def ended(process, number=signal.SIGINT):
    process.send_signal(number)
    process.wait(PATIENCE)
    process.stdout.close()


def judge(page, times):
    """Press y or n, as whoever knows would."""
    for _ in range(times):
        query, title = page.locator("#asked").inner_text(), page.locator("#hit h2").inner_text()
        shown = page.locator("#hit code").inner_text()
        page.keyboard.press("y" if is_right(query, {"title": title}) else "n")
        page.wait_for_function(
            "([query, id]) => document.querySelector('#asked')?.innerText !== query"
            " || document.querySelector('#hit code')?.innerText !== id",
            arg=[query, shown],
        )


def test_from_scores_to_probabilities_on_a_page(browser, tmp_path):
    (tmp_path / "queries.txt").write_text("\n".join(QUERIES[:7]) + "\n")
    with searching() as (server, search):
        url = server + "/search?q={query}"
        process, told = started(tmp_path, url, "--queries", "queries.txt", "--precision", "0.7")
        with opened(browser, told["url"], patience=PATIENCE) as page:
            page.locator("#hit").wait_for()
            judge(page, 12)
            page.get_by_text("too few to claim anything").wait_for()
            page.keyboard.press("s")
            page.get_by_text("12 judgements").wait_for()
        ended(process, signal.SIGKILL)

        asked = len(search.requests)
        process, told = started(tmp_path, url, "--queries", "queries.txt", "--precision", "0.7")
        assert len(search.requests) == asked, "answers that are there are not asked for again"
        with opened(browser, told["url"], patience=PATIENCE) as page:
            page.get_by_text("12 judgements").wait_for()
            judge(page, 57)
            page.get_by_text("All answers are judged").wait_for()
            page.get_by_label("Another query").fill(QUERIES[9])
            page.keyboard.press("Enter")
            page.locator("#hit").wait_for()
            judge(page, 10)
            page.get_by_role("img", name="Reliability of the probabilities").wait_for()
            page.locator("#threshold").wait_for()
            assert "of hits are right" in page.locator("#threshold").inner_text()
            assert "narrow" in page.locator("#needed").inner_text()
            assert page.locator("#progress").inner_text().startswith("79 judgements")
        ended(process)

        process, told = started(tmp_path, url, "--serve")
        try:
            shown = httpx.get(told["url"], params={"q": "ferry history"}).json()["results"]
            assert len(shown) == 10
            probabilities = [hit["probability"] for hit in shown]
            assert probabilities == sorted(probabilities, reverse=True)
        finally:
            ended(process)
