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
"""Most texts that a built-in encoder is fitted on: more of them cost time and change little."""
REST = 5.0
"""Seconds for which an encoder that failed a query is not used."""

_log = logging.getLogger("isthmus.service")


class SavedLsa(Bundle):
    """The file of a fitted encoder."""

    noun = "encoder"


def save_lsa(encoder: Lsa, path: str | PathLike[str]) -> None:
    """Write a fitted encoder; silos that share it have vectors that compare."""
    header = {"stemmer": encoder.tokeniser.stemmer, "stop_words": sorted(encoder.tokeniser.stop_words)}
    words = "\n".join(encoder.terms.words)
    SavedLsa(header, {"rarity": encoder.rarity, "components": encoder.components}, {"terms": words}).write(
        path
    )


def load_lsa(path: str | PathLike[str]) -> Lsa:
    """Read an encoder that `save_lsa` wrote; it gives the same vectors."""
    return SavedLsa.restore(path, _restored)


def _restored(saved: SavedLsa) -> Lsa:
    tokeniser = Tokeniser(saved.header["stemmer"], frozenset(saved.header["stop_words"]))
    terms = Ids.of(saved.texts["terms"].split("\n") if saved.texts["terms"] else [])
    return Lsa(terms, saved.arrays["rarity"], saved.arrays["components"], tokeniser)


def fit_lsa(texts: Sequence[str], *, dimensions: int) -> Lsa:
    """Fit an encoder on the silo's own texts, or on a sample if there are more than `FITTED_ON`."""
    if len(texts) > FITTED_ON:
        chosen = Streams(0)("encoder").choice(len(texts), FITTED_ON, replace=False)
        texts = [texts[at] for at in sorted(chosen.tolist())]
    return Lsa.fit(texts, dimensions=dimensions)


class QueryEncoder:
    """Encodes many documents at a time and single queries, with any encoder.

    Cosines of an encoder that was `pretrained` on other texts than a silo's are worth as much as BM25.
    Those of a latent space of a few thousand documents are not, and are used only with a learned weight.
    """

    pretrained = False
    rests_until = 0.0
    """Time on the monotonic clock before which queries have no vector, because one failed."""
    problem = ""
    """Why queries are searched by words alone at the moment; empty if they are not."""

    def __init__(self, encoder: Encoder, width: int) -> None:
        self.encoder, self.width = encoder, width

    @property
    def fingerprint(self) -> str:
        """Identifier of the encoder, the same for encoders whose vectors compare."""
        return self.encoder.fingerprint

    def documents(self, texts: Sequence[str]) -> Vectors:
        """Return a vector for every text."""
        return self.encoder.encode(texts)

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """Return the vector of a query, given its text and its words."""
        vector: Vectors = self.encoder.encode_queries([text])[0]
        return vector


class LsaQueries(QueryEncoder):
    """The built-in encoder with a dictionary of its words: a query costs as many rows as it has words."""

    encoder: Lsa

    def __init__(self, encoder: Lsa) -> None:
        super().__init__(encoder, int(encoder.components.shape[1]))
        self._row_of = {word: row for row, word in enumerate(encoder.terms.words)}

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """Return (1 + ln tf)·idf of the known words, projected on the learned directions and scaled to unit
        length."""
        counted = Counter(row for word in words if (row := self._row_of.get(word)) is not None)
        if not counted:
            return np.zeros(self.width, dtype=np.float32)
        rows = np.array(list(counted))
        return through(self.encoder.components[rows], self.encoder.rarity[rows], list(counted.values()))


def through(directions: Vectors, rarity: FloatArray, times: Sequence[int]) -> Vectors:
    """Return the directions of words, summed with weights (1 + ln tf)·rarity and scaled to unit length."""
    from scipy.special import xlogy

    weights = (1 + xlogy(1, np.array(times, dtype=np.float64))) * rarity
    vector = (weights @ directions).astype(np.float32)
    norm = float(np.linalg.norm(vector))
    scaled: Vectors = vector / np.float32(norm) if norm > 0 else vector
    return scaled


class AnyQueries(QueryEncoder):
    """Any other encoder: a costly one, whose vectors are computed in the background, and which reads a
    limited length.

    If it fails, the query's vector is zero, and the encoder is not used for `REST` seconds.
    """

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """Return the vector of a query; zeros while the encoder fails."""
        now = time.monotonic()
        if now < self.rests_until:
            return np.zeros(self.width, dtype=np.float32)
        if self.problem:
            self.rests_until = now + REST  # one query tries the encoder; others search by words
        try:
            vector = super().query(text, words)
        except Exception as error:  # after any failure, search by words
            if not self.problem:
                _log.warning("searched by words alone until the encoder answers again: %s", error)
            self.problem, self.rests_until = type(error).__name__, time.monotonic() + REST
            return np.zeros(self.width, dtype=np.float32)
        if self.problem:
            _log.info("the encoder answers again")
            self.problem, self.rests_until = "", time.monotonic()
        return vector

    def split(self, title: str, body: str) -> list[Span]:
        """Return the spans of a document's passages in its body."""
        return split_passages(self.encoder, title, body)

    def passages(self, title: str, body: str, spans: Sequence[Span]) -> list[str]:
        """Return the texts to encode for spans of the body: title and passage."""
        return passage_texts(self.encoder, title, body, spans)

    pretrained = True


class NoQueries(QueryEncoder):
    """No dense retriever: vectors of width 0."""

    fingerprint = "none"
    width = 0

    def __init__(self) -> None:
        pass

    def documents(self, texts: Sequence[str]) -> Vectors:
        """Return an array of shape (texts, 0)."""
        return np.zeros((len(texts), 0), dtype=np.float32)

    def query(self, text: str, words: Sequence[str]) -> Vectors:
        """Return an empty vector."""
        return np.zeros(0, dtype=np.float32)


def prevailing(stated: Iterable[tuple[str, int]]) -> str:
    """Return the fingerprint that most silos state; of equally frequent ones, that of silos with more
    documents. `stated` has the fingerprint of every silo, empty if it has stated none, and its number of
    documents.

    Returns "none" if several are stated and no two silos share one, and "" if no silo has stated one.
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
    """Return a remark on a silo whose encoder is not the one that the silos agree on; empty if it is."""
    if agreed in ("", "none") or own == agreed:
        return ""
    return "its encoder is not the one that most silos have: merged without its dense score"


def ready_encoder(wanted: settings.EncoderSettings) -> QueryEncoder | None:
    """Return the encoder that the settings name; None for one that is still to be fitted on the
    silo's texts."""
    if wanted.kind == "none":
        return NoQueries()
    if wanted.kind in ("encoder", "transformer"):
        name = wanted.name if wanted.path is None else str(wanted.path)
        encoder = load_encoder(name, max_tokens=wanted.limit)
        return AnyQueries(encoder, encoder.width)
    return None if wanted.path is None else LsaQueries(load_lsa(wanted.path))
