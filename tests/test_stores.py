"""Both stores do the same: documents with numbered changes, tombstones, judgements, vectors."""

from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from isthmus.errors import DataError, ServiceError
from isthmus.service.stores import (
    SUBJECT,
    Counts,
    Draft,
    Judgement,
    SqliteStore,
    StoredRequest,
    majority,
    type_of,
)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "sqlite":
        made = SqliteStore(tmp_path / "documents.db")
    else:
        from isthmus.service.postgres import PostgresStore

        made = PostgresStore(request.getfixturevalue("postgres_url"))
    yield made
    made.close()


def drafts(*ids):
    return [Draft(id, f"title of {id}", f"the body of {id}") for id in ids]


def test_changes_are_numbered_and_nothing_is_written_twice(store):
    assert store.put(drafts("a", "b", "c")) == Counts(added=3)
    assert store.put([*drafts("a"), Draft("b", "new", "text"), *drafts("d")]) == Counts(added=1, changed=1)
    found = store.changes(0, 100)
    assert [(each.id, each.change) for each in found] == [("a", 1), ("c", 3), ("b", 4), ("d", 5)]
    assert (found[2].title, found[2].body) == ("new", "text")
    assert [each.id for each in store.changes(3, 1)] == ["b"]
    assert (store.count(), store.latest()) == (4, 5)


def test_a_removed_document_leaves_its_number_and_no_text(store):
    store.put(drafts("a", "b"))
    assert store.remove(["b", "nobody"]) == 1
    assert store.remove(["b"]) == 0
    (gone,) = store.changes(2, 10)
    assert (gone.id, gone.removed, gone.title, gone.body) == ("b", True, "", "")
    assert set(store.get(["a", "b"])) == {"a"}
    assert store.count() == 1
    assert store.put(drafts("b")) == Counts(added=1)
    assert store.get(["b"])["b"].body == "the body of b"


def test_a_source_takes_back_what_it_gave(store):
    store.put(drafts("a", "b"), source="papers")
    store.put(drafts("c"), source="letters")
    assert store.retain("papers", ["a"]) == 1
    assert set(store.get(["a", "b", "c"])) == {"a", "c"}


@pytest.mark.parametrize(
    "text", ["", "naïve 東京 🦆", "half \ud800 a pair", "a\0b", "'; DROP TABLE document; --", "%s ?"]
)
def test_any_text_can_be_kept(store, text):
    store.put([Draft("x", text, text)])
    assert store.put([Draft("x", text, text)]) == Counts()
    kept = store.get(["x"])["x"].body
    assert kept == text or "\ud800" in text or "\0" in text


def test_the_last_word_about_a_hit_holds(store):
    store.put(drafts("a", "b"))
    said = Judgement("a query", "a", True, "ada", 1.0, 0.75, {"bm25": 0.5, "dense": None})
    store.judge(said)
    store.judge(Judgement("a query", "b", False, "ada", 2.0))
    assert store.judgements() == [said, Judgement("a query", "b", False, "ada", 2.0)]
    store.judge(Judgement("a query", "a", False, "ada", 3.0))
    store.judge(Judgement("a query", "a", True, "bob", 4.0))
    assert [(j.document, j.relevant, j.peer) for j in store.judgements()] == [
        ("b", False, "ada"),
        ("a", False, "ada"),
        ("a", True, "bob"),
    ]
    store.remove(["a"])
    assert [j.document for j in store.judgements()] == ["b"]


def test_every_person_has_a_word_of_their_own(store):
    store.put(drafts("a"))
    store.judge(Judgement("a query", "a", True, "broker", 1.0, person="one"))
    store.judge(Judgement("a query", "a", False, "broker", 2.0, person="two"))
    assert [(j.person, j.relevant) for j in store.judgements()] == [("one", True), ("two", False)]
    assert majority(store.judgements()) == {("a query", "a"): True}, "split: what held before stays"
    store.judge(Judgement("a query", "a", False, "broker", 3.0, person="three"))
    assert majority(store.judgements()) == {("a query", "a"): False}
    store.judge(Judgement("a query", "a", True, "broker", 4.0, person="two"))
    assert majority(store.judgements()) == {("a query", "a"): True}


