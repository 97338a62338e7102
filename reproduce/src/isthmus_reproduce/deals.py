"""Dealing a collection into silos by topic or at random, for experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import IntArray
from isthmus.errors import DataError
from isthmus.partition import divide
from isthmus.randomness import Streams
from isthmus.tables import Corpus
from isthmus.text import tokenise

Rng = np.random.Generator


def deal_corpus(
    corpus: Corpus, silos: int, streams: Streams, *, by: Literal["topic", "random"] = "topic"
) -> Corpus:
    """Deal a collection's documents and queries into silos, by topic or at random."""
    if by == "topic":
        documents, queries = by_topic(corpus.documents.texts, corpus.queries.texts, silos, streams)
    else:
        rng = streams("partition", "random")
        documents = divide(len(corpus.documents), np.ones(silos), rng)
        queries = rng.integers(silos, size=len(corpus.queries))
    return corpus.dealt([f"silo{silo + 1}" for silo in range(silos)], documents, queries)


def by_topic(
    documents: Sequence[str], queries: Sequence[str], silos: int, streams: Streams
) -> tuple[IntArray, IntArray]:
    """Return silos of documents, by spherical k-means on TF-IDF, and of queries, by nearest centroid.

    A text without a known word gets a random silo.
    """
    if len(documents) < silos:
        raise DataError(
            f"{len(documents)} documents cannot be dealt to {silos} silos", cure="deal to fewer silos"
        )
    points, query_points = _tf_idf(documents, queries)
    if not points.nnz:
        raise DataError("no document has a word to tell its topic by", cure="deal at random")
    rng = streams("partition", "topic")
    homes, centres, _ = max(
        (_k_means(points, silos, rng) for _ in range(RESTARTS)), key=lambda clustering: clustering[2]
    )
    nearest = (query_points @ centres.T).argmax(axis=1)
    return _anywhere(points, homes, silos, rng), _anywhere(query_points, nearest, silos, rng)


def _tf_idf(documents: Sequence[str], queries: Sequence[str]) -> tuple[Any, Any]:
    """Return unit rows of (1 + ln tf)·(1 + ln((1 + N)/(1 + df))) for documents and queries, in CSR form."""
    counts = tokenise([*documents, *queries]).counts().astype(np.float32)
    df = np.bincount(counts[: len(documents)].indices, minlength=counts.shape[1])
    idf = 1 + np.log((1 + len(documents)) / (1 + df))
    counts.data = (1 + np.log(counts.data)) * idf[counts.indices].astype(np.float32)
    lengths = np.diff(counts.indptr)
    norms = np.sqrt(np.bincount(np.repeat(np.arange(len(lengths)), lengths), counts.data**2, len(lengths)))
    counts.data /= np.repeat(norms, lengths).astype(np.float32)
    return counts[: len(documents)], counts[len(documents) :]


RESTARTS = 4
"""Number of random starts of k-means; the tightest clusters win."""


def _k_means(points: Any, k: int, rng: Rng, *, rounds: int = 60) -> tuple[IntArray, NDArray[Any], float]:
    """Cluster unit rows by cosine. Returns the cluster of each, unit centroids, and the mean similarity."""
    from scipy.sparse import csr_array

    count = points.shape[0]
    centres = _seeds(points, k, rng)
    homes = np.full(count, -1)
    for _ in range(rounds):
        likeness = points @ centres.T
        nearest = likeness.argmax(axis=1)
        best = likeness.max(axis=1)
        for empty in np.flatnonzero(np.bincount(nearest, minlength=k) == 0):
            lonely = int(best.argmin())
            nearest[lonely], best[lonely] = empty, np.inf
        if np.array_equal(nearest, homes):
            break
        homes = nearest
        chosen = csr_array((np.ones(count, np.float32), (homes, np.arange(count))), shape=(k, count))
        sums = (chosen @ points).toarray()
        centres = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)
    return homes, centres, float(likeness.max(axis=1).mean())


def _seeds(points: Any, k: int, rng: Rng) -> NDArray[Any]:
    """Draw seeds by k-means++: every further one by its distance to the nearest seed so far."""
    rows = [int(rng.integers(points.shape[0]))]
    nearest = np.full(points.shape[0], -np.inf)
    for _ in range(k - 1):
        nearest = np.maximum(nearest, (points @ points[[rows[-1]]].T).toarray().ravel())
        distance = np.maximum(1.0 - nearest, 0.0)
        distance[rows] = 0.0
        total = distance.sum()
        probabilities = distance / total if total > 0 else None
        rows.append(int(rng.choice(points.shape[0], p=probabilities)))
    return np.asarray(points[rows].toarray())


def _anywhere(points: Any, homes: IntArray, silos: int, rng: Rng) -> IntArray:
    blank = np.diff(points.indptr) == 0
    return np.where(blank, rng.integers(silos, size=len(homes)), homes)
