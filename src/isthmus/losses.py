"""Losses as score gradients: `f(scores, labels, offsets) -> (value, gradient)`.

Every loss takes the scores of all rows of a batch, their grades, and the CSR offsets of their queries, and
gives the mean loss and its derivative by every score, so one function serves a network (which carries the
gradient on to its weights) and a tree alike. The rows of query i are `offsets[i]:offsets[i + 1]`; lists may
be empty and of any lengths. Pointwise losses average over rows and ignore `offsets`; the others
average over queries. The arithmetic keeps the type of `scores`.

>>> value, gradient = softmax(np.array([2.0, 1.0, 3.0]), np.array([1, 0, 0]), np.array([0, 3]))
>>> round(value, 5), gradient.round(3)
(1.40761, array([-0.755,  0.09 ,  0.665]))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError

Floats = NDArray[Any]
Ints = NDArray[Any]

PAIR_BUDGET = 1 << 15
"""Pairs of (padded) documents that are processed at once: their arrays fit a core's own cache."""


class ScoreGradient(Protocol):
    """The signature that all losses here share."""

    def __call__(self, scores: Floats, labels: Ints, offsets: Ints, /) -> tuple[float, Floats]: ...


def squared_error(scores: Floats, labels: Ints, offsets: Ints) -> tuple[float, Floats]:
    """Mean squared difference of score and grade, halved: ½ (s − y)²."""
    gradient = scores - labels.astype(scores.dtype)
    value = 0.5 * float(np.dot(gradient, gradient)) / max(1, len(gradient))
    gradient /= max(1, len(gradient))
    return value, gradient


def cross_entropy(scores: Floats, labels: Ints, offsets: Ints) -> tuple[float, Floats]:
    """Cross entropy of the grade: −log softmax(s)_y, with one score per row and grade.

    Labels may be a probability for every grade instead: −Σ_g p_g log softmax(s)_g. The fastest layout of
    `scores` is the transpose of a (grades × rows) array.
    """
    rows = len(scores)
    if not rows:
        return 0.0, np.zeros_like(scores)
    if labels.ndim == 2:
        return _soft_cross_entropy(scores, labels.astype(scores.dtype, copy=False))
    gradient = np.subtract(scores, np.maximum.reduce(scores, axis=1, keepdims=True))
    picked = np.arange(rows), labels
    value = -float(np.add.reduce(gradient[picked]))
    np.exp(gradient, out=gradient)
    total = np.add.reduce(gradient, axis=1)
    value += float(np.add.reduce(np.log(total)))
    total *= rows
    gradient /= total[:, None]
    gradient[picked] -= scores.dtype.type(1 / rows)
    return value / rows, gradient


def _soft_cross_entropy(scores: Floats, probabilities: Floats) -> tuple[float, Floats]:
    shifted = scores - scores.max(axis=1, keepdims=True)
    gradient = np.exp(shifted)
    total = gradient.sum(axis=1, keepdims=True)
    value = float(((np.log(total) - shifted) * probabilities).sum()) / len(scores)
    gradient /= total
    gradient *= probabilities.sum(axis=1, keepdims=True)
    gradient -= probabilities
    gradient /= len(scores)
    return value, gradient


def softmax(scores: Floats, labels: Ints, offsets: Ints) -> tuple[float, Floats]:
    """Listwise softmax: −Σ_i p_i log softmax(s)_i over a list, p_i = (2^{y_i} − 1) / Σ_j (2^{y_j} − 1).

    A list without a relevant document has no target and adds nothing.
    """
    gradient = np.zeros_like(scores)
    lengths = np.diff(offsets)
    starts, lengths = offsets[:-1][lengths > 0], lengths[lengths > 0]
    if not len(starts):
        return 0.0, gradient
    gains = _gains(labels, scores.dtype)
    totals = np.add.reduceat(gains, starts)
    some = totals > 0
    targets = gains / np.repeat(np.where(some, totals, 1), lengths)
    shifted = scores - np.repeat(np.maximum.reduceat(scores, starts), lengths)
    np.exp(shifted, out=gradient)
    partition = np.add.reduceat(gradient, starts)
    logs = np.log(partition)
    value = float(np.add.reduce(logs[some]) - np.dot(targets, shifted))
    gradient *= np.repeat(some / partition, lengths)
    gradient -= targets
    queries = len(offsets) - 1
    gradient /= queries
    return value / queries, gradient


