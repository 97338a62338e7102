"""Partition of rows, queries and documents into folds and silos.

The functions below are pure: they take labels, groups or texts and a generator, and return a `Deal` (the silo
of every item) or an array of parts. `deal` applies them to feature rows according to a `Dealing`. No item is
ever dropped or dealt twice.

If rows of one query are in different silos (deals over pairs, as in the FedRisk paper), no silo has the whole
list to rank: such parts are marked `torn`, and a listwise loss refuses them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import FloatArray, IntArray, frozen
from isthmus.config import require
from isthmus.errors import DataError
from isthmus.randomness import Streams
from isthmus.tables import Corpus, Letor

Rng = np.random.Generator


def silos_for(queries: int) -> int:
    """The default number of silos for this many queries: one for every four queries, up to 20; from 800
    queries on 100, as in the FedRisk paper.

    >>> [silos_for(queries) for queries in (1, 23, 471, 1000)]
    [1, 5, 20, 100]
    """
    return 100 if queries >= 800 else max(1, min(20, queries // 4))


@dataclass(frozen=True)
class Dealing:
    """How feature rows are dealt to silos; a section of a configuration file.

    - `query`: whole queries at random, equally many in every silo;
    - `size`: whole queries at random, with shares of the silos proportional to r^−skew for r = 1, 2, …;
    - `dirichlet-query`: whole queries, skewed by their highest grade;
    - `site`: whole queries, by the site each came from;
    - `iid`, `dirichlet-pair`: single rows, at random or skewed by their grade, which tears queries. The
      FedRisk paper deals so, with Flower's partitioner. `dirichlet-pair` draws again, up to `redraws` times,
      while a silo has fewer than `least` rows.

    Where whole queries are dealt, a silo with fewer than `least` gets queries of the largest silo. `silos`
    follows from the data unless given: the number of sites, or `silos_for` the queries. `least` is 1 query or
    10 rows unless given.
    """

    kind: Literal["query", "size", "dirichlet-query", "site", "iid", "dirichlet-pair"] = "query"
    silos: int | None = None
    concentration: float = 0.1
    skew: float = 1.0
    least: int | None = None
    redraws: int = 10

    def __post_init__(self) -> None:
        some = self.silos is None or self.silos >= 1
        require(some, f"silos = {self.silos} (at least one silo is needed)")
        require(self.concentration > 0, f"concentration = {self.concentration} (it must be positive)")
        least = min(self.skew, self.redraws, self.least or 0)
        require(least >= 0, "skew, redraws and least cannot be negative")

    @property
    def tears(self) -> bool:
        """Whether rows of one query may go to different silos."""
        return self.kind in ("iid", "dirichlet-pair")


class LabelCounts(NamedTuple):
    """How often every silo has every label: `counts[silo, at]` is for `labels[at]`."""

    labels: NDArray[Any]
    counts: IntArray


@dataclass(frozen=True, eq=False, repr=False)
class Deal:
    """The silo of every item: `holders[i]`, out of `silos`, has item i."""

    holders: IntArray
    silos: int

    def __len__(self) -> int:
        """The number of silos."""
        return self.silos

    @cached_property
    def sizes(self) -> IntArray:
        """The number of items in every silo."""
        return np.bincount(self.holders, minlength=self.silos)

    def members(self, silo: int) -> IntArray:
        """The items of one silo, in their original order."""
        end = int(np.cumsum(self.sizes)[silo])
        return self._by_silo[end - int(self.sizes[silo]) : end]

    @cached_property
    def _by_silo(self) -> IntArray:
        return np.argsort(self.holders, kind="stable")

    def following(self, groups: IntArray) -> Deal:
        """The deal of things that go with their group, such as rows with their query: `groups[i]` is the
        group of thing i."""
        return Deal(frozen(self.holders[groups]), self.silos)

    def label_counts(self, labels: ArrayLike) -> LabelCounts:
        """The number of items by silo and label: the data of a stacked bar chart, one bar per silo."""
        values, codes = np.unique(np.asarray(labels), return_inverse=True)
        cells = np.bincount(self.holders * len(values) + codes, minlength=self.silos * len(values))
        return LabelCounts(values, cells.reshape(self.silos, len(values)))

    def part(self, letor: Letor, silo: int) -> Letor:
        """The part of one silo in a table whose rows were dealt."""
        rows = self.members(silo)
        groups = letor.query_of_row[rows]
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        offsets = np.append(starts, len(rows))
        present = groups[starts]
        torn = not np.array_equal(np.diff(offsets), np.diff(letor.offsets)[present])
        return Letor(
            queries=tuple(letor.queries[query] for query in present.tolist()),
            offsets=frozen(offsets),
            features=frozen(letor.features[rows]),
            grades=frozen(letor.grades[rows]),
            # None: whole queries keep their generated document names, which take no memory
            documents=letor.ids[rows] if torn or letor.documents is not None else None,
            name=letor.name,
            torn=torn or letor.torn,
        )

    def parts(self, letor: Letor) -> list[Letor]:
        """The part of every silo in a table whose rows were dealt."""
        return [self.part(letor, silo) for silo in range(self.silos)]

    def __repr__(self) -> str:
        low, high = (int(self.sizes.min()), int(self.sizes.max())) if self.silos else (0, 0)
        return f"Deal: {len(self.holders):,} items to {self.silos:,} silos, {low:,} to {high:,} each"


def deal(letor: Letor, dealing: Dealing, streams: Streams, *, sites: Sequence[str] | None = None) -> Deal:
    """Deal the rows of a table; `.parts(letor)` then returns the part of every silo.

    `sites` has the site of every query; by default it is the text before the first `/` of the query's id.
    """
    rng = streams("partition", dealing.kind)
    named = () if dealing.kind != "site" else _sites(letor) if sites is None else sites
    silos = dealing.silos or len(set(named)) or silos_for(len(letor))
    _check_enough(letor, dealing, silos)
    if dealing.kind == "iid":
        return Deal(divide(letor.rows, np.ones(silos), rng), silos)
    if dealing.kind == "dirichlet-pair":
        least = 10 if dealing.least is None else dealing.least
        return dirichlet(letor.grades, silos, dealing, rng, least=least)
    if dealing.kind == "site":
        queries = by_site(named, silos)
    elif dealing.kind == "dirichlet-query":
        order = rng.permutation(len(letor))  # otherwise neighbours in the file would stay together
        shuffled = dirichlet(highest_grades(letor)[order], silos, dealing, rng, least=0)
        queries = Deal(shuffled.holders[np.argsort(order)], silos)
    else:
        skew = dealing.skew if dealing.kind == "size" else 0.0
        shares = rng.permutation(np.arange(1, silos + 1) ** -skew)
        queries = Deal(divide(len(letor), shares, rng), silos)
    least = 1 if dealing.least is None else dealing.least
    return _filled(queries, least, rng).following(letor.query_of_row)


def _check_enough(letor: Letor, dealing: Dealing, silos: int) -> None:
    """Raise DataError for more silos than there are queries, or rows, to give one to each."""
    items, unit = (letor.rows, "rows") if dealing.tears else (len(letor), "queries")
    if items < silos:
        raise DataError(
            f"{items:,} {unit} cannot be dealt to {silos:,} silos",
            cure=f"deal to at most {items:,} silos" if items else "bring training queries",
        )


def highest_grades(letor: Letor) -> IntArray:
    """The highest grade of every query, the class of a query; 0 for one without documents."""
    highest = np.zeros(len(letor), dtype=np.int64)
    np.maximum.at(highest, letor.query_of_row, letor.grades)
    return highest


def dirichlet(labels: NDArray[Any], silos: int, dealing: Dealing, rng: Rng, *, least: int) -> Deal:
    """Deal items with a label skew: for every label, shares over silos ~ Dirichlet(concentration).

    A silo's items of one label are adjacent in the given order. While a silo has fewer than `least` items,
    all items are dealt again, `dealing.redraws` times at most; after that it raises DataError.
    """
    codes = np.unique(labels, return_inverse=True)[1]
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    weights = np.full(silos, dealing.concentration)
    smallest = 0
    for _ in range(dealing.redraws + 1):
        holders = np.empty(len(codes), dtype=np.int64)
        for items in members if len(codes) else []:
            ends = (np.cumsum(rng.dirichlet(weights)) * len(items)).astype(np.int64)[:-1]
            holders[items] = np.searchsorted(ends, np.arange(len(items)), side="right")
        smallest = int(np.bincount(holders, minlength=silos).min())
        if smallest >= least:
            return Deal(frozen(holders), silos)
    raise DataError(
        f"{len(codes):,} items dealt to {silos} silos with concentration {dealing.concentration:g}: "
        f"in {dealing.redraws + 1} draws the smallest silo never had {least} (in the last it had {smallest})",
        cure="raise the concentration, deal to fewer silos, or lower the minimum",
    )


def by_site(sites: Sequence[str], silos: int) -> Deal:
    """Deal whole sites to silos, the largest first, each to the silo that has the fewest items so far.

    With as many silos as sites, every site is a silo, in the order of their names.
    """
    names, codes = np.unique(np.asarray(sites, dtype=np.str_), return_inverse=True)
    if len(names) < silos:
        raise DataError(
            f"{len(names)} sites cannot be dealt to {silos} silos", cure=f"deal to at most {len(names)} silos"
        )
    if len(names) == silos:
        return Deal(frozen(codes), silos)
    return Deal(frozen(balanced(np.bincount(codes), silos)[codes]), silos)


def balanced(sizes: ArrayLike, silos: int) -> IntArray:
    """The silo of every group: the largest first, each to the silo with the least so far (longest processing
    time)."""
    counts = np.asarray(sizes, dtype=np.int64)
    loads = np.zeros(silos, dtype=np.int64)
    homes = np.empty(len(counts), dtype=np.int64)
    for group in np.argsort(-counts, kind="stable").tolist():
        homes[group] = loads.argmin()
        loads[homes[group]] += counts[group]
    return homes


def divide(
    count: int,
    shares: ArrayLike,
    rng: Rng,
    *,
    groups: IntArray | None = None,
    strata: ArrayLike | None = None,
) -> IntArray:
    """The part of every item, at random, with part sizes in proportion to `shares`.

    Items of one group stay together. With `strata` every part gets its share of every stratum, as nearly as
    groups allow; a group's stratum is that of its first item.
    """
    portions = np.asarray(shares, dtype=np.float64) / np.sum(shares)
    group_of = np.arange(count) if groups is None else np.unique(groups, return_inverse=True)[1]
    firsts = np.unique(group_of, return_index=True)[1]
    if len(firsts) < len(portions):
        unit = "items" if groups is None else "groups that stay together"
        raise DataError(
            f"{len(firsts)} {unit} cannot be dealt into {len(portions)} parts", cure="make fewer parts"
        )
    sizes = np.bincount(group_of)
    stratum_of = np.zeros(len(firsts), np.int64)
    if strata is not None:
        stratum_of = np.unique(np.asarray(strata)[firsts], return_inverse=True)[1]
    parts = np.empty(len(firsts), dtype=np.int64)
    owed = np.zeros(len(portions))
    for stratum in range(int(stratum_of.max(initial=0)) + 1):
        members = rng.permutation(np.flatnonzero(stratum_of == stratum))
        owed += portions * sizes[members].sum()
        parts[members], assigned = _fill(sizes[members], owed)
        owed = owed - assigned
    return parts[group_of]


def _fill(sizes: IntArray, owed: FloatArray) -> tuple[IntArray, IntArray]:
    """Give groups to parts that are owed these numbers of items. Returns (part of each group, items given to
    each part)."""
    assigned = np.zeros(len(owed), dtype=np.int64)
    parts = np.empty(len(sizes), dtype=np.int64)
    large = np.flatnonzero(sizes > 1)
    for group in large[np.argsort(-sizes[large], kind="stable")].tolist():
        parts[group] = (owed - assigned).argmax()
        assigned[parts[group]] += sizes[group]
    single = np.flatnonzero(sizes == 1)
    counts = _apportioned(owed - assigned, len(single))
    parts[single] = np.repeat(np.arange(len(owed)), counts)
    return parts, assigned + counts


def _apportioned(owed: FloatArray, total: int) -> IntArray:
    """Whole numbers that sum to `total`, in proportion to `owed` (largest remainders)."""
    claims = np.maximum(owed, 0.0)
    exact = claims * (total / claims.sum()) if claims.sum() > 0 else np.full(len(owed), total / len(owed))
    counts = np.floor(exact + 1e-9).astype(np.int64)
    short = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    return counts


def _filled(queries: Deal, least: int, rng: Rng) -> Deal:
    """The same deal, except that silos with fewer than `least` items get some of the silo with the most."""
    if len(queries.holders) < least * queries.silos:
        raise DataError(
            f"{len(queries.holders):,} queries cannot give {queries.silos:,} silos {least} each",
            cure="deal to fewer silos or lower the minimum",
        )
    holders, sizes = queries.holders.copy(), queries.sizes.copy()
    for silo in np.flatnonzero(sizes < least).tolist():
        while sizes[silo] < least:
            richest = int(sizes.argmax())
            holders[rng.choice(np.flatnonzero(holders == richest))] = silo
            sizes[richest] -= 1
            sizes[silo] += 1
    return Deal(frozen(holders), queries.silos)


def _sites(letor: Letor) -> list[str]:
    sites = [query.partition("/") for query in letor.queries]
    bare = next((name for name, slash, _ in sites if not slash), None)
    if bare is not None:
        raise DataError(
            f"query {bare!r} does not say which site it is from",
            cure="name queries site/id, or pass the site of every query",
        )
    return [site for site, _, _ in sites]


def folds(
    count: int, k: int, rng: Rng, *, groups: IntArray | None = None, strata: ArrayLike | None = None
) -> IntArray:
    """The fold, 0 to k−1, of every item; groups stay together, strata are spread evenly."""
    return divide(count, np.ones(k), rng, groups=groups, strata=strata)


def move_share(names: Sequence[str], silos: IntArray, share: float, count: int) -> IntArray:
    """Move a share of the names to random silos: from topical silos (share 0) to random ones (share 1). A
    name that moves goes to a silo chosen by a hash of the name.

    Which names move, and where, depends on the names alone, so a growing share moves a growing set.
    """
    if not 0 <= share <= 1:
        raise DataError(f"a share of {share} cannot move", cure="choose a share from 0 to 1")
    digests = b"".join(hashlib.blake2b(name.encode(), digest_size=16).digest() for name in names)
    hashes = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    moves = hashes[:, 0] / 2.0**64 < share
    return np.where(moves, (hashes[:, 1] % np.uint64(count)).astype(np.int64), silos)


def linked_queries(corpus: Corpus) -> IntArray:
    """The group of every query: queries made from documents that judgements link are in one group.

    Groups are connected components of the graph of judged links; a query that was made from no document is a
    group of its own.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    own, place = corpus.queries.own, corpus.row_of_document
    if not own:
        return np.arange(len(corpus.queries))
    sources = {query: place[name] for query, name in zip(corpus.queries.ids, own, strict=True) if name}
    judged = zip(corpus.qrels.query_of_row.tolist(), corpus.qrels.documents.tolist(), strict=True)
    edges = [(sources.get(corpus.qrels.queries[query]), place.get(name)) for query, name in judged]
    rows = np.array([edge for edge in edges if None not in edge], dtype=np.int64).reshape(-1, 2)
    size = len(corpus.documents)
    graph = coo_array((np.ones(len(rows)), rows.T), shape=(size, size))
    component = connected_components(graph, directed=False)[1]
    alone = enumerate(corpus.queries.ids, start=size)
    return np.array([component[sources[query]] if query in sources else number for number, query in alone])
