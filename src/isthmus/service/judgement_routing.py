"""Routes judgements between the broker's callers and the silos that have the documents. The broker stores
nothing.

A judgement names its document by id. If it names no silo, every silo is sent digests of the ids under a
random key, so that a silo learns only of documents that it has; then each judgement goes to the one silo
that has its document.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from pydantic import BaseModel

from isthmus.errors import Refused, SiloUnavailable
from isthmus.service import wire
from isthmus.service.limits import HttpProblem
from isthmus.service.query_language import judged_query
from isthmus.service.security import id_digest

SECONDS = 30.0
"""Seconds that a silo may take for a batch of judgements."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Correspondent(Protocol):
    """A silo that answers messages; raises SiloUnavailable or Refused."""

    name: str

    async def send(self, path: str, message: BaseModel, model: type[M]) -> M:
        """POST a message and return the reply."""

    async def read(self, path: str, model: type[M]) -> M:
        """GET a path and return the reply."""


class JudgementRouter:
    """Sends judgements to silos and fetches them; `pseudonym` gives a person's name towards a silo."""

    def __init__(self, silos: Mapping[str, Correspondent], pseudonym: Callable[[str, str], str]) -> None:
        self._silos, self._pseudonym = silos, pseudonym

    async def place(self, batch: Sequence[wire.NamedJudgement], person: str) -> wire.Imported:
        """Send every judgement to the silo that has its document, under the person's pseudonym there."""
        for each in batch:
            if each.silo is not None:
                self._named(each.silo)
        present, unanswered = await self._present(batch)
        unknown: list[int] = []
        unplaced: list[int] = []
        ambiguous: dict[int, list[str]] = {}
        parts: dict[str, list[tuple[int, wire.NamedJudgement]]] = {}
        for at, each in enumerate(batch):
            homes = [(silo, name) for silo, name in self._readings(each) if name in present.get(silo, ())]
            if len(homes) == 1:
                silo, name = homes[0]
                parts.setdefault(silo, []).append((at, each.model_copy(update={"document": name})))
            elif homes:
                ambiguous[at] = [silo for silo, _ in homes]
            else:
                (unplaced if unanswered else unknown).append(at)
        replies, failures = await _all(
            {silo: self._send(silo, [each for _, each in part], person) for silo, part in parts.items()}
        )
        for silo in failures:
            unplaced += [at for at, _ in parts[silo]]
        for silo, reply in replies.items():
            unknown += [parts[silo][at][0] for at in reply.unknown if at < len(parts[silo])]
        return wire.Imported(
            added=sum(reply.added for reply in replies.values()),
            changed=sum(reply.changed for reply in replies.values()),
            unchanged=sum(reply.unchanged for reply in replies.values()),
            unknown=sorted(unknown),
            ambiguous=ambiguous,
            unplaced=sorted(unplaced),
            unanswered=unanswered | failures,
        )

    def _readings(self, each: wire.NamedJudgement) -> list[tuple[str, str]]:
        """Return the silos and ids that a judgement may mean: `north/a.md` is also a.md in the silo north."""
        if each.silo is not None:
            return [(each.silo, each.document)]
        readings = [(silo, each.document) for silo in self._silos]
        silo, slash, rest = each.document.partition("/")
        return [*readings, (silo, rest)] if slash and rest and silo in self._silos else readings

    async def _present(
        self, batch: Sequence[wire.NamedJudgement]
    ) -> tuple[dict[str, set[str]], dict[str, str]]:
        """Return the names in the batch that each silo has, and why other silos did not answer. A silo that a
        judgement names is taken to have its document, and is not asked."""
        present: dict[str, set[str]] = {}
        wanted: dict[str, dict[str, None]] = {}
        for each in batch:
            for silo, name in self._readings(each):
                if each.silo is not None:
                    present.setdefault(silo, set()).add(name)
                else:
                    wanted.setdefault(silo, {})[name] = None
        key = secrets.token_bytes(16)
        questions = {silo: self._find(silo, list(names), key) for silo, names in wanted.items()}
        replies, failures = await _all(questions)
        for silo, reply in replies.items():
            names = list(wanted[silo])
            present.setdefault(silo, set()).update(names[at] for at in reply.present if at < len(names))
        return present, failures

    async def _find(self, silo: str, names: Sequence[str], key: bytes) -> wire.PresentDocuments:
        question = wire.DocumentDigests(key=key.hex(), digests=[id_digest(name, key) for name in names])
        return await self._silos[silo].send("/judgements/places", question, wire.PresentDocuments)

    async def _send(self, silo: str, part: list[wire.NamedJudgement], person: str) -> wire.Imported:
        message = wire.AttributedBatch(judgements=part, person=self._pseudonym(silo, person))
        return await self._silos[silo].send("/judgements", message, wire.Imported)

    async def page(self, silo: str, after: str) -> wire.JudgementPage:
        """Return a page of the judgements that one silo received through this broker."""
        path = f"/judgements?after={after}"
        replies, failures = await _all({silo: self._named(silo).read(path, wire.JudgementPage)})
        if failures:
            raise HttpProblem(503, f"{silo}: {failures[silo]}", Retry_After="5")
        judgements = [each.model_copy(update={"silo": silo}) for each in replies[silo].judgements]
        return wire.JudgementPage(judgements=judgements, next=replies[silo].next)

    async def own(self, request: wire.ShownHits, person: str) -> wire.OwnJudgements:
        """Return a person's judgements of hits; no silo learns who asks."""
        tokens: dict[str, list[str]] = {}
        for hit in request.hits:
            self._named(hit.silo)
            tokens.setdefault(hit.silo, []).append(hit.token)
        questions = {
            silo: self._silos[silo].send(
                "/judged", wire.ShownTokens(query=judged_query(request.query), tokens=sent), wire.Verdicts
            )
            for silo, sent in tokens.items()
        }
        replies, _ = await _all(questions)
        verdicts: dict[tuple[str, str], bool | None] = {}
        for silo, reply in replies.items():
            own = self._pseudonym(silo, person)
            for token, people in zip(tokens[silo], reply.verdicts, strict=False):
                verdicts[silo, token] = people.get(own)
        return wire.OwnJudgements(relevant=[verdicts.get((hit.silo, hit.token)) for hit in request.hits])

    def _named(self, name: str) -> Correspondent:
        if name not in self._silos:
            raise HttpProblem(404, f"silo: only names that there are: {', '.join(self._silos)}")
        return self._silos[name]


async def _all(questions: Mapping[str, Awaitable[T]]) -> tuple[dict[str, T], dict[str, str]]:
    """Return, by silo, the answers within `SECONDS`, and the reasons of silos that did not answer."""

    async def one(question: Awaitable[T]) -> T | str:
        try:
            async with asyncio.timeout(SECONDS):
                return await question
        except TimeoutError:
            return f"no answer within {SECONDS:g} s"
        except (Refused, SiloUnavailable, OSError) as error:
            return str(error)

    answers = list(zip(questions, await asyncio.gather(*map(one, questions.values())), strict=True))
    failures = {silo: answer for silo, answer in answers if isinstance(answer, str)}
    return {silo: answer for silo, answer in answers if not isinstance(answer, str)}, failures
