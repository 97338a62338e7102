"""A silo over an engine that runs already: attached, searched, judged, down and up again."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from command_line import isthmus
from engine_servers import Switch
from isthmus.engines import (
    BY_FIELD,
    AttachedEngine,
    Change,
    Constraints,
    ExactReader,
    Location,
    RemoteDocument,
    attached,
    open_remote,
)
from isthmus.engines.remote import RemoteProblem, words_of
from isthmus.errors import ConfigError, Refused, ServiceError
from isthmus.service import Draft, Node, read_node
from isthmus.service.erasure import erase
from isthmus.service.settings import EngineSettings, NodeSettings, Policy, SharedStatistics
from isthmus.service.wire import AttributedFeedback, CountQuestion, Search
from test_engines import STOP, WORDS, hits, spelled, texts

TABLE = """CREATE TABLE articles (id text PRIMARY KEY, title text, body text, secret boolean DEFAULT false,
    tsv tsvector GENERATED ALWAYS AS
        (to_tsvector('english', coalesce(title, '') || ' ' || coalesce(body, ''))) STORED)"""


def write(url, documents):
    import psycopg

    with psycopg.connect(url, autocommit=True) as db, db.cursor() as cursor:
        cursor.executemany(
            """INSERT INTO articles (id, title, body) VALUES (%s, %s, %s)
            ON CONFLICT (id) DO UPDATE SET title = excluded.title, body = excluded.body""",
            [(each.id, each.title, each.body) for each in documents],
        )
        db.execute("SELECT pg_stat_force_next_flush()")


@pytest.fixture
def table(postgres_url):
    """The address of a table of 200 documents."""
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute(TABLE)
    write(postgres_url, texts(200))
    return postgres_url


@pytest.fixture
def eager(monkeypatch):
    """Look often whether documents have changed."""
    for name, value in (("LOOK", 0.0), ("SHARE", 0.0), ("FRESH", 0.0), ("REST", 0.2)):
        monkeypatch.setattr(attached, name, value)


def located(url, **fields):
    usual = {"source": "articles", "title": "title", "search_by": "tsv"}
    return Location(url=url, **(usual | fields))


def opened(folder, location):
    folder.mkdir(exist_ok=True)
    engine = AttachedEngine(folder, open_remote(location), counted=True, language="en")
    assert engine.maintain()
    engine.refresh()
    return engine


def test_a_table_is_read_as_the_exact_engine_reads_the_same_documents(table, tmp_path, eager):
    documents = list(texts(200))
    engine, exact = opened(tmp_path / "e", located(table)), ExactReader(documents)
    reader = engine.reader
    assert (len(reader), reader.change, reader.lengths) == (len(exact), exact.change, exact.lengths)
    handles = reader.handles()
    assert reader.ids(handles) == exact.ids(exact.handles())
    words = [*WORDS, "pear", "bridg", "river", STOP + "the", "unknown"]
    pairs = (reader.counts(handles, words), exact.counts(exact.handles(), words))
    for mine, other in zip(*(vars(each).values() for each in pairs), strict=True):
        np.testing.assert_array_equal(mine, other)
    for name, expected in exact.tables(words).items():
        np.testing.assert_array_equal(reader.tables(words)[name], expected, name)
    for some in (None, handles[::2]):
        terms, tables = reader.statistics(BY_FIELD, some)
        others, expected_tables = exact.statistics(BY_FIELD, some)
        assert terms.tolist() == others.tolist()
        for name in BY_FIELD:
            np.testing.assert_array_equal(tables[name], expected_tables[name])
    assert spelled(reader, handles[::3]) == spelled(exact, handles[::3])
    for query in ("pears", "the sea and the sea pears", "green bridges rivers", "nothing", ""):
        assert hits(reader, query) == hits(exact, query), query
    only = Constraints(phrases=(("red", "appl"),), without=(("iron",),))
    weights = {"red": 1.0, "sea": 0.5}
    assert reader.ids(reader.matching(weights, 300, only)) == exact.ids(exact.matching(weights, 300, only))
    engine.close()


def test_keys_of_a_fixed_length_and_of_a_table_that_was_empty_are_read(postgres_url):
    import psycopg

    engine = open_remote(located(postgres_url, source="codes"))
    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("CREATE TABLE codes (id char(8) PRIMARY KEY, title text, body text)")
        assert engine.get(["k7"]) == {}
        db.execute("INSERT INTO codes SELECT 'k' || i, '', 'sea' FROM generate_series(1, 600) AS i")
        assert engine.get(["k7"])["k7"].body == "sea"
        assert [len(batch) for batch, _ in zip(engine.scan(), range(9), strict=False)] == [500, 100]
        engine.close()
        db.execute("DROP TABLE codes")
        db.execute("CREATE TABLE codes (id bigint PRIMARY KEY, title text, body text)")
        engine = open_remote(located(postgres_url, source="codes"))
        assert engine.get(["7"]) == {}
        db.execute("INSERT INTO codes VALUES (7, '', 'sea')")
        assert engine.get(["7"])["7"].body == "sea"
    engine.close()


def test_dates_that_are_none_break_no_count(postgres_url):
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("CREATE TABLE dated (id int, title text, body text, at bigint, moment timestamptz)")
        db.execute(
            "INSERT INTO dated VALUES (1, '', 'sea', 86400, '1970-01-02Z'), (2, '', 'sea', NULL, NULL)"
        )
        db.execute(
            "INSERT INTO dated VALUES (3, '', 'sea', 99e15, '20000-01-01Z'), (NULL, '', 'sea', 1, NULL)"
        )
    for field in ("at", "moment"):
        vector = "to_tsvector('english', body)"
        engine = open_remote(located(postgres_url, source="dated", date=field, search_by=vector))
        matches = engine.matches("sea")
        assert (matches.count, matches.years) == (3, {1970: 1})
        assert [each.date for each in engine.get(["1", "2", "3"]).values()] == [86400, None, None]
        assert [each.id for batch in engine.scan() for each in batch] == ["1", "2", "3"]
        assert engine.newest(9) == ["1", "2", "3"]
        engine.close()


def test_changes_are_counted_again_and_a_restart_counts_nothing_anew(table, tmp_path, eager, monkeypatch):
    engine = opened(tmp_path / "e", located(table))
    before = engine.reader
    assert not engine.maintain()
    write(
        table, [Change("d0003", 0, False, "zanzibar", "pears"), Change("new", 0, False, "", "zanzibar sea")]
    )
    deadline = time.monotonic() + 20
    while not engine.maintain() and time.monotonic() < deadline:
        time.sleep(0.1)
    engine.refresh()
    assert (len(engine.reader), engine.reader.changed_after(before.change)) == (201, 2)
    assert engine.reader.tables(["zanzibar"])["text.having"] == [2]
    assert before.tables(["zanzibar"])["text.having"] == [
        0
    ]  # a search that began ends with what it began with
    assert engine.reader.ids(engine.reader.matching({"zanzibar": 1.0}, 5)) == ["d0003", "new"]
    engine.close()
    monkeypatch.setattr(attached, "count_all", None)
    again = AttachedEngine(tmp_path / "e", open_remote(located(table)), counted=True, language="en")
    assert again.is_ready
    assert not again.maintain()
    np.testing.assert_array_equal(again.reader.handles(), engine.reader.handles())
    again.close()


def test_a_filter_holds_for_everything_and_a_wrong_one_for_nothing(table, tmp_path, eager):
    engine = opened(tmp_path / "e", located(table, filter="body LIKE '%sea%' AND NOT secret"))
    kept = [each.id for each in texts(200) if "sea" in each.body]
    assert engine.reader.ids(engine.reader.handles()) == kept
    remote = engine.remote.engine
    assert remote.documents() == len(kept)
    others = [each.id for each in texts(200) if "sea" not in each.body]
    assert not remote.get(others)
    assert set(remote.matching({"pear": 1.0}, 500)) <= set(kept)
    assert {id for id, _ in remote.search("pears", np.zeros(0), 500)} <= set(kept)
    engine.close()
    with pytest.raises(ServiceError, match="nonsense"):
        open_remote(located(table, filter="nonsense = 1")).documents()


def test_nothing_is_written_and_the_role_s_rights_hold(table, postgres_url):
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("UPDATE articles SET secret = true WHERE id < 'd0100'")
        db.execute("CREATE ROLE reader LOGIN; GRANT SELECT ON articles TO reader")
        db.execute("ALTER TABLE articles ENABLE ROW LEVEL SECURITY")
        db.execute("CREATE POLICY p ON articles FOR SELECT USING (NOT secret)")
    try:
        remote = open_remote(located(postgres_url.replace("user=postgres", "user=reader")))
        assert remote.documents() == 100
        assert not remote.get(["d0003"])
        with pytest.raises(ServiceError, match="read-only"):
            open_remote(located(postgres_url))._rows("DELETE FROM articles RETURNING id")
        remote.close()
    finally:
        with psycopg.connect(postgres_url, autocommit=True) as db:
            db.execute("DROP OWNED BY reader; DROP ROLE reader")


def attach(url, folder, *options):
    return json.loads(isthmus("attach", url, "--out", folder, "--json", *options).stdout)


def ready(node):
    deadline = time.monotonic() + 60
    while node.unindexed and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not node.unindexed


def test_attach_writes_a_silo_that_is_searched_judged_and_says_what_left(table, tmp_path):
    done = attach(table, tmp_path / "world", "--silo", "north")
    assert (done["level"], done["documents"], done["source"]) == ("full", 200, "articles")
    assert "100.0%" in done["reasons"][0]
    assert done["hits"]
    settings = read_node(tmp_path / "world" / "north" / "silo.toml")
    assert (settings.engine.id, settings.engine.title, settings.engine.body) == ("id", "title", "body")
    with Node(settings) as node:
        ready(node)
        state = node.ready()
        assert (state.ready, state.documents, state.engine, state.level) == (True, 200, "PostgreSQL", "full")
        seal = node.tokens.seal
        answer = node.searcher.search(
            Search(query="green bridges", explain=True),
            snippets=True,
            token=lambda id: seal(id, query="green bridges", peer="broker"),
        )
        first = answer.hits[0]
        assert first.snippet
        assert first.title
        assert answer.scorer == "bm25"
        verdict = AttributedFeedback(
            query="green bridges", silo="north", token=first.token, relevant=True, person="ada"
        )
        node.judge(verdict, "broker")
        assert [each.document for each in node.store.judgements()] == [first.document]
        node.statistics("broker")  # private, charged to every document
        assert node.release().most_spent > 0
        node.count(CountQuestion(query="green bridges"), "broker")
        erase(node, ["d0003"])
        node.count(CountQuestion(query="iron bridges"), "broker")  # of the documents that are left
        with pytest.raises(Refused, match="PostgreSQL, which is only read"):
            node.put([Draft("x", "", "text")])
    assert not (tmp_path / "world" / "north" / "index" / "index" / "manifest.json").exists()


def test_a_table_of_another_kind_is_named_and_its_level_has_a_reason(postgres_url, tmp_path):
    import psycopg

    with psycopg.connect(postgres_url, autocommit=True) as db:
        db.execute("CREATE TABLE empty (n int)")
        db.execute("CREATE TABLE notes (no bigint PRIMARY KEY, subject text, message text, at timestamp)")
        rows = [
            (at, f"Note {at}", "harbour libraries and ferries of the northern islands") for at in range(40)
        ]
        with db.cursor() as cursor:
            cursor.executemany("INSERT INTO notes VALUES (%s, %s, %s, now())", rows)
    done = attach(postgres_url, tmp_path / "world")
    assert (done["silo"], done["level"]) == ("notes", "full")
    assert any("CREATE INDEX" in reason for reason in done["reasons"])
    settings = read_node(tmp_path / "world" / "notes" / "silo.toml").engine
    assert (settings.id, settings.title, settings.body) == ("no", "subject", "message")
    plain = "to_tsvector('simple', message)"
    other = attach(postgres_url, tmp_path / "world", "--silo", "plain", "--search-by", plain)
    assert other["level"] == "scores"
    assert "90% would be full" in other["reasons"][0]
    assert read_node(tmp_path / "world" / "plain" / "silo.toml").statistics.form == "none"
    for options, words in (
        (("--source", "note"), "did you mean 'notes'"),
        (("--source", "notes", "--body", "texts"), "no field texts"),
    ):
        failed = isthmus("attach", postgres_url, "--out", tmp_path / "x", *options, check=False)
        assert failed.returncode == 1
        assert words in failed.stderr
        assert failed.stderr.count("\n") == 1


def through(switch, url):
    """An address by way of a switch."""
    name = dict(part.split("=") for part in url.split())["dbname"]
    return f"postgresql://postgres@127.0.0.1:{switch.port}/{name}"


def test_a_server_that_is_down_or_silent_is_said_and_comes_back(table, tmp_path, eager):
    folder = Path(dict(part.split("=") for part in table.split())["host"])
    switch = Switch(folder / ".s.PGSQL.5432")
    try:
        attach(through(switch, table), tmp_path / "world", "--seconds", "2")
        with Node(read_node(tmp_path / "world" / "articles" / "silo.toml")) as node:
            ready(node)
            search = Search(query="green pears")
            assert node.searcher.search(search, snippets=True).hits
            for mode in ("off", "silent"):
                switch.turn(mode)
                began = time.monotonic()
                with pytest.raises(ServiceError, match="PostgreSQL"):
                    node.searcher.search(search, snippets=True)
                assert time.monotonic() - began < 15
                state = node.ready()
                assert not state.ready
                assert state.detail == "PostgreSQL does not answer"
                switch.turn("on")
                deadline = time.monotonic() + 30
                while not node.ready().ready and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert node.searcher.search(search, snippets=True).hits
    finally:
        switch.close()


def test_a_server_that_is_not_there_is_one_line_with_the_cure(tmp_path):
    pytest.importorskip("psycopg")
    done = isthmus("attach", "postgresql://127.0.0.1:1/x", "--out", tmp_path / "w", check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "PostgreSQL cannot be reached" in done.stderr
    assert "check the URL" in done.stderr
    assert not (tmp_path / "w").exists()
    for url, words in (
        ("http://search.example.org:9200", "the URL would send queries"),
        ("qdrant://ada:hush@search.example.org", "the URL needs a host, and no password"),
        ("typesense://127.0.0.1:1", "check the URL"),
    ):
        done = isthmus("attach", url, "--out", tmp_path / "w", "--key", "env:PATH", check=False)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert words in done.stderr
        assert "engine." not in done.stderr


def test_marks_are_parts_of_words():
    assert words_of('हिन्दी, cafe\u0301 "tides -tides') == ["हिन्दी", "cafe\u0301", "tides"]


class Stub:
    """An engine in memory that may refuse queries."""

    noun = "Stub"
    location = Location("stub:")
    documents_by_id = {  # noqa: RUF012
        id: RemoteDocument(id, "Tide", "tides of the sea") for id in ("a", "b\n", "", "c" * 2000)
    }
    refused = ""

    def documents(self):
        return len(self.documents_by_id)

    def version(self):
        return "1"

    def matching(self, weights, depth, only=None):
        if self.refused:
            raise RemoteProblem(self.noun, self.refused)
        return list(self.documents_by_id)

    def search(self, text, vector, depth, only=None):
        return [(id, 0.5) for id in self.documents_by_id]

    def get(self, ids):
        return {id: self.documents_by_id[id] for id in ids if id in self.documents_by_id}

    def scan(self):
        yield list(self.documents_by_id.values())

    def close(self):
        pass


def test_ids_that_cannot_be_shown_are_passed_over(tmp_path, eager):
    engine = AttachedEngine(tmp_path, Stub(), counted=True)
    assert engine.maintain()
    engine.refresh()
    assert engine.reader.ids(engine.reader.handles()) == ["a"]
    assert engine.reader.ids(engine.reader.matching({"tide": 1.0}, 5)) == ["a"]
    assert engine.reader.ids(engine.reader.search("tide", np.zeros(0), 5)[0]) == ["a"]


def test_a_query_that_the_server_refuses_keeps_nobody_else_waiting(tmp_path, eager, monkeypatch):
    monkeypatch.setattr(attached, "REST", 1000.0)
    engine = AttachedEngine(tmp_path, Stub(), counted=True)
    engine.remote.engine.refused = "too many clauses"
    with pytest.raises(RemoteProblem, match="refuses a query"):
        engine.reader.matching({"tide": 1.0}, 5)
    engine.remote.engine.refused = ""
    assert len(engine.reader.matching({"tide": 1.0}, 5)) == 1
    monkeypatch.setattr(
        Stub, "version", lambda self: (_ for _ in ()).throw(RemoteProblem("Stub", "no such index"))
    )
    assert not engine.maintain()
    assert "no such index" in engine.remote.problem  # no query is to blame: the silo says so


ATTACHED = EngineSettings(url="postgresql:///x", source="articles", level="full")
SCORED = {"encoder": {"kind": "none"}, "statistics": SharedStatistics(form="none")}
COUNTING = {"peers": {"broker": Policy(noised_counts=True)}}
NODE = {"silo": "north", "folder": Path("north"), "engine": ATTACHED}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "encoder.kind"),
        ({"engine": replace(ATTACHED, source="")}, "source"),
        ({"engine": replace(ATTACHED, level="scores"), "encoder": {"kind": "none"}}, "statistics.form"),
        ({"engine": replace(ATTACHED, level="scores"), **SCORED, **COUNTING}, "noised_counts"),
        ({"store": {"kind": "postgres", "url": "x"}}, "no .store"),
        ({"sources": ({"kind": "folder", "path": Path("x")},)}, "no sources"),
    ],
)
def test_settings_that_an_engine_elsewhere_cannot_have_are_refused(fields, words):
    from isthmus.service import EncoderSettings, Source
    from isthmus.service.settings import StoreSettings

    kinds = {"encoder": EncoderSettings, "store": StoreSettings}
    made = {name: kinds[name](**value) if name in kinds else value for name, value in fields.items()}
    if "sources" in made:
        made["sources"] = tuple(Source(**each) for each in made["sources"])
    with pytest.raises((ValueError, ConfigError), match=words):
        NodeSettings(**(NODE | made))


@pytest.mark.parametrize(
    ("url", "said"),
    [("nonsense", "the address names no engine"), ("solr://a/b", "no engine is known by solr://")],
)
def test_an_address_of_no_engine_is_refused_in_words(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"{said} \(expected postgresql://"):
        open_remote(Location(url=url))
