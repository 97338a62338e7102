"""A node's folder of the release before this one opens, with all its documents, judgements and releases."""

from __future__ import annotations

import json
import sqlite3
import tarfile
from pathlib import Path

import numpy as np
import pytest

from isthmus.retrieval import Statistics
from isthmus.service.node import Node
from isthmus.service.settings import NodeSettings, Policy, SharedStatistics
from isthmus.service.stores import SqliteStore
from isthmus.service.wire import Search

STORED = Path(__file__).parent / "data" / "node-0.tar.xz"
DOCS = Path(__file__).parent.parent / "docs" / "operations.md"


@pytest.fixture
def before(tmp_path):
    """The folder and what was true of it: 31 documents, judgements, a release, directions and a ranker."""
    with tarfile.open(STORED) as stored:
        stored.extractall(tmp_path, filter="data")
    return tmp_path / "north", json.loads((tmp_path / "expected.json").read_text())


def opened(folder):
    peer = Policy(search=True, snippets=True, counts=True, feedback=True)
    settings = NodeSettings(
        silo="north",
        folder=folder,
        peers={"broker": peer},
        budget=9.0,
        statistics=SharedStatistics(width=1024, fields=False),
        depth=20,
    )
    return Node(settings).offline()


def hits(node, query):
    answer = node.searcher.search(Search(query=query, k=8, explain=True), snippets=True)
    return [[hit.document, hit.score, hit.probability, hit.title, hit.snippet] for hit in answer.hits]


def test_a_folder_of_the_release_before_opens_and_answers(before):
    folder, expected = before
    with opened(folder) as node:
        assert node.index.behind == expected["latest"], "the index is built from the store"
        node.index.catch_up()
        assert not list((folder / "index").glob("segment-*"))
        assert node.index.snapshot.encoder.fingerprint.startswith("lsa-"), "fitted anew on its own texts"
        assert node.index.snapshot.shared.version == expected["statistics"]
        assert (node.store.count(), len(node.store.judgements())) == (
            expected["documents"],
            expected["judgements"],
        )
        assert node.searcher.scorer.name == "bm25", "what the release before learned, this one does not read"
        for query in expected["answers"]:
            assert hits(node, query), "and searches go on"
        for query in expected["features"]:
            candidates = node.index.snapshot.find(query, 20)
            assert np.isfinite(node.index.snapshot.features(candidates)).all()
        released = Statistics.from_bytes(node.statistics("broker"))
        assert released.version == expected["release"], "what was drawn is not drawn again"
        assert node.ledger.summary()["most_spent"] == expected["most_spent"]
        answers = {query: hits(node, query) for query in expected["answers"]}
    with opened(folder) as node:
        assert node.index.behind == 0
        assert {query: hits(node, query) for query in answers} == answers


def test_until_the_new_index_is_whole_the_old_one_stays(before):
    folder, _ = before
    with opened(folder):
        pass
    assert list((folder / "index").glob("segment-*"))


def test_the_way_back_that_is_documented_leads_back(before, monkeypatch):
    """The statements of docs/operations.md make the store one that the release before opens."""
    folder, expected = before
    with opened(folder) as node:
        node.index.catch_up()
    page = DOCS.read_text(encoding="utf-8")
    statements = page.split("```sql\n", 1)[1].split("```")[0]
    with sqlite3.connect(folder / "documents.db") as db:
        db.executescript(statements)
    db.close()
    with monkeypatch.context() as release:
        release.setattr(SqliteStore, "migrations", SqliteStore.migrations[:4])
        store = SqliteStore(folder / "documents.db")
        assert store.count() == expected["documents"]
        rows = store._rows(store._db(), "SELECT count(*) FROM words WHERE words MATCH 'tide'")
        assert rows[0][0] > 0
        store.close()
    with opened(folder) as node:
        assert node.store.count() == expected["documents"], "and forward again"
