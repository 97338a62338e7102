"""A broker lets its silos learn together: it asks, adds up what they answer, and hands back what came of it.

    statistics    summed, as always
    directions    every silo's own, joined (`space`)
    queries       those that somebody judged anywhere, told to all silos as any search tells them
    sums          over every silo's rows of those queries (`learning`)
    the ranker    to every silo, which bends its probabilities to its own hits and says nothing of that

Judgements never leave the silo that has them. Every silo must answer to the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from isthmus.errors import Refused, ServiceError, SiloUnavailable
from isthmus.service.broker import Broker, failure_of
from isthmus.service.learned import Learned
from isthmus.service.learning import Lesson, Question, answer_of, learn
from isthmus.service.lines import Reply
from isthmus.service.settings import BrokerSettings
from isthmus.service.space import Space, joined
from isthmus.service.statistics import Talks
from isthmus.service.wire import BUNDLE_TYPE
from isthmus.tables.ids import FloatArray

MOST_BYTES = 512 << 20
PATIENCE = 300.0
"""Seconds that silos have for one answer: directions and rows take their time."""


async def teach(settings: BrokerSettings) -> Learned:
    """Let the broker's silos learn; what they then search with."""
    broker = Broker(settings, most=MOST_BYTES)
    try:
        if settings.share_statistics:
            await broker.exchange.once()
        return await taught(list(broker.silos.values()))
    finally:
        await broker.stop()


async def taught(silos: Sequence[Talks]) -> Learned:
    """Let these silos learn."""
    parts = [Space.from_bytes(reply.body) for reply in await _all(silos, "GET", "/directions")]
    space = await asyncio.to_thread(joined, parts)
    packed = space.to_bytes()
    await _all(silos, "PUT", "/directions", packed)
    told = [json.loads(reply.body)["queries"] for reply in await _all(silos, "GET", "/learning")]
    lesson = Lesson.of([query for queries in told for query in queries])
    loop = asyncio.get_running_loop()

    def ask(question: Question) -> list[FloatArray]:
        asked = _all(silos, "POST", "/learning", question.to_bytes())
        return [answer_of(reply.body) for reply in asyncio.run_coroutine_threadsafe(asked, loop).result()]

    learned = await asyncio.to_thread(learn, ask, lesson, space=Space.from_bytes(packed).fingerprint)
    await _all(silos, "PUT", "/learning", learned.to_bytes())
    return learned


async def _all(silos: Sequence[Talks], method: str, path: str, body: bytes = b"") -> list[Reply]:
    """The same to every silo at once; whoever does not answer as it should ends the lesson."""
    answers: list[Any] = await asyncio.gather(
        *(_one(silo, method, path, body) for silo in silos), return_exceptions=True
    )
    failed = {silo.name: told for silo, told in zip(silos, answers, strict=True) if _is_failure(told)}
    if failed:
        why = "; ".join(f"{name}: {error or type(error).__name__}" for name, error in failed.items())
        raise SiloUnavailable(f"the silos cannot learn together: {why}")
    return answers


async def _one(silo: Talks, method: str, path: str, body: bytes) -> Reply:
    async with asyncio.timeout(PATIENCE):
        reply = await silo.ask(method, path, body, BUNDLE_TYPE)
    if reply.status == 403:
        raise Refused("its policy has no learning for this broker")
    if reply.status not in (200, 204):
        raise failure_of(reply)
    return reply


def _is_failure(told: object) -> bool:
    if isinstance(told, BaseException) and not isinstance(told, (ServiceError, OSError, TimeoutError)):
        raise told
    return isinstance(told, BaseException)
