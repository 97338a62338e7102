"""Silos learn over their nodes' API: from masked sums, with whoever is there, into versions that are used."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.asking import Silos
from isthmus.errors import DataError, Refused, SiloUnavailable
from isthmus.learning import (
    COLUMNS,
    PROFILE,
    HitCalibration,
    JudgedRows,
    SearchModel,
    Weights,
    learn,
)
from isthmus.retrieval import Statistics, summed
from isthmus.service import wire
from isthmus.service.broker import Broker, SiloClient
from isthmus.service.columns import silo_rows
from isthmus.service.http_client import HttpReply
from isthmus.service.joint_learning import NO_CONSENT, JointLearning
from isthmus.service.learning_runs import LearningRuns
from isthmus.service.merging import Merger, ModelExchange
from isthmus.service.node import Node
from isthmus.service.results import in_order
from isthmus.service.settings import BrokerSettings, LearningSchedule, Policy, SiloAddress
from isthmus.service.stores import Draft, Judgement
from isthmus.service.versions import NONE, ModelVersions
from learning_silos import QUERIES, AtHand, judged, nodes, texts

POLICY = Policy(search=True, counts=True, feedback=True, learning=True)


def judge_all(node, queries=QUERIES):
    """What people said of the silo's documents that are right."""
    for draft in texts(int(node.settings.silo[-1])):
        right = [query for query in queries if judged()[query][draft.id]]
        node.store.judge(*(Judgement(query, draft.id, True, "ada", 1.0) for query in right))


@contextmanager
def silos(tmp_path, judging=(1, 2, 3), **learning):
    """Nodes with shared statistics, some of them with judgements, and how a broker talks to them."""
    with nodes(tmp_path, POLICY, **{"least_queries": 4, **learning}) as opened:
        for node in opened:
            if int(node.settings.silo[-1]) in judging:
                judge_all(node)
        total = summed(Statistics.from_bytes(node.statistics("broker")) for node in opened).to_bytes()
        for node in opened:
            node.share(total)
        yield opened


def learned(opened, **more):
    run = JointLearning([AtHand(node) for node in opened], **more)
    return asyncio.run(run.learn()), run


def test_a_model_over_the_network_is_that_of_all_rows_in_one_place(tmp_path):
    """Under masks, to the digits that fixed point leaves."""
    with silos(tmp_path) as opened:
        (model, record), run = learned(opened)
        rows = {
            node.settings.silo: silo_rows(
                node.index.snapshot,
                QUERIES,
                node.learner.judged.current.grades,
                folds=node.learner.judged.deal(QUERIES, record.folds),
                encoder="",
                depth=node.settings.depth,
                build=JudgedRows,
            ).answer
            for node in opened
        }
        alone, expected = learn(Silos.in_memory(rows), sorted(QUERIES), folds=record.folds)
        assert (record.queries, record.relevant, record.rows) == (
            expected.queries,
            expected.relevant,
            expected.rows,
        )
        assert run.left_out == {}
        assert record.silos == ("silo1", "silo2", "silo3")
        np.testing.assert_allclose(model.score.centre, alone.score.centre, atol=1e-6)
        for name in record.models:
            ours, theirs = record.models[name]["nDCG@10"], expected.models[name]["nDCG@10"]
            assert ours == pytest.approx(theirs, abs=0.05), name


def test_nodes_search_with_it_and_explanations_add_up(tmp_path):
    with silos(tmp_path) as opened:
        (model, _), _ = learned(opened)
        content = replace(model, about={**model.about, "version": "v1"}).to_bytes()
        for node in opened:
            assert node.ready().model == ""
            node.adopt(content, "anonymous")
            assert node.ready().model == "v1"
            answer = node.searcher.search(
                wire.Search(query="tide wave", explain=True), snippets=False, model="v1"
            )
            assert (answer.scorer, answer.model) == ("learned", "v1")
            assert len(answer.margins) >= len(answer.hits)
            for hit in answer.hits:
                total = sum(part.contribution for part in hit.explanation)
                odds = np.log(hit.probability / (1 - hit.probability))
                assert total == pytest.approx(odds, abs=1e-6)
                assert "start" in {part.retriever for part in hit.explanation}
            left = {departure.kind for departure in node.release().departures}
            assert {"sums", "query text", "scores"} <= left
        again = Node(opened[0].settings)
        with again.offline():
            assert again.ready().model == "v1", "and after a restart"
            again.drop_model()
            assert again.searcher.scorer.name == "bm25"


