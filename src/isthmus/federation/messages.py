"""Messages between coordinator and silo: named arrays and numbers in Flower's records.

A train message contains the global model under `arrays` and the silo's instructions under `config`. Its reply
contains the silo's model under `arrays` and `num-examples` and `steps` under `metrics`, as Flower's own
strategies expect. Further arrays that a strategy requests travel in records of their own.

Replies are checked here, so that a bad reply is rejected without failing the round.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.asking import settle
from isthmus.errors import DataError, FederationError, IncompatibleUpdate, ProtocolError
from isthmus.federation import flower
from isthmus.federation.aggregation import Arrays as Arrays
from isthmus.federation.settings import Rounds
from isthmus.tables import PLAIN, Unpacker

Records = Mapping[str, flower.ArrayRecord]
ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
REPORT = "report"
EXAMPLES = "num-examples"
STEPS = "steps"
ROUND = "server-round"
ATTEMPT = "attempt"
SETTINGS = "settings"
PROXIMAL = "proximal-mu"
MOST_BYTES, MOST_SETTINGS = 1 << 31, 16 << 20
"""Largest size in bytes of the arrays of a record, and of the settings of an order."""
MOST_FIELDS, A_NUMBER = 100_000, 256
"""Most fields of a message (an array has six), and most bytes of memory for a byte of packed numbers."""
GONE = 3
"""Code of the error that a grid returns for a silo without contact."""
_UNREACHED = (GONE, 4, 5)  # in Flower's grids, 3 to 5: a message, a reply or a node is unavailable
_FIXED = {1: 8, 5: 4}
_TEXTS = (9, 12)
_PAUSE = 0.2  # seconds between two checks for replies


def pack(arrays: Mapping[str, NDArray[Any]]) -> flower.ArrayRecord:
    """Pack named arrays into a record."""
    return flower.ArrayRecord({name: _pack(np.asarray(array)) for name, array in arrays.items()})


def unpack(record: flower.ArrayRecord, *, most: int = MOST_BYTES) -> Arrays:
    """Return copies of the named arrays in a record, which may have `most` bytes together.

    Types and shapes are compared with the available bytes before any array is made. Raises FederationError
    for an array that cannot be read.
    """
    unpacker = Unpacker(most)
    try:
        return {name: _unpack(array, unpacker) for name, array in record.items()}
    except (TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise FederationError(f"sent an array that cannot be read: {str(error)[:200]}") from error


def _pack(array: NDArray[Any]) -> flower.Array:
    """Return the same as `Array(array)`, ten times faster: the npy header, equal every round, is cached."""
    data = _header(array.dtype, array.shape) + array.tobytes()
    return flower.Array(str(array.dtype), array.shape, "numpy.ndarray", data)


def _unpack(array: flower.Array, unpacker: Unpacker) -> NDArray[Any]:
    dtype, shape = np.dtype(array.dtype), tuple(array.shape)
    if dtype.kind not in PLAIN or array.stype != "numpy.ndarray":
        raise DataError(f"an array of {array.dtype}, {array.stype}")
    header, size = _header(dtype, shape), math.prod(shape) * dtype.itemsize
    if len(array.data) == len(header) + size and array.data.startswith(header):
        unpacker.spend(size)
        return np.frombuffer(array.data, dtype, offset=len(header)).reshape(shape).copy()
    # other senders may write headers differently
    values = unpacker.array(BytesIO(array.data), len(array.data))
    if values.dtype != dtype or values.shape != shape:
        raise DataError("an array of another type or shape than it declares")
    return values


@lru_cache(maxsize=1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue()


def encode(message: flower.Message) -> bytes:
    """Serialise a message."""
    return bytes(flower.message_to_proto(message).SerializeToString())


def decode(data: bytes) -> flower.Message:
    """Parse a message from bytes; ProtocolError if that is impossible."""
    try:
        weigh(data)
        return flower.message_from_proto(flower.MessageBytes.FromString(data))
    except Exception as error:  # parsing foreign bytes may raise anything
        raise ProtocolError(f"not a message ({type(error).__name__})") from error


def weigh(data: bytes) -> None:
    """Raise DataError, before a message is parsed, if it would then take more memory than allowed.

    Fields and numbers of a byte or two become objects of hundreds of bytes; arrays and texts stay as long.
    """
    unpacker, fields = Unpacker(MOST_BYTES), 0
    waiting: list[tuple[int, int, Any]] = [(0, len(data), flower.MessageBytes.DESCRIPTOR)]
    while waiting:
        at, end, kind = waiting.pop()
        while at < end:
            fields += 1
            if fields > MOST_FIELDS:
                raise DataError(f"has more than {MOST_FIELDS:,} fields")
            tag, at = _varint(data, at)
            field, form = kind.fields_by_number.get(tag >> 3), tag & 7
            if form == 0:
                at = _varint(data, at)[1]
            elif form in _FIXED:
                at += _FIXED[form]
            elif form == 2:
                size, at = _varint(data, at)
                if field is not None and field.message_type is not None:
                    waiting.append((at, min(at + size, end), field.message_type))
                elif field is not None and field.type not in _TEXTS:  # packed repeated numbers
                    unpacker.spend(A_NUMBER * size)
                at += size
            else:
                raise DataError("is no message")
        if at > end:
            raise DataError("is cut")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer that begins at an offset, and the offset after it."""
    for length in range(1, 11):
        if at + length > len(data):
            break
        if data[at + length - 1] < 0x80:
            octets = data[at : at + length]
            return sum((octet & 0x7F) << (7 * place) for place, octet in enumerate(octets)), at + length
    raise DataError("is cut")


