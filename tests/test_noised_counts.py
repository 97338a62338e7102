"""Noised counts: what one document can change, what is charged, who may ask, and what a broker passes on."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from browsing import opened
from isthmus.cli import main
from isthmus.errors import BudgetExhausted
from isthmus.learning import COLUMNS, SearchModel
from isthmus.learning.columns import PROFILE
from isthmus.learning.model import HitCalibration, Weights
from isthmus.private.mechanisms import Geometric
from isthmus.retrieval import TEXT
from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.client import Client
from isthmus.service.columns import ModelScorer
from isthmus.service.node_api import node_app
from isthmus.service.noised_counts import COVERAGE, matching_documents, reach
from isthmus.service.settings import BrokerSettings, NoisedCounts, Policy, SharedStatistics, SiloAddress
from isthmus.service.stores import Draft
from isthmus.service.wire import LEVELS, CountQuestion
from private_node import PEER, node, private_settings, texts
from silo_stand_in import Loop

ONLY_COUNTS = Policy(noised_counts=True)
TIDES = [Draft(f"t{at}", "", f"tide turbine number{at}") for at in range(60)]
OTHERS = [Draft(f"o{at}", "", f"tide orchard number{at}") for at in range(40)]


def counting(folder, **changes):
    settings = private_settings(folder)
    return replace(settings, peers={PEER: ONLY_COUNTS, "second": ONLY_COUNTS}, **changes)


def precise(folder, epsilon=4.0, **changes):
    """Noise of 4 hardly ever reaches 3."""
    return counting(folder, noised_counts=NoisedCounts(epsilon=epsilon), budget=1000.0, **changes)


def asked(query, threshold=0.5):
    return CountQuestion(query=query, threshold=threshold)


def model(slope=8.0):
    """A model that looks at BM25's share alone."""
    weights = np.zeros(len(COLUMNS))
    weights[COLUMNS.index("bm25")] = 1.0
    flat = np.zeros(len(PROFILE))
    line = HitCalibration(
        slope=slope,
        reach=1e6,
        between=0.0,
        start=-0.5 * slope,
        above=1.0,
        share=0.0,
        base=0.0,
        bias=0.0,
        low=-9.0,
        spread=1.0,
        centre=flat,
        scale=np.ones(len(PROFILE)),
        weights=flat,
    )
    score = Weights(np.zeros(len(COLUMNS)), np.ones(len(COLUMNS)), weights)
    return SearchModel("linear", score, line, "", {"version": "v1"})


def learned(opened):
    """The node with statistics that were published, and a model."""
    opened.share(opened.index.snapshot.exact_statistics("north", (TEXT,)).to_bytes())
    opened.adopt(model().to_bytes(), PEER)


def test_documents_with_all_words_are_counted_before_anything_is_learned(tmp_path):
    with node(precise(tmp_path / "north"), *TIDES, *OTHERS) as opened:
        first = opened.count(asked("Turbines of the tide"), PEER)
        assert first.by == "words"
        assert abs(first.count - 60) <= 5
        assert first.low <= first.count <= first.high
        assert abs(opened.count(asked("orchard turbine"), PEER).count) <= 5
        assert abs(opened.count(asked("tide"), PEER).count - 100) <= 5


def test_documents_above_a_probability_are_counted_with_a_model(tmp_path):
    with node(precise(tmp_path / "north"), *TIDES, *OTHERS) as opened:
        learned(opened)
        exact = {}
        for level in LEVELS:
            reader = opened.index.snapshot
            handles = reader.reader.handles()
            question = asked("turbine", level)
            exact[level] = int(
                matching_documents(reader, handles, question, opened.searcher.scorer, dense=False).sum()
            )
            answer = opened.count(question, PEER)
            assert answer.by == "probability"
            assert abs(answer.count - exact[level]) <= 5
        assert exact[0.5] in (0, 60)
        assert list(exact.values()) == sorted(exact.values(), reverse=True)


