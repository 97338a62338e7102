"""Words with permanent codes: an append-only file, looked up by keyed hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.arrays import IntArray
from isthmus.engines.growing import GrowingFile
from isthmus.engines.terms import STOP, Read, stemmed
from isthmus.text import Tokeniser, buffers

WORD = np.dtype([("hash", "<u8"), ("end", "<i8")])
LATE = 1 << 16
"""Minimum number of names in a dictionary beside the sorted ones before they are sorted too."""
MOST_KNOWN = 1 << 18
"""Maximum number of words that are cached with the terms that they are reduced to."""
MOST_REMEMBERED = 1 << 12
"""Maximum number of words of queries whose codes are cached."""
_TEXT = pa.large_string()
_NO_WORDS = pa.array([], _TEXT)

Names = NDArray[np.uint64]


def named(texts: Iterable[str], key: bytes) -> Names:
    """A 64-bit name for every text, a keyed hash. The key belongs to the index, so nobody can construct a
    collision."""
    keyed, digests = hashlib.blake2b(key=key, digest_size=8).copy, list[bytes]()
    for text in texts:  # copying a keyed hash takes half the time of making one
        name = keyed()
        name.update(text.encode("utf-8", "surrogatepass"))
        digests.append(name.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8")


def ranked(names: Names) -> IntArray:
    """The stable sorting order of names, several times faster than by a stable sort."""
    order = np.argsort(names)
    values = names[order]
    same = values[1:] == values[:-1]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        places = order[tied]
        order[tied] = places[np.lexsort((places, names[places]))]
    return order


class Places:
    """The last position of every name: most in a sorted array, the latest in a dictionary.

    One thread adds names; others may look them up meanwhile.
    """

    def __init__(self, names: Names, order: IntArray) -> None:
        """Start with names at positions 0, 1, …; `order` is their order as from `ranked`."""
        self._sorted = (names[order], order)
        self._late: dict[int, int] = {}

    def find(self, names: Names) -> IntArray:
        """The positions of names; -1 for a name that is not there."""
        late, (known, order) = self._late, self._sorted
        places = np.full(len(names), -1, dtype=np.int64)
        if len(known):
            at = np.maximum(np.searchsorted(known, names, side="right") - 1, 0)
            places = np.where(known[at] == names, order[at], -1)
        if late:
            for row, name in enumerate(names.tolist()):
                places[row] = late.get(name, places[row])
        return places

    def add(self, names: Names, first: int) -> None:
        """Add names at the positions from `first` on."""
        self._late.update(zip(names.tolist(), range(first, first + len(names)), strict=True))
        known, order = self._sorted
        if len(self._late) > max(LATE, len(known) // 4):
            names = np.concatenate((known, np.fromiter(self._late, np.uint64, len(self._late))))
            places = np.concatenate((order, np.fromiter(self._late.values(), np.int64, len(self._late))))
            rank = ranked(names)
            self._sorted = (names[rank], places[rank])
            self._late = {}


class Vocabulary:
    """The words of an index, by code; stop words begin with `STOP`."""

    def __init__(self, folder: Path, key: bytes, states: Mapping[str, Sequence[int]]) -> None:
        self._key = key
        self.records = GrowingFile(folder / "words", WORD, states.get("words", (0, 0)))
        self.spelling = GrowingFile(folder / "spelling", np.uint8, states.get("spelling", (0, 0)))
        hashes = self.records.records["hash"].copy()
        self._places = Places(hashes, ranked(hashes))
        self.stop: NDArray[np.bool_] = self.spelling.records[self._starts(0)[:-1]] == ord(STOP)
        # words read before, with their codes and terms, so that they are neither stemmed nor hashed again
        self._known: dict[Tokeniser, tuple[pa.LargeStringArray, NDArray[np.int32], pa.LargeStringArray]] = {}
        self._code_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.stop)

    def codes(self, words: Sequence[str]) -> IntArray:
        """The codes of words; -1 for a word that is not there."""
        known = [self._code_of.get(word, -1) for word in words]
        if -1 in known:
            codes = self._places.find(named(words, self._key))
            if len(self._code_of) > MOST_REMEMBERED:
                self._code_of = {}
            self._code_of.update(pair for pair in zip(words, codes.tolist(), strict=True) if pair[1] >= 0)
            return codes
        return np.array(known, dtype=np.int64)

    def read(self, tokeniser: Tokeniser, words: list[str]) -> Read:
        """Reduce words to terms by a tokeniser, with new codes for new terms; those are on disk after `sync`.

        Words that were read before are looked up in a cache.
        """
        if sum(len(before) for before, _, _ in self._known.values()) > MOST_KNOWN:
            self._known = {}
        wanted = pa.array(words, _TEXT)
        known = self._known.setdefault(tokeniser, (_NO_WORDS, np.empty(0, np.int32), _NO_WORDS))
        at = pc.index_in(wanted, known[0])
        if at.null_count:
            new = wanted.filter(at.is_null())
            _, terms, stops = stemmed(tokeniser, new.to_pylist())
            marked = map(add, [STOP if stop else "" for stop in stops.tolist()], terms.to_pylist())
            codes = np.append(known[1], self._added(pa.array(marked, _TEXT)))
            known = pa.concat_arrays([known[0], new]), codes, pa.concat_arrays([known[2], terms])
            self._known[tokeniser] = known
            at = pc.index_in(wanted, known[0])
        codes = known[1][at.to_numpy()]
        return codes, known[2].take(at), self.stop[codes]

    def _added(self, terms: pa.LargeStringArray) -> NDArray[np.int32]:
        """The codes of terms; terms that are not there yet are added."""
        encoded = terms.dictionary_encode()
        words = encoded.dictionary
        names = named(words.to_pylist(), self._key)
        codes = self._places.find(names)
        new = np.flatnonzero(codes < 0)
        first = len(self)
        codes[new] = np.arange(first, first + len(new))
        bounds, spelled = buffers(words.take(pa.array(new)))
        records = np.empty(len(new), dtype=WORD)
        records["hash"], records["end"] = names[new], self.spelling.count + bounds[1:]
        self.spelling.append(spelled)
        self.records.append(records)
        self.stop = np.concatenate((self.stop, spelled[bounds[:-1]] == ord(STOP)))
        self._places.add(names[new], first)
        every: NDArray[np.int32] = codes[encoded.indices.to_numpy()].astype(np.int32)
        return every

    def sync(self) -> None:
        """Force all words to disk."""
        self.spelling.sync()
        self.records.sync()

    def _starts(self, first: int, last: int | None = None) -> IntArray:
        ends = self.records.records["end"]
        return np.concatenate((ends[first - 1 : first] if first else [0], ends[first:last])).astype(np.int64)

    def words(self, first: int, last: int) -> pa.LargeStringArray:
        """The words of a range of codes; stop words carry their mark."""
        starts = self._starts(first, max(first, last))  # later words may be of a failed batch
        octets = np.ascontiguousarray(self.spelling.records[starts[0] : starts[-1]])
        buffers = pa.py_buffer(np.ascontiguousarray(starts - starts[0])), pa.py_buffer(octets)
        return pa.LargeStringArray.from_buffers(len(starts) - 1, *buffers)

    def close(self) -> None:
        """Close the files."""
        self.records.close()
        self.spelling.close()
