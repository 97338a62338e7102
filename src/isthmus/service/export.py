"""A silo's judgements as files that the other commands read: what people said becomes the next training.

queries.jsonl    {"_id": "q1", "text": "…"}
qrels.txt        TREC judgements
bm25.run, dense.run      what each retriever listed: `isthmus fuse`, `isthmus calibrate`
rows.txt         feature rows with grades, LETOR: `isthmus train`, or a silo's data in training
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from isthmus.errors import DataError
from isthmus.service.searching import RETRIEVERS, Searcher
from isthmus.service.stores import majority
from isthmus.tables import Letor, Qrels, Run, write_letor, write_qrels, write_run
from isthmus.tables.files import replacing


def export_judgements(searcher: Searcher, folder: str | Path) -> dict[str, int]:
    """Write the files; how many queries, judgements and rows there are."""
    said = searcher.store.judgements()
    if not said:
        raise DataError("nobody has judged a hit of this silo yet", cure="say right or wrong to some hits")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    number = {query: f"q{at}" for at, query in enumerate(dict.fromkeys(each.query for each in said), 1)}
    with replacing(target / "queries.jsonl") as stream:
        for query, name in number.items():
            stream.write(json.dumps({"_id": name, "text": query}, ensure_ascii=False).encode() + b"\n")
    grades = majority(said)
    pairs = list(grades)
    write_qrels(
        Qrels.of(
            [number[query] for query, _ in pairs],
            [_plain(document) for _, document in pairs],
            [int(grades[pair]) for pair in pairs],
        ),
        target / "qrels.txt",
    )
    rows = _write_rows(searcher, target, number)
    return {"queries": len(number), "judgements": len(pairs), "rows": rows}


def _write_rows(searcher: Searcher, target: Path, number: dict[str, str]) -> int:
    names: list[str] = []
    documents: list[str] = []
    tables, grades = [], []
    lists: dict[str, dict[str, dict[str, float]]] = {name: {} for name in RETRIEVERS}
    for query, found, graded, features in searcher.judged_rows():
        names += [number[query]] * len(found)
        documents += [_plain(document) for document in found.documents]
        tables.append(features)
        grades.append(graded)
        for name, inside in found.listed.items():
            rows = np.flatnonzero(inside).tolist()
            lists[name][number[query]] = {
                _plain(found.documents[at]): float(found.scores[name][at]) for at in rows
            }
    for name, held in lists.items():
        write_run(Run.from_dict(held, name=name), target / f"{name}.run")
    if not tables:
        return 0
    letor = Letor.of(names, np.concatenate(tables), np.concatenate(grades), documents=documents)
    write_letor(letor, target / "rows.txt")
    return letor.rows


def _plain(document: str) -> str:
    """An id as TREC's columns can hold it."""
    return "_".join(document.split())
