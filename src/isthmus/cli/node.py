"""`isthmus node`: serve one silo."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from isthmus.cli.command import Command, add, add_json, add_serving, add_settings, close, say, show
from isthmus.errors import ServiceError, several

if TYPE_CHECKING:
    from isthmus.service import NodeSettings, SourceReport


def _arguments(parser: argparse.ArgumentParser) -> None:
    about = "serve (default); or reload: the node that runs reads silo.toml's sources again"
    add(parser, "verb serve|reload", about, nargs="?", choices=("serve", "reload"), default="serve")
    add_settings(
        parser, "the silo's settings, TOML", example="port=8102, statistics.epsilon=0.5", required=True
    )
    what = parser.add_mutually_exclusive_group()
    add(what, "--index-only", "read the sources, index and encode them, and end")
    about = "take part in training alone, and serve no searches"
    add(what, "--training-only", about)
    add_serving(parser)
    sources = "[{source, documents, unread, errors, skipped, failed}]"
    add_json(parser, f"{{documents, added, changed, removed, errors, sources: {sources}}}")


def _run(arguments: argparse.Namespace) -> int:
    from isthmus.service import read_node

    settings = read_node(arguments.config, arguments.changes)
    if arguments.verb == "reload":
        return _reload(arguments, settings)
    if arguments.index_only:
        return _index(arguments, settings)
    from isthmus.service import begin, run_node, run_training, status_of

    begin(arguments.config, settings, quiet=arguments.quiet, until_eof=arguments.until_eof)
    if arguments.training_only:
        return status_of(lambda: run_training(settings))
    return status_of(
        lambda: run_node(settings, reread=lambda: read_node(arguments.config, arguments.changes))
    )


def _reload(arguments: argparse.Namespace, settings: NodeSettings) -> int:
    """Have the running node read its sources again, as silo.toml names them now. Returns 1 if one fails."""
    from isthmus.service import Reread, ask_node, is_in_use

    if not is_in_use(settings.folder):
        raise ServiceError(f"no node of {settings.folder} runs (isthmus node --config {arguments.config})")
    done = ask_node(settings.folder, "reload", {}, Reread)
    for each in done.sources:
        for line in each.errors:
            say(f"isthmus: {line}")
    rows = [(each.source, each.documents, each.unread, each.failed) for each in done.sources]
    lines = [
        f"{source}: {several(documents, 'document')}"
        + (f", {unread:,} could not be read" if unread else "")
        + (f"; failed: {failed}" if failed else "")
        for source, documents, unread, failed in rows
    ]
    show(arguments, {"sources": [each.model_dump() for each in done.sources]}, "\n".join(lines))
    return 1 if any(each.failed for each in done.sources) else 0


def _index(arguments: argparse.Namespace, settings: NodeSettings) -> int:
    """Index and encode in the silo's folder while no node is running. Returns 1 if a source fails."""
    from isthmus.report import Progress
    from isthmus.service import Node, carry_on, folder_lock, load_all

    with folder_lock(settings.folder), Node(settings).offline() as node:
        carry_on(node)
        errors: list[Exception] = []
        reports: list[SourceReport] = []
        done = load_all(node.settings.sources, node.store, errors.append, settings.reading, reports=reports)
        for error in errors:
            say(f"isthmus: {error}")
        with Progress("indexing", node.index.behind) as bar:
            node.index.catch_up(bar.advance)
        node.index.compact()
        with Progress("encoding", node.index.unencoded) as bar:
            node.index.encode_all(bar.advance)
        counted = {"added": done.added, "changed": done.changed, "removed": done.removed}
        counts = {"documents": len(node.index.snapshot), **counted, "errors": len(errors)}
    for report in reports:
        if report.unread or report.failed or report.skipped:
            say(f"isthmus: {report}")
    record = {**counts, "sources": [asdict(report) for report in reports]}
    close(arguments, "indexed", record, [settings.folder], counts)
    return 1 if any(report.failed for report in reports) else 0


COMMANDS = (
    Command(
        name="node",
        summary="serve one silo: index its documents and answer searches by its policy",
        example="isthmus node --config north.toml\nisthmus node reload --config north.toml",
        add_arguments=_arguments,
        run=_run,
    ),
)
