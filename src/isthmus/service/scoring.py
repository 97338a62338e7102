"""Candidates in an order, and why: what every scorer of a node gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from isthmus.arrays import FloatArray, Ids, IntArray
from isthmus.errors import ProtocolError
from isthmus.private import HashFamily, family_of
from isthmus.retrieval import TEXT, Statistics
from isthmus.service.encoding import NoQueries
from isthmus.service.segments import build
from isthmus.service.snapshot import Found, Part, Snapshot
from isthmus.service.stores import Change
from isthmus.service.wire import Evidence


@dataclass(frozen=True, eq=False)
class Scored:
    """Candidates in order, best first: their places among those found, scores and probabilities."""

    order: IntArray
    scores: FloatArray
    probabilities: FloatArray | None


def raw_score(candidates: Found, retriever: str, at: int) -> float | None:
    """What a retriever gave a candidate, if that is in its list."""
    listed = candidates.listed.get(retriever)
    return float(candidates.scores[retriever][at]) if listed is not None and listed[at] else None


class Scorer(Protocol):
    """Puts candidates in order and says why."""

    def score(self, snapshot: Snapshot, candidates: Found) -> Scored: ...

    def explain(
        self, snapshot: Snapshot, candidates: Found, scored: Scored, depth: int
    ) -> list[list[Evidence]]: ...


class Bm25Scorer:
    """BM25 as it is."""

    def score(self, snapshot: Snapshot, candidates: Found) -> Scored:
        """Only what BM25 listed, by its score."""
        scores = candidates.scores["bm25"]
        order = best_first(candidates, scores)
        return Scored(order[candidates.listed["bm25"][order]], scores, None)

    def explain(
        self, snapshot: Snapshot, candidates: Found, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """The score is the whole explanation."""
        return [
            [evidence("bm25", value, None, 1.0, value)]
            for value in scored.scores[scored.order[:depth]].tolist()
        ]


def evidence(
    retriever: str, raw: float | None, probability: float | None, weight: float | None, contribution: float
) -> Evidence:
    """What one retriever had to say about a hit."""
    return Evidence(
        retriever=retriever, raw=raw, probability=probability, weight=weight, contribution=contribution
    )


def best_first(candidates: Found, scores: FloatArray) -> IntArray:
    """By score, ties by id, both descending."""
    return np.lexsort((-Ids.of(candidates.documents).codes, -scores))


def check_scores(snapshot: Snapshot, query: str, scorer: Scorer | None = None) -> None:
    """Search as anybody would; a ProtocolError unless every score and every feature is a finite number."""
    try:
        candidates = snapshot.find(query, 10)
        values = [candidates.scores["bm25"], snapshot.features(candidates)]
        if scorer is not None:
            scored = scorer.score(snapshot, candidates)
            values.append(scored.scores[scored.order])
            if scored.probabilities is not None:
                values.append(scored.probabilities)
        usable = all(np.isfinite(each).all() for each in values)
    except Exception as error:  # whatever it is, it would fail every search
        raise ProtocolError("numbers that no query can be scored with") from error
    if not usable:
        raise ProtocolError("numbers that give scores which are not finite")


def try_on_query(figures: Statistics, family: HashFamily | None = None) -> None:
    """Score one document with these statistics, before anybody relies on them; a ProtocolError if that fails.

    Who adds up private statistics has no hash key: any key finds cells of a table of that width.
    """
    if figures.form == "private" and family is None:
        family = family_of("", len(figures.tables[TEXT]))
        figures = replace(figures, hashing=family.public_name)
    probe = Change("probe", 1, False, "moon", "moon tide")
    segment = build("probe", [probe], np.zeros((1, 0), dtype=np.float32))
    check_scores(Snapshot((Part(segment),), NoQueries(), shared=figures, family=family), "moon tide sun")
