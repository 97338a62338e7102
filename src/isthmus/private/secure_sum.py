"""Secure sums: integer vectors under masks that cancel, so that the total can be read and no single vector.

The protocol is that of Bonawitz et al. (CCS 2017) against a relay that does not follow it, in five steps:

    member.advertise()            two X25519 public keys, signed by the member's identity
    member.share(adverts)         a mask seed and the mask key, in Shamir shares, one sealed box a peer
    member.mask(vector, boxes)    x + PRG(own seed) + Σ_{v>u} PRG(key_uv) − Σ_{v<u} PRG(key_uv)  mod 2^64
    member.confirm(answered)      a signature over the list of members that answered, and all agreed before
    member.reveal(signatures)     a share of the seed of each that answered, and of the key of each other

Then the relay's `Summation.total(…)` removes the masks. It learns the sum over the members that answered, and
nothing else, as long as fewer than a third of the members tell it their secrets. Members may drop out at
every step while `threshold` of them are left, which is above two thirds of all: every member checks that
itself, and

- reveals nothing before `threshold` members have signed exactly the list that it has signed itself. Two lists
  would need a member that signs both, whichever lists the relay sends;
- signs one list a session, and only one with its own name: it never reveals a share of its own mask key;
- signs, with the list, the keys of all members in this session: a signature of another session does not fit.

`terms` are facts about the sum on which members must agree, such as the weights of all: members with
different terms have masks that do not cancel and signatures that do not count. Members without an identity
are for simulations: they follow the same steps and trust the relay about who is who. `to_bytes` and `resumed`
carry a member from process to process.

A carrier of a sum transports named bytes (`Parts`): `Member.step` takes those of a step and returns those for
the relay, where `Summation` stores them and computes what each member gets next.

Sums are exact modulo 2^64. `FixedPoint` turns real vectors into integers and back, and refuses values that
would wrap around, so a diverging model is an error and not a random number.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import ArrayLike, NDArray

from isthmus.errors import PrivacyError, ProtocolError
from isthmus.private import shamir

Words = NDArray[np.uint64]
Parts = dict[str, bytes]
"""The content of a step, by member: keys, boxes, a masked vector, signatures; shares by kind and member."""
STEPS = ("agree", "share", "mask", "confirm", "reveal")

_SECRET, _SIGNATURE = shamir.SECRET, 64


def least_threshold(members: int) -> int:
    """The fewest of `members` that may finish a sum: ⌊2n/3⌋ + 1."""
    return 2 * members // 3 + 1


@dataclass(frozen=True, slots=True)
class Advert:
    """A member's public keys for one session."""

    name: str
    sealing_key: bytes
    mask_key: bytes
    signature: bytes = b""

    def statement(self, session: bytes) -> bytes:
        """The bytes that the signature covers."""
        parts = (b"isthmus secure sum, keys", session, self.name.encode(), self.sealing_key, self.mask_key)
        return joined(parts)

    def to_bytes(self) -> bytes:
        """Both keys and the signature."""
        return self.sealing_key + self.mask_key + self.signature

    @classmethod
    def of(cls, name: str, data: bytes) -> Advert:
        """The advert of a member, from the bytes of `to_bytes`."""
        if len(data) not in (2 * _SECRET, 2 * _SECRET + _SIGNATURE):
            raise ProtocolError("public keys of the wrong length")
        return cls(name, data[:_SECRET], data[_SECRET : 2 * _SECRET], data[2 * _SECRET :])


@dataclass(frozen=True, slots=True)
class Revealed:
    """One member's shares: of the seeds of members that answered, of the mask keys of those that did not."""

    seeds: Mapping[str, bytes]
    keys: Mapping[str, bytes]

    def parts(self) -> Parts:
        """The shares as named bytes: `seed/MEMBER` and `key/MEMBER`."""
        named = {f"seed/{name}": share for name, share in self.seeds.items()}
        return named | {f"key/{name}": share for name, share in self.keys.items()}

    @classmethod
    def of(cls, parts: Mapping[str, bytes]) -> Revealed:
        """The shares as named bytes: `seed/MEMBER` and `key/MEMBER`."""
        seeds, keys = (
            {label.removeprefix(kind): share for label, share in parts.items() if label.startswith(kind)}
            for kind in ("seed/", "key/")
        )
        return cls(seeds, keys)


