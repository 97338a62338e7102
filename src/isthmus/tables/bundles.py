"""Reads packed data from elsewhere, counting every byte before it is allocated, and saves models of every
kind.

    unpacker = Unpacker(1 << 20)            the budget of one message or file, all its parts together
    unpacker.json(data)                     counted by the memory that its values take
    unpacker.array(stream, size)            an npy file: its declared shape and type must be its size exactly

A small message can declare anything. The declared size is first compared with the message's own size and
with the budget; if it exceeds either, a DataError is raised before anything is allocated.

A saved model is one zip of a JSON header, plain arrays and texts, without pickle:

    header.json      {"format": "isthmus ranker", "version": 1, …}
    weight0.npy …    arrays, read with allow_pickle=False
    model.json …     texts, with names that the kind chooses

The same model always gives the same bytes, and a file is replaced whole or not at all.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from typing import IO, Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError, ProtocolError
from isthmus.files import replacing

PLAIN = "biuf"
"""Kinds of number that an array may have; with "U", also text of a fixed width."""
A_VALUE = 100
"""The most bytes that a list, a mapping or a text of JSON takes beside its characters."""
_CHUNK = 1 << 20
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_END = struct.Struct("<4s4H2LH")
_LOCATOR, _LONGEST_DIRECTORY = 20, 1 << 20


@dataclass(frozen=True)
class Declared:
    """The header of an npy file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    size: int
    """Bytes of the values."""


class Unpacker:
    """The budget of bytes to which one message or file may unpack."""

    def __init__(self, most: int) -> None:
        self.most, self._left = most, most

    def spend(self, size: int) -> None:
        """Count bytes that are about to be allocated. Raises DataError if the budget has fewer left."""
        if size > self._left:
            raise DataError(f"unpacks to more than {self.most:,} bytes")
        self._left -= size

    def whole(self, stream: IO[bytes], size: int) -> bytes:
        """Read the whole stream, which must have this size. Raises DataError if it is shorter."""
        self.spend(size)
        content = stream.read(size)
        if len(content) != size:
            raise DataError("is cut")
        return content

    def weigh_json(self, data: bytes) -> None:
        """Count a JSON text that another parser reads.

        Values count, not only characters: an empty list is two characters and sixty bytes.
        """
        values = sum(data.count(mark) for mark in (b",", b":", b"[", b"{"))
        self.spend(2 * len(data) + A_VALUE * values)

    def json(self, data: bytes) -> Any:
        """Parse a JSON text. Raises DataError if it is nested too deeply or exceeds the budget."""
        self.weigh_json(data)
        try:
            return json.loads(data)
        except RecursionError:
            raise DataError("is nested too deeply") from None

    def array(self, stream: IO[bytes], size: int, *, kinds: str = PLAIN) -> NDArray[Any]:
        """Read the array in an npy file of this size."""
        known = read_declared(stream, size, kinds=kinds)
        self.spend(known.size)
        array = np.empty(math.prod(known.shape), known.dtype)
        octets = array.view(np.uint8)
        for start in range(0, known.size, _CHUNK):
            part = stream.read(min(_CHUNK, known.size - start))
            if len(part) != min(_CHUNK, known.size - start):
                raise DataError("is cut")
            octets[start : start + len(part)] = np.frombuffer(part, np.uint8)
        return array.reshape(known.shape, order="F" if known.is_fortran else "C")


def read_declared(stream: IO[bytes], size: int, *, kinds: str = PLAIN) -> Declared:
    """Read the header of an npy file of this size, up to the start of the values."""
    start = stream.tell()
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise DataError(f"has an array of version {version}")
    shape, is_fortran, dtype = _HEADERS[version](stream)
    if dtype.kind not in kinds or not dtype.itemsize or any(side < 0 for side in shape):
        raise DataError(f"has an array of {dtype}")
    values = math.prod(shape) * dtype.itemsize
    if values != size - (stream.tell() - start):
        raise DataError("has an array of another size than it declares")
    return Declared(shape, dtype, is_fortran, values)


def check_directory(stream: IO[bytes]) -> None:
    """Raise DataError for a zip with a long list of entries: `zipfile` would read all of it before it can be
    checked.

    A file written here has neither a comment nor more entries than 16 bits can count, so its end record is
    its last 22 bytes.
    """
    size = stream.seek(0, 2)
    stream.seek(max(0, size - _END.size - _LOCATOR))
    tail = stream.read()
    stream.seek(0)
    if len(tail) < _END.size:
        raise DataError("is no zip")
    mark, *_, length, _, comment = _END.unpack(tail[-_END.size :])
    if mark != b"PK\x05\x06" or comment or tail[:4] == b"PK\x06\x07" or length > _LONGEST_DIRECTORY:
        raise DataError("is no zip, or one with too many parts")


T = TypeVar("T")
_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, AttributeError, EOFError),
    *(NotImplementedError, RuntimeError, MemoryError),  # if a zip or array claims the impossible
)


