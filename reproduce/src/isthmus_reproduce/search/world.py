"""A collection in silos, as nodes hold it, searched in process by the service's own code.

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
"""With fewer than `FEW` queries, folds are drawn `ROUNDS` times, so that results depend less on one draw."""
BUILT_IN = "pydocs"
SMOKE_QUERIES, SMOKE_DOCUMENTS = 60, 500


@dataclass(frozen=True, eq=False)
class World:
    """A collection in silos; `groups[i]` is the group of query i, and `turns[r][i]` the fold in which the
    r-th round over all queries tests it."""

    corpus: Corpus
    groups: IntArray
    turns: tuple[IntArray, ...]

    @classmethod
    def of(cls, data: str, *, seed: int, smoke: bool = False, silos: int = SILOS) -> World:
        """Load a collection and deal it by topic; the built-in world keeps its silos unless another number is
        requested. Queries without judgements are left out."""
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
        """The document that each query was made from, which is not a valid hit; None if there is none."""
        return self.corpus.queries.own or (None,) * len(self.corpus.queries)

    @cached_property
    def relevant(self) -> dict[str, dict[str, bool]]:
        """Relevant documents by the text of a query, then by document id."""
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
        """Return the measure of every query."""
        evaluation = evaluate(self.corpus.qrels[list(self.corpus.queries.ids)], run, [MEASURE])
        (values,) = evaluation.values.values()
        return np.asarray(values)


def _groups(corpus: Corpus) -> Sequence[Any]:
    """Return the groups of queries with linked judgements; independently written ones stand alone."""
    return linked_queries(corpus).tolist() if corpus.queries.own else list(range(len(corpus.queries)))


def _smaller(corpus: Corpus, streams: Streams) -> Corpus:
    """Return a few queries, their judged documents, and a few other documents."""
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
        """Return the silo's best documents by BM25 alone, without `itself`."""
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
        """Give every silo the sum of all silos' statistics, exact or with the default noise; or none."""
        total = None if form is None else summed(self._figures(silo, form) for silo in self.silos)
        for silo in self.silos:
            silo.index.share(total)

    def _figures(self, silo: Silo, form: str) -> Statistics:
        exact = silo.index.snapshot.exact_statistics(silo.name, (TEXT,))
        return exact if form == "exact" else released(exact, self.family, SharedStatistics().epsilon)

    def lists(self) -> list[Run]:
        """Return every silo's BM25 lists under its current statistics."""
        queries = self.world.corpus.queries
        entries = list(zip(queries.ids, queries.texts, self.world.own, strict=True))
        return [
            Run.from_dict({id: silo.listed(text, own) for id, text, own in entries}, name=silo.name)
            for silo in self.silos
        ]


class RememberedEncoder(Encoder):
    """An encoder that stores the vectors of a world's texts, so that all silos and runs encode them once."""

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
        """Return the encoder's section of a node's settings; a fitted one is saved in the folder."""
        if isinstance(self.encoder, Lsa):
            save_lsa(self.encoder, folder / "lsa")
            return EncoderSettings("lsa", path=folder / "lsa")
        return EncoderSettings("encoder", name=self.name)

    @property
    def limit(self) -> int | None:
        """Tokens at which the encoder cuts a document."""
        return self.encoder.limit

    def token_spans(self, text: str) -> Spans:
        """Return the token spans by the inner encoder."""
        return self.encoder.token_spans(text)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of passages of the world's documents."""
        return np.stack([self._documents[text] for text in texts])

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of queries; those of the world are looked up."""
        for text in texts:
            if text not in self._queries:
                self._queries[text] = self.encoder.encode_queries([text])[0]
        return np.stack([self._queries[text] for text in texts])


def _passages(encoder: Encoder, title: str, body: str) -> list[str]:
    return passage_texts(encoder, title, body, split_passages(encoder, title, body))


def encoder_of(world: World, name: str) -> RememberedEncoder:
    """Return an installed encoder by name; `lsa` is fitted on the texts of all silos."""
    if name == "lsa":
        texts = world.corpus.documents.texts
        return RememberedEncoder(name, Lsa.fit(texts, dimensions=EncoderSettings().dimensions), world)
    return RememberedEncoder(name, load_encoder(name), world)


@contextmanager
def federation(
    world: World, *, encoder: RememberedEncoder | None = None, whole: bool = False
) -> Iterator[Federation]:
    """Build the silos' stores and indexes in a temporary folder; `whole` builds one silo of everything."""
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
            if encoder is not None:  # known texts are not encoded again
                known = AnyQueries(encoder, encoder.encoder.width)
                index._encoder, index.snapshot = known, replace(index.snapshot, encoder=known)
                index.encode_all()
            silos.append(Silo(name, store, index))
        try:
            yield Federation(world, tuple(silos), family)
        finally:
            for silo in silos:
                silo.index.close()
                silo.store.close()


# results


def references(world: World, draws: int) -> dict[str, list[list[float]]]:
    """Return by row the measure of every query, of one index and of lists merged without learning; one list
    for each draw of the statistics."""
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
