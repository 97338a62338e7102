"""Ask silos one question, and add their answers up or collect them one by one.

    silos = Silos.in_memory({"north": north.answer, "south": south.answer})
    silos.sum(question)                                 a vector: the asker uses the total and nothing else
    silos.collect(question, shows="how large it is")    every silo's own answer, by name

*Sums* are of vectors of one length. They are plain, where the asker is trusted with each vector; masked,
where the asker can read the total alone (`MaskedSilos`, where masks were agreed for a session and no silo
leaves; `pass_on`, which takes the steps of a `private.Summation` to silos and back, where some may leave); or
noised, where every silo has added its share of noise, and charged its own ledger, before it answers
(`private.sums`). *Collections* have each silo's own answer. They are never masked, and the asker states what
an answer shows of its silo: `shows` is in the answers and in the log.

A *carrier* takes questions to silos and brings replies until the deadline: within one process (`in_memory`),
over the nodes' HTTPS interface (`service.statistics.Nodes`), or as Flower messages
(`federation.messages.GridCarrier`). Carriers have no code for sums, and this module none for networks.
Refusals, unreadable replies and missing ones are in `Answers.failed`, by silo; with fewer answers than
`least` the question has failed (`TooFew`).

>>> silos = Silos.in_memory({"north": lambda x: np.array([x, 1]), "south": lambda x: np.array([2 * x, 1])})
>>> silos.sum(3).tolist()
[9, 2]
>>> silos.collect(3, shows="twice what it was asked").by_silo["south"].tolist()
[6, 1]
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import FederationError, IsthmusError, PrivacyError, ProtocolError
from isthmus.private import FixedPoint, Parts, Summation

logger = logging.getLogger(__name__)

T = TypeVar("T")
DEADLINE = 600.0
"""Default deadline for answers, in seconds."""


class Carrier(Protocol):
    """Yields (silo, reply) as replies come, until the deadline in seconds has passed; errors are replies too.

    Once `enough` silos have answered, it need not wait long for the others.
    """

    def __call__(
        self, questions: Mapping[Any, Any], *, deadline: float, enough: int
    ) -> Iterable[tuple[Any, Any]]: ...


@dataclass(frozen=True)
class Answers(Generic[T]):
    """The silos' answers, and the errors of silos without one."""

    by_silo: Mapping[Any, T]
    failed: Mapping[Any, Exception] = field(default_factory=dict)
    shows: str = ""
    """What each answer of a collection shows of its silo; empty for a sum, of which only the total is
    seen."""

    def reasons(self) -> dict[str, str]:
        """The reasons for failures, by silo in the order of names."""
        return {str(name): str(error) or type(error).__name__ for name, error in sorted(self.failed.items())}


class TooFew(FederationError):
    """Fewer silos have answered than a question needs; `answers` has those that did."""

    def __init__(self, message: str, answers: Answers[Any] | None = None) -> None:
        self.answers = answers or Answers({})
        super().__init__(message)


def settle(
    silos: Iterable[Any],
    replies: Iterable[tuple[Any, Any]],
    read: Callable[[Any, Any], T],
    *,
    deadline: float = DEADLINE,
    shows: str = "",
) -> Answers[T]:
    """Read replies one at a time with `read(silo, reply)`. An unusable reply fails for its silo only.

    Replies of silos that were not asked, or whose answer was read already, are ignored; an exception that is
    neither an IsthmusError nor an OSError is raised. For a collection, `shows` says what each answer shows of
    its silo.
    """
    failed: dict[Any, Exception] = dict.fromkeys(silos, TimeoutError(f"no answer within {deadline:g} s"))
    by_silo: dict[Any, T] = {}
    for silo, reply in replies:
        if silo not in failed:
            continue
        if isinstance(reply, Exception) and not isinstance(reply, (IsthmusError, OSError)):
            raise reply
        try:
            if isinstance(reply, Exception):
                raise reply
            by_silo[silo] = read(silo, reply)
            del failed[silo]
        except (IsthmusError, OSError) as error:
            failed[silo] = error
        except Exception as error:  # reading a hostile reply may raise anything
            failed[silo] = FederationError(f"sent what cannot be read ({type(error).__name__})")
    if shows:
        logger.debug("%d silos have each shown %s", len(by_silo), shows, extra={"shows": shows})
    return Answers(by_silo, failed, shows)


class Each(dict[Any, Any]):
    """Questions by silo, a different one for each."""


def _as_it_is(silo: Any, reply: Any) -> Any:
    return reply


