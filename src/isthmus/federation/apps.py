"""`train(config) -> Training`: the apps, put together and run.

data ── deal ──> silos ──> ClientApp ─┐
  └── probe, validation ──> ServerApp ─┴─ runtime ─> Training
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.corpora import load_folds
from isthmus.errors import ConfigError, DataError, several
from isthmus.evaluation import Evaluation, evaluate
from isthmus.federation.checkpoints import RunFolder
from isthmus.federation.clients import client_app, no_book, simulated_book
from isthmus.federation.flower import Grid, Mod
from isthmus.federation.judge import Judge
from isthmus.federation.plots import curve, result_of, run_page
from isthmus.federation.rounds import Coordinator, HeldOut, RoundRecord, State
from isthmus.federation.runtimes import run_in
from isthmus.federation.settings import LEAST, MODEL, PER_ROUND, Config, StrategyOptions
from isthmus.federation.silo_data import Files, SiloData, Tables
from isthmus.partition import LabelCounts, deal, silos_for
from isthmus.randomness import Streams
from isthmus.rankers import MLP
from isthmus.report import ROWS, Page, Plot, Tabular, preview
from isthmus.tables import Fold, Letor, read_letor

logger = logging.getLogger(__name__)

PROBE, FEW = 40, 10
"""Most queries of the probe; number of validation queries below which training queries are added to it."""
SINGLE = 200
"""Number of validation queries that choose the feature with which a ranker is compared."""


@dataclass(frozen=True, repr=False)
class Training(Tabular):
    """The result of a training run; a notebook shows its rounds."""

    ranker: MLP
    history: tuple[RoundRecord, ...]
    final: Mapping[str, float]
    model_sha256: str
    stopped: str = ""
    out: Path | None = None
    label_counts: LabelCounts | None = None
    """Number of rows of every grade in each simulated silo."""
    evaluation: Evaluation | None = None
    """Measures of `final`, for every query."""
    single: Evaluation | None = None
    """The same for the single feature that is best on validation queries: the baseline of training."""

    @property
    def rounds(self) -> int:
        """The number of rounds that were trained."""
        return len(self.history)

    def to_arrow(self) -> pa.Table:
        """Return one row per round: validation nDCG@10(empty=skip), mean local loss, model length, silos."""
        columns = ("round", "measure", "loss", "norm", "cosine", "attempts", "refused", "seconds")
        numbers = {name: [getattr(record, name) for record in self.history] for name in columns}
        silos = [len(record.asked) for record in self.history]
        rejected = [len(record.rejected) for record in self.history]
        return pa.table(numbers | {"silos": silos, "rejected": rejected})

    def plot(self) -> Plot:
        """Plot nDCG@10(empty=skip) on validation after every round."""
        return curve(self.history)

    def page(self, title: str = "Training") -> Page:
        """Build a page of plots and tables: silos' rows by grade, learning, weights, risks, refusals."""
        result = result_of(self.evaluation, self.single)
        return run_page(self.history, title, result=result, label_counts=self.label_counts)

    def __repr__(self) -> str:
        measures = ", ".join(f"{name} {value:.4f}" for name, value in self.final.items())
        stopped = f", stopped: {self.stopped}" if self.stopped else ""
        return f"Training: {several(self.rounds, 'round')}{stopped}: {measures or 'not measured'}"

    def _repr_html_(self) -> str:
        every = -(-self.rounds // ROWS) or 1  # evenly spaced rounds, with the last one
        rounds = np.arange(self.rounds - 1, -1, -every)[::-1]
        rows = self.to_arrow().take(pa.array(rounds))
        return preview(rows, title=repr(self))


def train(
    config: Config,
    data: Fold | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    probe: Letor | None = None,
    start: State | None = None,
    watch: Callable[[State], None] | None = None,
    spoil: Callable[[list[Letor]], list[Letor]] = list,
    mods: Sequence[Mod] = (),
) -> Training:
    """Train one ranker across silos.

    `data` replaces the collection that `config.data` names, and `probe` the one that `config.probe` names.
    With `out` the run keeps a folder. With `resume` it continues from that folder's last checkpoint, or
    starts over if there is none, and ends bit-identical to a run that was never interrupted. `watch` is
    called with the state after every round. Training may `start` from such a state, under another
    configuration too, as long as the model is the same. For experiments, `spoil` changes the silos' tables,
    and Flower `mods` change their replies.
    """
    check_dealable(config)
    folder = None if out is None else RunFolder(out)
    if folder is not None:
        folder.begin(config)
    fold = data if data is not None else load_fold(config)
    fold, probe = held_back(fold, config) if probe is None else (with_validation(fold, config), probe)
    whole = sized(config, fold.train, probe)
    if folder is not None:
        parts = {"train": fold.train, "validation": fold.validation, "test": fold.test}
        folder.environment(parts if probe is None else {**parts, "probe": probe}, whole)
    if folder is not None and resume:
        start = folder.state(config) or start

    def remember(state: State) -> None:
        if folder is not None:
            folder.save(state, config)
        if watch is not None:
            watch(state)

    dealt = deal(fold.train, whole.dealing, Streams(config.seed))
    tables, held_out = spoil(dealt.parts(fold.train)), HeldOut(fold.validation, probe)
    state = simulate(whole, tables, held_out, start=start, remember=remember, mods=mods)
    parts = {"validation": fold.validation, "test": fold.test}
    trained = finished(whole, state, {name: part for name, part in parts.items() if len(part)}, folder)
    return replace(trained, label_counts=dealt.label_counts(fold.train.grades))


def simulate(
    config: Config,
    tables: list[Letor],
    held_out: HeldOut,
    *,
    start: State | None = None,
    remember: Callable[[State], None],
    mods: Sequence[Mod] = (),
) -> State:
    """Train over silos with these tables, from `start` or anew; in process, the list is emptied."""

    def rounds(grid: Grid) -> State:
        return Coordinator(config, held_out, grid).run(start, remember)

    silos = len(tables)
    with _reachable(tables, config) as silo_data:
        book = no_book if config.ledgers is None else partial(simulated_book, folder=config.ledgers)
        client = client_app(silo_data, book=book, mods=mods)
        return run_in(config.runtime, rounds, client, silos, workers=config.workers)


@contextmanager
def _reachable(tables: list[Letor], config: Config) -> Iterator[SiloData]:
    """Yield the silos' tables where the runtime's workers can read them; in process, the list is emptied."""
    if config.runtime == "in-process":
        silo_data = Tables(tables, scaling=config.model.scaling)
        tables.clear()
        yield silo_data
        return
    with TemporaryDirectory(prefix="isthmus-silos-") as folder:
        yield Files.write(tables, Path(folder))


def check_dealable(config: Config) -> None:
    """Raise ConfigError for a loss over whole queries if the deal splits queries between silos."""
    loss = config.local.resolved_loss()
    if config.dealing.tears and loss.whole_queries:
        raise ConfigError(
            f"the loss {loss.name} compares documents of one query, and dealing {config.dealing.kind!r} tears"
            " queries between silos (deal whole queries, or use a pointwise loss)",
            key="dealing.kind",
            value=config.dealing.kind,
        )


def load_fold(config: Config) -> Fold:
    """Load the fold that the configuration names; ConfigError if there is no such fold."""
    folds = load_folds(config.data, seed=config.seed)
    if not 0 <= config.fold < len(folds):
        raise ConfigError(
            f"{config.data} has {len(folds)} folds, and no fold {config.fold} (the first is 0)", key="fold"
        )
    return folds[config.fold]


def held_back(fold: Fold, config: Config) -> tuple[Fold, Letor | None]:
    """Separate the coordinator's queries from a fold. Returns the fold without them, and the probe, if any.

    A fold without a validation part gets a fifth of its training queries for it. The probe is never used to
    test. Its queries have relevant documents. From validation it takes at most `PROBE`; if these are fewer
    than `FEW`, up to a fifth of the training queries are added.
    """
    wanted = config.probe if config.strategy.needs_probe else None
    if isinstance(wanted, Path):
        return with_validation(fold, config), read_letor(wanted).widened(fold.train.width)
    rng = Streams(config.seed)("probe")
    if isinstance(wanted, int):
        rest, probe = _drawn(fold.train, wanted, rng)
        return with_validation(replace(fold, train=rest), config), probe
    fold = with_validation(fold, config)
    if wanted is None:
        return fold, None
    watched, trained = _relevant(fold.validation), _relevant(fold.train)
    probe = fold.validation[np.sort(rng.choice(watched, min(PROBE, len(watched)), replace=False))]
    if missing := min(max(0, FEW - len(watched)), len(trained) // 5):
        rest, more = _drawn(fold.train, missing, rng)
        probe, fold = Letor.concat([probe, more]) if len(probe) else more, replace(fold, train=rest)
    return fold, probe if len(probe) else None


def with_validation(fold: Fold, config: Config) -> Fold:
    """Return the fold with a fifth of its training queries as validation part, if it has none."""
    count = len(fold.train) // 5
    if len(fold.validation) or not count:
        return fold
    mask = np.zeros(len(fold.train), np.bool_)
    mask[Streams(config.seed)("validation").choice(len(fold.train), size=count, replace=False)] = True
    return replace(fold, train=fold.train[~mask], validation=fold.train[mask])


def _relevant(table: Letor) -> NDArray[np.int64]:
    """Return the positions of queries with a relevant document."""
    return np.unique(table.query_of_row[table.grades > 0])


def _drawn(table: Letor, count: int, rng: np.random.Generator) -> tuple[Letor, Letor]:
    """Take `count` random queries with relevant documents off a table. Returns the rest and these."""
    candidates = _relevant(table)
    if not 0 < count < len(candidates):
        possible = f"at most {len(candidates) - 1} with --probe, or " if len(candidates) > 1 else ""
        raise DataError(
            f"{count} queries cannot be held back of {len(candidates)} that have a relevant document",
            cure=f"hold back {possible}the validation queries, which is the default",
        )
    mask = np.zeros(len(table), np.bool_)
    mask[rng.choice(candidates, size=count, replace=False)] = True
    return table[~mask], table[mask]


def sized(config: Config, letor: Letor, probe: Letor | None) -> Config:
    """Return the configuration with the numbers that follow from the training queries.

    The number of silos is `silos_for` the queries, but no less than are asked in a round or needed by it.
    Without a query for its probe, FedRisk is replaced by weights by size. Raises DataError if no query has a
    relevant document.
    """
    if not len(_relevant(letor)):
        raise DataError(
            f"none of {several(len(letor), 'training query', 'training queries')} has a relevant document",
            cure="bring queries with a grade above 0",
        )
    if config.strategy.needs_probe and probe is None:
        logger.warning("no judged query is left for a probe: silos are weighed by size")
        config = replace(config, strategy=StrategyOptions("fedavg", server="momentum"))
    dealing, rounds = config.dealing, config.rounds
    silos = dealing.silos
    if silos is None and dealing.kind != "site":
        least = max(rounds.minimum, rounds.silos or 1, LEAST if config.secure else 1)
        silos = max(silos_for(len(letor)), least)
    per_round = rounds.silos or (None if silos is None else min(PER_ROUND, silos))
    return replace(
        config,
        dealing=replace(dealing, silos=silos),
        rounds=replace(rounds, silos=per_round),
        strategy=config.strategy.for_queries(len(letor)),
    )


def train_in_folder(
    folder: RunFolder,
    config: Config,
    files: Mapping[str, Path | None],
    rounds: Callable[[Mapping[str, Letor], State | None, Callable[[State], None]], State],
) -> Training:
    """Train over real silos, from the folder's last checkpoint if it has one.

    `files` are the coordinator's own judged queries by part. `rounds` trains with the existing ones, from a
    state or from the beginning, and calls its last argument with the state after every round.
    """
    folder.begin(config)
    tables = {name: read_letor(path) for name, path in files.items() if path is not None}
    folder.environment(tables, config)
    state = rounds(tables, folder.state(config), lambda state: folder.save(state, config))
    return finished(config, state, tables, folder)


def finished(config: Config, state: State, tables: Mapping[str, Letor], folder: RunFolder | None) -> Training:
    """Build a state's ranker, measure it on test queries, else on validation queries if any, and save it."""
    tested = tables.get("test", tables.get("validation"))
    parameters = state.released(config.rounds.release)
    ranker = MLP.of(parameters, state.scaling, training=config.local, scoring=config.model.scoring)
    evaluation = None if tested is None else _measured(ranker, tested, config)
    final = {} if evaluation is None else dict(evaluation.means)
    digest = model_digest(ranker)
    if folder is not None:
        ranker.save(folder.path / MODEL)
        summary = {
            "rounds": state.round,
            "final": final,
            "model_sha256": digest,
            "stopped": state.stopped,
            "privacy": state.history[-1].privacy if state.history else "",
            "protection": state.history[-1].protection if state.history else config.protection,
        }
        folder.finish(state, summary)
    where = None if folder is None else folder.path
    single = None if evaluation is None else _single(tables, config)
    return replace(
        Training(ranker, state.history, final, digest, state.stopped, where),
        evaluation=evaluation,
        single=single,
    )


def _single(tables: Mapping[str, Letor], config: Config) -> Evaluation | None:
    """Measure a single feature on test queries; None if there are no other judged queries to choose it on."""
    tested, watched = tables.get("test"), tables.get("validation")
    if tested is None or watched is None or not len(_relevant(watched)):
        return None
    feature, sign = Judge(watched[:SINGLE]).best_feature()
    scores = sign * np.nan_to_num(np.asarray(tested.features)[:, feature])
    return evaluate(tested.qrels(), tested.run(scores, name=f"feature {feature + 1}"), config.measures)


def _measured(ranker: MLP, tested: Letor, config: Config) -> Evaluation:
    with np.errstate(over="ignore", invalid="ignore"):  # divergence is reported without NumPy's warnings
        scores = np.nan_to_num(ranker.score(tested))
    return evaluate(tested.qrels(), tested.run(scores), config.measures)


def model_digest(ranker: MLP) -> str:
    """Return the SHA-256 of a ranker's parameters and scaling, in the order of their names."""
    digest = hashlib.sha256()
    for name, array in sorted({**ranker.parameters_, **ranker.scaling_.arrays()}.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
