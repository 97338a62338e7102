"""How counts may leave a silo: one interface; each way states how sensitive it is and what it costs.

    one_shot                every cell noised once and for all; asking again, and by others, costs nothing
    scalar                  the signed median of a word's cells plus noise; every word asked for costs
    per_cell                the cells of an obfuscated vector, noise for each; every vector asked for costs
    insecure_shared_noise   the CS-F-LTR paper's: one draw for all cells of a vector, so differences are exact

Neighbours differ in one replaced word, which changes at most two cells of a row by one each, or with signs
one cell by two: L1 sensitivity 2 a row. All noise is keyed, so a repeated question gets the answer it got,
and that of the sound mechanisms is integer. They are ε-private for what their cost says; the last one is
not private at all, must be asked for by its name, warns, and costs ε = ∞.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError, ProtocolError
from isthmus.private.cost import Cost
from isthmus.private.messages import Terms
from isthmus.private.noise import Geometric, NoiseKey
from isthmus.private.sketch import CountMin, CountSketch, Sketch

Columns = NDArray[np.uint32]

MEDIAN = math.pi / 2
"""The variance of a median is that of a mean times this, for values that are nearly normal."""


@dataclass(frozen=True, eq=False)
class FieldData:
    """What the owner has of a field: the sketches, and what their noise is made of."""

    terms: Terms
    sketch: Sketch
    key: NoiseKey
    nonces: NDArray[np.uint8]

    def domain(self, *more: str) -> tuple[str | int | float, ...]:
        """What separates this noise from any other."""
        terms = self.terms
        parts = (terms.mechanism, terms.epsilon, terms.rows, terms.width, terms.epoch, terms.field)
        # with the hash functions: one noise on two different counts would give away their difference
        return (*parts, self.sketch.family.name, *more)

    def cells(self, columns: Columns) -> NDArray[np.int32]:
        """The true values at one column of every row, of shape (words, rows, documents)."""
        flat = (columns + np.arange(self.terms.rows) * self.terms.width).ravel()
        cells, back = np.unique(flat, return_inverse=True)
        values: NDArray[np.int32] = self.sketch.columns(cells)[back].reshape(*columns.shape, -1)
        return values


@dataclass(frozen=True)
class Mechanism:
    """A way to release counts. `epsilon` is paid once, or for every word or vector that is answered."""

    name: ClassVar[str]
    sketch: ClassVar[type[Sketch]]
    signed: ClassVar[bool] = False
    """Whether a column from `width` on means column − width with a negative sign."""
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
        """The rate of the noise on one value: ε/(2z) where all of z rows are noised, two cells each."""
        return self.epsilon / (2 * self.rows)

    @cached_property
    def law(self) -> Geometric:
        """The noise on one value."""
        return Geometric(self.rate)

    @property
    def sensitivity(self) -> float:
        """The L1 change of what is answered between neighbours: two cells a row."""
        return 2.0 * self.rows

    def costs(self, terms: Terms, columns: Columns) -> list[Cost]:
        """What answering these columns costs every document: ε for every distinct word or vector.

        The word that goes and the one that comes may meet in one cell, so the noise they meet is not
        independent.
        """
        about = self.name, (terms.field,), self.charged, self.sensitivity, 1 / self.law.rate
        names = dict.fromkeys(_names(terms, columns))
        return [Cost(*about, name, shared=False, halves=False) for name in names]

    @property
    def charged(self) -> float:
        """The ε of one answer as it is booked."""
        return self.epsilon

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """The noisy values, of shape (words, parts, documents)."""
        raise NotImplementedError

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """The asker's estimate, (words, documents), from the answer.

        `signs` (rows, words) are those of the words asked about, `used` (words, rows used) where they stand.
        """
        raise NotImplementedError

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """The variance of an estimate in documents of these second moments, from so many rows."""
        raise NotImplementedError

    def check(self, terms: Terms, columns: Columns) -> None:
        """Refuse columns that do not exist."""
        if (columns >= terms.width * (2 if self.signed else 1)).any():
            raise ProtocolError("a question about a column that does not exist")


@dataclass(frozen=True)
class OneShot(Mechanism):
    """Count-Min cells with two-sided geometric noise of rate ε/(2z), drawn once for every cell.

    Sensitivity 2z (z rows, two cells each): ε-private however many cells are answered and to whomever.
    """

    name = "one_shot"
    sketch = CountMin

    epsilon: float = 8.0
    rows: int = 1

    def costs(self, terms: Terms, columns: Columns) -> list[Cost]:
        """The same single charge whatever is asked."""
        size = f"{terms.rows} × {terms.width} cells"
        release = f"{terms.field}, {size}, ε = {terms.epsilon!r}, epoch {terms.epoch}"
        scale = 2 * self.rows / self.epsilon
        return [Cost(self.name, (terms.field,), self.epsilon, 2.0 * self.rows, scale, release)]

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """Cells plus their noise; cells that are zero are noised like all others."""
        cells, back = np.unique(columns + np.arange(self.rows) * data.terms.width, return_inverse=True)
        noisy = data.sketch.columns(cells) + self.noise(data, cells)
        values: NDArray[Any] = noisy[back.ravel()].reshape(*columns.shape, len(data.sketch))
        return values

    def noise(self, data: FieldData, cells: IntArray) -> NDArray[np.int32]:
        """The noise of cells in all documents, (cells, documents), the same however they are released."""
        return data.key.noise(self.law, data.domain(), cells, data.nonces)

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """The cell itself; with several rows their median, because a minimum would prefer negative noise."""
        return values[:, 0] if self.rows == 1 else np.median(values, axis=1)

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """F₂/w + 2a/(1 − a)² a row."""
        return (moments / width + self.law.variance) * (1 if self.rows == 1 else MEDIAN / self.rows)


@dataclass(frozen=True)
class Scalar(Mechanism):
    """The signed median of a word's cells with noise of rate ε/2 (sensitivity 2), for every word asked."""

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
        """A median of cells changes by two at most."""
        return 2.0

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """Medians, rounded down so that they are integers, plus noise."""
        signs = np.where(columns >= data.terms.width, -1, 1).astype(np.int8)
        cells = data.cells(columns % np.uint32(data.terms.width)).swapaxes(0, 1)
        middle = np.floor(CountSketch.combine(cells, signs.T)).astype(np.int32)
        noise = [_noise(self, data, name, peer, parts=1) for name in _names(data.terms, columns)]
        noisy: NDArray[Any] = middle[:, None, :] + np.stack(noise)
        return noisy

    def read(self, values: NDArray[Any], signs: NDArray[np.int8], used: IntArray) -> NDArray[Any]:
        """What was answered."""
        first: NDArray[Any] = values[:, 0]
        return first

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """The median's, and the noise's on top."""
        return MEDIAN * moments / (width * self.rows) + self.law.variance


