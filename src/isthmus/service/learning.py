"""How silos learn one ranker and its probabilities from sums alone.

Whoever asks (the broker) puts questions to all silos; a silo answers with a vector over its rows of judged
queries, and only the sum over silos is used. A logistic regression fitted so is the one of all rows in one
place, to the last digits, because its likelihood, gradient and Hessian add.

    1. first look     fitted on words and directions
    2. second look    fitted with what the first says of each candidate's company
    3. hits shown     for every fold of the queries the ten best under a second look that has not seen them;
                      a line from margins to log-odds over all of these, and one for each retriever
    4. each silo      bends that line towards its own hits shown, as far as these can tell; nobody is told

>>> len(Slopes(1, np.zeros(2), np.ones(2), np.zeros(3), -1).to_bytes()) > 0
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.asking import Silos
from isthmus.errors import DataError, ProtocolError
from isthmus.logistic import newton
from isthmus.service.evidence import FIRST, GROUPS, SECOND
from isthmus.service.learned import LOOK, Learned, Line, Look
from isthmus.tables import Bundle, Declared

PENALTY = 10.0
"""½·penalty·θ² holds back every weight of a standardised column."""
TOLERANCE = 1e-10
HITS = 10
"""Hits that are shown."""
LEAST_QUERIES, LEAST_RELEVANT = 10, 20
"""Judged queries, and relevant documents among the candidates, that learning needs."""
NOBODY = -1
MOST_BYTES = 64 << 20


class Message(Bundle):
    """A question or an answer on the wire."""

    noun = "lesson"
    most = MOST_BYTES

    @classmethod
    def check(cls, header: Mapping[str, Any], declared: Mapping[str, Declared]) -> None:
        """Vectors of reals."""
        if any(len(each.shape) != 1 or each.dtype != np.float64 for each in declared.values()):
            raise DataError("has arrays that are no vectors of reals")


@dataclass(frozen=True, eq=False)
class Question:
    """What a silo is asked; every kind says what its answer is."""

    def to_bytes(self) -> bytes:
        """For the wire."""
        header: dict[str, Any] = {"kind": type(self).__name__}
        arrays = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, np.ndarray):
                arrays[each.name] = value
            elif isinstance(value, Look):
                header[each.name] = value.start
                arrays |= {f"{each.name}.{part}": getattr(value, part) for part in LOOK}
            else:
                header[each.name] = value
        return Message(header, arrays).to_bytes()


@dataclass(frozen=True, eq=False)
class Prepare(Question):
    """Work out the rows of these queries: (rows, relevant rows, judged queries).

    All that the silo has judged must be among them. It deals them into so many `folds` itself.
    """

    queries: tuple[str, ...]
    folds: int


@dataclass(frozen=True, eq=False)
class Moments(Question):
    """(rows, Σx, Σx²) over the columns of a look."""

    look: int


@dataclass(frozen=True, eq=False)
class Slopes(Question):
    """The loss of a look at `theta` (the start is its last value), gradient and Hessian, without a fold."""

    look: int
    centre: FloatArray
    scale: FloatArray
    theta: FloatArray
    fold: int


@dataclass(frozen=True, eq=False)
class Think(Question):
    """Take this first look for what the second reads; nothing comes back."""

    first: Look


@dataclass(frozen=True, eq=False)
class Best(Question):
    """The highest margins of every query of a fold, as any search would tell them, `HITS` each."""

    second: Look
    fold: int


@dataclass(frozen=True, eq=False)
class Show(Question):
    """Keep the candidates at or above every query's bar, as those that would be shown; nothing comes back.

    Of a query that was judged here they are chosen once, and kept while the set of judgements is the same.
    """

    second: Look
    fold: int
    bars: FloatArray


@dataclass(frozen=True, eq=False)
class Kept(Question):
    """The loss of logit p = θ₀·x + θ₁ over what is kept, gradient and Hessian; x is the margin (0) or what
    one retriever's columns add to it."""

    column: int
    theta: FloatArray


_HEADER = {"format", "version", "kind"}
_KINDS: Mapping[str, type[Question]] = {
    kind.__name__: kind for kind in (Prepare, Moments, Slopes, Think, Best, Show, Kept)
}


def question_of(data: bytes) -> Question:
    """What came over the wire; anything else is a ProtocolError."""
    return Message.receive(data, _question)


