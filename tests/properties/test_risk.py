"""What holds of risk and weights for every matrix."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from isthmus.federation.risk import paper_weights, probe_risk, risk_matrix, softmax_weights

SOAKING = os.environ.get("ISTHMUS_SOAK") == "1"
SHAPES = st.tuples(st.integers(2, 7), st.integers(1, 12))
ERRORS = arrays(np.float64, SHAPES, elements=st.floats(0, 1, width=32))
ALPHAS = st.sampled_from([0.0, 1.0, 2.0])


@given(ERRORS, ALPHAS)
def test_sound_weights_are_a_distribution(errors, alpha):
    risk = probe_risk(errors, alpha_risk=alpha)
    weights = softmax_weights(risk)
    assert (weights >= 0).all()
    assert np.isclose(weights.sum(), 1)


@given(ERRORS, ALPHAS, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(errors, alpha, random):
    order = list(range(len(errors)))
    random.shuffle(order)
    np.testing.assert_allclose(
        probe_risk(errors[order], alpha_risk=alpha), probe_risk(errors, alpha_risk=alpha)[order], atol=1e-9
    )


@given(ERRORS, ALPHAS)
def test_equal_candidates_have_equal_risk(errors, alpha):
    twins = np.vstack([errors, errors[:1]])
    risk = probe_risk(twins, alpha_risk=alpha)
    assert np.isclose(risk[0], risk[-1])


@settings(max_examples=200 if SOAKING else 50)
@given(ERRORS, ALPHAS, st.floats(0.05, 0.95))
def test_scaling_up_one_candidates_errors_lowers_its_weight(errors, alpha, share):
    """The same errors, larger by one factor: the sound weight falls, up to rounding."""
    small = np.maximum(errors, 0.01) * share
    before, after = small.copy(), small.copy()
    after[0] = after[0] / share
    lower = softmax_weights(probe_risk(before, alpha_risk=alpha), temperature=1.0)[0]
    higher = softmax_weights(probe_risk(after, alpha_risk=alpha), temperature=1.0)[0]
    assert higher < lower + 1e-9


@given(ERRORS)
def test_the_paper_weight_rises_with_a_proportional_error(errors):
    """The printed sign, documented: of two clients with proportional errors the worse one weighs more."""
    pair = np.vstack([errors[0] + 0.01, 2 * (errors[0] + 0.01)])
    worse = paper_weights(risk_matrix(pair, orientation="error", reference="mean").risk)
    assert worse[1] > worse[0]


@given(st.integers(1, 6), st.integers(1, 6), ALPHAS)
def test_no_errors_give_equal_weights(rows, columns, alpha):
    weights = softmax_weights(probe_risk(np.zeros((rows, columns)), alpha_risk=alpha))
    np.testing.assert_allclose(weights, 1 / rows)
