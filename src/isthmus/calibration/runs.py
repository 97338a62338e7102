"""Calibration of runs: fits calibrators on ranked lists and computes probabilities for their rows.

`PerPart` is one calibrator per part (silo, head, tail), shrunk to the pooled one if a part is small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration.curves import (
    Beta,
    BetaCDF,
    BinnedIsotonic,
    Gamma,
    Gaussian,
    Isotonic,
    Platt,
    Temperature,
)
from isthmus.calibration.estimator import Calibrator, own_weight
from isthmus.calibration.list_logistic import TOP, ListLogistic
from isthmus.calibration.query_feature import QueryFeature
from isthmus.calibration.softmax import NoisySoftmax, Softmax
from isthmus.errors import ConfigError, DataError
from isthmus.partition import folds as deal_folds
from isthmus.randomness import Streams
from isthmus.tables import UNJUDGED, Qrels, Run

CALIBRATORS: dict[str, Callable[[], Calibrator]] = {
    "platt": Platt,
    "isotonic": Isotonic,
    "isotonic-binned": BinnedIsotonic,
    "temperature": Temperature,
    "gaussian": Gaussian,
    "gamma": Gamma,
    "beta": Beta,
    "beta-cdf": BetaCDF,
    "list-logistic": ListLogistic,
    "list-logistic-score": lambda: ListLogistic(raw=True),
    "query-feature": QueryFeature,
    "query-feature-unconstrained": lambda: QueryFeature(boosting="unconstrained"),
    "softmax": Softmax,
    "softmax-noise": NoisySoftmax,
}
"""Every calibrator by name."""

SMALL = {"platt": 2, "list-logistic": 3, "list-logistic-score": 4}
CURVES = {"temperature": 1, "gaussian": 3, "gamma": 3, "beta": 3, "isotonic-binned": 10, "isotonic": 20}
CONTEST = {**SMALL, **CURVES, "query-feature": 14}
"""Calibrators among which `auto` chooses, with the number of parameters that each counts for. The others are
the paper's forms, which reorder lists or have no prior term, and the two softmaxes, for lists in which one
answer is right."""
FIRST = "list-logistic"
CLEARLY = 2.0
"""Standard errors by which another calibrator must be better than `FIRST` to be chosen."""
POSITIVES_PER_PARAMETER = 10
"""Relevant rows at the top of lists that a calibrator needs for every parameter to take part in the
comparison."""

LEAST_PAIRS = 20
SURE = 1e-9
FEW_LISTS = 10
LISTS_PER_LABEL = 20


class PerPart(Calibrator):
    """logit p = λ·logit p_part + (1 − λ)·logit p_pooled, with λ = n₊/(n₊ + shrinkage) of the part.

    `fit(…, parts=names)` names the part of every row. A part with fewer than twenty pairs, with one class
    only, or absent in fitting has λ = 0, so that the pooled calibrator is used. Separate calibrators may
    reorder a list that mixes parts, so pooled is the default everywhere else.
    """

    def __init__(self, calibrator: Calibrator | None = None, *, shrinkage: float = 50.0) -> None:
        self.calibrator = calibrator
        self.shrinkage = shrinkage

    @property
    def needs_lists(self) -> bool:  # type: ignore[override]
        """Whether the wrapped calibrator needs lists."""
        return (self.calibrator or Platt()).needs_lists

    def fit(
        self,
        scores: ArrayLike,
        y: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        judged: ArrayLike | None = None,
        parts: ArrayLike | None = None,
    ) -> Self:
        """Learn the pooled calibrator and one per part; without parts, only the pooled one."""
        values, relevant, known = self._checked(scores, y, judged)
        inside = Platt() if self.calibrator is None else self.calibrator
        context: dict[str, Any] = {"groups": groups} if inside.needs_lists else {}
        self.pooled_ = clone(inside).fit(values, relevant, judged=known, **context)
        self.parts_: dict[str, Calibrator] = {}
        self.trust_: dict[str, float] = {}
        names = _named(parts, len(values))
        for name in np.unique(names[known]) if parts is not None else ():
            mine = known & (names == name)
            positives, pairs = float(relevant[mine].sum()), int(mine.sum())
            trust = own_weight(positives, pairs, shrinkage=self.shrinkage, least=LEAST_PAIRS)
            if trust:
                self.parts_[str(name)] = clone(inside).fit(values, relevant, judged=mine, **context)
                self.trust_[str(name)] = trust
        return self

    def probabilities(
        self, scores: ArrayLike, *, groups: ArrayLike | None = None, parts: ArrayLike | None = None
    ) -> FloatArray:
        """P(relevant) of every score, by the calibrator of its part and the pooled one."""
        values = self._values(scores)
        context: dict[str, Any] = {"groups": groups} if self.pooled_.needs_lists else {}
        result = np.asarray(self.pooled_.probabilities(values, **context))
        if parts is None:
            return result
        names, pooled = _named(parts, len(values)), _logit(result)
        for name, calibrator in self.parts_.items():
            mine = names == name
            if mine.any():
                own = _logit(calibrator.probabilities(values, **context)[mine])
                trust = self.trust_[name]
                result[mine] = expit(trust * own + (1 - trust) * pooled[mine])
        return result


def _logit(probabilities: FloatArray) -> FloatArray:
    return np.asarray(logit(np.clip(probabilities, SURE, 1 - SURE)))


def _named(parts: ArrayLike | None, rows: int) -> NDArray[np.str_]:
    names = np.zeros(rows, dtype="U1") if parts is None else np.asarray(parts).astype(np.str_)
    if len(names) != rows:
        raise DataError(f"{len(names)} parts for {rows} scores", cure="name the part of every score")
    return names


@dataclass(frozen=True)
class Judging:
    """The lowest grade that counts as relevant, and how unjudged documents are treated.

    `unjudged="irrelevant"` is trec_eval's rule; `"skip"` learns from judged documents only, which is right
    where they are a fair sample. Queries without any judgement are never learned from.
    """

    threshold: int = 1
    unjudged: Literal["irrelevant", "skip"] = "irrelevant"

    def __post_init__(self) -> None:
        if self.unjudged not in ("irrelevant", "skip"):
            raise ConfigError(
                f"unjudged = {self.unjudged!r} is neither 'irrelevant' nor 'skip'", key="unjudged"
            )

    def of(self, run: Run, qrels: Qrels) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the mask of relevant rows and the mask of rows to learn from."""
        grades = run.grades(qrels)
        known = np.array([query in qrels for query in run.queries], dtype=bool)[run.query_of_row]
        if self.unjudged == "skip":
            known &= grades != UNJUDGED
        return grades >= self.threshold, known


