"""One silo's view of another silo's documents, from the counts that were released.

A `Seeker` has keys and documents of its own, which provide the priors for noisy values. It reads a
`CountsView`: every field's counts with their error bars. How common words are comes from the totals of all
silos or, where there are none, is estimated from the noisy values themselves. A view of a silo's own
documents has exact counts (`OwnCounts`) and the same totals.

The rest is for silos of one process that rank each other's documents by what they release, and are charged
for it in ledgers. `ReleasingSilos` has a collection dealt into silos, with exact scores to compare with;
`PublishedCounts` is what each of them reads of the others' cells, which were noised once and published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import DataError, ProtocolError
from isthmus.features import FIELDS, ExactCounts, Pairs, TermCounts, bm25, compute
from isthmus.private.cost import ChargeAll, Covered
from isthmus.private.counts import (
    AnsweredCells,
    Asker,
    Carrier,
    CountRelease,
    Desk,
    Owner,
    PrivateCounts,
    PublishedCells,
    fetch_catalogue,
    fetch_published,
    in_memory,
)
from isthmus.private.decoys import Decoys
from isthmus.private.keys import GroupKey
from isthmus.private.ledger import Ledger, fingerprint
from isthmus.private.mechanisms import Geometric, Mechanism, NoiseKey, OneShot
from isthmus.private.messages import Catalogue
from isthmus.private.reading import Lexicon, Shrink, ThresholdReader, Topics
from isthmus.private.sketch import CountMin, HashFamily, width_for
from isthmus.private.sums import SumPlan, totals_in_memory
from isthmus.private.totals import WIDTH, Foreign, hashed, worked_out
from isthmus.randomness import Streams
from isthmus.retrieval import Statistics, best_rows
from isthmus.retrieval import rows_of as rows_of_documents
from isthmus.tables import Corpus, Letor, Queries, Run, read_letor, replacing, rows_of, write_letor
from isthmus.text import Tokens, tokenise

Cells = CountMin | AnsweredCells
Released = Mapping[str, tuple[Catalogue, Cells]]
"""A silo's releases to another: for every field its catalogue, and noisy sketches or answers."""
Published = Mapping[str, tuple[Catalogue, CountMin]]
"""The same for published noisy sketches."""
Reader = Literal["shrink", "threshold", "plain"]


@dataclass(frozen=True)
class ViewHit:
    """A document of another silo: its score, and for every word of the query a count and its error bar."""

    document: str
    score: float
    words: dict[str, tuple[float, float]]


@dataclass(frozen=True, eq=False)
class CountsView:
    """The counts of a silo's documents by field, as another silo, or the silo itself, has them."""

    documents: tuple[str, ...]
    counts: Mapping[str, TermCounts]

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents)

    @property
    def main(self) -> str:
        """The field by which documents are searched: the body, if there is one."""
        return "body" if "body" in self.counts else next(iter(self.counts))

    def scores(self, queries: Tokens, fields: Sequence[str] = ()) -> FloatArray:
        """The BM25 of all queries and documents, for the main field or summed over `fields`."""
        pairs = Pairs.all(len(queries), len(self))
        scores = np.zeros(len(pairs))
        for counts in (self.counts[name] for name in fields or (self.main,)):
            if counts.length:
                scores += bm25(queries, pairs, counts)
        return scores.reshape(len(queries), len(self))

    def search(self, query: Tokens, k: int) -> Iterator[ViewHit]:
        """Yield the best k documents of one query, with the count and error bar of each of its words."""
        scores, counts = self.scores(query)[0], self.counts[self.main]
        words = Ids.of(query.terms.words)
        for row in best_rows(scores, k).tolist():
            mean, error = _read(counts, np.full(len(words), row), words)
            known = zip(words.tolist(), mean.tolist(), error.tolist(), strict=True)
            counted = {word: (at, off) for word, at, off in known}
            yield ViewHit(self.documents[row], float(scores[row]), counted)

    def candidates(self, queries: Tokens, k: int) -> Pairs:
        """The best k documents of every query."""
        best = [best_rows(scores, k) for scores in self.scores(queries)]
        query = np.repeat(np.arange(len(best)), [len(rows) for rows in best])
        return Pairs(query, np.concatenate([np.empty(0, np.int64), *best]).astype(np.int64))

    def features(self, queries: Tokens, pairs: Pairs) -> FloatArray:
        """The sixteen features of every pair."""
        missing = next((name for name in FIELDS if name not in self.counts), None)
        if missing is not None:
            problem = f"features need the counts of title and body, and {missing} is not released"
            raise DataError(problem, cure="ask that silo to release both: they cost no more than one")
        return compute(queries, pairs, title=self.counts["title"], body=self.counts["body"])

    def errors(self, queries: Tokens, pairs: Pairs) -> FloatArray:
        """The uncertainty of the counts of every pair: the root mean square error bar of the query's words in
        the document's main field, 0 where counts are exact."""
        table, counts = queries.counts(), self.counts[self.main]
        offsets = table.indptr.astype(np.int64)
        rows = np.repeat(np.arange(len(pairs)), np.diff(offsets)[pairs.queries])
        words = Ids(frozen(table.indices.astype(np.int64)), queries.terms.vocabulary)
        _, error = _read(counts, pairs.documents[rows], words[rows_of(offsets, pairs.queries)], rough=True)
        sizes = np.maximum(np.bincount(rows, minlength=len(pairs)), 1)
        spread: FloatArray = np.sqrt(np.bincount(rows, error**2, len(pairs)) / sizes)
        return spread

    def letor(self, queries: Queries, tokens: Tokens, pairs: Pairs, *, name: str) -> Letor:
        """Feature rows of pairs; their grades are unknown and set to 0."""
        query_ids = Ids.of(queries.ids)[pairs.queries]
        documents = Ids.of(self.documents)[pairs.documents]
        grades = np.zeros(len(pairs), dtype=np.int64)
        return Letor.of(query_ids, self.features(tokens, pairs), grades, documents=documents, name=name)


