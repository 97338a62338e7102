"""An index of OpenSearch or Elasticsearch, by the part of the REST interface that both share.

Candidates are documents with any of the terms, ranked by the engine's own BM25; exact scores decide
afterwards. `_mtermvectors` shows whether the engine's terms are those of our analysis. Shards and replicas
are left to the engine.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from isthmus.encoders import Vectors
from isthmus.engines.engine import ANY, MOST_FACETS, Constraints, Matches
from isthmus.engines.remote import (
    BATCH,
    JsonServer,
    Location,
    RemoteDocument,
    RemoteSource,
    document_of,
    json_filter,
    names_of,
    sees_unruled,
    type_name,
    words_of,
)
from isthmus.engines.terms import STOP
from isthmus.errors import ConfigError

MILLI = 1_000
"""Ticks per second of numeric dates: they are in milliseconds."""
HALF = 10.0
"""The engine's score that becomes ½."""
OPEN = "1m"
"""Time for which a scroll stays open between two pages."""


class OpenSearchEngine:
    """See `CountedEngine`. The filter is a query as JSON; the key is `user:password`, or an API key."""

    noun: ClassVar[str] = "OpenSearch"
    ranks_alone: ClassVar[bool] = False

    def __init__(self, location: Location) -> None:
        self._at = self.location = location
        self._server = JsonServer(location, self.noun, _authorization(location.key))
        self._filter = json_filter(location)
        self._fields = [name for name in (location.title, location.body) if name]
        others = (location.type, location.date, location.allow)
        self._read = [*self._fields, *(name for name in others if name)]

    def _search(self, body: dict[str, Any], **options: Any) -> Any:
        return self._server.ask("POST", f"/{self._at.source}/_search", body, **options)

    def _query(self, *clauses: Any, should: Sequence[Any] = (), only: Constraints = ANY) -> dict[str, Any]:
        matched = {"should": list(should), "minimum_should_match": 1} if should else {}
        filters = [*self._filter, *clauses]
        bounds = {name: 1000 * at for name, at in (("gte", only.since), ("lt", only.until)) if at is not None}
        if bounds:
            filters.append({"range": {self._at.date: {**bounds, "format": "epoch_millis"}}})
        if only.types:
            filters.append({"bool": {"should": self._of_types(only.types), "minimum_should_match": 1}})
        if only.readers is not None:
            named: list[Any] = [{"terms": {self._at.allow: names_of(only.readers)}}]
            if sees_unruled(only.readers, self._at):  # values too long to be indexed count as well
                stated = [{"exists": {"field": self._at.allow}}, {"term": {"_ignored": self._at.allow}}]
                named.append({"bool": {"must_not": stated}})
            filters.append({"bool": {"should": named, "minimum_should_match": 1}})
        without = {"must_not": self._of_types(only.other_types)} if only.other_types else {}
        return {"query": {"bool": {"filter": filters, **without, **matched}}}

    def _of_types(self, types: Sequence[str]) -> list[Any]:
        return [{"term": {self._at.type: {"value": each, "case_insensitive": True}}} for each in types]

    def sources(self) -> list[RemoteSource]:
        """Indexes with a text field, except the engine's own."""
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

    def check_rules(self) -> None:
        """Raise a ConfigError unless the field of principals has type keyword: others would be compared word
        by word."""
        for mapping in self._server.ask("GET", f"/{self._at.source}/_mapping").values():
            properties, kind = mapping["mappings"].get("properties", {}), {}
            for part in self._at.allow.split("."):
                kind = properties.get(part, {})
                properties = kind.get("properties") or kind.get("fields") or {}
            if kind.get("type") != "keyword":
                raise ConfigError(
                    f"{self._at.allow} is {kind.get('type', 'no field')}",
                    key="engine.allow_field",
                    expected="a field of type keyword",
                )

    def documents(self, only: Constraints = ANY) -> int:
        """Count the documents that meet filter and constraints."""
        return int(self._server.ask("POST", f"/{self._at.source}/_count", self._query(only=only))["count"])

    def version(self) -> str:
        """The number of documents ever written and removed."""
        done = self._server.ask("GET", f"/{self._at.source}/_stats/indexing")["_all"]["primaries"]["indexing"]
        return f"written {done['index_total'] + done['delete_total']}"

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints = ANY
    ) -> list[tuple[str, float]]:
        """The best documents by the engine's BM25 of any of the words; a score s becomes s/(s + 10)."""
        hits = self._hits(self._of_text(text), depth, only)
        return [(hit["_id"], hit["_score"] / (hit["_score"] + HALF)) for hit in hits]

    def matching(self, weights: Mapping[str, float], depth: int, only: Constraints = ANY) -> list[str]:
        """Documents with any of the terms, ranked with the engine's own term weights instead of these."""
        terms = [word for word, weight in weights.items() if weight > 0]
        return [hit["_id"] for hit in self._hits(self._of_terms(terms), depth, only)]

    def matches(self, text: str, only: Constraints = ANY) -> Matches:
        """Count the documents that `search` would find."""
        return self._matched(self._of_text(text), only)

    def having(self, terms: Sequence[str], only: Constraints = ANY) -> Matches:
        """Count the documents with any of the terms."""
        return self._matched(self._of_terms(terms), only)

    def _of_text(self, text: str) -> list[Any]:
        words = " ".join(words_of(text))
        match = {"query": words, "fields": self._fields, "type": "most_fields"}
        return [{"multi_match": match}] if words else []

    def _of_terms(self, terms: Sequence[str]) -> list[Any]:
        return [
            {"dis_max": {"tie_breaker": 1.0, "queries": [{"term": {field: word}} for field in self._fields]}}
            for word in terms
            if not word.startswith(STOP)
        ]

    def _hits(self, should: Sequence[Any], depth: int, only: Constraints) -> list[Any]:
        if not should:
            return []
        body = {**self._query(should=should, only=only), "size": depth, "_source": False}
        hits: list[Any] = self._search(body)["hits"]["hits"]
        return hits

    def _matched(self, should: Sequence[Any], only: Constraints) -> Matches:
        if not should:
            return Matches(0, {}, {})
        aggregations: dict[str, Any] = {}
        if self._at.type:
            aggregations["types"] = {"terms": {"field": self._at.type, "size": MOST_FACETS}}
        if self._at.date:
            by_year = {"calendar_interval": "year", "format": "yyyy", "min_doc_count": 1}
            aggregations["years"] = {"date_histogram": {"field": self._at.date, **by_year}}
        body = {**self._query(should=should, only=only), "size": 0, "track_total_hits": True}
        reply = self._search(body | ({"aggs": aggregations} if aggregations else {}))
        groups = {name: each["buckets"] for name, each in reply.get("aggregations", {}).items()}
        types: Counter[str] = Counter()
        for each in groups.get("types", ()):
            types[type_name(each["key"])] += int(each["doc_count"])
        years = Counter(
            {int(each["key_as_string"]): int(each["doc_count"]) for each in groups.get("years", ())}
        )
        total = int(reply["hits"]["total"]["value"])
        return Matches(total, dict(types.most_common(MOST_FACETS)), dict(years.most_common(MOST_FACETS)))

    def agreement(self, terms: Mapping[str, Sequence[str]]) -> int:
        """How many of the documents' terms the engine has for the same documents."""
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
            for hit in self._search({**some, "size": BATCH, "_source": self._read})["hits"]["hits"]:
                documents[hit["_id"]] = document_of(hit["_id"], hit["_source"], self._at, ticks=MILLI)
        return documents

    def newest(self, depth: int, only: Constraints = ANY) -> list[str]:
        """Ids of the documents with the latest dates."""
        order = {"sort": [{self._at.date: {"order": "desc", "missing": "_last"}}]} if self._at.date else {}
        body = {**self._query(only=only), "size": depth, "_source": False, **order}
        return [hit["_id"] for hit in self._search(body)["hits"]["hits"]]

    def scan(self, only: Constraints = ANY) -> Iterator[list[RemoteDocument]]:
        """Documents as they were when the scroll began."""
        body = {**self._query(only=only), "size": BATCH, "sort": ["_doc"], "_source": self._read}
        page = self._search(body, params={"scroll": OPEN})
        try:
            while hits := page["hits"]["hits"]:
                yield [document_of(hit["_id"], hit["_source"], self._at, ticks=MILLI) for hit in hits]
                scroll = {"scroll": OPEN, "scroll_id": page["_scroll_id"]}
                page = self._server.ask("POST", "/_search/scroll", scroll)
        finally:
            self._server.ask("DELETE", "/_search/scroll", {"scroll_id": [page["_scroll_id"]]})

    def close(self) -> None:
        """Close the connections."""
        self._server.close()


def _kinds(properties: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The fields of a mapping, nested ones as `a.b`, and whether they are texts."""
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