def ranknet(scores: Floats, labels: Ints, offsets: Ints, *, sigma: float = 1.0) -> tuple[float, Floats]:
    """RankNet (Burges 2005): the mean over a list's pairs with y_i > y_j of log(1 + exp(−σ(s_i − s_j)))."""
    value, gradient = 0.0, np.zeros_like(scores)
    for rows, valid in _blocks(offsets):
        rows = _best_first(scores, rows, valid)
        grades = labels[rows].astype(scores.dtype)
        weights = np.sign(grades[:, :, None] - grades[:, None, :])
        weights *= _later(rows.shape[1], rows.shape[1], valid)
        pairs = np.count_nonzero(weights, axis=(1, 2)).astype(scores.dtype)
        weights /= np.maximum(pairs, 1)[:, None, None]
        value += _add_pairs(gradient, scores, rows, weights, sigma)
    return _mean_over_queries(value, gradient, offsets)


def lambdarank(
    scores: Floats, labels: Ints, offsets: Ints, *, sigma: float = 1.0, truncation: int | None = None
) -> tuple[float, Floats]:
    """LambdaRank (Burges 2010): RankNet's pairs weighted by |ΔnDCG|, the change of nDCG when i and j swap.

    |ΔnDCG_ij| = |2^{y_i} − 2^{y_j}| · |1/log2(1 + r_i) − 1/log2(1 + r_j)| / IDCG, ranks r by score, ties in
    row order. As in LightGBM, `truncation` keeps the pairs with at least one document in the best
    `truncation` ranks and takes IDCG at that depth. The value is the weighted pair loss at these weights;
    the gradient holds the weights constant (there is no function it is the derivative of).
    """
    value, gradient = 0.0, np.zeros_like(scores)
    gains = _gains(labels, scores.dtype)
    for rows, valid in _blocks(offsets, depth=truncation):
        rows = _best_first(scores, rows, valid)
        weights = _swap_weights(gains[rows] * valid, valid, truncation)
        value += _add_pairs(gradient, scores, rows, weights, sigma)
    return _mean_over_queries(value, gradient, offsets)


def risk_weights(
    scores: Floats, labels: Ints, offsets: Ints, baseline: Floats, *, alpha: float = 1.0, depth: int = 10
) -> Floats:
    """The weight of every query in a loss that counts losses against a baseline more than gains.

    The weight is 1 + α where nDCG@depth by `scores` is below that by `baseline`, one score a row each, else
    1, also for an empty list. URisk (Wang et al. 2012) is the mean of w_q (M_q − B_q), where M and B are the
    two values of a query: a loss whose gradient of query q is multiplied by w_q climbs URisk as the loss
    itself climbs the mean of M.
    """
    own, reference = (_ndcg(values, labels, offsets, depth) for values in (scores, baseline))
    weights: Floats = np.where(own < reference - 1e-9, 1 + alpha, 1.0).astype(scores.dtype)
    return weights


def _ndcg(scores: Floats, labels: Ints, offsets: Ints, depth: int) -> Floats:
    """nDCG of every list, ties in row order; 0 without a relevant document."""
    lengths = np.diff(offsets)
    group = np.repeat(np.arange(len(lengths)), lengths)
    ranks = np.arange(len(group)) - offsets[:-1][group]
    discounts = np.where(ranks < depth, 1 / np.log2(ranks + 2), 0.0)
    gains = _gains(labels, np.dtype(np.float64))

    def sums(values: Floats) -> Floats:
        best_first = np.lexsort((-values, group))
        return np.bincount(group, gains[best_first] * discounts, minlength=len(lengths))

    ideal = sums(gains)
    ndcg: Floats = np.divide(sums(scores), ideal, out=np.zeros(len(lengths)), where=ideal > 0)
    return ndcg


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss, with the properties that a trainer needs to know."""

    name: str
    function: ScoreGradient
    kind: Literal["pointwise", "pairwise", "listwise"]
    graded: bool = False
    """Whether the ranker has one output per grade instead of one score."""
    at_risk: bool = False
    """Whether queries below a baseline count more: the trainer multiplies gradients by `risk_weights`."""
    options: frozenset[str] = frozenset()
    """The keyword arguments that `function` takes."""

    @property
    def whole_queries(self) -> bool:
        """Whether a batch must have whole lists, because the loss is undefined on torn queries."""
        return self.kind != "pointwise"

    def outputs(self, grades: int) -> int:
        """The number of outputs that the ranker needs for a row, with grades 0 … `grades` − 1."""
        return grades if self.graded else 1


_LAMBDARANK = frozenset({"sigma", "truncation"})
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        loss.name: loss
        for loss in (
            Loss("squared_error", squared_error, "pointwise"),
            Loss("cross_entropy", cross_entropy, "pointwise", graded=True),
            Loss("ranknet", ranknet, "pairwise", options=frozenset({"sigma"})),
            Loss("lambdarank", lambdarank, "pairwise", options=_LAMBDARANK),
            Loss("softmax", softmax, "listwise"),
            Loss("risk-lambdarank", lambdarank, "pairwise", at_risk=True, options=_LAMBDARANK),
            Loss("risk-softmax", softmax, "listwise", at_risk=True),
        )
    }
)
"""The losses by name. A `risk-` loss needs a baseline."""


def loss_named(name: str, **options: float) -> Loss:
    """The loss of that name with these options. Raises ConfigError, with the nearest name, for an unknown
    one."""
    if name not in LOSSES:
        raise ConfigError(f"no loss {name!r}", key=name, value=name, known=LOSSES)
    loss = LOSSES[name]
    for key, value in options.items():
        if key not in loss.options:
            raise ConfigError(f"the loss {name} has no {key}", key=key, value=value, known=loss.options)
    return replace(loss, function=partial(loss.function, **options)) if options else loss


def _gains(labels: Ints, dtype: Any) -> Floats:
    """The gain 2^y − 1; a negative grade has gain 0, like grade 0."""
    gains: Floats = np.exp2(np.maximum(labels, 0).astype(dtype)) - dtype.type(1)
    return gains


def _mean_over_queries(value: float, gradient: Floats, offsets: Ints) -> tuple[float, Floats]:
    queries = max(1, len(offsets) - 1)
    gradient /= queries
    return value / queries, gradient


def _blocks(offsets: Ints, depth: int | None = None) -> Iterator[tuple[Ints, NDArray[np.bool_]]]:
    """The lists of two or more rows, as padded tables of row numbers with a mask of the real ones.

    Lists of similar length share a block, and a block holds at most PAIR_BUDGET pairs, so a few long lists
    among many short ones cost neither memory nor time.
    """
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths > 1)]
    while len(order):
        longest = int(lengths[order[0]])
        pairs = longest * min(longest, depth or longest)
        size = max(1, PAIR_BUDGET // pairs)
        chosen, order = order[:size], order[size:]
        places = np.arange(longest)
        valid = places < lengths[chosen, None]
        yield np.where(valid, offsets[chosen, None] + places, offsets[chosen, None]), valid


def _best_first(scores: Floats, rows: Ints, valid: NDArray[np.bool_]) -> Ints:
    """Every list's rows by score, with the padding still last, so that `valid` remains right."""
    order = np.argsort(np.where(valid, -scores[rows], np.inf), axis=1, kind="stable")
    return np.take_along_axis(rows, order, axis=1)


