"""Silos of one process that rank each other's documents by what they release, and pay for it in ledgers.

`ReleasingSilos` has a collection dealt into silos, with exact scores to compare with; `PublishedCounts` is
what each of them reads of the others' cells, which were noised once and published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from isthmus.arrays import FloatArray, Ids
from isthmus.features import ExactCounts, Pairs, TermCounts, bm25
from isthmus.private.cost import ChargeAll, Covered
from isthmus.private.counts import (
    CountRelease,
    Desk,
    Owner,
    PrivateCounts,
    fetch_catalogue,
    fetch_published,
    in_memory,
)
from isthmus.private.ledger import Ledger, fingerprint
from isthmus.private.mechanisms import Mechanism, OneShot
from isthmus.private.noise import NoiseKey
from isthmus.private.reading import Lexicon
from isthmus.private.sketch import HashFamily, width_for
from isthmus.private.sums import SumPlan, totals_in_memory
from isthmus.private.topics import Topics
from isthmus.private.totals import WIDTH, hashed
from isthmus.private.views import OwnCounts, read_counts
from isthmus.randomness import Streams
from isthmus.retrieval import Statistics, rows_of
from isthmus.tables import Corpus, Run
from isthmus.text import tokenise

DEPTH = 100
EPSILON_TOTALS = 0.5
"""ε of document frequencies and of collection counts."""


class ReleasingSilos:
    """A collection in silos that book every release to all others, and add their totals up in secret."""

    def __init__(
        self, corpus: Corpus, streams: Streams, ledgers: Sequence[Ledger], width: int | None = None
    ) -> None:
        self.corpus, self.streams, self.ledgers = corpus, streams, ledgers
        self.silos = range(len(corpus.silos))
        self.rows = [np.flatnonzero(corpus.documents.silos == silo) for silo in self.silos]
        self.query_rows = [np.flatnonzero(corpus.queries.silos == silo) for silo in self.silos]
        self.bodies = [tokenise([corpus.documents.bodies[row] for row in rows]) for rows in self.rows]
        self.queries = [tokenise([corpus.queries.texts[row] for row in rows]) for rows in self.query_rows]
        self.width = width or width_for(np.concatenate([tokens.lengths for tokens in self.bodies]))

    @cached_property
    def exact(self) -> FloatArray:
        """Exact BM25 with everybody's statistics, queries × documents."""
        whole = sum((Statistics.of(tokens) for tokens in self.bodies[1:]), Statistics.of(self.bodies[0]))
        return self.scored(lambda asker, holder: ExactCounts.of(self.bodies[holder], whole))

    def scored(self, counts: Callable[[int, int], TermCounts]) -> FloatArray:
        """BM25 of all queries and documents; `counts(asker, holder)` is what one silo has of another."""
        scores = np.zeros((len(self.corpus.queries), len(self.corpus.documents)))
        for asker in self.silos:
            for holder in self.silos:
                self._score(asker, holder, counts(asker, holder), scores)
        return scores

    def at_home(self, counts: Callable[[int], TermCounts], scores: FloatArray) -> FloatArray:
        """These scores, but those of a silo's own documents as `counts(silo)` has them."""
        changed = scores.copy()
        for silo in self.silos:
            self._score(silo, silo, counts(silo), changed)
        return changed

    def _score(self, asker: int, holder: int, counts: TermCounts, scores: FloatArray) -> None:
        queries, rows = self.query_rows[asker], self.rows[holder]
        if len(queries) and len(rows):
            values = bm25(self.queries[asker], Pairs.all(len(queries), len(rows)), counts)
            scores[np.ix_(queries, rows)] = values.reshape(len(queries), len(rows))
        if self.corpus.queries.own:  # what a query was made from is no candidate
            own = rows_of(Ids.of(self.corpus.documents.ids), self.corpus.queries.own)
            scores[np.flatnonzero(own >= 0), own[own >= 0]] = -1.0

    def run(self, scores: FloatArray, name: str = "") -> Run:
        """The best hundred documents of every query."""
        depth = min(DEPTH, scores.shape[1])
        best = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
        queries = Ids.of(self.corpus.queries.ids)[np.repeat(np.arange(len(scores)), depth)]
        documents = Ids.of(self.corpus.documents.ids)[best.ravel()]
        return Run.of(queries, documents, np.take_along_axis(scores, best, axis=1).ravel(), name=name)

    def peers(self, holder: int) -> Sequence[str]:
        """Who gets what a silo releases: all other silos."""
        return [silo for at, silo in enumerate(self.corpus.silos) if at != holder]

    def covered(self, holder: int, rng: np.random.Generator) -> tuple[Covered, ChargeAll]:
        """A silo's documents in the versions its ledger has, and where releases of them are booked."""
        documents, ledger = self.corpus.documents, self.ledgers[holder]
        texts = [documents.bodies[row] for row in self.rows[holder]]
        names = [documents.ids[row] for row in self.rows[holder]]
        return ledger.versions(names, [fingerprint(text) for text in texts]), ledger.charge_all

    @cached_property
    def totals(self) -> Statistics:
        """Frequencies and counts of all silos, summed in secret, with a share of the noise from each."""
        rng = self.streams("totals")
        family = HashFamily(rng.bytes(32), 1, WIDTH)
        plan = SumPlan("body", family, self.corpus.silos, EPSILON_TOTALS, EPSILON_TOTALS)
        silos = {
            name: (hashed(Statistics.of(self.bodies[holder]), family), self.covered(holder, rng)[0])
            for holder, name in enumerate(self.corpus.silos)
        }
        charge = dict(zip(self.corpus.silos, (ledger.charge_all for ledger in self.ledgers), strict=True))
        return totals_in_memory(plan, silos, charge=charge, entropy=rng.bytes)

    def owner(self, holder: int, kind: Mechanism, family: HashFamily) -> Owner:
        """One silo's documents, released by a mechanism with noise of its own."""
        rng = self.streams("noise", kind.name, holder, repr(kind.epsilon))
        covered, charge = self.covered(holder, rng)
        release = CountRelease("body", family, kind, NoiseKey.fresh(rng.bytes), charge)
        return Owner.of(self.bodies[holder], covered, release)

    def lexicon(self, asker: int, family: HashFamily) -> Lexicon:
        """What an asker knows beforehand."""
        return Lexicon(family, self.totals, self.bodies[asker])


