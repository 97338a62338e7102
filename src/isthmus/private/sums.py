"""Sums over all silos that every party sees with noise, while no party sees a single silo's part.

Every silo adds a share of noise to its own cells and masks the result; the relay learns the sum of those that
answered, with at least the noise that ε requires. A share is X − Y with

    X, Y ~ NegBinomial(1/(n − c − d), 1 − e^{−ε/Δ})

so the shares of n − c − d silos make one two-sided geometric noise of rate ε/Δ. That much is left for an
attacker when d of n silos dropped out and c of the others told it their shares: a participant who subtracts
its own share still faces all of the noise. Shares of 1/n would leave less noise than ε requires.

Noise is fresh at every attempt, and so is the charge: a sum that failed half-way and is tried again with
other silos would otherwise show one silo's cells by difference, under a single share.

A silo's part (`Summing`) and the relay's (`Adding`) exchange named bytes, `FIELD/SILO`, of one secure sum per
field, in steps:

    agree     silo: its signed public keys                          relay: hands all of them to all
    share     silo: a box for every silo, with shares of its keys   relay: hands each box to its receiver
    mask      silo: adds its share of noise, masks                  relay: lists the silos that answered
    confirm   silo: signs that list                                 relay: hands all signatures to all
    reveal    silo: charges, then reveals shares to remove masks    relay: the noisy total, to all
    finish    silo: stores the total

The relay sees no silo's cells. It could hand on wrong data, but keys and lists are signed by identities that
silos know from each other's cards, boxes open for their receiver only, and all else is a ProtocolError. All
silos must stay to the end, so a masked vector is noise until its own silo reveals its shares: that is when a
release is charged, and a session that ends before costs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from functools import cached_property
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from numpy.typing import NDArray

from isthmus.arrays import IntArray
from isthmus.errors import ConfigError, PrivacyError, ProtocolError
from isthmus.files import write_private, write_whole
from isthmus.private import secure_sum
from isthmus.private.cost import ChargeAll, Cost, Covered, no_charge
from isthmus.private.keys import Keyring
from isthmus.private.mechanisms import Entropy, Geometric
from isthmus.private.sketch import HashFamily
from isthmus.private.totals import hashed, totals_costs
from isthmus.retrieval import TEXT, TIMES, Statistics
from isthmus.text import Tokens

SENSITIVITY = 2.0
"""L1 sensitivity: one replaced word takes one from a cell and adds one to another."""
TURNS = len(secure_sum.STEPS) + 1
"""Turns of the relay that a sum takes: its steps, and one to hand out the totals."""


@dataclass(frozen=True)
class NoiseShares:
    """One silo's share of two-sided geometric noise of this rate, for sums over `silos` silos.

    `colluding` silos may tell the relay their shares, `dropped` ones may never answer.
    """

    rate: float
    silos: int
    colluding: int = 1
    dropped: int = 0

    def __post_init__(self) -> None:
        Geometric(self.rate)  # validates the rate
        if self.colluding < 1 or self.dropped < 0 or self.honest < 1:
            raise ConfigError(
                f"{self.silos} silos less {self.colluding} colluding and {self.dropped} dropped",
                key="colluding",
                expected="at least one colluding silo, and one that neither colludes nor drops out",
            )

    @property
    def honest(self) -> int:
        """The number of shares that make the whole noise: n − c − d."""
        return self.silos - self.colluding - self.dropped

    def draw(self, size: int, entropy: Entropy = os.urandom) -> IntArray:
        """Draw a fresh share for `size` cells: X − Y by inversion in integers."""
        if np.isinf(self.rate):
            return np.zeros(size, dtype=np.int64)
        words = np.frombuffer(entropy(16 * size), dtype="<u8").reshape(2, size)
        drawn: IntArray = np.searchsorted(self._cuts, words, side="right")
        share: IntArray = drawn[0] - drawn[1]
        return share

    def variance(self, shares: int) -> float:
        """The variance of the sum of `shares` shares: shares/(n − c − d) · 2a/(1 − a)²."""
        return shares / self.honest * Geometric(self.rate).variance

    def law(self, shares: int) -> Geometric:
        """The two-sided geometric noise with the variance of the sum of `shares` shares."""
        if np.isinf(self.rate):
            return Geometric(self.rate)
        # 2a/(1 − a)² = 1/(cosh(rate) − 1), solved for the rate, which is at least 0.001
        return Geometric(max(1e-3, float(np.arccosh(1 + 1 / self.variance(shares)))))

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
    """The silos' agreement on a sum of the document frequencies and collection counts of a field."""

    field: str
    family: HashFamily
    silos: Sequence[str]
    epsilon_df: float = 0.5
    epsilon_cf: float = 0.5
    colluding: int = 1
    dropped: int = 0

    def __post_init__(self) -> None:
        if self.family.rows != 1 or len(set(self.silos)) != len(self.silos):
            raise ConfigError("a sum is of one row of cells and of distinct silos", key="silos")
        if self.threshold < secure_sum.least_threshold(len(self.silos)):
            raise ConfigError(f"{self.dropped} silos may drop out of {len(self.silos)}", key="dropped")
        self.shares  # noqa: B018  refuses a plan without noise

    @property
    def threshold(self) -> int:
        """The number of silos that must answer and finish: with fewer, there would be too little noise."""
        return len(self.silos) - self.dropped

    @property
    def shares(self) -> tuple[NoiseShares, NoiseShares]:
        """The shares of the noise on document frequencies and on collection counts."""
        many = len(self.silos), self.colluding, self.dropped
        first, second = (NoiseShares(e / SENSITIVITY, *many) for e in (self.epsilon_df, self.epsilon_cf))
        return first, second

    def costs(self, attempt: str) -> list[Cost]:
        """The costs of an attempt for every document of a silo."""
        epsilons = {"epsilon_df": self.epsilon_df, "epsilon_cf": self.epsilon_cf}
        return totals_costs(self.field, **epsilons, draw=f"attempt {attempt}")

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

        The totals are for all silos, so the charge names each of the others; as all of them get the same
        values, it counts once. Numbers of documents and words are public and carry no noise.
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

    def totals(self, total: secure_sum.Words, *, answered: int) -> Statistics:
        """The totals that all silos learn, from the sum over the silos that answered."""
        if answered < self.threshold or len(total) != 2 * self.family.size + 2:
            raise PrivacyError("a sum of fewer silos, or of other cells, than the plan's")
        values, size = secure_sum.as_signed(total), self.family.size
        documents, length = (int(number) for number in values[2 * size :])
        tables = {TEXT: values[:size], TIMES: values[size : 2 * size]}
        rates = {name: each.law(answered).rate for name, each in zip(tables, self.shares, strict=True)}
        return Statistics(
            documents,
            {"text": length},
            tables,
            hashing=self.family.public_name,
            epsilon=self.epsilon_df + self.epsilon_cf,
            family=self.family,
            rates=rates,
        )


