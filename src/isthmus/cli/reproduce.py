"""`isthmus reproduce` belongs to a separate distribution; until it is installed, this says how to get it."""

from __future__ import annotations

import argparse

from isthmus.cli.command import Command
from isthmus.errors import MissingDistribution


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.prefix_chars = "\0"  # no word is an option here: all go to isthmus-reproduce
    parser.add_argument("arguments", metavar="…", nargs="*", help="as isthmus-reproduce has them")


def _run(options: argparse.Namespace) -> None:
    raise MissingDistribution("isthmus-reproduce", "reproduce", "pip install ./reproduce")


COMMANDS = (
    Command(
        name="reproduce",
        summary="compute a paper's tables and figures: printed, paper mode and sound mode side by side",
        example="isthmus reproduce fedrisk --data mq2008 --scale smoke",
        add_arguments=_arguments,
        run=_run,
    ),
)