def _read(
    counts: TermCounts, documents: IntArray, words: Ids, *, rough: bool = False
) -> tuple[FloatArray, FloatArray]:
    """Counts and error bars, pair by pair; `rough` ones are computed without topics, which take time."""
    if not isinstance(counts, PrivateCounts) or not len(documents):
        return np.asarray(counts.counts(documents, words), dtype=np.float64), np.zeros(len(documents))
    if rough and isinstance(counts.reader, Shrink):
        counts = replace(counts, reader=replace(counts.reader, context=None))
    reading = counts.reading(documents, words)
    return reading.mean, reading.error


class OwnCounts:
    """A silo's exact counts of its own documents, with the same totals as all counts that it reads."""

    def __init__(self, lexicon: Lexicon, tokens: Tokens) -> None:
        own = ExactCounts.of(tokens)
        self.documents, self.length = float(lexicon.totals.documents), float(lexicon.totals.length)
        self.lengths, self.distinct, self.counts = own.lengths, own.distinct, own.counts
        self._lexicon = lexicon

    def frequencies(self, words: Ids) -> FloatArray:
        """Frequencies over all silos, as in all counts of this reader."""
        return self._lexicon.read(words).frequencies

    def occurrences(self, words: Ids) -> FloatArray:
        """Occurrences over all silos, as in all counts of this reader."""
        return self._lexicon.read(words).occurrences


def read_counts(
    lexicon: Lexicon,
    catalogue: Catalogue,
    cells: Cells,
    *,
    topics: Topics | None = None,
    reader: Reader = "shrink",
) -> PrivateCounts:
    """The counts of one released field, as read with this lexicon and, for published cells, these topics."""
    law, lengths = law_of(catalogue), catalogue.lengths
    noisy = PublishedCells(cells) if isinstance(cells, CountMin) else cells
    if reader != "shrink":
        level = max(1.0, 2 / law.rate) if reader == "threshold" else 0.0
        return PrivateCounts(noisy, ThresholdReader(level, law.variance), lexicon, lengths)
    placed = topics.placed(cells, lengths) if topics is not None and isinstance(cells, CountMin) else None
    return PrivateCounts(noisy, Shrink(law, lexicon, lengths, placed), lexicon, lengths)


def law_of(catalogue: Catalogue) -> Geometric:
    """The noise on every released cell. Raises ProtocolError for another mechanism than one_shot."""
    if catalogue.terms.mechanism != OneShot.name:
        raise ProtocolError("counts released in another way than one_shot")
    return OneShot(catalogue.terms.epsilon, catalogue.terms.rows).law


def documents_of(released: Released) -> tuple[str, ...]:
    """The documents of a silo, the same in every field. Raises ProtocolError if fields differ."""
    first, *others = (catalogue.documents for catalogue, _ in released.values())
    if any(other != first for other in others):
        raise ProtocolError("catalogues of different documents for the fields of one silo")
    return first


def fetch_released(
    carrier: Carrier, fields: Iterable[str], family: Callable[[Catalogue], HashFamily]
) -> Published:
    """Fetch everything that a silo publishes of some fields; the silo learns nothing about the queries.

    `family` returns the hash family of a field, from its catalogue.
    """
    catalogues = {name: fetch_catalogue(carrier, name) for name in fields}
    return {
        name: (catalogue, fetch_published(carrier, catalogue, family(catalogue)))
        for name, catalogue in catalogues.items()
    }


