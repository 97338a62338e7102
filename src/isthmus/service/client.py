"""A broker's API from Python, blocking or asynchronous.

with Client("http://127.0.0.1:8100") as broker:
    answer = broker.search("tidal power", threshold=0.7)
    for hit in answer.hits:
        print(hit.probability, hit.silo, hit.title)

async with AsyncClient("http://127.0.0.1:8100") as broker:
    async for event in broker.search_stream("tidal power"):
        print(event)

Every request is written once, in `AsyncClient`. `Client` runs the same coroutines over a transport that
blocks, so that they never wait for an event loop and need none.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, Self, TypeVar
from urllib.parse import quote, urlencode

import httpx
from pydantic import BaseModel, ValidationError

from isthmus.errors import Refused, ServiceError, SiloUnavailable
from isthmus.files import private_file
from isthmus.service import wire
from isthmus.service.certificates import trusting
from isthmus.service.http_client import HttpReply

KEY_VARIABLE, AUTHORITY_VARIABLE = "ISTHMUS_API_KEY", "ISTHMUS_AUTHORITY"
MOST_BYTES = 8 << 20
"""Most bytes of an answer."""
LONGEST_KEY = 512
"""Most characters of an API key; those that `isthmus keys` writes have fewer than 100."""
LONGEST_PROBLEM = 4_000
"""Most characters of a broker's description of a problem."""
DEFAULT_URL = "http://127.0.0.1:8100"
PATIENCE, LEAST_WAIT = 60.0, 0.2
"""Seconds that a request may wait in all before it is sent again, and least seconds each time."""
RETRIES = 2
"""Most times that a request is sent again if the broker is overloaded (503) or the connection fails."""
LOOK_EVERY = 1.0
"""Seconds between two requests for the progress of learning."""
BATCH_BYTES = 256 << 10
"""Most bytes of the judgements in one request; a broker accepts a megabyte unless it is configured
otherwise."""

M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")


class NotTaken(ServiceError):
    """The request is not of the form that the broker documents (422)."""


class _Again(Exception):
    """A failure after which a request may be sent again, after `seconds` if the broker gives them. `refused`
    means that the broker has done nothing, so that any request may be repeated."""

    def __init__(self, failure: ServiceError, seconds: float = 0.0, *, refused: bool = False) -> None:
        self.failure, self.seconds, self.refused = failure, seconds, refused
        super().__init__(failure)


class _Parts(NamedTuple):
    """An answer as it arrives."""

    status: int
    headers: httpx.Headers
    raw: AsyncIterator[bytes]
    seconds: float
    """Seconds for which it is waited for in all."""


class _Transport(Protocol):
    """Sends requests and waits: in an event loop, or blocking."""

    def stream(
        self, method: str, path: str, payload: Any, seconds: float
    ) -> AbstractAsyncContextManager[_Parts]: ...

    async def sleep(self, seconds: float) -> None: ...

    async def close(self) -> None: ...


class _Asynchronous:
    def __init__(self, **options: Any) -> None:
        self.http = httpx.AsyncClient(**options)

    @asynccontextmanager
    async def stream(self, method: str, path: str, payload: Any, seconds: float) -> AsyncIterator[_Parts]:
        async with self.http.stream(method, path, json=payload, timeout=seconds) as response:
            yield _Parts(response.status_code, response.headers, response.aiter_raw(), seconds)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self.http.aclose()


class _Blocking:
    def __init__(self, **options: Any) -> None:
        self.http = httpx.Client(**options)

    @asynccontextmanager
    async def stream(self, method: str, path: str, payload: Any, seconds: float) -> AsyncIterator[_Parts]:
        with self.http.stream(method, path, json=payload, timeout=seconds) as response:
            yield _Parts(response.status_code, response.headers, self._parts(response), seconds)

    async def _parts(self, response: httpx.Response) -> AsyncIterator[bytes]:
        for part in response.iter_raw():
            yield part

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        self.http.close()


