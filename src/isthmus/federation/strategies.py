"""How the silos' models become the next global model.

Flower's own strategies are used as they are. `Chosen`, which stands between them and Flower's `FedAvg` in the
inheritance order, only replaces how clients are picked: Flower draws them with Python's global generator,
among random node ids. Flower's server optimisers stand on `FedRisk` in the same way, so that FedRisk
overrides the aggregation and nothing else.

    fedavg         Σ n_k θ_k / Σ n_k
    fedavgm        fedavg, then server momentum
    fedprox        fedavg; silos add μ (θ − θ_G) to their gradients
    fedopt         Flower's base class of the next three: the same as fedavg
    fedadam, fedyogi, fedadagrad    fedavg, then an adaptive server step
    fedmedian, fedtrimmedavg        coordinate by coordinate, unweighted
    scaffold       control variates (Karimireddy et al. 2020)
    fednova        normalised averaging (Wang et al. 2020)
    fedavg-probe   fedavg with the probe as one more silo: a control for fedrisk
    fedrisk        weights from risk: sound, or as Rabbi et al. print it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from isthmus.federation import risk as risks
from isthmus.federation.flower import (
    ArrayRecord,
    ConfigRecord,
    FedOpt,
    Grid,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from isthmus.federation.flower import strategy as flower
from isthmus.federation.messages import (
    ARRAYS,
    CONFIG,
    EXAMPLES,
    METRICS,
    REPORT,
    ROUND,
    STEPS,
    Arrays,
    combine,
    pack,
    unpack,
)
from isthmus.federation.restraint import Restraint
from isthmus.federation.settings import RiskOptions, StrategyOptions

MEMORY = "memory"
"""The name of the previous global model among a round's candidates."""
PROBE = "probe"
"""The name of the coordinator's own model among them, where it trains on the probe."""

Aggregate: TypeAlias = tuple[ArrayRecord | None, MetricRecord | None]
Judge = Callable[[Arrays], NDArray[np.float64]]
Teacher = Callable[[int, Arrays], tuple[Arrays, int]]


@dataclass(frozen=True)
class Weighed:
    """What a strategy made of a round's candidates: the weight and the risk of each, by name."""

    weights: Mapping[str, float] = field(default_factory=dict)
    risks: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""
    """Why the probe refused the round."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """The silos of a round that was refused."""


@dataclass(frozen=True)
class Plan:
    """What a round's aggregate will be: weights, and the models among the candidates that the server has."""

    weighed: Weighed
    own: Mapping[str, Arrays] = field(default_factory=dict)


Errors = Mapping[str, NDArray[Any]]
Sizes = Mapping[str, float]