def totals_in_memory(
    plan: SumPlan,
    silos: Mapping[str, tuple[Statistics, Covered]],
    *,
    charge: Mapping[str, ChargeAll] | None = None,
    absent: Collection[str] = (),
    entropy: Entropy = os.urandom,
) -> Statistics:
    """Run the whole protocol in one process, for simulation; `absent` silos drop out after they agreed."""
    vectors = {
        name: plan.contribute(
            name, sums, covered, charge=(charge or {}).get(name, no_charge), entropy=entropy
        )
        for name, (sums, covered) in silos.items()
    }
    summed = secure_sum.sum_in_memory(
        vectors, threshold=plan.threshold, session=entropy(16), dropped=list(absent), entropy=entropy
    )
    return plan.totals(summed, answered=len(vectors) - len(set(absent)))


@dataclass(frozen=True)
class Agreed:
    """The parameters of a sum that all silos know beforehand: session, participants and width of the
    sketches.

    All of these `count` silos must stay to the end.
    """

    session: bytes
    silos: tuple[str, ...]
    count: int
    width: int
    colluding: int = 1

    def __post_init__(self) -> None:
        many = 2 <= self.count <= 1000 and 1 <= self.colluding <= self.count
        if len(self.session) != 16 or not many or not 2 <= self.width <= 1 << 23:
            raise ProtocolError("a session without a name, or of silos, cells or colluders that cannot be")

    @property
    def terms(self) -> bytes:
        """The bytes to which masks and signatures are bound."""
        numbers = (self.count, self.width, self.colluding)
        return secure_sum.joined(
            [*(name.encode() for name in self.silos), *(n.to_bytes(8, "little") for n in numbers)]
        )

    def of_field(self, name: str) -> bytes:
        """The session of one field's sum."""
        return self.session + name.encode()


