"""Erasing a document: what the node's folder still says of it, and whether it comes back."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from isthmus.errors import DataError
from isthmus.private.ledger import Budget, Ledger, fingerprint
from isthmus.retrieval import Statistics
from isthmus.service import wire
from isthmus.service.encoding import LsaQueries, load_lsa
from isthmus.service.erasure import erase
from isthmus.service.node import Node
from isthmus.service.settings import (
    EncoderSettings,
    NodeSettings,
    Policy,
    SharedStatistics,
    Source,
    StoreSettings,
)
from isthmus.service.stores import Judgement, StoredRequest
from isthmus.tables import OWN

SECRET_ID, SECRET, TITLE = (
    "quarterly-layoffs-plan.md",
    "zanzibarian pelicans resign on thursday",
    "Kumquat affair",
)
PIECES = (SECRET_ID.encode(), b"zanzibarian", b"pelican", b"umquat")


def texts_in(folder):
    """The files below a folder in which something of the document stands."""
    return {
        path.relative_to(folder).as_posix(): [piece for piece in PIECES if piece in path.read_bytes().lower()]
        for path in folder.rglob("*")
        if path.is_file() and any(piece in path.read_bytes().lower() for piece in PIECES)
    }


def release_list(settings):
    """The documents that the last release is of, in a file that is compressed."""
    data = (settings.folder / "released.statistics").read_bytes()
    return Statistics.from_bytes(data, most=OWN).about["documents"]


def known_to_encoder(settings):
    """Whether the encoder, whose file is compressed too, knows a word that only the document has."""
    return bool(
        np.linalg.norm(LsaQueries(load_lsa(settings.folder / "index" / "encoder")).documents(["zanzibarian"]))
    )


@pytest.fixture
def settings(tmp_path):
    papers = tmp_path / "papers"
    papers.mkdir()
    for at in range(30):
        (papers / f"paper{at:02}.md").write_text(f"# Paper {at}\n\ntides and turbines number{at} wave lamp")
    (papers / SECRET_ID).write_text(f"# {TITLE}\n\n{SECRET}")
    return NodeSettings(
        silo="north",
        folder=tmp_path / "north",
        sources=(Source("folder", papers),),
        peers={"broker": Policy(search=True, snippets=True, counts=True, feedback=True)},
        encoder=EncoderSettings("lsa", dimensions=8),
        statistics=SharedStatistics(width=1 << 10),
    )


def filled(node):
    """Index, judge, ask for, show and release a document, as a silo does over its years."""
    node.read_sources()
    node.index.catch_up()
    node._read.set()
    node.searcher.search(wire.Search(query="zanzibarian pelicans"), snippets=True)
    node.store.judge(Judgement("pelicans", SECRET_ID, True, "broker", 1.0, person="p"))
    node.store.judge(Judgement("tides", "paper01.md", True, "broker", 1.0, person="p"))
    node.store.ask(StoredRequest("a" * 32, SECRET_ID, "broker", "p", "", "pelicans", "why", 1.0))
    node.statistics("broker")


def test_nothing_of_an_erased_document_is_left_in_the_nodes_folder(settings):
    """Neither its id nor a word that only it has: in the store, its log, the index, the vectors' encoder, the
    release's list and the ledger; while the node runs, and after it ended."""
    with Node(settings).offline() as node:
        filled(node)
        before = texts_in(settings.folder)
        assert any(name.startswith("documents.db") for name in before)
        assert SECRET_ID in release_list(settings)
        assert any(name.startswith("ledger.db") for name in before)
        assert known_to_encoder(settings)
        receipt = erase(node, [SECRET_ID])
        assert not texts_in(settings.folder)
        assert SECRET_ID not in release_list(settings)
        assert len(release_list(settings)) == 30
        assert not known_to_encoder(settings)
        assert not node.searcher.search(wire.Search(query="zanzibarian"), snippets=True).hits
        assert [each.document for each in node.store.judgements()] == ["paper01.md"]
        assert not node.store.requests()
        assert node.searcher.search(wire.Search(query="turbines number3"), snippets=True).hits
        assert not node.index.behind
    assert not texts_in(settings.folder)
    assert (receipt.judgements, receipt.requests) == (1, 1)
    assert [(each.id, each.removed) for each in receipt.documents] == [(SECRET_ID, True)]
    assert receipt.documents[0].released[0]["peer"] == "broker"
    assert {"index", "vectors", "ledger"} <= set(receipt.rewritten)
    assert any("noise" in line for line in receipt.not_undone)
    json.dumps(receipt.model_dump())


