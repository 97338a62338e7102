"""`isthmus demo`: the main job, told as a story, and then to be tried."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.command import Command, add, add_json, print_json, say, show, whole
from isthmus.errors import check_extra

if TYPE_CHECKING:
    from isthmus.service import Federation


def _arguments(parser: argparse.ArgumentParser) -> None:
    where = Path("out/demo")
    end = parser.add_mutually_exclusive_group()
    add(end, "--headless", "open no browser; try the search, end all, say how it went")
    add(end, "--serve", "serve the search until interrupted (only in a terminal, unless this is given)")
    add(parser, "--only", "the one part alone", choices=("story", "search"))
    add(parser, "--port", "the broker's; silos have those after it (some that are free)", type=whole(1))
    add(parser, "--out DIR", "where report and federation go (%(default)s)", type=Path, default=where)
    add(parser, "--seed", "of all that is drawn (%(default)s)", type=whole(0), default=0)
    add_json(
        parser,
        "a list of {run, measure, value, queries, low, high, better_than}; with --only search {url, checks}",
    )


def _run(arguments: argparse.Namespace) -> None:
    check_extra("train,plots", "the demonstration", "flwr", "matplotlib")
    if arguments.only != "search":
        _story(arguments)
    if arguments.only != "story":
        _search(arguments)


def _story(arguments: argparse.Namespace) -> None:
    from isthmus.demo import tell

    story = tell(out=arguments.out, seed=arguments.seed)
    show(arguments, story.rows, story.table)
    sys.stdout.flush()


def _search(arguments: argparse.Namespace) -> None:
    from isthmus.demo import searched, tried
    from isthmus.report import summary

    with searched(arguments.out, seed=arguments.seed, port=arguments.port) as federation:
        seen = tried(federation)
        summary("search across four silos", seen, wrote=[federation.folder])
        if arguments.json and arguments.only == "search":
            print_json({"url": federation.url, "checks": seen})
            sys.stdout.flush()
        if arguments.serve or (_in_terminal() and not (arguments.headless or arguments.json)):
            _serve(federation)
            return
    again = f"isthmus demo --only search --serve --out {shlex.quote(str(arguments.out))}"
    say(f"the search has ended with this; to start it again, and its page: {again}")


def _in_terminal() -> bool:
    """Whether standard input and standard error are terminals, so that a person can interrupt."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _serve(federation: Federation) -> None:
    """Until Ctrl-C, which is how this is meant to end, or until a process ends by itself."""
    from isthmus.demo import open_page

    say(f"\nsearch at   {federation.link}")
    say(f'or with     isthmus search "invert a matrix" --broker {federation.url} --key {federation.key}')
    say("Ctrl-C ends the four nodes and the broker.")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    open_page(federation.link)
    try:
        while True:
            time.sleep(1.0)
            federation.check()
    except KeyboardInterrupt:
        say("\nended")


COMMANDS = (
    Command(
        "demo",
        "show Isthmus at work on the built-in world: a story in a minute, then a search page",
        "isthmus demo --headless",
        _arguments,
        _run,
    ),
)
