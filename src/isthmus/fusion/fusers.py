"""Fusers: one score per candidate from several lists, f(candidates) → scores.

Normalisation comes first (`isthmus.fusion.normalisers`). A fuser works on all queries at once; none depends
on the order of the runs. Formulae that multiply (MNZ, MULT) use scores shifted to at least 0, because a
negative product would reverse the order; `shift=False` is the formula as printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ConfigError
from isthmus.fusion.normalisers import NORMALISERS, min_max, nonnegative
from isthmus.fusion.rl_sim import (
    ROUNDS,
    TOPK,
    aggregate,
    calibrated_edges,
    edge_distances,
    object_distances,
    positions,
    rerank,
    separations,
)
from isthmus.fusion.union import Union
from isthmus.tables import Qrels, Run

BLOCK = 1 << 22
"""Pairs of candidates compared at once: 32 MB."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Input of a fuser: for every run, normalised scores and confidences of the rows that it has.

    `missing` defines the score of a document in a list that lacks it: None leaves absence to the formula
    (most skip the list), "lowest" is the lowest score of that list, and a number is the score itself.
    """

    union: Union
    scores: tuple[FloatArray, ...]
    missing: float | str | None = None

    @classmethod
    def of(
        cls,
        runs: Sequence[Run] | Union,
        norm: str = "none",
        *,
        probabilities: bool = False,
        missing: float | str | None = None,
    ) -> Candidates:
        """Align and normalise runs, by their scores or by their probabilities."""
        union = runs if isinstance(runs, Union) else Union.of(runs)
        if norm not in NORMALISERS:
            raise ConfigError(f"no normaliser {norm!r}", key=norm, known=NORMALISERS)
        columns = [run.required_probabilities if probabilities else run.scores for run in union.runs]
        lists = [union.lists(at, column) for at, column in enumerate(columns)]
        return cls(union, tuple(NORMALISERS[norm](each) for each in lists), missing)

    def shifted(self, shift: bool = True) -> Candidates:
        """Return the same candidates, with every list shifted to at least 0 if `shift`."""
        if not shift:
            return self
        lists = [self.union.lists(at, column) for at, column in enumerate(self.scores)]
        return Candidates(self.union, tuple(nonnegative(each) for each in lists), self.missing)

    @cached_property
    def confidences(self) -> tuple[FloatArray, ...]:
        """The runs' probabilities; a run without probabilities has its min-max scores instead."""
        return tuple(
            min_max(self.union.lists(at)) if run.probabilities is None else run.probabilities
            for at, run in enumerate(self.union.runs)
        )

    def total(self) -> FloatArray:
        """Σ of the scores; absent documents count as `missing` defines."""
        if self.missing is None:
            return self.union.total(self.scores)
        return np.asarray(np.sort(self.matrix(), axis=0).sum(axis=0))

    def matrix(self) -> FloatArray:
        """Runs × rows, NaN where a document is absent and `missing` is None."""
        matrix = self.union.spread(self.scores)
        if self.missing is None:
            return matrix
        for at, row in enumerate(matrix):
            absent = np.isnan(row)
            row[absent] = self._lowest(at)[absent] if self.missing == "lowest" else float(self.missing)
        return matrix

    def _lowest(self, run: int) -> FloatArray:
        """For every union row, the lowest score of this run's list for the query; 0 without a list."""
        floors = np.zeros(len(self.union.queries))
        floors[self.union.homes[run]] = self.union.lists(run, self.scores[run]).per_list(np.minimum)
        return floors[self.union.query_of_row]


def comb_sum(candidates: Candidates) -> FloatArray:
    """Σᵢ sᵢ (Fox & Shaw 1994)."""
    return candidates.total()


def comb_mnz(candidates: Candidates, *, shift: bool = True) -> FloatArray:
    """N(d)·Σᵢ sᵢ, N the number of lists that hold d (Fox & Shaw 1994)."""
    return candidates.union.counts * candidates.shifted(shift).total()


