"""Rows that count differently, and grades that are guesses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from isthmus.errors import DataError
from isthmus.losses import cross_entropy
from isthmus.randomness import Streams
from isthmus.rankers import LambdaMART, LocalTraining, TrainingRows, initial_parameters, train_epochs
from isthmus.tables import Letor


def table(rows: int = 40, *, seed: int = 0, prefix: str = "q") -> Letor:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(rows, 4))
    grades = np.digitize(features[:, 0] + rng.normal(0, 0.3, rows), [0.3, 1.0])
    return Letor.of([f"{prefix}{row // 10}" for row in range(rows)], features, grades)


def one_hot(letor: Letor, grades: int = 3) -> np.ndarray:
    return np.eye(grades, dtype=np.float32)[letor.grades]


def trained(data: Letor, loss: str, outputs: int) -> dict[str, np.ndarray]:
    start = initial_parameters(4, (), outputs, Streams(1)("init"))
    config = LocalTraining(loss=loss, learning_rate=0.05, epochs=3, batch=8)
    return train_epochs(start, data, config, Streams(2)("rows")).parameters


@pytest.mark.parametrize(("loss", "outputs"), [("cross_entropy", 3), ("squared_error", 1), ("lambdarank", 1)])
def test_a_lesson_of_judged_rows_teaches_what_the_table_does(loss: str, outputs: int) -> None:
    letor = table()
    lesson = TrainingRows.of_letor(letor, weights=np.ones(letor.rows), targets=one_hot(letor))
    plain, taught = trained(letor, loss, outputs), trained(lesson, loss, outputs)
    for name, array in plain.items():
        assert np.allclose(array, taught[name], atol=1e-5)


def test_cross_entropy_of_chances_is_the_mean_over_grades() -> None:
    rng = np.random.default_rng(3)
    scores, chances = rng.normal(size=(7, 3)), rng.dirichlet(np.ones(3), 7)
    nothing = np.zeros(1, np.int64)
    value, gradient = cross_entropy(scores, chances, nothing)
    apart = [
        cross_entropy(scores[[row]], np.array([grade]), nothing) for row in range(7) for grade in range(3)
    ]
    assert value == pytest.approx(np.mean(chances * np.array([v for v, _ in apart]).reshape(7, 3)) * 3)
    slopes = np.array([g[0] for _, g in apart]).reshape(7, 3, 3)
    assert np.allclose(gradient, np.einsum("rg,rgs->rs", chances, slopes) / 7)


def test_rows_of_weight_nothing_teach_nothing() -> None:
    letor, misleading = table(), table(seed=9)
    judged = TrainingRows.of_letor(letor, weights=np.ones(letor.rows), targets=one_hot(letor))
    wrong = TrainingRows.of_letor(misleading, weights=np.zeros(misleading.rows), targets=one_hot(misleading))
    start = initial_parameters(4, (), 3, Streams(1)("init"))
    config = LocalTraining(loss="cross_entropy", optimiser="sgd", learning_rate=0.1, batch=80)
    alone = train_epochs(start, judged, config, Streams(2)("rows")).parameters
    beside = train_epochs(start, TrainingRows.joined([judged, wrong]), config, Streams(2)("rows")).parameters
    for name, array in alone.items():
        assert np.allclose(array - start[name], 2 * (beside[name] - start[name]), atol=1e-6)


def test_joined_rows_stand_with_their_queries() -> None:
    first = TrainingRows.of_letor(table(20), weights=np.full(20, 1.0))
    second = TrainingRows.of_letor(table(20, seed=4), weights=np.full(20, 0.5))
    whole = TrainingRows.joined([first, second])
    assert whole.queries == ("q0", "q1")
    assert whole.offsets.tolist() == [0, 20, 40]
    assert whole.weights is not None
    assert whole.weights.tolist() == ([1.0] * 10 + [0.5] * 10) * 2
    kept = whole.keep(whole.grades > 0)
    assert isinstance(kept, TrainingRows)
    assert kept.weights is not None
    assert len(kept.weights) == kept.rows


def test_joined_rows_are_torn_if_a_part_is() -> None:
    whole, torn = (TrainingRows.of_letor(replace(table(20), torn=torn)) for torn in (False, True))
    assert TrainingRows.joined([whole, torn]).torn
    assert not TrainingRows.joined([whole, whole]).torn


def test_columns_must_fit() -> None:
    with pytest.raises(DataError, match="3 weights for 40 rows"):
        TrainingRows.of_letor(table(), weights=np.ones(3))


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
def test_trees_see_the_weights(library: Any) -> None:
    pytest.importorskip(library)
    letor, misleading = table(400, prefix="a"), table(400, seed=9, prefix="b")
    flipped = Letor.of(misleading._query_column, misleading.features, 2 - misleading.grades)

    def fitted(weight: float) -> np.ndarray:
        parts = [
            TrainingRows.of_letor(letor, weights=np.ones(400)),
            TrainingRows.of_letor(flipped, weights=np.full(400, weight)),
        ]
        options = {"min_data_in_leaf": 5} if library == "lightgbm" else {}
        ranker = LambdaMART(library=library, trees=20, options=options)
        return ranker.fit(TrainingRows.joined(parts)).score(letor)

    right, wrong = (np.corrcoef(fitted(weight), letor.grades)[0, 1] for weight in (0.0, 5.0))
    assert right > 0.5 > wrong
