"""`isthmus calibrate` and `isthmus fuse`, end to end, as a person with run files would use them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit

from isthmus.cli import main
from isthmus.evaluation import evaluate, means_of, read_per_query
from isthmus.tables import Qrels, Run, read_qrels, read_run, write_qrels, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two retrievers over 60 validation and 30 test queries, with the judgements of each part."""
    path = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(90, 30))
    grades = (rng.random(truth.shape) < expit(3 * truth - 2)).astype(int)
    queries = [f"q{at}" for at in range(90)]
    names = np.repeat(queries, 30).tolist()
    documents = [f"d{at}" for at in range(30)] * 90
    qrels = Qrels.of(names, documents, grades.reshape(-1))
    for part, chosen in (("validation", queries[:60]), ("test", queries[60:])):
        write_qrels(qrels[chosen], path / f"{part}.qrels")
        for name, noise, scale in (("bm25", 1.0, 9.0), ("dense", 0.7, 0.1)):
            seen = scale * (truth + noise * rng.normal(size=truth.shape))
            run = Run.of(names, documents, seen.reshape(-1), name=name)
            write_run(run[chosen].top(20), path / f"{name}-{part}.run")
    return path


def ndcg(qrels: Path, run: Path) -> float:
    return evaluate(read_qrels(qrels), read_run(run), ["nDCG@10"])["nDCG@10"]


