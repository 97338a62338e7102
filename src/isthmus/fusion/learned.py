"""Fusers with judgements behind them: a formula whose score is calibrated, log-odds, stacked, tuned weights.

Probabilities are not added up, log-odds are: independent evidence adds in log-odds, and where retrievers
are correlated, stacking learns how much of each one's evidence is new.

Fitting is cross-fitted over queries throughout. A judged query's evidence comes from calibrators that did not
see it, and weights are applied to queries they were not fitted on; so the run that `fit_fuse` returns can be
evaluated on the same judgements, and its probabilities and thresholds are honest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.special import expit, logit

from isthmus.arrays import FloatArray, IntArray
from isthmus.calibration import (
    Calibrator,
    Choice,
    Judging,
    Platt,
    ThresholdCurve,
    choice_probabilities,
    cross_fit,
    fit_choice,
    probabilities_of,
    query_folds,
)
from isthmus.config import settings_repr
from isthmus.errors import ConfigError, DataError
from isthmus.fusion.fusers import FUSERS, Candidates, choose, default_norm
from isthmus.fusion.union import Union
from isthmus.logistic import likelihood_sums, newton
from isthmus.report import Tabular, preview, progress
from isthmus.tables import Qrels, Run

Mask = NDArray[np.bool_]

SURE = 1e-6
"""Evidence stays between these odds: no retriever alone may be certain."""

PENALTY = 1.0


@dataclass(frozen=True)
class RetrieverScore:
    """One retriever's part in the score of a document; no score and rank if it did not return it."""

    retriever: str
    score: float | None
    rank: int | None
    probability: float | None
    weight: float | None
    contribution: float


@dataclass(frozen=True)
class Explanation(Tabular):
    """How a fused score came about: `score` = `start` + the contributions, where the fuser adds."""

    query: str
    document: str
    rank: int
    score: float
    probability: float | None
    start: float
    parts: Sequence[RetrieverScore]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def to_arrow(self) -> pa.Table:
        """One row a retriever: score, rank, probability, weight and contribution."""
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
    """Rows of judged queries; with `Judging(unjudged="skip")` only judged rows."""
    fold_of_query: IntArray
    """−1 for a query without judgements."""

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
        """The judged queries of the other folds; of all folds for fold −1."""
        return np.asarray((self.fold_of_query >= 0) & (self.fold_of_query != fold))


