"""`isthmus keys`: a silo's identity, the silos that it trusts, and the key that silos share without the
relay."""

from __future__ import annotations

import argparse
from pathlib import Path

from isthmus.cli.access import VERBS
from isthmus.cli.command import Command, add, add_json, say, show, to_write
from isthmus.errors import ConfigError

_NEW = "isthmus keys new north north"
_TRUST = "isthmus keys trust north south.card west.card"
_WRAP = "isthmus keys wrap north -o boxes"
_UNWRAP = "isthmus keys unwrap south boxes/south.box"
_ROTATE = "isthmus keys rotate"


def _new_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "the silo's folder")
    add(parser, "name NAME", "what the silo is called in the federation")
    add_json(parser, "{silo, card, fingerprint}")


def _trust_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "the silo's folder")
    add(parser, "cards CARD", "cards that came past the relay", nargs="+")
    add(parser, "--replace", "also where another card of that name is there: its silo has new keys")
    add_json(parser, "a list of {silo, fingerprint}")


def _wrap_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "the silo's folder")
    add(parser, "-o --out BOXES", "the folder for the boxes", required=True)
    add_json(parser, "{epoch, boxes}")


def _unwrap_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "folder DIR", "the silo's folder")
    add(parser, "box BOX", "what a trusted silo has sealed for this one")
    add(parser, "--from NAME", "accept it from this silo only", dest="sender")
    add_json(parser, "{silo, epoch}")


def _new(arguments: argparse.Namespace) -> None:
    from isthmus.private import Keyring, write_card

    keys = Keyring.at(arguments.folder, create=True)
    card = keys.begin(arguments.name).card
    path = keys.path / f"{card.name}.card"
    write_card(card, path)
    record = {"silo": card.name, "card": str(path), "fingerprint": card.fingerprint}
    show(arguments, record, f"{card.name}  {card.fingerprint}")
    say(f"hand {path} to the other silos; whoever takes it compares the fingerprint by another way")


def _trust(arguments: argparse.Namespace) -> None:
    from isthmus.private import Keyring, read_card

    keys = Keyring.at(arguments.folder)
    own = keys.identity().name
    cards = [read_card(path) for path in arguments.cards]
    for card in (card for card in cards if card.name != own):
        keys.trust(card, replace=arguments.replace)
    records = [{"silo": card.name, "fingerprint": card.fingerprint} for card in cards]
    show(arguments, records, "\n".join(f"{card.name}  {card.fingerprint}" for card in cards))
    say("compare these with what each silo says its fingerprint is, not through the relay")


def _wrap(arguments: argparse.Namespace) -> None:
    from isthmus.private import Keyring, wrap
    from isthmus.tables import replacing

    keys = Keyring.at(arguments.folder)
    trusted = list(keys.trusted().values())
    if not trusted:
        raise ConfigError("there is nobody to seal the key for", key="trust", expected="isthmus keys trust")
    identity, key = keys.identity(), keys.group_key(create=True)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, box in wrap(key, identity, trusted).items():
        paths.append(str(out / f"{name}.box"))
        with replacing(paths[-1]) as stream:
            stream.write(box)
    show(arguments, {"epoch": key.epoch, "boxes": paths}, "\n".join(paths))
    say("the boxes may go any way: each opens for its silo only")


def _unwrap(arguments: argparse.Namespace) -> None:
    from isthmus.private import Keyring, unwrap

    keys = Keyring.at(arguments.folder)
    box = Path(arguments.box).read_bytes()
    key = unwrap(box, keys.identity(), keys.trusted(), sender=arguments.sender)
    keys.join(key)
    silo = keys.identity().name
    show(arguments, {"silo": silo, "epoch": key.epoch}, f"{silo}  epoch {key.epoch}")


def _rotate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what another key costs; with --yes, put it in the place of the one in use. hits and hash are a"
        " silo's (WHERE is its silo.toml), persons is the broker's (broker.toml), group, noise, decoys and"
        " identity are in a folder of keys. For certificates: isthmus keys renew; for API keys: isthmus keys"
        " api rotate."
    )
    kinds = ("hits", "persons", "hash", "group", "noise", "decoys", "identity")
    add(parser, f"kind {'|'.join(kinds)}", "which key", choices=kinds)
    add(
        parser, "where WHERE", "silo.toml, broker.toml or a folder of keys; hash: of several silos", nargs="+"
    )
    add(parser, "--yes", "do it, at that cost")
    add(
        parser,
        "-o --out FILE",
        "hash: also write the new key there, for silos on other machines",
        type=to_write,
    )
    add(parser, "--take FILE", "hash: the key that -o wrote on another machine")
    add_json(parser, "{kind, places, costs, done}")


def _rotate(arguments: argparse.Namespace) -> int:
    from isthmus.files import write_private
    from isthmus.service import Rotation, new_hash_key, read_hash_key

    if (arguments.take or arguments.out) and arguments.kind != "hash":
        raise ConfigError("-o and --take are for the hash key", key=arguments.kind, expected="hash")
    plan = Rotation.of(arguments.kind, [Path(place) for place in arguments.where])
    for line in plan.costs:
        say(f"it costs: {line}")
    record = {"kind": plan.kind, "places": arguments.where, "costs": list(plan.costs), "done": arguments.yes}
    if not arguments.yes:
        show(arguments, record, "nothing was changed: --yes does it")
        return 1
    text = read_hash_key(Path(arguments.take)) if arguments.take else new_hash_key()
    if arguments.out:
        write_private(arguments.out, text.encode() + b"\n")
    plan.carry_out(text)
    show(arguments, record, "\n".join(f"{plan.kind}  {place}" for place in arguments.where))
    for line in plan.after:
        say(line)
    return 0


_ABOUT = "make keys and certificates, trust other silos, and share the group's key past the relay"
_VERBS = (
    Command("new", "draw a silo's own keys and write its card", _NEW, _new_arguments, _new),
    Command("trust", "believe other silos' cards", _TRUST, _trust_arguments, _trust),
    Command("wrap", "seal the group key for every silo that is trusted", _WRAP, _wrap_arguments, _wrap),
    Command("unwrap", "take the group key out of a box", _UNWRAP, _unwrap_arguments, _unwrap),
    Command(
        "rotate",
        "another key in the place of one in use, after saying what that costs",
        f"{_ROTATE} hits north/silo.toml\n{_ROTATE} hash north/silo.toml south/silo.toml --yes",
        _rotate_arguments,
        _rotate,
    ),
    *VERBS,
)
COMMANDS = (Command("keys", _ABOUT, f"{_NEW} && {_TRUST} && {_WRAP}", verbs=_VERBS),)
