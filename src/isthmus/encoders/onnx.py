"""Encoders that run in onnxruntime: one text at a time, on all cores.

Every text is encoded by itself. Models in int8 scale their activations by the largest in a batch, so texts
encoded together would change one another's vectors, and those of two silos would not be comparable. Batches
are not faster either: at 200 tokens a text, eight together cost half as much time again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.encoders.folders import (
    TOKENIZER,
    Description,
    model_file,
    read_description,
    read_tuned_on,
    sha256,
    text_hash,
    weight_files,
)
from isthmus.encoders.vectors import Encoder, Spans, Vectors, unit
from isthmus.errors import DataError, MissingExtra

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SENTENCE = "sentence_embedding"
"""Name of the output of a graph that includes pooling."""


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """The tokeniser and ONNX graph of a folder; their hashes are checked before either is loaded."""

    folder: Path
    description: Description
    workers: int = field(default_factory=cores)

    @cached_property
    def file(self) -> Path:
        """The path of the ONNX graph."""
        file = model_file(self.folder)
        if file is None:
            raise DataError("has no ONNX model", file=self.folder, cure=f"isthmus encoder add {self.folder}")
        return file

    @cached_property
    def digest(self) -> str:
        """A hash of graph, weights and tokeniser. Raises a DataError if a file differs from the one that was
        added."""
        files = {file.name: file for file in (*weight_files(self.file), self.folder / TOKENIZER)}
        hashes = {name: sha256(file) for name, file in files.items()}
        for name, wanted in self.description.sha256.items():
            if hashes.get(name) != wanted:
                raise DataError(
                    f"the sha256 of {name} is {hashes.get(name, 'missing')[:12]}…, not {wanted[:12]}…",
                    file=self.folder,
                    cure=f"it was changed: remove {self.description.name} and add it again",
                )
        return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()

    @cached_property
    def session(self) -> Any:
        """The onnxruntime session. A run uses a single thread; several workers run side by side."""
        self.digest  # noqa: B018  # files of the wrong hash are refused before they are read
        runtime = extra("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            session = runtime.InferenceSession(str(self.file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises its own error types
            raise DataError(f"is no ONNX model: {_short(error)}", file=self.file) from None
        if strange := [node.name for node in session.get_inputs() if node.name not in INPUTS]:
            raise DataError(
                f"has the input {strange[0]!r}", file=self.file, cure=f"known: {', '.join(INPUTS)}"
            )
        return session

    @cached_property
    def tokenizer(self) -> Any:
        """The tokeniser, which truncates at the limit and does not pad."""
        self.digest  # noqa: B018
        file = self.folder / TOKENIZER
        try:
            tokenizer = extra("tokenizers").Tokenizer.from_file(str(file))
        except Exception as error:
            if isinstance(error, MissingExtra):
                raise
            raise DataError(f"is no tokeniser: {_short(error)}", file=file) from None
        tokenizer.no_padding()
        tokenizer.enable_truncation(self.description.limit)
        return tokenizer

    def run(self, encodings: Sequence[Any], read: Callable[[NDArray[np.float32]], Any]) -> list[Any]:
        """Run the graph on every tokenised text and return `read(first output)` for each, in order. Long
        texts start first."""
        names = [node.name for node in self.session.get_inputs()]
        outputs = [node.name for node in self.session.get_outputs()]
        output = SENTENCE if SENTENCE in outputs else outputs[0]

        def one(row: int) -> Any:
            encoding = encodings[row]
            values = (encoding.ids, encoding.attention_mask, encoding.type_ids)
            inputs = dict(zip(INPUTS, (np.array([each], np.int64) for each in values), strict=True))
            (result,) = self.session.run([output], {name: inputs[name] for name in names})
            return read(np.asarray(result[0], dtype=np.float32))

        order = sorted(range(len(encodings)), key=lambda row: -len(encodings[row]))
        if self.workers == 1 or len(order) < 2:
            results = dict(zip(order, map(one, order), strict=True))
        else:
            with ThreadPoolExecutor(min(self.workers, len(order))) as pool:
                results = dict(zip(order, pool.map(one, order), strict=True))
        return [results[row] for row in range(len(encodings))]


@dataclass(frozen=True, eq=False)
class OnnxEncoder(Encoder):
    """A sentence encoder in a folder: see `load_encoder`."""

    model: OnnxModel

    @classmethod
    def of(cls, folder: Path, *, max_tokens: int | None = None, workers: int | None = None) -> OnnxEncoder:
        """The encoder in a folder, reading at most `max_tokens` of a text."""
        description = read_description(folder)
        if max_tokens is not None:
            description = replace(description, limit=min(max_tokens, description.limit))
        return cls(OnnxModel(folder, description, workers or cores()))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of weights, tokeniser, pooling, prefixes and limit."""
        about = self.model.description
        stated = (self.model.digest, about.pooling, about.query_prefix, about.document_prefix, about.limit)
        return f"onnx-{hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:16]}"

    @cached_property
    def width(self) -> int:
        """Numbers in a vector."""
        return int(self.encode(["a"]).shape[1])

    @cached_property
    def limit(self) -> int:
        """Number of tokens of a document that are read, without its prefix and special tokens."""
        added = len(self.model.tokenizer.encode(self.model.description.document_prefix))
        return max(1, self.model.description.limit - added)

    def was_tuned_on(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        """Mask of the texts that the encoder was tuned on, without regard to case and white space."""
        known = read_tuned_on(self.model.folder)
        return np.array([bool(known) and text_hash(text) in known for text in texts], dtype=bool)

    def token_spans(self, text: str) -> Spans:
        """The beginning and end of every token, in characters; tokens beyond the limit are included."""
        whole = self._uncut.encode(text, add_special_tokens=False)
        return np.array(whole.offsets, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def _uncut(self) -> Any:
        tokenizer = extra("tokenizers").Tokenizer.from_str(self.model.tokenizer.to_str())
        tokenizer.no_truncation()
        return tokenizer

    def encode(self, texts: Sequence[str]) -> Vectors:
        """One unit row a document; zeros for an empty text."""
        return self._encode(texts, self.model.description.document_prefix)

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """One unit row a query, with the prefix for queries that the encoder was trained with."""
        return self._encode(texts, self.model.description.query_prefix)

    def _encode(self, texts: Sequence[str], prefix: str) -> Vectors:
        rows = [row for row, text in enumerate(texts) if text.strip()]
        encodings = self.model.tokenizer.encode_batch([prefix + texts[row] for row in rows] or ["a"])
        encoded = np.stack(self.model.run(encodings, self._pooled))
        vectors = np.zeros((len(texts), encoded.shape[1]), dtype=np.float32)
        vectors[rows] = encoded[: len(rows)]
        return unit(vectors)

    def _pooled(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """The vector of a text from the vectors of its tokens, unless the graph has pooled them already."""
        if vectors.ndim == 1:
            return vectors
        pooled: NDArray[np.float32] = (
            vectors[0] if self.model.description.pooling == "cls" else vectors.mean(axis=0)
        )
        return pooled


def extra(module: str) -> Any:
    """Import a module of the extra `dense`. Raises MissingExtra if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra("dense", "an encoder from ONNX files") from None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
