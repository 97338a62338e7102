"""The demonstration's chapters on a small world."""

from __future__ import annotations

from isthmus.demo import releases
from isthmus_reproduce import synthetic_text


def test_the_demonstration_books_what_it_releases() -> None:
    corpus = synthetic_text.text(80, 16, 4, seed=0, words=120)
    story = releases.tell(corpus)
    rows = [dict(zip(story.released.header, row, strict=True)) for row in story.released.rows]
    assert [row["ε a document"] for row in rows if row["silo"] == corpus.silos[0]] == [8.0, 1.0]
    assert all(set(row["to"].split(", ")) == set(corpus.silos) - {row["silo"]} for row in rows)
    assert "ε = 9" in story.meaning
    assert "98.9 %" in story.meaning
    assert [each.run for each in story.comparison.evaluations] == [
        releases.HOME,
        releases.PRIVATE,
        releases.EXACT,
    ]
    assert story.plot.svg().startswith("<svg")
