"""Silos of this process that answer questions and take part in masked sums of their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.asking import Silos
from isthmus.errors import ProtocolError
from isthmus.private import STEPS, Member, Parts, Summation, as_signed


@dataclass(frozen=True)
class Step:
    """A step of a masked sum of what silos answer to a question."""

    step: str
    session: bytes
    threshold: int
    question: Any
    parts: Parts


@dataclass
class Respondent:
    """A silo: it answers questions, and takes part in masked sums of its answers."""

    name: str
    answer: Callable[[Any], Any]
    member: Member | None = None

    def __call__(self, question: Any) -> Any:
        """The answer, or the next step of a masked sum of such answers."""
        if not isinstance(question, Step):
            return self.answer(question)
        if question.step == "agree":
            self.member = Member(self.name, question.session, question.threshold)
        if self.member is None or self.member.session != question.session:
            raise ProtocolError("this silo takes no part in that session")
        vector = self.answer(question.question) if question.step == "mask" else ()
        return self.member.step(question.step, question.parts, vector=vector)


def respondents(answers: Mapping[str, Callable[[Any], Any]], **needs: Any) -> Silos:
    """Silos by name, each the function that answers, which can take part in masked sums."""
    return Silos.in_memory({name: Respondent(name, each) for name, each in answers.items()}, **needs)


def masked_sum(
    silos: Silos, question: Any, size: int, *, session: bytes, threshold: int
) -> NDArray[np.int64]:
    """The total of vectors of so many integers, of which the asker can open none."""
    sums, names = Summation(session, threshold, size), silos.names
    asker = replace(silos, least=threshold)
    for step in STEPS:
        write = partial(Step, step, session, threshold, question)
        names = tuple(asker.pass_on(sums, step, names, write).by_silo)
    return as_signed(sums.total())
