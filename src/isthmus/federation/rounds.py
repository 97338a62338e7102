"""The rounds of federated training: sample silos, check and weigh their updates, average, step, evaluate.

`Coordinator._round` runs one round. It calls `_outcome` for the weighted mean of the silos' models, which is
computed by `_open`, where the coordinator sees every model, or by `_masked`, where it sees reports and one
sum. Then the server takes its step, which FedRisk's probe may refuse.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.asking import TooFew
from isthmus.config import to_mapping
from isthmus.errors import RoundFailed
from isthmus.federation import aggregation, flower, messages
from isthmus.federation.aggregation import MEMORY, PROBE, Arrays, Errors, Size, Sizes, Weighed, norm
from isthmus.federation.clients import QUANTILES, examples
from isthmus.federation.judge import Judge
from isthmus.federation.members import SUM, SecureSumRelay, even, sum_to_mean
from isthmus.federation.messages import NOT_FINITE, Checked, ReplyLimits, check
from isthmus.federation.noise import private, statement
from isthmus.federation.registration import Registration
from isthmus.federation.settings import PER_ROUND, WATCHED, Config
from isthmus.private.ledger import NO_GUARANTEE
from isthmus.randomness import Streams
from isthmus.rankers import Scaling, initial_parameters, train_epochs
from isthmus.report import Progress
from isthmus.tables import Letor

logger = logging.getLogger(__name__)

FEW = 5
"""Number of judged probe queries below which a warning is logged."""
WAITED_FOR = 100
"""Number of silos to wait for, up to the deadline, if the configuration does not give one."""
BEST = "restraint/best"
"""Key of the best model's probe errors in the server's state."""
SIMULATED = " (simulated: silos without identities)"
_POLYAK = 3
"""p in the averaging weight of round t, (p + 1)/(t + p): later rounds count more (Shamir & Zhang 2013)."""


@dataclass(frozen=True)
class RoundRecord:
    """The record of a round: silos, weights, refusals and measures; `rounds.json` has these fields."""

    round: int
    asked: tuple[str, ...] = ()
    """The silos sampled; a silo sampled in two attempts appears twice."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Reasons why answers were not used, by silo."""
    capped: Mapping[str, str] = field(default_factory=dict)
    """Silos that claimed more examples than were counted, with both numbers."""
    weights: Mapping[str, float] = field(default_factory=dict)
    risks: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    """Reason why the probe refused the round; empty if it did not."""
    loss: float | None = None
    """Mean local loss of the usable answers."""
    norm: float | None = 0.0
    """Length ‖θ‖ of the global model; None if it is not finite."""
    cosine: float | None = 1.0
    """Cosine between the global model and the previous one."""
    measure: float | None = None
    """nDCG@10(empty=skip) on validation; of the average over rounds if that is the model to be released."""
    attempts: int = 1
    privacy: str = NO_GUARANTEE
    """Statement of the ε of the updates so far, in words."""
    protection: str = ""
    """Statement of who can see which data, in words."""
    seconds: float = 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return asdict(self)

    def measures(self) -> dict[str, float | None]:
        """Return the round's measures by name, for trackers; weights and risks have a name for each silo."""
        by_silo = {"weight": self.weights, "risk": self.risks}
        return {
            f"validation/{WATCHED}": self.measure,
            "train/loss": self.loss,
            "model/norm": self.norm,
            "model/cosine": self.cosine,
            "round/rejected": len(self.rejected),
            "round/attempts": self.attempts,
            "round/seconds": self.seconds,
            **{f"{name}/{silo}": value for name, table in by_silo.items() for silo, value in table.items()},
        }


