"""The arithmetic of every measure: one value per query from the rows of a view.

A formula takes (view, measure) and returns an array with one value for every judged query; a query without
relevant documents has 0 here, and `evaluate` applies the measure's rule for it. R is the number of relevant
documents, n the length of the list, g a grade. Sums run in order of rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation.measures import Measure
from isthmus.evaluation.ranking import Hits, RankingView

Formula = Callable[[RankingView, Measure], FloatArray]

LEAST = 1e-5
"""Lower bound of a value in a geometric mean, and the smoothing constant of infAP; both as in trec_eval."""


def relevant(view: RankingView, measure: Measure) -> IntArray:
    """R: number of relevant documents of every query, of positive grade if the measure has no threshold."""
    return view.ranking.relevant(_threshold(measure))


def dcg(view: RankingView, measure: Measure) -> FloatArray:
    """Σ_{r ≤ k} gain(g_r) / log2(r + 1)."""
    hits = view.relevant()
    gains = _gain(hits.grade, measure)
    if measure["ties"] == "average":
        return hits.total(gains * _mean_discount(view, hits.row, measure.cutoff))
    return _discounted(hits, gains, measure.cutoff)


def ndcg(view: RankingView, measure: Measure) -> FloatArray:
    """DCG@k / IDCG@k; the ideal list has all judged documents and is cut at the same k."""
    return _share(dcg(view, measure), _ideal_dcg(view, measure, measure.cutoff))


def ndcg_printed(view: RankingView, measure: Measure) -> FloatArray:
    """nDCG as the cross-silo paper prints nDCG@10: the ideal is not cut at k."""
    return _share(dcg(view, measure), _ideal_dcg(view, measure, None))


def ndcg_rel(view: RankingView, measure: Measure) -> FloatArray:
    """DCG@r / IDCG@r averaged over the ranks r of all relevant documents; one that was not retrieved enters
    with the ratio of the whole lists."""
    hits, ideal = view.relevant(), view.ranking.ideal
    so_far = hits.running(np.add, hits.grade / np.log2(hits.rank + 1))
    best = ideal.running(np.add, ideal.grade / np.log2(ideal.rank + 1))
    at = ideal.last_to(hits.query, hits.rank)
    unseen = ideal.count - hits.count
    final = _share(_discounted(hits, hits.grade, None), _discounted(ideal, ideal.grade, None))
    return _share(hits.total(so_far / best[at]) + unseen * final, ideal.count)


def r_ndcg(view: RankingView, measure: Measure) -> FloatArray:
    """DCG@r / IDCG@r averaged over the ranks r at which the ideal list's grade falls.

    trec_eval adds the final ratio once more when the list is longer than R + 1.
    """
    hits, ideal = view.relevant(), view.ranking.ideal
    so_far = np.append(hits.running(np.add, hits.grade / np.log2(hits.rank + 1)), 0.0)
    best = ideal.running(np.add, ideal.grade / np.log2(ideal.rank + 1))
    falls = np.ones(len(best), dtype=bool)
    falls[:-1] = (ideal.query[1:] != ideal.query[:-1]) | (ideal.grade[1:] != ideal.grade[:-1])
    edges = ideal.keep(falls)
    reached = hits.last_to(edges.query, edges.rank)
    sums = edges.total(so_far[reached] / best[falls])
    counts = edges.count.copy()
    longer = (view.length > ideal.count + 1) & (ideal.count > 0)
    final = _share(_discounted(hits, hits.grade, None), _discounted(ideal, ideal.grade, None))
    return np.where(relevant(view, measure) > 0, _share(sums + longer * final, counts + longer), 0.0)


def reciprocal_rank(view: RankingView, measure: Measure) -> FloatArray:
    """1 / (rank of the first relevant document), if that rank is at most k."""
    hits = _hits(view, measure).to(measure.cutoff)
    first = hits.keep(hits.nth == 0)
    return first.total(1.0 / first.rank)


def err(view: RankingView, measure: Measure) -> FloatArray:
    """Σ_{r ≤ k} (1/r) R_r Π_{i<r} (1 − R_i), R_i = (2^g_i − 1) / 2^gmax (Chapelle et al. 2009)."""
    hits = view.relevant().to(measure.cutoff)
    return _cascade(hits, _top_grade(view, measure), 1.0 / hits.rank)


def err_printed(view: RankingView, measure: Measure) -> FloatArray:
    """ERR as the cross-silo paper prints it: without 1/r, so over the whole list 1 − Π (1 − R_i)."""
    hits = view.relevant().to(measure.cutoff)
    return _cascade(hits, _top_grade(view, measure), np.ones(len(hits.rank)))


def err_code(view: RankingView, measure: Measure) -> FloatArray:
    """ERR as the cross-silo paper's code has it: gmax is the largest grade in each list."""
    hits = view.relevant()
    top = np.zeros(hits.size, dtype=np.int64)
    np.maximum.at(top, hits.query, hits.grade)
    hits = hits.to(measure.cutoff)
    return _cascade(hits, top[hits.query], 1.0 / hits.rank)