def test_judgements_from_before_people_had_names_stay(store, request, monkeypatch):
    """A store of the format that had no persons, with a judgement in it, opened by this version."""
    kind, before = type(store), 3
    store.close()
    if isinstance(store, SqliteStore):
        place = store.path.with_name("old.db")
    else:
        import psycopg

        place = store._url
        with psycopg.connect(place, autocommit=True) as db:
            db.execute("DROP SCHEMA public CASCADE")
            db.execute("CREATE SCHEMA public")
    with monkeypatch.context() as old:
        old.setattr(kind, "migrations", kind.migrations[:before])
        written = kind(place)
        (draft,) = drafts("a")
        with written._transaction(writing=True) as db:
            written._rows(
                db,
                """INSERT INTO document (id, source, title, body, digest, change, removed)
                VALUES (?, '', ?, ?, ?, 1, 0)""",
                (draft.id, draft.title, draft.body, draft.digest),
            )
            written._rows(
                db,
                """INSERT INTO judgement (query, document, peer, relevant, at, probability, evidence)
                VALUES (?, ?, ?, ?, ?, ?, ?)""",
                ("a query", "a", "broker", 1, 1.0, 0.75, '{"bm25": 0.5}'),
            )
        written.close()
    opened = kind(place)
    request.addfinalizer(opened.close)
    was = Judgement("a query", "a", True, "broker", 1.0, 0.75, {"bm25": 0.5})
    assert opened.judgements() == [was]
    opened.judge(Judgement("a query", "a", False, "broker", 2.0, person="one"))
    assert opened.judgements()[0] == was
    assert len(opened.judgements()) == 2


def request(number, document="a", person="ada", at=1.0):
    return StoredRequest(number, document, "broker", person, "Ada", "a query", "why ? 100 %", at)


def test_requests_are_asked_answered_once_and_forgotten(store):
    for each in (request("1"), request("2", person="ben", at=2.0), request("3", at=3.0)):
        store.ask(each)
    assert store.requests() == [request("3", at=3.0), request("2", person="ben", at=2.0), request("1")]
    assert [each.number for each in store.requests(peer="broker", person="ada")] == ["3", "1"]
    assert not store.requests(peer="another")
    assert store.settle_request("1", "waiting", "allowed", word="until friday", at=4.0)
    assert not store.settle_request("1", "waiting", "denied", at=5.0), "it has been answered"
    assert store.settle_request("1", "allowed", "opened", at=6.0)
    (answered,) = [each for each in store.requests() if each.number == "1"]
    assert (answered.state, answered.word, answered.answered) == ("opened", "until friday", 6.0)
    store.forget_requests(before=2.5)
    assert [each.number for each in store.requests()] == ["3"]


def test_an_erased_document_leaves_no_id_and_is_blocked_until_it_is_readmitted(store):
    store.put(drafts("a", "b"), source="papers")
    store.judge(Judgement("a query", "a", True, "ada", 1.0), Judgement("a query", "b", True, "ada", 1.0))
    store.ask(request("1"))
    assert store.mentioned(["a", "b", "nobody"]) == {"a", "b"}
    store.block(["a"], at=1.0)
    store.block(["a"], at=2.0)
    assert (store.blocked()("a"), store.blocked()("b"), len(store.blocked())) == (True, False, 1)
    store.remove(["a"])
    assert store.mentioned(["a"]) == {"a"}
    assert store.erase(["a", "nobody"]) == {"judgements": 1, "requests": 1}
    store.rewrite()
    assert not store.requests()
    assert [each.document for each in store.judgements()] == ["b"]
    assert not store.owners(["a"])
    (gone,) = [each for each in store.changes(0, 10) if each.removed]
    assert gone.id.startswith("erased-")
    assert gone.change == store.latest() == 3, "an index that is built anew is not behind"
    assert store.readmit(["a", "b"]) == 1
    assert not store.blocked()("a")
    assert store.put(drafts("a")) == Counts(added=1)


