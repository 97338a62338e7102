"""The columns that a search model reads of every candidate of a query, the same in every silo.

    bm25            BM25 as a share of the query's Σ idf, 0 to 1
    dense           the cosine of an encoder that all silos agree on; NaN without a vector
    rare            the share of the query's Σ idf² from words that the document has; title, lead: from words
                    in its title, and in the beginning of its body
    title.* body.*  those of the sixteen features that more words never lower, per word or per Σ idf
    ln length       of title and body in terms
    ln words, idf   of the query: the number of its words, and their mean idf

Columns in `RISING` never fall if a document has one more word of the query in place of another word. Their
weights are 0 or more, so a model's score does not fall either. The rest of the sixteen features depends on
the query alone (IDF) or counts distinct words (absolute discounting) and has no such property.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from isthmus.arrays import FloatArray

RETRIEVERS = ("bm25", "dense")
FEATURES = tuple(
    f"{field}.{kind}"
    for field in ("title", "body")
    for kind in ("TF", "TF·IDF", "BM25", "LMIR.DIR", "LMIR.JM")
)
"""Features used, by their names in `isthmus.features.NAMES`."""
COVERAGE = ("rare", "title", "lead")
RISING = (*RETRIEVERS, *COVERAGE, *FEATURES)
OF_QUERY = ("ln words", "idf")
"""Columns that are equal for all candidates of a query; they change no order, but queries differ in them."""
COLUMNS = (*RISING, "ln length", *OF_QUERY)
GROUPS: Mapping[str, tuple[int, ...]] = {
    "bm25": tuple(at for at, name in enumerate(COLUMNS) if name != "dense" and name not in OF_QUERY),
    "dense": (COLUMNS.index("dense"),),
}
"""Source of evidence of each column, for explanations: words, or the encoder."""
HITS, LIST = 10, 20
"""Number of hits on a page; number of places of a query's list that are used, in a silo and merged."""
DISCOUNTS = 1 / np.log2(np.arange(2, HITS + 2))
PROFILE = ("first", "first three", "first ten", "second ten", *OF_QUERY)
"""Mean margins at the top of a query's merged list, and the columns of the query."""
MEAN = PROFILE.index("first ten")


def merged(margins: Sequence[FloatArray]) -> FloatArray:
    """Return the highest `LIST` margins of all silos for every query, from every silo's table of (queries,
    LIST); −inf where there are fewer."""
    return -np.sort(-np.concatenate(margins, axis=1), axis=1)[:, :LIST]


def shapes(lists: FloatArray) -> FloatArray:
    """Return the first four of `PROFILE` for merged lists; shorter lists continue with their last margin."""
    lowest = np.where(np.isfinite(lists), lists, np.inf).min(axis=1, keepdims=True)
    whole = np.where(np.isfinite(lists), lists, np.where(np.isfinite(lowest), lowest, 0.0))
    first = (whole[:, :1], whole[:, :3], whole[:, :HITS], whole[:, HITS:])
    return np.column_stack([part.mean(axis=1) for part in first])


def profile_of(margins: Sequence[FloatArray], of_query: FloatArray) -> FloatArray:
    """Return the profile of one query, from the best margins of every silo (at most `LIST` each, best first)
    and the query's own columns."""
    padded = [np.concatenate((each[:LIST], np.full(LIST - len(each[:LIST]), -np.inf))) for each in margins]
    return np.concatenate((shapes(merged([each[None] for each in padded]))[0], of_query))
