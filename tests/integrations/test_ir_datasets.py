"""Collections of ir_datasets by name: one that this test registers, since nothing is downloaded."""

from __future__ import annotations

from typing import NamedTuple

import ir_datasets
import pytest
from ir_datasets.formats import BaseDocs, BaseQueries, TrecQrels, TsvDocs, TsvQueries
from ir_datasets.formats.trec import TitleUrlTextDoc, TrecQuery
from ir_datasets.util import StringFile

from isthmus import BM25, DataError, evaluate, load

DOCS = "d1\ta green pear\nd2\ta red apple\n"
QUERIES = "q1\tgreen pears\nq2\tapples\n"
QRELS = "q1 0 d1 2\nq1 0 d2 0\nq2 0 d2 1\n"


@pytest.fixture(scope="module", autouse=True)
def registered():
    parts = TsvDocs(StringFile(DOCS)), TsvQueries(StringFile(QUERIES)), TrecQrels(StringFile(QRELS), {})
    ir_datasets.registry.register("fruit/dev", ir_datasets.Dataset(*parts))
    ir_datasets.registry.register("fruit", ir_datasets.Dataset(*parts[:2]))


def test_a_collection_by_its_name():
    corpus = load("irds:fruit/dev")
    assert corpus.documents.ids == ("d1", "d2")
    assert corpus.documents.bodies == ("a green pear", "a red apple")
    assert set(corpus.queries.splits) == {"validation"}
    run = BM25().index(corpus.documents).search(corpus.queries, k=2)
    assert "1.0" in str(evaluate(corpus.qrels, run, ["RR"]))


class Topics(BaseQueries):
    """Of TREC, as ir_datasets has them."""

    def queries_iter(self):
        yield TrecQuery("q1", "pears", "What colour are pears?", "Relevant is what names a colour.")


class Pages(BaseDocs):
    """Documents with titles."""

    def docs_iter(self):
        yield TitleUrlTextDoc("d1", "Pears", "https://pears.example", "Pears are green.")
        yield Trial("d2", "Apples", "https://apples.example", "fruit", "Apples are red.")


class Trial(NamedTuple):
    """A document whose text is in several fields."""

    doc_id: str
    title: str
    url: str
    condition: str
    summary: str


def test_a_topic_is_searched_by_its_title_and_a_documents_title_is_in_no_body():
    parts = Topics(), Pages(), TrecQrels(StringFile("q1 0 d1 1\n"), {})
    ir_datasets.registry.register("topics/test", ir_datasets.Dataset(*parts))
    corpus = load("irds:topics/test")
    assert corpus.queries.texts == ("pears",)
    assert corpus.documents.titles == ("Pears", "Apples")
    assert corpus.documents.bodies == ("Pears are green.", "fruit\nApples are red.")


@pytest.mark.parametrize(
    ("name", "said"), [("fruit/def", "did you mean irds:fruit/dev"), ("fruit", "fruit has no qrels")]
)
def test_what_cannot_be_had_is_said(name, said):
    with pytest.raises(DataError, match=said):
        load(f"irds:{name}")
