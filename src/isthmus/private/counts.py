"""Private counts between two silos: publish, or ask → answer → recover. No network code.

The owner of documents has a `Desk` with one `Owner` per field. A desk takes bytes and returns bytes, so any
carrier will do; in simulation a carrier is a function call. The asker turns the replies into `PrivateCounts`,
which features read like any other counts.

    desk.serve(Enquiry("body").encode(), "north")                 the catalogue: documents, lengths, terms
    desk.serve(Enquiry("body", first=0).encode(), "north")        noisy sketches, a batch at a time
    asked = asker.ask(words); asker.recover(asked, desk.serve(asked.message, "north"))

Every release is charged before it is sent. A cell has the same noise whether it is published or asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.errors import ConfigError, PrivacyError, ProtocolError
from isthmus.private import mechanisms, messages
from isthmus.private.cost import ChargeAll, Cost, Covered
from isthmus.private.decoys import Decoys
from isthmus.private.reading import Cells, CountEstimate, Lexicon, Reader
from isthmus.private.sketch import CountMin, HashFamily, Sketch
from isthmus.report import progress
from isthmus.tables import offsets_of
from isthmus.text import Tokens

_BATCH = 1 << 22  # cells published per batch


@dataclass(frozen=True, eq=False)
class CountRelease:
    """How a silo releases the counts of one field."""

    field: str
    family: HashFamily
    mechanism: mechanisms.Mechanism
    key: mechanisms.NoiseKey
    charge_all: ChargeAll

    def __post_init__(self) -> None:
        if self.family.rows != self.mechanism.rows:
            rows = f"{self.mechanism.name} has {self.mechanism.rows} rows, the hash family {self.family.rows}"
            raise ConfigError(rows, key="rows", value=self.family.rows)

    @property
    def terms(self) -> messages.Terms:
        """The public terms of the release."""
        family, kind = self.family, self.mechanism
        return messages.Terms(kind.name, self.field, kind.epsilon, family.rows, family.width, family.epoch)


class Owner:
    """The side that has the documents, for one field of them."""

    def __init__(self, sketch: Sketch, lengths: IntArray, covered: Covered, release: CountRelease) -> None:
        if not len(sketch) == len(lengths) == len(covered):
            parts = f"{len(sketch)} sketches, {len(lengths)} lengths and {len(covered)} document versions"
            raise PrivacyError(f"{parts} do not belong together")
        if type(sketch) is not release.mechanism.sketch or sketch.family != release.family:
            raise PrivacyError("a sketch of another kind or hash family than is released (build it again)")
        self.release, self.covered, self.lengths = release, covered.frozen(), lengths
        self._data = mechanisms.FieldData(release.terms, sketch, release.key, _nonces(covered))
        self._last_number: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tokens: Tokens, covered: Covered, release: CountRelease) -> Owner:
        """Sketch the texts of a field. Returns the owner of the sketches."""
        return cls(release.mechanism.sketch.of(tokens, release.family), tokens.lengths, covered, release)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.covered)

    @property
    def no_columns(self) -> mechanisms.Columns:
        """An empty question. Where cells are noised once, it costs as much as the whole release."""
        return np.empty((0, self.release.mechanism.rows), dtype=np.uint32)

    def catalogue(self) -> messages.Catalogue:
        """The public data: names and lengths of the documents, and the terms under which counts are
        released."""
        return messages.Catalogue(self.release.terms, tuple(self.covered.documents), self.lengths)

    def publish(self, first: int, peer: str) -> messages.Published:
        """Return the noisy cells of a batch of documents, from row `first` on. All documents are charged at
        once."""
        kind = self.release.mechanism
        if not isinstance(kind, mechanisms.OneShot):
            raise ProtocolError(f"counts released by {kind.name} are answered, not published")
        if first >= len(self):
            raise ProtocolError("an enquiry about documents that do not exist")
        self._charge(self.no_columns, peer)
        size = self.release.family.size
        last = min(len(self), first + max(1, _BATCH // size))
        data = self._data
        sketch = data.sketch.take(np.arange(first, last))
        some = replace(data, sketch=sketch, nonces=data.nonces[first:last])
        noisy = some.sketch.dense() + kind.noise(some, np.arange(size)).T
        places = np.flatnonzero(noisy)
        return messages.Published(
            data.terms, first, last - first, places, noisy.ravel()[places].astype(np.int32)
        )

    def answer(self, question: messages.CountsQuestion, peer: str) -> messages.CountsAnswer:
        """Charge and return the noisy values that a question asks for."""
        if question.terms != self.release.terms:
            raise ProtocolError("a question under other terms of release than this silo's")
        self.release.mechanism.check(question.terms, question.columns)
        if question.columns.size * len(self) > messages.MOST_VALUES:
            raise ProtocolError("a question about more words than are answered at once (ask about fewer)")
        self._hear(question.number, peer)
        self._charge(question.columns, peer)
        values = self.release.mechanism.answer(self._data, question.columns, peer)
        return messages.CountsAnswer.of(question.digest(), values)

    def _hear(self, number: int, peer: str) -> None:
        with self._lock:
            if number <= self._last_number.get(peer, -1):
                raise ProtocolError("a question that was received before")
            self._last_number[peer] = number

    def charges(self, columns: mechanisms.Columns, peer: str) -> list[tuple[Cost, Covered, str]]:
        """The charges for answering these columns to a peer, for a ledger to book."""
        costs = self.release.mechanism.costs(self.release.terms, columns)
        # the same cells have other noise under another noise key, and other counts under another hash key
        key = f"key {self.release.key.name}, hashes {self.release.family.name}"
        named = [replace(cost, release=f"{cost.release}, {key}") for cost in costs]
        return [(cost, self.covered, peer) for cost in named]

    def _charge(self, columns: mechanisms.Columns, peer: str) -> None:
        self.release.charge_all(self.charges(columns, peer))


class Desk:
    """Answers messages about the counts of a silo's documents: bytes in, bytes out."""

    def __init__(self, *owners: Owner) -> None:
        self._owners = {owner.release.field: owner for owner in owners}

    def serve(self, message: bytes, peer: str) -> bytes:
        """Answer a message of a peer whom the carrier has authenticated. Raises PrivacyError if it is
        refused."""
        if messages.kind_of(message) == messages.CountsQuestion.kind:
            question = messages.CountsQuestion.decode(message)
            return self._owner(question.terms.field).answer(question, peer).encode()
        enquiry = messages.Enquiry.decode(message)
        owner = self._owner(enquiry.field)
        if enquiry.first < 0:
            return owner.catalogue().encode()
        return owner.publish(enquiry.first, peer).encode()

    def _owner(self, name: str) -> Owner:
        if name not in self._owners:
            raise ProtocolError("a message about a field this silo does not release")
        return self._owners[name]


