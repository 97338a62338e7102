"""Sketches: word counts of many documents in cells that only the holders of a key can tell apart.

>>> from isthmus.text import tokenise
>>> family = HashFamily(b"\\0" * 32, rows=1, width=64)
>>> tokens = tokenise(["red apples, green apples", "a green pear"])
>>> CountMin.of(tokens, family).estimate(tokenise(["apple pear"]).terms).tolist()
[[2, 0], [0, 1]]

Cells are numbered row by row: column h of row a is cell a·width + h. All documents of a field are sketched
at once and kept sparse, documents × cells; answering is by cell, for all documents at once. Sketches of the
same documents under the same family add.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import Ids, IntArray, frozen
from isthmus.errors import ConfigError, PrivacyError
from isthmus.report import progress
from isthmus.tables import CountColumns, offsets_of, rows_of
from isthmus.text import Tokens

Counts = NDArray[np.int32]

LEAST_WIDTH, CELLS_A_WORD = 8192, 64

_CHUNK = 1 << 16  # tokens sorted at once; the keys of a chunk fit 32 bits and the cache


def width_for(lengths: IntArray) -> int:
    """A width at which other words seldom share a cell: a power of two of at least 64 cells per word of the
    average document, and of at least 8,192. Width costs no ε, only space for the noise of empty cells."""
    words = float(lengths.mean()) if len(lengths) else 0.0
    return max(LEAST_WIDTH, 1 << int(np.ceil(np.log2(max(CELLS_A_WORD * words, 1)))))


class Hashed(NamedTuple):
    """The cell (rows, words) and the sign (rows, words) of every word in every row."""

    cells: IntArray
    signs: NDArray[np.int8]


@dataclass(frozen=True)
class HashFamily:
    """h_a: words → columns and g_a: words → ±1 for every row a, computable only with the key.

    `epoch` numbers the keys of a federation: sketches of different epochs cannot be combined.
    """

    key: bytes = field(repr=False)
    rows: int = 1
    width: int = 8192
    epoch: int = 0

    def __post_init__(self) -> None:
        if not 16 <= len(self.key) <= 64:
            raise ConfigError(f"a hash key of {len(self.key)} bytes", key="key", expected="16 to 64 bytes")
        if not (1 <= self.rows <= 255 and self.width >= 2 and self.rows * self.width < 1 << 24):
            raise ConfigError(
                f"a sketch of {self.rows} × {self.width} cells",
                key="width",
                value=self.width,
                expected="1 to 255 rows and fewer than 2^24 cells",
            )

    @property
    def size(self) -> int:
        """The number of cells."""
        return self.rows * self.width

    @cached_property
    def public_name(self) -> str:
        """A name of the family that does not reveal its key."""
        digest = hashlib.blake2b(b"name", key=self.key, digest_size=8).hexdigest()
        return f"{digest}-{self.rows}x{self.width}"

    @property
    def name(self) -> str:
        """A name that identifies these hash functions and reveals nothing else about them."""
        data = f"{self.rows} {self.width} {self.epoch}".encode()
        return hashlib.blake2b(data, key=self.key, digest_size=8, person=b"isthmus name").hexdigest()

    def of(self, words: Ids) -> Hashed:
        """Hash a column of words; every distinct word is hashed once."""
        spread = self.of_vocabulary(words)
        return Hashed(spread.cells[:, words.codes], spread.signs[:, words.codes])

    def of_vocabulary(self, words: Ids) -> Hashed:
        """Hash the words of the column's vocabulary, in its order."""
        return self.of_words(words.words)

    def of_words(self, words: Sequence[str]) -> Hashed:
        """Hash a sequence of words."""
        person = f"isthmus {self.epoch}".encode()[:16]
        digests = b"".join(
            hashlib.blake2b(word.encode(), key=self.key, digest_size=16, person=person).digest()
            for word in words
        )
        low, high = np.frombuffer(digests, dtype="<u8").reshape(-1, 2).T.astype(np.uint64)
        row = np.arange(1, self.rows + 1, dtype=np.uint64)[:, None]
        mixed = _mix(low + row * (high | np.uint64(1)))
        columns = ((mixed & np.uint64(0xFFFFFFFF)) * np.uint64(self.width)) >> np.uint64(32)
        signs = 1 - 2 * (mixed >> np.uint64(63)).astype(np.int8)
        return Hashed(columns.astype(np.int64) + np.arange(self.rows)[:, None] * self.width, signs)


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64, a bijection of 64-bit words that spreads every bit."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed


