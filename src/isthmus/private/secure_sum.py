"""A sum that nobody can take apart: integer vectors under masks that cancel.

The protocol is that of Bonawitz et al. (CCS 2017) for an honest-but-curious relay, in four steps:

    member.advertise()            two X25519 public keys, signed if the member has an identity
    member.share(adverts)         a mask seed and the mask key, in Shamir shares, one sealed box a peer
    member.mask(vector, boxes)    x + PRG(own seed) + Σ_{v>u} PRG(key_uv) − Σ_{v<u} PRG(key_uv)  mod 2^64
    member.reveal(answered)       for those who answered a share of their seed, for the others of their key

and the relay's `total(…)` takes the masks away. It learns the sum over the members who answered, and
nothing else, as long as fewer than `threshold` members tell it their secrets; any `threshold` of them
suffice to finish, so members may drop out at every step. A member never reveals both shares of one
peer and answers once per session, and the threshold lies above half of the members: so the relay
cannot ask one half about the seed and the other about the key of a vector that came late.

`terms` are what the members were told about the sum, such as everybody's weight: members who were told
different things have masks that do not cancel. `kept` and `resumed` carry a member from process to process.

Sums are exact modulo 2^64. `FixedPoint` turns real vectors into integers and back, and refuses values
that would wrap around, so a diverging model is an error and not a random number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
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

Words = NDArray[np.uint64]

_SECRET = 32
_SHARE = 4 + _SECRET + 16  # index, secret, padding block: what a Shamir share of 32 bytes takes


@dataclass(frozen=True, slots=True)
class Advert:
    """A member's public keys for one session."""

    name: str
    sealing_key: bytes
    mask_key: bytes
    signature: bytes = b""

    def told(self, session: bytes) -> bytes:
        """What the signature covers."""
        return (
            b"\x00".join((b"isthmus secure sum", session, self.name.encode()))
            + self.sealing_key
            + self.mask_key
        )


@dataclass(frozen=True, slots=True)
class Revealed:
    """One member's shares: of the seeds of those who answered, of the mask keys of those who did not."""

    seeds: Mapping[str, bytes]
    keys: Mapping[str, bytes]


