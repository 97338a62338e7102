"""Private features over Flower messages: the relay of `private.exchange` as a ServerApp, silos as ClientApps.

A message of the kind `query.exchange` is a turn: its record `turn` holds what was agreed and the silo's post,
its record `sums` the silo's part of a step of the secure sum, its record `keys` everybody's envelope key.
The reply has the same form. Post is sealed between silos; Flower and the relay carry bytes that they cannot
read.

A silo's node configuration says where its folder and queries lie:

    {"silo": "north", "folder": "/srv/north/private", "queries": "/srv/north/queries.tsv"}

and nothing that arrives over the network can name another path or another ε. With `least-colluding` and
`most-width` it refuses a relay that proposes less noise or wider sketches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus.asking import Each, Silos
from isthmus.errors import ConfigError, FederationError, ProtocolError
from isthmus.federation.answers import GridCarrier, connected
from isthmus.federation.flower import ClientApp, ConfigRecord, Context, Grid, Message, RecordDict
from isthmus.federation.remote import check_claim
from isthmus.federation.settings import Rounds
from isthmus.private import WIDTH, Agreed, Exchange, ExchangeRelay, ExchangeReply, Party, SiloFolder, Turn
from isthmus.report import Progress
from isthmus.tables import read_queries, replacing

ACTION = "exchange"
TURN, SUMS, KEYS = "turn", "sums", "keys"

F = TypeVar("F", bound=BaseModel)
Parties = Callable[[Context], Party]
"""Which silo a node is."""


@dataclass(frozen=True)
class Passing:
    """An exchange as its relay sees it: where its record goes, how many silos it waits for, and how long."""

    out: Path
    silos: int = 4
    width: int = WIDTH
    """Cells of the sketches of totals."""
    colluding: int = 1
    """Silos that may tell the relay their share of the noise."""
    deadline: float = 120.0
    """Seconds that silos have to appear, and for every turn."""


class _Form(BaseModel):
    """What a record must have, each value of its own kind and within bounds."""

    model_config = ConfigDict(strict=True)
    sums: dict[str, bytes]
    letters: list[bytes]


class _TurnForm(_Form):
    keys: dict[str, bytes]
    session: bytes = Field(min_length=16, max_length=16)
    silos: list[str]
    count: int = Field(ge=2, le=1000)
    width: int = Field(ge=2, le=1 << 23)
    colluding: int = Field(ge=1)
    step: int = Field(ge=0, le=1 << 20)
    over: bool


class _ReplyForm(_Form):
    silo: str = Field(min_length=1)
    done: bool
    refused: int = Field(ge=0, le=1 << 31)
    failed: list[str]
    key: bytes


def written(turn: Turn) -> RecordDict:
    """A turn as Flower's records."""
    values = {**vars(turn.agreed), **vars(turn)}
    return _recorded({name: value for name, value in values.items() if name != "agreed"})


def read_turn(content: RecordDict) -> Turn:
    """The turn that records are, or a ProtocolError."""
    form = _validated(_TurnForm, content)
    if form.colluding > form.count:
        raise ProtocolError("more silos that collude than there are")
    agreed = Agreed(form.session, tuple(form.silos), form.count, form.width, form.colluding)
    return Turn(agreed, form.step, tuple(form.letters), form.sums, form.keys, form.over)


def written_reply(reply: ExchangeReply) -> RecordDict:
    """A reply as Flower's records."""
    return _recorded(vars(reply))


def read_reply(content: RecordDict) -> ExchangeReply:
    """The reply that records are, or a ProtocolError."""
    form = _validated(_ReplyForm, content)
    failed = tuple(form.failed)
    return ExchangeReply(form.silo, tuple(form.letters), form.sums, form.done, form.refused, failed, form.key)


def _recorded(values: Mapping[str, Any]) -> RecordDict:
    """Named bytes in records of their own, and all else in one."""
    named = {name: value for name, value in values.items() if isinstance(value, Mapping)}
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name not in named
    }
    return RecordDict({name: ConfigRecord(dict(part)) for name, part in {TURN: fields, **named}.items()})


def _validated(form: type[F], content: RecordDict) -> F:
    records = {name: dict(record) for name, record in content.config_records.items()}
    try:
        return form.model_validate({SUMS: {}, KEYS: {}, **records.pop(TURN, {}), **records})
    except ValidationError:
        raise ProtocolError("a record that no turn has") from None  # and nothing of what is in it


