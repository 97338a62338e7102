"""Scores against bm25s's own index, which counts and weighs by itself."""

from __future__ import annotations

import bm25s
import numpy as np
import pytest

from isthmus.retrieval import BM25
from isthmus.tables import Documents, Queries
from isthmus.text import tokenise


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (2.0, 0.0), (0.0, 1.0)])
def test_scores_are_those_of_bm25s(k1: float, b: float) -> None:
    rng = np.random.default_rng(11)
    words = np.array([f"word{number}x" for number in range(200)])
    chances = 1 / np.arange(1, 201)
    chances /= chances.sum()

    def text(length: int) -> str:
        return " ".join(rng.choice(words, size=length, p=chances))

    texts = [text(int(length)) for length in rng.integers(1, 60, size=300)]
    asked = [text(6) for _ in range(40)]
    count, questions = len(texts), len(asked)
    documents = Documents(
        tuple(f"d{row:03}" for row in range(count)), ("",) * count, tuple(texts), np.zeros(count, int)
    )
    queries = Queries(
        tuple(f"q{row}" for row in range(questions)),
        tuple(asked),
        np.zeros(questions, int),
        ("test",) * questions,
    )
    ours = BM25(k1=k1, b=b).index(documents).search(queries, count)
    peer = bm25s.BM25(k1=k1, b=b, method="lucene", dtype="float64")
    tokens = tokenise(texts)
    peer.index([tokens.words(row) for row in range(count)], show_progress=False)
    terms = tokenise(asked)
    for row, (_, names, scores) in enumerate(ours.lists()):
        theirs = peer.get_scores(terms.words(row))
        assert [theirs[int(name[1:])] for name in names] == pytest.approx(scores, rel=1e-12)
        assert len(names) == np.count_nonzero(theirs)