@dataclass(eq=False)
class Member:
    """One silo's side of one session. Make a new one for every sum.

    `identity` signs; `trusted` maps the other members to the identities they must have. Without `trusted`,
    the relay is trusted about who is who. Any party may propose `threshold`: `share` refuses one that is too
    low.
    """

    name: str
    session: bytes
    threshold: int
    identity: Ed25519PrivateKey | None = None
    trusted: Mapping[str, Ed25519PublicKey] | None = None
    entropy: Callable[[int], bytes] = os.urandom
    terms: bytes = field(default=b"", init=False)
    _peers: dict[str, Advert] = field(default_factory=dict, init=False, repr=False)
    _shares: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, init=False, repr=False)
    _masked: bool = field(default=False, init=False, repr=False)
    _survivors: tuple[str, ...] = field(default=(), init=False, repr=False)
    _revealed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threshold < 2:
            raise PrivacyError("a secure sum needs a threshold of at least 2 members")
        self._sealing = X25519PrivateKey.from_private_bytes(self.entropy(_SECRET))
        self._masking = X25519PrivateKey.from_private_bytes(self.entropy(_SECRET))
        self._seed = self.entropy(_SECRET)

    def to_bytes(self) -> bytes:
        """The member with all its secrets, for its own silo to store between steps."""
        secrets = self._sealing.private_bytes_raw(), self._masking.private_bytes_raw(), self._seed
        state = {
            "name": self.name,
            "session": self.session.hex(),
            "threshold": self.threshold,
            "secrets": [secret.hex() for secret in secrets],
            "peers": {name: advert.to_bytes().hex() for name, advert in self._peers.items()},
            "shares": {name: [seed.hex(), key.hex()] for name, (seed, key) in self._shares.items()},
            "terms": self.terms.hex(),
            "masked": self._masked,
            "survivors": self._survivors,
            "revealed": self._revealed,
        }
        return json.dumps(state).encode()

    @classmethod
    def resumed(
        cls,
        data: bytes,
        *,
        identity: Ed25519PrivateKey | None = None,
        trusted: Mapping[str, Ed25519PublicKey] | None = None,
    ) -> Member:
        """Restore a member from the bytes of `to_bytes`."""
        state = json.loads(data)
        if not isinstance(state.get("peers"), dict):
            raise ProtocolError("a secure sum begun by an older release of Isthmus (begin a new one)")
        secrets = iter([bytes.fromhex(secret) for secret in state["secrets"]])
        session, threshold = bytes.fromhex(state["session"]), state["threshold"]
        member = cls(state["name"], session, threshold, identity, trusted, lambda size: next(secrets))
        member.entropy = os.urandom
        member.terms = bytes.fromhex(state["terms"])
        member._peers = {name: Advert.of(name, bytes.fromhex(keys)) for name, keys in state["peers"].items()}
        member._shares = {
            name: (bytes.fromhex(seed), bytes.fromhex(key)) for name, (seed, key) in state["shares"].items()
        }
        member._masked, member._revealed = state["masked"], state["revealed"]
        member._survivors = tuple(state["survivors"])
        return member

    @property
    def peers(self) -> frozenset[str]:
        """All members whose keys were accepted, including this one."""
        return frozenset(self._peers)

    def step(
        self, step: str, incoming: Mapping[str, bytes], *, vector: ArrayLike = (), terms: bytes = b""
    ) -> Parts:
        """Carry out one of `STEPS`: take what the relay hands this member, and return what it sends back."""
        match step:
            case "agree":
                return {self.name: self.advertise().to_bytes()}
            case "share":
                return self.share([Advert.of(name, keys) for name, keys in sorted(incoming.items())])
            case "mask":
                return {self.name: self.mask(vector, incoming, terms=terms).astype("<u8").tobytes()}
            case "confirm":
                return {self.name: self.confirm(list(incoming))}
            case "reveal":
                return self.reveal(incoming).parts()
        raise ProtocolError("a step that no secure sum has")

    def advertise(self) -> Advert:
        """Step 1: the public keys of this session."""
        bare = Advert(
            self.name,
            self._sealing.public_key().public_bytes_raw(),
            self._masking.public_key().public_bytes_raw(),
        )
        signature = self._signed(bare.statement(self.session))
        return Advert(bare.name, bare.sealing_key, bare.mask_key, signature)

    def share(self, adverts: Sequence[Advert]) -> dict[str, bytes]:
        """Step 2: for every other member a sealed box with its shares of this member's two secrets."""
        if self._shares:
            raise ProtocolError("this member has shared its secrets in this session already")
        self._peers = self._checked(adverts)
        names = sorted(self._peers)
        seeds = shamir.split(self._seed, self.threshold, len(names), self.entropy)
        secret = self._masking.private_bytes_raw()
        keys = shamir.split(secret, self.threshold, len(names), self.entropy)
        shares = dict(zip(names, zip(seeds, keys, strict=True), strict=True))
        own_seed, _ = shares.pop(self.name)  # drop the share of its own key: no honest party needs it
        self._shares = {self.name: (own_seed, b"")}
        return {name: self._seal(name, seed + key) for name, (seed, key) in shares.items()}

    def _checked(self, adverts: Sequence[Advert]) -> dict[str, Advert]:
        peers = {advert.name: advert for advert in adverts}
        if len(peers) != len(adverts) or peers.get(self.name) != self.advertise():
            raise ProtocolError("the list of members names somebody twice or misquotes this member")
        if not least_threshold(len(peers)) <= self.threshold <= len(peers):
            raise ProtocolError("the threshold must be above two thirds of the members, and not above all")
        for name, advert in peers.items():
            if self.trusted is not None and name not in {*self.trusted, self.name}:
                raise ProtocolError("the list of members names somebody this member does not know")
            if not self._is_signed(name, advert.signature, advert.statement(self.session)):
                raise ProtocolError("a member's keys are not signed by its identity")
        return peers

    def mask(self, vector: ArrayLike, boxes: Mapping[str, bytes], *, terms: bytes = b"") -> Words:
        """Step 3: the vector under its masks. `boxes` holds the box of each other member for this one;
        members without a box have dropped out and take no part in the masks."""
        if self._masked:
            raise ProtocolError("this member has masked a vector in this session already")
        if self.name not in self._shares or self.name in boxes:
            raise ProtocolError("boxes for a member that has not shared its secrets, or one of its own")
        if len(boxes) + 1 < self.threshold:
            raise ProtocolError("fewer members shared their secrets than the threshold")
        self._shares |= {name: self._open(name, box) for name, box in boxes.items()}
        self._masked, self.terms = True, terms
        masked = as_words(vector) + _stream(self._seed, self.session, b"seed", np.size(vector))
        scope = joined((self.session, terms))
        for name in boxes:
            public, size = self._peers[name].mask_key, masked.size
            pad = pairwise_mask(self._masking, public, (self.name, name), scope, size)
            masked = masked + pad if self.name < name else masked - pad
        return masked

    def confirm(self, answered: Sequence[str]) -> bytes:
        """Step 4: a signature over the list of members whose vectors arrived; one list a session."""
        survivors = tuple(sorted(answered))
        if not self._masked or len(set(survivors)) != len(survivors):
            raise ProtocolError("a list of those who answered before all have, or with somebody twice")
        if len(survivors) < self.threshold or not set(survivors) <= set(self._shares):
            raise ProtocolError("the list of those who answered is too short or names a stranger")
        if self.name not in survivors:
            raise ProtocolError("the list of those who answered leaves out this member, who has")
        if self._survivors not in ((), survivors):
            raise ProtocolError("this member has signed another list of those who answered")
        self._survivors = survivors
        return self._signed(self._agreement())

    def reveal(self, signatures: Mapping[str, bytes]) -> Revealed:
        """Step 5: shares of the seeds of members that answered and of the mask keys of the rest. Raises
        ProtocolError unless `threshold` members have signed the same list as this one."""
        if self._revealed:
            raise ProtocolError("this member has revealed its shares in this session already")
        agreement, signers = self._agreement(), set(signatures) & set(self._survivors)
        agreed = [name for name in signers if self._is_signed(name, signatures[name], agreement)]
        if not self._survivors or len(agreed) < self.threshold:
            raise ProtocolError("too few members have signed the same list of those who answered")
        self._revealed = True
        return Revealed(
            {name: self._shares[name][0] for name in self._survivors},
            {name: key for name, (_, key) in self._shares.items() if name not in self._survivors},
        )

    def _agreement(self) -> bytes:
        """The statement to be signed, with a digest of all that members must agree on before anything is
        opened."""
        keys = [advert.statement(self.session) for _, advert in sorted(self._peers.items())]
        lists = [joined(name.encode() for name in names) for names in (sorted(self._shares), self._survivors)]
        settled = (self.session, self.threshold.to_bytes(4), joined(keys), self.terms, *lists)
        return joined((b"isthmus secure sum, survivors", hashlib.sha256(joined(settled)).digest()))

    def _signed(self, statement: bytes) -> bytes:
        return b"" if self.identity is None else self.identity.sign(statement)

    def _is_signed(self, name: str, signature: bytes, statement: bytes) -> bool:
        """Whether a member has signed; without `trusted` the relay is trusted."""
        if name == self.name:
            return signature == self._signed(statement)
        if self.trusted is None:
            return True
        try:
            self.trusted[name].verify(signature, statement)
        except (InvalidSignature, KeyError):
            return False
        return True

    def _seal(self, name: str, secret: bytes) -> bytes:
        nonce = self.entropy(12)
        label = joined((self.name.encode(), name.encode(), self.session))
        return nonce + ChaCha20Poly1305(self._box_key(name)).encrypt(nonce, secret, label)

    def _open(self, name: str, box: bytes) -> tuple[bytes, bytes]:
        if name not in self._peers:
            raise ProtocolError("a box from somebody who is not a member")
        try:
            label = joined((name.encode(), self.name.encode(), self.session))
            secret = ChaCha20Poly1305(self._box_key(name)).decrypt(box[:12], box[12:], label)
        except (InvalidTag, ValueError):
            raise ProtocolError("a box that was not sealed for this member in this session") from None
        if len(secret) != 2 * shamir.SHARE:
            raise ProtocolError("a box of the wrong size")
        return secret[: shamir.SHARE], secret[shamir.SHARE :]

    def _box_key(self, name: str) -> bytes:
        return _agree(self._sealing, self._peers[name].sealing_key, b"box" + self.session)


