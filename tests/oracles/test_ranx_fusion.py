"""Fusion against ranx 0.3.21: its output on three small runs, as data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.fusion import fuse
from isthmus.tables import Run

RUNS = (
    {
        "q1": {"d1": 9.5, "d2": 7.25, "d3": 7.0, "d5": 1.5, "d8": 0.5},
        "q2": {"d4": 3.0, "d1": 2.0, "d9": 0.5},
        "q3": {"d7": 0.25, "d2": 0.125},
    },
    {
        "q1": {"d3": 0.9, "d1": 0.85, "d4": 0.5, "d6": 0.1},
        "q2": {"d9": 0.7, "d2": 0.65, "d4": 0.2, "d5": 0.1},
        "q3": {"d6": 0.6, "d7": 0.5},
    },
    {
        "q1": {"d6": 30.0, "d3": 20.0, "d2": 11.0},
        "q2": {"d1": 12.0, "d9": 8.0},
        "q3": {"d7": 5.0, "d2": 3.0, "d6": 1.0},
    },
)

OPTIONS: dict[str, dict[str, Any]] = {
    "comb-gmnz": {"gamma": 2.0},
    "rbc": {"phi": 0.8},
    "weighted": {"weights": (0.5, 0.3, 0.2), "missing": 0.0},
}

EXPECTED = """
comb-sum none 10.35 18.25 27.9 0.5 1.5 30.1 0.5 14 0.65 3.2 0.1 9.2 3.125 1.6 5.75
comb-sum min-max 1.9375 0.75 2.195906 0.5 0.1111111 1 0 1.6 0.9166667 1.166667 0 1 0.5 1 2
comb-sum max 1.944444 1.129825 2.403509 0.5555556 0.1578947 1.111111 0.05263158 1.666667 0.9285714 1.285714
  0.1428571 1.833333 1.1 1.2 2.833333
comb-sum sum 0.7717122 0.2903226 1.011255 0.2051282 0.04301075 0.6785714 0 1.375 0.44 0.705 0 0.48 0.3333333
  1 1.666667
comb-sum z-score 2.05636 -0.604895 1.457548 -0.2726813 -1.039047 -0.2735676 -1.323718 1.162221 0.8946751
  0.3350512 -1.177204 -1.214744 -1 -0.2247449 1.224745
comb-sum rank 1.75 1.133333 2.266667 0.5 0.4 1.25 0.2 1.666667 0.75 1.5 0.25 1.833333 1.166667 1.333333 2.5
comb-mnz min-max 3.875 1.5 6.587719 0.5 0.1111111 2 0 3.2 0.9166667 2.333333 0 3 1 2 6
comb-anz min-max 0.96875 0.375 0.7319688 0.5 0.1111111 0.5 0 0.8 0.9166667 0.5833333 0 0.3333333 0.25 0.5
  0.6666667
comb-min min-max 0.9375 0 0.4736842 0.5 0.1111111 0 0 0.6 0.9166667 0.1666667 0 0 0 0 0
comb-max min-max 1 0.75 1 0.5 0.1111111 1 0 1 0.9166667 1 0 1 0.5 1 1
comb-med min-max 0.96875 0.375 0.7222222 0.5 0.1111111 0.5 0 0.8 0.9166667 0.5833333 0 0 0.25 0.5 1
comb-gmnz min-max 7.75 3 19.76316 0.5 0.1111111 4 0 6.4 0.9166667 4.666667 0 9 2 4 18
rrf none 0.03252248 0.03200205 0.04839549 0.01587302 0.015625 0.03201844 0.01538462 0.03252248 0.01612903
  0.03226646 0.015625 0.04839549 0.03225807 0.03226646 0.04891592
isr none 2.5 0.7222222 4.083333 0.1111111 0.0625 2.125 0.04 2.5 0.25 2.222222 0.0625 4.083333 1 2.222222
  6.75
rbc none 0.36 0.288 0.488 0.128 0.1024 0.3024 0.08192 0.36 0.16 0.328 0.1024 0.488 0.32 0.328 0.56
borda none 15.5 13 18 9 8.5 12.5 7.5 10 7.5 10 5.5 12 5 5 8
weighted min-max 0.78125 0.375 0.755848 0.15 0.05555556 0.2 0 0.5 0.275 0.55 0 0.3 0.1 0.3 0.7
"""
"""Method, normaliser, and the score of every candidate in order of (query, document)."""


def expected() -> list[tuple[str, str, list[float]]]:
    entries = [line.split() for line in EXPECTED.strip().replace("\n  ", " ").splitlines()]
    return [(method, norm, [float(number) for number in numbers]) for method, norm, *numbers in entries]


@pytest.mark.parametrize(("method", "norm", "scores"), expected(), ids=lambda value: str(value)[:9])
def test_scores_are_those_of_ranx(method: str, norm: str, scores: list[float]) -> None:
    runs = [Run.from_dict(lists, name=str(at)) for at, lists in enumerate(RUNS)]
    fused = fuse(runs, method, norm=norm, **OPTIONS.get(method, {})).to_dict()
    found = [fused[query][document] for query in sorted(fused) for document in sorted(fused[query])]
    assert found == pytest.approx(scores, rel=1e-6, abs=1e-9)


def test_where_ranx_zeroes_a_good_hit_it_counts_here() -> None:
    alone = Run.from_dict({"q": {"a": 3.0}})
    assert fuse([alone], "comb-sum", norm="min-max").to_dict() == {"q": {"a": 1.0}}  # ranx: 0
    losses = Run.from_dict({"q": {"a": -1.0, "b": -2.0}})
    assert np.array_equal(fuse([losses], "comb-sum", norm="max").scores, [1.0, 0.0])  # ranx: −1e9, −2e9
