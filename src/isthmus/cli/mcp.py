"""The command `mcp`: search for assistants, over stdin and stdout."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from isthmus.cli.command import Command, add_json, print_json, say
from isthmus.cli.judgements import add_broker, broker_options

PROGRAM = "isthmus"


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_broker(parser, "your API key")
    add_json(parser, "{mcpServers: {isthmus: {command, args}}}, what an assistant's configuration needs")


def _mcp(arguments: argparse.Namespace) -> None:
    from isthmus.service import AsyncClient, serve_stdio

    client = AsyncClient(**broker_options(arguments))
    if arguments.json:
        print_json({"mcpServers": {PROGRAM: _entry(arguments, client.url)}})
        return
    serve_stdio(client, started=lambda tools: say(f"isthmus: {client.url} by MCP: {', '.join(tools)}"))


def _entry(arguments: argparse.Namespace, url: str) -> dict[str, object]:
    """The command by which an assistant starts this one from any folder; a key in the environment is not
    copied."""
    files = {"--key": arguments.key, "--authority": arguments.authority}
    options = [word for name, file in files.items() if file for word in (name, str(Path(file).resolve()))]
    program = shutil.which(PROGRAM)
    command = [program] if program else [sys.executable, "-m", PROGRAM]
    return {"command": command[0], "args": [*command[1:], "mcp", "--broker", url, *options]}


COMMANDS = (
    Command(
        "mcp",
        "let an assistant search all silos with your rights (Model Context Protocol over stdio)",
        """isthmus mcp --broker https://search.example.org --key me.key
isthmus mcp --broker https://search.example.org --key me.key --json""",
        _arguments,
        _mcp,
    ),
)
