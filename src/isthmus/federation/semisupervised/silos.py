"""Selection of pairs across silos, and the tables of simulated silos for cross-silo training.

A query is paired with the documents of a silo that have the largest BM25. Other silos' documents are chosen
from released counts only: choosing by exact counts of another silo would be a release that is not charged.
Every pair keeps the silo that holds its document. The rule that selects candidates when the ranker is used
also samples the labelled pairs for training. `Pick` is the interface for other rules.

`CrossSilos` is a collection in silos of one process, and `CrossTables` has the rows on which cross-silo
training is trained and judged. Every silo sees its own documents exactly, and all others through their
releases:

    tokens ── desk ──> published noisy cells ──> released ─┐
    tokens ── sums ── noised ──> totals ───────────────────┴─> Viewer(holder) ──> View ──> features

A silo also reads its own documents as others see them, from its own release, so that a ranker for noisy
counts can be trained on such counts. Judged pairs lie inside silos. Test queries are ranked over the
documents of all silos, and no query is in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus import private
from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.errors import ConfigError
from isthmus.evaluation import Evaluation, evaluate
from isthmus.features import FIELDS, NAMES, Pairs
from isthmus.federation.semisupervised.labelling import SiloRows
from isthmus.partition import divide, linked_queries
from isthmus.private import noised
from isthmus.randomness import Streams
from isthmus.retrieval import TEXT, TIMES, Statistics
from isthmus.tables import Corpus, Letor
from isthmus.text import Tokens, tokenise

DEPTH = 100
"""Number of a silo's documents with which a query is paired."""
Mask = NDArray[np.bool_]
Pick = Callable[[private.CountsView, Tokens, int, np.random.Generator, Mask | None], IntArray]
"""Selects so many documents of a silo for every query, except banned (query, document) pairs; −1 for none."""


class Views(Protocol):
    """One silo's views of all silos' documents; `noised` shows its own as others see them."""

    def __call__(self, holder: str, *, noised: bool = False) -> private.CountsView: ...


