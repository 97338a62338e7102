"""Reproducing calibrated fusion: every table has its cells, work resumes, the two modes differ as told."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isthmus.encoders import Lsa
from isthmus.errors import ConfigError
from isthmus.evaluation import means_of, read_per_query
from isthmus.tables import Qrels, Run
from isthmus_reproduce.fusion import experiment as calibrated_fusion
from isthmus_reproduce.fusion import folds as label_folds
from isthmus_reproduce.fusion import panels as label_panels
from isthmus_reproduce.fusion import runs as label_runs
from isthmus_reproduce.fusion.encoders import Remembered
from isthmus_reproduce.fusion.experiment import Config, reproduce
from isthmus_reproduce.fusion.folds import label_fold
from isthmus_reproduce.fusion.hypotheses import hypotheses
from isthmus_reproduce.fusion.runs import Way
from isthmus_reproduce.notebook import Cell, cells_table

TABLES = ("I", "readings", "II", "III", "IV", "V", "VI", "VII", "VIII")
WORDS = {
    "0": ["match", "goal", "team", "coach", "league", "referee"],
    "1": ["bread", "soup", "kitchen", "oven", "butter", "recipe"],
    "2": ["court", "judge", "appeal", "statute", "verdict", "lawyer"],
    "3": ["rain", "storm", "cloud", "forecast", "wind", "snow"],
    "4": ["piano", "violin", "melody", "concert", "chord", "rhythm"],
}
SHARED = ["today", "people", "said", "that", "many", "things", "happened"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 short texts under five labels of uneven size, in two folds; two texts stand twice."""
    rng = np.random.default_rng(5)
    labels = rng.choice(list(WORDS), 160, p=[0.3, 0.3, 0.2, 0.1, 0.1]).tolist()
    texts = [" ".join([*rng.choice(WORDS[label], 3), *rng.choice(SHARED, 4)]) for label in labels]
    texts[1], texts[3], labels[1], labels[3] = texts[0], texts[2], labels[0], labels[2]
    where = tmp_path_factory.mktemp("labels") / "small"
    (where / "folds").mkdir(parents=True)
    (where / "texts.txt").write_text("\n".join(texts) + "\n")
    (where / "labels.txt").write_text("\n".join(labels) + "\n")
    order = [0, *range(2, 160), 1]
    for fold in range(2):
        turned = order[80 * fold :] + order[: 80 * fold]
        parts = {"test": turned[:50], "val": turned[50:90], "train": turned[90:]}
        told = {**parts, "label_descriptions": {label: " ".join(words) for label, words in WORDS.items()}}
        (where / "folds" / f"{fold}.json").write_text(json.dumps(told))
    return where


@pytest.fixture(scope="module", autouse=True)
def light() -> Iterator[None]:
    """A small encoder, and three rankers instead of the whole panel."""

    def small(texts: object, *, label: str | None = None) -> tuple[Remembered, str]:
        known = sorted(set(texts))  # type: ignore[call-overload]
        return Remembered.of(Lsa.fit(known, dimensions=20), known), "LSA"

    def few(view: object, texts: object, *, single: bool) -> dict[str, object]:
        whole = label_panels.default_panel(view, texts, single=single)  # type: ignore[arg-type]
        return {name: whole[name] for name in ("BM25 sum", "words", label_panels.LINEAR)}

    with pytest.MonkeyPatch.context() as patched:
        for module in (calibrated_fusion, label_runs):
            patched.setattr(module, "encoder", small)
        patched.setattr(label_runs, "default_panel", few)
        yield


def test_folds_keep_equal_texts_apart_unless_copies_are_asked_for(folder: Path) -> None:
    for fold in range(2):
        sound, paper = label_fold(str(folder), fold), label_fold(str(folder), fold, copies=True)
        assert not set(sound.test.texts) & set(sound.train.texts + sound.validation.texts)
        assert not set(sound.validation.texts) & set(sound.train.texts)
        assert len(paper.train) + len(paper.validation) + len(paper.test) == 160
        assert sound.single
        assert sound.head.sum() == 2


