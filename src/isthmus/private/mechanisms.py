"""Ways to release counts: noise that is drawn once from a keyed stream, and the sensitivity and cost of each
way.

The noise of a cell is PRF(key; domain, cell block, version nonce), with AES-256 as the function: the domain
(mechanism, ε, rows, width, hash epoch, field) and the cell make the cipher's key, the document version's
random nonce is the block that it encrypts. This is counter mode with nonces for counters: one call gives the
noise of one cell for all documents, a cell always has the same noise, and a version stores sixteen bytes.

Integers come from the words by inversion of the exact distribution function in integer arithmetic: sound
mechanisms release no floating-point value, so nothing leaks through its last bits. The distribution is that
of the formula up to 2^-64 per cell; the stream is only computationally random, so the guarantee is
computational.

All mechanisms have the same interface, and each states its sensitivity and its cost:

    one_shot                every cell noised once; asking again, or by other peers, costs nothing
    scalar                  the signed median of a word's cells plus noise; every word has a cost
    per_cell                the cells of an obfuscated vector, noise for each; every vector has a cost
    insecure_shared_noise   the CS-F-LTR paper's: one draw for all cells of a vector, so differences are exact

Neighbours differ in one replaced word, which changes at most two cells of a row by one each or, with signs,
one cell by two: L1 sensitivity 2 per row. All noise is keyed, so a repeated question gets the same answer,
and the noise of the sound mechanisms is integer. They are ε-private for the ε of their cost; the last one is
not private at all, must be requested by its name, warns, and costs ε = ∞.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError, PrivacyError, ProtocolError
from isthmus.private.cost import Cost
from isthmus.private.messages import Terms
from isthmus.private.sketch import CountMin, CountSketch, Sketch

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

    Added to an integer that changes by at most Δ, it is (rate·Δ)-private. An infinite rate means no noise.
    """

    rate: float

    def __post_init__(self) -> None:
        if not self.rate >= 2e-5:
            raise PrivacyError(f"noise of rate {self.rate:g} would drown everything (choose a larger ε)")

    @property
    def ratio(self) -> float:
        """The ratio a: the probability of each further step from zero, relative to the one before."""
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
        """Map uniform 64-bit words to integers with this distribution, by inversion."""
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
        while (tail := tail * ratio >> 160) >> 160:  # fixed point with 160 fractional bits
            below.append(tail >> 160)
        above = [2**64 - cut for cut in below]
        return np.array([*reversed(below), *above], dtype=np.uint64)

    @cached_property
    def _guide(self) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """For every prefix of a word, the first cut above it, and whether no cut separates words with that
        prefix."""
        starts = np.arange(1 << _GUIDE, dtype=np.uint64) << np.uint64(64 - _GUIDE)
        ends = starts | np.uint64((1 << (64 - _GUIDE)) - 1)
        first = np.searchsorted(self._cuts, starts, side="right")
        return first.astype(np.int32), first == np.searchsorted(self._cuts, ends, side="right")

    def draw(self, size: int, entropy: Entropy = os.urandom) -> NDArray[np.int32]:
        """Draw fresh noise from the operating system's entropy, which nobody can reproduce."""
        return self.of(np.frombuffer(entropy(8 * size), dtype="<u8").astype(np.uint64))