@dataclass(eq=False, repr=False, kw_only=True)
class Fuser:
    """`fit(runs, qrels)` learns; `fuse(runs)` gives one run with calibrated probabilities.

    A subclass says what evidence it reads (k × rows), how it learns weights from it and how it scores with
    them. The same retrievers must come to `fuse` as came to `fit`: matched by name if the names are the same,
    else in the same order.
    """

    method: ClassVar[str]

    judging: Judging = field(default_factory=Judging)
    folds: int = 5

    def __repr__(self) -> str:
        return settings_repr(self)

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
        training = TrainingUnion.of(runs, qrels, self.judging, self.folds)
        evidence = self._gather(training)
        self.weights_, *by_fold = self._weigh_folds(evidence, training)
        scores = self._scores(evidence, self.weights_, training.union).copy()
        for fold, weights in enumerate(by_fold):
            mine = (training.fold_of_query == fold)[training.union.query_of_row]
            scores[mine] = self._scores(evidence, weights, training.union)[mine]
        probabilities = self._learn_probabilities(scores, training)
        known = training.known
        self.curve_ = ThresholdCurve.of(probabilities[known], training.relevant[known])
        return training.union.ranked(scores, name=name or self.label, probabilities=probabilities)

    def fuse(self, runs: Sequence[Run], *, name: str = "") -> Run:
        """One run, best first, with a probability for every candidate."""
        union = Union.of(self._matched(runs))
        scores = self._scores(self._evidence(union), self.weights_, union)
        return union.ranked(scores, name=name or self.label, probabilities=self._probabilities(scores, union))

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

    def _learn_probabilities(self, scores: FloatArray, training: TrainingUnion) -> FloatArray:
        """Learn score → probability; returns cross-fitted probabilities of all rows."""
        query_of_row = training.union.query_of_row
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
        """Probabilities of fused scores; None where nothing was learned."""
        if not hasattr(self, "final_"):
            return None
        return np.asarray(self.final_.probabilities(scores)) if len(scores) else scores

    def _gather(self, training: TrainingUnion) -> FloatArray:
        """Learn what each retriever's evidence needs; the evidence, cross-fitted."""
        return self._evidence(training.union)

    def _evidence(self, union: Union) -> FloatArray:
        """k × rows of what the scores are made from."""
        raise NotImplementedError

    def _weigh_folds(self, evidence: FloatArray, training: TrainingUnion) -> list[FloatArray]:
        """Weights learned from all judged queries, then those for each fold, learned from the others."""
        return [self._weigh(evidence, training, training.outside(fold)) for fold in range(-1, training.folds)]

    def _weigh(self, evidence: FloatArray, training: TrainingUnion, queries: Mask) -> FloatArray:
        """Weights learned from these queries; none where a formula needs none."""
        return np.empty(0)

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        """The fused score of every row."""
        raise NotImplementedError

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        """What each retriever contributed to every row."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments, as JSON can hold them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "judging": asdict(self.judging)}


@dataclass(frozen=True, eq=False)
class ScoreBreakdown:
    """Retrievers × rows of contributions, the rows' start, and what else an explanation shows."""

    contributions: FloatArray
    start: FloatArray
    weights: FloatArray | None = None
    probabilities: FloatArray | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class Formula(Fuser):
    """Any fuser of `FUSERS` with its score calibrated on judgements.

    A retriever's contribution is by how much the score would fall without it.
    """

    method = "formula"
    formula: str = field(default="rrf", kw_only=False)
    norm: str | None = None
    missing: float | str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.formula = choose((), self.formula, None)

    @property
    def label(self) -> str:
        """The formula's name."""
        return self.formula

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """A formula needs no judgements; without them it gives no probabilities."""
        self.retrievers_, self.weights_ = names_of(runs), np.empty(0)
        return self

    def _evidence(self, union: Union) -> FloatArray:
        norm = self.norm or default_norm(self.formula)
        candidates = Candidates.of(union, norm, missing=self.missing)
        return np.asarray([FUSERS[self.formula](candidates, **self.options)])

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        return np.asarray(evidence[0])

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        contributions = np.tile(evidence[0], (len(union.runs), 1))
        for at in range(len(union.runs)):
            others = [run for other, run in enumerate(union.runs) if other != at]
            if others:
                fewer = Union.of(others)
                place = union.rows_of(fewer)
                contributions[at, place] -= self._evidence(fewer)[0]
        return ScoreBreakdown(contributions, evidence[0] - contributions.sum(axis=0))


