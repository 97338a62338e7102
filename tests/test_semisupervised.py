"""Pairs across silos: what is seen of them, which are chosen, how they are labelled and trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from isthmus.errors import ConfigError
from isthmus.features import FIELDS, NAMES, ExactCounts, Pairs, compute
from isthmus.federation.rounds import HeldOut, State
from isthmus.federation.semisupervised.labelling import (
    Guesses,
    Labelling,
    SiloRows,
    guess,
    joint_rows,
    mixed,
    shifted,
)
from isthmus.federation.semisupervised.silos import Chosen, CrossSilos, Releasing, best_by_bm25, gather
from isthmus.federation.semisupervised.training import (
    MEAN,
    Anchor,
    Conductor,
    CoTraining,
    averaged,
    cotrain,
    first_model,
    fitted_scaling,
    local_models,
    scaled,
    self_taught,
    simulated_names,
)
from isthmus.federation.settings import FedRisk, StrategyOptions
from isthmus.losses import cross_entropy
from isthmus.randomness import Streams
from isthmus.rankers import network_scores, train_epochs
from isthmus.retrieval import Statistics
from isthmus.tables import Letor
from isthmus.text import Tokens, tokenise
from isthmus_reproduce import synthetic_text
from isthmus_reproduce.csfltr.selection import PICKS

SILOS = ("silo1", "silo2", "silo3")


class Small(CrossSilos):
    """Three silos with a handful of documents each, and what each releases."""

    def __init__(self, releasing: Releasing, seed: int = 0) -> None:
        super().__init__(synthetic_text.text(45, 9, 3, seed=1, words=60), Streams(seed), releasing)
        self.asked: Tokens = tokenise(self.corpus.queries.texts[:4])
        self.seen = self.viewer("silo1", releasing.reader)


@pytest.fixture(scope="module")
def quiet() -> Small:
    """Without noise."""
    return Small(Releasing(epsilon=float("inf"), epsilon_totals=float("inf"), reader="plain", width=1 << 18))


@pytest.fixture(scope="module")
def noisy() -> Small:
    return Small(Releasing(reader="shrink"))


def test_any_query_and_any_silos_document_have_features(noisy: Small) -> None:
    """The paper's sharing property: no pair is out of reach."""
    for holder in SILOS:
        every = Pairs.all(len(noisy.asked), len(noisy.seen(holder)))
        table = noisy.seen(holder).features(noisy.asked, every)
        assert table.shape == (len(every), len(NAMES))
        assert np.isfinite(table).all()


def _whole(small: Small, name: str) -> Statistics:
    """What nobody sees: the statistics of all silos' documents, exactly."""
    first, *others = (Statistics.of(tokens[name]) for tokens in small.tokens.values())
    return sum(others, first)


@pytest.mark.parametrize("holder", SILOS)
def test_without_noise_private_features_are_the_exact_ones(quiet: Small, holder: str) -> None:
    every = Pairs.all(len(quiet.asked), len(quiet.seen(holder)))
    mine = quiet.seen(holder).features(quiet.asked, every)
    counts = {name: ExactCounts.of(quiet.tokens[holder][name], _whole(quiet, name)) for name in FIELDS}
    true = compute(quiet.asked, every, **counts)
    smoothed = [at for at, name in enumerate(NAMES) if "ABS" not in name]  # distinct words are not released
    assert np.abs(mine[:, smoothed] - true[:, smoothed]).max() < 0.05 * np.abs(true[:, smoothed]).max()


def test_own_documents_are_exact_unless_asked_for_as_others_see_them(noisy: Small) -> None:
    exact, seen = (noisy.seen("silo1", noised=noised) for noised in (False, True))
    assert not np.allclose(exact.scores(noisy.asked, FIELDS), seen.scores(noisy.asked, FIELDS))
    every = Pairs.all(len(noisy.asked), len(exact))
    assert (exact.errors(noisy.asked, every) == 0).all()
    assert (seen.errors(noisy.asked, every) > 0).any()
    other, again = (noisy.seen("silo2", noised=noised) for noised in (False, True))
    assert np.array_equal(other.scores(noisy.asked, FIELDS), again.scores(noisy.asked, FIELDS))


RULES = {"bm25": best_by_bm25, **PICKS}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_its_depth(noisy: Small, rule: str) -> None:
    chosen = RULES[rule](noisy.seen("silo2"), noisy.asked, 6, Streams(5)("pairs"), None)
    assert chosen.shape == (4, 6)
    assert all(len(set(row)) == 6 for row in chosen.tolist())