Carrier = Callable[[bytes], bytes]
"""Takes a message to one silo and returns the silo's answer."""


def in_memory(desk: Desk, asker: str) -> Carrier:
    """A carrier without a network: one call with the same bytes."""
    return lambda message: desk.serve(message, asker)


def fetch_catalogue(carrier: Carrier, name: str) -> messages.Catalogue:
    """Ask a silo for the catalogue of a field."""
    catalogue = messages.Catalogue.decode(carrier(messages.Enquiry(name).encode()))
    if catalogue.terms.field != name:
        raise ProtocolError("a catalogue of another field than asked for")
    return catalogue


def fetch_published(carrier: Carrier, catalogue: messages.Catalogue, family: HashFamily) -> CountMin:
    """Ask a silo for the noisy sketches of all documents of a catalogue, batch by batch."""
    return assemble(_batches(carrier, catalogue), catalogue, family)


def _batches(carrier: Carrier, catalogue: messages.Catalogue) -> Iterator[messages.Published]:
    done, total = 0, len(catalogue.documents)
    for _ in progress(range(total), label="fetching sketches"):
        if done >= total:
            return
        batch = messages.Published.decode(carrier(messages.Enquiry(catalogue.terms.field, done).encode()))
        yield batch
        done += batch.documents


def assemble(
    batches: Iterator[messages.Published], catalogue: messages.Catalogue, family: HashFamily
) -> CountMin:
    """Join the batches of a catalogue's noisy sketches, in order. Raises ProtocolError if they do not fit
    together."""
    terms, total = catalogue.terms, len(catalogue.documents)
    if (family.rows, family.width, family.epoch) != (terms.rows, terms.width, terms.epoch):
        raise ProtocolError("a release under another hash family than this silo's")
    rows, cells, values, done = [], [], [], 0
    for batch in batches:
        fits = batch.terms == terms and batch.first == done and 0 < batch.documents <= total - done
        if not fits:
            raise ProtocolError("published sketches that do not follow on one another")
        document, cell = np.divmod(batch.places, family.size)
        rows.append(document + done)
        cells.append(cell.astype(np.int32))
        values.append(batch.values)
        done += batch.documents
    if done != total:
        raise ProtocolError("published sketches of fewer documents than the catalogue has")
    empty = np.empty(0, dtype=np.int32)
    offsets = offsets_of(np.concatenate([np.empty(0, np.int64), *rows]), total)
    joined = np.concatenate([empty, *cells]), np.concatenate([empty, *values])
    return CountMin(family, offsets, frozen(joined[0]), frozen(joined[1]))


