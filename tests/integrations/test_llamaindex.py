"""LlamaIndex: the contract of its retrievers, alone and within a query engine."""

from __future__ import annotations

from llama_index.core import QueryBundle, Settings, get_response_synthesizer
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine

from isthmus.integrations.llamaindex import IsthmusRetriever


async def test_nodes_by_both_ways_and_for_both_kinds_of_queries(url):
    retriever = IsthmusRetriever(url, k=3)
    nodes = retriever.retrieve("tidal power")
    assert [node.score for node in nodes] == [0.9, 0.8, 0.8]
    assert nodes[0].node.node_id == "sure/sure/0"
    assert nodes[0].text == "what 0 says"
    assert nodes[0].metadata["silo"] == "sure"
    assert retriever.retrieve(QueryBundle("tidal power")) == nodes
    assert await retriever.aretrieve("tidal power") == nodes


def test_a_model_reads_texts_with_their_silo_and_probability(url):
    Settings.llm = MockLLM()
    engine = RetrieverQueryEngine(
        IsthmusRetriever(url, k=2, threshold=0.5),
        response_synthesizer=get_response_synthesizer(response_mode="compact"),
    )
    answer = engine.query("tidal power")
    assert len(answer.source_nodes) == 2
    assert "what 0 says" in str(answer)
    assert "probability: 0.9" in str(answer)
    assert "withheld" not in str(answer)
