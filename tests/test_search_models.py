"""Search models learned from sums: equal to one place, guarded, saved, and safe against hostile numbers."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import minimize

from isthmus.asking import TooFew
from isthmus.errors import ConfigError, DataError, ProtocolError
from isthmus.learning import (
    COLUMNS,
    OF_QUERY,
    RISING,
    BaselineScale,
    Difference,
    HitCalibration,
    JudgedRows,
    LearningOptions,
    Record,
    SearchModel,
    Start,
    Weights,
    answer_bytes,
    answer_of,
    calibrating,
    choose,
    learn,
    profile_of,
    question_of,
)
from isthmus.learning.calibrating import CalibrationRules, RankedLists, fit_calibration
from isthmus.learning.columns import DISCOUNTS, HITS, LIST, merged, shapes
from isthmus.learning.learner import PENALTY
from isthmus.learning.model import KNOTS
from isthmus.learning.questions import (
    BestMargins,
    ColumnMoments,
    FoldsOf,
    GainsOf,
    HitsByCell,
    LossSums,
    OwnHitsByCell,
    RelevantOf,
)
from isthmus.learning.record import Honesty
from isthmus.logistic import likelihood_sums
from isthmus.service.reliability import learned_curve
from learning_rows import FOLDS, dealt, in_memory, made_rows

HYBRID = BaselineScale((0.5, 0.4), (0.0, 0.25), "encoder-1")
QUERIES = [f"query {at}" for at in range(60)]


def learned(silos, baseline=BaselineScale(), queries=QUERIES, **options):  # noqa: B008 - frozen
    return learn(
        in_memory(silos), queries, folds=FOLDS, baseline=baseline, options=LearningOptions(**options)
    )


# learning


def test_what_four_silos_learn_is_what_one_place_learns():
    rows = made_rows(dense=True)
    (one, alone), (four, together) = (learned(dealt(rows, count), HYBRID) for count in (1, 4))
    assert one.kind == four.kind
    np.testing.assert_allclose(one.score.weights, four.score.weights, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(one.calibration.weights, four.calibration.weights, rtol=1e-6, atol=1e-9)
    for name, model in alone.models.items():
        assert model["nDCG@10"] == pytest.approx(together.models[name]["nDCG@10"], abs=1e-12)


def test_the_fit_is_the_penalised_logistic_model_with_bounds():
    """The oracle is SciPy's L-BFGS-B on the same loss."""
    table, relevant, query = rows = made_rows(3)
    model, record = learned(dealt(rows, 3))
    assert record.kind == "linear"
    used = [at for at, name in enumerate(COLUMNS) if name != "dense"]
    values = (table[:, used] - table[:, used].mean(axis=0)) / table[:, used].std(axis=0)
    features = np.column_stack((values[:, 0], values, np.ones(len(values))))
    weights = 1 / np.maximum(np.bincount(query, relevant), 1)[query]
    penalty = np.array([1e-3, *[PENALTY] * (len(used) - 2), 1e-2, 1e-2, 1e-6])

    def loss(theta):
        margin = features @ theta
        residual = weights * (1 / (1 + np.exp(-margin)) - relevant)
        value = weights @ (np.logaddexp(0, margin) - relevant * margin) + penalty @ theta**2 / 2
        return value, features.T @ residual + penalty * theta

    least = [0, *[0 if COLUMNS[at] in RISING else None for at in used], None]
    fit = minimize(loss, np.zeros(len(penalty)), jac=True, bounds=[(low, None) for low in least], tol=1e-14)
    expected = fit.x[1:-1]
    expected[0] += fit.x[0]
    np.testing.assert_allclose(model.score.weights[used], expected, atol=2e-4)


