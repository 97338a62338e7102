"""A collection in silos, as nodes hold it, and what is found in it: by the service's own code, in process.

Documents are indexed and searched as a node does it, and statistics are shared as silos share them. Only the
network is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.corpora import load
from isthmus.encoders import (
    Encoder,
    Lsa,
    Spans,
    Vectors,
    encode_cached,
    load_encoder,
    passage_texts,
    split_passages,
)
from isthmus.evaluation import evaluate
from isthmus.fusion import fuse
from isthmus.partition import folds, linked_queries
from isthmus.private import HashFamily, family_of, released
from isthmus.randomness import Streams
from isthmus.retrieval import BM25, TEXT, Statistics, summed
from isthmus.service import (
    AnyQueries,
    Bm25Scorer,
    Draft,
    EncoderSettings,
    Index,
    SharedStatistics,
    SqliteStore,
    save_lsa,
)
from isthmus.tables import Corpus, Run
from isthmus_reproduce.deals import deal_corpus

MEASURE = "nDCG@10"
CENTRAL_BM25 = "BM25, one index"
SILOS, FOLDS, SHOWN, DEPTH = 4, 5, 10, 100
FEW, ROUNDS = 100, 5
"""With fewer queries than this, so many rounds of folds: one would tell of its folds, not of the product."""
BUILT_IN = "pydocs"
SMOKE_QUERIES, SMOKE_DOCUMENTS = 60, 500


@dataclass(frozen=True, eq=False)
class World:
    """A collection whose silos hold its documents; `groups[i]` is what query i belongs to, `turns[r][i]` the
    fold in which the r-th round over all queries tests it."""

    corpus: Corpus
    groups: IntArray
    turns: tuple[IntArray, ...]

    @classmethod
    def of(cls, data: str, *, seed: int, smoke: bool = False, silos: int = SILOS) -> World:
        """Dealt by topic, the built-in world as it is unless it is to have another number of silos; queries
        that nobody judged are left out."""
        corpus = load(data)
        groups = dict(zip(corpus.queries.ids, _groups(corpus), strict=True))
        if smoke:
            corpus = _smaller(corpus, Streams(seed))
        if len(corpus.silos) == 1 or silos != SILOS:
            corpus = deal_corpus(corpus, silos, Streams(seed), by="topic")
        judged = np.array([query in corpus.qrels for query in corpus.queries.ids])
        corpus = replace(corpus, queries=corpus.queries.take(judged))
        names = [groups[query] for query in corpus.queries.ids]
        numbered = np.unique(names, return_inverse=True)[1].astype(np.int64)
        rounds = ROUNDS if len(numbered) < FEW and not smoke else 1
        turns = tuple(
            folds(
                len(numbered),
                2 if smoke else FOLDS,
                Streams(seed)("search", "folds", number),
                groups=numbered,
            )
            for number in range(rounds)
        )
        return cls(corpus, numbered, turns)

    @property
    def own(self) -> tuple[str | None, ...]:
        """What every query was made from, and must not find."""
        return self.corpus.queries.own or (None,) * len(self.corpus.queries)

    @cached_property
    def relevant(self) -> dict[str, dict[str, bool]]:
        """By the text of a query and the id of a document."""
        text = dict(zip(self.corpus.queries.ids, self.corpus.queries.texts, strict=True))
        qrels = self.corpus.qrels
        by_query: dict[str, dict[str, bool]] = {}
        for query, document, grade in zip(
            qrels.query_of_row.tolist(), qrels.documents.tolist(), qrels.grades.tolist(), strict=True
        ):
            if grade > 0 and qrels.queries[query] in text:
                by_query.setdefault(text[qrels.queries[query]], {})[document] = True
        return by_query

    def values(self, run: Run) -> FloatArray:
        """The measure of every query."""
        evaluation = evaluate(self.corpus.qrels[list(self.corpus.queries.ids)], run, [MEASURE])
        (values,) = evaluation.values.values()
        return np.asarray(values)


def _groups(corpus: Corpus) -> Sequence[Any]:
    """Queries whose judgements hang together; each by itself where they were written independently."""
    return linked_queries(corpus).tolist() if corpus.queries.own else list(range(len(corpus.queries)))


def _smaller(corpus: Corpus, streams: Streams) -> Corpus:
    """A few queries, and few documents beside those they are judged with."""
    judged = [at for at, query in enumerate(corpus.queries.ids) if query in corpus.qrels]
    rng = streams("search", "smoke")
    chosen = np.sort(rng.permutation(judged)[:SMOKE_QUERIES])
    queries = corpus.queries.take(chosen)
    qrels = corpus.qrels[list(queries.ids)]
    wanted = set(qrels.documents.tolist())
    others = rng.permutation(len(corpus.documents))[:SMOKE_DOCUMENTS]
    mask = np.array([id in wanted for id in corpus.documents.ids])
    mask[others] = True
    return replace(corpus, documents=corpus.documents.take(mask), queries=queries, qrels=qrels)


@dataclass(frozen=True, eq=False)
class Silo:
    """One silo's store and index."""

    name: str
    store: SqliteStore
    index: Index

    def listed(self, text: str, itself: str | None) -> dict[str, float]:
        """Its best documents by BM25 alone."""
        snapshot = self.index.snapshot
        candidates = snapshot.find(text, DEPTH + 1)
        scored = Bm25Scorer().score(snapshot, candidates)
        names = [candidates.documents[at] for at in scored.order.tolist()]
        scores = scored.scores[scored.order].tolist()
        by_document = {name: score for name, score in zip(names, scores, strict=True) if name != itself}
        return dict(list(by_document.items())[:DEPTH])