def test_confidence_and_agreement_are_measured_on_first_answers() -> None:
    # texts 1 to 4: both right; only the surer is right; only the less sure is right; both wrong alike
    answers = {"1": ("a", "a"), "2": ("a", "b"), "3": ("b", "a"), "4": ("b", "b")}
    sure = {"1": (0.9, 0.75), "2": (0.8, 0.5), "3": (0.7, 0.45), "4": (0.2, 0.1)}
    runs = [
        Run.of(list(answers), [pair[at] for pair in answers.values()], np.ones(4), name=name)
        .with_probabilities(np.array([pair[at] for pair in sure.values()]))
        for at, name in enumerate(("first", "second"))
    ]  # fmt: skip
    plain, weighed = (Run.of(list(answers), list(labels), np.ones(4)) for labels in ("abbb", "aaab"))
    found = hypotheses(runs, plain, weighed, Qrels.from_dict({query: {"a": 1} for query in answers}))
    assert found["AUC of first"] == 1.0
    assert found["AUC of second"] == 0.75
    assert found["surer is right"] == 0.5
    assert found["agree"] == 0.5
    assert found["gain where they agree"] == 0.0
    assert found["gain where they differ"] == 1.0
    assert found["asymmetry and gain"] == pytest.approx(4 / 20**0.5)
    more = Run.of(["5"], ["a"], np.ones(1)).with_probabilities(np.ones(1))
    nothing = more.keep(np.zeros(1, dtype=bool))
    both = zip(runs, (nothing, more), strict=True)
    longer = [replace(Run.concat([run, other]), name=run.name) for run, other in both]
    fusions = [Run.concat([run, Run.of(["5"], ["a"], np.ones(1))]) for run in (plain, weighed)]
    qrels = Qrels.from_dict({query: {"a": 1} for query in (*answers, "5")})
    with_nothing = hypotheses(longer, *fusions, qrels)
    assert with_nothing == pytest.approx(found)


def test_a_look_takes_the_same_texts_in_every_fold(folder: Path) -> None:
    looks = [label_fold(str(folder), fold, copies=True, most=60) for fold in range(2)]
    assert looks[0].texts == looks[1].texts
    assert 40 < sum(map(len, (looks[0].train, looks[0].validation, looks[0].test))) < 80


