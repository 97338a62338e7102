"""What holds for every loss and every batch of lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from isthmus.losses import LOSSES

LISTWISE = [name for name, loss in LOSSES.items() if loss.whole_queries]

lists = st.lists(
    st.lists(
        st.tuples(st.floats(-20, 20, width=32), st.integers(0, 4)),
        max_size=12,
    ),
    min_size=1,
    max_size=6,
)


def flat(
    batch: list[list[tuple[float, int]]],
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    rows = [row for one in batch for row in one]
    offsets = np.cumsum([0, *map(len, batch)])
    return np.array([s for s, _ in rows], float), np.array([y for _, y in rows], int), offsets


@pytest.mark.parametrize("name", LISTWISE)
@given(batch=lists)
def test_a_list_is_pushed_apart_and_never_along(name: str, batch: list[list[tuple[float, int]]]) -> None:
    """Only differences of scores count: the gradient of every list sums to 0."""
    scores, labels, offsets = flat(batch)
    value, gradient = LOSSES[name].function(scores, labels, offsets)
    sums = [gradient[a:b].sum() for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(sums, 0, atol=1e-9)
    assert value >= 0


@pytest.mark.parametrize("name", LISTWISE)
@given(batch=lists)
def test_lists_do_not_see_each_other(name: str, batch: list[list[tuple[float, int]]]) -> None:
    scores, labels, offsets = flat(batch)
    value, gradient = LOSSES[name].function(scores, labels, offsets)
    alone = [LOSSES[name].function(*flat([one])) for one in batch]
    assert value == pytest.approx(sum(v for v, _ in alone) / len(batch), abs=1e-9)
    np.testing.assert_allclose(gradient * len(batch), np.concatenate([g for _, g in alone]), atol=1e-9)


@pytest.mark.parametrize("name", ["ranknet", "softmax"])
@given(batch=lists, seed=st.integers(0, 1000))
def test_the_order_of_rows_does_not_matter(
    name: str, batch: list[list[tuple[float, int]]], seed: int
) -> None:
    scores, labels, _ = flat([[row for one in batch for row in one]])
    offsets = np.array([0, len(scores)])
    order = np.random.default_rng(seed).permutation(len(scores))
    value, gradient = LOSSES[name].function(scores, labels, offsets)
    shuffled_value, shuffled = LOSSES[name].function(scores[order], labels[order], offsets)
    assert shuffled_value == pytest.approx(value, abs=1e-9)
    np.testing.assert_allclose(shuffled, gradient[order], atol=1e-9)


@given(batch=lists)
def test_lambdarank_never_pushes_the_best_grade_down_nor_the_worst_up(
    batch: list[list[tuple[float, int]]],
) -> None:
    scores, labels, offsets = flat(batch)
    _, gradient = LOSSES["lambdarank"].function(scores, labels, offsets)
    for start, end in itertools.pairwise(offsets):
        if end > start:
            grades = labels[start:end]
            assert (gradient[start:end][grades == grades.max()] <= 1e-12).all()
            assert (gradient[start:end][grades == grades.min()] >= -1e-12).all()