class Chosen(flower.FedAvg):
    """FedAvg over the silos that the coordinator chose, with replies that it has checked."""

    def __init__(self, **flower_options: Any) -> None:
        super().__init__(**flower_options)
        self.silos: Mapping[int, str] = {}
        self.extras: Mapping[str, ArrayRecord] = {}
        self.previous: Arrays = {}
        self.weighed = Weighed()

    def choose(self, silos: Mapping[int, str]) -> None:
        """Begin a round with these silos, by node."""
        self.silos = silos
        self.weighed = Weighed()
        self.current_arrays: Any = None  # FedAvgM then takes the model it is given, as the others do

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """One message to every chosen silo."""
        self.previous = unpack(arrays)
        config[ROUND] = server_round
        return [self.message(node, arrays, config) for node in self.silos]

    def message(self, node: int, arrays: ArrayRecord, config: ConfigRecord) -> Message:
        """What one silo is sent."""
        content = RecordDict({ARRAYS: arrays, CONFIG: config, **self.extras})
        return Message(content, node, MessageType.TRAIN)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """Flower's weighted mean."""
        answers = list(replies)
        self.weighed = self.plan(server_round, self.sizes(answers), {}).weighed
        return super().aggregate_train(server_round, answers)

    def plan(self, server_round: int, sizes: Sizes, errors: Errors) -> Plan:
        """The weights of the silos' models, from what may be known without seeing them."""
        return Plan(Weighed(_shares(sizes)))

    def sizes(self, replies: Iterable[Message]) -> dict[str, float]:
        """The example counts in the replies, by silo."""
        return {self.name(reply): _metric(reply, EXAMPLES) for reply in replies}

    def name(self, reply: Message) -> str:
        """The silo a reply came from."""
        return self.silos[reply.metadata.src_node_id]

    def models(self, replies: Iterable[Message]) -> dict[str, Arrays]:
        """The model in every reply, by silo."""
        return {self.name(reply): unpack(reply.content.array_records[ARRAYS]) for reply in replies}

    def _check_and_log_replies(
        self, replies: Iterable[Message], is_train: bool, validate: bool = True
    ) -> tuple[list[Message], list[Message]]:
        """The coordinator has checked them, and keeps the record."""
        return list(replies), []

    def state(self) -> Arrays:
        """What the strategy carries from round to round, flat, for a checkpoint."""
        kept: dict[str, Any] = {key: getattr(self, key, None) for key in ("m_t", "v_t")}
        velocity = getattr(self, "momentum_vector", None) or []
        kept["momentum_vector"] = {str(at): array for at, array in enumerate(velocity)}
        held = {key: arrays for key, arrays in kept.items() if arrays}
        return {f"{key}/{name}": array for key, arrays in held.items() for name, array in arrays.items()}

    def restore(self, state: Arrays) -> None:
        """Take up the state of a checkpoint."""
        for key in ("m_t", "v_t"):
            if found := below(state, key):
                setattr(self, key, found)
        if velocity := below(state, "momentum_vector"):
            self.momentum_vector = [velocity[str(at)] for at in range(len(velocity))]


class PartialStep(Chosen):
    """θ + s (θ~ − θ): the server goes only part of the way to the aggregate."""

    step: Callable[[int], float] = staticmethod(lambda server_round: 1.0)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """The aggregate below, and a part of the way there."""
        record, metrics = super().aggregate_train(server_round, replies)
        if record is None:
            return None, metrics
        step = self.step(server_round)
        mixed = combine({"new": step, "old": 1 - step}, {"new": unpack(record), "old": self.previous})
        return pack(mixed), metrics


class Scaffold(Chosen):
    """SCAFFOLD: silos correct their gradients by c − c_k and so do not drift apart.

    After K steps of size η_l from x to y_k (option II, eqs. 4-5): c_k⁺ = c_k − c + (x − y_k)/(K η_l), then
    x ← x + mean(y_k − x) and c ← c + Σ_k (c_k⁺ − c_k)/N. All of it follows from y_k, so the server keeps
    every c_k and silos need no state.
    """

    learning_rate = 0.01
    population = 1

    def __init__(self, **flower_options: Any) -> None:
        super().__init__(**flower_options)
        self.controls: dict[str, Arrays] = {}

    def message(self, node: int, arrays: ArrayRecord, config: ConfigRecord) -> Message:
        """The global model and this silo's correction."""
        message = super().message(node, arrays, config)
        common, own = self._control(""), self._control(self.silos[node])
        message.content["correction"] = pack({key: common[key] - own[key] for key in common})
        return message

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """The mean model, and every control variate."""
        answers = list(replies)
        models = self.models(answers)
        common = self._control("")
        drift = {key: np.zeros_like(value) for key, value in common.items()}
        for reply in answers:
            name = self.name(reply)
            own, scale = self._control(name), np.float32(1 / (_metric(reply, STEPS) * self.learning_rate))
            change = {
                key: (self.previous[key] - models[name][key]) * scale - common[key] for key in self.previous
            }
            self.controls[name] = {key: own[key] + change[key] for key in own}
            drift = {key: drift[key] + change[key] / np.float32(self.population) for key in drift}
        self.controls[""] = {key: common[key] + drift[key] for key in common}
        self.weighed = Weighed(dict.fromkeys(models, 1 / len(models)))
        return pack(combine(self.weighed.weights, models)), None

    def _control(self, name: str) -> Arrays:
        """A silo's control variate, or the common one under the empty name; 0 at first."""
        zero = {key: np.zeros_like(value) for key, value in self.previous.items()}
        return self.controls.get(name, zero)

    def state(self) -> Arrays:
        """The control variates too."""
        controls = {
            f"controls/{name}/{key}": array
            for name, arrays in self.controls.items()
            for key, array in arrays.items()
        }
        return {**super().state(), **controls}

    def restore(self, state: Arrays) -> None:
        """The control variates too."""
        super().restore(state)
        controls = below(state, "controls")
        names = {key.rpartition("/")[0] for key in controls}
        self.controls = {name: below(controls, name) for name in names}


