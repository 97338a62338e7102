"""The layer before every app of the service: who calls, and limits on size, nesting, rate and time of
requests.

    app = Protect(app, gate=gate, limits=Limits(), surface=Surface(open=("/v1/health",)))

One ASGI layer reads the whole body within its limits, asks the gate who is calling, limits rates, and
gives the caller to the app as `scope["isthmus.caller"]`. Every failure, here or in the app, is answered
with problem details (RFC 9457), which never echo what was sent. Every answer carries the security headers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    MutableMapping,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.errors import Refused, ServiceError
from isthmus.service import people
from isthmus.service.logs import iso_time, place_of
from isthmus.service.security import CONNECTION, PEER, WARN_DAYS, Caller, Gate, Once, WrongKey
from isthmus.service.settings import LOOPBACK, RequestLimits
from isthmus.service.wire import KEY_EXPIRES, PROBLEM_TYPE, SEEN, moment

CALLER, NOTE = "isthmus.caller", "isthmus.note"
"""Keys in a scope of the caller, and of a dict whose entries go into the access log."""
WRONG_KEY = "isthmus.wrong_key"
"""Key in a scope of a function that counts a wrong key, and raises once there were too many."""
GONE = "isthmus.gone"
"""Key in a scope of a `Gone` that is set when the caller no longer waits."""
DIGEST = "isthmus.digest"
"""Key in a scope of the body's SHA-256, if the request states who asks."""
MESSAGE = "isthmus-message"
"""The header that makes a message between broker and node unique: `seconds since 1970` `nonce`."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self';"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
BODY_SECONDS, REQUEST_SECONDS = 10.0, 90.0
ABANDONED = 499
"""The status in the log of a request whose caller no longer waited, as nginx has it."""
STRANGERS_BODY = 16 << 10
"""Most bytes of a body from a caller without a key, who sends one only to sign in."""
OPEN_COST = 0.2
"""Tokens that a request for a path without a key takes from a bucket: a page comes as a dozen files."""
ADDRESSES = 10_000
"""Most callers whose buckets are kept."""

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # possessive: linear time for any input
_BRACKETS = re.compile(rb"[\[\]{}]")
_log = logging.getLogger("isthmus.service")
_access = logging.getLogger("isthmus.access")


class HttpProblem(ServiceError):
    """A request that is answered with problem details; `headers` go with it."""

    kind = "about:blank"

    def __init__(self, status: int, detail: str = "", **headers: str) -> None:
        self.status, self.detail = status, detail
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(detail or HTTPStatus(status).phrase)

    def response(self) -> Response:
        """The HTTP response, `application/problem+json`."""
        payload = {"type": self.kind, "title": HTTPStatus(self.status).phrase, "status": self.status}
        payload |= {"detail": self.detail} if self.detail else {}
        return Response(json.dumps(payload), self.status, dict(self.headers), PROBLEM_TYPE)


class SeenEnough(HttpProblem):
    """The caller has seen as much of a silo as its policy allows."""

    kind = SEEN


def problem_of(error: Exception) -> HttpProblem:
    """Convert an exception into the problem that is sent; it never echoes what the other side sent."""
    if isinstance(error, HttpProblem):
        return error
    if isinstance(error, HTTPException):
        headers = {name.lower().replace("-", "_"): value for name, value in (error.headers or {}).items()}
        standard = HTTPStatus(error.status_code).phrase
        return HttpProblem(
            error.status_code, "" if error.detail == standard else str(error.detail), **headers
        )
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        # later parts of the location may be the sender's own words
        where = ".".join(str(part) for part in first["loc"][1:2])
        known = where if where.isidentifier() and first["type"] != "extra_forbidden" else ""
        plain = {"extra_forbidden": "a field that is not known", "json_invalid": "the body is not JSON"}
        other = plain.get(first["type"], "the request is not of the documented form")
        return HttpProblem(422, f"{known}: {first['msg']}" if known else other)
    if isinstance(error, Refused):
        return HttpProblem(403, str(error))
    return HttpProblem(500, "this failure was not foreseen; the server's log has it")


class Buckets:
    """Token buckets: every caller may do `per_second` things a second, and `burst` at once."""

    def __init__(
        self, per_second: float, burst: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.per_second, self.burst, self._clock = per_second, float(burst), clock
        self._filled: dict[str, tuple[float, float]] = {}

    def wait(self, caller: str, cost: float = 1.0) -> float:
        """Take from the caller's bucket. Returns 0, or if too little is left the seconds to wait."""
        now = self._clock()
        tokens, then = self._filled.pop(caller, (self.burst, now))
        tokens = min(self.burst, tokens + (now - then) * self.per_second)
        allowed = tokens >= cost
        self._filled[caller] = (tokens - cost if allowed else tokens, now)  # at the end: most recently used
        if len(self._filled) > ADDRESSES:
            del self._filled[next(iter(self._filled))]
        return 0.0 if allowed else (cost - tokens) / self.per_second


