"""Several retrievers as one: their results for a query are fused, and the whole is a retriever too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.errors import ConfigError
from isthmus.retrieval.retriever import Retriever, check_depth
from isthmus.tables import Queries, Run

if TYPE_CHECKING:
    from isthmus.fusion import Fuser


@dataclass(frozen=True)
class Fused:
    """Named retrievers behind one `search`.

    `fuser` is a formula's name or a fitted `Fuser`, which gives every hit a probability; it must have been
    fitted on lists of the same `depth` by the same retrievers under the same names.

    >>> from isthmus.retrieval import BM25
    >>> from isthmus.tables import Documents, Queries
    >>> import numpy as np
    >>> documents = Documents(("d1", "d2"), ("", ""), ("a red apple", "a green pear"), np.zeros(2, int))
    >>> queries = Queries(("q1",), ("green pears",), np.zeros(1, int), ("test",))
    >>> hybrid = Fused({"short": BM25(b=0).index(documents), "usual": BM25().index(documents)})
    >>> hybrid.search(queries, k=1)
    Run 'fused': 1 query, 1 row
      q1  d2 0.0327869
    """

    retrievers: Mapping[str, Retriever]
    fuser: str | Fuser = "rrf"
    depth: int = 100
    name: str = "fused"

    def __post_init__(self) -> None:
        if not self.retrievers:
            raise ConfigError("no retrievers to fuse", key="retrievers")
        check_depth(self.depth)

    def runs(self, queries: Queries) -> list[Run]:
        """The run of each retriever, down to `depth`, as needed to fit a fuser."""
        return [
            retriever.search(queries, self.depth).named(name) for name, retriever in self.retrievers.items()
        ]

    def search(self, queries: Queries, k: int) -> Run:
        """The best k documents of every query among those that any retriever returned."""
        from isthmus.fusion import fuse

        check_depth(k)
        runs = self.runs(queries)
        fused = fuse(runs, self.fuser) if isinstance(self.fuser, str) else self.fuser.fuse(runs)
        return fused.top(k).named(self.name)
