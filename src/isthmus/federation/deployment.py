"""Runs over real silos: the coordinator's work over a grid of them, and the ClientApp of each silo.

The coordinator's run is a TOML file on its own machine: `Deployment` trains, `Passing` relays an exchange of
private features, `Cooperation` trains on the exchanged features too. An interrupted training run is started
again with the same file and continues from its last checkpoint. The model of that checkpoint then labels
again the pairs for which silos have lost labels.

A silo's node configuration gives its name and the paths of its rows, ledger, folder and queries:

    {"silo": "north", "data": "/srv/north/rows.txt", "ledger": "/srv/north/ledger.db",
     "folder": "/srv/north/private", "queries": "/srv/north/queries.tsv"}

Nothing that arrives over the network can name another path or another ε. With `least-colluding` and
`most-width` the silo refuses a relay that proposes less noise or wider sketches.

A message of the kind `query.exchange` is a turn of `private.exchange`. Its record `turn` contains the agreed
settings and the silo's envelopes, its record `sums` the silo's part of a step of the secure sum, and its
record `keys` all silos' envelope keys. The reply has the same form. Envelopes are sealed between silos;
Flower and the relay carry bytes that they cannot read. After an exchange every silo has, in its own folder,
the features of its queries over the other silos' documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from isthmus import private
from isthmus.arrays import FloatArray
from isthmus.asking import Each, Silos
from isthmus.config import load, to_toml
from isthmus.corpora import load_letor
from isthmus.errors import ConfigError, FederationError, ProtocolError
from isthmus.federation.apps import Training, train_in_folder
from isthmus.federation.checkpoints import RunFolder
from isthmus.federation.clients import own_book
from isthmus.federation.flower import ClientApp, ConfigRecord, Context, Grid, Message, RecordDict
from isthmus.federation.members import Trust
from isthmus.federation.messages import GridCarrier, connected
from isthmus.federation.rounds import Coordinator, HeldOut, State
from isthmus.federation.runtimes import check_claim
from isthmus.federation.semisupervised import Conductor, CoTraining, Remember, SiloRows, studying_app
from isthmus.federation.settings import Config, Rounds
from isthmus.report import Progress
from isthmus.tables import Letor, read_queries, write_whole

ACTION = "exchange"
TURN, SUMS, KEYS = "turn", "sums", "keys"
FEATURES = "features"
"""Subfolder of a silo's folder into which an exchange writes features, one file for every other silo."""
TRAINING = "cotraining.toml"
"""File in a run's folder with its co-training options, beside the configuration of its rounds."""

T = TypeVar("T")
Parties = Callable[[Context], private.Party]
"""Returns the silo of a node, as a party to exchanges."""


@dataclass(frozen=True)
class Passing:
    """Settings of an exchange for its relay: output folder, number of silos to wait for, and deadline."""

    out: Path
    silos: int = 4
    width: int = private.WIDTH
    """Number of cells of the sketches of totals."""
    colluding: int = 1
    """Number of silos that may tell the relay their share of the noise."""
    deadline: float = 120.0
    """Seconds that silos have to appear, and seconds for every turn."""


def written(turn: private.Turn | private.ExchangeReply) -> RecordDict:
    """Convert a turn, or the reply to one, into Flower's records: each mapping into a record of its own, and
    all other fields into one."""
    values = vars(turn) if isinstance(turn, private.ExchangeReply) else {**vars(turn.agreed), **vars(turn)}
    named = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    rest = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in named and name != "agreed"
    }
    return RecordDict({name: ConfigRecord(dict(part)) for name, part in {TURN: rest, **named}.items()})


def read_turn(content: RecordDict) -> private.Turn:
    """Parse a turn from records; ProtocolError if they contain none."""
    return _read(private.Turn, content, agreed=vars(_read(private.Agreed, content)))


def read_reply(content: RecordDict) -> private.ExchangeReply:
    """Parse the reply to a turn from records; ProtocolError if they contain none."""
    return _read(private.ExchangeReply, content)


def _read(kind: type[T], content: RecordDict, **more: Any) -> T:
    records = {name: dict(record) for name, record in content.config_records.items()}
    values = {SUMS: {}, KEYS: {}, **records.pop(TURN, {}), **records, **more}
    try:
        return load(kind, {each.name: values[each.name] for each in fields(kind)})  # type: ignore[arg-type]
    except (ConfigError, KeyError):
        raise ProtocolError("a record that no turn has") from None  # the cause would quote its content


