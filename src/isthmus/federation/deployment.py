"""The apps on real silos: what the coordinator runs over a grid of them, and the ClientApp of each.

A silo's node configuration says who it is and where its rows lie:

    {"silo": "north", "data": "/srv/north/rows.txt", "ledger": "/srv/north/ledger.db"}

and nothing that arrives over the network can name another path. The coordinator's run is a TOML file on its
own machine: `Deployment`, or for an exchange of private features `Passing` (see `carriers`), or for training
on what was exchanged too `Cooperation` (see `semisupervised.deployed`). An interrupted run is started again
as it is and goes on from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from isthmus.config import load
from isthmus.corpora import load_letor
from isthmus.errors import ConfigError
from isthmus.federation.apps import train_in_folder
from isthmus.federation.carriers import Passing, own_party, pass_on, take_part
from isthmus.federation.checkpoints import RunFolder
from isthmus.federation.clients import own_book
from isthmus.federation.flower import ClientApp, Context, Grid
from isthmus.federation.members import Trust
from isthmus.federation.rounds import Coordinator, HeldOut, State
from isthmus.federation.semisupervised import Cooperation, ExchangedRows, cooperate, studying_app
from isthmus.federation.settings import Config
from isthmus.private import SiloFolder
from isthmus.rankers import Scaling
from isthmus.tables import Letor


@dataclass(frozen=True)
class Deployment:
    """A run over real silos: where it is kept, and the judged queries that the coordinator has.

    `training.dealing.silos` is how many silos to wait for, and `training.probe` a file, `validation` or none.
    """

    out: Path
    validation: Path | None = None
    test: Path | None = None
    training: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        own = isinstance(self.training.probe, Path) or (
            self.training.probe == "validation" and self.validation is not None
        )
        if self.training.strategy.needs_probe and not own:
            raise ValueError(
                "training.probe must be a file, or 'validation' beside a file of validation queries:"
                " there are no training queries to take it from"
            )

    @property
    def probe(self) -> Path | None:
        """The file of the probe, where the strategy needs one."""
        named = self.validation if self.training.probe == "validation" else self.training.probe
        return named if isinstance(named, Path) and self.training.strategy.needs_probe else None


class OwnFolder:
    """A silo's rows where its own node configuration says they are."""

    def name(self, context: Context) -> str:
        """What the silo calls itself."""
        return _node_setting(context, "silo")

    def table(self, context: Context) -> Letor:
        """Its rows; parsed once, then mapped from the cache."""
        return _rows(_node_setting(context, "data"))

    def scaled(self, context: Context, scaling: Scaling) -> Letor:
        """Its rows, scaled."""
        return scaling(self.table(context))


@lru_cache(maxsize=1)
def _rows(path: str) -> Letor:
    return load_letor(path)


def _node_setting(context: Context, key: str) -> str:
    if key not in context.node_config:
        raise ConfigError(
            f"the node configuration lacks {key!r}", key=key, expected="[training] in the silo's settings"
        )
    return str(context.node_config[key])


def own_trust(context: Context) -> Trust:
    """The silo's identity and the cards it trusts: without them a coordinator could invent all the others."""
    if "folder" not in context.node_config:
        raise ConfigError(
            "a secure sum needs the cards of the other silos, and the node configuration names no folder",
            key="folder",
            expected="isthmus keys new and trust, then `private` in [training]",
        )
    keys = SiloFolder.at(_node_setting(context, "folder")).keys
    known = {
        name: Ed25519PublicKey.from_public_bytes(card.verifying) for name, card in keys.trusted().items()
    }
    return Trust(keys.identity().signing, known)


class DeployedRun(NamedTuple):
    """A run that a file describes: where its record goes, and what it does over a grid."""

    out: Path
    over: Callable[[Grid], object]


def read_run(kind: str, path: str) -> DeployedRun:
    """The run in a TOML file: `train`, `exchange` or `cotrain`."""
    if kind == "exchange":
        passing = load(Passing, path)
        return DeployedRun(passing.out, partial(pass_on, passing))
    if kind == "cotrain":
        cooperation = load(Cooperation, path)
        return DeployedRun(cooperation.out, partial(cooperate, cooperation))
    deployment = load(Deployment, path)
    return DeployedRun(deployment.out, partial(coordinate, deployment))


def coordinate(deployment: Deployment, grid: Grid) -> None:
    """Train over the grid's silos, from the folder's last checkpoint if it has one."""
    config = deployment.training
    files = {"validation": deployment.validation, "test": deployment.test, "probe": deployment.probe}

    def rounds(tables: Mapping[str, Letor], start: State | None, remember: Callable[[State], None]) -> State:
        held_out = HeldOut(tables.get("validation"), tables.get("probe"))
        return Coordinator(config, held_out, grid).run(start, remember)

    train_in_folder(RunFolder(deployment.out), config, files, rounds)


client: ClientApp = take_part(
    studying_app(ExchangedRows(OwnFolder()), book=own_book, trusts=own_trust), own_party
)
