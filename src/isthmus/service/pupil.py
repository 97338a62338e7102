"""A silo's part in learning: its rows of judged queries stay, and questions about them get sums."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import FloatArray, IntArray
from isthmus.encoders import Vectors
from isthmus.errors import ProtocolError
from isthmus.logistic import likelihood_sums, newton
from isthmus.retrieval import TEXT
from isthmus.service.candidates import Snapshot
from isthmus.service.evidence import FIRST, GROUPS, Company, feedback, first_look
from isthmus.service.judged import Grades
from isthmus.service.learned import Learned, Line, Look
from isthmus.service.learning import HITS, Best, Kept, Moments, Question, Show, Slopes, Think
from isthmus.service.reliability import LEAST_HITS, SHOWN, reliability_curve
from isthmus.service.space import Space, directions, rarity_of
from isthmus.service.wire import ReliabilityCurve

SHRINKAGE = 1000.0
"""What holds a silo's own line to that of all silos; a hit shown weighs at most a quarter against it."""

MOST_QUESTIONS = 2_000
"""Questions of one session; a lesson of eight folds takes some hundreds."""


@dataclass(frozen=True)
class Lesson:
    """Queries, the fold of each, and what each is itself and must not find."""

    queries: tuple[str, ...]
    folds: tuple[int, ...]
    own: tuple[str | None, ...] = ()


@dataclass(frozen=True, eq=False)
class _Rows:
    """The candidates of one query."""

    names: tuple[str, ...]
    documents: IntArray
    query: Vectors
    first: FloatArray
    relevant: FloatArray
    company: Company


_NO_ROWS = _Rows(
    (),
    np.empty(0, np.int64),
    np.empty(0, np.float32),
    np.empty((0, len(FIRST))),
    np.empty(0),
    Company.of(np.empty((0, 1), np.float32)),
)


@dataclass(eq=False)
class _Table:
    """The rows of a lesson, query by query."""

    held: list[_Rows]
    first: FloatArray
    relevant: FloatArray
    weights: FloatArray
    query: IntArray
    fold: IntArray
    company: FloatArray
    bounds: IntArray
    scaled: tuple[bytes, FloatArray, FloatArray, FloatArray] | None = None
    """The columns that slopes were last asked of, and under which name: a fit asks many times."""


