"""The exchange of statistics between broker and silos, and a training run as the broker shows it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.errors import SiloUnavailable
from isthmus.private.totals import family_of, released
from isthmus.retrieval import TEXT, Statistics
from isthmus.service.http_client import HttpReply
from isthmus.service.statistics import StatisticsExchange, etag
from isthmus.service.training import training_of
from isthmus.service.wire import STATISTICS_TYPE


def figures(silo, documents=10, words=("moon", "tide"), counts=(3, 4)):
    return Statistics(
        documents, {"body": 40}, {TEXT: np.array(counts, dtype=np.int64)}, Ids.of(words), (silo,)
    )


class Talker:
    """A silo at the other end: what it gives, and what it was given."""

    def __init__(self, name, gives):
        self.name, self.gives = name, gives
        self.taken, self.sent = [], []
        self.down = False

    async def ask(self, method, path, body=b"", kind="", *, unless=""):
        if self.down:
            raise SiloUnavailable("down")
        assert path == "/statistics"
        if method == "PUT":
            assert kind == STATISTICS_TYPE
            self.taken.append(Statistics.from_bytes(body))
            return HttpReply(204, "", b"")
        if isinstance(self.gives, int):
            return HttpReply(self.gives, "", b"")
        content = self.gives if isinstance(self.gives, bytes) else self.gives.to_bytes()
        status = 304 if unless == etag(content) else 200
        self.sent.append(status)
        return HttpReply(status, STATISTICS_TYPE, b"" if status == 304 else content)


def exchanged(exchange, times=1):
    async def work():
        for _ in range(times):
            await exchange.once()

    asyncio.run(work())


def test_every_silo_gets_the_sum_once():
    silos = [Talker("east", figures("east")), Talker("west", figures("west", 5, ("sun", "tide"), (1, 1)))]
    exchange = StatisticsExchange(silos)
    exchanged(exchange, 3)
    for silo in silos:
        (total,) = silo.taken
        assert total.documents == 15
        assert total.version == exchange.version
        assert dict(zip(total.words, total.tables[TEXT].tolist(), strict=True)) == {
            "moon": 3,
            "sun": 1,
            "tide": 5,
        }
        assert silo.sent == [200, 304, 304]  # fetched once
    assert exchange.remark(exchange.version) == ""
    assert exchange.problem == ""


def test_what_changes_is_handed_out_again():
    east, west = Talker("east", figures("east")), Talker("west", figures("west"))
    exchange = StatisticsExchange([east, west])
    exchanged(exchange)
    first = exchange.version
    east.gives = figures("east", 11, counts=(3, 5))
    exchanged(exchange)
    assert exchange.version != first
    assert [total.documents for total in west.taken] == [20, 21]


def test_a_silo_that_lost_the_sum_gets_it_again():
    east = Talker("east", figures("east"))
    exchange = StatisticsExchange([east])
    exchanged(exchange)
    assert "other statistics" in exchange.remark("")
    exchanged(exchange)
    assert len(east.taken) == 2


def test_one_that_is_down_still_counts_and_one_that_does_not_share_is_let_be():
    east, west, north = Talker("east", figures("east")), Talker("west", figures("west")), Talker("north", 403)
    exchange = StatisticsExchange([east, west, north])
    exchanged(exchange)
    assert east.taken[-1].documents == 20
    version = exchange.version
    west.down = True
    exchanged(exchange)
    assert exchange.version == version
    assert exchange.problem == ""


@pytest.mark.parametrize("gives", [b"garbage", figures("other"), 500])
def test_nonsense_is_left_out(gives):
    east, west = Talker("east", figures("east")), Talker("west", gives)
    exchange = StatisticsExchange([east, west])
    exchanged(exchange)
    assert east.taken[-1].documents == 10


def test_forms_that_do_not_mix_are_told():
    private = replace(released(figures("west"), family_of("key", 64), 1.0), silos=("west",))
    east = Talker("east", figures("east"))
    exchange = StatisticsExchange([east, Talker("west", private)])
    exchanged(exchange)
    assert not east.taken
    assert "do not add up" in exchange.problem


def test_silos_without_documents_make_no_sum():
    east = Talker("east", figures("east", 0, (), ()))
    exchange = StatisticsExchange([east])
    exchanged(exchange)
    assert not east.taken
    assert exchange.version == ""


class TestTraining:
    def test_a_run_while_it_goes_on_and_after_it(self, tmp_path):
        from isthmus.federation.checkpoints import RunFolder
        from isthmus.federation.rounds import RoundRecord, State
        from isthmus.federation.settings import Config
        from isthmus.rankers import Scaling

        records = (
            RoundRecord(
                1, ("a", "b"), {"b": "norm"}, weights={"a": 1.0}, risks={"a": float("nan")}, measure=0.3
            ),
            RoundRecord(2, ("a",), loss=float("inf"), measure=0.4),
        )
        config = Config(data="synthetic")
        state = State(round=2, scaling=Scaling("none", 3), history=records, parameters={"w": np.ones(3)})
        folder = RunFolder(tmp_path / "first")
        folder.begin(config)
        folder.save(state, config)
        told = training_of(folder.path)
        assert (told.run, told.strategy, told.finished) == ("first", config.strategy.name, False)
        assert [each.measure for each in told.rounds] == [0.3, 0.4]
        assert told.rounds[0].rejected == {"b": "norm"}
        assert told.rounds[0].risks == {}
        assert told.rounds[1].loss is None
        folder.finish(state, {"final": {"nDCG@10": 0.41}})
        told = training_of(folder.path)
        assert told.finished
        assert told.final == {"nDCG@10": 0.41}

    @pytest.mark.parametrize("content", [b"", b"garbage", None])
    def test_what_is_no_run_has_no_rounds(self, tmp_path, content):
        if content is not None:
            (tmp_path / "checkpoint").write_bytes(content)
        assert training_of(tmp_path).rounds == []
