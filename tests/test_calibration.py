"""Calibrators: what they learn, how they are kept, and the bridge from runs."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import betainc, expit, logit
from sklearn.utils.estimator_checks import estimator_checks_generator

from isthmus.asking import Silos
from isthmus.calibration import (
    CALIBRATORS,
    FEATURES,
    Beta,
    BetaCDF,
    BinnedIsotonic,
    Calibrator,
    Gamma,
    Gaussian,
    Isotonic,
    Judging,
    LabelledScores,
    ListLogistic,
    NoisySoftmax,
    PerPart,
    Platt,
    QueryFeature,
    Softmax,
    Temperature,
    calibrate,
    fit_calibrator,
    list_features,
    load_calibrator,
    probabilities_of,
    save_calibrator,
)
from isthmus.calibration.runs import Contest
from isthmus.calibration.sums import CLIP
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import calibration_of, log_loss, outcomes_of
from isthmus.tables import Qrels, Run

CURVES = ("platt", "isotonic", "isotonic-binned", "temperature", "gaussian", "gamma", "beta", "beta-cdf")


def summed(silos: list[LabelledScores]) -> Callable[[Any], Any]:
    """A question put to all silos, their answers added up."""
    return Silos.in_memory({f"silo{at}": silo.answer for at, silo in enumerate(silos)}).sum


def scored(rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores whose true probability of relevance is σ(2s − 1)."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=rows)
    return scores, (rng.random(rows) < expit(2 * scores - 1)).astype(int)


def world(queries: int, documents: int, seed: int = 0) -> tuple[Run, Qrels]:
    """Lists whose scores have a level and a scale of their own, as BM25's have."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(queries, documents))
    grades = (rng.random((queries, documents)) < expit(2 * truth - 2)).astype(int)
    scores = rng.normal(5, 3, (queries, 1)) + rng.uniform(0.5, 3, (queries, 1)) * truth
    ids = np.repeat(np.arange(queries), documents)
    names = [f"q{at}" for at in ids]
    found = [f"d{at}" for at in np.tile(np.arange(documents), queries)]
    return Run.of(names, found, scores), Qrels.of(names, found, grades.reshape(-1))


def every_calibrator() -> list[Calibrator]:
    return [*(make() for make in CALIBRATORS.values()), PerPart()]


def as_matrix(calibrator: Calibrator) -> Calibrator:
    """The same calibrator told to be tested with matrices, as scikit-learn's full list of checks needs."""

    class Matrix(type(calibrator)):  # type: ignore[misc]
        __init__ = type(calibrator).__init__

        def __sklearn_tags__(self):
            tags = super().__sklearn_tags__()
            tags.input_tags.one_d_array, tags.input_tags.two_d_array = False, True
            return tags

    Matrix.__name__ = Matrix.__qualname__ = type(calibrator).__name__ + "Matrix"
    globals()[Matrix.__name__] = Matrix  # pickling, which one check does, looks it up here
    return Matrix(**calibrator.get_params(deep=False))


@pytest.mark.parametrize("calibrator", every_calibrator(), ids=str)
def test_scikit_learns_generic_checks(calibrator: Calibrator) -> None:
    ran = 0
    for estimator, check in estimator_checks_generator(as_matrix(calibrator)):
        if getattr(check, "func", check).__name__ == "check_fit1d":
            continue  # it wants a vector refused, and a vector of scores is the natural input
        with suppress(SkipTest):
            check(estimator)
            ran += 1
    assert ran >= 50


@pytest.mark.parametrize("name", CURVES)
def test_curves_find_the_true_probability(name: str) -> None:
    scores, y = scored(20_000)
    if name in ("temperature", "beta-cdf"):  # they know no prior: a symmetric problem suits them
        y = (np.random.default_rng(1).random(len(scores)) < expit(2 * scores)).astype(int)
    truth = expit(2 * scores - (0 if name in ("temperature", "beta-cdf") else 1))
    chances = CALIBRATORS[name]().fit(scores, y).probabilities(scores)
    assert np.abs(chances - truth).mean() < 0.035


