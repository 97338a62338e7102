"""Classifiers and labelled texts from somebody else: refused in one line, or harmless."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from command_line import isthmus
from isthmus.classification import (
    LabelVectors,
    MultiLabelClassifier,
    SparseNeighbours,
    TextRows,
    from_lists,
    load_multilabel,
    read_labelled,
    sparse_rankers,
    stream_texts,
)
from isthmus.classification.sparse import read_arrays, write_arrays
from isthmus.errors import DataError, IsthmusError


def world(count: int, labels: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts with a word of each of their labels."""
    rng = np.random.default_rng(seed)
    rows = []
    for at in range(count):
        own = rng.choice(labels, 2, replace=False).tolist()
        words = [f"word{label}" for label in own] + [f"common{rng.integers(9)}" for _ in range(4)]
        rows.append({"id": f"t{at}", "text": " ".join(words), "labels": [f"label {label}" for label in own]})
    return rows


def json_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    data = read_labelled(json_lines(folder / "train.jsonl", world(150, 8)))
    MultiLabelClassifier(folds=2).fit(data, folder / "model")
    return folder / "model"


def arrays(file: str, **changes: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """A change to some arrays of a file."""

    def change(home: Path) -> None:
        stored = read_arrays(home / file)
        write_arrays(home / file, **(stored | {name: made(stored[name]) for name, made in changes.items()}))

    return change


def text(file: str, content: str) -> Callable[[Path], None]:
    return lambda home: (home / file).write_text(content) and None


def about(**changes: Any) -> Callable[[Path], None]:
    def change(home: Path) -> None:
        file = home / "classifier.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


TAMPERED: dict[str, Callable[[Path], None]] = {
    "fewer labels": text("labels.json", '["a", "b"]'),
    "labels that are one word": text("labels.json", '"abcdefgh"'),
    "a label twice": text("labels.json", json.dumps(["same"] * 8)),
    "nested beyond reading": text("labels.json", "[" * 100_000),
    "no object": text("classifier.json", "[]"),
    "nested settings": text("classifier.json", '{"a":' * 100_000),
    "settings of another kind": about(settings={"preset": "default", "shell": "rm"}),
    "no bands": about(bands="abc"),
    "ranker of another kind": text("model-ranker-0/done", "os.system"),
    "counts of other labels": arrays("labels.npz", counts=lambda array: array[:3]),
    "words fewer than weights": arrays("model-space/space.npz", words=lambda array: array[:20]),
    "fewer directions": arrays("model-space/space.npz", components=lambda array: array[:, :2]),
    "fewer weights": arrays("model-space/space.npz", rarity=lambda array: array[:2]),
    "weights that are no numbers": arrays(
        "model-ranker-3/linear.npz", intercepts=lambda array: np.full_like(array, np.nan)
    ),
    "more labels listed": arrays("model-ranker-3/linear.npz", always=lambda array: np.ones(10**5, bool)),
    "texts that are not there": arrays(
        "model-ranker-0/labels.npz", **{"labels.shape": lambda array: array * 2}
    ),
    "rows of words": arrays(
        "model-ranker-0/labels.npz", **{"labels.data": lambda array: np.full(len(array), "x")}
    ),
    "bands beyond all": arrays("model-held-out/held_out.npz", bands=lambda array: array + 1000),
    "fewer bands": arrays("model-held-out/held_out.npz", names=lambda array: array[:2]),
    "fusion of fewer rankers": lambda home: text(
        "model-fusion/fusion.json",
        json.dumps(json.loads((home / "model-fusion/fusion.json").read_text()) | {"weights": [1.0]}),
    )(home),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_folder_whose_parts_do_not_fit_is_refused(how: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    TAMPERED[how](tmp_path / "model")
    with pytest.raises(IsthmusError):
        load_multilabel(tmp_path / "model")


def test_a_refused_folder_is_one_line_of_the_command(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model")
    TAMPERED["more labels listed"](tmp_path / "model")
    new = json_lines(tmp_path / "new.jsonl", world(3, 8))
    refused = isthmus("classify", "predict", tmp_path / "model", new, check=False)
    assert refused.returncode == 1
    assert "parts of different classifiers" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_link_in_the_place_of_a_stage_is_not_followed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "done").write_text("mine")
    home = tmp_path / "model"
    home.mkdir()
    (home / "fit.json").write_text('{"fingerprint": "another"}')
    (home / "stage-0-0").symlink_to(foreign)
    data = read_labelled(json_lines(tmp_path / "train.jsonl", world(120, 5)))
    with pytest.raises(DataError, match="is a link"):
        MultiLabelClassifier(folds=2).fit(data, home)
    assert (foreign / "done").read_text() == "mine"


ROWS: dict[str, tuple[str, str]] = {
    "nested beyond reading": ('{"text": "a", "labels": ' + "[" * 100_000, "not JSON"),
    "labels that are an object": ('{"text": "a", "labels": {"b": 1}}', "neither words nor numbers"),
    "lists in lists": ('{"text": "a", "labels": [["b"], ["c"]]}', "neither words nor numbers"),
    "half a character": ('{"text": "a \\ud800", "labels": ["b", "c"]}', "half a character"),
    "half a character in a label": ('{"text": "a", "labels": ["b", "\\udfff"]}', "half a character"),
    "a number of 10,000 digits": ('{"text": "a", "labels": [' + "9" * 10_000 + "]}", "not JSON"),
}


@pytest.mark.parametrize("how", ROWS)
def test_a_row_that_cannot_be_read_is_named(how: str, tmp_path: Path) -> None:
    line, problem = ROWS[how]
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "first", "labels": ["b", "c"]}\n' + line + "\n")
    with pytest.raises(DataError, match=problem):
        read_labelled(path)


def test_names_of_labels_are_only_names(tmp_path: Path) -> None:
    """Control characters, line ends, separators, formulas, paths: none is more than a name."""
    strange = [
        "a;b",
        "line\nbreak",
        "\x1b[2Jcleared",
        '"quoted",comma',
        "../../etc",
        "=1+1",
        "\u202etfel",
        "tab\t",
    ]
    rows = world(150, 8)
    for row in rows:
        row["labels"] = [strange[int(name.split()[1])] for name in row["labels"]]
    train = json_lines(tmp_path / "train.jsonl", rows)
    learned = isthmus("classify", "fit", train, "-o", tmp_path / "model", "--folds", 2)
    assert "\x1b[2J" not in learned.stdout + learned.stderr
    new = json_lines(tmp_path / "new.jsonl", world(5, 8, seed=3))
    isthmus("classify", "predict", tmp_path / "model", new, "-o", tmp_path / "out.jsonl", "--top", 8)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    said = {one["label"] for answer in answers for one in answer["labels"]}
    assert said <= {name.strip() for name in strange}
    assert len(answers) == 5
    table = isthmus("classify", "predict", tmp_path / "model", new)
    assert "\x1b" in table.stdout, "data go to a file as they are"
    assert '"line\nbreak"' in table.stdout


def test_numbers_on_a_first_line_do_not_make_texts_rows_of_features(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("12 5 7\nthe second text\n3\n")
    assert list(stream_texts(path)) == [(["1", "2", "3"], ["12 5 7", "the second text", "3"])]
    path.write_text("2 5 7\n0,2 1:0.5\n 3:1\n")
    ((ids, rows),) = stream_texts(path)
    assert ids == ["0", "1"]
    assert rows.shape == (2, 5)


def test_an_id_that_stands_twice_is_refused_across_batches(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "new.jsonl", [*world(5, 4), {"id": "t1", "text": "again"}])
    with pytest.raises(DataError, match="the id 't1' stands twice"):
        list(stream_texts(path, batch=2))


@pytest.mark.parametrize("header", ["2 1000000000 5", "2 5 1000000000"])
def test_a_header_cannot_ask_for_more_than_there_is_memory(header: str, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text(f"{header}\n0 1:1\n1 2:1\n")
    with pytest.raises(DataError, match="4,000,000 are the most"):
        read_labelled(path)


def test_one_text_with_all_labels_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, width, most = 60, 3_000, 4_000
    rng = np.random.default_rng(0)
    vectors = rng.random((texts, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = TextRows(csr_array(np.ones((texts, 4), np.float32)), vectors)
    right = from_lists([range(width), *rng.integers(0, width, (texts - 1, 1)).tolist()], width)
    sizes, best = [], sparse_rankers.best_per_row
    monkeypatch.setattr(sparse_rankers, "MOST_ENTRIES", most)
    monkeypatch.setattr(sparse_rankers, "EXACT", 10)
    monkeypatch.setattr(
        sparse_rankers, "best_per_row", lambda scores, k: sizes.append(scores.nnz) or best(scores, k)
    )
    for ranker in (
        SparseNeighbours("vectors", k=texts),
        SparseNeighbours("vectors", k=texts, pool="max"),
        LabelVectors(near=texts),
    ):
        listed = ranker.fit(rows, right, TextRows(csr_array((width, 4)))).candidates(rows, 64)
        assert np.diff(listed.indptr).tolist() == [64] * texts
    assert max(sizes) <= most + width, "as much as fits, and one text more"
