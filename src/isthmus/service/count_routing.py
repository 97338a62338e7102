"""One question about noised counts to several silos, and their answers.

A new question is charged to the budgets of the silos' documents, so it is sent once and never repeated
automatically: neither after a failure, nor to a silo that has answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from pydantic import ValidationError

from isthmus.errors import Refused, SiloUnavailable
from isthmus.service import wire
from isthmus.service.broker import SiloClient, understood
from isthmus.service.http_client import BrokenReply, HttpReply
from isthmus.service.limits import HttpProblem
from isthmus.service.people import Person

SECONDS = 30.0
"""Seconds that a silo may take, since it reads all of its documents."""


async def count_matches(
    silos: Mapping[str, SiloClient], question: wire.CountQuestion, person: Person | None = None
) -> wire.CountAnswer:
    """Ask every silo, or those that the question names. Returns the count or the failure of each."""
    names = list(silos) if question.silos is None else list(dict.fromkeys(question.silos))
    if not names or not set(names) <= silos.keys():
        raise HttpProblem(404, f"silos: only names that there are: {', '.join(silos)}")
    began, body = time.monotonic(), question.model_dump_json(exclude={"silos"}).encode()
    counts = await asyncio.gather(*(_count_of(silos[name], body, person) for name in names))
    took = round((time.monotonic() - began) * 1000, 1)
    return wire.CountAnswer(silos=counts, threshold=question.threshold, took_ms=took)


async def _count_of(silo: SiloClient, body: bytes, person: Person | None) -> wire.SiloCount:
    try:
        async with asyncio.timeout(SECONDS):
            reply = await silo.ask("POST", "/noised-counts", body, person=person)
        if reply.status == 403 and _detail(reply) == wire.BUDGET_SPENT:
            raise Refused(wire.BUDGET_SPENT)
        if reply.status == 403:
            raise Refused("its policy does not allow noised_counts")
        if reply.status == 422:
            raise Refused("it cannot count this: a query without words, or documents elsewhere")
        if reply.status == 404:
            raise Refused("it knows no noised counts: an older Isthmus")
        answer = understood(reply, wire.NoisedCount)
        if answer.silo != silo.name or not answer.low <= answer.count <= answer.high:
            raise BrokenReply("its answer is not of the documented form")
    except Refused as error:
        return wire.SiloCount(silo=silo.name, status="refused", detail=str(error))
    except TimeoutError:
        return wire.SiloCount(silo=silo.name, status="late", detail=f"no answer within {SECONDS:.0f} s")
    except (SiloUnavailable, OSError) as error:
        status: wire.Status = "broken" if isinstance(error, BrokenReply) else "down"
        return wire.SiloCount(silo=silo.name, status=status, detail=str(error))
    return wire.SiloCount(silo=silo.name, status="answered", answer=answer)


def _detail(reply: HttpReply) -> str:
    """Return the detail of a silo's problem. It is compared but never shown: the silo's text is
    not trusted."""
    try:
        return wire.Problem.model_validate_json(reply.body).detail
    except ValidationError:
        return ""
