"""The interface of every fuser: fit on judged runs, fuse, explain. Judged queries are always held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration import Calibrator, Judging, Platt, ThresholdCurve, cross_fit, query_folds
from isthmus.config import settings_repr
from isthmus.errors import ConfigError, DataError
from isthmus.fusion.union import Union
from isthmus.report import Tabular, preview
from isthmus.tables import Qrels, Run

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class RetrieverScore:
    """One retriever's part in the score of a document; score and rank are None if it did not return it."""

    retriever: str
    score: float | None
    rank: int | None
    probability: float | None
    weight: float | None
    contribution: float


@dataclass(frozen=True)
class Explanation(Tabular):
    """How a fused score is composed: `score` = `start` + the contributions, if the fuser adds."""

    query: str
    document: str
    rank: int
    score: float
    probability: float | None
    start: float
    parts: Sequence[RetrieverScore]

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    def to_arrow(self) -> pa.Table:
        """Return one row per retriever: score, rank, probability, weight and contribution."""
        return pa.Table.from_pylist([asdict(part) for part in self.parts])

    def _repr_html_(self) -> str:
        return preview(self.to_arrow(), title=str(self).partition("\n")[0])

    def __str__(self) -> str:
        chance = "" if self.probability is None else f", probability {self.probability:.3f}"
        lines = [f"{self.query} → {self.document}: rank {self.rank}, score {self.score:.4f}{chance}"]
        for part in self.parts:
            raw = "absent" if part.score is None else f"score {part.score:.4f} at rank {part.rank}"
            probability = "" if part.probability is None else f", probability {part.probability:.3f}"
            weight = "" if part.weight is None else f", weight {part.weight:.3f}"
            lines.append(
                f"  {part.retriever}: {raw}{probability}{weight}, contributes {part.contribution:+.4f}"
            )
        return "\n".join([*lines, f"  start {self.start:+.4f}"])


@dataclass(frozen=True, eq=False)
class TrainingUnion:
    """Training data of a fuser: the union of all runs, which rows are relevant, and folds of queries."""

    union: Union
    qrels: Qrels
    relevant: Mask
    known: Mask
    """Mask of the rows of judged queries; with `Judging(unjudged="skip")` only of judged rows."""
    fold_of_query: IntArray
    """The fold of every query; −1 for a query without judgements."""
    calibrated: dict[tuple[int, str], tuple[Calibrator, FloatArray]] = field(default_factory=dict)
    """Calibrators of single runs with their cross-fitted probabilities, by run and name; several fusers share
    them."""

    @classmethod
    def of(cls, runs: Sequence[Run], qrels: Qrels, judging: Judging, folds: int) -> TrainingUnion:
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
        """Return the mask of the judged queries outside a fold; of all judged queries for fold −1."""
        return np.asarray((self.fold_of_query >= 0) & (self.fold_of_query != fold))

    def without(self, fold: int) -> TrainingUnion:
        """Return a copy in which the queries of one fold count as not judged; the last fold takes
        its number."""
        last = self.folds - 1
        fold_of = np.where(self.fold_of_query == fold, -1, self.fold_of_query)
        fold_of[fold_of == last] = fold
        judged = [query for query, at in zip(self.union.queries, fold_of, strict=True) if at >= 0]
        known = self.known & (fold_of >= 0)[self.union.query_of_row]
        return replace(self, qrels=self.qrels[judged], known=known, fold_of_query=fold_of, calibrated={})

    def measured(self, scores: FloatArray, measure: str) -> FloatArray:
        """Return a measure of every query, with the rows ranked by these scores; NaN where it is not
        judged."""
        from isthmus.evaluation import evaluate

        judged = self.fold_of_query >= 0
        names = [query for query, known in zip(self.union.queries, judged, strict=True) if known]
        evaluation = evaluate(self.qrels[names], self.union.ranked(scores), [measure])
        values = np.full(len(judged), np.nan)
        values[judged] = evaluation.values[evaluation.resolve(measure)]
        return values


