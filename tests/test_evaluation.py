"""Measures as values, their conventions, and what is computed from them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import (
    FAMILIES,
    PROFILES,
    Comparison,
    Evaluation,
    Measure,
    Propensity,
    compare,
    evaluate,
    evaluate_rows,
)
from isthmus.evaluation import Testing as Plan
from isthmus.evaluation.formulas import FORMULAS
from isthmus.tables import Qrels, Run

LOG3 = math.log2(3)


def graded(grades: list[int], **others: int) -> tuple[Qrels, Run]:
    """One query whose list has these grades from the top, and judged documents that are not in it."""
    documents = [f"d{at}" for at in range(len(grades))]
    run = {document: float(len(grades) - at) for at, document in enumerate(documents)}
    return Qrels.from_dict({"q": dict(zip(documents, grades, strict=True)) | others}), Run.from_dict(
        {"q": run}
    )


def value(measure: str, tables: tuple[Qrels, Run], **more: object) -> float:
    return evaluate(*tables, [measure], **more)[measure]


class TestMeasure:
    @pytest.mark.parametrize(
        ("text", "canonical"),
        [
            ("nDCG@10", "nDCG@10"),
            ("nDCG @ 10 ( gain = linear )", "nDCG@10(gain=linear)"),
            ("nDCG(gain=linear)@10", "nDCG@10(gain=linear)"),
            ("nDCG@10(gain=exp, empty=zero)", "nDCG@10"),
            ("nDCG@10(ties=random,seed=3,empty=skip)", "nDCG@10(empty=skip, seed=3, ties=random)"),
            ("RR@5", "MRR@5"),
            ("AP", "MAP"),
            ("Hit@5", "Success@5"),
            ("Recall@100", "R@100"),
            ("ERR@20(gmax=4)", "ERR@20(gmax=4)"),
            ("RBP(p=0.95)", "RBP(p=0.95)"),
            ("iprec@0.10", "iprec@0.1"),
            ("ndcg_cut_10", "nDCG@10(gain=linear)"),
            ("ndcg_cut.10", "nDCG@10(gain=linear)"),
            ("recip_rank", "MRR"),
            ("11pt_avg", "iprec11"),
            ("P_5", "P@5"),
        ],
    )
    def test_parses_and_prints(self, text: str, canonical: str) -> None:
        measure = Measure.parse(text)
        assert str(measure) == canonical
        assert Measure.parse(canonical) == measure
        assert hash(Measure.parse(canonical)) == hash(measure)

    def test_is_built_like_an_expression(self) -> None:
        ndcg = Measure("nDCG")
        assert ndcg(gain="linear") @ 10 == Measure.parse("nDCG@10(gain=linear)")
        assert (ndcg @ 10)["gain"] == "exp"
        assert ndcg @ 5 != ndcg @ 10

    @pytest.mark.parametrize(
        ("text", "hint"),
        [
            ("nDGC@10", "did you mean 'nDCG'"),
            ("ndcg@10", "did you mean 'nDCG'"),
            ("mrr", "did you mean 'MRR'"),
            ("nDCG@10(gian=linear)", "did you mean 'gain'"),
            ("nDCG@10(gain=linea)", "did you mean 'linear'"),
            ("nDCG@10(rel=2)", "known are gain"),
            ("P", "needs a cut-off"),
            ("Rprec@5", "no cut-off"),
            ("nDCG@0", "a rank, from 1"),
            ("nDCG@2.5", "a rank, from 1"),
            ("nDCG@1@2", "is not a measure"),
            ("nDCG@10(linear)", "is not a parameter"),
            ("MRR(rel=0)", "from 1"),
            ("MRR(rel=one)", "whole number"),
            ("", "is not a measure"),
            ("nDCG@10(", "is not a measure"),
        ],
    )
    def test_what_it_does_not_know(self, text: str, hint: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(hint)):
            Measure.parse(text)

    def test_a_profile_sets_what_was_not_said(self) -> None:
        assert (
            str(Measure.parse("nDCG@10").under("trec_eval"))
            == "nDCG@10(gain=linear, missing=skip, ties=trec32)"
        )
        said = Measure.parse("nDCG@10(gain=exp)")
        assert said == Measure.parse("nDCG@10")
        assert said.under("trec_eval")["gain"] == "exp"
        assert Measure.parse("MAP@5").under("lightgbm")["norm"] == "cut"
        assert Measure.parse("MAP").under("sklearn")["ties"] == "last"
        with pytest.raises(ConfigError, match="did you mean 'trec_eval'"):
            Measure.parse("MAP").under("treceval")

    def test_every_family_has_a_formula_and_conventions(self) -> None:
        assert FAMILIES.keys() - FORMULAS.keys() == {"psP", "psnDCG"}
        assert FORMULAS.keys() <= FAMILIES.keys()
        assert "gain=exp" in Measure.parse("nDCG").conventions()
        assert set(PROFILES) == {"trec_eval", "lightgbm", "sklearn"}

    def test_a_list_is_wanted(self) -> None:
        with pytest.raises(ConfigError, match="list"):
            evaluate(*graded([1]), "nDCG")


class TestDefinitions:
    """The formulae of the definitions, worked by hand on one list."""

    def test_ndcg(self) -> None:
        tables = graded([0, 2, 1], unseen=3)
        dcg = 3 / LOG3 + 1 / 2
        assert value("DCG", tables) == pytest.approx(dcg)
        assert value("nDCG", tables) == pytest.approx(dcg / (7 + 3 / LOG3 + 1 / 2))
        assert value("nDCG@2", tables) == pytest.approx((3 / LOG3) / (7 + 3 / LOG3))
        assert value("nDCG@2(gain=linear)", tables) == pytest.approx((2 / LOG3) / (3 + 2 / LOG3))
        assert value("ndcg_printed@2", tables) == pytest.approx((3 / LOG3) / (7 + 3 / LOG3 + 1 / 2))

    def test_err(self) -> None:
        tables = graded([1, 2])
        assert value("ERR", tables) == pytest.approx(1 / 4 + 1 / 2 * (3 / 4) * (3 / 4))
        assert value("ERR@1", tables) == pytest.approx(1 / 4)
        assert value("ERR(gmax=4)", tables) == pytest.approx(1 / 16 + 1 / 2 * (15 / 16) * (3 / 16))
        with pytest.raises(ConfigError, match="grade 2"):
            value("ERR(gmax=1)", tables)

    def test_gmax_is_of_the_data_not_of_the_list(self) -> None:
        qrels = Qrels.from_dict({"q": {"a": 1}, "other": {"x": 4}})
        run = Run.from_dict({"q": {"a": 1.0}, "other": {"y": 1.0}})
        assert evaluate(qrels, run, ["ERR"]).per_query("ERR")["q"] == pytest.approx(1 / 16)
        assert evaluate(qrels, run, ["err_code"]).per_query("err_code")["q"] == pytest.approx(1 / 2)

    def test_reciprocal_rank_and_its_threshold(self) -> None:
        tables = graded([0, 1, 2])
        assert value("MRR", tables) == 1 / 2
        assert value("MRR(rel=2)", tables) == 1 / 3
        assert value("MRR@2(rel=2)", tables) == 0
        assert value("Success@1", tables) == 0
        assert value("Success@2", tables) == 1

    def test_average_precision(self) -> None:
        tables = graded([1, 0, 1], unseen=1)
        assert value("MAP", tables) == pytest.approx((1 + 2 / 3) / 3)
        assert value("MAP@2", tables) == pytest.approx(1 / 3)
        assert value("MAP@2(norm=cut)", tables) == pytest.approx(1 / 2)

    def test_precision_is_over_k_however_short_the_list(self) -> None:
        assert value("P@10", graded([1, 1])) == pytest.approx(0.2)
        assert value("R@10", graded([1, 1], unseen=1)) == pytest.approx(2 / 3)
        assert value("SetP", graded([1, 0])) == pytest.approx(1 / 2)

    def test_rank_biased_precision(self) -> None:
        assert value("RBP(p=0.5)", graded([1, 0, 1])) == pytest.approx(0.5 * (1 + 0.25))

    def test_negative_grades_are_never_relevant(self) -> None:
        for measure in ("nDCG", "MAP", "MRR", "ERR", "P@1"):
            assert value(measure, graded([-2, 1])) < 1
            assert value(measure, graded([-2, 0])) == 0

    def test_grades_too_large_for_the_exponential_gain(self) -> None:
        tables = graded([5000, 0])
        with pytest.raises(DataError, match="gain=linear"):
            value("nDCG", tables)
        assert value("nDCG(gain=linear)", tables) == 1.0


class TestPrintedVariants:
    """What the cross-silo paper prints and codes under the names of other measures."""

    def test_err_without_the_rank_does_not_see_the_order(self) -> None:
        random = np.random.default_rng(1)
        grades = random.integers(0, 5, 20)
        found = {
            round(value("err_printed", graded(random.permutation(grades).tolist())), 12) for _ in range(20)
        }
        assert len(found) == 1
        assert found.pop() == pytest.approx(1 - np.prod(1 - (2.0**grades - 1) / 2 ** grades.max()))

    def test_map_printed_is_unbounded(self) -> None:
        random = np.random.default_rng(2)
        lists = [graded(random.permutation(np.arange(120)).tolist()) for _ in range(60)]
        found = [value("map_printed", tables) for tables in lists]
        assert np.mean(found) == pytest.approx(60.5 * sum(1 / r for r in range(1, 121)) / 120, rel=0.05)
        assert value("map_printed", graded([3, 2, 2, 0])) == 1.0

    def test_map_code(self) -> None:
        grades = [2, 0, 1]
        running = [2, 1, 1]
        expected = sum(g * mean for g, mean in zip(grades, running, strict=True)) / 3
        assert value("map_code", graded(grades)) == pytest.approx(expected)


class TestConventions:
    def test_queries_without_relevant_documents(self) -> None:
        qrels = Qrels.from_dict({"yes": {"a": 1}, "no": {"a": 0}})
        run = Run.from_dict({"yes": {"a": 1.0}, "no": {"a": 1.0}})
        for measure in ("nDCG@5", "MAP", "MRR", "P@1", "R@1", "ERR"):
            cut = measure.rstrip(")")
            assert (
                evaluate(qrels, run, [measure])[measure]
                == evaluate(qrels, run, [f"{cut}(empty=zero)"])[measure]
            )
            top = evaluate(qrels, run, [measure]).per_query(measure)["yes"]
            skipped = evaluate(qrels, run, [f"{cut}(empty=skip)"])
            assert skipped[f"{cut}(empty=skip)"] == top
            assert skipped.counted(skipped.measures[0]) == 1
            assert evaluate(qrels, run, [f"{cut}(empty=one)"]).per_query(f"{cut}(empty=one)")["no"] == 1.0

    def test_the_empty_rule_follows_the_threshold(self) -> None:
        tables = graded([1, 0])
        assert value("MRR(empty=one)", tables) == 1.0
        assert value("MRR(empty=one, rel=2)", tables) == 1.0
        assert math.isnan(value("MRR(empty=skip, rel=2)", tables))

    def test_queries_missing_on_either_side(self) -> None:
        qrels = Qrels.from_dict({"both": {"a": 1}, "judged only": {"a": 1}})
        run = Run.from_dict({"both": {"a": 1.0}, "ranked only": {"a": 1.0}})
        found = evaluate(qrels, run, ["MRR", "MRR(missing=skip)", "NumQ", "NumRet"])
        assert found["MRR"] == 0.5
        assert found["MRR(missing=skip)"] == 1.0
        assert (found["NumQ"], found["NumRet"]) == (2, 1)
        assert (found.missing, found.unjudged) == (("judged only",), ("ranked only",))

    def test_no_query_in_common_is_an_error(self) -> None:
        with pytest.raises(DataError, match="no query in common"):
            evaluate(Qrels.from_dict({"1": {"a": 1}}), Run.from_dict({"01": {"a": 1.0}}), ["MRR"])

    def test_an_empty_list_is_in_the_run(self) -> None:
        qrels = Qrels.from_dict({"full": {"a": 1}, "empty": {"a": 1}})
        run = Run.from_dict({"full": {"a": 1.0}, "empty": {}})
        found = evaluate(qrels, run, [f"{name}{_cut(name)}" for name in FORMULAS])
        assert found.missing == ()
        assert all(np.isfinite(values).all() for values in found.values.values())
        assert evaluate(qrels, run, ["MRR(missing=skip)"])["MRR(missing=skip)"] == 0.5

    def test_nothing_judged_and_nothing_listed(self) -> None:
        names = [f"{name}{_cut(name)}" for name in FORMULAS]
        found = evaluate(Qrels.from_dict({"q": {}}), Run.from_dict({"q": {}}), names)
        assert all(np.isfinite(values).all() for values in found.values.values())
        assert math.isnan(evaluate(Qrels.from_dict({}), Run.from_dict({}), ["MRR"])["MRR"])

    def test_tied_scores(self) -> None:
        qrels = Qrels.from_dict({"q": {"b": 1}})
        run = Run.of(["q"] * 3, ["b", "a", "c"], [1.0, 1.0, 1.0])
        assert evaluate(qrels, run, ["MRR"])["MRR"] == 1 / 2  # c, b, a
        assert evaluate(qrels, run, ["MRR(ties=input)"])["MRR(ties=input)"] == 1.0
        assert evaluate(qrels, run, ["nDCG(ties=average)"])["nDCG(ties=average)"] == pytest.approx(
            (1 + 1 / LOG3 + 1 / 2) / 3
        )
        assert evaluate(qrels, run, ["MAP(ties=last)"])["MAP(ties=last)"] == pytest.approx(1 / 3)
        assert evaluate(qrels, run, ["MRR"]).tie_rate == 1.0

    def test_random_ties_depend_on_seed_and_list_alone(self) -> None:
        documents = {f"d{at:02d}": 1.0 for at in range(30)}
        qrels = Qrels.from_dict({query: {"d07": 1} for query in "abcdefgh"})
        run = Run.from_dict(dict.fromkeys("abcdefgh", documents))
        first = evaluate(qrels, run, ["MRR(ties=random)"]).per_query("MRR(ties=random)")
        some = evaluate(qrels, run[["c", "a"]], ["MRR(ties=random)"]).per_query("MRR(ties=random)")
        assert (some["a"], some["c"]) == (first["a"], first["c"])
        assert len(set(first.values())) > 1
        other = evaluate(qrels, run, ["MRR(ties=random, seed=1)"]).per_query("MRR(ties=random, seed=1)")
        assert other != first

    def test_input_order_survives_slicing_and_rescoring(self) -> None:
        qrels = Qrels.from_dict({"q": {"b": 1}, "p": {"a": 1}})
        run = Run.of(["q", "q", "p", "p"], ["b", "z", "z", "a"], [1.0, 1.0, 2.0, 2.0])
        measure = "MRR(ties=input)"
        assert evaluate(qrels, run, [measure]).per_query(measure) == {"q": 1.0, "p": 0.5}
        assert evaluate(qrels, run["q"], [measure]).per_query(measure)["q"] == 1.0
        again = run.with_scores([3.0, 4.0, 1.0, 1.0]).with_scores(np.zeros(4))
        assert evaluate(qrels, again, [measure]).per_query(measure) == {"q": 1.0, "p": 0.5}

    def test_unjudged_documents_may_be_dropped(self) -> None:
        qrels = Qrels.from_dict({"q": {"good": 1, "spam": -1, "bad": 0}})
        run = Run.from_dict({"q": {"new": 4.0, "spam": 3.0, "bad": 2.0, "good": 1.0}})
        assert evaluate(qrels, run, ["MRR"])["MRR"] == 1 / 4
        assert evaluate(qrels, run, ["MRR(unjudged=drop)"])["MRR(unjudged=drop)"] == 1 / 2
        assert evaluate(qrels, run, ["Judged@1"])["Judged@1"] == 0

    @pytest.mark.parametrize(
        ("name", "rules"),
        [
            ("nDCG@10", ("trec", "trec32", "input", "random", "average")),
            ("MAP", ("trec", "trec32", "input", "random", "last")),
        ],
    )
    def test_tie_rules_agree_where_nothing_is_tied(self, name: str, rules: tuple[str, ...]) -> None:
        qrels = Qrels.from_dict({"p": {"a": 2, "b": 1, "spam": -1}, "q": {"a": 1, "b": 0}, "r": {"a": 1}})
        run = Run.from_dict(
            {
                "p": {"new": 9.0, "a": 8.0, "spam": 7.0, "newer": 6.0, "b": 5.0},
                "q": {"b": 4.0, "new": 3.0, "a": 2.0, "newest": 1.0},
                "r": {"new": 1.0},
            }
        )
        names = [f"{name}(ties={rule}, unjudged=drop)" for rule in rules]
        found = evaluate(qrels, run, names)
        for measure in names:
            assert found.per_query(measure) == pytest.approx(found.per_query(names[0]))
        assert found.per_query(names[0])["p"] == 1.0

    @pytest.mark.parametrize("measure", ["nDCG@5(ties=average)", "MAP(ties=last)"])
    def test_ties_are_those_of_the_kept_documents(self, measure: str) -> None:
        random = np.random.default_rng(11)
        scores = random.integers(0, 4, (30, 15)).astype(float)
        grades = random.integers(-1, 4, (30, 15))
        judged = random.random((30, 15)) < 0.6
        judged[0] = False  # a list of which nothing is left
        queries, names = np.repeat(np.arange(30), 15).astype(str), np.tile(np.arange(15), 30).astype(str)
        whole = Run.of(queries.tolist(), names.tolist(), scores.reshape(-1))
        known = np.flatnonzero(judged)
        qrels = Qrels.of(queries[known].tolist(), names[known].tolist(), grades.reshape(-1)[known])
        left = np.flatnonzero(judged & (grades >= 0))
        part = Run.of(queries[left].tolist(), names[left].tolist(), scores.reshape(-1)[left])
        dropping = f"{measure[:-1]}, unjudged=drop)"
        found = evaluate(qrels, whole, [dropping]).per_query(dropping)
        assert found == pytest.approx(evaluate(qrels, part, [measure]).per_query(measure), abs=1e-14)
        assert 0.1 < np.mean(list(found.values())) < 0.9


class TestSingleLabel:
    """The identities that hold when every query has exactly one relevant label."""

    @pytest.fixture
    def world(self) -> tuple[Qrels, Run, Propensity, np.ndarray, np.ndarray]:
        random = np.random.default_rng(5)
        labels = [f"l{label}" for label in range(12)]
        true = random.integers(0, 12, 200)
        scores = random.normal(size=(200, 12))
        qrels = Qrels.from_dict({f"q{q}": {labels[true[q]]: 1} for q in range(200)})
        run = Run.from_dict({f"q{q}": dict(zip(labels, scores[q].tolist(), strict=True)) for q in range(200)})
        propensity = Propensity.of_counts({label: 3**at for at, label in enumerate(labels)}, 10_000)
        ranks = (scores > scores[np.arange(200), true][:, None]).sum(axis=1) + 1
        worth = 1 + propensity.c * (3.0**true + 1.5) ** -0.55
        return qrels, run, propensity, ranks, worth

    def test_identities(self, world: tuple[Qrels, Run, Propensity, np.ndarray, np.ndarray]) -> None:
        qrels, run, propensity, ranks, worth = world
        names = [f"{name}@{k}" for name in ("P", "R", "nDCG", "psP", "psnDCG") for k in (1, 3, 5, 10)]
        found = evaluate(qrels, run, names, propensity=propensity)
        for k in (1, 3, 5, 10):
            hit = ranks <= k
            assert found[f"P@{k}"] == pytest.approx(found[f"R@{k}"] / k)
            assert found[f"psP@{k}"] == pytest.approx((worth * hit).sum() / worth.sum())
            gained = (worth * hit / np.log2(1 + ranks)).sum() / worth.sum()
            assert found[f"psnDCG@{k}"] == pytest.approx(gained)
        assert found["psP@1"] == found["psnDCG@1"]
        assert found["nDCG@1"] == found["P@1"]
        assert found["psP@1"] <= found["psP@3"] <= found["psP@5"] <= found["psP@10"]

    def test_propensities_are_needed(self, world: tuple) -> None:
        for ask in (evaluate, lambda qrels, run, measures: compare(qrels, [run], measures)):
            with pytest.raises(ConfigError, match=r"propensity=.*--propensity TRAIN_QRELS"):
                ask(world[0], world[1], ["psP@1"])


class TestPropensity:
    def test_published_constants(self) -> None:
        found = Propensity.of_counts({"head": 3964, "tail": 1, "never": 0}, 13327)
        assert found.c == pytest.approx(14.0657, abs=5e-5)
        labels = Run.from_dict({"q": {"head": 4.0, "tail": 3.0, "never": 2.0, "unheard of": 1.0}}).documents
        assert found.inverse(labels) == pytest.approx([1.1476, 9.4975, 12.2541, 12.2541], abs=5e-5)

    def test_from_training_judgements(self) -> None:
        train = Qrels.from_dict({"t1": {"a": 1, "b": 0}, "t2": {"a": 1}, "t3": {"c": 1}})
        found = Propensity.of_qrels(train)
        same = Propensity.of_counts({"a": 2, "c": 1}, 3)
        labels = Run.from_dict({"q": {"a": 3.0, "b": 2.0, "c": 1.0}}).documents
        assert found.inverse(labels).tolist() == same.inverse(labels).tolist()

    def test_too_little_training(self) -> None:
        with pytest.raises(DataError, match="at least 3"):
            Propensity.of_counts({"a": 1}, 2)


class TestRows:
    @pytest.mark.parametrize("lengths", [[5, 0, 25, 12], [1, 0, 2, 1, 1, 1, 300]])
    def test_agrees_with_tables(self, lengths: list[int]) -> None:
        random = np.random.default_rng(3)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        grades, scores = random.integers(0, 4, offsets[-1]), random.normal(size=offsets[-1])
        queries = [f"q{at}" for at in np.repeat(np.arange(len(lengths)), lengths)]
        names = [f"d{at}" for at in range(offsets[-1])]
        measures = ["nDCG@10", "MAP", "MRR@3(rel=2)", "ERR@5", "P@3"]
        rows = evaluate_rows(grades, scores, offsets, measures)
        tables = evaluate(Qrels.of(queries, names, grades), Run.of(queries, names, scores), measures)
        for measure in measures:
            found = rows.values[rows.measures[measures.index(measure)]]
            expected = list(tables.per_query(measure).values())
            assert np.delete(found, 1) == pytest.approx(expected, abs=1e-14)
            assert found[1] == 0
        assert rows["nDCG@10"] == rows.means["nDCG@10(ties=random)"]

    def test_ties_are_random_unless_the_measure_says_input(self) -> None:
        grades, scores, offsets = np.array([1, 0] * 50), np.zeros(100), np.arange(0, 101, 2)
        assert 0.3 < evaluate_rows(grades, scores, offsets, ["P@1"])["P@1"] < 0.7
        assert evaluate_rows(grades, scores, offsets, ["P@1(ties=input)"])["P@1(ties=input)"] == 1.0
        with pytest.raises(ConfigError, match="ties=trec"):
            evaluate_rows(grades, scores, offsets, ["P@1(ties=trec)"])

    def test_columns_must_fit(self) -> None:
        with pytest.raises(DataError, match="3 grades, 2 scores"):
            evaluate_rows([1, 0, 0], [1.0, 2.0], [0, 3], ["MRR"])
        with pytest.raises(DataError, match="NaN"):
            evaluate_rows([1], [math.nan], [0, 1], ["MRR"])

    @pytest.mark.parametrize("grade", [0.9, math.nan, 2.0**40])
    def test_grades_are_whole_numbers(self, grade: float) -> None:
        with pytest.raises(DataError, match="is not a whole number"):
            evaluate_rows([1.0, grade], [1.0, 2.0], [0, 2], ["MRR"])
        assert evaluate_rows([1.0, 0.0], [1.0, 2.0], [0, 2], ["MRR"])["MRR"] == 0.5

    @pytest.mark.parametrize("offsets", [[], [1, 3], [0, 2, 1, 3], [-1, 3]])
    def test_offsets_rise_from_0(self, offsets: list[int]) -> None:
        with pytest.raises(DataError, match="offsets"):
            evaluate_rows([1, 0, 0], [3.0, 2.0, 1.0], offsets, ["MRR"])


class TestEvaluation:
    @pytest.fixture
    def found(self) -> Evaluation:
        qrels = Qrels.from_dict({"q1": {"a": 1}, "q2": {"a": 1}})
        run = Run.from_dict({"q1": {"a": 1.0}, "q2": {"b": 2.0, "a": 1.0}}, name="bm25")
        return evaluate(qrels, run, ["MRR", "nDCG@10", "MRR"], profile="trec_eval")

    def test_is_found_under_every_spelling(self, found: Evaluation) -> None:
        full = "MRR(missing=skip, ties=trec32)"
        assert list(found.means) == [full, "nDCG@10(gain=linear, missing=skip, ties=trec32)"]
        assert found["MRR"] == found["RR"] == found.means["recip_rank"] == found[full] == 0.75
        with pytest.raises(KeyError):
            found["MAP"]
        with pytest.raises(KeyError):
            found.per_query("MAP")

    def test_machine_readable(self, found: Evaluation) -> None:
        assert found.rows()[0] == {
            "run": "bm25",
            "measure": "MRR(missing=skip, ties=trec32)",
            "value": 0.75,
            "queries": 2,
        }

    def test_no_value_where_no_query_counts(self) -> None:
        tables = Qrels.from_dict({"q": {"a": 0}}), Run.from_dict({"q": {"a": 1.0}})
        (row,) = evaluate(*tables, ["MRR(empty=skip)"]).rows()
        assert (row["value"], row["queries"]) == (None, 0)

    def test_values_cannot_be_changed(self, found: Evaluation) -> None:
        with pytest.raises(ValueError, match="read-only"):
            found.values[found.measures[0]][0] = 1.0

    def test_remarks_stand_below_the_table(self) -> None:
        qrels = Qrels.from_dict({"both": {"a": 1}, "judged only": {"a": 1}})
        run = Run.from_dict({"both": {"a": 1.0, "b": 1.0}, "ranked only": {"a": 1.0}}, name="x")
        found = evaluate(qrels, run, ["MRR"])
        assert len(found.remarks()) == 3
        assert found.remarks()[0] == "x: 1 of 2 judged queries is not in the run."
        assert list(Comparison((found,)).table().notes[-3:]) == found.remarks()
        assert evaluate(*graded([1, 0]), ["MRR"]).remarks() == []

    @pytest.mark.parametrize(
        ("grades", "measures", "least"), [([0, 0], ["nDCG@10"], 1), ([1, 0], ["MRR", "P@5(rel=2)"], 2)]
    )
    def test_judgements_without_anything_relevant_are_named(self, grades, measures, least) -> None:
        (remark,) = evaluate(*graded(grades), measures).remarks()
        assert f"no judgement has a grade of {least} or more" in remark

    def test_geometric_means_and_sums(self) -> None:
        qrels = Qrels.from_dict({"q1": {"a": 1}, "q2": {"a": 1}, "q3": {"a": 1}})
        run = Run.from_dict({"q1": {"a": 1.0}, "q2": {"b": 2.0, "a": 1.0}, "q3": {"b": 1.0}})
        found = evaluate(qrels, run, ["GMAP", "NumRelRet"])
        assert found["GMAP"] == pytest.approx((1 * 0.5 * 1e-5) ** (1 / 3))
        assert found["NumRelRet"] == 2


class TestComparison:
    @pytest.fixture
    def runs(self) -> tuple[Qrels, dict[str, Run]]:
        random = np.random.default_rng(7)
        qrels = Qrels.from_dict({f"q{q}": {"good": 2, "fair": 1} for q in range(40)})

        def run(skill: float) -> Run:
            scores = random.normal(size=(40, 6))
            scores[:, 0] += skill
            names = ["good", "fair", "x1", "x2", "x3", "x4"]
            return Run.from_dict(
                {f"q{q}": dict(zip(names, scores[q].tolist(), strict=True)) for q in range(40)}
            )

        return qrels, {"poor": run(-1.0), "fine": run(3.0), "good_too": run(3.1)}

    def test_marks_what_is_significantly_better(self, runs: tuple[Qrels, dict[str, Run]]) -> None:
        report = compare(*runs, ["nDCG@10", "MRR"])
        better = {(row["run"], row["measure"]): row["better_than"] for row in report.rows()}
        assert better["fine", "nDCG@10"] == ["poor"]
        assert better["good_too", "MRR"] == ["poor"]
        assert better["poor", "MRR"] == []
        assert len(report.verdicts) == 6
        assert all(verdict.adjusted >= verdict.paired.p for verdict in report.verdicts)

    def test_against_a_baseline_only(self, runs: tuple[Qrels, dict[str, Run]]) -> None:
        report = compare(*runs, ["MRR"], baseline="poor", testing=Plan(test="t"))
        assert {(verdict.first, verdict.second) for verdict in report.verdicts} == {
            ("fine", "poor"),
            ("good_too", "poor"),
        }
        with pytest.raises(ConfigError, match="did you mean 'poor'"):
            compare(*runs, ["MRR"], baseline="pour")

    def test_shows_conventions_in_every_form(self, runs: tuple[Qrels, dict[str, Run]]) -> None:
        report = compare(*runs, ["nDCG@10(gain=linear)"], profile="trec_eval")
        table = report.table(title="Three runs")
        for form in (str(report), table.markdown(), table.latex(), table.html()):
            assert "gain=linear" in form
            assert "missing=skip" in form
            assert "Holm" in form
        assert "good\\_too" in table.latex()
        assert str(report).splitlines()[3].startswith("b  fine")
        assert "ᵃ" in str(report)

    def test_intervals_hold_the_value(self, runs: tuple[Qrels, dict[str, Run]]) -> None:
        for row in compare(*runs, ["nDCG@10", "GMAP", "NumRet"]).rows():
            if row["measure"] == "NumRet":
                assert row["low"] is None
            else:
                assert row["low"] < row["value"] < row["high"]

    def test_groups_widen_the_interval(self, runs: tuple[Qrels, dict[str, Run]]) -> None:
        qrels, three = runs
        doubled = Qrels.from_dict({f"{q}{copy}": g for q, g in qrels.to_dict().items() for copy in "xy"})
        fine = {f"{q}{copy}": ranked for q, ranked in three["fine"].to_dict().items() for copy in "xy"}
        tables = doubled, {"fine": Run.from_dict(fine)}, ["nDCG@10"]
        alone = compare(*tables).rows()[0]
        grouped = compare(*tables, testing=Plan(groups=np.repeat(np.arange(40), 2))).rows()[0]
        assert grouped["high"] - grouped["low"] > 1.2 * (alone["high"] - alone["low"])

    def test_names_must_differ(self, runs: tuple[Qrels, dict[str, Run]]) -> None:
        qrels, three = runs
        with pytest.raises(ConfigError, match="two runs are named 'x'"):
            compare(qrels, [run.named("x") for run in three.values()], ["MRR"])
        assert [e.run for e in compare(qrels, list(three.values()), ["MRR"]).evaluations] == [
            "run 1",
            "run 2",
            "run 3",
        ]

    def test_propensities(self) -> None:
        qrels = Qrels.from_dict({f"q{q}": {f"l{q % 3}": 1} for q in range(30)})
        right = Run.from_dict({f"q{q}": {f"l{q % 3}": 2.0, "no": 1.0} for q in range(30)}, name="right")
        wrong = Run.from_dict({f"q{q}": {f"l{q % 3}": 1.0, "no": 2.0} for q in range(30)}, name="wrong")
        report = compare(qrels, [right, wrong], ["psP@1"], propensity=Propensity.of_qrels(qrels))
        assert report.verdicts[0].paired.difference == pytest.approx(1.0)
        assert report.verdicts[0].adjusted < 0.001

    def test_evaluations_must_match(self) -> None:
        one, other = evaluate(*graded([1]), ["MRR"]), evaluate(*graded([1]), ["MAP"])
        with pytest.raises(ConfigError):
            Comparison((one, other))


def _cut(name: str) -> str:
    return {"required": "@5", "fraction": "@0.5"}.get(FAMILIES[name].cut, "")
