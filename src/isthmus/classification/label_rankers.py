"""Labels as documents: text classification by retrieval.

A label ranker scores every label for a text. All share one interface, `fit(views, labels)` and then
`scores(views)`, an array texts × labels with NaN for an unlisted label. Their input are `View`s of texts,
which a `Panel` computes once for all of its rankers:

    OneVsRest      a linear classifier per label (DiSMEC)
    NaiveBayes     complement naive Bayes
    TextNeighbours     labels of the nearest training texts, their similarities added or the largest kept
    Bm25Neighbours the same with BM25, as the rank-fusion paper's sparse retriever
    Centroid       similarity to the mean of a label's training texts
    LabelText      similarity to the label's own name and description

Several labels per text are the general case; with a single label each row has one True.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, Ids, IntArray, frozen
from isthmus.classification.views import Sight, View
from isthmus.encoders import unit
from isthmus.errors import DataError
from isthmus.report import progress
from isthmus.retrieval import BM25, check_depth, check_unique
from isthmus.tables import Documents, Queries, Run

Labels = NDArray[np.bool_]
"""Texts × labels: whether the label is right for the text."""


class LabelRanker(Protocol):
    """Scores labels for texts; the constructor stores its arguments, `fit` returns a function that scores."""

    @property
    def views(self) -> tuple[View, ...]:
        """The views of texts that the ranker uses."""

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        """Learn from training texts; returns a function that scores texts × labels, NaN for an unlisted
        label."""


@dataclass(frozen=True)
class _OneView:
    """A ranker that uses one view of texts."""

    view: View

    @property
    def views(self) -> tuple[View, ...]:
        return (self.view,)

    def _linear(
        self, weights: Any, silent: NDArray[np.bool_], intercepts: FloatArray | float = 0.0
    ) -> Callable[[Sight], FloatArray]:
        """Return a function that scores x·w + intercept; silent labels get NaN. Weights are labels ×
        features."""

        def scores(queries: Sight) -> FloatArray:
            values = np.asarray(queries[self.view] @ weights.T + intercepts, dtype=np.float64)
            values[:, silent] = np.nan
            return values

        return scores


@dataclass(frozen=True)
class OneVsRest(_OneView):
    """A linear classifier per label; `loss` is "hinge" (squared) or "log".

    `ratio` first multiplies every feature by its naive Bayes log-count ratio (Wang and Manning 2012). A
    label with no training text, or with all, is unlisted.
    """

    cost: float = 0.5
    loss: Literal["hinge", "log"] = "hinge"
    ratio: bool = False

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        rows = sight[self.view]
        learned = [self._one(rows, right) for right in labels.T]
        width, silent = rows.shape[1], np.array([one is None for one in learned])
        weights = np.array([np.zeros(width) if one is None else one[0] for one in learned])
        intercepts = np.array([0.0 if one is None else one[1] for one in learned])
        return self._linear(weights, silent, intercepts)

    def _one(self, rows: Any, right: NDArray[np.bool_]) -> tuple[FloatArray, float] | None:
        from scipy.sparse import csr_array

        if right.all() or not right.any():
            return None
        ratio = _log_count_ratio(rows, right) if self.ratio else None
        weighed = rows if ratio is None else csr_array(rows * ratio[None, :])
        model = self._model().fit(weighed, right)
        weights = model.coef_[0] if ratio is None else model.coef_[0] * ratio
        return weights, float(model.intercept_[0])

    def _model(self) -> Any:
        from sklearn.linear_model import LogisticRegression
        from sklearn.svm import LinearSVC

        if self.loss == "hinge":
            return LinearSVC(C=self.cost, random_state=0)
        return LogisticRegression(C=self.cost, max_iter=300)


def _log_count_ratio(rows: Any, right: NDArray[np.bool_]) -> FloatArray:
    """Return ln of a feature's frequency in the label's texts over that in the others, counts plus one."""
    there = (rows != 0).astype(np.float64)
    inside, outside = (1 + np.asarray(there[mask].sum(axis=0)).ravel() for mask in (right, ~right))
    ratio: FloatArray = np.log((inside / inside.sum()) / (outside / outside.sum()))
    return ratio


@dataclass(frozen=True)
class NaiveBayes(_OneView):
    """Complement naive Bayes: Σ x·w with w = ln P(feature | other labels), divided by its mean over
    features.

    It is divided by the mean rather than the sum, because a sum grows with the vocabulary: scores learned
    from more texts would be on another scale than those on which a calibrator was fitted.
    """

    smoothing: float = 1.0

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        rows, right = sight[self.view], labels.astype(np.float64)
        inside = np.asarray((rows.T @ right).T)
        outside = np.asarray(rows.sum(axis=0)).ravel()[None, :] - inside + self.smoothing
        logs = np.log(outside / outside.sum(axis=1, keepdims=True))
        weights = logs / logs.mean(axis=1, keepdims=True)
        return self._linear(weights, np.logical_not(labels.any(axis=0)))


@dataclass(frozen=True)
class TextNeighbours(_OneView):
    """Labels of the k most similar training texts: similarities added ("sum") or the largest ("max").

    `sharpness` a replaces a cosine c by exp(a·c), which lets near neighbours outweigh many far ones.
    """

    k: int = 64
    pool: Literal["sum", "max"] = "sum"
    sharpness: float = 0.0

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        stored = sight[self.view]
        k = min(self.k, labels.shape[0])

        def scores(queries: Sight) -> FloatArray:
            near = _dense(queries[self.view] @ stored.T)
            rows = np.argpartition(-near, k - 1, axis=1)[:, :k]
            values = np.take_along_axis(near, rows, axis=1)
            values = np.exp(self.sharpness * values) if self.sharpness else values
            return _pooled(rows, values, labels, self.pool)

        return scores


@dataclass(frozen=True)
class Nearest:
    """A view with (rows, scores) of the k training texts with the best BM25 scores; NaN where fewer match.

    With it, rankers that pool the same neighbours in different ways search once.
    """

    k: int
    bm25: BM25

    def fit(self, texts: Sequence[str]) -> Callable[[Sequence[str]], tuple[IntArray, FloatArray]]:
        index = self.bm25.index(plain_documents(texts))

        def near(texts_of_queries: Sequence[str]) -> tuple[IntArray, FloatArray]:
            run = index.search(plain_queries(texts_of_queries), self.k)
            rows = np.zeros((len(run), self.k), dtype=np.int64)
            scores = np.full((len(run), self.k), np.nan)
            numbers = np.array([int(name) for name in run.documents.words], dtype=np.int64)
            rows[run.query_of_row, run.ranks - 1] = numbers[run.documents.codes]
            scores[run.query_of_row, run.ranks - 1] = run.scores
            return rows, scores

        return near


@dataclass(frozen=True)
class Bm25Neighbours:
    """Labels of the k training texts with the best BM25 scores, added ("sum") or the largest ("max")."""

    k: int = 64
    pool: Literal["sum", "max"] = "sum"
    bm25: BM25 = field(default_factory=BM25)

    @property
    def views(self) -> tuple[View, ...]:
        return (Nearest(self.k, self.bm25),)

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        (view,) = self.views

        def scores(queries: Sight) -> FloatArray:
            rows, values = queries[view]
            return _pooled(rows, values, labels, self.pool)

        return scores


def _pooled(rows: IntArray, values: FloatArray, labels: Labels, pool: str) -> FloatArray:
    """Add up, or take the largest of, the similarities of the neighbours that carry each label."""
    pooled = np.full((len(rows), labels.shape[1]), np.nan)
    for label, right in enumerate(labels.T):
        carried = right[rows] & ~np.isnan(values)
        if pool == "sum":
            best = np.where(carried, values, 0).sum(axis=1)
        else:
            best = np.where(carried, values, -np.inf).max(axis=1, initial=-np.inf)
        pooled[:, label] = np.where(carried.any(axis=1), best, np.nan)
    return pooled


@dataclass(frozen=True)
class Centroid(_OneView):
    """Cosine to the mean of a label's training texts."""

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        sums = _dense((sight[self.view].T @ labels.astype(np.float64)).T)
        centres = unit(sums.astype(np.float32))
        return self._linear(centres, np.logical_not(labels.any(axis=0)))