@dataclass(eq=False)
class Member:
    """One silo's side of one session. Make a new one for every sum.

    `identity` signs the advert; `trusted` maps the other members to the identities they must have. Without it
    the relay is believed about who is who.
    """

    name: str
    session: bytes
    threshold: int
    identity: Ed25519PrivateKey | None = None
    trusted: Mapping[str, Ed25519PublicKey] | None = None
    entropy: Callable[[int], bytes] = os.urandom
    _peers: dict[str, Advert] = field(default_factory=dict, init=False, repr=False)
    _held: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, init=False, repr=False)
    _revealed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.threshold < 2:
            raise PrivacyError("a secure sum needs a threshold of at least 2 members")
        self._sealing = X25519PrivateKey.from_private_bytes(self.entropy(_SECRET))
        self._masking = X25519PrivateKey.from_private_bytes(self.entropy(_SECRET))
        self._seed = self.entropy(_SECRET)

    def kept(self) -> bytes:
        """The member with all its secrets, to be put away by its own silo between steps."""
        told = {
            "name": self.name,
            "session": self.session.hex(),
            "threshold": self.threshold,
            "secrets": [
                self._sealing.private_bytes_raw().hex(),
                self._masking.private_bytes_raw().hex(),
                self._seed.hex(),
            ],
            "peers": [
                [a.name, a.sealing_key.hex(), a.mask_key.hex(), a.signature.hex()]
                for a in self._peers.values()
            ],
            "held": {name: [seed.hex(), key.hex()] for name, (seed, key) in self._held.items()},
            "revealed": self._revealed,
        }
        return json.dumps(told).encode()

    @classmethod
    def resumed(
        cls,
        kept: bytes,
        *,
        identity: Ed25519PrivateKey | None = None,
        trusted: Mapping[str, Ed25519PublicKey] | None = None,
    ) -> Member:
        """The member that `kept` has put away."""
        told = json.loads(kept)
        secrets = iter([bytes.fromhex(secret) for secret in told["secrets"]])
        session = bytes.fromhex(told["session"])
        member = cls(
            told["name"], session, told["threshold"], identity, trusted, entropy=lambda size: next(secrets)
        )
        member.entropy = os.urandom
        member._peers = {name: Advert(name, *map(bytes.fromhex, keys)) for name, *keys in told["peers"]}
        member._held = {
            name: (bytes.fromhex(seed), bytes.fromhex(key)) for name, (seed, key) in told["held"].items()
        }
        member._revealed = told["revealed"]
        return member

    @property
    def peers(self) -> frozenset[str]:
        """All members whose keys were accepted, this one too."""
        return frozenset(self._peers)

    def advertise(self) -> Advert:
        """Step 1: the public keys of this session."""
        bare = Advert(
            self.name,
            self._sealing.public_key().public_bytes_raw(),
            self._masking.public_key().public_bytes_raw(),
        )
        if self.identity is None:
            return bare
        signature = self.identity.sign(bare.told(self.session))
        return Advert(bare.name, bare.sealing_key, bare.mask_key, signature)

    def share(self, adverts: Sequence[Advert]) -> dict[str, bytes]:
        """Step 2: for every member (this one too) a sealed box with its shares of our two secrets."""
        from flwr.common.secure_aggregation.crypto.shamir import create_shares

        self._peers = self._checked(adverts)
        names = sorted(self._peers)
        seeds = create_shares(self._seed, self.threshold, len(names))
        keys = create_shares(self._masking.private_bytes_raw(), self.threshold, len(names))
        return {
            name: self._seal(name, seed + key) for name, seed, key in zip(names, seeds, keys, strict=True)
        }

    def _checked(self, adverts: Sequence[Advert]) -> dict[str, Advert]:
        peers = {advert.name: advert for advert in adverts}
        if len(peers) != len(adverts) or peers.get(self.name) != self.advertise():
            raise ProtocolError("the list of members names somebody twice or misquotes this member")
        if not self.threshold <= len(peers) < 2 * self.threshold:
            raise ProtocolError("the threshold must be above half of the members and not above all of them")
        for advert in adverts:
            if len(advert.sealing_key) != _SECRET or len(advert.mask_key) != _SECRET:
                raise ProtocolError("a public key has the wrong length")
            if self.trusted is not None and advert.name != self.name:
                self._verify(advert)
        return peers

    def _verify(self, advert: Advert) -> None:
        known = (self.trusted or {}).get(advert.name)
        if known is None:
            raise ProtocolError("the list of members names somebody this member does not know")
        try:
            known.verify(advert.signature, advert.told(self.session))
        except InvalidSignature:
            raise ProtocolError("a member's keys are not signed by its identity") from None

    def mask(self, vector: ArrayLike, boxes: Mapping[str, bytes], *, terms: bytes = b"") -> Words:
        """Step 3: the vector under its masks. `boxes` holds what each member sealed for this one;
        members without a box dropped out and take no part in the masks."""
        if self._held:
            raise ProtocolError("this member has masked a vector in this session already")
        if self.name not in boxes or len(boxes) < self.threshold:
            raise ProtocolError("fewer members shared their secrets than the threshold")
        self._held = {name: self._open(name, box) for name, box in boxes.items()}
        masked = as_words(vector) + _stream(self._seed, self.session, b"seed", np.size(vector))
        for name in boxes:
            if name != self.name:
                public, size = self._peers[name].mask_key, masked.size
                pad = pairwise_mask(self._masking, public, (self.name, name), self.session + terms, size)
                masked = masked + pad if self.name < name else masked - pad
        return masked

    def reveal(self, answered: Sequence[str]) -> Revealed:
        """Step 4: shares of the seeds of those whose vector arrived, of the mask keys of the rest."""
        if self._revealed:
            raise ProtocolError("this member has revealed its shares in this session already")
        there = set(answered)
        if len(there) < self.threshold or not there <= set(self._held):
            raise ProtocolError("the list of those who answered is too short or names a stranger")
        self._revealed = True
        return Revealed(
            {name: seed for name, (seed, _) in self._held.items() if name in there},
            {name: key for name, (_, key) in self._held.items() if name not in there},
        )

    def _seal(self, name: str, secret: bytes) -> bytes:
        nonce = self.entropy(12)
        told = _label(self.name, name, self.session)
        return nonce + ChaCha20Poly1305(self._box_key(name)).encrypt(nonce, secret, told)

    def _open(self, name: str, box: bytes) -> tuple[bytes, bytes]:
        if name not in self._peers:
            raise ProtocolError("a box from somebody who is not a member")
        try:
            told = _label(name, self.name, self.session)
            secret = ChaCha20Poly1305(self._box_key(name)).decrypt(box[:12], box[12:], told)
        except (InvalidTag, ValueError):
            raise ProtocolError("a box that was not sealed for this member in this session") from None
        if len(secret) != 2 * _SHARE:
            raise ProtocolError("a box of the wrong size")
        return secret[:_SHARE], secret[_SHARE:]

    def _box_key(self, name: str) -> bytes:
        return _agree(self._sealing, self._peers[name].sealing_key, b"box" + self.session)


