"""Exchange of statistics, which makes scores of different silos comparable: they are summed and sent back.

Each silo chooses what it shares (exact, private, nothing). The broker stores the last statistics of each, so
a silo that is down for a while still counts. The version of the sum shows whether two silos scored alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from isthmus.asking import Silos
from isthmus.errors import ProtocolError, Refused
from isthmus.retrieval import Statistics
from isthmus.service.http_client import HttpReply
from isthmus.service.scoring import try_on_query
from isthmus.service.wire import STATISTICS_TYPE

CALM, UNEASY, EAGER = 30.0, 5.0, 1.0
"""Seconds between two exchanges: while nothing changes, while a silo is missing, and after a change."""
PATIENCE = 20.0
TOLERANCE, SOME = 10, 1_000
"""Statistics may cover at most `TOLERANCE` times the documents that a silo reports in its answers, plus
`SOME`: a release may lag behind a collection from which much was removed."""

_log = logging.getLogger("isthmus.service")


def etag(content: bytes) -> str:
    """The ETag of packed statistics: a digest."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


class Talks(Protocol):
    """A silo to which requests can be sent."""

    name: str

    async def ask(
        self, method: str, path: str, body: bytes = b"", kind: str = ..., *, unless: str = ""
    ) -> HttpReply:
        """Send one request; the reply has no content if `unless` is the content's current ETag."""


Request = Callable[[Talks], Awaitable[HttpReply]]
"""Sends a request to a node over HTTPS."""


class Nodes:
    """Carries questions over the nodes' HTTPS interface, for threads other than that of the current event
    loop.

    `write` makes a request of a question, `read` an answer of a reply.
    """

    def __init__(
        self,
        silos: Sequence[Talks],
        *,
        write: Callable[[Any], Request] = lambda request: request,
        read: Callable[[HttpReply], Any] = lambda reply: reply,
    ) -> None:
        self._silos, self._write, self._read = {silo.name: silo for silo in silos}, write, read
        self._loop = asyncio.get_running_loop()

    def __call__(
        self, questions: Mapping[str, Any], *, deadline: float, enough: int
    ) -> Iterable[tuple[str, Any]]:
        answers = self._all(questions, deadline)
        return zip(questions, asyncio.run_coroutine_threadsafe(answers, self._loop).result(), strict=True)

    async def _all(self, questions: Mapping[str, Any], deadline: float) -> list[Any]:
        requests = (self._one(self._silos[name], question, deadline) for name, question in questions.items())
        return await asyncio.gather(*requests, return_exceptions=True)

    async def _one(self, silo: Talks, question: Any, deadline: float) -> Any:
        async with asyncio.timeout(deadline):
            return self._read(await self._write(question)(silo))


class SumExchange(Protocol):
    """Data that are collected from silos, added up and sent back, again and again."""

    changed: bool
    """Whether the sum has changed since this was last reset."""

    @property
    def settled(self) -> bool:
        """Whether every silo is up to date."""

    async def once(self) -> None:
        """Collect, add up, send back."""


async def keep_exchanging(*exchanges: SumExchange) -> None:
    """Run exchanges one after the other, periodically; no reply of a silo ends the loop."""
    pause = EAGER
    while True:
        for exchange in exchanges:
            try:
                await exchange.once()
            except Exception:
                _log.exception("statistics could not be exchanged, which is tried again")
        settled = all(exchange.settled for exchange in exchanges)
        changed = any(exchange.changed for exchange in exchanges)
        pause = EAGER if changed else min(2 * pause, CALM if settled else UNEASY)
        for exchange in exchanges:
            exchange.changed = False
        await asyncio.sleep(pause)


