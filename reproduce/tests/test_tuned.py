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
from isthmus_reproduce.fusion.folds import LabelFold, Part
from isthmus_reproduce.fusion.tuned import TUNED, WITH_TUNED, WITHOUT_TUNED, _without, tune_fold, weigh
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


def test_a_fold_without_an_encoder_needs_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "words"
    (data / "folds").mkdir(parents=True)
    texts = [f"{word} {number}" for number in range(30) for word in ("pear", "red")]
    (data / "texts.txt").write_text("\n".join(texts) + "\n")
    (data / "labels.txt").write_text("0\n1\n" * 30)
    for fold in range(10):
        parts = {"train": list(range(40)), "val": list(range(40, 50)), "test": list(range(50, 60))}
        described = {"label_descriptions": {"0": "fruit", "1": "colour"}}
        (data / "folds" / f"{fold}.json").write_text(json.dumps(parts | described))
    monkeypatch.setenv("ISTHMUS_TORCH_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="cannot be run"):
        tune_fold(tmp_path / "tuned", str(data), 0)
