"""Commands about collections, runs and judgements: `evaluate`, `compare` and `retrieve`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import (
    Command,
    add,
    add_json,
    add_per_query,
    close,
    fitted,
    print_json,
    say,
    to_write,
    whole,
)
from isthmus.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from isthmus.evaluation import Evaluation
    from isthmus.report import Table
    from isthmus.retrieval import Retriever
    from isthmus.tables import Corpus, Documents, Qrels

PROFILES = ("trec_eval", "lightgbm", "sklearn")
FORMATS = ("text", "markdown", "latex", "html")
MEASURES = ("nDCG@10", "MRR@10", "MAP")
OWN_QUERIES = ("all", "train", "validation", "test")


def _measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for measures, for how to compute them, and for the form of the table."""
    usual = f"(default: {', '.join(MEASURES)}); before the files, end them with --"
    measures = f"what to measure: nDCG@10, 'MRR@5(rel=2)', trec_eval's ndcg_cut_10 … {usual}"
    add(parser, "-m --measure MEASURE", measures, dest="measures", nargs="+", action="extend")
    add(parser, "--profile", "follow that tool's conventions", choices=PROFILES)
    add(parser, "--propensity TRAIN_QRELS", "training judgements, which psP and psnDCG learn from")
    add_per_query(parser)
    add(parser, "--format", "of the table (%(default)s)", choices=FORMATS, default="text")


def _evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "qrels QRELS", "judgements, a TREC or BEIR file")
    add(parser, "runs RUN", "ranked lists, TREC run files", nargs="+")
    _measuring_arguments(parser)
    add(parser, "--baseline RUN", "test every run against this one only")
    add(parser, "--by-query", "values of every query instead of means")
    add_json(
        parser,
        "a list of {run, measure, value, queries, low, high, better_than}, or {run, measure, query, value}",
    )


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "qrels QRELS", "judgements, a TREC or BEIR file")
    add(parser, "baseline BASELINE", "the run that others are compared with, a TREC run file")
    add(parser, "runs RUN", "the others", nargs="+")
    _measuring_arguments(parser)
    add(parser, "--risk", "what runs lose on single queries: URisk, TRisk, ZRisk, GeoRisk, won and lost")
    add(parser, "--alpha A", "with --risk: a loss counts 1 + A times a gain (1)", type=float)
    counts = "wins, losses, large_losses, queries"
    add_json(
        parser, f"a list of {{run, measure, baseline, value, difference, low, high, p, {counts}}}, or risks"
    )


def _evaluate(arguments: argparse.Namespace) -> None:
    from isthmus.evaluation import Comparison
    from isthmus.report import Table

    evaluations = _evaluations(arguments, arguments.runs)
    names = dict(zip(arguments.runs, (one.run for one in evaluations), strict=True))
    comparison = Comparison(evaluations, names.get(arguments.baseline, arguments.baseline))
    rows = [row for one in evaluations for row in _by_query(one)] if arguments.by_query else None
    if arguments.json:
        print_json(comparison.rows() if rows is None else rows)
    else:
        _print_table(arguments, comparison.table(remarks=False) if rows is None else Table.of(rows))
    _say_remarks(evaluations)


def _compare(arguments: argparse.Namespace) -> None:
    from isthmus.evaluation import Comparison

    if arguments.alpha is not None and not arguments.risk:
        raise ConfigError(
            "--alpha is how much more a loss counts under --risk", key="alpha", expected="--risk"
        )
    alpha = 1.0 if arguments.alpha is None else arguments.alpha
    evaluations = _evaluations(arguments, [arguments.baseline, *arguments.runs])
    comparison = Comparison(evaluations, evaluations[0].run)
    if arguments.json:
        risks = [one.row() for one in comparison.risks(alpha=alpha)] if arguments.risk else None
        print_json(comparison.differences() if risks is None else risks)
    else:
        table = comparison.risk_table(alpha=alpha) if arguments.risk else comparison.difference_table()
        _print_table(arguments, table)
    _say_remarks(evaluations)