@dataclass(frozen=True, eq=False)
class Seeker:
    """A silo with queries: the group's key, words of its own documents, and the secret behind its decoys.

    `totals` are the released sums over all silos, field by field, where there are any.
    """

    key: GroupKey
    own: Mapping[str, Tokens]
    secret: bytes = field(repr=False)
    totals: Mapping[str, Statistics] = field(default_factory=dict)
    seed: int = 0

    def fetch(self, carrier: Carrier, fields: Sequence[str]) -> Published:
        """Fetch what a silo publishes of some fields (`fetch_released`)."""
        return fetch_released(carrier, fields, self._family)

    def ask(
        self,
        carrier: Carrier,
        fields: Sequence[str],
        words: Ids,
        *,
        decoys: int = 2,
        clock: Callable[[], int] = time.time_ns,
    ) -> Released:
        """Ask a silo about words, each among decoys from the asker's own vocabulary. Returns its answers by
        field."""
        released, hiding = {}, self._decoys(decoys)
        for name in fields:
            catalogue = fetch_catalogue(carrier, name)
            kind = OneShot(catalogue.terms.epsilon, catalogue.terms.rows)
            asker = Asker(catalogue.terms, self._family(catalogue), kind, hiding, clock=clock)
            cells = AnsweredCells.through(carrier, asker, words, len(catalogue.documents))
            released[name] = catalogue, cells
        return released

    def read(self, released: Released, words: Ids) -> CountsView:
        """Read a silo's releases, for questions about these words; topics improve the reading of published
        sketches."""
        counts = {}
        for name, (catalogue, cells) in released.items():
            lexicon = self._lexicon(catalogue, cells, words)
            topics = None
            if isinstance(cells, CountMin):
                topics = Topics.learned(lexicon, law_of(catalogue), Streams(self.seed)("topics", name))
            counts[name] = read_counts(lexicon, catalogue, cells, topics=topics)
        return CountsView(documents_of(released), counts)

    def _decoys(self, count: int) -> Decoys:
        """Decoys from the same field's words for every field: if a word had other decoys in the title than in
        the body, it would be the only one that is in both questions."""
        words = self.own["body" if "body" in self.own else min(self.own)].terms
        return Decoys(words, np.bincount(words.codes, minlength=len(words.vocabulary)), self.secret, count)

    def _family(self, catalogue: Catalogue) -> HashFamily:
        terms = catalogue.terms
        return self.key.family(terms.field, rows=terms.rows, width=terms.width)

    def _lexicon(self, catalogue: Catalogue, cells: Cells, words: Ids) -> Lexicon:
        """Prior knowledge of words, from totals or from their noisy values in all documents."""
        name, family = catalogue.terms.field, self._family(catalogue)
        if name in self.totals:
            return Lexicon(family, self.totals[name], self.own[name])
        if isinstance(cells, CountMin):
            values = cells.columns(family.of_vocabulary(words).cells[0])
        else:
            values = cells.table.toarray().T
        positive: IntArray = (values > 0).sum(axis=1)
        seen = Foreign(catalogue.lengths, words, positive, values.sum(axis=1))
        totals = worked_out(self._sums[name], seen, law_of(catalogue))
        return Lexicon(family, totals, self.own[name])

    @cached_property
    def _sums(self) -> Mapping[str, Statistics]:
        family = HashFamily(b"totals that stay here", 1, WIDTH)
        return {name: hashed(Statistics.of(tokens), family) for name, tokens in self.own.items()}


def write_cross_rows(letor: Letor, errors: FloatArray, path: Path) -> None:
    """Write feature rows of pairs across silos and, in `error-bars` beside their folder, the error bars of
    counts."""
    for file in (path, _errors_file(path)):
        file.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # old rows would be read with the new error bars
    with replacing(_errors_file(path)) as stream:
        np.savetxt(stream, errors, fmt="%.17g")
    write_letor(letor, path)  # last: a reader of the rows finds their error bars


def read_cross_rows(path: Path) -> tuple[Letor, FloatArray]:
    """Read feature rows and their error bars; NaN where an older Isthmus wrote the rows alone."""
    letor, file = read_letor(path), _errors_file(path)
    if not file.exists():
        return letor, np.full(letor.rows, np.nan)
    try:
        errors = np.loadtxt(file, ndmin=1)
    except ValueError as error:
        raise DataError(f"are no error bars: {error}", file=file, cure="exchange again") from error
    if errors.shape != (letor.rows,):
        raise DataError(f"{errors.size} error bars for {letor.rows} rows", file=file, cure="exchange again")
    if not (np.isfinite(errors) & (errors >= 0)).all():
        problem = "has error bars that are negative or not finite"
        raise DataError(problem, file=file, cure="exchange again")
    return letor, errors


def _errors_file(path: Path) -> Path:
    """The file of error bars, one number for each row of the table, with the same file name."""
    return path.parent.parent / "error-bars" / path.name


DEPTH = 100
EPSILON_TOTALS = 0.5
"""ε of document frequencies and of collection counts."""


