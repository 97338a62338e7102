"""URisk, TRisk, ZRisk and GeoRisk of runs against arithmetic by hand, and as the command line prints them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import command_line
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import Propensity, compare, georisk, risk_rewards, trisk, urisk, zrisk
from isthmus.evaluation import Testing as Plan
from isthmus.tables import Qrels, Run

RUN, BASE = [0.5, 0.1, 0.4, 0.9], [0.2, 0.3, 0.4, 0.8]
SHARES = st.lists(st.floats(0.01, 1), min_size=6, max_size=6)


def test_urisk_by_hand():
    """δ = 0.3, −0.2, 0, 0.1: mean 0.05; with α = 2 the loss counts 0.6."""
    assert urisk(RUN, BASE, alpha=0) == pytest.approx(0.05)
    assert urisk(RUN, BASE, alpha=2) == pytest.approx((0.3 - 0.6 + 0.0 + 0.1) / 4)
    np.testing.assert_allclose(risk_rewards(RUN, BASE, alpha=2), [0.3, -0.6, 0.0, 0.1], atol=1e-12)


def test_trisk_is_student_s_t_of_the_rewards():
    from scipy.stats import ttest_1samp

    assert trisk(RUN, BASE, alpha=2) == pytest.approx(ttest_1samp([0.3, -0.6, 0.0, 0.1], 0).statistic)
    assert trisk(BASE, BASE) == 0
    with pytest.raises(DataError, match="at least two"):
        trisk([0.5, math.nan], [0.2, 0.1])


def test_zrisk_and_georisk_by_hand():
    """Two runs, two queries: S = 1, 1; T = 1, 1; N = 2, so every cell is expected at ½."""
    table = [[0.75, 0.25], [0.25, 0.75]]
    z = 0.25 / math.sqrt(0.5)
    np.testing.assert_allclose(zrisk(table, alpha=0), [0, 0], atol=1e-12)
    np.testing.assert_allclose(zrisk(table, alpha=3), [z - 4 * z] * 2)
    phi = 0.5 * (1 + math.erf(-3 * z / 2 / math.sqrt(2)))
    np.testing.assert_allclose(georisk(table, alpha=3), [math.sqrt(0.5 * phi)] * 2)


def test_georisk_of_unequal_rows_step_by_step():
    table = np.array([[0.9, 0.2, 0.4], [0.5, 0.5, 0.5], [0.1, 0.0, 0.3]])
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    z = (table - expected) / np.sqrt(expected)
    deviations = np.where(z < 0, 2 * z, z).sum(1)
    np.testing.assert_allclose(zrisk(table), deviations)
    phi = [0.5 * (1 + math.erf(value / 3 / math.sqrt(2))) for value in deviations]
    np.testing.assert_allclose(georisk(table), np.sqrt(table.mean(1) * phi))


def test_an_empty_column_and_an_empty_row_have_nothing_to_deviate_from():
    values = georisk([[0.0, 0.0], [0.0, 0.4]])
    assert values[0] == 0
    assert values[1] == pytest.approx(math.sqrt(0.2 / 2))


@given(SHARES, SHARES, st.floats(0, 10))
def test_laws_of_risk(first, second, alpha):
    assert urisk(first, second, alpha=0) == pytest.approx(np.mean(first) - np.mean(second))
    assert urisk(first, second, alpha=alpha) <= urisk(first, second, alpha=0) + 1e-12
    assert urisk(first, first, alpha=alpha) == 0
    assert urisk(first, second, alpha=alpha) + urisk(second, first, alpha=alpha) <= 1e-12
    table, alike = np.array([first, second]), np.outer(first, second)
    np.testing.assert_allclose(zrisk(alike, alpha=alpha), 0, atol=1e-6)
    np.testing.assert_allclose(georisk(alike, alpha=alpha), np.sqrt(alike.mean(1) / 2), atol=1e-6)
    assert (georisk(table, alpha=alpha) <= georisk(table, alpha=0) + 1e-12).all()


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="alpha = -1"):
        urisk(RUN, BASE, alpha=-1)
    with pytest.raises(DataError, match="4 values beside 3"):
        urisk(RUN, BASE[:3])


QRELS = Qrels.from_dict({f"q{at}": {"a": 1, "b": 0} for at in range(4)})


def run_of(name: str, right: str) -> Run:
    """A run that puts the relevant document first where `right` has a 1, else second."""
    scores = {"1": {"a": 2.0, "b": 1.0}, "0": {"a": 1.0, "b": 2.0}}
    return Run.from_dict({f"q{at}": scores[sign] for at, sign in enumerate(right)}, name=name)


def test_a_comparison_counts_queries_won_and_lost():
    base, other = run_of("base", "1100"), run_of("other", "0111")
    (risk,) = compare(QRELS, [base, other], ["MRR"], baseline="base").risks(alpha=1)
    assert (risk.run, risk.wins, risk.losses, risk.large_losses, risk.urisk.n) == ("other", 2, 1, 1, 4)
    assert risk.urisk.value == pytest.approx((0.5 + 0.5 - 2 * 0.5) / 4)
    assert risk.urisk.low < risk.urisk.value < risk.urisk.high
    table = [[1, 1, 0.5, 0.5], [0.5, 1, 1, 1]]
    assert risk.georisk == pytest.approx(georisk(table, alpha=1)[1])
    assert risk.zrisk == pytest.approx(zrisk(table, alpha=1)[1])


def test_without_a_baseline_every_run_stands_against_the_mean_of_the_others():
    runs = [run_of("x", "1111"), run_of("y", "1100"), run_of("z", "0000")]
    x, y, z = compare(QRELS, runs, ["MRR"]).risks(alpha=1)
    assert (x.wins, x.losses, z.wins, z.losses) == (4, 0, 0, 4)
    assert y.urisk.value == pytest.approx((2 * 0.25 - 2 * 2 * 0.25) / 4)
    with pytest.raises(ConfigError, match="two runs"):
        compare(QRELS, runs[:1], ["MRR"]).risks()


def test_queries_that_do_not_count_for_a_run_do_not_count():
    judged = Qrels.from_dict({"q0": {"a": 1, "b": 0}, "q1": {"a": 1, "b": 0}, "q2": {"a": 0}})
    (risk,) = compare(
        judged, [run_of("base", "11"), run_of("other", "01")], ["MRR(empty=skip)"], baseline="base"
    ).risks()
    assert (risk.urisk.n, risk.wins, risk.losses) == (2, 0, 1)


GROUPED = Plan(groups=["a", "a", "b", "b"])


def test_groups_are_those_of_the_queries_that_count():
    runs = [run_of("base", "1100"), run_of("other", "011")]  # without q3, so that q3 does not count
    comparison = compare(QRELS, runs, ["MRR(missing=skip)"], baseline="base", testing=GROUPED)
    (risk,), (row,) = comparison.risks(alpha=1), comparison.differences()
    assert risk.urisk.value == pytest.approx((-2 * 0.5 + 0 + 0.5) / 3)
    assert risk.urisk.n == 2
    assert row["difference"] == pytest.approx(0)


def test_queries_are_counted_although_groups_are_resampled():
    runs = [run_of("base", "1100"), run_of("other", "0111")]
    comparison = compare(QRELS, runs, ["MRR"], baseline="base", testing=GROUPED)
    assert [row["queries"] for row in comparison.differences()] == [4]
    assert [risk.row()["queries"] for risk in comparison.risks()] == [4]
    for table in (comparison.difference_table(), comparison.risk_table()):
        assert "on 4 queries" in table.notes[0]


def test_the_risk_table_says_that_groups_are_resampled():
    comparison = compare(QRELS, [run_of("x", "1100"), run_of("y", "0111")], ["MRR"], testing=GROUPED)
    assert "over groups of queries." in comparison.risk_table().text()


def test_differences_of_geometric_means_are_in_their_unit():
    """MAP by query: 1, 1, ½, ½ and ½, ½, ½, 1, whose geometric means are ½^½ and ½^¾."""
    runs = [run_of("base", "1100"), run_of("other", "0001")]
    comparison = compare(QRELS, runs, ["GMAP"], baseline="base")
    (row,), (risk,) = comparison.differences(), comparison.risks(alpha=0)
    assert row["difference"] == pytest.approx(0.5**0.75 - 0.5**0.5)
    assert row["difference"] == pytest.approx(row["value"] - row["baseline"])
    assert -0.5 <= row["low"] < row["difference"] < row["high"] <= 0.5
    assert risk.urisk.value == pytest.approx((-0.5 - 0.5 + 0.5) / 4)
    assert risk.georisk == pytest.approx(georisk([[1, 1, 0.5, 0.5], [0.5, 0.5, 0.5, 1]], alpha=0)[1])
    near = {f"q{at}": {"a": 1.0} | {f"x{other}": 2.0 for other in range(4)} for at in range(4)}
    far = {query: {**ranked, "x4": 2.0} for query, ranked in near.items()}
    runs = [Run.from_dict(near, name="near"), Run.from_dict(far, name="far")]
    (row,) = compare(QRELS, runs, ["GMAP"], baseline="near").differences()
    assert (row["losses"], row["large_losses"]) == (4, 0), "from 1/5 to 1/6 is no loss of 0.2"


def test_a_ratio_of_means_is_of_the_queries_that_count():
    judged = Qrels.from_dict({"q0": {"rare": 1}, "q1": {"usual": 1}, "q2": {"usual": 1}})
    known = Propensity.of_counts({"rare": 1, "usual": 90}, 100)
    base = {"q1": {"usual": 2.0, "no": 1.0}, "q2": {"no": 2.0}}
    other = {"q1": {"usual": 1.0}, "q2": {"usual": 1.0}}
    runs = [Run.from_dict(base, name="base"), Run.from_dict(other, name="other")]
    measures = ["psP@1(missing=skip)", "psnDCG@1(missing=skip)"]
    comparison = compare(judged, runs, measures, baseline="base", propensity=known)
    for row, verdict in zip(comparison.differences(), comparison.verdicts, strict=True):
        assert row["value"] - row["baseline"] == pytest.approx(0.5)
        assert row["difference"] == verdict.paired.difference == pytest.approx(0.5)


@pytest.fixture
def folder(tmp_path):
    """Judgements of two queries, and two runs."""
    (tmp_path / "qrels").write_text("q1 0 a 1\nq1 0 b 0\nq2 0 a 1\nq2 0 b 0\n")
    (tmp_path / "base.run").write_text("q1 Q0 a 1 9 x\nq1 Q0 b 2 8 x\nq2 Q0 b 1 9 x\nq2 Q0 a 2 8 x\n")
    (tmp_path / "new.run").write_text("q1 Q0 b 1 9 x\nq1 Q0 a 2 8 x\nq2 Q0 a 1 9 x\nq2 Q0 b 2 8 x\n")
    return tmp_path


def test_differences_to_the_baseline():
    runs = [run_of("base", "0110"), run_of("other", "1101")]
    comparison = compare(QRELS, runs, ["MRR", "NumRet"], baseline="base")
    (row,) = comparison.differences()  # a sum has none
    values = {"baseline": 0.75, "value": 0.875, "difference": 0.125}
    assert {name: row[name] for name in values} == pytest.approx(values)
    assert row["low"] < 0.125 < row["high"]
    assert row["p"] == pytest.approx(comparison.verdicts[0].adjusted)
    assert (row["run"], row["wins"], row["losses"], row["large_losses"], row["queries"]) == (
        "other",
        2,
        1,
        1,
        4,
    )
    with pytest.raises(ConfigError, match="baseline"):
        compare(QRELS, runs, ["MRR"]).differences()


def test_the_command_line_compares_with_the_first_run(folder):
    (folder / "worse.run").write_text((folder / "base.run").read_text().replace("q2 Q0 a 2", "q2 Q0 c 2"))
    words = ("compare", "qrels", "base.run", "new.run", "worse.run", "-m", "MRR")
    new, worse = json.loads(command_line.isthmus(*words, "--json", folder=folder).stdout)
    assert (new["run"], new["difference"], new["wins"], new["losses"]) == ("new.run", 0, 1, 1)
    assert (worse["difference"], worse["wins"], worse["losses"]) == (-0.25, 0, 1)
    text = command_line.isthmus(*words, folder=folder).stdout
    assert "Differences to 'base.run', on 2 queries" in text
    assert "Holm" in text


def test_the_command_line_prints_risks(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    words = ("compare", "qrels", "base.run", "new.run", "-m", "MRR", "--risk")
    text = command_line.isthmus(*words, "--alpha", "3", folder=folder).stdout
    assert "lost > 0.2" in text
    assert "α = 3" in text
    (row,) = json.loads(command_line.isthmus(*words, "--alpha", "3", "--json", folder=folder).stdout)
    assert row["urisk"] == pytest.approx((0.5 - 4 * 0.5) / 2)
    assert (row["run"], row["wins"], row["losses"], row["large_losses"]) == ("new.run", 1, 1, 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--alpha", "2"], "--risk"),
        (["--risk", "--alpha", "-1"], "0 or more"),
        (["base.run"], "two runs are named"),
    ],
)
def test_options_that_do_not_go_together(folder, words, says):
    done = command_line.isthmus("compare", "qrels", "base.run", "new.run", *words, folder=folder, check=False)
    assert done.returncode == 1
    assert says in done.stderr
