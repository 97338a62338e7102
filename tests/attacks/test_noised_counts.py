"""Whoever wants to know exactly how many documents answer a question, from counts with noise."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from isthmus.errors import BudgetExhausted, DataError
from isthmus.service.noised_counts import reach
from isthmus.service.settings import NoisedCounts, Policy
from isthmus.service.stores import Draft
from isthmus.service.wire import CountQuestion
from private_node import BUDGET, PEER, node, private_settings, texts


def counting(folder, epsilon=1.0):
    settings = private_settings(folder)
    policy = Policy(noised_counts=True)
    return replace(settings, peers={PEER: policy}, noised_counts=NoisedCounts(epsilon=epsilon))


def count(opened, query):
    return opened.count(CountQuestion(query=query), PEER)


def test_a_question_asked_again_in_other_words_order_or_case_has_one_noise_and_one_charge(tmp_path):
    spellings = ["word1 word2", "word2 word1", "WORD1  Word2", "word1, word2?", "word2 the word1 and word2"]
    with node(counting(tmp_path / "north"), *texts()) as opened:
        answers = {count(opened, each).count for each in 20 * spellings}
        assert len(answers) == 1, "averaging gains nothing"
        assert opened.ledger.spent("d1") == 1.0
    with node(counting(tmp_path / "north")) as opened:
        assert count(opened, spellings[0]).count in answers, "nor does a restart"
        assert opened.ledger.spent("d1") == 1.0


def test_questions_that_are_nearly_the_same_are_charged_each_until_nothing_leaves(tmp_path, soak_count):
    """The word sought beside words that no document has would be the same set over and over."""
    drafts = [Draft(f"d{at}", "", f"secret plan number{at}") for at in range(50)]
    answers = []
    with node(counting(tmp_path / "north"), *drafts) as opened:
        for at in range(soak_count(30, 200)):
            with suppress(BudgetExhausted):
                answers.append(count(opened, f"secret plan number{at}" if at else "secret plan").count)
            assert opened.ledger.spent("d1") <= BUDGET - 1
        with pytest.raises(BudgetExhausted):
            count(opened, "secret")
        opened.ledger.audit()
    assert len(answers) == BUDGET - 1, "ε = 1 a question; 1 stays for statistics"


def test_a_count_of_everything_does_not_show_how_many_documents_there_are(tmp_path):
    """Clipped at that number, an interval that reaches beyond it would end there, exactly."""
    sizes = (40, 41)
    for size in sizes:
        drafts = [Draft(f"d{at}", "", f"tides number{at}") for at in range(size)]
        with node(counting(tmp_path / str(size)), *drafts) as opened:
            answer = count(opened, "tides")
            assert answer.high - answer.count == reach(1.0), "however near the count is to all of them"


def test_a_lost_or_damaged_file_of_counts_is_charged_again_or_nothing_leaves(tmp_path):
    settings = counting(tmp_path / "north")
    answers = []
    for at in range(14):
        with node(settings, *(texts() if not at else ())) as opened, suppress(BudgetExhausted):
            answers.append(count(opened, "word1").count)
        file = settings.folder / "noised.counts"
        file.write_bytes(b"half a fi") if at % 2 else file.unlink(missing_ok=True)
    with node(settings) as opened:
        assert opened.ledger.spent("d1") == len(answers) == BUDGET - 1


def test_one_document_that_comes_and_goes_is_not_seen_through_a_noise_that_stays(tmp_path, soak_count):
    """The answer stays while few documents change, and is another draw when many have."""
    settings = counting(tmp_path / "north")
    with node(settings, *texts()) as opened:
        first = count(opened, "word1")
    for edit in range(soak_count(10, 60)):
        with node(settings, Draft("d0", "", "word1" if edit % 2 else f"edition{edit}")) as opened:
            assert count(opened, "word1").count == first.count
            assert opened.ledger.spent("d1") == 1.0
    with node(settings, *(Draft(f"d{at}", "", f"word1 text {at}") for at in range(30))) as opened:
        count(opened, "word1")
        assert opened.ledger.spent("d77") == 2.0, "drawn anew, charged anew"


def test_a_copy_under_another_name_is_not_counted_twice(tmp_path):
    """Else ε would hold for half of what a text adds to a count."""
    body = "secret " + " ".join(f"plan{at}" for at in range(20))
    copies = [Draft(f"copy{at}", f"title {at}", body) for at in range(500)]
    with node(replace(counting(tmp_path / "north", epsilon=4.0), budget=100.0), *copies) as opened:
        assert count(opened, "secret").count <= 5
        assert opened.ledger.spent("copy7") == 4.0


def test_the_first_document_in_another_language_changes_no_count_by_more_than_itself(tmp_path):
    """`son` is no content in French: one French document must not make all of English art count."""
    english = [Draft(f"d{at}", "", f"art {'son ' * (at < 3)}piece{at}", "en") for at in range(40)]
    french = Draft("autre", "", "le chat dort dans la maison", "fr")
    settings = replace(counting(tmp_path / "north", epsilon=20.0), budget=1000.0)
    with node(settings, *english, french) as opened:
        assert opened.index.snapshot.languages == {"en", "fr"}
        assert count(opened, "art son").count == 3
        assert count(opened, "chats").count == 1, "in its own language"


def test_counts_notice_a_ledger_that_was_put_back(tmp_path):
    settings = counting(tmp_path / "north")
    with node(settings, *texts()) as opened:
        pass
    before = {file.name: file.read_bytes() for file in settings.folder.glob("ledger.db*")}
    with node(settings) as opened:
        count(opened, "word1")
    for file in settings.folder.glob("ledger.db*"):
        file.unlink()
    for name, content in before.items():
        (settings.folder / name).write_bytes(content)
    with pytest.raises(DataError, match="ledger"), node(settings):
        pass


def test_a_peer_without_the_right_learns_nothing(tmp_path):
    import asyncio

    import httpx

    from isthmus.service.limits import message_header
    from isthmus.service.node_api import node_app

    settings = replace(
        counting(tmp_path / "north"), peers={"anonymous": Policy(search=True, snippets=True, counts=True)}
    )
    with node(settings, *texts()) as opened:
        opened._read.set()
        transport = httpx.ASGITransport(node_app(opened), client=("127.0.0.1", 1))

        async def ask():
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1/v1") as client:
                return await client.post("/noised-counts", json={"query": "word1"}, headers=message_header())

        assert asyncio.run(ask()).status_code == 403
        assert opened.ledger.spent("d1") == 0


def test_the_noise_is_that_of_its_epsilon(tmp_path, soak_count):
    """Questions about disjoint sets of one size: the answers spread as two-sided geometric noise does."""
    questions = soak_count(120, 1000)
    drafts = [Draft(f"d{at}", "", f"topic{at // 5} text{at}") for at in range(5 * questions)]
    settings = replace(counting(tmp_path / "north", epsilon=0.5), budget=10_000.0)
    with node(settings, *drafts) as opened:
        for at in range(questions):
            count(opened, f"topic{at}")
        drawn = np.array([answer.count for answer in opened._counts._answers.values()]) - 5
    ratio = np.exp(-0.5)
    assert np.std(drawn) == pytest.approx(np.sqrt(2 * ratio) / (1 - ratio), rel=0.4)
    assert abs(drawn.mean()) < 4 * 2.8 / np.sqrt(questions)
