"""A cross-encoder over the first hits of another retriever: one more list of scores, for a fuser to weigh.

As the last stage it lowers nDCG@10 on some collections, so its list is not meant to be shown as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.encoders import CrossEncoder
from isthmus.report import progress
from isthmus.retrieval.retriever import Retriever
from isthmus.tables import Documents, Queries, Run

FIRST = 20
"""Hits that a cross-encoder reads: a pair costs about as much as encoding a document."""


@dataclass(frozen=True, eq=False)
class Reranked:
    """The first hits of a retriever, by the score that a cross-encoder gives to query and document."""

    retriever: Retriever
    documents: Documents
    cross: CrossEncoder
    first: int = FIRST
    name: str = "cross"

    def search(self, queries: Queries, k: int) -> Run:
        """At most `k` and at most `first` documents of every query."""
        text_of = dict(zip(self.documents.ids, self.documents.texts, strict=True))
        query_of = dict(zip(queries.ids, queries.texts, strict=True))
        hits = self.retriever.search(queries, min(k, self.first))
        lists = progress(hits.lists(), total=len(hits), label="reading queries with documents")
        scores = [
            self.cross.score(query_of[query], [text_of[document] for document in documents])
            for query, documents, _ in lists
        ]
        return hits.with_scores(np.concatenate([np.empty(0), *scores]), name=self.name)
