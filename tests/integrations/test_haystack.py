"""Haystack: a component in pipelines, blocking and not, saved and loaded, and among other retrievers."""

from __future__ import annotations

import pytest
from haystack import Document, Pipeline
from haystack.components.builders import PromptBuilder
from haystack.components.retrievers import InMemoryBM25Retriever, MultiRetriever
from haystack.core.serialization import component_from_dict, component_to_dict
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret

from isthmus.integrations.haystack import IsthmusRetriever

MODULE = "isthmus.integrations.haystack"
TEMPLATE = "{% for each in documents %}{{ each.content }} ({{ each.meta.silo }}) {% endfor %}"


def pipeline(url):
    made = Pipeline()
    made.add_component("silos", IsthmusRetriever(url, top_k=2, threshold=0.5))
    made.add_component("prompt", PromptBuilder(TEMPLATE, required_variables=["documents"]))
    made.connect("silos.documents", "prompt.documents")
    return made


def test_a_pipeline_is_the_same_after_it_was_saved(url):
    made = pipeline(url)
    saved = made.dumps()
    assert "ISTHMUS_API_KEY" in saved
    for each in (made, Pipeline.loads(saved, allowed_modules=[MODULE])):
        result = each.run({"silos": {"query": "tidal power"}})
        assert result["prompt"]["prompt"] == "what 0 says (sure) what 1 says (sure) "


async def test_a_pipeline_that_does_not_block(url):
    result = await pipeline(url).run_async({"silos": {"query": "tidal power", "top_k": 1}})
    assert result["prompt"]["prompt"] == "what 0 says (sure) "


def test_a_component_as_a_dictionary_has_no_key(url):
    retriever = IsthmusRetriever(url, Secret.from_env_var("OTHER"), threshold=0.7, silos=["sure"], whole=True)
    data = component_to_dict(retriever, "silos")
    again = component_from_dict(IsthmusRetriever, data, "silos")
    assert component_to_dict(again, "silos") == data
    assert again.key == retriever.key
    with pytest.raises(ValueError, match="Cannot serialize"):
        component_to_dict(IsthmusRetriever(url, Secret.from_token("hush")), "silos")


def test_filters_of_silos_and_no_others(url):
    retriever = IsthmusRetriever(url)
    only = {"field": "meta.silo", "operator": "in", "value": ["north"]}
    documents = retriever.run("tidal power", filters=only)["documents"]
    assert {each.meta["silo"] for each in documents} == {"north"}
    assert all(isinstance(each, Document) for each in documents)
    with pytest.raises(ValueError, match=r"meta\.silo"):
        retriever.run("tidal power", filters={"field": "meta.date", "operator": ">", "value": "2026"})


def test_it_is_a_text_retriever_among_others(url):
    store = InMemoryDocumentStore()
    store.write_documents([Document(content="power of tidal flats")])
    both = MultiRetriever(
        retrievers={"own": InMemoryBM25Retriever(store), "silos": IsthmusRetriever(url, top_k=2)}
    )
    contents = {each.content for each in both.run("tidal power")["documents"]}
    assert contents == {"power of tidal flats", "what 0 says", "what 1 says"}
