"""A search as server-sent events: the outcome of each silo as it answers, then the whole answer.

    event: silo      data: wire.SiloProgress, for every silo
    event: answer    data: wire.Answer, as the ordinary search has it; the stream ends
    event: error     data: wire.Problem, instead of the answer

Errors that are found before the search begins (key, rights, form, rate) are ordinary HTTP answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from isthmus.service import wire
from isthmus.service.limits import HttpProblem, problem_of
from isthmus.service.logs import place_of
from isthmus.service.people import Person

if TYPE_CHECKING:
    from isthmus.service.broker import Broker

EVENTS_TYPE = "text/event-stream"
EVENTS: Mapping[str, Any] = {
    "response_class": Response,
    "responses": {200: {"content": {EVENTS_TYPE: {}}}},
}
"""Options of a route that sends events."""

_log = logging.getLogger("isthmus.service")


class EventStream(StreamingResponse):
    """Sends events as they come; when the client disconnects, the generator of the events is closed."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # nginx would hold events back until it has a buffer full
        super().__init__(events, media_type=EVENTS_TYPE, headers={"x-accel-buffering": "no"})
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._events):
            await super().stream_response(send)


async def search_events(
    broker: Broker,
    request: wire.Search,
    person: Person | None,
    note: Callable[[wire.Answer], None],
    check: Callable[[], None] = lambda: None,
) -> AsyncGenerator[bytes]:
    """Yield a search's events; `note` gets the answer before it leaves, and `check` raises to stop."""
    queue: asyncio.Queue[wire.SiloProgress | None] = asyncio.Queue()
    search = asyncio.create_task(broker.search(request, person, progress=queue.put_nowait))
    search.add_done_callback(lambda task: queue.put_nowait(None))
    search.add_done_callback(_drop_failure)
    reported = set[str]()
    try:
        while (progress := await queue.get()) is not None:
            check()
            reported.add(progress.silo)
            yield _event("silo", progress.model_dump_json())
        answer = await search
        check()
        for status in answer.silos:
            if status.silo not in reported:  # the search did not wait for this silo
                yield _event("silo", wire.SiloProgress(**status.model_dump()).model_dump_json())
        note(answer)
        yield _event("answer", answer.model_dump_json())
    except Exception as error:
        if not isinstance(error, HttpProblem):
            _log.error("a streamed search failed: %s at %s", type(error).__name__, place_of(error))
        yield _event("error", bytes(problem_of(error).response().body).decode())
    finally:
        search.cancel()


def _drop_failure(search: asyncio.Task[wire.Answer]) -> None:
    """Discard a failure after the client has gone: asyncio would log it with its whole text."""
    if not search.cancelled():
        search.exception()


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()  # JSON has no raw line breaks
