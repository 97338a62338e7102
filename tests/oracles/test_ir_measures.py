"""Measures that other providers of ir-measures have: gdeval, MS MARCO's script, the judged rate."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from isthmus.evaluation import evaluate
from isthmus.tables import Qrels, Run, read_qrels, read_run

ir_measures = pytest.importorskip("ir_measures")
from ir_measures import ERR, RR, Judged, nDCG  # noqa: E402


@pytest.fixture(scope="module")
def pair() -> tuple[dict[str, dict[str, int]], dict[str, dict[str, float]]]:
    """Without ties, which two of these providers break by ascending id; gdeval wants numbers as query ids."""
    random = np.random.default_rng(6)
    qrels, run = {}, {}
    for query in range(1, 41):
        documents = [f"d{number:03d}" for number in random.permutation(200)]
        grades = random.choice(5, 50, p=[0.5, 0.2, 0.15, 0.1, 0.05]).tolist()
        qrels[str(query)] = dict(zip(documents[:50], [4, *grades[1:]], strict=True))
        listed = random.permutation(documents[:120])[:80].tolist()
        run[str(query)] = dict(zip(listed, random.normal(size=80).tolist(), strict=True))
    return qrels, run


def theirs(provider: str, measure: object, qrels: dict, run: dict) -> dict[str, float]:
    evaluator = ir_measures.providers.registry[provider].evaluator([measure], qrels)
    return {found.query_id: found.value for found in evaluator.iter_calc(run)}


@pytest.mark.skipif(shutil.which("perl") is None, reason="gdeval is a Perl script")
@pytest.mark.parametrize(
    ("measure", "ours"),
    [
        (nDCG(dcg="exp-log2") @ 10, "nDCG@10"),
        (nDCG(dcg="exp-log2") @ 20, "nDCG@20"),
        (ERR @ 10, "ERR@10(gmax=4)"),
        (ERR @ 20, "ERR@20(gmax=4)"),
    ],
)
def test_gdeval(measure: object, ours: str, pair: tuple[dict, dict]) -> None:
    qrels, run = pair
    found = evaluate(Qrels.from_dict(qrels), Run.from_dict(run), [ours]).per_query(ours)
    assert found == pytest.approx(theirs("gdeval", measure, qrels, run), abs=5.1e-6)  # it prints five digits


@pytest.mark.parametrize(("cutoff", "rel"), [(10, 1), (5, 2), (100, 3)])
def test_msmarco_reciprocal_rank(cutoff: int, rel: int, pair: tuple[dict, dict]) -> None:
    qrels, run = pair
    name = f"MRR@{cutoff}(rel={rel})"
    found = evaluate(Qrels.from_dict(qrels), Run.from_dict(run), [name]).per_query(name)
    expected = theirs("msmarco", RR(rel=rel) @ cutoff, qrels, run)
    assert {query: found[query] for query in expected} == pytest.approx(expected, abs=1e-12)
    assert all(value == 0 for query, value in found.items() if query not in expected)


@pytest.mark.parametrize("cutoff", [5, 50, 200])
def test_judged_rate(cutoff: int, pair: tuple[dict, dict]) -> None:
    qrels, run = pair
    found = evaluate(Qrels.from_dict(qrels), Run.from_dict(run), [f"Judged@{cutoff}"])
    assert found.per_query(f"Judged@{cutoff}") == pytest.approx(
        theirs("judged", Judged @ cutoff, qrels, run), abs=1e-12
    )


@pytest.mark.realdata
def test_dl19_through_ir_measures(data_dir: Path) -> None:
    folder = data_dir / "runs" / "trec-dl"
    qrels, run = read_qrels(folder / "qrels.dl19-passage.txt"), read_run(folder / "bm25.dl19.run")
    pairs = {"nDCG@10": "nDCG@10(gain=linear)", "AP(rel=2)": "MAP(rel=2)", "RR(rel=2)": "MRR(rel=2)"}
    pairs |= {
        "P(rel=2)@10": "P@10(rel=2)",
        "R(rel=2)@100": "R@100(rel=2)",
        "Rprec": "Rprec",
        "Bpref": "bpref",
    }
    asked = [ir_measures.parse_measure(name) for name in pairs]
    expected = ir_measures.calc_aggregate(asked, qrels.to_dict(), run.to_dict())
    found = evaluate(qrels, run, pairs.values(), profile="trec_eval")
    for measure, name in zip(asked, pairs.values(), strict=True):
        assert found[name] == pytest.approx(expected[measure], abs=1e-12)