@dataclass(frozen=True, eq=False)
class ScoreBreakdown:
    """Contributions to scores (retrievers × rows) and the start of every row; weights and probabilities if
    the method has them."""

    contributions: FloatArray
    start: FloatArray
    weights: FloatArray | None = None
    probabilities: FloatArray | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class Fuser:
    """Fuses runs: `fit(runs, qrels)` learns; `fuse(runs)` returns one run with calibrated probabilities.

    A subclass defines its evidence (k × rows), how weights are learned from it and how rows are scored with
    them. `fuse` needs the same retrievers as `fit`: matched by name if the names are the same, else in the
    same order.
    """

    method: ClassVar[str]

    judging: Judging = field(default_factory=Judging)
    folds: int = 5
    final: str = "platt"
    """How fused scores become probabilities: a calibrator by name, or `small`, the best of a few."""

    def __repr__(self) -> str:
        return settings_repr(self)

    @property
    def label(self) -> str:
        """The name of the fused run."""
        return self.method

    def fit(self, runs: Sequence[Run], qrels: Qrels) -> Self:
        """Learn from runs and the judgements of some or all of their queries."""
        self.fit_fuse(runs, qrels)
        return self

    def fit_fuse(self, runs: Sequence[Run], qrels: Qrels, *, name: str = "") -> Run:
        """Learn, and fuse the same runs; judged queries are fused by models fitted without them."""
        if not runs:
            raise DataError("no runs to fuse", cure="give at least one run")
        training = TrainingUnion.of(runs, qrels, self.judging, self.folds)
        scores, probabilities = self.fit_union(training)
        known = training.known
        homes = training.union.query_of_row[known]
        self.curve_ = ThresholdCurve.of(probabilities[known], training.relevant[known], homes)
        return training.union.ranked(scores, name=name or self.label, probabilities=probabilities)

    def fit_union(self, training: TrainingUnion) -> tuple[FloatArray, FloatArray]:
        """Learn; return scores and probabilities of every row, for judged queries by models fitted without
        them."""
        scores = self.fit_scores(training)
        return scores, self._learn_probabilities(scores, training)

    def fit_scores(self, training: TrainingUnion) -> FloatArray:
        """Learn to score; return the score of every row, in each fold with weights learned from the other
        folds."""
        self.retrievers_ = names_of(training.union.runs)
        evidence = self._gather(training)
        self.weights_, *by_fold = self._weigh_folds(evidence, training)
        scores = self._scores(evidence, self.weights_, training.union).copy()
        for fold, weights in enumerate(by_fold):
            mine = (training.fold_of_query == fold)[training.union.query_of_row]
            scores[mine] = self._scores(evidence, weights, training.union)[mine]
        return scores

    def fuse(self, runs: Sequence[Run], *, name: str = "") -> Run:
        """Fuse runs into one, best first, with a probability for every candidate if the method can
        give one."""
        union = Union.of(self._matched(runs))
        scores = self._scores(self._evidence(union), self.weights_, union)
        return union.ranked(scores, name=name or self.label, probabilities=self._probabilities(scores, union))

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """Prepare to fuse these runs without judgements. Raises ConfigError if the method needs them."""
        raise ConfigError(
            f"{self.label} learns from judgements and none are given (give qrels, or take another method)",
            key="qrels",
        )

    def threshold_for(self, precision: float = 0.9) -> float:
        """Return the lowest probability that had this precision on validation. Raises DataError if none had,
        or if the fuser was fitted without judgements."""
        if not hasattr(self, "curve_"):
            raise DataError(f"the fuser {self.label!r} has seen no judgements", cure="fit it on some")
        return self.curve_.threshold_for(precision)

    def explain(
        self, runs: Sequence[Run], query: str, document: str | None = None, *, depth: int = 10
    ) -> list[Explanation]:
        """Explain the place of one document, or of each of the first `depth`, in a query's fused list."""
        union = Union.of(self._matched(runs))
        if query not in union.queries:
            raise DataError(f"no run has the query {query!r}")
        evidence = self._evidence(union)
        scores = self._scores(evidence, self.weights_, union)
        probabilities = self._probabilities(scores, union)
        at = union.queries.index(query)
        rows = union.best_first(scores)[union.offsets[at] : union.offsets[at + 1]].tolist()
        breakdown = self._breakdown(union, evidence)
        explanations = [
            self._explained(union, breakdown, (row, rank), float(scores[row]), probabilities)
            for rank, row in enumerate(rows, 1)
            if (document is None and rank <= depth) or document == union.documents.word(row)
        ]
        if document is not None and not explanations:
            raise DataError(f"no run returned {document!r} for the query {query!r}")
        return explanations

    def _explained(
        self,
        union: Union,
        breakdown: ScoreBreakdown,
        at: tuple[int, int],
        score: float,
        probabilities: FloatArray | None,
    ) -> Explanation:
        row, rank = at
        parts = []
        for of, (name, run) in enumerate(zip(self.retrievers_, union.runs, strict=True)):
            here = np.flatnonzero(union.places[of] == row)
            raw, place = (float(run.scores[here[0]]), int(run.ranks[here[0]])) if len(here) else (None, None)
            own = None if breakdown.probabilities is None else float(breakdown.probabilities[of, row])
            weight = None if breakdown.weights is None else float(breakdown.weights[of])
            parts.append(
                RetrieverScore(name, raw, place, own, weight, float(breakdown.contributions[of, row]))
            )
        query, document = union.queries[union.query_of_row[row]], union.documents.word(row)
        probability = None if probabilities is None else float(probabilities[row])
        return Explanation(
            query, document, rank, score, probability, float(breakdown.start[row]), tuple(parts)
        )

    def _matched(self, runs: Sequence[Run]) -> list[Run]:
        if not hasattr(self, "retrievers_"):
            raise DataError(f"the fuser {self.label!r} is not fitted", cure="call fit, or load a saved one")
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

    def _learn_probabilities(self, scores: FloatArray, training: TrainingUnion) -> FloatArray:
        """Learn the map from score to probability; return cross-fitted probabilities of all rows."""
        query_of_row = training.union.query_of_row
        if self.final != "platt":
            order = training.union.best_first(scores)
            run, folds = training.union.ranked(scores), training.folds
            self.final_, ranked = cross_fit(
                run, training.qrels, self.final, judging=self.judging, folds=folds
            )
            probabilities = np.empty(len(scores))
            probabilities[order] = ranked
            return probabilities
        self.final_ = Platt().fit(scores[training.known], training.relevant[training.known])
        probabilities = np.asarray(self.final_.probabilities(scores))
        for fold in range(training.folds):
            mine = (training.fold_of_query == fold)[query_of_row]
            rest = training.outside(fold)[query_of_row] & training.known
            if mine.any() and 0 < training.relevant[rest].sum() < rest.sum():
                fitted = Platt().fit(scores[rest], training.relevant[rest])
                probabilities[mine] = fitted.probabilities(scores[mine])
        return probabilities

    def _probabilities(self, scores: FloatArray, union: Union) -> FloatArray | None:
        """Return probabilities of fused scores; None if nothing was learned."""
        if not hasattr(self, "final_"):
            return None
        groups = {"groups": union.query_of_row} if self.final_.needs_lists else {}
        return np.asarray(self.final_.probabilities(scores, **groups)) if len(scores) else scores

    def _gather(self, training: TrainingUnion) -> FloatArray:
        """Learn what each retriever's evidence needs; return the evidence, cross-fitted."""
        return self._evidence(training.union)

    def _evidence(self, union: Union) -> FloatArray:
        """Return the evidence (k × rows) from which scores are computed."""
        raise NotImplementedError

    def _weigh_folds(self, evidence: FloatArray, training: TrainingUnion) -> list[FloatArray]:
        """Return weights learned from all judged queries, then for each fold those learned from the other
        folds."""
        return [self._weigh(evidence, training, training.outside(fold)) for fold in range(-1, training.folds)]

    def _weigh(self, evidence: FloatArray, training: TrainingUnion, queries: Mask) -> FloatArray:
        """Return weights learned from these queries; empty if a formula needs none."""
        return np.empty(0)

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        """The fused score of every row."""
        raise NotImplementedError

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        """Return the contribution of each retriever to every row."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Any]:
        """Return the constructor's arguments in a form that JSON can hold."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "judging": asdict(self.judging)}


def names_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the runs' names; if two are equal or one is empty, each is prefixed with its number."""
    names = [run.name for run in runs]
    plain = all(names) and len(set(names)) == len(names)
    return tuple(name if plain else f"{at} {name}".strip() for at, name in enumerate(names, 1))