@dataclass(frozen=True)
class LabelText(_OneView):
    """Cosine of a text to every label's name and description."""

    def fit(self, sight: Sight, labels: Labels, documents: Documents) -> Callable[[Sight], FloatArray]:
        named = sight.fitted[self.view](documents.texts)
        return lambda queries: _dense(queries[self.view] @ named.T)


def _dense(matrix: Any) -> FloatArray:
    array: FloatArray = np.asarray(
        matrix.todense() if hasattr(matrix, "todense") else matrix, dtype=np.float64
    )
    return array


def plain_documents(texts: Sequence[str]) -> Documents:
    """Texts as documents without titles, named by their number."""
    count = len(texts)
    ids = tuple(str(at) for at in range(count))
    return Documents(ids, ("",) * count, tuple(texts), frozen(np.zeros(count, dtype=np.int64)))


def plain_queries(texts: Sequence[str]) -> Queries:
    """Texts as queries, named by their number."""
    count = len(texts)
    ids = tuple(str(at) for at in range(count))
    return Queries(ids, tuple(texts), frozen(np.zeros(count, dtype=np.int64)), ("test",) * count)


@dataclass(frozen=True)
class Panel:
    """Named label rankers that learn from the same texts and share their views."""

    rankers: dict[str, LabelRanker]

    def fit(
        self, texts: Sequence[str], labels: Labels, documents: Documents, *, label: str | None = None
    ) -> FittedPanel:
        """Learn from texts and their labels; `label` names the progress bar."""
        if labels.shape != (len(texts), len(documents)):
            raise DataError(f"{labels.shape} labels for {len(texts)} texts and {len(documents)} labels")
        views = dict.fromkeys(view for ranker in self.rankers.values() for view in ranker.views)
        sight = Sight(texts, {view: view.fit(texts) for view in views})
        names: Iterable[str] = self.rankers
        if label is not None:
            names = progress(list(self.rankers), total=len(self.rankers), label=label)
        learned = {name: self.rankers[name].fit(sight, labels, documents) for name in names}
        return FittedPanel(documents, sight.fitted, learned)


