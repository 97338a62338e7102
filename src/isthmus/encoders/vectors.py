"""What an encoder is: texts to unit vectors whose dot product is a similarity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]


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
