"""Clipped and noised updates: what leaves a silo, and what the record says it cost."""

from __future__ import annotations

import math

import numpy as np
import pytest

from isthmus.federation.noise import clipped, gaussian, noised, private, spent, statement
from isthmus.federation.settings import Config, FedRisk, PrivateUpdates, StrategyOptions
from isthmus.rankers import LocalTraining

START = {"w": np.zeros((30, 40), np.float32), "b": np.ones(50, np.float32)}


def test_the_noise_is_normal():
    drawn = gaussian(200_000)
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1) < 0.01
    assert abs((np.abs(drawn) < 1.96).mean() - 0.95) < 0.005
    assert np.isfinite(gaussian(3, lambda count: b"\xff" * count)).all()
    assert np.isfinite(gaussian(3, lambda count: b"\x00" * count)).all()


def test_an_update_is_cut_to_length_and_a_short_one_left_alone():
    long = {key: value + np.float32(3) for key, value in START.items()}
    cut = clipped(long, START, 2.0)
    moved = np.concatenate([(cut[key] - START[key]).ravel() for key in START])
    assert np.linalg.norm(moved) == pytest.approx(2.0, rel=1e-5)
    assert (moved > 0).all(), "in the same direction"
    assert clipped(START, START, 2.0) is START


def test_noise_is_fresh_and_as_wide_as_told():
    first, second = noised(START, 0.5), noised(START, 0.5)
    assert not np.array_equal(first["w"], second["w"])
    assert np.std(first["w"]) == pytest.approx(0.5, rel=0.1)


def test_shares_of_the_noise_sum_to_the_noise():
    options = PrivateUpdates(clip=1.0, multiplier=2.0, where="server")
    parts = [private(START, START, options, sharers=16)["w"] for _ in range(16)]
    assert np.std(np.sum(parts, axis=0)) == pytest.approx(2.0, rel=0.1)


def test_the_cost_is_that_of_the_silo_asked_most():
    options = PrivateUpdates(clip=3.0, multiplier=10.0, delta=1e-5)
    once = spent([("a",)], options)
    assert spent([("a", "b"), ("b", "c")], options) == spent([("b",), ("b",)], options) > once
    assert spent([], options) == 0
    # zCDP of one update is (2 clip)²/(2 σ²) = 2/multiplier²; its plain conversion is an upper bound
    rho = 2 / options.multiplier**2
    assert 0 < once <= rho + 2 * math.sqrt(rho * math.log(1e5))


def test_the_cost_is_no_less_than_the_exact_one():
    """Exact (ε, δ) of a Gaussian with sensitivity Δ and deviation σ: Balle & Wang 2018, Theorem 8."""
    from scipy.special import ndtr

    options = PrivateUpdates(clip=1.0, multiplier=5.0, delta=1e-6)
    for rounds in (1, 7, 40):
        epsilon = spent([("a",)] * rounds, options)
        ratio = 2 * math.sqrt(rounds) / options.multiplier
        exact = ndtr(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * ndtr(-ratio / 2 - epsilon / ratio)
        assert exact <= options.delta


def test_records_say_what_holds():
    assert statement([], None) == "no DP guarantee"
    told = statement([("a",)], PrivateUpdates())
    assert "δ = 1e-05" in told
    assert "feature sums: no DP guarantee" in told


@pytest.mark.parametrize(
    "strategy",
    [StrategyOptions("fedrisk"), StrategyOptions("fedmedian"), StrategyOptions("scaffold")],
    ids=lambda strategy: strategy.name,
)
def test_noise_by_the_server_is_refused_where_it_would_not_cover_the_rule(strategy):
    with pytest.raises(ValueError, match="plain means"):
        Config(
            strategy=strategy, privacy=PrivateUpdates(where="server"), local=LocalTraining(optimiser="sgd")
        )


def test_self_reports_do_not_leave_beside_private_updates():
    with pytest.raises(ValueError, match="without noise"):
        Config(strategy=StrategyOptions(risk=FedRisk(columns="quantile")), privacy=PrivateUpdates())