def calibrator_named(name: str) -> Calibrator:
    """Return a new calibrator; hyphens and underscores are the same. Raises ConfigError for an
    unknown name."""
    spelt = name.replace("_", "-")
    if spelt not in CALIBRATORS:
        raise ConfigError(f"no calibrator {name!r}", key=spelt, known=("auto", *CALIBRATORS))
    return CALIBRATORS[spelt]()


def fit_calibrator(
    run: Run,
    qrels: Qrels,
    method: str | Calibrator = "auto",
    *,
    judging: Judging | None = None,
    parts: Mapping[str, str] | None = None,
) -> Calibrator:
    """Learn a calibrator from a run's lists and their judgements.

    `auto` compares the calibrators of `CONTEST` by their log-loss over the first ten rows of held-out lists,
    five-fold over all judged queries. It takes list-logistic unless another is better by more than two
    standard errors of the paired difference over queries, and Platt if there are fewer than ten lists.
    `small` is the same among calibrators of few parameters, which are quick to fit. `parts` names the part
    (silo, head, tail) of every document and fits one calibrator per part, shrunk to the pooled one.
    """
    judging = judging or Judging()
    relevant, known = _labelled(run, qrels, judging)
    inside = _chosen(run, qrels, method, judging)
    if parts is not None and not isinstance(inside, PerPart):
        inside = PerPart(inside)
    context = _context(run, inside, parts)
    enough = run.rows >= LISTS_PER_LABEL * len(np.unique(run.documents.codes))
    if isinstance(inside, Softmax) and enough:  # enough lists: documents are labels with priors
        context["items"] = _names(run)
    return inside.fit(run.scores, relevant, judged=known, **context)


def calibrate(
    run: Run,
    calibrator: str | Calibrator = "auto",
    *,
    qrels: Qrels | None = None,
    judging: Judging | None = None,
    parts: Mapping[str, str] | None = None,
    folds: int = 5,
) -> Run:
    """Return the same run with a probability of relevance for every row; the order does not change.

    A fitted calibrator is applied. A name or an unfitted calibrator is fitted on `qrels`: judged queries get
    their probabilities from calibrators fitted without them (`folds`-fold over queries), the others from one
    fitted on all judged queries.
    """
    if isinstance(calibrator, Calibrator) and _is_fitted(calibrator):
        return run.with_probabilities(probabilities_of(run, calibrator, parts=parts))
    if qrels is None:
        raise DataError("an unfitted calibrator and no judgements", cure="give qrels, or a fitted calibrator")
    _, probabilities = cross_fit(run, qrels, calibrator, judging=judging, parts=parts, folds=folds)
    return run.with_probabilities(probabilities)


