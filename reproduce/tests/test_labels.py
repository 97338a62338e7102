"""Label rankers: every one learns a plain task, says NaN for what it does not list, and shares its views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from isthmus.classification import (
    Beside,
    Bm25Neighbours,
    Centroid,
    Characters,
    CountedGrams,
    Encoded,
    LabelText,
    NaiveBayes,
    OneVsRest,
    Panel,
    TextNeighbours,
    Words,
    as_run,
)
from isthmus.encoders import Lsa
from isthmus.errors import DataError
from isthmus.retrieval import BM25, BM25Index
from isthmus.tables import Corpus, Documents, Qrels, Queries, Run
from isthmus_reproduce.fusion.labels import Bm25LabelText, Trained, labels_of

TOPICS = {
    "sport": "match goal team coach league referee striker keeper",
    "food": "bread soup kitchen oven butter recipe salt dinner",
    "law": "court judge appeal statute verdict plaintiff lawyer trial",
    "unused": "nothing ever written about",
}
LABELS = Documents(tuple(TOPICS), tuple(TOPICS), tuple(TOPICS.values()), np.zeros(4, dtype=np.int64))


def texts(count: int, seed: int) -> tuple[list[str], np.ndarray]:
    rng = np.random.default_rng(seed)
    right = rng.integers(0, 3, count)
    vocabulary = [words.split() for words in TOPICS.values()]
    written = [
        " ".join([*rng.choice(vocabulary[label], 4), *rng.choice(vocabulary[rng.integers(3)], 1)])
        for label in right
    ]
    return written, np.eye(4, dtype=bool)[right]


TRAIN, TRAIN_LABELS = texts(120, 1)
TEST, TEST_LABELS = texts(60, 2)
LSA = Encoded(Lsa.fit(TRAIN, dimensions=16))

RANKERS = {
    "hinge": OneVsRest(Words()),
    "log": OneVsRest(LSA, cost=10, loss="log"),
    "ratio": OneVsRest(Characters(), ratio=True),
    "beside": OneVsRest(Beside((Words(2), LSA), (1.0, 1.5))),
    "bayes": NaiveBayes(Words()),
    "sum": TextNeighbours(LSA, k=20),
    "sharp": TextNeighbours(Words(), k=20, sharpness=5.0),
    "max": TextNeighbours(LSA, k=20, pool="max"),
    "bm25": Bm25Neighbours(k=20),
    "centroid": Centroid(LSA),
    "text": LabelText(Words()),
    "bm25 text": Bm25LabelText(),
    "trained": Trained(LSA),
    "trained, inverse": Trained(LSA, score="inverse_distance"),
}
BY_TEXT = ("text", "bm25 text", "trained", "trained, inverse")


@pytest.fixture(scope="module")
def scores() -> dict[str, np.ndarray]:
    return Panel(RANKERS).fit(TRAIN, TRAIN_LABELS, LABELS).scores(TEST)


@pytest.mark.parametrize("name", RANKERS)
def test_every_ranker_learns_the_topics(scores: dict[str, np.ndarray], name: str) -> None:
    found = np.where(np.isnan(scores[name]), -np.inf, scores[name])
    right = TEST_LABELS[np.arange(len(TEST)), found.argmax(axis=1)]
    assert right.mean() > 0.9


@pytest.mark.parametrize("name", [name for name in RANKERS if name not in BY_TEXT])
def test_a_label_without_training_text_is_not_listed(scores: dict[str, np.ndarray], name: str) -> None:
    assert np.isnan(scores[name][:, 3]).all()


def test_neighbours_list_only_the_labels_they_carry() -> None:
    panel = Panel({"one": TextNeighbours(Words(), k=1), "bm25": Bm25Neighbours(k=1)})
    found = panel.fit(TRAIN, TRAIN_LABELS, LABELS).scores([TRAIN[0], "unheard words only"])
    assert (~np.isnan(found["one"][0])).sum() == 1
    assert (~np.isnan(found["bm25"][0])).sum() == 1
    assert np.isnan(found["bm25"][1]).all()


def test_neighbours_by_words_are_searched_once_for_both_ways_of_pooling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    search = BM25Index.search

    def counted(index: BM25Index, queries: Queries, k: int) -> Run:
        asked.append(len(queries))
        return search(index, queries, k)

    monkeypatch.setattr(BM25Index, "search", counted)
    panel = Panel({"sum": Bm25Neighbours(k=5), "max": Bm25Neighbours(k=5, pool="max")})
    found = panel.fit(TRAIN, TRAIN_LABELS, LABELS).scores(TEST)
    assert asked == [len(TEST)]
    assert np.nanmax(found["sum"] - found["max"]) > 0


def test_several_labels_per_text() -> None:
    both = TRAIN_LABELS | np.roll(TRAIN_LABELS, 1, axis=1)
    both[:, 3] = False
    found = (
        Panel({"k": TextNeighbours(LSA, k=1, pool="max")}).fit(TRAIN, both, LABELS).scores(TRAIN[:10])["k"]
    )
    np.testing.assert_array_equal(~np.isnan(found), both[:10])


@dataclass(frozen=True)
class Seen:
    """A view that counts how often it is computed."""

    log: tuple[list[int], ...]

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], Any]:
        inner = Words().fit(texts)

        def transform(asked: Sequence[str]) -> Any:
            self.log[0].append(len(asked))
            return inner(asked)

        return transform

    def __hash__(self) -> int:
        return 7


def test_naive_bayes_keeps_its_scale_when_the_vocabulary_grows() -> None:
    """A calibrator learned from rankers of fewer texts must fit the one that learned from all."""
    strange = [f"{text} strange{at} odd{at}" for at, text in enumerate(TRAIN)]
    panel = Panel({"bayes": NaiveBayes(Words())})
    few, many = (
        panel.fit(learned, TRAIN_LABELS, LABELS).scores(TEST)["bayes"] for learned in (TRAIN, strange)
    )
    assert np.nanstd(many, axis=1).mean() == pytest.approx(np.nanstd(few, axis=1).mean(), rel=0.5)


@pytest.mark.parametrize("grams", [Words(2), Words(3, least=2, marks=True), Words(stop=True), Characters()])
def test_counting_beforehand_changes_nothing(grams: Words | Characters) -> None:
    """scikit-learn's own TF-IDF, fitted on the training texts alone, gives the same rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    strange = ["a striker cooks soup, striker!", "zebra"]
    theirs = TfidfVectorizer(sublinear_tf=True, min_df=grams.least, **grams.options()).fit(TRAIN[:50])
    ours = CountedGrams.of(grams, [*TRAIN, *TEST]).fit(TRAIN[:50])
    for asked in (TRAIN[:50], TEST, [*strange, TEST[0]]):
        left, right = ours(asked), theirs.transform(asked)
        assert left.shape == right.shape
        np.testing.assert_allclose((left @ left.T).toarray(), (right @ right.T).toarray(), atol=1e-12)
        np.testing.assert_allclose(np.sort(left.sum(axis=0)), np.sort(np.asarray(right.sum(axis=0)).ravel()))


