"""A collection dealt into silos, and the rows that cross-silo training learns from and is judged on.

One `World` is one deal with one split of the queries and one draw of noise. It has the same pairs in three
variants: `exact` counts everywhere, as nobody may see them; `private`, own documents exactly and all others
through what they release, read by shrinking; and `clipped`, the same releases read as they are, negative
values as 0. Test queries are ranked over the documents of all silos, and no query is in two parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.corpora import load, synthetic
from isthmus.errors import DataError
from isthmus.evaluation import Evaluation, evaluate
from isthmus.features import FIELDS, NAMES
from isthmus.federation.semisupervised.labelling import SiloRows
from isthmus.federation.semisupervised.selection import Chosen, Selection, gather, judged_pairs
from isthmus.federation.semisupervised.views import (
    ExactView,
    Exchange,
    Holding,
    Shelf,
    Sight,
    View,
    bm25_scores,
    features,
    hash_families,
    totals_families,
    widths_for,
)
from isthmus.partition import deal_corpus, divide, move_share
from isthmus.private.counts import in_memory
from isthmus.private.totals import Totals
from isthmus.randomness import Streams
from isthmus.retrieval import BM25
from isthmus.tables import Corpus, Letor, Qrels
from isthmus.tables.ids import Ids
from isthmus.text import Tokens, tokenise

Variant = Literal["exact", "private", "clipped"]
VARIANTS: tuple[Variant, ...] = ("exact", "private", "clipped")
SHARES = (0.5, 0.15, 0.35)
"""Of the queries: to learn from, to choose by, to test on."""
MEASURES = ("ERR", "nDCG@10", "nDCG", "MAP")
MOST_QUERIES = 240
"""Queries of one world; of a larger collection every seed takes others."""
JUDGED = 40
"""Pairs a query under the other sampling rule."""
_BM25 = [NAMES.index(f"{field}.BM25") for field in FIELDS]


@dataclass(frozen=True)
class Case:
    """What makes a world: `moved` is the dial from topical silos (0) to random ones (1)."""

    data: str
    seed: int = 0
    moved: float = 0.0
    silos: int = 4
    epsilon: float = 8.0
    reader: Literal["topics", "shrink"] = "topics"
    depth: int = 100
    small: bool = False
    """Fewer queries and documents, for a look."""
    own_deal: bool = False
    """Keep the silos that the collection comes with."""
    most: int = MOST_QUERIES
    width: int | None = None
    circular: bool = False
    """The paper's labels: by rank in an exact BM25 run over all documents (1-10 → 2, 11-100 → 1)."""


@cache
def collection(name: str, small: bool, circular: bool) -> Corpus:
    """The judged queries of a collection and its documents."""
    if name == "synthetic":
        sizes = (240, 48, 4) if small else (1600, 200, 4)
        corpus = synthetic.text(*sizes, words=150 if small else 300)
    else:
        corpus = load(name)
    if circular:
        corpus = replace(corpus, qrels=_by_rank(corpus))
    judged = np.array([query in corpus.qrels for query in corpus.queries.ids], dtype=bool)
    if not judged.any():
        raise DataError(f"{name} has no judged queries", cure="name a collection with judgements")
    return replace(corpus, queries=corpus.queries.take(judged))


def _by_rank(corpus: Corpus) -> Qrels:
    """Labels that imitate a ranker: circular, as in the paper."""
    run = BM25().index(corpus.documents).search(corpus.queries, 100)
    names = Ids.of(run.queries)[run.query_of_row]
    return Qrels.of(names, run.documents, np.where(run.ranks <= 10, 2, 1))


