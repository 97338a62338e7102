"""Label sets: the labels are the documents, the texts to be labelled are the queries.

Two layouts are read:

- a folder with `texts.txt` and `labels.txt` (line by line; a label is a whole number; a text may be empty
  and is kept, with its label, since folds count lines) and `folds/K.json` (line numbers, from 0, under
  `train`, `val` and `test`, and a description of every label, made from that fold's training texts, which
  becomes the body of the label's document); without that folder the lines are dealt into ten folds, equal
  texts together: a fold's own part is its test, the next its validation, the rest its training;
- Reuters-21578 as its SGML files, in the ModApte split (articles marked TOPICS="YES", LEWISSPLIT says train
  or test) with the topics that have an article in both: 90 topics, 10,789 articles. A topic named twice for
  an article counts once, 13,329 pairs in all. There is no validation part; a topic has a name but no body.

Three label sets are made from the built-in `pydocs`, so that some are always available: `pydocs_labels` (one
label a text), `pydocs_modules` and `pydocs_see_also` (several, with a long tail).
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isthmus.arrays import frozen
from isthmus.corpora import pydocs
from isthmus.errors import DataError
from isthmus.partition import folds
from isthmus.randomness import Streams
from isthmus.tables import Corpus, Documents, Qrels, Queries, read_all

LABEL_NAMES = {
    "twitter": (
        "arts & culture",
        "business & entrepreneurs",
        "pop culture",
        "daily life",
        "sports & gaming",
        "science & technology",
    ),
    "trec": ("description", "entity", "abbreviation", "human", "location", "numeric"),
}
"""Names of the labels by number in the two public sets; in any other folder a label is named by its
number."""

FOLDS = 10
"""The number of folds of a folder that has none of its own."""

TEXTS_A_LABEL = 200
"""The number of texts of each label in the built-in label set."""

TEXTS_OF_RARE = 2
"""The least number of texts of a label in the built-in sets with a long tail: one to learn from and one to
test."""

_WHOLE = re.compile(r"-?[0-9]+")
_SPLIT_OF_PART = {"train": "train", "val": "validation", "test": "test"}


def is_label_folder(folder: Path) -> bool:
    """Whether a folder has the layout of `read_labels`."""
    return (folder / "texts.txt").is_file() and (folder / "labels.txt").is_file()


def read_labels(folder: Path, *, fold: int = 0) -> Corpus:
    """Read one fold of a label set; a text that is in no part of the fold is left out."""
    texts, labels = _lines(folder / "texts.txt"), _lines(folder / "labels.txt")
    if len(texts) != len(labels):
        raise DataError(
            f"{len(texts):,} texts but {len(labels):,} labels", file=folder, cure="pair line by line"
        )
    _check_labels(labels, folder / "labels.txt")
    ids = sorted(set(labels), key=lambda label: (len(label), label))
    if (folder / "folds").is_dir():
        splits, descriptions = _read_fold(folder / "folds" / f"{fold}.json", len(texts))
    else:
        splits, descriptions = _dealt_fold(texts, fold, folder), {}
    names = _label_names(folder.name, ids)
    bodies = [str(descriptions.get(label, "")).strip() for label in ids]
    selected = [line for line, split in enumerate(splits) if split]
    return _corpus(
        folder.name,
        documents=_documents(ids, names, bodies),
        articles={str(line): texts[line] for line in selected},
        splits=[splits[line] for line in selected],
        relevant={str(line): {labels[line]: 1} for line in selected},
    )


def fold_count(folder: Path) -> int:
    """Return the number of fold files of a label set."""
    count = 0
    while (folder / "folds" / f"{count}.json").is_file():
        count += 1
    return count


def _lines(path: Path) -> list[str]:
    lines = read_all(path).data.decode().split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line.rstrip("\r") for line in lines]


def _check_labels(labels: Sequence[str], file: Path) -> None:
    for line, label in enumerate(labels, 1):
        if not _WHOLE.fullmatch(label):
            raise DataError("not a whole number", file=file, line=line, text=label, cure="one label a line")


def _label_names(name: str, labels: Sequence[str]) -> list[str]:
    known = {str(number): title for number, title in enumerate(LABEL_NAMES.get(name, ()))}
    return [known.get(label, f"label {label}") for label in labels]


def _read_fold(path: Path, texts: int) -> tuple[list[str], dict[str, Any]]:
    """The split of every line ("" for none), and the label descriptions."""
    if not path.is_file():
        count = fold_count(path.parents[1])
        raise DataError(f"no fold {path.stem}", file=path, cure=f"folds go from 0 to {count - 1}")
    try:
        fold = json.loads(read_all(path).data)
        splits = [""] * texts
        for part, split in _SPLIT_OF_PART.items():
            for line in fold[part]:
                if line < 0:
                    raise IndexError(f"line {line}")
                if splits[line]:
                    raise DataError(
                        f"line {line} stands twice in the fold", file=path, cure="one part a line"
                    )
                splits[line] = split
        return splits, dict(fold.get("label_descriptions", {}))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        cure = f"train, val and test list lines from 0 to {texts - 1}"
        raise DataError(f"not a fold: {error!r}", file=path, cure=cure) from error


def _dealt_fold(texts: Sequence[str], fold: int, folder: Path) -> list[str]:
    """Return the split of every line in a fold dealt here; it is the same in every process."""
    groups = np.unique(np.array([text.strip() for text in texts], dtype=np.str_), return_inverse=True)[1]
    count = min(FOLDS, int(groups.max(initial=-1)) + 1)
    if count < 3:
        raise DataError(
            f"{count} different texts cannot make train, validation and test", file=folder, cure="add texts"
        )
    if not 0 <= fold < count:
        raise DataError(f"no fold {fold}", file=folder, cure=f"folds go from 0 to {count - 1}")
    dealt = folds(len(texts), count, Streams(0)("label folds"), groups=groups)
    names = {fold: "test", (fold + 1) % count: "validation"}
    return [names.get(part, "train") for part in dealt.tolist()]


def pydocs_labels(*, seed: int = 0, texts: int = TEXTS_A_LABEL) -> Corpus:
    """Build a label set of docstrings under their sub-packages: `texts` of them are drawn from each with at
    least so many."""
    world = pydocs.load_world()
    rows_of: dict[str, list[int]] = {site: [] for site in sorted(set(world.sites))}
    for row, site in enumerate(world.sites):
        rows_of[site].append(row)
    sites = [site for site, rows in rows_of.items() if len(rows) >= texts]
    if len(sites) < 2:
        raise DataError(f"{len(sites)} sub-packages have {texts:,} docstrings", cure="ask for fewer texts")
    stream = Streams(seed)("pydocs labels")
    drawn = {site: stream.choice(rows_of[site], texts, replace=False).tolist() for site in sites}
    home = {row: site for site, rows in drawn.items() for row in rows}
    return _corpus(
        "pydocs-labels",
        documents=_documents(sites, sites, [""] * len(sites)),
        articles={world.names[row]: world.bodies[row] for row in sorted(home)},
        splits=["train"] * len(home),
        relevant={world.names[row]: {home[row]: 1} for row in sorted(home)},
    )


def pydocs_modules() -> Corpus:
    """Build a label set of docstrings, the standard library's too, under every module, package and class in
    their name.

    `scipy.stats.qmc.Sobol.random` has the labels `scipy`, `scipy.stats`, `scipy.stats.qmc` and
    `scipy.stats.qmc.Sobol`. All words of labels' names are removed from the texts.
    """
    world = pydocs.load_world().with_distractors()
    right = {name: _prefixes(name) for name in world.names}
    words = {"np", *(word for labels in right.values() for label in labels for word in label.split("."))}
    texts = dict(zip(world.names, world.bodies, strict=True))
    return _long_tail("pydocs-modules", texts, right, words, {})


def pydocs_see_also() -> Corpus:
    """Build a label set of docstrings under the objects that their *See Also* names, with these objects'
    docstrings as bodies.

    The texts have no *See Also* sections, and the last word of every label's name is removed from them.
    """
    world = pydocs.load_world()
    right: dict[str, list[str]] = {}
    for name, target in world.links:
        right.setdefault(name, []).append(target)
    words = {label.rpartition(".")[2] for labels in right.values() for label in labels}
    texts = dict(zip(world.names, world.bodies, strict=True))
    return _long_tail("pydocs-see-also", {name: texts[name] for name in sorted(right)}, right, words, texts)


def _prefixes(name: str) -> list[str]:
    """Return the labels of a name: `a.b.c` is under `a` and `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _long_tail(
    name: str,
    texts: Mapping[str, str],
    right: Mapping[str, Sequence[str]],
    words: Iterable[str],
    bodies: Mapping[str, str],
) -> Corpus:
    """Build a label set from the texts without these words, with the labels that have enough texts."""
    hidden = {word.casefold() for word in words}
    counts = Counter(label for labels in right.values() for label in set(labels))
    labels = sorted(label for label, count in counts.items() if count >= TEXTS_OF_RARE)
    known = set(labels)
    relevant = {text: dict.fromkeys(sorted(set(right[text]) & known), 1) for text in texts}
    blanked = {
        text: _WORD.sub(lambda word: "" if word[0].casefold() in hidden else word[0], texts[text])
        for text, own in relevant.items()
        if own
    }
    return _corpus(
        name,
        documents=_documents(labels, labels, [bodies.get(label, "") for label in labels]),
        articles=blanked,
        splits=["train"] * len(blanked),
        relevant={text: relevant[text] for text in blanked},
    )


_WORD = re.compile(r"\w+")
_ARTICLE = re.compile(r"<REUTERS([^>]*)>(.*?)</REUTERS>", re.DOTALL)
_BOUND = re.compile(r"<REUTERS |</REUTERS>")
_ENDLESS = "an article that does not end"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TOPICS = re.compile(r"<TOPICS>(.*?)</TOPICS>", re.DOTALL)
_TOPIC = re.compile(r"<D>(.*?)</D>")
_TEXT = re.compile(r"<TEXT[^>]*>(.*?)</TEXT>", re.DOTALL)
_DATELINE = re.compile(r"<(AUTHOR|DATELINE)>.*?</\1>", re.DOTALL)
_TAG = re.compile(r"</?[A-Z]+>")
_CONTROL = re.compile(r"&#\d+;|[\x00-\x08\x0b-\x1f]")


class _Article(NamedTuple):
    id: str
    split: str
    topics: tuple[str, ...]
    text: str


def is_reuters_folder(folder: Path) -> bool:
    """Whether a folder holds the SGML files of Reuters-21578."""
    return any(folder.glob("reut2-*.sgm"))


def read_reuters(folder: Path) -> Corpus:
    """Read Reuters-21578 in the ModApte split: topics as documents, articles as queries."""
    articles = [article for path in sorted(folder.glob("reut2-*.sgm")) for article in _articles(path)]
    (number, times) = next(iter(Counter(article.id for article in articles).most_common(1)), ("", 0))
    if times > 1:
        raise DataError(f"article {number} is there {times} times", file=folder, cure="keep each file once")
    seen: dict[str, set[str]] = {
        split: {topic for article in articles if article.split == split for topic in article.topics}
        for split in ("train", "test")
    }
    topics = sorted(seen["train"] & seen["test"])
    if not topics:
        raise DataError("no topic with a training and a test article", file=folder, cure="get all 22 files")
    known = set(topics)
    selected = [article for article in articles if known & set(article.topics)]
    return _corpus(
        "reuters",
        documents=_documents(topics, topics, [""] * len(topics)),
        articles={article.id: article.text for article in selected},
        splits=[article.split for article in selected],
        relevant={
            article.id: {topic: 1 for topic in article.topics if topic in known} for article in selected
        },
    )


def _articles(path: Path) -> list[_Article]:
    """Read the articles of one file that ModApte uses."""
    text = path.read_bytes().decode("latin-1")  # the files are ASCII except for one stray byte
    _check_whole(text, path)
    articles = []
    for match in _ARTICLE.finditer(text):
        marks = dict(_ATTRIBUTE.findall(match[1]))
        split = {"TRAIN": "train", "TEST": "test"}.get(marks.get("LEWISSPLIT", ""))
        topics, body = _TOPICS.search(match[2]), _TEXT.search(match[2])
        if not marks.get("NEWID") or topics is None or body is None:
            line = text.count("\n", 0, match.start()) + 1
            raise DataError("not an article", file=path, line=line, text=match[1], cure="get the file again")
        if split and marks.get("TOPICS") == "YES":
            named = tuple(dict.fromkeys(_TOPIC.findall(topics[1])))
            articles.append(_Article(marks["NEWID"], split, named, _clean(body[1])))
    return articles


def _check_whole(text: str, path: Path) -> None:
    """Raise DataError unless every article ends before the next begins."""
    begun: int | None = None
    for mark in _BOUND.finditer(text):
        begins = mark[0] != "</REUTERS>"
        if begins == (begun is not None):
            break
        begun = mark.start() if begins else None
    else:
        if begun is None:
            return
    at, problem = (mark.start(), "the end of no article") if begun is None else (begun, _ENDLESS)
    raise DataError(
        problem,
        file=path,
        line=text.count("\n", 0, at) + 1,
        text=text[at:].partition("\n")[0],
        cure="get the file again",
    )


def _clean(markup: str) -> str:
    """Return title and body without date line, tags, control characters and entities."""
    text = _TAG.sub("\n", _DATELINE.sub("\n", markup))
    lines = html.unescape(_CONTROL.sub(" ", text)).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


def _documents(ids: Sequence[str], titles: Sequence[str], bodies: Sequence[str]) -> Documents:
    return Documents(tuple(ids), tuple(titles), tuple(bodies), frozen(np.zeros(len(ids), dtype=np.int64)))


def _corpus(
    name: str,
    *,
    documents: Documents,
    articles: dict[str, str],
    splits: Sequence[str],
    relevant: dict[str, dict[str, int]],
) -> Corpus:
    silos = frozen(np.zeros(len(articles), dtype=np.int64))
    queries = Queries(tuple(articles), tuple(articles.values()), silos, tuple(splits))
    return Corpus(name, documents, queries, Qrels.from_dict(relevant))
