"""`evaluate`: measures of a run against judgements, per query and aggregated.

It also writes values of single queries to a file, from which a table of means can be recomputed.

A row is one measure of one query under one method, with the columns of `COLUMNS`. The file is CSV or Parquet
by its suffix; `value` is empty if the query does not count, `fold` and `seed` if there is none.

>>> row = {"experiment": "demo", "data": "x", "fold": 0, "method": "bm25", "query": "q1", "measure": "MRR"}
>>> rows = [{**row, "seed": seed, "value": value} for seed, value in ((0, 0.5), (1, 1.0))]
>>> [(row["method"], row["value"], row["n"]) for row in means_of(rows)]
[('bm25', 0.75, 1)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from isthmus.arrays import FloatArray, frozen
from isthmus.errors import ConfigError, DataError, several
from isthmus.evaluation.formulas import FORMULAS, relevant
from isthmus.evaluation.measures import Measure, as_measures
from isthmus.evaluation.propensity import Propensity, propensity_scored
from isthmus.evaluation.ranking import Ranking
from isthmus.evaluation.statistics import bootstrap
from isthmus.report import Tabular, preview
from isthmus.tables import Qrels, Run, as_grades, replacing


class Means(dict[str, float]):
    """Means by the measure's canonical name; a lookup by any other spelling of the measure works too."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__(
            (str(measure), together(measure, values, evaluation.weights.get(measure)))
            for measure, values in evaluation.values.items()
        )
        self._resolve = evaluation.resolve

    def __missing__(self, name: str) -> float:
        return self[str(self._resolve(name))]


@dataclass(frozen=True, eq=False)
class Evaluation(Tabular):
    """The result of `evaluate`: the values of every measure for every query.

    `values[measure]` has one number per query of the judgements, NaN where the query does not count;
    `weights[measure]` has the weight of every query, for the measures that are ratios of means.
    """

    run: str
    queries: tuple[str, ...]
    measures: tuple[Measure, ...]
    values: Mapping[Measure, FloatArray]
    weights: Mapping[Measure, FloatArray]
    requested: Mapping[Measure, Measure]
    """Every requested measure → the measure computed for it under the profile."""
    gmax: int
    """The largest grade in the judgements."""
    missing: tuple[str, ...]
    """Queries of the judgements that the run lacks."""
    unjudged: tuple[str, ...]
    """Queries of the run without judgements; they never count."""
    tie_rate: float
    """The share of rows whose score another row of the same list has too."""

    @cached_property
    def means(self) -> Means:
        """Every measure aggregated over the queries that count, by name."""
        return Means(self)

    def __getitem__(self, measure: str | Measure) -> float:
        return self.means[str(self.resolve(measure))]

    def counted(self, measure: Measure) -> int:
        """The number of queries that count."""
        return int(np.isfinite(self.values[measure]).sum())

    def per_query(self, measure: str | Measure) -> dict[str, float]:
        """Return the values of one measure by query, for the queries that count."""
        values = self.values[self.resolve(measure)]
        pairs = zip(self.queries, values.tolist(), strict=True)
        return {query: value for query, value in pairs if value == value}

    def resolve(self, measure: str | Measure) -> Measure:
        """Return the measure of this evaluation for any spelling of it. Raises KeyError if it was not
        evaluated."""
        meant = measure if isinstance(measure, Measure) else Measure.parse(measure)
        meant = meant if meant in self.values else self.requested.get(meant, meant)
        if meant not in self.values:
            raise KeyError(str(measure))
        return meant

    def rows(self) -> list[dict[str, Any]]:
        """The machine-readable form: one `{"run", "measure", "value", "queries"}` per measure.

        The value is None where no query counts.
        """
        return [
            {
                "run": self.run,
                "measure": str(measure),
                "value": value if value == value else None,
                "queries": self.counted(measure),
            }
            for measure, value in zip(self.measures, self.means.values(), strict=True)
        ]

    def to_arrow(self) -> Any:
        """Return `rows` as a pyarrow.Table."""
        import pyarrow as pa

        return pa.Table.from_pylist(self.rows())

    def _repr_html_(self) -> str:
        return preview(self.to_arrow(), title=f"Evaluation {self.run!r}")

    def remarks(self) -> list[str]:
        """Return warnings: queries only in the run or only in the judgements, nothing relevant, ties."""
        whose = f"{self.run}: " if self.run else ""
        remarks = []
        least = [int(measure["rel"]) if "rel" in measure else 1 for measure in self.measures]
        if any(grade > self.gmax for grade in least):
            beyond = min(grade for grade in least if grade > self.gmax)
            remarks.append(
                f"{whose}no judgement has a grade of {beyond} or more, so nothing is relevant; "
                f"the highest is {self.gmax}."
            )
        if self.missing:
            judged = several(len(self.queries), "judged query", "judged queries")
            verb = "is" if len(self.missing) == 1 else "are"
            remarks.append(f"{whose}{len(self.missing):,} of {judged} {verb} not in the run.")
        if self.unjudged:
            verbs = ("has", "does") if len(self.unjudged) == 1 else ("have", "do")
            queries = several(len(self.unjudged), "query", "queries")
            remarks.append(f"{whose}{queries} {verbs[0]} no judgements and {verbs[1]} not count.")
        if self.tie_rate > 0:
            remarks.append(f"{whose}{self.tie_rate:.1%} of the rows share their score with another.")
        return remarks

    def __repr__(self) -> str:
        means = ", ".join(f"{name} {value:.4f}" for name, value in self.means.items())
        return f"Evaluation {self.run!r}: {several(len(self.queries), 'query', 'queries')}: {means}"


