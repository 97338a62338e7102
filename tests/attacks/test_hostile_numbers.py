"""One silo, or one broker, whose statistics are absurd: it is left out by name, and the rest goes on."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import zipfile
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from isthmus.arrays import Ids
from isthmus.errors import ProtocolError
from isthmus.learning import COLUMNS, PROFILE, HitCalibration, SearchModel, Weights
from isthmus.private.totals import family_of, released
from isthmus.retrieval import FIELD_TABLES, TEXT, Statistics
from isthmus.retrieval.statistics import MOST_DOCUMENTS, MOST_TERMS
from isthmus.service import statistics
from isthmus.service.http_client import HttpReply
from isthmus.service.node import Node
from isthmus.service.settings import EncoderSettings, NodeSettings, SharedStatistics, Source
from isthmus.service.statistics import StatisticsExchange, etag
from isthmus.service.wire import STATISTICS_TYPE, Search

HUGE = 10**400


def honest(silo, *, documents=10, fields=False):
    names = (TEXT, *FIELD_TABLES) if fields else (TEXT,)
    tables = {name: np.array([3, 4], dtype=np.int64) for name in names}
    return Statistics(documents, {"title": 20, "body": 40}, tables, Ids.of(("moon", "tide")), (silo,))


def forged(figures, *, arrays=None, texts=None, **header):
    """The same statistics with some of their numbers replaced, whatever they are."""
    with zipfile.ZipFile(io.BytesIO(figures.to_bytes())) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    told = json.loads(parts["header.json"]) | header
    parts["header.json"] = json.dumps(told).encode()
    for name, array in (arrays or {}).items():
        content = io.BytesIO()
        np.lib.format.write_array(content, np.asarray(array), allow_pickle=False)
        parts[f"{name}.npy"] = content.getvalue()
    parts |= {name: text.encode() for name, text in (texts or {}).items()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return packed.getvalue()


NUMBERS = {
    "beyond any float": HUGE,
    "not a number": float("nan"),
    "endless": float("inf"),
    "negative": -1,
    "beyond 64 bits": 2**63,
    "a fraction": 1.5,
    "a text": "7",
    "a truth": True,
    "a list": [1],
    "nothing": None,
    "plausible, but too many": 10**15,
}
FORGED = {
    **{f"documents: {what}": {"documents": number} for what, number in NUMBERS.items()},
    **{
        f"lengths.body: {what}": {"lengths": {"title": 20, "body": number}}
        for what, number in NUMBERS.items()
    },
    **{f"unit: {what}": {"unit": number} for what, number in NUMBERS.items()},
    "no lengths": {"lengths": {}},
    "lengths of other fields": {"lengths": {"abstract": 40}},
    "lengths that are a list": {"lengths": [20, 40]},
    "fewer terms than documents with them": {"lengths": {"title": 0, "body": 1}},
    "thousands of silos": {"silos": [f"silo {number}" for number in range(5_000)]},
    "silos that are a number": {"silos": 7},
    "a hashing of any length": {"hashing": "x" * 10_000},
    "epsilon that is a text": {"epsilon": "1"},
    "epsilon that is none": {"epsilon": float("nan")},
    "more documents with a term than documents": {"arrays": {TEXT: [11, 4]}},
    "huge document frequencies": {"arrays": {TEXT: [2**62, 2**62]}},
    "negative document frequencies": {"arrays": {TEXT: [-3, 4]}},
    "frequencies that are fractions": {"arrays": {TEXT: [0.5, 4.0]}},
    "frequencies that are not numbers": {"arrays": {TEXT: [float("nan"), 4.0]}},
    "frequencies that are truths": {"arrays": {TEXT: [True, False]}},
    "frequencies in two dimensions": {"arrays": {TEXT: [[3, 4]]}},
    "tables nobody knows": {"arrays": {"other.having": [3, 4]}},
    "half of the field tables": {"arrays": {"title.having": [3, 4]}},
    "terms out of order": {"texts": {"words": "tide\nmoon"}},
    "a term twice": {"texts": {"words": "moon\nmoon"}},
}


@pytest.mark.parametrize("what", FORGED)
def test_statistics_with_an_impossible_number_are_refused(what):
    header = dict(FORGED[what])
    content = forged(
        honest("west"), arrays=header.pop("arrays", None), texts=header.pop("texts", None), **header
    )
    with pytest.raises(ProtocolError):
        Statistics.from_bytes(content)


def test_private_statistics_are_bounded_by_their_own_length_and_noise():
    family = family_of("key", 64)
    private = released(honest("west"), family, 1.0)
    assert Statistics.from_bytes(private.to_bytes()).version == private.version
    for cells in (np.full(64, 2**60), np.full(64, -5), np.full(64, 16 * 10**6)):
        with pytest.raises(ProtocolError):
            Statistics.from_bytes(forged(private, arrays={TEXT: cells}))
    for epsilon in (0, -1.0, HUGE, None):
        with pytest.raises(ProtocolError):
            Statistics.from_bytes(forged(private, epsilon=epsilon))


class Talker:
    """A silo at the other end: what it gives, and what it was handed."""

    def __init__(self, name, gives):
        self.name, self.gives, self.sums = name, gives, []

    async def ask(self, method, path, body=b"", kind="", *, unless=""):
        if method == "PUT":
            self.sums.append(Statistics.from_bytes(body))
            return HttpReply(204, "", b"")
        content = self.gives if isinstance(self.gives, bytes) else self.gives.to_bytes()
        status = 304 if unless == etag(content) else 200
        return HttpReply(status, STATISTICS_TYPE, b"" if status == 304 else content)


def exchanged(*silos, times=2, **options):
    exchange = StatisticsExchange(silos, **options)

    async def work():
        for _ in range(times):
            await exchange.once()

    asyncio.run(work())
    return exchange


@pytest.mark.parametrize(
    "forgery",
    [
        {"lengths": {"title": 20, "body": HUGE}},
        {"documents": 10**15},
        {"arrays": {TEXT: [2**62, 1]}},
        {"lengths": {}},
    ],
    ids=lambda forgery: next(iter(forgery)),
)
def test_a_hostile_silo_is_left_out_by_name_and_the_rest_goes_on(forgery, caplog):
    east, north = Talker("east", honest("east")), Talker("north", honest("north"))
    header = dict(forgery)
    west = Talker("west", forged(honest("west"), arrays=header.pop("arrays", None), **header))
    with caplog.at_level(logging.WARNING, "isthmus.service"):
        exchange = exchanged(east, north, west)
    for silo in (east, north):
        assert silo.sums[-1].silos == ("east", "north")
        assert silo.sums[-1].documents == 20
    assert set(exchange.problems) == {"west"}
    assert "west" in exchange.problem
    assert "west" in caplog.text


def test_the_last_good_statistics_of_a_silo_that_turns_hostile_still_count():
    east, west = Talker("east", honest("east")), Talker("west", honest("west"))
    exchange = StatisticsExchange([east, west])

    async def work():
        await exchange.once()
        west.gives = forged(honest("west"), documents=HUGE)
        await exchange.once()

    asyncio.run(work())
    assert [total.documents for total in east.sums] == [20]
    assert set(exchange.problems) == {"west"}


def test_a_silo_of_another_form_does_not_stop_the_others():
    east, north = Talker("east", honest("east", fields=True)), Talker("north", honest("north", fields=True))
    west = Talker("west", honest("west"))  # without the tables that the others have
    exchange = exchanged(west, east, north)
    assert east.sums[-1].silos == ("east", "north")
    assert set(exchange.problems) == {"west"}


@pytest.mark.parametrize("cells", [0, 63, 65])
def test_private_statistics_of_other_cells_than_they_declare_are_left_out(cells):
    family = family_of("a key that is long enough", 64)
    east, north = (Talker(name, released(honest(name), family, 1.0)) for name in ("east", "north"))
    other = {TEXT: np.ones(cells, np.int64)}
    west = Talker("west", forged(released(honest("west"), family, 1.0), arrays=other))
    exchange = exchanged(west, east, north)
    assert east.sums[-1].silos == ("east", "north")
    assert set(exchange.problems) == {"west"}


def test_no_error_ends_the_exchange_of_statistics(monkeypatch, caplog):
    """It would end for all silos, and until the broker is started again."""
    monkeypatch.setattr(statistics, "EAGER", 0.0)
    monkeypatch.setattr(statistics, "UNEASY", 0.0)
    east = Talker("east", honest("east"))
    exchange, failures = StatisticsExchange([east]), iter([ValueError("unforeseen"), KeyError("too")])
    own = exchange.once

    async def once():
        for error in failures:
            raise error
        await own()

    async def until_summed():
        running = asyncio.create_task(statistics.keep_exchanging(exchange))
        while not east.sums and not running.done():
            await asyncio.sleep(0.01)
        running.cancel()

    monkeypatch.setattr(exchange, "once", once)
    asyncio.run(until_summed())
    assert east.sums
    assert "unforeseen" in caplog.text


def test_statistics_of_far_more_documents_than_the_silo_says_elsewhere_are_left_out():
    east = Talker("east", honest("east"))
    west = Talker("west", honest("west", documents=MOST_DOCUMENTS))
    stated = {"east": 10, "west": 12}
    exchange = exchanged(east, west, documents=stated.get)
    assert east.sums[-1].silos == ("east",)
    assert set(exchange.problems) == {"west"}


def test_a_silo_with_terms_for_all_does_not_push_others_out_of_the_sum(monkeypatch):
    monkeypatch.setattr("isthmus.retrieval.statistics.MOST_TERMS", 4)
    words = tuple("abcd")
    many = replace(honest("a"), tables={TEXT: np.ones(4, np.int64)}, terms=Ids.of(words))
    east = Talker("east", honest("east"))
    north = Talker(
        "north",
        replace(honest("north"), terms=Ids.of(("sun", "tide", "wave")), tables={TEXT: np.ones(3, np.int64)}),
    )
    other = Talker(
        "other", replace(honest("other"), terms=Ids.of(tuple("efgh")), tables={TEXT: np.ones(4, np.int64)})
    )
    exchange = exchanged(Talker("a", many), other, east, north)
    assert {"east", "north"} <= set(east.sums[-1].silos)
    assert set(exchange.problems) == {"other"}
    assert MOST_TERMS > 10**6


def test_a_sum_that_fails_on_a_query_does_not_replace_the_old_one(monkeypatch):
    east = Talker("east", honest("east"))
    exchange = StatisticsExchange([east])

    def fails(figures, family=None):
        raise ProtocolError("statistics that no query can be scored with")

    async def work():
        await exchange.once()
        east.gives = honest("east", documents=12)
        with monkeypatch.context() as patch:
            patch.setattr(statistics, "try_on_query", fails)
            await exchange.once()
            assert exchange.version == east.sums[0].version
            assert len(east.sums) == 1
            assert "no query" in exchange.problem
        await exchange.once()

    asyncio.run(work())
    assert [total.documents for total in east.sums] == [10, 12]


# the node


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "corpus.jsonl"
    rows = [{"_id": f"d{at}", "title": f"tide {at}", "text": "the moon and the tide " * 3} for at in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return NodeSettings(
        silo="north",
        folder=tmp_path / "north",
        sources=(Source("beir", path),),
        encoder=EncoderSettings("lsa", dimensions=4),
        statistics=SharedStatistics(width=64),
    )


@contextmanager
def opened(settings):
    with Node(settings).offline() as node:
        node.read_sources()
        node.index.catch_up()
        yield node


def scores(node):
    hits = node.searcher.search(Search(query="moon tide", k=5), snippets=False).hits
    assert hits
    return [hit.score for hit in hits]


@pytest.mark.parametrize(
    "what", ["lengths.body: beyond any float", "huge document frequencies", "no lengths"]
)
def test_a_node_keeps_the_old_sum_when_the_broker_sends_an_impossible_one(settings, what):
    header = dict(FORGED[what])
    hostile = forged(honest("west"), arrays=header.pop("arrays", None), **header)
    with opened(settings) as node:
        version = node.share(honest("west").to_bytes())
        before = scores(node)
        with pytest.raises(ProtocolError):
            node.share(hostile)
        assert scores(node) == before
    with opened(settings) as node:  # and after a restart
        assert scores(node) == before
        assert node.ready().statistics == version


def test_a_bad_sum_on_disk_is_set_aside_at_the_start(settings, caplog):
    with opened(settings) as node:
        alone = scores(node)
    kept = settings.folder / "shared.statistics"
    kept.write_bytes(forged(honest("west"), lengths={"title": 20, "body": HUGE}))
    with caplog.at_level(logging.WARNING, "isthmus.service"), opened(settings) as node:
        assert scores(node) == alone
        assert node.ready().statistics == ""
    assert "shared.statistics" in caplog.text
    assert not kept.exists()
    assert kept.with_name("shared.statistics.refused").exists()


def test_a_sum_that_fails_a_nodes_own_search_does_not_replace_the_old_one(settings, monkeypatch):
    with opened(settings) as node:
        version = node.share(honest("west").to_bytes())
        before = scores(node)
        with monkeypatch.context() as patch:
            patch.setattr(Statistics, "average_length", property(lambda self: float("nan")))
            with pytest.raises(ProtocolError):
                node.share(honest("west", documents=12).to_bytes())
        assert scores(node) == before
        assert node.ready().statistics == version


def model(*, scale=1.0, weights=1.0, slope=1.0, reach=4.0):
    """A model as a broker hands it out."""
    columns = (np.zeros(len(COLUMNS)), np.full(len(COLUMNS), scale), np.full(len(COLUMNS), weights))
    size = len(PROFILE)
    numbers = (slope, reach, slope, 0.0, 1.0, 0.0, 0.2, 0.0, -1.0, 1.0)
    line = HitCalibration(*numbers, np.zeros(size), np.ones(size), np.zeros(size))
    return SearchModel("linear", Weights(*columns), line).to_bytes()


@pytest.mark.parametrize(
    "broken", [{"scale": 5e-324}, {"weights": -1.0}, {"slope": -1.0}, {"reach": 0.0}, {"weights": np.nan}]
)
def test_a_node_keeps_the_old_model_when_the_broker_sends_an_impossible_one(settings, broken):
    """Numbers that give no margins, and weights with which more of the query's words would lower a score."""
    with opened(settings) as node:
        node.adopt(model(), "broker")
        before = scores(node)
        with pytest.raises(ProtocolError):
            node.adopt(model(**broken), "broker")
        assert scores(node) == before
    with opened(settings) as node:  # and after a restart
        assert scores(node) == before


