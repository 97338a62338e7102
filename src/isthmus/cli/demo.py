"""`isthmus demo`: the main job, told as a story."""

from __future__ import annotations

import argparse
from pathlib import Path

from isthmus.cli.command import Command, add_json, print_json


def _arguments(parser: argparse.ArgumentParser) -> None:
    where = Path("out/demo")
    parser.add_argument("--headless", action="store_true", help="open no browser, end with the story")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=where, help="where the report goes (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of all that is drawn (%(default)s)")
    add_json(parser, "a list of {run, measure, value, queries, low, high, better_than}")


def _run(asked: argparse.Namespace) -> None:
    from isthmus.demo import tell

    told = tell(out=asked.out, seed=asked.seed, browser=not (asked.headless or asked.json))
    if asked.json:
        print_json(told.rows)
    else:
        print(told.table)


COMMANDS = (
    Command(
        "demo",
        "show Isthmus at work on the built-in world, within a minute",
        "isthmus demo --headless",
        _arguments,
        _run,
    ),
)
