"""Cross-encoders, which read a query and a document together and give one score. A pair costs as much as
encoding a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.encoders.folders import read_description
from isthmus.encoders.onnx import OnnxModel
from isthmus.errors import ConfigError


@dataclass(frozen=True, eq=False)
class CrossEncoder:
    """A cross-encoder of a folder: see `load_cross_encoder`."""

    model: OnnxModel

    @classmethod
    def of(cls, folder: Path) -> CrossEncoder:
        """The cross-encoder in a folder. Raises a ConfigError for an encoder of another kind."""
        description = read_description(folder)
        if description.kind != "cross-encoder":
            problem = f"{description.name} encodes single texts"
            raise ConfigError(problem, key="reranker", expected="a cross-encoder, as ms-marco-minilm is")
        return cls(OnnxModel(folder, description))

    def score(self, query: str, texts: Sequence[str]) -> FloatArray:
        """One score a text, higher for a better answer; scores are not comparable between queries."""
        if not texts:
            return np.empty(0)
        encodings = self.model.tokenizer.encode_batch([(query, text) for text in texts])
        return np.array(self.model.run(encodings, lambda output: float(output.reshape(-1)[0])))
