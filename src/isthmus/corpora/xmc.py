"""The sparse format of the extreme classification repository: rows of features under numbered labels.

    N D L                    the header: how many rows, features and labels there are
    3,17 0:1.5 8:0.25 …      a row: its labels, separated by commas (none: the line begins with a space),
                             then feature:value pairs; both count from 0

Files are read block by block, compressed ones too, and memory holds no more than a block and the result;
with `stream_xmc`, no more than one batch. Label names come from a second file with a line per label.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError
from isthmus.tables import Block, read_blocks, replacing

MOST = 10**9
"""The largest number of rows, features or labels in a header."""
BATCH = 10_000
"""The number of rows of a batch."""
LARGEST = float(np.finfo(np.float32).max)
Line = tuple[Block, int, bytes]
"""The block of a line, its number and its text."""

_HEADER = re.compile(rb"\s*(\d{1,12})\s+(\d{1,12})\s+(\d{1,12})\s*")
_DIGITS = r"\d{1,40}+"  # bounded: all numbers of a block are stored as wide as its longest
_VALUE = rf"[+-]?(?:{_DIGITS}\.?\d{{0,40}}+|\.{_DIGITS})(?:[eE][+-]?\d{{1,4}}+)?"
_ROW = re.compile(rf"({_DIGITS}(?:,{_DIGITS})*+)?((?: ++{_DIGITS}:{_VALUE})*+) *+\r?".encode())
_CURE = "a row is: label,label feature:value feature:value"


@dataclass(frozen=True, eq=False)
class SparseRows:
    """Rows × features, and rows × labels for the right labels of each row; both SciPy CSR arrays."""

    features: Any
    labels: Any
    names: tuple[str, ...] = ()
    """The names of the labels; empty if they are named by number."""

    def __len__(self) -> int:
        return int(self.features.shape[0])


@dataclass(frozen=True)
class Header:
    """The numbers of rows, features and labels that a file declares."""

    rows: int
    features: int
    labels: int


def read_xmc(
    path: str | os.PathLike[str], *, label_names: str | os.PathLike[str] | None = None
) -> SparseRows:
    """Read all rows of a file; `label_names` is a file with a line per label."""
    from scipy.sparse import vstack

    header = read_header(path)
    names = read_label_names(label_names, header.labels) if label_names is not None else ()
    batches = list(stream_xmc(path))
    return SparseRows(
        vstack([batch.features for batch in batches], format="csr"),
        vstack([batch.labels for batch in batches], format="csr"),
        names,
    )


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the first line of a file."""
    return _header(next(read_blocks(path, size=1 << 16)))


def stream_xmc(path: str | os.PathLike[str], *, batch: int = BATCH) -> Iterator[SparseRows]:
    """Yield the rows of a file in order, `batch` at a time. Raises DataError if the header's count
    is wrong."""
    blocks = read_blocks(path)
    first = next(blocks)
    header = _header(first)
    lines = ((block, number, line) for block in chain((first,), blocks) for number, line in _lines(block))
    next(lines)  # skip the header
    pending: list[Line] = []
    total = 0
    for line in lines:
        total += 1
        if total > header.rows:
            block, number, text = line
            if not text.strip():
                continue
            raise block.error(f"more than the header's {header.rows:,} rows", number, text, "mend the header")
        pending.append(line)
        if len(pending) == batch:
            yield _parsed(pending, header)
            pending = []
    if total < header.rows:
        problem = f"{total:,} rows, but the header says {header.rows:,}"
        raise DataError(problem, file=os.fspath(path), cure="get the file again, or mend its header")
    if pending:
        yield _parsed(pending, header)


def write_xmc(path: str | os.PathLike[str], batches: Iterable[SparseRows], *, rows: int) -> None:
    """Write batches to one file, whole or not at all. Raises DataError if they have not `rows` rows."""
    count = 0
    with replacing(path) as stream:
        for at, batch in enumerate(batches):
            if at == 0:
                width, labels = batch.features.shape[1], batch.labels.shape[1]
                stream.write(f"{rows} {width} {labels}\n".encode())
            count += len(batch)
            stream.write("".join(_written(batch)).encode())
        if count != rows:
            raise DataError(f"{count:,} rows were to be written as {rows:,}")