class Gone:
    """Whether a caller has gone, for other threads to read."""

    __slots__ = ("is_set",)

    def __init__(self) -> None:
        self.is_set = False


class PendingWaits:
    """Waits for callers, such as for bodies. If there are too many, the longest wait is ended.

    There may be `most` waits at once, `each` of them for one caller.
    """

    def __init__(self, most: int, each: int) -> None:
        self._most, self._each = most, each
        self._all: dict[asyncio.Timeout, str] = {}

    @asynccontextmanager
    async def awaited(self, sender: str, seconds: float, problem: HttpProblem) -> AsyncIterator[None]:
        """Wait inside this block for at most `seconds`; then raise `problem`."""
        try:
            async with asyncio.timeout(seconds) as until:
                self._make_room(sender)
                self._all[until] = sender
                try:
                    yield
                finally:
                    self._all.pop(until, None)
        except TimeoutError:
            raise problem from None

    def _make_room(self, sender: str) -> None:
        own = [until for until, name in self._all.items() if name == sender]
        longest = own[0] if len(own) >= self._each else next(iter(self._all), None)
        if longest is not None and (len(own) >= self._each or len(self._all) >= self._most):
            del self._all[longest]
            longest.reschedule(asyncio.get_running_loop().time())


def too_deep(body: bytes, limit: int) -> bool:
    """Whether JSON nests deeper than the limit; brackets in strings do not count."""
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        if depth > limit:
            return True
    return False


def names_of(host: str, hosts: Iterable[str] = ()) -> frozenset[str]:
    """Return the names accepted in the Host header of a server on this machine: loopback's, its own, and
    further ones."""
    return frozenset({*LOOPBACK, "[::1]", host.lower(), *(name.lower() for name in hosts)})


def message_header(nonce: str | None = None) -> dict[str, str]:
    """Return the header that lets a node tell this message from a replay of it."""
    return {MESSAGE: f"{time.time():.3f} {nonce or secrets.token_hex(12)}"}


