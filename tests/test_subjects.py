"""A silo whose documents are about somebody: whose budget its releases spend, and how often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.errors import BudgetExhausted
from isthmus.service.node_api import node_app
from isthmus.service.settings import NoisedCounts, Policy, Source
from isthmus.service.stores import Draft
from isthmus.service.wire import CountQuestion
from private_node import PEER, node, private_settings, released, texts

COUNTS = Policy(search=True, counts=True, noised_counts=True)


def letters(patients=10, each=5):
    """So many letters of every patient, and ten texts about nobody."""
    drafts = texts(patients * each + 10)
    about = [f"patient-{at // each:04}" for at in range(patients * each)] + [""] * 10
    return [replace(draft, subject=subject) for draft, subject in zip(drafts, about, strict=True)]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "none").mkdir()
    source = Source("folder", tmp_path / "none", subject_noun="patient")
    return replace(private_settings(tmp_path / "north"), peers={PEER: COUNTS}, sources=(source,))


def test_statistics_count_three_letters_of_a_patient_and_cost_it_three_times_their_epsilon(settings):
    with node(settings, *letters()) as opened:
        statistics = released(opened)
        assert statistics.documents == 40, "10 patients of 3 letters, and 10 texts"
        assert opened.ledger.subject("patient-0003").spent == 3.0
        assert sorted(opened.ledger.spent(f"d{at}") for at in range(5)) == [0.0, 0.0, 1.0, 1.0, 1.0]
        assert opened.ledger.spent("d55") == 1.0, "a document about nobody is its own unit"
        release = opened.release()
        assert (release.unit, release.most_spent, release.least_left) == ("patient", 3.0, 6.0)
        assert release.peers[0].left == 6.0
        assert "of a patient" in release.meaning
        whole = sum(opened.index.snapshot.lengths.values())
        assert sum(statistics.lengths.values()) == pytest.approx(whole * 40 / 60, abs=2)


def test_a_patient_is_charged_the_same_whatever_order_its_letters_came_in(settings, tmp_path):
    spent = []
    for name, drafts in (("a", letters()), ("b", letters()[::-1])):
        with node(replace(settings, folder=tmp_path / name), *drafts) as opened:
            released(opened)
            accounts = list(opened.ledger.accounts())
            spent.append(sorted((each.document.split()[0], each.spent, each.documents) for each in accounts))
    assert [(noun, epsilon, count) for noun, epsilon, count in spent[0] if noun == "patient"] == [
        ("patient", 3.0, 5)
    ] * 10
    assert [row[1:] for row in spent[0]] == [row[1:] for row in spent[1]]


def test_statistics_are_refused_at_the_patients_limit_and_not_at_the_letters(settings):
    with node(replace(settings, per_subject=5, budget=4.0), *letters()) as opened:
        with pytest.raises(BudgetExhausted, match="ε = 5 but only 4"):
            released(opened)
        assert opened.ledger.subject("patient-0003").spent == 0.0
    with node(
        replace(settings, folder=settings.folder / "two", unit="document", budget=4.0), *letters()
    ) as own:
        assert released(own).documents == 60
        assert own.ledger.subject("patient-0003") is None
        assert own.release().unit == "document"


def test_a_count_is_of_patients_and_costs_each_of_them_epsilon_once(settings):
    """Whatever all letters of a patient say, the sum changes by one at most."""
    precise = replace(settings, noised_counts=NoisedCounts(epsilon=4.0), budget=1000.0)
    drafts = [
        Draft(f"l{at}", "", f"tide turbine number{at}", subject=f"patient-{at // 10}") for at in range(100)
    ]
    loose = [Draft(f"o{at}", "", f"tide orchard number{at}") for at in range(40)]
    with node(precise, *drafts, *loose) as opened:
        answer = opened.count(CountQuestion(query="turbine", threshold=0.5), PEER)
        assert answer.unit == "patient"
        assert abs(answer.count - 10) <= 5
        assert abs(opened.count(CountQuestion(query="tide", threshold=0.5), PEER).count - 50) <= 5
        assert opened.ledger.subject("patient-3").spent == 8.0
        (row,) = [row for row in opened.ledger.summary()["departures"] if row["kind"] == "counts"]
        assert row["unit"] == "one patient more, less or replaced"


def test_a_letter_that_turns_out_to_be_anothers_is_counted_and_paid_for_by_both(settings):
    drafts = letters(patients=2)
    with node(replace(settings, noised_counts=NoisedCounts(epsilon=1.0)), *drafts) as opened:
        opened.count(CountQuestion(query="word1", threshold=0.5), PEER)
        assert opened.ledger.subject("patient-0000").spent == 1.0
        opened.store.put([replace(drafts[3], subject="patient-0009")], source="operator")
        opened.index.catch_up()
        opened.count(CountQuestion(query="word2", threshold=0.5), PEER)
        assert opened.ledger.subject("patient-0009").spent >= 2.0, "1 that it inherits, and 1 of its own"
        assert opened.ledger.subject("patient-0001").spent == 2.0


def test_subjects_leave_in_no_answer_and_stand_in_the_ledger_as_digests(settings):
    from starlette.testclient import TestClient

    open_to_all = replace(
        settings, peers={"anonymous": Policy(search=True, snippets=True, open=True, counts=True)}
    )
    with node(open_to_all, *letters()) as opened:
        opened._read.set()
        with TestClient(node_app(opened), base_url="http://127.0.0.1") as client:
            shown = client.post("/v1/search", json={"query": "word1 word2", "k": 20})
            assert shown.json()["hits"]
            answers = [shown.text, client.get("/v1/release").text]
        released(opened)
    assert not any("patient-0" in each for each in answers)
    data = b"".join(path.read_bytes() for path in settings.folder.glob("ledger.db*"))
    assert b"patient-0" not in data
