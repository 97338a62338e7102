"""Files of the values of single queries, and tables made again from them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import command_line
from easy_rows import easy
from isthmus.errors import ConfigError, DataError
from isthmus.evaluation import evaluate, means_of, per_query_rows, read_per_query, write_per_query
from isthmus.tables import Qrels, Run, write_letor

QRELS = Qrels.from_dict({"1": {"a": 1}, "02": {"a": 1}, 'q, "3"': {"a": 0}})
RUN = Run.from_dict({"1": {"a": 2.0, "b": 1.0}, "02": {"a": 1.0, "b": 2.0}}, name="mine")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_gives_the_same_rows_again(tmp_path, suffix):
    evaluation = evaluate(QRELS, RUN, ["nDCG@10(empty=skip)", "MRR"])
    rows = list(per_query_rows(evaluation, experiment="x", data="d", fold=None, seed=3))
    assert read_per_query(write_per_query(rows, tmp_path / f"values.{suffix}")) == rows
    assert [row["value"] for row in rows] == [1.0, pytest.approx(0.63093, abs=1e-5), None, 1.0, 0.5, 0.0]
    assert {row["method"] for row in rows} == {"mine"}


def test_means_are_over_queries_after_seeds():
    def row(method, fold, seed, query, value):
        about = {"experiment": "x", "data": "d", "measure": "MRR", "method": method}
        return {**about, "fold": fold, "seed": seed, "query": query, "value": value}

    rows = [row("m", 0, 0, "q", 0.0), row("m", 0, 1, "q", 1.0), row("m", 1, 0, "q", 0.2)]
    rows += [row("m", 1, 0, "r", None), row("n", 0, 0, "q", None)]
    (mean,) = means_of(rows)
    assert (mean["method"], mean["n"], mean["value"]) == ("m", 2, pytest.approx(0.35))
    assert mean["low"] <= 0.35 <= mean["high"]
    assert [one["value"] for one in means_of(rows, by=("method", "fold"))] == [0.5, pytest.approx(0.2)]


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"neither \.csv nor \.parquet"):
        write_per_query([], tmp_path / "values.txt")
    (tmp_path / "values.csv").write_text("query,value\nq1,0.5\n")
    with pytest.raises(DataError, match=r"no values by query.*columns experiment"):
        read_per_query(tmp_path / "values.csv")


def test_train_and_rank_write_the_values_behind_what_they_print(tmp_path):
    for part, queries in (("train", 40), ("vali", 12), ("test", 15)):
        write_letor(easy(part, queries), tmp_path / f"{part}.txt")
    words = ("--rounds", 2, "--seed", 4, "--out", tmp_path / "run", "--json")
    done = command_line.isthmus("train", tmp_path, *words, "--per-query", tmp_path / "values.csv")
    rows = read_per_query(tmp_path / "values.csv")
    assert {(row["experiment"], row["fold"], row["seed"], row["method"]) for row in rows} == {
        ("train", 0, 4, "fedrisk")
    }
    final = json.loads(done.stdout)["final"]
    assert {row["measure"]: row["value"] for row in means_of(rows)} == pytest.approx(final)
    command_line.isthmus(
        *("rank", tmp_path / "run", tmp_path, "--split", "test", "-o", tmp_path / "x.run"),
        *("--per-query", tmp_path / "ranked.parquet"),
    )
    ranked = read_per_query(tmp_path / "ranked.parquet")
    same = [(row["query"], row["measure"], row["value"]) for row in rows]
    assert [(row["query"], row["measure"], row["value"]) for row in ranked] == same
    assert np.isfinite([value for *_, value in same if value is not None]).all()
    done = command_line.isthmus("train", tmp_path, "--per-query", tmp_path / "values.txt", check=False)
    assert done.returncode == 1
    assert "neither .csv nor .parquet" in done.stderr