def test_a_model_that_helps_is_adopted_and_one_that_cannot_is_not():
    _, gained = learned(dealt(made_rows(), 3))
    assert gained.adopted
    assert gained.kind == "linear"
    assert gained.models["linear"]["weights"]["title"] > 0.1
    difference = gained.models["linear"]["difference"]
    assert difference["low"] > 0
    assert gained.queries_needed is None
    model, nothing = learned(dealt(made_rows(strength=0.0), 3))
    assert not nothing.adopted
    assert nothing.kind == model.kind == "baseline"
    assert nothing.why.startswith("learning gained nothing yet")


def test_no_weight_of_a_rising_column_is_below_zero_even_where_it_would_help():
    model, _ = learned(dealt(made_rows(column="rare", strength=-2.0), 3))
    rising = np.isin(COLUMNS, RISING)
    assert (model.score.weights[rising] >= 0).all()


def test_a_weight_between_retrievers_is_learned_where_one_of_them_knows_more():
    rows = made_rows(column="dense", strength=12.0, dense=True)
    model, record = learned(dealt(rows, 3), HYBRID, models=("weight",))
    assert record.adopted
    assert model.kind == "weight"
    assert model.encoder == "encoder-1"
    assert record.models["weight"]["share of BM25"] < 0.5


def test_probabilities_of_hits_shown_are_honest():
    errors = []
    for seed in (5, 6, 7):
        _, record = learned(dealt(made_rows(seed, queries=200), 4), queries=[str(at) for at in range(200)])
        after = record.calibration["after"]
        assert after.hits == 2_000
        errors.append(after.ece / after.floor_high)
    assert np.mean(errors) <= 1
    assert 0.2 < after.base_rate < 1


def test_probabilities_of_one_silos_hits_are_honest_where_it_alone_is_searched():
    """Of other queries. As hits of all silos they would promise something else."""
    model, record = learned(dealt(made_rows(7, queries=200), 4), queries=[str(at) for at in range(200)])
    assert record.calibration["one silo"].ece <= record.calibration["one silo"].floor_high
    shares = {count: [] for count in (1, 4)}
    for rows in dealt(made_rows(8, queries=200), 4).values():
        margins = model.score(rows.table)
        for start, end in pairwise(rows.bounds):
            best = np.argsort(-margins[start:end])[:LIST] + start
            profile = profile_of([margins[best]], rows.table[start, -len(OF_QUERY) :])
            for count, promised in shares.items():
                sure = model.probabilities(margins[best[:HITS]], profile, count)
                promised.append((sure.sum(), rows.relevant[best[:HITS]].sum()))
    promised, right = np.sum(shares[1], axis=0)
    assert promised == pytest.approx(right, rel=0.1)
    assert abs(np.sum(shares[4], axis=0)[0] - right) > 0.2 * right


def test_silos_that_judge_the_wrong_way_round_are_weighed_down():
    silos = dealt(made_rows(7, queries=60, candidates=160, strength=3.0), 8)
    for name in ("silo2", "silo5"):
        silos[name].relevant = 1 - silos[name].relevant
        counts = np.bincount(silos[name].query, silos[name].relevant, 60)
        silos[name].targets = counts.astype(float)
    honest = {name: copy(rows) for name, rows in silos.items() if name not in ("silo2", "silo5")}
    for place, rows in enumerate(honest.values()):
        rows.place = place
    plain, weighed, alone = (learned(silos), learned(silos, mode="fedrisk"), learned(honest))
    assert {name for name, weight in weighed[1].weights.items() if weight < 0.05} == {"silo2", "silo5"}
    assert min(weighed[1].risks[name] for name in ("silo2", "silo5")) > weighed[1].risks["silo0"]
    assert not plain[1].weights
    direction = {
        name: model.score.weights / np.linalg.norm(model.score.weights)
        for name, (model, _) in {"plain": plain, "weighed": weighed, "alone": alone}.items()
    }
    assert weighed[1].kind == alone[1].kind == "linear"
    near = float(direction["weighed"] @ direction["alone"])
    assert near > 0.99
    assert float(direction["plain"] @ direction["alone"]) < near
    with pytest.raises(ConfigError, match="mode"):
        LearningOptions(mode="votes")


