"""Whether the probe lets a round stand, so that no number of bad rounds in a row carries the model away.

One local epoch on bad data makes a model hardly worse, so weights from risk cannot keep all of it out when
every silo of a round is bad, and server momentum adds up what is left from round to round. The coordinator
therefore compares models before and after a round on its probe, query by query:

- a step that is worse than the model before it by more than `LIMIT` standard errors of the paired difference
  is taken without momentum, which starts afresh (O'Donoghue & Candès 2015 restart accelerated descent so);
- a model that is worse than the best so far by more than an allowance is refused: the previous one stands.
  The allowance is `LIMIT` standard errors too, none after a refused round, and then
  comes back: slowly while rounds are refused, so that a best model that was merely lucky on the probe cannot
  end training, faster while they stand.

The yardstick is the share of pairs in the wrong order, which has less noise than nDCG@10 and, unlike a loss,
does not depend on how large the scores are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.federation.messages import Arrays

Errors = NDArray[np.float64]
LIMIT, SLOWLY, FASTER = 2.0, 0.25, 0.5


class Verdict(NamedTuple):
    """The model that a round ends with."""

    model: Arrays
    refused: bool = False
    restarted: bool = False
    """Whether the server's momentum must be forgotten."""
    why: str = ""


class Restraint:
    """The errors of the best model so far on the probe's queries, and what they forbid."""

    def __init__(self, errors: Callable[[Arrays], Errors]) -> None:
        self._errors = errors
        self._best: Errors | None = None
        self._allowance = LIMIT
        self._stood = True

    def judge(self, previous: Arrays, aggregate: Arrays, step: Arrays) -> Verdict:
        """What becomes of the server's `step` from the `previous` model along an `aggregate`."""
        before, after = self._errors(previous), self._errors(step)
        if self._best is None or len(self._best) != len(before):
            self._best = before
        told = f"{after.mean():.3f} of the probe's pairs in the wrong order, {before.mean():.3f} before"
        restarted = worse(after, before, by=LIMIT)
        if restarted:
            step, after = aggregate, self._errors(aggregate)
        if worse(after, self._best, by=self._allowance):
            self._allowance = 0.0 if self._stood else self._allowance + SLOWLY
            self._stood = False
            best = (
                f"{after.mean():.3f} of the probe's pairs in the wrong order, at best {self._best.mean():.3f}"
            )
            return Verdict(previous, refused=True, restarted=True, why=f"the round: {best}")
        self._allowance = min(LIMIT, self._allowance + FASTER)
        self._stood = True
        if after.mean() < self._best.mean():
            self._best = after
        return Verdict(step, restarted=restarted, why=f"momentum: {told}" if restarted else "")

    def state(self) -> Arrays:
        """For a checkpoint."""
        if self._best is None:
            return {}
        return {"best": self._best, "allowed": np.array([self._allowance, self._stood])}

    def restore(self, state: Arrays) -> None:
        """Take up the state of a checkpoint."""
        if "best" in state:
            self._best, allowed = state["best"], state["allowed"]
            self._allowance, self._stood = float(allowed[0]), bool(allowed[1])


def worse(errors: Errors, reference: Errors, *, by: float) -> bool:
    """Whether the mean error is higher than the reference's by more than so many standard errors."""
    difference = errors - reference
    if len(difference) < 2:
        return False
    noise = difference.std(ddof=1) / np.sqrt(len(difference))
    return bool(difference.mean() > by * noise)
