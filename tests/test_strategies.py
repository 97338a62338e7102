"""Strategies on hand-made answers: what each makes of them, and what FedRisk does in both modes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from isthmus.federation.aggregation import (
    AGREED,
    MEMORY,
    Size,
    below,
    correction,
    cosine,
    norm,
    refusal,
    remembered_risks,
    weigh,
    weigh_by_agreement,
)
from isthmus.federation.risk import batch_risks, mean_error, probe_risk, softmax_weights
from isthmus.federation.settings import FedRisk, Name, StrategyOptions
from rounds_by_hand import HandMade, Probe, coordinator, same
from rounds_by_hand import play as play_rounds

START = {"w": np.array([1.0, -2.0, 3.0], np.float32), "b": np.array([0.5], np.float32)}


def models(count, seed=0, spread=0.1):
    rng = np.random.default_rng(seed)
    return [
        {key: value + rng.normal(0, spread, value.shape).astype(np.float32) for key, value in START.items()}
        for _ in range(count)
    ]


def play(strategy, rounds, **more):
    """The global model after each of the rounds."""
    return [state.parameters for state in play_rounds(strategy, rounds, START, **more)]


def options(name, **more):
    return StrategyOptions(name, **more)


ROUNDS = [(models(4, seed), [10, 20, 30, 40], [1, 2, 3, 4]) for seed in range(3)]


def test_fedavg_weighs_by_examples():
    (last,) = play(options("fedavg"), ROUNDS[:1])
    sent = ROUNDS[0][0]
    by_hand = sum(share * model["w"] for share, model in zip((0.1, 0.2, 0.3, 0.4), sent, strict=True))
    np.testing.assert_allclose(last["w"], by_hand, rtol=1e-6)
    weights = weigh({}, {"a": Size(30.0), "b": Size(10.0)}, options("fedavg")).weights
    assert weights == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize(
    "twin",
    [
        options("fedopt"),
        options("fedavgm", momentum=0.0),
        options("fedprox", proximal=0.0),
        options("fedavg", server="momentum", momentum=0.0),
    ],
    ids=lambda twin: f"{twin.name}-{twin.server}",
)
def test_strategies_that_are_fedavg_in_disguise(twin):
    for first, second in zip(play(options("fedavg"), ROUNDS), play(twin, ROUNDS), strict=True):
        assert same(first, second)


def test_server_momentum_is_heavy_ball():
    """θ_t = θ_{t−1} + Δ_t + m (θ_{t−1} − θ_{t−2})."""
    first, second, third = play(options("fedavgm", momentum=0.5), ROUNDS)
    plain = [play(options("fedavg"), [part])[0] for part in ROUNDS]
    np.testing.assert_allclose(first["w"], plain[0]["w"], rtol=1e-6)
    np.testing.assert_allclose(second["w"], plain[1]["w"] + 0.5 * (first["w"] - START["w"]), rtol=1e-5)
    np.testing.assert_allclose(third["w"], plain[2]["w"] + 0.5 * (second["w"] - first["w"]), rtol=1e-5)


def test_median_and_trimmed_mean_shrug_off_one_liar():
    sent = models(5)
    sent[2] = {key: value + 1e6 for key, value in sent[2].items()}
    for name in ("fedmedian", "fedtrimmedavg"):
        (last,) = play(options(name), [(sent, [1] * 5, [1] * 5)])
        assert np.abs(last["w"] - START["w"]).max() < 1


def test_convex_and_halving_go_part_of_the_way():
    (full,) = play(options("fedavg"), ROUNDS[:1])
    (convex,) = play(options("fedavg", server="convex", momentum=0.25), ROUNDS[:1])
    np.testing.assert_allclose(convex["w"], 0.75 * full["w"] + 0.25 * START["w"], rtol=1e-6)
    *_, third = play(options("fedavg", server="halving"), [([START] * 2, [1, 1], [1, 1])] * 2 + ROUNDS[:1])
    np.testing.assert_allclose(third["w"], START["w"] + (full["w"] - START["w"]) / 8, rtol=1e-6)


def test_fednova_undoes_unequal_numbers_of_steps():
    """One silo took ten steps, the other one, each step the same size: both directions count alike."""
    one = {"w": START["w"] + np.float32([0.1, 0, 0]), "b": START["b"]}
    ten = {"w": START["w"] + np.float32([0, 1.0, 0]), "b": START["b"]}
    (last,) = play(options("fednova"), [([one, ten], [5, 5], [1, 10])])
    np.testing.assert_allclose(last["w"] - START["w"], [5.5 * 0.05, 5.5 * 0.05, 0], atol=1e-6)
    (equal,) = play(options("fednova"), [([one, ten], [5, 5], [4, 4])])
    (average,) = play(options("fedavg"), [([one, ten], [5, 5], [4, 4])])
    np.testing.assert_allclose(equal["w"], average["w"], rtol=1e-6)


def test_scaffold_keeps_the_books():
    sent = models(2)
    (state,) = play_rounds(options("scaffold"), [(sent, [1, 9], [2, 5])], START)
    np.testing.assert_allclose(state.parameters["w"], (sent[0]["w"] + sent[1]["w"]) / 2, rtol=1e-6)
    own = [(START["w"] - sent[at]["w"]) / (steps * 0.1) for at, steps in enumerate((2, 5))]
    np.testing.assert_allclose(state.strategy["controls/silo-0/w"], own[0], rtol=1e-5)
    np.testing.assert_allclose(state.strategy["controls//w"], (own[0] + own[1]) / 4, rtol=1e-5)
    first, second = (correction(state.strategy, name, START)["w"] for name in ("silo-1", "silo-9"))
    np.testing.assert_allclose(first, (own[0] + own[1]) / 4 - own[1], rtol=1e-4)
    np.testing.assert_allclose(second, (own[0] + own[1]) / 4, rtol=1e-5)


def test_silos_are_told_what_their_strategy_needs():
    states = play_rounds(options("scaffold"), ROUNDS[:1], START)
    orders = coordinator(options("scaffold"), HandMade())._orders(states[-1], 2)({100: "silo-0"}, 1)
    assert "correction" in orders[0].content.array_records
    (order,) = coordinator(options("fedprox", proximal=0.3), HandMade())._orders(states[-1], 2)({7: "a"}, 1)
    assert order.content.config_records["config"]["proximal-mu"] == 0.3


@pytest.mark.parametrize(
    "told",
    [options("fedavgm"), options("fedadam"), options("fedyogi"), options("fedadagrad"), options("scaffold")],
    ids=lambda told: told.name,
)
def test_a_restored_strategy_goes_on_bit_identically(told):
    whole = play(told, ROUNDS)
    begun = play_rounds(told, ROUNDS[:1], START)[-1]
    copied = replace(begun, strategy={key: array.copy() for key, array in begun.strategy.items()})
    assert same(play(told, ROUNDS[1:], after=copied)[-1], whole[-1])


# FedRisk, sound


def judge(parameters):
    """Errors grow with the distance from a hidden optimum, item by item."""
    distance = abs(float(parameters["w"][0]) - 2.0)
    return np.clip(distance * np.linspace(0.5, 1.0, 8), 0, 1)


def fedrisk(**more):
    server = more.pop("server", "average")
    return options("fedrisk", server=server, risk=FedRisk(**{"formula": "georisk", **more}))


def judged(strategy, rounds, **more):
    """The states after rounds under a probe."""
    return play_rounds(strategy, rounds, START, probe=Probe(judge), **more)


def shifted(*values):
    return [{**START, "w": np.array([value, -2.0, 3.0], np.float32)} for value in values]


def test_sound_weights_follow_the_probe_and_the_memory_stands_among_them():
    sent = shifted(1.8, 0.2, 1.2)
    (state,) = judged(fedrisk(temperature=0.03, past=0), [(sent, [100, 100, 100], [1, 1, 1])])
    last, weights = state.parameters, state.history[-1].weights
    assert set(weights) == {"silo-0", "silo-1", "silo-2", MEMORY}
    assert weights["silo-0"] > 0.99
    assert weights["silo-1"] < weights[MEMORY] < weights["silo-2"]
    assert sum(weights.values()) == pytest.approx(1)
    errors = np.stack([judge(model) for model in (START, *sent)])
    by_hand = softmax_weights(probe_risk(errors), sizes=[100] * 4)
    np.testing.assert_allclose([weights[name] for name in sorted(weights)], by_hand)
    expected = sum(w * m["w"] for w, m in zip(by_hand, (START, *sent), strict=True))
    np.testing.assert_allclose(last["w"], expected, rtol=1e-6)


def test_the_temperature_follows_the_spread_of_the_probe_s_queries():
    sent = shifted(1.8, 0.2, 1.2)
    (state,) = judged(fedrisk(past=0), [(sent, [100] * 3, [1] * 3)])
    errors = np.stack([judge(model) for model in (START, *sent)])
    around = errors - errors.mean(axis=0)
    two = 2 * np.sqrt(np.mean([np.var(row, ddof=1) / len(row) for row in around]))
    by_hand = softmax_weights(probe_risk(errors), temperature=two, sizes=[100] * 4)
    weights = state.history[-1].weights
    np.testing.assert_allclose([weights[name] for name in sorted(weights)], by_hand)


def test_what_was_seen_of_a_silo_adds_up():
    """past_k = h Σ d/(T + h): after rounds of d = 0.1, −0.1 and 0 silo-0 has 3 · 0.3/6 beside its 0.1."""
    one = {"silo-0": np.full(9, 0.6), "silo-1": np.full(9, 0.4), "silo-2": np.full(9, 0.5)}
    sizes = dict.fromkeys(one, Size(4.0))
    told = options("fedrisk", risk=FedRisk(formula="mean", temperature=0.1))
    state = {}
    for rounds in (1, 2, 3):
        weighed = weigh(one, sizes, told, past=below(state, "risk"))
        shares = np.exp(-np.array([0.1, -0.1, 0.0]) * (1 + 3 * rounds / (rounds + 3)) / 0.1)
        np.testing.assert_allclose(list(weighed.weights.values()), shares / shares.sum())
        state = remembered_risks(state, weighed.relative)
    np.testing.assert_allclose(state["risk/silo-0"], [0.3, 3])
    assert weighed.risks["silo-0"] == pytest.approx(0.6), "the record has the round's own"
    fresh = weigh(one, sizes, options("fedrisk", risk=FedRisk(formula="mean", temperature=0.1, past=0)))
    shares = np.exp(-np.array([0.1, -0.1, 0.0]) / 0.1)
    np.testing.assert_allclose(list(fresh.weights.values()), shares / shares.sum())


def test_a_past_of_praise_does_not_pay_where_silos_report_themselves():
    liar = {"silo-0": np.zeros(9), "silo-1": np.full(9, 0.4), "silo-2": np.full(9, 0.5)}
    sizes, past = dict.fromkeys(liar, Size(4.0)), {"silo-0": np.array([-40.0, 100.0])}
    weights = weigh(liar, sizes, options("fedrisk"), past=past, reported=True).weights
    assert weights["silo-0"] == pytest.approx(weights["silo-1"])


def test_silos_count_by_how_far_their_steps_agree_with_the_probe():
    """Cosines 0.8, 0.4, 0.2 and −0.5: the median of the positive ones is 0.4, which counts in full."""
    now = {"silo-0": 0.8, "silo-1": 0.4, "silo-2": 0.2, "silo-3": -0.5}
    sizes = {name: Size(4.0) for name in now} | {"silo-0": Size(16.0)}
    weighed = weigh_by_agreement(now, sizes, FedRisk(), past={})
    np.testing.assert_allclose(list(weighed.weights.values()), np.array([4, 2, 1, 0]) / 7)
    assert weighed.risks["silo-0"] == pytest.approx(0.1)
    state = remembered_risks({}, weighed.relative)
    later = weigh_by_agreement(dict.fromkeys(now, 0.4), sizes, FedRisk(), past=below(state, "risk"))
    means = np.array([0.6, 0.4, 0.3, -0.05])
    shares = np.array([4, 2, 2, 2]) * np.clip(means / 0.4, 0, 1)
    np.testing.assert_allclose(list(later.weights.values()), shares / shares.sum())


def test_only_the_first_rounds_of_a_silo_tell():
    past = {"silo-0": np.array([-5.0, AGREED]), "silo-1": np.array([5.0, AGREED])}
    sizes = dict.fromkeys(past, Size(1.0))
    weighed = weigh_by_agreement({"silo-0": 1.0, "silo-1": -1.0}, sizes, FedRisk(), past=past)
    assert weighed.weights == {"silo-0": 0.0, "silo-1": 1.0}
    assert not weighed.relative
    fresh = weigh_by_agreement({"silo-0": 1.0, "silo-1": -1.0}, sizes, FedRisk(past=0), past=past)
    assert fresh.weights == {"silo-0": 1.0, "silo-1": 0.0}


def test_where_no_silo_agrees_the_previous_model_stands():
    weighed = weigh_by_agreement({"silo-0": -0.1}, {"silo-0": Size(1.0)}, FedRisk(), past={})
    assert weighed.weights == {MEMORY: 1.0}


def test_the_cosine_is_between_steps():
    ahead, aside = (
        {**START, "w": START["w"] + np.array(step, np.float32)} for step in ([1, 0, 0], [1, 1, 0])
    )
    assert cosine(ahead, aside, START) == pytest.approx(np.sqrt(0.5))
    assert cosine(ahead, START, START) == 0


def test_momentum_follows_the_training_queries_unless_given():
    default = StrategyOptions()
    assert [default.for_queries(count).share for count in (1, 40, 95, 150, 999)] == [0, 0, 0.45, 0.9, 0.9]
    assert StrategyOptions(momentum=0.9).for_queries(9).share == 0.9
    assert StrategyOptions("fedavgm").for_queries(9).share == 0.9
    assert StrategyOptions(risk=FedRisk.paper()).for_queries(9).momentum is None


def test_a_round_of_bad_silos_leaves_the_model_alone():
    sent = shifted(-3.0, -4.0, -5.0)
    (last,) = judged(fedrisk(), [(sent, [100] * 3, [1] * 3)])
    np.testing.assert_allclose(last.parameters["w"], START["w"], atol=1e-3)
    (spoiled,) = judged(fedrisk(memory=False), [(sent, [100] * 3, [1] * 3)])
    assert spoiled.parameters["w"][0] < -2


def worsening(count):
    """Rounds of silos that are a little worse every time, whatever model they start from."""
    return [(shifted(*[0.98 - 0.01 * at] * 3), [100] * 3, [1] * 3) for at in range(count)]


@pytest.mark.parametrize("server", ["average", "momentum", "adam"])
def test_bad_rounds_are_refused_and_any_number_of_them_costs_little(server):
    states = judged(fedrisk(server=server), worsening(3))
    assert all(same(state.parameters, START) for state in states)
    record = states[-1].history[-1]
    assert record.weights == {MEMORY: 1.0}
    assert set(record.rejected) == {"silo-0", "silo-1", "silo-2"}
    assert all("the probe refused the round" in why for why in record.rejected.values())
    for state in judged(fedrisk(server=server), worsening(60)):
        assert judge(state.parameters).mean() < judge(START).mean() + 0.02


def test_a_probe_that_a_lucky_model_did_well_on_does_not_end_training():
    rng = np.random.default_rng(0)
    lucky = rng.normal(0.5, 0.1, 40)
    drawn = iter([lucky, *(lucky + rng.normal(0.05, 0.08, 40) for _ in range(400))])
    refused, best = [], None
    for _ in range(60):
        why, best = refusal(next(drawn), next(drawn), best)
        refused.append(bool(why))
    assert 0 < sum(refused) < 50
    assert not all(refused[-15:])


def test_restraint_goes_on_from_a_checkpoint():
    rounds = [(shifted(1.5, 1.4), [9, 9], [1, 1]), *worsening(2), (shifted(1.8, 1.7), [9, 9], [1, 1])]
    whole = judged(fedrisk(server="momentum"), rounds)
    for cut in range(1, len(rounds)):
        before = judged(fedrisk(server="momentum"), rounds[:cut])
        after = judged(fedrisk(server="momentum"), rounds[cut:], after=before[-1])
        pairs = zip([*before, *after], whole, strict=True)
        assert all(same(one.parameters, other.parameters) for one, other in pairs)


def test_the_memory_has_the_median_size():
    (state,) = judged(fedrisk(formula="none"), [(shifted(1, 1, 1), [1, 4, 100], [1] * 3)])
    np.testing.assert_allclose(
        [state.history[-1].weights[name] for name in ("silo-0", "silo-1", "silo-2", MEMORY)],
        np.array([1, 2, 10, 2]) / 15,
    )


def test_the_control_without_georisk():
    sent = shifted(1.8, 0.2, 1.2)
    plain = fedrisk(formula="mean", memory=False, by_size=False, temperature=0.03, past=0)
    (state,) = judged(plain, [(sent, [1] * 3, [1] * 3)])
    by_hand = softmax_weights(mean_error(np.stack([judge(model) for model in sent])))
    np.testing.assert_allclose(list(state.history[-1].weights.values()), by_hand)


def test_a_server_optimiser_stands_on_fedrisk():
    sent = [(shifted(1.2, 0.2), [1, 1], [1, 1])] * 2
    plain = judged(fedrisk(), sent)
    moved = judged(replace(fedrisk(server="momentum"), momentum=0.9), sent)
    np.testing.assert_array_equal(moved[0].parameters["w"], plain[0].parameters["w"])
    assert moved[1].parameters["w"][0] > plain[1].parameters["w"][0]


def test_self_reported_quantiles_reward_a_liar():
    """Why they are never the default."""
    reports = [np.full(20, 0.3), np.full(20, 0.3), np.zeros(20)]
    (state,) = play_rounds(
        fedrisk(columns="quantile"), [(shifted(1.8, 1.8, -9.0), [1] * 3, [1] * 3, reports)], START
    )
    weights = state.history[-1].weights
    assert weights["silo-2"] > 0.9
    assert MEMORY not in weights, "nobody vouches for it"


# FedRisk as printed


def printed(*mix, **more):
    return options("fedrisk", risk=FedRisk.paper(*mix, **more))


def reports(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 5, (6, 4)).astype(np.float32) ** 2 for _ in range(count)]


def test_paper_mode_is_equations_one_and_five():
    sent, told = models(3), reports(3)
    (last,) = play(printed(0.7, 0.4), [(sent, [1, 50, 9], [1] * 3, told)])
    risk = batch_risks(told)
    tilde = sum((1 - r) * model["w"] for r, model in zip(risk, sent, strict=True)) / 3
    np.testing.assert_allclose(last["w"], 0.7 * tilde + 0.4 * START["w"], rtol=1e-5)


def test_equal_mixing_doubles_the_parameters_and_a_convex_history_does_not():
    still = [([START] * 3, [1] * 3, [1] * 3, reports(3))] * 5
    lengths = [norm(model) for model in play(printed(1.0, 1.0, formula="none"), still)]
    # Silos that do not move send what they got, so the models of later rounds are those of the first.
    grown = [norm(START) * (1 + count) for count in range(1, 6)]
    np.testing.assert_allclose(lengths, grown, rtol=1e-5)
    convex = play(options("fedavg", server="convex", momentum=0.5), [part[:3] for part in still])
    assert all(same(model, START) for model in convex)


def test_renormalised_parameters_keep_their_length():
    strategy = printed(1.0, 1.0, renormalise=True)
    lengths = [norm(model) for model in play(strategy, [(models(3), [1] * 3, [1] * 3, reports(3))] * 4)]
    np.testing.assert_allclose(lengths, norm(START), rtol=1e-5)


def test_batch_errors_are_squared_distances_of_the_most_probable_grade() -> None:
    from isthmus.federation.clients import BatchErrors

    errors = BatchErrors(3)
    scores = np.array([[0.1, 0.7, 0.2], [0.8, 0.1, 0.1], [0.2, 0.3, 0.5]])  # most probable: 1, 0, 2
    errors(scores, np.array([1, 2, 0]))
    errors(scores[:2], np.array([1, 2]))  # the last, smaller batch is not sent
    assert errors.table().tolist() == [[0.0, 4.0, 4.0]]


def test_paper_mode_names_its_faults():
    assert set(FedRisk.paper().faults()) == {"A1", "A2", "A3", "A4", "A6", "A7", "A9"}
    assert "A3" not in FedRisk.paper(0.5, 0.5).faults()
    assert "A1" not in FedRisk.paper(formula="flip").faults()
    assert not FedRisk().faults()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: options("fedavgm", server="adam"),
        lambda: options("fedavg", momentum=1.0),
        lambda: options("fedavg", rate=0.1),
        lambda: FedRisk(mode="paper"),
        lambda: FedRisk(temperature=0),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValueError):
        wrong()


def test_a_round_asks_settings_what_a_strategy_needs():
    flags = ("uses_control_variates", "trains_on_probe", "judges_on_probe")
    names = [name for names in get_args(Name) for name in get_args(names)]
    needs = {name: [flag for flag in flags if getattr(options(name), flag)] for name in names}
    assert {name: flags for name, flags in needs.items() if flags} == {
        "scaffold": ["uses_control_variates"],
        "fedavg-probe": ["trains_on_probe"],
        "fedrisk": ["judges_on_probe"],
    }
    assert options("fedtrimmedavg", trim=0.3).centre_options == {"beta": 0.3}
    assert options("fedmedian", trim=0.3).centre_options == {}
    assert [options(name, proximal=0.3).proximal_term for name in ("fedprox", "fedavg")] == [0.3, 0.0]
