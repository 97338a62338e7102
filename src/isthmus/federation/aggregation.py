"""Aggregation of the silos' models into the next global model: weights first, then a step of the server.

    weigh(errors, sizes)       the weight of every candidate, without access to its model
    step(old, mean, state)     the next global model and the server's next state, from the weighted mean

Both are pure functions, so a round under a secure sum, which sees reports and a sum, is the same arithmetic
as one that sees every model. The server's state from round to round is named arrays, so that it fits a
checkpoint.

    fedavg         Σ n_k θ_k / Σ n_k
    fedavgm        fedavg, then server momentum
    fedprox        fedavg; silos add μ (θ − θ_G) to their gradients
    fedopt         Flower's base class of the next three: the same as fedavg
    fedadam, fedyogi, fedadagrad    fedavg, then an adaptive server step
    fedmedian, fedtrimmedavg        coordinate by coordinate, unweighted
    scaffold       control variates (Karimireddy et al. 2020)
    fednova        normalised averaging (Wang et al. 2020)
    fedavg-probe   fedavg with the probe as one more silo: a control for fedrisk
    fedrisk        weights from risk: sound, or as printed by Rabbi et al.

Means, medians and adaptive steps are computed by Flower's own classes (`flower`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isthmus.federation import risk as risks
from isthmus.federation.settings import FedRisk, StrategyOptions

MEMORY = "memory"
"""Name of the previous global model among a round's candidates."""
PROBE = "probe"
"""Name of the coordinator's own model among the candidates, if it trains on the probe."""
RISK = "risk"
"""Prefix, in the server's state, of the accumulated risks or agreements of silos."""
AGREED = 10
"""Number of a silo's first rounds that show whether its steps agree with those on the probe."""
LIMIT = 3.0
"""Standard errors by which a model may be worse than the best one before the probe refuses the step."""
COMMON = ""
"""Name of SCAFFOLD's common control variate among those of the silos."""

Arrays = dict[str, NDArray[Any]]
Errors = Mapping[str, NDArray[Any]]
Optimise = Callable[..., tuple[Arrays, Arrays]]


class Size(NamedTuple):
    """Amount of a silo's training: its counted examples, and its steps."""

    examples: float
    steps: float = 1.0


Sizes = Mapping[str, Size]


@dataclass(frozen=True)
class Weighed:
    """The weight and the risk of every candidate of a round, by name."""

    weights: Mapping[str, float] = field(default_factory=dict)
    risks: Mapping[str, float] = field(default_factory=dict)
    relative: Mapping[str, float] = field(default_factory=dict)
    """Values to add to the records of silos: risks minus the median silo's, or agreement with the probe."""
    refused: str = ""
    """Reason why the probe refused the round; empty if it did not."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Silos of a refused round, with the reason."""


def weigh(
    errors: Errors,
    sizes: Sizes,
    options: StrategyOptions,
    *,
    momentum: float = 0.0,
    past: Arrays | None = None,
    reported: bool = False,
) -> Weighed:
    """Return the weights of a round's candidates from their errors on common items and their (capped) sizes.

    `momentum` is that of the silos' own optimiser, for which FedNova corrects. `past` has FedRisk's
    accumulated risks of earlier rounds (`remembered_risks`). `reported` says that silos reported their errors
    themselves.
    """
    if options.name == "fedrisk":
        if options.risk.mode == "paper":
            return _printed_weights(errors, options.risk)
        return _risk_weights(errors, sizes, options.risk, past=past or {}, reported=reported)
    if options.name in ("fedmedian", "fedtrimmedavg"):
        return Weighed()
    if options.name == "scaffold":
        return Weighed(dict.fromkeys(sizes, 1 / len(sizes)))
    if options.name == "fednova":
        return Weighed(_normalised_weights(sizes, momentum))
    total = sum(size.examples for size in sizes.values())
    return Weighed({name: size.examples / total for name, size in sizes.items()})


