"""The encoder of a node's dense retriever: fitted or loaded once, and quick for a single query."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from os import PathLike

import numpy as np

from isthmus.arrays import FloatArray, Ids
from isthmus.encoders import Encoder, Lsa, Span, Vectors, load_encoder, passage_texts, split_passages
from isthmus.randomness import Streams
from isthmus.service import settings
from isthmus.tables import Bundle
from isthmus.text import Tokeniser

FITTED_ON = 20_000
"""Texts that a built-in encoder is fitted on at most: more of them cost time and change little."""
REST = 5.0
"""Seconds that an encoder which failed a query is left alone."""

_log = logging.getLogger("isthmus.service")


class SavedLsa(Bundle):
    """A fitted encoder's file."""

    noun = "encoder"


def save_lsa(encoder: Lsa, path: str | PathLike[str]) -> None:
    """Write a fitted encoder; silos that share it have vectors that compare."""
    header = {"stemmer": encoder.tokeniser.stemmer, "stop_words": sorted(encoder.tokeniser.stop_words)}
    words = "\n".join(encoder.terms.words)
    SavedLsa(header, {"rarity": encoder.rarity, "components": encoder.components}, {"terms": words}).write(
        path
    )


def load_lsa(path: str | PathLike[str]) -> Lsa:
    """Read it back; it encodes as it did."""
    return SavedLsa.restore(path, _restored)


def _restored(saved: SavedLsa) -> Lsa:
    tokeniser = Tokeniser(saved.header["stemmer"], frozenset(saved.header["stop_words"]))
    terms = Ids.of(saved.texts["terms"].split("\n") if saved.texts["terms"] else [])
    return Lsa(terms, saved.arrays["rarity"], saved.arrays["components"], tokeniser)


def fit_lsa(texts: Sequence[str], *, dimensions: int) -> Lsa:
    """An encoder of the silo's own text, from a sample where there is much of it."""
    if len(texts) > FITTED_ON:
        chosen = Streams(0)("encoder").choice(len(texts), FITTED_ON, replace=False)
        texts = [texts[at] for at in sorted(chosen.tolist())]
    return Lsa.fit(texts, dimensions=dimensions)


class QueryEncoder:
    """Encodes documents many at a time and a query at once, with any encoder.

    Cosines of one `pretrained` on other texts than a silo's are worth as much as BM25; those of a latent
    space of a few thousand documents are not, and take part only where their weight is learned.
    """

    pretrained = False
    rests_until = 0.0
    """On the monotonic clock: before then queries have no vector, because one failed."""
    problem = ""
    """Why queries are searched by words alone at the moment; empty while they are not."""

    def __init__(self, encoder: Encoder, width: int) -> None:
        self.encoder, self.width = encoder, width

    @property
    def fingerprint(self) -> str:
        """The same for encoders whose vectors compare."""
        return self.encoder.fingerprint

    def documents(self, texts: Sequence[str]) -> Vectors:
        """A vector for every text."""
        return self.encoder.encode(texts)

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """The vector of a query, which comes with its words."""
        vector: Vectors = self.encoder.encode_queries([text])[0]
        return vector


class LsaQueries(QueryEncoder):
    """The built-in encoder with its words in a dictionary: a query costs as many rows as it has words."""

    encoder: Lsa

    def __init__(self, encoder: Lsa) -> None:
        super().__init__(encoder, int(encoder.components.shape[1]))
        self._row_of = {word: row for row, word in enumerate(encoder.terms.words)}

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """(1 + ln tf)·idf of the known words through the learned directions, of unit length."""
        counted = Counter(row for word in words if (row := self._row_of.get(word)) is not None)
        if not counted:
            return np.zeros(self.width, dtype=np.float32)
        rows = np.array(list(counted))
        return through(self.encoder.components[rows], self.encoder.rarity[rows], list(counted.values()))


def through(directions: Vectors, rarity: FloatArray, times: Sequence[int]) -> Vectors:
    """(1 + ln tf)·rarity of words through the directions of each, of unit length."""
    from scipy.special import xlogy

    weights = (1 + xlogy(1, np.array(times, dtype=np.float64))) * rarity
    vector = (weights @ directions).astype(np.float32)
    norm = float(np.linalg.norm(vector))
    scaled: Vectors = vector / np.float32(norm) if norm > 0 else vector
    return scaled


class AnyQueries(QueryEncoder):
    """Any other encoder: a costly one, whose vectors come by and by, and which reads a limited length.

    It may fail: then a query has a vector without direction, and for `REST` seconds it is not asked again.
    """

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """The vector of a query; zeros while the encoder fails."""
        now = time.monotonic()
        if now < self.rests_until:
            return np.zeros(self.width, dtype=np.float32)
        if self.problem:
            self.rests_until = now + REST  # one tries, the others go on by words
        try:
            vector = super().query(text, words)
        except Exception as error:  # whatever it is, words are searched
            if not self.problem:
                _log.warning("searched by words alone until the encoder answers again: %s", error)
            self.problem, self.rests_until = type(error).__name__, time.monotonic() + REST
            return np.zeros(self.width, dtype=np.float32)
        if self.problem:
            _log.info("the encoder answers again")
            self.problem, self.rests_until = "", time.monotonic()
        return vector

    def split(self, title: str, body: str) -> list[Span]:
        """The spans of a document's passages in its body."""
        return split_passages(self.encoder, title, body)

    def passages(self, title: str, body: str, spans: Sequence[Span]) -> list[str]:
        """What is encoded for spans of the body: the title and the passage."""
        return passage_texts(self.encoder, title, body, spans)

    pretrained = True


class NoQueries(QueryEncoder):
    """No dense retriever: vectors without any direction."""

    fingerprint = "none"
    width = 0

    def __init__(self) -> None:
        pass

    def documents(self, texts: Sequence[str]) -> Vectors:
        """An array of shape (texts, 0)."""
        return np.zeros((len(texts), 0), dtype=np.float32)

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """An empty vector."""
        return np.zeros(0, dtype=np.float32)


def prevailing(stated: Iterable[tuple[str, int]]) -> str:
    """The fingerprint that most silos state, of equally many that of more documents; each comes with how many
    documents its silo has, and is empty where it has said nothing.

    "none" unless two silos have it, or there is but one to speak of; empty where no silo has spoken.
    """
    silos, documents = Counter[str](), Counter[str]()
    for fingerprint, size in stated:
        if fingerprint:
            silos[fingerprint] += 1
            documents[fingerprint] += size
    if not silos:
        return ""
    most = max(silos, key=lambda name: (silos[name], documents[name], name))
    return most if silos[most] > 1 or len(silos) == 1 else "none"


def another_encoder(own: str, agreed: str) -> str:
    """What is said of a silo whose encoder is not the one that the silos agree on; empty if it is."""
    if agreed in ("", "none") or own == agreed:
        return ""
    return "its encoder is not the one that most silos have: merged without its dense score"


def ready_encoder(wanted: settings.EncoderSettings) -> QueryEncoder | None:
    """The encoder that the settings name; None for one that is still to be fitted on the silo's texts."""
    if wanted.kind == "none":
        return NoQueries()
    if wanted.kind in ("encoder", "transformer"):
        name = wanted.name if wanted.path is None else str(wanted.path)
        encoder = load_encoder(name, max_tokens=wanted.limit)
        return AnyQueries(encoder, encoder.width)
    return None if wanted.path is None else LsaQueries(load_lsa(wanted.path))
