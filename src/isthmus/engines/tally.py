"""Counts of all documents of an external engine: their terms, counted once, and none of their texts.

Documents are read in batches, analysed, counted and forgotten. Kept are the vocabulary with its counts and,
for every document, its id, a digest of its text and a number, the handle, which is new when the text has
changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.engines.engine import BY_FIELD, FIELDS, Change, WordCounts
from isthmus.engines.remote import RemoteDocument
from isthmus.engines.rows import add_counts
from isthmus.engines.terms import STOP, TermBatch
from isthmus.tables import OWN, Bundle

Digests = NDArray[np.uint64]


class SavedTally(Bundle):
    """A tally on disk."""

    noun = "tally of documents elsewhere"


class Interrupted(Exception):
    """Counting was stopped before its end."""


@dataclass(frozen=True, eq=False)
class DocumentTally:
    """Documents in the order of their handles, and totals for every word in the tables of `BY_FIELD`."""

    version: str = ""
    """The engine's version, as it was before the documents were read."""
    last: int = 0
    """The number of the last change."""
    ids: tuple[str, ...] = ()
    handles: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    digests: Digests = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    words: tuple[str, ...] = ()
    totals: IntArray = field(default_factory=lambda: np.zeros((len(BY_FIELD), 0), dtype=np.int64))
    lengths: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def row_of(self) -> Mapping[str, int]:
        """The row of every document's id."""
        return {id: row for row, id in enumerate(self.ids)}

    @cached_property
    def code_of(self) -> Mapping[str, int]:
        """The code of every word."""
        return {word: code for code, word in enumerate(self.words)}

    def without(self, is_gone: Callable[[str], bool]) -> DocumentTally:
        """A tally without the documents that `is_gone` names, each removal being a change; their words stay
        in the totals. Returns the tally itself if there is none."""
        rows = [row for row, id in enumerate(self.ids) if not is_gone(id)]
        if len(rows) == len(self):
            return self
        ids, last = tuple(self.ids[row] for row in rows), self.last + len(self) - len(rows)
        return replace(self, last=last, ids=ids, handles=self.handles[rows], digests=self.digests[rows])

    def tables(self, words: Sequence[str]) -> dict[str, FloatArray]:
        """The totals of words, by the names of `BY_FIELD`; 0 for a word that no document has."""
        codes = np.array([self.code_of.get(word, -1) for word in words], dtype=np.int64)
        known = np.zeros((len(BY_FIELD), len(codes)))
        known[:, codes >= 0] = self.totals[:, codes[codes >= 0]]
        return dict(zip(BY_FIELD, known, strict=True))

    def statistics(self, names: Sequence[str]) -> tuple[Ids, dict[str, IntArray]]:
        """The sorted vocabulary, without stop words, and the named tables."""
        tables = self.totals[[BY_FIELD.index(name) for name in names]]
        some = [
            at for at in np.flatnonzero(tables.any(axis=0)).tolist() if not self.words[at].startswith(STOP)
        ]
        order = np.array(sorted(some, key=self.words.__getitem__), dtype=np.int64)
        terms = Ids.of([self.words[at] for at in order.tolist()])
        return terms, {name: table[order] for name, table in zip(names, tables, strict=True)}

    def save(self, path: Path) -> None:
        """Write the tally to a file that only its owner may read."""
        header = {"state": self.version, "last": self.last, "lengths": list(self.lengths)}
        columns = {"handles": self.handles, "digests": self.digests, "totals": self.totals}
        sizes = {name: np.array([len(each) for each in texts]) for name, texts in self._texts().items()}
        texts = {name: "".join(each) for name, each in self._texts().items()}
        arrays = {**columns, **{f"{name}_sizes": size.astype(np.int64) for name, size in sizes.items()}}
        SavedTally(header, arrays, texts).write(path, private=True)

    def _texts(self) -> dict[str, tuple[str, ...]]:
        return {"ids": self.ids, "words": self.words}

    @classmethod
    def load(cls, path: Path) -> DocumentTally:
        """Read a tally from a file. Raises a DataError if it is missing or damaged."""
        return SavedTally.restore(path, _restored, most=OWN)


def _restored(saved: SavedTally) -> DocumentTally:
    header, arrays = saved.header, saved.arrays
    texts = {name: _cut(saved.texts[name], arrays[f"{name}_sizes"]) for name in ("ids", "words")}
    lengths = (int(header["lengths"][0]), int(header["lengths"][1]))
    columns = (arrays["handles"], arrays["digests"], texts["words"], arrays["totals"])
    return DocumentTally(str(header["state"]), int(header["last"]), texts["ids"], *columns, lengths)


