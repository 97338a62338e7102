"""Given published statistics and models, no answer depends on a document that the person may not see.

The same persons ask two silos: one has all documents, the other only those that they may see. The answers are
the same to the last byte, for all kinds of questions: by words, by vectors, by both, with constraints; with
counts, facets, spellings, explanations, digests of equal texts.
"""

from __future__ import annotations

from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.engines import ANYBODY, Change, Constraints, EmbeddedEngine, ExactReader
from isthmus.service.display import Extras
from isthmus.service.encoding import fit_lsa, save_lsa
from isthmus.service.index import Index
from isthmus.service.people import Person
from isthmus.service.scoring import Bm25Scorer, HybridScorer
from isthmus.service.searching import Searcher
from isthmus.service.settings import EncoderSettings
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Narrowing, NodeSearch, ScoreScale

WORDS = ["tide", "tides", "wave", "harbour", "harbor", "lamp", "keeper", "glacier", "granite", "monsoon"]
PERSONS = [None, Person("ada", frozenset({"doctors"})), Person("bob", frozenset({"nurses", "doctors"}))]
RULES = (
    (),
    ("everyone",),
    ("group:doctors",),
    ("group:nurses",),
    ("user:ada", "group:nurses"),
    ("user:eve",),
)
EXTRAS = Extras(matches=True, suggestions=True, key=b"k" * 16)
DAY = 86_400

texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join)
documents = st.lists(
    st.builds(
        lambda title, body, allow, type, date, language: {
            "title": title,
            "body": body,
            "allow": tuple(sorted(allow)),
            "type": type,
            "date": date,
            "language": language,
        },
        texts,
        texts,
        st.sampled_from(RULES),
        st.sampled_from(["", "pdf", "md"]),
        st.sampled_from([None, DAY, 400 * DAY, 800 * DAY]),
        st.sampled_from(["", "", "de"]),
    ),
    min_size=3,
    max_size=14,
)
narrowings = st.none() | st.builds(
    Narrowing,
    phrases=st.lists(st.sampled_from(["tide wave", "lamp", "harbour keeper"]), max_size=1),
    prefixes=st.lists(st.sampled_from(["ti", "har", "g"]), max_size=1),
    without=st.lists(st.sampled_from(["granite", "lamp keeper"]), max_size=1),
    types=st.lists(st.sampled_from(["pdf", "md"]), max_size=1),
    since=st.none() | st.just(10 * DAY),
)
questions = st.lists(
    st.builds(
        lambda query, only: NodeSearch(
            query=query, k=5, only=only, explain=True, matches=True, suggest=True, fold=True
        ),
        st.lists(st.sampled_from([*WORDS, "tidle", "harbuor"]), max_size=3).map(" ".join),
        narrowings,
    ).filter(lambda each: each.query.strip() or each.only is not None),
    min_size=1,
    max_size=5,
)


@cache
def encoder_file(folder):
    """An encoder that silos share: fitted elsewhere, on other texts."""
    generator = np.random.default_rng(3)
    path = Path(folder) / "encoder"
    save_lsa(fit_lsa([" ".join(generator.choice(WORDS, 8)) for _ in range(60)], dimensions=5), path)
    return path


_NUMBER = count()


def silo(folder, drafts):
    """A silo of these documents, indexed."""
    at = folder / f"silo-{next(_NUMBER)}"
    store = SqliteStore(at / "documents.db")
    store.put(drafts)
    index = Index(at / "index", store, encoder=EncoderSettings(path=encoder_file(folder)))
    index.catch_up()
    return index


def answers(index, asked, person, scorer):
    principals = ANYBODY if person is None else person.principals
    searcher = Searcher("north", index, index.store, scorer, 4)
    for question in asked:
        answer = searcher.search(question, snippets=True, extras=EXTRAS, principals=principals, model="1")
        evidence = [searcher.evidence(question.query, hit.document, principals) for hit in answer.hits]
        yield answer.model_copy(update={"took_ms": 0.0}).model_dump_json(), evidence


