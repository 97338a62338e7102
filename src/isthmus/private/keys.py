"""The key of a federation's hash functions: random, and handed from silo to silo past a relay that may look.

Two-party key agreement would not do: it gives a key a pair, not one a group, and a relay in the middle could
agree with both sides. So one silo draws the group key and wraps it for every other silo, under keys that both
sides have seen outside the relay: a box for the receiver's sealing key, signed by the sender's identity.

>>> north, south = Identity.fresh("north"), Identity.fresh("south")
>>> boxes = wrap(GroupKey.fresh(epoch=1), north, [south.card])
>>> unwrap(boxes["south"], south, trusted={"north": north.card}).epoch
1
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private.noise import KEY, Entropy
from isthmus.private.sketch import HashFamily

_HEAD = struct.Struct("<4sI32s12s")  # magic, epoch, the sender's key for this box, nonce
_MAGIC, _SIGNATURE, _TAG = b"ISGK", 64, 16


@dataclass(frozen=True)
class Card:
    """What others must know of a silo, from a source they trust: its name and two public keys."""

    name: str
    verifying: bytes
    sealing: bytes

    @property
    def fingerprint(self) -> str:
        """What two people compare by telephone before they trust a card."""
        data = self.name.encode() + b"\0" + self.verifying + self.sealing
        spelled = hashlib.blake2b(data, digest_size=16, person=b"isthmus card").hexdigest()
        return " ".join(spelled[at : at + 4] for at in range(0, len(spelled), 4))


@dataclass(frozen=True, repr=False)
class Identity:
    """A silo's own keys: one to sign with, one that boxes are sealed for."""

    name: str
    signing: Ed25519PrivateKey
    opening: X25519PrivateKey

    @classmethod
    def fresh(cls, name: str) -> Identity:
        """New keys."""
        return cls(name, Ed25519PrivateKey.generate(), X25519PrivateKey.generate())

    @property
    def card(self) -> Card:
        """The public side."""
        verifying, sealing = self.signing.public_key(), self.opening.public_key()
        return Card(self.name, verifying.public_bytes_raw(), sealing.public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"


@dataclass(frozen=True)
class GroupKey:
    """The secret that all silos share and the relay lacks; `epoch` counts the keys there were."""

    secret: bytes = field(repr=False)
    epoch: int

    def __post_init__(self) -> None:
        if len(self.secret) != KEY or not 0 <= self.epoch < 1 << 32:
            raise PrivacyError(f"a group key has {KEY} bytes and an epoch from 0")

    @classmethod
    def fresh(cls, *, epoch: int, entropy: Entropy = os.urandom) -> GroupKey:
        """A new key; sketches of another epoch do not mix with it, and releasing them anew costs anew."""
        return cls(entropy(KEY), epoch)

    @property
    def mark(self) -> bytes:
        """Eight bytes that tell this key from others and nothing else about it."""
        data = b"mark %d" % self.epoch
        return hashlib.blake2b(data, key=self.secret, digest_size=8, person=b"isthmus group").digest()

    def family(self, purpose: str, *, rows: int = 1, width: int = 8192) -> HashFamily:
        """The hash functions for one purpose, such as the cells of a field or the totals of all silos."""
        digest = hashlib.blake2b(purpose.encode(), key=self.secret, digest_size=KEY, person=b"isthmus family")
        return HashFamily(digest.digest(), rows, width, self.epoch)


def wrap(
    key: GroupKey, sender: Identity, receivers: Sequence[Card], *, entropy: Entropy = os.urandom
) -> dict[str, bytes]:
    """A box with the group key for every receiver, by name."""
    return {card.name: _box(key, sender, card, entropy) for card in receivers}


def _box(key: GroupKey, sender: Identity, card: Card, entropy: Entropy) -> bytes:
    once = X25519PrivateKey.from_private_bytes(entropy(32))
    head = _HEAD.pack(_MAGIC, key.epoch, once.public_key().public_bytes_raw(), entropy(12))
    aad = _aad(head, sender.card, card)
    sealed = ChaCha20Poly1305(_box_key(once, card.sealing, aad)).encrypt(head[-12:], key.secret, aad)
    return head + sealed + sender.signing.sign(aad + sealed)


def unwrap(
    box: bytes, receiver: Identity, trusted: Mapping[str, Card], *, sender: str | None = None, after: int = -1
) -> GroupKey:
    """Open a box from one of the trusted silos (or from that one), of a later epoch than `after`.

    A box that was cut, damaged, made for or by somebody else, or of an epoch that is over is a ProtocolError.
    """
    if len(box) != _HEAD.size + KEY + _TAG + _SIGNATURE:
        raise ProtocolError("not a box with a group key, or one that was cut")
    magic, epoch, once, nonce = _HEAD.unpack_from(box)
    if magic != _MAGIC:
        raise ProtocolError("not a box with a group key")
    head, sealed, signature = box[: _HEAD.size], box[_HEAD.size : -_SIGNATURE], box[-_SIGNATURE:]
    known = [card for name, card in trusted.items() if sender in (None, name)]
    signed = (card for card in known if is_signed(card, signature, _aad(head, card, receiver.card) + sealed))
    card = next(signed, None)
    if card is None:
        raise ProtocolError("a group key that no trusted silo has signed for this one")
    if epoch <= after:
        raise ProtocolError("a group key of an epoch that is over")
    aad = _aad(head, card, receiver.card)
    try:
        secret = ChaCha20Poly1305(_box_key(receiver.opening, once, aad)).decrypt(nonce, sealed, aad)
    except InvalidTag:
        raise ProtocolError("a box with a group key that does not open") from None
    return GroupKey(secret, epoch)


def is_signed(card: Card, signature: bytes, message: bytes) -> bool:
    """Whether a silo has signed a message."""
    try:
        Ed25519PublicKey.from_public_bytes(card.verifying).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def agreed_key(*ends: tuple[X25519PrivateKey, bytes], info: bytes, salt: bytes | None = None) -> bytes:
    """The key that own secrets and the public keys of the other end agree on, bound to `info`."""
    try:
        shared = [own.exchange(X25519PublicKey.from_public_bytes(public)) for own, public in ends]
    except ValueError:
        raise ProtocolError("a public key that is no point of the curve") from None
    return HKDF(hashes.SHA256(), 32, salt=salt, info=info).derive(b"".join(shared))


def _box_key(secret: X25519PrivateKey, public: bytes, aad: bytes) -> bytes:
    return agreed_key((secret, public), info=b"isthmus group key" + aad)


def _aad(head: bytes, sender: Card, receiver: Card) -> bytes:
    """What a box is bound to: both ends with all their keys, and its own beginning."""
    parts = [head]
    for card in (sender, receiver):
        name = card.name.encode()
        parts += [struct.pack("<I", len(name)), name, card.verifying, card.sealing]
    return b"".join(parts)
