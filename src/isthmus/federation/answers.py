"""Checking what silos send, so that one bad answer costs that answer and not the round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isthmus.asking import settle
from isthmus.errors import FederationError, IncompatibleUpdate
from isthmus.federation.flower import Grid, Message, MetricRecord, RecordDict
from isthmus.federation.messages import (
    ARRAYS,
    EXAMPLES,
    METRICS,
    REPORT,
    STEPS,
    Arrays,
    arrays_of,
    ask,
    metric,
    unpack,
    with_content,
)
from isthmus.federation.settings import Rounds

NOT_FINITE = "sent parameters that are not finite"


@dataclass(frozen=True)
class ReplyLimits:
    """What an answer may say.

    `counts` are the examples each silo declared when it was met; `report` is the shape of the errors asked
    for beside the model, −1 for any length, and empty where none were.
    """

    norm: float = 10.0
    count: float = 10.0
    counts: Mapping[str, int] = field(default_factory=dict)
    report: tuple[int, ...] = ()
    worst: float = 1.0
    noise: float = 0.0
    """The length of the noise that silos add to their updates."""

    def examples(self, silo: str, claimed: float) -> int:
        """The examples to count for a silo that tells of so many.

        No more than it declared at first, and no more than `count` times what two thirds of the silos stay
        below: where silos differ much in size the median would cut honest ones.
        """
        declared = sorted(self.counts.values())
        ceiling = self.count * declared[(2 * len(declared) - 1) // 3] if declared else math.inf
        return max(1, int(min(claimed, self.counts.get(silo, claimed), ceiling)))


@dataclass(frozen=True)
class Checked:
    """The usable answers of a round in the order of silos' names, and what was wrong with others."""

    usable: list[Message]
    rejected: dict[str, str]
    capped: dict[str, str]


@dataclass(frozen=True)
class GridCarrier:
    """Questions as Flower messages of one kind, to silos by the nodes they are reached at."""

    grid: Grid
    kind: str
    nodes: Mapping[Any, int]
    rounds: Rounds

    def __call__(
        self, questions: Mapping[Any, RecordDict], *, deadline: float, enough: int
    ) -> Iterator[tuple[Any, Message | FederationError]]:
        messages = [Message(content, self.nodes[silo], self.kind) for silo, content in questions.items()]
        names = {node: silo for silo, node in self.nodes.items()}
        return by_silo(ask(self.grid, messages, rounds=self.rounds, enough=enough), names)


def connected(grid: Grid, expected: int, deadline: float) -> list[int]:
    """The nodes that are there, once there are so many or the deadline has passed."""
    until = time.monotonic() + deadline
    while len(nodes := sorted(set(grid.get_node_ids()))) < expected and time.monotonic() < until:
        time.sleep(0.2)
    return nodes


def by_silo(
    replies: Iterable[Message], names: Mapping[int, Any]
) -> Iterator[tuple[Any, Message | FederationError]]:
    """Whose each reply is, and the reply; an error where a silo sent one instead of an answer."""
    for reply in replies:
        silo = names.get(reply.metadata.src_node_id)
        if reply.has_error():
            reason = (reply.error.reason or "no reason given").strip().splitlines()[-1]
            yield silo, FederationError(f"failed: {reason[:200]}")
        else:
            yield silo, reply


def check(
    replies: Iterable[Message],
    silos: Mapping[int, str],
    limits: ReplyLimits,
    *,
    deadline: float,
    shows: str,
    model: Arrays | None = None,
    complete: Callable[[str, Message], None] = lambda silo, reply: None,
) -> Checked:
    """Sort the replies of the silos that were asked into usable ones and offences.

    They hold a model like `model`, if there is one; `complete` looks for whatever else they must have, and
    `shows` says what a reply shows of its silo. The replies themselves stay as they are.
    """

    def read(silo: str, reply: Message) -> tuple[Message, float]:
        _check_report(reply, limits)
        length = 0.0 if model is None else _update_in(reply, silo, model)
        _check_numbers(reply)
        complete(silo, reply)
        return reply, length

    answers = settle(silos.values(), by_silo(replies, silos), read, deadline=deadline, shows=shows)
    usable, rejected = dict(answers.by_silo), answers.reasons()
    for silo in [] if model is None else _too_long(usable, model, limits):
        rejected[silo] = f"sent an update of length {usable.pop(silo)[1]:.3g}"
    capped: dict[str, str] = {}
    tidied: dict[str, Message] = {}
    for silo, (reply, _) in usable.items():
        claimed = metric(reply, EXAMPLES)
        counted = limits.examples(silo, claimed)
        if counted != claimed:
            capped[silo] = f"claims {claimed:,.0f} examples, counted as {counted:,}"
        tidied[silo] = with_content(reply, _tidied(reply, counted, report=bool(limits.report)))
    ordered = [tidied[silo] for silo in sorted(tidied)]
    return Checked(ordered, dict(sorted(rejected.items())), dict(sorted(capped.items())))