class FedNova(Chosen):
    """FedNova: a silo that took more steps does not pull harder.

    θ ← θ + τ_eff Σ_k p_k (θ_k − θ)/‖a_k‖₁ with p_k = n_k/n and τ_eff = Σ_k p_k ‖a_k‖₁, where ‖a_k‖₁ is the
    number of local steps τ_k, or with local momentum ρ (τ_k − ρ (1 − ρ^τ_k)/(1 − ρ))/(1 − ρ).
    """

    momentum = 0.0

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """The mean of the normalised updates."""
        answers = list(replies)
        models = self.models(answers)
        examples = np.array([_metric(reply, EXAMPLES) for reply in answers])
        steps, rho = np.array([_metric(reply, STEPS) for reply in answers]), self.momentum
        lengths = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        shares = examples / examples.sum()
        weights = dict(zip(models, (shares * (shares @ lengths) / lengths).tolist(), strict=True))
        weights[MEMORY] = 1 - sum(weights.values())
        self.weighed = Weighed(weights)
        return pack(combine(weights, {**models, MEMORY: self.previous})), None


class FedAvgProbe(Chosen):
    """FedAvg in which the coordinator trains on its probe and counts as one more silo."""

    teacher: Teacher

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """The mean over the silos and the probe's model, by examples."""
        answers = list(replies)
        plan = self.plan(server_round, self.sizes(answers), {})
        self.weighed = plan.weighed
        return pack(combine(self.weighed.weights, {**self.models(answers), **plan.own})), None

    def plan(self, server_round: int, sizes: Sizes, errors: Errors) -> Plan:
        """The coordinator's own model counts by the examples of the probe."""
        taught, count = self.teacher(server_round, self.previous)
        return Plan(Weighed(_shares({**sizes, PROBE: float(count)})), {PROBE: taught})


