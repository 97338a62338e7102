"""What holds for every table: orders, cuts, joins, and that files give back what was written."""

from __future__ import annotations

import itertools
import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from isthmus.arrays import Ids
from isthmus.tables import (
    UNJUDGED,
    Letor,
    Qrels,
    Run,
    read_letor,
    read_qrels,
    read_run,
    write_letor,
    write_qrels,
    write_run,
)

texts = st.text(st.characters(codec="utf-8"), max_size=6)
words = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters=" \ufeff#"),
    min_size=1,
    max_size=6,
)
scores = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-3, 3).map(float)
grades = st.integers(-(2**31) + 1, 2**31 - 1) | st.integers(-2, 4)
values = st.floats(width=32, allow_nan=False, allow_infinity=False)


def lists_of(ids, numbers, min_size=0):
    return st.dictionaries(ids, st.dictionaries(ids, numbers, min_size=min_size, max_size=6), max_size=6)


@st.composite
def letors(draw):
    rows, width = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    queries = draw(
        st.lists(st.sampled_from(draw(st.lists(words, min_size=1, max_size=3))), min_size=rows, max_size=rows)
    )
    features = draw(
        st.lists(
            st.lists(values | st.just(math.nan), min_size=width, max_size=width), min_size=rows, max_size=rows
        )
    )
    judged = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    documents = draw(st.none() | st.lists(words, min_size=rows, max_size=rows, unique=True))
    return Letor.of(queries, features, judged, documents=documents)


@given(st.lists(texts))
def test_codes_are_an_order_preserving_encoding(column):
    ids = Ids.of(column)
    assert ids.tolist() == column
    for one, two in itertools.pairwise(column):
        codes = ids.codes[column.index(one)], ids.codes[column.index(two)]
        assert (codes[0] < codes[1]) == (one.encode() < two.encode())


@given(lists_of(texts, scores))
def test_a_run_is_its_dictionary_in_trec_evals_order(lists):
    run = Run.from_dict(lists)
    assert run.to_dict() == lists
    for query, documents, _ in run.lists():
        by_rule = sorted(lists[query], key=lambda d: (lists[query][d], d.encode()), reverse=True)
        assert documents == by_rule


@given(lists_of(texts, scores), st.integers(0, 7))
def test_the_best_k_are_the_first_k(lists, k):
    run = Run.from_dict(lists)
    best = {query: documents for query, documents, _ in run.top(k).lists()}
    assert best == {query: documents[:k] for query, documents, _ in run.lists()}


@given(lists_of(texts, scores), st.data())
def test_cutting_and_concatenating_give_the_run_again(lists, data):
    run = Run.from_dict(lists)
    cut = data.draw(st.integers(0, len(run)))
    assert Run.concat([run[:cut], run[cut:]]) == run
    order = data.draw(st.permutations(list(run.queries)))
    assert run[order] == run
    assert run[order].queries == tuple(order)


@given(lists_of(texts, grades), texts, st.data())
def test_cutting_and_concatenating_give_the_judgements_again(judgements, silent, data):
    qrels = Qrels.from_dict(judgements | {silent: {}})
    cut = data.draw(st.integers(0, len(qrels)))
    whole = Qrels.concat([qrels[:cut], qrels[cut:]])
    assert whole == qrels
    assert silent in whole


@given(lists_of(texts, scores), lists_of(texts, grades))
def test_joining_with_judgements_is_looking_up(lists, judgements):
    run, qrels = Run.from_dict(lists), Qrels.from_dict(judgements)
    expected = [
        judgements.get(query, {}).get(document, UNJUDGED)
        for query, documents, _ in run.lists()
        for document in documents
    ]
    assert run.grades(qrels).tolist() == expected
    assert qrels.to_dict() == judgements


@given(lists_of(words, scores, min_size=1).filter(bool), lists_of(words, grades, min_size=1).filter(bool))
def test_trec_files_give_back_what_was_written(lists, judgements):
    run, qrels = Run.from_dict(lists), Qrels.from_dict(judgements)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_run(run, path)
        assert read_run(path) == run
        write_qrels(qrels, path)
        assert read_qrels(path) == qrels


@given(letors())
def test_letor_files_give_back_what_was_written(letor):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_letor(letor, path)
        if np.isnan(letor.features).all():
            return  # a file without a feature is refused
        again = read_letor(path, cache=False, missing=math.nan)
        assert again.widened(letor.width, missing=math.nan) == letor


@given(letors(), st.data())
def test_cutting_and_concatenating_give_the_letor_again(letor, data):
    cut = data.draw(st.integers(1, len(letor)))
    assert Letor.concat([letor[:cut], letor[cut:]]) == letor
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=letor.rows, max_size=letor.rows)))
    kept = letor.keep(mask)
    assert kept.queries == letor.queries
    assert kept.ids.tolist() == [id for id, chosen in zip(letor.ids.tolist(), mask, strict=True) if chosen]
