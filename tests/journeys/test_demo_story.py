"""The story of `isthmus demo`, from outside: what it prints, says and writes."""

from __future__ import annotations

import pytest

from demonstration import demonstrated

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory):
    """The rows, the talk and the folder of the story."""
    return demonstrated(tmp_path_factory.mktemp("story"), "story")


def test_the_systems_come_in_the_order_the_story_says(told) -> None:
    rows = told[0]["rankings"]
    ndcg = {row["run"]: row["value"] for row in rows if row["measure"] == "nDCG@10"}
    assert list(ndcg) == [
        "home silo alone",
        "merged by raw score",
        "merged by RRF",
        "one central index",
        "fused by probability",
    ]
    home, raw, rrf, central, fused = ndcg.values()
    assert home < rrf < raw < central < fused
    assert all(row["low"] < row["value"] < row["high"] for row in rows)
    assert {row["measure"] for row in rows} == {"nDCG@10", "MRR@10"}


def test_it_owns_up_to_the_deal_and_names_the_report(told) -> None:
    _, talk, folder = told
    assert "The deal into silos is ours" in talk
    assert str(folder / "out" / "report.html") in talk


def test_it_fits_80_columns_and_says_nothing_twice(told) -> None:
    _, talk, folder = told
    lines = talk.replace(str(folder), "").splitlines()
    assert max(map(len, lines)) <= 80
    sentences = [line for line in lines if len(line.split()) > 6]
    assert len(set(sentences)) == len(sentences)


def test_the_ways_to_train_stand_side_by_side_and_one_is_the_products(told) -> None:
    _, talk, _ = told
    said = " ".join(talk.split())
    assert "Isthmus uses anchored Global training" in said
    for way in ("Local+", "CS-F-LTR", "all-zero", "averaged labeller"):
        assert way in said


def test_the_report_needs_nothing_else(told) -> None:
    _, _, folder = told
    page = (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert "one central index" in page
    assert "The deal into silos is ours" in page
    assert "Beside that index" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "Pairs across silos" in (folder / "out" / "story.html").read_text(encoding="utf-8")


def test_nothing_is_written_elsewhere(told) -> None:
    _, _, folder = told
    assert [path.name for path in folder.iterdir()] == ["out"]
