"""LETOR and SVMlight files: `grade qid:query 1:value 2:value … # docid = D`.

The form of a line is described in `letor_blocks`. For a file as a whole:

- Rows of one query that are not adjacent are brought together, in the order of the file.
- A file without `qid:` needs group sizes beside it, one per line: `FILE.query` (LightGBM) or `FILE.group`
  (XGBoost). Its queries are then called 1, 2, 3, … Sizes that do not add up are a DataError.
- The document of a row is what the comment calls `docid`; the same one twice for a query is a DataError.
- A last line without a line feed is accepted, unless it stops at an earlier feature than all the others.
- Blocks are parsed in parallel. With `cache` the columns are kept in the cache folder and mapped from
  there, so that even parsing takes little memory; where that folder cannot be written, nothing is kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from isthmus.arrays import Ids, IntArray, frozen
from isthmus.errors import DataError
from isthmus.tables import files as text_files
from isthmus.tables.cache import Column, open_columns, remembered_checksum, write_columns
from isthmus.tables.grouped import group, offsets_of
from isthmus.tables.letor import Letor, in_order, row_names
from isthmus.tables.letor_blocks import EXAMPLE, ParsedRows, parse
from isthmus.tables.rankings import duplicate_rows

BLOCK = 1 << 21
SIDECARS = (".query", ".group")

_FORMAT = 1
_GATHERED_AT_ONCE = 1 << 16
_WRITTEN_AT_ONCE = 1 << 14
_TEXT = pa.large_string()
_NO_FEATURES = np.empty((0, 0), dtype=np.float32)
_PARTS = {"train": ("train",), "validation": ("vali", "valid", "validation"), "test": ("test",)}
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Fold:
    """The training, validation and test parts of one fold, equally wide."""

    name: str
    train: Letor
    validation: Letor
    test: Letor


def read_letor(
    path: str | os.PathLike[str],
    *,
    cache: bool = True,
    missing: float = 0.0,
    width: int | None = None,
    name: str | None = None,
) -> Letor:
    """Read a LETOR or SVMlight file; features that a line leaves out are `missing`.

    The table is as wide as the largest index in the file, or `width`, if that is given. Its name is the
    file's unless another is given.
    """
    file = Path(path)
    table = _from_cache(file, missing) if cache and file.is_file() else None
    if table is None:
        table = _in_memory(file, missing)
    table = replace(table, name=file.name if name is None else name)
    return table if width is None else table.widened(width, missing=missing)


def read_letor_fold(folder: str | os.PathLike[str], *, cache: bool = True, missing: float = 0.0) -> Fold:
    """Read `train.txt`, `vali.txt` and `test.txt` of a folder such as MSLR's Fold1.

    Without `vali.txt` the validation part is empty. Raises DataError if another part is missing.
    """
    files = {part: _part_file(Path(folder), part) for part in _PARTS}
    parts = {part: read_letor(file, cache=cache, missing=missing) for part, file in files.items() if file}
    parts.setdefault("validation", parts["train"][:0])
    width = max(part.width for part in parts.values())
    wide = {part: table.widened(width, missing=missing) for part, table in parts.items()}
    return Fold(Path(folder).name, **wide)


def read_letor_folds(
    folder: str | os.PathLike[str], *, cache: bool = True, missing: float = 0.0
) -> tuple[Fold, ...]:
    """Read the folders Fold1, Fold2, … of a folder such as MSLR-WEB10K."""
    folds = [entry for entry in sorted(Path(folder).glob("Fold*")) if re.fullmatch(r"Fold\d+", entry.name)]
    if not folds:
        raise DataError("no fold here", file=folder, cure="a folder with Fold1, Fold2, … in it")
    ordered = sorted(folds, key=lambda entry: int(entry.name[4:]))
    return tuple(read_letor_fold(entry, cache=cache, missing=missing) for entry in ordered)


def rotated_folds(parts: Sequence[Letor]) -> tuple[Fold, ...]:
    """Build folds from S parts as LETOR 4.0 does from five.

    Fold i trains on the S - 2 parts from the i-th on, cyclically, validates on the next one and tests on the
    last. Raises DataError for fewer than three parts.
    """
    count = len(parts)
    if count < 3:
        raise DataError(f"{count} parts do not make a training, a validation and a test part")
    width = max(part.width for part in parts)
    wide = [part.widened(width) for part in parts]
    turns = ([wide[(start + at) % count] for at in range(count)] for start in range(count))
    return tuple(
        Fold(f"Fold{number}", Letor.concat(turn[:-2], name="train"), turn[-2], turn[-1])
        for number, turn in enumerate(turns, 1)
    )


def _part_file(folder: Path, part: str) -> Path | None:
    wanted = [folder / f"{stem}.txt{suffix}" for stem in _PARTS[part] for suffix in ("", ".gz")]
    for file in wanted:
        if file.is_file():
            return file
    if part == "validation":
        return None
    raise DataError(f"no {part} part", file=folder, cure=f"it is called {wanted[0].name}")


def write_letor(letor: Letor | Iterable[Letor], path: str | os.PathLike[str]) -> None:
    """Write a table, or several one after the other, so that reading gives the same floats again.

    NaN features are left out and are restored when read with `missing=nan`. Document ids go into a comment
    if the table has them.
    """
    tables = [letor] if isinstance(letor, Letor) else letor
    with text_files.replacing(path) as stream:
        for table in tables:
            for start in range(0, table.rows, _WRITTEN_AT_ONCE):
                _write_rows(table, slice(start, start + _WRITTEN_AT_ONCE), stream)


def _write_rows(table: Letor, rows: slice, stream: IO[bytes]) -> None:
    features = np.asarray(table.features[rows])
    if np.isinf(features).any():
        raise DataError("a feature is infinite", cure="features in LETOR files are finite numbers")
    queries = text_files.checked(table.queries, forbidden="#").take(pa.array(table.query_of_row[rows]))
    texts = [pa.array(column, from_pandas=True).cast(_TEXT) for column in features.T]
    columns = [text_files.prefixed(f"{index}:", text) for index, text in enumerate(texts, 1)]
    if table.documents is not None:
        columns.append(text_files.prefixed("#docid = ", text_files.checked(table.documents[rows])))
    stream.write(text_files.joined_lines(table.grades[rows], text_files.prefixed("qid:", queries), *columns))


def _in_memory(file: Path, missing: float) -> Letor:
    spool = _Spool()
    table, order = _parse(file, missing, spool)
    features = np.empty((table.rows, spool.width), dtype=np.float32)
    filled = 0
    for piece in spool.pieces(order, missing):
        features[filled : filled + len(piece)] = piece
        filled += len(piece)
    return replace(table, features=frozen(features))


def _from_cache(file: Path, missing: float) -> Letor | None:
    """Return the table mapped from the cache folder, built there if need be; None if that cannot be done."""
    key = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    files = [file, *filter(None, [_sidecar(file)])]
    try:
        folder = text_files.cache_folder() / "letor" / key
        checksum = remembered_checksum(files, folder / "checksum.json")
        cached = folder / f"{checksum}-{missing!r}.columns"
        opened = _open(cached)
        if opened is not None:
            return opened
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as raw:
            spool = _Spool(raw)
            table, order = _parse(file, missing, spool)
            if remembered_checksum(files, folder / "checksum.json") != checksum:
                return None  # the file changed while it was read
            _keep(cached, table, spool.width, spool.pieces(order, missing))
        for other in set(folder.glob("*.columns")) - set(folder.glob(f"{checksum}-*")):
            other.unlink(missing_ok=True)
    except (OSError, RuntimeError):  # disk full, no permission, or no home folder
        return None
    return _open(cached)


def _keep(path: Path, table: Letor, width: int, features: Iterator[NDArray[np.float32]]) -> None:
    columns = {
        "features": Column((table.rows, width), np.float32, features),
        "grades": Column.of(table.grades),
        "offsets": Column.of(table.offsets),
    }
    if table.documents is not None:
        words = table.documents.vocabulary
        starts = np.frombuffer(
            words.buffers()[1], dtype=np.int64, count=len(words) + 1, offset=8 * words.offset
        )
        letters = np.frombuffer(words.buffers()[2] or b"", dtype=np.uint8)
        columns |= {
            "codes": Column.of(table.documents.codes),
            "words": Column.of(letters[starts[0] : starts[-1]]),
            "starts": Column.of(starts - starts[0]),
        }
    write_columns(path, columns, {"format": _FORMAT, "queries": table.queries})


def _open(path: Path) -> Letor | None:
    opened = open_columns(path)
    if opened is None or opened[0].get("format") != _FORMAT:
        return None
    about, columns = opened
    documents = None
    if "codes" in columns:
        buffers = [None, pa.py_buffer(columns["starts"]), pa.py_buffer(columns["words"])]
        words = pa.Array.from_buffers(_TEXT, len(columns["starts"]) - 1, buffers)
        documents = Ids(columns["codes"], words)
    return Letor(
        tuple(about["queries"]), columns["offsets"], columns["features"], columns["grades"], documents
    )


class _Spool:
    """The features of consecutive blocks, in memory or in a file, each block with a width of its own."""

    def __init__(self, raw: IO[bytes] | None = None) -> None:
        self.raw = raw
        self.blocks: list[NDArray[np.float32]] = []
        self.shapes: list[tuple[int, int]] = []
        self.width = 0

    def append(self, features: NDArray[np.float32]) -> None:
        self.width = max(self.width, features.shape[1])
        self.shapes.append(features.shape)
        if self.raw is None:
            self.blocks.append(features)
        else:
            self.raw.write(features.data)

    def pieces(self, order: IntArray | None, missing: float) -> Iterator[NDArray[np.float32]]:
        """Yield all rows at full width, in pieces; with `order`, in that order of rows."""
        blocks = self._mapped(self.raw) if self.raw is not None else self.blocks
        if order is None:
            yield from (_widened(block, self.width, missing) for block in blocks)
            return
        ends = np.cumsum([rows for rows, _ in self.shapes])
        for start in range(0, len(order), _GATHERED_AT_ONCE):
            rows = order[start : start + _GATHERED_AT_ONCE]
            source = np.searchsorted(ends, rows, side="right")
            piece = np.full((len(rows), self.width), missing, dtype=np.float32)
            for at in np.unique(source):
                block, mask = blocks[at], source == at
                piece[mask, : block.shape[1]] = block[rows[mask] - (ends[at] - len(block))]
            yield piece

    def _mapped(self, raw: IO[bytes]) -> list[NDArray[np.float32]]:
        raw.flush()
        cells = np.cumsum([0, *(rows * width for rows, width in self.shapes)])
        content = np.memmap(raw, dtype=np.float32, mode="r", shape=(int(cells[-1]),))
        pairs = zip(cells[:-1], cells[1:], self.shapes, strict=True)
        return [content[start:end].reshape(shape) for start, end, shape in pairs]


def _widened(block: NDArray[np.float32], width: int, missing: float) -> NDArray[np.float32]:
    if block.shape[1] == width:
        return block
    wide = np.full((len(block), width), missing, dtype=np.float32)
    wide[:, : block.shape[1]] = block
    return wide


def _parse(file: Path, missing: float, spool: _Spool) -> tuple[Letor, IntArray | None]:
    """Return the table without its features, which go into the spool, and the rows' order in the file.

    Rules about the file as a whole are checked here.
    """
    parts: list[ParsedRows] = []
    for rows in _in_parallel(lambda block: parse(block, missing), text_files.read_blocks(file, size=BLOCK)):
        if rows is not None:
            spool.append(rows.features)
            parts.append(replace(rows, features=_NO_FEATURES))
    if not spool.width:
        problem = "no line has a feature" if parts else "no rows"
        raise DataError(problem, file=file, cure=f"a line is: {EXAMPLE}")
    if parts[-1].is_cut:
        _check_end(file, np.concatenate([part.last for part in parts]))
    queries, groups = _grouped(file, parts)
    order = None if in_order(groups) else np.argsort(groups, kind="stable")
    grades = np.concatenate([part.grades for part in parts])
    offsets = offsets_of(groups, len(queries))
    documents = _documents(file, parts, queries, offsets, order)
    graded = frozen(grades if order is None else grades[order])
    return Letor(queries, offsets, _NO_FEATURES, graded, documents), order


def _in_parallel(function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
    """Results in order, with few items in flight at a time."""
    workers = min(4, os.cpu_count() or 1)
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _is_row(line: bytes) -> bool:
    return bool(line.partition(b"#")[0].strip())


def _error_at(file: Path, row: int, problem: str, cure: str) -> DataError:
    line, text = text_files.line_of_row(file, row, is_row=_is_row)
    return DataError(problem, file=file, line=line, text=text, cure=cure)


def _check_end(file: Path, last: IntArray) -> None:
    """Raise DataError if the last line, which has no line feed, seems to be cut off."""
    if len(last) > 1 and (last[:-1] == last[0]).all() and last[-1] < last[0]:
        problem = f"the file ends in the middle of a line, after feature {last[-1]} of {last[0]}"
        raise _error_at(file, len(last) - 1, problem, "copy the file again, or end it with a line feed")


def _grouped(file: Path, parts: Sequence[ParsedRows]) -> tuple[tuple[str, ...], IntArray]:
    """Return the queries and the query of every row, from `qid:` or from a file of group sizes."""
    named = [part.queries is not None for part in parts]
    if all(named):
        queries, groups, _ = group(Ids.of(pa.chunked_array([part.queries for part in parts])))
        return queries, groups
    rows = [len(part.grades) for part in parts]
    if any(named):
        odd = named.index(not named[0])
        problem = "no query" if named[0] else "a query where earlier lines have none"
        raise _error_at(file, sum(rows[:odd]), problem, f"all lines name their query, or none: {EXAMPLE}")
    sizes = _group_sizes(file, sum(rows))
    return tuple(map(str, range(1, len(sizes) + 1))), np.repeat(np.arange(len(sizes)), sizes)


def _sidecar(file: Path) -> Path | None:
    stems = dict.fromkeys((str(file), str(file).removesuffix(".gz")))
    candidates = (Path(stem + suffix) for stem in stems for suffix in SIDECARS)
    return next((path for path in candidates if path.is_file()), None)


def _group_sizes(file: Path, rows: int) -> IntArray:
    sidecar = _sidecar(file)
    if sidecar is None:
        cure = f"write it after the grade, as in {EXAMPLE}, or put group sizes into {file.name}{SIDECARS[0]}"
        raise _error_at(file, 0, "no query", cure)
    block = text_files.read_all(sidecar)
    sizes = []
    for number, line in block.lines():
        if not re.fullmatch(rb"\s*[1-9]\d{0,9}\s*", line):
            raise block.error("this is not a group size", number, line, "one whole number from 1 up a line")
        sizes.append(int(line))
    if sum(sizes) != rows:
        raise DataError(
            f"the group sizes add up to {sum(sizes):,} rows, but {file.name} has {rows:,}",
            file=sidecar,
            cure="the two files do not belong together",
        )
    return np.array(sizes, dtype=np.int64)


def _documents(
    file: Path,
    parts: Sequence[ParsedRows],
    queries: tuple[str, ...],
    offsets: IntArray,
    order: IntArray | None,
) -> Ids | None:
    """Return the documents that comments name, in the order of the table; rows without one are `qid-row`."""
    if all(part.documents is None for part in parts):
        return None
    columns = [pa.nulls(len(p.grades), _TEXT) if p.documents is None else p.documents for p in parts]
    column = pa.chunked_array(columns).combine_chunks()
    column = column if order is None else column.take(pa.array(order))
    documents = Ids.of(pc.coalesce(column, row_names(queries, offsets)))
    groups = np.repeat(np.arange(len(queries)), np.diff(offsets))
    twice = duplicate_rows(groups, documents)
    if twice is not None:
        first, second = sorted(twice if order is None else order[list(twice)].tolist())
        what = f"document {documents.word(twice[1])!r} appears twice for query {queries[groups[twice[1]]]!r}"
        problem = f"{what}, first in line {text_files.line_of_row(file, first, is_row=_is_row)[0]}"
        raise _error_at(file, second, problem, "keep one row per query and document")
    return documents