def test_a_new_document_with_a_new_word_is_first_before_and_after(tmp_path):
    """The silos' shared statistics do not know the word yet, and no judged query has it."""
    with silos(tmp_path) as opened:
        (model, _), _ = learned(opened)
        content = replace(model, about={**model.about, "version": "v1"}).to_bytes()
        node = opened[0]
        for at, learn_first in enumerate((False, True)):
            if learn_first:
                node.adopt(content, "anonymous")
            word = f"zeppelin{at}"
            body = f"plain text of other things, and a {word} beside the tide"
            node.store.put([Draft(word, "", body)], source="operator")
            node.index.catch_up()
            for query in (f"{word} tide", f"tide wave {word}"):
                answer = node.searcher.search(wire.Search(query=query), snippets=False, model="v1")
                assert answer.scorer == ("learned" if learn_first else "bm25")
                assert answer.hits[0].document == word, query


def test_a_model_that_is_handed_out_ends_no_session(tmp_path):
    """A silo that came back gets the model there is while all of them learn the next."""
    with silos(tmp_path) as opened:
        (model, _), _ = learned(opened)
        before = replace(model, about={**model.about, "version": "v1"}).to_bytes()

        def hand_out(stage):
            opened[0].adopt(before, "anonymous")

        learned_again, run = learned(opened, tell=hand_out)
        assert learned_again is not None
        assert run.left_out == {}


def test_a_silo_that_leaves_is_named_and_the_others_begin_again(tmp_path):
    """Nobody may leave a session: four silos, of which one stops answering in the middle."""

    class Leaving(AtHand):
        questions = 0

        async def ask(self, method, path, *arguments, **more):
            if path.endswith(tuple("0123456789")):
                self.questions += 1
                if self.questions > 5:
                    raise SiloUnavailable("gone")
            return await super().ask(method, path, *arguments, **more)

    with nodes(tmp_path, POLICY, seeds=(1, 2, 3, 4), least_queries=4) as opened:
        for node in opened[:3]:
            judge_all(node)
        stages = []
        hands = [*(AtHand(node) for node in opened[:3]), Leaving(opened[3])]
        run = JointLearning(hands, tell=stages.append)
        _, record = asyncio.run(run.learn())
        assert record.silos == ("silo1", "silo2", "silo3")
        assert run.left_out == {"silo4": "gone"}
        assert "begins again without silo4" in stages


def test_a_silo_with_few_judged_queries_ranks_and_adds_nothing(tmp_path):
    with nodes(tmp_path, POLICY, seeds=(1, 2, 3, 4), least_queries=4) as opened:
        for node in opened[:3]:
            judge_all(node)
        (_, record), run = learned(opened)
        assert len(record.silos) == 4
        assert run.left_out == {}


def test_with_fewer_than_three_each_calibrates_by_itself(tmp_path):
    with silos(tmp_path, judging=(1, 2)) as opened:
        result, _ = learned(opened)
        assert result is None
        for node in opened[:2]:
            answer = node.searcher.search(wire.Search(query="tide wave"), snippets=False)
            assert answer.hits[0].probability is not None
            assert answer.model == ""
            departures = {departure.kind for departure in node.release().departures}
            assert "query text" in departures
        assert (
            opened[2].searcher.search(wire.Search(query="tide wave"), snippets=False).hits[0].probability
            is None
        )


def test_two_learn_together_where_both_owners_agree(tmp_path):
    with silos(tmp_path, judging=(1, 2), consent="two") as opened:
        (_, record), _ = learned(opened)
        assert record.queries == len(QUERIES)
        for node in opened[:2]:
            guarantees = {each.guarantee for each in node.release().departures if each.kind == "sums"}
            assert "no DP guarantee" in guarantees
        opened[1].settings = replace(
            opened[1].settings, learning=replace(opened[1].settings.learning, consent="")
        )
        opened[1].learner.settings = opened[1].settings
        result, run = learned(opened)
        assert result is None
        assert run.left_out == {"silo2": NO_CONSENT}


