"""The secure sum of document frequencies and collection counts, step by step and as bytes.

A silo's part (`Summing`) and the relay's (`Adding`) exchange named bytes, one name a field and a silo:

    step 0   silo: its signed public keys                          relay: hands all of them to all
    step 1   silo: a box for every silo, with shares of its keys   relay: hands each box to its receiver
    step 2   silo: adds its share of noise, masks                  relay: says who has answered
    step 3   silo: signs the list of those who have                relay: hands all signatures to all
    step 4   silo: charges, then gives what takes the masks away   relay: the noisy total, to all
    step 5   silo: keeps the total

The relay sees no silo's cells. What it could do is hand wrong things on: keys and lists are signed by
identities that silos know from each other's cards, boxes open for their receiver only, and the rest is a
ProtocolError. All silos must stay to the end, so a masked vector is noise until its own silo gives its
shares: that is when a release is charged, and a session that ends before costs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from isthmus.errors import ProtocolError
from isthmus.private.cost import Cost, Covered, no_charge
from isthmus.private.keyring import Keyring
from isthmus.private.noise import Entropy
from isthmus.private.secure_sum import Advert, Member, Revealed, Words, joined, total
from isthmus.private.sums import SumPlan
from isthmus.private.totals import Sums, Totals
from isthmus.tables.files import replacing
from isthmus.text import Tokens

Parts = dict[str, bytes]
"""Named bytes: `FIELD`, or `FIELD/SILO`."""

STEPS = 6
_KEYS, _SIGNED = 64, 128


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


class Summing:
    """A silo's part in the sums of all fields; between steps it is in a folder."""

    def __init__(self, agreed: Agreed, keys: Keyring, folder: Path) -> None:
        self.agreed, self.folder = agreed, folder
        self.identity, self.group = keys.identity(), keys.group_key()
        trusted = {**keys.trusted(), self.identity.name: self.identity.card}
        self.trusted = {
            name: Ed25519PublicKey.from_public_bytes(card.verifying) for name, card in trusted.items()
        }

    def advertise(self, fields: Sequence[str]) -> Parts:
        """Step 0."""
        parts: Parts = {}
        for name in fields:
            if self._file(name).exists() or self._total(name).exists():
                raise ProtocolError("a sum that was begun before")
            session = self.agreed.of_field(name)
            member = Member(
                self.identity.name, session, self.agreed.threshold, self.identity.signing, self.trusted
            )
            advert = member.advertise()
            parts[name] = advert.sealing_key + advert.mask_key + advert.signature
            self._keep(name, member)
        return parts

    def share(self, incoming: Mapping[str, bytes]) -> Parts:
        """Step 1: boxes by receiver."""
        parts: Parts = {}
        for name, adverts in _by_field(incoming).items():
            member = self._member(name)
            boxes = member.share([_advert(silo, data) for silo, data in sorted(adverts.items())])
            parts |= {f"{name}/{silo}": box for silo, box in boxes.items()}
            self._keep(name, member)
        return parts

    def mask(self, incoming: Mapping[str, bytes], contributions: Mapping[str, Contribution]) -> Parts:
        """Step 2: the cells of this silo with its share of noise, under masks."""
        parts: Parts = {}
        for name, boxes in _by_field(incoming).items():
            if name not in contributions:
                raise ProtocolError("a sum of a field that this silo does not have")
            adding, member = contributions[name], self._member(name)
            plan = self._plan(name, adding)
            if member.peers != set(plan.silos) or member.threshold != plan.threshold:
                raise ProtocolError("a sum of other silos than those that have begun it")  # or less noise
            sums = Sums.of(adding.words, plan.family)
            vector = plan.contribute(
                self.identity.name, sums, adding.covered, charge=no_charge, entropy=adding.entropy
            )
            parts[name] = member.mask(vector, boxes, terms=self.agreed.terms).astype("<u8").tobytes()
            self._keep(name, member)
        return parts

    def confirm(self, incoming: Mapping[str, bytes]) -> Parts:
        """Step 3: signatures over who has answered."""
        parts: Parts = {}
        for name, answered in incoming.items():
            member = self._member(name)
            parts[name] = member.confirm(_names(answered))
            self._keep(name, member)
        return parts

    def charges(self, name: str, adding: Contribution) -> list[tuple[Cost, Covered, str]]:
        """What the sum of a field costs this silo's documents.

        It is named by the keys that this silo drew for it, not by the session, which is the relay's word: a
        session that begins again under its old name has other noise, and costs again.
        """
        member = self._member(name)
        costs = self._plan(name, adding).costs(member.advertise().mask_key.hex())
        peers = sorted(member.peers - {self.identity.name})
        return [(cost, adding.covered, peer) for cost in costs for peer in peers]

    def reveal(self, incoming: Mapping[str, bytes]) -> Parts:
        """Step 4: to be charged before it leaves."""
        parts: Parts = {}
        for name, signatures in _by_field(incoming).items():
            member = self._member(name)
            shares = member.reveal(signatures)
            told = [
                {silo: share.hex() for silo, share in part.items()} for part in (shares.seeds, shares.keys)
            ]
            parts[name] = json.dumps(told).encode()
            self._keep(name, member)
        return parts

    def finish(self, incoming: Mapping[str, bytes]) -> None:
        """Step 5: keep what the relay has announced, and forget the keys of the masks."""
        for name, told in incoming.items():
            if len(told) != 8 * (2 * self.agreed.width + 3):
                raise ProtocolError("a total of other cells than agreed")
            self._member(name)  # a total that nobody has asked for is none
            with replacing(self._total(name)) as stream:
                stream.write(told)
            self._file(name).unlink()

    def totals(self, name: str, adding: Contribution) -> Totals | None:
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
    """The relay's part: it hands on what is not for it, and takes the masks off the sum."""

    agreed: Agreed
    adverts: dict[str, dict[str, bytes]] = field(default_factory=dict)
    shared: dict[str, set[str]] = field(default_factory=dict)
    masked: dict[str, dict[str, Words]] = field(default_factory=dict)
    totals: dict[str, Words] = field(default_factory=dict)

    def after(self, step: int, replies: Mapping[str, Parts]) -> dict[str, Parts]:
        """What every silo gets for the next step, from what silos gave in this one."""
        between = (self._adverts, self._boxes, self._answered, self._signatures, self._totals)
        return between[step](replies) if step < len(between) else {name: {} for name in replies}

    def _adverts(self, replies: Mapping[str, Parts]) -> dict[str, Parts]:
        for silo, parts in replies.items():
            for name, advert in parts.items():
                self.adverts.setdefault(name, {})[silo] = advert
        told = {
            f"{name}/{silo}": data for name, found in self.adverts.items() for silo, data in found.items()
        }
        return {silo: dict(told) for silo in replies}

    def _boxes(self, replies: Mapping[str, Parts]) -> dict[str, Parts]:
        handed: dict[str, Parts] = {silo: {} for silo in replies}
        for sender, parts in replies.items():
            for label, box in parts.items():
                name, _, receiver = label.partition("/")
                self.shared.setdefault(name, set()).add(sender)
                if receiver in handed:
                    handed[receiver][f"{name}/{sender}"] = box
        return handed

    def _answered(self, replies: Mapping[str, Parts]) -> dict[str, Parts]:
        size = 2 * self.agreed.width + 2
        for silo, parts in replies.items():
            for name, data in parts.items():
                if len(data) == 8 * size:
                    words = np.frombuffer(data, dtype="<u8").astype(np.uint64)
                    self.masked.setdefault(name, {})[silo] = words
        told = {name: json.dumps(sorted(found)).encode() for name, found in self.masked.items()}
        return {silo: dict(told) for silo in replies}

    def _signatures(self, replies: Mapping[str, Parts]) -> dict[str, Parts]:
        handed = {f"{name}/{silo}": data for silo, parts in replies.items() for name, data in parts.items()}
        return {silo: dict(handed) for silo in replies}

    def _totals(self, replies: Mapping[str, Parts]) -> dict[str, Parts]:
        announced: Parts = {}
        for name, masked in self.masked.items():
            found = {silo: parts[name] for silo, parts in replies.items() if name in parts}
            revealed = {silo: _revealed(data) for silo, data in found.items()}
            adverts = [_advert(silo, data) for silo, data in sorted(self.adverts[name].items())]
            shared = sorted(self.shared.get(name, ()))
            self.totals[name] = _total(masked, adverts, revealed, self.agreed, name, shared)
            announced[name] = np.append(self.totals[name], np.uint64(len(masked))).astype("<u8").tobytes()
        return {silo: dict(announced) for silo in replies}


