"""Ways around the ledger: new names for old texts, copies, a ledger that forgets, words that stand twice."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from isthmus.arrays import frozen
from isthmus.errors import BudgetExhausted, DataError, PrivacyError
from isthmus.private.cost import Cost, Covered
from isthmus.private.counts import fetch_catalogue, fetch_published, in_memory
from isthmus.private.ledger import Ahead, Budget, Ledger, fingerprint
from isthmus.private.ledger import store as ledger_store
from isthmus.private.store import SiloFolder, SketchBundle
from isthmus.private.totals import family_of
from isthmus.retrieval import TEXT
from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.parsing import READERS
from isthmus.service.settings import NodeSettings, ParsingLimits, Policy
from isthmus.service.stores import Draft
from isthmus.tables import Documents
from private_node import PEER, node, private_settings, released, texts

SECRET = (
    "the contract with the harbour of Esbjerg ends in May unless both sides sign again before the tide turns"
)
OTHERS = [
    f"a note of its own about matter number {number} and nothing that stands anywhere else"
    for number in range(6)
]


@pytest.fixture
def settings(tmp_path: Path) -> NodeSettings:
    return private_settings(tmp_path / "north")


def documents(**bodies: str) -> Documents:
    """Documents by name, whose title is the name, as with files that have no heading."""
    names = tuple(bodies)
    return Documents(names, names, tuple(bodies.values()), frozen(np.zeros(len(names), dtype=np.int64)))


def shared(epsilon: float, release: str) -> Cost:
    return Cost("one_shot", ("body",), epsilon, 2.0, 2 / epsilon, release)


# ---------------------------------------------------------------- a new name for an old text


def test_a_renamed_document_gets_no_new_budget(tmp_path: Path, soak_count) -> None:
    """The attack: name a file anew, have it sketched and published, average over the noise."""
    folder, seen = SiloFolder.at(tmp_path / "south", create=True), []
    for name in range(soak_count(6, 40)):
        folder.build(
            documents(**{f"name{name}": SECRET}), ("body",), budget=Budget(4.0) if not name else None
        )
        with folder.ledger() as ledger:
            carrier = in_memory(folder.desk(1.0, ledger, ("body",)), "north")
            try:
                catalogue = fetch_catalogue(carrier, "body")
                family = folder.keys.group_key().family("body", width=catalogue.terms.width)
                seen.append(fetch_published(carrier, catalogue, family).dense())
            except BudgetExhausted:
                continue
    assert len(seen) == 4, "ε = 1 a name, of one budget of 4"
    with folder.ledger() as ledger:
        assert {ledger.spent(f"name{name}") for name in range(6)} == {4.0}
        ledger.audit()


@pytest.mark.parametrize(
    ("title", "body"),
    [
        ("another title", SECRET),
        ("name", "  " + SECRET.replace(" ", "\n\n")),
        ("name", SECRET.upper()),
        ("name", "> *" + SECRET.replace(" ", " *") + "!"),
    ],
    ids=["title", "spaces", "case", "markup"],
)
def test_a_text_is_known_whatever_is_done_to_its_looks(tmp_path: Path, title: str, body: str) -> None:
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        ledger.charge(shared(3.0, "first"), ledger.versions(["old"], [fingerprint("name", SECRET)]), "north")
        again = ledger.versions(["new"], [fingerprint(title, body)])
        with pytest.raises(BudgetExhausted):
            ledger.charge(shared(3.0, "second"), again, "north")
        ledger.charge(shared(1.0, "second"), again, "north")
        assert ledger.left("old") == ledger.left("new") == 0
        assert again.versions != ledger.versions(["old"], [fingerprint("name", SECRET)]).versions
        ledger.audit()


def test_a_renamed_document_that_is_then_edited_stays_in_its_lineage(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        ledger.charge(shared(4.0, "first"), ledger.versions(["old"], [fingerprint("", SECRET)]), "north")
        ledger.versions(["new"], [fingerprint("", SECRET)])
        edited = ledger.versions(["new"], [fingerprint("", SECRET + " and then some")])
        with pytest.raises(BudgetExhausted):
            ledger.charge(shared(1.0, "second"), edited, "north")


def test_a_text_under_the_name_of_another_document_is_paid_by_both(tmp_path: Path) -> None:
    """Copied over a file that has all of its budget left."""
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        both = ledger.versions(["old", "free"], [fingerprint("", SECRET), fingerprint("", OTHERS[0])])
        ledger.charge(shared(3.0, "first"), Covered(*zip(("old", both.versions[0]))), "north")
        over = ledger.versions(["free"], [fingerprint("", SECRET)])
        with pytest.raises(BudgetExhausted):
            ledger.charge(shared(2.0, "second"), over, "north")
        ledger.charge(shared(1.0, "second"), over, "north")
        assert (ledger.spent("old"), ledger.spent("free")) == (4.0, 1.0)
        assert ledger.copies(ledger.versions(["old", "free"], [fingerprint("", SECRET)] * 2)).tolist() == [
            False,
            True,
        ]
        ledger.audit()


def test_texts_that_many_documents_have_are_not_one_document(tmp_path: Path) -> None:
    """Neither no words at all nor a few of them under different titles."""
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        contents = [("", ""), ("", " "), ("one", "see above"), ("two", "see above")]
        covered = ledger.versions(["a", "b", "c", "d"], [fingerprint(*each) for each in contents])
        assert not ledger.copies(covered).any()


def test_names_of_an_older_ledger_are_followed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has digests of whole documents; what is still there under its name is then known by its words."""
    with monkeypatch.context() as patch:
        patch.setattr(ledger_store, "MIGRATIONS", ledger_store.MIGRATIONS[:1])
        store = ledger_store.LedgerStore(tmp_path / "ledger", create=True)
        with store.writing() as db:
            db.execute("INSERT INTO setting VALUES ('budget', ?)", (Budget(4.0).to_json(),))
            db.execute("INSERT INTO document VALUES (1, 'old', 1), (2, 'gone', 2)")
            for number, body in ((1, SECRET), (2, OTHERS[0])):
                digest = fingerprint("name", body)[:16]
                db.execute(
                    "INSERT INTO version VALUES (?, ?, ?, ?)", (number, number, f"{number:032x}", digest)
                )
        store.close()
    with Ledger(tmp_path / "ledger") as ledger:
        kept = ledger.versions(["old"], [fingerprint("name", SECRET)])
        assert kept.versions == (f"{1:032x}",), "its noise is still its noise"
        ledger.charge(shared(3.0, "first"), Covered(("old", "gone"), (f"{1:032x}", f"{2:032x}")), "north")
        for name, title, body in (("new", "other", SECRET), ("back", "name", OTHERS[0])):
            with pytest.raises(BudgetExhausted):
                ledger.charge(
                    shared(2.0, "second"), ledger.versions([name], [fingerprint(title, body)]), "north"
                )


