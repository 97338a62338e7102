"""Composition: against OpenDP, against the exact loss of randomised response, and against itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import PrivacyError
from isthmus.private import cost as composition
from isthmus.private.cost import (
    RULES,
    PrivacyLoss,
    approximate_to_zcdp,
    ceiling,
    pure_to_zcdp,
    room,
    zcdp_to_approximate,
    zcdp_to_pure,
)

DELTAS = st.sampled_from([0.0, 1e-9, 1e-6, 1e-3])
SMALL = st.floats(0.001, 3)


def exact_delta(epsilon: float, times: int, budget: float) -> float:
    """The least δ at ε = budget of `times` ε-private releases (Kairouz, Oh and Viswanath 2015, Theorem 3.3):
    the exact privacy loss of as many randomised responses."""
    wrong = np.arange(times + 1)
    ways = np.array([math.log(math.comb(times, k)) for k in wrong])
    likely = ways + (times - wrong) * epsilon - times * math.log1p(math.exp(epsilon))
    loss = (times - 2 * wrong) * epsilon
    return float(np.sum(np.exp(likely) * np.clip(1 - np.exp(budget - loss), 0, None)))


@pytest.mark.parametrize("scale", [0.3, 2.0, 100.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_zcdp_converts_as_opendp_does(scale: float, delta: float) -> None:
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.atom_domain(T=int), dp.absolute_distance(T=int)
    gaussian = space >> dp.m.then_gaussian(scale)
    theirs = dp.c.make_zCDP_to_approxDP(gaussian).map(1).epsilon(delta)
    ours = PrivacyLoss.gaussian(1, scale).at(delta=delta, rule="zcdp")
    assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "times"), [(0.1, 50), (0.5, 8), (2.0, 3)])
def test_sums_are_those_of_opendp(epsilon: float, times: int) -> None:
    dp = pytest.importorskip("opendp.prelude")
    dp.enable_features("contrib")
    space = dp.atom_domain(T=int), dp.absolute_distance(T=int)
    laplace = space >> dp.m.then_laplace(1 / epsilon)
    together = PrivacyLoss.of(epsilon) * times
    summed = dp.c.make_composition([laplace] * times).map(1)
    assert together.at() == pytest.approx(summed)
    concentrated = dp.c.make_composition([dp.c.make_pureDP_to_zCDP(laplace)] * times)
    theirs = dp.c.make_zCDP_to_approxDP(concentrated).map(1).epsilon(1e-6)
    ours = RULES["zcdp"](together, 1e-6)
    assert ours <= theirs * (1 + 1e-9), "ε tanh(ε/2) is never more than ε²/2"
    assert RULES["zcdp"](PrivacyLoss(rho=times * epsilon**2 / 2), 1e-6) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(("epsilon", "times"), [(0.05, 200), (0.1, 100), (0.5, 40), (1.0, 12), (4.0, 3)])
def test_no_rule_promises_more_than_is_true(rule: composition.Rule, epsilon: float, times: int) -> None:
    delta = 1e-5
    promised = (PrivacyLoss.of(epsilon) * times).at(delta=delta, rule=rule)
    assert exact_delta(epsilon, times, promised) <= delta


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0, 8.0, 20.0])
def test_randomised_response_needs_exactly_that_rho(epsilon: float) -> None:
    """Its Rényi divergence of order α lies below αρ everywhere and touches it at α → 1."""
    orders = 1 + np.logspace(-5, 4, 2000)
    right, wrong = -math.log1p(math.exp(-epsilon)), -epsilon - math.log1p(math.exp(-epsilon))
    there, back = orders * right + (1 - orders) * wrong, orders * wrong + (1 - orders) * right
    needed = np.logaddexp(there, back) / (orders - 1) / orders
    assert needed.max() <= pure_to_zcdp(epsilon) * (1 + 1e-6)
    assert needed.max() == pytest.approx(pure_to_zcdp(epsilon), rel=1e-3)


def test_many_small_releases_gain_and_one_large_one_does_not() -> None:
    assert (PrivacyLoss.of(0.01) * 1000).at(delta=1e-6, rule="zcdp") < 2
    for rule in RULES:
        assert PrivacyLoss.of(8).at(delta=1e-6, rule=rule) == 8
        assert (PrivacyLoss.of(0.01) * 1000).at(delta=0, rule=rule) == pytest.approx(10), (
            "without δ only the sum holds"
        )


@settings(max_examples=40, deadline=None)
@given(st.lists(SMALL, max_size=20), SMALL, DELTAS, st.sampled_from(list(RULES)))
def test_a_ceiling_says_what_the_rule_says(
    epsilons: list[float], budget: float, delta: float, rule: composition.Rule
) -> None:
    together = sum((PrivacyLoss.of(epsilon) for epsilon in epsilons), PrivacyLoss())
    bound = ceiling(budget, delta=delta, rule=rule)
    if abs(together.at(delta=delta, rule=rule) - budget) > 1e-9:
        assert together.within(bound) == (together.at(delta=delta, rule=rule) <= budget)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.001, 0.3), max_size=20), SMALL, DELTAS, st.sampled_from(list(RULES)))
def test_room_is_the_largest_that_fits(
    epsilons: list[float], budget: float, delta: float, rule: composition.Rule
) -> None:
    spent = sum((PrivacyLoss.of(epsilon) for epsilon in epsilons), PrivacyLoss())
    bound = ceiling(budget, delta=delta, rule=rule)
    left = room(spent, bound)
    if left > 1e-6:
        assert (spent + PrivacyLoss.of(left * (1 - 1e-9))).within(bound)
    assert not (spent + PrivacyLoss.of(left + 1e-6)).within(bound)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-6, 50))
def test_conversions_come_back(number: float) -> None:
    assert zcdp_to_pure(pure_to_zcdp(number)) == pytest.approx(number, rel=1e-6)
    assert zcdp_to_approximate(approximate_to_zcdp(number, 1e-6), 1e-6) == pytest.approx(number, rel=1e-6)


def test_infinite_losses_stay_infinite() -> None:
    exposed = PrivacyLoss.of(math.inf) + PrivacyLoss.of(1)
    for rule in RULES:
        assert exposed.at(delta=1e-6, rule=rule) == math.inf
        assert not exposed.within(ceiling(9, delta=1e-6, rule=rule))
        assert exposed.within(ceiling(math.inf, delta=1e-6, rule=rule))
        assert room(exposed, ceiling(9, delta=1e-6, rule=rule)) == 0
    assert PrivacyLoss.of(math.inf) * 0 == PrivacyLoss()


@pytest.mark.parametrize("epsilon", [-1.0, math.nan])
def test_a_negative_loss_is_refused(epsilon: float) -> None:
    with pytest.raises(PrivacyError, match="no privacy loss"):
        PrivacyLoss.of(epsilon)
