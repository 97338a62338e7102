"""Limits on connections before a caller is known: how many, from where, how long, and how many header bytes.

    accepted ── TLS, headers: header_seconds, header_bytes ──▶ request ──▶ idle: idle_seconds ──▶ closed

A full server closes the connection that has waited longest without a valid key or certificate, so that
there is room for a newcomer however many strangers wait. A connection with a valid key is closed only
between two requests.

    await server(app, port=8100, limits=Limits()).serve()
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn import Config
from uvicorn import Server as _UvicornServer
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from isthmus.service.certificates import LiveTls, server_context
from isthmus.service.security import CONNECTION, PEER, Peer
from isthmus.service.settings import RequestLimits

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from isthmus.service.settings import Tls

LINGER = 2.0
"""Seconds in which a closing connection may still take what was written to it."""
TICKS = 10
"""Tenths of a second between two ticks of the server, which renew the header with the date."""
JOINED = 64 << 10
"""Most bytes of a write that is joined with what was written before it."""
PIPELINED, HEADERS = 8, 100
"""Most requests that wait behind one that is answered, and most headers of a request."""


@dataclass(eq=False)
class Visitor:
    """One connection from the moment it is accepted."""

    address: str
    since: float
    leave: Callable[[], object]
    """Closes the connection."""
    known: bool = False
    """Whether a request over it had a valid key or a known certificate."""
    busy: bool = False
    serial: int = 0
    """Serial number of its certificate; 0 if it has shown none."""
    is_whole: bool = False
    """Whether the last request that began has arrived completely."""
    lost: Callable[[], object] | None = None
    """Called when the connection is lost while a request is answered."""


class Door:
    """The connections of a server, those that waited longest first."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self._all: dict[Visitor, None] = {}
        self._by_address: dict[str, dict[Visitor, None]] = {}

    def enter(self, visitor: Visitor) -> bool:
        """Admit a connection if there is room, if necessary by closing another one. Returns whether it is
        admitted."""
        own = self._by_address.get(visitor.address, {})
        if len(own) >= self.limits.connections_per_address and not self._make_room(own):
            return False
        if len(self._all) >= self.limits.connections and not self._make_room(self._all):
            return False
        self._add(visitor)
        return True

    def _add(self, visitor: Visitor) -> None:
        """Add the connection at the end of both dicts, as the one that has waited least."""
        self._all[visitor] = None
        self._by_address.setdefault(visitor.address, {})[visitor] = None

    def _make_room(self, waiting: Collection[Visitor]) -> bool:
        """Close the connection that has waited longest: a stranger's first, else one that is not being
        answered. Returns whether there was one to close."""
        stranger = next((each for each in waiting if not each.known), None)
        out = stranger or next((each for each in waiting if not each.busy), None)
        if out is None:
            return False
        self.left(out)
        out.leave()
        return True

    def answered(self, visitor: Visitor) -> None:
        """Note that a request of this visitor was answered; its waiting time starts again."""
        if visitor in self._all:
            self.left(visitor)
            self._add(visitor)

    def turn_out(self, revoked: Collection[int]) -> None:
        """Close the connections with revoked certificates, even during a request."""
        for visitor in [each for each in self._all if each.serial in revoked] if revoked else ():
            self.left(visitor)
            visitor.leave()

    def left(self, visitor: Visitor) -> None:
        """Remove a connection that is gone."""
        if visitor not in self._all:
            return
        del self._all[visitor]
        own = self._by_address[visitor.address]
        del own[visitor]
        if not own:
            del self._by_address[visitor.address]


