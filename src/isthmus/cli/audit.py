"""`isthmus audit`: show an audit log, check that it was not changed, and count what callers have seen."""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, fitted, output, print_json, say, show, whole
from isthmus.errors import ConfigError, DataError, plain, several

if TYPE_CHECKING:
    from isthmus.service import AuditKey, AuditSettings

WARNED, REFUSED, OTHER = 4, 5, 6
"""Severities of RFC 5424: warning, notice and informational."""
FACILITY = 13
"""Facility "log audit" of RFC 5424."""
ENTERPRISE = "isthmus@32473"
"""Name of the structured data; 32473 is the enterprise number that RFC 5612 reserves for documentation."""
COLUMNS = ("number", "at", "action", "peer", "actor", "documents", "what")

ELSEWHERE = (
    "; a silo knows people of a broker by pseudonyms: isthmus audit pseudonym broker.toml NAME --silo SILO"
)

_VERIFY = "isthmus audit verify north.toml"
_HEAD = "isthmus audit head north.toml"
_SHOW = "isthmus audit show north.toml --document papers/tides.md\nisthmus audit show north --action refused"
_EXPORT = (
    "isthmus audit export north.toml --since 2026-11-01 -o november.jsonl\n"
    "isthmus audit export north.toml --format syslog --person ada -o ada.log"
)
_SEEN = "isthmus audit seen north.toml"
_PSEUDONYM = "isthmus audit pseudonym broker.toml ada --silo north"


@dataclass(frozen=True)
class _Place:
    """A log's owner: its folder, its settings, and the ledger in which the log is anchored, if any."""

    folder: Path
    name: str
    settings: AuditSettings
    ledger: Path | None
    ids: Callable[[], Iterator[str]]
    """The ids of the existing documents."""

    @property
    def key(self) -> AuditKey:
        """The key of the log's seals and pseudonyms."""
        from isthmus.service import AuditKey

        file = self.settings.key or self.folder / "audit.key"
        if not file.exists():
            raise DataError(
                "there is no audit log's key",
                file=file,
                cure="the TOML or the folder of a node or broker that has run",
            )
        return AuditKey(self.folder, self.settings)


def _place(text: str) -> _Place:
    """Find the log by a configuration file, or by the folder of a node or broker."""
    from isthmus.service import AuditSettings, SqliteStore, open_store, read_broker, read_node

    path = Path(text)
    if (path / "silo.toml").is_file():  # the layout of `isthmus new`
        path /= "silo.toml"
    if path.suffix == ".toml":
        try:
            node = read_node(path)
        except ConfigError as error:
            try:
                broker = read_broker(path)
            except ConfigError:
                raise error from None
            return _Place(broker.folder, broker.name, broker.audit, None, lambda: iter(()))
        living = lambda: (each.id for each in open_store(node).living())  # noqa: E731
        return _Place(node.folder, node.silo, node.audit, node.ledger, living)
    if not path.is_dir():
        raise DataError(
            "there is no such folder", file=path, cure="a node's or broker's folder, or its .toml"
        )
    ledger, store = path / "ledger.db", path / "documents.db"

    def ids() -> Iterator[str]:
        return (each.id for each in SqliteStore(store).living()) if store.exists() else iter(())

    return _Place(path, path.resolve().name, AuditSettings(), ledger if ledger.exists() else None, ids)


def _add_place(parser: argparse.ArgumentParser) -> None:
    add(parser, "place CONFIG", "the node's or the broker's TOML, or its folder")


def _add_filters(parser: argparse.ArgumentParser) -> None:
    _add_place(parser)
    add(parser, "--since TIME", "entries from then on: 2026-11-18, or 2026-11-18T09:30 (UTC)", type=_time)
    add(parser, "--until TIME", "entries before then", type=_time)
    add(parser, "--person ID", "entries of this person, as the peer calls them; or their pseudonym here")
    add(parser, "--document ID", "entries about this document")
    add(parser, "--action NAME", "entries of this kind; may be given again", action="append", default=[])
    add(parser, "--names", "ids of documents that there are in the place of digests")