def _update_in(reply: Message, silo: str, model: Arrays) -> float:
    """The length of a reply's update, if it is fit to be aggregated."""
    room = 8 * sum(array.size for array in model.values())  # reals of any width, in the model's shapes
    arrays = unpack(reply.content.array_records[ARRAYS], most=room)
    check_fits(arrays, model, silo)
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise FederationError(NOT_FINITE)
    return update_length(arrays, model)


def _check_numbers(reply: Message) -> None:
    for key in (EXAMPLES, STEPS):
        value = metric(reply, key)
        if not (math.isfinite(value) and value >= 1):
            raise FederationError(f"sent {key} = {value:g}")


def check_fits(arrays: Arrays, model: Arrays, silo: str) -> None:
    """Raise IncompatibleUpdate unless both have the same names, shapes and kinds of number."""
    if arrays.keys() != model.keys():
        raise IncompatibleUpdate(silo, _named(model), _named(arrays))
    for name, array in model.items():
        if arrays[name].shape != array.shape or arrays[name].dtype.kind != "f":
            expected, got = (f"{name} {a.dtype}{list(a.shape)}" for a in (array, arrays[name]))
            raise IncompatibleUpdate(silo, expected, got)


def update_length(arrays: Arrays, model: Arrays) -> float:
    """‖θ_k − θ‖."""
    squares = (np.square(arrays[name] - model[name].astype(np.float64)).sum() for name in model)
    return math.sqrt(sum(float(square) for square in squares))


def _too_long(usable: Mapping[str, tuple[Message, float]], model: Arrays, limits: ReplyLimits) -> list[str]:
    """The silos whose updates are out of all proportion to the model and to the others'.

    The others are represented by their lower quartile: three of four may be wrong and it still is not.
    """
    lengths = {silo: length for silo, (_, length) in usable.items()}
    ordered = sorted(lengths.values())
    whole = update_length(model, {name: np.zeros_like(array) for name, array in model.items()})
    quartile = max(0, len(ordered) - 2) // 4
    outliers = []
    for silo, length in lengths.items():
        others = ordered[quartile] if length > ordered[quartile] else 0.0
        if length > limits.norm * max(1.0, whole, others, limits.noise):
            outliers.append(silo)
    return outliers


def _check_report(reply: Message, limits: ReplyLimits) -> None:
    if not limits.report:
        return
    errors = arrays_of(reply, REPORT)["errors"]
    fits = len(errors.shape) == len(limits.report) and all(
        want in (-1, got) for want, got in zip(limits.report, errors.shape, strict=True)
    )
    if not fits or not ((errors >= 0) & (errors <= limits.worst)).all():
        raise FederationError(f"sent errors {list(errors.shape)} that are not what was asked for")


def _tidied(reply: Message, examples: int, *, report: bool) -> RecordDict:
    """The records that were asked for, with the examples that count, and no others: sums run over all."""
    reported = reply.content.metric_records[METRICS].get("loss")
    loss = float(reported) if isinstance(reported, (int, float)) else math.nan
    metrics = MetricRecord({EXAMPLES: examples, STEPS: int(metric(reply, STEPS)), "loss": loss})
    names = [name for name in (ARRAYS, REPORT) if name in reply.content and (report or name != REPORT)]
    return RecordDict({METRICS: metrics, **{name: reply.content[name] for name in names}})


def _named(arrays: Arrays) -> str:
    return "arrays " + ", ".join(sorted(arrays)) if arrays else "no arrays"
