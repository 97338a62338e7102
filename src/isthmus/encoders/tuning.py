"""Fine-tuning of an encoder on labelled texts: in another Python that has torch, used afterwards without it.

    OUT/encoder.json, model.onnx, tokenizer.json    the encoder, as `load_encoder` and `encoder add` read it
    OUT/config.json, model.safetensors, …           the same weights as sentence-transformers reads them
    OUT/tuned_on.txt                                hashes of the texts that it was tuned on
    OUT/tuning/                                     the job, its checkpoint and its log, until it is done

`torch_tuning.py` does the tuning and describes it; the graph is built here, as for any BERT, and compared
with torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.encoders.bert import bert_config, bert_graph
from isthmus.encoders.downloads import bring
from isthmus.encoders.folders import (
    CONFIG,
    MODEL,
    TOKENIZER,
    WEIGHTS,
    Description,
    read_description,
    read_json,
    sha256,
    text_hash,
    write_tuned_on,
)
from isthmus.encoders.onnx import OnnxEncoder
from isthmus.encoders.presets import PRESETS
from isthmus.errors import ConfigError, DataError, check_extra
from isthmus.files import locked

SCRIPT = Path(__file__).with_name("torch_tuning.py")
NEEDED = ("torch", "transformers", "tokenizers", "safetensors")
PYTHON = "ISTHMUS_TORCH_PYTHON"
WORK, JOB, RECORD = "tuning", "job.json", "tuning.json"
ALIKE = {False: 0.999, True: 0.97}
"""Minimum cosine between torch's vectors and the graph's, in float32 (False) and in int8 (True)."""


@dataclass(frozen=True)
class TuningSettings:
    """How an encoder is tuned; the paper's values where it states any, for a model a third of its size."""

    epochs: int = 5
    patience: int = 2
    """Epochs without a better validation MRR after which tuning ends."""
    batch: int = 64
    rate: float = 1e-4
    decay: float = 0.01
    temperature: float = 0.07
    texts: float = 1.0
    """Weight of the loss over pairs of texts, relative to pairs of a text and a label."""
    layers: int = 0
    """Number of upper layers that are tuned; 0 for all, including the embeddings."""
    max_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True, eq=False)
class TuningTexts:
    """Texts, and the numbers of the labels of each."""

    texts: Sequence[str]
    labels: Sequence[Sequence[int]]

    def record(self) -> dict[str, Any]:
        """The texts and labels in the form of job.json."""
        return {"texts": list(self.texts), "labels": [list(map(int, each)) for each in self.labels]}


