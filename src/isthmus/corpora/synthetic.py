"""Synthetic feature rows that behave like MSLR's.

They come from a model with hidden traits: every document has eight for its query, and every query a few of
its own. Some traits make a document relevant, by a rule that no linear score can follow (`_relevance`).
Features are noisy, nonlinear, clipped and rescaled views of the traits; some depend on the query alone, and
some are pure noise. Rows are drawn in blocks from named streams: the first hundred queries are the same
whether a hundred or a million are drawn, and a fold as large as MSLR-WEB10K's is written to disk while it is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import IntArray, frozen
from isthmus.errors import DataError
from isthmus.randomness import Streams
from isthmus.report import progress
from isthmus.tables import SPLITS, Column, Letor, cache_folder, open_columns, write_columns

Split = Literal["train", "validation", "test"]
Floats = NDArray[np.float32]
Rng = np.random.Generator

FORMAT = 1
"""Version of the data, raised whenever the same arguments would give other data."""

GRADE_SHARES = (0.52, 0.32, 0.13, 0.02, 0.01)
"""The shares of the grades 0 to 4, about as in MSLR."""

NOISE = 2.2
"""Standard deviation of the unexplained part of a document's relevance, in units of one trait."""

TRAITS, QUERY_TRAITS = 8, 3
BLOCK = 100
"""The number of queries drawn at once."""


@dataclass(frozen=True)
class Plan:
    """A world, and the number of queries in each of `SPLITS`."""

    world: SyntheticWorld
    queries: tuple[int, int, int]