def total(
    masked: Mapping[str, Words],
    adverts: Sequence[Advert],
    revealed: Mapping[str, Revealed],
    *,
    session: bytes,
    threshold: int,
    shared: Sequence[str],
    terms: bytes = b"",
) -> Words:
    """The relay's last step: the sum of the vectors that arrived, modulo 2^64.

    `shared` names the members whose boxes were handed out in step 3, whether they answered or not.
    """
    if len(revealed) < threshold:
        raise ProtocolError(f"{len(revealed)} members revealed their shares, {threshold} are needed")
    summed: Words = np.stack(list(masked.values())).sum(axis=0, dtype=np.uint64)
    public = {advert.name: advert.mask_key for advert in adverts}
    for name in masked:
        seed = _combine([shares.seeds[name] for shares in revealed.values()], threshold)
        summed -= _stream(seed, session, b"seed", summed.size)
    for gone in sorted(set(shared) - set(masked)):
        secret = _combine([shares.keys[gone] for shares in revealed.values()], threshold)
        key = X25519PrivateKey.from_private_bytes(secret)
        if key.public_key().public_bytes_raw() != public[gone]:
            raise ProtocolError("the revealed shares do not restore a dropped member's key")
        for name in masked:
            pad = pairwise_mask(key, public[name], (gone, name), session + terms, summed.size)
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
    """The whole protocol in one process, for simulation; `dropped` leave before step 3."""
    members = {name: Member(name, session, threshold, entropy=entropy) for name in vectors}
    adverts = [member.advertise() for member in members.values()]
    sealed = {name: member.share(adverts) for name, member in members.items()}
    masked = {
        name: member.mask(vectors[name], {peer: boxes[name] for peer, boxes in sealed.items()})
        for name, member in members.items()
        if name not in dropped
    }
    revealed = {name: members[name].reveal(list(masked)) for name in masked}
    return total(masked, adverts, revealed, session=session, threshold=threshold, shared=list(sealed))


def pairwise_mask(
    secret: X25519PrivateKey, public: bytes, pair: tuple[str, str], session: bytes, size: int
) -> Words:
    """The mask two members share; the one whose name sorts first adds it, the other takes it away."""
    first, second = sorted(pair)
    key = _agree(secret, public, b"mask" + _label(first, second, session))
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


def _combine(shares: Sequence[bytes], threshold: int) -> bytes:
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    try:
        return combine_shares(list(shares[:threshold]))
    except ValueError:
        raise ProtocolError("the revealed shares do not fit together") from None


def _label(sender: str, receiver: str, session: bytes) -> bytes:
    """Length-prefixed, so that no two pairs of names spell the same label."""
    parts = (sender.encode(), receiver.encode(), session)
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

    def encode(self, vector: ArrayLike, rng: np.random.Generator) -> NDArray[np.int64]:
        """Round at random to a neighbouring multiple, so that the rounding error has mean zero."""
        values = np.asarray(vector, dtype=np.float64).reshape(-1)
        if not np.isfinite(values).all() or (np.abs(values) > self.limit).any():
            raise PrivacyError(
                f"a value is not finite or beyond ±{self.limit:g}, the range of the secure sum"
                " (a model whose parameters grow without bound cannot be summed securely)"
            )
        scaled = values * 2.0**self.bits
        floor = np.floor(scaled)
        return (floor + (rng.random(len(values)) < scaled - floor)).astype(np.int64)

    def decode(self, words: Words) -> NDArray[np.float64]:
        """The real sum that a masked total stands for."""
        return as_signed(words).astype(np.float64) * 2.0**-self.bits
