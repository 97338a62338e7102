"""The secure sum of document frequencies and collection counts, step by step and as bytes.

A silo's part (`Summing`) and the relay's (`Adding`) exchange named bytes, `FIELD/SILO`: a secure sum a field.

    agree     silo: its signed public keys                          relay: hands all of them to all
    share     silo: a box for every silo, with shares of its keys   relay: hands each box to its receiver
    mask      silo: adds its share of noise, masks                  relay: says who has answered
    confirm   silo: signs the list of those who have                relay: hands all signatures to all
    reveal    silo: charges, then gives what takes the masks away   relay: the noisy total, to all
    finish    silo: keeps the total

The relay sees no silo's cells. What it could do is hand wrong things on: keys and lists are signed by
identities that silos know from each other's cards, boxes open for their receiver only, and the rest is a
ProtocolError. All silos must stay to the end, so a masked vector is noise until its own silo gives its
shares: that is when a release is charged, and a session that ends before costs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from isthmus.errors import ProtocolError
from isthmus.private.cost import Cost, Covered, no_charge
from isthmus.private.keyring import Keyring
from isthmus.private.noise import Entropy
from isthmus.private.secure_sum import STEPS, Member, Parts, Summation, Words, joined
from isthmus.private.sums import SumPlan
from isthmus.private.totals import hashed
from isthmus.retrieval import Statistics
from isthmus.tables.files import replacing
from isthmus.tables.ids import IntArray
from isthmus.text import Tokens

TURNS = len(STEPS) + 1
"""Turns of a relay that a sum takes: its steps, and one to hand out the totals."""


@dataclass(frozen=True)
class Agreed:
    """What all silos of a sum know beforehand: the session, who takes part, how wide the sketches are."""

    session: bytes
    silos: tuple[str, ...]
    count: int
    width: int
    colluding: int = 1

    @property
    def threshold(self) -> int:
        """How many silos must stay to the end: all."""
        return self.count

    @property
    def terms(self) -> bytes:
        """What masks and signatures are bound to."""
        numbers = (self.count, self.width, self.colluding)
        return joined([*(name.encode() for name in self.silos), *(n.to_bytes(8, "little") for n in numbers)])

    def of_field(self, name: str) -> bytes:
        """The session of one field's sum."""
        return self.session + name.encode()


@dataclass(frozen=True, eq=False)
class Contribution:
    """What a silo adds up of one field: the words of its documents, their versions, and at which ε."""

    words: Tokens
    covered: Covered
    epsilon_df: float = 0.5
    epsilon_cf: float = 0.5
    entropy: Entropy = os.urandom


Contributions = Mapping[str, Contribution]
"""By field."""


