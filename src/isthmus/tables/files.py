"""Text files as blocks of whole lines, and conversion between lines and columns.

Every reader of a line format starts here, so all of them agree on what a text file is:

- UTF-8, with or without a byte-order mark; other bytes, and NUL, are a DataError with line and offset;
- plain or gzip, recognised by the first two bytes, not by the name;
- lines end in a line feed; a carriage return before it is white space like any other;
- a file without a single byte, and one that cannot be opened, are a DataError.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any
from zlib import error as ZlibError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.arrays import Ids
from isthmus.errors import DataError
from isthmus.files import locked as locked
from isthmus.files import replacing as replacing

BLOCK = 1 << 24
LONGEST_LINE = 1 << 26
NUMBER = re.compile(rb"[+-]?(\d++\.?\d*+|\.\d++)([eE][+-]?\d++)?")
"""The numbers that all readers accept: no NaN, no infinity, no underscores."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_TO_SPACE = bytes.maketrans(b"\t\v\f\r", b"    ")
_SPACE, _FEED = 32, 10
_TEXT = pa.large_string()


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive whole lines; the last line of the last block may lack its line feed."""

    file: str
    first_line: int
    data: bytes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield every line that is not blank, with its number in the file, from 1."""
        for number, line in enumerate(self.data.split(b"\n"), self.first_line):
            if line and not line.isspace():
                yield number, line

    @property
    def is_cut(self) -> bool:
        """Whether the file ends here without a line feed."""
        return not self.data.endswith(b"\n")

    def error(self, problem: str, line: int, text: bytes | str, cure: str) -> DataError:
        """Return a DataError about one of the lines."""
        display = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return DataError(problem, file=self.file, line=line, text=display.strip(), cure=cure)


def read_blocks(path: str | os.PathLike[str], *, size: int = BLOCK) -> Iterator[Block]:
    """Yield the file in blocks of about `size` bytes, decompressed and checked to be text."""
    file = os.fspath(path)
    line, offset = 1, 0
    for data in _whole_lines(_chunks(file, size), file):
        mark = len(_BOM) if offset == 0 and data.startswith(_BOM) else 0
        block = Block(file, line, data[mark:] if mark else data)
        _check_text(block, offset + mark)
        line += data.count(b"\n")
        offset += len(data)
        yield block
    if offset == 0:
        raise DataError("the file is empty", file=file, cure="write it again, or name another file")


def read_all(path: str | os.PathLike[str]) -> Block:
    """The whole file as one block, for files known to be small."""
    blocks = list(read_blocks(path))
    return Block(blocks[0].file, 1, b"".join(block.data for block in blocks))


def line_of_row(
    path: str | os.PathLike[str], row: int, *, is_row: Callable[[bytes], bool] = lambda line: True
) -> tuple[int, str]:
    """Return the number and the text of the line of a row, by reading up to it."""
    lines = (line for block in read_blocks(path) for line in block.lines() if is_row(line[1]))
    number, text = next(islice(lines, row, None))
    return number, text.decode().strip()


