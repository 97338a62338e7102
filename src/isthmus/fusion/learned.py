"""What every fuser with judgements behind it does, and the simplest: a formula whose score is calibrated.

Fitting is cross-fitted over queries throughout. A judged query's evidence comes from calibrators that did not
see it, and weights are applied to queries they were not fitted on; so the run that `fit_fuse` returns can be
evaluated on the same judgements, and its probabilities and thresholds are honest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from isthmus.calibration import Judging, Platt, ThresholdCurve, query_folds
from isthmus.errors import ConfigError, DataError
from isthmus.fusion.explanations import Explanation, Part
from isthmus.fusion.fusers import FUSERS, Candidates
from isthmus.fusion.methods import choose, default_norm
from isthmus.fusion.union import Union
from isthmus.tables import Qrels, Run
from isthmus.tables.ids import FloatArray, IntArray

Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a fuser learns from: the union of all runs, which rows are relevant, and folds of queries."""

    union: Union
    qrels: Qrels
    relevant: Mask
    known: Mask
    """Rows of judged queries; with `Judging(unjudged="skip")` only judged rows."""
    fold_of_query: IntArray
    """−1 for a query without judgements."""

    @classmethod
    def of(cls, runs: Sequence[Run], qrels: Qrels, judging: Judging, folds: int) -> Lesson:
        union = Union.of(runs)
        table = union.table()
        relevant, known = judging.of(table, qrels)
        if not (relevant & known).any() or not (known & ~relevant).any():
            raise DataError(
                f"{(relevant & known).sum()} of {known.sum()} judged candidates are relevant",
                cure="learning to fuse needs judged queries with relevant and irrelevant candidates",
            )
        judged = sum(query in qrels for query in union.queries)
        if judged < 2:
            raise DataError(
                "one judged query alone: nothing is left to learn from when it is held out",
                cure="judge a second query, or fuse without judgements",
            )
        folds = min(folds, judged)
        return cls(union, qrels, relevant, known, query_folds(table, qrels, folds, judging=judging))

    @property
    def folds(self) -> int:
        return int(self.fold_of_query.max()) + 1

    def outside(self, fold: int) -> Mask:
        """The judged queries of the other folds; of all folds for fold −1."""
        return np.asarray((self.fold_of_query >= 0) & (self.fold_of_query != fold))


