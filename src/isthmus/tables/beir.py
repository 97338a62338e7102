"""Collections in the layout of BEIR.

    corpus.jsonl     {"_id": "d1", "title": "…", "text": "…"}
    queries.jsonl    {"_id": "q1", "text": "…"}
    qrels/train.tsv, qrels/dev.tsv, qrels/test.tsv     query-id  corpus-id  score

A title may be missing or null; ids may be whole numbers and become text. A query belongs to the split
whose file judges it (`dev` is validation); queries that nobody judged are left out, as BEIR's own loader
does. A query judged in two splits, a judged query without a text, an id twice or with white space, and a
line that is not such an object are a DataError. A judged document need not be in the corpus: trec_eval
counts it too. Any file may be compressed (`corpus.jsonl.gz`). Silos, which BEIR does not know, go into
`metadata`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.errors import DataError
from isthmus.tables.corpus import Corpus, Documents, Queries
from isthmus.tables.files import Block, read_blocks, replacing
from isthmus.tables.ids import frozen
from isthmus.tables.lines import checked
from isthmus.tables.rankings import Qrels
from isthmus.tables.trec import read_qrels

_FILE_OF_SPLIT = {"train": "train", "validation": "dev", "test": "test"}
_EXAMPLE = '{"_id": "d1", "title": "…", "text": "…"}'
_NO_SILO = "all"


def read_corpus_beir(folder: str | os.PathLike[str], *, name: str | None = None) -> Corpus:
    """Read a BEIR folder; the corpus is called like the folder unless another name is given."""
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
            tuple(record.own for record in queries) if any(record.own for record in queries) else (),
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
    _write_records(
        root / "corpus.jsonl",
        (
            {"_id": id, "title": title, "text": body, "metadata": {"silo": corpus.silos[silo]}}
            for id, title, body, silo in zip(
                documents.ids, documents.titles, documents.bodies, documents.silos, strict=True
            )
        ),
    )
    own = queries.own or (None,) * len(queries)
    _write_records(
        root / "queries.jsonl",
        (
            {"_id": id, "text": text, "metadata": {"silo": corpus.silos[silo], "own": document}}
            for id, text, silo, document in zip(queries.ids, queries.texts, queries.silos, own, strict=True)
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


def _file(root: Path, name: str) -> Path:
    packed = root / f"{name}.gz"
    return packed if packed.is_file() and not (root / name).is_file() else root / name


def records(file: Path) -> Iterator[_Record]:
    """The lines of a `.jsonl` file, each id once."""
    lines: dict[str, int] = {}
    for block in read_blocks(file):
        for number, line in block.lines():
            record = _Line(block, number, line).record()
            if record.id in lines:
                problem = f"id {record.id!r} appears twice, first in line {lines[record.id]}"
                raise block.error(problem, number, line, "every id stands once")
            lines[record.id] = number
            yield record
    if not lines:
        raise DataError("no rows", file=file, cure=f"a line is: {_EXAMPLE}")


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of JSON, for reading it and for saying what is wrong with it."""

    block: Block
    number: int
    line: bytes

    def error(self, problem: str) -> DataError:
        return self.block.error(problem, self.number, self.line, f"a line is: {_EXAMPLE}")

    def record(self) -> _Record:
        try:
            told = json.loads(self.line)
        except (ValueError, RecursionError) as error:
            if self.block.is_cut and self.block.data.endswith(self.line):
                raise self.error("the file ends in the middle of a line") from error
            raise self.error("this is not JSON") from error
        if not isinstance(told, dict):
            raise self.error("this is not a JSON object")
        number = told.get("_id")
        if isinstance(number, int) and not isinstance(number, bool):
            told["_id"] = str(number)
        id = self.text(told, "_id")
        if not id or any(symbol.isspace() or symbol == "\0" for symbol in id):
            raise self.error("the _id is empty or has white space in it")
        metadata = told.get("metadata")
        metadata = metadata if isinstance(metadata, dict) else {}
        return _Record(
            id,
            self.text(told, "text"),
            self.text(told, "title", default=""),
            self.text(metadata, "silo", default=_NO_SILO),
            self.text(metadata, "own", default="") or None,
        )

    def text(self, told: Mapping[str, Any], field: str, *, default: str | None = None) -> str:
        """A field's text; half of a surrogate pair, which JSON can hold but UTF-8 cannot, is an error."""
        value = told.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(f"{field} is not a text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(f"{field} holds half a character") from error
        return value


def _judgements(root: Path) -> tuple[dict[str, str], Qrels]:
    """The split of every judged query, and all judgements together."""
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
