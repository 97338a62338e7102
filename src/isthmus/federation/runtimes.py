"""Runtimes of the apps: this process, Flower's Ray simulation, or real nodes.

One ServerApp and one ClientApp serve all three. `in_process` uses a grid that calls the ClientApp, with one
BLAS thread each, and costs well under a millisecond per idle silo. `on_cores`, the default, is the same with
the calls answered by forked processes. `ray` passes the same apps to Flower's simulation, for a cluster. On
real nodes the silos fetch their messages (`RemoteGrid`) and answer with the same ClientApp (`SiloEnd`).

Silos on other machines appear as a Flower grid: a message waits until its silo fetches it, and is answered
once.

    grid = RemoteGrid(["north", "south"])                 # the coordinator's side
    order = grid.fetch("north")                            # bytes for the silo north, or none yet
    silo = SiloEnd(client, {"silo": "north", "data": …})   # its side: the app installed there
    grid.deliver("north", silo.answer(order))

Transport, and the proof that a caller is `north`, are the carrier's part (`service.coordination`). Only
messages travel; there is no way to send an app. A message that was lost on the way is handed out again, and a
silo that has already answered it repeats its answer.
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
from isthmus.federation.messages import GONE, decode, encode
from isthmus.rankers import one_blas_thread

T = TypeVar("T")
App = Callable[[flower.Message, flower.Context], flower.Message]
_RAISED = 2  # Flower's code for "the ClientApp raised an exception"
_LOOK = 1.0  # seconds between two checks that the parent is alive


class LocalGrid(flower.NodeGrid):
    """Flower's grid over a ClientApp in this process.

    Every node has its own Context with its partition number, as in Flower's simulation. Messages are passed
    on without a copy: apps must treat them as read-only.
    """

    def __init__(self, app: App, nodes: int, *, workers: int | None = None) -> None:
        super().__init__(flower.RUN_ID)
        self._app = app
        self._contexts = {flower.COORDINATOR + 1 + at: _context(at, nodes) for at in range(nodes)}
        self._pool = ThreadPoolExecutor(workers or available_cores(), thread_name_prefix="silo")
        self._pending: dict[str, Future[flower.Message]] = {}
        self._numbers = itertools.count(1)

    def get_node_ids(self) -> Iterable[int]:
        """Return every node, in the order of partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[flower.Message]) -> Iterable[str]:
        """Submit the messages to the thread pool and return their ids."""
        return [self._submit(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[flower.Message]:
        """Return the replies that are ready, each of them once."""
        ready = [known for known in message_ids if known in self._pending and self._pending[known].done()]
        return [self._pending.pop(known).result() for known in ready]

    def send_and_receive(
        self, messages: Iterable[flower.Message], *, timeout: float | None = None
    ) -> Iterable[flower.Message]:
        """Send messages and return the replies that arrive in time; work not begun by then is cancelled."""
        pushed = list(self.push_messages(messages))
        wait([self._pending[known] for known in pushed], timeout=timeout)
        replies = list(self.pull_messages(pushed))
        for known in pushed:
            if known in self._pending:
                self._pending.pop(known).cancel()
        return replies

    def close(self) -> None:
        """Stop the threads; the result of a silo that is still at work is discarded."""
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
    """Run the apps here, with silos in forked processes if there are several workers and forking is safe."""
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
    """Run the apps here, with at most `workers` silos at work at once."""
    grid = LocalGrid(client, silos, workers=workers)
    try:
        with one_blas_thread():
            server(grid, _context(0, silos))
    finally:
        grid.close()


def ray(
    server: flower.ServerApp, client: flower.ClientApp, silos: int, *, workers: int | None = None
) -> None:
    """Run the apps in Flower's Ray simulation, one core per worker."""
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
    """Run `main` on a grid of silos that answer with the ClientApp, and return its result."""
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
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _context(partition: int, partitions: int) -> flower.Context:
    place: flower.UserConfig = {"partition-id": partition, "num-partitions": partitions}
    return flower.Context(flower.RUN_ID, flower.COORDINATOR + 1 + partition, place, flower.RecordDict(), {})


class Worker(NamedTuple):
    """A forked process and the connection to it."""

    process: Any
    line: Connection


class WorkerPool:
    """An app with calls answered by forked processes, as many at once as there are workers.

    Threads cannot train at the same time: a mini-batch is some twenty short NumPy calls, and between any two
    of them a thread needs Python's lock. A worker serves any silo: a silo's state travels with the message,
    and its rows are in memory that all workers share (`silo_data.Tables`). If a process ends prematurely, the
    silo that it served has failed, and the calling thread takes its place.
    """

    def __init__(self, app: App, workers: int) -> None:
        self._app = app
        self._workers = [_forked(app) for _ in range(workers)]
        self._idle: SimpleQueue[Worker | None] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def __call__(self, message: flower.Message, context: flower.Context) -> flower.Message:
        """Return the app's reply; the context then has the state that the app left."""
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
        """End the processes; unfinished work is discarded."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()


def can_fork() -> bool:
    """Whether processes can be forked safely: outside Linux the system's own libraries forbid it, and Python
    lets no daemon have children."""
    return sys.platform == "linux" and not current_process().daemon


def answered(app: App, message: flower.Message, context: flower.Context) -> flower.Message:
    """Return the app's reply, or an error if the app raises: the silo has then failed, not the round."""
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
    with warnings.catch_warnings():  # newer Pythons warn of forking with threads; the child needs none
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()
    return Worker(process, here)


def _serve(app: App, line: Connection, parent: int) -> None:
    """Answer messages until the parent process has ended."""
    gc.freeze()  # collecting the parent's objects would copy their memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with one_blas_thread():
        while os.getppid() == parent:
            if line.poll(_LOOK):
                message, context = _receive(line)
                _send(line, answered(app, message, context), context)


def _send(line: Connection, message: flower.Message, context: flower.Context) -> None:
    """Encode both parts before sending: half a pair would be read as the beginning of the next."""
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
"""Seconds without contact after which a silo counts as gone."""
REPEAT = 5.0
"""Seconds without contact about a message after which it is handed out again."""
DELIVERIES = 3
"""Number of times that a message is handed out before its silo counts as failed."""
REMEMBERED = 4
"""Number of runs with stored state, and of messages with stored answers, per silo."""
_FAILED = 2

K = TypeVar("K")
V = TypeVar("V")


def check_claim(grid: flower.Grid, node: int, name: str) -> None:
    """Raise FederationError if a node's name is not its certificate's; only a RemoteGrid has these."""
    if isinstance(grid, RemoteGrid) and grid.name(node) != name:
        raise FederationError(f"the silo {grid.name(node)} calls itself {name!r}")


@dataclass
class _Order:
    """A message to a silo, and the progress of its delivery."""

    message: flower.Message
    data: bytes
    pushed: float
    touched: float = -REPEAT
    """Time of the silo's last contact about this message."""
    deliveries: int = 0
    reply: flower.Message | None = None


@dataclass
class _Silo:
    """A silo as the grid sees it: the time of its last contact, and its orders."""

    node: int
    last_contact: float = -PATIENCE
    orders: dict[str, _Order] = field(default_factory=dict)


class RemoteGrid(flower.NodeGrid):
    """Flower's grid over silos that fetch their messages.

    A silo's node number follows from the names, so it survives a restart of the silo or the coordinator. A
    later message to a silo replaces one that it has not answered, because nobody waits for that answer any
    more.
    """

    def __init__(self, silos: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(secrets.randbits(62) | 1)  # a random run id for every coordinator
        names = sorted(set(silos))
        self._silos = {name: _Silo(flower.COORDINATOR + 1 + at) for at, name in enumerate(names)}
        self._names = {silo.node: name for name, silo in self._silos.items()}
        self._clock = clock
        self._changed = threading.Condition()

    def name(self, node: int) -> str:
        """Return the name of the silo with this node number."""
        return self._names[node]

    def fetch(self, name: str, *, busy: str = "") -> bytes | None:
        """Return the next message for a free silo; `busy` is the number of the one it is working on."""
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
        """Accept a reply from the silo `name`, whatever sender it states; False if nobody waits for it."""
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
        """Return the silos with recent contact."""
        now = self._clock()
        with self._changed:
            return [silo.node for silo in self._silos.values() if now - silo.last_contact < PATIENCE]

    def push_messages(self, messages: Iterable[flower.Message]) -> Iterable[str]:
        """Make messages available to their silos and return their ids."""
        batch = list(messages)
        with self._changed:
            for node in {message.metadata.dst_node_id for message in batch}:
                self._withdraw(self._silos[self._names[node]])
            return [self._submit(message) for message in batch]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[flower.Message]:
        """Return the replies that have arrived, and an error for every silo that is gone, each once."""
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
        """Send messages and return the replies that arrive in time; unanswered messages are withdrawn."""
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
        """Forget a silo's unanswered messages, and all but the latest of its answers not yet pulled."""
        answered = [(key, order) for key, order in silo.orders.items() if order.reply is not None]
        silo.orders = dict(answered[-REMEMBERED:])

    def _expire(self) -> None:
        now = self._clock()
        for name, silo in self._silos.items():
            for order in silo.orders.values():
                if order.reply is None and now - max(silo.last_contact, order.pushed) > PATIENCE:
                    order.reply = self._error(order, GONE, f"the silo {name} is gone")

    def _error(self, order: _Order, code: int, reason: str) -> flower.Message:
        return flower.Message(flower.Error(code, reason), reply_to=order.message)


class SiloEnd:
    """A silo's side of a RemoteGrid: every message is answered once, by the one app given here.

    Errors that may describe the silo's own files stay in its log (`report`); peers see only their type.
    """

    def __init__(
        self, app: App, node_config: Mapping[str, str | float], *, report: Callable[[Exception], None]
    ) -> None:
        flower.give_identity()
        self._app, self._config, self._report = app, dict(node_config), report
        self._contexts: OrderedDict[int, flower.Context] = OrderedDict()
        self._answers: OrderedDict[str, bytes] = OrderedDict()

    def answer(self, data: bytes) -> bytes:
        """Return the reply to a message; for a message that was answered before, the same reply."""
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
    """Return the number of an encoded message; ProtocolError if it cannot be parsed."""
    return str(decode(data).metadata.message_id)


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    while len(table) > REMEMBERED:
        table.popitem(last=False)
