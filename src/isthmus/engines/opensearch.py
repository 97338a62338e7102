"""An index of OpenSearch or Elasticsearch, over the part of the REST interface that both have.

Candidates are documents with any of the terms, by the engine's own BM25 of each; exact scores decide
afterwards. Whether the engine's terms are those of our analysis is proved by `_mtermvectors`. Shards and
replicas are the engine's business.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from isthmus.encoders import Vectors
from isthmus.engines.remote import (
    BATCH,
    JsonServer,
    Location,
    RemoteDocument,
    RemoteSource,
    document_of,
    json_filter,
    words_of,
)
from isthmus.engines.terms import STOP

HALF = 10.0
"""The score that becomes ½."""
OPEN = "1m"
"""How long a scroll stays open between two pages."""


class OpenSearchEngine:
    """See `CountedEngine`. A filter is a query as JSON; a key is `user:password`, or an API key."""

    noun: ClassVar[str] = "OpenSearch"

    def __init__(self, location: Location) -> None:
        self._at = location
        self._server = JsonServer(location, self.noun, _authorization(location.key))
        self._filter = json_filter(location)
        self._fields = [name for name in (location.title, location.body) if name]

    def _search(self, body: dict[str, Any], **options: Any) -> Any:
        return self._server.ask("POST", f"/{self._at.source}/_search", body, **options)

    def _query(self, *only: Any, should: Sequence[Any] = ()) -> dict[str, Any]:
        matched = {"should": list(should), "minimum_should_match": 1} if should else {}
        return {"query": {"bool": {"filter": [*self._filter, *only], **matched}}}

    def sources(self) -> list[RemoteSource]:
        """Indexes with a text, but the engine's own."""
        sources = []
        for each in self._server.ask("GET", "/_cat/indices", params={"format": "json"}):
            if each["index"].startswith(".") or each.get("status") == "close":
                continue
            (mapping,) = self._server.ask("GET", f"/{each['index']}/_mapping").values()
            kinds = _kinds(mapping["mappings"].get("properties", {}))
            if "text" in kinds.values():
                sources.append(
                    RemoteSource(each["index"], int(each.get("docs.count") or 0), {"_id": "id", **kinds})
                )
        return sources

    def documents(self) -> int:
        """Documents that meet the filter."""
        return int(self._server.ask("POST", f"/{self._at.source}/_count", self._query())["count"])

    def version(self) -> str:
        """How many documents were ever written and removed."""
        done = self._server.ask("GET", f"/{self._at.source}/_stats/indexing")["_all"]["primaries"]["indexing"]
        return f"written {done['index_total'] + done['delete_total']}"

    def search(self, text: str, vector: Vectors, depth: int) -> list[tuple[str, float]]:
        """By the engine's BM25 of any of the words; its scores s become s/(s + 10)."""
        if not words_of(text):
            return []
        match = {"multi_match": {"query": text, "fields": self._fields, "type": "most_fields"}}
        hits = self._search({**self._query(should=[match]), "size": depth, "_source": False})["hits"]["hits"]
        return [(hit["_id"], hit["_score"] / (hit["_score"] + HALF)) for hit in hits]

    def matching(self, weights: Mapping[str, float], depth: int) -> list[str]:
        """Documents with any of the terms; rarity is the engine's own in the place of the weights."""
        terms = [word for word, weight in weights.items() if weight > 0 and not word.startswith(STOP)]
        if not terms:
            return []
        having = [
            {"dis_max": {"tie_breaker": 1.0, "queries": [{"term": {field: word}} for field in self._fields]}}
            for word in terms
        ]
        hits = self._search({**self._query(should=having), "size": depth, "_source": False})["hits"]["hits"]
        return [hit["_id"] for hit in hits]

    def agreement(self, terms: Mapping[str, Sequence[str]]) -> int:
        """Terms of documents that are terms of theirs in the engine too."""
        options = {"positions": False, "offsets": False, "field_statistics": False}
        wanted = [{"_id": id, "fields": self._fields, **options} for id in terms]
        reply = self._server.ask("POST", f"/{self._at.source}/_mtermvectors", {"docs": wanted})
        total = 0
        for each in reply["docs"]:
            fields = each.get("term_vectors", {}).values()
            known = {word for field in fields for word in field["terms"]}
            total += len(known & set(terms[each["_id"]]))
        return total

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """Documents by their ids."""
        documents: dict[str, RemoteDocument] = {}
        for start in range(0, len(ids), BATCH):
            some = self._query({"ids": {"values": list(ids[start : start + BATCH])}})
            for hit in self._search({**some, "size": BATCH, "_source": self._fields})["hits"]["hits"]:
                documents[hit["_id"]] = document_of(hit["_id"], hit["_source"], self._at)
        return documents

    def scan(self) -> Iterator[list[RemoteDocument]]:
        """All documents, as they were when the scroll began."""
        body = {**self._query(), "size": BATCH, "sort": ["_doc"], "_source": self._fields}
        page = self._search(body, params={"scroll": OPEN})
        try:
            while hits := page["hits"]["hits"]:
                yield [document_of(hit["_id"], hit["_source"], self._at) for hit in hits]
                scroll = {"scroll": OPEN, "scroll_id": page["_scroll_id"]}
                page = self._server.ask("POST", "/_search/scroll", scroll)
        finally:
            self._server.ask("DELETE", "/_search/scroll", {"scroll_id": [page["_scroll_id"]]})

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


def _kinds(properties: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Fields of a mapping, those inside others too, and whether they are texts."""
    kinds: dict[str, str] = {}
    for name, each in properties.items():
        if "properties" in each:
            kinds |= _kinds(each["properties"], f"{prefix}{name}.")
        else:
            kinds[prefix + name] = "text" if each.get("type") == "text" else "other"
    return kinds


def _authorization(key: str) -> dict[str, str]:
    if not key:
        return {}
    if ":" in key:
        return {"authorization": f"Basic {b64encode(key.encode()).decode()}"}
    return {"authorization": f"ApiKey {key}"}
