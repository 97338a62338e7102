"""The exchange that makes scores of different silos comparable: their statistics are summed and handed back.

What a silo gives is its own choice (exact, private, nothing). The broker keeps the last figures of each, so
that one that is down for a while still counts; the sum's version tells whether two silos scored alike.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Protocol

from isthmus.errors import IsthmusError, ProtocolError, Refused
from isthmus.service.figures import Figures, summed
from isthmus.service.lines import Reply
from isthmus.service.wire import STATISTICS_TYPE

CALM, UNEASY, EAGER = 30.0, 5.0, 1.0
"""Seconds between two exchanges: while nothing changes, while a silo is missing, and after a change."""
PATIENCE = 20.0

_log = logging.getLogger("isthmus.service")


def etag(content: bytes) -> str:
    """What tells statistics that were fetched before from others."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


class Talks(Protocol):
    """A silo that messages can be sent to."""

    name: str

    async def ask(
        self, method: str, path: str, body: bytes = b"", kind: str = ..., *, unless: str = ""
    ) -> Reply:
        """Send one message; what is asked for may stay away if `unless` is its tag."""


class Exchange:
    """Figures by silo, their sum, and who holds it."""

    def __init__(self, silos: Sequence[Talks]) -> None:
        self._silos = silos
        self._figures: dict[str, Figures] = {}
        self._tags: dict[str, str] = {}
        self._total: bytes = b""
        self._holders: set[str] = set()
        self._sharing: set[str] = {silo.name for silo in silos}
        self._changed = False
        self.version = ""
        self.problem = ""

    async def run(self) -> None:
        """Exchange again and again."""
        pause = EAGER
        while True:
            await self.once()
            settled = self._holders >= self._sharing
            pause = EAGER if self._changed else min(2 * pause, CALM if settled else UNEASY)
            self._changed = False
            await asyncio.sleep(pause)

    def remark(self, version: str) -> str:
        """What to say of a silo that scored with this version."""
        if not self.version or version == self.version:
            return ""
        self._holders.clear()  # it restarted, or was away: hand the sum out again
        return "scored with other statistics than the rest"

    async def once(self) -> None:
        """Collect, sum, hand back. Who does not take part is told of in the log, once a change."""
        await asyncio.gather(*(self._collect(silo) for silo in self._silos))
        if not any(figures.documents for figures in self._figures.values()):
            return  # no silo has anything yet
        try:
            total = await asyncio.to_thread(self._sum)
        except ProtocolError as error:
            self._note(f"the silos' statistics do not add up: {error}")
            return
        if total.version != self.version:
            self._total = await asyncio.to_thread(total.to_bytes)
            self.version, self._changed = total.version, True
            self._holders.clear()
        await asyncio.gather(*(self._hand_out(silo) for silo in self._silos))
        missing = sorted(self._sharing - self._holders)
        self._note(f"without shared statistics: {', '.join(missing)}" if missing else "")

    def _sum(self) -> Figures:
        return summed(self._figures[name] for name in sorted(self._figures))

    async def _collect(self, silo: Talks) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                reply = await silo.ask("GET", "/statistics", unless=self._tags.get(silo.name, ""))
            if reply.status in (401, 403, 404):  # it does not share, which is its right
                self._sharing.discard(silo.name)
                self._figures.pop(silo.name, None)
                self._tags.pop(silo.name, None)
                return
            if reply.status != 200:
                return
            figures = await asyncio.to_thread(Figures.from_bytes, reply.body)
            if figures.silos != (silo.name,):
                raise ProtocolError("statistics of another silo")
        except (TimeoutError, OSError, IsthmusError) as error:
            if isinstance(error, (ProtocolError, Refused)):
                self._note(f"{silo.name}: {error}")
            return
        self._figures[silo.name], self._tags[silo.name] = figures, etag(reply.body)
        self._sharing.add(silo.name)

    async def _hand_out(self, silo: Talks) -> None:
        if silo.name in self._holders:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                reply = await silo.ask("PUT", "/statistics", self._total, STATISTICS_TYPE)
        except (TimeoutError, OSError, IsthmusError):
            return
        if reply.status in (200, 204):
            self._holders.add(silo.name)

    def _note(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.warning("%s", problem)
        self.problem = problem
