"""Intervals over folds, and which labels are head."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import ConfigError, DataError
from isthmus_reproduce.fusion.folds import head_labels
from isthmus_reproduce.intervals import fold_interval


class TestFoldInterval:
    @pytest.mark.parametrize(("folds", "quantile"), [(5, 2.776), (10, 2.262)])
    def test_students_t(self, folds: int, quantile: float) -> None:
        values = np.random.default_rng(2).random(folds)
        found = fold_interval(values)
        assert (found.high - found.value) / (values.std(ddof=1) / math.sqrt(folds)) == pytest.approx(
            quantile, abs=5e-4
        )
        assert (found.n, found.how) == (folds, "t")

    def test_normal(self) -> None:
        values = [0.1, 0.2, 0.4]
        found = fold_interval(values, ci="normal")
        assert (found.high - found.value) / (np.std(values, ddof=1) / math.sqrt(3)) == pytest.approx(
            1.96, abs=1e-3
        )
        with pytest.raises(ConfigError, match="did you mean 'normal'"):
            fold_interval(values, ci="normale")

    def test_one_fold_has_no_interval(self) -> None:
        found = fold_interval([0.5])
        assert found.value == 0.5
        assert math.isnan(found.low)
        with pytest.raises(DataError):
            fold_interval([math.nan])


@pytest.mark.parametrize(("labels", "head"), [(90, 19), (11, 3), (6, 2), (5, 2), (1, 1)])
def test_head_labels(labels: int, head: int) -> None:
    mask = head_labels(np.arange(labels))
    assert mask.sum() == head
    assert mask[-head:].all()


def test_head_of_the_tweet_topics() -> None:
    assert head_labels([152, 317, 2738, 961, 2483, 346]).tolist() == [False, False, True, False, True, False]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60))
def test_the_head_is_never_rarer_than_the_tail(counts: list[int]) -> None:
    head = head_labels(counts)
    assert head.sum() == min(len(counts), len(counts) // 5 + 1)
    frequency = np.array(counts)
    assert frequency[head].min() >= frequency[~head].max(initial=0)
