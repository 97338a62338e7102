"""`isthmus evaluate` and `isthmus retrieve`, from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import command_line
from isthmus.cli import main

QRELS = "q1 0 a 2\nq1 0 b 0\nq1 0 c 1\nq2 0 a 1\n"
GOOD = "q1 Q0 a 1 9 x\nq1 Q0 c 2 8 x\nq1 Q0 b 3 7 x\nq2 Q0 a 1 5 x\n"
BAD = "q1\tQ0\tb\t1\t9\tx\nq1\tQ0\tc\t2\t8\tx\nq1\tQ0\ta\t3\t7\tx\nq9\tQ0\ta\t1\t5\tx\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Judgements and two runs; `bad.run` lacks q2 and has a q9 that nobody judged."""
    (tmp_path / "qrels").write_text(QRELS)
    (tmp_path / "good.run").write_text(GOOD)
    (tmp_path / "bad.run").write_text(BAD)
    return tmp_path


def isthmus(folder: Path, *arguments: str, status: int = 0) -> tuple[str, str]:
    """What the program writes to stdout and to stderr."""
    done = command_line.isthmus(*arguments, folder=folder, check=False)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_a_process_of_its_own_prints_the_same(folder: Path) -> None:
    words = ["evaluate", "qrels", "good.run", "bad.run", "-m", "MRR@10", "P@1"]
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", *words], capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == isthmus(folder, *words)


def test_json_has_the_promised_form(folder: Path) -> None:
    out, _ = isthmus(folder, "evaluate", "qrels", "good.run", "bad.run", "-m", "MRR@10", "P@1", "--json")
    rows = json.loads(out)
    more = [{name: row.pop(name) for name in ("low", "high", "better_than")} for row in rows]
    assert rows == [
        {"run": "good.run", "measure": "MRR@10", "value": 1.0, "queries": 2},
        {"run": "good.run", "measure": "P@1", "value": 1.0, "queries": 2},
        {"run": "bad.run", "measure": "MRR@10", "value": 0.25, "queries": 2},
        {"run": "bad.run", "measure": "P@1", "value": 0.0, "queries": 2},
    ]
    assert more[0] == {"low": 1.0, "high": 1.0, "better_than": []}
    assert (more[2]["low"], more[2]["high"]) == (0.0, 0.5)


@pytest.mark.parametrize(
    "form", [[], ["--json"], ["--by-query"], ["--by-query", "--json"], ["--format=html"]]
)
def test_queries_that_one_side_lacks_are_told(folder: Path, form: list[str]) -> None:
    (folder / "tied.run").write_text("q1 Q0 a 1 9 x\nq1 Q0 b 2 9 x\nq2 Q0 a 1 1 x\nq2 Q0 b 2 0 x\n")
    out, err = isthmus(folder, "evaluate", "qrels", "good.run", "bad.run", "tied.run", "-m", "P@1", *form)
    assert "judged queries is not" not in out, "said once"
    assert err.splitlines() == [
        "bad.run: 1 of 2 judged queries is not in the run.",
        "bad.run: 1 query has no judgements and does not count.",
        "tied.run: 50.0% of the rows share their score with another.",
    ]


def test_by_query(folder: Path) -> None:
    out, _ = isthmus(folder, "evaluate", "qrels", "bad.run", "-m", "MRR", "--by-query", "--json")
    assert json.loads(out) == [
        {"run": "bad.run", "measure": "MRR", "query": "q1", "value": 0.5},
        {"run": "bad.run", "measure": "MRR", "query": "q2", "value": 0.0},
    ]


@pytest.mark.parametrize(
    ("form", "sign"), [("text", "────"), ("markdown", "| ---"), ("latex", r"\toprule"), ("html", "<table>")]
)
def test_formats(folder: Path, form: str, sign: str) -> None:
    for by_query in ([], ["--by-query"]):
        out, _ = isthmus(folder, "evaluate", "qrels", "good.run", "--format", form, "-m", "P@1", *by_query)
        assert sign in out
        assert "good.run" in out


def test_a_profile_changes_the_conventions(folder: Path) -> None:
    out, _ = isthmus(
        folder, "evaluate", "qrels", "bad.run", "-m", "nDCG@10", "--profile", "trec_eval", "--json"
    )
    (row,) = json.loads(out)
    assert "gain=linear" in row["measure"]


def test_propensities_from_training_judgements(folder: Path) -> None:
    (folder / "train").write_text("t1 0 a 1\nt2 0 a 1\nt3 0 c 1\nt4 0 a 1\n")
    asked = ["evaluate", "qrels", "good.run", "bad.run", "-m", "psP@1", "psnDCG@3"]
    out, _ = isthmus(folder, *asked, "--propensity", "train", "--json")

    from isthmus.evaluation import Propensity, compare
    from isthmus.tables import read_qrels, read_run

    runs = {name: read_run(folder / name) for name in ("good.run", "bad.run")}
    propensity = Propensity.of_qrels(read_qrels(folder / "train"))
    report = compare(read_qrels(folder / "qrels"), runs, asked[5:], propensity=propensity)
    assert json.loads(out) == report.rows()
    assert "psP@1" in isthmus(folder, *asked, "--propensity", "train")[0]
    _, err = isthmus(folder, *asked, status=1)
    assert "--propensity TRAIN_QRELS" in err
    assert err.count("\n") == 1


def test_a_baseline_is_named_as_it_was_given(folder: Path) -> None:
    runs = [str(folder / "good.run"), str(folder / "bad.run")]
    out, _ = isthmus(folder, "evaluate", "qrels", *runs, "-m", "P@1", "--baseline", runs[1])
    assert "against 'bad.run'" in " ".join(out.split())
    _, err = isthmus(folder, "evaluate", "qrels", *runs, "--baseline", "bod.run", status=1)
    assert err == "isthmus: no run is named 'bod.run' (did you mean 'bad.run'?)\n"


