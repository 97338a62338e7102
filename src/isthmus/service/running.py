"""A node or the broker as a process: its log, its server, its SuperNode, and how they end together.

The log is one JSON object a line on stderr. Queries are not in it unless the operator asks for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from isthmus.errors import ConfigError, ServiceError
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.connections import Server, server
from isthmus.service.limits import moment
from isthmus.service.node import Node, alone
from isthmus.service.node_api import node_app
from isthmus.service.security import ApiKeys
from isthmus.service.settings import LOOPBACK, BrokerSettings, NodeSettings, SuperNode

PATIENCE = 10.0
"""Seconds that a SuperNode is given to end."""

_log = logging.getLogger("isthmus.service")


class JsonLines(logging.Formatter):
    """A record as one line of JSON; the access log's records are JSON already."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == "isthmus.access":
            return record.getMessage()
        told = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["trace"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=False)


def log_to_stderr(*, access: bool = True) -> None:
    """Send the service's log to stderr."""
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(JsonLines())
    for name in ("isthmus.service", "isthmus.access"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [out], False
        logger.setLevel(logging.INFO if access or name != "isthmus.access" else logging.WARNING)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # not a line for every stranger's garbage
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what a file lacks is told once, by us


def end_with_stdin() -> None:
    """End when stdin does, which whoever started this process holds the other end of."""

    def watch() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def run_node(settings: NodeSettings, *, started: Callable[[str], None] = lambda url: None) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are finished, then everything is closed.

    SIGUSR1 has the sources read again.
    """
    if settings.training is not None:
        raise ConfigError(
            "[training] would start a SuperNode, which runs any app that whoever reaches SuperLink sends, "
            "as this node's user",
            key="training",
            expected="no [training]: take it out of the configuration, and stop any SuperNode of this silo",
        )
    _check_free(settings.host, settings.port)
    with ExitStack() as held:
        held.enter_context(alone(settings.folder))
        node = held.enter_context(Node(settings))
        _warn_of_endings(settings.keys)
        signal.signal(signal.SIGUSR1, lambda number, frame: node.read_again())
        serving = server(
            node_app(node),
            host=settings.host,
            port=settings.port,
            tls=settings.tls,
            mutual=settings.tls is not None,
            limits=settings.limits,
        )
        _serve(serving, settings.host, started)


def run_broker(settings: BrokerSettings, *, started: Callable[[str], None] = lambda url: None) -> None:
    """Serve all silos' search until SIGINT or SIGTERM."""
    _check_free(settings.host, settings.port)
    if settings.https and settings.tls is None:
        raise ConfigError("https = true needs [tls]", key="tls", expected="certificate, key and authority")
    _warn_of_endings(settings.keys)
    tls = settings.tls if settings.https else None
    app = broker_app(Broker(settings))
    serving = server(app, host=settings.host, port=settings.port, tls=tls, limits=settings.limits)
    _serve(serving, settings.host, started)


def _warn_of_endings(keys: Path | None) -> None:
    """Say which API keys end soon, while somebody may still do something about it."""
    for key in ApiKeys(keys).ending() if keys is not None else ():
        ends = moment(key.expires or 0.0)
        _log.warning("the API key %s of %s ends on %s: isthmus keys api add", key.id, key.name, ends)


def _serve(serving: Server, host: str, started: Callable[[str], None]) -> None:
    with suppress(KeyboardInterrupt, SystemExit), asyncio.Runner(loop_factory=_loop(serving)) as runner:
        runner.run(_served(serving, host, started))  # uvicorn raises again what has stopped it
    if not serving.started:
        raise ServiceError("the server could not start; its log says why")
    _log.info("stopped")


def _loop(serving: Server) -> Callable[[], asyncio.AbstractEventLoop] | None:
    return serving.config.get_loop_factory()


async def _served(serving: Server, host: str, started: Callable[[str], None]) -> None:
    """Serve, and say where as soon as it is so."""
    work = asyncio.create_task(serving.serve())
    while not (serving.started or work.done()):
        await asyncio.sleep(0.02)
    if serving.started:
        port = serving.servers[0].sockets[0].getsockname()[1]
        started(f"{serving.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
    await work


def _check_free(host: str, port: int) -> None:
    """Fail in one line, before anything is opened, where somebody listens already."""
    if not port:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"{host}:{port} cannot be listened at: {error.strerror}",
                key="port",
                value=port,
                expected="a free port",
            ) from error


def node_config(settings: NodeSettings, wanted: SuperNode) -> str:
    """What the SuperNode is told of the silo; nothing that arrives over the network can change it."""
    paths = {"data": wanted.data, "ledger": settings.ledger}
    if wanted.private is not None and wanted.queries is not None:
        paths |= {"folder": wanted.private, "queries": wanted.queries}
    told = {"silo": settings.silo} | {name: str(path) for name, path in paths.items()}
    words = [f"{name}={json.dumps(value)}" for name, value in told.items()]
    return " ".join([*words, "masked-only=true"] if wanted.masked_only else words)


@contextmanager
def supernode(settings: NodeSettings, wanted: SuperNode) -> Iterator[subprocess.Popen[bytes]]:
    """The silo's SuperNode while the node runs: it reads the silo's rows and writes into its ledger."""
    program = Path(sys.executable).with_name("flower-supernode")
    found = str(program) if program.exists() else shutil.which("flower-supernode")
    if found is None:
        raise ServiceError("flower-supernode is not installed beside this Python")
    host, _, port = wanted.clientappio.rpartition(":")
    if host not in LOOPBACK:
        raise ConfigError("a SuperNode's own port is for this machine only", key="training.clientappio")
    told = node_config(settings, wanted)
    command = [found, "--superlink", wanted.superlink, "--root-certificates", str(wanted.authority)]
    command += ["--auth-supernode-private-key", str(wanted.key), "--node-config", told]
    command += ["--host", host, "--port", str(int(port) or _free_port(host))]
    home = settings.folder / "flower"
    home.mkdir(parents=True, exist_ok=True)
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(home)}
    with open(home / "supernode.log", "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | quiet
        )
    _log.info("the SuperNode's log is %s", home / "supernode.log")
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
