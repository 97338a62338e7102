"""The index: equal to one central index, equal however it came about, and whole after any crash."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import nbinom

from isthmus.arrays import Ids
from isthmus.encoders import Lsa
from isthmus.errors import ConfigError, PrivacyError, ProtocolError
from isthmus.features import NAMES, ExactCounts, Pairs, compute
from isthmus.private import totals
from isthmus.private.mechanisms import Geometric
from isthmus.private.totals import family_of, hashed, noised, read_alone, released
from isthmus.retrieval import BM25, FIELD_TABLES, TEXT, TIMES, Dense, Statistics, summed
from isthmus.service import index as indexing
from isthmus.service.encoding import LsaQueries, load_lsa, save_lsa
from isthmus.service.index import Index
from isthmus.service.settings import EncoderSettings
from isthmus.service.stores import Draft, SqliteStore
from isthmus.tables import Documents, Queries
from isthmus.text import tokenise

TOPICS = ("red apples and green pears", "waves of the sea", "iron bridges over rivers", "pears by the sea")


def world(count, seed=0):
    rng = np.random.default_rng(seed)
    words = " ".join(TOPICS).split()
    return [
        Draft(
            f"d{at:03d}",
            " ".join(rng.choice(words, rng.integers(0, 4))),
            " ".join(rng.choice(words, rng.integers(0, 12))),
        )
        for at in range(count)
    ]


def made(folder, drafts, **options):
    folder.mkdir(exist_ok=True)
    store = SqliteStore(folder / "documents.db")
    store.put(drafts)
    index = Index(folder / "index", store, **options)
    index.catch_up()
    return index


def as_documents(drafts):
    return Documents(
        tuple(draft.id for draft in drafts),
        tuple(draft.title for draft in drafts),
        tuple(draft.body for draft in drafts),
        np.zeros(len(drafts), int),
    )


def asked(texts):
    return Queries(
        tuple(f"q{at}" for at in range(len(texts))),
        tuple(texts),
        np.zeros(len(texts), int),
        ("test",) * len(texts),
    )


def listed(found, retriever):
    """A retriever's list, in trec_eval's order."""
    chosen = [
        (score, name)
        for score, name, inside in zip(
            found.scores[retriever], found.documents, found.listed[retriever], strict=True
        )
        if inside
    ]
    return sorted(chosen, reverse=True)


def central(drafts, query, k):
    (run,) = [BM25().index(as_documents(drafts)).search(asked([query]), k)]
    return list(zip(run.scores.tolist(), run.documents.tolist(), strict=True))


QUERIES = ("pears", "the sea and the sea pears", "green bridges", "nothing of it", "")


def test_a_node_alone_is_the_central_index(tmp_path):
    drafts = world(200)
    index = made(tmp_path / "n", drafts, encoder=EncoderSettings("none"))
    for query in QUERIES:
        assert listed(index.snapshot.find(query, 10), "bm25") == central(drafts, query, 10)


def test_with_exact_figures_merged_silos_are_one_index_to_the_last_bit(tmp_path):
    drafts = world(300, seed=1)
    silos = [made(tmp_path / f"s{at}", drafts[at::3], encoder=EncoderSettings("none")) for at in range(3)]
    figures = summed(silo.snapshot.exact_statistics(f"s{at}", [TEXT]) for at, silo in enumerate(silos))
    for silo in silos:
        silo.share(figures)
    for query in QUERIES:
        merged = sorted(
            (hit for silo in silos for hit in listed(silo.snapshot.find(query, 20), "bm25")), reverse=True
        )
        assert merged[:20] == central(drafts, query, 20)


def test_the_dense_list_is_the_dense_retrievers(tmp_path):
    drafts = world(150, seed=2)
    index = made(tmp_path / "n", drafts, encoder=EncoderSettings("lsa", dimensions=8))
    encoder = index.snapshot.encoder.encoder
    run = Dense(encoder).index(as_documents(drafts)).search(asked(["green pears"]), 10)
    found = listed(index.snapshot.find("green pears", 10), "dense")
    np.testing.assert_allclose([score for score, _ in found], run.scores, atol=1e-3)  # in half precision


def test_features_are_those_of_a_collection_one_may_read(tmp_path):
    drafts = world(120, seed=3)
    index = made(tmp_path / "n", drafts)
    found = index.snapshot.find("green pears by the green sea", 15)
    table = index.snapshot.features(found)
    title, body = (
        ExactCounts.of(tokenise([getattr(draft, part) for draft in drafts])) for part in ("title", "body")
    )
    rows = np.array([int(name[1:]) for name in found.documents])
    pairs = Pairs(np.zeros(len(rows), int), rows)
    expected = compute(tokenise(["green pears by the green sea"]), pairs, title=title, body=body)
    np.testing.assert_allclose(table[:, : len(NAMES)], expected, rtol=1e-9)
    np.testing.assert_array_equal(table[:, len(NAMES)], found.scores["bm25"])


def test_features_with_shared_figures_are_those_of_all_silos(tmp_path):
    drafts = world(120, seed=4)
    silos = [made(tmp_path / f"s{at}", drafts[at::2]) for at in range(2)]
    tables = (TEXT, *FIELD_TABLES)
    figures = summed(silo.snapshot.exact_statistics("s", tables) for silo in silos)
    silos[0].share(figures)
    found = silos[0].snapshot.find("green pears", 15)
    title, body = (
        ExactCounts.of(tokenise([getattr(draft, part) for draft in drafts])) for part in ("title", "body")
    )
    rows = np.array([int(name[1:]) for name in found.documents])
    expected = compute(
        tokenise(["green pears"]), Pairs(np.zeros(len(rows), int), rows), title=title, body=body
    )
    np.testing.assert_allclose(silos[0].snapshot.features(found)[:, : len(NAMES)], expected, rtol=1e-9)


def test_private_figures_have_noise_once_and_add(tmp_path):
    drafts = world(200, seed=5)
    family = family_of("federation", 512)
    silos = [
        made(tmp_path / f"s{at}", drafts[at::2], encoder=EncoderSettings("none"), family=family)
        for at in range(2)
    ]
    exact = [silo.snapshot.exact_statistics(f"s{at}", [TEXT]) for at, silo in enumerate(silos)]
    total = summed(released(each, family, 50.0) for each in exact)
    assert total.documents == 200
    words = list(summed(exact).words)
    np.testing.assert_allclose(total.counts(TEXT, words, family), summed(exact).counts(TEXT, words), atol=0.2)
    silos[0].share(total)
    assert len(silos[0].snapshot.find("pears", 10))
    assert silos[0].snapshot.shared.version == total.version != exact[0].version


def test_a_noisy_count_becomes_its_posterior_mean():
    law = Geometric(0.5)
    seen = np.array([-100, -3, 0, 3, 40, 5000])
    means = read_alone(seen, law.rate)
    assert (np.diff(means) > -1e-9).all()
    assert means[0] == pytest.approx(means[2]), "whatever is below 0 says the same"
    assert 0 < means[0] < means[3] < 3
    assert means[-1] == 5000
    count = np.arange(512)
    prior = np.append(0.2, 0.8 * count[1:] ** -1.5 / (count[1:] ** -1.5).sum())
    posterior = prior * np.exp(-0.5 * abs(3 - count))
    assert means[3] == pytest.approx((posterior @ count) / posterior.sum())
    exact = np.repeat([0, 1, 2, 5, 20], 4000)
    noisy = exact + law.draw(len(exact))
    assert np.mean((read_alone(noisy, law.rate) - exact) ** 2) < 0.6 * np.mean((noisy - exact) ** 2)


def test_counts_of_few_documents_are_read_with_what_public_text_has(monkeypatch):
    law, rng = Geometric(0.5), np.random.default_rng(3)
    expected = np.repeat([0.0, 1.0, 5.0, 15.0], 3000)
    exact = rng.poisson(rng.gamma(0.5, np.maximum(expected, 0.02) / 0.5))
    noisy = exact + law.draw(len(exact))
    read, alone = read_alone(noisy, law.rate, expected), read_alone(noisy, law.rate)
    for few in np.unique(expected):
        chosen = expected == few
        errors = [np.mean((each[chosen] - exact[chosen]) ** 2) for each in (read, alone)]
        assert errors[0] < errors[1], few
    count = np.arange(512)
    law_of_count = nbinom(0.5, 0.5 / (0.5 + 5.0)).pmf(count)
    prior = 0.7 * law_of_count + 0.3 * np.append(0.2, 0.8 * count[1:] ** -1.5 / (count[1:] ** -1.5).sum())
    posterior = prior * np.exp(-0.5 * abs(4 - count))
    (mean,) = read_alone(np.array([4]), law.rate, np.array([5.0]))
    assert mean == pytest.approx((posterior @ count) / posterior.sum())
    assert read_alone(np.array([5000]), law.rate, np.array([5.0])) == 5000

    terms, family = Ids.of(("default", "pear")), family_of("federation", 1 << 12)
    hopes = []
    monkeypatch.setattr(totals, "read_alone", lambda noisy, _, hope: hopes.append(hope) or noisy)
    for documents in (totals.FEW, totals.FEW + 1):
        tables = {TEXT: np.array([3, 1])}
        released(Statistics(documents, {"body": 900}, tables, terms, ("north",)), family, 1.0)
    assert hopes[1] is None
    assert hopes[0][family.of_vocabulary(terms).cells[0]].tolist() == [totals.FEW / 2, 0.0]


def test_figures_from_elsewhere_are_whole_or_refused():
    words = ("apple", "pear")
    tables = {TEXT: np.array([3, 1])}
    exact = Statistics(5, {"title": 2, "body": 9}, tables, Ids.of(words), ("north",))
    assert Statistics.from_bytes(exact.to_bytes()).version == exact.version
    family = family_of("federation", 64)
    private = released(exact, family, 1.0)
    with pytest.raises(ProtocolError, match="another hash key"):
        private.counts(TEXT, ["pear"], family_of("others", 64))
    short = replace(private, tables={TEXT: np.zeros(3, np.int64)})
    with pytest.raises(ProtocolError, match="out of bounds: cells"):
        Statistics.from_bytes(short.to_bytes()).counts(TEXT, ["pear"], family)
    with pytest.raises(ProtocolError, match="do not add up"):
        summed([exact, private])
    for wrong in (
        replace(exact, documents=-1),
        replace(exact, lengths={"body": -9}),
        replace(exact, terms=Ids.of(("pear", "apple"))),
        replace(exact, terms=Ids.of(("pear",))),
        replace(exact, tables={"other": tables[TEXT]}),
    ):
        with pytest.raises(ProtocolError, match=r"known form|belong together"):
            Statistics.from_bytes(wrong.to_bytes())
    rng, whole = np.random.default_rng(0), exact.to_bytes()
    for _ in range(500):
        damaged = bytearray(whole)
        for at in rng.integers(len(damaged), size=3):
            damaged[at] = rng.integers(256)
        with contextlib.suppress(ProtocolError):
            Statistics.from_bytes(bytes(damaged)[: rng.integers(1, 2 * len(damaged))])


def test_bm25_reads_private_statistics_with_their_hash_family_only():
    texts = ["pear apple", "pear", "plum"] * 40
    documents = Documents(tuple(map(str, range(120))), ("",) * 120, tuple(texts), np.zeros(120, int))
    exact, family = Statistics.of(tokenise(texts)), family_of("federation", 1 << 12)
    private = released(replace(exact, tables={TEXT: exact.tables[TEXT]}), family, 1e4)
    with pytest.raises(ConfigError, match="hash family"):
        BM25().index(documents, statistics=private)
    with pytest.raises(ProtocolError, match="another hash key"):
        BM25().index(documents, statistics=replace(private, family=family_of("others", 1 << 12)))
    named = replace(private, family=family)
    words = tokenise(["pear apple plum"]).terms
    assert named.unit > 1
    assert named.counts_of(words) == pytest.approx(exact.counts_of(words), abs=0.1)
    queries = Queries(("q",), ("apple plum",), np.zeros(1, int), ("test",))
    scores = BM25().index(documents, statistics=named).search(queries, 9).scores
    assert scores == pytest.approx(BM25().index(documents).search(queries, 9).scores, rel=0.01)


def test_cells_without_noise_know_what_they_are_and_do_not_leave():
    exact = replace(Statistics.of(tokenise(["pear apple", "pear"])), silos=("north",))
    family = family_of("federation", 64)
    cells = hashed(exact, family)
    private = noised(cells, {TEXT: 0.5, TIMES: 0.25})
    assert (exact.form, cells.form, private.form) == ("exact", "cells", "private")
    assert (cells.epsilon, private.epsilon) == (None, 0.75)
    for secret in (cells, cells + cells, noised(cells, {TEXT: np.inf, TIMES: np.inf})):
        with pytest.raises(PrivacyError, match="without noise"):
            secret.to_bytes()
    for one, other in ((cells, private), (private, cells)):
        with pytest.raises(ProtocolError, match="do not add up"):
            one + other
    assert exact.to_bytes()
    assert private.to_bytes()


def test_a_sum_of_noised_cells_knows_its_noise():
    exact = Statistics.of(tokenise(["pear"]))
    cells = hashed(exact, family_of("federation", 64))
    first, second = (noised(cells, dict.fromkeys((TEXT, TIMES), epsilon)) for epsilon in (0.5, 2.0))
    total = replace(first, about={"draw": "ab"}) + second
    assert total.epsilon == (second + first).epsilon == 1.0, "the least: it bounds the noise of every part"
    assert total.about == {}, "a sum is no draw"
    for table in (TEXT, TIMES):
        variances = [Geometric(part.rates[table]).variance for part in (first, second, total)]
        assert variances[2] == pytest.approx(variances[0] + variances[1])
    endless = noised(cells, dict.fromkeys((TEXT, TIMES), np.inf))
    assert (endless + endless).rates[TEXT] == np.inf


batches = st.lists(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.none() | st.sampled_from(TOPICS)), min_size=1, max_size=6
    ),
    max_size=8,
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=batches, reopen=st.booleans())
def test_an_index_grown_by_changes_equals_one_built_at_once(batches, reopen, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grown")
    encoder = EncoderSettings("lsa", path=folder / "lsa")
    save_lsa(Lsa.fit(TOPICS, dimensions=3), folder / "lsa")
    store = SqliteStore(folder / "documents.db")
    index = Index(folder / "index", store, encoder=encoder)
    for batch in batches:
        for id, text in batch:
            if text is None:
                store.remove([id])
            else:
                store.put([Draft(id, id, text)])
            index.update()
        if reopen:
            index.close()
            index = Index(folder / "index", store, encoder=encoder)
    index.catch_up()
    fresh = Index(folder / "fresh", store, encoder=encoder)
    fresh.catch_up()
    assert len(index.snapshot) == len(fresh.snapshot) == store.count()
    for query in (*TOPICS, "a", "nothing"):
        mine, other = index.snapshot.find(query, 3), fresh.snapshot.find(query, 3)
        assert listed(mine, "bm25") == listed(other, "bm25")
        assert ("dense" in mine.scores) == ("dense" in other.scores)
        if "dense" in other.scores:  # a product of another shape may round its last bit otherwise
            cosines = [[score for score, _ in listed(each, "dense")] for each in (mine, other)]
            np.testing.assert_allclose(*cosines, atol=1e-6)
    tables = (TEXT, *FIELD_TABLES)
    own, afresh = (each.snapshot.exact_statistics("n", tables) for each in (index, fresh))
    assert own.version == afresh.version
    index.compact()
    own, afresh = (each.snapshot.exact_statistics("n", tables) for each in (index, fresh))
    assert own.version == afresh.version
    store.close()


def test_many_small_batches_are_one_index(tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH", 5)
    index = made(tmp_path / "n", world(137), encoder=EncoderSettings("none"))
    assert listed(index.snapshot.find("pears", 30), "bm25") == central(world(137), "pears", 30)


def test_what_is_removed_is_gone_from_disk_after_compacting(tmp_path):
    index = made(tmp_path / "n", [*world(20), Draft("x", "", "zanzibar")], encoder=EncoderSettings("none"))
    index.store.remove(["x"])
    index.catch_up()
    assert not len(index.snapshot.find("zanzibar", 5))
    index.compact()
    files = [path for path in (tmp_path / "n" / "index").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"zanzibar" in path.read_bytes()]
    assert listed(index.snapshot.find("pears", 9), "bm25") == central(world(20), "pears", 9)


def test_a_fitted_encoder_forgets_the_words_of_what_was_removed(tmp_path):
    index = made(tmp_path / "n", [*world(20), Draft("x", "", "zanzibar")])
    index.store.remove(["x"])
    index.catch_up()
    assert "zanzibar" in load_lsa(index.folder / "encoder").terms.words
    index.compact()
    assert "zanzibar" not in load_lsa(index.folder / "encoder").terms.words
    assert len(index.snapshot.find("pears", 5).listed["dense"])


def test_an_index_of_mostly_dead_versions_is_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "FEW", 10)
    index = made(tmp_path / "n", world(20), encoder=EncoderSettings("none"))
    for round in range(3):
        index.store.put([Draft(draft.id, f"round{round}", draft.body) for draft in world(20)])
        index.catch_up()
    assert index.engine.wasted <= 20
    changed = [Draft(draft.id, "round2", draft.body) for draft in world(20)]
    assert listed(index.snapshot.find("round2 pears", 9), "bm25") == central(changed, "round2 pears", 9)


@pytest.mark.parametrize("kind", ["none", "lsa"])
def test_words_of_a_removed_document_leave_the_disk_within_a_day(tmp_path, monkeypatch, kind):
    encoder = EncoderSettings(kind)
    drafts = [*world(20), Draft("x", "", "zanzibar"), Draft("y", "", "zanzibar pears")]
    index = made(tmp_path / "n", drafts, encoder=encoder)
    removed = time.time()
    index.store.remove(["x", "y"])
    index.catch_up()
    index.close()
    again = Index(tmp_path / "n" / "index", index.store, encoder=encoder)

    def words_there():
        files = [path for path in (tmp_path / "n" / "index").rglob("*") if path.is_file()]
        return any(b"zanzibar" in path.read_bytes() for path in files)

    for hours, there in ((23, True), (25, False)):
        monkeypatch.setattr(indexing.time, "time", lambda hours=hours: removed + hours * 3600)
        reader = again.snapshot.reader
        again.maintain()
        assert words_there() == there
        assert len(reader.matching({"pear": 1.0}, 9)), "a search that began ends"
    assert again.engine.wasted == again.behind == 0
    assert listed(again.snapshot.find("pears", 9), "bm25") == central(world(20), "pears", 9)
    number = again.engine._state["generation"]
    monkeypatch.setattr(indexing.time, "time", lambda: removed + 90 * 3600)
    again.maintain()
    assert again.engine._state["generation"] == number, "nothing is gone: nothing is done"


def test_after_most_documents_went_the_index_is_written_anew_once(tmp_path, caplog):
    caplog.set_level("INFO", "isthmus")
    drafts = [Draft(f"d{at:04d}", "", f"pears number{at}") for at in range(3000)]
    index = made(tmp_path / "n", drafts, encoder=EncoderSettings("none"))
    index.store.remove([draft.id for draft in drafts[1000:]])
    for _ in range(10):
        if not index.update():
            break
    assert index.behind == 0
    assert [record.message for record in caplog.records if "written anew" in record.message][1:] == []
    index.close()
    again = Index(tmp_path / "n" / "index", index.store, encoder=EncoderSettings("none"))
    assert (again.behind, again.update(), again.engine.wasted) == (0, 0, 0)
    assert listed(again.snapshot.find("pears", 9), "bm25") == central(drafts[:1000], "pears", 9)
    index.store.put(drafts[:1])
    index.store.remove([drafts[1].id])
    again.catch_up()
    assert (again.behind, len(again.snapshot)) == (0, 999)


TANTIVY = ["meta.json", "*.term", "*.idx", "*.fast", "*.fieldnorm"]


@pytest.mark.parametrize(
    "damage",
    [
        *("manifest.json", "documents", "terms", "words", "spelling", "totals", "state", "encoder", "fitted"),
        *TANTIVY,
    ],
)
def test_a_damaged_index_is_built_again(tmp_path, damage):
    index = made(tmp_path / "n", world(30))
    before = [listed(index.snapshot.find("pears", 10), name) for name in ("bm25", "dense")]
    index.close()
    path = next((tmp_path / "n" / "index").rglob(damage))
    path.write_bytes(path.read_bytes()[:-40])
    again = Index(tmp_path / "n" / "index", index.store)
    again.catch_up()
    after = [listed(again.snapshot.find("pears", 10), name) for name in ("bm25", "dense")]
    assert after[0] == before[0]
    assert {name for _, name in after[1]} == {name for _, name in before[1]}


def emptied(folder):
    for path in folder.iterdir():
        path.unlink()


def without_segments(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "segments": []}))


@pytest.mark.parametrize("damage", [emptied, without_segments])
def test_documents_that_only_the_rows_know_are_indexed_again(tmp_path, damage, caplog):
    index = made(tmp_path / "n", world(30), encoder=EncoderSettings("none"))
    index.close()
    (folder,) = (tmp_path / "n" / "index").glob("generation-*/tantivy")
    damage(folder)
    again = Index(tmp_path / "n" / "index", index.store, encoder=EncoderSettings("none"))
    assert "lacks documents that it had" in caplog.text
    again.catch_up()
    assert listed(again.snapshot.find("pears", 9), "bm25") == central(world(30), "pears", 9)


def test_a_warm_start_reads_no_document(tmp_path):
    index = made(tmp_path / "n", world(50))
    index.close()
    again = Index(tmp_path / "n" / "index", index.store)
    assert again.behind == 0
    assert again.snapshot.change == index.snapshot.change
    assert listed(again.snapshot.find("sea", 5), "dense") == listed(index.snapshot.find("sea", 5), "dense")


def test_the_encoder_is_fitted_again_when_the_silo_has_grown(tmp_path):
    index = made(tmp_path / "n", world(20))
    first = index.snapshot.encoder.fingerprint
    index.store.put(world(30)[20:])
    index.catch_up()
    assert index.snapshot.encoder.fingerprint == first
    index.store.put(world(90)[30:])
    index.catch_up()
    assert index.snapshot.encoder.fingerprint != first
    whole = [f"{draft.title}\n{draft.body}" if draft.title else draft.body for draft in world(90)]
    fitted = Lsa.fit(whole, dimensions=128)
    assert index.snapshot.encoder.fingerprint == fitted.fingerprint
    vectors = index.snapshot.reader.vectors(index.snapshot.reader.handles())
    np.testing.assert_allclose(vectors, fitted.encode(whole), atol=1e-3)


def test_no_search_fails_while_documents_come_and_go(tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH", 7)
    store = SqliteStore(tmp_path / "documents.db")
    always = [Draft(f"always{at}", "", "lighthouse by the sea") for at in range(5)]
    store.put(always)
    index = Index(tmp_path / "index", store)
    index.catch_up()
    done, failures, searches = threading.Event(), [], 0

    def search():
        nonlocal searches
        while not done.is_set():
            found = index.snapshot.find("lighthouse", 50)
            searches += 1
            if not {draft.id for draft in always} <= set(found.documents):
                failures.append(found.documents)

    searcher = threading.Thread(target=search)
    searcher.start()
    for round in range(12):
        store.put([Draft(f"d{round}-{at}", "", TOPICS[at % 4]) for at in range(10)])
        store.remove([f"d{round - 1}-{at}" for at in range(10)])
        store.put([Draft("always0", f"version {round}", "lighthouse by the sea")])
        index.catch_up()
    done.set()
    searcher.join()
    assert not failures
    assert searches > 5


def test_a_saved_encoder_encodes_as_it_did(tmp_path):
    encoder = Lsa.fit(TOPICS, dimensions=3)
    save_lsa(encoder, tmp_path / "lsa")
    again = load_lsa(tmp_path / "lsa")
    assert again.fingerprint == encoder.fingerprint
    quick = LsaQueries(again)
    for text in ("pears pears by the sea", "unknown", ""):
        np.testing.assert_allclose(
            quick.query(text, tokenise([text]).words(0)), encoder.encode([text])[0], atol=1e-6
        )


def test_candidates_as_if_a_retriever_were_not_there(tmp_path):
    index = made(tmp_path, world(60), encoder=EncoderSettings(dimensions=4))
    both = index.snapshot.find("pears by the sea", 10)
    bm25 = both.without("dense")
    assert listed(bm25, "bm25") == listed(both, "bm25")
    assert set(bm25.scores) == {"bm25"}
    assert len(bm25) == bm25.listed["bm25"].sum() < len(both)