def test_too_few_judgements_are_a_data_error():
    with pytest.raises(DataError, match="too few"):
        learned(dealt(made_rows(queries=5), 2), queries=QUERIES[:5])


def test_silos_that_deal_queries_differently_are_refused():
    silos = dealt(made_rows(), 2)
    silos["silo1"].fold = np.roll(silos["silo1"].fold, 1)
    with pytest.raises(TooFew, match="folds") as few:
        learned(silos)
    assert list(few.value.answers.reasons()) == ["silo1"]


def test_equal_margins_share_their_places():
    table = np.zeros((4, len(COLUMNS)))
    rows = JudgedRows(
        table, np.array([1.0, 0, 0, 0]), np.zeros(4, int), fold=np.zeros(1, int), targets=np.ones(1)
    )
    ones = np.ones((1, len(COLUMNS)))
    scale = np.zeros(len(COLUMNS)), np.ones(len(COLUMNS))
    best = merged([rows.answer(BestMargins(*scale, ones)).reshape(1, -1)])
    gains = rows.answer(GainsOf(*scale, ones, best))
    assert gains == pytest.approx([0.25 * DISCOUNTS[:4].sum()])
    cells = np.full((1, HITS), -1.0)
    cells[0, :3] = [0, 0, 1]
    assert rows.answer(HitsByCell(*scale, ones, best, cells)).tolist() == [2.0, 1.0, 0.5, 0.25]


def asked(rows, kind, *more):
    """A question about the lists of these rows alone."""
    scale = np.zeros(len(COLUMNS)), np.ones(len(COLUMNS))
    ones = np.where(np.isin(COLUMNS, "bm25"), 1.0, 0.0)[None]
    best = merged([rows.answer(BestMargins(*scale, ones)).reshape(rows.queries, -1)])
    return kind(*scale, ones, best, *more)


def test_outcomes_come_in_an_order_of_the_silos_own():
    rows = dealt(made_rows(), 1)["silo0"]
    plain = [rows.answer(asked(rows, GainsOf)), rows.answer(RelevantOf()), rows.fold]
    rows.order = np.random.default_rng(3).permutation(rows.queries)
    shuffled = [rows.answer(asked(rows, GainsOf)), rows.answer(RelevantOf())]
    shuffled.append(rows.answer(FoldsOf())[rows.queries :])
    for before, after in zip(plain, shuffled, strict=True):
        assert after.tolist() == before[rows.order].tolist()
        assert after.tolist() != before.tolist()


def test_an_order_of_outcomes_changes_nothing_that_is_learned():
    silos = dealt(made_rows(), 3)
    model, record = learned(silos)
    order = np.random.default_rng(3).permutation(len(silos["silo0"].fold))
    for rows in silos.values():
        rows.order = order
    again, same = learned(silos)
    np.testing.assert_allclose(again.score.weights, model.score.weights, rtol=1e-9)
    assert (same.kind, same.calibration) == (record.kind, record.calibration)


def test_a_group_of_hits_of_few_queries_is_refused():
    rows = dealt(made_rows(), 1)["silo0"]
    rows.least = 5
    cells = np.full((rows.queries, HITS), -1.0)
    cells[:4] = 0
    with pytest.raises(ProtocolError, match="fewer than 5"):
        rows.answer(asked(rows, HitsByCell, cells))
    cells[4, 0] = 0
    hits, _ = rows.answer(asked(rows, HitsByCell, cells))
    assert hits == 41