@dataclass(eq=False, repr=False, kw_only=True)
class LogOdds(Fuser):
    """logit p = Σᵢ logit cᵢ − (m − 1)·logit π: Bayes' rule for independent retrievers.

    cᵢ is retriever i's calibrated probability, or, for a document it did not return, what `missing` says:
    "learned" is P(relevant | a candidate, absent from list i) on validation, "lowest" the lowest probability
    of the list, a number that probability. π is the share of candidates that are relevant. `calibrator` is
    fitted per retriever, or "given": the runs' own probabilities. `silos` names each run's silo where silos
    hold different documents; absence from another silo's list is then no evidence.
    """

    method = "log-odds"

    calibrator: str | Calibrator = "auto"
    missing: float | str = "learned"
    silos: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.missing, str) and self.missing not in ("learned", "lowest"):
            problem = f"missing = {self.missing!r}: say 'learned', 'lowest' or a probability"
            raise ConfigError(problem, key="missing")

    def _gather(self, training: TrainingUnion) -> FloatArray:
        union, known = training.union, training.known
        self.prior_ = float(training.relevant[known].mean())
        absent = self._absent(union)
        hits = ((absent & known) * training.relevant).sum(axis=1)
        self.absent_ = (hits + self.prior_) / ((absent & known).sum(axis=1) + 1.0)
        self.calibrators_: list[Calibrator] = []
        if self.calibrator == "given":
            return self._evidence(union)
        columns = []
        for run in progress(union.runs, label="calibrating"):
            folds = min(self.folds, sum(query in training.qrels for query in run.queries))
            fitted, probabilities = cross_fit(
                run, training.qrels, self.calibrator, judging=self.judging, folds=folds
            )
            self.calibrators_.append(fitted)
            columns.append(probabilities)
        return self._logits(union, columns)

    def _evidence(self, union: Union) -> FloatArray:
        if self.calibrator != "given":
            pairs = zip(union.runs, self.calibrators_, strict=True)
            return self._logits(union, [probabilities_of(run, fitted) for run, fitted in pairs])
        return self._logits(union, [run.required_probabilities for run in union.runs])

    def _logits(self, union: Union, probabilities: Sequence[FloatArray]) -> FloatArray:
        """Runs × rows of calibrated log-odds, absent documents filled in."""
        matrix = union.spread(probabilities)
        absent = self._absent(union)
        floor = (
            Candidates(union, tuple(probabilities), "lowest").matrix() if self.missing == "lowest" else matrix
        )
        for at, row in enumerate(matrix):
            row[np.isnan(row) & ~absent[at]] = self.prior_  # structurally absent: no evidence
            if self.missing == "lowest":
                row[absent[at]] = floor[at, absent[at]]
            else:
                row[absent[at]] = self.absent_[at] if self.missing == "learned" else self.missing
        return np.asarray(logit(np.clip(matrix, SURE, 1 - SURE)))

    def _absent(self, union: Union) -> Mask:
        """Runs × rows: whether the run could have returned the document and did not.

        A run without any list for the query said nothing about it.
        """
        searched = np.zeros((len(union.runs), len(union.queries)), dtype=bool)
        for row, run, home in zip(searched, union.runs, union.homes, strict=True):
            row[home] = np.diff(run.offsets) > 0
        missing: Mask = ~union.present & searched[:, union.query_of_row]
        if self.silos is None:
            return missing
        if len(self.silos) != len(union.runs):
            raise DataError(f"{len(self.silos)} silos named for {len(union.runs)} runs")
        for silo in set(self.silos):
            mine = np.array([name == silo for name in self.silos])
            missing[mine] &= ~missing[mine].all(axis=0)
        return missing

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """From runs that carry probabilities: π is their mean, absence the lowest probability of the list."""
        if self.method != LogOdds.method:
            return super().unjudged(runs)
        self.calibrator, self.calibrators_ = "given", []
        self.missing = "lowest" if self.missing == "learned" else self.missing
        self.retrievers_, self.weights_, self.absent_ = names_of(runs), np.empty(0), np.empty(0)
        candidates = Candidates.of(runs, "none", probabilities=True, missing="lowest")
        self.prior_ = float(np.clip(candidates.matrix().mean(), SURE, 0.5))
        return self

    def _probabilities(self, scores: FloatArray, union: Union) -> FloatArray | None:
        learned = super()._probabilities(scores, union)
        return np.asarray(expit(scores)) if learned is None else learned

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        prior = float(logit(self.prior_))
        return np.asarray(np.sort(evidence, axis=0).sum(axis=0) - (len(evidence) - 1) * prior)

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        prior = float(logit(self.prior_))
        ones, start = np.ones(len(evidence)), np.full(union.rows, prior)
        return ScoreBreakdown(evidence - prior, start, ones, expit(evidence))

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments; a calibrator given as an object is named by its class."""
        named = self.calibrator if isinstance(self.calibrator, str) else type(self.calibrator).__name__
        return {**super().parameters(), "calibrator": named}


@dataclass(eq=False, repr=False, kw_only=True)
class Stacked(LogOdds):
    """Logistic regression on the calibrated log-odds and one absence indicator per retriever, cross-fitted.

    With `single_label` a softmax across each query's candidates takes the sigmoid's place (one weight per
    retriever, a bias per label), for tasks where one answer is right.
    """

    method = "stacked"

    single_label: bool = False

    def _gather(self, training: TrainingUnion) -> FloatArray:
        used = np.unique(training.union.documents.codes[training.known])
        words = training.union.documents.words
        self.labels_ = np.array([words[code] for code in used] if self.single_label else [], dtype=np.str_)
        return super()._gather(training)

    def _logits(self, union: Union, probabilities: Sequence[FloatArray]) -> FloatArray:
        return np.vstack((super()._logits(union, probabilities), self._absent(union).astype(np.float64)))

    def _weigh(self, evidence: FloatArray, training: TrainingUnion, queries: Mask) -> FloatArray:
        rows = queries[training.union.query_of_row] & training.known
        relevant = training.relevant[rows].astype(np.float64)
        if self.single_label:
            lists = np.unique(training.union.query_of_row[rows], return_inverse=True)[1]
            items = self._items(training.union)[rows]
            choice = fit_choice(evidence[:, rows], relevant, lists, items=items)
            biases = np.zeros(len(self.labels_))
            biases[: len(choice.biases)] = choice.biases
            return np.concatenate((choice.weights, [choice.intercept], biases))
        design = np.vstack((evidence[:, rows], np.ones(int(rows.sum()))))
        penalty = np.append(np.full(len(evidence), PENALTY), 0.0)
        start = np.append(np.zeros(len(evidence)), logit(np.clip(relevant.mean(), SURE, 1 - SURE)))
        return newton(lambda theta: likelihood_sums(design, relevant, theta), start, penalty)

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        size = len(evidence)
        choice = Choice(weights[:size], float(weights[size]), weights[size + 1 :])
        return choice.margins(evidence, self._items(union) if self.single_label else None)

    def _items(self, union: Union) -> IntArray:
        """The label of every row as fitted, −1 for one that was not seen."""
        place = {word: at for at, word in enumerate(self.labels_.tolist())}
        codes = np.array([place.get(word, -1) for word in union.documents.words], dtype=np.int64)
        return codes[union.documents.codes]

    def _learn_probabilities(self, scores: FloatArray, training: TrainingUnion) -> FloatArray:
        return self._probabilities(scores, training.union)  # the margins are log-odds already

    def _probabilities(self, scores: FloatArray, union: Union) -> FloatArray:
        if self.single_label:
            return choice_probabilities(scores, union.query_of_row)
        return np.asarray(expit(scores))

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        count = len(self.retrievers_)
        weights = self.weights_[:count]
        contributions = (self.weights_[: 2 * count, None] * evidence).reshape(2, count, -1).sum(axis=0)
        start = self._scores(evidence, self.weights_, union) - contributions.sum(axis=0)
        return ScoreBreakdown(contributions, start, weights, expit(evidence[:count]))


@dataclass(eq=False, repr=False, kw_only=True)
class Weighted(Fuser):
    """Σᵢ wᵢ·sᵢ over normalised scores, the weights given or tuned for a measure on validation.

    `convex` weights are non-negative and add up to one. Absent documents get the lowest score of the list, or
    the number `missing`.
    """

    method = "weighted"

    norm: str = "z-score"
    weights: Sequence[float] | None = None
    measure: str = "nDCG@10"
    missing: float | str = "lowest"

    def __post_init__(self) -> None:
        self.weights = None if self.weights is None else tuple(map(float, self.weights))
        self.missing = "lowest" if self.missing == "learned" else self.missing

    def _evidence(self, union: Union) -> FloatArray:
        return Candidates.of(union, self.norm, missing=self.missing).matrix()

    def _weigh_folds(self, evidence: FloatArray, training: TrainingUnion) -> list[FloatArray]:
        if self.weights is not None:
            self._check_weights(len(evidence))
            return [np.array(self.weights)] * (training.folds + 1)
        judge = self._judge(evidence, training)
        order = np.argsort(np.array(self.retrievers_, dtype=np.str_))  # so that theirs does not matter
        place = np.argsort(order)

        def best(inside: Mask) -> FloatArray:
            def value(weights: tuple[float, ...]) -> float:
                return float(np.nanmean(judge(tuple(weights[at] for at in place.tolist()))[inside]))

            return tuned(len(evidence), value)[place]

        return [best(training.outside(fold)) for fold in range(-1, training.folds)]

    def _judge(
        self, evidence: FloatArray, training: TrainingUnion
    ) -> Callable[[tuple[float, ...]], FloatArray]:
        """The measure of every query under any weights, each measured once."""
        from isthmus.evaluation import evaluate

        union = training.union
        judged = [
            query for query, fold in zip(union.queries, training.fold_of_query, strict=True) if fold >= 0
        ]
        qrels = training.qrels[judged]

        @cache
        def judge(weights: tuple[float, ...]) -> FloatArray:
            evaluation = evaluate(qrels, union.ranked(np.array(weights) @ evidence), [self.measure])
            values = np.full(len(union.queries), np.nan)
            values[training.fold_of_query >= 0] = evaluation.values[evaluation.resolve(self.measure)]
            return values

        return judge

    def unjudged(self, runs: Sequence[Run]) -> Self:
        """With weights that were given, and so without probabilities."""
        if self.weights is None:
            return super().unjudged(runs)
        self._check_weights(len(runs))
        self.retrievers_, self.weights_ = names_of(runs), np.array(self.weights)
        return self

    def _check_weights(self, count: int) -> None:
        if self.weights is not None and len(self.weights) != count:
            raise DataError(f"{len(self.weights)} weights for {count} runs", cure="give one weight per run")

    def _scores(self, evidence: FloatArray, weights: FloatArray, union: Union) -> FloatArray:
        return np.asarray(np.sort(weights[:, None] * evidence, axis=0).sum(axis=0))

    def _breakdown(self, union: Union, evidence: FloatArray) -> ScoreBreakdown:
        return ScoreBreakdown(self.weights_[:, None] * evidence, np.zeros(union.rows), self.weights_)


def tuned(count: int, judge: Callable[[tuple[float, ...]], float]) -> FloatArray:
    """Convex weights with the best judgement: a grid for two runs, rounds of one weight at a time for more.

    Ties go to the more even weights, so that noise does not silence a retriever.
    """

    def value(weights: tuple[float, ...]) -> tuple[float, float]:
        return round(judge(weights), 10), -float(np.square(weights).sum())

    if count == 2:
        return np.array(max(((1 - step / 20, step / 20) for step in range(21)), key=value))
    best = tuple([1.0 / count] * count)
    highest = value(best)
    for _ in range(3):
        before = best
        for at in range(count):
            for factor in (0.0, 0.25, 0.5, 2.0, 4.0):
                raised = [*best[:at], best[at] * factor if best[at] else factor / count, *best[at + 1 :]]
                whole = sum(raised)
                tried = tuple(weight / whole for weight in raised) if whole > 0 else best
                if (now := value(tried)) > highest:
                    best, highest = tried, now
        if best == before:
            break
    return np.array(best)


def names_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """The runs' names; where two are the same or one is empty, numbers tell them apart."""
    names = [run.name for run in runs]
    plain = all(names) and len(set(names)) == len(names)
    return tuple(name if plain else f"{at} {name}".strip() for at, name in enumerate(names, 1))