def test_pairs_are_chosen_by_what_was_released() -> None:
    """Another draw of noise chooses other pairs: exact counts of others play no part."""
    small = [Small(Releasing(epsilon=1.0, reader="plain"), seed) for seed in (0, 1)]
    views = [one.seen("silo2") for one in small]
    queries = small[0].asked
    picks = [best_by_bm25(view, queries, 5, Streams(0)("pairs")) for view in views]
    assert not np.array_equal(*picks)
    assert set(small[0].seen.own) == set(FIELDS)  # words of its own documents, nobody else's


@pytest.mark.parametrize("rule", RULES)
def test_banned_pairs_are_left_out(noisy: Small, rule: str) -> None:
    banned = np.zeros((4, len(noisy.seen("silo2"))), np.bool_)
    banned[:, :3] = True
    chosen = RULES[rule](noisy.seen("silo2"), noisy.asked, 50, Streams(0)("x"), banned)
    assert not np.isin(chosen[chosen >= 0], [0, 1, 2]).any()
    assert (chosen == -1).sum() == 12


def together(small: Small, holders: tuple[str, ...], kind: str = "random") -> Chosen:
    several = [(SILOS.index(holder), holder) for holder in holders]
    return gather(small.seen, small.asked, several, Streams(3), depth=5, pick=RULES[kind])


@pytest.mark.parametrize("kind", ["bm25", "random", "mixed"])
def test_a_silo_that_leaves_or_joins_costs_only_its_own_pairs(noisy: Small, kind: str) -> None:
    three, two = together(noisy, SILOS, kind), together(noisy, ("silo1", "silo3"), kind)
    left = three.take(three.holders != SILOS.index("silo2"))
    for name in Chosen.__dataclass_fields__:
        assert np.array_equal(getattr(left, name), getattr(two, name)), name
    assert len(three) - len(two) == 4 * 5


def rows(seed: int, queries: int = 6, per_query: int = 20, shift: float = 0.0) -> Letor:
    rng = np.random.default_rng(seed)
    names = [f"q{seed}-{at // per_query}" for at in range(queries * per_query)]
    table = rng.normal(size=(len(names), 4)).astype(np.float32)
    grades = (table[:, 0] + 0.5 * rng.normal(size=len(names)) > 1.0 + shift).astype(np.int32)
    return Letor.of(names, table, grades)


def silo(seed: int, cross: int = 6) -> SiloRows:
    across = replace(
        rows(seed + 100, cross, shift=1.0), queries=tuple(f"q{seed}-{at}" for at in range(cross))
    )
    return SiloRows(rows(seed), across, np.linspace(0, 2, across.rows))


QUICK = CoTraining(rounds=4, epochs=1, local_epochs=5, scaling="zscore")


def test_labels_of_every_kind() -> None:
    one = silo(1)
    scaling = fitted_scaling([one], "zscore")
    model = local_models([one], QUICK, scaling, grades=2)[0]
    ready = scaled(one, scaling)
    soft = guess(model, ready, Labelling("soft"), 2)
    assert np.allclose(soft.probabilities.sum(axis=1), 1, atol=1e-5)
    hard = guess(model, ready, Labelling("hard"), 2)
    assert np.array_equal(hard.probabilities.argmax(axis=1), soft.probabilities.argmax(axis=1))
    negatives = guess(model, ready, Labelling("negatives", confidence=0.8), 2)
    assert np.array_equal(negatives.weights > 0, soft.probabilities[:, 0] >= 0.8)
    assert (negatives.probabilities[:, 0] == 1).all()
    confident = guess(model, ready, Labelling("confident", confidence=0.8), 2)
    assert np.array_equal(confident.weights > 0, soft.probabilities.max(axis=1) >= 0.8)
    zero = guess(model, ready, Labelling("zero"), 2)
    assert (zero.probabilities[:, 0] == 1).all()
    oracle = guess(model, ready, Labelling("oracle"), 2)
    assert np.array_equal(oracle.probabilities.argmax(axis=1), one.cross.grades)
    weighed = guess(model, ready, Labelling("soft", by_noise=True), 2)
    assert np.allclose(weighed.weights, 1 / (1 + one.errors**2))
    calibrated = guess(model, ready, Labelling("soft", calibrated=True), 2)
    truth = one.cross.grades.mean()
    assert abs(calibrated.probabilities[:, 1].mean() - truth) < abs(soft.probabilities[:, 1].mean() - truth)