class Fuser:
    """`fit(runs, qrels)` learns; `fuse(runs)` gives one run with calibrated probabilities.

    A subclass says what evidence it reads (k × rows), how it learns weights from it and how it scores with
    them. The same retrievers must come to `fuse` as came to `fit`: matched by name if the names are the same,
    else in the same order.
    """

    method: ClassVar[str]

    def __init__(self, *, judging: Judging | None = None, folds: int = 5) -> None:
        self.judging = judging or Judging()
        self.folds = folds

    @property
    def label(self) -> str:
        """What the fused run is called."""
        return self.method

    def fit(self, runs: Sequence[Run], qrels: Qrels) -> Self:
        """Learn from runs and the judgements of some or all of their queries."""
        self.fit_fuse(runs, qrels)
        return self

    def fit_fuse(self, runs: Sequence[Run], qrels: Qrels, *, name: str = "") -> Run:
        """Learn, and fuse the same runs: judged queries by models that did not see them."""
        if not runs:
            raise DataError("no runs to fuse", cure="give at least one run")
        self.retrievers_ = names_of(runs)
        lesson = Lesson.of(runs, qrels, self.judging, self.folds)
        evidence = self._gather(lesson)
        self.weights_, *by_fold = self._weigh_folds(evidence, lesson)
        held = self._scores(evidence, self.weights_, lesson.union).copy()
        for fold, weights in enumerate(by_fold):
            mine = (lesson.fold_of_query == fold)[lesson.union.query_of_row]
            held[mine] = self._scores(evidence, weights, lesson.union)[mine]
        chances = self._learn_chances(held, lesson)
        known = lesson.known
        self.curve_ = ThresholdCurve.of(chances[known], lesson.relevant[known])
        return lesson.union.ranked(held, name=name or self.label, probabilities=chances)

    def fuse(self, runs: Sequence[Run], *, name: str = "") -> Run:
        """One run, best first, with a probability for every candidate."""
        union = Union.of(self._matched(runs))
        scores = self._scores(self._evidence(union), self.weights_, union)
        return union.ranked(scores, name=name or self.label, probabilities=self._chances(scores, union))

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """Ready to fuse these runs without having learned, where the method can."""
        raise ConfigError(
            f"{self.label} learns from judgements and none are given (give qrels, or take another method)",
            key="qrels",
        )

    def threshold_for(self, precision: float = 0.9) -> float:
        """The lowest probability that kept this precision on validation."""
        if not hasattr(self, "curve_"):
            raise DataError(f"the fuser {self.method!r} has seen no judgements", cure="fit it on some")
        return self.curve_.threshold_for(precision)

    def explain(
        self, runs: Sequence[Run], query: str, document: str | None = None, *, depth: int = 10
    ) -> list[Explanation]:
        """Why one document, or each of the first `depth`, stands where it does in a query's fused list."""
        union = Union.of(self._matched(runs))
        if query not in union.queries:
            raise DataError(f"no run has the query {query!r}")
        evidence = self._evidence(union)
        scores = self._scores(evidence, self.weights_, union)
        chances = self._chances(scores, union)
        at = union.queries.index(query)
        rows = union.best_first(scores)[union.offsets[at] : union.offsets[at + 1]].tolist()
        account = self._account(union, evidence)
        told = [
            self._explained(union, account, row, rank, _found(scores, chances, row))
            for rank, row in enumerate(rows, 1)
            if (document is None and rank <= depth) or document == union.documents.word(row)
        ]
        if document is not None and not told:
            raise DataError(f"no run returned {document!r} for the query {query!r}")
        return told

    def _explained(
        self, union: Union, account: Account, row: int, rank: int, found: tuple[float, float | None]
    ) -> Explanation:
        parts = []
        for at, name in enumerate(self.retrievers_):
            here = np.flatnonzero(union.places[at] == row)
            run = union.runs[at]
            parts.append(
                Part(
                    name,
                    float(run.scores[here[0]]) if len(here) else None,
                    int(run.ranks[here[0]]) if len(here) else None,
                    None if account.chances is None else float(account.chances[at, row]),
                    None if account.weights is None else float(account.weights[at]),
                    float(account.contributions[at, row]),
                )
            )
        query = union.queries[union.query_of_row[row]]
        start = float(account.start[row])
        return Explanation(query, union.documents.word(row), rank, *found, start, tuple(parts))

    def _matched(self, runs: Sequence[Run]) -> list[Run]:
        if not hasattr(self, "retrievers_"):
            raise DataError(f"the fuser {self.method!r} is not fitted", cure="call fit, or load a saved one")
        if len(runs) != len(self.retrievers_):
            names = ", ".join(self.retrievers_)
            raise DataError(f"fitted on {len(self.retrievers_)} runs ({names}) and given {len(runs)}")
        by_name = {run.name: run for run in runs}
        if set(by_name) == set(self.retrievers_):
            return [by_name[name] for name in self.retrievers_]
        for fitted, run in zip(self.retrievers_, runs, strict=True):
            if run.name != fitted and run.name in self.retrievers_:
                raise DataError(
                    f"the run {run.name!r} stands where {fitted!r} stood in fitting",
                    cure=f"give the runs in the order {', '.join(self.retrievers_)}",
                )
        return list(runs)

    def _learn_chances(self, held: FloatArray, lesson: Lesson) -> FloatArray:
        """Learn score → probability; returns cross-fitted probabilities of all rows."""
        query_of_row = lesson.union.query_of_row
        self.final_ = Platt().fit(held[lesson.known], lesson.relevant[lesson.known])
        chances = np.asarray(self.final_.probabilities(held))
        for fold in range(lesson.folds):
            mine = (lesson.fold_of_query == fold)[query_of_row]
            rest = lesson.outside(fold)[query_of_row] & lesson.known
            if mine.any() and 0 < lesson.relevant[rest].sum() < rest.sum():
                fitted = Platt().fit(held[rest], lesson.relevant[rest])
                chances[mine] = fitted.probabilities(held[mine])
        return chances

    def _chances(self, scores: FloatArray, union: Union) -> FloatArray | None:
        """Probabilities of fused scores; None where nothing was learned."""
        if not hasattr(self, "final_"):
            return None
        return np.asarray(self.final_.probabilities(scores)) if len(scores) else scores

    def _gather(self, lesson: Lesson) -> FloatArray:
        """Learn what each retriever's evidence needs; the evidence, cross-fitted."""
        return self._evidence(lesson.union)

    def _evidence(self, union: Union) -> FloatArray:
        """k × rows of what the scores are made from."""
        raise NotImplementedError

    def _weigh_folds(self, evidence: FloatArray, lesson: Lesson) -> list[FloatArray]:
        """Weights learned from all judged queries, then those for each fold, learned from the others."""
        return [self._weigh(evidence, lesson, lesson.outside(fold)) for fold in range(-1, lesson.folds)]

    def _weigh(self, evidence: FloatArray, lesson: Lesson, queries: Mask) -> FloatArray:
        """Weights learned from these queries; none where a formula needs none."""
        return np.empty(0)

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        """The fused score of every row."""
        raise NotImplementedError

    def _account(self, union: Union, evidence: FloatArray) -> Account:
        """What each retriever contributed to every row."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON can hold them."""
        judging = {"threshold": self.judging.threshold, "unjudged": self.judging.unjudged}
        return {"judging": judging, "folds": self.folds}


