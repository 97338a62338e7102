"""The form of a command and of its output: data on stdout, messages on stderr."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError, plain

if TYPE_CHECKING:
    from isthmus.report import Table, Tracker

EXAMPLE = "example:"
_STEERING = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that could control a terminal and that JSON does not escape."""


class _Help(argparse.HelpFormatter):
    """Help in which descriptions are wrapped to the terminal's width, and examples with backslashes, ready to
    paste."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if not text.startswith(EXAMPLE):
            return super()._fill_text(text, width, indent)
        return "\n".join(_continued(line, width) for line in text.splitlines())


def _continued(line: str, width: int) -> str:
    """Wrap a command to lines of this width, continued with backslashes; quoted words stay whole."""
    lines = [""]
    for word in re.findall(r"\s*(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+", line):
        if len(lines[-1]) + len(word) > width - 2 and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("      " + word.strip())
        else:
            lines[-1] += word
    return "\n".join(lines)


@dataclass(frozen=True)
class Command:
    """A command of `isthmus`, with its own arguments or with `verbs`, which are commands themselves.

    `add_arguments` adds arguments to the command's parser; `run` does the work and returns the exit status,
    None meaning 0. `run` itself imports what it needs beyond the standard library, so that other commands and
    `--help` start at once. `example` is one line or more that a reader can paste.
    """

    name: str
    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    run: Callable[[argparse.Namespace], int | None] = lambda arguments: None
    verbs: tuple[Command, ...] = ()

    def add_to(self, table: argparse._SubParsersAction[Any]) -> None:
        """Add a parser for the command, with help that shows the example."""
        own = table.add_parser(
            self.name,
            help=self.summary,
            description=self.summary[0].upper() + self.summary[1:] + ".",
            epilog="\n  ".join((EXAMPLE, *self.example.splitlines())),
            formatter_class=_Help,
        )
        self.fill(own)

    def fill(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments, and the parsers of the verbs."""
        self.add_arguments(parser)
        if not self.verbs:
            parser.set_defaults(run=self.run)
            return
        inner = parser.add_subparsers(metavar="VERB", required=True, help="what to do")
        for verb in self.verbs:
            verb.add_to(inner)


def add(parser: argparse._ActionsContainer, names: str, about: str, **settings: Any) -> None:
    """Add an argument, named as the help shows it: `-o --out FILE`, or `runs RUN` for a positional one.

    Without a metavar and without settings it is a switch.
    """
    words = names.split()
    flags = [word for word in words if word.startswith("-")] or words[:1]
    if len(words) > len(flags):
        settings["metavar"] = words[-1]
    elif not settings:
        settings["action"] = "store_true"
    parser.add_argument(*flags, help=about, **settings)


def add_json(parser: argparse.ArgumentParser, shape: str) -> None:
    """Add the switch --json; `shape` describes the JSON."""
    add(parser, "--json", f"print JSON instead: {shape}")


def add_per_query(parser: argparse.ArgumentParser) -> None:
    """Add the option of a file for the measures of every query."""
    columns = "experiment, data, fold, seed, method, query, measure, value"
    about = f"also write the values of every query there, .csv or .parquet: {columns}"
    add(parser, "--per-query FILE", about, type=to_write)


def add_trackers(parser: argparse.ArgumentParser) -> None:
    """Add the options of trackers, which receive measures while a command runs."""
    add(parser, "--tensorboard DIR", "also write event files for TensorBoard, in a folder a run below DIR")
    about = "also keep a run in MLflow, where MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say"
    add(parser, "--mlflow", about)


def trackers_of(arguments: argparse.Namespace) -> list[Tracker]:
    """The trackers selected by the options of `add_trackers`."""
    from isthmus.report import MLflow, TensorBoard

    if arguments.tensorboard and Path(arguments.tensorboard).is_file():
        raise ConfigError(f"{arguments.tensorboard} is a file", key="--tensorboard", expected="a folder")
    trackers: list[Tracker] = [TensorBoard(arguments.tensorboard)] if arguments.tensorboard else []
    return [*trackers, MLflow()] if arguments.mlflow else trackers


def add_settings(parser: argparse.ArgumentParser, about: str, *, example: str, required: bool) -> None:
    """Add the options of a TOML file and of changes to its settings."""
    add(parser, "--config FILE", about, required=required)
    add(parser, "--set KEY=VALUE", f"{example}, and so on", dest="changes", action="append", default=[])


def add_serving(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that serve until interrupted."""
    add(parser, "--quiet", "no line for every request in the log")
    add(parser, "--until-eof", "end when stdin ends too, that is with the program behind it")


def print_json(value: object) -> None:
    """Print data as JSON on stdout; NaN and infinities become null."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False)
    print(_STEERING.sub(lambda sign: f"\\u{ord(sign[0]):04x}", text))


def close(
    options: argparse.Namespace,
    title: str,
    result: Any,
    wrote: Sequence[object] = (),
    facts: Mapping[str, object] | None = None,
) -> None:
    """End a command: print its result with --json, and a summary unless a terminal has shown the result
    already.

    By default the facts are those of the result without the first, which is the file.
    """
    from isthmus.report import summary

    if options.json:
        print_json(result)
    if facts is None:
        facts = {name: value if isinstance(value, str) else f"{value:,}" for name, value in result.items()}
        facts.pop(next(iter(facts)))
    if not (options.json and sys.stdout.isatty()):  # on a terminal, the JSON has shown everything
        summary(title, facts, wrote=[str(path) for path in wrote if path])


def show(options: argparse.Namespace, result: object, text: str | Table) -> None:
    """Print a command's output: its result with --json, otherwise the text or table."""
    print_json(result) if options.json else print(text if isinstance(text, str) else fitted(text))


def folded(text: str, hang: int = 0) -> str:
    """Wrap lines to the terminal's width; continuation lines are indented."""
    fold = partial(textwrap.wrap, width=_width(), break_on_hyphens=False, break_long_words=False)
    lines = [(line, " " * (hang or len(line) - len(line.lstrip()) + 2)) for line in text.split("\n")]
    return "\n".join("\n".join(fold(line, subsequent_indent=indent)) for line, indent in lines)


def fitted(table: Table) -> str:
    """Format a table to the terminal's width, with the best values in bold if stdout is a terminal."""
    return table.text(bold=sys.stdout.isatty() and not os.environ.get("NO_COLOR"), width=_width())


def _width() -> int:
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def say(text: str) -> None:
    """Print a message on stderr, wrapped if that is a terminal or COLUMNS is set."""
    text = "\n".join(map(plain, text.split("\n")))
    fits = sys.stderr.isatty() or "COLUMNS" in os.environ
    print(folded(text) if fits else text, file=sys.stderr)


def say_command(command: str) -> None:
    """Print a command to paste on stderr, wrapped with backslashes."""
    print(_continued(plain(command), _width()), file=sys.stderr)


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Argument type: a whole number of at least `low`, and at most `high` if that is given."""
    bounds = f"from {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        digits = text.isascii() and text.strip().lstrip("+").isdigit()
        if not digits or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text!r}")
        return int(text)

    return parse


PORT = whole(1, 65_535)
"""Argument type: a port."""


def probability(text: str) -> float:
    """Argument type: a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return number


def to_write(text: str) -> str:
    """Argument type: a file to write; refused before any work if its folder does not exist."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file to write, but {text} is a folder")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path.name} to")
    return text


def output(text: str) -> str:
    """Argument type: a file to write, "-" for stdout."""
    return "/dev/stdout" if text == "-" else to_write(text)


def finite(value: object) -> object:
    """Replace NaN and infinities, which JSON does not have, by None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
