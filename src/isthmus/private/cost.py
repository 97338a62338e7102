"""What a release costs, in numbers a ledger adds up and in words a person understands.

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
        """How often an attacker can be right who knows everything but which of two words stands somewhere."""
        return certainty(self.epsilon, halves=self.halves)

    @property
    def surest(self) -> float:
        """How sure such an attacker can be after a single draw of the noise."""
        return surest(self.epsilon)

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

    def take(self, rows: Sequence[int]) -> Covered:
        """Some of them, by row."""
        return Covered(tuple(self.documents[row] for row in rows), tuple(self.versions[row] for row in rows))

    def frozen(self) -> Covered:
        """The same in tuples, which nobody can change behind one's back; itself if it is so already."""
        if isinstance(self.documents, tuple) and isinstance(self.versions, tuple):
            return self
        return Covered(tuple(self.documents), tuple(self.versions))


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
    """The largest success rate, averaged over the noise, of telling two equally likely words apart.

    It is e^x/(1 + e^x) with x = ε in general. Where the two words meet independent noise the release is Q ⊗ Q
    with an ε/2-private Q, hence post-processing of two randomised responses at ε/2 (Kairouz, Oh and
    Viswanath 2015), and two of them decide no better than one: x = ε/2.
    """
    return surest(epsilon / 2 if halves else epsilon)


def surest(epsilon: float) -> float:
    """The largest probability that one of two equally likely words has after a single draw: e^ε/(1 + e^ε).

    This is what ε bounds. `certainty` is lower where noise is independent because some draws tell nothing:
    with p = `certainty(ε)`, the two responses agree in p² + (1 − p)² of draws, 96.5 % at ε = 8, and then the
    attacker is as sure as this; in the others it knows what it knew before.
    """
    return 1.0 / (1.0 + math.exp(-epsilon))


def explain(epsilon: float, *, halves: bool = True) -> str:
    """An ε in plain words."""
    if math.isinf(epsilon):
        return "ε = ∞: no privacy, the values can be worked out exactly"
    return (
        f"ε = {epsilon:g} for one replaced word: who knows all else tells one word from another"
        f" with at most {_percent(certainty(epsilon, halves=halves))} certainty on average over draws of the"
        f" noise, and {_percent(surest(epsilon))} after a single draw"
    )


def _percent(share: float) -> str:
    """With as many digits as tell it from 100 %."""
    percent = 100 * share
    if percent >= 99.995:
        return "more than 99.99 %"
    return f"{percent:.1f} %" if percent < 99.95 else f"{percent:.2f} %"