@pytest.mark.parametrize("learns", [False, True])
def test_one_document_changes_a_count_by_at_most_one(tmp_path, learns):
    """More, less or replaced: whether another document counts does not depend on it."""
    drafts = texts(60)
    questions = [asked("word1"), asked("word1 word2 word3", 0.6), asked("word4 word5", 0.9)]

    def counted(folder, documents):
        with node(counting(folder), *documents) as opened:
            snapshot = replace(opened.index.snapshot, shared=statistics)
            scorer = ModelScorer(model()) if learns else None
            names = opened.index.snapshot.reader.ids(snapshot.reader.handles())
            masks = [
                matching_documents(snapshot, snapshot.reader.handles(), question, scorer, dense=False)
                for question in questions
            ]
            return [dict(zip(names, mask.tolist(), strict=True)) for mask in masks]

    with node(counting(tmp_path / "published"), *drafts) as opened:
        statistics = opened.index.snapshot.exact_statistics("north", (TEXT,))
    whole = counted(tmp_path / "whole", drafts)
    changed = {
        "less": drafts[1:],
        "more": [*drafts, Draft("new", "", "word1 word2 word3 word4 word5")],
        "replaced": [Draft(drafts[0].id, "", "word1 word1 word4"), *drafts[1:]],
    }
    assert any(sum(each.values()) for each in whole)
    for name, documents in changed.items():
        for before, after in zip(whole, counted(tmp_path / name, documents), strict=True):
            same = set(before) & set(after) - {drafts[0].id, "new"}
            assert {each: before[each] for each in same} == {each: after[each] for each in same}
            assert abs(sum(before.values()) - sum(after.values())) <= 1


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 1.0, 5.0])
def test_the_interval_is_the_shortest_that_holds_the_noise_often_enough(epsilon):
    ratio, k = math.exp(-epsilon), reach(epsilon)
    inside = [1 - 2 * ratio ** (each + 1) / (1 + ratio) for each in (k, k - 1)]
    assert inside[0] >= COVERAGE > (inside[1] if k else -1)
    drawn = Geometric(epsilon).draw(20_000)
    assert (np.abs(drawn) <= k).mean() >= COVERAGE - 0.01


def test_every_document_is_charged_before_a_count_leaves(tmp_path):
    with node(counting(tmp_path / "north"), *texts()) as opened:
        opened.count(asked("word1"), PEER)
        assert opened.ledger.spent("d1") == opened.ledger.spent("d77") == pytest.approx(0.2)
        (row,) = opened.ledger.departures()
        assert (row["kind"], row["mechanism"], row["epsilon"]) == ("counts", "noised count", 0.2)
        assert row["unit"] == "one document more, less or replaced"
        opened.ledger.audit()


def test_a_second_peer_has_the_same_answer_and_pays_for_itself(tmp_path):
    with node(counting(tmp_path / "north"), *texts()) as opened:
        first = opened.count(asked("word1"), PEER)
        second = opened.count(asked("word1"), "second")
        assert second.count == first.count
        assert opened.ledger.spent("d1") == pytest.approx(0.2), "the noise is the same for both"
        assert opened.ledger.spent("d1", peer="second") == pytest.approx(0.2)
    with node(counting(tmp_path / "north"), Draft("d0", "", "word1 changed")) as opened:
        assert opened.count(asked("word1"), PEER) == replace_repeated(first), "one edit is no new draw"


def replace_repeated(answer):
    return answer.model_copy(update={"repeated": True})


def test_an_encoder_fitted_on_the_silos_own_texts_takes_no_part(tmp_path, monkeypatch):
    """It depends on every document: with it one document could change every count."""
    with node(precise(tmp_path / "north"), *TIDES, *OTHERS) as opened:
        learned(opened)
        encoder = opened.index.snapshot.encoder
        monkeypatch.setattr(type(encoder), "query", lambda *words: pytest.fail("its vectors were asked for"))
        assert opened.count(asked("turbine"), PEER).by == "probability"


def test_a_model_that_tells_nothing_apart_counts_words(tmp_path):
    with node(precise(tmp_path / "north"), *TIDES, *OTHERS) as opened:
        opened.share(opened.index.snapshot.exact_statistics("north", (TEXT,)).to_bytes())
        opened.adopt(model(slope=0.0).to_bytes(), PEER)
        assert opened.count(asked("turbine"), PEER).by == "words"