@dataclass(frozen=True, eq=False)
class Contribution:
    """A silo's contribution to the sum of one field: the words of its documents, their versions, and ε."""

    words: Tokens
    covered: Covered
    epsilon: float = 0.5
    entropy: Entropy = os.urandom


ContributionOf = Callable[[str], Contribution]
"""Builds the contribution of a field, for the steps that need it."""


class Summing:
    """A silo's part in the sums of all fields; between steps its state is in a folder."""

    def __init__(self, agreed: Agreed, keys: Keyring, folder: Path) -> None:
        self.agreed, self.folder = agreed, folder
        self.identity, self.group = keys.identity(), keys.group_key()
        trusted = {**keys.trusted(), self.identity.name: self.identity.card}
        self.trusted = {
            name: Ed25519PublicKey.from_public_bytes(card.verifying) for name, card in trusted.items()
        }

    def step(
        self, number: int, incoming: Mapping[str, bytes], fields: Collection[str], adding: ContributionOf
    ) -> secure_sum.Parts:
        """Carry out a step except the last: the first for all of the silo's fields, later ones for the fields
        for which the relay sends parts."""
        parts: secure_sum.Parts = {}
        for name, handed in (_by_field(incoming) if number else {name: {} for name in fields}).items():
            member = self._member(name) if number else self._begun(name)
            vector: IntArray | tuple[()] = ()
            if secure_sum.STEPS[number] == "mask":
                if name not in fields:
                    raise ProtocolError("a sum of a field that this silo does not have")
                vector = self._vector(name, member, adding(name))
            outgoing = member.step(secure_sum.STEPS[number], handed, vector=vector, terms=self.agreed.terms)
            self._keep(name, member)
            parts |= _of_field(name, outgoing)
        return parts

    def _begun(self, name: str) -> secure_sum.Member:
        if self._file(name).exists() or self._total(name).exists():
            raise ProtocolError("a sum that was begun before")
        session, identity = self.agreed.of_field(name), self.identity
        return secure_sum.Member(identity.name, session, self.agreed.count, identity.signing, self.trusted)

    def _vector(self, name: str, member: secure_sum.Member, own: Contribution) -> IntArray:
        """The cells of this silo with its share of the noise."""
        plan = self._plan(name, own)
        if member.peers != set(plan.silos) or member.threshold != plan.threshold:
            raise ProtocolError("a sum of other silos than those that have begun it")  # or with less noise
        sums = hashed(Statistics.of(own.words), plan.family)
        return plan.contribute(self.identity.name, sums, own.covered, charge=no_charge, entropy=own.entropy)

    def charges(self, name: str, adding: Contribution) -> list[tuple[Cost, Covered, str]]:
        """The charges of this silo's documents for the sum of a field.

        The release is named by the keys that this silo drew for it, not by the session, which the relay
        chooses: a session that is repeated under its old name has other noise, and is charged again.
        """
        member = self._member(name)
        costs = self._plan(name, adding).costs(member.advertise().mask_key.hex())
        peers = sorted(member.peers - {self.identity.name})
        return [(cost, adding.covered, peer) for cost in costs for peer in peers]

    def finish(self, incoming: Mapping[str, bytes]) -> None:
        """The last step: store the totals that the relay announced, and delete the keys of the masks."""
        for name, total in incoming.items():
            if len(total) != 8 * (2 * self.agreed.width + 3):
                raise ProtocolError("a total of other cells than agreed")
            self._member(name)  # raises if no sum of this field was begun
            write_whole(self._total(name), total)
            self._file(name).unlink()

    def totals(self, name: str, adding: ContributionOf) -> Statistics | None:
        """The noisy totals of a field; None before they have come."""
        if not self._total(name).exists():
            return None
        words = np.frombuffer(self._total(name).read_bytes(), dtype="<u8").astype(np.uint64)
        return self._plan(name, adding(name)).totals(words[:-1], answered=int(words[-1]))

    def _plan(self, name: str, adding: Contribution) -> SumPlan:
        agreed = self.agreed
        family = self.group.family(f"totals {name}", width=agreed.width)
        return SumPlan(name, family, agreed.silos, adding.epsilon, adding.epsilon, agreed.colluding)

    def stopped(self) -> bool | None:
        """Delete the state of a session that did not end. Returns whether this silo had revealed its shares,
        or None if the session did end."""
        left = list(self.folder.glob("*.member"))
        revealed = any(json.loads(file.read_bytes()).get("revealed") for file in left)
        for file in left:
            file.unlink()
        return revealed if left else None

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.member"

    def _total(self, name: str) -> Path:
        return self.folder / f"{name}.total"

    def _keep(self, name: str, member: secure_sum.Member) -> None:
        """Store a member, with all its secrets, in a file that only its own silo can read."""
        write_private(self._file(name), member.to_bytes())

    def _member(self, name: str) -> secure_sum.Member:
        if not name.isalnum() or not self._file(name).exists():
            raise ProtocolError("a step of a sum that was not begun")
        data = self._file(name).read_bytes()
        return secure_sum.Member.resumed(data, identity=self.identity.signing, trusted=self.trusted)


