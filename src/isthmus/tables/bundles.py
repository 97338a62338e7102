"""Saved models of every kind: one zip of a JSON header, plain arrays and texts. No pickle.

    header.json      {"format": "isthmus ranker", "version": 1, …}
    weight0.npy …    arrays, read with allow_pickle=False
    model.json …     whatever text the kind names

The same model always gives the same bytes, and a file is replaced whole or not at all.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import IO, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError
from isthmus.tables.files import replacing

_DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError),
    *(NotImplementedError, RuntimeError, MemoryError),  # what a zip or an array may claim and nobody can do
)


@dataclass(frozen=True)
class Bundle:
    """What a model's file holds; a subclass names what it is and the version it reads and writes."""

    noun: ClassVar[str] = "model"
    version: ClassVar[int] = 1

    header: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the file atomically."""
        with replacing(path) as stream:
            self._fill(stream)

    def to_bytes(self) -> bytes:
        """The file's content, for somebody who is not at this disk."""
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
        """Read a file back; anything that is not such a model of the known version is a DataError.

        What comes from elsewhere is given as a stream, and `most` bytes is what it may unpack to.
        """
        file = "the message" if isinstance(path, io.BytesIO) else fspath(path)
        try:
            parts = _unpacked(path, most)
            header = json.loads(parts.pop("header.json"))
            cls._check_header(header, file)
            arrays = {
                name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(part), allow_pickle=False)
                for name, part in parts.items()
                if name.endswith(".npy")
            }
            texts = {name: part.decode() for name, part in parts.items() if not name.endswith(".npy")}
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror or error}", file=file, cure="check the path"
            ) from error
        except _DAMAGED as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"is not a saved {cls.noun}", file=file, text=str(error), cure="train or copy it again"
            ) from error
        return cls(header, arrays, texts)

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


def _unpacked(path: str | PathLike[str] | io.BytesIO, most: int | None) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as bundle:
        if most is not None and sum(entry.file_size for entry in bundle.infolist()) > most:
            raise DataError(f"unpacks to more than {most:,} bytes")
        return {name: bundle.read(name) for name in bundle.namelist()}


def _add(bundle: zipfile.ZipFile, name: str, content: bytes) -> None:
    """With zip's earliest date instead of now, so that equal models are equal files."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    bundle.writestr(entry, content)
