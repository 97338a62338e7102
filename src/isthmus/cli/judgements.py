"""`isthmus judgements`: import and export judgements by files, through a broker or in one silo."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.broker import URL_VARIABLE
from isthmus.cli.command import Command, add, add_json, close, say
from isthmus.errors import ConfigError, DataError, plain, several

if TYPE_CHECKING:
    from isthmus.service import Client, DocumentStore, Imported, NamedJudgement, NodeSettings

NAMED = 10
"""Maximum number of documents that a message names."""
_IMPORT = """isthmus judgements import judged.csv --broker http://127.0.0.1:8100 --key broker/admin.key
isthmus judgements import qrels.txt --queries queries.tsv --least-grade 2 --key broker/admin.key
isthmus judgements import qrels.txt --queries queries.jsonl --config north/silo.toml"""
_EXPORT = """isthmus judgements export -o judged.csv --key broker/admin.key
isthmus judgements export -o judged --config north/silo.toml --rows"""


def add_broker(parser: argparse.ArgumentParser, key: str) -> None:
    """Add the options for connecting to a broker; `key` describes the API key to give."""
    add(parser, "--broker URL", f"the broker's address ({URL_VARIABLE}, else http://127.0.0.1:8100)")
    add(parser, "--key FILE", f"the file of {key} (or ISTHMUS_API_KEY)")
    add(parser, "--authority FILE", "the certificate the broker's comes from (or ISTHMUS_AUTHORITY)")


def _where(parser: argparse.ArgumentParser) -> None:
    add_broker(parser, "an administrator's API key")
    add(parser, "--config FILE", "no broker: the silo of these settings, on its own machine, by its operator")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "file FILE", "TREC qrels, or .csv with the columns query,document,relevant[,silo]")
    about = "the queries of qrels: id, tab, text; or BEIR's .jsonl (queries.jsonl or .tsv beside them)"
    add(parser, "--queries FILE", about)
    about = "a grade of at least this is relevant (%(default)s)"
    add(parser, "--least-grade GRADE", about, type=int, default=1)
    add(
        parser,
        "--silo NAME",
        "judge the documents of this silo only; without it every silo is asked which ones it has",
    )
    add(parser, "--by NAME", "with --config: whose judgements they are (%(default)s)", default="operator")
    _where(parser)
    add_json(parser, "{judgements, added, changed, unchanged, unknown, ambiguous, unplaced, unanswered}")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "-o --out OUT", "a .csv file, or a folder for queries.jsonl and qrels.txt", required=True)
    add(parser, "--silos A,B", "only these silos")
    about = "with --config, while the node does not serve: also each retriever's run, and feature rows"
    add(parser, "--rows", about)
    _where(parser)
    add_json(parser, "{out, queries, judgements}; with --rows also rows")


def _import(arguments: argparse.Namespace) -> int:
    from isthmus.service import read_judgements

    judgements = read_judgements(
        arguments.file, queries=arguments.queries, least_grade=arguments.least_grade, silo=arguments.silo
    )
    done = _import_here(arguments, judgements) if arguments.config else _import_there(arguments, judgements)
    _explain(done, judgements, arguments.silo)
    record: dict[str, Any] = {"judgements": len(judgements), **done.model_dump()}
    for name in ("unknown", "unplaced"):
        record[name] = [_named(judgements[at]) for at in record[name]]
    record["ambiguous"] = [{**_named(judgements[at]), "silos": silos} for at, silos in done.ambiguous.items()]
    counts = {name: f"{record[name]:,}" for name in ("judgements", "added", "changed", "unchanged")}
    missing = len(done.unknown) + len(done.ambiguous) + len(done.unplaced)
    close(arguments, "judgements", record, facts={**counts, "left out": f"{missing:,}"})
    return 1 if done.unplaced or missing == len(judgements) else 0


def _import_there(arguments: argparse.Namespace, judgements: Sequence[NamedJudgement]) -> Imported:
    from isthmus.report import Progress

    with broker_client(arguments) as broker, Progress("judgements", len(judgements)) as bar:
        return broker.import_judgements(judgements, progress=bar.advance)


def _import_here(arguments: argparse.Namespace, judgements: Sequence[NamedJudgement]) -> Imported:
    """Import into the operator's own silo, whether or not its node is running."""
    from isthmus.service import OPERATOR, import_judgements

    settings, store = silo_store(arguments)
    try:
        if arguments.silo not in (None, settings.silo):
            raise ConfigError(
                f"{arguments.config} is of the silo {settings.silo}", key="--silo", value=arguments.silo
            )
        here = {each.document for each in judgements if each.silo in (None, settings.silo)}
        ids = {id: id for id in store.present(here)}
        return import_judgements(store, judgements, ids, peer=OPERATOR, person=arguments.by)
    finally:
        store.close()


