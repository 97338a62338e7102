"""What travels between coordinator and silo: named arrays and numbers in Flower's records.

A train message holds the global model under `arrays` and what the silo is to do under `config`; its reply
holds the silo's model under `arrays` and `num-examples` and `steps` under `metrics`, which is what
Flower's own strategies expect. Further arrays that a strategy asks for travel in records of their own.

Checking what silos send, so that one bad answer costs that answer and not the round.
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
"""Bytes that the arrays of a record, and the settings of an order, may take."""
MOST_FIELDS, A_NUMBER = 100_000, 256
"""Fields of a message, six for an array; and bytes that a byte of packed numbers takes at most."""
_FIXED = {1: 8, 5: 4}
_TEXTS = (9, 12)
_PAUSE = 0.2  # seconds between two looks for replies


def pack(arrays: Mapping[str, NDArray[Any]]) -> flower.ArrayRecord:
    """Named arrays as a record."""
    return flower.ArrayRecord({name: _pack(np.asarray(array)) for name, array in arrays.items()})


def unpack(record: flower.ArrayRecord, *, most: int = MOST_BYTES) -> Arrays:
    """The named arrays in a record, as copies of one's own; together they have `most` bytes.

    Types and shapes are compared with the bytes there are before any array is made: a FederationError
    otherwise.
    """
    unpacker = Unpacker(most)
    try:
        return {name: _unpack(array, unpacker) for name, array in record.items()}
    except (TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise FederationError(f"sent an array that cannot be read: {str(error)[:200]}") from error


def _pack(array: NDArray[Any]) -> flower.Array:
    """What `Array(array)` makes, ten times faster: the header of an npy file is the same for every round."""
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
    # another sender may write its headers differently
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
    """A message as bytes."""
    return bytes(flower.message_to_proto(message).SerializeToString())


def decode(data: bytes) -> flower.Message:
    """The message that bytes are, or a ProtocolError."""
    try:
        weigh(data)
        return flower.message_from_proto(flower.MessageBytes.FromString(data))
    except Exception as error:  # bytes from elsewhere may fail in any way
        raise ProtocolError(f"not a message ({type(error).__name__})") from error


def weigh(data: bytes) -> None:
    """Raise a DataError where a message would take more memory than a message may, before it is parsed.

    Fields and numbers of a byte or two become objects of hundreds; arrays and texts stay as long as they are.
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
                elif field is not None and field.type not in _TEXTS:  # numbers packed one after the other
                    unpacker.spend(A_NUMBER * size)
                at += size
            else:
                raise DataError("is no message")
        if at > end:
            raise DataError("is cut")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins here, and where the next begins."""
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
    """What a silo is asked: a model, settings, and the round."""
    content = flower.RecordDict(
        {CONFIG: flower.ConfigRecord({ROUND: round, SETTINGS: json.dumps(dict(settings))})}
    )
    if arrays is not None:
        content[ARRAYS] = arrays
    return content


def train_order(
    records: Records, settings: str, *, round: int, attempt: int, proximal: float
) -> flower.RecordDict:
    """An order to train in an attempt at a round: the model, and whatever else a silo needs."""
    config = flower.ConfigRecord({SETTINGS: settings, ATTEMPT: attempt, ROUND: round, PROXIMAL: proximal})
    return flower.RecordDict({CONFIG: config, **records})


def arrays_of(message: flower.Message, record: str = ARRAYS) -> Arrays:
    """The model that a message carries, or the arrays of another record."""
    return unpack(message.content.array_records[record])


def with_content(message: flower.Message, content: flower.RecordDict) -> flower.Message:
    """The message with other records; the one that came in stays as it is."""
    other = copy(message)
    other.content = content
    return other


def with_update(reply: flower.Message, model: Arrays, *, examples: int) -> flower.Message:
    """A silo's reply with another model, and another count of examples."""
    metrics = flower.MetricRecord({**reply.content.metric_records[METRICS], EXAMPLES: examples})
    return with_content(reply, flower.RecordDict({**reply.content, ARRAYS: pack(model), METRICS: metrics}))