class ReleasingSilos:
    """A collection in silos that book every release to all others and add up their totals securely."""

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
        """Exact BM25 with statistics of all silos, queries × documents."""
        whole = sum((Statistics.of(tokens) for tokens in self.bodies[1:]), Statistics.of(self.bodies[0]))
        return self.scored(lambda asker, holder: ExactCounts.of(self.bodies[holder], whole))

    def scored(self, counts: Callable[[int, int], TermCounts]) -> FloatArray:
        """BM25 of all queries and documents; `counts(asker, holder)` are the counts that one silo has of
        another."""
        scores = np.zeros((len(self.corpus.queries), len(self.corpus.documents)))
        for asker in self.silos:
            for holder in self.silos:
                self._score(asker, holder, counts(asker, holder), scores)
        return scores

    def at_home(self, counts: Callable[[int], TermCounts], scores: FloatArray) -> FloatArray:
        """The same scores, except for queries and documents of one silo, which are scored with
        `counts(silo)`."""
        changed = scores.copy()
        for silo in self.silos:
            self._score(silo, silo, counts(silo), changed)
        return changed

    def _score(self, asker: int, holder: int, counts: TermCounts, scores: FloatArray) -> None:
        queries, rows = self.query_rows[asker], self.rows[holder]
        if len(queries) and len(rows):
            values = bm25(self.queries[asker], Pairs.all(len(queries), len(rows)), counts)
            scores[np.ix_(queries, rows)] = values.reshape(len(queries), len(rows))
        if self.corpus.queries.own:  # the document that a query was made from is no candidate
            own = rows_of_documents(Ids.of(self.corpus.documents.ids), self.corpus.queries.own)
            scores[np.flatnonzero(own >= 0), own[own >= 0]] = -1.0

    def run(self, scores: FloatArray, name: str = "") -> Run:
        """The best hundred documents of every query."""
        depth = min(DEPTH, scores.shape[1])
        best = np.argpartition(-scores, depth - 1, axis=1)[:, :depth]
        queries = Ids.of(self.corpus.queries.ids)[np.repeat(np.arange(len(scores)), depth)]
        documents = Ids.of(self.corpus.documents.ids)[best.ravel()]
        return Run.of(queries, documents, np.take_along_axis(scores, best, axis=1).ravel(), name=name)

    def peers(self, holder: int) -> Sequence[str]:
        """The receivers of a silo's releases: all other silos."""
        return [silo for at, silo in enumerate(self.corpus.silos) if at != holder]

    def covered(self, holder: int, rng: np.random.Generator) -> tuple[Covered, ChargeAll]:
        """A silo's documents with their versions in its ledger, and the function that books releases
        of them."""
        documents, ledger = self.corpus.documents, self.ledgers[holder]
        texts = [documents.bodies[row] for row in self.rows[holder]]
        names = [documents.ids[row] for row in self.rows[holder]]
        return ledger.versions(names, [fingerprint(text) for text in texts]), ledger.charge_all

    @cached_property
    def totals(self) -> Statistics:
        """Frequencies and counts over all silos, summed securely, with a share of the noise from each."""
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
        """One silo's documents, released by a mechanism under a noise key of its own."""
        rng = self.streams("noise", kind.name, holder, repr(kind.epsilon))
        covered, charge = self.covered(holder, rng)
        release = CountRelease("body", family, kind, NoiseKey.fresh(rng.bytes), charge)
        return Owner.of(self.bodies[holder], covered, release)

    def lexicon(self, asker: int, family: HashFamily) -> Lexicon:
        """An asker's prior knowledge of words."""
        return Lexicon(family, self.totals, self.bodies[asker])


class PublishedCounts:
    """Cells of all silos' documents, noised once and published, with the lexicon and topics of each asker."""

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
            for peer in others:  # the same bytes for other peers: charged, but not computed again
                owner.release.charge_all(owner.charges(owner.no_columns, peer))
        self.lexica = [silos.lexicon(asker, family) for asker in silos.silos]
        self.topics = [
            Topics.learned(lexicon, kind.law, silos.streams("topics", asker))
            for asker, lexicon in enumerate(self.lexica)
        ]

    def counts(self, reader: str, asker: int, holder: int) -> PrivateCounts:
        """The counts that one silo reads of another's documents: the reader `publish` shrinks by topics,
        `ask` without them, others do not shrink (see `views.read_counts`)."""
        return read_counts(
            self.lexica[asker],
            self.catalogues[holder],
            self.sketches[holder],
            topics=self.topics[asker] if reader == "publish" else None,
            reader="shrink" if reader in ("publish", "ask") else reader,  # type: ignore[arg-type]
        )

    def at_home(self, silo: int) -> TermCounts:
        """A silo's exact counts of its own documents, with the totals of all silos."""
        return OwnCounts(self.lexica[silo], self.silos.bodies[silo])