def test_a_shifted_rate_is_found_again() -> None:
    """Chances that are right at one rate of relevance, used where only a fifth as many are relevant."""
    rng = np.random.default_rng(0)
    rate, prior = 0.08, 0.4
    relevant = rng.random(20_000) < rate
    evidence = rng.normal(np.where(relevant, 1.5, -1.5), 1.0)
    chances = 1 / (1 + np.exp(-(3 * evidence + np.log(prior / (1 - prior)))))
    assert chances.mean() > 1.7 * rate
    moved = shifted(chances, prior)
    assert moved.mean() == pytest.approx(rate, rel=0.15)
    assert (np.diff(moved[np.argsort(chances)]) >= 0).all()


def test_refreshed_guesses_move_slowly() -> None:
    old, new = (Guesses(np.full((3, 2), v, np.float32), np.ones(3, np.float32)) for v in (0.0, 1.0))
    assert np.allclose(mixed(old, new, 0.15).probabilities, 0.15)
    assert mixed(None, new, 0.15) is new
    assert mixed(old, new, 0.0) is new


def test_training_rows_weigh_losses_as_equation_9() -> None:
    one, beta = silo(2), 0.3
    model = first_model(QUICK, fitted_scaling([one], "none"), 2)
    guesses = guess(model, one, Labelling("soft"), 2)
    lesson = joint_rows(one, guesses, beta)
    nothing = np.zeros(1, np.int64)

    def loss(features: np.ndarray, targets: np.ndarray) -> float:
        return cross_entropy(network_scores(model, features), targets, nothing)[0]

    expected = loss(one.labelled.features, np.eye(2)[one.labelled.grades])
    expected += beta * loss(one.cross.features, guesses.probabilities)
    assert lesson.weights is not None
    assert lesson.targets is not None
    each = [
        loss(lesson.features[[at]], lesson.targets[[at]]) * lesson.weights[at] for at in range(lesson.rows)
    ]
    assert np.mean(each) == pytest.approx(expected, rel=1e-5)
    assert lesson.rows == one.labelled.rows + one.cross.rows


def test_a_ramp_rises() -> None:
    ramped = Labelling(beta=0.4, ramp=(0.1, 0.3))
    assert [round(ramped.strength(done), 3) for done in (0.0, 0.1, 0.2, 0.3, 1.0)] == [0, 0, 0.2, 0.4, 0.4]
    schedule = Conductor(replace(QUICK, rounds=10, labelling=ramped), 2)._schedule()
    assert [end for end, _, _ in schedule] == [1, 2, 3, 10]
    assert [round(beta, 3) for _, beta, _ in schedule] == [0, 0, 0.2, 0.4]
    assert [anew for _, _, anew in schedule] == [True, False, False, False]


@pytest.mark.parametrize(
    "wrong", [{"kind": "sofft"}, {"beta": -1.0}, {"refresh": 2.0}, {"ramp": (0.5, 0.1)}, {"rounds": 0}]
)
def test_labellings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Labelling(**wrong)  # type: ignore[arg-type]


def by_hand(silos: list[SiloRows], config: CoTraining, lessons: list[Letor]) -> dict[str, np.ndarray]:
    """The same rounds without a federation: every silo trains, the models are averaged."""
    scaling = fitted_scaling(silos, config.scaling)
    model = averaged(local_models(silos, config, scaling, grades=2))
    local = config.local(config.epochs, silos=len(silos))
    for number in range(1, config.rounds + 1):
        model = averaged(
            [
                train_epochs(
                    model, lesson, local, Streams(config.seed)("round", number, "silo", name)
                ).parameters
                for name, lesson in zip(simulated_names(len(silos)), lessons, strict=True)
            ]
        )
    return model


def test_global_training_over_the_engine_is_what_a_loop_gives() -> None:
    silos = [silo(seed).without_cross() for seed in range(4)]
    scaling = fitted_scaling(silos, QUICK.scaling)
    expected = by_hand(silos, QUICK, [scaling(one.labelled) for one in silos])
    found = cotrain(silos, QUICK, grades=2)
    for name, array in expected.items():
        assert np.allclose(found.parameters[name], array, atol=1e-5)


def test_cs_f_ltr_over_the_engine_is_what_a_loop_gives() -> None:
    """Silos train alone, the average labels, and training goes on from it: all of it in the federation."""
    silos = [silo(seed) for seed in range(4)]
    config = replace(QUICK, labelling=Labelling("soft"))
    scaling = fitted_scaling(silos, config.scaling)
    labeller = averaged(local_models(silos, config, scaling, grades=2))
    ready = [scaled(one, scaling) for one in silos]
    lessons = [joint_rows(one, guess(labeller, one, Labelling("soft"), 2), 0.3) for one in ready]
    expected = by_hand(silos, config, list(lessons))
    found = cotrain(silos, config, grades=2)
    given = cotrain(silos, config, grades=2, start=State(0, labeller, scaling))
    for name, array in expected.items():
        assert np.allclose(found.parameters[name], array, atol=1e-4)
        assert np.allclose(given.parameters[name], array, atol=1e-4)
    assert len(found.history) == config.rounds


