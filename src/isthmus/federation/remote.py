"""Silos on other machines as a Flower grid: a message waits until its silo fetches it, and is answered once.

    grid = RemoteGrid(["north", "south"])                 # the coordinator's side
    order = grid.fetch("north")                            # bytes for the silo north, or none yet
    silo = SiloEnd(client, {"silo": "north", "data": …})   # its side: the app installed there
    grid.deliver("north", silo.answer(order))

Nothing here knows how bytes travel or who has proved to be `north`: that is its carrier's part
(`service.coordination`). What travels are messages; there is no way to send an app. A message that was lost
on the way is handed out again, and a silo that has answered it repeats its answer.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from isthmus.errors import FederationError, PrivacyError
from isthmus.federation.flower import (
    COORDINATOR,
    Context,
    Error,
    Grid,
    Message,
    NodeGrid,
    RecordDict,
    UserConfig,
    give_identity,
    stamp,
)
from isthmus.federation.messages import decode, encode
from isthmus.federation.runtimes import App
from isthmus.rankers import one_blas_thread

PATIENCE = 15.0
"""Seconds without a word after which a silo counts as gone."""
REPEAT = 5.0
"""Seconds without a word about a message after which it is handed out again."""
DELIVERIES = 3
"""Times that a message is handed out before its silo counts as failed."""
REMEMBERED = 4
"""Runs whose state, and messages whose answers, a silo remembers."""
_FAILED, _GONE = 2, 3

K = TypeVar("K")
V = TypeVar("V")


def check_claim(grid: Grid, node: int, name: str) -> None:
    """Raise if a node calls itself other than its certificate does; only a RemoteGrid knows certificates."""
    if isinstance(grid, RemoteGrid) and grid.name(node) != name:
        raise FederationError(f"the silo {grid.name(node)} calls itself {name!r}")


@dataclass
class _Order:
    """A message to a silo, and how far it has come."""

    message: Message
    data: bytes
    pushed: float
    touched: float = -REPEAT
    """When the silo last had anything to do with it."""
    deliveries: int = 0
    reply: Message | None = None


@dataclass
class _Silo:
    """What is known of a silo: when it was last heard of, and the orders it has not answered."""

    node: int
    last_contact: float = -PATIENCE
    orders: dict[str, _Order] = field(default_factory=dict)


class RemoteGrid(NodeGrid):
    """Flower's grid over silos that fetch their messages.

    A silo's node number follows from the names, so it stays when the silo or the coordinator starts again.
    A later message to a silo takes the place of one that it has not answered: nobody waits for that any more.
    """

    def __init__(self, silos: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(secrets.randbits(62) | 1)  # drawn anew for every coordinator
        names = sorted(set(silos))
        self._silos = {name: _Silo(COORDINATOR + 1 + at) for at, name in enumerate(names)}
        self._names = {silo.node: name for name, silo in self._silos.items()}
        self._clock = clock
        self._changed = threading.Condition()

    def name(self, node: int) -> str:
        """The silo with this number."""
        return self._names[node]

    def fetch(self, name: str, *, busy: str = "") -> bytes | None:
        """The next message for a silo that is free; `busy` is the number of the one it is working on."""
        now = self._clock()
        with self._changed:
            silo = self._silos[name]
            silo.last_contact = now
            if busy:
                if busy in silo.orders:
                    silo.orders[busy].touched = now
                return None
            for order in silo.orders.values():
                if order.reply is None and now - order.touched >= REPEAT:
                    order.touched, order.deliveries = now, order.deliveries + 1
                    if order.deliveries <= DELIVERIES:
                        return order.data
                    order.reply = self._error(order, _FAILED, "failed each time at this message")
                    self._changed.notify_all()
        return None

    def deliver(self, name: str, data: bytes) -> bool:
        """Take a silo's reply; False for one that nobody waits for. The sender is who brought it."""
        reply = decode(data)
        number = reply.metadata.reply_to_message_id
        with self._changed:
            silo = self._silos[name]
            silo.last_contact = self._clock()
            order = silo.orders.get(number)
            if order is None or order.reply is not None:
                return False
            stamp(reply, src_node_id=silo.node)
            order.reply = reply
            self._changed.notify_all()
        return True

    def get_node_ids(self) -> Iterable[int]:
        """The silos heard of lately."""
        now = self._clock()
        with self._changed:
            return [silo.node for silo in self._silos.values() if now - silo.last_contact < PATIENCE]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Lay messages out for their silos."""
        batch = list(messages)
        with self._changed:
            for node in {message.metadata.dst_node_id for message in batch}:
                self._withdraw(self._silos[self._names[node]])
            return [self._submit(message) for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there, and an error for every silo that is gone; each is returned once."""
        wanted = set(message_ids)
        with self._changed:
            self._expire()
            ready = []
            for silo in self._silos.values():
                for number in [known for known in silo.orders if known in wanted]:
                    reply = silo.orders[number].reply
                    if reply is not None:
                        del silo.orders[number]
                        ready.append(reply)
        return ready

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """The replies that arrive in time; what is unanswered by then is withdrawn."""
        waiting = set(self.push_messages(messages))
        until = None if timeout is None else self._clock() + timeout
        replies: list[Message] = []
        with self._changed:
            while waiting:
                ready = list(self.pull_messages(waiting))
                replies += ready
                waiting -= {reply.metadata.reply_to_message_id for reply in ready}
                left = 1.0 if until is None else min(1.0, until - self._clock())
                if not waiting or left <= 0:
                    break
                self._changed.wait(left)
            for silo in self._silos.values():
                silo.orders = {key: order for key, order in silo.orders.items() if key not in waiting}
        return replies

    def _submit(self, message: Message) -> str:
        known = secrets.token_hex(16)
        stamp(message, message_id=known, run_id=self._run.run_id)
        silo = self._silos[self._names[message.metadata.dst_node_id]]
        silo.orders[known] = _Order(message, encode(message), self._clock())
        return known

    def _withdraw(self, silo: _Silo) -> None:
        """Forget what the silo has not answered, and all but the latest of its answers that nobody pulled."""
        answered = [(key, order) for key, order in silo.orders.items() if order.reply is not None]
        silo.orders = dict(answered[-REMEMBERED:])

    def _expire(self) -> None:
        now = self._clock()
        for name, silo in self._silos.items():
            for order in silo.orders.values():
                if order.reply is None and now - max(silo.last_contact, order.pushed) > PATIENCE:
                    order.reply = self._error(order, _GONE, f"the silo {name} is gone")

    def _error(self, order: _Order, code: int, reason: str) -> Message:
        return Message(Error(code, reason), reply_to=order.message)