def order(
    arrays: flower.ArrayRecord | None, settings: Mapping[str, Any], *, round: int = 0
) -> flower.RecordDict:
    """Build an order to a silo: its settings, the round and, if given, a model."""
    content = flower.RecordDict(
        {CONFIG: flower.ConfigRecord({ROUND: round, SETTINGS: json.dumps(dict(settings))})}
    )
    if arrays is not None:
        content[ARRAYS] = arrays
    return content


def train_order(
    records: Records, settings: str, *, round: int, attempt: int, proximal: float
) -> flower.RecordDict:
    """Build an order to train in one attempt at a round: the model, and all else that a silo needs."""
    config = flower.ConfigRecord({SETTINGS: settings, ATTEMPT: attempt, ROUND: round, PROXIMAL: proximal})
    return flower.RecordDict({CONFIG: config, **records})


def arrays_of(message: flower.Message, record: str = ARRAYS) -> Arrays:
    """Return the model in a message, or the arrays of another record."""
    return unpack(message.content.array_records[record])


def with_content(message: flower.Message, content: flower.RecordDict) -> flower.Message:
    """Return a copy of a message with other records; the original is unchanged."""
    other = copy(message)
    other.content = content
    return other


def with_update(reply: flower.Message, model: Arrays, *, examples: int) -> flower.Message:
    """Return a copy of a silo's reply with another model and another number of examples."""
    metrics = flower.MetricRecord({**reply.content.metric_records[METRICS], EXAMPLES: examples})
    return with_content(reply, flower.RecordDict({**reply.content, ARRAYS: pack(model), METRICS: metrics}))


def metric(message: flower.Message, key: str) -> float:
    """Return a number that a silo reports about its training."""
    return float(message.content.metric_records[METRICS][key])  # type: ignore[arg-type]


def settings_of(message: flower.Message) -> dict[str, Any]:
    """The settings an order carries."""
    return parsed_settings(str(message.content.config_records[CONFIG][SETTINGS]))


def parsed_settings(text: str) -> dict[str, Any]:
    """Parse settings within their memory limit; FederationError if they cannot be read."""
    try:
        settings: dict[str, Any] = Unpacker(MOST_SETTINGS).json(text.encode())
    except ValueError as error:
        raise FederationError(f"an order whose settings cannot be read: {error}") from error
    return settings


def round_of(message: flower.Message) -> int:
    """The round an order belongs to."""
    return int(message.content.config_records[CONFIG][ROUND])  # type: ignore[arg-type]


def answer(
    message: flower.Message, metrics: Mapping[str, int | float], **records: Mapping[str, NDArray[Any]]
) -> flower.Message:
    """Build the reply to an order from metrics and from named arrays by record."""
    content = flower.RecordDict({METRICS: flower.MetricRecord(dict(metrics))})
    for name, arrays in records.items():
        content[name] = pack(arrays)
    return flower.Message(content, reply_to=message)


