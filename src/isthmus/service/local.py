"""A whole federation on this machine: nodes and broker of a folder, as processes that start and end together.

    with run_federation(Path("my-federation")) as federation:      # a folder that `isthmus new` wrote
        print(federation.link)

Every process has a pipe from this one as its stdin and ends when that closes, so that none outlives this
process, however it ends. Their logs are beside their configuration.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from isthmus.errors import ConfigError, ServiceError
from isthmus.service.client import Client
from isthmus.service.connections import listen_problem
from isthmus.service.scaffold import ADMIN_KEY, BROKER
from isthmus.service.settings import BrokerSettings, read_broker

PATIENCE = 120.0
"""Seconds that all processes together have to start, and to end."""
TICK = 0.1
PORTS = range(8100, 60_000, 10)
"""First ports that are tried for a federation."""

Processes = dict[str, "subprocess.Popen[bytes]"]


@dataclass(frozen=True, eq=False)
class Federation:
    """A running federation: its folder, the broker's settings and the processes by name."""

    folder: Path
    settings: BrokerSettings
    processes: Mapping[str, subprocess.Popen[bytes]]

    @property
    def url(self) -> str:
        """The URL of the broker's page and API."""
        return f"http{'s' if self.settings.https else ''}://{self.settings.host}:{self.settings.port}"

    @property
    def key(self) -> Path:
        """The file of the administrator's API key."""
        return self.folder / BROKER / ADMIN_KEY

    @property
    def link(self) -> str:
        """The page's address with the administrator's key; a browser keeps what follows # to itself."""
        return f"{self.url}/#/search?key={self.key.read_text(encoding='utf-8').strip()}"

    def client(self) -> Client:
        """Return a client of the broker with the administrator's key."""
        tls = self.settings.tls if self.settings.https else None
        return Client(self.url, key=self.key, authority=None if tls is None else tls.authority)

    def check(self) -> None:
        """Raise a ServiceError with the end of its log if a process has ended."""
        for why in self.ended.values():
            raise ServiceError(why)

    def check_serving(self) -> dict[str, str]:
        """Return the reasons of the silos that have ended, by name. Raises a ServiceError if the broker has
        ended, or all silos."""
        ended = self.ended
        if BROKER in ended or len(ended) == len(self.processes) - 1:
            raise ServiceError(ended.get(BROKER) or "; ".join(ended.values()))
        return ended

    @property
    def ended(self) -> dict[str, str]:
        """The processes that have ended, each with the reason: the signal, or the end of its log."""
        statuses = {name: process.poll() for name, process in self.processes.items()}
        return {name: self._reason(name, status) for name, status in statuses.items() if status is not None}

    def _reason(self, name: str, status: int) -> str:
        if status < 0:
            return f"{name} was ended by signal {-status} ({signal.strsignal(-status) or 'unknown'})"
        return f"{name} has ended with status {status}: {_last_words(log_of(self.folder, name))}"


@contextmanager
def run_federation(folder: Path, *, patience: float = PATIENCE) -> Iterator[Federation]:
    """Run the folder's silos and its broker inside this block. When it is entered, every silo can be
    searched."""
    settings = read_broker(folder / "broker.toml")
    processes: Processes = {}
    federation = Federation(folder, settings, processes)
    until = time.monotonic() + patience
    try:
        for name in settings.silos:
            processes[name] = _started(folder, name, "node", folder / name / "silo.toml")
        for name, silo in settings.silos.items():
            _wait(federation, until, f"{name} listens", partial(_listening, silo.url))
        processes[BROKER] = _started(folder, BROKER, "broker", folder / "broker.toml")
        _wait(federation, until, "every silo can be searched", partial(_searchable, federation))
        yield federation
    finally:
        _end(processes)


def free_ports(count: int, first: int | None = None) -> int:
    """Return a port that is free together with the next ones, `count` in all: `first` if it is given, else
    any."""
    for base in PORTS if first is None else (first,):
        if base + count <= 65_536 and not any(map(listen_problem, range(base, base + count))):
            return base
    if first is not None and first + count > 65_536:
        problem = f"port {first} leaves too few after it: {count} in a row are needed"
        raise ConfigError(problem, key="--port", value=first, expected=f"a port from 1 to {65_536 - count:,}")
    where = "" if first is None else f" from {first} to {first + count - 1}"
    raise ConfigError(f"the ports{where} are not all free", key="--port", expected=f"{count} free ports")


def log_of(folder: Path, name: str) -> Path:
    """Return the path of the log of a process of the federation."""
    return folder / f"{name}.log"


def _started(folder: Path, name: str, verb: str, config: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "isthmus", verb, "--config", str(config), "--quiet", "--until-eof"]
    with open(log_of(folder, name), "ab") as log:
        return subprocess.Popen(  # own session: this process passes on a terminal's Ctrl-C
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )


def _wait(federation: Federation, until: float, what: str, done: Callable[[], bool]) -> None:
    while not done():
        federation.check()
        if time.monotonic() > until:
            raise ServiceError(f"timed out waiting: {what}; the logs are in {federation.folder}")
        time.sleep(TICK)


def _listening(url: str) -> bool:
    at = urlsplit(url)
    try:
        with socket.create_connection((at.hostname, at.port), timeout=1.0):
            return True
    except OSError:
        return False


def _searchable(federation: Federation) -> bool:
    """Whether every silo is ready and, if sums are shared, scores with the sum of all silos."""
    try:
        with federation.client() as broker:
            view = broker.silos()
    except ServiceError:
        return False
    ready = [silo.ready for silo in view.silos]
    if not all(each is not None and each.ready for each in ready):
        return False
    versions = {each.statistics for each in ready if each is not None and each.level != "scores"}
    return (
        not versions
        or not federation.settings.share_statistics
        or (versions == {view.statistics} and versions != {""})
    )


def _end(processes: Processes) -> None:
    """End the broker first, so that it asks no silo that is gone. Processes that do not end in time are
    killed."""
    for name in sorted(processes, key=lambda name: name != BROKER):
        process = processes[name]
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        with suppress(OSError):
            process.terminate()
    until = time.monotonic() + PATIENCE
    for process in processes.values():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(log: Path) -> str:
    with open(log, "rb") as stream:
        stream.seek(max(0, os.path.getsize(log) - 4_000))
        lines = stream.read().decode("utf-8", "replace").strip().splitlines()
    if not lines:
        return f"nothing in {log}"
    try:
        return str(json.loads(lines[-1])["message"])
    except (ValueError, KeyError, TypeError):
        return lines[-1]
