"""The rows that benchmarks report."""

from __future__ import annotations

from typing import Any


def row(name: str, ours: float, peer: float | None, peer_name: str, *, goal: float) -> dict[str, Any]:
    """Return a row that compares with a peer. Without the peer's figure the ratio is 0."""
    ratio = 0.0 if peer is None else peer / ours
    return {"name": name, "ours": ours, "peer": peer, "peer_name": peer_name, "ratio": ratio, "goal": goal}


def least(name: str, ours: float, wanted: float) -> dict[str, Any]:
    """Return a row without a peer, whose goal is that `ours` is at least `wanted`."""
    return {"name": name, "ours": ours, "peer": None, "peer_name": None, "ratio": ours / wanted, "goal": 1}


def limited(name: str, ours: float, limit: float) -> dict[str, Any]:
    """Return a row without a peer, whose goal is that `ours` is at most `limit`."""
    return {"name": name, "ours": ours, "peer": None, "peer_name": None, "ratio": limit / ours, "goal": 1}
