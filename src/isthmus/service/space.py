"""Directions that silos share: latent semantic analysis of all their texts, of which none leaves its silo.

    Aᵢ ≈ Uᵢ·Sᵢ·Vᵢᵀ      every silo: a truncated SVD of its documents' TF-IDF, with the rarities of all silos
    V = svd(S₁V₁ᵀ; S₂V₂ᵀ; …)    whoever joins them: the right singular vectors of all documents together

What leaves a silo is VᵢSᵢ: a row for every word that at least two of its documents have, named by a keyed
hash. That is exact and carries no ε; it goes only to a peer whose policy has `learning`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.encoders import Vectors, unit
from isthmus.engines import Counted, EngineReader
from isthmus.errors import DataError, ProtocolError
from isthmus.private import HashFamily
from isthmus.randomness import Streams
from isthmus.service.encoding import QueryEncoder, through
from isthmus.tables import Bundle, Declared
from isthmus.text import ENGLISH

DIMENSIONS = 256
LEAST_DOCUMENTS = 2
"""Documents of a silo that a word must have before it leaves."""
FITTED_ON = 20_000
"""Documents that a silo's directions come from at most."""
MOST_WORDS = 1 << 18
MOST_RARITY, MOST_COMPONENT = 1e3, 1e6
"""Far more than a word of any collection has, and small enough that vectors stay numbers."""
MOST_BYTES = MOST_WORDS * (16 + 4 * DIMENSIONS) + (1 << 16)

Names = NDArray[np.uint64]


