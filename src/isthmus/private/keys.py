"""The key of a federation's hash functions: random, and passed from silo to silo through an untrusted relay.

Two-party key agreement would not do: it makes a key for a pair, not one for a group, and a relay in the
middle could agree with both sides. So one silo draws the group key and wraps it for every other silo, under
keys that both sides have seen outside the relay: a box for the receiver's sealing key, signed by the sender's
identity.

>>> north, south = Identity.fresh("north"), Identity.fresh("south")
>>> boxes = wrap(GroupKey.fresh(epoch=1), north, [south.card])
>>> unwrap(boxes["south"], south, trusted={"north": north.card}).epoch
1

A silo's keys are on its disk, in files that only their owner may read:

    identity.key      the silo's name, and its keys for signing and for opening boxes
    cards/NAME.card   the public keys of every other silo, from a source that this silo trusts
    group.key         the federation's hash key, the same in every silo; the relay must not have it
    noise.key         the secret behind this silo's noise; with it, the noise of releases can be removed
    decoys.key        the secret that chooses decoys, so that a word always comes with the same ones

A secret that others can read is refused, and a file is either complete or absent. Writers hold the folder's
lock, so that two processes cannot undo each other's changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus.errors import ConfigError, DataError, PrivacyError, ProtocolError
from isthmus.files import locked, private_file, write_private, write_whole
from isthmus.private.mechanisms import KEY, Entropy, NoiseKey
from isthmus.private.sketch import HashFamily

_HEAD = struct.Struct("<4sI32s12s")  # magic, epoch, the sender's key for this box, nonce
_MAGIC, _SIGNATURE, _TAG = b"ISGK", 64, 16


@dataclass(frozen=True)
class Card:
    """A silo's name and two public keys, which others must get from a source they trust."""

    name: str
    verifying: bytes
    sealing: bytes

    @property
    def fingerprint(self) -> str:
        """A digest of the card, for two people to compare by telephone before they trust it."""
        data = self.name.encode() + b"\0" + self.verifying + self.sealing
        spelled = hashlib.blake2b(data, digest_size=16, person=b"isthmus card").hexdigest()
        return " ".join(spelled[at : at + 4] for at in range(0, len(spelled), 4))


@dataclass(frozen=True, repr=False)
class Identity:
    """A silo's own private keys: one to sign with, one to open boxes with."""

    name: str
    signing: Ed25519PrivateKey
    opening: X25519PrivateKey

    @classmethod
    def fresh(cls, name: str) -> Identity:
        """An identity with new keys."""
        return cls(name, Ed25519PrivateKey.generate(), X25519PrivateKey.generate())

    @property
    def card(self) -> Card:
        """The public keys, for the others."""
        verifying, sealing = self.signing.public_key(), self.opening.public_key()
        return Card(self.name, verifying.public_bytes_raw(), sealing.public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.name!r})"


@dataclass(frozen=True)
class GroupKey:
    """The secret that all silos share and the relay lacks; `epoch` numbers the successive keys."""

    secret: bytes = field(repr=False)
    epoch: int

    def __post_init__(self) -> None:
        if len(self.secret) != KEY or not 0 <= self.epoch < 1 << 32:
            raise PrivacyError(f"a group key has {KEY} bytes and an epoch from 0")

    @classmethod
    def fresh(cls, *, epoch: int, entropy: Entropy = os.urandom) -> GroupKey:
        """Draw a new key. Sketches of different epochs cannot be combined, and releases under a new key are
        charged anew."""
        return cls(entropy(KEY), epoch)

    @property
    def mark(self) -> bytes:
        """Eight bytes that identify this key and reveal nothing else about it."""
        data = b"mark %d" % self.epoch
        return hashlib.blake2b(data, key=self.secret, digest_size=8, person=b"isthmus group").digest()

    def family(self, purpose: str, *, rows: int = 1, width: int = 8192) -> HashFamily:
        """The hash functions for one purpose, such as the cells of a field or the totals of all silos."""
        digest = hashlib.blake2b(purpose.encode(), key=self.secret, digest_size=KEY, person=b"isthmus family")
        return HashFamily(digest.digest(), rows, width, self.epoch)