def _evaluations(arguments: argparse.Namespace, paths: Sequence[str]) -> tuple[Evaluation, ...]:
    """Evaluate the runs, under short names; with --per-query their values are also written."""
    from isthmus.evaluation import Propensity, check_per_query, evaluate, per_query_rows, write_per_query
    from isthmus.tables import read_qrels, read_run

    if arguments.per_query:
        check_per_query(arguments.per_query)
    qrels = _judgements(arguments.qrels)
    propensity = Propensity.of_qrels(read_qrels(arguments.propensity)) if arguments.propensity else None
    how = {"profile": arguments.profile, "propensity": propensity}
    evaluations = tuple(
        evaluate(qrels, read_run(path, name=name), arguments.measures or MEASURES, **how)
        for path, name in zip(paths, short_names(paths), strict=True)
    )
    if arguments.per_query:
        about = {"experiment": "evaluate", "data": Path(arguments.qrels).name}
        rows = (row for one in evaluations for row in per_query_rows(one, **about))
        write_per_query(rows, arguments.per_query)
    return evaluations


def _judgements(path: str) -> Qrels:
    """Read judgements. The error for a run in their place says which file comes first."""
    from isthmus.tables import read_qrels, read_run

    try:
        return read_qrels(path)
    except DataError as error:
        try:
            read_run(path)
        except DataError:
            raise error from None
        problem = "is a run, where judgements were expected"
        raise DataError(problem, file=path, cure="judgements come first, then runs") from None


def _print_table(arguments: argparse.Namespace, table: Table) -> None:
    from isthmus.report import FORMS

    print(fitted(table) if arguments.format == "text" else FORMS[arguments.format](table))


def _say_remarks(evaluations: Sequence[Evaluation]) -> None:
    for remark in (remark for one in evaluations for remark in one.remarks()):
        say(remark)


