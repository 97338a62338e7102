"""What a silo's shared ranker reads of every candidate, and what the candidates say of each other.

Columns of the first look: by words (BM25; BM25 over its largest value Σ idf; the TF-IDF cosine; the share of
idf that is covered; length; how well the query and a document's beginning cover each other) and by direction
(cosines in the first 64, 128 and all shared directions), some of them squared. The second look adds what the
first thought of the candidate's company in the same silo:

    feedback     the cosine to q + Σ p·d over the five likeliest candidates, each as likely as it seemed
    neighbours   the mean log-odds of the five nearest candidates, by similarity

so that a silo whose best candidates are improbable is not led astray by them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.encoders import Vectors
from isthmus.errors import DataError
from isthmus.service.candidates import QueryCandidates, Snapshot
from isthmus.service.space import SpaceQueries

BY_WORDS = (
    *("bm25", "bm25/Σidf", "cosine", "coverage", "ln length", "bm25/Σidf squared", "cosine squared"),
    *("lead recall", "lead precision", "lead cosine", "lead cosine squared", "ln lead"),
)
BY_DIRECTION = ("lsa 64", "lsa 128", "lsa", "lsa 128 squared")
BY_COMPANY = ("feedback", "neighbours")
FIRST = (*BY_WORDS, *BY_DIRECTION)
SECOND = (*FIRST, *BY_COMPANY)
"""The columns of the two looks."""
GROUPS = {
    "bm25": slice(0, len(BY_WORDS)),
    "dense": slice(len(BY_WORDS), len(FIRST)),
    "feedback": slice(len(FIRST), len(SECOND)),
}
"""Whose evidence a column is, for explanations."""
PREFIXES = (64, 128)
COMPANY = 5
"""Candidates that feed back, and neighbours that count."""


def first_look(snapshot: Snapshot, candidates: QueryCandidates) -> FloatArray:
    """The columns of `FIRST` for every candidate, from figures and directions that all silos share."""
    encoder = snapshot.encoder
    if not isinstance(encoder, SpaceQueries):
        raise DataError("the silo has no shared directions", cure="let the broker learn first")
    words, counts = candidates.tokens.terms.words, candidates.counts
    times = np.bincount(candidates.tokens.terms.codes, minlength=len(words)).astype(np.float64)
    idf = times * snapshot.rarity(candidates.terms)
    rarity = encoder.rarities(words)
    weighted_query = (1 + np.log(np.maximum(times, 1))) * rarity
    most = max(float(idf.sum()), 1e-9)
    both = (counts.title + counts.body).astype(np.float64)
    present = both > 0
    weights = (1 + np.log(np.maximum(both, 1))) * present * rarity
    norms, begun = encoder.weighed(snapshot.reader, candidates.handles)
    cosine = _ratio(weights @ weighted_query, norms * float(np.linalg.norm(weighted_query)))
    bm25 = candidates.scores["bm25"]
    by_words = [bm25, bm25 / most, cosine, present @ idf / most, np.log1p(counts.lengths.sum(axis=1))]
    by_words += [(bm25 / most) ** 2, cosine**2]
    leading = (counts.lead > 0) @ rarity
    lead = leading / np.sqrt(np.maximum(begun * rarity.sum(), 1e-9))
    by_words += [leading / max(rarity.sum(), 1e-9), _ratio(leading, begun), lead, lead**2]
    by_words.append(np.log1p(begun))
    near = _prefix_cosines(snapshot.reader.vectors(candidates.handles), encoder.query("", candidates.words))
    return np.column_stack((*by_words, *near, near[1] ** 2))


def _ratio(part: FloatArray, whole: FloatArray) -> FloatArray:
    """0 where there is no whole."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)


def _prefix_cosines(vectors: Vectors, query: Vectors) -> list[FloatArray]:
    """The cosines in the first directions, in more of them, and in all."""
    found = []
    for width in (*PREFIXES, len(query)):
        mine, asked = vectors[:, :width].astype(np.float64), query[:width].astype(np.float64)
        found.append(_ratio(mine @ asked, np.linalg.norm(mine, axis=1) * np.linalg.norm(asked)))
    return found


@dataclass(frozen=True, eq=False)
class Company:
    """The nearest other candidates of every candidate, and how near they are."""

    rows: IntArray
    weights: FloatArray

    @classmethod
    def of(cls, vectors: Vectors) -> Company:
        """Of unit vectors; a candidate alone is its own company."""
        count = min(COMPANY, len(vectors) - 1)
        if count < 1:
            return cls(np.zeros((len(vectors), COMPANY), np.int64), np.ones((len(vectors), COMPANY)))
        near = vectors @ vectors.T
        np.fill_diagonal(near, -2.0)
        rows = np.argpartition(-near, count - 1, axis=1)[:, :count]
        weights = np.maximum(np.take_along_axis(near, rows, axis=1), 1e-6).astype(np.float64)
        wide = ((0, 0), (0, COMPANY - count))  # as wide as everywhere; nobody counts for nothing
        return cls(np.pad(rows, wide), np.pad(weights, wide))

    def mean(self, log_odds: FloatArray) -> FloatArray:
        """What the neighbours seemed, on average."""
        return np.asarray((self.weights * log_odds[self.rows]).sum(axis=1) / self.weights.sum(axis=1))


def feedback(vectors: Vectors, query: Vectors, log_odds: FloatArray) -> FloatArray:
    """The cosine to the query led by its likeliest candidates, each as far as it is likely."""
    from scipy.special import expit

    best = np.lexsort((np.arange(len(log_odds)), -log_odds))[:COMPANY]
    led = query + expit(log_odds[best]).astype(np.float32) @ vectors[best]
    norm = float(np.linalg.norm(led))
    return (vectors @ led).astype(np.float64) / norm if norm > 0 else np.zeros(len(vectors))


def second_look(vectors: Vectors, query: Vectors, log_odds: FloatArray) -> FloatArray:
    """The columns of `BY_COMPANY`, from the candidates' unit vectors and the first look's log-odds."""
    company = Company.of(vectors).mean(log_odds)
    return np.column_stack((feedback(vectors, query, log_odds), company))
