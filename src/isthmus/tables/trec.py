"""TREC run and qrels files.

    run     qid  Q0  docid  rank  score  [tag]
    qrels   qid  iter  docid  grade        or        qid  docid  grade

Columns are separated by any white space. The first line decides which of the variants the file has; every
other line must have as many columns. The second column (`Q0`, `0`, `iter`) and the rank column are ignored:
order is by score, as in trec_eval. A last line without a line feed is accepted if it is complete. A BEIR
header (`query-id corpus-id score`) is skipped in judgements.

Arrow's CSV reader splits the columns; a block of lines that it refuses is read again line by line, which
either succeeds (`+1` is a number too) or finds the line that is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids
from isthmus.errors import DataError
from isthmus.tables import files
from isthmus.tables.grouped import group
from isthmus.tables.rankings import UNJUDGED, Qrels, Run, duplicate_rows

_Table = TypeVar("_Table")
_WRITTEN_AT_ONCE = 1_000_000


@dataclass(frozen=True, slots=True)
class _Layout:
    """Positions of the columns (query, document, value) for every number of columns that a line may have."""

    example: str
    value: str
    columns: dict[int, tuple[int, int, int]]
    header: bytes | None = None


_RUN = _Layout("qid Q0 docid rank score tag", "score", {6: (0, 2, 4), 5: (0, 2, 4)})
_QRELS = _Layout("qid 0 docid grade", "grade", {4: (0, 2, 3), 3: (0, 1, 2)}, b"query-id corpus-id score")


def read_run(path: str | os.PathLike[str], *, name: str | None = None) -> Run:
    """Read a TREC run; its name is the tag of the first line unless another is given.

    Raises DataError for a score that is not a finite number, a document twice for one query (the message
    names both lines), a line with the wrong number of columns, and a file without rows.
    """
    return _read(path, _RUN, lambda *columns, tag: Run.of(*columns, name=tag if name is None else name))


def read_qrels(path: str | os.PathLike[str]) -> Qrels:
    """Read TREC judgements, with or without the iteration column.

    Negative grades are kept (TREC marks junk so) and are never relevant. Raises DataError for a fractional
    grade, a document judged twice for one query (the message names both lines), a line with the wrong number
    of columns, and a file without rows.
    """
    return _read(path, _QRELS, lambda *columns, tag: Qrels.of(*columns))


def write_run(run: Run, path: str | os.PathLike[str], *, probabilities: bool = False) -> None:
    """Write a run in TREC form, best first; with `probabilities`, these are the score column.

    Reading gives the same floats again, except that equal probabilities are written the smallest steps
    apart, so that the order stays. A query without documents is left out, because the format cannot
    represent it. Raises DataError for white space in an id.
    """
    values = run.scores
    if probabilities:
        values = _apart(run, run.required_probabilities)
    tag = "_".join(run.name.split()) or "isthmus"
    queries = files.checked(run.queries).take(pa.array(run.query_of_row))
    _write(path, queries, "Q0", files.checked(run.documents), run.ranks, values, tag)


def _apart(run: Run, probabilities: FloatArray) -> FloatArray:
    """Return the probabilities with equal neighbours the smallest steps apart: downwards, but
    upwards for 0."""
    rows = np.arange(run.rows)
    same = np.zeros(run.rows, dtype=bool)
    same[1:] = (probabilities[1:] == probabilities[:-1]) & (run.ranks[1:] > 1)
    begins = np.maximum.accumulate(np.where(same, 0, rows))
    ends = np.minimum.accumulate(np.where(np.append(same[1:], False), run.rows, rows)[::-1])[::-1]
    step = np.spacing(probabilities)
    return np.asarray(probabilities + step * np.where(probabilities > 0, begins - rows, ends - rows))


def write_qrels(qrels: Qrels, path: str | os.PathLike[str]) -> None:
    """Write judgements in TREC form, with four columns."""
    queries = files.checked(qrels.queries).take(pa.array(qrels.query_of_row))
    _write(path, queries, "0", files.checked(qrels.documents), qrels.grades)


def _read(path: str | os.PathLike[str], layout: _Layout, build: Callable[..., _Table]) -> _Table:
    """Read a file and return `build(queries, documents, values, tag=…)`; an error about a repeated document
    names both lines."""
    width, tag = 0, ""
    parts: list[pa.Table] = []
    for block in files.read_blocks(path):
        if not width:
            block, width, tag = _begin(block, layout)
        if width:
            parts.append(_cut_at_once(block, layout, width) or _cut_line_by_line(block, layout, width))
    if not parts:
        raise DataError("no rows", file=path, cure=f"a line is: {layout.example}")
    rows = pa.concat_tables(parts)
    queries, documents = Ids.of(rows["query"]), Ids.of(rows["document"])
    try:
        return build(queries, documents, rows["value"].to_numpy(), tag=tag)
    except DataError as error:
        twice = duplicate_rows(group(queries)[1], documents)
        if twice is None or not Path(path).is_file():  # a pipe cannot be read again for its lines
            raise
        (first, _), (second, text) = (
            files.line_of_row(path, row, is_row=lambda line: not _is_header(line, layout)) for row in twice
        )
        problem = f"{error.problem}, first in line {first}"
        raise DataError(problem, file=path, line=second, text=text, cure=error.cure) from None


def _is_header(line: bytes, layout: _Layout) -> bool:
    return layout.header is not None and b" ".join(line.split()) == layout.header


def _begin(block: files.Block, layout: _Layout) -> tuple[files.Block, int, str]:
    """Return the block without a header, and the number of columns and the tag of its first row (0 if there
    is none)."""
    for number, line in block.lines():
        fields = line.split()
        if _is_header(line, layout):
            rest = block.data.split(b"\n", number - block.first_line + 1)
            block = files.Block(block.file, number + 1, rest[-1])
            continue
        if len(fields) not in layout.columns:
            raise _wrong_width(block, number, line, layout)
        tag = fields[5].decode() if len(fields) == 6 else ""
        return block, len(fields), tag
    return block, 0, ""


def _cut_at_once(block: files.Block, layout: _Layout, width: int) -> pa.Table | None:
    """Parse the three columns with Arrow's CSV reader; None if anything about them is unusual."""
    query, document, value = layout.columns[width]
    kinds = {query: pa.large_string(), document: pa.large_string(), value: pa.float64()}
    table = files.read_columns(
        files.single_spaced(block.data), " ", {str(column): kinds.get(column) for column in range(width)}
    )
    if table is None:
        return None
    table = table.rename_columns(["query", "document", "value"])
    return table if _valid(table["value"].to_numpy(), layout).all() else None


