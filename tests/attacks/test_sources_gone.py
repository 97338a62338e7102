"""Documents that should be gone: of a source that is named no more, and under an id that two sources use."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from contextlib import contextmanager
from dataclasses import replace

import pytest

from isthmus.errors import ConfigError
from isthmus.service.node import Node
from isthmus.service.settings import NodeSettings, Source
from isthmus.service.sources import load_all
from isthmus.service.stores import Counts, Draft, Judgement, SqliteStore
from isthmus.service.wire import Search


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "sqlite":
        opened = SqliteStore(tmp_path / "documents.db")
    else:
        from isthmus.service.postgres import PostgresStore

        opened = PostgresStore(request.getfixturevalue("postgres_url"))
    yield opened
    opened.close()


def folder(path, **texts):
    path.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (path / f"{name}.txt").write_text(text)
    return Source("folder", path)


def bodies(store):
    return {change.id: change.body for change in store.changes(0, 100) if not change.removed}


@contextmanager
def serving(settings):
    """A node after one reading of its sources, without its thread."""
    with Node(settings).offline() as node:
        node.read_sources()
        node.index.catch_up()
        yield node


def found(node, query):
    return {hit.document for hit in node.searcher.search(Search(query=query), snippets=True).hits}


def test_what_a_source_gave_goes_with_the_source(tmp_path, caplog):
    papers = folder(tmp_path / "papers", a="tide tables", b="tide power")
    letters = folder(tmp_path / "letters", c="tide letters")
    settings = NodeSettings(silo="north", folder=tmp_path / "north", sources=(papers, letters))
    with serving(settings) as node:
        node.store.put([Draft("d", "", "tide by hand")], source="operator")
        node.store.judge(Judgement("tide", "a.txt", True, "broker", 1.0))
        assert found(node, "tide") == {"a.txt", "b.txt", "c.txt"}
    with (
        caplog.at_level(logging.WARNING, "isthmus.service"),
        serving(replace(settings, sources=(letters,))) as node,
    ):
        assert found(node, "tide") == {"c.txt", "d"}
        assert node.store.judgements() == []
    assert "2 documents" in caplog.text
    assert str(tmp_path / "papers") in caplog.text
    with serving(settings) as node:
        assert found(node, "tide") == {"a.txt", "b.txt", "c.txt", "d"}
        assert [said.document for said in node.store.judgements()] == ["a.txt"], "they come back together"


def test_a_configuration_without_any_source_is_refused_until_it_is_meant(tmp_path):
    papers = folder(tmp_path / "papers", a="tide tables")
    settings = NodeSettings(silo="north", folder=tmp_path / "north", sources=(papers,))
    with serving(settings):
        pass
    with pytest.raises(ConfigError, match=r"1 document of.*papers.*forget_sources = true"):
        Node(replace(settings, sources=()))
    with serving(replace(settings, sources=(), forget_sources=True)) as node:
        assert found(node, "tide") == set()
        assert node.store.count() == 0
    with serving(replace(settings, sources=())) as node:  # there is nothing to ask about any more
        node.store.put([Draft("d", "", "tide by hand")], source="operator")
    with serving(replace(settings, sources=())) as node:
        assert found(node, "tide") == {"d"}


def test_a_folder_that_moved_keeps_its_documents_and_what_was_said_of_them(tmp_path, store):
    papers = folder(tmp_path / "papers", a="tide tables", b="tide power")
    assert load_all((papers,), store, pytest.fail) == Counts(added=2)
    latest = store.latest()
    os.rename(tmp_path / "papers", tmp_path / "moved")
    assert load_all((Source("folder", tmp_path / "moved"),), store, pytest.fail) == Counts()
    assert load_all((Source("folder", tmp_path / "moved", name="papers"),), store, pytest.fail) == Counts()
    assert store.latest() == latest, "nothing has changed for an index or a release"
    (tmp_path / "moved" / "a.txt").unlink()
    assert load_all((Source("folder", tmp_path / "moved", name="papers"),), store, pytest.fail) == Counts(
        removed=1
    )


def test_a_mistyped_path_takes_nothing_away(tmp_path, store, caplog):
    papers = folder(tmp_path / "papers", a="tide tables")
    load_all((papers,), store, pytest.fail)
    errors = []
    assert load_all((Source("folder", tmp_path / "papres"),), store, errors.append) == Counts()
    assert "papres" in str(errors[0])
    assert "are kept" in caplog.text
    assert set(bodies(store)) == {"a.txt"}
    letters = folder(tmp_path / "letters", c="tide letters")
    load_all((letters, papers), store, pytest.fail)
    (tmp_path / "letters").rename(tmp_path / "elsewhere")
    assert load_all((letters,), store, errors.append) == Counts(removed=1), "letters were read before"
    assert set(bodies(store)) == {"c.txt"}


def test_two_sources_with_the_same_id_are_two_documents(tmp_path, store):
    one = replace(folder(tmp_path / "one", a="tide tables", b="first"), name="one")
    two = replace(folder(tmp_path / "two", a="wave tables", c="third"), name="two")
    assert load_all((one, two), store, pytest.fail) == Counts(added=4)
    both = {"a.txt": "tide tables", "two:a.txt": "wave tables", "b.txt": "first", "c.txt": "third"}
    assert bodies(store) == both
    assert load_all((two, one), store, pytest.fail) == Counts(), "in whatever order they are read"
    store.judge(Judgement("waves", "two:a.txt", True, "broker", 1.0))
    (tmp_path / "one" / "a.txt").unlink()
    assert load_all((one, two), store, pytest.fail) == Counts(removed=1)
    assert load_all((two,), store, pytest.fail) == Counts(removed=1)
    assert bodies(store) == {"two:a.txt": "wave tables", "c.txt": "third"}, "an id stays with its document"
    assert [said.document for said in store.judgements()] == ["two:a.txt"]


def test_sources_without_names_do_not_overwrite_each_other(tmp_path, store):
    one, two = folder(tmp_path / "one", a="tide tables"), folder(tmp_path / "two", a="wave tables")
    assert load_all((one, two), store, pytest.fail) == Counts(added=2)
    assert sorted(bodies(store).values()) == ["tide tables", "wave tables"]
    assert not any(str(tmp_path) in id for id in bodies(store)), (
        "an id tells nobody where a silo's folders are"
    )
    named = (one, replace(two, name="two"))
    assert load_all(named, store, pytest.fail) == Counts(), "a name that comes later changes no id"
    (tmp_path / "two" / "a.txt").write_bytes(b"\0")
    errors = []
    assert load_all(named, store, errors.append) == Counts(), "what cannot be read is kept, whatever its id"
    assert len(errors) == 1


def test_an_id_that_nobody_can_have_is_one_line_that_names_both(tmp_path, store):
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": id, "text": f"tide {id}"}) + "\n" for id in ("a.txt", "two:a.txt"))
    )
    one = Source("beir", tmp_path / "corpus.jsonl", name="one")
    two = replace(folder(tmp_path / "two", a="wave tables", b="wave power"), name="two")
    errors = []
    assert load_all((one, two), store, errors.append) == Counts(added=3)
    (told,) = map(str, errors)
    assert "'a.txt' of two is an id of one" in told


def test_two_sources_of_one_name_are_refused(tmp_path):
    rows = Source("sql", url="env:ONE", query="SELECT id, body FROM report")
    settings = NodeSettings(silo="north", folder=tmp_path, sources=(rows,))
    with pytest.raises(ValueError, match=r"two sources are sql:SELECT.*give each a name"):
        replace(settings, sources=(rows, replace(rows, url="env:TWO")))
    replace(settings, sources=(rows, replace(rows, url="env:TWO", name="two")))
    with pytest.raises(ValueError, match="operator"):
        Source("folder", tmp_path, name="operator")
    with pytest.raises(ValueError, match="letters, digits"):
        Source("folder", tmp_path, name="a:b")


def test_a_row_that_is_none_keeps_no_other_row_alive(tmp_path, store):
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE thing (id TEXT, body TEXT)")
        db.executemany(
            "INSERT INTO thing VALUES (?, ?)",
            [("a", "tide"), ("b", "wave"), (None, "nobody's"), ("a", "again")],
        )
    source, errors = Source("sql", url=f"sqlite:///{path}", query="SELECT id, body FROM thing"), []
    assert load_all((source,), store, errors.append) == Counts(added=2)
    assert bodies(store) == {"a": "tide", "b": "wave"}
    assert "row 3" in str(errors[0])
    assert "'a' is there twice" in str(errors[1])
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM thing WHERE id = 'b'")
    assert load_all((source,), store, errors.append) == Counts(removed=1)


def test_a_folder_that_cannot_be_listed_keeps_what_it_gave(tmp_path, store, monkeypatch):
    papers = folder(tmp_path / "papers", a="tide tables")
    folder(tmp_path / "papers" / "deep", b="tide power")
    assert load_all((papers,), store, pytest.fail) == Counts(added=2)
    listed = os.scandir

    def refused(path):
        if os.fspath(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    errors = []
    assert load_all((papers,), store, errors.append) == Counts()
    assert "deep" in str(errors[0])
    assert set(bodies(store)) == {"a.txt", "deep/b.txt"}


def test_nothing_of_a_removed_document_is_left_in_the_file(tmp_path):
    store = SqliteStore(tmp_path / "documents.db")
    store.put(
        [Draft(str(number), "", f"sentence {number} of a secret that should be gone") for number in range(50)]
    )
    store.remove(map(str, range(50)))
    store.close()
    left = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"of a secret that" not in left
