"""`Corpus`: documents, queries and judgements, dealt into silos and splits.

Ids are unique in the whole corpus, whichever silo holds a document, so one set of judgements fits every
division into silos; outside the federation a document is addressed as `silo/id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import IntArray, frozen
from isthmus.errors import DataError, several
from isthmus.tables.rankings import Qrels

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, eq=False, repr=False)
class _Columns:
    """Parallel columns, each a tuple or an array; an optional one may be empty."""

    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def _columns(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def take(self, rows: NDArray[Any]) -> Self:
        """Return the rows at these positions (integers or a mask)."""
        chosen = np.arange(len(self))[rows].tolist()
        return replace(self, **{name: _at(column, chosen) for name, column in self._columns().items()})

    def __eq__(self, other: object) -> bool:
        """Whether both have the same rows in the same order, silos included."""
        if type(self) is not type(other):
            return NotImplemented
        pairs = zip(self._columns().values(), other._columns().values(), strict=True)
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]  # equality is by content

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,})"


def _at(column: Any, rows: list[int]) -> Any:
    if isinstance(column, np.ndarray):
        return frozen(column[rows])
    return tuple(column[row] for row in rows) if column else ()


@dataclass(frozen=True, eq=False, repr=False)
class Documents(_Columns):
    """Titles and bodies in parallel columns; `silos[i]` is a position in `Corpus.silos`."""

    titles: tuple[str, ...]
    bodies: tuple[str, ...]
    silos: IntArray

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """Title and body together, as input of a full-text index."""
        pairs = zip(self.titles, self.bodies, strict=True)
        return tuple(f"{title}\n{body}" if title else body for title, body in pairs)


@dataclass(frozen=True, eq=False, repr=False)
class Queries(_Columns):
    """Query texts in parallel columns.

    `splits[i]` is one of `SPLITS`. `own` has the document from which a query was made, if any, which is
    never a candidate for it; it is empty if no query has one.
    """

    texts: tuple[str, ...]
    silos: IntArray
    splits: tuple[str, ...]
    own: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        if not any(self.own):
            object.__setattr__(self, "own", ())


@dataclass(frozen=True, eq=False, repr=False)
class Corpus:
    """A whole collection with its judgements; `silo(name)` is the part that one silo may see."""

    name: str
    documents: Documents
    queries: Queries
    qrels: Qrels
    silos: tuple[str, ...] = ("all",)

    def silo(self, name: str) -> Corpus:
        """Return the documents and queries of one silo, with its own queries' judgements."""
        if name not in self.silos:
            raise DataError(f"{self.name} has no silo {name!r}", cure=f"silos: {', '.join(self.silos)}")
        at = self.silos.index(name)
        return self._restricted(self.documents.silos == at, self.queries.silos == at)

    def split(self, name: str) -> Corpus:
        """Return all documents, with the queries of one split."""
        if name not in SPLITS:
            raise DataError(f"no split {name!r}", cure=f"splits: {', '.join(SPLITS)}")
        mask = np.array([split == name for split in self.queries.splits], dtype=bool)
        return self._restricted(np.ones(len(self.documents), dtype=bool), mask)

    def _restricted(self, documents: NDArray[np.bool_], queries: NDArray[np.bool_]) -> Corpus:
        selected = self.queries.take(queries)
        judged = [query for query in selected.ids if query in self.qrels]
        return replace(
            self, documents=self.documents.take(documents), queries=selected, qrels=self.qrels[judged]
        )

    def dealt(self, silos: Sequence[str], documents: IntArray, queries: IntArray) -> Corpus:
        """The same collection with its documents and queries in these silos."""
        return replace(
            self,
            silos=tuple(silos),
            documents=replace(self.documents, silos=frozen(np.asarray(documents, dtype=np.int64))),
            queries=replace(self.queries, silos=frozen(np.asarray(queries, dtype=np.int64))),
        )

    @cached_property
    def row_of_document(self) -> dict[str, int]:
        """The row of each document."""
        return {document: row for row, document in enumerate(self.documents.ids)}

    def address(self, document: str) -> str:
        """Return the name of a document outside the federation: `silo/id`."""
        return f"{self.silos[self.documents.silos[self.row_of_document[document]]]}/{document}"

    def __eq__(self, other: object) -> bool:
        """Whether documents, queries, judgements and silos are the same; the order of silos and names do not
        matter."""
        if not isinstance(other, Corpus):
            return NotImplemented
        if set(self.silos) != set(other.silos) or self.qrels != other.qrels:
            return False
        here = np.array([self.silos.index(silo) for silo in other.silos], dtype=np.int64)
        moved = other.dealt(self.silos, here[other.documents.silos], here[other.queries.silos])
        return self.documents == moved.documents and self.queries == moved.queries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        documents = several(len(self.documents), "document")
        queries = several(len(self.queries), "query", "queries")
        judged = several(self.qrels.rows, "judgement")
        where = "" if len(self.silos) == 1 else f", {len(self.silos)} silos ({', '.join(self.silos)})"
        return f"Corpus {self.name!r}: {documents}, {queries}, {judged}{where}"
