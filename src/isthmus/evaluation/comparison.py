"""`compare`: several runs side by side, with intervals and corrected paired tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.errors import ConfigError
from isthmus.evaluation import statistics
from isthmus.evaluation.measures import Measure, as_measures
from isthmus.evaluation.propensity import Propensity
from isthmus.evaluation.results import Evaluation, evaluate
from isthmus.report import Cell, Estimate, Table, Tabular
from isthmus.tables import Qrels, Run

_LETTERS = "abcdefghijklmnoprstuvwxyz"


@dataclass(frozen=True)
class Testing:
    """How runs are compared: the test, α, samples and seed, and the group of every query where queries are
    not independent."""

    test: str = "randomisation"
    alpha: float = 0.05
    samples: int = 10_000
    seed: int = 0
    groups: statistics.Groups = None

    def __post_init__(self) -> None:
        if self.test not in ("randomisation", "t"):
            raise ConfigError(f"unknown test {self.test!r}", key=self.test, known=("randomisation", "t"))


DEFAULT_TESTING = Testing()


@dataclass(frozen=True, slots=True)
class PairedVerdict:
    """Test of one pair of runs under one measure; `adjusted` is the p-value after Holm's correction."""

    measure: Measure
    first: str
    second: str
    paired: statistics.Paired
    adjusted: float


LARGE_LOSS = 0.2
"""A query with more than this below the baseline counts as a large loss, which users are taken to notice."""


@dataclass(frozen=True, slots=True)
class QueryRisk:
    """Risk of a run under one measure, from its losses on single queries; formulas:
    `evaluation.statistics`.

    For a geometric mean such as GMAP, the values of queries are compared, not their logarithms.
    """

    measure: Measure
    run: str
    urisk: statistics.Interval
    trisk: float
    zrisk: float
    georisk: float
    wins: int
    losses: int
    large_losses: int
    """Number of queries that lose more than `LARGE_LOSS`."""
    queries: int
    """Number of queries that count; `urisk.n` counts groups of them if there are groups."""

    def row(self) -> dict[str, Any]:
        """Return the machine-readable form; `low` and `high` bound `urisk`."""
        numbers = {name: getattr(self, name) for name in ("trisk", "zrisk", "georisk")}
        counts = {name: getattr(self, name) for name in ("wins", "losses", "large_losses", "queries")}
        bounds = {"urisk": self.urisk.value, "low": self.urisk.low, "high": self.urisk.high}
        named = {"run": self.run, "measure": str(self.measure)}
        return {**named, **bounds, **numbers, **counts}