@dataclass(frozen=True, eq=False)
class OpenQuestion:
    """A question on its way: the message for the owner, and the private data with which the asker reads the
    answer."""

    message: bytes
    question: messages.CountsQuestion
    words: Ids
    places: IntArray
    signs: NDArray[np.int8]
    used: IntArray
    anonymity: int


@dataclass(eq=False)
class Asker:
    """The side that has the queries. A word always comes with the same decoys."""

    terms: messages.Terms
    family: HashFamily
    mechanism: mechanisms.Mechanism
    decoys: Decoys
    real_rows: int = 10
    shared_rows: int = 1
    clock: Callable[[], int] = time.time_ns
    _last: int = field(default=-1, init=False, repr=False)

    def ask(self, words: Ids) -> OpenQuestion:
        """Make the question about every word of a vocabulary, hidden among decoys."""
        hashed = self.family.of_vocabulary(words)
        if self.mechanism.obfuscated:
            return self._ask_vectors(words, hashed.signs)
        chosen = self.decoys.beside(words)
        beside = np.concatenate([np.empty(0, np.int64), *chosen]).astype(np.int64)
        others = self.family.of_vocabulary(self.decoys.named(beside))
        cells = np.concatenate([hashed.cells, others.cells], axis=1)
        signs = np.concatenate([hashed.signs, others.signs], axis=1)
        columns = (cells - np.arange(self.family.rows)[:, None] * self.family.width).T
        if self.mechanism.signed:
            columns = columns + np.where(signs.T < 0, self.family.width, 0)
        # unique and sorted, so that the order does not reveal which columns are real
        table, back = np.unique(columns, axis=0, return_inverse=True)
        used = np.broadcast_to(np.arange(self.family.rows), (len(hashed.cells[0]), self.family.rows))
        places = back.ravel()[: len(words.vocabulary)]
        hidden = 1 + min((len(decoys) for decoys in chosen), default=0)
        known = {"words": words, "places": places, "signs": hashed.signs, "used": used, "anonymity": hidden}
        return self._opened(table.astype(np.uint32), known)

    def _ask_vectors(self, words: Ids, signs: NDArray[np.int8]) -> OpenQuestion:
        shape = {"real_rows": self.real_rows, "shared_rows": self.shared_rows}
        vectors = self.decoys.vectors(words, self.family, **shape)
        table = np.stack([vector.columns for vector in vectors]).astype(np.uint32)
        used = np.stack([vector.used for vector in vectors])
        hidden = min(vector.anonymity for vector in vectors)
        places = np.arange(len(vectors))
        known = {"words": words, "places": places, "signs": signs, "used": used, "anonymity": hidden}
        return self._opened(table, known)

    def _opened(self, table: mechanisms.Columns, known: Mapping[str, Any]) -> OpenQuestion:
        self._last = max(self._last + 1, self.clock())
        question = messages.CountsQuestion(self.terms, self._last, table)
        return OpenQuestion(question.encode(), question, **known)

    def recover(self, sent: OpenQuestion, data: bytes, documents: int) -> NDArray[Any]:
        """The noisy counts of the words of a question, (words, documents). Raises ProtocolError for another
        answer."""
        answer = messages.CountsAnswer.decode(data)
        if answer.question != sent.question.digest():
            raise ProtocolError("an answer to another question")
        words, parts, rows = answer.shape
        expected = 1 if self.mechanism.signed else self.terms.rows
        if (words, parts, rows) != (len(sent.question.columns), expected, documents):
            raise ProtocolError("an answer that does not fit its question")
        return self.mechanism.read(answer.table()[sent.places], sent.signs, sent.used)