def _total(
    masked: Mapping[str, Words],
    adverts: Sequence[Advert],
    revealed: Mapping[str, Revealed],
    agreed: Agreed,
    name: str,
    shared: Sequence[str],
) -> Words:
    try:
        session, terms = agreed.of_field(name), agreed.terms
        return total(
            masked,
            adverts,
            revealed,
            session=session,
            threshold=agreed.threshold,
            shared=shared,
            terms=terms,
        )
    except KeyError:
        raise ProtocolError("a silo has not revealed all that its part is") from None


def _by_field(incoming: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    """`FIELD/SILO` taken apart."""
    found: dict[str, dict[str, bytes]] = {}
    for label, data in incoming.items():
        name, _, silo = label.partition("/")
        found.setdefault(name, {})[silo] = data
    return found


def _advert(silo: str, data: bytes) -> Advert:
    if len(data) != _SIGNED:
        raise ProtocolError("public keys of the wrong length")
    return Advert(silo, data[: _KEYS // 2], data[_KEYS // 2 : _KEYS], data[_KEYS:])


def _names(data: bytes) -> list[str]:
    try:
        told = json.loads(data)
    except ValueError:
        raise ProtocolError("a list of silos that is none") from None
    if not isinstance(told, list) or not all(isinstance(name, str) for name in told):
        raise ProtocolError("a list of silos that is none")
    return told


def _revealed(data: bytes) -> Revealed:
    try:
        seeds, keys = (
            {silo: bytes.fromhex(share) for silo, share in part.items()} for part in json.loads(data)
        )
    except (ValueError, TypeError, AttributeError):
        raise ProtocolError("shares that are none") from None
    return Revealed(seeds, keys)