@dataclass(eq=False)
class Summation:
    """The relay's side of one session: stores what members have sent and computes what each gets next."""

    session: bytes
    threshold: int
    size: int
    """Length of a vector."""
    adverts: dict[str, Advert] = field(default_factory=dict)
    boxes: dict[str, Parts] = field(default_factory=dict)
    masked: dict[str, Words] = field(default_factory=dict)
    signatures: Parts = field(default_factory=dict)
    revealed: dict[str, Revealed] = field(default_factory=dict)

    def next(self, step: str, name: str) -> Parts:
        """The parts to hand a member for a step."""
        match step:
            case "share":
                return {peer: advert.to_bytes() for peer, advert in self.adverts.items()}
            case "mask":
                return {peer: boxes[name] for peer, boxes in self.boxes.items() if name in boxes}
            case "confirm":
                return dict.fromkeys(sorted(self.masked), b"")
            case "reveal":
                return dict(self.signatures)
        return {}

    def receive(self, step: str, name: str, parts: Mapping[str, bytes]) -> None:
        """Store the parts from a member. Raises ProtocolError if they are not those of the step."""
        if step in ("agree", "mask", "confirm") and set(parts) != {name}:
            raise ProtocolError("sent nothing, or something in another's name")
        match step:
            case "agree":
                self.adverts[name] = Advert.of(name, parts[name])
            case "share":
                if parts.keys() != self.adverts.keys() - {name}:
                    raise ProtocolError("did not share its secrets with everybody")
                self.boxes[name] = dict(parts)
            case "mask":
                if len(parts[name]) != 8 * self.size:
                    raise ProtocolError("sent a masked vector of the wrong size")
                self.masked[name] = np.frombuffer(parts[name], dtype="<u8").astype(np.uint64)
            case "confirm":
                self.signatures[name] = parts[name]
            case "reveal":
                shares = Revealed.of(parts)
                gone = self.boxes.keys() - self.masked.keys()
                if shares.seeds.keys() != self.masked.keys() or shares.keys.keys() != gone:
                    raise ProtocolError("revealed other shares than it was asked for")
                self.revealed[name] = shares

    def total(self, terms: bytes = b"") -> Words:
        """The sum modulo 2^64 over the members whose vectors arrived. Raises ProtocolError until enough
        members have revealed their shares."""
        if len(self.revealed) < self.threshold:
            raise ProtocolError(
                f"{len(self.revealed)} members revealed their shares, {self.threshold} are needed"
            )
        summed: Words = np.stack(list(self.masked.values())).sum(axis=0, dtype=np.uint64)
        chosen = list(self.revealed.values())[: self.threshold]
        for name in self.masked:
            seed = shamir.combine([shares.seeds[name] for shares in chosen])
            summed -= _stream(seed, self.session, b"seed", summed.size)
        scope = joined((self.session, terms))
        for gone in sorted(self.boxes.keys() - self.masked.keys()):
            secret = shamir.combine([shares.keys[gone] for shares in chosen])
            key = X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() != self.adverts[gone].mask_key:
                raise ProtocolError("the revealed shares do not restore a dropped member's key")
            for name in self.masked:
                pad = pairwise_mask(key, self.adverts[name].mask_key, (gone, name), scope, summed.size)
                summed = summed - pad if name < gone else summed + pad
        return summed


