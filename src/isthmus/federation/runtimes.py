"""Where the apps run: in this process, in Flower's Ray simulation, or on real nodes.

One ServerApp and one ClientApp serve all three. `in_process` has a grid that calls the ClientApp, one BLAS
thread each, and costs well under a millisecond per idle silo; `on_cores` is the same with the calls answered
by forked processes, and the default. `ray` hands the same apps to Flower's simulation, for a cluster. On real
nodes the silos fetch their messages (`remote`) and answer with the same ClientApp.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from isthmus.errors import FederationError, MissingExtra
from isthmus.federation.flower import (
    COORDINATOR,
    RUN_ID,
    ClientApp,
    Context,
    ContextBytes,
    Error,
    Grid,
    Message,
    MessageBytes,
    NodeGrid,
    RecordDict,
    ServerApp,
    UserConfig,
    context_from_proto,
    context_to_proto,
    give_identity,
    message_from_proto,
    simulate,
    stamp,
)
from isthmus.federation.messages import encode
from isthmus.rankers import one_blas_thread

T = TypeVar("T")
App = Callable[[Message, Context], Message]
_RAISED = 2  # Flower's code for "the ClientApp raised an exception"
_LOOK = 1.0  # seconds between two looks whether the parent still lives


class LocalGrid(NodeGrid):
    """Flower's grid over a ClientApp in this process.

    Every node has a Context of its own and is given its place among the partitions, as Flower's simulation
    does. Messages are handed over without being copied: apps treat what they receive as read-only.
    """

    def __init__(self, app: App, nodes: int, *, workers: int | None = None) -> None:
        super().__init__(RUN_ID)
        self._app = app
        self._contexts = {COORDINATOR + 1 + at: _context(at, nodes) for at in range(nodes)}
        self._pool = ThreadPoolExecutor(workers or available_cores(), thread_name_prefix="silo")
        self._pending: dict[str, Future[Message]] = {}
        self._numbers = itertools.count(1)

    def get_node_ids(self) -> Iterable[int]:
        """Every node, in the order of partitions."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand the messages to the pool."""
        return [self._submit(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are ready; each is given once."""
        ready = [known for known in message_ids if known in self._pending and self._pending[known].done()]
        return [self._pending.pop(known).result() for known in ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
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

    def _submit(self, message: Message) -> str:
        known = str(next(self._numbers))
        stamp(message, message_id=known)
        context = self._contexts[message.metadata.dst_node_id]
        self._pending[known] = self._pool.submit(answered, self._app, message, context)
        return known


def on_cores(server: ServerApp, client: ClientApp, silos: int, *, workers: int | None = None) -> None:
    """Run the apps here, silos in forked processes where there is more than one worker and forks are safe."""
    count = min(workers or available_cores(), silos)
    if count < 2 or not can_fork():
        in_process(server, client, silos, workers=workers)
        return
    give_identity()
    pool = WorkerPool(client, count)
    try:
        in_process(server, pool, silos, workers=count)
    finally:
        pool.close()


def in_process(server: ServerApp, client: App, silos: int, *, workers: int | None = None) -> None:
    """Run the apps here, with as many silos at work at once as there are workers."""
    grid = LocalGrid(client, silos, workers=workers)
    try:
        with one_blas_thread():
            server(grid, _context(0, silos))
    finally:
        grid.close()


def ray(server: ServerApp, client: ClientApp, silos: int, *, workers: int | None = None) -> None:
    """Run the apps in Flower's Ray simulation, one core a worker."""
    try:
        import ray as _  # noqa: F401
    except ImportError as error:
        raise MissingExtra("ray", "the Ray runtime") from error
    simulate(server, client, silos, workers=workers or available_cores())


def run_in(
    runtime: str, main: Callable[[Grid], T], client: ClientApp, silos: int, *, workers: int | None = None
) -> T:
    """What `main` makes of a grid of silos that answer with the ClientApp."""
    server, results = ServerApp(), list[T]()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        results.append(main(grid))

    RUNTIMES[runtime](server, client, silos, workers=workers)
    if not results:
        raise FederationError("the runtime ended before training did")
    return results[0]


RUNTIMES = MappingProxyType({"in-process": on_cores, "ray": ray})


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _context(partition: int, partitions: int) -> Context:
    place: UserConfig = {"partition-id": partition, "num-partitions": partitions}
    return Context(RUN_ID, COORDINATOR + 1 + partition, place, RecordDict(), {})


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

    def __call__(self, message: Message, context: Context) -> Message:
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


def answered(app: App, message: Message, context: Context) -> Message:
    """The app's reply; whatever it raises is that silo's failure, not the round's."""
    try:
        return app(message, context)
    except Exception as error:
        return Message(Error(_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)


def _ask_worker(worker: Worker, message: Message, context: Context) -> Message:
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


def _send(line: Connection, message: Message, context: Context) -> None:
    """Both or none: half of it would be taken for the beginning of the next."""
    parts = encode(message), context_to_proto(context).SerializeToString()
    for part in parts:
        line.send_bytes(part)


def _receive(line: Connection) -> tuple[Message, Context]:
    message, context = line.recv_bytes(), line.recv_bytes()
    return (
        message_from_proto(MessageBytes.FromString(message)),
        context_from_proto(ContextBytes.FromString(context)),
    )
