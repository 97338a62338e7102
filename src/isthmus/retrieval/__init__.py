"""Retrievers: anything with `search(queries, k) -> Run`, so a fused or a remote one is a retriever too."""

from isthmus.retrieval.bm25 import BM25, BM25Index
from isthmus.retrieval.dense import Dense, DenseIndex
from isthmus.retrieval.fused import Fused
from isthmus.retrieval.retriever import Retriever
from isthmus.retrieval.statistics import (
    FIELD_TABLES,
    NO_TERMS,
    TEXT,
    TIMES,
    Statistics,
    idf,
    posterior_means,
    summed,
)
