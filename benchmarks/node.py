"""What a node costs at 40,000 documents: a search, indexing everything, opening the index again.

Documents have 65 words by Zipf's law over 60,000, queries four of them, so that a query meets long postings.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._rows import limited
from isthmus.service.index import Index
from isthmus.service.searching import Bm25Scorer, Searcher
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Search

DOCUMENTS, WORDS, LENGTH = 40_000, 60_000, 65
QUERIES = 300
LIMIT_MS, LIMIT_SECONDS, LIMIT_START = 8.0, 90.0, 2.0


def main() -> list[dict[str, Any]]:
    """Every row of this benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "documents.db")
        began = time.process_time()
        store.put(_documents())
        Index(Path(folder) / "index", store).catch_up()
        indexing = time.process_time() - began
        began = time.process_time()
        index = Index(Path(folder) / "index", store)
        index.compact()
        index.snapshot.find("anything", 10)
        opening = time.process_time() - began
        search = _search(Searcher("silo", index, store, Bm25Scorer()))
        store.close()
    return [
        limited(f"node: a search over {DOCUMENTS:,} documents (ms of processor time)", search, LIMIT_MS),
        limited(f"node: indexing {DOCUMENTS:,} documents (s of processor time)", indexing, LIMIT_SECONDS),
        limited("node: opening that index again (s of processor time)", opening, LIMIT_START),
    ]


def zipf_texts(count: int, length: int, seed: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, WORDS + 1) ** 1.05
    ends = np.cumsum(share / share.sum())
    words = np.array([f"{at:05x}x" for at in range(WORDS)])
    for row in np.searchsorted(ends, rng.random((count, length))):
        yield " ".join(words[np.minimum(row, WORDS - 1)])


def _documents() -> Iterator[Draft]:
    for at, text in enumerate(zipf_texts(DOCUMENTS, LENGTH, 0)):
        title, _, body = text.partition(" ")
        yield Draft(f"d{at}", title, body)


def _search(searcher: Searcher) -> float:
    """Milliseconds of processor time, with snippets and reasons."""
    asked = [Search(query=text, explain=True) for text in zipf_texts(QUERIES, 4, 1)]
    searcher = replace(searcher, depth=100)
    for one in asked[:20]:
        searcher.search(one, snippets=True)
    began = time.process_time()
    for one in asked:
        searcher.search(one, snippets=True)
    return (time.process_time() - began) / len(asked) * 1000


if __name__ == "__main__":
    for row in main():
        print(row)
