"""Key rotation: what replacing each kind of key costs, and the change itself, complete or not at all.

    plan = Rotation.of("hash", [Path("north/silo.toml")])
    plan.costs                                  # to be confirmed by a person before anything changes
    plan.carry_out(new_hash_key())

    hits        silo.toml     tokens of hits, names of documents for peers that may not read them
    persons     broker.toml   pseudonyms of people towards silos
    hash        silo.toml     shared by silos: for released statistics, digests of copies, folds
    group       folder        the hash key of private counts
    noise       folder        the secret behind the noise of private counts
    decoys      folder        the choice of decoys
    identity    folder        the key with which a silo signs and opens boxes

Every key is one file, replaced in one step: after a crash either the old or the new one is there. The
rotation of certificates is in `certificates`, that of API keys in `security`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import ConfigError, DataError
from isthmus.files import private_file, write_private
from isthmus.private import LEDGER, Keyring, release_costs, write_card
from isthmus.private.ledger import Ledger
from isthmus.retrieval import FIELD_TABLES, TEXT
from isthmus.service.security import KEY_BYTES, local_secret
from isthmus.service.settings import NodeSettings, read_broker, read_node

_HASH_KEY = re.compile(r"^(?P<before>\s*hash_key\s*=\s*)(?P<value>\"[^\"\n]*\"|'[^'\n]*')", re.MULTILINE)


@dataclass(frozen=True)
class Rotation:
    """Planned rotation of one kind of key, in one place or several."""

    kind: str
    places: tuple[Path, ...]
    costs: tuple[str, ...]
    """Costs of the change, in sentences."""
    after: tuple[str, ...]
    """Steps to take after the change."""

    @classmethod
    def of(cls, kind: str, places: Sequence[Path]) -> Rotation:
        """Work out what changing these keys costs; raises if there are none of this kind."""
        if kind not in KINDS:
            raise ConfigError(f"no kind of key {kind!r}", key=kind, known=KINDS)
        about = KINDS[kind]
        costs = [line for place in places for line in about.costs(place)]
        return cls(kind, tuple(places), tuple(dict.fromkeys(costs)), about.after)

    def carry_out(self, text: str = "") -> None:
        """Replace the keys by new random ones; of the kind hash by `text`, which all silos share."""
        for place in self.places:
            KINDS[self.kind].change(place, text)


@dataclass(frozen=True)
class Kind:
    """Properties of one kind of key: the costs of a change, the change itself, and the steps after it."""

    costs: Callable[[Path], list[str]]
    change: Callable[[Path, str], None]
    after: tuple[str, ...] = ()


def _new_secret(file: Path) -> None:
    if not file.exists():
        raise DataError("there is no key yet", file=file, cure="it is made when it is first needed")
    local_secret(file)  # raises if the file is no key of Isthmus
    write_private(file, secrets.token_hex(KEY_BYTES).encode() + b"\n")


def _hits_costs(config: Path) -> list[str]:
    read_node(config)
    return [
        "hits shown until now can no longer be judged, opened or asked for: people search again",
        "documents have other names towards peers that may not read them; judgements that are there stay",
    ]


def _persons_costs(config: Path) -> list[str]:
    read_broker(config)
    return [
        "everybody is somebody new to every silo: nobody can take back what they judged before, or open what "
        "they had asked for, and rules by pseudonym and limits by person begin anew",
        "entries of audit logs before and after are not linked; silos with identities = true see no change",
    ]


def _hash_costs(config: Path) -> list[str]:
    settings = read_node(config)
    costs = [
        "scores of silos do not compare, and copies of a document in two silos are not recognised, until all "
        "silos have the new key",
        "judged queries are dealt into other folds: sums of learning before and after are over other halves",
    ]
    statistics = settings.statistics
    if statistics.hash_key.startswith("env:"):
        raise ConfigError(
            f"the hash key is in the environment ({statistics.hash_key}), not in {config}",
            key="statistics.hash_key",
            expected="another value there, the same for all silos, and a restart",
        )
    if statistics.form == "private":
        tables = (TEXT, *FIELD_TABLES) if statistics.fields else (TEXT,)
        epsilon = sum(cost.epsilon for cost in release_costs(tables, statistics.epsilon, ""))
        costs.append(f"{settings.silo}: statistics are released anew, ε = {epsilon:g} for every document; ")
        costs[-1] += _left(settings.ledger, epsilon)
    return costs


def _left(ledger: Path, epsilon: float) -> str:
    """Describe the budget that a ledger has left for a charge of `epsilon`."""
    if not ledger.exists():
        return "nothing was spent yet"
    with Ledger(ledger, checked=False) as opened:
        left = float(opened.summary()["least_left"])
    short = " (too little: nothing new is released until budget is raised)" if left < epsilon else ""
    return f"the document that has spent most has {left:g} left{short}"


def _count_costs(what: str) -> Callable[[Path], list[str]]:
    def costs(folder: Path) -> list[str]:
        ring = Keyring.at(folder)
        ring.noise_key() if "noise" in what else ring.group_key()
        ledger = folder / LEDGER
        return [
            what,
            f"{folder}: what is published from now on is charged anew, its whole ε; {_left(ledger, 0.0)}",
        ]

    return costs


def _decoys_costs(folder: Path) -> list[str]:
    Keyring.at(folder)
    return [
        "a word comes with other decoys than before: whoever has seen it asked before and after knows it: "
        "the word is in both; change it only where the old key is known to others, who can tell decoys anyway"
    ]


def _identity_costs(folder: Path) -> list[str]:
    name = Keyring.at(folder).identity().name
    return [
        f"no silo takes masked sums or boxes of {name} until it trusts the new card, and boxes for the "
        "old one do not open any more"
    ]


def _change_identity(folder: Path, text: str) -> None:
    ring = Keyring.at(folder)
    ring.redraw("identity.key")
    card = ring.identity().card
    write_card(card, ring.path / f"{card.name}.card")


def _change_hash(config: Path, text: str) -> None:
    """Write the key into silo.toml, once the resulting file has been read and has it."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,200}", text):
        raise DataError(
            "not a hash key", cure="16 to 200 letters, digits, - and _: isthmus keys rotate hash -o"
        )
    before = config.read_text(encoding="utf-8")
    after, count = _HASH_KEY.subn(rf'\g<before>"{text}"', before)
    if not count:
        after = before.rstrip("\n") + f'\n\n[statistics]\nhash_key = "{text}"\n'
    trial = config.with_name(f".{config.name}.{os.getpid()}")
    try:
        write_private(trial, after.encode())
        if _read(trial).statistics.hash_key != text or count > 1:
            raise ConfigError(
                f"{config} has no single line hash_key = … under [statistics]",
                key="statistics.hash_key",
                expected=f'one that you can write there yourself: hash_key = "{text}"',
            )
        os.replace(trial, config.resolve())
    finally:
        trial.unlink(missing_ok=True)


