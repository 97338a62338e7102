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
from itertools import pairwise
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
from isthmus.tables.unpacking import Declared

TEXT = "text.having"
"""Documents that have a term in title or body: what BM25 reads."""
FIELD_TABLES = ("title.having", "title.standing", "body.having", "body.standing")
"""Documents that have a term in a field, and times it stands there: what a ranker's features read."""

MOST_BYTES = 1 << 28
"""Of a message unpacked."""
MOST_TERMS = 1 << 21
"""Of one silo, or cells; a sum has twice as many at most."""
MOST_DOCUMENTS, MOST_TOKENS = 10**8, 10**12
"""Of one silo; a sum has as many times more as it has silos."""
MOST_SILOS, MOST_UNIT, LONGEST_NAME = 1_000, 1 << 10, 100
NOISE = 160.0
"""A cell's noise is more than this over ε in one of 10¹⁷ draws, and more rarely in the table of the text."""

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
    most = MOST_BYTES

    @classmethod
    def check(cls, header: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        """One column of whole numbers a table, all of the same length."""
        if set(declared) not in ({TEXT}, {TEXT, *FIELD_TABLES}):
            raise DataError("has other tables than statistics have")
        length = declared[TEXT].shape
        for table in declared.values():
            if table.dtype not in (np.dtype("<i4"), np.dtype("<i8")) or table.shape != length:
                raise DataError("has tables that are no columns of whole numbers")
        if len(length) != 1 or length[0] > 2 * MOST_TERMS:
            raise DataError("has more terms or cells than statistics may have")


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
    def kind(self) -> tuple[Any, ...]:
        """What must be the same of statistics that add up."""
        return self.form, self.unit, self.hashing, sorted(self.lengths), sorted(self.tables)

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
        if self.kind != other.kind:
            raise ProtocolError("statistics of different forms, hash keys or tables do not add up")
        words, tables = self._added(other)
        return replace(
            self,
            silos=(*self.silos, *other.silos),
            documents=self.documents + other.documents,
            lengths={name: self.lengths[name] + other.lengths[name] for name in self.lengths},
            tables=tables,
            words=words,
            epsilon=None if self.epsilon is None else min(self.epsilon, other.epsilon or self.epsilon),
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
    def from_bytes(cls, data: bytes, *, most: int = MOST_BYTES) -> Figures:
        """What `to_bytes` made; anything else is a ProtocolError. It unpacks to `most` bytes."""
        try:
            figures = cls._parsed(FiguresFile.read(io.BytesIO(data), most=most))
        except (DataError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError("not collection statistics of a known form") from error
        figures.check()
        return figures

    @classmethod
    def _parsed(cls, saved: FiguresFile) -> Figures:
        header, words = saved.header, saved.texts["words"]
        if words and words.count("\n") + 1 != len(saved.arrays[TEXT]):
            raise ValueError("another number of terms than of counts")
        lengths = {str(name): _whole(count) for name, count in header["lengths"].items()}
        epsilon = header["epsilon"]
        if not (epsilon is None or (type(epsilon) in (int, float) and 0 < epsilon <= MOST_TOKENS)):
            raise ValueError("an ε that is none")
        return cls(
            form=header["form"],
            silos=tuple(_name(silo) for silo in header["silos"]),
            documents=_whole(header["documents"]),
            lengths=lengths,
            tables={name: array.astype(np.int64, copy=False) for name, array in saved.arrays.items()},
            words=tuple(words.split("\n")) if words else (),
            hashing=_name(header["hashing"]),
            epsilon=None if epsilon is None else float(epsilon),
            unit=_whole(header["unit"]),
            about=dict(header["about"]),
        )

    def check(self) -> None:
        """Raise a ProtocolError unless every number is one that some collection could have.

        What adds up of silos that pass, passes too, as long as it has no more terms than a sum may have.
        """
        silos, tokens = len(self.silos), sum(self.lengths.values())
        sizes = {len(table) for table in self.tables.values()}
        rules = {
            "their form": self.form in ("exact", "private"),
            "their silos": 0 < silos <= MOST_SILOS and len(set(self.silos)) == silos,
            "their unit": self.unit == 1 if self.form == "exact" else self.unit <= MOST_UNIT,
            "documents": self.documents <= silos * MOST_DOCUMENTS,
            "lengths": self._has_lengths() and tokens <= silos * MOST_TOKENS,
            "ε": (self.epsilon is None) == (self.form == "exact"),
            "tables": set(self.tables) in ({TEXT}, {TEXT, *FIELD_TABLES}) and len(sizes) == 1,
            "terms": max(sizes, default=0) <= (MOST_TERMS if silos == 1 else 2 * MOST_TERMS),
            "cells": self.form == "exact" or all(self.hashing.endswith(f"-1x{size}") for size in sizes),
        }
        if broken := [name for name, holds in rules.items() if not holds]:
            raise ProtocolError(f"collection statistics out of bounds: {', '.join(broken)}")
        if self.form == "exact" and not (sizes == {len(self.words)} and _ascends(self.words)):
            raise ProtocolError("collection statistics whose terms and counts do not belong together")
        for name, table in self.tables.items():
            if table.min(initial=0) < 0 or table.max(initial=0) > self._highest(name):
                raise ProtocolError(f"collection statistics out of bounds: {name}")
        if self.form == "exact" and self.tables[TEXT].sum() > tokens:
            raise ProtocolError("collection statistics with fewer terms than documents that have them")

    def _has_lengths(self) -> bool:
        """Features read the length of both fields; what has no tables of fields may leave one out."""
        known = set(self.lengths) <= {"title", "body"} and bool(self.lengths)
        return known and (len(self.lengths) == 2 or set(self.tables) == {TEXT})

    def _highest(self, table: str) -> float:
        """The largest count there can be: documents or terms; a cell has those of many terms, and noise."""
        field_name, _, counted = table.partition(".")
        tokens = self.lengths[field_name] if field_name in self.lengths else sum(self.lengths.values())
        if self.form == "exact":
            return self.documents if counted == "having" else tokens
        noise = len(self.silos) * NOISE / (self.epsilon or 1.0)
        return min(self.unit * (tokens + noise), len(self.silos) * MOST_UNIT * MOST_TOKENS)


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


def _whole(number: object) -> int:
    """A count: no truth, no fraction, no text, not negative, and of a size that arithmetic takes."""
    if type(number) is not int or not 0 <= number <= MOST_SILOS * MOST_TOKENS:
        raise ValueError("a count that is none")
    return number


def _name(text: object) -> str:
    if not isinstance(text, str) or len(text) > LONGEST_NAME:
        raise ValueError("a name that is none")
    return text


def _ascends(words: Sequence[str]) -> bool:
    return all(before < after for before, after in pairwise(words))


def _narrowed(table: Table) -> NDArray[Any]:
    small = np.abs(table).max(initial=0) < 2**31
    return table.astype(np.int32) if small else table
