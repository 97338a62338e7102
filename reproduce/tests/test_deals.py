"""Deals for trials: by topic, at random, and groups of equal texts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from isthmus.classification import normal_text, same_text
from isthmus.corpora import load
from isthmus.errors import DataError
from isthmus.evaluation import evaluate
from isthmus.partition import (
    Deal,
    folds,
)
from isthmus.randomness import Streams
from isthmus.retrieval import BM25
from isthmus.tables import Corpus, Documents, Qrels, Queries, Run
from isthmus_reproduce.deals import by_topic, deal_corpus


def test_folds_keep_duplicates_together_and_labels_even() -> None:
    rng = np.random.default_rng(0)
    texts = [f"Text {number}" for number in rng.integers(400, size=1000)]
    labels = same_text(texts) % 4
    found = folds(1000, 5, np.random.default_rng(1), groups=same_text(texts), strata=labels)
    homes: dict[str, set[int]] = {}
    for text, fold in zip(texts, found.tolist(), strict=True):
        homes.setdefault(text, set()).add(fold)
    assert all(len(home) == 1 for home in homes.values())
    assert np.bincount(found).tolist() == [200] * 5
    counts = Deal(found, 5).label_counts(labels).counts
    assert (counts.max(axis=0) - counts.min(axis=0)).max() <= 4


def test_same_text_ignores_case_and_space() -> None:
    assert same_text(["A  b", "c", "a B\n", "C"]).tolist() == [0, 1, 0, 1]
    assert same_text(["Straße 1", "STRASSE\t1"]).tolist() == [0, 0]
    assert normal_text(" STRASSE\t1") == normal_text("Straße 1") == "strasse 1"


def collection(count: int = 120) -> Corpus:
    rng = np.random.default_rng(0)
    words = [
        ["whale", "sea", "ship", "wave"],
        ["rocket", "moon", "orbit", "star"],
        ["bread", "oven", "flour", "yeast"],
    ]
    texts = [" ".join(rng.choice(words[at % 3], size=8)) for at in range(count)]
    ids = tuple(f"d{at}" for at in range(count))
    return Corpus(
        "toy",
        Documents(ids, ("",) * count, tuple(texts), np.zeros(count, np.int64)),
        Queries(("q1", "q2", "q3"), ("ship wave", "moon star", "zzz"), np.zeros(3, np.int64), ("test",) * 3),
        Qrels.from_dict({"q1": {"d0": 1}, "q2": {"d1": 1}}),
    )


def test_topics_are_found_and_queries_go_to_theirs() -> None:
    dealt = deal_corpus(collection(), 3, Streams(0))
    homes = dealt.documents.silos
    assert [len(set(homes[start::3].tolist())) for start in range(3)] == [1, 1, 1]
    assert len(set(homes.tolist())) == 3
    assert dealt.queries.silos[0] == homes[0]
    assert dealt.queries.silos[1] == homes[1]
    assert dealt.silos == ("silo1", "silo2", "silo3")
    assert deal_corpus(collection(), 3, Streams(0)).documents.silos.tolist() == homes.tolist()


def test_a_random_deal_of_a_collection_is_even() -> None:
    dealt = deal_corpus(collection(), 4, Streams(0), by="random")
    assert np.bincount(dealt.documents.silos).tolist() == [30] * 4
    assert dealt.queries.silos.max() < 4


def test_texts_without_topics() -> None:
    with pytest.raises(DataError, match="no document has a word"):
        by_topic(["", "the of"], ["x"], 2, Streams(0))
    with pytest.raises(DataError, match="2 documents cannot be dealt to 3"):
        by_topic(["whale ship", "moon star"], ["x"], 3, Streams(0))
    homes, _ = by_topic(["whale"] * 5, ["whale"], 3, Streams(0))  # fewer topics than silos
    assert len(set(homes.tolist())) == 3


@pytest.mark.realdata
@pytest.mark.parametrize(("name", "away"), [("npl", 0.21), ("cran", 0.24), ("med", 0.24)])
def test_topical_silos_keep_most_relevant_documents_at_home(data_dir: Path, name: str, away: float) -> None:
    corpus = deal_corpus(load(data_dir / "collections" / name), 4, Streams(0))
    homes = dict(zip(corpus.queries.ids, corpus.queries.silos.tolist(), strict=True))
    rows, queries = corpus.row_of_document, corpus.qrels.query_of_row.tolist()
    documents = corpus.documents.silos[[rows[document] for document in corpus.qrels.documents.tolist()]]
    asked = np.array([homes[corpus.qrels.queries[query]] for query in queries])
    relevant = corpus.qrels.grades > 0
    assert (documents != asked)[relevant].mean() == pytest.approx(away, abs=0.06)
    assert np.bincount(documents, minlength=4).min() > 0


@pytest.mark.realdata
@pytest.mark.parametrize(
    ("name", "by", "expected"),
    [
        ("npl", "topic", (0.42, 0.36, 0.44)),
        ("npl", "random", (0.25, 0.44, 0.44)),
        ("cran", "topic", (0.34, 0.29, 0.37)),
        ("cran", "random", (0.16, 0.37, 0.37)),
    ],
)
def test_only_topical_silos_make_raw_scores_incomparable(
    data_dir: Path, name: str, by: Literal["topic", "random"], expected: tuple[float, ...]
) -> None:
    """nDCG@10 of the home silo, of raw scores merged, and of a central index.

    Random silos see the same word statistics, so merging their scores loses about nothing; topical silos
    do not, and merging falls even behind asking the home silo alone.
    """
    corpus = deal_corpus(load(name), 4, Streams(0), by=by)
    runs = [BM25().index(corpus.silo(silo).documents).search(corpus.queries, 100) for silo in corpus.silos]
    central = BM25().index(corpus.documents).search(corpus.queries, 100)
    at_home = [run[corpus.queries.silos == silo] for silo, run in enumerate(runs)]
    compared = (Run.concat(at_home), Run.concat(runs), central)
    found = [evaluate(corpus.qrels, run, ["nDCG@10"])["nDCG@10"] for run in compared]
    assert found == pytest.approx(expected, abs=0.03)
    home, merged, whole = found
    if by == "random":
        assert merged == pytest.approx(whole, abs=0.012)
        assert home < merged - 0.1
    else:
        assert merged < home < whole
        assert merged < whole - 0.04