@dataclass(frozen=True)
class State:
    """The state of training after a round, complete enough to resume from."""

    round: int
    parameters: Arrays
    scaling: Scaling
    strategy: Arrays = field(default_factory=dict)
    average: Arrays = field(default_factory=dict)
    best: Arrays = field(default_factory=dict)
    history: tuple[RoundRecord, ...] = ()
    stopped: str = ""
    """Reason why training ended before its last round; empty if it did not."""

    def released(self, release: str) -> Arrays:
        """Return the model to save: the `last`, the `best` on validation, or the `polyak` average."""
        chosen = {"last": self.parameters, "best": self.best, "polyak": self.average}[release]
        return chosen or self.parameters

    @property
    def best_measure(self) -> float:
        """The best validation measure so far."""
        return max((record.measure for record in self.history if record.measure is not None), default=-1.0)

    @property
    def rounds_without_gain(self) -> int:
        """Number of rounds since the best validation measure was first reached."""
        measures = [record.measure for record in self.history]
        return len(measures) - 1 - measures.index(self.best_measure) if self.best_measure >= 0 else 0


@dataclass(frozen=True)
class HeldOut:
    """The coordinator's own rows, unscaled, on which no silo trains: for validation, and as the probe."""

    validation: Letor | None = None
    probe: Letor | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of a round: the usable answers, their weights, and the mean of the models."""

    checked: Checked
    weighed: Weighed = field(default_factory=Weighed)
    mean: Arrays = field(default_factory=dict)
    memory: Arrays = field(default_factory=dict)
    """The server's state from round to round, such as accumulated risks."""
    sampled: tuple[str, ...] = ()
    attempts: int = 1


