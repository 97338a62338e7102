"""Isthmus: search and ranking across data silos that may not share their data.

This file is the table of contents. A name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# fmt: off
# isort: off
if TYPE_CHECKING:  # the same contents, for type checkers and editors
    from isthmus.calibration import calibrate as calibrate
    from isthmus.corpora import load as load, load_folds as load_folds, load_letor as load_letor
    from isthmus.errors import ConfigError as ConfigError, DataError as DataError
    from isthmus.errors import IsthmusError as IsthmusError
    from isthmus.evaluation import Measure as Measure, compare as compare, evaluate as evaluate
    from isthmus.fusion import fuse as fuse
    from isthmus.randomness import Streams as Streams
    from isthmus.retrieval import BM25 as BM25
    from isthmus.tables import Corpus as Corpus, Letor as Letor, Qrels as Qrels, Run as Run
    from isthmus.tables import read_letor as read_letor, read_qrels as read_qrels
    from isthmus.tables import read_queries as read_queries, read_run as read_run, write_qrels as write_qrels
    from isthmus.tables import write_run as write_run
# isort: on
# fmt: on

_CONTENTS = {
    "calibration": "calibrate",
    "corpora": "load load_folds load_letor",
    "errors": "ConfigError DataError IsthmusError",
    "evaluation": "Measure compare evaluate",
    "fusion": "fuse",
    "randomness": "Streams",
    "retrieval": "BM25",
    "tables": "Corpus Letor Qrels Run read_letor read_qrels read_queries read_run write_qrels write_run",
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names.split()}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a type checker would take it to know every name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
        return getattr(import_module(f"isthmus.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
