"""A silo's folder: its keys, exact sketches and ledger, none of which leave; and released files, which do.

    *.key, cards/   see `keys`
    FIELD.sketch    the exact sketches of one field, with the documents' versions and public lengths
    FIELD.words     the words of the silo's own documents, with which it reads the counts of others
    silo.ledger     what was released and what it cost; beside it silo.ledger.tally, how far it has come

A released file begins with a mark of the group key; then come messages, each after its length: for every
field a catalogue, then the noisy sketches in batches.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import Ids, frozen
from isthmus.errors import DataError, ProtocolError
from isthmus.private.cost import ChargeAll, Covered
from isthmus.private.counts import CountRelease, Desk, Owner, assemble
from isthmus.private.keys import GroupKey, Keyring
from isthmus.private.ledger import Budget, Ledger, fingerprint, lost
from isthmus.private.mechanisms import NONCE, OneShot
from isthmus.private.messages import LARGEST, Catalogue, Enquiry, Published, kind_of
from isthmus.private.sketch import CountMin, HashFamily, width_for
from isthmus.report import progress
from isthmus.tables import OWN, Bundle, Documents, replacing
from isthmus.text import ENGLISH, Tokeniser, Tokens

FIELDS = ("title", "body")
LEDGER = "silo.ledger"

_HEAD = struct.Struct("<8s8s")
_MAGIC = b"ISTHREL1"


class SketchBundle(Bundle):
    """A silo's exact sketches, in a file of the silo's own."""

    noun: ClassVar[str] = "sketch"
    most: ClassVar[int] = OWN


class WordsBundle(Bundle):
    """The words of a silo's own documents, in a file of the silo's own."""

    noun: ClassVar[str] = "list of words"
    most: ClassVar[int] = OWN


@dataclass(frozen=True)
class Built:
    """The size of the sketches of one field."""

    field: str
    documents: int
    tokens: int
    cells: int
    width: int


@dataclass(frozen=True)
class SiloFolder:
    """The folder of one silo."""

    path: Path

    @classmethod
    def at(cls, path: str | PathLike[str], *, create: bool = False) -> SiloFolder:
        """Open an existing folder; with `create`, make one if there is none."""
        return cls(Keyring.at(path, create=create).path)

    @property
    def keys(self) -> Keyring:
        """The silo's keys."""
        return Keyring(self.path)

    def ledger(self, budget: Budget | None = None) -> Ledger:
        """Open the silo's ledger; a new one needs a budget. Raises DataError for one that is lost or older
        than a sketch."""
        path = self.path / LEDGER
        sketches, words = (
            [file for name in FIELDS if (file := self.path / f"{name}.{kind}").exists()]
            for kind in ("sketch", "words")
        )
        if (sketches or words) and not path.exists():
            raise lost(path, (sketches or words)[0])
        ledger = Ledger(path, budget)
        try:
            for file in sketches:
                ledger.expect(_number_of(file), file)
        except BaseException:
            ledger.close()
            raise
        return ledger

    def build(
        self,
        documents: Documents,
        fields: Sequence[str] = FIELDS,
        *,
        width: int | None = None,
        budget: Budget | None = None,
        tokeniser: Tokeniser = ENGLISH,
        subjects: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Built]:
        """Sketch fields of documents and enter their versions into the ledger.

        Of documents with the same text only the first is sketched: each copy would be released once more,
        with other noise, and charged again. Of the documents of a subject (`subjects`, by document) only one
        is sketched too, since a second sketch would exceed the subject's budget.
        """
        key = self.keys.group_key(create=True)
        self.keys.noise_key(create=True)
        known = (self.path / LEDGER).exists()
        if known and budget is not None:
            self.ledger(budget).close()  # raises if the ledger has another budget
        with self.ledger(None if known else budget or Budget()) as ledger:
            pairs = zip(documents.titles, documents.bodies, strict=True)
            covered = ledger.versions(documents.ids, [fingerprint(*pair) for pair in pairs])
            ledger.assign(subjects)
            rows, number = np.flatnonzero(~ledger.copies(covered, per_subject=1)), ledger.number
        documents, covered = documents.take(rows), covered.take(rows.tolist())
        built = []
        for name in fields:
            tokens = tokeniser(documents.titles if name == "title" else documents.bodies)
            family = key.family(name, width=width or width_for(tokens.lengths))
            header = {
                "field": name,
                "width": family.width,
                "group": key.mark.hex(),
                "tokeniser": tokeniser.name,
                "ledger": number,
            }
            built.append(self._sketch(header, tokens, covered, family))
            self._keep_words(name, tokens)
        return built

    def _sketch(
        self, header: Mapping[str, Any], tokens: Tokens, covered: Covered, family: HashFamily
    ) -> Built:
        sketch, name = CountMin.of(tokens, family), header["field"]
        arrays: dict[str, NDArray[Any]] = {
            "offsets": sketch.offsets,
            "cells": sketch.cells,
            "values": sketch.values,
            "lengths": tokens.lengths,
            "versions": np.frombuffer(bytes.fromhex("".join(covered.versions)), dtype=np.uint8),
        }
        names = {"documents.json": json.dumps(list(covered.documents))}
        SketchBundle(header, arrays, names).write(self.path / f"{name}.sketch", private=True)
        return Built(name, len(tokens), len(tokens.terms), len(sketch.cells), family.width)

    def _keep_words(self, name: str, tokens: Tokens) -> None:
        table = tokens.counts()
        arrays = {
            "offsets": table.indptr.astype(np.int64),
            "terms": table.indices.astype(np.int32),
            "times": table.data.astype(np.int32),
        }
        words = {"words.json": json.dumps(tokens.terms.words, ensure_ascii=False)}
        WordsBundle({"field": name}, arrays, words).write(self.path / f"{name}.words", private=True)

    def fields(self) -> tuple[str, ...]:
        """The fields that have sketches. Raises DataError if there are none."""
        names = tuple(name for name in FIELDS if (self.path / f"{name}.sketch").exists())
        if not names:
            raise DataError("has no sketches", file=self.path, cure="isthmus sketch build makes them")
        return names

    def owner(self, name: str, epsilon: float, charge: ChargeAll) -> Owner:
        """The owner of a field's sketches, which releases them with each cell noised once."""
        file = self.path / f"{name}.sketch"
        bundle, key = SketchBundle.read(file), self.keys.group_key()
        if bundle.header.get("group") != key.mark.hex():
            raise DataError("was built under another group key", file=file, cure="build it again")
        family = key.family(name, width=int(bundle.header["width"]))
        arrays = bundle.arrays
        columns = (frozen(arrays[part]) for part in ("offsets", "cells", "values"))
        versions = tuple(version.tobytes().hex() for version in arrays["versions"].reshape(-1, NONCE))
        covered = Covered(tuple(json.loads(bundle.texts["documents.json"])), versions)
        noise = self.keys.noise_key().under(str(bundle.header.get("tokeniser")))
        release = CountRelease(name, family, OneShot(epsilon), noise, charge)
        return Owner(CountMin(family, *columns), frozen(arrays["lengths"]), covered, release)

    def desk(self, epsilon: float, ledger: Ledger, fields: Sequence[str] | None = None) -> BookedDesk:
        """A desk that answers messages about the silo's documents and books every release in the ledger."""
        owners = [self.owner(name, epsilon, ledger.charge_all) for name in fields or self.fields()]
        return BookedDesk(owners, ledger)

    def words(self, name: str) -> Tokens:
        """The words of each of the silo's own documents, without their order."""
        bundle = WordsBundle.read(self.path / f"{name}.words")
        offsets, terms, times = (bundle.arrays[part] for part in ("offsets", "terms", "times"))
        vocabulary = Ids.of(json.loads(bundle.texts["words.json"])).vocabulary
        ends = np.concatenate(([0], np.cumsum(times)))[offsets]
        codes = np.repeat(terms.astype(np.int64), times)
        return Tokens(Ids(frozen(codes), vocabulary), frozen(ends.astype(np.int64)))


