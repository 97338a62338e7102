"""Synthetic text: deterministic, of the promised shape, and worth searching."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import DataError
from isthmus.text import tokenise
from isthmus_reproduce.synthetic_text import text


def test_text_is_deterministic_and_as_large_as_asked() -> None:
    corpus = text(400, 30, 3, words=80)
    twin = text(400, 30, 3, words=80)
    assert corpus.documents.bodies == twin.documents.bodies
    assert corpus.queries.texts == twin.queries.texts
    assert corpus.qrels == twin.qrels
    assert text(400, 30, 3, words=80, seed=1).documents.bodies != corpus.documents.bodies
    assert (len(corpus.documents), len(corpus.queries), corpus.silos) == (
        400,
        30,
        ("silo1", "silo2", "silo3"),
    )
    lengths = [body.count(" ") + 1 for body in corpus.documents.bodies]
    assert np.mean(lengths) == pytest.approx(80, rel=0.05)
    assert np.std(lengths) > 10


def test_words_are_zipfian_and_safe_from_stemming() -> None:
    corpus = text(300, 10, words=200)
    tokens = tokenise(corpus.documents.bodies)
    assert len(tokens.terms) == sum(len(body.split()) for body in corpus.documents.bodies)
    counts = np.sort(np.bincount(tokens.terms.codes))[::-1]
    assert 1.6 < counts[0] / counts[1] < 2.4
    assert 7 < counts[0] / counts[9] < 14


def test_judgements_follow_aspects_not_words() -> None:
    corpus = text(600, 60, words=100)
    assert set(corpus.qrels.queries) == set(corpus.queries.ids)
    assert set(corpus.qrels.grades.tolist()) == {1, 2}
    assert 10 < corpus.qrels.rows / 60 < 60
    words = dict(zip(corpus.documents.ids, map(str.split, corpus.documents.texts), strict=True))
    shares = [
        bool(set(text.split()) & set(words[document]))
        for query, text in zip(corpus.queries.ids, corpus.queries.texts, strict=True)
        for document in corpus.qrels[query].documents.tolist()
    ]
    assert 0.3 < np.mean(shares) < 0.8  # some relevant documents have no word of the query
    others = set().union(*(words[document] for document in corpus.documents.ids))
    assert all(set(text.split()) & others for text in corpus.queries.texts)


def test_moved_is_the_dial_from_topical_to_random() -> None:
    def crossing(moved: float) -> float:
        corpus = text(600, 60, words=20, moved=moved)
        row = corpus.row_of_document
        homes = dict(zip(corpus.queries.ids, corpus.queries.silos.tolist(), strict=True))
        away = [
            corpus.documents.silos[row[document]] != homes[query]
            for query in corpus.qrels.queries
            for document in corpus.qrels[query].documents.tolist()
        ]
        return float(np.mean(away))

    assert crossing(0) < 0.1  # a minor aspect of another topic
    assert 0.45 < crossing(0.5) < 0.65
    assert crossing(1) == pytest.approx(0.75, abs=0.06)


def test_queries_on_one_aspect_share_a_split() -> None:
    corpus = text(200, 300, words=10)
    relevant: dict[frozenset[str], set[str]] = {}
    for query, split in zip(corpus.queries.ids, corpus.queries.splits, strict=True):
        relevant.setdefault(frozenset(corpus.qrels[query].documents.tolist()), set()).add(split)
    assert all(len(splits) == 1 for splits in relevant.values())
    assert {split for splits in relevant.values() for split in splits} == {"train", "validation", "test"}


def test_impossible_and_tiny_collections() -> None:
    with pytest.raises(DataError, match="a document for every silo"):
        text(3, 1, 4)
    tiny = text(2, 2, 2, words=1)
    assert len(tiny.documents) == 2
    assert set(tiny.queries.splits) == {"test"}
