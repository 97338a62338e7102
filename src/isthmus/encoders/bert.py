"""The ONNX graph of a BERT or RoBERTa from its weights, for `encoder add` of a folder without a graph.

The graph takes one text a row, without padding, and returns the vectors of its tokens. It uses the fused
nodes of onnxruntime, so that a layer has seven nodes. The file is written directly as a protocol buffer
(onnx.proto of ONNX), field by field, which needs no further package. In int8 a matrix has one scale per
column, and activations one per text, computed at run time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.encoders.folders import first_position
from isthmus.errors import DataError, MissingExtra

FUSED = "com.microsoft"
_FLOAT, _INT8, _INT32, _INT64 = 1, 3, 6, 7
_OPSET, _IR_VERSION = 17, 8

Weights = Mapping[str, NDArray[np.float32]]
Tensors = Mapping[str, NDArray[np.float32] | NDArray[np.int8]]


def bert_graph(folder: Path, *, int8: bool = False) -> bytes:
    """Build the ONNX model of a folder with `config.json` and `model.safetensors`. Raises a DataError for any
    other folder."""
    config = bert_config(folder)
    try:
        from safetensors.numpy import load_file
    except ImportError:
        raise MissingExtra("dense", "weights in a safetensors file") from None
    try:
        raw = load_file(folder / "model.safetensors")
        prefix = f"{config['model_type']}."
        weights = {name.removeprefix(prefix): array.astype(np.float32) for name, array in raw.items()}
        tensors = _tensors(weights, config["num_hidden_layers"])
        tensors["position"] = tensors["position"][first_position(config) :]
        return _model(_quantised(tensors) if int8 else tensors, config, int8=int8)
    except KeyError as error:
        raise DataError(f"has no {error.args[0]}", file=folder / "model.safetensors") from None
    except Exception as error:  # safetensors raises its own error types
        if isinstance(error, (DataError, OSError, MemoryError)):
            raise
        raise DataError(f"is no safetensors file: {error}", file=folder / "model.safetensors") from None


def bert_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a BERT or RoBERTa that a graph can be built for. Raises a DataError for any
    other."""
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        kind, activation = config["model_type"], config["hidden_act"]
        positions = config.get("position_embedding_type", "absolute")
    except OSError as error:
        raise DataError.unreadable(file, error) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"is no configuration of an encoder: {error}", file=file) from None
    if kind not in ("bert", "roberta") or (activation, positions) != ("gelu", "absolute"):
        problem = (
            f"is of {kind} with {activation} and {positions} positions, not of bert or roberta with gelu and"
            " absolute"
        )
        raise DataError(problem, file=file, cure="export the model to ONNX and add that folder")
    return config


def _tensors(weights: Weights, layers: int) -> dict[str, NDArray[np.float32]]:
    """The weights under the names of the graph; matrices transposed for `rows @ matrix`."""
    names = {"word": "word_embeddings", "position": "position_embeddings", "segment": "token_type_embeddings"}
    tensors = {name: weights[f"embeddings.{source}.weight"] for name, source in names.items()}
    tensors |= _norm(weights, "embeddings.LayerNorm", "first")
    for at in range(layers):
        prefix = f"encoder.layer.{at}"
        parts = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
        tensors[f"qkv{at}"] = np.concatenate([weights[f"{part}.weight"] for part in parts]).T
        tensors[f"qkv_bias{at}"] = np.concatenate([weights[f"{part}.bias"] for part in parts])
        dense = {"out": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense"}
        for name, source in dense.items():
            tensors[f"{name}{at}"] = weights[f"{prefix}.{source}.weight"].T
            tensors[f"{name}_bias{at}"] = weights[f"{prefix}.{source}.bias"]
        tensors |= _norm(weights, f"{prefix}.attention.output.LayerNorm", f"middle{at}")
        tensors |= _norm(weights, f"{prefix}.output.LayerNorm", f"last{at}")
    return tensors


def _quantised(tensors: Weights) -> Tensors:
    """Layer matrices in int8, each with the scale and the zero point of every column."""
    result: dict[str, NDArray[np.float32] | NDArray[np.int8]] = dict(tensors)
    for name, matrix in tensors.items():
        if name.rstrip("0123456789") in ("qkv", "out", "up", "down"):
            scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(np.float32).tiny) / np.float32(127)
            result[name] = np.rint(matrix / scale).astype(np.int8)
            result[f"{name}_scale"], result[f"{name}_zero"] = scale, np.zeros(len(scale), dtype=np.int8)
    return result


def _norm(weights: Weights, source: str, name: str) -> dict[str, NDArray[np.float32]]:
    return {f"{name}_scale": weights[f"{source}.weight"], f"{name}_shift": weights[f"{source}.bias"]}