def test_hits_of_own_lists_are_counted_by_silo_and_in_groups_of_many_queries():
    """Other silos' hits have no place among them; lists of one query in many silos are one query's."""
    silos = dealt(made_rows(), 3)
    scale = np.zeros(len(COLUMNS)), np.ones(len(COLUMNS))
    ones = np.where(np.isin(COLUMNS, "bm25"), 1.0, 0.0)[None]
    cells = np.full((3 * 60, HITS), -1.0)
    for at in range(3):
        cells[60 * at : 60 * (at + 1), :2] = at
    totals = in_memory(silos).sum(OwnHitsByCell(*scale, ones, cells)).reshape(2, -1)
    assert totals[0].tolist() == [120.0, 120.0, 120.0]
    first = np.where(np.arange(HITS) < 2, 0.0, -1.0) * np.ones((60, 1))
    for at, name in enumerate(sorted(silos)):
        own = silos[name].answer(asked(silos[name], HitsByCell, first))
        assert totals[:, at].tolist() == own.tolist()
    silos["silo1"].least = 5
    few = np.full((3 * 60, HITS), -1.0)
    few[[0, 1, 60, 61, 120, 121]] = 0
    with pytest.raises(ProtocolError, match="fewer than 5"):
        silos["silo1"].answer(OwnHitsByCell(*scale, ones, few))
    for wrong in (cells[:60], cells[:-1], cells[:, :3]):
        with pytest.raises(ProtocolError, match="another session"):
            silos["silo1"].answer(OwnHitsByCell(*scale, ones, wrong))


def test_places_without_a_hit_do_not_fill_a_group_of_own_hits():
    """The silo whose places they are refuses, and without it there is no sum."""
    silos = dealt(made_rows(candidates=6), 3)
    scale = np.zeros(len(COLUMNS)), np.ones(len(COLUMNS))
    cells = np.full((3 * 60, HITS), -1.0)
    cells[60:120, 0] = np.where(np.bincount(silos["silo1"].query, minlength=60) > 0, 0, -1)
    assert silos["silo1"].answer(OwnHitsByCell(*scale, np.ones((1, len(COLUMNS))), cells)).any()
    cells[60:120, HITS - 1] = 0
    with pytest.raises(ProtocolError, match="no hit"):
        silos["silo1"].answer(OwnHitsByCell(*scale, np.ones((1, len(COLUMNS))), cells))


def test_learning_never_asks_for_a_group_of_few_queries():
    silos = dealt(made_rows(), 3)
    for rows in silos.values():
        rows.least = 10
    _, record = learned(silos)
    assert record.calibration["after"].hits == 60 * HITS
    assert record.calibration["one silo"].hits == 3 * 60 * HITS


# the guard


def test_the_guard_refuses_a_model_that_loses_or_that_harms_too_many():
    rng = np.random.default_rng(0)
    before = rng.uniform(0.3, 0.7, 100)
    assert choose({"baseline": before, "linear": before + 0.02}).kind == "linear"
    assert choose({"baseline": before, "linear": before - 0.02}).kind == "baseline"
    assert choose({"baseline": before, "linear": before + rng.normal(0.001, 0.1, 100)}).kind == "baseline"
    harmful = before + np.where(np.arange(100) < 6, -0.25, 0.1)
    choice = choose({"baseline": before, "linear": harmful})
    assert choice.differences["linear"].better
    assert not choice.adopted
    assert "lost more than" in choice.why


def test_a_larger_model_must_be_clearly_better_than_the_smaller():
    rng = np.random.default_rng(1)
    before = rng.uniform(0.3, 0.6, 80)
    small = before + 0.05
    assert choose({"baseline": before, "weight": small, "linear": small + 0.02}).kind == "linear"
    near = small + rng.normal(0.002, 0.05, 80)
    assert choose({"baseline": before, "weight": small, "linear": near}).kind == "weight"


def test_linked_queries_count_once():
    difference = np.repeat([0.03, -0.01, 0.03], 20)
    apart, linked = (
        Difference.of(difference + 0.5, np.full(60, 0.5), each) for each in (None, np.repeat([0, 1, 2], 20))
    )
    assert apart.better
    assert not linked.better


def test_how_many_queries_might_be_enough():
    rng = np.random.default_rng(2)
    noise = rng.normal(0, 0.1, 50)
    small = Difference.of(0.5 + 0.005 + noise - noise.mean(), np.full(50, 0.5))
    assert not small.better
    assert small.needed == pytest.approx((2 * small.deviation / 0.005) ** 2, abs=1)
    assert Difference.of(np.full(50, 0.4), np.full(50, 0.5)).needed is None


