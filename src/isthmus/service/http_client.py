"""HTTP/1.1 to one node over connections that stay open, as a broker needs it a few thousand times a minute.

A general client would take most of a search's time in the broker. This one talks to a single server, sends
whole requests, reads whole answers up to a size, and closes a connection whose answer nobody waits for.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

from isthmus.errors import ConfigError, SiloUnavailable
from isthmus.service.certificates import Credentials, LiveTls

IDLE = 32
"""Most idle connections that are kept open."""
MOST_HEADERS = 64 << 10
"""Most bytes of an answer beside its body: status, headers, trailers, and the frames of its chunks. As many
more are allowed as the body has bytes, so that chunks may be small, but not one byte each."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A complete HTTP response: status, media type without parameters, body."""

    status: int
    kind: str
    body: bytes


class BrokenReply(SiloUnavailable):
    """An answer that is not HTTP, is truncated, or is too long."""


class HttpClient:
    """Keep-alive connections to one address; `name` is the DNS name its certificate must have."""

    def __init__(
        self, url: str, *, tls: LiveTls | None = None, name: str | None = None, most: int = 8 << 20
    ) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        if secure != (tls is not None):
            raise ConfigError(f"{url} needs [tls]" if secure else f"{url} is not https", expected="https://")
        if not parts.hostname:
            raise ConfigError(f"no host in {url!r}", value=url, expected="https://host:port")
        self.host, self.port = parts.hostname, parts.port or (443 if secure else 80)
        self._tls, self._name = tls, name if secure else None
        self._most, self._root = most, parts.path.rstrip("/")
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._about = f" HTTP/1.1\r\nhost: {host}:{self.port}\r\naccept: */*\r\n"
        self._idle: list[_Connection] = []

    @property
    def credentials(self) -> Credentials | None:
        """The credentials for a new connection; None without TLS. Idle connections with other ones are
        closed."""
        current = None if self._tls is None else self._tls.current
        if self._idle and self._idle[-1].credentials is not current:
            self.close()
        return current

    async def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        over: Credentials | None = None,
    ) -> HttpReply:
        """Send a request and wait for its answer, without a timeout. The connection has the credentials
        `over`, with which the request was signed, or else the current ones."""
        request = self._request(method, path, headers or {}, body)
        over = over or self.credentials
        idle = self._waiting(over)
        if idle is not None:
            try:
                return await self._over(idle, request)
            except SiloUnavailable:
                if idle.responded:
                    raise  # else the idle connection was closed meanwhile: try a new one
        return await self._over(await self._connect(over), request)

    async def _over(self, connection: _Connection, request: bytes) -> HttpReply:
        try:
            reply = await connection.ask(request)
        except BaseException:
            connection.close()
            raise
        if connection.is_open and len(self._idle) < IDLE and connection.credentials is self.credentials:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _waiting(self, over: Credentials | None) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.credentials is over:
                return connection
            connection.close()
        return None

    async def _connect(self, over: Credentials | None) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: _Connection(self._most, over),
                self.host,
                self.port,
                ssl=None if over is None else over.context,
                server_hostname=self._name if over else None,
            )
        except ssl.SSLCertVerificationError as error:
            raise BrokenReply(f"its certificate is not the one expected: {error.verify_message}") from error
        except ssl.SSLError as error:
            raise BrokenReply(f"TLS failed: {error.reason}") from error
        except OSError as error:
            # without the error's own message, which has the silo's address
            reason = os.strerror(error.errno) if error.errno else type(error).__name__
            raise SiloUnavailable(f"no connection: {reason}") from error
        return connection

    def _request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body or method in ("POST", "PUT"):
            lines.append(f"content-length: {len(body)}\r\n")
        head = f"{method} {self._root}{path}{self._about}{''.join(lines)}\r\n"
        return head.encode("latin-1") + body


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, most: int, credentials: Credentials | None) -> None:
        self._most, self.credentials = most, credentials
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpReply] | None = None
        self._parser: Any = None
        self._body = bytearray()
        self._received, self._kind = 0, ""
        self.responded = False
        """Whether anything came back for the latest request."""

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> HttpReply:
        if self._transport is None or self._transport.is_closing():
            raise SiloUnavailable("the connection was closed")
        self._parser = httptools.HttpResponseParser(self)
        self._body, self._received, self._kind, self.responded = bytearray(), 0, "", False
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # callbacks of asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.close()  # data without a request
            return
        self.responded = True
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail(BrokenReply("its answer is not HTTP"))
        if self._received - len(self._body) > MOST_HEADERS + len(self._body):
            self._fail(BrokenReply(f"its answer has more than {MOST_HEADERS:,} bytes of headers"))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if isinstance(error, ssl.SSLError):  # TLS 1.3 reports a refused certificate after the handshake
            self._fail(SiloUnavailable(f"it closed the connection: {error.reason}"))
        else:
            self._fail(SiloUnavailable("it closed the connection"))

    # callbacks of httptools
    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) == len(b"content-type") and name.lower() == b"content-type":
            self._kind = value.decode("latin-1").partition(";")[0].strip().lower()

    def on_body(self, body: bytes) -> None:
        if len(self._body) + len(body) > self._most:
            self._fail(BrokenReply(f"its answer has more than {self._most:,} bytes"))
        else:
            self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None or self._answer.done():
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._answer.set_result(HttpReply(status, self._kind, bytes(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.close()
