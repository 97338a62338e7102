"""The broker over HTTP: the API that the page, the Python client and programs use.

    app = broker_app(Broker(settings))       # an ASGI app, behind its limits

| path | needs the scope |
|---|---|
| POST /v1/search · GET, POST /v1/search/stream | search |
| GET /v1/silos /v1/training /v1/calibration /v1/learning | search |
| POST /v1/noised-counts | counts |
| POST, GET /v1/requests | search |
| POST /v1/feedback /v1/judged | feedback |
| GET /v1/documents/SILO/ID | documents; with a `request` that its owner has allowed: search |
| POST, GET /v1/judgements · POST /v1/learning /v1/learning/rollback /v1/requests/SILO/NUMBER | admin |
| GET /metrics | metrics |
| GET /v1/audit | audit, which admin does not include |
| GET, DELETE /v1/sessions · GET /v1/keys · DELETE /v1/keys/ID | admin |
| POST /mcp, if the settings enable it | that of the tool: see `mcp` |
| GET /v1/me · GET, POST, DELETE /v1/session · GET /v1/signin | none |
| GET /v1/health · /v1/ready · /v1/openapi.json · /v1/docs | none |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from isthmus import __version__
from isthmus.errors import IsthmusError, Refused
from isthmus.service import pages, signin, wire
from isthmus.service.apps import METRICS, PROBLEMS, ShortWay, new_app, problems, reference
from isthmus.service.audit_log import audit, page_of
from isthmus.service.broker import Broker
from isthmus.service.count_routing import count_matches
from isthmus.service.learning_runs import LearningRuns
from isthmus.service.limits import (
    CALLER,
    NOTE,
    HttpProblem,
    Protect,
    Surface,
    check_origin,
    names_of,
    problem_of,
)
from isthmus.service.logs import place_of
from isthmus.service.mcp import PATH, McpEndpoint
from isthmus.service.metrics import CONTENT_TYPE
from isthmus.service.people import Person
from isthmus.service.security import ApiKeys, Caller, Gate
from isthmus.service.sessions import Sessions
from isthmus.service.settings import SCOPES, BrokerSettings
from isthmus.service.streaming import EVENTS, EventStream, search_events
from isthmus.service.templates import template

OPEN = ("/v1/health", "/v1/ready", "/v1/openapi.json", "/v1/docs", "/v1/docs.css", *signin.OPEN)
TITLE = "Isthmus broker"
ABOUT = (
    "One search over silos that keep their documents. A hit's probability is meant as one: of hits shown"
    " with 0.8, eighty percent are relevant. Errors are problem details (RFC 9457)."
)
STREAM = "/v1/search/stream"
LEARNING = problems({409: "The silos are learning already."})
_log = logging.getLogger("isthmus.service")
_router = APIRouter(responses=PROBLEMS)
T = TypeVar("T")


def broker_app(broker: Broker, gate: Gate[Any] | None = None) -> ASGIApp:
    """Return the broker's ASGI app behind `Protect`, its authentication and limits."""
    assistants = McpEndpoint(EndpointCalls) if broker.settings.mcp else None

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        await broker.start()
        app.state.learning.start()
        checking = asyncio.create_task(signin.check_provider(app.state.gate.sessions))
        async with AsyncExitStack() as running:
            if assistants is not None:
                await running.enter_async_context(assistants.running())
            yield
        checking.cancel()
        await app.state.learning.stop()
        await broker.stop()

    app = new_app(
        TITLE, OPEN, description=ABOUT, lifespan=life, generate_unique_id_function=lambda route: route.name
    )
    app.state.broker, app.state.learning = broker, LearningRuns(broker)
    app.state.gate = gate = gate or gate_of(broker.settings)
    app.include_router(_router)
    app.include_router(signin.router)
    if assistants is not None:
        app.router.routes.append(Route(PATH, assistants))
    opened = pages.mount(app)
    requests = broker.metrics.counter("isthmus_requests_total", "Requests.", "path", "status")
    times = broker.metrics.histogram("isthmus_request_seconds", "Times of requests.", "path")

    def observe(path: str, status: int, seconds: float) -> None:
        requests.add(path=path, status=str(status))
        times.observe(seconds, path=path)

    return Protect(
        ShortWay(app, "/v1/search", wire.Search, search),
        gate=gate,
        limits=broker.settings.limits,
        surface=Surface(
            open=(*OPEN, *opened), abandoned=("/v1/search", STREAM, PATH), hosts=hosts_of(broker.settings)
        ),
        observe=observe,
        refused=broker.audit.refuse,
    )