OWN = 1 << 40
"""Budget in bytes for a kind that only its writer reads, whose collection may have any size."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_KINDS = PLAIN + "U"


@dataclass(frozen=True)
class Bundle:
    """The content of a model's file; a subclass names the kind of model and the version that it reads and
    writes."""

    noun: ClassVar[str] = "model"
    version: ClassVar[int] = 1
    most: ClassVar[int] = 1 << 30
    """Bytes that a file of this kind may unpack to."""

    header: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: str | PathLike[str], *, private: bool = False) -> None:
        """Write the file atomically; if `private`, only its owner can read it."""
        with replacing(path, private=private) as stream:
            self._fill(stream)

    def to_bytes(self) -> bytes:
        """Return the file's content, to be sent elsewhere."""
        content = io.BytesIO()
        self._fill(content)
        return content.getvalue()

    def _fill(self, stream: IO[bytes]) -> None:
        header = {"format": f"isthmus {self.noun}", "version": self.version, **self.header}
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bundle:
            _add(bundle, "header.json", json.dumps(header, indent=1).encode())
            for name, array in self.arrays.items():
                content = io.BytesIO()
                np.lib.format.write_array(content, np.asarray(array, order="C"), allow_pickle=False)
                _add(bundle, f"{name}.npy", content.getvalue())
            for name, text in self.texts.items():
                _add(bundle, name, text.encode())

    @classmethod
    def read(cls, path: str | PathLike[str] | io.BytesIO, *, most: int | None = None) -> Self:
        """Read a file. Raises DataError unless it is such a model of the known version.

        Data from elsewhere are passed as a stream. In total they may unpack to `most` bytes, by default
        those of the kind, and declared sizes are checked before allocation.
        """
        return cls.restore(path, lambda saved: saved, most=most)

    @classmethod
    def receive(cls, data: bytes, build: Callable[[Self], T], *, most: int | None = None) -> T:
        """As `restore`, for bytes received over the network. Raises ProtocolError for anything else."""
        try:
            return cls.restore(io.BytesIO(data), build, most=most)
        except DataError as error:
            raise ProtocolError(f"{cls.noun}: not of a known form") from error

    @classmethod
    def restore(
        cls, path: str | PathLike[str] | io.BytesIO, build: Callable[[Self], T], *, most: int | None = None
    ) -> T:
        """Read a file and return `build` of it. Raises DataError also if `build` misses something in it."""
        file = "the message" if isinstance(path, io.BytesIO) else fspath(path)
        try:
            with open(path, "rb") if not isinstance(path, io.BytesIO) else path as stream:
                return build(cls._unpacked(stream, Unpacker(cls.most if most is None else most), file))
        except OSError as error:
            raise DataError.unreadable(file, error) from error
        except _DAMAGED as error:
            if isinstance(error, DataError) and error.file is not None:
                raise
            raise DataError(
                f"is not a saved {cls.noun}", file=file, text=str(error), cure="train or copy it again"
            ) from error

    @classmethod
    def _unpacked(cls, stream: IO[bytes], unpacker: Unpacker, file: str) -> Self:
        if unpacker.most < zipfile.ZIP64_LIMIT:
            check_directory(stream)
        with zipfile.ZipFile(stream) as bundle:
            entries = {entry.filename: entry for entry in bundle.infolist()}
            if any(entry.compress_type not in _METHODS for entry in entries.values()):
                raise DataError("is packed in a way that nobody here packs")
            header = unpacker.json(_read(bundle, entries.pop("header.json"), unpacker.whole))
            cls._check_header(header, file)
            files = {name: entry for name, entry in entries.items() if name.endswith(".npy")}
            declare, load = partial(read_declared, kinds=_KINDS), partial(unpacker.array, kinds=_KINDS)
            declared = {name.removesuffix(".npy"): _read(bundle, files[name], declare) for name in files}
            cls.check(header, declared)
            arrays = {name: _read(bundle, files[f"{name}.npy"], load) for name in declared}
            others = {name: entry for name, entry in entries.items() if name not in files}
            texts = {name: _read(bundle, entry, unpacker.whole).decode() for name, entry in others.items()}
        return cls(header, arrays, texts)

    @classmethod
    def check(cls, header: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        """Raise DataError or ValueError if the arrays are not those that a reader of this kind expects.

        Their values have not been read yet.
        """

    @classmethod
    def _check_header(cls, header: Any, file: str) -> None:
        if not isinstance(header, dict) or header.get("format") != f"isthmus {cls.noun}":
            raise DataError(f"is not a saved {cls.noun}", file=file)
        if header.get("version") != cls.version:
            raise DataError(
                f"has {cls.noun} format {header.get('version')} and this Isthmus reads {cls.version}",
                file=file,
                cure="use the Isthmus that wrote it, or train again",
            )


def _read(bundle: zipfile.ZipFile, entry: zipfile.ZipInfo, read: Callable[[IO[bytes], int], T]) -> T:
    with bundle.open(entry) as stream:
        return read(stream, entry.file_size)


def _add(bundle: zipfile.ZipFile, name: str, content: bytes) -> None:
    """Add an entry with zip's earliest date instead of now, so that equal models are equal files."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    bundle.writestr(entry, content)