@settings(max_examples=12, deadline=None)
@given(documents, questions, st.booleans(), st.booleans())
def test_what_a_person_may_not_see_changes_no_byte_of_an_answer(
    tmp_path_factory, rows, asked, are_published, is_hybrid
):
    folder = tmp_path_factory.getbasetemp()
    drafts = [Draft(f"d{at}", **row) for at, row in enumerate(rows)]
    every = silo(folder, drafts)
    shared = every.snapshot.exact_statistics("all", ("text.having",)) if are_published else None
    every.share(shared)
    scale = ScoreScale(
        encoder=every.snapshot.encoder.fingerprint,
        bm25={"mean": 0.3, "deviation": 0.2},
        dense={"mean": 0.1, "deviation": 0.3},
    )
    scorer = HybridScorer(scale) if is_hybrid else Bm25Scorer()
    for person in PERSONS:
        principals = ANYBODY if person is None else person.principals
        seen = [each for each in drafts if not each.allow or principals & set(each.allow)]
        alone = silo(folder, seen)
        alone.share(shared)
        assert list(answers(every, asked, person, scorer)) == list(answers(alone, asked, person, scorer))
        alone.close()
    every.close()


@settings(max_examples=10, deadline=None)
@given(documents, st.sampled_from(PERSONS[1:]), st.randoms(use_true_random=False))
def test_an_embedded_reader_of_what_a_person_sees_is_that_of_a_smaller_silo(
    tmp_path_factory, rows, person, random
):
    """Method by method, beside the simplest reader there can be."""
    changes = [
        Change(f"d{at}", at + 1, False, row["title"], row["body"], "", row["type"], row["date"], row["allow"])
        for at, row in enumerate(rows)
    ]
    engine = EmbeddedEngine(tmp_path_factory.getbasetemp() / f"engine-{next(_NUMBER)}")
    for start in range(0, len(changes), 4):  # in several segments
        engine.apply(changes[start : start + 4])
    vectors = np.random.default_rng(len(rows)).normal(size=(len(rows), 6)).astype(np.float32)
    handles = np.arange(1, len(rows) + 1)
    engine.recode("six", 6, [(handles, vectors, [(0, 1)] * len(rows))])
    mine = engine.reader.seen_by(person.principals)
    exact = ExactReader(changes, dict(zip(handles.tolist(), vectors, strict=True))).seen_by(person.principals)
    words, query = ["tide", "lamp", "harbour"], random.choice(vectors.tolist())
    only = random.choice([None, Constraints(types=("pdf",)), Constraints(phrases=(("tide", "wave"),))])
    assert len(mine) == len(exact)
    assert mine.lengths == exact.lengths
    assert mine.handles().tolist() == exact.handles().tolist()
    assert mine.ids(mine.handles()) == exact.ids(exact.handles())
    for name, table in exact.tables(words).items():
        assert mine.tables(words)[name].tolist() == table.tolist()
    weights = dict.fromkeys(words, 1.0)
    assert mine.matching(weights, 2, only).tolist() == exact.matching(weights, 2, only).tolist()
    vector = np.array(query, dtype=np.float32)
    assert mine.nearest(vector, 3, only).tolist() == exact.nearest(vector, 3, only).tolist()
    assert mine.newest(4, only or Constraints()).tolist() == exact.newest(4, only or Constraints()).tolist()
    ours, theirs = mine.matches(words, only), exact.matches(words, only)
    assert (ours.count, dict(ours.types), dict(ours.years)) == (theirs.count, theirs.types, theirs.years)
    for prefix in ("t", "h", "x"):
        assert mine.beginning(prefix) == exact.beginning(prefix)
    engine.close()


@pytest.mark.parametrize("principals", [ANYBODY, frozenset({"user:*", "group:*", "group:everyone_"})])
def test_no_principal_is_taken_for_another(tmp_path, principals):
    """A person's own names are compared whole: neither marks nor prefixes open anything."""
    rules = [("group:doctors",), ("user:ada",), ("group:everyone",), ("user:everyone",)]
    index = silo(tmp_path, [Draft(f"d{at}", "tide", "tide", allow=rule) for at, rule in enumerate(rules)])
    assert not len(index.snapshot.reader.seen_by(principals))
    index.close()
