"""Laws that hold for every run, every judgement and every measure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.evaluation import FAMILIES, Measure, ece, evaluate, holm, mce, randomisation, reliability
from isthmus.evaluation.formulas import FORMULAS
from isthmus.tables import Qrels, Run

SHARES = [
    "nDCG",
    "nDCG@3",
    "nDCG@3(gain=linear)",
    "MAP",
    "MAP@4",
    "MRR",
    "MRR@2",
    "ERR",
    "ERR@3",
    "P@3",
    "R@3",
    "RelP@3",
    "Success@2",
    "Rprec",
    "bpref",
    "infAP",
    "binG",
    "RBP",
    "SetP",
    "SetF",
    "iprec@0.5",
    "iprec11",
]
TOP_HEAVY = ["nDCG", "nDCG@3", "DCG", "MAP", "MRR", "ERR", "RBP", "P@3", "R@3", "iprec11"]

documents = st.sampled_from([f"d{number}" for number in range(12)])
grades = st.integers(min_value=-1, max_value=4)
scores = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]) | st.floats(-3, 3, width=32)
judgements = st.dictionaries(documents, grades, min_size=1, max_size=12)
lists = st.dictionaries(documents, scores, max_size=12)
pairs = st.dictionaries(st.sampled_from("abcde"), st.tuples(judgements, lists), min_size=1, max_size=5)


def tables(pair: dict[str, tuple[dict[str, int], dict[str, float]]]) -> tuple[Qrels, Run]:
    qrels = Qrels.from_dict({query: judged for query, (judged, _) in pair.items()})
    return qrels, Run.from_dict({query: ranked for query, (_, ranked) in pair.items()})


@st.composite
def measures(draw: st.DrawFn) -> Measure:
    """Any measure with any parameters."""
    name = draw(st.sampled_from(sorted(FAMILIES)))
    family = FAMILIES[name]
    cut = None
    if family.cut == "fraction":
        cut = draw(st.sampled_from([0.0, 0.1, 0.25, 1.0]))
    elif family.cut == "required" or (family.cut == "optional" and draw(st.booleans())):
        cut = draw(st.integers(1, 1000))
    chosen = {}
    for parameter in draw(st.lists(st.sampled_from(family.names), unique=True, max_size=4)):
        kind = family.parameter(parameter)
        chosen[parameter] = draw(
            st.sampled_from(kind.words) if hasattr(kind, "words") else st.just(kind.default)
        )
    return Measure(name, cut, tuple(chosen.items()))


@given(measures())
def test_a_measure_reads_back_from_its_name(measure: Measure) -> None:
    again = Measure.parse(str(measure))
    assert again == measure
    assert hash(again) == hash(measure)
    assert str(again) == str(measure)


@given(pairs)
def test_shares_lie_between_0_and_1(pair: dict) -> None:
    found = evaluate(*tables(pair), SHARES)
    for measure in found.measures:
        values = found.values[measure]
        assert ((values >= 0) & (values <= 1 + 1e-12)).all(), measure


@settings(max_examples=50)
@given(pairs, st.randoms(use_true_random=False))
def test_order_of_input_does_not_matter(pair: dict, random: object) -> None:
    names = [name + {"required": "@3", "fraction": "@0.5"}.get(FAMILIES[name].cut, "") for name in FORMULAS]
    found = evaluate(*tables(pair), names)
    shuffled = {}
    for query in random.sample(sorted(pair), len(pair)):
        shuffled[query] = tuple(dict(random.sample(sorted(part.items()), len(part))) for part in pair[query])
    again = evaluate(*tables(shuffled), names)
    for measure in found.measures:
        assert again.per_query(measure) == pytest.approx(found.per_query(measure), abs=1e-14), measure


@given(pairs, st.floats(0.1, 10), st.floats(-5, 5))
def test_only_the_order_of_scores_counts(pair: dict, scale: float, shift: float) -> None:
    coarse = {
        query: (judged, {document: round(score, 1) for document, score in ranked.items()})
        for query, (judged, ranked) in pair.items()
    }
    moved = {
        query: (judged, {document: scale * score + shift for document, score in ranked.items()})
        for query, (judged, ranked) in coarse.items()
    }
    assert evaluate(*tables(coarse), SHARES).means == pytest.approx(evaluate(*tables(moved), SHARES).means)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=12), st.data())
def test_moving_a_better_document_up_never_hurts(graded: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(graded) - 2))
    low, high = sorted(graded[at : at + 2])
    worse = [*graded[:at], low, high, *graded[at + 2 :]]
    better = [*graded[:at], high, low, *graded[at + 2 :]]
    before, after = (evaluate(*listed(order), TOP_HEAVY).means for order in (worse, better))
    for name in TOP_HEAVY:
        assert after[name] >= before[name] - 1e-12, name


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any))
def test_the_ideal_list_scores_one(graded: list[int]) -> None:
    found = evaluate(
        *listed(sorted(graded, reverse=True)), ["nDCG", "nDCG@3", "MAP", "MRR", "Rprec", "RnDCG"]
    )
    assert found.means == pytest.approx(dict.fromkeys(found.means, 1.0))


@given(pairs)
def test_worthless_documents_at_the_end_change_nothing(pair: dict) -> None:
    longer = {query: (judged, ranked | {"unheard of": -100.0}) for query, (judged, ranked) in pair.items()}
    names = ["nDCG", "MAP", "MRR", "ERR", "P@3", "R@20", "bpref", "iprec11", "RBP"]
    assert evaluate(*tables(longer), names).means == pytest.approx(evaluate(*tables(pair), names).means)


@given(st.permutations([0, 1, 1, 2, 3, 4, 0]))
def test_err_as_printed_does_not_see_the_order(graded: list[int]) -> None:
    expected = evaluate(*listed([4, 3, 2, 1, 1, 0, 0]), ["err_printed"])["err_printed"]
    assert evaluate(*listed(graded), ["err_printed"])["err_printed"] == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_never_lowers_nor_reorders(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert (adjusted >= np.array(p_values)).all()
    assert (adjusted <= 1).all()
    order = np.argsort(p_values, kind="stable")
    assert (np.diff(adjusted[order]) >= 0).all()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=30))
def test_swapping_the_runs_swaps_the_sign(values: list[tuple[float, float]]) -> None:
    first, second = np.array(values).T
    one, other = randomisation(first, second, samples=200), randomisation(second, first, samples=200)
    assert one.difference == -other.difference
    assert one.p == other.p
    assert 0 < one.p <= 1


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60), st.integers(1, 20))
def test_calibration_errors(rows: list[tuple[float, bool]], bins: int) -> None:
    chances, outcomes = [row[0] for row in rows], [row[1] for row in rows]
    for how in ("width", "mass"):
        small, large = (error(chances, outcomes, bins=bins, how=how) for error in (ece, mce))
        assert 0 <= small <= large + 1e-12 <= 1 + 1e-9
        assert ece(chances[::-1], outcomes[::-1], bins=bins, how=how) == pytest.approx(small, abs=1e-12)
        assert reliability(chances, outcomes, bins=bins, how=how).count.sum() == len(rows)


def listed(graded: list[int]) -> tuple[Qrels, Run]:
    """One query whose list has these grades from the top."""
    names = [f"d{at:02d}" for at in range(len(graded))]
    ranked = {name: float(-at) for at, name in enumerate(names)}
    return Qrels.from_dict({"q": dict(zip(names, graded, strict=True))}), Run.from_dict({"q": ranked})