def gate_of(settings: BrokerSettings) -> Gate[Any]:
    """Return the gate for API keys and for people of the identity provider. Without either, which is allowed
    only on loopback, every caller has all scopes except admin and audit."""
    if settings.keys is None and settings.oidc is None:
        return Gate(strangers=[scope for scope in SCOPES if scope not in ("admin", "audit")])
    keys = None if settings.keys is None else ApiKeys(settings.keys)
    if settings.oidc is None:
        return Gate(keys=keys, sessions=Sessions(keys))
    from isthmus.service.oidc import Provider

    return Gate(keys=keys, sessions=Sessions(keys, Provider(settings.oidc)))


def hosts_of(settings: BrokerSettings) -> frozenset[str] | None:
    """Return the names accepted in the Host header; None (any name) for a server on all addresses without
    configured names."""
    if settings.host in ("0.0.0.0", "::") and not settings.hosts:
        return None
    return names_of(settings.host, settings.hosts)


def _broker(request: Request, scope: str) -> Broker:
    """Return the broker if the caller has this scope, else raise a 403. Requests of administrators are
    written to the audit log first."""
    if not request.scope[CALLER].may(scope):
        raise HttpProblem(403, f"this needs a key with the scope {scope}")
    broker: Broker = request.app.state.broker
    if scope == "admin":
        audit(request, "administration", what=f"{request.method} {request.scope['route'].path}")
    return broker


def _check_still(request: Request, scope: str) -> None:
    """Raise a 401 if the key, session or groups that allowed the request have been revoked or changed since,
    so that its result is not shown."""
    before: Caller[Any] = request.scope[CALLER]
    try:
        now = request.app.state.gate.caller(request.scope)
    except Refused as refusal:
        raise HttpProblem(401, str(refusal)) from None
    if now.person != before.person or not now.may(scope):
        raise HttpProblem(401, "your rights have changed: ask again")


def _person(request: Request) -> Person:
    """Return the person who sent the request; `anonymous` without keys on loopback."""
    caller: Caller[Any] = request.scope[CALLER]
    return caller.person or Person(caller.name)


@_router.post("/v1/search", response_model=wire.Answer)
async def search(body: wire.Search, request: Request) -> Response:
    """Search all silos, or those named, for at most `deadline_ms`."""
    answer = await _answer(body, request)
    return Response(answer.model_dump_json(), media_type="application/json")


async def _answer(body: wire.Search, request: Request) -> wire.Answer:
    answer = await _broker(request, "search").search(body, request.scope[CALLER].person)
    _check_still(request, "search")
    _note(request, body, answer)
    return answer


def _note(request: Request, body: wire.Search, answer: wire.Answer) -> None:
    """Add the status of every silo and the number of hits to the request's entry in the access log; the query
    only if `log_queries` is set."""
    note = request.scope[NOTE]
    note["silos"] = {status.silo: status.status for status in answer.silos}
    note["hits"] = len(answer.hits)
    if request.app.state.broker.settings.log_queries:
        note["query"] = body.query


@_router.post(STREAM, **EVENTS)
async def search_stream(body: wire.Search, request: Request) -> Response:
    """The same search as server-sent events: `silo` for each silo as it answers, then `answer` or `error`."""
    broker = _broker(request, "search")
    caller: Caller[Any] = request.scope[CALLER]

    def check() -> None:
        try:
            _check_still(request, "search")
        except HttpProblem as problem:  # recorded here, since the stream's own status is 200
            broker.audit.refuse(caller.name, f"{request.method} {STREAM}", problem.status)
            raise

    return EventStream(search_events(broker, body, caller.person, partial(_note, request, body), check))


@_router.get(STREAM, name="search_stream_get", **EVENTS)
async def search_stream_get(query: Annotated[wire.Search, Query()], request: Request) -> Response:
    """The same stream for browsers' `EventSource`. The query is in the address, which a proxy may log."""
    check_origin(request.scope)
    if request.headers.get("sec-fetch-mode") == "navigate":
        raise HttpProblem(403, "a link does not search: what was followed would be searched in your name")
    return await search_stream(query, request)


@_router.post("/v1/noised-counts")
async def noised_counts(body: wire.CountQuestion, request: Request) -> wire.CountAnswer:
    """Count the documents that answer a question, with noise, in silos that allow it. Charged to their
    budgets."""
    broker = _broker(request, "counts")
    if broker.settings.log_queries:
        request.scope[NOTE]["query"] = body.query
    return await count_matches(broker.silos, body, request.scope[CALLER].person)


