"""Dealing: who holds what, with nothing lost, nothing doubled, and torn queries told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus import config
from isthmus.corpora import load_folds
from isthmus.errors import ConfigError, DataError
from isthmus.partition import (
    Deal,
    Dealing,
    balanced,
    by_site,
    deal,
    dirichlet,
    divide,
    folds,
    highest_grades,
    move_share,
)
from isthmus.randomness import Streams
from isthmus.tables import Letor


def table(queries: int = 200, documents: int = 12, seed: int = 0) -> Letor:
    """Grades 0..4, skewed; the one feature is the row's number."""
    rng = np.random.default_rng(seed)
    rows = queries * documents
    return Letor(
        queries=tuple(f"{'north' if at % 3 else 'south'}/q{at}" for at in range(queries)),
        offsets=np.arange(queries + 1) * documents,
        features=np.arange(rows, dtype=np.float32)[:, None],
        grades=rng.choice(5, size=rows, p=[0.52, 0.32, 0.13, 0.02, 0.01]).astype(np.int32),
    )


def rows_of(part: Letor) -> list[int]:
    return part.features[:, 0].astype(int).tolist()


KINDS = ["query", "size", "dirichlet-query", "site", "iid", "dirichlet-pair"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_dealt_once_and_in_order(kind: str) -> None:
    letor = table()
    dealing = Dealing(kind, silos=2 if kind == "site" else 10, concentration=0.5)
    parts = deal(letor, dealing, Streams(1)).parts(letor)
    assert sorted(row for part in parts for row in rows_of(part)) == list(range(letor.rows))
    for part in parts:
        rows = rows_of(part)
        assert rows == sorted(rows)
        assert part.grades.tolist() == letor.grades[rows].tolist()
        assert part.ids.tolist() == [letor.ids.word(row) for row in rows]
        assert [part.queries[at] for at in part.query_of_row] == [
            letor.queries[at] for at in letor.query_of_row[rows]
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_deals_the_same(kind: str) -> None:
    letor, dealing = table(), Dealing(kind, silos=2, concentration=0.5)
    first = deal(letor, dealing, Streams(3)).holders
    assert np.array_equal(first, deal(letor, dealing, Streams(3)).holders)
    if kind != "site":
        assert not np.array_equal(first, deal(letor, dealing, Streams(4)).holders)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_say_whether_they_are_torn(kind: str) -> None:
    letor, dealing = table(), Dealing(kind, silos=2, concentration=0.5)
    dealt = deal(letor, dealing, Streams(3))
    assert all(part.torn == dealing.tears for part in dealt.parts(letor))
    if dealing.tears:
        assert "torn queries" in repr(dealt.part(letor, 0))


def test_a_torn_table_stays_torn_when_dealt_again() -> None:
    letor = table()
    torn = deal(letor, Dealing("iid", silos=2), Streams(3)).part(letor, 0)
    assert deal(torn, Dealing("query", silos=2), Streams(3)).part(torn, 0).torn


def test_documents_keep_their_names() -> None:
    from isthmus.arrays import Ids

    letor = table(4, 2)
    named = Letor(
        letor.queries, letor.offsets, letor.features, letor.grades, Ids.of([f"d{row}" for row in range(8)])
    )
    part = deal(named, Dealing("query", silos=2), Streams(0)).part(named, 1)
    assert part.ids.tolist() == [f"d{row}" for row in rows_of(part)]


def test_by_query_is_even() -> None:
    sizes = deal(table(205), Dealing("query", silos=10), Streams(1)).sizes // 12
    assert sorted(sizes.tolist()) == [20] * 5 + [21] * 5


def test_size_skew_follows_a_power_law() -> None:
    sizes = deal(table(1000, 1), Dealing("size", silos=4, skew=1.0), Streams(1)).sizes
    assert sorted(sizes.tolist(), reverse=True) == [480, 240, 160, 120]
    sizes = deal(table(1000, 1), Dealing("size", silos=20, skew=4.0, least=5), Streams(1)).sizes
    assert sizes.min() == 5
    assert sizes.max() > 800


def test_dirichlet_over_queries_skews_the_highest_grade() -> None:
    letor = table(2000, 4)
    grades = highest_grades(letor)
    assert grades.tolist() == letor.grades.reshape(-1, 4).max(axis=1).tolist()

    def spread(concentration: float) -> float:
        dealing = Dealing("dirichlet-query", silos=10, concentration=concentration)
        dealt = deal(letor, dealing, Streams(2))
        labels, counts = Deal(dealt.holders[letor.offsets[:-1]], 10).label_counts(grades)
        assert labels.tolist() == [0, 1, 2, 3, 4]
        return float((counts / counts.sum(axis=0)).std())

    assert spread(0.1) > 3 * spread(10) > 3 * spread(1000)


def test_dirichlet_over_queries_leaves_no_silo_empty() -> None:
    dealt = deal(table(300), Dealing("dirichlet-query", silos=100, concentration=0.05), Streams(5))
    assert dealt.sizes.min() >= 12


def test_dirichlet_draws_as_flower_describes_it() -> None:
    """Shares per class over clients; cuts are the truncated cumulative shares of the class, in row order."""
    labels = np.random.default_rng(0).integers(3, size=1000)
    dealt = dirichlet(labels, 7, Dealing(concentration=0.8), np.random.default_rng(42), least=1)
    rng = np.random.default_rng(42)
    for label in range(3):
        cuts = (np.cumsum(rng.dirichlet([0.8] * 7)) * (labels == label).sum()).astype(int)[:-1]
        for silo, items in enumerate(np.split(np.flatnonzero(labels == label), cuts)):
            assert (dealt.holders[items] == silo).all()


def test_dirichlet_draws_again_until_every_silo_has_enough() -> None:
    labels = np.random.default_rng(0).integers(2, size=400)
    dealing = Dealing(concentration=0.6, redraws=200)
    assert dirichlet(labels, 8, dealing, np.random.default_rng(0), least=0).sizes.min() < 20
    assert dirichlet(labels, 8, dealing, np.random.default_rng(0), least=20).sizes.min() >= 20


def test_an_impossible_dirichlet_says_the_cure() -> None:
    with pytest.raises(
        DataError, match=r"in 11 draws the smallest silo never had 10.*raise the concentration"
    ):
        deal(table(100), Dealing("dirichlet-pair", silos=100), Streams(0))


@pytest.mark.parametrize("kind", ["query", "size", "dirichlet-query"])
def test_too_few_queries_for_the_silos(kind: str) -> None:
    with pytest.raises(DataError, match="cannot"):
        deal(table(5), Dealing(kind, silos=6), Streams(0))
    with pytest.raises(DataError, match="5 queries cannot give 3 silos 2 each"):
        deal(table(5), Dealing(kind, silos=3, least=2), Streams(0))


def test_sites() -> None:
    letor = table(9)
    parts = deal(letor, Dealing("site", silos=2), Streams(0)).parts(letor)
    assert [{query.split("/")[0] for query in part.queries} for part in parts] == [{"north"}, {"south"}]
    named = deal(letor, Dealing("site", silos=3), Streams(0), sites=list("abcabcabc"))
    assert named.sizes.tolist() == [36, 36, 36]


def test_sites_that_nobody_named() -> None:
    letor = Letor(("q1",), np.array([0, 1]), np.zeros((1, 1), np.float32), np.zeros(1, np.int32))
    with pytest.raises(DataError, match="query 'q1' does not say which site"):
        deal(letor, Dealing("site", silos=1), Streams(0))
    with pytest.raises(DataError, match="2 sites cannot be dealt to 3 silos"):
        by_site(["a", "b"], 3)


def test_whole_sites_are_balanced() -> None:
    assert balanced([5, 3, 3, 2, 1], 2).tolist() == [0, 1, 1, 0, 1]
    dealt = by_site(["big"] * 6 + ["mid"] * 4 + ["small"] * 3, 2)
    assert dealt.sizes.tolist() == [6, 7]


def test_divide_in_proportion() -> None:
    parts = divide(1000, (0.81, 0.09, 0.10), np.random.default_rng(0))
    assert np.bincount(parts).tolist() == [810, 90, 100]


def test_too_few_groups_for_the_folds() -> None:
    with pytest.raises(DataError, match="2 groups that stay together cannot be dealt into 3 parts"):
        folds(6, 3, np.random.default_rng(0), groups=np.array([0, 0, 0, 1, 1, 1]))
    with pytest.raises(DataError, match="2 items cannot"):
        folds(2, 3, np.random.default_rng(0))


def test_move_share_is_a_dial() -> None:
    names = [f"numpy.function{number}" for number in range(4000)]
    silos = np.arange(4000) % 4
    assert move_share(names, silos, 0.0, 4).tolist() == silos.tolist()
    half, whole = move_share(names, silos, 0.5, 4), move_share(names, silos, 1.0, 4)
    assert abs((half != silos).mean() - 0.375) < 0.02  # a quarter of those who move stay at home
    assert abs((whole != silos).mean() - 0.75) < 0.02
    moved = half != silos
    assert (half[moved] == whole[moved]).all()
    assert np.array_equal(half, move_share(names, silos, 0.5, 4))
    # the same names move in every process and release
    assert move_share(
        ["numpy.dot", "scipy.fft.fft", "sklearn.svm.SVC"], np.zeros(3, int), 1.0, 4
    ).tolist() == [0, 3, 1]
    with pytest.raises(DataError, match="from 0 to 1"):
        move_share(names, silos, 1.5, 4)


def test_a_dealing_is_configuration() -> None:
    assert config.load(Dealing, overrides=["kind=dirichlet-pair", "silos=20"]) == Dealing(
        "dirichlet-pair", 20
    )
    for override in ("silos=0", "concentration=0", "skew=-1", "kind=pair"):
        with pytest.raises(ConfigError):
            config.load(Dealing, overrides=[override])


def test_a_deal_shows_itself() -> None:
    assert repr(Deal(np.array([0, 0, 2]), 3)) == "Deal: 3 items to 3 silos, 0 to 2 each"


@pytest.mark.realdata
def test_the_papers_deal_of_mq2008(data_dir: Path) -> None:
    """Twenty clients at concentration 0.3 work with a minimum of one row; a hundred with ten never do."""
    fold = load_folds(data_dir / "letor" / "mq2008")[0]
    dealt = deal(fold.train, Dealing("dirichlet-pair", silos=20, concentration=0.3, least=1), Streams(0))
    assert dealt.label_counts(fold.train.grades).counts.shape == (20, 3)
    assert all(part.torn for part in dealt.parts(fold.train) if part.rows > 100)
    with pytest.raises(DataError, match="the smallest silo never had 10"):
        deal(fold.train, Dealing("dirichlet-pair", silos=100, concentration=0.3), Streams(0))
