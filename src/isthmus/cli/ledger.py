"""`isthmus ledger`: the releases of a silo, their cost, and the budget that is left."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, finite, print_json, say, show, whole
from isthmus.errors import DataError

if TYPE_CHECKING:
    from isthmus.private.ledger import Budget, Ledger
    from isthmus.report import Table

PARTS = ("charges", "departures", "documents")
BLOCK = 1000

_SHOW = "isthmus ledger show silo.ledger --top 10"
_LOST = "isthmus ledger lost north/index --spent 2"
_EXPORT = "isthmus ledger export silo.ledger --part departures -o left.csv"


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What left the silo by kind, peer and mechanism; or one document, or subject; or the dearest ones."
    )
    add(parser, "ledger LEDGER", "the silo's ledger file, or its folder")
    which = parser.add_mutually_exclusive_group()
    add(which, "--document ID", "every charge of this document")
    add(which, "--subject ID", "what all documents of this subject (a patient, a customer) spent together")
    add(which, "--top N", "the N documents, or subjects, that spent most", type=whole(1))
    add(parser, "--audit", "first work all sums out again from the charges")
    add_json(
        parser,
        "{budget, unit, documents, versions, charges, subjects, most_spent, meaning, least_left, departures,"
        " incidents}; with --document {document, spent, left, charges}; with --top a list of, and with"
        " --subject one of {document, versions, spent, left, fields, peers, documents}",
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "The whole history. Nonces and digests of texts stay in the ledger."
    add(parser, "ledger LEDGER", "the silo's ledger file, or its folder")
    add(parser, "--part", "which part (%(default)s)", choices=PARTS, default=PARTS[0])
    add(parser, "-o --out FILE", "where to (default: stdout)")
    add_json(parser, "a list of objects with the names of the CSV's columns")


def _lost_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Go on after a loss: with the old copy that was put back, or with a new ledger where there is none."
        " Every document, known or to come, then counts as having spent --spent more than the ledger says."
        " Stop the node first."
    )
    add(parser, "ledger LEDGER", "the silo's ledger file, or its folder")
    add(parser, "--spent EPSILON", "ε that may be missing in it (all of the budget)", type=float)
    add(parser, "--budget", "ε of a new ledger (%(default)s)", type=float, default=9.0)
    add_json(parser, "{ledger, budget, forgotten}")


def _reading(
    work: Callable[[Ledger, argparse.Namespace], None],
) -> Callable[[argparse.Namespace], None]:
    """The function that runs a command which only reads a ledger."""

    def run(arguments: argparse.Namespace) -> None:
        from isthmus.private.ledger import Ledger

        with Ledger(_file(arguments.ledger), checked=False) as ledger:  # unchecked: any copy can be read
            work(ledger, arguments)

    return run


def _go_on(arguments: argparse.Namespace) -> None:
    from isthmus.private.ledger import Budget, Ledger

    path = _file(arguments.ledger)
    with Ledger.after_loss(path, spent=arguments.spent, budget=Budget(arguments.budget)) as ledger:
        budget = ledger.budget
    if arguments.json:
        print_json({"ledger": str(path), "budget": budget.epsilon, "forgotten": budget.forgotten})
    say(f"{path} goes on: each {budget.subject or 'document'}'s budget is {budget}")


def _file(path: str) -> Path:
    """The ledger file itself, or the one in the folder of a node or of private counts."""
    if not Path(path).is_dir():
        return Path(path)
    from isthmus.private import LEDGER

    marks = ("ledger.db", "ledger.db.tally", "released.statistics", "documents.db", "feedback.key", "index")
    served = any((Path(path) / name).exists() for name in marks)
    return Path(path) / ("ledger.db" if served else LEDGER)


def _show(ledger: Ledger, arguments: argparse.Namespace) -> None:
    if arguments.audit:
        ledger.audit()
        say("every sum is that of its charges")
    if arguments.document is not None:
        record = _history(ledger, arguments.document)
        if not record["charges"]:
            say(f"nothing was ever charged to {arguments.document}")
        show(arguments, record, _history_table(record))
    elif arguments.subject is not None:
        account = ledger.subject(arguments.subject)
        if account is None:
            raise DataError(
                "the ledger has met no document of this subject", cure="its id as the source has it"
            )
        show(arguments, asdict(account), _accounts_table([asdict(account)]))
    elif arguments.top is not None:
        rows = [asdict(one) for one in ledger.accounts(arguments.top)]
        show(arguments, rows, _accounts_table(rows))
    else:
        record = ledger.summary()
        show(arguments, record, _summary_table(record, ledger.budget))


def _history(ledger: Ledger, document: str) -> dict[str, Any]:
    return {
        "document": document,
        "spent": ledger.spent(document),
        "left": ledger.left(document),
        "charges": list(ledger.charges(document)),
    }


def _history_table(history: Mapping[str, Any]) -> Table:
    from isthmus.report import Table

    columns = ("at", "version", "peer", "kind", "mechanism", "release", "fields", "epsilon")
    rows = [tuple(_cell(name, row[name]) for name in columns) for row in history["charges"]]
    notes = (
        f"spent ε = {history['spent']:g}, left {history['left']:g}; noise that all peers share counts once",
    )
    return Table(columns, tuple(rows), f"{history['document']}: every charge", notes, 2)


def _accounts_table(rows: list[dict[str, Any]]) -> Table:
    from isthmus.report import Table

    return Table.of([{name: _flat(value) for name, value in row.items()} for row in rows], digits=2)


def _summary_table(totals: Mapping[str, Any], budget: Budget) -> Table:
    from isthmus.report import Table

    columns = ("kind", "peer", "mechanism", "fields", "guarantee", "times", "items", "charged", "last")
    rows = [tuple(_cell(name, row[name]) for name in columns) for row in totals["departures"]]
    parts = [(name, totals[name]) for name in ("documents", "versions", "charges")]
    parts += [(f"{totals['unit']}s", totals["subjects"])] if totals["subjects"] else []
    counted = ", ".join(f"{count:,} {name}" for name, count in parts)
    whose = f"each {totals['unit']}'s"
    notes = [f"{whose} budget is {budget}; the one that spent most has {totals['least_left']:g} left"]
    notes += [f"incident: {note}" for note in totals["incidents"]]
    header = tuple("noise" if name == "mechanism" else name for name in columns)  # to fit the terminal
    return Table(header, tuple(rows), f"what left: {counted}", (*notes, *filter(None, [totals["meaning"]])))


def _export(ledger: Ledger, arguments: argparse.Namespace) -> None:
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "charges": ledger.charges,
        "departures": ledger.departures,
        "documents": lambda: map(asdict, ledger.accounts()),
    }
    rows = parts[arguments.part]()
    written = _json_lines(rows) if arguments.json else _csv_lines(rows)
    if arguments.out is None:
        for text in written:
            sys.stdout.write(text)
        return
    from isthmus.tables import replacing

    with replacing(arguments.out) as stream:
        for text in written:
            stream.write(text.encode())
    say(f"wrote {arguments.out}")


def _json_lines(rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    """A JSON list with one object a line, without holding all rows in memory."""
    yield "["
    for number, row in enumerate(rows):
        yield ("," if number else "") + "\n" + json.dumps(finite(row), ensure_ascii=False)
    yield "\n]\n"


def _csv_lines(rows: Iterator[dict[str, Any]]) -> Iterator[str]:
    """CSV in blocks of lines; empty if there are no rows."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(rows):
        if number == 0:
            table.writerow(row)
        table.writerow(_flat(value) for value in row.values())
        if number % BLOCK == 0:
            yield text.getvalue()
            text.seek(text.truncate(0))
    yield text.getvalue()


def _flat(value: object) -> Any:
    """Lists and mappings as the text of one cell."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={inner:g}" for name, inner in value.items())
    return "+".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _cell(name: str, value: object) -> Any:
    """A value for people: times to the second, and names with spaces so that they can be wrapped."""
    if name in ("mechanism", "fields"):
        return str(_flat(value) or "").replace("_", " ").replace("+", " + ")
    return str(value)[:19].replace("T", " ") if name in ("at", "last") else _flat(value)


_ABOUT = "show what left a silo, what it cost, and what may still leave"
_VERBS = (
    Command("show", "what left and what it cost", _SHOW, _show_arguments, _reading(_show)),
    Command("export", "the whole history, as CSV or JSON", _EXPORT, _export_arguments, _reading(_export)),
    Command("lost", "go on after a ledger was lost, or an old copy put back", _LOST, _lost_arguments, _go_on),
)
COMMANDS = (Command("ledger", _ABOUT, _SHOW, verbs=_VERBS),)