# ---------------------------------------------------------------- copies


def test_copies_are_no_further_draws(tmp_path: Path) -> None:
    """The attack: many copies, each with noise of its own, in one release."""
    folder = SiloFolder.at(tmp_path / "south", create=True)
    copies = {f"copy{number}": SECRET for number in range(40)}
    folder.build(documents(**copies, other=OTHERS[0]), ("body",), budget=Budget(4.0))
    with folder.ledger() as ledger:
        carrier = in_memory(folder.desk(4.0, ledger, ("body",)), "north")
        catalogue = fetch_catalogue(carrier, "body")
        assert catalogue.documents == ("copy0", "other")
        family = folder.keys.group_key().family("body", width=catalogue.terms.width)
        fetch_published(carrier, catalogue, family)
        assert ledger.spent("copy39") == ledger.spent("other") == 4.0


def test_copies_count_once_in_statistics_and_cost_once(settings: NodeSettings) -> None:
    copies = [Draft(f"copy{number}", f"copy {number}", f"esbjerg {SECRET}") for number in range(40)]
    with node(settings, *texts(60), *copies) as opened:
        figures = released(opened)
        family = family_of(settings.statistics.hash_key, settings.statistics.width)
        assert figures.counts(TEXT, ["esbjerg"], family)[0] < 20
        assert figures.documents == 100, "how many documents there are is public"
        assert opened.ledger.spent("copy0") == opened.ledger.spent("copy39") == opened.ledger.spent("d1") == 1
        opened.ledger.audit()
    for name in range(3):
        with node(settings, Draft(f"new{name}", "", f"esbjerg {SECRET}")) as opened:
            opened.store.remove([f"copy{number}" for number in range(40)])
            while opened.index.update():
                pass
            opened.statistics(PEER)
    with node(settings) as opened:
        assert opened.ledger.spent("new0") == opened.ledger.spent("copy0") == 2


# ---------------------------------------------------------------- a ledger that forgets


def lose(folder: Path, ledger: str, *, also: tuple[str, ...] = ()) -> None:
    for name in (ledger, f"{ledger}-wal", f"{ledger}-shm", *also):
        (folder / name).unlink(missing_ok=True)


