"""RL-Sim: equal to the Unsupervised Distance Learning Framework, and what it must do on runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.errors import ConfigError, DataError
from isthmus.fusion import fuse
from isthmus.fusion.learned import Formula
from isthmus.fusion.rl_sim import (
    LARGEST,
    aggregate,
    calibrated_edges,
    edge_distances,
    intersections,
    object_distances,
    rerank,
    separations,
)
from isthmus.tables import Qrels, Run


def distances(lists: np.ndarray, objects: int) -> np.ndarray:
    """D(i, j): the position of j in i's list from 0, the list's length where j is absent (−1 pads a list)."""
    length = lists.shape[1]
    found = np.full((objects, objects + 1), float(length))
    np.put_along_axis(
        found, np.where(lists < 0, objects, lists), np.arange(length, dtype=np.float64)[None], 1
    )
    return found[:, :objects]


def table(text: str) -> np.ndarray:
    return np.array([line.split() for line in text.strip().splitlines()], dtype=np.int64)


# Inputs and outputs of UDLF's own program (method RLSIM, metric INTERSECTION, insertion sort), with ranked
# lists as input: one list set re-ranked, two fused, three fused.
UDLF: list[tuple[dict[str, Any], list[np.ndarray], np.ndarray]] = [
    (
        {"topk": 4, "ck": 8, "rounds": 2},
        [
            table("""
         0 10 11  2  1  5  6  8  4  9  3  7
         1 11 10  0  2  5  6  8  4  9  3  7
         2  5  6 10  0  4  8 11  1  9  3  7
         3  7  9  4  8  6  5  2 10  0 11  1
         4  8  5  6  2  9  3  7 10  0 11  1
         5  6  2  8  4  0 10 11  1  9  3  7
         6  5  2  4  8 10  0 11  9  1  3  7
         7  9  3  4  8  6  5  2 10  0 11  1
         8  4  5  6  2  9  3  7  0 10 11  1
         9  7  3  4  8  6  5  2 10  0 11  1
        10  0  2 11  1  5  6  8  4  9  3  7
        11  1  0 10  2  5  6  8  4  9  3  7
        """)
        ],
        table("""
         0 10 11  1  2  5  6  8  4  9  3  7
         1 11  0 10  2  5  6  8  4  9  3  7
         2  5  6  4  8 10  0 11  1  9  3  7
         3  7  9  4  8  6  5  2 10  0 11  1
         4  8  5  6  2  9  3  7 10  0 11  1
         5  6  2  8  4  9  3  7 10  0 11  1
         6  5  2  4  8  9  3  7 10  0 11  1
         7  9  3  4  8  6  5  2 10  0 11  1
         8  4  5  6  2  9  3  7  0 10 11  1
         9  7  3  4  8  6  5  2 10  0 11  1
        10  0 11  1  2  5  6  8  4  9  3  7
        11  1  0 10  2  5  6  8  4  9  3  7
        """),
    ),
    (
        {"topk": 3, "ck": 9, "rounds": 3},
        [
            table("""
         0  6  7  2  4  5  9  3  1  8
         1  8  3  9  5  4  0  6  7  2
         2  7  6  0  4  5  9  3  1  8
         3  1  8  9  5  4  0  6  7  2
         4  5  9  0  2  6  7  3  1  8
         5  9  4  3  0  6  7  2  8  1
         6  7  0  2  4  5  9  3  1  8
         7  6  0  2  4  5  9  3  1  8
         8  1  3  9  5  4  0  6  7  2
         9  5  3  4  1  8  0  6  2  7
        """),
            table("""
         0  1  4  2  6  3  8  9  5  7
         1  0  4  2  6  3  8  9  5  7
         2  6  4  1  0  3  8  9  5  7
         3  1  0  8  4  2  9  6  5  7
         4  1  0  2  6  3  8  9  5  7
         5  9  8  7  3  1  0  4  2  6
         6  2  4  0  1  3  8  9  5  7
         7  9  5  8  3  1  0  4  2  6
         8  9  5  3  1  0  7  4  2  6
         9  8  5  3  7  1  0  4  2  6
        """),
        ],
        table("""
         0  6  2  4  1  3  7  5  8  9
         1  3  4  0  8  6  2  9  5  7
         2  6  0  4  1  3  7  5  9  8
         3  1  8  9  5  7  4  0  2  6
         4  0  2  6  1  3  8  5  9  7
         5  9  7  8  3  1  4  0  6  2
         6  2  0  4  1  3  7  5  9  8
         7  9  5  8  3  1  6  2  0  4
         8  3  9  5  7  1  4  0  6  2
         9  5  7  8  3  1  4  0  6  2
        """),
    ),
    (
        {"topk": 5, "ck": 12, "rounds": 3},
        [
            table("""
         0 14  6  5  1  9 12  8 10 11 15  3  4  7  2 13
         1  9 12  5  6  8 10 14  3 15 11  0  4  7  2 13
         2 13  7  4 15  3 11 10  8 12  9  1  5  6 14  0
         3 15  8 10 11  4  9 12  1  7  5  2  6 13 14  0
         4  7  3 15 11 10  8  2 13 12  9  1  5  6 14  0
         5  9  1 14  6  8 10 12 11  0 15  3  4  7  2 13
         6 14  5  1  0  9 12  8 10 11  3 15  4  7  2 13
         7  4 13  2  3 15 11  8 10 12  9  1  5  6 14  0
         8 15 10 11  3 12  9  1  5  4  7  6 14  2 13  0
         9  5  8  1 10 12 11  3 15  6 14  0  4  7  2 13
        10 15  8 11  3  9  5 12  1  4  7  6 14  2 13  0
        11 10  3 15  8  9  4 12  1  5  7  6  2 14 13  0
        12  1  3  8  9 11 15 10  5  4  6 14  7  0 13  2
        13  7  2  4  3 15 11  8 10 12  9  1  5  6 14  0
        14  6  0  5  1  9 12  8 10 11 15  3  4  7  2 13
        15 10  8 11  3  4  9 12  1  5  7  2  6 13 14  0
        """),
            table("""
         0  3  6  7 12 13  9  8  4 14 15 11  1  2 10  5
         1 15  4 13 12  7  3  0  6 14  9  8 11  2 10  5
         2 10 11  5  8  9  6 14  0  3 12  7 13  4 15  1
         3  0  7 13 12  4  6 15  1  9  8 14 11  2 10  5
         4 13 12 15  7  1  3  0  6 14  9  8 11  2 10  5
         5 10  2 11  8  9  6 14  0  3  7 12 13  4 15  1
         6  0  9  8 14  3 12  7 11 13  4  2 15  1 10  5
         7 12  4 13  3 15  1  0  6 14  9  8 11  2 10  5
         8  9 11  6  2 14  0 10  3  7 12  5  4 13 15  1
         9  8 14  6 11  0  2 12  7  3 10  4 13  5 15  1
        10  2  5 11  8  9 14  6  0  3  7 12 13  4 15  1
        11  2 10  8  9  5  6 14  0  3 12  7 13  4 15  1
        12  7  4  3 13 15  1  0  6 14  9  8 11  2 10  5
        13 15  4  3  7 12  1  0  6  9 14  8 11  2 10  5
        14  9  8  6 12  0  7 11  3  2  4 13 10  1 15  5
        15  4 13  1 12  7  3  0  6 14  9  8 11  2 10  5
        """),
            table("""
         0  8 14  7 15  6  5 10 13 11 12  3  2  9  4  1
         1  9  4  2  3 12 11 13 14  0  7 15  8 10  5  6
         2  3  9  4  1 12 11 14 13  0  7 15  8 10  6  5
         3  2  9  4  1 11 12 14 13  7  0 15 10  8  6  5
         4  1  9  2  3 12 11 13 14  0  7 15  8 10  6  5
         5 15 10  7  6  8 14 13  0 11 12  3  2  9  4  1
         6 15  8  5  0  7 10 14 13 11 12  3  2  9  4  1
         7 15 10  5 13  8  6 14  0 11 12  3  2  9  4  1
         8  6 15  0  7  5 10 14 13 11 12  3  2  9  4  1
         9  4  1  2  3 12 11 14 13  0  7 15  8 10  5  6
        10 15  5  8  7  6 13 14  0 11 12  3  2  9  4  1
        11 13 14 12  7  3  0 15  2 10  8  5  6  9  4  1
        12 11  2  3 14  0 13  7  8  9 15  4  6 10  1  5
        13  7 14 15 10 11  5  8  0  6 12  3  2  9  4  1
        14 13  7 15  8  0 10 11  5  6 12  3  2  9  4  1
        15  7  5 10 13  6  8 14  0 11 12  3  2  9  4  1
        """),
        ],
        table("""
         0  6 14  5  8 10  9 11 15  7 12 13  4  3  1  2
         1  3 12  4  2  9  7 13 15  8  5 14  6  0 11 10
         2 12  3  4  1 11 13  7 15  5  9 10  8 14  0  6
         3  4 12  2  1  7 13 15 11  9  8 10  0  6 14  5
         4  3 13  7 12  2  1 15 11  9  8 10  0 14  6  5
         5 10  8  9 11  6 14  0 15  2  1 12  7  3 13  4
         6  0 14  5  8 10  9 11 15  1 12  7  3 13  2  4
         7 13 15  4  3  1 12  2 10  8  0 14  5  6 11  9
         8 10  5  9 11 14  6  0 15  1  2 12  7 13  4  3
         9  8 10  5 11  1 14  6  0  2 12  3  4 15  7 13
        10  8  5  9 11  6  0 14 15  2 12  7 13  4  3  1
        11  5 10  8  2 12  9  0  6  3 14 15  4 13  7  1
        12  2  3  4  1 11  7 13 15  9  5 10  8  0 14  6
        13  7 15  4  3 12  1  2 10  8 11  0 14  6  5  9
        14  6  0  5  8  9 10 11  1 15  7 13 12  2  3  4
        15  7 13  4  3 10  8  1 12  5 11  2  0  6 14  9
        """),
    ),
]


@pytest.mark.parametrize(("options", "inputs", "expected"), UDLF, ids=["one", "two", "three"])
def test_lists_are_those_of_udlf(
    options: dict[str, Any], inputs: list[np.ndarray], expected: np.ndarray
) -> None:
    matrices = [distances(lists, len(lists)) for lists in inputs]
    fused = matrices[0] if len(matrices) == 1 else aggregate(matrices)
    lists, _ = rerank(fused, **options)
    assert np.array_equal(lists, expected)


def test_the_fused_distance_of_two_equal_inputs_is_one_more() -> None:
    matrix = distances(UDLF[0][1][0], 12)
    assert aggregate([matrix, matrix]) == pytest.approx(1 + matrix)


def test_intersection_counts_common_tops() -> None:
    lists = np.array([[0, 1, 2, 3], [1, 0, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0]])
    # K = 3: depths 2 and 3 of lists 0 and 1 share 2 + 3 objects, of lists 0 and 2 none and {0, 2}
    found = intersections(lists, 3)
    assert found[0, 1] == pytest.approx((2 + 3) * 2 / 12)
    assert found[0, 2] == pytest.approx((0 + 2) * 2 / 12)
    assert np.array_equal(found, found.T)


def test_absent_objects_stand_at_the_lists_length() -> None:
    assert distances(np.array([[0, 2, -1], [1, -1, -1], [2, 0, 1]]), 3).tolist() == [
        [0, 3, 1],
        [3, 0, 3],
        [1, 2, 0],
    ]


def test_too_large_parameters_are_refused() -> None:
    matrix = distances(UDLF[0][1][0], 12)
    with pytest.raises(ConfigError, match="ck = 12 is not between 1 and 11"):
        rerank(matrix, topk=4, ck=12)
    with pytest.raises(ConfigError, match="topk reaches 13 of 12"):
        rerank(matrix, topk=11, ck=11, rounds=3)
    with pytest.raises(DataError, match="first in its own list"):
        rerank(matrix[::-1], topk=4, ck=11)
    many = Run.of([f"q{at}" for at in range(LARGEST)], ["d"] * LARGEST, np.ones(LARGEST))
    with pytest.raises(DataError, match=r"run\.top"):
        fuse([many, many], "rl-sim")


def labels(seed: int, queries: int = 30, count: int = 8) -> Run:
    rng = np.random.default_rng(seed)
    names = np.repeat([f"q{at}" for at in range(queries)], count)
    return Run.of(
        names.tolist(), [f"label {at}" for at in range(count)] * queries, rng.normal(size=queries * count)
    )


def test_runs_become_lists_of_documents_then_queries() -> None:
    run = Run.from_dict({"p": {"a": 3.0, "b": 2.0}, "q": {"b": 5.0}})
    found = object_distances(run, ["a", "b"], ["p", "q"])
    # a: itself, b (both in p's list), then p; q never saw it
    assert found[0].tolist() == [0, 1, 2, 4]
    # q: itself, its document b, then p, which shares b with it
    assert found[3].tolist() == [4, 1, 2, 0]


def test_given_likeness_replaces_what_the_lists_share() -> None:
    run = Run.from_dict({"p": {"a": 3.0, "b": 2.0}, "q": {"b": 5.0}})
    similar = Run.from_dict({"a": {"b": 0.1}, "q": {"p": 0.9}})
    found = object_distances(run, ["a", "b"], ["p", "q"], similar)
    assert found[1].tolist() == [4, 0, 2, 1]  # b is like nothing; q scores it above p
    assert found[3].tolist() == [4, 1, 2, 0]


def test_every_candidate_is_ranked_and_agreement_wins() -> None:
    first, second = labels(1), labels(2)
    fused = fuse([first, second], "rl-sim")
    assert fused.rows == first.rows
    assert set(np.diff(fused.offsets)) == {8}
    same = fuse([first, first], "rl-sim", rounds=1, topk=2, ck=1)
    assert np.isfinite(same.scores).all()


def test_one_run_is_reranked_by_what_its_lists_share() -> None:
    """Two texts whose lists agree draw a third one's labels into their order; a run alone is enough."""
    run, truth = classified(2.0, 5)
    reranked = fuse([run], "rl-sim")
    assert reranked.rows == run.rows
    assert first_answers(reranked, truth) > first_answers(run, truth) - 0.02
    names = sorted(set(run.documents.tolist()))
    lists, _ = rerank(object_distances(run, names, run.queries), topk=2, rounds=1)
    for at, query in enumerate(run.queries[:5]):
        mine = [names[item] for item in lists[len(names) + at] if item < len(names)]
        assert reranked[query].documents.tolist() == mine


