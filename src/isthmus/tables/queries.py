"""Query texts from a file, to be asked of a collection that somebody else holds.

    .jsonl        {"_id": "q1", "text": "…"}      as in BEIR
    anything else qid <TAB> text                   as TREC's topics are handed out

An id twice, an id with white space, and a line without a tab or without a text are a DataError.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from isthmus.errors import DataError
from isthmus.tables.beir import records
from isthmus.tables.corpus import Queries
from isthmus.tables.files import read_blocks
from isthmus.tables.ids import frozen

_EXAMPLE = "q1<TAB>what is asked"


def read_queries(path: str | os.PathLike[str]) -> Queries:
    """The queries of a file, in one silo and all of the test split."""
    file = Path(path)
    packed = file.suffix == ".gz"
    kind = file.with_suffix("").suffix if packed else file.suffix
    if kind == ".jsonl":
        pairs = [(record.id, record.text) for record in records(file)]
    else:
        pairs = _tab_separated(file)
    ids, texts = zip(*pairs, strict=True)
    return Queries(ids, texts, frozen(np.zeros(len(ids), dtype=np.int64)), ("test",) * len(ids))


def _tab_separated(file: Path) -> list[tuple[str, str]]:
    line_of: dict[str, int] = {}
    pairs = []
    for block in read_blocks(file):
        for number, line in block.lines():
            query, tab, text = line.decode().partition("\t")
            query, text = query.strip(), text.strip()
            if not (tab and query and text) or len(query.split()) > 1:
                raise block.error("not a query", number, line, f"a line is: {_EXAMPLE}")
            if query in line_of:
                problem = f"query {query!r} appears twice, first in line {line_of[query]}"
                raise block.error(problem, number, line, "every id stands once")
            line_of[query] = number
            pairs.append((query, text))
    if not pairs:
        raise DataError("no rows", file=file, cure=f"a line is: {_EXAMPLE}")
    return pairs
