"""Intervals, paired tests and calibration measures: against arithmetic written out, and against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from isthmus import evaluation
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import (
    Floor,
    Reliability,
    bootstrap,
    calibration,
    calibration_of,
    ece,
    holm,
    mce,
    outcomes_of,
    paired_t,
    randomisation,
    reliability,
    reliability_diagram,
    sampling_floor,
)
from isthmus.tables import Qrels, Run


@pytest.fixture(scope="module")
def pair() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    first = random.random(50)
    return first, first - 0.03 + 0.1 * random.normal(size=50)


class TestBootstrap:
    def test_agrees_with_scipy(self, pair: tuple[np.ndarray, np.ndarray]) -> None:
        found = bootstrap(pair[0], samples=20_000)
        peer = stats.bootstrap((pair[0],), np.mean, method="percentile", n_resamples=20_000, rng=3)
        assert found.low == pytest.approx(peer.confidence_interval.low, abs=0.004)
        assert found.high == pytest.approx(peer.confidence_interval.high, abs=0.004)

    def test_same_seed_same_interval(self, pair: tuple[np.ndarray, np.ndarray]) -> None:
        assert bootstrap(pair[0]) == bootstrap(pair[0])
        assert bootstrap(pair[0]) != bootstrap(pair[0], seed=1)

    def test_weights_give_a_ratio_of_means(self) -> None:
        found = bootstrap([1.0, 0.0, 0.5], weights=[3.0, 1.0, 0.0])
        assert found.value == pytest.approx(0.75)

    def test_values_that_do_not_count_are_left_out(self) -> None:
        assert bootstrap([0.2, math.nan, 0.4]).value == pytest.approx(0.3)
        assert bootstrap([0.2, math.nan, 0.4]).n == 2

    def test_groups_are_drawn_whole(self) -> None:
        values = np.repeat(np.random.default_rng(4).random(20), 25)
        alone, grouped = bootstrap(values), bootstrap(values, groups=np.repeat(np.arange(20), 25))
        assert grouped.n == 20
        assert grouped.high - grouped.low > 3 * (alone.high - alone.low)


class TestPairedTests:
    def test_t_agrees_with_scipy(self, pair: tuple[np.ndarray, np.ndarray]) -> None:
        found, peer = paired_t(*pair), stats.ttest_rel(*pair)
        assert found.p == pytest.approx(peer.pvalue, rel=1e-10)
        assert found.difference == pytest.approx(np.mean(pair[0] - pair[1]))

    def test_t_with_groups_is_the_t_of_group_sums(self) -> None:
        """With groups of equal size the cluster-robust test is the plain one over their means."""
        difference = np.random.default_rng(5).normal(0.1, 1, (12, 4))
        groups = np.repeat(np.arange(12), 4)
        found = paired_t(difference.ravel(), np.zeros(48), groups=groups)
        assert found.p == pytest.approx(stats.ttest_1samp(difference.mean(axis=1), 0).pvalue, rel=1e-10)
        assert found.n == 12

    def test_randomisation_agrees_with_scipy(self, pair: tuple[np.ndarray, np.ndarray]) -> None:
        found = randomisation(*pair, samples=20_000)
        peer = stats.permutation_test(
            pair,
            lambda a, b, axis: np.mean(a - b, axis=axis),
            permutation_type="samples",
            n_resamples=20_000,
            rng=1,
        )
        assert found.p == pytest.approx(peer.pvalue, abs=0.01)

    def test_randomisation_is_exact_for_few_queries(self) -> None:
        found = randomisation([0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4])
        assert (found.p, found.how) == (2 / 16, "randomisation, exact")

    def test_equal_runs_are_not_different(self, pair: tuple[np.ndarray, np.ndarray]) -> None:
        assert paired_t(pair[0], pair[0]).p == 1.0
        assert randomisation(pair[0], pair[0]).p == 1.0
        assert paired_t(pair[0] + 0.25, pair[0]).p < 1e-10

    def test_false_alarms_are_as_rare_as_promised(self) -> None:
        random = np.random.default_rng(6)
        trials = [random.normal(size=(2, 30)) for _ in range(300)]
        for test in (paired_t, lambda a, b: randomisation(a, b, samples=999)):
            alarms = np.mean([test(*trial).p < 0.05 for trial in trials])
            assert 0.02 < alarms < 0.09

    def test_what_cannot_be_compared(self) -> None:
        with pytest.raises(DataError, match="2 values beside 3"):
            paired_t([1.0, 2.0], [1.0, 2.0, 3.0])
        with pytest.raises(DataError, match="no query in common"):
            randomisation([1.0, math.nan], [math.nan, 1.0])
        with pytest.raises(DataError, match="at least two"):
            paired_t([1.0], [0.5])


def test_holm_by_hand() -> None:
    """Four tests: 0.01·4, 0.02·3, 0.03·2 and 0.04·1, each at least the one before."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]).tolist() == [1.0, 1.0]
    assert holm([]).tolist() == []