@dataclass(frozen=True, repr=False)
class NoiseKey:
    """The secret behind all noise of a silo. A party that has it can remove the noise from released
    values."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != KEY:
            raise PrivacyError(f"a noise key has {KEY} bytes, not {len(self.secret)}")

    @classmethod
    def fresh(cls, entropy: Entropy = os.urandom) -> NoiseKey:
        """Draw a new key; everything that is released under it must be charged anew."""
        return cls(entropy(KEY))

    @property
    def name(self) -> str:
        """A name that identifies this key and reveals nothing else about it."""
        return hashlib.blake2b(b"name", key=self.secret, digest_size=8, person=b"isthmus noise").hexdigest()

    def under(self, name: str) -> NoiseKey:
        """The key for counts that are made in the way of this name, the same at every call.

        The same noise on two ways of counting one text would reveal where the counts differ.
        """
        digest = hashlib.blake2b(name.encode(), key=self.secret, digest_size=KEY, person=b"isthmus counted")
        return NoiseKey(digest.digest())

    def words(self, domain: Sequence[Name], block: int, nonces: NDArray[np.uint8]) -> Words:
        """Two words for every nonce, from one block of the domain, of shape (nonces, 2)."""
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
            # ECB as bare AES: every block is another version's nonce, and the output is noise, not ciphertext
            cipher = Cipher(algorithms.AES256(spelled.digest()), modes.ECB()).encryptor()
            streams.append(cipher.update(plain))
        drawn = np.frombuffer(b"".join(streams), dtype="<u8").astype(np.uint64, copy=False)
        return drawn.reshape(len(blocks), -1, 2)

    def noise(
        self, law: Geometric, domain: Sequence[Name], cells: IntArray, nonces: NDArray[np.uint8]
    ) -> NDArray[np.int32]:
        """The noise of cells in all documents, of shape (cells, documents); cells 2i and 2i + 1 share a
        block."""
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
    """Random nonces for `count` document versions; never derived from the text."""
    return np.frombuffer(entropy(NONCE * count), dtype=np.uint8).reshape(count, NONCE)


def _spelled(names: Sequence[Name]) -> bytes:
    """Encode names with their types and lengths, so that no two domains have the same encoding."""
    parts = [f"{type(name).__name__}:{name!r}".encode() for name in names]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


Columns = NDArray[np.uint32]

MEDIAN = math.pi / 2
"""The variance of a median relative to that of a mean, for values that are nearly normal."""


@dataclass(frozen=True, eq=False)
class FieldData:
    """An owner's data of one field: the sketches, and the key and nonces of their noise."""

    terms: Terms
    sketch: Sketch
    key: NoiseKey
    nonces: NDArray[np.uint8]

    def domain(self, *more: str) -> tuple[str | int | float, ...]:
        """The domain of the noise, which separates it from any other noise under the same key."""
        terms = self.terms
        parts = (terms.mechanism, terms.epsilon, terms.rows, terms.width, terms.epoch, terms.field)
        # with the hash functions: the same noise on two counts would reveal their difference
        return (*parts, self.sketch.family.name, *more)

    def cells(self, columns: Columns) -> NDArray[np.int32]:
        """The true values at one column of every row, of shape (words, rows, documents)."""
        flat = (columns + np.arange(self.terms.rows) * self.terms.width).ravel()
        cells, back = np.unique(flat, return_inverse=True)
        values: NDArray[np.int32] = self.sketch.columns(cells)[back].reshape(*columns.shape, -1)
        return values


@dataclass(frozen=True)
class Mechanism:
    """A way to release counts. `epsilon` is charged once, or for every word or vector that is answered."""

    name: ClassVar[str]
    sketch: ClassVar[type[Sketch]]
    signed: ClassVar[bool] = False
    """Whether a column from `width` on stands for column − width with a negative sign."""
    obfuscated: ClassVar[bool] = False
    """Whether a vector mixes rows of a real word with rows of its decoys (eq. 4 of the paper)."""

    epsilon: float
    rows: int

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(f"ε = {self.epsilon}", key="epsilon", value=self.epsilon, expected="above 0")
        if not 1 <= self.rows <= 255:
            raise ConfigError(f"{self.rows} rows", key="rows", value=self.rows, expected="1 to 255")

    @property
    def rate(self) -> float:
        """The rate of the noise on one value: ε/(2z) where all z rows are noised and two cells change in
        each."""
        return self.epsilon / (2 * self.rows)

    @cached_property
    def law(self) -> Geometric:
        """The noise on one value."""
        return Geometric(self.rate)

    @property
    def sensitivity(self) -> float:
        """The L1 change of an answer between neighbours: two per row."""
        return 2.0 * self.rows

    def costs(self, terms: Terms, columns: Columns) -> list[Cost]:
        """The cost of answering these columns, for every document: ε for every distinct word or vector.

        The removed and the inserted word may fall into one cell, so the noise they meet is not independent.
        """
        about = self.name, (terms.field,), self.charged, self.sensitivity, 1 / self.law.rate
        names = dict.fromkeys(_names(terms, columns))
        return [Cost(*about, name, shared=False, halves=False) for name in names]

    @property
    def charged(self) -> float:
        """The ε that is charged for one answer."""
        return self.epsilon

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """The noisy values, of shape (words, parts, documents)."""
        raise NotImplementedError

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """The asker's estimate from an answer, of shape (words, documents).

        `signs` (rows, words) are the signs of the words in question, `used` (words, rows used) the rows in
        which they stand.
        """
        raise NotImplementedError

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """The variance of an estimate from `used` rows, in documents with these second moments."""
        raise NotImplementedError

    def check(self, terms: Terms, columns: Columns) -> None:
        """Raise ProtocolError for columns that do not exist."""
        if (columns >= terms.width * (2 if self.signed else 1)).any():
            raise ProtocolError("a question about a column that does not exist")