def backup(path: Path, target: Path) -> None:
    """As SQLite's own command does it."""
    with sqlite3.connect(path) as source, sqlite3.connect(target) as copy:
        source.backup(copy)


@pytest.mark.parametrize("also", [(), ("ledger.db.tally",)], ids=["ledger", "and tally"])
def test_a_node_with_releases_and_no_ledger_refuses_to_start(settings: NodeSettings, also) -> None:
    with node(settings, *texts()) as opened:
        opened.statistics(PEER)
    lose(settings.folder, "ledger.db", also=also)
    with pytest.raises(DataError, match=r"ledger\.db: the ledger is lost: .* \(put its newest copy back"):
        Node(settings)
    assert not (settings.folder / "ledger.db").exists()


@pytest.mark.parametrize("left", ["documents.db", "index"])
def test_a_node_with_documents_and_no_ledger_refuses_to_start(settings: NodeSettings, left: str) -> None:
    """Whoever puts back the documents and forgets the rest would have every budget anew."""
    with node(settings, *texts()) as opened:
        opened.statistics(PEER)
    for path in settings.folder.iterdir():
        if not path.name.startswith(left):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataError, match=r"the ledger is lost: .* \(put its newest copy back"):
        Node(settings)
    Ledger.after_loss(settings.ledger, spent=1.0, budget=Budget(epsilon=9.0)).close()
    with node(settings, *texts()) as opened:
        opened.statistics(PEER)
        assert opened.ledger.spent("d1") == 2.0


@pytest.mark.parametrize("also", [(), ("ledger.db.tally",)], ids=["tally", "tally lost"])
def test_an_older_ledger_is_noticed(settings: NodeSettings, tmp_path: Path, also, soak_count) -> None:
    """The attack: put the ledger of before the first release back, have noise drawn anew, do it again."""
    with node(settings, *texts()):
        pass
    backup(settings.folder / "ledger.db", tmp_path / "copy.db")
    with node(settings) as opened:
        opened.statistics(PEER)
    for _ in range(soak_count(2, 40)):
        lose(settings.folder, "ledger.db", also=also)
        shutil.copy(tmp_path / "copy.db", settings.folder / "ledger.db")
        with pytest.raises(DataError, match=r"isthmus ledger lost"):
            Node(settings)


def test_the_newest_copy_is_accepted(settings: NodeSettings, tmp_path: Path) -> None:
    with node(settings, *texts()) as opened:
        opened.statistics(PEER)
    backup(settings.folder / "ledger.db", tmp_path / "copy.db")
    lose(settings.folder, "ledger.db")
    shutil.copy(tmp_path / "copy.db", settings.folder / "ledger.db")
    with node(settings) as opened:
        assert opened.ledger.spent("d1") == 1


def test_a_release_notices_a_ledger_that_was_restored_with_its_tally(
    settings: NodeSettings, tmp_path: Path
) -> None:
    with node(settings, *texts()):
        pass
    backup(settings.folder / "ledger.db", tmp_path / "copy.db")
    shutil.copy(settings.folder / "ledger.db.tally", tmp_path / "copy.db.tally")
    with node(settings) as opened:
        opened.statistics(PEER)
    lose(settings.folder, "ledger.db")
    for name in ("db", "db.tally"):
        shutil.copy(tmp_path / f"copy.{name}", settings.folder / f"ledger.{name}")
    with pytest.raises(DataError, match=r"an older ledger: .*released\.statistics was written at"):
        Node(settings)


def test_sketches_notice_it_too(tmp_path: Path) -> None:
    folder = SiloFolder.at(tmp_path / "south", create=True)
    folder.build(documents(first=OTHERS[0]), ("body",), budget=Budget(4.0))
    backup(folder.path / "silo.ledger", tmp_path / "copy")
    shutil.copy(folder.path / "silo.ledger.tally", tmp_path / "copy.tally")
    folder.build(documents(first=OTHERS[0], second=OTHERS[1]), ("body",))
    lose(folder.path, "silo.ledger")
    with pytest.raises(DataError, match="the ledger is lost"):
        folder.build(documents(first=OTHERS[0]), ("body",), budget=Budget(4.0))
    shutil.copy(tmp_path / "copy", folder.path / "silo.ledger")
    with pytest.raises(DataError, match="an older ledger"):
        folder.ledger()
    shutil.copy(tmp_path / "copy.tally", folder.path / "silo.ledger.tally")
    with pytest.raises(DataError, match=r"an older ledger: .*body\.sketch was written at"):
        folder.ledger()
    lose(folder.path, "silo.ledger", also=("silo.ledger.tally", "body.sketch"))
    with pytest.raises(DataError, match=r"the ledger is lost: .*body\.words is there"):
        folder.build(documents(first=OTHERS[0]), ("body",), budget=Budget(4.0))