# models and messages


def a_model():
    size = len(COLUMNS)
    line = HitCalibration(
        *(1.5, 40.0, 0.0, -1.0, 0.8, 0.1, 0.3, 0.1, -1.0, 0.5),
        *(np.full(6, 0.5), np.full(6, 0.2), np.array([0.1, 0.0, 0.2, 0.1, 0.0, 0.1])),
    )
    return SearchModel(
        *("linear", Weights(np.full(size, 0.2), np.full(size, 2.0), np.full(size, 0.5), 0.25), line),
        *("encoder-1", {}, None, 0.0, replace(line, base=0.1, start=-3.0), 4),
    )


def test_a_saved_model_is_the_same(tmp_path):
    model = a_model()
    model.save(tmp_path / "model")
    table = np.abs(np.random.default_rng(0).normal(size=(5, len(COLUMNS))))
    table[2, 1] = np.nan
    for other in (SearchModel.load(tmp_path / "model"), SearchModel.from_bytes(model.to_bytes())):
        margins = other.score(table)
        np.testing.assert_array_equal(margins, model.score(table))
        profile = np.full(6, 0.4)
        for silos in (None, 4, 3, 1):
            np.testing.assert_array_equal(
                other.probabilities(margins, profile, silos), model.probabilities(margins, profile, silos)
            )
        assert (other.kind, other.encoder) == ("linear", "encoder-1")
    assert replace(model, calibration=None).probabilities(np.zeros(1), np.zeros(6)) is None


def test_the_fewer_silos_answer_the_less_probable_is_a_hit():
    model, margins, profile = a_model(), np.array([2.0, 0.5]), np.full(6, 0.4)
    by_silos = [model.probabilities(margins, profile, silos) for silos in (0, 1, 2, 3, 4, 5)]
    assert (np.diff(by_silos[1:5], axis=0) > 0).all()
    np.testing.assert_array_equal(by_silos[0], model.single(margins, profile))
    np.testing.assert_array_equal(by_silos[1], by_silos[0])
    np.testing.assert_array_equal(by_silos[5], model.calibration(margins, profile))
    older = replace(model, single=None, silos=1)
    np.testing.assert_array_equal(older.probabilities(margins, profile, 1), by_silos[5])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda model: replace(model, single=replace(model.single, slope=-1.0)),
        lambda model: replace(model, score=replace(model.score, weights=-model.score.weights)),
        lambda model: replace(model, score=replace(model.score, scale=model.score.scale * 0)),
        lambda model: replace(model, score=replace(model.score, centre=model.score.centre * np.inf)),
        lambda model: replace(model, score=replace(model.score, weights=np.ones(3))),
        lambda model: replace(model, score=replace(model.score, start=1e300)),
        lambda model: replace(model, kind="forest"),
        lambda model: replace(model, calibration=replace(model.calibration, slope=-1.0)),
        lambda model: replace(model, calibration=replace(model.calibration, base=2.0)),
        lambda model: replace(model, calibration=replace(model.calibration, share=-0.1)),
        lambda model: replace(model, calibration=replace(model.calibration, spread=0.0)),
        lambda model: replace(model, calibration=replace(model.calibration, weights=np.full(6, 1e300))),
        lambda model: replace(model, calibration=replace(model.calibration, width=0.0)),
        lambda model: replace(model, calibration=replace(model.calibration, slopes=-np.ones(KNOTS + 1))),
        lambda model: replace(model, calibration=replace(model.calibration, slopes=np.ones(KNOTS))),
        lambda model: replace(model, calibration=replace(model.calibration, knots=-np.arange(float(KNOTS)))),
        lambda model: replace(model, calibration=replace(model.calibration, knots=np.full(KNOTS, np.nan))),
    ],
)
def test_a_hostile_model_is_refused(wrong):
    SearchModel.from_bytes(a_model().to_bytes())
    with pytest.raises(ProtocolError):
        SearchModel.from_bytes(wrong(a_model()).to_bytes())


