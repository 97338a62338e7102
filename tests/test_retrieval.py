"""BM25: its formula, its order, and what several silos may share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
import pytest

from isthmus.errors import ConfigError, DataError
from isthmus.fusion import Stacked, fuse
from isthmus.retrieval import BM25, TEXT, Fused, Retriever, Statistics
from isthmus.tables import Documents, Qrels, Queries, Run
from isthmus.text import tokenise


def documents(texts: dict[str, str]) -> Documents:
    return Documents(tuple(texts), ("",) * len(texts), tuple(texts.values()), np.zeros(len(texts), int))


def queries(texts: dict[str, str], own: Sequence[str | None] = ()) -> Queries:
    count = len(texts)
    return Queries(tuple(texts), tuple(texts.values()), np.zeros(count, int), ("test",) * count, tuple(own))


FRUIT = {"d1": "red apple apple", "d2": "green apple", "d3": "green pear tart", "d4": "", "d5": "red"}


def test_the_score_is_lucenes() -> None:
    """ln(1 + (N − df + ½)/(df + ½)) · tf/(tf + k1·(1 − b + b·|d|/avg|d|)), worked out by hand."""
    run = BM25(k1=1.2, b=0.5).index(documents(FRUIT)).search(queries({"q": "apple green"}), 10)
    average = (3 + 2 + 3 + 0 + 1) / 5
    rarity = math.log(1 + (5 - 2 + 0.5) / (2 + 0.5))  # both words are in two of five documents

    def weight(tf: int, length: int) -> float:
        return rarity * tf / (tf + 1.2 * (0.5 + 0.5 * length / average))

    expected = {"d2": 2 * weight(1, 2), "d1": weight(2, 3), "d3": weight(1, 3)}
    assert run.to_dict()["q"] == pytest.approx(expected, rel=1e-14)
    assert list(run.to_dict()["q"]) == ["d2", "d1", "d3"]


def test_titles_count_as_text() -> None:
    titled = Documents(("d1", "d2"), ("pear", ""), ("apple", "apple"), np.zeros(2, int))
    assert BM25().index(titled).search(queries({"q": "pears"}), 5).documents.tolist() == ["d1"]


def test_a_repeated_query_word_counts_twice() -> None:
    index = BM25().index(documents(FRUIT))
    once, twice = (index.search(queries({"q": text}), 5) for text in ("tart", "tart tart"))
    assert twice.scores[0] == 2 * once.scores[0]


def test_ties_go_to_the_greater_id_also_at_the_cut() -> None:
    same = dict.fromkeys(("b", "é", "a", "c10", "c9", "Z"), "apple") | {"x": "apple apple"}
    index = BM25(b=0).index(documents(same))
    assert index.search(queries({"q": "apple"}), 10).documents.tolist() == [
        "x",
        "é",
        "c9",
        "c10",
        "b",
        "a",
        "Z",
    ]
    assert index.search(queries({"q": "apple"}), 3).documents.tolist() == ["x", "é", "c9"]


def test_rows_come_in_the_order_of_a_run() -> None:
    rng = np.random.default_rng(0)
    words = np.array(["ant", "bee", "cow", "dog", "elk"])
    texts = {f"d{row}": " ".join(rng.choice(words, size=4)) for row in range(60)}
    asked = {f"q{row}": " ".join(rng.choice(words, size=2)) for row in range(20)}
    run = BM25().index(documents(texts)).search(queries(asked), 7)
    assert run == Run.of(
        [run.queries[at] for at in run.query_of_row], run.documents.tolist(), run.scores, name="again"
    )
    whole = BM25().index(documents(texts)).search(queries(asked), 60)
    assert run == whole.top(7)


def test_queries_without_a_match_keep_an_empty_list() -> None:
    run = (
        BM25()
        .index(documents(FRUIT))
        .search(queries({"q1": "", "q2": "the", "q3": "quince", "q4": "red"}), 9)
    )
    assert run.queries == ("q1", "q2", "q3", "q4")
    assert np.diff(run.offsets).tolist() == [0, 0, 0, 2]


def test_nothing_to_index_and_nothing_to_ask() -> None:
    assert BM25().index(documents({})).search(queries({"q": "apple"}), 5).rows == 0
    assert BM25().index(documents({"d": ""})).search(queries({"q": "apple"}), 5).rows == 0
    assert len(BM25().index(documents(FRUIT)).search(queries({}), 5)) == 0


def test_a_querys_own_document_is_no_candidate() -> None:
    asked = queries({"q1": "apple", "q2": "apple", "q3": "apple"}, own=("d1", None, "elsewhere"))
    lists = BM25().index(documents(FRUIT)).search(asked, 1).to_dict()
    assert [list(found) for found in lists.values()] == [["d2"], ["d1"], ["d1"]]


def test_silos_that_share_statistics_score_as_one_index() -> None:
    rng = np.random.default_rng(3)
    words = np.array([f"w{number}" for number in range(40)])
    texts = {f"d{row}": " ".join(rng.choice(words, size=rng.integers(1, 30))) for row in range(90)}
    asked = queries({f"q{row}": " ".join(rng.choice(words, size=5)) for row in range(15)})
    central = BM25().index(documents(texts)).search(asked, 100)
    parts = [documents(dict(list(texts.items())[silo::3])) for silo in range(3)]
    shared = reduce(add, [Statistics.of(tokenise(part.texts)) for part in parts])
    merged = Run.concat([BM25().index(part, statistics=shared).search(asked, 100) for part in parts])
    assert merged == central  # to the last bit
    local = Run.concat([BM25().index(part).search(asked, 100) for part in parts])
    assert local != central


def test_statistics_add() -> None:
    left, right = ["red apple", "apple"], ["", "green apple pie"]
    both = Statistics.of(tokenise(left)) + Statistics.of(tokenise(right))
    whole = Statistics.of(tokenise(left + right))
    assert (both.documents, both.length, both.average_length) == (4, 6, 1.5)
    assert both.terms.words == whole.terms.words == ["appl", "green", "pie", "red"]
    assert both.tables[TEXT].tolist() == whole.tables[TEXT].tolist() == [3, 1, 1, 1]


def test_statistics_from_elsewhere_may_lack_a_term() -> None:
    foreign = Statistics.of(tokenise(["red", "green"]))
    run = BM25().index(documents(FRUIT), statistics=foreign).search(queries({"q": "apple"}), 5)
    assert run.rows == 2
    assert (run.scores > 0).all()


def test_an_index_is_a_retriever() -> None:
    retriever: Retriever = BM25(name="left").index(documents(FRUIT))
    assert retriever.search(queries({"q": "red"}), 2).name == "left"


@pytest.mark.parametrize("settings", [{"k1": -1}, {"k1": math.nan}, {"b": 1.5}, {"b": -0.1}])
def test_settings_out_of_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        BM25(**settings)  # type: ignore[arg-type]


def test_bad_questions_are_refused() -> None:
    index = BM25().index(documents(FRUIT))
    with pytest.raises(ConfigError, match="at least one"):
        index.search(queries({"q": "red"}), 0)
    twice = Queries(("q", "q"), ("red", "green"), np.zeros(2, int), ("test", "test"))
    with pytest.raises(DataError, match="query id 'q' appears twice"):
        index.search(twice, 3)
    again = Documents(("d", "d"), ("", ""), ("red", "green"), np.zeros(2, int))
    with pytest.raises(DataError, match="document id 'd' appears twice"):
        BM25().index(again)


WORDY = {f"q{at}": text for at, text in enumerate(("red apple", "green apple", "pear tart", "red pear"))}


def test_a_fused_retriever_is_a_retriever_and_nests() -> None:
    usual, flat = BM25().index(documents(FRUIT)), BM25(b=0.0, k1=0.5).index(documents(FRUIT))
    asked = queries(WORDY)
    hybrid = Fused({"usual": usual, "flat": flat}, "comb-mnz", depth=3)
    nested: Retriever = Fused({"hybrid": hybrid, "usual": usual})
    found = nested.search(asked, k=2)
    assert found.queries == asked.ids
    assert np.diff(found.offsets).max() == 2
    expected = fuse([usual.search(asked, 3), flat.search(asked, 3)], "comb-mnz")
    assert hybrid.search(asked, k=5).to_dict() == expected.top(5).to_dict()
    with pytest.raises(ConfigError, match="no retrievers"):
        Fused({})


def test_a_fitted_fuser_gives_a_fused_retriever_probabilities() -> None:
    asked = queries(WORDY)
    hybrid = Fused({"usual": BM25().index(documents(FRUIT)), "flat": BM25(b=0.0).index(documents(FRUIT))})
    runs = hybrid.runs(asked)
    qrels = Qrels.from_dict({query: {runs[0][query].documents.word(0): 1} for query in asked.ids})
    sure = replace(hybrid, fuser=Stacked(calibrator="platt", folds=2).fit(runs, qrels))
    chances = sure.search(asked, k=3).required_probabilities
    assert ((chances > 0) & (chances < 1)).all()
