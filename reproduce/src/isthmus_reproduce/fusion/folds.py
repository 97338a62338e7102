"""Folds of the label sets for text classification by retrieval.

In the sound form no test text occurs in training or validation, no validation text occurs in training, and a
text has all of its labels. In the paper's form a text with several labels is copied once per label, copies
may fall into different parts, and all of them have the label of the last: the authors map a text to one
label.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.arrays import IntArray
from isthmus.classification import Labels, normal_text, same_text
from isthmus.corpora import fold_count, load
from isthmus.errors import DataError
from isthmus.partition import folds
from isthmus.randomness import Streams
from isthmus.tables import Corpus, Documents, Qrels
from isthmus_reproduce.fusion.labels import labels_of

FOLDS = 10


def head_labels(counts: ArrayLike, share: float = 0.2) -> NDArray[np.bool_]:
    """Return a mask of the head labels: the ⌊share·L⌋ + 1 most frequent of L, ties to the earlier label."""
    frequency = np.asarray(counts)
    head = np.zeros(len(frequency), dtype=bool)
    head[np.argsort(-frequency, kind="stable")[: int(share * len(frequency) + 1e-9) + 1]] = True
    return head


@dataclass(frozen=True, eq=False)
class Part:
    """Texts and their labels."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    labels: Labels

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: NDArray[np.bool_] | IntArray) -> Part:
        """Return the texts at these positions."""
        chosen = np.arange(len(self))[rows]
        return Part(
            tuple(self.ids[row] for row in chosen),
            tuple(self.texts[row] for row in chosen),
            self.labels[chosen],
        )

    def __add__(self, other: Part) -> Part:
        return Part(
            self.ids + other.ids, self.texts + other.texts, np.concatenate((self.labels, other.labels))
        )

    def qrels(self, documents: Documents, among: NDArray[np.bool_] | None = None) -> Qrels:
        """Return the right labels as judgements; with a mask `among`, only those in it."""
        right = self.labels if among is None else self.labels & among
        return Qrels.from_dict(
            {
                name: {documents.ids[at]: 1 for at in np.flatnonzero(row)}
                for name, row in zip(self.ids, right, strict=True)
                if row.any()
            }
        )


@dataclass(frozen=True, eq=False)
class LabelFold:
    """One fold: labels, three parts, and the frequent labels of the training part."""

    data: str
    documents: Documents
    train: Part
    validation: Part
    test: Part

    @property
    def single(self) -> bool:
        """Whether every text has exactly one label."""
        parts = (self.train, self.validation, self.test)
        return all(bool((part.labels.sum(axis=1) == 1).all()) for part in parts)

    @property
    def head(self) -> NDArray[np.bool_]:
        """Mask of the frequent labels: ⌊0.2·L⌋ + 1 of them, by number of training texts."""
        return head_labels(self.train.labels.sum(axis=0))

    @property
    def texts(self) -> frozenset[str]:
        """All texts of the fold: the same set in every fold."""
        parts = (self.train, self.validation, self.test)
        return frozenset(text for part in parts for text in part.texts)

    def partition(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the labels of "all", "head" or "tail"."""
        everything = np.ones(len(self.documents), dtype=bool)
        return {"all": everything, "head": self.head, "tail": ~self.head}[name]


def label_fold(
    data: str, fold: int, *, copies: bool = False, seed: int = 0, most: int | None = None
) -> LabelFold:
    """Return one of the ten folds of a label set, by name or path; `copies` gives the paper's form.

    `most` keeps about as many texts of the set, the same ones in every fold, for a quick run.
    """
    if fold_files(data):
        corpus = load(data, fold=fold)
        parts = [_part(corpus, split) for split in ("train", "validation", "test")]
        thinned = _thinned(LabelFold(corpus.name, corpus.documents, *parts), most)
        return thinned if copies else _apart(thinned)
    return _thinned(_dealt_fold(load(data), fold, copies=copies, seed=seed), most)


def _dealt_fold(corpus: Corpus, fold: int, *, copies: bool, seed: int) -> LabelFold:
    """Deal one of ten folds of a set that comes without folds."""
    whole = _whole(corpus)
    whole = _one_label_each(whole) if copies else _merged(whole)
    groups = None if copies else same_text(whole.texts)
    dealt = folds(len(whole), FOLDS, Streams(seed)("label folds", corpus.name), groups=groups)
    others = np.flatnonzero(dealt != fold)
    inner = None if groups is None else groups[others]
    validation = (
        folds(len(others), FOLDS, Streams(seed)("label validation", corpus.name, fold), groups=inner) == 0
    )
    return LabelFold(
        corpus.name,
        corpus.documents,
        whole.take(others[~validation]),
        whole.take(others[validation]),
        whole.take(dealt == fold),
    )


def _thinned(fold: LabelFold, most: int | None) -> LabelFold:
    """Return the texts whose hash is low enough, so that copies of a text stay together."""
    parts = (fold.train, fold.validation, fold.test)
    total = sum(map(len, parts))
    if most is None or total <= most:
        return fold
    limit = most / total * 2**32
    masks = [np.array([_hashed(text) < limit for text in part.texts], dtype=bool) for part in parts]
    return LabelFold(
        fold.data, fold.documents, *(part.take(rows) for part, rows in zip(parts, masks, strict=True))
    )


def _hashed(text: str) -> int:
    digest = blake2b(normal_text(text).encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "big")


def fold_files(data: str) -> bool:
    """Whether a label set has folds of its own."""
    folder = Path(data)
    if folder.is_dir():
        return fold_count(folder) > 0
    return data in ("twitter", "trec")


def _part(corpus: Corpus, split: str) -> Part:
    queries = corpus.split(split).queries
    return Part(queries.ids, queries.texts, labels_of(corpus, queries))


def _whole(corpus: Corpus) -> Part:
    if not len(corpus.queries):
        raise DataError(f"{corpus.name} has no texts to label")
    return Part(corpus.queries.ids, corpus.queries.texts, labels_of(corpus, corpus.queries))


def _merged(part: Part) -> Part:
    """Merge equal texts into one with the labels of all."""
    groups = same_text(part.texts)
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    labels = np.zeros((len(first), part.labels.shape[1]), dtype=bool)
    np.logical_or.at(labels, inverse, part.labels)
    return replace(part.take(first), labels=labels)


def _one_label_each(part: Part) -> Part:
    """Return a copy of a text for each of its labels, all with the label of the last copy of that text."""
    rows, columns = np.nonzero(part.labels)
    copied = part.take(rows)
    ids = tuple(f"{name}+{label}" for name, label in zip(copied.ids, columns.tolist(), strict=True))
    groups = same_text(copied.texts)
    last = np.zeros(int(groups.max(initial=-1)) + 1, dtype=np.int64)
    last[groups] = columns  # for repeated groups NumPy keeps the last value
    return Part(ids, copied.texts, np.eye(part.labels.shape[1], dtype=bool)[last[groups]])


def _apart(fold: LabelFold) -> LabelFold:
    """Remove training texts that occur in validation or test, and validation texts that occur in test."""
    parts = (fold.train, fold.validation, fold.test)
    spelt = [[normal_text(text) for text in part.texts] for part in parts]
    later, last = set(spelt[1]) | set(spelt[2]), set(spelt[2])
    train = fold.train.take(np.array([text not in later for text in spelt[0]], dtype=bool))
    validation = fold.validation.take(np.array([text not in last for text in spelt[1]], dtype=bool))
    return replace(fold, train=train, validation=validation)
