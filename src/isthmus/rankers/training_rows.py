"""`TrainingRows`: a table to learn from whose rows have weights, and whose grades may be estimates.

Some grades were judged, others were predicted by a model. A row's weight multiplies its part of the gradient.
A row of `targets` has a probability for every grade and replaces the grade in a pointwise loss: the expected
grade for `squared_error`, the whole distribution for `cross_entropy`. Losses over lists read the grades.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import Ids, frozen
from isthmus.errors import DataError
from isthmus.tables import Letor, group, offsets_of

Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRows(Letor):
    """Feature rows with grades; where present, `weights` of shape (rows,) and `targets` (rows, grades)."""

    weights: Floats | None = None
    targets: Floats | None = None

    @classmethod
    def of_letor(
        cls, letor: Letor, *, weights: NDArray[Any] | None = None, targets: NDArray[Any] | None = None
    ) -> TrainingRows:
        """The table with these weights and targets."""
        for name, column in (("weights", weights), ("targets", targets)):
            if column is not None and len(column) != letor.rows:
                raise DataError(f"{len(column)} {name} for {letor.rows} rows")
        plain = {known.name: getattr(letor, known.name) for known in fields(Letor)}
        return cls(**plain, weights=_column(weights), targets=_column(targets))

    @classmethod
    def joined(cls, parts: Sequence[TrainingRows]) -> TrainingRows:
        """All rows together, those of one query in the order of the parts."""
        names = Ids.concat([part._query_column for part in parts])
        queries, groups, _ = group(names)
        order = np.argsort(groups, kind="stable")
        several = np.concatenate
        weights = [np.ones(part.rows) if part.weights is None else part.weights for part in parts]
        guessed = [part.targets for part in parts if part.targets is not None]
        targets = several(guessed)[order] if len(guessed) == len(parts) else None
        return cls(
            queries,
            offsets_of(groups, len(queries)),
            frozen(several([part.features for part in parts])[order]),
            frozen(several([part.grades for part in parts])[order]),
            Ids.concat([part.ids for part in parts])[order],
            weights=_column(several(weights)[order]),
            targets=_column(targets),
        )

    def labels(self, rows: NDArray[np.int64], *, graded: bool) -> NDArray[Any]:
        """What a pointwise loss compares the scores of some rows with."""
        if self.targets is None:
            return self.grades[rows]
        probabilities: NDArray[Any] = self.targets[rows]
        return (
            probabilities if graded else probabilities @ np.arange(probabilities.shape[1], dtype=np.float32)
        )

    def _take(self, rows: NDArray[Any]) -> TrainingRows:
        weights, targets = (
            None if column is None else frozen(column[rows]) for column in (self.weights, self.targets)
        )
        return replace(cast(TrainingRows, super()._take(rows)), weights=weights, targets=targets)


def _column(values: NDArray[Any] | None) -> Floats | None:
    return None if values is None else frozen(np.asarray(values, dtype=np.float32))
