"""`isthmus csfltr`: cross-silo learning to rank on collections of one's own, in one process."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, print_json, say, whole

if TYPE_CHECKING:
    from isthmus.federation.semisupervised import CrossTables, Way
    from isthmus.tables import Corpus

MEASURES = ("ERR", "nDCG@10", "nDCG", "MAP")


def _arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser,
        "folders FOLDER",
        "BEIR folders with judged queries, one per silo, or one with silos",
        nargs="+",
    )
    add(parser, "--epsilon", "of a field's released counts (8)", type=float, default=8.0)
    add(parser, "--depth", "candidates of a query in every silo (100)", type=whole(1), default=100)
    add(parser, "--labels", "judged queries of a silo to learn from (half of them)", type=whole(1))
    add(
        parser,
        "--reader",
        "how released counts are read: topics, shrink, threshold, plain (shrink)",
        default="shrink",
    )
    add(parser, "--seed", "of the split, the noise and the training (0)", type=whole(0), default=0)
    add_json(parser, "a list of {row, part, measure, value, queries}")


def _run(arguments: argparse.Namespace) -> None:
    from isthmus.federation.semisupervised import CrossSilos, CrossTables, Releasing, Ways
    from isthmus.randomness import Streams
    from isthmus.report import summary

    corpus = joined(arguments.folders)
    streams = Streams(arguments.seed).under("csfltr")
    world = CrossSilos(corpus, streams, Releasing(epsilon=arguments.epsilon, reader=arguments.reader))
    world.measures = MEASURES
    tables = CrossTables(world, arguments.depth)
    say(
        f"{len(corpus.silos)} silos, {len(corpus.documents):,} documents, {len(corpus.queries):,} judged "
        f"queries; {100 * world.cross_share:.0f} % of relevant pairs lie across silos"
    )
    records = list(_measured(tables, Ways(tables, seed=arguments.seed, labels=arguments.labels).rankers()))
    if arguments.json:
        print_json(records)
    else:
        print(_table(records))
    totals = world.releasing.epsilon_totals
    epsilon = f"{arguments.epsilon:g} for a field's counts of a document, {totals:g} for each total"
    summary("learned across silos", {"test queries": records[0]["queries"] if records else 0, "ε": epsilon})


def joined(folders: list[str]) -> Corpus:
    """The folders' collections as one, each a silo; names of documents and queries begin with the silo's."""
    import numpy as np

    from isthmus.errors import DataError
    from isthmus.tables import Corpus, Documents, Qrels, Queries, read_corpus_beir

    parts = [read_corpus_beir(folder) for folder in folders]
    if len(parts) == 1:
        if len(parts[0].silos) < 2:
            raise DataError(
                "one folder with one silo", file=folders[0], cure="name the folder of a second silo"
            )
        return parts[0]
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        names = [f"{at} {name}" for at, name in enumerate(names, 1)]
    sizes = [len(part.documents) for part in parts], [len(part.queries) for part in parts]
    silos = [np.repeat(np.arange(len(parts)), each) for each in sizes]

    def named(kind: str) -> tuple[str, ...]:
        both = zip(names, parts, strict=True)
        return tuple(f"{silo}/{name}" for silo, part in both for name in getattr(part, kind).ids)

    grades = {
        f"{silo}/{query}": {f"{silo}/{document}": grade for document, grade in judged.items()}
        for silo, part in zip(names, parts, strict=True)
        for query, judged in part.qrels.to_dict().items()
    }
    documents = Documents(
        named("documents"),
        tuple(title for part in parts for title in part.documents.titles),
        tuple(body for part in parts for body in part.documents.bodies),
        silos[0],
    )
    texts = tuple(text for part in parts for text in part.queries.texts)
    splits = tuple(split for part in parts for split in part.queries.splits)
    queries = Queries(named("queries"), texts, silos[1], splits)
    return Corpus(" + ".join(names), documents, queries, Qrels.from_dict(grades), tuple(names))


def _measured(tables: CrossTables, ways: Any) -> Any:
    """The measures of every way on the test queries, BM25 of the same counts first."""

    def measured(row: str, part: str, scores: Any) -> Any:
        evaluation = tables.world.evaluated(tables.ranked[2], scores, 2)
        queries = len(evaluation.per_query(MEASURES[0]))
        for measure in MEASURES:
            value = float(evaluation[measure])
            yield {"row": row, "part": part, "measure": measure, "value": value, "queries": queries}

    yield from measured("BM25", "all", tables.bm25(2))
    way: Way
    for way in ways:
        yield from measured(way.row, way.part, way.score(tables.ranked[2]))


def _table(records: list[dict[str, Any]]) -> str:
    from isthmus.report import Table

    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        line = lines.setdefault(
            (record["row"], record["part"]), {"row": record["row"], "part": record["part"]}
        )
        line[record["measure"]] = record["value"]
    return str(Table.of(lines.values(), title="Test queries, ranked over the documents of all silos"))


COMMANDS = (
    Command(
        name="csfltr",
        summary="learn to rank across collections that stay apart: alone, together, with cross pairs",
        example="isthmus csfltr library-a library-b --epsilon 8",
        add_arguments=_arguments,
        run=_run,
    ),
)