def _nodes(layers: int, heads: int, epsilon: float, int8: bool) -> Iterator[bytes]:
    norm = {"epsilon": epsilon}
    yield _node("Cast", ["input_ids"], ["ids"], {"to": _INT32}, domain="")
    yield _node("Shape", ["input_ids"], ["shape"], {}, domain="")
    yield _node("ConstantOfShape", ["shape"], ["segments64"], {}, domain="")
    yield _node("Cast", ["segments64"], ["segments"], {"to": _INT32}, domain="")
    first = ["ids", "segments", "word", "position", "segment", "first_scale", "first_shift"]
    yield _node("EmbedLayerNormalization", first, ["hidden0", "unused"], norm)
    for at in range(layers):
        hidden, attended = f"hidden{at}", f"attended{at}"
        yield from _attention(at, heads, int8)
        yield _product(attended, f"out{at}", f"mixed{at}", int8)
        middle = [f"mixed{at}", hidden, f"middle{at}_scale", f"middle{at}_shift", f"out_bias{at}"]
        yield _node("SkipLayerNormalization", middle, [f"normed{at}"], norm)
        yield _product(f"normed{at}", f"up{at}", f"wide{at}", int8)
        yield _node("BiasGelu", [f"wide{at}", f"up_bias{at}"], [f"gated{at}"], {})
        yield _product(f"gated{at}", f"down{at}", f"narrow{at}", int8)
        last = [f"narrow{at}", f"normed{at}", f"last{at}_scale", f"last{at}_shift", f"down_bias{at}"]
        output = "token_vectors" if at == layers - 1 else f"hidden{at + 1}"
        yield _node("SkipLayerNormalization", last, [output], norm)


def _attention(at: int, heads: int, int8: bool) -> Iterator[bytes]:
    hidden, matrix, bias, output = f"hidden{at}", f"qkv{at}", f"qkv_bias{at}", f"attended{at}"
    if not int8:
        yield _node("Attention", [hidden, matrix, bias], [output], {"num_heads": heads})
        return
    quantised, scale, zero = f"quantised{at}", f"scale{at}", f"zero{at}"
    yield _node("DynamicQuantizeLinear", [hidden], [quantised, scale, zero], {}, domain="")
    inputs = [quantised, matrix, bias, scale, f"{matrix}_scale", "", zero, f"{matrix}_zero"]
    yield _node("QAttention", inputs, [output], {"num_heads": heads})


def _product(rows: str, matrix: str, output: str, int8: bool) -> bytes:
    if not int8:
        return _node("MatMul", [rows, matrix], [output], {}, domain="")
    inputs = [rows, matrix, f"{matrix}_scale", f"{matrix}_zero"]
    return _node("DynamicQuantizeMatMul", inputs, [output], {})


def _model(tensors: Tensors, config: Mapping[str, Any], *, int8: bool) -> bytes:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    graph = [_field(1, node) for node in _nodes(layers, heads, config["layer_norm_eps"], int8)]
    graph.append(_field(2, "bert"))
    graph += [_field(5, _tensor(name, array)) for name, array in tensors.items()]
    graph.append(_field(11, _value("input_ids", _INT64, "texts", "tokens")))
    graph.append(_field(12, _value("token_vectors", _FLOAT, "texts", "tokens", config["hidden_size"])))
    sets = [
        _field(8, _field(1, domain) + _field(2, version)) for domain, version in (("", _OPSET), (FUSED, 1))
    ]
    return b"".join((_field(1, _IR_VERSION), _field(2, "isthmus"), _field(7, b"".join(graph)), *sets))


def _node(
    operator: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    attributes: Mapping[str, int | float],
    *,
    domain: str = FUSED,
) -> bytes:
    parts = [_field(1, name) for name in inputs] + [_field(2, name) for name in outputs]
    parts += [_field(4, operator), _field(7, domain)]
    for name, value in attributes.items():
        if isinstance(value, int):
            number = _field(3, value) + _field(20, 2)
        else:
            number = b"\x15" + np.float32(value).tobytes() + _field(20, 1)  # tag of field 2, fixed 32 bits
        parts.append(_field(5, _field(1, name) + number))
    return b"".join(parts)


def _tensor(name: str, array: NDArray[np.float32] | NDArray[np.int8]) -> bytes:
    sizes = b"".join(_field(1, size) for size in array.shape)
    small = array.dtype == np.int8
    content = np.ascontiguousarray(array, dtype="i1" if small else "<f4").tobytes()
    return sizes + _field(2, _INT8 if small else _FLOAT) + _field(8, name) + _field(9, content)


def _value(name: str, kind: int, *shape: int | str) -> bytes:
    """An input or output: its name, type and shape; a name in the shape stands for any size."""
    sizes = b"".join(_field(1, _field(2 if isinstance(size, str) else 1, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, kind) + _field(2, sizes)))


def _field(number: int, value: int | str | bytes) -> bytes:
    """One field of a protocol buffer: a whole number, or bytes preceded by their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """A whole number as a varint: seven bits a byte, low ones first."""
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))
