"""Saved rankers of every kind, read back."""

from __future__ import annotations

from os import PathLike

from isthmus.errors import DataError
from isthmus.rankers.files import Saved
from isthmus.rankers.networks import MLP
from isthmus.rankers.ranker import Ranker
from isthmus.rankers.trees import LambdaMART


def load_ranker(path: str | PathLike[str]) -> Ranker:
    """The ranker in a file that `save` wrote, of whatever kind."""
    saved = Saved.read(path)
    kinds: dict[str, type[Ranker]] = {kind.kind: kind for kind in (MLP, LambdaMART)}
    named = saved.header.get("kind")
    if named not in kinds:
        raise DataError(
            f"holds a ranker of kind {named!r}", file=path, cure=f"this Isthmus knows {', '.join(kinds)}"
        )
    try:
        return kinds[named].from_saved(saved)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"is not a complete {named}", file=path, text=str(error), cure="train or copy it again"
        ) from error
