"""`isthmus rank`: a run from a saved ranker and feature rows."""

from __future__ import annotations

import argparse
from pathlib import Path

from isthmus.cli.command import Command, add, add_json, add_per_query, close, to_write

SPLITS = ("train", "validation", "test")


def _rank_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "model MODEL", "a saved ranker, or the folder of a training run")
    add(parser, "data DATA", "feature rows: a name, a LETOR file or a folder")
    add(parser, "-o --out RUN", "the TREC run to write", type=to_write, required=True)
    add(parser, "--split", "rank this part of the data only (all rows)", choices=SPLITS)
    add(parser, "--qrels FILE", "also write the rows' grades there, as judgements", type=to_write)
    add_per_query(parser)
    add_json(parser, "one object {run, model, queries, rows, seconds}")


def _rank(arguments: argparse.Namespace) -> None:
    import time

    from isthmus.corpora import load_letor
    from isthmus.evaluation import check_per_query, evaluate, per_query_rows, write_per_query
    from isthmus.federation import MEASURES
    from isthmus.rankers import load_ranker
    from isthmus.tables import write_qrels, write_run
    from isthmus.training import model_file

    if arguments.per_query:
        check_per_query(arguments.per_query)
    began = time.perf_counter()
    ranker = load_ranker(model_file(arguments.model))
    letor = load_letor(arguments.data, split=arguments.split)
    run = ranker.rank(letor, name=Path(arguments.model).stem)
    write_run(run, arguments.out)
    if arguments.qrels:
        write_qrels(letor.qrels(), arguments.qrels)
    if arguments.per_query:
        evaluation = evaluate(letor.qrels(), run, MEASURES)
        write_per_query(per_query_rows(evaluation, experiment="rank", data=letor.name), arguments.per_query)
    done = {
        "run": arguments.out,
        "model": ranker.kind,
        "queries": len(run),
        "rows": run.rows,
        "seconds": round(time.perf_counter() - began, 3),
    }
    close(
        arguments, f"{run.name} on {letor.name}", done, [arguments.out, arguments.qrels, arguments.per_query]
    )


COMMANDS = (
    Command(
        name="rank",
        summary="rank feature rows with a trained ranker and write the lists",
        example="isthmus rank runs/first synthetic --split test -o ranked.run --qrels test.qrels",
        add_arguments=_rank_arguments,
        run=_rank,
    ),
)
