"""A component for Haystack.

retriever = IsthmusRetriever("http://127.0.0.1:8100", top_k=5, threshold=0.7)
documents = retriever.run("tidal power")["documents"]
"""

from __future__ import annotations

from typing import Any

from isthmus.errors import MissingExtra
from isthmus.integrations.passages import Passage, Passages
from isthmus.service import DEFAULT_URL

try:
    from haystack import Document, component
    from haystack.utils import Secret
except ImportError:
    raise MissingExtra("haystack", "the component for Haystack") from None


@component
class IsthmusRetriever:
    """Searches all silos through a broker. A document's score is its probability, or its silo's score if it
    has none. Its meta has the silo, title and link, whether its text was withheld, and the silos that did
    not answer."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        key: Secret = Secret.from_env_var("ISTHMUS_API_KEY", strict=False),  # noqa: B008 (immutable)
        authority: str | None = None,
        top_k: int = 10,
        threshold: float = 0.0,
        silos: list[str] | None = None,
        whole: bool = False,
    ) -> None:
        # Haystack saves pipelines by these attribute names, and the key as the name of its variable
        self.url, self.key, self.authority, self.silos = url, key, authority, silos
        self.top_k, self.threshold, self.whole = top_k, threshold, whole

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, Any]:
        """Search all silos, or those named by a filter on `meta.silo`."""
        return {"documents": list(map(_document, self._passages(filters).find(query, k=top_k)))}

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, Any]:
        """Like `run`, without blocking."""
        passages = await self._passages(filters).afind(query, k=top_k)
        return {"documents": list(map(_document, passages))}

    def _passages(self, filters: dict[str, Any] | None) -> Passages:
        silos = self.silos if not filters else _silos_of(filters)
        key = self.key.resolve_value()
        return Passages(self.url, key, self.authority, self.top_k, self.threshold, silos, self.whole)


def _silos_of(filters: dict[str, Any]) -> list[str]:
    operator, value = filters.get("operator"), filters.get("value")
    if filters.get("field") != "meta.silo" or operator not in ("==", "in"):
        raise ValueError("filters: meta.silo alone, with == or in; the query language has type: and after:")
    return [str(value)] if operator == "==" else [str(each) for each in value or ()]


def _document(passage: Passage) -> Document:
    return Document(id=passage.address, content=passage.text, meta=passage.metadata, score=passage.score)
