"""The exchange over Flower messages, in process: the same features, and records that are not believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid, ServerApp

from exchanges import exchange_in_memory
from isthmus.errors import ConfigError, FederationError, ProtocolError
from isthmus.federation.deployment import (
    Passing,
    own_party,
    pass_on,
    read_reply,
    read_turn,
    take_part,
    written,
)
from isthmus.federation.runtimes import LocalGrid, in_process
from isthmus.private.exchange import ExchangeRelay, ExchangeReply, Party, Turn
from isthmus.private.keys import GroupKey
from isthmus.private.ledger import Budget, Ledger, fingerprint
from isthmus.private.store import LEDGER, SiloFolder
from isthmus.private.sums import Agreed
from isthmus.randomness import Streams
from isthmus.tables import read_letor
from isthmus_reproduce import synthetic_text

NAMES = ("east", "north", "south", "west")
CORPUS = synthetic_text.text(80, 12, 4, seed=5, words=40)
WIDTH = 1 << 12


def parties(path: Path) -> list[Party]:
    """Four silos that trust each other; their keys, nonces and noise are those of a seed."""
    rng = Streams(0)("keys")
    key, noise, decoys = GroupKey.fresh(epoch=1, entropy=rng.bytes), rng.bytes(32), rng.bytes(32)
    folders = [SiloFolder.at(path / name, create=True) for name in NAMES]
    cards = [folder.keys.begin(name).card for name, folder in zip(NAMES, folders, strict=True)]
    made = []
    for name, silo, folder in zip(NAMES, CORPUS.silos, folders, strict=True):
        folder.keys.join(key)
        for file, secret in (("noise.key", noise), ("decoys.key", decoys)):
            told = f'{{"format": "isthmus {file}", "secret": "{secret.hex()}"}}'
            (folder.path / file).write_text(told)
            (folder.path / file).chmod(0o600)
        for card in cards:
            if card.name != name:
                folder.keys.trust(card)
        own = CORPUS.silo(silo)
        with Ledger(folder.path / LEDGER, Budget(), entropy=Streams(1)("nonces", name).bytes) as ledger:
            texts = zip(own.documents.titles, own.documents.bodies, strict=True)
            ledger.versions(own.documents.ids, [fingerprint(*pair) for pair in texts])
        folder.build(own.documents, width=1 << 10)
        made.append(Party(folder, own.queries, k=5, entropy=Streams(2)("entropy", name).bytes))
    return made


def features(made: list[Party]) -> dict[tuple[str, str], np.ndarray]:
    found = {}
    for party in made:
        for peer in NAMES:
            if party.features(peer).exists():
                found[party.folder.path.name, peer] = read_letor(party.features(peer)).features
    return found


def test_flower_carries_what_memory_carries(tmp_path: Path) -> None:
    """With the same keys, nonces and noise, features are the same to the last digit."""
    here, there = parties(tmp_path / "here"), parties(tmp_path / "there")
    exchange_in_memory(dict(zip(NAMES, here, strict=True)), ExchangeRelay(4, WIDTH))

    def party(context: Context) -> Party:
        return there[int(context.node_config["partition-id"])]

    passing, relay = Passing(tmp_path / "out", 4, WIDTH), ServerApp()

    @relay.main()
    def main(grid: Grid, context: Context) -> None:
        pass_on(passing, grid)

    in_process(relay, take_part(ClientApp(), party), 4)
    assert (tmp_path / "out" / "exchange.json").exists()
    expected, found = features(here), features(there)
    assert set(found) == {(one, other) for one in NAMES for other in NAMES if one != other}
    for pair in expected:
        np.testing.assert_array_equal(found[pair], expected[pair])


def test_a_silo_that_cannot_go_on_ends_the_exchange(tmp_path: Path) -> None:
    made = parties(tmp_path)
    (made[2].folder.path / "noise.key").unlink()

    def party(context: Context) -> Party:
        return made[int(context.node_config["partition-id"])]

    grid = LocalGrid(take_part(ClientApp(), party), 4)
    try:
        with pytest.raises(FederationError, match=r"noise\.key"):
            pass_on(Passing(tmp_path / "out", 4, WIDTH), grid)
        with pytest.raises(FederationError, match="but 4 nodes"):
            pass_on(Passing(tmp_path / "out", 5, WIDTH, deadline=0.1), grid)
    finally:
        grid.close()


def turn() -> Turn:
    agreed = Agreed(b"s" * 16, NAMES, 4, WIDTH)
    return Turn(
        agreed, 3, (b"letter", b"another"), {"body": b"sum", "title/north": b""}, {"east": b"key"}, True
    )


def reply() -> ExchangeReply:
    return ExchangeReply("north", (b"letter",), {"body": b"x"}, True, 2, ("south",), b"key")


def test_records_come_back_as_they_were() -> None:
    assert read_turn(written(turn())) == turn()
    assert read_reply(written(reply())) == reply()
    assert read_turn(written(Turn(Agreed(b"s" * 16, (), 4, WIDTH), 0))).letters == ()
    for content, read in ((written(turn()), read_turn), (written(ExchangeReply("north")), read_reply)):
        travelled = recorddict_from_proto(recorddict_to_proto(content))  # as over Flower's wire
        assert read(travelled) == read(content)


@pytest.mark.soak
def test_fuzzed_records_are_refused(soak_count: Callable[[int, int], int]) -> None:
    """A value of another kind or range, or none at all, is a ProtocolError and nothing else."""
    rng = Streams(0)("fuzz")
    junk = [None, -1, 1 << 40, 2.5, "x", b"x", [1], ["x"], [b"x"], [], True]
    refused: list[str] = []
    for _ in range(soak_count(300, 10_000)):
        for content, read in ((written(turn()), read_turn), (written(reply()), read_reply)):
            record = dict(content.config_records["turn"])
            sums = dict(content.config_records["sums"])
            for table in (record, sums):
                for key in list(table):
                    if rng.random() < 0.2:
                        table[key] = junk[int(rng.integers(len(junk)))]
            content = RecordDict(
                {
                    name: ConfigRecord({key: value for key, value in table.items() if value is not None})
                    for name, table in (("turn", record), ("sums", sums))
                }
            )
            try:
                read(content)
            except ProtocolError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert not any(character.isdigit() for told in refused for character in told)


def test_a_silo_is_what_its_node_says(tmp_path: Path) -> None:
    (party, *_) = parties(tmp_path)
    (tmp_path / "q.tsv").write_text("q1\twing flow\n")
    told = {"silo": "east", "folder": str(party.folder.path), "queries": str(tmp_path / "q.tsv"), "k": 7}
    context = Context(1, 7, told, RecordDict(), {})
    assert own_party(context).queries.texts == ("wing flow",)
    assert (own_party(context).form, own_party(context).k) == ("ask", 7)
    told["form"] = "shout"
    with pytest.raises(ConfigError, match="shout"):
        own_party(context)
    del told["queries"]
    with pytest.raises(ConfigError, match="queries"):
        own_party(context)


def test_a_turn_that_is_none_is_the_silos_error(tmp_path: Path) -> None:
    made = parties(tmp_path)
    app = take_part(ClientApp(), lambda context: made[0])
    grid = LocalGrid(app, 1)
    try:
        junk = RecordDict({"turn": ConfigRecord({"session": b"short"})})
        (answer,) = grid.send_and_receive([Message(junk, next(iter(grid.get_node_ids())), "query.exchange")])
        assert answer.has_error()
        assert "ProtocolError" in answer.error.reason
    finally:
        grid.close()
