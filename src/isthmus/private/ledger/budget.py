"""What a document may give away over all its versions, to everybody together and to each peer alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from isthmus.errors import ConfigError
from isthmus.private.composition import RULES, PrivacyLoss, Rule, ceiling


@dataclass(frozen=True)
class Budget:
    """The budget of every document's lineage.

    `epsilon` caps the sum over all peers, who may collude; `per_peer` and `peers` are limits of single peers
    below it. `rule` and `delta` say how releases compose; basic composition is exact and has δ = 0.

    The default is word counts at 8, document frequencies at 0.5 and collection counts at 0.5, once.
    """

    epsilon: float = 9.0
    delta: float = 0.0
    rule: Rule = "basic"
    per_peer: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)
    forgotten: float = field(default=0.0, compare=False)
    """What every document counts as having spent besides, because a ledger was lost: the ledger's to set."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ConfigError(f"no rule of composition {self.rule!r}", key=self.rule, known=RULES)
        if self.rule == "basic" and self.delta != 0:
            raise ConfigError("basic composition has δ = 0", key="delta", value=self.delta, expected="0")
        if self.rule != "basic" and not 0 < self.delta < 1:
            raise ConfigError(
                f"{self.rule} composition needs a δ", key="delta", expected="0 < δ < 1, say 1e-6"
            )
        for key, limit in self._limits():
            if not limit > 0:
                raise ConfigError(
                    f"{key} = {limit} allows nothing", key=key, value=limit, expected="ε above 0"
                )
            if limit > self.epsilon:
                why = f"{key} = {limit:g} lies above the budget of {self.epsilon:g}, which is for all peers"
                raise ConfigError(why, key=key, value=limit)

    def _limits(self) -> list[tuple[str, float]]:
        own = [] if self.per_peer is None else [("per_peer", self.per_peer)]
        return [("epsilon", self.epsilon), *own, *((f"peers.{name}", it) for name, it in self.peers.items())]

    @property
    def ceiling(self) -> PrivacyLoss:
        """The largest sums a document may reach."""
        return self._ceiling(self.epsilon)

    def _ceiling(self, epsilon: float) -> PrivacyLoss:
        whole, gone = ceiling(epsilon, delta=self.delta, rule=self.rule), PrivacyLoss.of(self.forgotten)
        return PrivacyLoss(whole.epsilon - gone.epsilon, whole.square - gone.square, whole.rho - gone.rho)

    def limit(self, peer: str) -> PrivacyLoss:
        """The largest sums a document may reach towards one peer."""
        epsilon = self.peers.get(peer, self.per_peer)
        return self.ceiling if epsilon is None else self._ceiling(epsilon)

    def composed(self, loss: PrivacyLoss) -> float:
        """One ε for a loss and what was forgotten, by this budget's rule."""
        return (loss + PrivacyLoss.of(self.forgotten)).at(delta=self.delta, rule=self.rule)

    def to_json(self) -> str:
        """The form the ledger keeps, ∞ included, which is Python's JSON and nobody else's."""
        fields = asdict(self) | {"peers": dict(self.peers)}
        del fields["forgotten"]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> Budget:
        """The budget that `to_json` wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        text = f"ε = {self.epsilon:g}"
        if self.rule != "basic":
            text += f" at δ = {self.delta:g} ({self.rule})"
        if self.per_peer is not None:
            text += f", {self.per_peer:g} for any one peer"
        text += "".join(f", {limit:g} for {peer}" for peer, limit in sorted(self.peers.items()))
        return text + (f", of which {self.forgotten:g} went with a lost ledger" if self.forgotten else "")
