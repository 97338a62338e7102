"""Write docs/cli.md from the parser itself: `python docs/cli_page.py`.

The page is rendered from the parser's actions, not from argparse's help text, whose layout changes between
Python versions and with the width of the terminal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from isthmus.cli import commands

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Generated from the parser by `make docs`.

`isthmus --version` prints the version and `isthmus COMMAND --help` what stands here. stdout is data, stderr
is talk; `--json` prints data for programs. Options may stand before or after a command and between files, and
`isthmus` alone prints help. Tables and texts fit the terminal, 80 columns where there is none (COLUMNS sets
another width); long work shows a bar in a terminal and a line at times elsewhere; NO_COLOR is heeded. Exit
status: 0 done, 1 a failure told in one line (folded on a terminal), 2 wrong usage, 130 interrupted.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for command in commands():
        parser = argparse.ArgumentParser(prog=f"isthmus {command.name}")
        command.fill(parser)
        summary = command.summary[0].upper() + command.summary[1:] + "."
        parts.append(f"## isthmus {command.name}\n\n{summary}\n\n```sh\n{command.example}\n```\n")
        parts.append("\n".join(_arguments(parser)))
    return "\n".join(parts).rstrip() + "\n"


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table of the arguments, then those of the verbs below."""
    yield from ("| argument | meaning |", "|---|---|")
    below: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            names = ", ".join(f"`{name}`" for name in below)
            yield f"| {names} | {_cell(action.help or 'what to do')} |"
            continue
        yield f"| {_name(action)} | {_meaning(action)} |"
    yield ""
    for name, inner in below.items():
        yield f"### {parser.prog} {name}\n"
        if inner.description:
            yield f"{inner.description}\n"
        yield from _arguments(inner)


def _name(action: argparse.Action) -> str:
    shown = action.metavar or (action.choices and "|".join(map(str, action.choices))) or action.dest.upper()
    value = "" if action.nargs == 0 else _repeated(str(shown), action.nargs)
    if not action.option_strings:
        return f"`{value}`".replace("|", "\\|")
    return f"`{', '.join(action.option_strings)}{' ' if value else ''}{value}`".replace("|", "\\|")


def _repeated(shown: str, nargs: int | str | None) -> str:
    return {"?": f"[{shown}]", "*": f"[{shown} …]", "+": f"{shown} …"}.get(str(nargs), shown)


def _meaning(action: argparse.Action) -> str:
    told = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    repeatable = isinstance(action, (argparse._AppendAction, argparse._ExtendAction))
    return _cell(told + (" (may be repeated)" if repeatable and "repeat" not in told else ""))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
