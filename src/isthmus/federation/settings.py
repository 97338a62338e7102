"""What a training run is told: one frozen `Config`, which a TOML file or the command line fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

from isthmus.config import require
from isthmus.partition import Dealing
from isthmus.rankers import LocalTraining, Scoring

MODEL = "model"
"""The ranker's file in a run's folder."""
PER_ROUND = 10
"""Silos asked in a round unless a number is given."""
MOMENTUM, FEW_QUERIES, MANY_QUERIES = 0.9, 40, 150
"""The server's momentum unless a number is given, and the training queries up to which fedrisk has none, and
from which it has all of it."""


@dataclass(frozen=True)
class FedRisk:
    """FedRisk: silos' models are weighed by their risk on common queries. These are its settings.

    >>> FedRisk(alpha_risk=3.0).columns
    'probe'

    `columns` is what candidates are compared on: the coordinator's `probe` queries, or `quantile` summaries
    or training `batch` errors that silos report about themselves, which a liar can exploit. On the probe a
    query's error is the share of its `pairs` in the wrong order, or 1 − `ndcg` at 10. Of the formulae
    `agreement` compares steps instead of errors: how far a silo's goes the way of one on the probe. `mean` is
    the control without GeoRisk, `flip` the printed one with its subtraction reversed, and `none` takes all
    risks for 0. Unless given it is `agreement` where the coordinator sees models, else `georisk`.
    """

    mode: Literal["sound", "paper"] = "sound"
    columns: Literal["probe", "quantile", "batch"] = "probe"
    errors: Literal["pairs", "ndcg"] = "pairs"
    formula: Literal["agreement", "georisk", "mean", "flip", "none"] | None = None
    alpha_risk: float = 2.0
    temperature: float | None = None
    """τ of the softmax; unless given, two standard errors of a mean error over the probe's queries."""
    past: float = 3.0
    """A silo's risks of earlier rounds add to that of a round, up to so many times their mean; 0: they do
    not."""
    by_size: bool = True
    """Multiply the sound weights by √n."""
    memory: bool = True
    """Let the previous global model stand among the candidates with its own probe risk, and the probe refuse
    a round that makes the model clearly worse."""
    cap_reports: bool = True
    """Under a secure sum a silo's own report may cost it weight but earn it no more than the median one."""
    alpha_mix: float = 1.0
    beta_mix: float = 1.0
    renormalise: bool = False
    """Paper mode: bring ‖θ‖ back to its first length every round (an ablation)."""

    def __post_init__(self) -> None:
        if (self.mode == "paper") != (self.columns == "batch"):
            raise ValueError(f"mode = {self.mode!r} does not go with columns = {self.columns!r}")
        some = self.temperature is None or self.temperature > 0
        require(some, f"temperature = {self.temperature} (it must be positive)")
        if self.formula == "agreement" and self.columns != "probe":
            raise ValueError(
                f"formula = 'agreement' is with steps on a probe, not columns = {self.columns!r}"
            )
        require(self.past >= 0, f"past = {self.past} (it cannot be negative)")

    @classmethod
    def paper(cls, alpha_mix: float = 1.0, beta_mix: float = 1.0, **more: Any) -> FedRisk:
        """Eqs. (1)-(5) and Algorithms 3-4 of Rabbi et al. as printed."""
        return cls(mode="paper", columns="batch", alpha_mix=alpha_mix, beta_mix=beta_mix, **more)

    @property
    def agrees(self) -> bool:
        """Whether silos are weighed by the directions of their steps, where these are seen."""
        return self.columns == "probe" and self.formula in (None, "agreement")

    @property
    def remembers(self) -> bool:
        """Whether models before a round are compared with those after it: the probe can, silos cannot."""
        return self.memory and self.columns == "probe"

    def faults(self) -> dict[str, str]:
        """The known faults that these settings have, by number."""
        if self.mode == "sound":
            return {}
        faults = {"A2": "the weights of eq. (1) do not sum to 1 and may be negative"}
        if self.formula in (None, "georisk"):
            faults["A1"] = "eq. (4) gives the silo with the larger error the larger weight"
        if self.formula != "none":
            faults["A4"] = "a column of the error matrix is an unrelated row in every silo"
            faults["A6"] = "errors are those of the most probable grade, whatever its probability"
            faults["A7"] = "risk is training error on a silo's own rows, which measures label skew"
            faults["A9"] = "errors row by row reveal labels to the coordinator"
        growth = self.alpha_mix + self.beta_mix
        if growth > 1 and not self.renormalise:
            faults["A3"] = f"alpha_mix + beta_mix = {growth:g}: parameters grow about {growth:g}-fold a round"
        return dict(sorted(faults.items()))


