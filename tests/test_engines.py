"""Every engine behind the protocol does the same: candidates, counts, vocabulary, vectors, crashes.

The oracle is `ExactReader`, which counts everything in memory, and a central BM25 index.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tantivy

from isthmus.engines import (
    ANY,
    BY_FIELD,
    LEAD_WORDS,
    STOP,
    Change,
    Constraints,
    EmbeddedEngine,
    ExactReader,
    embedded,
    growing,
    lead_end,
)
from isthmus.engines.embedded import Generation
from isthmus.engines.vector_folders import VectorFolders
from isthmus.engines.vocabulary import named, ranked
from isthmus.retrieval import BM25, FIELD_TABLES, TEXT, summed
from isthmus.service.candidates import Snapshot
from isthmus.service.encoding import NoQueries
from isthmus.service.index import Index
from isthmus.service.settings import EncoderSettings
from isthmus.service.stores import Draft, SqliteStore
from isthmus.tables import Documents, Queries

WORDS = ("red apples and green pears by the waves of a sea with iron bridges over long rivers").split()  # noqa: SIM905
QUERIES = ("pears", "the sea and the sea pears", "green bridges rivers", "nothing", "", "the of and")


DAY = 86_400
LABELS = (("pdf", 0), ("txt", 400 * DAY), ("", -30 * DAY), ("pdf", None), ("c++ x", 15_000 * DAY), ("", None))
"""Types and dates that documents have in turn."""


def texts(count, seed=0, longest=40):
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, len(WORDS) + 1)
    for at in range(count):
        title, body = (
            " ".join(rng.choice(WORDS, int(size), p=share / share.sum()))
            for size in rng.integers(0, longest, 2)
        )
        yield Change(f"d{at:04d}", at + 1, False, title, body, "", *LABELS[at % len(LABELS)])


def changed(changes, seed=1):
    """Some documents again under later numbers, some removed."""
    rng = np.random.default_rng(seed)
    after = changes[-1].change
    for at in rng.choice(len(changes), len(changes) // 3, replace=False).tolist():
        after += 1
        gone = bool(rng.random() < 0.4)
        body = "" if gone else "other " + " ".join(rng.choice(WORDS, 6))
        yield Change(
            changes[at].id, after, gone, "", body, "", *("", None) if gone else ("html", after * DAY)
        )


@pytest.fixture(params=["embedded"])
def engine(request, tmp_path):
    made = {"embedded": EmbeddedEngine}[request.param](tmp_path / "engine")
    yield made
    made.close()


def hits(reader, query, depth=20):
    snapshot = Snapshot(reader, NoQueries())
    found = snapshot.find(query, depth)
    rows = zip(found.scores["bm25"].tolist(), found.documents, found.listed["bm25"], strict=True)
    return sorted(((score, id) for score, id, inside in rows if inside), reverse=True)


def same(reader, exact):
    """All that the protocol says of the documents."""
    assert (len(reader), reader.change, reader.lengths) == (len(exact), exact.change, exact.lengths)
    handles = reader.handles()
    np.testing.assert_array_equal(handles, exact.handles())
    assert reader.ids(handles) == exact.ids(handles)
    words = [*WORDS, "pear", "bridg", "river", "appl", STOP + "the", STOP + "and", "unknown", "other"]
    for mine, other in zip(
        vars(reader.counts(handles, words)).values(), vars(exact.counts(handles, words)).values(), strict=True
    ):
        np.testing.assert_array_equal(mine, other)
    for name, table in exact.tables(words).items():
        np.testing.assert_array_equal(reader.tables(words)[name], table, name)
    for some in (None, handles[::2]):
        terms, tables = reader.statistics(BY_FIELD, some)
        expected, counts = exact.statistics(BY_FIELD, some)
        assert terms.tolist() == expected.tolist()
        for name in BY_FIELD:
            np.testing.assert_array_equal(tables[name], counts[name])
    assert spelled(reader, handles[::3]) == spelled(exact, handles[::3])
    assert reader.changed_after(5) == exact.changed_after(5)
    for query in QUERIES:
        assert hits(reader, query) == hits(exact, query)


def spelled(reader, handles):
    counted, words = reader.terms(handles), reader.words()
    rows = (counted.document, counted.word, counted.times, counted.lead)
    return sorted((row, words[code], times, lead) for row, code, times, lead in zip(*rows, strict=True))


def test_an_engine_is_the_exact_one_through_changes_and_a_restart(engine, tmp_path):
    first = list(texts(150))
    later = list(changed(first))
    for batch in (first[:1], first[1:90], first[90:]):
        engine.apply(batch)
    same(engine.reader, ExactReader(first))
    before = engine.reader
    engine.apply(later)
    same(engine.reader, ExactReader([*first, *later]))
    same(before, ExactReader(first))  # a search that began ends with what it began with
    engine.apply([*first[-5:], *later])
    same(engine.reader, ExactReader([*first, *later]))
    engine.close()
    again = type(engine)(tmp_path / "engine")
    same(again.reader, ExactReader([*first, *later]))
    last = {each.id: each for each in (*first, *later)}
    again.rebuild([sorted((each for each in last.values() if not each.removed), key=lambda c: c.change)])
    assert again.wasted == 0
    again.close()


TERMS = ("red", "appl", "green", "pear", "wave", "sea", "iron", "bridg", "river", "other", "unknown")


def some_constraints(rng):
    """Phrases of up to three terms, prefixes and exclusions; all of stop words now and then."""
    marked = [STOP + word for word in ("and", "by", "the", "of", "a")]

    def phrases(most):
        vocabulary = marked if rng.random() < 0.2 else [*TERMS[:9], *marked[:1]]
        sizes = rng.integers(1, 4, int(rng.integers(0, most + 1)))
        return tuple(tuple(rng.choice(vocabulary, int(size)).tolist()) for size in sizes)

    def some(values, most):
        return tuple(rng.choice(values, int(rng.integers(0, most + 1))).tolist())

    def bound(low, high):
        return None if rng.random() < 0.7 else int(rng.integers(low, high)) * DAY

    prefixes = some(["r", "pe", "appl", "x", "unk"], 1)
    types = ["pdf", "txt", "c++ x", "html", "none"]
    if rng.random() < 0.4:
        return Constraints(phrases(1), prefixes, phrases(2))
    words = (phrases(1), prefixes, phrases(1)) if rng.random() < 0.3 else ()
    return Constraints(
        *words, types=some(types, 2), other_types=some(types, 1), since=bound(-40, 300), until=bound(0, 500)
    )


def test_phrases_prefixes_and_exclusions_are_those_of_the_exact_reader(engine, tmp_path):
    first = list(texts(300, longest=25))
    later = list(changed(first))
    engine.apply(first)
    engine.apply(later)
    exact, rng = ExactReader([*first, *later]), np.random.default_rng(7)
    sizes = []
    for _ in range(200):
        only = some_constraints(rng)
        wanted = exact.meeting(exact.handles(), only)
        sizes.append(len(wanted))
        np.testing.assert_array_equal(engine.reader.meeting(exact.handles(), only), wanted, str(only))
        some = exact.handles()[::3]
        np.testing.assert_array_equal(engine.reader.meeting(some, only), exact.meeting(some, only))
        weights = dict.fromkeys(rng.choice(TERMS, 2).tolist(), 1.0)
        np.testing.assert_array_equal(
            engine.reader.matching(weights, 400, only), exact.matching(weights, 400, only), str(only)
        )
        counted = engine.reader.matches(weights, only)
        assert counted == exact.matches(weights, only)
        assert counted.count == len(exact.matching(weights, 400, only))
    assert 0 < np.mean(np.array(sizes) == 0) < 0.7  # some meet nothing, some do


def test_the_newest_come_first_and_all_are_counted(engine):
    first = list(texts(60))
    later = list(changed(first))
    engine.apply(first)
    engine.apply(later)
    exact = ExactReader([*first, *later])
    date = {each.change: -np.inf if each.date is None else each.date for each in exact.documents}
    for only in (ANY, Constraints(types=("pdf",)), Constraints(since=0), Constraints(phrases=(("pear",),))):
        listed = engine.reader.newest(100, only).tolist()
        assert sorted(listed) == sorted(exact.newest(100, only).tolist())
        assert [date[at] for at in listed] == sorted((date[at] for at in listed), reverse=True)
        assert [date[at] for at in engine.reader.newest(7, only).tolist()] == [date[at] for at in listed[:7]]
        assert engine.reader.matches([], only) == exact.matches([], only)
    assert exact.matches([], ANY).years[1970] > 1
    assert engine.reader.matches(["nobody"]).count == 0
    assert not len(engine.reader.newest(0, ANY))


def test_terms_by_their_beginning_the_most_frequent_first(engine):
    engine.apply(first := list(texts(80)))
    exact = ExactReader(first)
    for prefix in ("", "r", "pe", "bri", "nothing", "="):
        assert engine.reader.beginning(prefix) == exact.beginning(prefix)
    assert engine.reader.beginning("", 3) == exact.beginning("", 3)
    assert not any(term.startswith(STOP) for term, _ in engine.reader.beginning(""))


def test_the_best_of_a_phrase_are_found_among_many_without_it(engine):
    bodies = ["green sea " * 20 + "pears " * (at % 50) for at in range(1500)]
    many = [Change(f"m{at}", at + 1, False, "", body) for at, body in enumerate(bodies)]
    engine.apply([*many, Change("it", 1501, False, "", "sea of green " + "bridges " * 60)])
    weights = {"green": 1.0, "sea": 1.0}
    assert 1501 not in engine.reader.matching(weights, 10)
    only = Constraints(phrases=(("bridg", "bridg"),))
    assert engine.reader.matching(weights, 10, only).tolist() == [1501]
    assert not len(engine.reader.matching(weights, 10, Constraints(without=(("green",),))))


def test_no_phrase_reaches_from_a_title_into_the_body(engine):
    engine.apply([Change("a", 1, False, "the iron", "bridges of the sea")])
    for phrase, meets in (
        (("iron", "bridg"), []),
        (("bridg", "sea"), [1]),
        ((STOP + "the", STOP + "of"), []),
    ):
        assert engine.reader.meeting(np.array([1]), Constraints(phrases=(phrase,))).tolist() == meets


def test_the_nearest_under_constraints_are_all_that_there_are(engine, monkeypatch):
    first = list(texts(200))
    engine.apply(first)
    engine.recode("one", 8)
    vectors = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    engine.encode(engine.reader.handles(), vectors, [(0, 1)] * 200)
    exact = ExactReader(first, dict(enumerate(vectors, 1)))
    wanted = (
        Constraints(types=("pdf",)),
        Constraints(since=1, until=500 * DAY),
        Constraints(phrases=(("pear",),)),
    )
    for few in (20_000, 3):  # all that meet them are compared, or the nearest of all are looked through
        monkeypatch.setattr(embedded, "EXACT", few)
        for only in wanted:
            for depth in (1, 5, 40):
                near = engine.reader.nearest(vectors[3], depth, only)
                np.testing.assert_array_equal(near, exact.nearest(vectors[3], depth, only))
    assert not len(engine.reader.nearest(vectors[3], 5, Constraints(types=("none",))))


def test_totals_that_were_saved_long_ago_are_brought_up_to_date(tmp_path, monkeypatch):
    first = list(texts(60))
    engine = EmbeddedEngine(tmp_path / "engine")
    engine.apply(first)
    engine.close()  # saves totals
    engine = EmbeddedEngine(tmp_path / "engine")
    later = list(changed(first))
    engine.apply(later)
    engine._generation.rows.save_totals = lambda **_: None  # killed before it could
    engine.close()
    again = EmbeddedEngine(tmp_path / "engine")
    same(again.reader, ExactReader([*first, *later]))
    again.close()


class DiskFull(OSError):
    pass


def failing(monkeypatch, where, after):
    """Let the disk be full at one place, after so many writes there."""
    left = [after]

    def full(write):
        def maybe(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise DiskFull(errno.ENOSPC, "no space left")
            return write(*arguments, **options)

        return maybe

    owner, name = {
        "rows": (growing.os, "pwrite"),
        "tantivy": (Generation, "_index"),
        "manifest": (embedded, "replacing"),
        "vectors": (VectorFolders, "remove"),
    }[where]
    monkeypatch.setattr(owner, name, full(getattr(owner, name)))


@pytest.mark.parametrize(
    ("where", "after"),
    [*(("rows", at) for at in range(6)), ("tantivy", 0), ("manifest", 0), ("vectors", 0)],
)
def test_a_write_that_fails_changes_nothing_and_is_made_good(tmp_path, monkeypatch, where, after):
    first = list(texts(60))
    later = [*changed(first), Change("new", 900, False, "", "zanzibar pears")]
    engine = EmbeddedEngine(tmp_path / "engine")
    engine.apply(first)
    for _ in range(2):
        with monkeypatch.context() as patch:
            failing(patch, where, after)
            with pytest.raises(DiskFull):
                engine.apply(later)
        same(engine.reader, ExactReader(first))
    engine.apply(later)
    same(engine.reader, ExactReader([*first, *later]))
    engine.close()
    again = EmbeddedEngine(tmp_path / "engine")
    same(again.reader, ExactReader([*first, *later]))
    again.close()


def test_a_write_that_was_cut_short_is_written_again(tmp_path, monkeypatch):
    whole = growing.os.pwrite
    monkeypatch.setattr(growing.os, "pwrite", lambda to, content, at: whole(to, content[:7], at))
    engine, first = EmbeddedEngine(tmp_path / "engine"), list(texts(20))
    engine.apply(first)
    same(engine.reader, ExactReader(first))
    engine.close()


def test_after_a_failure_that_nobody_made_good_the_index_opens_as_it_was(tmp_path, monkeypatch):
    first = list(texts(60))
    engine = EmbeddedEngine(tmp_path / "engine")
    engine.apply(first)
    failing(monkeypatch, "manifest", 0)
    with pytest.raises(DiskFull):
        engine.apply(list(changed(first)))
    engine.close()
    monkeypatch.undo()
    again = EmbeddedEngine(tmp_path / "engine")
    assert again.reader.ids(again.reader.handles()) == [each.id for each in first]
    again.apply(list(changed(first)))
    same(again.reader, ExactReader([*first, *changed(first)]))
    again.close()


def test_a_document_that_is_gone_has_no_id_and_no_counts(engine):
    engine.apply([*texts(5), Change("d0002", 6, True, "", "")])
    for read in (engine.reader.ids, engine.reader.terms, lambda rows: engine.reader.counts(rows, ["pear"])):
        with pytest.raises(ValueError, match="is not here"):
            read(np.array([1, 3]))


@pytest.mark.parametrize("fails", ["rows", "tantivy"])
def test_an_index_that_cannot_be_read_now_is_left_as_it_is(tmp_path, monkeypatch, caplog, fails):
    engine = EmbeddedEngine(tmp_path / "engine")
    engine.apply(list(texts(20)))
    engine.close()

    def refuse(*_, **__):
        if fails == "rows":
            raise PermissionError(errno.EACCES, "Permission denied", "documents")
        raise ValueError('IoError { io_error: Os { code: 24, kind: Uncategorized, message: "Too many" } }')

    with monkeypatch.context() as patch:
        patch.setattr(*((growing, "open") if fails == "rows" else (tantivy, "Index")), refuse, raising=False)
        with pytest.raises(OSError, match="is left as it is") as error:
            EmbeddedEngine(tmp_path / "engine")
    assert error.value.errno == (errno.EACCES if fails == "rows" else errno.EMFILE)
    assert not caplog.records
    again = EmbeddedEngine(tmp_path / "engine")
    assert len(again.reader) == 20
    again.close()


def test_vectors_come_go_and_change_encoder(engine):
    first = list(texts(30))
    engine.apply(first)
    assert not len(engine.unencoded(9))
    engine.recode("one", 4)
    np.testing.assert_array_equal(engine.unencoded(9), engine.reader.handles()[:9])
    vectors = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[3] = 0
    engine.encode(engine.reader.handles(), vectors, [(0, 1)] * 30)
    exact = ExactReader(first, dict(enumerate(vectors, 1)))
    handles, query = exact.handles(), vectors[7]
    np.testing.assert_array_equal(engine.reader.nearest(query, 5), exact.nearest(query, 5))
    np.testing.assert_allclose(
        engine.reader.cosines(handles, query), exact.cosines(handles, query), atol=2e-3
    )
    np.testing.assert_allclose(engine.reader.vectors(handles), vectors, atol=1e-3)
    engine.apply([Change("d0007", 31, True, "", "")])
    assert 8 not in engine.reader.nearest(query, 30)
    old = engine.reader
    width = np.eye(30, 6, dtype=np.float32)[engine.reader.handles() % 30]
    engine.recode("two", 6, [(engine.reader.handles(), width, [(0, 1)] * len(width))])
    assert engine.encoder == "two"
    assert engine.reader.vectors(handles[:1]).shape == (1, 6)
    assert len(old.nearest(query, 5)) == 5, "a search that began ends with the old vectors"
    engine.recode("none", 0)
    assert not len(engine.reader.nearest(query, 5))


def test_depth_among_equal_documents_is_by_id(engine):
    engine.apply([Change(f"d{at:05d}", at + 1, False, "", "same words here") for at in range(1200)])
    assert [id for _, id in hits(engine.reader, "words", 5)] == [f"d{at:05d}" for at in range(1199, 1194, -1)]


def drafts(changes):
    return [Draft(each.id, each.title, each.body) for each in changes]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_merged_silos_are_one_central_index_over_either_store(tmp_path, request, kind):
    """Scores to the last bit, ties too, with documents of several silos scored by the statistics of all."""
    every = list(texts(400, seed=3))
    silos = []
    for at in range(2):
        if kind == "postgres" and at == 0:
            from isthmus.service.postgres import PostgresStore

            store = PostgresStore(request.getfixturevalue("postgres_url"))
        else:
            store = SqliteStore(tmp_path / f"{at}.db")
        request.addfinalizer(store.close)
        store.put(drafts(every[at::2]))
        silos.append(Index(tmp_path / f"i{at}", store, encoder=EncoderSettings("none")))
        request.addfinalizer(silos[-1].close)
        silos[-1].catch_up()
    tables = (TEXT, *FIELD_TABLES)
    total = summed(silo.snapshot.exact_statistics(f"s{at}", tables) for at, silo in enumerate(silos))
    documents = Documents(
        tuple(each.id for each in every),
        tuple(each.title for each in every),
        tuple(each.body for each in every),
        np.zeros(len(every), int),
    )
    central = BM25().index(documents)
    for query in QUERIES[:5]:
        merged = []
        for silo in silos:
            silo.share(total)
            found = silo.snapshot.find(query, 20)
            rows = zip(found.scores["bm25"].tolist(), found.documents, found.listed["bm25"], strict=True)
            merged += [(score, id) for score, id, inside in rows if inside]
        run = central.search(Queries(("q",), (query,), np.zeros(1, int), ("test",)), 20)
        expected = list(zip(run.scores.tolist(), run.documents.tolist(), strict=True))
        assert sorted(merged, reverse=True)[:20] == expected


WRITER = """
import sys
from pathlib import Path
from isthmus.service import index as indexing
from isthmus.service.settings import EncoderSettings
from isthmus.service.stores import Draft, SqliteStore
indexing.BATCH = 7
folder, first = Path(sys.argv[1]), int(sys.argv[2])
store = SqliteStore(folder / "documents.db")
index = indexing.Index(folder / "index", store, encoder=EncoderSettings("lsa", dimensions=4))
print("open", len(index.snapshot), index.snapshot.change, flush=True)
index.catch_up()
print("ready", flush=True)
for at in range(first, first + 100_000):
    store.put([Draft(f"d{at % 50}", "", f"number{at} red apples {at % 7} green pears")])
    index.update()
    print(at, index.snapshot.change, flush=True)