def test_learn_keep_and_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {
        part: [str(folder / f"{name}-{part}.run") for name in ("bm25", "dense")]
        for part in ("validation", "test")
    }
    fuser, fused = str(folder / "hybrid.fuser"), folder / "fused.run"
    learn = ["fuse", *runs["validation"], "--qrels", str(folder / "validation.qrels"), "--save", fuser]
    assert main([*learn, "--method", "stacked", "--figures", str(folder / "figures")]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "hybrid.fuser" in told.err
    assert "ECE" in told.err
    assert len(list((folder / "figures").glob("*.svg"))) == len(list((folder / "figures").glob("*.png"))) == 4
    assert main(["fuse", *runs["test"], "--model", fuser, "-o", str(fused)]) == 0
    best = max(ndcg(folder / "test.qrels", Path(run)) for run in runs["test"])
    assert ndcg(folder / "test.qrels", fused) > best
    assert read_run(fused).name == "stacked"


def test_a_wanted_precision_is_kept_on_new_queries(folder: Path) -> None:
    runs = [str(folder / f"{name}-validation.run") for name in ("bm25", "dense")]
    fuser = str(folder / "precise.fuser")
    assert main(["fuse", *runs, "--qrels", str(folder / "validation.qrels"), "--save", fuser]) == 0
    test = [str(folder / f"{name}-test.run") for name in ("bm25", "dense")]
    sure = folder / "sure.run"
    assert (
        main(["fuse", *test, "--model", fuser, "--precision", "0.8", "--probabilities", "-o", str(sure)]) == 0
    )
    kept = read_run(sure)
    assert 0 < kept.rows < 300
    assert ((kept.scores > 0.3) & (kept.scores <= 1)).all()
    assert (kept.grades(read_qrels(folder / "test.qrels")) > 0).mean() > 0.65


def test_options_may_come_first_and_a_dash_is_stdout(folder: Path) -> None:
    runs = [str(folder / f"{name}-test.run") for name in ("bm25", "dense")]
    command = [sys.executable, "-m", "isthmus", "fuse", "-m", "rrf", "--top", "3", "-o"]
    told = subprocess.run([*command, "-", *runs], capture_output=True, text=True, check=True)
    subprocess.run([*command, str(folder / "same.run"), *runs], capture_output=True, check=True)
    assert told.stdout == (folder / "same.run").read_text()
    assert main(["fuse", *runs, "-o", "-", "--json"]) == 1


def test_explanations_are_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(folder / f"{name}-validation.run") for name in ("bm25", "dense")]
    assert main(["fuse", *runs, "--method", "rrf", "--explain", "q7"]) == 0
    assert "bm25: score" in capsys.readouterr().out
    asked = ["fuse", *runs, "--qrels", str(folder / "validation.qrels"), "--explain", "q7", "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "convex" == found["trials"][0]["method"]
    first = found["explanations"][0]
    assert first["query"] == "q7"
    total = first["start"] + sum(part["contribution"] for part in first["parts"])
    assert total == pytest.approx(first["score"])
    assert 0 < found["calibration"]["ECE"] < 0.1
    assert next(iter(found["calibration"])) == "ECE@10"


def test_options_reach_the_method(folder: Path) -> None:
    runs = [str(folder / f"{name}-validation.run") for name in ("bm25", "dense")]
    out = folder / "options.run"
    assert main(["fuse", *runs, "--method", "rrf", "--set", "k=0", "--top", "3", "-o", str(out)]) == 0
    fused = read_run(out)
    assert np.diff(fused.offsets).max() == 3
    assert fused.scores.max() == 2.0
    weighted = ["fuse", *runs, "--method", "convex", "--weights", "1,0", "--missing", "0", "-o", str(out)]
    assert main(weighted) == 0
    assert read_run(out)["q3"].documents.tolist()[:5] == read_run(runs[0])["q3"].documents.tolist()[:5]


@pytest.mark.parametrize("method", ["query-feature", "platt", "isotonic", "auto"])
def test_calibrating_writes_probabilities(
    folder: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out, kept = folder / "bm25-validation.run", folder / "calibrated.run", folder / "kept.calibrator"
    asked = ["calibrate", str(run), "--qrels", str(folder / "validation.qrels"), "--method", method]
    assert main([*asked, "-o", str(out), "--save", str(kept), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["calibration"]["ECE"] < 0.1
    chances = read_run(out)
    assert ((chances.scores >= 0) & (chances.scores <= 1)).all()
    assert chances.rows == read_run(run).rows
    test = folder / "bm25-test.run"
    assert main(["calibrate", str(test), "--model", str(kept), "-o", str(folder / "test-chances.run")]) == 0
    assert read_run(folder / "test-chances.run").scores.max() <= 1


def test_calibrated_runs_are_fused_by_their_probabilities(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chances = []
    for name in ("bm25", "dense"):
        chances.append(str(folder / f"{name}-chances.run"))
        learn = ["calibrate", str(folder / f"{name}-validation.run"), "--method", "platt"]
        assert main([*learn, "--qrels", str(folder / "validation.qrels"), "-o", chances[-1]]) == 0
    fused = folder / "by-chances.run"
    assert main(["fuse", *chances, "--calibrated", "--probabilities", "-o", str(fused)]) == 0
    assert read_run(fused).name == "log-odds"
    assert ndcg(folder / "validation.qrels", fused) > ndcg(folder / "validation.qrels", Path(chances[0]))
    capsys.readouterr()
    assert main(["fuse", *chances, "--calibrated", "--explain", "q7", "--json"]) == 0
    (first, *_) = json.loads(capsys.readouterr().out)["explanations"]
    assert first["parts"][0]["probability"] == pytest.approx(first["parts"][0]["score"])
    learn = ["fuse", *chances, "--calibrated", "--qrels", str(folder / "validation.qrels")]
    assert main([*learn, "--precision", "0.9", "-o", str(fused), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["queries"] == len(read_run(fused))


def test_scores_and_probabilities_travel_through_files(folder: Path, tmp_path: Path) -> None:
    """Equations 13 and 14 from the command line: a raw score and a calibrated probability for every row."""
    runs, files = [], []
    for name in ("bm25", "dense"):
        run = folder / f"{name}-validation.run"
        files.append(str(tmp_path / f"{name}.prob"))
        learn = ["calibrate", str(run), "-m", "query-feature", "--qrels", str(folder / "validation.qrels")]
        assert main([*learn, "-o", files[-1]]) == 0
        runs.append(str(run))
    given = [part for file in files for part in ("--confidence", file)]
    raw, sure = [read_run(run) for run in runs], [read_run(file) for file in files]
    for method, formula in (("comb-mnz-conf", "mnz"), ("comb-mult-conf", "mult")):
        out = tmp_path / f"{formula}.run"
        assert main(["fuse", *runs, *given, "-m", method, "--norm", "none", "-o", str(out)]) == 0
        scores, confidences = [each.to_dict()["q3"] for each in raw], [each.to_dict()["q3"] for each in sure]
        lowest = [min(0.0, min(each.values())) for each in scores]
        for document, fused in read_run(out).to_dict()["q3"].items():
            products = [
                (each[document] - low) * confidence[document]
                for each, low, confidence in zip(scores, lowest, confidences, strict=True)
                if document in each
            ]
            mnz, mult = len(products) * sum(products), np.prod([1 + product for product in products])
            assert fused == pytest.approx(mnz if formula == "mnz" else mult)
    both, chances = tmp_path / "both.run", tmp_path / "both.prob"
    judged = ["--qrels", str(folder / "validation.qrels")]
    assert main(["fuse", *runs, *given, *judged, "-o", str(both), "--confidence-out", str(chances)]) == 0
    again = ["fuse", str(both), "--confidence", str(chances), "-m", "log-odds", "--probabilities"]
    assert main([*again, "-o", str(tmp_path / "again.run")]) == 0
    first, second = (read_run(path).to_dict()["q3"] for path in (chances, tmp_path / "again.run"))
    assert first == pytest.approx(second, abs=1e-6)


def test_values_of_every_query_make_the_tables_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(folder / f"{name}-validation.run") for name in ("bm25", "dense")]
    qrels, file, fused = str(folder / "validation.qrels"), tmp_path / "fuse.csv", tmp_path / "fused.run"
    command = ["fuse", *runs, "--qrels", qrels, "-o", str(fused), "--json", "--per-query", str(file)]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    rows = read_per_query(file)
    means = {(one["method"], one["measure"]): one for one in means_of(rows)}
    for trial in result["trials"]:
        assert means[f"held out: {trial['method']}", "nDCG@10"]["value"] == pytest.approx(trial["mean"])
    assert means[result["method"], "nDCG@10"]["value"] == pytest.approx(ndcg(Path(qrels), fused))
    assert means[result["method"], "log-loss@10"]["value"] == pytest.approx(
        result["calibration"]["log-loss@10"]
    )
    assert {row["fold"] for row in rows} == set(range(5))
    assert {row["query"]: row["fold"] for row in rows}.keys() == set(read_qrels(qrels).queries)
    file = tmp_path / "calibrate.parquet"
    out = ["-o", str(tmp_path / "x.prob"), "--per-query", str(file), "--json"]
    assert main(["calibrate", runs[0], "--qrels", qrels, *out]) == 0
    capsys.readouterr()
    means = {one["measure"]: one for one in means_of(read_per_query(file))}
    assert set(means) == {"log-loss@10", "Brier@10", "probability@10", "precision@10"}
    assert means["probability@10"]["value"] == pytest.approx(means["precision@10"]["value"], abs=0.05)
    file = tmp_path / "evaluate.csv"
    assert main(["evaluate", qrels, *runs, "-m", "MRR", "--per-query", str(file), "--json"]) == 0
    printed = {row["run"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert {one["method"]: one["value"] for one in means_of(read_per_query(file))} == pytest.approx(printed)
    assert main(["evaluate", qrels, *runs, "--per-query", "values.txt"]) == 1
    assert "neither .csv nor .parquet" in capsys.readouterr().err
    assert main(["fuse", *runs, "-o", "x", "--per-query", str(file)]) == 1
    assert "--per-query compares with judgements" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fuse", "{bm25}"], "nothing to do without -o FILE"),
        (["fuse", "{bm25}", "--method", "rff", "-o", "x"], "did you mean 'rrf'"),
        (["fuse", "{bm25}", "--method", "stacked", "-o", "x"], "learns from judgements"),
        (["fuse", "{bm25}", "--method", "rrf", "--save", "x"], "give --qrels"),
        (["fuse", "{bm25}", "--method", "rrf", "--precision", "0.9", "-o", "x"], "--precision needs --qrels"),
        (["fuse", "{bm25}", "--set", "k", "-o", "x"], "write NAME=VALUE"),
        (["fuse", "{bm25}", "--explain", "nowhere"], "no run has the query"),
        (["fuse", "{bm25}", "--model", "{qrels}", "-o", "x"], "is not a saved fuser"),
        (["fuse", "nothing.run", "-o", "x"], "nothing.run: cannot be read"),
        (
            ["fuse", "{bm25}", "--model", "m", "--method", "rrf", "-o", "x"],
            "--method is settled by the model",
        ),
        (["fuse", "{bm25}", "--model", "m", "--set", "k=3", "-o", "x"], "--set is settled by the model"),
        (["fuse", "{bm25}", "--calibrated", "-o", "x"], "is no probability"),
        (["fuse", "{bm25}", "--confidence", "{bm25}", "-o", "x"], "is no probability"),
        (["fuse", "{bm25}", "--confidence", "{dense}", "-o", "x"], "dense-validation.run: the "),
        (["fuse", "{bm25}", "{bm25}", "--confidence", "{bm25}", "-o", "x"], "1 files of probabilities for 2"),
        (["fuse", "{bm25}", "--confidence", "{bm25}", "--calibrated", "-o", "x"], "both say where"),
        (["fuse", "{bm25}", "--method", "convex", "-o", "x"], "convex learns from judgements"),
        (["fuse", "{bm25}", "--qrels", "{qrels}", "--norm", "z-score", "-o", "x"], "auto compares methods"),
        (["calibrate", "{bm25}", "--model", "m", "-m", "platt", "-o", "x"], "--method is settled by the"),
        (
            ["calibrate", "{bm25}", "--model", "m", "--relevant", "2", "-o", "x"],
            "--relevant reads judgements",
        ),
        (
            ["calibrate", "{bm25}", "--model", "m", "--folds", "3", "-o", "x"],
            "--folds is settled by the model",
        ),
        (
            ["fuse", "{bm25}", "{other}", "-o", "x"],
            "the runs have no query in common: bm25-validation.run (q0",
        ),
        (
            ["fuse", "{bm25}", "{dense}", "{bm25}", "-o", "x"],
            "is named 2 times: it would be fused with itself",
        ),
        (["calibrate", "{bm25}", "-o", "x"], "--qrels FILE to learn from"),
        (["calibrate", "{bm25}", "--qrels", "{qrels}", "--relevant", "5", "-o", "x"], "grade 5 or more"),
        (
            ["calibrate", "{bm25}", "--qrels", "{qrels}", "--precision", "1", "-o", "x"],
            "no threshold reaches a precision of 1: the best on judged rows is ",
        ),
        (["calibrate", "{bm25}", "--qrels", "{test}", "-o", "x"], "0 judged rows are relevant"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    named = {
        "{bm25}": str(folder / "bm25-validation.run"),
        "{dense}": str(folder / "dense-validation.run"),
        "{qrels}": str(folder / "validation.qrels"),
        "{test}": str(folder / "test.qrels"),
        "{other}": str(folder / "bm25-test.run"),
    }
    assert main([named.get(argument, argument) for argument in arguments]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_plain_fusion_starts_without_scikit_learn(folder: Path) -> None:
    runs = [str(folder / f"{name}-validation.run") for name in ("bm25", "dense")]
    program = (
        "import sys; from isthmus.cli import main; "
        f"status = main(['fuse', *{runs!r}, '--method', 'comb-mnz', '-o', {str(folder / 'plain.run')!r}]); "
        "print(status, sorted({'sklearn', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 []"


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "weighted", "--weights", "a,b"],
        ["--method", "convex", "--weights", "0,0"],
        ["--method", "comb-sum", "--missing", "foo"],
        ["--missing", "nan"],
        ["--set", "k=abc"],
        ["--set", "k=[1,2]"],
        ["--set", "k=-61"],
        ["--set", "norm=5"],
        ["--set", "method=5"],
        ["--set", "k"],
    ],
)
def test_values_that_make_no_sense_are_one_line(tmp_path, capsys, options):
    for name, document in (("a.run", "d1"), ("b.run", "d2")):
        (tmp_path / name).write_text(f"q1 Q0 {document} 1 2.5 {name}\n")
    files = [str(tmp_path / name) for name in ("a.run", "b.run")]
    assert main(["fuse", *files, *options, "-o", str(tmp_path / "out.run")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("isthmus: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "out.run").exists()
