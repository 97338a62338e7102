"""Run a node or the broker as a process: its server, its training, and how they end together."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from isthmus.errors import ConfigError, IsthmusError, ServiceError, check_extra
from isthmus.service import wire
from isthmus.service.connections import Server, listen_problem, server
from isthmus.service.logs import end_with_stdin, log_to_stderr
from isthmus.service.operating import Task, operated
from isthmus.service.security import ApiKeys
from isthmus.service.settings import BrokerSettings, NodeSettings, SiloTraining, literal_secrets
from isthmus.service.silo_training import ENVIRONMENT, TrainingRole, pauses, take_part
from isthmus.service.tracing import start_tracing

PATIENCE = 10.0
"""Seconds that the training process has to end."""

YOUNG = 20_000
"""New objects after which the garbage collector runs."""
SETTLED = (1.0, 30.0)
"""Seconds after a server began to listen at which `_freeze` is called: most lasting objects exist by then."""

_log = logging.getLogger("isthmus.service")


def begin(
    config: str, settings: NodeSettings | BrokerSettings, *, quiet: bool = False, until_eof: bool = False
) -> None:
    """Set up a server process: its log, traces, warnings of readable secrets, and its end with its parent."""
    log_to_stderr(access=not quiet)
    if isinstance(settings, NodeSettings):
        start_tracing(settings.tracing, "node", settings.silo)
    else:
        start_tracing(settings.tracing, "broker", settings.name)
    warn_of_open_files(Path(config), settings)
    if until_eof:
        end_with_stdin()


def run_node(
    settings: NodeSettings,
    *,
    started: Callable[[str], None] = lambda url: None,
    reread: Callable[[], NodeSettings] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are finished, then everything is closed.

    On SIGHUP and SIGUSR1 the sources are read again, with the settings that `reread` returns.
    """
    if settings.training is not None:
        check_extra("train", "[training]", "flwr")
    _check_free(settings.host, settings.port)
    from isthmus.service.erasure import carry_on, erase
    from isthmus.service.node import Node, folder_lock
    from isthmus.service.node_api import node_app
    from isthmus.service.retention import apply_retention

    with ExitStack() as stack:
        stack.enter_context(folder_lock(settings.folder))
        node = Node(settings, reread=reread)
        stack.push(node.__exit__)
        try:
            carry_on(node)
        except IsthmusError as error:
            _log.error("what was being erased is not finished, and is tried again tomorrow: %s", error)
        node.chores += [partial(carry_on, node), partial(apply_retention, node)]
        node.__enter__()
        _warn_of_endings(settings.keys)
        for number in (signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: node.read_again())
        if settings.training is not None:
            stack.enter_context(training(settings, settings.training))
        tasks: dict[str, Task] = {
            "reload": lambda command: node.reloaded(),
            "erase": lambda command: erase(
                node, [str(id) for id in command["ids"]], subject=str(command.get("subject", ""))
            ),
            "retention": lambda command: apply_retention(
                node, dry_run=bool(command["dry_run"]), confirmed=bool(command["confirmed"])
            ),
        }
        stack.enter_context(operated(settings.folder, tasks))
        serving = server(
            node_app(node),
            host=settings.host,
            port=settings.port,
            tls=settings.tls,
            mutual=settings.tls is not None,
            limits=settings.limits,
        )

        def listening(url: str) -> None:
            _log.info("silo %s listens at %s", settings.silo, url)
            started(url)
            threading.Thread(target=_warm, name="warm", daemon=True).start()

        _serve(serving, settings.host, listening)


def _warm() -> None:
    """Import modules that a search needs but listening does not, so that the first search need not wait."""
    import scipy.special  # noqa: F401


def run_broker(settings: BrokerSettings, *, started: Callable[[str], None] = lambda url: None) -> None:
    """Serve the search over all silos until SIGINT or SIGTERM."""
    from isthmus.service.api import broker_app
    from isthmus.service.broker import Broker

    _check_free(settings.host, settings.port)
    if settings.https and settings.tls is None:
        raise ConfigError("https = true needs [tls]", key="tls", expected="certificate, key and authority")
    _warn_of_endings(settings.keys)
    tls = settings.tls if settings.https else None
    app = broker_app(Broker(settings))
    serving = server(app, host=settings.host, port=settings.port, tls=tls, limits=settings.limits)

    def listening(url: str) -> None:
        _log.info("broker of %s at %s", ", ".join(settings.silos), url)
        started(url)

    _serve(serving, settings.host, listening)


def run_local(app: ASGIApp, *, port: int = 0, started: Callable[[str], None] = lambda url: None) -> None:
    """Serve the app of one person on loopback until SIGINT or SIGTERM."""
    _check_free("127.0.0.1", port)
    _serve(server(app, port=port), "127.0.0.1", started)


