"""Private features over Flower messages: the relay of `private.exchange` as a ServerApp, silos as ClientApps.

A message of the kind `query.exchange` is a turn: its record `turn` holds what was agreed and the silo's post,
its record `sums` the silo's part of a step of the secure sum, its record `keys` everybody's key for letters.
The reply has the same form. Post is sealed between silos; Flower and the relay carry bytes that they cannot
read.

A silo's node configuration says where its folder and queries lie:

    {"silo": "north", "folder": "/srv/north/private", "queries": "/srv/north/queries.tsv"}

and nothing that arrives over the network can name another path or another ε. With `least-colluding` and
`most-width` it refuses a relay that proposes less noise or wider sketches.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError, FederationError, ProtocolError
from isthmus.federation.flower import ClientApp, ConfigRecord, Context, Grid, Message, RecordDict, ServerApp
from isthmus.federation.remote import check_claim
from isthmus.private.exchange import Exchange, Party, Relay, Reply, Turn
from isthmus.private.store import SiloFolder
from isthmus.private.summing import Agreed
from isthmus.private.totals import WIDTH
from isthmus.report import Progress
from isthmus.tables import read_queries
from isthmus.tables.files import replacing

ACTION = "exchange"
TURN, SUMS, KEYS = "turn", "sums", "keys"

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


def written(turn: Turn) -> RecordDict:
    """A turn as Flower's records."""
    agreed = turn.agreed
    told: dict[str, Any] = {
        "session": agreed.session,
        "silos": list(agreed.silos),
        "count": agreed.count,
        "width": agreed.width,
        "colluding": agreed.colluding,
        "step": turn.step,
        "letters": list(turn.letters),
        "over": turn.over,
    }
    parts = {TURN: told, SUMS: dict(turn.sums), KEYS: dict(turn.keys)}
    return RecordDict({name: ConfigRecord(part) for name, part in parts.items()})


def read_turn(content: RecordDict) -> Turn:
    """The turn that records are, or a ProtocolError."""
    told = _Record(content, TURN)
    count, width = told.number("count", 2, 1000), told.number("width", 2, 1 << 23)
    session = told.octets("session")
    if len(session) != 16:
        raise ProtocolError("a session that is none")
    agreed = Agreed(session, told.texts("silos"), count, width, told.number("colluding", 1, count))
    over = told.values.get("over")
    if not isinstance(over, bool):
        raise ProtocolError("a turn that is none")
    step, letters = told.number("step", 0, 1 << 20), told.parts("letters")
    return Turn(agreed, step, letters, _named(content, SUMS), _named(content, KEYS), over)


def written_reply(reply: Reply) -> RecordDict:
    """A reply as Flower's records."""
    told: dict[str, Any] = {
        "silo": reply.silo,
        "done": reply.done,
        "refused": reply.refused,
        "failed": list(reply.failed),
        "letters": list(reply.letters),
        "key": reply.key,
    }
    return RecordDict({TURN: ConfigRecord(told), SUMS: ConfigRecord(dict(reply.sums))})


def read_reply(content: RecordDict) -> Reply:
    """The reply that records are, or a ProtocolError."""
    told = _Record(content, TURN)
    silo, done = told.values.get("silo"), told.values.get("done")
    if not isinstance(silo, str) or not silo or not isinstance(done, bool):
        raise ProtocolError("a reply that is none")
    refused, failed = told.number("refused", 0, 1 << 31), told.texts("failed")
    key = told.octets("key")
    return Reply(silo, told.parts("letters"), _named(content, SUMS), done, refused, failed, key)


class _Record:
    """The values of a record, each of the kind it must be."""

    def __init__(self, content: RecordDict, name: str) -> None:
        self.values: Mapping[str, Any] = content.config_records.get(name, ConfigRecord())

    def number(self, key: str, low: int, high: int) -> int:
        value = self.values.get(key)
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError("a record with a number that cannot be")
        return value

    def octets(self, key: str) -> bytes:
        value = self.values.get(key)
        if not isinstance(value, bytes):
            raise ProtocolError("a record without its bytes")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        return self._list(key, str)

    def parts(self, key: str) -> tuple[bytes, ...]:
        return self._list(key, bytes)

    def _list(self, key: str, kind: type[Any]) -> tuple[Any, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(part, kind) for part in value):
            raise ProtocolError("a record with a list that is none")
        return tuple(value)