def _later(depth: int, longest: int, valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The pairs (i, j) of positions that count: j below i, so that each pair counts once, and no padding."""
    below = np.arange(longest) > np.arange(depth)[:, None]
    return below if valid.all() else below & valid[:, None, :]


def _swap_weights(gains: Floats, valid: NDArray[np.bool_], truncation: int | None) -> Floats:
    """Signed ΔnDCG of every pair of ranks (i < truncation, j > i): positive where i's document is better."""
    longest = gains.shape[1]
    depth = min(truncation or longest, longest)
    discounts = (1 / np.log2(np.arange(longest) + 2)).astype(gains.dtype)
    ideal = -np.sort(-gains, axis=1)[:, :depth] @ discounts[:depth]
    scaled = gains / np.where(ideal > 0, ideal, 1)[:, None]
    weights: Floats = scaled[:, :depth, None] - scaled[:, None, :]
    weights *= (discounts[:depth, None] - discounts) * _later(depth, longest, valid)
    return weights


def _add_pairs(gradient: Floats, scores: Floats, rows: Ints, weights: Floats, sigma: float) -> float:
    """Add to `gradient` that of Σ |w_ij| log(1 + exp(−m_ij)), m_ij = sign(w_ij) σ(s_i − s_j), over a block.

    `weights` is (lists, upper documents, all documents) and negative where j is the better document. Lists
    are best first, so d = −σ(s_i − s_j) ≤ 0 and exp(d) never overflows. With p = 1/(1 + exp(d)) the loss is
    −|w| log p − min(w, 0) d, and its derivative by s_i is −σ (max(w, 0) − |w| p). Returns the value.
    """
    depth = weights.shape[1]
    scaled = scores[rows] * scores.dtype.type(-sigma)
    gap = scaled[:, :depth, None] - scaled[:, None, :]
    np.minimum(gap, 0, out=gap)  # positive only where the weight is 0
    chance = np.exp(gap)
    chance += 1
    np.reciprocal(chance, out=chance)
    better, size = np.maximum(weights, 0), np.abs(weights)
    pull = size * chance
    np.subtract(better, pull, out=pull)
    value = float(np.vdot(better, gap)) - float(np.vdot(size, gap))
    value -= float(np.vdot(size, np.log(chance, out=chance)))
    pushed = np.add.reduce(pull, axis=1)
    pushed[:, :depth] -= np.add.reduce(pull, axis=2)
    pushed *= sigma
    gradient += np.bincount(rows.ravel(), pushed.ravel(), len(gradient)).astype(scores.dtype)
    return value