def silo_store(arguments: argparse.Namespace) -> tuple[NodeSettings, DocumentStore]:
    """The settings of --config and the silo's store, whether or not its node is running."""
    from isthmus.service import open_store, read_node

    settings = read_node(arguments.config)
    if settings.store.kind == "sqlite" and not (settings.folder / "documents.db").exists():
        raise DataError(
            "this silo has no documents yet",
            file=settings.folder,
            cure=f"isthmus node --config {arguments.config} --index-only reads its sources",
        )
    return settings, open_store(settings)


def broker_client(arguments: argparse.Namespace) -> Client:
    """A client for the broker named by the options of `add_broker`."""
    from isthmus.service import Client

    return Client(**broker_options(arguments))


def broker_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a client, from the options of `add_broker`."""
    from isthmus.service import DEFAULT_URL

    url = arguments.broker or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    key = Path(arguments.key) if arguments.key else None
    return {"url": url, "key": key, "authority": arguments.authority}


def _named(judgement: NamedJudgement) -> dict[str, str]:
    return {"query": judgement.query, "document": judgement.document}


def _explain(done: Imported, judgements: Sequence[NamedJudgement], silo: str | None) -> None:
    """Report which judgements were left out, and why."""
    for name, reason in done.unanswered.items():
        say(f"isthmus: {plain(name)}: {plain(reason)}")
    nowhere = f"{plain(silo)} has not" if silo else "no silo has"
    remarks = (
        (done.unknown, f"of documents that {nowhere}: check the ids against those of hits"),
        (list(done.ambiguous), "of documents that several silos have: name the silo (--silo, or a column)"),
        (done.unplaced, "whose documents no silo that answered has: run this again when all do"),
    )
    for places, reason in remarks:
        if places:
            names = list(dict.fromkeys(judgements[at].document for at in places))
            more = ", … (--json has all)" if len(names) > NAMED else ""
            listed = ", ".join(plain(name) for name in names[:NAMED])
            say(f"isthmus: {several(len(places), 'judgement')} {reason}: {listed}{more}")


def _export(arguments: argparse.Namespace) -> None:
    from isthmus.service import exported_judgements, note_export, write_judgements

    if arguments.rows:
        _export_rows(arguments)
        return
    if arguments.config:
        settings, store = silo_store(arguments)
        try:
            judgements = exported_judgements(store.judgements(), settings.silo)
        finally:
            store.close()
    else:
        silos = None if arguments.silos is None else [each.strip() for each in arguments.silos.split(",")]
        with broker_client(arguments) as broker:
            judgements = broker.export_judgements(silos)
    if not judgements:
        raise DataError("nobody has judged a document yet", cure="say right or wrong to hits, or import some")
    wrote = write_judgements(judgements, arguments.out)
    if arguments.config:
        note_export(settings, arguments.out)
    queries = len({each.query for each in judgements})
    record = {"out": arguments.out, "queries": queries, "judgements": len(judgements)}
    close(arguments, "judgements", record, wrote)


def _export_rows(arguments: argparse.Namespace) -> None:
    from isthmus.service import Node, export_rows, folder_lock, note_export, read_node

    if not arguments.config:
        raise ConfigError("feature rows do not leave a silo", key="--rows", expected="--config silo.toml")
    settings = read_node(arguments.config)
    with folder_lock(settings.folder), Node(settings).offline() as node:
        counts = export_rows(node.searcher, arguments.out)
        note_export(settings, arguments.out)
    wrote = [Path(arguments.out) / name for name in ("queries.jsonl", "qrels.txt", "rows.txt")]
    close(arguments, "judgements", {"out": arguments.out, **counts}, wrote)


_VERBS = (
    Command(
        "import", "bring judgements to the silos that have the documents", _IMPORT, _import_arguments, _import
    ),
    Command("export", "write judgements to files", _EXPORT, _export_arguments, _export),
)
COMMANDS = (
    Command(
        "judgements",
        "import and export judgements of documents, which silos learn from",
        "isthmus judgements import judged.csv --key broker/admin.key",
        verbs=_VERBS,
    ),
)
