"""Between columns and lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.errors import DataError
from isthmus.tables.ids import Ids

_TEXT = pa.large_string()
_BOM = "\ufeff".encode()


def read_columns(data: bytes, delimiter: str, types: Mapping[str, pa.DataType | None]) -> pa.Table | None:
    """Lines as a table of columns of these types; None where Arrow's CSV reader cannot read them so.

    Columns of type None are counted but not read. Empty lines are no rows, and nothing is quoted.
    """
    from pyarrow import csv

    wanted = {name: kind for name, kind in types.items() if kind is not None}
    if data.startswith(_BOM):
        return None  # Arrow would drop it, wherever in a file the data come from
    try:
        return csv.read_csv(
            pa.BufferReader(data),
            # One thread: Arrow's task for every column of every piece costs more than it wins here.
            read_options=csv.ReadOptions(
                column_names=list(types), block_size=len(data) + 1, use_threads=False
            ),
            parse_options=csv.ParseOptions(delimiter=delimiter, quote_char=False),
            convert_options=csv.ConvertOptions(
                column_types=wanted, include_columns=list(wanted), null_values=[], strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid:
        return None


def checked(names: Ids | Sequence[str], *, forbidden: str = "") -> pa.LargeStringArray:
    """The names row by row, if each survives being a column of a text file; else a DataError."""
    column = (
        names.vocabulary.take(pa.array(names.codes)) if isinstance(names, Ids) else pa.array(names, _TEXT)
    )
    bad = pc.match_substring_regex(column, rf"[\s\x0b\x00{forbidden}]|^$")
    if pc.any(bad).as_py():
        name = column.filter(bad)[0].as_py()
        told = f" or {forbidden}" if forbidden else ""
        raise DataError(
            f"the id {name!r} cannot be written", cure=f"ids in such files have no white space{told}"
        )
    return column


def prefixed(prefix: str, column: pa.LargeStringArray) -> pa.LargeStringArray:
    """Every text after the prefix; null stays null."""
    return pc.binary_join_element_wise(pa.scalar(prefix, _TEXT), column, pa.scalar("", _TEXT))


def joined_lines(*columns: Any) -> pa.Buffer:
    """Lines of columns (texts, numbers, or one word for all rows) with spaces between; nulls are left out."""
    texts = [
        pa.scalar(column, _TEXT) if isinstance(column, str) else pa.array(column).cast(_TEXT)
        for column in columns
    ]
    lines = pc.binary_join_element_wise(*texts, pa.scalar(" ", _TEXT), null_handling="skip")
    ended = pc.binary_join_element_wise(lines, pa.scalar("", _TEXT), pa.scalar("\n", _TEXT))
    return ended.buffers()[2]
