"""Dense retrieval: nearest unit vectors, exactly by blocked matrix products or approximately by a graph.

>>> from isthmus.encoders import Lsa
>>> from isthmus.tables import Documents, Queries
>>> import numpy as np
>>> documents = Documents(("d1", "d2"), ("", ""), ("a red apple", "a green pear"), np.zeros(2, int))
>>> queries = Queries(("q1",), ("green pears",), np.zeros(1, int), ("test",))
>>> Dense(Lsa.fit(documents.texts)).index(documents).search(queries, k=1)
Run 'dense': 1 query, 1 row
  q1  d2 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Encoder, Vectors, encode_cached
from isthmus.errors import ConfigError, MissingExtra
from isthmus.retrieval.retriever import best_rows, check_depth, check_unique, collect, rows_of
from isthmus.tables import Documents, Queries, Run

Score = Literal["cosine", "inverse_distance"]

_BLOCK = 256  # queries per matrix product: a block of scores over 40,000 documents takes 40 MB
_NEIGHBOURS = 32
_SPARE = 4


@dataclass(frozen=True)
class Dense:
    """Cosine similarity of encoded texts.

    With `approximate`, candidates come from an HNSW graph (faiss, extra `ann`) and are scored exactly;
    with `score="inverse_distance"` the score is 1/(‖q − d‖² + 1e-9), as the rank-fusion paper's code
    has it: the same order, another shape.
    """

    encoder: Encoder
    approximate: bool = False
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
    """Encoded documents; rows are in descending order of id, which is how ties are broken."""

    settings: Dense
    documents: Ids
    vectors: Vectors

    def __len__(self) -> int:
        return len(self.documents)

    def search(self, queries: Queries, k: int) -> Run:
        """The k nearest documents of every query, without the one a query was made from.

        A text without any known word has no direction: it gets an empty list, and is never a hit.
        """
        check_depth(k)
        check_unique(queries.ids, "query")
        vectors = encode_cached(self.settings.encoder, queries.texts)
        hidden = rows_of(self.documents, queries.own) if queries.own else np.full(len(queries), -1)
        scored = self._candidates(vectors, k) if self.settings.approximate else self._everything(vectors)
        lists: list[tuple[IntArray, FloatArray]] = []
        for (rows, cosines), skipped in zip(scored, hidden.tolist(), strict=True):
            cosines[rows == skipped] = -np.inf
            best = best_rows(cosines, k, above=-np.inf)
            lists.append((rows[best], shaped(cosines[best].astype(np.float64), self.settings.score)))
        return collect(queries.ids, self.documents, lists, self.settings.name)

    def _everything(self, vectors: Vectors) -> Iterator[tuple[IntArray, Vectors]]:
        """For every query all rows and their cosines; −inf for a text without direction."""
        rows = np.arange(len(self))
        silent = ~self.vectors.any(axis=1)
        for start in range(0, len(vectors), _BLOCK):
            block = vectors[start : start + _BLOCK]
            scores = _cosines(block, self.vectors.T)
            scores[:, silent] = -np.inf
            scores[~block.any(axis=1)] = -np.inf
            yield from ((rows, cosines) for cosines in scores)

    def _candidates(self, vectors: Vectors, k: int) -> Iterator[tuple[IntArray, Vectors]]:
        """The graph's neighbours, a few more than asked for so that a hidden document costs nothing."""
        wanted = max(1, min(len(self), k + _SPARE))
        graph = self._graph
        graph.hnsw.efSearch = max(64, 2 * wanted)
        for start in range(0, len(vectors), _BLOCK):
            block = vectors[start : start + _BLOCK]
            neighbours = (
                graph.search(np.ascontiguousarray(block), wanted)[1] if wanted else np.empty((len(block), 0))
            )
            for query, near in zip(block, neighbours, strict=True):
                rows = np.sort(near[near >= 0]).astype(np.int64)
                cosines = _cosines(self.vectors[rows], query)
                cosines[~self.vectors[rows].any(axis=1)] = -np.inf
                yield rows, cosines if query.any() else np.full_like(cosines, -np.inf)

    @cached_property
    def _graph(self) -> Any:
        try:
            import faiss
        except ImportError:
            raise MissingExtra("ann", "approximate search") from None
        graph = faiss.IndexHNSWFlat(self.vectors.shape[1], _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = 200
        graph.add(np.ascontiguousarray(self.vectors))
        return graph

    def __repr__(self) -> str:
        return f"DenseIndex: {len(self):,} documents, {self.vectors.shape[1]} dimensions"


def shaped(cosines: FloatArray, score: Score) -> FloatArray:
    """Cosines as they are, or 1/(squared distance of the unit vectors + 1e-9)."""
    return cosines if score == "cosine" else 1 / (2 - 2 * cosines + 1e-9)


def _cosines(left: Vectors, right: Vectors) -> Vectors:
    """Products of unit vectors; what rounding put beyond 1 ties with 1, in the order as in every score."""
    products: Vectors = left @ right
    return np.clip(products, -1, 1, out=products)
