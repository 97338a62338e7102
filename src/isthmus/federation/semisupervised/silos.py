"""A collection in silos of one process, and the rows that cross-silo training learns from and is judged on.

Every silo has its own documents exactly and all others through what they release. Judged pairs lie inside
silos; test queries are ranked over the documents of all of them, and no query is in two parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.evaluation import Evaluation, evaluate
from isthmus.features import FIELDS, NAMES
from isthmus.federation.semisupervised.labelling import SiloRows
from isthmus.federation.semisupervised.selection import Chosen, Selection, gather
from isthmus.federation.semisupervised.views import (
    Exchange,
    Holding,
    Shelf,
    Sight,
    View,
    hash_families,
    totals_families,
    widths_for,
)
from isthmus.partition import divide, linked_queries
from isthmus.private.counts import in_memory
from isthmus.private.totals import Totals
from isthmus.randomness import Streams
from isthmus.tables import Corpus, Letor
from isthmus.tables.ids import FloatArray
from isthmus.text import Tokens, tokenise

SHARES = (0.5, 0.15, 0.35)
"""Of the queries: to learn from, to choose by, to test on."""
_BM25 = [NAMES.index(f"{field}.BM25") for field in FIELDS]


class CrossSilos:
    """One deal of a collection, one split of its queries, one draw of noise."""

    measures: tuple[str, ...] = ("nDCG@10",)

    def __init__(self, corpus: Corpus, streams: Streams, exchange: Exchange) -> None:
        self.corpus, self.streams, self.exchange = corpus, streams, exchange
        self.names = corpus.silos
        self.grades = int(corpus.qrels.grades.max()) + 1
        groups = linked_queries(corpus)
        self.part = divide(len(corpus.queries), SHARES, streams("split"), groups=groups, strata=None)

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
            field: np.concatenate([holding.fields[field].lengths for holding in self.holdings.values()])
            for field in FIELDS
        }
        families = hash_families(self.streams("hashes").bytes(16), widths_for(lengths, self.exchange))
        shelves = {}
        for name, holding in self.holdings.items():
            desk = holding.desk(families, self.exchange, entropy=self.streams("noise", name).bytes)
            shelves[name] = Shelf.fetched(in_memory(desk, "peer"), families)
        return shelves

    @cached_property
    def totals(self) -> dict[str, Totals]:
        """Noisy frequencies and counts of all silos together."""
        families = totals_families(self.streams("hashes").bytes(16))
        epsilon = self.exchange.epsilon_totals
        sums = [holding.sums(families) for holding in self.holdings.values()]
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

    def sights(self, name: str) -> tuple[Sight, Sight]:
        """What a silo computes features from, and the cheaper sight it chooses pairs by."""
        selecting = self.view(name, "shrink")
        reader = self.exchange.reader
        return selecting if reader == "shrink" else self.view(name, reader), selecting

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
        """The pairs of a silo's queries with the documents these were made from."""
        own = self.corpus.queries.own
        if not own:
            return {}
        place = self.corpus.row_of_document
        sources = np.array([place.get(own[row] or "", -1) for row in self.query_rows[name]], dtype=np.int64)
        return {holder: sources[:, None] == rows for holder, rows in self.rows.items()}

    def letor(self, name: str, chosen: Chosen) -> Letor:
        """A silo's pairs as graded rows."""
        rows = [self.rows[holder] for holder in self.names]
        starts = np.concatenate(([0], np.cumsum([len(part) for part in rows])))
        document = np.concatenate(rows)[starts[chosen.holders] + chosen.documents]
        grades = self.truth[self.query_rows[name][chosen.queries], document]
        ids = [self.corpus.queries.ids[row] for row in self.query_rows[name]]
        return chosen.letor(ids, [self.holdings[holder].documents for holder in self.names], grades)

    def parts(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """The part of queries by name: 0 to learn from, 1 to choose by, 2 to test on."""
        place = {query: at for at, query in enumerate(self.corpus.queries.ids)}
        return self.part[[place[name] for name in names]]

    def evaluated(self, table: Letor, scores: NDArray[Any], part: int) -> Evaluation:
        """How a part's queries are ranked; relevant documents that are no candidates count as missed."""
        rows = np.flatnonzero(self.part == part)
        ids = [self.corpus.queries.ids[row] for row in rows if self.truth[row].max() > 0]
        return evaluate(self.corpus.qrels[ids], table.run(scores), self.measures)


Cross = dict[str, tuple[Letor, FloatArray]]
"""Every silo's pairs with other silos' documents, and the error bars of their counts."""


class CrossTables:
    """Judged pairs inside every silo, pairs across silos, and the candidates that are ranked."""

    def __init__(self, world: CrossSilos, selection: Selection | None = None) -> None:
        self.world = world
        self.selection = selection or Selection()
        self._sights = {name: self.sights(name) for name in world.names}

    def sights(self, name: str) -> tuple[Sight, Sight]:
        """What a silo computes features from, and what it chooses pairs by."""
        return self.world.sights(name)

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
        return self._own(noised=False)

    @cached_property
    def noised(self) -> dict[str, Letor]:
        """The same pairs as other silos would see them."""
        return self._own(noised=True)

    def _own(self, *, noised: bool) -> dict[str, Letor]:
        return {
            name: self.world.letor(name, self._gather(name, [name], noised=noised))
            for name, own in self.world.query_rows.items()
            if len(own)
        }

    @cached_property
    def across(self) -> Cross:
        """A silo's queries with all other silos' documents, and the error bars of their counts."""
        return self.across_by(self.selection)

    def across_by(self, selection: Selection) -> Cross:
        """The same, chosen by another rule."""
        cross = {}
        for name, own in self.world.query_rows.items():
            others = [holder for holder in self.world.names if holder != name]
            if len(own) and others:
                chosen = self._gather(name, others, selection=selection)
                cross[name] = self.world.letor(name, chosen), chosen.errors
        return cross

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
        ranked = {}
        for part in (1, 2):
            mine = [table[self.world.parts(table.queries) == part] for table in tables]
            ranked[part] = Letor.concat([table for table in mine if table.rows])
        return ranked

    def bm25(self, part: int) -> NDArray[Any]:
        """Title and body BM25 added, of the candidates of a part."""
        summed: NDArray[Any] = self.ranked[part].features[:, _BM25].sum(axis=1)
        return summed


def _relevant(letor: Letor) -> NDArray[np.bool_]:
    relevant: NDArray[np.bool_] = np.bincount(letor.query_of_row, letor.grades > 0, len(letor)) > 0
    return relevant
