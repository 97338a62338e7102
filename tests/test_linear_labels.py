"""A linear classifier per label: the objective's minimum, sparse weights, blocks not learned twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array, vstack
from sklearn.svm import LinearSVC

from isthmus.classification import (
    CandidateTable,
    FittedLinear,
    SparseLinear,
    TextRows,
    linear,
    rarity,
    weighed,
)
from isthmus.errors import ConfigError, DataError

TEXTS, TERMS, LABELS = 400, 300, 7
RARE = 5
"""A label with three texts; the last label has none."""


@pytest.fixture(scope="module")
def data() -> tuple[TextRows, csr_array]:
    """Texts with words of their own labels among others."""
    rng = np.random.default_rng(3)
    right = rng.random((TEXTS, LABELS)) < [0.5, 0.2, 0.1, 0.1, 0.05, 0, 0]
    right[rng.choice(TEXTS, 3, replace=False), RARE] = True
    counts = rng.poisson(0.03, (TEXTS, TERMS))
    for label in range(LABELS):
        counts[:, 20 * label : 20 * label + 20] += rng.poisson(0.3, (TEXTS, 20)) * right[:, [label]]
    return TextRows(csr_array(counts.astype(np.float32))), csr_array(right)


def objective(
    rows: csr_array, signs: np.ndarray, weights: np.ndarray, intercept: float, cost: float
) -> float:
    """½(‖w‖² + b²) + C Σ max(0, 1 − y (w·x + b))²."""
    short = np.maximum(0, 1 - signs * (rows @ weights + intercept))
    return float(0.5 * (weights @ weights + intercept**2) + cost * (short @ short))


@pytest.mark.parametrize("cost", [0.1, 1.0, 10.0])
def test_the_minimum_is_that_of_liblinear_over_all_texts(
    data: tuple[TextRows, csr_array], cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, labels = data
    monkeypatch.setattr(linear, "TOLERANCE", 1e-6)
    fitted = SparseLinear(prune=0.0, cost=cost).fit(texts, labels)
    rows = weighed(texts, fitted.rarity).astype(float)
    for label in (1, 4, RARE):
        signs = np.where(labels[:, [label]].toarray().ravel(), 1.0, -1.0)
        oracle = LinearSVC(C=cost, dual=False, tol=1e-9, max_iter=10_000).fit(rows, signs)
        own = fitted.weights[[label]].toarray().ravel()
        assert own == pytest.approx(oracle.coef_[0], abs=2e-3)
        value = objective(rows, signs, own, float(fitted.intercepts[label]), cost)
        assert value <= objective(rows, signs, oracle.coef_[0], float(oracle.intercept_[0]), cost) * (
            1 + 1e-4
        )


def test_labels_that_a_matcher_lists_are_learned_from_the_texts_it_lists_them_for(
    data: tuple[TextRows, csr_array], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts, labels = data
    whole = SparseLinear().fit(texts, labels)
    monkeypatch.setattr(linear, "MOST_WORK", 0)
    monkeypatch.setattr(linear, "HEAD", 6)
    fitted = SparseLinear(match=3).fit(texts, labels)
    assert fitted.always.tolist() == [True, True, *[False] * 5], "more than a text in six"
    assert np.diff(csr_array(fitted.matcher.T).indptr)[[0, 1, 6]].tolist() == [0, 0, 0]
    few = fitted.candidates(texts, LABELS)
    assert np.diff(few.indptr).max() == 5, "two always, and three that are listed"
    table, right = CandidateTable.rows_of(few), labels.toarray()
    hits = table.hits(labels)
    assert hits.sum() > 0.95 * right.sum(), "nearly all right labels are among them"
    first, exact = (
        np.mean([right[row, each[[row]].indices[0]] for row in range(TEXTS) if right[row].any()])
        for each in (fitted.candidates(texts, 1), whole.candidates(texts, 1))
    )
    assert first > exact - 0.02
    fitted.save(tmp_path)
    assert np.array_equal(
        FittedLinear.load(tmp_path).candidates(texts, 3).toarray(), fitted.candidates(texts, 3).toarray()
    )
    everything = SparseLinear(match=None).fit(texts, labels)
    assert np.array_equal(everything.weights.toarray(), whole.weights.toarray())


def test_texts_that_are_not_looked_at_count_as_texts_without_words(
    data: tuple[TextRows, csr_array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "TOLERANCE", 1e-6)
    rows = linear._narrow(weighed(data[0], rarity(data[0])))[:50]
    signs = np.where(np.arange(50) < 8, 1.0, -1.0)
    terms, weights, intercept = linear._liblinear(rows, signs, 1.0, 300)
    whole = vstack([rows, csr_array((300, TERMS))], format="csr")
    oracle = LinearSVC(dual=False, tol=1e-9, max_iter=10_000).fit(whole, np.append(signs, np.full(300, -1.0)))
    assert weights == pytest.approx(oracle.coef_[0][terms], abs=2e-3)
    assert intercept == pytest.approx(float(oracle.intercept_[0]), abs=2e-3)


def test_candidates_are_the_best_scores(data: tuple[TextRows, csr_array]) -> None:
    texts, labels = data
    fitted = SparseLinear(prune=0.0).fit(texts, labels)
    every = fitted.candidates(texts, LABELS)
    assert np.diff(every.indptr).tolist() == [LABELS - 1] * TEXTS  # a label without text is not listed
    dense = every.toarray()
    ranked = fitted.candidates(texts, 2)
    for row in range(0, TEXTS, 50):
        own = ranked.indices[ranked.indptr[row] : ranked.indptr[row + 1]]
        assert set(own.tolist()) == set(np.argsort(-dense[row, :-1])[:2].tolist())
    right = labels.toarray()
    first = np.argmax(dense[:, :-1], axis=1)
    labelled = right.any(axis=1)
    assert right[np.arange(TEXTS), first][labelled].mean() > 0.95


def test_small_weights_are_dropped(data: tuple[TextRows, csr_array]) -> None:
    texts, labels = data
    whole, pruned = (SparseLinear(prune=least).fit(texts, labels).weights for least in (0.0, 0.1))
    expected = np.where(np.abs(whole.toarray()) >= 0.1, whole.toarray(), 0)
    assert pruned.nnz < whole.nnz
    assert np.array_equal(pruned.toarray(), expected)


def test_blocks_of_a_fit_that_ended_are_not_learned_again(
    data: tuple[TextRows, csr_array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, labels = data
    monkeypatch.setattr(linear, "BLOCK", 2)
    ranker = SparseLinear(checkpoint=tmp_path, workers=1)
    learned: list[int] = []
    solve = linear._liblinear

    def count(rows: csr_array, signs: np.ndarray, cost: float, others: int) -> object:
        learned.append(int((signs > 0).sum()))
        if len(learned) == 5:
            raise KeyboardInterrupt
        return solve(rows, signs, cost, others)

    monkeypatch.setattr(linear, "_liblinear", count)
    with pytest.raises(KeyboardInterrupt):
        ranker.fit(texts, labels)
    fitted = ranker.fit(texts, labels)
    assert len(learned) == 5 + 2  # two blocks were kept; the last label has nothing to learn
    assert np.array_equal(fitted.weights.toarray(), SparseLinear().fit(texts, labels).weights.toarray())
    before = len(learned)
    replace(ranker, cost=2.0).fit(texts, labels)
    assert len(learned) == before + LABELS - 1  # other settings, other blocks


def test_what_was_saved_ranks_alike(data: tuple[TextRows, csr_array], tmp_path: Path) -> None:
    texts, labels = data
    fitted = SparseLinear().fit(texts, labels)
    fitted.save(tmp_path)
    again = FittedLinear.load(tmp_path).candidates(texts, 3)
    assert np.array_equal(again.toarray(), fitted.candidates(texts, 3).toarray())


def test_what_it_refuses(data: tuple[TextRows, csr_array]) -> None:
    texts, labels = data
    with pytest.raises(ConfigError, match="cost must be above 0"):
        SparseLinear(cost=0.0).fit(texts, labels)
    with pytest.raises(DataError, match="30,000 labels; one linear classifier each is for 20,000 at most"):
        SparseLinear().fit(texts, csr_array((TEXTS, 30_000), dtype=bool))
