"""The two hypotheses that the rank-fusion paper names and does not test.

It states that weighting by confidence helps where retrievers differ in confidence, provided that confidence
indicates quality, and where they disagree about the first answer. Both are measured on first answers; so are
calibrated weights in UDLF's graph, which it names as future work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.evaluation import evaluate
from isthmus.fusion import fuse
from isthmus.tables import Qrels, Run

EDGES = {"RL-Sim": "positions", "RL-Sim, calibrated edges": "calibrated"}
SHARES = (
    *("surer is right", "agree", "gain where they agree", "gain where they differ"),
    *(f"P@1 of {name}" for name in ("the best input", *EDGES)),
)
"""Results in hundredths; AUCs and correlations are not."""


def hypotheses(runs: Sequence[Run], plain: Run, weighed: Run, qrels: Qrels) -> dict[str, float]:
    """Compare confidence with quality, and agreement with the gain by confidence; NaN where unknown.

    `runs` are two, with calibrated probabilities; `plain` and `weighed` are their fusions without and with
    them. Texts without an answer in one of these are left out.
    """
    firsts = [run.keep(run.ranks == 1) for run in (*runs, plain, weighed)]
    answered = [{run.queries[at] for at in run.query_of_row.tolist()} for run in firsts]
    queries = [query for query in qrels.queries if all(query in each for each in answered)]
    firsts = [first[queries] for first in firsts]
    right = np.array([first.grades(qrels) > 0 for first in firsts], dtype=np.float64)
    sure = np.array([first.required_probabilities for first in firsts[:2]])
    gain, apart = right[3] - right[2], np.abs(sure[0] - sure[1])
    agree = np.array(firsts[0].documents.tolist()) == np.array(firsts[1].documents.tolist())
    one = right[0] != right[1]
    surer = np.where(sure[0] > sure[1], right[0], right[1])
    areas = {
        f"AUC of {run.name}": _area(each, truth) for run, each, truth in zip(runs, sure, right, strict=False)
    }
    return {
        **areas,
        "surer is right": _mean(surer[one]),
        "agree": _mean(agree.astype(np.float64)),
        "gain where they agree": _mean(gain[agree]),
        "gain where they differ": _mean(gain[~agree]),
        "asymmetry and gain": _correlation(apart, gain),
    }


def calibrated_edges(runs: Sequence[Run], qrels: Qrels) -> dict[str, float]:
    """Compare RL-Sim with probabilities as edges and with positions, both with its default K and rounds."""
    best = max(evaluate(qrels, run, ["P@1"])["P@1"] for run in runs)
    fused = {name: fuse(runs, "rl-sim", edges=edges) for name, edges in EDGES.items()}
    values = {f"P@1 of {name}": evaluate(qrels, run, ["P@1"])["P@1"] for name, run in fused.items()}
    return {"P@1 of the best input": best, **values}


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _area(sure: FloatArray, right: FloatArray) -> float:
    """Return P(a right answer has the higher confidence than a wrong one), ties counting half: the AUC."""
    from scipy.stats import rankdata

    good = right > 0
    count, others = int(good.sum()), int((~good).sum())
    if not count or not others:
        return float("nan")
    return float((rankdata(sure)[good].sum() - count * (count + 1) / 2) / (count * others))


def _correlation(first: FloatArray, second: FloatArray) -> float:
    """Return Spearman's rank correlation."""
    from scipy.stats import rankdata

    if len(first) < 3 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return float("nan")
    return float(np.corrcoef(rankdata(first), rankdata(second))[0, 1])
