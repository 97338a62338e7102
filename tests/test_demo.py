"""The demonstration's chapters on a small world, and what it says of a federation."""

from __future__ import annotations

import json
import shlex
import signal
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from isthmus.cli import demo as command
from isthmus.corpora import load
from isthmus.demo import ending, federation, releases
from isthmus.demo.federation import QUERIES, SearchOutcome
from isthmus.demo.story import Story, save_report
from isthmus.evaluation import compare
from isthmus.report import Table
from isthmus.retrieval import BM25
from isthmus.service.local import free_ports
from isthmus.service.scaffold import create_federation
from isthmus_reproduce import synthetic_text


def test_the_demonstration_books_what_it_releases() -> None:
    corpus = synthetic_text.text(80, 16, 4, seed=0, words=120)
    story = releases.tell(corpus)
    rows = [dict(zip(story.released.header, row, strict=True)) for row in story.released.rows]
    assert [row["ε a document"] for row in rows if row["silo"] == corpus.silos[0]] == [8.0, 1.0]
    assert {row["to"] for row in rows} == {"3 others"}
    assert "ε = 9" in story.meaning
    assert "98.9 %" in story.meaning
    assert [each.run for each in story.comparison.evaluations] == [
        releases.HOME,
        releases.PRIVATE,
        releases.EXACT,
    ]
    assert story.plot.svg().startswith("<svg")


@pytest.fixture(scope="module")
def world():
    return load("pydocs")


def test_nobody_judges_a_test_query_and_a_querys_own_page_is_right(world) -> None:
    judged = federation.judgements_of(world, "train", "validation")
    texts = {each.query for each in judged}
    assert texts.isdisjoint(world.split("test").queries.texts)
    assert len(texts) == len(world.split("train").queries) + len(world.split("validation").queries)
    own = dict(zip(world.queries.texts, world.queries.own, strict=True))
    assert {
        query for query, document in ((e.query, e.document) for e in judged) if own[query] == document
    } == texts
    assert all(each.relevant for each in judged)


def test_queries_to_try_find_what_is_right_in_three_silos(world) -> None:
    assert set(QUERIES) <= set(world.queries.texts) - set(world.split("test").queries.texts)
    run = BM25().index(world.documents).search(world.queries, 10)
    relevant = federation.relevant_of(world)
    silo_of = dict(zip(world.documents.ids, world.documents.silos.tolist(), strict=True))
    for text in QUERIES:
        query = world.queries.ids[world.queries.texts.index(text)]
        assert len({silo_of[hit] for hit in run[query].documents.tolist() if hit in relevant[query]}) >= 3