class Coordinator:
    """The server's side of training over a grid."""

    def __init__(self, config: Config, held_out: HeldOut, grid: flower.Grid) -> None:
        self.config, self.held_out, self.grid = config, held_out, grid
        self.streams = Streams(config.seed)
        self.registration = Registration(config.model.scaling, config.rounds)
        self.judge: Judge | None = None
        self.probe: Judge | None = None
        self._probe_rows: Letor | None = None
        self.extras: dict[str, flower.ArrayRecord] = {}
        """Records that every order to train contains besides the model."""
        settings = {"seed": config.seed, "privacy": self._silo_noise()}
        self.relay = SecureSumRelay(grid, config.rounds, settings=settings) if config.secure else None

    def run(self, state: State | None, remember: Callable[[State], None]) -> State:
        """Train from `state`, or from the beginning if None; `remember` gets the state after every round."""
        state = self._prepared(state)
        rounds = self.config.rounds
        with Progress("training", rounds.count) as bar:
            bar.advance(state.round)
            while state.round < rounds.count and not state.stopped:
                state = self._judged(self._round(state))
                remember(state)
                measure = state.history[-1].measure
                bar.advance(note="" if measure is None else f"{WATCHED} {measure:.4f}")
        return state

    def _prepared(self, state: State | None) -> State:
        """Register the silos, fit the scaling, make the first model and judges for validation and probe."""
        self.registration.gather(self.grid, self.config.dealing.silos or WAITED_FOR)
        if not self.registration.silos:
            raise RoundFailed(0, {}, self.config.rounds.minimum)
        queries = sum(silo.queries for silo in self.registration.silos.values())
        self.config = replace(self.config, strategy=self.config.strategy.for_queries(queries))
        if state is None:
            state = self._first()
        for number, fault in self.config.strategy.faults.items():
            logger.warning("paper mode, known fault %s: %s", number, fault)
        self.extras = {"scaling": messages.pack(state.scaling.arrays())}
        watched = self.held_out.validation
        if watched is not None and watched.grades.max(initial=0) > 0:
            self.judge = Judge(state.scaling(watched), scoring=self.config.model.scoring)
        if self.held_out.probe is not None and self.config.strategy.needs_probe:
            self._probe_rows = state.scaling(self.held_out.probe)
        if self._probe_rows is not None and self.config.strategy.judges_on_probe:
            self.probe = Judge(self._probe_rows, scoring=self.config.model.scoring)
            if self.relay is not None:
                self.extras[PROBE] = messages.pack(self.probe.arrays())
            if len(self.probe) < FEW:
                logger.warning("a probe of %d judged queries can hardly tell silos apart", len(self.probe))
        return state

    def _first(self) -> State:
        model, loss = self.config.model, self.config.local.resolved_loss()
        scaling = Scaling.fit(model.scaling, self.registration.stats())
        highest = max(silo.highest for silo in self.registration.silos.values())
        outputs = loss.outputs(highest + 1)
        parameters = initial_parameters(scaling.width, model.hidden, outputs, self.streams("init"))
        return State(0, dict(parameters), scaling)

    def _round(self, state: State) -> State:
        """Run one round. Returns the state with the next model and the round's record."""
        began, number, old = time.perf_counter(), state.round + 1, state.parameters
        try:
            outcome = self._outcome(state, number)
        except RoundFailed as failed:
            return self._failed(state, failed)
        new, memory = aggregation.step(
            old,
            outcome.mean,
            outcome.memory,
            self.config.strategy,
            number=number,
            optimise=flower.server_step,
        )
        weighed = outcome.weighed
        if self.probe is not None and self.config.strategy.risk.remembers:
            before, after = self.probe.disorder(old), self.probe.disorder(new)
            why, best = aggregation.refusal(before, after, memory.get(BEST))
            if why:
                new, memory, weighed = old, aggregation.forgotten(memory), aggregation.refused(weighed, why)
            memory = {**memory, BEST: best}
        parameters = {key: new[key].astype(array.dtype) for key, array in old.items()}
        done = RoundRecord(
            number,
            asked=outcome.sampled,
            rejected={**outcome.checked.rejected, **weighed.rejected},
            capped=outcome.checked.capped,
            weights=weighed.weights,
            risks=weighed.risks,
            refused=weighed.refused,
            loss=_mean_loss(outcome.checked),
            norm=norm(parameters),
            cosine=_cosine(parameters, old),
            attempts=outcome.attempts,
            privacy=self._statement(state, outcome.sampled),
            protection=self._protection(),
            seconds=time.perf_counter() - began,
        )
        return self._guarded(replace(state, strategy=memory), parameters, done)

    def _outcome(self, state: State, number: int) -> Outcome:
        """Return the weighted mean of enough silos' models, or raise RoundFailed after all attempts."""
        rounds, rejected = self.config.rounds, dict[str, str]()
        orders, limits = self._orders(state, number), self._limits(state.parameters)
        aggregate = self._open if self.relay is None else self._masked
        sampled: tuple[str, ...] = ()
        for attempt in range(1, rounds.attempts + 1):
            silos = self._sample(number, attempt)
            sampled += tuple(silos.values())
            outcome = aggregate(state, number, silos, orders(silos, attempt), limits)
            usable = len(outcome.checked.usable)
            rejected.update(outcome.checked.rejected)
            if usable >= rounds.minimum:
                checked = replace(outcome.checked, rejected=rejected)
                return replace(outcome, checked=checked, sampled=tuple(sorted(sampled)), attempts=attempt)
            logger.warning("round %d, attempt %d: %d usable answers", number, attempt, usable)
        if self.relay is not None:
            raise RoundFailed(number, rejected, self.relay.threshold, self.relay.cure)
        raise RoundFailed(number, rejected, rounds.minimum)

    def _open(
        self,
        state: State,
        number: int,
        silos: Mapping[int, str],
        orders: list[flower.Message],
        limits: ReplyLimits,
    ) -> Outcome:
        """Aggregate visible models: check them, judge them on the probe, weigh and average them."""
        rounds, strategy, model = self.config.rounds, self.config.strategy, state.parameters
        replies = messages.ask(self.grid, orders, rounds=rounds, enough=rounds.minimum)
        shows = "its whole model, how many examples it trained on and its loss"
        checked = check(replies, silos, limits, deadline=rounds.deadline, shows=shows, model=model)
        if len(checked.usable) < rounds.minimum:
            return Outcome(checked)
        named = _named(self._noised(checked.usable, model), silos)
        sizes: Sizes = _sizes(named)
        errors, memory = _errors(named), state.strategy
        if strategy.centred:
            mean = flower.centre(strategy.name, named.values(), **strategy.centre_options)
            return Outcome(checked, self._weighed(errors, sizes, memory), mean, memory)
        models = {name: messages.arrays_of(reply) for name, reply in named.items()}
        if self.probe is not None and strategy.risk.agrees:
            own, weighed = {MEMORY: model}, self._agreeing(number, model, models, sizes, memory)
        else:
            if self.probe is not None:
                errors = {name: self._probe_errors(arrays) for name, arrays in models.items()}
            own, errors, sizes = self._own_candidates(number, model, errors, sizes)
            weighed = self._weighed(errors, sizes, memory)
        memory = aggregation.remembered_risks(memory, weighed.relative)
        if strategy.uses_control_variates:
            rate, population = self.config.local.learning_rate, len(self.registration.silos)
            memory = aggregation.control_variates(
                model, models, sizes, memory, learning_rate=rate, population=population
            )
        mean = aggregation.weighted_mean(weighed, {**models, **own}, strategy)
        return Outcome(checked, weighed, mean, memory)

    def _masked(
        self,
        state: State,
        number: int,
        silos: Mapping[int, str],
        orders: list[flower.Message],
        limits: ReplyLimits,
    ) -> Outcome:
        """Aggregate models that stay hidden: silos report their own errors, receive their weights, and send
        weighted models under masks that cancel in the sum. A failed attempt has opened nothing."""
        assert self.relay is not None
        attempt, reports = self.relay.begin(number, silos, state.parameters), Checked([], {}, {})
        try:
            self.relay.agree(attempt)
            reports = self.relay.reports(attempt, orders, limits)
            named = _named(reports.usable, silos)
            sizes = _sizes(named)
            own, errors, all_sizes = self._own_candidates(number, state.parameters, _errors(named), sizes)
            weighed = self._weighed(errors, all_sizes, state.strategy)
            weighed = replace(weighed, weights={**weighed.weights, **even(weighed.weights, sizes)})
            summed, gone = self.relay.total(attempt, weighed.weights)
        except TooFew as few:
            rejected = attempt.rejected or {SUM: str(few)}
            return Outcome(Checked([], dict(sorted(rejected.items())), reports.capped))
        weights = {name: weight for name, weight in weighed.weights.items() if name not in gone}
        mean = sum_to_mean(summed, weights, own, state.parameters)
        self.relay.check_credible(attempt, mean, state.parameters, limits)
        usable = [reply for name, reply in named.items() if name in weights]
        checked = Checked(usable, dict(sorted(attempt.rejected.items())), reports.capped)
        memory = aggregation.remembered_risks(state.strategy, weighed.relative)
        return Outcome(checked, replace(weighed, weights=weights), mean, memory)

    def _agreeing(
        self, number: int, model: Arrays, models: Mapping[str, Arrays], sizes: Sizes, memory: Arrays
    ) -> Weighed:
        """Weigh silos by how well their steps agree with the step of a model trained on the probe."""
        assert self._probe_rows is not None
        rng = self.streams("round", number, "probe")
        taught = dict(train_epochs(model, self._probe_rows, self.config.local, rng).parameters)
        agreement = {name: aggregation.cosine(one, taught, model) for name, one in models.items()}
        past = aggregation.below(memory, aggregation.RISK)
        return aggregation.weigh_by_agreement(agreement, sizes, self.config.strategy.risk, past=past)

    def _probe_errors(self, model: Arrays) -> NDArray[np.float64]:
        """Return the errors of a model on every probe query, of the kind that the strategy uses."""
        assert self.probe is not None
        return self.probe.counted(model, self.config.strategy.risk.errors)

    def _weighed(self, errors: Errors, sizes: Sizes, memory: Arrays) -> Weighed:
        local = self.config.local
        return aggregation.weigh(
            errors,
            sizes,
            self.config.strategy,
            momentum=local.momentum if local.optimiser == "momentum" else 0.0,
            past=aggregation.below(memory, aggregation.RISK),
            reported=self.relay is not None,
        )

    def _own_candidates(
        self, number: int, model: Arrays, errors: Errors, sizes: Sizes
    ) -> tuple[dict[str, Arrays], Errors, Sizes]:
        """Return the server's own candidate models, and all candidates' errors and sizes.

        The previous model is a candidate if it has probe errors to compare, or is part of the strategy's
        formula; under fedavg-probe, a model trained on the probe is one.
        """
        strategy, local = self.config.strategy, self.config.local
        if strategy.trains_on_probe and self._probe_rows is not None:
            rng = self.streams("round", number, "probe")
            taught = dict(train_epochs(model, self._probe_rows, local, rng).parameters)
            return {PROBE: taught}, errors, {**sizes, PROBE: Size(examples(self._probe_rows, local))}
        if self.probe is not None and strategy.risk.remembers:
            return {MEMORY: model}, {**errors, MEMORY: self._probe_errors(model)}, sizes
        return {MEMORY: model} if strategy.mixes_memory else {}, errors, sizes

    def _statement(self, state: State, sampled: tuple[str, ...]) -> str:
        return statement([*(past.asked for past in state.history), sampled], self.config.privacy)

    def _protection(self) -> str:
        """Describe who can see the silos' models; a secure sum without identities is marked as simulated."""
        simulated = self.relay is not None and not self.relay.identified
        return f"{self.config.protection}{SIMULATED if simulated else ''}"

    def _failed(self, state: State, failed: RoundFailed) -> State:
        """Return the state after a round without enough usable answers, or raise `failed` if configured."""
        sampled = tuple(name for name in failed.silos if name != SUM)
        done = RoundRecord(
            failed.round,
            sampled,
            failed.silos,
            norm=norm(state.parameters),
            attempts=self.config.rounds.attempts,
            privacy=self._statement(state, sampled),
            protection=self._protection(),
        )
        if set(failed.silos.values()) == {NOT_FINITE}:
            return self._diverged(state, done)
        if self.config.rounds.failed == "stop":
            raise failed
        logger.warning("the model stays as it was: %s", failed)
        return replace(state, round=done.round, history=(*state.history, done))

    def _orders(self, state: State, number: int) -> Callable[[Mapping[int, str], int], list[flower.Message]]:
        """Return a function that builds the round's orders to train, for silos by node and an attempt."""
        strategy, model, settings = self.config.strategy, state.parameters, self._settings(state.scaling)
        packed, proximal = messages.pack(model), strategy.proximal_term

        def orders(silos: Mapping[int, str], attempt: int) -> list[flower.Message]:
            options, sent = {"attempt": attempt, "round": number}, []
            for node, name in silos.items():
                records = {messages.ARRAYS: packed, **self.extras}
                if strategy.uses_control_variates:
                    records["correction"] = messages.pack(aggregation.correction(state.strategy, name, model))
                content = messages.train_order(records, settings, **options, proximal=proximal)
                sent.append(flower.Message(content, node, flower.MessageType.TRAIN))
            return sent

        return orders

    def _noised(self, answers: list[flower.Message], start: Arrays) -> list[flower.Message]:
        """If the server adds the noise, clip the answers' updates, noise them, and equalise their weights."""
        privacy = self.config.privacy
        if privacy is None or privacy.where != "server":
            return answers
        noised = []
        for reply in answers:
            model = private(messages.arrays_of(reply), start, privacy, sharers=len(answers))
            noised.append(messages.with_update(reply, model, examples=1))
        return noised

    def _sample(self, number: int, attempt: int) -> dict[int, str]:
        """Sample the silos of a round, by node; drawn among names, which stay the same when nodes change."""
        present = self.registration.gather(self.grid, self.config.rounds.minimum)
        names = list(present)
        rng = self.streams("round", number, "sample", attempt)
        size = min(self.config.rounds.silos or PER_ROUND, len(names))
        chosen = rng.choice(len(names), size=size, replace=False)
        return {present[names[at]]: names[at] for at in sorted(chosen.tolist())}

    def _settings(self, scaling: Scaling) -> str:
        """Return the settings for every silo, as JSON."""
        settings = {
            "local": to_mapping(self.config.local),
            "seed": self.config.seed,
            "scaling": scaling.kind,
            "width": scaling.width,
            "scoring": self.config.model.scoring,
            "report": self._report,
            "errors": self.config.strategy.risk.errors,
            "privacy": self._silo_noise(),
        }
        return json.dumps(settings)

    @property
    def _report(self) -> str:
        """Kind of report that silos send with their model or, under a secure sum, before it."""
        return self.config.strategy.report or ("probe" if PROBE in self.extras else "")

    def _silo_noise(self) -> dict[str, Any] | None:
        privacy = self.config.privacy
        return to_mapping(privacy) if privacy is not None and privacy.where == "silo" else None

    def _limits(self, model: Arrays) -> ReplyLimits:
        config = self.config
        highest = max(silo.highest for silo in self.registration.silos.values())
        shapes = {
            "": (),
            "probe": (0 if self.probe is None else len(self.probe),),
            "quantile": (QUANTILES,),
            "batch": (-1, config.local.batch_size()),
        }
        privacy, noise = config.privacy, 0.0
        if privacy is not None and privacy.where == "silo":
            size = sum(array.size for array in model.values())
            noise = privacy.multiplier * privacy.clip * math.sqrt(size)
        return ReplyLimits(
            noise=noise,
            norm=config.rounds.norm_limit,
            count=config.rounds.count_limit,
            counts=self.registration.counts(whole_queries=config.local.resolved_loss().whole_queries),
            report=shapes[self._report],
            worst=float(max(1, highest) ** 2) if config.strategy.report == "batch" else 1.0,
        )

    def _guarded(self, state: State, parameters: Arrays, done: RoundRecord) -> State:
        """Return the next state, or end training if the model is not finite any more."""
        if not all(np.isfinite(array).all() for array in parameters.values()):
            return self._diverged(state, done)
        share = (_POLYAK + 1) / (done.round + _POLYAK)
        average = aggregation.combine(
            {"new": share, "old": 1 - share}, {"new": parameters, "old": state.average or parameters}
        )
        return replace(
            state, round=done.round, parameters=parameters, average=average, history=(*state.history, done)
        )

    def _diverged(self, state: State, done: RoundRecord) -> State:
        """Return the state with training ended at the previous model, and the reason."""
        grown = norm(state.parameters)
        reason = f"the parameters of round {done.round} are not finite (before it ‖θ‖ was {grown:.3g})"
        if growth := self.config.strategy.faults.get("A3"):
            reason += f": {growth}"
        logger.warning("training stopped: %s", reason)
        record = replace(done, norm=None, cosine=None)
        return replace(state, round=done.round, history=(*state.history, record), stopped=reason)

    def _judged(self, state: State) -> State:
        """Return the state with validation measure and best model, and stopped if patience has run out."""
        if self.judge is None or state.stopped:
            return state
        polyak = self.config.rounds.release == "polyak"
        measure = self.judge.measure((polyak and state.average) or state.parameters)
        best = state.parameters if measure > state.best_measure else state.best
        history = (*state.history[:-1], replace(state.history[-1], measure=measure))
        state = replace(state, history=history, best=best)
        patience = self.config.rounds.patience
        if patience is not None and state.rounds_without_gain >= patience:
            return replace(state, stopped=f"validation has not improved for {patience} rounds")
        return state


