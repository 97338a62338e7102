"""ZRisk, GeoRisk and weights against the worked figures."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from isthmus.federation.risk import (
    batch_risks,
    effectiveness,
    mean_error,
    paper_weights,
    probe_risk,
    risk_matrix,
    softmax_weights,
)

TWO_BY_TWO = [[1, 0], [1, 2]]


def paper_risk(errors, alpha_risk=2.0):
    return risk_matrix(errors, alpha_risk=alpha_risk, orientation="error", reference="mean")


def test_the_paper_formula_on_two_clients():
    zrisk, georisk, risk = paper_risk(TWO_BY_TWO)
    np.testing.assert_allclose(zrisk, [1.4142, 0.8165], atol=5e-5)
    np.testing.assert_allclose(georisk, [0.61654, 0.99382], atol=5e-6)
    np.testing.assert_allclose(risk, [0.09056, -0.28671], atol=5e-6)


def test_the_paper_formula_step_by_step():
    errors = np.array([[4.0, 1.0, 0.0], [1.0, 0.0, 9.0], [0.0, 0.0, 1.0]])
    expected = np.outer(errors.sum(1), errors.sum(0)) / errors.sum()
    z = (errors - expected) / np.sqrt(expected)
    by_hand = np.where(z >= 0, 3 * z, z).sum(axis=1)
    found = paper_risk(errors)
    np.testing.assert_allclose(found.zrisk, by_hand, rtol=1e-6)
    by_hand = np.sqrt(errors.mean(axis=1) * norm.cdf(by_hand / 3))
    np.testing.assert_allclose(found.georisk, by_hand, rtol=1e-6)


def test_the_sound_risk_on_the_same_two_clients():
    risk = probe_risk(TWO_BY_TWO, worst=16)
    np.testing.assert_allclose(risk, [0.02001, 0.04283], atol=5e-6)


def test_the_wrong_scale_flattens_the_weights():
    """1 − nDCG reaches 1 at worst; scaling it as squared grade errors hides a useless client."""
    errors = np.vstack([np.full((3, 40), 0.3), np.full((1, 40), 0.5)])
    right = softmax_weights(probe_risk(errors, worst=1))
    wrong = softmax_weights(probe_risk(errors, worst=16))
    assert right[0] / right[3] > 15
    assert wrong[0] / wrong[3] < 1.5


def test_the_printed_sign_favours_the_worst_client():
    rng = np.random.default_rng(0)
    scales = np.array([0.12, 0.53, 1.0, 2.16, 5.94, 13.88])
    errors = rng.exponential(scales[:, None], size=(6, 64))
    printed = paper_weights(paper_risk(errors).risk)
    assert (np.diff(printed) > 0).all()
    assert printed[0] < 0, "the best client is subtracted"
    np.testing.assert_allclose(paper_weights([0.5, -1.0]), [0.25, 1.0])  # (1 − risk)/2, no sum of 1
    sound = softmax_weights(probe_risk(errors, worst=errors.max()))
    assert (np.diff(sound) < 0).all()


def test_georisk_of_the_mean_row_is_closed_form():
    errors = np.random.default_rng(1).integers(0, 17, size=(5, 8)).astype(float)
    with_mean = np.vstack([errors, errors.mean(axis=0)])
    _, georisk, _ = paper_risk(with_mean)
    assert georisk[-1] == pytest.approx(np.sqrt(errors.mean() / 2))
    _, own, risk = paper_risk(errors)
    np.testing.assert_allclose(risk, np.sqrt(errors.mean() / 2) - own)


def test_no_error_at_all_is_no_risk_and_equal_weights():
    nothing = np.zeros((4, 6))
    assert not paper_risk(nothing).risk.any()
    np.testing.assert_allclose(paper_weights(paper_risk(nothing).risk), 0.25)
    np.testing.assert_allclose(softmax_weights(probe_risk(nothing)), 0.25)


def test_an_item_nobody_errs_on_is_not_a_division_by_zero():
    with np.errstate(all="raise"):
        risks = paper_risk([[1.0, 0.0, 0.0], [4.0, 0.0, 1.0]])
    assert all(np.isfinite(part).all() for part in risks)


def test_everything_wrong_is_finite():
    with np.errstate(all="raise"):
        risk = probe_risk(np.ones((3, 5)))
    assert np.isfinite(risk).all()
    np.testing.assert_allclose(softmax_weights(risk), 1 / 3)


def test_leading_axes_are_separate_tables():
    tables = np.random.default_rng(2).random((7, 4, 5))
    stacked = risk_matrix(tables)
    for at, table in enumerate(tables):
        np.testing.assert_allclose(stacked.risk[at], risk_matrix(table).risk)


def test_batch_risk_is_the_median_over_batches_of_clients_still_training():
    rng = np.random.default_rng(3)
    errors = [rng.integers(0, 5, size=(count, 4)).astype(float) ** 2 for count in (3, 5, 0)]
    told = [[], []]
    for step in range(3):
        first, second = paper_risk(np.stack([errors[0][step], errors[1][step]])).risk
        told[0].append(first)
        told[1].append(second)
    told[1].extend(paper_risk(errors[1][step : step + 1]).risk[0] for step in (3, 4))
    np.testing.assert_allclose(batch_risks(errors), [np.median(told[0]), np.median(told[1]), 0.0])


def test_sizes_enter_by_their_root():
    weights = softmax_weights([0.1, 0.1], sizes=[400, 100])
    np.testing.assert_allclose(weights, [2 / 3, 1 / 3])


def test_the_control_is_the_plain_mean():
    np.testing.assert_allclose(mean_error([[0.2, 0.4], [0.0, 1.0]]), [0.3, 0.5])
    np.testing.assert_allclose(effectiveness([[0.0, 16.0, 20.0]], worst=16), [[1.0, 0.0, 0.0]])