def ask(
    grid: flower.Grid, messages: Sequence[flower.Message], *, rounds: Rounds, enough: int
) -> list[flower.Message]:
    """Send messages, and return the replies that arrive by the deadline or, after `enough` of them, within
    the grace period.

    The grace period keeps a dead silo from delaying the others until the deadline.
    """
    if rounds.grace is None:
        return list(grid.send_and_receive(messages, timeout=rounds.deadline))
    waiting = set(grid.push_messages(messages))
    until, replies = time.monotonic() + rounds.deadline, list[flower.Message]()
    answered = 0
    while waiting and time.monotonic() < until:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
            answered += not reply.has_error()
            if answered == enough:
                until = min(until, time.monotonic() + rounds.grace)
        time.sleep(_PAUSE if waiting else 0)
    return replies


NOT_FINITE = "sent parameters that are not finite"


@dataclass(frozen=True)
class ReplyLimits:
    """Limits on the content of a reply.

    `counts` are the examples that each silo declared at registration. `report` is the expected shape of the
    errors requested beside the model: −1 stands for any length, and an empty shape for no request.
    """

    norm: float = 10.0
    count: float = 10.0
    counts: Mapping[str, int] = field(default_factory=dict)
    report: tuple[int, ...] = ()
    worst: float = 1.0
    noise: float = 0.0
    """Length of the noise that silos add to their updates."""

    def examples(self, silo: str, claimed: float) -> int:
        """Return the number of examples to count for a silo that claims this many.

        It is at most the number that the silo declared at registration, and at most `count` times the number
        that two thirds of the silos do not exceed: if silos differ much in size, a limit from the median
        would cut honest ones.
        """
        declared = sorted(self.counts.values())
        ceiling = self.count * declared[(2 * len(declared) - 1) // 3] if declared else math.inf
        return max(1, int(min(claimed, self.counts.get(silo, claimed), ceiling)))


@dataclass(frozen=True)
class Checked:
    """The usable replies of a round in the order of silos' names, the reasons why others were rejected, and
    the silos whose example counts were reduced."""

    usable: list[flower.Message]
    rejected: dict[str, str]
    capped: dict[str, str]


@dataclass(frozen=True)
class GridCarrier:
    """Carrier that sends questions as Flower messages of one kind to the nodes of silos."""

    grid: flower.Grid
    kind: str
    nodes: Mapping[Any, int]
    rounds: Rounds

    def __call__(
        self, questions: Mapping[Any, flower.RecordDict], *, deadline: float, enough: int
    ) -> Iterator[tuple[Any, flower.Message | Exception]]:
        messages = [
            flower.Message(content, self.nodes[silo], self.kind) for silo, content in questions.items()
        ]
        names = {node: silo for silo, node in self.nodes.items()}
        return by_silo(ask(self.grid, messages, rounds=self.rounds, enough=enough), names)


def connected(grid: flower.Grid, expected: int, deadline: float) -> list[int]:
    """Return the connected nodes once there are `expected`, or once the deadline in seconds has passed."""
    until = time.monotonic() + deadline
    while len(nodes := sorted(set(grid.get_node_ids()))) < expected and time.monotonic() < until:
        time.sleep(0.2)
    return nodes


def by_silo(
    replies: Iterable[flower.Message], names: Mapping[int, Any]
) -> Iterator[tuple[Any, flower.Message | Exception]]:
    """Yield the silo and the reply of every message; an error reply becomes a FederationError, or a
    TimeoutError if the silo was not reached."""
    for reply in replies:
        silo = names.get(reply.metadata.src_node_id)
        if reply.has_error():
            reason = (reply.error.reason or "no reason given").strip().splitlines()[-1]
            kind = TimeoutError if reply.error.code in _UNREACHED else FederationError
            yield silo, kind(f"failed: {reason[:200]}")
        else:
            yield silo, reply


def check(
    replies: Iterable[flower.Message],
    silos: Mapping[int, str],
    limits: ReplyLimits,
    *,
    deadline: float,
    shows: str,
    model: Arrays | None = None,
    complete: Callable[[str, flower.Message], None] = lambda silo, reply: None,
) -> Checked:
    """Separate the replies of silos into usable and rejected ones.

    If `model` is given, replies must contain a model of the same form. `complete` checks the rest of a
    reply's content and raises if it is wrong. `shows` states what a reply reveals about its silo. The replies
    themselves are unchanged.
    """

    def read(silo: str, reply: flower.Message) -> tuple[flower.Message, float]:
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
    tidied: dict[str, flower.Message] = {}
    for silo, (reply, _) in usable.items():
        claimed = metric(reply, EXAMPLES)
        counted = limits.examples(silo, claimed)
        if counted != claimed:
            capped[silo] = f"claims {claimed:,.0f} examples, counted as {counted:,}"
        tidied[silo] = with_content(reply, _tidied(reply, counted, report=bool(limits.report)))
    ordered = [tidied[silo] for silo in sorted(tidied)]
    return Checked(ordered, dict(sorted(rejected.items())), dict(sorted(capped.items())))


def _update_in(reply: flower.Message, silo: str, model: Arrays) -> float:
    """Return the length of a reply's update; FederationError if the model in it cannot be aggregated."""
    room = 8 * sum(array.size for array in model.values())  # floats of up to 8 bytes, in the model's shapes
    arrays = unpack(reply.content.array_records[ARRAYS], most=room)
    check_fits(arrays, model, silo)
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise FederationError(NOT_FINITE)
    return update_length(arrays, model)


def _check_numbers(reply: flower.Message) -> None:
    for key in (EXAMPLES, STEPS):
        value = metric(reply, key)
        if not (math.isfinite(value) and value >= 1):
            raise FederationError(f"sent {key} = {value:g}")


def check_fits(arrays: Arrays, model: Arrays, silo: str) -> None:
    """Raise IncompatibleUpdate unless `arrays` has the names and shapes of `model`, and only floats."""
    if arrays.keys() != model.keys():
        raise IncompatibleUpdate(silo, _named(model), _named(arrays))
    for name, array in model.items():
        if arrays[name].shape != array.shape or arrays[name].dtype.kind != "f":
            expected, got = (f"{name} {a.dtype}{list(a.shape)}" for a in (array, arrays[name]))
            raise IncompatibleUpdate(silo, expected, got)


def update_length(arrays: Arrays, model: Arrays) -> float:
    """Return the length of the update, ‖θ_k − θ‖."""
    squares = (np.square(arrays[name] - model[name].astype(np.float64)).sum() for name in model)
    return math.sqrt(sum(float(square) for square in squares))


def _too_long(
    usable: Mapping[str, tuple[flower.Message, float]], model: Arrays, limits: ReplyLimits
) -> list[str]:
    """Return the silos whose updates are far too long in proportion to the model and to the others' updates.

    The others are represented by their lower quartile, which is unaffected even if three of four are wrong.
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


def _check_report(reply: flower.Message, limits: ReplyLimits) -> None:
    if not limits.report:
        return
    errors = arrays_of(reply, REPORT)["errors"]
    fits = len(errors.shape) == len(limits.report) and all(
        want in (-1, got) for want, got in zip(limits.report, errors.shape, strict=True)
    )
    if not fits or not ((errors >= 0) & (errors <= limits.worst)).all():
        raise FederationError(f"sent errors {list(errors.shape)} that are not what was asked for")


def _tidied(reply: flower.Message, examples: int, *, report: bool) -> flower.RecordDict:
    """Return the requested records of a reply alone, with the counted examples: sums run over all records."""
    reported = reply.content.metric_records[METRICS].get("loss")
    loss = float(reported) if isinstance(reported, (int, float)) else math.nan
    metrics = flower.MetricRecord({EXAMPLES: examples, STEPS: int(metric(reply, STEPS)), "loss": loss})
    names = [name for name in (ARRAYS, REPORT) if name in reply.content and (report or name != REPORT)]
    return flower.RecordDict({METRICS: metrics, **{name: reply.content[name] for name in names}})


def _named(arrays: Arrays) -> str:
    return "arrays " + ", ".join(sorted(arrays)) if arrays else "no arrays"