@dataclass(frozen=True, eq=False)
class Federation:
    """All silos of a world."""

    world: World
    silos: tuple[Silo, ...]
    family: HashFamily

    def share(self, form: str | None) -> None:
        """Hand every silo the sum of all silos' statistics, exact or with the default noise; or none."""
        total = None if form is None else summed(self._figures(silo, form) for silo in self.silos)
        for silo in self.silos:
            silo.index.share(total)

    def _figures(self, silo: Silo, form: str) -> Statistics:
        exact = silo.index.snapshot.exact_statistics(silo.name, (TEXT,))
        return exact if form == "exact" else released(exact, self.family, SharedStatistics().epsilon)

    def lists(self) -> list[Run]:
        """Every silo's BM25 lists with the figures it has now."""
        queries = self.world.corpus.queries
        entries = list(zip(queries.ids, queries.texts, self.world.own, strict=True))
        return [
            Run.from_dict({id: silo.listed(text, own) for id, text, own in entries}, name=silo.name)
            for silo in self.silos
        ]


class RememberedEncoder(Encoder):
    """An encoder whose vectors of a world's texts are known: they are encoded once for all silos and runs."""

    def __init__(self, name: str, encoder: Encoder, world: World) -> None:
        self.name, self.encoder = name, encoder
        documents = zip(world.corpus.documents.titles, world.corpus.documents.bodies, strict=True)
        texts = sorted({text for title, body in documents for text in _passages(encoder, title, body)})
        vectors = encode_cached(encoder, texts, label="encoding documents")
        self._documents = dict(zip(texts, vectors, strict=True))
        queries = sorted(set(world.corpus.queries.texts))
        self._queries = dict(zip(queries, encode_cached(encoder, queries, queries=True), strict=True))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the encoder."""
        return self.encoder.fingerprint

    def settings(self, folder: Path) -> EncoderSettings:
        """As a node names it; one that was fitted is a file in the folder."""
        if isinstance(self.encoder, Lsa):
            save_lsa(self.encoder, folder / "lsa")
            return EncoderSettings("lsa", path=folder / "lsa")
        return EncoderSettings("encoder", name=self.name)

    @property
    def limit(self) -> int | None:
        """Tokens at which the encoder cuts a document."""
        return self.encoder.limit

    def token_spans(self, text: str) -> Spans:
        """The encoder's own."""
        return self.encoder.token_spans(text)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Vectors of passages of the world's documents."""
        return np.stack([self._documents[text] for text in texts])

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Vectors of queries, those of the world as they are known."""
        for text in texts:
            if text not in self._queries:
                self._queries[text] = self.encoder.encode_queries([text])[0]
        return np.stack([self._queries[text] for text in texts])


def _passages(encoder: Encoder, title: str, body: str) -> list[str]:
    return passage_texts(encoder, title, body, split_passages(encoder, title, body))


def encoder_of(world: World, name: str) -> RememberedEncoder:
    """An encoder that was added, by name; `lsa` is fitted on the texts of all silos."""
    if name == "lsa":
        texts = world.corpus.documents.texts
        return RememberedEncoder(name, Lsa.fit(texts, dimensions=EncoderSettings().dimensions), world)
    return RememberedEncoder(name, load_encoder(name), world)


@contextmanager
def federation(
    world: World, *, encoder: RememberedEncoder | None = None, whole: bool = False
) -> Iterator[Federation]:
    """The silos' stores and indexes in a folder that goes afterwards; `whole` is one silo of everything."""
    family = family_of("experiment", SharedStatistics().width)
    documents = {name: world.corpus.silo(name).documents for name in world.corpus.silos}
    with TemporaryDirectory(prefix="isthmus-search-") as folder:
        silos = []
        settings = EncoderSettings("none") if encoder is None else encoder.settings(Path(folder))
        for name, part in {"all": world.corpus.documents}.items() if whole else documents.items():
            store = SqliteStore(Path(folder) / f"{name}.db")
            store.put(map(Draft, part.ids, part.titles, part.bodies))
            index = Index(Path(folder) / name, store, encoder=settings, family=family)
            index.catch_up()
            if encoder is not None:  # what is known is not encoded again
                known = AnyQueries(encoder, encoder.encoder.width)
                index._encoder, index.snapshot = known, replace(index.snapshot, encoder=known)
                index.encode_all()
            silos.append(Silo(name, store, index))
        try:
            yield Federation(world, tuple(silos), family)
        finally:
            for silo in silos:
                silo.store.close()


# what is found


def references(world: World, draws: int) -> dict[str, list[list[float]]]:
    """By row the measure, query by query, of one index and of lists merged without learning; several lists
    where statistics were drawn several times."""
    corpus = world.corpus
    central = BM25().index(corpus.documents).search(corpus.queries, DEPTH)
    runs = {CENTRAL_BM25: [central]}
    with federation(world) as silos:
        lists = silos.lists()
        runs["raw, local statistics"] = [Run.concat(lists)]
        runs["RRF"] = [fuse(lists, "rrf")]
        runs["z-score"] = [fuse(lists, "comb-sum", norm="z-score")]
        silos.share("exact")
        runs["raw, shared exactly"] = [Run.concat(silos.lists())]
        runs["raw, shared privately"] = []
        for _ in range(draws):
            silos.share("private")
            runs["raw, shared privately"].append(Run.concat(silos.lists()))
    return {name: [world.values(run).tolist() for run in drawn] for name, drawn in runs.items()}
