"""A collection in silos, as nodes hold it, and what is found in it: by the service's own code, in process.

Documents are indexed and searched as a node does it, statistics and directions are shared as silos share
them, the ranker is learned from the silos' sums, and lists are fused as the broker fuses them. Only the
network is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.asking import Silos
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
    Hit,
    Index,
    Learned,
    Lesson,
    Line,
    NodeSettings,
    Prepare,
    Pupil,
    Question,
    Search,
    Searcher,
    SharedStatistics,
    SqliteStore,
    joined,
    learn,
    merge_hits,
    own_directions,
    save_lsa,
)
from isthmus.tables import Corpus, Run
from isthmus_reproduce.deals import deal_corpus

MEASURE = "nDCG@10"
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
    def of(cls, data: str, *, seed: int, smoke: bool = False) -> World:
        """Dealt by topic, the built-in world as it is; queries that nobody judged are left out."""
        corpus = load(data)
        groups = dict(zip(corpus.queries.ids, _groups(corpus), strict=True))
        if smoke:
            corpus = _smaller(corpus, Streams(seed))
        if len(corpus.silos) == 1:
            corpus = deal_corpus(corpus, SILOS, Streams(seed), by="topic")
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

    def lesson(self, chosen: IntArray) -> Lesson:
        """Some queries to learn from; those of a group are held out together."""
        _, group = np.unique(self.groups[chosen], return_inverse=True)
        count = 10 if len(chosen) < FEW else 5  # without a fifth of few queries a ranker is another one
        texts, own = self.corpus.queries.texts, self.own
        return Lesson(
            tuple(texts[at] for at in chosen.tolist()),
            tuple(int(at) for at in group % count),
            tuple(own[at] for at in chosen.tolist()),
        )


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

    def learn_space(self) -> str:
        """Join the silos' directions and give every document its vector; the space's name."""
        space = joined([own_directions(silo.index.snapshot) for silo in self.silos])
        for silo in self.silos:
            silo.index.adopt(space)
        return space.fingerprint


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
        """The encoder's own."""
        return self.encoder.fingerprint

    def settings(self, folder: Path) -> EncoderSettings:
        """As a node names it; one that was fitted is a file in the folder."""
        if isinstance(self.encoder, Lsa):
            save_lsa(self.encoder, folder / "lsa")
            return EncoderSettings("lsa", path=folder / "lsa")
        return EncoderSettings("encoder", name=self.name)

    @property
    def limit(self) -> int | None:
        """The encoder's own."""
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


def references(world: World, draws: int) -> dict[str, list[float]]:
    """The measure, query by query, of one index and of lists merged without learning."""
    corpus = world.corpus
    central = BM25().index(corpus.documents).search(corpus.queries, DEPTH)
    runs = {"central BM25": central, "central BM25+LSA": _with_lsa(world, central)}
    with federation(world) as silos:
        lists = silos.lists()
        runs["raw, local statistics"] = Run.concat(lists)
        runs["RRF"] = fuse(lists, "rrf")
        runs["z-score"] = fuse(lists, "comb-sum", norm="z-score")
        silos.share("exact")
        runs["raw, shared exactly"] = Run.concat(silos.lists())
        for draw in range(draws):
            silos.share("private")
            runs[f"raw, shared privately {draw}"] = Run.concat(silos.lists())
    return {name: world.values(run).tolist() for name, run in runs.items()}


def _with_lsa(world: World, central: Run) -> Run:
    """One index's BM25 list and its list by latent semantic analysis, standardised and added."""
    from isthmus.retrieval import Dense

    documents, queries = world.corpus.documents, world.corpus.queries
    dense = Dense(Lsa.fit(documents.texts)).index(documents).search(queries, DEPTH)
    return fuse([central, dense], "comb-sum", norm="z-score")