class AsyncClient:
    """One broker, asked from an event loop: the methods of `Client` as coroutines.

    Cancelling one ends its request, and with it the search in the silos. See `Client` for the arguments.
    """

    _connect: Callable[..., _Transport] = _Asynchronous

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | Path | None = None,
        authority: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        patience: float = PATIENCE,
        retries: int = RETRIES,
    ) -> None:
        token = _token(key)
        headers = {"accept-encoding": "identity"}  # a compressed reply could expand far beyond its size
        headers |= {"authorization": f"Bearer {token}"} if token else {}
        trusted = authority or os.environ.get(AUTHORITY_VARIABLE)
        verify = trusting(trusted) if url.startswith("https:") else True
        self.url, self._seconds = url.rstrip("/"), timeout
        self._patience, self._retries = patience, retries
        self.key_expires: str | None = None
        """When the API key ends, if the last answer has warned that it does soon."""
        try:
            self._transport = self._connect(base_url=self.url, headers=headers, verify=verify)
        except httpx.InvalidURL:
            raise ServiceError(f"{url!r} is not a URL") from None

    async def search(
        self,
        query: str,
        *,
        k: int = 10,
        threshold: float = 0.0,
        silos: list[str] | None = None,
        explain: bool = False,
        deadline_ms: int | None = None,
        offset: int = 0,
        facets: bool = False,
        suggest: bool = False,
    ) -> wire.Answer:
        """Search all silos, or those named.

        `offset` skips the hits of the pages before, `facets` counts the matches, `suggest` looks for other
        spellings of words that hardly any document has. A broker that supports neither of the last two
        searches without them.
        """
        payload = _search_of(query, k, threshold, explain, silos, deadline_ms) | _nonzero(offset=offset)
        extras = _nonzero(facets=facets, suggest=suggest)
        try:
            return await self._ask(wire.Answer, "POST", "/v1/search", payload | extras)
        except NotTaken:
            if not extras:
                raise
        # a broker of the previous release
        return await self._ask(wire.Answer, "POST", "/v1/search", payload)

    async def search_stream(
        self,
        query: str,
        *,
        k: int = 10,
        threshold: float = 0.0,
        silos: list[str] | None = None,
        explain: bool = False,
        deadline_ms: int | None = None,
    ) -> AsyncGenerator[wire.SiloProgress | wire.Answer]:
        """Search as `search` does. Yields every silo's progress as it answers, with the best hits so far, and
        last the whole answer. Closing the iterator ends the search."""
        payload = _search_of(query, k, threshold, explain, silos, deadline_ms)
        async with AsyncExitStack() as stack:
            begin = partial(self._begun, stack, "POST", "/v1/search/stream", payload)
            parts = await self._retrying(begin)
            try:
                with self._failures():
                    async for name, data in _events(self._bounded(parts)):
                        reply = HttpReply(200, "", data)
                        if name == b"silo":
                            yield self._read(reply, wire.SiloProgress)
                        elif name == b"answer":
                            yield self._read(reply, wire.Answer)
                            return
                        elif name == b"error":
                            status = self._read(reply, wire.Problem).status
                            raise self._failure(HttpReply(status, "", data))
            except _Again as later:  # no retry after a part of the stream
                raise later.failure from later.__cause__
        raise SiloUnavailable(f"{self.url} ended the stream before the answer")

    async def count(
        self, query: str, *, threshold: float = wire.USUAL_LEVEL, silos: list[str] | None = None
    ) -> wire.CountAnswer:
        """Count the documents that answer a query in each silo, with noise. A new question is charged to
        budgets."""
        payload: dict[str, Any] = {"query": query, "threshold": threshold}
        payload |= {"silos": silos} if silos is not None else {}
        return await self._ask(wire.CountAnswer, "POST", "/v1/noised-counts", payload)

    async def judge(self, query: str, hit: wire.Hit, *, relevant: bool | None) -> None:
        """Say whether a hit of this query's answer was right; None withdraws that. Only the hit's silo stores
        it."""
        payload = {"query": query, "silo": hit.silo, "token": hit.token, "relevant": relevant}
        await self._send("POST", "/v1/feedback", payload)

    async def judgements(self, query: str, hits: Sequence[wire.Hit]) -> list[bool | None]:
        """Return your judgements of these hits of a query's answer, in their order; None for hits without
        one."""
        tokens = [{"silo": hit.silo, "token": hit.token} for hit in hits if hit.token]
        body = {"query": query, "hits": tokens}
        own = iter((await self._ask(wire.OwnJudgements, "POST", "/v1/judged", body)).relevant)
        return [next(own, None) if hit.token else None for hit in hits]

    async def open(self, hit: wire.Hit | wire.HitCopy) -> wire.OpenedDocument:
        """Return the whole document of a hit, or of its copy in another silo (`Hit.also`), if that silo
        allows it and your key has the scope documents."""
        return await self._open(hit.silo, hit.document, {"ticket": hit.ticket})

    async def open_allowed(self, request: wire.DocumentRequest) -> wire.OpenedDocument:
        """Return the document that its owner has allowed you to open once."""
        return await self._open(request.silo, request.document, {"request": request.number})

    async def _open(self, silo: str, document: str, by: dict[str, str]) -> wire.OpenedDocument:
        path = f"/v1/documents/{quote(silo, safe='')}/{quote(document, safe='/')}?{urlencode(by)}"
        again = "ticket" in by  # an allowed document opens once, so without retries
        return await self._ask(wire.OpenedDocument, "GET", path, again=again)

    async def ask(
        self, query: str, hit: wire.Hit | wire.HitCopy, *, reason: str = "", named: bool = False
    ) -> wire.DocumentRequest:
        """Ask the owner of a hit's document for it. With `named` the owner sees the name of your key."""
        payload = {"silo": hit.silo, "ticket": hit.ticket, "query": query, "reason": reason, "named": named}
        return await self._ask(wire.DocumentRequest, "POST", "/v1/requests", payload, again=False)

    async def requests(self, *, every: bool = False) -> wire.RequestList:
        """Return your requests to owners with their answers; with `every`, all that an administrator may
        answer."""
        path = "/v1/requests?all=true" if every else "/v1/requests"
        return await self._ask(wire.RequestList, "GET", path)

    async def answer(
        self, request: wire.DocumentRequest, *, allow: bool, word: str = ""
    ) -> wire.DocumentRequest:
        """Allow that a document is opened once, or deny it. Needs an administrator's key."""
        path = f"/v1/requests/{quote(request.silo, safe='')}/{request.number}"
        payload = {"allow": allow, "word": word}
        return await self._ask(wire.DocumentRequest, "POST", path, payload, again=False)

    async def import_judgements(
        self,
        judgements: Sequence[wire.NamedJudgement],
        *,
        progress: Callable[[int], None] = lambda count: None,
    ) -> wire.Imported:
        """Import judgements by document id, in batches. Needs an administrator's key.

        Judgements that are there already are not counted twice: after an interruption, send all again.
        `progress` is called with the size of every batch that was sent.
        """
        total, first = wire.Imported(), 0
        for batch in _batches(judgements):
            done = await self._ask(wire.Imported, "POST", "/v1/judgements", {"judgements": batch})
            total = wire.Imported(
                added=total.added + done.added,
                changed=total.changed + done.changed,
                unchanged=total.unchanged + done.unchanged,
                unknown=[*total.unknown, *(first + at for at in done.unknown)],
                ambiguous=total.ambiguous | {first + at: silos for at, silos in done.ambiguous.items()},
                unplaced=[*total.unplaced, *(first + at for at in done.unplaced)],
                unanswered=total.unanswered | done.unanswered,
            )
            first += len(batch)
            progress(len(batch))
        return total

    async def export_judgements(self, silos: Sequence[str] | None = None) -> list[wire.NamedJudgement]:
        """Return the judgements that silos received through this broker. Needs an administrator's key."""
        names = [each.silo for each in (await self.silos()).silos] if silos is None else silos
        judgements: list[wire.NamedJudgement] = []
        for name in names:
            after: str | None = ""
            while after is not None:
                path = str(httpx.URL("/v1/judgements", params={"silo": name, "after": after}))
                page = await self._ask(wire.JudgementPage, "GET", path)
                judgements += page.judgements
                after = page.next or None
        return sorted(judgements, key=lambda each: (each.query, each.document, each.silo or ""))

    async def silos(self) -> wire.SiloList:
        """Return every silo's state."""
        return await self._ask(wire.SiloList, "GET", "/v1/silos")

    async def training(self) -> wire.TrainingView:
        """Return the progress of the training run."""
        return await self._ask(wire.TrainingView, "GET", "/v1/training")

    async def learning(self) -> wire.LearningView:
        """Return the state of learning, and all versions of the model."""
        return await self._ask(wire.LearningView, "GET", "/v1/learning")

    async def learn(self, mode: str = "masked") -> wire.LearningView:
        """Let the silos learn; `learning` returns their progress. Needs an administrator's key."""
        return await self._ask(wire.LearningView, "POST", "/v1/learning", {"mode": mode}, again=False)

    async def learn_to_end(
        self, mode: str = "masked", *, progress: Callable[[str], None] = lambda stage: None
    ) -> wire.LearnedVersion:
        """Let the silos learn, and return the new version when they have. `progress` is called every second
        with the current stage. Raises a ServiceError with the reason if nothing could be learned."""
        view = await self.learn(mode)
        known = {version.version for version in view.versions}
        while view.state == "running":
            progress(view.stage)
            await self._transport.sleep(LOOK_EVERY)
            view = await self.learning()
        new = [version for version in view.versions if version.version not in known]
        if not new:
            raise ServiceError(view.problem or "the broker has stopped learning; its log says why")
        if new[0].problem and new[0].record is None:
            raise ServiceError(new[0].problem)
        return new[0]

    async def rollback(self, version: str = "") -> wire.LearningView:
        """Search again with the version before the current one; or with another version, or with "none"."""
        path, payload = "/v1/learning/rollback", {"version": version}
        return await self._ask(wire.LearningView, "POST", path, payload, again=False)

    async def calibration(self) -> wire.Calibration:
        """Return the reliability curves of the probabilities, by silo and retriever."""
        return await self._ask(wire.Calibration, "GET", "/v1/calibration")

    async def sessions(self) -> wire.SessionList:
        """Return who has a session of the page. Needs an administrator's key."""
        return await self._ask(wire.SessionList, "GET", "/v1/sessions")

    async def end_sessions(self, person: str) -> int:
        """End all sessions of a person, given the name of their key or their id. Returns how many
        there were."""
        path = f"/v1/sessions?{urlencode({'person': person})}"
        return (await self._ask(wire.EndedSessions, "DELETE", path)).ended

    async def me(self) -> wire.Me:
        """Return the owner of the key, and what the key may do."""
        return await self._ask(wire.Me, "GET", "/v1/me")

    async def health(self) -> wire.Health:
        """Return the broker's name, role and version, if it answers."""
        return await self._ask(wire.Health, "GET", "/v1/health")

    async def metrics(self) -> str:
        """Return the broker's metrics in Prometheus' text format."""
        return (await self._send("GET", "/metrics")).body.decode(errors="replace")

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ask(
        self, model: type[M], method: str, path: str, payload: Any = None, *, again: bool = True
    ) -> M:
        """Send a request and return its answer as a message; see `_send`."""
        return self._read(await self._send(method, path, payload, again=again), model)

    async def _send(self, method: str, path: str, payload: Any = None, *, again: bool = True) -> HttpReply:
        """Send a request and return its answer. `again` says that it may arrive twice without harm."""

        async def once() -> HttpReply:
            async with AsyncExitStack() as stack:
                parts = await self._begun(stack, method, path, payload)
                return HttpReply(parts.status, "", await self._body(parts))

        return await self._retrying(once, again=again)

    async def _retrying(self, attempt: Callable[[], Awaitable[T]], *, again: bool = True) -> T:
        """Run `attempt` until it succeeds: for up to `patience` seconds if the broker asks to wait (429), and
        `retries` times if it is overloaded or cannot be reached."""
        left, retries = self._patience, self._retries if again else 0
        backoff = LEAST_WAIT
        while True:
            try:
                with self._failures():
                    return await attempt()
            except _Again as later:
                seconds = later.seconds or backoff * (1 + secrets.randbelow(500) / 1000)  # random jitter
                if seconds > left or not (later.refused or retries):
                    raise later.failure from later.__cause__
                retries, backoff = retries - (not later.refused), backoff * 2
            await self._transport.sleep(seconds)
            left -= seconds

    async def _begun(
        self, stack: AsyncExitStack, method: str, path: str, payload: dict[str, Any] | None
    ) -> _Parts:
        """Send a request and return its successful answer before the body has come. The timeout is extended
        by the deadline that the request gives to silos."""
        seconds = self._seconds + (payload or {}).get("deadline_ms", 0) / 1000
        parts = await stack.enter_async_context(self._transport.stream(method, path, payload, seconds))
        self.key_expires = parts.headers.get(wire.KEY_EXPIRES)
        if 200 <= parts.status < 300:
            return parts
        text = parts.headers.get("retry-after", "")
        wait = max(LEAST_WAIT, float(text)) if text.isdecimal() else 0.0
        body = await self._body(parts)
        failure = self._failure(HttpReply(parts.status, "", body), wait)
        lasting = wire.SEEN.encode() in body  # a limit for a day, or for good
        if parts.status in (429, 503) and not lasting:
            raise _Again(failure, wait, refused=parts.status == 429)
        raise failure

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert exceptions of httpx into our own."""
        try:
            yield
        except httpx.TimeoutException:
            raise SiloUnavailable(f"the broker at {self.url} does not answer in time") from None
        except httpx.LocalProtocolError:  # the message may quote headers and so the key
            raise ServiceError(f"the request to {self.url} is not HTTP, and was not sent") from None
        except httpx.TransportError as error:
            cure = _cure(error)
            failure = SiloUnavailable(f"no broker at {self.url}: {error} ({cure})")
            if cure is not _START:  # another attempt would fail, too
                raise failure from error
            raise _Again(failure) from error

    async def _body(self, parts: _Parts) -> bytes:
        """Return the whole body, within limits of size and time."""
        body = bytearray()
        async for part in self._bounded(parts):
            body += part
        return bytes(body)

    async def _bounded(self, parts: _Parts) -> AsyncIterator[bytes]:
        """Yield the parts of the body, within `MOST_BYTES` and within the answer's seconds of
        waiting in all."""
        if parts.headers.get("content-encoding", "identity") != "identity":
            raise ServiceError(f"{self.url} answers in an encoding that it was not asked for")
        size, waited, since = 0, 0.0, time.monotonic()
        async for part in parts.raw:
            size, waited = size + len(part), waited + time.monotonic() - since
            if size > MOST_BYTES:
                raise ServiceError(f"{self.url} answers with more than {MOST_BYTES:,} bytes")
            if waited > parts.seconds:
                raise SiloUnavailable(f"the broker at {self.url} does not answer in time")
            yield part
            since = time.monotonic()

    def _failure(self, reply: HttpReply, later: float = 0.0) -> ServiceError:
        try:
            problem = wire.Problem.model_validate_json(reply.body)
        except ValidationError:
            return ServiceError(f"{self.url} is no broker of ours: status {reply.status}")
        message = ": ".join(filter(None, (problem.title, problem.detail)))[:LONGEST_PROBLEM]
        if reply.status == 401:
            return Refused(f"{message} (name a key's file with --key, or set {KEY_VARIABLE})")
        if reply.status == 429:
            return Refused(f"{message} (again in {later:g} s)" if later else message)
        if reply.status == 403:
            return Refused(message)
        if reply.status == 422:
            return NotTaken(message)
        return SiloUnavailable(message) if reply.status >= 500 else ServiceError(message)

    def _read(self, reply: HttpReply, model: type[M]) -> M:
        try:
            return model.model_validate_json(reply.body)
        except ValidationError:
            raise ServiceError(f"{self.url} answers in a form that this Isthmus does not know") from None


class _BlockingCalls(AsyncClient):
    """The same requests over a transport that blocks."""

    _connect = _Blocking


def _finished(work: Awaitable[T]) -> T:
    """Return the result of a coroutine that never waits for an event loop."""
    try:
        next(work.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a blocking transport does not wait for an event loop")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Awaitable[T]],
) -> Callable[Concatenate[Client, P], T]:
    @wraps(method)
    def call(self: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return _finished(method(self._calls, *arguments, **options))

    return call


def _blocking_iterator(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T]],
) -> Callable[Concatenate[Client, P], Iterator[T]]:
    @wraps(method)
    def call(self: Client, /, *arguments: P.args, **options: P.kwargs) -> Iterator[T]:
        each = method(self._calls, *arguments, **options)
        try:
            while True:
                yield _finished(anext(each))
        except StopAsyncIteration:
            return
        finally:
            _finished(each.aclose())

    signature = inspect.signature(method)  # @wraps shows the asynchronous signature; show the blocking one
    returned = str(signature.return_annotation).replace("AsyncGenerator", "Iterator")
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call


class Client:
    """One broker, blocking. A failure is a ServiceError that says what to do, or its subclass Refused or
    SiloUnavailable.

    The API key is given as text, as the path of a file that only its owner can read, or in the environment
    as ISTHMUS_API_KEY. `authority` (or ISTHMUS_AUTHORITY) is the certificate of the authority that signed
    the broker's, if the system does not trust it. A request that comes too soon (429) is sent again when
    the broker says, for at most `patience` seconds; one that may arrive twice is sent again up to
    `retries` times if the broker is overloaded (503) or the connection fails.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        key: str | Path | None = None,
        authority: str | os.PathLike[str] | None = None,
        timeout: float = 30.0,
        patience: float = PATIENCE,
        retries: int = RETRIES,
    ) -> None:
        self._calls = _BlockingCalls(
            url, key=key, authority=authority, timeout=timeout, patience=patience, retries=retries
        )
        self.url = self._calls.url

    @property
    def key_expires(self) -> str | None:
        """When the API key ends, if the last answer has warned that it does soon."""
        return self._calls.key_expires

    search = _blocking(AsyncClient.search)
    search_stream = _blocking_iterator(AsyncClient.search_stream)
    count = _blocking(AsyncClient.count)
    judge = _blocking(AsyncClient.judge)
    judgements = _blocking(AsyncClient.judgements)
    open = _blocking(AsyncClient.open)
    open_allowed = _blocking(AsyncClient.open_allowed)
    ask = _blocking(AsyncClient.ask)
    requests = _blocking(AsyncClient.requests)
    answer = _blocking(AsyncClient.answer)
    import_judgements = _blocking(AsyncClient.import_judgements)
    export_judgements = _blocking(AsyncClient.export_judgements)
    silos = _blocking(AsyncClient.silos)
    training = _blocking(AsyncClient.training)
    learning = _blocking(AsyncClient.learning)
    learn = _blocking(AsyncClient.learn)
    learn_to_end = _blocking(AsyncClient.learn_to_end)
    rollback = _blocking(AsyncClient.rollback)
    calibration = _blocking(AsyncClient.calibration)
    sessions = _blocking(AsyncClient.sessions)
    end_sessions = _blocking(AsyncClient.end_sessions)
    me = _blocking(AsyncClient.me)
    health = _blocking(AsyncClient.health)
    metrics = _blocking(AsyncClient.metrics)
    close = _blocking(AsyncClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, bytes]]:
    """Yield names and data of server-sent events in the form that our broker writes: one line each."""
    rest = bytearray()
    async for part in parts:
        rest += part
        if b"\n\n" not in rest[-len(part) - 1 :]:  # split only when an event is complete, not for every part
            continue
        *blocks, rest = rest.split(b"\n\n")
        for block in blocks:
            fields = dict(line.partition(b": ")[::2] for line in bytes(block).split(b"\n"))
            yield fields.get(b"event", b""), fields.get(b"data", b"")


