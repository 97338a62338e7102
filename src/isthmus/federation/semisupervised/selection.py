"""Which pairs of a silo's queries and other silos' documents are looked at, and what they look like.

A silo's documents with the largest BM25 from released counts. Others' documents are chosen by what was
released only: choosing by exact counts of another silo would be a release that nobody charged. Every pair
keeps the silo its document lies in. The rule that makes the candidates when the ranker is used also samples
the labelled pairs it learns from. `Pick` is the seam for other rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.features import FIELDS, Pairs
from isthmus.private import CountsView
from isthmus.randomness import Streams
from isthmus.tables import Letor
from isthmus.text import Tokens

DEPTH = 100
"""Documents of a silo that a query is paired with."""
Mask = NDArray[np.bool_]
Pick = Callable[[CountsView, Tokens, int, np.random.Generator, Mask | None], IntArray]
"""For every query so many documents of a silo, but for banned pairs (queries × documents), or −1 for none."""


class Views(Protocol):
    """Every silo's documents, as one silo has their counts; `noised` are its own as others see them."""

    def __call__(self, holder: str, *, noised: bool = False) -> CountsView: ...


@dataclass(frozen=True, eq=False)
class Chosen:
    """Pairs in the order of their queries; `documents` are positions among the holder's.

    `errors` is how uncertain the counts of each are: see `CountsView.errors`.
    """

    queries: IntArray
    holders: IntArray
    documents: IntArray
    features: FloatArray
    errors: FloatArray

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, rows: NDArray[np.intp] | Mask) -> Chosen:
        """Some of the pairs."""
        return Chosen(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @staticmethod
    def joined(parts: Sequence[Chosen]) -> Chosen:
        """All pairs in the order of their queries."""
        columns = [
            np.concatenate([getattr(part, name) for part in parts]) for name in Chosen.__dataclass_fields__
        ]
        return Chosen(*columns).take(np.argsort(columns[0], kind="stable"))

    def letor(
        self, queries: Sequence[str], documents: Sequence[tuple[str, ...]], grades: NDArray[np.int32]
    ) -> Letor:
        """The pairs as feature rows; `documents` has every holder's ids."""
        starts = np.concatenate(([0], np.cumsum([len(ids) for ids in documents])))
        every = Ids.of([name for ids in documents for name in ids])
        names = every[starts[self.holders] + self.documents]
        return Letor.of(Ids.of(queries)[self.queries], self.features, grades, documents=names)


def best_by_bm25(
    view: CountsView, queries: Tokens, depth: int, rng: np.random.Generator, banned: Mask | None = None
) -> IntArray:
    """The documents with the largest BM25, title and body added."""
    return best(view.scores(queries, FIELDS), depth, banned)


def best(scores: FloatArray, depth: int, banned: Mask | None) -> IntArray:
    """The documents of the largest scores, −1 where a pair is banned."""
    allowed = scores if banned is None else np.where(banned, -np.inf, scores)
    chosen = np.argsort(-allowed, axis=1, kind="stable")[:, :depth]
    return np.where(np.isneginf(np.take_along_axis(allowed, chosen, axis=1)), -1, chosen)


def gather(
    views: Views,
    queries: Tokens,
    holders: Sequence[tuple[int, str]],
    streams: Streams,
    *,
    depth: int = DEPTH,
    pick: Pick = best_by_bm25,
    noised: bool = False,
    banned: Mapping[str, Mask] | None = None,
    selecting: Views | None = None,
) -> Chosen:
    """The chosen pairs of own queries and the documents of some silos, with their features.

    `selecting` may be cheaper views to choose by. What is drawn for one silo does not depend on which others
    there are: a silo that leaves or joins costs its own pairs only.
    """
    parts = []
    for at, holder in holders:
        view = views(holder, noised=noised)
        chosen = pick(
            (selecting or views)(holder, noised=noised),
            queries,
            depth,
            streams("pairs", holder),
            (banned or {}).get(holder),
        )
        there = chosen >= 0
        query = np.repeat(np.arange(len(queries)), there.sum(axis=1))
        pairs = Pairs(query, chosen[there])
        table, errors = view.features(queries, pairs), view.errors(queries, pairs)
        parts.append(Chosen(query, np.full(len(pairs), at), pairs.documents, table, errors))
    return Chosen.joined(parts)