@dataclass
class _Exchange:
    """One request on its way through the layer, and its state so far."""

    scope: Scope
    send: Send
    number: str
    status: int = 0
    sent: int = 0
    caller: str = ""
    expires: float | None = None
    began: float = field(default_factory=time.perf_counter)
    note: MutableMapping[str, Any] = field(default_factory=dict)

    async def answer(self, message: Message) -> None:
        """Send an answer, with the headers that every answer has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            present = {name for name, _ in message.get("headers", ())}
            extra = [header for header in HEADERS if header[0] not in present]
            if b"cache-control" not in present:
                extra.append((b"cache-control", b"no-store"))
            if self.expires is not None and self.expires < time.time() + WARN_DAYS * 86400:
                extra.append((KEY_EXPIRES.encode(), moment(self.expires).encode()))
            extra.append((b"x-request-id", self.number.encode()))
            message["headers"] = [*message.get("headers", ()), *extra]
        else:
            self.sent += len(message.get("body", b""))
        await self.send(message)


@dataclass(frozen=True)
class Surface:
    """How the paths of an app may be reached.

    `open` paths need no key; on `large` ones a known peer may send bodies of the operator's size;
    `abandoned` ones are cancelled when the caller goes away; `hosts` are the names under which the app may
    be called. These stop DNS rebinding, by which a page elsewhere points its own name to our address.
    """

    open: tuple[str, ...] = ()
    large: tuple[str, ...] = ()
    abandoned: tuple[str, ...] = ()
    hosts: Collection[str] | None = None


class Protect:
    """The layer around an app.

    With `once`, what a peer writes must carry a fresh `isthmus-message`. `observe(path, status, seconds)`
    is called for every request, and `refused(caller, path, status)` for those that are answered with 401
    or 403.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        gate: Gate[Any],
        limits: RequestLimits,
        surface: Surface | None = None,
        once: Once | None = None,
        observe: Callable[[str, int, float], None] | None = None,
        refused: Callable[[str, str, int], None] | None = None,
    ) -> None:
        self.app, self.gate, self.limits, self.once = app, gate, limits, once
        self.surface = surface or Surface()
        self._observe, self._refused = observe, refused
        self._rates = Buckets(limits.per_second, limits.burst)
        self._failures = Buckets(0.2, 20)
        self._running: Counter[str] = Counter()
        self._share = max(1, limits.concurrent // 2)
        self._bodies = PendingWaits(limits.concurrent, self._share)
        self._strangers_bodies = PendingWaits(limits.strangers, max(1, limits.strangers // 4))
        self._strangers = PendingWaits(limits.strangers, limits.strangers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on to the app, or answer with a problem."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, secrets.token_hex(8))
        scope[NOTE], scope[GONE] = exchange.note, Gone()
        scope[WRONG_KEY] = partial(self._wrong_key, scope)
        try:
            await self._guarded(exchange, receive)
        except Exception as error:
            await self._failed(exchange, receive, error)
        finally:
            self._finished(exchange)

    async def _guarded(self, exchange: _Exchange, receive: Receive) -> None:
        scope = exchange.scope
        self._check_host(scope)
        self._check_site(scope)
        await self.gate.renew(scope)
        caller = self._caller(scope)
        exchange.caller, exchange.expires, scope[CALLER] = caller.name, caller.expires, caller
        stranger = caller is self.gate.strangers
        name = f"anonymous {_address(scope)}" if stranger else caller.name
        self._check_rate(name, OPEN_COST if scope["path"] in self.surface.open else 1.0)
        connection = scope.get(CONNECTION)
        if not stranger and connection is not None:
            connection.known = True
        unknown = stranger and not caller.scopes
        reading = _body(scope, receive, self._most_bytes(scope, caller, unknown=unknown))
        if connection is not None and connection.is_whole:  # the whole request has already arrived
            body = await reading
        else:
            bodies = self._strangers_bodies if unknown else self._bodies
            slow = HttpProblem(408, "the body came too slowly", Connection="close")
            async with bodies.awaited(name, BODY_SECONDS, slow):
                body = await reading
        if body:
            self._check_body(scope, body)
        personal = bool(header_in(scope, people.HEADER))
        if personal:
            scope[DIGEST] = people.digest_of(body)
        writes = personal or scope["method"] not in ("GET", "HEAD")
        if self.once is not None and caller.policy is not None and writes:
            _check_fresh(self.once, caller.name, scope)
        if unknown:  # strangers have their own slots and cannot block others
            full = HttpProblem(503, "too many requests at once", Retry_After="1", Connection="close")
            async with self._strangers.awaited(name, REQUEST_SECONDS, full):
                await self._run(exchange, body, receive)
        else:
            with self._slot(caller, name):
                await self._run(exchange, body, receive)

    def _most_bytes(self, scope: Scope, caller: Caller[Any], *, unknown: bool) -> int:
        if unknown:
            return min(STRANGERS_BODY, self.limits.body_bytes)
        large = caller.policy is not None and scope["path"] in self.surface.large
        return self.limits.operator_body_bytes if large else self.limits.body_bytes

    @contextmanager
    def _slot(self, caller: Caller[Any], name: str) -> Iterator[None]:
        """Take one of the places for concurrent requests. One person's key may have half of them; a peer,
        which asks for many people, all."""
        person = caller.policy is None and caller is not self.gate.strangers
        if person and self._running[name] >= self._share:
            raise HttpProblem(429, "too many requests at once", Retry_After="1")
        if self._running.total() >= self.limits.concurrent:
            # 429 tells a peer that it asks too much; 503 would look like a fault of this silo
            status = 503 if caller.policy is None else 429
            raise HttpProblem(status, "too many requests at once", Retry_After="1")
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1
            if not self._running[name]:
                del self._running[name]

    async def _run(self, exchange: _Exchange, body: bytes, receive: Receive) -> None:
        """Run the app, as long as it may take and the caller waits."""
        scope = exchange.scope
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                work = self.app(scope, _again(body, receive), exchange.answer)
                if scope["path"] in self.surface.abandoned:
                    await _while_awaited(work, receive, exchange)
                else:
                    await work
        except TimeoutError:
            raise HttpProblem(504, "the answer took too long") from None

    def _check_host(self, scope: Scope) -> None:
        if self.surface.hosts is None:
            return
        host = header_in(scope, "host").rpartition("@")[2].lower()
        name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
        if name not in self.surface.hosts:
            raise HttpProblem(421, "the Host header is not a name of this server")

    def _check_site(self, scope: Scope) -> None:
        """Refuse what a browser requests from another site's page, except a link to an open path."""
        link = scope["method"] in ("GET", "HEAD") and scope["path"] in self.surface.open
        if not link and header_in(scope, "sec-fetch-site") in ("cross-site", "same-site"):
            raise HttpProblem(403, "requests from other sites are not allowed")

    def _check_rate(self, name: str, cost: float = 1.0) -> None:
        if wait := self._rates.wait(name, cost):
            raise HttpProblem(
                429, "more requests than this caller may make", Retry_After=str(math.ceil(wait))
            )

    def _caller(self, scope: Scope) -> Caller[Any]:
        try:
            return self.gate.caller(scope)
        except Refused as refused:
            if scope["path"] in self.surface.open:
                return self.gate.strangers
            if PEER in scope.get("extensions", {}):
                raise HttpProblem(403, str(refused)) from None
            if isinstance(refused, WrongKey):
                self._wrong_key(scope)
            else:
                self._check_rate(f"anonymous {_address(scope)}")
            raise HttpProblem(401, str(refused), WWW_Authenticate='Bearer realm="isthmus"') from None

    def _wrong_key(self, scope: Scope) -> None:
        if self._failures.wait(_address(scope)):
            raise HttpProblem(429, "too many wrong keys from this address", Retry_After="5") from None

    def _check_body(self, scope: Scope, body: bytes) -> None:
        kind = header_in(scope, "content-type").partition(";")[0].strip().lower()
        # other sites' forms cannot send these types, nor can their scripts without a CORS preflight
        if not kind.startswith("application/") or kind == "application/x-www-form-urlencoded":
            raise HttpProblem(415, "send application/json")
        if kind.endswith("json") and too_deep(body, self.limits.depth):
            raise HttpProblem(400, f"the body nests deeper than {self.limits.depth}")

    async def _failed(self, exchange: _Exchange, receive: Receive, error: Exception) -> None:
        problem = problem_of(error)
        if problem.status == 500:
            # an exception's message may quote the request; its place in the code does not
            _log.error("request %s failed: %s at %s", exchange.number, type(error).__name__, place_of(error))
        if exchange.status == 0:
            await problem.response()(exchange.scope, receive, exchange.answer)

    def _finished(self, exchange: _Exchange) -> None:
        seconds = time.perf_counter() - exchange.began
        path = getattr(exchange.scope.get("route"), "path", "other")
        if self._observe is not None:
            self._observe(path, exchange.status, seconds)
        if self._refused is not None and exchange.status in (401, 403):
            self._refused(exchange.caller, f"{exchange.scope['method']} {path}", exchange.status)
        if not _access.isEnabledFor(logging.INFO):
            return
        record = {
            "time": iso_time(time.time()),
            "level": "info",
            "request": exchange.number,
            "caller": exchange.caller,
            "from": _address(exchange.scope),
            "method": exchange.scope["method"],
            "path": _logged_path(exchange.scope),
            "status": exchange.status,
            "bytes": exchange.sent,
            "ms": round(seconds * 1000, 1),
            **exchange.note,
        }
        _access.info(json.dumps(record))


async def _body(scope: Scope, receive: Receive, limit: int) -> bytes:
    length = header_in(scope, "content-length")
    if length.isdigit() and int(length) > limit:
        raise HttpProblem(413, f"the body may have {limit} bytes", Connection="close")
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpProblem(400, "the connection ended before the body did")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > limit:
            raise HttpProblem(413, f"the body may have {limit} bytes", Connection="close")
    return b"".join(parts)


async def _while_awaited(work: Awaitable[None], receive: Receive, exchange: _Exchange) -> None:
    """Run the app until it has answered or nobody waits for the answer any more."""
    connection = exchange.scope.get(CONNECTION)
    try:
        if connection is None:
            await _while_connected(work, receive, exchange)
        else:
            await _unless_lost(work, connection, exchange)
    finally:
        exchange.scope[GONE].is_set = True


async def _unless_lost(work: Awaitable[None], connection: Any, exchange: _Exchange) -> None:
    """As `_while_awaited`, on a server that reports when a connection is lost."""
    task, is_lost = asyncio.current_task(), False
    assert task is not None

    def leave() -> None:
        nonlocal is_lost
        is_lost, exchange.status = True, ABANDONED
        task.cancel()

    connection.lost = leave
    try:
        await work
    except (asyncio.CancelledError, Exception):
        if not is_lost:
            raise
    finally:
        if is_lost:
            task.uncancel()
        elif connection.lost is leave:
            connection.lost = None


async def _while_connected(work: Awaitable[None], receive: Receive, exchange: _Exchange) -> None:
    """As `_while_awaited`, on any other server."""
    running = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())  # after the body, only a disconnect can come
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        else:
            exchange.status = ABANDONED
    finally:
        for task in (running, gone):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was already read, and then further messages."""
    replayed = False

    async def inner() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return inner


def _check_fresh(once: Once, caller: str, scope: Scope) -> None:
    sent, _, nonce = header_in(scope, MESSAGE).partition(" ")
    try:
        moment = float(sent)
    except ValueError:
        raise HttpProblem(400, f"what a peer writes carries the header {MESSAGE}") from None
    if not 8 <= len(nonce) <= 64:
        raise HttpProblem(400, f"the header {MESSAGE} needs a nonce of 8 to 64 letters")
    try:
        once.admit(caller, nonce, moment)
    except Refused as refused:
        raise HttpProblem(409, str(refused)) from None


def header_in(scope: Scope, name: str) -> str:
    """Return the first header of this name; "" for none."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return str(value.decode("latin-1"))
    return ""


def check_origin(scope: Scope) -> None:
    """Refuse a request from another site's page, for browsers that send only `Origin`."""
    origin = header_in(scope, "origin")
    if origin and origin.partition("://")[2] != header_in(scope, "host"):
        raise HttpProblem(403, "requests from other sites are not allowed")


def _logged_path(scope: Scope) -> str:
    """Return the path, without the id of a document."""
    pattern: str = getattr(scope.get("route"), "path", "")
    return pattern if "{id:path}" in pattern else scope["path"]


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
