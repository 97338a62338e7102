"""RL-Sim: re-ranking and rank aggregation by the similarity of ranked lists.

Pedronette & Torres (2013), implemented from the description, with aggregation and parameters of the
Unsupervised Distance Learning Framework. Every object has a ranked list of all objects, itself first; two
objects are close if their lists have the same top. Only positions matter, so any strictly increasing change
of scores leaves the result as it is, unless the edges of the graph are calibrated probabilities, which order
the lists and weight their common entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError, DataError
from isthmus.tables import Run

LARGEST = 10_000
"""The largest number of objects; more would need gigabytes for every distance matrix."""


TOPK, ROUNDS = 2, 1
"""K and the number of rounds if neither options nor judgements choose them.

The framework's own K = 15 and three rounds suit images of classes that large. A query has one label or a few
documents: deeper tops are shared by all lists, and more rounds spread that.
"""
GRID = ((2, 1), (3, 1), (5, 1), (8, 1), (15, 1), (2, 2), (5, 2), (5, 3), (15, 3))
"""Pairs of K and number of rounds among which judgements choose, the smallest change first."""


def aggregate(matrices: Sequence[FloatArray], weights: FloatArray | None = None) -> FloatArray:
    """D(i, j) = Π_f (1 + D_f(i, j))^w_f with Σ w = 1; without weights all are 1/F, as in the framework."""
    if weights is None:
        product = np.ones_like(matrices[0])
        for matrix in matrices:
            product *= 1.0 + matrix
        return np.asarray(product ** (1.0 / len(matrices)))
    logarithm = np.zeros_like(matrices[0])
    for matrix, weight in zip(matrices, weights / weights.sum(), strict=True):
        logarithm += weight * np.log1p(matrix)
    return np.asarray(np.exp(np.round(logarithm, 12)))  # rounded, so that the order of runs does not matter


def separations(runs: Sequence[Run]) -> FloatArray:
    """How clearly every run separates its first hits from the others: weights without judgements.

    With a = P(a list's first score > a lower score of any list), the weight is the difference between the
    log-odds of a and those in lists of independent scores, at least a tenth of the clearest run's. Only
    ranks among all scores of the run matter, so a strictly increasing change of scores leaves it as it is.
    """
    clear = np.array([_separation(run) for run in runs])
    return np.asarray(np.maximum(clear, clear.max() / 10))


def _separation(run: Run) -> float:
    from scipy.special import logit
    from scipy.stats import rankdata

    first = run.ranks == 1
    count, rest = int(first.sum()), int((~first).sum())
    if not count or not rest:
        return 0.0
    above = rankdata(run.scores)[first].sum() - count * (count + 1) / 2  # Mann and Whitney's U
    length = run.rows / count
    chance = (length**2 / (length + 1) - 0.5) / (length - 1)  # P(first > a lower) for independent scores
    return max(0.0, float(logit((above + 0.5) / (count * rest + 1)) - logit(chance)))


def intersections(lists: IntArray, topk: int, edges: FloatArray | None = None) -> FloatArray:
    """(2 / (K(K+1))) · Σ_{m=2..K} |τᵢ^m ∩ τⱼ^m| for all pairs of lists, τ^m being the first m entries.

    With `edges`, the strength e(i, x) of every entry x of i's list, a common entry counts √(e(i, x)·e(j, x)).
    """
    from scipy.sparse import csr_matrix

    objects = len(lists)
    depth, place = np.meshgrid(np.arange(2, topk + 1), np.arange(topk), indexing="ij")
    inside = place < depth  # at depth m the first m places count
    entries = lists[:, place[inside]]
    columns = (entries + objects * (depth[inside] - 2)[None, :]).reshape(-1)
    strengths = np.ones(entries.shape) if edges is None else np.take_along_axis(edges, entries, axis=1)
    starts = np.arange(objects + 1) * inside.sum()
    rows = np.sqrt(strengths).reshape(-1), columns, starts
    tops = csr_matrix(rows, shape=(objects, objects * (topk - 1)))
    return np.asarray((tops @ tops.T).toarray() * (2.0 / (topk * (topk + 1))))


def rerank(
    distance: FloatArray,
    *,
    topk: int = 15,
    ck: int | None = None,
    rounds: int = 3,
    edges: FloatArray | None = None,
) -> tuple[IntArray, FloatArray]:
    """Run RL-Sim's iterations on a distance matrix. Returns the ranked lists and the distances.

    Among the first CK of i's list the new distance is 1/(1 + sim) where the lists intersect, else the old
    one + 1; beyond CK it is the old one + 2. Each pair takes the smaller of its two directions, lists are
    sorted again (ties keep their order), and K grows by one each round. `edges` are those of
    `intersections`.
    """
    objects = len(distance)
    ck = min(700, objects - 1) if ck is None else ck
    _check(objects, topk + max(rounds - 1, 0), ck)
    lists = np.argsort(distance, axis=1, kind="stable")
    if not np.array_equal(lists[:, 0], np.arange(objects)):
        raise DataError("an object is not first in its own list", cure="give it distance 0 to itself alone")
    near = np.arange(objects) <= ck
    for k in range(topk, topk + rounds):
        similar = intersections(lists, k, edges)
        within: NDArray[np.bool_] = np.empty((objects, objects), dtype=bool)
        np.put_along_axis(within, lists, np.broadcast_to(near, lists.shape), axis=1)
        distance = np.where(
            within, np.where(similar > 0, 1.0 / (1.0 + similar), distance + 1.0), distance + 2.0
        )
        np.fill_diagonal(distance, 0.0)
        distance = np.minimum(distance, distance.T)
        order = np.argsort(np.take_along_axis(distance, lists, axis=1), axis=1, kind="stable")
        lists = np.take_along_axis(lists, order, axis=1)
    return lists, distance


def object_distances(
    run: Run, documents: Sequence[str], queries: Sequence[str], similar: Run | None = None
) -> FloatArray:
    """Return the distances among documents and queries (in this order) by one retriever's run.

    An object's list is itself, then documents, then queries. Between queries and documents, positions come
    from the run and the transposed run; among documents and among queries, from `similar` or the inner
    product of reciprocal ranks.
    """
    count = len(documents), len(queries)
    if sum(count) > LARGEST:
        _check(sum(count), 1, 1)
    row = {name: at for at, name in enumerate(queries)}
    column = {name: at for at, name in enumerate(documents)}
    homes = np.array([row[query] for query in run.queries], dtype=np.int64)[run.query_of_row]
    places = np.array([column[name] for name in run.documents.tolist()], dtype=np.int64)
    score = np.full((count[1], count[0]), -np.inf)
    reciprocal = np.zeros_like(score)
    score[homes, places] = run.scores
    reciprocal[homes, places] = 1.0 / run.ranks
    distances = np.full((sum(count), sum(count)), np.inf)
    distances[count[0] :, : count[0]] = _ranks(np.where(reciprocal > 0, reciprocal, -np.inf))
    distances[: count[0], count[0] :] = count[0] + _ranks(score.T)
    distances[: count[0], : count[0]] = _ranks(_likeness(reciprocal.T, column, similar))
    distances[count[0] :, count[0] :] = count[0] + _ranks(_likeness(reciprocal, row, similar))
    np.fill_diagonal(distances, -1.0)
    place = positions(np.argsort(distances, axis=1, kind="stable")).astype(np.float64)
    return np.where(np.isfinite(distances), place, float(sum(count)))


def calibrated_edges(
    runs: Sequence[Run], confidences: Sequence[FloatArray], documents: Sequence[str], queries: Sequence[str]
) -> FloatArray:
    """Return the strength of every edge among documents and queries (in this order) by calibrated
    probabilities.

    Between a query and a document it is the mean of the runs' probabilities, 0 for a run without the
    document; among documents and among queries it is the cosine of these probabilities; of an object to
    itself it is 1.
    """
    if len(documents) + len(queries) > LARGEST:
        _check(len(documents) + len(queries), 1, 1)
    row = {name: at for at, name in enumerate(queries)}
    column = {name: at for at, name in enumerate(documents)}
    probabilities = np.zeros((len(queries), len(documents)))
    for run, confidence in zip(runs, confidences, strict=True):
        homes = np.array([row[query] for query in run.queries], dtype=np.int64)[run.query_of_row]
        places = np.array([column[name] for name in run.documents.tolist()], dtype=np.int64)
        probabilities[homes, places] += confidence / len(runs)
    edges = np.block([[_cosines(probabilities.T), probabilities.T], [probabilities, _cosines(probabilities)]])
    np.fill_diagonal(edges, 1.0)
    return edges


def edge_distances(edges: FloatArray, documents: int) -> FloatArray:
    """Return the position of every object in every list by strength: itself, then documents, then queries."""
    order = 1.0 - edges
    order[:, documents:] += 1.0
    np.fill_diagonal(order, -1.0)
    return positions(np.argsort(order, axis=1, kind="stable")).astype(np.float64)


def _cosines(rows: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = rows / np.where(lengths > 0, lengths, 1.0)
    return np.asarray(np.clip(units @ units.T, 0.0, 1.0))


def positions(lists: IntArray) -> IntArray:
    """Return the position of every object in every list: the inverse permutation of each row."""
    place = np.empty_like(lists)
    np.put_along_axis(place, lists, np.broadcast_to(np.arange(lists.shape[1]), lists.shape), axis=1)
    return place


def _likeness(reciprocal: FloatArray, place: Mapping[str, int], similar: Run | None) -> FloatArray:
    """Return the similarities among documents or among queries; −∞ where none is known."""
    if similar is None:
        product = reciprocal @ reciprocal.T
        return np.where(product > 0, product, -np.inf)
    likeness = np.full((len(place), len(place)), -np.inf)
    for query, names, scores in similar.lists():
        if query in place:
            known = [at for at, name in enumerate(names) if name in place]
            likeness[place[query], [place[names[at]] for at in known]] = scores[known]
    return likeness


def _ranks(values: FloatArray) -> FloatArray:
    """The position of every entry in its row, largest first, ties by column; ∞ for −∞."""
    order = np.argsort(-values, axis=1, kind="stable")
    return np.where(np.isfinite(values), positions(order), np.inf)


def _check(objects: int, topk: int, ck: int) -> None:
    if objects > LARGEST:
        raise DataError(
            f"RL-Sim compares all objects with each other, and {objects:,} are more than {LARGEST:,}",
            cure="cut the lists with run.top(k), or fuse fewer queries at once",
        )
    if topk > objects:
        raise ConfigError(f"topk reaches {topk} of {objects} objects", key="topk", value=topk)
    if not 1 <= ck <= objects - 1:
        raise ConfigError(f"ck = {ck} is not between 1 and {objects - 1}", key="ck", value=ck)
