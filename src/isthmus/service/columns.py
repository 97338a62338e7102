"""The columns of a query's candidates that search models read, computed in the same way by every silo.

Statistics are those of all silos. If these do not distinguish title and body, both fields have the text's
document frequencies, and a word counts once a document, so that a column is the same whichever silo has
the document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.engines import FIELDS
from isthmus.features import NAMES, Pairs, compute
from isthmus.learning import (
    COLUMNS,
    FEATURES,
    GROUPS,
    LARGEST,
    LIST,
    OF_QUERY,
    JudgedRows,
    SearchModel,
    profile_of,
)
from isthmus.retrieval import TEXT
from isthmus.service.candidates import FieldCounts, Mask, QueryCandidates, Snapshot
from isthmus.service.scoring import Scored, best_first, bm25_shares, evidence, raw_score
from isthmus.service.wire import Evidence

LEAST_COUNT = 0.5
"""Least count of a word in all silos: a private count may be 0 although a document has the word."""
PER_WORD = ("TF", "LMIR.DIR", "LMIR.JM")
"""Features that grow with the number of a query's words; the others grow with their Σ idf."""


START, OF_PROFILE, CALIBRATION = "start", "profile", "calibration"
"""Names of parts of an explanation: the constant that all hits share, what the query's profile adds, and what
a calibrator of the whole score does."""
_LN_WORDS = COLUMNS.index("ln words")
SURE = 1e-15
"""Least distance from 0 and 1 of a probability whose log-odds are taken."""

R = TypeVar("R", bound=JudgedRows)


@dataclass(frozen=True, eq=False)
class _SharedCounts(FieldCounts):
    """Counts of one field of a query's candidates with the statistics of all silos."""

    @property
    def documents(self) -> float:
        shared = self.snapshot.shared
        return len(self.snapshot) if shared is None else shared.documents

    @property
    def length(self) -> float:
        shared = self.snapshot.shared
        return (self.snapshot if shared is None else shared).lengths[self.field]

    def _statistic(self, kind: str) -> FloatArray:
        shared = self.snapshot.shared
        if shared is None or self._shared is not None:
            counts = super()._statistic(kind)
        else:
            counts = shared.counts(TEXT, self.candidates.terms, self.snapshot.family)
        return np.maximum(counts, LEAST_COUNT)


def candidate_columns(snapshot: Snapshot, candidates: QueryCandidates, encoder: str) -> FloatArray:
    """Return the columns of `learning.COLUMNS` for every candidate.

    Cosines are NaN for a document without a vector, and for all unless the silo has the `encoder` that all
    silos agree on.
    """
    size, counts = len(candidates), candidates.counts
    times = np.bincount(candidates.tokens.terms.codes, minlength=len(candidates.terms)).astype(np.float64)
    rarity = snapshot.rarity(candidates.terms)
    words, total = max(times.sum(), 1.0), max(float(times @ rarity), 1e-9)
    squares = times * rarity**2 / max(float(times @ rarity**2), 1e-9)
    cosines = np.full(size, np.nan)
    if _agrees(snapshot, encoder):
        cosines = candidates.scores.get("dense", cosines)
    columns = {
        "bm25": np.nan_to_num(bm25_shares(candidates)),
        "dense": np.where(np.isfinite(cosines), np.clip(cosines, -1, 1), np.nan),
        "rare": (counts.title + counts.body > 0) @ squares,
        "title": (counts.title > 0) @ squares,
        "lead": (counts.lead > 0) @ squares,
        "ln length": np.log1p(counts.lengths.sum(axis=1)),
    }
    columns |= zip(OF_QUERY, np.tile(query_columns(snapshot, candidates), (size, 1)).T, strict=True)
    title, body = (_SharedCounts(snapshot, candidates, field) for field in FIELDS)
    pairs = Pairs(np.zeros(size, dtype=np.int64), np.arange(size))
    sixteen = compute(candidates.tokens, pairs, title=title, body=body)
    for name in FEATURES:
        per_word = name.partition(".")[2] in PER_WORD
        columns[name] = sixteen[:, NAMES.index(name)] / (words if per_word else total)
    return np.column_stack([columns[name] for name in COLUMNS])


def query_columns(snapshot: Snapshot, candidates: QueryCandidates) -> FloatArray:
    """Return the columns of `OF_QUERY`: ln of the number of the query's words, and their mean idf. Stop words
    have the idf 0: statistics of all silos leave them out, which would make them the rarest of words."""
    codes = candidates.tokens.terms.codes
    words = max(len(codes), 1)
    is_content = candidates.tokens.stopped is None
    rarity = snapshot.rarity(candidates.terms)[codes].sum() if is_content else 0.0
    return np.array([np.log(words), rarity / words])


def _agrees(snapshot: Snapshot, encoder: str) -> bool:
    return bool(encoder) and snapshot.encoder.fingerprint == encoder


def eligible(snapshot: Snapshot, candidates: QueryCandidates, encoder: str) -> Mask:
    """Return a mask of the candidates that a model orders: only those that BM25 lists, unless the silo has
    the encoder that all agree on."""
    return np.ones(len(candidates), dtype=bool) if _agrees(snapshot, encoder) else candidates.listed["bm25"]