@dataclass(frozen=True, eq=False)
class FittedPanel:
    """A panel after fitting: its views and rankers."""

    documents: Documents
    fitted: dict[View, Callable[[Sequence[str]], Any]]
    learned: dict[str, Callable[[Sight], FloatArray]]

    def scores(self, texts: Sequence[str]) -> dict[str, FloatArray]:
        """Every ranker's scores, texts × labels, NaN for an unlisted label."""
        sight = Sight(texts, self.fitted)
        return {name: score(sight) for name, score in self.learned.items()}

    def search(self, queries: Queries, k: int) -> dict[str, Run]:
        """Return a run of labels from every ranker, at most k for each query."""
        check_depth(k)
        check_unique(queries.ids, "query")
        by_ranker = self.scores(queries.texts)
        return {
            name: as_run(queries.ids, self.documents.ids, scores, k, name)
            for name, scores in by_ranker.items()
        }


def as_run(queries: tuple[str, ...], labels: tuple[str, ...], scores: FloatArray, k: int, name: str) -> Run:
    """Convert a texts × labels array to ranked lists of at most k labels; NaN is not listed."""
    names = Ids.of(labels)
    order = np.argsort(-names.codes)
    values = np.where(np.isnan(scores), -np.inf, scores)[:, order]
    best = np.argsort(-values, axis=1, kind="stable")[:, :k]
    values = np.take_along_axis(values, best, axis=1)
    listed = values > -np.inf
    offsets = np.concatenate(([0], np.cumsum(listed.sum(axis=1))))
    return Run(queries, frozen(offsets), names[order][best[listed]], frozen(values[listed]), None, name)
