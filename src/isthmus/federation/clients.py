"""A silo's side of training, as a ClientApp: describe its data, train from the global model, report errors.

The ClientApp keeps nothing from round to round except its own table. All else comes with the message, so a
silo may stop and come back, and any worker may serve it. Only the steps of a secure round share a state.

Everything that leaves a silo is written into its own ledger beforehand: sizes and feature sums, reports about
its model, and model updates, visible or masked. Each entry has its ε, or states that there is no DP
guarantee. A mask is no such guarantee either: the sum that it opens to is exact.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.config import load
from isthmus.errors import ConfigError, FederationError
from isthmus.federation import members, messages
from isthmus.federation.flower import ClientApp, Context, Message, Mod
from isthmus.federation.judge import Judge
from isthmus.federation.noise import private, spent
from isthmus.federation.settings import NoiseFloor, PrivateUpdates
from isthmus.federation.silo_data import SiloData, silo_name
from isthmus.private.ledger import Budget, Ledger
from isthmus.randomness import Streams
from isthmus.rankers import LocalTraining, Scaling, ScalingStats, Scoring, train_epochs
from isthmus.tables import Letor

QUANTILES = 20
"""Number of order statistics of its per-query errors that a silo reports."""
PEER = "coordinator"
"""The name of the coordinator in a silo's ledger."""
_first = threading.Lock()  # one thread creates the file, others open it


Book = Callable[[Context, str, PrivateUpdates | None, str], None]
"""Records a release before it leaves a silo: its kind, the noise in it, and a note."""


def no_book(context: Context, kind: str, privacy: PrivateUpdates | None, note: str) -> None:
    """Record nothing: in simulations no data leave a silo."""


def own_book(context: Context, kind: str, privacy: PrivateUpdates | None, note: str) -> None:
    """Write into the ledger that the silo's own node configuration names, if it names one."""
    if "ledger" in context.node_config:
        with Ledger(str(context.node_config["ledger"])) as ledger:
            _enter(ledger, kind, privacy, note)


def simulated_book(
    context: Context, kind: str, privacy: PrivateUpdates | None, note: str, *, folder: str | PathLike[str]
) -> None:
    """Write into the ledger of a simulated silo; `folder` has one ledger for each silo."""
    path = Path(folder) / f"{silo_name(context)}.ledger"
    with _first:
        path.parent.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(path, None if path.exists() else Budget())
    with ledger:
        _enter(ledger, kind, privacy, note)


def _enter(ledger: Ledger, kind: str, privacy: PrivateUpdates | None, note: str) -> None:
    if privacy is None:
        ledger.record(kind, PEER, note=note)
        return
    once = spent([("silo",)], privacy)
    unit = f"all data of the silo replaced, δ = {privacy.delta:g}"
    ledger.record(kind, PEER, epsilon=once, unit=unit, note=note)