def _named(replies: Iterable[flower.Message], silos: Mapping[int, str]) -> dict[str, flower.Message]:
    """Index the replies by silo name."""
    return {silos[reply.metadata.src_node_id]: reply for reply in replies}


def _sizes(named: Mapping[str, flower.Message]) -> dict[str, Size]:
    """Return the counted examples and the steps of every silo."""
    numbers = messages.EXAMPLES, messages.STEPS
    return {name: Size(*(messages.metric(reply, key) for key in numbers)) for name, reply in named.items()}


def _errors(named: Mapping[str, flower.Message]) -> Errors:
    """Return the errors that silos report about their own models, for silos with a report."""
    reports = {name: reply for name, reply in named.items() if messages.REPORT in reply.content}
    return {name: messages.arrays_of(reply, messages.REPORT)["errors"] for name, reply in reports.items()}


def _mean_loss(checked: Checked) -> float | None:
    losses = [messages.metric(reply, "loss") for reply in checked.usable]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None


def _cosine(new: Arrays, old: Arrays) -> float:
    """cos(θ_t, θ_{t−1}); 1 where one of them is 0."""
    dots = (np.vdot(new[key].astype(np.float64), old[key].astype(np.float64)) for key in old)
    lengths = norm(new) * norm(old)
    return float(sum(dots)) / lengths if lengths else 1.0