def test_calibrated_edges_order_the_lists_and_weigh_what_they_share() -> None:
    run = Run.from_dict({"p": {"a": 3.0, "b": 2.0}, "q": {"a": 1.0, "b": 5.0}})
    other = Run.from_dict({"p": {"b": 1.0}})
    edges = calibrated_edges([run, other], [np.array([0.9, 0.1, 0.8, 0.2]), np.array([0.7])], "ab", "pq")
    # p: a .9/2, b (.1 + .7)/2; q: b, which stands first, .8/2, a .2/2
    assert edges[2, :2] == pytest.approx([0.45, 0.4])
    assert edges[3, :2] == pytest.approx([0.1, 0.4])
    assert np.array_equal(edges, edges.T)
    assert edges[2, 3] == pytest.approx((0.45 * 0.1 + 0.4 * 0.4) / np.hypot(0.45, 0.4) / np.hypot(0.1, 0.4))
    assert edge_distances(edges, 2)[3].tolist() == [2, 1, 3, 0]
    lists = np.array([[0, 1, 2], [1, 2, 0], [2, 1, 0]])
    strengths = np.array([[1.0, 0.25, 0.5], [0.25, 1.0, 0.04], [0.5, 0.04, 1.0]])
    # K = 2: lists 0 and 1 share object 1, by √(.25·1); lists 1 and 2 share both, twice √(1·.04)
    found = intersections(lists, 2, strengths)
    assert found[0, 1] == pytest.approx(0.5 * 2 / 6)
    assert found[1, 2] == pytest.approx(2 * 0.2 * 2 / 6)
    fused = fuse([run.with_probabilities(np.array([0.4, 0.3, 0.9, 0.1]))], "rl-sim", edges="calibrated")
    assert fused["q"].documents.tolist() == ["b", "a"]
    with pytest.raises(ConfigError, match="no edges 'sure'"):
        fuse([run], "rl-sim", edges="sure")


