"""Tuning of encoders: which texts are learned from, what is refused before any work, the graph that is made.

What needs torch is a long trial: it runs where ISTHMUS_TORCH_PYTHON names an interpreter that has it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from isthmus.classification import TextClassifier, read_labelled, report_of
from isthmus.cli import main
from isthmus.cli.encoder import tuning_parts
from isthmus.encoders import TuningSettings, TuningTexts, add_encoder, load_encoder, read_tuned, tune
from isthmus.encoders.folders import sha256, write_tuned_on
from isthmus.encoders.tuning import SCRIPT, WORK, _export
from isthmus.errors import ConfigError, DataError
from oracles.numpy_bert import token_vectors
from tiny_encoders import WORDS, lookup_encoder, random_bert

LABELS = ("fruit: pear apple", "colour: red green")
TEXTS = [f"{first} {second} {third}" for first in WORDS[4:] for second in WORDS[4:] for third in WORDS[4:]]


def part(texts: list[str]) -> TuningTexts:
    """A text is of fruit if it names one, else of colour."""
    return TuningTexts(texts, [[0 if {"pear", "apple"} & set(text.split()) else 1] for text in texts])


TRAIN, VALIDATION = part(TEXTS[::2]), part(TEXTS[1::8])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random BERT of a few words, with all that transformers wants to know of it."""
    folder = random_bert(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": len(WORDS), "intermediate_size": 16, "type_vocab_size": 2, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder


@pytest.fixture
def torch_python() -> str:
    named = os.environ.get("ISTHMUS_TORCH_PYTHON", "")
    if not named:
        pytest.skip("ISTHMUS_TORCH_PYTHON names no interpreter with torch: make soak sets it")
    return named


def labelled(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(("text,label,split", *rows)) + "\n")
    return path


def test_texts_of_the_test_split_are_never_learned_from(tmp_path: Path) -> None:
    rows = ["one,a,train", "two,b,train", "Three ,a,train", "four,b,train", "two,b,validation"]
    rows += ["five,a,validation", "four,a,validation", "three,a,test", "FOUR,b,test"]
    data = read_labelled(labelled(tmp_path / "texts.csv", rows))
    train, validation = tuning_parts(data, 0.1, 0)
    assert train.texts == ("one",)
    assert validation.texts == ("two", "five")


def test_without_a_validation_split_equal_texts_are_held_out_together(tmp_path: Path) -> None:
    rows = [f"text {number % 50},{'ab'[number % 2]},train" for number in range(100)] + ["unseen,a,test"]
    data = read_labelled(labelled(tmp_path / "texts.csv", rows))
    train, validation = tuning_parts(data, 0.2, 0)
    assert len(train) + len(validation) == 100
    assert 10 <= len(validation) <= 30
    assert not set(train.texts) & set(validation.texts)
    with pytest.raises(DataError, match="to choose the epoch by"):
        tuning_parts(data, 0.0, 0)


def test_without_torch_the_cure_is_named(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ISTHMUS_TORCH_PYTHON", str(tmp_path / "nowhere"))
    rows = [f"{text},{'ab'[number % 2]},train" for number, text in enumerate(TEXTS[:40])]
    data = labelled(tmp_path / "texts.csv", rows)
    arguments = ["encoder", "tune", str(data), "--base", str(base), "-o", str(tmp_path / "out")]
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert "cannot be run" in message
    assert "pip install torch transformers" in message
    assert main([*arguments, "--python", sys.executable]) in (0, 1)  # 0 where torch is beside the tests
    assert read_tuned(tmp_path / "out") is not None or "has no torch to tune with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"), [("bge-small", "a graph without weights"), ("nowhere", "no folder")]
)
def test_a_base_without_weights_is_refused_first(tmp_path: Path, name: str, problem: str) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(ConfigError, match=f"{problem}.*minilm"):
        tune(name, tmp_path / "out", LABELS, train=TRAIN, validation=VALIDATION)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_tuned_is_refused_first(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match="2 validation texts are training texts too"):
        tune(str(base), out, LABELS, train=TRAIN, validation=part([TEXTS[0], TEXTS[1], TEXTS[2].upper()]))
    with pytest.raises(DataError, match="none of the 1"):
        tune(str(base), out, LABELS[:1], train=TRAIN, validation=VALIDATION)
    (out / WORK).mkdir(parents=True)
    (out / WORK / "job.json").write_text(json.dumps({"digest": "another"}))
    with pytest.raises(DataError, match="holds another tuning"):
        tune(str(base), out, LABELS, train=TRAIN, validation=VALIDATION)
    (base / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"has no tokenizer\.json"):
        tune(str(base), out, LABELS, train=TRAIN, validation=VALIDATION)