class _OneWrite:
    """A transport that joins what is written in one turn of the loop: head and body of an answer are then one
    record of TLS, which wakes the other side once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._waiting: list[bytes] = []
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if len(data) > JOINED:  # joining gains nothing, and slow sending is noticed at once
            self.flush()
            self._transport.write(data)
            return
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(data)
        if len(self._waiting) > 2:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._transport.write(b"".join(waiting))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._waiting.clear()
        self._transport.abort()


class TooLarge(Exception):
    """A request has more headers, or more requests wait behind one, than is allowed."""


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol within limits, with the client's verified certificate in every scope."""

    def __init__(self, *, door: Door, visitor: Visitor | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._door, self._limits, self._visitor = door, door.limits, visitor
        self._extensions: Mapping[str, Any] | None = None
        self._reading = "idle"  # or "head" or "body": the part of a request being read
        self._head, self._size = 0, 0  # bytes received, and bytes parsed, of the head
        self._due: asyncio.TimerHandle | None = None
        self._awaiting = ""
        self._write_timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._out = _OneWrite(transport, self.loop)
        self.transport = self._out  # type: ignore[assignment]
        peer = _peer(transport.get_extra_info("ssl_object"))
        self._extensions = None if peer is None else {PEER: peer}
        if self._visitor is None:
            self._visitor = Visitor(_address(transport), self.loop.time(), self._end)
            if not self._door.enter(self._visitor):
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE)
                return
        self._visitor.leave = self._end
        if peer is not None:
            self._visitor.serial = peer.serial
        self._expect("head", self._limits.header_seconds - (self.loop.time() - self._visitor.since))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._expect("", None)
        self._cancel_write_timeout()
        if self._visitor is not None:
            self._door.left(self._visitor)
            if self._visitor.lost is not None:
                self._visitor.lost()

    def data_received(self, data: bytes) -> None:
        if self._reading != "body":
            self._head += len(data)
            self._expect("head", self._limits.header_seconds)
        super().data_received(data)
        if self._reading == "head" and self._head > self._limits.header_bytes:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def pause_writing(self) -> None:
        """Start a timeout for a client that does not read its response: as long as for its headers."""
        super().pause_writing()
        self._write_timeout = self.loop.call_later(self._limits.header_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timeout()

    def _cancel_write_timeout(self) -> None:
        if self._write_timeout is not None:
            self._write_timeout.cancel()
            self._write_timeout = None

    # callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._size = "head", 0
        assert self._visitor is not None
        self._visitor.is_whole = False
        self.scope[CONNECTION] = self._visitor  # type: ignore[literal-required]
        if self._extensions is not None:
            self.scope["extensions"] = dict(self._extensions)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._reading == "head":  # trailers are dropped: no proxy has checked them
            name = name.lower()
            if name == b"expect":
                super().on_header(name, value)
            else:
                self.headers.append((name, value))

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._limits.header_bytes or len(self.headers) >= HEADERS:
            raise TooLarge

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise TooLarge
        self._reading, self._head = "body", 0
        self._expect("", None)
        assert self._visitor is not None
        self._visitor.busy = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading = "idle"
        assert self._visitor is not None
        self._visitor.is_whole = True
        if self.cycle is not None and self.cycle.response_complete:
            self._expect("next", self._limits.idle_seconds)

    def on_response_complete(self) -> None:
        self._out.flush()
        super().on_response_complete()
        if self._visitor is None or self.pipeline or not self.cycle.response_complete:
            return
        self._visitor.busy = False
        self._door.answered(self._visitor)
        if self._reading == "head":
            return
        if self._reading == "body":  # answered before the whole body came: read the rest, but with a timeout
            self._expect("rest", self._limits.header_seconds)
        else:
            self._expect("next", self._limits.idle_seconds)

    # timeouts and closing

    def _expect(self, what: str, seconds: float | None) -> None:
        """Start a timeout for what is expected next. It is not restarted while the same is expected."""
        if what == self._awaiting:
            return
        if self._due is not None:
            self._due.cancel()
        self._awaiting, self._due = what, None
        if seconds is not None:
            self._due = self.loop.call_later(max(0.0, seconds), self._too_late)

    def _too_late(self) -> None:
        if self._awaiting == "head" and self._reading == "head":
            self._refuse(HTTPStatus.REQUEST_TIMEOUT)
        else:
            self._end()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that the parser refuses; called by uvicorn."""
        large = self._size > self._limits.header_bytes or len(self.headers or ()) >= HEADERS
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if large else HTTPStatus.BAD_REQUEST)

    def _refuse(self, status: HTTPStatus) -> None:
        """Send the status, unless an answer is on its way already, and close."""
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.write(head.encode())
        self._end()

    def timeout_keep_alive_handler(self) -> None:
        self._end()

    def _end(self) -> None:
        """Close the connection; bytes that are not taken within `LINGER` seconds are lost."""
        self.transport.close()
        self.loop.call_later(LINGER, self.transport.abort)


class _Handshake(asyncio.Protocol):
    """The TLS handshake of a connection that the door has admitted, with the same timeout as headers."""

    def __init__(self, make: Callable[..., PeerProtocol], tls: LiveTls, door: Door) -> None:
        self._make, self._tls, self._door = make, tls, door

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        loop, raw = asyncio.get_running_loop(), transport.get_extra_info("socket")
        connection = socket.fromfd(raw.fileno(), raw.family, raw.type)
        visitor = Visitor(_address(transport), loop.time(), connection.close)
        transport.abort()  # the duplicate keeps the connection open; nothing was read yet
        if not self._door.enter(visitor):
            connection.close()
            return
        task = loop.create_task(self._greet(connection, visitor))
        task.add_done_callback(partial(self._greeted, connection, visitor))
        visitor.leave = task.cancel

    async def _greet(self, connection: socket.socket, visitor: Visitor) -> None:
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(
            partial(self._make, visitor=visitor),
            connection,
            ssl=self._tls.current.context,
            ssl_handshake_timeout=self._door.limits.header_seconds,
        )

    def _greeted(self, connection: socket.socket, visitor: Visitor, task: asyncio.Task[None]) -> None:
        """Clean up after a handshake that failed or was cancelled, even before it began."""
        if task.cancelled() or task.exception() is not None:
            self._door.left(visitor)
            connection.close()


class Server(_UvicornServer):
    """uvicorn's server with its URL scheme, and waking up once a second instead of ten times: otherwise fifty
    idle nodes on one machine would take a tenth of a core."""

    scheme = "http"
    watch: Callable[[], object] = staticmethod(lambda: None)
    """Called every second."""
    _should_exit = False
    _end: Callable[[], object] | None = None

    @property
    def should_exit(self) -> bool:
        """Whether the server is to end; set from any thread, or by a signal."""
        return self._should_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._should_exit = value
        if value and self._end is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._end()

    async def main_loop(self) -> None:
        """Serve until `should_exit` is set; uvicorn's ticks are tenths of a second."""
        loop, tick = asyncio.get_running_loop(), 0
        while not await self.on_tick(tick):
            tick += TICKS
            self.watch()
            pause = loop.create_future()
            timer = loop.call_later(TICKS / 10, _end_pause, pause)
            self._end = partial(loop.call_soon_threadsafe, _end_pause, pause)
            if not self._should_exit:  # if set before `_end` was, nothing would end the pause
                await pause
            timer.cancel()


def _end_pause(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


def server(
    app: ASGIApp,
    *,
    host: str = "127.0.0.1",
    port: int,
    tls: Tls | None = None,
    mutual: bool = False,
    limits: RequestLimits | None = None,
) -> Server:
    """Return a server for one app: `server(…).run()`, or `await server(…).serve()` in an event loop of one's
    own.

    The app itself writes logs and access logs; headers do not name the software.
    """
    limits = limits or RequestLimits()
    door = Door(limits)
    live = None if tls is None else LiveTls(tls, partial(server_context, mutual=mutual))

    def accept(**options: Any) -> asyncio.Protocol:
        make = partial(PeerProtocol, door=door, **options)
        return make() if live is None else _Handshake(make, live, door)

    config = Config(
        app,
        host=host,
        port=port,
        http=accept,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=max(1, round(limits.idle_seconds)),
        timeout_graceful_shutdown=5,
    )
    serving = Server(config)
    if live is not None:
        serving.scheme, serving.watch = "https", lambda: door.turn_out(live.current.revoked)
    return serving


def _address(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) and name else ""


def _peer(connection: ssl.SSLObject | None) -> Peer | None:
    """Return the peer that the certificate at the other end names; None without one. `getpeercert` lists only
    a certificate that TLS has verified."""
    certificate: Any = (connection.getpeercert() if connection is not None else None) or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    if len(names) != 1:
        return None
    encoded = connection.getpeercert(binary_form=True) if connection is not None else None
    ends = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    return Peer(names[0], ends, encoded or b"", int(certificate["serialNumber"], 16))


def listen_problem(port: int, host: str = "127.0.0.1") -> str:
    """Return why a port cannot be listened at; empty if it can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or type(error).__name__
    return ""