def test_strictly_increasing_calibration_changes_nothing() -> None:
    runs = [labels(seed) for seed in range(3)]
    stretched = [run.with_scores(np.exp(2 * run.scores) - 7) for run in runs]
    assert fuse(runs, "rl-sim") == fuse(stretched, "rl-sim")
    assert fuse(runs, "rlsim-eq15") == fuse(stretched, "rlsim-eq15")


def test_equation_15_takes_queries_of_any_lengths_together() -> None:
    rng = np.random.default_rng(0)
    told = {
        f"q{at}": {f"d{name}": float(value) for name, value in enumerate(rng.normal(size=length))}
        for at, length in enumerate((30, 1, 4, 26, 4, 30))
    }
    runs = [Run.from_dict(told), Run.from_dict({"q0": told["q3"], "q4": told["q2"]})]
    fused = fuse(runs, "rlsim-eq15", neighbours=5)
    for query in told:
        alone = fuse([run[[query]] for run in runs if query in run.queries], "rlsim-eq15", neighbours=5)
        assert fused[query].to_dict()[query] == pytest.approx(alone.to_dict()[query])


def test_equation_15_is_its_formula() -> None:
    first = Run.from_dict({"q": {"a": 3.0, "b": 2.0, "c": 1.0}})
    second = Run.from_dict({"q": {"b": 3.0, "a": 2.0}})
    base = {"a": 1 + 1 / 2, "b": 1 / 2 + 1, "c": 1 / 3}
    ab, ac, bc = 1 / 3 + 1 / 3, 1 / 4, 1 / 5
    expected = {
        "a": base["a"] + (ab * base["b"] + ac * base["c"]) / (ab + ac),
        "b": base["b"] + (ab * base["a"] + bc * base["c"]) / (ab + bc),
        "c": base["c"] + (ac * base["a"] + bc * base["b"]) / (ac + bc),
    }
    assert fuse([first, second], "rlsim-eq15").to_dict()["q"] == pytest.approx(expected)
    near = fuse([first, second], "rlsim-eq15", neighbours=1).to_dict()["q"]
    assert near["a"] == pytest.approx(base["a"] + base["b"])


