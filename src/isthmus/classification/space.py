"""Converts texts to rows: terms of training texts and labels, and vectors of latent semantics or of an
encoder.

Terms are shared by all folds of a cross-fit. Latent directions are not, because the texts from which they
were learned lie nearer to them than new texts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from isthmus.arrays import FloatArray, Ids
from isthmus.classification.sparse import Sparse, TextRows, rarity, read_arrays, weighed, write_arrays
from isthmus.encoders import Encoder, Vectors, encode_cached, load_encoder, unit
from isthmus.errors import DataError
from isthmus.randomness import Streams
from isthmus.text import ENGLISH

MOST_SAMPLED = 30_000
"""The largest number of texts from which directions are learned."""
LATENT = "latent"


@dataclass(frozen=True, eq=False)
class TextSpace:
    """`rows(texts)` converts texts to terms known from training, and vectors; unknown words are ignored.

    `encoder` is `latent` (a truncated SVD of the training texts' TF-IDF) or the name of an added encoder.
    For data given as feature weights, `terms` is None and only `latent` can make vectors.
    """

    encoder: str
    width: int
    terms: Ids | None
    rarity: FloatArray
    components: Vectors

    @classmethod
    def fit(
        cls,
        texts: Sequence[str] | Sparse,
        documents: Sequence[str] = (),
        *,
        encoder: str = LATENT,
        dimensions: int = 128,
        seed: int = 0,
    ) -> TextSpace:
        """Learn the terms of training texts and of the labels' own texts; directions come from the training
        texts alone."""
        terms = None
        if isinstance(texts, csr_array):
            width = int(texts.shape[1])
        else:
            vocabulary = ENGLISH([*texts, *documents]).terms.vocabulary
            terms, width = Ids(np.arange(len(vocabulary)), vocabulary), len(vocabulary)
        if encoder != LATENT and terms is None:
            raise DataError("feature weights cannot be encoded", cure="leave the encoder out")
        empty = cls(encoder, width, terms, np.ones(width), np.zeros((width, 0), dtype=np.float32))
        return empty.directed(TextRows(*empty._terms(texts)), dimensions=dimensions, seed=seed)

    def directed(self, rows: TextRows, *, dimensions: int = 128, seed: int = 0) -> TextSpace:
        """Return the same terms with weights and directions learned from these texts; unchanged for an
        encoder."""
        from sklearn.utils.extmath import randomized_svd

        wanted = min(dimensions, self.width, len(rows)) if self.encoder == LATENT else 0
        if not wanted:
            return self
        chosen: Any = slice(None)
        if len(rows) > MOST_SAMPLED:
            chosen = Streams(seed)("directions").choice(len(rows), MOST_SAMPLED, replace=False)
        weights = rarity(rows)
        known = weighed(rows.take(chosen), weights)
        _, _, directions = randomized_svd(known, wanted, n_iter=4, random_state=seed % 2**32)
        components = np.ascontiguousarray(directions.T, dtype=np.float32)
        return replace(self, rarity=weights, components=components)

    def rows(self, texts: Sequence[str] | Sparse) -> TextRows:
        """Return texts, or given feature weights, in the form that rankers use."""
        rows = TextRows(*self._terms(texts))
        if self.encoder != LATENT:
            return replace(rows, vectors=encode_cached(self._encoder, texts))
        return self.turned(rows)

    def turned(self, rows: TextRows) -> TextRows:
        """Return the same texts with vectors in these directions; vectors of an encoder stay as they are."""
        if self.encoder != LATENT:
            return rows
        vectors = np.asarray(weighed(rows, self.rarity) @ self.components, dtype=np.float32)
        return replace(rows, vectors=unit(vectors))

    @cached_property
    def _encoder(self) -> Encoder:
        return load_encoder(self.encoder)

    def _terms(self, texts: Sequence[str] | Sparse) -> tuple[Any, None, bool]:
        """Return counts of known terms, or the given weights; None for vectors; and whether they are
        counts."""
        if isinstance(texts, csr_array):
            if self.terms is not None or texts.shape[1] != self.width:
                known = "texts" if self.terms is not None else f"{self.width:,} features"
                raise DataError(
                    f"rows of {texts.shape[1]:,} features, where {known} were learned from",
                    cure="give what was given to fit",
                )
            return texts.astype(np.float32), None, False
        if self.terms is None:
            raise DataError("texts, where rows of features were learned from", cure="give such rows")
        tokens = ENGLISH(texts)
        counts = tokens.counts()
        here = tokens.terms.translation(self.terms)[counts.indices]
        known = here >= 0
        ends = np.concatenate(([0], np.cumsum(known)))[counts.indptr]
        data = counts.data[known].astype(np.float32)
        return (
            csr_array((data, here[known].astype(np.int32), ends), shape=(len(texts), self.width)),
            None,
            True,
        )

    def save(self, folder: Path) -> None:
        """Write `space.npz`."""
        words: NDArray[Any] = np.zeros(0, dtype=np.uint8)
        if self.terms is not None:
            words = np.frombuffer("\n".join(self.terms.words).encode(), dtype=np.uint8)
        about = {"encoder": np.array(self.encoder), "width": np.array(self.width), "words": words}
        write_arrays(folder / "space.npz", rarity=self.rarity, components=self.components, **about)

    @classmethod
    def load(cls, folder: Path) -> TextSpace:
        """Read what `save` wrote."""
        stored = read_arrays(folder / "space.npz")
        words = stored["words"].tobytes().decode()
        terms = Ids.of(words.split("\n")) if words else None
        encoder, width = str(stored["encoder"]), int(stored["width"])
        return cls(encoder, width, terms, stored["rarity"], stored["components"])