@_router.post("/v1/feedback", status_code=204, response_model=None)
async def feedback(body: wire.Feedback, request: Request) -> Response:
    """Say whether a hit was right. The silo that owns it stores the judgement; the broker stores nothing."""
    await _broker(request, "feedback").feedback(body, _person(request))
    return Response(status_code=204)


@_router.post("/v1/judged")
async def judged(body: wire.ShownHits, request: Request) -> wire.OwnJudgements:
    """Return the caller's own judgements of hits, given the hits' tokens; nobody sees those of others."""
    return await _broker(request, "feedback").judgements.own(body, request.scope[CALLER].name)


@_router.post("/v1/judgements")
async def import_judgements(body: wire.JudgementBatch, request: Request) -> wire.Imported:
    """Import many judgements by document id; each goes to the silo that has the document. Idempotent."""
    return await _broker(request, "admin").judgements.place(body.judgements, request.scope[CALLER].name)


@_router.get("/v1/judgements")
async def export_judgements(
    query: Annotated[wire.JudgementsOf, Query()], request: Request
) -> wire.JudgementPage:
    """Export the judgements that one silo received through this broker, in pages, if its policy allows it."""
    return await _broker(request, "admin").judgements.page(query.silo, query.after)


@_router.get("/v1/documents/{silo}/{id:path}", name="open")
async def open_document(
    silo: str, id: wire.DocumentId, query: Annotated[wire.Opening, Query()], request: Request
) -> wire.OpenedDocument:
    """Return a whole document: by the `ticket` of a hit that you were shown, or once by a `request` that its
    owner has allowed. The silo records this in its ledger before the document leaves."""
    scope = "search" if query.request else "documents"
    document = await _broker(request, scope).documents.open(silo, id, query, _person(request))
    _check_still(request, scope)
    return document


@_router.post("/v1/requests", name="ask")
async def ask(body: wire.AskSilo, request: Request) -> wire.DocumentRequest:
    """Ask the owner for a hit's document, with a reason. The silo stores the request; the broker stores
    nothing."""
    return await _broker(request, "search").documents.request(body, _person(request))


@_router.get("/v1/requests")
async def requests(query: Annotated[wire.EveryRequest, Query()], request: Request) -> wire.RequestList:
    """Return your requests and the owners' answers; with `all`, every request that administrators
    may answer."""
    broker = _broker(request, "admin" if query.all else "search")
    return await broker.documents.requests(None if query.all else _person(request))


@_router.post("/v1/requests/{silo}/{number}")
async def answer_request(
    silo: str, number: wire.RequestNumber, body: wire.RequestAnswer, request: Request
) -> wire.DocumentRequest:
    """Allow one opening of a document, or deny it with a reason. For silos whose policy lets you manage."""
    return await _broker(request, "admin").documents.answer(silo, number, body)


@_router.get("/v1/silos")
async def silos(request: Request) -> wire.SiloList:
    """Return every silo's health, its releases, and what is left of its budgets. Addresses, sources and
    details of machines are for administrators only."""
    broker = _broker(request, "search")
    view = await broker.cached_view("silos", broker.view_silos)
    if request.scope[CALLER].may("admin"):
        return view
    return view.model_copy(update={"silos": list(map(_public, view.silos)), "machine": None})


def _public(silo: wire.SiloState) -> wire.SiloState:
    """Return a silo's state without the fields that are for administrators only."""
    ready = None if silo.ready is None else silo.ready.model_copy(update={"machine": None})
    return silo.model_copy(update={"url": "", "sources": [], "skew": None, "ready": ready})


@_router.get("/v1/calibration")
async def calibration(request: Request) -> wire.Calibration:
    """Return how reliable the probabilities are, by silo and retriever, with precision and recall by
    threshold."""
    broker = _broker(request, "search")
    return await broker.cached_view("calibration", broker.view_calibration)


@_router.get("/v1/training")
async def training(request: Request) -> wire.TrainingView:
    """Return the progress of the training run: measure, weights, risks and rejected updates by round."""
    broker = _broker(request, "search")
    return await broker.cached_view("training", broker.view_training)


@_router.get("/v1/learning")
async def learning(request: Request) -> wire.LearningView:
    """Return the state of learning, and all versions of the model."""
    _broker(request, "search")
    return await asyncio.to_thread(_runs(request).view)


