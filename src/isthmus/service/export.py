"""A silo's judgements as files that the other commands read: what people said becomes the next training.

queries.jsonl    {"_id": "q1", "text": "…"}
qrels.txt        TREC judgements
bm25.run, dense.run      what each retriever listed: `isthmus fuse`, `isthmus calibrate`
rows.txt         feature rows with grades, LETOR: `isthmus train`, or a silo's data in training
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from isthmus.errors import DataError, ServiceError
from isthmus.service.searching import RETRIEVERS, Searcher
from isthmus.service.stores import majority
from isthmus.tables import Letor, Qrels, Run, replacing, write_letor, write_qrels, write_run


def export_judgements(searcher: Searcher, folder: str | Path) -> dict[str, int]:
    """Write the files; how many queries, judgements and rows there are."""
    judgements = searcher.store.judgements()
    if not judgements:
        raise DataError("nobody has judged a hit of this silo yet", cure="say right or wrong to some hits")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    number = {query: f"q{at}" for at, query in enumerate(dict.fromkeys(each.query for each in judgements), 1)}
    with replacing(target / "queries.jsonl") as stream:
        for query, name in number.items():
            stream.write(json.dumps({"_id": name, "text": query}, ensure_ascii=False).encode() + b"\n")
    grades = majority(judgements)
    names = [number[query] for query, _ in grades]
    documents = [_plain(document) for _, document in grades]
    write_qrels(Qrels.of(names, documents, [int(right) for right in grades.values()]), target / "qrels.txt")
    rows = _write_rows(searcher, target, number, grades)
    return {"queries": len(number), "judgements": len(grades), "rows": rows}


def _write_rows(
    searcher: Searcher, target: Path, number: Mapping[str, str], grades: Mapping[tuple[str, str], bool]
) -> int:
    """Every judged query's candidates: their features with grades, and each retriever's list."""
    snapshot, tables = searcher.index.snapshot, []
    lists: dict[str, dict[str, dict[str, float]]] = {name: {} for name in RETRIEVERS}
    for query, name in number.items():
        candidates = snapshot.find(query, searcher.depth)
        if snapshot.encoder.problem:
            raise ServiceError(f"the encoder fails ({snapshot.encoder.problem}): export again later")
        if not len(candidates):
            continue
        ids = [_plain(document) for document in candidates.documents]
        graded = [int(grades.get((query, document), False)) for document in candidates.documents]
        tables.append(Letor.of([name] * len(ids), snapshot.features(candidates), graded, documents=ids))
        for retriever, listed in candidates.listed.items():
            scores = candidates.scores[retriever]
            lists[retriever][name] = {ids[at]: float(scores[at]) for at in np.flatnonzero(listed).tolist()}
    for retriever, ranking in lists.items():
        write_run(Run.from_dict(ranking, name=retriever), target / f"{retriever}.run")
    if not tables:
        return 0
    letor = Letor.concat(tables)
    write_letor(letor, target / "rows.txt")
    return letor.rows


def _plain(document: str) -> str:
    """An id as TREC's columns can hold it."""
    return "_".join(document.split())
