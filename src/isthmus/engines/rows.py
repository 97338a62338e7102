"""What the embedded engine stores of every document: its terms with their counts, in append-only rows.

    documents    a record for every change, in ascending order: its number, id, lengths, where its terms end
    terms        the codes of a document's distinct terms, ascending
    counts       how often it has each, in title, lead and body
    ids          the ids one after the other
    words        the vocabulary: a code is a position here
    spelling     the words one after the other
    totals       counts of every word over the living documents of the first rows, when they were saved

The last row of a document is the valid one; a removed document ends with a row that says so. The rows
themselves therefore tell which of them are living, and the manifest says how much of every file is valid,
with a checksum.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.engines.engine import BY_FIELD, FIELDS, Change, Counted, WordCounts
from isthmus.engines.growing import GrowingFile
from isthmus.engines.terms import COUNTS, TermBatch
from isthmus.engines.vocabulary import Places, Vocabulary, named, ranked
from isthmus.tables import Column, open_columns, write_columns

DOCUMENT = np.dtype(
    [
        ("change", "<i8"),
        ("terms", "<i8"),
        ("id", "<i8"),
        ("name", "<u8"),
        ("lengths", "<i4", (2,)),
        ("distinct", "<i4", (2,)),
        ("removed", "<i8"),
    ]
)
"""`terms` and `id` say where those of the document end; `name` is the keyed hash of its id."""
FILES = {"documents": DOCUMENT, "terms": np.dtype("<i4"), "counts": COUNTS, "ids": np.dtype("u1")}
SAVED_AFTER = 1 << 20
"""Terms of new documents after which totals are saved; or an eighth of all terms, if that is more."""
BLOCK = 2_000
"""Documents whose terms are counted in one step: few enough for the processor's caches."""

Mask = NDArray[np.bool_]
Counts = NDArray[np.void]
Texts = tuple[list[str], ...]


