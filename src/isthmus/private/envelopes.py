"""Envelopes between two silos past a relay that may read, change, withhold and repeat the messages it
carries.

An envelope shows the relay its header (sender, receiver, number, digest of the question) and its size, and
nothing of its content, which is encrypted and authenticated under a key that only the two silos can derive:
from the keys that both have drawn for this exchange and signed (`SessionKey`), from their cards, and from the
group's key. The keys of an exchange are deleted when it is over: an attacker who has recorded envelopes and
later steals all other keys can open none. A silo accepts a question once, by increasing numbers; an answer is
bound to the question that it answers.

    north: sent = post.ask("south", message)             south: question = post.receive(envelope)
    north: post.open(envelope, sent.digest)              south: post.answer(question, message)

Anything else (cut, changed, from another silo, received before, too long) is a ProtocolError.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from isthmus.errors import ProtocolError
from isthmus.files import locked
from isthmus.private.keys import Card, GroupKey, Identity, agreed_key, is_signed
from isthmus.private.mechanisms import Entropy
from isthmus.private.messages import LARGEST
from isthmus.private.secure_sum import joined

QUESTION, ANSWER = 0, 1

_HEAD = struct.Struct("<4sBBQ16sBB")  # magic, version, kind, number, digest of the question, two lengths
_MAGIC, _VERSION, _DIGEST, _NONCE, _TAG = b"ISLE", 2, 16, 12, 16  # version 1 had no exchange keys
_PUBLIC = 32
_LONGEST = LARGEST + 1024


@dataclass(frozen=True)
class Envelope:
    """An envelope: a header that the relay can read, and the sealed content, which it cannot read."""

    kind: int
    number: int
    about: bytes
    sender: str
    receiver: str
    sealed: bytes = field(repr=False)

    def head(self) -> bytes:
        """The header as bytes: everything but the sealed content."""
        names = [name.encode() for name in (self.sender, self.receiver)]
        if not all(0 < len(name) < 256 for name in names):
            raise ProtocolError("a name is too long for an envelope, or empty")
        sizes = [len(name) for name in names]
        fixed = _HEAD.pack(_MAGIC, _VERSION, self.kind, self.number, self.about, *sizes)
        return fixed + b"".join(names)

    def encode(self) -> bytes:
        """The envelope as bytes."""
        return self.head() + self.sealed

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """Parse an envelope. Its sender is authenticated only when it is opened."""
        if not isinstance(data, bytes) or not _HEAD.size + _NONCE + _TAG <= len(data) <= _LONGEST:
            raise ProtocolError("not an envelope, or one that was cut or is too long")
        magic, version, kind, number, about, *sizes = _HEAD.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or kind not in (QUESTION, ANSWER):
            raise ProtocolError("no envelope, or one of another version (all silos need the same release)")
        first = _HEAD.size + sizes[0]
        end = first + sizes[1]
        if not all(sizes) or len(data) < end + _NONCE + _TAG:
            raise ProtocolError("an envelope that was cut")
        try:
            sender, receiver = data[_HEAD.size : first].decode(), data[first:end].decode()
        except UnicodeDecodeError:
            raise ProtocolError("an envelope whose address is no text") from None
        return cls(kind, number, about, sender, receiver, data[end:])


@dataclass(frozen=True)
class ReplayGuard:
    """Stores the last number of each silo's questions, on disk for all processes. Raises ProtocolError for a
    number that is not above it."""

    path: Path

    def __call__(self, sender: str, number: int) -> None:
        with _number(self.path / sender.encode().hex()) as counter:
            if number <= counter.value:
                raise ProtocolError("an envelope that was received before")
            counter.value = number


@dataclass(frozen=True)
class FileCounter:
    """Numbers that increase from process to process, even if the clock is set back."""

    path: Path

    def __call__(self) -> int:
        with _number(self.path / "sent") as counter:
            counter.value = max(time.time_ns(), counter.value + 1)
            return counter.value


@dataclass
class _Counter:
    value: int


@contextmanager
def _number(file: Path) -> Iterator[_Counter]:
    """Yield the number in a file, to one process at a time; it is on disk when the block ends without an
    error."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(file) as opened:
        raw = os.pread(opened, 8, 0)
        counter = _Counter(struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1)
        yield counter
        os.pwrite(opened, struct.pack("<Q", counter.value), 0)
        os.fsync(opened)


@dataclass(frozen=True, repr=False)
class SessionKey:
    """A silo's key for the envelopes of one exchange, to be deleted when that is over."""

    session: bytes
    secret: X25519PrivateKey

    @classmethod
    def in_file(cls, file: Path, session: bytes, *, create: bool = False) -> SessionKey:
        """Read the key from a file that only its owner can read; with `create`, draw a new one first."""
        if create:
            opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(opened, "wb") as stream:
                stream.write(os.urandom(_PUBLIC))
        elif not file.exists():
            raise ProtocolError("an exchange that was not begun, or is over")
        return cls(session, X25519PrivateKey.from_private_bytes(file.read_bytes()))

    @property
    def public(self) -> bytes:
        """The public key."""
        return self.secret.public_key().public_bytes_raw()

    def announced(self, identity: Identity) -> bytes:
        """The public key with the silo's signature."""
        return self.public + identity.signing.sign(_announcement(self.session, identity.name, self.public))


