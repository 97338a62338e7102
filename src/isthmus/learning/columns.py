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

from collections.abc import Mapping

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
PROFILE = ("bm25", "dense", "rare")
"""The columns whose largest values say how well the collection covers a query."""


def profile_of(table: FloatArray) -> FloatArray:
    """The largest value of every column of `PROFILE` over a query's candidates; −inf where there is none.

    Those of several silos are joined by their maximum.
    """
    columns = table[:, [COLUMNS.index(name) for name in PROFILE]]
    return np.asarray(np.where(np.isfinite(columns), columns, -np.inf).max(axis=0, initial=-np.inf))