def silo_rows(
    snapshot: Snapshot,
    queries: Sequence[str],
    grades: Mapping[str, Mapping[str, bool]],
    *,
    folds: Sequence[int],
    encoder: str,
    depth: int,
    own: Sequence[str | None] = (),
    build: Callable[..., R] = JudgedRows,  # type: ignore[assignment]
) -> R:
    """Return the rows of judged queries, with the candidates that a search would order.

    `grades` say by query and document what was right; `own` is the document that a query was made from,
    which is left out. `build` makes the result from its parts.
    """
    tables, relevant, sizes, targets = [np.empty((0, len(COLUMNS)))], [np.empty(0)], [], []
    for query, itself in zip(queries, own or (None,) * len(queries), strict=True):
        candidates = snapshot.find(query, depth)
        names = np.array(candidates.documents, dtype=object)
        rows = np.flatnonzero(eligible(snapshot, candidates, encoder) & (names != itself))
        right = {name for name, is_right in grades.get(query, {}).items() if is_right and name != itself}
        if len(rows):
            tables.append(candidate_columns(snapshot, candidates, encoder)[rows])
        relevant.append(np.array([name in right for name in names[rows]], dtype=np.float64))
        sizes.append(len(rows))
        targets.append(len(right))
    return build(
        np.concatenate(tables),
        np.concatenate(relevant),
        np.repeat(np.arange(len(queries)), np.array(sizes, dtype=np.int64)),
        fold=np.array(folds, dtype=np.int64),
        targets=np.array(targets, dtype=np.float64),
        judged=np.array([query in grades for query in queries], dtype=np.int64),
    )


@dataclass(frozen=True, eq=False)
class ModelScorer:
    """A search model that silos have learned together, as a node's scorer.

    Scores are margins. Probabilities are for the query's profile in this silo alone; the broker, which
    merges silos, joins their profiles and applies the model again.
    """

    name: ClassVar[str] = "learned"
    comparable: ClassVar[bool] = True

    model: SearchModel

    @property
    def version(self) -> str:
        """Version of the model; empty if the silo has calibrated the baseline by itself."""
        return str(self.model.about.get("version", ""))

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """Return margins and probabilities."""
        if not len(candidates):
            return Scored(np.empty(0, np.int64), np.empty(0), None)
        table = candidate_columns(snapshot, candidates, self.model.encoder)
        model = self.model.of_query(table[0, _LN_WORDS])
        margins = model.score(table)
        order = best_first(candidates, margins)
        order = order[eligible(snapshot, candidates, self.model.encoder)[order]]
        profile = profile_of([margins[order[:LIST]]], table[0, -len(OF_QUERY) :])
        return Scored(order, margins, model.probabilities(margins, profile, silos=1), table)

    def alone(self, snapshot: Snapshot, candidates: QueryCandidates) -> FloatArray:
        """Return the probability of every candidate in a list of the usual shape, so that no other candidate
        changes it. 0 before anything was judged."""
        calibration = self.model.calibration
        if calibration is None:
            return np.zeros(len(candidates))
        calibration = replace(calibration, gate=-LARGEST)  # as in a list with all its relevant hits
        usual = calibration.centre.copy()
        usual[-len(OF_QUERY) :] = query_columns(snapshot, candidates)
        table = candidate_columns(snapshot, candidates, self.model.encoder)
        return calibration(self.model.score(table), usual)

    def profile(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored
    ) -> tuple[list[float], list[float]]:
        """Return this silo's input of `learning.profile_of`: its best margins, and the query's own
        columns."""
        best = scored.scores[scored.order[:LIST]].tolist()
        return best, query_columns(snapshot, candidates).tolist()

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """Return what each retriever's columns add to the log-odds, or to the margin without a calibration;
        the rest is the constant start and what the query's profile adds."""
        if scored.table is None:
            return []
        model = self.model.of_query(scored.table[0, _LN_WORDS])
        line = model.calibration
        slope, start = (1.0, 0.0) if line is None else (line.rise, line.start)
        start += slope * model.score.start
        names = [name for name in GROUPS if name == "bm25" or self.model.encoder]
        parts = model.evidence(scored.table)
        reasons = []
        for at in scored.order[:depth].tolist():
            added = {name: slope * float(parts[name][at]) for name in names}
            raw = {name: raw_score(candidates, name, at) for name in names}
            shares = [evidence(name, raw[name], None, slope, added[name]) for name in names]
            shares.append(evidence(START, None, None, None, start))
            if scored.probabilities is not None:
                rest = log_odds(float(scored.probabilities[at])) - start - sum(added.values())
                shares.append(evidence(OF_PROFILE, None, None, None, rest))
            reasons.append(shares)
        return reasons


def log_odds(probability: float) -> float:
    """Return ln(p/(1 − p)), with p kept away from 0 and 1 by `SURE`."""
    sure = min(max(probability, SURE), 1 - SURE)
    return float(np.log(sure) - np.log1p(-sure))
