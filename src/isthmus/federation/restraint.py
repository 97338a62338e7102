"""Whether the probe lets a round stand, so that no number of bad rounds in a row carries the model away.

One local epoch on bad data makes a model hardly worse, so weights from risk cannot keep all of it out when
every silo of a round is bad, and server momentum adds up what is left from round to round. The coordinator
therefore compares the model after a round with the best so far on its probe, query by query. One that is
worse by more than `LIMIT` standard errors of the paired difference is refused: the previous model stands and
momentum starts afresh. One that is better than the model before it always stands, so a best that was merely
lucky on the probe cannot end training.

The yardstick is the share of pairs in the wrong order, which has less noise than nDCG@10 and, unlike a loss,
does not depend on how large the scores are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from isthmus.federation.messages import Arrays

Errors = NDArray[np.float64]
LIMIT = 3.0


class Restraint:
    """The errors of the best model so far on the probe's queries, and what they forbid."""

    def __init__(self, errors: Callable[[Arrays], Errors]) -> None:
        self._errors = errors
        self._best: Errors | None = None

    def refusal(self, previous: Arrays, step: Arrays) -> str:
        """Why the server's `step` from the `previous` model must not be taken; empty where it may."""
        before, after = self._errors(previous), self._errors(step)
        if self._best is None or len(self._best) != len(before):
            self._best = before
        if after.mean() > before.mean() and worse(after, self._best):
            shares = f"{after.mean():.3f} of the probe's pairs in the wrong order"
            return f"the round: {shares}, at best {self._best.mean():.3f}"
        if after.mean() < self._best.mean():
            self._best = after
        return ""

    def state(self) -> Arrays:
        """For a checkpoint."""
        return {} if self._best is None else {"best": self._best}

    def restore(self, state: Arrays) -> None:
        """Take up the state of a checkpoint."""
        self._best = state.get("best", self._best)


def worse(errors: Errors, reference: Errors) -> bool:
    """Whether the mean error is higher than the reference's by more than `LIMIT` standard errors."""
    difference = errors - reference
    if len(difference) < 2:
        return False
    noise = difference.std(ddof=1) / np.sqrt(len(difference))
    return bool(difference.mean() > LIMIT * noise)