@dataclass(frozen=True)
class SyntheticWorld:
    """The model that all splits have in common: how traits become features and grades.

    Another `fold` has other queries in the same world, another `seed` is another world.
    """

    documents: int = 60
    features: int = 136
    seed: int = 0
    varying: bool = False
    fold: int = 0

    def __post_init__(self) -> None:
        if self.documents < 1 or self.features < 1:
            problem = f"{self.documents} documents a query with {self.features} features"
            raise DataError(problem, cure="at least one of each")

    def letor(self, queries: int, split: Split = "train") -> Letor:
        """A table of `queries` queries in memory."""
        rows = int(self._offsets(queries, split)[-1])
        features = np.empty((rows, self.features), dtype=np.float32)
        grades = np.empty(rows, dtype=np.int32)
        end = 0
        for block in self.blocks(queries, split):
            start, end = end, end + block.rows
            features[start:end], grades[start:end] = block.features, block.grades
        return self._table(queries, split, frozen(features), frozen(grades))

    def mapped(self, path: Path, queries: int, split: Split = "train") -> Letor | None:
        """Return a table of `queries` queries mapped from a file, which is written first if it is not there.

        Returns None if the file cannot be written.
        """
        about = {"format": FORMAT, "queries": queries, "split": split, **asdict(self)}
        opened = open_columns(path)
        if opened is None or opened[0] != about:
            with suppress(OSError):
                self._write_columns(path, queries, split, about)
            opened = open_columns(path)
        if opened is None or opened[0] != about:
            return None
        return self._table(queries, split, opened[1]["features"], opened[1]["grades"])

    def _write_columns(self, path: Path, queries: int, split: Split, about: dict[str, Any]) -> None:
        rows = int(self._offsets(queries, split)[-1])
        grades: list[NDArray[np.int32]] = []

        def features() -> Iterator[Floats]:
            for block in progress(
                self.blocks(queries, split), total=-(-queries // BLOCK), label=f"making {path.stem}"
            ):
                grades.append(block.grades)
                yield block.features

        columns = {
            "features": Column((rows, self.features), np.float32, features()),
            "grades": Column((rows,), np.int32, grades),  # filled while `features` is written
        }
        write_columns(path, columns, about)

    def blocks(self, queries: int, split: Split = "train") -> Iterator[Letor]:
        """Yield the table a hundred queries at a time, for `write_letor` and other code that need not hold it
        whole."""
        names = query_names(queries, split)
        # Draw whole blocks, so that the table of fewer queries is a prefix of the table of more.
        offsets = self._offsets(queries + -queries % BLOCK, split)
        for first in range(0, queries, BLOCK):
            bounds = offsets[first : first + BLOCK + 1] - offsets[first]
            features, grades = self._block(first, np.diff(bounds), split)
            some = names[first : first + BLOCK]
            bounds = bounds[: len(some) + 1]
            yield Letor(some, frozen(bounds), frozen(features[: bounds[-1]]), frozen(grades[: bounds[-1]]))

    def _block(self, query: int, lengths: IntArray, split: Split) -> tuple[Floats, NDArray[np.int32]]:
        rng = self._streams("fold", self.fold, split, self.documents, query)
        traits = _traits(lengths, rng)
        drawn = _relevance(traits) + NOISE * rng.standard_normal(len(traits), dtype=np.float32)
        return self._views.of(traits, rng), np.searchsorted(self._cuts, drawn).astype(np.int32)

    def _offsets(self, queries: int, split: Split) -> IntArray:
        lengths = np.full(queries, self.documents)
        if self.varying:
            spread = 0.6  # deviation of ln(length): two lists in three have half to twice the usual length
            drawn = self._streams("fold", self.fold, split, "lengths").normal(
                -(spread**2) / 2, spread, size=queries
            )
            lengths = np.maximum(1, np.rint(self.documents * np.exp(drawn))).astype(np.int64)
        return np.concatenate(([0], np.cumsum(lengths)))

    def _table(self, queries: int, split: Split, features: Floats, grades: NDArray[np.int32]) -> Letor:
        offsets = frozen(self._offsets(queries, split))
        return Letor(query_names(queries, split), offsets, features, grades, name=f"synthetic {split}")

    @property
    def _streams(self) -> Streams:
        return Streams(self.seed).under("synthetic letor", self.features)

    @cached_property
    def _views(self) -> _Views:
        return _Views(self.features, self._streams("views"))

    @cached_property
    def _cuts(self) -> NDArray[Any]:
        """Thresholds of relevance between the grades, such that the grades have their shares."""
        rng = self._streams("grades")
        traits = _traits(np.full(3_000, 60), rng)
        drawn = _relevance(traits) + NOISE * rng.standard_normal(len(traits), dtype=np.float32)
        cuts: NDArray[Any] = np.quantile(drawn, np.cumsum(GRADE_SHARES)[:-1])
        return cuts


FOLDS = {
    "synthetic": Plan(SyntheticWorld(), (1_000, 300, 300)),
    "synthetic-mslr": Plan(SyntheticWorld(documents=120, varying=True), (6_000, 2_000, 2_000)),
}
"""The named folds; `synthetic-mslr` has the size of one of MSLR-WEB10K's."""


def load_synthetic(name: str, split: Split = "train", *, fold: int = 0) -> Letor:
    """Return one split of a named fold, made once and then mapped from the cache folder."""
    plan = _plan(name)
    world, queries = replace(plan.world, fold=fold), plan.queries[SPLITS.index(split)]
    try:
        folder = cache_folder() / "synthetic"
    except RuntimeError:  # no home folder, so no cache
        table = world.letor(queries, split)
    else:
        path = folder / f"{name}-{fold}-{split}.columns"
        table = world.mapped(path, queries, split) or world.letor(queries, split)
    return replace(table, name=f"{name} {split}")


def _plan(name: str) -> Plan:
    if name not in FOLDS:
        raise DataError(f"no synthetic fold {name!r}", cure=f"one of {', '.join(FOLDS)}")
    return FOLDS[name]


def query_names(queries: int, split: Split) -> tuple[str, ...]:
    """Return query ids: numbers, as readers of LETOR files expect, that no two splits share."""
    first = 1 + 10_000_000 * SPLITS.index(split)
    return tuple(map(str, range(first, first + queries)))


def _traits(lengths: IntArray, rng: Rng) -> Floats:
    """Return the traits of every row: its document's, then its query's, the last of which is in no feature.

    Documents of one query resemble each other: a fifth of a trait's variance is the query's.
    """
    query = np.repeat(np.arange(len(lengths)), lengths)
    shared = rng.standard_normal((len(lengths), TRAITS + QUERY_TRAITS + 1), dtype=np.float32)
    own = rng.standard_normal((len(query), TRAITS), dtype=np.float32)
    documents = np.float32(0.2**0.5) * shared[query, :TRAITS] + np.float32(0.8**0.5) * own
    return np.concatenate((documents, shared[query, TRAITS:]), axis=1)


def _relevance(traits: Floats) -> Floats:
    """Return the relevance of every row without noise.

    Two traits help by themselves, one of two others as the query's kind demands, one counts only together
    with another, and one is best in the middle. The query's share of relevant documents is in no feature, so
    grades compare only within a query.
    """
    a, b, c, d, e, f = traits[:, :6].T
    kind, riches = traits[:, TRAITS], traits[:, -1]
    gate = 1 / (1 + np.exp(-3 * kind))
    alone = 0.8 * a + 0.8 * np.maximum(b, 0) + 1.1 * (gate * c + (1 - gate) * d)
    relevance: Floats = alone + 0.8 * a * e - 0.7 * f**2 + 2.0 * riches
    return relevance


class _Views:
    """The features: each a mixture of traits with noise, nonlinear, sometimes missing, on a scale of
    its own."""

    SHOWS = "ddddqddndn"
    """The content of every ten features: the document (d), the query alone (q), noise (n)."""
    PARTS = 5
    """Parts of a page: body, anchor, title, URL and the whole. A page may lack any, and some features are
    then 0."""

    def __init__(self, width: int, rng: Rng) -> None:
        shows = np.array([self.SHOWS[at % 10] for at in range(width)])
        document, query = np.flatnonzero(shows == "d"), np.flatnonzero(shows == "q")
        self.mix = np.zeros((TRAITS + QUERY_TRAITS, width), dtype=np.float32)
        self.mix[rng.integers(TRAITS, size=len(document)), document] = 0.3
        self.mix[np.arange(len(document)) % TRAITS, document] = 1
        self.mix[TRAITS + np.arange(len(query)) % QUERY_TRAITS, query] = 1
        self.blur = rng.uniform(0.5, 1.5, size=width).astype(np.float32)
        self.blur[query] = 0
        self.bend = rng.integers(len(_BENDS) + 1, size=width)
        self.bend[query] %= len(_BENDS) - 1  # query features are never missing
        self.part = rng.integers(self.PARTS, size=width)
        self.lacking = rng.uniform(0.1, 0.5, size=self.PARTS)
        self.scale = (10 ** rng.uniform(-1, 3, size=width)).astype(np.float32)

    def of(self, traits: Floats, rng: Rng) -> Floats:
        """Return the features of rows with these traits."""
        values = rng.standard_normal((len(traits), self.mix.shape[1]), dtype=np.float32)
        values *= self.blur
        values += traits[:, :-1] @ self.mix
        for kind, bend in enumerate(_BENDS):
            columns = np.flatnonzero(self.bend == kind)
            values[:, columns] = bend(values[:, columns])
        lacks = rng.random((len(traits), self.PARTS), dtype=np.float32) < self.lacking
        for part in range(self.PARTS):
            columns = np.flatnonzero((self.bend == len(_BENDS) - 1) & (self.part == part))
            values[np.ix_(lacks[:, part], columns)] = 0
        values *= self.scale
        return np.round(values, 4)


_BENDS: tuple[Callable[[Any], Any], ...] = (
    np.exp,  # heavy-tailed
    lambda values: np.floor(np.exp(1 + np.float32(0.8) * values)),  # whole numbers, as counts
    lambda values: 1 / (1 + np.exp(-values)),  # between 0 and 1, as ratios
    lambda values: np.maximum(values + 2, 0),  # scores, 0 if the page lacks the part
)