def _question(saved: Message) -> Question:
    kind = _KINDS[saved.header["kind"]]
    if unknown := saved.header.keys() - _HEADER - {each.name for each in fields(kind)}:
        raise KeyError(*unknown)
    return kind(**{each.name: _field(saved, each.name) for each in fields(kind)})


def _field(saved: Message, name: str) -> Any:
    if f"{name}.weights" in saved.arrays:
        columns = {part: saved.arrays[f"{name}.{part}"].astype(np.float64) for part in LOOK}
        return Look(start=float(saved.header[name]), **columns)
    if name in saved.arrays:
        return saved.arrays[name].astype(np.float64)
    value = saved.header[name]
    if name == "queries":
        return tuple(str(query) for query in value)
    return int(value)


def answer_bytes(answer: FloatArray) -> bytes:
    """An answer for the wire."""
    return Message({"kind": "answer"}, {"sums": answer}).to_bytes()


def answer_of(data: bytes) -> FloatArray:
    """An answer from the wire; one that is no vector of numbers is a ProtocolError."""
    told = Message.receive(data, lambda saved: saved.arrays["sums"].astype(np.float64, copy=False))
    if told.ndim != 1 or np.isnan(told).any():
        raise ProtocolError("an answer that is no vector of numbers")
    return told


def learn(silos: Silos, queries: Sequence[str], *, folds: int, space: str) -> Learned:
    """Learn from all silos; a DataError where there is too little to learn from."""
    rows, relevant, _ = silos.sum(Prepare(tuple(queries), folds))
    if len(queries) < LEAST_QUERIES or relevant < LEAST_RELEVANT:
        raise DataError(
            f"{len(queries)} judged queries with {relevant:.0f} relevant documents are too few",
            cure=f"judge hits until there are {LEAST_QUERIES} and {LEAST_RELEVANT}",
        )
    first = fit_look(silos, 1)
    silos.sum(Think(first))
    for fold in range(folds):
        without = fit_look(silos, 2, fold=fold)
        best: Mapping[str, FloatArray]
        best = silos.collect(Best(without, fold), shows="its best hits' margins, as any search does").by_silo
        bars = _bars([best[name] for name in silos.names])
        silos.sum(Show(without, fold, bars))
    shown = fit_line(silos, 0)
    alone = {name: fit_line(silos, at) for at, name in enumerate(GROUPS, 1)}
    about = {"queries": len(queries), "rows": int(rows), "relevant": int(relevant)}
    return Learned(space, first, fit_look(silos, 2), shown, alone, about)


def fit_look(silos: Silos, look: int, *, fold: int = NOBODY) -> Look:
    """A logistic regression over all silos' rows but those of a fold."""
    size = len(FIRST if look == 1 else SECOND)
    told = silos.sum(Moments(look))
    centre = told[1 : 1 + size] / told[0]
    scale = np.sqrt(np.maximum(told[1 + size :] / told[0] - centre**2, 0.0))
    scale = np.where(scale > 1e-9, scale, 1.0)

    def sums(theta: FloatArray) -> FloatArray:
        return silos.sum(Slopes(look, centre, scale, theta, fold))

    penalty = np.append(np.full(size, PENALTY), 1e-6)
    theta = newton(sums, np.zeros(size + 1), penalty, tolerance=TOLERANCE)
    return Look(centre, scale, theta[:-1], float(theta[-1]))


def fit_line(silos: Silos, column: int) -> Line:
    """From margins to log-odds over the hits that were kept as shown; it never falls."""
    theta = newton(lambda at: silos.sum(Kept(column, at)), np.array([1.0, 0.0]), np.full(2, 1e-3))
    if theta[0] <= 0:
        flat = newton(
            lambda at: silos.sum(Kept(column, np.array([0.0, at[0]])))[[0, 2, 6]],
            np.zeros(1),
            np.full(1, 1e-3),
        )
        return Line(0.0, float(flat[0]))
    return Line(float(theta[0]), float(theta[1]))


def _bars(answers: Sequence[FloatArray]) -> FloatArray:
    """The margin that a candidate of each query needs to be among the best of all silos."""
    best = np.concatenate([answer.reshape(-1, HITS) for answer in answers], axis=1)
    return -np.sort(-best, axis=1)[:, HITS - 1]