def classified(signal: float, seed: int, *, texts: int = 300, count: int = 6) -> tuple[Run, list[int]]:
    """Lists of six labels for texts, the true label this many standard deviations up, and the true labels."""
    truth = np.random.default_rng(7).integers(count, size=texts)
    scores = np.random.default_rng(seed).normal(size=(texts, count))
    scores[np.arange(texts), truth] += signal
    names = np.repeat([f"q{at}" for at in range(texts)], count).tolist()
    return Run.of(names, [f"label {at}" for at in range(count)] * texts, scores.ravel()), truth.tolist()


def first_answers(run: Run, truth: list[int]) -> float:
    return float(
        np.mean([run[f"q{at}"].documents.tolist()[0] == f"label {true}" for at, true in enumerate(truth)])
    )


def test_with_nothing_said_it_is_near_its_best_input_where_the_frameworks_parameters_collapse() -> None:
    good, truth = classified(3.0, 1)
    for poor in (1.0, 2.0, 3.0):
        runs = [classified(poor, 2)[0], good]
        best = max(first_answers(run, truth) for run in runs)
        assert first_answers(fuse(runs, "rl-sim"), truth) > best - 0.02
        assert first_answers(fuse(runs, "rl-sim", topk=6, rounds=3, weights=[1, 1]), truth) < best - 0.1