def test_platt_recovers_slope_and_intercept_with_smoothed_targets() -> None:
    scores = np.array([0.0, 1.0, 2.0, 3.0])
    y = np.array([0, 0, 1, 1])
    fitted = Platt().fit(scores, y)
    # the smoothed targets are 1/4 and 3/4, and the likelihood's derivatives vanish at the optimum
    chances, targets = fitted.probabilities(scores), np.array([0.25, 0.25, 0.75, 0.75])
    assert (chances - targets).sum() == pytest.approx(0, abs=1e-5)
    assert ((chances - targets) * scores).sum() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kind", [Platt, Beta, Gaussian, Gamma, Temperature])
def test_a_score_that_misleads_says_nothing_instead_of_reordering(kind: type[Calibrator]) -> None:
    scores, y = scored(2_000)
    chances = kind().fit(-scores, y).probabilities(np.sort(-scores))
    assert (np.diff(chances) >= 0).all()
    loose = kind(monotone=False).fit(-scores, y).probabilities(np.sort(-scores))
    assert (np.diff(loose) < 0).any()


def test_separable_scores_stay_finite() -> None:
    scores = np.arange(10.0)
    y = scores > 4
    for name in CURVES:
        chances = CALIBRATORS[name]().fit(scores, y).probabilities(scores)
        assert np.isfinite(chances).all()
    assert Platt().fit(scores, y).probabilities(scores).max() < 0.999


@pytest.mark.parametrize("name", CALIBRATORS)
def test_tied_scores_give_the_base_rate(name: str) -> None:
    if name in ("temperature", "beta-cdf"):
        pytest.skip("it cannot express a base rate")
    y = np.arange(40) % 4 == 0
    chances = CALIBRATORS[name]().fit(np.full(40, 3.0), y).probabilities(np.array([3.0]))
    assert chances[0] == pytest.approx(0.25, abs=0.03)


def test_binned_isotonic_is_bin_rates_with_laplace_smoothing() -> None:
    scores = np.arange(100.0)
    y = np.concatenate((np.zeros(50), np.ones(10), np.zeros(15), np.ones(25))).astype(int)
    fitted = BinnedIsotonic(bins=4).fit(scores, y)
    # bins 0-24, 25-49, 50-74 (10 of 25 relevant), 75-99 (all relevant); p = (n₊ + 1)/(n + 2)
    assert fitted.probabilities([12.0, 37.0, 62.0, 87.0]) == pytest.approx([1 / 27, 1 / 27, 11 / 27, 26 / 27])
    assert fitted.probabilities([74.5]) == pytest.approx([(11 / 27 + 26 / 27) / 2])


@pytest.mark.parametrize("kind", [Platt, Temperature, Gaussian, Gamma, Beta, BinnedIsotonic])
def test_fitting_from_many_silos_sums_is_fitting_on_the_pool(kind: Callable[[], Calibrator]) -> None:
    scores, y = scored(3_001)
    scores[:40] = -1.5  # ties, across silos
    pooled = kind().fit(scores, y)
    deal = np.random.default_rng(5).integers(0, 7, len(scores))
    silos = [LabelledScores(scores[deal == silo], y[deal == silo].astype(float)) for silo in range(7)]
    federated = kind().fit_sums(summed(silos))
    grid = np.linspace(scores.min() - 1, scores.max() + 1, 1_001)
    assert np.abs(federated.probabilities(grid) - pooled.probabilities(grid)).max() < 1e-9


def test_federated_fitting_refuses_one_class() -> None:
    with pytest.raises(DataError, match="one class"):
        Platt().fit_sums(summed([LabelledScores(np.arange(3.0), np.zeros(3))]))


def test_temperature_is_the_likeliest_slope_on_the_logit_without_a_prior() -> None:
    scores, y = scored(2_000)
    unit = np.clip((scores - scores.min()) / np.ptp(scores), CLIP, 1 - CLIP)

    def loss(temperature: float) -> float:
        chance = expit(logit(unit) / temperature)
        return -float(np.mean(np.where(y > 0, np.log(chance), np.log1p(-chance))))

    best = minimize_scalar(loss, bounds=(0.05, 20.0), method="bounded").x
    fitted = CALIBRATORS["temperature"]().fit(scores, y)
    assert fitted.temperature == pytest.approx(best, rel=1e-3)
    assert fitted.probabilities(scores) == pytest.approx(expit(logit(unit) / best), abs=1e-3)


