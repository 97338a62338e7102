"""Every measure of trec_eval, against pytrec_eval, which runs trec_eval 9 itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from isthmus.evaluation import Evaluation, Measure, evaluate
from isthmus.tables import Qrels, Run, read_qrels, read_run

pytrec_eval = pytest.importorskip("pytrec_eval")

NOT_MEASURES = {"runid", "relstring"}
NAMES = set(pytrec_eval.supported_measures) - NOT_MEASURES
DOCUMENTS = [f"d{number}" for number in range(60)]

Judgements = dict[str, dict[str, int]]
Lists = dict[str, dict[str, float]]


def worst_difference(qrels: Judgements, run: Lists, *, rel: int = 1) -> float:
    """The largest difference to pytrec_eval over all its measures and queries; means are checked as well."""
    peer = pytrec_eval.RelevanceEvaluator(qrels, NAMES, relevance_level=rel).evaluate(run)
    names = sorted(next(iter(peer.values())))
    measures = [Measure.parse(name) for name in names]
    measures = [measure(rel=rel) if "rel" in measure else measure for measure in measures]
    ours = evaluate(Qrels.from_dict(qrels), Run.from_dict(run), measures, profile="trec_eval")
    worst = 0.0
    for name, measure in zip(names, measures, strict=True):
        values = ours.per_query(measure)
        assert values.keys() == peer.keys()
        worst = max(worst, *(abs(values[query] - peer[query][name]) for query in peer))
        together = pytrec_eval.compute_aggregated_measure(name, [row[name] for row in peer.values()])
        assert ours.means[str(ours.resolve(measure))] == pytest.approx(together, rel=1e-12, abs=1e-12), name
    return worst


def random_pair(random: np.random.Generator) -> tuple[Judgements, Lists]:
    """Judgements and a run: graded, negative grades, ties of several kinds, queries missing on both sides."""
    qrels: Judgements = {}
    run: Lists = {}
    for number in range(random.integers(1, 5)):
        judged = random.choice(DOCUMENTS, random.integers(1, 40), replace=False)
        grades = random.choice([-1, 0, 0, 1, 2, 3, 4], len(judged))
        grades[0] = max(grades[0], 0)  # trec_eval reads memory it does not own when no grade is at least 0
        qrels[f"q{number}"] = dict(zip(judged.tolist(), grades.tolist(), strict=True))
        if number and random.random() < 0.1:
            continue
        count = int(random.integers(1, 40))
        few = random.integers(0, 5, count).astype(float)
        close = 1 + random.integers(0, 3, count) * 1e-9  # equal in single precision only
        scores = [few, close, random.normal(size=count)][random.integers(3)]
        listed = random.choice(DOCUMENTS, count, replace=False)
        run[f"q{number}"] = dict(zip(listed.tolist(), scores.tolist(), strict=True))
    run["unjudged"] = {"d1": 1.0}
    return qrels, run


@pytest.mark.soak
def test_random_runs_with_ties(soak_count: Callable[[int, int], int]) -> None:
    random = np.random.default_rng(20)
    for trial in range(soak_count(100, 1000)):
        qrels, run = random_pair(random)
        assert worst_difference(qrels, run, rel=1 + trial % 2) < 1e-12


def test_every_name_of_trec_eval_is_understood() -> None:
    for name in NAMES:
        with_cut = {"P", "recall", "success", "map_cut", "ndcg_cut", "relative_P"}
        share = {"iprec_at_recall", "Rprec_mult"}
        spelled = f"{name}_5" if name in with_cut else f"{name}_0.20" if name in share else name
        assert Measure.parse(str(Measure.parse(spelled))) == Measure.parse(spelled)
        assert Measure.parse(spelled) == Measure.parse(spelled.replace("_5", ".5"))


@pytest.mark.parametrize("unjudged", [False, True])
def test_judged_documents_only(unjudged: bool) -> None:
    random = np.random.default_rng(4)
    for _ in range(30):
        qrels, run = random_pair(random)
        flags = {"judged_docs_only_flag": unjudged}
        peer = pytrec_eval.RelevanceEvaluator(qrels, {"map", "ndcg", "P.5", "bpref"}, **flags).evaluate(run)
        drop = {"unjudged": "drop"} if unjudged else {}
        measures = {name: Measure.parse(name)(**drop) for name in ("map", "ndcg", "P_5", "bpref")}
        ours = evaluate(Qrels.from_dict(qrels), Run.from_dict(run), measures.values(), profile="trec_eval")
        for name, measure in measures.items():
            expected = {query: row[name] for query, row in peer.items()}
            assert ours.per_query(measure) == pytest.approx(expected, abs=1e-12)


def test_scores_are_compared_in_single_precision_only_under_the_profile() -> None:
    """trec_eval 9 keeps scores as C floats: two that differ in the tenth digit are tied there."""
    qrels, run = {"q": {"a": 1, "b": 0}}, {"q": {"a": 1 + 1e-10, "b": 1.0}}
    peer = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(run)
    assert peer["q"]["recip_rank"] == 0.5
    tables = Qrels.from_dict(qrels), Run.from_dict(run)
    assert evaluate(*tables, ["MRR"], profile="trec_eval")["MRR"] == 0.5
    assert evaluate(*tables, ["MRR"])["MRR"] == 1.0


@pytest.fixture(scope="module", params=["bm25", "colbert"])
def dl19(request: pytest.FixtureRequest, data_dir: Path) -> tuple[Qrels, Run, str]:
    folder = data_dir / "runs" / "trec-dl"
    run = read_run(folder / f"{request.param}.dl19.run", name=request.param)
    return read_qrels(folder / "qrels.dl19-passage.txt"), run, request.param


@pytest.mark.realdata
def test_dl19_runs_agree_in_every_measure(dl19: tuple[Qrels, Run, str]) -> None:
    qrels, run, _ = dl19
    assert worst_difference(qrels.to_dict(), run.to_dict()) < 1e-12
    assert worst_difference(qrels.to_dict(), run.to_dict(), rel=2) < 1e-12


@pytest.mark.realdata
def test_dl19_published_values(dl19: tuple[Qrels, Run, str]) -> None:
    qrels, run, name = dl19
    found: Evaluation = evaluate(qrels, run, ["nDCG@10(gain=linear)"])
    assert round(found["nDCG@10(gain=linear)"], 4) == {"bm25": 0.4795, "colbert": 0.7320}[name]
    assert found.counted(found.measures[0]) == 43
