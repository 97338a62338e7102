"""`isthmus features` and `isthmus csfltr` on collections of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from command_line import isthmus
from isthmus.features import NAMES
from isthmus.federation.semisupervised.printed import MEASURES, Printed, PrintedWorld, Protocol, by_rank
from isthmus.private import SharedNoise
from isthmus.randomness import Streams
from isthmus.retrieval import BM25
from isthmus.tables import read_letor
from isthmus_reproduce import synthetic_text
from isthmus_reproduce.deals import deal_corpus

TOPICS = [[f"{topic}{word}" for word in range(12)] for topic in ("sea", "law", "sun", "ore")]


def beir(folder: Path, seed: int, *, documents: int = 60, queries: int = 24) -> Path:
    """Documents about one of four things each, queries about one, judged where the two agree."""
    rng = np.random.default_rng(seed)
    (folder / "qrels").mkdir(parents=True)
    about = rng.integers(4, size=documents)
    corpus = [
        {"_id": f"d{at}", "title": str(rng.choice(TOPICS[topic])), "text": " ".join(_words(rng, topic, 30))}
        for at, topic in enumerate(about)
    ]
    asked = rng.integers(4, size=queries)
    lines = [{"_id": f"q{at}", "text": " ".join(_words(rng, topic, 3))} for at, topic in enumerate(asked)]
    for name, rows in (("corpus", corpus), ("queries", lines)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = [
        (f"q{at}", f"d{d}", 1) for at, topic in enumerate(asked) for d in np.flatnonzero(about == topic)
    ]
    body = "".join(f"{query}\t{document}\t{grade}\n" for query, document, grade in judged)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + body)
    return folder


def _words(rng: np.random.Generator, topic: int, count: int) -> list[str]:
    own, others = TOPICS[topic], [word for words in TOPICS for word in words]
    return [str(rng.choice(own if rng.random() < 0.6 else others)) for _ in range(count)]


def test_features_of_a_beir_folder_are_letor_rows(tmp_path: Path) -> None:
    folder, out = beir(tmp_path / "one", 1), tmp_path / "rows.txt"
    files = (folder, folder / "queries.jsonl", folder / "qrels" / "test.tsv")
    result = json.loads(isthmus("features", *files, "-o", out, "--depth", 60, "--json").stdout)
    rows = read_letor(out)
    assert result["features"] == rows.width == len(NAMES) == 16
    assert (result["queries"], result["rows"]) == (len(rows), rows.rows)
    assert result["relevant"] == int((rows.grades > 0).sum()) > 24, "judged documents are candidates too"
    bm25 = rows.features[:, NAMES.index("body.BM25")]
    assert bm25[rows.grades > 0].mean() > 1.2 * bm25[rows.grades == 0].mean()
    printed = tmp_path / "printed.txt"
    isthmus("features", *files, "-o", printed, "--depth", 60, "--profile", "paper")
    assert not np.allclose(read_letor(printed).features, rows.features)


def test_two_folders_learn_across_in_one_command(tmp_path: Path) -> None:
    folders = (beir(tmp_path / "one", 1), beir(tmp_path / "two", 2))
    records = json.loads(isthmus("csfltr", *folders, "--depth", 20, "--json").stdout)
    rows = {(record["row"], record["part"]) for record in records}
    assert {
        ("Local", "one"),
        ("Local+", "two"),
        ("Global", "all"),
        ("CS-F-LTR", "all"),
        ("BM25", "all"),
    } <= rows
    ndcg = {(one["row"], one["part"]): one["value"] for one in records if one["measure"] == "nDCG@10"}
    assert ndcg["Global", "all"] > 0.4
    assert {one["measure"] for one in records} == {"ERR", "nDCG@10", "nDCG", "MAP"}
    shown = " ".join(isthmus("csfltr", *folders, "--depth", 20).stdout.split())
    assert "ranked over the documents of all silos" in shown
    difference = ndcg["anchored Global", "all"] - ndcg["BM25", "all"]
    assert f"than BM25 by nDCG@10: {difference:+.4f} (95 % interval" in shown
    assert f"of {records[0]['queries']} queries got worse" in shown


def test_one_folder_is_not_several_silos(tmp_path: Path) -> None:
    said = isthmus("csfltr", beir(tmp_path / "one", 1), check=False)
    assert said.returncode == 1
    assert "second silo" in said.stderr


@pytest.mark.parametrize("profile", ["papr"])
def test_a_mistyped_profile_names_the_nearest(tmp_path: Path, profile: str) -> None:
    folder = beir(tmp_path / "one", 1)
    files = (folder, folder / "queries.jsonl", folder / "qrels" / "test.tsv")
    said = isthmus("features", *files, "-o", tmp_path / "rows", "--profile", profile, check=False)
    assert "paper" in said.stderr


def test_paper_mode_is_the_printed_protocol_with_its_measures(tmp_path: Path) -> None:
    folders = (beir(tmp_path / "one", 1), beir(tmp_path / "two", 2))
    result = isthmus("csfltr", *folders, "--mode", "paper", "--depth", 20, "--json")
    records = json.loads(result.stdout)
    assert "known fault C2" in result.stderr
    assert "∞ in truth" in result.stderr
    rows = {(record["row"], record["part"]) for record in records}
    assert rows == {
        *((way, silo) for way in ("Local", "Local+") for silo in ("one", "two")),
        ("Global", "all"),
        ("CS-F-LTR", "all"),
    }
    values = {(one["row"], one["measure"]): one["value"] for one in records}
    assert values["Global", "nDCG@10"] > 0.6
    assert values["Global", "err_printed"] == pytest.approx(values["CS-F-LTR", "err_printed"])  # fault C6
    assert {one["measure"] for one in records} == set(MEASURES)


@pytest.mark.parametrize("mechanism", ["scalar", "per_cell"])
def test_other_mechanisms_and_losses_by_name(tmp_path: Path, mechanism: str) -> None:
    folders = (beir(tmp_path / "one", 1), beir(tmp_path / "two", 2))
    model = "listwise" if mechanism == "scalar" else "pairwise"
    options = ("--mechanism", mechanism, "--epsilon", 500, "--model", model, "--depth", 20, "--json")
    result = isthmus("csfltr", *folders, *options)
    ndcg = {one["row"]: one["value"] for one in json.loads(result.stdout) if one["measure"] == "nDCG@10"}
    assert {"Local", "Global", "CS-F-LTR", "all-zero"} <= set(ndcg)
    assert ndcg["Global"] > 0.4
    assert "500 for the answer about one word" in result.stderr


def test_the_printed_protocol_step_by_step() -> None:
    corpus = deal_corpus(synthetic_text.text(150, 24, 3, seed=2, words=80), 3, Streams(0))
    run = BM25().index(corpus.documents).search(corpus.queries, 100)
    graded = by_rank(corpus, run)
    first = next(query for query in run.queries if len(run[query].documents) > 10)
    ranked = run[first].documents.tolist()
    grades = graded.qrels.to_dict()[first]
    assert [grades[name] for name in ranked[:11]] == [2] * 10 + [1]
    values, signs = np.array([[[5.0], [-5.0], [4.0]]]), np.array([[1], [-1], [1]], dtype=np.int8)
    with pytest.warns(UserWarning, match="no privacy"):
        printed, used = Printed(0.5, 3), np.array([[0, 1, 2]])
    assert printed.read(values, signs, used).tolist() == [[4.0]], "the middle of 5, −5 and 4: no sign"
    assert SharedNoise.read(printed, values, signs, used).tolist() == [[5.0]]
    world = PrintedWorld(graded, Streams(0), Protocol(alone=60, together=60))
    split = {name: (tested.sum(), len(tested)) for name, tested in world.tested.items()}
    assert sum(tested for tested, _ in split.values()) == world.test.rows
    both = set(world.test.queries) & {
        query for name, rows in world.inside.items() for query in rows.keep(~world.tested[name]).queries
    }
    assert len(both) > 10, "pairs of one query on both sides"
    alone = next(iter(world.learners.values()))
    blank = np.zeros((17, 3))
    labeller = blank + np.arange(3)
    ramped = []
    for beta in (0.0, 0.3):
        world.protocol = Protocol(beta=beta, ramp=(10, 20))
        ramped.append([world.descended(blank, {"one": alone}, labeller, steps) for steps in (10, 30)])
    assert np.array_equal(ramped[0][0], ramped[1][0]), "β is 0 before the ramp"
    assert ramped[1][1][-1, 2] > ramped[0][1][-1, 2], "then cross pairs draw to the labeller's grade"


def test_what_these_commands_show_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    one, two = beir(tmp_path / "one", 1), beir(tmp_path / "two", 2)
    files = (one, "one/queries.jsonl", "one/qrels/test.tsv")
    for words in (("features", *files, "-o", "rows.txt"), ("csfltr", one, two, "--depth", 20)):
        done = isthmus(*words, folder=tmp_path)
        lines = (done.stdout + done.stderr).splitlines()
        assert not [line for line in lines if len(line) > 80 and "Warning: " not in line], words
