"""The encoder interface, vectors cached on disk, and latent semantic analysis, which needs no download."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.report import progress
from isthmus.tables import Ids, cache_folder, replacing
from isthmus.text import CJK, ENGLISH, Tokeniser, Tokens

_BLOCK_TEXTS = 512
_WORD = re.compile(f"{CJK}|[^\\s{CJK[1:-1]}]{{1,24}}")  # splits texts without blanks, too
Vectors = NDArray[np.float32]
Spans = NDArray[np.int64]


class Encoder(Protocol):
    """Anything that turns texts into unit rows. A subclass has to define only `fingerprint` and `encode`."""

    @property
    def fingerprint(self) -> str:
        """Identifies the vectors: encoders with equal fingerprints encode equal texts alike."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """One unit row per document (a zero row for a text without known content)."""

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """One unit row per query, in the space of the documents."""
        return self.encode(texts)

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return int(self.encode(["a"]).shape[1])

    @property
    def limit(self) -> int | None:
        """Number of tokens at which a document is cut, without special tokens; None if the encoder reads
        everything."""
        return None

    def was_tuned_on(self, texts: Sequence[str]) -> NDArray[np.bool_]:
        """Mask of the texts whose labels it was tuned on; results on these are better than on new texts."""
        return np.zeros(len(texts), dtype=bool)

    def token_spans(self, text: str) -> Spans:
        """The beginning and end of every token of a document, in characters: shape (tokens, 2)."""
        words = [match.span() for match in _WORD.finditer(text)]
        return np.array(words, dtype=np.int64).reshape(-1, 2)


def unit(vectors: Vectors) -> Vectors:
    """Rows scaled to length one; zero rows stay zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Vectors = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return scaled


def encode_cached(
    encoder: Encoder, texts: Sequence[str], *, queries: bool = False, label: str | None = None
) -> Vectors:
    """`encoder.encode(texts)`, or `encode_queries`, cached on disk block by block, so that a second call, or
    one after a kill, computes only what is missing. Without a cache folder everything is computed. `label`
    names the progress bar. An encoder with `keeps_vectors` does its own caching."""
    encode = encoder.encode_queries if queries else encoder.encode
    if getattr(encoder, "keeps_vectors", False) or not texts:
        return encode(texts)
    blocks = [texts[at : at + _BLOCK_TEXTS] for at in range(0, len(texts), _BLOCK_TEXTS)]
    try:
        folder = cache_folder() / "vectors" / f"{encoder.fingerprint}{'-queries' if queries else ''}"
    except RuntimeError:  # no home folder, so no cache
        folder = None
    reported = blocks if label is None else progress(blocks, total=len(blocks), label=label)
    return np.concatenate([_encode_block(encode, block, folder) for block in reported])


def _encode_block(
    encode: Callable[[Sequence[str]], Vectors], texts: Sequence[str], folder: Path | None
) -> Vectors:
    if folder is None:
        return encode(texts)
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        spelled = text.encode("utf-8", "surrogatepass")
        digest.update(len(spelled).to_bytes(8, "little") + spelled)
    file = folder / f"{digest.hexdigest()}.npy"
    try:
        cached: Vectors = np.load(file, allow_pickle=False)
        if cached.dtype == np.float32 and len(cached) == len(texts):
            return cached
    except (OSError, ValueError, EOFError):
        pass  # absent or damaged: computed again and replaced
    vectors = encode(texts)
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.lib.format.write_array(stream, vectors, allow_pickle=False)
    return vectors


@dataclass(frozen=True, eq=False)
class Lsa(Encoder):
    """Latent semantic analysis: TF-IDF of stems through a truncated SVD of the texts it was fitted on.

    Fit it on the federation's own text: fitted elsewhere, it lacks the words and their co-occurrences.
    """

    terms: Ids
    rarity: NDArray[np.float64]
    components: Vectors
    tokeniser: Tokeniser = ENGLISH

    @classmethod
    def fit(
        cls, texts: Sequence[str], *, dimensions: int = 256, seed: int = 0, tokeniser: Tokeniser = ENGLISH
    ) -> Lsa:
        """Learn the terms and their directions; fewer than `dimensions` if the texts do not have more."""
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
        """A hash of the terms and their directions."""
        digest = hashlib.sha256(repr((self.tokeniser.stemmer, sorted(self.tokeniser.stop_words))).encode())
        for part in ("\n".join(self.terms.words).encode(), self.rarity.tobytes(), self.components.tobytes()):
            digest.update(part)
        return f"lsa-{digest.hexdigest()[:16]}"

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Project texts onto the learned directions; unknown words are ignored."""
        rows = self._weigh(self.tokeniser(texts)) @ self.components
        return unit(np.asarray(rows, dtype=np.float32))

    def _weigh(self, tokens: Tokens) -> Any:
        """(1 + ln tf)·idf over the known terms, with rows of unit length, as SciPy CSR."""
        from scipy.sparse import csr_array

        counts = tokens.counts()
        here = tokens.terms.translation(self.terms)[counts.indices]
        known = here >= 0
        rows = np.repeat(np.arange(len(tokens)), np.diff(counts.indptr))[known]
        weights = (1 + np.log(counts.data[known])) * self.rarity[here[known]]
        norms = np.sqrt(np.bincount(rows, weights**2, len(tokens)))
        shape = (len(tokens), len(self.rarity))
        return csr_array((weights / norms[rows], (rows, here[known])), shape=shape)
