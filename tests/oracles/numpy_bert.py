"""BERT's forward pass (post-layer-norm, exact GELU) in NumPy, over one text: the oracle of the ONNX graph."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.special import erf


def token_vectors(folder, ids):
    """The last layer's vectors of one text's tokens."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name.removeprefix("bert."): value for name, value in load_file(folder / "model.safetensors").items()
    }

    def linear(rows, name):
        return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(rows, name):
        centred = rows - rows.mean(axis=1, keepdims=True)
        scale = np.sqrt((centred**2).mean(axis=1, keepdims=True) + config["layer_norm_eps"])
        return centred / scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    tables = [weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")]
    hidden = norm(tables[0][ids] + tables[1][: len(ids)] + tables[2][0], "embeddings.LayerNorm")
    heads = config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        query, key, value = (
            linear(hidden, f"{name}.attention.self.{part}").reshape(len(ids), heads, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[2])
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        shares /= shares.sum(axis=2, keepdims=True)
        mixed = (shares @ value).swapaxes(0, 1).reshape(len(ids), -1)
        hidden = norm(
            hidden + linear(mixed, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm"
        )
        wide = linear(hidden, f"{name}.intermediate.dense")
        gated = wide * (1 + erf(wide / np.sqrt(2))) / 2
        hidden = norm(hidden + linear(gated, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    return hidden