def short_names(paths: Sequence[str]) -> list[str]:
    """Labels for files: their base names if these differ, otherwise the paths as given."""
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def _by_query(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [
        {"run": evaluation.run, "measure": str(measure), "query": query, "value": value}
        for measure in evaluation.measures
        for query, value in evaluation.per_query(measure).items()
    ]


def _retrieve_arguments(parser: argparse.ArgumentParser) -> None:
    own = "train, validation, test or all of the collection's own, or a file: .jsonl, or qid<TAB>text"
    add(parser, "corpus CORPUS", "a collection by name (pydocs, cran, irds:NAME of ir_datasets, …) or folder")
    add(parser, "queries QUERIES", own)
    add(parser, "-o --out RUN", "the TREC run to write", type=to_write, required=True)
    add(parser, "-k", "documents per query (%(default)s)", type=whole(1), default=1000)
    add(parser, "--qrels FILE", "also write these queries' judgements there", type=to_write)
    add(parser, "--silo NAME", "search the documents of one silo only")
    add(parser, "--k1", "BM25's term saturation (%(default)s)", type=float, default=1.5)
    add(parser, "--b", "BM25's length normalisation (%(default)s)", type=float, default=0.75)
    languages = "BM25's stemmer and stop words: de, German, … (%(default)s: what most documents are in)"
    add(parser, "--language", languages, default="auto")
    add(
        parser,
        "--encoder NAME",
        "nearest vectors instead of BM25: bge-small, a folder, an endpoint's address",
    )
    add(parser, "--reranker NAME", "a cross-encoder's scores of the first 20: ms-marco-minilm, a folder")
    add_json(parser, "one object {run, documents, queries, rows, seconds}")


def _retrieve(arguments: argparse.Namespace) -> None:
    import time

    from isthmus.corpora import load
    from isthmus.tables import write_qrels, write_run

    if arguments.qrels and arguments.queries not in OWN_QUERIES:
        raise ConfigError(f"queries from {arguments.queries} have no judgements to write", key="qrels")
    if arguments.qrels and Path(arguments.qrels).resolve() == Path(arguments.out).resolve():
        raise ConfigError(f"run and judgements would both be written to {arguments.out}", key="qrels")
    began = time.perf_counter()
    retriever = _retriever(arguments)
    corpus = _with_queries(load(arguments.corpus), arguments.queries)
    documents = corpus.documents if arguments.silo is None else corpus.silo(arguments.silo).documents
    run = retriever(documents).search(corpus.queries, arguments.k)
    if not run.rows:
        raise DataError(
            f"none of {len(documents):,} documents shares a word with any of {len(run):,} queries",
            cure="nothing was written; check collection and queries",
        )
    write_run(run, arguments.out)
    if arguments.qrels:
        write_qrels(corpus.qrels, arguments.qrels)
    done = {
        "run": arguments.out,
        "documents": len(documents),
        "queries": len(corpus.queries),
        "rows": run.rows,
        "seconds": round(time.perf_counter() - began, 3),
    }
    close(arguments, f"{run.name} on {corpus.name}", done, [arguments.out, arguments.qrels])


def _retriever(arguments: argparse.Namespace) -> Callable[[Documents], Retriever]:
    """A function from documents to a retriever. Raises an error for unusable settings before any documents
    are read."""
    from isthmus.languages import AUTO, code_of, detect, tokeniser_of, usual
    from isthmus.retrieval import BM25, Dense, Reranked

    language, settings = code_of(arguments.language), BM25(k1=arguments.k1, b=arguments.b)

    def by_words(documents: Documents) -> Retriever:
        code = usual(detect(documents.texts[:1_000])) if language == AUTO else language
        return replace(settings, tokeniser=tokeniser_of(code)).index(documents)

    index = by_words
    if arguments.encoder is not None:
        from isthmus.encoders import load_encoder

        index = Dense(load_encoder(arguments.encoder)).index
    if arguments.reranker is None:
        return index
    from isthmus.encoders import load_cross_encoder

    cross = load_cross_encoder(arguments.reranker)
    return lambda documents: Reranked(index(documents), documents, cross)


def _with_queries(corpus: Corpus, queries: str) -> Corpus:
    """The collection with the selected queries: all, a split's, or a file's."""
    from isthmus.tables import Qrels, read_queries

    if queries in OWN_QUERIES:
        chosen = corpus if queries == "all" else corpus.split(queries)
        if not len(chosen.queries):
            there = ", ".join(sorted(set(corpus.queries.splits))) or "none"
            raise DataError(f"{corpus.name} has no {queries} queries", cure=f"splits with queries: {there}")
        return chosen
    if not Path(queries).exists():
        meant = nearest(queries, OWN_QUERIES)
        cure = f"did you mean {meant!r}?" if meant else f"give a file, or one of {', '.join(OWN_QUERIES)}"
        raise DataError(f"no queries and no file {queries!r}", cure=cure)
    return replace(corpus, queries=read_queries(queries), qrels=Qrels.from_dict({}))


COMMANDS = (
    Command(
        "evaluate",
        "measure ranked lists against judgements",
        "isthmus evaluate qrels.txt bm25.run dense.run -m nDCG@10 'P@5(rel=2)' --baseline bm25.run",
        _evaluate_arguments,
        _evaluate,
    ),
    Command(
        "compare",
        "the gains and losses of ranked lists over a baseline",
        "isthmus compare qrels.txt bm25.run dense.run hybrid.run -m nDCG@10\n"
        "isthmus compare qrels.txt bm25.run dense.run -m nDCG@10 --risk --alpha 5",
        _compare_arguments,
        _compare,
    ),
    Command(
        "retrieve",
        "search a collection with BM25 or an encoder and write the ranked lists",
        "isthmus retrieve pydocs test -o bm25.run --qrels test.qrels\n"
        "isthmus retrieve pydocs test -o dense.run --encoder bge-small",
        _retrieve_arguments,
        _retrieve,
    ),
)
