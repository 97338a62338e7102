"""Training runs: the same result however they are run, whatever fails, and after an interruption."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace

import numpy as np
import pytest

from easy_rows import easy
from isthmus.config import load, to_toml
from isthmus.corpora import load_folds
from isthmus.errors import ConfigError, DataError, RoundFailed
from isthmus.evaluation import evaluate
from isthmus.federation import apps
from isthmus.federation.apps import held_back
from isthmus.federation.checkpoints import RunFolder
from isthmus.federation.flower import Message, MessageType, give_identity
from isthmus.federation.judge import Judge
from isthmus.federation.messages import ReplyLimits, answer, arrays_of, check, metric, order, with_update
from isthmus.federation.rounds import Coordinator
from isthmus.federation.settings import (
    Config,
    FedRisk,
    Model,
    PrivateUpdates,
    Rounds,
    StrategyOptions,
)
from isthmus.partition import Dealing
from isthmus.rankers import MLP, LocalTraining, Scaling, load_ranker, scores_of
from isthmus.tables import Fold, write_letor
from isthmus_reproduce.faults import Fault, FaultyConfig, afflicted, train

FOLD = Fold("small", easy("train", 90), easy("validation", 20), easy("test", 20))


def config(**more):
    settings = {
        "dealing": Dealing(silos=6),
        "rounds": Rounds(count=4, silos=3),
        "model": Model(hidden=(6,)),
        "probe": 20,
        "strategy": StrategyOptions("fedrisk"),
        "local": LocalTraining(batch=4),
        **more,
    }
    return FaultyConfig(**settings)


def facts(training):
    """Everything about a run but how long it took."""
    return (
        training.model_sha256,
        training.final,
        [replace(record, seconds=0.0) for record in training.history],
    )


def test_training_learns():
    quick, still = LocalTraining(learning_rate=0.01), LocalTraining(learning_rate=1e-9)
    trained = train(config(rounds=Rounds(count=25, silos=4), local=quick), FOLD)
    untrained = train(config(rounds=Rounds(count=1, silos=4), local=still), FOLD)
    assert trained.final["nDCG@10(empty=skip)"] > untrained.final["nDCG@10(empty=skip)"] + 0.05
    assert trained.rounds == 25
    assert all(0 < record.measure < 1 for record in trained.history)


@pytest.mark.parametrize("name", ["fedavg", "fedavgm", "fedmedian", "fedavg-probe", "fedrisk"])
def test_the_number_of_workers_does_not_matter(name):
    told = config(strategy=StrategyOptions(name))
    one, two, five = (facts(train(replace(told, workers=workers), FOLD)) for workers in (1, 2, 5))
    assert one == two == five


def test_the_seed_matters_and_global_generators_do_not():
    before = random.getstate()
    first = facts(train(config(), FOLD))
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert facts(train(config(), FOLD)) == first
    assert facts(train(config(seed=1), FOLD))[0] != first[0]
    random.setstate(before)


@pytest.mark.parametrize("name", ["scaffold", "fednova"])
def test_strategies_that_need_plain_local_steps(name):
    plain = LocalTraining(optimiser="sgd", learning_rate=0.1)
    trained = train(config(strategy=StrategyOptions(name), local=plain), FOLD)
    assert trained.rounds == 4
    with pytest.raises(ValueError, match="sgd"):
        config(strategy=StrategyOptions(name), local=LocalTraining(optimiser="adam"))


def test_a_proximal_term_holds_silos_back():
    free = train(config(strategy=StrategyOptions("fedprox", proximal=1e-12)), FOLD)
    plain = train(config(strategy=StrategyOptions("fedavg")), FOLD)
    held = train(config(strategy=StrategyOptions("fedprox", proximal=100.0)), FOLD)
    assert free.history[-1].norm == pytest.approx(plain.history[-1].norm, rel=1e-4)
    assert held.model_sha256 != plain.model_sha256


# what the coordinator holds


def test_the_probe_is_judged_and_held_back_from_silos():
    fold, probe = held_back(FOLD, config())
    assert len(probe) == 20
    assert not set(probe.queries) & set(fold.train.queries)
    assert len(fold.train) + len(probe) == len(FOLD.train)
    assert all(probe[query].grades.max() > 0 for query in probe.queries)
    assert held_back(FOLD, config(strategy=StrategyOptions("fedavg")))[1] is None


def test_a_fold_without_validation_gets_one():
    fold, _ = held_back(replace(FOLD, validation=FOLD.validation[:0]), config())
    assert len(fold.validation) == (90 - 20) // 5
    assert not set(fold.validation.queries) & set(fold.train.queries)


def test_a_probe_from_a_file(tmp_path):
    write_letor(FOLD.test, tmp_path / "probe.txt")
    fold, probe = held_back(FOLD, config(probe=tmp_path / "probe.txt"))
    assert len(fold.train) == len(FOLD.train)
    assert len(probe) == len(FOLD.test)


def test_too_large_a_probe_is_refused():
    with pytest.raises(DataError, match="held back"):
        train(config(probe=200), FOLD)


def test_fedrisk_without_a_probe_is_refused():
    with pytest.raises(ValueError, match="needs a probe"):
        config(probe=None)


def test_a_loss_over_lists_is_refused_where_queries_are_torn():
    with pytest.raises(ConfigError, match="tears queries"):
        train(config(dealing=Dealing("iid", silos=6)), FOLD)


def test_the_judge_agrees_with_the_evaluation():
    trained = train(config(), FOLD)
    scaled = trained.ranker.scaling_(FOLD.test)
    judged = Judge(scaled).measure(trained.ranker.parameters_)
    measured = evaluate(FOLD.test.qrels(), trained.ranker.rank(FOLD.test), ["nDCG@10(empty=skip)"])
    assert judged == pytest.approx(measured["nDCG@10(empty=skip)"], abs=1e-12)


def test_scaling_is_fitted_from_the_silos_sums():
    trained = train(
        config(model=Model(hidden=(), scaling="zscore"), strategy=StrategyOptions("fedavg")), FOLD
    )
    central = Scaling.of("zscore", FOLD.train)
    np.testing.assert_allclose(trained.ranker.scaling_.mean, central.mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trained.ranker.scaling_.factor, central.factor, rtol=1e-5)


# stopping and releasing


def test_early_stopping_says_so():
    slow = LocalTraining(learning_rate=1e-12)
    trained = train(config(rounds=Rounds(count=50, silos=3, patience=3), local=slow), FOLD)
    assert trained.rounds == 4
    assert "not improved for 3 rounds" in trained.stopped


def test_the_best_and_the_average_model_can_be_released():
    quick = LocalTraining(learning_rate=0.05)
    runs = {
        release: train(config(rounds=Rounds(count=8, silos=3, release=release), local=quick), FOLD)
        for release in ("last", "best", "polyak")
    }
    assert runs["last"].model_sha256 != runs["polyak"].model_sha256
    assert runs["last"].history[-1].norm == runs["polyak"].history[-1].norm, "training itself is the same"
    best = runs["best"]
    judged = Judge(best.ranker.scaling_(FOLD.validation)).measure(best.ranker.parameters_)
    assert judged == max(record.measure for record in best.history)


# failures


def struck(fault, number, at=0, seed=0, silos=6):
    names = [f"silo-{place}" for place in range(silos)]
    return {
        name for name, hit in zip(names, afflicted(fault, at, seed, silos, round=number), strict=True) if hit
    }


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("drop", "dropped out"),
        ("nan", "not finite"),
        ("shape", "where the model has"),
        ("norm", "update of length"),
    ],
)
def test_an_offender_is_named_and_the_round_goes_on(kind, why):
    fault = Fault(kind, 0.34, "round")
    trained = train(config(faults=(fault,), rounds=Rounds(count=6, silos=4)), FOLD)
    seen = 0
    for record in trained.history:
        if record.attempts > 1:
            continue
        bad = struck(fault, record.round) & set(record.asked)
        assert set(record.rejected) == bad
        assert all(why in reason for reason in record.rejected.values())
        assert not bad & set(record.weights)
        seen += len(bad)
    assert seen


def test_a_lie_about_the_example_count_is_capped_and_named():
    fault = Fault("count", 0.34, size=1e6)
    trained = train(
        config(faults=(fault,), strategy=StrategyOptions("fedavg"), rounds=Rounds(count=3, silos=6)), FOLD
    )
    liars = struck(fault, 1)
    assert len(liars) == 2
    for record in trained.history:
        assert set(record.capped) == liars
        assert not record.rejected
        assert max(record.weights.values()) < 0.3


def test_honest_silos_of_very_different_sizes_are_not_cut():
    sizes = {f"silo-{at}": size for at, size in enumerate([1] * 11 + [13, 42, 51, 55, 60, 70, 76, 80, 87])}
    limits = ReplyLimits(counts=sizes)
    assert all(limits.examples(silo, size) == size for silo, size in sizes.items())
    assert limits.examples("silo-0", 10**9) == 1, "no more than it declared"
    liars = dict.fromkeys([f"silo-{at}" for at in range(6)], 10**9)
    assert ReplyLimits(counts=sizes | liars).examples("silo-0", 10**9) <= 870


def test_a_late_silo_misses_the_round():
    fault = Fault("late", 0.2, size=1.5)
    (late,) = struck(fault, 1)
    rounds = Rounds(count=1, silos=6, deadline=0.7)
    trained = train(config(faults=(fault,), rounds=rounds, workers=6), FOLD)
    assert trained.history[0].rejected == {late: "no answer within 0.7 s"}


def test_too_few_answers_are_tried_again_and_then_told():
    everyone = (Fault("drop", 1.0),)
    with pytest.raises(RoundFailed) as failed:
        train(config(faults=everyone), FOLD)
    assert failed.value.round == 1
    assert len(failed.value.silos) > 3, "other silos were tried"
    half = (Fault("drop", 0.5, "round"),)
    trained = train(config(faults=half, rounds=Rounds(count=12, silos=3, minimum=2, attempts=50)), FOLD)
    assert max(record.attempts for record in trained.history) > 1


def test_thirty_per_cent_drop_out_and_a_fifth_send_rubbish():
    faults = (Fault("drop", 0.3, "round"), Fault("nan", 0.1, "round"), Fault("shape", 0.1, "round"))
    trained = train(config(faults=faults, dealing=Dealing(silos=12), rounds=Rounds(count=15, silos=6)), FOLD)
    assert trained.rounds == 15
    reasons = " ".join(reason for record in trained.history for reason in record.rejected.values())
    assert all(word in reasons for word in ("dropped out", "not finite", "where the model has"))


def test_inverted_grades_hardly_weigh_under_fedrisk():
    fault = Fault("invert", 0.34)
    liars = struck(fault, 0)
    told = config(
        faults=(fault,),
        local=LocalTraining(learning_rate=0.02, epochs=3, batch=4),
        rounds=Rounds(count=2, silos=6),
    )
    risky, plain = train(told, FOLD), train(replace(told, strategy=StrategyOptions("fedavg")), FOLD)
    assert all(sum(record.weights[silo] for silo in liars) < 0.05 for record in risky.history)
    assert risky.history[-1].measure > plain.history[-1].measure


@pytest.mark.parametrize("secure", [False, True])
def test_rounds_of_bad_silos_only_cost_little_however_many(secure):
    fold = Fold("small", easy("train", 200), easy("validation", 20), easy("test", 60))
    local = LocalTraining(learning_rate=0.01, batch=4)
    lost, refused = [], 0
    for seed in range(2):
        rounds = Rounds(count=15, silos=4, release="last")
        told = config(rounds=rounds, local=local, seed=seed, probe=60, secure=secure, workers=1)
        good, bad = [], []
        train(told, fold, watch=good.append)
        refused += sum(bool(record.refused) for record in good[-1].history)
        every = Fault("lie" if secure else "invert", 1.0)
        told = replace(told, rounds=replace(rounds, count=35), faults=(every,))
        train(told, fold, start=good[-1], watch=bad.append)
        measure = Judge(good[0].scaling(fold.test)).measure
        lost.append([measure(good[-1].parameters) - measure(bad[at].parameters) for at in (4, 19)])
        record = next(record for record in bad[-1].history if record.refused)
        assert set(record.rejected) == set(record.asked)
    five, twenty = np.mean(lost, axis=0)
    assert five < 0.03
    assert twenty < 0.03
    assert refused <= 1, "of 30 honest rounds"


def test_disorder_is_the_weighted_share_of_wrong_pairs():
    table = easy("some", 12)
    judge = Judge(table)
    ranker = MLP((4,), seed=3, training=LocalTraining(epochs=1)).fit(table)
    model, table = ranker.parameters_, judge.table
    scores, gains = scores_of(model, table), 2.0**table.grades - 1
    for query, share in enumerate(judge.disorder(model)):
        rows = slice(table.offsets[query], table.offsets[query + 1])
        better = np.maximum(gains[rows][:, None] - gains[rows], 0)
        wrong = scores[rows][:, None] < scores[rows]
        assert share == pytest.approx((better * wrong).sum() / better.sum())


# private updates


@pytest.mark.parametrize(("where", "name"), [("silo", "fedrisk"), ("server", "fedavgm")])
def test_private_updates_train_and_are_accounted_for(where, name):
    privacy = PrivateUpdates(clip=0.5, multiplier=0.01, where=where)
    told = config(privacy=privacy, strategy=StrategyOptions(name), rounds=Rounds(count=3, silos=6))
    first, second = train(told, FOLD), train(told, FOLD)
    assert first.model_sha256 != second.model_sha256, "live noise is never the same"
    assert not any(record.rejected for record in first.history)
    costs = [float(record.privacy.split("ε ≤ ")[1].split(" at")[0]) for record in first.history]
    assert costs[0] < costs[1] < costs[2]
    if where == "server":
        np.testing.assert_allclose(list(first.history[0].weights.values()), 1 / 6)


def test_updates_are_clipped_before_they_leave():
    tight = PrivateUpdates(clip=1e-3, multiplier=1e-3)
    quick = LocalTraining(learning_rate=0.1, batch=4)
    told = config(local=quick, strategy=StrategyOptions("fedavg"), rounds=Rounds(count=1, silos=6))
    free, held = train(told, FOLD), train(replace(told, privacy=tight), FOLD)
    assert 1 - free.history[0].cosine > 1e-4
    assert 1 - held.history[0].cosine < 1e-6


# paper mode

PAPER = {
    "local": LocalTraining(loss="cross_entropy", optimiser="sgd", learning_rate=0.01, batch=16),
    "dealing": Dealing("dirichlet-pair", silos=6, concentration=1.0, least=1),
    "probe": None,
}


def paper(rounds=5, model=Model(hidden=(), scoring="argmax"), **more):  # noqa: B008
    options = StrategyOptions("fedrisk", risk=FedRisk.paper(**more))
    return config(**PAPER, strategy=options, model=model, rounds=Rounds(count=rounds, silos=4))


def test_paper_mode_warns_once_of_every_fault(caplog):
    with caplog.at_level(logging.WARNING):
        train(paper(rounds=2), FOLD)
    told = [line for line in caplog.messages if "known fault" in line]
    assert len(told) == 7
    assert sum("A3" in line for line in told) == 1


def test_paper_mode_doubles_the_parameters_of_silos_that_stand_still():
    still = replace(PAPER["local"], learning_rate=1e-30)
    told = replace(paper(rounds=6, formula="none"), local=still)
    lengths = [record.norm for record in train(told, FOLD).history]
    np.testing.assert_allclose(np.divide(lengths[1:], lengths[:-1]), 2.0, rtol=1e-5)


def test_paper_mode_freezes_a_linear_model():
    cosines = [record.cosine for record in train(paper(rounds=25, formula="none"), FOLD).history]
    assert cosines[0] < 0.9999
    assert 1 - cosines[-1] < 1e-9


def test_paper_mode_overflows_a_hidden_layer_and_says_why():
    trained = train(paper(rounds=150, model=Model(hidden=(6,), scoring="argmax")), FOLD)
    assert trained.rounds < 140
    assert "not finite" in trained.stopped
    assert "2-fold" in trained.stopped
    assert trained.history[-1].norm is None
    assert np.isfinite(list(trained.final.values())).all(), "the model before is released"


# folders and resuming


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("name", ["fedrisk", "fedadam", "scaffold"])
@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_run_ends_bit_identical(tmp_path, monkeypatch, name, after):
    local = LocalTraining(optimiser="sgd", learning_rate=0.1)
    told = config(
        strategy=StrategyOptions(name), local=local, rounds=Rounds(count=5, silos=3, release="polyak")
    )
    whole = train(told, FOLD, out=tmp_path / "whole")
    save, saved = RunFolder.save, []

    def failing(self, state, config):
        save(self, state, config)
        saved.append(state)
        if len(saved) == after:
            raise Interrupted

    monkeypatch.setattr(RunFolder, "save", failing)
    with pytest.raises(Interrupted):
        train(told, FOLD, out=tmp_path / "cut")
    monkeypatch.undo()
    asked = []
    original = Coordinator._round
    monkeypatch.setattr(
        Coordinator, "_round", lambda self, state: asked.append(state.round) or original(self, state)
    )
    rest = train(told, FOLD, out=tmp_path / "cut", resume=True)
    assert asked == list(range(after, 5)), "no round is trained twice"
    assert facts(rest) == facts(whole)
    assert (tmp_path / "cut" / "model").read_bytes() == (tmp_path / "whole" / "model").read_bytes()


def test_a_run_folder_is_begun_before_data_are_loaded(tmp_path, monkeypatch):
    def broken(config):
        raise DataError("no such data")

    monkeypatch.setattr(apps, "load_fold", broken)
    with pytest.raises(DataError):
        train(config(data="nowhere"), out=tmp_path / "run")
    assert RunFolder(tmp_path / "run").config(FaultyConfig) == config(data="nowhere")
    monkeypatch.undo()
    again = train(config(data="nowhere"), FOLD, out=tmp_path / "run", resume=True)
    assert facts(again) == facts(train(config(data="nowhere"), FOLD)), "without a checkpoint it starts over"


def test_what_a_run_folder_holds(tmp_path):
    trained = train(config(), FOLD, out=tmp_path / "run")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["final"] == trained.final
    rounds = json.loads((tmp_path / "run" / "rounds.json").read_text())
    assert [record["round"] for record in rounds] == [1, 2, 3, 4]
    assert all(record["privacy"] == "no DP guarantee" for record in rounds)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert set(environment["data"]) == {"train", "validation", "test", "probe"}
    np.testing.assert_array_equal(
        load_ranker(tmp_path / "run" / "model").score(FOLD.test), trained.ranker.score(FOLD.test)
    )


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    train(config(), FOLD, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="another configuration"):
        train(config(seed=1), FOLD, out=tmp_path / "run")


def test_a_damaged_checkpoint_is_told(tmp_path):
    train(config(), FOLD, out=tmp_path / "run")
    (tmp_path / "run" / "checkpoint").write_bytes(b"PK\x03\x04 rubbish")
    with pytest.raises(DataError, match="checkpoint"):
        train(config(), FOLD, out=tmp_path / "run", resume=True)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = train(config(), FOLD, out=tmp_path / "run")
    assert facts(train(config(), FOLD, out=tmp_path / "run", resume=True)) == facts(first)


# what it is worth


@pytest.mark.realdata
def test_mq2008_federated_beside_central_and_under_attack(data_dir, monkeypatch):
    monkeypatch.setenv("ISTHMUS_DATA", str(data_dir))
    told = FaultyConfig(
        data="mq2008",
        dealing=Dealing("dirichlet-query", silos=20, concentration=0.3),
        rounds=Rounds(count=60, silos=5),
        measures=("nDCG@10(empty=skip)",),
    )
    fold = load_folds("mq2008")[0]
    central = MLP().fit(fold.train, validation=fold.validation)
    (best,) = evaluate(fold.test.qrels(), central.rank(fold.test), told.measures).means.values()
    (shared,) = train(told, fold).final.values()
    (attacked,) = train(replace(told, faults=(Fault("invert", 0.3),)), fold).final.values()
    assert shared > 0.97 * best
    assert attacked > 0.95 * best


def test_synthetic_default_is_far_above_chance():
    trained = train(Config(data="synthetic", rounds=Rounds(count=30), measures=("nDCG@10(empty=skip)",)))
    assert trained.final["nDCG@10(empty=skip)"] > 0.45, "a random ranker has 0.24, a central one 0.54"


def test_the_old_name_of_a_runtime_is_refused_and_the_error_names_the_present_one():
    with pytest.raises(ConfigError, match="engine is no longer a key: it is called runtime now"):
        load(Config, {"engine": "ray"})
    with pytest.raises(ConfigError, match="known:") as unknown:
        load(Config, {"zzzzzzzz": 1})
    assert "engine" not in str(unknown.value)


def test_a_run_folder_of_the_previous_release_resumes(tmp_path):
    settings = Config(dealing=Dealing(silos=6), rounds=Rounds(count=2, silos=3), model=Model(hidden=(6,)))
    first = apps.train(settings, FOLD, out=tmp_path)
    file = tmp_path / "config.toml"
    file.write_text("faults = []\n" + file.read_text())
    saved = RunFolder(tmp_path).config()
    assert to_toml(saved) == to_toml(settings)
    assert facts(apps.train(saved, FOLD, out=tmp_path, resume=True)) == facts(first)


def test_faults_in_a_configuration_name_the_place_where_they_are_given_now():
    with pytest.raises(ConfigError, match=r"faults is no longer a key.*isthmus_reproduce\.faults"):
        load(Config, {"faults": [{"kind": "invert"}]})
    assert load(FaultyConfig, {"faults": [{"kind": "invert"}]}).faults == (Fault("invert"),)


def test_checking_replies_leaves_them_as_they_are():
    give_identity()
    model = {"w": np.zeros(2, np.float32)}
    sent = Message(order(None, {}), 7, MessageType.TRAIN)
    reply = answer(sent, {"num-examples": 50, "steps": 1, "loss": 0.1}, arrays=model, more=model)
    limits = ReplyLimits(counts={"a": 5})
    checked = check([reply], {7: "a"}, limits, deadline=1.0, shows="its model", model=model)
    (usable,) = checked.usable
    other = with_update(usable, {"w": np.ones(2, np.float32)}, examples=1)
    assert [metric(each, "num-examples") for each in (reply, usable, other)] == [50, 5, 1]
    assert ["more" in each.content for each in (reply, usable)] == [True, False]
    assert [arrays_of(each)["w"][0] for each in (reply, usable, other)] == [0, 0, 1]
    assert usable.metadata.src_node_id == reply.metadata.src_node_id == 7


# what follows from the data, and what was so before it did


FORMER = FedRisk(formula="georisk", errors="ndcg", temperature=0.03, past=0.0)


@pytest.mark.parametrize(
    ("secure", "ndcg", "norm"),
    [(False, 0.5647754838943638, 3.4632758200426057), (True, 0.5604701007258114, 3.4633035300490502)],
)
def test_former_settings_give_the_former_model(secure, ndcg, norm):
    """As release 0.1 trained with its defaults: 40 probe queries were a number, as 20 are here."""
    former = Config(
        dealing=Dealing(silos=6),
        rounds=Rounds(count=4, silos=3),
        model=Model(hidden=(6,)),
        probe=20,
        secure=secure,
        strategy=StrategyOptions(momentum=0.9, risk=FORMER),
    )
    trained = apps.train(former, FOLD)
    assert trained.final["nDCG@10"] == pytest.approx(ndcg, abs=1e-6)
    # processors multiply matrices in different orders: the sixth digit is theirs
    assert trained.history[-1].norm == pytest.approx(norm, rel=1e-5)


def test_the_probe_is_the_validation_queries_unless_a_number_is_given():
    fold, probe = held_back(FOLD, Config())
    assert len(fold.train) == len(FOLD.train), "it costs no training query"
    relevant = {query for query in FOLD.validation.queries if FOLD.validation[query].grades.max() > 0}
    assert set(probe.queries) == relevant
    many = replace(FOLD, validation=easy("validation", 90))
    assert len(held_back(many, Config())[1]) == apps.PROBE


def test_a_small_validation_part_is_filled_up_from_the_training_queries():
    fold, probe = held_back(replace(FOLD, validation=FOLD.validation[:3]), Config())
    assert len(probe) == apps.FEW
    assert len(fold.train) == len(FOLD.train) - 7
    assert not set(probe.queries) & set(fold.train.queries)
    fold, probe = held_back(replace(FOLD, train=FOLD.train[:10], validation=FOLD.validation[:3]), Config())
    assert (len(fold.train), len(probe)) == (8, 5), "a fifth of ten at most"


def test_silos_follow_from_the_queries_unless_given():
    def silos(queries, **more):
        sizes = apps.sized(Config(**more), easy("train", queries), FOLD.test)
        return sizes.dealing.silos, sizes.rounds.silos

    assert [silos(queries) for queries in (3, 23, 90)] == [(1, 1), (5, 5), (20, 10)]
    assert silos(23, rounds=Rounds(silos=8)) == (8, 8)
    assert silos(5, secure=True) == (3, 3)
    assert silos(90, dealing=Dealing(silos=7)) == (7, 7)


def test_a_run_s_folder_says_what_followed_from_the_data(tmp_path):
    settings = Config(rounds=Rounds(count=1), model=Model(hidden=(6,)))
    apps.train(settings, FOLD, out=tmp_path)
    record = json.loads((tmp_path / "environment.json").read_text())
    assert record["server momentum"] == pytest.approx(0.9 * 50 / 110)
    assert (record["silos"], record["silos a round"], record["queries"]["probe"]) == (20, 10, 19)
    assert apps.train(settings, FOLD, out=tmp_path, resume=True).rounds == 1


def test_no_relevant_document_is_told_in_one_line():
    nothing = replace(FOLD.train, grades=np.zeros_like(FOLD.train.grades))
    with pytest.raises(DataError, match="none of 90 training queries has a relevant document"):
        train(config(strategy=StrategyOptions("fedavg")), replace(FOLD, train=nothing))
