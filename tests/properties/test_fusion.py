"""Laws of fusion, over random runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.calibration import Beta, Isotonic, Platt
from isthmus.fusion import FUSERS, NORMALISERS, Candidates, Union, fuse
from isthmus.tables import Run

scores = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 2))
lists = st.dictionaries(st.sampled_from([f"d{at}" for at in range(12)]), scores, max_size=12)
run_dicts = st.dictionaries(st.sampled_from(["q1", "q2", "q3", "q4"]), lists, min_size=1, max_size=4)
runs = st.lists(run_dicts, min_size=1, max_size=4).map(
    lambda found: [Run.from_dict(each, name=f"r{at}") for at, each in enumerate(found)]
)
ADDING = [name for name in FUSERS if name != "rl-sim"]


@pytest.mark.parametrize("method", ADDING)
@settings(max_examples=25, deadline=None)
@given(given_runs=runs, norm=st.sampled_from(sorted(NORMALISERS)), seed=st.integers(0, 100))
def test_fusers_do_not_depend_on_the_order_of_runs(
    method: str, given_runs: list[Run], norm: str, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(given_runs))
    fused = fuse(given_runs, method, norm=norm)
    assert fused == fuse([given_runs[at] for at in order], method, norm=norm)
    assert np.isfinite(fused.scores).all()
    pairs = {(query, doc) for run in given_runs for query, docs in run.to_dict().items() for doc in docs}
    assert pairs == {(query, doc) for query, docs in fused.to_dict().items() for doc in docs}


def full(seed: int, queries: int, labels: int) -> Run:
    values = np.random.default_rng(seed).normal(size=queries * labels)
    names = np.repeat([f"q{at}" for at in range(queries)], labels)
    return Run.of(names.tolist(), [f"l{at}" for at in range(labels)] * queries, values, name=str(seed))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), queries=st.integers(2, 12), labels=st.integers(3, 9))
def test_rl_sim_is_unchanged_by_strictly_increasing_calibration(seed: int, queries: int, labels: int) -> None:
    held = [full(seed + at, queries, labels) for at in range(2)]
    fused = fuse(held, "rl-sim")
    assert fused == fuse(held[::-1], "rl-sim")
    y = np.arange(queries * labels) % 3 == 0
    for kind in (Platt, Beta):
        told = []
        for run in held:
            chances = kind().fit(run.scores, y).probabilities(run.scores)
            if len(np.unique(chances)) < len(np.unique(run.scores)):
                break  # a score that says nothing gives one probability: not strictly increasing
            told.append(run.with_scores(chances))
        else:
            assert fuse(told, "rl-sim") == fused


@pytest.mark.parametrize("norm", ["none", "min-max", "z-score", "max", "rank"])
@settings(max_examples=25, deadline=None)
@given(lists_of=run_dicts)
def test_one_list_fused_is_that_list(norm: str, lists_of: dict[str, dict[str, float]]) -> None:
    run = Run.from_dict(lists_of)
    for method in ("comb-mnz", "comb-sum", "comb-max", "comb-med", "comb-anz", "rrf", "isr"):
        fused = fuse([run], method, norm=norm)
        for query in run.queries:
            one, other = run[query], fused[query]
            if method in ("rrf", "isr") or norm == "rank" or len(set(one.scores)) == one.rows:
                assert one.documents.tolist() == other.documents.tolist(), (method, query)
    if (run.scores > 0).all():
        assert np.array_equal(fuse([run], "comb-mnz", norm="none").scores, run.scores)


@settings(deadline=None)
@given(lists_of=run_dicts)
def test_z_scores_have_mean_0_and_sd_1(lists_of: dict[str, dict[str, float]]) -> None:
    run = Run.from_dict(lists_of)
    (values,) = Candidates.of([run], "z-score").scores
    for at, (_, _, raw) in enumerate(run.lists()):
        mine = values[run.offsets[at] : run.offsets[at + 1]]
        if len(set(raw)) > 1:
            assert mine.mean() == pytest.approx(0, abs=1e-9)
            assert mine.std() == pytest.approx(1, abs=1e-9)
        else:
            assert (mine == 0).all()


@pytest.mark.parametrize("norm", sorted(NORMALISERS))
@settings(deadline=None)
@given(given_runs=runs)
def test_normalisers_keep_order_and_stay_finite(norm: str, given_runs: list[Run]) -> None:
    for run, values in zip(given_runs, Candidates.of(given_runs, norm).scores, strict=True):
        assert np.isfinite(values).all()
        same_list = np.diff(run.query_of_row) == 0
        assert (np.diff(values)[same_list] <= 0).all()


@settings(deadline=None)
@given(given_runs=runs)
def test_the_union_holds_every_row_where_it_says(given_runs: list[Run]) -> None:
    union = Union.of(given_runs)
    named = list(zip(union.table()._query_column.tolist(), union.documents.tolist(), strict=True))
    assert len(set(named)) == union.rows
    for run, place in zip(given_runs, union.places, strict=True):
        rows = zip(run._query_column.tolist(), run.documents.tolist(), strict=True)
        assert [named[at] for at in place] == list(rows)


@settings(max_examples=30, deadline=None)
@given(data=st.lists(st.tuples(scores, st.booleans()), min_size=3, max_size=40))
def test_isotonic_ties_do_not_reorder_a_run(data: list[tuple[float, bool]]) -> None:
    values = np.array([score for score, _ in data])
    labels = np.array([label for _, label in data])
    labels[0], labels[-1] = True, False
    run = Run.of(["q"] * len(values), [f"d{at}" for at in range(len(values))], values)
    chances = Isotonic().fit(values, labels).probabilities(run.scores)
    assert (np.diff(chances) <= 0).all()
