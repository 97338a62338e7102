"""Losses against their formulas, written out slowly, and against finite differences."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from isthmus import losses
from isthmus.errors import ConfigError
from isthmus.losses import (
    LOSSES,
    Loss,
    cross_entropy,
    lambdarank,
    loss_named,
    ranknet,
    risk_weights,
    softmax,
    squared_error,
)

OFFSETS = np.array([0, 5, 5, 6, 20, 33])  # an empty list, a list of one, lists of unequal length


def batch(loss: Loss, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    rows = int(OFFSETS[-1])
    labels = rng.integers(0, 4, rows)
    labels[:5] = 0  # a list in which nothing is relevant
    return rng.normal(0, 2, (rows, 4) if loss.graded else rows), labels


def differences(loss: Loss, scores: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """The gradient by central differences."""
    found = np.zeros_like(scores)
    for at in np.ndindex(scores.shape):
        step = np.zeros_like(scores)
        step[at] = 1e-5
        above, _ = loss.function(scores + step, labels, OFFSETS)
        below, _ = loss.function(scores - step, labels, OFFSETS)
        found[at] = (above - below) / 2e-5
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_the_derivative_of_the_value(name: str) -> None:
    # LambdaRank's value holds its weights, which change only where ranks do: between, it has a derivative.
    scores, labels = batch(LOSSES[name])
    _, gradient = LOSSES[name].function(scores, labels, OFFSETS)
    np.testing.assert_allclose(gradient, differences(LOSSES[name], scores, labels), atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_single_precision_stays_single_and_close(name: str) -> None:
    scores, labels = batch(LOSSES[name])
    value, gradient = LOSSES[name].function(scores, labels, OFFSETS)
    single_value, single = LOSSES[name].function(scores.astype(np.float32), labels.astype(np.int32), OFFSETS)
    assert single.dtype == np.float32
    assert single_value == pytest.approx(value, rel=1e-5)
    np.testing.assert_allclose(single, gradient, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_what_was_given_is_left_alone(name: str) -> None:
    scores, labels = batch(LOSSES[name])
    before = scores.copy()
    scores.flags.writeable = False
    LOSSES[name].function(scores, labels, OFFSETS)
    np.testing.assert_array_equal(scores, before)


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_batch_costs_nothing(name: str) -> None:
    scores = np.zeros((0, 4) if LOSSES[name].graded else 0, np.float32)
    for offsets in (np.array([0]), np.array([0, 0, 0])):
        value, gradient = LOSSES[name].function(scores, np.zeros(0, np.int32), offsets)
        assert value == 0
        assert gradient.shape == scores.shape


@pytest.mark.parametrize("name", LOSSES)
def test_enormous_scores_give_finite_answers(name: str) -> None:
    scores, labels = batch(LOSSES[name])
    with np.errstate(all="raise", under="ignore"):
        value, gradient = LOSSES[name].function((scores * 1e4).astype(np.float32), labels, OFFSETS)
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()


def test_squared_error_by_hand() -> None:
    value, gradient = squared_error(np.array([1.0, 3.0]), np.array([2, 0]), np.array([0, 2]))
    assert value == (0.5 * 1 + 0.5 * 9) / 2
    assert gradient.tolist() == [-0.5, 1.5]


def test_cross_entropy_by_hand() -> None:
    scores = np.log([[1.0, 1.0, 2.0], [3.0, 1.0, 4.0]])
    value, gradient = cross_entropy(scores, np.array([2, 0]), np.array([0, 2]))
    assert value == pytest.approx(-(math.log(2 / 4) + math.log(3 / 8)) / 2)
    np.testing.assert_allclose(
        gradient, [[1 / 8, 1 / 8, 2 / 8 - 1 / 2], [3 / 16 - 1 / 2, 1 / 16, 4 / 16]], atol=1e-12
    )


def test_cross_entropy_takes_either_layout() -> None:
    scores, labels = batch(LOSSES["cross_entropy"])
    value, gradient = cross_entropy(scores, labels, OFFSETS)
    other_value, other = cross_entropy(np.asfortranarray(scores), labels, OFFSETS)
    assert other.flags.f_contiguous
    assert other_value == pytest.approx(value)
    np.testing.assert_allclose(other, gradient, atol=1e-15)


def test_softmax_by_hand() -> None:
    scores, labels = np.log([2.0, 1.0, 1.0, 5.0]), np.array([2, 1, 0, 0])
    value, gradient = softmax(scores, labels, np.array([0, 3, 4]))
    # Targets 3/4 and 1/4; the second list has no relevant document and adds nothing to the mean of two.
    assert value == pytest.approx(-(3 / 4 * math.log(2 / 4) + 1 / 4 * math.log(1 / 4)) / 2)
    np.testing.assert_allclose(gradient, [(0.5 - 0.75) / 2, 0, 0.25 / 2, 0], atol=1e-12)


def slow_pairs(
    scores: NDArray[np.float64],
    labels: NDArray[np.int64],
    offsets: NDArray[np.int64],
    *,
    sigma: float = 1.0,
    truncation: int | None = None,
    weighted: bool,
) -> tuple[float, NDArray[np.float64]]:
    """RankNet (Burges 2010, §2) and LambdaRank (§4; pairs and truncation as in LightGBM), pair by pair."""
    value, gradient = 0.0, np.zeros_like(scores)
    for start, end in itertools.pairwise(offsets):
        order = start + np.argsort(-scores[start:end], kind="stable")
        rank = {int(row): place for place, row in enumerate(order)}
        gains = np.sort(2.0 ** labels[start:end] - 1)[::-1][:truncation]
        ideal = float(sum(gain / math.log2(place + 2) for place, gain in enumerate(gains)))
        pairs = [(i, j) for i in range(start, end) for j in range(start, end) if labels[i] > labels[j]]
        kept = [(i, j) for i, j in pairs if truncation is None or min(rank[i], rank[j]) < truncation]
        for i, j in kept:
            swap = abs(1 / math.log2(rank[i] + 2) - 1 / math.log2(rank[j] + 2))
            weight = (2.0 ** labels[i] - 2.0 ** labels[j]) * swap / ideal if weighted else 1 / len(kept)
            value += weight * math.log1p(math.exp(-sigma * (scores[i] - scores[j])))
            slope = weight * sigma / (1 + math.exp(sigma * (scores[i] - scores[j])))
            gradient[i] -= slope
            gradient[j] += slope
    queries = len(offsets) - 1
    return value / queries, gradient / queries


@pytest.mark.parametrize("sigma", [1.0, 2.5])
@pytest.mark.parametrize("seed", range(3))
def test_ranknet_is_its_definition(sigma: float, seed: int) -> None:
    scores, labels = batch(LOSSES["ranknet"], seed)
    value, gradient = ranknet(scores, labels, OFFSETS, sigma=sigma)
    slow_value, slow = slow_pairs(scores, labels, OFFSETS, sigma=sigma, weighted=False)
    assert value == pytest.approx(slow_value)
    np.testing.assert_allclose(gradient, slow, atol=1e-12)


@pytest.mark.parametrize("truncation", [None, 1, 3, 10, 100])
@pytest.mark.parametrize("sigma", [1.0, 2.5])
def test_lambdarank_is_its_definition(sigma: float, truncation: int | None) -> None:
    scores, labels = batch(LOSSES["lambdarank"])
    value, gradient = lambdarank(scores, labels, OFFSETS, sigma=sigma, truncation=truncation)
    slow_value, slow = slow_pairs(scores, labels, OFFSETS, sigma=sigma, truncation=truncation, weighted=True)
    assert value == pytest.approx(slow_value)
    np.testing.assert_allclose(gradient, slow, atol=1e-12)


def test_lambdarank_ranks_tied_scores_in_row_order() -> None:
    scores, labels = np.zeros(6), np.array([0, 2, 1, 0, 1, 2])
    _, gradient = lambdarank(scores, labels, np.array([0, 6]))
    _, slow = slow_pairs(scores, labels, np.array([0, 6]), weighted=True)
    np.testing.assert_allclose(gradient, slow, atol=1e-12)


@pytest.mark.parametrize("budget", [1, 60, 400])
def test_pairs_in_many_blocks_are_pairs_in_one(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, labels = batch(LOSSES["lambdarank"])
    whole = [function(scores, labels, OFFSETS) for function in (ranknet, lambdarank)]
    monkeypatch.setattr(losses, "PAIR_BUDGET", budget)
    for function, (value, gradient) in zip((ranknet, lambdarank), whole, strict=True):
        again_value, again = function(scores, labels, OFFSETS)
        assert again_value == pytest.approx(value)
        np.testing.assert_allclose(again, gradient, atol=1e-14)


def test_a_negative_grade_is_worth_as_little_as_zero() -> None:
    scores, labels = np.array([0.3, 0.1, 0.2]), np.array([1, -1, 0])
    for function in (softmax, lambdarank):
        _, gradient = function(scores, labels, np.array([0, 3]))
        _, clean = function(scores, np.array([1, 0, 0]), np.array([0, 3]))
        np.testing.assert_allclose(gradient, clean)


def test_what_a_trainer_must_know_of_a_loss() -> None:
    assert LOSSES["cross_entropy"].outputs(5) == 5
    assert LOSSES["lambdarank"].outputs(5) == 1
    over_lists = {name for name, loss in LOSSES.items() if loss.whole_queries}
    assert over_lists == {"ranknet", "lambdarank", "softmax", "risk-lambdarank", "risk-softmax"}


def test_an_unknown_loss_or_option_is_named() -> None:
    with pytest.raises(ConfigError, match="lambdarank"):
        loss_named("lamdarank")
    with pytest.raises(ConfigError, match="softmax has no truncation"):
        loss_named("softmax", truncation=5)


def test_options_reach_the_loss() -> None:
    scores, labels = batch(LOSSES["lambdarank"])
    bound = loss_named("lambdarank", truncation=3, sigma=2.0)
    expected, _ = lambdarank(scores, labels, OFFSETS, truncation=3, sigma=2.0)
    assert bound.function(scores, labels, OFFSETS)[0] == expected


# losses against a baseline


def test_queries_below_the_baseline_count_more() -> None:
    """Lists: worse than the baseline, better, equal by ties, empty, and without a relevant document."""
    labels = np.array([1, 0, 1, 0, 2, 0, 0, 0])
    offsets = np.array([0, 2, 4, 6, 6, 8])
    scores = np.array([0.1, 0.9, 0.9, 0.1, 0.5, 0.5, 0.2, 0.3])
    baseline = np.array([0.9, 0.1, 0.1, 0.9, 0.7, 0.1, 0.9, 0.3])
    np.testing.assert_array_equal(risk_weights(scores, labels, offsets, baseline, alpha=2), [3, 1, 1, 1, 1])
    np.testing.assert_array_equal(risk_weights(scores, labels, offsets, baseline, alpha=0), 1)


def test_depth_counts_what_lies_below_as_lost() -> None:
    labels, offsets = np.array([1, 0, 0]), np.array([0, 3])
    scores, baseline = np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.0, 2.0])
    assert risk_weights(scores, labels, offsets, baseline, depth=1)[0] == 1, (
        "both have none in the first place"
    )
    assert risk_weights(scores, labels, offsets, baseline, depth=2)[0] == 2


@pytest.mark.parametrize("name", ["lambdarank", "softmax"])
def test_a_loss_at_risk_has_the_plain_gradient(name: str) -> None:
    plain, risky = LOSSES[name], LOSSES[f"risk-{name}"]
    assert risky.at_risk
    assert not plain.at_risk
    assert risky.function is plain.function