def evaluate(
    qrels: Qrels,
    run: Run,
    measures: Iterable[str | Measure],
    *,
    profile: str | None = None,
    propensity: Propensity | None = None,
) -> Evaluation:
    """Evaluate a run against judgements.

    >>> qrels = Qrels.from_dict({"q1": {"d1": 2, "d2": 0}, "q2": {"d3": 1}})
    >>> run = Run.from_dict({"q1": {"d2": 0.9, "d1": 0.4}, "q2": {"d3": 0.5}}, name="bm25")
    >>> evaluate(qrels, run, ["nDCG@10", "MRR", "P@1"])
    Evaluation 'bm25': 2 queries: nDCG@10 0.8155, MRR 0.7500, P@1 0.5000

    Every query of the judgements counts: one that the run lacks counts as an empty list, unless the measure
    says `missing=skip`. A query of the run without judgements does not count. Raises DataError if the run
    shares no query with the judgements. `profile` (trec_eval, lightgbm, sklearn) sets the conventions that a
    measure does not state itself; `propensity` is needed by psP and psnDCG.
    """
    ranking = Ranking.of(qrels, run)
    requested = as_measures(measures)
    stated = [measure.under(profile) if profile else measure for measure in requested]
    columns = _measure(ranking, stated, propensity)
    return Evaluation(
        run=run.name,
        requested=dict(zip(requested, stated, strict=True)),
        missing=tuple(qrels.queries[at] for at in np.flatnonzero(~ranking.present)),
        unjudged=tuple(run.queries[at] for at in np.flatnonzero(ranking.query_of_list < 0)),
        **columns,
    )


def evaluate_rows(
    grades: ArrayLike,
    scores: ArrayLike,
    offsets: ArrayLike,
    measures: Iterable[str | Measure],
    *,
    profile: str | None = None,
) -> Evaluation:
    """Evaluate scores of feature rows grouped by query (rows of query i: offsets[i]:offsets[i + 1]).

    For training loops: nothing is joined. Rows have no ids to break ties by; unless a measure states a rule
    (`ties=input`), ties are broken at random with its seed, so that a file sorted by grade has no advantage.
    Raises DataError for a fractional grade.
    """
    graded = as_grades(grades)
    scored = np.asarray(scores, dtype=np.float64).reshape(-1)
    bounds = np.asarray(offsets, dtype=np.int64).reshape(-1)
    if not len(bounds) or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        raise DataError(
            "the offsets do not start at 0, or fall", cure="the rows of query i are offsets[i]:offsets[i + 1]"
        )
    if not len(graded) == len(scored) == int(bounds[-1]):
        raise DataError(f"{len(graded)} grades, {len(scored)} scores and rows up to {int(bounds[-1])}")
    if not np.isfinite(scored).all():
        raise DataError("a score is NaN or infinite", cure="scores must be finite numbers")
    ranking = Ranking.of_rows(graded, scored, bounds)
    requested = as_measures(measures)
    stated = [measure.under(profile) if profile else measure for measure in requested]
    stated = [measure if "ties" in measure.explicit else measure(ties="random") for measure in stated]
    columns = _measure(ranking, stated, None)
    return Evaluation(
        run="", requested=dict(zip(requested, stated, strict=True)), missing=(), unjudged=(), **columns
    )


def together(measure: Measure, values: FloatArray, weights: FloatArray | None = None) -> float:
    """Aggregate the queries that count: a mean, weighted or geometric, or a sum; NaN if none counts."""
    counts = np.isfinite(values)
    if not counts.any():
        return float("nan")
    if measure.family.aggregate == "sum":
        return float(values[counts].sum())
    if weights is not None:
        whole = weights[counts].sum()
        return float((values[counts] * weights[counts]).sum() / whole) if whole > 0 else float("nan")
    mean = float(values[counts].mean())
    return float(np.exp(mean)) if measure.family.aggregate == "geometric" else mean


