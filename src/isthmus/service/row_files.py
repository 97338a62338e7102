"""Tables to documents, one per row: .csv, .tsv and .parquet.

    id,title,body        columns with these or other usual names; or those that `columns` names
    name,phone,notes     no column for the body: all columns, one per line, "phone: 0123"
    date                 a day, a moment (ISO 8601), a year, or Unix seconds: the document's date
    allow                who may see it, "group:doctors; user:ada"
    (columns.subject)    the person it is about; this column has no usual name

Without a column for ids, a row's id is its number, from 1 for the first row after the names; inserting or
removing rows before it changes its id. Rows come in batches, so a table may be larger than a document.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from isthmus.errors import DataError

LARGEST = 2 << 30
"""Bytes of the largest table that is read."""
MOST_ROWS, TIMES = 5_000_000, 200
"""Most rows of a table, and its most characters as a multiple of those of one document."""
BATCH, BATCH_CHARACTERS = 500, 1 << 22
"""Rows in one batch, and about how many characters."""
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"), (codecs.BOM_UTF8, "utf-8-sig"))
_USUAL = {
    "id": ("id", "_id", "docid", "doc_id", "document_id", "document", "key", "uuid", "number", "nr"),
    "title": ("title", "name", "subject", "headline", "heading"),
    "body": ("body", "text", "content", "contents", "abstract", "description", "message"),
    "date": ("date", "published", "published_at", "created", "created_at", "sent", "timestamp", "year"),
    "allow": ("allow",),
    "subject": (),
}
"""Usual names of columns, the likeliest first."""


@dataclass(frozen=True)
class Columns:
    """Names of a table's columns with id, title, body, date, and who may see a document; for empty ones, the
    usual names are tried. `subject` names the column of the person it is about, which has no usual name."""

    id: str = ""
    title: str = ""
    body: tuple[str, ...] = ()
    date: str = ""
    allow: str = ""
    subject: str = ""


class Row(NamedTuple):
    """A row as a document; without a column for ids, its id is its number."""

    id: str
    title: str
    body: str
    date: int | None = None
    """Unix time of the document."""
    allow: str = ""
    subject: str = ""


def read_rows(path: Path, suffix: str, columns: Columns, characters: int) -> Iterator[list[Row]]:
    """Yield the rows of a table in batches. Raises DataError if a row has more than `characters`, or the
    table more than `MOST_ROWS` rows or `TIMES` as many characters."""
    rows = _parquet(path, columns) if suffix == ".parquet" else _csv(path, suffix, columns, characters)
    total, batch, size = characters * TIMES, list[Row](), 0
    for number, row in enumerate(rows, 1):
        length = len(row.title) + len(row.body)
        total -= length
        if length > characters:
            problem = f"row {number} takes more than {characters:,} characters of text"
            raise DataError(problem, file=path, cure="shorten it, or raise reading.characters")
        if total < 0 or number > MOST_ROWS:
            problem = f"has more than {MOST_ROWS:,} rows or {characters * TIMES:,} characters"
            raise DataError(problem, file=path, cure="split it, or raise reading.characters")
        batch.append(row)
        size += length
        if len(batch) >= BATCH or size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def moment_of(text: str) -> int | None:
    """Return the Unix time of a date as tables have it, in UTC if it names no zone; None if it is no date."""
    text = text.strip()
    if text.isascii() and text.isdigit() and len(text) in (9, 10, 13):  # Unix seconds or milliseconds
        return int(text[:10])
    if re.fullmatch("[0-9]{4}(-[0-9]{2})?", text):
        text += "-01-01" if len(text) == 4 else "-01"
    try:
        moment = datetime.fromisoformat(text)
        return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        return None


def _picked(names: Sequence[str], columns: Columns, path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """Choose the columns for a document's parts ("" for none), and those for its body."""
    lower = {name.strip().lower(): name for name in reversed(names)}

    def column(part: str, wanted: str) -> str:
        if wanted:
            if wanted not in names:
                raise DataError(f"has no column {wanted!r}", file=path, cure="check sources.columns")
            return wanted
        return next((lower[name] for name in _USUAL[part] if name in lower), "")

    bodies = tuple(column("body", name) for name in columns.body) or (column("body", ""),)
    others = {part: column(part, getattr(columns, part)) for part in _USUAL if part != "body"}
    return others, tuple(filter(None, bodies))


