"""Saved rankers: one zip of a JSON header and plain arrays or a tree library's own text. No pickle.

    header.json      {"format": "isthmus ranker", "version": 1, "kind": "network", …}
    weight0.npy …    arrays, read with allow_pickle=False
    model.json …     whatever text the kind names

The same ranker always gives the same bytes, and a file is replaced whole or not at all.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError
from isthmus.tables.files import replacing

FORMAT = "isthmus ranker"
VERSION = 1


@dataclass(frozen=True)
class Saved:
    """What a ranker's file holds."""

    header: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: str | PathLike[str]) -> None:
        """Write the file atomically."""
        header = {"format": FORMAT, "version": VERSION, **self.header}
        with replacing(path) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bundle:
            _add(bundle, "header.json", json.dumps(header, indent=1).encode())
            for name, array in self.arrays.items():
                content = io.BytesIO()
                np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
                _add(bundle, f"{name}.npy", content.getvalue())
            for name, text in self.texts.items():
                _add(bundle, name, text.encode())

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Saved:
        """Read a file back; anything that is not a ranker of a known version is a DataError."""
        try:
            with zipfile.ZipFile(path) as bundle:
                parts = {name: bundle.read(name) for name in bundle.namelist()}
            header = json.loads(parts.pop("header.json"))
            _check_header(header, path)
            arrays = {
                name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(part), allow_pickle=False)
                for name, part in parts.items()
                if name.endswith(".npy")
            }
            texts = {name: part.decode() for name, part in parts.items() if not name.endswith(".npy")}
        except OSError as error:
            raise DataError(
                f"cannot be read: {error.strerror or error}", file=path, cure="check the path"
            ) from error
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                "is not a saved ranker", file=path, text=str(error), cure="train or copy it again"
            ) from error
        return cls(header, arrays, texts)


def _add(bundle: zipfile.ZipFile, name: str, content: bytes) -> None:
    """With zip's earliest date instead of now, so that equal rankers are equal files."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    bundle.writestr(entry, content)


def _check_header(header: Any, path: str | PathLike[str]) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise DataError("is not a saved ranker", file=fspath(path))
    if header.get("version") != VERSION:
        raise DataError(
            f"has ranker format {header.get('version')} and this Isthmus reads {VERSION}",
            file=fspath(path),
            cure="use the Isthmus that wrote it, or train again",
        )
