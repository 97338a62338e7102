"""Which pairs of a silo's queries and other silos' documents are looked at, and what they look like.

    bm25     a silo's documents with the largest BM25 from released counts
    rtk      the same from a reverse top-K sketch, without scoring all documents
    random   any documents
    mixed    half of each list by bm25, the rest at random

Others' documents are chosen by released noisy counts only. Every pair keeps the silo its document lies in and
how it was chosen. The rule that makes the candidates when the ranker is used also samples the labelled pairs
it learns from; `judged` is the other rule, every relevant document from any rank beside hard negatives, which
shows the learner pairs that it will not meet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError
from isthmus.features import FIELDS, Pairs
from isthmus.private.counts import PrivateCounts, PublishedCells
from isthmus.private.rtk import ReverseTopK
from isthmus.private.views import View
from isthmus.randomness import Streams
from isthmus.retrieval import idf
from isthmus.tables import Letor
from isthmus.tables.ids import FloatArray, Ids, IntArray
from isthmus.text import Tokens

SELECTIONS = ("bm25", "rtk", "random", "mixed")
Mask = NDArray[np.bool_]


class Views(Protocol):
    """Every silo's documents, as one silo has their counts; `noised` are its own as others see them."""

    def __call__(self, holder: str, *, noised: bool = False) -> View: ...


@dataclass(frozen=True)
class Selection:
    """How many of a silo's documents a query is paired with, and how they are chosen."""

    kind: Literal["bm25", "rtk", "random", "mixed"] = "bm25"
    depth: int = 100

    def __post_init__(self) -> None:
        if self.kind not in SELECTIONS:
            raise ConfigError(f"no selection {self.kind!r}", key=self.kind, known=SELECTIONS)
        if self.depth < 1:
            raise ConfigError(f"depth = {self.depth}", key="depth", value=self.depth, expected="1 or more")


@dataclass(frozen=True, eq=False)
class Chosen:
    """Pairs in the order of their queries; `documents` are positions among the holder's.

    `ways` is how each was chosen, a position in SELECTIONS; `errors` how uncertain its counts are: the root
    mean square of the error bars of its query's words, 0 where counts are exact.
    """

    queries: IntArray
    holders: IntArray
    documents: IntArray
    ways: IntArray
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


def choose(
    view: View,
    queries: Tokens,
    selection: Selection,
    rng: np.random.Generator,
    *,
    banned: Mask | None = None,
) -> tuple[IntArray, IntArray]:
    """For every query the chosen documents of one silo, (queries, documents), and how each was chosen.

    `banned` (queries × documents) are pairs that may not stand; their place is taken by −1.
    """
    depth = min(selection.depth, len(view))
    if selection.kind == "rtk":
        scores = _rtk_scores(view, queries, depth)
    elif selection.kind == "random":
        scores = rng.random((len(queries), len(view)))
    else:
        scores = view.scores(queries, FIELDS)
    if banned is not None:
        scores = np.where(banned, -np.inf, scores)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
    ways = np.full(best.shape, SELECTIONS.index(selection.kind))
    if selection.kind == "mixed":
        best, ways = _mixed(scores, best, rng)
    chosen = np.where(np.isneginf(np.take_along_axis(scores, best, axis=1)), -1, best)
    return chosen, ways


def _mixed(scores: FloatArray, best: IntArray, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """The upper half of the best, and documents below them at random."""
    kept = (best.shape[1] + 1) // 2
    lottery = rng.random(scores.shape)
    np.put_along_axis(lottery, best[:, :kept], np.inf, axis=1)
    lottery[np.isneginf(scores)] = np.inf
    drawn = np.argsort(lottery, axis=1, kind="stable")[:, : best.shape[1] - kept]
    ways = np.full(best.shape, SELECTIONS.index("random"))
    ways[:, :kept] = SELECTIONS.index("bm25")
    return np.concatenate((best[:, :kept], drawn), axis=1), ways


def _rtk_scores(view: View, queries: Tokens, depth: int) -> FloatArray:
    """A falling score for what the reverse top-K sketch of the bodies finds, 0 elsewhere."""
    counts = view.counts["body"]
    if not isinstance(counts, PrivateCounts) or not isinstance(counts.noisy, PublishedCells):
        raise ConfigError("a reverse top-K sketch is made of released cells", key="rtk")
    sketch = ReverseTopK.of(counts.noisy.sketch, k=depth)
    weights = idf(counts.frequencies(queries.terms), counts.documents)
    scores = np.zeros((len(queries), len(view)))
    for query in range(len(queries)):
        words = queries.terms[queries.offsets[query] : queries.offsets[query + 1]]
        hits = sketch.search(words, weights, k=depth)
        scores[query, hits] = np.arange(len(hits), 0, -1)
    return scores


def gather(
    views: Views,
    queries: Tokens,
    holders: Sequence[tuple[int, str]],
    selection: Selection,
    streams: Streams,
    *,
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
        seen = (selecting or views)(holder, noised=noised or selection.kind == "rtk")
        forbidden = None if banned is None else banned.get(holder)
        chosen, ways = choose(seen, queries, selection, streams("pairs", holder), banned=forbidden)
        there = chosen >= 0
        query = np.repeat(np.arange(len(queries)), there.sum(axis=1))
        pairs = Pairs(query, chosen[there])
        table, errors = view.features(queries, pairs), view.errors(queries, pairs)
        parts.append(Chosen(query, np.full(len(pairs), at), pairs.documents, ways[there], table, errors))
    return Chosen.joined(parts)
