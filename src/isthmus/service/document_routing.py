"""Routes documents, and requests for them, between the broker's callers and silos. The broker
stores nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel

from isthmus.errors import Refused, SiloUnavailable
from isthmus.service import wire
from isthmus.service.http_client import HttpReply
from isthmus.service.limits import HttpProblem, SeenEnough
from isthmus.service.people import Person

SECONDS = 10.0
"""Seconds that a silo may take."""
PROBLEMS = {
    404: "the silo did not show this document to you within a day, or its owner has not allowed it",
    409: "the silo has no such request that waits",
    429: "the silo takes no more of this for the moment: try again later",
}
"""The meaning of a silo's refusals by status, in the broker's own words."""

M = TypeVar("M", bound=BaseModel)


class DocumentSilo(Protocol):
    """A silo that can be asked for documents."""

    name: str

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = "application/json",
        *,
        person: Person | None = None,
    ) -> HttpReply:
        """Send one message, with a statement of who asks if a person is given; raises SiloUnavailable."""


class ReplyReader(Protocol):
    """Reads a silo's reply; raises Refused or SiloUnavailable if it is not a success."""

    def __call__(self, reply: HttpReply, model: type[M]) -> M:
        """Return the message in the reply."""


class DocumentRouter:
    """Sends openings and requests to silos; `pseudonym` gives a person's name towards a silo."""

    def __init__(
        self,
        silos: Mapping[str, DocumentSilo],
        pseudonym: Callable[[str, str], str],
        understood: ReplyReader,
    ) -> None:
        self._silos, self._pseudonym, self._understood = silos, pseudonym, understood

    async def open(
        self, silo: str, document: str, opening: wire.Opening, person: Person
    ) -> wire.OpenedDocument:
        """Open a document: that of a hit that was shown, or one that its owner has allowed."""
        fields = opening.model_dump() | {"person": self._pseudonym(silo, person.id)}
        path = f"/documents/{quote(document, safe='/', errors='replace')}?{urlencode(fields)}"
        opened = await self._ask(silo, "GET", path, None, wire.OpenedDocument, person)
        if (opened.silo, opened.document) != (silo, document):
            raise HttpProblem(502, "the silo answered with another document")
        return opened

    async def request(self, ask: wire.AskSilo, person: Person) -> wire.DocumentRequest:
        """Send a request for a hit's document to its owner."""
        fields = ask.model_dump(include={"ticket", "query", "reason"})
        message = wire.AttributedAsk(
            **fields, person=self._pseudonym(ask.silo, person.id), name=person.id if ask.named else ""
        )
        return await self._ask(ask.silo, "POST", "/requests", message, wire.DocumentRequest, person)

    async def requests(self, person: Person | None) -> wire.RequestList:
        """Return a person's requests in all silos; for None, all requests in silos that let the broker
        manage."""

        async def one(silo: str) -> wire.RequestList | str:
            path = f"/requests?person={'' if person is None else self._pseudonym(silo, person.id)}"
            try:
                return await self._ask(silo, "GET", path, None, wire.RequestList, person)
            except HttpProblem as problem:
                return problem.detail

        replies = dict(zip(self._silos, await asyncio.gather(*map(one, self._silos)), strict=True))
        lists = {name: each for name, each in replies.items() if isinstance(each, wire.RequestList)}
        every = [
            each.model_copy(update={"silo": name}) for name, own in lists.items() for each in own.requests
        ]
        return wire.RequestList(
            requests=sorted(every, key=lambda each: each.at, reverse=True)[: wire.MOST_ROWS],
            unanswered={name: each for name, each in replies.items() if isinstance(each, str)},
        )

    async def answer(self, silo: str, number: str, answer: wire.RequestAnswer) -> wire.DocumentRequest:
        """Send an owner's answer to a request."""
        return await self._ask(silo, "POST", f"/requests/{number}", answer, wire.DocumentRequest)

    async def sources(self, silo: str) -> list[wire.SourceState]:
        """Return the state of a silo's sources; empty if it does not report them."""
        try:
            return (await self._ask(silo, "GET", "/sources", None, wire.SourceStates)).sources
        except HttpProblem:
            return []

    async def _ask(
        self,
        silo: str,
        method: str,
        path: str,
        message: BaseModel | None,
        model: type[M],
        person: Person | None = None,
    ) -> M:
        if silo not in self._silos:
            raise HttpProblem(404, f"silo: only names that there are: {', '.join(self._silos)}")
        body = b"" if message is None else message.model_dump_json().encode()
        try:
            async with asyncio.timeout(SECONDS):
                reply = await self._silos[silo].ask(method, path, body, person=person)
        except (TimeoutError, SiloUnavailable, OSError):
            raise HttpProblem(503, "the silo does not answer; try again later", Retry_After="5") from None
        if reply.status == 429 and wire.SEEN.encode() in reply.body:
            raise SeenEnough(
                429, "you have opened as much of this silo as its policy allows; its owner may allow more"
            )
        if reply.status in PROBLEMS:
            raise HttpProblem(reply.status, PROBLEMS[reply.status])
        try:
            return self._understood(reply, model)
        except Refused:
            raise HttpProblem(
                403, "the silo's policy does not allow it, or it wants to know by name who asks"
            ) from None
        except SiloUnavailable as error:
            raise HttpProblem(502, f"the silo did not do it: {error}") from None
