"""One run from many: normalisers, fusers, learned fusion, and what to do with the probabilities."""

from importlib import import_module
from typing import TYPE_CHECKING

from isthmus.fusion.fusers import FUSERS, LEARNED, METHODS, Candidates, choose
from isthmus.fusion.fusing import fuse, fuser
from isthmus.fusion.normalisers import NORMALISERS
from isthmus.fusion.union import Lists, Union

if TYPE_CHECKING:
    from isthmus.fusion.learned import Explanation, Formula, Fuser, LogOdds, Part, Stacked, Weighted
    from isthmus.fusion.saving import load_fuser, save_fuser

_LAZY = {  # what needs scikit-learn is loaded when it is used: plain fusion starts without it
    "learned": ("Explanation", "Formula", "Fuser", "LogOdds", "Part", "Stacked", "Weighted"),
    "saving": ("load_fuser", "save_fuser"),
}
_EAGER = ("Candidates", "Lists", "Union", "choose", "fuse", "fuser")

__all__ = [*_EAGER, *(name for names in _LAZY.values() for name in names)]

if not TYPE_CHECKING:  # a type checker would take it to know every name

    def __getattr__(name: str) -> object:
        for module, names in _LAZY.items():
            if name in names:
                return getattr(import_module(f"isthmus.fusion.{module}"), name)
        raise AttributeError(f"module 'isthmus.fusion' has no attribute {name!r}")