def test_runs_of_the_same_name_keep_their_paths(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "good.run").write_text(BAD)
    out, _ = isthmus(folder, "evaluate", "qrels", "good.run", "other/good.run", "-m", "P@1", "--json")
    assert [row["run"] for row in json.loads(out)] == ["good.run", "other/good.run"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("q1 Q0 a 1 nan x\n", "bad.run:1: "),
        ("q1 Q0 a 1 2 x\nq1 Q0 a 2 1 x\n", "bad.run:2: "),
        ("q1 Q0 a\n", "bad.run:1: "),
        ("", "bad.run: the file is empty"),
    ],
)
def test_bad_input_is_one_line(folder: Path, text: str, said: str) -> None:
    (folder / "bad.run").write_text(text)
    out, err = isthmus(folder, "evaluate", "qrels", "bad.run", status=1)
    assert out == ""
    assert err.startswith(f"isthmus: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", ["evaluate", "compare"])
def test_a_run_in_the_place_of_judgements_is_named(folder: Path, verb: str) -> None:
    _, err = isthmus(folder, verb, "good.run", "qrels", "bad.run", status=1)
    told = "good.run: is a run, where judgements were expected (judgements come first, then runs)"
    assert err == f"isthmus: {told}\n"


def test_an_unknown_measure_names_the_nearest(folder: Path) -> None:
    _, err = isthmus(folder, "evaluate", "qrels", "good.run", "-m", "nDGC@10", status=1)
    assert "nDCG" in err
    assert err.count("\n") == 1


def test_a_file_that_is_not_there(folder: Path) -> None:
    _, err = isthmus(folder, "evaluate", "qrels", "none.run", status=1)
    assert err.startswith("isthmus: none.run: cannot be read: No such file or directory")


@pytest.mark.realdata
def test_deep_learning_track_2019(data_dir: Path, tmp_path: Path) -> None:
    runs = data_dir / "runs" / "trec-dl"
    files = [str(runs / name) for name in ("qrels.dl19-passage.txt", "bm25.dl19.run", "colbert.dl19.run")]
    out, _ = isthmus(tmp_path, "evaluate", *files, "-m", "nDCG@10(gain=linear)", "--json")
    rows = json.loads(out)
    assert [round(row["value"], 4) for row in rows] == [0.4795, 0.7320]
    assert [row["queries"] for row in rows] == [43, 43]


def test_evaluating_loads_little(folder: Path) -> None:
    script = """
import sys
from isthmus.cli import main
main(["evaluate", "qrels", "good.run", "--json"])
print(*sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )
    loaded = set(done.stderr.split())
    assert not loaded & {"sklearn", "matplotlib", "flwr", "jinja2", "rich"}


def test_retrieve_then_evaluate(folder: Path) -> None:
    """The built-in world through files, and the same as in memory."""
    out, err = isthmus(
        folder, "retrieve", "pydocs", "test", "-o", "bm25.run", "--qrels", "test.qrels", "--json"
    )
    done = json.loads(out)
    assert done["rows"] == len((folder / "bm25.run").read_text().splitlines())
    assert "test.qrels" in err
    out, _ = isthmus(folder, "evaluate", "test.qrels", "bm25.run", "-m", "nDCG@10", "--json")

    from isthmus.corpora import load
    from isthmus.evaluation import evaluate
    from isthmus.retrieval import BM25

    test = load("pydocs").split("test")
    run = BM25().index(test.documents).search(test.queries, 1000)
    assert json.loads(out)[0]["value"] == evaluate(test.qrels, run, ["nDCG@10"])["nDCG@10"]
    assert json.loads(out)[0]["queries"] == len(test.queries) == done["queries"]


def test_queries_from_a_file_in_one_silo(folder: Path) -> None:
    (folder / "mine.tsv").write_text("a\tsort an array\nb\tsingular value decomposition\n")
    isthmus(folder, "retrieve", "pydocs", "mine.tsv", "-o", "mine.run", "-k", "3", "--silo", "arrays")
    lines = (folder / "mine.run").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["a"] * 3 + ["b"] * 3
    _, err = isthmus(folder, "retrieve", "pydocs", "mine.tsv", "-o", "x", "--silo", "arays", status=1)
    assert "silos: arrays, functions, statistics, signal" in err
    _, err = isthmus(folder, "retrieve", "pydocs", "mine.tsv", "-o", "x", "--qrels", "y", status=1)
    assert err == "isthmus: queries from mine.tsv have no judgements to write\n"


def test_k_is_a_whole_number(folder: Path) -> None:
    _, err = isthmus(folder, "retrieve", "pydocs", "test", "-o", "x", "-k", "0", status=2)
    assert "expected a whole number from 1, got '0'" in err


def test_retrieve_writes_nothing_it_would_not_read_itself(tmp_path, capsys):
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d1", "title": "", "text": "red apples"}\n')
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "green pears"}\n')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
    out = tmp_path / "o.run"
    assert main(["retrieve", str(folder), "train", "-o", str(out)]) == 1
    assert "no train queries" in capsys.readouterr().err
    assert main(["retrieve", str(folder), "test", "-o", str(out)]) == 1
    assert "shares a word" in capsys.readouterr().err
    assert main(["retrieve", str(folder), "test", "-o", str(out), "--qrels", str(out)]) == 1
    assert "both be written" in capsys.readouterr().err
    assert not out.exists()