@dataclass(frozen=True, eq=False)
class Chosen:
    """Pairs in the order of their queries; `documents` are positions among the holder's.

    `errors` is the uncertainty of each pair's counts, see `CountsView.errors`.
    """

    queries: IntArray
    holders: IntArray
    documents: IntArray
    features: FloatArray
    errors: FloatArray

    def __len__(self) -> int:
        return len(self.queries)

    def take(self, rows: NDArray[np.intp] | Mask) -> Chosen:
        """Return some of the pairs."""
        return Chosen(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @staticmethod
    def joined(parts: Sequence[Chosen]) -> Chosen:
        """Return all pairs in the order of their queries."""
        columns = [
            np.concatenate([getattr(part, name) for part in parts]) for name in Chosen.__dataclass_fields__
        ]
        return Chosen(*columns).take(np.argsort(columns[0], kind="stable"))

    def letor(
        self, queries: Sequence[str], documents: Sequence[tuple[str, ...]], grades: NDArray[np.int32]
    ) -> Letor:
        """Return the pairs as feature rows; `documents` has the ids of every holder's documents."""
        starts = np.concatenate(([0], np.cumsum([len(ids) for ids in documents])))
        every = Ids.of([name for ids in documents for name in ids])
        names = every[starts[self.holders] + self.documents]
        return Letor.of(Ids.of(queries)[self.queries], self.features, grades, documents=names)


def best_by_bm25(
    view: private.CountsView,
    queries: Tokens,
    depth: int,
    rng: np.random.Generator,
    banned: Mask | None = None,
) -> IntArray:
    """Select the documents with the largest sum of title and body BM25."""
    return best(view.scores(queries, FIELDS), depth, banned)


def best(scores: FloatArray, depth: int, banned: Mask | None) -> IntArray:
    """Return the positions of the largest scores, −1 where a pair is banned."""
    allowed = scores if banned is None else np.where(banned, -np.inf, scores)
    chosen = np.argsort(-allowed, axis=1, kind="stable")[:, :depth]
    return np.where(np.isneginf(np.take_along_axis(allowed, chosen, axis=1)), -1, chosen)


def gather(
    views: Views,
    queries: Tokens,
    holders: Sequence[tuple[int, str]],
    streams: Streams,
    *,
    depth: int = DEPTH,
    pick: Pick = best_by_bm25,
    noised: bool = False,
    banned: Mapping[str, Mask] | None = None,
    selecting: Views | None = None,
) -> Chosen:
    """Select pairs of a silo's own queries with documents of some holders, and compute their features.

    `selecting` may be cheaper views to select by. Random draws for one holder do not depend on the other
    holders: a silo that leaves or joins affects only its own pairs.
    """
    parts = []
    for at, holder in holders:
        view = views(holder, noised=noised)
        chosen = pick(
            (selecting or views)(holder, noised=noised),
            queries,
            depth,
            streams("pairs", holder),
            (banned or {}).get(holder),
        )
        there = chosen >= 0
        query = np.repeat(np.arange(len(queries)), there.sum(axis=1))
        pairs = Pairs(query, chosen[there])
        table, errors = view.features(queries, pairs), view.errors(queries, pairs)
        parts.append(Chosen(query, np.full(len(pairs), at), pairs.documents, table, errors))
    return Chosen.joined(parts)


SHARES = (0.5, 0.15, 0.35)
"""Shares of the queries for training, validation and test."""
READERS = ("topics", "shrink", "threshold", "plain")
Reader = Literal["topics", "shrink", "threshold", "plain"]
_BM25 = [NAMES.index(f"{field}.BM25") for field in FIELDS]


@dataclass(frozen=True)
class Releasing:
    """How counts are released and read: ε of a field's cells, of each of its two totals, and the reader."""

    epsilon: float = 8.0
    epsilon_totals: float = 0.5
    reader: Reader = "topics"
    width: int | None = None
    """Cells per document; by default as many as documents of that length need."""

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise ConfigError(f"no reader {self.reader!r}", key=self.reader, known=READERS)
        if not (self.epsilon > 0 and self.epsilon_totals > 0):
            raise ConfigError("ε must be above 0", key="epsilon", value=self.epsilon)


@dataclass(frozen=True, eq=False)
class Viewer:
    """One silo's views of all silos' documents: its own exactly, the others' through their releases."""

    name: str
    own: Mapping[str, Tokens]
    released: Mapping[str, private.Published]
    totals: Mapping[str, Statistics]
    reader: Reader
    streams: Streams
    _views: dict[str, private.CountsView] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, holder: str, *, noised: bool = False) -> private.CountsView:
        """Return the view of a holder's documents; `noised` shows the silo's own as others see them too."""
        released = self.released[holder]
        if holder == self.name and not noised:
            own = {name: private.OwnCounts(self._lexica[name], tokens) for name, tokens in self.own.items()}
            return private.CountsView(private.documents_of(released), own)
        if holder not in self._views:
            self._views[holder] = private.CountsView(
                private.documents_of(released),
                {
                    name: private.read_counts(
                        self._lexica[name],
                        *part,
                        topics=self._topics if name == "body" else None,  # titles are too short for topics
                        reader="shrink" if self.reader == "topics" else self.reader,
                    )
                    for name, part in released.items()
                },
            )
        return self._views[holder]

    @cached_property
    def _lexica(self) -> dict[str, private.Lexicon]:
        families = {name: cells.family for name, (_, cells) in self.released[self.name].items()}
        return {name: private.Lexicon(families[name], self.totals[name], self.own[name]) for name in self.own}

    @cached_property
    def _topics(self) -> private.Topics | None:
        if self.reader != "topics":
            return None
        law = private.law_of(self.released[self.name]["body"][0])
        return private.Topics.learned(self._lexica["body"], law, self.streams("topics", self.name))


