"""LangChain's own tests of retrievers, and what its documents say."""

from __future__ import annotations

import os

import pytest
from langchain_tests.integration_tests import RetrieversIntegrationTests

from isthmus.errors import Refused
from isthmus.integrations.langchain import IsthmusRetriever


class TestStandard(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self):
        return IsthmusRetriever

    @property
    def retriever_constructor_params(self):
        return {"url": os.environ["ISTHMUS_TEST_BROKER"]}

    @property
    def retriever_query_example(self):
        return "tidal power"


async def test_documents_say_where_they_are_from_and_how_sure_that_is(url):
    retriever = IsthmusRetriever(url=url, threshold=0.5)
    documents = retriever.invoke("tidal power")
    assert [each.metadata["probability"] for each in documents] == [0.9, 0.8, 0.8]
    first = documents[0]
    assert (first.id, first.page_content) == ("sure/sure/0", "what 0 says")
    assert first.metadata["silo"] == "sure"
    assert first.metadata["withheld"] is False
    assert first.metadata["unanswered"] == []
    assert await retriever.ainvoke("tidal power") == documents


async def test_documents_are_opened_where_that_is_asked_for(url):
    found = IsthmusRetriever(url=url, silos=["north"], whole=True, k=1)
    (document,) = found.invoke("lagoon turbines")
    assert document.page_content == "a tidal lagoon stores water behind turbines"
    assert document.metadata["probability"] is None
    assert await found.ainvoke("lagoon turbines") == [document]


def test_a_key_is_not_shown_and_a_wrong_one_is_refused(url):
    retriever = IsthmusRetriever(url=url, key="isthmus_hush_hush")
    assert "hush" not in repr(retriever)
    with pytest.raises(Refused, match="ISTHMUS_API_KEY"):
        retriever.invoke("tidal power")