class BookedDesk(Desk):
    """A desk that also records when names and lengths of documents leave, which no noise protects."""

    def __init__(self, owners: Sequence[Owner], ledger: Ledger) -> None:
        super().__init__(*owners)
        self.owners, self.ledger = tuple(owners), ledger

    def serve(self, message: bytes, peer: str) -> bytes:
        """Answer a message, after its release was charged and recorded."""
        if kind_of(message) == Enquiry.kind and Enquiry.decode(message).first < 0:
            self.book(peer)
        return super().serve(message, peer)

    def book(self, peer: str) -> None:
        """Record that a catalogue is about to leave."""
        note = "names and lengths of documents"
        self.ledger.record("catalogue", peer, items=len(self.owners[0]), note=note)


def _number_of(file: Path) -> int:
    """The ledger's number when a sketch was built; 0 for older sketches, which have none."""
    try:
        with zipfile.ZipFile(file) as packed:
            return int(json.loads(packed.read("header.json")).get("ledger", 0))
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError("is not a saved sketch", file=file, cure="isthmus sketch build makes it") from error


def write_released(desk: BookedDesk, key: GroupKey, peer: str, path: str | PathLike[str]) -> int:
    """Publish a desk's sketches to a peer in one file, charged before it is written. Returns the number of
    bytes."""
    size = _HEAD.size
    charges = [charge for owner in desk.owners for charge in owner.charges(owner.no_columns, peer)]
    desk.ledger.charge_all(charges)  # all fields or none
    desk.book(peer)
    with replacing(path) as stream:
        stream.write(_HEAD.pack(_MAGIC, key.mark))
        for owner in desk.owners:
            for message in _released(owner, peer):
                stream.write(struct.pack("<I", len(message)) + message)
                size += 4 + len(message)
    return size


