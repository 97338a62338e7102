"""The paper's dense retriever as it is printed: a transformer fine-tuned on each fold's training texts.

    FOLDER/twitter-0, FOLDER/twitter-1, …      an encoder a fold, made here where it is missing

An encoder learns from the training part alone and its epoch is chosen on the validation part. It fits its
training texts too well, so that out-of-fold predictions for them would overrate it. The default and the
encoder are therefore stacked on the validation part, which also decides whether the encoder is included at
all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.classification import as_run
from isthmus.encoders import Tuned, TuningSettings, TuningTexts, encode_cached, load_encoder, read_tuned, tune
from isthmus.errors import DataError
from isthmus.evaluation import evaluate
from isthmus.fusion import Stacked
from isthmus.tables import Qrels, Run
from isthmus_reproduce.fusion.encoders import unmarked
from isthmus_reproduce.fusion.folds import LabelFold, Part, label_fold
from isthmus_reproduce.fusion.panels import MAX_TOKENS, marked

BASE = "minilm"
SETTINGS = TuningSettings(epochs=2, patience=1, layers=3)
"""Two epochs over the upper half of the layers: a fold of TWITTER takes about five minutes of one core."""
LEAST_GAIN = 0.001
TUNED, WITH_TUNED, WITHOUT_TUNED = "tuned transformer", "default with tuned", "default without tuned"


def fold_folder(folder: Path, data: str, fold: int) -> Path:
    """Return the folder of a fold's encoder."""
    return folder / f"{Path(data).name}-{fold}"


def tune_fold(
    folder: Path,
    data: str,
    fold: int,
    *,
    seed: int = 0,
    most: int | None = None,
    report: Callable[[Mapping[str, Any]], None] = lambda facts: None,
) -> Tuned:
    """Return the encoder of a fold; a missing one is tuned now, which needs a Python that has torch."""
    chosen = label_fold(data, fold, seed=seed, most=most)
    read = _reader(chosen)
    parts = {name: _part(getattr(chosen, name), read) for name in ("train", "validation", "test")}
    later = {text for name in ("validation", "test") for text in parts[name].texts}
    return tune(
        BASE,
        fold_folder(folder, data, fold),
        chosen.documents.texts,
        train=_without(parts["train"], later),
        validation=_without(parts["validation"], set(parts["test"].texts)),
        settings=SETTINGS,
        report=report,
    )


def _reader(chosen: LabelFold) -> Callable[[str], str]:
    """Return the preprocessing of texts: posts lose their markup, others stay as they are."""
    return unmarked if marked(sorted(chosen.texts)) else str


def _part(part: Part, read: Callable[[str], str]) -> TuningTexts:
    return TuningTexts(
        [read(text) for text in part.texts], [np.flatnonzero(row).tolist() for row in part.labels]
    )


def _without(part: TuningTexts, texts: set[str]) -> TuningTexts:
    """Remove the texts that occur among others; texts that differ only by letter case are equal."""
    others = {text.casefold() for text in texts}
    rows = [row for row, text in enumerate(part.texts) if text.casefold() not in others]
    return TuningTexts([part.texts[row] for row in rows], [part.labels[row] for row in rows])


@dataclass(frozen=True, eq=False)
class Weighed:
    """The default beside a tuned encoder, stacked on validation: runs of the test part, and the decision."""

    runs: tuple[Run, Run]
    """The encoder alone (labels by cosine), and the default with it."""
    included: bool
    record: Mapping[str, Any]


def weigh(chosen: LabelFold, folder: Path, validation: Run, test: Run) -> Weighed:
    """Stack a fold's tuned encoder on the default, whose lists of the validation part are held out.

    The encoder is included if it lowers the cross-fitted log-loss of the validation part by more than
    `LEAST_GAIN`.
    """
    scores = _cosines(chosen, folder)
    labels = chosen.documents.ids
    lists = {
        name: as_run(getattr(chosen, name).ids, labels, scores[name], len(labels), TUNED) for name in scores
    }
    qrels = chosen.validation.qrels(chosen.documents)
    method = "softmax" if chosen.single else "platt"
    stacked = Stacked(calibrator=method, single_label=chosen.single)
    both = stacked.fit_fuse([validation, lists["validation"]], qrels)
    alone = Stacked(calibrator=method, single_label=chosen.single).fit_fuse([validation], qrels)
    fused = stacked.fuse([test, lists["test"]], name=WITH_TUNED)
    losses = {WITHOUT_TUNED: _log_loss(alone, qrels), WITH_TUNED: _log_loss(both, qrels)}
    named = {TUNED: lists["validation"], WITHOUT_TUNED: validation, WITH_TUNED: both}
    first = {name: evaluate(qrels, run, ["P@1"]).means["P@1"] for name, run in named.items()}
    tuned = read_tuned(folder)
    record = {"validation P@1": first, "validation log-loss": losses, "tuning": tuned and tuned.record()}
    return Weighed((lists["test"], fused), losses[WITHOUT_TUNED] - losses[WITH_TUNED] > LEAST_GAIN, record)


def _cosines(chosen: LabelFold, folder: Path) -> dict[str, FloatArray]:
    """Return cosines, texts × labels, of validation and test; DataError if tuned on one of these texts."""
    encoder, read = load_encoder(str(folder.resolve()), max_tokens=MAX_TOKENS), _reader(chosen)
    towards = encoder.encode(chosen.documents.texts).T
    scores = {}
    for name in ("validation", "test"):
        texts = [read(text) for text in getattr(chosen, name).texts]
        if leaked := int(encoder.was_tuned_on(texts).sum()):
            problem = f"was tuned on {leaked} of the {len(texts)} {name} texts"
            raise DataError(problem, file=folder, cure="tune one for this fold, in another folder")
        scores[name] = (encode_cached(encoder, texts) @ towards).astype(np.float64)
    return scores


def _log_loss(run: Run, qrels: Qrels) -> float:
    """Return the mean −log of the total probability of a text's right labels."""
    right = run.grades(qrels) > 0
    sums = np.zeros(len(run))
    np.add.at(sums, run.query_of_row[right], run.required_probabilities[right])
    return float(-np.log(np.clip(sums, 1e-12, 1)).mean())


def tune_folds(
    folder: Path, pairs: Sequence[tuple[str, int]], *, seed: int, most: int | None, say: Callable[[str], None]
) -> None:
    """Tune missing encoders, one fold after another, with a line of progress for every epoch."""
    for data, fold in pairs:
        if read_tuned(fold_folder(folder, data, fold)) is not None:
            continue
        name = f"{Path(data).name}, fold {fold}"
        say(f"tuning the encoder of {name}")

        def line(facts: Mapping[str, Any], name: str = name) -> None:
            if "MRR" in facts:
                say(f"{name}: epoch {facts['epoch']}, validation P@1 {100 * facts['P@1']:.1f}")

        tune_fold(folder, data, fold, seed=seed, most=most, report=line)