def average_precision(view: RankingView, measure: Measure) -> FloatArray:
    """(1/R) Σ of the precision at the rank of every relevant document to rank k; norm=cut divides by min(R,
    k)."""
    hits = _hits(view, measure).to(measure.cutoff)
    seen = hits.nth + 1
    if measure.name == "MAP" and measure["ties"] == "last":
        seen = hits.last_to(hits.query, hits.rank) - hits.start[hits.query] + 1
    count = relevant(view, measure)
    if measure.name == "MAP" and measure["norm"] == "cut" and measure.cutoff is not None:
        count = np.minimum(count, int(measure.cutoff))
    return _share(hits.total(seen / hits.rank), count)


def precision(view: RankingView, measure: Measure) -> FloatArray:
    """Relevant documents to rank k, over k, however short the list."""
    return _relevant_retrieved(view, measure) / float(measure.cutoff or 1)


def recall(view: RankingView, measure: Measure) -> FloatArray:
    """Relevant documents to rank k, over R."""
    return _share(_relevant_retrieved(view, measure), relevant(view, measure))


def relative_precision(view: RankingView, measure: Measure) -> FloatArray:
    """Relevant documents to rank k, over min(k, R)."""
    return _share(
        _relevant_retrieved(view, measure), np.minimum(relevant(view, measure), int(measure.cutoff or 1))
    )


def success(view: RankingView, measure: Measure) -> FloatArray:
    """1 if any document to rank k is relevant."""
    return (_relevant_retrieved(view, measure) > 0).astype(np.float64)


def r_precision(view: RankingView, measure: Measure) -> FloatArray:
    """Relevant documents to rank ⌊m R + 0.9⌋, over that rank; m is 1 for Rprec itself."""
    multiple = 1.0 if measure.cutoff is None else measure.cutoff
    hits = _hits(view, measure)
    depth = np.floor(multiple * relevant(view, measure) + 0.9).astype(np.int64)
    return _share(hits.keep(hits.rank <= depth[hits.query]).count, depth)


def interpolated_precision(view: RankingView, measure: Measure) -> FloatArray:
    """Best precision at or below the rank of the ⌊x R + 0.9⌋-th relevant document, x the requested recall."""
    return _interpolated(view, measure, [float(measure.cutoff or 0)])


def eleven_points(view: RankingView, measure: Measure) -> FloatArray:
    """Interpolated precision averaged over recall 0, 0.1, …, 1."""
    return _interpolated(view, measure, [tenth / 10 for tenth in range(11)])


def bpref(view: RankingView, measure: Measure) -> FloatArray:
    """(1/R) Σ over relevant documents of 1 − min(N above, R) / min(N, R); N counts documents judged not
    relevant."""
    threshold = _threshold(measure)
    graded = view.judged.keep(view.judged.grade >= 0)
    is_hit = graded.grade >= threshold
    hits, above = graded.keep(is_hit), graded.before(~is_hit)[is_hit]
    count = relevant(view, measure)
    judgements = view.ranking.judgements
    worthless = judgements.keep((judgements.grade >= 0) & (judgements.grade < threshold)).count
    limit = np.maximum(np.minimum(worthless, count), 1)
    lost = np.minimum(above, count[hits.query]) / limit[hits.query]
    return _share(hits.total(1.0 - np.where(above > 0, lost, 0.0)), count)


