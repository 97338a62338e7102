"""A first federation: a folder with configuration that is commented, complete, and starts as it is.

my-federation/
  README.md               the next steps
  broker.toml
  broker/                 its certificate and key, and the API keys of people and programs
  north/                  what belongs on the silo's own machine
    silo.toml
    documents/            yours, in place of the example
  authority/              makes certificates; belongs on no machine that serves
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from isthmus.errors import ConfigError
from isthmus.service.certificates import DAYS, LOOPBACK, TRAINING, Authority, check_name, write_private
from isthmus.service.security import SCOPES, ApiKeys

BROKER, API_KEYS, ADMIN_KEY = "broker", "api-keys.json", "admin.key"

_BROKER = """\
# The broker: one search box over all silos.   isthmus broker --config broker.toml

name = "broker"              # silos know it by this name, which its certificate holds
folder = "broker"
host = "127.0.0.1"           # another address needs https = true
port = {port}
# https = true               # people reach it over TLS, with the certificate below
# hosts = ["search.example.org"]   # the names people reach it by

keys = "broker/api-keys.json"      # isthmus keys api add broker/api-keys.json NAME --scopes search,feedback

deadline_ms = 1000           # a search takes no longer; silos that are late are named in the answer
threshold = 0.0              # hits of a lower probability are never shown
share_statistics = true      # sum the silos' term statistics and hand the sum back, so that scores compare
log_queries = false          # whether the log has the text of queries
# training = "runs/first"    # the folder of a training run, for the Training view

[tls]                        # shown to silos, who answer nobody else
certificate = "broker/tls.crt"
key = "broker/tls.key"
authority = "broker/ca.crt"

[breaker]                    # a silo that keeps failing is left alone
failures = 3                 # in a row
pause = 1.0                  # seconds until it is tried again, doubled each time
longest = 30.0

[limits]                     # for each caller
per_second = 20.0
burst = 40
{silos}"""

_SILO_OF_BROKER = """
[silos.{name}]
url = "https://{host}:{port}"
"""

_SILO = """\
# The silo {name}.   isthmus node --config silo.toml

silo = "{name}"
folder = "index"             # index, store and ledger; survives restarts, belongs in your backup
host = "{host}"
port = {port}
log_queries = false          # whether the log has the text of queries

# Where documents come from; kinds: folder (text, Markdown, HTML, PDF), beir, sql
sources = [{{ kind = "folder", path = "documents" }}]

budget = 9.0                 # ε that a document may spend on all peers together

[tls]
certificate = "tls.crt"
key = "tls.key"
authority = "ca.crt"

# What a peer may do, by the name in its certificate. Whoever is not listed is refused.
# Towards a peer that may search no ε is claimed: scores and explanations are exact.
[peers.broker]
search = true
snippets = true              # false: hits without text
counts = true                # may have the term statistics below
learning = true              # may join directions of words, and ask for sums over judged queries: no ε
feedback = true              # may bring judgements, which stay here
budget = 9.0                 # ε that a document may spend on this peer

# Term statistics that leave, so that scores of different silos compare.
[statistics]
form = "private"             # or "exact", or "none"
epsilon = 1.0
hash_key = "{hash_key}"      # the same in all silos, and unknown to the broker: keep this file to yourself

# `isthmus broker --learn` gives the silo a ranker with probabilities. Files of other training and calibration
# come before it; without a calibrator their hits have no probability.
# [models]
# ranker = "model"
# calibrator = "calibrator"
# reliability = "reliability.json"
"""

_EXAMPLE = """\
# A first document of {name}

This is an example: replace it with documents of your own. The silo {name} indexes this folder, keeps the text
here, and answers searches of the brokers that its policy knows.
"""

_README = """\
# {title}

Everything listens on this machine only and starts as it is, in {count} terminals:

```sh
{starts}
isthmus broker --config broker.toml
```

Search as the administrator, whose key was made along, or open http://127.0.0.1:{port} and give it that key:

```sh
isthmus search "first document" --broker http://127.0.0.1:{port} --key broker/admin.key
```

## Next

1. **Your documents.** Put them into `*/documents`, or name other sources in `silo.toml`. A node reads its
   sources when it starts, and on `kill -USR1 PID`.
2. **People.** One key each, shown once, for 90 days unless `--days` says otherwise; `list` and `revoke` are
   there too: `isthmus keys api add broker/api-keys.json ada --scopes search,feedback`
3. **Machines.** Move each silo's folder to its own machine, and write its address there into `broker.toml`.
   For certificates that hold it: `isthmus keys make . --silos {first} --host silo.example.org --renew`.
   `authority/` stays with you, off line: whoever has its key can pose as anybody.
4. **Probabilities.** Judgements that people give stay in the silos. When there are some, let the silos learn:
   `isthmus broker --config broker.toml --learn`. `isthmus node --config silo.toml --export-judgements out`
   writes them, while the node does not serve, for other training and calibration, whose files go into
   `[models]`.

Keys, `silo.toml` (it holds the hash key) and `api-keys.json` are secrets: `.gitignore` leaves them out.
"""

_IGNORE = "authority/\n*.key\napi-keys.json\nsilo.toml\nindex/\n"


def found(folder: Path, silos: Sequence[str], *, port: int = 8100) -> list[Path]:
    """Write a federation's folder and return what a reader should open first.

    A folder that holds anything is refused. Silos listen at the ports after the broker's.
    """
    names = [check_name(name) for name in silos]
    if len({name.lower() for name in names} | {BROKER, "authority"}) != len(names) + 2:
        raise ConfigError(
            "silos need names of their own", value=", ".join(silos), expected="all different, not broker"
        )
    if not names or not 0 < port <= 65_535 - len(names):
        raise ConfigError("a federation needs a silo, and ports to listen at", value=port)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already", value=str(folder), expected="a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    make_keys(folder, names, broker=BROKER)
    hash_key = secrets.token_urlsafe(24)
    for number, name in enumerate(names, 1):
        own = folder / name
        told = _SILO.format(name=name, host=LOOPBACK[1], port=port + number, hash_key=hash_key)
        write_private(own / "silo.toml", told.encode())
        (own / "documents").mkdir()
        (own / "documents" / "example.md").write_text(_EXAMPLE.format(name=name), encoding="utf-8")
    listed = "".join(
        _SILO_OF_BROKER.format(name=name, host=LOOPBACK[1], port=port + number)
        for number, name in enumerate(names, 1)
    )
    starts = "\n".join(f"isthmus node --config {name}/silo.toml" for name in names)
    readme = _README.format(title=folder.name, count=len(names) + 1, starts=starts, port=port, first=names[0])
    write_private(folder / "broker.toml", _BROKER.format(port=port, silos=listed).encode())
    for name, text in (
        ("README.md", readme),
        (".gitignore", _IGNORE),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / "README.md", folder / "broker.toml", *(folder / name / "silo.toml" for name in names)]


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
    made = [
        authority.issue(name, clients=clients, hosts=(*LOOPBACK, *hosts), days=days).certificate.parent
        for name, clients in parties
    ]
    if broker and not (folder / broker / API_KEYS).exists():
        keys = ApiKeys(folder / broker / API_KEYS)
        token = keys.add("admin", scopes=SCOPES, days=days)
        write_private(folder / broker / ADMIN_KEY, token.encode() + b"\n")
    return made