class FedRisk(Chosen):
    """Weights from risk, then a linear combination.

    Sound: the coordinator scores every candidate, the previous global model among them, on its probe;
    M_kj = 1 − nDCG@10 of candidate k on query j; w_k ∝ softmax(−risk_k/τ) √n_k. Paper: eqs. (1)-(5).
    """

    options = RiskOptions()
    judge: Judge

    def __init__(self, **flower_options: Any) -> None:
        super().__init__(**flower_options)
        self.length: float | None = None

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """Errors, weights, combination."""
        answers = list(replies)
        models = self.models(answers)
        if self.options.mode == "paper":
            return pack(self._as_printed(models, answers)), None
        plan = self.plan(server_round, self.sizes(answers), self._errors(models, answers))
        self.weighed = plan.weighed
        return pack(combine(self.weighed.weights, {**models, **plan.own})), None

    def plan(self, server_round: int, sizes: Sizes, errors: Errors) -> Plan:
        """The sound weights, the previous global model's too where there is a probe to judge it by."""
        if self.options.remembers:
            known = {**errors, MEMORY: self.judge(self.previous)}
            return Plan(self.weigh(known, sizes), {MEMORY: self.previous})
        return Plan(self.weigh(errors, sizes))

    def weigh(self, errors: Errors, sizes: Sizes) -> Weighed:
        """The sound weights of candidates from their errors on common items and their (capped) sizes.

        It needs no parameters: under a secure sum the errors arrive first, the weights go back, and the
        weighted parameters come last. The memory has the median √n of the others. What silos report of
        themselves can be a lie, so there no silo's risk counts as less than the median.
        """
        names = sorted(errors)
        matrix = np.stack([errors[name] for name in names])
        roots = {name: np.sqrt(size) for name, size in sizes.items()}
        typical = float(np.median(list(roots.values())))
        risk = _risk_of(matrix, self.options)
        believed = risk
        if isinstance(self, Summed) and self.options.cap_reports:
            told = np.array([name in sizes for name in names])
            believed = np.where(told, np.maximum(risk, np.median(risk[told])), risk)
        counts = [roots.get(name, typical) ** 2 for name in names] if self.options.by_size else None
        weights = risks.softmax_weights(believed, temperature=self.options.temperature, sizes=counts)
        return Weighed(
            dict(zip(names, weights.tolist(), strict=True)), dict(zip(names, risk.tolist(), strict=True))
        )

    def _errors(self, models: Mapping[str, Arrays], answers: Iterable[Message]) -> dict[str, NDArray[Any]]:
        if self.options.columns == "probe":
            return {name: self.judge(model) for name, model in models.items()}
        return {self.name(reply): self._reported(reply) for reply in answers}

    def _reported(self, reply: Message) -> NDArray[Any]:
        return unpack(reply.content.array_records[REPORT])["errors"]

    def _as_printed(self, models: Mapping[str, Arrays], answers: list[Message]) -> Arrays:
        """θ~ = Σ (1 − risk_k) θ_k / |S_t| (1), then α θ~ + β θ_G (5)."""
        options = self.options
        if options.formula == "none":
            risk = np.zeros(len(models))
        else:
            batches = [self._reported(reply) for reply in answers]
            risk = risks.batch_risks(batches, alpha_risk=options.alpha_risk)
            risk = -risk if options.formula == "flip" else risk
        weights = dict(zip(models, risks.paper_weights(risk).tolist(), strict=True))
        self.weighed = Weighed(weights, dict(zip(models, risk.tolist(), strict=True)))
        mixed = {name: options.alpha_mix * weight for name, weight in weights.items()}
        with np.errstate(over="ignore"):  # growth beyond float32 is for the coordinator's guard to report
            result = combine({**mixed, MEMORY: options.beta_mix}, {**models, MEMORY: self.previous})
        return self._renormalised(result) if options.renormalise else result

    def _renormalised(self, arrays: Arrays) -> Arrays:
        if self.length is None:
            self.length = norm(self.previous) or 1.0
        scale = self.length / (norm(arrays) or 1.0)
        return {key: (array * scale).astype(array.dtype) for key, array in arrays.items()}

    def state(self) -> Arrays:
        """The first length too, where it is kept."""
        kept = {} if self.length is None else {"length": np.array(self.length)}
        return {**super().state(), **kept}

    def restore(self, state: Arrays) -> None:
        """The first length too, where it is kept."""
        super().restore(state)
        self.length = float(state["length"]) if "length" in state else None


class Summed(Chosen):
    """The aggregate is a sum that was made elsewhere, under masks: what stands on top of it steps from there.

    It comes before the strategy whose `plan` gave the weights.
    """

    aggregate: Arrays

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """The mean that was handed in."""
        return pack(self.aggregate), None


class Restrained(Chosen):
    """On top of FedRisk and its server step: the probe may refuse the round, and with it the momentum."""

    disorder: Judge
    """A model's share of wrongly ordered pairs, query by query of the probe."""

    def __init__(self, **flower_options: Any) -> None:
        super().__init__(**flower_options)
        self.restraint = Restraint(lambda model: self.disorder(model))

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Aggregate:
        """The server's step, as far as the probe does not speak against it."""
        record, metrics = super().aggregate_train(server_round, replies)
        if record is None:
            return None, metrics
        if not (why := self.restraint.refusal(self.previous, unpack(record))):
            return record, metrics
        for memory in ("momentum_vector", "m_t", "v_t"):
            setattr(self, memory, None)
        silos = (name for name in self.weighed.weights if name != MEMORY)
        rejected = dict.fromkeys(silos, f"the probe refused {why}")
        self.weighed = replace(self.weighed, refused=why, weights={MEMORY: 1.0}, rejected=rejected)
        return pack(self.previous), metrics

    def state(self) -> Arrays:
        """What the probe has seen of the best model too."""
        kept = {f"restraint/{name}": array for name, array in self.restraint.state().items()}
        return {**super().state(), **kept}

    def restore(self, state: Arrays) -> None:
        """What the probe has seen of the best model too."""
        super().restore(state)
        self.restraint.restore(below(state, "restraint"))


