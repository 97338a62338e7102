"""A silo's documents by the real commands, from a folder of all formats to a receipt that one is erased."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from browsing import look_over, opened, press, tab_to
from isthmus.cli import main
from isthmus.service.client import Client
from isthmus.service.security import ApiKeys
from loopback_ports import free_base
from office_files import docx, eml, parquet, pptx, xlsx

PATIENCE = 240.0
RIGHTS = 'open = true\nask = "name"\nmanage = true\n'
SECRET = "zanzibarian pelicans resign on thursday"


def run(folder, *words, status=0):
    """A command in a process of its own: what it printed, and what it said."""
    command = [sys.executable, "-m", "isthmus", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@contextmanager
def serving(folder, *verbs):
    """Processes that serve while this lasts."""
    running = []
    try:
        for verb, config in verbs:
            with open(folder / f"{config.replace('/', '-')}.log", "ab") as log:
                command = [sys.executable, "-m", "isthmus", verb, "--config", config]
                running.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log))
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)


def wait_for(what):
    until = time.monotonic() + PATIENCE
    while True:
        try:
            if result := what():
                return result
        except Exception as error:
            if time.monotonic() > until:
                raise error
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.2)


@pytest.fixture
def federation(tmp_path):
    """One silo with a document of every format, behind its broker; Ada opens, Ben asks."""
    folder, port = tmp_path / "fed", free_base(2)
    assert main(["new", str(folder), "--silos", "north", "--port", str(port)]) == 0
    papers = folder / "north" / "documents"
    docx(papers / "report.docx", "The turbine of the report", SECRET, title="Quarterly layoffs")
    pptx(papers / "talk.pptx", "turbine slides")
    xlsx(papers / "sheet.xlsx", [["turbine", "metres"], ["Rance", 13.5]])
    eml(papers / "letter.eml", "Turbine letter", "It turns tomorrow.")
    (papers / "rows.csv").write_text("id,title,text\nr1,One,first turbine row\nr2,Two,second turbine row\n")
    parquet(papers / "rows.parquet", {"id": ["p1"], "title": ["Three"], "text": ["third turbine row"]})
    (papers / "broken.docx").write_bytes(b"no zip")
    silo = folder / "north" / "silo.toml"
    text = silo.read_text().replace("[peers.broker]\n", f"[peers.broker]\n{RIGHTS}", 1)
    text = text.replace('path = "documents"', 'path = "documents", link = "https://wiki.example.org/{id}"')
    silo.write_text(text + '\n[encoder]\nkind = "lsa"\ndimensions = 8\n')
    keys = ApiKeys(folder / "broker" / "api-keys.json")
    for name, scopes in (("ada", ["search", "documents"]), ("ben", ["search"])):
        (folder / f"{name}.key").touch(mode=0o600)
        (folder / f"{name}.key").write_text(keys.add(name, scopes=scopes))
    return folder, f"http://127.0.0.1:{port}"


def test_documents_are_found_opened_asked_for_and_erased(federation):
    folder, url = federation
    silo = ("--config", "north/silo.toml")
    out, err = run(folder, "node", *silo, "--index-only", "--json")
    report = json.loads(out)["sources"][0]
    assert (report["unread"], report["failed"]) == (1, "")
    assert "broken.docx" in err, "what cannot be read is named"
    with serving(folder, ("node", "north/silo.toml"), ("broker", "broker.toml")):
        with Client(url, key=folder / "broker" / "admin.key") as root:
            wait_for(lambda: root.silos().silos[0].ready.ready)
            assert len(root.search("turbine").hits) >= 7
            state = root.silos().silos[0]
            assert state.ready.unread == 1
            assert "broken.docx" in state.sources[0].errors[0], "administrators see the name"
        with Client(url, key=folder / "ben.key") as ben:
            assert not ben.silos().silos[0].sources, "others do not"
        at = ("--broker", url)
        ada, ben = (*at, "--key", "ada.key"), (*at, "--key", "ben.key")

        # searched: the id and the link are always there
        out, _ = run(folder, "search", "turbine", *ben)
        ids = {"report.docx", "talk.pptx", "sheet.xlsx", "letter.eml", "rows.csv#r1", "rows.parquet#p1"}
        assert all(f"north/{id}" in out for id in ids)
        assert "https://wiki.example.org/rows.csv%23r1" in out

        # opened, by whose key has the scope
        found = ("north/report.docx", "--query", "turbine report")
        out, _ = run(folder, "documents", "open", *found, *ada)
        assert SECRET in out
        _, err = run(folder, "documents", "open", *found, *ben, status=1)
        assert "scope documents" in err

        # asked for: the owner wants a name, sees the reason, and answers on the silo's machine
        _, err = run(folder, "documents", "ask", *found, *ben, status=1)
        assert "--name" in err
        out, _ = run(folder, "documents", "ask", *found, "--reason", "our audit", "--name", *ben)
        number = out.strip()
        out, _ = run(folder, "documents", "requests", *silo, "--json")
        (request,) = json.loads(out)
        assert (request["number"], request["person"], request["reason"]) == (number, "ben", "our audit")
        run(folder, "documents", "open", "north/report.docx", "--request", number, *ben, status=1)
        run(folder, "documents", "answer", number, "--allow", "--word", "until friday", *silo)
        out, _ = run(folder, "documents", "requests", *ben, "--json")
        assert (json.loads(out)[0]["state"], json.loads(out)[0]["word"]) == ("allowed", "until friday")
        out, _ = run(folder, "documents", "open", "north/report.docx", "--request", number, *ben)
        assert SECRET in out
        run(folder, "documents", "open", "north/report.docx", "--request", number, *ben, status=1)

        # a source more, without a restart
        (folder / "north" / "more").mkdir()
        (folder / "north" / "more" / "new.md").write_text("a waterwheel")
        text = (folder / "north" / "silo.toml").read_text()
        more = 'sources = [{kind = "folder", path = "more"}, '
        (folder / "north" / "silo.toml").write_text(text.replace("sources = [", more, 1))
        out, _ = run(folder, "node", "reload", *silo)
        assert "more: 1 document" in out
        assert json.loads(run(folder, "documents", "list", *silo, "--find", "new.md", "--json")[0])
        out, _ = run(folder, "search", "waterwheel", *ben)
        assert "north/new.md" in out

        # erased, and it does not come back
        out, _ = run(
            folder, "documents", "remove", "report.docx", *silo, "--receipt", "receipt.json", "--json"
        )
        receipt = json.loads(out)
        assert json.loads((folder / "receipt.json").read_text()) == receipt
        assert (receipt["documents"][0]["removed"], receipt["requests"]) == (True, 1)
        run(folder, "node", "reload", *silo)
        out, _ = run(folder, "search", "turbine report", *ben)
        assert "report.docx" not in out
        assert not json.loads(run(folder, "documents", "list", *silo, "--find", "report.docx", "--json")[0])
        assert not json.loads(run(folder, "documents", "requests", *ben, "--json")[0])
        _, err = run(folder, "documents", "open", *found, *ada, status=1)
        assert "no hit of this search" in err
        index = folder / "north" / "index"
        pieces = (b"report.docx", b"zanzibarian", b"pelican")
        left = [
            (path.name, piece)
            for path in index.rglob("*")
            if path.is_file()
            for piece in pieces
            if piece in path.read_bytes().lower()
        ]
        assert not left
    run(folder, "documents", "remove", "rows.csv#r2", *silo)  # while nothing serves it
    out, _ = run(folder, "documents", "list", *silo, "--json")
    assert {"rows.csv#r1", "talk.pptx"} <= {each["id"] for each in json.loads(out)}
    assert "rows.csv#r2" not in out
    _, err = run(folder, "node", "reload", *silo, status=1)
    assert "no node" in err


def test_a_source_that_fails_ends_indexing_with_status_1(tmp_path):
    (tmp_path / "silo.toml").write_text(
        'silo = "north"\nfolder = "north"\nsources = [{kind = "folder", path = "nowhere"}]\n'
    )
    assert main(["node", "--config", str(tmp_path / "silo.toml"), "--index-only"]) == 1


def has_focus(place):
    return place.evaluate("each => each === document.activeElement")


def test_the_page_opens_asks_and_answers(federation, browser):
    """Ben asks on the page, the administrator allows, Ben opens once; Ada opens at once."""
    folder, url = federation
    with serving(folder, ("node", "north/silo.toml"), ("broker", "broker.toml")):
        with Client(url, key=folder / "broker" / "admin.key") as root:
            wait_for(lambda: root.silos().silos[0].ready.ready)
            assert len(root.search("turbine").hits) >= 7

        @contextmanager
        def signed_in(key):
            narrow = {"viewport": {"width": 390, "height": 850}}
            with opened(browser, url, patience=60, **narrow) as page:
                page.get_by_label("API key").wait_for()
                tab_to(page, "key")
                page.keyboard.type((folder / key).read_text().strip())
                page.keyboard.press("Enter")
                page.get_by_label("Search all silos").wait_for()
                yield page

        def hit(page):
            page.get_by_label("Search all silos").fill("turbine report")
            page.keyboard.press("Enter")
            return page.locator(".hit", has_text="report.docx")

        with signed_in("ben.key") as page:
            asked = hit(page)
            link = asked.get_by_role("link", name="at wiki.example.org")
            assert link.get_attribute("href") == "https://wiki.example.org/report.docx"
            press(page, "ask the owner: Quarterly layoffs")
            assert has_focus(asked.get_by_label("Why you want it").last)
            page.keyboard.press("Escape")
            assert asked.locator("form").count() == 0
            assert has_focus(asked.get_by_role("button", name="ask the owner"))
            page.keyboard.press("Enter")
            page.keyboard.type("our audit <b>")
            look_over(page, "asking an owner")
            asked.get_by_role("button", name="Ask", exact=True).press("Enter")
            asked.get_by_text("Asked.").wait_for()
            assert has_focus(asked.get_by_text("Asked."))
        with signed_in("broker/admin.key") as page:
            page.get_by_role("link", name="Requests").click()
            waiting = page.locator(".request", has_text="our audit <b>")
            waiting.get_by_text("ben", exact=True).wait_for()
            tab_to(page, "A word to the asker")
            page.keyboard.type("until friday")
            look_over(page, "requests, one waiting")
            press(page, "allow once")
            page.get_by_text("Nothing waits.").wait_for()
            page.wait_for_function("() => document.activeElement.id === 'to-answer'")
            page.get_by_role("link", name="Silos").click()
            page.get_by_text("1 document of its sources could not be read").wait_for()
            page.get_by_text("Which", exact=True).click()
            page.get_by_text("broken.docx").wait_for()
        with signed_in("ben.key") as page:
            page.get_by_role("link", name="Requests").click()
            own = page.locator(".request", has_text="until friday")
            press(page, "open once")
            own.get_by_text(SECRET).wait_for()
            look_over(page, "requests, one answered")
        with signed_in("ada.key") as page:
            document = hit(page)
            press(page, "open: Quarterly layoffs")
            document.locator("article").get_by_text(SECRET).wait_for()
            look_over(page, "a document opened")
            page.keyboard.press("Escape")
            assert document.locator("article").count() == 0
            assert has_focus(document.get_by_role("button", name="open: Quarterly layoffs"))
