"""A retriever for LangChain.

retriever = IsthmusRetriever(url="http://127.0.0.1:8100", k=5, threshold=0.7)
documents = retriever.invoke("tidal power")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from isthmus.errors import MissingExtra
from isthmus.integrations.passages import Passage, Passages
from isthmus.service import DEFAULT_URL

try:
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
except ImportError:
    raise MissingExtra("langchain", "the retriever for LangChain") from None


class IsthmusRetriever(BaseRetriever):
    """Searches all silos through a broker. A document's metadata has its probability, silo, title and link,
    whether its text was withheld, and the silos that did not answer."""

    url: str = DEFAULT_URL
    key: SecretStr | Path | None = None
    """The API key as text, or the file that has it; by default ISTHMUS_API_KEY of the environment."""
    authority: Path | None = None
    """File of the certificate authority that issued the broker's certificate, if the system does not trust
    it."""
    k: int = Field(10, ge=1, le=100)
    threshold: float = Field(0.0, ge=0, le=1)
    """Minimum probability of a document."""
    silos: list[str] | None = None
    whole: bool = False
    """Whether to open documents where their silos allow it, instead of using snippets."""

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None
    ) -> list[Document]:
        return [_document(passage) for passage in self._passages().find(query, k=k)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None
    ) -> list[Document]:
        return [_document(passage) for passage in await self._passages().afind(query, k=k)]

    def _passages(self) -> Passages:
        key = self.key.get_secret_value() if isinstance(self.key, SecretStr) else self.key
        return Passages(self.url, key, self.authority, self.k, self.threshold, self.silos, self.whole)


def _document(passage: Passage) -> Document:
    return Document(id=passage.address, page_content=passage.text, metadata=passage.metadata)