def _risk_weights(errors: Errors, sizes: Sizes, options: FedRisk, *, past: Arrays, reported: bool) -> Weighed:
    """FedRisk, sound: w_k ∝ softmax(−(risk_k + past_k)/τ) √n_k with M_kj the error of candidate k on query j.

    On a small probe, one round hardly distinguishes a bad silo from an unlucky one, so observations of a silo
    add up: with d_k the risk minus the median silo's, summed over its T rounds so far, this one included,
    past_k = h Σ d_k/(T + h), which is at most h times the mean. By default τ is two standard errors of a
    candidate's mean error over the queries. The previous model has the median √n of the others, and no past.
    Silos can lie in their own reports, so with reports no silo's risk counts as less than the median.
    """
    names = sorted(errors)
    roots = {name: np.sqrt(size.examples) for name, size in sizes.items()}
    typical = float(np.median(list(roots.values())))
    table = np.stack([errors[name] for name in names])
    risk = _risk_of(table, options)
    own = np.array([name in sizes for name in names])
    relative = np.where(own, risk - np.median(risk[own]), 0.0)
    believed = risk
    if options.past:
        sums, rounds = np.array([past.get(name, np.zeros(2)) for name in names]).T
        believed = risk + options.past * (sums + relative) / (rounds + 1 + options.past) * own
    if reported and options.cap_reports:
        believed = np.where(own, np.maximum(believed, np.median(believed[own])), believed)
    counts = [roots.get(name, typical) ** 2 for name in names] if options.by_size else None
    temperature = options.temperature or risks.spread(table)
    weights = risks.softmax_weights(believed, temperature=temperature, sizes=counts)
    return Weighed(
        dict(zip(names, weights.tolist(), strict=True)),
        dict(zip(names, risk.tolist(), strict=True)),
        {name: float(relative[at]) for at, name in enumerate(names) if own[at]},
    )


def weigh_by_agreement(
    agreement: Mapping[str, float], sizes: Sizes, options: FedRisk, *, past: Arrays
) -> Weighed:
    """FedRisk with visible steps: w_k ∝ √n_k · min(1, max(0, a_k)/m), m the median of the positive a_k.

    a_k is the mean, over the first `AGREED` rounds of silo k, of the cosine between its step and a step on
    the probe; `agreement` has the cosines of this round. FLTrust (Cao et al. 2021) weighs in this way round
    by round. Early steps are long and expose a silo with bad grades at once; late steps are all short and
    alike. Silos that agree with the probe as well as most count alike, so honest data that differ are not
    penalised. If no silo agrees, the previous model gets all the weight.
    """
    rounds = AGREED if options.past else 1
    new = {name: past.get(name, np.zeros(2)) if options.past else np.zeros(2) for name in sorted(agreement)}
    added = {name: agreement[name] for name, (_, count) in new.items() if count < rounds}
    means = {
        name: (total + added.get(name, 0.0)) / (count + (name in added))
        for name, (total, count) in new.items()
    }
    level = np.median([mean for mean in means.values() if mean > 0] or [1.0])
    roots = {name: np.sqrt(sizes[name].examples) if options.by_size else 1.0 for name in means}
    shares = {name: float(roots[name] * min(1.0, max(0.0, mean) / level)) for name, mean in means.items()}
    total = sum(shares.values())
    weights = {name: share / total for name, share in shares.items()} if total > 0 else {MEMORY: 1.0}
    return Weighed(weights, {name: (1 - cosine) / 2 for name, cosine in sorted(agreement.items())}, added)


def cosine(first: Arrays, second: Arrays, origin: Arrays) -> float:
    """Return the cosine between the steps from `origin` to two models; 0 if one step is 0."""
    steps = [
        {key: model[key].astype(np.float64) - origin[key] for key in origin} for model in (first, second)
    ]
    lengths = norm(steps[0]) * norm(steps[1])
    return sum(float(np.vdot(steps[0][key], steps[1][key])) for key in origin) / lengths if lengths else 0.0


def remembered_risks(state: Arrays, relative: Mapping[str, float]) -> Arrays:
    """Return the state with one more round of every silo: the sum of its relative risks, and their number."""
    added = {name: np.array([value, 1.0]) for name, value in relative.items()}
    past = {f"{RISK}/{name}": one + state.get(f"{RISK}/{name}", 0.0) for name, one in added.items()}
    return {**state, **past}


