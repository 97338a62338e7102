"""Reads labelled texts: CSV, JSON lines, sparse rows, a folder per label, or a data set by name.

    CSV, TSV     a header line; columns are recognised by name (`text`, `label`, …) or named by the caller
    JSON lines   one object per line with the same names; `labels` may be a list
    sparse rows  of the XMC repository: a header "N D L", then `label,label feature:weight …`
    folder       one sub-folder per label with a text file per text; or `texts.txt` and `labels.txt`

Optional columns: `id`; `fold`, a whole number, for folds that the owner defined; `split` (train, validation,
test). Several labels of a text are in `labels`, in CSV separated by semicolons. A text may be without a
label.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.arrays import IntArray
from isthmus.classification.sparse import BATCH, Sparse, from_lists
from isthmus.corpora import LABEL_SETS, available, load, read_header, read_xmc, stream_xmc
from isthmus.errors import DataError, nearest
from isthmus.tables import Corpus, Documents, Qrels, read_all, read_blocks

TEXT = ("text", "texts", "content", "body", "sentence", "document", "message", "question", "review", "title")
LABEL = ("label", "labels", "class", "category", "topic", "target", "tag")
ID = ("id", "_id")
TABLES = (".csv", ".tsv", ".jsonl", ".json", ".ndjson")
_FEATURE = re.compile(rb"^[\d,]* +\d+:", re.MULTILINE)
MOST_SIDE = 4_000_000
"""The largest number of features or labels of sparse rows: 128 directions of so many take 2 GB."""
MOST_DENSE = 10**8
"""The largest product of texts and labels for which a dense array is made."""


@dataclass(frozen=True, eq=False)
class LabelledTexts:
    """Texts and the right labels of each."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    """Empty if there are `features` instead."""
    labels: Sparse
    """Texts × label names: a `csr_array` of bool."""
    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    """The description of each label; empty if there is none."""
    folds: IntArray | None = None
    splits: tuple[str, ...] = ()
    """The owner's split of every text; empty if there is none."""
    features: Sparse | None = None
    """Texts × features: weights, for data without texts."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def single(self) -> bool:
        """Whether every text has exactly one label."""
        return bool((np.diff(self.labels.indptr) == 1).all())

    @cached_property
    def labelled(self) -> NDArray[np.bool_]:
        """Whether each text has a label."""
        return np.asarray(np.diff(self.labels.indptr) > 0)

    @property
    def label_lists(self) -> list[list[int]]:
        """The numbers of every text's labels, ascending."""
        indices, ends = self.labels.indices, self.labels.indptr.tolist()
        return [sorted(indices[start:end].tolist()) for start, end in pairwise(ends)]

    @property
    def dense(self) -> NDArray[np.bool_]:
        """The labels as a dense array, for methods for few labels. Raises DataError if it would be
        too large."""
        if np.prod(self.labels.shape, dtype=np.float64) > MOST_DENSE:
            raise DataError(
                f"{len(self):,} texts × {len(self.names):,} labels are too many for an array",
                cure="learn them with --multi, or fewer of them",
            )
        return np.asarray(self.labels.toarray(), dtype=bool)

    @property
    def documents(self) -> Documents:
        """The labels as documents, which a label ranker ranks."""
        return Documents(self.names, self.names, self.descriptions, np.zeros(len(self.names), dtype=np.int64))

    @property
    def qrels(self) -> Qrels:
        """The right labels as judgements."""
        rows = zip(self.ids, self.label_lists, strict=True)
        right = {name: {self.names[at]: 1 for at in row} for name, row in rows}
        return Qrels.from_dict({name: labels for name, labels in right.items() if labels})

    def take(self, rows: NDArray[np.bool_]) -> LabelledTexts:
        """Some of the texts, under the same labels."""
        chosen = np.flatnonzero(rows)
        return replace(
            self,
            ids=tuple(self.ids[row] for row in chosen),
            texts=tuple(self.texts[row] for row in chosen) if self.texts else (),
            labels=self.labels[chosen],
            folds=None if self.folds is None else self.folds[chosen],
            splits=tuple(self.splits[row] for row in chosen) if self.splits else (),
            features=None if self.features is None else self.features[chosen],
        )

    def of(self, descriptions: Mapping[str, str]) -> LabelledTexts:
        """Return the same texts under the labels of `descriptions`, in that order, and then any others.

        Labels that no text has are included, so that a ranker of label texts ranks them too.
        """
        names = tuple(dict.fromkeys((*descriptions, *self.names)))
        place = {name: at for at, name in enumerate(names)}
        lists = [[place[self.names[at]] for at in row] for row in self.label_lists]
        about = tuple(descriptions.get(name, "") for name in names)
        return replace(self, labels=from_lists(lists, len(names)), names=names, descriptions=about)

    def split(self, name: str) -> LabelledTexts:
        """The texts of one of the owner's splits."""
        return self.take(np.array([split == name for split in self.splits], dtype=bool))