def _read(config: Path) -> NodeSettings:
    try:
        return read_node(config)
    except ConfigError as error:
        raise ConfigError(
            f"silo.toml cannot be given a hash key: {error}", key="statistics.hash_key"
        ) from None


def new_hash_key() -> str:
    """A new hash key."""
    return secrets.token_urlsafe(24)


def read_hash_key(file: Path) -> str:
    """Read the hash key from a file that `-o` wrote on another machine."""
    return private_file(file).read_text(encoding="utf-8").strip()


def _in_keyring(name: str) -> Callable[[Path, str], None]:
    return lambda folder, text: Keyring.at(folder).redraw(name)


KINDS: dict[str, Kind] = {
    "hits": Kind(
        _hits_costs,
        lambda config, text: _new_secret(read_node(config).folder / "feedback.key"),
        ("a node that runs uses the new key from its next request on",),
    ),
    "persons": Kind(
        _persons_costs,
        lambda config, text: _new_secret(read_broker(config).folder / "persons.key"),
        ("a broker that runs uses the new key from its next request on",),
    ),
    "hash": Kind(
        _hash_costs,
        _change_hash,
        (
            "restart every node: its index, releases and learning are bound to the key that it began with",
            "on other machines: isthmus keys rotate hash silo.toml --take FILE, with the file that -o wrote",
        ),
    ),
    "group": Kind(
        _count_costs(
            "sketches must be built anew; released files of the old key are not read with the new one"
        ),
        _in_keyring("group.key"),
        (
            "isthmus keys wrap DIR -o boxes, and isthmus keys unwrap in every other silo",
            "then isthmus sketch build and publish in every silo",
        ),
    ),
    "noise": Kind(
        _count_costs(
            "the same cells have new noise: with the old release it averages out, and both are paid for"
        ),
        _in_keyring("noise.key"),
        ("isthmus sketch publish releases with the new noise",),
    ),
    "decoys": Kind(_decoys_costs, _in_keyring("decoys.key")),
    "identity": Kind(
        _identity_costs,
        _change_identity,
        ("hand the new card to the other silos: isthmus keys trust DIR CARD --replace",),
    ),
}
