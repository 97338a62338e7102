"""What several releases cost together: basic and advanced composition, and zCDP.

A `PrivacyLoss` holds three sums, so losses add like their releases; a rule makes them one ε at a δ:

    basic      ε = Σ ε_i                                      δ = 0
    advanced   ε = ½ Σ ε_i² + √(2 ln(1/δ) Σ ε_i²)             Whitehouse et al. 2023, Theorem 1
    zcdp       ε = min over α of the conversion below,        Canonne, Kamath and Steinke 2020, Corollary 13
               from ρ = Σ ρ_i

All three hold when the releases and their number are chosen in the light of earlier answers (for zCDP:
Feldman and Zrnic 2021), and so does the best of basic and one other: a history that only basic composition
admits never loses more than ε, and the other rule bounds the rest.

>>> requested = PrivacyLoss.of(0.1) * 100
>>> [round(requested.at(delta=1e-6, rule=rule), 2) for rule in RULES]
[10.0, 5.76, 5.22]

What a release costs, in numbers a ledger adds up and in words a person understands.

Field lengths are public (they are two of the sixteen features), so the unit of every ε is one word
occurrence **replaced** by another in the same field. An occurrence lies in one field: releases about
different fields compose in parallel, all others add up.

>>> counts = Cost("one_shot", ("body",), 8.0, sensitivity=2.0, scale=0.25, release="body counts")
>>> print(counts.meaning)
ε = 8 for one replaced word: who knows all else tells one word from another with at most 98.2 % certainty on \
average over draws of the noise, and 99.97 % after a single draw
>>> together([counts, Cost("one_shot", ("title",), 8.0, sensitivity=2.0, scale=0.25, release="title counts")])
8.0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol, TypeAlias

from isthmus.errors import PrivacyError

Rule: TypeAlias = Literal["basic", "advanced", "zcdp"]


@dataclass(frozen=True, slots=True)
class PrivacyLoss:
    """Σ ε, Σ ε² and Σ ρ of some releases."""

    epsilon: float = 0.0
    square: float = 0.0
    rho: float = 0.0

    @classmethod
    def of(cls, epsilon: float) -> PrivacyLoss:
        """The loss of one ε-private release."""
        if not epsilon >= 0:
            raise PrivacyError(f"ε = {epsilon} is no privacy loss (expected a number from 0)")
        return cls(epsilon, epsilon * epsilon, pure_to_zcdp(epsilon))

    @classmethod
    def gaussian(cls, sensitivity: float, sigma: float) -> PrivacyLoss:
        """The loss of one release under Gaussian noise, ρ = Δ²/(2σ²); it has no finite ε without a δ."""
        return cls(math.inf, math.inf, (sensitivity / sigma) ** 2 / 2)

    def __add__(self, other: PrivacyLoss) -> PrivacyLoss:
        return PrivacyLoss(self.epsilon + other.epsilon, self.square + other.square, self.rho + other.rho)

    def __mul__(self, times: int) -> PrivacyLoss:
        if not times:
            return PrivacyLoss()
        return PrivacyLoss(times * self.epsilon, times * self.square, times * self.rho)

    def at(self, *, delta: float = 0.0, rule: Rule = "basic") -> float:
        """The total ε of these releases at δ: by the rule, or the plain sum where that is less."""
        return min(self.epsilon, RULES[rule](self, delta))

    def within(self, ceiling: PrivacyLoss) -> bool:
        """Whether at least one of the sums is within its ceiling."""
        return self.epsilon <= ceiling.epsilon or self.square <= ceiling.square or self.rho <= ceiling.rho


def basic(loss: PrivacyLoss, delta: float = 0.0) -> float:
    """Σ ε."""
    return loss.epsilon


def advanced(loss: PrivacyLoss, delta: float) -> float:
    """½ Σ ε² + √(2 ln(1/δ) Σ ε²)."""
    if not 0 < delta < 1:
        return math.inf
    return loss.square / 2 + math.sqrt(-2 * math.log(delta) * loss.square)


def zcdp(loss: PrivacyLoss, delta: float) -> float:
    """Σ ρ, converted to an ε at δ."""
    return zcdp_to_approximate(loss.rho, delta)


RULES: dict[Rule, Callable[[PrivacyLoss, float], float]] = {
    "basic": basic,
    "advanced": advanced,
    "zcdp": zcdp,
}
"""The composition rules by name."""


@lru_cache(maxsize=256)
def ceiling(epsilon: float, *, delta: float = 0.0, rule: Rule = "basic") -> PrivacyLoss:
    """The largest sums that stay within (ε, δ): `loss.within(ceiling)` exactly if `loss.at(…) <= epsilon`.

    A sum that the rule does not use has the ceiling −1, which every sum exceeds.
    """
    square = rho = -1.0
    if rule == "advanced" and 0 < delta < 1:
        tail = -2 * math.log(delta)
        # x²/2 + x√tail = ε, solved for x = √Σε² without cancellation
        square = (2 * epsilon / (math.sqrt(tail) + math.sqrt(tail + 2 * epsilon))) ** 2
    if rule == "zcdp":
        rho = approximate_to_zcdp(epsilon, delta)
    return PrivacyLoss(epsilon, square, rho)


def room(spent: PrivacyLoss, ceiling: PrivacyLoss) -> float:
    """The largest ε of one more release, such that `spent + PrivacyLoss.of(ε)` is still within the
    ceiling."""
    left = [ceiling.epsilon - spent.epsilon] if spent.epsilon < math.inf else []
    if ceiling.epsilon == math.inf:
        return math.inf
    if ceiling.square > spent.square:
        left.append(math.sqrt(ceiling.square - spent.square))
    if ceiling.rho > spent.rho:
        left.append(zcdp_to_pure(ceiling.rho - spent.rho))
    return max([0.0, *left])


def pure_to_zcdp(epsilon: float) -> float:
    """ρ = ε tanh(ε/2), at most ε²/2: the smallest ρ that holds for every ε-private mechanism.

    The worst such mechanism is randomised response (Kairouz, Oh and Viswanath 2015), whose Rényi divergence
    of order α, over α, is largest at α → 1, where it is ε(e^ε − 1)/(e^ε + 1).
    """
    return epsilon * math.tanh(epsilon / 2)


def zcdp_to_pure(rho: float) -> float:
    """The ε whose `pure_to_zcdp` is ρ, approximated from below."""
    return _largest(lambda epsilon: pure_to_zcdp(epsilon) <= rho, high=rho + math.sqrt(2 * rho) + 1)


def zcdp_to_approximate(rho: float, delta: float) -> float:
    """ε(ρ, δ) = min over α > 1 of αρ + (ln(1/δ) − ln α)/(α − 1) + ln(1 − 1/α), and not below 0.

    Every α gives a valid ε, so an inexact minimum makes the result less tight, never wrong.
    """
    if rho == 0:
        return 0.0
    if not 0 < delta < 1 or rho == math.inf:
        return math.inf

    def at(log_order: float) -> float:
        excess = math.exp(log_order)  # α − 1
        order = 1 + excess
        return order * rho + (-math.log(delta) - math.log(order)) / excess - math.log1p(1 / excess)

    centre = math.log(-math.log(delta) / rho) / 2  # the minimum of the first two terms
    return max(0.0, at(_lowest(at, centre - 4, centre + 4)))


def approximate_to_zcdp(epsilon: float, delta: float) -> float:
    """The largest ρ that stays within (ε, δ), approximated from below."""
    if not 0 < delta < 1:
        return -1.0
    if epsilon == math.inf:
        return math.inf
    return _largest(lambda rho: zcdp_to_approximate(rho, delta) <= epsilon, high=epsilon + 1)


def _largest(fits: Callable[[float], bool], *, high: float) -> float:
    """The largest number that fits, by bisection; every number below it must fit, and `high` must not."""
    low = 0.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _lowest(value: Callable[[float], float], low: float, high: float) -> float:
    """The argument at which a function with a single minimum is lowest, by golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(60):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = value(right)
    return left if at_left <= at_right else right


