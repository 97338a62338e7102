"""A broker lets its silos learn together: it asks, adds up what they answer, and hands back what came of it.

    statistics    summed, as always
    directions    every silo's own, joined (`space`)
    queries       those that somebody judged in a silo with enough of them, told to all silos as any search is
    sums          over every silo's rows of those queries (`learning`)
    the ranker    to every silo, which bends its probabilities to its own hits and says nothing of that

Judgements never leave the silo that has them. Every silo must answer to the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from isthmus.asking import Silos, TooFew
from isthmus.errors import DataError, Refused, SiloUnavailable
from isthmus.service.broker import Broker, failure_of, understood
from isthmus.service.http_client import HttpReply
from isthmus.service.learned import Learned
from isthmus.service.learning import Question, answer_of, learn
from isthmus.service.settings import BrokerSettings
from isthmus.service.space import Space, joined
from isthmus.service.statistics import Nodes, Request, Talks
from isthmus.service.wire import BUNDLE_TYPE, Judged

T = TypeVar("T")
MOST_BYTES = 192 << 20
PATIENCE = 300.0
"""Seconds that silos have for one answer: directions and rows take their time."""
_DIRECTIONS = "the keyed hashes of its words, their rarity and the directions it would give them"
_JUDGED = "which queries somebody judged hits of, and into how many folds they may be dealt"
_ACCEPTED = "that it has accepted what was sent"


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
    parts = [
        Space.from_bytes(reply.body) for reply in await _all(silos, "GET", "/directions", shows=_DIRECTIONS)
    ]
    space = await asyncio.to_thread(joined, parts)
    packed = space.to_bytes()
    await _all(silos, "PUT", "/directions", packed, shows=_ACCEPTED)
    judged = [understood(reply, Judged) for reply in await _all(silos, "GET", "/learning", shows=_JUDGED)]
    folds = min((each.folds for each in judged if each.folds), default=0)
    if not folds:
        raise DataError(
            "no silo has judged queries enough to take part",
            cure="judge hits of more queries: each half of them needs learning.least_queries of silo.toml",
        )
    queries = sorted({query for each in judged for query in each.queries})

    def request(question: Question) -> Request:
        return lambda silo: silo.ask("POST", "/learning", question.to_bytes(), BUNDLE_TYPE)

    asker = _asker(silos, Nodes(silos, write=request, read=lambda reply: answer_of(_accepted(reply).body)))
    name = Space.from_bytes(packed).fingerprint
    learned = await _together(learn, asker, queries, folds=folds, space=name)
    await _all(silos, "PUT", "/learning", learned.to_bytes(), shows=_ACCEPTED)
    return learned


async def _all(
    silos: Sequence[Talks], method: str, path: str, body: bytes = b"", *, shows: str
) -> list[HttpReply]:
    """The same to every silo at once; whoever does not answer as it should ends the lesson."""
    asker = _asker(silos, Nodes(silos, read=_accepted))
    answers = await _together(
        asker.collect, lambda silo: silo.ask(method, path, body, BUNDLE_TYPE), shows=shows
    )
    return [answers.by_silo[name] for name in asker.names]


def _asker(silos: Sequence[Talks], nodes: Nodes) -> Silos:
    return Silos(tuple(silo.name for silo in silos), nodes, PATIENCE)


async def _together(work: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """What asking all silos comes to, in a thread; who has not answered is named."""
    try:
        return await asyncio.to_thread(work, *arguments, **more)
    except TooFew as few:
        why = "; ".join(f"{name}: {reason}" for name, reason in few.answers.reasons().items())
        raise SiloUnavailable(f"the silos cannot learn together: {why}") from few


def _accepted(reply: HttpReply) -> HttpReply:
    if reply.status == 403:
        raise Refused("its policy has no learning for this broker")
    if reply.status == 429:
        raise Refused("it has no more lessons today (learning.sessions in its silo.toml), or too much to do")
    if reply.status not in (200, 204):
        raise failure_of(reply)
    return reply