def learned(world: World) -> dict[str, Any]:
    """What silos that learn together find and say: by way to calibrate, the measure of every query in every
    round, and all hits shown as (way, query, silo, probability, whether it was right, round)."""
    values: dict[str, list[list[float]]] = {}
    rows: list[list[Any]] = []
    with federation(world) as silos:
        silos.share("private")
        space = silos.learn_space()
        depth = NodeSettings.depth
        pupils = [Pupil(silo.index.snapshot, world.relevant, depth=depth) for silo in silos.silos]
        for number, fold_of in enumerate(world.turns):
            lists: dict[str, dict[str, dict[str, float]]] = {}
            for way, at, hits in _round(silos, pupils, space, fold_of):
                places = {hit.document: float(-place) for place, hit in enumerate(hits)}
                lists.setdefault(way, {})[world.corpus.queries.ids[at]] = places
                rows += [
                    [way, at, hit.silo, hit.probability, _is_right(world, at, hit), number] for hit in hits
                ]
            for way, documents in lists.items():
                values.setdefault(way, []).append(world.values(Run.from_dict(documents)).tolist())
    return {"values": values, "shown": rows}


def _round(
    silos: Federation, pupils: Sequence[Pupil], space: str, fold_of: IntArray
) -> Iterator[tuple[str, int, list[Hit]]]:
    """Every query's hits under every way to calibrate, by models that have not seen its fold."""
    world = silos.world
    for fold in np.unique(fold_of).tolist():
        lesson = world.lesson(np.flatnonzero(fold_of != fold))
        answer_of = {str(at): partial(_answer, pupil, lesson) for at, pupil in enumerate(pupils)}
        model = learn(Silos.in_memory(answer_of), lesson.queries, folds=max(lesson.folds) + 1, space=space)
        ways = _ways(model, pupils)
        for at in np.flatnonzero(fold_of == fold).tolist():
            answers = _answers(silos, model, world.corpus.queries.texts[at], world.own[at])
            for way, lines in ways.items():
                yield way, at, _fused(answers, lines)


def _answer(pupil: Pupil, lesson: Lesson, question: Question) -> FloatArray:
    """A silo's answer; groups are held out together, and no query finds what it was made from."""
    return pupil.prepare(lesson) if isinstance(question, Prepare) else pupil.answer(question)


def _ways(model: Learned, pupils: Sequence[Pupil]) -> dict[str, list[Line]]:
    """The silos' lines from margins to log-odds: the product's, one for all, and each silo alone."""
    return {
        "default": [pupil.bent(model).shown for pupil in pupils],
        "one calibrator for all": [model.shown for _ in pupils],
        "calibrators per silo alone": [pupil.bent(model, shrinkage=1e-3).shown for pupil in pupils],
    }


def _answers(silos: Federation, model: Learned, text: str, itself: str | None) -> list[list[Hit]]:
    """What every node answers, without the document that the query was made from."""
    request = Search.model_construct(query=text, k=SHOWN + 1)  # some queries are longer than messages may be
    answers = []
    for silo in silos.silos:
        searcher = Searcher(silo.name, silo.index, silo.store, model)
        hits = searcher.search(request, snippets=False).hits
        answers.append([hit for hit in hits if hit.document != itself][:SHOWN])
    return answers


def _fused(answers: Sequence[Sequence[Hit]], lines: Sequence[Line]) -> list[Hit]:
    """The broker's list of the hits, each with the probability of its silo's line."""
    lists = [
        hit.model_copy(update={"probability": _chance(line, hit.score)})
        for hits, line in zip(answers, lines, strict=True)
        for hit in hits
    ]
    return merge_hits(lists, k=SHOWN, threshold=0.0)[0]


def _chance(line: Line, score: float) -> float:
    return float(1 / (1 + np.exp(-line(np.array(score)))))


def _is_right(world: World, at: int, hit: Hit) -> bool:
    return world.relevant.get(world.corpus.queries.texts[at], {}).get(hit.document, False)


WORK: Mapping[str, Callable[..., Any]] = {"references": references, "learned": learned}