class StatisticsExchange:
    """Collects statistics by silo, adds them up, and records which silos have the sum.

    `documents` returns how many documents a silo states elsewhere that it has; None if it has not stated it
    yet. A silo whose statistics cannot be used is listed in `problems` with the reason; the other silos are
    unaffected.
    """

    def __init__(
        self, silos: Sequence[Talks], *, documents: Callable[[str], int | None] = lambda name: None
    ) -> None:
        self._silos, self._documents = silos, documents
        self._names = tuple(silo.name for silo in silos)
        self._statistics: dict[str, Statistics] = {}
        self._tags: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._kind: tuple[Any, ...] = ()
        self._total: bytes = b""
        self._holders: set[str] = set()
        self._sharing: set[str] = set(self._names)
        self.changed = False
        self.version = ""
        self.problem = ""
        self.problems: dict[str, str] = {}

    @property
    def settled(self) -> bool:
        """Whether every silo that shares has the sum."""
        return self._holders >= self._sharing

    def remark(self, version: str) -> str:
        """Return a remark on a silo that scored with this version; empty for the current one."""
        if not self.version or version == self.version:
            return ""
        self._holders.clear()  # it restarted or was away: send the sum again
        return "scored with other statistics than the rest"

    async def once(self) -> None:
        """Collect, add up, send back. Problems with a silo's statistics are logged once per change."""
        await self._collect()
        if not any(statistics.documents for statistics in self._statistics.values()):
            self._note(self._refused, "")
            return  # no silo has documents yet
        problem = ""
        try:
            total, left_out = await asyncio.to_thread(self._sum)
            if total.version != self.version:
                self._total = await asyncio.to_thread(_packed, total)
                self.version, self._kind, self.changed = total.version, total.kind, True
                self._holders.clear()
        except ProtocolError as error:  # the previous sum stays
            problem, left_out = f"the silos' statistics do not add up: {error}", {}
        if self._total:
            await self._hand_out()
            if missing := sorted(self._sharing - self._holders):
                problem = problem or f"without shared statistics: {', '.join(missing)}"
        self._note({**left_out, **self._refused}, problem)

    def _sum(self) -> tuple[Statistics, dict[str, str]]:
        """Return the sum, and the silos that are left out of it with the reasons.

        Silos with the fewest terms are added first: one with more terms than a sum can hold leaves only
        itself out.
        """
        kind = self._prevailing()
        total: Statistics | None = None
        left_out: dict[str, str] = {}
        for name in sorted(self._statistics, key=lambda name: (len(self._statistics[name].words), name)):
            statistics, stated = self._statistics[name], self._documents(name)
            if statistics.kind != kind:
                left_out[name] = "of another form, hash key, analysis of texts or tables than most silos'"
            elif stated is not None and statistics.documents > TOLERANCE * stated + SOME:
                left_out[name] = f"of {statistics.documents:,} documents, where its answers are of {stated:,}"
            else:
                try:
                    total = statistics if total is None else _checked_sum(total, statistics)
                except ProtocolError as error:
                    left_out[name] = str(error)
        if total is None:
            raise ProtocolError("no silo's statistics can be used")
        return replace(total, silos=tuple(sorted(total.silos)), about={}), left_out

    def _prevailing(self) -> tuple[Any, ...]:
        """Return the kind of statistics that most silos have; on a tie, that of the previous sum."""
        kinds = [statistics.kind for statistics in self._statistics.values() if statistics.documents]
        most = max(map(kinds.count, kinds))
        common = [kind for kind in kinds if kinds.count(kind) == most]
        if self._kind in common:
            return self._kind
        if any(kind != common[0] for kind in common):
            raise ProtocolError("they are of different forms, hash keys, analyses of texts or tables")
        return common[0]

    async def _collect(self) -> None:
        """Fetch every silo's statistics that are new; the last valid ones of the others still count."""

        def request(silo: Talks) -> Awaitable[HttpReply]:
            return silo.ask("GET", "/statistics", unless=self._tags.get(silo.name, ""))

        nodes = Silos(self._names, Nodes(self._silos), PATIENCE, least=0)
        shows = "its collection statistics, exact or noised as it has chosen"
        answers = await asyncio.to_thread(nodes.collect, request, self._read, shows=shows)
        for name, error in answers.failed.items():
            if isinstance(error, (ProtocolError, Refused)):
                self._refused[name] = str(error)

    def _read(self, name: str, reply: HttpReply) -> None:
        """Store one silo's reply; they are read one at a time, so hostile ones do not add up."""
        if reply.status in (401, 403, 404):  # a silo may decline to share
            self._sharing.discard(name)
            for known in (self._statistics, self._tags, self._refused):
                known.pop(name, None)
        if reply.status != 200:
            return
        statistics = Statistics.from_bytes(reply.body)
        if statistics.silos != (name,):
            raise ProtocolError("statistics of another silo")
        self._refused.pop(name, None)
        self._statistics[name], self._tags[name] = statistics, etag(reply.body)
        self._sharing.add(name)

    async def _hand_out(self) -> None:
        """Send the sum to every silo that does not have it."""
        missing = tuple(name for name in self._names if name not in self._holders)

        self._holders |= await hand_out(self._silos, missing, "/statistics", self._total, STATISTICS_TYPE)

    def _note(self, problems: Mapping[str, str], problem: str) -> None:
        """Record the current problems, by silo and overall, and log those that are new."""
        for name, why in problems.items():
            if self.problems.get(name) != why:
                _log.warning("the statistics of %s are left out of the sum: %s", name, why)
        if problem and not self.problem.endswith(problem):
            _log.warning("%s", problem)
        self.problems = dict(problems)
        lines = [f"the statistics of {name} are left out: {why}" for name, why in sorted(problems.items())]
        self.problem = "; ".join([*lines, problem] if problem else lines)


async def hand_out(
    silos: Sequence[Talks], names: Sequence[str], path: str, content: bytes, kind: str
) -> set[str]:
    """PUT the same content to the named silos. Returns the names of those that accepted it."""

    def request(silo: Talks) -> Awaitable[HttpReply]:
        return silo.ask("PUT", path, content, kind)

    nodes = Silos(tuple(names), Nodes(silos), PATIENCE, least=0)
    answers = await asyncio.to_thread(nodes.ask, request, lambda name, reply: reply.status in (200, 204))
    return {name for name, accepted in answers.by_silo.items() if accepted}


async def take_back(silos: Sequence[Talks], names: Sequence[str], path: str) -> set[str]:
    """DELETE the content at this path in the named silos. Returns the names of those that did so."""
    nodes = Silos(tuple(names), Nodes(silos), PATIENCE, least=0)
    ask = partial(nodes.ask, lambda silo: silo.ask("DELETE", path))
    answers = await asyncio.to_thread(ask, lambda name, reply: reply.status in (200, 204))
    return {name for name, accepted in answers.by_silo.items() if accepted}


def _checked_sum(total: Statistics, statistics: Statistics) -> Statistics:
    both = total + statistics
    both.check()
    return both


def _packed(total: Statistics) -> bytes:
    """Pack the sum for sending, after reading it back and testing it as its readers will."""
    content = total.to_bytes()
    try_on_query(Statistics.from_bytes(content))
    return content
