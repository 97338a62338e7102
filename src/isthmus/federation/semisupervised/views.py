"""What a silo knows of the documents of all silos: its own exactly, the others' through what they release.

    Holding ── desk ──> published noisy cells ──> Shelf ─┐
    Holdings' sums ── noised ──> Totals ─────────────────┴─> View.counts(holder, field) ──> features

A view also reads its own silo's documents as others see them, from its own release: a ranker that is to be
used on noisy counts can be trained on such. Whatever selects pairs reads released values only; choosing by
exact counts of another silo would be a release that nobody charged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, ProtocolError
from isthmus.features import FIELDS, ExactCounts, Pairs, TermCounts, bm25, compute
from isthmus.private.cost import ChargeAll, Covered, no_charge
from isthmus.private.counts import (
    Carrier,
    Desk,
    Owner,
    PrivateCounts,
    PublishedCells,
    Release,
    fetch_catalogue,
    fetch_published,
)
from isthmus.private.mechanisms import OneShot
from isthmus.private.messages import Catalogue
from isthmus.private.noise import Entropy, NoiseKey, fresh_nonces
from isthmus.private.reading import Lexicon, Plain, Reader, Shrink, Threshold
from isthmus.private.sketch import CountMin, HashFamily, width_for
from isthmus.private.topics import Topics
from isthmus.private.totals import WIDTH, Sums, Totals
from isthmus.randomness import Streams
from isthmus.tables import Corpus
from isthmus.tables.ids import FloatArray, IntArray
from isthmus.text import ENGLISH, Tokeniser, Tokens

READERS = ("topics", "shrink", "threshold", "plain")


@dataclass(frozen=True)
class Exchange:
    """How counts are released and read: ε of a field's cells, of each of its two totals, and the reader."""

    epsilon: float = 8.0
    epsilon_totals: float = 0.5
    reader: Literal["topics", "shrink", "threshold", "plain"] = "topics"
    width: int | None = None
    """Cells a document; by default as many as documents of that length need."""

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise ConfigError(f"no reader {self.reader!r}", key=self.reader, known=READERS)
        if not (self.epsilon > 0 and self.epsilon_totals > 0):
            raise ConfigError("ε must be above 0", key="epsilon", value=self.epsilon)

    @property
    def mechanism(self) -> OneShot:
        """Cells noised once and for all."""
        return OneShot(self.epsilon)


@dataclass(frozen=True, eq=False)
class Holding:
    """One silo's documents, as only the silo itself sees them."""

    name: str
    documents: tuple[str, ...]
    fields: Mapping[str, Tokens]

    @classmethod
    def of(cls, corpus: Corpus, name: str, *, tokeniser: Tokeniser = ENGLISH) -> Holding:
        """What one silo of a corpus holds."""
        held = corpus.silo(name).documents
        texts = (held.titles, held.bodies)
        return cls(name, held.ids, {at: tokeniser(text) for at, text in zip(FIELDS, texts, strict=True)})

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents)

    def desk(
        self,
        families: Mapping[str, HashFamily],
        exchange: Exchange,
        *,
        entropy: Entropy,
        charge: ChargeAll = no_charge,
    ) -> Desk:
        """Where others are answered; the noise is drawn from `entropy` once and for all."""
        key, owners = NoiseKey.fresh(entropy), []
        for name, tokens in self.fields.items():
            nonces = fresh_nonces(len(self), entropy)
            covered = Covered(self.documents, tuple(nonce.tobytes().hex() for nonce in nonces))
            release = Release(name, families[name], exchange.mechanism, key, charge)
            owners.append(Owner.of(tokens, covered, release))
        return Desk(*owners)

    def sums(self, families: Mapping[str, HashFamily]) -> dict[str, Sums]:
        """What the silo adds to the totals, field by field; not to be shown to anybody as it is."""
        return {name: Sums.of(tokens, families[name]) for name, tokens in self.fields.items()}


@dataclass(frozen=True, eq=False)
class Shelf:
    """What one silo has released of its documents, field by field."""

    documents: tuple[str, ...]
    lengths: Mapping[str, IntArray]
    cells: Mapping[str, CountMin]

    @classmethod
    def fetched(cls, carrier: Carrier, families: Mapping[str, HashFamily]) -> Shelf:
        """Ask a silo for everything it publishes."""
        catalogues = {name: fetch_catalogue(carrier, name) for name in families}
        cells = {name: fetch_published(carrier, catalogues[name], families[name]) for name in families}
        documents = _same_documents(list(catalogues.values()))
        return cls(documents, {name: found.lengths for name, found in catalogues.items()}, cells)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents)


def _same_documents(catalogues: Sequence[Catalogue]) -> tuple[str, ...]:
    first = tuple(catalogues[0].documents)
    if any(tuple(catalogue.documents) != first for catalogue in catalogues):
        raise ProtocolError("a silo's fields are about different documents")
    return first