def cross_fit(
    run: Run,
    qrels: Qrels,
    calibrator: str | Calibrator = "auto",
    *,
    judging: Judging | None = None,
    parts: Mapping[str, str] | None = None,
    folds: int = 5,
) -> tuple[Calibrator, FloatArray]:
    """Return a calibrator fitted on all judged queries, and the probabilities that `calibrate` would give.

    With fewer than two folds nothing is held out.
    """
    contest = None
    if calibrator in ("auto", "small") and folds > 1:
        contest = Contest.of(run, qrels, str(calibrator), judging=judging or Judging(), folds=folds)
        calibrator = contest.winner()
    final = fit_calibrator(run, qrels, calibrator, judging=judging, parts=parts)
    probabilities = probabilities_of(run, final, parts=parts)
    if folds > 1:
        fold_of = query_folds(run, qrels, folds, judging=judging)
        if contest is not None and parts is None:
            held_out = contest.held_out()
        else:
            held_out = _held_out(run, qrels, final, fold_of, judging=judging, parts=parts)
        probabilities = np.where(np.isnan(held_out), probabilities, held_out)
    return final, probabilities


def _held_out(
    run: Run,
    qrels: Qrels,
    calibrator: Calibrator,
    fold_of: IntArray,
    *,
    judging: Judging | None = None,
    parts: Mapping[str, str] | None = None,
) -> FloatArray:
    """Probabilities of judged queries by calibrators fitted on the other folds; NaN elsewhere."""
    probabilities = np.full(run.rows, np.nan)
    for fold in range(int(fold_of.max()) + 1):
        validation, rest = run[fold_of == fold], run[(fold_of >= 0) & (fold_of != fold)]
        if validation.rows:
            fitted = fit_calibrator(rest, qrels, clone(calibrator), judging=judging, parts=parts)
            probabilities[(fold_of == fold)[run.query_of_row]] = probabilities_of(
                validation, fitted, parts=parts
            )
    return probabilities


@dataclass(frozen=True, eq=False)
class Contest:
    """Calibrators compared on held-out lists: probabilities of every row, log-losses of every query."""

    names: tuple[str, ...]
    probabilities: FloatArray
    """Calibrators × rows; NaN where a row's query is not judged."""
    losses: FloatArray
    """Calibrators × queries: log-loss summed over the first ten rows."""
    fold_of_query: IntArray
    query_of_row: IntArray

    @classmethod
    def of(cls, run: Run, qrels: Qrels, among: str, *, judging: Judging, folds: int) -> Contest:
        """Fit every calibrator for whose parameters there are enough relevant rows, `folds`-fold over
        queries."""
        relevant, known = _labelled(run, qrels, judging)
        top = known & (run.ranks <= TOP)
        judged = sum(query in qrels for query in run.queries)
        bearable = int((relevant & top).sum()) // POSITIVES_PER_PARAMETER if judged >= FEW_LISTS else 0
        parameters = SMALL if among == "small" else CONTEST
        names = tuple(name for name, count in parameters.items() if count <= bearable) or ("platt",)
        fold_of = query_folds(run, qrels, folds, judging=judging)
        columns = [_held_out(run, qrels, CALIBRATORS[name](), fold_of, judging=judging) for name in names]
        probabilities = np.stack(columns)
        sure = np.clip(probabilities[:, top], SURE, 1 - SURE)
        losses = np.where(relevant[top], -np.log(sure), -np.log1p(-sure))
        homes = run.query_of_row[top]
        per_query = [np.bincount(homes, weights=each, minlength=len(run)) for each in losses]
        return cls(names, probabilities, np.stack(per_query), fold_of, run.query_of_row)

    def winner(self, outside: int = -1) -> str:
        """Return the best calibrator on the queries outside a fold: list-logistic (or the first, if it takes
        no part), unless another is clearly better."""
        queries = (self.fold_of_query >= 0) & (self.fold_of_query != outside)
        first = self.names.index(FIRST) if FIRST in self.names else 0
        gains = (self.losses[first] - self.losses)[:, queries]
        if gains.shape[1] < 2:  # too few queries to estimate the spread
            return self.names[first]
        errors = gains.std(axis=1, ddof=1) / gains.shape[1] ** 0.5
        means = np.where(gains.mean(axis=1) > CLEARLY * errors, gains.mean(axis=1), 0.0)
        return self.names[int(means.argmax()) if means.any() else first]

    def held_out(self) -> FloatArray:
        """Return the probability of every judged row by the calibrator that won on the other folds."""
        held_out = np.full(len(self.query_of_row), np.nan)
        for fold in range(int(self.fold_of_query.max()) + 1):
            mine = (self.fold_of_query == fold)[self.query_of_row]
            held_out[mine] = self.probabilities[self.names.index(self.winner(fold))][mine]
        return held_out