def test_silos_are_weighed_where_their_owners_let_them_be(tmp_path):
    """Reports are seen of each silo, and in its ledger; the weighed sums are masked as all are."""
    with silos(tmp_path, reports=True) as opened:
        (_, record), _ = learned(opened, mode="fedrisk")
        assert record.weights.keys() == {"silo1", "silo2", "silo3"}
        assert max(record.weights.values()) == 1.0
        for node in opened:
            assert "probe report" in {departure.kind for departure in node.release().departures}
    with silos(tmp_path / "closed") as opened, pytest.raises(SiloUnavailable, match="reports = true"):
        learned(opened, mode="fedrisk")


def test_nobody_has_judged_enough(tmp_path):
    with silos(tmp_path, judging=()) as opened, pytest.raises(DataError, match="judge hits of more queries"):
        learned(opened)


def test_a_silo_whose_policy_has_no_learning_and_one_without_cards_are_named(tmp_path):
    with (
        nodes(tmp_path / "one", Policy(search=True, counts=True)) as opened,
        pytest.raises(SiloUnavailable, match=r"silo1: its policy has no learning"),
    ):
        learned(opened)
    without_cards = pytest.raises(SiloUnavailable, match="isthmus keys new keys silo1")
    with silos(tmp_path / "other", keys=None) as opened, without_cards:
        learned(opened)


def test_other_hash_keys_are_said(tmp_path):
    """Silos that deal queries into other folds cannot learn together."""
    with silos(tmp_path) as opened:
        opened[0].learner.judged._key = b"another"
        together, run = learned(opened)
        assert together is None, "of the other two each has calibrated by itself"
        assert "their hash keys differ" in run.left_out["silo1"]


def test_nonsense_is_refused_and_harms_nothing(tmp_path):
    with silos(tmp_path) as opened:
        hand = AtHand(opened[0])
        session = "0" * 32
        wrong = (
            ("PUT", "/learning", b"nonsense"),
            ("POST", f"/learning/{session}/0", b"nonsense"),
            ("POST", "/learning/not-a-session/0", b"nonsense"),
        )
        for method, path, body in wrong:
            assert asyncio.run(hand.ask(method, path, body)).status in (400, 422)
        for body in (b"[]", b'{"session": "0"}', b'{"session": "%s", "mode": "open"}' % session.encode()):
            reply = asyncio.run(hand.ask("POST", "/learning/session", body, "application/json"))
            assert reply.status == 422
        assert opened[0].searcher.search(wire.Search(query="tide"), snippets=False).hits


# versions


def version(name, **fields):
    return wire.LearnedVersion(version=name, learned="2026-11-16T18:00:00Z", **fields)


def test_versions_are_whole_or_not_there(tmp_path, monkeypatch):
    versions = ModelVersions(tmp_path / "learned")
    assert (versions.current, versions.history()) == ("", [])
    versions.add(version("20260101-000000", record={"kind": "linear"}), b"one")
    versions.use("20260101-000000")

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("os.replace", kill)
        with pytest.raises(KeyboardInterrupt):
            versions.add(version("20260102-000000"), b"two")
    assert [each.version for each in versions.history()] == ["20260101-000000"]
    versions.add(version("20260103-000000"), b"three")
    assert not list((tmp_path / "learned").glob("*.begun"))
    versions.add(version("20260104-000000", problem="too few"), None)
    assert [each.usable for each in versions.history()] == [False, True, True]
    assert versions.current == "20260101-000000"
    versions.use("20260103-000000")
    assert versions.before() == "20260101-000000"
    versions.use(versions.before())
    assert versions.before() == NONE
    assert versions.model("20260101-000000") == b"one"
    for wrong in ("20260104-000000", "nothing"):
        with pytest.raises(DataError, match=f"^no model of a version {wrong} .*--list"):  # and no path
            versions.use(wrong)
    (tmp_path / "learned" / "20260105-000000").mkdir()
    assert len(versions.history()) == 3, "a folder of somebody else's is none"


def test_one_run_at_a_time(tmp_path):
    versions = ModelVersions(tmp_path)
    with versions.learning(), pytest.raises(Refused, match="learning already"), versions.learning():
        pass
    with versions.learning():
        pass


def model(margin_weight=1.0, *, slope=1.0, start=0.0, base=0.2, kind="linear", baseline=None, about=None):
    weights = np.zeros(len(COLUMNS))
    weights[0] = margin_weight
    size = len(PROFILE)
    line = HitCalibration(
        *(slope, 1e9, slope, start, 1.0, 0.0, base, 0.0, -9.0, 1.0),
        *(np.zeros(size), np.ones(size), np.zeros(size)),
    )
    score = Weights(np.zeros(len(COLUMNS)), np.ones(len(COLUMNS)), weights)
    return SearchModel(kind, score, line, "", about or {}, baseline)