"""


def kill_while_indexing(folder, times, seed):
    """Kill a writer at random moments; whatever it acknowledged is there when the next one opens."""
    rng, at, change = np.random.default_rng(seed), 0, 0
    latest = {}
    for _ in range(times):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(at)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        word, documents, opened = writer.stdout.readline().split()
        assert word == "open"
        assert int(documents) >= len(latest)
        assert int(opened) >= change, "what was acknowledged is there before anything is brought in"
        assert writer.stdout.readline() == "ready\n"
        time.sleep(float(rng.uniform(0.01, 1.0)))
        os.kill(writer.pid, signal.SIGKILL)
        rest, warnings = writer.communicate()
        assert "built again" not in warnings
        for line in rest.split("\n")[:-1]:
            number, change = map(int, line.split())
            latest[f"d{number % 50}"] = number
            at = number + 1
    store = SqliteStore(folder / "documents.db")
    index = Index(folder / "index", store, encoder=EncoderSettings("lsa", dimensions=4))
    assert index.snapshot.change >= change
    for id, number in latest.items():  # before anything is brought in
        if store.get([id])[id].body.startswith(f"number{number} "):
            assert id in index.snapshot.find(f"number{number}", 3).documents
    index.catch_up()
    changes = list(store.living())
    same_words = [each.body.split()[0] for each in changes]
    assert len(index.snapshot) == len(changes) >= len(latest)
    for each, word in zip(changes, same_words, strict=True):
        assert each.id in index.snapshot.find(word, 3).documents
    exact = Snapshot(ExactReader(changes), NoQueries()).exact_statistics("n", (TEXT, *FIELD_TABLES))
    assert index.snapshot.exact_statistics("n", (TEXT, *FIELD_TABLES)).version == exact.version
    assert not len(index.engine.unencoded(1)), "every document has its vector"
    index.close()
    store.close()
    return len(latest)


@pytest.mark.soak
def test_a_killed_writer_loses_nothing(tmp_path, soak_count):
    assert kill_while_indexing(tmp_path, soak_count(3, 50), seed=0)


def test_files_of_a_commit_that_was_cut_short_do_not_stop_the_next_one(tmp_path):
    """tantivy numbers commits: after a kill the number comes again, and so do the names of its files."""
    changes = list(texts(20))
    engine = EmbeddedEngine(tmp_path / "killed")
    engine.apply(changes)
    engine.close()
    shutil.copytree(tmp_path / "killed", tmp_path / "other")
    later = [changes[3]._replace(change=21, body="pears")]
    engine = EmbeddedEngine(tmp_path / "other")
    engine.apply(later)
    engine.close()
    (left,) = (tmp_path / "other").glob("generation-*/tantivy/*.del")
    folder = tmp_path / "killed" / left.parent.relative_to(tmp_path / "other")
    shutil.copy(left, folder)  # as a process that was killed before it named the commit leaves it
    managed = json.loads((folder / ".managed.json").read_text())
    (folder / ".managed.json").write_text(json.dumps([*managed, left.name]))
    engine = EmbeddedEngine(tmp_path / "killed")
    engine.apply(later)
    assert engine.reader.change == 21
    assert len(engine.reader) == 20
    engine.close()


def test_a_lead_is_the_first_paragraph_and_short():
    for body, lead in (
        ("\n\nOne two.\n \nThree.", "\n\nOne two."),
        ("word " * 5000, "word " * LEAD_WORDS),
        ("x" * 5000, ""),
        ("潮汐能。" * 1000, "潮汐能。" * 500),
        ("short ", "short "),
        (" \t\n", " \t\n"),
    ):
        assert body[: lead_end(body)] == lead


def test_names_are_ranked_as_by_a_stable_sort():
    names = np.random.default_rng(1).integers(0, 300, 1_000).astype(np.uint64)
    assert ranked(names).tolist() == np.argsort(names, kind="stable").tolist()
    assert ranked(names[:0]).tolist() == []


def test_names_are_keyed_hashes_whatever_computes_them():
    """An index has them on disk: those of another release are the same."""
    texts, key = ("d1", "", "\u00e9\udc00", "x" * 500), bytes(range(16))
    hashes = [
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=key, digest_size=8) for text in texts
    ]
    assert named(texts, key).tolist() == [int.from_bytes(each.digest(), "little") for each in hashes]
