"""Boosted trees as plain arrays: what scikit-learn fitted, kept without pickle and evaluated by NumPy.

Every tree is laid out as a full binary tree of the same depth, node i above nodes 2i+1 and 2i+2, so
that walking it is arithmetic on node numbers; a leaf that stands higher up is repeated below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.tables.ids import FloatArray, IntArray

BLOCK = 1 << 15


@dataclass(frozen=True, eq=False)
class Forest:
    """Σ over trees of the leaf a row falls into, plus `base`; rows go left where feature ≤ threshold."""

    features: IntArray  # trees × inner nodes
    thresholds: FloatArray  # trees × inner nodes
    leaves: FloatArray  # trees × leaves
    base: float
    single: bool  # whether rows are rounded to single precision first, as scikit-learn's exact trees do

    def margins(self, rows: FloatArray) -> FloatArray:
        """The forest's value for every row (a log-odds, where it was fitted as a classifier)."""
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
    def of_histogram(cls, model: Any) -> Forest:
        """From a fitted HistGradientBoostingClassifier of two classes, without missing values."""
        trees = []
        for (tree,) in model._predictors:
            nodes = tree.nodes
            inner = nodes["is_leaf"] == 0
            trees.append(
                _Tree(
                    np.where(inner, nodes["left"], 0).astype(np.int64),
                    np.where(inner, nodes["right"], 0).astype(np.int64),
                    nodes["feature_idx"].astype(np.int64),
                    nodes["num_threshold"],
                    nodes["value"],
                )
            )
        return cls._laid_out(trees, base=float(model._baseline_prediction[0, 0]), single=False)

    @classmethod
    def of_exact(cls, model: Any) -> Forest:
        """From a fitted GradientBoostingClassifier of two classes with its default start."""
        trees = []
        for (fitted,) in model.estimators_:
            tree = fitted.tree_
            inner = tree.children_left >= 0
            trees.append(
                _Tree(
                    np.where(inner, tree.children_left, 0),
                    np.where(inner, tree.children_right, 0),
                    tree.feature,
                    tree.threshold,
                    model.learning_rate * tree.value[:, 0, 0],
                )
            )
        prior = model.init_.class_prior_[1]
        return cls._laid_out(trees, base=float(np.log(prior / (1 - prior))), single=True)

    @classmethod
    def _laid_out(cls, trees: Iterable[_Tree], *, base: float, single: bool) -> Forest:
        grown = list(trees)
        depth = max(tree.depth() for tree in grown)
        inner = (1 << depth) - 1
        features = np.zeros((len(grown), inner), dtype=np.int64)
        thresholds = np.full((len(grown), inner), np.inf)
        leaves = np.zeros((len(grown), inner + 1))
        for at, tree in enumerate(grown):
            for node, place, level in tree.walk():
                if tree.left[node]:
                    features[at, place] = tree.feature[node]
                    thresholds[at, place] = tree.threshold[node]
                else:
                    below = 1 << (depth - level)
                    first = (place + 1) * below - 1 - inner
                    leaves[at, first : first + below] = tree.value[node]
        return cls(features, thresholds, leaves, base, single)


@dataclass(frozen=True)
class _Tree:
    """One tree as its library stores it, leaves marked by a left child of 0."""

    left: IntArray
    right: IntArray
    feature: IntArray
    threshold: FloatArray
    value: FloatArray

    def walk(self) -> Iterator[tuple[int, int, int]]:
        """Every node with its place in the full tree and its level."""
        waiting = [(0, 0, 0)]
        while waiting:
            node, place, level = waiting.pop()
            yield node, place, level
            if self.left[node]:
                waiting.append((int(self.left[node]), 2 * place + 1, level + 1))
                waiting.append((int(self.right[node]), 2 * place + 2, level + 1))

    def depth(self) -> int:
        return max(level for _, _, level in self.walk())
