"""Run, Qrels, Letor and Corpus: what they hold, how they are cut, joined and compared."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.errors import DataError
from isthmus.tables import UNJUDGED, Corpus, Documents, Letor, Qrels, Queries, Run, rankings
from isthmus.tables.grouped import group, rows_of


def lists(run: Run) -> dict[str, list[str]]:
    return {query: documents for query, documents, _ in run.lists()}


# Ids and grouping


def test_codes_order_as_the_bytes_of_the_ids_do():
    words = ["b", "a", "é", "B", "10", "9", "𝔸", "\uffff", "b"]
    ids = Ids.of(words)
    by_code = [words[row] for row in np.argsort(ids.codes, kind="stable")]
    assert by_code == sorted(words, key=str.encode)
    assert ids.tolist() == words
    assert ids.word(2) == "é"


def test_ids_find_each_other_across_vocabularies():
    here, there = Ids.of(["x", "y", "x", "z"]), Ids.of(["z", "x"])
    assert here.codes_in(there).tolist() == [0, -1, 0, 1]
    assert Ids.concat([here, there]).tolist() == ["x", "y", "x", "z", "z", "x"]
    assert Ids.concat([]).tolist() == []


@pytest.mark.parametrize("bad", [[1, 2], [None], ["\ud800"]])
def test_ids_are_texts(bad):
    with pytest.raises(DataError, match="id"):
        Ids.of(bad)


def test_groups_are_numbered_by_first_appearance():
    names, groups, first = group(Ids.of(["q2", "q1", "q2", "q3"]))
    assert names == ("q2", "q1", "q3")
    assert groups.tolist() == [0, 1, 0, 2]
    assert first.tolist() == [0, 1, 3]


def test_rows_of_chosen_groups():
    assert rows_of(np.array([0, 2, 2, 5]), np.array([2, 1, 0])).tolist() == [2, 3, 4, 0, 1]


# Run


def test_a_run_is_in_trec_evals_order():
    run = Run.from_dict({"q": {"a": 1.0, "b": 2.0, "c": 1.0, "10": 1.0, "9": 1.0}})
    assert lists(run) == {"q": ["b", "c", "a", "9", "10"]}
    assert run.scores.tolist() == [2, 1, 1, 1, 1]
    assert run.ranks.tolist() == [1, 2, 3, 4, 5]


def test_order_does_not_depend_on_the_order_of_arrival():
    rng = np.random.default_rng(3)
    queries = [f"q{n}" for n in rng.integers(0, 9, 500)]
    documents = [f"d{n}" for n in range(500)]
    scores = rng.integers(0, 4, 500).astype(float)
    run = Run.of(queries, documents, scores)
    shuffled = rng.permutation(500)
    again = Run.of([queries[at] for at in shuffled], [documents[at] for at in shuffled], scores[shuffled])
    assert run == again
    expected = {
        query: [
            d
            for _, d in sorted(
                ((s, d) for q, d, s in zip(queries, documents, scores, strict=True) if q == query),
                reverse=True,
            )
        ]
        for query in run.queries
    }
    assert lists(run) == expected


def test_a_key_too_large_for_64_bits_still_orders(monkeypatch):
    run = Run.from_dict({"q": {"a": 1.0, "b": 2.0, "c": 1.0}})
    order = rankings._best_first(run.query_of_row, run.scores, run.documents)
    monkeypatch.setattr(rankings, "_LARGEST_KEY", 1)
    assert np.array_equal(rankings._best_first(run.query_of_row, run.scores, run.documents), order)


def test_a_run_from_columns_and_from_a_dict_agree():
    run = Run.of(["q2", "q1", "q2"], ["a", "a", "b"], [0.1, 0.2, 0.3], name="x")
    assert run == Run.from_dict({"q1": {"a": 0.2}, "q2": {"a": 0.1, "b": 0.3}})
    assert run.queries == ("q2", "q1")
    assert run.to_dict() == {"q2": {"b": 0.3, "a": 0.1}, "q1": {"a": 0.2}}


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_scores_are_finite(score):
    with pytest.raises(DataError, match=r"'d2'.*'q1'.*finite"):
        Run.from_dict({"q1": {"d1": 1.0, "d2": score}})


def test_a_document_stands_once_in_a_list():
    with pytest.raises(DataError, match=r"'d1' appears twice for query 'q'"):
        Run.of(["q", "r", "q"], ["d1", "d1", "d1"], [1, 2, 3])


def test_columns_have_one_length():
    with pytest.raises(DataError, match="2 queries, 1 documents, 2 scores"):
        Run.of(["q", "q"], ["d"], [1, 2])


def test_a_table_does_not_follow_its_givers_arrays():
    scores, chances = np.array([2.0, 1.0]), np.array([0.9, 0.1])
    run = Run.of(["q", "q"], ["b", "a"], scores, probabilities=chances)
    later = run.with_probabilities(chances)
    scores[0], chances[0] = 99, 0.5
    assert run.scores.tolist() == [2, 1]
    assert run.probabilities.tolist() == later.probabilities.tolist() == [0.9, 0.1]


def test_columns_cannot_be_written():
    run = Run.from_dict({"q": {"a": 1.0}})
    for column in (run.scores, run.offsets, run.documents.codes):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0
    with pytest.raises(AttributeError):
        run.name = "x"


def test_slicing_by_query():
    run = Run.from_dict({f"q{n}": {f"d{n}": 1.0, "x": 0.5} for n in range(5)})
    assert lists(run["q3"]) == {"q3": ["d3", "x"]}
    assert run[1:3].queries == ("q1", "q2")
    assert lists(run[["q4", "q0"]]) == {"q4": ["d4", "x"], "q0": ["d0", "x"]}
    assert run[np.array([True, False, False, False, True])].queries == ("q0", "q4")
    assert run[np.array([3, 1])].queries == ("q3", "q1")
    assert "q3" in run
    assert "q9" not in run
    with pytest.raises(KeyError):
        run["q9"]


def test_the_best_k_and_lists_that_become_empty():
    run = Run.from_dict({"q1": {"a": 1.0, "b": 2.0, "c": 3.0}, "q2": {"a": 1.0}, "q3": {}})
    assert lists(run.top(2)) == {"q1": ["c", "b"], "q2": ["a"], "q3": []}
    assert run.keep(run.scores > 2).queries == run.queries
    assert lists(run.keep(run.scores > 2)) == {"q1": ["c"], "q2": [], "q3": []}


def test_new_scores_reorder_and_drop_probabilities():
    run = Run.from_dict({"q": {"a": 1.0, "b": 2.0}}).with_probabilities([0.9, 0.2])
    assert run.documents.tolist() == ["b", "a"]
    again = run.with_scores([1.0, 5.0], name="new")
    assert lists(again) == {"q": ["a", "b"]}
    assert again.probabilities is None
    assert again.name == "new"
    with pytest.raises(DataError):
        run.with_scores([1.0])


def test_probabilities_follow_their_rows_and_never_reorder():
    run = Run.of(["q"] * 3, ["a", "b", "c"], [1, 3, 2], probabilities=[0.7, 0.1, 0.4])
    assert run.documents.tolist() == ["b", "c", "a"]
    assert run.probabilities.tolist() == [0.1, 0.4, 0.7]
    assert run.top(2).probabilities.tolist() == [0.1, 0.4]
    assert run.with_probabilities(None).probabilities is None
    assert run != run.with_probabilities(None)


@pytest.mark.parametrize("bad", [[0.5], [0.5, 1.1], [0.5, -0.1], [0.5, np.nan]])
def test_probabilities_lie_between_0_and_1(bad):
    with pytest.raises(DataError, match="probabilit"):
        Run.from_dict({"q": {"a": 1.0, "b": 2.0}}).with_probabilities(bad)


def test_concatenation_merges_lists_of_the_same_query():
    first = Run.from_dict({"q1": {"a": 1.0}, "q2": {"a": 1.0}, "q4": {}})
    second = Run.from_dict({"q1": {"b": 2.0}, "q3": {"a": 1.0}})
    both = Run.concat([first, second], name="both")
    assert both.to_dict() == {"q1": {"b": 2.0, "a": 1.0}, "q2": {"a": 1.0}, "q3": {"a": 1.0}, "q4": {}}
    assert both.name == "both"
    with pytest.raises(DataError, match="twice"):
        Run.concat([first, first])


def test_concatenation_keeps_probabilities_only_if_all_have_them():
    first = Run.from_dict({"q1": {"a": 1.0}}).with_probabilities([0.5])
    second = Run.from_dict({"q2": {"a": 1.0}})
    assert Run.concat([first, second]).probabilities is None
    both = Run.concat([first, second.with_probabilities([0.25])])
    assert both.probabilities.tolist() == [0.5, 0.25]


def test_runs_are_equal_by_content():
    run = Run.from_dict({"q1": {"a": 1.0}, "q2": {"b": 1.0}}, name="x")
    assert run == Run.from_dict({"q2": {"b": 1.0}, "q1": {"a": 1.0}}, name="y")
    assert run != Run.from_dict({"q1": {"a": 1.5}, "q2": {"b": 1.0}})
    assert run != Run.from_dict({"q1": {"b": 1.0}, "q2": {"b": 1.0}})
    assert run != Run.from_dict({"q1": {"a": 1.0}, "q3": {"b": 1.0}})
    assert run != "run"


def test_tables_without_rows():
    assert len(Run.from_dict({})) == Run.from_dict({}).rows == Run.concat([]).rows == 0
    assert len(Qrels.from_dict({})) == Qrels.concat([]).rows == 0
    assert Run.from_dict({}).top(3).to_dict() == {}
    assert Letor.of([], np.empty((0, 3)), []).ids.tolist() == []


def test_a_long_run_is_shown_short():
    run = Run.from_dict({f"q{n}": {f"d{m}": float(m) for m in range(9)} for n in range(9)}, name="bm25")
    assert repr(run) == (
        "Run 'bm25': 9 queries, 81 rows\n"
        "  q0  d8 8, d7 7, d6 6, …\n  q1  d8 8, d7 7, d6 6, …\n  q2  d8 8, d7 7, d6 6, …\n  …"
    )


# Qrels


def test_judgements_join_a_run():
    run = Run.from_dict({"q1": {"a": 3.0, "b": 2.0, "c": 1.0}, "q2": {"a": 1.0}, "q9": {"a": 1.0}})
    qrels = Qrels.from_dict({"q2": {"a": 0}, "q1": {"c": 2, "a": -1, "z": 3}})
    assert run.grades(qrels).tolist() == [-1, UNJUDGED, 2, 0, UNJUDGED]
    assert run.grades(Qrels.from_dict({})).tolist() == [UNJUDGED] * 5
    assert Run.from_dict({}).grades(qrels).tolist() == []


def test_joining_agrees_with_dictionaries():
    rng = np.random.default_rng(5)
    judged = {
        f"q{q}": {
            f"d{d}": int(rng.integers(-1, 4)) for d in rng.choice(60, rng.integers(1, 30), replace=False)
        }
        for q in range(40)
    }
    listed = {
        f"q{q}": {f"d{d}": float(rng.normal()) for d in rng.choice(60, 20, replace=False)}
        for q in range(20, 60)
    }
    run, qrels = Run.from_dict(listed), Qrels.from_dict(judged)
    expected = [
        judged.get(query, {}).get(document, UNJUDGED)
        for query, documents, _ in run.lists()
        for document in documents
    ]
    assert run.grades(qrels).tolist() == expected


@pytest.mark.parametrize("grade", [0.5, np.nan, 2.0**40, -(2**31), 2**31])
def test_grades_are_whole_numbers(grade):
    with pytest.raises(DataError, match="whole number"):
        Qrels.of(["q"], ["d"], [grade])


def test_whole_floats_are_grades_and_negative_ones_stay():
    assert Qrels.of(["q", "q"], ["a", "b"], [2.0, -2.0]).to_dict() == {"q": {"a": 2, "b": -2}}


def test_a_document_is_judged_once():
    with pytest.raises(DataError, match="twice"):
        Qrels.of(["q", "q"], ["d", "d"], [1, 1])
    part = Qrels.from_dict({"q": {"d": 1}})
    with pytest.raises(DataError, match="twice"):
        Qrels.concat([part, part])
    assert Qrels.concat([part, Qrels.from_dict({"q": {"e": 0}})]).to_dict() == {"q": {"d": 1, "e": 0}}


def test_judgements_are_equal_by_content():
    qrels = Qrels.from_dict({"q1": {"a": 1, "b": 0}, "q2": {"a": 2}})
    assert qrels == Qrels.from_dict({"q2": {"a": 2}, "q1": {"b": 0, "a": 1}})
    assert qrels != Qrels.from_dict({"q2": {"a": 2}, "q1": {"b": 0, "a": 2}})
    assert qrels[["q2"]].to_dict() == {"q2": {"a": 2}}


# Letor


def tiny() -> Letor:
    return Letor.of(["q1", "q2", "q1"], [[1, 2], [3, 4], [5, 6]], [2, 0, 1], name="tiny")


def test_rows_of_a_query_come_together_in_their_order():
    table = tiny()
    assert table.queries == ("q1", "q2")
    assert table.features.tolist() == [[1, 2], [5, 6], [3, 4]]
    assert table.grades.tolist() == [2, 1, 0]
    assert table.ids.tolist() == ["q1-0", "q1-1", "q2-0"]
    assert table.qrels().to_dict() == {"q1": {"q1-0": 2, "q1-1": 1}, "q2": {"q2-0": 0}}


def test_scores_rank_the_rows():
    assert lists(tiny().run([0.1, 0.9, 0.5])) == {"q1": ["q1-1", "q1-0"], "q2": ["q2-0"]}
    with pytest.raises(DataError, match="2 scores for 3 rows"):
        tiny().run([0.1, 0.9])


def test_whole_queries_keep_their_row_names_and_parts_of_them_too():
    table = Letor.of(["q1"] * 3 + ["q2"] * 2, np.arange(10).reshape(5, 2), [0, 1, 2, 0, 1])
    assert table[["q2"]].ids.tolist() == ["q2-0", "q2-1"]
    assert table.keep(table.grades > 0).ids.tolist() == ["q1-1", "q1-2", "q2-1"]


def test_named_documents_follow_their_rows():
    table = Letor.of(["q1", "q2", "q1"], np.eye(3), [0, 1, 2], documents=["x", "y", "z"])
    assert table.ids.tolist() == ["x", "z", "y"]
    assert table[["q1"]].documents.tolist() == ["x", "z"]
    assert table.keep(table.grades > 0).ids.tolist() == ["z", "y"]


@pytest.mark.parametrize("grades", [[0, -1, 0], [0, 0.5, 0], [0, np.nan, 0]])
def test_letor_grades_are_whole_and_not_negative(grades):
    with pytest.raises(DataError, match="grade"):
        Letor.of(["q"] * 3, np.eye(3), grades)


def test_letor_columns_have_one_length():
    with pytest.raises(DataError, match="differ in length"):
        Letor.of(["q"] * 2, np.eye(3), [0, 1, 2])
    with pytest.raises(DataError, match="1 documents"):
        Letor.of(["q"] * 3, np.eye(3), [0, 1, 2], documents=["d"])


def test_letor_parts_are_put_together():
    first, second = tiny(), Letor.of(["q3", "q1"], [[7, 8], [9, 10]], [1, 1])
    whole = Letor.concat([first, second], name="whole")
    assert whole.queries == ("q1", "q2", "q3")
    assert whole.features[:, 0].tolist() == [1, 5, 9, 3, 7]
    assert whole.ids.tolist() == ["q1-0", "q1-1", "q1-2", "q2-0", "q3-0"]
    assert whole.name == "whole"
    named = Letor.of(["q4"], [[0, 0]], [0], documents=["d"])
    assert Letor.concat([first, named]).ids.tolist() == ["q1-0", "q1-1", "q2-0", "d"]
    assert Letor.concat([first]) == first
    emptied = first.keep(first.query_of_row != 0)
    assert Letor.concat([emptied, second[:0]]).queries == (*first.queries[1:], first.queries[0])
    assert Letor.concat([emptied, second[:0]]).rows == emptied.rows
    with pytest.raises(DataError, match="2 and 3 features"):
        Letor.concat([first, Letor.of(["q"], [[1, 2, 3]], [0])])
    with pytest.raises(DataError, match="no parts"):
        Letor.concat([])


def test_widening():
    wide = tiny().widened(4, missing=-1)
    assert wide.features[0].tolist() == [1, 2, -1, -1]
    assert tiny().widened(2) == tiny()
    with pytest.raises(DataError, match="tiny has 2 features, more than 1"):
        tiny().widened(1)


def test_letor_tables_are_equal_by_content():
    assert tiny() == tiny()
    assert tiny() != tiny()[["q2", "q1"]]
    assert tiny() != Letor.of(["q1", "q2", "q1"], [[1, 2], [3, 4], [5, 7]], [2, 0, 1])
    assert tiny() != Letor.of(
        ["q1", "q2", "q1"], [[1, 2], [3, 4], [5, 6]], [2, 0, 1], documents=["a", "b", "c"]
    )
    nan = Letor.of(["q"], [[np.nan]], [0])
    assert nan == Letor.of(["q"], [[np.nan]], [0])


# Corpus


@pytest.fixture
def corpus() -> Corpus:
    documents = Documents(("d1", "d2", "d3"), ("One", "", "Three"), ("a", "b", "c"), np.array([0, 1, 1]))
    queries = Queries(
        ("q1", "q2", "q3"),
        ("x", "y", "z"),
        np.array([0, 1, 0]),
        ("train", "test", "test"),
        ("d1", None, None),
    )
    qrels = Qrels.from_dict({"q1": {"d2": 1}, "q2": {"d1": 2, "d3": 1}})
    return Corpus("small", documents, queries, qrels, ("north", "south"))


def test_what_one_silo_sees(corpus):
    north = corpus.silo("north")
    assert north.documents.ids == ("d1",)
    assert north.queries.ids == ("q1", "q3")
    assert north.queries.own == ("d1", None)
    assert north.qrels.to_dict() == {"q1": {"d2": 1}}
    with pytest.raises(DataError, match="north, south"):
        corpus.silo("east")


def test_a_split_keeps_all_documents(corpus):
    test = corpus.split("test")
    assert test.documents.ids == corpus.documents.ids
    assert test.queries.ids == ("q2", "q3")
    assert test.qrels.queries == ("q2",)
    with pytest.raises(DataError, match="train, validation, test"):
        corpus.split("dev")


def test_dealing_anew_and_addresses(corpus):
    assert corpus.address("d2") == "south/d2"
    dealt = corpus.dealt(["a", "b", "c"], [2, 1, 0], [0, 0, 0])
    assert dealt.address("d1") == "c/d1"
    assert corpus.address("d1") == "north/d1"


def test_texts_and_repr(corpus):
    assert corpus.documents.texts == ("One\na", "b", "Three\nc")
    assert repr(corpus) == "Corpus 'small': 3 documents, 3 queries, 3 judgements, 2 silos (north, south)"
    assert repr(corpus.documents) == "Documents(3)"


def test_corpora_are_equal_whatever_the_order_of_their_silos(corpus):
    renumbered = corpus.dealt(["south", "north"], [1, 0, 0], [1, 0, 1])
    assert renumbered == corpus
    assert corpus.dealt(["north", "south"], [0, 0, 1], [0, 1, 0]) != corpus
    assert corpus.split("test") != corpus