def _search_of(
    query: str, k: int, threshold: float, explain: bool, silos: list[str] | None, deadline_ms: int | None
) -> dict[str, Any]:
    payload = {"query": query, "k": k, "threshold": threshold, "explain": explain}
    limits = {"silos": silos, "deadline_ms": deadline_ms}
    return payload | {name: value for name, value in limits.items() if value is not None}


def _nonzero(**options: int) -> dict[str, int]:
    """Return the options that are set: a broker of an earlier release refuses those that it does not know."""
    return {name: value for name, value in options.items() if value}


def _batches(judgements: Sequence[wire.NamedJudgement]) -> Iterator[list[dict[str, Any]]]:
    """Split judgements into batches that fit into one request."""
    batch: list[dict[str, Any]] = []
    size = 0
    for each in judgements:
        row = each.model_dump(exclude_none=True)
        length = len(json.dumps(row)) + 1
        if batch and (len(batch) == wire.MOST_JUDGEMENTS or size + length > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += length
    if batch:
        yield batch


def _token(key: str | Path | None) -> str:
    """Return the API key, or "" for none. Raises a ServiceError, which does not repeat it, for a text that
    cannot be a key, before anything is sent."""
    if isinstance(key, Path):
        with private_file(key).open("rb") as file:
            content, place = file.read(LONGEST_KEY + 3), str(key)  # with the line end
    elif key:
        content, place = key.encode(errors="replace"), "key"
    else:
        content, place = os.environ.get(KEY_VARIABLE, "").encode(errors="replace"), KEY_VARIABLE
    token = content.strip()
    if len(token) > LONGEST_KEY or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ServiceError(
            f"{place}: not an API key (expected one line of at most {LONGEST_KEY} ASCII characters without "
            "spaces: the file that isthmus keys wrote, or the broker's admin.key)"
        )
    if isinstance(key, Path) and not token:
        raise ServiceError(f"{place}: empty (expected an API key, as isthmus keys writes it)")
    return token.decode("ascii")


_START = "isthmus broker --config broker.toml starts one"


def _cure(error: httpx.TransportError) -> str:
    message = str(error)
    if isinstance(error, httpx.UnsupportedProtocol):
        return "begin it with http:// or https://"
    if "CERTIFICATE_VERIFY_FAILED" in message:
        return f"name the broker's authority with --authority, or set {AUTHORITY_VARIABLE}"
    if "WRONG_VERSION_NUMBER" in message:
        return "it speaks no TLS: say http://, or set https = true in broker.toml"
    return _START
