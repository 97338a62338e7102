"""A silo's part in training, as a separate process that runs the installed Isthmus and no other code.

It fetches messages from the coordinator over mutual TLS and answers them, one at a time. It has the paths in
its settings and no others, an environment of a few harmless entries, and cannot gain rights. If the node may
choose (`training.user`), it belongs to another user, who cannot read the node's secrets. It outlives the
coordinator: every failed request is tried again, at growing intervals.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError, ServiceError
from isthmus.service.certificates import LiveTls, client_context, server_name
from isthmus.service.coordination import BUSY, FETCH, MESSAGE_TYPE, REPLY, WAIT
from isthmus.service.logs import end_with_stdin, log_to_stderr
from isthmus.service.settings import NodeSettings, SiloTraining, Tls

ENVIRONMENT: Mapping[str, str] = {
    "PATH": os.defpath,
    "LC_ALL": "C.UTF-8",
    "ISTHMUS_CACHE": os.devnull,  # no cache: parsed rows leave no copy on disk
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}
"""The whole environment of the process."""
BEAT = 3.0
"""Seconds between two signs of life to the coordinator while a message is worked on."""
LARGEST = 256 << 20
"""Bytes of the longest message that is accepted."""
SHORTEST, LONGEST = 0.2, 10.0
"""Seconds of the first and of the longest pause after a failure."""
ATTEMPTS = 8
"""Times that a reply is sent before it is given up; the coordinator then asks again."""
_NO_NEW_PRIVILEGES = 38

_log = logging.getLogger("isthmus.service")


@dataclass(frozen=True)
class TrainingRole:
    """A silo's name in training, the coordinator that it calls, and the settings of its app."""

    silo: str
    coordinator: str
    name: str
    tls: Tls
    node_config: Mapping[str, str | float]
    user: str = ""

    @classmethod
    def of(cls, settings: NodeSettings, wanted: SiloTraining) -> TrainingRole:
        """Make the role that a node's settings describe; nothing from the network can change it."""
        paths = {"data": wanted.data, "ledger": settings.ledger}
        if wanted.private is not None and wanted.queries is not None:
            paths |= {"folder": wanted.private, "queries": wanted.queries}
        config: dict[str, str | float] = {"silo": settings.silo}
        config |= {name: str(path.resolve()) for name, path in paths.items()}
        config |= {"least-colluding": wanted.least_colluding, "most-width": wanted.most_width}
        if wanted.most_clip is not None and wanted.least_noise is not None:
            config |= {"most-clip": wanted.most_clip, "least-noise": wanted.least_noise}
        if wanted.masked_only:
            config["masked-only"] = True
        return cls(settings.silo, wanted.coordinator, wanted.name, wanted.tls, config, wanted.user)

    def dumped(self) -> bytes:
        """Convert to JSON, for the process."""
        tls = {key: path.resolve() for key, path in vars(self.tls).items()}
        return json.dumps({**vars(self), "tls": tls}, default=str).encode()

    @classmethod
    def loaded(cls, data: bytes) -> TrainingRole:
        """Read from JSON."""
        part: dict[str, Any] = json.loads(data)
        tls = {key: Path(path) for key, path in part.pop("tls").items()}
        return cls(**part, tls=Tls(**tls))


def pauses() -> Iterator[float]:
    """Yield the seconds to wait after each of several failures in a row."""
    pause = SHORTEST
    while True:
        yield pause
        pause = min(2 * pause, LONGEST)


class Unreachable(ServiceError):
    """The coordinator does not answer, or not in the protocol."""


