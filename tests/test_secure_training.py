"""Training under a secure sum: the plain result, nobody's model on the wire, and drop-outs at every step."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ConfigRecord, Context, Message, RecordDict
from scipy.stats import chisquare

from easy_rows import easy
from isthmus.errors import ProtocolError, RoundFailed
from isthmus.federation import apps, clients, members, rounds, runtimes
from isthmus.federation.aggregation import combine
from isthmus.federation.members import check_weights, even, flat
from isthmus.federation.messages import order, unpack
from isthmus.federation.settings import (
    FedRisk,
    Model,
    PrivateUpdates,
    Rounds,
    StrategyOptions,
)
from isthmus.federation.silo_data import silo_name
from isthmus.partition import Dealing
from isthmus.private.ledger import Ledger
from isthmus.private.secure_sum import least_threshold
from isthmus.rankers import LocalTraining
from isthmus.tables import Fold
from isthmus_reproduce.faults import Fault, FaultyConfig, afflicted, train

BELIEVED = FedRisk(formula="georisk", cap_reports=False)
FOLD = Fold("small", easy("train", 90), easy("validation", 20), easy("test", 20))


def config(**more):
    settings = {
        "dealing": Dealing(silos=6),
        "rounds": Rounds(count=3, silos=5),
        "model": Model(hidden=(6,)),
        "probe": 20,
        "strategy": StrategyOptions("fedrisk"),
        "local": LocalTraining(batch=4),
        "secure": True,
        **more,
    }
    return FaultyConfig(**settings)


def parameters(training):
    return flat(training.ranker.parameters_)


class Wire(runtimes.LocalGrid):
    """The grid with somebody listening, who may also cut the line."""

    heard: list[Message]
    cut = staticmethod(lambda message, place: False)

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        place = {node: at for at, node in enumerate(self.get_node_ids())}
        replies = [
            reply
            for reply in super().send_and_receive(messages, timeout=timeout)
            if not type(self).cut(reply, place[reply.metadata.src_node_id])
        ]
        type(self).heard.extend(replies)
        return replies


@pytest.fixture
def wire(monkeypatch):
    """Everything that reaches the server, in the order of its arrival."""

    class Own(Wire):
        pass

    Own.heard = []
    monkeypatch.setattr(runtimes, "LocalGrid", Own)
    return Own


class Models(list):
    """The silos' models, and the global one that they were trained from last."""

    start: dict


@pytest.fixture
def models(monkeypatch):
    """Every model that a silo trained, in the order of training, where there is one worker: this process."""
    found, own = Models(), clients.train_epochs

    def watched(start, *arguments, **more):
        found.start = start
        trained = own(start, *arguments, **more)
        found.append({key: array.copy() for key, array in trained.parameters.items()})
        return trained

    monkeypatch.setattr(clients, "train_epochs", watched)
    return found


# the same result


@pytest.mark.parametrize(
    "strategy",
    [
        StrategyOptions("fedrisk", risk=BELIEVED),
        # a temperature at which no weight is so large that silos insist on a smaller one
        StrategyOptions("fedrisk", risk=replace(BELIEVED, columns="quantile", temperature=0.1)),
        StrategyOptions("fedrisk", server="average", risk=replace(BELIEVED, formula="mean", memory=False)),
        StrategyOptions("fedavg"),
        StrategyOptions("fedavg", server="convex"),
        StrategyOptions("fedavgm"),
        StrategyOptions("fedprox"),
        StrategyOptions("fedopt"),
        StrategyOptions("fedadam"),
        StrategyOptions("fedyogi"),
        StrategyOptions("fedadagrad"),
        StrategyOptions("fedavg-probe"),
    ],
    ids=lambda options: f"{options.name}-{options.step}-{options.risk.columns}",
)
def test_the_result_is_the_plain_one_but_for_rounding(strategy):
    plain = LocalTraining(
        batch=4, optimiser="sgd", learning_rate=0.1
    )  # Adam blows rounding up where a gradient is 0
    told = config(strategy=strategy, rounds=Rounds(count=2, silos=5), local=plain)
    plain, secure = train(replace(told, secure=False), FOLD), train(told, FOLD)
    np.testing.assert_allclose(parameters(secure), parameters(plain), atol=2e-5)
    for one, other in zip(secure.history, plain.history, strict=True):
        assert one.weights == pytest.approx(dict(other.weights), abs=1e-5)
        assert set(one.asked) == set(other.asked)


