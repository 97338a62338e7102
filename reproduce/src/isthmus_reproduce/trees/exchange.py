"""The server side of XGBoost's federated communicator, at which silos exchange messages.

XGBoost has a server of its own. This one has the same protocol and differs in four points: sums are taken in
the order of the silos, so that the same data give the same trees; it listens on the given interface instead
of all; a silo's certificate must match its seat; and when a silo falls silent it ends the training with an
error for all, where XGBoost's would wait for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import FederationError
from isthmus_reproduce.trees.certificates import Papers, seat_name

LARGEST_MESSAGE = 1 << 30
"""Most bytes of one histogram or summary that the exchange accepts."""

_TYPES = ("f2", "f4", "f8", None, "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
_REDUCE = (np.maximum, np.minimum, np.add, np.bitwise_and, np.bitwise_or, np.bitwise_xor)


class Exchange:
    """The server side of XGBoost's federated communicator."""

    def __init__(self, silos: Sequence[str], *, patience: float) -> None:
        self.address = ""
        self.received = dict.fromkeys(silos, 0)
        """Bytes received from every silo, for the ledger."""
        self._silos = list(silos)
        self._patience = patience
        self._changed = threading.Condition()
        self._meetings: dict[int, _Meeting] = {}
        self._failure: str | None = None

    @classmethod
    @contextmanager
    def open(
        cls,
        silos: Sequence[str],
        papers: Papers,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        patience: float = 60,
    ) -> Iterator[Exchange]:
        """Open an exchange that listens while the context lasts; port 0 takes a free one.

        A silo that keeps the others waiting longer than `patience` seconds ends the training for all.
        """
        import grpc  # type: ignore[import-untyped]

        exchange = cls(silos, patience=patience)
        pool = ThreadPoolExecutor(len(silos) + 2, thread_name_prefix="exchange")
        sizes = [("grpc.max_receive_message_length", LARGEST_MESSAGE), ("grpc.max_send_message_length", -1)]
        server = grpc.server(pool, options=[*sizes, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((_service(exchange),))
        pair = (papers.key("exchange").read_bytes(), papers.certificate("exchange").read_bytes())
        credentials = grpc.ssl_server_credentials(
            [pair], root_certificates=papers.authority.read_bytes(), require_client_auth=True
        )
        try:
            exchange.address = f"{host}:{server.add_secure_port(f'{host}:{port}', credentials)}"
        except RuntimeError as error:
            raise FederationError(f"cannot listen on {host}:{port}: {error}") from error
        server.start()
        try:
            yield exchange
        finally:
            exchange.fail("the exchange has closed")
            server.stop(grace=0.5).wait()
            pool.shutdown(wait=False, cancel_futures=True)

    def fail(self, reason: str) -> None:
        """End the training: present and later callers get the reason as an error. The first reason stands."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def meet(self, method: str, message: _Message) -> bytes:
        """Wait until every silo has sent its message with this number. Returns the common answer."""
        with self._changed:
            if self._failure:
                raise FederationError(self._failure)
            meeting = self._meetings.setdefault(message.number, _Meeting(method))
            meeting.add(method, message)
            self.received[self._silos[message.rank]] += len(message.content)
            if len(meeting.messages) == len(self._silos):
                meeting.answer = meeting.combined()
                del self._meetings[message.number]
                self._changed.notify_all()
            arrived = self._changed.wait_for(
                lambda: meeting.answer is not None or self._failure, timeout=self._patience
            )
        if meeting.answer is not None:
            return meeting.answer
        if not arrived:
            missing = [name for rank, name in enumerate(self._silos) if rank not in meeting.messages]
            self.fail(f"no word from {', '.join(missing)} for {self._patience:g} s")
        raise FederationError(self._failure or "the training was ended")

    def check_seat(self, rank: int, names: Sequence[bytes]) -> None:
        """Raise FederationError unless the certificate is that of the seat: silos send only as themselves."""
        if not 0 <= rank < len(self._silos) or seat_name(rank).encode() not in names:
            raise FederationError(f"another silo's certificate was shown for seat {rank}")

    def gone(self, rank: int, number: int) -> None:
        """Handle a silo's disconnection: if it was still waiting for an answer, the training ends."""
        with self._changed:
            waiting = number in self._meetings
        if waiting:
            self.fail(f"{self._silos[rank]} went away")


@dataclass(frozen=True, slots=True)
class _Message:
    """XGBoost's request: number, rank, content, then (type, operation) or the root, as Protocol Buffers."""

    number: int
    rank: int
    content: bytes
    detail: int = 0
    operation: int = 0

    @classmethod
    def parse(cls, data: bytes) -> _Message:
        fields: dict[int, Any] = {}
        at = 0
        while at < len(data):
            tag, at = _varint(data, at)
            number, at = _varint(data, at)
            if tag & 7 not in (0, 2):
                raise FederationError("a message that is not XGBoost's")
            fields[tag >> 3] = data[at : at + number] if tag & 7 else number
            at += number if tag & 7 else 0
        return cls(fields.get(1, 0), fields.get(2, 0), fields.get(3, b""), fields.get(4, 0), fields.get(5, 0))


@dataclass
class _Meeting:
    """The messages with one number, by rank."""

    method: str
    messages: dict[int, _Message] = field(default_factory=dict)
    answer: bytes | None = None

    def add(self, method: str, message: _Message) -> None:
        if method != self.method or message.rank in self.messages:
            raise FederationError(f"silos are out of step: {method} where {self.method} was under way")
        self.messages[message.rank] = message

    def combined(self) -> bytes:
        """Combine the messages: a sum in rank order, all contents in that order, or the root's content."""
        ordered = [self.messages[rank] for rank in sorted(self.messages)]
        if self.method == "Broadcast":
            return self.messages[ordered[0].detail].content
        if self.method in ("Allgather", "AllgatherV"):
            return b"".join(message.content for message in ordered)
        kinds = {(message.detail, message.operation, len(message.content)) for message in ordered}
        if len(kinds) > 1 or _TYPES[ordered[0].detail] is None:
            raise FederationError("silos are out of step: they would add different things")
        arrays = [np.frombuffer(message.content, _TYPES[message.detail]) for message in ordered]
        total: NDArray[Any] = arrays[0].copy()
        for array in arrays[1:]:
            _REDUCE[ordered[0].operation](total, array, out=total)
        return total.tobytes()


def _service(exchange: Exchange) -> Any:
    """Return the exchange as a gRPC service; messages stay bytes, so no generated code is needed."""
    import grpc

    def answer(method: str, data: bytes, context: Any) -> bytes:
        try:
            message = _Message.parse(data)
            exchange.check_seat(message.rank, context.auth_context().get("x509_common_name", []))
            context.add_callback(lambda: exchange.gone(message.rank, message.number))
            return _reply(exchange.meet(method, message))
        except Exception as error:
            exchange.fail(str(error))  # otherwise the other silos would wait for this one
            context.abort(grpc.StatusCode.ABORTED, str(error))
            raise

    class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            service, _, method = details.method.rpartition("/")
            if service != "/xgboost.collective.federated.Federated":
                return None
            return grpc.unary_unary_rpc_method_handler(partial(answer, method))

    return Service()


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode Protocol Buffers' variable-length integer: seven bits a byte, the lowest first."""
    value, shift = 0, 0
    while True:
        if at >= len(data) or shift > 63:
            raise FederationError("a message that is not XGBoost's")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _reply(content: bytes) -> bytes:
    """Encode XGBoost's reply, whose one field is the content."""
    size, head = len(content), bytearray(b"\x0a")
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + content