class TestCalibration:
    CHANCES = (0.1, 0.1, 0.9, 0.8)
    OUTCOMES = (0, 1, 1, 1)

    def test_errors_of_calibration_by_hand(self) -> None:
        assert ece(self.CHANCES, self.OUTCOMES, bins=2) == pytest.approx(0.5 * 0.4 + 0.5 * 0.15)
        assert mce(self.CHANCES, self.OUTCOMES, bins=2) == pytest.approx(0.4)
        assert ece([0.4, 0.6], [1, 0], bins=2) == pytest.approx(0.6), "too little and too much do not cancel"
        assert evaluation.brier(self.CHANCES, self.OUTCOMES) == pytest.approx((0.01 + 0.81 + 0.01 + 0.04) / 4)
        assert evaluation.base_rate(self.OUTCOMES) == 0.75
        skill = 1 - (0.87 / 4) / (0.75 * 0.25)
        assert evaluation.brier_skill(self.CHANCES, self.OUTCOMES) == pytest.approx(skill)
        expected = -(math.log(0.9) + math.log(0.1) + math.log(0.9) + math.log(0.8)) / 4
        assert evaluation.log_loss(self.CHANCES, self.OUTCOMES) == pytest.approx(expected)

    def test_bin_edges(self) -> None:
        found = reliability([0.0, 0.5, 1.0], [0, 1, 1], bins=2)
        assert found.count.tolist() == [1, 2]

    def test_equal_mass(self) -> None:
        found = reliability(np.linspace(0.4, 0.6, 100), np.arange(100) % 2, bins=4, how="mass")
        assert found.count.tolist() == [25] * 4
        tied = reliability([0.2] * 7 + [0.3] * 3, [0] * 10, bins=5, how="mass")
        assert sorted(tied.count.tolist()) == [0, 0, 0, 3, 7]
        with pytest.raises(ConfigError, match="did you mean 'mass'"):
            reliability([0.5], [1], how="mas")

    def test_the_honest_constant(self) -> None:
        outcomes = np.array([1, 0, 0, 0] * 25)
        found = calibration(np.full(100, 0.25), outcomes)
        assert found["ECE"] == found["ECE(mass)"] == found["MCE"] == found["Brier skill"] == 0
        assert found["Brier"] == pytest.approx(0.25 * 0.75)
        assert found["n"] == 100

    def test_bins_of_silos_add(self) -> None:
        random = np.random.default_rng(7)
        chances, outcomes = random.random(200), random.integers(0, 2, 200)
        together = reliability(chances, outcomes)
        added = reliability(chances[:50], outcomes[:50]) + reliability(chances[50:], outcomes[50:])
        assert isinstance(added, Reliability)
        assert added.ece == pytest.approx(together.ece)
        assert added.rows()[3] == pytest.approx(together.rows()[3])
        with pytest.raises(ConfigError, match="edges"):
            together + reliability(chances, outcomes, bins=3)

    def test_all_outcomes_alike_have_no_skill(self) -> None:
        assert math.isnan(evaluation.brier_skill([0.5, 0.6], [1, 1]))

    @pytest.mark.parametrize(
        ("chances", "outcomes", "problem"),
        [([1.1], [1], "outside"), ([math.nan], [1], "outside"), ([0.5], [2], "neither"), ([], [], "0 prob")],
    )
    def test_bad_input(self, chances: list[float], outcomes: list[float], problem: str) -> None:
        with pytest.raises(DataError, match=problem):
            calibration(chances, outcomes)

    def test_of_a_run(self) -> None:
        qrels = Qrels.from_dict({"q": {"a": 1, "b": 0}, "p": {"a": 2}})
        run = Run.of(
            ["q", "q", "q", "p", "other"],
            ["a", "b", "new", "a", "x"],
            [3.0, 2.0, 1.0, 1.0, 1.0],
            probabilities=[0.9, 0.4, 0.2, 0.8, 0.5],
        )
        chances, outcomes = outcomes_of(qrels, run)
        assert sorted(zip(chances, outcomes, strict=True)) == [(0.2, 0), (0.4, 0), (0.8, 1), (0.9, 1)]
        assert len(outcomes_of(qrels, run, unjudged="drop")[0]) == 3
        assert outcomes_of(qrels, run, rel=2)[1].sum() == 1
        assert ece(*outcomes_of(qrels, run, top=1)) == pytest.approx((0.1 + 0.2) / 2)
        assert calibration_of(qrels, run, top=1)["ECE@1"] == pytest.approx(0.15)
        with pytest.raises(DataError, match="has no probabilities"):
            outcomes_of(qrels, run.with_probabilities(None))

    def test_the_diagram_draws(self) -> None:
        found = reliability(self.CHANCES, self.OUTCOMES)
        assert reliability_diagram({"two bins": found}).svg().startswith("<svg")


def test_the_floor_is_what_a_perfect_model_shows() -> None:
    """Sampling alone: it shrinks like 1/√n, is 0 where outcomes are certain, and holds for drawn outcomes."""
    rng = np.random.default_rng(0)
    few, many = (sampling_floor(rng.random(n)) for n in (100, 10_000))
    assert 0 < many.mean < few.mean / 5
    assert few.mean < few.high
    assert sampling_floor(np.array([0.0, 1.0, 1.0])) == Floor(0.0, 0.0)
    chance = rng.random(300) ** 3
    errors = [ece(chance, rng.random(300) < chance) for _ in range(400)]
    floor = sampling_floor(chance)
    assert np.mean(errors) == pytest.approx(floor.mean, rel=0.05)
    assert np.mean(np.array(errors) > floor.high) == pytest.approx(0.05, abs=0.03)


def test_calibration_leads_with_the_top_of_the_list() -> None:
    run = Run.from_dict({"q": {f"d{at:02}": 1.0 - at / 40 for at in range(30)}})
    qrels = Qrels.from_dict({"q": {"d00": 1, "d03": 1, "d20": 1}})
    run = run.with_probabilities(run.scores)
    record = calibration_of(qrels, run)
    assert list(record)[:3] == ["ECE@10", "ECE@10 floor", "ECE@10 floor 95%"]
    assert record["ECE@10"] == ece(*outcomes_of(qrels, run, top=10)) != record["ECE"]
    assert (record["n@10"], record["n"]) == (10, 30)