def test_beta_cdf_is_the_likeliest_distribution_function() -> None:
    """I_s(a, b) with the shapes that generated the outcomes, found again within a tenth."""
    scores = np.linspace(0.0, 1.0, 20_001)
    y = (np.random.default_rng(4).random(len(scores)) < betainc(2.0, 5.0, scores)).astype(int)
    fitted = BetaCDF().fit(scores, y)
    assert fitted.shape_ == pytest.approx([2.0, 5.0], rel=0.1)
    assert fitted.probabilities([0.3]) == pytest.approx(betainc(*fitted.shape_, 0.3))


def test_query_features_are_their_definitions() -> None:
    scores = np.array([1.0, 4.0, 2.0, 2.0, 9.0])
    groups = np.array([0, 0, 0, 0, 1])
    rows = {name: list_features(scores, groups)[:, at] for at, name in enumerate(FEATURES)}
    share = np.array([1, 4, 2, 2]) / 9
    assert rows["mean"][0] == pytest.approx(2.25)
    assert rows["std"][0] == pytest.approx(np.std([1, 4, 2, 2]))
    assert (rows["min"][0], rows["max"][0], rows["median"][0], rows["range"][0]) == (1, 4, 2, 3)
    z = (scores[:4] - 2.25) / np.std(scores[:4])
    assert rows["z"][:4] == pytest.approx(z)
    assert rows["skewness"][0] == pytest.approx((z**3).mean())
    assert rows["kurtosis"][0] == pytest.approx((z**4).mean() - 3)
    assert rows["entropy"][0] == pytest.approx(-(share * np.log(share)).sum())
    assert rows["gini"][0] == pytest.approx(1 - (share**2).sum())
    assert rows["rank"][:4].tolist() == [0.75, 0.0, 0.25, 0.25]
    assert rows["percentile"][:4].tolist() == [0.25, 1.0, 0.75, 0.75]
    alone = {name: rows[name][4] for name in FEATURES}
    assert alone == {
        "score": 9, "mean": 9, "std": 0, "min": 9, "max": 9, "median": 9, "skewness": 0, "kurtosis": 0,
        "range": 0, "entropy": 0, "gini": 0, "rank": 0, "z": 0, "percentile": 1,
    }  # fmt: skip


def test_monotone_query_feature_keeps_every_list_and_the_papers_form_does_not() -> None:
    run, qrels = world(300, 10)
    relevant, _ = Judging().of(run, qrels)
    kept = QueryFeature().fit(run.scores, relevant, groups=run.query_of_row)
    chances = kept.probabilities(run.scores, groups=run.query_of_row)
    same_list = np.diff(run.query_of_row) == 0
    assert (np.diff(chances)[same_list] <= 0).all()
    loose = QueryFeature(boosting="unconstrained").fit(run.scores, relevant, groups=run.query_of_row)
    chances = loose.probabilities(run.scores, groups=run.query_of_row)
    assert (np.diff(chances)[same_list] > 0).any()


def test_query_feature_uses_the_list_where_raw_scores_are_not_comparable() -> None:
    run, qrels = world(300, 10)
    relevant, _ = Judging().of(run, qrels)

    def loss(method: str) -> float:
        chances = np.clip(calibrate(run, method, qrels=qrels).probabilities, 1e-6, 1 - 1e-6)
        return float(-np.where(relevant, np.log(chances), np.log1p(-chances)).mean())

    assert loss("query-feature") < loss("platt") - 0.03


def test_query_feature_searches_its_parameters() -> None:
    run, qrels = world(60, 8)
    relevant, _ = Judging().of(run, qrels)
    fitted = QueryFeature(trees=10, search=True).fit(run.scores, relevant, groups=run.query_of_row)
    trees, depth, rate = fitted.chosen_
    assert trees in (10, 20)
    assert depth in (3, 5)
    assert rate in (0.05, 0.1)