def test_questions_and_answers_cross_the_wire():
    silos = dealt(made_rows(), 1)
    size, rows = len(COLUMNS), silos["silo0"]
    question = LossSums(
        *(np.zeros(size), np.ones(size), np.ones(size), np.zeros(size), np.ones((2, 2)), np.array([-1.0, 0])),
        np.ones(60),
        silo_weights=np.array([0.5, 1.0]),
    )
    over = answer_of(answer_bytes(rows.answer(question_of(question.to_bytes()))))
    np.testing.assert_array_equal(over, rows.answer(question))
    start = question_of(Start(("a", "b"), 4).to_bytes())
    assert isinstance(start, Start)
    assert start.queries == ("a", "b")
    with pytest.raises(ProtocolError):
        question_of(b"nothing")
    with pytest.raises(ProtocolError):
        answer_of(answer_bytes(np.array([np.nan])))


@pytest.mark.parametrize(
    "change",
    [
        {"thetas": np.full((2, 2), np.inf)},
        {"thetas": np.ones((2, 3))},
        {"thetas": np.ones((100, 2)), "folds": np.zeros(100)},
        {"scale": np.zeros(len(COLUMNS))},
        {"by_query": np.ones(7)},
        {"folds": np.zeros(1)},
        {"centre": np.full(len(COLUMNS), np.nan)},
    ],
)
def test_a_hostile_question_is_refused(change):
    size, rows = len(COLUMNS), dealt(made_rows(), 1)["silo0"]
    question = LossSums(
        *(np.zeros(size), np.ones(size), np.ones(size), np.zeros(size), np.ones((2, 2)), np.array([-1.0, 0])),
        np.ones(60),
    )
    rows.answer(question)
    with pytest.raises(ProtocolError):
        rows.answer(replace(question, **change))


def test_a_record_is_json():
    _, record = learned(dealt(made_rows(), 2))
    assert Record.from_json(record.to_json()).to_json() == record.to_json()
    with pytest.raises(DataError):
        Record.from_json("{}")


def test_a_column_that_is_missing_adds_nothing():
    rows = made_rows(dense=True)
    rows[0][::3, 1] = np.nan
    silos = dealt(rows, 2)
    moments = sum(each.answer(ColumnMoments()) for each in silos.values()).reshape(3, -1)
    assert moments[0, 1] < moments[0, 0]
    assert np.isfinite(moments).all()
    model = a_model()
    bare = np.full((1, len(COLUMNS)), np.nan)
    assert model.score(bare)[0] == model.score.start


def test_a_query_unlike_those_judged_draws_to_the_base_rate():
    line = a_model().calibration
    like, unlike = np.full(6, 0.5), np.full(6, -3.0)
    assert line.likeness(like) == 1
    assert line.likeness(unlike) < 1e-6
    margins = np.array([8.0, -8.0])
    assert line(margins, like)[0] > 0.9
    drawn, low = line(margins, unlike)
    assert drawn == pytest.approx(0.3, abs=1e-6)
    assert low < 0.01


def test_a_query_of_very_common_words_is_unlike_those_judged():
    line = a_model().calibration
    profile = np.full(6, 0.5)
    profile[-1] -= 2.9 * line.scale[-1]
    assert line.likeness(profile) == 1
    profile[-1] -= 4 * line.scale[-1]
    assert line.likeness(profile) < 0.001


def test_a_query_shorter_than_nearly_all_judged_ones_is_the_baselines():
    baseline = a_model()
    model = replace(a_model(), baseline=baseline, least_words=3.0)
    assert model.of_query(np.log(2)) is baseline
    assert model.of_query(np.log(3)) is model
    again = SearchModel.from_bytes(model.to_bytes())
    assert again.least_words == 3.0
    assert again.of_query(np.log(2)) is again.baseline