def inferred_ap(view: RankingView, measure: Measure) -> FloatArray:
    """Average precision with the precision above each relevant document inferred (Yilmaz and Aslam 2006).

    A document with a negative grade is in the pool but not judged.
    """
    rows = view.judged
    is_hit = rows.grade >= _threshold(measure)
    hits = rows.keep(is_hit)
    relevant_above = hits.nth
    worthless = rows.before((rows.grade >= 0) & ~is_hit)[is_hit]
    pooled = relevant_above + worthless + rows.before(rows.grade < 0)[is_hit]
    above = np.maximum(hits.rank - 1, 1)
    expected = (pooled / above) * ((relevant_above + LEAST) / (relevant_above + worthless + 2 * LEAST))
    inferred = 1.0 / hits.rank + ((hits.rank - 1) / hits.rank) * expected
    return _share(hits.total(np.where(hits.rank == 1, 1.0, inferred)), relevant(view, measure))


def gain_against_cost(view: RankingView, measure: Measure) -> FloatArray:
    """G = (Σ_r g_r / log2(2 + C_r − S_r)) / Σ g; S_r is the gain to rank r, C_r the ideal gain to rank r,
    which grows by at least 1 per rank."""
    hits, ideal = view.relevant(), view.ranking.ideal
    gained = hits.running(np.add, hits.grade.astype(np.float64))
    best = np.append(ideal.running(np.add, ideal.grade.astype(np.float64)), 0.0)
    beyond = np.maximum(hits.rank - ideal.count[hits.query], 0)
    cost = best[ideal.last_to(hits.query, hits.rank)] + beyond
    return _share(hits.total(hits.grade / np.log2(2 + cost - gained)), ideal.total(ideal.grade * 1.0))


def binary_gain(view: RankingView, measure: Measure) -> FloatArray:
    """(1/R) Σ over relevant documents of 1 / log2(2 + documents above that are not relevant)."""
    hits = _hits(view, measure)
    return _share(hits.total(1.0 / np.log2(hits.rank - hits.nth + 1)), relevant(view, measure))


def rank_biased_precision(view: RankingView, measure: Measure) -> FloatArray:
    """(1 − p) Σ p^(r − 1) over relevant documents to rank k (Moffat and Zobel 2008)."""
    hits = _hits(view, measure).to(measure.cutoff)
    persistence = float(measure["p"])
    return (1 - persistence) * hits.total(persistence ** (hits.rank - 1.0))


def set_precision(view: RankingView, measure: Measure) -> FloatArray:
    """Relevant retrieved documents / retrieved documents; 0 where nothing was retrieved."""
    return _share(_relevant_retrieved(view, measure), view.length)


def set_f(view: RankingView, measure: Measure) -> FloatArray:
    """(β + 1)·P·R / (β·P + R) of the whole list's precision and recall, trec_eval's `set_F`."""
    beta = float(measure["beta"])
    p, r = set_precision(view, measure), recall(view, measure)
    return _share((beta + 1) * p * r, beta * p + r)


def set_average_precision(view: RankingView, measure: Measure) -> FloatArray:
    """Precision × recall of the whole list, trec_eval's `set_map`."""
    retrieved = _relevant_retrieved(view, measure)
    return _share(retrieved * retrieved, view.length * relevant(view, measure))


def set_relative_precision(view: RankingView, measure: Measure) -> FloatArray:
    """Relevant retrieved documents / min(n, R), the most that a list of this length can have."""
    return _share(_relevant_retrieved(view, measure), np.minimum(view.length, relevant(view, measure)))


