"""The coordinator's side of a secure round: it passes keys and boxes on, weighs reports, and opens one sum.

Silos may drop out at every step as long as `threshold` of them are left; else the attempt has failed, before
anything could be opened, and is safe to repeat with other silos. A sum that has been opened and is not
credible ends the round: who spoiled it cannot be told, and another sum over almost the same models could be
compared with it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from isthmus.asking import Answers, Silos, TooFew
from isthmus.errors import PrivacyError, RoundFailed
from isthmus.federation import members as silo
from isthmus.federation.answers import Checked, GridCarrier, ReplyLimits, check, update_length
from isthmus.federation.flower import ConfigRecord, Grid, Message, MessageType, RecordDict
from isthmus.federation.messages import Arrays, ask, order
from isthmus.federation.settings import LEAST, Rounds
from isthmus.private import FixedPoint, Parts, Summation, least_threshold

SUM = "the sum"
"""Who is to blame where nobody can be."""
IN_SUM = " (its model is in the sum)"


@dataclass
class Attempt:
    """One session: who is in it, and why others are not any more."""

    number: int
    silos: Mapping[int, str]
    sums: Summation
    trained: bytes = b""
    """The digest of the order to train."""
    rejected: dict[str, str] = field(default_factory=dict)


class SecureSumRelay:
    """Runs secure sums over a grid: `begin`, `agree`, `reports`, and with everybody's weight `total`."""

    def __init__(
        self,
        grid: Grid,
        rounds: Rounds,
        *,
        settings: Mapping[str, Any],
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.grid, self.rounds, self.settings = grid, rounds, settings
        self._entropy = entropy
        self.threshold, self.cure = LEAST, ""
        self.identified = False
        """Whether silos have signed their keys, so that they know each other; simulated ones do not."""

    def begin(self, number: int, silos: Mapping[int, str], model: Arrays) -> Attempt:
        """A session of these silos, by node, over models like this one."""
        self.threshold = max(LEAST, self.rounds.minimum, least_threshold(len(silos)))
        self.cure = _cure(len(silos), self.threshold)
        size = sum(array.size for array in model.values())
        return Attempt(number, silos, Summation(self._entropy(16), self.threshold, size))

    def agree(self, attempt: Attempt) -> None:
        """Step 1: the keys of everybody who is there."""
        self._step(attempt, silo.AGREE, attempt.silos.values(), {silo.THRESHOLD: self.threshold})
        self.identified = all(advert.signature for advert in attempt.sums.adverts.values())

    def reports(self, attempt: Attempt, orders: Sequence[Message], limits: ReplyLimits) -> Checked:
        """Step 2: they train, tell of themselves, and share their secrets with each other."""
        sums = attempt.sums
        sent = list[Message]()
        for each in orders:
            if attempt.silos[each.metadata.dst_node_id] not in sums.adverts:
                continue
            session = ConfigRecord({silo.SESSION: sums.session})
            parts = ConfigRecord(dict(sums.next("share", "")))
            content = RecordDict({**each.content, silo.SECURE: session, silo.PARTS: parts})
            attempt.trained = silo.digest(content)  # the same for all of them
            sent.append(Message(content, each.metadata.dst_node_id, each.metadata.message_type))
        replies = ask(self.grid, sent, rounds=self.rounds, enough=self.threshold)
        there = {node: name for node, name in attempt.silos.items() if name in sums.adverts}

        def complete(name: str, reply: Message) -> None:
            sums.receive("share", name, silo.parts_of(reply))

        shows = "how many examples it trained on, its loss and the errors that it reports, not its model"
        deadline = self.rounds.deadline
        checked = check(replies, there, limits, deadline=deadline, shows=shows, complete=complete)
        attempt.rejected.update(checked.rejected)
        if len(checked.usable) < self.threshold:
            raise TooFew(f"{len(checked.usable)} silos were left of the {self.threshold} that the sum needs")
        return checked

    def total(self, attempt: Attempt, weights: Mapping[str, float]) -> tuple[np.ndarray[Any, Any], set[str]]:
        """Steps 3 to 5: the sum over those who sent their part of it, and who did not."""
        sums = attempt.sums
        weights = {name: weights[name] for name in sorted(sums.boxes)}
        self._step(attempt, silo.MASK, weights, {"weights": weights, **self.settings})
        if not silo.is_hiding({name: weights[name] for name in sums.masked}):
            # give up before silos have to: they would not sign for such a sum
            raise TooFew(f"too few of the {len(sums.masked)} silos left weigh enough to hide each other")
        self._step(attempt, silo.CONFIRM, sorted(sums.masked), late=IN_SUM)
        self._step(attempt, silo.REVEAL, sorted(sums.signatures), late=IN_SUM)
        try:
            words = sums.total(silo.terms(weights, attempt.trained))
        except PrivacyError as error:
            raise RoundFailed(attempt.number, {SUM: str(error)}, self.threshold) from error
        return FixedPoint(len(weights)).decode(words), sums.boxes.keys() - sums.masked.keys()

    def _step(
        self,
        attempt: Attempt,
        step: str,
        silos: Iterable[str],
        settings: Mapping[str, Any] = MappingProxyType({}),
        *,
        late: str = "",
    ) -> None:
        """One step of the sum; `late` is what holds of silos that are lost in it."""
        config = {silo.SESSION: attempt.sums.session.hex(), **settings}

        def written(parts: Parts) -> RecordDict:
            content = order(None, config, round=attempt.number)
            content[silo.PARTS] = ConfigRecord(dict(parts))
            return content

        nodes = {name: node for node, name in attempt.silos.items()}
        carrier = GridCarrier(self.grid, f"{MessageType.QUERY}.{step}", nodes, self.rounds)
        asker = Silos(tuple(nodes), carrier, self.rounds.deadline, self.threshold)
        answers: Answers[None] = Answers({})
        try:
            answers = asker.pass_on(attempt.sums, step, silos, written, silo.parts_of)
        except TooFew as few:
            answers = few.answers
            raise
        finally:
            lost = answers.reasons().items()
            attempt.rejected |= {name: f"{why} at the step {step!r}{late}" for name, why in lost}

    def check_credible(self, attempt: Attempt, mean: Arrays, model: Arrays, limits: ReplyLimits) -> None:
        """Refuse a mean that moved out of all proportion: single updates cannot be looked at."""
        moved = update_length(mean, model)
        whole = update_length(model, {name: np.zeros_like(array) for name, array in model.items()})
        if not moved <= limits.norm * max(1.0, whole, limits.noise):
            blamed = f"opened to an update of length {moved:.3g}, and whose it was cannot be told"
            raise RoundFailed(attempt.number, {SUM: blamed}, self.threshold)


def even(weights: Mapping[str, float], silos: Iterable[str]) -> dict[str, float]:
    """The silos' weights with three substantial ones and none above half of their sum, which stays.

    The second and the third are lifted to their least share of the heaviest, at the cost of all; what a
    silo then has above half goes to the others in proportion.
    """
    own = {name: weights[name] for name in silos}
    whole = math.fsum(own.values())
    first, *others = sorted(own, key=lambda name: (-own[name], name))
    lifted = own | {name: max(own[name], silo.SUBSTANTIAL * own[first]) for name in others[: LEAST - 1]}
    if lifted != own:
        share = whole / math.fsum(lifted.values())
        own = {name: weight * share for name, weight in lifted.items()}
    if own[first] <= silo.LARGEST_SHARE * whole:
        return own
    share = (1 - silo.LARGEST_SHARE) * whole / (whole - own[first])
    return {name: own[name] * share for name in own} | {first: silo.LARGEST_SHARE * whole}


def _cure(silos: int, threshold: int) -> str:
    spare = max(0, silos - threshold)
    return (
        f"a secure sum of {silos} silos needs {threshold} of them to its end, so {spare or 'none'} may drop"
        " out: ask more silos a round (rounds.silos)"
    )


def sum_to_mean(
    summed: np.ndarray[Any, Any], weights: Mapping[str, float], own: Mapping[str, Arrays], model: Arrays
) -> Arrays:
    """The sum and the server's own candidates, over the weights that are in it."""
    whole = summed + sum(weights[name] * silo.flat(arrays) for name, arrays in own.items())
    return silo.shaped(whole / math.fsum(weights.values()), model)