def test_hits_that_stand_out_more_are_never_less_probable():
    line = a_model().calibration
    probabilities = line(np.linspace(-50, 50, 101), np.full(6, 0.5))
    assert (np.diff(probabilities) >= 0).all()
    assert (np.diff(line.odds(np.array([0.5, 2.5, 40.5, 42.5]), np.full(6, 0.5)))[[0, 2]] > 0).all()


def test_hits_differ_as_far_as_their_list_looks_whole():
    line = replace(a_model().calibration, gate=1.35, width=0.05)
    doubtful, whole = np.full(6, 0.5), np.full(6, 1.5)
    assert line.answerable(doubtful) < 1 < 2 < line.answerable(whole)
    margins = np.array([3.0, 1.0, -1.0])
    assert np.ptp(line.odds(margins, doubtful)) < 1e-6
    assert np.ptp(line.odds(margins, whole)) > 3
    bent = replace(line, knots=np.linspace(0, 3, KNOTS), slopes=np.array([0.1, 2.0, 0.0, 1.0, 0.0, 3.0]))
    assert (np.diff(bent(np.linspace(-50, 50, 101), whole)) >= 0).all()
    assert np.abs(np.diff(bent.odds(np.linspace(-5, 5, 10_001), whole))).max() < 0.01  # no steps


def test_the_profile_of_one_query_is_that_of_its_row_among_many():
    rng = np.random.default_rng(0)
    silos = [-np.sort(-rng.normal(size=(3, 10)), axis=1) for _ in range(3)]
    many = shapes(merged(silos))
    one = profile_of([silo[1] for silo in silos], np.array([1.0, 2.0]))
    np.testing.assert_array_equal(one, [*many[1], 1.0, 2.0])
    assert np.isfinite(profile_of([np.array([0.5]), np.empty(0)], np.zeros(2))).all()
    assert np.isfinite(profile_of([np.empty(0)], np.zeros(2))).all()


def totals_of(relevant):
    """Hits and relevant hits of cells."""

    def totals(cells):
        sizes = [
            np.bincount(cells[some], minlength=1 + cells.max())
            for some in (cells >= 0, (cells >= 0) & relevant)
        ]
        return np.stack(sizes, axis=1)

    return totals


def lists_in_which_relevant_hits_stand_out():
    """Lists, and the totals of their hits."""
    rng = np.random.default_rng(1)
    margins = -np.sort(-rng.normal(size=(200, 20)), axis=1)
    relevant = (rng.random((200, 20)) < 0.5) & (np.arange(20) < 4)
    margins[relevant] += 3
    order = np.argsort(-margins, axis=1)
    margins, relevant = (np.take_along_axis(each, order, axis=1) for each in (margins, relevant))

    lists = RankedLists(margins, rng.normal(size=(200, 2)), np.arange(200) % 5, np.zeros(200, dtype=int))
    return lists, relevant, totals_of(relevant[:, :HITS])


def test_lists_without_anything_relevant_are_less_probable():
    lists, relevant, totals = lists_in_which_relevant_hits_stand_out()
    line, honesty = fit_calibration(lists, totals, least=10)
    missing = lists.with_missing(relevant.astype(float))
    assert honesty["after"].ece <= honesty["after"].floor_high
    whole = line(lists.margins[:, 0], lists.profiles).mean()
    assert line(missing.margins[:, 0], missing.profiles).mean() < 0.6 * whole
    assert whole > 2 * honesty["after"].base_rate


def test_hits_of_lists_that_are_all_alike_differ_still():
    """An engine that counts words gives every query the same scores, of which the first is right."""
    margins = np.full((50, LIST), -np.inf)
    margins[:, 0], margins[:, 1:14] = 1.0, 0.5
    relevant = np.arange(HITS) == np.zeros((50, 1))
    lists = RankedLists(margins, np.tile([0.7, 3.0], (50, 1)), np.arange(50) % 5, np.zeros(50, dtype=int))
    line, _ = fit_calibration(lists, totals_of(relevant), least=10)
    first, second = line(margins[0, :2], lists.profiles[0])
    assert first > 0.5
    assert second < 0.1


