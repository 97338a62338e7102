"""Normalisers bring every list of a run to a common scale, f(lists) → scores.

A list of one document, or of equal scores, gets the finite value that each function names rather than NaN,
because such a list holds the retriever's best hit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.fusion.union import Lists


def none(lists: Lists) -> FloatArray:
    """The scores as they are."""
    return lists.scores


def min_max(lists: Lists) -> FloatArray:
    """(s − min) / (max − min); 1 where all are equal."""
    spread = lists.high - lists.low
    return np.where(spread > 0, (lists.scores - lists.low) / np.where(spread > 0, spread, 1.0), 1.0)


def z_score(lists: Lists) -> FloatArray:
    """(s − mean) / population sd, also called ZMUV; 0, the mean, where all are equal."""
    unit = np.where(lists.high > lists.low, min_max(lists), 0.0)
    count = np.maximum(lists.lengths, 1)[lists.list_of_row]
    centred = unit - lists.per_row(np.add, unit) / count
    deviation = np.sqrt(lists.per_row(np.add, centred**2) / count)
    return np.where(deviation > 0, centred / np.where(deviation > 0, deviation, 1.0), 0.0)


def total(lists: Lists) -> FloatArray:
    """(s − min) / Σ (s − min); 1/n where all are equal."""
    shifted = lists.scores - lists.low
    whole = lists.per_row(np.add, shifted)
    return np.where(whole > 0, shifted / np.where(whole > 0, whole, 1.0), 1.0 / _count(lists))


def maximum(lists: Lists) -> FloatArray:
    """s / max; `min_max` for lists with a negative score, whose order division could reverse, or all 0."""
    simple = (lists.low >= 0) & (lists.high > 0)
    return np.where(simple, lists.scores / np.where(simple, lists.high, 1.0), min_max(lists))


def rank(lists: Lists) -> FloatArray:
    """1 − i/n for the document at position i from 0 of a list of n."""
    return 1.0 - lists.ranks / _count(lists)


def borda(lists: Lists) -> FloatArray:
    """1 − i/c with c the number of candidates that all runs together have for the query."""
    return 1.0 - lists.ranks / lists.candidates[lists.list_of_row]


def softmax(lists: Lists) -> FloatArray:
    """exp(s) / Σ exp(s)."""
    odds = np.exp(lists.scores - lists.high)
    return np.asarray(odds / lists.per_row(np.add, odds))


def nonnegative(lists: Lists) -> FloatArray:
    """Shift lists with negative scores to start at 0, so that products and counts cannot reverse their
    order.

    A list of equal scores, none of them positive, becomes 1: it holds hits, not misses.
    """
    shifted = np.where(lists.low < 0, lists.scores - lists.low, lists.scores)
    return np.where((lists.high == lists.low) & (lists.high <= 0), 1.0, shifted)


def _count(lists: Lists) -> FloatArray:
    return np.asarray(lists.lengths[lists.list_of_row], dtype=np.float64)


NORMALISERS: dict[str, Callable[[Lists], FloatArray]] = {
    "none": none,
    "min-max": min_max,
    "z-score": z_score,
    "zmuv": z_score,
    "sum": total,
    "max": maximum,
    "rank": rank,
    "borda": borda,
    "softmax": softmax,
}
