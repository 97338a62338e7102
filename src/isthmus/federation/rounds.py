"""The rounds of federated training: ask some silos, check, aggregate, evaluate, remember."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from isthmus.config import to_mapping
from isthmus.errors import RoundFailed
from isthmus.federation.answers import NOT_FINITE, Checked, Limits, check
from isthmus.federation.census import Census
from isthmus.federation.clients import QUANTILES, examples
from isthmus.federation.flower import ConfigRecord, Grid, Message
from isthmus.federation.judge import Judge
from isthmus.federation.members import PROBE
from isthmus.federation.messages import (
    ARRAYS,
    ATTEMPT,
    EXAMPLES,
    METRICS,
    SETTINGS,
    Arrays,
    ask,
    combine,
    pack,
    unpack,
)
from isthmus.federation.noise import private, statement
from isthmus.federation.relay import SUM, Relay
from isthmus.federation.settings import Config
from isthmus.federation.strategies import (
    Chosen,
    FedAvgProbe,
    FedNova,
    FedRisk,
    Restrained,
    Scaffold,
    Summed,
    build,
    norm,
)
from isthmus.private.ledger import NO_GUARANTEE
from isthmus.randomness import Streams
from isthmus.rankers import Scaling, initial_parameters, train_epochs
from isthmus.report import Progress
from isthmus.tables import Letor

logger = logging.getLogger(__name__)

FEW = 20
"""Probe queries below which there is a warning."""
SIMULATED = " (simulated: silos without identities)"
_POLYAK = 3
"""The averaging weight of round t is (p + 1)/(t + p): later rounds count more (Shamir & Zhang 2013)."""


@dataclass(frozen=True)
class RoundRecord:
    """What happened in a round."""

    round: int
    asked: tuple[str, ...] = ()
    """A silo asked in two attempts stands here twice."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Silos whose answers were not used, and why."""
    capped: Mapping[str, str] = field(default_factory=dict)
    """Silos that claimed more examples than were counted."""
    weights: Mapping[str, float] = field(default_factory=dict)
    risks: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    """Why the probe refused the round, if it did."""
    loss: float | None = None
    """Mean local loss."""
    norm: float | None = 0.0
    """Of the global model; none if it is not finite."""
    cosine: float | None = 1.0
    """Between the global model and the one before."""
    measure: float | None = None
    """Validation nDCG@10, of the average over rounds where that is what will be released."""
    attempts: int = 1
    privacy: str = NO_GUARANTEE
    """What an update's ε is, in words."""
    protection: str = ""
    """Who may see what, in words."""
    seconds: float = 0.0

    def told(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class State:
    """Everything training needs to go on from where it is."""

    round: int
    parameters: Arrays
    scaling: Scaling
    strategy: Arrays = field(default_factory=dict)
    average: Arrays = field(default_factory=dict)
    best: Arrays = field(default_factory=dict)
    history: tuple[RoundRecord, ...] = ()
    stopped: str = ""
    """Why training ended before its last round, if it did."""

    def released(self, release: str) -> Arrays:
        """The model to save."""
        chosen = {"last": self.parameters, "best": self.best, "polyak": self.average}[release]
        return chosen or self.parameters

    @property
    def best_measure(self) -> float:
        """The best validation measure so far."""
        return max((record.measure for record in self.history if record.measure is not None), default=-1.0)

    @property
    def rounds_without_gain(self) -> int:
        """Rounds since it was first reached."""
        measures = [record.measure for record in self.history]
        return len(measures) - 1 - measures.index(self.best_measure) if self.best_measure >= 0 else 0


@dataclass(frozen=True)
class Held:
    """The queries the coordinator holds itself, unscaled."""

    validation: Letor | None = None
    probe: Letor | None = None


class Asked(NamedTuple):
    """The answers of a round: whom it took to get them, and how many attempts."""

    checked: Checked
    silos: tuple[str, ...]
    attempts: int


class Coordinator:
    """The server's side of training over a grid."""

    def __init__(self, config: Config, held: Held, grid: Grid) -> None:
        self.config, self.held, self.grid = config, held, grid
        self.streams = Streams(config.seed)
        self.census = Census(config.model.scaling, config.rounds)
        self.strategy: Chosen = build(config.strategy, summed=config.secure)
        self.judge: Judge | None = None
        self.relay: Relay | None = None
        self._probed = 0
        if isinstance(self.strategy, Summed):
            told = {"seed": config.seed, "privacy": self._silo_noise()}
            self.relay = Relay(grid, self.strategy, config.rounds, told=told)

    def run(self, state: State | None, remember: Callable[[State], None]) -> State:
        """Train from `state`, or from the beginning; `remember` is called after every round."""
        state = self._prepared(state)
        rounds = self.config.rounds
        with Progress("training", rounds.count) as bar:
            bar.advance(state.round)
            while state.round < rounds.count and not state.stopped:
                state = self._judged(self._round(state))
                remember(state)
                measure = state.history[-1].measure
                bar.advance(note="" if measure is None else f"nDCG@10 {measure:.4f}")
        return state

    def _prepared(self, state: State | None) -> State:
        """Meet the silos, agree on a scaling, make the first model and what the strategy needs."""
        self.census.gather(self.grid, self.config.dealing.silos)
        if not self.census.silos:
            raise RoundFailed(0, {}, self.config.rounds.minimum)
        if state is None:
            state = self._first()
        for number, fault in self._faults().items():
            logger.warning("paper mode, known fault %s: %s", number, fault)
        self.strategy.restore(state.strategy)
        self.strategy.extras = {"scaling": pack(state.scaling.arrays())}
        model = self.config.model
        if self.held.validation is not None:
            self.judge = Judge(state.scaling(self.held.validation), scoring=model.scoring)
        self._equip(state.scaling)
        return state

    def _first(self) -> State:
        model, loss = self.config.model, self.config.local.resolved_loss()
        scaling = Scaling.fit(model.scaling, self.census.stats())
        highest = max(silo.highest for silo in self.census.silos.values())
        outputs = loss.outputs(highest + 1)
        parameters = initial_parameters(scaling.width, model.hidden, outputs, self.streams("init"))
        return State(0, dict(parameters), scaling)

    def _faults(self) -> dict[str, str]:
        return self.config.strategy.risk.faults() if isinstance(self.strategy, FedRisk) else {}

    def _equip(self, scaling: Scaling) -> None:
        """Give the strategy what only this run knows."""
        strategy, local = self.strategy, self.config.local
        if isinstance(strategy, Scaffold):
            strategy.learning_rate, strategy.population = local.learning_rate, len(self.census.silos)
        if isinstance(strategy, FedNova):
            strategy.momentum = local.momentum if local.optimiser == "momentum" else 0.0
        if self.held.probe is None or not self.config.strategy.needs_probe:
            return
        probe = scaling(self.held.probe)
        if isinstance(strategy, FedRisk):
            judge = Judge(probe, scoring=self.config.model.scoring)
            strategy.judge = judge.errors
            if isinstance(strategy, Restrained):
                strategy.disorder = judge.disorder
            if self.relay is not None:
                strategy.extras = {**strategy.extras, PROBE: pack(judge.arrays())}
                self._probed = len(judge)
            if len(judge) < FEW:
                logger.warning("a probe of %d judged queries can hardly tell silos apart", len(judge))
        if isinstance(strategy, FedAvgProbe):
            strategy.teacher = lambda at, start: (
                dict(train_epochs(start, probe, local, self.streams("round", at, "probe")).parameters),
                examples(probe, local),
            )

    def _round(self, state: State) -> State:
        """One round: another model, and the record of how it came about."""
        began, number = time.perf_counter(), state.round + 1
        try:
            checked, asked, attempts = self._answers(state, number)
        except RoundFailed as failed:
            return self._failed(state, failed)
        record, _ = self.strategy.aggregate_train(number, self._noised(checked.usable, state.parameters))
        arrays = {} if record is None else unpack(record)
        parameters = {key: arrays[key].astype(old.dtype) for key, old in state.parameters.items()}
        weighed = self.strategy.weighed
        done = RoundRecord(
            number,
            asked=asked,
            rejected={**checked.rejected, **weighed.rejected},
            capped=checked.capped,
            weights=weighed.weights,
            risks=weighed.risks,
            refused=weighed.refused,
            loss=_mean_loss(checked),
            norm=norm(parameters),
            cosine=_cosine(parameters, state.parameters),
            attempts=attempts,
            privacy=statement([*(past.asked for past in state.history), asked], self.config.privacy),
            protection=self._protection(),
            seconds=time.perf_counter() - began,
        )
        return self._guarded(state, parameters, done)

    def _protection(self) -> str:
        """What protects whom from whom; silos that believe the coordinator about who is who are none."""
        simulated = self.relay is not None and not self.relay.identified
        return f"{self.config.protection}{SIMULATED if simulated else ''}"

    def _failed(self, state: State, failed: RoundFailed) -> State:
        """What becomes of a round without enough usable answers."""
        asked = tuple(name for name in failed.silos if name != SUM)
        done = RoundRecord(
            failed.round,
            asked,
            failed.silos,
            norm=norm(state.parameters),
            attempts=self.config.rounds.attempts,
            privacy=statement([*(past.asked for past in state.history), asked], self.config.privacy),
            protection=self._protection(),
        )
        if set(failed.silos.values()) == {NOT_FINITE}:
            return self._diverged(state, done)
        if self.config.rounds.failed == "stop":
            raise failed
        logger.warning("the model stays as it was: %s", failed)
        return replace(state, round=done.round, history=(*state.history, done))

    def _answers(self, state: State, number: int) -> Asked:
        """The usable answers of a round, from as many attempts as it takes."""
        rounds = self.config.rounds
        record = pack(state.parameters)
        settings = self._settings(state.scaling)
        limits = self._limits(sum(array.size for array in state.parameters.values()))
        asked: tuple[str, ...] = ()
        rejected: dict[str, str] = {}
        for attempt in range(1, rounds.attempts + 1):
            self.strategy.choose(self._sample(number, attempt))
            told = ConfigRecord({SETTINGS: settings, ATTEMPT: attempt})
            messages = list(self.strategy.configure_train(number, record, told, self.grid))
            asked += tuple(self.strategy.silos.values())
            checked = self._checked(number, messages, state.parameters, limits)
            rejected.update(checked.rejected)
            if len(checked.usable) >= rounds.minimum:
                return Asked(replace(checked, rejected=rejected), tuple(sorted(asked)), attempt)
            logger.warning("round %d, attempt %d: %d usable answers", number, attempt, len(checked.usable))
        if self.relay is not None:
            raise RoundFailed(number, rejected, self.relay.threshold, self.relay.cure)
        raise RoundFailed(number, rejected, rounds.minimum)

    def _checked(self, number: int, messages: list[Message], model: Arrays, limits: Limits) -> Checked:
        """The answers to an order, or of a secure round the reports behind its sum."""
        if self.relay is not None:
            return self.relay.gather(number, messages, model, limits)
        rounds = self.config.rounds
        replies = ask(self.grid, messages, rounds=rounds, enough=rounds.minimum)
        return check(replies, self.strategy.silos, model, limits, deadline=rounds.deadline)

    def _noised(self, answers: list[Message], start: Arrays) -> list[Message]:
        """The answers, clipped, noised and of equal weight where that is the server's part."""
        privacy = self.config.privacy
        if privacy is None or privacy.where != "server":
            return answers
        for reply in answers:
            model = unpack(reply.content.array_records[ARRAYS])
            reply.content[ARRAYS] = pack(private(model, start, privacy, sharers=len(answers)))
            reply.content.metric_records[METRICS][EXAMPLES] = 1
        return answers

    def _sample(self, number: int, attempt: int) -> dict[int, str]:
        """The silos of a round, by node: drawn among names, which stay when nodes change."""
        present = self.census.gather(self.grid, self.config.rounds.minimum)
        names = list(present)
        rng = self.streams("round", number, "sample", attempt)
        chosen = rng.choice(len(names), size=min(self.config.rounds.silos, len(names)), replace=False)
        return {present[names[at]]: names[at] for at in sorted(chosen.tolist())}

    def _settings(self, scaling: Scaling) -> str:
        """What every silo is told, as JSON."""
        told = {
            "local": to_mapping(self.config.local),
            "seed": self.config.seed,
            "scaling": scaling.kind,
            "width": scaling.width,
            "scoring": self.config.model.scoring,
            "report": self._report,
            "privacy": self._silo_noise(),
        }
        return json.dumps(told)

    @property
    def _report(self) -> str:
        """What silos say of themselves beside, or under a secure sum before, their model."""
        return self.config.strategy.report or ("probe" if self._probed else "")

    def _silo_noise(self) -> dict[str, Any] | None:
        privacy = self.config.privacy
        return to_mapping(privacy) if privacy is not None and privacy.where == "silo" else None

    def _limits(self, size: int) -> Limits:
        config = self.config
        highest = max(silo.highest for silo in self.census.silos.values())
        shapes = {
            "": (),
            "probe": (self._probed,),
            "quantile": (QUANTILES,),
            "batch": (-1, config.local.batch_size()),
        }
        privacy, noise = config.privacy, 0.0
        if privacy is not None and privacy.where == "silo":
            noise = privacy.multiplier * privacy.clip * math.sqrt(size)
        return Limits(
            noise=noise,
            norm=config.rounds.norm_limit,
            count=config.rounds.count_limit,
            counts=self.census.counts(whole_queries=config.local.resolved_loss().whole_queries),
            report=shapes[self._report],
            worst=float(max(1, highest) ** 2) if config.strategy.report == "batch" else 1.0,
        )

    def _guarded(self, state: State, parameters: Arrays, done: RoundRecord) -> State:
        """The next state, unless the model is not finite any more."""
        if not all(np.isfinite(array).all() for array in parameters.values()):
            return self._diverged(state, done)
        share = (_POLYAK + 1) / (done.round + _POLYAK)
        average = combine(
            {"new": share, "old": 1 - share}, {"new": parameters, "old": state.average or parameters}
        )
        return replace(
            state,
            round=done.round,
            parameters=parameters,
            strategy=self.strategy.state(),
            average=average,
            history=(*state.history, done),
        )

    def _diverged(self, state: State, done: RoundRecord) -> State:
        """Training ends with the model before, and says why."""
        grown = norm(state.parameters)
        reason = f"the parameters of round {done.round} are not finite (before it ‖θ‖ was {grown:.3g})"
        if "A3" in self._faults():
            reason += f": {self._faults()['A3']}"
        logger.warning("training stopped: %s", reason)
        kept = replace(done, norm=None, cosine=None)
        return replace(state, round=done.round, history=(*state.history, kept), stopped=reason)

    def _judged(self, state: State) -> State:
        """The state with the round's validation measure, the best model so far, and whether to stop."""
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


def _mean_loss(checked: Checked) -> float | None:
    losses = [float(reply.content.metric_records[METRICS]["loss"]) for reply in checked.usable]  # type: ignore[arg-type]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return sum(finite) / len(finite) if finite else None


def _cosine(new: Arrays, old: Arrays) -> float:
    """cos(θ_t, θ_{t−1}); 1 where one of them is 0."""
    dots = (np.vdot(new[key].astype(np.float64), old[key].astype(np.float64)) for key in old)
    lengths = norm(new) * norm(old)
    return float(sum(dots)) / lengths if lengths else 1.0
