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
from typing import Any, TypeVar

import numpy as np

from isthmus.errors import FederationError, PrivacyError, RoundFailed
from isthmus.federation import members as silo
from isthmus.federation.answers import Checked, Limits, check_alive, check_reports, sorted_out, update_length
from isthmus.federation.flower import ConfigRecord, Grid, Message, MessageType, RecordDict
from isthmus.federation.messages import Arrays, ask, order
from isthmus.federation.settings import LEAST, Rounds
from isthmus.private.secure_sum import Advert, FixedPoint, Revealed, Words, least_threshold, total

T = TypeVar("T")
SUM = "the sum"
"""Who is to blame where nobody can be."""
IN_SUM = " (its model is in the sum)"


class TooFew(FederationError):
    """Fewer silos than the threshold are left."""


@dataclass
class Attempt:
    """One session: who is in it, and why others are not any more."""

    number: int
    silos: Mapping[int, str]
    threshold: int
    session: bytes
    trained: bytes = b""
    """The digest of the order to train."""
    adverts: list[Advert] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)

    def name(self, reply: Message) -> str:
        """The silo that a reply came from."""
        return self.silos[reply.metadata.src_node_id]

    def nodes(self, names: Iterable[str]) -> dict[int, str]:
        """The nodes of these silos."""
        wanted = set(names)
        return {node: name for node, name in self.silos.items() if name in wanted}


