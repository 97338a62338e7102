"""The hybrid without learning: its scorer's laws, score sums of silos, and what the broker makes of them."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.encoders import Encoder, Lsa, unit
from isthmus.errors import Refused, SiloUnavailable
from isthmus.retrieval import TEXT, summed
from isthmus.service import index as indexing
from isthmus.service.broker import Broker
from isthmus.service.encoding import AnyQueries
from isthmus.service.http_client import HttpReply
from isthmus.service.index import Index
from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.results import in_order
from isthmus.service.scale import LEAST_QUERIES, MOST_SCORES, ScaleExchange, common_scale, measure
from isthmus.service.scoring import Bm25Scorer, HybridScorer
from isthmus.service.searching import Searcher, load_scorer
from isthmus.service.settings import (
    BrokerSettings,
    EncoderSettings,
    Models,
    NodeSettings,
    Policy,
    SharedStatistics,
    SiloAddress,
)
from isthmus.service.stores import Draft, SqliteStore
from isthmus.service.wire import Hit, ScoreScale, ScoreSums, Search, SiloScores, Standard
from silo_stand_in import Loop

SCALE = ScoreScale(
    encoder="e", bm25=Standard(mean=0.3, deviation=0.1), dense=Standard(mean=0.5, deviation=0.05)
)


class Candidates(SimpleNamespace):
    def __len__(self):
        return len(self.documents)

    def names(self, rows):
        return [self.documents[row] for row in rows.tolist()]


def listed(bm25, dense=None, most=1.0):
    """Candidates by hand: scores of each retriever, −inf for a document without a vector."""
    scores = {"bm25": np.array(bm25, dtype=float)}
    inside = {"bm25": scores["bm25"] > 0}
    if dense is not None:
        scores["dense"] = np.array(dense, dtype=float)
        inside["dense"] = np.isfinite(scores["dense"])
    documents = tuple(f"d{at}" for at in range(len(bm25)))
    return Candidates(documents=documents, scores=scores, listed=inside, most=most)


def snapshot(encoder="e"):
    return SimpleNamespace(encoder=SimpleNamespace(fingerprint=encoder))


def scale_of(lists):
    """The scale that silos with these lists of (shares, cosines) would have, one list a query."""
    sums = []
    for at in range(2):
        columns = [np.asarray(pair[at], dtype=float) for pair in lists]
        sums.append(
            Standard(
                mean=float(np.concatenate(columns).mean()),
                deviation=float(np.sqrt(np.mean(np.concatenate([(x - x.mean()) ** 2 for x in columns])))),
            )
        )
    return ScoreScale(encoder="e", bm25=sums[0], dense=sums[1])


class TestScorer:
    def test_score_is_half_of_each_standardised_score(self):
        scored = HybridScorer(SCALE).score(snapshot(), listed([0.4, 0.2, 0.0], [0.5, 0.65, 0.55]))
        expected = [0.5 * 1 + 0, 0.5 * -1 + 0.5 * 3, 0.5 * -3 + 0.5 * 1]
        assert scored.scores == pytest.approx(expected)
        assert scored.order.tolist() == [1, 0, 2]
        assert scored.probabilities is None

    def test_explanation_adds_up_with_equal_shares(self):
        scorer, rows = HybridScorer(SCALE), listed([0.4, 0.0], [-np.inf, 0.6])
        scored = scorer.score(snapshot(), rows)
        for at, parts in zip(scored.order.tolist(), scorer.explain(snapshot(), rows, scored, 2), strict=True):
            assert sum(part.contribution for part in parts) == pytest.approx(scored.scores[at])
            assert [part.weight for part in parts] == [0.5, 0.5]
            assert [part.retriever for part in parts] == ["bm25", "dense"]
        missing = scorer.explain(snapshot(), rows, scored, 2)[scored.order.tolist().index(0)][1]
        assert (missing.raw, missing.contribution) == (None, 0.0)

    @settings(deadline=None)
    @given(
        pairs=st.lists(
            st.tuples(st.floats(0, 1), st.floats(-1, 1)), min_size=2, max_size=12, unique_by=lambda pair: pair
        ),
        retriever=st.sampled_from([0, 1]),
        shift=st.floats(0, 0.1),
        factor=st.floats(0.2, 0.9),
    )
    def test_a_shift_or_a_factor_of_one_retriever_in_all_silos_changes_nothing(
        self, pairs, retriever, shift, factor
    ):
        columns = np.array(pairs).T
        if (columns.std(axis=1) < 0.01).any():
            return
        other = columns.copy()
        other[retriever] = factor * other[retriever] + shift
        before, after = (
            HybridScorer(scale_of([tuple(table)])).score(snapshot(), listed(*table)).scores
            for table in (columns, other)
        )
        assert after == pytest.approx(before, abs=1e-9)

    def test_a_missing_vector_is_neutral_and_never_last(self):
        with_mean = HybridScorer(SCALE).score(snapshot(), listed([0.4, 0.4], [-np.inf, 0.5])).scores
        assert with_mean[0] == with_mean[1]
        scored = HybridScorer(SCALE).score(snapshot(), listed([0.4, 0.4, 0.4], [0.6, -np.inf, 0.4]))
        assert scored.order.tolist() == [0, 1, 2]

    def test_a_silo_with_another_encoder_ranks_by_words_on_the_same_scale(self):
        rows = listed([0.4, 0.2, 0.0], [0.1, 0.9, 0.8])
        scored = HybridScorer(SCALE).score(snapshot(encoder="other"), rows)
        assert scored.order.tolist() == [0, 1]  # what its words do not match is no candidate
        assert scored.scores[:2] == pytest.approx([0.5, -0.5])
        (parts, _) = HybridScorer(SCALE).explain(snapshot(encoder="other"), rows, scored, 2)
        assert [part.retriever for part in parts] == ["bm25"]

    def test_long_queries_do_not_drown_the_encoder(self):
        """Twice the words, twice the scores and twice Σ idf: the same list."""
        short = HybridScorer(SCALE).score(snapshot(), listed([0.4, 0.2], [0.5, 0.6])).scores
        long = HybridScorer(SCALE).score(snapshot(), listed([0.8, 0.4], [0.5, 0.6], most=2.0)).scores
        assert long == pytest.approx(short)

    def test_a_query_without_words_is_ranked_by_the_encoder(self):
        scored = HybridScorer(SCALE).score(snapshot(), listed([0.0, 0.0], [0.4, 0.6], most=0.0))
        assert scored.order.tolist() == [1, 0]

    def test_it_is_the_default_where_nothing_is_learned_and_silos_agree_on_an_encoder(self):
        assert isinstance(load_scorer(Models(), None, SCALE), HybridScorer)
        assert isinstance(load_scorer(Models(), None, None), Bm25Scorer)


# a small world, as nodes hold it

ENCODED = EncoderSettings("encoder", name="minilm")
WORDS = ["tide", "wave", "turbine", "harbour", "lamp", "bridge", "river", "iron", "apple", "pear"]


class Hashed(Encoder):
    """A cheap encoder that every silo has alike: words in random directions, with some company."""

    fingerprint = "hashed-1"

    def __init__(self):
        self.lsa = Lsa.fit([f"{one} {other}" for one in WORDS for other in WORDS[::3]], dimensions=6)

    def encode(self, texts):
        return unit(self.lsa.encode(texts) + np.float32(0.01))


@pytest.fixture
def encoder(monkeypatch):
    cheap = AnyQueries(Hashed(), 6)
    monkeypatch.setattr(indexing, "ready_encoder", lambda wanted: cheap)
    return cheap


def drafts(count=80):
    rng = np.random.default_rng(0)
    return [
        Draft(f"d{at:03d}", WORDS[at % 10] if at % 2 else "", " ".join(rng.choice(WORDS, 9)))
        for at in range(count)
    ]


def node(folder, documents):
    folder.mkdir()
    store = SqliteStore(folder / "documents.db")
    store.put(documents)
    index = Index(folder / "index", store, encoder=ENCODED)
    index.catch_up()
    index.encode_all()
    return index


def found(index, scale, query):
    searcher = Searcher("silo", index, index.store, HybridScorer(scale), depth=100)
    return searcher.search(Search(query=query, k=100), snippets=False).hits


@pytest.fixture
def world(tmp_path, encoder):
    """One index of everything, and four of its parts, all with the exact statistics of everything."""
    every = drafts()
    silos = [node(tmp_path / f"s{at}", every[at::4]) for at in range(4)]
    central = node(tmp_path / "central", every)
    total = summed(silo.snapshot.exact_statistics(f"s{at}", (TEXT,)) for at, silo in enumerate(silos))
    for index in (*silos, central):
        index.share(total)
    return central, silos


@pytest.mark.parametrize("query", ["tide turbine", "river iron pear apple", "lamp", "bridges", "zzz"])
def test_merged_silos_equal_one_central_index(world, query):
    central, silos = world
    sums = [measure(f"s{at}", silo.snapshot, silo.store) for at, silo in enumerate(silos)]
    scale = common_scale(sums)
    expected = {hit.document: hit.score for hit in found(central, scale, query)}
    merged = in_order([found(silo, scale, query) for silo in silos])
    assert {hit.document: hit.score for hit in merged} == pytest.approx(expected, abs=1e-6)
    assert [hit.score for hit in merged] == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-6)


def test_sums_are_those_of_queries_made_of_documents_without_them(world):
    central, _ = world
    sums = measure("central", central.snapshot, central.store)
    snapshot, lists = central.snapshot, []
    for at in sorted({int(at) for at in np.linspace(0, 80, 64, endpoint=False)}):
        (change,) = central.store.changes(at, 1)
        query = change.title or change.body
        rows = snapshot.find(query, 100)
        most = snapshot.rarity(rows.words).sum()
        assert rows.most == pytest.approx(most)
        others = [row for row, name in enumerate(rows.documents) if name != change.id]
        lists.append((rows.scores["bm25"][others] / most, rows.scores["dense"][others]))
    assert sums.encoder == "hashed-1"
    for at, name in enumerate(("bm25", "dense")):
        columns = [pair[at] for pair in lists]
        expected = ScoreSums(
            count=sum(map(len, columns)),
            total=sum(column.sum() for column in columns),
            squares=sum(column.var() * len(column) for column in columns),
        )
        measured = getattr(sums, name)
        assert measured.count == expected.count
        assert (measured.total, measured.squares) == pytest.approx((expected.total, expected.squares))


def test_other_languages_of_a_silo_do_not_lower_its_shares(tmp_path, encoder):
    """The same query in a silo in English and in one that has German documents too."""
    english = node(tmp_path / "english", drafts())
    folder = tmp_path / "both"
    folder.mkdir()
    store = SqliteStore(folder / "documents.db")
    store.put(drafts())
    store.put([Draft("g", "Brücken", "Die Brücken über den Fluss sind aus Eisen.", language="de")])
    both = Index(folder / "index", store, encoder=ENCODED)
    both.catch_up()
    assert len(both.snapshot.languages) == 2
    for query in ("rivers and bridges", "harbours"):
        alone, mixed = (index.snapshot.find(query, 100).most for index in (english, both))
        assert mixed == pytest.approx(alone, rel=0.05)


def test_few_documents_and_latent_spaces_give_no_cosines(tmp_path, encoder, monkeypatch):
    few = node(tmp_path / "few", drafts(LEAST_QUERIES - 1))
    sums = measure("few", few.snapshot, few.store)
    assert (sums.encoder, sums.bm25.count, sums.dense.count) == ("", 0, 0)
    monkeypatch.setattr(encoder, "pretrained", False)
    many = node(tmp_path / "many", drafts())
    sums = measure("many", many.snapshot, many.store)
    assert sums.encoder == ""
    assert sums.bm25.count > 0


# the broker


def sums_of(silo, encoder="e", count=100, mean=0.3, deviation=0.1):
    some = ScoreSums(count=count, total=mean * count, squares=deviation**2 * count)
    return SiloScores(silo=silo, encoder=encoder, bm25=some, dense=some if encoder else ScoreSums())


class TestCommonScale:
    def test_means_and_deviations_are_of_all_scores_together(self):
        scale = common_scale([sums_of("a", count=100), sums_of("b", count=300, mean=0.5, deviation=0.2)])
        assert scale.bm25.mean == pytest.approx((0.3 * 100 + 0.5 * 300) / 400)
        assert scale.bm25.deviation == pytest.approx(np.sqrt((0.01 * 100 + 0.04 * 300) / 400))
        assert scale.dense == scale.bm25

    def test_cosines_are_of_the_encoder_that_most_have(self):
        scale = common_scale([sums_of("a"), sums_of("b"), sums_of("c", "other", mean=0.9)])
        assert scale.encoder == "e"
        assert scale.dense.mean == pytest.approx(0.3)
        assert scale.bm25.mean == pytest.approx(0.5)

    @pytest.mark.parametrize(
        "silos", [[], [sums_of("a"), sums_of("b", "f")], [sums_of("a", ""), sums_of("b", "")]]
    )
    def test_without_agreement_there_is_no_scale(self, silos):
        assert common_scale(silos) is None

    def test_scores_that_are_all_alike_divide_by_something(self):
        scale = common_scale([sums_of("a", deviation=0.0)])
        assert scale.bm25.deviation > 0


class Talker:
    """A silo at the other end: the sums it gives, and the scales it was given."""

    def __init__(self, name, gives=None):
        self.name, self.gives, self.scales, self.down = name, gives or sums_of(name), [], False

    async def ask(self, method, path, body=b"", kind="", *, unless=""):
        if self.down:
            raise SiloUnavailable("down")
        assert path == "/scale"
        if method == "PUT":
            self.scales.append(ScoreScale.model_validate_json(body))
            return HttpReply(204, "", b"")
        if isinstance(self.gives, int):
            return HttpReply(self.gives, "", b"")
        content = self.gives if isinstance(self.gives, bytes) else self.gives.model_dump_json().encode()
        return HttpReply(200, "application/json", content)


def exchanged(*silos, times=1):
    exchange = ScaleExchange(silos)

    async def work():
        for _ in range(times):
            await exchange.once()

    asyncio.run(work())
    return exchange


class TestExchange:
    def test_every_silo_gets_the_scale_once(self):
        silos = [Talker("a"), Talker("b", sums_of("b", mean=0.5)), Talker("c", 503)]
        exchange = exchanged(*silos, times=3)
        for silo in silos:
            (scale,) = silo.scales
            assert scale.bm25.mean == pytest.approx(0.4)
            assert scale.version == exchange.version
        assert not exchange.settled, "one is still measuring"

    def test_a_silo_that_lost_it_gets_it_again_and_others_do_not(self):
        one, other = Talker("a"), Talker("b")
        exchange = exchanged(one, other)
        assert exchange.remark("a", "hybrid", exchange.version) == ""
        assert exchange.remark("a", "learned", "") == ""
        assert "another scale" in exchange.remark("a", "bm25", "")
        asyncio.run(exchange.once())
        assert (len(one.scales), len(other.scales)) == (2, 1)

    def test_one_that_is_down_still_counts_and_one_that_does_not_share_is_let_be(self):
        one, other = Talker("a"), Talker("b", sums_of("b", mean=0.5))
        exchange = ScaleExchange([one, other, Talker("c", 403)])
        asyncio.run(exchange.once())
        version, other.down = exchange.version, True
        asyncio.run(exchange.once())
        assert exchange.version == version
        assert exchange.settled


def test_hits_of_a_silo_that_scored_otherwise_come_last():
    def hit(silo, score, probability=None):
        return Hit(document=f"{silo}{score}", silo=silo, probability=probability, score=score)

    lists = [[hit("a", 1.0)], [hit("b", 20.0), hit("b", 19.0, 0.1)], [hit("c", 0.5)]]
    merged = in_order(lists, last={"b"})
    assert [each.document for each in merged] == ["b19.0", "a1.0", "c0.5", "b20.0"]


FORGED = {
    "a count that is negative": {"count": -1},
    "a count beyond all silos": {"count": 10**13},
    "more scores than a silo sums": {"count": MOST_SCORES + 1},
    "a sum that is not a number": {"total": "NaN"},
    "an endless sum": {"total": "Infinity"},
    "a sum beyond any float": {"total": "1e400"},
    "a mean above 1": {"total": 101.0},
    "a mean below −1": {"total": -101.0},
    "squares below 0": {"squares": -1e-9},
    "squares above what cosines have": {"squares": 101.0},
    "squares that are not a number": {"squares": "NaN"},
    "squares that are a list": {"squares": [1]},
    "no sums at all": None,
}


def forged(change):
    fields = json.loads(sums_of("evil").model_dump_json())
    fields["bm25"] = None if change is None else fields["bm25"] | change
    content = json.dumps(fields)
    for word in ("NaN", "Infinity", "1e400"):
        content = content.replace(f'"{word}"', word)
    return content.encode()


@pytest.mark.parametrize("what", FORGED)
def test_a_silo_with_impossible_sums_is_left_out_and_the_rest_goes_on(what, caplog):
    silos = [Talker("a"), Talker("b"), Talker("evil", forged(FORGED[what]))]
    exchange = exchanged(*silos)
    assert silos[0].scales[-1] == common_scale([sums_of("a"), sums_of("b")])
    assert exchange.version
    assert "evil" in caplog.text


@pytest.mark.parametrize("gives", [b"garbage", sums_of("a", mean=0.9)])
def test_nonsense_and_sums_in_another_name_are_left_out(gives):
    silos = [Talker("a"), Talker("c"), Talker("b", gives)]
    exchanged(*silos)
    assert silos[0].scales[-1].bm25.mean == pytest.approx(0.3)


def test_the_most_that_a_lying_silo_can_do_is_bounded():
    """It cannot take a retriever out of the list, nor blow scores up."""
    worst = ScoreSums(count=MOST_SCORES, total=0.0, squares=MOST_SCORES)
    lying = SiloScores(silo="evil", encoder="e", bm25=worst, dense=ScoreSums(count=MOST_SCORES))
    scale = common_scale([sums_of("a", count=10_000), sums_of("b", count=10_000), lying])
    honest = common_scale([sums_of("a", count=10_000), sums_of("b", count=10_000)])
    for standard, true in ((scale.bm25, honest.bm25), (scale.dense, honest.dense)):
        assert true.deviation / 2 <= standard.deviation <= 2 * true.deviation
    scored = HybridScorer(scale).score(snapshot(), listed([1.0, 0.0], [1.0, -1.0]))
    assert np.abs(scored.scores).max() <= 1_000


# nodes and a broker over HTTP


@pytest.fixture
def federation(tmp_path, encoder):
    """Four silos without anything learned, served on loopback, and a broker of them."""
    loop, every = Loop(), drafts()
    with ExitStack() as stack:
        stack.callback(loop.close)
        nodes = {}
        for at, name in enumerate(("east", "north", "south", "west")):
            policy = Policy(search=True, counts=True)
            settings = NodeSettings(name, tmp_path / name, peers={"anonymous": policy}, encoder=ENCODED)
            nodes[name] = stack.enter_context(Node(settings))
            nodes[name].put(every[at::4])
        ports = {name: loop.serve(node_app(node)).port for name, node in nodes.items()}
        silos = {name: SiloAddress(f"http://127.0.0.1:{port}") for name, port in ports.items()}
        broker = Broker(BrokerSettings(folder=tmp_path / "broker", silos=silos, deadline_ms=10_000))
        loop.run(broker.start())
        stack.callback(lambda: loop.run(broker.stop()))
        yield nodes, broker, loop


def until(happened, seconds=60):
    end = time.monotonic() + seconds
    while not (result := happened()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)
    return result


def test_four_silos_that_have_learned_nothing_answer_with_the_hybrid(federation, tmp_path):
    nodes, broker, loop = federation

    def answer():
        answer = loop.run(broker.search(Search(query="tide turbine", k=20, explain=True)))
        settled = all(silo.scorer == "hybrid" and not silo.detail for silo in answer.silos)
        return answer if settled else None

    hits = until(answer).hits
    assert len({hit.silo for hit in hits}) > 1
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    for hit in hits:
        assert hit.probability is None
        assert sum(part.contribution for part in hit.explanation) == pytest.approx(hit.score)
        assert [part.retriever for part in hit.explanation] == ["bm25", "dense"]
    assert len({node._scale.version for node in nodes.values()}) == 1
    departures = [row for row in nodes["east"].release().departures if row.kind == "sums"]
    assert any("no DP guarantee" in row.guarantee for row in departures), "sums are in the ledger as they are"

    east = nodes["east"]
    again = Node(replace(east.settings, folder=tmp_path / "again"))
    (tmp_path / "again" / "shared.scale").write_bytes((tmp_path / "east" / "shared.scale").read_bytes())
    with again.offline():
        pass
    restarted = Node(again.settings)
    with restarted.offline():
        assert restarted.searcher.scorer == east.searcher.scorer, "a restart keeps the scale"


def test_statistics_are_shared_and_scores_measured_while_documents_are_encoded(
    tmp_path, encoder, monkeypatch
):
    monkeypatch.setattr(Index, "encode", lambda index, stopped=None: 0)  # it takes hours
    loop, policy = Loop(), Policy(search=True, counts=True)
    settings = NodeSettings("east", tmp_path / "east", peers={"anonymous": policy}, encoder=ENCODED)
    with Node(settings) as node:
        try:
            node.put(drafts())
            assert "encoding 80 documents" in node.ready().detail
            url = f"http://127.0.0.1:{loop.serve(node_app(node)).port}/v1"
            assert httpx.get(f"{url}/statistics", headers=message_header()).status_code == 200
            until(lambda: httpx.get(f"{url}/scale", headers=message_header()).status_code == 200)
            sums = until(lambda: node.score_sums("broker").bm25.count and node.score_sums("broker"))
            assert (sums.encoder, sums.dense.count) == ("", 0)
            monkeypatch.undo()
            node.index.encode_all()
            node.read_again()
            assert until(lambda: node.score_sums("broker").encoder) == "hashed-1"
        finally:
            loop.close()


def test_a_silo_that_shares_no_statistics_gives_no_sums(tmp_path, encoder):
    shy = NodeSettings("shy", tmp_path / "shy", encoder=ENCODED, statistics=SharedStatistics("none"))
    with Node(shy) as node:
        node.put(drafts())
        with pytest.raises(Refused):
            node.score_sums("broker")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"encoder": "e", "bm25": {"mean": NaN}}'])
def test_a_damaged_scale_on_disk_is_bm25_until_another_comes(tmp_path, encoder, content):
    settings = NodeSettings("east", tmp_path / "east", encoder=ENCODED)
    (tmp_path / "east").mkdir()
    (tmp_path / "east" / "shared.scale").write_bytes(content)
    with Node(settings).offline() as node:
        assert isinstance(node.searcher.scorer, Bm25Scorer)
        node.adopt_scale(SCALE)
        assert node.searcher.scorer == HybridScorer(SCALE)


def test_single_documents_do_not_measure_scores_again(tmp_path, encoder):
    with Node(NodeSettings("north", tmp_path / "north", encoder=ENCODED)).offline() as node:

        def put(some):
            node.store.put(some)
            node.index.catch_up()
            node._measure_scores()
            node.index.encode_all()
            node._measure_scores()
            return node.score_sums("broker")

        sums = put(drafts())
        assert sums.dense.count
        departures = list(node.ledger.departures())
        for at in range(5):
            assert put([Draft(f"new {at}", "", f"tidal power {at}")]) is sums
        assert list(node.ledger.departures()) == departures
        again = put([Draft(f"more {at}", "", f"wind turbines {at}") for at in range(200)])
        assert again is not sums
        assert list(node._recorded) == ["broker"]