def test_query_feature_says_when_lists_are_missing() -> None:
    scores, y = scored(100)
    fitted = QueryFeature().fit(scores, y, groups=np.arange(100) // 10)
    with pytest.raises(DataError, match="fitted with groups"):
        fitted.probabilities(scores)
    with pytest.raises(ConfigError, match="monotone"):
        QueryFeature(boosting="monotonne").fit(scores, y)


def test_unjudged_rows_complete_the_list_and_teach_nothing() -> None:
    run, qrels = world(120, 12)
    relevant, _ = Judging().of(run, qrels)
    judged = run.ranks <= 6
    fitted = QueryFeature().fit(run.scores, relevant, groups=run.query_of_row, judged=judged)
    other = QueryFeature().fit(run.scores, relevant & judged, groups=run.query_of_row, judged=judged)
    chances = [model.probabilities(run.scores, groups=run.query_of_row) for model in (fitted, other)]
    assert np.array_equal(*chances)


def test_softmax_sums_to_at_most_one_and_learns_label_priors() -> None:
    rng = np.random.default_rng(3)
    labels = np.tile(["a", "b", "c"], 400)
    groups = np.repeat(np.arange(400), 3)
    scores = rng.normal(size=1200)
    odds = np.exp(2 * scores + np.tile([1.0, 0.0, -1.0], 400)).reshape(400, 3)
    answer = np.array([rng.choice(3, p=row / row.sum()) for row in odds])
    y = (np.tile(np.arange(3), 400) == np.repeat(answer, 3)).astype(int)
    fitted = Softmax().fit(scores, y, groups=groups, items=labels)
    chances = fitted.probabilities(scores, groups=groups, items=labels)
    assert np.bincount(groups, weights=chances).max() <= 1 + 1e-12
    truth = (odds / odds.sum(axis=1, keepdims=True)).reshape(-1)
    assert np.abs(chances - truth).mean() < 0.03


def test_a_share_of_noise_is_found_and_keeps_the_clearest_answers_from_being_too_sure() -> None:
    rng = np.random.default_rng(5)
    count, size, noise = 3000, 5, 0.06
    groups = np.repeat(np.arange(count), size)
    scores = rng.normal(size=count * size)
    odds = np.exp(4 * scores).reshape(count, size)
    truth = (1 - noise) * odds / odds.sum(axis=1, keepdims=True) + noise / size
    answer = np.array([rng.choice(size, p=row / row.sum()) for row in truth])
    y = (np.tile(np.arange(size), count) == np.repeat(answer, size)).astype(int)
    noisy, plain = (kind().fit(scores, y, groups=groups) for kind in (NoisySoftmax, Softmax))
    chances, others = (model.probabilities(scores, groups=groups) for model in (noisy, plain))
    assert abs(noisy.noise_ - noise) < 0.02
    assert abs(noisy.choice_.weights[0] - 4) < 0.4
    assert np.abs(chances - truth.reshape(-1)).mean() < 0.5 * np.abs(others - truth.reshape(-1)).mean()
    assert np.bincount(groups, weights=chances).max() <= 1 + 1e-12
    assert np.array_equal(np.argsort(scores[:size]), np.argsort(chances[:size]))


def labelled(lists: int) -> tuple[Run, Qrels]:
    """Three labels per text, the first far more often right than its score says."""
    rng = np.random.default_rng(3)
    odds = np.exp(rng.normal(size=(lists, 3)))
    chances = odds * [4.0, 1.0, 0.5]
    answer = np.array([rng.choice(3, p=row / row.sum()) for row in chances])
    names = np.repeat([f"q{at:03}" for at in range(lists)], 3).tolist()
    grades = (np.tile(np.arange(3), lists) == np.repeat(answer, 3)).astype(int)
    found = ["a", "b", "c"] * lists
    return Run.of(names, found, np.log(odds).reshape(-1)), Qrels.of(names, found, grades)


def test_a_label_s_prior_counts_however_few_lists_are_asked_about() -> None:
    run, qrels = labelled(200)
    fitted = fit_calibrator(run, qrels, "softmax")
    whole = run.with_probabilities(probabilities_of(run, fitted))
    one = run["q007"]
    assert whole["q007"].probabilities == pytest.approx(probabilities_of(one, fitted))


def test_a_label_of_unjudged_lists_alone_has_no_prior() -> None:
    run, qrels = labelled(200)
    unknown = Run.from_dict({"x": {"y": 1.0, "z": 0.5, "zz": 0.1}})
    both = Run.concat([run, unknown])
    calibrated = calibrate(both, "softmax", qrels=qrels)
    assert np.isfinite(calibrated.required_probabilities).all()


def test_parts_lean_on_the_pool() -> None:
    scores, y = scored(4_000)
    parts = np.where(np.arange(4_000) < 3_990, "large", "small")
    tail = np.random.default_rng(1).random(3_990) < 0.5
    parts[:3_990][tail] = "other"
    y[:3_990][tail] = np.random.default_rng(2).random(tail.sum()) < 0.9
    fitted = PerPart(Platt(), shrinkage=50).fit(scores, y, parts=parts)
    assert set(fitted.parts_) == {"large", "other"}  # ten pairs are too few
    grid = np.linspace(-2, 2, 50)
    pooled = fitted.pooled_.probabilities(grid)
    for unknown in ("small", "never seen"):
        assert np.array_equal(fitted.probabilities(grid, parts=np.full(50, unknown)), pooled)
    other = fitted.probabilities(grid, parts=np.full(50, "other"))
    own = fitted.parts_["other"].probabilities(grid)
    assert np.all((other - pooled) * (own - pooled) >= 0)
    assert np.abs(other - own).max() < np.abs(own - pooled).max() / 4


@pytest.mark.parametrize("calibrator", every_calibrator(), ids=str)
def test_saved_calibrators_answer_the_same(calibrator: Calibrator, tmp_path: Path) -> None:
    run, qrels = world(40, 8)
    relevant, _ = Judging().of(run, qrels)
    context = {"groups": run.query_of_row} if calibrator.needs_lists else {}
    if isinstance(calibrator, PerPart):
        calibrator.fit(run.scores, relevant, parts=run.query_of_row % 2)
        context = {"parts": run.query_of_row % 2}
    else:
        calibrator.fit(run.scores, relevant, **context)
    save_calibrator(calibrator, tmp_path / "one")
    save_calibrator(calibrator, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    again = load_calibrator(tmp_path / "one")
    assert np.array_equal(
        again.probabilities(run.scores, **context), calibrator.probabilities(run.scores, **context)
    )
    assert str(again) == str(calibrator)


def test_a_calibrator_per_part_of_a_fitted_one_is_saved(tmp_path: Path) -> None:
    scores, y = scored(400)
    parts = np.arange(400) % 2
    fitted = PerPart(Isotonic().fit(scores, y)).fit(scores, y, parts=parts)
    save_calibrator(fitted, tmp_path / "model")
    again = load_calibrator(tmp_path / "model")
    assert isinstance(again, PerPart)
    assert np.array_equal(again.probabilities(scores, parts=parts), fitted.probabilities(scores, parts=parts))


def test_a_file_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_calibrator(Platt().fit([0.0, 1.0], [0, 1]), path)
    with zipfile.ZipFile(path) as bundle:
        parts = {name: bundle.read(name) for name in bundle.namelist()}
    header = json.loads(parts["header.json"])
    for change, message in (({"version": 99}, "format 99"), ({"format": "other"}, "not a saved calibrator")):
        with zipfile.ZipFile(path, "w") as bundle:
            for name, content in parts.items():
                told = json.dumps({**header, **change}).encode() if name == "header.json" else content
                bundle.writestr(name, told)
        with pytest.raises(DataError, match=message):
            load_calibrator(path)
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="not a saved calibrator"):
        load_calibrator(path)


def test_calibrating_a_run_adds_probabilities_and_never_reorders() -> None:
    run, qrels = world(120, 8)
    for name in ("auto", *CURVES, "softmax"):
        told = calibrate(run, name, qrels=qrels)
        assert told.probabilities is not None
        assert told.with_probabilities(None) == run


def test_judged_queries_are_calibrated_by_models_that_did_not_see_them() -> None:
    run, qrels = world(50, 8)
    told = calibrate(run, "isotonic", qrels=qrels)
    seen = probabilities_of(run, fit_calibrator(run, qrels, "isotonic"))
    assert not np.allclose(told.probabilities, seen)
    unjudged = qrels[[f"q{at}" for at in range(40)]]
    told = calibrate(run, "isotonic", qrels=unjudged)
    rest = run.query_of_row >= 40
    seen = probabilities_of(run, fit_calibrator(run, unjudged, "isotonic"))
    assert np.array_equal(told.probabilities[rest], seen[rest])


def test_folds_do_not_depend_on_the_order_of_queries() -> None:
    run, qrels = world(50, 8)
    there = calibrate(run, "platt", qrels=qrels)
    back = calibrate(run[run.queries[::-1]], "platt", qrels=qrels)[run.queries]
    assert there.probabilities == pytest.approx(back.probabilities)


def test_auto_has_the_least_log_loss_at_the_top_of_lists_held_out() -> None:
    run, qrels = world(120, 30)
    winner = type(fit_calibrator(run, qrels)).__name__
    losses = {
        name: log_loss(*outcomes_of(qrels, calibrate(run, name, qrels=qrels), top=10))
        for name in ("platt", "isotonic-binned", "list-logistic", "query-feature")
    }
    assert min(losses, key=lambda name: losses[name]) == "list-logistic"
    assert winner == "ListLogistic"
    assert (
        log_loss(*outcomes_of(qrels, calibrate(run, qrels=qrels), top=10)) <= losses["list-logistic"] + 0.01
    )


def test_auto_takes_query_feature_where_the_list_tells_what_no_curve_sees() -> None:
    """A list whose scores are skewed is a good one, whatever the level of its scores."""
    rng = np.random.default_rng(0)
    good = rng.random((400, 1)) < 0.5
    scores = np.where(good, np.exp(rng.normal(size=(400, 20))), rng.normal(size=(400, 20)) + 1.6)
    place = np.argsort(np.argsort(-scores, axis=1), axis=1)
    grades = (rng.random(scores.shape) < np.where(good, 0.9, 0.05) * (place < 10)).astype(int)
    names = np.repeat([f"q{at}" for at in range(400)], 20).tolist()
    documents = [f"d{at}" for at in range(20)] * 400
    run, qrels = Run.of(names, documents, scores), Qrels.of(names, documents, grades)
    assert isinstance(fit_calibrator(run, qrels), QueryFeature)


def test_auto_takes_platt_where_the_lists_have_nothing_to_add_or_are_few() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(60, 30))
    grades = (rng.random(scores.shape) < expit(2 * scores - 2)).astype(int)
    names = np.repeat([f"q{at}" for at in range(60)], 30).tolist()
    documents = [f"d{at}" for at in range(30)] * 60
    run, qrels = Run.of(names, documents, scores), Qrels.of(names, documents, grades)
    losses = [
        log_loss(*outcomes_of(qrels, calibrate(run, name, qrels=qrels), top=10)) for name in ("platt", "auto")
    ]
    assert losses[1] <= losses[0] + 0.01
    assert isinstance(fit_calibrator(*world(9, 60)), Platt)
    run, qrels = world(120, 8)
    first = {query: {doc: int(query == "q0" and grade) for doc, grade in judged.items()}
             for query, judged in qrels.to_dict().items()}  # fmt: skip
    first["q1"]["d0"] = 1
    assert isinstance(fit_calibrator(run, Qrels.from_dict(first)), Platt)


