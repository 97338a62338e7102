"""QueryFeature: calibration of a score that takes the other scores of its list into account.

The same raw score means different things in different lists. Fourteen features describe the score, the
list's distribution of scores and the score's place in it; boosted trees turn them into a probability. With
monotone constraints on the four features that move with the score inside a list, no list is reordered;
without them (the paper's form) a worse score may get the higher probability.

The trees that scikit-learn fits are stored as plain arrays, without pickle, and evaluated by NumPy. Every
tree is laid out as a full binary tree of the same depth, node i above nodes 2i+1 and 2i+2, so that walking
it is arithmetic on node numbers; a leaf above the lowest level is repeated below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration.estimator import Calibrator
from isthmus.errors import ConfigError

BLOCK = 1 << 15
FEATURES = (
    "score", "mean", "std", "min", "max", "median", "skewness", "kurtosis", "range", "entropy", "gini",
    "rank", "z", "percentile",
)  # fmt: skip
DIRECTIONS = tuple({"score": 1, "z": 1, "percentile": 1, "rank": -1}.get(name, 0) for name in FEATURES)
"""The sign of each feature's monotone constraint: four features move with the score inside a list, the others
(0) are constant in it."""


def list_features(scores: FloatArray, groups: IntArray | None) -> FloatArray:
    """Return the fourteen features, one row per score; without groups every score is a list of its own.

    Moments are population moments. Entropy and the Gini index 1 − Σp² are computed from the scores divided
    by their sum, after the minimum is subtracted if a score is not positive. Rank is the share of better
    scores, percentile the share of scores that are no better. Equal scores have equal features.
    """
    if groups is None:
        groups = np.arange(len(scores))
    order = np.lexsort((scores, groups))
    values, names = scores[order], groups[order]
    starts = np.flatnonzero(np.concatenate(([True], names[1:] != names[:-1])))
    counts = np.diff(np.append(starts, len(values)))
    at = np.repeat(np.arange(len(starts)), counts)
    low, high = values[starts], values[starts + counts - 1]
    middle = (values[starts + (counts - 1) // 2] / 2) + (values[starts + counts // 2] / 2)

    def mean(column: FloatArray) -> FloatArray:
        return np.asarray(np.add.reduceat(column, starts) / counts)

    spread = high - low
    unit = np.where(spread[at] > 0, (values - low[at]) / np.where(spread > 0, spread, 1.0)[at], 0.0)
    centre = mean(unit)
    deviation = np.sqrt(mean((unit - centre[at]) ** 2))
    z = (unit - centre[at]) / np.where(deviation > 0, deviation, 1.0)[at]
    cubes = mean(z**3)
    fourths = np.where(spread > 0, mean(z**4) - 3.0, 0.0)
    entropy, gini = _concentration(values, unit, (at, starts, counts), low)
    first = np.concatenate(([True], (values[1:] != values[:-1]) | (names[1:] != names[:-1])))
    block = np.cumsum(first) - 1
    ends = np.append(np.flatnonzero(first)[1:], len(values))[block] - starts[at]
    per_list = (low + centre * spread, deviation * spread, low, high, middle, cubes, fourths, spread)
    columns = [values, *(column[at] for column in (*per_list, entropy, gini))]
    columns += [1 - ends / counts[at], z, ends / counts[at]]
    table = np.empty((len(scores), len(FEATURES)))
    for position, column in enumerate(columns):
        table[order, position] = column
    return table


def _concentration(
    values: FloatArray, unit: FloatArray, lists: tuple[IntArray, IntArray, IntArray], low: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Entropy −Σ p ln p and Gini 1 − Σ p² of every list's share of scores; a constant list is uniform."""
    at, starts, counts = lists
    positive = np.where((low > 0)[at], values, unit)
    total = np.add.reduceat(positive, starts)
    even = ~((total > 0) & np.isfinite(total))
    share = np.where(even[at], 1 / counts[at], positive / np.where(even, 1.0, total)[at])
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return -np.add.reduceat(share * logs, starts), 1 - np.add.reduceat(share**2, starts)