def same_text(texts: Iterable[str]) -> IntArray:
    """Number the groups of texts that are equal up to letter case and white space; duplicates must not be in
    different folds."""
    seen: dict[str, int] = {}
    return np.array([seen.setdefault(normal_text(text), len(seen)) for text in texts], np.int64)


def normal_text(text: str) -> str:
    """Return a spelling that is the same for texts that are equal up to letter case and white space."""
    return " ".join(text.casefold().split())


def read_labelled(
    data: str | PathLike[str],
    *,
    text: str | None = None,
    label: str | None = None,
    descriptions: Mapping[str, str] | None = None,
    label_names: str | PathLike[str] | None = None,
) -> LabelledTexts:
    """Read labelled texts from a file, a folder or a data set by name; `text` and `label` name their
    columns.

    `label_names` is a file with one line per label, for data in the XMC repository's sparse format.
    """
    path = Path(data)
    if is_xmc(path):
        return _of_features(path, label_names)
    if label_names is not None:
        raise DataError(
            "names of labels are for sparse rows", file=path, cure="leave them out: the data name labels"
        )
    if path.is_file():
        return _table(path, list(_records(path)), text, label, descriptions or {})
    folders = sorted(each for each in path.iterdir() if each.is_dir()) if path.is_dir() else []
    if folders and not (path / "labels.txt").exists():
        return _labelled(_folder_rows(folders), descriptions or {}, path)
    name = str(data)
    if not (path.exists() or name in available() or name.startswith("irds:")):
        close = nearest(name, LABEL_SETS)
        cure = f"did you mean {close!r}?" if close else f"give a path, or one of {', '.join(LABEL_SETS)}"
        raise DataError(f"no label set and no path {name!r}", cure=cure)
    return _of_corpus(load(name), descriptions or {})


def read_texts(data: str | PathLike[str], *, text: str | None = None) -> tuple[list[str], list[str]]:
    """Read ids and texts to be labelled: CSV or JSON lines as above, or one text per line. Raises DataError
    for a repeated id."""
    path = Path(data)
    rows = list(_texts(path, text))
    ids = [name for name, _ in rows]
    if twice := next((name for name, count in Counter(ids).items() if count > 1), None):
        raise _twice(twice, path)
    return ids, [line for _, line in rows]


def _twice(name: str, path: Path) -> DataError:
    return DataError(f"the id {name!r} stands twice", file=path, cure="give every text an id of its own")


def stream_texts(
    data: str | PathLike[str], *, text: str | None = None, batch: int = BATCH
) -> Iterator[tuple[list[str], list[str] | Sparse]]:
    """Yield ids and texts to be labelled, `batch` at a time; feature rows for the XMC repository's format.

    Only a hash of each id is stored, to raise DataError for a repeated id.
    """
    path = Path(data)
    if is_xmc(path):
        first = 0
        for part in stream_xmc(path, batch=batch):
            yield [str(first + row) for row in range(len(part))], part.features
            first += len(part)
        return
    rows, seen = _texts(path, text), set[int]()
    while some := list(islice(rows, batch)):
        for name, _ in some:
            if hash(name) in seen:
                raise _twice(name, path)
            seen.add(hash(name))
        yield [name for name, _ in some], [line for _, line in some]


