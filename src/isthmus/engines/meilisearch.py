"""An index of Meilisearch, searched by its own search, whose ranking scores lie between 0 and 1."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from isthmus.encoders import Vectors
from isthmus.engines.engine import ANY, MOST_FACETS, Constraints, Matches
from isthmus.engines.remote import (
    BATCH,
    JsonServer,
    Location,
    RemoteDocument,
    RemoteProblem,
    RemoteSource,
    document_of,
    kinds_of,
    latest,
    names_of,
    sees_unruled,
    type_name,
    words_of,
)
from isthmus.errors import ConfigError

_KEY = re.compile("[A-Za-z0-9_-]{1,511}")


class MeilisearchEngine:
    """See `RemoteEngine`. The filter is an expression of Meilisearch over filterable attributes of the index;
    a tenant token adds its own."""

    noun: ClassVar[str] = "Meilisearch"
    ranks_alone: ClassVar[bool] = True

    def __init__(self, location: Location) -> None:
        self._at = self.location = location
        headers = {"authorization": f"Bearer {location.key}"} if location.key else {}
        self._server = JsonServer(location, self.noun, headers)
        fields = (location.id, location.title, location.body, location.type, location.date, location.allow)
        self._fields = [name for name in fields if name]

    def _ask(self, verb: str, body: dict[str, Any], only: Constraints = ANY) -> Any:
        filters = [f"({each})" for each in (self._at.filter, *self._narrowed(only)) if each]
        both = {"filter": " AND ".join(filters)} if filters else {}
        return self._server.ask("POST", f"/indexes/{self._at.source}/{verb}", {**body, **both})

    def _narrowed(self, only: Constraints) -> list[str]:
        """Filter expressions for documents that meet constraints; dates are numbers."""
        at, filters = self._at, list[str]()
        for types, sign in ((only.types, "IN"), (only.other_types, "NOT IN")):
            values = ", ".join(json.dumps(each, ensure_ascii=False) for each in types)
            filters += [f"{at.type} {sign} [{values}]"] if types else []
        for bound, sign in ((only.since, ">="), (only.until, "<")):
            filters += [] if bound is None else [f"{at.date} {sign} {bound}"]
        if only.readers is not None:
            rule = f"{at.allow} IN {json.dumps(names_of(only.readers), ensure_ascii=False)}"
            if sees_unruled(only.readers, at):
                rule += f" OR {at.allow} NOT EXISTS OR {at.allow} IS EMPTY OR {at.allow} IS NULL"
            filters.append(rule)
        return filters

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

    def check_rules(self) -> None:
        """Raise a ConfigError unless the attribute of principals is filterable."""
        names = self._server.ask("GET", f"/indexes/{self._at.source}/settings/filterable-attributes")
        if self._at.allow not in names and "*" not in names:
            raise ConfigError(
                f"the index does not filter by {self._at.allow}",
                key="engine.allow_field",
                expected="one of its filterableAttributes",
            )

    def documents(self, only: Constraints = ANY) -> int:
        """Count the documents that meet filter and constraints."""
        return int(self._ask("documents/fetch", {"limit": 0}, only)["total"])

    def version(self) -> str:
        """The number of documents."""
        return f"documents {self.documents()}"

    def matches(self, text: str, only: Constraints = ANY) -> Matches:
        """Count what its search finds, at most the index's `maxTotalHits`; by type if that is filterable."""
        words = " ".join(words_of(text))  # without signs that it would interpret: -word, "a phrase"
        if not words:
            return Matches(0, {}, {})
        body: dict[str, Any] = {
            "q": words,
            "page": 1,
            "hitsPerPage": 1,
            "attributesToRetrieve": [self._at.id],
        }
        try:
            result = self._ask("search", {**body, "facets": [self._at.type] if self._at.type else []}, only)
        except RemoteProblem:
            result = self._ask("search", body, only)
        counts: Counter[str] = Counter()
        for value, count in result.get("facetDistribution", {}).get(self._at.type, {}).items():
            counts[type_name(value)] += int(count)
        return Matches(int(result["totalHits"]), dict(counts.most_common(MOST_FACETS)), {})

    def search(
        self, text: str, vector: Vectors, depth: int, only: Constraints = ANY
    ) -> list[tuple[str, float]]:
        """The best documents in Meilisearch's order, with its ranking scores."""
        words = " ".join(words_of(text))
        body = {"q": words, "limit": depth, "showRankingScore": True, "attributesToRetrieve": [self._at.id]}
        hits = self._ask("search", body, only)["hits"] if words else []
        return [(str(hit[self._at.id]), float(hit["_rankingScore"])) for hit in hits]

    def get(self, ids: Sequence[str]) -> dict[str, RemoteDocument]:
        """Documents by their keys; texts that cannot be keys are left out."""
        documents: dict[str, RemoteDocument] = {}
        ids = [id for id in ids if _KEY.fullmatch(id)]
        for start in range(0, len(ids), BATCH):
            body = {"ids": list(ids[start : start + BATCH]), "fields": self._fields, "limit": BATCH}
            for each in self._ask("documents/fetch", body)["results"]:
                documents[str(each[self._at.id])] = document_of(each[self._at.id], each, self._at)
        return documents

    def newest(self, depth: int, only: Constraints = ANY) -> list[str]:
        """The latest documents, sorted here: Meilisearch sorts only by attributes that the index declares
        sortable."""
        return latest(self.scan(only), depth)

    def scan(self, only: Constraints = ANY) -> Iterator[list[RemoteDocument]]:
        """All documents in Meilisearch's own order."""
        start, total = 0, 1
        while start < total:
            page = self._ask(
                "documents/fetch", {"offset": start, "limit": BATCH, "fields": self._fields}, only
            )
            yield [document_of(each[self._at.id], each, self._at) for each in page["results"]]
            start, total = start + BATCH, page["total"]

    def close(self) -> None:
        """Close the connections."""
        self._server.close()