@dataclass(frozen=True, eq=False)
class Forest:
    """Boosted trees: `base` plus the values of the leaves that a row reaches; rows go left where feature ≤
    threshold."""

    features: IntArray  # trees × inner nodes
    thresholds: FloatArray  # trees × inner nodes
    leaves: FloatArray  # trees × leaves
    base: float
    single: bool  # whether rows are first rounded to single precision, as scikit-learn's exact trees do

    def margins(self, rows: FloatArray) -> FloatArray:
        """Return the forest's value for every row (log-odds if it was fitted as a classifier)."""
        total = np.full(len(rows), self.base)
        for start in range(0, len(rows), BLOCK):
            self._add(rows[start : start + BLOCK], total[start : start + BLOCK])
        return total

    def _add(self, rows: FloatArray, total: FloatArray) -> None:
        if self.single:
            rows = rows.astype(np.float32)
        columns, count = np.ascontiguousarray(rows.T).reshape(-1), len(rows)
        within = np.arange(count)
        inner = self.features.shape[1]
        depth = inner.bit_length()
        for features, thresholds, leaves in zip(
            self.features * count, self.thresholds, self.leaves, strict=True
        ):
            node = np.zeros(count, dtype=np.intp)
            for _ in range(depth):
                right = columns.take(features.take(node) + within) > thresholds.take(node)
                node = 2 * node + 1
                node += right
            total += leaves.take(node - inner)

    @classmethod
    def of(cls, model: Any) -> Forest:
        """Convert a fitted booster of two classes: histogram boosting without missing values, or exact
        gradient boosting with its default start."""
        is_exact = hasattr(model, "estimators_")
        prior = model.init_.class_prior_[1] if is_exact else 0.5
        base = np.log(prior / (1 - prior)) if is_exact else model._baseline_prediction[0, 0]
        trees = list(_trees(model))
        depth = max(level for tree in trees for _, _, level in tree.walk())
        inner = (1 << depth) - 1
        features = np.zeros((len(trees), inner), dtype=np.int64)
        thresholds = np.full((len(trees), inner), np.inf)
        leaves = np.zeros((len(trees), inner + 1))
        for at, tree in enumerate(trees):
            for node, place, level in tree.walk():
                if tree.left[node]:
                    features[at, place] = tree.feature[node]
                    thresholds[at, place] = tree.threshold[node]
                else:
                    below = 1 << (depth - level)
                    first = (place + 1) * below - 1 - inner
                    leaves[at, first : first + below] = tree.value[node]
        return cls(features, thresholds, leaves, float(base), is_exact)


class _Tree(NamedTuple):
    """One tree as its library stores it; a left child of 0 marks a leaf."""

    left: IntArray
    right: IntArray
    feature: IntArray
    threshold: FloatArray
    value: FloatArray

    def walk(self) -> Iterator[tuple[int, int, int]]:
        """Yield every node with its number in the full binary tree and its level."""
        waiting = [(0, 0, 0)]
        while waiting:
            node, place, level = waiting.pop()
            yield node, place, level
            if self.left[node]:
                waiting.append((int(self.left[node]), 2 * place + 1, level + 1))
                waiting.append((int(self.right[node]), 2 * place + 2, level + 1))


def _trees(model: Any) -> Iterator[_Tree]:
    """The trees of a fitted booster, histogram or exact."""
    if hasattr(model, "_predictors"):
        for (predictor,) in model._predictors:
            nodes, inner = predictor.nodes, predictor.nodes["is_leaf"] == 0
            left, right = (np.where(inner, nodes[side], 0) for side in ("left", "right"))
            yield _Tree(left, right, nodes["feature_idx"], nodes["num_threshold"], nodes["value"])
        return
    for (fitted,) in model.estimators_:
        tree, inner = fitted.tree_, fitted.tree_.children_left >= 0
        left, right = (np.where(inner, side, 0) for side in (tree.children_left, tree.children_right))
        yield _Tree(left, right, tree.feature, tree.threshold, model.learning_rate * tree.value[:, 0, 0])


