"""A silo's rows of judged queries, protected against a peer that may ask arbitrary questions.

Of judgements, a peer that learns sees only totals of all silos: how good the lists of judged queries are,
in an order of queries that only silos know, relevant hits by groups of hits, and sums over the columns of
relevant rows. What it can infer from these is bounded:

- the coefficients of fits do not change what sums tell about judgements, and a query has the weight one
  over a number of relevant documents, fixed for a session: judgements enter by one sum over columns of
  relevant rows;
- a ranking that shows hits of fewer than `least_queries` judged queries is answered with zeros, and groups
  of hits contain hits of as many queries, and of three silos where these are counted in their own lists;
- the weights of silos are fixed for a session, and at least three silos that add something have one;
- questions have the sizes of the session, and come no more often than in an honest one.

Bounded is not prevented: groups that differ by one hit differ by its judgement (docs/threat-model.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray, IntArray
from isthmus.errors import ProtocolError
from isthmus.learning import (
    HITS,
    ColumnMoments,
    CrossExamination,
    FoldsOf,
    GainsOf,
    HitsByCell,
    JudgedRows,
    LearningQuestion,
    LossSums,
    OwnHitsByCell,
    OwnModel,
    QueryColumns,
    RelevantOf,
    Start,
)
from isthmus.private import LEAST_MEMBERS

MOST_QUESTIONS = 500
"""Most questions of one session; learning asks about a hundred."""
TIMES: Mapping[type[LearningQuestion], int] = {
    Start: 1,
    FoldsOf: 1,
    QueryColumns: 1,
    RelevantOf: 1,
    ColumnMoments: 1,
    OwnModel: 1,
    CrossExamination: 1,
    GainsOf: 20,
    HitsByCell: 40,
    OwnHitsByCell: 40,
}
"""How often an honest session asks a question at most; rankings are asked for every model and share that is
tried."""
SUBSTANTIAL = 0.1
"""Least share of the heaviest silo's weight with which a silo counts: one with less does not hide
the others."""


class GuardedRows(JudgedRows):
    """Answers a peer's questions about one set of judgements as a whole, and about no part of it."""

    def __init__(
        self,
        *rows: Any,
        queries: Sequence[str],
        crowd: Collection[str],
        key: bytes,
        session: str,
        weighed: bool,
        adding: Sequence[bool],
        **parts: Any,
    ) -> None:
        """`crowd` are the judged queries that hide each other. Outcomes are in an order derived from the
        federation's `key`, which differs in every session. `adding` says for all silos, in the order of
        their names, whether they add something. `weighed` says whether silos have weights in this session,
        which their owners must allow."""
        super().__init__(*rows, **parts, order=_order(queries, key, session))
        self._adding = np.array(adding, dtype=bool)
        self._silo_weights: FloatArray | None = None
        self._crowd, self._weighed = np.array([query in crowd for query in queries], dtype=bool), weighed
        self._left, self._by_query = MOST_QUESTIONS, np.empty(0)
        self._counts: dict[type[LearningQuestion], int] = {}

    def answer(self, question: LearningQuestion) -> FloatArray:
        """Answer as any rows do, within bounds that an honest peer never reaches; raises a ProtocolError
        beyond them."""
        kind = type(question)
        self._left -= 1
        self._counts[kind] = self._counts.get(kind, 0) + 1
        if self._left < 0 or self._counts[kind] > TIMES.get(kind, MOST_QUESTIONS):
            raise ProtocolError("more questions than a session has")
        if isinstance(question, (LossSums, GainsOf, HitsByCell, OwnHitsByCell, RelevantOf)):
            self._check_weights(question.silo_weights)
        if isinstance(question, LossSums):
            self._check_by_query(question.by_query)
        if isinstance(question, OwnHitsByCell):
            self._check_lists(question)
        answer = super().answer(question)
        if isinstance(question, (GainsOf, HitsByCell, OwnHitsByCell)) and not self._is_crowded(question):
            return np.zeros_like(answer)
        return answer

    def _check_weights(self, weights: FloatArray) -> None:
        """Raise a ProtocolError for weights with which fewer than three silos count that add something, for
        weights in a session without any, and for others than the session's first, since a difference could
        be one silo's."""
        if self._silo_weights is None:
            self._silo_weights = weights
        if not np.array_equal(weights, self._silo_weights):
            raise ProtocolError("what silos count is settled for a session")
        if not len(weights):
            return
        whole = self._weighed and weights.shape == self._adding.shape and weights.min() >= 0
        heavy = self._adding & (weights >= (SUBSTANTIAL - 1e-9) * weights.max()) if whole else np.zeros(1)
        if heavy.sum() < LEAST_MEMBERS:
            raise ProtocolError("weights with which fewer than three silos count, or in sums without weights")

    def _check_lists(self, question: OwnHitsByCell) -> None:
        """Raise a ProtocolError unless the lists are those of the session's silos and every group has hits of
        three silos that add something, or of both where two learn: no total is one silo's."""
        if question.cells.shape != (len(self._adding) * self.queries, HITS):
            raise ProtocolError("lists of other silos than this session has")
        row, place = np.nonzero(question.cells >= 0)
        group, silo = question.cells[row, place], row // max(self.queries, 1)
        added = np.unique(np.stack((group, silo))[:, self._adding[silo]], axis=1)[0]
        _, silos = np.unique(added, return_counts=True)
        fewest = min(LEAST_MEMBERS, int(self._adding.sum()))
        if len(silos) < len(np.unique(group)) or (len(silos) and silos.min() < fewest):
            raise ProtocolError(f"a group of hits of fewer than {fewest} silos")

    def _check_by_query(self, by_query: FloatArray) -> None:
        """Check the weights of queries, which are fixed for a session: 1/k for a k of at least the query's
        relevant documents here, or in a session with weights of silos of at least 1. Raises a
        ProtocolError."""
        if len(self._by_query):
            if not np.array_equal(by_query, self._by_query):
                raise ProtocolError("what queries count is settled for a session")
            return
        own = np.maximum(self.targets[self.order], 1.0)
        counts = 1 / by_query if len(by_query) == len(own) and (by_query > 0).all() else np.zeros(len(own))
        if self._weighed:  # relevant documents are weighted as well: their sum is no whole number
            own, whole = np.ones(len(own)), True
        else:
            whole = bool((np.abs(counts - np.round(counts)) <= 1e-6 * counts).all())
        if not whole or (counts < own - 1e-6).any():
            raise ProtocolError("queries count by their relevant documents, and by nothing else")
        self._by_query = by_query

    def _is_crowded(self, question: GainsOf | HitsByCell | OwnHitsByCell) -> bool:
        """Whether a ranking shows hits of enough judged queries."""
        rows, _ = self._placed(self._own_lists(question) if isinstance(question, OwnHitsByCell) else question)
        return len(np.unique(self.query[rows][self._crowd[self.query[rows]]])) >= self.least


def _order(queries: Sequence[str], key: bytes, session: str) -> IntArray:
    """Return the order of outcomes, by a keyed hash of session and query: the same in every silo."""

    def digest(at: int) -> bytes:
        text = f"{session}\0{queries[at]}".encode("utf-8", "replace")
        return hashlib.blake2b(text, key=key, digest_size=16, person=b"isthmus order").digest()

    return np.array(sorted(range(len(queries)), key=digest), dtype=np.int64)
