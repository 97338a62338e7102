"""Collections by the names of ir_datasets, if that is installed."""

from __future__ import annotations

from typing import Any

import numpy as np

from isthmus.arrays import frozen
from isthmus.errors import DataError, MissingExtra, nearest
from isthmus.tables import Corpus, Documents, Qrels, Queries

PREFIX = "irds:"
_SPLITS = {"train": "train", "dev": "validation", "val": "validation", "valid": "validation"}


def read(name: str) -> Corpus:
    """Read the data set `irds:NAME`, which ir_datasets downloads if it is not here yet.

    Its queries are in the split that ends the name, else in `test`. Texts are the defaults of ir_datasets:
    of a topic, its title.
    """
    try:
        import ir_datasets
    except ImportError:
        raise MissingExtra("irds", "a collection of ir_datasets") from None
    wanted = name.removeprefix(PREFIX)
    try:
        data = ir_datasets.load(wanted)
    except KeyError:
        close = nearest(wanted, list(ir_datasets.registry))
        meant = f"did you mean {PREFIX}{close}?" if close else "https://ir-datasets.com lists them"
        raise DataError(f"ir_datasets has no data set {wanted!r}", cure=meant) from None
    lacking = [part for part in ("docs", "queries", "qrels") if not getattr(data, f"has_{part}")()]
    if lacking:
        raise DataError(
            f"{name} has no {', '.join(lacking)}",
            cure="name a part that has documents, queries and judgements",
        )
    documents = [(row.doc_id, *_title_and_text(row)) for row in data.docs_iter()]
    queries = [(row.query_id, _text(row)) for row in data.queries_iter()]
    judged: dict[str, dict[str, int]] = {}
    for row in data.qrels_iter():
        judged.setdefault(row.query_id, {})[row.doc_id] = row.relevance
    split = _SPLITS.get(wanted.rpartition("/")[2], "test")
    ids, titles, bodies = (tuple(column) for column in zip(*documents, strict=True))
    numbers, texts = (tuple(column) for column in zip(*queries, strict=True))
    return Corpus(
        name,
        Documents(ids, titles, bodies, frozen(np.zeros(len(ids), dtype=np.int64))),
        Queries(numbers, texts, frozen(np.zeros(len(numbers), dtype=np.int64)), (split,) * len(numbers)),
        Qrels.from_dict(judged),
    )


def _title_and_text(document: Any) -> tuple[str, str]:
    title = getattr(document, "title", None) or ""
    return title, _text(document).removeprefix(title).lstrip()


def _text(row: Any) -> str:
    """Return the row's default text; else its text, or all its text fields but id, title and address."""
    if hasattr(row, "default_text"):
        return str(row.default_text())
    fields = [getattr(row, name) for name in row._fields[1:] if name not in ("title", "url")]
    return getattr(row, "text", "") or "\n".join(value for value in fields if isinstance(value, str))