def test_statistics_keep_their_room_in_the_budget(tmp_path):
    with node(counting(tmp_path / "north", noised_counts=NoisedCounts(epsilon=2.0)), *texts()) as opened:
        for at in range(4):
            opened.count(asked(f"word{at}"), PEER)
        with pytest.raises(BudgetExhausted):
            opened.count(asked("word9"), PEER)
        assert opened.ledger.spent("d1") == 8.0, "ε = 1 of 9 is for a release of statistics"
    without = replace(
        counting(tmp_path / "north", noised_counts=NoisedCounts(epsilon=1.0)),
        statistics=SharedStatistics(form="none"),
    )
    with node(without) as opened:
        opened.count(asked("word9"), PEER)
        assert opened.ledger.spent("d1") == 9.0


def test_thresholds_are_those_of_a_grid():
    with pytest.raises(ValidationError, match=r"0\.5"):
        CountQuestion(query="word", threshold=0.55)


@contextmanager
def federation(folder, **policies):
    """Silos with these policies behind a broker, and its address."""
    loop = Loop()
    with ExitStack() as stack:
        stack.callback(loop.close)
        addresses = {}
        for name, (policy, drafts) in policies.items():
            settings = replace(precise(folder / name), silo=name, peers={"anonymous": policy})
            opened = stack.enter_context(node(settings, *drafts))
            opened._read.set()
            addresses[name] = SiloAddress(f"http://127.0.0.1:{loop.serve(node_app(opened)).port}")
        settings = BrokerSettings(folder=folder / "broker", silos=addresses, share_statistics=False)

        async def started():
            return broker_app(Broker(settings))

        yield f"http://127.0.0.1:{loop.serve(loop.run(started()), lifespan='on').port}"


def test_a_silo_that_shows_no_hit_tells_how_many_it_has(tmp_path, capsys):
    policies = {
        "north": (ONLY_COUNTS, TIDES),
        "south": (Policy(search=True), OTHERS),
        "west": (replace(ONLY_COUNTS, budget=5.0), OTHERS),
    }
    with federation(tmp_path, **policies) as url, Client(url) as broker:
        assert {each.silo: each.status for each in broker.search("turbine").silos}["north"] == "refused"
        counted = {each.silo: each for each in broker.count("turbine tide").silos}
        assert abs(counted["north"].answer.count - 60) <= 5
        assert (counted["south"].status, counted["south"].answer) == ("refused", None)
        assert counted["south"].detail == "its policy does not allow noised_counts"
        assert counted["west"].answer.count <= 5
        again = {each.silo: each for each in broker.count("TIDE turbine").silos}
        assert again["north"].answer == replace_repeated(counted["north"].answer)
        spent = {each.silo: each for each in broker.count("orchard").silos}
        assert spent["west"].detail == "the privacy budget for this peer is spent"
        assert [each.silo for each in broker.count("tide", silos=["north"]).silos] == ["north"]
        capsys.readouterr()
        assert main(["search", "turbine tide", "--count", "--broker", url]) == 0
        told = capsys.readouterr().out
        assert "north" in told
        assert f"{counted['north'].answer.count}" in told
        assert "asked before, nothing charged" in told
        assert main(["search", "turbine", "--count", "--broker", url, "--threshold", "0.55"]) == 1
        assert "0.1, 0.2, 0.3, 0.4, 0.5" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_on_the_page_a_silo_that_refuses_is_asked_how_many_it_has(tmp_path, browser):
    policies = {"north": (ONLY_COUNTS, TIDES), "south": (Policy(search=True, snippets=True), OTHERS)}
    with federation(tmp_path, **policies) as url, opened(browser, url, patience=60.0) as page:
        page.get_by_label("Search all silos").fill("turbine tide")
        page.keyboard.press("Enter")
        page.locator(".hit").first.wait_for()
        page.get_by_role("button", name="How many has it?").click()
        page.get_by_text("have all words").wait_for()
        told = page.locator(".noised").inner_text()
        assert "ε = 4.00 spent" in told
        page.goto(f"{url}/#/silos")
        page.get_by_text("What has left it: 1 kind").wait_for()