def sum_in_memory(
    vectors: Mapping[str, ArrayLike],
    *,
    threshold: int,
    session: bytes,
    dropped: Sequence[str] = (),
    entropy: Callable[[int], bytes] = os.urandom,
) -> Words:
    """Run the whole protocol in one process, for simulation; `dropped` members leave before step 3."""
    members = {name: Member(name, session, threshold, entropy=entropy) for name in vectors}
    sums = Summation(session, threshold, max((np.size(vector) for vector in vectors.values()), default=0))
    for step in STEPS:
        there = [name for name in members if step in ("agree", "share") or name not in dropped]
        for name, incoming in [(name, sums.next(step, name)) for name in there]:
            sums.receive(step, name, members[name].step(step, incoming, vector=vectors[name]))
    return sums.total()


def pairwise_mask(
    secret: X25519PrivateKey, public: bytes, pair: tuple[str, str], session: bytes, size: int
) -> Words:
    """The mask that two members share; the one whose name sorts first adds it, the other subtracts it."""
    first, second = sorted(pair)
    label = joined((first.encode(), second.encode(), session))
    key = _agree(secret, public, b"mask" + label)
    return _stream(key, session, b"pair", size)


def _agree(secret: X25519PrivateKey, public: bytes, purpose: bytes) -> bytes:
    try:
        agreed = secret.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolError("a public key that is no point of the curve") from None
    return HKDF(hashes.SHA256(), 32, salt=None, info=b"isthmus " + purpose).derive(agreed)