def take_part(app: ClientApp, parties: Parties) -> ClientApp:
    """Let the silos of a ClientApp take part in exchanges."""

    @app.query(ACTION)
    def exchange(message: Message, context: Context) -> Message:
        reply = Exchange(parties(context), read_turn(message.content)).reply()
        return Message(written_reply(reply), reply_to=message)

    return app


def own_party(context: Context) -> Party:
    """The silo that a node's configuration tells of."""
    settings = context.node_config
    missing = next((key for key in ("folder", "queries") if key not in settings), None)
    if missing is not None:
        raise ConfigError(
            f"the node configuration lacks {missing!r}",
            key=missing,
            expected="[training] private and queries",
        )
    form = str(settings.get("form", "ask"))
    if form not in ("ask", "publish"):
        raise ConfigError(f"no form of release {form!r}", key=form, known=("ask", "publish"))
    return Party(
        SiloFolder.at(str(settings["folder"])),
        read_queries(str(settings["queries"])),
        form,  # type: ignore[arg-type]  # just looked at
        float(settings.get("epsilon", 8.0)),
        k=int(settings.get("k", 100)),
        least_colluding=int(settings.get("least-colluding", 1)),
        most_width=int(settings.get("most-width", WIDTH)),
    )


def pass_on(passing: Passing, grid: Grid) -> ExchangeRelay:
    """Carry envelopes between a grid's silos until all are done; the record goes to `out`."""
    relay = ExchangeRelay(passing.silos, passing.width, passing.colluding)
    nodes = _gathered(passing, grid)
    record: list[dict[str, Any]] = []
    with Progress("exchange", None) as bar:
        replies = _exchange_turns(passing, grid, dict.fromkeys(nodes, relay.first()))
        node_of = {reply.silo: node for node, reply in replies.items()}
        if len(node_of) != len(nodes):
            raise FederationError("two nodes say that they are the same silo")
        while turns := relay.next({reply.silo: reply for reply in replies.values()}):
            record.append(_summary(relay, replies))
            bar.advance(note=f"{relay.letters} envelopes, {len(relay.done)} of {passing.silos} silos done")
            replies = _exchange_turns(passing, grid, {node_of[name]: turn for name, turn in turns.items()})
    record.append(_summary(relay, replies))
    passing.out.mkdir(parents=True, exist_ok=True)
    with replacing(passing.out / "exchange.json") as stream:
        stream.write(json.dumps({"session": relay.session.hex(), "turns": record}, indent=1).encode())
    return relay


def _gathered(passing: Passing, grid: Grid) -> list[int]:
    nodes = connected(grid, passing.silos, passing.deadline)
    if len(nodes) != passing.silos:
        raise FederationError(f"an exchange of {passing.silos} silos, but {len(nodes)} nodes are there")
    return nodes


def _exchange_turns(passing: Passing, grid: Grid, turns: Mapping[int, Turn]) -> dict[int, ExchangeReply]:
    """Every node's reply; a node that fails is named by its number, with what it said."""

    def read(node: int, message: Message) -> ExchangeReply:
        reply = read_reply(message.content)
        check_claim(grid, node, reply.silo)
        return reply

    nodes = {node: node for node in turns}
    carrier = GridCarrier(grid, f"query.{ACTION}", nodes, Rounds(deadline=passing.deadline))
    asker = Silos(tuple(nodes), carrier, passing.deadline)
    shows = "its name, its key, sealed letters, how many it refused, and its part of a masked sum"
    questions = Each({node: written(turn) for node, turn in turns.items()})
    return dict(asker.collect(questions, read, shows=shows).by_silo)


def _summary(relay: ExchangeRelay, replies: Mapping[int, ExchangeReply]) -> dict[str, Any]:
    """What the relay saw of a turn."""
    return {
        "step": relay.step,
        "letters": relay.letters,
        "bytes": relay.carried,
        "done": sorted(relay.done),
        "refused": {reply.silo: reply.refused for reply in replies.values() if reply.refused},
        "failed": {reply.silo: list(reply.failed) for reply in replies.values() if reply.failed},
    }