def _chunks(file: str, size: int) -> Iterator[bytes]:
    try:
        with open(file, "rb") as raw:
            packed = raw.peek(2)[:2] == _GZIP
            stream: IO[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
            while chunk := stream.read(size):
                yield chunk
    except (EOFError, gzip.BadGzipFile, ZlibError) as error:
        raise DataError(
            f"the compressed data are cut or damaged: {error}", file=file, cure="copy the file again"
        ) from error
    except OSError as error:
        raise DataError.unreadable(file, error) from error


def _whole_lines(chunks: Iterator[bytes], file: str) -> Iterator[bytes]:
    begun: list[bytes] = []
    for chunk in chunks:
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join((*begun, chunk[:end])) if begun else chunk[:end]
            begun = []
        begun.append(chunk[end:])
        if sum(map(len, begun)) > LONGEST_LINE:
            raise DataError("a line of more than 64 MB", file=file, cure="this is not a text file of rows")
    if rest := b"".join(begun):
        yield rest


def _check_text(block: Block, offset: int) -> None:
    if block.data.isascii() and b"\0" not in block.data:
        return
    try:
        at = block.data.find(b"\0")
        block.data.decode("utf-8") if at < 0 else block.data[:at].decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
    if at >= 0:
        line = block.first_line + block.data.count(b"\n", 0, at)
        start = block.data.rfind(b"\n", 0, at) + 1
        raise block.error(
            f"byte 0x{block.data[at]:02x} at offset {offset + at} is not UTF-8 text",
            line,
            block.data[start : at + 10].split(b"\n")[0],
            "convert the file to UTF-8, for example with iconv",
        )


def single_spaced(data: bytes) -> bytes:
    """The lines with one space between columns, none around them, and a line feed after each."""
    data = data.replace(b"\r\n", b"\n").translate(_TO_SPACE)
    data = data if data.endswith(b"\n") else data + b"\n"
    symbols = np.frombuffer(data, dtype=np.uint8)
    blank = symbols <= _SPACE
    if not (blank[0] or (blank[1:] & blank[:-1]).any()):
        return data
    before_blank = np.append((symbols[1:] == _SPACE) | (symbols[1:] == _FEED), False)
    symbols = symbols[(symbols != _SPACE) | ~before_blank]
    after_feed = np.insert(symbols[:-1] == _FEED, 0, True)
    return bytes(symbols[(symbols != _SPACE) | ~after_feed])


def cache_folder() -> Path:
    """Return the folder for parsed files: ISTHMUS_CACHE, or `isthmus` in the user's cache folder."""
    named = os.environ.get("ISTHMUS_CACHE")
    if named:
        return Path(named)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "isthmus" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"


def read_columns(data: bytes, delimiter: str, types: Mapping[str, pa.DataType | None]) -> pa.Table | None:
    """Parse lines to a table of columns of these types; None if Arrow's CSV reader cannot read them so.

    Columns of type None are counted but not read. Empty lines are no rows, and nothing is quoted.
    """
    from pyarrow import csv

    wanted = {name: kind for name, kind in types.items() if kind is not None}
    if data.startswith(_BOM):
        return None  # Arrow would drop it, even inside a file
    try:
        return csv.read_csv(
            pa.BufferReader(data),
            # One thread: Arrow's tasks per column and block cost more than they save here.
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
    """Return the names row by row. Raises DataError for a name that cannot be a column of a text file."""
    column = (
        names.vocabulary.take(pa.array(names.codes)) if isinstance(names, Ids) else pa.array(names, _TEXT)
    )
    bad = pc.match_substring_regex(column, rf"[\s\x0b\x00{forbidden}]|^$")
    if pc.any(bad).as_py():
        name = column.filter(bad)[0].as_py()
        also = f" or {forbidden}" if forbidden else ""
        raise DataError(
            f"the id {name!r} cannot be written", cure=f"ids in such files have no white space{also}"
        )
    return column


def prefixed(prefix: str, column: pa.LargeStringArray) -> pa.LargeStringArray:
    """Return every text with the prefix before it; null stays null."""
    return pc.binary_join_element_wise(pa.scalar(prefix, _TEXT), column, pa.scalar("", _TEXT))


def joined_lines(*columns: Any) -> pa.Buffer:
    """Join columns (texts, numbers, or one word for all rows) to lines, with spaces; nulls are left out."""
    texts = [
        pa.scalar(column, _TEXT) if isinstance(column, str) else pa.array(column).cast(_TEXT)
        for column in columns
    ]
    lines = pc.binary_join_element_wise(*texts, pa.scalar(" ", _TEXT), null_handling="skip")
    ended = pc.binary_join_element_wise(lines, pa.scalar("", _TEXT), pa.scalar("\n", _TEXT))
    return ended.buffers()[2]