def test_a_view_is_computed_once_for_all_rankers() -> None:
    view = Seen(([],))
    panel = Panel({"a": TextNeighbours(view), "b": Centroid(view), "c": NaiveBayes(view)})
    panel.fit(TRAIN, TRAIN_LABELS, LABELS).scores(TEST)
    assert view.log[0] == [len(TRAIN), len(TEST)]


def test_lists_are_in_order_with_ties_by_name_and_nan_left_out() -> None:
    run = as_run(("q",), ("a", "b", "c"), np.array([[1.0, 1.0, np.nan]]), 5, "r")
    assert run.to_dict() == {"q": {"b": 1.0, "a": 1.0}}
    assert list(run.to_dict()["q"]) == ["b", "a"]


def test_search_gives_a_run_per_ranker() -> None:
    queries = Queries(("q0", "q1"), tuple(TEST[:2]), np.zeros(2, dtype=np.int64), ("test", "test"))
    runs = Panel({"nb": NaiveBayes(Words())}).fit(TRAIN, TRAIN_LABELS, LABELS).search(queries, k=2)
    assert [len(found) for _, found, _ in runs["nb"].lists()] == [2, 2]
    assert runs["nb"].name == "nb"


def test_labels_of_a_corpus() -> None:
    queries = Queries(("q0", "q1"), ("x", "y"), np.zeros(2, dtype=np.int64), ("test", "test"))
    qrels = Qrels.from_dict({"q1": {"law": 1, "food": 2, "sport": 0}})
    found = labels_of(Corpus("c", LABELS, queries, qrels), queries)
    assert found.tolist() == [[False] * 4, [False, True, True, False]]


def test_mismatched_labels_and_texts_without_words_are_errors() -> None:
    with pytest.raises(DataError, match="labels for"):
        Panel({}).fit(TRAIN, TRAIN_LABELS[:3], LABELS)
    with pytest.raises(DataError, match="no word"):
        Words().fit(["", "!"])


def test_the_papers_two_readings_of_its_retrievers() -> None:
    """BM25 over label texts finds what shares a word; over training texts what their labels share."""
    learned, right = (
        ["a striker and a keeper", "the oven is hot", "an appeal at court"],
        np.eye(3, 4, dtype=bool),
    )
    rankers = {"text": Bm25LabelText(), "neighbours": Bm25Neighbours(k=2, pool="max")}
    found = Panel(rankers).fit(learned, right, LABELS).scores(["verdict of the judge", "hot"])
    assert np.nanargmax(found["text"][0]) == 2
    assert np.isfinite(found["text"][0]).sum() == 1, "other labels share no word"
    assert np.isnan(found["text"][1]).all()
    assert np.nanargmax(found["neighbours"][1]) == 1
    query, other = (
        BM25().index(LABELS),
        Queries(("q",), ("verdict of the judge",), np.zeros(1, int), ("test",)),
    )
    assert found["text"][0, 2] == pytest.approx(float(query.search(other, 4).scores[0]))


def test_the_papers_dense_retriever_is_a_cosine_under_a_learned_map() -> None:
    learned, right = texts(60, 3)
    view = Encoded(Lsa.fit([*learned, *LABELS.texts], dimensions=16))
    trained = Panel({"cosine": Trained(view), "code": Trained(view, score="inverse_distance")})
    scores = trained.fit(learned, right, LABELS).scores(learned[:10])
    assert np.abs(scores["cosine"]).max() <= 1
    expected = 1 / (2 - 2 * np.clip(scores["cosine"], -1, 1) + 1e-9)
    assert scores["code"] == pytest.approx(expected, rel=1e-3), "1/d² of unit vectors"
    assert (scores["cosine"].argmax(axis=1) == right[:10].argmax(axis=1)).mean() > 0.7