def test_two_judged_queries_are_calibrated_without_a_warning() -> None:
    run, qrels = world(2, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibrate(run, qrels=qrels, folds=2).probabilities is not None


def test_the_contest_of_a_fold_does_not_see_it() -> None:
    run, qrels = world(40, 20)
    contest = Contest.of(run, qrels, "auto", judging=Judging(), folds=4)
    mine = contest.fold_of_query == 2
    losses = np.where(mine, 1e6 * np.arange(1, len(contest.names) + 1)[:, None], contest.losses)
    assert replace(contest, losses=losses).winner(2) == contest.winner(2)
    rows = mine[run.query_of_row]
    winner = contest.names.index(contest.winner(2))
    assert np.array_equal(contest.held_out()[rows], contest.probabilities[winner][rows])


def test_a_fold_s_probabilities_are_those_of_the_winner_on_the_others() -> None:
    fold_of = np.arange(50) % 5
    losses = np.stack((np.where(fold_of == 2, 200.0, 1.0), np.full(50, 2.0)))
    probabilities = np.stack((np.full(50, 0.1), np.full(50, 0.9)))
    contest = Contest(("platt", "list-logistic"), probabilities, losses, fold_of, np.arange(50))
    assert contest.winner() == "list-logistic"
    assert contest.winner(2) == "platt"
    assert contest.held_out() == pytest.approx(np.where(fold_of == 2, 0.1, 0.9))


def test_list_logistic_is_left_only_for_what_is_clearly_better() -> None:
    rng = np.random.default_rng(0)
    names = ("platt", "list-logistic", "beta")
    noise = rng.random(100)
    noise -= noise.mean()
    losses = np.stack((noise + 2.49, np.full(100, 2.5), noise[::-1] + 2.9))
    about = {"fold_of_query": np.arange(100) % 5, "query_of_row": np.arange(100)}
    contest = Contest(names, np.zeros((3, 100)), losses, **about)
    assert contest.winner() == "list-logistic", "half a standard error is chance"
    shifted = replace(contest, losses=losses - [[0.1], [0.0], [0.0]])
    assert shifted.winner() == "platt", "three are not"
    assert replace(shifted, losses=shifted.losses - [[0.0], [0.0], [0.6]]).winner() == "beta"


def test_list_logistic_is_logistic_regression_on_place_weighted_to_the_top() -> None:
    from sklearn.linear_model import LogisticRegression

    run, qrels = world(80, 30)
    relevant = run.grades(qrels) > 0
    for raw in (False, True):
        model = ListLogistic(raw=raw).fit(run.scores, relevant, groups=run.query_of_row)
        table = list_features(run.scores, run.query_of_row)
        columns = [table[:, FEATURES.index("z")], -np.log(run.ranks), *([run.scores] if raw else [])]
        weights = np.where(run.ranks <= 10, 1.0, 0.3 * 10 / 20)
        rows = np.column_stack(columns)
        rows = rows - np.average(rows, axis=0, weights=weights)
        rows /= np.sqrt(np.average(rows**2, axis=0, weights=weights))
        peer = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000)
        peer.fit(rows, relevant, sample_weight=weights)
        rows = rows[:, peer.coef_[0] > 0]  # no slope of ours is negative
        there = peer.fit(rows, relevant, sample_weight=weights).predict_proba(rows)[:, 1]
        ours = model.probabilities(run.scores, groups=run.query_of_row)
        assert there == pytest.approx(ours, abs=1e-5)
        falling = np.diff(ours)[np.diff(run.query_of_row) == 0]
        assert (falling <= 1e-12).all()