def _time(text: str) -> str:
    """Argument type: a time in the format of log entries."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a time such as 2026-11-18T09:30, got {text!r}") from None
    at = at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _entries(place: _Place, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The entries that pass the filters in the arguments, one by one."""
    from isthmus.service import audit_lines

    key = place.key
    document = key.document(arguments.document) if arguments.document else ""
    names = {key.document(id): id for id in place.ids()} if arguments.names else {}
    pseudonym = cache(lambda peer: key.pseudonym(peer, arguments.person))
    for line in audit_lines(place.folder):
        entry = line.content
        about = entry.get("documents", ())
        if arguments.since and entry["at"] < arguments.since:
            continue
        if arguments.until and entry["at"] >= arguments.until:
            continue
        if arguments.action and entry["action"] not in arguments.action:
            continue
        if document and document not in about:
            continue
        actor = entry.get("actor", "")
        if arguments.person and actor not in (arguments.person, pseudonym(entry.get("peer", ""))):
            continue
        if names and about:
            entry["documents"] = [names.get(digest, digest) for digest in about]
        yield {**entry, "hash": line.hash, "seal": line.seal}


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check every entry of the audit log and of the ledger: hashes, seals, order, and that neither has"
        " less than the other says. The first broken entry is named, with its file and line; the status is 1."
    )
    _add_place(parser)
    add(
        parser,
        "--head NUMBER:HASH",
        "an entry that was kept elsewhere (isthmus audit head); may be given again",
        type=_head_of,
        action="append",
        default=[],
    )
    add_json(parser, "{entries, files, first, last, hash, anchors, ledger_entries}")


def _head_of(text: str) -> tuple[int, str]:
    """Argument type: number and hash of an entry."""
    number, _, hash = text.replace(" ", ":").partition(":")
    if not number.isdigit() or len(hash) != 64:
        raise argparse.ArgumentTypeError(
            f"expected NUMBER:HASH as isthmus audit head prints it, got {text!r}"
        )
    return int(number), hash


def _verify(arguments: argparse.Namespace) -> None:
    from isthmus.private.ledger import Ledger
    from isthmus.service import verify_audit

    place, anchors, entries = _place(arguments.place), dict(arguments.head), 0
    if place.ledger is None:
        state = verify_audit(place.folder, place.key, anchors)
    else:
        with Ledger(place.ledger, checked=False) as ledger:
            state = verify_audit(place.folder, place.key, {**ledger.anchors("audit"), **anchors})
            entries = ledger.audit(state.heads.get(ledger.name))
    record = {
        "entries": state.entries,
        "files": state.files,
        "first": state.first.number + 1 if state.entries else 0,
        "last": state.last.number,
        "hash": state.last.hash,
        "anchors": state.anchors,
        "ledger_entries": entries,
    }
    counted = f"{several(state.entries, 'entry', 'entries')} in {several(state.files, 'file')}"
    lines = [f"nothing was changed: {counted}, the last is {state.last.number}"]
    lines += [f"{several(state.anchors, 'head')} of it, in the ledger and elsewhere: the same"]
    lines += [f"ledger: {several(entries, 'entry', 'entries')}, nothing was changed"] if place.ledger else []
    show(arguments, record, "\n".join(lines))


def _head_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print number and hash of the last entry, to be kept where whoever runs this machine cannot change"
        " it: isthmus audit verify --head then tells whether the log was changed up to it."
    )
    _add_place(parser)
    add_json(parser, "{name, number, hash, at}")


def _head(arguments: argparse.Namespace) -> None:
    from isthmus.service import audit_lines

    place = _place(arguments.place)
    last = next(iter(deque(audit_lines(place.folder), maxlen=1)), None)
    if last is None:
        raise DataError("there is no entry yet", file=place.folder, cure="a node that runs writes them")
    record = {"name": place.name, "number": last.number, "hash": last.hash, "at": last.content["at"]}
    show(arguments, record, f"{last.number}:{last.hash}")


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "The last entries, or those about a person, a document, a kind of action or a time."
    _add_filters(parser)
    add(parser, "--last N", "at most so many, the last ones (%(default)s)", type=whole(1), default=20)
    add_json(parser, "a list of entries")


def _show(arguments: argparse.Namespace) -> None:
    from isthmus.report import Table

    rows = list(deque(_entries(_place(arguments.place), arguments), maxlen=arguments.last))
    if arguments.json:
        print_json(rows)
    elif rows:
        print(fitted(Table(COLUMNS, tuple(tuple(_cell(row, name) for name in COLUMNS) for row in rows))))
    else:
        say("no entry is like this" + (ELSEWHERE if arguments.person else ""))


