"""A collection of Typesense, found by its own search.

Its match scores pack several orders into one number and do not compare between queries. What is taken from
them is the share of the query's words that matched, and of equal shares their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

from isthmus.encoders import Vectors
from isthmus.engines.remote import (
    JsonServer,
    Location,
    RemoteDocument,
    RemoteProblem,
    RemoteSource,
    document_of,
    words_of,
)

PAGE = 250
"""Hits that one search gives at most."""


class TypesenseEngine:
    """See `RemoteEngine`. A filter is a `filter_by`; a scoped search key brings its own."""

    noun: ClassVar[str] = "Typesense"

    def __init__(self, location: Location) -> None:
        self._at = location
        self._server = JsonServer(location, self.noun, {"x-typesense-api-key": location.key})
        self._fields = [name for name in (location.title, location.body) if name]

    def _search(self, **search: Any) -> Any:
        """One search, in the body of a request: an address has no room for many ids."""
        both = " && ".join(f"({part})" for part in (self._at.filter, search.pop("only", "")) if part)
        body = {"collection": self._at.source, "filter_by": both, **search}
        (result,) = self._server.ask("POST", "/multi_search", {"searches": [body]})["results"]
        if "error" in result:
            raise RemoteProblem(self.noun, str(result["error"])[:200])
        return result

    def sources(self) -> list[RemoteSource]:
        """Collections with a text."""
        sources = []
        for each in self._server.ask("GET", "/collections"):
            kinds = {
                field["name"]: "text" if field["type"].startswith("string") else "other"
                for field in each["fields"]
            }
            if "text" in kinds.values():
                sources.append(RemoteSource(each["name"], int(each["num_documents"]), {**kinds, "id": "id"}))
        return sources

    def documents(self) -> int:
        """Documents that meet the filter."""
        return int(self._search(q="*", per_page=0)["found"])

    def version(self) -> str:
        """How many documents there are."""
        return f"documents {self.documents()}"

    def search(self, text: str, vector: Vectors, depth: int) -> list[tuple[str, float]]:
        """By Typesense's order: words that no document has all of are left out one by one."""
        words = words_of(text)
        if not words:
            return []
        hits = self._search(
            q=" ".join(words),
            query_by=",".join(reversed(self._fields)),
            per_page=min(depth, PAGE),
            include_fields="id",
            drop_tokens_threshold=min(depth, PAGE),
            prefix=False,
        )["hits"]
        scored, lowest = [], 1.0
        for rank, hit in enumerate(hits):
            matched = min(int(hit.get("text_match_info", {}).get("tokens_matched", len(words))), len(words))
            lowest = min(lowest, (matched + 1 / (1 + rank)) / (len(words) + 1))
            scored.append((str(hit["document"]["id"]), lowest))
        return scored

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """Documents by their ids."""
        documents: dict[str, RemoteDocument] = {}
        plain = [id for id in ids if "`" not in id]
        for start in range(0, len(plain), PAGE):
            some = ",".join(f"`{id}`" for id in plain[start : start + PAGE])
            for hit in self._search(q="*", only=f"id:[{some}]", per_page=PAGE)["hits"]:
                document = hit["document"]
                documents[document["id"]] = document_of(document["id"], document, self._at)
        return documents

    def scan(self) -> Iterator[list[RemoteDocument]]:
        """All documents, as Typesense exports them; the key needs documents:export."""
        parameters = {"include_fields": ",".join(("id", *self._fields))}
        if self._at.filter:
            parameters["filter_by"] = self._at.filter
        lines = self._server.lines(f"/collections/{self._at.source}/documents/export", params=parameters)
        while batch := list(islice(lines, PAGE)):
            yield [document_of(each["id"], each, self._at) for each in batch]

    def close(self) -> None:
        """Close the connections."""
        self._server.close()
