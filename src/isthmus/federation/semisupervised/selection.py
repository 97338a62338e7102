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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError
from isthmus.features import Pairs
from isthmus.federation.semisupervised.views import Sight, View, bm25_scores, features
from isthmus.private.counts import PrivateCounts
from isthmus.private.reading import Shrink
from isthmus.private.rtk import ReverseTopK
from isthmus.randomness import Streams
from isthmus.tables import Letor
from isthmus.tables.grouped import rows_of
from isthmus.tables.ids import FloatArray, Ids, IntArray, frozen
from isthmus.text import Tokens

SELECTIONS = ("bm25", "rtk", "random", "mixed")
Mask = NDArray[np.bool_]


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
    sight: Sight,
    queries: Tokens,
    holder: str,
    selection: Selection,
    rng: np.random.Generator,
    *,
    noised: bool = False,
    banned: Mask | None = None,
) -> tuple[IntArray, IntArray]:
    """For every query the chosen documents of one silo, (queries, documents), and how each was chosen.

    `banned` (queries × documents) are pairs that may not stand; their place is taken by −1.
    """
    count = sight.size(holder)
    depth = min(selection.depth, count)
    shape = len(queries), count
    if selection.kind == "rtk":
        if not isinstance(sight, View):
            raise ConfigError("a reverse top-K sketch is made of released cells", key="rtk")
        scores = _rtk_scores(sight, queries, holder, depth)
    elif selection.kind == "random":
        scores = rng.random(shape)
    else:
        scores = bm25_scores(sight, queries, holder, noised=noised)
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


def _rtk_scores(view: View, queries: Tokens, holder: str, depth: int) -> FloatArray:
    """A falling score for what the reverse top-K sketch of the bodies finds, 0 elsewhere."""
    sketch = ReverseTopK.of(view.shelves[holder].cells["body"], k=depth)
    counts = view.counts(holder, "body", noised=True)
    total = counts.documents
    having = np.clip(np.asarray(counts.frequencies(queries.terms), dtype=np.float64), 0, total)
    weights = np.log1p((total - having + 0.5) / (having + 0.5))
    scores = np.zeros((len(queries), view.size(holder)))
    for query in range(len(queries)):
        words = queries.terms[queries.offsets[query] : queries.offsets[query + 1]]
        found = sketch.search(words, weights, k=depth)
        scores[query, found] = np.arange(len(found), 0, -1)
    return scores


def gather(
    sight: Sight,
    queries: Tokens,
    holders: Sequence[tuple[int, str]],
    selection: Selection,
    streams: Streams,
    *,
    noised: bool = False,
    banned: dict[str, Mask] | None = None,
    selecting: Sight | None = None,
) -> Chosen:
    """The chosen pairs of own queries and the documents of some silos, with their features.

    `selecting` may be a cheaper sight to choose by. What is drawn for one silo does not depend on which
    others there are: a silo that leaves or joins costs its own pairs only.
    """
    parts = []
    for at, holder in holders:
        chosen, ways = choose(
            selecting or sight,
            queries,
            holder,
            selection,
            streams("pairs", holder),
            noised=noised,
            banned=None if banned is None else banned.get(holder),
        )
        there = chosen >= 0
        query = np.repeat(np.arange(len(queries)), there.sum(axis=1))
        pairs = Pairs(query, chosen[there])
        table = features(sight, queries, pairs, holder, noised=noised)
        errors = uncertainty(sight, queries, pairs, holder, noised=noised)
        parts.append(Chosen(query, np.full(len(pairs), at), pairs.documents, ways[there], table, errors))
    return Chosen.joined(parts)


def judged_pairs(scores: FloatArray, grades: NDArray[np.int32], depth: int) -> Pairs:
    """The other sampling rule: relevant documents from any rank, and the best of the rest up to `depth`."""
    ranked = np.where(grades > 0, np.inf, scores)
    best = np.sort(np.argsort(-ranked, axis=1, kind="stable")[:, :depth], axis=1)
    return Pairs(np.repeat(np.arange(len(scores)), best.shape[1]), best.ravel())


def uncertainty(
    sight: Sight, queries: Tokens, pairs: Pairs, holder: str, *, noised: bool = False
) -> FloatArray:
    """The root mean square error bar of the counts of a query's words in the document's body."""
    counts = sight.counts(holder, "body", noised=noised)
    if not isinstance(counts, PrivateCounts) or not len(pairs):
        return np.zeros(len(pairs))
    table = queries.counts()
    offsets = table.indptr.astype(np.int64)
    entries = rows_of(offsets, pairs.queries)
    rows = np.repeat(np.arange(len(pairs)), np.diff(offsets)[pairs.queries])
    words = Ids(frozen(table.indices.astype(np.int64)), queries.terms.vocabulary)[entries]
    reader = counts.reader
    if isinstance(reader, Shrink) and reader.context is not None:
        reader = replace(reader, context=None)  # a rough idea is enough, and topics take their time
    variance = replace(counts, reader=reader).reading(pairs.documents[rows], words).error ** 2
    sizes = np.maximum(np.bincount(rows, minlength=len(pairs)), 1)
    spread: FloatArray = np.sqrt(np.bincount(rows, variance, len(pairs)) / sizes)
    return spread