def test_documents_are_listed_by_source_and_by_words_with_any_sign(store):
    store.put(
        [Draft("a%b", "Tides", "x"), Draft("a_b", "100 % tides!", "x"), Draft("axb", "Rocks", "x")],
        source="papers",
    )
    store.put([Draft("other", "Tides", "x")], source="letters")
    assert [row[0] for row in store.listed(words="TIDES")] == ["a%b", "a_b", "other"]
    assert [row[0] for row in store.listed(words="a_b")] == ["a_b"]
    assert [row[0] for row in store.listed(words="% tides!")] == ["a_b"]
    assert [row[0] for row in store.listed(source="papers", most=2)] == ["a%b", "a_b"]
    assert store.by_source() == {"letters": 1, "papers": 3}


def test_threads_write_and_read_at_once_and_no_number_is_used_twice(store):
    stop = threading.Event()
    seen = []

    def follow():
        while not stop.is_set():
            fresh = store.changes(seen[-1].change if seen else 0, 50)
            seen.extend(fresh)

    with ThreadPoolExecutor(5) as pool:
        follower = pool.submit(follow)
        writers = [
            pool.submit(lambda start=start: [store.put(drafts(f"{start}-{at}")) for at in range(20)])
            for start in range(4)
        ]
        for writer in writers:
            writer.result()
        stop.set()
        follower.result()
    seen.extend(store.changes(seen[-1].change if seen else 0, 1000))
    assert sorted(each.change for each in seen) == list(range(1, 81))
    assert store.count() == 80


def test_an_older_file_is_migrated_and_a_newer_one_refused(tmp_path):
    path = tmp_path / "documents.db"
    db = sqlite3.connect(path)
    for statement in SqliteStore.migrations[0]:
        db.execute(statement)
    db.execute("INSERT INTO document VALUES (1, 'old', '', 'An old', 'document', x'00', 1, 0)")
    db.execute(f"PRAGMA application_id={0x49534E44}")
    db.execute("PRAGMA user_version=1")
    db.commit()
    db.close()
    store = SqliteStore(path)
    assert store.get(["old"])["old"].body == "document"
    store.close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(DataError, match="newer Isthmus"):
        SqliteStore(path)


def test_another_file_is_no_store(tmp_path):
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (a)")
    with pytest.raises(DataError, match="not a node's"):
        SqliteStore(path)
    (tmp_path / "text").write_text("not a database, but some text that is long enough to be one" * 50)
    with pytest.raises(DataError, match="cannot be opened"):
        SqliteStore(tmp_path / "text")


def test_postgres_comes_back_after_the_server_closed_the_connection(postgres_url):
    from isthmus.service.postgres import PostgresStore

    store = PostgresStore(postgres_url)
    store.put(drafts("a"))
    with pytest.raises(ServiceError, match="was lost during a transaction"), store._transaction() as db:
        db.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert store.count() == 1
    store.close()
    with pytest.raises(ServiceError, match="cannot be reached"):
        PostgresStore("postgresql://127.0.0.1:1/nowhere")


def test_a_document_has_a_type_and_a_date_which_alone_change_it_only_where_they_are_stated(store):
    plain = Draft("a/paper.PDF", "t", "b")
    assert store.put([plain, Draft("b", "t", "b"), Draft("c", "t", "b", type="memo", date=-5)]) == Counts(
        added=3
    )
    labels = {each.id: (each.type, each.date) for each in store.changes(0, 9)}
    assert labels == {"a/paper.PDF": ("pdf", None), "b": ("", None), "c": ("memo", -5)}
    # a file's time fills in what is not known, and changes nothing
    assert store.put([replace(plain, modified=77)]) == Counts()
    assert store.put([replace(plain, modified=99)]) == Counts()
    assert store.latest() == 3
    assert store.get(["a/paper.PDF"])["a/paper.PDF"].date == 77
    assert store.put(
        [replace(plain, date=88, modified=99), Draft("c", "t", "b", type="memo", date=6)]
    ) == Counts(changed=2)
    assert {each.id: each.date for each in store.changes(3, 9)} == {"a/paper.PDF": 88, "c": 6}
    store.remove(["c"])
    (gone,) = store.changes(5, 9)
    assert (gone.type, gone.date) == ("", None)


