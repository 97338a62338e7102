"""The ranker that silos have learned together, and the probabilities it gives.

    margin = start + Σ weights·(features − centre)/scale       one look; the second reads the first's too
    logit p = slope·margin + start                             fitted on hits that were shown

A retriever's evidence is its features' part of the margin, cᵣ. Its own probability is σ(aᵣ·cᵣ + bᵣ), so that

    logit p = base + Σᵣ (slope/aᵣ)·logit pᵣ

explains every hit exactly: what each retriever would say alone, and what its word counts for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from isthmus.arrays import FloatArray
from isthmus.errors import DataError
from isthmus.service.candidates import QueryCandidates, Snapshot
from isthmus.service.evidence import FIRST, GROUPS, SECOND, first_look, second_look
from isthmus.service.scoring import Bm25Scorer, Scored, best_first, evidence, raw_score
from isthmus.service.wire import Evidence
from isthmus.tables import Bundle

MOST_BYTES = 1 << 20
LARGEST = 1e12
"""The largest number of a model, and of one divided by a scale: margins of such are still numbers."""
LOOK = ("centre", "scale", "weights")
LEAST_SLOPE = 0.05
"""A retriever whose own probability hardly moves with its evidence has no weight to tell."""


class Line(NamedTuple):
    """log-odds = slope·x + start."""

    slope: float
    start: float

    def __call__(self, values: FloatArray) -> FloatArray:
        return self.slope * values + self.start


@dataclass(frozen=True, eq=False)
class Look:
    """A logistic model of some columns."""

    centre: FloatArray
    scale: FloatArray
    weights: FloatArray
    start: float

    def parts(self, table: FloatArray) -> FloatArray:
        """What every column adds to the margin, row by row."""
        return np.asarray((table - self.centre) / self.scale * self.weights)

    def __call__(self, table: FloatArray) -> FloatArray:
        return np.asarray(self.start + self.parts(table).sum(axis=1))


class SavedLearned(Bundle):
    """A learned ranker on disk or on the wire."""

    noun = "search model"
    most = MOST_BYTES


@dataclass(frozen=True, eq=False)
class Learned:
    """Two looks, how far the hits shown could be believed, and each retriever alone.

    `space` names the directions it was learned with; with others it says nothing.
    """

    name: ClassVar[str] = "learned"
    comparable: ClassVar[bool] = False

    space: str
    first: Look
    second: Look
    shown: Line
    alone: Mapping[str, Line] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def calibrated(self, shown: Line) -> Self:
        """The same with another line from margins to log-odds."""
        return replace(self, shown=shown)

    def to_bytes(self) -> bytes:
        """For the wire."""
        return self._saved().to_bytes()

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file."""
        self._saved().write(path)

    def _saved(self) -> SavedLearned:
        header = {
            "space": self.space,
            "shown": list(self.shown),
            "alone": {name: list(line) for name, line in self.alone.items()},
            "starts": [self.first.start, self.second.start],
            "columns": [list(FIRST), list(SECOND)],
            "about": dict(self.about),
        }
        looks = {"first": self.first, "second": self.second}
        arrays = {f"{name}.{part}": getattr(look, part) for name, look in looks.items() for part in LOOK}
        return SavedLearned(header, arrays)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read it back; a DataError if it is not one of these columns."""
        return SavedLearned.restore(path, cls._of)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """What came over the wire; anything else is a ProtocolError."""
        return SavedLearned.receive(data, cls._of)

    @classmethod
    def _of(cls, saved: SavedLearned) -> Self:
        header, arrays = saved.header, saved.arrays
        if header["columns"] != [list(FIRST), list(SECOND)]:
            raise DataError("was learned from other columns", cure="learn again")
        looks = [
            Look(start=_real(start), **_columns(arrays, name, len(columns)))
            for name, columns, start in zip(
                ("first", "second"), (FIRST, SECOND), header["starts"], strict=True
            )
        ]
        lines = {str(name): Line(*map(_real, line)) for name, line in header["alone"].items()}
        shown = Line(*map(_real, header["shown"]))
        return cls(str(header["space"]), looks[0], looks[1], shown, lines, dict(header["about"]))

    # scoring

    def fits(self, snapshot: Snapshot) -> bool:
        """Whether the silo has the directions that this was learned with."""
        return snapshot.encoder.fingerprint == self.space

    def table(self, snapshot: Snapshot, candidates: QueryCandidates) -> FloatArray:
        """All columns of every candidate."""
        first = first_look(snapshot, candidates)
        query = snapshot.encoder.query("", candidates.words)
        return np.column_stack(
            (first, second_look(snapshot.reader.vectors(candidates.handles), query, self.first(first)))
        )

    def score(self, snapshot: Snapshot, candidates: QueryCandidates) -> Scored:
        """Margins and probabilities; BM25 without any while the silo has other directions."""
        if not self.fits(snapshot):
            return Bm25Scorer().score(snapshot, candidates)
        if not len(candidates):
            return Scored(np.empty(0, np.int64), np.empty(0), np.empty(0))
        from scipy.special import expit

        margins = self.second(self.table(snapshot, candidates))
        return Scored(best_first(candidates, margins), margins, expit(self.shown(margins)))

    def explain(
        self, snapshot: Snapshot, candidates: QueryCandidates, scored: Scored, depth: int
    ) -> list[list[Evidence]]:
        """What each retriever would say alone, and what its word counts for; the base is in `base`."""
        best = scored.order[:depth]
        if not len(best):
            return []
        if scored.probabilities is None:
            return Bm25Scorer().explain(snapshot, candidates, scored, depth)
        from scipy.special import expit

        parts = self.second.parts(self.table(snapshot, candidates)[best])
        told = {name: self._told(name, parts[:, columns].sum(axis=1)) for name, columns in GROUPS.items()}
        return [
            [
                evidence(
                    name,
                    raw_score(candidates, name, at),
                    None if line is None else float(expit(line(own[row]))),
                    None if line is None else self.shown.slope / line.slope,
                    float(added[row]),
                )
                for name, (line, own, added) in told.items()
            ]
            for row, at in enumerate(best.tolist())
        ]

    def _told(self, name: str, evidence: FloatArray) -> tuple[Line | None, FloatArray, FloatArray]:
        line = self.alone.get(name)
        if line is None or line.slope < LEAST_SLOPE:
            return None, evidence, self.shown.slope * evidence
        return line, evidence, self.shown.slope / line.slope * line(evidence)

    @property
    def base(self) -> float:
        """Where log-odds start: what is left of them without any contribution."""
        start = self.shown(np.array(self.second.start)).item()
        lines = [line for line in self.alone.values() if line.slope >= LEAST_SLOPE]
        return float(start - sum(self.shown.slope / line.slope * line.start for line in lines))


def _columns(arrays: Mapping[str, Any], name: str, size: int) -> dict[str, FloatArray]:
    held = {part: np.asarray(arrays[f"{name}.{part}"], dtype=np.float64) for part in LOOK}
    if not all(values.shape == (size,) and np.isfinite(values).all() for values in held.values()):
        raise ValueError("columns of another number")
    bounded = max(np.abs(values).max() for values in held.values()) <= LARGEST
    if not bounded or held["scale"].min() < 1 / LARGEST:
        raise ValueError("columns that no margin can be worked out from")
    return held


def _real(number: object) -> float:
    if not isinstance(number, (int, float)) or not abs(number) <= LARGEST:
        raise ValueError("a number that is none")
    return float(number)