def hit(silo, document, score):
    parts = [wire.Evidence(retriever="bm25", raw=score, probability=None, weight=1.0, contribution=score)]
    return wire.Hit(document=document, silo=silo, probability=None, score=score, explanation=parts)


def answer(silo, hits, **fields):
    return wire.NodeAnswer(
        silo=silo, hits=hits, documents=9, statistics="", of_query=[1.0, 2.0], took_ms=1.0, **fields
    )


def test_a_query_too_short_for_the_model_has_the_baselines_probabilities():
    """All silos and the broker go by the number of the query's words."""
    baseline = model(kind="baseline", slope=3.0, start=-1.0)
    current = dataclasses.replace(model(baseline=baseline), least_words=3.0)
    own = answer("own", [hit("own", "a", 0.5)], model="v2", scorer="learned", margins=[0.5], retrieved=[])
    long = Merger.of(current, "v2", {"own": own})
    assert (long.used is current) == (own.of_query[0] >= np.log(3))
    short = Merger.of(dataclasses.replace(current, least_words=9.0), "v2", {"own": own})
    assert short.used is baseline
    expected = baseline.probabilities(np.array([0.5]), short.profile)
    assert short.hits(own)[0].probability == pytest.approx(expected[0])


@settings(max_examples=30, deadline=None)
@given(
    scores=st.lists(st.floats(-4, 4), min_size=1, max_size=6),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=6),
)
def test_silos_without_the_model_stand_by_the_baseline_and_never_last(scores, shares):
    """A silo's hits keep their order, have probabilities on the same scale, and explanations that add up."""
    current = model(baseline=model(kind="baseline", slope=3.0, start=-1.0))
    answers = {
        "new": answer(
            "new",
            [hit("new", f"n{at}", score) for at, score in enumerate(sorted(scores, reverse=True))],
            scorer="learned",
            model="v2",
            margins=sorted(scores, reverse=True),
        ),
        "old": answer(
            "old",
            [hit("old", f"o{at}", score) for at, score in enumerate(sorted(shares, reverse=True))],
            scorer="bm25",
            retrieved=[(share, None) for share in sorted(shares, reverse=True)],
        ),
    }
    merger = Merger.of(current, "v2", answers)
    lists = [merger.hits(one) for one in answers.values()]
    hits = [each for one in lists for each in one]
    for each in hits:
        assert each.probability is not None
        total = sum(part.contribution for part in each.explanation)
        assert total == pytest.approx(np.log(each.probability / (1 - each.probability)), abs=1e-6)
    ordered = in_order(lists)
    assert [each.probability for each in ordered] == sorted((each.probability for each in hits), reverse=True)
    from scipy.special import expit

    assert {each.document: each.probability for each in hits if each.silo == "old"} == {
        f"o{at}": pytest.approx(float(expit(3 * share - 1)), abs=1e-9)
        for at, share in enumerate(sorted(shares, reverse=True))
    }


def test_a_search_of_fewer_silos_has_the_probabilities_of_such():
    """They are the node's own where it alone is searched; an older model has none, and the answer says so."""
    single = dataclasses.replace(model().calibration, start=-2.0)
    current = dataclasses.replace(model(), single=single, silos=3)
    names, sure = ("a", "b", "c"), []
    every = {
        name: answer(name, [hit(name, "d", 0.5)], model="v2", scorer="learned", margins=[0.5], retrieved=[])
        for name in names
    }
    for count in (1, 2, 3):
        merger = Merger.of(current, "v2", {name: every[name] for name in names[:count]})
        sure.append(merger.hits(every["a"])[0].probability)
        assert not merger.overrated(3)
    assert sure[0] < sure[1] < sure[2]
    assert sure[0] == pytest.approx(float(single(np.array([0.5]), merger.profile)[0]))
    older = Merger.of(model(), "v2", {"a": every["a"]})
    assert older.overrated(3)
    assert not older.overrated(1)


def test_a_silos_own_ranker_is_left_as_it_is():
    rated = hit("own", "d", 1.0).model_copy(update={"probability": 0.7})
    own = answer("own", [rated], scorer="ranker")
    assert Merger.of(model(), "v2", {"own": own}).hits(own) == [rated]


