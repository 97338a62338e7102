"""Encoders fitted on the texts at hand: latent semantic analysis, and a map learned from judged pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.encoders.kept import encode_cached
from isthmus.encoders.vectors import Encoder, Vectors, unit
from isthmus.randomness import Streams
from isthmus.tables.ids import Ids
from isthmus.text import ENGLISH, Tokeniser, Tokens


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