class QueryFeature(Calibrator):
    """P(relevant | score, its list) by boosted trees on `list_features`.

    `boosting="monotone"` is histogram boosting that never reorders a list; `"unconstrained"` is the paper's
    exact gradient boosting with a row subsample of 0.8. `search=True` chooses depth, learning rate and
    number of trees by five-fold cross-validation over lists instead of taking the paper's values.
    """

    needs_lists = True

    def __init__(
        self,
        *,
        boosting: str = "monotone",
        trees: int = 100,
        depth: int = 5,
        learning_rate: float = 0.1,
        search: bool = False,
        random_state: int = 0,
    ) -> None:
        self.boosting = boosting
        self.trees = trees
        self.depth = depth
        self.learning_rate = learning_rate
        self.search = search
        self.random_state = random_state

    def _learn_lists(
        self, scores: FloatArray, relevant: FloatArray, groups: IntArray | None, judged: NDArray[np.bool_]
    ) -> None:
        if self.boosting not in BOOSTINGS:
            problem = f"boosting {self.boosting!r} is not one of {', '.join(BOOSTINGS)}"
            raise ConfigError(problem, key=self.boosting, known=BOOSTINGS)
        rows, relevant = list_features(scores, groups)[judged], relevant[judged]
        chosen = {"trees": self.trees, "depth": self.depth, "learning_rate": self.learning_rate}
        with _one_thread():
            if self.search:
                lists = np.arange(len(rows)) if groups is None else groups[judged]
                chosen = _search(self, rows, relevant, lists) or chosen
            self.forest_ = self._grown(rows, relevant, **chosen)
        self.chosen_ = np.array([chosen["trees"], chosen["depth"], chosen["learning_rate"]])
        self.with_lists_ = groups is not None

    def _grown(
        self, rows: FloatArray, relevant: FloatArray, *, trees: float, depth: float, learning_rate: float
    ) -> Forest:
        shape = {"max_depth": int(depth), "learning_rate": learning_rate, "random_state": self.random_state}
        return Forest.of(_booster(self.boosting, int(trees), shape).fit(rows, relevant))

    def _probabilities_lists(self, scores: FloatArray, groups: IntArray | None) -> FloatArray:
        self._check_lists(groups is not None)
        return np.asarray(expit(self.forest_.margins(list_features(scores, groups))))


BOOSTINGS = ("monotone", "unconstrained")


def _booster(boosting: str, trees: int, shape: dict[str, Any]) -> Any:
    from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingClassifier

    if boosting == "unconstrained":
        return GradientBoostingClassifier(n_estimators=trees, subsample=0.8, **shape)
    return HistGradientBoostingClassifier(
        max_iter=trees, monotonic_cst=list(DIRECTIONS), early_stopping=False, **shape
    )


def _one_thread() -> Any:
    """Limit OpenMP to one thread: its threads wait for each other by spinning, which on a busy machine turns
    seconds into minutes."""
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, user_api="openmp")


def _search(
    calibrator: QueryFeature, rows: FloatArray, relevant: FloatArray, lists: IntArray
) -> dict[str, float] | None:
    """Return the depth, learning rate and number of trees with the least held-out log-loss over five folds of
    lists; None if there is too little data."""
    from sklearn.model_selection import StratifiedGroupKFold

    if len(np.unique(lists)) < 5 or min(relevant.sum(), (1 - relevant).sum()) < 5:
        return None
    folds = list(StratifiedGroupKFold(5).split(rows, relevant, lists))
    losses: dict[tuple[int, float, int], float] = {}
    for depth in (3, 5):
        for rate in (0.05, 0.1):
            shape = {"max_depth": depth, "learning_rate": rate, "random_state": calibrator.random_state}
            for train, validation in folds:
                model = _booster(calibrator.boosting, 2 * calibrator.trees, shape)
                model.fit(rows[train], relevant[train])
                for count, probabilities in enumerate(model.staged_predict_proba(rows[validation]), 1):
                    if count % 10 == 0:
                        right = np.where(relevant[validation] > 0, probabilities[:, 1], probabilities[:, 0])
                        loss = -np.log(np.maximum(right, 1e-12)).sum()
                        losses[depth, rate, count] = losses.get((depth, rate, count), 0.0) + loss
    depth, rate, count = min(losses, key=lambda key: losses[key])
    return {"trees": count, "depth": depth, "learning_rate": rate}