def _released(owner: Owner, peer: str) -> Iterator[bytes]:
    yield owner.catalogue().encode()
    done = 0
    for _ in progress(range(len(owner)), label=f"noising {owner.release.field}"):
        if done >= len(owner):
            return
        batch = owner.publish(done, peer)
        yield batch.encode()
        done += batch.documents


def read_released(path: str | PathLike[str], key: GroupKey) -> dict[str, tuple[Catalogue, CountMin]]:
    """Read a file that a peer published. Returns the catalogue and the noisy sketches of every field."""
    catalogues: dict[str, Catalogue] = {}
    batches: dict[str, list[Published]] = {}
    released = {}
    try:
        for message in _messages(path, key):
            if kind_of(message) == Catalogue.kind:
                catalogue = Catalogue.decode(message)
                if catalogue.terms.field in catalogues:
                    raise ProtocolError(f"two catalogues of {catalogue.terms.field}")
                catalogues[catalogue.terms.field], batches[catalogue.terms.field] = catalogue, []
            else:
                batch = Published.decode(message)
                if batch.terms.field not in catalogues:
                    raise ProtocolError(f"counts of {batch.terms.field} without its catalogue before them")
                batches[batch.terms.field].append(batch)
        for name, catalogue in catalogues.items():
            family = key.family(name, rows=catalogue.terms.rows, width=catalogue.terms.width)
            released[name] = catalogue, assemble(iter(batches[name]), catalogue, family)
    except ProtocolError as error:
        raise DataError(f"is no released file: {error}", file=path, cure="ask for it again") from None
    if not released:
        raise DataError("holds nothing", file=path, cure="ask for it again")
    return released


def _messages(path: str | PathLike[str], key: GroupKey) -> Iterator[bytes]:
    try:
        with open(path, "rb") as stream:
            head = stream.read(_HEAD.size)
            if len(head) < _HEAD.size or head[:8] != _MAGIC:
                raise DataError("is no released file", file=path, cure="isthmus sketch publish makes one")
            if _HEAD.unpack(head)[1] != key.mark:
                cure = "the silos of a federation share one group.key: isthmus keys --help"
                raise DataError("was released under another group key", file=path, cure=cure)
            while head := stream.read(4):
                size = struct.unpack("<I", head)[0] if len(head) == 4 else LARGEST + 1
                message = stream.read(size) if size <= LARGEST else b""
                if len(message) != size:
                    raise DataError("is cut", file=path, cure="ask for it again")
                yield message
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path, cure="check the path") from error
