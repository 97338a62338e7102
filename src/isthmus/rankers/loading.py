"""Rankers back from their files."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

from isthmus.errors import DataError
from isthmus.rankers.networks import MLP
from isthmus.rankers.ranker import Ranker, Saved
from isthmus.rankers.trees import LambdaMART

KINDS: Mapping[str, type[Ranker]] = {ranker.kind: ranker for ranker in (MLP, LambdaMART)}
"""The rankers that can be read back, by kind."""


def load_ranker(path: str | PathLike[str]) -> Ranker:
    """The ranker in a file that `save` wrote, of whatever kind."""
    return Saved.restore(path, _restored)


def _restored(saved: Saved) -> Ranker:
    kind = str(saved.header.get("kind"))
    if kind not in KINDS:
        raise DataError(f"holds a ranker of kind {kind!r}", cure=f"this Isthmus knows {', '.join(KINDS)}")
    return KINDS[kind].from_saved(saved)