class Relay:
    """Runs secure sums over a grid: `begin`, `agree`, `reports`, and with everybody's weight `total`."""

    def __init__(
        self,
        grid: Grid,
        rounds: Rounds,
        *,
        told: Mapping[str, Any],
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.grid, self.rounds, self.told = grid, rounds, told
        self._entropy = entropy
        self.threshold, self.cure = LEAST, ""
        self.identified = False
        """Whether silos have signed their keys, so that they know each other; simulated ones do not."""

    def begin(self, number: int, silos: Mapping[int, str]) -> Attempt:
        """A session of these silos, by node."""
        self.threshold = max(LEAST, self.rounds.minimum, least_threshold(len(silos)))
        self.cure = _cure(len(silos), self.threshold)
        return Attempt(number, silos, self.threshold, self._entropy(16))

    def agree(self, attempt: Attempt) -> None:
        """Step 1: the keys of everybody who is there."""
        told = {silo.SESSION: attempt.session.hex(), silo.THRESHOLD: attempt.threshold}
        content = order(None, told, round=attempt.number)

        def read(reply: Message, name: str) -> Advert:
            (advert,) = silo.adverts_of(reply.content.config_records[silo.ADVERTS])
            if advert.name != name or not advert.sealing_key:
                raise FederationError("sent keys in another's name")
            return advert

        found = self._ask(attempt, silo.AGREE, dict.fromkeys(attempt.silos, content), read)
        self.identified = all(advert.signature for advert in found.values())
        attempt.adverts = [found[name] for name in sorted(found)]

    def reports(self, attempt: Attempt, orders: Sequence[Message], limits: Limits) -> Checked:
        """Step 2: they train, and tell of themselves."""
        there = {advert.name for advert in attempt.adverts}
        sent = []
        for message in orders:
            if attempt.silos[message.metadata.dst_node_id] in there:
                message.content[silo.SECURE] = ConfigRecord({silo.SESSION: attempt.session})
                message.content[silo.ADVERTS] = silo.adverts_record(attempt.adverts)
                attempt.trained = silo.digest(message.content)  # the same for all of them
                sent.append(message)
        deadline = self.rounds.deadline
        replies = ask(self.grid, sent, rounds=self.rounds, enough=attempt.threshold)

        def complete(reply: Message) -> None:
            if _boxes(reply).keys() != there - {attempt.name(reply)}:
                raise FederationError("did not share its secrets with everybody")

        checked = check_reports(replies, attempt.nodes(there), limits, complete, deadline=deadline)
        attempt.rejected.update(checked.rejected)
        self._check_enough(attempt, len(checked.usable))
        return checked

    def total(
        self, attempt: Attempt, reports: Checked, weights: Mapping[str, float], model: Arrays
    ) -> tuple[np.ndarray[Any, Any], set[str]]:
        """Steps 3 to 5: the sum over those who sent their part of it, and who did not."""
        boxes = {attempt.name(reply): _boxes(reply) for reply in reports.usable}
        weights = {name: weights[name] for name in sorted(boxes)}
        masked = self._masked(attempt, weights, boxes, _size(model))
        self._check_hiding({name: weights[name] for name in masked})
        signatures = self._confirmed(attempt, sorted(masked))
        revealed = self._revealed(attempt, masked, weights, signatures)
        try:
            words = total(
                masked,
                attempt.adverts,
                revealed,
                session=attempt.session,
                threshold=attempt.threshold,
                shared=list(boxes),
                terms=silo.terms(weights, attempt.trained),
            )
        except PrivacyError as error:
            raise RoundFailed(attempt.number, {SUM: str(error)}, attempt.threshold) from error
        return FixedPoint(len(weights)).decode(words), boxes.keys() - masked.keys()

    def _masked(
        self,
        attempt: Attempt,
        weights: Mapping[str, float],
        boxes: Mapping[str, Mapping[str, bytes]],
        size: int,
    ) -> dict[str, Words]:
        told = {silo.SESSION: attempt.session.hex(), "weights": dict(weights), **self.told}
        contents = {}
        for node, name in attempt.nodes(boxes).items():
            contents[node] = order(None, told, round=attempt.number)
            contents[node][silo.BOXES] = ConfigRecord(
                {peer: boxes[peer][name] for peer in boxes if peer != name}
            )
        return self._ask(attempt, silo.MASK, contents, lambda reply, _: silo.vector_of(reply, size))

    def _confirmed(self, attempt: Attempt, answered: Sequence[str]) -> dict[str, bytes]:
        """Everybody's signature over who answered; those who are late now are in the sum all the same."""
        settings = {silo.SESSION: attempt.session.hex(), "answered": list(answered)}
        content = order(None, settings, round=attempt.number)
        contents = dict.fromkeys(attempt.nodes(answered), content)
        return self._ask(
            attempt, silo.CONFIRM, contents, lambda reply, name: silo.signatures_of(reply)[name], late=IN_SUM
        )

    def _revealed(
        self,
        attempt: Attempt,
        masked: Mapping[str, Words],
        weights: Mapping[str, float],
        signatures: Mapping[str, bytes],
    ) -> dict[str, Revealed]:
        content = order(None, {silo.SESSION: attempt.session.hex()}, round=attempt.number)
        content[silo.SIGNATURES] = ConfigRecord(dict(signatures))
        gone = weights.keys() - masked.keys()

        def read(reply: Message, name: str) -> Revealed:
            records = reply.content.config_records
            seeds, keys = (
                {str(peer): bytes(share) for peer, share in records[part].items()}  # type: ignore[arg-type]
                for part in (silo.SEEDS, silo.KEYS)
            )
            if seeds.keys() != masked.keys() or keys.keys() != gone:
                raise FederationError("revealed other shares than it was asked for")
            return Revealed(seeds, keys)

        contents = dict.fromkeys(attempt.nodes(signatures), content)
        return self._ask(attempt, silo.REVEAL, contents, read, late=IN_SUM)

    def _ask(
        self,
        attempt: Attempt,
        step: str,
        contents: Mapping[int, RecordDict],
        read: Callable[[Message, str], T],
        *,
        late: str = "",
    ) -> dict[str, T]:
        """What silos answer to a step, if enough of them do."""
        kind = f"{MessageType.QUERY}.{step}"
        messages = [Message(content, node, kind) for node, content in contents.items()]
        deadline = self.rounds.deadline

        def alive(reply: Message, name: str) -> T:
            check_alive(reply)
            return read(reply, name)

        replies = ask(self.grid, messages, rounds=self.rounds, enough=attempt.threshold)
        asked = {node: attempt.silos[node] for node in contents}
        found, rejected = sorted_out(replies, asked, alive, deadline=deadline)
        attempt.rejected.update({name: f"{why} at the step {step!r}{late}" for name, why in rejected.items()})
        self._check_enough(attempt, len(found))
        return found

    def _check_enough(self, attempt: Attempt, left: int) -> None:
        if left < attempt.threshold:
            raise TooFew(f"{left} silos were left of the {attempt.threshold} that the secure sum needs")

    def _check_hiding(self, weights: Mapping[str, float]) -> None:
        """Give up before silos have to: they would not sign for such a sum."""
        if not silo.is_hiding(weights):
            raise TooFew(f"too few of the {len(weights)} silos that are left weigh enough to hide each other")

    def check_credible(self, attempt: Attempt, mean: Arrays, model: Arrays, limits: Limits) -> None:
        """Refuse a mean that moved out of all proportion: single updates cannot be looked at."""
        moved = update_length(mean, model)
        whole = update_length(model, {name: np.zeros_like(array) for name, array in model.items()})
        if not moved <= limits.norm * max(1.0, whole, limits.noise):
            blamed = f"opened to an update of length {moved:.3g}, and whose it was cannot be told"
            raise RoundFailed(attempt.number, {SUM: blamed}, attempt.threshold)


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


def _boxes(reply: Message) -> dict[str, bytes]:
    record = reply.content.config_records[silo.BOXES]
    return {str(name): bytes(box) for name, box in record.items()}  # type: ignore[arg-type]


def _size(model: Arrays) -> int:
    return sum(array.size for array in model.values())
