"""Collection statistics: documents, their lengths, and how many documents have each term and how often.
Statistics of several silos can be added, and with the sum every silo scores as one index would.

Exact ones count terms by their words. Private ones count in cells, to which terms are hashed under a key
that silos share, and record the cost of their noise (`epsilon`, and the draw in `about`): see
`private.totals`.

>>> from isthmus.text import tokenise
>>> both = Statistics.of(tokenise(["red apple"])) + Statistics.of(tokenise(["red pear", "pear"]))
>>> both
Statistics: 3 documents of 1.667 terms, 3 terms
>>> both.counts(TEXT, ["pear", "plum"]).tolist(), both.counts(TIMES, ["pear"]).tolist()
([2.0, 0.0], [2.0])
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import ConfigError, DataError, PrivacyError, ProtocolError
from isthmus.languages import analysis_name
from isthmus.tables import Bundle, Declared
from isthmus.text import Tokens

TEXT, TIMES = "text.having", "text.standing"
"""Table names: documents that have a term in title and body together, which BM25 uses; and its occurrences
there."""
FIELD_TABLES = ("title.having", "title.standing", "body.having", "body.standing")
"""The same tables for single fields, which a ranker's features use."""

NO_TERMS = Ids.of(())
MOST_BYTES = 1 << 28
"""Maximum bytes of an unpacked message."""
MOST_TERMS = 1 << 21
"""Maximum number of terms or cells of one silo; a sum may have twice as many."""
MOST_DOCUMENTS, MOST_TOKENS = 10**8, 10**12
"""Maximum numbers of one silo; a sum may have as many times more as it has silos."""
MOST_SILOS, MOST_UNIT, LONGEST_NAME = 1_000, 1 << 10, 100
MOST_REMEMBERED = 1 << 12
"""Maximum number of query words whose cells are cached."""
NOISE = 160.0
"""A cell's noise exceeds NOISE/ε in one of 10¹⁷ draws, and more rarely in the table of the text."""


def idf(having: ArrayLike, documents: float) -> FloatArray:
    """ln(1 + (N − df + ½)/(df + ½)), BM25's weight of a term that `having` (df) of N documents have."""
    known = np.minimum(np.maximum(having, 0), documents)  # np.clip takes thrice the time for a few words
    weights: FloatArray = np.log1p((documents - known + 0.5) / (known + 0.5))
    return weights


class Hashing(Protocol):
    """A hash from terms to cells under a key, and a public name of both that does not reveal the key."""

    @property
    def size(self) -> int: ...

    @property
    def public_name(self) -> str: ...

    def of_vocabulary(self, words: Ids) -> Any: ...

    def of_words(self, words: Sequence[str]) -> Any: ...