def test_list_logistic_is_calibrated_where_people_look() -> None:
    """Most rows are far down and never relevant: a curve of all rows is wrong at the top."""
    run, qrels = world(150, 200, seed=3)
    top = {
        name: calibration_of(qrels, calibrate(run, name, qrels=qrels)) for name in ("platt", "list-logistic")
    }
    assert top["list-logistic"]["ECE@10"] <= top["list-logistic"]["ECE@10 floor 95%"]
    assert top["platt"]["ECE@10"] > top["platt"]["ECE@10 floor 95%"]


def test_what_nobody_judged_is_irrelevant_or_skipped() -> None:
    run = Run.from_dict({"q": {"a": 3.0, "b": 2.0, "c": 1.0}, "other": {"a": 1.0}})
    qrels = Qrels.from_dict({"q": {"a": 2, "b": 0}})
    relevant, known = Judging().of(run, qrels)
    assert relevant.tolist() == [True, False, False, False]
    assert known.tolist() == [True, True, True, False]
    assert Judging(unjudged="skip").of(run, qrels)[1].tolist() == [True, True, False, False]
    assert Judging(threshold=3).of(run, qrels)[0].sum() == 0
    with pytest.raises(ConfigError):
        Judging(unjudged="maybe")  # type: ignore[arg-type]


def test_mistakes_are_told() -> None:
    run, qrels = world(10, 4)
    with pytest.raises(ConfigError, match="did you mean 'platt'"):
        calibrate(run, "plat", qrels=qrels)
    with pytest.raises(DataError, match="no judgements"):
        calibrate(run, "platt")
    with pytest.raises(DataError, match="0 of 40 judged rows are relevant"):
        calibrate(run, "platt", qrels=Qrels.from_dict({query: {"d0": 0} for query in run.queries}))
    with pytest.raises(DataError, match=r"0 of 40 .* grade 5 or more .*highest .* 1: lower .*--relevant"):
        calibrate(run, "platt", qrels=qrels, judging=Judging(5))
    with pytest.raises(DataError, match="cannot make 20 folds"):
        calibrate(run, "platt", qrels=qrels, folds=20)
    assert Isotonic().fit([0.0, 1.0], [0, 1]).probabilities([[0.5]]) == pytest.approx([0.5])
