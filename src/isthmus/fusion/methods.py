"""The ways of fusing by name."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.errors import ConfigError
from isthmus.fusion.fusers import FUSERS, RANK_BASED
from isthmus.tables import Qrels, Run

LEARNED = ("stacked", "log-odds", "weighted", "convex")
"""The methods that learn from judgements."""

METHODS = (*LEARNED, *FUSERS)


def choose(runs: Sequence[Run], method: str, qrels: Qrels | None) -> str:
    """The method's name as `METHODS` spells it; `auto` by what there is to learn from."""
    if method == "auto":
        calibrated = bool(runs) and all(run.probabilities is not None for run in runs)
        return "stacked" if qrels is not None else "log-odds" if calibrated else "rrf"
    spelt = method.replace("_", "-")
    if spelt not in METHODS:
        raise ConfigError(f"no way of fusing {method!r}", key=spelt, known=("auto", *METHODS))
    return spelt


def default_norm(formula: str) -> str:
    """Formulae that add scores need a common scale; those that read ranks do not."""
    return "none" if formula in RANK_BASED else "min-max"