def outcome(*, adopted: bool = True) -> SearchOutcome:
    """100 queries of which 60 gain .1, 30 stay and 10 lose .3; 1,000 hits at .8, of which 80 % are right."""
    before = np.full(100, 0.5)
    after = before + np.repeat([0.1, 0.0, -0.3], [60, 30, 10])
    record = {
        "adopted": adopted,
        "kind": "linear" if adopted else "baseline",
        "best": "linear",
        "why": "reasons",
    }
    departed = [
        {"silo": silo, "kind": kind, "guarantee": guarantee, "items": items}
        for silo in ("arrays", "functions", "statistics", "signal")
        for kind, guarantee, items in (
            ("sums", "ε = 1", 1_000),
            ("sums", "no DP guarantee", 7),
            ("snippets", "no DP guarantee", 30),
            ("snippets", "no DP guarantee", 4),
        )
    ]
    return SearchOutcome(
        documents={"arrays": 4_000, "functions": 500, "statistics": 60, "signal": 1},
        judgements=5_012,
        before=before.tolist(),
        after=after.tolist() if adopted else before.tolist(),
        groups=list(range(100)),
        probabilities=[0.8] * 1_000,
        right=[at % 5 > 0 for at in range(1_000)],
        hit_groups=[at // 10 for at in range(1_000)],
        single=[[0.5, float(at % 4 > 0)] for at in range(1_000)],
        learned={
            "version": "1",
            "record": {**record, "queries": 937, "queries_needed": None if adopted else 2_000},
        },
        departures=departed,
        nobodys={"query": "garage", "probability": 0.04, "hits": 10, "unlike": True},
    )


def words(section) -> str:
    return " ".join(map(str, section.parts))


def test_the_end_says_what_learning_gained_and_whom_it_hurt() -> None:
    gained, honest, nobodys, left = ending.sections(outcome())
    assert "together raised nDCG@10" in words(gained)
    assert "on 100 queries that nobody judged: 0.500 before, 0.530 after, +0.030 (95 % interval" in words(
        gained
    )
    assert "60 queries gained, 10 got worse, 10 of them by more than 0.2" in words(gained)
    assert "“linear” was adopted: reasons" in words(gained)
    assert "Of 1,000 hits shown" in words(honest)
    assert "80 % were right (95 % interval" in words(honest)
    assert "), which agrees. Over all" in words(honest)
    assert "0.000 on average (ECE over tenths of the probability)" in words(honest)
    assert "1,000 hits shown, probabilities are off by 0.000" in words(honest)
    assert "not told from perfect. The same queries, each in one of the silos alone" in words(honest)
    assert "of 1,000 hits probabilities are off by 0.250" in words(honest)
    assert words(honest).endswith("worse than perfect.")
    assert "a probability of 0.04; the answer says that no judged query is like this one" in words(nobodys)
    (table,) = (part for part in left.parts if isinstance(part, Table))
    assert table.rows == (
        ("how common words are", "ε = 1", *[1_000] * 4),
        ("snippets", "no DP guarantee", *[34] * 4),
        ("sums over judged queries", "no DP guarantee", *[7] * 4),
    )
    assert max(map(len, str(table).splitlines())) <= 80


def test_learning_that_gained_nothing_says_so() -> None:
    gained, *_ = ending.sections(outcome(adopted=False))
    assert "Learning gained nothing yet" in words(gained)
    assert (
        "the best model was “linear”, and was not adopted: reasons. With 2,000 judged queries it might be"
        in words(gained)
    )
    assert not ending.figures(outcome(adopted=False))["adopted"]


def test_a_gain_that_is_none_is_not_called_one() -> None:
    worse = replace(outcome(), after=(np.full(100, 0.5) - 0.1).tolist())
    assert "together lowered nDCG@10" in words(ending.sections(worse)[0])
    even = replace(outcome(), after=(np.full(100, 0.5) + np.tile([0.12, -0.1], 50)).tolist())
    assert "did not clearly change nDCG@10" in words(ending.sections(even)[0])


def test_promises_that_are_not_held_are_told() -> None:
    _, honest, *_ = ending.sections(replace(outcome(), right=[at % 2 > 0 for at in range(1_000)]))
    assert "50 % were right" in words(honest)
    assert "): fewer than their probabilities say. Over all" in words(honest)
    _, honest, *_ = ending.sections(replace(outcome(), right=[at % 10 > 0 for at in range(1_000)]))
    assert "): more than their probabilities say. Over all" in words(honest)
    assert "worse than perfect" in words(honest)
    _, honest, *_ = ending.sections(replace(outcome(), probabilities=[0.3] * 1_000))
    assert "No hit was shown with a probability from 0.75 to 0.85" in words(honest)


def test_the_report_begins_with_the_result(tmp_path, world) -> None:
    run = BM25(name="all").index(world.documents).search(world.queries, 10)
    story = Story(compare(world.qrels, {"all": run}, ("nDCG@10",)), ())
    assert save_report(tmp_path / "new" / "report.html", story, outcome()) == [
        tmp_path / "new" / "report.html",
        tmp_path / "new" / "story.html",
    ]
    page = (tmp_path / "new" / "report.html").read_text()
    order = (
        "raised nDCG@10",
        "What was searched",
        "What learning gained",
        "what left each silo",
        "honest 0.8",
    )
    assert [page.index(text) for text in order] == sorted(page.index(text) for text in order)
    assert "10 got worse" in page
    assert "4,561 documents in 4 silos" in page
    assert "arrays (4,000)" in page
    assert page.count("<svg") == 2


def test_a_federation_is_started_again_only_if_it_is_whole_and_of_this_code(tmp_path) -> None:
    def read(stamp="now", port=None):
        return federation.read_outcome(tmp_path / "new", stamp, port, 1)

    first = free_ports(2)
    create_federation(tmp_path / "new", ["north"], port=first)
    assert read() is None, "it was not finished"
    (tmp_path / "new" / federation.OUTCOME).write_text(json.dumps({"stamp": "now", **asdict(outcome())}))
    assert read() == outcome()
    assert read(port=first) == outcome()
    assert read(port=first + 5) is None
    assert read(stamp="then") is None
    (tmp_path / "new" / federation.OUTCOME).write_text('{"stamp": "now", "odd": 1}')
    assert read() is None


def test_the_command_to_search_can_be_pasted_from_a_narrow_terminal(monkeypatch, capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("isthmus.demo.open_page", lambda link: None)
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    monkeypatch.setattr("sys.argv", ["bin/isthmus"])
    url, key = "http://127.0.0.1:8640", "out/demo/federation/broker/admin.key"
    command._serve(SimpleNamespace(link=f"{url}/#/search", url=url, key=key, check_serving=interrupted))
    pasted = capsys.readouterr().err.partition("or with\n")[2].partition("\nCtrl-C")[0]
    assert max(map(len, pasted.splitlines())) <= 60
    words = shlex.split(pasted.replace("\\\n", ""))
    assert words[1:] == ["search", QUERIES[0], "--broker", url, "--key", key]