@dataclass(frozen=True, eq=False)
class Comparison(Tabular):
    """Several evaluations on the same judgements; prints as a terminal table."""

    evaluations: tuple[Evaluation, ...]
    baseline: str | None = None
    testing: Testing = DEFAULT_TESTING
    _intervals: dict[tuple[str, Measure], statistics.Interval | None] = field(
        default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        names = [evaluation.run for evaluation in self.evaluations]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(
                f"two runs are named {min(twice)!r}; give every run a name of its own", key="runs"
            )
        if self.baseline is not None and self.baseline not in names:
            raise ConfigError(f"no run is named {self.baseline!r}", key=self.baseline, known=names)
        first = self.evaluations[0] if self.evaluations else None
        if any(e.queries != first.queries or e.measures != first.measures for e in self.evaluations if first):
            raise ConfigError("the evaluations differ in their queries or measures", key="evaluations")

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures that are compared, in order."""
        return self.evaluations[0].measures if self.evaluations else ()

    @cached_property
    def verdicts(self) -> tuple[PairedVerdict, ...]:
        """The tests of all pairs of runs, or of each run against the baseline if one is named.

        Holm's correction is over the pairs of one measure. Sums such as NumRet are not tested.
        """
        verdicts: list[PairedVerdict] = []
        for measure in self.measures:
            if measure.family.aggregate == "sum":
                continue
            tests = [
                PairedVerdict(measure, one.run, other.run, self._test(measure, one, other), 1.0)
                for one, other in self._pairs()
            ]
            adjusted = statistics.holm([verdict.paired.p for verdict in tests])
            verdicts += [replace(v, adjusted=float(p)) for v, p in zip(tests, adjusted, strict=True)]
        return tuple(verdicts)

    def interval(self, run: str, measure: Measure) -> statistics.Interval | None:
        """Return the bootstrap interval over queries; None for sums, and if no query counts."""
        if (run, measure) not in self._intervals:
            (evaluation,) = (e for e in self.evaluations if e.run == run)
            self._intervals[run, measure] = self._interval(evaluation, measure)
        return self._intervals[run, measure]

    def table(
        self, *, title: str = "", intervals: bool = True, digits: int = 4, remarks: bool = True
    ) -> Table:
        """Return a table with one row per run and one column per measure.

        A letter beside a value marks a run that is significantly better than the run of that letter. With
        `remarks`, notes on missing queries, ties and the like are added below the table.
        """
        letters = {e.run: _letter(at) for at, e in enumerate(self.evaluations)}
        marks = self._marks(letters)
        several = len(self.evaluations) > 1
        rows: list[tuple[Cell, ...]] = []
        for evaluation in self.evaluations:
            cells = [self._cell(evaluation, m, marks, intervals=intervals) for m in self.measures]
            rows.append(((letters[evaluation.run],) if several else ()) + (evaluation.run, *cells))
        header = ((" ",) if several else ()) + ("run", *map(str, self.measures))
        noted = [remark for one in self.evaluations for remark in one.remarks()] if remarks else []
        return Table(header, tuple(rows), title, (*self._notes(intervals), *noted), digits)

    def risks(self, *, alpha: float = 1.0) -> tuple[QueryRisk, ...]:
        """Return the risk of every run under every measure, on the queries that count for all runs.

        URisk, TRisk and the counts compare with the baseline or, if none is named, with the mean of the
        other runs on each query. Sums such as NumRet have no risk. Raises ConfigError for a single run.
        """
        if len(self.evaluations) < 2:
            raise ConfigError("risk is against another run, and there is one", expected="two runs or more")
        return tuple(
            one
            for measure in self.measures
            if measure.family.aggregate != "sum"
            for one in self._risks(measure, alpha)
        )

    def _risks(self, measure: Measure, alpha: float) -> Iterator[QueryRisk]:
        names = [evaluation.run for evaluation in self.evaluations]
        values, groups = _comparable(self.evaluations, measure, self.testing.groups)
        if measure.family.aggregate == "geometric":
            values = np.exp(values)
        tables = statistics.zrisk(values, alpha=alpha), statistics.georisk(values, alpha=alpha)
        for at, name in enumerate(names):
            others = np.delete(values, at, axis=0).mean(axis=0)
            base = others if self.baseline is None else values[names.index(self.baseline)]
            if name == self.baseline:
                continue
            gains = values[at] - base
            rewards = statistics.risk_rewards(values[at], base, alpha=alpha)
            how = self.testing
            yield QueryRisk(
                measure,
                name,
                urisk=statistics.bootstrap(rewards, groups=groups, level=1 - how.alpha, seed=how.seed),
                trisk=statistics.trisk(values[at], base, alpha=alpha),
                zrisk=float(tables[0][at]),
                georisk=float(tables[1][at]),
                wins=int((gains > 0).sum()),
                losses=int((gains < 0).sum()),
                large_losses=int((gains < -LARGE_LOSS).sum()),
                queries=len(gains),
            )

    def differences(self) -> list[dict[str, Any]]:
        """Return the difference of every run to the baseline by measure, on the queries that count for all
        runs.

        A row has `difference` with its bootstrap interval `low` and `high`, `p` of the paired test after
        Holm's correction, and `wins`, `losses` and `large_losses`: the number of queries above the baseline,
        below it, and below it by more than `LARGE_LOSS`. For a geometric mean such as GMAP, `difference` is
        that of the two geometric means. Raises ConfigError without a baseline.
        """
        if self.baseline is None:
            raise ConfigError("differences are to a baseline, and none is named", expected="a baseline")
        evaluations = {one.run: one for one in self.evaluations}
        tests = {(test.first, test.measure): test.adjusted for test in self.verdicts}
        rows: list[dict[str, Any]] = []
        for risk in self.risks(alpha=0.0):
            row, difference = risk.row(), self._difference(risk)
            rows.append(
                {
                    "run": risk.run,
                    "measure": str(risk.measure),
                    "baseline": evaluations[self.baseline][risk.measure],
                    "value": evaluations[risk.run][risk.measure],
                    "difference": difference.value,
                    **{name: getattr(difference, name) for name in ("low", "high")},
                    "p": tests[risk.run, risk.measure],
                    **{name: row[name] for name in ("wins", "losses", "large_losses", "queries")},
                }
            )
        return rows

    def _difference(self, risk: QueryRisk) -> statistics.Interval:
        """Return the difference of a run's mean to the baseline's, from the run's risk at α = 0."""
        if risk.measure.family.aggregate != "geometric":
            return risk.urisk
        logarithms, groups = _comparable(self.evaluations, risk.measure, self.testing.groups)
        rows = {one.run: row for one, row in zip(self.evaluations, logarithms, strict=True)}
        how, baseline = self.testing, rows[str(self.baseline)]
        return statistics.geometric_difference(
            rows[risk.run], baseline, groups=groups, level=1 - how.alpha, seed=how.seed
        )

    def difference_table(self, *, title: str = "", digits: int = 4) -> Table:
        """Return `differences` as a table: both means, the difference with its interval, p, and queries won
        and lost."""
        header = ("run", "measure", "baseline", "value", "difference", "p", "won", "lost")
        differences = self.differences()
        rows: list[tuple[Cell, ...]] = [
            (
                *(row[name] for name in header[:4]),
                Estimate(row["difference"], row["low"], row["high"]),
                *(row[name] for name in ("p", "wins", "losses", "large_losses")),
            )
            for row in differences
        ]
        counted = "/".join(f"{n:,}" for n in sorted({row["queries"] for row in differences}))
        notes = (
            f"Differences to {self.baseline!r}, on {counted} queries that count for all runs; in brackets:"
            f" {1 - self.testing.alpha:.0%} bootstrap interval over {self._units}.",
            f"p: {self._test_in_words}.",
            *self._conventions(),
        )
        return Table((*header, f"lost > {LARGE_LOSS:g}"), tuple(rows), title, notes, digits)

    def risk_table(self, *, alpha: float = 1.0, title: str = "", digits: int = 4) -> Table:
        """Return `risks` as a table: URisk with its interval, TRisk, ZRisk, GeoRisk, and queries won and
        lost."""
        columns = ("run", "measure", "URisk", "TRisk", "ZRisk", "GeoRisk", "won", "lost")
        numbers = ("trisk", "zrisk", "georisk", "wins", "losses", "large_losses")
        risks = self.risks(alpha=alpha)
        rows: list[tuple[Cell, ...]] = [
            (
                one.run,
                str(one.measure),
                Estimate(one.urisk.value, one.urisk.low, one.urisk.high),
                *(getattr(one, name) for name in numbers),
            )
            for one in risks
        ]
        against = "the mean of the other runs" if self.baseline is None else f"{self.baseline!r}"
        counted = "/".join(f"{n:,}" for n in sorted({one.queries for one in risks}))
        notes = (
            f"Against {against}, on {counted} queries that count for all runs; a loss counts {1 + alpha:g}"
            f" times (α = {alpha:g}).",
            f"In brackets: {1 - self.testing.alpha:.0%} bootstrap interval over {self._units}.",
            "URisk below 0: losses outweigh gains; TRisk below −2: significantly.",
            "ZRisk and GeoRisk are among all runs of the table; a larger one is safer.",
        )
        return Table((*columns, f"lost > {LARGE_LOSS:g}"), tuple(rows), title, notes, digits)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of every `Evaluation`, with `"low"`, `"high"` and `"better_than"` added."""
        marks = self._marks({e.run: e.run for e in self.evaluations})
        return [
            {
                **row,
                "low": None if interval is None else interval.low,
                "high": None if interval is None else interval.high,
                "better_than": marks.get((evaluation.run, measure), []),
            }
            for evaluation in self.evaluations
            for measure, row in zip(self.measures, evaluation.rows(), strict=True)
            for interval in [self.interval(evaluation.run, measure)]
        ]

    def to_arrow(self) -> Any:
        """Return `rows` as a pyarrow.Table."""
        import pyarrow as pa

        return pa.Table.from_pylist(self.rows())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __str__(self) -> str:
        return self.table().text()

    def _pairs(self) -> Iterator[tuple[Evaluation, Evaluation]]:
        if self.baseline is None:
            return combinations(self.evaluations, 2)
        (base,) = (e for e in self.evaluations if e.run == self.baseline)
        return ((e, base) for e in self.evaluations if e is not base)

    def _test(self, measure: Measure, one: Evaluation, other: Evaluation) -> statistics.Paired:
        how = self.testing
        (first, second), groups = _comparable((one, other), measure, how.groups)
        if how.test == "t":
            return statistics.paired_t(first, second, groups=groups)
        return statistics.randomisation(first, second, groups=groups, samples=how.samples, seed=how.seed)

    def _interval(self, evaluation: Evaluation, measure: Measure) -> statistics.Interval | None:
        if measure.family.aggregate == "sum" or not evaluation.counted(measure):
            return None
        values, weights = evaluation.values[measure], evaluation.weights.get(measure)
        how = self.testing
        interval = statistics.bootstrap(
            values, weights=weights, groups=how.groups, level=1 - how.alpha, seed=how.seed
        )
        if measure.family.aggregate != "geometric":
            return interval
        value, low, high = (float(np.exp(bound)) for bound in (interval.value, interval.low, interval.high))
        return statistics.Interval(value, low, high, interval.n, interval.how)

    def _marks(self, names: Mapping[str, str]) -> dict[tuple[str, Measure], list[str]]:
        """By run and measure, the names of the runs that it is significantly better than, sorted."""
        beaten: dict[tuple[str, Measure], list[str]] = {}
        for verdict in self.verdicts:
            if verdict.adjusted < self.testing.alpha:
                up = verdict.paired.difference > 0
                better, worse = (verdict.first, verdict.second) if up else (verdict.second, verdict.first)
                beaten.setdefault((better, verdict.measure), []).append(names[worse])
        return {key: sorted(worse) for key, worse in beaten.items()}

    def _cell(
        self,
        evaluation: Evaluation,
        measure: Measure,
        marks: Mapping[tuple[str, Measure], list[str]],
        *,
        intervals: bool,
    ) -> Cell:
        value = evaluation[measure]
        if measure.family.aggregate == "sum":
            return int(value)
        best = len(self.evaluations) > 1 and value == max(e[measure] for e in self.evaluations)
        interval = self.interval(evaluation.run, measure) if intervals else None
        low, high = (None, None) if interval is None else (interval.low, interval.high)
        return Estimate(value, low, high, "".join(marks.get((evaluation.run, measure), [])), best)

    def _notes(self, intervals: bool) -> Iterator[str]:
        how = self.testing
        if len(self.evaluations) > 1:
            yield (
                f"A letter: significantly better than the run of that letter ({self._test_in_words},"
                f" α = {how.alpha:g})."
            )
        if intervals:
            yield f"In brackets: {1 - how.alpha:.0%} bootstrap interval over {self._units}."
        yield from self._conventions()

    @property
    def _units(self) -> str:
        return "queries" if self.testing.groups is None else "groups of queries"

    @property
    def _test_in_words(self) -> str:
        how = self.testing
        against = "every other run" if self.baseline is None else f"{self.baseline!r}"
        test = f"paired {how.test} test, seed {how.seed}" if how.test != "t" else "paired t test"
        return f"{test} over {self._units} against {against}, Holm-corrected within a measure"

    def _conventions(self) -> Iterator[str]:
        """Describe every measure with its conventions and the number of queries that count."""
        for measure in self.measures:
            counts = sorted({e.counted(measure) for e in self.evaluations})
            counted = "/".join(f"{n:,}" for n in counts)
            yield f"{measure}: {measure.conventions()}; {counted} {'query' if counts == [1] else 'queries'}."


def compare(
    qrels: Qrels,
    runs: Mapping[str, Run] | Sequence[Run],
    measures: Iterable[str | Measure],
    *,
    baseline: str | None = None,
    profile: str | None = None,
    propensity: Propensity | None = None,
    testing: Testing = DEFAULT_TESTING,
) -> Comparison:
    """Evaluate several runs and test their differences.

    >>> qrels = Qrels.from_dict({f"q{i}": {"good": 1} for i in range(12)})
    >>> right = Run.from_dict({f"q{i}": {"good": 2.0, "bad": 1.0} for i in range(12)})
    >>> wrong = Run.from_dict({f"q{i}": {"good": 1.0, "bad": 2.0} for i in range(12)})
    >>> report = compare(qrels, {"right": right, "wrong": wrong}, ["MRR"])
    >>> print(report.table(intervals=False).text().splitlines()[2])
    a  right  1.0000ᵇ

    All runs are measured on the queries of the judgements. The result prints as a terminal table and has
    `.table()` for the other forms. `profile` and `propensity` are those of `evaluate`.
    """
    tables = runs.values() if isinstance(runs, Mapping) else runs
    names = runs if isinstance(runs, Mapping) else [run.name or f"run {at}" for at, run in enumerate(runs, 1)]
    resolved = as_measures(measures)
    evaluations = [
        evaluate(qrels, run.named(name), resolved, profile=profile, propensity=propensity)
        for name, run in zip(names, tables, strict=True)
    ]
    return Comparison(tuple(evaluations), baseline, testing)


def _comparable(
    evaluations: Sequence[Evaluation], measure: Measure, groups: statistics.Groups
) -> tuple[FloatArray, statistics.Groups]:
    """Return the values of the queries that count for all runs (runs × queries), and the groups of
    these queries.

    The plain mean of a row is the measure on these queries: for a ratio of means, values are scaled by their
    weights.
    """
    counts = np.asarray(np.isfinite([one.values[measure] for one in evaluations]).all(axis=0))
    rows = []
    for evaluation in evaluations:
        values, weights = evaluation.values[measure][counts], evaluation.weights.get(measure)
        if weights is not None:
            values = values * weights[counts] * len(values) / weights[counts].sum()
        rows.append(values)
    return np.stack(rows), statistics.masked(groups, counts)


def _letter(at: int) -> str:
    return _LETTERS[at] if at < len(_LETTERS) else str(at + 1)
