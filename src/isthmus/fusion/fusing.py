"""`fuse(runs, method, …) -> Run`: one call for every way of fusing, and the methods by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError, nearest
from isthmus.fusion.fusers import FUSERS, LEARNED, Candidates, choose, default_norm
from isthmus.tables import Qrels, Run

if TYPE_CHECKING:
    from isthmus.fusion.estimator import Fuser


def fuse(
    runs: Sequence[Run],
    method: str = "auto",
    *,
    qrels: Qrels | None = None,
    norm: str | None = None,
    missing: float | str = "learned",
    **options: Any,
) -> Run:
    """Fuse runs into one.

    >>> bm25 = Run.from_dict({"q1": {"d1": 12.0, "d2": 9.0}}, name="bm25")
    >>> dense = Run.from_dict({"q1": {"d2": 0.8, "d3": 0.7}}, name="dense")
    >>> fuse([bm25, dense], "rrf")
    Run 'rrf': 1 query, 3 rows
      q1  d2 0.0325225, d1 0.0163934, d3 0.016129

    With judgements, `auto` is the method that does best on held-out queries: a convex sum with weights
    shrunk to equal ones, unless another method is clearly better (`isthmus.fusion.Auto`). Without judgements
    it is `log-odds` if all runs carry probabilities, else `rrf`. With judgements the result carries
    calibrated probabilities, and judged queries are fused by models fitted without them. `norm` is one of
    `NORMALISERS`; by default rank-based formulae take none and the others min-max. `missing` is the score of
    a document in a list that lacks it: "learned" (the probability learned from judgements; a formula, which
    learns none, has its own rule), "lowest" (the list's lowest score) or a number. Options are passed to the
    method: `k` of rrf, `calibrator` of stacked, `weights` …
    """
    chosen = choose(runs, method, qrels)
    _check_missing(missing)
    if qrels is not None:
        return fuser(chosen, norm=norm, missing=missing, **options).fit_fuse(runs, qrels)
    if chosen in LEARNED:
        return fuser(chosen, norm=norm, missing=missing, **options).unjudged(runs).fuse(runs, name=chosen)
    candidates = Candidates.of(
        runs, norm or default_norm(chosen), missing=None if missing == "learned" else missing
    )
    return candidates.union.ranked(_call(chosen, options)(candidates), name=chosen)


def fuser(
    method: str = "auto", *, norm: str | None = None, missing: float | str = "learned", **options: Any
) -> Fuser:
    """Return an unfitted fuser by name, to be fitted, saved and used on other runs. Raises ConfigError for an
    unknown method or option."""
    from isthmus.fusion.auto import Auto
    from isthmus.fusion.joint import Joint
    from isthmus.fusion.learned import Formula, LogOdds, Stacked, Weighted

    chosen = method if method == "auto" else choose((), method, None)
    _check_missing(missing)
    if chosen == "auto":
        if norm is not None or missing not in ("learned", "lowest"):
            key, value = ("norm", norm) if norm is not None else ("missing", missing)
            problem = f"auto compares methods that read {key}={value!r} differently: name one of them"
            raise ConfigError(problem, key=key, value=value)
        return _create(Auto, {"missing": missing, **options})
    if chosen in ("stacked", "log-odds"):
        if _is_number(missing) and not 0 <= float(missing) <= 1:
            raise ConfigError(
                f"missing = {missing!r}: for {chosen} it is a probability, from 0 to 1", key="missing"
            )
        if norm is not None:
            raise ConfigError(
                f"{chosen} reads calibrated probabilities: norm={norm!r} has no place", key="norm"
            )
        kind: type[Fuser] = Stacked if chosen == "stacked" else LogOdds
        return _create(kind, {"missing": missing, **options})
    if chosen == "joint":
        if norm is not None or missing != "learned":
            raise ConfigError("joint learns how scores and absence count: no norm, no missing", key="norm")
        return _create(Joint, options)
    if chosen in ("weighted", "convex"):
        scale = norm or ("min-max" if chosen == "convex" else "z-score")
        known = dict(inspect.signature(Weighted).parameters)
        known.pop("name")
        _check_options(chosen, options, known)
        if chosen == "convex":
            options = _convex(options)
        return Weighted(norm=scale, missing=missing, name=chosen, **options)
    own = {name: options.pop(name) for name in ("judging", "folds", "final") if name in options}
    _call(chosen, options)
    filled = None if missing == "learned" else missing
    return Formula(chosen, norm=norm, missing=filled, options=options, **own)


def _create(kind: type[Fuser], options: Mapping[str, Any]) -> Fuser:
    _check_options(kind.method, options, inspect.signature(kind).parameters)
    return kind(**options)


def _call(formula: str, options: Mapping[str, Any]) -> Any:
    known = dict(inspect.signature(FUSERS[formula]).parameters)
    known.pop("candidates")
    _check_options(formula, options, known)
    return partial(FUSERS[formula], **options)


def _check_options(method: str, options: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    for name, value in options.items():
        if name not in known:
            close = nearest(name, known)
            hint = f" (did you mean {close!r}?)" if close else f"; it has {', '.join(known) or 'none'}"
            raise ConfigError(f"{method} has no option {name!r}{hint}", key=name, value=value)
        if name == "weights" and value is not None:
            _check_weights(method, value)
        wanted, suits = _SUITABLE.get(str(known[name].annotation), ("", None))
        if suits is not None and not suits(value):
            raise ConfigError(f"{method}'s {name} = {value!r} is not {wanted}", key=name, value=value)


def _check_weights(method: str, weights: Any) -> None:
    listed = list(weights) if isinstance(weights, Iterable) and not isinstance(weights, str) else [weights]
    if not all(_is_number(weight) for weight in listed) or not any(listed):
        raise ConfigError(
            f"{method}'s weights {weights!r} must be numbers, and not all of them 0",
            key="weights",
            value=weights,
        )


def _convex(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with weights, if any, scaled to sum to one. Raises ConfigError for a negative
    weight."""
    weights = options.get("weights")
    if weights is None:
        return dict(options)
    if min(weights) < 0:
        raise ConfigError(
            f"convex weights {list(weights)} must not be negative", key="weights", value=weights
        )
    return {**options, "weights": [weight / sum(weights) for weight in weights]}


def _check_missing(missing: float | str) -> None:
    if missing not in ("learned", "lowest") and not _is_number(missing):
        raise ConfigError(
            f"missing = {missing!r}: say 'learned', 'lowest' or a number", key="missing", value=missing
        )


def _is_number(value: object) -> bool:
    """Whether the value is a finite real number; True and False are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_list_of(kind: type, value: object) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return value is None or (listed and all(isinstance(each, kind) for each in value))  # type: ignore[attr-defined]


_SUITABLE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "float": ("a number from 0 on", lambda value: _is_number(value) and value >= 0),
    "int": ("a whole number from 1 on", _is_count),
    "int | None": ("a whole number from 1 on", lambda value: value is None or _is_count(value)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "str": ("a name", lambda value: isinstance(value, str)),
    "str | Calibrator": (
        "a calibrator or the name of one",
        lambda value: isinstance(value, str) or hasattr(value, "predict_proba"),
    ),
    "Sequence[str] | None": ("a list of names", partial(_is_list_of, str)),
    "Sequence[Run] | None": ("a list of runs", partial(_is_list_of, Run)),
}
"""By annotation of an option: the allowed values in words, and a check for them."""
