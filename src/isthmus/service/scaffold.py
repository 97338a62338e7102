"""Create a first federation: a folder with commented, complete configuration that starts as it is.

my-federation/
  README.md               the next steps
  broker.toml
  broker/                 its certificate and key, and the API keys of people and programs
  north/                  to be copied to the silo's own machine
    silo.toml
    keys/                 its identity, and the cards of the other silos
    documents/            for your documents, in place of the example
  authority/              makes certificates; belongs on no machine that serves
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from isthmus.config import toml_value
from isthmus.errors import ConfigError, several
from isthmus.files import write_private
from isthmus.service.certificates import DAYS, LOOPBACK, TRAINING, Authority, check_name
from isthmus.service.security import ApiKeys
from isthmus.service.settings import (
    SCOPES,
    EncoderSettings,
    EngineSettings,
    PageText,
    Source,
    read_broker,
    read_node,
)
from isthmus.service.templates import template

EXAMPLES = (Source("folder", Path("documents")),)
"""Sources of a silo for which none are named: a folder with an example."""
_SOURCES = "# Where documents come from; kinds: folder, table, beir, sql"
_ELSEWHERE = "# Documents are in the engine below, which is only read."
_ADD = "Put them into `*/documents`, or name other sources in `silo.toml`."
_ADD_SOURCES = "`sources` in `silo.toml` says where a silo's documents come from."
NO_TEXT = PageText()
_LEVELS = {
    "full": "Terms are counted here in the documents' texts: scores compare with other silos'.",
    "scores": "The engine's own scores: judgements of this silo make probabilities of them (isthmus learn).",
}
BROKER, API_KEYS, ADMIN_KEY, KEYS = "broker", "api-keys.json", "admin.key", "keys"


@dataclass(frozen=True)
class Attachment:
    """An engine that has a silo's documents, and the encoder of its vectors, if that is known."""

    engine: EngineSettings
    encoder: EncoderSettings | None = None

    @property
    def tables(self) -> str:
        """The settings as TOML."""
        kind = 'kind = "none"'
        if self.encoder is not None:
            named = {"name": self.encoder.name} if self.encoder.name else {"path": str(self.encoder.path)}
            kind = 'kind = "encoder"\n' + "".join(
                f"{key} = {toml_value(value)}" for key, value in named.items()
            )
        lines = (f"{name} = {toml_value(value)}" for name, value in self._differing().items())
        return f"[encoder]\n{kind}\n\n# {_LEVELS[self.engine.level]}\n[engine]\n" + "\n".join(lines) + "\n"

    def _differing(self) -> dict[str, Any]:
        usual = {each.name: each.default for each in fields(EngineSettings)}
        values = {name: getattr(self.engine, name) for name in usual}
        always = ("id", "body", "level", "language")
        return {name: value for name, value in values.items() if name in always or value != usual[name]}