def utility(view: RankingView, measure: Measure) -> FloatArray:
    """hit · relevant retrieved + noise · others retrieved + miss · relevant missed."""
    retrieved = _relevant_retrieved(view, measure)
    hit, noise, miss = (float(measure[name]) for name in ("hit", "noise", "miss"))
    missed = relevant(view, measure) - retrieved
    value: FloatArray = hit * retrieved + noise * (view.length - retrieved) + miss * missed
    return value


def judged(view: RankingView, measure: Measure) -> FloatArray:
    """The share of the first k documents, or of all, that have a judgement."""
    seen = view.length if measure.cutoff is None else np.minimum(view.length, int(measure.cutoff))
    return _share(view.judged.to(measure.cutoff).count, seen)


def worthless_retrieved(view: RankingView, measure: Measure) -> FloatArray:
    """The number of retrieved documents that are judged not relevant."""
    grade = view.judged.grade
    return view.judged.keep((grade >= 0) & (grade < _threshold(measure))).count.astype(np.float64)


def map_printed(view: RankingView, measure: Measure) -> FloatArray:
    """MAP as the cross-silo paper prints it: (1/n) Σ_d rank(d) / position(d), rank by grade, position in the
    list.

    Documents of equal grade are ranked in the order of the list, so that a perfect list gives 1.
    """
    rows = view.everything
    order = np.lexsort((rows.rank, -rows.grade.astype(np.int64), rows.query))
    by_grade = np.empty(len(order), dtype=np.int64)
    by_grade[order] = rows.nth + 1
    return _share(rows.total(by_grade / rows.rank), view.length)


def map_code(view: RankingView, measure: Measure) -> FloatArray:
    """MAP as the cross-silo paper's code has it: (1/n) Σ_i g_i · mean(g_1 … g_i)."""
    rows = view.everything
    mean = rows.running(np.add, rows.grade.astype(np.float64)) / rows.rank
    return _share(rows.total(rows.grade * mean), view.length)


def geometric(formula: Formula) -> Formula:
    """Return a formula for the logarithm of a measure; exp of its mean is the geometric mean."""
    return lambda view, measure: np.log(np.maximum(formula(view, measure), LEAST))


def _threshold(measure: Measure) -> int:
    return int(measure["rel"]) if "rel" in measure else 1


def _hits(view: RankingView, measure: Measure) -> Hits:
    return view.relevant(_threshold(measure))


def _relevant_retrieved(view: RankingView, measure: Measure) -> IntArray:
    """Relevant documents to rank k, or in the whole list."""
    return _hits(view, measure).to(measure.cutoff).count


def _share(part: NDArray[Any], whole: NDArray[Any]) -> FloatArray:
    """part / whole; 0 where the whole is 0."""
    share: FloatArray = np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
    return share


def _gain(grades: NDArray[np.int32], measure: Measure) -> FloatArray:
    if measure["gain"] == "linear":
        return grades.astype(np.float64)
    if grades.max(initial=0) > 1000:
        raise DataError(f"grade {grades.max()} is too large for 2^g − 1", cure="use gain=linear")
    gains: FloatArray = np.exp2(grades) - 1.0
    return gains


def _discounted(hits: Hits, gains: NDArray[Any], cutoff: int | float | None) -> FloatArray:
    values = gains / np.log2(hits.rank + 1)
    return hits.total(values if cutoff is None else np.where(hits.rank <= cutoff, values, 0.0))


def _discounts_to(depth: int, cutoff: int | float | None) -> FloatArray:
    """Cumulative sums of the discounts for every rank from 0 to `depth`; ranks beyond the cut-off add
    nothing."""
    discounts = 1.0 / np.log2(np.arange(2, depth + 2))
    if cutoff is not None:
        discounts[int(cutoff) :] = 0.0
    return np.concatenate(([0.0], np.cumsum(discounts)))


def _ideal_dcg(view: RankingView, measure: Measure, cutoff: int | float | None) -> FloatArray:
    """IDCG@k from the number of documents of each grade: a grade's documents take consecutive ranks."""
    grades, counts = view.ranking.grade_counts
    last = np.cumsum(counts, axis=1)
    to = _discounts_to(last.max(initial=0), cutoff)
    ideal: FloatArray = (to[last] - to[last - counts]) @ _gain(grades, measure)
    return ideal


