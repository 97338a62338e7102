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
    saved = Saved.read(path)
    kind = str(saved.header.get("kind"))
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise DataError(f"holds a ranker of kind {kind!r}", file=path, cure=f"this Isthmus knows {known}")
    try:
        return KINDS[kind].from_saved(saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"is not a complete {kind}", file=path, text=str(error), cure="train or copy it again"
        ) from error
