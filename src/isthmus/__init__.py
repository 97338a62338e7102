"""Isthmus: search and ranking across data silos that may not share their data.

This file is the table of contents. A name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from isthmus.corpora import load as load
    from isthmus.corpora import load_folds as load_folds
    from isthmus.corpora import load_letor as load_letor
    from isthmus.errors import ConfigError as ConfigError
    from isthmus.errors import DataError as DataError
    from isthmus.errors import IsthmusError as IsthmusError
    from isthmus.randomness import Streams as Streams
    from isthmus.retrieval import BM25 as BM25
    from isthmus.tables import Corpus as Corpus
    from isthmus.tables import Letor as Letor
    from isthmus.tables import Qrels as Qrels
    from isthmus.tables import Run as Run
    from isthmus.tables import read_qrels as read_qrels
    from isthmus.tables import read_run as read_run
    from isthmus.tables import write_qrels as write_qrels
    from isthmus.tables import write_run as write_run

_CONTENTS = {
    "corpora": "load load_folds load_letor",
    "errors": "ConfigError DataError IsthmusError",
    "randomness": "Streams",
    "retrieval": "BM25",
    "tables": "Corpus Letor Qrels Run read_qrels read_run write_qrels write_run",
}
_HOME = {name: module for module, names in _CONTENTS.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    return getattr(import_module(f"isthmus.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