def test_nothing_of_an_erased_document_is_left_in_a_store_in_postgresql(settings, postgres_url):
    import psycopg

    def rows_with_pieces():
        with psycopg.connect(postgres_url) as db:
            names = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
            rows = [row for (name,) in names for (row,) in db.execute(f'SELECT t::text FROM "{name}" t')]
        return [row for row in rows if any(piece.decode() in row.lower() for piece in PIECES)]

    there = replace(settings, store=StoreSettings("postgres", postgres_url))
    with Node(there).offline() as node:
        filled(node)
        assert len(rows_with_pieces()) == 3, "the document, a judgement and a request"
        receipt = erase(node, [SECRET_ID])
        assert not rows_with_pieces()
        assert not texts_in(settings.folder)
        assert (receipt.judgements, receipt.requests) == (1, 1)
        node.read_sources()
        assert node.store.count() == 30


def test_an_erased_document_does_not_come_back_with_its_source_until_it_is_readmitted(settings):
    with Node(settings).offline() as node:
        filled(node)
        erase(node, [SECRET_ID])
        node.read_sources()
        node.index.catch_up()
        assert node.store.count() == 30
        assert node.source_reports[0].erased == 1
        assert not texts_in(settings.folder)
        assert node.store.readmit([SECRET_ID]) == 1
        node.read_sources()
        assert node.store.present([SECRET_ID])


def test_erasing_twice_does_no_harm_and_what_is_not_there_is_an_error(settings):
    with Node(settings).offline() as node:
        filled(node)
        with pytest.raises(DataError, match=r"no document never-was\.md.*isthmus documents list"):
            erase(node, [SECRET_ID, "never-was.md"])
        assert node.store.present([SECRET_ID]), "nothing is done by halves"
        assert not len(node.store.blocked())
        erase(node, [SECRET_ID])
        again = erase(node, [SECRET_ID])
        assert [(each.removed, each.hidden) for each in again.documents] == [(False, False)]
        assert node.store.count() == 30


def test_a_document_that_was_removed_before_can_be_erased_still(settings):
    with Node(settings).offline() as node:
        filled(node)
        node.store.remove([SECRET_ID])
        node.index.catch_up()
        assert texts_in(settings.folder)
        erase(node, [SECRET_ID])
        assert not texts_in(settings.folder)


def test_the_index_is_whole_after_a_start_without_its_files(settings):
    """The number of an erased document's last change stays: an index that is built anew is not behind."""
    import shutil

    with Node(settings).offline() as node:
        filled(node)
        erase(node, [SECRET_ID])
    shutil.rmtree(settings.folder / "index")
    with Node(settings).offline() as node:
        node.index.catch_up()
        assert not node.index.behind
        assert len(node.index.snapshot) == 30


def test_the_last_document_can_be_erased(settings):
    with Node(settings).offline() as node:
        filled(node)
        erase(node, [*(f"paper{at:02}.md" for at in range(30)), SECRET_ID])
        assert node.store.count() == 0
        assert not texts_in(settings.folder)
    with Node(settings).offline() as node:
        assert len(node.index.snapshot) == 0


def test_a_document_that_comes_back_has_the_budget_it_had(tmp_path):
    """Under its name with other words, or with its words under another name: no new budget."""
    from isthmus.private.cost import Cost

    text = "many words of a text that is long enough to be known by what it says alone and not by its title"
    with Ledger(tmp_path / "ledger.db", Budget(epsilon=3.0)) as ledger:
        covered = ledger.versions(["a.md"], [fingerprint("t", text)])
        from isthmus.private import release_costs

        (cost, *_) = release_costs(("text",), 1.0, "draw one")
        assert isinstance(cost, Cost)
        ledger.charge(cost, covered, "broker", kind="sums")
        spent = ledger.spent("a.md")
        assert spent > 0
        assert ledger.erase(["a.md", "unknown.md"]) == 1
        ledger.audit()
        ledger.versions(["a.md"], [fingerprint("t", "other words")])
        ledger.versions(["b.md"], [fingerprint("other title", text)])
        assert ledger.spent("a.md") == spent
        assert ledger.spent("b.md") == spent
        assert ledger.erase(["a.md"]) == 1
        ledger.versions(["a.md"], [fingerprint("t", "words once more")])
        assert ledger.spent("a.md") == spent
    data = (tmp_path / "ledger.db").read_bytes()
    assert fingerprint("t", text)[:16] not in data


def test_a_log_that_somebody_reads_is_told_and_erased_the_next_time(settings):
    """A reader of the store keeps its log from being emptied: no receipt claims what is not so."""
    import sqlite3

    from isthmus.errors import ServiceError

    with Node(settings).offline() as node:
        filled(node)
        node.store._db().execute("PRAGMA busy_timeout=100")
        with sqlite3.connect(settings.folder / "documents.db", isolation_level=None) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM document").fetchone()
            with pytest.raises(ServiceError):
                erase(node, [SECRET_ID])
            reader.execute("ROLLBACK")
        reader.close()
        erase(node, [SECRET_ID])
        assert not texts_in(settings.folder)