@dataclass(frozen=True)
class Silos:
    """Silos by name, the carrier to them, and what a question needs: `least` answers, where None means
    all."""

    names: tuple[Any, ...]
    carrier: Carrier
    deadline: float = DEADLINE
    least: int | None = None
    enough: int = 0
    """Number of answers after which a carrier need not wait long for the rest; 0 means `least`."""

    @classmethod
    def in_memory(cls, answers: Mapping[str, Callable[[Any], Any]], **needs: Any) -> Silos:
        """Silos within this process, each given by the function that answers."""
        return cls(tuple(answers), _Memory(answers), **needs)

    def ask(self, question: Any, read: Callable[[Any, Any], T], *, shows: str = "") -> Answers[T]:
        """Ask all silos one question, or each its own (`Each`). Raises TooFew if fewer than `least`
        answer."""
        questions = question if isinstance(question, Each) else dict.fromkeys(self.names, question)
        least = len(self.names) if self.least is None else self.least
        replies = self.carrier(questions, deadline=self.deadline, enough=max(1, self.enough or least))
        answers = settle(questions, replies, read, deadline=self.deadline, shows=shows)
        if (answered := len(answers.by_silo)) < least:
            why = "; ".join(f"{name}: {reason}" for name, reason in answers.reasons().items())
            raise TooFew(f"{answered} silos answered, {least} are needed ({why})", answers)
        return answers

    def collect(self, question: Any, read: Callable[[Any, Any], T] = _as_it_is, *, shows: str) -> Answers[T]:
        """Collect every silo's own answer; `shows` completes the log message "silos have each shown"."""
        if not shows:
            raise PrivacyError(
                "a collection is every silo's own answer: say what it shows of a silo (shows=…)"
            )
        return self.ask(question, read, shows=shows)

    def sum(self, question: Any, read: Callable[[Any, Any], Any] = _as_it_is) -> NDArray[Any]:
        """The sum of the vectors that silos answer with, added in the order of `names`."""
        vectors = self.ask(question, read).by_silo
        if len({np.shape(vector) for vector in vectors.values()}) != 1:
            raise ProtocolError("answers of different lengths do not add up")
        first, *others = (vectors[name] for name in self.names if name in vectors)
        return sum(others, start=np.asarray(first))

    def pass_on(
        self,
        sums: Summation,
        step: str,
        silos: Iterable[str],
        write: Callable[[Parts], Any],
        read: Callable[[Any], Mapping[str, bytes]] = dict,
    ) -> Answers[None]:
        """Carry out one step of a secure sum: hand every silo its parts, and store the parts in its reply."""
        questions = Each({name: write(sums.next(step, name)) for name in silos})
        return self.ask(questions, lambda name, reply: sums.receive(step, name, read(reply)))


@dataclass(frozen=True)
class Numbered:
    """A question of a session, with its number there."""

    number: int
    question: Any


@dataclass(frozen=True)
class MaskedSilos(Silos):
    """All members of a session of masked sums (`private.MaskedMember`).

    Carriers get `Numbered` questions in ascending order. To a sum, silos answer with words: multiples of
    `FixedPoint` under their masks. The total is decoded here, and is noise unless all of them answered the
    same question. Collected answers carry no masks.
    """

    numbers: Iterator[int] = field(default_factory=count, compare=False)

    def ask(self, question: Any, read: Callable[[Any, Any], T], *, shows: str = "") -> Answers[T]:
        """Ask as `Silos` does, under the next number."""
        number = next(self.numbers)
        if isinstance(question, Each):
            numbered: Any = Each({name: Numbered(number, each) for name, each in question.items()})
        else:
            numbered = Numbered(number, question)
        return super().ask(numbered, read, shows=shows)

    def sum(self, question: Any, read: Callable[[Any, Any], Any] = _as_it_is) -> NDArray[Any]:
        """The total of the vectors that silos answer with in masked words."""
        return FixedPoint(len(self.names)).decode(super().sum(question, read))


@dataclass(frozen=True)
class _Memory:
    """A carrier within one process. Silos answer in turn; after the deadline it drops the last reply and asks
    no more."""

    silos: Mapping[str, Callable[[Any], Any]]

    def __call__(
        self, questions: Mapping[str, Any], *, deadline: float, enough: int
    ) -> Iterator[tuple[str, Any]]:
        until = time.monotonic() + deadline
        for name, question in questions.items():
            try:
                reply = self.silos[name](question)
            except IsthmusError as error:
                reply = error
            if time.monotonic() > until:
                return
            yield name, reply
