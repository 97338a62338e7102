"""Why a document stands where it does: every retriever's score, probability, weight and contribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """What one retriever had to say about a document; a document it did not return has no score."""

    retriever: str
    score: float | None
    rank: int | None
    probability: float | None
    weight: float | None
    contribution: float


@dataclass(frozen=True)
class Explanation:
    """How a fused score came about: `score` = `start` + the contributions, where the fuser adds."""

    query: str
    document: str
    rank: int
    score: float
    probability: float | None
    start: float
    parts: Sequence[Part]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        chance = "" if self.probability is None else f", probability {self.probability:.3f}"
        lines = [f"{self.query} → {self.document}: rank {self.rank}, score {self.score:.4f}{chance}"]
        for part in self.parts:
            raw = "absent" if part.score is None else f"score {part.score:.4f} at rank {part.rank}"
            told = "" if part.probability is None else f", probability {part.probability:.3f}"
            weight = "" if part.weight is None else f", weight {part.weight:.3f}"
            lines.append(f"  {part.retriever}: {raw}{told}{weight}, contributes {part.contribution:+.4f}")
        return "\n".join([*lines, f"  start {self.start:+.4f}"])
