"""A retriever for LlamaIndex.

retriever = IsthmusRetriever("http://127.0.0.1:8100", k=5, threshold=0.7)
nodes = retriever.retrieve("tidal power")
"""

from __future__ import annotations

from typing import Any

from isthmus.errors import MissingExtra
from isthmus.integrations.passages import Passage, Passages
from isthmus.service import DEFAULT_URL

try:
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ImportError:
    raise MissingExtra("llamaindex", "the retriever for LlamaIndex") from None


class IsthmusRetriever(BaseRetriever):
    """Searches all silos through a broker. A node's score is its probability, or its silo's score if it has
    none. Its metadata has the silo, title and link, whether its text was withheld, and the silos that did
    not answer.

    Options are those of `Passages`: key, authority, k, threshold, silos, whole.
    """

    def __init__(self, url: str = DEFAULT_URL, *, callback_manager: Any = None, **options: Any) -> None:
        self.passages = Passages(url, **options)
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [_node(passage) for passage in self.passages.find(query_bundle.query_str)]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [_node(passage) for passage in await self.passages.afind(query_bundle.query_str)]


def _node(passage: Passage) -> NodeWithScore:
    node = TextNode(id_=passage.address, text=passage.text, metadata=passage.metadata)
    node.excluded_embed_metadata_keys = node.excluded_llm_metadata_keys = [
        "unanswered",
        "withheld",
        "whole",
        "score",
    ]
    return NodeWithScore(node=node, score=passage.score)
