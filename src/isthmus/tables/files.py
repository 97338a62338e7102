"""Text files as blocks of whole lines, and files that are written whole or not at all.

Every reader of a line format starts here, so all of them agree on what a text file is:

- UTF-8, with or without a byte-order mark; other bytes, and NUL, are a DataError with line and offset;
- plain or gzip, told by the first two bytes, not by the name;
- lines end in a line feed; a carriage return before it is white space like any other;
- a file without a single byte, and one that cannot be opened, are a DataError.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO
from zlib import error as ZlibError

import numpy as np

from isthmus.errors import DataError
from isthmus.files import locked as locked
from isthmus.files import replacing as replacing

BLOCK = 1 << 24
LONGEST_LINE = 1 << 26
NUMBER = re.compile(rb"[+-]?(\d++\.?\d*+|\.\d++)([eE][+-]?\d++)?")
"""What all readers take for a number: no NaN, no infinity, no underscores."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_TO_SPACE = bytes.maketrans(b"\t\v\f\r", b"    ")
_SPACE, _FEED = 32, 10


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive whole lines; the last line of the last block may lack its line feed."""

    file: str
    first_line: int
    data: bytes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line that is not blank, with its number in the file, from 1."""
        for number, line in enumerate(self.data.split(b"\n"), self.first_line):
            if line and not line.isspace():
                yield number, line

    @property
    def is_cut(self) -> bool:
        """Whether the file ends here without a line feed."""
        return not self.data.endswith(b"\n")

    def error(self, problem: str, line: int, text: bytes | str, cure: str) -> DataError:
        """A DataError about one of the lines."""
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return DataError(problem, file=self.file, line=line, text=shown.strip(), cure=cure)


def read_blocks(path: str | os.PathLike[str], *, size: int = BLOCK) -> Iterator[Block]:
    """The file in blocks of about `size` bytes, decompressed and checked to be text."""
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
    """The number and the text of the line that a row came from, by reading up to it."""
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
    """Where parsed files may be kept: ISTHMUS_CACHE, or `isthmus` in the user's cache folder."""
    named = os.environ.get("ISTHMUS_CACHE")
    if named:
        return Path(named)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "isthmus" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isthmus"