def wrap(
    key: GroupKey, sender: Identity, receivers: Sequence[Card], *, entropy: Entropy = os.urandom
) -> dict[str, bytes]:
    """Seal the group key for every receiver. Returns the boxes by name."""
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
    """Open a box from one of the trusted silos (or from `sender`), of a later epoch than `after`.

    Raises ProtocolError for a box that was cut, damaged, made for or by another silo, or of an epoch that is
    over.
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
    """Derive one key from key agreements of own secrets with the other side's public keys, bound to
    `info`."""
    try:
        shared = [own.exchange(X25519PublicKey.from_public_bytes(public)) for own, public in ends]
    except ValueError:
        raise ProtocolError("a public key that is no point of the curve") from None
    return HKDF(hashes.SHA256(), 32, salt=salt, info=info).derive(b"".join(shared))


def _box_key(secret: X25519PrivateKey, public: bytes, aad: bytes) -> bytes:
    return agreed_key((secret, public), info=b"isthmus group key" + aad)


def _aad(head: bytes, sender: Card, receiver: Card) -> bytes:
    """The data to which a box is bound: its header, and the names and keys of both sides."""
    parts = [head]
    for card in (sender, receiver):
        name = card.name.encode()
        parts += [struct.pack("<I", len(name)), name, card.verifying, card.sealing]
    return b"".join(parts)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Keyring:
    """The keys in one folder."""

    path: Path

    @classmethod
    def at(cls, path: str | PathLike[str], *, create: bool = False) -> Keyring:
        """Open an existing folder; with `create`, make one that only its owner can read if there is none."""
        folder = Path(path)
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.is_dir():
            cure = "isthmus sketch build makes one"
            raise DataError("is no silo's folder", file=folder, cure=cure)
        return cls(folder)

    def begin(self, name: str) -> Identity:
        """Draw the silo's own keys unless it has some. Raises DataError if those belong to another name."""
        if not _NAME.fullmatch(name):
            expected = "letters, digits, -, _ and ., at most 63"
            raise ConfigError(f"{name!r} cannot name a silo", key="name", value=name, expected=expected)
        file = self.path / "identity.key"
        with self._alone():
            if not file.exists():
                _keep_identity(file, Identity.fresh(name))
        identity = self.identity()
        if identity.name != name:
            raise DataError(f"belongs to {identity.name}", file=file, cure="give each silo its own folder")
        return identity

    def redraw(self, name: str) -> None:
        """Replace the key in this file by a new one, with the next epoch."""
        file = self.path / name
        with self._alone():
            if name == "identity.key":
                _keep_identity(file, Identity.fresh(self.identity().name))
            else:
                epoch = int(_secret(file, ("secret",), "there is none to take the place of")["epoch"]) + 1
                _keep(file, {"epoch": epoch, "secret": os.urandom(KEY).hex()})

    def identity(self) -> Identity:
        """This silo's identity, from its key file. Raises DataError if there is none."""
        fields = _secret(self.path / "identity.key", ("signing", "opening"), "isthmus keys new makes one")
        signing, opening = (bytes.fromhex(fields[part]) for part in ("signing", "opening"))
        keys = Ed25519PrivateKey.from_private_bytes(signing), X25519PrivateKey.from_private_bytes(opening)
        return Identity(fields["name"], *keys)

    def trust(self, card: Card, *, replace: bool = False) -> None:
        """Trust the keys on a card as those of the silo that it names; other keys of that name are kept
        unless `replace`."""
        if not _NAME.fullmatch(card.name):
            raise DataError(f"{card.name!r} cannot name a silo")
        file = self.path / "cards" / f"{card.name}.card"
        with self._alone():
            known = self.trusted().get(card.name)
            if known not in (None, card) and not replace:
                cure = f"if {card.name} has new keys indeed, isthmus keys trust --replace"
                raise DataError("holds other keys under the same name", file=file, cure=cure)
            file.parent.mkdir(exist_ok=True)
            write_card(card, file)

    def trusted(self) -> Mapping[str, Card]:
        """The cards of the silos that this one trusts, by name."""
        cards = [read_card(file) for file in sorted((self.path / "cards").glob("*.card"))]
        return {card.name: card for card in cards}

    def group_key(self, *, create: bool = False) -> GroupKey:
        """The federation's hash key; with `create`, a new one is drawn if there is none."""
        file = self.path / "group.key"
        if create:
            self._draw(file)
        fields = _secret(file, ("secret",), "get it from another silo of the federation: isthmus keys --help")
        return GroupKey(bytes.fromhex(fields["secret"]), int(fields["epoch"]))

    def join(self, key: GroupKey) -> None:
        """Store a federation's key; one of a later epoch replaces the present key."""
        file = self.path / "group.key"
        with self._alone():
            present = self.group_key() if file.exists() else None
            if present == key:
                return
            if present is not None and present.epoch >= key.epoch:
                cure = "a folder belongs to one federation; take another folder, or a key of a later epoch"
                raise DataError(f"is another key of epoch {present.epoch}", file=file, cure=cure)
            _keep(file, {"epoch": key.epoch, "secret": key.secret.hex()})

    def noise_key(self, *, create: bool = False) -> NoiseKey:
        """This silo's noise key."""
        return NoiseKey(self._drawn("noise.key", create=create))

    def decoys(self) -> bytes:
        """The secret that chooses this silo's decoys; drawn when it is first needed."""
        return self._drawn("decoys.key", create=True)

    def _drawn(self, name: str, *, create: bool) -> bytes:
        file = self.path / name
        if create:
            self._draw(file)
        return bytes.fromhex(_secret(file, ("secret",), "restore it from a backup")["secret"])

    def _draw(self, file: Path) -> None:
        """Draw a secret for this file, unless it has one."""
        with self._alone():
            if not file.exists():
                _keep(file, {"secret": os.urandom(KEY).hex()})

    def _alone(self) -> AbstractContextManager[int]:
        return locked(self.path / ".lock")


