"""Values of single queries in a file, from which a table of means can be made again.

A row is one measure of one query under one method, with the columns of `COLUMNS`. The file is CSV or Parquet
by its suffix; a value is empty where the query does not count, `fold` and `seed` where there is none.

>>> row = {"experiment": "demo", "data": "x", "fold": 0, "method": "bm25", "query": "q1", "measure": "MRR"}
>>> rows = [{**row, "seed": seed, "value": value} for seed, value in ((0, 0.5), (1, 1.0))]
>>> [(row["method"], row["value"], row["n"]) for row in means_of(rows)]
[('bm25', 0.75, 1)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.errors import ConfigError, DataError
from isthmus.evaluation.results import Evaluation
from isthmus.evaluation.statistics import bootstrap
from isthmus.tables import replacing

COLUMNS = ("experiment", "data", "fold", "seed", "method", "query", "measure", "value")


def per_query_rows(evaluation: Evaluation, **facts: Any) -> Iterator[dict[str, Any]]:
    """The rows of an evaluation; `facts` are the other columns, `method` unless it is the run's name."""
    for measure in evaluation.measures:
        for query, value in zip(evaluation.queries, evaluation.values[measure].tolist(), strict=True):
            named = {"method": evaluation.run, **facts, "query": query, "measure": str(measure)}
            yield {**named, "value": value if value == value else None}


def write_per_query(rows: Iterable[Mapping[str, Any]], path: str | PathLike[str]) -> Path:
    """Write the rows, whole or not at all; the suffix is `.csv` or `.parquet`, or a ConfigError is raised."""
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
    """The rows of a file that `write_per_query` wrote; DataError for another file."""
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
    """Refuse a file whose suffix is neither `.csv` nor `.parquet`, before any work is done."""
    if Path(path).suffix not in (".csv", ".parquet"):
        raise ConfigError(f"{path} is neither .csv nor .parquet", key="per-query", expected="one of them")


def means_of(
    rows: Iterable[Mapping[str, Any]], by: Sequence[str] = ("experiment", "data", "method", "measure")
) -> list[dict[str, Any]]:
    """A record for every group of rows: the mean `value` over `n` queries, with bootstrap `low` and `high`.

    A query's value is its mean over seeds; queries of different folds are different queries. Groups are in
    order of first appearance; those without a query that counts are left out.
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
