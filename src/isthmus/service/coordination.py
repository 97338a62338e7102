"""The coordinator of training over mutual TLS: silos fetch messages and send replies, and nothing else.

    POST /v1/training/fetch     204 or the next message; the header `isthmus-busy: NUMBER` names the
                                message that the silo is working on
    POST /v1/training/reply     a reply: 204, or 410 if nobody waits for it

A silo calls with a certificate of its own for training, `north.training` (isthmus keys make --training).
Runs are started in the coordinator's own process, from files on its machine: there is no interface to
start one from elsewhere, and none that accepts code.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from isthmus.errors import ProtocolError, ServiceError
from isthmus.service.certificates import TRAINING
from isthmus.service.connections import server
from isthmus.service.limits import CALLER, HttpProblem, Protect, Surface
from isthmus.service.security import Gate
from isthmus.service.settings import CoordinatorSettings, RequestLimits

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from isthmus.federation import RemoteGrid

FETCH, REPLY = "/v1/training/fetch", "/v1/training/reply"
BUSY, MESSAGE_TYPE = "isthmus-busy", "application/vnd.isthmus.message"
WAIT = 8.0
"""Seconds that a fetch waits for a message."""
_PAUSE = 0.05


def coordinator_app(settings: CoordinatorSettings, grid: RemoteGrid) -> ASGIApp:
    """Return the app with the two paths, for the silos that the settings list."""

    async def fetch(request: Request) -> Response:
        name, busy = request.scope[CALLER].policy, request.headers.get(BUSY, "")
        until = time.monotonic() + (0 if busy else WAIT)
        while (order := grid.fetch(name, busy=busy)) is None and time.monotonic() < until:
            if await request.is_disconnected():
                break
            await asyncio.sleep(_PAUSE)
        return Response(status_code=204) if order is None else Response(order, media_type=MESSAGE_TYPE)

    async def reply(request: Request) -> Response:
        body = await request.body()
        try:
            awaited = await run_in_threadpool(grid.deliver, request.scope[CALLER].policy, body)
        except ProtocolError as error:
            raise HttpProblem(400, str(error)) from None
        return Response(status_code=204 if awaited else 410)

    routes = [Route(FETCH, fetch, methods=["POST"]), Route(REPLY, reply, methods=["POST"])]
    gate = Gate(peers={name + TRAINING: name for name in settings.silos})
    return Protect(Router(routes), gate=gate, limits=_limits(settings), surface=Surface(large=(REPLY,)))


def _limits(settings: CoordinatorSettings) -> RequestLimits:
    """Return limits with four connections a silo: to fetch, to send heartbeats, to reply, and one more while
    one of them is closed."""
    room = 16 + 4 * len(settings.silos)
    return RequestLimits(
        per_second=50.0,
        burst=200,
        body_bytes=1 << 10,
        operator_body_bytes=settings.body_bytes,
        concurrent=room,
        connections=room,
        connections_per_address=room,
    )


@contextmanager
def coordinating(
    settings: CoordinatorSettings, *, started: Callable[[str], None] = lambda url: None
) -> Iterator[RemoteGrid]:
    """Serve a grid to the silos that the settings list, inside this block."""
    from isthmus.federation import RemoteGrid

    grid = RemoteGrid(settings.silos)
    app = coordinator_app(settings, grid)
    serving = server(
        app,
        host=settings.host,
        port=settings.port,
        tls=settings.tls,
        mutual=True,
        limits=_limits(settings),
    )
    thread = threading.Thread(target=serving.run, name="coordinator", daemon=True)
    thread.start()
    while not serving.started and thread.is_alive():
        time.sleep(_PAUSE)
    if not serving.started:
        raise ServiceError(f"{settings.host}:{settings.port} cannot be listened at; is the port free?")
    started(f"{settings.host}:{serving.servers[0].sockets[0].getsockname()[1]}")
    try:
        yield grid
    finally:
        serving.should_exit = True
        thread.join()
