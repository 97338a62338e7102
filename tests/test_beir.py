"""Collections in BEIR's layout."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from isthmus.errors import DataError
from isthmus.tables import Corpus, Documents, Qrels, Queries, read_corpus_beir, write_corpus_beir

FILES = {
    "corpus.jsonl": '{"_id": "d1", "title": "One", "text": "a"}\n{"_id": "d2", "text": "b"}\n',
    "queries.jsonl": (
        '{"_id": "q1", "text": "x"}\n{"_id": "q2", "text": "y"}\n'
        '{"_id": "q3", "text": "z"}\n{"_id": "q4", "text": "nobody judged"}\n'
    ),
    "qrels/train.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\n",
    "qrels/dev.tsv": "query-id\tcorpus-id\tscore\nq2\td2\t2\nq2\td9\t1\n",
    "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq3\td1\t0\n",
}


@pytest.fixture
def folder(tmp_path):
    def write(changes: dict[str, str | bytes | None] | None = None):
        root = tmp_path / "tiny"
        for name, content in (FILES | (changes or {})).items():
            if content is not None:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return root

    return write


def test_a_folder_is_read(folder):
    corpus = read_corpus_beir(folder())
    assert corpus.name == "tiny"
    assert corpus.documents.ids == ("d1", "d2")
    assert corpus.documents.titles == ("One", "")
    assert corpus.documents.bodies == ("a", "b")
    assert corpus.queries.ids == ("q1", "q2", "q3")
    assert corpus.queries.splits == ("train", "validation", "test")
    assert corpus.qrels.to_dict() == {"q1": {"d1": 1}, "q2": {"d2": 2, "d9": 1}, "q3": {"d1": 0}}
    assert corpus.silos == ("all",)


def test_what_is_tolerated(folder):
    changes = {
        "corpus.jsonl": None,
        "corpus.jsonl.gz": gzip.compress(b'\n{"_id": 7, "title": null, "text": "a", "url": 3}\n\n'),
        "qrels/train.tsv": None,
        "qrels/dev.tsv": None,
        "qrels/test.tsv": "q3 0 7 1",
        "queries.jsonl": '\ufeff{"_id": "q3", "text": "z", "metadata": []}',
    }
    corpus = read_corpus_beir(folder(changes), name="mine")
    assert corpus.name == "mine"
    assert corpus.documents.ids == ("7",)
    assert corpus.queries.splits == ("test",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "this is not JSON"),
        ('{"_id": "d3", "text": "c"', "this is not JSON"),
        ("[" * 100_000, "this is not JSON"),
        ("[1]", "this is not a JSON object"),
        ('{"text": "c"}', "_id is not a text"),
        ('{"_id": true, "text": "c"}', "_id is not a text"),
        ('{"_id": 1.5, "text": "c"}', "_id is not a text"),
        ('{"_id": "", "text": "c"}', "the _id is empty"),
        ('{"_id": "d 3", "text": "c"}', "white space"),
        ('{"_id": "d3"}', "text is not a text"),
        ('{"_id": "d3", "text": null}', "text is not a text"),
        ('{"_id": "d3", "title": 5, "text": "c"}', "title is not a text"),
        ('{"_id": "d3", "text": "\\ud800"}', "text holds half a character"),
        ('{"_id": "d1", "text": "c"}', "id 'd1' appears twice, first in line 1"),
    ],
)
def test_a_bad_line_is_refused(folder, line, words):
    root = folder({"corpus.jsonl": FILES["corpus.jsonl"] + "\n" + line + "\n"})
    with pytest.raises(DataError) as caught:
        read_corpus_beir(root)
    error = caught.value
    assert (error.file, error.line) == (str(root / "corpus.jsonl"), 4)
    assert words in str(error)
    assert error.cure


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"corpus.jsonl": None}, "corpus.jsonl: cannot be read: No such file"),
        ({"queries.jsonl": ""}, "queries.jsonl: the file is empty"),
        ({"queries.jsonl": "\n\n"}, "queries.jsonl: no rows"),
        ({"corpus.jsonl": b'{"_id": "d", "text": "\xe9"}\n'}, "corpus.jsonl:1: byte 0xe9 at offset 22"),
        (
            {"queries.jsonl": FILES["queries.jsonl"] + '{"_id": "q'},
            "queries.jsonl:5: the file ends in the middle",
        ),
        ({"qrels/test.tsv": "q9\td1\t1\n"}, "query 'q9' has judgements but no text"),
        ({"qrels/test.tsv": "q1\td1\t1\n"}, "query 'q1' is judged here and in train.tsv"),
        ({"qrels/test.tsv": "q3\td1\t0.5\n"}, "test.tsv:1: grade '0.5'"),
        ({"qrels/train.tsv": None, "qrels/dev.tsv": None, "qrels/test.tsv": None}, "no judgements"),
    ],
)
def test_a_bad_folder_is_refused(folder, changes, words):
    with pytest.raises(DataError) as caught:
        read_corpus_beir(folder(changes))
    assert words in str(caught.value)


def test_what_was_written_is_read_again(tmp_path):
    corpus = Corpus(
        "small",
        Documents(("d1", "d2"), ("Öne", ""), ("a\nb", ""), np.array([1, 0])),
        Queries(("q1", "q2"), ("x", "y"), np.array([0, 1]), ("train", "validation"), (None, "d1")),
        Qrels.from_dict({"q1": {"d2": 1}, "q2": {"d2": 2, "d1": 0}}),
        ("north", "south"),
    )
    write_corpus_beir(corpus, tmp_path / "small")
    again = read_corpus_beir(tmp_path / "small")
    assert again == corpus
    assert again.name == "small"
    assert sorted(path.name for path in (tmp_path / "small" / "qrels").iterdir()) == ["dev.tsv", "train.tsv"]
    first = json.loads((tmp_path / "small" / "corpus.jsonl").read_text().splitlines()[0])
    assert first == {"_id": "d1", "title": "Öne", "text": "a\nb", "metadata": {"silo": "south"}}


def test_ids_that_judgements_cannot_hold_are_not_written(tmp_path):
    corpus = Corpus(
        "small",
        Documents(("d 1",), ("",), ("a",), np.array([0])),
        Queries(("q1",), ("x",), np.array([0]), ("train",)),
        Qrels.from_dict({"q1": {"d 1": 1}}),
    )
    with pytest.raises(DataError, match="'d 1' cannot be written"):
        write_corpus_beir(corpus, tmp_path / "small")
