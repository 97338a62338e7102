"""The verbs of `isthmus keys` for the search service: certificates, and API keys for people and programs."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from isthmus.cli.command import add_json, print_json, say
from isthmus.errors import DataError

MAKE = "isthmus keys make keys --silos north,south --broker"
API = "isthmus keys api add keys/broker/api-keys.json ada --scopes search,feedback"


def make_arguments(parser: argparse.ArgumentParser) -> None:
    """`keys make DIR`."""
    parser.add_argument("folder", metavar="DIR", help="where to: one folder a party, and the authority's")
    parser.add_argument("--silos", metavar="A,B", default="", help="the silos' names")
    parser.add_argument(
        "--broker", metavar="NAME", nargs="?", const="broker", help="a broker too (broker), with an API key"
    )
    parser.add_argument(
        "--coordinator",
        metavar="NAME",
        nargs="?",
        const="coordinator",
        help="a coordinator of training too (coordinator)",
    )
    parser.add_argument(
        "--training", metavar="A,B", default="", help="silos that train: a key to call the coordinator with"
    )
    parser.add_argument(
        "--host",
        dest="hosts",
        metavar="HOST",
        action="append",
        default=[],
        help="a name or address they have",
    )
    parser.add_argument("--days", type=float, default=397, help="how long certificates hold (%(default)s)")
    parser.add_argument("--renew", action="store_true", help="replace certificates that are there")
    add_json(parser, "{authority, parties: [{name, folder}]}")


def make(asked: argparse.Namespace) -> None:
    """Certificates, and for a broker an API key."""
    from isthmus.service.certificates import TRAINING
    from isthmus.service.founding import ADMIN_KEY, make_keys

    folder = Path(asked.folder)
    silos = [*_names(asked.silos), *(name + TRAINING for name in _names(asked.training))]
    silos += [asked.coordinator] if asked.coordinator else []
    made = make_keys(
        folder, silos, broker=asked.broker, hosts=asked.hosts, days=asked.days, renew=asked.renew
    )
    told = [{"name": path.name, "folder": str(path)} for path in made]
    if asked.json:
        print_json({"authority": str(folder / "authority"), "parties": told})
    else:
        print("\n".join(f"{each['name']}  {each['folder']}" for each in told))
    if asked.broker:
        say(f"the administrator's API key is in {folder / asked.broker / ADMIN_KEY}")
    say(f"keep {folder / 'authority'} off machines that serve: with it anybody can pose as any party")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def api_arguments(parser: argparse.ArgumentParser) -> None:
    """`keys api add | list | revoke`."""
    verbs = parser.add_subparsers(dest="deed", metavar="VERB", required=True, help="what to do with API keys")
    add = verbs.add_parser("add", help="a new key, shown once", description="A new key, shown once.")
    add.add_argument("file", metavar="FILE", help="the broker's or node's API keys")
    add.add_argument("name", metavar="NAME", help="whose key it is")
    add.add_argument(
        "--scopes",
        metavar="A,B",
        default="search,feedback",
        help="search, feedback, metrics, admin (%(default)s)",
    )
    ends = add.add_mutually_exclusive_group()
    ends.add_argument("--days", type=float, default=90, help="how long it holds (%(default)s)")
    ends.add_argument("--forever", action="store_true", help="until it is revoked")
    add_json(add, "{id, key}")
    listed = verbs.add_parser(
        "list", help="all keys, without secrets", description="All keys, without secrets."
    )
    listed.add_argument("file", metavar="FILE", help="the broker's or node's API keys")
    add_json(listed, "a list of {id, name, scopes, created, expires}")
    revoke = verbs.add_parser(
        "revoke", help="refuse a key from now on", description="Refuse a key from now on."
    )
    revoke.add_argument("file", metavar="FILE", help="the broker's or node's API keys")
    revoke.add_argument("id", metavar="ID", help="the key's id, as list shows it")
    add_json(revoke, "{id, name}")


def api(asked: argparse.Namespace) -> None:
    """One deed with API keys."""
    {"add": _add, "list": _list, "revoke": _revoke}[asked.deed](asked)


def _add(asked: argparse.Namespace) -> None:
    from isthmus.service.security import ApiKeys

    scopes = [scope.strip() for scope in asked.scopes.split(",") if scope.strip()]
    keys, days = ApiKeys(asked.file), None if asked.forever else asked.days
    token = keys.add(asked.name, scopes=scopes, days=days)
    print_json({"id": token.split("_")[1], "key": token}) if asked.json else print(token)
    ends = "until it is revoked" if days is None else f"for {days:g} days"
    say(f"this key is shown once and stored hashed; it holds {ends}")


def _list(asked: argparse.Namespace) -> None:
    from isthmus.report import Table
    from isthmus.service.security import ApiKeys

    if not Path(asked.file).exists():
        raise DataError("there are no API keys", file=asked.file, cure="isthmus keys api add begins the file")
    keys = ApiKeys(asked.file).all()
    dates = [(_day(key.created), None if key.expires is None else _day(key.expires)) for key in keys]
    if asked.json:
        columns = ("id", "name", "scopes", "created", "expires")
        rows = ((key.id, key.name, list(key.scopes), *when) for key, when in zip(keys, dates, strict=True))
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    lines = (
        (key.id, key.name, " ".join(key.scopes), created, expires or "never")
        for key, (created, expires) in zip(keys, dates, strict=True)
    )
    print(Table(("id", "name", "scopes", "created", "expires"), tuple(lines)))
    for key in ApiKeys(asked.file).ending():
        say(f"isthmus: the key {key.id} of {key.name} ends soon; add a new one, then revoke it")


def _revoke(asked: argparse.Namespace) -> None:
    from isthmus.service.security import ApiKeys

    gone = ApiKeys(asked.file).revoke(asked.id)
    print_json({"id": gone.id, "name": gone.name}) if asked.json else print(f"{gone.id}  {gone.name}")


def _day(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
