"""A silo's keys on its disk, in files that nobody but their owner may read.

    identity.key      the silo's name, with the keys it signs with and opens boxes with
    cards/NAME.card   the public side of every other silo, from a source that this one trusts
    group.key         the federation's hash key; every silo has the same one, the relay must not have it
    noise.key         the secret behind this silo's noise; whoever has it can undo what was released
    decoys.key        the secret that chooses decoys, so that a word always comes with the same ones

A secret that others can read is refused, and a file is there whole or not at all. Who writes has the folder's
lock, so that of two processes neither undoes what the other has done.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from isthmus.errors import ConfigError, DataError
from isthmus.files import locked, private_file, replacing, write_private
from isthmus.private.keys import Card, GroupKey, Identity
from isthmus.private.noise import KEY, NoiseKey

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Keyring:
    """The keys in one folder."""

    path: Path

    @classmethod
    def at(cls, path: str | PathLike[str], *, create: bool = False) -> Keyring:
        """An existing folder, or a new one that is its owner's alone."""
        folder = Path(path)
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not folder.is_dir():
            cure = "isthmus sketch build makes one"
            raise DataError("is no silo's folder", file=folder, cure=cure)
        return cls(folder)

    def begin(self, name: str) -> Identity:
        """Draw the silo's own keys, unless it has some under that name."""
        if not _NAME.fullmatch(name):
            expected = "letters, digits, -, _ and ., at most 63"
            raise ConfigError(f"{name!r} cannot name a silo", key="name", value=name, expected=expected)
        file = self.path / "identity.key"
        with self._alone():
            if not file.exists():
                drawn = Identity.fresh(name)
                raw = (drawn.signing.private_bytes_raw(), drawn.opening.private_bytes_raw())
                _keep(file, {"name": name, "signing": raw[0].hex(), "opening": raw[1].hex()})
        identity = self.identity()
        if identity.name != name:
            raise DataError(f"belongs to {identity.name}", file=file, cure="give each silo its own folder")
        return identity

    def identity(self) -> Identity:
        """Who this silo is."""
        fields = _secret(self.path / "identity.key", ("signing", "opening"), "isthmus keys new makes one")
        signing, opening = (bytes.fromhex(fields[part]) for part in ("signing", "opening"))
        keys = Ed25519PrivateKey.from_private_bytes(signing), X25519PrivateKey.from_private_bytes(opening)
        return Identity(fields["name"], *keys)

    def trust(self, card: Card) -> None:
        """Believe from now on that these are the keys of the silo of that name."""
        if not _NAME.fullmatch(card.name):
            raise DataError(f"{card.name!r} cannot name a silo")
        file = self.path / "cards" / f"{card.name}.card"
        with self._alone():
            known = self.trusted().get(card.name)
            if known not in (None, card):
                cure = f"if {card.name} has new keys indeed, remove the card that is there"
                raise DataError("holds other keys under the same name", file=file, cure=cure)
            file.parent.mkdir(exist_ok=True)
            write_card(card, file)

    def trusted(self) -> Mapping[str, Card]:
        """The silos whose keys this one believes, by name."""
        cards = [read_card(file) for file in sorted((self.path / "cards").glob("*.card"))]
        return {card.name: card for card in cards}

    def group_key(self, *, create: bool = False) -> GroupKey:
        """The federation's hash key; with `create`, a silo that was given none draws one."""
        file = self.path / "group.key"
        if create:
            self._draw(file)
        fields = _secret(file, ("secret",), "get it from another silo of the federation: isthmus keys --help")
        return GroupKey(bytes.fromhex(fields["secret"]), int(fields["epoch"]))

    def join(self, key: GroupKey) -> None:
        """Take a federation's key; one of a later epoch takes the place of the one there is."""
        file = self.path / "group.key"
        with self._alone():
            present = self.group_key() if file.exists() else None
            if present == key:
                return
            if present is not None and present.epoch >= key.epoch:
                cure = "a folder belongs to one federation; take another folder, or a key of a later epoch"
                raise DataError(f"is another key of epoch {present.epoch}", file=file, cure=cure)
            _keep(file, {"epoch": key.epoch, "secret": key.secret.hex()})

    def noise_key(self, *, create: bool = False) -> NoiseKey:
        """This silo's noise key."""
        return NoiseKey(self._drawn("noise.key", create=create))

    def decoys(self) -> bytes:
        """The secret that chooses this silo's decoys; drawn when it is first needed."""
        return self._drawn("decoys.key", create=True)

    def _drawn(self, name: str, *, create: bool) -> bytes:
        file = self.path / name
        if create:
            self._draw(file)
        return bytes.fromhex(_secret(file, ("secret",), "restore it from a backup")["secret"])

    def _draw(self, file: Path) -> None:
        """A secret of this file's own, unless it has one."""
        with self._alone():
            if not file.exists():
                _keep(file, {"secret": os.urandom(KEY).hex()})

    def _alone(self) -> AbstractContextManager[int]:
        return locked(self.path / ".lock")


def write_card(card: Card, path: str | PathLike[str]) -> None:
    """Write what others may know of a silo."""
    keys = {"verifying": card.verifying.hex(), "sealing": card.sealing.hex()}
    with replacing(path) as stream:
        stream.write(json.dumps({"format": "isthmus card", "name": card.name, **keys}).encode() + b"\n")


def read_card(path: str | PathLike[str]) -> Card:
    """What a silo has told of itself."""
    fields = _read(Path(path), "isthmus card", ("verifying", "sealing"), "ask that silo for its card again")
    if not _NAME.fullmatch(fields["name"]):
        raise DataError("names no silo", file=path, text=fields["name"])
    return Card(fields["name"], bytes.fromhex(fields["verifying"]), bytes.fromhex(fields["sealing"]))


def _keep(file: Path, fields: Mapping[str, str | int]) -> None:
    """Write a secret in the place of the one there is, if any, which its reader has until then."""
    write_private(file, json.dumps({"format": f"isthmus {file.name}", "epoch": 0, **fields}).encode())


def _secret(file: Path, keys: tuple[str, ...], cure: str) -> dict[str, str]:
    """A secret of one's own, which others cannot read."""
    return _read(private_file(file) if file.exists() else file, f"isthmus {file.name}", keys, cure)


def _read(file: Path, form: str, keys: tuple[str, ...], cure: str) -> dict[str, str]:
    try:
        fields: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        fields.setdefault("name", "")
        if fields["format"] != form or any(len(bytes.fromhex(fields[key])) != KEY for key in keys):
            raise ValueError(form)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=file, cure=cure) from error
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"is not an {form}", file=file, cure=cure) from None
    return fields
