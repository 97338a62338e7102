"""Collection figures: how many documents have each term, in one silo or in all of them together.

Exact figures add up to those of one central index, so that merged BM25 scores equal its scores. Private ones
are cells of hashed terms with two-sided geometric noise: one replaced word moves a document from one cell to
another, so the sensitivity is 2 and the noise has rate ε/2. The noise of a release is drawn once and kept.
What a silo shows is the posterior mean of each noisy cell under a prior that looks at no data, so that most
of the noise of rare words is gone before the silos' figures are added up.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError, ProtocolError
from isthmus.private.cost import Cost
from isthmus.private.noise import Geometric
from isthmus.private.sketch import CountMin, HashFamily
from isthmus.private.totals import Totals
from isthmus.tables.bundles import Bundle
from isthmus.tables.ids import FloatArray, Ids

TEXT = "text.having"
"""Documents that have a term in title or body: what BM25 reads."""
FIELD_TABLES = ("title.having", "title.standing", "body.having", "body.standing")
"""Documents that have a term in a field, and times it stands there: what a ranker's features read."""

MOST_BYTES = 1 << 28
"""Of a message unpacked: about thirty million terms."""

UNIT = 16
"""Private counts are told in sixteenths: a posterior mean is no whole number."""
ABSENT, POWER = 0.2, 1.5
"""The prior of a count: 0 with this chance, else x with a chance that falls like x^−1.5."""
_GRID = 512

Table = NDArray[np.int64]


@dataclass(frozen=True)
class FiguresFile(Bundle):
    """Figures on disk or on the wire."""

    noun = "collection statistics"


