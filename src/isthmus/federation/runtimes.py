"""Where the apps run: in this process, in Flower's Ray simulation, or on real nodes.

One ServerApp and one ClientApp serve all three. `in_process` has a grid that calls the ClientApp, one BLAS
thread each, and costs well under a millisecond per idle silo; `on_cores` is the same with the calls answered
by forked processes, and the default. `ray` hands the same apps to Flower's simulation, for a cluster. On real
nodes the silos fetch their messages (`remote`) and answer with the same ClientApp.

Silos on other machines as a Flower grid: a message waits until its silo fetches it, and is answered once.

    grid = RemoteGrid(["north", "south"])                 # the coordinator's side
    order = grid.fetch("north")                            # bytes for the silo north, or none yet
    silo = SiloEnd(client, {"silo": "north", "data": …})   # its side: the app installed there
    grid.deliver("north", silo.answer(order))

Nothing here knows how bytes travel or who has proved to be `north`: that is its carrier's part
(`service.coordination`). What travels are messages; there is no way to send an app. A message that was lost
on the way is handed out again, and a silo that has answered it repeats its answer.
"""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import signal
import sys
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from isthmus.errors import FederationError, MissingExtra, PrivacyError
from isthmus.federation import flower
from isthmus.federation.messages import decode, encode
from isthmus.rankers import one_blas_thread

T = TypeVar("T")
App = Callable[[flower.Message, flower.Context], flower.Message]
_RAISED = 2  # Flower's code for "the ClientApp raised an exception"
_LOOK = 1.0  # seconds between two looks whether the parent still lives


class LocalGrid(flower.NodeGrid):
    """Flower's grid over a ClientApp in this process.

    Every node has a Context of its own and is given its place among the partitions, as Flower's simulation
    does. Messages are handed over without being copied: apps treat what they receive as read-only.
    """

    def __init__(self, app: App, nodes: int, *, workers: int | None = None) -> None:
        super().__init__(flower.RUN_ID)
        self._app = app
        self._contexts = {flower.COORDINATOR + 1 + at: _context(at, nodes) for at in range(nodes)}
        self._pool = ThreadPoolExecutor(workers or available_cores(), thread_name_prefix="silo")
        self._pending: dict[str, Future[flower.Message]] = {}
        self._numbers = itertools.count(1)

    def get_node_ids(self) -> Iterable[int]:
        """Every node, in the order of partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[flower.Message]) -> Iterable[str]:
        """Hand the messages to the pool."""
        return [self._submit(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[flower.Message]:
        """The replies that are ready; each is given once."""
        ready = [known for known in message_ids if known in self._pending and self._pending[known].done()]
        return [self._pending.pop(known).result() for known in ready]

    def send_and_receive(
        self, messages: Iterable[flower.Message], *, timeout: float | None = None
    ) -> Iterable[flower.Message]:
        """The replies that arrive in time; whoever has not begun by then need not begin."""
        pushed = list(self.push_messages(messages))
        wait([self._pending[known] for known in pushed], timeout=timeout)
        replies = list(self.pull_messages(pushed))
        for known in pushed:
            if known in self._pending:
                self._pending.pop(known).cancel()
        return replies

    def close(self) -> None:
        """Let the threads go; the result of a silo still at work is discarded."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, message: flower.Message) -> str:
        known = str(next(self._numbers))
        flower.stamp(message, message_id=known)
        context = self._contexts[message.metadata.dst_node_id]
        self._pending[known] = self._pool.submit(answered, self._app, message, context)
        return known


def on_cores(
    server: flower.ServerApp, client: flower.ClientApp, silos: int, *, workers: int | None = None
) -> None:
    """Run the apps here, silos in forked processes where there is more than one worker and forks are safe."""
    count = min(workers or available_cores(), silos)
    if count < 2 or not can_fork():
        in_process(server, client, silos, workers=workers)
        return
    flower.give_identity()
    pool = WorkerPool(client, count)
    try:
        in_process(server, pool, silos, workers=count)
    finally:
        pool.close()


def in_process(server: flower.ServerApp, client: App, silos: int, *, workers: int | None = None) -> None:
    """Run the apps here, with as many silos at work at once as there are workers."""
    grid = LocalGrid(client, silos, workers=workers)
    try:
        with one_blas_thread():
            server(grid, _context(0, silos))
    finally:
        grid.close()