class CoordinatorClient:
    """HTTP client of the coordinator, whose certificate must have the coordinator's name."""

    def __init__(self, part: TrainingRole) -> None:
        import httpx  # only imported by nodes that take part

        self._url = f"https://{part.coordinator}"
        self._sni = {"sni_hostname": server_name(part.name)}
        wait = httpx.Timeout(10.0, read=WAIT + 20.0, write=60.0)
        self._client = partial(httpx.Client, timeout=wait, trust_env=False)
        self._tls = LiveTls(part.tls, client_context)
        self._verify = self._tls.current.context
        self._http = self._client(verify=self._verify)

    def fetch(self, *, busy: str = "") -> bytes | None:
        """Fetch the next message; None if there is none yet."""
        return self._post(FETCH, b"", {BUSY: busy} if busy else {}) or None

    def reply(self, data: bytes) -> None:
        """Send a reply; it is no failure if the coordinator no longer waits for it."""
        self._post(REPLY, data, {"content-type": MESSAGE_TYPE})

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _post(self, path: str, data: bytes, headers: Mapping[str, str]) -> bytes:
        from httpx import HTTPError

        parts, size = [], 0
        if (
            self._tls.current.context is not self._verify
        ):  # requests that wait for a reply keep the previous client
            self._verify = self._tls.current.context
            self._http = self._client(verify=self._verify)
        try:
            with self._http.stream(
                "POST", self._url + path, content=data, headers=dict(headers), extensions=self._sni
            ) as reply:
                if reply.status_code not in (200, 204, 410):
                    raise Unreachable(f"the coordinator answered {reply.status_code}")
                for chunk in reply.iter_raw():
                    parts.append(chunk)
                    size += len(chunk)
                    if size > LARGEST:
                        raise Unreachable(f"the coordinator sent more than {LARGEST} bytes")
        except HTTPError as error:
            raise Unreachable(f"no answer from the coordinator: {error or type(error).__name__}") from error
        return b"".join(parts)


class Participant:
    """The loop of a silo: fetch a message, answer it, send the reply; after a failure, wait and retry."""

    def __init__(self, coordinator: CoordinatorClient, answer: Callable[[bytes], bytes]) -> None:
        self._coordinator, self._answer = coordinator, answer
        self._stopped = threading.Event()
        self._last_message = ""

    def stop(self) -> None:
        """Stop after the current message."""
        self._stopped.set()

    def run(self) -> None:
        """Answer messages until `stop`."""
        waits = pauses()
        while not self._stopped.is_set():
            try:
                order = self._coordinator.fetch()
                self._say("connected to the coordinator")
                if order is not None:
                    self._work(order)
                waits = pauses()
            except Exception as error:  # an unreadable message must not end the process
                self._say(str(error) if isinstance(error, ServiceError) else f"a message failed: {error!r}")
                self._stopped.wait(next(waits))

    def _work(self, order: bytes) -> None:
        from isthmus.federation import number_of

        with self._beating(number_of(order)):
            reply = self._answer(order)
        for attempt, pause in enumerate(pauses(), 1):
            try:
                self._coordinator.reply(reply)
                return
            except Unreachable:
                if attempt == ATTEMPTS or self._stopped.wait(pause):
                    raise

    @contextmanager
    def _beating(self, number: str) -> Iterator[None]:
        """Tell the coordinator now and then, while the context lasts, that the message is being worked on."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT):
                with suppress(ServiceError):
                    self._coordinator.fetch(busy=number)

        thread = threading.Thread(target=beat, name="beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _say(self, text: str) -> None:
        if text != self._last_message:  # one line per outage, however long it lasts
            self._last_message = text
            _log.info("%s", text)


def take_part(part: TrainingRole) -> None:
    """Take part in training until SIGTERM or SIGINT."""
    from isthmus.federation import SiloEnd, client

    coordinator = CoordinatorClient(part)  # reads the key while this user still may
    confine(part.user)

    def report(error: Exception) -> None:
        _log.error("a message failed: %s: %s", type(error).__name__, error)

    participant = Participant(coordinator, SiloEnd(client, part.node_config, report=report).answer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        participant.run()
    finally:
        coordinator.close()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def confine(user: str = "") -> None:
    """Give up what training does not need: core dumps, new rights and, with `user`, the current user."""
    import ctypes
    import encodings.idna  # noqa: F401  # names of hosts need it, and another user may not reach it any more
    import pwd
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if user:
        try:
            known = pwd.getpwnam(user)
            os.setgroups([])
            os.setgid(known.pw_gid)
            os.setuid(known.pw_uid)
        except KeyError:
            raise ConfigError(f"there is no user {user!r}", key="training.user", value=user) from None
        except PermissionError:
            raise ConfigError(
                f"only root may start a process of the user {user!r}",
                key="training.user",
                expected="none, or `isthmus node --training-only` started as that user",
            ) from None


def main() -> None:
    """Run the process that a node starts: it reads its role as JSON from stdin, and ends when stdin does."""
    log_to_stderr()
    try:
        part = TrainingRole.loaded(sys.stdin.buffer.readline())
        end_with_stdin()
        take_part(part)
    except Exception as error:
        _log.error("%s", error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