@dataclass(eq=False)
class Adding:
    """The relay's part: passes on what is for other silos, and removes the masks from the sum of every
    field."""

    agreed: Agreed
    sums: dict[str, secure_sum.Summation] = field(default_factory=dict)
    totals: dict[str, secure_sum.Words] = field(default_factory=dict)

    def after(self, step: int, replies: Mapping[str, secure_sum.Parts]) -> dict[str, secure_sum.Parts]:
        """The parts for every silo in the next step, from the parts that silos sent in this one.

        Raises ProtocolError, with the silo's name, for parts that are not those of the step.
        """
        if step >= len(secure_sum.STEPS):
            return {silo: {} for silo in replies}
        for silo, parts in replies.items():
            for name, silo_parts in _by_field(parts).items():
                try:
                    self._sum(name).receive(secure_sum.STEPS[step], silo, silo_parts)
                except ProtocolError as error:
                    raise ProtocolError(f"the silo {silo}: {error}") from error
        if secure_sum.STEPS[step] == "reveal":
            self.totals = {name: each.total(self.agreed.terms) for name, each in self.sums.items()}
            return {silo: self._announced() for silo in replies}
        handed: dict[str, secure_sum.Parts] = {silo: {} for silo in replies}
        for name, each in self.sums.items():
            for silo in replies:
                handed[silo] |= _of_field(name, each.next(secure_sum.STEPS[step + 1], silo))
        return handed

    def _sum(self, name: str) -> secure_sum.Summation:
        agreed = self.agreed
        begun = secure_sum.Summation(agreed.of_field(name), agreed.count, 2 * agreed.width + 2)
        return self.sums.setdefault(name, begun)

    def _announced(self) -> secure_sum.Parts:
        """The totals, and the number of silos in each."""
        counts = {name: np.uint64(len(self.sums[name].masked)) for name in self.totals}
        return {name: np.append(self.totals[name], counts[name]).astype("<u8").tobytes() for name in counts}


def _by_field(incoming: Mapping[str, bytes]) -> dict[str, secure_sum.Parts]:
    """Parts labelled `FIELD/SILO`, by field and silo."""
    fields: dict[str, secure_sum.Parts] = {}
    for label, data in incoming.items():
        name, _, silo = label.partition("/")
        fields.setdefault(name, {})[silo] = data
    return fields


def _of_field(name: str, parts: Mapping[str, bytes]) -> secure_sum.Parts:
    return {f"{name}/{silo}": data for silo, data in parts.items()}