def comb_gmnz(candidates: Candidates, *, gamma: float = 1.0, shift: bool = True) -> FloatArray:
    """N(d)^γ·Σᵢ sᵢ (Lee 1997)."""
    return np.asarray(candidates.union.counts**gamma * candidates.shifted(shift).total())


def comb_anz(candidates: Candidates) -> FloatArray:
    """Σᵢ sᵢ / N(d)."""
    return candidates.total() / candidates.union.counts


def comb_min(candidates: Candidates) -> FloatArray:
    """The lowest of d's scores."""
    return np.asarray(np.nanmin(candidates.matrix(), axis=0))


def comb_max(candidates: Candidates) -> FloatArray:
    """The highest of d's scores."""
    return np.asarray(np.nanmax(candidates.matrix(), axis=0))


def comb_med(candidates: Candidates) -> FloatArray:
    """The median of d's scores."""
    ordered = np.sort(candidates.matrix(), axis=0)  # NaN sorts last
    count = (~np.isnan(ordered)).sum(axis=0)
    columns = np.arange(ordered.shape[1])
    return np.asarray((ordered[(count - 1) // 2, columns] + ordered[count // 2, columns]) / 2)


def rrf(candidates: Candidates, *, k: float = 60.0) -> FloatArray:
    """Σᵢ 1/(k + rankᵢ), ranks from 1 (Cormack et al. 2009)."""
    return candidates.union.total([1.0 / (k + _ranks(run)) for run in candidates.union.runs])


def isr(candidates: Candidates) -> FloatArray:
    """N(d)·Σᵢ 1/rankᵢ² (Mourão et al. 2015)."""
    return candidates.union.counts * _inverse_squares(candidates)


def log_isr(candidates: Candidates) -> FloatArray:
    """ln(1 + N(d))·Σᵢ 1/rankᵢ²; the published ln N(d) would give 0 to a document in one list only."""
    return np.asarray(np.log1p(candidates.union.counts) * _inverse_squares(candidates))


def rbc(candidates: Candidates, *, phi: float = 0.8) -> FloatArray:
    """Σᵢ (1 − φ)·φ^(rankᵢ − 1), rank-biased centroids (Bailey et al. 2017)."""
    return candidates.union.total([(1 - phi) * phi ** (_ranks(run) - 1) for run in candidates.union.runs])


def borda(candidates: Candidates) -> FloatArray:
    """Σᵢ (c − rankᵢ + 1) of c candidates; absent documents share the remaining points (Aslam & Montague
    2001)."""
    union = candidates.union
    sizes = np.diff(union.offsets)[union.query_of_row]
    lengths = np.zeros((len(union.runs), len(union.queries)))
    for row, run, home in zip(lengths, union.runs, union.homes, strict=True):
        row[home] = np.diff(run.offsets)
    points = union.spread([-_ranks(run) for run in union.runs]) + sizes + 1
    left = (sizes - lengths[:, union.query_of_row] + 1) / 2
    return np.asarray(np.sort(np.where(np.isnan(points), left, points), axis=0).sum(axis=0))


def comb_mnz_conf(candidates: Candidates, *, shift: bool = True) -> FloatArray:
    """N(d)·Σᵢ cᵢ·sᵢ, c the calibrated probability (paper B, eq. 13); `missing` is a product cᵢ·sᵢ."""
    return candidates.union.counts * _sure_scores(candidates, shift).total()


def comb_mult_conf(candidates: Candidates, *, shift: bool = True) -> FloatArray:
    """Πᵢ (1 + cᵢ·sᵢ) (paper B, eq. 14); `missing` is a product cᵢ·sᵢ."""
    products = _sure_scores(candidates, shift).matrix()
    factors = 1.0 + np.where(np.isnan(products), 0.0, products)
    return np.asarray(np.sort(factors, axis=0).prod(axis=0))


def comb_mnz_variant(
    candidates: Candidates, *, reading: str = "soft_count", gamma: float = 1.0, shift: bool = True
) -> FloatArray:
    """CombMNZ on confidences, which paper B names but never defines, in four readings.

    `soft_count`: (Σ sᵢ)·(Σ cᵢ), with the count replaced by the expected number of lists for which d is
    relevant; `squared`: N·Σ cᵢ²; `calibrated`: N·Σ cᵢ; `gmnz`: N^γ·Σ sᵢ.
    """
    union, confidences = candidates.union, candidates.confidences
    if reading == "soft_count":
        return candidates.shifted(shift).total() * union.total(confidences)
    if reading == "squared":
        return union.counts * union.total([confidence**2 for confidence in confidences])
    if reading == "calibrated":
        return union.counts * union.total(confidences)
    if reading == "gmnz":
        return comb_gmnz(candidates, gamma=gamma, shift=shift)
    known = ("soft_count", "squared", "calibrated", "gmnz")
    raise ConfigError(f"no reading {reading!r} of comb-mnz-variant", key=reading, known=known)


def rl_sim(
    candidates: Candidates,
    *,
    similar: Sequence[Run] | None = None,
    topk: int | None = None,
    ck: int | None = None,
    rounds: int | None = None,
    weights: Sequence[float] | None = None,
    edges: str = "positions",
) -> FloatArray:
    """RL-Sim over queries and documents together; the score is 1/position in the query's new list.

    Every object's list has documents first, then queries. A query's documents come from the run, a
    document's queries from the transposed run. Documents are related to documents, and queries to queries,
    by the runs `similar` (one per retriever, from object to object), or else by how high the same lists rank
    both. K = 2 and one round unless judgements choose them; CK = min(700, objects − 1). `weights` are the
    runs' shares in the fused distance, by default how clearly each separates its first hits from the others;
    equal weights are the framework's. `edges="calibrated"` takes the runs' probabilities for the graph's
    edges instead of positions; no weights of runs are needed then.
    """
    if edges not in EDGES:
        raise ConfigError(f"no edges {edges!r} of RL-Sim", key=edges, known=EDGES)
    union = candidates.union
    used, codes = np.unique(union.documents.codes, return_inverse=True)
    names = [union.documents.words[code] for code in used]
    strengths = None
    if edges == "calibrated":
        strengths = calibrated_edges(union.runs, candidates.confidences, names, union.queries)
        fused = edge_distances(strengths, len(names))
    else:
        fused = _fused_distances(candidates, names, similar, weights)
    rounds = min(ROUNDS, len(fused) - 1) if rounds is None else rounds
    topk = max(1, min(TOPK, len(fused) - rounds + 1)) if topk is None else topk  # grows by one each round
    final, _ = rerank(fused, topk=topk, ck=ck, rounds=rounds, edges=strengths)
    return np.asarray(1.0 / positions(final)[len(names) + union.query_of_row, codes])


EDGES = ("positions", "calibrated")


def _fused_distances(
    candidates: Candidates,
    names: Sequence[str],
    similar: Sequence[Run] | None,
    weights: Sequence[float] | None,
) -> FloatArray:
    """Distances by the positions in all runs' lists."""
    union = candidates.union
    matrices = [
        object_distances(run, names, union.queries, None if similar is None else similar[at])
        for at, run in enumerate(union.runs)
    ]
    shares = separations(union.runs) if weights is None else np.asarray(weights, dtype=np.float64)
    if len(shares) != len(matrices):
        raise ConfigError(f"{len(shares)} weights for {len(matrices)} runs", key="weights", value=weights)
    return aggregate(matrices, shares if shares.sum() > 0 else None) if len(matrices) > 1 else matrices[0]


def rlsim_eq15(candidates: Candidates, *, neighbours: int = 20) -> FloatArray:
    """The formula that paper B prints as RL-Sim (eq. 15), which it is not: A(i, j) = Σ_k 1/(r_k(i) +
    r_k(j)).

    score(i) = base(i) + Σ_j A(i, j)·base(j) / Σ_j A(i, j) over the nearest j by A, base = Σ_k 1/r_k.
    """
    union = candidates.union
    ranks = union.spread([_ranks(run) for run in union.runs], absent=np.inf)
    base: FloatArray = np.sort(1.0 / ranks, axis=0).sum(axis=0)
    scores = base.copy()
    for rows, inside in _squares(union, BLOCK // len(union.runs)):
        rank, width = np.where(inside, ranks[:, rows], np.inf), rows.shape[1]
        affinity = np.sort(1.0 / (rank[..., :, None] + rank[..., None, :]), axis=0).sum(axis=0)
        affinity[:, np.arange(width), np.arange(width)] = 0.0
        if width > neighbours:
            least = np.partition(affinity, width - neighbours, axis=2)[:, :, width - neighbours, None]
            affinity = np.where(affinity >= least, affinity, 0.0)
        whole = affinity.sum(axis=2)
        near = (affinity @ base[rows][:, :, None])[:, :, 0] / np.where(whole > 0, whole, 1.0)
        scores[rows[inside]] += near[inside]
    return scores


def _squares(union: Union, cells: int) -> Iterator[tuple[IntArray, NDArray[np.bool_]]]:
    """Yield the rows of several queries at once (queries × width) with the mask of cells that are not
    padding.

    Queries of similar length are taken together, as many as make `cells` pairs of rows.
    """
    lengths = np.diff(union.offsets)
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order) and (width := int(lengths[order[start]])):
        block = order[start : start + max(1, cells // width**2)]
        inside = np.arange(width) < lengths[block][:, None]
        yield np.where(inside, union.offsets[block][:, None] + np.arange(width), 0), inside
        start += len(block)


def _sure_scores(candidates: Candidates, shift: bool) -> Candidates:
    """Return the candidates with cᵢ·sᵢ for the score of every run's rows."""
    pairs = zip(candidates.confidences, candidates.shifted(shift).scores, strict=True)
    return replace(candidates, scores=tuple(confidence * score for confidence, score in pairs))


def _ranks(run: Run) -> FloatArray:
    return np.asarray(run.ranks, dtype=np.float64)


def _inverse_squares(candidates: Candidates) -> FloatArray:
    return candidates.union.total([1.0 / _ranks(run) ** 2 for run in candidates.union.runs])


FUSERS: dict[str, Callable[..., FloatArray]] = {
    "comb-sum": comb_sum,
    "comb-mnz": comb_mnz,
    "comb-gmnz": comb_gmnz,
    "comb-anz": comb_anz,
    "comb-min": comb_min,
    "comb-max": comb_max,
    "comb-med": comb_med,
    "rrf": rrf,
    "isr": isr,
    "log-isr": log_isr,
    "rbc": rbc,
    "borda": borda,
    "comb-mnz-conf": comb_mnz_conf,
    "comb-mult-conf": comb_mult_conf,
    "comb-mnz-variant": comb_mnz_variant,
    "rl-sim": rl_sim,
    "rlsim-eq15": rlsim_eq15,
}
"""Every fuser that needs no judgements, by name."""

RANK_BASED = ("rrf", "isr", "log-isr", "rbc", "borda", "rl-sim", "rlsim-eq15")
"""The fusers that use ranks only; their input is not normalised."""

LEARNED = ("stacked", "log-odds", "weighted", "convex", "joint")
"""The methods that learn from judgements."""

METHODS = (*LEARNED, *FUSERS)


def choose(runs: Sequence[Run], method: str, qrels: Qrels | None) -> str:
    """Return the method's name as in `METHODS`. Raises ConfigError for an unknown one.

    `auto` stays if there are judgements to choose by; without them it is log-odds if all runs have
    probabilities, else rrf.
    """
    if method == "auto":
        calibrated = bool(runs) and all(run.probabilities is not None for run in runs)
        return "auto" if qrels is not None else "log-odds" if calibrated else "rrf"
    spelt = method.replace("_", "-")
    if spelt not in METHODS:
        raise ConfigError(f"no way of fusing {method!r}", key=spelt, known=("auto", *METHODS))
    return spelt


def default_norm(formula: str) -> str:
    """Return the default normaliser: formulae that add scores need a common scale, rank-based ones do not."""
    return "none" if formula in RANK_BASED else "min-max"
