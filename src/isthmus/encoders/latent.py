"""An encoder fitted on the texts at hand: latent semantic analysis."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.encoders.vectors import Vectors, unit
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
