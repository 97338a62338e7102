"""Query files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from isthmus.errors import DataError
from isthmus.tables import read_queries


def test_tab_separated_queries(tmp_path: Path) -> None:
    (tmp_path / "topics.txt").write_text("7\tdo goldfish grow\r\n\n8\twhat is\twifi", encoding="utf-8")
    queries = read_queries(tmp_path / "topics.txt")
    assert queries.ids == ("7", "8")
    assert queries.texts == ("do goldfish grow", "what is\twifi")
    assert queries.splits == ("test", "test")


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    line = b'{"_id": "q1", "text": "a \xc3\xa9 b", "metadata": {}}\n'
    file = tmp_path / f"queries{suffix}"
    file.write_bytes(gzip.compress(line) if suffix.endswith(".gz") else line)
    queries = read_queries(file)
    assert (queries.ids, queries.texts) == (("q1",), ("a é b",))


@pytest.mark.parametrize(
    ("text", "line"),
    [("q1 no tab\n", 1), ("q1\ta\nq 2\tb\n", 2), ("q1\t\n", 1), ("q1\ta\nq1\tb\n", 2), ("\ttext\n", 1)],
)
def test_a_wrong_line_is_named(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "q.tsv").write_text(text)
    with pytest.raises(DataError) as told:
        read_queries(tmp_path / "q.tsv")
    assert told.value.line == line


def test_blank_lines_only(tmp_path: Path) -> None:
    (tmp_path / "q.tsv").write_text("\n\n")
    with pytest.raises(DataError, match="no rows"):
        read_queries(tmp_path / "q.tsv")