class StatisticsFile(Bundle):
    """Statistics on disk or on the wire."""

    noun = "collection statistics"
    most = MOST_BYTES

    @classmethod
    def check(cls, header: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        """Check that every table is one column of whole numbers, and all have the same length. Raises a
        DataError otherwise."""
        if set(declared) not in ({TEXT}, {TEXT, *FIELD_TABLES}):
            raise DataError("has other tables than statistics have")
        length = declared[TEXT].shape
        for table in declared.values():
            if table.dtype not in (np.dtype("<i4"), np.dtype("<i8")) or table.shape != length:
                raise DataError("has tables that are no columns of whole numbers")
        if len(length) != 1 or length[0] > 2 * MOST_TERMS:
            raise DataError("has more terms or cells than statistics may have")


@dataclass(frozen=True, eq=False, repr=False)
class Statistics:
    """Tables with one count per term, or one count per hashed cell.

    `lengths` are numbers of terms over all documents, by field. `hashing` names the hash of the cells, if
    any, without revealing the key, and `analysis` the analysis of texts into terms; statistics can only be
    added if they agree in both. Counts are stored multiplied by `unit`. `family` is the hash family, if the
    key is known, and `rates` those of the noise in tables that have not been denoised yet.
    """

    documents: int
    lengths: Mapping[str, int]
    tables: Mapping[str, IntArray]
    terms: Ids = NO_TERMS
    silos: tuple[str, ...] = ()
    hashing: str = ""
    epsilon: float | None = None
    unit: int = 1
    about: Mapping[str, Any] = field(default_factory=dict)
    analysis: str = field(default_factory=analysis_name)
    family: Hashing | None = None
    rates: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, tokens: Tokens) -> Statistics:
        """Count the terms of documents, of one field or of a whole text."""
        size = len(tokens.terms.vocabulary)
        having = np.bincount(tokens.counts().indices, minlength=size)
        times = np.bincount(tokens.terms.codes, minlength=size)
        terms = Ids(frozen(np.arange(size)), tokens.terms.vocabulary)
        tables = {TEXT: frozen(having), TIMES: frozen(times)}
        return cls(len(tokens), {"text": len(tokens.terms)}, tables, terms)

    @property
    def form(self) -> Literal["exact", "cells", "private"]:
        """`exact` counts terms by their words; `private` counts in cells with noise that was charged; `cells`
        are cells without such noise, which must not leave their silo."""
        if not self.hashing:
            return "exact"
        return "cells" if self.epsilon is None or np.isinf(self.epsilon) else "private"

    @property
    def words(self) -> list[str]:
        """The terms of exact statistics, in order."""
        return self.terms.tolist()

    @property
    def length(self) -> int:
        """Number of terms of all documents and fields."""
        return sum(self.lengths.values())

    @property
    def average_length(self) -> float:
        """Terms per document; 1 if there are none."""
        return self.length / self.documents if self.length and self.documents else 1.0

    @cached_property
    def version(self) -> str:
        """A hash that changes whenever a score would."""
        digest = hashlib.sha256(
            repr((self.form, self.unit, self.documents, sorted(self.lengths.items()))).encode()
        )
        digest.update("\n".join(self.words).encode() + self.hashing.encode())
        for name in sorted(self.tables):
            digest.update(name.encode() + self.tables[name].astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Analysis, unit, hashing, fields and noise; statistics can only be added if these are equal."""
        noise = self.epsilon is None, sorted(self.rates)
        return self.analysis, self.unit, self.hashing, sorted(self.lengths), sorted(self.tables), *noise

    @cached_property
    def _place(self) -> dict[str, int]:
        return {word: at for at, word in enumerate(self.words)}

    def counts(self, table: str, words: Sequence[str], family: Hashing | None = None) -> FloatArray:
        """One table's counts of some words, at least 0; private ones need the federation's hash family."""
        column = self.tables[table]
        if self.form == "exact":
            places = [self._place.get(word, -1) for word in words]
            return np.array([column[at] if at >= 0 else 0 for at in places], dtype=np.float64)
        family = self._check_family(family)
        cells = [self._cell_of.get(word, -1) for word in words]
        if -1 in cells:
            cells = family.of_words(words).cells[0].tolist()
            if len(self._cell_of) > MOST_REMEMBERED:
                self._cell_of.clear()
            self._cell_of.update(zip(words, cells, strict=True))
        return np.maximum(column[cells], 0) / self.unit

    @cached_property
    def _cell_of(self) -> dict[str, int]:
        """A cache of the cells of queried words, under the only key that is accepted."""
        return {}

    def counts_of(self, words: Ids, table: str = TEXT) -> NDArray[Any]:
        """One table's counts of every word of a vocabulary. Counts in cells include any noise, and need
        `family`."""
        if self.form == "exact":
            return np.append(self.tables[table], 0)[words.translation(self.terms)]
        if self.family is None:
            raise ConfigError(
                "statistics in hashed cells cannot be read by word without their hash family",
                key="statistics",
                expected="exact statistics, or replace(statistics, family=…) with the silos' hash family",
            )
        counts = self.tables[table][self._cells(words, self.family)]
        return counts if self.unit == 1 else counts / self.unit

    def _cells(self, words: Ids, family: Hashing | None) -> IntArray:
        """The cell of every word of a vocabulary. Raises a ProtocolError for another key than these
        statistics have."""
        family = self._check_family(family)
        cells: IntArray = family.of_vocabulary(words).cells[0]
        return cells

    def _check_family(self, family: Hashing | None) -> Hashing:
        if family is None or family.public_name != self.hashing or len(self.tables[TEXT]) != family.size:
            raise ProtocolError("statistics under another hash key than this silo's")
        return family

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both. ε is the smaller one, which bounds the noise of each part; `about` is
        empty, since a sum is not a draw of noise."""
        if self.kind != other.kind:
            raise ProtocolError("statistics of different forms, hash keys, analyses or tables do not add up")
        terms, tables = self._added(other)
        return replace(
            self,
            documents=self.documents + other.documents,
            lengths={name: self.lengths[name] + other.lengths[name] for name in self.lengths},
            tables=tables,
            terms=terms,
            silos=(*self.silos, *other.silos),
            epsilon=min((part.epsilon for part in (self, other) if part.epsilon is not None), default=None),
            about={},
            rates={name: _added_rate(rate, other.rates[name]) for name, rate in self.rates.items()},
        )

    def _added(self, other: Statistics) -> tuple[Ids, dict[str, IntArray]]:
        if self.form != "exact":
            return self.terms, {name: table + other.tables[name] for name, table in self.tables.items()}
        both = Ids.concat([self.terms, other.terms])
        size = len(both.vocabulary)
        tables = {
            name: np.bincount(both.codes, np.concatenate((table, other.tables[name])), size).astype(np.int64)
            for name, table in self.tables.items()
        }
        return Ids(frozen(np.arange(size)), both.vocabulary), tables

    def __repr__(self) -> str:
        size = f"{len(self.terms):,} terms" if self.form == "exact" else f"{len(self.tables[TEXT]):,} cells"
        return f"Statistics: {self.documents:,} documents of {self.average_length:.4g} terms, {size}"

    def to_bytes(self) -> bytes:
        """Serialise for the network or the disk. Raises a PrivacyError for cells without noise."""
        if self.form == "cells":
            raise PrivacyError(
                "cells without noise do not leave a silo (noise them first, or send exact ones)"
            )
        header = {
            "form": self.form,
            "silos": list(self.silos),
            "documents": self.documents,
            "lengths": dict(self.lengths),
            "hashing": self.hashing,
            "epsilon": self.epsilon,
            "unit": self.unit,
            "about": dict(self.about),
            "analysis": self.analysis,
        }
        arrays = {
            name: table.astype(np.int32) if np.abs(table).max(initial=0) < 2**31 else table
            for name, table in self.tables.items()
        }
        return StatisticsFile(header, arrays, {"words": "\n".join(self.words)}).to_bytes()

    @classmethod
    def from_bytes(cls, data: bytes, *, most: int = MOST_BYTES) -> Statistics:
        """Read the output of `to_bytes`, at most `most` bytes unpacked. Raises a ProtocolError for anything
        else."""
        statistics = StatisticsFile.receive(data, cls._parsed, most=most)
        statistics.check()
        return statistics

    @classmethod
    def _parsed(cls, saved: StatisticsFile) -> Statistics:
        header, words = saved.header, saved.texts["words"]
        if header["form"] != ("private" if header["hashing"] else "exact"):
            raise ValueError("another form than its hashing has")
        if words and words.count("\n") + 1 != len(saved.arrays[TEXT]):
            raise ValueError("another number of terms than of counts")
        epsilon = header["epsilon"]
        if not (epsilon is None or (type(epsilon) in (int, float) and 0 < epsilon <= MOST_TOKENS)):
            raise ValueError("an ε that is none")
        return cls(
            documents=_whole(header["documents"]),
            lengths={str(name): _whole(count) for name, count in header["lengths"].items()},
            tables={name: array.astype(np.int64, copy=False) for name, array in saved.arrays.items()},
            terms=Ids.of(words.split("\n") if words else ()),
            silos=tuple(_name(silo) for silo in header["silos"]),
            hashing=_name(header["hashing"]),
            epsilon=None if epsilon is None else float(epsilon),
            unit=_whole(header["unit"]),
            about=dict(header["about"]),
            # the previous release did not name its analysis, which is the same for English texts
            analysis=_name(header.get("analysis", analysis_name())),
        )

    def check(self) -> None:
        """Raise a ProtocolError unless every number is possible for some collection.

        A sum of statistics that pass also passes, unless it has more terms than a sum may have.
        """
        silos, tokens = len(self.silos), self.length
        sizes = {len(table) for table in self.tables.values()}
        rules = {
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
        ascending = np.array_equal(self.terms.codes, np.arange(len(self.terms.vocabulary)))
        if self.form == "exact" and not (sizes == {len(self.terms)} and ascending):
            raise ProtocolError("collection statistics whose terms and counts do not belong together")
        for name, table in self.tables.items():
            if table.min(initial=0) < 0 or table.max(initial=0) > self._highest(name):
                raise ProtocolError(f"collection statistics out of bounds: {name}")
        if self.form == "exact" and self.tables[TEXT].sum() > tokens:
            raise ProtocolError("collection statistics with fewer terms than documents that have them")

    def _has_lengths(self) -> bool:
        """Whether the lengths of both fields are there, which features need; without tables of fields one is
        enough."""
        known = set(self.lengths) <= {"title", "body"} and bool(self.lengths)
        return known and (len(self.lengths) == 2 or set(self.tables) == {TEXT})

    def _highest(self, table: str) -> float:
        """The largest possible count, of documents or terms; a cell sums those of many terms, and noise."""
        field_name, _, counted = table.partition(".")
        tokens = self.lengths.get(field_name, self.length)
        if self.form == "exact":
            return self.documents if counted == "having" else tokens
        noise = len(self.silos) * NOISE / (self.epsilon or 1.0)
        return min(self.unit * (tokens + noise), len(self.silos) * MOST_UNIT * MOST_TOKENS)


def summed(parts: Iterable[Statistics]) -> Statistics:
    """The sum of all silos' statistics. Raises a ProtocolError for none."""
    every = list(parts)
    if not every:
        raise ProtocolError("no statistics to add up")
    return replace(reduce(add, every), about={})


def _added_rate(first: float, second: float) -> float:
    """The rate of the two-sided geometric noise whose variance is the sum of the two noises' variances.

    Noise of rate r has the variance 1/(cosh(r) − 1).
    """
    variance = sum(1 / (np.cosh(min(rate, 700.0)) - 1) for rate in (first, second) if np.isfinite(rate))
    return float(np.arccosh(1 + 1 / variance)) if variance else np.inf


def posterior_means(noisy: NDArray[Any], prior: FloatArray, rate: float) -> FloatArray:
    """E[x | x + noise] for two-sided geometric noise of this rate, where x is 0, 1, … with the probabilities
    in `prior`: one row for all values, or one row per value."""
    x = np.arange(prior.shape[-1])
    weight = np.log(prior) - rate * np.abs(noisy[:, None] - x)
    weight = np.exp(weight - weight.max(axis=1, keepdims=True))
    means: FloatArray = (weight @ x) / weight.sum(axis=1)
    return means


def _whole(number: object) -> int:
    """Check a count: an int, not a bool, not negative, and small enough for the arithmetic. Raises a
    ValueError."""
    if type(number) is not int or not 0 <= number <= MOST_SILOS * MOST_TOKENS:
        raise ValueError("a count that is none")
    return number


def _name(text: object) -> str:
    if not isinstance(text, str) or len(text) > LONGEST_NAME:
        raise ValueError("a name that is none")
    return text