_ON_TOP: Mapping[str, type[Any]] = MappingProxyType(
    {
        "fedavgm": flower.FedAvgM,
        "momentum": flower.FedAvgM,
        "fedprox": flower.FedProx,
        "fedopt": FedOpt,
        "fedadam": flower.FedAdam,
        "adam": flower.FedAdam,
        "fedyogi": flower.FedYogi,
        "yogi": flower.FedYogi,
        "fedadagrad": flower.FedAdagrad,
        "adagrad": flower.FedAdagrad,
        "fedmedian": flower.FedMedian,
        "fedtrimmedavg": flower.FedTrimmedAvg,
        "convex": PartialStep,
        "halving": PartialStep,
    }
)
_BELOW: Mapping[str, type[Chosen]] = MappingProxyType(
    {"scaffold": Scaffold, "fednova": FedNova, "fedavg-probe": FedAvgProbe, "fedrisk": FedRisk}
)


def build(options: StrategyOptions, *, summed: bool = False) -> Chosen:
    """The strategy of these options; what only a run knows (judge, teacher, population) is set by the run.

    With `summed` it is a `Summed` too, and never looks at a silo's model.
    """
    base = _BELOW.get(options.name, Chosen)
    tops = [_ON_TOP[key] for key in (options.step, options.name) if key in _ON_TOP]
    tops += [Summed] if summed else []
    tops[:0] = [Restrained] if options.name == "fedrisk" and options.risk.remembers else []
    kind: Any = type(options.name, (*tops, base), {}) if tops else base
    strategy: Chosen = kind(**_flower_options(options))
    if isinstance(strategy, PartialStep):
        share = 1 - options.momentum
        strategy.step = (lambda server_round: share) if options.step == "convex" else (lambda t: 2.0**-t)
    if isinstance(strategy, FedRisk):
        strategy.options = options.risk
    return strategy


def _flower_options(options: StrategyOptions) -> dict[str, Any]:
    """What Flower's constructors want, in their words; their defaults stand unless given."""
    if options.name == "fedprox":
        return {"proximal_mu": options.proximal}
    if options.name == "fedtrimmedavg":
        return {"beta": options.trim}
    rate = {} if options.rate is None else {"eta": options.rate}
    if options.name == "fedavgm" or options.step == "momentum":
        rate = {} if options.rate is None else {"server_learning_rate": options.rate}
        return {"server_momentum": options.momentum, **rate}
    return rate


def _risk_of(errors: NDArray[Any], options: RiskOptions) -> NDArray[np.float64]:
    if options.formula == "mean":
        return risks.mean_error(errors)
    if options.formula == "flip":
        printed = risks.risk_matrix(
            errors, alpha_risk=options.alpha_risk, orientation="error", reference="mean"
        )
        return -printed.risk
    if options.formula == "none":
        return np.zeros(len(errors))
    return risks.probe_risk(errors, alpha_risk=options.alpha_risk)


def norm(arrays: Arrays) -> float:
    """‖θ‖ over all arrays."""
    return float(np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values())))


def below(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin with `prefix/`, without it."""
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def _shares(sizes: Sizes) -> dict[str, float]:
    total = sum(sizes.values())
    return {name: size / total for name, size in sizes.items()}


def _metric(reply: Message, key: str) -> float:
    return float(reply.content.metric_records[METRICS][key])  # type: ignore[arg-type]