def test_masks_are_new_every_time_and_leave_no_trace(wire):
    first, second = (train(replace(config(), workers=workers), FOLD) for workers in (1, 3))
    assert first.model_sha256 == second.model_sha256
    masked = [
        np.frombuffer(vector, np.uint64)
        for reply in wire.heard
        if reply.metadata.message_type == "query.mask"
        for vector in members.parts_of(reply).values()
    ]
    assert len(masked) == 2 * 3 * 5
    assert not set(np.concatenate(masked[:15]).tolist()) & set(np.concatenate(masked[15:]).tolist())


@pytest.mark.beyond
@pytest.mark.flaky(reruns=1, only_rerun=["Ending simulation"])  # Ray gives its processes 30 s to start
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the extra `ray` is not installed")
def test_ray_gives_the_same_result(monkeypatch, tmp_path):
    """Masked training, which needs all that open training does of a runtime, and a silo's state besides."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    told = config(rounds=Rounds(count=2, silos=5), faults=(Fault("drop", 0.2, "round"),))
    here, there = train(told, FOLD), train(replace(told, runtime="ray"), FOLD)
    assert there.model_sha256 == here.model_sha256
    assert [record.measure for record in there.history] == [record.measure for record in here.history]
    rejected = [set(record.rejected) for record in there.history]
    assert rejected == [set(record.rejected) for record in here.history]
    assert any(rejected)


def test_an_interrupted_run_goes_on_to_the_same_end(tmp_path, monkeypatch):
    whole = train(config(), FOLD)
    own = rounds.Coordinator._judged

    def stop(self, state):
        if state.round == 2:
            raise KeyboardInterrupt
        return own(self, state)

    monkeypatch.setattr(rounds.Coordinator, "_judged", stop)
    with pytest.raises(KeyboardInterrupt):
        train(config(), FOLD, out=tmp_path / "run")
    monkeypatch.undo()
    resumed = train(config(), FOLD, out=tmp_path / "run", resume=True)
    assert resumed.model_sha256 == whole.model_sha256


# nobody's model on the wire


def contents(message):
    """Every byte string and every number that a message holds."""
    for record in message.content.array_records.values():
        for array in record.values():
            yield array.data
    for record in message.content.config_records.values():
        for value in record.values():
            yield value if isinstance(value, bytes) else str(value).encode()


def test_no_message_to_the_server_holds_a_model_or_a_difference(wire, models):
    train(config(rounds=Rounds(count=1, silos=5), workers=1), FOLD)
    assert len(models) == 5
    secrets = [
        *models,
        *({key: model[key] - other[key] for key in model} for model in models for other in models),
    ]
    secrets += [{key: model[key] - models.start[key] for key in model} for model in models]
    told = [part for reply in wire.heard for part in contents(reply)]
    for array in (array.reshape(-1) for secret in secrets for array in secret.values() if array.any()):
        for kind in (np.float32, np.float64):
            for start in range(0, array.size - 1, 2):  # not even two neighbouring parameters
                piece = array[start : start + 2].astype(kind)
                assert not piece.all() or not any(piece.tobytes() in part for part in told)


def test_masked_models_look_like_noise(wire, models):
    train(config(rounds=Rounds(count=1, silos=5), workers=1), FOLD)
    masked = [
        np.frombuffer(vector, np.uint64)
        for reply in wire.heard
        if reply.metadata.message_type == "query.mask"
        for vector in members.parts_of(reply).values()
    ]
    assert len(masked) == len(models) == 5
    start = flat(models.start)
    for vector in masked:
        shown = vector.view(np.int64) * 2.0**-32
        for model in map(flat, models):
            assert abs(np.corrcoef(shown, model)[0, 1]) < 0.7, "61 numbers: five standard deviations"
            assert np.abs(shown - model).min() > 1e-3
            assert np.abs(shown - (model - start)).min() > 1e-3
    spelt = np.frombuffer(b"".join(vector.tobytes() for vector in masked), np.uint8)
    assert chisquare(np.bincount(spelt, minlength=256)).pvalue > 1e-6


def test_the_sum_that_is_opened_is_the_weighted_mean(wire, models):
    still = StrategyOptions("fedrisk", server="average")
    told = config(rounds=Rounds(count=1, silos=5, release="last"), strategy=still, workers=1)
    trained = train(told, FOLD)
    names = list(trained.history[0].asked)
    weights = dict(trained.history[0].weights)
    memory = weights.pop("memory")
    assert sorted(weights) == sorted(names)
    mean = combine(weights, dict(zip(names, models, strict=True)))
    first = train(replace(told, secure=False, local=LocalTraining(learning_rate=1e-30)), FOLD)
    expected = flat(mean) + memory * parameters(first)
    np.testing.assert_allclose(parameters(trained), expected, atol=1e-6)


def test_reports_are_small(wire):
    train(config(rounds=Rounds(count=1, silos=5)), FOLD)
    reports = [
        unpack(reply.content.array_records["report"]) for reply in wire.heard if "report" in reply.content
    ]
    assert [report["errors"].shape for report in reports] == [(20,)] * 5


# drop-outs


def cutting(step, places):
    """Lose the replies of these silos to one step."""
    kind = step if step == "train" else f"query.{step}"
    return staticmethod(lambda reply, place: place in places and reply.metadata.message_type == kind)


@pytest.mark.parametrize("step", ["agree", "train", "mask", "confirm", "reveal"])
def test_drop_outs_at_every_step_are_survived_and_named(wire, models, step):
    wire.cut = cutting(step, {1, 3})
    average = StrategyOptions("fedavg")
    seven = {"dealing": Dealing(silos=7), "rounds": Rounds(count=1, silos=7, release="last")}
    trained = train(config(strategy=average, workers=1, **seven), FOLD)
    (record,) = trained.history
    assert set(record.rejected) == {"silo-1", "silo-3"}
    asked = [name for name in record.asked if step != "agree" or name not in ("silo-1", "silo-3")]
    here = set(record.asked) if step in ("confirm", "reveal") else set(record.asked) - {"silo-1", "silo-3"}
    assert set(record.weights) == here
    whole = sum(record.weights.values())
    weights = {name: weight / whole for name, weight in record.weights.items()}
    mean = combine(weights, dict(zip(asked, models, strict=True)))
    np.testing.assert_allclose(parameters(trained), flat(mean), atol=1e-6)


@pytest.mark.parametrize("step", ["agree", "train", "mask", "confirm", "reveal"])
def test_too_few_are_a_failed_round_that_opens_nothing(wire, step, monkeypatch):
    opened = []
    monkeypatch.setattr(members.Summation, "total", lambda *a, **k: opened.append(1))
    wire.cut = cutting(step, {1, 2, 3})
    with pytest.raises(
        RoundFailed, match=f"silo-1: no answer within 600 s{'' if step == 'train' else ' at'}"
    ):
        train(config(rounds=Rounds(count=2, silos=6, attempts=2)), FOLD)
    assert not opened


def test_of_three_silos_none_may_drop_out_and_the_error_says_what_to_do(wire):
    wire.cut = cutting("mask", {1})
    three = {"dealing": Dealing(silos=3), "rounds": Rounds(count=1, silos=3, attempts=1)}
    with pytest.raises(
        RoundFailed, match=r"needs 3 of them to its end, so none may drop out: ask more silos"
    ):
        train(config(**three), FOLD)


@pytest.mark.parametrize("secure", [True, False])
def test_a_silo_that_is_late_is_not_waited_for_beyond_the_grace(secure):
    late = Fault("late", 0.17, "always", size=4.0)
    patient = Rounds(count=1, silos=6, minimum=5, grace=0.2)
    (record,) = train(config(rounds=patient, faults=(late,), secure=secure, workers=6), FOLD).history
    assert len(record.rejected) == 1, "within the deadline it would have answered"


def test_a_failed_round_can_be_skipped(wire):
    wire.cut = cutting("mask", {0, 1, 2, 3})
    told = config(rounds=Rounds(count=2, silos=6, attempts=2, failed="skip", release="last"))
    trained = train(told, FOLD)
    assert trained.rounds == 2
    assert [set(record.rejected) for record in trained.history] == [{f"silo-{at}" for at in range(4)}] * 2
    assert not any(record.weights for record in trained.history)
    assert trained.history[0].norm == trained.history[1].norm


def test_clients_that_drop_out_and_misbehave_do_not_stop_training():
    faults = (Fault("drop", 0.2, "round"), Fault("nan", 0.17, "always"))
    told = config(rounds=Rounds(count=5, silos=6, attempts=5, failed="skip"), faults=faults)
    trained = train(told, FOLD)
    assert trained.rounds == 5
    reasons = {why for record in trained.history for why in record.rejected.values()}
    assert any("dropped out" in why for why in reasons)
    assert any("not finite" in why for why in reasons)


# what it costs: bad models and liars


def test_a_huge_update_spoils_the_sum_and_nobody_can_be_blamed():
    told = config(faults=(Fault("norm", 0.2),), rounds=Rounds(count=2, silos=6))
    with pytest.raises(RoundFailed, match="whose it was cannot be told"):
        train(told, FOLD)
    skipped = train(replace(told, rounds=replace(told.rounds, failed="skip")), FOLD)
    assert all(set(record.rejected) == {"the sum"} for record in skipped.history)


def test_inverted_silos_that_report_honestly_are_kept_out_and_liars_gain_what_is_granted_to_reports():
    quick = LocalTraining(learning_rate=0.01, batch=4)
    told = config(local=quick, rounds=Rounds(count=12, silos=6), faults=(Fault("invert", 0.34),))
    lying = replace(told, faults=(Fault("lie", 0.34),))
    bare = replace(BELIEVED, memory=False)  # else the coordinator scores the sum, and refuses it
    runs = {
        "seen": train(replace(lying, secure=False), FOLD),
        "honest": train(told, FOLD),
        "lying": train(lying, FOLD),
        "lying, believed": train(replace(lying, strategy=StrategyOptions("fedrisk", risk=bare)), FOLD),
    }
    ndcg = {name: run.final["nDCG@10(empty=skip)"] for name, run in runs.items()}
    struck = [f"silo-{at}" for at in np.flatnonzero(afflicted(lying.faults[0], 0, 0, 6))]
    shares = {
        name: np.mean([sum(record.weights.get(silo, 0.0) for silo in struck) for record in run.history])
        for name, run in runs.items()
    }
    assert shares["honest"] < 0.3, "the first models say little, whoever judges them"
    assert shares["lying"] < 0.5, "two of six silos and the memory"
    assert shares["lying, believed"] > 0.8, "a third silo always has its share"
    assert ndcg["honest"] == pytest.approx(ndcg["seen"], abs=0.05)
    assert ndcg["lying"] > ndcg["lying, believed"] + 0.1


# what is refused, and what is said


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"judge": "server"}, "one of these protections"),
        ({"judge": "silos", "secure": False}, "goes with secure"),
        ({"strategy": StrategyOptions("fedmedian")}, "fedmedian: a median"),
        ({"strategy": StrategyOptions("fedtrimmedavg")}, "fedtrimmedavg: trimming"),
        ({"strategy": StrategyOptions("fedrisk", risk=FedRisk.paper())}, "paper mode"),
        ({"privacy": PrivateUpdates(where="server"), "strategy": StrategyOptions("fedavg")}, "cannot clip"),
        ({"rounds": Rounds(count=1, silos=2)}, "at least 3"),
    ],
)
def test_what_a_secure_sum_cannot_do_is_refused(more, why):
    with pytest.raises(ValueError, match=why):
        config(**more)


@pytest.mark.parametrize("name", ["scaffold", "fednova"])
def test_strategies_that_need_single_models_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"does not go with {name}"):
        config(strategy=StrategyOptions(name), local=LocalTraining(optimiser="sgd"))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (config(), "a liar is possible"),
        (config(secure=False), "sees every silo's model and scores it"),
        (config(strategy=StrategyOptions("fedavg")), "only the weighted sum"),
        (config(strategy=StrategyOptions("fedavg"), secure=False), "none from the coordinator"),
    ],
)
def test_every_record_says_which_protection_holds(told, said, tmp_path):
    trained = train(told, FOLD, out=tmp_path / "run")
    assert all(said in record.protection for record in trained.history)
    assert all(("simulated" in record.protection) == told.secure for record in trained.history)
    assert said in json.loads((tmp_path / "run" / "metrics.json").read_text())["protection"]
    assert all("no DP guarantee" in record.privacy for record in trained.history)


def test_noise_goes_under_the_mask_too():
    private = config(privacy=PrivateUpdates(clip=0.5, multiplier=0.01))
    trained = train(private, FOLD)
    assert "ε ≤" in trained.history[-1].privacy


# what the silo insists on


def test_weights_under_which_the_sum_would_speak_for_one_silo_are_refused():
    check_weights({"a": 0.5, "b": 0.25, "c": 0.25})
    check_weights(dict.fromkeys("abcdefghijklmnopqrst", 0.05))
    for weights in (
        {"a": 0.9, "b": 0.05, "c": 0.05},
        {"a": 0.5, "b": 0.5},
        {"a": 0.2, "b": -0.1, "c": 0.9},
        {"a": float("nan"), "b": 0.5, "c": 0.5},
        {"a": 0.0, "b": 0.0, "c": 0.0},
        {"a": 0.48, "b": 0.48, "c": 0.02, "d": 0.02},
        {},
    ):
        with pytest.raises(ProtocolError):
            check_weights(weights)


def test_a_silo_too_heavy_is_brought_down_to_half_and_three_are_substantial():
    levelled = even({"a": 0.7, "b": 0.06, "c": 0.04, "memory": 0.2}, "abc")
    assert levelled == pytest.approx({"a": 0.4, "b": 0.2, "c": 0.2})
    assert even({"a": 0.8, "b": 0.0, "c": 0.0}, "abc") == pytest.approx({"a": 0.4, "b": 0.2, "c": 0.2})
    assert even({"a": 0.5, "b": 0.3, "c": 0.2}, "abc") == {"a": 0.5, "b": 0.3, "c": 0.2}
    bad = even({"a": 0.4, "b": 0.4, "c": 0.03, "d": 0.0}, "abcd")
    assert bad["d"] == 0.0, "who is kept out stays so while there are three others"
    for weights in (levelled, bad):
        check_weights(weights)
        assert sum(weights.values()) == pytest.approx(0.8 if weights is levelled else 0.83)


def test_a_silo_that_insists_on_masks_shows_its_model_to_nobody(monkeypatch):
    own = runtimes._context

    def insisting(partition, partitions):
        context = own(partition, partitions)
        context.node_config["masked-only"] = True
        return context

    monkeypatch.setattr(runtimes, "_context", insisting)
    with pytest.raises(RoundFailed, match="without the other silos' cards"):
        train(config(), FOLD)
    with pytest.raises(RoundFailed, match="secure sum only"):
        train(config(secure=False), FOLD)
    keys = {f"silo-{at}": Ed25519PrivateKey.generate() for at in range(6)}
    known = {name: key.public_key() for name, key in keys.items()}
    monkeypatch.setattr(
        apps,
        "client_app",
        partial(clients.client_app, trusts=lambda c: members.Trust(keys[silo_name(c)], known)),
    )
    trained = train(config(), FOLD)
    assert trained.rounds == 3
    assert "simulated" not in trained.history[-1].protection


def agreed(names, trusts):
    """Contexts of silos that have agreed on a session, and their keys."""
    runtimes.flower.give_identity()
    contexts = {name: Context(1, at + 2, {}, RecordDict(), {}) for at, name in enumerate(names)}
    content = order(None, {"session": "00ff", "threshold": max(3, least_threshold(len(names)))}, round=1)
    adverts = {}
    for name, context in contexts.items():
        reply = members.agree(Message(content, context.node_id, "query.agree"), context, name, trusts[name])
        adverts |= members.parts_of(reply)
    return contexts, adverts


def share(contexts, adverts, name, trust):
    content = RecordDict({"secure": ConfigRecord({"session": b"\x00\xff"})})
    content["parts"] = ConfigRecord(dict(adverts))
    return members.boxes_for_peers(Message(content, 2, "train"), contexts[name], trust)


def test_silos_that_know_each_other_sum_with_nobody_else():
    keys = {name: Ed25519PrivateKey.generate() for name in ("east", "north", "west")}
    known = {name: key.public_key() for name, key in keys.items()}
    trusts = {name: members.Trust(key, known) for name, key in keys.items()}
    contexts, adverts = agreed(keys, trusts)
    assert set(share(contexts, adverts, "north", trusts["north"])) == {"east", "west"}

    strangers = {**trusts, "west": members.Trust()}
    contexts, adverts = agreed(keys, strangers)
    with pytest.raises(ProtocolError, match="not signed"):
        share(contexts, adverts, "north", trusts["north"])
    contexts, adverts = agreed([*keys, "invented"], {**trusts, "invented": members.Trust()})
    with pytest.raises(ProtocolError, match="does not know"):
        share(contexts, adverts, "north", trusts["north"])


def test_a_model_that_comes_late_does_not_slip_into_another_session():
    contexts, _ = agreed(["east"], {"east": members.Trust()})
    members.keep_model(contexts["east"], b"\x00\xff", {"w": np.ones(2)})
    members.keep_model(contexts["east"], b"before", {"w": np.zeros(2)})
    np.testing.assert_array_equal(members.kept_model(contexts["east"], b"\x00\xff")["w"], 1)
    with pytest.raises(ProtocolError, match="no trained model"):
        members.kept_model(contexts["east"], b"after")


# ledgers


def test_everything_that_leaves_a_silo_is_in_its_ledger(tmp_path):
    train(config(rounds=Rounds(count=2, silos=6), ledgers=tmp_path), FOLD)
    assert sorted(path.name for path in tmp_path.glob("*.ledger")) == [f"silo-{at}.ledger" for at in range(6)]
    with Ledger(tmp_path / "silo-4.ledger") as ledger:
        left = list(ledger.departures())
    assert [entry["kind"] for entry in left] == [
        "sums",
        *["probe report", "model update"] * 2,
    ]
    assert all(entry["epsilon"] is None for entry in left)
    assert "masked: only a sum over 6 silos" in left[2]["note"]


def test_plain_updates_are_in_the_ledger_with_their_epsilon(tmp_path):
    noisy = PrivateUpdates(clip=0.5, multiplier=5.0)
    train(config(secure=False, privacy=noisy, rounds=Rounds(count=1, silos=6), ledgers=tmp_path), FOLD)
    with Ledger(tmp_path / "silo-0.ledger") as ledger:
        left = list(ledger.departures())
    assert [entry["kind"] for entry in left] == ["sums", "model update"]
    assert left[1]["epsilon"] > 0
    assert "seen by the coordinator" in left[1]["note"]


def test_the_relay_leaves_the_orders_of_a_round_as_they_are(monkeypatch):
    original, changed = members.SecureSumRelay.reports, []

    def reports(self, attempt, orders, limits):
        before = [list(order.content) for order in orders]
        checked = original(self, attempt, orders, limits)
        changed.append(before != [list(order.content) for order in orders])
        return checked

    monkeypatch.setattr(members.SecureSumRelay, "reports", reports)
    train(config(rounds=Rounds(count=1, silos=5)), FOLD)
    assert changed == [False]


@pytest.mark.parametrize(("secure", "shown"), [(True, "not its model"), (False, "its whole model")])
def test_a_round_says_what_it_shows_of_a_silo(secure, shown, caplog):
    with caplog.at_level("DEBUG", "isthmus.asking"):
        train(config(secure=secure, rounds=Rounds(count=1, silos=5)), FOLD)
    *_, last = [record.shows for record in caplog.records]
    assert shown in last
