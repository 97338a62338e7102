"""The description of an encoder in a folder: its files, pooling, prefixes and limit.

encoder.json        written by `isthmus encoder add`, with the sha256 of every file
modules.json, …     otherwise the files of sentence-transformers

model.onnx          the graph with its weights, or onnx/model.onnx
tokenizer.json      of the library tokenizers
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from isthmus.errors import DataError

Pooling = Literal["cls", "mean"]
MANIFEST, MODEL, TOKENIZER = "encoder.json", "model.onnx", "tokenizer.json"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
TUNED_ON = "tuned_on.txt"
"""Hashes of the texts whose labels an encoder was tuned on, a line each."""
LONGEST_JSON = 1 << 20
USUAL_LIMIT = 512


@dataclass(frozen=True)
class Description:
    """How an encoder's files are used. `limit` counts all tokens of a text, including special tokens that are
    added."""

    name: str
    kind: Literal["encoder", "cross-encoder", "endpoint"] = "encoder"
    pooling: Pooling = "mean"
    query_prefix: str = ""
    document_prefix: str = ""
    limit: int = USUAL_LIMIT
    licence: str = ""
    source: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Hashes by file name; files with other hashes are refused."""
    url: str = ""
    """Address of an endpoint, with the model after `#`."""
    key: str = ""
    """Where an endpoint's key is: `env:NAME` or `file:PATH`."""
    width: int = 0
    probe: str = ""
    """Hash of an endpoint's vectors of some texts."""

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise DataError(f"pools tokens by {self.pooling!r}", cure="known: cls, mean")
        if not 3 <= self.limit <= 1 << 20:
            raise DataError(f"reads {self.limit} tokens of a text", cure="3 to 1,048,576 are possible")

    def write(self, folder: Path) -> None:
        """Write the description to an encoder's folder."""
        usual = Description("")
        stated = {key: value for key, value in asdict(self).items() if value != getattr(usual, key)}
        (folder / MANIFEST).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")


def read_description(folder: Path) -> Description:
    """Read a description from `encoder.json`, or else from the files of sentence-transformers. Raises a
    DataError if it is invalid."""
    if not folder.is_dir():
        raise DataError("is no folder", file=folder, cure="name a folder with model.onnx and tokenizer.json")
    stated = read_json(folder / MANIFEST)
    if not stated:
        return _sentence_transformers(folder)
    known = {each.name for each in fields(Description)}
    try:
        return Description(**{key: value for key, value in stated.items() if key in known})
    except (TypeError, DataError) as error:
        raise DataError(f"describes no encoder: {error}", file=folder / MANIFEST) from None


def _sentence_transformers(folder: Path) -> Description:
    """Read modules.json, 1_Pooling/config.json, sentence_bert_config.json and the prompts."""
    modules = read_json(folder / "modules.json", [])
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module.get("path", "") for module in modules}
    if strange := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        problem = f"has the module {sorted(strange)[0]}, which is not applied here"
        cure = "export all of it to one ONNX file with the output sentence_embedding"
        raise DataError(problem, file=folder / "modules.json", cure=cure)
    prompts = read_json(folder / "config_sentence_transformers.json").get("prompts") or {}
    config = read_json(folder / CONFIG)
    own = config.get("max_position_embeddings", USUAL_LIMIT) - first_position(config)
    wanted = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    return Description(
        name=folder.resolve().name,
        pooling=_pooling(folder / (kinds.get("Pooling") or "1_Pooling") / "config.json"),
        query_prefix=str(prompts.get("query", "")),
        document_prefix=str(prompts.get("document", prompts.get("passage", ""))),
        limit=min(int(wanted or own), int(own)),
    )


def first_position(config: Mapping[str, Any]) -> int:
    """The row of the position embeddings for a text's first token; for RoBERTa it comes after the padding's.

    >>> first_position({"model_type": "roberta", "pad_token_id": 1})
    2
    """
    return int(config.get("pad_token_id", 1)) + 1 if config.get("model_type") == "roberta" else 0


def text_hash(text: str) -> str:
    """A hash of a text without regard to case and white space, to recognise texts used for tuning."""
    return hashlib.blake2b(" ".join(text.casefold().split()).encode(), digest_size=8).hexdigest()


def write_tuned_on(folder: Path, texts: Iterable[str]) -> None:
    """Write the hashes of the texts that an encoder was tuned on to its folder."""
    lines = sorted({text_hash(text) for text in texts})
    (folder / TUNED_ON).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def read_tuned_on(folder: Path) -> frozenset[str]:
    """The hashes of the texts that an encoder was tuned on; empty if it was not tuned here."""
    try:
        return frozenset((folder / TUNED_ON).read_text(encoding="ascii").split())
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError) as error:
        raise DataError(f"holds no hashes: {error}", file=folder / TUNED_ON) from None


def _pooling(file: Path) -> Pooling:
    config = read_json(file)
    if not config:
        return "mean"
    named, mark = config.get("pooling_mode"), "pooling_mode_"
    switched_on = [
        key.removeprefix(mark) for key, on in config.items() if on is True and key.startswith(mark)
    ]
    modes = [named] if isinstance(named, str) else switched_on
    known: Mapping[str, Pooling] = {"cls_token": "cls", "cls": "cls", "mean_tokens": "mean", "mean": "mean"}
    if len(modes) != 1 or modes[0] not in known:
        problem = f"pools tokens by {', '.join(modes) or 'nothing'}"
        raise DataError(problem, file=file, cure="known: cls, mean")
    return known[modes[0]]


def model_file(folder: Path) -> Path | None:
    """The ONNX file of a folder; None if it has none. Raises a DataError if the choice is ambiguous."""
    named = [folder / MODEL, folder / "onnx" / MODEL]
    other = sorted(folder.glob("onnx/*.onnx")) or sorted(folder.glob("*.onnx"))
    for file in named:
        if file.is_file():
            return file
    if len(other) > 1:
        names = ", ".join(file.name for file in other)
        raise DataError(f"has several models ({names})", file=folder, cure=f"leave one, called {MODEL}")
    return other[0] if other else None


def weight_files(model: Path) -> list[Path]:
    """The model file and the files beside it that may contain tensors of the model."""
    beside = (f"{model.name}_data", f"{model.name}.data", f"{model.stem}.data")
    return [model, *(file for name in beside if (file := model.with_name(name)).is_file())]


def sha256(file: Path) -> str:
    """The sha256 of a file's bytes. Raises a DataError if it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError.unreadable(file, error) from None


def read_json(file: Path, absent: Any = None) -> Any:
    """The content of a JSON file; `absent`, or {} by default, if the file does not exist."""
    empty = {} if absent is None else absent
    try:
        if file.stat().st_size > LONGEST_JSON:
            raise DataError(f"has more than {LONGEST_JSON:,} bytes", file=file)
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return empty
    except OSError as error:
        raise DataError.unreadable(file, error) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}", file=file) from None
    if not isinstance(content, type(empty)):
        raise DataError(f"holds no {type(empty).__name__}", file=file)
    return content
