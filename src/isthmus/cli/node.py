"""`isthmus node`: serve one silo."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from isthmus.cli.command import Command, add, add_json, add_serving, add_settings, close, say

if TYPE_CHECKING:
    from isthmus.service import NodeSettings


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_settings(
        parser, "the silo's settings, TOML", example="port=8102, statistics.epsilon=0.5", required=True
    )
    what = parser.add_mutually_exclusive_group()
    add(what, "--index-only", "read the sources, index and encode them, and end")
    about = "take part in training alone, and serve no searches"
    add(what, "--training-only", about)
    add_serving(parser)
    add_json(parser, "{documents, added, changed, removed, errors}")


def _run(arguments: argparse.Namespace) -> None:
    from isthmus.service import read_node

    settings = read_node(arguments.config, arguments.changes)
    if arguments.index_only:
        _index(arguments, settings)
        return
    from isthmus.service import begin, run_node, run_training

    begin(arguments.config, settings, quiet=arguments.quiet, until_eof=arguments.until_eof)
    if arguments.training_only:
        run_training(settings)
        return
    run_node(settings, started=lambda url: say(f"isthmus: silo {settings.silo} listens at {url}"))


def _index(arguments: argparse.Namespace, settings: NodeSettings) -> None:
    """Work on the silo's folder while no node serves it."""
    from isthmus.report import Progress
    from isthmus.service import Node, folder_lock, load_all

    with folder_lock(settings.folder), Node(settings).offline() as node:
        errors: list[Exception] = []
        done = load_all(node.settings.sources, node.store, errors.append, settings.reading)
        for error in errors:
            say(f"isthmus: {error}")
        with Progress("indexing", node.index.behind) as bar:
            node.index.catch_up(bar.advance)
        node.index.compact()
        with Progress("encoding", node.index.unencoded) as bar:
            node.index.encode_all(bar.advance)
        counted = {"added": done.added, "changed": done.changed, "removed": done.removed}
        counts = {"documents": len(node.index.snapshot), **counted, "errors": len(errors)}
    close(arguments, "indexed", counts, [settings.folder], counts)


COMMANDS = (
    Command(
        name="node",
        summary="serve one silo: index its documents and answer searches by its policy",
        example="isthmus node --config north.toml",
        add_arguments=_arguments,
        run=_run,
    ),
)
