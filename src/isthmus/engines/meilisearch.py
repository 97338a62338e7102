"""An index of Meilisearch, found by its own search, whose ranking scores lie between 0 and 1."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from isthmus.encoders import Vectors
from isthmus.engines.remote import (
    BATCH,
    JsonServer,
    Location,
    RemoteDocument,
    RemoteSource,
    document_of,
    kinds_of,
    words_of,
)

_KEY = re.compile("[A-Za-z0-9_-]{1,511}")


class MeilisearchEngine:
    """See `RemoteEngine`. A filter is one of Meilisearch's, over attributes that the index lets filter by;
    a tenant token brings its own."""

    noun: ClassVar[str] = "Meilisearch"

    def __init__(self, location: Location) -> None:
        self._at = location
        headers = {"authorization": f"Bearer {location.key}"} if location.key else {}
        self._server = JsonServer(location, self.noun, headers)
        self._fields = [name for name in (location.id, location.title, location.body) if name]

    def _ask(self, verb: str, body: dict[str, Any]) -> Any:
        only = {"filter": self._at.filter} if self._at.filter else {}
        return self._server.ask("POST", f"/indexes/{self._at.source}/{verb}", {**body, **only})

    def sources(self) -> list[RemoteSource]:
        """Indexes whose documents have a text."""
        sources = []
        for each in self._server.ask("GET", "/indexes", params={"limit": 1000})["results"]:
            page = self._server.ask("GET", f"/indexes/{each['uid']}/documents", params={"limit": 20})
            kinds = kinds_of(page["results"])
            if "text" in kinds.values() and each.get("primaryKey"):
                kinds[each["primaryKey"]] = "id"
                sources.append(RemoteSource(each["uid"], int(page["total"]), kinds))
        return sources

    def documents(self) -> int:
        """Documents that meet the filter."""
        return int(self._ask("documents/fetch", {"limit": 0})["total"])

    def version(self) -> str:
        """How many documents there are."""
        return f"documents {self.documents()}"

    def search(self, text: str, vector: Vectors, depth: int) -> list[tuple[str, float]]:
        """By Meilisearch's order."""
        body = {"q": text, "limit": depth, "showRankingScore": True, "attributesToRetrieve": [self._at.id]}
        hits = self._ask("search", body)["hits"] if words_of(text) else []
        return [(str(hit[self._at.id]), float(hit["_rankingScore"])) for hit in hits]

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """Documents by their keys; what cannot be one is left out."""
        documents: dict[str, RemoteDocument] = {}
        ids = [id for id in ids if _KEY.fullmatch(id)]
        for start in range(0, len(ids), BATCH):
            body = {"ids": list(ids[start : start + BATCH]), "fields": self._fields, "limit": BATCH}
            for each in self._ask("documents/fetch", body)["results"]:
                documents[str(each[self._at.id])] = document_of(each[self._at.id], each, self._at)
        return documents

    def scan(self) -> Iterator[list[RemoteDocument]]:
        """All documents in the order that Meilisearch has them."""
        start, total = 0, 1
        while start < total:
            page = self._ask("documents/fetch", {"offset": start, "limit": BATCH, "fields": self._fields})
            yield [document_of(each[self._at.id], each, self._at) for each in page["results"]]
            start, total = start + BATCH, page["total"]

    def close(self) -> None:
        """Close the connections."""
        self._server.close()
