"""Settings of a training run: one frozen `Config`, from a TOML file or the command line."""

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
"""File name of the ranker in a run's folder."""
PER_ROUND = 10
"""Number of silos asked in a round unless configured."""
MOMENTUM, FEW_QUERIES, MANY_QUERIES = 0.9, 40, 150
"""The server's momentum unless configured; the number of training queries up to which fedrisk has none, and
from which it has all of it."""


@dataclass(frozen=True)
class FedRisk:
    """Settings of FedRisk, which weighs silos' models by their risk on common queries.

    >>> FedRisk(alpha_risk=3.0).columns
    'probe'

    `columns` says on which items candidates are compared: the coordinator's `probe` queries, or `quantile`
    summaries or training `batch` errors that silos report about themselves, which a dishonest silo can
    exploit. On the probe a query's error is the share of its `pairs` in the wrong order, or 1 − `ndcg` at 10.
    Of the formulae, `agreement` compares steps instead of errors: how far a silo's step goes in the direction
    of a step on the probe. `mean` is the control without GeoRisk, `flip` the printed formula with its
    subtraction reversed, and `none` sets all risks to 0. The default is `agreement` if the coordinator sees
    models, else `georisk`.
    """

    mode: Literal["sound", "paper"] = "sound"
    columns: Literal["probe", "quantile", "batch"] = "probe"
    errors: Literal["pairs", "ndcg"] = "pairs"
    formula: Literal["agreement", "georisk", "mean", "flip", "none"] | None = None
    alpha_risk: float = 2.0
    temperature: float | None = None
    """τ of the softmax; by default two standard errors of a mean error over the probe's queries."""
    past: float = 3.0
    """h: a silo's risks of earlier rounds are added to its risk, up to h times their mean; 0 adds none."""
    by_size: bool = True
    """Multiply the sound weights by √n."""
    memory: bool = True
    """Include the previous global model in the candidates with its own probe risk, and let the probe refuse a
    round that makes the model clearly worse."""
    cap_reports: bool = True
    """Under a secure sum, let a silo's own report lower its weight, but not raise it above the median one."""
    alpha_mix: float = 1.0
    beta_mix: float = 1.0
    renormalise: bool = False
    """Paper mode: scale the mean to the length ‖θ‖ of the first model in every round (an ablation)."""

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
        """Return the settings for Eqs. (1)-(5) and Algorithms 3-4 of Rabbi et al. as printed."""
        return cls(mode="paper", columns="batch", alpha_mix=alpha_mix, beta_mix=beta_mix, **more)

    @property
    def agrees(self) -> bool:
        """Whether silos are weighed by the directions of their steps, if the coordinator sees these."""
        return self.columns == "probe" and self.formula in (None, "agreement")

    @property
    def remembers(self) -> bool:
        """Whether models before and after a round are compared, which the probe can do but silos cannot."""
        return self.memory and self.columns == "probe"

    def faults(self) -> dict[str, str]:
        """Return the known faults of these settings, by number."""
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
"""Strategies that aggregate by the mean weighted by examples; some take a server step from it."""
Name = Mean | Literal["fedmedian", "fedtrimmedavg", "scaffold", "fednova", "fedavg-probe", "fedrisk"]
Server = Literal["average", "momentum", "adam", "yogi", "adagrad", "convex", "halving"]
_MEANS = get_args(Mean)
_OWN_STEP = (*_MEANS[1:], "fedmedian", "fedtrimmedavg")
_SUMMED = (*_MEANS, "fedavg-probe", "fedrisk")
LEAST = 3
"""Least number of silos in a secure sum: of two, each could subtract its own model from the next one."""
_WHOLE = {
    "fedmedian": "a median over silos is not a sum",
    "fedtrimmedavg": "trimming looks at every silo's value",
    "scaffold": "the server works every silo's control variate out from its model",
    "fednova": "its weights depend on steps that only the silo can vouch for",
}
"""Reasons why strategies cannot work from a sum."""
_RATED = ("fedavgm", "fedopt", "fedadam", "fedyogi", "fedadagrad")


@dataclass(frozen=True)
class StrategyOptions:
    """A strategy, and how its aggregate θ~ becomes the next model θ.

    `server` is one of: `average`, θ~ itself; Flower's `momentum`, `adam`, `yogi`, `adagrad` on θ~ − θ;
    `convex`, (1 − m) θ~ + m θ with m = `momentum`; `halving`, θ + 2^−t (θ~ − θ), an ablation. `rate` is the
    server's learning rate if it has one (by default Flower's).
    """

    name: Name = "fedrisk"
    server: Server | None = None
    """By default momentum for the sound fedrisk, average for the others."""
    momentum: float | None = None
    """m of the server's momentum or convex step; by default 0.9, but see `for_queries`."""
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
        """Whether this is fedrisk in sound mode, not as printed."""
        return self.name == "fedrisk" and self.risk.mode == "sound"

    @property
    def step(self) -> Server:
        """The server's step from the aggregate, with the default filled in."""
        return self.server or ("momentum" if self.sound_risk else "average")

    def for_queries(self, count: int) -> StrategyOptions:
        """Return the strategy with the server momentum for `count` training queries, unless it is configured.

        Momentum m adds up to 1/(1 − m) steps, which overfits few queries. The sound fedrisk has 0 up to
        `FEW_QUERIES`, `MOMENTUM` from `MANY_QUERIES` on, and a proportional value in between.
        """
        if self.momentum is not None or not self.sound_risk or self.step != "momentum":
            return self
        share = (count - FEW_QUERIES) / (MANY_QUERIES - FEW_QUERIES)
        return replace(self, momentum=round(MOMENTUM * min(1.0, max(0.0, share)), 6))

    @property
    def share(self) -> float:
        """Share of the previous step in the next one (momentum), or of the previous model (convex)."""
        return MOMENTUM if self.momentum is None else self.momentum

    @property
    def optimiser(self) -> str:
        """The server's optimiser: `average`, or the Flower optimiser of the strategy or the server step."""
        own = {"fedavgm": "momentum", "fedadam": "adam", "fedyogi": "yogi", "fedadagrad": "adagrad"}
        return own.get(self.name, self.step)

    @property
    def optimiser_options(self) -> dict[str, float]:
        """Options for Flower's optimiser, by Flower's names; its defaults apply otherwise."""
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
        """Options for Flower's mean, by Flower's names."""
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
        """The known faults of the strategy with these settings, by number."""
        return self.risk.faults() if self.name == "fedrisk" else {}

    @property
    def mixes_memory(self) -> bool:
        """Whether the previous model is a term of the strategy's own formula."""
        return self.name == "fednova" or (self.name == "fedrisk" and self.risk.mode == "paper")

    @property
    def report(self) -> str:
        """Kind of report that silos must send beside their model: none, "quantile" or "batch"."""
        return self.risk.columns if self.name == "fedrisk" and self.risk.columns != "probe" else ""


