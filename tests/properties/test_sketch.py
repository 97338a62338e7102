"""What holds for all sketches, noise, messages and features."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.arrays import Ids
from isthmus.features import ExactCounts, Pairs, compute
from isthmus.private.cost import Cost, together
from isthmus.private.mechanisms import Geometric
from isthmus.private.messages import CountsAnswer, Published, Terms
from isthmus.private.sketch import CountMin, CountSketch, HashFamily
from isthmus.text import Tokeniser

PLAIN = Tokeniser(stemmer=None, stop_words=frozenset())
words = st.sampled_from("abcdefghij")
texts = st.lists(st.lists(words, max_size=12).map(" ".join), min_size=1, max_size=5)
families = st.builds(
    HashFamily, st.binary(min_size=16, max_size=64), rows=st.integers(1, 5), width=st.integers(2, 40)
)
kinds = st.sampled_from([CountMin, CountSketch])


@given(texts, families)
def test_count_min_never_underestimates(documents: list[str], family: HashFamily) -> None:
    tokens = PLAIN(documents)
    asked = Ids.of(list("abcdefghij"))
    found = CountMin.of(tokens, family).estimate(asked)
    for row, word in enumerate(asked.words):
        assert (found[row] >= [text.split().count(word) for text in documents]).all()


@given(texts, st.randoms(use_true_random=False), families, kinds)
def test_merging_is_sketching_the_union(
    documents: list[str], dice: object, family: HashFamily, kind: type[CountMin]
) -> None:
    halves: list[list[str]] = [[], []]
    for text in documents:
        sides: list[list[str]] = [[], []]
        for word in text.split():
            sides[dice.random() < 0.5].append(word)  # type: ignore[attr-defined]
        for half, side in zip(halves, sides, strict=True):
            half.append(" ".join(side))
    one, other = (kind.of(PLAIN(half), family) for half in halves)
    whole = kind.of(PLAIN(documents), family).dense()
    np.testing.assert_array_equal((one + other).dense(), whole)
    np.testing.assert_array_equal((other + one).dense(), whole)


@given(texts, families, kinds)
def test_a_replaced_word_changes_a_row_by_at_most_two(
    documents: list[str], family: HashFamily, kind: type[CountMin]
) -> None:
    text = documents[0].split() or ["a"]
    for other in ("a", "j"):
        before, after = " ".join(text), " ".join([other, *text[1:]])
        change = kind.of(PLAIN([before]), family).dense() - kind.of(PLAIN([after]), family).dense()
        assert (np.abs(change.reshape(family.rows, family.width)).sum(axis=1) <= 2).all()


@given(texts, families, kinds)
def test_dense_and_sparse_are_the_same(
    documents: list[str], family: HashFamily, kind: type[CountMin]
) -> None:
    sketch = kind.of(PLAIN(documents), family)
    again = kind.of_dense(sketch.dense(), family)
    np.testing.assert_array_equal(again.cells, sketch.cells)
    np.testing.assert_array_equal(again.values, sketch.values)
    cells = np.arange(family.size)
    np.testing.assert_array_equal(sketch.columns(cells).T, sketch.dense())
    some = np.arange(len(documents))[::-1]
    np.testing.assert_array_equal(sketch.take(some).dense(), sketch.dense()[some])


@given(st.floats(0.01, 20), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_inversion_is_monotone_and_symmetric_about_the_middle(rate: float, drawn: list[int]) -> None:
    law = Geometric(rate)
    values = law.of(np.array(sorted(drawn), dtype=np.uint64))
    assert (np.diff(values) >= 0).all()
    mirrored = law.of(np.array([2**64 - 1 - word for word in sorted(drawn)], dtype=np.uint64))
    assert (np.abs(values + mirrored) <= 1).all()  # cuts are rounded down on both sides
    assert law.of(np.array([2**63], dtype=np.uint64)).tolist() == [0]


@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1) | st.just(0), max_size=60))
def test_values_of_any_size_travel(values: list[int]) -> None:
    table = np.array(values, dtype=np.int64).reshape(1, 1, -1)
    back = CountsAnswer.decode(CountsAnswer.of(b"d" * 16, table).encode())
    np.testing.assert_array_equal(back.table(), table)


@given(st.sets(st.integers(0, 6399)), st.integers(1, 200))
def test_places_travel(places: set[int], value: int) -> None:
    terms = Terms("one_shot", "body", 1.0, 1, 64, 0)
    where = np.array(sorted(places), dtype=np.int64)
    message = Published(terms, 0, 100, where, np.full(len(where), value, dtype=np.int32))
    back = Published.decode(message.encode())
    np.testing.assert_array_equal(back.places, where)
    assert (back.values == value).all()


@settings(max_examples=50)
@given(texts, texts)
def test_features_are_finite_and_do_not_depend_on_company(documents: list[str], queries: list[str]) -> None:
    counts = ExactCounts.of(PLAIN(documents))
    tokens = PLAIN(queries)
    pairs = Pairs.all(len(queries), len(documents))
    table = compute(tokens, pairs, title=counts, body=counts)
    assert np.isfinite(table).all()
    last = compute(PLAIN(queries[-1:]), Pairs.all(1, len(documents)), title=counts, body=counts)
    np.testing.assert_allclose(table[-len(documents) :], last, atol=1e-12)


costs = st.builds(
    lambda name, field, epsilon, shared: Cost("m", (field,), epsilon, 2.0, 1.0, name, shared=shared),
    st.sampled_from("xyz"),
    st.sampled_from(["title", "body"]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.booleans(),
)


@given(st.lists(costs, max_size=8), costs)
def test_spending_never_shrinks(spent: list[Cost], more: Cost) -> None:
    before, after = together(spent), together([*spent, more])
    assert before <= after <= before + more.epsilon