def is_xmc(path: Path) -> bool:
    """Whether a file begins in the XMC repository's format, with three numbers and then rows with a feature;
    never for the suffix of a table."""
    if not path.is_file() or path.suffix.lower() in TABLES:
        return False
    try:
        read_header(path)
        return _FEATURE.search(next(read_blocks(path, size=1 << 16)).data) is not None
    except DataError:
        return False


def _texts(path: Path, text: str | None) -> Iterator[tuple[str, str]]:
    if path.suffix.lower() not in TABLES:
        lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(_lines(path), 1))
        yield from ((str(number), line) for number, line in lines if line.strip())
        return
    column = None
    for number, record in enumerate(_records(path), 1):
        column = column or _column([record], TEXT, text, "text", path)
        yield _id(record, number), _text(record, column, number, path)
    if column is None:
        raise DataError("no rows", file=path)


def _text(record: Mapping[str, Any], column: str, number: int, path: Path) -> str:
    if not isinstance(value := record.get(column), str) or not value.strip():
        raise DataError(f"row {number} has no text", file=path, cure=f"fill its {column}, or take it out")
    return value


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file as dictionaries with keys in lower case."""
    lines = _lines(path)
    if path.suffix.lower() in (".jsonl", ".json", ".ndjson"):
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if "\\ud" in line.lower():
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"half a character, {error.object[error.start]!r}", file=path, line=number
                ) from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"not JSON: {error}", file=path, line=number) from None
            if not isinstance(record, dict):
                raise DataError("not an object", file=path, line=number, cure="one JSON object a line")
            yield {str(key).lower(): value for key, value in record.items()}
        return
    mark = "\t" if path.suffix.lower() == ".tsv" else ","
    header = next(lines, "")
    _check_separator(header, mark, path)
    reader = csv.DictReader(chain((header,), lines), delimiter=mark)
    try:
        for row in reader:
            if None in row or None in row.values():
                cure = "quote a text that holds the separator"
                wrong = f"not {len(reader.fieldnames or ())} columns"
                raise DataError(wrong, file=path, line=reader.line_num, cure=cure)
            yield {str(key).strip().lower(): value for key, value in row.items()}
    except csv.Error as error:
        cure = "write texts that are longer, or hold control characters, as JSON lines"
        raise DataError(str(error), file=path, line=reader.line_num, cure=cure) from None


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends; only a block of them is in memory."""
    for block in read_blocks(path):
        yield from io.StringIO(block.data.decode("utf-8"), newline="\n")


def _check_separator(first: str, mark: str, path: Path) -> None:
    """Raise DataError if the header is one column with this separator but several with another."""
    header = first.strip()
    others = {";": "semicolons", "\t": "tabs", ",": "commas", "|": "bars"}
    mine = others.pop(mark)
    for other, called in others.items():
        if mark not in header and other in header:
            wanted = "tabs, or name the file .csv" if mark == "\t" else "commas, or as .tsv with tabs"
            problem = f"columns are separated by {called} ({header[:60]}), not by {mine}"
            raise DataError(problem, file=path, line=1, cure=f"save it with {wanted}")


def _decoded(path: Path) -> str:
    try:
        return read_all(path).data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: {error}", file=path, cure="save the file as UTF-8") from None


def _column(
    records: Sequence[Mapping[str, Any]], known: Sequence[str], name: str | None, what: str, path: Path
) -> str:
    if not records:
        raise DataError("no rows", file=path)
    columns = list(records[0])
    wanted = (name.lower(),) if name else known
    for column in wanted:
        if column in columns:
            return column
    cure = f"name it with --{what} COLUMN; there are {', '.join(columns)}"
    problem = f"no column {name!r}" if name else f"no column for the {what}"
    raise DataError(problem, file=path, cure=cure)


def _id(record: Mapping[str, Any], number: int) -> str:
    return next((str(record[name]) for name in ID if record.get(name) not in (None, "")), str(number))


Row = tuple[str, str, list[str]]
"""Id, text and labels."""