def hash_families(seed: bytes, widths: Mapping[str, int]) -> dict[str, HashFamily]:
    """The hash family of every field's cells, from a secret that all silos share."""
    return {name: HashFamily(seed + name.encode(), 1, width) for name, width in widths.items()}


def widths_for(lengths: Mapping[str, IntArray], exchange: Exchange) -> dict[str, int]:
    """How many cells every field's documents get, from lengths, which are public."""
    return {name: exchange.width or width_for(found) for name, found in lengths.items()}


def totals_families(seed: bytes) -> dict[str, HashFamily]:
    """The hash family of every field's totals."""
    return {name: HashFamily(seed + b"totals" + name.encode(), 1, WIDTH) for name in FIELDS}


class OwnCounts:
    """A silo's exact counts of its own documents, beside the totals that all counts are read with."""

    def __init__(self, lexicon: Lexicon, tokens: Tokens) -> None:
        own = ExactCounts.of(tokens)
        self.documents, self.length = float(lexicon.totals.documents), float(lexicon.totals.length)
        self.lengths, self.distinct, self.counts = own.lengths, own.distinct, own.counts
        self._lexicon = lexicon

    def frequencies(self, words: object) -> FloatArray:
        """As in all counts of this reader."""
        return self._lexicon.read(words).frequencies  # type: ignore[arg-type]

    def occurrences(self, words: object) -> FloatArray:
        """As in all counts of this reader."""
        return self._lexicon.read(words).occurrences  # type: ignore[arg-type]


class Sight(Protocol):
    """Counts of every silo's documents, as one silo has them."""

    def counts(self, holder: str, name: str, *, noised: bool = False) -> TermCounts: ...

    def size(self, holder: str) -> int: ...


@dataclass(frozen=True, eq=False)
class View:
    """One silo's sight of everybody's documents through what was released.

    `noised` asks for the silo's own documents as others see them; otherwise these are exact.
    """

    own: Holding
    shelves: Mapping[str, Shelf]
    totals: Mapping[str, Totals]
    exchange: Exchange
    streams: Streams
    _readers: dict[tuple[str, str], Reader] = field(default_factory=dict, init=False, repr=False)

    def size(self, holder: str) -> int:
        """How many documents a silo has released."""
        return len(self.shelves[holder])

    def counts(self, holder: str, name: str, *, noised: bool = False) -> TermCounts:
        """The counts of one field of one silo's documents."""
        lexicon = self._lexica[name]
        if holder == self.own.name and not noised:
            return OwnCounts(lexicon, self.own.fields[name])
        shelf = self.shelves[holder]
        cells = PublishedCells(shelf.cells[name])
        return PrivateCounts(cells, self.reader(holder, name), lexicon, shelf.lengths[name])

    def reader(self, holder: str, name: str) -> Reader:
        """What turns a silo's noisy values into counts."""
        if (holder, name) not in self._readers:
            self._readers[holder, name] = self._reader(self.shelves[holder], name)
        return self._readers[holder, name]

    def _reader(self, shelf: Shelf, name: str) -> Reader:
        law, lengths = self.exchange.mechanism.law, shelf.lengths[name]
        if self.exchange.reader == "plain":
            return Plain(law.variance)
        if self.exchange.reader == "threshold":
            return Threshold(max(1.0, 2 / law.rate), law.variance)
        topics = self._topics[name] if self.exchange.reader == "topics" else None
        context = None if topics is None else topics.placed(shelf.cells[name], lengths)
        return Shrink(law, self._lexica[name], lengths, context)

    @cached_property
    def _lexica(self) -> dict[str, Lexicon]:
        shelf = self.shelves[self.own.name]
        return {
            name: Lexicon(shelf.cells[name].family, self.totals[name], tokens)
            for name, tokens in self.own.fields.items()
        }

    @cached_property
    def _topics(self) -> dict[str, Topics | None]:
        law = self.exchange.mechanism.law
        body = Topics.learned(self._lexica["body"], law, self.streams("topics", self.own.name))
        return {"title": None, "body": body}  # a title is too short to show what it is about


def features(sight: Sight, queries: Tokens, pairs: Pairs, holder: str, *, noised: bool = False) -> FloatArray:
    """The sixteen features of pairs of own queries and one silo's documents."""
    title, body = (sight.counts(holder, name, noised=noised) for name in FIELDS)
    return compute(queries, pairs, title=title, body=body)


def bm25_scores(sight: Sight, queries: Tokens, holder: str, *, noised: bool = False) -> FloatArray:
    """BM25 of own queries and all of one silo's documents, title and body added: queries × documents."""
    shape = len(queries), sight.size(holder)
    scores: NDArray[np.float64] = np.zeros(shape)
    pairs = Pairs.all(*shape)
    for name in FIELDS:
        counts = sight.counts(holder, name, noised=noised)
        if counts.length:
            scores += bm25(queries, pairs, counts).reshape(shape)
    return scores
