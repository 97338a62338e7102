"""Calibrators against scikit-learn's and betacal's own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from betacal import BetaCalibration
from scipy.special import expit
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from isthmus.calibration import Beta, Gamma, Gaussian, Isotonic, Platt, QueryFeature, list_features
from isthmus.calibration.query_feature import DIRECTIONS, Forest
from isthmus.calibration.sums import GAMMA_SHIFT


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """OpenMP's threads spin while they wait, which starves whatever else runs."""
    with threadpool_limits(1, user_api="openmp"):
        yield


@pytest.fixture(scope="module")
def pairs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    scores = rng.gamma(2.0, 3.0, 3_000)
    return scores, (rng.random(3_000) < expit(0.6 * scores - 4)).astype(int)


def test_platt_is_logistic_regression(pairs: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = pairs
    theirs = LogisticRegression(C=1e6, tol=1e-12, max_iter=1000).fit(scores[:, None], y)
    ours = Platt(target_smoothing=False).fit(scores, y)
    assert ours.predict_proba(scores) == pytest.approx(theirs.predict_proba(scores[:, None]), abs=1e-5)


def test_platt_with_smoothed_targets_is_scikit_learns_sigmoid(pairs: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = pairs

    class Scorer(LogisticRegression):  # type: ignore[misc]
        def decision_function(self, rows: np.ndarray) -> np.ndarray:
            return np.asarray(rows[:, 0])

    scorer = FrozenEstimator(Scorer().fit(scores[:, None], y))
    theirs = CalibratedClassifierCV(scorer, method="sigmoid", ensemble=False).fit(scores[:, None], y)
    ours = Platt().fit(scores, y)
    assert ours.predict_proba(scores) == pytest.approx(theirs.predict_proba(scores[:, None]), abs=1e-4)


def test_isotonic_is_isotonic_regression(pairs: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = np.round(pairs[0], 1), pairs[1]
    theirs = IsotonicRegression(out_of_bounds="clip").fit(scores, y)
    grid = np.linspace(-1, scores.max() + 1, 999)
    assert Isotonic().fit(scores, y).probabilities(grid) == pytest.approx(theirs.predict(grid), abs=1e-9)


def test_beta_is_betacal(pairs: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = pairs
    unit = np.clip((scores - scores.min()) / (scores.max() - scores.min()), 1e-6, 1 - 1e-6)
    theirs = BetaCalibration(parameters="abm").fit(unit[:, None], y)
    assert Beta().fit(scores, y).probabilities(scores) == pytest.approx(theirs.predict(unit), abs=2e-3)


def test_gamma_without_its_constraint_is_logistic_regression_on_a_logarithm(
    pairs: tuple[np.ndarray, np.ndarray],
) -> None:
    scores, y = pairs
    y = np.where(scores < np.quantile(scores, 0.02), 0, y)  # what a line in the score cannot express
    x = (scores - scores.min()) / np.ptp(scores) + GAMMA_SHIFT
    rows = np.column_stack((np.log(x), x))
    theirs = LogisticRegression(C=1e8, tol=1e-12, max_iter=10_000).fit(rows, y)
    ours = Gamma(monotone=False).fit(scores, y)
    assert ours.predict_proba(scores) == pytest.approx(theirs.predict_proba(rows), abs=2e-4)


def test_gaussian_without_its_constraint_is_quadratic_logistic_regression(
    pairs: tuple[np.ndarray, np.ndarray],
) -> None:
    scores, y = pairs
    rows = np.column_stack((scores, scores**2)) / 10
    theirs = LogisticRegression(C=1e8, tol=1e-12, max_iter=10_000).fit(rows, y)
    ours = Gaussian(monotone=False).fit(scores, y)
    assert ours.predict_proba(scores) == pytest.approx(theirs.predict_proba(rows), abs=2e-4)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_exported_trees_answer_as_scikit_learns(depth: int) -> None:
    rng = np.random.default_rng(depth)
    rows = rng.normal(size=(2_000, 14))
    y = (rows[:, 0] + rows[:, 3] * rows[:, 5] + rng.normal(size=2_000) > 0).astype(int)
    fresh = rng.normal(size=(50_000, 14))  # more than one block
    histogram = HistGradientBoostingClassifier(
        max_iter=30, max_depth=depth, monotonic_cst=list(DIRECTIONS), early_stopping=False
    ).fit(rows, y)
    assert Forest.of(histogram).margins(fresh) == pytest.approx(histogram.decision_function(fresh), abs=1e-10)
    exact = GradientBoostingClassifier(n_estimators=20, max_depth=depth, subsample=0.8, random_state=0)
    exact.fit(rows, y)
    assert Forest.of(exact).margins(fresh) == pytest.approx(exact.decision_function(fresh), abs=1e-10)


def test_query_feature_is_boosting_on_its_features(pairs: tuple[np.ndarray, np.ndarray]) -> None:
    scores, y = pairs
    groups = np.arange(len(scores)) // 10
    rows = list_features(scores, groups)
    theirs = GradientBoostingClassifier(
        n_estimators=100, max_depth=5, learning_rate=0.1, subsample=0.8, random_state=0
    ).fit(rows, y)
    ours = QueryFeature(boosting="unconstrained").fit(scores, y, groups=groups)
    assert ours.predict_proba(scores, groups=groups) == pytest.approx(theirs.predict_proba(rows), abs=1e-10)
