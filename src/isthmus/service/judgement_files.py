"""Files of judgements: TREC qrels with the texts of their queries, or CSV.

    qrels.txt      q1 0 d7 1                       with queries.tsv (q1 <TAB> text) or queries.jsonl (BEIR)
    judged.csv     query,document,relevant[,silo]  columns in any order; 1 or 0, true or false, or a grade

A query is identified by its text, without white space around it. A document that is judged twice for a
query must have the same judgement. Content that cannot be read raises a DataError with the file and, in
CSV, the line.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from isthmus.errors import DataError
from isthmus.service import wire
from isthmus.tables import Qrels, read_all, read_qrels, read_queries, replacing, write_qrels

COLUMNS = ("query", "document", "relevant", "silo")
_WORDS = {"true": 1, "false": 0, "yes": 1, "no": 0}
_EXAMPLE = "query,document,relevant"


def read_judgements(
    path: str | os.PathLike[str],
    *,
    queries: str | os.PathLike[str] | None = None,
    least_grade: int = 1,
    silo: str | None = None,
) -> list[wire.NamedJudgement]:
    """Read the judgements of a file, each query and document once. `silo` is the silo of documents that name
    none.

    A grade of at least `least_grade` is relevant. Without `queries`, those of qrels are read from
    queries.jsonl or queries.tsv beside the file.
    """
    file = Path(path)
    is_csv = file.name.removesuffix(".gz").endswith(".csv")
    rows = _csv_rows(file) if is_csv else _qrels_rows(file, queries)
    first: dict[tuple[str, str, str | None], tuple[bool, str]] = {}
    judgements = []
    for place, query, document, grade, named in rows:
        line = int(place) if is_csv else None
        try:
            each = wire.NamedJudgement(
                query=query.strip(), document=document, relevant=grade >= least_grade, silo=named or silo
            )
        except ValidationError as error:
            problem = error.errors()[0]
            message = f"{problem['loc'][0]}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
            cure = "a query has 1 to 2,000 letters, an id 1 to 1,000 and no control characters"
            raise DataError(message, file=file, line=line, text=f"{query},{document}", cure=cure) from None
        key = (each.query, each.document, each.silo)
        relevant, before = first.setdefault(key, (each.relevant, place))
        if relevant is not each.relevant:
            where = f"line {before}" if is_csv else f"query {before}"
            raise DataError(
                f"document {document!r} is right here and wrong in {where}, for the same query",
                file=file,
                line=line,
                text=query,
                cure="leave one of them out",
            )
        if before == place:
            judgements.append(each)
    if not judgements:
        raise DataError("no judgement in it", file=file, cure="a line each, as in: tidal power,a.txt,1")
    return judgements


_Row = tuple[str, str, str, int, str | None]
"""Place in the file (a line, or the query's id), query, document, grade and silo."""


def _csv_rows(file: Path) -> Iterator[_Row]:
    text = read_all(file).data.decode()
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        heads = [head.strip().lower() for head in next(reader, [])]
        if not set(COLUMNS[:3]) <= set(heads) <= set(COLUMNS) or len(set(heads)) != len(heads):
            raise DataError(
                "not the columns of judgements", file=file, line=1, text=",".join(heads), cure=_EXAMPLE
            )
        for row in reader:
            if not any(row):
                continue
            line = reader.line_num
            if len(row) != len(heads):
                problem = f"{len(row)} columns where the first line has {len(heads)}"
                raise DataError(problem, file=file, line=line, text=",".join(row), cure=_EXAMPLE)
            fields = dict(zip(heads, row, strict=True))
            word = fields["relevant"].strip().lower()
            grade = _WORDS.get(word)
            if grade is None and word.removeprefix("-").isdecimal():
                grade = int(word)
            if grade is None:
                cure = "1 or 0, true or false, or a whole grade"
                raise DataError("relevant is no grade", file=file, line=line, text=word, cure=cure)
            silo = fields.get("silo", "").strip() or None
            yield str(line), fields["query"], fields["document"].strip(), grade, silo
    except csv.Error as error:
        raise DataError(
            f"not CSV: {error}", file=file, line=reader.line_num, cure="quote texts that have quotes"
        ) from error


def _qrels_rows(file: Path, queries: str | os.PathLike[str] | None) -> Iterator[_Row]:
    qrels = read_qrels(file)
    beside = [each for name in ("queries.jsonl", "queries.tsv") if (each := file.parent / name).exists()]
    source = queries or next(iter(beside), None)
    if source is None:
        raise DataError(
            "qrels name queries by numbers, and nothing says what they ask",
            file=file,
            cure="--queries FILE: lines of id, tab, text; or BEIR's queries.jsonl",
        )
    named = read_queries(source)
    texts = dict(zip(named.ids, named.texts, strict=True))
    for query, grades in qrels.to_dict().items():
        if query not in texts:
            raise DataError(
                f"query {query!r} is judged in {file} and has no text here", file=source, cure="add its line"
            )
        for document, grade in grades.items():
            yield query, texts[query], document, grade, None


def write_judgements(judgements: Sequence[wire.NamedJudgement], out: str | os.PathLike[str]) -> list[Path]:
    """Write a .csv file, or a folder with queries.jsonl and qrels.txt. Returns the files written.

    In qrels an id that two silos have is written as silo/id. Raises a DataError for an id with white
    space, which qrels cannot hold.
    """
    target = Path(out)
    if target.suffix == ".csv":
        target.parent.mkdir(parents=True, exist_ok=True)
        text = io.StringIO(newline="")
        table = csv.writer(text)  # lines end with CRLF, so that CR and LF in texts are quoted
        table.writerow(COLUMNS)
        table.writerows((each.query, each.document, int(each.relevant), each.silo) for each in judgements)
        with replacing(target) as stream:
            stream.write(text.getvalue().encode())
        return [target]
    target.mkdir(parents=True, exist_ok=True)
    silos = Counter(document for document, _ in {(each.document, each.silo) for each in judgements})
    names = [
        f"{each.silo}/{each.document}" if silos[each.document] > 1 else each.document for each in judgements
    ]
    spaced = next((name for name in names if len(name.split()) > 1), None)
    if spaced is not None:
        raise DataError(f"qrels cannot hold the white space of {spaced!r}", file=target, cure="-o FILE.csv")
    number = numbered(judgements)
    with replacing(target / "queries.jsonl") as stream:
        for query, name in number.items():
            stream.write(json.dumps({"_id": name, "text": query}, ensure_ascii=False).encode() + b"\n")
    grades = [int(each.relevant) for each in judgements]
    write_qrels(Qrels.of([number[each.query] for each in judgements], names, grades), target / "qrels.txt")
    return [target / "queries.jsonl", target / "qrels.txt"]


def numbered(judgements: Sequence[wire.NamedJudgement]) -> dict[str, str]:
    """Return the ids of queries in files, q1, q2 and so on, by query."""
    return {query: f"q{at}" for at, query in enumerate(dict.fromkeys(each.query for each in judgements), 1)}
