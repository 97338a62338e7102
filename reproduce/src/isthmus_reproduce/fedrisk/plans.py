"""Every training run of the FedRisk reproduction, by name.

Paper mode is as printed: rows dealt by grade, which splits queries between silos; features scaled per query;
a linear model under cross-entropy, plain SGD, five local epochs, batches of 64; the last round's model. How
documents are scored is not printed: here by their expected grade, with the most probable grade (argmax) as
rows of their own. Sound mode deals whole queries, by their highest grade, and otherwise trains as the product
does: LambdaRank, one epoch, an average over rounds. Settings that the paper does not state are the same in
all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from isthmus.federation import PER_ROUND, FedRisk, Local, Model, Rounds, StrategyOptions
from isthmus.partition import Dealing, silos_for
from isthmus.rankers import LocalTraining
from isthmus.tables import Fold
from isthmus_reproduce.faults import Fault, FaultyConfig

Mode = Literal["paper", "sound"]
MODES: tuple[Mode, Mode] = ("paper", "sound")
ARGMAX: Literal["argmax"] = "argmax"
"""Scores documents by their most probable grade, which the paper does for training errors."""

CUTS = ("nDCG@1", "nDCG@5", "nDCG@10", "MRR@1", "MRR@5", "MRR@10")
MEASURES: Mapping[str, str] = {
    **{name: f"{name}(empty=skip)" for name in CUTS},
    **{f"{name}(rel=2)": f"{name}(rel=2, empty=skip)" for name in CUTS[3:]},
}
"""Reported measures with their full form: queries without relevant documents do not count."""

PAIRS = ((0.9, 0.1), (0.1, 0.9), (0.5, 0.5), (1.0, 0.0), (1.0, 1.0))
"""(alpha_mix, beta_mix) of Figure 5."""
DEPTHS: Mapping[str, tuple[int, ...]] = {
    "linear": (),
    "one hidden layer": (64,),
    "two hidden layers": (64, 32),
}
ATTACK = Fault("invert", 0.3)
ALIKE = 100.0
"""Concentration of the paper's IID deal, which is not printed."""
GEORISK = "GeoRisk of probe errors"
"""The row that weighs silos by GeoRisk and otherwise equals the product's."""
_GEORISK = FedRisk(formula="georisk")


@dataclass(frozen=True)
class Protocol:
    """Numbers of silos, rounds, folds and seeds, and the amount of data."""

    silos: int = 100
    per_round: int = 10
    rounds: int = 100
    folds: int = 5
    seeds: int = 1
    concentration: float = 0.1
    """Concentration of the paper's deal over rows; the deal over queries has 0.3."""
    least: int = 10
    """Least rows of a silo in that deal."""
    queries: int | None = None
    """Training queries of a fold; None for all."""
    growth: int = 100
    """Rounds of the runs that show the effect of alpha_mix = beta_mix = 1."""

    @property
    def description(self) -> str:
        """The numbers in words, for titles."""
        seeds = f" × {self.seeds} seeds" if self.seeds > 1 else ""
        some = "" if self.queries is None else f", the first {self.queries} training queries of a fold"
        return (
            f"{self.silos} silos, {self.per_round} a round, {self.rounds} rounds,"
            f" {self.folds} folds{seeds}{some}"
        )


def protocol_for(fold: Fold, scale: str, *, folds: int) -> Protocol:
    """Return the paper's protocol if the data are large enough for 100 silos, otherwise a smaller one with as
    many silos, and as many per round, as `isthmus train` has.

    The paper has one seed; small folds, which share their rows, have three.
    """
    whole = Protocol(folds=folds)
    if fold.train.rows < 300_000:  # too few rows for ten in every silo at concentration 0.1
        whole = replace(whole, concentration=0.3, least=1)
    silos = silos_for(len(fold.train))
    if silos < whole.silos:
        whole = replace(whole, silos=silos, per_round=min(PER_ROUND, silos), rounds=60, seeds=3)
    if scale == "full":
        return whole
    looked = min(300, len(fold.train))
    silos = silos_for(looked)
    return replace(
        whole,
        silos=silos,
        per_round=min(PER_ROUND, silos),
        rounds=10,
        growth=60,
        folds=min(2, folds),
        seeds=1,
        concentration=0.3,
        least=1,
        queries=looked if looked < len(fold.train) else None,
    )


@dataclass(frozen=True)
class Plan:
    """The settings of one training run."""

    mode: Mode
    config: FaultyConfig
    seeds: int = 1
    """Number of seeds."""
    honest: bool = False
    """Whether the silos that the attack would strike are left out."""
    curve: bool = True
    """Whether a figure shows its measure on test queries after every round."""
    cuts: bool = False
    """Whether nDCG@1 and nDCG@5 are shown too, for the curves of Figures 2 and 4."""


@dataclass(frozen=True)
class RunName:
    """The name of a training run: table or figure, mode, and the row and variant there."""

    table: str
    mode: Mode
    row: str
    variant: str = ""


