"""`isthmus features`: the sixteen features of query and document pairs, as LETOR rows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.command import Command, add, add_json, close, to_write, whole

if TYPE_CHECKING:
    from isthmus.tables import Corpus, Qrels, Run


def _arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "corpus CORPUS", "documents: BEIR's corpus.jsonl, or the folder that holds it")
    add(parser, "queries QUERIES", "queries: a .jsonl file, or qid <TAB> text")
    add(parser, "qrels QRELS", "judgements: TREC or BEIR")
    add(
        parser,
        "-o --out ROWS",
        "the LETOR file to write; its comments name the documents",
        type=to_write,
        required=True,
    )
    add(parser, "--candidates RUN", "these pairs: a TREC run (the best by BM25)")
    add(
        parser,
        "--depth",
        "candidates of a query by BM25, judged documents aside (100)",
        type=whole(0),
        default=100,
    )
    profiles = "default, letor, or paper and code: CS-F-LTR's as printed and as its authors' code has them"
    add(parser, "--profile", f"the formulae: {profiles} (default)", default="default")
    add_json(parser, "one object {out, queries, rows, relevant, features}")


def _run(arguments: argparse.Namespace) -> None:
    from isthmus.errors import ConfigError
    from isthmus.features import NAMES, PROFILES, letor
    from isthmus.tables import read_qrels, read_run, write_letor

    if arguments.profile not in PROFILES:
        raise ConfigError(f"no profile {arguments.profile!r}", key=arguments.profile, known=PROFILES)
    qrels = read_qrels(arguments.qrels)
    corpus = _corpus(arguments, qrels)
    run = read_run(arguments.candidates) if arguments.candidates else _candidates(corpus, arguments.depth)
    rows = letor(corpus, run, settings=PROFILES[arguments.profile])
    write_letor(rows, arguments.out)
    result = {
        "out": arguments.out,
        "queries": len(rows),
        "rows": rows.rows,
        "relevant": int((rows.grades > 0).sum()),
        "features": len(NAMES),
    }
    close(arguments, f"features of {corpus.name}", result, [arguments.out])


def _corpus(arguments: argparse.Namespace, qrels: Qrels) -> Corpus:
    """The documents, and the judged queries."""
    import numpy as np

    from isthmus.errors import DataError
    from isthmus.tables import Corpus, Documents, read_queries, records

    path = Path(arguments.corpus)
    file = path / "corpus.jsonl" if path.is_dir() else path
    documents = list(records(file))
    queries = read_queries(arguments.queries)
    judged = np.array([name in qrels for name in queries.ids], dtype=bool)
    if not judged.any():
        raise DataError("none of the queries is judged", file=arguments.qrels, cure="use the same query ids")
    return Corpus(
        file.resolve().parent.name,
        Documents(
            tuple(each.id for each in documents),
            tuple(each.title for each in documents),
            tuple(each.text for each in documents),
            np.zeros(len(documents), dtype=np.int64),
        ),
        queries.take(judged),
        qrels,
    )


def _candidates(corpus: Corpus, depth: int) -> Run:
    """The best documents by BM25, and every judged document of the collection."""
    from isthmus.retrieval import BM25
    from isthmus.tables import Run

    known = set(corpus.documents.ids)
    lists = BM25().index(corpus.documents).search(corpus.queries, max(depth, 1)).to_dict()
    judged = corpus.qrels.to_dict()
    rows = {
        query: {**{name: 0.0 for name in judged[query] if name in known}, **(lists[query] if depth else {})}
        for query in corpus.queries.ids
    }
    return Run.from_dict(rows, name="candidates")


COMMANDS = (
    Command(
        name="features",
        summary="compute the sixteen ranking features of one's own collection, as LETOR rows to train on",
        example="isthmus features scifact scifact/queries.jsonl scifact/qrels/train.tsv -o train.txt",
        add_arguments=_arguments,
        run=_run,
    ),
)