def read_label_names(path: str | os.PathLike[str], labels: int) -> tuple[str, ...]:
    """Read one name per line, in the labels' order. Raises DataError if there are not as many as labels."""
    lines = b"".join(block.data for block in read_blocks(path)).split(b"\n")
    if not lines[-1]:
        lines.pop()
    names = tuple(line.decode().strip() for line in lines)
    if len(names) != labels:
        problem = f"{len(names):,} names, but there are {labels:,} labels"
        raise DataError(problem, file=os.fspath(path), cure="one line per label, in their order")
    return names


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """Return every line with its number, also empty ones: a row without labels and features is an
    empty line."""
    lines = block.data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return enumerate(lines, block.first_line)


def _header(block: Block) -> Header:
    line = block.data.partition(b"\n")[0]
    matched = _HEADER.fullmatch(line)
    if matched is None:
        raise block.error("not a header", 1, line[:80], "the first line is: rows features labels")
    rows, features, labels = (int(number) for number in matched.groups())
    if not (0 < rows <= MOST and 0 < features <= MOST and 0 < labels <= MOST):
        raise block.error(f"rows, features and labels go from 1 to {MOST:,}", 1, line, "mend the header")
    return Header(rows, features, labels)


def _parsed(lines: list[Line], header: Header) -> SparseRows:
    from scipy.sparse import csr_array

    matches = [_ROW.fullmatch(text) for _, _, text in lines]
    for matched, (block, number, text) in zip(matches, lines, strict=True):
        if matched is None:
            raise block.error("not a row", number, text[:80], _CURE)
    parts = [matched.groups() for matched in matches if matched is not None]
    label_counts = np.array([0 if own is None else own.count(b",") + 1 for own, _ in parts], np.int64)
    counts = np.array([pairs.count(b":") for _, pairs in parts], np.int64)
    labels = _numbers(b",".join(own for own, _ in parts if own is not None).replace(b",", b" "))
    pairs = _numbers(b"".join(pairs for _, pairs in parts).replace(b":", b" ")).reshape(-1, 2)
    _check_range(labels, label_counts, header.labels, "label", lines)
    _check_range(pairs[:, 0], counts, header.features, "feature", lines)
    if len(large := np.flatnonzero(np.abs(pairs[:, 1]) > LARGEST)):
        raise _error(lines, counts, int(large[0]), f"a value beyond {LARGEST:.3g}", "values fit 32 bits")
    values = pairs[:, 1].astype(np.float32)
    shape = (len(lines), header.features)
    features = csr_array((values, pairs[:, 0].astype(np.int32), _ends(counts)), shape=shape)
    features.sum_duplicates()
    right = np.ones(len(labels), dtype=np.bool_)
    own = csr_array((right, labels.astype(np.int32), _ends(label_counts)), shape=(len(lines), header.labels))
    own.sum_duplicates()
    return SparseRows(features, own)


def _numbers(text: bytes) -> FloatArray:
    """Parse numbers separated by spaces, already checked to be numbers."""
    return np.array(text.split(), dtype=np.bytes_).astype(np.float64)


def _ends(counts: IntArray) -> IntArray:
    return np.concatenate(([0], np.cumsum(counts)))


def _check_range(numbers: FloatArray, counts: IntArray, size: int, what: str, lines: list[Line]) -> None:
    """Raise DataError unless every number is below the header's."""
    beyond = np.flatnonzero(numbers >= size)
    if len(beyond):
        problem = f"{what} {numbers[beyond[0]]:.0f}, but the header says {size:,}, counted from 0"
        raise _error(lines, counts, int(beyond[0]), problem, "mend the row or the header")


def _error(lines: list[Line], counts: IntArray, item: int, problem: str, cure: str) -> DataError:
    """Return a DataError about the line of an item."""
    block, number, text = lines[int(np.searchsorted(counts.cumsum(), item, "right"))]
    return block.error(problem, number, text[:80], cure)


def _written(batch: SparseRows) -> Iterator[str]:
    """Yield a line per row; values have the fewest digits that read as the same number."""
    features, labels = batch.features, batch.labels
    values = features.data.astype(np.float32).astype(str).tolist()
    columns, label_columns = features.indices.tolist(), labels.indices.tolist()
    for row in range(len(batch)):
        begin, end = int(features.indptr[row]), int(features.indptr[row + 1])
        own = label_columns[int(labels.indptr[row]) : int(labels.indptr[row + 1])]
        pairs = (f" {columns[at]}:{values[at]}" for at in range(begin, end))
        yield ",".join(map(str, own)) + "".join(pairs) + "\n"
