"""Laws of dealing: nothing lost or doubled, groups whole, sizes as asked, order-free determinism."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from isthmus.errors import DataError
from isthmus.partition import Deal, Dealing, balanced, deal, divide, folds, move_share
from isthmus.randomness import Streams
from isthmus.tables import Letor

seeds = st.integers(0, 2**32 - 1)


@st.composite
def tables(draw: st.DrawFn) -> Letor:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=40))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    grades = draw(st.lists(st.integers(0, 4), min_size=int(offsets[-1]), max_size=int(offsets[-1])))
    return Letor(
        queries=tuple(f"s{at % 3}/q{at}" for at in range(len(lengths))),
        offsets=offsets,
        features=np.arange(offsets[-1], dtype=np.float32)[:, None],
        grades=np.array(grades, dtype=np.int32),
    )


@given(
    tables(),
    st.sampled_from(["query", "size", "dirichlet-query", "site", "iid", "dirichlet-pair"]),
    st.integers(1, 6),
    st.floats(0.01, 100),
    seeds,
)
def test_rows_are_conserved_and_torn_is_told(
    letor: Letor, kind: str, silos: int, concentration: float, seed: int
) -> None:
    dealing = Dealing(
        kind, silos=silos, concentration=concentration, least=0 if kind == "dirichlet-pair" else None
    )
    try:
        dealt = deal(letor, dealing, Streams(seed))
    except DataError:
        assert len(letor) < silos or (kind == "site" and silos > min(3, len(letor))) or letor.rows < silos
        return
    parts = dealt.parts(letor)
    rows = np.concatenate([part.features[:, 0] for part in parts])
    assert np.array_equal(np.sort(rows), np.arange(letor.rows))
    homes = [query for part in parts for query in part.queries]
    torn = {query for query in homes if homes.count(query) > 1}
    for part in parts:
        assert part.torn == bool(torn & set(part.queries))
    if not dealing.tears:
        assert not torn
        assert all(len(part) for part in parts)
    assert dealt.label_counts(letor.grades).counts.sum() == letor.rows


@given(st.integers(1, 300), st.lists(st.floats(0.05, 1), min_size=1, max_size=8), seeds)
def test_shares_are_kept_within_one_item(count: int, shares: list[float], seed: int) -> None:
    assume(count >= len(shares))
    sizes = np.bincount(divide(count, shares, np.random.default_rng(seed)), minlength=len(shares))
    exact = np.array(shares) / sum(shares) * count
    assert sizes.sum() == count
    assert (np.abs(sizes - exact) < 1 + 1e-6).all()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(1, 6), seeds)
def test_groups_stay_whole_and_no_fold_is_empty(groups: list[int], k: int, seed: int) -> None:
    assume(len(set(groups)) >= k)
    found = folds(len(groups), k, np.random.default_rng(seed), groups=np.array(groups))
    assert len(set(zip(groups, found.tolist(), strict=True))) == len(set(groups))
    assert sorted(set(found.tolist())) == list(range(k))
    sizes = np.bincount(found)
    assert sizes.max() - sizes.min() <= np.bincount(groups).max()


@given(st.lists(st.integers(0, 5), min_size=6, max_size=200), st.integers(1, 6), seeds)
def test_strata_are_spread_evenly(strata: list[int], k: int, seed: int) -> None:
    found = folds(len(strata), k, np.random.default_rng(seed), strata=strata)
    counts = Deal(found, k).label_counts(strata).counts
    assert (counts.max(axis=0) - counts.min(axis=0)).max() <= 2
    assert counts.sum(axis=1).max() - counts.sum(axis=1).min() <= 2


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 6))
def test_greedy_balance_is_within_the_largest(sizes: list[int], silos: int) -> None:
    homes = balanced(sizes, silos)
    loads = np.bincount(homes, weights=sizes, minlength=silos)
    assert loads.max() - loads.min() <= max(sizes, default=0)


@given(st.lists(st.text(max_size=5), max_size=40), st.floats(0, 1), st.floats(0, 1), st.integers(1, 5))
def test_a_growing_share_moves_a_growing_set(names: list[str], one: float, two: float, count: int) -> None:
    small, large = sorted((one, two))
    home = np.full(len(names), -1)
    first, second = (move_share(names, home, share, count) for share in (small, large))
    assert np.array_equal(second[first >= 0], first[first >= 0])