def test_weights_are_how_clearly_first_scores_stand_above_lower_ones() -> None:
    clear = Run.from_dict({"p": {"a": 9.0, "b": 1.0}, "q": {"a": 2.0, "b": 8.0}})
    mixed = Run.from_dict({"p": {"a": 9.0, "b": 5.0}, "q": {"a": 2.0, "b": 4.0}})
    # of the four pairs of a first and a lower score the first is larger in all, and in three; the larger of
    # two independent scores is above the smaller of two others with probability 5/6
    excess = np.log(4.5 / 0.5) - np.log(5)
    assert separations([clear, mixed]) == pytest.approx([excess, excess / 10])
    assert separations([mixed]).tolist() == [0.0]
    assert separations([Run.from_dict({"p": {"a": 1.0}})]).tolist() == [0.0]
    matrices = [distances(lists, 10) for lists in UDLF[1][1]]
    assert aggregate(matrices, np.array([3.0, 1.0])) == pytest.approx(
        (1 + matrices[0]) ** 0.75 * (1 + matrices[1]) ** 0.25
    )
    assert aggregate(matrices, np.ones(2)) == pytest.approx(aggregate(matrices))


def test_judgements_choose_what_is_not_given() -> None:
    good, truth = classified(3.0, 1)
    bad = classified(0.1, 3)[0]
    sure = bad.with_scores(bad.scores + 50.0 * (bad.ranks == 1))  # surer of itself than the good one
    qrels = Qrels.from_dict({f"q{at}": {f"label {true}": 1} for at, true in enumerate(truth)})
    runs = [sure, good]
    assert first_answers(fuse(runs, "rl-sim"), truth) < 0.5
    fitted = Formula("rl-sim").fit(runs, qrels)
    assert fitted.weights_.tolist() == [2, 1, 0, 1]
    assert first_answers(fitted.fuse(runs), truth) > first_answers(good, truth) - 0.02
    assert Formula("rl-sim", options={"topk": 3}).fit(runs, qrels).weights_.tolist() == []