class Noisy(Protocol):
    """A source of noisy values."""

    def values(self, documents: IntArray, words: Ids) -> NDArray[Any]: ...


@dataclass(frozen=True, eq=False)
class PublishedCells:
    """Values from published sketches, which have one for any word."""

    sketch: CountMin

    def values(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """The value of each pair's cell; with several rows, the median."""
        cells = self.sketch.family.of_vocabulary(words).cells[:, words.codes]
        values = [self.sketch.lookup(documents, row) for row in cells]
        return values[0] if len(values) == 1 else np.median(values, axis=0)


@dataclass(frozen=True, eq=False)
class AnsweredCells:
    """Values of the words that were asked about, as a table of documents × words."""

    words: Ids
    table: Any

    @classmethod
    def through(
        cls, carrier: Carrier, asker: Asker, words: Ids, documents: int, *, at_once: int = 512
    ) -> AnsweredCells:
        """Ask about all words of a vocabulary, at most `at_once` in one question."""
        from scipy.sparse import csr_array, hstack

        parts = []
        a_word = max(documents, 1) * asker.terms.rows * (1 + asker.decoys.count)
        at_once = max(1, min(at_once, messages.MOST_VALUES // a_word))
        every = Ids(frozen(np.arange(len(words.vocabulary))), words.vocabulary)
        for first in progress(range(0, len(every), at_once), label="asking"):
            some = Ids.of(every[first : first + at_once].tolist())
            question = asker.ask(some)
            columns = asker.recover(question, carrier(question.message), documents)
            parts.append(csr_array(columns.T))
        table = hstack(parts, format="csr") if parts else csr_array((documents, 0))
        return cls(every, table)

    def values(self, documents: IntArray, words: Ids) -> NDArray[Any]:
        """The value of each pair. Raises PrivacyError for a word that was not asked about."""
        known = words.translation(self.words)[words.codes]
        if (known < 0).any():
            raise PrivacyError("a word that was not asked about has no value (ask about it first)")
        return np.asarray(self.table[documents, known])


@dataclass(frozen=True, eq=False)
class PrivateCounts:
    """Noisy counts of another silo's documents, for features: estimated by `reader`, with an error bar
    each."""

    noisy: Noisy
    reader: Reader
    lexicon: Lexicon
    lengths: IntArray

    @property
    def documents(self) -> float:
        """The number of documents in all silos."""
        return self.lexicon.totals.documents

    @property
    def length(self) -> float:
        """The number of words in all silos."""
        return self.lexicon.totals.length

    @property
    def distinct(self) -> FloatArray:
        """The number of distinct words of each document. It is not released, but estimated from own documents
        by length."""
        return self.lexicon.distinct(self.lengths)

    def reading(self, documents: IntArray, words: Ids) -> CountEstimate:
        """Counts and their error bars, pair by pair."""
        return self.reader.read(Cells(self.noisy.values(documents, words), documents, words))

    def counts(self, documents: IntArray, words: Ids) -> FloatArray:
        """The estimated count of word `words[i]` in document `documents[i]`, for every i."""
        return self.reading(documents, words).mean

    def frequencies(self, words: Ids) -> FloatArray:
        """The estimated number of documents that have each word of the vocabulary."""
        return self.lexicon.read(words).frequencies

    def occurrences(self, words: Ids) -> FloatArray:
        """The estimated number of occurrences of each word of the vocabulary in the collection."""
        return self.lexicon.read(words).occurrences


def fresh_versions(documents: Sequence[str], entropy: mechanisms.Entropy) -> Covered:
    """Documents with new random versions that are in no ledger, for simulations."""
    nonces = mechanisms.fresh_nonces(len(documents), entropy)
    return Covered(tuple(documents), tuple(nonce.tobytes().hex() for nonce in nonces))


def _nonces(covered: Covered) -> NDArray[np.uint8]:
    """The noise nonces of the versions, decoded from their names."""
    try:
        raw = bytes.fromhex("".join(covered.versions))
    except ValueError:
        raise PrivacyError("a document version is not named by its noise nonce") from None
    if len(raw) != mechanisms.NONCE * len(covered) or len(set(covered.versions)) != len(covered):
        raise PrivacyError("document versions need nonces of their own")
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, mechanisms.NONCE)
