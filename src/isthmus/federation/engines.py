"""Where the apps run: in this process, in Flower's Ray simulation, or on real nodes.

One ServerApp and one ClientApp serve all three. `in_process` has a grid that calls the ClientApp, one BLAS
thread each, and costs well under a millisecond per idle silo; `on_cores` is the same with the calls answered
by forked processes, and the default. `ray` hands the same apps to Flower's simulation, for a cluster. On real
nodes the silos fetch their messages (`remote`) and answer with the same ClientApp.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from isthmus.errors import MissingExtra
from isthmus.federation.crew import App, Crew, answered, can_fork
from isthmus.federation.flower import (
    ClientApp,
    Context,
    Grid,
    Message,
    RecordDict,
    Run,
    ServerApp,
    TaskIdentity,
    UserConfig,
)
from isthmus.rankers import one_blas_thread

RUN_ID = 1
COORDINATOR = 1


class LocalGrid(Grid):
    """Flower's grid over a ClientApp in this process.

    Every node has a Context of its own and is given its place among the partitions, as Flower's simulation
    does. Messages are handed over without being copied: apps treat what they receive as read-only.
    """

    def __init__(self, app: App, nodes: int, *, workers: int | None = None) -> None:
        give_identity()
        self._app = app
        self._contexts = {COORDINATOR + 1 + at: _context(at, nodes) for at in range(nodes)}
        self._pool = ThreadPoolExecutor(workers or available_cores(), thread_name_prefix="silo")
        self._pending: dict[str, Future[Message]] = {}
        self._numbers = itertools.count(1)
        self._run = Run.create_empty(RUN_ID)

    def set_run(self, run: Run) -> None:
        """Take another run's details."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run's details."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

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
        """Let the threads go; a silo still at work finishes for nobody."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, message: Message) -> str:
        known = str(next(self._numbers))
        message.metadata.__dict__["_message_id"] = known  # as Flower's own grids do: it has no setter
        context = self._contexts[message.metadata.dst_node_id]
        self._pending[known] = self._pool.submit(answered, self._app, message, context)
        return known


def on_cores(server: ServerApp, client: ClientApp, silos: int, *, workers: int | None = None) -> None:
    """Run the apps here, silos in forked processes where there is more than one worker and forks are safe."""
    crew = min(workers or available_cores(), silos)
    if crew < 2 or not can_fork():
        in_process(server, client, silos, workers=workers)
        return
    give_identity()
    forked = Crew(client, crew)
    try:
        in_process(server, forked, silos, workers=crew)
    finally:
        forked.close()


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
        raise MissingExtra("ray", "the Ray engine") from error
    from flwr.simulation import run_simulation

    resources: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": workers or available_cores(), "log_to_driver": False},
    }
    with _telling_nobody():
        run_simulation(server, client, silos, backend_config=resources)


@contextmanager
def _telling_nobody() -> Iterator[None]:
    """Without Flower's and Ray's telemetry, and without Flower's commentary: the record has it all."""
    from flwr.supercore import telemetry

    enabled, usage = telemetry.FLWR_TELEMETRY_ENABLED, os.environ.get("RAY_USAGE_STATS_ENABLED")
    logger = logging.getLogger("flwr")
    level = logger.level
    telemetry.FLWR_TELEMETRY_ENABLED = os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        telemetry.FLWR_TELEMETRY_ENABLED = enabled
        logger.setLevel(level)
        if usage is None:
            del os.environ["RAY_USAGE_STATS_ENABLED"]
        else:
            os.environ["RAY_USAGE_STATS_ENABLED"] = usage


Engine = Callable[..., None]
ENGINES = MappingProxyType({"in-process": on_cores, "ray": ray})


def available_cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _context(partition: int, partitions: int) -> Context:
    place: UserConfig = {"partition-id": partition, "num-partitions": partitions}
    return Context(RUN_ID, COORDINATOR + 1 + partition, place, RecordDict(), {})


def give_identity() -> None:
    """Flower's messages name the task that makes them; a process outside its runtimes has none yet."""
    if TaskIdentity._run_id is None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, COORDINATOR, RUN_ID
