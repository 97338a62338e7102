"""The profiles `lightgbm` and `sklearn`, and the formulae of scikit-learn and pyxclib."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, ndcg_score

from isthmus import evaluation
from isthmus.evaluation import Measure, Propensity, evaluate, evaluate_rows
from isthmus.tables import Qrels, Run

CUTS = (1, 3, 5, 10)


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grades, heavily tied scores and offsets of 60 queries; in some nothing is relevant."""
    random = np.random.default_rng(8)
    lengths = random.integers(1, 30, 60)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    grades = random.choice(5, offsets[-1], p=[0.6, 0.2, 0.1, 0.06, 0.04])
    for query in (3, 17, 40):
        grades[offsets[query] : offsets[query + 1]] = 0
    return grades, random.integers(0, 6, offsets[-1]) / 2.0, offsets


def tables(grades: np.ndarray, scores: np.ndarray, offsets: np.ndarray) -> tuple[Qrels, Run]:
    """The same as judgements and a run; ids are shuffled, so that they say nothing about the order."""
    names = [f"d{number:04d}" for number in np.random.default_rng(1).permutation(len(grades))]
    queries = [f"q{at}" for at in np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))]
    return Qrels.of(queries, names, grades), Run.of(queries, names, scores)


def test_lightgbm_ndcg_and_map(rows: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    grades, scores, offsets = rows
    data = lightgbm.Dataset(
        np.zeros((len(grades), 1)), grades, group=np.diff(offsets), init_score=scores, free_raw_data=False
    )
    parameters = {
        "objective": "lambdarank",
        "metric": ["ndcg", "map"],
        "eval_at": list(CUTS),
        "verbosity": -1,
        "num_threads": 1,
    }
    told = {name: value for _, name, value, _ in lightgbm.Booster(parameters, data).eval_train()}
    assert len(told) == 2 * len(CUTS)
    ours = {f"ndcg@{k}": f"nDCG@{k}" for k in CUTS} | {f"map@{k}": f"MAP@{k}" for k in CUTS}
    by_rows = evaluate_rows(grades, scores, offsets, ours.values(), profile="lightgbm")
    by_tables = evaluate(*tables(grades, scores, offsets), ours.values(), profile="lightgbm")
    for theirs, name in ours.items():
        assert by_rows[name] == pytest.approx(told[theirs], abs=1e-12)
        assert by_tables[name] == pytest.approx(told[theirs], abs=1e-12)


@pytest.mark.parametrize("cutoff", [None, *CUTS])
def test_sklearn_ndcg_averages_ties(cutoff: int | None, rows: tuple[np.ndarray, ...]) -> None:
    grades, scores, offsets = rows
    measure = Measure("nDCG", cutoff)
    found = evaluate(*tables(grades, scores, offsets), [measure], profile="sklearn").per_query(measure)
    for query, (start, end) in enumerate(pairwise(offsets)):
        if end - start > 1:  # scikit-learn wants at least two documents
            expected = ndcg_score([grades[start:end]], [scores[start:end]], k=cutoff)
            assert found[f"q{query}"] == pytest.approx(expected, abs=1e-12)


def test_sklearn_average_precision(rows: tuple[np.ndarray, ...]) -> None:
    grades, scores, offsets = rows
    found = evaluate(*tables(grades, scores, offsets), ["MAP"], profile="sklearn").per_query("MAP")
    for query, (start, end) in enumerate(pairwise(offsets)):
        relevant = grades[start:end] > 0
        expected = average_precision_score(relevant, scores[start:end]) if relevant.any() else 0.0
        assert found[f"q{query}"] == pytest.approx(expected, abs=1e-12)


def test_brier_and_log_loss() -> None:
    random = np.random.default_rng(2)
    chances, outcomes = random.random(500), random.integers(0, 2, 500)
    chances[:3], outcomes[:3] = (0.0, 1.0, 1.0), (1, 0, 1)
    assert evaluation.brier(chances, outcomes) == pytest.approx(
        brier_score_loss(outcomes, chances), abs=1e-14
    )
    assert evaluation.log_loss(chances, outcomes) == pytest.approx(log_loss(outcomes, chances), abs=1e-12)


def xclib(scores: np.ndarray, truth: np.ndarray, worth: np.ndarray, k: int, *, discounted: bool) -> float:
    """psP@k and psnDCG@k on dense matrices, as pyxclib's documentation defines them: a ratio of means."""

    def gained(order: np.ndarray) -> np.ndarray:
        top = np.argsort(-order, axis=1, kind="stable")[:, :k]
        flags = np.take_along_axis(truth * worth, top, axis=1)
        if not discounted:
            return flags.sum(axis=1) / k
        discounts = 1 / np.log2(np.arange(k) + 2)
        counts = truth.sum(axis=1)
        most = np.array([(1 / np.log2(np.arange(min(int(count), k)) + 2)).sum() for count in counts])
        return (flags * discounts).sum(axis=1) / most

    return float(gained(scores).mean() / gained(truth * worth).mean())


@pytest.mark.parametrize("k", [1, 3, 5])
def test_propensity_scored_measures(k: int) -> None:
    random = np.random.default_rng(9)
    queries, labels = 80, 30
    truth = random.random((queries, labels)) < np.linspace(0.3, 0.02, labels)
    truth[np.arange(queries), random.integers(0, labels, queries)] = True
    scores = random.normal(size=truth.shape) + truth
    train = {f"l{label}": int(count) for label, count in enumerate(random.integers(0, 400, labels))}
    propensity = Propensity.of_counts(train, 1000)
    counts = np.array(list(train.values()))
    worth = 1 + (np.log(1000) - 1) * 2.5**0.55 * (counts + 1.5) ** -0.55
    qrels = {f"q{q}": {f"l{label}": 1 for label in np.flatnonzero(truth[q])} for q in range(queries)}
    run = {f"q{q}": {f"l{label}": float(scores[q, label]) for label in range(labels)} for q in range(queries)}
    names = [f"psP@{k}", f"psnDCG@{k}"]
    found = evaluate(Qrels.from_dict(qrels), Run.from_dict(run), names, propensity=propensity)
    assert found[names[0]] == pytest.approx(xclib(scores, truth, worth, k, discounted=False), abs=1e-12)
    assert found[names[1]] == pytest.approx(xclib(scores, truth, worth, k, discounted=True), abs=1e-12)
