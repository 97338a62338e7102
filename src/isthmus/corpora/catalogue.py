"""What can be loaded by name, where it lies, and what a folder holds.

The real collections are found under the folder that the environment variable ISTHMUS_DATA names, and nowhere
else; a path works for anything that has the layout of one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from isthmus.corpora import labels, pydocs, smart
from isthmus.errors import DataError, nearest
from isthmus.tables import Corpus

CORPORA = {
    "twitter": "labels/twitter",
    "trec": "labels/trec",
    "reuters": "labels/reuters21578",
    **{name: f"collections/{name}" for name in smart.LAYOUTS},
}
"""Where the named collections lie under ISTHMUS_DATA."""

FEATURES = {
    "mq2008": "letor/mq2008",
    "mslr-sample": "letor/mslr-fold1-sample",
    "lightgbm-example": "letor/lightgbm-example",
}
"""Where the named feature sets lie under ISTHMUS_DATA."""

BUILT_IN = ("pydocs", "synthetic", "synthetic-mslr")


def load(name_or_path: str | os.PathLike[str], *, fold: int = 0) -> Corpus:
    """A collection by name (`pydocs`, `cran`, `reuters` …) or from a folder.

    Folders may hold a BEIR data set, a SMART collection, Reuters-21578 or a label set; only label sets have
    folds.
    """
    named = os.fspath(name_or_path)
    if named == "pydocs":
        _check_no_fold(named, fold)
        return pydocs.load()
    folder = locate(named, CORPORA)
    if labels.is_label_folder(folder):
        return labels.read_labels(folder, fold=fold)
    _check_no_fold(named, fold)
    for holds, read in _READERS:
        if holds(folder):
            return read(folder)
    raise DataError(
        "not a collection that Isthmus knows",
        file=folder,
        cure="a folder of BEIR, SMART, Reuters-21578 or label files; feature rows are read by load_letor",
    )


_READERS: tuple[tuple[Callable[[Path], object], Callable[[Path], Corpus]], ...] = (
    (smart.layout_of, smart.read),
    (labels.is_reuters_folder, labels.read_reuters),
)


def available() -> dict[str, bool]:
    """Every name that `load` or `load_letor` knows, and whether its data are there."""
    root = os.environ.get("ISTHMUS_DATA")
    found = {name: bool(root) and Path(str(root), where).is_dir() for name, where in _named().items()}
    return dict.fromkeys(BUILT_IN, True) | found


def locate(name_or_path: str, known: dict[str, str]) -> Path:
    """The path that a name stands for; a path that exists stands for itself."""
    if name_or_path in known:
        return _under_data(name_or_path, known[name_or_path])
    path = Path(name_or_path)
    if path.exists():
        return path
    if name_or_path in (*_named(), *BUILT_IN):
        other = "load_letor" if known is CORPORA else "load"
        raise DataError(f"{name_or_path!r} is not of this kind", cure=f"read it with {other}")
    close = nearest(name_or_path, [*known, *BUILT_IN])
    meant = f"did you mean {close!r}?" if close else f"give a path, or one of {', '.join(known)}"
    raise DataError(f"no data set and no path {name_or_path!r}", cure=meant)


def _under_data(name: str, where: str) -> Path:
    root = os.environ.get("ISTHMUS_DATA")
    if not root:
        raise DataError(
            f"{name!r} is a real data set and ISTHMUS_DATA is not set",
            cure=f"set ISTHMUS_DATA to the folder that has {where}",
        )
    path = Path(root, where)
    if not path.is_dir():
        raise DataError(
            f"{name!r} is not under ISTHMUS_DATA, which is {root}", cure=f"put it there as {where}"
        )
    return path


def _named() -> dict[str, str]:
    return CORPORA | FEATURES


def _check_no_fold(name: str, fold: int) -> None:
    if fold:
        raise DataError(f"{name} has no fold {fold}", cure="only label sets have folds")