@dataclass(frozen=True, eq=False, repr=False)
class Sketch:
    """The cells of many documents: those of document i are `offsets[i]:offsets[i + 1]`, sorted, none zero."""

    signed: ClassVar[bool]

    family: HashFamily
    offsets: IntArray
    cells: Counts
    values: Counts

    @classmethod
    def of(cls, tokens: Tokens, family: HashFamily) -> Self:
        """One sketch for every text."""
        hashed = family.of_vocabulary(tokens.terms)
        keys = hashed.cells * 2 + (hashed.signs < 0) if cls.signed else hashed.cells
        by_word = np.ascontiguousarray(keys.T.astype(np.int32))  # (words, rows): a token's keys lie together
        spans = progress(_chunks(tokens, family), label="sketching documents")
        parts = [_counted(tokens, by_word, span, family.size, signed=cls.signed) for span in spans]
        sizes, cells, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        return cls(family, frozen(np.append(0, np.cumsum(sizes))), frozen(cells), frozen(values))

    @classmethod
    def of_totals(cls, words: Ids, totals: IntArray, family: HashFamily) -> Self:
        """One sketch in which every word of the vocabulary counts as often as `totals` says."""
        hashed = family.of_vocabulary(words)
        weights = hashed.signs * totals if cls.signed else np.broadcast_to(totals, hashed.cells.shape)
        dense = np.bincount(hashed.cells.ravel(), weights.ravel(), family.size)
        return cls.of_dense(dense.astype(np.int64)[None, :], family)

    @classmethod
    def of_dense(cls, table: NDArray[Any], family: HashFamily) -> Self:
        """Sketches from a table of documents × cells."""
        if table.ndim != 2 or table.shape[1] != family.size:
            raise PrivacyError(f"a table of {table.shape} is none of {family.size} cells a document")
        documents, cells = np.nonzero(table)
        values = table[documents, cells].astype(np.int32)
        return cls(family, offsets_of(documents, len(table)), frozen(cells.astype(np.int32)), frozen(values))

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.offsets) - 1

    def dense(self) -> IntArray:
        """The table of documents × cells."""
        table = np.zeros((len(self), self.family.size), dtype=np.int64)
        table[np.repeat(np.arange(len(self)), np.diff(self.offsets)), self.cells] = self.values
        return table

    def columns(self, cells: IntArray) -> Counts:
        """The values of these cells in all documents, of shape (cells, documents)."""
        return self._by_cell.columns(cells)

    def lookup(self, documents: IntArray, cells: IntArray) -> Counts:
        """The value of cell `cells[i]` in document `documents[i]`, for every i."""
        return self._by_cell.at(documents, cells)

    @cached_property
    def table(self) -> Any:
        """Documents × cells as a SciPy CSR array."""
        from scipy.sparse import csr_array

        return csr_array((self.values, self.cells, self.offsets), shape=(len(self), self.family.size))

    @cached_property
    def _by_cell(self) -> CountColumns:
        return CountColumns(self.table.tocsc())

    def estimate(self, words: Ids) -> NDArray[Any]:
        """How often every document has every word, of shape (words, documents)."""
        hashed = self.family.of(words)
        shape = *hashed.cells.shape, len(self)
        return self.combine(self.columns(hashed.cells.ravel()).reshape(shape), hashed.signs)

    def at(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """How often document `documents[i]` has word `words[i]`, for every i."""
        hashed = self.family.of(words)
        return self.combine(np.stack([self.lookup(documents, cells) for cells in hashed.cells]), hashed.signs)

    @staticmethod
    def combine(values: NDArray[Any], signs: NDArray[np.int8]) -> NDArray[Any]:
        """The estimate from the cells of all rows: values (rows, words, …), signs (rows, words)."""
        raise NotImplementedError

    def take(self, documents: IntArray) -> Self:
        """The sketches of these documents."""
        rows = rows_of(self.offsets, documents)
        offsets = np.concatenate(([0], np.cumsum(np.diff(self.offsets)[documents])))
        return type(self)(self.family, frozen(offsets), frozen(self.cells[rows]), frozen(self.values[rows]))

    def __add__(self, other: Self) -> Self:
        if type(other) is not type(self) or other.family != self.family or len(other) != len(self):
            raise PrivacyError(
                "sketches of different kinds, keys, sizes or documents do not add up"
                " (build them with one family, over as many documents)"
            )
        both = [
            (np.repeat(np.arange(len(one)), np.diff(one.offsets)), one.cells, one.values)
            for one in (self, other)
        ]
        documents, cells, values = (np.concatenate(column) for column in zip(*both, strict=True))
        order = np.lexsort((cells, documents))
        documents, cells, values = _summed(documents[order], cells[order], values[order])
        return type(self)(self.family, offsets_of(documents, len(self)), frozen(cells), frozen(values))

    def __repr__(self) -> str:
        size = f"{self.family.rows} × {self.family.width:,} cells"
        return f"{type(self).__name__}: {len(self):,} documents, {size}, {len(self.cells):,} not zero"


class CountMin(Sketch):
    """Cormode and Muthukrishnan's sketch: counts add up in cells, so the least cell of a word is at least its
    count."""

    signed = False

    @staticmethod
    def combine(values: NDArray[Any], signs: NDArray[np.int8]) -> NDArray[Any]:
        """min_a C(a, h_a(t))."""
        least: NDArray[Any] = values.min(axis=0)
        return least


class CountSketch(Sketch):
    """Charikar, Chen and Farach-Colton's sketch: words add their sign, so that collisions cancel on
    average."""

    signed = True

    @staticmethod
    def combine(values: NDArray[Any], signs: NDArray[np.int8]) -> NDArray[Any]:
        """median_a g_a(t)·C(a, h_a(t)): eq. (3) with the sign that it needs."""
        factors = signs.reshape(*signs.shape, *(1,) * (values.ndim - signs.ndim))
        middle: NDArray[Any] = np.median(factors * values, axis=0)
        return middle


def _chunks(tokens: Tokens, family: HashFamily) -> list[tuple[int, int]]:
    """Ranges of documents whose keys fit into 32 bits and whose tokens fit into the cache."""
    most = max(1, (1 << 30) // family.size)
    bounds, first = [0], 0
    while first < len(tokens):
        target = int(tokens.offsets[first]) + _CHUNK // family.rows
        last = int(np.searchsorted(tokens.offsets, target, side="right")) - 1
        first = min(max(last, first + 1), first + most, len(tokens))
        bounds.append(first)
    return list(pairwise(bounds)) or [(0, 0)]


def _counted(
    tokens: Tokens, by_word: Counts, span: tuple[int, int], size: int, *, signed: bool
) -> tuple[IntArray, Counts, Counts]:
    """The number of cells of each document in a range, the cells and their values: sort (document, cell,
    sign) keys and count equal ones."""
    first, last = span
    starts = np.arange(last - first, dtype=np.int32) * np.int32(size)
    keys = by_word[tokens.terms.codes[int(tokens.offsets[first]) : int(tokens.offsets[last])]]
    keys += np.repeat(starts * np.int32(2 if signed else 1), tokens.lengths[first:last])[:, None]
    keys = keys.ravel()
    keys.sort()
    begins = _begins(keys)
    values = np.diff(begins, append=len(keys)).astype(np.int32)
    cells = keys[begins]
    if signed:
        values = np.where(cells & 1, -values, values)
        places = cells >> 1
        again = _begins(places)
        values = np.add.reduceat(values, again) if len(again) else values
        nonzero = values != 0
        cells, values = places[again][nonzero], values[nonzero]
    sizes = (
        np.diff(np.searchsorted(cells, starts), append=len(cells)) if len(starts) else np.empty(0, np.int64)
    )
    return sizes, cells - np.repeat(starts, sizes), values


def _begins(ordered: NDArray[Any]) -> IntArray:
    """The positions at which a new value begins in a sorted array."""
    return (
        np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        if len(ordered)
        else np.empty(0, np.int64)
    )


def _summed(documents: NDArray[Any], cells: Counts, values: Counts) -> tuple[Any, Counts, Counts]:
    """Add sorted entries of the same cell, and drop those that cancel."""
    if not len(cells):
        return documents, cells, values
    new = np.flatnonzero((np.diff(documents, prepend=-1) != 0) | (np.diff(cells, prepend=-1) != 0))
    added = np.add.reduceat(values, new)
    nonzero = added != 0
    at = new[nonzero]
    return documents[at], cells[at], added[nonzero]
