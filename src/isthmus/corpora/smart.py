"""The classic SMART test collections: cran, cisi, med, npl, time and adi.

Each is a folder with a file of documents, one of queries and one of judgements. The rules are:

- Documents keep title and abstract; authors, bibliography and cross-references are left out. cran's abstracts
  begin with their title, as they stand. Documents without any text (two in cran) are kept: they have an id.
- Queries come without a split, so all are `test`. Some of cisi have no judgements and are kept.
- cran numbers its judgements by the position of the query, not by the number the query file gives, and grades
  from 1 (best) to 4 (of minimum interest): Isthmus's grade is 5 minus that, so that more is better. Its 225
  judgements of -1, one a query, are unexplained and left out; any other code is an error.
- time judges documents by position, too, but in a list of 425, of which its file has 423: two are missing
  after the 370th (up to it relevant documents rank high at their number, after it at two less; the next six
  have no judgements). So ids continue from 373 there. Of its two lists of judgements TIME.REL is read.
- The other collections judge only what is relevant: grade 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isthmus.arrays import frozen
from isthmus.errors import DataError
from isthmus.tables import Block, Corpus, Documents, Qrels, Queries, read_all

Fields = dict[str, str]
Record = tuple[int, Fields]
"""The line where a record begins, and its sections."""

Judgement = tuple[int, str, str, int]
"""Line, query, document, grade."""

_MARK = re.compile(rb"\.([A-Z])\s*$|\.(I)\s+(\d+)\s*$")


@dataclass(frozen=True)
class Layout:
    """The files of one collection and how to read them."""

    documents: str
    queries: str
    judgements: str
    records: Callable[[Block], Iterator[Record]]
    judged: Callable[[Block], Iterator[Judgement]]


def layout_of(folder: Path) -> str | None:
    """Return the name of the collection in a folder, recognised by its file of documents; None if there is
    none."""
    return next((name for name, layout in LAYOUTS.items() if (folder / layout.documents).is_file()), None)


def read(folder: Path) -> Corpus:
    """Read the collection in a folder."""
    name = layout_of(folder)
    if name is None:
        raise DataError("no SMART collection in the folder", file=folder, cure=f"known: {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    source = folder / layout.documents
    documents = _documents(list(layout.records(read_all(source))), source)
    records = [query for _, query in layout.records(read_all(folder / layout.queries))]
    texts = [" ".join(f"{query.get('T', '')} {query.get('W', '')}".split()) for query in records]
    ids = tuple(str(number) for number in range(1, len(records) + 1))
    queries = Queries(ids, tuple(texts), frozen(np.zeros(len(ids), dtype=np.int64)), ("test",) * len(ids))
    qrels = _qrels(read_all(folder / layout.judgements), layout, set(ids), set(documents.ids))
    return Corpus(name, documents, queries, qrels)


def _documents(records: list[Record], file: Path) -> Documents:
    first: dict[str, int] = {}
    for line, record in records:
        name = record["I"]
        if first.setdefault(name, line) != line:
            problem = f"document {name} is there twice, first on line {first[name]:,}"
            raise DataError(problem, file=file, line=line, cure=_CURE)
    return Documents(
        tuple(first),
        tuple(" ".join(record.get("T", "").split()) for _, record in records),
        tuple(record.get("W", "").strip() for _, record in records),
        frozen(np.zeros(len(records), dtype=np.int64)),
    )


def _qrels(block: Block, layout: Layout, queries: set[str], documents: set[str]) -> Qrels:
    grades: dict[str, dict[str, int]] = {}
    for line, query, document, grade in layout.judged(block):
        for kind, name, known in (("query", query, queries), ("document", document, documents)):
            if name not in known:
                raise block.error(f"no {kind} {name} in the collection", line, name, _CURE)
        if document in grades.setdefault(query, {}):
            raise block.error(f"document {document} is judged twice for query {query}", line, document, _CURE)
        grades[query][document] = grade
    return Qrels.from_dict(grades)


_TIME_LOST_AFTER = 370
_CURE = "get the collection's files again"


def _marked(block: Block) -> Iterator[Record]:
    """Yield records that begin with `.I number` and have sections `.T`, `.W` …; a repeated section
    continues."""
    record: Fields = {}
    begun, section = 0, ""
    for line, text in block.lines():
        mark = _MARK.match(text)
        if mark and mark[2]:
            if record:
                yield begun, record
            begun, record, section = line, {"I": mark[3].decode()}, ""
        elif mark:
            section = mark[1].decode()
        elif not section or not record:
            raise block.error("text outside a section", line, text, "a record begins with .I and a number")
        else:
            record[section] = record.get(section, "") + text.decode() + "\n"
    if record:
        yield begun, record


def _numbered(block: Block) -> Iterator[Record]:
    """Yield the records of npl: a number on a line of its own, the text, a slash on a line of its own."""
    for begun, number, lines in _npl_items(block):
        yield begun, {"I": number, "W": "\n".join(text for _, text in lines)}


def _npl_items(block: Block) -> Iterator[tuple[int, str, list[tuple[int, str]]]]:
    begun, number, lines = 0, "", list[tuple[int, str]]()
    for line, raw in block.lines():
        text = raw.decode().strip()
        if text == "/":
            yield begun, number, lines
            number, lines = "", []
        elif number:
            lines.append((line, text))
        elif text.isdecimal():
            begun, number = line, text
        else:
            raise block.error("text before its number", line, text, "an item is a number, text and a slash")
    if number:
        yield begun, number, lines  # the last slash may be missing


def _starred(block: Block) -> Iterator[Record]:
    """Yield the records of time, numbered by position: `*TEXT …` or `*FIND …` begins one; `*STOP` ends the
    file."""
    begun, number, lines = 0, 0, list[str]()
    for line, raw in block.lines():
        text = raw.decode()
        if text.startswith("*"):
            if number:
                yield begun, {"I": str(number), "W": "\n".join(lines)}
            if text.startswith("*STOP"):
                return
            lost = 2 if text.startswith("*TEXT") and number == _TIME_LOST_AFTER else 0
            begun, number, lines = line, number + 1 + lost, []
        elif number:
            lines.append(text.strip())
        else:
            raise block.error("text before the first item", line, text, "an item begins with *TEXT or *FIND")
    if number:
        yield begun, {"I": str(number), "W": "\n".join(lines)}


def _columns(query: int, document: int, grade: int | None = None) -> Callable[[Block], Iterator[Judgement]]:
    """Return a reader of one judgement per line, in these columns; cran's codes become grades as 5 − code."""

    def judged(block: Block) -> Iterator[Judgement]:
        for line, text in block.lines():
            cells = text.decode().split()
            try:
                code = 4 if grade is None else int(cells[grade])
                pair = str(int(cells[query])), str(int(cells[document]))
            except (ValueError, IndexError):
                raise block.error("not a judgement", line, text, _CURE) from None
            if code not in (-1, 1, 2, 3, 4):
                raise block.error(f"code {code} is none of 1 to 4 and -1", line, text, _CURE)
            if code != -1:  # the meaning of −1 is not documented
                yield line, *pair, 5 - code

    return judged


