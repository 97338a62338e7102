"""Small encoders for tests: a folder with a random BERT, or with a table of token vectors as ONNX."""

from __future__ import annotations

import json

import numpy as np
import pytest

from isthmus.encoders.bert import _field, _node, _tensor, _value

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "red", "green", "pear", "apple", "find", "me", ":")


def tokenizer_file(folder):
    """A tokeniser of a few words that adds [CLS] and [SEP]."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def random_bert(folder, *, layers=2, width=8, heads=2, seed=0):
    """A folder as sentence-transformers writes it, with weights as safetensors."""
    numpy = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(scale=0.5, size=shape).astype(np.float32)

    weights = {
        "embeddings.word_embeddings.weight": normal(len(WORDS), width),
        "embeddings.position_embeddings.weight": normal(32, width),
        "embeddings.token_type_embeddings.weight": normal(2, width),
    }
    shapes = {
        "attention.self.query": (width, width),
        "attention.self.key": (width, width),
        "attention.self.value": (width, width),
        "attention.output.dense": (width, width),
        "intermediate.dense": (2 * width, width),
        "output.dense": (width, 2 * width),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        norms += [f"{name}.attention.output.LayerNorm", f"{name}.output.LayerNorm"]
        for part, shape in shapes.items():
            weights |= {f"{name}.{part}.weight": normal(*shape), f"{name}.{part}.bias": normal(shape[0])}
    for name in norms:
        weights |= {f"{name}.weight": 1 + normal(width), f"{name}.bias": normal(width)}
    folder.mkdir(parents=True, exist_ok=True)
    numpy.save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "bert",
        "hidden_act": "gelu",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": width,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_file(folder)
    return folder


def lookup_encoder(folder, table, *, pooling=None, prompts=None):
    """A folder whose ONNX graph looks token vectors up in a table."""
    pytest.importorskip("onnxruntime")
    (folder / "onnx").mkdir(parents=True, exist_ok=True)
    (folder / "onnx" / "model.onnx").write_bytes(lookup_graph(table))
    tokenizer_file(folder)
    if pooling:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return folder


def lookup_graph(table):
    """Gather(table, input_ids)."""
    node = _node("Gather", ["table", "input_ids"], ["vectors"], {}, domain="")
    graph = _field(1, node) + _field(2, "lookup") + _field(5, _tensor("table", np.asarray(table, np.float32)))
    graph += _field(11, _value("input_ids", 7, "texts", "tokens"))
    graph += _field(12, _value("vectors", 1, "texts", "tokens", table.shape[1]))
    return _field(1, 8) + _field(7, graph) + _field(8, _field(2, 13))