@dataclass(frozen=True)
class Vectors(Mechanism):
    """Ways to answer the z cells of an obfuscated vector."""

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
    """The z cells of an obfuscated vector, noise of rate ε/(2z) each, for every vector (sensitivity 2z)."""

    name = "per_cell"

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """Cells plus independent noise."""
        noise = [_noise(self, data, name, peer, parts=self.rows) for name in _names(data.terms, columns)]
        return data.cells(columns) + np.stack(noise)

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """F₂/w + 2a/(1 − a)² a row."""
        return MEDIAN * (moments / width + self.law.variance) / used


@dataclass(frozen=True)
class SharedNoise(Vectors):
    """Paper mode: the cells of an obfuscated vector plus one Laplace(1/ε) draw for all of them (eq. 5).

    Cells are integers, so differences of what comes back are free of noise: ε is infinite whatever it says.
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
        """As noise of rate ε on one cell, which is how the paper counts it."""
        return self.epsilon

    @property
    def charged(self) -> float:
        """∞ for every vector."""
        return math.inf

    def answer(self, data: FieldData, columns: Columns, peer: str) -> NDArray[Any]:
        """Cells plus one real number a vector and document."""
        uniform = np.stack([self._words(data, name, peer) for name in _names(data.terms, columns)]) / 2.0**64
        noise = -np.sign(uniform - 0.5) * np.log1p(-2 * np.abs(uniform - 0.5)) / self.epsilon
        noisy: NDArray[Any] = data.cells(columns) + noise[:, None, :]
        return noisy

    def _words(self, data: FieldData, name: str, peer: str) -> NDArray[np.uint64]:
        return data.key.words(data.domain(peer, name), 0, data.nonces)[:, 0]

    def variance(self, moments: FloatArray, width: int, used: int) -> FloatArray:
        """No number of rows makes a shared draw smaller, whatever Theorem 2 says (fault C2b)."""
        return MEDIAN * moments / (width * used) + 2 / self.epsilon**2


_KINDS: tuple[type[Mechanism], ...] = (OneShot, Scalar, PerCell, SharedNoise)
MECHANISMS = {kind.name: kind for kind in _KINDS}
"""The ways by name."""


def mechanism(name: str, **settings: Any) -> Mechanism:
    """A mechanism by its name."""
    if name not in MECHANISMS:
        raise ConfigError(f"no mechanism {name!r}", key=name, known=MECHANISMS)
    return MECHANISMS[name](**settings)


def _names(terms: Terms, columns: Columns) -> list[str]:
    """What each word's or vector's noise is called: a digest of its columns."""
    prefix = f"{terms.field}, ε = {terms.epsilon!r}, epoch {terms.epoch}"
    digests = (hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest() for row in columns.astype("<u4"))
    return [f"{prefix}, {digest}" for digest in digests]


def _noise(kind: Mechanism, data: FieldData, name: str, peer: str, *, parts: int) -> NDArray[np.int32]:
    """The noise of one word's or vector's parts in all documents; another peer gets another draw."""
    return data.key.noise(kind.law, data.domain(peer, name), np.arange(parts), data.nonces)
