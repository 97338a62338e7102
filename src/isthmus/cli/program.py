"""The command line: parse, call, print.

Commands are in one module per group, as a tuple `COMMANDS`; a new group is one more line in `GROUPS`.
Other distributions add commands as entry points of the group `isthmus.commands`, each such a tuple.
Exit status: 0 done, 1 a foreseen failure reported on stderr, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn, TextIO

from isthmus import __version__
from isthmus.cli.command import Command, say
from isthmus.errors import IsthmusError, nearest
from isthmus.report import show_lines

GROUPS = (
    "demo",
    "data",
    "fuse",
    "classify",
    "features",
    "train",
    "coordinate",
    "rank",
    "csfltr",
    "sketch",
    "encoder",
    "keys",
    "ledger",
    "audit",
    "node",
    "attach",
    "broker",
    "mcp",
    "judgements",
    "documents",
    "learn",
    "calibrate_endpoint",
    "reproduce",
    "doctor",
)
"""The modules of this folder that contain commands, in the order of `isthmus --help`."""
BROUGHT = "isthmus.commands"
"""Group of the entry points by which other distributions add commands."""
PLACEHOLDERS = ("reproduce",)
"""Commands that only say which distribution provides them."""


class Verb(argparse.ArgumentParser):
    """A command's parser: options may be placed between files (`fuse a.run -m rrf b.run`) and before the
    verb."""

    _mixing = False
    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse options and files in any order, as the standard library does for whole programs; nested verbs
        keep their order.

        That method of the standard library loses a `--`, so arguments with one are parsed in order. Unknown
        arguments are refused here, so that the verb's own usage is shown.
        """
        if self._mixing:
            return super().parse_known_args(args, namespace)
        args = self._words = self._verb_first(list(args or ()))
        if self._subparsers is not None:
            if not args:  # a command with verbs, called without one
                self.print_help()
                self.exit()
            return super().parse_known_args(args, namespace)
        if "--" in args:
            parsed, unknown = super().parse_known_args(args, namespace)
        else:
            self._mixing = True
            try:
                parsed, unknown = self.parse_known_intermixed_args(args, namespace)
            finally:
                self._mixing = False
        if unknown:
            self.error(f"unexpected: {' '.join(unknown)}")
        return parsed, unknown

    def _verb_first(self, args: list[str]) -> list[str]:
        """Move options from before a verb to its end, as in `isthmus --json doctor`; the parser's own options
        stay."""
        if self._subparsers is None or not args or not args[0].startswith("-"):
            return args
        if args[0] in self._option_string_actions:
            return args
        verbs = self._subparsers._group_actions[0].choices or ()
        at = next((at for at, word in enumerate(args) if word in verbs), None)
        if at is None:
            return args
        end = args.index("--", at) if "--" in args[at:] else len(args)
        return [*args[at:end], *args[:at], *args[end:]]

    def error(self, message: str) -> NoReturn:
        """End with an error message. For an unknown option it suggests the most similar one; for missing
        arguments, the option that may have consumed them. Usage is not printed for a wrong value."""
        words = self._words[: self._words.index("--")] if "--" in self._words else self._words
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        ours = self._subparsers is None or all(word.startswith("-") for word in words)  # no verb's options
        for name in names:
            if ours and not any(each.startswith(name) for each in known):
                meant = nearest(name, known)
                cure = f"did you mean {meant}?" if meant else f"{self.prog} --help lists what there is"
                message = f"there is no {name}; {cure}"
                break
        many = {name for each in self._actions if each.nargs == "+" for name in each.option_strings}
        greedy = [word for word in words if word in many]
        if greedy and "are required" in message:
            message += f" (if {greedy[0]} took them, put them before it, or -- between)"
        if self._takes_for_option(message, words):
            message += " (for a query with -word, put -- before it, or quote the whole query)"
        if not message.startswith("argument "):
            self.print_usage(sys.stderr)
        say(f"{self.prog}: error: {message}")
        self.exit(2)

    def _takes_for_option(self, message: str, words: Sequence[str]) -> bool:
        """Whether an error may come from a query's -word, which was read as an option."""
        excluded = [word for word in words if re.match(r"-[^\W\d_]{2}", word)]
        asks = any(action.dest == "query" for action in self._actions)
        at_fault = (each in message or f"{each[2:]!r}" in message for each in excluded)
        return asks and bool(excluded) and (any(at_fault) or "are required" in message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an error for an unknown value or command, suggesting the most similar one."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        meant, are_verbs = nearest(str(value), choices), isinstance(action, argparse._SubParsersAction)
        listed = f"{self.prog} --help lists what there is" if are_verbs else f"one of {', '.join(choices)}"
        cure = f"did you mean {meant}?" if meant else listed
        raise argparse.ArgumentError(None if are_verbs else action, f"there is no {value!r}; {cure}")


def commands(verb: str | None = None) -> tuple[Command, ...]:
    """All commands in the order of the help.

    Entry points are not read if `verb` is a command of this distribution, since that takes a twentieth of a
    second.
    """
    modules = [import_module(f"isthmus.cli.{group}") for group in GROUPS]
    own = {command.name: command for module in modules for command in module.COMMANDS}
    if verb in own and verb not in PLACEHOLDERS:
        return tuple(own.values())
    return tuple((own | {command.name: command for command in _brought()}).values())


def _brought() -> Iterator[Command]:
    """The commands of other distributions; one that cannot be imported is skipped."""
    from importlib.metadata import entry_points

    for point in entry_points(group=BROUGHT):
        with suppress(ImportError):
            yield from point.load()


def parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line; `verb` is the command that is about to run, if known."""
    top = Verb(
        prog="isthmus",
        description="Search and ranking across data silos that may not share their data.",
        epilog="isthmus COMMAND --help tells more, with an example.",
    )
    top.add_argument("--version", action="version", version=f"isthmus {__version__}")
    verbs = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Verb)
    for command in commands(verb):
        command.add_to(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _make_safe()
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        arguments = parser(words[0] if words else None).parse_args(words)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            show_lines(not hasattr(arguments, "until_eof"))  # a server's log is read by programs
            status = arguments.run(arguments) or 0
        sys.stdout.flush()  # so that a closed pipe raises here and not when the interpreter ends
        return int(status)
    except IsthmusError as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        print("isthmus: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _forget_stdout()
        return 141
    except OSError as error:
        if error.filename is not None:
            return _failed(f"{error.filename}: {error.strerror}")
        if error.errno not in _FULL:  # no named file, so a bug: show the traceback
            raise
        _forget_stdout()
        return _failed(f"the output cannot be written: {error.strerror}")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _make_safe() -> None:
    """Handle a closed stdout and a terminal that lacks characters, and exit cleanly on SIGTERM."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # it lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _forget_stdout() -> None:
    """Redirect stdout to nowhere, so that the interpreter has nothing to flush when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a FutureWarning, which concerns names that the user typed, as one line; others with their place in
    the code."""
    if issubclass(category, FutureWarning):
        say(f"isthmus: {' '.join(str(message).split())}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _failed(problem: str) -> int:
    say(f"isthmus: {' '.join(problem.split())}")
    return 1