def accepted(data: bytes, session: bytes, card: Card) -> bytes:
    """Return the public key that a silo has announced for this exchange. Raises ProtocolError if it is not
    signed."""
    public, signature = data[:_PUBLIC], data[_PUBLIC:]
    if not is_signed(card, signature, _announcement(session, card.name, public)):
        raise ProtocolError("a key for envelopes that its silo has not signed for this exchange")
    return public


def _announcement(session: bytes, name: str, public: bytes) -> bytes:
    return joined((b"isthmus letters", session, name.encode(), public))


@dataclass(frozen=True)
class Sent:
    """A sealed question, and the digest that its answer must name."""

    envelope: bytes
    digest: bytes


@dataclass(frozen=True)
class Received:
    """A question that was opened."""

    sender: str
    message: bytes
    digest: bytes


@dataclass(frozen=True, eq=False)
class Post:
    """Seals and opens the envelopes of one silo; `others` are the keys that other silos announced, by
    name."""

    identity: Identity
    group: GroupKey
    trusted: Mapping[str, Card]
    own: SessionKey
    others: Mapping[str, bytes]
    replay_guard: Callable[[str, int], None]
    clock: Callable[[], int] = time.time_ns
    entropy: Entropy = os.urandom

    def ask(self, receiver: str, message: bytes) -> Sent:
        """Seal a question for another silo."""
        envelope = Envelope(QUESTION, self.clock(), bytes(_DIGEST), *self._to(receiver))
        sealed = self._sealed(envelope, message)
        return Sent(sealed, _digest(sealed))

    def receive(self, data: bytes) -> Received:
        """Open a question from another silo. Raises ProtocolError if it was received before."""
        envelope = Envelope.decode(data)
        if envelope.kind != QUESTION:
            raise ProtocolError("an answer where a question was expected")
        message = self._opened(envelope)
        self.replay_guard(envelope.sender, envelope.number)
        return Received(envelope.sender, message, _digest(data))

    def answer(self, question: Received, message: bytes) -> bytes:
        """Seal the answer to a received question."""
        return self._sealed(Envelope(ANSWER, 0, question.digest, *self._to(question.sender)), message)

    def open(self, data: bytes, digest: bytes) -> bytes:
        """Open the answer to the question with this digest."""
        envelope = Envelope.decode(data)
        if envelope.kind != ANSWER or envelope.about != digest:
            raise ProtocolError("an answer to another question")
        return self._opened(envelope)

    def _to(self, receiver: str) -> tuple[str, str, bytes]:
        return self.identity.name, receiver, b""

    def _sealed(self, envelope: Envelope, message: bytes) -> bytes:
        if len(message) > LARGEST:
            raise ProtocolError("the envelope is too long")
        head, nonce = envelope.head(), self.entropy(_NONCE)
        key = self._key(self.identity.card, self._card(envelope.receiver), envelope.receiver)
        return head + nonce + ChaCha20Poly1305(key).encrypt(nonce, message, head)

    def _opened(self, envelope: Envelope) -> bytes:
        if envelope.receiver != self.identity.name:
            raise ProtocolError("an envelope for another silo")
        key = self._key(self._card(envelope.sender), self.identity.card, envelope.sender)
        nonce, sealed = envelope.sealed[:_NONCE], envelope.sealed[_NONCE:]
        try:
            return ChaCha20Poly1305(key).decrypt(nonce, sealed, envelope.head())
        except InvalidTag:
            raise ProtocolError("an envelope that does not open: not from whom it says, or changed") from None

    def _card(self, name: str) -> Card:
        if name not in self.trusted or name not in self.others:
            raise ProtocolError("an envelope from or to a silo that is not trusted, or takes no part")
        return self.trusted[name]

    def _key(self, sender: Card, receiver: Card, other: str) -> bytes:
        """The key of one direction, so that an envelope cannot be sent back as if it came from the other
        silo."""
        public = {**self.others, self.identity.name: self.own.public}
        parts = [b"isthmus letter", self.own.session, self.group.epoch.to_bytes(4, "little")]
        for card in (sender, receiver):
            parts += [card.name.encode(), card.verifying, card.sealing, public[card.name]]
        fleeting = self.own.secret, self.others[other]
        lasting = self.identity.opening, self.trusted[other].sealing
        return agreed_key(fleeting, lasting, info=joined(parts), salt=self.group.secret)


def _digest(envelope: bytes) -> bytes:
    return hashlib.blake2b(envelope, digest_size=_DIGEST).digest()
