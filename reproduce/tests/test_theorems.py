"""The theorems of the CS-F-LTR paper: what holds of them, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus_reproduce.private.plots import EPSILON, error_bound, theorems, unsafe_corollary1


def test_theorem_2_and_3_are_their_formulae() -> None:
    assert error_bound(0.5, rest=100.0, width=120) == pytest.approx((16 / 0.25 + 64 * 100 / 120) ** 0.5)
    assert error_bound(0.5, 100.0, 120, words=5) == pytest.approx(5**0.5 * error_bound(0.5, 100.0, 120))


def test_the_bounds_hold_for_noise_of_its_own_and_not_by_more_rows_for_shared_noise() -> None:
    measured = theorems(width=120, seed=0)
    for theorem in ("2", "3"):
        assert measured[f"noise a cell {theorem}"] < measured[f"bound {theorem}"]
    # one draw for all rows: its tail is that of the draw itself, however many rows there are
    assert measured["shared noise 2"] > np.log(200) / EPSILON * 0.8
    assert measured["shared noise 2"] > 1.5 * measured["noise a cell 2"]


def test_corollary_1_promises_epsilon_and_costs_its_own() -> None:
    """Laplace noise of 1/ε' shows a word that is certain to change the count with a loss of ε', not of ε."""
    expected = {0.1: 3.09, 0.5: 4.87, 1.0: 5.84}
    for epsilon, larger in expected.items():
        assert unsafe_corollary1(epsilon, 200) == pytest.approx(larger, abs=0.006)
        scale = 1 / unsafe_corollary1(epsilon, 200)
        loss = max(abs(abs(x - 1) - abs(x)) / scale for x in np.linspace(-5, 5, 101))
        assert loss == pytest.approx(unsafe_corollary1(epsilon, 200))
        assert loss > 5 * epsilon