def probabilities_of(
    run: Run, calibrator: Calibrator, *, parts: Mapping[str, str] | None = None
) -> FloatArray:
    """P(relevant) of every row of a run, by a fitted calibrator."""
    if not run.rows:
        return np.empty(0)
    context = _context(run, calibrator, parts)
    if isinstance(calibrator, Softmax) and len(calibrator.items_):
        context["items"] = _names(run)
    return np.asarray(calibrator.probabilities(run.scores, **context))


def query_folds(
    run: Run, qrels: Qrels, folds: int, *, judging: Judging | None = None, seed: int = 0
) -> IntArray:
    """Return the fold of every query, −1 for a query without judgements.

    Folds depend on the queries' names and the seed, not on their order; queries with a relevant row are
    spread evenly.
    """
    judged = np.array([at for at, query in enumerate(run.queries) if query in qrels], dtype=np.int64)
    if len(judged) < folds:
        raise DataError(
            f"{len(judged)} judged queries cannot make {folds} folds",
            cure="judge more queries, or ask for fewer folds",
        )
    judged = judged[np.argsort(np.array(run.queries, dtype=np.str_)[judged])]
    relevant, _ = (judging or Judging()).of(run, qrels)
    some = np.bincount(run.query_of_row[relevant], minlength=len(run))[judged] > 0
    fold_of = np.full(len(run), -1, dtype=np.int64)
    fold_of[judged] = deal_folds(len(judged), folds, Streams(seed)("calibration", "folds"), strata=some)
    return fold_of


def _labelled(run: Run, qrels: Qrels, judging: Judging) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the masks of relevant rows and of rows to learn from. Raises DataError unless the latter have
    both classes."""
    relevant, known = judging.of(run, qrels)
    if judging.threshold > 1 and known.any() and not (relevant & known).any():
        highest = run.grades(qrels)[known].max(initial=0)
        raise DataError(
            f"{run.name or 'the run'}: 0 of {known.sum()} judged rows have grade {judging.threshold} or more",
            cure=f"the highest grade there is {highest}: lower the grade that is relevant (--relevant)",
        )
    if not (relevant & known).any() or not (known & ~relevant).any():
        raise DataError(
            f"{run.name or 'the run'}: {(relevant & known).sum()} of {known.sum()} judged rows are relevant",
            cure="calibrating needs relevant and irrelevant documents in the lists of judged queries",
        )
    return relevant, known


def _chosen(run: Run, qrels: Qrels, method: str | Calibrator, judging: Judging) -> Calibrator:
    if isinstance(method, Calibrator):
        copy: Calibrator = clone(method)
        return copy
    if method not in ("auto", "small"):
        return calibrator_named(method)
    folds = min(5, sum(query in qrels for query in run.queries))
    if folds < 2:
        return Platt()
    return calibrator_named(Contest.of(run, qrels, method, judging=judging, folds=folds).winner())


def _context(run: Run, calibrator: Calibrator, parts: Mapping[str, str] | None) -> dict[str, Any]:
    """The keyword arguments that a calibrator takes beside the scores: `groups`, `parts`."""
    context: dict[str, Any] = {"groups": run.query_of_row} if calibrator.needs_lists else {}
    if isinstance(calibrator, PerPart) and parts is not None:
        named = np.array([parts.get(word, "") for word in run.documents.words], dtype=np.str_)
        context["parts"] = named[run.documents.codes]
    return context


def _names(run: Run) -> NDArray[np.str_]:
    """The document of every row."""
    return np.array(run.documents.words, dtype=np.str_)[run.documents.codes]


def _is_fitted(calibrator: Calibrator) -> bool:
    try:
        check_is_fitted(calibrator)
    except NotFittedError:
        return False
    return True