def write_card(card: Card, path: str | PathLike[str]) -> None:
    """Write a silo's public keys to a file."""
    keys = {"verifying": card.verifying.hex(), "sealing": card.sealing.hex()}
    fields = {"format": "isthmus card", "name": card.name, **keys}
    write_whole(path, json.dumps(fields).encode() + b"\n")


def read_card(path: str | PathLike[str]) -> Card:
    """Read a silo's public keys from a file."""
    fields = _read(Path(path), "isthmus card", ("verifying", "sealing"), "ask that silo for its card again")
    if not _NAME.fullmatch(fields["name"]):
        raise DataError("names no silo", file=path, text=fields["name"])
    return Card(fields["name"], bytes.fromhex(fields["verifying"]), bytes.fromhex(fields["sealing"]))


def _keep(file: Path, fields: Mapping[str, str | int]) -> None:
    """Write a secret; a file that exists is replaced as a whole."""
    write_private(file, json.dumps({"format": f"isthmus {file.name}", "epoch": 0, **fields}).encode())


def _keep_identity(file: Path, drawn: Identity) -> None:
    raw = (drawn.signing.private_bytes_raw(), drawn.opening.private_bytes_raw())
    _keep(file, {"name": drawn.name, "signing": raw[0].hex(), "opening": raw[1].hex()})


def _secret(file: Path, keys: tuple[str, ...], cure: str) -> dict[str, str]:
    """Read an own secret, from a file that others cannot read."""
    return _read(private_file(file) if file.exists() else file, f"isthmus {file.name}", keys, cure)


def _read(file: Path, form: str, keys: tuple[str, ...], cure: str) -> dict[str, str]:
    try:
        fields: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        fields.setdefault("name", "")
        if fields["format"] != form or any(len(bytes.fromhex(fields[key])) != KEY for key in keys):
            raise ValueError(form)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=file, cure=cure) from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"is not an {form}", file=file, cure=cure) from None
    return fields