def test_texts_without_folds_are_dealt_by_text_with_all_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    from isthmus.tables import Corpus, Documents, Qrels, Queries

    count = 60
    names = tuple(f"t{at}" for at in range(count))
    texts = tuple(f"text {at // 2}" for at in range(count))
    labels = Documents(("a", "b"), ("a", "b"), ("", ""), np.zeros(2, dtype=np.int64))
    right = {name: ({"a": 1} if at % 2 else {"b": 1, "a": 1}) for at, name in enumerate(names)}
    queries = Queries(names, texts, np.zeros(count, dtype=np.int64), ("train",) * count)
    corpus = Corpus("many", labels, queries, Qrels.from_dict(right))
    monkeypatch.setattr(label_folds, "load", lambda data: corpus)
    sound, paper = label_fold("many", 3), label_fold("many", 3, copies=True)
    parts = [set(part.texts) for part in (sound.train, sound.validation, sound.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 30
    assert not sound.single
    assert paper.single
    assert len(paper.train) + len(paper.validation) + len(paper.test) == 90
    labels_of_text = {
        (text, label)
        for part in (paper.train, paper.validation, paper.test)
        for text, label in zip(part.texts, part.labels.argmax(axis=1).tolist(), strict=True)
    }
    assert len(labels_of_text) == 30, "all copies of a text have the label of the last"
    assert {label for _, label in labels_of_text} == {0}, "the last copy of each text is a's"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, folder: Path, light: None) -> Path:
    """The folder of a finished reproduction."""
    where = tmp_path_factory.mktemp("run")
    reproduce(Config(data=str(folder), scale="smoke"), where, workers=1)
    return where


def test_every_table_has_its_cells_in_both_modes(folder: Path, out: Path) -> None:
    file = out / "values.csv"
    found = reproduce(Config(data=str(folder), scale="smoke"), out, workers=1, values=file)
    assert found.wrote[-1] == file
    tables = {(cell.table, cell.mode) for cell in found.cells}
    assert tables >= {(table, mode) for table in (*TABLES, "fig1") for mode in ("paper", "sound")}
    assert ("hypotheses", "sound") in tables
    values = {(cell.table, cell.row, cell.mode, cell.part, cell.measure): cell for cell in found.cells}
    default = values["V", "default", "sound", "all", "P@1"]
    assert default.n == 2
    assert default.low is None, "two folds have no interval"
    assert 60 < default.value <= 100
    by_fold = means_of(read_per_query(file), by=("method", "measure", "fold"))
    texts = [one["value"] for one in by_fold if (one["method"], one["measure"]) == ("default", "P@1")]
    assert 100 * np.mean(texts) == pytest.approx(default.value), "the table, made again"
    readings = {cell.row for cell in found.cells if cell.table == "readings"}
    assert {"BM25 of training texts (code)", "BM25 of label texts (print)"} < readings
    assert len(readings) == 8, "four retrievers and the pairs of a sparse and a dense one"
    sizes = {cell.measure: cell.value for cell in found.cells if (cell.table, cell.mode) == ("I", "paper")}
    assert sizes == {"texts": 160, "labels": 5, "labels a text": 1}
    ways = {cell.variant for cell in found.cells if (cell.table, cell.row) == ("VII", "Platt")}
    assert {"UDLF-RLSIM/zmuv", "eq. (15)/zmuv"} < ways, "under the key of the printed rows"
    oracle, honest = (values["V", "base", mode, "all", "P@1"].value for mode in ("paper", "sound"))
    assert oracle >= honest, "fewer competing labels cannot be harder"
    told = json.loads((out / "cells.json").read_text())
    keys = [
        "table",
        "row",
        "part",
        "variant",
        "mode",
        "data",
        "measure",
        "value",
        "low",
        "high",
        "n",
        "paper",
    ]
    assert list(told[0]) == keys
    page = (out / "report.html").read_text()
    assert "Figure 1" in page
    assert "the leak" in page
    plain = (out / "report.md").read_text()
    assert "Table V" in plain
    pictures = re.findall(r"!\[[^]]*\]\((figures/[^)]*\.svg)\)", plain)
    assert len(pictures) == len(set(pictures)) == page.count("<svg")
    assert all((out / picture).read_text().lstrip().startswith(("<?xml", "<svg")) for picture in pictures)


def test_acm_and_trec_say_what_is_not_there() -> None:
    cells = tuple(calibrated_fusion._all_cells((), {}, Config()))
    assert {cell.data for cell in cells} == {"acm"}
    assert all(np.isnan(cell.value) and cell.paper is not None for cell in cells)
    page = calibrated_fusion._page((), {}, cells, Config()).markdown()
    assert "The data of ACM are absent" in page
    assert "TREC is not among" not in page
    assert "TREC is not among the paper's sets" in calibrated_fusion._lead(("trec",), {}, Config())


def test_paper_mode_is_the_weighted_mean_of_head_and_tail(folder: Path) -> None:
    fold = calibrated_fusion.Fold(label_runs.two_retrievers(str(folder), 0, "paper"))
    sizes = {part: label_fold(str(folder), 0, copies=True) for part in ("head", "tail")}
    share = {
        part: size.test.labels[:, size.partition(part)].any(axis=1).mean() for part, size in sizes.items()
    }
    for way in (Way("base", "CombMNZ", "none"), Way("Platt", "CombMULT-Conf", "zmuv")):
        whole, head, tail = (fold.value(way, "P@1", part=part) for part in ("all", "head", "tail"))
        assert whole == pytest.approx(share["head"] * head + share["tail"] * tail)
    apart = sizes["head"]
    scores = {"any": np.random.default_rng(0).random(apart.test.labels.shape)}
    parts = label_runs.label_lists(apart, "test", scores, oracle_partition=True)
    assert set(parts) == {"head", "tail"}
    for part, lists in parts.items():
        mine = {label for label, own in zip(apart.documents.ids, apart.partition(part), strict=True) if own}
        assert set(lists.runs[0].documents.tolist()) == mine, "only labels of the true one's part compete"


def test_sound_mode_asks_each_fold_s_own_validation_and_paper_mode_all_of_test() -> None:
    def fold(**values: tuple[float, float]) -> calibrated_fusion.Fold:
        records = [
            {**Way("base", name, "none")._asdict(), "split": split, "part": "all", "means": {"P@1": value}}
            for name, pair in values.items()
            for split, value in zip(("validation", "test"), pair, strict=True)
        ]
        return calibrated_fusion.Fold({"metrics": records, "calibration": []})

    folds = [fold(A=(0.9, 0.1), B=(0.8, 0.9)), fold(A=(0.1, 0.5), B=(0.2, 0.6))]
    first, second = Way("base", "A", "none"), Way("base", "B", "none")
    assert calibrated_fusion.chosen(folds, "base", "sound", "P@1") == [first, second]
    assert calibrated_fusion.chosen(folds, "base", "paper", "P@1") == [second, second]


def test_a_killed_run_repeats_only_what_is_missing(
    folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(data=str(folder), scale="smoke")
    before = (out / "cells.json").read_text()
    (out / "results" / "small_1_default.json").unlink()
    (out / "results" / ".half.part").write_text("{")
    computed: list[int] = []
    real = label_runs.default_stack

    def counted(data: str, fold: int, **given: int) -> dict[str, object]:
        computed.append(fold)
        return real(data, fold, **given)

    monkeypatch.setattr(calibrated_fusion, "default_stack", counted)
    reproduce(config, out, workers=1)
    assert computed == [1]
    assert "5 of 6 units are there; under a minute for the rest" in capsys.readouterr().err
    assert (out / "cells.json").read_text() == before
    assert not (out / "results" / ".half.part").exists()


def test_a_folder_of_another_run_is_refused(folder: Path, out: Path) -> None:
    with pytest.raises(ConfigError, match="another configuration"):
        reproduce(Config(data=str(folder), scale="smoke", seed=9), out)


def test_cells_stand_side_by_side() -> None:
    cells = [
        Cell("V", "Platt", "P@1", 90.0, "paper", "x", paper=92.3),
        Cell("V", "Platt", "P@1", 85.0, "sound", "x"),
        Cell("V", "default", "P@1", 88.0, "sound", "x"),
    ]
    table = cells_table(cells, "Table V")
    assert table.header == ("row", "part", "P@1 printed", "P@1 paper mode", "P@1 sound")
    assert [row[0] for row in table.rows] == ["Platt", "default"]
    assert table.rows[0][2] == 92.3
    assert table.rows[1][3] is None


def test_many_measures_stand_in_columns_and_their_sources_below_each_other() -> None:
    cells = [
        Cell("V", row, f"P@{k}", 80.0 + k, mode, "x", paper=90.0 + k if row == "Platt" else None)
        for row in ("Platt", "default")
        for k in (1, 3, 5, 10)
        for mode in ("paper", "sound")
        if (row, mode) != ("default", "paper")
    ]
    table = cells_table(cells, "Table V")
    assert table.header == ("row", "part", "figures", "P@1", "P@3", "P@5", "P@10")
    assert [(row[0], row[2]) for row in table.rows] == [
        ("Platt", "printed"),
        ("Platt", "paper mode"),
        ("Platt", "sound"),
        ("default", "sound"),
    ]
    assert table.rows[0][3:] == (91.0, 93.0, 95.0, 100.0)


def test_a_single_fold_has_no_interval_and_a_missing_figure_is_null() -> None:
    alone = Cell.over_folds([1.5], table="V", row="r", measure="P@1", mode="sound", data="x")
    assert (alone.value, alone.low, alone.n) == (1.5, None, 1)
    nothing = Cell.over_folds([], table="V", row="r", measure="P@1", mode="sound", data="x")
    assert nothing.record()["value"] is None