def client_app(
    source: SiloData,
    *,
    book: Book = no_book,
    trusts: members.Trusts = members.anybody,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Build the ClientApp of silos with rows in `source`; `mods` wrap it as Flower's mods do."""
    app = ClientApp(mods=list(mods))

    @app.query("describe")
    def describe(message: Message, context: Context) -> Message:
        reply = _describe(message, context, source)
        book(context, "sums", None, "sizes and feature sums")
        return reply

    @app.train()
    def train(message: Message, context: Context) -> Message:
        settings, at = messages.settings_of(message), f"round {messages.round_of(message)}"
        privacy = own_privacy(context, settings)
        if secure := members.SECURE in message.content:
            boxes = members.boxes_for_peers(message, context, trusts(context))
        else:
            check_visible(context)
        reply = _train(message, context, source, privacy)
        if secure:
            reply.content[members.PARTS] = boxes
        if settings["report"]:
            book(context, "probe report", None if settings["report"] != "probe" else privacy, at)
        if not secure:
            book(context, "model update", privacy, f"{at}, seen by the coordinator")
        return reply

    @app.query(members.AGREE)
    def agree(message: Message, context: Context) -> Message:
        return members.agree(message, context, source.name(context), trusts(context))

    @app.query(members.MASK)
    def mask(message: Message, context: Context) -> Message:
        among = len(messages.settings_of(message)["weights"])
        privacy = members.noise_of(message, context)
        reply = members.mask(message, context)
        note = f"round {messages.round_of(message)}, masked: only a sum over {among} silos can be opened"
        book(context, "model update", privacy, note)
        return reply

    @app.query(members.CONFIRM)
    def confirm(message: Message, context: Context) -> Message:
        return members.confirm(message, context, trusts(context))

    @app.query(members.REVEAL)
    def reveal(message: Message, context: Context) -> Message:
        return members.reveal(message, context, trusts(context))

    return app


def own_privacy(context: Context, settings: Mapping[str, Any]) -> PrivateUpdates | None:
    """Return the coordinator's proposed clipping and noise, made no weaker than the silo's configuration.

    `most-clip` and `least-noise` of the node configuration are the longest update and the least noise
    multiplier. Raises FederationError for a report that the silo's configuration forbids.
    """
    if settings["report"] == "batch" and context.node_config.get("masked-only", False):
        raise FederationError(
            "errors row by row tell every grade, and this silo shows nothing but under masks"
        )
    proposed = None if settings["privacy"] is None else load(PrivateUpdates, settings["privacy"])
    named = [key for key in ("most-clip", "least-noise") if key in context.node_config]
    if not named:
        return proposed
    if len(named) < 2:
        alone = f"the node configuration has {named[0]!r} alone"
        raise ConfigError(alone, key=named[0], expected="most-clip and least-noise")
    if settings["report"] not in ("", "probe"):
        raise FederationError(
            "this silo adds noise to all that its model tells, and a report on its own rows has none"
            " (strategy.risk.columns = 'probe')"
        )
    clip, multiplier = (float(context.node_config[key]) for key in named)
    return NoiseFloor(clip, multiplier).tightened(proposed)


def check_visible(context: Context) -> None:
    """Raise FederationError if the silo's own configuration forbids showing its model to the coordinator."""
    if context.node_config.get("masked-only", False):
        raise FederationError("this silo lets its models go under the masks of a secure sum only")


def _describe(message: Message, context: Context, source: SiloData) -> Message:
    """Reply with the silo's name and sizes, and the sums from which a feature scaling is fitted."""
    table = source.table(context)
    stats = ScalingStats.of(table, messages.settings_of(message)["scaling"])
    sizes = {
        "rows": table.rows,
        "queries": len(table),
        "width": table.width,
        "lowest": int(table.grades.min(initial=0)),
        "highest": int(table.grades.max(initial=0)),
    }
    name = {"name": np.frombuffer(source.name(context).encode(), np.uint8)}
    sums = {"total": stats.total, "squares": stats.squares, "low": stats.low, "high": stats.high}
    return messages.answer(message, sizes, silo=name, sums=sums)


def _train(message: Message, context: Context, source: SiloData, privacy: PrivateUpdates | None) -> Message:
    """Train for local epochs from the global model. The reply contains the silo's model, except in a secure
    round, where the model is stored until it is masked."""
    settings = messages.settings_of(message)
    name = source.name(context)
    records = message.content.array_records
    width = int(settings["width"])
    scaling = Scaling.from_arrays(settings["scaling"], width, messages.unpack(records["scaling"]))
    data = source.scaled(context, scaling)
    local = local_training(str(message.content.config_records[messages.CONFIG][messages.SETTINGS]))
    proximal = float(message.content.config_records[messages.CONFIG].get(messages.PROXIMAL, 0.0))  # type: ignore[arg-type]
    if proximal:
        local = replace(local, proximal=proximal)
    observer = BatchErrors(local.batch_size()) if settings["report"] == "batch" else None
    start = messages.unpack(records[messages.ARRAYS])
    trained = train_epochs(
        start,
        data,
        local,
        Streams(int(settings["seed"]))("round", messages.round_of(message), "silo", name),
        correction=messages.unpack(records["correction"]) if "correction" in records else None,
        observe=observer,
    )
    model, loss = trained.parameters, float(trained.loss)
    if privacy is not None:
        model, loss = private(model, start, privacy), math.nan
    report: dict[str, messages.Arrays] = {}
    if observer is not None:
        report[messages.REPORT] = {"errors": observer.table()}
    elif settings["report"]:
        report[messages.REPORT] = {"errors": _own_errors(message, model, data)}
    metrics = {messages.EXAMPLES: examples(data, local), messages.STEPS: trained.steps, "loss": loss}
    if members.SECURE not in message.content:
        return messages.answer(message, metrics, arrays=model, **report)
    members.keep_model(context, members.session_of(message), model, privacy)
    return messages.answer(message, metrics, **report)


def _own_errors(message: Message, model: messages.Arrays, data: Letor) -> NDArray[np.float64]:
    """Return the silo's errors with its model: on the common probe, or as quantiles over its own queries."""
    scoring, records = messages.settings_of(message)["scoring"], message.content.array_records
    if messages.settings_of(message)["report"] == "quantile":
        return quantiles(model, data, scoring)
    judge = Judge.from_arrays(messages.unpack(records[members.PROBE]), scoring=scoring)
    return judge.counted(model, messages.settings_of(message)["errors"])


@lru_cache(maxsize=64)
def local_training(settings: str) -> LocalTraining:
    """Parse a message's settings for local training."""
    return load(LocalTraining, messages.parsed_settings(settings)["local"])


def examples(data: Letor, local: LocalTraining) -> int:
    """Return the number of examples to report: queries if the loss needs whole queries, else rows."""
    return len(data) if local.resolved_loss().whole_queries else data.rows


def quantiles(parameters: messages.Arrays, data: Letor, scoring: Scoring) -> NDArray[np.float64]:
    """Summarise 1 − nDCG@10 on a silo's own queries: order statistics at the middles of `QUANTILES` equal
    parts.

    For a silo without a relevant document all are 1: it has no evidence about its model.
    """
    if data.grades.max(initial=0) <= 0:
        return np.ones(QUANTILES)
    errors = Judge(data, scoring=scoring).errors(parameters)
    return np.quantile(errors, (np.arange(QUANTILES) + 0.5) / QUANTILES)


@dataclass
class BatchErrors:
    """Collects squared errors of the most probable grade, row by row, of every full batch before its step.

    Algorithm 4 sends each batch's errors to the server and waits for the risks. The silo's next steps do not
    depend on them, so one report after training gives the server the same information.
    """

    size: int

    def __post_init__(self) -> None:
        self._batches: list[NDArray[np.float32]] = []

    def __call__(self, scores: NDArray[Any], grades: NDArray[Any]) -> None:
        if len(grades) == self.size:
            errors = np.square(scores.argmax(axis=1) - grades)
            self._batches.append(errors.astype(np.float32))

    def table(self) -> NDArray[np.float32]:
        """Return the collected errors, batches × rows of a batch."""
        return np.stack(self._batches) if self._batches else np.zeros((0, self.size), np.float32)
