"""One run from many: normalisers, fusers, learned fusion, and what to do with the probabilities."""

from importlib import import_module
from typing import TYPE_CHECKING

from isthmus.fusion.explanations import Explanation, Part
from isthmus.fusion.fusers import FUSERS, Candidates
from isthmus.fusion.fusing import fuse, fuser
from isthmus.fusion.methods import LEARNED, METHODS, choose
from isthmus.fusion.normalisers import NORMALISERS
from isthmus.fusion.union import Lists, Union

if TYPE_CHECKING:
    from isthmus.fusion.learned import Formula, Fuser
    from isthmus.fusion.saving import load_fuser, save_fuser
    from isthmus.fusion.stacking import LogOdds, Stacked, Weighted

__all__ = [
    "FUSERS",
    "LEARNED",
    "METHODS",
    "NORMALISERS",
    "Candidates",
    "Explanation",
    "Formula",
    "Fuser",
    "Lists",
    "LogOdds",
    "Part",
    "Stacked",
    "Union",
    "Weighted",
    "choose",
    "fuse",
    "fuser",
    "load_fuser",
    "save_fuser",
]

_LAZY = {  # what needs scikit-learn is loaded when it is used: plain fusion starts without it
    "Formula": "learned",
    "Fuser": "learned",
    "LogOdds": "stacking",
    "Stacked": "stacking",
    "Weighted": "stacking",
    "load_fuser": "saving",
    "save_fuser": "saving",
}


if not TYPE_CHECKING:  # a type checker would take it to know every name

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            return getattr(import_module(f"isthmus.fusion.{_LAZY[name]}"), name)
        raise AttributeError(f"module 'isthmus.fusion' has no attribute {name!r}")