@dataclass(frozen=True, eq=False)
class Figures:
    """Tables of one count a term, or of one count a cell. Those of several silos add.

    `lengths` are the terms of all documents together, by field. `hashing` says which cells these are; two
    releases with different hash keys do not mix, and nothing tells the key.
    """

    form: Literal["exact", "private"]
    silos: tuple[str, ...]
    documents: int
    lengths: Mapping[str, int]
    tables: Mapping[str, Table]
    words: tuple[str, ...] = ()
    hashing: str = ""
    epsilon: float | None = None
    unit: int = 1
    """What a count of one is told as."""
    about: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def version(self) -> str:
        """Changes whenever a score would."""
        digest = hashlib.sha256(
            repr((self.form, self.unit, self.documents, sorted(self.lengths.items()))).encode()
        )
        digest.update("\n".join(self.words).encode() + self.hashing.encode())
        for name in sorted(self.tables):
            digest.update(name.encode() + self.tables[name].astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def average_length(self) -> float:
        """Terms per document, title and body together; 1 where there are none."""
        total = sum(self.lengths.values())
        return total / self.documents if total and self.documents else 1.0

    @cached_property
    def _place(self) -> dict[str, int]:
        return {word: at for at, word in enumerate(self.words)}

    def counts(self, table: str, words: Sequence[str], family: HashFamily | None = None) -> FloatArray:
        """One table's counts of some words, 0 at least; private ones need the federation's hash family."""
        held = self.tables[table]
        if self.form == "exact":
            places = [self._place.get(word, -1) for word in words]
            return np.array([held[at] if at >= 0 else 0 for at in places], dtype=np.float64)
        if family is None or hashing_of(family) != self.hashing or len(held) != family.size:
            raise ProtocolError("statistics under another hash key than this silo's")
        cells = cells_of(family, words)
        return np.maximum(held[cells], 0) / self.unit

    def __add__(self, other: Figures) -> Figures:
        mine, theirs = ((each.form, each.unit, each.hashing, sorted(each.tables)) for each in (self, other))
        if mine != theirs:
            raise ProtocolError("statistics of different forms, hash keys or tables do not add up")
        words, tables = self._added(other)
        return replace(
            self,
            silos=(*self.silos, *other.silos),
            documents=self.documents + other.documents,
            lengths={name: count + other.lengths.get(name, 0) for name, count in self.lengths.items()},
            tables=tables,
            words=words,
            about={},
        )

    def _added(self, other: Figures) -> tuple[tuple[str, ...], dict[str, Table]]:
        if self.form == "private":
            return (), {name: table + other.tables[name] for name, table in self.tables.items()}
        both = Ids.of([*self.words, *other.words])
        size = len(both.vocabulary)
        tables = {
            name: np.bincount(both.codes, np.concatenate((table, other.tables[name])), size).astype(np.int64)
            for name, table in self.tables.items()
        }
        return tuple(both.words), tables

    def noised(self, family: HashFamily, epsilon: float) -> Figures:
        """Exact figures in cells, with fresh noise: to be drawn once and kept."""
        words = Ids.of(list(self.words))  # in order already, so that counts stay with their words
        tables = {}
        for name, counts in self.tables.items():
            cells = CountMin.of_totals(words, counts, family).dense()[0]
            law = Geometric(rate_of(name, epsilon) / 2)
            means = posterior_means(cells + law.draw(len(cells)), law)
            tables[name] = np.rint(UNIT * means).astype(np.int64)
        told = replace(self, form="private", tables=tables, words=(), hashing=hashing_of(family))
        return replace(told, epsilon=epsilon, unit=UNIT)

    def to_bytes(self) -> bytes:
        """For the wire and for the disk."""
        header = {
            "form": self.form,
            "silos": list(self.silos),
            "documents": self.documents,
            "lengths": dict(self.lengths),
            "hashing": self.hashing,
            "epsilon": self.epsilon,
            "unit": self.unit,
            "about": dict(self.about),
        }
        arrays = {name: _narrowed(table) for name, table in self.tables.items()}
        return FiguresFile(header, arrays, {"words": "\n".join(self.words)}).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Figures:
        """What `to_bytes` made; anything else is a ProtocolError."""
        try:
            saved = FiguresFile.read(io.BytesIO(data), most=MOST_BYTES)
            told = cls._told(saved)
        except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError("not collection statistics of a known form") from error
        sizes = {len(table) for table in told.tables.values()}
        negative = told.documents < 0 or told.unit < 1 or any(length < 0 for length in told.lengths.values())
        if TEXT not in told.tables or len(sizes) != 1 or negative:
            raise ProtocolError("collection statistics that do not belong together")
        if told.form == "exact" and (
            sizes != {len(told.words)} or list(told.words) != sorted(set(told.words))
        ):
            raise ProtocolError("collection statistics whose terms and counts do not belong together")
        return told

    @classmethod
    def _told(cls, saved: FiguresFile) -> Figures:
        header, words = saved.header, saved.texts["words"]
        tables = {name: array.astype(np.int64) for name, array in saved.arrays.items() if array.ndim == 1}
        if header["form"] not in ("exact", "private"):
            raise ValueError(header["form"])
        return cls(
            form=header["form"],
            silos=tuple(str(silo) for silo in header["silos"]),
            documents=int(header["documents"]),
            lengths={str(name): int(count) for name, count in header["lengths"].items()},
            tables=tables,
            words=tuple(words.split("\n")) if words else (),
            hashing=str(header["hashing"]),
            epsilon=None if header["epsilon"] is None else float(header["epsilon"]),
            unit=int(header["unit"]),
            about=dict(header["about"]),
        )


def posterior_means(noisy: Table, law: Geometric) -> FloatArray:
    """E[x | x + noise] under the prior; a large value, beside which the noise is small, stays as it is."""
    count = np.arange(_GRID)
    tail = np.where(count > 0, np.maximum(count, 1.0) ** -POWER, 0.0)
    prior = np.where(count == 0, ABSENT, (1 - ABSENT) * tail / tail.sum())
    width = min(int(np.ceil(20 / law.rate)), _GRID // 2)  # below −width all is noise, above the rest no grid
    seen = np.arange(-width, _GRID - width)
    weight = np.log(prior) - law.rate * np.abs(seen[:, None] - count)
    weight = np.exp(weight - weight.max(axis=1, keepdims=True))
    means = (weight @ count) / weight.sum(axis=1)
    return np.where(noisy < seen[-1], means[np.clip(noisy, seen[0], seen[-1]) + width], noisy)


def summed(parts: Iterable[Figures]) -> Figures:
    """The figures of all silos together."""
    held = list(parts)
    if not held:
        raise ProtocolError("no statistics to add up")
    total = held[0]
    for part in held[1:]:
        total += part
    return replace(total, about={})


def rate_of(table: str, epsilon: float) -> float:
    """The ε of one table: all of it for the text, half of it for each table of a field."""
    return epsilon if table == TEXT else epsilon / 2


def costs(tables: Iterable[str], epsilon: float, draw: str) -> list[Cost]:
    """What releasing private figures costs every document; `draw` names the noise, which is drawn once."""
    told = [Cost("totals", ("title", "body"), epsilon, 2.0, 2 / epsilon, f"{TEXT}, {draw}")]
    if set(tables) > {TEXT}:
        for name in ("title", "body"):
            half = rate_of(f"{name}.having", epsilon)
            told += Totals.costs(name, epsilon_df=half, epsilon_cf=half, draw=draw)
    return told


def family_of(key: str, width: int) -> HashFamily:
    """The hash family that silos share by sharing a text."""
    return HashFamily(
        hashlib.blake2b(key.encode(), digest_size=32, person=b"isthmus figures").digest(), 1, width
    )


def hashing_of(family: HashFamily) -> str:
    """A name of the family that does not tell its key."""
    digest = hashlib.blake2b(b"name", key=family.key, digest_size=8).hexdigest()
    return f"{digest}-{family.rows}x{family.width}"


def cells_of(family: HashFamily, words: Sequence[str]) -> NDArray[np.int64]:
    """The cell of every word."""
    named = Ids.of(list(words))
    cells: NDArray[np.int64] = family.of_vocabulary(named).cells[0][named.codes]
    return cells


def _narrowed(table: Table) -> NDArray[Any]:
    small = np.abs(table).max(initial=0) < 2**31
    return table.astype(np.int32) if small else table