@pytest.mark.parametrize("int8", [False, True])
def test_the_graph_is_that_of_the_tuned_weights(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, int8: bool
) -> None:
    """What torch writes becomes an encoder; vectors other than torch's are refused."""
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    folder, vectors = tmp_path / "out", []
    for ids in ([2, 4, 6, 3], [2, 5, 7, 9, 3]):
        mean = token_vectors(base, ids).mean(axis=0)
        vectors.append((mean / np.linalg.norm(mean)).tolist())
    probe = {"texts": ["red pear", "green apple me"], "vectors": vectors, "limit": 16, "best": 1}
    probe["history"] = [{"epoch": 1, "MRR": 0.9, "P@1": 0.8, "seconds": 2.0}]

    def written(changed: dict[str, object]) -> None:
        shutil.copytree(base, folder / WORK / "model")
        (folder / WORK / "model" / "probe.json").write_text(json.dumps(probe | changed))

    about = load_description(base)
    written({"vectors": vectors[::-1]})
    with pytest.raises(DataError, match="with torch's"):
        _export(folder, base, about, "digest", TRAIN.texts, int8)
    assert read_tuned(folder) is None
    shutil.rmtree(folder)
    written({})
    tuned = _export(folder, base, about, "digest", TRAIN.texts, int8)
    assert tuned.validation == {"MRR": 0.9, "P@1": 0.8}
    assert not (folder / WORK).exists()
    add_encoder(str(folder), name="mine")
    for encoder in (load_encoder(str(folder)), load_encoder("mine")):
        cosines = (encoder.encode(probe["texts"]) * np.array(vectors)).sum(axis=1)
        assert cosines.min() > (0.97 if int8 else 0.99999)
        assert encoder.was_tuned_on([TEXTS[0].upper(), TEXTS[1]]).tolist() == [True, False]


def load_description(folder: Path):
    from isthmus.encoders.folders import read_description

    return read_description(folder)


def test_encoders_that_were_not_tuned_know_no_text(tmp_path: Path, base: Path) -> None:
    write_tuned_on(base, [])
    (base / "model.onnx").write_bytes(b"")
    assert load_encoder(str(base)).was_tuned_on(["red", "pear"]).tolist() == [False, False]


def test_the_graph_of_a_roberta_begins_behind_its_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoBERTa is BERT with positions from 2 on: the same weights without the first two rows are that BERT."""
    numpy = pytest.importorskip("safetensors.numpy")
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "encoders"))
    bert = random_bert(tmp_path / "bert")
    weights = numpy.load_file(bert / "model.safetensors")
    table = weights["embeddings.position_embeddings.weight"]
    roberta = shutil.copytree(bert, tmp_path / "roberta")
    shifted = np.concatenate((np.full((2, table.shape[1]), 9.0, dtype=np.float32), table))
    renamed = {f"roberta.{name}": array for name, array in weights.items()}
    renamed["roberta.embeddings.position_embeddings.weight"] = shifted
    numpy.save_file(renamed, roberta / "model.safetensors")
    config = json.loads((bert / "config.json").read_text())
    change = {"model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": len(shifted)}
    (roberta / "config.json").write_text(json.dumps(config | change))
    for folder in (bert, roberta):
        add_encoder(str(folder))
    texts = ["red pear", "find me a green apple : me"]
    ours, theirs = (load_encoder(name) for name in ("roberta", "bert"))
    np.testing.assert_array_equal(ours.encode(texts), theirs.encode(texts))
    assert ours.limit == theirs.limit == len(table) - 2


SHORT = TuningSettings(epochs=3, batch=16, rate=0.01, max_tokens=8)


@pytest.mark.soak
@pytest.mark.parametrize(("layers", "int8"), [(0, False), (1, True)])
def test_a_tuned_encoder_tells_labels_apart_without_torch(
    tmp_path: Path, base: Path, torch_python: str, layers: int, int8: bool
) -> None:
    lines: list[dict[str, float]] = []
    settings = TuningSettings(epochs=12, patience=12, batch=16, rate=0.01, max_tokens=8, layers=layers)
    tuned = tune(
        str(base),
        tmp_path / "out",
        LABELS,
        train=TRAIN,
        validation=VALIDATION,
        settings=settings,
        python=torch_python,
        int8=int8,
        report=lambda facts: lines.append(dict(facts)),
    )
    assert tuned.validation["P@1"] > 0.95
    assert max(line["MRR"] for line in lines if "MRR" in line) == tuned.validation["MRR"]
    encoder = load_encoder(str(tmp_path / "out"))
    fresh = part(TEXTS[3::8])
    first = (encoder.encode(fresh.texts) @ encoder.encode(LABELS).T).argmax(axis=1)
    assert np.mean(first == np.array(fresh.labels)[:, 0]) > 0.95
    assert encoder.was_tuned_on(TRAIN.texts).all()
    assert not encoder.was_tuned_on(fresh.texts).any()
    assert not (tmp_path / "out" / WORK).exists()
    again = tune(
        str(base),
        tmp_path / "out",
        LABELS,
        train=TRAIN,
        validation=VALIDATION,
        settings=settings,
        int8=int8,
        python="no Python is needed for what is done",
    )
    assert again.history == tuned.history


LOSS = """
import json, sys
sys.path.insert(0, {folder!r})
import torch, torch_tuning as t
logits, same = (torch.tensor(each) for each in json.loads({arrays!r}))
own = torch.eye(4, dtype=torch.bool)
print(json.dumps([t.contrast(logits, same).item(), t.contrast(logits, same, own).item()]))
"""


@pytest.mark.soak
def test_the_loss_is_nt_xent(torch_python: str) -> None:
    """−mean over a of mean over p ∈ P(a) of log(exp(a·p/τ) / Σ_b exp(a·b/τ)), b ≠ a among texts."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, 4))
    same = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=bool)
    arrays = json.dumps([logits.tolist(), same.tolist()])
    program = LOSS.format(folder=str(SCRIPT.parent), arrays=arrays)
    done = subprocess.run([torch_python, "-c", program], capture_output=True, text=True, check=True)
    expected = []
    for left_out in (False, True):
        each = []
        for row in range(4):
            others = [at for at in range(4) if not (left_out and at == row)]
            total = np.log(np.exp(logits[row, others]).sum())
            if positives := [at for at in others if same[row, at]]:
                each.append(np.mean([total - logits[row, at] for at in positives]))
        expected.append(np.mean(each))
    np.testing.assert_allclose(json.loads(done.stdout), expected, rtol=1e-5)


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import test_tuning as t
parts = {{"train": t.TRAIN, "validation": t.VALIDATION}}
t.tune({base!r}, {out!r}, t.LABELS, **parts, settings=t.SHORT, python={python!r},
       report=lambda facts: print(facts, flush=True))
