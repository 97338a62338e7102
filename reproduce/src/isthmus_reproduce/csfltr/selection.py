"""Rules that choose pairs across silos, other than the best by BM25.

rtk      from a reverse top-K sketch, without scoring all documents
random   any documents
mixed    half of each list by BM25, the rest at random
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError
from isthmus.features import FIELDS, Pairs
from isthmus.federation.semisupervised import Mask, Pick, best
from isthmus.private import CountsView, PrivateCounts, PublishedCells
from isthmus.retrieval import idf
from isthmus.text import Tokens
from isthmus_reproduce.csfltr.rtk import ReverseTopK


def by_sketch(
    view: CountsView, queries: Tokens, depth: int, rng: np.random.Generator, banned: Mask | None = None
) -> IntArray:
    """Choose documents by the reverse top-K sketch of the bodies, then others."""
    counts = view.counts["body"]
    if not isinstance(counts, PrivateCounts) or not isinstance(counts.noisy, PublishedCells):
        raise ConfigError("a reverse top-K sketch is made of released cells", key="rtk")
    depth = min(depth, len(view))
    sketch = ReverseTopK.of(counts.noisy.sketch, k=depth)
    weights = idf(counts.frequencies(queries.terms), counts.documents)
    scores = np.zeros((len(queries), len(view)))
    for query in range(len(queries)):
        words = queries.terms[queries.offsets[query] : queries.offsets[query + 1]]
        hits = sketch.search(words, weights, k=depth)
        scores[query, hits] = np.arange(len(hits), 0, -1)
    return best(scores, depth, banned)


def at_random(
    view: CountsView, queries: Tokens, depth: int, rng: np.random.Generator, banned: Mask | None = None
) -> IntArray:
    """Choose documents of the other silo at random, whatever their scores."""
    return best(rng.random((len(queries), len(view))), depth, banned)


def half_at_random(
    view: CountsView, queries: Tokens, depth: int, rng: np.random.Generator, banned: Mask | None = None
) -> IntArray:
    """Choose the upper half of the best by BM25, and documents below them at random."""
    scores = view.scores(queries, FIELDS)
    upper = best(scores, depth, banned)
    lottery = rng.random(scores.shape)
    if banned is not None:
        lottery[banned] = np.inf
    lottery = np.append(lottery, np.full((len(queries), 1), np.inf), axis=1)  # last column for −1 in `first`
    size = upper.shape[1]
    first = upper[:, : (size + 1) // 2]
    np.put_along_axis(lottery, first, np.inf, axis=1)
    below = np.argsort(lottery, axis=1, kind="stable")[:, : size // 2]
    chosen = np.where(np.isposinf(np.take_along_axis(lottery, below, axis=1)), -1, below)
    return np.concatenate((first, chosen), axis=1)


PICKS: Mapping[str, Pick] = {"rtk": by_sketch, "random": at_random, "mixed": half_at_random}


def judged_pairs(scores: FloatArray, grades: NDArray[np.int32], depth: int) -> Pairs:
    """Choose relevant documents from any rank, and the best of the rest up to `depth` documents in all."""
    ranked = np.where(grades > 0, np.inf, scores)
    chosen = np.sort(np.argsort(-ranked, axis=1, kind="stable")[:, :depth], axis=1)
    return Pairs(np.repeat(np.arange(len(scores)), chosen.shape[1]), chosen.ravel())
