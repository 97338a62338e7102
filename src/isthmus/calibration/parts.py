"""One calibrator per part (silo, head, tail) that leans on the pooled one where a part has little to tell."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, logit
from sklearn.base import clone

from isthmus.calibration.curves import Platt
from isthmus.calibration.estimator import Calibrator
from isthmus.errors import DataError
from isthmus.tables.ids import FloatArray

LEAST_PAIRS = 20
SURE = 1e-9


class PerPart(Calibrator):
    """logit p = λ·logit p_part + (1 − λ)·logit p_pooled, with λ = n₊/(n₊ + shrinkage) of the part.

    `fit(…, parts=names)` says which part every row belongs to. A part with fewer than twenty pairs, with one
    class only, or never seen in fitting, has λ = 0: the pooled calibrator answers for it. Separate
    calibrators may reorder a list that mixes parts, so pooled is the default everywhere else.
    """

    def __init__(self, calibrator: Calibrator | None = None, *, shrinkage: float = 50.0) -> None:
        self.calibrator = calibrator
        self.shrinkage = shrinkage

    @property
    def needs_lists(self) -> bool:  # type: ignore[override]
        """As the calibrator inside."""
        return (self.calibrator or Platt()).needs_lists

    def fit(
        self,
        scores: ArrayLike,
        y: ArrayLike,
        *,
        groups: ArrayLike | None = None,
        judged: ArrayLike | None = None,
        parts: ArrayLike | None = None,
    ) -> Self:
        """Learn the pooled calibrator and one per part; without parts, the pooled one alone."""
        values, relevant, known = self._checked(scores, y, judged)
        inside = Platt() if self.calibrator is None else self.calibrator
        context: dict[str, Any] = {"groups": groups} if inside.needs_lists else {}
        self.pooled_ = clone(inside).fit(values, relevant, judged=known, **context)
        self.parts_: dict[str, Calibrator] = {}
        self.trust_: dict[str, float] = {}
        names = _named(parts, len(values))
        for name in np.unique(names[known]) if parts is not None else ():
            mine = known & (names == name)
            hits = float(relevant[mine].sum())
            if mine.sum() >= LEAST_PAIRS and 0 < hits < mine.sum():
                self.parts_[str(name)] = clone(inside).fit(values, relevant, judged=mine, **context)
                self.trust_[str(name)] = hits / (hits + self.shrinkage)
        return self

    def probabilities(
        self, scores: ArrayLike, *, groups: ArrayLike | None = None, parts: ArrayLike | None = None
    ) -> FloatArray:
        """P(relevant) of every score, by the calibrator of its part and the pooled one."""
        values = self._values(scores)
        context: dict[str, Any] = {"groups": groups} if self.pooled_.needs_lists else {}
        chances = np.asarray(self.pooled_.probabilities(values, **context))
        if parts is None:
            return chances
        names, pooled = _named(parts, len(values)), _logit(chances)
        for name, calibrator in self.parts_.items():
            mine = names == name
            if mine.any():
                own = _logit(calibrator.probabilities(values, **context)[mine])
                trust = self.trust_[name]
                chances[mine] = expit(trust * own + (1 - trust) * pooled[mine])
        return chances


def _logit(chances: FloatArray) -> FloatArray:
    return np.asarray(logit(np.clip(chances, SURE, 1 - SURE)))


def _named(parts: ArrayLike | None, rows: int) -> NDArray[np.str_]:
    names = np.zeros(rows, dtype="U1") if parts is None else np.asarray(parts).astype(np.str_)
    if len(names) != rows:
        raise DataError(f"{len(names)} parts for {rows} scores", cure="name the part of every score")
    return names
