"""Encoders of the fusion experiments: vectors held in memory, posts without markup, a learned linear map."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isthmus.encoders import Encoder, Vectors, encode_cached, unit
from isthmus.randomness import Streams
from isthmus.tables import Ids


@dataclass(frozen=True, eq=False)
class Remembered(Encoder):
    """An encoder that stores the vectors of known texts, so that each text always has the same vector."""

    keeps_vectors = True
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
        """Fingerprint of the inner encoder, since the vectors are the same."""
        return self.encoder.fingerprint

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Look up the vectors of known texts; encode the others."""
        strange = [text for text in dict.fromkeys(texts) if text not in self.rows]
        if not strange:
            return self.vectors[[self.rows[text] for text in texts]]
        new = {text: len(self.vectors) + row for row, text in enumerate(strange)}
        vectors = np.concatenate((self.vectors, encode_cached(self.encoder, strange)))
        return vectors[[self.rows[text] if text in self.rows else new[text] for text in texts]]


@dataclass(frozen=True, eq=False)
class Unmarked(Encoder):
    """An encoder that removes the markup of every text by `unmarked` first."""

    keeps_vectors = True
    encoder: Encoder

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the inner encoder and of the preprocessing."""
        return f"{self.encoder.fingerprint}-unmarked"

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of the texts without markup."""
        return encode_cached(self.encoder, [unmarked(text) for text in texts])


def unmarked(text: str) -> str:
    """Return a post as plain words, without placeholders, addresses and braces, with hashtags as words.

    >>> unmarked("{@USA Softball@} for life! #TeamMates {{URL}}")
    'USA Softball for life! Team Mates'
    """
    words = re.sub(r"\{\{.*?\}\}|https?://\S+", " ", text)
    words = re.sub(r"[{}@#_]", " ", words)
    return " ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).split()) or text


@dataclass(frozen=True, eq=False)
class Projected(Encoder):
    """An encoder followed by a learned linear map, so that judged pairs lie close together.

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
        """Learn the map from pairs of texts that belong together; a text is never its own negative."""
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
        """Fingerprint of the inner encoder, and the hash of the map."""
        return (
            f"{self.encoder.fingerprint}-projected-{hashlib.sha256(self.matrix.tobytes()).hexdigest()[:16]}"
        )

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return the inner encoder's vectors after the map, of unit length."""
        return unit(encode_cached(self.encoder, texts) @ self.matrix)


def _contrast(
    matrix: Vectors, left: Vectors, right: Vectors, same: NDArray[np.bool_], temperature: float
) -> Vectors:
    """Return the gradient of NT-Xent with respect to the map, over both directions."""
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
    probabilities: Vectors = shifted / shifted.sum(axis=1, keepdims=True)
    return probabilities