def take_part(app: ClientApp, parties: Parties) -> ClientApp:
    """Let the silos of a ClientApp take part in exchanges."""

    @app.query(ACTION)
    def exchange(message: Message, context: Context) -> Message:
        reply = private.Exchange(parties(context), read_turn(message.content)).reply()
        return Message(written(reply), reply_to=message)

    return app


def own_party(context: Context) -> private.Party:
    """Return the silo that a node's configuration describes, as a party to exchanges."""
    settings, needed = context.node_config, "[training] private and queries"
    folder, queries = (_node_setting(context, key, needed) for key in ("folder", "queries"))
    form = str(settings.get("form", "ask"))
    if form not in ("ask", "publish"):
        raise ConfigError(f"no form of release {form!r}", key=form, known=("ask", "publish"))
    return private.Party(
        private.SiloFolder.at(folder),
        read_queries(queries),
        form,  # type: ignore[arg-type]  # just looked at
        float(settings.get("epsilon", 8.0)),
        k=int(settings.get("k", 100)),
        least_colluding=int(settings.get("least-colluding", 1)),
        most_width=int(settings.get("most-width", private.WIDTH)),
    )


def pass_on(passing: Passing, grid: Grid) -> private.ExchangeRelay:
    """Relay envelopes between a grid's silos until all are done, and write the record into `out`."""
    relay = private.ExchangeRelay(passing.silos, passing.width, passing.colluding)
    nodes = connected(grid, passing.silos, passing.deadline)
    if len(nodes) != passing.silos:
        raise FederationError(f"an exchange of {passing.silos} silos, but {len(nodes)} nodes are there")
    record: list[dict[str, Any]] = []
    with Progress("exchange", None) as bar:
        replies = _exchange_turns(passing, grid, dict.fromkeys(nodes, relay.first()))
        node_of = {reply.silo: node for node, reply in replies.items()}
        if len(node_of) != len(nodes):
            raise FederationError("two nodes say that they are the same silo")
        while turns := relay.next({reply.silo: reply for reply in replies.values()}):
            record.append(_summary(relay, replies))
            bar.advance(note=f"{relay.letters} envelopes, {len(relay.done)} of {passing.silos} silos done")
            handed = {node_of[name]: turn for name, turn in turns.items()}
            replies = _exchange_turns(passing, grid, handed, least=2 if relay.may_leave else None)
    record.append(_summary(relay, replies))
    passing.out.mkdir(parents=True, exist_ok=True)
    whole = {"session": relay.session.hex(), "turns": record}
    write_whole(passing.out / "exchange.json", json.dumps(whole, indent=1).encode())
    return relay


def _exchange_turns(
    passing: Passing, grid: Grid, turns: Mapping[int, private.Turn], *, least: int | None = None
) -> dict[int, private.ExchangeReply]:
    """Send every node its turn and return the replies, by default of all nodes. A failed node is named by its
    number, with its error."""

    def read(node: int, message: Message) -> private.ExchangeReply:
        reply = read_reply(message.content)
        check_claim(grid, node, reply.silo)
        return reply

    nodes = {node: node for node in turns}
    carrier = GridCarrier(grid, f"query.{ACTION}", nodes, Rounds(deadline=passing.deadline))
    asker = Silos(tuple(nodes), carrier, passing.deadline, least, enough=len(nodes))
    shows = "its name, its key, sealed letters, how many it refused, and its part of a masked sum"
    questions = Each({node: written(turn) for node, turn in turns.items()})
    return dict(asker.collect(questions, read, shows=shows).by_silo)


def _summary(relay: private.ExchangeRelay, replies: Mapping[int, private.ExchangeReply]) -> dict[str, Any]:
    """Summarise what the relay saw of a turn."""
    return {
        "step": relay.step,
        "letters": relay.letters,
        "bytes": relay.carried,
        "done": sorted(relay.done),
        "refused": {reply.silo: reply.refused for reply in replies.values() if reply.refused},
        "failed": {reply.silo: list(reply.failed) for reply in replies.values() if reply.failed},
        **({"left": sorted(relay.left)} if relay.left else {}),
    }