@_router.post("/v1/learning", status_code=202, responses=LEARNING)
async def learn(body: wire.LearningRequest, request: Request) -> wire.LearningView:
    """Let the silos learn from people's judgements. The run continues in the background."""
    _broker(request, "admin")
    _runs(request).begin(body.mode, by=request.scope[CALLER].name)
    return await asyncio.to_thread(_runs(request).view)


@_router.post("/v1/learning/rollback", responses=LEARNING)
async def rollback(body: wire.RollbackRequest, request: Request) -> wire.LearningView:
    """Search with another version of the model, from now on."""
    _broker(request, "admin")
    return await _runs(request).rollback(body.version)


def _runs(request: Request) -> LearningRuns:
    runs: LearningRuns = request.app.state.learning
    return runs


@_router.get("/v1/me")
async def me(request: Request) -> wire.Me:
    """Return the caller's name, scopes and groups, and when the key expires."""
    caller: Caller[Any] = request.scope[CALLER]
    ends = None if caller.expires is None else wire.moment(caller.expires)
    groups = [] if caller.person is None else sorted(caller.person.groups)
    return wire.Me(
        name=caller.name, label=caller.label, scopes=sorted(caller.scopes), groups=groups, expires=ends
    )


@_router.get("/v1/audit", response_class=Response, responses={200: {"content": {wire.LINES_TYPE: {}}}})
async def audit_entries(query: Annotated[wire.EntriesAfter, Query()], request: Request) -> Response:
    """Return entries of the broker's own audit log as lines of JSON. Needs the scope audit, which admin does
    not include."""
    folder = _broker(request, "audit").settings.folder
    audit(request, "read", what=f"entries after {query.after}")
    text = await asyncio.to_thread(page_of, folder, query.after, query.k)
    return Response(text, media_type=wire.LINES_TYPE)


@_router.get("/v1/health")
async def health(request: Request) -> wire.Health:
    """Return the broker's name, role and version: the server is alive."""
    return wire.Health(name=request.app.state.broker.settings.name, role="broker", version=__version__)


@_router.get(
    "/v1/ready", responses={503: {"model": wire.Ready, "description": "No silo is believed to answer."}}
)
async def ready(request: Request, response: Response) -> wire.Ready:
    """Whether at least one silo is thought to answer. Which ones is shown only to callers who may search."""
    state: wire.Ready = request.app.state.broker.ready()
    response.status_code = 200 if state.ready else 503
    return state if request.scope[CALLER].may("search") else wire.Ready(ready=state.ready)


@_router.get("/metrics", **METRICS)
async def metrics(request: Request) -> Response:
    """Return counters for Prometheus."""
    text = await asyncio.to_thread(_broker(request, "metrics").metrics.text)
    return Response(text, media_type=CONTENT_TYPE)


@_router.get("/v1/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """Return the reference of this API as a page."""
    return HTMLResponse(reference(request.app))


@_router.get("/v1/docs.css", include_in_schema=False)
async def docs_style() -> Response:
    """Return the style sheet of the API reference."""
    return Response(template("docs.css"), media_type="text/css")


@dataclass(frozen=True)
class EndpointCalls:
    """The functions that assistants call: the endpoints above, with the rights of the request's caller."""

    request: Request

    async def scopes(self) -> Collection[str]:
        """Return the caller's scopes."""
        return [scope for scope in SCOPES if self.request.scope[CALLER].may(scope)]

    async def search(self, search: wire.Search) -> wire.Answer:
        """POST /v1/search."""
        return await self._audited(_answer(search, self.request))

    async def open(self, hit: wire.HitCopy) -> wire.OpenedDocument:
        """GET /v1/documents."""
        opening = wire.Opening(ticket=hit.ticket)
        return await self._audited(open_document(hit.silo, hit.document, opening, self.request))

    async def silos(self) -> wire.SiloList:
        """GET /v1/silos."""
        return await self._audited(silos(self.request))

    async def judge(self, verdict: wire.Feedback) -> None:
        """POST /v1/feedback."""
        await self._audited(feedback(verdict, self.request))

    async def _audited(self, work: Awaitable[T]) -> T:
        """Await an endpoint and raise its failure as a problem. A refusal (401 or 403) is written to the
        audit log, since the MCP message itself is answered; an unforeseen failure is logged."""
        try:
            return await work
        except IsthmusError as error:
            problem = problem_of(error)
            if problem.status in (401, 403):
                log = self.request.app.state.broker.audit
                log.refuse(self.request.scope[CALLER].name, f"POST {PATH}", problem.status)
            elif problem.status == 500:
                _log.error("a tool failed: %s at %s", type(error).__name__, place_of(error))
            raise problem from None