def ray(
    server: flower.ServerApp, client: flower.ClientApp, silos: int, *, workers: int | None = None
) -> None:
    """Run the apps in Flower's Ray simulation, one core a worker."""
    try:
        import ray as _  # noqa: F401
    except ImportError as error:
        raise MissingExtra("ray", "the Ray runtime") from error
    flower.simulate(server, client, silos, workers=workers or available_cores())


def run_in(
    runtime: str,
    main: Callable[[flower.Grid], T],
    client: flower.ClientApp,
    silos: int,
    *,
    workers: int | None = None,
) -> T:
    """What `main` makes of a grid of silos that answer with the ClientApp."""
    server, results = flower.ServerApp(), list[T]()

    @server.main()
    def serve(grid: flower.Grid, context: flower.Context) -> None:
        results.append(main(grid))

    RUNTIMES[runtime](server, client, silos, workers=workers)
    if not results:
        raise FederationError("the runtime ended before training did")
    return results[0]


RUNTIMES = MappingProxyType({"in-process": on_cores, "ray": ray})


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _context(partition: int, partitions: int) -> flower.Context:
    place: flower.UserConfig = {"partition-id": partition, "num-partitions": partitions}
    return flower.Context(flower.RUN_ID, flower.COORDINATOR + 1 + partition, place, flower.RecordDict(), {})


class Worker(NamedTuple):
    """A forked process and the line to it."""

    process: Any
    line: Connection


class WorkerPool:
    """An app whose calls are answered by forked processes: as many at once as there are workers.

    Threads cannot train at the same time: a mini-batch is some twenty short NumPy calls, and between any two
    of them a thread needs Python's lock. A worker serves any silo: what a silo keeps from message to message
    travels with the message, and its rows lie in memory that all of them share (`silo_data.Tables`). Where a
    process ends before its time the silo it served has failed, and its place is taken by the thread that
    calls.
    """

    def __init__(self, app: App, workers: int) -> None:
        self._app = app
        self._workers = [_forked(app) for _ in range(workers)]
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def __call__(self, message: flower.Message, context: flower.Context) -> flower.Message:
        """The app's reply; the context's state is then what the app left behind."""
        worker = self._idle.get()
        try:
            if worker is None:
                return self._app(message, context)
            try:
                return _ask_worker(worker, message, context)
            except (EOFError, OSError) as error:
                worker = None
                raise FederationError("the process that served the silo ended") from error
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes; what one is still at work on is discarded."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()


def can_fork() -> bool:
    """Whether processes can be forked safely: elsewhere the system's own libraries forbid it, and Python
    lets no daemon have children."""
    return sys.platform == "linux" and not current_process().daemon