def _lists(block: Block) -> Iterator[Judgement]:
    """Yield the judgements of time: a query and then all its relevant documents, on one line."""
    for line, text in block.lines():
        yield from _relevant(block, line, *text.decode().split())


def _npl_lists(block: Block) -> Iterator[Judgement]:
    for _, query, lines in _npl_items(block):
        for line, text in lines:
            yield from _relevant(block, line, query, *text.split())


def _relevant(block: Block, line: int, query: str, *documents: str) -> Iterator[Judgement]:
    for name in (query, *documents):
        if not name.isdecimal():
            raise block.error("not a number", line, name, _CURE)
    for document in documents:
        yield line, query, document, 1


LAYOUTS: Mapping[str, Layout] = {
    "cran": Layout("cran.all.1400", "cran.qry", "cranqrel", _marked, _columns(0, 1, 2)),
    "cisi": Layout("CISI.ALL", "CISI.QRY", "CISI.REL", _marked, _columns(0, 1)),
    "med": Layout("MED.ALL", "MED.QRY", "MED.REL", _marked, _columns(0, 2)),
    "npl": Layout("doc-text", "query-text", "rlv-ass", _numbered, _npl_lists),
    "time": Layout("TIME.ALL", "TIME.QUE", "TIME.REL", _starred, _lists),
    "adi": Layout("ADI.ALL", "ADI.QRY", "ADI.REL", _marked, _columns(0, 1)),
}
