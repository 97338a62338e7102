"""An encoder tuned for a fold, beside the default: weighed on validation, taken where it helps, no leaks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from isthmus.classification import as_run
from isthmus.encoders import TuningTexts
from isthmus.encoders.folders import write_tuned_on
from isthmus.errors import ConfigError, DataError
from isthmus.tables import Documents
from isthmus_reproduce.fusion.experiment import _default_cells
from isthmus_reproduce.fusion.folds import LabelFold, Part
from isthmus_reproduce.fusion.runs import default_stack
from isthmus_reproduce.fusion.tuned import (
    TUNED,
    WITH_TUNED,
    WITHOUT_TUNED,
    _without,
    fold_folder,
    tune_fold,
    weigh,
)
from tiny_encoders import WORDS, lookup_encoder

LABELS = Documents(("fruit", "colour"), ("pear", "red"), ("apple", "green"), np.zeros(2, dtype=np.int64))
KINDS = (("pear", "apple"), ("red", "green"))


def part(name: str, count: int, seed: int) -> Part:
    """Texts that name a fruit or a colour, and a number that makes each a text of its own."""
    rng = np.random.default_rng(seed)
    right = rng.integers(0, 2, count)
    texts = tuple(f"{rng.choice(KINDS[kind])} {name} {at}" for at, kind in enumerate(right))
    return Part(tuple(f"{name}{at}" for at in range(count)), texts, np.eye(2, dtype=bool)[right])


FOLD = LabelFold("words", LABELS, part("train", 40, 1), part("validation", 120, 2), part("test", 120, 3))


def default(texts: Part, wrong: float, seed: int) -> object:
    """Lists of a default that is wrong for a share of texts."""
    rng = np.random.default_rng(seed)
    scores = texts.labels + rng.normal(scale=0.3, size=texts.labels.shape)
    flipped = rng.random(len(texts)) < wrong
    scores[flipped] = scores[flipped][:, ::-1]
    return as_run(texts.ids, LABELS.ids, scores, 2, "default")


def encoder(folder: Path, *, knowing: bool) -> Path:
    """A table of vectors that tells fruit from colours, or pear and red from the others."""
    kinds = KINDS if knowing else zip(*KINDS, strict=True)
    table = np.array([[float(word in kind) for word in WORDS] for kind in kinds] + [[0.1] * len(WORDS)]).T
    lookup_encoder(folder, table.astype(np.float32))
    write_tuned_on(folder, FOLD.train.texts)
    return folder


def weighed(folder: Path, wrong: float):
    return weigh(FOLD, folder, default(FOLD.validation, wrong, 4), default(FOLD.test, wrong, 5))


def test_validation_takes_an_encoder_that_helps_and_leaves_one_that_does_not(tmp_path: Path) -> None:
    helpful = weighed(encoder(tmp_path / "knowing", knowing=True), 0.2)
    assert helpful.included
    assert [run.name for run in helpful.runs] == [TUNED, WITH_TUNED]
    first = helpful.record["validation P@1"]
    assert first[TUNED] == 1
    assert first[WITHOUT_TUNED] < 0.9 < first[WITH_TUNED]
    assert not weighed(encoder(tmp_path / "ignorant", knowing=False), 0.2).included


def test_an_encoder_that_has_seen_a_text_of_validation_or_test_is_refused(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "leaking", knowing=True)
    for name in ("validation", "test"):
        write_tuned_on(folder, [*FOLD.train.texts, getattr(FOLD, name).texts[7].upper()])
        with pytest.raises(DataError, match=f"was tuned on 1 of the 120 {name} texts"):
            weighed(folder, 0.2)


def test_posts_that_are_equal_without_markup_are_not_learned_from() -> None:
    texts = TuningTexts(["Good day", "good night", "a pear"], [[0], [1], [0]])
    rest = _without(texts, {"GOOD DAY", "apple"})
    assert (list(rest.texts), list(rest.labels)) == (["good night", "a pear"], [[1], [0]])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A label set of two labels and ten equal folds; a word in four is of the other label."""
    folder, rng = tmp_path / "words", np.random.default_rng(6)
    (folder / "folds").mkdir(parents=True)
    right = rng.integers(0, 2, 200)
    shown = np.where(rng.random(200) < 0.25, 1 - right, right)
    texts = [f"{rng.choice(KINDS[kind])} number{at}" for at, kind in enumerate(shown)]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in right))
    parts = {"train": list(range(120)), "val": list(range(120, 160)), "test": list(range(160, 200))}
    described = {"label_descriptions": {"0": "pear apple", "1": "red green"}}
    for fold in range(10):
        (folder / "folds" / f"{fold}.json").write_text(json.dumps(parts | described))
    return folder


def test_a_fold_without_an_encoder_needs_torch(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_TORCH_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="cannot be run"):
        tune_fold(tmp_path / "tuned", str(data), 0)


def test_the_default_stands_in_the_table_with_and_without_its_tuned_encoder(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "none"))  # latent semantics are quicker
    encoder(fold_folder(tmp_path / "tuned", str(data), 0), knowing=True)
    result = default_stack(str(data), 0, tuned=str(tmp_path / "tuned"))
    assert set(result["tuned"]) == {"validation P@1", "validation log-loss", "tuning", "included"}
    cells = {cell.row: cell for cell in _default_cells("words", [result]) if cell.measure == "P@1"}
    assert {TUNED, WITH_TUNED, WITHOUT_TUNED, "default"} <= set(cells)
    chosen = WITH_TUNED if result["tuned"]["included"] else WITHOUT_TUNED
    first = {row["run"]: row["means"]["P@1"] for row in result["metrics"] if row["part"] == "all"}
    assert first["default"] == first[chosen]
    assert first[TUNED] > 0.6