def test_the_ledger_of_another_silo_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Ledger(tmp_path / name, Budget(4.0)) as ledger:
            ledger.record("scores", "north")
    lose(tmp_path, "one")
    (tmp_path / "two").rename(tmp_path / "one")
    with pytest.raises(DataError, match="another ledger"):
        Ledger(tmp_path / "one")


@pytest.mark.parametrize("copy", [True, False], ids=["old copy", "nothing"])
def test_after_a_loss_that_is_declared_every_document_has_spent_as_much_more(
    settings: NodeSettings, tmp_path: Path, copy: bool
) -> None:
    with node(settings, *texts()):
        pass
    backup(settings.folder / "ledger.db", tmp_path / "copy.db")
    with node(settings) as opened:
        opened.statistics(PEER)
    lose(settings.folder, "ledger.db", also=() if copy else ("released.statistics",))
    if copy:
        shutil.copy(tmp_path / "copy.db", settings.folder / "ledger.db")
    Ledger.after_loss(settings.folder / "ledger.db", spent=7.5, budget=Budget()).close()
    with node(settings, Draft("late", "", "came after it")) as opened:
        assert opened.ledger.left("late") == opened.ledger.left("d1") == 1.5
        opened.statistics(PEER)
        assert opened.ledger.spent("d1") == 8.5
        assert "went with a lost ledger" in opened.release().budget
        (settings.folder / "released.statistics").unlink()
    with node(settings) as opened, pytest.raises(BudgetExhausted):
        opened.statistics(PEER)
    Ledger.after_loss(settings.folder / "ledger.db", spent=None, budget=Budget()).close()
    with node(settings) as opened:
        assert opened.ledger.left("anything") == 0
        opened.ledger.audit()


