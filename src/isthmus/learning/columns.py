"""What a search model reads of every candidate of a query, the same in every silo.

    bm25            BM25's share of the query's Σ idf, 0 to 1
    dense           the cosine of an encoder that all silos agree on; NaN without a vector
    rare            Σ idf² of the query's words that the document has, of all of them; title, lead: of those
                    in its title, and in the beginning of its body
    title.* body.*  of the sixteen features those that more words never lower, per word or per Σ idf
    ln length       of title and body in terms
    ln words, idf   of the query: its words, and their mean idf

Columns in `RISING` never fall where a document has one more word of the query in place of another word. Their
weights are 0 or more, so a model's score does not fall either. The rest of the sixteen features is of the
query alone (IDF) or counts different words (absolute discounting) and has no such law.
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
"""Of `isthmus.features.NAMES`."""
COVERAGE = ("rare", "title", "lead")
RISING = (*RETRIEVERS, *COVERAGE, *FEATURES)
OF_QUERY = ("ln words", "idf")
"""The same for all candidates of a query: they order nothing, and let a fit tell queries apart."""
COLUMNS = (*RISING, "ln length", *OF_QUERY)
GROUPS: Mapping[str, tuple[int, ...]] = {
    "bm25": tuple(at for at, name in enumerate(COLUMNS) if name != "dense" and name not in OF_QUERY),
    "dense": (COLUMNS.index("dense"),),
}
"""Whose evidence a column is, for explanations: words, or the encoder."""
HITS, LIST = 10, 20
"""Hits that a page shows; places of a query's list that are looked at, in a silo and merged."""
DISCOUNTS = 1 / np.log2(np.arange(2, HITS + 2))
PROFILE = ("first", "first three", "first ten", "second ten", *OF_QUERY)
"""Mean margins at the top of a query's merged list, and what is known of the query."""
MEAN = PROFILE.index("first ten")


def merged(margins: Sequence[FloatArray]) -> FloatArray:
    """The highest `LIST` margins of all silos, query by query, from every silo's table of (queries, LIST);
    −inf where there are fewer."""
    return -np.sort(-np.concatenate(margins, axis=1), axis=1)[:, :LIST]


def shapes(lists: FloatArray) -> FloatArray:
    """The first four of `PROFILE` of merged lists; a list that ends earlier goes on as it ended."""
    lowest = np.where(np.isfinite(lists), lists, np.inf).min(axis=1, keepdims=True)
    whole = np.where(np.isfinite(lists), lists, np.where(np.isfinite(lowest), lowest, 0.0))
    first = (whole[:, :1], whole[:, :3], whole[:, :HITS], whole[:, HITS:])
    return np.column_stack([part.mean(axis=1) for part in first])


def profile_of(margins: Sequence[FloatArray], of_query: FloatArray) -> FloatArray:
    """The profile of one query, from the best margins of every silo (at most `LIST` each, best first) and
    the query's own columns."""
    padded = [np.concatenate((each[:LIST], np.full(LIST - len(each[:LIST]), -np.inf))) for each in margins]
    return np.concatenate((shapes(merged([each[None] for each in padded]))[0], of_query))
