"""A column of identifiers, dictionary-encoded.

Codes order exactly as the identifiers do (by UTF-8 bytes, which is code-point order), so sorting,
joining and breaking ties are integer operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.errors import DataError

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class Ids:
    """A column of identifiers: `codes[i]` is the position of row i's identifier in the sorted
    `vocabulary`."""

    codes: IntArray
    vocabulary: pa.LargeStringArray

    @classmethod
    def of(cls, values: Iterable[str] | pa.Array | pa.ChunkedArray) -> Ids:
        """Encode a column of strings (a Python sequence, or an Arrow array without a copy)."""
        column = _as_arrow(values)
        encoded = column.dictionary_encode()
        order = pc.sort_indices(encoded.dictionary).to_numpy()
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        codes = rank[encoded.indices.to_numpy(zero_copy_only=False)]
        return cls(frozen(codes), encoded.dictionary.take(pa.array(order)))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Ids:
        """The rows at these positions, sharing the vocabulary."""
        return Ids(frozen(self.codes[rows]), self.vocabulary)

    def tolist(self) -> list[str]:
        """The identifiers as Python strings, row by row."""
        words = self.words
        return [words[code] for code in self.codes.tolist()]

    def to_arrow(self) -> pa.LargeStringArray:
        """The identifiers as an Arrow column, row by row."""
        return self.vocabulary.take(pa.array(self.codes))

    def word(self, row: int) -> str:
        """The identifier of one row."""
        return str(self.vocabulary[int(self.codes[row])].as_py())

    @cached_property
    def words(self) -> list[str]:
        """The vocabulary as Python strings, in order."""
        words: list[str] = self.vocabulary.to_pylist()
        return words

    def codes_in(self, other: Ids) -> IntArray:
        """For every row, the code of the same identifier in `other`; -1 where it is absent."""
        return self.translation(other)[self.codes]

    def translation(self, other: Ids) -> IntArray:
        """For every word of this vocabulary, its position in the other one; -1 where it is absent."""
        if self.vocabulary is other.vocabulary:
            return np.arange(len(self.vocabulary))
        codes = pc.index_in(self.vocabulary, value_set=other.vocabulary)
        return np.asarray(codes.fill_null(-1).to_numpy(zero_copy_only=False), dtype=np.int64)

    @staticmethod
    def concat(columns: Sequence[Ids]) -> Ids:
        """Join columns one after the other, under a common vocabulary."""
        if not columns:
            return Ids.of([])
        merged = Ids.of(pa.concat_arrays([column.vocabulary for column in columns]))
        starts = np.cumsum([0, *(len(column.vocabulary) for column in columns)])
        codes = [
            merged.codes[start:][column.codes] for start, column in zip(starts[:-1], columns, strict=True)
        ]
        return Ids(frozen(np.concatenate(codes)), merged.vocabulary)


def _as_arrow(values: Iterable[str] | pa.Array | pa.ChunkedArray) -> pa.LargeStringArray:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    try:
        if not isinstance(values, pa.Array):
            column = pa.array(values if isinstance(values, list) else list(values), type=pa.large_string())
        else:
            column = values if values.type == pa.large_string() else values.cast(pa.large_string())
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, UnicodeEncodeError) as error:
        raise DataError("an id is not a text", cure="ids are strings") from error
    if column.null_count:
        raise DataError("an id is missing", cure="ids are strings")
    return column


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view of the same data, so that tables can share it."""
    view = array.view()
    view.flags.writeable = False
    return view