def _measure(ranking: Ranking, stated: Sequence[Measure], propensity: Propensity | None) -> dict[str, Any]:
    """Return the fields of an `Evaluation` that come from the arrays."""
    measures = tuple(dict.fromkeys(stated))
    values: dict[Measure, FloatArray] = {}
    weights: dict[Measure, FloatArray] = {}
    for measure in measures:
        view = ranking.view(str(measure["ties"]), int(measure["seed"]), str(measure["unjudged"]))
        if measure.name in FORMULAS:
            per_query = FORMULAS[measure.name](view, measure)
            if "empty" in measure and measure["empty"] != "zero":
                per_query = np.where(
                    relevant(view, measure) > 0, per_query, 1.0 if measure["empty"] == "one" else np.nan
                )
        else:
            per_query, weights[measure] = propensity_scored(view, measure, propensity)
        if measure["missing"] == "skip":
            per_query = np.where(ranking.present, per_query, np.nan)
        values[measure] = frozen(per_query)
    return {
        "queries": ranking.queries,
        "measures": measures,
        "values": values,
        "weights": weights,
        "gmax": ranking.gmax,
        "tie_rate": ranking.tie_rate,
    }


COLUMNS = ("experiment", "data", "fold", "seed", "method", "query", "measure", "value")


def per_query_rows(evaluation: Evaluation, **facts: Any) -> Iterator[dict[str, Any]]:
    """Yield one row per measure and query; `facts` are the other columns, `method` unless it is the run's
    name."""
    for measure in evaluation.measures:
        for query, value in zip(evaluation.queries, evaluation.values[measure].tolist(), strict=True):
            named = {"method": evaluation.run, **facts, "query": query, "measure": str(measure)}
            yield {**named, "value": value if value == value else None}


def write_per_query(rows: Iterable[Mapping[str, Any]], path: str | PathLike[str]) -> Path:
    """Write the rows to a `.csv` or `.parquet` file, whole or not at all. Raises ConfigError for another
    suffix."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    check_per_query(path)
    records = [{name: row.get(name) for name in COLUMNS} for row in rows]
    table = pa.Table.from_pylist(records, schema=_schema())
    with replacing(path) as stream:
        writer = csv.write_csv if Path(path).suffix == ".csv" else parquet.write_table
        writer(table, stream)
    return Path(path)


def read_per_query(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the rows of a file that `write_per_query` wrote. Raises DataError for another file."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    check_per_query(path)
    try:
        if Path(path).suffix == ".csv":
            how = csv.ConvertOptions(column_types=_schema(), include_columns=list(COLUMNS))
            table = csv.read_csv(path, convert_options=how)
        else:
            table = parquet.read_table(path, columns=list(COLUMNS))
        rows: list[dict[str, Any]] = table.cast(_schema()).to_pylist()
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        reason, cure = str(error).splitlines()[0], f"columns {', '.join(COLUMNS)}"
        raise DataError(f"no values by query: {reason}", file=path, cure=cure) from error
    return rows


def check_per_query(path: str | PathLike[str]) -> None:
    """Raise ConfigError if the suffix is neither `.csv` nor `.parquet`, before any work is done."""
    if Path(path).suffix not in (".csv", ".parquet"):
        raise ConfigError(f"{path} is neither .csv nor .parquet", key="per-query", expected="one of them")


def means_of(
    rows: Iterable[Mapping[str, Any]], by: Sequence[str] = ("experiment", "data", "method", "measure")
) -> list[dict[str, Any]]:
    """Return a record for every group of rows: the mean `value` over `n` queries, with bootstrap `low` and
    `high`.

    A query's value is its mean over seeds; queries of different folds are different queries. Groups are in
    order of first appearance; a group without a query that counts is left out.
    """
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[float]]] = {}
    for row in rows:
        if row["value"] is not None:
            queries = groups.setdefault(tuple(row[name] for name in by), {})
            queries.setdefault((row["data"], row["fold"], row["query"]), []).append(row["value"])
    records = []
    for key, queries in groups.items():
        interval = bootstrap([float(np.mean(values)) for values in queries.values()])
        estimate = {"value": interval.value, "low": interval.low, "high": interval.high, "n": interval.n}
        records.append({**dict(zip(by, key, strict=True)), **estimate})
    return records


def _schema() -> Any:
    import pyarrow as pa

    kinds = {"fold": pa.int64(), "seed": pa.int64(), "value": pa.float64()}
    return pa.schema([(name, kinds.get(name, pa.string())) for name in COLUMNS])