class World:
    """One deal, one split, one draw of noise."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.streams = Streams(case.seed).under("cross-silo", case.data)
        whole = self._sampled(collection(case.data, case.small, case.circular))
        self.corpus = self._dealt(whole)
        self.exchange = Exchange(epsilon=case.epsilon, reader=case.reader, width=case.width)
        self.names = self.corpus.silos
        self.grades = int(self.corpus.qrels.grades.max()) + 1
        self.part = divide(
            len(whole.queries), SHARES, self.streams("split"), groups=_linked(whole), strata=None
        )

    def _sampled(self, corpus: Corpus) -> Corpus:
        most = min(60, self.case.most) if self.case.small else self.case.most
        if len(corpus.queries) <= most:
            return corpus
        chosen = np.sort(self.streams("queries").permutation(len(corpus.queries))[:most])
        return replace(corpus, queries=corpus.queries.take(chosen))

    def _dealt(self, corpus: Corpus) -> Corpus:
        count, moved = self.case.silos, self.case.moved
        if self.case.own_deal:
            return corpus
        if count == 1:
            return corpus.dealt(["silo1"], *_nowhere_else(corpus))
        if moved >= 1:
            return deal_corpus(corpus, count, self.streams, by="random")
        dealt = deal_corpus(corpus, count, self.streams)
        parts = ((dealt.documents.ids, dealt.documents.silos), (dealt.queries.ids, dealt.queries.silos))
        return dealt.dealt(dealt.silos, *(move_share(ids, silos, moved, count) for ids, silos in parts))

    @cached_property
    def holdings(self) -> dict[str, Holding]:
        """Every silo's own documents."""
        return {name: Holding.of(self.corpus, name) for name in self.names}

    @cached_property
    def queries(self) -> dict[str, Tokens]:
        """Every silo's own queries."""
        return {name: tokenise(self.corpus.silo(name).queries.texts) for name in self.names}

    @cached_property
    def shelves(self) -> dict[str, Shelf]:
        """What every silo has released."""
        lengths = {
            field: np.concatenate([held.fields[field].lengths for held in self.holdings.values()])
            for field in FIELDS
        }
        families = hash_families(self.streams("hashes").bytes(16), widths_for(lengths, self.exchange))
        found = {}
        for name, held in self.holdings.items():
            desk = held.desk(families, self.exchange, entropy=self.streams("noise", name).bytes)
            found[name] = Shelf.fetched(in_memory(desk, "peer"), families)
        return found

    @cached_property
    def totals(self) -> dict[str, Totals]:
        """Noisy frequencies and counts of all silos together."""
        families = totals_families(self.streams("hashes").bytes(16))
        epsilon = self.exchange.epsilon_totals
        sums = [held.sums(families) for held in self.holdings.values()]
        return {
            field: sum((part[field] for part in sums[1:]), sums[0][field]).noised(
                epsilon_df=epsilon, epsilon_cf=epsilon, entropy=self.streams("totals", field).bytes
            )
            for field in FIELDS
        }

    def view(self, name: str, reader: str) -> View:
        """What one silo sees of all documents."""
        exchange = replace(self.exchange, reader=reader)  # type: ignore[arg-type]
        return View(self.holdings[name], self.shelves, self.totals, exchange, self.streams)

    @cached_property
    def exact(self) -> ExactView:
        """What nobody sees."""
        return ExactView(self.holdings)

    def sights(self, variant: Variant, name: str) -> tuple[Sight, Sight]:
        """What a silo computes features from, and the cheaper sight it chooses pairs by."""
        if variant == "exact":
            return self.exact, self.exact
        if variant == "clipped":
            plain = self.view(name, "plain")
            return plain, plain
        selecting = self.view(name, "shrink")
        return selecting if self.case.reader == "shrink" else self.view(name, self.case.reader), selecting

    @cached_property
    def truth(self) -> NDArray[np.int32]:
        """The grade of every query and document."""
        corpus, qrels = self.corpus, self.corpus.qrels
        rows = {query: at for at, query in enumerate(corpus.queries.ids)}
        query = np.array([rows.get(name, -1) for name in qrels.queries], dtype=np.int64)[qrels.query_of_row]
        place = corpus.row_of_document
        document = np.array([place.get(name, -1) for name in qrels.documents.tolist()], dtype=np.int64)
        table = np.zeros((len(corpus.queries), len(corpus.documents)), np.int32)
        known = (query >= 0) & (document >= 0)
        table[query[known], document[known]] = np.maximum(qrels.grades[known], 0)
        return table

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int64]]:
        """The positions of every silo's documents in the corpus."""
        return {name: np.flatnonzero(self.corpus.documents.silos == at) for at, name in enumerate(self.names)}

    @cached_property
    def asked(self) -> dict[str, NDArray[np.int64]]:
        """The positions of every silo's queries in the corpus."""
        return {name: np.flatnonzero(self.corpus.queries.silos == at) for at, name in enumerate(self.names)}

    def banned(self, name: str) -> dict[str, NDArray[np.bool_]]:
        """The pairs of a silo's queries with the documents these were made from."""
        own = self.corpus.queries.own
        if not own:
            return {}
        place = self.corpus.row_of_document
        made_from = np.array([place.get(own[row] or "", -1) for row in self.asked[name]], dtype=np.int64)
        return {holder: made_from[:, None] == rows for holder, rows in self.rows.items()}

    def letor(self, name: str, chosen: Chosen) -> Letor:
        """A silo's pairs as graded rows."""
        held = [self.rows[holder] for holder in self.names]
        starts = np.concatenate(([0], np.cumsum([len(rows) for rows in held])))
        document = np.concatenate(held)[starts[chosen.holders] + chosen.documents]
        grades = self.truth[self.asked[name][chosen.queries], document]
        ids = [self.corpus.queries.ids[row] for row in self.asked[name]]
        return chosen.letor(ids, [self.holdings[holder].documents for holder in self.names], grades)

    @cached_property
    def tables(self) -> Mapping[Variant, Tables]:
        """The rows of every variant, made when first asked for."""
        return _Lazy(self)

    def parts(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """The part of queries by name: 0 to learn from, 1 to choose by, 2 to test on."""
        place = {query: at for at, query in enumerate(self.corpus.queries.ids)}
        return self.part[[place[name] for name in names]]

    def evaluated(self, table: Letor, scores: NDArray[Any], part: int) -> Evaluation:
        """How a part's queries are ranked; relevant documents that are no candidates count as missed."""
        wanted = np.flatnonzero(self.part == part)
        ids = [self.corpus.queries.ids[row] for row in wanted if self.truth[row].max() > 0]
        return evaluate(self.corpus.qrels[ids], table.run(scores), MEASURES)


class _Lazy(dict[Variant, "Tables"]):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __missing__(self, variant: Variant) -> Tables:
        self[variant] = Tables(self._world, variant)
        return self[variant]


Cross = dict[str, tuple[Letor, NDArray[np.float64]]]
"""Every silo's pairs with other silos' documents, and the error bars of their counts."""


class Tables:
    """The rows of one variant: judged pairs inside every silo, pairs across silos, and what is ranked."""

    def __init__(self, world: World, variant: Variant) -> None:
        self.world, self.variant = world, variant
        self.selection = Selection(depth=world.case.depth)
        self._sights = {name: world.sights(variant, name) for name in world.names}

    def _gather(
        self, name: str, holders: list[str], *, noised: bool = False, selection: Selection | None = None
    ) -> Chosen:
        world, (sight, selecting) = self.world, self._sights[name]
        return gather(
            sight,
            world.queries[name],
            [(world.names.index(holder), holder) for holder in holders],
            selection or self.selection,
            world.streams.under("of", name),
            noised=noised,
            banned=world.banned(name),
            selecting=selecting,
        )

    @cached_property
    def inside(self) -> dict[str, Letor]:
        """A silo's queries with its own documents, by exact counts."""
        found = self.world.asked.items()
        return {name: self.world.letor(name, self._gather(name, [name])) for name, own in found if len(own)}

    @cached_property
    def noised(self) -> dict[str, Letor]:
        """The same pairs as other silos would see them."""
        found = self.world.asked.items()
        return {
            name: self.world.letor(name, self._gather(name, [name], noised=True))
            for name, own in found
            if len(own)
        }

    @cached_property
    def judged(self) -> dict[str, Letor]:
        """The other sampling rule: all relevant documents of the silo from any rank beside hard negatives."""
        world, found = self.world, {}
        for name, own in world.asked.items():
            if not len(own):
                continue
            sight, queries = self._sights[name][0], world.queries[name]
            grades = world.truth[np.ix_(own, world.rows[name])]
            pairs = judged_pairs(
                bm25_scores(sight, queries, name), grades, 2 * int(grades.max(initial=1)) + 20
            )
            table = features(sight, queries, pairs, name)
            at = np.full(len(pairs), world.names.index(name))
            nothing = np.zeros(len(pairs))
            found[name] = world.letor(name, Chosen(pairs.queries, at, pairs.documents, at, table, nothing))
        return found

    @cached_property
    def across(self) -> Cross:
        """A silo's queries with all other silos' documents, and the error bars of their counts."""
        return self.across_by(self.selection)

    def across_by(self, selection: Selection) -> Cross:
        """The same, chosen by another rule."""
        found = {}
        for name, own in self.world.asked.items():
            others = [holder for holder in self.world.names if holder != name]
            if len(own) and others:
                chosen = self._gather(name, others, selection=selection)
                found[name] = self.world.letor(name, chosen), chosen.errors
        return found

    def silos(
        self, inside: Mapping[str, Letor], labels: int | None = None, across: Cross | None = None
    ) -> list[SiloRows]:
        """What every silo learns from; with `labels`, so many of its queries at most have judgements."""
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
        """The candidates of the queries of parts 1 and 2, of all silos."""
        tables = list(self.inside.values()) + [cross for cross, _ in self.across.values()]
        found = {}
        for part in (1, 2):
            mine = [table[self.world.parts(table.queries) == part] for table in tables]
            found[part] = Letor.concat([table for table in mine if table.rows])
        return found

    def bm25(self, part: int) -> NDArray[Any]:
        """Title and body BM25 added, of the candidates of a part."""
        summed: NDArray[Any] = self.ranked[part].features[:, _BM25].sum(axis=1)
        return summed


def _nowhere_else(corpus: Corpus) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.zeros(len(corpus.documents), np.int64), np.zeros(len(corpus.queries), np.int64)


def _relevant(letor: Letor) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.bincount(letor.query_of_row, letor.grades > 0, len(letor)) > 0
    return found


def _linked(corpus: Corpus) -> NDArray[np.int64]:
    """Queries that were made from linked documents stay together; others stand alone."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    own, place = corpus.queries.own, corpus.row_of_document
    if not own:
        return np.arange(len(corpus.queries))
    made_from = {query: place[name] for query, name in zip(corpus.queries.ids, own, strict=True) if name}
    judged = zip(corpus.qrels.query_of_row.tolist(), corpus.qrels.documents.tolist(), strict=True)
    edges = [(made_from.get(corpus.qrels.queries[query]), place.get(name)) for query, name in judged]
    rows = np.array([edge for edge in edges if None not in edge], dtype=np.int64).reshape(-1, 2)
    size = len(corpus.documents)
    graph = coo_array((np.ones(len(rows)), rows.T), shape=(size, size))
    component = connected_components(graph, directed=False)[1]
    homes = enumerate(corpus.queries.ids, start=size)
    return np.array([component[made_from[query]] if query in made_from else alone for alone, query in homes])
