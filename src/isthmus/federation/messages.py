"""What travels between coordinator and silo: named arrays and numbers in Flower's records.

A train message holds the global model under `arrays` and what the silo is to do under `config`; its reply
holds the silo's model under `arrays` and `num-examples` and `steps` under `metrics`, which is what
Flower's own strategies expect. Further arrays that a strategy asks for travel in records of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from isthmus.federation.settings import Rounds

Arrays = dict[str, NDArray[Any]]

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
_PAUSE = 0.2  # seconds between two looks for replies


def pack(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Named arrays as a record."""
    return ArrayRecord({name: _pack(np.asarray(array)) for name, array in arrays.items()})


def unpack(record: ArrayRecord) -> Arrays:
    """The named arrays in a record, as copies of one's own."""
    return {name: _unpack(array) for name, array in record.items()}


def _pack(array: NDArray[Any]) -> Array:
    """What `Array(array)` makes, ten times faster: the header of an npy file is the same for every round."""
    data = _header(array.dtype, array.shape) + array.tobytes()
    return Array(str(array.dtype), array.shape, "numpy.ndarray", data)


def _unpack(array: Array) -> NDArray[Any]:
    header = _header(np.dtype(array.dtype), tuple(array.shape))
    if not array.data.startswith(header):  # another sender may write its headers differently
        return np.asarray(array.numpy())
    return np.frombuffer(array.data, array.dtype, offset=len(header)).reshape(array.shape).copy()


@lru_cache(maxsize=1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    told = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, told)
    return buffer.getvalue()


def order(arrays: ArrayRecord | None, settings: Mapping[str, Any], *, round: int = 0) -> RecordDict:
    """What a silo is asked: a model, settings, and the round."""
    content = RecordDict({CONFIG: ConfigRecord({ROUND: round, SETTINGS: json.dumps(dict(settings))})})
    if arrays is not None:
        content[ARRAYS] = arrays
    return content


def settings_of(message: Message) -> dict[str, Any]:
    """The settings an order carries."""
    told: dict[str, Any] = json.loads(str(message.content.config_records[CONFIG][SETTINGS]))
    return told


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


def combine(weights: Mapping[str, float], models: Mapping[str, Arrays]) -> Arrays:
    """Σ_k w_k θ_k over the named models, in the order of their names, in the models' own type."""
    names = sorted(weights)
    first = models[names[0]]
    total = {key: np.zeros(array.shape, np.float64) for key, array in first.items()}
    for name in names:
        for key in total:
            total[key] += weights[name] * models[name][key].astype(np.float64)
    return {key: total[key].astype(array.dtype) for key, array in first.items()}
