"""Collections in the layout of BEIR.

    corpus.jsonl     {"_id": "d1", "title": "…", "text": "…"}
    queries.jsonl    {"_id": "q1", "text": "…"}
    qrels/train.tsv, qrels/dev.tsv, qrels/test.tsv     query-id  corpus-id  score

A title may be missing or null; ids may be whole numbers and become text. A query belongs to the split whose
file judges it (`dev` is validation); unjudged queries are left out, as BEIR's own loader does. A query
judged in two splits, a judged query without a text, an id twice or with white space, and a line that is not
such an object are a DataError. A judged document need not be in the corpus: trec_eval counts it too. Any
file may be compressed (`corpus.jsonl.gz`). Silos, which BEIR does not have, are in `metadata`.

Query texts alone, for a collection held elsewhere, are such a `.jsonl` file, or lines of `qid <TAB> text`
like TREC's topics. An id twice, an id with white space, and a line without a tab or without a text are a
DataError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.arrays import frozen
from isthmus.errors import DataError
from isthmus.tables.corpus import Corpus, Documents, Queries
from isthmus.tables.files import Block, checked, read_blocks, replacing
from isthmus.tables.rankings import Qrels
from isthmus.tables.trec import read_qrels

_FILE_OF_SPLIT = {"train": "train", "validation": "dev", "test": "test"}
_EXAMPLE = '{"_id": "d1", "title": "…", "text": "…"}'
_TOPIC_EXAMPLE = "q1<TAB>what is asked"
_NO_SILO = "all"


def read_corpus_beir(folder: str | os.PathLike[str], *, name: str | None = None) -> Corpus:
    """Read a BEIR folder; the corpus is named after the folder unless another name is given."""
    root = Path(folder)
    documents = list(records(_file(root, "corpus.jsonl")))
    texts = {record.id: record for record in records(_file(root, "queries.jsonl"))}
    splits, qrels = _judgements(root)
    unknown = next((query for query in splits if query not in texts), None)
    if unknown is not None:
        where = root / "qrels" / f"{_FILE_OF_SPLIT[splits[unknown]]}.tsv"
        raise DataError(f"query {unknown!r} has judgements but no text in queries.jsonl", file=where)
    queries = [record for record in texts.values() if record.id in splits]
    silos = tuple(dict.fromkeys(record.silo for record in (*documents, *queries)))
    at = {silo: position for position, silo in enumerate(silos)}
    return Corpus(
        root.resolve().name if name is None else name,
        Documents(
            tuple(record.id for record in documents),
            tuple(record.title for record in documents),
            tuple(record.text for record in documents),
            frozen(np.array([at[record.silo] for record in documents], dtype=np.int64)),
        ),
        Queries(
            tuple(record.id for record in queries),
            tuple(record.text for record in queries),
            frozen(np.array([at[record.silo] for record in queries], dtype=np.int64)),
            tuple(splits[record.id] for record in queries),
            tuple(record.own for record in queries),
        ),
        qrels,
        silos,
    )


def write_corpus_beir(corpus: Corpus, folder: str | os.PathLike[str]) -> None:
    """Write a collection as a BEIR folder."""
    root = Path(folder)
    (root / "qrels").mkdir(parents=True, exist_ok=True)
    documents, queries = corpus.documents, corpus.queries
    checked((*documents.ids, *queries.ids, *corpus.qrels.documents.words))
    rows = zip(documents.ids, documents.titles, documents.bodies, documents.silos, strict=True)
    _write_records(
        root / "corpus.jsonl",
        (
            {"_id": id, "title": title, "text": body, "metadata": {"silo": corpus.silos[silo]}}
            for id, title, body, silo in rows
        ),
    )
    entries = zip(
        queries.ids, queries.texts, queries.silos, queries.own or (None,) * len(queries), strict=True
    )
    _write_records(
        root / "queries.jsonl",
        (
            {"_id": id, "text": text, "metadata": {"silo": corpus.silos[silo], "own": document}}
            for id, text, silo, document in entries
        ),
    )
    for split, stem in _FILE_OF_SPLIT.items():
        qrels = corpus.split(split).qrels
        if qrels.rows:
            _write_judgements(root / "qrels" / f"{stem}.tsv", qrels)


@dataclass(frozen=True, slots=True)
class _Record:
    id: str
    text: str
    title: str
    silo: str
    own: str | None
    metadata: Mapping[str, Any]
    """All fields of the line and of its metadata."""


def _file(root: Path, name: str) -> Path:
    packed = root / f"{name}.gz"
    return packed if packed.is_file() and not (root / name).is_file() else root / name


def records(file: Path) -> Iterator[_Record]:
    """Yield the records of a `.jsonl` file. Raises DataError for an id that occurs twice, and
    without rows."""
    lines: dict[str, int] = {}
    for block in read_blocks(file):
        for number, line in block.lines():
            record = _record(block, number, line)
            if record.id in lines:
                problem = f"id {record.id!r} appears twice, first in line {lines[record.id]}"
                raise block.error(problem, number, line, "every id stands once")
            lines[record.id] = number
            yield record
    if not lines:
        raise DataError("no rows", file=file, cure=f"a line is: {_EXAMPLE}")


def _record(block: Block, number: int, line: bytes) -> _Record:
    """Parse one line of JSON and check each of its fields."""

    def error(problem: str) -> DataError:
        return block.error(problem, number, line, f"a line is: {_EXAMPLE}")

    def text(fields: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
        value = fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise error(f"{name} is not a text")
        try:
            value.encode()  # raises for a lone surrogate, which JSON can hold
        except UnicodeEncodeError as half:
            raise error(f"{name} holds half a character") from half
        return value

    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as cause:
        cut = block.is_cut and block.data.endswith(line)
        raise error("the file ends in the middle of a line" if cut else "this is not JSON") from cause
    if not isinstance(fields, dict):
        raise error("this is not a JSON object")
    if isinstance(fields.get("_id"), int) and not isinstance(fields["_id"], bool):
        fields["_id"] = str(fields["_id"])
    id = text(fields, "_id")
    if not id or any(symbol.isspace() or symbol == "\0" for symbol in id):
        raise error("the _id is empty or has white space in it")
    metadata = fields["metadata"] if isinstance(fields.get("metadata"), dict) else {}
    silo, own = text(metadata, "silo", default=_NO_SILO), text(metadata, "own", default="") or None
    return _Record(
        id, text(fields, "text"), text(fields, "title", default=""), silo, own, {**metadata, **fields}
    )


def _judgements(root: Path) -> tuple[dict[str, str], Qrels]:
    """Return the split of every judged query, and all judgements together."""
    parts: list[Qrels] = []
    splits: dict[str, str] = {}
    for split, stem in _FILE_OF_SPLIT.items():
        file = _file(root / "qrels", f"{stem}.tsv")
        if not file.is_file():
            continue
        part = read_qrels(file)
        twice = next((query for query in part.queries if query in splits), None)
        if twice is not None:
            other = _FILE_OF_SPLIT[splits[twice]]
            raise DataError(
                f"query {twice!r} is judged here and in {other}.tsv", file=file, cure="a query has one split"
            )
        splits |= dict.fromkeys(part.queries, split)
        parts.append(part)
    if not parts:
        raise DataError("no judgements", file=root / "qrels", cure="train.tsv, dev.tsv or test.tsv")
    return splits, Qrels.concat(parts)


def _write_records(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with replacing(file) as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def _write_judgements(file: Path, qrels: Qrels) -> None:
    with replacing(file) as stream:
        stream.write(b"query-id\tcorpus-id\tscore\n")
        for query, judged in qrels.to_dict().items():
            stream.writelines(
                f"{query}\t{document}\t{grade}\n".encode() for document, grade in judged.items()
            )


def read_queries(path: str | os.PathLike[str]) -> Queries:
    """Read the queries of a file, all in one silo and in the test split."""
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
                raise block.error("not a query", number, line, f"a line is: {_TOPIC_EXAMPLE}")
            if query in line_of:
                problem = f"query {query!r} appears twice, first in line {line_of[query]}"
                raise block.error(problem, number, line, "every id stands once")
            line_of[query] = number
            pairs.append((query, text))
    if not pairs:
        raise DataError("no rows", file=file, cure=f"a line is: {_TOPIC_EXAMPLE}")
    return pairs
