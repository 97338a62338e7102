"""Checking what silos send, so that one bad answer costs that answer and not the round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from isthmus.errors import FederationError, IncompatibleUpdate
from isthmus.federation.flower import Message, MetricRecord, RecordDict
from isthmus.federation.messages import ARRAYS, EXAMPLES, METRICS, REPORT, STEPS, Arrays, unpack

T = TypeVar("T")
NOT_FINITE = "sent parameters that are not finite"


@dataclass(frozen=True)
class Limits:
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

    def examples(self, silo: str, told: float) -> int:
        """The examples to count for a silo that tells of so many.

        No more than it declared at first, and no more than `count` times what two thirds of the silos stay
        below: where silos differ much in size the median would cut honest ones.
        """
        declared = sorted(self.counts.values())
        ceiling = self.count * declared[(2 * len(declared) - 1) // 3] if declared else math.inf
        return max(1, int(min(told, self.counts.get(silo, told), ceiling)))


@dataclass(frozen=True)
class Checked:
    """The usable answers of a round in the order of silos' names, and what was wrong with others."""

    usable: list[Message]
    rejected: dict[str, str]
    capped: dict[str, str]


def check(
    replies: Iterable[Message], asked: Mapping[int, str], model: Arrays, limits: Limits, *, deadline: float
) -> Checked:
    """Sort the replies of the silos that were asked into usable ones and offences."""
    capped: dict[str, str] = {}

    def read(reply: Message, silo: str) -> tuple[Message, float]:
        _check_report(reply, limits)
        return _read(reply, silo, model)

    usable, rejected = sorted_out(replies, asked, read, deadline=deadline)
    for silo in _too_long(usable, model, limits):
        rejected[silo] = f"sent an update of length {usable.pop(silo)[1]:.3g}"
    for silo, (reply, _) in usable.items():
        told = _number(reply, EXAMPLES)
        counted = limits.examples(silo, told)
        if counted != told:
            capped[silo] = f"claims {told:,.0f} examples, counted as {counted:,}"
        reply.content = _tidied(reply, counted, report=bool(limits.report))
    ordered = [usable[silo][0] for silo in sorted(usable)]
    return Checked(ordered, dict(sorted(rejected.items())), dict(sorted(capped.items())))


def check_reports(
    replies: Iterable[Message],
    asked: Mapping[int, str],
    limits: Limits,
    complete: Callable[[Message], None],
    *,
    deadline: float,
) -> Checked:
    """As `check`, for replies without a model: the numbers, the errors if they were asked for, and whatever
    `complete` looks for."""
    capped: dict[str, str] = {}

    def read(reply: Message, silo: str) -> Message:
        check_alive(reply)
        complete(reply)
        _check_report(reply, limits)
        _check_numbers(reply)
        told = _number(reply, EXAMPLES)
        counted = limits.examples(silo, told)
        if counted != told:
            capped[silo] = f"claims {told:,.0f} examples, counted as {counted:,}"
        reply.content.metric_records[METRICS][EXAMPLES] = counted
        return reply

    usable, rejected = sorted_out(replies, asked, read, deadline=deadline)
    return Checked([usable[silo] for silo in sorted(usable)], rejected, dict(sorted(capped.items())))


def sorted_out(
    replies: Iterable[Message],
    asked: Mapping[int, str],
    read: Callable[[Message, str], T],
    *,
    deadline: float,
) -> tuple[dict[str, T], dict[str, str]]:
    """What `read` makes of the replies, by silo, and of the other silos asked what was wrong."""
    rejected = dict.fromkeys(asked.values(), f"no answer within {deadline:g} s")
    usable: dict[str, T] = {}
    for reply in replies:
        silo = asked.get(reply.metadata.src_node_id)
        if silo is None or silo in usable:
            continue
        try:
            usable[silo] = read(reply, silo)
            del rejected[silo]
        except FederationError as error:
            rejected[silo] = str(error)
        except Exception as error:  # a hostile message may fail in any way while it is read
            rejected[silo] = f"sent what cannot be read ({type(error).__name__})"
    return usable, dict(sorted(rejected.items()))


def check_alive(reply: Message) -> None:
    """Raise if the silo sent an error instead of an answer."""
    if reply.has_error():
        reason = (reply.error.reason or "no reason given").strip().splitlines()[-1]
        raise FederationError(f"failed: {reason[:200]}")


def _read(reply: Message, silo: str, model: Arrays) -> tuple[Message, float]:
    """The reply and the length of its update, if it is fit to be aggregated."""
    check_alive(reply)
    room = 8 * sum(array.size for array in model.values())  # reals of any width, in the model's shapes
    arrays = unpack(reply.content.array_records[ARRAYS], most=room)
    check_fits(arrays, model, silo)
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise FederationError(NOT_FINITE)
    _check_numbers(reply)
    return reply, update_length(arrays, model)


def _check_numbers(reply: Message) -> None:
    for key in (EXAMPLES, STEPS):
        told = _number(reply, key)
        if not (math.isfinite(told) and told >= 1):
            raise FederationError(f"sent {key} = {told:g}")


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


def _too_long(usable: Mapping[str, tuple[Message, float]], model: Arrays, limits: Limits) -> list[str]:
    """The silos whose updates are out of all proportion to the model and to the others'.

    The others are represented by their lower quartile: three of four may be wrong and it still is not.
    """
    lengths = {silo: length for silo, (_, length) in usable.items()}
    ordered = sorted(lengths.values())
    whole = update_length(model, {name: np.zeros_like(array) for name, array in model.items()})
    quartile = max(0, len(ordered) - 2) // 4
    found = []
    for silo, length in lengths.items():
        others = ordered[quartile] if length > ordered[quartile] else 0.0
        if length > limits.norm * max(1.0, whole, others, limits.noise):
            found.append(silo)
    return found


def _check_report(reply: Message, limits: Limits) -> None:
    if not limits.report or reply.has_error():
        return
    errors = unpack(reply.content.array_records[REPORT])["errors"]
    fits = len(errors.shape) == len(limits.report) and all(
        want in (-1, got) for want, got in zip(limits.report, errors.shape, strict=True)
    )
    if not fits or not ((errors >= 0) & (errors <= limits.worst)).all():
        raise FederationError(f"sent errors {list(errors.shape)} that are not what was asked for")


def _tidied(reply: Message, examples: int, *, report: bool) -> RecordDict:
    """The records that were asked for, with the examples that count, and no others: sums run over all."""
    told = reply.content.metric_records[METRICS].get("loss")
    loss = float(told) if isinstance(told, (int, float)) else math.nan
    metrics = MetricRecord({EXAMPLES: examples, STEPS: int(_number(reply, STEPS)), "loss": loss})
    content = RecordDict({ARRAYS: reply.content.array_records[ARRAYS], METRICS: metrics})
    if report:
        content[REPORT] = reply.content.array_records[REPORT]
    return content


def _number(reply: Message, key: str) -> float:
    return float(reply.content.metric_records[METRICS][key])  # type: ignore[arg-type]


def _named(arrays: Arrays) -> str:
    return "arrays " + ", ".join(sorted(arrays)) if arrays else "no arrays"
