"""Silos elsewhere as a grid: what is lost on the way, answered twice, too late or by somebody else."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from isthmus.errors import DataError, FederationError, PrivacyError, ProtocolError
from isthmus.federation.deployment import client
from isthmus.federation.registration import Registration
from isthmus.federation.runtimes import (
    DELIVERIES,
    PATIENCE,
    REMEMBERED,
    REPEAT,
    RemoteGrid,
    SiloEnd,
    check_claim,
    decode,
    encode,
    number_of,
)
from isthmus.federation.settings import Rounds
from isthmus.private.ledger import Budget, Ledger
from isthmus.tables import Letor, write_letor

SILOS = ("south", "north")


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def grid(clock):
    made = RemoteGrid(SILOS, clock=clock)
    for name in SILOS:
        made.fetch(name)
    return made


def message(node, text="?"):
    return Message(RecordDict({"said": ConfigRecord({"text": text})}), node, "query.echo")


def silo(work=lambda message, context: None, reports=None):
    """A silo that counts how often it was asked, in its state, and tells."""
    app = ClientApp()

    @app.query("echo")
    def echo(message, context):
        work(message, context)
        count = int(context.state.config_records.get("seen", {"count": 0})["count"]) + 1
        context.state["seen"] = ConfigRecord({"count": count})
        told = {"count": count, "silo": str(context.node_config["silo"])}
        return Message(RecordDict({"told": ConfigRecord(told)}), reply_to=message)

    return SiloEnd(app, {"silo": "north"}, report=(reports if reports is not None else []).append)


def told(reply):
    return dict(reply.content.config_records["told"])


def test_a_message_goes_to_its_silo_and_its_reply_comes_back(grid):
    north, south = grid.get_node_ids()
    assert (grid.name(north), grid.name(south)) == ("north", "south")
    end, pushed = silo(), grid.push_messages([message(north)])
    assert grid.fetch("south") is None
    order = grid.fetch("north")
    assert [number_of(order)] == pushed
    assert not list(grid.pull_messages(pushed))
    assert grid.deliver("north", end.answer(order))
    (reply,) = grid.pull_messages(pushed)
    assert told(reply) == {"count": 1, "silo": "north"}
    assert reply.metadata.src_node_id == north
    assert not list(grid.pull_messages(pushed))


def test_state_lasts_from_message_to_message_of_a_run_and_not_to_the_next(grid, clock):
    end, node = silo(), 2
    counts = []
    for over in (grid, grid, RemoteGrid(SILOS, clock=clock)):
        pushed = over.push_messages([message(node)])
        over.deliver("north", end.answer(over.fetch("north")))
        counts += [told(reply)["count"] for reply in over.pull_messages(pushed)]
    assert counts == [1, 2, 1]
    assert len({over.run.run_id for over in (grid, RemoteGrid(SILOS))}) == 2


def test_a_lost_message_comes_again_and_is_answered_once(grid, clock):
    end, pushed = silo(), grid.push_messages([message(2)])
    first = grid.fetch("north")
    assert grid.fetch("north") is None  # it may be on its way
    reply = end.answer(first)
    clock.now += REPEAT - 1
    grid.fetch("north", busy=number_of(first))
    clock.now += REPEAT - 1
    assert grid.fetch("north") is None  # the silo has said that it is at work
    clock.now += 1
    again = grid.fetch("north")
    assert end.answer(again) == reply  # no new noise, and no second entry in the ledger
    assert grid.deliver("north", reply)
    assert not grid.deliver("north", reply)
    assert len(list(grid.pull_messages(pushed))) == 1


def test_a_message_that_ends_its_silo_is_given_up(grid, clock):
    pushed = grid.push_messages([message(2)])
    for _ in range(DELIVERIES):
        assert grid.fetch("north") is not None
        clock.now += REPEAT
    assert grid.fetch("north") is None
    (reply,) = grid.pull_messages(pushed)
    assert reply.has_error()
    assert reply.metadata.src_node_id == 2


def test_a_silo_that_falls_silent_is_gone(grid, clock):
    pushed = grid.push_messages([message(2), message(3)])
    clock.now += PATIENCE + 1
    grid.fetch("south")
    assert list(grid.get_node_ids()) == [3]
    (reply,) = grid.pull_messages(pushed)
    assert (reply.metadata.src_node_id, reply.error.reason) == (2, "the silo north is gone")


def test_a_silo_that_was_gone_at_registration_is_asked_again(grid, clock, tmp_path):
    rows = Letor.of(["q1"] * 3, [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [0, 1, 2])
    write_letor(rows, tmp_path / "rows.txt")
    ends = {}
    for name in SILOS:
        Ledger(tmp_path / name, Budget()).close()
        config = {"silo": name, "data": str(tmp_path / "rows.txt"), "ledger": str(tmp_path / name)}
        ends[name] = SiloEnd(client, config, report=[].append)

    def answering(*names):
        def wait(seconds):
            clock.now += PATIENCE + 1
            for name in names:
                if order := grid.fetch(name):
                    grid.deliver(name, ends[name].answer(order))

        return wait

    registration = Registration("zscore", Rounds())
    grid._changed.wait = answering("south")
    assert registration.gather(grid, 2) == {"south": 3}
    grid.fetch("north")
    grid.fetch("south")
    grid._changed.wait = answering("north", "south")
    assert registration.gather(grid, 2) == {"north": 2, "south": 3}


def test_a_reply_is_taken_from_the_silo_that_was_asked(grid):
    end, pushed = silo(), grid.push_messages([message(2)])
    forged = decode(end.answer(grid.fetch("north")))
    forged.metadata.__dict__["_src_node_id"] = 2
    assert not grid.deliver("south", encode(forged))
    assert not list(grid.pull_messages(pushed))


def test_who_asks_anew_waits_for_the_old_answer_no_more(grid):
    end = silo()
    (old,) = grid.push_messages([message(2, "old")])
    order = grid.fetch("north")
    (new,) = grid.push_messages([message(2, "new")])
    assert not grid.deliver("north", end.answer(order))
    assert number_of(grid.fetch("north")) == new
    for _ in range(3 * REMEMBERED):  # answers that nobody pulls do not pile up
        grid.push_messages([message(2)])
        grid.deliver("north", end.answer(grid.fetch("north")))
    assert sum(len(each.orders) for each in grid._silos.values()) <= REMEMBERED + 1
    assert old != new


def test_what_is_not_answered_in_time_is_withdrawn(grid, clock):
    clock.now = 0.0
    grid.fetch("north")
    grid._changed.wait = lambda seconds: setattr(clock, "now", clock.now + seconds)
    assert not list(grid.send_and_receive([message(2)], timeout=3.0))
    assert grid.fetch("north") is None


def test_bytes_that_are_no_message(grid):
    for read in (lambda data: grid.deliver("north", data), silo().answer, number_of):
        with pytest.raises(ProtocolError, match="not a message"):
            read(b"\xff" * 50)
        with pytest.raises(ProtocolError, match="not a message"):
            read(b"")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DataError("bad row", file="/srv/north/rows.txt", text="patient 12"), "DataError (see its log)"),
        (FileNotFoundError("/srv/north/rows.txt"), "FileNotFoundError (see its log)"),
        (FederationError("only under a secure sum"), "FederationError: only under a secure sum"),
        (PrivacyError("the budget is spent"), "PrivacyError: the budget is spent"),
    ],
)
def test_an_error_says_nothing_of_the_silos_files(grid, error, reason):
    def fail(message, context):
        raise error

    reports = []
    pushed = grid.push_messages([message(2)])
    grid.deliver("north", silo(fail, reports).answer(grid.fetch("north")))
    (reply,) = grid.pull_messages(pushed)
    assert reply.error.reason == reason
    assert reports == [error]


def test_a_silo_goes_by_the_name_in_its_certificate(grid):
    check_claim(grid, 2, "north")
    with pytest.raises(FederationError, match="the silo north calls itself 'south'"):
        check_claim(grid, 2, "south")
