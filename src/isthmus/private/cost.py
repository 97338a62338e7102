"""What a release costs, in numbers a ledger adds up and in words a person understands.

Field lengths are public (they are two of the sixteen features), so the unit of every ε is one word
occurrence **replaced** by another in the same field. An occurrence lies in one field: releases about
different fields compose in parallel, all others add up.

>>> counts = Cost("one_shot", ("body",), 8.0, sensitivity=2.0, scale=0.25, release="body counts")
>>> print(counts.meaning)
ε = 8 for one replaced word: who knows all else tells one word from another with 98.2 % certainty at best
>>> together([counts, Cost("one_shot", ("title",), 8.0, sensitivity=2.0, scale=0.25, release="title counts")])
8.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from isthmus.errors import PrivacyError

REPLACED = "one word occurrence of a field replaced by another"
"""The adjacency every ε is stated for unless its cost says otherwise."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one release costs every document it covers.

    - `fields`: those whose words it is about;
    - `sensitivity`: the L1 change of the true values between neighbours;
    - `scale`: the width over which the noise falls by a factor e;
    - `release`: the name of the noise. A document version charged under a name may be released under it again
      for nothing, because the values are the same;
    - `shared`: every peer sees the same values, so the charge counts once for all of them. What is not shared
      adds up over peers;
    - `halves`: the word that goes and the word that comes meet independent noise, each at ε/2.
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
        """The best an attacker can do who knows everything but which of two words stands somewhere."""
        return certainty(self.epsilon, halves=self.halves)

    @property
    def meaning(self) -> str:
        """The ε in plain words."""
        return explain(self.epsilon, halves=self.halves)


@dataclass(frozen=True, slots=True)
class Covered:
    """The documents a release is about and the version of each, a random name made with its noise nonce."""

    documents: Sequence[str]
    versions: Sequence[str]

    def __post_init__(self) -> None:
        if len(self.documents) != len(self.versions):
            raise PrivacyError(f"{len(self.documents)} documents but {len(self.versions)} versions")

    def __len__(self) -> int:
        return len(self.documents)

    def frozen(self) -> Covered:
        """The same in tuples, which nobody can change behind one's back; itself if it is so already."""
        if isinstance(self.documents, tuple) and isinstance(self.versions, tuple):
            return self
        return Covered(tuple(self.documents), tuple(self.versions))


class Charge(Protocol):
    """Books a release before it leaves; returns once the charge is durable, or raises BudgetExhausted."""

    def __call__(self, cost: Cost, covered: Covered, peer: str) -> None: ...


class ChargeAll(Protocol):
    """Books several releases (cost, documents, peer) before they leave: all of them, or none."""

    def __call__(self, releases: Iterable[tuple[Cost, Covered, str]]) -> None: ...


def no_charge(releases: Iterable[tuple[Cost, Covered, str]]) -> None:
    """For simulations, where nothing leaves anything."""


def together(costs: Iterable[Cost]) -> float:
    """The ε of one document for these charges: the field that spent most, its charges added up.

    Charges of the same release count once if the release is shared.
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
    """The largest success rate of telling two equally likely words apart: e^x/(1 + e^x).

    x is ε in general. Where the two words meet independent noise the release is Q ⊗ Q with an ε/2-private Q,
    hence post-processing of two randomised responses at ε/2 (Kairouz, Oh and Viswanath 2015), and two of
    them decide no better than one: x = ε/2.
    """
    return 1.0 / (1.0 + math.exp(-(epsilon / 2 if halves else epsilon)))


def explain(epsilon: float, *, halves: bool = True) -> str:
    """An ε in plain words."""
    if math.isinf(epsilon):
        return "ε = ∞: no privacy, the values can be worked out exactly"
    share = 100 * certainty(epsilon, halves=halves)
    told = f"{share:.1f}" if share < 99.95 else f"{share:.2f}" if share < 99.995 else "more than 99.99"
    return (
        f"ε = {epsilon:g} for one replaced word: who knows all else tells one word from another"
        f" with {told} % certainty at best"
    )