def test_caution_ends_where_it_is_why_probabilities_are_dishonest(monkeypatch):
    lists, _, totals = lists_in_which_relevant_hits_stand_out()
    monkeypatch.setattr(calibrating, "LEAST_SPREAD", 0.0)
    rules = CalibrationRules(caution=0.3)  # no gate but the last is enough
    cautious, _ = fit_calibration(lists, totals, 10, rules)

    def gate_of(*errors):
        """Of a calibration whose errors with the last gate, the one before and so on are these; the quantile
        is .02."""
        left = list(errors)
        monkeypatch.setattr(
            calibrating,
            "_honesty",
            lambda *_: Honesty(
                left.pop(0) if len(left) > 1 else left[0], 0.01, 0.02, hits=2_000, base_rate=0.2, groups=()
            ),
        )
        return fit_calibration(lists, totals, 10, rules)[0].gate

    assert gate_of(0.029) == cautious.gate  # chance may have done it
    assert gate_of(0.2) == cautious.gate  # as dishonest with every list open
    assert gate_of(0.031, 0.025, 0.02) < gate_of(0.031, 0.02) < cautious.gate
    rules = replace(rules, dishonest=np.inf)
    assert gate_of(0.2, 0.02) == cautious.gate  # it never ends


def test_hits_that_are_all_alike_get_the_base_rate():
    """Nothing tells their hits apart: neither what stands out nor a profile."""
    margins, relevant = np.zeros((40, LIST)), np.arange(400).reshape(40, HITS) % 5 == 0
    lists = RankedLists(margins, np.ones((40, 2)), np.arange(40) % 4, np.zeros(40, dtype=int))
    line, honesty = fit_calibration(lists, totals_of(relevant), least=10)
    np.testing.assert_allclose(line(lists.margins[:, :HITS], lists.profiles[:, None]), 0.2, atol=0.005)
    assert honesty["after"].ece < 0.02


def test_weights_of_rows_are_repetitions():
    rng = np.random.default_rng(1)
    features, targets = rng.normal(size=(3, 20)), rng.integers(2, size=20).astype(float)
    times, theta = rng.integers(1, 4, 20), rng.normal(size=3)
    repeated = likelihood_sums(np.repeat(features, times, axis=1), np.repeat(targets, times), theta)
    assert np.allclose(likelihood_sums(features, targets, theta, weights=times.astype(float)), repeated)


def test_few_queries_do_not_make_a_calibration_steep():
    """Two cells can have any slope between them."""
    rng = np.random.default_rng(3)
    slopes = []
    for _ in range(12):
        margins = -np.sort(-rng.normal(size=(22, 20)), axis=1)
        relevant = rng.random((22, HITS)) < 1 / (1 + np.exp(-0.5 * margins[:, :HITS]))
        lists = RankedLists(margins, rng.normal(size=(22, 2)), np.arange(22) % 2, np.zeros(22, dtype=int))
        line, _ = fit_calibration(lists, totals_of(relevant), least=10)
        slopes.append(line.slope * margins[:, :HITS].std())
    assert min(slopes) > 0.02
    assert max(slopes) < 1.2


def test_the_record_gives_the_curve_of_what_is_learned():
    _, record = learned(dealt(made_rows(), 3))
    after = record.calibration["after"]
    curve = learned_curve(json.loads(record.to_json()))
    assert curve.count == after.hits == sum(each.count for each in curve.bins)
    assert curve.relevant == round(after.base_rate * after.hits)
    gaps = sum(abs(each.predicted - each.observed) * each.count for each in curve.bins)
    assert gaps / curve.count == pytest.approx(after.ece, abs=1e-6)
    all_of_them = curve.thresholds[0]
    assert (all_of_them.kept, all_of_them.recall) == (curve.count, 1.0)
    assert learned_curve({}) is None