class Summing:
    """A silo's part in the sums of all fields; between steps it is in a folder."""

    def __init__(self, agreed: Agreed, keys: Keyring, folder: Path) -> None:
        self.agreed, self.folder = agreed, folder
        self.identity, self.group = keys.identity(), keys.group_key()
        trusted = {**keys.trusted(), self.identity.name: self.identity.card}
        self.trusted = {
            name: Ed25519PublicKey.from_public_bytes(card.verifying) for name, card in trusted.items()
        }

    def step(self, number: int, incoming: Mapping[str, bytes], adding: Contributions) -> Parts:
        """A step but the last: of all fields at first, later of those that the relay hands something for."""
        parts: Parts = {}
        for name, handed in (_by_field(incoming) if number else {name: {} for name in adding}).items():
            member = self._member(name) if number else self._begun(name)
            vector = self._vector(name, member, adding) if STEPS[number] == "mask" else ()
            told = member.step(STEPS[number], handed, vector=vector, terms=self.agreed.terms)
            self._keep(name, member)
            parts |= _of_field(name, told)
        return parts

    def _begun(self, name: str) -> Member:
        if self._file(name).exists() or self._total(name).exists():
            raise ProtocolError("a sum that was begun before")
        session, identity = self.agreed.of_field(name), self.identity
        return Member(identity.name, session, self.agreed.threshold, identity.signing, self.trusted)

    def _vector(self, name: str, member: Member, adding: Contributions) -> IntArray:
        """The cells of this silo with its share of noise."""
        if name not in adding:
            raise ProtocolError("a sum of a field that this silo does not have")
        plan = self._plan(name, adding[name])
        if member.peers != set(plan.silos) or member.threshold != plan.threshold:
            raise ProtocolError("a sum of other silos than those that have begun it")  # or less noise
        own, sums = adding[name], hashed(Statistics.of(adding[name].words), plan.family)
        return plan.contribute(self.identity.name, sums, own.covered, charge=no_charge, entropy=own.entropy)

    def charges(self, name: str, adding: Contribution) -> list[tuple[Cost, Covered, str]]:
        """What the sum of a field costs this silo's documents.

        It is named by the keys that this silo drew for it, not by the session, which is the relay's word: a
        session that begins again under its old name has other noise, and costs again.
        """
        member = self._member(name)
        costs = self._plan(name, adding).costs(member.advertise().mask_key.hex())
        peers = sorted(member.peers - {self.identity.name})
        return [(cost, adding.covered, peer) for cost in costs for peer in peers]

    def finish(self, incoming: Mapping[str, bytes]) -> None:
        """The last step: keep what the relay has announced, and forget the keys of the masks."""
        for name, told in incoming.items():
            if len(told) != 8 * (2 * self.agreed.width + 3):
                raise ProtocolError("a total of other cells than agreed")
            self._member(name)  # a total that nobody has asked for is none
            with replacing(self._total(name)) as stream:
                stream.write(told)
            self._file(name).unlink()

    def totals(self, name: str, adding: Contribution) -> Statistics | None:
        """The noisy totals of a field, once they are there."""
        if not self._total(name).exists():
            return None
        words = np.frombuffer(self._total(name).read_bytes(), dtype="<u8").astype(np.uint64)
        return self._plan(name, adding).totals(words[:-1], answered=int(words[-1]))

    def _plan(self, name: str, adding: Contribution) -> SumPlan:
        agreed = self.agreed
        family = self.group.family(f"totals {name}", width=agreed.width)
        return SumPlan(
            name, family, agreed.silos, adding.epsilon_df, adding.epsilon_cf, colluding=agreed.colluding
        )

    def stopped(self) -> bool | None:
        """Forget a session that did not end: whether this silo's shares had left, or None if it did end."""
        left = list(self.folder.glob("*.member"))
        revealed = any(json.loads(file.read_bytes()).get("revealed") for file in left)
        for file in left:
            file.unlink()
        return revealed if left else None

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.member"

    def _total(self, name: str) -> Path:
        return self.folder / f"{name}.total"

    def _keep(self, name: str, member: Member) -> None:
        """With all its secrets, for its own silo's eyes."""
        with replacing(self._file(name)) as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(member.kept())

    def _member(self, name: str) -> Member:
        if not name.isalnum() or not self._file(name).exists():
            raise ProtocolError("a step of a sum that was not begun")
        kept = self._file(name).read_bytes()
        return Member.resumed(kept, identity=self.identity.signing, trusted=self.trusted)


@dataclass(eq=False)
class Adding:
    """The relay's part: it hands on what is not for it, and takes the masks off the sum of every field."""

    agreed: Agreed
    sums: dict[str, Summation] = field(default_factory=dict)
    totals: dict[str, Words] = field(default_factory=dict)

    def after(self, step: int, replies: Mapping[str, Parts]) -> dict[str, Parts]:
        """What every silo gets for the next step, from what silos gave in this one."""
        if step >= len(STEPS):
            return {silo: {} for silo in replies}
        for silo, parts in replies.items():
            for name, told in _by_field(parts).items():
                self._sum(name).receive(STEPS[step], silo, told)
        if STEPS[step] == "reveal":
            self.totals = {name: each.total(self.agreed.terms) for name, each in self.sums.items()}
            return {silo: self._announced() for silo in replies}
        handed: dict[str, Parts] = {silo: {} for silo in replies}
        for name, each in self.sums.items():
            for silo in replies:
                handed[silo] |= _of_field(name, each.next(STEPS[step + 1], silo))
        return handed

    def _sum(self, name: str) -> Summation:
        agreed = self.agreed
        begun = Summation(agreed.of_field(name), agreed.threshold, 2 * agreed.width + 2)
        return self.sums.setdefault(name, begun)

    def _announced(self) -> Parts:
        """The totals, and how many silos are in each."""
        counted = {name: np.uint64(len(self.sums[name].masked)) for name in self.totals}
        return {
            name: np.append(total, counted[name]).astype("<u8").tobytes()
            for name, total in self.totals.items()
        }


def _by_field(incoming: Mapping[str, bytes]) -> dict[str, Parts]:
    """`FIELD/SILO` taken apart."""
    found: dict[str, Parts] = {}
    for label, data in incoming.items():
        name, _, silo = label.partition("/")
        found.setdefault(name, {})[silo] = data
    return found


def _of_field(name: str, parts: Mapping[str, bytes]) -> Parts:
    return {f"{name}/{silo}": data for silo, data in parts.items()}