class SiloEnd:
    """A silo's side: every message is answered by one app, the one given here, and answered once.

    What an error says of the silo's own files stays in its log (`report`); peers learn its kind.
    """

    def __init__(
        self, app: App, node_config: Mapping[str, str | float], *, report: Callable[[Exception], None]
    ) -> None:
        give_identity()
        self._app, self._config, self._report = app, dict(node_config), report
        self._contexts: OrderedDict[int, Context] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()

    def answer(self, data: bytes) -> bytes:
        """The reply to a message; to a message that was answered before, the same reply."""
        message = decode(data)
        number = message.metadata.message_id
        if number not in self._answers:
            _remember(self._answers, number, encode(self._answered(message)))
        return self._answers[number]

    def _answered(self, message: Message) -> Message:
        run, node = message.metadata.run_id, message.metadata.dst_node_id
        if run not in self._contexts:
            config: UserConfig = {**self._config}
            _remember(self._contexts, run, Context(run, node, config, RecordDict(), {}))
        try:
            with one_blas_thread():
                return self._app(message, self._contexts[run])
        except Exception as error:
            self._report(error)
            public = isinstance(error, FederationError | PrivacyError)
            reason = f"{type(error).__name__}: {error}" if public else f"{type(error).__name__} (see its log)"
            return Message(Error(_FAILED, reason), reply_to=message)


def number_of(data: bytes) -> str:
    """The number of the message that bytes are, or a ProtocolError."""
    return str(decode(data).metadata.message_id)


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    while len(table) > REMEMBERED:
        table.popitem(last=False)
