"""Fusion: formulae, edges, learned fusers, decisions, explanations, files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, logit

from isthmus.calibration import (
    Judging,
    ThresholdCurve,
    abstain,
    calibrate,
    score_histogram,
    threshold_for,
    threshold_plot,
)
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import (
    calibration_of,
    evaluate,
    log_loss,
    outcomes_of,
    reliability,
    reliability_diagram,
)
from isthmus.fusion import (
    FUSERS,
    LEARNED,
    METHODS,
    NORMALISERS,
    Auto,
    Candidates,
    Formula,
    LogOdds,
    Stacked,
    Union,
    Weighted,
    fuse,
    fuser,
    load_fuser,
    save_fuser,
)
from isthmus.fusion.estimator import TrainingUnion
from isthmus.fusion.learned import drawn
from isthmus.fusion.saving import SavedFuser
from isthmus.tables import Qrels, Run, read_qrels, read_run

FIRST = Run.from_dict({"q1": {"a": 4.0, "b": 3.0, "c": 2.0}, "q2": {"a": 9.0}}, name="first")
SECOND = Run.from_dict({"q1": {"b": 0.9, "d": 0.1}, "q3": {"a": 0.5}}, name="second")


def world(
    queries: int = 120, seed: int = 0, *, quality: tuple[float, ...] = (1.0, 0.5), depth: int = 12
) -> tuple[list[Run], Qrels]:
    """Retrievers that see the truth through noise of their own and return their best half."""
    rng = np.random.default_rng(seed)
    documents = 2 * depth
    truth = rng.normal(size=(queries, documents))
    relevant = rng.random(truth.shape) < expit(3 * truth - 2.5)
    names = [f"q{at:03}" for at in range(queries)]
    runs = []
    for at, good in enumerate(quality):
        seen = good * truth + rng.normal(size=truth.shape) / 2
        kept = np.argsort(-seen, axis=1)[:, :depth]
        rows = np.repeat(np.arange(queries), depth)
        found = [f"{names[row]}-{doc:02}" for row, doc in zip(rows, kept.reshape(-1), strict=True)]
        scores = 10 * at + (at + 1) * np.take_along_axis(seen, kept, 1).reshape(-1)
        runs.append(Run.of([names[row] for row in rows], found, scores, name=f"retriever {at}"))
    judged = {
        name: {f"{name}-{doc:02}": int(relevant[at, doc]) for doc in range(documents)}
        for at, name in enumerate(names)
    }
    return runs, Qrels.from_dict(judged)


# the union


def test_the_union_keeps_every_query_and_document_once() -> None:
    union = Union.of([FIRST, SECOND])
    assert union.queries == ("q1", "q2", "q3")
    assert union.offsets.tolist() == [0, 4, 5, 6]
    assert union.documents.tolist() == ["a", "b", "c", "d", "a", "a"]
    assert union.counts.tolist() == [1, 2, 1, 1, 1, 1]
    assert union.present.tolist() == [[1, 1, 1, 0, 1, 0], [0, 1, 0, 1, 0, 1]]


def test_a_query_without_documents_stays() -> None:
    empty = Run.from_dict({"q1": {}, "q9": {}})
    fused = fuse([FIRST, empty], "rrf")
    assert fused.queries == ("q1", "q2", "q9")
    assert np.diff(fused.offsets).tolist() == [3, 1, 0]
    assert fuse([empty, empty], "comb-mnz").rows == 0


@pytest.mark.parametrize("wide", [False, True])
def test_order_is_score_then_id_descending(wide: bool) -> None:
    lists = {f"q{at}": {f"d{doc}": float(doc % 3) for doc in range(7)} for at in range(4)}
    if wide:  # very different lengths take another way to sort
        lists["long"] = {f"d{doc}": float(doc % 50) for doc in range(9_000)}
    run = Run.from_dict(lists)
    assert fuse([run], "comb-sum", norm="none") == run


# normalisers


def test_normalisers_are_their_formulae() -> None:
    found = {name: Candidates.of([FIRST, SECOND], name).scores[0][:3] for name in NORMALISERS}
    odds = np.exp([4.0, 3.0, 2.0])
    expected = {
        "none": [4, 3, 2],
        "min-max": [1, 0.5, 0],
        "z-score": np.array([1, 0, -1]) / np.std([4, 3, 2]),
        "zmuv": np.array([1, 0, -1]) / np.std([4, 3, 2]),
        "sum": [2 / 3, 1 / 3, 0],
        "max": [1, 0.75, 0.5],
        "rank": [1, 2 / 3, 1 / 3],
        "borda": [1, 3 / 4, 2 / 4],  # four candidates together
        "softmax": odds / odds.sum(),
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(np.asarray(values)), name


@pytest.mark.parametrize("norm", NORMALISERS)
@pytest.mark.parametrize("scores", [[7.0], [2.0, 2.0, 2.0], [0.0, 0.0], [-3.0], [-1.0, -1.0]])
def test_one_document_and_ties_are_hits_not_misses(norm: str, scores: list[float]) -> None:
    alone = Run.of(["q"] * len(scores), [f"d{at}" for at in range(len(scores))], scores)
    long = Run.from_dict({"q": {f"e{at}": float(at) for at in range(20)}})
    for method in ("comb-sum", "comb-mnz", "comb-max"):
        fused = fuse([alone, long], method, norm=norm)
        assert np.isfinite(fused.scores).all()
        if norm != "none" and method == "comb-mnz":
            worst = fused.to_dict()["q"]["e0"]
            assert fused.to_dict()["q"]["d0"] > worst


@pytest.mark.parametrize("method", FUSERS)
def test_one_document_alone_is_fused_by_every_formula(method: str) -> None:
    alone, pair = Run.from_dict({"q": {"d": 0.0}}), Run.from_dict({"q": {"d": -3.0, "e": -3.0}})
    assert fuse([alone], method).to_dict()["q"].keys() == {"d"}
    assert fuse([alone, pair], method).to_dict()["q"].keys() == {"d", "e"}


def test_negative_scores_keep_their_order() -> None:
    losses = Run.from_dict({"q": {"a": -1.0, "b": -2.0, "c": -9.0}})
    for norm in NORMALISERS:
        for method in FUSERS:
            fused = fuse([losses], method, norm=norm, **({"topk": 2, "ck": 1} if method == "rl-sim" else {}))
            assert fused.documents.tolist() == ["a", "b", "c"], (norm, method)


# fusers


def test_formulae() -> None:
    def of(method: str, **options: object) -> dict[str, float]:
        return fuse([FIRST, SECOND], method, norm="min-max", **options).to_dict()["q1"]

    assert of("comb-sum") == {"b": 1.5, "a": 1.0, "d": 0.0, "c": 0.0}
    assert of("comb-mnz")["b"] == 3.0
    assert of("comb-gmnz", gamma=2.0)["b"] == 6.0
    assert of("comb-anz")["b"] == 0.75
    assert (of("comb-min")["b"], of("comb-max")["b"], of("comb-med")["b"]) == (0.5, 1.0, 0.75)
    assert of("rrf") == pytest.approx({"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 63, "d": 1 / 62})
    assert of("rrf", k=0)["b"] == 1.5
    assert of("isr")["b"] == 2 * (1 / 4 + 1)
    assert of("log-isr")["a"] == pytest.approx(math.log(2))
    assert of("rbc", phi=0.5) == {"b": 0.75, "a": 0.5, "d": 0.25, "c": 0.125}
    # four candidates: FIRST gives 4, 3, 2 and leaves 1 for d; SECOND gives 4, 3 and (2 + 1)/2 for each other
    assert of("borda") == {"b": 3 + 4, "a": 4 + 1.5, "d": 1 + 3, "c": 2 + 1.5}


def test_confidence_fusers_are_equations_13_and_14() -> None:
    first = FIRST.with_probabilities([0.8, 0.4, 0.2, 0.5])
    second = SECOND.with_probabilities([0.9, 0.1, 0.3])

    def of(method: str, **options: object) -> dict[str, float]:
        return fuse([first, second], method, norm="min-max", **options).to_dict()["q1"]

    assert of("comb-mnz-conf")["b"] == pytest.approx(2 * (0.4 * 0.5 + 0.9 * 1.0))
    assert of("comb-mult-conf")["b"] == pytest.approx((1 + 0.4 * 0.5) * (1 + 0.9 * 1.0))
    assert of("comb-mnz-variant")["b"] == pytest.approx((0.5 + 1.0) * (0.4 + 0.9))
    assert of("comb-mnz-variant", reading="squared")["b"] == pytest.approx(2 * (0.4**2 + 0.9**2))
    assert of("comb-mnz-variant", reading="calibrated")["b"] == pytest.approx(2 * (0.4 + 0.9))
    assert of("comb-mnz-variant", reading="gmnz", gamma=2.0)["b"] == pytest.approx(4 * 1.5)
    with pytest.raises(ConfigError, match="soft_count"):
        of("comb-mnz-variant", reading="soft count")
    # without probabilities, the min-max score is the confidence
    assert fuse([FIRST], "comb-mnz-conf", norm="min-max").to_dict()["q1"]["b"] == 0.25


def test_negative_z_scores_do_not_punish_agreement() -> None:
    # c is last in both lists: doubling a negative score would put it below d, which one list alone has last
    first = Run.from_dict({"q": {"a": 3.0, "b": 2.0, "c": 1.0}})
    second = Run.from_dict({"q": {"b": 3.0, "c": 2.0, "d": 0.0}})
    for method in ("comb-mnz", "comb-mult-conf", "comb-mnz-conf"):
        scores = fuse([first, second], method, norm="z-score").to_dict()["q"]
        assert scores["c"] > scores["d"], method
    printed = fuse([first, second], "comb-mnz", norm="z-score", shift=False).to_dict()["q"]
    assert printed["c"] < printed["a"] / 2
    assert printed["c"] == pytest.approx(2 * (-np.sqrt(1.5) + (2 - 5 / 3) / np.std([3, 2, 0])))


def test_what_absent_documents_get_is_a_visible_choice() -> None:
    # c has 0.9 from the first list alone; b has 0.5 and 0.55
    first = Run.from_dict({"q": {"a": 1.0, "c": 0.9, "b": 0.5}})
    second = Run.from_dict({"q": {"a": 1.0, "b": 0.55, "e": 0.5}})
    left_out = fuse([first, second], "comb-sum", norm="none").to_dict()["q"]
    lowest = fuse([first, second], "comb-sum", norm="none", missing="lowest").to_dict()["q"]
    given = fuse([first, second], "comb-sum", norm="none", missing=0.2).to_dict()["q"]
    assert (left_out["c"], lowest["c"], given["c"]) == pytest.approx((0.9, 1.4, 1.1))
    assert left_out["b"] > left_out["c"]
    assert lowest["b"] < lowest["c"]


def test_what_absent_documents_get_counts_with_confidences_too() -> None:
    """Products cᵢ·sᵢ: 0.8, 0.45 and 0.2 in the first list, 0.9, 0.11 and 0.05 in the second."""
    first = Run.from_dict({"q": {"a": 1.0, "c": 0.9, "b": 0.5}}).with_probabilities([0.8, 0.5, 0.4])
    second = Run.from_dict({"q": {"a": 1.0, "b": 0.55, "e": 0.5}}).with_probabilities([0.9, 0.2, 0.1])

    def of(method: str, **options: object) -> dict[str, float]:
        return fuse([first, second], method, norm="none", **options).to_dict()["q"]

    assert of("comb-mnz-conf", missing="lowest")["c"] == pytest.approx(0.45 + 0.05)
    assert of("comb-mnz-conf", missing=0.3)["c"] == pytest.approx(0.45 + 0.3)
    assert of("comb-mult-conf", missing="lowest")["c"] == pytest.approx((1 + 0.45) * (1 + 0.05))
    assert of("comb-mult-conf", missing=0.3)["e"] == pytest.approx((1 + 0.3) * (1 + 0.05))
    for method, alone in (("comb-mnz-conf", 0.45), ("comb-mult-conf", 1.45)):
        assert of(method)["c"] == pytest.approx(alone)


def test_mistakes_are_told() -> None:
    with pytest.raises(ConfigError, match="did you mean 'comb-mnz'"):
        fuse([FIRST], "comb-mnx")
    with pytest.raises(ConfigError, match="did you mean 'min-max'"):
        fuse([FIRST], "comb-sum", norm="minmax")
    with pytest.raises(ConfigError, match="rrf has no option 'kk'"):
        fuse([FIRST], "rrf", kk=3)
    with pytest.raises(ConfigError, match="did you mean 'calibrator'"):
        fuser("stacked", calibrater="platt")
    with pytest.raises(ConfigError, match="learns from judgements"):
        fuse([FIRST], "stacked")
    with pytest.raises(ConfigError, match="reads calibrated probabilities"):
        fuser("stacked", norm="min-max")
    with pytest.raises(ConfigError, match="'learned', 'lowest' or a probability"):
        LogOdds(missing="zero")
    with pytest.raises(DataError, match="no runs"):
        fuse([], "rrf")
    with pytest.raises(DataError, match="2 weights for 1 runs"):
        fuse([FIRST], "weighted", weights=(1, 2))
    with pytest.raises(DataError, match="0 of 6 judged candidates are relevant"):
        fuse([FIRST, SECOND], "stacked", qrels=Qrels.from_dict({q: {"a": 0} for q in ("q1", "q2", "q3")}))
    for method in ("stacked", "weighted", "rrf"):
        with pytest.raises(DataError, match="one judged query alone"):
            fuse([FIRST, SECOND], method, qrels=Qrels.from_dict({"q1": {"a": 1}}))
    with pytest.raises(DataError, match="not fitted"):
        Stacked().fuse([FIRST])


@pytest.mark.parametrize(
    ("method", "option", "message"),
    [
        ("rl-sim", {"topk": "abc"}, "a whole number from 1 on"),
        ("rl-sim", {"rounds": 1.5}, "a whole number from 1 on"),
        ("rl-sim", {"similar": 1}, "a list of runs"),
        ("rlsim-eq15", {"neighbours": 0}, "a whole number from 1 on"),
        ("comb-mnz", {"shift": 3}, "true or false"),
        ("comb-mnz-variant", {"reading": 3}, "a name"),
        ("comb-mnz-variant", {"reading": "soft"}, "known: soft_count"),
        ("stacked", {"calibrator": 5}, "a calibrator or the name of one"),
        ("stacked", {"silos": "ab"}, "a list of names"),
        ("stacked", {"missing": 5.0}, "a probability, from 0 to 1"),
        ("log-odds", {"missing": -0.1}, "a probability, from 0 to 1"),
        ("weighted", {"measure": 5}, "a name"),
        ("convex", {"weights": (3, -1)}, "must not be negative"),
    ],
)
def test_options_of_the_wrong_kind_are_told(method: str, option: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fuse([FIRST, SECOND], method, **option)


@pytest.mark.parametrize("method", LEARNED)
def test_what_is_learned_does_not_depend_on_the_order_of_runs(method: str) -> None:
    runs, qrels = world(40)
    runs = [*runs, runs[0].with_scores(runs[0].scores ** 3).named("third")]
    options = {"calibrator": "platt"} if method in ("stacked", "log-odds") else {"measure": "P@3"}
    options = {} if method == "joint" else options
    fused = fuse(runs, method, qrels=qrels, **options)
    for order in ([2, 0, 1], [1, 2, 0], [2, 1, 0]):
        again = fuse([runs[at] for at in order], method, qrels=qrels, **options)
        assert again.queries == tuple(fused.queries)
        for query in fused.queries:
            assert again[query].to_dict()[query] == pytest.approx(fused[query].to_dict()[query], abs=1e-6)


def test_convex_weights_add_up_to_one() -> None:
    given = fuse([FIRST, SECOND], "convex", weights=np.array([7, 3]))
    assert given == fuse([FIRST, SECOND], "convex", weights=(0.7, 0.3))


def test_underscores_are_hyphens() -> None:
    assert fuse([FIRST], "comb_mnz") == fuse([FIRST], "comb-mnz")


def test_auto_takes_the_best_there_is() -> None:
    runs, qrels = world(30)
    assert fuse(runs).name == "rrf"
    assert fuse([run.with_probabilities(np.full(run.rows, 0.5)) for run in runs]).name == "log-odds"
    assert fuse(runs, qrels=qrels).name == "convex"
    assert fuser().method == "auto"


# auto


def test_auto_takes_another_method_only_where_it_is_clearly_better() -> None:
    """Five standard errors for a run beside noise; nothing for runs that are alike."""
    alike, qrels = world(60, quality=(1.0, 1.0))
    model = Auto()
    fused = model.fit_fuse(alike, qrels)
    assert fused.name == model.label == "convex"
    assert [trial.method for trial in model.trials_] == [
        "convex", "comb-sum", "rrf", "log-odds", "stacked", "best-run"
    ]  # fmt: skip
    assert not any(trial.is_clear for trial in model.trials_)
    assert model.trials_[0].difference == model.trials_[0].worse == 0
    rng = np.random.default_rng(0)
    # relevance is in the ranks of one run alone, whose scores say nothing: a sum of scores misses it
    good = alike[0].with_scores(np.where(alike[0].ranks == 1, 1e9, 1.0) - alike[0].ranks * 1e-9).named("good")
    noise = alike[1].with_scores(rng.permutation(alike[1].scores)).named("noise")
    other = Auto().fit([good, noise, noise.named("more")], qrels)
    by_name = {trial.method: trial for trial in other.trials_}
    best = max(other.trials_, key=lambda trial: trial.mean if trial.is_clear else 0)
    assert best.is_clear
    assert other.label == best.method != "convex"
    assert best.difference == pytest.approx(best.mean - by_name["convex"].mean)


def test_auto_s_judged_queries_are_fused_by_what_was_chosen_and_fitted_without_them() -> None:
    runs, qrels = world(40)
    fused = Auto().fit_fuse(runs, qrels)
    training = TrainingUnion.of(runs, qrels, Judging(), 5)
    fold = np.array(training.union.queries)[training.fold_of_query == 1].tolist()
    wrong = {
        query: {name: grade if query not in fold else 1 - grade for name, grade in judged.items()}
        for query, judged in qrels.to_dict().items()
    }
    again = Auto().fit_fuse(runs, Qrels.from_dict(wrong))
    assert again[fold] == fused[fold]
    assert again[fold].probabilities == pytest.approx(fused[fold].probabilities)
    assert again != fused


def test_weights_are_drawn_to_equal_ones() -> None:
    rng = np.random.default_rng(0)
    relevant = (rng.random(4_000) < 0.3).astype(float)
    evidence = np.stack([relevant + noise * rng.normal(size=4_000) for noise in (0.5, 1.0, 1.0)])
    many, few = drawn(evidence, relevant), drawn(evidence[:, :40], relevant[:40])
    for weights in (many, few):
        assert weights.sum() == pytest.approx(1)
    assert many[0] > 1.5 * many[1]
    assert np.abs(few - 1 / 3).max() < np.abs(many - 1 / 3).max()
    assert drawn(evidence, relevant, shrinkage=1e9) == pytest.approx(np.full(3, 1 / 3), abs=1e-3)
    assert drawn(-evidence, relevant) == pytest.approx(np.full(3, 1 / 3))
    misleading = drawn(np.vstack((evidence[:2], evidence[0] - 2 * relevant)), relevant, shrinkage=1e-3)
    assert misleading.min() == 0


def test_weights_are_learned_from_the_top_of_lists() -> None:
    """What no run ranks among its first twenty does not count, however many such documents there are."""
    runs, qrels = world(40, depth=60)
    union = Union.of(runs)
    pairs = zip(union.query_of_row.tolist(), union.documents.tolist(), union.best_ranks.tolist(), strict=True)
    low = {(union.queries[at], name) for at, name, rank in pairs if rank > 20}
    assert len(low) > 1_000
    other = {
        query: {name: 1 - grade if (query, name) in low else grade for name, grade in judged.items()}
        for query, judged in qrels.to_dict().items()
    }
    weights = [
        Weighted(tune="likelihood").fit(runs, each).weights_ for each in (qrels, Qrels.from_dict(other))
    ]
    assert weights[0] == pytest.approx(weights[1])


def test_what_auto_chose_is_saved_with_how_all_did(tmp_path: Path) -> None:
    runs, qrels = world(40)
    model = Auto()
    model.fit(runs, qrels)
    save_fuser(model, tmp_path / "a.fuser")
    again = load_fuser(tmp_path / "a.fuser")
    assert again.fuse(runs) == model.fuse(runs)
    assert again.label == model.label
    assert again.threshold_for(0.6) == model.threshold_for(0.6)
    header = SavedFuser.read(tmp_path / "a.fuser").header
    assert [trial["method"] for trial in header["trials"]][:2] == ["convex", "comb-sum"]
    first = again.explain(runs, "q000")[0]
    assert first.score == pytest.approx(first.start + sum(part.contribution for part in first.parts))


@pytest.mark.parametrize("queries", [2, 3, 5])
def test_auto_learns_from_few_queries(queries: int) -> None:
    runs, qrels = world(8)
    fused = fuse(runs, qrels=qrels[[f"q{at:03}" for at in range(queries)]])
    assert np.isfinite(fused.probabilities).all()


def test_errors_name_the_method_that_was_asked_for() -> None:
    runs, qrels = world(20)
    with pytest.raises(ConfigError, match=r"^convex learns from judgements"):
        fuse([FIRST], "convex")
    with pytest.raises(DataError, match="fuser 'convex' is not fitted"):
        fuser("convex").fuse([FIRST])
    with pytest.raises(DataError, match="fuser 'rrf' is not fitted"):
        save_fuser(fuser("rrf"), "nowhere")
    with pytest.raises(ConfigError, match="auto has no option 'kk'"):
        fuse(runs, qrels=qrels, kk=3)
    with pytest.raises(ConfigError, match="auto compares methods that read norm='z-score' differently"):
        fuse(runs, qrels=qrels, norm="z-score")
    with pytest.raises(ConfigError, match="no way of tuning 'best run'"):
        fuser("convex", tune="best run")


# learned fusers


@pytest.mark.parametrize("method", [name for name in METHODS if name != "rl-sim"])
def test_every_fuser_learns_probabilities_from_judgements(method: str) -> None:
    runs, qrels = world(40)
    options = {"calibrator": "platt"} if method in ("stacked", "log-odds") else {}
    fused = fuse(runs, method, qrels=qrels, **options)
    found = calibration_of(qrels, fused)
    assert found["ECE"] < 0.12
    assert found["Brier skill"] > 0
    assert fused.rows == Union.of(runs).rows


def test_log_odds_is_its_formula() -> None:
    runs, qrels = world(40)
    model = LogOdds(calibrator="platt").fit(runs, qrels)
    told = [calibrate(run, fitted) for run, fitted in zip(runs, model.calibrators_, strict=True)]
    fused = model.fuse(runs)
    document = fused.documents.word(0)
    chances = [
        dict(zip(run["q000"].documents.tolist(), run["q000"].probabilities, strict=True)) for run in told
    ]
    terms = [
        logit(chance.get(document, absent)) for chance, absent in zip(chances, model.absent_, strict=True)
    ]
    assert fused.scores[0] == pytest.approx(sum(terms) - logit(model.prior_))


def test_absence_is_learned_and_never_zero() -> None:
    runs, qrels = world(60, quality=(3.0, 0.3))
    model = Stacked(calibrator="platt").fit(runs, qrels)
    union = Union.of(runs)
    relevant, _ = Judging().of(union.table(), qrels)
    seen = [relevant[~held].mean() for held in union.present]
    assert model.absent_ == pytest.approx(seen, abs=0.01)
    assert model.absent_[0] < model.absent_[1]  # what the better retriever leaves out is worth less
    weights = model.weights_
    assert weights[0] > weights[1] > 0


def test_stacking_guards_against_copies() -> None:
    runs, qrels = world(150, quality=(0.8, 0.8))
    copies = [runs[0], runs[0].named("copy"), runs[0].named("again"), runs[1]]
    measured = {
        method: log_loss(*outcomes_of(qrels, fuse(copies, method, qrels=qrels, calibrator="platt")))
        for method in ("stacked", "log-odds")
    }
    assert measured["stacked"] < measured["log-odds"]
    one_each = log_loss(*outcomes_of(qrels, fuse(runs, "stacked", qrels=qrels, calibrator="platt")))
    assert measured["stacked"] == pytest.approx(one_each, abs=0.01)


def test_stacked_beats_each_retriever_where_they_complement_each_other() -> None:
    runs, qrels = world(150, quality=(0.8, 0.8))
    fused = fuse(runs, "stacked", qrels=qrels)
    best = max(evaluate(qrels, run, ["nDCG@10"])["nDCG@10"] for run in runs)
    assert evaluate(qrels, fused, ["nDCG@10"])["nDCG@10"] > best
    losses = [log_loss(*outcomes_of(qrels, calibrate(run, qrels=qrels))) for run in runs]
    assert log_loss(*outcomes_of(qrels, fused)) < min(losses) + 0.02


def test_judged_queries_are_fused_by_models_that_did_not_see_them() -> None:
    runs, qrels = world(40)
    model = Stacked(calibrator="platt")
    held = model.fit_fuse(runs, qrels)
    assert held != model.fuse(runs)
    some = qrels[[f"q{at:03}" for at in range(30)]]
    part = Stacked(calibrator="platt")
    mixed = part.fit_fuse(runs, some)
    rest = [f"q{at:03}" for at in range(30, 40)]
    assert mixed[rest] == part.fuse(runs)[rest]


def test_single_label_stacking_is_a_softmax_across_labels() -> None:
    rng = np.random.default_rng(5)
    names, labels = np.repeat([f"q{at}" for at in range(200)], 4), np.tile(list("abcd"), 200)
    truth = np.array([rng.choice(4, p=[0.4, 0.3, 0.2, 0.1]) for _ in range(200)])
    right = np.arange(4)[None, :] == truth[:, None]
    runs = [
        Run.of(names.tolist(), labels.tolist(), 2 * right + rng.normal(size=(200, 4)), name=str(at))
        for at in range(2)
    ]
    qrels = Qrels.of(names.tolist(), labels.tolist(), right.reshape(-1).astype(int))
    fused = fuse(runs, "stacked", qrels=qrels, single_label=True, calibrator="platt")
    sums = np.bincount(fused.query_of_row, weights=fused.probabilities)
    assert sums.max() <= 1 + 1e-9
    assert sums.min() > 0.9
    pairwise = fuse(runs, "stacked", qrels=qrels, calibrator="platt")
    losses = [log_loss(*outcomes_of(qrels, run)) for run in (fused, pairwise)]
    assert losses[0] < losses[1]


def test_absence_from_another_silos_list_is_no_evidence() -> None:
    runs, qrels = world(40)
    north = [run.keep(np.array([name[-1] in "02468" for name in run.documents.tolist()])) for run in runs]
    south = [run.keep(np.array([name[-1] in "13579" for name in run.documents.tolist()])) for run in runs]
    parts = [run.named(f"{run.name} {side}") for side, held in (("n", north), ("s", south)) for run in held]
    model = LogOdds(calibrator="platt", silos=("n", "n", "s", "s")).fit(parts, qrels)
    found = model.explain(parts, "q000", depth=100)
    assert len(found) > 10
    for each in found:
        other = each.parts[2:] if each.document[-1] in "02468" else each.parts[:2]
        assert [part.contribution for part in other] == pytest.approx([0, 0], abs=1e-12)


def test_weights_follow_quality_and_measure() -> None:
    runs, qrels = world(80, quality=(2.0, 0.1))
    model = Weighted(measure="nDCG@10").fit(runs, qrels)
    assert model.weights_[0] > 0.8
    assert model.weights_.sum() == pytest.approx(1)
    three = Weighted(norm="min-max").fit([*runs, runs[1].named("third")], qrels)
    assert three.weights_.argmax() == 0
    given = fuse(runs, "convex", weights=(0.5, 0.5), missing=0.0)
    assert given == fuse(runs, "comb-sum", norm="min-max").with_scores(
        fuse(runs, "comb-sum", norm="min-max").scores / 2
    )


def test_runs_are_matched_by_name() -> None:
    runs, qrels = world(40)
    model = Stacked(calibrator="platt").fit(runs, qrels)
    assert model.fuse(runs[::-1]) == model.fuse(runs)
    with pytest.raises(DataError, match="fitted on 2 runs"):
        model.fuse(runs[:1])
    second = model.retrievers_[1]
    with pytest.raises(DataError, match=f"the run '{second}' stands where"):
        model.fuse([runs[1], runs[0].named("another")])
    new = [run.named(f"new {run.name}") for run in runs]
    assert model.fuse(new) == model.fuse(runs)


def test_a_query_that_one_run_lacks_is_fused_from_the_other() -> None:
    runs, qrels = world(40)
    model = Stacked(calibrator="platt").fit(runs, qrels)
    fused = model.fuse([runs[0], runs[1][runs[1].queries[:30]]])
    lacking = LogOdds(calibrator="platt").fit(runs, qrels)
    (told, *_) = lacking.explain([runs[0], runs[1][runs[1].queries[:30]]], "q039")
    assert told.parts[1].contribution == pytest.approx(0)  # no list is no evidence
    alone = fused["q039"]
    assert alone.documents.tolist() == runs[0]["q039"].documents.tolist()
    assert (alone.probabilities > 0).all()


@pytest.mark.parametrize(
    "model",
    [
        Stacked(calibrator="query-feature", missing="lowest"),
        Stacked(calibrator="platt", single_label=True),
        LogOdds(calibrator="beta", missing=0.1, judging=Judging(unjudged="skip")),
        Weighted(norm="rank", measure="P@5"),
        Formula("rrf", options={"k": 10}),
        Formula("comb_mnz", norm="z-score", missing="lowest"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_saved_fusers_fuse_the_same(model: Stacked, tmp_path: Path) -> None:
    runs, qrels = world(40)
    fused = model.fit(runs, qrels).fuse(runs)
    save_fuser(model, tmp_path / "fuser")
    again = load_fuser(tmp_path / "fuser")
    assert again.fuse(runs) == fused
    assert again.fuse(runs).name == getattr(model, "formula", model.method)
    assert again.threshold_for(0.5) == model.threshold_for(0.5)
    assert again.parameters() == model.parameters()
    told = [each.to_dict() for each in again.explain(runs, "q001")]
    assert told == [each.to_dict() for each in model.explain(runs, "q001")]


@pytest.mark.parametrize(
    "model",
    [LogOdds(), Weighted(weights=[1, 2]), Formula("comb_mnz")],
    ids=lambda model: type(model).__name__,
)
def test_fusers_without_judgements_are_saved(model: LogOdds, tmp_path: Path) -> None:
    runs = [run.with_probabilities(1 / (1 + np.exp(-run.scores))) for run in world(10)[0]]
    save_fuser(model.unjudged(runs), tmp_path / "fuser")
    again = load_fuser(tmp_path / "fuser")
    assert again.fuse(runs) == model.fuse(runs)
    with pytest.raises(DataError, match="no judgements"):
        again.threshold_for(0.5)


def test_files_that_are_no_fusers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not fitted"):
        save_fuser(Stacked(), tmp_path / "fuser")
    (tmp_path / "text").write_text("no")
    with pytest.raises(DataError, match="not a saved fuser"):
        load_fuser(tmp_path / "text")
    with pytest.raises(DataError, match="cannot be read"):
        load_fuser(tmp_path / "nothing")


# decisions


def test_contributions_add_up_to_the_score() -> None:
    runs, qrels = world(40)
    for model in (Stacked(calibrator="platt"), LogOdds(calibrator="platt"), Weighted(), Formula("rrf")):
        fused = model.fit(runs, qrels).fuse(runs)
        for each in model.explain(runs, "q005", depth=5):
            total = each.start + sum(part.contribution for part in each.parts)
            assert total == pytest.approx(each.score)
            row = fused["q005"].documents.tolist().index(each.document)
            assert each.rank == row + 1
            assert each.score == pytest.approx(fused["q005"].scores[row])
            assert each.probability == pytest.approx(fused["q005"].probabilities[row])


def test_an_explanation_names_what_each_retriever_said() -> None:
    runs, qrels = world(40)
    model = Stacked(calibrator="platt").fit(runs, qrels)
    absent = next(
        doc for doc in runs[0]["q000"].documents.tolist() if doc not in runs[1]["q000"].documents.tolist()
    )
    (told,) = model.explain(runs, "q000", absent)
    first, second = told.parts
    at = runs[0]["q000"].documents.tolist().index(absent)
    assert first.score == runs[0]["q000"].scores[at]
    assert first.rank == at + 1
    assert (second.score, second.rank) == (None, None)
    assert second.probability == pytest.approx(model.absent_[1])
    assert "absent" in str(told)
    assert "retriever 0: score" in str(told)
    with pytest.raises(DataError, match="no run has the query"):
        model.explain(runs, "nowhere")
    with pytest.raises(DataError, match="no run returned"):
        model.explain(runs, "q000", "nothing")


def test_a_formula_is_explained_by_what_would_be_lost() -> None:
    runs, qrels = world(40)
    model = Formula("comb-mnz").fit(runs, qrels)
    both = next(
        each for each in model.explain(runs, "q000") if all(part.score is not None for part in each.parts)
    )
    alone = fuse(runs[1:], "comb-mnz").to_dict()["q000"][both.document]
    assert both.parts[0].contribution == pytest.approx(both.score - alone)


def test_thresholds_keep_the_precision_they_promise() -> None:
    runs, qrels = world(400, quality=(1.5, 1.0))
    model = Stacked(calibrator="platt").fit([run[:300] for run in runs], qrels)
    threshold = model.threshold_for(precision=0.8)
    kept = abstain(model.fuse([run[300:] for run in runs]), threshold)
    right = kept.grades(qrels) > 0
    assert right.mean() > 0.74
    assert len(kept) == 100
    assert kept.rows < 100 * 24
    assert threshold_for(model.fit_fuse(runs, qrels), qrels, precision=0.8) == model.threshold_for(0.8)
    with pytest.raises(DataError, match="no threshold reaches"):
        ThresholdCurve.of(np.linspace(0, 1, 100), np.arange(100) % 2).threshold_for(0.9)
    with pytest.raises(DataError, match="not in"):
        model.threshold_for(1.5)


def test_nothing_good_means_nothing_returned() -> None:
    run = Run.from_dict({"q": {"a": 1.0}, "p": {"b": 2.0}}).with_probabilities([0.9, 0.1])
    kept = abstain(run, 0.5)
    assert kept.queries == ("q", "p")
    assert np.diff(kept.offsets).tolist() == [1, 0]
    with pytest.raises(DataError, match="no probabilities"):
        abstain(FIRST, 0.5)


def test_the_sum_of_probabilities_comes_true() -> None:
    runs, qrels = world(200)
    fused = fuse(runs, "stacked", qrels=qrels)
    true = evaluate(qrels, fused, ["P@5"])["P@5"] * 5
    first = fused.required_probabilities * (fused.ranks <= 5)
    assert first.sum() / len(fused) == pytest.approx(true, abs=0.3)


def test_the_threshold_curve_counts() -> None:
    curve = ThresholdCurve.of([0.9, 0.7, 0.7, 0.2], [1, 1, 0, 0])
    assert curve.thresholds.tolist() == [0.9, 0.7, 0.2]
    assert curve.precision == pytest.approx([1, 2 / 3, 0.5])
    assert curve.recall == pytest.approx([0.5, 1, 1])
    assert curve.threshold_for(0.6, least=1) == 0.7
    many = np.random.default_rng(0).random(50_000)
    assert len(ThresholdCurve.of(many, many > 0.5).thresholds) <= 1_000


def test_a_threshold_above_all_probabilities_is_an_error() -> None:
    with pytest.raises(DataError, match=r"reaches a probability of 0\.95: the highest is 0\.900"):
        ThresholdCurve.of([0.9, 0.7], [1, 0]).support(0.95)


def test_a_threshold_says_what_it_rests_on() -> None:
    """Ten rows of one query prove less than ten of ten; independent rows give Clopper and Pearson's."""
    from scipy.stats import binomtest

    rng = np.random.default_rng(0)
    values, queries = rng.random(400), np.repeat(np.arange(40), 10)
    hits = rng.random(400) < 0.8
    alone = ThresholdCurve.of(values, hits).support(0.0)
    exact = binomtest(int(hits.sum()), 400).proportion_ci(method="exact")
    assert (alone.rows, alone.queries) == (400, 400)
    assert (alone.low, alone.high) == pytest.approx((exact.low, exact.high), abs=1e-3)
    together = np.repeat(rng.random(40) < 0.8, 10)
    curve = ThresholdCurve.of(values, together, queries)
    support = curve.support(0.0)
    assert (support.rows, support.queries) == (400, 40)
    few = binomtest(int(together.sum()) // 10, 40).proportion_ci(method="exact")
    assert (support.low, support.high) == pytest.approx((few.low, few.high), abs=0.02)
    at = float(curve.thresholds[99])
    above = values >= at
    right, size = (np.bincount(queries, weights=each * above) for each in (together, np.ones(400)))
    precision = right.sum() / size.sum()
    assert curve.spread[99] == pytest.approx(((right - precision * size) ** 2).sum())
    assert curve.support(at).queries == (size > 0).sum()
    assert ThresholdCurve.of(np.ones(20), np.ones(20), np.repeat([0, 1], 10)).support(1.0).low < 0.2


def test_figures_are_drawn(tmp_path: Path) -> None:
    runs, qrels = world(40)
    fused = fuse(runs, "stacked", qrels=qrels)
    before = reliability(
        *outcomes_of(qrels, runs[0].with_probabilities(Candidates.of(runs, "min-max").scores[0]))
    )
    after = reliability(*outcomes_of(qrels, fused))
    curve = ThresholdCurve.of(*outcomes_of(qrels, fused))
    plots = {
        "reliability": reliability_diagram({"before": before, "after": after}),
        "scores": score_histogram(runs[0].scores, runs[0].grades(qrels) > 0),
        "threshold": threshold_plot(curve),
    }
    for name, plot in plots.items():
        assert plot.save(tmp_path / f"{name}.svg").read_text().count("<path") > 5
        assert plot.save(tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.realdata
def test_stacked_on_trec_dl_2019_is_level_with_colbert_and_above_rrf(data_dir: Path) -> None:
    folder = data_dir / "runs" / "trec-dl"
    runs = [read_run(folder / f"{name}.dl19.run", name=name) for name in ("bm25", "colbert")]
    qrels = read_qrels(folder / "qrels.dl19-passage.txt")
    measure = "nDCG@10(gain=linear)"

    def values(run: Run) -> np.ndarray:
        return np.array(list(evaluate(qrels, run, [measure]).per_query(measure).values()))

    stacked, colbert, rrf = values(fuse(runs, qrels=qrels)), values(runs[1]), values(fuse(runs, "rrf"))
    assert colbert.mean() == pytest.approx(0.7320, abs=5e-4)
    assert rrf.mean() == pytest.approx(0.682, abs=5e-3)
    difference = stacked - colbert
    half = 1.96 * difference.std(ddof=1) / math.sqrt(len(difference))
    assert difference.mean() + half > 0
    assert stacked.mean() > rrf.mean() + 0.02
