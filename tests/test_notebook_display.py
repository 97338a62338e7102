"""What a notebook shows: tables as HTML, Arrow and pandas; estimators as scikit-learn prints them."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from isthmus.calibration import Judging, Platt
from isthmus.errors import MissingExtra
from isthmus.evaluation import compare, evaluate
from isthmus.fusion import Formula, LogOdds, Stacked, Weighted
from isthmus.rankers import MLP, LambdaMART, Linear, LocalTraining
from isthmus.report import Estimate, Page, Section, Table
from isthmus.retrieval import BM25
from isthmus.tables import Letor, Qrels, Run

NASTY = "<script>alert(1)</script>"
QRELS = Qrels.from_dict({f"q{at}": {NASTY: 1, "other": 0} for at in range(30)})
RUN = Run.from_dict({f"q{at}": {NASTY: 2.0, "other": 1.0} for at in range(30)}, name=f"run {NASTY}")
WORSE = Run.from_dict({f"q{at}": {NASTY: 1.0, "other": 2.0} for at in range(30)}, name="worse")
LETOR = Letor.of([f"q{at // 2}" for at in range(60)], np.arange(60 * 30).reshape(60, 30), [0, 1] * 30)
TABLES = {
    "run": RUN,
    "qrels": QRELS,
    "letor": LETOR,
    "evaluation": evaluate(QRELS, RUN, ["nDCG@10", "MRR"]),
    "comparison": compare(QRELS, [RUN, WORSE], ["nDCG@10", "NumRet"]),
    "table": Table(("a", NASTY), tuple((at, NASTY) for at in range(30))),
}
EMPTY = {"run": Run.from_dict({}), "letor": LETOR[:0], "table": Table(("a",), ())}


@pytest.mark.parametrize("name", TABLES)
def test_html_is_escaped_and_short(name: str) -> None:
    shown = TABLES[name]._repr_html_()
    assert shown.startswith("<table>")
    assert "<script" not in shown
    assert 1 < shown.count("<tr>") <= 21


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_table_is_shown(name: str) -> None:
    assert EMPTY[name]._repr_html_().startswith("<table>")


def test_html_says_how_much_is_left_out() -> None:
    assert "The first 20 of 60 rows." in RUN._repr_html_()
    assert "The first 12 of 33 columns." in LETOR._repr_html_()
    assert "The first 20 of 30 rows." in TABLES["table"]._repr_html_()


def test_one_long_list_is_shown() -> None:
    long = Run.from_dict({"q": {f"d{at}": float(at) for at in range(100)}})
    assert "The first 20 of 100 rows." in long._repr_html_()


def test_arrow_has_every_row() -> None:
    run = RUN.with_probabilities(np.full(60, 0.5)).to_arrow()
    assert run.column_names == ["query", "document", "rank", "score", "probability"]
    assert run.num_rows == 60
    assert run.slice(0, 1).to_pylist() == [
        {"query": "q0", "document": NASTY, "rank": 1, "score": 2.0, "probability": 0.5}
    ]
    assert Run.of(run["query"], run["document"], run["score"]) == RUN
    judged = QRELS.to_arrow()
    assert Qrels.of(judged["query"], judged["document"], judged["grade"]) == QRELS
    rows = LETOR.to_arrow()
    assert rows.column_names[:4] == ["query", "document", "grade", "feature 1"]
    assert rows["feature 30"].to_pylist() == LETOR.features[:, 29].tolist()


def test_arrow_of_results_is_their_machine_readable_form() -> None:
    for name in ("evaluation", "comparison"):
        assert TABLES[name].to_arrow().to_pylist() == TABLES[name].rows()


def test_arrow_of_a_report_keeps_intervals() -> None:
    table = Table(("run", "MAP"), (("bm25", Estimate(0.4, 0.3, 0.5)), ("dense", 0.7)))
    assert table.to_arrow().to_pydict() == {
        "run": ["bm25", "dense"],
        "MAP": [0.4, 0.7],
        "MAP low": [0.3, None],
        "MAP high": [0.5, None],
    }


@pytest.mark.parametrize("name", TABLES)
def test_pandas_or_the_extra_that_is_missing(name: str) -> None:
    if find_spec("pandas") is None:
        with pytest.raises(MissingExtra, match=r"pip install 'isthmus\[pandas\]'"):
            TABLES[name].to_pandas()
    else:
        assert len(TABLES[name].to_pandas()) == TABLES[name].to_arrow().num_rows


def test_a_page_is_shown_in_a_frame_of_its_own() -> None:
    shown = Page("title", (Section("heading", (f'a "quoted" {NASTY}', TABLES["table"])),))._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "<script" not in shown
    assert shown.count('"') == 4


def test_estimators_print_what_differs_from_the_default() -> None:
    assert repr(Platt()) == "Platt()"
    assert repr(MLP()) == "MLP(hidden=(32,))"
    assert repr(MLP([64], seed=3)) == "MLP(hidden=(64,), seed=3)"
    assert repr(Linear(patience=5)) == "Linear(patience=5)"
    assert repr(LambdaMART(trees=10)) == "LambdaMART(trees=10)"
    assert (
        repr(MLP(training=LocalTraining(epochs=3))) == "MLP(hidden=(32,), training=LocalTraining(epochs=3))"
    )
    assert repr(Stacked(judging=Judging(threshold=2))) == "Stacked(judging=Judging(threshold=2))"
    assert repr(Stacked()) == "Stacked()"
    assert repr(LogOdds(calibrator="platt")) == "LogOdds(calibrator='platt')"
    assert repr(Weighted(weights=[1, 2], folds=3)) == "Weighted(folds=3, weights=(1.0, 2.0))"
    assert repr(Formula("rrf")) == "Formula(formula='rrf')"
    assert "stop_words" not in repr(BM25())