def _named(content: RecordDict, name: str) -> dict[str, bytes]:
    entries = dict(content.config_records.get(name, ConfigRecord()))
    if not all(isinstance(value, bytes) for value in entries.values()):
        raise ProtocolError("a record of named bytes that is none")
    return entries  # type: ignore[return-value]


def take_part(app: ClientApp, parties: Parties) -> ClientApp:
    """Let the silos of a ClientApp take part in exchanges."""

    @app.query(ACTION)
    def exchange(message: Message, context: Context) -> Message:
        reply = Exchange(parties(context), read_turn(message.content)).reply()
        return Message(written_reply(reply), reply_to=message)

    return app


def own_party(context: Context) -> Party:
    """The silo that a node's configuration tells of."""
    told = context.node_config
    missing = next((key for key in ("folder", "queries") if key not in told), None)
    if missing is not None:
        raise ConfigError(
            f"the node configuration lacks {missing!r}",
            key=missing,
            expected="[training] private and queries",
        )
    form = str(told.get("form", "ask"))
    if form not in ("ask", "publish"):
        raise ConfigError(f"no form of release {form!r}", key=form, known=("ask", "publish"))
    return Party(
        SiloFolder.at(str(told["folder"])),
        read_queries(str(told["queries"])),
        form,  # type: ignore[arg-type]  # just looked at
        float(told.get("epsilon", 8.0)),
        k=int(told.get("k", 100)),
        least_colluding=int(told.get("least-colluding", 1)),
        most_width=int(told.get("most-width", WIDTH)),
    )


def relay_app(passing: Passing) -> ServerApp:
    """The relay as a ServerApp."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        pass_on(passing, grid)

    return app


def pass_on(passing: Passing, grid: Grid) -> Relay:
    """Carry letters between a grid's silos until all are done; the record goes to `out`."""
    relay = Relay(passing.silos, passing.width, passing.colluding)
    nodes = _gathered(passing, grid)
    record: list[dict[str, Any]] = []
    with Progress("exchange", None) as bar:
        replies = _asked(passing, grid, dict.fromkeys(nodes, relay.first()))
        node_of = {reply.silo: node for node, reply in replies.items()}
        if len(node_of) != len(nodes):
            raise FederationError("two nodes say that they are the same silo")
        while turns := relay.next({reply.silo: reply for reply in replies.values()}):
            record.append(_told(relay, replies))
            bar.advance(note=f"{relay.letters} letters, {len(relay.done)} of {passing.silos} silos done")
            replies = _asked(passing, grid, {node_of[name]: turn for name, turn in turns.items()})
    record.append(_told(relay, replies))
    passing.out.mkdir(parents=True, exist_ok=True)
    with replacing(passing.out / "exchange.json") as stream:
        stream.write(json.dumps({"session": relay.session.hex(), "turns": record}, indent=1).encode())
    return relay


def _gathered(passing: Passing, grid: Grid) -> list[int]:
    until = time.monotonic() + passing.deadline
    while len(nodes := sorted(grid.get_node_ids())) < passing.silos and time.monotonic() < until:
        time.sleep(0.2)
    if len(nodes) != passing.silos:
        raise FederationError(f"an exchange of {passing.silos} silos, but {len(nodes)} nodes are there")
    return nodes


def _asked(passing: Passing, grid: Grid, turns: Mapping[int, Turn]) -> dict[int, Reply]:
    """Every node's reply; a node that fails is named by its number, with what it said."""
    messages = [Message(written(turn), node, f"query.{ACTION}") for node, turn in turns.items()]
    replies: dict[int, Reply] = {}
    for message in grid.send_and_receive(messages, timeout=passing.deadline):
        node = message.metadata.src_node_id
        if message.has_error():
            raise FederationError(f"node {node} cannot go on: {message.error.reason}")
        replies[node] = read_reply(message.content)
        check_claim(grid, node, replies[node].silo)
    missing = sorted(set(turns) - set(replies))
    if missing:
        raise FederationError(
            f"no reply within {passing.deadline:g} s from {len(missing)} of {len(turns)} nodes"
        )
    return replies


def _told(relay: Relay, replies: Mapping[int, Reply]) -> dict[str, Any]:
    """What the relay saw of a turn."""
    return {
        "step": relay.step,
        "letters": relay.letters,
        "bytes": relay.carried,
        "done": sorted(relay.done),
        "refused": {reply.silo: reply.refused for reply in replies.values() if reply.refused},
        "failed": {reply.silo: list(reply.failed) for reply in replies.values() if reply.failed},
    }