@dataclass(frozen=True, slots=True)
class Local(LocalTraining):
    """Local training in a round. These defaults were chosen, with the server's, on validation queries."""

    learning_rate: float = 3e-3
    weight_decay: float = 1.0


@dataclass(frozen=True)
class Model:
    """The ranker: a network with these hidden layers (none: linear) over scaled features."""

    hidden: tuple[int, ...] = (32,)
    scaling: str = "log-zscore"
    scoring: Scoring = "expected"
    """Rule that turns a graded classifier's outputs into a score; `argmax` is the paper's."""


@dataclass(frozen=True)
class PrivateUpdates:
    """Differentially private updates, clipped to length `clip`, with Gaussian noise of `multiplier` × `clip`.

    With `silo`, every silo adds the noise to its own update, which protects it from the coordinator too. With
    `server`, the server adds it to the sum, which does not protect from the coordinator but needs √n times
    less noise.
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
    """A silo's minimum protection, whatever a coordinator proposes: updates no longer than `clip`, with noise
    of at least `multiplier` × their clip, added by the silo itself, and an ε stated at a δ no larger than
    `delta`."""

    clip: float
    multiplier: float
    delta: float = 1e-5

    def tightened(self, proposed: PrivateUpdates | None) -> PrivateUpdates:
        """Return the stricter of proposal and floor, value by value."""
        if proposed is None:
            return PrivateUpdates(self.clip, self.multiplier, delta=self.delta)
        return PrivateUpdates(
            min(proposed.clip, self.clip),
            max(proposed.multiplier, self.multiplier),
            delta=min(proposed.delta, self.delta),
        )


@dataclass(frozen=True)
class Rounds:
    """Number of rounds, participation of silos, and handling of failures."""

    count: int = 100
    silos: int | None = None
    """Number of silos asked in a round; by default `PER_ROUND`, or all if there are fewer."""
    minimum: int = 1
    """Number of usable answers that a round needs."""
    attempts: int = 3
    """Number of attempts at a round, each with a new sample of silos, before it has failed."""
    failed: Literal["stop", "skip"] = "stop"
    """Effect of a failed round: `stop` ends training (resumable), `skip` keeps the previous model."""
    deadline: float = 600.0
    """Seconds that a silo has to answer."""
    grace: float | None = None
    """Seconds left to other silos once the fewest needed have answered; None waits until the deadline."""
    norm_limit: float = 10.0
    """Longest accepted update, as a multiple of max(1, ‖θ‖, the others' lower quartile, the silos' noise)."""
    count_limit: float = 10.0
    """Most examples counted for a silo, as a multiple of what two thirds of silos do not exceed."""
    patience: int | None = None
    """Number of rounds without a better validation measure after which training stops."""
    release: Literal["last", "best", "polyak"] = "polyak"
    """Model to save: of the last round, of the best on validation, or an average over rounds."""

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
"""Measure on validation after every round; queries without a relevant document do not count."""


@dataclass(frozen=True)
class Config:
    """Configuration of a training run: data, silos, rounds, strategy, local training, model, protection."""

    retired: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "faults": "faults are given to isthmus_reproduce.faults.FaultyConfig now",
            "engine": "it is called runtime now",
        }
    )
    """Keys of the previous release, empty in its run folders, with the advice for a file that sets one."""
    data: str = "synthetic"
    seed: int = 0
    fold: int = 0
    dealing: Dealing = field(default_factory=Dealing)
    rounds: Rounds = field(default_factory=Rounds)
    strategy: StrategyOptions = field(default_factory=StrategyOptions)
    local: LocalTraining = field(default_factory=Local)
    model: Model = field(default_factory=Model)
    probe: int | Literal["validation"] | Path | None = "validation"
    """Judged queries of the coordinator: its validation queries, so many training queries, a file or none."""
    privacy: PrivateUpdates | None = None
    secure: bool = False
    """Let the coordinator see only the weighted sum of the silos' models."""
    judge: Literal["server", "silos"] | None = None
    """Party that scores models on the probe: the server, which must see them, or the silos under `secure`."""
    ledgers: Path | None = None
    """Folder in which simulated silos keep ledgers of their releases, as real ones do; by default none."""
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
        """Statement of who can see the silos' models, for every record."""
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
