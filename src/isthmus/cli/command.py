"""What a command is, and how commands speak: stdout is data, stderr is talk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """One verb of the command line.

    `add_arguments` fills the verb's own parser; `run` does the work and returns the exit status, None
    meaning 0. Whatever `run` needs beyond the standard library it imports itself, so that the other
    verbs and `--help` start at once. `example` is a line or more that a reader can
    paste.
    """

    name: str
    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]


def add_json(parser: argparse.ArgumentParser, shape: str) -> None:
    """The switch every command has; `shape` says what its JSON looks like."""
    parser.add_argument("--json", action="store_true", help=f"print JSON instead: {shape}")


def add_settings(parser: argparse.ArgumentParser, about: str, *, example: str, required: bool) -> None:
    """A TOML file, and changes to it on the command line."""
    parser.add_argument("--config", metavar="FILE", required=required, help=about)
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help=f"{example}, and so on",
    )


def add_serving(parser: argparse.ArgumentParser) -> None:
    """How a command that serves is run by people and by programs."""
    parser.add_argument("--quiet", action="store_true", help="no line for every request in the log")
    parser.add_argument(
        "--until-eof", action="store_true", help="end when stdin ends too, that is with the program behind it"
    )


def print_json(value: object) -> None:
    """Data for a program, on stdout. NaN has no JSON form and becomes null."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False))


def say(text: str) -> None:
    """Talk for a person, on stderr."""
    print(text, file=sys.stderr)


def whole(low: int) -> Callable[[str], int]:
    """An argument type: a whole number of at least `low`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < low:
            raise ValueError(text)
        return number

    parse.__name__ = f"whole number from {low}"  # argparse shows it: "invalid whole number from 1 value"
    return parse


def output(text: str) -> str:
    """An argument type: a file to write, "-" being stdout."""
    return "/dev/stdout" if text == "-" else text


def finite(value: object) -> object:
    """A value for JSON, which has no NaN and no infinity: null in their place."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
