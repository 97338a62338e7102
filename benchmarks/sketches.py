"""Sketching, answering and features at the size of a large silo: 40,000 documents of 1,000 words.

The peer of sketching is Apache DataSketches' Count-Min, with one sketch of the same size per document, fed
word by word from Python. That would take minutes, so it gets a sample of the documents and its time is scaled
up; creating its sketches is not timed. Both sides start from words that are cut already. Answering covers a
whole question with two decoys per word: asked, charged to a ledger on disk, answered, and recovered.
"""

from __future__ import annotations

import gc
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._rows import limited, row
from benchmarks.evaluation import seconds
from isthmus.arrays import Ids, frozen
from isthmus.features import ExactCounts, Pairs, compute
from isthmus.private.counts import Asker, CountRelease, Desk, Owner, in_memory
from isthmus.private.decoys import Decoys
from isthmus.private.ledger import Budget, Ledger, fingerprint
from isthmus.private.mechanisms import NoiseKey, OneShot
from isthmus.private.sketch import CountMin, HashFamily, width_for
from isthmus.text import Tokens

DOCUMENTS, WORDS, VOCABULARY = 40_000, 1_000, 50_000
SAMPLE = 200
"""Number of documents that the peer gets."""
QUERIES, DEPTH, QUERY_WORDS = 1_000, 1_000, 5
KEY = bytes(range(32))


def main() -> list[dict[str, Any]]:
    """Run this benchmark and return its rows."""
    body = texts(DOCUMENTS, WORDS)
    family = HashFamily(KEY, 1, width_for(body.lengths))
    rows = [*building(body, family), *memory(body, family)]
    sketch = CountMin.of(body, family)
    with tempfile.TemporaryDirectory() as folder:
        rows += answering(body, sketch, Path(folder) / "bench.ledger")
    del sketch
    return [*rows, *features(body)]


def texts(documents: int, words: int, seed: int = 0) -> Tokens:
    """Return texts of `words` words each, drawn by Zipf's law."""
    rng = np.random.default_rng(seed)
    chance = 1.0 / np.arange(1, VOCABULARY + 1)
    edges = np.cumsum(chance / chance.sum())
    ranks = np.searchsorted(edges, rng.random(documents * words)).astype(np.int64)
    names = Ids.of([f"w{rank:06d}" for rank in range(VOCABULARY)])
    offsets = np.arange(documents + 1) * words
    return Tokens(Ids(frozen(np.minimum(ranks, VOCABULARY - 1)), names.vocabulary), frozen(offsets))


def building(body: Tokens, family: HashFamily) -> list[dict[str, Any]]:
    """Time sketching all documents: in seconds, and in words per second."""
    ours = min(seconds(lambda: CountMin.of(body, family)) for _ in range(5))
    peer = fed(body, family) * len(body) / SAMPLE
    total = len(body.terms)
    named = f"{len(body):,} documents × {WORDS:,} words"
    peer_name = f"Apache DataSketches, {SAMPLE} of them, scaled"
    seen = row(f"sketch {named} (s)", ours, peer, peer_name, goal=10)
    return [
        seen,
        seen | {"name": "… words a second", "ours": total / ours, "peer": total / peer},
    ]


def fed(body: Tokens, family: HashFamily) -> float:
    """Return the peer's seconds for the sample, the best of five."""
    from datasketches import count_min_sketch

    vocabulary = body.terms.words
    cut = body.terms.codes[: int(body.offsets[SAMPLE])].tolist()
    words = [vocabulary[code] for code in cut]
    lists = [words[at * WORDS : (at + 1) * WORDS] for at in range(SAMPLE)]

    def once() -> float:
        sketches = [count_min_sketch(family.rows, family.width) for _ in lists]
        began = time.perf_counter()
        for sketch, some in zip(sketches, lists, strict=True):
            update = sketch.update
            for word in some:
                update(word)
        return time.perf_counter() - began

    return min(once() for _ in range(5))


def memory(body: Tokens, family: HashFamily) -> list[dict[str, Any]]:
    """Measure bytes per document, stored and at the peak of building, beside those with a quarter of them."""
    quarter = len(body) // 4
    some = Tokens(
        Ids(frozen(body.terms.codes[: int(body.offsets[quarter])]), body.terms.vocabulary),
        frozen(body.offsets[: quarter + 1]),
    )
    (kept, peak), (kept_some, peak_some) = (held(tokens, family) for tokens in (body, some))
    named, told = f"{len(body):,} documents", f"the same of {quarter:,} documents"
    return [
        row(f"bytes a document kept, {named}", kept, kept_some, told, goal=0.95),
        row(f"bytes a document at the peak, {named}", peak, peak_some, told, goal=0.9),
    ]


def held(tokens: Tokens, family: HashFamily) -> tuple[float, float]:
    """Return bytes per document: of the sketches, and of all that is allocated while they are built."""
    gc.collect()
    tracemalloc.start()
    sketch = CountMin.of(tokens, family)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    kept = sum(column.nbytes for column in (sketch.offsets, sketch.cells, sketch.values))
    return kept / len(tokens), peak / len(tokens)


def answering(body: Tokens, sketch: CountMin, path: Path) -> list[dict[str, Any]]:
    """Time a question of ten words about all documents: the first time, when it is charged, and repeated."""
    names = [f"silo/{number}" for number in range(len(body))]
    with Ledger(path, Budget()) as ledger:
        covered = ledger.versions(names, [fingerprint(name) for name in names])
        kind = OneShot()
        release = CountRelease("body", sketch.family, kind, NoiseKey(KEY), ledger.charge_all)
        desk = in_memory(Desk(Owner(sketch, body.lengths, covered, release)), "asker")
        occurrences = np.bincount(body.terms.codes, minlength=VOCABULARY)
        asker = Asker(release.terms, sketch.family, kind, Decoys(body.terms, occurrences, KEY))
        query = Ids.of([f"w{rank:06d}" for rank in (3, 17, 60, 150, 400, 900, 2000, 5000, 12_000, 30_000)])

        def asked() -> None:
            question = asker.ask(query)
            asker.recover(question, desk(question.message), len(body))

        first = seconds(asked)
        again = min(seconds(asked) for _ in range(20))
    return [
        limited(f"ten words about {len(body):,} documents, asked and answered (ms)", 1000 * again, 50),
        limited("… the first time, which is charged and indexes the cells (s)", first, 10),
    ]


def features(body: Tokens) -> list[dict[str, Any]]:
    """Time all sixteen features of a million pairs."""
    rng = np.random.default_rng(1)
    queries = texts(QUERIES, QUERY_WORDS, seed=2)
    title = ExactCounts.of(texts(len(body), 10, seed=3))
    whole = ExactCounts.of(body)
    documents = rng.integers(len(body), size=(QUERIES, DEPTH))
    pairs = Pairs(np.repeat(np.arange(QUERIES), DEPTH), np.sort(documents, axis=1).ravel())
    whole.distinct, title.distinct  # noqa: B018  counted once for a collection, not for every run
    took = min(seconds(lambda: compute(queries, pairs, title=title, body=whole)) for _ in range(5))
    return [limited(f"16 features of {len(pairs):,} pairs, {QUERY_WORDS} words a query (s)", took, 5)]
