"""Totals of all silos that nobody sees without noise, and of which nobody sees a part.

Every silo adds a share of noise to its own cells and masks the result; the relay learns the sum of those who
answered, with at least the noise that ε asks for. A share is X − Y with

    X, Y ~ NegBinomial(1/(n − c − d), 1 − e^{−ε/Δ})

so the shares of n − c − d silos make one two-sided geometric noise of rate ε/Δ. That much is left for an
attacker when d of n silos dropped out and c of the others told it their shares: a participant who takes its
own share off still faces all of the noise. Shares of 1/n would leave it less than was promised.

Noise is fresh at every attempt, and so is the charge: a sum that failed half-way and is tried again with
other silos would otherwise show one silo's cells by difference, under a single share.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import ConfigError, PrivacyError
from isthmus.private.cost import ChargeAll, Cost, Covered, no_charge
from isthmus.private.noise import Entropy, Geometric
from isthmus.private.secure_sum import Words, as_signed, least_threshold, sum_in_memory
from isthmus.private.sketch import HashFamily
from isthmus.private.totals import totals_costs
from isthmus.retrieval import TEXT, TIMES, Statistics
from isthmus.tables.ids import FloatArray, IntArray

SENSITIVITY = 2.0
"""One replaced word takes one from a cell and adds one to another."""


@dataclass(frozen=True)
class NoiseShares:
    """One silo's share of a two-sided geometric noise of this rate, for sums of so many silos.

    `colluding` silos may tell the relay their shares, `dropped` ones may never answer.
    """

    rate: float
    silos: int
    colluding: int = 1
    dropped: int = 0

    def __post_init__(self) -> None:
        Geometric(self.rate)  # has an opinion on rates
        if self.colluding < 1 or self.dropped < 0 or self.honest < 1:
            raise ConfigError(
                f"{self.silos} silos less {self.colluding} colluding and {self.dropped} dropped",
                key="colluding",
                expected="at least one colluding silo, and one that neither colludes nor drops out",
            )

    @property
    def honest(self) -> int:
        """How many shares make the whole noise: n − c − d."""
        return self.silos - self.colluding - self.dropped

    def draw(self, size: int, entropy: Entropy = os.urandom) -> IntArray:
        """A fresh share for so many cells: X − Y by inversion in integers."""
        if np.isinf(self.rate):
            return np.zeros(size, dtype=np.int64)
        words = np.frombuffer(entropy(16 * size), dtype="<u8").reshape(2, size)
        drawn: IntArray = np.searchsorted(self._cuts, words, side="right")
        share: IntArray = drawn[0] - drawn[1]
        return share

    def variance(self, shares: int) -> float:
        """Of the sum of so many shares: shares/(n − c − d) · 2a/(1 − a)²."""
        return shares / self.honest * Geometric(self.rate).variance

    def law(self, shares: int) -> Geometric:
        """The two-sided geometric noise with the variance of the sum of so many shares."""
        if np.isinf(self.rate):
            return Geometric(self.rate)
        # 2a/(1 − a)² = 1/(cosh(rate) − 1), solved for the rate; 0.001 is the least there is
        return Geometric(max(1e-3, float(np.arccosh(1 + 1 / self.variance(shares)))))

    def chances(self, shares: int, most: int) -> FloatArray:
        """P(k) of the sum of so many shares, for k from −most to most, by convolution."""
        from scipy.stats import nbinom

        one_sided = nbinom.pmf(np.arange(2 * most + 1), shares / self.honest, 1 - np.exp(-self.rate))
        both: FloatArray = np.convolve(one_sided, one_sided[::-1])[most : 3 * most + 1]
        return both

    @cached_property
    def _cuts(self) -> NDArray[np.uint64]:
        """⌊2^64 · P(X ≤ k)⌋ for all k where that is below 2^64; P(k + 1) = P(k)·a·(k + r)/(k + 1)."""
        with localcontext() as context:
            context.prec = 60
            ratio, shape, whole = (-Decimal(self.rate)).exp(), Decimal(1) / self.honest, Decimal(2**64)
            chance = (shape * (1 - ratio).ln()).exp()
            below, cuts, step = chance, [], 0
            while (cut := int(whole * below)) < 2**64 - 1:
                cuts.append(cut)
                chance *= ratio * (step + shape) / (step + 1)
                below += chance
                step += 1
        return np.array(cuts, dtype=np.uint64)


@dataclass(frozen=True)
class SumPlan:
    """What the silos agree on before they add up document frequencies and collection counts of a field."""

    field: str
    family: HashFamily
    silos: Sequence[str]
    epsilon_df: float = 0.5
    epsilon_cf: float = 0.5
    colluding: int = 1
    dropped: int = 0
    refresh: int = 0

    def __post_init__(self) -> None:
        if self.family.rows != 1 or len(set(self.silos)) != len(self.silos):
            raise ConfigError("a sum is of one row of cells and of distinct silos", key="silos")
        if self.threshold < least_threshold(len(self.silos)):
            raise ConfigError(f"{self.dropped} silos may drop out of {len(self.silos)}", key="dropped")
        self.shares  # noqa: B018  refuses a plan without noise

    @property
    def threshold(self) -> int:
        """How many silos must answer and finish: with fewer the noise would be less than promised."""
        return len(self.silos) - self.dropped

    @property
    def shares(self) -> tuple[NoiseShares, NoiseShares]:
        """Of the noise on document frequencies and on collection counts."""
        many = len(self.silos), self.colluding, self.dropped
        return (
            NoiseShares(self.epsilon_df / SENSITIVITY, *many),
            NoiseShares(self.epsilon_cf / SENSITIVITY, *many),
        )

    def costs(self, attempt: str) -> list[Cost]:
        """What an attempt costs every document of a silo."""
        draw = f"refresh {self.refresh}, attempt {attempt}"
        return totals_costs(self.field, epsilon_df=self.epsilon_df, epsilon_cf=self.epsilon_cf, draw=draw)

    def contribute(
        self,
        name: str,
        sums: Statistics,
        covered: Covered,
        *,
        charge: ChargeAll,
        entropy: Entropy = os.urandom,
    ) -> IntArray:
        """One silo's vector for the secure sum, charged to all its documents before noise is drawn.

        The totals are for all silos, so the charge names each of the others; as all of them see the same
        it counts once. Numbers of documents and words are public and carry no noise.
        """
        if name not in self.silos or sums.family != self.family:
            raise PrivacyError("a summand of another silo or hash family than the plan's")
        if len(covered) != sums.documents:
            raise PrivacyError(f"cells of {sums.documents} documents, but {len(covered)} to be charged")
        costs, peers = self.costs(entropy(8).hex()), [peer for peer in self.silos if peer != name]
        charge([(cost, covered, peer) for cost in costs for peer in peers])
        noise = [share.draw(self.family.size, entropy) for share in self.shares]
        cells = [sums.tables[table] + share for table, share in zip((TEXT, TIMES), noise, strict=True)]
        return np.concatenate((*cells, [sums.documents, sums.length])).astype(np.int64)

    def totals(self, total: Words, *, answered: int) -> Statistics:
        """What everybody learns, from the sum over those who answered."""
        if answered < self.threshold or len(total) != 2 * self.family.size + 2:
            raise PrivacyError("a sum of fewer silos, or of other cells, than the plan's")
        values, size = as_signed(total), self.family.size
        documents, length = (int(number) for number in values[2 * size :])
        tables = {TEXT: values[:size], TIMES: values[size : 2 * size]}
        rates = {name: each.law(answered).rate for name, each in zip(tables, self.shares, strict=True)}
        hashing = self.family.public_name
        return Statistics(
            documents, {"text": length}, tables, hashing=hashing, family=self.family, rates=rates
        )


def totals_in_memory(
    plan: SumPlan,
    silos: Mapping[str, tuple[Statistics, Covered]],
    *,
    charge: Mapping[str, ChargeAll] | None = None,
    absent: Collection[str] = (),
    entropy: Entropy = os.urandom,
) -> Statistics:
    """The whole protocol in one process, for simulation; `absent` silos drop out after they agreed."""
    vectors = {
        name: plan.contribute(
            name, sums, covered, charge=(charge or {}).get(name, no_charge), entropy=entropy
        )
        for name, (sums, covered) in silos.items()
    }
    summed = sum_in_memory(
        vectors, threshold=plan.threshold, session=entropy(16), dropped=list(absent), entropy=entropy
    )
    return plan.totals(summed, answered=len(vectors) - len(set(absent)))
