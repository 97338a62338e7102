"""What an encoder is: texts to unit vectors whose dot product is a similarity; and vectors kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from isthmus.report import progress
from isthmus.tables.files import cache_folder, replacing

_BLOCK_TEXTS = 512
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


def encode_cached(encoder: Encoder, texts: Sequence[str], *, label: str | None = None) -> Vectors:
    """`encoder.encode(texts)`, kept on disk block by block, so that a second call, or one after a kill,
    computes only what is missing; where nothing can be kept, everything. `label` names the progress bar. An
    encoder that `keeps_vectors` itself is asked directly."""
    if getattr(encoder, "keeps_vectors", False):
        return encoder.encode(texts)
    blocks = [texts[at : at + _BLOCK_TEXTS] for at in range(0, len(texts), _BLOCK_TEXTS)]
    if not blocks:
        return encoder.encode(texts)
    try:
        folder = cache_folder() / "vectors" / encoder.fingerprint
    except RuntimeError:  # no home folder to keep anything in
        folder = None
    shown = blocks if label is None else progress(blocks, total=len(blocks), label=label)
    return np.concatenate([_encode_block(encoder, block, folder) for block in shown])


def _encode_block(encoder: Encoder, texts: Sequence[str], folder: Path | None) -> Vectors:
    if folder is None:
        return encoder.encode(texts)
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        spelled = text.encode("utf-8", "surrogatepass")
        digest.update(len(spelled).to_bytes(8, "little") + spelled)
    file = folder / f"{digest.hexdigest()}.npy"
    try:
        kept: Vectors = np.load(file, allow_pickle=False)
        if kept.dtype == np.float32 and len(kept) == len(texts):
            return kept
    except (OSError, ValueError, EOFError):
        pass  # absent or damaged: computed again and replaced
    vectors = encoder.encode(texts)
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as stream:
            np.lib.format.write_array(stream, vectors, allow_pickle=False)
    return vectors
