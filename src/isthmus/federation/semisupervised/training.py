"""The four ways to train on silos' judged pairs and on pairs across silos that nobody judged.

    Local      every silo on its own judged pairs
    Local+     also on its own cross pairs, labelled by its own model from the labelling before
    Global     one federated model on all silos' judged pairs
    CS-F-LTR   the average of the local models labels all silos' cross pairs, and is the start of federated
               training on judged and labelled pairs

Federated training uses the same rounds, strategies, runtimes, checks and checkpoints as elsewhere in Isthmus.
A silo's labels are made in the silo, when the coordinator sends it a labeller, and stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus import rankers
from isthmus.config import load, to_mapping
from isthmus.errors import ConfigError
from isthmus.features import FIELDS, NAMES
from isthmus.federation import members
from isthmus.federation.aggregation import combine
from isthmus.federation.clients import Book, client_app, no_book
from isthmus.federation.flower import ArrayRecord, ClientApp, Context, Grid, Message, MessageType
from isthmus.federation.messages import ARRAYS, answer, order, pack, settings_of, unpack
from isthmus.federation.rounds import Coordinator, HeldOut, RoundRecord, State
from isthmus.federation.runtimes import run_in
from isthmus.federation.semisupervised.labelling import Guesses, Labelling, SiloRows, guess, joint_rows, mixed
from isthmus.federation.settings import Config, Model, Rounds, StrategyOptions
from isthmus.partition import Dealing
from isthmus.randomness import Streams
from isthmus.tables import Letor

LABEL = f"{MessageType.QUERY}.label"
"""Type of the message that brings a silo a labeller."""
_GUESSES = "guesses"

Remember = Callable[[State], None]
Array = NDArray[Any]

MEAN = StrategyOptions("fedtrimmedavg", trim=0.0)
"""The unweighted mean of the silos' models, which is the paper's aggregation."""


@dataclass(frozen=True)
class Anchor:
    """Prior to which a model is drawn if judged queries are few: the average of models that silos train alone
    on some features, BM25 of title and body by default.

    The result is λ·(the trained model) + (1 − λ)·(that average) with λ = n/(n + `queries`) for n judged
    queries of all silos: at n = `queries` both have the same weight.
    """

    queries: float = 40.0
    columns: tuple[int, ...] = tuple(NAMES.index(f"{name}.BM25") for name in FIELDS)

    def __post_init__(self) -> None:
        if not (self.queries >= 0 and self.columns and min(self.columns) >= 0):
            raise ConfigError("queries ≥ 0, and columns to stand on", key="anchor", value=self.queries)

    def muted(self, scaling: rankers.Scaling) -> rankers.Scaling:
        """Return the scaling under which all other features are 0."""
        if max(self.columns) >= scaling.width:
            raise ConfigError(
                f"features {self.columns} (from 0) to stand on, where rows have {scaling.width}", key="anchor"
            )
        mask = np.isin(np.arange(scaling.width), self.columns)
        if scaling.mean is None or scaling.factor is None:
            mean, factor = np.zeros(scaling.width, np.float32), np.ones(scaling.width, np.float32)
        else:
            mean, factor = scaling.mean, scaling.factor
        return replace(scaling, mean=mean, factor=np.where(mask, factor, 0).astype(np.float32))

    def drawn(
        self, model: Mapping[str, Array], plain: Mapping[str, Array], judged: int
    ) -> rankers.Parameters:
        """Return the linear model between a trained one and the plain one, for a number of judged queries."""
        mask = np.isin(np.arange(len(plain["weight0"])), self.columns)[:, None]
        bare = dict(plain) | {"weight0": np.where(mask, plain["weight0"], 0).astype(np.float32)}
        share = judged / (judged + self.queries) if judged else 0.0
        return combine({"0": share, "1": 1 - share}, {"0": dict(model), "1": bare})


@dataclass(frozen=True)
class CoTraining:
    """Options of co-training.

    - `model`: "classification" is a softmax over grades scored by the expected grade, "regression" least
      squares; "pairwise" (RankNet), "listwise" (softmax over a list) and "lambdarank" are rankers of lists;
      all linear unless `hidden` has layers;
    - `local_epochs`: passes of a silo that trains alone, before models are averaged; a round of federated
      training has `epochs`;
    - `updates`: "parallel" asks all silos in a round, "serial" one after another (Algorithm 3 allows both);
    - `strategy`: the aggregation of models; the paper's is their plain mean;
    - `anchor`: the prior to which the model is drawn if judged queries are few.
    """

    labelling: Labelling | None = None
    model: Literal["classification", "regression", "pairwise", "listwise", "lambdarank"] = "classification"
    hidden: tuple[int, ...] = ()
    scaling: str = "log-zscore"
    local_epochs: int = 60
    rounds: int = 20
    epochs: int = 3
    learning_rate: float = 0.01
    batch: int | None = None
    weight_decay: float = 1e-4
    updates: Literal["parallel", "serial"] = "parallel"
    strategy: StrategyOptions = field(default_factory=lambda: MEAN)
    anchor: Anchor | None = None
    secure: bool = False
    """Add models up under masks; the mean then weighs silos by their examples."""
    runtime: Literal["in-process", "ray"] = "in-process"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in _LOSSES:
            raise ConfigError(f"no model {self.model!r}", key=self.model, known=_LOSSES)
        if self.updates not in ("parallel", "serial"):
            raise ConfigError(f"no updates {self.updates!r}", key=self.updates, known=("parallel", "serial"))
        if self.anchor is not None and (self.hidden or self.model in LISTS):
            raise ConfigError("only linear models of grades are drawn to an anchor", key="anchor")
        labelling = self.labelling
        guessing = labelling is not None and labelling.asks and not labelling.calibrated
        if self.model in LISTS and guessing:
            raise ConfigError(
                "a ranker of lists gives scores and no chances (choose labels that are calibrated)",
                key="model",
            )

    def local(self, epochs: int, *, silos: int = 1) -> rankers.LocalTraining:
        """Return the local training of a silo for a number of epochs.

        A step uses a batch of judged rows and, with labelled cross rows, one more batch for every other silo:
        an epoch then has as many steps with them as without.
        """
        lists = self.model in LISTS
        batches = silos if self.labelling is not None and not lists else 1
        return rankers.LocalTraining(
            loss=_LOSSES[self.model],
            learning_rate=self.learning_rate,
            epochs=epochs,
            batch=(self.batch or (8 if lists else 200)) * batches,
            weight_decay=self.weight_decay,
            truncation=20 if self.model == "lambdarank" else None,
        )

    def rounds_of(self, silos: int, count: int) -> Config:
        """Return the configuration of federated training over a number of silos, up to round `count`."""
        sampled = silos if self.updates == "parallel" else 1
        return Config(
            seed=self.seed,
            dealing=Dealing(silos=silos),
            rounds=Rounds(count=count, silos=sampled, release="last", norm_limit=1e6),
            strategy=self.summable(self.strategy),
            secure=self.secure,
            local=self.local(self.epochs, silos=silos),
            model=Model(hidden=self.hidden, scaling=self.scaling),
            probe=1 if self.strategy.needs_probe else None,  # the probe itself is in `held_out`
            workers=1,
        )

    def summable(self, strategy: StrategyOptions) -> StrategyOptions:
        """Return the strategy; FedAvg for the coordinate-wise mean, which a secure sum cannot compute."""
        return StrategyOptions("fedavg") if self.secure and strategy == MEAN else strategy


LISTS = ("pairwise", "listwise", "lambdarank")
"""Models that rank lists: they give scores, not probabilities."""
_LOSSES = {
    "classification": "cross_entropy",
    "regression": "squared_error",
    "pairwise": "ranknet",
    "listwise": "softmax",
    "lambdarank": "lambdarank",
}


@dataclass(frozen=True, eq=False)
class CoTrained:
    """A trained model, with its scaling, training options and history."""

    parameters: rankers.Parameters
    scaling: rankers.Scaling
    local: rankers.LocalTraining
    history: tuple[RoundRecord, ...] = ()

    @property
    def ranker(self) -> rankers.MLP:
        """The model as a ranker."""
        return rankers.MLP.of(self.parameters, self.scaling, training=self.local)


def fitted_scaling(silos: Sequence[SiloRows], kind: str) -> rankers.Scaling:
    """Fit the scaling of all silos' judged rows, from sums."""
    stats = [rankers.ScalingStats.of(silo.labelled, kind) for silo in silos if silo.labelled.rows]
    return rankers.Scaling.fit(kind, sum(stats[1:], stats[0]))