def _cell(entry: Mapping[str, Any], name: str) -> Any:
    value = entry.get(name, "")
    if name == "documents":
        return (
            f"{len(value)}: {', '.join(map(_short, value[:3]))}{', …' if len(value) > 3 else ''}"
            if value
            else ""
        )
    if name == "what" and "becomes" in entry:
        was, becomes = (_short(entry[each]) or "nothing" for each in ("was", "becomes"))
        return f"{value}: {was} → {becomes}"
    if name == "at":
        return value[:19].replace("T", " ")
    return entry.get("person", _short(value)) if name == "actor" else value


def _short(text: str) -> str:
    """The beginning of a digest, enough to distinguish it; any other text unchanged."""
    return f"{text[:10]}…" if len(text) >= 24 and not set(text) - set("0123456789abcdef") else text


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Entries as lines of JSON or as syslog messages (RFC 5424). A file is there whole or not at all."
    )
    _add_filters(parser)
    add(parser, "--format", "(%(default)s)", choices=("json", "syslog"), default="json")
    add(parser, "-o --out FILE", "where to (default: stdout)", type=output, default="/dev/stdout")
    add_json(parser, "the same as --format json")


def _export(arguments: argparse.Namespace) -> None:
    from isthmus.tables import replacing

    place, count = _place(arguments.place), 0
    with replacing(arguments.out, private=True) as stream:
        for entry in _entries(place, arguments):
            as_syslog = arguments.format == "syslog" and not arguments.json
            text = syslog(entry, place.name) if as_syslog else json.dumps(entry, ensure_ascii=False)
            stream.write(text.encode() + b"\n")
            count += 1
    say(f"{several(count, 'entry', 'entries')} written to {arguments.out}")


def syslog(entry: Mapping[str, Any], host: str) -> str:
    """Format an entry as a message of RFC 5424, with its content as structured data."""
    severity = {"alarm": WARNED, "resumed": WARNED, "repaired": WARNED, "refused": REFUSED}
    priority = 8 * FACILITY + severity.get(entry["action"], OTHER)
    about = {name: value for name, value in entry.items() if name not in ("at", "action")}
    about |= {"documents": " ".join(about["documents"])} if "documents" in about else {}
    data = "".join(f' {name}="{_escaped(str(value))}"' for name, value in about.items())
    return f"<{priority}>1 {entry['at']} {host} isthmus - {entry['action']} [{ENTERPRISE}{data}]"


def _escaped(text: str) -> str:
    return plain(text).replace("\\", "\\\\").replace('"', '\\"').replace("]", "\\]")


def _seen_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "How many different documents of the silo callers have seen in a year and today, by estimate, and how"
        " many they opened today. A line without an actor is of all who came through the peer."
    )
    _add_place(parser)
    add_json(parser, "a list of {peer, actor, documents, today, opened_today}")


def _seen(arguments: argparse.Namespace) -> None:
    from isthmus.report import Table
    from isthmus.service import seen_by_caller

    rows = [asdict(row) for row in seen_by_caller(_place(arguments.place).folder)]
    if not rows and not arguments.json:
        say("nobody has seen anything yet")
        return
    show(arguments, rows, "" if not rows else Table.of(rows))


def _pseudonym_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What a silo calls a person of this broker, which is what isthmus audit show --person takes there;"
        " and what the broker's own log calls them."
    )
    _add_place(parser)
    add(parser, "person NAME", "as they sign in, or as their API key is named")
    add(parser, "--silo NAME", "the silo (default: the broker's own log)")
    add_json(parser, "{person, silo, pseudonym}")


def _pseudonym(arguments: argparse.Namespace) -> None:
    from isthmus.service import silo_pseudonym

    place = _place(arguments.place)
    if arguments.silo:
        name = silo_pseudonym(place.folder, arguments.silo, arguments.person)
    else:
        name = place.key.pseudonym("", arguments.person)
    record = {"person": arguments.person, "silo": arguments.silo, "pseudonym": name}
    show(arguments, record, name)


_VERBS = (
    Command("verify", "whether log or ledger was changed, and where", _VERIFY, _verify_arguments, _verify),
    Command("show", "the last entries, or those about a person or a document", _SHOW, _show_arguments, _show),
    Command("export", "entries as JSON lines or syslog", _EXPORT, _export_arguments, _export),
    Command("head", "the last entry's hash, to be kept elsewhere", _HEAD, _head_arguments, _head),
    Command("seen", "how much of the silo callers have seen", _SEEN, _seen_arguments, _seen),
    Command("pseudonym", "what a silo calls a person", _PSEUDONYM, _pseudonym_arguments, _pseudonym),
)
COMMANDS = (
    Command("audit", "verify, show and export an audit log: who was shown what", _VERIFY, verbs=_VERBS),
)
