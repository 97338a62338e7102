"""Dense retrieval: nearest unit vectors, exactly, by blocked matrix products; reranking by a cross-encoder.

>>> from isthmus.encoders import Lsa
>>> from isthmus.tables import Documents, Queries
>>> import numpy as np
>>> documents = Documents(("d1", "d2"), ("", ""), ("a red apple", "a green pear"), np.zeros(2, int))
>>> queries = Queries(("q1",), ("green pears",), np.zeros(1, int), ("test",))
>>> Dense(Lsa.fit(documents.texts)).index(documents).search(queries, k=1)
Run 'dense': 1 query, 1 row
  q1  d2 1

`Reranked` scores the first hits of another retriever by a cross-encoder: one more list for a fuser to weigh.
As the last stage it lowers nDCG@10 on some collections, so its list is not meant to be shown as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import CrossEncoder, Encoder, Vectors, encode_cached
from isthmus.errors import ConfigError
from isthmus.report import progress
from isthmus.retrieval.retriever import Retriever, best_rows, check_depth, check_unique, collect, rows_of
from isthmus.tables import Documents, Queries, Run

Score = Literal["cosine", "inverse_distance"]

_BLOCK = 256  # queries per matrix product: a block of scores over 40,000 documents takes 40 MB


@dataclass(frozen=True)
class Dense:
    """Cosine similarity of encoded texts.

    With `score="inverse_distance"` the score is 1/(‖q − d‖² + 1e-9), as in the rank-fusion paper's code:
    the same order on another scale.
    """

    encoder: Encoder
    score: Score = "cosine"
    name: str = "dense"

    def __post_init__(self) -> None:
        if self.score not in get_args(Score):
            raise ConfigError(f"no score {self.score!r}", key=self.score, known=get_args(Score))

    def index(self, documents: Documents) -> DenseIndex:
        """Encode the documents (title and body together)."""
        check_unique(documents.ids, "document")
        names = Ids.of(documents.ids)
        order = np.argsort(-names.codes)
        texts = [documents.texts[row] for row in order.tolist()]
        return DenseIndex(self, names[order], encode_cached(self.encoder, texts, label="encoding documents"))


@dataclass(frozen=True, eq=False, repr=False)
class DenseIndex:
    """Encoded documents; rows are in descending order of id, which breaks ties."""

    settings: Dense
    documents: Ids
    vectors: Vectors

    def __len__(self) -> int:
        return len(self.documents)

    def search(self, queries: Queries, k: int) -> Run:
        """The k nearest documents of every query, except the document that the query was made from.

        A text without any known word has no direction: as a query it gets an empty list, as a document it is
        never a hit.
        """
        check_depth(k)
        check_unique(queries.ids, "query")
        vectors = encode_cached(self.settings.encoder, queries.texts, queries=True)
        hidden = rows_of(self.documents, queries.own) if queries.own else np.full(len(queries), -1)
        scored = self._everything(vectors)
        lists: list[tuple[IntArray, FloatArray]] = []
        for (rows, cosines), skipped in zip(scored, hidden.tolist(), strict=True):
            cosines[rows == skipped] = -np.inf
            best = best_rows(cosines, k, above=-np.inf)
            lists.append((rows[best], shaped(cosines[best].astype(np.float64), self.settings.score)))
        return collect(queries.ids, self.documents, lists, self.settings.name)

    def _everything(self, vectors: Vectors) -> Iterator[tuple[IntArray, Vectors]]:
        """For every query, all rows and their cosines; −inf for a text without direction."""
        rows = np.arange(len(self))
        silent = ~self.vectors.any(axis=1)
        for start in range(0, len(vectors), _BLOCK):
            block = vectors[start : start + _BLOCK]
            scores = _cosines(block, self.vectors.T)
            scores[:, silent] = -np.inf
            scores[~block.any(axis=1)] = -np.inf
            yield from ((rows, cosines) for cosines in scores)

    def __repr__(self) -> str:
        return f"DenseIndex: {len(self):,} documents, {self.vectors.shape[1]} dimensions"


def shaped(cosines: FloatArray, score: Score) -> FloatArray:
    """Cosines unchanged, or 1/(squared distance of the unit vectors + 1e-9)."""
    return cosines if score == "cosine" else 1 / (2 - 2 * cosines + 1e-9)


def _cosines(left: Vectors, right: Vectors) -> Vectors:
    """Products of unit vectors, clipped to −1…1: values that rounding put beyond 1 are ties."""
    products: Vectors = left @ right
    return np.clip(products, -1, 1, out=products)


FIRST = 20
"""Number of hits that a cross-encoder scores: a pair costs about as much as encoding a document."""


@dataclass(frozen=True, eq=False)
class Reranked:
    """The first hits of a retriever, scored by a cross-encoder that reads query and document together."""

    retriever: Retriever
    documents: Documents
    cross: CrossEncoder
    first: int = FIRST
    name: str = "cross"

    def search(self, queries: Queries, k: int) -> Run:
        """At most `k` and at most `first` documents of every query, in the order of the cross-encoder's
        scores."""
        text_of = dict(zip(self.documents.ids, self.documents.texts, strict=True))
        query_of = dict(zip(queries.ids, queries.texts, strict=True))
        hits = self.retriever.search(queries, min(k, self.first))
        lists = progress(hits.lists(), total=len(hits), label="reading queries with documents")
        scores = [
            self.cross.score(query_of[query], [text_of[document] for document in documents])
            for query, documents, _ in lists
        ]
        return hits.with_scores(np.concatenate([np.empty(0), *scores]), name=self.name)
