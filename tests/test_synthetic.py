"""Synthetic data: deterministic, of the promised shape, and worth learning from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.corpora import synthetic
from isthmus.corpora.synthetic import FOLDS, SyntheticWorld, load_synthetic
from isthmus.errors import DataError
from isthmus.tables import Letor
from isthmus.tables.letor_files import read_letor, write_letor


def letor(queries: int, documents: int = 60, features: int = 136, **world: Any) -> Letor:
    split = world.pop("split", "train")
    return SyntheticWorld(documents, features, **world).letor(queries, split)


def mean_ndcg(letor: Letor, scores: np.ndarray) -> float:
    """nDCG@10 with exponential gain over lists of equal length, from its formula."""
    grades = letor.grades.reshape(len(letor), -1)
    gains = 2.0**grades - 1
    order = np.argsort(-scores.reshape(grades.shape), axis=1, kind="stable")[:, :10]
    discount = 1 / np.log2(np.arange(2, 12))
    found = (np.take_along_axis(gains, order, axis=1) * discount).sum(axis=1)
    ideal = (-np.sort(-gains, axis=1)[:, :10] * discount).sum(axis=1)
    return float((found[ideal > 0] / ideal[ideal > 0]).mean())


def linear_scores(train: Letor, test: Letor) -> np.ndarray:
    middle, spread = train.features.mean(axis=0), train.features.std(axis=0) + 1e-9
    rows, asked = ((table.features - middle) / spread for table in (train, test))
    return asked @ np.linalg.lstsq(rows, train.grades - train.grades.mean(), rcond=None)[0]


@pytest.fixture(scope="module")
def tables() -> tuple[Letor, Letor]:
    return letor(300), letor(300, split="test")


def test_shape_and_grade_shares(tables: tuple[Letor, Letor]) -> None:
    train, _ = tables
    assert (len(train), train.rows, train.width) == (300, 18_000, 136)
    assert np.isfinite(train.features).all()
    shares = np.bincount(train.grades, minlength=5) / train.rows
    assert np.abs(shares - synthetic.GRADE_SHARES).max() < 0.03


def test_features_are_as_varied_as_real_ones(tables: tuple[Letor, Letor]) -> None:
    train, _ = tables
    lists = train.features.reshape(300, 60, 136)
    constant = (lists.max(axis=1) == lists.min(axis=1)).all(axis=0)
    assert constant.sum() == 14  # they speak of the query alone
    scales = train.features.std(axis=0)
    assert scales.max() / scales.min() > 1e4
    assert ((train.features == 0).mean(axis=0) > 0.1).sum() > 10  # parts that pages lack


def test_there_is_something_to_learn_but_not_by_a_line(tables: tuple[Letor, Letor]) -> None:
    train, test = tables
    chance = mean_ndcg(test, np.random.default_rng(0).random(test.rows))
    linear = mean_ndcg(test, linear_scores(train, test))
    traits = synthetic._traits(np.full(300, 60), np.random.default_rng(0))
    assert chance == pytest.approx(0.23, abs=0.03)
    assert chance + 0.12 < linear < 0.5
    assert traits.shape == (18_000, synthetic.TRAITS + synthetic.QUERY_TRAITS + 1)


def test_trees_learn_more_than_a_line() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    train, test = letor(700), letor(300, split="test")
    options = {"objective": "lambdarank", "verbose": -1, "num_threads": 1, "seed": 1, "feature_fraction": 0.5}
    data = lightgbm.Dataset(train.features, train.grades, group=np.diff(train.offsets))
    trees = lightgbm.train(options | {"learning_rate": 0.15, "min_data_in_leaf": 50}, data, 60)
    found = mean_ndcg(test, trees.predict(test.features))
    assert 0.47 < found < 0.6
    assert found > mean_ndcg(test, linear_scores(train, test)) + 0.03


def test_the_same_arguments_give_the_same_rows() -> None:
    assert letor(30, 7, 11) == letor(30, 7, 11)
    assert letor(30, 7, 11) != letor(30, 7, 11, seed=1)


@pytest.mark.parametrize("varying", [False, True])
def test_fewer_queries_are_the_first_of_more(varying: bool) -> None:
    many = letor(230, 9, 20, varying=varying)
    for count in (1, 100, 130):
        assert letor(count, 9, 20, varying=varying) == many[:count]


def test_splits_share_the_world_and_no_query() -> None:
    parts = [letor(50, 8, 12, split=split) for split in ("train", "validation", "test")]
    assert len({query for part in parts for query in part.queries}) == 150
    assert not np.array_equal(parts[0].grades, parts[1].grades)


def test_lists_of_varying_length() -> None:
    lengths = np.diff(letor(1000, 40, 2, varying=True).offsets)
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(40, rel=0.1)
    assert lengths.std() > 15


def test_few_features_are_possible() -> None:
    assert letor(3, 4, 1).features.shape == (12, 1)
    with pytest.raises(DataError, match="at least one of each"):
        letor(3, 0)


def test_named_folds() -> None:
    assert FOLDS["synthetic"].queries == (1000, 300, 300)
    assert (FOLDS["synthetic"].world.documents, FOLDS["synthetic"].world.features) == (60, 136)
    mslr = FOLDS["synthetic-mslr"]
    assert mslr.queries == (6000, 2000, 2000)
    assert mslr.world._offsets(6000, "train")[-1] == pytest.approx(720_000, rel=0.01)
    with pytest.raises(DataError, match="no synthetic fold 'mslr'"):
        load_synthetic("mslr")


def test_a_named_fold_is_made_once_and_then_mapped() -> None:
    first = load_synthetic("synthetic", "test")
    assert first == SyntheticWorld().letor(300, "test")
    assert first.name == "synthetic test"
    again = load_synthetic("synthetic", "test")
    assert isinstance(again.features.base, np.ndarray)
    assert not again.features.flags.writeable
    assert again == first


@pytest.mark.parametrize("homeless", [False, True])
def test_a_named_fold_does_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, homeless: bool
) -> None:
    (tmp_path / "file").write_text("in place of the folder")
    monkeypatch.setenv("ISTHMUS_CACHE", "" if homeless else str(tmp_path / "file"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert load_synthetic("synthetic", "test") == SyntheticWorld().letor(300, "test")


def test_folds_share_the_world_and_no_row() -> None:
    one, two = (load_synthetic("synthetic", "test", fold=fold) for fold in (0, 1))
    assert not np.array_equal(one.features, two.features)
    constant = one.features.reshape(300, 60, 136).std(axis=1).max(axis=0) == 0
    again = two.features.reshape(300, 60, 136).std(axis=1).max(axis=0) == 0
    assert np.array_equal(constant, again)


def test_a_mapped_table_of_other_data_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "x.columns"
    small = SyntheticWorld(5, 4)
    assert small.mapped(path, 20) == small.letor(20)
    assert small.mapped(path, 30) == small.letor(30)
    path.write_bytes(path.read_bytes()[:100])
    assert small.mapped(path, 30) == small.letor(30)
    assert os.listdir(tmp_path) == ["x.columns"]


def test_nowhere_to_keep_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("ISTHMUS_CACHE", str(blocked))
    assert load_synthetic("synthetic", "test").rows == 18_000


def test_streams_to_letor_text(tmp_path: Path) -> None:
    world = SyntheticWorld(6, 9, varying=True)
    write_letor(world.blocks(150), tmp_path / "train.txt")
    assert read_letor(tmp_path / "train.txt") == world.letor(150)