@pytest.mark.parametrize("name", ["knots", "slopes"])
def test_a_curve_of_another_shape_is_refused_where_only_short_queries_use_it(name):
    whole = SearchModel.from_bytes(model())
    curve = getattr(whole.calibration, name)[:, None]
    bad = replace(whole, baseline=replace(whole, calibration=replace(whole.calibration, **{name: curve})))
    with pytest.raises(ProtocolError):
        SearchModel.from_bytes(bad.to_bytes())


def test_a_model_is_tried_on_a_query_before_it_replaces_the_old_one(settings, monkeypatch):
    """Whatever its numbers are, if a search fails with it."""
    with opened(settings) as node:
        node.adopt(model(), "broker")
        before = scores(node)
        with monkeypatch.context() as patched:
            patched.setattr(Weights, "__call__", lambda self, table: np.full(len(table), np.nan))
            with pytest.raises(ProtocolError):
                node.adopt(model(weights=2.0), "broker")
        assert scores(node) == before


def test_a_damaged_file_of_a_model_is_set_aside_and_the_node_starts(settings, caplog):
    with opened(settings) as node:
        alone = scores(node)
        node.adopt(model(), "broker")
    file = settings.folder / "learned.model"
    file.write_bytes(file.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING, "isthmus.service"), opened(settings) as node:
        assert scores(node) == alone
        assert node.ready().model == ""
    assert "learned.model" in caplog.text
    assert file.with_name("learned.model.refused").exists()
