"""Scorers of a node: they order candidates and explain the order.

    bm25      BM25 alone; with shared statistics, all silos rank as one central index
    hybrid    ½·(s − mean)/deviation + ½·(c − mean)/deviation: BM25's share s of the query's Σ idf, cosine c

Means and deviations of the hybrid come from the score sums of all silos (`scale`) and are the same in every
silo, so scores compare; nothing in it is fitted to judgements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.engines import Change, ExactReader
from isthmus.errors import ProtocolError
from isthmus.private import HashFamily, family_of
from isthmus.retrieval import TEXT, Statistics
from isthmus.service.candidates import QueryCandidates, Snapshot
from isthmus.service.encoding import NoQueries
from isthmus.service.wire import Evidence, ScoreScale, Standard


@dataclass(frozen=True, eq=False)
class Scored:
    """Scored candidates: `order` has their positions, best first; scores and probabilities are by position.

    `table` has the columns that a learned model has read, by position.
    """

    order: IntArray
    scores: FloatArray
    probabilities: FloatArray | None
    table: FloatArray | None = None


def raw_score(candidates: QueryCandidates, retriever: str, at: int) -> float | None:
    """Return a retriever's score of the candidate at a position; None if the retriever did not return it."""
    listed = candidates.listed.get(retriever)
    return float(candidates.scores[retriever][at]) if listed is not None and listed[at] else None


class Scorer(Protocol):
    """Orders candidates and explains the order.

    If `comparable`, the broker compares the scores with other silos' as they are; vectors of an encoder on
    which the silos have not agreed may then not be used.
    """

    name: ClassVar[str]
    """Name of the scorer in answers."""
    comparable: ClassVar[bool]

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored: ...

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]: ...


class Bm25Scorer:
    """Orders candidates by BM25 alone, without probabilities."""

    name: ClassVar[str] = "bm25"
    comparable: ClassVar[bool] = True

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """Order the candidates that BM25 returned, by its score."""
        scores = candidates.scores["bm25"]
        order = best_first(candidates, scores)
        return Scored(order[candidates.listed["bm25"][order]], scores, None)

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """Return the score as the whole explanation."""
        return [
            [evidence("bm25", value, None, 1.0, value)]
            for value in scored.scores[scored.order[:depth]].tolist()
        ]


SHARE = 0.5
"""Weight of either retriever in the hybrid."""


def standardised(values: FloatArray, by: Standard) -> FloatArray:
    """Return (value − mean)/deviation; 0, as for the mean, where a score is missing (not finite)."""
    return np.where(np.isfinite(values), (values - by.mean) / by.deviation, 0.0)


def bm25_shares(candidates: QueryCandidates) -> FloatArray:
    """Return BM25 scores of candidates as shares of the highest that the query allows, Σ idf: between 0 and
    1.

    Long queries and queries with rare words have high scores; shares of different queries compare. A query
    without a word has no scores: NaN.
    """
    if not candidates.most > 0:
        return np.full(len(candidates), np.nan)
    return np.minimum(candidates.scores["bm25"] / candidates.most, 1.0)


@dataclass(frozen=True)
class HybridScorer:
    """Orders candidates by BM25 and the encoder's cosine in equal shares, without probabilities.

    In a silo whose encoder is not the scale's, and for a document without a vector, the cosine counts as the
    mean.
    """

    name: ClassVar[str] = "hybrid"
    comparable: ClassVar[bool] = True

    scale: ScoreScale

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """Order the candidates of both retrievers; those of BM25 alone if the silo has another encoder."""
        scores = sum(self._parts(snapshot, candidates).values(), start=np.zeros(len(candidates)))
        order = best_first(candidates, scores)
        return Scored(
            order if self._dense(snapshot, candidates) else order[candidates.listed["bm25"][order]],
            scores,
            None,
        )

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """Return each retriever's contribution, in deviations; both add up to the score."""
        parts = self._parts(snapshot, candidates)
        raw = {name: candidates.scores[name] for name in parts if name in candidates.scores}
        return [
            [
                evidence(name, finite(raw[name][at]) if name in raw else None, None, SHARE, float(added[at]))
                for name, added in parts.items()
            ]
            for at in scored.order[:depth].tolist()
        ]

    def _dense(self, snapshot: Snapshot, candidates: QueryCandidates) -> bool:
        return "dense" in candidates.scores and snapshot.encoder.fingerprint == self.scale.encoder

    def _parts(self, snapshot: Snapshot, candidates: QueryCandidates) -> dict[str, FloatArray]:
        """Every retriever's contribution to the candidates' scores."""
        parts = {"bm25": SHARE * standardised(bm25_shares(candidates), self.scale.bm25)}
        if self._dense(snapshot, candidates):
            parts["dense"] = SHARE * standardised(candidates.scores["dense"], self.scale.dense)
        return parts


def evidence(
    retriever: str, raw: float | None, probability: float | None, weight: float | None, contribution: float
) -> Evidence:
    """One retriever's share in a hit's explanation."""
    return Evidence(
        retriever=retriever, raw=raw, probability=probability, weight=weight, contribution=contribution
    )


def finite(value: float) -> float | None:
    """Return a number as messages can have it; None if it is not finite."""
    return float(value) if np.isfinite(value) else None


def best_first(candidates: QueryCandidates, scores: FloatArray) -> IntArray:
    """Return positions of candidates by score, ties by id, both descending."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    same = ranked[1:] == ranked[:-1]
    if same.any():  # ids are needed only among equals
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        names = candidates.names(order[tied])
        by_name = order[tied][sorted(range(len(names)), key=names.__getitem__, reverse=True)]
        order[tied] = by_name[np.argsort(-scores[by_name], kind="stable")]
    return order


def check_scores(snapshot: Snapshot, query: str, scorer: Scorer | None = None) -> None:
    """Run one search; raises a ProtocolError unless all scores and features are finite."""
    try:
        candidates = snapshot.find(query, 10)
        values = [*candidates.scores.values(), snapshot.features(candidates)]
        if scorer is not None:
            scored = scorer.score(snapshot, candidates)
            values.append(scored.scores[scored.order])
            if scored.probabilities is not None:
                values.append(scored.probabilities)
        usable = all(np.isfinite(each).all() for each in values)
    except Exception as error:  # any failure here would fail every search
        raise ProtocolError("scoring a query with these numbers failed") from error
    if not usable:
        raise ProtocolError("these numbers give scores that are not finite")


def try_on_query(statistics: Statistics, family: HashFamily | None = None) -> None:
    """Score one document with these statistics before they are used; raises ProtocolError if that fails.

    A broker that adds up private statistics has no hash key; for this test any key will do, since it finds
    cells of a table of that width.
    """
    if statistics.form == "private" and family is None:
        family = family_of("", len(statistics.tables[TEXT]))
        statistics = replace(statistics, hashing=family.public_name)
    probe = ExactReader([Change("probe", 1, False, "moon", "moon tide")])
    check_scores(Snapshot(probe, NoQueries(), statistics, family), "moon tide sun")