@dataclass(frozen=True)
class OneShot(Mechanism):
    """Count-Min cells with two-sided geometric noise of rate ε/(2z), drawn once for every cell.

    The sensitivity is 2z (z rows, two cells each): ε-private for any number of answered cells and peers.
    """

    name = "one_shot"
    sketch = CountMin

    epsilon: float = 8.0
    rows: int = 1

    def costs(self, terms: Terms, columns: Columns) -> list[Cost]:
        """A single charge, the same for every question."""
        size = f"{terms.rows} × {terms.width} cells"
        release = f"{terms.field}, {size}, ε = {terms.epsilon!r}, epoch {terms.epoch}"
        scale = 2 * self.rows / self.epsilon
        return [Cost(self.name, (terms.field,), self.epsilon, 2.0 * self.rows, scale, release)]

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """The cells plus their noise; cells that are zero are noised like all others."""
        cells, back = np.unique(columns + np.arange(self.rows) * data.terms.width, return_inverse=True)
        noisy = data.sketch.columns(cells) + self.noise(data, cells)
        values: NDArray[Any] = noisy[back.ravel()].reshape(*columns.shape, len(data.sketch))
        return values

    def noise(self, data: FieldData, cells: IntArray) -> NDArray[np.int32]:
        """The noise of cells in all documents, (cells, documents), the same in every kind of release."""
        return data.key.noise(self.law, data.domain(), cells, data.nonces)

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """The cell itself; with several rows their median, because a minimum would prefer negative noise."""
        return values[:, 0] if self.rows == 1 else np.median(values, axis=1)

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """F₂/w + 2a/(1 − a)² for one row; times (π/2)/z for the median of z rows."""
        return (moments / width + self.law.variance) * (1 if self.rows == 1 else MEDIAN / self.rows)


@dataclass(frozen=True)
class Scalar(Mechanism):
    """The signed median of a word's cells with noise of rate ε/2 (sensitivity 2), charged for every word."""

    name = "scalar"
    sketch = CountSketch
    signed = True

    epsilon: float = 0.5
    rows: int = 10

    @property
    def rate(self) -> float:
        """ε/2."""
        return self.epsilon / 2

    @property
    def sensitivity(self) -> float:
        """The most that a median of cells can change: two."""
        return 2.0

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """Medians, rounded down to integers, plus noise."""
        signs = np.where(columns >= data.terms.width, -1, 1).astype(np.int8)
        cells = data.cells(columns % np.uint32(data.terms.width)).swapaxes(0, 1)
        middle = np.floor(CountSketch.combine(cells, signs.T)).astype(np.int32)
        noise = [_noise(self, data, name, peer, parts=1) for name in _names(data.terms, columns)]
        noisy: NDArray[Any] = middle[:, None, :] + np.stack(noise)
        return noisy

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """The answer unchanged: one number for each word and document."""
        first: NDArray[Any] = values[:, 0]
        return first

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """The variance of the median plus that of the noise."""
        return MEDIAN * moments / (width * self.rows) + self.law.variance