def _mean_discount(view: RankingView, rows: IntArray, cutoff: int | float | None) -> FloatArray:
    """The mean discount over the ranks of all rows that have the same score as a row."""
    if view.first is None or view.last is None:
        raise ConfigError("ties=average needs a view with tie groups", key="ties", value="average")
    first, last = view.first[rows], view.last[rows]
    to = _discounts_to(last.max(initial=1), cutoff)
    mean: FloatArray = (to[last] - to[first - 1]) / (last - first + 1)
    return mean


def _top_grade(view: RankingView, measure: Measure) -> int:
    top = measure["gmax"]
    if top == "data":
        return view.ranking.gmax
    if int(top) < view.ranking.gmax:
        raise ConfigError(
            f"{measure} but the judgements have grade {view.ranking.gmax}; raise gmax", key="gmax", value=top
        )
    return int(top)


def _cascade(hits: Hits, top: int | IntArray, weight: FloatArray) -> FloatArray:
    """Σ weight_r R_r Π_{i<r} (1 − R_i)."""
    stop = np.exp2(hits.grade - top, dtype=np.float64) - np.exp2(-np.asarray(top, dtype=np.float64))
    passed = np.concatenate(([1.0], hits.running(np.multiply, 1.0 - stop)[:-1])) if len(stop) else stop
    return hits.total(weight * stop * np.where(hits.nth > 0, passed, 1.0))


def _interpolated(view: RankingView, measure: Measure, points: list[float]) -> FloatArray:
    hits = _hits(view, measure)
    # Accumulate from the end of every list: the hits reversed, by (query, rank from below).
    place = hits.start[hits.query] + (hits.count[hits.query] - 1 - hits.nth)
    upside = hits.running(np.maximum, ((hits.nth + 1) / hits.rank)[place])
    best = np.append(upside[place], 0.0)
    count = relevant(view, measure)
    total = np.zeros(hits.size)
    for point in points:
        wanted = np.floor(point * count + 0.9).astype(np.int64)
        reached = (wanted <= hits.count) & (hits.count > 0)
        at = np.where(reached, hits.start + np.maximum(wanted - 1, 0), -1)
        total += best[at]
    return total / len(points)


FORMULAS: dict[str, Formula] = {
    "nDCG": ndcg,
    "DCG": dcg,
    "nDCGrel": ndcg_rel,
    "RnDCG": r_ndcg,
    "MRR": reciprocal_rank,
    "ERR": err,
    "MAP": average_precision,
    "GMAP": geometric(average_precision),
    "P": precision,
    "R": recall,
    "RelP": relative_precision,
    "Success": success,
    "Rprec": r_precision,
    "RprecMult": r_precision,
    "iprec": interpolated_precision,
    "iprec11": eleven_points,
    "bpref": bpref,
    "Gbpref": geometric(bpref),
    "infAP": inferred_ap,
    "G": gain_against_cost,
    "binG": binary_gain,
    "RBP": rank_biased_precision,
    "SetP": set_precision,
    "SetR": recall,
    "SetF": set_f,
    "SetAP": set_average_precision,
    "SetRelP": set_relative_precision,
    "Utility": utility,
    "Judged": judged,
    "NumQ": lambda view, measure: np.ones(view.ranking.size),
    "NumRet": lambda view, measure: view.length.astype(np.float64),
    "NumRel": lambda view, measure: relevant(view, measure).astype(np.float64),
    "NumRelRet": lambda view, measure: _relevant_retrieved(view, measure).astype(np.float64),
    "NumNonrelRet": worthless_retrieved,
    "map_printed": map_printed,
    "map_code": map_code,
    "err_printed": err_printed,
    "err_code": err_code,
    "ndcg_printed": ndcg_printed,
}
"""The formula of every measure except the propensity-scored ones, which need more than a view."""
