"""The command line: parse, call, print.

Commands live in one module per group, as a tuple `COMMANDS`; a new group is one more line in `GROUPS`.
Exit status: 0 done, 1 a foreseen failure told in one line on stderr, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from isthmus import __version__
from isthmus.cli.command import Command
from isthmus.errors import IsthmusError

GROUPS = ("demo", "data", "fuse", "train", "rank", "ledger", "reproduce", "doctor")
"""The modules of this folder that hold commands, in the order of `isthmus --help`."""


def commands() -> tuple[Command, ...]:
    """Every command, in the order it is listed."""
    modules = [import_module(f"isthmus.cli.{group}") for group in GROUPS]
    return tuple(command for module in modules for command in module.COMMANDS)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="isthmus",
        description="Search and ranking across data silos that may not share their data.",
        epilog="isthmus COMMAND --help tells more, with an example.",
    )
    top.add_argument("--version", action="version", version=f"isthmus {__version__}")
    verbs = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in commands():
        verb = verbs.add_parser(
            command.name,
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(verb)
        verb.set_defaults(run=command.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        asked = parser().parse_args(arguments)
        status = asked.run(asked) or 0
        sys.stdout.flush()  # so that a closed pipe shows here and not when the interpreter ends
        return int(status)
    except IsthmusError as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        print("isthmus: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing is left to flush
        return 141
    except OSError as error:
        if error.filename is None:  # not about a file somebody named: a fault of ours, told in full
            raise
        return _failed(f"{error.filename}: {error.strerror}")


def _failed(problem: str) -> int:
    print(f"isthmus: {' '.join(problem.split())}", file=sys.stderr)
    return 1