@dataclass(frozen=True)
class Vectors(Mechanism):
    """Mechanisms that answer the z cells of an obfuscated vector."""

    sketch = CountSketch
    obfuscated = True

    epsilon: float = 0.5
    rows: int = 30

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """median_{a ∈ used} g_a(t)·v_a over the rows that belong to the real word: eq. (6) with its sign."""
        chosen = np.take_along_axis(values, used[:, :, None], axis=1)
        facing = np.take_along_axis(signs.T, used, axis=1)
        return CountSketch.combine(chosen.swapaxes(0, 1), facing.T)


@dataclass(frozen=True)
class PerCell(Vectors):
    """The z cells of an obfuscated vector, noise of rate ε/(2z) each, charged for every vector (sensitivity
    2z)."""

    name = "per_cell"

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """Cells plus independent noise."""
        noise = [_noise(self, data, name, peer, parts=self.rows) for name in _names(data.terms, columns)]
        return data.cells(columns) + np.stack(noise)

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """F₂/w + 2a/(1 − a)² per row, times π/2 over the number of rows used."""
        return MEDIAN * (moments / width + self.law.variance) / used


@dataclass(frozen=True)
class SharedNoise(Vectors):
    """Paper mode: the cells of an obfuscated vector plus one Laplace(1/ε) draw for all of them (eq. 5).

    Cells are integers, so differences of the answers are free of noise: ε is infinite, whatever value is set.
    """

    name = "insecure_shared_noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        warnings.warn(
            f"insecure_shared_noise gives no privacy: its nominal ε = {self.epsilon:g} is really ∞,"
            " because differences of its answers are exact (fault C2); use it to reproduce the paper only",
            stacklevel=3,
        )

    @property
    def rate(self) -> float:
        """The rate of noise of ε on one cell, which is how the paper counts it."""
        return self.epsilon

    @property
    def charged(self) -> float:
        """∞ for every vector."""
        return math.inf

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """The cells plus one real number for each vector and document."""
        uniform = np.stack([self._words(data, name, peer) for name in _names(data.terms, columns)]) / 2.0**64
        noise = -np.sign(uniform - 0.5) * np.log1p(-2 * np.abs(uniform - 0.5)) / self.epsilon
        noisy: NDArray[Any] = data.cells(columns) + noise[:, None, :]
        return noisy

    def _words(self, data: FieldData, name: str, peer: str) -> NDArray[np.uint64]:
        return data.key.words(data.domain(peer, name), 0, data.nonces)[:, 0]

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """The variance of an estimate. More rows do not reduce that of a shared draw, contrary to Theorem 2
        (fault C2b)."""
        return MEDIAN * moments / (width * used) + 2 / self.epsilon**2


_KINDS: tuple[type[Mechanism], ...] = (OneShot, Scalar, PerCell, SharedNoise)
MECHANISMS = {kind.name: kind for kind in _KINDS}
"""The mechanisms by name."""


def mechanism(name: str, **settings: Any) -> Mechanism:
    """Make a mechanism by its name. Raises ConfigError for an unknown one."""
    if name not in MECHANISMS:
        raise ConfigError(f"no mechanism {name!r}", key=name, known=MECHANISMS)
    return MECHANISMS[name](**settings)


def _names(terms: Terms, columns: Columns) -> list[str]:
    """The name of the noise of each word or vector, with a digest of its columns."""
    prefix = f"{terms.field}, ε = {terms.epsilon!r}, epoch {terms.epoch}"
    digests = (hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest() for row in columns.astype("<u4"))
    return [f"{prefix}, {digest}" for digest in digests]


def _noise(kind: Mechanism, data: FieldData, name: str, peer: str, *, parts: int) -> NDArray[np.int32]:
    """The noise of the parts of one word or vector in all documents; every peer gets its own draw."""
    return data.key.noise(kind.law, data.domain(peer, name), np.arange(parts), data.nonces)