class SavedSpace(Bundle):
    """Directions on disk or on the wire."""

    noun = "space"
    most = MOST_BYTES

    @classmethod
    def check(cls, header: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        """A row of at most `DIMENSIONS` reals for each of at most `MOST_WORDS` words."""
        words, rarity, components = (declared[name] for name in ("words", "rarity", "components"))
        rows, *width = components.shape
        if len(declared) != 3 or not words.shape == rarity.shape == (rows,) or len(width) != 1:
            raise DataError("has words, rarities and directions that do not belong together")
        if rows > MOST_WORDS or width[0] > DIMENSIONS:
            raise DataError(f"has more than {MOST_WORDS:,} words or {DIMENSIONS} directions")
        if words.dtype != np.uint64 or rarity.dtype != np.float64 or components.dtype.kind != "f":
            raise DataError("has words, rarities or directions of another type")


@dataclass(frozen=True, eq=False)
class Space:
    """A row for every word, named by its keyed hash and in that order: its rarity and its directions."""

    words: Names
    rarity: FloatArray
    components: Vectors
    hashing: str

    @cached_property
    def fingerprint(self) -> str:
        """The hash of all of it."""
        digest = hashlib.sha256(self.hashing.encode())
        for part in (self.words, self.rarity, self.components):
            digest.update(np.ascontiguousarray(part).tobytes())
        return f"space-{digest.hexdigest()[:16]}"

    @property
    def width(self) -> int:
        """The number of directions."""
        return int(self.components.shape[1])

    def rows(self, names: Names) -> IntArray:
        """Where words stand; −1 for one that no silo named."""
        if not len(self.words):
            return np.full(len(names), -1)
        at = np.minimum(np.searchsorted(self.words, names), len(self.words) - 1)
        return np.where(self.words[at] == names, at, -1)

    def to_bytes(self) -> bytes:
        """For the wire; directions lose digits that nothing depends on."""
        return self._saved(np.float16).to_bytes()

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file."""
        self._saved(np.float32).write(path)

    def _saved(self, form: type[np.floating[Any]]) -> SavedSpace:
        arrays = {
            "words": self.words,
            "rarity": self.rarity,
            "components": self.components.astype(form),
        }
        return SavedSpace({"hashing": self.hashing}, arrays)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read it back."""
        return SavedSpace.restore(path, cls._of)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What came over the wire; anything else is a ProtocolError."""
        return SavedSpace.receive(data, cls._of)

    @classmethod
    def _of(cls, saved: SavedSpace) -> Self:
        words = saved.arrays["words"].astype(np.uint64, copy=False)
        rarity = saved.arrays["rarity"].astype(np.float64, copy=False)
        components = saved.arrays["components"].astype(np.float32, copy=False)
        whole = rarity.shape == words.shape == components.shape[:1] and components.ndim == 2
        sound = whole and bool(
            (np.abs(components) <= MOST_COMPONENT).all() and (np.abs(rarity) <= MOST_RARITY).all()
        )
        if not sound or (words[1:] <= words[:-1]).any():
            raise DataError("is not a whole space")
        return cls(words, rarity, components, str(saved.header["hashing"]))


def named(words: Sequence[str], family: HashFamily) -> Names:
    """Words under the federation's key, in 64 bits."""
    digests = b"".join(
        hashlib.blake2b(word.encode(), key=family.key, digest_size=8, person=b"isthmus space").digest()
        for word in words
    )
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def directions(counted: Counted, words: Sequence[str], rarity: FloatArray, family: HashFamily) -> Space:
    """One silo's part: VᵢSᵢ of its documents' TF-IDF; `words` and their rarity are by code."""
    from scipy.sparse import csr_array
    from sklearn.utils.extmath import randomized_svd

    having = np.bincount(counted.word, minlength=len(words))
    known = np.flatnonzero(having >= LEAST_DOCUMENTS)
    place = np.full(len(words), -1)
    place[known] = np.arange(len(known))
    entries = np.flatnonzero(place[counted.word] >= 0)
    document, word = counted.document[entries], counted.word[entries]
    weights = (1 + np.log(counted.times[entries])) * rarity[word]
    norms = np.sqrt(np.bincount(document, weights**2, counted.documents))
    shape = (counted.documents, len(known))
    table = csr_array((weights / norms[document], (document, place[word])), shape=shape)
    scale = 1.0
    if counted.documents > FITTED_ON:
        chosen = np.sort(Streams(0)("space").choice(counted.documents, FITTED_ON, replace=False))
        table, scale = table[chosen], (counted.documents / FITTED_ON) ** 0.5
    wanted = min(DIMENSIONS, *table.shape)
    if wanted:
        _, strength, vectors = randomized_svd(table, wanted, random_state=0)
        components = (vectors.T * (scale * strength)).astype(np.float32)
    else:
        components = np.zeros((len(known), 0), dtype=np.float32)
    names = named([words[at] for at in known.tolist()], family)
    order = np.argsort(names)
    return Space(names[order], rarity[known][order], components[order], family.public_name)


def joined(parts: Sequence[Space], dimensions: int = DIMENSIONS) -> Space:
    """The directions of all documents, from every silo's own; of unit length, the strongest first."""
    if not parts or len({part.hashing for part in parts}) != 1:
        raise ProtocolError("directions under different hash keys do not join")
    words = np.unique(np.concatenate([part.words for part in parts]))
    rarity = np.zeros(len(words))
    stacked = np.zeros((sum(part.width for part in parts), len(words)), dtype=np.float32)
    first = 0
    for part in parts:
        at = np.searchsorted(words, part.words)
        rarity[at] = np.maximum(rarity[at], part.rarity)
        stacked[first : first + part.width, at] = part.components.T
        first += part.width
    strength, left = np.linalg.eigh(stacked.astype(np.float64) @ stacked.T)
    kept = np.flatnonzero(strength > 1e-9 * max(strength.max(initial=0.0), 1e-300))[::-1][:dimensions]
    components = (stacked.T @ left[:, kept].astype(np.float32)) / np.sqrt(strength[kept]).astype(np.float32)
    if len(words):
        signs = np.sign(components[np.abs(components).argmax(axis=0), np.arange(len(kept))])
        components = components * signs
    return Space(words, rarity, np.ascontiguousarray(components, dtype=np.float32), parts[0].hashing)


class SpaceQueries(QueryEncoder):
    """The shared directions as a node's encoder; a query costs as many rows as it has words."""

    def __init__(self, space: Space, family: HashFamily) -> None:
        if space.hashing != family.public_name:
            raise ProtocolError("directions under another hash key than this silo's")
        self.space, self.family, self.width = space, family, space.width
        self._by_code: WeakKeyDictionary[object, FloatArray] = WeakKeyDictionary()

    @property
    def fingerprint(self) -> str:
        return self.space.fingerprint

    def rarities(self, words: Sequence[str]) -> FloatArray:
        """Of words; 0 for one that no silo named."""
        rows = self.space.rows(named(words, self.family))
        return np.where(rows >= 0, self.space.rarity[np.maximum(rows, 0)], 0.0) if len(rows) else np.zeros(0)

    def documents(self, texts: Sequence[str]) -> Vectors:
        from scipy.sparse import csr_array

        tokens = ENGLISH(texts)
        counts = tokens.counts()
        rows = self.space.rows(named(tokens.terms.words, self.family))[counts.indices]
        known = np.flatnonzero(rows >= 0)
        text = np.repeat(np.arange(len(tokens)), np.diff(counts.indptr))[known]
        weights = (1 + np.log(counts.data[known])) * self.space.rarity[rows[known]]
        table = csr_array((weights, (text, rows[known])), shape=(len(tokens), len(self.space.words)))
        return unit(np.asarray(table @ self.space.components, dtype=np.float32))

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """(1 + ln tf)·rarity of the known words through the shared directions, of unit length."""
        distinct = list(dict.fromkeys(words))
        rows = self.space.rows(named(distinct, self.family))
        known = np.flatnonzero(rows >= 0)
        if not len(known):
            return np.zeros(self.width, dtype=np.float32)
        times = [words.count(distinct[at]) for at in known.tolist()]
        return through(self.space.components[rows[known]], self.space.rarity[rows[known]], times)

    def weighed(self, reader: EngineReader, handles: IntArray) -> tuple[FloatArray, FloatArray]:
        """The length of documents' TF-IDF, and the rarity of all words that each begins with."""
        counted = reader.terms(handles)
        rarity = self._rarities_by_code(reader)[counted.word]
        squares = ((1 + np.log(np.maximum(counted.times, 1))) * rarity) ** 2
        norms = np.sqrt(np.bincount(counted.document, squares, len(handles)))
        return norms, np.bincount(counted.document, rarity * counted.lead, len(handles)).astype(np.float64)

    def _rarities_by_code(self, reader: EngineReader) -> FloatArray:
        """The rarity of every word that the reader's engine has a code for; of new words as they come."""
        known = self._by_code.get(reader.vocabulary, np.empty(0))
        words = reader.words(len(known))
        if words:
            known = self._by_code[reader.vocabulary] = np.concatenate((known, self.rarities(words)))
        return known


def rarity_of(having: FloatArray, documents: float) -> FloatArray:
    """ln((1 + N)/(1 + df)) + 1."""
    return np.asarray(np.log((1 + documents) / (1 + np.clip(having, 0, documents))) + 1)