@pytest.mark.parametrize(
    ("id", "type"),
    [
        ("x/y.md", "md"),
        ("report.HTML", "html"),
        ("papers/report.final.HTML", "html"),
        (".env", ""),
        ("a.b/c", ""),
        ("v1.2", ""),
        ("", ""),
        ("mail/12.", ""),
        ("numpy.linalg.norm", ""),
        ("statistics.mean", ""),
        ("a.b.c.pdf", ""),
        ("scipy.stats.rv_continuous.pdf", ""),
        ("requests.Response.json", ""),
        ("report.docx", "docx"),
        ("papers/tides.pdf", "pdf"),
        ("old/report.v2.wpd", "wpd"),
    ],
)
def test_the_type_of_an_id(id, type):
    assert type_of(id) == type


def test_who_may_see_a_document_and_whom_it_is_about_are_stored_and_go_with_it(store):
    seen = Draft("a", "title", "body", allow=("group:doctors", "user:ada"), subject="4711")
    assert store.put([seen, *drafts("b")]) == Counts(added=2)
    assert store.put([seen]) == Counts()
    assert store.get(["a"])["a"] == replace(seen, language="")
    assert [each.allow for each in store.changes(0, 9)] == [("group:doctors", "user:ada"), ()]
    assert store.listed()[0] == ("a", "title", "", "", "group:doctors; user:ada", "4711")
    assert store.put([replace(seen, allow=("user:ada",))]) == Counts(changed=1)
    assert store.put([replace(seen, allow=(), subject="")]) == Counts(changed=1)
    store.put([seen])
    store.remove(["a"])
    (gone,) = (each for each in store.changes(0, 9) if each.id == "a")
    assert (gone.removed, gone.allow) == (True, ())


def test_what_is_about_a_subject_is_found_erased_and_let_in_again(store):
    """Documents of it, removed ones too, and what people wrote that names it, as a word of its own."""
    about = "patient-4711"
    store.put([Draft("a", "", "text", subject=about), Draft("b", "", f"names {about}"), Draft("c", "", "x")])
    store.put([Draft("d", "", "gone", subject=about)])
    store.remove(["d"])
    assert store.subjects() == {"a": about}
    assert store.of_subject(about) == ["a", "d"]
    assert store.mentioning(about) == 1
    store.judge(*(Judgement(query, "c", True, "p", 1.0) for query in (f"of {about}", f"of {about}0", "x")))
    store.ask(StoredRequest("1" * 32, "c", "p", "q", "", "query", f"why: {about}.", 1.0))
    store.block(["a", "d", f"{SUBJECT}{about}"], at=7.0)
    store.block(["e"], at=8.0)
    store.remove(["a"])
    assert store.erase(["a", "d"], about) == {"judgements": 1, "requests": 1}
    assert store.of_subject(about) == []
    assert sorted(each.query for each in store.judgements()) == [f"of {about}0", "x"]
    assert store.blocked().subject(about)
    assert not store.blocked().subject("patient")
    assert store.readmit_subject(about) == 3
    assert len(store.blocked()) == 1


def test_documents_and_judgements_expire_by_their_source(store):
    store.put([Draft("old", "", "a", date=100), Draft("new", "", "b", date=900)], source="one")
    store.put([Draft("undated", "", "c")], source="one")
    store.put([Draft("other", "", "d", date=100)], source="two")
    now = time.time()
    assert store.expired("one", before=500, arrival=False) == ["old"]
    assert store.expired("one", before=now + 60, arrival=False) == ["new", "old", "undated"]
    assert store.expired("one", before=500, arrival=True) == []
    assert store.expired("one", before=now + 60, arrival=True) == ["new", "old", "undated"]
    store.judge(Judgement("q", "new", True, "p", 10.0), Judgement("r", "new", True, "p", 20.0))
    store.judge(Judgement("q", "other", True, "p", 10.0))
    assert store.expired_judgements("one", before=15.0) == 1
    assert store.expired_judgements("one", before=15.0, forget=True) == 1
    assert store.count_judgements() == 2
    store.put([Draft("old", "", "changed", date=100)], source="one")
    assert store.expired("one", before=now - 60, arrival=True) == [], "a change is no arrival"