def create_federation(
    folder: Path,
    silos: Sequence[str],
    *,
    port: int = 8100,
    sources: Mapping[str, Sequence[Source]] | None = None,
    engines: Mapping[str, Attachment] | None = None,
    page: PageText = NO_TEXT,
) -> list[Path]:
    """Write a federation's folder and return the files to read first.

    A folder that is not empty is refused. Silos listen at the ports after the broker's. `sources` are those
    of a silo by its name, with paths relative to the silo's folder; `engines` are engines that have a silo's
    documents already. Other silos get a folder with an example.
    """
    names = [check_name(name) for name in silos]
    if len({name.lower() for name in names} | {BROKER, "authority"}) != len(names) + 2:
        raise ConfigError(
            "silos must have different names",
            value=", ".join(silos),
            expected="different names, not broker or authority",
        )
    if not names:
        raise ConfigError("a federation needs a silo", expected="one silo or more")
    if not 0 < port <= (last := 65_535 - len(names)):
        raise ConfigError(
            f"port {port} leaves none for {several(len(names), 'silo')} after the broker's",
            key="port",
            value=port,
            expected=f"a port from 1 to {last:,}",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already", value=str(folder), expected="a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    make_keys(folder, names, broker=BROKER)
    introduce(folder, names)
    hash_key = secrets.token_urlsafe(24)
    listed = []
    for at, name in enumerate(names, port + 1):
        own = (engines or {}).get(name) or (sources or {}).get(name, EXAMPLES)
        write_private(folder / name / "silo.toml", _silo(name, at, hash_key, own).encode())
        if own is EXAMPLES:
            (folder / name / "documents").mkdir()
            example = template("example.md").format(name=name)
            (folder / name / "documents" / "example.md").write_text(example, encoding="utf-8")
        listed.append(_listed(name, at))
    broker = template("broker.toml").format(
        port=port,
        silos="".join(listed),
        about=toml_value(page.about),
        queries=toml_value(page.queries),
    )
    write_private(folder / "broker.toml", broker.encode())
    (folder / "README.md").write_text(
        _readme(folder.name, names, port, page, examples=not (engines or sources)), encoding="utf-8"
    )
    (folder / ".gitignore").write_text(template("gitignore"), encoding="utf-8")
    return [folder / "README.md", folder / "broker.toml", *(folder / name / "silo.toml" for name in names)]


def _silo(name: str, port: int, hash_key: str, own: Sequence[Source] | Attachment) -> str:
    """Return the configuration of a silo with its own documents, or over an engine that has them."""
    documents, form, tables = f"{_SOURCES}\nsources = {toml_value(own)}", "private", ""
    if isinstance(own, Attachment):
        documents, tables = _ELSEWHERE, "\n" + own.tables
        form = "private" if own.engine.level == "full" else "none"
    return template("silo.toml").format(
        name=name,
        host=LOOPBACK[1],
        port=port,
        hash_key=hash_key,
        documents=documents,
        form=form,
        forms='or "exact", or "none"' if form == "private" else "the engine's terms are not counted here",
        engine=tables,
    )


def _readme(title: str, names: Sequence[str], port: int, page: PageText, *, examples: bool) -> str:
    """Return the next steps; `examples` says whether every silo has a folder with an example."""
    query = page.queries[0] if page.queries else "first document" if examples else "words of a document"
    return template("README.md").format(
        title=title,
        count=len(names) + 1,
        starts="\n".join(f"isthmus node --config {name}/silo.toml" for name in names),
        port=port,
        first=names[0],
        query=shlex.quote(query),
        add=_ADD if examples else _ADD_SOURCES,
    )


def _listed(name: str, port: int) -> str:
    about = '# about = "What it has, in a sentence."   # for the start page'
    return f'\n[silos.{name}]\nurl = "https://{LOOPBACK[1]}:{port}"\n{about}\n'


def add_silo(folder: Path, name: str, attachment: Attachment) -> list[Path]:
    """Add a silo over an engine to a federation's folder, or switch an existing silo to the engine. Returns
    the configuration files that were written."""
    settings = read_broker(folder / "broker.toml")
    known = [silo for silo in settings.silos if (folder / silo / "silo.toml").exists()]
    if name in known:
        file, before = folder / name / "silo.toml", read_node(folder / name / "silo.toml")
        file.replace(file.with_name("silo.toml.before"))
        write_private(file, _silo(name, before.port, before.statistics.hash_key, attachment).encode())
        return [file]
    if check_name(name).lower() in {each.lower() for each in (*settings.silos, BROKER, "authority")}:
        raise ConfigError(f"{name} is the name of another", value=name, expected="a new name: --silo")
    if not known:
        raise ConfigError(
            f"no silo.toml is below {folder}", value=str(folder), expected="its hash key is needed"
        )
    port = 1 + max(settings.port, *(urlsplit(silo.url).port or 0 for silo in settings.silos.values()))
    make_keys(folder, [name])
    introduce(folder, [*known, name])
    hash_key = read_node(folder / known[0] / "silo.toml").statistics.hash_key
    broker = (folder / "broker.toml").read_text(encoding="utf-8") + _listed(name, port)
    write_private(folder / "broker.toml", broker.encode())
    file = folder / name / "silo.toml"
    write_private(file, _silo(name, port, hash_key, attachment).encode())
    return [file, folder / "broker.toml"]


def introduce(folder: Path, silos: Sequence[str]) -> None:
    """Give every silo an identity in its own folder and the cards of all others, by which they mask sums."""
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
    """Make a certificate and key for every party, in a folder of its name; for a broker also an API key.

    The authority is made if the folder has none. Raises ConfigError if a party has a certificate already,
    unless `renew`. Only brokers, and silos under their names for training, may call others. Returns the
    parties' folders.
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
        token = keys.add("admin", scopes=[each for each in SCOPES if each != "audit"], days=days)
        write_private(folder / broker / ADMIN_KEY, token.encode() + b"\n")
    return written
