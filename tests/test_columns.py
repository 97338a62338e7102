"""The columns of a candidate: the same in every silo, and never lower for one more word of the query."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.engines import Change, ExactReader
from isthmus.learning import COLUMNS, OF_QUERY, RISING, SearchModel, Weights
from isthmus.private import family_of, released
from isthmus.retrieval import FIELD_TABLES, TEXT, summed
from isthmus.service.candidates import Snapshot
from isthmus.service.columns import ModelScorer, candidate_columns, eligible, query_columns, silo_rows
from isthmus.service.encoding import NoQueries

FAMILY = family_of("key", 1 << 12)
WORDS = ("tide", "wave", "harbour", "lamp", "bridge", "iron", "apple", "pear")


def reader(texts):
    return ExactReader([Change(f"d{at}", at + 1, False, *text) for at, text in enumerate(texts)])


def some_texts(count=40, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (" ".join(rng.choice(WORDS, rng.integers(3))), " ".join(rng.choice(WORDS, rng.integers(1, 30))))
        for _ in range(count)
    ]


def snapshot_of(texts, shared):
    return Snapshot(reader(texts), NoQueries(), shared, FAMILY)


@pytest.mark.parametrize("form", ["exact", "fields", "private"])
def test_a_document_has_the_same_columns_in_any_silo(form):
    texts = some_texts()
    tables = (TEXT, *FIELD_TABLES) if form == "fields" else (TEXT,)
    parts = [texts[:10], texts[10:]]
    statistics = [snapshot_of(part, None).exact_statistics("s", tables) for part in parts]
    if form == "private":
        statistics = [released(each, FAMILY, 1.0) for each in statistics]
    shared = summed(statistics)
    rows = {}
    for name, silo in {"whole": [texts], "silos": parts}.items():
        snapshots = [snapshot_of(part, shared) for part in silo]
        for snapshot, part in zip(snapshots, silo, strict=True):
            candidates = snapshot.find("tide lamp pear pear", 100)
            table = candidate_columns(snapshot, candidates, "")
            for document, row in zip(candidates.documents, table, strict=True):
                rows.setdefault(part[int(document[1:])], {})[name] = row
    assert len(rows) > 10
    for row in rows.values():
        np.testing.assert_allclose(row["whole"], row["silos"], rtol=1e-12)


@pytest.mark.parametrize("form", ["exact", "private"])
def test_a_query_of_stop_words_is_one_of_common_words(form):
    """Statistics of all silos have no stop words, whose idf would be that of words nobody has."""
    texts = [*some_texts(), ("the tide", "it is to be or not to be in the harbour")]
    statistics = snapshot_of(texts, None).exact_statistics("s", (TEXT,))
    shared = statistics if form == "exact" else released(statistics, FAMILY, 1.0)
    snapshot = snapshot_of(texts, shared)
    idf = OF_QUERY.index("idf")
    stopped, content = (query_columns(snapshot, snapshot.find(text, 10)) for text in ("to be", "tide"))
    assert stopped[idf] == 0 < content[idf]
    assert stopped[OF_QUERY.index("ln words")] == np.log(2)


BODY = st.lists(st.sampled_from(WORDS), min_size=2, max_size=25)


@given(title=st.lists(st.sampled_from(WORDS), max_size=4), body=BODY, data=st.data())
@pytest.mark.parametrize("noisy", [False, True])
def test_one_more_word_of_the_query_lowers_no_rising_column(noisy, title, body, data):
    query = data.draw(st.lists(st.sampled_from(WORDS[:5]), min_size=1, max_size=4))
    others = [at for at, word in enumerate(body) if word not in query]
    if not others:
        return
    more = list(body)
    more[data.draw(st.sampled_from(others))] = data.draw(st.sampled_from(query))
    texts = [*some_texts(), (" ".join(title), " ".join(body)), (" ".join(title), " ".join(more))]
    shared = snapshot_of(texts, None).exact_statistics("s", (TEXT,))
    if noisy:
        shared = released(shared, FAMILY, 0.1)
    snapshot = snapshot_of(texts, shared)
    candidates = snapshot.find(" ".join([*query, "unknown"]), 100)
    by_name = dict(zip(candidates.documents, candidate_columns(snapshot, candidates, ""), strict=True))
    if "d40" not in by_name:
        return
    before, after = (by_name[name][np.isin(COLUMNS, RISING)] for name in ("d40", "d41"))
    assert (np.nan_to_num(after) >= np.nan_to_num(before) - 1e-12).all()


def test_a_model_scores_the_candidates_of_bm25_unless_the_encoder_is_agreed():
    texts = some_texts()
    snapshot = snapshot_of(texts, None)
    candidates = snapshot.find("tide lamp", 100)
    size = len(COLUMNS)
    weights = np.zeros(size)
    weights[0] = 2.0
    scorer = ModelScorer(SearchModel("baseline", Weights(np.zeros(size), np.ones(size), weights)))
    scored = scorer.score(snapshot, candidates)
    assert scored.probabilities is None
    assert eligible(snapshot, candidates, "").sum() == len(scored.order)
    np.testing.assert_allclose(scored.scores, 2 * candidates.scores["bm25"] / candidates.most)
    (reasons, *_) = scorer.explain(snapshot, candidates, scored, 1)
    assert sum(each.contribution for each in reasons) == pytest.approx(scored.scores[scored.order[0]])


def test_rows_of_a_silo_are_what_a_search_orders():
    texts = some_texts()
    snapshot = snapshot_of(texts, None)
    names = snapshot.find("tide lamp", 100).documents
    grades = {"tide lamp": {names[0]: True, names[1]: False, "elsewhere": True}}
    rows = silo_rows(snapshot, ["tide lamp", "nothing here"], grades, folds=(0, 1), encoder="", depth=100)
    assert rows.relevant.sum() == 1
    assert rows.targets.tolist() == [2, 0]
    assert len(rows.table) == len(names)
    own = silo_rows(snapshot, ["tide lamp"], grades, folds=(0,), encoder="", depth=100, own=[names[0]])
    assert (own.relevant.sum(), own.targets[0], len(own.table)) == (0, 1, len(names) - 1)
