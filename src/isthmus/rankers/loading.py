"""Loading of saved rankers of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from isthmus.errors import DataError
from isthmus.rankers.networks import MLP
from isthmus.rankers.ranker import Ranker, Saved
from isthmus.rankers.trees import LambdaMART

KINDS: Mapping[str, type[Ranker]] = {ranker.kind: ranker for ranker in (MLP, LambdaMART)}
"""Rankers that can be loaded, by kind."""


def load_ranker(path: str | PathLike[str]) -> Ranker:
    """Load the ranker, of whatever kind, from a file that `save` wrote."""
    return Saved.restore(path, _restored)


def _restored(saved: Saved) -> Ranker:
    kind = str(saved.header.get("kind"))
    if kind not in KINDS:
        raise DataError(f"holds a ranker of kind {kind!r}", cure=f"this Isthmus knows {', '.join(KINDS)}")
    return KINDS[kind].from_saved(saved)
