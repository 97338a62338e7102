"""Laws of calibration, over random scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.asking import Silos
from isthmus.calibration import (
    CALIBRATORS,
    Beta,
    BinnedIsotonic,
    Gamma,
    Gaussian,
    LabelledScores,
    Platt,
    QueryFeature,
    Softmax,
    Temperature,
    list_features,
)
from isthmus.calibration.sums import extremes, order_statistics
from isthmus.tables import Run

MONOTONE = ("platt", "isotonic", "isotonic-binned", "temperature", "gaussian", "gamma", "beta", "beta-cdf")
scores = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 3))


@st.composite
def pairs(draw: st.DrawFn, least: int = 2, most: int = 60) -> tuple[np.ndarray, np.ndarray]:
    values = draw(st.lists(scores, min_size=least, max_size=most))
    labels = draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    labels[0], labels[-1] = True, False
    return np.array(values), np.array(labels)


@pytest.mark.parametrize("name", MONOTONE)
@settings(max_examples=25, deadline=None)
@given(data=pairs())
def test_every_single_ranking_is_kept(name: str, data: tuple[np.ndarray, np.ndarray]) -> None:
    values, labels = data
    fitted = CALIBRATORS[name]().fit(values, labels)
    grid = np.sort(np.concatenate((values, np.linspace(values.min() - 1, values.max() + 1, 101))))
    chances = fitted.probabilities(grid)
    assert (np.diff(chances) >= -1e-12).all()
    assert ((chances >= 0) & (chances <= 1)).all()


@settings(max_examples=25, deadline=None)
@given(data=pairs(least=20, most=120), lists=st.integers(1, 8))
def test_monotone_query_feature_keeps_every_list(data: tuple[np.ndarray, np.ndarray], lists: int) -> None:
    values, labels = data
    groups = np.arange(len(values)) % lists
    fitted = QueryFeature(trees=15).fit(values, labels, groups=groups)
    chances = fitted.probabilities(values, groups=groups)
    for group in range(lists):
        mine = groups == group
        order = np.argsort(values[mine])
        assert (np.diff(chances[mine][order]) >= -1e-12).all()


@settings(max_examples=30, deadline=None)
@given(data=pairs(), parts=st.integers(1, 5), seed=st.integers(0, 1000))
def test_federated_and_pooled_calibrators_agree(
    data: tuple[np.ndarray, np.ndarray], parts: int, seed: int
) -> None:
    values, labels = data
    deal = np.random.default_rng(seed).integers(0, parts, len(values))
    held = [LabelledScores(values[deal == part], labels[deal == part].astype(float)) for part in range(parts)]
    silos = Silos.in_memory({str(part): pairs.answer for part, pairs in enumerate(held)})
    grid = np.linspace(values.min(), values.max(), 51)
    for kind in (Platt, Beta, BinnedIsotonic, Gaussian, Gamma, Temperature):
        pooled = kind().fit(values, labels).probabilities(grid)
        federated = kind().fit_sums(silos.sum).probabilities(grid)
        assert np.abs(pooled - federated).max() < 1e-6, kind.__name__


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_order_statistics_from_counts_are_exact(values: list[float]) -> None:
    held = np.array(values)
    halves = [LabelledScores(part, np.zeros(len(part))) for part in np.array_split(held, 2)]
    ask = Silos.in_memory(dict(zip("ab", (each.answer for each in halves), strict=True))).sum
    found = order_statistics(ask, np.arange(1.0, len(held) + 1))
    assert np.array_equal(found, np.sort(held))
    assert extremes(ask) == (held.min(), held.max())


@settings(deadline=None)
@given(data=pairs(least=1), lists=st.integers(1, 6), seed=st.integers(0, 100))
def test_features_are_finite_and_do_not_depend_on_row_order(
    data: tuple[np.ndarray, np.ndarray], lists: int, seed: int
) -> None:
    values, _ = data
    groups = np.arange(len(values)) % lists
    rows = list_features(values, groups)
    assert np.isfinite(rows).all()
    order = np.random.default_rng(seed).permutation(len(values))
    assert list_features(values[order], groups[order]) == pytest.approx(rows[order], rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(data=pairs(), lists=st.integers(1, 10))
def test_softmax_gives_each_list_at_most_one(data: tuple[np.ndarray, np.ndarray], lists: int) -> None:
    values, labels = data
    groups = np.arange(len(values)) % lists
    chances = Softmax().fit(values, labels, groups=groups).probabilities(values, groups=groups)
    assert (np.bincount(groups, weights=chances) <= 1 + 1e-9).all()


@settings(deadline=None)
@given(data=pairs(least=4))
def test_probabilities_never_change_a_run(data: tuple[np.ndarray, np.ndarray]) -> None:
    values, labels = data
    run = Run.of([f"q{at % 2}" for at in range(len(values))], [f"d{at}" for at in range(len(values))], values)
    told = run.with_probabilities(Platt().fit(values, labels).probabilities(run.scores))
    assert told.with_probabilities(None) == run
