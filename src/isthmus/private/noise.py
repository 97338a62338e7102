"""Noise that is drawn once: a secret keyed stream, and integers from it.

The noise of a cell is PRF(key; domain, cell block, version nonce), with AES-256 as the function: the domain
(mechanism, ε, rows, width, hash epoch, field) and the cell make the cipher's key, the document version's
random nonce is the block that it encrypts. This is counter mode with nonces for counters, so one call gives
the noise of one cell for all documents, a cell always answers the same, and a version keeps sixteen bytes.

Integers come from the words by inversion of the exact distribution function in integer arithmetic: no
floating-point value is ever released, so nothing leaks through its last bits. The distribution is that of the
formula up to 2^-64 a cell; with a stream that is only computationally random, so is the guarantee.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import PrivacyError

Words = NDArray[np.uint64]
Entropy = Callable[[int], bytes]
Name = str | int | float

KEY, NONCE = 32, 16
"""Bytes of a noise key and of a version's nonce."""

_AT_ONCE = 1 << 17  # blocks drawn at once, over all documents
_GUIDE = 12  # bits of a word that pick the entry of the guide table


@dataclass(frozen=True)
class Geometric:
    """Two-sided geometric noise: P(k) = (1 − a)/(1 + a) · a^|k| with a = e^{−rate}.

    Added to an integer that changes by at most Δ it is (rate·Δ)-private. An infinite rate is no noise.
    """

    rate: float

    def __post_init__(self) -> None:
        if not self.rate >= 2e-5:
            raise PrivacyError(f"noise of rate {self.rate:g} would drown everything (choose a larger ε)")

    @property
    def ratio(self) -> float:
        """a, how much less likely every further step from zero is."""
        return float(np.exp(-self.rate))

    @property
    def variance(self) -> float:
        """2a/(1 − a)²."""
        return 2 * self.ratio / (1 - self.ratio) ** 2

    def probabilities(self, values: IntArray) -> FloatArray:
        """P(k) of every value."""
        share: float = (1 - self.ratio) / (1 + self.ratio)
        with np.errstate(invalid="ignore"):
            falling: FloatArray = np.where(values == 0, 1.0, np.exp(-self.rate * np.abs(values)))
        return share * falling

    def of(self, words: Words) -> NDArray[np.int32]:
        """The integers that uniform 64-bit words stand for, by inversion."""
        first, exact = self._guide
        entry = (words >> np.uint64(64 - _GUIDE)).astype(np.intp)
        index = first[entry]
        unsure = np.flatnonzero(~exact[entry])
        index[unsure] = np.searchsorted(self._cuts, words[unsure], side="right")
        return index - np.int32(len(self._cuts) // 2)

    @cached_property
    def _cuts(self) -> Words:
        """⌊2^64 · P(noise ≤ k)⌋ for all k from −K to K − 1 where that is neither 0 nor 2^64."""
        if np.isinf(self.rate):
            return np.empty(0, dtype=np.uint64)
        with localcontext() as context:
            context.prec = 80
            exact = (-Decimal(self.rate)).exp()
            ratio, tail = int(exact * 2**160), int(Decimal(2**224) / (1 + exact))
        below: list[int] = []
        while (tail := tail * ratio >> 160) >> 160:  # fixed point with 160 bits behind it
            below.append(tail >> 160)
        above = [2**64 - cut for cut in below]
        return np.array([*reversed(below), *above], dtype=np.uint64)

    @cached_property
    def _guide(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """For every beginning of a word the first cut above it, and whether all such words lie there."""
        starts = np.arange(1 << _GUIDE, dtype=np.uint64) << np.uint64(64 - _GUIDE)
        ends = starts | np.uint64((1 << (64 - _GUIDE)) - 1)
        first = np.searchsorted(self._cuts, starts, side="right")
        return first.astype(np.int32), first == np.searchsorted(self._cuts, ends, side="right")

    def draw(self, size: int, entropy: Entropy = os.urandom) -> NDArray[np.int32]:
        """Fresh noise that nobody can draw again, from the operating system."""
        return self.of(np.frombuffer(entropy(8 * size), dtype="<u8").astype(np.uint64))


@dataclass(frozen=True, repr=False)
class NoiseKey:
    """The secret behind all noise of a silo. Whoever has it can take the noise off what was released."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != KEY:
            raise PrivacyError(f"a noise key has {KEY} bytes, not {len(self.secret)}")

    @classmethod
    def fresh(cls, entropy: Entropy = os.urandom) -> NoiseKey:
        """A new key; everything released under it must be charged anew."""
        return cls(entropy(KEY))

    @property
    def name(self) -> str:
        """What tells this key from others and nothing else about it."""
        return hashlib.blake2b(b"name", key=self.secret, digest_size=8, person=b"isthmus noise").hexdigest()

    def under(self, name: str) -> NoiseKey:
        """The key for counts that are made in the way of this name, the same whenever it is asked for.

        One noise on the same text counted in two ways would give away where the counts differ.
        """
        digest = hashlib.blake2b(name.encode(), key=self.secret, digest_size=KEY, person=b"isthmus counted")
        return NoiseKey(digest.digest())

    def words(self, domain: Sequence[Name], block: int, nonces: NDArray[np.uint8]) -> Words:
        """Two words for every nonce: those of the domain's block, of shape (nonces, 2)."""
        first: Words = self._blocks(domain, [block], nonces)[0]
        return first

    def _blocks(self, domain: Sequence[Name], blocks: Sequence[int], nonces: NDArray[np.uint8]) -> Words:
        """The words of several blocks, of shape (blocks, nonces, 2)."""
        plain = np.ascontiguousarray(nonces).tobytes()
        begun = hashlib.blake2b(_spelled(domain), key=self.secret, digest_size=32, person=b"isthmus noise")
        streams = []
        for block in blocks:
            spelled = begun.copy()
            spelled.update(_spelled((block,)))
            # ECB is the bare function: every block is another version's nonce and the output is no ciphertext
            cipher = Cipher(algorithms.AES256(spelled.digest()), modes.ECB()).encryptor()
            streams.append(cipher.update(plain))
        drawn = np.frombuffer(b"".join(streams), dtype="<u8").astype(np.uint64, copy=False)
        return drawn.reshape(len(blocks), -1, 2)

    def noise(
        self, law: Geometric, domain: Sequence[Name], cells: IntArray, nonces: NDArray[np.uint8]
    ) -> NDArray[np.int32]:
        """The noise of cells in all documents, (cells, documents); cells 2i and 2i + 1 share a block."""
        drawn = np.zeros((len(cells), len(nonces)), dtype=np.int32)
        if np.isinf(law.rate) or not drawn.size:
            return drawn
        order = np.argsort(cells, kind="stable")
        blocks, begins = np.unique(cells[order] // 2, return_index=True)
        ends = np.append(begins[1:], len(cells))
        step = max(1, _AT_ONCE // len(nonces))
        for first in range(0, len(blocks), step):
            some = blocks[first : first + step]
            rows = order[begins[first] : ends[first + len(some) - 1]]
            words = self._blocks((*domain, law.rate), some.tolist(), nonces)
            chosen = words[np.searchsorted(some, cells[rows] // 2), :, cells[rows] % 2]
            drawn[rows] = law.of(chosen.ravel()).reshape(chosen.shape)
        return drawn

    def __repr__(self) -> str:
        return "NoiseKey(…)"


def fresh_nonces(count: int, entropy: Entropy = os.urandom) -> NDArray[np.uint8]:
    """A random name for each of so many document versions; never made from the text."""
    return np.frombuffer(entropy(NONCE * count), dtype=np.uint8).reshape(count, NONCE)


def _spelled(names: Sequence[Name]) -> bytes:
    """Length-prefixed parts with their kind, so that no two domains spell the same."""
    parts = [f"{type(name).__name__}:{name!r}".encode() for name in names]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)