def _stream(key: bytes, session: bytes, purpose: bytes, size: int) -> Words:
    """`size` uniform 64-bit words: the ChaCha20 key stream of a key bound to session and purpose."""
    bound = HKDF(hashes.SHA256(), 32, salt=session, info=b"isthmus stream " + purpose).derive(key)
    cipher = Cipher(ChaCha20(bound, b"\x00" * 16), mode=None).encryptor()
    return np.frombuffer(cipher.update(b"\x00" * (8 * size)), dtype="<u8").astype(np.uint64)


def joined(parts: Iterable[bytes]) -> bytes:
    """Join parts with their lengths before them, so that no two sequences of parts give the same bytes."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def as_words(vector: ArrayLike) -> Words:
    """Integers, negative ones included, as residues modulo 2^64."""
    values = np.asarray(vector)
    if values.dtype.kind not in "iu":
        raise PrivacyError("a secure sum takes integers (quantise real vectors first)")
    return values.reshape(-1).astype(np.int64 if values.dtype.kind == "i" else np.uint64).view(np.uint64)


def as_signed(words: Words) -> NDArray[np.int64]:
    """Residues back as integers around zero."""
    return words.view(np.int64)


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Real numbers as integer multiples of 2^-bits, with room for `members` summands."""

    members: int
    bits: int = 32

    @property
    def limit(self) -> float:
        """The largest magnitude a summand may have."""
        return float(2 ** (63 - self.bits) // (2 * self.members))

    def encode(self, vector: ArrayLike, rng: np.random.Generator | None = None) -> NDArray[np.int64]:
        """Round to the nearest multiple; with `rng`, randomly to one of the two neighbours, with a mean error
        of 0."""
        values = np.asarray(vector, dtype=np.float64).reshape(-1)
        if not np.isfinite(values).all() or (np.abs(values) > self.limit).any():
            raise PrivacyError(
                f"a value is not finite or beyond ±{self.limit:g}, the range of the secure sum"
                " (a model whose parameters grow without bound cannot be summed securely)"
            )
        scaled = values * 2.0**self.bits
        if rng is None:
            return np.rint(scaled).astype(np.int64)
        floor = np.floor(scaled)
        return (floor + (rng.random(len(values)) < scaled - floor)).astype(np.int64)

    def decode(self, words: Words) -> NDArray[np.float64]:
        """The real sum of a total whose masks were removed."""
        return as_signed(words).astype(np.float64) * 2.0**-self.bits