class OwnFolder:
    """A silo's judged rows, from the path in its node configuration, and the cross rows from its exchanges.

    Every other silo has a file of cross rows: one that leaves or joins does not change pairs with the others.
    """

    def name(self, context: Context) -> str:
        """The silo's name in its configuration."""
        return _node_setting(context, "silo")

    def labelled(self, context: Context) -> Letor:
        """The silo's judged rows; parsed once, then mapped from the cache."""
        return _rows(_node_setting(context, "data"))

    def rows(self, context: Context) -> SiloRows:
        """The silo's judged rows, and the cross rows of the queries among them."""
        labelled = self.labelled(context)
        return SiloRows(labelled, *cross_rows(labelled, str(context.node_config.get("folder", ""))))


@lru_cache(maxsize=1)
def _rows(path: str) -> Letor:
    return load_letor(path)


def _node_setting(context: Context, key: str, expected: str = "[training] in the silo's settings") -> str:
    if key not in context.node_config:
        raise ConfigError(f"the node configuration lacks {key!r}", key=key, expected=expected)
    return str(context.node_config[key])


def cross_rows(labelled: Letor, folder: str) -> tuple[Letor, FloatArray]:
    """Read the exchanged rows of queries that also have judged rows, and their error bars, if any."""
    files = sorted((Path(folder) / FEATURES).glob("*.txt")) if folder else []
    judged = set(labelled.queries)
    parts, errors = [], [np.zeros(0)]
    for rows, bars in map(private.read_cross_rows, files):
        known = np.array([query in judged for query in rows.queries], dtype=bool)
        parts.append(rows[known].widened(labelled.width))
        errors.append(bars[known[rows.query_of_row]])
    filled = [part for part in parts if part.rows]
    cross = Letor.concat(filled) if filled else labelled.keep(np.zeros(labelled.rows, np.bool_))
    return cross, np.concatenate(errors)


@dataclass(frozen=True)
class Cooperation:
    """A co-training run over real silos: its output folder, the number of silos and the number of grades."""

    out: Path
    silos: int = 4
    grades: int = 3
    validation: Path | None = None
    test: Path | None = None
    training: CoTraining = field(default_factory=CoTraining)


def _check_same(training: CoTraining, folder: Path) -> None:
    """Raise ConfigError for a run with other labelling or anchor options, which its rounds do not record."""
    file = folder / TRAINING
    if (folder / "checkpoint").exists() and file.exists() and load(CoTraining, file) != training:
        raise ConfigError(f"{folder} holds a run with another configuration", expected="another out")


def cooperate(run: Cooperation, grid: Grid) -> Training:
    """Train over the grid's silos, from the folder's last checkpoint if it has one."""
    config, folder = run.training.rounds_of(run.silos, run.training.rounds), RunFolder(run.out)
    _check_same(run.training, folder.path)

    def rounds(tables: Mapping[str, Letor], start: State | None, remember: Remember) -> State:
        write_whole(folder.path / TRAINING, to_toml(run.training).encode())
        held_out = HeldOut(tables.get("validation"))
        return Conductor(run.training, run.grades, held_out, run.silos).run(grid, start, remember)

    return train_in_folder(folder, config, {"validation": run.validation, "test": run.test}, rounds)


@dataclass(frozen=True)
class Deployment:
    """A training run over real silos: its output folder, and the coordinator's judged queries.

    `training.dealing.silos` is the number of silos to wait for; `training.probe` is a file, `validation` or
    none.
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
        """The file of the probe, if the strategy needs one."""
        named = self.validation if self.training.probe == "validation" else self.training.probe
        return named if isinstance(named, Path) and self.training.strategy.needs_probe else None


def own_trust(context: Context) -> Trust:
    """Return the silo's identity and the cards it trusts; without cards a coordinator could invent silos."""
    needed = "the other silos' cards for a secure sum: isthmus keys new and trust, then [training] private"
    keys = private.SiloFolder.at(_node_setting(context, "folder", needed)).keys
    known = {
        name: Ed25519PublicKey.from_public_bytes(card.verifying) for name, card in keys.trusted().items()
    }
    return Trust(keys.identity().signing, known)


class DeployedRun(NamedTuple):
    """A run described by a file: its output folder, and the function that carries it out over a grid."""

    out: Path
    over: Callable[[Grid], object]


def read_run(kind: str, path: str) -> DeployedRun:
    """Read a run from a TOML file; its kind is `train`, `exchange` or `cotrain`."""
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


client: ClientApp = take_part(studying_app(OwnFolder(), book=own_book, trusts=own_trust), own_party)