@dataclass(frozen=True, eq=False)
class RowsView:
    """The rows at one moment. `totals`, of shape (5, words), has the tables of `BY_FIELD`."""

    documents: Counts
    changes: IntArray
    terms: NDArray[np.int32]
    counts: Counts
    ids: NDArray[np.uint8]
    alive: Mask
    field_lengths: IntArray
    totals: IntArray
    vocabulary: Vocabulary

    @cached_property
    def living(self) -> int:
        """The number of living documents."""
        return int(self.alive.sum())

    def rows(self, changes: IntArray) -> IntArray:
        """The rows of changes; -1 for a change that is not here or whose document has changed since."""
        if not len(self.changes):
            return np.full(len(changes), -1)
        first, last = int(self.changes[0]), int(self.changes[-1])
        if last - first == len(self.changes) - 1:  # the changes are consecutive
            at = np.maximum(np.minimum(changes, last) - first, 0)
        else:
            at = np.minimum(np.searchsorted(self.changes, changes), len(self.changes) - 1)
        return np.where((self.changes[at] == changes) & self.alive[at], at, -1)

    def _starts(self, column: str, rows: IntArray) -> IntArray:
        if (rows < 0).any():
            raise ValueError("a document is not here, or has changed since")
        ends = self.documents[column]
        return np.where(rows > 0, ends[rows - 1], 0)

    def names(self, rows: IntArray) -> list[str]:
        """The ids of documents."""
        starts, ends = self._starts("id", rows).tolist(), self.documents["id"][rows].tolist()
        data = self.ids.data
        return [
            str(data[start:end], "utf-8", "surrogatepass") for start, end in zip(starts, ends, strict=True)
        ]

    def codes(self, words: Sequence[str]) -> IntArray:
        """The codes of words; -1 for a word that no row here has."""
        codes = self.vocabulary.codes(words)
        return np.where(codes < self.totals.shape[1], codes, -1)

    def word_counts(self, rows: IntArray, words: Sequence[str]) -> WordCounts:
        """Count how often each document has each word."""
        packed = np.zeros((len(words), len(rows)), dtype=np.int64)  # the COUNTS of a word are 8 bytes
        if packed.size and len(self.terms):
            place, has = self._bisected(rows, self.codes(words).astype(np.int32))
            packed = self.counts.view(np.int64).take(place, mode="clip") * has
        of_word = packed.view(COUNTS)
        title, lead, body = (of_word[name].astype(np.int32).T for name in COUNTS.names or ())
        documents = self.documents.take(rows)
        return WordCounts(title, body, lead, documents["lengths"], documents["distinct"])

    def _bisected(self, rows: IntArray, codes: NDArray[np.int32]) -> tuple[IntArray, Mask]:
        """The position of each code among each document's terms, and whether it is there: one bisection for
        all of them."""
        starts, shape = self._starts("terms", rows), (len(codes), len(rows))
        sizes = self.documents["terms"][rows] - starts
        # one-dimensional arrays take a fifth less time than two-dimensional ones
        place, left = np.tile(starts - 1, len(codes)), np.tile(sizes, len(codes))
        wanted = np.repeat(codes, len(rows))
        for _ in range(int(sizes.max() - 1).bit_length()):  # the code is among the `left` terms after `place`
            half = left >> 1
            place += half * (self.terms.take(place + half, mode="clip") < wanted)
            left -= half
        place += 1
        has = (self.terms.take(place, mode="clip") == wanted) & (left > 0)
        return place.reshape(shape), has.reshape(shape)

    def limited(self, rows: IntArray) -> RowsView:
        """A view whose only living documents are those of some rows; `totals` stay those of all."""
        alive = np.zeros_like(self.alive)
        alive[rows] = True
        lengths = self.documents["lengths"][alive].sum(axis=0, dtype=np.int64)
        return replace(self, alive=alive, field_lengths=lengths)

    def tables(self, words: Sequence[str], totals: IntArray) -> dict[str, FloatArray]:
        """The totals of words, by the names of `BY_FIELD`."""
        codes = self.codes(words)
        known = np.zeros((len(BY_FIELD), len(codes)))
        known[:, codes >= 0] = totals[:, codes[codes >= 0]]
        return dict(zip(BY_FIELD, known, strict=True))

    def _places_of(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """The cumulative number of terms after each document, and the position of every term in the file."""
        starts = self._starts("terms", rows)
        sizes = self.documents["terms"][rows] - starts
        ends = np.cumsum(sizes)
        place = np.repeat(starts - ends + sizes, sizes)
        place += np.arange(len(place))
        return ends, place

    def _entries(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """For every term of documents, the position of its document among them and that of the term in the
        file."""
        ends, place = self._places_of(rows)
        return np.repeat(np.arange(len(rows)), np.diff(ends, prepend=0)), place

    def counted(self, rows: IntArray) -> Counted:
        """All terms of documents but stop words."""
        document, place = self._entries(rows)
        code = self.terms[place]
        content = ~self.vocabulary.stop[code]
        counts = self.counts[place[content]]
        times = counts["title"].astype(np.float64) + counts["body"]
        return Counted(
            len(rows), document[content], code[content].astype(np.int64), times, counts["lead"] > 0
        )

    def summed(self, rows: IntArray) -> IntArray:
        """Totals over some documents."""
        _, place = self._entries(rows)
        totals = np.zeros_like(self.totals)
        add_counts(totals, self.terms[place], self.counts[place])
        return totals

    def statistics(self, names: Sequence[str], totals: IntArray) -> tuple[Ids, dict[str, IntArray]]:
        """The sorted words, without stop words and words of no document, and their totals in the named
        tables."""
        chosen = totals[[BY_FIELD.index(name) for name in names]]
        size = totals.shape[1]
        some = np.flatnonzero(chosen.any(axis=0) & ~self.vocabulary.stop[:size])
        words = Ids.of(self.vocabulary.words(0, size).take(some))
        order = np.argsort(words.codes)
        tables = {name: table[some][order] for name, table in zip(names, chosen, strict=True)}
        return words[order], tables


def add_counts(totals: IntArray, codes: NDArray[np.integer], counts: Counts, sign: int = 1) -> None:
    """Add documents' counts to totals, or subtract them (`sign` -1)."""
    np.add.at(totals[0], codes, sign)
    for at, field in enumerate(FIELDS):
        column = counts[field].astype(np.int64)
        has = np.flatnonzero(column)
        np.add.at(totals[1 + 2 * at], codes[has], sign)
        np.add.at(totals[2 + 2 * at], codes[has], sign * column[has])


class Rows:
    """The files of the rows and their current view. Only one thread writes."""

    def __init__(self, folder: Path, key: bytes, states: Mapping[str, Sequence[int]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._key = folder, key
        self._files = {
            name: GrowingFile(folder / name, dtype, states.get(name, (0, 0))) for name, dtype in FILES.items()
        }
        self.vocabulary = Vocabulary(folder, key, states)
        names = self._files["documents"].records["name"].copy()
        order = ranked(names)
        self._places = Places(names, order)
        self._saved = 0
        self.view = self._opened(names, order)

    @property
    def states(self) -> dict[str, tuple[int, int]]:
        """The state of every file, for the manifest."""
        files = self._files | {"words": self.vocabulary.records, "spelling": self.vocabulary.spelling}
        return {name: file.state for name, file in files.items()}

    def _opened(self, names: NDArray[np.uint64], order: IntArray) -> RowsView:
        documents = self._files["documents"].records
        in_order = names[order]
        again = in_order[1:] == in_order[:-1]
        following = np.full(len(names), len(names))  # for every row, the row that replaces it
        following[order[:-1][again]] = order[1:][again]
        there = documents["removed"] == 0
        alive = there & (following == len(names))
        bare = self._mapped(alive, documents["lengths"][alive].sum(axis=0, dtype=np.int64))
        return self._with_totals(bare, there, following)

    def _with_totals(self, view: RowsView, there: Mask, following: IntArray) -> RowsView:
        """A view with the saved totals, updated by the rows that were added later."""
        saved = open_columns(self.folder / "totals")
        totals = np.zeros((len(BY_FIELD), len(self.vocabulary)), dtype=np.int64)
        mark, count = 0, len(following)
        if saved is not None and saved[0].get("key") == self._key.hex() and saved[0]["rows"] <= count:
            before = saved[1]["totals"]
            if zlib.crc32(np.ascontiguousarray(before).data) == saved[0].get("checksum"):
                mark = saved[0]["rows"]
                totals[:, : before.shape[1]] = before
        self._saved = int(view.documents["terms"][mark - 1]) if mark else 0
        gone = np.flatnonzero(there[:mark] & (following[:mark] >= mark) & (following[:mark] < count))
        for rows, sign in ((mark + np.flatnonzero(view.alive[mark:]), 1), (gone, -1)):
            for some in np.array_split(rows, len(rows) // 100_000 + 1):
                _, place = view._entries(some)
                add_counts(totals, view.terms[place], view.counts[place], sign)
        return RowsView(**{**view.__dict__, "totals": totals})

    def _mapped(self, alive: Mask, lengths: IntArray, totals: IntArray | None = None) -> RowsView:
        files = {name: file.records for name, file in self._files.items()}
        return RowsView(
            changes=files["documents"]["change"].copy(),
            alive=alive,
            field_lengths=lengths,
            totals=np.zeros((len(BY_FIELD), 0), dtype=np.int64) if totals is None else totals,
            vocabulary=self.vocabulary,
            **files,
        )

    def append(
        self, changes: Sequence[Change], index: Callable[[Sequence[Change], Texts, Mask], None]
    ) -> IntArray:
        """Write rows of changes and force them to disk. Returns the earlier rows that they replace.

        `index` gets the changes block by block, with their terms as from `TermBatch.texts` and a mask of
        those that are living documents once all changes are written.
        """
        records = np.zeros(len(changes), dtype=DOCUMENT)
        records["change"] = [each.change for each in changes]
        records["removed"] = [each.removed for each in changes]
        records["name"] = named((each.id for each in changes), self._key)
        ids = [each.id.encode("utf-8", "surrogatepass") for each in changes]
        records["id"] = self._files["ids"].count + np.cumsum([len(id) for id in ids])
        last = {name: at for at, name in enumerate(records["name"].tolist())}
        fresh = np.zeros(len(records), dtype=bool)  # only the last row of a document counts
        fresh[list(last.values())] = True
        fresh &= records["removed"] == 0
        totals = self.view.totals.copy()
        batch = TermBatch.of(changes, self.vocabulary.read)
        for number, block in enumerate(batch.blocks(BLOCK)):
            some = slice(number * BLOCK, (number + 1) * BLOCK)
            totals = self._write(block, records[some], fresh[some], totals)
            index(changes[some], block.texts(), fresh[some])
        self._files["ids"].append(np.frombuffer(b"".join(ids), np.uint8))
        self._files["documents"].append(records)
        self.vocabulary.sync()
        for file in self._files.values():
            file.sync()
        self.view, gone = self._grown(records, fresh, totals)
        return gone

    def _write(self, batch: TermBatch, records: Counts, fresh: Mask, totals: IntArray) -> IntArray:
        """Write the terms of a block of documents. Returns the totals with these terms."""
        document, codes, counts = batch.entries(batch.codes[batch.places])
        content = ~self.vocabulary.stop[codes]
        sizes = np.bincount(document, minlength=len(records))
        records["terms"] = self._files["terms"].count + np.cumsum(sizes)
        records["lengths"] = batch.lengths()
        for at, field in enumerate(FIELDS):
            has = document[content & (counts[field] > 0)]
            records["distinct"][:, at] = np.bincount(has, minlength=len(records))
        self._files["terms"].append(codes)
        self._files["counts"].append(counts)
        new = slice(None) if fresh.all() else fresh[document]
        if (words := len(self.vocabulary)) > totals.shape[1]:
            totals = np.pad(totals, ((0, 0), (0, words + words // 8 - totals.shape[1])))
        add_counts(totals, codes[new], counts[new])
        return totals

    def _grown(self, records: Counts, fresh: Mask, totals: IntArray) -> tuple[RowsView, IntArray]:
        """The view after these rows, and the earlier rows that they replace."""
        old = self.view
        before = np.unique(self._places.find(records["name"]))
        gone = before[before >= 0]
        gone = gone[old.alive[gone]]
        self._places.add(records["name"], len(old.changes))
        alive = np.concatenate((old.alive, fresh))
        alive[gone] = False
        lengths = old.field_lengths + records["lengths"][fresh].sum(axis=0, dtype=np.int64)
        lengths = lengths - old.documents["lengths"][gone].sum(axis=0, dtype=np.int64)
        _, place = old._entries(gone)
        add_counts(totals, old.terms[place], old.counts[place], -1)
        return self._mapped(alive, lengths, totals[:, : len(self.vocabulary)]), gone

    def save_totals(self, *, always: bool = False) -> None:
        """Save the totals if many terms were added, or `always`; only once the manifest has their rows."""
        terms = self._files["terms"].count
        if always or terms - self._saved > max(SAVED_AFTER, self._saved // 8):
            totals = np.ascontiguousarray(self.view.totals)
            checksum = zlib.crc32(totals.data)
            header = {"rows": len(self.view.changes), "key": self._key.hex(), "checksum": checksum}
            write_columns(self.folder / "totals", {"totals": Column.of(totals)}, header)
            self._saved = terms

    def close(self) -> None:
        """Close the files; views stay readable."""
        for file in self._files.values():
            file.close()
        self.vocabulary.close()
