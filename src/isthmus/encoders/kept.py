"""Vectors that are computed once: kept on disk, remembered in memory, read without a post's markup."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isthmus.encoders.vectors import Encoder, Vectors
from isthmus.report.progress import progress
from isthmus.tables.files import cache_folder, replacing

_BLOCK_TEXTS = 512


@dataclass(frozen=True, eq=False)
class Remembered:
    """Another encoder with the vectors of known texts at hand, whatever order and company they come in."""

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
        """The encoder's own: the vectors are the same."""
        return self.encoder.fingerprint

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Looked up where they are known."""
        strange = [text for text in dict.fromkeys(texts) if text not in self.rows]
        if not strange:
            return self.vectors[[self.rows[text] for text in texts]]
        new = {text: len(self.vectors) + row for row, text in enumerate(strange)}
        vectors = np.concatenate((self.vectors, encode_cached(self.encoder, strange)))
        return vectors[[self.rows[text] if text in self.rows else new[text] for text in texts]]


@dataclass(frozen=True, eq=False)
class Unmarked:
    """Another encoder that reads every text as `unmarked` leaves it."""

    encoder: Encoder

    @property
    def fingerprint(self) -> str:
        """The encoder's own, and what is done before."""
        return f"{self.encoder.fingerprint}-unmarked"

    def encode(self, texts: Sequence[str]) -> Vectors:
        """The vectors of the texts without markup."""
        return encode_cached(self.encoder, [unmarked(text) for text in texts])


def unmarked(text: str) -> str:
    """A post as plain words: no placeholders or addresses, names out of their braces, hashtags as words.

    >>> unmarked("{@USA Softball@} for life! #TeamMates {{URL}}")
    'USA Softball for life! Team Mates'
    """
    words = re.sub(r"\{\{.*?\}\}|https?://\S+", " ", text)
    words = re.sub(r"[{}@#_]", " ", words)
    return " ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).split()) or text


def encode_cached(encoder: Encoder, texts: Sequence[str], *, label: str | None = None) -> Vectors:
    """`encoder.encode(texts)`, kept on disk block by block, so that a second call, or one after a kill,
    computes only what is missing; where nothing can be kept, everything. `label` names the progress bar."""
    if isinstance(encoder, Remembered | Unmarked):  # what they stand before does the keeping
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
