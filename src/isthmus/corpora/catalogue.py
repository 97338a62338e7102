"""Data sets that can be loaded by name, where they are stored, and the folder layouts that can be read.

Real collections are looked up only under the folder that the environment variable ISTHMUS_DATA names; a path
works for any folder with the layout of one of them.

`load` returns a `Corpus`. `load_letor` returns all feature rows of a set, `load_folds` its training,
validation and test parts. A folder of feature rows has one of

- `Fold1`, `Fold2`, … with `train.txt`, `vali.txt` and `test.txt` (MSLR), or one such fold by itself;
- `S1.txt` to `S5.txt` (LETOR 4.0): fold i trains on three parts from the i-th on, cyclically, validates on
  the next and tests on the last, which are the official folds;
- `NAME.train` and `NAME.test` (LightGBM's example): one fold with an empty validation part;
- `train.txt` alone, which is read like a single file.

Each `.txt` may be compressed, as `.txt.gz`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from isthmus.corpora import irds, labels, pydocs, smart
from isthmus.errors import DataError, nearest
from isthmus.partition import folds as fold_of_items
from isthmus.randomness import Streams
from isthmus.tables import (
    SPLITS,
    Corpus,
    Fold,
    Letor,
    read_corpus_beir,
    read_letor,
    read_letor_fold,
    read_letor_folds,
    rotated_folds,
)

Split = Literal["train", "validation", "test"]

CORPORA = {
    "twitter": "labels/twitter",
    "trec": "labels/trec",
    "reuters": "labels/reuters21578",
    **{name: f"collections/{name}" for name in smart.LAYOUTS},
}
"""The folders of the named collections under ISTHMUS_DATA."""

FEATURES = {
    "mq2008": "letor/mq2008",
    "mslr-sample": "letor/mslr-fold1-sample",
    "lightgbm-example": "letor/lightgbm-example",
}
"""The folders of the named feature sets under ISTHMUS_DATA."""

SYNTHETIC = ("synthetic", "synthetic-mslr")
COLLECTED: dict[str, Callable[[], Corpus]] = {
    "pydocs": pydocs.load,
    "pydocs-labels": labels.pydocs_labels,
    "pydocs-modules": labels.pydocs_modules,
    "pydocs-see-also": labels.pydocs_see_also,
}
"""Collections made from packages that every installation has."""
LABEL_SETS = ("twitter", "trec", "reuters", "pydocs-labels", "pydocs-modules", "pydocs-see-also")
"""The collections whose documents are labels and whose queries are labelled texts."""
BUILT_IN = (*COLLECTED, *SYNTHETIC)
ALL_SPLITS: tuple[Split, ...] = ("train", "validation", "test")
DEALT_FOLDS = 5


def load(name_or_path: str | os.PathLike[str], *, fold: int = 0) -> Corpus:
    """Load a collection by name (`pydocs`, `cran`, `reuters` …) or from a folder.

    `irds:NAME` is a data set of ir_datasets, if that is installed. A folder may have a BEIR data set, a
    SMART collection, Reuters-21578 or a label set; only label sets have folds.
    """
    named = os.fspath(name_or_path)
    if named in COLLECTED:
        _check_no_fold(named, fold)
        return COLLECTED[named]()
    if named.startswith(irds.PREFIX):
        _check_no_fold(named, fold)
        return irds.read(named)
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


def _is_beir(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("corpus.jsonl", "corpus.jsonl.gz"))


_READERS: tuple[tuple[Callable[[Path], object], Callable[[Path], Corpus]], ...] = (
    (_is_beir, read_corpus_beir),
    (smart.layout_of, smart.read),
    (labels.is_reuters_folder, labels.read_reuters),
)


def load_letor(name_or_path: str | os.PathLike[str], *, split: Split | None = None) -> Letor:
    """Load feature rows by name (`synthetic`, `mq2008` …), from a file or from a folder.

    All rows by default, or one split of the first fold. If two parts use the same query numbers, queries of
    the whole are named `train/1` and `test/1`.
    """
    if split is not None and split not in SPLITS:
        raise DataError(f"no split {split!r}", cure=f"splits: {', '.join(SPLITS)}")
    named = os.fspath(name_or_path)
    if named in SYNTHETIC:
        wanted = ALL_SPLITS if split is None else (split,)
        parts: dict[str, Letor] = {part: _synthetic(named, part) for part in wanted}
    else:
        parts = _parts(locate(named, FEATURES))
    if split is None:
        return _together(parts, name=Path(named).name)
    if split not in parts:
        raise DataError(f"{named} has no {split} part", cure=f"it has: {', '.join(parts)}")
    return replace(parts[split], name=f"{Path(named).name} {split}")


def load_folds(name_or_path: str | os.PathLike[str], *, seed: int = 0) -> tuple[Fold, ...]:
    """Return the folds of a feature set; if it has none, five by query, at random under the seed."""
    named = os.fspath(name_or_path)
    if named in SYNTHETIC:
        return (Fold(named, *(_synthetic(named, split) for split in ALL_SPLITS)),)
    path = locate(named, FEATURES)
    if path.is_dir() and any(path.glob("Fold*/")):
        return read_letor_folds(path)
    if path.is_dir() and _file(path, "S1.txt").is_file():
        return rotated_folds(_rotating(path))
    parts = _parts(path)
    if "test" in parts:
        empty = parts["train"][:0]
        return (Fold(path.name, parts["train"], parts.get("validation", empty), parts["test"]),)
    return _dealt_folds(parts["train"], seed)


def _synthetic(name: str, split: Split) -> Letor:
    from isthmus.corpora import synthetic

    return synthetic.load_synthetic(name, split)


def _parts(path: Path) -> dict[str, Letor]:
    """Return the parts of a file or folder by split, of its first fold if it has several; always with
    `train`."""
    if path.is_file():
        return {"train": read_letor(path)}
    if (path / "Fold1").is_dir():
        return _split_parts(read_letor_fold(path / "Fold1"))
    if _file(path, "S1.txt").is_file():
        return _split_parts(rotated_folds(_rotating(path))[0])
    train, test = (sorted(path.glob(f"*.{part}")) for part in ("train", "test"))
    if len(train) == len(test) == 1:
        tables = [read_letor(file[0]) for file in (train, test)]
        width = max(table.width for table in tables)
        return dict(zip(("train", "test"), (table.widened(width) for table in tables), strict=True))
    if _file(path, "test.txt").is_file():
        return _split_parts(read_letor_fold(path))
    if _file(path, "train.txt").is_file():
        return {"train": read_letor(_file(path, "train.txt"))}
    raise DataError(
        "no feature rows that Isthmus knows",
        file=path,
        cure="a LETOR file, or a folder with Fold1, S1.txt, train.txt or NAME.train in it",
    )


def _split_parts(fold: Fold) -> dict[str, Letor]:
    return dict(zip(SPLITS, (fold.train, fold.validation, fold.test), strict=True))


def _rotating(folder: Path) -> list[Letor]:
    return [read_letor(_file(folder, f"S{number}.txt")) for number in range(1, 6)]


def _file(folder: Path, name: str) -> Path:
    """Return the path of a file, or of the compressed one if only that is there."""
    plain, packed = folder / name, folder / f"{name}.gz"
    return packed if packed.is_file() and not plain.is_file() else plain


def _together(parts: dict[str, Letor], *, name: str) -> Letor:
    if len(parts) == 1:
        return replace(next(iter(parts.values())), name=name)
    queries = [query for part in parts.values() for query in part.queries]
    if len(set(queries)) < len(queries):
        parts = {
            split: replace(part, queries=tuple(f"{split}/{query}" for query in part.queries))
            for split, part in parts.items()
        }
    return Letor.concat(list(parts.values()), name=name)


def _dealt_folds(letor: Letor, seed: int) -> tuple[Fold, ...]:
    if len(letor) < DEALT_FOLDS:
        raise DataError(
            f"{len(letor)} queries do not make {DEALT_FOLDS} folds",
            cure="bring more queries, or folds of your own",
        )
    part_of = fold_of_items(len(letor), DEALT_FOLDS, Streams(seed)("folds"))
    parts = [replace(letor[part_of == part], name=f"part {part + 1}") for part in range(DEALT_FOLDS)]
    return rotated_folds(parts)


def available() -> dict[str, bool]:
    """Return, for every name that `load` or `load_letor` accepts, whether its data are present."""
    root = os.environ.get("ISTHMUS_DATA")
    present = {name: bool(root) and Path(str(root), where).is_dir() for name, where in _named().items()}
    return dict.fromkeys(BUILT_IN, True) | present


def locate(name_or_path: str, known: dict[str, str]) -> Path:
    """Return the path of a named data set, or an existing path itself. Raises DataError for anything else."""
    if name_or_path in known:
        return _under_data(name_or_path, known[name_or_path])
    path = Path(name_or_path)
    if path.exists():
        return path
    if name_or_path in (*_named(), *BUILT_IN):
        kinds = [
            "a collection of texts (for retrieve, load)",
            "a set of feature rows (for train, rank, load_letor)",
        ]
        wanted, actual = kinds if known is CORPORA else kinds[::-1]
        raise DataError(f"{name_or_path!r} is {actual}", cure=f"name {wanted}")
    names = [*known, *(COLLECTED if known is CORPORA else SYNTHETIC)]
    close = nearest(name_or_path, names)
    meant = f"did you mean {close!r}?" if close else f"give a path, or one of {', '.join(names)}"
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