def test_a_ledger_of_an_older_isthmus_gets_a_tally(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        ledger.record("scores", "north")
    with sqlite3.connect(tmp_path / "ledger") as db:
        db.execute("DELETE FROM setting WHERE name = 'ledger'")
    (tmp_path / "ledger.tally").unlink()
    with Ledger(tmp_path / "ledger") as ledger:
        assert ledger.number == 1
    assert b" 00000000000000000001\n" in (tmp_path / "ledger.tally").read_bytes()


def test_a_tally_is_never_behind_what_left(tmp_path: Path) -> None:
    """Whatever is charged or recorded is in the tally when the call returns, from any process."""
    path = tmp_path / "ledger"
    with Ledger(path, Budget(4.0)) as first, Ledger(path) as second:
        for number in range(6):
            (first, second)[number % 2].record("scores", "north")
            assert int((tmp_path / "ledger.tally").read_bytes().split()[-1]) == first.number == number + 1
        covered = first.versions(["a"], [fingerprint("a")])
        second.charge(shared(1.0, "x"), covered, "north")
        before = (tmp_path / "ledger.tally").read_bytes()
        first.charge(shared(1.0, "x"), covered, "north")  # which is paid
        assert (tmp_path / "ledger.tally").read_bytes() == before
        (tmp_path / "ledger.tally").unlink()
        with pytest.raises(PrivacyError, match="nothing may leave"):
            first.record("scores", "north")


# ---------------------------------------------------------------- what leaves before it is written down


def recorded(path: Path, kind: str) -> int:
    """What a ledger says has left, read beside whoever has it open."""
    with Ledger(path, checked=False) as ledger:
        return sum(row["items"] for row in ledger.departures() if row["kind"] == kind)


@contextmanager
def searchable(settings: NodeSettings) -> Iterator[tuple[Node, TestClient]]:
    allowed = replace(settings, peers={"anonymous": Policy(search=True, snippets=True)})
    with (
        node(allowed, *texts()) as opened,
        TestClient(node_app(opened), base_url="http://127.0.0.1") as client,
    ):
        yield opened, client


def test_hits_and_snippets_are_in_the_ledger_before_they_leave(settings: NodeSettings) -> None:
    allowed = replace(settings, peers={"anonymous": Policy(search=True, snippets=True)})
    path = settings.folder / "ledger.db"
    with (
        node(allowed, *texts()) as opened,
        TestClient(node_app(opened), base_url="http://127.0.0.1") as client,
    ):
        left = 0
        for number in range(20):
            answer = client.post("/v1/search", json={"query": f"word{number}"}, headers=message_header())
            left += len(answer.json()["hits"])
            assert recorded(path, "snippets") >= left, "durable before the answer is here"
            assert recorded(path, "scores") >= left
        assert left > 64, "more than the first block"
        rows = {row.kind: row.items for row in opened.release().departures}
        assert rows == {"scores": left, "snippets": left}, "settled, it is what left"


def test_what_cannot_be_written_down_does_not_leave(settings: NodeSettings) -> None:
    allowed = replace(settings, peers={"anonymous": Policy(search=True, snippets=True)})
    with (
        node(allowed, *texts()) as opened,
        TestClient(node_app(opened), base_url="http://127.0.0.1") as client,
    ):
        opened.ledger._store._patience = 0.05
        other = sqlite3.connect(settings.folder / "ledger.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        answer = client.post("/v1/search", json={"query": "word1"}, headers=message_header())
        assert answer.status_code == 503
        assert "hits" not in answer.json()
        assert str(settings.folder) not in answer.text
        other.execute("ROLLBACK")
        other.close()


SHOWING = """
import os, sys
from isthmus.private.ledger import Ahead, Ledger

ahead, log = Ahead(Ledger(sys.argv[1])), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND)
for number in range(int(sys.argv[3])):
    ahead.note("snippets", "broker", 1 + number % 13, "")
    os.write(log, b"." * (1 + number % 13))  # these have left
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.soak
def test_a_killed_process_has_recorded_too_much_and_never_too_little(tmp_path: Path, soak_count) -> None:
    path, log = tmp_path / "ledger", tmp_path / "log"
    Ledger(path, Budget(4.0)).close()
    log.touch()
    rng, before, left_before = np.random.default_rng(11), 0, 0
    for _ in range(soak_count(3, 60)):
        many = int(rng.integers(1, 900))
        command = [sys.executable, "-c", SHOWING, str(path), str(log), str(many)]
        showing = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert showing.stdout is not None
        showing.stdout.readline()
        showing.kill()
        showing.communicate()
        left, now = log.stat().st_size, recorded(path, "snippets")
        assert left <= now
        assert now - before <= 3 * (left - left_before) + 192, "at most three times what left"
        before, left_before = now, left


def test_blocks_grow_and_settle(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", Budget(4.0)) as ledger:
        ahead = Ahead(ledger)
        for _ in range(1000):
            ahead.note("scores", "broker", 10, "")
        assert len(list(ledger.departures())) < 10
        ahead.note("scores", "broker", 0, "")
        ahead.settle(older=3600)
        assert recorded(tmp_path / "ledger", "scores") > 10_000
        ahead.settle()
        assert recorded(tmp_path / "ledger", "scores") == 10_000
        ahead.note("scores", "broker", 100_000, "")
        ahead.settle()
        ledger.lower({1: 10**9})
        assert recorded(tmp_path / "ledger", "scores") == 110_000


# ---------------------------------------------------------------- words that stand twice


def test_one_word_of_a_markdown_file_changes_one_field(tmp_path: Path) -> None:
    """Fields compose in parallel: a word that stood in both would be released twice at the cost of once."""
    limits = ParsingLimits()
    for text, title, body in (
        ("# The secret harbour #\n\ntide tables\n", "The secret harbour", "\ntide tables\n"),
        ("before\n## The secret harbour\nafter", "The secret harbour", "before\nafter"),
        ("# one\n# one\n", "one", "# one\n"),
        ("# ##\ntide", "", "# ##\ntide"),
        ("# alone\n", "", "# alone\n"),
        ("no heading", "", "no heading"),
    ):
        (tmp_path / "a.md").write_text(text)
        assert READERS[".md"](tmp_path / "a.md", limits)[:2] == (title, body)


def test_a_heading_is_charged_where_it_is_counted(tmp_path: Path) -> None:
    """Two files that differ in a word of the heading have the same sketch of the body."""
    cells = []
    for word in ("esbjerg", "aalborg"):
        (tmp_path / "a.md").write_text(f"# The harbour of {word}\n\ntide tables for May\n")
        title, body = READERS[".md"](tmp_path / "a.md", ParsingLimits())[:2]
        folder = SiloFolder.at(tmp_path / "south", create=True)
        whole = Documents(("a.md",), (title,), (body,), frozen(np.zeros(1, dtype=np.int64)))
        folder.build(whole, width=256, budget=None if cells else Budget(9.0))
        exact = [
            SketchBundle.read(folder.path / f"{name}.sketch").arrays["cells"] for name in ("title", "body")
        ]
        cells.append([part.tolist() for part in exact])
    (title, body), (other_title, other_body) = cells
    assert title != other_title
    assert body == other_body