def metric(message: flower.Message, key: str) -> float:
    """A number that a silo tells of its training."""
    return float(message.content.metric_records[METRICS][key])  # type: ignore[arg-type]


def settings_of(message: flower.Message) -> dict[str, Any]:
    """The settings an order carries."""
    return parsed_settings(str(message.content.config_records[CONFIG][SETTINGS]))


def parsed_settings(text: str) -> dict[str, Any]:
    """The settings that a text spells, which takes no more memory than settings do."""
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
    """The reply to an order: numbers, and named arrays record by record."""
    content = flower.RecordDict({METRICS: flower.MetricRecord(dict(metrics))})
    for name, arrays in records.items():
        content[name] = pack(arrays)
    return flower.Message(content, reply_to=message)


def ask(
    grid: flower.Grid, messages: Sequence[flower.Message], *, rounds: Rounds, enough: int
) -> list[flower.Message]:
    """The replies that arrive before the deadline, or soon enough after so many of them have.

    A silo that died is thus not waited for longer than the others need.
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

    usable: list[flower.Message]
    rejected: dict[str, str]
    capped: dict[str, str]


@dataclass(frozen=True)
class GridCarrier:
    """Questions as Flower messages of one kind, to silos by the nodes they are reached at."""

    grid: flower.Grid
    kind: str
    nodes: Mapping[Any, int]
    rounds: Rounds

    def __call__(
        self, questions: Mapping[Any, flower.RecordDict], *, deadline: float, enough: int
    ) -> Iterator[tuple[Any, flower.Message | FederationError]]:
        messages = [
            flower.Message(content, self.nodes[silo], self.kind) for silo, content in questions.items()
        ]
        names = {node: silo for silo, node in self.nodes.items()}
        return by_silo(ask(self.grid, messages, rounds=self.rounds, enough=enough), names)


def connected(grid: flower.Grid, expected: int, deadline: float) -> list[int]:
    """The nodes that are there, once there are so many or the deadline has passed."""
    until = time.monotonic() + deadline
    while len(nodes := sorted(set(grid.get_node_ids()))) < expected and time.monotonic() < until:
        time.sleep(0.2)
    return nodes


def by_silo(
    replies: Iterable[flower.Message], names: Mapping[int, Any]
) -> Iterator[tuple[Any, flower.Message | FederationError]]:
    """Whose each reply is, and the reply; an error where a silo sent one instead of an answer."""
    for reply in replies:
        silo = names.get(reply.metadata.src_node_id)
        if reply.has_error():
            reason = (reply.error.reason or "no reason given").strip().splitlines()[-1]
            yield silo, FederationError(f"failed: {reason[:200]}")
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
    """Sort the replies of the silos that were asked into usable ones and offences.

    They hold a model like `model`, if there is one; `complete` looks for whatever else they must have, and
    `shows` says what a reply shows of its silo. The replies themselves stay as they are.
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
    """The length of a reply's update, if it is fit to be aggregated."""
    room = 8 * sum(array.size for array in model.values())  # reals of any width, in the model's shapes
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


def _too_long(
    usable: Mapping[str, tuple[flower.Message, float]], model: Arrays, limits: ReplyLimits
) -> list[str]:
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
    """The records that were asked for, with the examples that count, and no others: sums run over all."""
    reported = reply.content.metric_records[METRICS].get("loss")
    loss = float(reported) if isinstance(reported, (int, float)) else math.nan
    metrics = flower.MetricRecord({EXAMPLES: examples, STEPS: int(metric(reply, STEPS)), "loss": loss})
    names = [name for name in (ARRAYS, REPORT) if name in reply.content and (report or name != REPORT)]
    return flower.RecordDict({METRICS: metrics, **{name: reply.content[name] for name in names}})


def _named(arrays: Arrays) -> str:
    return "arrays " + ", ".join(sorted(arrays)) if arrays else "no arrays"