def test_an_anchor_draws_a_model_to_what_few_features_say() -> None:
    """λ·(what training gave) + (1 − λ)·(the average of models that see only the anchor's features)."""
    silos = [silo(seed).without_cross() for seed in range(3)]
    judged = sum(len(one.labelled) for one in silos)
    anchor = Anchor(queries=3.0 * judged, columns=(1,))
    free = cotrain(silos, QUICK, grades=2)
    found = cotrain(silos, replace(QUICK, anchor=anchor), grades=2)
    scaling = anchor.muted(free.scaling)
    plain = averaged(local_models(silos, QUICK, scaling, grades=2))
    bare = np.where(np.arange(len(plain["weight0"]))[:, None] == 1, plain["weight0"], 0)
    assert np.allclose(
        found.parameters["weight0"], 0.25 * free.parameters["weight0"] + 0.75 * bare, atol=1e-5
    )
    bias = 0.25 * free.parameters["bias0"] + 0.75 * plain["bias0"]
    assert np.allclose(found.parameters["bias0"], bias, atol=1e-5)
    held = rows(60)
    muted = scaling(held).features
    assert not muted[:, [column for column in range(held.width) if column != 1]].any()
    assert muted[:, 1].any()


def test_an_anchor_is_for_linear_models_of_grades() -> None:
    for wrong in ({"hidden": (4,)}, {"model": "lambdarank"}):
        with pytest.raises(ConfigError, match="linear"):
            CoTraining(anchor=Anchor(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Anchor(queries=-1)
    silos = [silo(seed).without_cross() for seed in range(2)]
    with pytest.raises(ConfigError, match="to stand on"):
        cotrain(silos, replace(QUICK, anchor=Anchor(columns=(99,))), grades=2)


def test_serial_updates_go_round() -> None:
    silos = [silo(seed) for seed in range(3)]
    found = cotrain(silos, replace(QUICK, updates="serial", rounds=5), grades=2)
    assert [record.asked for record in found.history] == [(f"silo-{at % 3}",) for at in range(5)]


def test_a_strategy_with_a_probe_takes_the_place_of_the_mean() -> None:
    silos = [silo(seed) for seed in range(4)]
    risky = StrategyOptions("fedrisk", risk=FedRisk(formula="georisk"))
    config = replace(QUICK, strategy=risky, labelling=Labelling("hard"))
    found = cotrain(silos, config, grades=2, held_out=HeldOut(probe=rows(77, 25)))
    assert found.history[-1].risks
    assert not np.allclose(
        found.parameters["weight0"],
        cotrain(silos, replace(config, strategy=MEAN), grades=2).parameters["weight0"],
    )


@pytest.mark.parametrize("model", ["regression", "pairwise", "listwise", "lambdarank"])
def test_other_models_learn_from_labelled_pairs_too(model: str) -> None:
    silos = [silo(seed) for seed in range(3)]
    labelling = Labelling("hard", calibrated=model != "regression", rounds=2, refresh=0.15)
    config = replace(QUICK, model=model, learning_rate=0.05, labelling=labelling)  # type: ignore[arg-type]
    found = cotrain(silos, config, grades=2)
    scores = found.ranker.score(rows(50))
    assert np.corrcoef(scores, rows(50).features[:, 0])[0, 1] > 0.5


def test_a_ranker_of_lists_labels_only_when_calibrated() -> None:
    for model in ("pairwise", "listwise", "lambdarank"):
        with pytest.raises(ConfigError, match="calibrated"):
            CoTraining(model=model, labelling=Labelling("soft"))  # type: ignore[arg-type]
    assert CoTraining(model="lambdarank", labelling=Labelling("zero")).labelling is not None


def test_a_silo_teaches_itself() -> None:
    silos = [silo(seed) for seed in range(2)]
    scaling = fitted_scaling(silos, QUICK.scaling)
    models = local_models(silos, QUICK, scaling, grades=2)
    config = replace(QUICK, labelling=Labelling("hard", rounds=2))
    taught = self_taught(models, silos, config, scaling, grades=2)
    assert not np.allclose(taught[0]["weight0"], models[0]["weight0"])
    alone = self_taught(models[:1], silos[:1], config, scaling, grades=2)
    assert np.allclose(alone[0]["weight0"], taught[0]["weight0"], atol=0.2)