def _risk_of(errors: NDArray[Any], options: FedRisk) -> NDArray[np.float64]:
    if options.formula == "mean":
        return risks.mean_error(errors)
    if options.formula == "flip":
        printed = risks.risk_matrix(
            errors, alpha_risk=options.alpha_risk, orientation="error", reference="mean"
        )
        return -printed.risk
    if options.formula == "none":
        return np.zeros(len(errors))
    return risks.probe_risk(errors, alpha_risk=options.alpha_risk)


def _printed_weights(errors: Errors, options: FedRisk) -> Weighed:
    """Return the weights (1 − risk_k) / |S_t| of eq. (1), from the errors of every silo's batches."""
    if options.formula == "none":
        risk = np.zeros(len(errors))
    else:
        risk = risks.batch_risks(list(errors.values()), alpha_risk=options.alpha_risk)
        risk = -risk if options.formula == "flip" else risk
    weights = risks.paper_weights(risk)
    return Weighed(
        dict(zip(errors, weights.tolist(), strict=True)), dict(zip(errors, risk.tolist(), strict=True))
    )


def _normalised_weights(sizes: Sizes, momentum: float) -> dict[str, float]:
    """Return FedNova's weights, under which a silo that took more steps does not pull harder.

    θ ← θ + τ_eff Σ_k p_k (θ_k − θ)/‖a_k‖₁ with p_k = n_k/n and τ_eff = Σ_k p_k ‖a_k‖₁, where ‖a_k‖₁ is the
    number of local steps τ_k, or with local momentum ρ (τ_k − ρ (1 − ρ^τ_k)/(1 − ρ))/(1 − ρ).
    """
    examples, steps = np.array(list(sizes.values())).T
    lengths = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    shares = examples / examples.sum()
    weights = dict(zip(sizes, (shares * (shares @ lengths) / lengths).tolist(), strict=True))
    return {**weights, MEMORY: 1 - sum(weights.values())}


def weighted_mean(weighed: Weighed, models: Mapping[str, Arrays], options: StrategyOptions) -> Arrays:
    """Return Σ_k w_k θ_k; in paper mode mixed with the previous model, α Σ_k w_k θ_k + β θ_G (5)."""
    weights = weighed.weights
    if options.name == "fedrisk" and options.risk.mode == "paper":
        weights = {name: options.risk.alpha_mix * weight for name, weight in weights.items()}
        weights[MEMORY] = options.risk.beta_mix
    with np.errstate(over="ignore"):  # the coordinator's guard reports growth beyond float32
        return combine(weights, models)


def step(
    old: Arrays, mean: Arrays, state: Arrays, options: StrategyOptions, *, number: int, optimise: Optimise
) -> tuple[Arrays, Arrays]:
    """Return the next model, from the mean of round `number`, and the server's next state.

    `optimise` takes the steps of the optimisers that have a state.
    """
    if options.name == "fedrisk" and options.risk.renormalise:
        mean, state = _renormalised(old, mean, state)
    if options.step in ("convex", "halving"):
        share = 1 - options.share if options.step == "convex" else 2.0**-number
        return combine({"new": share, "old": 1 - share}, {"new": mean, "old": old}), state
    if options.optimiser == "average":
        return mean, state
    new, memory = optimise(options.optimiser, options.optimiser_options, old, mean, state, number=number)
    return new, {**forgotten(state), **memory}


def forgotten(state: Arrays) -> Arrays:
    """Return the state without the state of the server's optimiser."""
    return {
        name: array
        for name, array in state.items()
        if not name.startswith(("momentum_vector/", "m_t/", "v_t/"))
    }


def _renormalised(old: Arrays, mean: Arrays, state: Arrays) -> tuple[Arrays, Arrays]:
    """Scale the mean to the length of the first global model."""
    length = float(state["length"]) if "length" in state else norm(old) or 1.0
    scale = length / (norm(mean) or 1.0)
    scaled = {key: (array * scale).astype(array.dtype) for key, array in mean.items()}
    return scaled, {**state, "length": np.array(length)}


def correction(state: Arrays, silo: str, model: Arrays) -> Arrays:
    """Return SCAFFOLD's c − c_k, which a silo adds to its gradients against client drift."""
    common, own = _control(state, COMMON, model), _control(state, silo, model)
    return {key: common[key] - own[key] for key in common}