def scaled(silo: SiloRows, scaling: rankers.Scaling) -> SiloRows:
    """Return a silo's rows with their features scaled."""
    return SiloRows(scaling(silo.labelled), scaling(silo.cross), silo.errors)


def local_models(
    silos: Sequence[SiloRows],
    config: CoTraining,
    scaling: rankers.Scaling,
    *,
    grades: int,
    names: Sequence[str] | None = None,
) -> list[rankers.Parameters]:
    """Train `Local`: one model per silo, all from the same start, which silos without judged pairs keep.

    The random draws are those of a federation's first round in which silos of these names train alone.
    """
    called = names or simulated_names(len(silos))
    local = config.local(config.local_epochs)
    start = first_model(config, scaling, grades)
    models = []
    for at, silo in enumerate(silos):
        rng = Streams(config.seed)("round", 1, "silo", called[at])
        rows = scaling(silo.labelled)
        models.append(rankers.train_epochs(start, rows, local, rng).parameters if rows.rows else start)
    return models


def self_taught(
    models: Sequence[rankers.Parameters],
    silos: Sequence[SiloRows],
    config: CoTraining,
    scaling: rankers.Scaling,
    *,
    grades: int,
) -> list[rankers.Parameters]:
    """Train `Local+`: every silo continues from its own model, on cross pairs that this model labelled."""
    labelling = config.labelling or Labelling()
    local = config.local(max(1, config.local_epochs // labelling.rounds), silos=len(silos))
    trained = []
    for at, (model, silo) in enumerate(zip(models, silos, strict=True)):
        rows, guesses = scaled(silo, scaling), None
        for number in range(labelling.rounds if rows.labelled.rows else 0):
            guesses = mixed(guesses, guess(model, rows, labelling, grades), labelling.refresh)
            rng = Streams(config.seed)("alone, again", at, number)
            model = rankers.train_epochs(
                model, joint_rows(rows, guesses, labelling.beta), local, rng
            ).parameters
        trained.append(model)
    return trained


def averaged(models: Sequence[rankers.Parameters]) -> rankers.Parameters:
    """Return the unweighted mean of models: the labeller, and the start of CS-F-LTR."""
    names = [f"{at:04d}" for at in range(len(models))]
    return combine(dict.fromkeys(names, 1 / len(models)), dict(zip(names, models, strict=True)))


def first_model(config: CoTraining, scaling: rankers.Scaling, grades: int) -> rankers.Parameters:
    """Return the model from which every silo starts, drawn by the seed."""
    outputs = config.local(1).resolved_loss().outputs(grades)
    return rankers.initial_parameters(scaling.width, config.hidden, outputs, Streams(config.seed)("init"))


class Sources(Protocol):
    """Access to a silo's rows."""

    def name(self, context: Context) -> str: ...

    def labelled(self, context: Context) -> Letor: ...

    def rows(self, context: Context) -> SiloRows: ...


def simulated_names(silos: int) -> list[str]:
    """`silo-0`, `silo-1`, …, with zeros so that names sort like numbers."""
    return [f"silo-{at:0{len(str(silos - 1))}}" for at in range(silos)]


class InMemory:
    """Simulated silos in memory, by partition."""

    def __init__(self, silos: Sequence[SiloRows], names: Sequence[str] | None = None) -> None:
        self._silos = list(silos)
        self._names = list(names or simulated_names(len(self._silos)))

    def name(self, context: Context) -> str:
        """The name of the partition's silo."""
        return self._names[int(context.node_config["partition-id"])]

    def labelled(self, context: Context) -> Letor:
        """The judged rows of the partition."""
        return self.rows(context).labelled

    def rows(self, context: Context) -> SiloRows:
        """The rows of the partition."""
        return self._silos[int(context.node_config["partition-id"])]


class Studied:
    """Access to a silo's training rows: judged rows and, once a labeller has come, cross rows under the
    guesses that the silo stores in its own context."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._cache: dict[str, tuple[tuple[ArrayRecord | None, bytes], Letor]] = {}

    def name(self, context: Context) -> str:
        """The silo's name."""
        return self._sources.name(context)

    def table(self, context: Context) -> Letor:
        """The judged rows, from which the silo describes itself."""
        return self._sources.labelled(context)

    def scaled(self, context: Context, scaling: rankers.Scaling) -> Letor:
        """The training rows under the current guesses."""
        name, record = self.name(context), context.state.array_records.get(_GUESSES)
        under = b"".join(array.tobytes() for array in scaling.arrays().values())
        cached = self._cache.get(name)
        if cached is None or cached[0][0] is not record or cached[0][1] != under:
            cached = (record, under), self._training_rows(context, scaling, record)
            self._cache[name] = cached
        return cached[1]

    def _training_rows(self, context: Context, scaling: rankers.Scaling, record: ArrayRecord | None) -> Letor:
        if record is None:
            return scaling(self._sources.labelled(context))
        stored = unpack(record)
        rows = scaled(self._sources.rows(context), scaling)
        return joint_rows(rows, Guesses(stored["chances"], stored["weights"]), float(stored["beta"]))

    def label(self, message: Message, context: Context) -> Message:
        """Label the cross rows by the model in the message, or only change β."""
        settings, records = settings_of(message), message.content.array_records
        scaling = rankers.Scaling.from_arrays(
            settings["scaling"], int(settings["width"]), unpack(records["scaling"])
        )
        labelling = load(Labelling, settings["labelling"])
        rows = scaled(self._sources.rows(context), scaling)
        old = context.state.array_records.get(_GUESSES)
        stored = None if old is None else unpack(old)
        guesses = None if stored is None else Guesses(stored["chances"], stored["weights"])
        if settings["anew"] or guesses is None:
            fresh = guess(unpack(records[ARRAYS]), rows, labelling, int(settings["grades"]))
            guesses = mixed(guesses, fresh, labelling.refresh)
        beta = np.array(settings["beta"], np.float64)
        stored = {"chances": guesses.probabilities, "weights": guesses.weights, "beta": beta}
        context.state[_GUESSES] = pack(stored)
        return answer(message, {"labelled": int((guesses.weights > 0).sum())})


def studying_app(
    sources: Sources, *, book: Book = no_book, trusts: members.Trusts = members.anybody
) -> ClientApp:
    """Build the ClientApp of silos that label their cross pairs; without a labeller they train as usual."""
    studied = Studied(sources)
    app = client_app(studied, book=book, trusts=trusts)

    @app.query("label")
    def label(message: Message, context: Context) -> Message:
        return studied.label(message, context)

    return app


class RoundRobin(Coordinator):
    """Coordinator with one silo per round, in the order of their names."""

    def _sample(self, number: int, attempt: int) -> dict[int, str]:
        present = self.registration.gather(self.grid, self.config.rounds.minimum)
        name = list(present)[(number + attempt - 2) % len(present)]
        return {present[name]: name}


@dataclass(frozen=True, eq=False)
class Conductor:
    """The coordinator's side: when to label and with which model, and the federated rounds in between."""

    config: CoTraining
    grades: int
    held_out: HeldOut = field(default_factory=HeldOut)
    silos: int | None = None
    """Number of silos to wait for; by default those that are connected."""

    def run(self, grid: Grid, start: State | None, remember: Remember) -> State:
        """Train from the first model to the last round, on any grid."""
        silos = self.silos or len(set(grid.get_node_ids()))
        state = start or self._first(grid, silos)
        plain = None if self.config.anchor is None else self._plain(grid, silos, state.scaling)
        begun = False
        for last, beta, anew in self._schedule():
            if last <= state.round:
                continue
            if self.config.labelling is not None:
                self._label(grid, state, self.config.labelling, (beta, anew))
            state = self._coordinator(grid, silos, last, begun).run(state, remember)
            begun = True
        return state if plain is None else replace(state, parameters=plain(state.parameters))

    def _coordinator(self, grid: Grid, silos: int, last: int, begun: bool) -> Coordinator:
        kind, config = self._kind(), self.config.rounds_of(silos, last)
        if begun:  # do not wait for silos that have left since
            there = min(silos, max(1, len(set(grid.get_node_ids()))))
            rounds = replace(config.rounds, silos=min(config.rounds.silos or there, there))
            config = replace(config, dealing=Dealing(silos=there), rounds=rounds)
        return kind(config, self.held_out, grid)

    def _kind(self) -> type[Coordinator]:
        return Coordinator if self.config.updates == "parallel" else RoundRobin

    def _alone(self, grid: Grid, silos: int) -> Coordinator:
        """Return a coordinator for one long round of plain averaging, in which silos train alone."""
        alone = replace(
            self.config.rounds_of(silos, 1),
            local=self.config.local(self.config.local_epochs),
            strategy=self.config.summable(MEAN),
            rounds=Rounds(count=1, silos=silos, release="last", norm_limit=1e6),
        )
        return Coordinator(alone, HeldOut(), grid)

    def _first(self, grid: Grid, silos: int) -> State:
        """Return the average of models that silos trained alone."""
        first = self._alone(grid, silos).run(None, lambda state: None)
        return State(0, first.parameters, first.scaling)

    def _plain(
        self, grid: Grid, silos: int, scaling: rankers.Scaling
    ) -> Callable[[Mapping[str, Array]], rankers.Parameters]:
        """Train silos alone on the anchor's features. Returns a function that draws a model to their mean."""
        anchor, coordinator = self.config.anchor or Anchor(), self._alone(grid, silos)
        muted = anchor.muted(scaling)
        start = State(0, first_model(self.config, muted, self.grades), muted)
        parameters = coordinator.run(start, lambda state: None).parameters
        judged = sum(coordinator.registration.counts(whole_queries=True).values())
        return lambda model: anchor.drawn(model, parameters, judged)

    def _schedule(self) -> list[tuple[int, float, bool]]:
        """Return (last round, β, whether to label anew) for every stretch of training."""
        rounds, labelling = self.config.rounds, self.config.labelling
        if labelling is None:
            return [(rounds, 0.0, False)]
        cuts = {round(rounds * part / labelling.rounds): True for part in range(labelling.rounds)}
        if labelling.ramp is not None:
            low, high = (round(share * rounds) for share in labelling.ramp)
            cuts = dict.fromkeys(range(low, high + 1), False) | cuts
        begins = sorted(cut for cut in cuts if cut < rounds)
        ends = [*begins[1:], rounds]
        return [
            (end, labelling.strength(begin / rounds), cuts[begin])
            for begin, end in zip(begins, ends, strict=True)
        ]

    def _label(self, grid: Grid, state: State, labelling: Labelling, now: tuple[float, bool]) -> None:
        """Send the model to every connected silo; a silo that does not answer trains on the labels it has."""
        beta, anew = now
        settings = {
            "scaling": state.scaling.kind,
            "width": state.scaling.width,
            "grades": self.grades,
            "labelling": to_mapping(labelling),
            "beta": beta,
            "anew": anew,
        }
        content = order(pack(state.parameters), settings, round=state.round)
        content["scaling"] = pack(state.scaling.arrays())
        messages = [Message(content, node, LABEL) for node in sorted(set(grid.get_node_ids()))]
        list(grid.send_and_receive(messages, timeout=Rounds().deadline))


def cotrain(
    silos: Sequence[SiloRows],
    config: CoTraining,
    *,
    grades: int,
    start: State | None = None,
    held_out: HeldOut | None = None,
    remember: Remember = lambda state: None,
    names: Sequence[str] | None = None,
) -> CoTrained:
    """Train `Global` (without a labelling) or `CS-F-LTR` (with one), over a runtime.

    `start` may contain a first model, such as the average of existing local ones.
    """
    conductor = Conductor(config, grades, held_out or HeldOut())

    def rounds(grid: Grid) -> State:
        return conductor.run(grid, start, remember)

    state = run_in(config.runtime, rounds, studying_app(InMemory(silos, names)), len(silos), workers=1)
    return CoTrained(dict(state.parameters), state.scaling, config.local(config.epochs), state.history)