class CrossSilos:
    """Simulated silos: one deal of a collection, one split of its queries, one draw of noise."""

    measures: tuple[str, ...] = ("nDCG@10",)

    def __init__(self, corpus: Corpus, streams: Streams, releasing: Releasing) -> None:
        self.corpus, self.streams, self.releasing = corpus, streams, releasing
        self.names = corpus.silos
        self.grades = int(corpus.qrels.grades.max()) + 1

    @cached_property
    def part(self) -> IntArray:
        """The part of every query: 0 training, 1 validation, 2 test; linked queries are in the same part."""
        groups = linked_queries(self.corpus)
        return divide(len(self.corpus.queries), SHARES, self.streams("split"), groups=groups, strata=None)

    @cached_property
    def documents(self) -> dict[str, tuple[str, ...]]:
        """The ids of every silo's documents."""
        return {name: self.corpus.silo(name).documents.ids for name in self.names}

    @cached_property
    def tokens(self) -> dict[str, dict[str, Tokens]]:
        """The words of every silo's own documents, by field."""
        parts = {name: self.corpus.silo(name).documents for name in self.names}
        return {
            name: {"title": tokenise(part.titles), "body": tokenise(part.bodies)}
            for name, part in parts.items()
        }

    @cached_property
    def queries(self) -> dict[str, Tokens]:
        """The words of every silo's own queries."""
        return {name: tokenise(self.corpus.silo(name).queries.texts) for name in self.names}

    @cached_property
    def released(self) -> dict[str, private.Published]:
        """The cells that every silo has published, with noise drawn once."""
        key, families = self.streams("hashes").bytes(16), {}
        for name in FIELDS:
            lengths = np.concatenate([tokens[name].lengths for tokens in self.tokens.values()])
            width = self.releasing.width or private.width_for(lengths)
            families[name] = private.HashFamily(key + name.encode(), 1, width)
        carriers = {name: private.in_memory(self._desk(name, families), "peer") for name in self.names}
        return {
            name: private.fetch_released(carrier, families, lambda each: families[each.terms.field])
            for name, carrier in carriers.items()
        }

    def _desk(self, silo: str, families: Mapping[str, private.HashFamily]) -> private.Desk:
        entropy = self.streams("noise", silo).bytes
        key, owners = private.NoiseKey.fresh(entropy), []
        for name, tokens in self.tokens[silo].items():
            covered = private.fresh_versions(self.documents[silo], entropy)
            release = private.CountRelease(
                name, families[name], private.OneShot(self.releasing.epsilon), key, private.no_charge
            )
            owners.append(private.Owner.of(tokens, covered, release))
        return private.Desk(*owners)

    @cached_property
    def totals(self) -> dict[str, Statistics]:
        """Noisy frequencies and counts, summed over all silos."""
        key, epsilon, totals = self.streams("hashes").bytes(16), self.releasing.epsilon_totals, {}
        for name in FIELDS:
            family = private.HashFamily(key + b"totals" + name.encode(), 1, private.WIDTH)
            first, *others = (
                private.hashed(Statistics.of(tokens[name]), family) for tokens in self.tokens.values()
            )
            entropy = self.streams("totals", name).bytes
            totals[name] = noised(sum(others, first), {TEXT: epsilon, TIMES: epsilon}, entropy)
        return totals

    def viewer(self, name: str, reader: Reader) -> Viewer:
        """Return one silo's views of all documents."""
        return Viewer(name, self.tokens[name], self.released, self.totals, reader, self.streams)

    def views(self, name: str) -> tuple[Views, Views]:
        """Return the views by which a silo computes features, and cheaper ones by which it selects pairs."""
        selecting, reader = self.viewer(name, "shrink"), self.releasing.reader
        return selecting if reader == "shrink" else self.viewer(name, reader), selecting

    @cached_property
    def truth(self) -> NDArray[np.int32]:
        """The grade of every query and document, of shape (queries, documents)."""
        corpus, qrels = self.corpus, self.corpus.qrels
        rows = {query: at for at, query in enumerate(corpus.queries.ids)}
        query = np.array([rows.get(name, -1) for name in qrels.queries], dtype=np.int64)[qrels.query_of_row]
        place = corpus.row_of_document
        document = np.array([place.get(name, -1) for name in qrels.documents.tolist()], dtype=np.int64)
        table = np.zeros((len(corpus.queries), len(corpus.documents)), np.int32)
        known = (query >= 0) & (document >= 0)
        table[query[known], document[known]] = np.maximum(qrels.grades[known], 0)
        return table

    @property
    def cross_share(self) -> float:
        """The share of relevant pairs whose document lies in another silo than the query."""
        relevant = self.truth > 0
        apart = self.corpus.queries.silos[:, None] != self.corpus.documents.silos
        return float((relevant & apart).sum() / max(relevant.sum(), 1))

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """The positions of every silo's documents in the corpus."""
        return {name: np.flatnonzero(self.corpus.documents.silos == at) for at, name in enumerate(self.names)}

    @cached_property
    def query_rows(self) -> dict[str, NDArray[np.int64]]:
        """The positions of every silo's queries in the corpus."""
        return {name: np.flatnonzero(self.corpus.queries.silos == at) for at, name in enumerate(self.names)}

    def banned(self, name: str) -> dict[str, NDArray[np.bool_]]:
        """Return, by holder, the pairs of a silo's queries with the documents from which these were made."""
        own = self.corpus.queries.own
        if not own:
            return {}
        place = self.corpus.row_of_document
        sources = np.array([place.get(own[row] or "", -1) for row in self.query_rows[name]], dtype=np.int64)
        return {holder: sources[:, None] == rows for holder, rows in self.rows.items()}

    def letor(self, name: str, chosen: Chosen) -> Letor:
        """Return a silo's pairs as feature rows with grades."""
        rows = [self.rows[holder] for holder in self.names]
        starts = np.concatenate(([0], np.cumsum([len(part) for part in rows])))
        document = np.concatenate(rows)[starts[chosen.holders] + chosen.documents]
        grades = self.truth[self.query_rows[name][chosen.queries], document]
        ids = [self.corpus.queries.ids[row] for row in self.query_rows[name]]
        return chosen.letor(ids, [self.documents[holder] for holder in self.names], grades)

    def parts(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """Return the part of each named query: 0 training, 1 validation, 2 test."""
        place = {query: at for at, query in enumerate(self.corpus.queries.ids)}
        return self.part[[place[name] for name in names]]

    def evaluated(self, table: Letor, scores: NDArray[Any], part: int) -> Evaluation:
        """Evaluate the ranking of a part's queries; relevant documents outside the candidates are missed."""
        rows = np.flatnonzero(self.part == part)
        ids = [self.corpus.queries.ids[row] for row in rows if self.truth[row].max() > 0]
        return evaluate(self.corpus.qrels[ids], table.run(scores), self.measures)


Cross = dict[str, tuple[Letor, FloatArray]]
"""Every silo's pairs with other silos' documents, and the error bars of their counts."""


class CrossTables:
    """Judged pairs inside every silo, pairs across silos, and the candidates that are ranked."""

    def __init__(self, world: CrossSilos, depth: int = DEPTH) -> None:
        self.world, self.depth = world, depth
        self._views = {name: self.views(name) for name in world.names}

    def views(self, name: str) -> tuple[Views, Views]:
        """Return the views from which a silo computes features, and those by which it selects pairs."""
        return self.world.views(name)

    def _gather(
        self, name: str, holders: list[str], *, noised: bool = False, pick: Pick = best_by_bm25
    ) -> Chosen:
        world, (views, selecting) = self.world, self._views[name]
        return gather(
            views,
            world.queries[name],
            [(world.names.index(holder), holder) for holder in holders],
            world.streams.under("of", name),
            depth=self.depth,
            pick=pick,
            noised=noised,
            banned=world.banned(name),
            selecting=selecting,
        )

    @cached_property
    def inside(self) -> dict[str, Letor]:
        """Every silo's queries paired with its own documents, by exact counts."""
        return self._own(noised=False)

    @cached_property
    def noised(self) -> dict[str, Letor]:
        """The same pairs, by counts as other silos see them."""
        return self._own(noised=True)

    def _own(self, *, noised: bool) -> dict[str, Letor]:
        return {
            name: self.world.letor(name, self._gather(name, [name], noised=noised))
            for name, own in self.world.query_rows.items()
            if len(own)
        }

    @cached_property
    def across(self) -> Cross:
        """Every silo's queries paired with all other silos' documents, and the error bars of their counts."""
        return self.across_by(best_by_bm25)

    def across_by(self, pick: Pick) -> Cross:
        """Return such pairs, selected by another rule."""
        cross = {}
        for name, own in self.world.query_rows.items():
            others = [holder for holder in self.world.names if holder != name]
            if len(own) and others:
                chosen = self._gather(name, others, pick=pick)
                cross[name] = self.world.letor(name, chosen), chosen.errors
        return cross

    def silos(
        self, inside: Mapping[str, Letor], labels: int | None = None, across: Cross | None = None
    ) -> list[SiloRows]:
        """Return the training data of every silo; `labels` limits the number of its judged queries."""
        cross = self.across if across is None else across
        return [self._silo(name, inside[name], labels, cross) for name in self.world.names if name in inside]

    def _silo(self, name: str, inside: Letor, labels: int | None, across: Cross) -> SiloRows:
        labelled = inside[self.world.parts(inside.queries) == 0]
        if labels is not None:
            labelled = labelled[np.flatnonzero(_relevant(labelled))[:labels]]
        if name not in across:
            return SiloRows(labelled, labelled.keep(np.zeros(labelled.rows, np.bool_)), np.zeros(0))
        cross, errors = across[name]
        training = self.world.parts(cross.queries) == 0
        return SiloRows(labelled, cross[training], errors[training[cross.query_of_row]])

    @cached_property
    def ranked(self) -> dict[int, Letor]:
        """The candidates of validation and test queries (parts 1 and 2), from all silos."""
        tables = list(self.inside.values()) + [cross for cross, _ in self.across.values()]
        ranked = {}
        for part in (1, 2):
            mine = [table[self.world.parts(table.queries) == part] for table in tables]
            ranked[part] = Letor.concat([table for table in mine if table.rows])
        return ranked

    def bm25(self, part: int) -> NDArray[Any]:
        """Return the sum of title and body BM25 of the candidates of a part."""
        summed: NDArray[Any] = self.ranked[part].features[:, _BM25].sum(axis=1)
        return summed


def _relevant(letor: Letor) -> NDArray[np.bool_]:
    relevant: NDArray[np.bool_] = np.bincount(letor.query_of_row, letor.grades > 0, len(letor)) > 0
    return relevant