def _table(
    path: Path,
    records: list[dict[str, Any]],
    text: str | None,
    label: str | None,
    descriptions: Mapping[str, str],
) -> LabelledTexts:
    of_text = _column(records, TEXT, text, "text", path)
    of_label = _column(records, LABEL, label, "label", path)
    rows = []
    for number, record in enumerate(records, 1):
        value = record.get(of_label)
        if isinstance(value, str):
            listed: list[Any] = value.split(";") if of_label == "labels" else [value]
        else:
            listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, (str, int, float)) for each in listed):
            problem = f"row {number} has labels that are neither words nor numbers"
            raise DataError(problem, file=path, cure="a string, or a list of strings")
        labels = [str(each).strip() for each in listed if str(each).strip()]
        rows.append((_id(record, number), _text(record, of_text, number, path), labels))
    folds, splits = ([record.get(name) for record in records] for name in ("fold", "split"))
    return replace(
        _labelled(rows, descriptions, path),
        folds=None if any(each in (None, "") for each in folds) else _fold_numbers(folds, path),
        splits=() if any(each in (None, "") for each in splits) else tuple(map(str, splits)),
    )


def _fold_numbers(folds: Sequence[Any], path: Path) -> IntArray:
    names = {name: at for at, name in enumerate(sorted({str(each) for each in folds}))}
    if len(names) < 2:
        raise DataError("all texts are in one fold", file=path, cure="leave the column out, or name two")
    return np.array([names[str(each)] for each in folds], dtype=np.int64)


def _folder_rows(folders: Iterable[Path]) -> list[Row]:
    files = [(folder, file) for folder in folders for file in sorted(folder.iterdir()) if file.is_file()]
    return [(f"{folder.name}/{file.name}", _decoded(file), [folder.name]) for folder, file in files]


def _labelled(rows: Sequence[Row], descriptions: Mapping[str, str], path: Path) -> LabelledTexts:
    names = tuple(sorted({label for _, _, labels in rows for label in labels}))
    if len(names) < 2:
        raise DataError(f"{len(names)} labels in {len(rows)} texts", file=path, cure="label with two or more")
    ids = tuple(name for name, _, _ in rows)
    if len(set(ids)) < len(ids):
        ids = tuple(str(at) for at in range(1, len(rows) + 1))
    column = {label: at for at, label in enumerate(names)}
    right = from_lists([[column[label] for label in labels] for _, _, labels in rows], len(names))
    about = tuple(descriptions.get(label, "") for label in names)
    return LabelledTexts(ids, tuple(text for _, text, _ in rows), right, names, about)


def _of_features(path: Path, label_names: str | PathLike[str] | None) -> LabelledTexts:
    header = read_header(path)
    if max(header.features, header.labels) > MOST_SIDE:
        problem = f"{header.features:,} features and {header.labels:,} labels; {MOST_SIDE:,} are the most"
        raise DataError(problem, file=path, line=1, cure="number those that occur, from 0")
    rows = read_xmc(path, label_names=label_names)
    count, width = rows.labels.shape
    names = rows.names or tuple(map(str, range(width)))
    if len(set(names)) < width:  # number the names if two labels share one
        names = tuple(f"{name} ({at})" for at, name in enumerate(names))
    ids = tuple(map(str, range(count)))
    return LabelledTexts(ids, (), rows.labels, names, ("",) * width, features=rows.features)


def _of_corpus(corpus: Corpus, descriptions: Mapping[str, str]) -> LabelledTexts:
    """Convert a label set, whose labels are documents and whose texts are queries."""
    titles = dict(zip(corpus.documents.ids, corpus.documents.titles, strict=True))
    relevant = corpus.qrels.to_dict()
    rows = [
        (name, text, [titles[label] or label for label in relevant.get(name, {})])
        for name, text in zip(corpus.queries.ids, corpus.queries.texts, strict=True)
    ]
    if any(len(labels) > 1 for _, _, labels in rows):  # single-label results are without descriptions
        bodies = zip(corpus.documents.ids, corpus.documents.bodies, strict=True)
        descriptions = {titles[name] or name: body for name, body in bodies} | dict(descriptions)
    return _labelled(rows, descriptions, Path(corpus.name))
