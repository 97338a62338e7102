"""Joint learning of a broker's silos: the broker asks questions, opens totals of all silos, and gets a model.

    judged queries   those of silos with enough of them; sent to all silos as any search is
    a session        silos agree on masks, by their cards; the broker only carries their keys
    questions        those of `learning.learn`, one round trip each; sums are opened as totals of all members

A session needs all its members: a silo that does not answer is left out, and a new session begins without
it, as long as three silos are left that have something to add. With fewer, each calibrates the baseline by
itself, and nothing of that leaves; unless two are left whose owners both agree to sums of two.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from isthmus.asking import MaskedSilos, Numbered, Silos, TooFew
from isthmus.errors import DataError, ProtocolError, Refused, SiloUnavailable, plain, several
from isthmus.learning import SearchModel, answer_of
from isthmus.private import LEAST_MEMBERS
from isthmus.service import wire
from isthmus.service.broker import failure_of, understood
from isthmus.service.http_client import HttpReply
from isthmus.service.scale import baseline_of
from isthmus.service.statistics import Nodes, Request, Talks

if TYPE_CHECKING:
    from isthmus.learning import BaselineScale, Record

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

PATIENCE = 300.0
"""Seconds that silos have for one answer, since rows of many queries take time."""
JSON = "application/json"
NO_CONSENT = (
    'two silos learn together if both owners write consent = "two" under [learning]; this one has not'
)
_JUDGED = "which queries somebody judged hits of, and into how many folds they may be dealt"
_KEY = "its key for the masks of a session"


@dataclass
class JointLearning:
    """One learning run over some silos. `left_out` has the reason for every silo that took no part."""

    silos: Sequence[Talks]
    mode: wire.Mode = "masked"
    baseline: BaselineScale = field(default_factory=lambda: baseline_of(None))
    tell: Callable[[str], None] = lambda stage: None
    left_out: dict[str, str] = field(default_factory=dict)

    async def learn(self) -> tuple[SearchModel, Record] | None:
        """Run to the end. Returns the model and a record of what was done; None if each silo has calibrated
        the baseline by itself.

        Raises a DataError if there is too little to learn from, SiloUnavailable if silos cannot take part.
        """
        self.tell("asking which queries were judged")
        judged = await self._each("GET", "/learning", partial(understood, model=wire.Judged), shows=_JUDGED)
        own = [name for name, each in judged.items() if each.alone and each.folds]
        if own:
            await self._alone(own)
        while True:
            members = {
                name: each for name, each in judged.items() if not each.alone and name not in self.left_out
            }
            adding = [name for name, each in members.items() if each.folds]
            if own and not adding:
                return None
            if not members:
                raise SiloUnavailable(f"the silos cannot learn together{self._why()}")
            if not adding:
                raise DataError(
                    "no silo has judged queries enough to take part" + self._why(),
                    cure="judge hits of more queries: each half of a silo's has learning.least_queries (10)",
                )
            agreed = [name for name in adding if members[name].consent == "two"]
            if len(adding) < LEAST_MEMBERS and len(agreed) < 2:
                if agreed and len(adding) == 2:
                    self.left_out |= {name: NO_CONSENT for name in adding if name not in agreed}
                await self._alone(adding)
                return None
            try:
                return await self._attempt(members)
            except TooFew as few:
                self._leave_out(few)

    def _leave_out(self, few: TooFew) -> None:
        """Go on without the silos that did not answer."""
        reasons = few.answers.reasons()
        if not reasons:
            raise few
        self.left_out |= reasons
        self.tell(f"begins again without {', '.join(reasons)}")

    async def _attempt(self, judged: Mapping[str, wire.Judged]) -> tuple[SearchModel, Record]:
        """Run one session with these silos."""
        from isthmus.learning import LearningOptions, learn

        session = secrets.token_hex(16)
        members = [silo for silo in self.silos if silo.name in judged]
        request = wire.LearningSession(session=session, mode=self.mode, encoder=self.baseline.encoder)
        self.tell(f"agreeing on masks between {several(len(members), 'silo')}")
        keys = await self._all(members, request)
        adverts = {name: key.advert for name, key in keys.items()}
        await self._all(members, request.model_copy(update={"adverts": adverts}))
        queries = sorted({query for each in judged.values() for query in each.queries})
        folds = min(each.folds for each in judged.values() if each.folds)

        def write(numbered: Numbered) -> Request:
            path, body = f"/learning/{session}/{numbered.number}", numbered.question.to_bytes()
            return lambda silo: silo.ask("POST", path, body, wire.BUNDLE_TYPE)

        nodes = Nodes(members, write=write, read=_accepted)
        silos = _Answers(tuple(silo.name for silo in members), nodes, PATIENCE)
        mode = "fedrisk" if self.mode == "fedrisk" else "sums"
        least = max(each.least for each in judged.values() if each.folds)
        options = LearningOptions(mode=mode, least_queries=least)
        return await asyncio.to_thread(
            learn, silos, queries, folds=folds, baseline=self.baseline, options=options, report=self.tell
        )

    async def _all(
        self, members: Sequence[Talks], request: wire.LearningSession
    ) -> Mapping[str, wire.LearningKey]:
        """Send the same message to all members. Raises TooFew, which names those that do not accept it."""
        body = request.model_dump_json().encode()
        nodes = Nodes(members, read=lambda reply: understood(_accepted(reply), wire.LearningKey))
        silos = Silos(tuple(silo.name for silo in members), nodes, PATIENCE)
        ask = partial(
            silos.collect, lambda silo: silo.ask("POST", "/learning/session", body, JSON), shows=_KEY
        )
        return (await asyncio.to_thread(ask)).by_silo

    async def _each(
        self,
        method: str,
        path: str,
        read: Callable[[HttpReply], T],
        *,
        shows: str,
        only: Collection[str] = (),
    ) -> Mapping[str, T]:
        """Send a request to silos. Returns their answers by silo; those that do not answer are left out of
        the run."""
        names = tuple(silo.name for silo in self.silos if not only or silo.name in only)
        silos = Silos(names, Nodes(self.silos, read=lambda reply: read(_accepted(reply))), PATIENCE, least=0)
        ask = partial(silos.collect, lambda silo: silo.ask(method, path), shows=shows)
        answers = await asyncio.to_thread(ask)
        self.left_out |= answers.reasons()
        return answers.by_silo

    async def _alone(self, adding: Sequence[str]) -> None:
        """Let every silo calibrate by itself; raises a DataError if none could."""
        self.tell(f"{several(len(adding), 'silo')} with judged queries: each calibrates by itself")
        done = await self._each("POST", "/learning/own", lambda reply: True, shows="that it has", only=adding)
        if not done:
            raise DataError(
                f"{several(len(adding), 'silo')} with judged queries enough" + self._why(),
                cure=f"learning together takes {LEAST_MEMBERS}",
            )

    def _why(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(self.left_out.items()))
        return f" ({reasons})" if reasons else ""


@dataclass(frozen=True)
class _Answers(MaskedSilos):
    """Masked silos over HTTP: sums are read as 64-bit words, collected answers as numbers."""

    def sum(self, question: Any, read: Callable[[Any, Any], Any] = lambda silo, reply: None) -> Any:
        return super().sum(question, lambda silo, reply: _words(reply))

    def collect(
        self, question: Any, read: Callable[[Any, Any], Any] = lambda silo, answer: answer, *, shows: str
    ) -> Any:
        return super().collect(question, lambda silo, reply: read(silo, answer_of(reply.body)), shows=shows)


def _words(reply: HttpReply) -> Any:
    if len(reply.body) % 8:
        raise ProtocolError("an answer that is no vector of words")
    return np.frombuffer(reply.body, dtype="<u8").astype(np.uint64)


def _accepted(reply: HttpReply) -> HttpReply:
    """Return a successful reply, else raise. The reason of most refusals is quoted from the silo, shortened
    to plain text."""
    if reply.status in (200, 204):
        return reply
    try:
        detail = wire.Problem.model_validate_json(reply.body).detail
    except ValidationError:
        detail = ""
    if reply.status == 403:
        raise Refused("its policy has no learning for this broker (learning = true in its silo.toml)")
    if detail and reply.status in (400, 409, 429, 503):
        kind = SiloUnavailable if reply.status == 503 else Refused
        raise kind(plain(detail[:500]))
    raise failure_of(reply)
