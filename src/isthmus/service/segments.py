"""A part of a node's index that never changes: postings, lengths and vectors of some documents, in one file.

Postings are by term: for every document that has it, how often in its title and in its body. Nothing in a
segment depends on other documents, so statistics are applied when a query is scored, and segments of any
size merge. Opened from disk its columns are mapped into memory, so a node restarts warm.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.encoders import Vectors
from isthmus.service.stores import Change
from isthmus.tables import Column, open_columns, write_columns
from isthmus.text import ENGLISH, Tokeniser

FORMAT = 2
LEAD_WORDS = 50
"""A document begins with its first paragraph, or so many words of it."""
LEAD_READ = 2_000
_PARAGRAPHS = re.compile(r"\n[ \t]*\n")
_INTS = ("changes", "starts", "rows", "title_counts", "body_counts", "lead_counts", "lengths", "distinct")


@dataclass(frozen=True, eq=False)
class Words:
    """Sorted strings as bytes one after the other: looked up by bisection, without making Python strings."""

    offsets: IntArray
    octets: NDArray[np.uint8]

    @classmethod
    def of(cls, words: pa.LargeStringArray) -> Words:
        """Of an Arrow column without nulls."""
        _, offsets, data = words.buffers()
        bounds = np.frombuffer(offsets, np.int64, len(words) + words.offset + 1)[words.offset :]
        octets = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        return cls(bounds - bounds[0], octets[bounds[0] : bounds[-1]])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> bytes:
        return self.octets[self.offsets[at] : self.offsets[at + 1]].tobytes()

    def find(self, word: str) -> int:
        """The place of a word in sorted words; -1 if it is not there."""
        wanted = word.encode()
        at = bisect_left(range(len(self)), wanted, key=self.__getitem__)
        return at if at < len(self) and self[at] == wanted else -1

    def find_descending(self, word: str) -> int:
        """As `find`, where the words are in descending order."""
        wanted, last = word.encode(), len(self) - 1
        at = last - bisect_left(range(len(self)), wanted, key=lambda place: self[last - place])
        return at if at >= 0 and self[at] == wanted else -1

    def arrow(self) -> pa.LargeStringArray:
        """The same as an Arrow column."""
        buffers = (
            pa.py_buffer(np.ascontiguousarray(self.offsets)),
            pa.py_buffer(np.ascontiguousarray(self.octets)),
        )
        return pa.LargeStringArray.from_buffers(len(self), *buffers)

    def tolist(self) -> list[str]:
        """As Python strings."""
        words: list[str] = self.arrow().to_pylist()
        return words


@dataclass(frozen=True, eq=False)
class Postings:
    """The documents of a segment that have one term, in ascending rows, and how often."""

    rows: NDArray[np.int32]
    title: NDArray[np.int32]
    body: NDArray[np.int32]
    lead: NDArray[np.int32]

    @cached_property
    def both(self) -> NDArray[np.int32]:
        """Title and body together."""
        return self.title + self.body

    def of(self, wanted: IntArray) -> NDArray[np.int32]:
        """How often some documents have the term, by their rows."""
        return self.at(self.both, wanted)

    def at(self, counts: NDArray[np.int32], wanted: IntArray) -> NDArray[np.int32]:
        """The counts of some documents; 0 where a document is not among these."""
        at = np.minimum(np.searchsorted(self.rows, wanted), len(self.rows) - 1)
        values: NDArray[np.int32] = np.where(self.rows[at] == wanted, counts[at], 0)
        return values


@dataclass(frozen=True, eq=False)
class Counted:
    """How often living documents have words: entry by entry the document, the word, and the count."""

    documents: int
    document: IntArray
    word: IntArray
    times: FloatArray
    words: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Segment:
    """Documents in descending order of id, which is how ties are broken.

    `changes[i]` is the store's number of the change that wrote document i; `lengths` and `distinct` have a
    column for the title and one for the body.
    """

    name: str
    documents: Words
    terms: Words
    changes: IntArray
    starts: IntArray
    rows: NDArray[np.int32]
    title_counts: NDArray[np.int32]
    body_counts: NDArray[np.int32]
    lead_counts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    distinct: NDArray[np.int32]
    vectors: Vectors

    def __len__(self) -> int:
        return len(self.changes)

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the documents, row by row."""
        return self.documents.tolist()

    @cached_property
    def total_lengths(self) -> IntArray:
        """Terms of every document, title and body together."""
        total: IntArray = self.lengths.sum(axis=1, dtype=np.int64)
        return total

    @cached_property
    def silent(self) -> IntArray:
        """The rows of documents that have no direction."""
        return np.flatnonzero(~self.vectors.any(axis=1))

    def postings(self, term: str) -> Postings | None:
        """The documents that have a term."""
        at = self.terms.find(term)
        if at < 0:
            return None
        entries = slice(int(self.starts[at]), int(self.starts[at + 1]))
        return Postings(
            self.rows[entries],
            self.title_counts[entries],
            self.body_counts[entries],
            self.lead_counts[entries],
        )

    def save(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        columns = {name: getattr(self, name) for name in (*_INTS, "vectors")}
        columns |= {
            f"{name}_{part}": getattr(getattr(self, name), part)
            for name in ("documents", "terms")
            for part in ("offsets", "octets")
        }
        header = {"format": FORMAT, "documents": len(self)}
        write_columns(folder / self.name, {name: Column.of(each) for name, each in columns.items()}, header)

    @classmethod
    def open(cls, folder: Path, name: str) -> Segment | None:
        """Map a file; None if it is not there whole, and must be built again."""
        stored = open_columns(folder / name)
        if stored is None or stored[0].get("format") != FORMAT:
            return None
        columns: dict[str, Any] = stored[1]
        for part in ("documents", "terms"):
            columns[part] = Words(columns.pop(f"{part}_offsets"), columns.pop(f"{part}_octets"))
        return cls(name=name, **columns)


def lead(body: str) -> str:
    """How a document begins."""
    read = body if len(body) <= LEAD_READ else body[:LEAD_READ].rpartition(" ")[0]
    first = next((part for part in _PARAGRAPHS.split(read) if part.strip()), "")
    return " ".join(first.split()[:LEAD_WORDS])


def build(name: str, texts: Sequence[Change], vectors: Vectors, *, tokeniser: Tokeniser = ENGLISH) -> Segment:
    """Index documents with distinct ids; `vectors[i]` belongs to `texts[i]`."""
    names = Ids.of([text.id for text in texts])
    order = np.argsort(-names.codes).tolist()
    count = len(order)
    ordered = [texts[at] for at in order]
    columns = [[text.title for text in ordered], [text.body for text in ordered]]
    fields = [*columns, list(map(lead, columns[1]))]
    tokens = tokeniser([text for field in fields for text in field])
    table = tokens.counts()
    text_of = np.repeat(np.arange(len(fields) * count), np.diff(table.indptr))
    keys = table.indices.astype(np.int64) * count + text_of % max(count, 1)
    inverse: IntArray
    entries, inverse = np.unique(keys, return_inverse=True)
    counted = [
        np.bincount(inverse[part], table.data[part], len(entries)).astype(np.int32)
        for part in (text_of // max(count, 1) == field for field in range(len(fields)))
    ]
    return Segment(
        name=name,
        documents=Words.of(names.vocabulary.take(pa.array(names.codes[order]))),
        terms=Words.of(tokens.terms.vocabulary),
        changes=np.array([text.change for text in ordered], dtype=np.int64),
        starts=_starts(entries // max(count, 1), len(tokens.terms.vocabulary)),
        rows=(entries % max(count, 1)).astype(np.int32),
        title_counts=counted[0],
        body_counts=counted[1],
        lead_counts=counted[2],
        lengths=tokens.lengths.reshape(3, count)[:2].T.astype(np.int32),
        distinct=np.diff(table.indptr).reshape(3, count)[:2].T.astype(np.int32),
        vectors=vectors[order],
    )


def merge(name: str, parts: Sequence[tuple[Segment, NDArray[np.bool_]]]) -> Segment:
    """One segment of those documents of several that their masks keep."""
    ids = Ids.of(
        [id for part, mask in parts for id, keep in zip(part.ids, mask.tolist(), strict=True) if keep]
    )
    order = np.argsort(-ids.codes)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    terms = Ids.of(pa.concat_arrays([part.terms.arrow() for part, _ in parts]))
    columns = list(_moved(parts, terms.codes, place))
    code, row, title, body, lead = (np.concatenate(column) for column in zip(*columns, strict=True))
    sequence = np.argsort(code * max(len(order), 1) + row, kind="stable")
    code, vocabulary = _without_gaps(code[sequence], terms.vocabulary)

    def merged(column: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, column)[mask] for part, mask in parts])[order]

    return Segment(
        name=name,
        documents=Words.of(ids.vocabulary.take(pa.array(ids.codes[order]))),
        terms=Words.of(vocabulary),
        starts=_starts(code, len(vocabulary)),
        rows=row[sequence].astype(np.int32),
        title_counts=title[sequence],
        body_counts=body[sequence],
        lead_counts=lead[sequence],
        **{column: merged(column) for column in ("changes", "lengths", "distinct", "vectors")},
    )


def _moved(
    parts: Sequence[tuple[Segment, NDArray[np.bool_]]], codes: IntArray, place: IntArray
) -> Iterator[tuple[NDArray[Any], ...]]:
    """The postings of every part in the numbers of the whole: term, row, counts by field."""
    first_term, first_row = 0, 0
    for part, mask in parts:
        row_of = np.full(len(part), -1, dtype=np.int64)
        row_of[mask] = place[first_row : first_row + int(mask.sum())]
        code = np.repeat(codes[first_term : first_term + len(part.terms)], np.diff(part.starts))
        row = row_of[part.rows]
        alive = row >= 0
        counts = (part.title_counts, part.body_counts, part.lead_counts)
        yield code[alive], row[alive], *(each[alive] for each in counts)
        first_term += len(part.terms)
        first_row += int(mask.sum())


def _without_gaps(codes: IntArray, vocabulary: pa.LargeStringArray) -> tuple[IntArray, pa.LargeStringArray]:
    """Terms that no document has any more go."""
    used, dense = np.unique(codes, return_inverse=True)
    return dense.astype(np.int64), vocabulary.take(pa.array(used))


def _starts(codes: IntArray, size: int) -> IntArray:
    return np.concatenate(([0], np.cumsum(np.bincount(codes, minlength=size)))).astype(np.int64)