def _documents(
    rows: Iterable[Mapping[str, str]], names: Sequence[str], columns: Columns, path: Path
) -> Iterator[Row]:
    parts, bodies = _picked(names, columns, path)
    id, title, date = (parts[part] for part in ("id", "title", "date"))
    rest = [name for name in names if name not in (id, title, parts["allow"])]
    for number, row in enumerate(rows, 1):
        if bodies:
            body = "\n".join(filter(None, (row.get(name, "") for name in bodies)))
        else:
            body = "\n".join(f"{name}: {row[name]}" for name in rest if row.get(name, "").strip())
        dated = moment_of(row.get(date, "")) if date else None
        named = row.get(title, "") if title else ""
        access = (row.get(parts[part], "") for part in ("allow", "subject"))
        yield Row(row.get(id, "").strip() or str(number), named, body, dated, *access)


def _csv(path: Path, suffix: str, columns: Columns, characters: int) -> Iterator[Row]:
    csv.field_size_limit(characters)
    with path.open(encoding=_encoding(path), errors="replace", newline="") as stream:

        def lines() -> Iterator[str]:
            while line := stream.readline(characters + 1):
                if len(line) > characters:
                    problem = f"has a line of more than {characters:,} characters"
                    raise DataError(problem, file=path, cure="split it, or raise reading.characters")
                if "\0" in line:
                    raise DataError("is not text", file=path, cure="give it the suffix of what it is")
                yield line

        first = next(lines(), "")
        separator = "\t" if suffix == ".tsv" else max(",;\t|", key=first.count)
        try:
            names = next(csv.reader([first], delimiter=separator), [])
            if not names:
                raise DataError("has no line of names", file=path, cure="begin it with its columns' names")
            rows = _cells(lines(), separator, len(names), path)
            yield from _documents((dict(zip(names, row, strict=False)) for row in rows), names, columns, path)
        except csv.Error as error:
            raise DataError(
                "is not a table that can be read", file=path, text=str(error), cure="repair it"
            ) from error


def _cells(lines: Iterator[str], separator: str, width: int, path: Path) -> Iterator[list[str]]:
    """Yield the cells of every row. Cells beyond the last column are joined to it: they come from a text with
    an unquoted separator. An unclosed quotation mark would swallow all rows after it and raises DataError."""
    record: list[str] = []

    def recorded() -> Iterator[str]:
        for line in lines:
            record.append(line)
            yield line

    number = 2
    for row in csv.reader(recorded(), delimiter=separator):
        ends_inside = bool(row) and row[-1].endswith(("\n", "\r"))
        if ends_inside or not record[-1].endswith(("\n", "\r")) or len(record) > 1:
            _check_closed(record, separator, number, path)
        number += len(record)
        record.clear()
        if row:
            yield [*row[: width - 1], separator.join(row[width - 1 :])] if len(row) > width else row


def _check_closed(record: Sequence[str], separator: str, number: int, path: Path) -> None:
    """Raise a DataError where a row ends inside a quotation."""
    try:
        list(csv.reader(record, delimiter=separator, strict=True))
    except csv.Error as error:
        if "unexpected end" in str(error):
            problem = f"the quotation mark of the row in line {number} is not closed"
            raise DataError(
                problem, file=path, cure="close it, or double it if it is part of the text"
            ) from None


def _encoding(path: Path) -> str:
    """Return the encoding of a file: by its byte-order mark, else UTF-8, else Windows-1252."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as stream:
        beginning = stream.read(4)
        for mark, name in _MARKS:
            if beginning.startswith(mark):
                return name
        try:
            decoder.decode(beginning)
            while block := stream.read(1 << 20):
                decoder.decode(block)
            decoder.decode(b"", True)
        except UnicodeDecodeError:
            return "cp1252"
    return "utf-8"


def _parquet(path: Path, columns: Columns) -> Iterator[Row]:
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())  # other pools reserve more than the memory limit
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    from pyarrow import parquet

    try:
        with path.open("rb") as stream, parquet.ParquetFile(stream, pre_buffer=False) as file:
            schema = file.schema_arrow
            lists = {columns.allow or "allow"}  # the only column whose values may be lists
            names = [field.name for field in schema if _is_plain(field.type) or field.name in lists]
            parts, bodies = _picked(names, columns, path)
            wanted = list(dict.fromkeys((*parts.values(), *bodies))) if bodies else names
            batches = file.iter_batches(
                batch_size=64, columns=[each for each in wanted if each], use_threads=False
            )
            rows = (
                {name: _text(value) for name, value in row.items()}
                for batch in batches
                for row in batch.to_pylist()
            )
            yield from _documents(rows, names, columns, path)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, MemoryError):
            raise
        raise DataError(
            "is not a Parquet file that can be read", file=path, text=type(error).__name__
        ) from error


def _is_plain(kind: Any) -> bool:
    """Whether a column's values can be part of a text: no lists, structures or binary data."""
    from pyarrow import types

    return not types.is_nested(kind) and not types.is_binary(kind) and not types.is_large_binary(kind)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    return "" if value is None else str(value)
