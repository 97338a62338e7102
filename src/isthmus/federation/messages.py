"""What travels between coordinator and silo: named arrays and numbers in Flower's records.

A train message holds the global model under `arrays` and what the silo is to do under `config`; its reply
holds the silo's model under `arrays` and `num-examples` and `steps` under `metrics`, which is what
Flower's own strategies expect. Further arrays that a strategy asks for travel in records of their own.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError, FederationError, ProtocolError
from isthmus.federation.aggregation import Arrays as Arrays
from isthmus.federation.flower import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Grid,
    Message,
    MessageBytes,
    MetricRecord,
    RecordDict,
    message_from_proto,
    message_to_proto,
)
from isthmus.federation.settings import Rounds
from isthmus.tables import PLAIN, Unpacker

Records = Mapping[str, ArrayRecord]
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


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Named arrays as a record."""
    return ArrayRecord({name: _pack(np.asarray(array)) for name, array in arrays.items()})


def unpack(record: ArrayRecord, *, most: int = MOST_BYTES) -> Arrays:
    """The named arrays in a record, as copies of one's own; together they have `most` bytes.

    Types and shapes are compared with the bytes there are before any array is made: a FederationError
    otherwise.
    """
    unpacker = Unpacker(most)
    try:
        return {name: _unpack(array, unpacker) for name, array in record.items()}
    except (TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise FederationError(f"sent an array that cannot be read: {str(error)[:200]}") from error


def _pack(array: NDArray[Any]) -> Array:
    """What `Array(array)` makes, ten times faster: the header of an npy file is the same for every round."""
    data = _header(array.dtype, array.shape) + array.tobytes()
    return Array(str(array.dtype), array.shape, "numpy.ndarray", data)


def _unpack(array: Array, unpacker: Unpacker) -> NDArray[Any]:
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


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return bytes(message_to_proto(message).SerializeToString())


def decode(data: bytes) -> Message:
    """The message that bytes are, or a ProtocolError."""
    try:
        weigh(data)
        return message_from_proto(MessageBytes.FromString(data))
    except Exception as error:  # bytes from elsewhere may fail in any way
        raise ProtocolError(f"not a message ({type(error).__name__})") from error


def weigh(data: bytes) -> None:
    """Raise a DataError where a message would take more memory than a message may, before it is parsed.

    Fields and numbers of a byte or two become objects of hundreds; arrays and texts stay as long as they are.
    """
    unpacker, fields = Unpacker(MOST_BYTES), 0
    waiting: list[tuple[int, int, Any]] = [(0, len(data), MessageBytes.DESCRIPTOR)]
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


def order(arrays: ArrayRecord | None, settings: Mapping[str, Any], *, round: int = 0) -> RecordDict:
    """What a silo is asked: a model, settings, and the round."""
    content = RecordDict({CONFIG: ConfigRecord({ROUND: round, SETTINGS: json.dumps(dict(settings))})})
    if arrays is not None:
        content[ARRAYS] = arrays
    return content


def train_order(records: Records, settings: str, *, round: int, attempt: int, proximal: float) -> RecordDict:
    """An order to train in an attempt at a round: the model, and whatever else a silo needs."""
    config = ConfigRecord({SETTINGS: settings, ATTEMPT: attempt, ROUND: round, PROXIMAL: proximal})
    return RecordDict({CONFIG: config, **records})


def arrays_of(message: Message, record: str = ARRAYS) -> Arrays:
    """The model that a message carries, or the arrays of another record."""
    return unpack(message.content.array_records[record])


def with_content(message: Message, content: RecordDict) -> Message:
    """The message with other records; the one that came in stays as it is."""
    other = copy(message)
    other.content = content
    return other


def with_update(reply: Message, model: Arrays, *, examples: int) -> Message:
    """A silo's reply with another model, and another count of examples."""
    metrics = MetricRecord({**reply.content.metric_records[METRICS], EXAMPLES: examples})
    return with_content(reply, RecordDict({**reply.content, ARRAYS: pack(model), METRICS: metrics}))


def metric(message: Message, key: str) -> float:
    """A number that a silo tells of its training."""
    return float(message.content.metric_records[METRICS][key])  # type: ignore[arg-type]


def settings_of(message: Message) -> dict[str, Any]:
    """The settings an order carries."""
    return parsed_settings(str(message.content.config_records[CONFIG][SETTINGS]))


def parsed_settings(text: str) -> dict[str, Any]:
    """The settings that a text spells, which takes no more memory than settings do."""
    try:
        settings: dict[str, Any] = Unpacker(MOST_SETTINGS).json(text.encode())
    except ValueError as error:
        raise FederationError(f"an order whose settings cannot be read: {error}") from error
    return settings


def round_of(message: Message) -> int:
    """The round an order belongs to."""
    return int(message.content.config_records[CONFIG][ROUND])  # type: ignore[arg-type]


def answer(
    message: Message, metrics: Mapping[str, int | float], **records: Mapping[str, NDArray[Any]]
) -> Message:
    """The reply to an order: numbers, and named arrays record by record."""
    content = RecordDict({METRICS: MetricRecord(dict(metrics))})
    for name, arrays in records.items():
        content[name] = pack(arrays)
    return Message(content, reply_to=message)


def ask(grid: Grid, messages: Sequence[Message], *, rounds: Rounds, enough: int) -> list[Message]:
    """The replies that arrive before the deadline, or soon enough after so many of them have.

    A silo that died is thus not waited for longer than the others need.
    """
    if rounds.grace is None:
        return list(grid.send_and_receive(messages, timeout=rounds.deadline))
    waiting = set(grid.push_messages(messages))
    until, replies = time.monotonic() + rounds.deadline, list[Message]()
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
