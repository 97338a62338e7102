"""Export of a silo's judgements to files that the other commands read, for example to train on them.

queries.jsonl    {"_id": "q1", "text": "…"}
qrels.txt        TREC judgements
bm25.run, dense.run      each retriever's lists: `isthmus fuse`, `isthmus calibrate`
rows.txt         feature rows with grades, LETOR: `isthmus train`, or a silo's data in training
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from isthmus.errors import DataError, ServiceError
from isthmus.service.judgement_files import numbered, write_judgements
from isthmus.service.judgements import exported_judgements
from isthmus.service.searching import RETRIEVERS, Searcher
from isthmus.tables import Letor, Run, write_letor, write_run


def export_rows(searcher: Searcher, folder: str | Path) -> dict[str, int]:
    """Write the files. Returns how many queries, judgements and rows there are."""
    judgements = exported_judgements(searcher.store.judgements(), searcher.silo)
    if not judgements:
        raise DataError("nobody has judged a hit of this silo yet", cure="say right or wrong to some hits")
    plain = [each.model_copy(update={"document": _plain(each.document)}) for each in judgements]
    write_judgements(plain, folder)
    grades = {(each.query, each.document): each.relevant for each in judgements}
    number = numbered(judgements)
    rows = _write_rows(searcher, Path(folder), number, grades)
    return {"queries": len(number), "judgements": len(grades), "rows": rows}


def _write_rows(
    searcher: Searcher, target: Path, number: Mapping[str, str], grades: Mapping[tuple[str, str], bool]
) -> int:
    """Write the candidates of every judged query: their features with grades, and each retriever's list.
    Returns the number of rows."""
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
    """Return an id without white space, as TREC's columns need it."""
    return "_".join(document.split())
