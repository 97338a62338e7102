"""`isthmus csfltr`: cross-silo learning to rank on one's own collections, in one process."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, fitted, folded, print_json, say, whole

if TYPE_CHECKING:
    from isthmus.evaluation import Evaluation
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
    add(
        parser,
        "--mode",
        "paper: sketches, noise, features, split, training and measures as printed (sound)",
        choices=("sound", "paper"),
        default="sound",
    )
    add(parser, "--ranked RUN", "paper mode: a TREC run whose ranks are the grades (BM25 of all documents)")
    add(
        parser,
        "--mechanism NAME",
        "how counts are released: one_shot, scalar, per_cell, insecure_shared_noise (one_shot; in paper mode "
        "the last)",
        choices=("one_shot", "scalar", "per_cell", "insecure_shared_noise"),
    )
    add(
        parser,
        "--model NAME",
        "classification, regression, pairwise, listwise or lambdarank (classification)",
        choices=("classification", "regression", "pairwise", "listwise", "lambdarank"),
        default="classification",
    )
    epsilon = "of a field's released counts (8), or of the answer about one word (0.5)"
    add(parser, "--epsilon", epsilon, type=float)
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
    from isthmus.randomness import Streams

    corpus = joined(arguments.folders)
    streams = Streams(arguments.seed).under("csfltr")
    if arguments.mode == "paper":
        _print_paper(arguments, corpus, streams)
    else:
        _print_sound(arguments, corpus, streams)


def _print_paper(arguments: argparse.Namespace, corpus: Corpus, streams: Any) -> None:
    """Run the experiment as published, on grades from a run, and print its measures."""
    from isthmus.errors import ConfigError
    from isthmus.federation.semisupervised import FAULTS, PrintedWorld, Protocol, by_rank
    from isthmus.report import summary
    from isthmus.retrieval import BM25
    from isthmus.tables import read_run

    mechanism = arguments.mechanism or "insecure_shared_noise"
    if mechanism == "one_shot" or arguments.model != "classification":
        problem = "paper mode asks about words and has a softmax over grades"
        raise ConfigError(problem, key="mode", value=arguments.mode)
    for number, fault in FAULTS.items():
        say(f"paper mode, known fault {number}: {fault}")
    run = (
        read_run(arguments.ranked)
        if arguments.ranked
        else BM25().index(corpus.documents).search(corpus.queries, 100)
    )
    protocol = Protocol(mechanism=mechanism, epsilon=arguments.epsilon or 0.5, depth=arguments.depth)
    world = PrintedWorld(by_rank(corpus, run), streams, protocol)
    queries = len(world.test)
    records = [
        {"row": row, "part": part, "measure": measure, "value": value, "queries": queries}
        for row, part, weights in world.ways()
        for measure, value in world.measured(weights).items()
    ]
    if arguments.json:
        print_json(records)
    else:
        print(_table(records, "Pairs of the silos' own that nobody learned from, as printed"))
    nominal = "∞" if mechanism == "insecure_shared_noise" else f"{protocol.epsilon * world.world.words:g}"
    budget = f"{protocol.epsilon:g} for an answer by name, {nominal} in truth for a document"
    summary("learned across silos, paper mode", {"test pairs": world.test.rows, "ε": budget})


def _print_sound(arguments: argparse.Namespace, corpus: Corpus, streams: Any) -> None:
    """Train in every way, with counts released by the chosen mechanism, and print the measures."""
    from dataclasses import replace

    from isthmus.federation.semisupervised import (
        ANCHORED,
        PLAIN,
        AnsweringSilos,
        CrossSilos,
        CrossTables,
        Protocol,
        Releasing,
        Ways,
    )
    from isthmus.report import summary

    world: CrossSilos
    if (arguments.mechanism or "one_shot") == "one_shot":
        totals = Releasing(epsilon=arguments.epsilon or 8.0, reader=arguments.reader)
        world = CrossSilos(corpus, streams, totals)
        epsilon = (
            f"{totals.epsilon:g} for a field's counts of a document, {totals.epsilon_totals:g} for each total"
        )
    else:
        protocol = Protocol(mechanism=arguments.mechanism, epsilon=arguments.epsilon or 0.5, signed=True)
        world = AnsweringSilos(corpus, streams, protocol)
        each = (
            "∞" if arguments.mechanism == "insecure_shared_noise" else f"{protocol.epsilon * world.words:g}"
        )
        epsilon = (
            f"{protocol.epsilon:g} for the answer about one word; up to {world.words} words of a silo: {each}"
        )
    world.measures = MEASURES
    tables = CrossTables(world, arguments.depth)
    say(
        f"{len(corpus.silos)} silos, {len(corpus.documents):,} documents, {len(corpus.queries):,} judged "
        f"queries; {100 * world.cross_share:.0f} % of relevant pairs lie across silos"
    )
    plain = replace(PLAIN, model=arguments.model)
    ways = Ways(tables, seed=arguments.seed, labels=arguments.labels, plain=plain)
    evaluations = _evaluated(tables, ways.rankers())
    records = [
        {"row": row, "part": part, "measure": measure, "value": value, "queries": _queries(each)}
        for (row, part), each in evaluations.items()
        for measure, value in ((name, float(each[name])) for name in MEASURES)
    ]
    if arguments.json:
        print_json(records)
    else:
        print(_table(records, "Test queries, ranked over the documents of all silos"))
        print(folded(_verdict(evaluations["BM25", "all"], ANCHORED, evaluations[ANCHORED, "all"])))
    summary("learned across silos", {"test queries": records[0]["queries"] if records else 0, "ε": epsilon})


def joined(folders: list[str]) -> Corpus:
    """Join the folders' collections, each as a silo; ids of documents and queries get the silo's name as
    prefix."""
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


def _evaluated(tables: CrossTables, ways: Iterable[Way]) -> dict[tuple[str, str], Evaluation]:
    """Evaluate every way of training on the test queries, by row and part; BM25 from the same counts comes
    first."""
    ranked = tables.ranked[2]
    scores = {("BM25", "all"): tables.bm25(2)} | {(way.row, way.part): way.score(ranked) for way in ways}
    return {place: tables.world.evaluated(ranked, each, 2) for place, each in scores.items()}


def _queries(evaluation: Evaluation) -> int:
    return len(evaluation.per_query(MEASURES[0]))


def _verdict(baseline: Evaluation, name: str, default: Evaluation) -> str:
    """A sentence on whether the default, which has no gate, is better than BM25 on these queries."""
    from isthmus.evaluation import LARGE_LOSS, bootstrap

    measure = MEASURES[1]
    before, after = (each.per_query(measure) for each in (baseline, default))
    gains = [after[query] - value for query, value in before.items()]
    gain, worse = bootstrap(gains), sum(each < 0 for each in gains)
    verdict = "better" if gain.low > 0 else "worse" if gain.high < 0 else "not clearly better or worse"
    return (
        f"{name}, the default, is {verdict} than BM25 by {measure}: {gain.value:+.4f} (95 % interval "
        f"{gain.low:+.4f} to {gain.high:+.4f}); {worse:,} of {len(gains):,} queries got worse, "
        f"{sum(each < -LARGE_LOSS for each in gains):,} of them by more than {LARGE_LOSS:g}."
    )


def _table(records: list[dict[str, Any]], title: str) -> str:
    from isthmus.report import Table

    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        line = lines.setdefault(
            (record["row"], record["part"]), {"row": record["row"], "part": record["part"]}
        )
        line[record["measure"]] = record["value"]
    return fitted(Table.of(lines.values(), title=title))


COMMANDS = (
    Command(
        name="csfltr",
        summary="learn to rank across collections that stay apart: alone, together, with cross pairs",
        example="isthmus csfltr library-a library-b --epsilon 8",
        add_arguments=_arguments,
        run=_run,
    ),
)