@dataclass(frozen=True)
class Tuned:
    """The result of tuning: the folder, loss and validation of every epoch, and the best epoch, counted from
    1."""

    folder: Path
    history: Sequence[Mapping[str, float]]
    best: int

    @property
    def validation(self) -> Mapping[str, float]:
        """MRR and P@1 of the best epoch, with labels ranked by cosine."""
        return {name: self.history[self.best - 1][name] for name in ("MRR", "P@1")}

    @property
    def seconds(self) -> float:
        """Seconds of training and validation."""
        return float(self.history[-1]["seconds"])

    def record(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        about = {"folder": str(self.folder), "best": self.best, "seconds": self.seconds}
        return {**about, "validation": dict(self.validation), "history": list(self.history)}


def read_tuned(folder: Path) -> Tuned | None:
    """The result of a finished tuning in this folder; None if there is none."""
    record = read_json(folder / RECORD)
    return Tuned(folder, record["history"], record["best"]) if record else None


def tune(
    base: str,
    out: str | os.PathLike[str],
    labels: Sequence[str],
    *,
    train: TuningTexts,
    validation: TuningTexts,
    settings: TuningSettings | None = None,
    python: str | None = None,
    int8: bool = False,
    report: Callable[[Mapping[str, Any]], None] = lambda facts: None,
) -> Tuned:
    """Tune the encoder of a folder, or of a preset with weights, on texts and their labels' texts.

    The epoch with the best MRR on `validation` is used. After a kill, the same call continues from the last
    checkpoint; once tuning has ended, it returns the existing result. `report` is called with torch's
    progress. Raises a ConfigError without a Python that has torch, and a DataError for a folder with another
    tuning or a base without weights.
    """
    check_extra("dense", "the graph of a tuned encoder", "onnxruntime", "tokenizers", "safetensors")
    settings = settings or TuningSettings()
    _check_base(base)
    _check(train, validation, len(labels))
    folder = Path(out)
    work = folder / WORK
    work.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        parts = {"train": train.record(), "validation": validation.record()}
        stated = {"base": base, "labels": list(labels), "int8": int8, "settings": asdict(settings), **parts}
        digest = hashlib.sha256(json.dumps(stated).encode()).hexdigest()
        _check_same(folder, digest)
        if (done := read_tuned(folder)) is not None:
            return done
        interpreter = torch_python(python)
        source, description = _weights(base, work)
        running = {"pooling": description.pooling, "limit": description.limit}
        running |= {"report_seconds": 20, "save_seconds": 60}
        job = {**stated, "base": str(source), "settings": {**asdict(settings), **running}, "digest": digest}
        _write_json(work / JOB, job)
        for facts in _run(interpreter, work):
            report(facts)
        return _export(folder, source, description, digest, train.texts, int8)


def torch_python(named: str | None = None) -> str:
    """The path of a Python that has torch: the named one, that of ISTHMUS_TORCH_PYTHON, or this one if it has
    torch.

    Raises a ConfigError, with a recipe for such an environment, if there is none.
    """
    recipe = f"python3 -m venv torch-env && torch-env/bin/pip install {' '.join(NEEDED)}"
    cure = f"an interpreter with torch: {recipe}; then --python torch-env/bin/python, or {PYTHON}"
    chosen = named or os.environ.get(PYTHON)
    if not chosen:
        if all(find_spec(module) is not None for module in NEEDED):
            return sys.executable
        raise ConfigError(
            "tuning needs torch, which this Python does not have", key="--python", expected=cure
        )
    command = [chosen, "-c", f"import {', '.join(NEEDED)}"]
    try:
        done = subprocess.run(command, capture_output=True, env=_environment(), timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"cannot be run ({type(error).__name__})"
        raise ConfigError(f"{chosen} {problem}", key="--python", value=chosen, expected=cure) from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["import failed"]
        problem = f"{chosen} has no torch to tune with ({lines[-1][:200]})"
        raise ConfigError(problem, key="--python", value=chosen, expected=cure)
    return chosen


def _environment() -> dict[str, str]:
    """The environment of the other Python: without this one's module paths, with one thread, and offline."""
    kept_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in kept_out}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {"OMP_NUM_THREADS": "1", **environment, **offline}


def _check(train: TuningTexts, validation: TuningTexts, labels: int) -> None:
    for name, part in (("training", train), ("validation", validation)):
        if len(part.texts) != len(part.labels) or not part.texts:
            raise DataError(f"{len(part.texts)} {name} texts with {len(part.labels)} rows of labels")
        if any(not 0 <= label < labels for row in part.labels for label in row):
            raise DataError(f"a {name} text has a label that is none of the {labels}")
    seen = set(map(text_hash, train.texts))
    if both := sum(text_hash(text) in seen for text in validation.texts):
        cure = "leave each in one of the two; early stopping would choose what knows them by heart"
        raise DataError(f"{both} validation texts are training texts too", cure=cure)


def _check_same(folder: Path, digest: str) -> None:
    """Raise a DataError if the folder contains another tuning."""
    for file in (folder / RECORD, folder / WORK / JOB):
        other = _read_large(file)
        if other and other.get("digest") != digest:
            cure = "name another folder, or remove this one"
            raise DataError("holds another tuning: other texts or settings", file=folder, cure=cure)


def _read_large(file: Path) -> dict[str, Any]:
    """Read a JSON object of any size that this module wrote; empty if it is missing or damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, value: Any) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value), encoding="utf-8")
    os.replace(part, path)


def _check_base(base: str) -> None:
    """Raise an error before any work unless the base has weights of a model that a graph can be built for."""
    folder = Path(base).expanduser()
    able = [name for name, preset in PRESETS.items() if WEIGHTS in preset.files]
    cure = f"a folder as transformers or sentence-transformers write it, or {', '.join(able)}"
    if not folder.is_dir():
        if base not in able:
            problem = "a graph without weights" if base in PRESETS else "no folder"
            raise ConfigError(f"{base} is {problem}", key="--base", value=base, expected=cure)
        return
    if missing := [name for name in (WEIGHTS, CONFIG, TOKENIZER) if not (folder / name).is_file()]:
        raise DataError(f"has no {' and no '.join(missing)}", file=folder, cure=f"name {cure}")
    bert_config(folder)


def _weights(base: str, work: Path) -> tuple[Path, Description]:
    """A folder with weights, configuration and tokeniser, and the description of their use."""
    folder = Path(base).expanduser()
    if (preset := PRESETS.get(base)) is not None and not folder.is_dir():
        target = work / "base"
        if not all((target / name).is_file() for name in preset.files):
            target.mkdir(exist_ok=True)
            bring(preset, target)
        return target, preset.description
    return folder.resolve(), replace(read_description(folder), query_prefix="", document_prefix="")


def _run(python: str, work: Path) -> Iterator[dict[str, Any]]:
    """Run torch and yield its lines of progress. Raises a DataError with the last line of its log if it
    fails."""
    log = work / "torch.log"
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            [python, str(SCRIPT), str(work)], stdout=subprocess.PIPE, stderr=errors, env=_environment()
        )
        try:
            for line in process.stdout or ():
                if line.startswith(b"{"):  # libraries may print lines of their own
                    yield json.loads(line)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if status:
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no reason told"]
        cure = "the same command goes on from the last checkpoint"
        raise DataError(f"torch ended with status {status}: {words[-1][:200]}", file=log, cure=cure)


def _export(
    folder: Path, source: Path, description: Description, digest: str, texts: Sequence[str], int8: bool
) -> Tuned:
    """Build the encoder's folder from torch's output: weights, graph and description. The graph is compared
    with torch."""
    written = folder / WORK / "model"
    probe = _read_large(written / "probe.json")
    for name in (WEIGHTS, CONFIG):
        shutil.copyfile(written / name, folder / name)
    shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
    (folder / MODEL).write_bytes(bert_graph(folder, int8=int8))
    _write_modules(folder, description)
    write_tuned_on(folder, texts)
    hashes = {name: sha256(folder / name) for name in (MODEL, TOKENIZER)}
    width = len(probe["vectors"][0])
    stated = replace(description, name=folder.resolve().name, source=f"{description.name}, tuned")
    stated = replace(stated, sha256=hashes, width=width)
    stated.write(folder)
    _compare(folder, probe, int8)
    _write_json(folder / RECORD, {"digest": digest, "best": probe["best"], "history": probe["history"]})
    shutil.rmtree(folder / WORK)
    return Tuned(folder, probe["history"], probe["best"])


def _write_modules(folder: Path, description: Description) -> None:
    """Write the files from which sentence-transformers reads pooling and limit."""
    module = "sentence_transformers.models."
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": module + kind}
        for at, (path, kind) in enumerate(kinds)
    ]
    config = read_json(folder / CONFIG)
    cls = description.pooling == "cls"
    pooling = {"word_embedding_dimension": config["hidden_size"], "pooling_mode_cls_token": cls}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    _write_json(folder / "modules.json", modules)
    _write_json(folder / "1_Pooling" / CONFIG, {**pooling, "pooling_mode_mean_tokens": not cls})
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": description.limit})


def _compare(folder: Path, probe: Mapping[str, Any], int8: bool) -> None:
    """Raise a DataError unless the graph gives the same vectors as torch."""
    encoder = OnnxEncoder.of(folder, max_tokens=probe["limit"])
    ours = encoder.encode(probe["texts"]).astype(np.float64)
    cosines = (ours * np.array(probe["vectors"])).sum(axis=1)
    if not cosines.min() >= ALIKE[int8]:
        problem = f"the graph's vectors have a cosine of {cosines.min():.4f} with torch's"
        raise DataError(problem, file=folder / MODEL, cure=f"{ALIKE[int8]} at least was expected; report it")