def answered(app: App, message: flower.Message, context: flower.Context) -> flower.Message:
    """The app's reply; whatever it raises is that silo's failure, not the round's."""
    try:
        return app(message, context)
    except Exception as error:
        return flower.Message(flower.Error(_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def _ask_worker(worker: Worker, message: flower.Message, context: flower.Context) -> flower.Message:
    _send(worker.line, message, context)
    reply, left = _receive(worker.line)
    context.state = left.state
    return reply


def _forked(app: App) -> Worker:
    fork = get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=_serve, args=(app, there, os.getpid()), daemon=True)
    with warnings.catch_warnings():  # newer Pythons warn of the parent's other threads; the child needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    return Worker(process, here)


def _serve(app: App, line: Connection, parent: int) -> None:
    """Answer until the parent has gone."""
    gc.freeze()  # looking for garbage among what the parent left would copy all of it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to deal with
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with one_blas_thread():
        while os.getppid() == parent:
            if line.poll(_LOOK):
                message, context = _receive(line)
                _send(line, answered(app, message, context), context)


def _send(line: Connection, message: flower.Message, context: flower.Context) -> None:
    """Both or none: half of it would be taken for the beginning of the next."""
    parts = encode(message), flower.context_to_proto(context).SerializeToString()
    for part in parts:
        line.send_bytes(part)


def _receive(line: Connection) -> tuple[flower.Message, flower.Context]:
    message, context = line.recv_bytes(), line.recv_bytes()
    return (
        flower.message_from_proto(flower.MessageBytes.FromString(message)),
        flower.context_from_proto(flower.ContextBytes.FromString(context)),
    )


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


def check_claim(grid: flower.Grid, node: int, name: str) -> None:
    """Raise if a node calls itself other than its certificate does; only a RemoteGrid knows certificates."""
    if isinstance(grid, RemoteGrid) and grid.name(node) != name:
        raise FederationError(f"the silo {grid.name(node)} calls itself {name!r}")


@dataclass
class _Order:
    """A message to a silo, and how far it has come."""

    message: flower.Message
    data: bytes
    pushed: float
    touched: float = -REPEAT
    """When the silo last had anything to do with it."""
    deliveries: int = 0
    reply: flower.Message | None = None


@dataclass
class _Silo:
    """What is known of a silo: when it was last heard of, and the orders it has not answered."""

    node: int
    last_contact: float = -PATIENCE
    orders: dict[str, _Order] = field(default_factory=dict)


class RemoteGrid(flower.NodeGrid):
    """Flower's grid over silos that fetch their messages.

    A silo's node number follows from the names, so it stays when the silo or the coordinator starts again.
    A later message to a silo takes the place of one that it has not answered: nobody waits for that any more.
    """

    def __init__(self, silos: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(secrets.randbits(62) | 1)  # drawn anew for every coordinator
        names = sorted(set(silos))
        self._silos = {name: _Silo(flower.COORDINATOR + 1 + at) for at, name in enumerate(names)}
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
            flower.stamp(reply, src_node_id=silo.node)
            order.reply = reply
            self._changed.notify_all()
        return True

    def get_node_ids(self) -> Iterable[int]:
        """The silos heard of lately."""
        now = self._clock()
        with self._changed:
            return [silo.node for silo in self._silos.values() if now - silo.last_contact < PATIENCE]

    def push_messages(self, messages: Iterable[flower.Message]) -> Iterable[str]:
        """Lay messages out for their silos."""
        batch = list(messages)
        with self._changed:
            for node in {message.metadata.dst_node_id for message in batch}:
                self._withdraw(self._silos[self._names[node]])
            return [self._submit(message) for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[flower.Message]:
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
        self, messages: Iterable[flower.Message], *, timeout: float | None = None
    ) -> Iterable[flower.Message]:
        """The replies that arrive in time; what is unanswered by then is withdrawn."""
        waiting = set(self.push_messages(messages))
        until = None if timeout is None else self._clock() + timeout
        replies: list[flower.Message] = []
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

    def _submit(self, message: flower.Message) -> str:
        known = secrets.token_hex(16)
        flower.stamp(message, message_id=known, run_id=self._run.run_id)
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

    def _error(self, order: _Order, code: int, reason: str) -> flower.Message:
        return flower.Message(flower.Error(code, reason), reply_to=order.message)


class SiloEnd:
    """A silo's side: every message is answered by one app, the one given here, and answered once.

    What an error says of the silo's own files stays in its log (`report`); peers learn its kind.
    """

    def __init__(
        self, app: App, node_config: Mapping[str, str | float], *, report: Callable[[Exception], None]
    ) -> None:
        flower.give_identity()
        self._app, self._config, self._report = app, dict(node_config), report
        self._contexts: OrderedDict[int, flower.Context] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()

    def answer(self, data: bytes) -> bytes:
        """The reply to a message; to a message that was answered before, the same reply."""
        message = decode(data)
        number = message.metadata.message_id
        if number not in self._answers:
            _remember(self._answers, number, encode(self._answered(message)))
        return self._answers[number]

    def _answered(self, message: flower.Message) -> flower.Message:
        run, node = message.metadata.run_id, message.metadata.dst_node_id
        if run not in self._contexts:
            config: flower.UserConfig = {**self._config}
            _remember(self._contexts, run, flower.Context(run, node, config, flower.RecordDict(), {}))
        try:
            with one_blas_thread():
                return self._app(message, self._contexts[run])
        except Exception as error:
            self._report(error)
            public = isinstance(error, FederationError | PrivacyError)
            reason = f"{type(error).__name__}: {error}" if public else f"{type(error).__name__} (see its log)"
            return flower.Message(flower.Error(_FAILED, reason), reply_to=message)


def number_of(data: bytes) -> str:
    """The number of the message that bytes are, or a ProtocolError."""
    return str(decode(data).metadata.message_id)


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    while len(table) > REMEMBERED:
        table.popitem(last=False)