def control_variates(
    old: Arrays,
    models: Mapping[str, Arrays],
    sizes: Sizes,
    state: Arrays,
    *,
    learning_rate: float,
    population: int,
) -> Arrays:
    """Return the state with SCAFFOLD's control variates after a round.

    After K steps of size η_l from x to y_k (option II, eqs. 4-5), c_k⁺ = c_k − c + (x − y_k)/(K η_l) and c ←
    c + Σ_k (c_k⁺ − c_k)/N. All of this follows from y_k, so the server stores every c_k, and silos need no
    state.
    """
    common, controls = _control(state, COMMON, old), {}
    drift = {key: np.zeros_like(value) for key, value in common.items()}
    for name, model in models.items():
        own, scale = _control(state, name, old), np.float32(1 / (sizes[name].steps * learning_rate))
        change = {key: (old[key] - model[key]) * scale - common[key] for key in old}
        controls[name] = {key: own[key] + change[key] for key in own}
        drift = {key: drift[key] + change[key] / np.float32(population) for key in drift}
    controls[COMMON] = {key: common[key] + drift[key] for key in common}
    named = {f"controls/{name}/{key}": control[key] for name, control in controls.items() for key in control}
    return {**state, **named}


def _control(state: Arrays, name: str, model: Arrays) -> Arrays:
    """Return a silo's control variate, or the common one; 0 at first."""
    return below(state, f"controls/{name}") or {key: np.zeros_like(value) for key, value in model.items()}


def refusal(
    before: NDArray[np.float64], after: NDArray[np.float64], best: NDArray[np.float64] | None
) -> tuple[str, NDArray[np.float64]]:
    """Return why the probe refuses a step, empty if it does not, and the best model's errors so far.

    One local epoch on bad data makes a model hardly worse, so weights from risk cannot exclude all of it when
    every silo of a round is bad, and server momentum accumulates the rest from round to round. A model after
    a round is therefore refused if it is worse than the best so far by more than `LIMIT` standard errors of
    the paired difference: the previous model stays and momentum starts afresh. A model that is better than
    the one before it is never refused, so a best that was merely lucky on the probe cannot end training.

    The errors are shares of pairs in the wrong order, query by query, which have less noise than nDCG@10 and,
    unlike a loss, do not depend on the scale of the scores.
    """
    if best is None or len(best) != len(before):
        best = before
    if after.mean() > before.mean() and _worse(after, best):
        shares = f"{after.mean():.3f} of the probe's pairs in the wrong order"
        return f"the round: {shares}, at best {best.mean():.3f}", best
    return "", after if after.mean() < best.mean() else best


def _worse(errors: NDArray[np.float64], reference: NDArray[np.float64]) -> bool:
    """Whether the mean error is higher than the reference's by more than `LIMIT` standard errors."""
    difference = errors - reference
    if len(difference) < 2:
        return False
    noise = difference.std(ddof=1) / np.sqrt(len(difference))
    return bool(difference.mean() > LIMIT * noise)


def refused(weighed: Weighed, why: str) -> Weighed:
    """Return the weights of a refused round: all to the previous model, and all silos rejected."""
    silos = (name for name in weighed.weights if name != MEMORY)
    rejected = dict.fromkeys(silos, f"the probe refused {why}")
    return replace(weighed, refused=why, weights={MEMORY: 1.0}, rejected=rejected)


def combine(weights: Mapping[str, float], models: Mapping[str, Arrays]) -> Arrays:
    """Return Σ_k w_k θ_k over the named models, in the order of their names, in the models' own type."""
    names = sorted(weights)
    first = models[names[0]]
    total = {key: np.zeros(array.shape, np.float64) for key, array in first.items()}
    for name in names:
        for key in total:
            total[key] += weights[name] * models[name][key].astype(np.float64)
    return {key: total[key].astype(array.dtype) for key, array in first.items()}


def norm(arrays: Arrays) -> float:
    """Return the length ‖θ‖ over all arrays."""
    return float(np.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values())))


def below(arrays: Mapping[str, NDArray[Any]], prefix: str) -> Arrays:
    """Return the arrays with names that begin with `prefix/`, without the prefix."""
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