@cache
def plans(protocol: Protocol) -> Mapping[RunName, Plan]:
    """Return every run by name."""
    all_plans: dict[RunName, Plan] = {}
    for mode in MODES:
        all_plans |= _table_1(protocol, mode)
        all_plans |= _figure_2(protocol, mode)
        all_plans |= _figure_5(protocol, mode)
    return all_plans | _ours(protocol) | _ablations(protocol) | _attacked(protocol)


def _config(protocol: Protocol, mode: Mode, strategy: StrategyOptions) -> FaultyConfig:
    return _paper(protocol, strategy) if mode == "paper" else _sound(protocol, strategy)


def _sound(protocol: Protocol, strategy: StrategyOptions) -> FaultyConfig:
    return FaultyConfig(
        dealing=Dealing("dirichlet-query", silos=protocol.silos, concentration=0.3),
        rounds=Rounds(count=protocol.rounds, silos=protocol.per_round),
        strategy=strategy,
        measures=(),
        workers=1,
    )


def _paper(protocol: Protocol, strategy: StrategyOptions, hidden: tuple[int, ...] = ()) -> FaultyConfig:
    return FaultyConfig(
        dealing=Dealing(
            "dirichlet-pair",
            silos=protocol.silos,
            concentration=protocol.concentration,
            least=protocol.least,
            redraws=2000,
        ),
        rounds=Rounds(count=protocol.rounds, silos=protocol.per_round, release="last"),
        strategy=strategy,
        local=paper_training(5),
        model=Model(hidden, scaling="none"),
        probe=None,
        measures=(),
        workers=1,
    )


def paper_training(epochs: int) -> LocalTraining:
    """Return the training of the paper's clients, as far as printed; its centralised row trains alike."""
    return LocalTraining(loss="cross_entropy", optimiser="sgd", learning_rate=0.01, batch=64, epochs=epochs)


RATES = {"FedAdam": 0.03, "FedYogi": 0.03, "FedAdagrad": 0.03}
"""Server learning rates of sound mode, chosen on validation queries; paper mode has Flower's defaults."""


def strategies(mode: Mode) -> dict[str, StrategyOptions]:
    """Return Table 1's federated rows. FedAvgM is Flower's default, without momentum."""
    rates = RATES if mode == "sound" else {}
    printed = mode == "paper"
    risk = FedRisk.paper() if printed else _GEORISK
    return {
        "FedRisk": StrategyOptions("fedrisk", server=None if printed else "average", risk=risk),
        "FedAvgM": StrategyOptions("fedavgm", momentum=0.0),
        "FedProx": StrategyOptions("fedprox", proximal=0.9),
        "FedOpt": StrategyOptions("fedopt"),
        "FedTrimmedAvg": StrategyOptions("fedtrimmedavg"),
        "FedAvg": StrategyOptions("fedavg"),
        "FedAdam": StrategyOptions("fedadam", rate=rates.get("FedAdam")),
        "FedMedian": StrategyOptions("fedmedian"),
        "FedYogi": StrategyOptions("fedyogi", rate=rates.get("FedYogi")),
        "FedAdagrad": StrategyOptions("fedadagrad", rate=rates.get("FedAdagrad")),
    }


def _table_1(protocol: Protocol, mode: Mode) -> dict[RunName, Plan]:
    plotted = ("FedAvg", "FedProx", "FedRisk")
    plans = {
        RunName("1", mode, row): Plan(
            mode, _config(protocol, mode, strategy), protocol.seeds, curve=row in plotted, cuts=row in plotted
        )
        for row, strategy in strategies(mode).items()
    }
    momentum = _config(protocol, mode, StrategyOptions("fedavgm"))
    plans[RunName("1", mode, "FedAvgM", "momentum 0.9")] = Plan(mode, momentum, protocol.seeds, curve=False)
    return plans


def _ours(protocol: Protocol) -> dict[RunName, Plan]:
    """Return the product's default, its controls, and strategies that the paper only discusses."""
    default = _sound(protocol, StrategyOptions())
    plain = Local(optimiser="sgd", learning_rate=0.1, weight_decay=0.0)
    rows = {
        "default": default,
        GEORISK: replace(default, strategy=StrategyOptions(risk=_GEORISK)),
        "mean probe error": replace(default, strategy=_without_georisk()),
        "FedAvg with the probe": replace(default, strategy=StrategyOptions("fedavg-probe")),
        "SCAFFOLD": replace(default, strategy=StrategyOptions("scaffold"), local=plain),
        "FedNova": replace(default, strategy=StrategyOptions("fednova"), local=plain),
    }
    return {
        RunName("1", "sound", row): Plan("sound", config, protocol.seeds, curve=False)
        for row, config in rows.items()
    }


def _without_georisk() -> StrategyOptions:
    return StrategyOptions(risk=FedRisk(formula="mean"))