REPLACED = "one word occurrence of a field replaced by another"
"""The adjacency for which every ε is stated unless its cost names another."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The privacy cost of one release for every document it covers.

    - `fields`: the fields whose words it is about;
    - `sensitivity`: the L1 change of the true values between neighbours;
    - `scale`: the distance over which the probability of the noise falls by a factor e;
    - `release`: the name of the noise. A document version that was charged under a name may be released under
      it again without a charge, because the values are the same;
    - `shared`: every peer sees the same values, so the charge counts once for all peers. Charges that are not
      shared add up over peers;
    - `halves`: the removed and the inserted word meet independent noise, each at ε/2.
    """

    mechanism: str
    fields: tuple[str, ...]
    epsilon: float
    sensitivity: float
    scale: float
    release: str
    shared: bool = True
    halves: bool = True
    adjacency: str = REPLACED

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise PrivacyError(f"ε = {self.epsilon} is no cost (a release without any cost needs no charge)")
        if not self.fields:
            raise PrivacyError("a release is about at least one field")

    @property
    def certainty(self) -> float:
        """The highest success rate, on average, of an attacker who knows everything except which of two words
        stands in one place."""
        return certainty(self.epsilon, halves=self.halves)

    @property
    def surest(self) -> float:
        """The highest certainty that such an attacker can reach after a single draw of the noise."""
        return surest(self.epsilon)

    @property
    def meaning(self) -> str:
        """The ε in plain words."""
        return explain(self.epsilon, halves=self.halves)