class Pupil:
    """Answers questions about the rows of one silo. What it has worked out of a query it keeps while the
    snapshot is the same."""

    def __init__(self, snapshot: Snapshot, judged: Grades, *, depth: int) -> None:
        self.snapshot, self.judged, self.depth = snapshot, judged, depth
        self._known: dict[tuple[str, str | None], _Rows] = {}
        self._table: _Table | None = None
        self._lesson = Lesson((), ())
        self._kept: list[FloatArray] = []

    def answer(self, question: Question) -> FloatArray:
        """One vector; those of several silos add, or stand side by side."""
        if isinstance(question, Kept):
            return self._line_sums(question)
        table = self._table
        if table is None:
            raise ProtocolError("a question before its lesson")
        match question:
            case Moments(look):
                columns = self._columns(table, look)
                return np.concatenate(([len(columns)], columns.sum(axis=0), (columns**2).sum(axis=0)))
            case Slopes():
                return self._slopes(table, question)
            case Think(first):
                table.company = self._company(table, first)
                return np.zeros(1)
            case Best(second, fold):
                return self._best(table, self._margins(table, second), fold)
            case Show(second, fold, bars):
                return self._show(table, second, fold, bars)
        raise ProtocolError("a question of an unknown kind")

    def prepare(self, lesson: Lesson) -> FloatArray:
        """Work out the rows of a lesson: (rows, relevant rows, judged queries)."""
        own = lesson.own or (None,) * len(lesson.queries)
        held = [self._rows(query, itself) for query, itself in zip(lesson.queries, own, strict=True)]
        sizes = np.array([len(rows.relevant) for rows in held], dtype=np.int64)
        relevant = np.concatenate([np.empty(0), *(rows.relevant for rows in held)])
        query = np.repeat(np.arange(len(held)), sizes)
        right = np.bincount(query, relevant, len(held))
        self._table = _Table(
            held=held,
            first=np.concatenate([np.empty((0, len(FIRST))), *(rows.first for rows in held)]),
            relevant=relevant,
            weights=1 / np.maximum(right, 1)[query],
            query=query,
            fold=np.array(lesson.folds, dtype=np.int64)[query],
            company=np.zeros((int(sizes.sum()), 2)),
            bounds=np.concatenate(([0], np.cumsum(sizes))),
        )
        self._lesson, self._kept = lesson, []
        judged = sum(query in self.judged for query in lesson.queries)
        return np.array([len(relevant), relevant.sum(), judged], dtype=np.float64)

    def _rows(self, query: str, itself: str | None) -> _Rows:
        if (query, itself) not in self._known:
            snapshot = self.snapshot
            candidates = snapshot.find(query, self.depth)
            kept = np.array([name != itself for name in candidates.documents], dtype=bool)
            said = self.judged.get(query, {})
            relevant = np.array([said.get(name, False) for name in candidates.documents], dtype=np.float64)
            rows = candidates.handles[kept]
            names = tuple(name for name in candidates.documents if name != itself)
            table = first_look(snapshot, candidates)[kept] if len(candidates) else np.empty((0, len(FIRST)))
            self._known[query, itself] = _Rows(
                names=names,
                documents=rows,
                query=snapshot.encoder.query(query, candidates.words),
                first=table,
                relevant=relevant[kept],
                company=Company.of(snapshot.reader.vectors(rows)),
            )
        return self._known[query, itself]

    def _columns(self, table: _Table, look: int) -> FloatArray:
        return table.first if look == 1 else np.hstack((table.first, table.company))

    def _slopes(self, table: _Table, asked: Slopes) -> FloatArray:
        name = asked.centre.tobytes() + asked.scale.tobytes() + bytes((asked.look, asked.fold % 256))
        if table.scaled is None or table.scaled[0] != name:
            used = table.fold != asked.fold
            columns = (self._columns(table, asked.look)[used] - asked.centre) / asked.scale
            features = np.vstack((columns.T, np.ones(len(columns))))
            table.scaled = (name, features, table.relevant[used], table.weights[used])
        _, features, relevant, weights = table.scaled
        return likelihood_sums(features, relevant, asked.theta, weights=weights)

    def _company(self, table: _Table, first: Look) -> FloatArray:
        """The second look's columns under this first look."""
        seemed, columns = first(table.first), []
        for rows, start, end in zip(table.held, table.bounds, table.bounds[1:], strict=False):
            log_odds = seemed[start:end]
            if len(log_odds):
                led = feedback(self.snapshot.reader.vectors(rows.documents), rows.query, log_odds)
                columns.append(np.column_stack((led, rows.company.mean(log_odds))))
        return np.concatenate([np.empty((0, 2)), *columns])

    def _margins(self, table: _Table, second: Look) -> FloatArray:
        return second(self._columns(table, 2))

    def _best(self, table: _Table, margins: FloatArray, fold: int) -> FloatArray:
        """Query by query of the fold, in the lesson's order; −inf where there are fewer candidates."""
        asked = np.unique(table.query[table.fold == fold]) if len(margins) else np.empty(0, np.int64)
        best = np.full((len(table.held), HITS), -np.inf)
        for at in asked.tolist():
            mine = -np.sort(-margins[table.bounds[at] : table.bounds[at + 1]])[:HITS]
            best[at, : len(mine)] = mine
        return best.reshape(-1)

    def _show(self, table: _Table, second: Look, fold: int, bars: FloatArray) -> FloatArray:
        if len(bars) != len(table.held):
            raise ProtocolError("bars of another lesson")
        parts = second.parts(self._columns(table, 2))
        margins = second.start + parts.sum(axis=1)
        shown = self._chosen(table, fold, (table.fold == fold) & (margins >= bars[table.query]))
        evidence = [parts[shown][:, columns].sum(axis=1) for columns in GROUPS.values()]
        self._kept.append(np.column_stack((table.relevant[shown], margins[shown], *evidence)))
        return np.zeros(1)

    def _chosen(self, table: _Table, fold: int, passed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The rows that count as shown, of those that passed the bars."""
        return passed

    @property
    def kept(self) -> FloatArray:
        """The hits that would have been shown: relevance, margin, and each retriever's part of it."""
        return np.concatenate([np.empty((0, 2 + len(GROUPS))), *self._kept])

    def _line_sums(self, asked: Kept) -> FloatArray:
        kept = self.kept
        values = kept[:, 1 + asked.column]
        return likelihood_sums(np.stack((values, np.ones(len(values)))), kept[:, 0], asked.theta)

    # what the silo does with what was learned

    def bent(self, learned: Learned, *, shrinkage: float = SHRINKAGE) -> Learned:
        """With the silo's own line: that of all silos, moved as far as its own hits shown can tell.

        The move δ of logit p = shown(x) + δ₀·(x − x̄) + δ₁ minimises the log-loss here + ½·shrinkage·|δ|².
        """
        kept = self.kept
        if not len(kept):
            return learned
        relevant, margins = kept[:, 0], kept[:, 1]
        middle = float(margins.mean())
        features = np.stack((margins - middle, np.ones(len(margins)), learned.shown(margins)))

        def sums(move: FloatArray) -> FloatArray:
            told = likelihood_sums(features, relevant, np.append(move, 1.0))
            return np.concatenate((told[:3], told[4:].reshape(3, 3)[:2, :2].reshape(-1)))

        tilt, lift = newton(sums, np.zeros(2), np.full(2, shrinkage)).tolist()
        slope = max(learned.shown.slope + tilt, 0.0)
        return learned.calibrated(Line(slope, learned.shown.start + lift - tilt * middle))

    def curves(self, learned: Learned, silo: str) -> list[ReliabilityCurve]:
        """How honest the probabilities of hits that would have been shown are, and each retriever's."""
        kept = self.kept
        if not len(kept):
            return []
        from scipy.special import expit

        lines = {SHOWN: learned.shown, **learned.alone}
        columns = {SHOWN: 1, **{name: at for at, name in enumerate(GROUPS, 2)}}
        return [
            reliability_curve(
                expit(lines[name](kept[:, at])), kept[:, 0], silo=silo, retriever=name, least=LEAST_HITS
            )
            for name, at in columns.items()
            if name in lines
        ]


def own_directions(snapshot: Snapshot) -> Space:
    """What a silo gives for directions that all share, with the rarities of all silos where it has them."""
    if snapshot.family is None:
        raise ProtocolError("shared directions need the federation's hash key")
    reader, shared = snapshot.reader, snapshot.shared
    counted, words = reader.terms(reader.handles()), reader.words()
    if shared is None:
        having = np.bincount(counted.word, minlength=len(words)).astype(np.float64)
        rarity = rarity_of(having, len(snapshot))
    else:
        rarity = rarity_of(shared.counts(TEXT, words, snapshot.family), shared.documents)
    return directions(counted, words, rarity, snapshot.family)
