"""A collection dealt into silos for the experiments, with its rows in three variants of the counts.

`exact` has exact counts everywhere, which nobody may see in practice; `private` has exact counts of own
documents and released ones of all others, read by shrinking; `clipped` reads the same releases as they are,
with negative values as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.corpora import load
from isthmus.errors import DataError
from isthmus.features import FIELDS, ExactCounts
from isthmus.federation.semisupervised import Chosen, CrossSilos, CrossTables, Releasing, Views, by_rank
from isthmus.partition import move_share
from isthmus.private import CountsView
from isthmus.randomness import Streams
from isthmus.retrieval import BM25, Statistics
from isthmus.tables import Corpus, Letor
from isthmus_reproduce import synthetic_text
from isthmus_reproduce.csfltr.selection import judged_pairs
from isthmus_reproduce.deals import deal_corpus

Variant = Literal["exact", "private", "clipped"]
MEASURES = ("ERR", "nDCG@10", "nDCG", "MAP")
MOST_QUERIES = 240
"""Most queries of one world; from a larger collection every seed takes others."""


@dataclass(frozen=True)
class Case:
    """Parameters of a world; `moved` is the share placed at random: topical silos at 0, random ones at 1."""

    data: str
    seed: int = 0
    moved: float = 0.0
    silos: int = 4
    epsilon: float = 8.0
    reader: Literal["topics", "shrink"] = "topics"
    depth: int = 100
    small: bool = False
    """Whether to use fewer queries and documents, for smoke scale."""
    most: int = MOST_QUERIES
    width: int | None = None
    circular: bool = False
    """Whether labels are the paper's: ranks in an exact BM25 run over all documents.

    Ranks 1-10 have the label 2, ranks 11-100 the label 1.
    """


@cache
def collection(name: str, small: bool, circular: bool) -> Corpus:
    """Load the judged queries of a collection and its documents."""
    if name == "synthetic":
        sizes = (240, 48, 4) if small else (1600, 200, 4)
        corpus = synthetic_text.text(*sizes, words=150 if small else 300)
    else:
        corpus = load(name)
    if circular:
        corpus = by_rank(corpus, BM25().index(corpus.documents).search(corpus.queries, 100))
    judged = np.array([query in corpus.qrels for query in corpus.queries.ids], dtype=bool)
    if not judged.any():
        raise DataError(f"{name} has no judged queries", cure="name a collection with judgements")
    return replace(corpus, queries=corpus.queries.take(judged))


def dealt_corpus(case: Case) -> tuple[Corpus, Streams]:
    """Deal a case's collection into silos. Returns it with the random streams of its seed."""
    streams = Streams(case.seed).under("cross-silo", case.data)
    whole = _sampled(collection(case.data, case.small, case.circular), case, streams)
    return _dealt(whole, case, streams), streams


class DealtSilos(CrossSilos):
    """The silos of a case, with their tables in every variant."""

    measures = MEASURES

    def __init__(self, case: Case) -> None:
        self.case = case
        releasing = Releasing(epsilon=case.epsilon, reader=case.reader, width=case.width)
        super().__init__(*dealt_corpus(case), releasing)

    def exact(self, holder: str, *, noised: bool = False) -> CountsView:
        """Return a silo's documents with exact counts, for comparison; there is no noise to request."""
        fields = self.tokens[holder].items()
        return CountsView(
            self.documents[holder], {name: ExactCounts.of(own, self._whole[name]) for name, own in fields}
        )

    @cached_property
    def _whole(self) -> dict[str, Statistics]:
        parts = ({name: Statistics.of(own) for name, own in part.items()} for part in self.tokens.values())
        first, *others = parts
        return {name: sum((other[name] for other in others), first[name]) for name in FIELDS}

    @cached_property
    def tables(self) -> Mapping[Variant, VariantTables]:
        """The rows of every variant, computed on first use."""
        return _Lazy(self)


def _sampled(corpus: Corpus, case: Case, streams: Streams) -> Corpus:
    most = min(60, case.most) if case.small else case.most
    if len(corpus.queries) <= most:
        return corpus
    chosen = np.sort(streams("queries").permutation(len(corpus.queries))[:most])
    return replace(corpus, queries=corpus.queries.take(chosen))


def _dealt(corpus: Corpus, case: Case, streams: Streams) -> Corpus:
    if case.silos == 1:
        nowhere_else = (np.zeros(len(part), np.int64) for part in (corpus.documents, corpus.queries))
        return corpus.dealt(["silo1"], *nowhere_else)
    if case.moved >= 1:
        return deal_corpus(corpus, case.silos, streams, by="random")
    dealt = deal_corpus(corpus, case.silos, streams)
    parts = ((dealt.documents.ids, dealt.documents.silos), (dealt.queries.ids, dealt.queries.silos))
    return dealt.dealt(dealt.silos, *(move_share(ids, at, case.moved, case.silos) for ids, at in parts))


class _Lazy(dict[Variant, "VariantTables"]):
    def __init__(self, world: DealtSilos) -> None:
        super().__init__()
        self._world = world

    def __missing__(self, variant: Variant) -> VariantTables:
        self[variant] = VariantTables(self._world, variant)
        return self[variant]


class VariantTables(CrossTables):
    """The rows of one variant of the counts."""

    world: DealtSilos

    def __init__(self, world: DealtSilos, variant: Variant) -> None:
        self.world, self.variant = world, variant
        super().__init__(world, world.case.depth)

    def views(self, name: str) -> tuple[Views, Views]:
        """Return the views of this variant."""
        if self.variant == "exact":
            return self.world.exact, self.world.exact
        if self.variant == "clipped":
            plain = self.world.viewer(name, "plain")
            return plain, plain
        return super().views(name)

    @cached_property
    def judged(self) -> dict[str, Letor]:
        """Rows by the other sampling rule: a silo's relevant documents from any rank, and hard negatives."""
        world, tables = self.world, {}
        for name, own in world.query_rows.items():
            if not len(own):
                continue
            view, queries = self._views[name][0](name), world.queries[name]
            grades = world.truth[np.ix_(own, world.rows[name])]
            depth = 2 * int(grades.max(initial=1)) + 20
            pairs = judged_pairs(view.scores(queries, FIELDS), grades, depth)
            table = view.features(queries, pairs)
            at = np.full(len(pairs), world.names.index(name))
            nothing: NDArray[np.float64] = np.zeros(len(pairs))
            tables[name] = world.letor(name, Chosen(pairs.queries, at, pairs.documents, table, nothing))
        return tables