def warn_of_open_files(config: Path, settings: NodeSettings | BrokerSettings) -> None:
    """Warn of secrets that other users of this machine can read."""
    keys = literal_secrets(settings)
    if keys and config.stat().st_mode & 0o044:
        message = "%s has a secret (%s) and can be read by others: chmod 600 it, or write env:NAME there"
        _log.warning(message, config, ", ".join(keys))
    if settings.folder.is_dir() and settings.folder.stat().st_mode & 0o055:
        _log.warning("%s can be opened by others: chmod 700 %s", settings.folder, settings.folder)


def _warn_of_endings(keys: Path | None) -> None:
    """Warn of API keys that expire soon."""
    for key in ApiKeys(keys).ending() if keys is not None else ():
        ends = wire.moment(key.expires or 0.0)
        _log.warning("the API key %s of %s ends on %s: isthmus keys api add", key.id, key.name, ends)


def _serve(serving: Server, host: str, started: Callable[[str], None]) -> None:
    loop = serving.config.get_loop_factory()
    with suppress(KeyboardInterrupt, SystemExit), asyncio.Runner(loop_factory=loop) as runner:
        runner.run(_served(serving, host, started))  # uvicorn re-raises the signal that stopped it
    if not serving.started:
        raise ServiceError("the server could not start; its log says why")
    _log.info("stopped")


async def _served(serving: Server, host: str, started: Callable[[str], None]) -> None:
    """Run a server; report its address as soon as it listens."""
    work = asyncio.create_task(serving.serve())
    while not (serving.started or work.done()):
        await asyncio.sleep(0.02)
    if serving.started:
        port = serving.servers[0].sockets[0].getsockname()[1]
        started(f"{serving.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        for seconds in SETTLED:
            asyncio.get_running_loop().call_later(seconds, _freeze)
    await work


def _freeze() -> None:
    """Exempt the objects that exist by now, most of which last, from garbage collection: scanning them
    takes a tenth of a second, in which no request is answered. A search makes many objects, and no cycles
    of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)


def _check_free(host: str, port: int) -> None:
    """Raise a one-line ConfigError, before anything is opened, if the port is taken."""
    problem = listen_problem(port, host) if port else ""
    if problem:
        message = f"{host}:{port} cannot be listened at: {problem}"
        raise ConfigError(message, key="port", value=port, expected="a free port")


def run_training(settings: NodeSettings) -> None:
    """Take part in training in this process, without serving searches, until SIGINT or SIGTERM."""
    if settings.training is None:
        raise ConfigError("there is no [training]", key="training", expected="coordinator, data and tls")
    check_extra("train", "[training]", "flwr")
    from isthmus.service.node import open_ledger

    open_ledger(settings).close()  # creates the ledger if it is missing
    take_part(TrainingRole.of(settings, settings.training))


@contextmanager
def training(settings: NodeSettings, wanted: SiloTraining) -> Iterator[TrainingProcess]:
    """Run the silo's training process while the node runs."""
    if wanted.user and wanted.private is not None:
        _hand_over(wanted.private, wanted.user)
    else:
        _log.warning("training shares this node's user: it could read the node's keys (training.user)")
    process = TrainingProcess(TrainingRole.of(settings, wanted), settings.folder / "training.log")
    try:
        yield process
    finally:
        process.stop()


def _hand_over(folder: Path, user: str) -> None:
    """Give the user of the training process the folder of keys, with the ledger that both processes write."""
    try:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, user)
    except (LookupError, PermissionError) as error:
        raise ConfigError(
            f"{folder} cannot be given to the user {user!r}: {error}",
            key="training.user",
            expected="a user of this machine, and a node that runs as root",
        ) from error


class TrainingProcess:
    """A process that takes part in training, started again whenever it ends by itself.

    It has an environment of its own, nothing of the node's, and the paths in its `part`.
    """

    def __init__(self, part: TrainingRole, log: Path) -> None:
        self._part, self._log, self._stopped = part, log, threading.Event()
        self._process = self._started()
        self._thread = threading.Thread(target=self._watch, name="training", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The id of the current process."""
        return self._process.pid

    def stop(self) -> None:
        """End the process, if need be by force."""
        self._stopped.set()
        self._thread.join()
        self._process.terminate()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-m", "isthmus.service.silo_training"]
        with open(self._log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=dict(ENVIRONMENT), cwd="/"
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(self._part.dumped() + b"\n")
            process.stdin.flush()  # stays open: when this process ends, in any way, so does the child
        return process

    def _watch(self) -> None:
        waits = pauses()
        while not self._stopped.wait(0.2):
            if self._process.poll() is not None:
                _log.error("training ended with status %d; %s says why", self._process.returncode, self._log)
                self._stopped.wait(next(waits))
                if not self._stopped.is_set():
                    self._process = self._started()
