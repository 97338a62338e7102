"""Parses lines of LETOR/SVMlight text to columns, a block of lines at a time.

    grade  [qid:query]  index:value  index:value …  [# docid = D …]

Three parsers give the same rows, and the first that can read a block is used:

1. *dense*: every line has the features 1..w. With `:` turned into a space the block is a table of
   numbers, which Arrow's CSV reader splits; the index columns are read too, and compared, and so are
   the separators between the columns.
2. *sparse*: lines with any features. The features of all lines become one long table `index:value`.
3. *line by line*, in plain Python: slow, but it reports which line is wrong.

Rules: grades are whole and not negative; indices start at 1, increase along a line and are at most
`MOST_FEATURES` (the table is dense); values are finite float32 numbers (a missing feature is left out, not
written as NaN); a query is any text without white space and `#`, and follows the grade. Lines that are blank
or hold only a comment are not rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError
from isthmus.tables.files import NUMBER, Block, read_columns, single_spaced

MOST_FEATURES = 1 << 16
EXAMPLE = "2 qid:10 1:0.5 2:3 # docid = D7"

_COLON, _HASH, _SPACE, _FEED = b":# \n"
_COLON_TO_SPACE = bytes.maketrans(b":", b" ")
_SPACE_TO_FEED = bytes.maketrans(b" ", b"\n")
_DOCID = r"docid\s*=\s*(?P<id>\S+)"
_INDEX = re.compile(rb"0*(\d{1,9})")
_LARGEST_GRADE = np.iinfo(np.int32).max
_LARGEST_VALUE = float(np.finfo(np.float32).max)
_TEXT = pa.large_string()


@dataclass(frozen=True, slots=True)
class ParsedRows:
    """The rows of one block.

    `last` is the last feature index of every row, 0 if it has none. `queries` is None if no line names its
    query; `documents` is None if no line names a document, and null where a line does not. `is_cut` is true
    if the file ends here without a line feed.
    """

    grades: NDArray[np.int32]
    queries: pa.LargeStringArray | None
    features: NDArray[np.float32]
    last: IntArray
    documents: pa.LargeStringArray | None = None
    is_cut: bool = False


def parse(block: Block, missing: float) -> ParsedRows | None:
    """Parse the rows of a block; None if it has none. Raises DataError for a bad line."""
    data = block.data if block.data.endswith(b"\n") else block.data + b"\n"
    data, comments = _without_comments(data)
    rows, filled = _dense(data), None
    if rows is None:
        data = single_spaced(data)
        filled = _filled_lines(data)
        rows = _dense(data) or _sparse(data, missing)
    if rows is None:
        rows, comments = _line_by_line(block, missing)
        filled = None
    if not len(rows.grades):
        return None
    if comments is not None and filled is not None:
        comments = comments.filter(pa.array(filled))
    return replace(rows, documents=_document_names(comments), is_cut=block.is_cut)


def _without_comments(data: bytes) -> tuple[bytes, pa.LargeStringArray | None]:
    """Return the lines up to their first `#`, and the rest of every line."""
    if b"#" not in data:
        return data, None
    symbols = np.frombuffer(data, dtype=np.uint8)
    feeds = np.flatnonzero(symbols == _FEED)
    hashes = np.flatnonzero(symbols == _HASH)
    lines, first = np.unique(np.searchsorted(feeds, hashes), return_index=True)
    inside = _between(hashes[first], feeds[lines], len(data))
    lengths = np.zeros(len(feeds) + 1, dtype=np.int64)
    lengths[lines + 1] = feeds[lines] - hashes[first]
    buffers = [None, pa.py_buffer(np.cumsum(lengths)), pa.py_buffer(symbols[inside])]
    return bytes(symbols[~inside]), pa.Array.from_buffers(_TEXT, len(feeds), buffers)


def _between(starts: IntArray, ends: IntArray, size: int) -> NDArray[np.bool_]:
    """Return a mask of the ranges start..end, which do not touch."""
    edges = np.zeros(size + 1, dtype=np.int8)
    edges[starts] = 1
    edges[ends] = -1
    return np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)


def _filled_lines(data: bytes) -> NDArray[np.bool_]:
    feeds = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == _FEED)
    return np.diff(feeds, prepend=-1) > 1


def _document_names(comments: pa.LargeStringArray | None) -> pa.LargeStringArray | None:
    if comments is None:
        return None
    names = pc.struct_field(pc.extract_regex(comments, _DOCID), "id")
    return None if names.null_count == len(names) else names


def _dense(data: bytes) -> ParsedRows | None:
    """Parse rows that all have the features 1..w, in the layout of the first line; None if any has not."""
    first = data[: data.index(b"\n")].removesuffix(b"\r").split(b" ")
    named, open_end = len(first) > 1 and first[1].startswith(b"qid:"), first[-1] == b""
    tokens = first[1 + named : len(first) - open_end]
    width = len(tokens)
    if not 0 < width <= MOST_FEATURES or any(
        not token.startswith(b"%d:" % at) for at, token in enumerate(tokens, 1)
    ):
        return None
    if b"\t" in data or b"\v" in data or b"\f" in data or _has_hexadecimals(data):
        return None  # Arrow is more lenient with these
    if not _alternating(data, open_end):
        return None
    table = read_columns(data.translate(_COLON_TO_SPACE), " ", _dense_columns(width, named, open_end))
    if table is None or table.num_rows != data.count(b"\n"):
        return None
    fixed = {"qid": "qid", "end": ""}
    if any(name in table.schema.names and not _is_all(table[name], fixed[name]) for name in fixed):
        return None
    indices = np.stack([table[f"i{at}"].to_numpy() for at in range(width)])
    if (indices != np.arange(1, width + 1)[:, None]).any():
        return None
    features = np.stack([table[f"v{at}"].to_numpy() for at in range(width)], axis=1)
    if not np.isfinite(features).all():
        return None
    queries = table["query"].combine_chunks() if named else None
    return _checked(table["grade"].to_numpy(), queries, features, np.full(len(features), width))


def _alternating(data: bytes, open_end: bool) -> bool:
    """Whether separators alternate, a space first: `2 qid:1 1:5 2:0`, not `2 qid:1:1 5 2:0`.

    A bit per symbol is set if the number of separators up to it is odd (a prefix sum modulo 2, in words of
    64 bits); spaces must be odd and colons even. The line feed counts if lines end in a space, so that every
    line starts even.
    """
    symbols = np.frombuffer(data, dtype=np.uint8)
    spaces, colons = _bits(symbols == _SPACE), _bits(symbols == _COLON)
    odd = spaces | colons
    if open_end:
        odd |= _bits(symbols == _FEED)
    for shift in (1, 2, 4, 8, 16, 32):
        odd ^= odd << np.uint64(shift)
    carried = np.bitwise_xor.accumulate(odd >> np.uint64(63))
    odd[1:] ^= -carried[:-1]
    return not ((odd & colons) | (~odd & spaces)).any()


def _has_hexadecimals(data: bytes) -> bool:
    """Whether there may be an index such as 0x1F, which Arrow would take for a number."""
    return (b"x" in data or b"X" in data) and re.search(rb"0[xX]", data) is not None


def _bits(mask: NDArray[np.bool_]) -> NDArray[np.uint64]:
    packed = np.packbits(mask, bitorder="little")
    return np.pad(packed, (0, -len(packed) % 8)).view(np.uint64)


def _dense_columns(width: int, named: bool, open_end: bool) -> dict[str, pa.DataType]:
    types = {"grade": pa.float64()} | ({"qid": _TEXT, "query": _TEXT} if named else {})
    for at in range(width):
        types |= {f"i{at}": pa.int32(), f"v{at}": pa.float32()}
    return types | ({"end": _TEXT} if open_end else {})


def _is_all(column: pa.ChunkedArray, word: str) -> bool:
    return bool(pc.all(pc.equal(column, word)).as_py())


def _checked(
    grades: FloatArray, queries: pa.LargeStringArray | None, features: NDArray[np.float32], last: IntArray
) -> ParsedRows | None:
    """Return the rows, or None if a grade is not a whole number from 0 or a query is empty."""
    whole = (grades == np.floor(grades)) & (grades >= 0) & (grades <= _LARGEST_GRADE)
    named = queries is None or not len(queries) or pc.min(pc.binary_length(queries)).as_py() > 0
    if not (whole.all() and named):
        return None
    return ParsedRows(grades.astype(np.int32), queries, features, last)


def _sparse(data: bytes, missing: float) -> ParsedRows | None:
    """Parse rows with any features from single-spaced lines; None if any of them is wrong."""
    symbols = np.frombuffer(data, dtype=np.uint8)
    starts, ends, spaces = _layout(symbols)
    before = np.searchsorted(spaces, starts)
    counts = np.searchsorted(spaces, ends) - before
    named = _names_query(symbols, np.append(spaces, 0)[before], counts)
    if named.any() != named.all():
        return None
    tokens = counts - named
    head_ends = np.where(tokens > 0, np.append(spaces, (0, 0))[before + named], ends)
    in_head = _between(starts, head_ends, len(data))
    columns = {"grade": pa.float64()} | ({"query": _TEXT} if named.any() else {})
    heads = read_columns(bytes(symbols[in_head | (symbols == _FEED)]), " ", columns)
    matrix = _features(bytes(symbols[~in_head]), tokens, missing)
    if heads is None or matrix is None:
        return None
    queries = pc.utf8_slice_codeunits(heads["query"].combine_chunks(), 4) if named.any() else None
    return _checked(heads["grade"].to_numpy(), queries, *matrix)


def _layout(symbols: NDArray[np.uint8]) -> tuple[IntArray, IntArray, IntArray]:
    """Return the starts and ends of the lines that are not empty, and the positions of the spaces."""
    ends = np.flatnonzero(symbols == _FEED)
    starts = np.concatenate(([0], ends[:-1] + 1))
    filled = ends > starts
    return starts[filled], ends[filled], np.flatnonzero(symbols == _SPACE)


def _names_query(symbols: NDArray[np.uint8], first_space: IntArray, counts: IntArray) -> NDArray[np.bool_]:
    """Whether each line continues with `qid:` after its first space."""
    follows = symbols.take(first_space[:, None] + np.arange(1, 5), mode="clip")
    matches: NDArray[np.bool_] = (follows == np.frombuffer(b"qid:", dtype=np.uint8)).all(axis=1)
    return matches & (counts > 0)


def _features(body: bytes, tokens: IntArray, missing: float) -> tuple[NDArray[np.float32], IntArray] | None:
    """Return the matrix and every row's last index from `index:value` tokens, `tokens[i]` of them in row i;
    None if any is wrong."""
    last = np.zeros(len(tokens), dtype=np.int64)
    if not tokens.any():
        return np.empty((len(tokens), 0), dtype=np.float32), last
    if _has_hexadecimals(body):
        return None
    table = read_columns(body.translate(_SPACE_TO_FEED), ":", {"index": pa.int32(), "value": pa.float32()})
    if table is None or table.num_rows != tokens.sum():
        return None
    index, value = table["index"].to_numpy(), table["value"].to_numpy()
    row = np.repeat(np.arange(len(tokens)), tokens)
    rising = (index[1:] > index[:-1]) | (row[1:] > row[:-1])
    if index.min() < 1 or index.max() > MOST_FEATURES or not rising.all() or not np.isfinite(value).all():
        return None
    matrix = np.full((len(tokens), int(index.max())), missing, dtype=np.float32)
    matrix[row, index - 1] = value
    last[tokens > 0] = index[np.cumsum(tokens)[tokens > 0] - 1]
    return matrix, last


def _line_by_line(block: Block, missing: float) -> tuple[ParsedRows, pa.LargeStringArray]:
    """Parse the rows and their comments in plain Python. Raises DataError for the first bad line."""
    grades: list[int] = []
    queries: list[str | None] = []
    comments: list[str] = []
    features: list[dict[int, float]] = []
    for number, line in block.lines():
        content, _, comment = line.partition(b"#")
        fields = content.split()
        if not fields:
            continue
        at = _Line(block, number, line)
        grades.append(at.grade(fields[0]))
        queries.append(at.query(fields[1:2], queries))
        features.append(at.features(fields[1 + (queries[-1] is not None) :]))
        comments.append(comment.decode())
    last = np.array([max(row, default=0) for row in features], dtype=np.int64)
    matrix = np.full((len(features), last.max(initial=0)), missing, dtype=np.float32)
    for at_row, row in enumerate(features):
        matrix[at_row, np.array(list(row), dtype=np.int64) - 1] = list(row.values())
    names = pa.array(queries, _TEXT) if queries and queries[0] is not None else None
    return ParsedRows(np.array(grades, dtype=np.int32), names, matrix, last), pa.array(comments, _TEXT)


@dataclass(frozen=True, slots=True)
class _Line:
    """One line, with its block and number for error messages."""

    block: Block
    number: int
    line: bytes

    def error(self, problem: str, token: bytes, cure: str) -> DataError:
        cut = self.block.is_cut and self.block.data.endswith(self.line) and self.line.endswith(token)
        if cut:
            problem, cure = "the file ends in the middle of a line", f"copy the file again ({cure})"
        return self.block.error(problem, self.number, token, cure)

    def grade(self, token: bytes) -> int:
        value = float(token) if NUMBER.fullmatch(token) else -1.0
        if value < 0 or value > _LARGEST_GRADE or not value.is_integer():
            raise self.error("the grade is not a whole number from 0 up", token, f"a line is: {EXAMPLE}")
        return int(value)

    def query(self, second: list[bytes], before: list[str | None]) -> str | None:
        named = bool(second) and second[0].startswith(b"qid:")
        if before and named != (before[0] is not None):
            problem = "a query where earlier lines have none" if named else "no query"
            raise self.error(problem, self.line, f"all lines name their query, or none: {EXAMPLE}")
        if named and second[0] == b"qid:":
            raise self.error("the query is empty", second[0], f"a line is: {EXAMPLE}")
        return second[0][4:].decode() if named else None

    def features(self, tokens: list[bytes]) -> dict[int, float]:
        features: dict[int, float] = {}
        previous = 0
        for token in tokens:
            index_text, colon, value = token.partition(b":")
            digits = _INDEX.fullmatch(index_text)
            if not colon or not digits:
                cure = "the query follows the grade" if index_text == b"qid" else f"a line is: {EXAMPLE}"
                raise self.error("this is not index:value", token, cure)
            index = int(digits[1])
            if index <= previous:
                problem = f"feature index {index} after {previous}" if previous else "feature index 0"
                raise self.error(problem, token, "indices start at 1 and increase along a line")
            if index > MOST_FEATURES:
                raise self.error("a very large feature index", token, f"at most {MOST_FEATURES:,} features")
            if not NUMBER.fullmatch(value) or not abs(float(value)) <= _LARGEST_VALUE:
                raise self.error("the value is not a finite number", token, "leave out what is missing")
            features[index] = float(value)
            previous = index
        return features
