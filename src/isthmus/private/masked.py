"""Sums of answers to many questions, each in one round trip, under pairwise masks that are agreed once a
session.

    member.advertise()                        an X25519 public key and whether it has anything to add, signed
    member.agree(adverts)                     the keys of all members, checked; once a session
    member.mask(number, question, vector)     x + Σ_{v>u} PRG(key_uv) − Σ_{v<u} PRG(key_uv)  mod 2^64

A relay passes everything from member to member, adds the words of all of them and alone can read the total.
Masks are bound to the session, to the keys of all members, to the number of the question and to its bytes:
members who received different lists, or different questions, have masks that do not cancel. A member answers
a number once, in ascending order, and takes part in sums only if at least `least` members add something and
it has the cards of all members. A member with nothing to add masks zeros.

No member may drop out: without one member's words the total is noise, and a new session has to begin without
that member. By comparing the totals of two sessions, with and without a member, a relay can compute that
member's sums; the member has to bound what these may reveal (`service.judged`). `secure_sum` is for sums that
members may leave.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import ArrayLike

from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private.secure_sum import Words, as_words, joined, pairwise_mask

LEAST_MEMBERS = 3
"""Least number of members that add something: of two, each would learn the other's words from the total."""
_KEY, _SIGNATURE = 32, 64
_STATED = _KEY + 1
"""Bytes that a signature covers: the key, and whether the member has anything to add."""


@dataclass(eq=False)
class MaskedMember:
    """One silo's side of one session; `trusted` maps the other members to the identities they must have."""

    name: str
    session: bytes
    identity: Ed25519PrivateKey
    trusted: Mapping[str, Ed25519PublicKey]
    least: int = LEAST_MEMBERS
    adds: bool = True
    """Whether the member has anything to add; if not, it masks zeros."""
    entropy: Callable[[int], bytes] = os.urandom
    _keys: dict[str, bytes] = field(default_factory=dict, init=False, repr=False)
    _adding: tuple[bool, ...] = field(default=(), init=False, repr=False)
    _last: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.least < 2:
            raise PrivacyError("a sum under masks needs at least 2 members")
        self._secret = X25519PrivateKey.from_private_bytes(self.entropy(_KEY))

    @property
    def members(self) -> tuple[str, ...]:
        """The names of all members whose words are in the total; empty before they have agreed."""
        return tuple(sorted(self._keys))

    @property
    def adding(self) -> tuple[bool, ...]:
        """Whether each member has anything to add, in the order of their names."""
        return self._adding

    @property
    def place(self) -> int:
        """The position of this member in the order of names. Raises ProtocolError before the members have
        agreed."""
        if not self._keys:
            raise ProtocolError("a question before the members have agreed")
        return self.members.index(self.name)

    def advertise(self) -> bytes:
        """The public key of this session and whether there is anything to add, with a signature of both."""
        stated = self._secret.public_key().public_bytes_raw() + bytes((self.adds,))
        return stated + self.identity.sign(self._statement(self.name, stated))

    def agree(self, adverts: Mapping[str, bytes]) -> None:
        """Accept the keys of all members. Raises ProtocolError where one is not signed, unknown or misquoted,
        or where too few members have anything to add."""
        if self._keys:
            raise ProtocolError("the members of this session are settled")
        if adverts.get(self.name) != self.advertise():
            raise ProtocolError("the list of members leaves out this member or misquotes its key")
        for name in adverts.keys() - {self.name}:
            self._check(name, adverts[name])
        adding = tuple(adverts[name][_KEY] > 0 for name in sorted(adverts))
        if self.adds and sum(adding) < self.least:
            few = f"{sum(adding)} silos add something"
            raise ProtocolError(f"{few}, where this one needs {self.least} to hide in")
        self._keys = {name: advert[:_KEY] for name, advert in adverts.items()}
        self._adding = adding

    def _check(self, name: str, advert: bytes) -> None:
        if name not in self.trusted:
            raise ProtocolError("the list of members names a silo whose card this one does not have")
        if len(advert) != _STATED + _SIGNATURE or advert[_KEY] > 1:
            raise ProtocolError("a member's key of the wrong form")
        try:
            self.trusted[name].verify(advert[_STATED:], self._statement(name, advert[:_STATED]))
        except InvalidSignature:
            raise ProtocolError("a member's key is not signed by the identity on its card") from None

    def _statement(self, name: str, stated: bytes) -> bytes:
        return joined((b"isthmus masked sums, key", self.session, name.encode(), stated))

    def claim(self, number: int) -> None:
        """Use up the number of a question. Raises ProtocolError for a number that is not above the
        last one."""
        if not self._keys:
            raise ProtocolError("a question before the members have agreed")
        if number <= self._last:
            raise ProtocolError("a question whose number was used before")
        self._last = number

    def mask(self, number: int, question: bytes, vector: ArrayLike) -> Words:
        """Return the integers of an answer under the masks of this question, and use up its number."""
        self.claim(number)
        members = joined(part for name in self.members for part in (name.encode(), self._keys[name]))
        digests = (hashlib.sha256(part).digest() for part in (members, question))
        scope = joined((self.session, *digests, number.to_bytes(8, "little")))
        words = as_words(vector) if self.adds else np.zeros(np.size(vector), dtype=np.uint64)
        for name in self.members:
            if name != self.name:
                pad = pairwise_mask(self._secret, self._keys[name], (self.name, name), scope, words.size)
                words = words + pad if self.name < name else words - pad
        return words