@dataclass(frozen=True, eq=False)
class Account:
    """Retrievers × rows of contributions, the rows' start, and what else an explanation shows."""

    contributions: FloatArray
    start: FloatArray
    weights: FloatArray | None = None
    chances: FloatArray | None = None


class Formula(Fuser):
    """Any fuser of `FUSERS` with its score calibrated on judgements.

    A retriever's contribution is by how much the score would fall without it.
    """

    def __init__(
        self,
        formula: str = "rrf",
        *,
        norm: str | None = None,
        missing: float | str | None = None,
        options: dict[str, Any] | None = None,
        judging: Judging | None = None,
        folds: int = 5,
    ) -> None:
        super().__init__(judging=judging, folds=folds)
        self.formula = choose((), formula, None)
        self.norm = default_norm(self.formula) if norm is None else norm
        self.missing = missing
        self.options = dict(options or {})

    method = "formula"

    @property
    def label(self) -> str:
        """The formula's name."""
        return self.formula

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """A formula needs no judgements; without them it gives no probabilities."""
        self.retrievers_, self.weights_ = names_of(runs), np.empty(0)
        return self

    def _evidence(self, union: Union) -> FloatArray:
        candidates = Candidates.of(union, self.norm, missing=self.missing)
        return np.asarray([FUSERS[self.formula](candidates, **self.options)])

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        return np.asarray(evidence[0])

    def _account(self, union: Union, evidence: FloatArray) -> Account:
        contributions = np.tile(evidence[0], (len(union.runs), 1))
        for at in range(len(union.runs)):
            others = [run for other, run in enumerate(union.runs) if other != at]
            if others:
                fewer = Union.of(others)
                place = union.rows_of(fewer)
                contributions[at, place] -= self._evidence(fewer)[0]
        return Account(contributions, evidence[0] - contributions.sum(axis=0))

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {"formula": self.formula, "norm": self.norm, "missing": self.missing, "options": self.options}
        return {**own, **super().parameters()}


def _found(scores: FloatArray, chances: FloatArray | None, row: int) -> tuple[float, float | None]:
    return float(scores[row]), None if chances is None else float(chances[row])


def names_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """The runs' names; where two are the same or one is empty, numbers tell them apart."""
    names = [run.name for run in runs]
    plain = all(names) and len(set(names)) == len(names)
    return tuple(name if plain else f"{at} {name}".strip() for at, name in enumerate(names, 1))
