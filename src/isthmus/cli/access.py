"""The verbs of `isthmus keys` for the search service: certificates, and API keys for people and programs."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.command import Command, add, add_json, say, show
from isthmus.cli.judgements import add_broker, broker_client
from isthmus.errors import ConfigError, DataError, several

if TYPE_CHECKING:
    from isthmus.service import Authority

MAKE = "isthmus keys make keys --silos north,south --broker"
KEYS = "the broker's or node's API keys"
API = """isthmus keys api add keys/broker/api-keys.json ada --scopes search,feedback
isthmus keys api add keys/broker/api-keys.json ada --group doctors --group ward-3"""


def _make_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "where to: one folder a party, and the authority's")
    add(parser, "--silos A,B", "the silos' names", default="")
    add(parser, "--broker NAME", "a broker too (broker), with an API key", nargs="?", const="broker")
    about = "a coordinator of training too (coordinator)"
    add(parser, "--coordinator NAME", about, nargs="?", const="coordinator")
    add(parser, "--training A,B", "silos that train: a key to call the coordinator with", default="")
    add(parser, "--host HOST", "a name or address they have", dest="hosts", action="append", default=[])
    add(parser, "--days", "how long certificates hold (%(default)s)", type=float, default=397)
    add(parser, "--renew", "replace certificates that are there")
    add_json(parser, "{authority, parties: [{name, folder}]}")


def _make(arguments: argparse.Namespace) -> None:
    """Make certificates, and an API key for a broker."""
    from isthmus.service import ADMIN_KEY, TRAINING, make_keys

    folder = Path(arguments.folder)
    silos = [*_names(arguments.silos), *(name + TRAINING for name in _names(arguments.training))]
    silos += [arguments.coordinator] if arguments.coordinator else []
    folders = make_keys(
        folder,
        silos,
        broker=arguments.broker,
        hosts=arguments.hosts,
        days=arguments.days,
        renew=arguments.renew,
    )
    parties = [{"name": path.name, "folder": str(path)} for path in folders]
    record = {"authority": str(folder / "authority"), "parties": parties}
    show(arguments, record, "\n".join(f"{each['name']}  {each['folder']}" for each in parties))
    if arguments.broker:
        say(f"the administrator's API key is in {folder / arguments.broker / ADMIN_KEY}")
    say(f"keep {folder / 'authority'} off machines that serve: with it anybody can pose as any party")


def _renew_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "the folder with authority/ and the parties'")
    add(parser, "names NAME", "whose certificates (everybody's)", nargs="*")
    add(parser, "--days", "how long the new ones hold (%(default)s)", type=float, default=397)
    about = "only those that end within so many days: for a timer"
    add(parser, "--within DAYS", about, type=float, default=None)
    add_json(parser, "a list of {name, folder, ends}")


def _renew(arguments: argparse.Namespace) -> None:
    """Make new keys and certificates for the same names and uses."""
    authority = _authority(arguments.folder)
    if not arguments.days > 0:
        raise ConfigError(f"a certificate of {arguments.days:g} days", key="days", expected="above 0")
    renewed = []
    for name in arguments.names or authority.parties():
        left = authority.present(name).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        if arguments.within is None or left < datetime.timedelta(days=arguments.within):
            tls = authority.renew(name, days=arguments.days)
            ends = authority.present(name).not_valid_after_utc.isoformat(timespec="seconds")
            renewed.append({"name": name, "folder": str(tls.certificate.parent), "ends": ends})
    show(arguments, renewed, "\n".join(f"{each['name']}  until {each['ends']}" for each in renewed))
    if renewed:
        say("servers of these folders use them for new connections; elsewhere copy tls.key, then tls.crt")
        say("the old ones hold until they end: isthmus keys revoke DIR NAME --keep-newest")
    else:
        say("no certificate ends within that time")


def _revoking_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "the folder with authority/ and the parties'")
    add(parser, "name NAME", "whose certificates hold no longer")
    add(parser, "--keep-newest", "all but the one that was issued last: after a renewal")
    add_json(parser, "{name, serials, list}")


def _revoke_certificates(arguments: argparse.Namespace) -> None:
    authority = _authority(arguments.folder)
    serials = authority.revoke(arguments.name, keep_newest=arguments.keep_newest)
    path = authority.folder / "authority" / "ca.crl"
    record = {"name": arguments.name, "serials": [f"{serial:x}" for serial in serials], "list": str(path)}
    show(arguments, record, "\n".join(f"{arguments.name}  {serial:x}" for serial in serials))
    say(f"{several(len(serials), 'certificate')} of {arguments.name} revoked; the list is {path}")
    say("it is beside ca.crt in every folder here: copy it there on other machines")
    say("servers and the broker heed it within a second, and close the connections that are open")


def _authority(folder: str) -> Authority:
    """The existing authority of a folder. Raises a DataError if there is none."""
    from isthmus.service import Authority

    if not (Path(folder) / "authority" / "ca.key").exists():
        raise DataError("no authority is here", file=Path(folder) / "authority", cure="isthmus keys make")
    return Authority.at(folder)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "file FILE", KEYS)
    add(parser, "name NAME", "whose key it is")
    add(
        parser,
        "--scopes A,B",
        "search, feedback, documents, counts, metrics, admin (%(default)s)",
        default="search,feedback",
    )
    about = "a group of its owner's, for silos that ask who it is; may be repeated"
    add(parser, "--group NAME", about, dest="groups", action="append", default=[])
    ends = parser.add_mutually_exclusive_group()
    add(ends, "--days", "how long it holds (%(default)s)", type=float, default=90)
    add(ends, "--forever", "until it is revoked")
    add_json(parser, "{id, key}")


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "file FILE", KEYS)
    add_json(parser, "a list of {id, name, scopes, created, expires, groups}")


def _rotate_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "file FILE", KEYS)
    add(parser, "id ID", "the key's id, as list shows it")
    about = "hours for which the old key holds still, 0 for none (%(default)s)"
    add(parser, "--overlap HOURS", about, type=float, default=24.0)
    ends = parser.add_mutually_exclusive_group()
    add(ends, "--days", "how long the new one holds (%(default)s)", type=float, default=90)
    add(ends, "--forever", "until it is revoked")
    add_json(parser, "{id, key, replaces}")


def _rotate(arguments: argparse.Namespace) -> None:
    from isthmus.service import ApiKeys

    if not arguments.overlap >= 0:
        raise ConfigError(f"{arguments.overlap:g} hours", key="overlap", expected="hours from 0")
    days = None if arguments.forever else arguments.days
    token = ApiKeys(arguments.file).rotate(arguments.id, overlap=arguments.overlap / 24, days=days)
    show(arguments, {"id": token.split("_")[1], "key": token, "replaces": arguments.id}, token)
    say(f"this key is shown once and stored hashed; the old one holds {arguments.overlap:g} hours more")


def _revoke_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "file FILE", KEYS)
    add(parser, "id ID", "the key's id, as list shows it")
    add_json(parser, "{id, name}")


def _add(arguments: argparse.Namespace) -> None:
    from isthmus.service import ApiKeys

    days = None if arguments.forever else arguments.days
    scopes, groups = _names(arguments.scopes), arguments.groups
    is_new = not Path(arguments.file).exists()
    token = ApiKeys(arguments.file).add(arguments.name, scopes=scopes, days=days, groups=groups)
    show(arguments, {"id": token.split("_")[1], "key": token}, token)
    ends = "until it is revoked" if days is None else f"for {days:g} days"
    say(f"this key is shown once and stored hashed; it holds {ends}")
    if is_new:
        say(f"{arguments.file} is a new file: a broker knows the key if its settings name it under keys")


def _list(arguments: argparse.Namespace) -> None:
    from isthmus.report import Table
    from isthmus.service import ApiKeys

    if not Path(arguments.file).exists():
        raise DataError(
            "there are no API keys", file=arguments.file, cure="isthmus keys api add begins the file"
        )
    keys = ApiKeys(arguments.file).all()
    columns = ("id", "name", "scopes", "created", "expires", "groups")
    rows = [
        (key.id, key.name, list(key.scopes), _day(key.created), _day(key.expires), list(key.groups))
        for key in keys
    ]
    lines = [
        (*row[:2], " ".join(row[2]), (row[3] or "")[:10], (row[4] or "never")[:10], ", ".join(row[5]))
        for row in rows
    ]
    width = len(columns) if any(row[5] for row in rows) else -1
    table = Table(columns[:width], tuple(line[:width] for line in lines))
    show(arguments, [dict(zip(columns, row, strict=True)) for row in rows], table)
    for key in ApiKeys(arguments.file).ending():
        say(f"isthmus: the key {key.id} of {key.name} ends soon; add a new one, then revoke it")


def _revoke(arguments: argparse.Namespace) -> None:
    from isthmus.service import ApiKeys

    gone = ApiKeys(arguments.file).revoke(arguments.id)
    show(arguments, {"id": gone.id, "name": gone.name}, f"{gone.id}  {gone.name}")


def _day(seconds: float | None) -> str | None:
    when = None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return None if when is None else when.isoformat(timespec="seconds")


def _sessions_arguments(parser: argparse.ArgumentParser) -> None:
    add_broker(parser, "an administrator's API key")
    add_json(parser, "a list of {person, name, scopes, since, used}")


def _end_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "person PERSON", "as list shows it: the name of their key, or their id at the provider")
    add_broker(parser, "an administrator's API key")
    add_json(parser, "{person, ended}")


def _list_sessions(arguments: argparse.Namespace) -> None:
    from isthmus.report import Table

    with broker_client(arguments) as broker:
        rows = [each.model_dump() for each in broker.sessions().sessions]
    columns = ("person", "name", "scopes", "since", "used")
    lines = tuple(
        (*map(row.get, columns[:2]), " ".join(row["scopes"]), row["since"], row["used"]) for row in rows
    )
    show(arguments, rows, Table(columns, lines))


def _end_sessions(arguments: argparse.Namespace) -> None:
    with broker_client(arguments) as broker:
        ended = broker.end_sessions(arguments.person)
    show(arguments, {"person": arguments.person, "ended": ended}, f"{ended} sessions ended")
    say("to keep them out: isthmus keys api revoke for their keys, and close their account at the provider")


_API = "isthmus keys api"
_SESSIONS = "isthmus keys sessions"
_AT = "--broker https://search.example --key broker/admin.key"
_FILE = "keys/broker/api-keys.json"
_VERBS = (
    Command("add", "a new key, shown once", API, _add_arguments, _add),
    Command("list", "all keys, without secrets", f"{_API} list {_FILE}", _list_arguments, _list),
    Command(
        "rotate",
        "a new key for the same owner; the old one ends a little later",
        f"{_API} rotate {_FILE} 4f1c --overlap 24",
        _rotate_arguments,
        _rotate,
    ),
    Command("revoke", "refuse a key from now on", f"{_API} revoke {_FILE} 4f1c", _revoke_arguments, _revoke),
)
_SESSION_VERBS = (
    Command("list", "who has one", f"{_SESSIONS} list {_AT}", _sessions_arguments, _list_sessions),
    Command("end", "end all of a person's", f"{_SESSIONS} end ada {_AT}", _end_arguments, _end_sessions),
)
VERBS = (
    Command("make", "certificates for silos and a broker", MAKE, _make_arguments, _make),
    Command(
        "renew",
        "new certificates and keys for the same parties, without a restart",
        "isthmus keys renew keys --days 14 --within 7",
        _renew_arguments,
        _renew,
    ),
    Command(
        "revoke",
        "refuse a party's certificates from now on, by a signed list (CRL)",
        "isthmus keys revoke keys north\nisthmus keys revoke keys north --keep-newest",
        _revoking_arguments,
        _revoke_certificates,
    ),
    Command("api", "API keys for people and programs", API, verbs=_VERBS),
    Command("sessions", "who is signed in at a broker", f"{_SESSIONS} list {_AT}", verbs=_SESSION_VERBS),
)