@dataclass(frozen=True, slots=True)
class Covered:
    """The documents of a release and the version of each, which is named by its random noise nonce."""

    documents: Sequence[str]
    versions: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.versions):
            raise PrivacyError(f"{len(self.documents)} documents but {len(self.versions)} versions")

    def __len__(self) -> int:
        return len(self.documents)

    def take(self, rows: Sequence[int]) -> Covered:
        """The documents in these rows."""
        return Covered(tuple(self.documents[row] for row in rows), tuple(self.versions[row] for row in rows))

    def frozen(self) -> Covered:
        """The same documents in tuples, which the caller cannot change later; `self` if they are in tuples
        already."""
        if isinstance(self.documents, tuple) and isinstance(self.versions, tuple):
            return self
        return Covered(tuple(self.documents), tuple(self.versions))


class ChargeAll(Protocol):
    """Books several releases (cost, documents, peer) before they leave the silo: all of them, or none."""

    def __call__(self, releases: Iterable[tuple[Cost, Covered, str]]) -> None: ...


def no_charge(releases: Iterable[tuple[Cost, Covered, str]]) -> None:
    """A `ChargeAll` that books nothing, for simulations, in which no data leave a silo."""


def together(costs: Iterable[Cost]) -> float:
    """The ε of one document for several charges: the sum in the field where it is largest.

    Charges for the same release count once if the release is shared.
    """
    spent: dict[str, float] = {}
    seen: set[tuple[str, str]] = set()
    for cost in costs:
        if cost.shared and (cost.mechanism, cost.release) in seen:
            continue
        seen.add((cost.mechanism, cost.release))
        for field in cost.fields:
            spent[field] = spent.get(field, 0.0) + cost.epsilon
    return max(spent.values(), default=0.0)


def certainty(epsilon: float, *, halves: bool = True) -> float:
    """The largest success rate, averaged over the noise, of telling two equally likely words apart.

    It is e^x/(1 + e^x) with x = ε in general. Where the two words meet independent noise the release is Q ⊗ Q
    with an ε/2-private Q, hence post-processing of two randomised responses at ε/2 (Kairouz, Oh and
    Viswanath 2015), and two of them decide no better than one: x = ε/2.
    """
    return surest(epsilon / 2 if halves else epsilon)


def surest(epsilon: float) -> float:
    """The largest probability that one of two equally likely words has after a single draw: e^ε/(1 + e^ε).

    This is what ε bounds. `certainty` is lower where noise is independent, because some draws are
    uninformative: with p = `certainty(ε)`, the two responses agree in p² + (1 − p)² of draws, 96.5 % at ε =
    8, and only then does the attacker reach this probability; the other draws do not change its prior.
    """
    return 1.0 / (1.0 + math.exp(-epsilon))


def explain(epsilon: float, *, halves: bool = True, subject: str = "") -> str:
    """Explain an ε in plain words; `subject` is the noun of its unit, if that is not a single document."""
    if math.isinf(epsilon):
        return "ε = ∞: no privacy, the values can be worked out exactly"
    whose = f" in each counted document of a {subject}" if subject else ""
    return (
        f"ε = {epsilon:g} for one replaced word{whose}: who knows all else tells one word from another"
        f" with at most {_percent(certainty(epsilon, halves=halves))} certainty on average over draws of the"
        f" noise, and {_percent(surest(epsilon))} after a single draw"
    )


def _percent(share: float) -> str:
    """A share in percent, with enough digits to differ from 100 %."""
    percent = 100 * share
    if percent >= 99.995:
        return "more than 99.99 %"
    return f"{percent:.1f} %" if percent < 99.95 else f"{percent:.2f} %"