def _valid(values: FloatArray, layout: _Layout) -> NDArray[np.bool_]:
    if layout is _RUN:
        return np.isfinite(values)
    return np.asarray((values == np.floor(values)) & (np.abs(values) < -UNJUDGED))


def _cut_line_by_line(block: files.Block, layout: _Layout, width: int) -> pa.Table:
    """Parse the three columns in plain Python: slow, but it reports which line is wrong."""
    at_query, at_document, at_value = layout.columns[width]
    queries, documents, values = [], [], []
    for number, line in block.lines():
        fields = line.split()
        if len(fields) != width:
            raise _wrong_width(block, number, line, layout, expected=width)
        queries.append(fields[at_query].decode())
        documents.append(fields[at_document].decode())
        values.append(_value(block, number, line, fields[at_value], layout))
    texts = pa.large_string()
    columns = {
        "query": pa.array(queries, texts),
        "document": pa.array(documents, texts),
        "value": pa.array(values, pa.float64()),
    }
    return pa.table(columns)


def _value(block: files.Block, number: int, line: bytes, field: bytes, layout: _Layout) -> float:
    value = float(field) if files.NUMBER.fullmatch(field) else np.nan
    if _valid(np.array(value), layout):
        return value
    kind = "a finite number" if layout is _RUN else "a whole number of 32 bits"
    problem = f"{layout.value} {field.decode()!r} is not {kind}"
    raise block.error(problem, number, line, f"a line is: {layout.example}")


def _wrong_width(
    block: files.Block, number: int, line: bytes, layout: _Layout, *, expected: int | None = None
) -> DataError:
    columns = len(line.split())
    if block.is_cut and block.data.endswith(line) and expected and columns < expected:
        cure = f"copy the file again; it has {expected} columns, and a line is: {layout.example}"
        return block.error("the file ends in the middle of a line", number, line, cure)
    wanted = " or ".join(map(str, layout.columns)) if expected is None else f"{expected}, as before"
    problem = f"{columns} column{'s' * (columns != 1)} where there should be {wanted}"
    return block.error(problem, number, line, f"a line is: {layout.example}")


def _write(path: str | os.PathLike[str], *columns: Any) -> None:
    with files.replacing(path) as stream:
        for start in range(0, len(columns[0]), _WRITTEN_AT_ONCE):
            rows = slice(start, start + _WRITTEN_AT_ONCE)
            parts = (column if isinstance(column, str) else column[rows] for column in columns)
            stream.write(files.joined_lines(*parts))