class PublishedCounts:
    """All silos' documents as cells noised once, published, and what each asker brings to read them with."""

    def __init__(self, silos: ReleasingSilos, epsilon: float) -> None:
        kind = OneShot(epsilon)
        self.silos = silos
        family = HashFamily(silos.streams("hashes").bytes(32), 1, silos.width)
        self.catalogues, self.sketches = [], []
        for holder in silos.silos:
            owner, (first, *others) = silos.owner(holder, kind, family), silos.peers(holder)
            carrier = in_memory(Desk(owner), first)
            self.catalogues.append(fetch_catalogue(carrier, "body"))
            self.sketches.append(fetch_published(carrier, self.catalogues[-1], family))
            for peer in others:  # they get the same bytes: charged, and not computed again
                owner.release.charge_all(owner.charges(owner.no_columns, peer))
        self.lexica = [silos.lexicon(asker, family) for asker in silos.silos]
        self.topics = [
            Topics.learned(lexicon, kind.law, silos.streams("topics", asker))
            for asker, lexicon in enumerate(self.lexica)
        ]

    def counts(self, reader: str, asker: int, holder: int) -> PrivateCounts:
        """What one silo reads of another's documents; `publish` shrinks by topics, `ask` without, others do
        not shrink (see `views.read_counts`)."""
        return read_counts(
            self.lexica[asker],
            self.catalogues[holder],
            self.sketches[holder],
            topics=self.topics[asker] if reader == "publish" else None,
            reader="shrink" if reader in ("publish", "ask") else reader,  # type: ignore[arg-type]
        )

    def at_home(self, silo: int) -> TermCounts:
        """What a silo knows of its own documents: their counts, beside everybody's totals."""
        return OwnCounts(self.lexica[silo], self.silos.bodies[silo])
