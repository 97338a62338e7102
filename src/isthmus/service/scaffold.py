"""A first federation: a folder with configuration that is commented, complete, and starts as it is.

my-federation/
  README.md               the next steps
  broker.toml
  broker/                 its certificate and key, and the API keys of people and programs
  north/                  what belongs on the silo's own machine
    silo.toml
    keys/                 its identity, and the cards of the other silos
    documents/            yours, in place of the example
  authority/              makes certificates; belongs on no machine that serves
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.config import toml_value
from isthmus.errors import ConfigError
from isthmus.files import write_private
from isthmus.service.certificates import DAYS, LOOPBACK, TRAINING, Authority, check_name
from isthmus.service.security import SCOPES, ApiKeys
from isthmus.service.settings import PageText, Source
from isthmus.service.templates import template

EXAMPLES = (Source("folder", Path("documents")),)
"""Where a silo has its documents from that is told nothing else: an example lies there."""
NO_TEXT = PageText()
BROKER, API_KEYS, ADMIN_KEY, KEYS = "broker", "api-keys.json", "admin.key", "keys"


def create_federation(
    folder: Path,
    silos: Sequence[str],
    *,
    port: int = 8100,
    sources: Mapping[str, Sequence[Source]] | None = None,
    page: PageText = NO_TEXT,
) -> list[Path]:
    """Write a federation's folder and return what a reader should open first.

    A folder that holds anything is refused. Silos listen at the ports after the broker's. `sources` are those
    of a silo by its name, with paths meant from the silo's folder; others have a folder with an example.
    """
    names = [check_name(name) for name in silos]
    if len({name.lower() for name in names} | {BROKER, "authority"}) != len(names) + 2:
        raise ConfigError(
            "silos must have different names",
            value=", ".join(silos),
            expected="different names, not broker or authority",
        )
    if not names or not 0 < port <= 65_535 - len(names):
        raise ConfigError(
            "a federation needs a silo, and a port for each",
            value=port,
            expected="one silo or more, and a port with as many free numbers after it",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already", value=str(folder), expected="a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    make_keys(folder, names, broker=BROKER)
    introduce(folder, names)
    hash_key = secrets.token_urlsafe(24)
    listed, starts = [], []
    for at, name in enumerate(names, port + 1):
        own = (sources or {}).get(name, EXAMPLES)
        config = template("silo.toml").format(
            name=name, host=LOOPBACK[1], port=at, hash_key=hash_key, sources=toml_value(own)
        )
        write_private(folder / name / "silo.toml", config.encode())
        if own is EXAMPLES:
            (folder / name / "documents").mkdir()
            example = template("example.md").format(name=name)
            (folder / name / "documents" / "example.md").write_text(example, encoding="utf-8")
        listed.append(f'\n[silos.{name}]\nurl = "https://{LOOPBACK[1]}:{at}"\n')
        starts.append(f"isthmus node --config {name}/silo.toml")
    broker = template("broker.toml").format(
        port=port,
        silos="".join(listed),
        about=toml_value(page.about),
        queries=toml_value(page.queries),
    )
    write_private(folder / "broker.toml", broker.encode())
    readme = template("README.md").format(
        title=folder.name, count=len(names) + 1, starts="\n".join(starts), port=port, first=names[0]
    )
    (folder / "README.md").write_text(readme, encoding="utf-8")
    (folder / ".gitignore").write_text(template("gitignore"), encoding="utf-8")
    return [folder / "README.md", folder / "broker.toml", *(folder / name / "silo.toml" for name in names)]


def introduce(folder: Path, silos: Sequence[str]) -> None:
    """Give every silo an identity in its own folder, and the cards of all others: they sum under masks."""
    from isthmus.private import Keyring, write_card

    rings = {name: Keyring.at(folder / name / KEYS, create=True) for name in silos}
    cards = {name: ring.begin(name).card for name, ring in rings.items()}
    for name, ring in rings.items():
        write_card(cards[name], ring.path / f"{name}.card")
        for peer, card in cards.items():
            if peer != name:
                ring.trust(card)


def make_keys(
    folder: Path,
    silos: Sequence[str],
    *,
    broker: str | None = None,
    hosts: Sequence[str] = (),
    days: float = DAYS,
    renew: bool = False,
) -> list[Path]:
    """A certificate and key for every party, in a folder of its name; for a broker also an API key.

    The authority is made if the folder has none. A party that has a certificate keeps it unless `renew`. Only
    brokers, and silos under their names for training, may call others.
    """
    parties = [*((name, name.endswith(TRAINING)) for name in silos), *([(broker, True)] if broker else [])]
    for name, _ in parties:
        if (folder / check_name(name) / "tls.crt").exists() and not renew:
            raise ConfigError(
                f"{name} has a certificate already", value=name, expected="--renew, or new names"
            )
    authority = Authority.at(folder)
    written = [
        authority.issue(name, clients=clients, hosts=(*LOOPBACK, *hosts), days=days).certificate.parent
        for name, clients in parties
    ]
    if broker and not (folder / broker / API_KEYS).exists():
        keys = ApiKeys(folder / broker / API_KEYS)
        token = keys.add("admin", scopes=SCOPES, days=days)
        write_private(folder / broker / ADMIN_KEY, token.encode() + b"\n")
    return written
