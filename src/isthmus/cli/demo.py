"""`isthmus demo`: the main task as a story, then a running federation that learns and can be searched."""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import PORT, Command, add, add_json, print_json, say, say_command, whole
from isthmus.errors import ConfigError, check_extra

if TYPE_CHECKING:
    from isthmus.demo import SearchOutcome, Story
    from isthmus.service import Federation

REPORT = "report.html"


def _arguments(parser: argparse.ArgumentParser) -> None:
    where = Path("out/demo")
    end = parser.add_mutually_exclusive_group()
    add(end, "--headless", "open no browser; end the processes when all is measured")
    add(end, "--serve", "serve the search until interrupted (only in a terminal, unless this is given)")
    add(parser, "--only", "the one part alone", choices=("story", "search"))
    add(parser, "--port", "the broker's; silos have those after it (any that are free)", type=PORT)
    add(parser, "--out DIR", "where report and federation go (%(default)s)", type=Path, default=where)
    add(parser, "--seed", "of all that is drawn in the story (%(default)s)", type=whole(0), default=0)
    add_json(
        parser,
        "{rankings: [{run, measure, value, queries, low, high, better_than}], search: {url, model, adopted, "
        "before, after, difference, ece, floor, nobodys, departures, …}}",
    )


def _run(arguments: argparse.Namespace) -> None:
    check_extra("train,plots", "the demonstration", "flwr", "matplotlib")
    from isthmus import demo

    began, story = time.monotonic(), None
    if arguments.out.is_file():
        raise ConfigError(f"{arguments.out} is a file", key="--out", expected="a folder")
    arguments.out.mkdir(parents=True, exist_ok=True)  # fail before minutes of work
    if arguments.only != "search":
        story = demo.tell(seed=arguments.seed)
        if not arguments.json:
            print(f"\nThe ways of searching side by side\n{story.table}", flush=True)
    if arguments.only == "story":
        _close(arguments, began, story)
        return
    demo.say("\nOne search box", bold=True)
    with demo.searched(arguments.out, port=arguments.port, tell=demo.say) as (federation, outcome):
        for section in demo.sections(outcome):
            demo.say_section(section)
        _close(arguments, began, story, federation, outcome)
        if arguments.serve or (_in_terminal() and not (arguments.headless or arguments.json)):
            _serve(federation)
            return
    say("the search has ended with this; to start it again:")
    say_command(f"{_program()} demo --only search --serve --out {shlex.quote(str(arguments.out))}")


def _close(
    arguments: argparse.Namespace,
    began: float,
    story: Story | None,
    federation: Federation | None = None,
    outcome: SearchOutcome | None = None,
) -> None:
    """Save the report, and print its numbers with --json."""
    from isthmus.demo import figures, save_report
    from isthmus.report import summary

    pages = save_report(arguments.out / REPORT, story, outcome)
    result: dict[str, Any] = {} if story is None else {"rankings": story.comparison.rows()}
    if outcome is not None and federation is not None:
        result["search"] = {"url": federation.url, **figures(outcome)}
    if arguments.json:
        print_json(result)
        sys.stdout.flush()
    wrote = [*pages, *([] if federation is None else [federation.folder])]
    say("")
    summary("demo", {"time": f"{time.monotonic() - began:.0f} s"}, wrote=wrote)


def _in_terminal() -> bool:
    """Whether standard input and standard error are terminals, so that a person can interrupt."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _serve(federation: Federation) -> None:
    """Serve until Ctrl-C, which is the intended end, or until the broker or all silos have ended."""
    from isthmus.demo import QUERIES, open_page

    say(f"\nsearch at  {federation.link}\nor with")
    key = shlex.quote(str(federation.key))
    say_command(f'  {_program()} search "{QUERIES[0]}" --broker {federation.url} --key {key}')
    say("Ctrl-C ends the four nodes and the broker.")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    open_page(federation.link)
    reported: set[str] = set()
    try:
        while True:
            time.sleep(1.0)
            for name, why in federation.check_serving().items():
                if name not in reported:
                    say(f"{why}; the other silos go on")
                    reported.add(name)
    except KeyboardInterrupt:
        say("\nended")


def _program() -> str:
    """The command `isthmus` for this shell: a path if it belongs to an environment that is not active."""
    return "isthmus" if shutil.which("isthmus") else shlex.quote(sys.argv[0])


COMMANDS = (
    Command(
        "demo",
        "show Isthmus at work on the built-in world: a story, then a federation that learns, and its page",
        "isthmus demo --headless",
        _arguments,
        _run,
    ),
)
