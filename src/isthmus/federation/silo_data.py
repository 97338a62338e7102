"""Access to a silo's rows: in memory, in files that workers share, or in the silo's own folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from mmap import mmap
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import frozen
from isthmus.errors import DataError, FederationError
from isthmus.federation.flower import Context
from isthmus.rankers import Scaling
from isthmus.tables import Column, Letor, open_columns, write_columns

_RAW, _BEING_WRITTEN, _SCALED = range(3)


class SiloData(Protocol):
    """Access to the tables of silos."""

    def name(self, context: Context) -> str:
        """The name of the silo that this context belongs to."""

    def table(self, context: Context) -> Letor:
        """The silo's rows as they are stored."""

    def scaled(self, context: Context, scaling: Scaling) -> Letor:
        """The silo's rows under a scaling."""


class Tables:
    """Simulated silos in memory, by partition.

    Features that will be scaled are copied into memory that forked workers share, and are scaled there, in
    place: the worker that first serves a silo does it for all workers.
    """

    def __init__(self, tables: Sequence[Letor], *, scaling: str = "") -> None:
        self._tables = list(tables)
        self._shared = [] if scaling == "none" else [_shared(table.features) for table in tables]
        for at, features in enumerate(self._shared):
            self._tables[at] = replace(self._tables[at], features=frozen(features))
        self._stages = np.frombuffer(mmap(-1, max(1, len(self._tables))), np.uint8)
        self._scaling: Scaling | None = None

    def name(self, context: Context) -> str:
        """`silo-07`: the partition's number, with zeros so that names sort like numbers."""
        return silo_name(context)

    def table(self, context: Context) -> Letor:
        """The rows of the partition in their current state: raw, or scaled after a call of `scaled`."""
        return self._tables[_place(context)]

    def scaled(self, context: Context, scaling: Scaling) -> Letor:
        """The rows of the partition, scaled at the first call."""
        if scaling.kind == "none":
            return self.table(context)
        at, known = _place(context), self._scaling or scaling
        self._scaling = known
        same = (np.array_equal(array, known.arrays()[name]) for name, array in scaling.arrays().items())
        if (scaling.kind, scaling.width) != (known.kind, known.width) or not all(same):
            raise FederationError("the feature scaling changed during training")
        if self._stages[at] == _RAW:
            features = scaling(self._tables[at]).features
            self._stages[at] = _BEING_WRITTEN
            self._shared[at][:] = features
            self._stages[at] = _SCALED
        if self._stages[at] != _SCALED:
            raise FederationError("the silo's rows were being scaled when their worker was lost")
        return self._tables[at]


class Files:
    """Simulated silos in a folder of columns, by partition, shared by workers in other processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def write(cls, tables: Sequence[Letor], folder: Path) -> Files:
        """Write the tables into the folder."""
        for at, table in enumerate(tables):
            columns = {
                "features": Column.of(table.features),
                "grades": Column.of(table.grades),
                "offsets": Column.of(table.offsets),
            }
            write_columns(folder / str(at), columns, {"queries": table.queries, "torn": table.torn})
        return cls(folder)

    def name(self, context: Context) -> str:
        """The name of the simulated silo."""
        return silo_name(context)

    def table(self, context: Context) -> Letor:
        """The rows of the partition, memory-mapped."""
        return _mapped(self._folder / str(_place(context)))

    def scaled(self, context: Context, scaling: Scaling) -> Letor:
        """The rows of the partition, scaled."""
        return scaling(self.table(context))


@lru_cache(maxsize=256)
def _mapped(path: Path) -> Letor:
    opened = open_columns(path)
    if opened is None:
        raise DataError("the silo's rows are gone", file=path)
    about, columns = opened
    return Letor(
        tuple(about["queries"]),
        columns["offsets"],
        features=columns["features"],
        grades=columns["grades"],
        torn=about["torn"],
    )


def _shared(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Copy an array into memory that forked processes share."""
    copy = np.frombuffer(mmap(-1, max(1, array.nbytes)), array.dtype, array.size).reshape(array.shape)
    copy[:] = array
    return copy


def silo_name(context: Context) -> str:
    """The name of a simulated silo: `silo-07` of a hundred."""
    digits = len(str(int(context.node_config["num-partitions"]) - 1))
    return f"silo-{_place(context):0{digits}}"


def _place(context: Context) -> int:
    return int(context.node_config["partition-id"])