def test_the_model_goes_to_silos_that_lack_it_by_itself(tmp_path):
    """After a search in which one has said so, the next exchange brings it; another version to all."""
    versions = ModelVersions(tmp_path / "broker")
    with silos(tmp_path) as opened:
        hands = [AtHand(node) for node in opened]
        exchange = ModelExchange(hands, versions)
        assert exchange.settled
        versions.add(version("1"), model(about={"version": "1"}).to_bytes())
        versions.use("1")
        asyncio.run(exchange.once())
        assert exchange.settled
        assert {node.ready().model for node in opened} == {"1"}
        opened[1].drop_model()  # as restored from a copy of before
        lacking = answer("silo2", [], scorer="bm25")
        assert "without the current model" in exchange.remark("silo2", lacking)
        assert not exchange.settled
        asyncio.run(exchange.once())
        assert opened[1].ready().model == "1"
        current = opened[1].searcher.search(wire.Search(query="tide"), snippets=False, model="1")
        assert exchange.remark("silo2", current) == ""
        versions.use(NONE)
        asyncio.run(exchange.once())
        assert {node.ready().model for node in opened} == {""}


@pytest.mark.parametrize("meanwhile", [False, True], ids=["before a search", "during a search"])
def test_a_version_that_another_process_puts_in_use_rates_no_answer_to_a_search_without_it(
    tmp_path, monkeypatch, meanwhile
):
    """Silos send margins for the version that they were asked with: merged by another one, every probability
    would be that of a query without a list."""
    broker, versions = broker_of(tmp_path), ModelVersions(tmp_path / "broker/learned")
    versions.add(version("1"), model(about={"version": "1"}).to_bytes())
    asked = []

    async def ask(silo, method, path, body=b"", headers=None, person=None):
        asked.append(headers[wire.MODEL])
        if meanwhile:
            versions.use("1")
            broker.models.reload()
        has = {"margins": [0.5]} if headers[wire.MODEL] == "1" else {}
        rated = hit(silo.name, "a", 0.5).model_copy(update={"probability": 0.7})
        reply = answer(silo.name, [rated], scorer="learned", model="1", **has)
        return HttpReply(200, "application/json", reply.model_dump_json().encode())

    monkeypatch.setattr(SiloClient, "ask", ask)
    if not meanwhile:
        versions.use("1")
        monkeypatch.setattr("isthmus.service.merging.LOOK_EVERY", -1.0)
    results = asyncio.run(broker.search(wire.Search(query="tide", silos=["silo1"])))
    assert asked == ["" if meanwhile else "1"]
    own = answer("silo1", [], model="1", scorer="learned", margins=[0.5])
    profile = Merger.of(model(), "1", {"silo1": own}).profile
    expected = 0.7 if meanwhile else model().probabilities(np.array([0.5]), profile)[0]
    assert results.hits[0].probability == pytest.approx(expected)


# runs of a broker


def broker_of(tmp_path, **learning):
    addresses = {f"silo{seed}": SiloAddress("http://127.0.0.1:9") for seed in (1, 2, 3)}
    return Broker(
        BrokerSettings(
            folder=tmp_path / "broker",
            silos=addresses,
            share_statistics=False,
            learning=LearningSchedule(**learning),
        )
    )


def test_a_run_that_fails_is_kept_once_with_its_reason(tmp_path):
    broker = broker_of(tmp_path)
    runs = LearningRuns(broker)
    for _ in range(2):
        with pytest.raises(SiloUnavailable, match="cannot learn together"):
            asyncio.run(runs.once("masked", by="ada"))
    (only,) = runs.view().versions
    assert "silo1" in only.problem
    assert (only.by, only.usable, only.current) == ("ada", False, False)
    assert json.loads((tmp_path / "broker/learned" / only.version / "record.json").read_text())["by"] == "ada"


def test_the_schedule_says_when_it_is_due(tmp_path):
    assert LearningRuns(broker_of(tmp_path)).view().next is None
    runs = LearningRuns(broker_of(tmp_path, every="6 hours"))
    assert runs.view().every == "6 hours"
    assert runs._due() <= time.time() + 1
    runs.versions.add(version("20260101-000000"), b"x")
    assert runs._due() == pytest.approx(time.time() + 6 * 3600, abs=60)
    for wrong in ("daily", "0 days", "5"):
        with pytest.raises(ValueError, match="1 day"):
            LearningSchedule(every=wrong)