"""


@pytest.mark.soak
def test_a_tuning_that_was_killed_ends_as_if_it_had_not_been(
    tmp_path: Path, base: Path, torch_python: str
) -> None:
    def started(out: Path) -> subprocess.Popen[str]:
        about = {"tests": str(Path(__file__).parent), "base": str(base), "out": str(out)}
        program = PROGRAM.format(**about, python=torch_python)
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)

    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    with started(straight) as process:
        process.communicate()
    with started(stopped) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "MRR" in line:  # the first epoch's checkpoint is on disk
                os.kill(process.pid, signal.SIGKILL)
                break
    assert read_tuned(stopped) is None
    while _running(stopped):
        time.sleep(0.1)
    assert (stopped / WORK / "checkpoint.pt").exists()
    with started(stopped) as process:
        output, _ = process.communicate()
    assert "resumed" in output
    first, second = read_tuned(straight), read_tuned(stopped)
    assert first is not None
    assert second is not None
    assert [one["loss"] for one in first.history] == [one["loss"] for one in second.history]
    assert sha256(straight / "model.onnx") == sha256(stopped / "model.onnx")


def _running(out: Path) -> bool:
    """Whether torch still works in a folder."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return str(out / WORK) in listed


def test_a_classifier_rests_on_texts_that_its_encoder_was_not_tuned_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cross-fitted answers for texts that were tuned on would flatter it."""
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    kinds = [[float(word in kind) for word in WORDS] for kind in (("pear", "apple"), ("red", "green"))]
    table = np.array([*kinds, [0.1] * len(WORDS)], dtype=np.float32).T
    folder = lookup_encoder(tmp_path / "encoder", table)
    rows = [f"{word} {number},{word},train" for number in range(50) for word in ("pear", "red")]
    data = read_labelled(labelled(tmp_path / "texts.csv", rows))
    write_tuned_on(folder, data.texts[:60])
    classifier = TextClassifier(encoder=str(folder)).fit(data)
    assert set(classifier.held_out_.queries) == set(data.ids[60:])
    report = report_of(classifier.held_out_, data.qrels, data.names)
    assert (report.measures["texts"], report.measures["P@1"]) == (40, 1)
    write_tuned_on(folder, data.texts[:80])
    with pytest.raises(DataError, match="tuned on 80 of these 100 texts"):
        TextClassifier(encoder=str(folder)).fit(data)