def _figure_2(protocol: Protocol, mode: Mode) -> dict[RunName, Plan]:
    """Return FedAvg with IID silos; the other curve is Table 1's."""
    config = _config(protocol, mode, StrategyOptions("fedavg"))
    return {RunName("fig2", mode, "FedAvg", "IID"): Plan(mode, _alike(config, mode), cuts=True)}


def _alike(config: FaultyConfig, mode: Mode) -> FaultyConfig:
    """Make silos alike: as printed, by a Dirichlet draw over rows with a large concentration."""
    if mode == "paper":
        return replace(config, dealing=replace(config.dealing, concentration=ALIKE))
    return replace(config, dealing=Dealing("query", silos=config.dealing.silos))


def _figure_5(protocol: Protocol, mode: Mode) -> dict[RunName, Plan]:
    """Return mixes with the previous model, with half the silos a round; in sound mode they are convex.

    In sound mode, (1, 1) is replaced by the server's momentum: a memory that does not let the parameters
    grow.
    """
    fewer = replace(protocol, per_round=(protocol.per_round + 1) // 2)
    rows: dict[str, FaultyConfig] = {}
    for alpha, beta in PAIRS:
        if mode == "paper":
            strategy = StrategyOptions(risk=FedRisk.paper(alpha, beta))
        elif alpha + beta > 1:
            strategy = StrategyOptions(risk=_GEORISK)
        else:
            server: Literal["convex", "average"] = "convex" if beta else "average"
            strategy = StrategyOptions(server=server, momentum=beta, risk=_GEORISK)
        rows[f"({alpha:g}, {beta:g})"] = _config(fewer, mode, strategy)
    plans = {RunName("fig5", mode, "FedRisk", pair): Plan(mode, config) for pair, config in rows.items()}
    average = _config(fewer, mode, StrategyOptions("fedavg"))
    plans[RunName("fig5", mode, "FedAvg", "IID")] = Plan(mode, _alike(average, mode))
    prox = _config(fewer, mode, StrategyOptions("fedprox", proximal=0.9))
    plans[RunName("fig5", mode, "FedProx")] = Plan(mode, prox)
    return plans


def _ablations(protocol: Protocol) -> dict[RunName, Plan]:
    """Return ablations of alpha_mix = beta_mix = 1, which explain the paper's flat curves.

    The last two explain why the curves freeze, which only the linear model's do.
    """
    longer = replace(protocol, rounds=protocol.growth)
    rows = {
        "(1, 1)": StrategyOptions(risk=FedRisk.paper()),
        "(1, 1) without risk": StrategyOptions(risk=FedRisk.paper(formula="none")),
        "FedAvg": StrategyOptions("fedavg"),
        "(1, 1) renormalised": StrategyOptions(risk=FedRisk.paper(renormalise=True)),
        "FedAvg, server step 2^-t": StrategyOptions("fedavg", server="halving"),
    }
    return {
        RunName("A3", "paper", row, depth): Plan("paper", _paper(longer, strategy, hidden))
        for depth, hidden in DEPTHS.items()
        for row, strategy in list(rows.items())[: None if depth == "linear" else 3]
    }


def _attacked(protocol: Protocol) -> dict[RunName, Plan]:
    """Return the runs in which three silos in ten have inverted grades."""
    clean = _sound(protocol, StrategyOptions("fedavg"))
    rows = {
        "FedAvg": StrategyOptions("fedavg"),
        "FedTrimmedAvg": StrategyOptions("fedtrimmedavg"),
        "FedMedian": StrategyOptions("fedmedian"),
        "FedRisk": StrategyOptions(server="average", risk=_GEORISK),
        "default": StrategyOptions(),
        GEORISK: StrategyOptions(risk=_GEORISK),
        "mean probe error": _without_georisk(),
        "FedAvg with the probe": StrategyOptions("fedavg-probe"),
    }
    plans = {
        RunName("attack", "sound", row): Plan(
            "sound", replace(clean, strategy=strategy, faults=(ATTACK,)), protocol.seeds, curve=False
        )
        for row, strategy in rows.items()
    }
    for row in ("FedAvg", "default"):
        config = replace(clean, strategy=rows[row])
        plan = Plan("sound", config, protocol.seeds, honest=True, curve=False)
        plans[RunName("attack", "sound", f"{row}, honest silos only")] = plan
    return plans


def all_bad(protocol: Protocol) -> Mapping[str, FaultyConfig]:
    """Return the rows for rounds in which every silo is bad, configured for the good rounds before them."""
    rows = {
        "FedAvg": StrategyOptions("fedavg"),
        "FedMedian": StrategyOptions("fedmedian"),
        "FedRisk": StrategyOptions(server="average", risk=_GEORISK),
        "FedRisk without memory": StrategyOptions(server="average", risk=replace(_GEORISK, memory=False)),
        "default": StrategyOptions(),
        "default without memory": StrategyOptions(risk=FedRisk(memory=False)),
    }
    start = replace(protocol, rounds=max(2, protocol.rounds // 2))
    return {row: _sound(start, strategy) for row, strategy in rows.items()}