def _cut(text: str, sizes: IntArray) -> tuple[str, ...]:
    ends = np.cumsum(sizes).tolist()
    return tuple(text[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True))


def digest(document: RemoteDocument) -> int:
    """A 64-bit digest of title and body, which differs for another text."""
    text = f"{document.title}\0{document.body}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def batch_of(documents: Sequence[RemoteDocument], language: str) -> TermBatch:
    """The terms of documents."""
    return TermBatch.of([Change(each.id, 0, False, each.title, each.body, language) for each in documents])


class Counting:
    """Accumulates totals over documents, batch by batch."""

    def __init__(self, language: str) -> None:
        self.language = language
        self.code_of: dict[str, int] = {}
        self.totals = np.zeros((len(BY_FIELD), 1 << 12), dtype=np.int64)
        self.lengths = np.zeros(len(FIELDS), dtype=np.int64)

    def add(self, documents: Sequence[RemoteDocument]) -> None:
        """Count some more documents."""
        batch = batch_of(documents, self.language)
        words, place = batch.words()
        codes = np.array([self.code_of.setdefault(word, len(self.code_of)) for word in words], dtype=np.int64)
        while len(self.code_of) > self.totals.shape[1]:
            self.totals = np.concatenate((self.totals, np.zeros_like(self.totals)), axis=1)
        if len(words):
            _, code, counts = batch.entries(codes[place])
            add_counts(self.totals, code.astype(np.int32), counts)
        self.lengths += batch.lengths().sum(axis=0)

    @property
    def counted(self) -> IntArray:
        """The totals of the words counted so far."""
        return self.totals[:, : len(self.code_of)].copy()


def count_all(
    batches: Iterable[Sequence[RemoteDocument]],
    before: DocumentTally,
    *,
    version: str,
    language: str,
    first: int,
    stopped: Callable[[], bool] = lambda: False,
) -> DocumentTally:
    """Count all documents. Those with the same text as `before` keep their handles; others get new ones from
    `first` on.

    Raises Interrupted if `stopped` returns True.
    """
    counting, seen = Counting(language), dict[str, tuple[int, int]]()
    last = max(before.last, first - 1)
    for documents in batches:
        if stopped():
            raise Interrupted
        new = [each for each in documents if each.id not in seen]
        counting.add(new)
        for each in new:
            mark, row = digest(each), before.row_of.get(each.id)
            if row is not None and int(before.digests[row]) == mark:
                seen[each.id] = (int(before.handles[row]), mark)
            else:
                last += 1
                seen[each.id] = (last, mark)
    gone = len(before) - sum(id in seen for id in before.ids)
    order = sorted(seen, key=lambda id: seen[id][0])
    return DocumentTally(
        version,
        last + gone,
        tuple(order),
        np.array([seen[id][0] for id in order], dtype=np.int64),
        np.array([seen[id][1] for id in order], dtype=np.uint64),
        tuple(counting.code_of),
        counting.counted,
        (int(counting.lengths[0]), int(counting.lengths[1])),
    )


def word_counts(documents: Sequence[RemoteDocument], words: Sequence[str], language: str) -> WordCounts:
    """Count in their texts how often each document has each word."""
    batch = batch_of(documents, language)
    spelled, place = batch.words()
    document, code, counts = batch.entries(place)
    column = {word: at for at, word in enumerate(words)}
    column_of = np.array([column.get(word, -1) for word in spelled], dtype=np.int64)
    content = np.array([not word.startswith(STOP) for word in spelled], dtype=bool)
    tables = np.zeros((3, len(documents), len(words)), dtype=np.int32)
    distinct = np.zeros((len(documents), len(FIELDS)), dtype=np.int32)
    if len(spelled):
        at = column_of[code]
        chosen = at >= 0
        for table, name in zip(tables, (*FIELDS, "lead"), strict=True):
            table[document[chosen], at[chosen]] = counts[name][chosen]
        for at_field, name in enumerate(FIELDS):
            has = document[content[code] & (counts[name] > 0)]
            distinct[:, at_field] = np.bincount(has, minlength=len(documents))
    title, body, lead = tables
    return WordCounts(title, body, lead, batch.lengths().astype(np.int32), distinct)
