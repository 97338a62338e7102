"""The vectors of a node's documents: several passages a document, searched for the nearest, kept on disk.

    state              the encoder, file numbers, valid rows, their checksums, and the rows that the graph has
    passages-000001    one record a passage: its document, its span of the text, the norm of its vector
    vectors-000001     its vector in float16, in the same order
    graph-000001-…     HNSW (usearch) over the first rows in int8: a cache of the two files above

Both files are only appended to, and flushed before `state` is replaced, so after a kill at any point exactly
the committed rows are there. A document is identified by its change number in the store. Vectors of a removed
document are overwritten with zeros when the removal is committed, left out of the files when half of the rows
are dead, and left out of the graph when it is built again.

Rows that are not in a graph yet are compared one by one (2 ms of processor time for 20,000 rows of 384), so
the graph may lag behind. Cosines of all candidates are computed from the stored vectors.
Everything is mapped, not loaded: with 600,000 rows the process itself has 37 MB.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import DataError
from isthmus.files import replacing

EXACT = 20_000
"""Rows that are compared one by one before a graph is built: up to this number that is faster."""
STEP = 100_000
"""Rows that are added to a graph before it is saved."""
_GROWTH = 0.1
_BLOCK = 4096  # rows per checksum
_LINKS, _BUILD, _SEARCH = 16, 128, 384
_CHUNK = 4  # rows per call, during which the library holds the interpreter's lock
_SPARE = 2  # candidates per requested row: int8 and half precision order near ties differently

Changes = NDArray[np.uint64]
AnyChanges = Sequence[int] | Changes | IntArray
"""Change numbers of documents, above 0."""
_PASSAGE = np.dtype(
    [("owner", "<u8"), ("start", "<u4"), ("end", "<u4"), ("norm", "<f4"), ("passages", "<u4")]
)


@dataclass(frozen=True, eq=False)
class VectorReader:
    """The rows up to a commit, for readers. Immutable, except that rows are zeroed when removed."""

    vectors: NDArray[np.float16]
    passages: NDArray[Any]
    graph: Any = None
    covered: int = 0

    @cached_property
    def _alive(self) -> NDArray[np.bool_]:
        """Mask of the rows that belong to a document and have a direction."""
        return np.asarray((self.passages["owner"] > 0) & (self.passages["norm"] > 0))

    @cached_property
    def _order(self) -> IntArray:
        """Row numbers sorted by document."""
        return np.argsort(self.passages["owner"], kind="stable")

    @cached_property
    def _owners(self) -> Changes:
        """The document of every row in the order of `_order`; first 0, for dead rows."""
        return np.asarray(self.passages["owner"][self._order])

    @cached_property
    def documents(self) -> Changes:
        """The documents that have a row, ascending."""
        owners = self._owners
        is_first = np.ones(len(owners), dtype=bool)
        np.not_equal(owners[1:], owners[:-1], out=is_first[1:])
        return owners[is_first & (owners > 0)]

    def __len__(self) -> int:
        """Number of documents that have a vector."""
        return len(self.documents)

    def known(self, changes: AnyChanges) -> NDArray[np.bool_]:
        """Mask of the given documents that have a vector."""
        return np.isin(np.asarray(changes, np.uint64), self.documents)

    @cached_property
    def unfinished(self) -> Changes:
        """Documents of which some passages have vectors and others do not yet, ascending."""
        ends = np.searchsorted(self._owners, self.documents, side="right")
        counts = ends - np.searchsorted(self._owners, self.documents, side="left")
        last = self._order[ends - 1]  # the latest number of passages: it changes with a new split
        return np.asarray(self.documents[counts < self.passages["passages"][last]])

    def spans(self, change: int) -> list[tuple[int, int]]:
        """The spans of the text that have vectors, in the order in which they were added."""
        rows, _ = self._rows_of(np.array([change], np.uint64))
        return [(int(start), int(end)) for _, start, end, _, _ in self.passages[rows]]

    def search(self, vector: NDArray[np.float32], depth: int) -> tuple[Changes, FloatArray]:
        """The `depth` documents with the nearest passages, and their cosines, best first.

        Of equal cosines the later change comes first. A vector without direction finds nothing.
        """
        unit = _unit(vector)
        if unit is None or depth < 1:
            return np.empty(0, np.uint64), np.empty(0)
        count = _SPARE * depth
        while True:
            rows = self._nearest(unit, count)
            owners, cosines = self.passages["owner"][rows], self._exact(rows, unit)
            order = np.lexsort((owners, cosines))[::-1]
            _, first = np.unique(owners[order], return_index=True)
            if len(first) >= depth or count >= len(self.vectors):
                best = order[np.sort(first)[:depth]]
                return np.asarray(owners[best]), cosines[best].astype(np.float64)
            count *= 4  # too many passages of the same documents, or removed ones

    def cosines(self, changes: AnyChanges, vector: NDArray[np.float32]) -> FloatArray:
        """The cosine of each document's best passage; −inf for a document that has no vector yet."""
        unit = _unit(vector)
        values = np.full(len(changes), -np.inf)
        if unit is not None and len(changes):
            rows, starts = self._rows_of(np.asarray(changes, np.uint64))
            some = np.flatnonzero(np.diff(starts))
            if len(some):
                values[some] = np.maximum.reduceat(self._exact(rows, unit), starts[some])
        return values

    def best_span(self, change: int, vector: NDArray[np.float32]) -> tuple[int, int] | None:
        """The span of the passage that is nearest to a vector; None without one."""
        unit = _unit(vector)
        rows, _ = self._rows_of(np.array([change], np.uint64))
        if unit is None or not len(rows):
            return None
        best = self.passages[rows[np.argmax(self._exact(rows, unit))]]
        return int(best["start"]), int(best["end"])

    def first_vectors(self, changes: AnyChanges) -> NDArray[np.float32]:
        """The vector of each document's first passage; zeros for a document that has none yet."""
        rows, starts = self._rows_of(np.asarray(changes, np.uint64))
        vectors = np.zeros((len(changes), self.vectors.shape[1]), np.float32)
        some = np.flatnonzero(np.diff(starts))
        vectors[some] = self.vectors[rows[starts[some]]]
        return vectors

    def _rows_of(self, changes: Changes) -> tuple[IntArray, IntArray]:
        """The rows of documents, one after the other, and where those of each begin, with the end."""
        first, last = (np.searchsorted(self._owners, changes, side=side) for side in ("left", "right"))
        counts = np.where(changes > 0, last - first, 0)
        starts = np.concatenate(([0], np.cumsum(counts)))
        steps = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        return self._order[np.repeat(first, counts) + steps], starts

    def _exact(self, rows: IntArray, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """Exact cosines of rows with a unit vector; −inf for a row without direction."""
        norms = self.passages["norm"][rows]
        products = self.vectors[rows].astype(np.float32) @ vector
        scaled = np.divide(products, norms, out=np.full(len(rows), -np.inf, np.float32), where=norms > 0)
        return np.asarray(np.minimum(scaled, 1))

    def _nearest(self, vector: NDArray[np.float32], count: int) -> IntArray:
        """Rows that include about the `count` nearest ones, in no particular order."""
        near, compared = np.empty(0, np.int64), 0
        if self.graph is not None and count * 16 < self.covered:  # beyond 1/16 of the rows a scan is faster
            near = self.graph.search(_int8(vector[None])[0], count, threads=1).keys.astype(np.int64)
            near, compared = near[self._alive[near]], self.covered
        rest = self._compare(vector, compared)
        if len(rest) > count:
            best = np.argpartition(rest, len(rest) - count)[-count:]
            return np.concatenate((near, best[np.isfinite(rest[best])] + compared))
        return np.concatenate((near, np.flatnonzero(np.isfinite(rest)) + compared))

    def _compare(self, vector: NDArray[np.float32], start: int) -> FloatArray:
        """Cosines of all rows from `start` on, in half precision; −inf for dead ones."""
        import simsimd

        if start == len(self.vectors):
            return np.empty(0)
        distances = simsimd.cdist(vector.astype(np.float16)[None], self.vectors[start:], "cosine")
        return np.where(self._alive[start:], 1 - np.asarray(distances)[0], -np.inf)


class VectorIndex:
    """Vectors in a folder, with one writer and many readers. Searches see changes after `commit`.

    with VectorIndex.open(folder, 384, encoder.fingerprint) as index:
        index.add([17], encoder.encode(["a red apple"]), [(0, 11)])
        index.commit()
        changes, cosines = index.reader.search(encoder.encode_queries(["apples"])[0], 10)
    """

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self.folder, self._state = folder, state
        self.width, self.fingerprint = int(state["width"]), str(state["encoder"])
        self._writing, self._maintaining = threading.RLock(), threading.RLock()
        self._compacting = threading.Event()
        self._added: list[NDArray[Any]] = []
        self._removed: list[Changes] = []
        self._files = self._open_files(state)
        self._check()
        passages = np.fromfile(self._path("passages"), _PASSAGE)
        self._show(passages, self._read_graph())
        self._forget_others()

    @classmethod
    def open(cls, folder: Path, width: int, fingerprint: str) -> VectorIndex:
        """Open the index in a folder, creating it if need be.

        Raises a DataError for another width or encoder and for files that lack committed rows, and an OSError
        if the system refuses to read them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        fresh = {"format": 1, "width": width, "encoder": fingerprint, "files": 1, "rows": 0, "graph": None}
        fresh["checksums"] = {}
        try:
            state = json.loads((folder / "state").read_text(encoding="utf-8"))
        except FileNotFoundError:
            state = fresh
        except ValueError as error:
            raise DataError(f"cannot be read: {error}", file=folder / "state", cure=_CURE) from error
        for key in ("format", "width", "encoder"):
            if state.get(key) != fresh[key]:
                message = f"vectors of {key} {state.get(key)!r}, expected {fresh[key]!r}"
                raise DataError(message, file=folder / "state", cure=_CURE)
        return cls(folder, state)

    def _path(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self._state['files']:06d}"

    def _open_files(self, state: Mapping[str, Any]) -> dict[str, int]:
        """Open both files and cut off what a killed process wrote behind the last committed row."""
        files: dict[str, int] = {}
        for kind, size in self._sizes.items():
            path, length = self.folder / f"{kind}-{state['files']:06d}", size * state["rows"]
            files[kind] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            if (there := os.fstat(files[kind]).st_size) < length:
                _close(files)
                raise DataError(f"has {there} bytes, {length} were committed", file=path, cure=_CURE)
            os.ftruncate(files[kind], length)
        return files

    @property
    def _sizes(self) -> dict[str, int]:
        """Bytes per row, by file."""
        return {"passages": _PASSAGE.itemsize, "vectors": 2 * self.width}

    def _summed(self, rows: int, blocks: Iterable[int], known: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The checksums of the files' first `rows` rows: computed for `blocks`, taken from `known` for the
        others."""
        sums = {}
        for kind, size in self._sizes.items():
            sums[kind] = [*known.get(kind, ()), *[None] * (rows // _BLOCK + 1)][: -(-rows // _BLOCK)]
            for block in blocks:
                length = min(_BLOCK, rows - block * _BLOCK)
                content = os.pread(self._files[kind], length * size, block * _BLOCK * size)
                sums[kind][block] = zlib.crc32(content)
        return sums

    def _check(self) -> None:
        """Raise a DataError for a block that has changed; blocks that were being erased are not checked."""
        rows, known = self._state["rows"], self._state.get("checksums", {})
        sums = self._summed(rows, range(-(-rows // _BLOCK)), {})
        for kind, each in sums.items():
            for at, (before, now) in enumerate(zip(known.get(kind, ()), each, strict=False)):
                if before not in (None, now):
                    _close(self._files)
                    message = f"rows from {at * _BLOCK} on do not have their checksum"
                    raise DataError(message, file=self._path(kind), cure=_CURE)
        self._state["checksums"] = sums

    def close(self) -> None:
        """Close the files; additions and removals that were not committed are lost."""
        _close(self._files)
        self._files = {}

    def __enter__(self) -> VectorIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # writing

    def add(
        self,
        changes: AnyChanges,
        vectors: NDArray[np.floating],
        spans: Sequence[tuple[int, int]],
        *,
        passages: Sequence[int] | None = None,
    ) -> None:
        """Add passages: their documents, vectors of unit length, and spans of the documents' texts.

        `passages` is the number of passages that each document has in all, 1 by default; see `unfinished`.
        Raises a DataError for vectors of another shape or with values that are not finite.
        """
        rows = np.ascontiguousarray(vectors, dtype=np.float16)
        if rows.shape != (len(changes), self.width) or not np.isfinite(rows).all():
            message = f"vectors of shape {rows.shape} or not finite, expected ({len(changes)}, {self.width})"
            raise DataError(message, cure="encode with the encoder that the index was made for")
        records = np.zeros(len(rows), _PASSAGE)
        records["owner"] = changes
        records["start"], records["end"] = np.asarray(spans, np.int64).reshape(-1, 2).T
        records["norm"] = np.linalg.norm(rows.astype(np.float32), axis=1)
        records["passages"] = 1 if passages is None else passages
        with self._writing:
            end = len(self.reader.passages) + sum(map(len, self._added))
            _write(self._files["vectors"], rows, end)
            _write(self._files["passages"], records, end)
            self._added.append(records)

    def remove(self, changes: AnyChanges) -> None:
        """Remove all passages of documents, including those that are not committed yet."""
        with self._writing:
            self._removed.append(np.asarray(changes, np.uint64))

    def commit(self) -> None:
        """Write additions and removals to disk, and make them visible to searches."""
        with self._writing:
            if not self._added and not self._removed:
                return
            passages = np.concatenate((self.reader.passages, *self._added))
            removed = np.concatenate((np.empty(0, np.uint64), *self._removed))
            gone = np.flatnonzero(np.isin(passages["owner"], removed[removed > 0]))
            passages[gone] = 0
            blocks = {*np.unique(gone // _BLOCK).tolist()}
            self._unsettle(blocks)
            self._erase(gone)
            blocks |= {*range(len(self.reader.passages) // _BLOCK, -(-len(passages) // _BLOCK))}
            sums = self._summed(len(passages), blocks, self._state["checksums"])
            self._state = {**self._state, "rows": len(passages), "checksums": sums}
            self._flush()
            self._added, self._removed = [], []
            self._show(passages, self.reader.graph)

    def _unsettle(self, blocks: set[int]) -> None:
        """Before rows are erased, remove their blocks' checksums from the state: the process may be killed
        meanwhile."""
        if blocks:
            unknown = {
                kind: [None if at in blocks else checksum for at, checksum in enumerate(sums)]
                for kind, sums in self._state["checksums"].items()
            }
            self._state = {**self._state, "checksums": unknown}
            self._flush()

    def _erase(self, rows: IntArray) -> None:
        """Overwrite rows with zeros: first vectors, then owners, since an owner of 0 marks a row as dead."""
        runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
        for kind, size in (("vectors", 2 * self.width), ("passages", _PASSAGE.itemsize)):
            for run in runs:
                for start in range(0, len(run), 4096):
                    zeros = np.zeros((len(run[start : start + 4096]), size), np.uint8)
                    _write(self._files[kind], zeros, int(run[start]))

    def _flush(self) -> None:
        for opened in self._files.values():
            os.fsync(opened)
        with replacing(self.folder / "state") as stream:
            stream.write(json.dumps(self._state).encode())

    def _show(self, passages: NDArray[Any], graph: Any) -> None:
        shape = (len(passages), self.width)
        vectors = np.memmap(self._path("vectors"), np.float16, "r", shape=shape) if len(passages) else None
        empty = np.empty(shape, np.float16)
        named = self._state["graph"]
        covered = 0 if graph is None else int(named["rows"])
        self.reader = VectorReader(empty if vectors is None else vectors, passages, graph, covered)

    # maintenance

    def maintain(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Do the next piece of slow work. Returns whether there was any.

        Compacts if half of the rows are dead; grows the graph by up to `STEP` rows if it lags. Searches,
        additions and removals continue meanwhile. Work on the graph is discarded once `stopped()` is True.
        """
        with self._maintaining:
            view = self.reader
            if len(view.passages) > 2 * int((view.passages["owner"] > 0).sum()):
                self.compact()
                return True
            return self.lags and self._grow(view, stopped)

    @property
    def lags(self) -> bool:
        """Whether the graph lacks so many rows that it has to grow."""
        view = self.reader
        return len(view.vectors) - view.covered > max(EXACT, _GROWTH * view.covered)

    def compact(self) -> None:
        """Write files without dead rows. The graph has to be built again, and growing one is abandoned.

        Additions and removals wait only while those are copied that came during the work.
        """
        self._compacting.set()
        with self._maintaining:
            self._compacting.clear()
            self.commit()
            old = self.reader
            live = np.flatnonzero(old.passages["owner"] > 0)
            if len(live) == len(old.passages):
                return
            state = {**self._state, "files": self._state["files"] + 1, "rows": 0, "graph": None}
            files = self._open_files(state)
            try:
                _copy(files["vectors"], old.vectors, live, 0)
                with self._writing:
                    self.commit()
                    added = np.arange(len(old.passages), len(self.reader.passages))
                    added = added[self.reader.passages["owner"][added] > 0]
                    _copy(files["vectors"], self.reader.vectors, added, len(live))
                    self._replace(files, state, self.reader.passages[np.concatenate((live, added))])
            except BaseException:
                if self._files is not files:
                    _close(files)
                raise

    def _replace(self, files: dict[str, int], state: dict[str, Any], passages: NDArray[Any]) -> None:
        """Switch to other files, which have the vectors of these passages already."""
        before, self._files = (self._files, self._state), files
        try:
            _write(files["passages"], passages, 0)
            self._erase(np.flatnonzero(passages["owner"] == 0))  # rows removed after the copy
            sums = self._summed(len(passages), range(-(-len(passages) // _BLOCK)), {})
            self._state = {**state, "rows": len(passages), "checksums": sums}
            self._flush()
        except BaseException:
            self._files, self._state = before
            raise
        _close(before[0])
        self._show(passages, None)
        self._forget_others()

    def _grow(self, view: VectorReader, stopped: Callable[[], bool]) -> bool:
        """Save a graph with more of the rows beside the old one, then map it in its place. Returns False if
        interrupted."""
        end = min(len(view.vectors), view.covered + STEP)
        graph = _graph(self.width)
        if view.graph is not None:
            graph.load(str(self._graph_file(view.covered)))
        rows = np.arange(view.covered, end)[view._alive[view.covered : end]]
        for start in range(0, len(rows), _CHUNK):
            if stopped() or self._compacting.is_set() or not self._files:  # no files: closed meanwhile
                return False
            chunk = rows[start : start + _CHUNK]
            graph.add(chunk.astype(np.uint64), _int8(view.vectors[chunk].astype(np.float32)), threads=1)
            time.sleep(0)  # let waiting searches run first
        with replacing(path := self._graph_file(end)) as stream:
            graph.save(stream.name)
        del graph
        checksum = _checksum(path)
        with self._writing:
            self._state = {**self._state, "graph": {"rows": end, "checksum": checksum}}
            self._flush()
            self._show(self.reader.passages, self._read_graph())
            self._forget_others()
        return True

    def _graph_file(self, rows: int) -> Path:
        return self.folder / f"graph-{self._state['files']:06d}-{rows}"

    def _read_graph(self) -> Any:
        """Map the graph. Returns None if there is none or it is damaged; it is then built again."""
        named = self._state["graph"]
        path = None if named is None else self._graph_file(named["rows"])
        if path is None or not path.exists() or named.get("checksum") not in (None, _checksum(path)):
            self._state["graph"] = None
            return None
        graph = _graph(self.width)
        graph.view(str(path))
        return graph

    def _forget_others(self) -> None:
        """Remove files that the state does not name. Readers that have mapped one can still read it."""
        named = {"state", self._path("passages").name, self._path("vectors").name}
        if self._state["graph"] is not None:
            named.add(self._graph_file(self._state["graph"]["rows"]).name)
        for path in self.folder.iterdir():
            if path.name not in named:
                path.unlink(missing_ok=True)


_CURE = "remove this folder: vectors are made again from the documents"


def _graph(width: int) -> Any:
    from usearch.index import Index

    return Index(
        ndim=width,
        metric="cos",
        dtype="i8",
        connectivity=_LINKS,
        expansion_add=_BUILD,
        expansion_search=_SEARCH,
        enable_key_lookups=False,
    )


def _int8(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    """Scale every row so that its largest absolute value is 127: angles do not depend on length."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    return np.asarray(np.round(vectors * (127 / np.maximum(largest, 1e-12))), dtype=np.int8)


def _unit(vector: NDArray[np.floating]) -> NDArray[np.float32] | None:
    """The vector scaled to length 1; None for one without direction."""
    norm = float(np.linalg.norm(vector))
    return np.asarray(vector / norm, dtype=np.float32) if norm > 0 else None


def _checksum(path: Path) -> int:
    """The CRC-32 of a file, read in pieces since it may be large."""
    checksum = 0
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 24):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _close(files: Mapping[str, int]) -> None:
    for opened in files.values():
        os.close(opened)


def _copy(opened: int, vectors: NDArray[np.float16], rows: IntArray, row: int) -> None:
    """Copy some vectors to an open file, starting at `row`."""
    for start in range(0, len(rows), 4096):
        _write(opened, vectors[rows[start : start + 4096]], row + start)


def _write(opened: int, rows: NDArray[Any], row: int) -> None:
    """Write an array to an open file, starting at `row`; remains of a failed call there are overwritten."""
    if not len(rows):
        return
    rest, at = memoryview(rows.tobytes()), row * (rows.nbytes // len(rows))
    while len(rest):
        done = os.pwrite(opened, rest, at)
        rest, at = rest[done:], at + done
