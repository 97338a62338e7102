"""The page of a run."""

from __future__ import annotations

import numpy as np

from isthmus.federation.plots import refusals, run_page, weights, who_holds_what
from isthmus.federation.rounds import RoundRecord
from isthmus.partition import Deal

HISTORY = (
    RoundRecord(
        1, ("a", "b"), {"b": "sent <b>rubbish</b>"}, {}, {"a": 0.7, "memory": 0.3}, {"a": 0.1}, measure=0.4
    ),
    RoundRecord(2, ("a", "b"), {"b": "failed"}, {}, {"a": 1.0}, {"a": 0.2}, norm=2.0, measure=0.5),
    RoundRecord(3, ("a", "b"), {}, {}, {"a": 0.5, "b": 0.5}, {}, norm=None, measure=0.45),
)


def test_a_page_has_the_curve_the_weights_and_the_refusals():
    html = run_page(HISTORY, "Run").html()
    assert html.count("<svg") == 4
    assert "no DP guarantee" in html
    assert "<b>rubbish" not in html


def test_refusals_are_counted_by_silo():
    assert refusals(HISTORY).rows == (("b", 2, "failed"),)


def test_the_same_history_is_the_same_picture():
    assert weights(HISTORY).svg() == weights(HISTORY).svg()


def test_a_run_without_anything_to_show_is_still_a_page():
    assert "<svg" in run_page((RoundRecord(1, norm=1.0),), "Run").html()


def test_who_holds_what_is_on_the_page_where_it_is_known():
    held = Deal(np.array([0, 0, 1, 2, 2, 2]), 3).label_counts([0, 1, 0, 0, 1, 2])
    assert who_holds_what(held).svg() == who_holds_what(held).svg()
    assert run_page(HISTORY, "Run", label_counts=held).html().count("<svg") == 5