Mean = Literal["fedavg", "fedavgm", "fedprox", "fedopt", "fedadam", "fedyogi", "fedadagrad"]
"""Strategies whose aggregate is the mean by examples; some step from it."""
Name = Mean | Literal["fedmedian", "fedtrimmedavg", "scaffold", "fednova", "fedavg-probe", "fedrisk"]
Server = Literal["average", "momentum", "adam", "yogi", "adagrad", "convex", "halving"]
_MEANS = get_args(Mean)
_OWN_STEP = (*_MEANS[1:], "fedmedian", "fedtrimmedavg")
_SUMMED = (*_MEANS, "fedavg-probe", "fedrisk")
LEAST = 3
"""Silos in a secure sum: of two, each could take its own model off the next global one."""
_WHOLE = {
    "fedmedian": "a median over silos is not a sum",
    "fedtrimmedavg": "trimming looks at every silo's value",
    "scaffold": "the server works every silo's control variate out from its model",
    "fednova": "its weights depend on steps that only the silo can vouch for",
}
"""Why a strategy cannot do with a sum."""
_RATED = ("fedavgm", "fedopt", "fedadam", "fedyogi", "fedadagrad")


@dataclass(frozen=True)
class StrategyOptions:
    """A strategy, and how its aggregate θ~ becomes the next model θ.

    `server` is one of: `average`, θ~ itself; Flower's `momentum`, `adam`, `yogi`, `adagrad` on θ~ − θ;
    `convex`, (1 − m) θ~ + m θ with m = `momentum`; `halving`, θ + 2^−t (θ~ − θ), an ablation. `rate` is the
    server's learning rate where it has one (Flower's default unless given).
    """

    name: Name = "fedrisk"
    server: Server | None = None
    """None: momentum for the sound fedrisk, average for the others."""
    momentum: float | None = None
    """Of the server's momentum or convex step. None: 0.9, but see `for_queries`."""
    rate: float | None = None
    proximal: float = 0.1
    trim: float = 0.2
    risk: FedRisk = field(default_factory=FedRisk)

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, f"momentum = {self.momentum} (at least 0 and below 1)")
        if self.name in _OWN_STEP and self.step != "average":
            raise ValueError(f"{self.name} has a server step of its own; leave out server = {self.step!r}")
        rated = self.name in _RATED or self.step not in ("average", "convex", "halving")
        if self.rate is not None and not rated:
            raise ValueError(f"rate = {self.rate}: {self.name} with server {self.step!r} has none")

    @property
    def sound_risk(self) -> bool:
        """Whether this is fedrisk and not as printed."""
        return self.name == "fedrisk" and self.risk.mode == "sound"

    @property
    def step(self) -> Server:
        """What the server does with the aggregate."""
        return self.server or ("momentum" if self.sound_risk else "average")

    def for_queries(self, count: int) -> StrategyOptions:
        """The strategy with the server momentum that follows from so many training queries, unless given.

        Momentum m adds up to 1/(1 − m) steps, which overfits few queries: the sound fedrisk has 0 up to
        `FEW_QUERIES`, `MOMENTUM` from `MANY_QUERIES` on, and in between in proportion.
        """
        if self.momentum is not None or not self.sound_risk or self.step != "momentum":
            return self
        share = (count - FEW_QUERIES) / (MANY_QUERIES - FEW_QUERIES)
        return replace(self, momentum=round(MOMENTUM * min(1.0, max(0.0, share)), 6))

    @property
    def share(self) -> float:
        """The previous step's share in the next one (momentum), or the previous model's (convex)."""
        return MOMENTUM if self.momentum is None else self.momentum

    @property
    def optimiser(self) -> str:
        """The server's optimiser: `average`, or one of Flower's, by the step it takes."""
        own = {"fedavgm": "momentum", "fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}
        return own.get(self.name, self.step)

    @property
    def optimiser_options(self) -> dict[str, float]:
        """What Flower's optimiser is told, in its words; its defaults stand unless given."""
        momentum = self.optimiser == "momentum"
        rate = {} if self.rate is None else {"server_learning_rate" if momentum else "eta": self.rate}
        return {"server_momentum": self.share, **rate} if momentum else rate

    @property
    def needs_probe(self) -> bool:
        """Whether the coordinator must hold judged queries."""
        return self.trains_on_probe or self.judges_on_probe

    @property
    def trains_on_probe(self) -> bool:
        """Whether a model that the coordinator trains on the probe is one of the candidates."""
        return self.name == "fedavg-probe"

    @property
    def judges_on_probe(self) -> bool:
        """Whether candidates are weighed by their errors on the probe."""
        return self.name == "fedrisk" and self.risk.columns == "probe"

    @property
    def centred(self) -> bool:
        """Whether Flower computes the mean (or median) of the models."""
        return self.name in (*_MEANS, "fedmedian", "fedtrimmedavg")

    @property
    def centre_options(self) -> dict[str, float]:
        """What Flower's mean is told, in its words."""
        return {"beta": self.trim} if self.name == "fedtrimmedavg" else {}

    @property
    def uses_control_variates(self) -> bool:
        """Whether silos correct their gradients by control variates that the server keeps."""
        return self.name == "scaffold"

    @property
    def proximal_term(self) -> float:
        """The weight of the distance to the global model in a silo's loss."""
        return self.proximal if self.name == "fedprox" else 0.0

    @property
    def faults(self) -> dict[str, str]:
        """The known faults of the strategy as it is set, by number."""
        return self.risk.faults() if self.name == "fedrisk" else {}

    @property
    def mixes_memory(self) -> bool:
        """Whether the previous model is a term of the strategy's own formula."""
        return self.name == "fednova" or (self.name == "fedrisk" and self.risk.mode == "paper")

    @property
    def report(self) -> str:
        """What silos must report beside their model: nothing, "quantile" or "batch"."""
        return self.risk.columns if self.name == "fedrisk" and self.risk.columns != "probe" else ""


@dataclass(frozen=True, slots=True)
class Local(LocalTraining):
    """How a silo trains in a round. These defaults were chosen, with the server's, on validation queries."""

    learning_rate: float = 3e-3
    weight_decay: float = 1.0


@dataclass(frozen=True)
class Model:
    """The ranker: a network with these hidden layers (none: linear) over scaled features."""

    hidden: tuple[int, ...] = (32,)
    scaling: str = "log-zscore"
    scoring: Scoring = "expected"
    """How a graded classifier's outputs become a score; `argmax` is the paper's."""


@dataclass(frozen=True)
class PrivateUpdates:
    """Every update clipped to length `clip`, with Gaussian noise of `multiplier` × `clip`.

    The noise is added by every `silo` to its own update, which protects it from the coordinator too, or by
    the `server` to the sum, which does not but needs √n times less of it.
    """

    clip: float = 1.0
    multiplier: float = 1.0
    where: Literal["silo", "server"] = "silo"
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if not (self.clip > 0 and self.multiplier > 0 and 0 < self.delta < 1):
            raise ValueError("clip and multiplier must be positive, delta between 0 and 1")


@dataclass(frozen=True)
class NoiseFloor:
    """What a silo insists on, whatever a coordinator proposes: updates no longer than `clip`, with noise of
    at least `multiplier` × their clip, added by the silo itself, and an ε that is stated at no larger δ."""

    clip: float
    multiplier: float
    delta: float = 1e-5

    def tightened(self, proposed: PrivateUpdates | None) -> PrivateUpdates:
        """The proposal where it asks for more, the floor where it asks for less."""
        if proposed is None:
            return PrivateUpdates(self.clip, self.multiplier, delta=self.delta)
        return PrivateUpdates(
            min(proposed.clip, self.clip),
            max(proposed.multiplier, self.multiplier),
            delta=min(proposed.delta, self.delta),
        )


@dataclass(frozen=True)
class Rounds:
    """How long to train, with whom, and what to put up with."""

    count: int = 100
    silos: int | None = None
    """Silos asked in a round; unless given `PER_ROUND`, or all where there are fewer."""
    minimum: int = 1
    """Usable answers a round needs."""
    attempts: int = 3
    """How often a round with fewer is tried again, with other silos, before it has failed."""
    failed: Literal["stop", "skip"] = "stop"
    """What a failed round does: end training, which can be resumed, or leave the model as it was."""
    deadline: float = 600.0
    """Seconds a silo has to answer."""
    grace: float | None = None
    """Seconds the others have once the fewest that will do have answered; none: up to the deadline."""
    norm_limit: float = 10.0
    """An update longer than this many times max(1, ‖θ‖, the others' lower quartile) is refused."""
    count_limit: float = 10.0
    """Example counts above this many times what two thirds of the silos stay below are cut to it."""
    patience: int | None = None
    """Stop after this many rounds without a better validation measure."""
    release: Literal["last", "best", "polyak"] = "polyak"
    """Which model is saved: of the last round, of the best on validation, or an average over rounds."""

    def __post_init__(self) -> None:
        for key in ("count", "silos", "minimum", "attempts", "deadline"):
            value = getattr(self, key)
            require(value is None or value > 0, f"{key} = {value} (it must be above 0)")
        require(self.grace is None or self.grace > 0, f"grace = {self.grace} (it must be above 0, or none)")
        enough = self.silos is None or self.minimum <= self.silos
        require(enough, f"minimum = {self.minimum} is more than the {self.silos} silos of a round")


_SKIPPING = ("nDCG@1", "nDCG@5", "nDCG@10", "MRR@10")
MEASURES = ("nDCG@10", *(f"{name}(empty=skip)" for name in _SKIPPING))
WATCHED = "nDCG@10(empty=skip)"
"""What validation measures after every round; queries without a relevant document do not count."""


@dataclass(frozen=True)
class Config:
    """A training run: data, silos, rounds, strategy, local training, model, protection, as in a TOML file."""

    retired: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "faults": "faults are given to isthmus_reproduce.faults.FaultyConfig now",
            "engine": "it is called runtime now",
        }
    )
    """Keys of the previous release, empty in its run folders, and the cure for a filled one."""
    data: str = "synthetic"
    seed: int = 0
    fold: int = 0
    dealing: Dealing = field(default_factory=Dealing)
    rounds: Rounds = field(default_factory=Rounds)
    strategy: StrategyOptions = field(default_factory=StrategyOptions)
    local: LocalTraining = field(default_factory=Local)
    model: Model = field(default_factory=Model)
    probe: int | Literal["validation"] | Path | None = "validation"
    """Judged queries of the coordinator: its validation queries, so many of the training queries, or a file,
    or none."""
    privacy: PrivateUpdates | None = None
    secure: bool = False
    """Let the coordinator see the weighted sum of the silos' models only."""
    judge: Literal["server", "silos"] | None = None
    """Who scores models on the probe: the server, which must see them, or under `secure` the silos."""
    ledgers: Path | None = None
    """Where simulated silos keep ledgers of what leaves them, as real ones do; by default nowhere."""
    runtime: Literal["in-process", "ray"] = "in-process"
    workers: int | None = None
    measures: tuple[str, ...] = MEASURES

    def __post_init__(self) -> None:
        if self.rounds.silos is not None and self.rounds.silos > (self.dealing.silos or self.rounds.silos):
            raise ValueError(
                f"rounds.silos = {self.rounds.silos} of dealing.silos = {self.dealing.silos}"
                f" (ask at most {self.dealing.silos} a round)"
            )
        if self.strategy.needs_probe and self.probe is None:
            raise ValueError(
                f"{self.strategy.name} needs a probe: probe = 'validation', or strategy.name = 'fedavg'"
            )
        if self.strategy.uses_control_variates and self.local.optimiser != "sgd":
            raise ValueError("scaffold reads gradients off plain steps: local.optimiser = 'sgd'")
        if self.strategy.name == "fednova" and self.local.optimiser == "adam":
            raise ValueError("fednova is defined for sgd and momentum: local.optimiser = 'sgd'")
        shrunk = self.local.learning_rate * self.local.weight_decay
        if shrunk > 0.05:
            raise ValueError(f"learning_rate × weight_decay = {shrunk:g} shrinks the model in a few steps")
        if self.privacy is not None:
            self._check_private(self.privacy)
        self._check_secure()

    @property
    def protection(self) -> str:
        """What protects whom from whom, in words for every record."""
        risky, probed = self.strategy.name == "fedrisk", self.strategy.risk.columns == "probe"
        if self.secure and risky:
            caveat = "silos score their models themselves, so a liar is possible"
            return f"secure sum: the coordinator sees only the weighted sum of the models; {caveat}"
        if self.secure:
            return "secure sum: the coordinator sees only the weighted sum of the models, good or bad"
        if risky and probed:
            return "judged by the coordinator: it sees every silo's model and scores it on its own probe"
        return "none from the coordinator: it sees every silo's model"

    def _check_secure(self) -> None:
        strategy = self.strategy
        if not self.secure:
            if self.judge == "silos":
                raise ValueError("judge = 'silos' goes with secure = true: who sees models can score them")
            return
        if self.judge == "server":
            raise ValueError(
                "secure = true hides models from the server and judge = 'server' shows them to it:"
                " a run has one of these protections"
            )
        if strategy.name not in _SUMMED:
            raise ValueError(f"secure = true does not go with {strategy.name}: {_WHOLE[strategy.name]}")
        if strategy.name == "fedrisk" and strategy.risk.formula == "agreement":
            raise ValueError("secure = true hides the steps that formula = 'agreement' compares: 'georisk'")
        if strategy.name == "fedrisk" and strategy.risk.mode == "paper":
            raise ValueError("secure = true does not go with paper mode: it reports errors row by row")
        if self.privacy is not None and self.privacy.where == "server":
            raise ValueError("under secure = true the server cannot clip updates: privacy.where = 'silo'")
        fewest = min(self.rounds.silos or LEAST, self.dealing.silos or LEAST)
        if fewest < LEAST:
            raise ValueError(f"secure = true needs rounds.silos of at least {LEAST}, not {fewest}")

    def _check_private(self, privacy: PrivateUpdates) -> None:
        if privacy.where == "server" and self.strategy.name not in _MEANS:
            name = self.strategy.name
            raise ValueError(f"noise by the server covers plain means, not {name}: privacy.where = 'silo'")
        if self.strategy.report:
            raise ValueError("silos' reports about themselves would leave without noise: use a probe")
