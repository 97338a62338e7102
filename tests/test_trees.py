"""LambdaMART: learned, saved and refused alike through both libraries."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coarse_rows import ndcg, table
from isthmus.errors import ConfigError, DataError, MissingExtra
from isthmus.evaluation import evaluate_rows
from isthmus.rankers import LambdaMART, load_ranker

pytest.importorskip("xgboost", reason="the extra `trees` is not installed")
pytest.importorskip("lightgbm", reason="the extra `trees` is not installed")

LIBRARIES = ("lightgbm", "xgboost")


@pytest.mark.parametrize("library", LIBRARIES)
def test_trees_learn_and_are_saved_in_the_library_s_own_words(library: Any, tmp_path: Path) -> None:
    train, test = table(), table(seed=1)
    ranker = LambdaMART(library=library, trees=30).fit(train)
    measure = "nDCG@10(empty=skip, ties=random)"
    alone = evaluate_rows(test.grades, test.features[:, 0], test.offsets, [measure])[measure]
    assert ndcg(ranker, test) > alone
    ranker.save(tmp_path / "trees")
    again = load_ranker(tmp_path / "trees")
    np.testing.assert_array_equal(again.score(test), ranker.score(test))
    assert again.rank(test, name="trees") == ranker.rank(test)
    again.save(tmp_path / "again")
    np.testing.assert_array_equal(load_ranker(tmp_path / "again").score(test), ranker.score(test))


@pytest.mark.parametrize("library", LIBRARIES)
def test_early_stopping_keeps_fewer_trees(library: Any) -> None:
    train, validation = table(20), table(60, seed=2)
    full = LambdaMART(library=library, trees=200, learning_rate=0.3).fit(train)
    stopped = LambdaMART(library=library, trees=200, learning_rate=0.3, patience=5)
    stopped.fit(train, validation=validation)
    counted = "num_trees" if library == "lightgbm" else "num_boosted_rounds"
    kept = stopped.model_.best_iteration if library == "lightgbm" else stopped.model_.num_boosted_rounds()
    assert 0 < kept < getattr(full.model_, counted)() == 200
    same = LambdaMART(library=library, trees=kept, learning_rate=0.3).fit(train)
    np.testing.assert_allclose(stopped.score(train), same.score(train), rtol=1e-5)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_same_data_give_the_same_trees(library: Any) -> None:
    data = table()
    one, two = (LambdaMART(library=library, trees=10).fit(data).score(data) for _ in range(2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_trees_cannot_take_is_refused(library: Any) -> None:
    model = LambdaMART(library=library, trees=2)
    data = table(10)
    with pytest.raises(DataError, match="not been trained"):
        model.score(data)
    with pytest.raises(DataError, match="torn"):
        model.fit(replace(data, torn=True))
    with pytest.raises(DataError, match="-1"):
        model.fit(replace(data, grades=data.grades - 1))
    with pytest.raises(DataError, match="5 features where the ranker takes 6"):
        model.fit(data).score(replace(data, features=data.features[:, :5]))
    with pytest.raises(DataError, match=f"the {library} model inside cannot be read"):
        model.with_model("nonsense", 6)


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(ConfigError, match="lightgbm"):
        LambdaMART(library="lightgmb")  # type: ignore[arg-type]


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    with pytest.raises(MissingExtra, match=r"isthmus\[trees\]"):
        LambdaMART().fit(table(10))
